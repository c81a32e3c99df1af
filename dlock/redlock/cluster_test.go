package redlock_test

import (
	"context"
	"io"
	"net"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/redlock"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

type node struct {
	dial dlocktest.DialFunc // whatever the address
	opts redis.Options      // what it takes to log in
	mini *miniredis.Miniredis
	dead *atomic.Bool // refuses connections
	hole *atomic.Bool // accepts requests, never replies
}

type nodes []node

func newNode(n node) node {
	n.dead, n.hole = new(atomic.Bool), new(atomic.Bool)
	dial := n.dial
	n.dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		if n.dead.Load() {
			return nil, io.EOF
		}
		c, err := dial(ctx, network, addr)
		return holeConn{c, n.hole}, err
	}
	return n
}

type holeConn struct {
	net.Conn
	hole *atomic.Bool
}

func (c holeConn) Write(b []byte) (int, error) {
	if c.hole.Load() {
		return len(b), nil
	}
	return c.Conn.Write(b)
}

func minis(t *testing.T, n int) nodes {
	t.Helper()
	ns := make(nodes, n)
	t.Cleanup(func() { time.Sleep(2 * time.Second) }) // until go-redis's pool, which dials a dead node once a second, sees that it is closed
	for i := range ns {
		m := miniredis.NewMiniRedis()
		m.ClockTTL(true)
		t.Cleanup(m.Close)
		ns[i] = newNode(node{mini: m, dial: func(context.Context, string, string) (net.Conn, error) { return m.Dial() }})
	}
	return ns
}

func onServers(t *testing.T) nodes {
	t.Helper()
	ns := make(nodes, len(servers))
	for i, s := range servers {
		ns[i] = onServer(t, s)
	}
	return ns
}

func onServer(t *testing.T, s *testbed.Server) node {
	t.Helper()
	o, err := redis.ParseURL(s.URL)
	require.NoError(t, err)
	d := &net.Dialer{}
	return newNode(node{
		dial: func(ctx context.Context, _, _ string) (net.Conn, error) { return d.DialContext(ctx, "tcp", s.Addr) },
		opts: redis.Options{Username: o.Username, Password: o.Password, DB: o.DB},
	})
}

// client has go-redis's defaults, except for dial retries.
func (n node) client(t *testing.T, dial dlocktest.DialFunc) *redis.Client {
	t.Helper()
	o := n.opts
	o.DialerRetries = 1
	o.ContextTimeoutEnabled = true
	o.Addr, o.Dialer = "127.0.0.1:1", dial // not a name, so that nothing looks it up
	c := redis.NewClient(&o)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

// link disturbs scripts only.
func (n node) link() *dlocktest.Dialer {
	return dlocktest.NewDialer(n.dial, dlocktest.RedisScripts)
}

type proc struct {
	*redlock.Backend
	links   []*dlocktest.Dialer
	clients []*redis.Client
}

// patient is for tests that aren't about the node timeout.
var patient = redlock.Options{NodeTimeout: 10 * time.Second}

func (ns nodes) proc(t *testing.T, o redlock.Options) proc {
	t.Helper()
	var p proc
	clients := make([]redis.UniversalClient, len(ns))
	for i, n := range ns {
		l := n.link()
		c := n.client(t, l.DialContext)
		p.links, p.clients, clients[i] = append(p.links, l), append(p.clients, c), c
	}
	b, err := redlock.New(clients, &o)
	require.NoError(t, err)
	p.Backend = b
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	return p
}

// link's faults hit the first n nodes.
func (p proc) link(n int) dlocktest.Link {
	all := func(f func(dlocktest.Link) func() func()) func() func() {
		return func() func() {
			var heals []func()
			for _, l := range p.links[:n] {
				heals = append(heals, f(l.Link())())
			}
			return func() {
				for _, heal := range heals {
					heal()
				}
			}
		}
	}
	return dlocktest.Link{
		LoseRequests: all(func(l dlocktest.Link) func() func() { return l.LoseRequests }),
		LoseReplies:  all(func(l dlocktest.Link) func() func() { return l.LoseReplies }),
		HoldReplies:  all(func(l dlocktest.Link) func() func() { return l.HoldReplies }),
		Cut:          all(func(l dlocktest.Link) func() func() { return l.Cut }),
	}
}

// warm loads every script, so that a fault hits the script's run.
func (ns nodes) warm(t *testing.T) {
	t.Helper()
	p := ns.proc(t, patient)
	locktest.UseOnce(t, p, func() {})
	require.NoError(t, p.Close())
}

// service's faults hit the first n nodes. If these are not all, lost requests still reach the others, so only replies can be
// disturbed. A frozen node is waited for when the others disagree: the timeout must be short, and replies cannot be held for
// longer than leases.
func (ns nodes) service(t *testing.T, n int, frozen bool) dlocktest.Service {
	t.Helper()
	ns.warm(t)
	o := patient
	if frozen {
		o.NodeTimeout = 20 * time.Millisecond
	}
	return dlocktest.Service{
		Backend: func() dlock.Backend { return ns.proc(t, o).Backend },
		Faulty: func() (dlock.Backend, dlocktest.Link) {
			p := ns.proc(t, o)
			l := p.link(n)
			if ns[0].mini != nil {
				l.Refuse = func() (heal func()) {
					synctest.Wait() // a grant returns before its last requests have arrived
					answer := func(err string) {
						for _, refuses := range ns[:n] {
							refuses.mini.SetError(err)
						}
					}
					answer("OOM command not allowed when used memory > 'maxmemory'.")
					return func() { answer("") }
				}
			}
			if n < len(ns) {
				l.LoseRequests, l.Cut = nil, nil
			}
			if frozen {
				l.HoldReplies = nil
			}
			return p.Backend, l
		},
	}
}
