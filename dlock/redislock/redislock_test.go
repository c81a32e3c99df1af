package redislock_test

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func TestConformanceVirtual(t *testing.T) {
	dlocktest.Run(t, dlocktest.Harness{Virtual: true, New: func(t *testing.T) dlocktest.Service {
		return service(t, newMini(t))
	}})
}

func TestConformance(t *testing.T) {
	dlocktest.Run(t, dlocktest.Harness{New: func(t *testing.T) dlocktest.Service {
		return service(t, onServer(t, server))
	}})
}

// A Cluster refuses a script whose keys don't share a slot.
func TestConformanceCluster(t *testing.T) {
	if server.Provider == testbed.External {
		t.Skip("needs a Redis Cluster, which an external server may not be")
	}
	s, err := testbed.StartRedis(t.Context(), &testbed.Options{Args: []string{"--cluster-enabled", "yes"}})
	testbed.Need(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	node := onServer(t, s)
	c := node.client(t, node.link())
	require.NoError(t, c.ClusterAddSlotsRange(t.Context(), 0, 16383).Err())
	require.Eventually(t, func() bool {
		info, err := c.ClusterInfo(t.Context()).Result()
		return err == nil && strings.Contains(info, "cluster_state:ok")
	}, 30*time.Second, 10*time.Millisecond)
	cluster := func(t *testing.T, l *dlocktest.Dialer) redis.UniversalClient {
		t.Helper()
		c := redis.NewClusterClient(&redis.ClusterOptions{
			Dialer:        l.DialContext,
			DialerRetries: 1,
			DialTimeout:   patience, ReadTimeout: patience, WriteTimeout: patience, ContextTimeoutEnabled: true,
			ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) { // not the address that the node has for itself
				return []redis.ClusterSlot{{Start: 0, End: 16383, Nodes: []redis.ClusterNode{{Addr: s.Addr}}}}, nil
			},
		})
		t.Cleanup(func() { require.NoError(t, c.Close()) })
		return c
	}
	t.Run("kit", func(t *testing.T) {
		dlocktest.Run(t, dlocktest.Harness{New: func(t *testing.T) dlocktest.Service {
			return dlocktest.Service{
				Backend: func() dlock.Backend { return newBackend(t, cluster(t, node.link()), node.options()) },
				Faulty: func() (dlock.Backend, dlocktest.Link) {
					l := node.link()
					return newBackend(t, cluster(t, l), node.options()), l.Link()
				},
			}
		}})
	})
	err = c.EvalSha(t.Context(), strings.Repeat("0", 40), []string{"lock:{a}", "fence:{b}"}).Err()
	require.ErrorContains(t, err, "CROSSSLOT", "the server checks slots")
}

// patience is how long a real server may take to answer.
const patience = 30 * time.Second

// redisServer is a Redis, real or not.
type redisServer struct {
	dial  dlocktest.DialFunc // whatever the address
	opts  redis.Options      // what it takes to log in
	claim time.Duration      // Queue.Claim: long where a machine that stalls must not cost a waiter its turn
}

// newMini starts a Redis inside the process, and inside the bubble if there is one.
func newMini(t *testing.T) redisServer {
	t.Helper()
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true)
	t.Cleanup(m.Close)
	return redisServer{claim: claim, dial: func(context.Context, string, string) (net.Conn, error) {
		c, err := m.Dial()
		if err != nil {
			return nil, err
		}
		return newSocket(c), nil
	}}
}

// socket is the client's end of a pipe that has room for what nobody reads, as a kernel's has. Without it the server waits in
// the middle of an answer, and who wants to tell the same client something waits for a mutex: for a bubble that is no reason
// to let time go on.
type socket struct {
	net.Conn

	mu      sync.Mutex
	changed *sync.Cond
	arrived []byte
	ended   error
	until   time.Time
	timer   *time.Timer
}

func newSocket(pipe net.Conn) *socket {
	c := &socket{Conn: pipe}
	c.changed = sync.NewCond(&c.mu)
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := pipe.Read(buf)
			c.mu.Lock()
			c.arrived, c.ended = append(c.arrived, buf[:n]...), err
			c.changed.Broadcast()
			c.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return c
}

func (c *socket) Read(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch {
		case !c.until.IsZero() && !time.Now().Before(c.until):
			return 0, os.ErrDeadlineExceeded
		case len(c.arrived) > 0:
			n := copy(b, c.arrived)
			c.arrived = c.arrived[n:]
			return n, nil
		case c.ended != nil:
			return 0, c.ended
		}
		c.changed.Wait()
	}
}

