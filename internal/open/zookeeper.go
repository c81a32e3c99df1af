package open

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

const zkRoot = "/dlock"

// reapZooKeeper deletes the parents of unused locks, as ZooKeeper does later.
func reapZooKeeper(ctx context.Context, s *testbed.Server, _ scenarios.Step) error {
	c, events, err := zk.Connect([]string{s.Addr}, 10*time.Second, zk.WithLogInfo(false), zk.WithLogger(log.New(io.Discard, "", 0)))
	if err != nil {
		return err
	}
	defer c.Close()
	for connected := false; !connected; { // an earlier request would fail if connecting took a second
		select {
		case e := <-events:
			connected = e.State == zk.StateHasSession
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	parents, _, err := c.Children(zkRoot)
	if err != nil {
		return err
	}
	reaped := 0
	for _, name := range parents {
		switch err := c.Delete(zkRoot+"/"+name, -1); {
		case err == nil:
			reaped++
		case errors.Is(err, zk.ErrNotEmpty), errors.Is(err, zk.ErrNoNode):
		default:
			return err
		}
	}
	if reaped == 0 {
		return fmt.Errorf("none of the %d locks is idle", len(parents))
	}
	return nil
}
