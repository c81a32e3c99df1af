package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"strings"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/pgstore"
)

var (
	ctx   = context.Background()
	pool  *pgxpool.Pool
	token uint64 // from the lock's grant
)

// bill is called under the lock, in locker.Do(ctx, "billing/acme", ...), with f = resource.NewFence(h.Next()). It may be called again:
// the invoice's id prevents a second bill.
func bill(ctx context.Context, pool *pgxpool.Pool, f resource.Fence, invoice string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		if err := pgstore.Guard(ctx, tx, "account/acme", f); err != nil {
			return err // a later grant was here; tx is rolled back
		}
		billed, err := tx.Exec(ctx, "INSERT INTO invoice (id) VALUES ($1) ON CONFLICT DO NOTHING", invoice)
		if err == nil && billed.RowsAffected() == 1 {
			_, err = tx.Exec(ctx, "UPDATE account SET balance = balance - 10 WHERE name = 'acme'")
		}
		return err
	})
}

func ExampleGuard() {
	pool, drop := database()
	defer drop()
	// 7 was granted to a slow holder, 8 to its successor.
	fmt.Println(bill(ctx, pool, resource.Fence{Token: 8, Seq: 1}, "invoice 17"))
	fmt.Println(bill(ctx, pool, resource.Fence{Token: 7, Seq: 1}, "invoice 18"))
	fmt.Println(bill(ctx, pool, resource.Fence{Token: 9, Seq: 1}, "invoice 17")) // already billed
	var balance int64
	err := pool.QueryRow(ctx, "SELECT balance FROM account WHERE name = 'acme'").Scan(&balance)
	fmt.Println(balance, err)
	// Output:
	// <nil>
	// resource: stale fencing token for "account/acme": seen 8, got 7
	// <nil>
	// 90 <nil>
}

func database() (pool *pgxpool.Pool, drop func()) {
	schema := "example_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	config, err := pgxpool.ParseConfig(server.URL)
	if err != nil {
		log.Fatal(err)
	}
	config.ConnConfig.RuntimeParams["search_path"] = schema
	if pool, err = pgxpool.NewWithConfig(ctx, config); err != nil {
		log.Fatal(err)
	}
	for _, sql := range []string{
		"CREATE SCHEMA " + schema, pgstore.Schema,
		"CREATE TABLE account (name text PRIMARY KEY, balance bigint NOT NULL)", "INSERT INTO account VALUES ('acme', 100)",
		"CREATE TABLE invoice (id text PRIMARY KEY)",
	} {
		if _, err := pool.Exec(ctx, sql); err != nil {
			log.Fatal(err)
		}
	}
	return pool, func() {
		defer pool.Close()
		if _, err := pool.Exec(ctx, "DROP SCHEMA "+schema+" CASCADE"); err != nil {
			log.Fatal(err)
		}
	}
}

// If the commit had no reply, repeat the transaction with the same fence and request. With another fence it would pay twice.
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
		if err := pgstore.GuardRead(ctx, tx, "account/acme", resource.Fence{Token: token}); err != nil {
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
	account, err := accounts.ReadFenced(ctx, "acme", resource.Fence{Token: token})
	if err != nil {
		log.Fatal(err)
	}
	err = accounts.Write(ctx, "acme", resource.Fence{Token: token, Seq: 1}, append(account.Value, "billed"...))
	log.Println(err)
}
