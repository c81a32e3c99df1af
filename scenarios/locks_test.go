package scenarios_test

import (
	"context"
	"errors"
	"io"
	"log"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/credentials"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/go-zookeeper/zk"
	"github.com/google/uuid"
	"github.com/hashicorp/consul/api"
	"github.com/jackc/pgx/v5"
	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redlock"
	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/internal/open"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/internal/s3object"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// Hazards that concern only the lock, and need neither workers nor a resource: each on every lock.

const (
	hold     = time.Minute // a lease that outlasts its test
	patience = 30 * time.Second
	look     = 5 * time.Millisecond // between polls
)

func everyLock(t *testing.T, f func(t *testing.T, lock string)) {
	t.Helper()
	for _, lock := range locksOf(scenarios.Scenario{}) {
		t.Run(lock, func(t *testing.T) {
			t.Parallel()
			f(t, lock)
		})
	}
}

func nodes(s open.Servers) []string {
	var addrs []string
	for _, n := range s.On().Nodes {
		addrs = append(addrs, n.Addr)
	}
	return addrs
}

var minSession = map[string]time.Duration{locks.Consul: testbed.ConsulMinSession, locks.ZooKeeper: time.Second}

func dial(t *testing.T, lock string, addrs []string, o dlock.Options) *dlock.Locker {
	t.Helper()
	spec := locks.Spec{Lock: lock, Addrs: addrs, TTL: o.TTL, MinSession: minSession[lock]}
	open := locks.Open
	if lock == locks.Redlock { // its default timeout, a part of the TTL, is too short on a busy machine
		open = func(ctx context.Context, s locks.Spec) (*locks.Backend, error) {
			return locks.OpenRedlock(ctx, s, &redlock.Options{NodeTimeout: 10 * time.Second})
		}
	}
	b, err := open(t.Context(), spec)
	require.NoError(t, err)
	l, err := dlock.New(b, &o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	return l
}

// links returns links to each server for one client, and their addresses.
func links(t *testing.T, s open.Servers) (all []*faults.Link, addrs []string) {
	t.Helper()
	for _, server := range s.Servers {
		link, err := faults.NewLink(server.Addr)
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, link.Close()) })
		addr := link.Addr()
		if u, err := url.Parse(server.URL); err == nil && u.Host == server.Addr {
			u.Host = addr
			addr = u.String()
		}
		all, addrs = append(all, link), append(addrs, addr)
	}
	return all, addrs
}

func newKey(t *testing.T) string {
	t.Helper()
	return t.Name() + "/" + uuid.NewString()
}

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

type granted struct {
	h   *dlock.Handle
	err error
}

func acquiring(ctx context.Context, t *testing.T, l *dlock.Locker, key string) <-chan granted {
	t.Helper()
	c, done := make(chan granted, 1), make(chan struct{})
	go func() {
		defer close(done)
		h, err := l.Acquire(ctx, key)
		c <- granted{h, err}
	}()
	t.Cleanup(func() { <-done })
	return c
}

// A lock service that is down grants nothing, and its leases end by themselves.
func TestCoordinatorDown(t *testing.T) {
	notExternal(t)
	everyLock(t, func(t *testing.T, lock string) {
		all := servers(t, lock, scenarios.Scenario{})
		l := dial(t, lock, nodes(all), dlock.Options{TTL: 2 * time.Second})
		ctx := within(t, patience)
		h, err := l.Acquire(ctx, newKey(t))
		require.NoError(t, err)
		for _, s := range all.Servers {
			testbed.Need(t, s.Kill(ctx))
		}
		_, err = l.TryAcquire(within(t, time.Second), newKey(t))
		require.Error(t, err, "TryAcquire of a free key, of a service that is down")
		require.NotErrorIs(t, err, dlock.ErrHeld)
		_, err = l.Acquire(within(t, time.Second), newKey(t))
		require.Error(t, err, "Acquire, of a service that is down")
		select {
		case <-h.Context().Done(): // by the holder's own clock
		case <-ctx.Done():
			t.Fatal("the holder's context goes on without the service")
		}
		require.ErrorIs(t, context.Cause(h.Context()), dlock.ErrLost)
		require.Error(t, h.Release(within(t, time.Second)), "Release, of a service that is down")
	})
}

