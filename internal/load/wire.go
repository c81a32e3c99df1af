package load

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strings"
	"sync"
	"time"
)

// Wires stand between clients and servers and make every byte take longer on its way, in both directions, as a network
// between hosts does. On one host a message takes next to no time: what it costs there is the work of two processes that
// share the cores, and so a lock that sends fewer is ahead of one that waits for fewer.
//
// Nothing is lost and nothing overtakes. Connecting takes no longer, and no bytes are too many to be under way at a time.
type Wires struct {
	delay  time.Duration
	addrs  []string
	closed context.Context
	close  context.CancelFunc
	busy   sync.WaitGroup // those that put parcels, or wait for their delivery
	last   sync.WaitGroup // the one that delivers them

	mu    sync.Mutex
	some  *sync.Cond
	queue []parcel // all take equally long, so the one that was sent first is due first
	over  bool     // nobody puts any more
	ends  map[net.Conn]struct{}
}

// parcel is what was read from a connection at once, or the end of what it sends.
type parcel struct {
	due   time.Time
	to    *net.TCPConn
	bytes []byte
	end   *sync.WaitGroup // done with the parcel, if it is an end
}

// NewWires puts a wire in front of each server. Addresses are host:port, or URLs with such a host and without TLS, whose
// certificates would be another host's.
func NewWires(ctx context.Context, addrs []string, delay time.Duration) (*Wires, error) {
	w := &Wires{delay: delay, ends: map[net.Conn]struct{}{}}
	w.some = sync.NewCond(&w.mu)
	w.closed, w.close = context.WithCancel(context.WithoutCancel(ctx))
	bell, err := newAlarm(w.closed) //nolint:contextcheck // it lasts until Close, as all that follows
	if err != nil {
		w.close()
		return nil, err
	}
	w.last.Go(func() { w.carry(bell) })
	for _, addr := range addrs {
		there, err := w.lead(ctx, addr)
		if err != nil {
			w.Close()
			return nil, fmt.Errorf("load: a wire to a server: %w", err)
		}
		w.addrs = append(w.addrs, there)
	}
	return w, nil
}

// Addrs are the addresses that clients connect to in the place of those that the wires lead to.
func (w *Wires) Addrs() []string { return w.addrs }

// Close closes all connections. What is under way is lost.
func (w *Wires) Close() {
	w.close()
	w.mu.Lock()
	for c := range w.ends {
		_ = c.Close()
	}
	w.mu.Unlock()
	w.busy.Wait()
	w.mu.Lock()
	w.over = true
	w.mu.Unlock()
	w.some.Signal()
	w.last.Wait()
}

// lead makes a wire to the server at addr, and returns where it begins.
func (w *Wires) lead(ctx context.Context, addr string) (string, error) {
	u := &url.URL{Host: addr}
	if strings.Contains(addr, "://") {
		var err error
		if u, err = url.Parse(addr); err != nil {
			return "", errors.New("its address is no URL") // it may hold a password
		}
	}
	server := u.Host
	if _, _, err := net.SplitHostPort(server); err != nil {
		return "", fmt.Errorf("its address has to be host:port, or a URL with that: %w", err)
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	context.AfterFunc(w.closed, func() { _ = l.Close() }) //nolint:contextcheck // see NewWires
	w.busy.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			w.busy.Go(func() { w.connect(c, server) })
		}
	})
	u.Host = l.Addr().String()
	return strings.TrimPrefix(u.String(), "//"), nil
}

// connect serves a client until both sides' ends have arrived.
func (w *Wires) connect(client net.Conn, server string) {
	defer w.forget(client)
	if !w.know(client) {
		return
	}
	var d net.Dialer
	c, err := d.DialContext(w.closed, "tcp", server)
	if err != nil {
		return
	}
	defer w.forget(c)
	if !w.know(c) {
		return
	}
	var ends sync.WaitGroup
	ends.Add(2)
	w.busy.Go(func() { w.read(client, c, &ends) })
	w.busy.Go(func() { w.read(c, client, &ends) })
	ends.Wait()
}

// know makes c one that Close closes. It reports false if that is over.
func (w *Wires) know(c net.Conn) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ends[c] = struct{}{}
	return w.closed.Err() == nil
}

func (w *Wires) forget(c net.Conn) {
	_ = c.Close()
	w.mu.Lock()
	defer w.mu.Unlock()
	delete(w.ends, c)
}

// read takes what from sends, to its end. A broken connection ends like any other.
func (w *Wires) read(from, to net.Conn, end *sync.WaitGroup) {
	there, _ := to.(*net.TCPConn)
	buf := make([]byte, 16<<10)
	for {
		n, err := from.Read(buf)
		due := time.Now().Add(w.delay)
		if n > 0 {
			w.put(parcel{due: due, to: there, bytes: append([]byte(nil), buf[:n]...)})
		}
		if err != nil {
			w.put(parcel{due: due, to: there, end: end})
			return
		}
	}
}

func (w *Wires) put(p parcel) {
	w.mu.Lock()
	defer w.mu.Unlock()
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

// carry hands everything over when it is due. One goroutine does that for all, so a receiver that takes nothing for so
// long that the kernel's buffers are full makes the others wait.
func (w *Wires) carry(bell alarm) {
	defer func() { _ = bell.close() }()
	for all := w.take(); len(all) > 0; all = w.take() {
		for _, p := range all {
			_ = bell.wait(w.closed, time.Until(p.due)) // closed, nothing waits
			switch {
			case p.end != nil:
				_ = p.to.CloseWrite()
				p.end.Done()
			default:
				if _, err := p.to.Write(p.bytes); err != nil {
					_ = p.to.Close() // its reader ends
				}
			}
		}
	}
}
