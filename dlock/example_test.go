package dlock_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/memlock"
)

func ExampleLocker_Acquire() {
	ctx := context.Background()
	locker, err := dlock.New(memlock.New(), &dlock.Options{TTL: 10 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = locker.Close() }()

	h, err := locker.Acquire(ctx, "billing/acme")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("send with every write: token", h.Fence())
	if err := h.Release(ctx); err != nil {
		log.Fatal(err) // dlock.ErrLost: the work may have overlapped with another holder's
	}
	// Output: send with every write: token 1
}

func ExampleLocker_Do() {
	locker, err := dlock.New(memlock.New(), nil)
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = locker.Close() }()

	err = locker.Do(context.Background(), "billing/acme", func(ctx context.Context, h *dlock.Handle) error {
		fmt.Println("working with token", h.Fence())
		return ctx.Err() // ctx ends when the lease is lost
	})
	fmt.Println(err)
	// Output:
	// working with token 1
	// <nil>
}

func ExampleRenew() {
	ctx := context.Background()
	locker, err := dlock.New(memlock.New(), &dlock.Options{
		TTL:   10 * time.Second,
		Renew: dlock.Renew{Every: 3 * time.Second, MaxHold: 5 * time.Minute},
	})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = locker.Close() }()

	h, err := locker.Acquire(ctx, "report")
	if err != nil {
		log.Fatal(err)
	}
	// The lease now lasts until it is released, for five minutes and ten seconds at most. By hand:
	fmt.Println(h.Renew(ctx))
	fmt.Println(h.Release(ctx))
	// Output:
	// <nil>
	// <nil>
}

func ExampleOptions_reentrant() {
	ctx := context.Background()
	locker, err := dlock.New(memlock.New(), &dlock.Options{TTL: 10 * time.Second, Reentrant: true})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = locker.Close() }()

	outer, err := locker.Acquire(ctx, "account/7")
	if err != nil {
		log.Fatal(err)
	}
	inner, err := locker.Acquire(outer.Context(), "account/7") // the context carries the lock
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("same token:", inner.Fence() == outer.Fence())
	fmt.Println(inner.Release(ctx)) // still locked
	fmt.Println(outer.Release(ctx)) // free
	// Output:
	// same token: true
	// <nil>
	// <nil>
}
