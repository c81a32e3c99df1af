package locks_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"net/url"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"
	"github.com/hashicorp/consul/api"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/fencelab/fencelab/dlock/memlock"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/dlock/redlock"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

type chaosLock struct {
	name  string
	start func(ctx context.Context) ([]*testbed.Server, error)
	open  func(ctx context.Context, s locks.Spec, r *rand.Rand) (backend, error)
	left  func(ctx context.Context, all []*testbed.Server) error
	// bound is the documented time after the last fault in which waiters get the lock and everything is cleaned up.
	bound time.Duration
}

const (
	zkSession    = 2 * ttl
	zkRequest    = 7 * zkSession   // go-zookeeper's timeout with a frozen server
	etcdSession  = 2 * time.Second // the TTL and a second, in whole seconds
	silence      = 4 * time.Second // until redislock replaces a subscription
	handOver     = ttl + ttl       // to a dead waiter: redislock's handoff TTL, and a poll
	redisRequest = 9 * time.Second // go-redis's timeouts, for a pooled connection and a reply
	waiterRetry  = 5 * time.Second // pglock's and consullock's wait for a reply
)

var memory = memlock.New()

var chaosLocks = []chaosLock{
	{"redis", startRedis(1), openRedis(redislock.ModeQueue), leftOnRedis, ttl + handOver + silence + redisRequest},
	{"redis-spin", startRedis(1), openRedis(redislock.ModeSpin), leftOnRedis, ttl + redisRequest},
	{"redlock", startRedis(5), openRedlock, leftOnRedis, ttl + redisRequest},
	{"etcd", startCluster(testbed.StartEtcd), openByName(locks.Etcd), leftOnEtcd, 2*etcdSession + 2*time.Second},
	{"zookeeper", startCluster(testbed.StartZooKeeper), openByName(locks.ZooKeeper), leftOnZooKeeper, zkRequest + zkSession},
	{"consul", startOne(testbed.StartConsul), openByName(locks.Consul), leftOnConsul, 3*ttl + waiterRetry},
	{"postgres", startOne(testbed.StartPostgres), openByName(locks.Postgres), leftOnPostgres, ttl + waiterRetry},
	{
		"s3", startOne(testbed.StartS3), openByName(locks.S3),
		func(context.Context, []*testbed.Server) error { return nil }, ttl + 3*time.Second, // a poll after the end by the server's clock
	},
	{
		"memory", func(context.Context) ([]*testbed.Server, error) { return nil, nil },
		func(context.Context, locks.Spec, *rand.Rand) (backend, error) {
			return backend{Backend: memory.Client(), close: func() error { return nil }}, nil
		},
		func(context.Context, []*testbed.Server) error { return nil }, ttl,
	},
}

func (l chaosLock) startServers(t *testing.T) []*testbed.Server {
	t.Helper()
	if b, _ := debug.ReadBuildInfo(); l.name == locks.ZooKeeper && slices.Contains(b.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) {
		t.Skip("not applicable with the race detector: go-zookeeper 1.0.4 has a race of its own when it connects again")
	}
	all, err := l.start(t.Context())
	testbed.Need(t, err)
	for _, s := range all {
		t.Cleanup(func() { require.NoError(t, s.Close()) })
		if s.Provider == testbed.External || s.Provider == testbed.Embedded {
			t.Skipf("not applicable to %s servers: it kills them", s.Provider)
		}
	}
	return all
}

func startRedis(n int) func(context.Context) ([]*testbed.Server, error) {
	return func(ctx context.Context) ([]*testbed.Server, error) {
		return testbed.StartRedisNodes(ctx, n, &testbed.Options{
			Args: []string{"--appendonly", "yes", "--appendfsync", "no"}, Clock: runtime.GOOS == "linux",
		})
	}
}

func startOne(start func(context.Context, *testbed.Options) (*testbed.Server, error)) func(context.Context) ([]*testbed.Server, error) {
	return func(ctx context.Context) ([]*testbed.Server, error) {
		s, err := start(ctx, nil)
		return []*testbed.Server{s}, err
	}
}

func startCluster(start func(context.Context, int, *testbed.Options) (*testbed.Cluster, error)) func(context.Context) ([]*testbed.Server, error) {
	return func(ctx context.Context) ([]*testbed.Server, error) {
		c, err := start(ctx, 3, nil)
		if err != nil {
			return nil, err
		}
		return c.Servers, nil
	}
}

func openByName(name string) func(context.Context, locks.Spec, *rand.Rand) (backend, error) {
	return func(ctx context.Context, s locks.Spec, _ *rand.Rand) (backend, error) {
		s.Lock, s.MinSession = name, testbed.ConsulMinSession
		if name == locks.ZooKeeper {
			s.MinSession = zkSession
		}
		b, err := locks.Open(ctx, s)
		if err != nil {
			return backend{}, err
		}
		return backend{Backend: b.Backend, close: b.Close}, nil
	}
}

func pick[T any](r *rand.Rand, of ...T) T { return of[r.IntN(len(of))] }

