// Package others_test checks well-known locks for the promises that users expect, with an adapter of some thirty lines each. A
// library can't break what it doesn't promise, and a finding may not be its fault.
package others_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"cirello.io/dynamolock/v2"
	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb"
	"github.com/aws/aws-sdk-go-v2/service/dynamodb/types"
	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/go-zookeeper/zk"
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

func openRedsync(_ context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
	var nodes []redsyncredis.Pool
	var clients []*redis.Client
	for _, addr := range s.Addrs {
		clients = append(clients, redis.NewClient(&redis.Options{Addr: addr, ContextTimeoutEnabled: true}))
		nodes = append(nodes, goredis.NewPool(clients[len(clients)-1]))
	}
	locks := redsync.New(nodes...)
	return scenarios.Adapter{
		Get: func(ctx context.Context, key string, wait bool) (scenarios.Grant, error) {
			tries := 1
			if wait {
				tries = 1 << 30
			}
			m := locks.NewMutex(key, redsync.WithExpiry(s.TTL), redsync.WithTries(tries), redsync.WithRetryDelay(50*time.Millisecond))
			err := m.LockContext(ctx)
			if taken := (*redsync.ErrTaken)(nil); errors.As(err, &taken) {
				err = fmt.Errorf("%w: %w", dlock.ErrHeld, err)
			}
			return scenarios.Grant{TTL: s.TTL, Until: m.Until(), Release: func(ctx context.Context) error {
				_, err := m.UnlockContext(ctx)
				return err
			}, Renew: func(ctx context.Context) (time.Time, error) {
				_, err := m.ExtendContext(ctx)
				return m.Until(), err
			}}, err
		},
		Lost: redsync.ErrLockAlreadyExpired,
		Shut: func() (err error) {
			for _, c := range clients {
				err = errors.Join(err, c.Close())
			}
			return err
		},
	}, nil
}

func openRueidislock(_ context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
	l, err := rueidislock.NewLocker(rueidislock.LockerOption{
		ClientOption: rueidis.ClientOption{InitAddress: s.Addrs}, KeyMajority: 1, KeyValidity: s.TTL, NoLoopTracking: true,
		// By default it waits 20 ms for a reply; on a busy machine its waiters then sleep until a release.
		TryNextAfter: time.Minute,
	})
	if err != nil {
		return nil, err
	}
	return scenarios.Adapter{
		Get: func(ctx context.Context, key string, wait bool) (scenarios.Grant, error) {
			get := l.TryWithContext
			if wait {
				get = l.WithContext
			}
			life, end := context.WithCancel(context.WithoutCancel(ctx)) // ends the wait, and later the lease
			waits := context.AfterFunc(ctx, end)
			held, release, err := get(life, key)
			waits()
			if err != nil {
				end()
				return scenarios.Grant{}, err
			}
			return scenarios.Grant{TTL: s.TTL, Lost: held.Done(), Release: func(context.Context) error {
				release()
				end()
				return nil
			}}, nil
		},
		Held: rueidislock.ErrNotLocked,
		Shut: func() error {
			l.Close()
			return nil
		},
	}, nil
}

func openEtcd(_ context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
	client, err := clientv3.New(clientv3.Config{Endpoints: s.Addrs, Logger: zap.NewNop()})
	if err != nil {
		return nil, err
	}
	return scenarios.Adapter{
		Get: func(ctx context.Context, key string, wait bool) (scenarios.Grant, error) {
			ttl := int((s.TTL + time.Second - 1) / time.Second)
			granted, err := client.Grant(ctx, int64(ttl))
			if err != nil {
				return scenarios.Grant{}, err
			}
			// One per lock: within a session the mutex is reentrant.
			session, err := concurrency.NewSession(client, concurrency.WithLease(granted.ID), concurrency.WithTTL(ttl))
			if err != nil {
				return scenarios.Grant{}, err
			}
			m := concurrency.NewMutex(session, key)
			if wait {
				err = m.Lock(ctx)
			} else {
				err = m.TryLock(ctx)
			}
			if err != nil {
				return scenarios.Grant{}, errors.Join(err, session.Close())
			}
			// Not called a token, but it grows with every grant: the store's revision when the lock was known to be held.
			token := uint64(m.Header().GetRevision()) //nolint:gosec // a revision is positive
			return scenarios.Grant{Token: token, TTL: s.TTL, Lost: session.Done(), Release: func(ctx context.Context) error {
				return errors.Join(m.Unlock(ctx), session.Close())
			}}, nil
		},
		Held: concurrency.ErrLocked, Shut: client.Close,
	}, nil
}

