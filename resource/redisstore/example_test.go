package redisstore_test

import (
	"context"
	"fmt"
	"log"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/redisstore"
)

// bill is what the holder of a lock does. token comes from the lock's grant.
func bill(ctx context.Context, client redis.UniversalClient, token uint64) error {
	accounts, err := redisstore.New(client, nil)
	if err != nil {
		return err
	}
	account, err := accounts.ReadFenced(ctx, "acme", resource.Fence{Token: token})
	if err != nil {
		return err
	}
	return accounts.Write(ctx, "acme", resource.Fence{Token: token, Seq: 1}, append(account.Value, "billed"...))
}

func Example() {
	m, err := miniredis.Run() // stands for a real Redis
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	client := redis.NewClient(&redis.Options{Addr: m.Addr(), ContextTimeoutEnabled: true})
	defer func() { _ = client.Close() }()

	// 7 was granted to a slow holder, 8 to its successor.
	fmt.Println(bill(context.Background(), client, 8))
	fmt.Println(bill(context.Background(), client, 7))
	// Output:
	// <nil>
	// resource: stale fencing token for "acme": seen 8, got 7
}
