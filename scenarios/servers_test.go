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
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// needs reports whether a step of s has the target what, or a fault that needs it.
func needs(s scenarios.Scenario, what string) bool {
	return slices.ContainsFunc(s.Steps, func(st scenarios.Step) bool {
		f, _ := history.FaultNamed(st.Verb)
		return f.Needs == what || st.Target == what
	})
}

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
	o, members := options(t), 1
	o.Clock = lock == locks.Redlock && needs(s, "clock")
	if needs(s, scenarios.Leader) {
		members = 3
	}
	all, err := open.Start(ctx, lock, members, o)
	testbed.Need(t, err)
	if needs(s, "replica") {
		if all.Replica, err = testbed.StartRedisReplica(ctx, all.Servers[0], o); err != nil {
			testbed.Need(t, errors.Join(err, all.Close()))
		}
	}
	return all
}

func needLock(t *testing.T, lock string) {
	t.Helper()
	if len(locksOf(scenarios.Scenario{Locks: []string{lock}})) == 0 {
		t.Skip("-backend asks for other locks")
	}
}

// notExternal skips a test that breaks or specially configures its servers, if they are external.
func notExternal(t *testing.T) {
	t.Helper()
	if cmp.Or(options(t).Provider, testbed.Provider(os.Getenv(testbed.EnvProvider))) == testbed.External {
		t.Skip("not applicable to external servers: they are the user's")
	}
}

func options(t *testing.T) *testbed.Options {
	t.Helper()
	return &testbed.Options{Provider: testbed.Provider(*provider), Progress: os.Stderr, AllowEmbedded: true}
}

func providerOf(t *testing.T) testbed.Provider {
	t.Helper()
	return sharedRedis(t).Provider
}

func sharedRedis(t *testing.T) *testbed.Server {
	t.Helper()
	return sharedServers(t, locks.Redis).Servers[0]
}

func ownRedis(t *testing.T, o *testbed.Options) (*testbed.Server, *redis.Client) {
	t.Helper()
	s := testmain.Serve(t, testbed.StartRedis, o)
	c, err := redisclient.New(s.URL)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return s, c
}

func TestThrough(t *testing.T) {
	for addr, want := range map[string]string{
		"localhost:1": "link:2", "127.0.0.1:1": "link:2", "postgres://u:p@localhost:1/db?a=b": "postgres://u:p@link:2/db?a=b",
	} {
		require.Equal(t, want, scenarios.Through(addr, "link:2"))
	}
}
