package testbed_test

import (
	"bytes"
	"context"
	"errors"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func dialEtcd(t *testing.T, servers ...*testbed.Server) *clientv3.Client {
	t.Helper()
	var addrs []string
	for _, s := range servers {
		addrs = append(addrs, s.Addr)
	}
	c, err := clientv3.New(clientv3.Config{Endpoints: addrs, DialTimeout: 30 * time.Second})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// put retries: a leader that stalls for most of a second loses its election, and the client library doesn't retry writes.
func put(t *testing.T, c *clientv3.Client, value string) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, err := c.Put(t.Context(), "key", value)
		return err == nil
	}, time.Minute, 10*time.Millisecond)
}

func TestEtcd(t *testing.T) {
	need(t, testbed.Local, "etcd")
	ctx := t.Context()
	c := testmain.ServeCluster(t, testbed.StartEtcd, 3, &testbed.Options{Provider: testbed.Local})
	require.Regexp(t, `^3 × etcd 3\.\d+\.\d+ \(local\)$`, c.String())
	require.ErrorIs(t, c.RestoreSnapshot(ctx, nil, 0), errors.ErrUnsupported)
	_, err := c.Isolate(ctx, c.Servers[0])
	require.ErrorIs(t, err, errors.ErrUnsupported)
	_, err = c.Isolate(ctx, &testbed.Server{Name: "other"})
	require.ErrorContains(t, err, "not a member of this cluster")
	t.Setenv("FENCELAB_ETCD_ADDR", strings.Join(c.Addrs(), ","))
	users, err := testbed.StartEtcd(ctx, 3, &testbed.Options{Provider: testbed.External})
	require.NoError(t, err)
	require.Equal(t, c.Addrs(), users.Addrs())
	_, err = users.Leader(ctx)
	require.NoError(t, err)
	require.NoError(t, users.Close())
	require.NoError(t, c.Close())
	for _, addr := range c.Addrs() {
		requireGone(t, addr)
	}
}

func TestIsolate(t *testing.T) {
	docker := requireDocker(t, "etcd")
	ctx := t.Context()
	c := testmain.ServeCluster(t, testbed.StartEtcd, 3, &testbed.Options{Provider: testbed.Containers})
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
	go func() { restarted <- old.Restart(ctx) }()
	select {
	case err := <-restarted:
		t.Fatalf("it is back in the cluster, though it is isolated: %v", err)
	case <-time.After(2 * time.Second):
	}
	require.NoError(t, c.Close())
	require.Error(t, <-restarted)
	require.Empty(t, leftOf(t, docker, os.Getpid()), "with its network")
}

func TestRestoreSnapshotFails(t *testing.T) {
	need(t, testbed.Local, "etcd")
	c := testmain.ServeCluster(t, testbed.StartEtcd, 1, &testbed.Options{Provider: testbed.Local})
	require.ErrorContains(t, c.RestoreSnapshot(t.Context(), bytes.Repeat([]byte("no"), 1000), 0), "etcdutl")
}

func TestMembers(t *testing.T) {
	_, err := testbed.StartZooKeeper(t.Context(), 2, nil)
	require.EqualError(t, err, "testbed: a ZooKeeper ensemble of 2 members; want 1 or 3")
	_, err = testbed.StartEtcd(t.Context(), 2, nil)
	require.EqualError(t, err, "testbed: an etcd cluster of 2 members; want 1 or 3")
}
