package testbed_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelab/fencelab/scenarios/testbed"
)

func newEtcd(servers ...*testbed.Server) (*clientv3.Client, error) {
	var addrs []string
	for _, s := range servers {
		addrs = append(addrs, s.Addr)
	}
	return clientv3.New(clientv3.Config{Endpoints: addrs, DialTimeout: 30 * time.Second})
}

func dialEtcd(t *testing.T, servers ...*testbed.Server) *clientv3.Client {
	t.Helper()
	c, err := newEtcd(servers...)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// put sets key, retrying: a leader that is stalled for most of a second loses its election, and the client library doesn't retry
// writes.
func put(t *testing.T, c *clientv3.Client, value string) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, err := c.Put(t.Context(), "key", value)
		return err == nil
	}, time.Minute, 10*time.Millisecond)
}

func termOf(ctx context.Context, t *testing.T, s *testbed.Server) uint64 {
	t.Helper()
	status, err := dialEtcd(t, s).Status(ctx, s.Addr)
	require.NoError(t, err)
	return status.RaftTerm
}

func TestEtcd(t *testing.T) {
	onProviders(t, "etcd", func(t *testing.T, p testbed.Provider) {
		ctx := t.Context()
		c, err := testbed.StartEtcd(ctx, 3, &testbed.Options{Provider: p})
		testbed.Need(t, err)
		defer func() { require.NoError(t, c.Close()) }()
		require.Regexp(t, `^3 × etcd 3\.\d+\.\d+ \(`+string(p)+`\)$`, c.String())
		require.Len(t, c.Addrs(), 3)
		etcd := dialEtcd(t, c.Servers...)
		require.ErrorIs(t, c.RestoreSnapshot(ctx, nil, 0), errors.ErrUnsupported)
		if p == testbed.Local {
			_, err := c.Isolate(ctx, c.Servers[0])
			require.ErrorIs(t, err, errors.ErrUnsupported)
			_, err = c.Isolate(ctx, &testbed.Server{Name: "other"})
			require.ErrorContains(t, err, "not of this cluster")
			t.Setenv("FENCELAB_ETCD_ADDR", strings.Join(c.Addrs(), ","))
			users, err := testbed.StartEtcd(ctx, 3, &testbed.Options{Provider: testbed.External})
			require.NoError(t, err)
			require.Equal(t, c.Addrs(), users.Addrs())
			_, err = users.Leader(ctx)
			require.NoError(t, err)
			require.NoError(t, users.Close())
		}

		lease, err := etcd.Grant(ctx, 1)
		require.NoError(t, err)
		require.EqualValues(t, 1, lease.TTL, "the shortest lease")
		put(t, etcd, "value")

		leader, err := c.Leader(ctx)
		require.NoError(t, err)
		require.NoError(t, leader.Kill(ctx))
		requireGone(t, leader.Addr)
		next, err := c.Leader(ctx)
		require.NoError(t, err)
		require.NotEqual(t, leader.Name, next.Name)
		got, err := dialEtcd(t, next).Get(ctx, "key")
		require.NoError(t, err)
		require.Equal(t, "value", string(got.Kvs[0].Value))

		require.NoError(t, leader.Restart(ctx, testbed.RestartOptions{}))
		got, err = dialEtcd(t, leader).Get(ctx, "key")
		require.NoError(t, err)
		require.Equal(t, "value", string(got.Kvs[0].Value), "the member that was killed is back")

		term := termOf(ctx, t, next)
		heal, err := next.Pause(ctx)
		require.NoError(t, err)
		third, err := c.Leader(ctx, next)
		require.NoError(t, err)
		require.NotEqual(t, next.Name, third.Name)
		require.NoError(t, heal(ctx))
		require.Eventually(t, func() bool {
			led, err := c.Leader(ctx)
			return err == nil && termOf(ctx, t, led) > term
		}, time.Minute, 10*time.Millisecond, "it has heard of its successor, if it leads again")

		require.NoError(t, c.Close())
		for _, addr := range c.Addrs() {
			requireGone(t, addr)
		}
		require.NoError(t, c.Close(), "Close again")
	})
}

