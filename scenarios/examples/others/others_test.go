// Package others_test checks well-known locks for the promises that users expect, with an adapter of some thirty lines each. A
// library can't break what it doesn't promise; the report says what happens, not whose fault it is.
package others_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/hashicorp/consul/api"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/promises"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// lock is a scenarios.Lock of functions.
type lock struct {
	acquire, try func(ctx context.Context, key string) (scenarios.Lease, error)
	close        func() error
}

func (l lock) Acquire(ctx context.Context, key string) (scenarios.Lease, error) {
	return l.acquire(ctx, key)
}

func (l lock) TryAcquire(ctx context.Context, key string) (scenarios.Lease, error) {
	return l.try(ctx, key)
}
func (l lock) Close() error { return l.close() }

type lease struct {
	fence   uint64 // 0: the library has no tokens
	ttl     time.Duration
	until   time.Time       // zero: renewed by the library
	held    context.Context //nolint:containedctx // it is the lease's
	release func(ctx context.Context) error
}

func (l lease) Fence() uint64                     { return l.fence }
func (l lease) TTL() time.Duration                { return l.ttl }
func (l lease) Until() time.Time                  { return l.until }
func (l lease) Context() context.Context          { return l.held }
func (l lease) Release(ctx context.Context) error { return l.release(ctx) }

// whileOpen returns a context that ends when lost is closed.
func whileOpen(lost <-chan struct{}) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		select {
		case <-lost:
			cancel()
		case <-ctx.Done():
		}
	}()
	return ctx, cancel
}

func openRedsync(_ context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
	var nodes []redsyncredis.Pool
	var clients []*redis.Client
	for _, addr := range s.Addrs {
		clients = append(clients, redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true}))
		nodes = append(nodes, goredis.NewPool(clients[len(clients)-1]))
	}
	locks := redsync.New(nodes...)
	get := func(tries int) func(context.Context, string) (scenarios.Lease, error) {
		return func(ctx context.Context, key string) (scenarios.Lease, error) {
			m := locks.NewMutex(key, redsync.WithExpiry(s.TTL), redsync.WithTries(tries), redsync.WithRetryDelay(50*time.Millisecond))
			err := m.LockContext(ctx)
			if taken := (*redsync.ErrTaken)(nil); errors.As(err, &taken) {
				err = fmt.Errorf("%w: %w", dlock.ErrHeld, err)
			}
			if err != nil {
				return nil, err
			}
			held, cancel := context.WithDeadline(context.WithoutCancel(ctx), m.Until())
			return lease{0, s.TTL, m.Until(), held, func(ctx context.Context) error {
				cancel()
				_, err := m.UnlockContext(ctx)
				if errors.Is(err, redsync.ErrLockAlreadyExpired) {
					err = fmt.Errorf("%w: %w", dlock.ErrLost, err)
				}
				return err
			}}, nil
		}
	}
	return lock{get(1 << 30), get(1), func() (err error) {
		for _, c := range clients {
			err = errors.Join(err, c.Close())
		}
		return err
	}}, nil
}

func openRueidislock(_ context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
	l, err := rueidislock.NewLocker(rueidislock.LockerOption{
		ClientOption: rueidis.ClientOption{InitAddress: s.Addrs}, KeyMajority: 1, KeyValidity: s.TTL, NoLoopTracking: true,
		// By default it stops waiting for a reply after 20 ms; on a busy machine its waiters then sleep until somebody releases.
		TryNextAfter: time.Minute,
	})
	if err != nil {
		return nil, err
	}
	get := func(with func(context.Context, string) (context.Context, context.CancelFunc, error)) func(context.Context, string) (scenarios.Lease, error) {
		return func(ctx context.Context, key string) (scenarios.Lease, error) {
			life, end := context.WithCancel(context.WithoutCancel(ctx)) // ends the wait, and later the lease
			waits := context.AfterFunc(ctx, end)
			held, release, err := with(life, key)
			waits()
			if errors.Is(err, rueidislock.ErrNotLocked) {
				err = fmt.Errorf("%w: %w", dlock.ErrHeld, err)
			}
			if err != nil {
				return nil, err
			}
			return lease{0, s.TTL, time.Time{}, held, func(context.Context) error {
				release()
				end()
				return nil
			}}, nil
		}
	}
	return lock{get(l.WithContext), get(l.TryWithContext), func() error {
		l.Close()
		return nil
	}}, nil
}

func openEtcd(_ context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
	client, err := clientv3.New(clientv3.Config{Endpoints: s.Addrs, Logger: zap.NewNop()})
	if err != nil {
		return nil, err
	}
	session := func(ctx context.Context) (*concurrency.Session, error) { // one per lock: within a session it is reentrant
		ttl := int((s.TTL + time.Second - 1) / time.Second)
		granted, err := client.Grant(ctx, int64(ttl))
		if err != nil {
			return nil, err
		}
		return concurrency.NewSession(client, concurrency.WithLease(granted.ID), concurrency.WithTTL(ttl))
	}
	get := func(how func(*concurrency.Mutex, context.Context) error) func(context.Context, string) (scenarios.Lease, error) {
		return func(ctx context.Context, key string) (scenarios.Lease, error) {
			s1, err := session(ctx)
			if err != nil {
				return nil, err
			}
			m := concurrency.NewMutex(s1, key)
			err = how(m, ctx)
			if errors.Is(err, concurrency.ErrLocked) {
				err = fmt.Errorf("%w: %w", dlock.ErrHeld, err)
			}
			if err != nil {
				return nil, errors.Join(err, s1.Close())
			}
			held, cancel := whileOpen(s1.Done())
			// Not called a token, but it grows with every grant: the store's revision when the lock was known to be held.
			token := uint64(m.Header().GetRevision()) //nolint:gosec // a revision is positive
			return lease{token, s.TTL, time.Time{}, held, func(ctx context.Context) error {
				cancel()
				return errors.Join(m.Unlock(ctx), s1.Close())
			}}, nil
		}
	}
	return lock{get((*concurrency.Mutex).Lock), get((*concurrency.Mutex).TryLock), client.Close}, nil
}

