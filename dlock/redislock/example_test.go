package redislock_test

import (
	"context"
	"fmt"
	"log"
	"slices"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/redisstore"
)

// open returns the Locker and the store; call it once per process.
func open(client redis.UniversalClient) (*dlock.Locker, *redisstore.Store, error) {
	backend, err := redislock.New(client, nil)
	if err != nil {
		return nil, nil, err
	}
	// Renewals keep the lease while the work runs, but stop after MaxHold.
	renew := dlock.Renew{Every: 3 * time.Second, MaxHold: 10 * time.Minute}
	locker, err := dlock.New(backend, &dlock.Options{TTL: 10 * time.Second, Renew: renew})
	if err != nil {
		return nil, nil, err
	}
	accounts, err := redisstore.New(client, nil)
	return locker, accounts, err
}

// bill adds an invoice to an account, under the account's lock. It is safe to call again after an error: no invoice is added twice.
func bill(ctx context.Context, locker *dlock.Locker, accounts *redisstore.Store, invoice string) error {
	line := fmt.Sprintf("%q\n", strings.TrimSpace(invoice)) // quoted, so it is one line
	return locker.Do(ctx, "billing/acme", func(ctx context.Context, h *dlock.Handle) error {
		account, err := accounts.ReadFenced(ctx, "acme", resource.NewFence(h.Next())) // from now on earlier holders are refused
		if err != nil || slices.Contains(strings.SplitAfter(string(account.Value), "\n"), line) {
			return err
		}
		return accounts.Write(ctx, "acme", resource.NewFence(h.Next()), append(account.Value, line...))
	})
}

// The lock from the connection to the write that carries its token. The Backend goes to [dlock.New], and the Locker is what the
// program works with.
func Example() {
	m, err := miniredis.Run() // stands for a real Redis
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	client := redis.NewClient(&redis.Options{Addr: m.Addr(), ContextTimeoutEnabled: true})
	defer func() { _ = client.Close() }()
	ctx := context.Background()
	locker, accounts, err := open(client)
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = locker.Close() }()

	fmt.Println(bill(ctx, locker, accounts, "invoice 17"))
	fmt.Println(bill(ctx, locker, accounts, "invoice 18"))
	fmt.Println(bill(ctx, locker, accounts, "invoice 18"))

	err = accounts.Write(ctx, "acme", resource.Fence{Token: 1, Seq: 1}, []byte("what the first holder had computed"))
	fmt.Println(err)
	account, err := accounts.Read(ctx, "acme")
	fmt.Printf("%s%v\n", account.Value, err)
	// Output:
	// <nil>
	// <nil>
	// <nil>
	// resource: stale fencing token for "acme": seen 3, got 1
	// "invoice 17"
	// "invoice 18"
	// <nil>
}
