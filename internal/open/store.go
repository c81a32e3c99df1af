package open

import (
	"context"

	"github.com/fencelab/fencelab/internal/open/onaws"
	"github.com/fencelab/fencelab/internal/open/onredis"
	"github.com/fencelab/fencelab/internal/open/stores"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

const container = "fencelab-scenarios"

// Store opens a store of this module.
func Store(ctx context.Context, s scenarios.StoreSpec) (resource.Store, error) {
	if s.Store == onredis.Bolt.Name {
		return onredis.Store(ctx, s)
	}
	store, err := stores.Open(ctx, s.Addr, stores.Options{Fresh: !s.Held, Prepared: s.Worker})
	if err != nil {
		return nil, err // not a nil *stores.Store
	}
	return store, nil
}

// OnServer returns a store on a server; start Redis with [DurableRedis]. Runs leave data on an external server.
func OnServer(store string, s *testbed.Server) *scenarios.Store {
	st := &scenarios.Store{Name: store, Server: s.String(), Addr: s.URL, Open: Store}
	if store == stores.S3 || store == stores.DynamoDB {
		st.Addr = onaws.On(store, container, s.URL)
	}
	st.Volatile = store == stores.DynamoDB
	st.Kill = s.Kill
	st.Restart = s.Restart
	return st
}

// DurableRedis returns the arguments of a Redis whose acknowledged writes survive a kill.
func DurableRedis() []string { return []string{"--appendonly", "yes", "--appendfsync", "always"} }
