package locks_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redlock"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/promises"
)

type closing struct {
	dlock.Backend
	client func() error
}

func (c closing) Close() error { return errors.Join(c.Backend.Close(), c.client()) }

// Our locks keep every promise; redlock all but what its documentation excludes.
func TestPromises(t *testing.T) {
	for _, l := range chaosLocks {
		if l.name == "memory" {
			continue
		}
		t.Run(l.name, func(t *testing.T) {
			t.Parallel()
			service := scenarios.ServerSet{Lock: l.name, Servers: l.startServers(t)}.On()
			if l.name == locks.Etcd || l.name == locks.ZooKeeper {
				service.Fault = nil // a member that lost its data must not come back as the same
			}
			if addr := service.Nodes[0].Addr; strings.HasPrefix(l.name, "redis") {
				service.Forget = func(ctx context.Context, key string) error {
					c, err := redisclient.New(addr)
					if err != nil {
						return err
					}
					return errors.Join(c.Del(ctx, "lock:{"+key+"}").Err(), c.Close())
				}
			}
			r := promises.Run(t, promises.Kit{
				Service: service, Strict: l.name != locks.Redlock,
				Open: scenarios.FromBackend(func(ctx context.Context, s scenarios.LockSpec) (dlock.Backend, error) {
					spec := locks.Spec{Lock: l.name, Addrs: s.Addrs, TTL: s.TTL}
					if l.name == locks.Redlock {
						// The default, a twentieth of the TTL, is too short on a busy machine.
						return locks.OpenRedlock(ctx, spec, &redlock.Options{NodeTimeout: 2 * time.Second})
					}
					if l.name == locks.Postgres { // up to 16 calls run at once; the default pool has four connections
						sep := "?"
						if strings.Contains(s.Addrs[0], sep) {
							sep = "&"
						}
						spec.Addrs = []string{s.Addrs[0] + sep + "pool_max_conns=16"}
					}
					b, err := l.open(ctx, spec, rand.New(rand.NewPCG(1, 1)))
					return closing{b.Backend, b.close}, err
				}),
			})
			for _, row := range r.Rows {
				want := promises.Kept
				if row.Promise == "DataLoss" { // a node that restarts without its data votes for a second holder
					want = promises.Broken
				}
				if l.name == locks.Redlock && !row.Excluded && row.Verdict != want {
					t.Errorf("redlock: %s: %s, %s", row.Promise, row.Verdict, row.Why)
				}
			}
		})
	}
}
