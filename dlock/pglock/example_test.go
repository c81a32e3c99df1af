package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/pglock"
)

func ExampleNew() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, "postgres://localhost/app")
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	if err := pglock.CreateSchema(ctx, pool, nil); err != nil { // or run pglock.Schema with your migrations
		log.Fatal(err)
	}
	backend, err := pglock.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	locker, err := dlock.New(backend, &dlock.Options{TTL: 10 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = locker.Close() }()

	h, err := locker.Acquire(ctx, "billing/acme")
	if err != nil {
		log.Fatal(err)
	}
	_, err = locker.TryAcquire(ctx, "billing/acme")
	fmt.Println(h.Fence(), errors.Is(err, dlock.ErrHeld), h.Release(ctx))
}
