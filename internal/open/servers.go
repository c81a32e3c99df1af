package open

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/open/onredis"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

type onServer = map[string]func(ctx context.Context, s *testbed.Server, st scenarios.Step) error

// Servers are a lock's servers.
type Servers struct {
	scenarios.ServerSet
	Replica *testbed.Server // of the one Redis, for lag and failover
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
				return restoreEtcd(ctx, s.Cluster, snapshot, st.Detail)
			},
		}
	case locks.ZooKeeper:
		s.Faults = onServer{"reap": reapZooKeeper}
	case locks.Redlock:
		s.Faults = onredis.Faults()
	}
	svc := s.ServerSet.On()
	if s.Lock == locks.ZooKeeper {
		// go-zookeeper 1.0.4 has a data race of its own: a new connection reads Conn.lastZxid while another goroutine writes it.
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
	case c == nil || snapshot == nil:
		return errors.New("there is no snapshot; take one before")
	case detail == bumped:
		return c.RestoreSnapshot(ctx, snapshot, bumpBy)
	case detail == "":
		return c.RestoreSnapshot(ctx, snapshot, 0)
	}
	return fmt.Errorf("a restore's detail is empty or %q", bumped)
}
