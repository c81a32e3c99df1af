package dlocktest

import (
	"bytes"
	"context"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// Dialer makes connections that lose messages: the [Link] of a client whose protocol has one request at a time on a connection,
// such as those of Redis and PostgreSQL. Give DialContext to the client library.
type Dialer struct {
	dial    DialFunc
	disturb func(request []byte) bool

	mu    sync.Mutex
	fault fault
	held  chan struct{} // closed on delivery
	lost  int
	conns map[*conn]struct{} // open
}

// DialFunc is the type of (*net.Dialer).DialContext.
type DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error)

// NewDialer returns a Dialer on dial. disturb reports whether what the client writes is a request of the Backend, not one that
// must pass, such as a handshake or the upload of a script or statement: a request whose reply is lost must have been carried
// out. Nil disturbs every request.
func NewDialer(dial DialFunc, disturb func(request []byte) bool) *Dialer {
	if disturb == nil {
		disturb = func([]byte) bool { return true }
	}
	return &Dialer{dial: dial, disturb: disturb, conns: map[*conn]struct{}{}}
}

// RedisScripts reports whether a request to Redis runs a script; pass it to [NewDialer] for a lock made of scripts.
func RedisScripts(request []byte) bool {
	return bytes.Contains(request, []byte("eval")) || bytes.Contains(request, []byte("EVAL"))
}

// Link returns the faults. The last one injected is in force.
func (d *Dialer) Link() Link {
	inject := func(f fault) func() (heal func()) {
		return func() func() { return d.inject(f) }
	}
	return Link{
		LoseRequests: inject(loseRequests),
		LoseReplies:  inject(loseReplies),
		HoldReplies:  inject(holdReplies),
		Cut:          inject(cut),
	}
}

// LoseReply loses only the next reply, so a client that repeats requests by itself succeeds.
func (d *Dialer) LoseReply() { d.inject(loseOneReply) }

// Lost is how many requests and replies have been lost.
func (d *Dialer) Lost() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.lost
}

type fault int

const (
	none fault = iota
	loseRequests
	loseReplies
	loseOneReply
	holdReplies
	cut
)

func (d *Dialer) inject(f fault) (heal func()) {
	d.mu.Lock()
	held := make(chan struct{})
	d.fault, d.held = f, held
	var broken []*conn
	if f == cut {
		for c := range d.conns {
			broken = append(broken, c)
		}
	}
	d.mu.Unlock()
	for _, c := range broken {
		_ = c.Close()
	}
	return sync.OnceFunc(func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.held == held { // else a later fault is in force
			d.fault = none
		}
		close(held)
	})
}

// DialContext connects, unless the link is cut.
func (d *Dialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	if d.is(cut) {
		return nil, io.EOF
	}
	under, err := d.dial(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	c := &conn{Conn: under, d: d, closed: make(chan struct{}), reset: make(chan struct{})}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.fault == cut { // meanwhile
		_ = under.Close()
		return nil, io.EOF
	}
	d.conns[c] = struct{}{}
	return c, nil
}

func (d *Dialer) is(f fault) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.fault == f
}

type conn struct {
	net.Conn
	d         *Dialer
	closeOnce sync.Once
	closed    chan struct{}

	mu       sync.Mutex
	disturb  bool // whether to disturb the awaited reply
	deadline time.Time
	reset    chan struct{} // closed when the deadline changes
}

func (c *conn) Close() error {
	c.closeOnce.Do(func() {
		close(c.closed)
		c.d.mu.Lock()
		defer c.d.mu.Unlock()
		delete(c.d.conns, c)
	})
	return c.Conn.Close()
}

func (c *conn) Write(b []byte) (int, error) {
	disturb := c.d.disturb(b)
	c.mu.Lock()
	c.disturb = disturb
	c.mu.Unlock()
	if c.d.is(cut) || disturb && c.d.is(loseRequests) {
		return 0, c.breaks()
	}
	n, err := c.Conn.Write(b)
	return n, c.ended(err, io.EOF)
}

func (c *conn) isClosed() bool {
	select {
	case <-c.closed:
		return true
	default:
		return false
	}
}

func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if c.isClosed() {
		return 0, io.EOF
	}
	c.mu.Lock()
	disturb := c.disturb
	c.mu.Unlock()
	if err != nil || !disturb {
		return n, err
	}
	c.d.mu.Lock()
	f, held := c.d.fault, c.d.held
	if f == loseOneReply {
		c.d.fault = none
	}
	c.d.mu.Unlock()
	switch f {
	case loseReplies, loseOneReply, cut:
		return 0, c.breaks()
	case holdReplies:
		if err := c.await(held); err != nil {
			return 0, err
		}
	default: // it disturbs requests
	}
	return n, nil
}

// await returns on delivery. If the connection is closed or its deadline passes first, the reply is lost and the connection
// broken.
func (c *conn) await(held <-chan struct{}) error {
	for {
		c.mu.Lock()
		deadline, reset := c.deadline, c.reset
		c.mu.Unlock()
		var over <-chan time.Time
		if !deadline.IsZero() {
			over = time.After(time.Until(deadline))
		}
		select {
		case <-held:
			return nil
		case <-c.closed:
			return io.EOF
		case <-over:
			_ = c.breaks()
			return os.ErrDeadlineExceeded
		case <-reset:
		}
	}
}

func (c *conn) SetDeadline(t time.Time) error {
	c.setDeadline(t)
	return c.ended(c.Conn.SetDeadline(t), nil)
}

func (c *conn) SetReadDeadline(t time.Time) error {
	c.setDeadline(t)
	return c.ended(c.Conn.SetReadDeadline(t), nil)
}

func (c *conn) SetWriteDeadline(t time.Time) error { return c.ended(c.Conn.SetWriteDeadline(t), nil) }

func (c *conn) setDeadline(t time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.deadline = t
	close(c.reset)
	c.reset = make(chan struct{})
}

// ended replaces the error of a connection broken here by that of one that the other side has closed.
func (c *conn) ended(err, instead error) error {
	if err != nil && c.isClosed() {
		return instead
	}
	return err
}

func (c *conn) breaks() error {
	c.d.mu.Lock()
	c.d.lost++
	c.d.mu.Unlock()
	_ = c.Close()
	return io.EOF
}
