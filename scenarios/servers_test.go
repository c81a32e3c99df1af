package scenarios_test

import (
	"cmp"
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/open"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// starters start the servers of a lock as a scenario needs them.
var starters = map[string]func(ctx context.Context, s scenarios.Scenario, o *testbed.Options) (open.Servers, error){
	locks.Redis:     startRedis,
	locks.Redlock:   startRedlock,
	locks.Etcd:      cluster(testbed.StartEtcd),
	locks.ZooKeeper: cluster(testbed.StartZooKeeper),
	locks.Consul:    single(testbed.StartConsul),
	locks.Postgres:  single(testbed.StartPostgres),
	locks.S3:        single(testbed.StartS3),
}

// needs reports whether a step of s has the target what, or a fault that needs it.
func needs(s scenarios.Scenario, what string) bool {
	return slices.ContainsFunc(s.Steps, func(st scenarios.Step) bool {
		f, _ := history.FaultNamed(st.Verb)
		return f.Needs == what || st.Target == what
	})
}

func startRedis(ctx context.Context, s scenarios.Scenario, o *testbed.Options) (open.Servers, error) {
	redis, err := testbed.StartRedis(ctx, o)
	if err != nil {
		return open.Servers{}, err
	}
	all := on(redis)
	if needs(s, "replica") {
		if all.Replica, err = testbed.StartRedisReplica(ctx, redis, o); err != nil {
			return all, errors.Join(err, redis.Close())
		}
	}
	return all, nil
}

func startRedlock(ctx context.Context, s scenarios.Scenario, o *testbed.Options) (open.Servers, error) {
	o.Clock = needs(s, "clock")
	nodes, err := testbed.StartRedisNodes(ctx, 5, o)
	return on(nodes...), err
}

func on(servers ...*testbed.Server) open.Servers {
	return open.Servers{ServerSet: scenarios.ServerSet{Servers: servers}}
}

type startCluster func(ctx context.Context, n int, o *testbed.Options) (*testbed.Cluster, error)

func cluster(start startCluster) func(context.Context, scenarios.Scenario, *testbed.Options) (open.Servers, error) {
	return func(ctx context.Context, s scenarios.Scenario, o *testbed.Options) (open.Servers, error) {
		n := 1
		if needs(s, scenarios.Leader) {
			n = 3
		}
		c, err := start(ctx, n, o)
		if err != nil {
			return open.Servers{}, err
		}
		return open.Servers{ServerSet: scenarios.ServerSet{Servers: c.Servers, Cluster: c}}, nil
	}
}

type startServer func(ctx context.Context, o *testbed.Options) (*testbed.Server, error)

func single(start startServer) func(context.Context, scenarios.Scenario, *testbed.Options) (open.Servers, error) {
	return func(ctx context.Context, _ scenarios.Scenario, o *testbed.Options) (open.Servers, error) {
		server, err := start(ctx, o)
		return on(server), err
	}
}

// locksOf returns the locks of -backend that have the hazard.
func locksOf(s scenarios.Scenario) []string {
	var names []string
	for _, name := range locks.Names() {
		wanted := *backend == "" || slices.Contains(strings.Split(*backend, ","), name)
		if wanted && s.On(name) {
			names = append(names, name)
		}
	}
	return names
}

// cache has servers that tests share and don't break, started on first use.
type cache[S io.Closer] struct {
	mu      sync.Mutex
	servers map[string]S
}

func (c *cache[S]) get(name string, start func() S) S {
	c.mu.Lock()
	defer c.mu.Unlock()
	s, ok := c.servers[name]
	if !ok {
		s = start()
		if c.servers == nil {
			c.servers = map[string]S{}
		}
		c.servers[name] = s
	}
	return s
}

func (c *cache[S]) Close() (err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, s := range c.servers {
		err = errors.Join(err, s.Close())
	}
	return err
}

var shared cache[open.Servers]

// serversFor returns a lock's servers for s: the test's own if s breaks them.
func serversFor(t *testing.T, lock string, s scenarios.Scenario) open.Servers {
	t.Helper()
	if s.Faulty() {
		return servers(t, lock, s)
	}
	return sharedServers(t, lock)
}

func sharedServers(t *testing.T, lock string) open.Servers {
	t.Helper()
	return shared.get(lock, func() open.Servers { return start(t, lock, scenarios.Scenario{}) })
}

// servers starts servers of the test's own.
func servers(t *testing.T, lock string, s scenarios.Scenario) open.Servers {
	t.Helper()
	all := start(t, lock, s)
	t.Cleanup(func() { require.NoError(t, all.Close()) })
	return all
}

func start(t *testing.T, lock string, s scenarios.Scenario) open.Servers {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 5*time.Minute)
	defer cancel()
	if s.Faulty() {
		notExternal(t)
	}
	if needs(s, "network") && providerOf(t) != testbed.Containers {
		t.Skipf("not applicable to %s servers: only containers have a network between them that one can be cut off from", providerOf(t))
	}
	f, ok := starters[lock]
	require.True(t, ok, "nothing starts the servers of %s", lock)
	all, err := f(ctx, s, options(t))
	testbed.Need(t, err)
	all.Lock = lock
	return all
}

// needLock skips a test if -backend excludes its lock.
func needLock(t *testing.T, lock string) {
	t.Helper()
	if len(locksOf(scenarios.Scenario{Locks: []string{lock}})) == 0 {
		t.Skip("-backend asks for other locks")
	}
}

// notExternal skips a test that breaks its servers, or needs them started in a special way, if they are external.
func notExternal(t *testing.T) {
	t.Helper()
	if cmp.Or(options(t).Provider, testbed.Provider(os.Getenv(testbed.EnvProvider))) == testbed.External {
		t.Skip("not applicable to external servers: they are the user's")
	}
}

func options(t *testing.T) *testbed.Options {
	t.Helper()
	o := &testbed.Options{Progress: os.Stderr, AllowEmbedded: true}
	if *provider != "" {
		var err error
		o.Provider, err = testbed.ParseProvider(*provider)
		require.NoError(t, err)
	}
	return o
}

func providerOf(t *testing.T) testbed.Provider {
	t.Helper()
	return sharedRedis(t).Provider
}

// sharedRedis is the Redis of tests of the runner.
func sharedRedis(t *testing.T) *testbed.Server {
	t.Helper()
	return sharedServers(t, locks.Redis).Servers[0]
}

// ownRedis starts a Redis of the test's own, and a client of it.
func ownRedis(t *testing.T, o *testbed.Options) (*testbed.Server, *redis.Client) {
	t.Helper()
	s, err := testbed.StartRedis(t.Context(), o)
	testbed.Need(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	c, err := redisclient.New(s.URL)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return s, c
}
