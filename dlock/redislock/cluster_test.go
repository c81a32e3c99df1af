package redislock_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// node is one of a Cluster.
type node struct {
	*redis.Client
	addr, id string
}

// startCluster starts three nodes, of which each has a part of the slots.
func startCluster(t *testing.T) []node {
	t.Helper()
	var nodes []node
	for range 3 {
		bus := busPort(t)
		s, err := testbed.StartRedis(t.Context(), &testbed.Options{
			Provider: testbed.Local, // where nodes reach each other
			Args:     []string{"--cluster-enabled", "yes", "--cluster-port", bus},
		})
		testbed.Need(t, err)
		t.Cleanup(func() { require.NoError(t, s.Close()) })
		c := redis.NewClient(&redis.Options{Addr: s.Addr})
		t.Cleanup(func() { require.NoError(t, c.Close()) })
		i := len(nodes)
		require.NoError(t, c.ClusterAddSlotsRange(t.Context(), 16384*i/3, 16384*(i+1)/3-1).Err())
		id, err := c.Do(t.Context(), "CLUSTER", "MYID").Text()
		require.NoError(t, err)
		host, port, err := net.SplitHostPort(s.Addr)
		require.NoError(t, err)
		nodes = append(nodes, node{c, s.Addr, id})
		if i > 0 {
			require.NoError(t, nodes[0].Do(t.Context(), "CLUSTER", "MEET", host, port, bus).Err())
		}
	}
	for _, n := range nodes {
		require.Eventually(t, func() bool {
			info := n.ClusterInfo(t.Context()).Val()
			return strings.Contains(info, "cluster_state:ok") && strings.Contains(info, "cluster_known_nodes:3")
		}, 30*time.Second, 10*time.Millisecond)
	}
	return nodes
}

// busPort returns a port for a node's bus: a free one, which no client is given as its own end. By default it would be the
// node's and 10,000, which may be none.
func busPort(t *testing.T) string {
	t.Helper()
	for {
		port := strconv.Itoa(20_000 + rand.N(10_000))
		l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:"+port)
		if err == nil {
			require.NoError(t, l.Close())
			return port
		}
	}
}

// move is a slot that is on its way from a node to another.
type move struct {
	nodes    []node
	slot     int64
	from, to node
}

// begin has the slot of key leave its node.
func begin(t *testing.T, nodes []node, key string) move {
	t.Helper()
	m := move{nodes: nodes, slot: nodes[0].ClusterKeySlot(t.Context(), "{"+key+"}").Val()}
	at := slices.IndexFunc(nodes, func(n node) bool {
		return n.Do(t.Context(), "EXISTS", "{"+key+"}").Err() == nil // else MOVED
	})
	m.from, m.to = nodes[at], nodes[(at+1)%len(nodes)]
	require.NoError(t, m.to.Do(t.Context(), "CLUSTER", "SETSLOT", m.slot, "IMPORTING", m.from.id).Err())
	require.NoError(t, m.from.Do(t.Context(), "CLUSTER", "SETSLOT", m.slot, "MIGRATING", m.to.id).Err())
	return m
}

// keys moves keys, wherever they are.
func (m move) keys(t *testing.T, keys ...string) {
	t.Helper()
	host, port, err := net.SplitHostPort(m.to.addr)
	require.NoError(t, err)
	for _, key := range keys {
		require.NoError(t, m.from.Migrate(t.Context(), host, port, key, 0, patience).Err())
	}
}

// end moves what is left, and the slot.
func (m move) end(t *testing.T) {
	t.Helper()
	m.keys(t, m.from.ClusterGetKeysInSlot(t.Context(), int(m.slot), 100).Val()...)
	for _, n := range []node{m.to, m.from, m.nodes[0], m.nodes[1], m.nodes[2]} {
		require.NoError(t, n.Do(t.Context(), "CLUSTER", "SETSLOT", m.slot, "NODE", m.to.id).Err())
	}
}

// refusals counts the requests of a client that were refused for the slot's sake.
type refusals struct{ atomic.Int64 }

func (*refusals) DialHook(next redis.DialHook) redis.DialHook { return next }

func (r *refusals) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		err := next(ctx, cmd)
		if redis.HasErrorPrefix(err, "TRYAGAIN") {
			r.Add(1)
		}
		return err
	}
}

func (*refusals) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// While a slot moves, what is held is renewed and released, wherever its keys are; who waits is granted the lock when it has
// moved.
func TestSlotMoves(t *testing.T) {
	nodes := startCluster(t)
	open := func(mode redislock.Mode) (*redislock.Backend, *refusals) {
		var addrs []string
		for _, n := range nodes {
			addrs = append(addrs, n.addr)
		}
		c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs, ReadTimeout: patience})
		t.Cleanup(func() { require.NoError(t, c.Close()) })
		refused := &refusals{}
		c.AddHook(refused)
		return newBackend(t, c, &redislock.Options{Mode: mode}), refused
	}
	a, _ := open(redislock.ModeQueue)
	modes := map[string]redislock.Mode{"queue": redislock.ModeQueue, "spin": redislock.ModeSpin}
	for name, moved := range map[string][]string{"nothing": nil, "lock": {"lock:"}, "counter": {"fence:"}, "both": {"lock:", "fence:"}} {
		for mode := range modes {
			t.Run(fmt.Sprint(name, " moved/", mode), func(t *testing.T) {
				r := request(time.Hour)
				g, err := a.TryAcquire(t.Context(), r)
				require.NoError(t, err)
				m := begin(t, nodes, r.Key)
				for _, what := range moved {
					m.keys(t, what+"{"+r.Key+"}")
				}
				require.NoError(t, a.Renew(t.Context(), g))
				require.ErrorIs(t, a.Renew(t.Context(), dlock.Grant{Key: r.Key, Owner: "other", TTL: time.Hour}), dlock.ErrLost)

				b, refused := open(modes[mode])
				w := wait(t, b, dlock.Request{Key: r.Key, Owner: "next", TTL: time.Hour})
				require.Eventually(t, func() bool { return refused.Load() > 5 }, 30*time.Second, time.Millisecond)
				require.ErrorIs(t, a.Release(t.Context(), dlock.Grant{Key: r.Key, Owner: "other", Fence: 1, TTL: time.Hour}), dlock.ErrLost)
				require.NoError(t, a.Release(t.Context(), g))
				m.end(t)
				require.EqualValues(t, 2, w.granted(t).Fence)
				require.NoError(t, b.Release(t.Context(), w.g))
			})
		}
	}
	t.Run("waiter", func(t *testing.T) { // it came before
		r := request(time.Hour)
		g, err := a.TryAcquire(t.Context(), r)
		require.NoError(t, err)
		b, _ := open(redislock.ModeQueue)
		w := wait(t, b, dlock.Request{Key: r.Key, Owner: "next", TTL: time.Hour})
		queue := "queue:{" + r.Key + "}"
		require.Eventually(t, func() bool {
			return slices.ContainsFunc(nodes, func(n node) bool { return n.LLen(t.Context(), queue).Val() == 1 })
		}, 30*time.Second, time.Millisecond)
		m := begin(t, nodes, r.Key)
		m.keys(t, queue)
		require.NoError(t, a.Renew(t.Context(), g))
		require.NoError(t, a.Release(t.Context(), g))
		m.end(t)
		require.EqualValues(t, 2, w.granted(t).Fence)
	})
}
