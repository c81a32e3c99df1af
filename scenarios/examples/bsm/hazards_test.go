// Package bsm_test runs the hazards on github.com/bsm/redislock, a lock on one Redis without fencing tokens. To test your own lock,
// copy it and change openLock, lock and lease.
package bsm_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/bsm/redislock"
	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/promises"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// Workers are the test binary, started again.
func TestMain(m *testing.M) {
	scenarios.Child(openLock)
	os.Exit(m.Run())
}

func openLock(_ context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
	client := redis.NewClient(&redis.Options{Addr: s.Addrs[0], ContextTimeoutEnabled: true})
	return lock{redislock.New(client), client, s.TTL}, nil
}

type lock struct {
	*redislock.Client
	redis *redis.Client
	ttl   time.Duration
}

func (l lock) Acquire(ctx context.Context, key string) (scenarios.Lease, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Hour) // without a deadline, Obtain gives up after the TTL
	defer cancel()
	return l.obtain(ctx, key, redislock.LinearBackoff(100*time.Millisecond))
}

func (l lock) TryAcquire(ctx context.Context, key string) (scenarios.Lease, error) {
	return l.obtain(ctx, key, redislock.NoRetry())
}

func (l lock) Close() error { return l.redis.Close() }

func (l lock) obtain(ctx context.Context, key string, retry redislock.RetryStrategy) (scenarios.Lease, error) {
	got, err := l.Obtain(ctx, key, l.ttl, &redislock.Options{RetryStrategy: retry})
	if errors.Is(err, redislock.ErrNotObtained) {
		err = fmt.Errorf("%w: %w", dlock.ErrHeld, err)
	}
	if err != nil {
		return nil, err
	}
	asked := time.Now() // the lock has neither a time nor a context; only the server knows the rest of the lease
	left, err := got.TTL(ctx)
	if err != nil {
		return nil, err
	}
	until := asked.Add(left)
	held, cancel := context.WithDeadline(context.WithoutCancel(ctx), until)
	return lease{got, l.ttl, until, held, cancel}, nil
}

type lease struct {
	*redislock.Lock
	ttl    time.Duration
	until  time.Time
	held   context.Context
	cancel context.CancelFunc
}

func (l lease) Fence() uint64            { return 0 } // it has no tokens
func (l lease) TTL() time.Duration       { return l.ttl }
func (l lease) Until() time.Time         { return l.until }
func (l lease) Context() context.Context { return l.held }

func (l lease) Release(ctx context.Context) error {
	l.cancel()
	err := l.Lock.Release(ctx)
	if errors.Is(err, redislock.ErrLockNotHeld) {
		err = fmt.Errorf("%w: %w", dlock.ErrLost, err)
	}
	return err
}

// start starts a Redis within this process, or as the environment says: FENCELAB_TESTBED=local, for example.
func start(t *testing.T) *scenarios.Service {
	t.Helper()
	provider := testbed.Provider(cmp.Or(os.Getenv(testbed.EnvProvider), string(testbed.Embedded)))
	server, err := testbed.StartRedis(t.Context(), &testbed.Options{Provider: provider, AllowEmbedded: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Close() })
	return &scenarios.Service{
		Lock: "bsm/redislock", Server: "bsm/redislock on " + server.String(), Nodes: []scenarios.Node{{Name: "server", Addr: server.Addr}},
		NoTokens: true, NoRenew: true,
	}
}

// TestPromises checks the promises that users expect of any lock.
func TestPromises(t *testing.T) {
	t.Parallel()
	promises.Run(t, promises.Kit{Service: start(t), Open: openLock, Module: "github.com/bsm/redislock", Strict: true})
}

// TestHazards shows what happens to the data that the lock guards.
func TestHazards(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("the faults need Linux")
	}
	service := start(t)
	var summary scenarios.Summary
	t.Cleanup(func() { t.Log("\n" + summary.String()) }) // go test -v shows it
	for _, s := range scenarios.Hazards() {
		if !s.On(service.Lock) || s.Faulty() {
			continue // of another lock, or with faults of its server
		}
		t.Run(s.Name, func(t *testing.T) {
			t.Parallel()
			runner := scenarios.Runner{Service: service, TTL: time.Second}
			got, err := runner.Run(t.Context(), s, history.FencingOff)
			summary.Add(s, history.FencingOff, got, err)
			switch {
			case errors.Is(err, errors.ErrUnsupported):
				t.Skip("not applicable:", err)
			case err != nil:
				t.Fatal(err)
			case got.Verdict != s.Expect[history.FencingOff]:
				t.Errorf("%v: %q", got.Verdict, got.Findings)
			}
		})
	}
}
