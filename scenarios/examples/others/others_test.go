// Package others_test asks well-known locks for what is expected of every lock: an adapter of some thirty lines each, and a report.
// What a library doesn't promise it can't break; the report says what happens, not whose fault it is.
package others_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-redsync/redsync/v4"
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

// lock is a scenarios.Lock of a few functions. None of these libraries has tokens.
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
	ttl     time.Duration
	until   time.Time       // zero: the library renews it, and doesn't tell
	held    context.Context //nolint:containedctx // it is the lease's
	release func(ctx context.Context) error
}

func (lease) Fence() uint64                       { return 0 }
func (l lease) TTL() time.Duration                { return l.ttl }
func (l lease) Until() time.Time                  { return l.until }
func (l lease) Context() context.Context          { return l.held }
func (l lease) Release(ctx context.Context) error { return l.release(ctx) }

// whileOpen is a context that ends when lost is closed.
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
	client := redis.NewClient(&redis.Options{Addr: s.Addrs[0], ContextTimeoutEnabled: true})
	locks := redsync.New(goredis.NewPool(client))
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
			return lease{s.TTL, m.Until(), held, func(ctx context.Context) error {
				cancel()
				_, err := m.UnlockContext(ctx)
				if errors.Is(err, redsync.ErrLockAlreadyExpired) {
					err = fmt.Errorf("%w: %w", dlock.ErrLost, err)
				}
				return err
			}}, nil
		}
	}
	return lock{get(1 << 30), get(1), client.Close}, nil
}

func openRueidislock(_ context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
	l, err := rueidislock.NewLocker(rueidislock.LockerOption{
		ClientOption: rueidis.ClientOption{InitAddress: s.Addrs}, KeyMajority: 1, KeyValidity: s.TTL, NoLoopTracking: true,
		// By default it gives up on a reply after 20 ms; on a busy machine its waiters then sleep until somebody else releases.
		TryNextAfter: time.Minute,
	})
	if err != nil {
		return nil, err
	}
	get := func(with func(context.Context, string) (context.Context, context.CancelFunc, error)) func(context.Context, string) (scenarios.Lease, error) {
		return func(ctx context.Context, key string) (scenarios.Lease, error) {
			life, end := context.WithCancel(context.WithoutCancel(ctx)) // it ends the wait, and later the lease
			waits := context.AfterFunc(ctx, end)
			held, release, err := with(life, key)
			waits()
			if errors.Is(err, rueidislock.ErrNotLocked) {
				err = fmt.Errorf("%w: %w", dlock.ErrHeld, err)
			}
			if err != nil {
				return nil, err
			}
			return lease{s.TTL, time.Time{}, held, func(context.Context) error {
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
	client, err := clientv3.New(clientv3.Config{
		Endpoints: s.Addrs, Logger: zap.NewNop(), DialKeepAliveTime: 2 * time.Second, DialKeepAliveTimeout: 2 * time.Second,
	})
	if err != nil {
		return nil, err
	}
	session := func(ctx context.Context) (*concurrency.Session, error) { // one for each lock: within a session it is reentrant
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
			return lease{s.TTL, time.Time{}, held, func(ctx context.Context) error {
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
			return lease{max(s.TTL, s.MinSession), time.Time{}, held, func(context.Context) error {
				cancel()
				return l.Unlock()
			}}, nil
		}
	}
	return lock{get(false), get(true), func() error { return nil }}, nil
}

var record = flag.String("record", "", "a directory to write each report to, as text")

func TestPromises(t *testing.T) {
	redisServer := func(ctx context.Context) (*testbed.Server, func() error, error) {
		return one(testbed.StartRedis(ctx, &testbed.Options{Provider: testbed.Embedded}))
	}
	for _, l := range []struct {
		name  string
		open  scenarios.Open
		start func(ctx context.Context) (*testbed.Server, func() error, error)
		kit   promises.Kit
		// broken are promises that it breaks in every run. Where it depends on the moment, none is named. (KeysIndependent:
		// https://github.com/etcd-io/website/issues/710.)
		broken []string
	}{
		{"redsync", openRedsync, redisServer, promises.Kit{Service: &scenarios.Service{NoRenew: true}}, nil},
		{"rueidislock", openRueidislock, func(ctx context.Context) (*testbed.Server, func() error, error) {
			s, err := testbed.StartRedis(ctx, nil)
			if err != nil {
				return nil, nil, err
			}
			if err := s.Real(); err != nil { // miniredis doesn't tell a client what has changed
				return nil, nil, errors.Join(err, s.Close())
			}
			return s, s.Close, nil
		}, promises.Kit{Service: &scenarios.Service{}}, nil},
		{"etcd-mutex", openEtcd, func(ctx context.Context) (*testbed.Server, func() error, error) {
			c, err := testbed.StartEtcd(ctx, 1, nil)
			if err != nil {
				return nil, nil, err
			}
			return c.Servers[0], c.Close, nil
		}, promises.Kit{Service: &scenarios.Service{}, TTL: 2 * time.Second}, []string{"KeysIndependent"}},
		{"consul-api", openConsul, func(ctx context.Context) (*testbed.Server, func() error, error) {
			return one(testbed.StartConsul(ctx, nil))
		}, promises.Kit{Service: &scenarios.Service{MinSession: testbed.ConsulMinSession}, TTL: 2 * time.Second}, []string{"EndsWithContext"}},
	} {
		t.Run(l.name, func(t *testing.T) {
			t.Parallel()
			server, stop, err := l.start(t.Context())
			testbed.Need(t, err)
			t.Cleanup(func() { _ = stop() })
			k := l.kit
			k.Open, k.Service.Lock, k.Service.Server, k.Service.NoTokens = l.open, l.name, server.String(), true
			k.Service.Nodes = []scenarios.Node{{Name: "server", Addr: server.Addr}}
			r := promises.Run(t, k)
			for _, row := range r.Rows {
				if row.Verdict != promises.Broken && slices.Contains(l.broken, row.Promise) {
					t.Errorf("it keeps %s now, says the report", row.Promise)
				}
			}
			if l.name == "redsync" && r.Count(promises.Broken) > 0 {
				t.Error("it kept all promises so far")
			}
			if *record != "" {
				if err := os.WriteFile(filepath.Join(*record, l.name+".txt"), []byte(r.String()), 0o600); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
}

func one(s *testbed.Server, err error) (*testbed.Server, func() error, error) {
	if err != nil {
		return nil, nil, err
	}
	return s, s.Close, nil
}
