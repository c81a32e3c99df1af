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

// onServer are what only a certain lock's servers can have.
type onServer = map[string]func(ctx context.Context, s *testbed.Server, st scenarios.Step) error

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
		// go-zookeeper 1.0.4 has a race of its own: a connection that is made again reads Conn.lastZxid, for the watches
		// that it sets again, beside the goroutine that writes it. What it finds in a worker is printed, and no failure.
		svc.Env = []string{"GORACE=" + os.Getenv("GORACE") + " atexit_sleep_ms=0 exitcode=0"}
	}
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
