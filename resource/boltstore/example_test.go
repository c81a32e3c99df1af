package boltstore_test

import (
	"context"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/boltstore"
)

// One process opens the file. Serve it to others with resource.NewHandler, or run cmd/resource.
func Example() {
	dir, err := os.MkdirTemp("", "accounts")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	accounts, err := boltstore.Open(filepath.Join(dir, "accounts.db"), nil)
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = accounts.Close() }()
	ctx := context.Background()
	fmt.Println(accounts.Write(ctx, "acme", resource.Fence{Token: 8, Seq: 1}, []byte("billed by 8")))
	fmt.Println(accounts.Write(ctx, "acme", resource.Fence{Token: 7, Seq: 1}, []byte("billed by 7")))
	// Output:
	// <nil>
	// resource: stale fencing token for "acme": seen 8, got 7
}
