package pgstore_test

import (
	"context"
	"errors"
	"log"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/pgstore"
)

var (
	ctx   = context.Background()
	pool  *pgxpool.Pool // pgxpool.New(ctx, "postgres://localhost/app"), with pgstore.Schema among its migrations
	token uint64        // from the lock's grant
)

// The business write commits or aborts with the fence.
func ExampleGuard() {
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := pgstore.Guard(ctx, tx, "account/acme", resource.Fence{Token: token, Seq: 1}); err != nil {
			return err // tx is rolled back
		}
		_, err := tx.Exec(ctx, "UPDATE account SET balance = balance - 10 WHERE name = 'acme'")
		return err
	})
	if stale, ok := errors.AsType[*resource.StaleTokenError](err); ok {
		log.Printf("another holder, with token %d, has taken over", stale.Seen.Token)
	}
}

// A transaction whose commit had no answer is repeated until it's known that it has been committed, once.
func ExampleGuardOnce() {
	pay := func(tx pgx.Tx) error {
		if err := pgstore.GuardOnce(ctx, tx, "account/acme", resource.Fence{Token: token, Seq: 1}, []byte("invoice 17")); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, "UPDATE account SET balance = balance - 10 WHERE name = 'acme'")
		return err
	}
	err := pgx.BeginFunc(ctx, pool, pay)
	if err != nil {
		err = pgx.BeginFunc(ctx, pool, pay)
	}
	log.Println("paid:", err == nil || errors.Is(err, resource.ErrApplied))
}

// A new holder reads in one transaction and writes in another.
func ExampleGuardRead() {
	var balance int64
	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := pgstore.GuardRead(ctx, tx, "account/acme", token); err != nil {
			return err
		}
		return tx.QueryRow(ctx, "SELECT balance FROM account WHERE name = 'acme'").Scan(&balance)
	})
	log.Println(balance, err)
}

func ExampleNew() {
	accounts, err := pgstore.New(pool, nil)
	if err != nil {
		log.Fatal(err)
	}
	account, err := accounts.ReadFenced(ctx, "acme", token)
	if err != nil {
		log.Fatal(err)
	}
	err = accounts.Write(ctx, "acme", resource.Fence{Token: token, Seq: 1}, append(account.Value, "billed"...))
	log.Println(err)
}
