package open

import (
	"context"
	"errors"
	"fmt"

	"github.com/fencelab/fencelab/internal/locks"
	"github.com/fencelab/fencelab/internal/open/onredis"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// Servers are what a lock of this module runs on.
type Servers struct {
	scenarios.ServerSet
	Replica *testbed.Server // of the one Redis, for the faults lag and failover
}

// On is the service of servers that run for this process. One that is the user's can have no fault, and runs remove from a
// Redis what they leave there; other servers go with all that they hold.
func (s Servers) On() *scenarios.Service {
	var snapshot []byte
	switch s.Lock {
	case locks.Redis:
		return onredis.On(s.ServerSet, s.Replica)
	case locks.Etcd:
		s.Inject = func(ctx context.Context, server *testbed.Server, st scenarios.Step) (err error) {
			switch st.Fault {
			case history.FaultSnapshot:
				snapshot, err = snapshotEtcd(ctx, server)
				return err
			case history.FaultRestore:
				return restoreEtcd(ctx, s.Cluster, snapshot, st.Detail)
			}
			return scenarios.NoFault(st)
		}
	case locks.ZooKeeper:
		s.Inject = func(ctx context.Context, server *testbed.Server, st scenarios.Step) error {
			if st.Fault == history.FaultReap {
				return reapZooKeeper(ctx, server)
			}
			return scenarios.NoFault(st)
		}
	case locks.Redlock:
		s.Inject = onredis.Inject
	}
	svc := s.ServerSet.On()
	if s.Lock == locks.Consul && s.Servers[0].Provider != testbed.External {
		svc.MinSession = testbed.ConsulMinSession
	}
	return svc
}

// Close ends the servers.
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