// A grant whose reply is lost blocks nobody, and its token isn't reused.
func TestAcquireReplyLost(t *testing.T) {
	everyLock(t, func(t *testing.T, lock string) {
		all := sharedServers(t, lock)
		ways, addrs := links(t, all)
		a, b := dial(t, lock, addrs, dlock.Options{TTL: hold}), dial(t, lock, nodes(all), dlock.Options{TTL: hold})
		ctx, key := within(t, patience), newKey(t)
		turn := func(l *dlock.Locker) uint64 {
			h, err := l.Acquire(ctx, key)
			require.NoError(t, err)
			require.NoError(t, h.Release(ctx))
			return h.Fence()
		}
		before, lose := turn(a), (*faults.Link).LoseReplies
		if lock == locks.S3 { // whose first request is a GET
			lose = func(l *faults.Link, ctx context.Context) (faults.Heal, error) { return l.LoseRepliesFrom(ctx, 2) }
		}
		var heals []faults.Heal
		for _, w := range ways {
			heal, err := lose(w, ctx)
			require.NoError(t, err)
			heals = append(heals, heal)
		}
		ends, end := context.WithCancel(ctx)
		defer end()
		lost := acquiring(ends, t, a, key)
		require.Eventually(t, func() bool { return taken(t, lock, all, key) }, patience, look, "the request is applied")
		end()
		require.Error(t, (<-lost).err, "an acquisition without an answer")
		for _, heal := range heals {
			require.NoError(t, heal(ctx))
		}
		// If the lost grant weren't undone, it would last longer than the test.
		next := turn(b)
		require.Greater(t, next, before)
		require.Greater(t, turn(a), next, "the retry's token")
	})
}

func taken(t *testing.T, lock string, all open.Servers, key string) bool {
	t.Helper()
	switch lock {
	case locks.Redis, locks.Redlock:
		votes := 0
		for _, s := range all.Servers {
			c, err := redisclient.New(s.URL)
			require.NoError(t, err)
			n, err := c.Exists(t.Context(), "lock:{"+key+"}", "redlock:{"+key+"}").Result()
			require.NoError(t, errors.Join(err, c.Close()))
			votes += int(n)
		}
		return votes > len(all.Servers)/2
	case locks.Etcd:
		return etcdQueue(t, all.Servers[0], key) > 0
	case locks.ZooKeeper:
		return zooKeeperQueue(t, all.Servers[0], key) > 0
	case locks.Consul:
		c, err := api.NewClient(&api.Config{Address: all.Servers[0].Addr, HttpClient: &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}})
		require.NoError(t, err)
		names, _, err := c.KV().Keys("lock/", "", nil)
		require.NoError(t, err)
		return slices.ContainsFunc(names, func(name string) bool { return strings.HasSuffix(name, path.Base(key)) })
	case locks.Postgres:
		c, err := pgx.Connect(t.Context(), all.Servers[0].URL)
		require.NoError(t, err)
		var owned bool
		err = c.QueryRow(t.Context(), "SELECT owner IS NOT NULL FROM fencelab_lock WHERE key = $1", key).Scan(&owned)
		require.NoError(t, errors.Join(err, c.Close(t.Context())))
		return owned
	case locks.S3:
		u, err := url.Parse(all.Servers[0].URL)
		require.NoError(t, err)
		secret, _ := u.User.Password()
		c := s3.New(s3.Options{
			Region: "us-east-1", BaseEndpoint: aws.String("http://" + u.Host), UsePathStyle: true,
			Credentials: credentials.NewStaticCredentialsProvider(u.User.Username(), secret, ""),
			HTTPClient:  &http.Client{Transport: &http.Transport{DisableKeepAlives: true}},
		})
		out, err := c.GetObject(t.Context(), &s3.GetObjectInput{Bucket: aws.String("locks"), Key: aws.String("lock/" + s3object.Name(key))})
		require.NoError(t, err)
		body, err := io.ReadAll(out.Body)
		require.NoError(t, errors.Join(err, out.Body.Close()))
		return strings.Contains(string(body), `"held":true`)
	}
	require.FailNow(t, "no way to look into it", lock)
	return false
}

