package peers_test

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fencelab/fencelab/internal/load"
	"github.com/fencelab/fencelab/internal/locks"
	"github.com/fencelab/fencelab/internal/peers"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// TestContended plays a little load on each lock, from clients of their own and from one that is shared: every one of
// them excludes, has tokens if it says so, and goes on after a wait that was given up.
func TestContended(t *testing.T) {
	byService := map[string][]string{}
	for _, lock := range peers.Names() {
		byService[peers.Service(lock)] = append(byService[peers.Service(lock)], lock)
	}
	for service, names := range byService {
		t.Run(service, func(t *testing.T) {
			before := goleak.IgnoreCurrent()
			ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
			defer cancel()
			s, err := peers.Start(ctx, service, peers.ServerSpec{Nodes: 1}, &testbed.Options{Progress: os.Stderr})
			require.NoError(t, err)
			for _, lock := range names {
				for _, connections := range []int{5, 1} {
					t.Run(lock, func(t *testing.T) { contended(t, lock, connections, s.Addrs) })
				}
			}
			require.NoError(t, s.Close())
			goleak.VerifyNone(t, before)
		})
	}
}

func contended(t *testing.T, lock string, connections int, addrs []string) {
	c := load.Config{
		Contenders: 5, Connections: connections, Keys: 1, Work: load.Duration(time.Millisecond), TTL: load.Duration(30 * time.Second),
		Duration: load.Duration(10 * time.Second), Prefix: t.Name() + "/",
	}
	open := func(ctx context.Context) (load.Lock, error) {
		return peers.Open(ctx, peers.Spec{Lock: lock, Addrs: addrs, TTL: c.TTL.D()})
	}
	for i := range 2 { // those who waited at the end of the first run have left nothing behind that lasts
		if peers.Library(lock) != "" { // that is more than others promise: redsync can leave votes, until they run out
			c.Prefix = fmt.Sprintf("%s/%d/", t.Name(), i)
		}
		const enough = 20 // each has been served several times, and has had others before it
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var sections int64
		res, err := load.Run(ctx, c, open, &load.Options{OnSample: func(s load.Sample) {
			if sections += s.Sections; sections >= enough {
				cancel()
			}
		}})
		require.NoError(t, err)
		require.Empty(t, res.Errors)
		require.Zero(t, res.Checks)
		require.GreaterOrEqual(t, res.Sections, int64(enough))
		if peers.Library(lock) == "" {
			require.Equal(t, "token", res.Order.By)
		} else {
			require.Equal(t, "grant", res.Order.By)
		}
	}
}

func TestNames(t *testing.T) {
	for _, lock := range peers.Names() {
		require.Contains(t, locks.Names(), peers.Service(lock))
	}
	require.Subset(t, peers.Names(), locks.Names())
	require.Equal(t, "github.com/go-redsync/redsync/v4", peers.Library(peers.Redsync)[:len("github.com/go-redsync/redsync/v4")])
	require.Empty(t, peers.Library(locks.Redis))
	require.Empty(t, peers.Library(peers.RedisSpin))

	_, err := peers.Open(t.Context(), peers.Spec{Lock: "memcached"})
	require.ErrorContains(t, err, `there is no lock "memcached"; there are redis, redis-spin`)
	_, err = peers.Open(t.Context(), peers.Spec{Lock: peers.Redislock, Addrs: []string{"a:1", "b:1"}, TTL: time.Second})
	require.ErrorContains(t, err, "redislock is on one server, and there are 2 addresses")
	_, err = peers.Start(t.Context(), "memcached", peers.ServerSpec{}, &testbed.Options{})
	require.ErrorContains(t, err, `there is no lock service "memcached"`)
}
