package redislock_test

import (
	"bytes"
	"context"
	"net"
	"strings"
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
	r := locktest.Request(time.Hour)
	g, err := b.TryAcquire(t.Context(), r)
	require.NoError(t, err)
	return &queue{T: t, s: s, c: c, key: r.Key, holder: b, g: g}
}

// virtually runs f in a bubble with a Redis, on a lock that is held.
func virtually(t *testing.T, f func(q *queue)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		s.warm(t)
		f(hold(t, s))
	})
}

func both(t *testing.T, f func(q *queue)) {
	t.Helper()
	t.Run("real", func(t *testing.T) { f(hold(t, onServer(t, server))) })
	t.Run("virtual", func(t *testing.T) { virtually(t, f) })
}

func (q *queue) backend(set ...func(*redislock.Options)) *redislock.Backend {
	q.Helper()
	o := q.s.options()
	for _, f := range set {
		f(o)
	}
	return newBackend(q.T, q.s.client(q.T, q.s.link()), o)
}

type waiting struct {
	q      *queue
	b      *redislock.Backend
	owner  string
	cancel context.CancelCauseFunc
	done   chan struct{}
	g      dlock.Grant
	err    error
	at     time.Time
}

func (q *queue) acquire(b *redislock.Backend, owner string) *waiting {
	q.Helper()
	ctx, cancel := context.WithCancelCause(q.Context())
	w := &waiting{q: q, b: b, owner: owner, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(w.done)
		w.g, w.err = b.Acquire(ctx, dlock.Request{Key: q.key, Owner: owner, TTL: time.Hour})
		w.at = time.Now()
	}()
	q.Cleanup(func() {
		cancel(nil)
		<-w.done
	})
	return w
}

// join has b wait, and returns once it is in the queue.
func (q *queue) join(b *redislock.Backend, owner string) *waiting {
	q.Helper()
	n := q.len()
	w := q.acquire(b, owner)
	q.queued(n + 1)
	return w
}

func (q *queue) line(n int) []*waiting {
	q.Helper()
	all := make([]*waiting, n)
	for i := range all {
		all[i] = q.join(q.backend(), uuid.NewString())
	}
	return all
}

// inOrder checks that all are granted the lock in that order, from the second token on.
func (q *queue) inOrder(all []*waiting) {
	q.Helper()
	for i, w := range all {
		w.wins(uint64(2+i), q.g.Start)
		w.release()
	}
}

func (q *queue) list() string { return "queue:{" + q.key + "}" }
func (q *queue) lock() string { return "lock:{" + q.key + "}" }

func (q *queue) len() int { return int(q.c.LLen(q.Context(), q.list()).Val()) }

func (q *queue) queued(n int) {
	q.Helper()
	require.Eventually(q, func() bool { return q.len() == n }, 30*time.Second, time.Millisecond, "%d waiters", n)
}

// add queues a waiter that doesn't exist, of a process with that channel.
func (q *queue) add(channel, owner string) {
	q.Helper()
	require.NoError(q, q.c.RPush(q.Context(), q.list(), "1000 "+channel+" "+owner).Err())
}

func (q *queue) first() string {
	return strings.Fields(q.c.LIndex(q.Context(), q.list(), 0).Val())[1]
}

// publish sends message to the first waiter's process.
func (q *queue) publish(message string) {
	q.Helper()
	q.publishTo(q.first(), message)
}

func (q *queue) publishTo(channel, message string) {
	q.Helper()
	require.NoError(q, q.c.Publish(q.Context(), channel, message).Err())
}

// expires checks that the queue has a TTL.
func (q *queue) expires() {
	q.Helper()
	left := q.c.PTTL(q.Context(), q.list()).Val()
	require.Positive(q, left)
	require.LessOrEqual(q, left, 2*time.Minute)
}

func (q *queue) owner() string { return q.c.Get(q.Context(), q.lock()).Val() }

func (q *queue) release() time.Time {
	q.Helper()
	now := time.Now()
	require.NoError(q, q.holder.Release(q.Context(), q.g))
	return now
}

