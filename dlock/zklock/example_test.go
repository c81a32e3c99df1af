package zklock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/zklock"
)

func ExampleNew() {
	const ttl = 10 * time.Second
	client, _, err := zk.Connect([]string{"zk1:2181", "zk2:2181", "zk3:2181"}, 2*ttl) // half of it is the longest TTL
	if err != nil {
		log.Fatal(err)
	}
	defer client.Close()
	backend, err := zklock.New(client, nil)
	if err != nil {
		log.Fatal(err)
	}
	locker, err := dlock.New(backend, &dlock.Options{TTL: ttl})
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
}
