package redislock_test

import (
	"bytes"
	"context"
	"io"
	"net"
	"sync"

	"github.com/fencelab/fencelab/dlock/dlocktest"
)

// link stands between a client and its Redis and disturbs scripts, on connections of any kind. What a client says to
// begin a connection passes, so that a script whose reply is lost has always been run.
type link struct {
	dial func(ctx context.Context) (net.Conn, error)

	mu    sync.Mutex
	fault fault
	held  chan struct{} // closed on delivery
	lost  int           // scripts whose request or reply was lost
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

func (l *link) faults() dlocktest.Link {
	inject := func(f fault) func() (heal func()) {
		return func() func() { return l.inject(f) }
	}
	return dlocktest.Link{
		LoseRequests: inject(loseRequests),
		LoseReplies:  inject(loseReplies),
		HoldReplies:  inject(holdReplies),
		Cut:          inject(cut),
	}
}

func (l *link) inject(f fault) (heal func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	held := make(chan struct{})
	l.fault, l.held = f, held
	return sync.OnceFunc(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.fault = none
		close(held)
	})
}

func (l *link) is(f fault) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fault == f
}

func (l *link) Dial(ctx context.Context, _, _ string) (net.Conn, error) {
	if l.is(cut) {
		return nil, io.EOF
	}
	c, err := l.dial(ctx)
	if err != nil {
		return nil, err
	}
	return &conn{Conn: c, l: l, closed: make(chan struct{})}, nil
}

type conn struct {
	net.Conn
	l         *link
	script    bool // the reply that is waited for is a script's; the client uses a connection for one call at a time
	closeOnce sync.Once
	closed    chan struct{}
}

func (c *conn) Close() error {
	c.closeOnce.Do(func() { close(c.closed) })
	return c.Conn.Close()
}

func (c *conn) Write(b []byte) (int, error) {
	c.script = bytes.Contains(b, []byte("eval")) || bytes.Contains(b, []byte("EVAL"))
	if c.l.is(cut) || c.script && c.l.is(loseRequests) {
		return 0, c.breaks()
	}
	return c.Conn.Write(b)
}

func (c *conn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	select {
	case <-c.closed:
		return 0, io.EOF
	default:
	}
	if err != nil || !c.script {
		return n, err
	}
	c.l.mu.Lock()
	f, held := c.l.fault, c.l.held
	if f == loseOneReply {
		c.l.fault = none
	}
	c.l.mu.Unlock()
	switch f {
	case loseReplies, loseOneReply, cut:
		return 0, c.breaks()
	case holdReplies:
		select {
		case <-held:
		case <-c.closed:
			return 0, io.EOF
		}
	default: // requests are what it disturbs
	}
	return n, nil
}

func (c *conn) breaks() error {
	c.l.mu.Lock()
	c.l.lost++
	c.l.mu.Unlock()
	_ = c.Close()
	return io.EOF // as if the other side had closed
}
