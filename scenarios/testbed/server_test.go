package testbed_test

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// onProviders runs test with local servers and in containers, and then checks for leftovers.
func onProviders(t *testing.T, serverType string, test func(t *testing.T, p testbed.Provider)) {
	t.Helper()
	for _, p := range []testbed.Provider{testbed.Local, testbed.Containers} {
		t.Run(string(p), func(t *testing.T) {
			need(t, p, serverType)
			tmp := t.TempDir()
			t.Setenv("TMPDIR", tmp)
			t.Run(serverType, func(t *testing.T) { test(t, p) })
			if p == testbed.Containers {
				require.Empty(t, leftOf(t, newDocker(t), os.Getpid()))
			}
			require.Empty(t, entries(t, tmp))
		})
	}
}

func need(t *testing.T, p testbed.Provider, serverType string) {
	t.Helper()
	testbed.Need(t, testbed.Lacks(t.Context(), p, serverType))
}

// during starts f, which must not return yet, and returns a function that waits for it.
func during(t *testing.T, f func() error) (after func()) {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		t.Fatalf("it returned under the fault: %v", err)
	case <-time.After(200 * time.Millisecond): // without a fault it returns within a few
	}
	return func() {
		t.Helper()
		require.NoError(t, <-done)
	}
}

func TestDeny(t *testing.T) {
	denies := func(t *testing.T, p testbed.Provider) {
		s := startRedis(t, &testbed.Options{Provider: p})
		c, ctx := dialRedis(t, s.Addr), t.Context()
		allow, err := s.Deny(ctx)
		require.NoError(t, err)
		require.ErrorContains(t, c.Set(ctx, "key", "value", 0).Err(), "NOREPLICAS")
		require.NoError(t, allow(ctx))
		require.NoError(t, c.Set(ctx, "key", "value", 0).Err())
	}
	t.Run("embedded", func(t *testing.T) { denies(t, testbed.Embedded) })
	onProviders(t, "redis", denies)
}

func TestPause(t *testing.T) {
	onProviders(t, "redis", func(t *testing.T, p testbed.Provider) {
		ctx := t.Context()
		s := startRedis(t, &testbed.Options{Provider: p})
		c := dialPatient(t, s.Addr)
		require.NoError(t, c.Ping(ctx).Err())

		heal, err := s.Pause(ctx)
		require.NoError(t, err)
		answered := during(t, func() error { return c.Incr(ctx, "n").Err() })
		_, err = s.Pause(ctx)
		require.Error(t, err, "it is paused already")
		require.NoError(t, heal(ctx))
		answered()
		require.NoError(t, heal(ctx), "heal again")

		again, err := s.Pause(ctx)
		require.NoError(t, err)
		answered = during(t, func() error { return c.Incr(ctx, "n").Err() })
		require.NoError(t, heal(ctx), "of an earlier pause")
		select {
		case <-time.After(50 * time.Millisecond):
		case <-ctx.Done():
		}
		require.NoError(t, again(ctx))
		answered()
		require.Equal(t, "2", c.Get(ctx, "n").Val())

		killed, err := s.Pause(ctx)
		require.NoError(t, err)
		require.NoError(t, s.Kill(ctx))
		require.ErrorIs(t, killed(ctx), os.ErrProcessDone)
		_, err = s.Pause(ctx)
		require.ErrorIs(t, err, os.ErrProcessDone)
		require.NoError(t, s.Restart(ctx))
		require.ErrorIs(t, killed(ctx), os.ErrProcessDone, "the heal of a pause before the restart")
		require.NoError(t, c.Ping(ctx).Err())

		_, err = s.Pause(ctx)
		require.NoError(t, err)
		require.NoError(t, s.Close(), "while it is paused")
		requireGone(t, s.Addr)
	})
}

