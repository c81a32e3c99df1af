package scenarios_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/locks"
	"github.com/fencelab/fencelab/internal/open"
	"github.com/fencelab/fencelab/internal/stores"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// storeServers start the server of a store.
var storeServers = map[string]startServer{
	stores.Postgres: testbed.StartPostgres,
	stores.Redis: func(ctx context.Context, o *testbed.Options) (*testbed.Server, error) {
		o.Args = open.DurableRedis()
		return testbed.StartRedis(ctx, o)
	},
	stores.S3:       testbed.StartS3,
	stores.DynamoDB: testbed.StartDynamoDB,
}

// wantsStore reports whether the command line asks for a store.
func wantsStore(name string) bool {
	return *over == "" || slices.Contains(strings.Split(*over, ","), name)
}

// playEverywhere is play and playOverStores.
func playEverywhere(t *testing.T, name string, check func(*testing.T, history.Fencing, *scenarios.Outcome)) {
	t.Helper()
	if wantsStore(stores.HTTP) {
		play(t, name, check)
	}
	playOverStores(t, name, check)
}

// playOverStores runs a hazard over every store to which a worker can write straight, in each fencing mode, as play does over
// the HTTP resource. The lock is one, for the store doesn't know who has made its tokens: that of -backend, or redis.
func playOverStores(t *testing.T, name string, check func(*testing.T, history.Fencing, *scenarios.Outcome)) {
	t.Helper()
	s, ok := scenarios.Hazard(name)
	require.True(t, ok, "there is no hazard %q", name)
	lock := locksOf(s)[0]
	if slices.Contains(locksOf(s), locks.Redis) {
		lock = locks.Redis
	}
	for _, store := range stores.Names() {
		if store == stores.HTTP || !wantsStore(store) {
			continue
		}
		t.Run(lock+"+"+store, func(t *testing.T) {
			t.Parallel()
			over := open.OnServer(store, storeServer(t, store))
			for _, f := range fencings {
				if _, ok := s.Expect[f]; ok {
					t.Run(string(f), func(t *testing.T) { check(t, f, playOnce(t, service(t, lock), over, s, f)) })
				}
			}
		})
	}
}

// sharedStores are the servers of stores. A test that kills one shares it with nobody else at the time: the tests over one
// store run one after another.
var sharedStores struct {
	sync.Mutex
	servers map[string]*testbed.Server
}

// storeServer is the server of a store. It is another one than that of a lock, which a run mustn't lose with it.
func storeServer(t *testing.T, store string) *testbed.Server {
	t.Helper()
	sharedStores.Lock()
	defer sharedStores.Unlock()
	if s := sharedStores.servers[store]; s != nil {
		return s
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 5*time.Minute)
	defer cancel()
	if store == stores.Redis { // whose durability is in its arguments
		notExternal(t)
	}
	s, err := storeServers[store](ctx, options(t))
	testbed.Need(t, err)
	if sharedStores.servers == nil {
		sharedStores.servers = map[string]*testbed.Server{}
	}
	sharedStores.servers[store] = s
	return s
}
