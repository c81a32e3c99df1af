package explore

import (
	"bytes"
	"context"
	"net"
	"slices"
	"sync"
	"time"
)

type flow int

const (
	pass flow = iota
	hold      // keep messages, in order, until the direction passes again
	lose      // drop; when the direction passes again the client's end is closed, since the stream has a hole
)

// Client is one process's network to the servers, with the schedule's faults.
type Client struct {
	Name string
	TTL  time.Duration
	// Gap, if not nil, is called between the requests of a non-atomic release.
	Gap func() error

	dial     func(server int) (net.Conn, error)
	greeting int
	latency  time.Duration // each client has its own, so that no two events coincide

	mu         sync.Mutex
	dead       bool
	frozen     bool // what it sends stays in the process, what is sent to it in the network
	freeze     int  // requests until it freezes; 0: never
	flows      []fault
	conns      []*conn
	opened     int
	requests   int
	unanswered map[string]bool // requests of closed connections that had no reply
	repeats    int             // of these, sent again: the server may execute them twice
	change     *sync.Cond
}

// NewClient returns a client of real servers, which has no faults.
func NewClient(addrs []string, ttl time.Duration) *Client {
	c := newClient(len(addrs), func(server int) (net.Conn, error) { return net.Dial("tcp", addrs[server]) }) //nolint:noctx // as a server in this process
	c.TTL = ttl
	return c
}

func newClient(servers int, dial func(server int) (net.Conn, error)) *Client {
	c := &Client{flows: make([]fault, servers), unanswered: map[string]bool{}, dial: dial}
	c.change = sync.NewCond(&c.mu)
	return c
}

type fault struct {
	flow  [2]flow
	after [2]int
}

func (f *fault) inForce(dir int) flow {
	if f.after[dir] > 0 {
		return pass
	}
	return f.flow[dir]
}

// replyLater separates a reply from the request behind it.
const replyLater = 500 * time.Nanosecond

const (
	requests = iota
	replies
)

// Addr is the address of a server for [Client.Dial].
func (c *Client) Addr(server int) string {
	return net.JoinHostPort("127.0.0.1", string(rune('1'+server)))
}

// Dial connects to the server at addr. Under a fault it fails at once: a client library may hold a mutex while it connects, and
// in a bubble no time passes while a goroutine waits for a mutex. For the same reason the greeting's messages take no time.
func (c *Client) Dial(_ context.Context, _, addr string) (net.Conn, error) {
	_, port, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	n := int(port[0] - '1')
	refused := c.dead || c.frozen || c.flows[n].inForce(requests) != pass || c.flows[n].inForce(replies) != pass
	c.mu.Unlock()
	if refused {
		return nil, net.ErrClosed
	}
	server, err := c.dial(n)
	if err != nil {
		return nil, err
	}
	ours, theirs := net.Pipe()
	k := &conn{c: c, server: n, ends: [2]net.Conn{theirs, server}, greeting: [2]int{c.greeting, c.greeting}}
	c.mu.Lock()
	c.opened++
	k.latency = c.latency + time.Duration(c.opened)*time.Nanosecond
	c.conns = append(c.conns, k)
	c.mu.Unlock()
	for dir := range 2 {
		go k.read(dir)
		go k.write(dir)
	}
	return clientEnd{ours, k.latency}, nil
}

// clientEnd sets deadlines slightly later, since otherwise they would race with a context's timer for the same time.
type clientEnd struct {
	net.Conn
	later time.Duration
}

func (e clientEnd) SetReadDeadline(t time.Time) error {
	if !t.IsZero() {
		t = t.Add(e.later)
	}
	return e.Conn.SetReadDeadline(t)
}

type conn struct {
	c          *Client
	server     int
	latency    time.Duration
	ends       [2]net.Conn
	queues     [2][]message
	broken     bool
	closed     bool
	unanswered []byte // the last request, until a reply
	// greeting counts the messages left of the client's greeting, by direction.
	greeting [2]int
}

type message struct {
	bytes    []byte // nil: end of the stream
	held     bool
	unsent   bool // held in a frozen process
	greeting bool
}

func (k *conn) read(dir int) {
	for buf := make([]byte, 1<<13); ; {
		n, err := k.ends[dir].Read(buf)
		k.c.mu.Lock()
		if n > 0 {
			k.arrive(dir, bytes.Clone(buf[:n]))
		}
		if err != nil {
			k.arrive(dir, nil)
		}
		k.c.mu.Unlock()
		if err != nil {
			return
		}
	}
}