func openConsul(_ context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
	client, err := api.NewClient(&api.Config{Address: s.Addrs[0]})
	if err != nil {
		return nil, err
	}
	ttl := max(s.TTL, s.MinSession)
	return scenarios.Adapter{Get: func(ctx context.Context, key string, wait bool) (scenarios.Grant, error) {
		l, err := client.LockOpts(&api.LockOptions{
			Key: strings.TrimPrefix(key, "/"), SessionTTL: ttl.String(), LockTryOnce: !wait,
			LockWaitTime: time.Second, LockDelay: time.Millisecond,
		})
		if err != nil {
			return scenarios.Grant{}, err
		}
		lost, err := l.Lock(ctx.Done())
		if err == nil && lost == nil {
			err = dlock.ErrHeld
			if ctx.Err() != nil {
				err = ctx.Err()
			}
		}
		return scenarios.Grant{TTL: ttl, Lost: lost, Release: func(context.Context) error { return l.Unlock() }}, err
	}}, nil
}

func openGoZookeeper(ctx context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
	connected := make(chan struct{})
	has := sync.OnceFunc(func() { close(connected) })
	var lost atomic.Pointer[chan struct{}] // closed when the session may have ended
	first := make(chan struct{})
	lost.Store(&first)
	conn, _, err := zk.Connect(s.Addrs, s.TTL, zk.WithLogger(log.New(io.Discard, "", 0)), zk.WithEventCallback(func(e zk.Event) {
		if e.State == zk.StateHasSession {
			has()
		}
		// A disconnected client learns only after it reconnects that its session has ended.
		if e.State == zk.StateDisconnected || e.State == zk.StateExpired {
			next := make(chan struct{})
			close(*lost.Swap(&next))
		}
	}))
	if err != nil {
		return nil, err
	}
	select {
	case <-connected:
	case <-ctx.Done():
		conn.Close()
		return nil, context.Cause(ctx)
	}
	return scenarios.Adapter{
		Get: func(ctx context.Context, key string, wait bool) (scenarios.Grant, error) {
			path, over := "/locks/"+url.PathEscape(key), *lost.Load()
			lock, done := zk.NewLock(conn, path, zk.WorldACL(zk.PermAll)), make(chan error, 1)
			unlock := func() (err error) {
				for range 100 {
					if err = lock.Unlock(); err == nil || errors.Is(err, zk.ErrNoNode) || errors.Is(err, zk.ErrNotLocked) || errors.Is(err, zk.ErrClosing) {
						break
					}
					time.Sleep(50 * time.Millisecond)
				}
				return err
			}
			go func() { // its calls take no context, and there is no try
				others, _, err := conn.Children(path)
				switch {
				case !wait && err == nil && len(others) > 0:
					err = dlock.ErrHeld
				case err == nil || errors.Is(err, zk.ErrNoNode):
					err = lock.Lock()
				}
				select {
				case <-over:
					if err == nil {
						err = errors.Join(errors.New("the session may have ended"), unlock())
					}
				default:
				}
				done <- err
			}()
			select {
			case err := <-done:
				var mu sync.Mutex
				return scenarios.Grant{TTL: s.TTL, Lost: over, Release: func(ctx context.Context) error {
					released := make(chan error, 1)
					go func() {
						mu.Lock()
						defer mu.Unlock()
						released <- lock.Unlock()
					}()
					select {
					case err := <-released:
						return err
					case <-ctx.Done():
						return ctx.Err()
					}
				}}, err
			case <-ctx.Done():
				go func() {
					if <-done == nil {
						_ = unlock()
					}
				}()
				return scenarios.Grant{}, ctx.Err()
			}
		},
		Lost: zk.ErrNoNode,
		Shut: func() error { conn.Close(); return nil },
	}, nil
}

func openDynamolock(ctx context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
	web := &http.Client{Transport: http.DefaultTransport.(*http.Transport).Clone()}
	client := dynamodb.New(dynamodb.Options{
		HTTPClient: web, BaseEndpoint: aws.String("http://" + s.Addrs[0]), Region: "us-east-1",
		Credentials: credentials.NewStaticCredentialsProvider("fencelab", "fencelab", ""),
	})
	locks, err := dynamolock.New(client, "locks", dynamolock.WithLeaseDuration(s.TTL), dynamolock.WithHeartbeatPeriod(s.TTL/4))
	if err != nil {
		return nil, err
	}
	_, err = locks.CreateTableWithContext(ctx, "locks")
	if exists := (*types.ResourceInUseException)(nil); err != nil && !errors.As(err, &exists) {
		return nil, errors.Join(err, locks.Close())
	}
	return scenarios.Adapter{
		Get: func(ctx context.Context, key string, wait bool) (scenarios.Grant, error) {
			lost := make(chan struct{})
			o := []dynamolock.AcquireLockOption{
				// Called after this long without a renewal, but not once the lease has ended; it may first wait a quarter of the
				// TTL, for a renewal in progress.
				dynamolock.WithSessionMonitor(s.TTL/2, sync.OnceFunc(func() { close(lost) })),
				dynamolock.WithDeleteLockOnRelease(), dynamolock.WithRefreshPeriod(50 * time.Millisecond),
				dynamolock.WithAdditionalTimeToWaitForLock(1000 * time.Hour),
			}
			if !wait {
				o = append(o, dynamolock.FailIfLocked())
			}
			l, err := locks.AcquireLockWithContext(ctx, key, o...)
			if refused := (*dynamolock.LockNotGrantedError)(nil); errors.As(err, &refused) {
				err = fmt.Errorf("%w: %w", dlock.ErrHeld, err)
			}
			return scenarios.Grant{TTL: s.TTL, Lost: lost, Release: func(ctx context.Context) error {
				_, err := locks.ReleaseLockWithContext(ctx, l)
				if changed := (*types.ConditionalCheckFailedException)(nil); errors.As(err, &changed) {
					err = fmt.Errorf("%w: %w", dlock.ErrLost, err)
				}
				return err
			}}, err
		},
		Shut: func() error {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
			defer cancel()
			defer web.CloseIdleConnections()
			return locks.CloseWithContext(ctx)
		},
	}, nil
}

