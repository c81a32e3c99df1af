package redislock_test

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
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
		s := onServer(t, server)
		if server.Real() == nil && server.Provider != testbed.External {
			var admin *redis.Client
			s, admin = as(t, "~*", "&*", "+@all")
			set := func(rule string) {
				require.NoError(t, admin.Do(t.Context(), "ACL", "SETUSER", s.opts.Username, rule).Err())
			}
			s.refuse = func() (heal func()) {
				set("-evalsha")
				return sync.OnceFunc(func() { set("+evalsha") })
			}
		}
		return service(t, s)
	}})
}

const patience = 30 * time.Second

type redisServer struct {
	dial    dlocktest.DialFunc // whatever the address
	opts    redis.Options      // what it takes to log in
	handoff time.Duration      // Queue.HandoffTTL: long where a stall must not cost a waiter its turn
	count   func() int         // the commands so far; nil: nobody counts them
	refuse  func() func()      // has the server refuse scripts; nil: it can't
}

func newMini(t *testing.T) redisServer {
	t.Helper()
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true)
	t.Cleanup(m.Close)
	refuse := func() (heal func()) {
		m.SetError("OOM command not allowed when used memory > 'maxmemory'.")
		return func() { m.SetError("") }
	}
	return redisServer{handoff: handoff, count: m.CommandCount, refuse: refuse, dial: func(context.Context, string, string) (net.Conn, error) {
		c, err := m.Dial()
		if err != nil {
			return nil, err
		}
		return newSocket(c), nil
	}}
}

// socket is the client's end of a pipe with a buffer. Without one the server blocks in the middle of an answer, and a publisher
// to the same client waits for a mutex, which stops a bubble's time.
type socket struct {
	net.Conn          // to the server
	from     net.Conn // what has come from the server
}

func newSocket(server net.Conn) socket {
	from, to := net.Pipe()
	buffer := make(chan []byte, 10_000)
	go func() {
		defer close(buffer)
		for {
			b := make([]byte, 4096)
			n, err := server.Read(b)
			if err != nil {
				return
			}
			buffer <- b[:n]
		}
	}()
	go func() {
		for b := range buffer {
			_, _ = to.Write(b)
		}
		_ = to.Close()
	}()
	return socket{server, from}
}

func (s socket) Read(b []byte) (int, error)        { return s.from.Read(b) }
func (s socket) SetReadDeadline(t time.Time) error { return s.from.SetReadDeadline(t) }
func (s socket) SetDeadline(t time.Time) error {
	return errors.Join(s.SetReadDeadline(t), s.SetWriteDeadline(t))
}
func (s socket) Close() error { return errors.Join(s.from.Close(), s.Conn.Close()) }

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
			DialTimeout: patience, ReadTimeout: patience, WriteTimeout: patience, // a stall may be longer than the defaults
			ContextTimeoutEnabled: true,
		},
		handoff: time.Minute,
	}
}

// link disturbs scripts only.
func (s redisServer) link() *dlocktest.Dialer {
	return dlocktest.NewDialer(s.dial, dlocktest.RedisScripts)
}

