package cas_test

import (
	"context"
	"fmt"
	"log"
	"strings"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/resource/cas"
)

// A request's ID in the value makes it safe to repeat an update whose answer was lost.
func ExampleUpdate() {
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
	for range 2 { // the answer to the first may have been lost
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
