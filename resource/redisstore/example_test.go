package redisstore_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/redisstore"
)

func ExampleNew() {
	m, err := miniredis.Run() // stands for a real Redis
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	client := redis.NewClient(&redis.Options{Addr: m.Addr(), ContextTimeoutEnabled: true})
	defer func() { _ = client.Close() }()
	ctx, token := context.Background(), uint64(7) // from the lock's grant

	accounts, err := redisstore.New(client, nil)
	if err != nil {
		log.Fatal(err)
	}
	account, err := accounts.ReadFenced(ctx, "acme", token)
	if err != nil {
		log.Fatal(err)
	}
	err = accounts.Write(ctx, "acme", resource.Fence{Token: token, Seq: 1}, append(account.Value, "billed"...))
	fmt.Println("7:", err)

	err = accounts.Write(ctx, "acme", resource.Fence{Token: 6, Seq: 1}, []byte("late"))
	stale, ok := errors.AsType[*resource.StaleTokenError](err)
	fmt.Println("6 is stale:", ok, "seen", stale.Seen)
	// Output:
	// 7: <nil>
	// 6 is stale: true seen 7
}