// arrive queues a message, or the end of the stream, unless it is lost. c.mu is held.
func (k *conn) arrive(dir int, b []byte) {
	c, f, m := k.c, &k.c.flows[k.server], message{bytes: b}
	if b != nil && dir == requests {
		c.requests++
	}
	switch {
	case b != nil && dir == requests && c.dead:
		return
	case b != nil && k.greeting[dir] > 0: // which no fault interrupts
		k.greeting[dir]--
		m.greeting = true
	default:
		flow := f.inForce(dir)
		if b != nil && flow == lose { // the other end learns of it when the fault is over
			k.broken = true
			return
		}
		m.held, m.unsent = flow != pass, dir == requests && c.frozen
		if b != nil && dir == requests {
			k.unanswered = b
			if c.unanswered[string(b)] {
				c.repeats++
				delete(c.unanswered, string(b))
			}
		}
		if b != nil && f.after[dir] > 0 {
			f.after[dir]--
		}
		if b != nil && dir == requests && c.freeze > 0 {
			c.freeze--
			c.frozen = c.freeze == 0
		}
	}
	k.queues[dir] = append(k.queues[dir], m)
	c.change.Broadcast()
}

// write forwards messages from a direction's queue. It drops what the server sends on a connection that the client has closed,
// and goes on: that client's requests may still be in the network.
func (k *conn) write(dir int) {
	for {
		m, ok := k.next(dir)
		if !ok {
			break
		}
		if !m.greeting {
			time.Sleep(k.latency + time.Duration(dir)*replyLater)
		}
		if m.bytes == nil {
			break
		}
		if _, err := k.ends[1-dir].Write(m.bytes); err != nil && dir == requests {
			break
		} else if err == nil && dir == replies {
			k.c.mu.Lock()
			k.unanswered = nil
			k.c.mu.Unlock()
		}
	}
	k.close()
}

// next waits for a message. It returns false when the connection is closed.
func (k *conn) next(dir int) (message, bool) {
	c := k.c
	c.mu.Lock()
	defer c.mu.Unlock()
	for ; !k.closed; c.change.Wait() {
		if q := k.queues[dir]; len(q) > 0 {
			stays := c.frozen && (dir == replies || q[0].unsent)
			if !stays && (!q[0].held || c.flows[k.server].flow[dir] == pass) {
				k.queues[dir] = q[1:]
				return q[0], true
			}
		}
	}
	return message{}, false
}

func (k *conn) close() {
	k.c.mu.Lock()
	k.closed = true
	if k.unanswered != nil {
		k.c.unanswered[string(k.unanswered)] = true
	}
	k.c.conns = slices.DeleteFunc(k.c.conns, func(o *conn) bool { return o == k })
	k.c.change.Broadcast()
	k.c.mu.Unlock()
	_ = k.ends[0].Close()
	_ = k.ends[1].Close()
}

func (c *Client) sent() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.requests
}

func (c *Client) set(f func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	f()
	c.change.Broadcast()
}

// fault applies f to a direction after n more messages, for a server or All.
func (c *Client) fault(server, dir int, f flow, n int) {
	c.set(func() {
		for i := range c.flows {
			if server == All || server == i {
				c.flows[i].flow[dir], c.flows[i].after[dir] = f, n
			}
		}
	})
}

func (c *Client) mend() {
	c.set(func() { clear(c.flows) })
	c.closeIf(func(k *conn) bool { return k.broken })
}

func (c *Client) isFrozen() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.frozen
}

// closeIf closes the client's end of connections. What was sent still arrives.
func (c *Client) closeIf(is func(*conn) bool) {
	c.mu.Lock()
	var all []*conn
	for _, k := range c.conns {
		if is(k) {
			all = append(all, k)
		}
	}
	c.mu.Unlock()
	for _, k := range all {
		_ = k.ends[0].Close()
		time.Sleep(c.latency)
	}
}

func (c *Client) kill() {
	c.set(func() {
		c.dead, c.frozen, c.freeze = true, false, 0
		for _, k := range c.conns {
			k.queues[requests] = slices.DeleteFunc(k.queues[requests], func(m message) bool { return m.unsent && m.bytes != nil })
		}
	})
	c.closeIf(func(*conn) bool { return true })
}