func (c *socket) SetDeadline(t time.Time) error {
	return errors.Join(c.SetWriteDeadline(t), c.SetReadDeadline(t))
}

func (c *socket) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.until = t
	if c.timer != nil {
		c.timer.Stop()
	}
	if !t.IsZero() {
		c.timer = time.AfterFunc(time.Until(t), func() {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.changed.Broadcast()
		})
	}
	c.changed.Broadcast()
	return nil
}

func (c *socket) Close() error {
	_ = c.SetReadDeadline(time.Time{})
	return c.Conn.Close()
}

func onServer(t *testing.T, s *testbed.Server) redisServer {
	t.Helper()
	o, err := redis.ParseURL(s.URL)
	require.NoError(t, err)
	var d interface {
		DialContext(ctx context.Context, network, addr string) (net.Conn, error)
	} = &net.Dialer{}
	if o.TLSConfig != nil {
		d = &tls.Dialer{Config: o.TLSConfig}
	}
	return redisServer{
		dial: func(ctx context.Context, _, _ string) (net.Conn, error) { return d.DialContext(ctx, "tcp", s.Addr) },
		opts: redis.Options{
			Username: o.Username, Password: o.Password, DB: o.DB,
			DialTimeout: patience, ReadTimeout: patience, WriteTimeout: patience, // a machine may stall for longer than by default
			ContextTimeoutEnabled: true,
		},
		claim: time.Minute,
	}
}

// link returns a link that disturbs scripts, and lets pass what a client says to begin a connection.
func (s redisServer) link() *dlocktest.Dialer {
	return dlocktest.NewDialer(s.dial, func(request []byte) bool {
		return bytes.Contains(request, []byte("eval")) || bytes.Contains(request, []byte("EVAL"))
	})
}

// client returns a client over l with go-redis's defaults, but for the half second for which it dials a dead server, and for
// how long it waits for a real one.
func (s redisServer) client(t *testing.T, l *dlocktest.Dialer) *redis.Client {
	t.Helper()
	o := s.opts
	o.DialerRetries = 1
	o.Addr, o.Dialer = "127.0.0.1:1", l.DialContext // an address that is no name, so that nothing looks it up
	c := redis.NewClient(&o)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// backend returns a Backend with a client of its own, and both.
func (s redisServer) backend(t *testing.T) (*redislock.Backend, *redis.Client, *dlocktest.Dialer) {
	t.Helper()
	l := s.link()
	c := s.client(t, l)
	return newBackend(t, c, s.options()), c, l
}

func (s redisServer) options() *redislock.Options {
	return &redislock.Options{Queue: redislock.Queue{Claim: s.claim}}
}

// warm sends every script once, so that a fault meets the script's run and not its first upload.
func (s redisServer) warm(t *testing.T) {
	t.Helper()
	b, _, _ := s.backend(t)
	g, err := b.TryAcquire(t.Context(), request(time.Hour))
	require.NoError(t, err)
	require.NoError(t, b.Renew(t.Context(), g))
	require.NoError(t, b.Release(t.Context(), g))
}

func service(t *testing.T, s redisServer) dlocktest.Service {
	t.Helper()
	s.warm(t)
	return dlocktest.Service{
		Backend: func() dlock.Backend {
			b, _, _ := s.backend(t)
			return b
		},
		Faulty: func() (dlock.Backend, dlocktest.Link) {
			b, _, l := s.backend(t)
			return b, l.Link()
		},
	}
}

func newBackend(t *testing.T, c redis.UniversalClient, o *redislock.Options) *redislock.Backend {
	t.Helper()
	b, err := redislock.New(c, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	return b
}

// onBoth runs f on a real Redis, and in a bubble on one inside the process.
func onBoth(t *testing.T, f func(t *testing.T, s redisServer)) {
	t.Helper()
	t.Run("real", func(t *testing.T) { f(t, onServer(t, server)) })
	t.Run("virtual", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) { f(t, newMini(t)) })
	})
}

func request(ttl time.Duration) dlock.Request {
	return dlock.Request{Key: "test/" + uuid.NewString(), Owner: uuid.NewString(), TTL: ttl}
}

func TestNewRefuses(t *testing.T) {
	c := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	_, err := redislock.New(nil, nil)
	require.ErrorIs(t, err, dlock.ErrInvalid)
	for _, o := range []redislock.Options{
		{Prefix: "{app}"},
		{Prefix: "a}"},
		{Prefix: "my app:"},
		{Spin: redislock.Spin{Min: -1}},
		{Spin: redislock.Spin{Max: -1}},
		{Spin: redislock.Spin{Min: time.Second, Max: time.Millisecond}},
	} {
		_, err := redislock.New(c, &o)
		require.ErrorIs(t, err, dlock.ErrInvalid, "%+v", o)
	}
	_, err = redislock.New(c, &redislock.Options{Spin: redislock.Spin{Min: time.Second}})
	require.NoError(t, err)
}