func dialPatient(t *testing.T, addr string) *redis.Client {
	t.Helper()
	c := redis.NewClient(&redis.Options{
		Addr: addr, ContextTimeoutEnabled: true, ReadTimeout: -1, WriteTimeout: -1, DialTimeout: 30 * time.Second,
	})
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

func TestRestart(t *testing.T) {
	onProviders(t, "redis", func(t *testing.T, p testbed.Provider) {
		ctx := t.Context()
		s := startRedis(t, &testbed.Options{
			Provider: p, Args: []string{"--appendonly", "yes", "--appendfsync", "always"},
		})
		addr := s.Addr
		c := dialRedis(t, addr)
		require.NoError(t, c.Set(ctx, "key", "value", 0).Err())
		require.ErrorContains(t, s.Restart(ctx), "it is running")

		require.NoError(t, s.Kill(ctx))
		require.ErrorIs(t, s.Kill(ctx), os.ErrProcessDone)
		require.NoError(t, s.Restart(ctx))
		require.Equal(t, addr, s.Addr)
		require.Equal(t, "value", c.Get(ctx, "key").Val())

		require.NoError(t, s.Wipe(ctx))
		require.Equal(t, addr, s.Addr)
		require.ErrorIs(t, c.Get(ctx, "key").Err(), redis.Nil, "data is gone with the disk")
		require.Equal(t, "always", c.ConfigGet(ctx, "appendfsync").Val()["appendfsync"], "its arguments are not")

		require.NoError(t, s.Close())
		requireGone(t, addr)
		require.ErrorContains(t, s.Restart(ctx), "closed")
		require.ErrorContains(t, s.Kill(ctx), "closed")
	})
}

func TestRestartFails(t *testing.T) {
	onProviders(t, "redis", func(t *testing.T, p testbed.Provider) {
		ctx := t.Context()
		s := startRedis(t, &testbed.Options{Provider: p})
		require.NoError(t, s.Kill(ctx))
		cause := errors.New("test over")
		ended, cancel := context.WithCancelCause(ctx)
		cancel(cause)
		require.ErrorIs(t, s.Restart(ended), cause)
		requireGone(t, s.Addr)

		require.NoError(t, s.Restart(ctx))
		require.True(t, listens(t, s.Addr))
	})
}

// A down server's address can't be given to another server, nor to a client that dials it.
func TestAddressStaysReserved(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("a port can be held for a server to come on Linux only")
	}
	s := startRedis(t, &testbed.Options{Provider: testbed.Local})
	require.NoError(t, s.Kill(t.Context()))
	own, err := net.ResolveTCPAddr("tcp", s.Addr)
	require.NoError(t, err)
	client := net.Dialer{LocalAddr: own} // as the kernel might choose if the port were free
	_, err = client.DialContext(t.Context(), "tcp", s.Addr)
	require.ErrorIs(t, err, syscall.EADDRINUSE, "a client has connected to itself")
	require.NoError(t, s.Restart(t.Context()))
}

// All processes of a server are frozen and killed, even in other process groups.
func TestManyProcesses(t *testing.T) {
	need(t, testbed.Local, "redis")
	ctx := t.Context()
	dir := t.TempDir()
	t.Setenv("FENCELAB_REDIS_SERVER", script(t, dir, `
[ "$1" = --version ] && exec redis-server --version
setsid sh -c 'while echo >>ticks; do sleep 0.01; done 2>/dev/null' &
exec redis-server "$@"`))
	s := startRedis(t, &testbed.Options{Provider: testbed.Local})
	ticks := func() int64 {
		info, err := os.Stat(filepath.Join(dir, "ticks"))
		if err != nil {
			return 0
		}
		return info.Size()
	}
	requireTicks := func() {
		t.Helper()
		before := ticks()
		require.Eventually(t, func() bool { return ticks() > before }, 30*time.Second, time.Millisecond)
	}
	requireNoTicks := func() {
		t.Helper()
		before := ticks()
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
		}
		require.Equal(t, before, ticks())
	}
	requireTicks()
	heal, err := s.Pause(ctx)
	require.NoError(t, err)
	requireNoTicks()
	require.NoError(t, heal(ctx))
	requireTicks()
	require.NoError(t, s.Kill(ctx))
	requireNoTicks()
}

func TestNoControl(t *testing.T) {
	ctx := t.Context()
	users := startRedis(t, &testbed.Options{Provider: testbed.Local})
	t.Setenv(testbed.EnvRedisAddr, users.Addr)
	for _, p := range []testbed.Provider{testbed.External, testbed.Embedded} {
		s, err := testbed.StartRedis(ctx, &testbed.Options{Provider: p})
		testbed.Need(t, err)
		_, err = s.Pause(ctx)
		require.ErrorIs(t, err, errors.ErrUnsupported, p)
		require.ErrorIs(t, s.Kill(ctx), errors.ErrUnsupported, p)
		require.ErrorIs(t, s.Restart(ctx), errors.ErrUnsupported, p)
		_, err = testbed.StartRedisReplica(ctx, s, nil)
		require.ErrorIs(t, err, errors.ErrUnsupported, p)
		for _, o := range []testbed.Options{{Provider: p, Clock: true}, {Provider: p, Args: moreArgs}} {
			_, err = testbed.StartRedis(ctx, &o)
			require.ErrorIs(t, err, errors.ErrUnsupported, p)
		}
		require.NoError(t, s.Close())
	}
	require.True(t, listens(t, users.Addr))
}