// A cancelled waiter blocks nobody.
func TestWaiterCancelled(t *testing.T) {
	everyLock(t, func(t *testing.T, lock string) {
		all := sharedServers(t, lock)
		o := dlock.Options{TTL: hold}
		holder, first, second := dial(t, lock, nodes(all), o), dial(t, lock, nodes(all), o), dial(t, lock, nodes(all), o)
		ctx, key := within(t, patience), newKey(t)
		h, err := holder.Acquire(ctx, key)
		require.NoError(t, err)
		why := errors.New("the caller has had enough")
		ends, end := context.WithCancelCause(ctx)
		defer end(nil)
		gone := acquiring(ends, t, first, key)
		queued(t, lock, all, key, 2)
		stays := acquiring(ctx, t, second, key)
		queued(t, lock, all, key, 3)
		end(why)
		require.ErrorIs(t, (<-gone).err, why)
		require.NoError(t, h.Release(ctx))
		next := <-stays
		require.NoError(t, next.err)
		require.Greater(t, next.h.Fence(), h.Fence())
		require.NoError(t, next.h.Release(ctx))
		last, err := first.Acquire(ctx, key)
		require.NoError(t, err, "the cancelled waiter left something behind")
		require.NoError(t, last.Release(ctx))
	})
}

// queued waits until n clients hold key or wait for it. If the server doesn't know its waiters, it waits for another lease to end,
// long enough for a waiter to have polled.
func queued(t *testing.T, lock string, all open.Servers, key string, n int) {
	t.Helper()
	switch lock {
	case locks.Etcd:
		require.Eventually(t, func() bool { return etcdQueue(t, all.Servers[0], key) == n }, patience, look)
	case locks.ZooKeeper:
		require.Eventually(t, func() bool { return zooKeeperQueue(t, all.Servers[0], key) == n }, patience, look)
	default:
		ctx, other := within(t, patience), newKey(t)
		_, err := dial(t, lock, nodes(all), dlock.Options{TTL: time.Second}).Acquire(ctx, other)
		require.NoError(t, err)
		next, err := dial(t, lock, nodes(all), dlock.Options{TTL: hold}).Acquire(ctx, other)
		require.NoError(t, err)
		require.NoError(t, next.Release(ctx))
	}
}

// Reentrant handles share one token and its renewals, and the lock is free when the last is released.
func TestReentrant(t *testing.T) {
	everyLock(t, func(t *testing.T, lock string) {
		all := sharedServers(t, lock)
		reg := prometheus.NewRegistry()
		l := dial(t, lock, nodes(all), dlock.Options{
			TTL: hold, Reentrant: true, Renew: dlock.Renew{Every: 250 * time.Millisecond, MaxHold: time.Hour}, Registerer: reg,
		})
		other := dial(t, lock, nodes(all), dlock.Options{TTL: hold})
		ctx, key := within(t, patience), newKey(t)
		outer, err := l.Acquire(ctx, key)
		require.NoError(t, err)
		first := outer.Until()
		inner, err := l.Acquire(outer.Context(), key)
		require.NoError(t, err)
		require.Equal(t, outer.Fence(), inner.Fence())
		require.NoError(t, inner.Release(ctx))
		require.ErrorIs(t, context.Cause(inner.Context()), dlock.ErrReleased)

		require.Eventually(t, func() bool { return outer.Until().After(first) || outer.Context().Err() != nil }, patience, look)
		require.NoError(t, outer.Context().Err())
		require.Positive(t, counter(t, reg, "dlock_renewals_total"))
		_, err = other.TryAcquire(ctx, key)
		require.ErrorIs(t, err, dlock.ErrHeld, "the outer handle holds it")
		require.NoError(t, outer.Release(ctx))
		next, err := other.Acquire(ctx, key)
		require.NoError(t, err)
		require.Greater(t, next.Fence(), outer.Fence())
		require.NoError(t, next.Release(ctx))
	})
}