func TestNames(t *testing.T) {
	onBoth(t, func(t *testing.T, s redisServer) {
		_, c, _ := s.backend(t)
		a := newBackend(t, c, nil)
		b := newBackend(t, c, &redislock.Options{Prefix: "app:"})
		r := request(time.Hour)
		for _, l := range []struct {
			*redislock.Backend
			prefix string
		}{{a, ""}, {b, "app:"}} {
			g, err := l.TryAcquire(t.Context(), r)
			require.NoError(t, err, "prefixes are apart")
			require.EqualValues(t, 1, g.Fence)
			require.Equal(t, r.Owner, c.Get(t.Context(), l.prefix+"lock:{"+r.Key+"}").Val())
			require.Equal(t, "1", c.Get(t.Context(), l.prefix+"fence:{"+r.Key+"}").Val())
			ttl := c.PTTL(t.Context(), l.prefix+"lock:{"+r.Key+"}").Val()
			require.True(t, 0 < ttl && ttl <= time.Hour, "got a lock with TTL %v", ttl)
			require.EqualValues(t, -1, c.PTTL(t.Context(), l.prefix+"fence:{"+r.Key+"}").Val(), "the counter never expires")
			require.NoError(t, l.Release(t.Context(), g))
			require.Zero(t, c.Exists(t.Context(), l.prefix+"lock:{"+r.Key+"}").Val())
		}
	})
}

func TestKeyThatBreaksTheHashTag(t *testing.T) {
	b, _, _ := onServer(t, server).backend(t)
	_, err := b.TryAcquire(t.Context(), dlock.Request{Key: "}x", Owner: "o", TTL: time.Second})
	require.ErrorIs(t, err, dlock.ErrInvalid)
}

func TestTTLThatRedisCannotRepresent(t *testing.T) {
	b, _, _ := onServer(t, server).backend(t)
	for _, ttl := range []time.Duration{-time.Second, 0, 1, time.Millisecond - 1, time.Millisecond + 1, 1500 * time.Microsecond} {
		r := request(ttl)
		_, err := b.TryAcquire(t.Context(), r)
		require.ErrorIs(t, err, dlock.ErrInvalid, "TTL %v", ttl)
		require.ErrorIs(t, b.Renew(t.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner, TTL: ttl}), dlock.ErrInvalid, "TTL %v", ttl)
		l, err := dlock.New(b, &dlock.Options{TTL: max(ttl, time.Millisecond)})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, l.Close()) })
		if _, err = l.Acquire(t.Context(), r.Key); ttl > time.Millisecond {
			require.ErrorIs(t, err, dlock.ErrInvalid, "TTL %v through the Locker", ttl)
		}
	}
}

func TestScriptsFlushed(t *testing.T) {
	onBoth(t, func(t *testing.T, s redisServer) {
		b, c, _ := s.backend(t)
		r := request(time.Hour)
		flush := func() { require.NoError(t, c.ScriptFlush(t.Context()).Err()) } // every server may lose scripts at any time
		flush()
		g, err := b.TryAcquire(t.Context(), r)
		require.NoError(t, err)
		flush()
		require.NoError(t, b.Renew(t.Context(), g))
		flush()
		require.NoError(t, b.Release(t.Context(), g))
	})
}

func TestFenceCounterUnusable(t *testing.T) {
	onBoth(t, func(t *testing.T, s redisServer) {
		b, c, _ := s.backend(t)
		for _, counter := range []string{"abc", "1.5", "", "-5", "-1", "9007199254740991", "9223372036854775807"} {
			r := request(time.Hour)
			require.NoError(t, c.Set(t.Context(), "fence:{"+r.Key+"}", counter, 0).Err())
			_, err := b.TryAcquire(t.Context(), r)
			require.Error(t, err, "counter %q", counter)
			require.NotErrorIs(t, err, dlock.ErrHeld)
			require.Zero(t, c.Exists(t.Context(), "lock:{"+r.Key+"}").Val(), "a lock without a token, counter %q", counter)
		}
		r := request(time.Hour)
		require.NoError(t, c.Set(t.Context(), "fence:{"+r.Key+"}", "9007199254740990", 0).Err())
		g, err := b.TryAcquire(t.Context(), r)
		require.NoError(t, err)
		require.EqualValues(t, 9007199254740991, g.Fence)
		again, err := b.TryAcquire(t.Context(), r)
		require.NoError(t, err)
		require.Equal(t, g.Fence, again.Fence)
	})
}

