package bench

import (
	"context"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/bench/load"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func TestMain(m *testing.M) { testmain.Run(m) }

// TestContended: every lock, with a client per contender and a shared one, over wires, excludes, has its tokens, and survives a
// cancelled wait.
func TestContended(t *testing.T) {
	byService := map[string][]string{}
	for _, l := range table {
		if l.name != ping && l.name != baton {
			byService[l.service] = append(byService[l.service], l.name)
		}
	}
	for service, names := range byService {
		t.Run(service, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			s, err := Start(ctx, service, ServerSpec{Nodes: 1}, testbed.Options{Progress: os.Stderr})
			testbed.Need(t, err)
			for _, lock := range names {
				for _, connections := range []int{5, 1} {
					t.Run(lock, func(t *testing.T) { contended(t, lock, connections, s.Addrs) })
				}
			}
			require.NoError(t, s.Close())
		})
	}
}

func contended(t *testing.T, lock string, connections int, addrs []string) {
	c := load.Config{
		Contenders: 5, Connections: connections, Keys: 1, Work: load.Duration(time.Millisecond), TTL: load.Duration(20 * time.Second),
		Duration: load.Duration(3 * time.Minute), Prefix: t.Name() + "/", // at most
	}
	wires, err := load.NewWires(100 * time.Microsecond)
	require.NoError(t, err)
	defer wires.Close()
	var dialled atomic.Bool
	// On a busy machine a reply takes longer than rueidislock's default of 20 ms. It then deletes what it may have locked without
	// notifying its own client, whose waiters may wait for ever.
	s := Spec{Lock: lock, Addrs: addrs, TTL: c.TTL.D(), Patience: time.Minute, Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
		dialled.Store(true)
		return wires.Dial(ctx, network, addr)
	}}
	defer func() { require.True(t, dialled.Load()) }()
	by := "grant"
	if library(lock) == "" {
		by = "token"
	}
	const enough = 20  // each is served several times, after others
	for i := range 2 { // the first run's waiters must leave nothing behind for longer than a TTL
		if library(lock) != "" { // redsync can leave votes until they expire
			c.Prefix = fmt.Sprintf("%s/%d/", t.Name(), i)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var n atomic.Int64
		counted := func(ctx context.Context) (load.Lock, error) {
			l, err := Open(ctx, s)
			acquire := l.Acquire
			l.Acquire = func(ctx context.Context, key string) (load.Lease, error) {
				lease, err := acquire(ctx, key)
				if err == nil && n.Add(1) == enough+2*int64(c.Contenders) { // some are granted outside the window
					cancel()
				}
				return lease, err
			}
			return l, err
		}
		res, err := load.Run(ctx, c, counted, load.Options{})
		require.NoError(t, err)
		require.Empty(t, res.Errors)
		require.Zero(t, res.Checks)
		require.GreaterOrEqual(t, res.Sections, int64(enough))
		require.Equal(t, by, res.Order.By)
	}
}

func TestNames(t *testing.T) {
	for _, l := range table {
		require.Contains(t, locks.Names(), l.service)
	}
	require.Subset(t, Names(), locks.Names())
	require.Regexp(t, "^github.com/go-redsync/redsync/v4", library("redsync"))
	require.Empty(t, library("redis-spin"))

	_, err := Open(t.Context(), Spec{Lock: "memcached"})
	require.ErrorContains(t, err, `there is no lock "memcached"; there are redis, redis-spin`)
	_, err = Open(t.Context(), Spec{Lock: "redislock", Addrs: []string{"a:1", "b:1"}, TTL: time.Second})
	require.ErrorContains(t, err, "redislock is on one server, and there are 2 addresses")
	_, err = Start(t.Context(), "memcached", ServerSpec{}, testbed.Options{})
	require.ErrorContains(t, err, `there is no lock service "memcached"`)
}

// A wait for a server that isn't there ends with the run.
func TestEtcdMutexNobodyThere(t *testing.T) {
	t.Parallel()
	l, err := Open(t.Context(), Spec{Lock: "etcd-mutex", Addrs: []string{"127.0.0.1:1"}, TTL: time.Second})
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(100*time.Millisecond, cancel)
	_, err = l.Acquire(ctx, t.Name())
	require.ErrorIs(t, err, context.Canceled)
}
