package load

import (
	"bytes"
	"context"
	"net"
	"os"
	"sync"
	"time"
)

// Wires make every byte between clients and servers take longer on its way, in both directions, as a network between hosts
// does. On one host a message takes next to no time: what it costs there is the work of two processes that share the cores,
// and so a lock that sends fewer is ahead of one that waits for fewer.
//
// They are in the clients' connections: a relay between client and server would read and write each message once more, and
// with many of those it would be what is measured. What they cost instead is two goroutines' turns and a timer for each
// message, on the cores of the load.
//
// Nothing is lost and nothing overtakes. Connecting takes no longer, and no bytes are too many to be under way at a time. A
// receiver that takes nothing for so long that the kernel's buffers are full makes all the others wait.
type Wires struct {
	delay  time.Duration
	dialer net.Dialer
	closed context.Context
	close  context.CancelFunc
	busy   sync.WaitGroup // those that read connections
	last   sync.WaitGroup // the one that hands over

	mu    sync.Mutex
	some  *sync.Cond
	queue []parcel // all take equally long, so the one that was sent first is due first
	over  bool     // nothing is handed over any more
	ends  map[*wire]struct{}
}

// parcel is what was sent at once, or the end of what is sent.
type parcel struct {
	due   time.Time
	of    *wire
	bytes []byte
	in    bool  // to the client
	err   error // to the client, after which it reads nothing more
	end   bool  // of what the client sends
}

// NewWires returns wires that take delay in each direction.
func NewWires(delay time.Duration) (*Wires, error) {
	w := &Wires{delay: delay, ends: map[*wire]struct{}{}}
	w.some = sync.NewCond(&w.mu)
	w.closed, w.close = context.WithCancel(context.Background())
	bell, err := newAlarm(w.closed)
	if err != nil {
		w.close()
		return nil, err
	}
	w.last.Go(func() { w.carry(bell) })
	return w, nil
}

// Dial connects as [net.Dialer.DialContext] does.
func (w *Wires) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	there, err := w.dialer.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	c := &wire{Conn: there, w: w}
	c.changed = sync.NewCond(&c.mu)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed.Err() != nil {
		_ = there.Close()
		return nil, net.ErrClosed
	}
	w.ends[c] = struct{}{}
	w.busy.Go(c.receive)
	return c, nil
}

// Close breaks all connections. What is under way is lost.
func (w *Wires) Close() {
	w.close()
	w.mu.Lock()
	for c := range w.ends {
		_ = c.Conn.Close()
	}
	w.mu.Unlock()
	w.busy.Wait() // each has sent its client the end
	w.mu.Lock()
	w.over = true
	w.mu.Unlock()
	w.some.Signal()
	w.last.Wait()
}

func (w *Wires) put(p parcel) {
	p.due = time.Now().Add(w.delay)
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.over {
		return
	}
	w.queue = append(w.queue, p)
	w.some.Signal()
}

// take waits for parcels. It returns none when there will be no more.
func (w *Wires) take() []parcel {
	w.mu.Lock()
	defer w.mu.Unlock()
	for len(w.queue) == 0 && !w.over {
		w.some.Wait()
	}
	all := w.queue
	w.queue = nil
	return all
}

// carry hands everything over when it is due.
func (w *Wires) carry(bell alarm) {
	defer func() { _ = bell.close() }()
	for all := w.take(); len(all) > 0; all = w.take() {
		for _, p := range all {
			_ = bell.wait(w.closed, time.Until(p.due)) // closed, nothing waits
			switch {
			case p.in:
				p.of.deliver(p.bytes, p.err)
			case p.end:
				w.hangUp(p.of)
			default:
				if _, err := p.of.Conn.Write(p.bytes); err != nil {
					p.of.fail(err)
				}
			}
		}
	}
}

func (w *Wires) hangUp(c *wire) {
	_ = c.Conn.Close()
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.ends, c)
}

// wire is a client's end of a connection.
type wire struct {
	net.Conn // to the server
	w        *Wires

	mu      sync.Mutex
	changed *sync.Cond
	arrived []byte // and not read yet
	ended   error  // what comes after it
	broken  error  // why nothing more can be sent
	closed  bool
	until   time.Time // the deadline of reads; zero: none
	timer   *time.Timer
}

// receive takes what the server sends, to its end.
func (c *wire) receive() {
	buf := make([]byte, 16<<10)
	for {
		n, err := c.Conn.Read(buf)
		if n > 0 {
			c.w.put(parcel{of: c, in: true, bytes: bytes.Clone(buf[:n])})
		}
		if err != nil {
			c.w.put(parcel{of: c, in: true, err: err})
			return
		}
	}
}

func (c *wire) deliver(b []byte, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended != nil {
		return
	}
	if len(c.arrived) == 0 {
		c.arrived = b
	} else {
		c.arrived = append(c.arrived, b...)
	}
	c.ended = err
	c.changed.Broadcast()
}

func (c *wire) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.broken == nil {
		c.broken = err
	}
}

func (c *wire) Read(b []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch {
		case c.closed:
			return 0, net.ErrClosed
		case !c.until.IsZero() && !time.Now().Before(c.until):
			return 0, os.ErrDeadlineExceeded
		case len(c.arrived) > 0 || len(b) == 0:
			n := copy(b, c.arrived)
			c.arrived = c.arrived[n:]
			return n, nil
		case c.ended != nil:
			return 0, c.ended
		}
		c.changed.Wait()
	}
}

// Write doesn't wait. What becomes of b shows in the next call, at the earliest.
func (c *wire) Write(b []byte) (int, error) {
	c.mu.Lock()
	err := c.broken
	c.mu.Unlock()
	if err != nil {
		return 0, err
	}
	c.w.put(parcel{of: c, bytes: bytes.Clone(b)})
	return len(b), nil
}

// Close ends reads at once. What was sent before still arrives.
func (c *wire) Close() error {
	c.mu.Lock()
	closed := c.closed
	c.closed, c.broken = true, net.ErrClosed
	if c.timer != nil {
		c.timer.Stop()
	}
	c.changed.Broadcast()
	c.mu.Unlock()
	if closed {
		return net.ErrClosed
	}
	c.w.put(parcel{of: c, end: true})
	return nil
}

func (c *wire) SetDeadline(t time.Time) error { return c.SetReadDeadline(t) }

// SetWriteDeadline does nothing: no write waits.
func (c *wire) SetWriteDeadline(time.Time) error { return nil }

func (c *wire) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return net.ErrClosed
	}
	c.until = t
	switch {
	case t.IsZero() && c.timer != nil:
		c.timer.Stop()
	case t.IsZero():
	case c.timer == nil:
		c.timer = time.AfterFunc(time.Until(t), c.wake)
	default:
		c.timer.Reset(time.Until(t))
	}
	c.changed.Broadcast()
	return nil
}

// wake has a read look at its deadline.
func (c *wire) wake() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.changed.Broadcast()
}
