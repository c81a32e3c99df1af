package consullock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/consullock"
)

func ExampleNew() {
	client, err := api.NewClient(api.DefaultConfig())
	if err != nil {
		log.Fatal(err)
	}
	backend, err := consullock.New(client, nil)
	if err != nil {
		log.Fatal(err)
	}
	locker, err := dlock.New(backend, &dlock.Options{TTL: 10 * time.Second})
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
