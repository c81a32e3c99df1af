package testbed_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"maps"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/testbed"
)

// onZooKeeper has a session for as long as f takes.
func onZooKeeper(ctx context.Context, s *testbed.Server, f func(*zk.Conn) error) error {
	conn, events, err := zk.Connect([]string{s.Addr}, 10*time.Second, zk.WithLogger(silent{}))
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

type silent struct{}

func (silent) Printf(string, ...any) {}

// ask sends a four-letter command.
func ask(t *testing.T, addr, word string) string {
	t.Helper()
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", addr)
	require.NoError(t, err)
	defer func() { require.NoError(t, conn.Close()) }()
	_, err = io.WriteString(conn, word)
	require.NoError(t, err)
	b, err := io.ReadAll(conn)
	require.NoError(t, err)
	return string(b)
}

// setting returns a line of the answer to a four-letter command.
func setting(t *testing.T, addr, word, name string) string {
	t.Helper()
	for sc := bufio.NewScanner(strings.NewReader(ask(t, addr, word))); sc.Scan(); {
		for _, sep := range []string{"=", ": ", "\t"} {
			if value, ok := strings.CutPrefix(sc.Text(), name+sep); ok {
				return value
			}
		}
	}
	return ""
}

func TestZooKeeper(t *testing.T) {
	onProviders(t, "zookeeper", func(t *testing.T, p testbed.Provider) {
		requireLife(t, p, life{
			start: func(ctx context.Context, o *testbed.Options) (*testbed.Server, error) {
				c, err := testbed.StartZooKeeper(ctx, 1, o)
				if err != nil {
					return nil, err
				}
				return c.Servers[0], nil
			},
			put: func(ctx context.Context, s *testbed.Server) error {
				return onZooKeeper(ctx, s, func(conn *zk.Conn) error {
					_, err := conn.Create("/kept", nil, 0, zk.WorldACL(zk.PermAll))
					return err
				})
			},
			get: func(ctx context.Context, s *testbed.Server) (kept bool, err error) {
				err = onZooKeeper(ctx, s, func(conn *zk.Conn) error {
					kept, _, err = conn.Exists("/kept")
					return err
				})
				return kept, err
			},
		})
	})
}

func TestZooKeeperSettings(t *testing.T) {
	onProviders(t, "zookeeper", func(t *testing.T, p testbed.Provider) {
		c, err := testbed.StartZooKeeper(t.Context(), 1, &testbed.Options{Provider: p, Args: []string{"minSessionTimeout=600"}})
		testbed.Need(t, err)
		defer func() { require.NoError(t, c.Close()) }()
		require.Len(t, c.Servers, 1)
		require.Equal(t, "zk1", c.Servers[0].Name)
		leader, err := c.Leader(t.Context())
		require.NoError(t, err)
		require.Same(t, c.Servers[0], leader)
		for name, want := range map[string]string{
			"tickTime":          strconv.FormatInt(testbed.ZooKeeperTick.Milliseconds(), 10),
			"minSessionTimeout": "600",
			"maxSessionTimeout": "3600000",
			"maxClientCnxns":    "0",
		} {
			require.Equal(t, want, setting(t, leader.Addr, "conf", name), name)
		}
	})
}

// onMember is onZooKeeper, again as long as the connection breaks: members give each other up when a busy machine holds one up
// for a second, and then serve nobody until they have elected a leader.
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

// requireKept says whether /kept is there, as seen at s.
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

// requireMember requires that s is one of an ensemble: a follower, or the leader if the others had none for a moment.
func requireMember(t *testing.T, s *testbed.Server) {
	t.Helper()
	require.Eventually(t, func() bool {
		mode := setting(t, s.Addr, "srvr", "Mode")
		return mode == "follower" || mode == "leader"
	}, time.Minute, 10*time.Millisecond)
}

func TestZooKeeperEnsemble(t *testing.T) {
	onProviders(t, "zookeeper", func(t *testing.T, p testbed.Provider) {
		ctx := t.Context()
		c, err := testbed.StartZooKeeper(ctx, 3, &testbed.Options{Provider: p})
		testbed.Need(t, err)
		defer func() { require.NoError(t, c.Close()) }()
		require.Equal(t, "3 × zookeeper "+c.Servers[0].Version+" ("+string(p)+")", c.String())
		require.Eventually(t, func() bool {
			modes := make(map[string]int)
			for _, addr := range c.Addrs() {
				modes[setting(t, addr, "srvr", "Mode")]++
			}
			return maps.Equal(modes, map[string]int{"leader": 1, "follower": 2})
		}, time.Minute, 10*time.Millisecond)

		// Without its leader it elects another one, which knows what was written.
		old, err := c.Leader(ctx)
		require.NoError(t, err)
		keep(t, old)
		require.NoError(t, old.Kill(ctx))
		leader, err := c.Leader(ctx)
		require.NoError(t, err)
		require.NotEqual(t, old.Name, leader.Name)
		requireKept(t, leader)

		// The old one comes back, on an empty disk too.
		for _, wipe := range []bool{false, true} {
			require.NoError(t, old.Restart(ctx, testbed.RestartOptions{Wipe: wipe}))
			requireMember(t, old)
			requireKept(t, old)
			require.NoError(t, old.Kill(ctx))
		}
		require.NoError(t, c.Close())
		for _, addr := range c.Addrs() {
			requireGone(t, addr)
		}
	})
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
	// Members connect to those whose number is less than theirs, so the first can't help to be found again.
	for _, s := range []*testbed.Server{first, c.Servers[0]} {
		heal, err := c.Isolate(ctx, s)
		require.NoError(t, err)
		require.Eventually(t, func() bool { return strings.Contains(ask(t, s.Addr, "srvr"), "not currently serving") },
			time.Minute, 10*time.Millisecond, "it has lost its quorum, and clients still reach it")
		leader, err := c.Leader(ctx, s)
		require.NoError(t, err)
		require.NotEqual(t, s.Name, leader.Name)
		requireKept(t, leader)

		require.NoError(t, heal(ctx))
		requireMember(t, s)
		requireKept(t, s)
	}
}

func TestZooKeeperThatEnds(t *testing.T) {
	onProviders(t, "zookeeper", func(t *testing.T, p testbed.Provider) {
		_, err := testbed.StartZooKeeper(t.Context(), 1, &testbed.Options{Provider: p, Args: []string{"tickTime=none"}})
		require.ErrorContains(t, err, "exit")
		require.ErrorContains(t, err, "NumberFormatException", "its log is in the error")
	})
}

func TestZooKeeperMembers(t *testing.T) {
	_, err := testbed.StartZooKeeper(t.Context(), 2, nil)
	require.EqualError(t, err, "testbed: an ensemble of 2 ZooKeepers, want 1 or 3")
}

func TestZooKeeperExternal(t *testing.T) {
	users, err := testbed.StartZooKeeper(t.Context(), 1, &testbed.Options{Provider: testbed.Local})
	testbed.Need(t, err)
	defer func() { require.NoError(t, users.Close()) }()

	t.Setenv(testbed.EnvZooKeeperAddr, users.Addrs()[0])
	external := &testbed.Options{Provider: testbed.External}
	c, err := testbed.StartZooKeeper(t.Context(), 1, external)
	testbed.Need(t, err)
	require.Equal(t, users.Addrs(), c.Addrs())
	require.ErrorIs(t, c.Servers[0].Kill(t.Context()), errors.ErrUnsupported)
	require.NoError(t, c.Close())
	require.True(t, listens(t, users.Addrs()[0]), "Close leaves the user's server alone")

	_, err = testbed.StartZooKeeper(t.Context(), 3, external)
	require.ErrorContains(t, err, "FENCELAB_ZOOKEEPER_ADDR names 1 of 3 servers")
}