func TestRedisNodes(t *testing.T) {
	onProviders(t, "redis", func(t *testing.T, p testbed.Provider) {
		ctx := t.Context()
		nodes, err := testbed.StartRedisNodes(ctx, 5, &testbed.Options{Provider: p})
		testbed.Need(t, err)
		require.Len(t, nodes, 5)
		for i, s := range nodes {
			require.Equal(t, "redis"+strconv.Itoa(i+1), s.Name)
			require.NoError(t, dialRedis(t, s.Addr).Set(ctx, "who", s.Name, 0).Err())
		}
		require.NoError(t, nodes[1].Kill(ctx))
		for i, s := range nodes {
			if i != 1 {
				require.Equal(t, s.Name, dialRedis(t, s.Addr).Get(ctx, "who").Val())
			}
		}
		require.NoError(t, nodes[1].Restart(ctx))
		require.ErrorIs(t, dialRedis(t, nodes[1].Addr).Get(ctx, "who").Err(), redis.Nil)
		for _, s := range nodes {
			require.NoError(t, s.Close())
			requireGone(t, s.Addr)
		}
	})
	t.Run("Embedded", func(t *testing.T) {
		nodes, err := testbed.StartRedisNodes(t.Context(), 3, &testbed.Options{Provider: testbed.Embedded})
		testbed.Need(t, err)
		for _, s := range nodes {
			require.Equal(t, "miniredis (embedded)", s.String())
			require.True(t, listens(t, s.Addr))
			require.NoError(t, s.Close())
			requireGone(t, s.Addr)
		}
	})
}

func TestRedisNodesFail(t *testing.T) {
	onProviders(t, "redis", func(t *testing.T, p testbed.Provider) {
		_, err := testbed.StartRedisNodes(t.Context(), 3, &testbed.Options{
			Provider: p, Args: []string{"--no-such-directive", "1"},
		})
		require.ErrorContains(t, err, "no-such-directive")
		require.Regexp(t, `redis[123]: `, err)
	})
}

func TestRedisReplica(t *testing.T) {
	primary := startRedis(t, &testbed.Options{Provider: testbed.Local})
	require.NoError(t, dialPatient(t, primary.Addr).Do(t.Context(), "DEBUG", "POPULATE", 200_000).Err(), "so that it takes a while")
	require.NoError(t, dialRedis(t, primary.Addr).Set(t.Context(), "before", "1", 0).Err())
	replica, err := testbed.StartRedisReplica(t.Context(), primary, nil)
	testmain.Started(t, replica, err)
	require.Equal(t, "redis-replica", replica.Name)
	require.Equal(t, "1", dialRedis(t, replica.Addr).Get(t.Context(), "before").Val(), "in sync when it is returned")
}

func TestClock(t *testing.T) {
	onProviders(t, "redis", func(t *testing.T, p testbed.Provider) {
		ctx := t.Context()
		const jump, slow = 2 * time.Hour, time.Minute
		nodes, err := testbed.StartRedisNodes(ctx, 2, &testbed.Options{Provider: p, Clock: true})
		testbed.Need(t, err)
		for _, s := range nodes {
			defer func() { require.NoError(t, s.Close()) }()
			require.NoError(t, dialRedis(t, s.Addr).Set(ctx, "key", "value", time.Hour).Err())
		}
		heal, err := nodes[1].Clock.Jump(ctx, jump)
		require.NoError(t, err)
		require.ErrorIs(t, dialRedis(t, nodes[1].Addr).Get(ctx, "key").Err(), redis.Nil, "it has expired")
		require.Equal(t, "value", dialRedis(t, nodes[0].Addr).Get(ctx, "key").Val(), "another server's clock")

		require.NoError(t, nodes[1].Kill(ctx))
		for _, restart := range []func(context.Context) error{nodes[1].Restart, nodes[1].Wipe} {
			require.NoError(t, restart(ctx))
			shown, err := dialRedis(t, nodes[1].Addr).Time(ctx).Result()
			require.NoError(t, err)
			require.InDelta(t, jump, time.Until(shown), float64(slow), "the clock outlives a restart")
		}
		require.NoError(t, heal(ctx))
		shown, err := dialRedis(t, nodes[1].Addr).Time(ctx).Result()
		require.NoError(t, err)
		require.InDelta(t, 0, time.Until(shown), float64(slow))
	})
	t.Run("Unsupported", func(t *testing.T) {
		_, err := testbed.StartEtcd(t.Context(), 1, &testbed.Options{Provider: testbed.Local, Clock: true})
		require.ErrorIs(t, err, errors.ErrUnsupported)
	})
}
