package open

import (
	"context"
	"errors"
	"io"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/fencelab/fencelab/scenarios/testbed"
)

// bumped is the detail of a restore that raises etcd's revision above every one issued after the snapshot
// (https://etcd.io/docs/v3.6/op-guide/recovery/#restoring-with-revision-bump).
const (
	bumped = "bumped"
	bumpBy = 1_000_000_000
)

func withEtcd(s *testbed.Server, f func(c *clientv3.Client) error) error {
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{s.Addr}, Logger: zap.NewNop()})
	if err != nil {
		return err
	}
	return errors.Join(f(c), c.Close())
}

func snapshotEtcd(ctx context.Context, s *testbed.Server) (snapshot []byte, err error) {
	err = withEtcd(s, func(c *clientv3.Client) error {
		r, err := c.Snapshot(ctx)
		if err != nil {
			return err
		}
		snapshot, err = io.ReadAll(r)
		return errors.Join(err, r.Close())
	})
	return snapshot, err
}
