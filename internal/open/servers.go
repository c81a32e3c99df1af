package open

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/open/onredis"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

type onServer = map[string]func(ctx context.Context, s *testbed.Server, st scenarios.Step) error

// Servers are a lock's servers.
type Servers struct {
	scenarios.ServerSet
	Replica *testbed.Server // of a single Redis, for lag and failover
}

// Start starts a lock's servers: five Redlock nodes, a cluster of n members of etcd or ZooKeeper, one server of the others.
func Start(ctx context.Context, lock string, n int, o *testbed.Options) (Servers, error) {
	s := scenarios.ServerSet{Lock: lock}
	var err error
	one := func(start func(context.Context, *testbed.Options) (*testbed.Server, error)) {
		s.Servers = make([]*testbed.Server, 1)
		s.Servers[0], err = start(ctx, o)
	}
	cluster := func(start func(context.Context, int, *testbed.Options) (*testbed.Cluster, error)) {
		var c *testbed.Cluster
		if c, err = start(ctx, n, o); err == nil {
			s.Servers = c.Servers
		}
	}
	switch lock {
	case locks.Redis:
		one(testbed.StartRedis)
	case locks.Redlock:
		s.Servers, err = testbed.StartRedisNodes(ctx, 5, o)
	case locks.Etcd:
		cluster(testbed.StartEtcd)
	case locks.ZooKeeper:
		cluster(testbed.StartZooKeeper)
	case locks.Consul:
		one(testbed.StartConsul)
	case locks.Postgres:
		one(testbed.StartPostgres)
	case locks.S3:
		one(testbed.StartS3)
	default:
		err = fmt.Errorf("there is no lock service %q; there are %s", lock, strings.Join(locks.Names(), ", "))
	}
	if err != nil {
		return Servers{}, err
	}
	return Servers{ServerSet: s}, nil
}

// On returns the service on the servers. External servers have no faults, and runs delete their keys from an external Redis.
func (s Servers) On() *scenarios.Service {
	var snapshot []byte
	switch s.Lock {
	case locks.Redis:
		return onredis.On(s.ServerSet, s.Replica)
	case locks.Etcd:
		s.Faults = onServer{
			"snapshot": func(ctx context.Context, server *testbed.Server, _ scenarios.Step) (err error) {
				snapshot, err = snapshotEtcd(ctx, server)
				return err
			},
			"restore": func(ctx context.Context, _ *testbed.Server, st scenarios.Step) error {
				return restoreEtcd(ctx, s.Servers[0].Cluster, snapshot, st.Detail)
			},
		}
	case locks.ZooKeeper:
		s.Faults = onServer{"reap": reapZooKeeper}
	case locks.Redlock:
		s.Faults = onredis.Faults()
	}
	svc := s.ServerSet.On()
	if s.Lock == locks.ZooKeeper {
		// go-zookeeper 1.0.4 has a data race: a new connection reads Conn.lastZxid while another goroutine writes it.
		svc.Env = []string{"GORACE=" + os.Getenv("GORACE") + " atexit_sleep_ms=0 exitcode=0"}
	}
	if s.Lock == locks.Consul && s.Servers[0].Provider != testbed.External {
		svc.MinSession = testbed.ConsulMinSession
	}
	return svc
}

// Close closes the servers.
func (s Servers) Close() error {
	err := s.ServerSet.Close()
	if s.Replica != nil {
		err = errors.Join(s.Replica.Close(), err)
	}
	return err
}

func restoreEtcd(ctx context.Context, c *testbed.Cluster, snapshot []byte, detail string) error {
	switch {
	case snapshot == nil:
		return errors.New("there is no snapshot; take one before")
	case detail == bumped:
		return c.RestoreSnapshot(ctx, snapshot, bumpBy)
	case detail == "":
		return c.RestoreSnapshot(ctx, snapshot, 0)
	}
	return fmt.Errorf("a restore takes no detail or %q, not %q", bumped, detail)
}
