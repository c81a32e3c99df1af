package testbed_test

import (
	"errors"
	"io"
	"log"
	"strings"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// onMember retries f while connections break: on a busy machine an ensemble loses its leader, and serves nobody until the next
// election.
func onMember(t *testing.T, s *testbed.Server, f func(*zk.Conn) error) {
	t.Helper()
	conn, _, err := zk.Connect([]string{s.Addr}, 10*time.Second, zk.WithLogger(log.New(io.Discard, "", 0)))
	require.NoError(t, err)
	defer conn.Close()
	for began := time.Now(); ; {
		err := f(conn)
		if err == nil {
			return
		}
		require.True(t, errors.Is(err, zk.ErrConnectionClosed) || errors.Is(err, zk.ErrNoServer), "%v", err)
		require.Less(t, time.Since(began), time.Minute, "%v", err)
	}
}

func requireKept(t *testing.T, s *testbed.Server) {
	t.Helper()
	onMember(t, s, func(conn *zk.Conn) error {
		if _, err := conn.Sync("/"); err != nil {
			return err
		}
		kept, _, err := conn.Exists("/kept")
		if err == nil {
			require.True(t, kept)
		}
		return err
	})
}

func TestZooKeeperIsolate(t *testing.T) {
	requireDocker(t, "zookeeper")
	ctx := t.Context()
	c := testmain.ServeCluster(t, testbed.StartZooKeeper, 3, &testbed.Options{Provider: testbed.Containers})
	first, err := c.Leader(ctx)
	require.NoError(t, err)
	onMember(t, first, func(conn *zk.Conn) error {
		_, err := conn.Create("/kept", nil, 0, zk.WorldACL(zk.PermAll))
		if errors.Is(err, zk.ErrNodeExists) { // made by a request without a reply
			err = nil
		}
		return err
	})
	// Members dial those with smaller numbers, so the first can't rejoin by itself.
	for _, s := range []*testbed.Server{first, c.Servers[0]} {
		heal, err := c.Isolate(ctx, s)
		require.NoError(t, err)
		require.Eventually(t, func() bool {
			answer, err := testbed.FourLetters(ctx, s.Addr, "srvr")
			return err == nil && strings.Contains(answer, "not currently serving")
		}, time.Minute, 10*time.Millisecond, "it has lost its quorum, and clients still reach it")
		leader, err := c.Leader(ctx, s)
		require.NoError(t, err)
		require.NotEqual(t, s.Name, leader.Name)
		requireKept(t, leader)
		require.NoError(t, heal(ctx))
		requireKept(t, s)
	}
}
