package load

import (
	"bytes"
	"context"
	"net"
	"sync"
	"time"
)

// Wires delay every message between clients and servers, in both directions. On one host a message takes almost no time, which
// favours locks that send few messages over locks that wait for few.
//
// They wrap the clients' connections, since a relay would read and write each message once more. The cost is a timer and some
// goroutine switches per message. Nothing is lost or reordered, connecting is not delayed, bandwidth is unlimited. A receiver
// that stops reading blocks all others once the buffers are full.
type Wires struct {
	delay   time.Duration
	closed  context.Context
	close   context.CancelFunc
	running sync.WaitGroup
	queue   chan message // in order of delivery, since the delay is constant
	dialing sync.Mutex
	ends    []net.Conn // of all connections, even closed ones
}

// bytes is nil at the end of the stream.
type message struct {
	due   time.Time
	bytes []byte
	to    chan<- []byte
}

// NewWires returns wires that delay messages in each direction.
func NewWires(delay time.Duration) (*Wires, error) {
	w := &Wires{delay: delay, queue: make(chan message, 1<<16)}
	w.closed, w.close = context.WithCancel(context.Background())
	bell, err := newAlarm(w.closed)
	if err != nil {
		w.close()
		return nil, err
	}
	w.running.Go(func() {
		defer func() { _ = bell.close() }()
		for {
			m, ok := receive(w, w.queue)
			if !ok || bell.wait(time.Until(m.due)) != nil || !send(w, m.to, m.bytes) {
				return
			}
		}
	})
	return w, nil
}

func receive[T any](w *Wires, from <-chan T) (x T, ok bool) {
	select {
	case x = <-from:
		return x, true
	case <-w.closed.Done():
		return x, false
	}
}

func send[T any](w *Wires, to chan<- T, x T) (ok bool) {
	select {
	case to <- x:
		return true
	case <-w.closed.Done():
		return false
	}
}

// Dial connects as [net.Dialer.DialContext] does.
func (w *Wires) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	server, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	w.dialing.Lock()
	defer w.dialing.Unlock()
	if w.closed.Err() != nil {
		_ = server.Close()
		return nil, net.ErrClosed
	}
	near, far := net.Pipe()
	w.ends = append(w.ends, server, far)
	w.carry(far, server)
	w.carry(server, far)
	return wire{near, server}, nil
}

// carry copies bytes with the delay, and then closes to.
func (w *Wires) carry(from, to net.Conn) {
	arrived := make(chan []byte, 1024)
	w.running.Go(func() {
		buf := make([]byte, 16<<10)
		for {
			n, err := from.Read(buf)
			if n > 0 {
				send(w, w.queue, message{time.Now().Add(w.delay), bytes.Clone(buf[:n]), arrived})
			}
			if err != nil {
				send(w, w.queue, message{time.Now().Add(w.delay), nil, arrived})
				return
			}
		}
	})
	w.running.Go(func() {
		defer func() { _ = to.Close() }()
		for {
			b, ok := receive(w, arrived)
			if !ok || b == nil {
				return
			}
			_, _ = to.Write(b) // a connection that fails writes fails reads, too
		}
	})
}

// Close breaks all connections. Queued messages are lost.
func (w *Wires) Close() {
	w.dialing.Lock()
	w.close()
	for _, c := range w.ends {
		_ = c.Close()
	}
	w.dialing.Unlock()
	w.running.Wait()
}

type wire struct {
	net.Conn
	server net.Conn
}

func (w wire) LocalAddr() net.Addr  { return w.server.LocalAddr() }
func (w wire) RemoteAddr() net.Addr { return w.server.RemoteAddr() }
