package redlock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redlock"
)

func ExampleNew() {
	var nodes []redis.UniversalClient
	for range 3 {
		m, err := miniredis.Run() // stands for a real Redis
		if err != nil {
			log.Fatal(err)
		}
		defer m.Close()
		client := redis.NewClient(&redis.Options{Addr: m.Addr(), ContextTimeoutEnabled: true})
		defer func() { _ = client.Close() }()
		nodes = append(nodes, client)
	}
	// The default is at most a second; a busy machine may need longer.
	backend, err := redlock.New(nodes, &redlock.Options{NodeTimeout: 10 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	locker, err := dlock.New(backend, &dlock.Options{TTL: 10 * time.Minute})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = locker.Close() }()

	ctx := context.Background()
	h, err := locker.Acquire(ctx, "billing/acme")
	if err != nil {
		log.Fatal(err)
	}
	_, err = locker.TryAcquire(ctx, "billing/acme")
	fmt.Println(h.Fence(), errors.Is(err, dlock.ErrHeld), h.Release(ctx))
	// Output: 1 true <nil>
}
