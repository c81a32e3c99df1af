package filestore_test

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/filestore"
)

// One process owns the files. Others write through it, by resource.NewHandler and resource.NewClient.
func Example() {
	dir, err := os.MkdirTemp("", "accounts")
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = os.RemoveAll(dir) }()
	accounts, err := filestore.Open(dir)
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
