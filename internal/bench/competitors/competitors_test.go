package competitors_test

import (
	"context"
	"fmt"
	"net"
	"os"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/bench/competitors"
	"github.com/fencelab/fencelab/internal/bench/load"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func TestMain(m *testing.M) { testmain.Run(m) }

// TestContended: every lock, with clients of its own and with a shared one, excludes, has tokens if it says so, works
// after a cancelled wait, and works over wires.
func TestContended(t *testing.T) {
	byService := map[string][]string{}
	for _, lock := range competitors.Names() {
		byService[competitors.Service(lock)] = append(byService[competitors.Service(lock)], lock)
	}
	for service, names := range byService {
		t.Run(service, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			s, err := competitors.Start(ctx, service, competitors.ServerSpec{Nodes: 1}, &testbed.Options{Progress: os.Stderr})
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
	// On a busy machine a reply takes longer than the defaults: rueidislock's is 20 ms. It then deletes what it may have locked,
	// without a notification to its own client, whose waiters may wait for ever.
	s := competitors.Spec{Lock: lock, Addrs: addrs, TTL: c.TTL.D(), Patience: time.Minute, Dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
		dialled.Store(true)
		return wires.Dial(ctx, network, addr)
	}}
	defer func() { require.True(t, dialled.Load()) }()
	by := "grant"
	if competitors.Library(lock) == "" {
		by = "token"
	}
	const enough = 20  // each has been served several times, and has had others before it
	for i := range 2 { // those who waited at the end of the first run have left nothing behind for longer than a TTL
		if competitors.Library(lock) != "" { // that is more than others promise: redsync can leave votes, until they run out
			c.Prefix = fmt.Sprintf("%s/%d/", t.Name(), i)
		}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		n := &atomic.Int64{}
		counted := func(ctx context.Context) (load.Lock, error) {
			l, err := competitors.Open(ctx, s)
			if err != nil {
				return nil, err
			}
			return counter{l, n, enough + 2*int64(c.Contenders), cancel}, nil // some are granted outside the window
		}
		res, err := load.Run(ctx, c, counted, nil)
		require.NoError(t, err)
		require.Empty(t, res.Errors)
		require.Zero(t, res.Checks)
		require.GreaterOrEqual(t, res.Sections, int64(enough))
		require.Equal(t, by, res.Order.By)
	}
}

type counter struct {
	load.Lock
	n    *atomic.Int64
	most int64
	end  func()
}

func (c counter) Acquire(ctx context.Context, key string) (load.Lease, error) {
	l, err := c.Lock.Acquire(ctx, key)
	if err == nil && c.n.Add(1) == c.most {
		c.end()
	}
	return l, err
}

func TestNames(t *testing.T) {
	for _, lock := range competitors.Names() {
		require.Contains(t, locks.Names(), competitors.Service(lock))
	}
	require.Subset(t, competitors.Names(), locks.Names())
	require.Equal(t, "github.com/go-redsync/redsync/v4", competitors.Library(competitors.Redsync)[:len("github.com/go-redsync/redsync/v4")])
	require.Empty(t, competitors.Library(locks.Redis))
	require.Empty(t, competitors.Library(competitors.RedisSpin))

	_, err := competitors.Open(t.Context(), competitors.Spec{Lock: "memcached"})
	require.ErrorContains(t, err, `there is no lock "memcached"; there are redis, redis-spin`)
	_, err = competitors.Open(t.Context(), competitors.Spec{Lock: competitors.Redislock, Addrs: []string{"a:1", "b:1"}, TTL: time.Second})
	require.ErrorContains(t, err, "redislock is on one server, and there are 2 addresses")
	_, err = competitors.Start(t.Context(), "memcached", competitors.ServerSpec{}, &testbed.Options{})
	require.ErrorContains(t, err, `there is no lock service "memcached"`)
}
