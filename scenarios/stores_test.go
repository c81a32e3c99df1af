package scenarios_test

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/fencelab/fencelab/internal/open"
	"github.com/fencelab/fencelab/internal/open/stores"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

var storeServers = map[string]func(context.Context, *testbed.Options) (*testbed.Server, error){
	stores.Postgres: testbed.StartPostgres,
	stores.Redis: func(ctx context.Context, o *testbed.Options) (*testbed.Server, error) {
		o.Args = open.DurableRedis()
		return testbed.StartRedis(ctx, o)
	},
	stores.S3:       testbed.StartS3,
	stores.DynamoDB: testbed.StartDynamoDB,
}

func wantsStore(name string) bool {
	return *over == "" || slices.Contains(strings.Split(*over, ","), name)
}

// sharedStores are the servers of stores, separate from those of locks. Tests over one store run one by one: some kill it.
var sharedStores cache[*testbed.Server]

func storeServer(t *testing.T, store string) *testbed.Server {
	t.Helper()
	return sharedStores.get(store, func() *testbed.Server {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 5*time.Minute)
		defer cancel()
		if store == stores.Redis { // its durability is in its arguments
			notExternal(t)
		}
		s, err := storeServers[store](ctx, options(t))
		testbed.Need(t, err)
		return s
	})
}
