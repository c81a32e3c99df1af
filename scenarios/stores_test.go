package scenarios_test

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/fencelab/fencelab/internal/open"
	"github.com/fencelab/fencelab/internal/open/stores"
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