func openConsul(_ context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
	client, err := api.NewClient(&api.Config{Address: s.Addrs[0]})
	if err != nil {
		return nil, err
	}
	get := func(try bool) func(context.Context, string) (scenarios.Lease, error) {
		return func(ctx context.Context, key string) (scenarios.Lease, error) {
			l, err := client.LockOpts(&api.LockOptions{
				Key: strings.TrimPrefix(key, "/"), SessionTTL: max(s.TTL, s.MinSession).String(), LockTryOnce: try,
				LockWaitTime: time.Second, LockDelay: time.Millisecond,
			})
			if err != nil {
				return nil, err
			}
			lost, err := l.Lock(ctx.Done())
			if err == nil && lost == nil { // "not acquired"
				err = dlock.ErrHeld
				if ctx.Err() != nil {
					err = ctx.Err()
				}
			}
			if err != nil {
				return nil, err
			}
			held, cancel := whileOpen(lost)
			return lease{0, max(s.TTL, s.MinSession), time.Time{}, held, func(context.Context) error {
				cancel()
				return l.Unlock()
			}}, nil
		}
	}
	return lock{get(false), get(true), func() error { return nil }}, nil
}

type start func(ctx context.Context) (scenarios.ServerSet, error)

func TestPromises(t *testing.T) {
	for _, l := range []struct {
		name, module string
		open         scenarios.Open
		start        start
		kit          promises.Kit
		// broken are promises that it breaks in every run.
		broken []string
	}{
		{"redsync", "github.com/go-redsync/redsync/v4", openRedsync, redisNodes(1), promises.Kit{Service: &scenarios.Service{NoTokens: true, NoRenew: true}}, nil},
		{"redsync-5", "github.com/go-redsync/redsync/v4", openRedsync, redisNodes(5), promises.Kit{Service: &scenarios.Service{NoTokens: true, NoRenew: true}}, nil},
		{"rueidislock", "github.com/redis/rueidis", openRueidislock, realRedis, promises.Kit{Service: &scenarios.Service{NoTokens: true}}, nil},
		{
			"etcd-mutex", "go.etcd.io/etcd/client/v3", openEtcd, etcd,
			promises.Kit{Service: &scenarios.Service{}, TTL: 2 * time.Second},
			[]string{"KeysIndependent"}, // https://github.com/etcd-io/website/issues/710
		},
		{
			"consul-api", "github.com/hashicorp/consul/api", openConsul, consul,
			promises.Kit{Service: &scenarios.Service{NoTokens: true, MinSession: testbed.ConsulMinSession}, TTL: 2 * time.Second},
			[]string{"EndsWithContext"},
		},
	} {
		t.Run(l.name, func(t *testing.T) {
			t.Parallel()
			set, err := l.start(t.Context())
			testbed.Need(t, err)
			t.Cleanup(func() { _ = set.Close() })
			k, on := l.kit, set.On()
			k.Open, k.Module, k.Service.Lock, k.Service.Server, k.Service.Nodes = l.open, l.module, l.name, on.Server, on.Nodes
			for i, s := range set.Servers {
				k.Service.Nodes[i].Addr = s.Addr // not a URL
			}
			for _, row := range promises.Run(t, k).Rows {
				if row.Verdict != promises.Broken && slices.Contains(l.broken, row.Promise) {
					t.Errorf("it keeps %s now, says the report", row.Promise)
				}
			}
		})
	}
}

func redisNodes(n int) start {
	return func(ctx context.Context) (scenarios.ServerSet, error) {
		all, err := testbed.StartRedisNodes(ctx, n, &testbed.Options{AllowEmbedded: true})
		return scenarios.ServerSet{Servers: all}, err
	}
}

// realRedis rejects miniredis, which has no client-side caching.
func realRedis(ctx context.Context) (scenarios.ServerSet, error) {
	set, err := redisNodes(1)(ctx)
	if err == nil {
		if err = set.Servers[0].Real(); err != nil {
			err = errors.Join(err, set.Close())
		}
	}
	return set, err
}

func etcd(ctx context.Context) (scenarios.ServerSet, error) {
	c, err := testbed.StartEtcd(ctx, 1, nil)
	if err != nil {
		return scenarios.ServerSet{}, err
	}
	return scenarios.ServerSet{Servers: c.Servers, Cluster: c}, nil
}

func consul(ctx context.Context) (scenarios.ServerSet, error) {
	s, err := testbed.StartConsul(ctx, nil)
	return scenarios.ServerSet{Servers: []*testbed.Server{s}}, err
}
