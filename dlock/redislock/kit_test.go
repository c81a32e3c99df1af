package redislock_test

import (
	"bytes"
	"context"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/redislock"
)

// queue is a held lock and its waiters.
type queue struct {
	*testing.T
	s      redisServer
	c      *redis.Client
	key    string
	holder *redislock.Backend
	g      dlock.Grant
}

func hold(t *testing.T, s redisServer) *queue {
	t.Helper()
	b, c, _ := s.backend(t)
	g := locktest.Take(t, b, locktest.Request(time.Hour))
	return &queue{T: t, s: s, c: c, key: g.Key, holder: b, g: g}
}

// virtually runs f in a bubble, on a held lock of a Redis.
func virtually(t *testing.T, f func(q *queue)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		s.warm(t)
		f(hold(t, s))
	})
}

func (q *queue) backend() *redislock.Backend {
	q.Helper()
	b, _, _ := q.s.backend(q.T)
	return b
}

type waiting struct {
	q     *queue
	b     *redislock.Backend
	owner string
	came  <-chan locktest.Outcome
}

func (q *queue) acquire(b *redislock.Backend, owner string) waiting {
	return waiting{q, b, owner, locktest.Acquire(q.Context(), b, dlock.Request{Key: q.key, Owner: owner, TTL: time.Hour})}
}

// join returns once b is in the queue.
func (q *queue) join(b *redislock.Backend, owner string) waiting {
	q.Helper()
	n := q.len()
	w := q.acquire(b, owner)
	q.queued(n + 1)
	return w
}

func (q *queue) line(n int) []waiting {
	q.Helper()
	all := make([]waiting, n)
	for i := range all {
		all[i] = q.join(q.backend(), uuid.NewString())
	}
	return all
}

func (w waiting) wins(token uint64) locktest.Outcome {
	w.q.Helper()
	o := locktest.Receive(w.q, w.came)
	require.NoError(w.q, o.Err)
	require.Equal(w.q, token, o.G.Fence)
	return o
}

// inOrder checks that all are granted the lock in order, from the second token on.
func (q *queue) inOrder(all []waiting) {
	q.Helper()
	for i, w := range all {
		locktest.Release(q, w.b, w.wins(uint64(2+i)).G)
	}
}

func (q *queue) list() string { return "queue:{" + q.key + "}" }
func (q *queue) lock() string { return "lock:{" + q.key + "}" }

func (q *queue) len() int { return int(q.c.LLen(q.Context(), q.list()).Val()) }

func (q *queue) queued(n int) {
	q.Helper()
	require.Eventually(q, func() bool { return q.len() == n }, 30*time.Second, time.Millisecond, "%d waiters", n)
}

// add queues a waiter that doesn't exist.
func (q *queue) add(channel, owner string) {
	q.Helper()
	require.NoError(q, q.c.RPush(q.Context(), q.list(), "1000 "+channel+" "+owner).Err())
}

// deadBacklog queues waiters of frozen processes, which still subscribe.
func (q *queue) deadBacklog(n, processes int) {
	q.Helper()
	ps := q.c.Subscribe(q.Context())
	q.Cleanup(func() { require.NoError(q, ps.Close()) })
	for i := range processes {
		channel := fmt.Sprint("wake:frozen", i)
		require.NoError(q, ps.Subscribe(q.Context(), channel))
		_, err := ps.Receive(q.Context())
		require.NoError(q, err)
		entries := make([]any, n/processes)
		for j := range entries {
			entries[j] = fmt.Sprint("1000 ", channel, " ", i, "/", j)
		}
		require.NoError(q, q.c.RPush(q.Context(), q.list(), entries...).Err())
	}
}

func (q *queue) release() {
	q.Helper()
	locktest.Release(q, q.holder, q.g)
}

// listener's link disturbs only its subscription.
func (q *queue) listener() (*redislock.Backend, *dlocktest.Dialer) {
	q.Helper()
	l := dlocktest.NewDialer(q.s.dial, func(request []byte) bool { return bytes.Contains(request, []byte("subscribe")) })
	return newBackend(q.T, q.s.client(q.T, l), q.s.options()), l
}

// counting's link disturbs scripts; the func counts them.
func (q *queue) counting() (*redislock.Backend, *dlocktest.Dialer, func() int) {
	q.Helper()
	var all atomic.Int64
	l := dlocktest.NewDialer(q.s.dial, func(request []byte) bool {
		n := bytes.Count(request, []byte("evalsha"))
		all.Add(int64(n))
		return n > 0
	})
	return newBackend(q.T, q.s.client(q.T, l), q.s.options()), l, func() int { return int(all.Load()) }
}

func (q *queue) handedOver(b dlock.Backend, o *dlock.Options, waits time.Duration) *dlock.Handle {
	q.Helper()
	l, err := dlock.New(b, o)
	require.NoError(q, err)
	q.Cleanup(func() { require.NoError(q, l.Close()) })
	got := make(chan *dlock.Handle)
	go func() {
		h, err := l.Acquire(q.Context(), q.key)
		if err != nil {
			panic(err)
		}
		got <- h
	}()
	q.queued(1)
	time.Sleep(waits)
	q.release()
	return <-got
}

type hook func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error

func (hook) DialHook(next redis.DialHook) redis.DialHook { return next }

func (hook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (h hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error { return h(ctx, cmd, next) }
}
