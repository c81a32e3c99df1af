// Package own_test tests a lock that implements dlock.Backend and a store that implements resource.Store, here this module's. To
// test yours, see docs/your-own-lock.md.
package own_test

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/memlock"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/storetest"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/promises"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// TestRules checks every rule in the comments of dlock.Backend and resource.Store.
func TestRules(t *testing.T) {
	t.Run("lock", func(t *testing.T) {
		dlocktest.Run(t, dlocktest.Harness{New: func(*testing.T) dlocktest.Service {
			service := memlock.New()
			return dlocktest.Service{Backend: func() dlock.Backend { return service.Client() }}
		}})
	})
	t.Run("store", func(t *testing.T) {
		storetest.Run(t, storetest.Harness{New: func() (resource.Store, error) { return resource.NewMemory(), nil }})
	})
}

// Workers and the resource are the test binary, started again. For a store of yours call scenarios.ChildWithStore(open,
// openStore).
func TestMain(m *testing.M) {
	scenarios.Child(open)
	os.Exit(m.Run())
}

// open opens your lock, any scenarios.Lock, in a worker.
func open(_ context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
	client := redis.NewClient(&redis.Options{Addr: s.Addrs[0], ContextTimeoutEnabled: true})
	backend, err := redislock.New(client, nil)
	if err != nil {
		return nil, err
	}
	opts := &dlock.Options{TTL: s.TTL}
	if s.Renew {
		opts.Renew = dlock.Renew{Every: s.TTL / 10, MaxHold: s.MaxHold} // a stall for most of a TTL doesn't end a lease
	}
	locker, err := dlock.New(backend, opts)
	if err != nil {
		return nil, err
	}
	return lock{scenarios.FromLocker(locker), client}, nil
}

// lock closes its client too: a Backend leaves it open.
type lock struct {
	scenarios.Lock
	client *redis.Client
}

func (l lock) Close() error { return errors.Join(l.Lock.Close(), l.client.Close()) }

// TestLock shows which promises the lock keeps, and what happens to the data that it guards, without and with its tokens.
func TestLock(t *testing.T) {
	server, err := testbed.StartRedis(t.Context(), &testbed.Options{Provider: testbed.Embedded}) // or give the address of yours
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	promises.Run(t, promises.Kit{
		Service: &scenarios.Service{Lock: "mine", Server: "mine 1.0", Nodes: []scenarios.Node{{Name: "server", Addr: server.Addr}}},
		Open:    open, Strict: true,
	})
}
