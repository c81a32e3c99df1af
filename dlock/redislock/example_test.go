package redislock_test

import (
	"context"
	"fmt"
	"log"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/redisstore"
)

// bill puts an invoice into an account, under the account's lock. A service makes the locker and the store once.
func bill(ctx context.Context, client redis.UniversalClient, invoice string) error {
	backend, err := redislock.New(client, nil)
	if err != nil {
		return err
	}
	locker, err := dlock.New(backend, &dlock.Options{TTL: 10 * time.Second})
	if err != nil {
		return err
	}
	defer func() { _ = locker.Close() }()
	accounts, err := redisstore.New(client, nil)
	if err != nil {
		return err
	}

	return locker.Do(ctx, "billing/acme", func(ctx context.Context, h *dlock.Handle) error {
		account, err := accounts.ReadFenced(ctx, "acme", h.Fence()) // from now on earlier holders are refused
		if err != nil {
			return err
		}
		return accounts.Write(ctx, "acme", resource.Fence{Token: h.Fence(), Seq: 1}, append(account.Value, invoice...))
	})
}

// The lock from the connection to the write that carries its token: the Backend goes to [dlock.New], and the Locker is
// what the program works with.
func Example() {
	m, err := miniredis.Run() // stands for a real Redis
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	client := redis.NewClient(&redis.Options{Addr: m.Addr(), ContextTimeoutEnabled: true})
	defer func() { _ = client.Close() }()
	ctx := context.Background()

	fmt.Println(bill(ctx, client, "invoice 17\n"))
	fmt.Println(bill(ctx, client, "invoice 18\n"))

	accounts, err := redisstore.New(client, nil)
	if err != nil {
		log.Fatal(err)
	}
	err = accounts.Write(ctx, "acme", resource.Fence{Token: 1, Seq: 1}, []byte("what the first holder had computed\n"))
	fmt.Println(err)
	account, err := accounts.Read(ctx, "acme")
	fmt.Printf("%q %v\n", account.Value, err)
	// Output:
	// <nil>
	// <nil>
	// resource: stale fencing token for "acme": seen 2, got 1
	// "invoice 17\ninvoice 18\n" <nil>
}