func TestIsolate(t *testing.T) {
	requireDocker(t, "etcd")
	ctx := t.Context()
	c, err := testbed.StartEtcd(ctx, 3, &testbed.Options{Provider: testbed.Containers})
	testbed.Need(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	for _, s := range c.Servers {
		heal, err := c.Isolate(ctx, s)
		require.NoError(t, err)
		leader, err := c.Leader(ctx, s)
		require.NoError(t, err)
		put(t, dialEtcd(t, leader), s.Name)
		require.NoError(t, heal(ctx))
		require.NoError(t, heal(ctx), "heal again")
		got, err := dialEtcd(t, s).Get(ctx, "key") // linearizable: it waits until the member has caught up
		require.NoError(t, err)
		require.Equal(t, s.Name, string(got.Kvs[0].Value))
	}

	put(t, dialEtcd(t, c.Servers...), "old")
	old, err := c.Leader(ctx)
	require.NoError(t, err)
	alone := dialEtcd(t, old)
	_, err = alone.Get(ctx, "key")
	require.NoError(t, err)
	_, err = c.Isolate(ctx, old)
	require.NoError(t, err)
	_, err = c.Isolate(ctx, old)
	require.ErrorContains(t, err, "already")
	leader, err := c.Leader(ctx, old)
	require.NoError(t, err)
	require.NotEqual(t, old.Name, leader.Name)
	put(t, dialEtcd(t, leader), "new")

	got, err := alone.Get(ctx, "key", clientv3.WithSerializable())
	require.NoError(t, err, "clients still reach it")
	require.Equal(t, "old", string(got.Kvs[0].Value), "and get what it knew")
	short, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	_, err = alone.Put(short, "key", "lost")
	require.Error(t, err, "it can't write")

	require.NoError(t, old.Kill(ctx))
	restarted := make(chan error, 1)
	go func() { restarted <- old.Restart(ctx, testbed.RestartOptions{}) }()
	select {
	case err := <-restarted:
		t.Fatalf("it is back in the cluster, though it is isolated: %v", err)
	case <-time.After(2 * time.Second):
	}
	require.NoError(t, c.Close())
	require.Error(t, <-restarted)
}

func TestRestoreSnapshot(t *testing.T) {
	onProviders(t, "etcd", func(t *testing.T, p testbed.Provider) {
		ctx := t.Context()
		c, err := testbed.StartEtcd(ctx, 1, &testbed.Options{Provider: p})
		testbed.Need(t, err)
		defer func() { require.NoError(t, c.Close()) }()
		etcd := dialEtcd(t, c.Servers...)
		_, err = etcd.Put(ctx, "key", "before")
		require.NoError(t, err)
		r, err := etcd.Snapshot(ctx)
		require.NoError(t, err)
		snapshot, err := io.ReadAll(r)
		require.NoError(t, err)
		require.NoError(t, r.Close())
		last, err := etcd.Put(ctx, "key", "after")
		require.NoError(t, err)

		addr := c.Servers[0].Addr
		require.NoError(t, c.RestoreSnapshot(ctx, snapshot, 0))
		require.Equal(t, addr, c.Servers[0].Addr)
		got, err := etcd.Get(ctx, "key")
		require.NoError(t, err)
		require.Equal(t, "before", string(got.Kvs[0].Value))
		require.Less(t, got.Header.Revision, last.Header.Revision, "the revision has gone backwards")

		require.NoError(t, c.RestoreSnapshot(ctx, snapshot, 1000))
		got, err = etcd.Get(ctx, "key")
		require.NoError(t, err)
		require.Equal(t, "before", string(got.Kvs[0].Value))
		require.Greater(t, got.Header.Revision, last.Header.Revision)

		require.ErrorContains(t, c.RestoreSnapshot(ctx, bytes.Repeat([]byte("no"), 1000), 0), "etcdutl")
		require.NoError(t, c.RestoreSnapshot(ctx, snapshot, 0), "after one that failed")
	})
}

// The number of members must be able to elect a leader.
func TestMembers(t *testing.T) {
	_, err := testbed.StartZooKeeper(t.Context(), 2, nil)
	require.EqualError(t, err, "testbed: an ensemble of 2 ZooKeepers, want 1 or 3")
	_, err = testbed.StartEtcd(t.Context(), 2, nil)
	require.EqualError(t, err, "testbed: 2 members of an etcd; want 1 or 3")
}
