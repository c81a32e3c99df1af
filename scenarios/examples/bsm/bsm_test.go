// Package bsm_test tests github.com/bsm/redislock, a lock on one Redis without fencing tokens. To test your own lock, see
// docs/your-own-lock.md.
package bsm_test

import (
	"cmp"
	"context"
	"os"
	"testing"
	"time"

	"github.com/bsm/redislock"
	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/promises"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// The hazards' workers are the test binary, started again.
func TestMain(m *testing.M) {
	scenarios.Child(openLock)
	os.Exit(m.Run())
}

func openLock(_ context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
	client := redis.NewClient(&redis.Options{Addr: s.Addrs[0], ContextTimeoutEnabled: true})
	locks := redislock.New(client)
	return scenarios.Adapter{
		Get: func(ctx context.Context, key string, wait bool) (scenarios.Grant, error) {
			retry := redislock.NoRetry()
			if wait {
				retry = redislock.LinearBackoff(100 * time.Millisecond)
			}
			ctx, cancel := context.WithTimeout(ctx, time.Hour) // without a deadline, Obtain gives up after the TTL
			defer cancel()
			l, err := locks.Obtain(ctx, key, s.TTL, &redislock.Options{RetryStrategy: retry})
			if err != nil {
				return scenarios.Grant{}, err
			}
			asked := time.Now() // only the server knows the rest of the lease
			left, err := l.TTL(ctx)
			renew := func(ctx context.Context) (time.Time, error) {
				asked := time.Now()
				return asked.Add(s.TTL), l.Refresh(ctx, s.TTL, nil)
			}
			return scenarios.Grant{TTL: s.TTL, Until: asked.Add(left), Release: l.Release, Renew: renew}, err
		},
		Held: redislock.ErrNotObtained, Lost: redislock.ErrLockNotHeld, Shut: client.Close,
	}, nil
}

// TestPromises shows which promises the lock keeps, and what happens to the data that it guards.
func TestPromises(t *testing.T) {
	// By default a Redis within this process; with FENCELAB_TESTBED=local a real one, which can be broken.
	provider := testbed.Provider(cmp.Or(os.Getenv(testbed.EnvProvider), string(testbed.Embedded)))
	server, err := testbed.StartRedis(t.Context(), &testbed.Options{Provider: provider, Clock: provider == testbed.Local})
	testbed.Need(t, err)
	t.Cleanup(func() { _ = server.Close() })
	service := scenarios.ServerSet{Lock: "bsm/redislock", Servers: []*testbed.Server{server}}.On()
	service.Nodes[0].Addr = server.Addr // not a URL
	service.NoTokens, service.NoRenew = true, true
	promises.Run(t, promises.Kit{Service: service, Open: openLock, Module: "github.com/bsm/redislock", Strict: true})
}