func counter(t *testing.T, reg *prometheus.Registry, name string) float64 {
	t.Helper()
	families, err := reg.Gather()
	require.NoError(t, err)
	var found *dto.MetricFamily
	for _, f := range families {
		if f.GetName() == name {
			found = f
		}
	}
	require.NotNil(t, found, "metric %s", name)
	return found.GetMetric()[0].GetCounter().GetValue()
}

// A waiter whose session has expired has lost its position and must not take the lock. The session, as long as the TTL in etcd and
// twice as long in ZooKeeper, must live until the waiter is queued.
func TestEtcdExpiredWaiter(t *testing.T) { expiredWaiter(t, locks.Etcd, 4*time.Second, etcdQueue) }

func TestZooKeeperSessionExpiry(t *testing.T) {
	expiredWaiter(t, locks.ZooKeeper, 2*time.Second, zooKeeperQueue)
}

func expiredWaiter(t *testing.T, lock string, ttl time.Duration, queue func(t *testing.T, s *testbed.Server, key string) int) {
	t.Helper()
	t.Parallel()
	needLock(t, lock)
	all := sharedServers(t, lock)
	key, ctx := newKey(t), within(t, 2*patience)
	await := func(n int, what string) {
		t.Helper()
		require.Eventually(t, func() bool { return queue(t, all.Servers[0], key) == n }, patience, look, what)
	}
	a, c := dial(t, lock, nodes(all), dlock.Options{TTL: hold}), dial(t, lock, nodes(all), dlock.Options{TTL: hold})
	h, err := a.Acquire(ctx, key)
	require.NoError(t, err)

	ways, addrs := links(t, all)
	b := dial(t, lock, addrs, dlock.Options{TTL: ttl})
	waits := acquiring(ctx, t, b, key)
	await(2, "the waiter is in the queue")
	cut, err := ways[0].Cut(ctx)
	require.NoError(t, err)
	await(1, "the server has ended the waiter's session")
	next := acquiring(ctx, t, c, key)
	await(2, "another waits in its place")
	require.NoError(t, h.Release(ctx))
	won := <-next
	require.NoError(t, won.err)

	require.NoError(t, cut(ctx))
	// It fails or queues again; in neither case does it have the lock.
	var late granted
	select {
	case late = <-waits:
		require.Error(t, late.err, "a waiter without a session was granted the lock, token %v", late.h)
	default:
	}
	require.NoError(t, won.h.Release(ctx))
	if late.err == nil {
		late = <-waits
	}
	if late.err == nil {
		require.Greater(t, late.h.Fence(), won.h.Fence())
		require.NoError(t, late.h.Release(ctx))
	}
}

// etcdQueue returns how many keys hold key's lock or wait for it.
func etcdQueue(t *testing.T, s *testbed.Server, key string) int {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{s.Addr}, Logger: zap.NewNop()})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	r, err := c.Get(t.Context(), "lock/"+url.PathEscape(key)+"/", clientv3.WithPrefix(), clientv3.WithCountOnly())
	require.NoError(t, err)
	return int(r.Count)
}

// zooKeeperQueue returns how many nodes hold key's lock or wait for it; -1 if connecting took longer than the client's second.
func zooKeeperQueue(t *testing.T, s *testbed.Server, key string) int {
	t.Helper()
	c, _, err := zk.Connect([]string{s.Addr}, patience, zk.WithLogger(log.New(io.Discard, "", 0)))
	require.NoError(t, err)
	defer c.Close()
	children, _, err := c.Children("/dlock/" + url.PathEscape(key))
	switch {
	case errors.Is(err, zk.ErrNoNode):
		return 0
	case errors.Is(err, zk.ErrNoServer), errors.Is(err, zk.ErrConnectionClosed):
		return -1
	}
	require.NoError(t, err)
	return len(children)
}
