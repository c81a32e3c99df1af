package redislock_test

import (
	"context"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/internal/testmain"
)

type node = testmain.RedisNode

type move struct {
	nodes    []node
	slot     int64
	from, to node
}

func id(t *testing.T, n node) string {
	t.Helper()
	text, err := n.Do(t.Context(), "CLUSTER", "MYID").Text()
	require.NoError(t, err)
	return text
}

func begin(t *testing.T, nodes []node, key string) move {
	t.Helper()
	m := move{nodes: nodes, slot: nodes[0].ClusterKeySlot(t.Context(), "{"+key+"}").Val()}
	at := slices.IndexFunc(nodes, func(n node) bool {
		return n.Do(t.Context(), "EXISTS", "{"+key+"}").Err() == nil // else MOVED
	})
	m.from, m.to = nodes[at], nodes[(at+1)%len(nodes)]
	require.NoError(t, m.to.Do(t.Context(), "CLUSTER", "SETSLOT", m.slot, "IMPORTING", id(t, m.from)).Err())
	require.NoError(t, m.from.Do(t.Context(), "CLUSTER", "SETSLOT", m.slot, "MIGRATING", id(t, m.to)).Err())
	return m
}

func (m move) keys(t *testing.T, keys ...string) {
	t.Helper()
	host, port, err := net.SplitHostPort(m.to.Addr)
	require.NoError(t, err)
	for _, key := range keys {
		require.NoError(t, m.from.Migrate(t.Context(), host, port, key, 0, patience).Err())
	}
}

func (m move) end(t *testing.T) {
	t.Helper()
	m.keys(t, m.from.ClusterGetKeysInSlot(t.Context(), int(m.slot), 100).Val()...)
	for _, n := range []node{m.to, m.from, m.nodes[0], m.nodes[1], m.nodes[2]} {
		require.NoError(t, n.Do(t.Context(), "CLUSTER", "SETSLOT", m.slot, "NODE", id(t, m.to)).Err())
	}
}

func TestConformanceCluster(t *testing.T) {
	n := testmain.ServeRedisCluster(t, nil)[0]
	s := onServer(t, n.Server)
	cluster := func(t *testing.T, l *dlocktest.Dialer) redis.UniversalClient {
		t.Helper()
		c := redis.NewClusterClient(&redis.ClusterOptions{
			Dialer:        l.DialContext,
			DialerRetries: 1,
			DialTimeout:   patience, ReadTimeout: patience, WriteTimeout: patience, ContextTimeoutEnabled: true,
			ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) { // not the node's own address
				return []redis.ClusterSlot{{Start: 0, End: 16383, Nodes: []redis.ClusterNode{{Addr: n.Addr}}}}, nil
			},
		})
		t.Cleanup(func() { require.NoError(t, c.Close()) })
		return c
	}
	t.Run("kit", func(t *testing.T) {
		dlocktest.Run(t, dlocktest.Harness{New: func(t *testing.T) dlocktest.Service {
			return dlocktest.Service{
				Backend: func() dlock.Backend { return newBackend(t, cluster(t, s.link()), s.options()) },
				Faulty: func() (dlock.Backend, dlocktest.Link) {
					l := s.link()
					return newBackend(t, cluster(t, l), s.options()), l.Link()
				},
			}
		}})
	})
	err := n.EvalSha(t.Context(), strings.Repeat("0", 40), []string{"lock:{a}", "fence:{b}"}).Err()
	require.ErrorContains(t, err, "CROSSSLOT", "the server checks slots")
}

type redirect string

func (r redirect) Error() string { return string(r) }
func (redirect) RedisError()     {}

// Held locks are renewed and released, wherever their keys are; waiters are granted them after the move.
func TestSlotMoves(t *testing.T) {
	nodes := testmain.ServeRedisCluster(t, nil, nil, nil)
	open := func(mode redislock.Mode) (*redislock.Backend, *atomic.Int64) {
		var addrs []string
		for _, n := range nodes {
			addrs = append(addrs, n.Addr)
		}
		c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: addrs, ReadTimeout: patience})
		t.Cleanup(func() { require.NoError(t, c.Close()) })
		var refused atomic.Int64
		c.AddHook(hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			err := next(ctx, cmd)
			// Every second is a redirect, as go-redis returns if the slot has moved when it has no attempt left.
			if redis.HasErrorPrefix(err, "TRYAGAIN") && refused.Add(1)%2 == 0 {
				err = redirect([]string{"MOVED 1 127.0.0.1:1", "ASK 1 127.0.0.1:1"}[refused.Load()/2%2])
				cmd.SetErr(err)
			}
			return err
		}))
		return newBackend(t, c, &redislock.Options{Mode: mode, Queue: redislock.Queue{HandoffTTL: time.Minute}}), &refused
	}
	a, _ := open(redislock.ModeQueue)
	held := func(t *testing.T) *queue {
		t.Helper()
		r := locktest.Request(time.Hour)
		g, err := a.TryAcquire(t.Context(), r)
		require.NoError(t, err)
		return &queue{T: t, key: r.Key, holder: a, g: g}
	}
	modes := map[string]redislock.Mode{"queue": redislock.ModeQueue, "spin": redislock.ModeSpin}
	for name, moved := range map[string][]string{"nothing": nil, "lock": {"lock:"}, "counter": {"fence:"}, "both": {"lock:", "fence:"}} {
		for mode := range modes {
			t.Run(fmt.Sprint(name, " moved/", mode), func(t *testing.T) {
				q := held(t)
				other := dlock.Grant{Key: q.key, Owner: "other", Fence: 1, TTL: time.Hour}
				m := begin(t, nodes, q.key)
				for _, what := range moved {
					m.keys(t, what+"{"+q.key+"}")
				}
				require.NoError(t, a.Renew(t.Context(), q.g))
				require.ErrorIs(t, a.Renew(t.Context(), other), dlock.ErrLost)

				b, refused := open(modes[mode])
				w := q.acquire(b, "next")
				require.Eventually(t, func() bool { return refused.Load() > 5 }, 30*time.Second, time.Millisecond)
				require.ErrorIs(t, a.Release(t.Context(), other), dlock.ErrLost)
				q.release()
				m.end(t)
				locktest.Release(t, b, w.wins(2).G)
			})
		}
	}
	t.Run("a client that follows no redirects", func(t *testing.T) {
		m := begin(t, nodes, "k")
		m.end(t)
		for _, mode := range modes {
			c := redis.NewClient(&redis.Options{Addr: m.from.Addr})
			t.Cleanup(func() { require.NoError(t, c.Close()) })
			_, err := newBackend(t, c, &redislock.Options{Mode: mode}).Acquire(t.Context(), dlock.Request{Key: "k", Owner: "owner", TTL: time.Hour})
			require.ErrorContains(t, err, "MOVED")
		}
	})
	t.Run("waiter", func(t *testing.T) { // from before the move
		q := held(t)
		b, _ := open(redislock.ModeQueue)
		w := q.acquire(b, "next")
		require.Eventually(t, func() bool {
			return slices.ContainsFunc(nodes, func(n node) bool { return n.LLen(t.Context(), q.list()).Val() == 1 })
		}, 30*time.Second, time.Millisecond)
		m := begin(t, nodes, q.key)
		m.keys(t, q.list())
		require.NoError(t, a.Renew(t.Context(), q.g))
		q.release()
		m.end(t)
		ended := time.Now()
		require.Less(t, w.wins(2).At.Sub(ended), longest*2/3, "it is told, and need not poll")
	})
}
