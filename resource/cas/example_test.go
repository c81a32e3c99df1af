package cas_test

import (
	"context"
	"fmt"
	"log"
	"strings"

	"github.com/alicebob/miniredis/v2"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/resource/cas"
)

// [Schema] creates the table, for example in a migration.
func ExamplePostgres() {
	ctx := context.Background()
	pool, err := pgxpool.New(ctx, postgresServer.URL) // e.g. postgres://localhost/app
	if err != nil {
		log.Fatal(err)
	}
	defer pool.Close()
	if _, err := pool.Exec(ctx, cas.Schema); err != nil {
		log.Fatal(err)
	}

	tries, err := cas.Update(ctx, cas.Postgres{Pool: pool}, "example/acme", func([]byte) ([]byte, error) {
		return []byte("billed"), nil
	}, nil)
	fmt.Println(tries, err)
	// Output: 1 <nil>
}

// With a request's ID in the value, an update whose reply was lost can be repeated.
func Example() {
	m, err := miniredis.Run() // stands for a real Redis
	if err != nil {
		log.Fatal(err)
	}
	defer m.Close()
	client := redis.NewClient(&redis.Options{Addr: m.Addr(), ContextTimeoutEnabled: true})
	defer func() { _ = client.Close() }()

	ctx, accounts := context.Background(), cas.Redis{Client: client}
	bill := func(account []byte) ([]byte, error) {
		if strings.Contains(string(account), "invoice 17\n") {
			return account, nil
		}
		return append(account, "invoice 17\n"...), nil
	}
	for range 2 { // the first reply may be lost
		tries, err := cas.Update(ctx, accounts, "acme", bill, nil)
		fmt.Println(tries, err)
	}
	value, _, err := accounts.Get(ctx, "acme")
	fmt.Printf("%q %v\n", value, err)
	// Output:
	// 1 <nil>
	// 1 <nil>
	// "invoice 17\n" <nil>
}