// client has go-redis's defaults, except for dial retries and a real server's timeouts.
func (s redisServer) client(t *testing.T, l *dlocktest.Dialer) *redis.Client {
	t.Helper()
	o := s.opts
	o.DialerRetries = 1
	o.Addr, o.Dialer = "127.0.0.1:1", l.DialContext // not a name, so that nothing looks it up
	c := redis.NewClient(&o)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

func (s redisServer) backend(t *testing.T) (*redislock.Backend, *redis.Client, *dlocktest.Dialer) {
	t.Helper()
	l := s.link()
	c := s.client(t, l)
	return newBackend(t, c, s.options()), c, l
}

func (s redisServer) options() *redislock.Options {
	return &redislock.Options{Queue: redislock.Queue{HandoffTTL: s.handoff}}
}

// warm loads every script, so that a fault hits the script's run.
func (s redisServer) warm(t *testing.T) {
	t.Helper()
	b, _, _ := s.backend(t)
	locktest.UseOnce(t, b, func() {})
}

func service(t *testing.T, s redisServer) dlocktest.Service {
	t.Helper()
	s.warm(t)
	open := func() (dlock.Backend, dlocktest.Link) {
		b, _, l := s.backend(t)
		link := l.Link()
		link.Refuse = s.refuse
		return b, link
	}
	return dlocktest.Service{
		Backend: func() dlock.Backend {
			b, _ := open()
			return b
		},
		Faulty:   open,
		Requests: s.count,
	}
}

func newBackend(t *testing.T, c redis.UniversalClient, o *redislock.Options) *redislock.Backend {
	t.Helper()
	b, err := redislock.New(c, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	return b
}

func TestNewRefuses(t *testing.T) {
	c := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	t.Cleanup(func() { require.NoError(t, ring.Close()) })
	for _, l := range []struct {
		client redis.UniversalClient
		o      redislock.Options
		good   bool
	}{
		{client: nil},
		{client: ring},
		{client: traced{ring}},
		{ring, redislock.Options{Mode: redislock.ModeSpin}, false},
		{client: traced{c}, good: true},
		{c, redislock.Options{Spin: redislock.Spin{Min: time.Second}}, true},
		{c, redislock.Options{Queue: redislock.Queue{Max: 1, HandoffTTL: time.Millisecond}, Spin: redislock.Spin{Min: 1, Max: 1}}, true},
		{c, redislock.Options{Prefix: "{app}"}, false},
		{c, redislock.Options{Prefix: "a}"}, false},
		{c, redislock.Options{Prefix: "my app:"}, false},
		{c, redislock.Options{Mode: 7}, false},
		{c, redislock.Options{Spin: redislock.Spin{Min: -1}}, false},
		{c, redislock.Options{Spin: redislock.Spin{Max: -1}}, false},
		{c, redislock.Options{Spin: redislock.Spin{Min: time.Second, Max: time.Millisecond}}, false},
		{c, redislock.Options{Queue: redislock.Queue{Max: -1}}, false},
		{c, redislock.Options{Queue: redislock.Queue{HandoffTTL: time.Microsecond}}, false},
		{c, redislock.Options{Queue: redislock.Queue{HandoffTTL: 1500 * time.Microsecond}}, false},
	} {
		_, err := redislock.New(l.client, &l.o)
		require.Equal(t, !l.good, errors.Is(err, dlock.ErrInvalid), "%T, %+v: %v", l.client, l.o, err)
	}
	_, err := redislock.New(c, nil)
	require.NoError(t, err)
}

func TestNames(t *testing.T) {
	_, c, _ := onServer(t, server).backend(t)
	r := locktest.Request(time.Hour)
	for _, prefix := range []string{"", "app:"} {
		b := newBackend(t, c, &redislock.Options{Prefix: prefix})
		lock, fence := prefix+"lock:{"+r.Key+"}", prefix+"fence:{"+r.Key+"}"
		g := locktest.Take(t, b, r)
		defer locktest.Release(t, b, g)
		require.EqualValues(t, 1, g.Fence)
		require.Equal(t, []any{r.Owner, "1"}, c.MGet(t.Context(), lock, fence).Val())
		ttl := c.PTTL(t.Context(), lock).Val()
		require.True(t, 0 < ttl && ttl <= time.Hour, "got a lock with TTL %v", ttl)
		require.EqualValues(t, -1, c.PTTL(t.Context(), fence).Val(), "the counter never expires")
	}
}

func TestScriptsFlushed(t *testing.T) {
	b, c, _ := onServer(t, server).backend(t)
	locktest.UseOnce(t, b, func() { require.NoError(t, c.ScriptFlush(t.Context()).Err()) })
}

// go-redis repeats an acquisition, which must not wait for itself, but no release: the Locker does that (ReleaseReplyLost in the
// kit).
func TestReplyLost(t *testing.T) {
	s := onServer(t, server)
	s.warm(t)
	b, c, l := s.backend(t)
	require.NoError(t, c.Ping(t.Context()).Err())
	r := locktest.Request(time.Hour)
	l.LoseReply()
	g, err := b.Acquire(t.Context(), r)
	require.NoError(t, err)
	require.Equal(t, 1, l.Lost())
	require.Equal(t, "1", c.Get(t.Context(), "fence:{"+r.Key+"}").Val(), "one acquisition, one token")
	l.LoseReply()
	err = b.Release(t.Context(), g)
	require.ErrorIs(t, err, io.EOF)
	require.NotErrorIs(t, err, dlock.ErrLost)
}