func (q *queue) expire() {
	q.Helper()
	require.NoError(q, q.c.Del(q.Context(), q.lock()).Err())
}

func (q *queue) tryHeld(b *redislock.Backend) {
	q.Helper()
	_, err := b.TryAcquire(q.Context(), dlock.Request{Key: q.key, Owner: "barger", TTL: time.Hour})
	require.ErrorIs(q, err, dlock.ErrHeld)
}

func (w *waiting) granted() dlock.Grant {
	w.q.Helper()
	select {
	case <-w.done:
	case <-time.After(2 * time.Minute):
		require.FailNow(w.q, "still waiting")
	}
	require.NoError(w.q, w.err)
	return w.g
}

// wins returns how long w's grant took since began, and checks the token.
func (w *waiting) wins(token uint64, began time.Time) time.Duration {
	w.q.Helper()
	require.Equal(w.q, token, w.granted().Fence)
	return w.at.Sub(began)
}

func (w *waiting) release() {
	w.q.Helper()
	require.NoError(w.q, w.b.Release(w.q.Context(), w.granted()))
}

func (w *waiting) waits() {
	w.q.Helper()
	select {
	case <-w.done:
		require.FailNow(w.q, "no longer waiting", "%+v, err %v", w.g, w.err)
	default:
	}
}

// costsAHandoff checks that w gets the lock soon after a dead waiter has cost one HandoffTTL.
func (w *waiting) costsAHandoff() {
	w.q.Helper()
	cost := w.wins(3, w.q.release()) // the second token was lost to a dead waiter
	require.GreaterOrEqual(w.q, cost, handoff)
	require.LessOrEqual(w.q, cost, handoff+grace+200*time.Millisecond)
}

// listener returns a Backend whose link disturbs its subscription alone.
func (q *queue) listener() (*redislock.Backend, *dlocktest.Dialer) {
	q.Helper()
	l := dlocktest.NewDialer(q.s.dial, func(request []byte) bool { return bytes.Contains(request, []byte("subscribe")) })
	return newBackend(q.T, q.s.client(q.T, l), q.s.options()), l
}

// counting returns a Backend, a link that disturbs scripts, and their number.
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

func (q *queue) handedOver(b dlock.Backend, o *dlock.Options) *dlock.Handle {
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
	q.release()
	return <-got
}

// hooks replace what connections do.
type hooks struct {
	write, read func(c *hooked, b []byte) (int, error)
	subscribe   atomic.Pointer[func(c *hooked, b []byte) (int, error)] // the next request to
	sub         atomic.Pointer[hooked]                                 // the last connection that has
}

type hooked struct {
	net.Conn
	h        *hooks
	script   atomic.Bool // the last request was one
	dead     atomic.Bool // without a word: what comes is dropped, and what is sent goes nowhere
	deadline time.Time   // of reads
}

func (c *hooked) SetReadDeadline(t time.Time) error {
	c.deadline = t
	return c.Conn.SetReadDeadline(t)
}

func (c *hooked) Write(b []byte) (int, error) {
	c.script.Store(bytes.Contains(b, []byte("evalsha")))
	if bytes.Contains(b, []byte("subscribe")) {
		c.h.sub.Store(c)
		if f := c.h.subscribe.Swap(nil); f != nil {
			return (*f)(c, b)
		}
	}
	switch {
	case c.dead.Load():
		return len(b), nil
	case c.h.write != nil:
		return c.h.write(c, b)
	}
	return c.Conn.Write(b)
}

func (c *hooked) Read(b []byte) (int, error) {
	if c.h.read != nil {
		return c.h.read(c, b)
	}
	for {
		n, err := c.Conn.Read(b)
		if err != nil || !c.dead.Load() {
			return n, err
		}
	}
}

func (s redisServer) hooked(t *testing.T, h *hooks) *redislock.Backend {
	t.Helper()
	dial := s.dial
	s.dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		return &hooked{Conn: conn, h: h}, err
	}
	b, _, _ := s.backend(t)
	return b
}
