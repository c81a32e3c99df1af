package testbed_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"log"
	"strings"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/testbed"
)

func onZooKeeper(ctx context.Context, s *testbed.Server, f func(*zk.Conn) error) error {
	conn, events, err := zk.Connect([]string{s.Addr}, 10*time.Second, zk.WithLogger(log.New(io.Discard, "", 0)))
	if err != nil {
		return err
	}
	defer conn.Close()
	for {
		select {
		case e := <-events:
			if e.State == zk.StateHasSession {
				return f(conn)
			}
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// setting returns a line of the reply to a four-letter command; without a name, all of it.
func setting(ctx context.Context, addr, word, name string) (string, error) {
	reply, err := testbed.FourLetters(ctx, addr, word)
	if name == "" || err != nil {
		return reply, err
	}
	for sc := bufio.NewScanner(strings.NewReader(reply)); sc.Scan(); {
		for _, sep := range []string{"=", ": ", "\t"} {
			if value, ok := strings.CutPrefix(sc.Text(), name+sep); ok {
				return value, nil
			}
		}
	}
	return "", nil
}

// onMember retries onZooKeeper while connections break: on a busy machine an ensemble loses its leader, and serves nobody until the
// next election.
func onMember(t *testing.T, s *testbed.Server, f func(*zk.Conn) error) {
	t.Helper()
	for began := time.Now(); ; {
		err := onZooKeeper(t.Context(), s, f)
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

func keep(t *testing.T, s *testbed.Server) {
	t.Helper()
	onMember(t, s, func(conn *zk.Conn) error {
		_, err := conn.Create("/kept", nil, 0, zk.WorldACL(zk.PermAll))
		if errors.Is(err, zk.ErrNodeExists) { // made by a request that had no answer
			err = nil
		}
		return err
	})
}

// requireMember waits until s is a follower or, after another election, the leader.
func requireMember(t *testing.T, s *testbed.Server) {
	t.Helper()
	require.Eventually(t, func() bool {
		mode, _ := setting(t.Context(), s.Addr, "srvr", "Mode")
		return mode == "follower" || mode == "leader"
	}, time.Minute, 10*time.Millisecond)
}

func TestZooKeeperIsolate(t *testing.T) {
	requireDocker(t, "zookeeper")
	ctx := t.Context()
	c, err := testbed.StartZooKeeper(ctx, 3, &testbed.Options{Provider: testbed.Containers})
	testbed.Need(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	first, err := c.Leader(ctx)
	require.NoError(t, err)
	keep(t, first)
	// Members dial those with smaller numbers, so the first can't rejoin by itself.
	for _, s := range []*testbed.Server{first, c.Servers[0]} {
		heal, err := c.Isolate(ctx, s)
		require.NoError(t, err)
		require.Eventually(t, func() bool {
			answer, err := setting(ctx, s.Addr, "srvr", "")
			return err == nil && strings.Contains(answer, "not currently serving")
		}, time.Minute, 10*time.Millisecond, "it has lost its quorum, and clients still reach it")
		leader, err := c.Leader(ctx, s)
		require.NoError(t, err)
		require.NotEqual(t, s.Name, leader.Name)
		requireKept(t, leader)

		require.NoError(t, heal(ctx))
		requireMember(t, s)
		requireKept(t, s)
	}
}