// The client repeats by itself a request whose reply was lost. It must not meet its own ghost.
func TestClientRetriesAcquire(t *testing.T) {
	onBoth(t, func(t *testing.T, s redisServer) {
		s.warm(t)
		b, c, l := s.backend(t)
		require.NoError(t, c.Ping(t.Context()).Err())
		r := request(time.Hour)
		l.LoseReply()
		g, err := b.Acquire(t.Context(), r)
		require.NoError(t, err)
		require.Equal(t, 1, l.Lost())
		require.EqualValues(t, 1, g.Fence)
		require.Equal(t, "1", c.Get(t.Context(), "fence:{"+r.Key+"}").Val(), "one acquisition, one token")
		require.NoError(t, b.Release(t.Context(), g))
	})
}

// A release whose reply was lost is repeated by the Locker, which knows that it is a repeat, and not by the client.
func TestReleaseReplyLost(t *testing.T) {
	onBoth(t, func(t *testing.T, s redisServer) {
		s.warm(t)
		b, _, l := s.backend(t)
		g, err := b.Acquire(t.Context(), request(time.Hour))
		require.NoError(t, err)
		l.LoseReply()
		err = b.Release(t.Context(), g)
		require.ErrorIs(t, err, io.EOF)
		require.NotErrorIs(t, err, dlock.ErrLost)

		reg := prometheus.NewRegistry()
		locker, err := dlock.New(b, &dlock.Options{TTL: time.Hour, Registerer: reg})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, locker.Close()) })
		h, err := locker.Acquire(t.Context(), request(0).Key)
		require.NoError(t, err)
		l.LoseReply()
		require.NoError(t, h.Release(t.Context()))
		require.Equal(t, 2, l.Lost())
		families, err := reg.Gather()
		require.NoError(t, err)
		for _, f := range families {
			if f.GetName() == "release_by_non_owner_total" {
				require.Zero(t, f.GetMetric()[0].GetCounter().GetValue())
			}
		}
		require.NoError(t, locker.Close())
	})
}

// go-redis's default options don't look at a context while a reply is awaited. The Locker does.
func TestContextEndsDuringARequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		s.warm(t)
		b, c, l := s.backend(t)
		require.NoError(t, c.Ping(t.Context()).Err())
		locker, err := dlock.New(b, &dlock.Options{TTL: time.Hour})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, locker.Close()) })
		deliver := l.Link().HoldReplies()
		ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
		defer cancel()
		began := time.Now()
		_, err = locker.Acquire(ctx, "k")
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, 100*time.Millisecond, time.Since(began))
		deliver()
		require.NoError(t, locker.Close())
		require.Zero(t, c.Exists(t.Context(), "lock:{k}").Val(), "undone although ctx has ended")
		require.Equal(t, "1", c.Get(t.Context(), "fence:{k}").Val(), "it had taken effect")
	})
}

// However long the pauses have grown, a waiter wakes when the holder's lease ends.
func TestSpinWakesAtExpiry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		_, c, _ := s.backend(t)
		b := newBackend(t, c, &redislock.Options{Mode: redislock.ModeSpin, Spin: redislock.Spin{Min: time.Hour}})
		for _, ttl := range []time.Duration{time.Millisecond, time.Second, time.Minute} {
			r := request(ttl)
			g, err := b.TryAcquire(t.Context(), r)
			require.NoError(t, err)
			time.Sleep(ttl / 3) // so that the rest is no whole number of milliseconds
			_, err = b.Acquire(t.Context(), dlock.Request{Key: r.Key, Owner: "next", TTL: time.Hour})
			require.NoError(t, err)
			require.GreaterOrEqual(t, time.Since(g.Start), ttl)
			require.LessOrEqual(t, time.Since(g.Start), ttl+time.Millisecond)
		}
	})
}

// A key without a TTL is not a lock of ours. It is waited for at the usual pace, and not taken.
func TestForeignKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, c, _ := newMini(t).backend(t)
		require.NoError(t, c.Set(t.Context(), "lock:{k}", "somebody", 0).Err())
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		_, err := b.Acquire(ctx, dlock.Request{Key: "k", Owner: "o", TTL: time.Second})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, "somebody", c.Get(t.Context(), "lock:{k}").Val())
	})
}
