package etcdlock_test

import (
	"context"
	"fmt"
	"log"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/etcdlock"
)

// Data in the same etcd needs no other resource: the transaction that writes it checks the token.
func ExampleBackend_IsOwner() {
	client, err := clientv3.New(clientv3.Config{Endpoints: one.Addrs()})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = client.Close() }()
	backend, err := etcdlock.New(client, nil)
	if err != nil {
		log.Fatal(err)
	}
	locker, err := dlock.New(backend, &dlock.Options{TTL: 10 * time.Second})
	if err != nil {
		log.Fatal(err)
	}
	defer func() { _ = locker.Close() }()

	ctx := context.Background()
	h, err := locker.Acquire(ctx, "billing/acme")
	if err != nil {
		log.Fatal(err)
	}
	holder := backend.IsOwner(dlock.Grant{Key: h.Key(), Owner: h.Owner(), Fence: h.Fence()})
	write := func(value string) {
		resp, err := client.Txn(ctx).If(holder).Then(clientv3.OpPut("acme/balance", value)).Commit()
		if err != nil {
			log.Fatal(err)
		}
		fmt.Println(value, resp.Succeeded)
	}
	write("100")
	if err := h.Release(ctx); err != nil {
		log.Fatal(err)
	}
	write("50")
	// Output:
	// 100 true
	// 50 false
}