type start func(ctx context.Context) (scenarios.ServerSet, error)

func TestPromises(t *testing.T) {
	noTokens := scenarios.Service{NoTokens: true}
	plain := scenarios.Service{NoTokens: true, NoRenew: true}
	for _, l := range []struct {
		name, module string
		open         scenarios.Open
		start        start
		service      scenarios.Service
		ttl          time.Duration
		stays        bool // its servers can't be emptied: they would lack a table, or refuse clients that have seen more
		// broken are promises that it breaks in every run.
		broken []string
	}{
		{"redsync", "github.com/go-redsync/redsync/v4", openRedsync, redisNodes(1), plain, 0, false, nil},
		{"redsync-5", "github.com/go-redsync/redsync/v4", openRedsync, redisNodes(5), plain, 0, false, []string{"DataLoss"}},
		{"rueidislock", "github.com/redis/rueidis", openRueidislock, realRedis, noTokens, 0, false, []string{"ClockSkew"}},
		// https://github.com/etcd-io/website/issues/710
		{"etcd-mutex", "go.etcd.io/etcd/client/v3", openEtcd, cluster(testbed.StartEtcd), scenarios.Service{}, 2 * time.Second, false, []string{"LeaseLasts", "KeysIndependent"}},
		{
			"consul-api", "github.com/hashicorp/consul/api", openConsul, single(testbed.StartConsul),
			scenarios.Service{NoTokens: true, MinSession: testbed.ConsulMinSession},
			2 * time.Second, false,
			[]string{"LeaseLasts", "KeysIndependent", "WaitersCutOff", "EndsWithContext"},
		},
		{"go-zookeeper", "github.com/go-zookeeper/zk", openGoZookeeper, cluster(testbed.StartZooKeeper), noTokens, 2 * time.Second, true, nil},
		{"dynamolock", "cirello.io/dynamolock/v2", openDynamolock, single(testbed.StartDynamoDB), noTokens, 0, true, []string{"LeaseRenewed"}},
	} {
		t.Run(l.name, func(t *testing.T) {
			t.Parallel()
			set, err := l.start(t.Context())
			testbed.Need(t, err)
			t.Cleanup(func() { _ = set.Close() })
			var only []string
			// Nothing ends go-zookeeper's waits, so checking all promises takes minutes.
			if testing.Short() || l.name == "go-zookeeper" && os.Getenv("FENCELAB_PROMISES") == "" {
				only = append([]string{"Exclusive", "LeaseLasts", "ReleaseRepeated"}, l.broken...)
			}
			service, on := l.service, set.On()
			service.Lock, service.Server, service.Nodes, service.Fault = l.name, on.Server, on.Nodes, on.Fault
			if l.stays {
				service.Fault = nil
			}
			for i, s := range set.Servers {
				service.Nodes[i].Addr = s.Addr // not a URL
			}
			for _, row := range promises.Run(t, promises.Kit{Service: &service, Open: l.open, Module: l.module, TTL: l.ttl, Only: only}).Rows {
				if row.Verdict == promises.Kept && slices.Contains(l.broken, row.Promise) {
					t.Errorf("it keeps %s now, says the report", row.Promise)
				}
			}
		})
	}
}

func redisNodes(n int) start {
	return func(ctx context.Context) (scenarios.ServerSet, error) {
		all, err := testbed.StartRedisNodes(ctx, n, &testbed.Options{Clock: true})
		if err != nil { // imitations have no clock
			all, err = testbed.StartRedisNodes(ctx, n, &testbed.Options{AllowEmbedded: true})
		}
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

func cluster(from func(context.Context, int, *testbed.Options) (*testbed.Cluster, error)) start {
	return func(ctx context.Context) (scenarios.ServerSet, error) {
		c, err := from(ctx, 1, nil)
		if err != nil {
			return scenarios.ServerSet{}, err
		}
		return scenarios.ServerSet{Servers: c.Servers}, nil
	}
}

func single(from func(context.Context, *testbed.Options) (*testbed.Server, error)) start {
	return func(ctx context.Context) (scenarios.ServerSet, error) {
		s, err := from(ctx, nil)
		return scenarios.ServerSet{Servers: []*testbed.Server{s}}, err
	}
}
