package scenarios_test

import (
	"cmp"
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/open"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// starters start the servers of a lock, with what a scenario needs of them.
var starters = map[string]func(ctx context.Context, s scenarios.Scenario, o *testbed.Options) (open.Servers, error){
	locks.Redis:     startRedis,
	locks.Redlock:   startRedlock,
	locks.Etcd:      cluster(testbed.StartEtcd),
	locks.ZooKeeper: cluster(testbed.StartZooKeeper),
	locks.Consul:    single(testbed.StartConsul),
	locks.Postgres:  single(testbed.StartPostgres),
}

// needs reports whether a step of s hits the target, or does a fault that needs something of its server.
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

// locksOf are the locks that have the hazard, and that the command line asks for.
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

// shared are the servers that several tests use, and leave as they were. Each is started by the first that needs it.
var shared struct {
	sync.Mutex
	servers map[string]open.Servers
}

// serversFor are servers of a lock on which s can run: of the test's own, if s breaks them.
func serversFor(t *testing.T, lock string, s scenarios.Scenario) open.Servers {
	t.Helper()
	if s.Faulty() {
		return servers(t, lock, s)
	}
	return sharedServers(t, lock)
}

func sharedServers(t *testing.T, lock string) open.Servers {
	t.Helper()
	shared.Lock()
	defer shared.Unlock()
	s, ok := shared.servers[lock]
	if ok {
		return s
	}
	s = start(t, lock, scenarios.Scenario{})
	if shared.servers == nil {
		shared.servers = map[string]open.Servers{}
	}
	shared.servers[lock] = s
	return s
}

func closeShared() error {
	shared.Lock()
	defer shared.Unlock()
	var errs []error
	for _, s := range shared.servers {
		errs = append(errs, s.Close())
	}
	sharedStores.Lock()
	defer sharedStores.Unlock()
	for _, s := range sharedStores.servers {
		errs = append(errs, s.Close())
	}
	return errors.Join(errs...)
}

// servers are servers of the test's own, for it to break as s does.
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

// notExternal skips a test that breaks its servers, or wants them started in a way of its own, where they are the user's.
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

// providerOf is where servers come from.
func providerOf(t *testing.T) testbed.Provider {
	t.Helper()
	return sharedRedis(t).Provider
}

// sharedRedis is the Redis of tests that are about the runner and not about a lock.
func sharedRedis(t *testing.T) *testbed.Server {
	t.Helper()
	return sharedServers(t, locks.Redis).Servers[0]
}
