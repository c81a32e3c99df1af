package resource_test

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptest"

	"github.com/fencelab/fencelab/resource"
)

func Example() {
	handler, err := resource.NewHandler(resource.NewMemory(), nil)
	if err != nil {
		panic(err)
	}
	server := httptest.NewServer(handler)
	defer server.Close()
	accounts, err := resource.NewClient(server.URL, nil)
	if err != nil {
		panic(err)
	}
	defer func() { _ = accounts.Close() }()
	ctx := context.Background()

	// The tokens come from the lock: 7 was granted to a slow holder, 8 to its successor.
	if _, err := accounts.ReadFenced(ctx, "acme", resource.Fence{Token: 7}); err != nil {
		panic(err)
	}
	account, err := accounts.ReadFenced(ctx, "acme", resource.Fence{Token: 8})
	if err != nil {
		panic(err)
	}
	fmt.Println("8 writes:", accounts.Write(ctx, "acme", resource.Fence{Token: 8, Seq: 1}, append(account.Value, "billed by 8"...)))

	err = accounts.Write(ctx, "acme", resource.Fence{Token: 7, Seq: 1}, []byte("billed by 7"))
	stale, ok := errors.AsType[*resource.StaleTokenError](err)
	fmt.Println("7 is stale:", ok, "seen", stale.Seen, "got", stale.Got)

	// If the reply to a write is lost, repeat the write to find out whether it took effect.
	err = accounts.Write(ctx, "acme", resource.Fence{Token: 8, Seq: 1}, []byte("billed by 8"))
	fmt.Println("8 again:", errors.Is(err, resource.ErrApplied))
	// Output:
	// 8 writes: <nil>
	// 7 is stale: true seen 8 got 7
	// 8 again: true
}