func openRedis(mode redislock.Mode) func(context.Context, locks.Spec, *rand.Rand) (backend, error) {
	return func(_ context.Context, s locks.Spec, r *rand.Rand) (backend, error) {
		o, err := redisclient.Options(s.Addrs[0], s.Dial)
		if err != nil {
			return backend{}, err
		}
		o.PoolSize, o.Protocol, o.MaxRetries = pick(r, 1, 2, 10), pick(r, 2, 3), pick(r, -1, 3)
		c := redis.NewClient(o)
		b, err := redislock.New(c, &redislock.Options{Mode: mode, Queue: redislock.Queue{HandoffTTL: pick(r, ttl/2, ttl)}})
		return backend{Backend: b, close: c.Close}, err
	}
}

func openRedlock(ctx context.Context, s locks.Spec, r *rand.Rand) (backend, error) {
	for i, addr := range s.Addrs {
		s.Addrs[i] = fmt.Sprintf("%s?%s", addr, url.Values{
			"pool_size": {pick(r, "1", "2", "10")}, "protocol": {pick(r, "2", "3")},
		}.Encode())
	}
	b, err := locks.OpenRedlock(ctx, s, &redlock.Options{NodeTimeout: pick(r, ttl/5, ttl/2)})
	if err != nil {
		return backend{}, err
	}
	return backend{Backend: b.Backend, close: b.Close}, nil
}

func errLeft(names []string) error {
	if len(names) > 0 {
		return fmt.Errorf("%q", names)
	}
	return nil
}

// leftOnRedis ignores counters, and roll-call keys, which expire within a minute.
func leftOnRedis(ctx context.Context, all []*testbed.Server) error {
	var left []string
	for _, s := range all {
		c, err := redisclient.New(s.Addr)
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		names, err := c.Keys(ctx, "*").Result()
		if err != nil {
			return err
		}
		for _, name := range names {
			switch {
			case strings.HasPrefix(name, "fence:{"), strings.HasPrefix(name, "redlock:fence:{"):
			case strings.HasSuffix(name, ":silent") && c.PTTL(ctx, name).Val() > 0:
			default:
				left = append(left, name)
			}
		}
	}
	return errLeft(left)
}

func leftOnEtcd(ctx context.Context, all []*testbed.Server) error {
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{all[0].Addr}, Logger: zap.NewNop()})
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	r, err := c.Get(ctx, "", clientv3.WithPrefix(), clientv3.WithKeysOnly())
	if err != nil {
		return err
	}
	leases, err := c.Leases(ctx)
	if err != nil {
		return err
	}
	var left []string
	for _, kv := range r.Kvs {
		left = append(left, string(kv.Key))
	}
	for _, l := range leases.Leases {
		left = append(left, fmt.Sprintf("lease %x", l.ID))
	}
	return errLeft(left)
}

// leftOnZooKeeper ignores parents, which ZooKeeper removes. It asks each member: what only one has is ZooKeeper's own defect.
func leftOnZooKeeper(_ context.Context, all []*testbed.Server) error {
	var left []string
	for _, s := range all {
		c, _, err := zk.Connect([]string{s.Addr}, zkSession, zk.WithLogger(log.New(io.Discard, "", 0)))
		if err != nil {
			return err
		}
		defer c.Close()
		if _, err := c.Sync("/"); err != nil {
			return err
		}
		for i := range keys {
			nodes, _, err := c.Children("/dlock/" + url.QueryEscape(key(i)))
			if err != nil && !errors.Is(err, zk.ErrNoNode) {
				return err
			}
			for _, n := range nodes {
				left = append(left, s.Name+" "+n)
			}
		}
	}
	return errLeft(left)
}

func leftOnConsul(ctx context.Context, all []*testbed.Server) error {
	c, err := api.NewClient(&api.Config{Address: all[0].Addr, Transport: &http.Transport{DisableKeepAlives: true}})
	if err != nil {
		return err
	}
	q := new(api.QueryOptions).WithContext(ctx)
	left, _, err := c.KV().Keys("", "", q)
	if err != nil {
		return err
	}
	sessions, _, err := c.Session().List(q)
	for _, s := range sessions {
		if s.TTL != "" { // others belong to the testbed's readiness check
			left = append(left, "session "+s.ID)
		}
	}
	return cmp.Or(err, errLeft(left))
}

func leftOnPostgres(ctx context.Context, all []*testbed.Server) error {
	c, err := pgx.Connect(ctx, all[0].URL)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close(ctx) }()
	rows, _ := c.Query(ctx, `
		SELECT 'held: ' || key FROM fencelab_lock WHERE owner IS NOT NULL AND expires > clock_timestamp()
		UNION ALL SELECT 'lock: ' || locktype FROM pg_locks WHERE pid <> pg_backend_pid()
		UNION ALL SELECT 'client: ' || query FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()`)
	left, err := pgx.CollectRows(rows, pgx.RowTo[string])
	return cmp.Or(err, errLeft(left))
}
