package load

import (
	"bytes"
	"context"
	"net"
	"sync"
	"time"
)

// Wires delay every message between clients and servers, in both directions, as a network does. On one host a message
// takes almost no time, which favours locks that send few messages over locks that wait for few.
//
// They wrap the clients' connections: a relay would read and write each message once more. They cost some goroutine
// switches and a timer for each message. Nothing is lost or reordered, connecting is not delayed, and bandwidth is
// unlimited. A receiver that stops reading blocks all others once the buffers are full.
type Wires struct {
	delay   time.Duration
	dialer  net.Dialer
	closed  context.Context
	close   context.CancelFunc
	running sync.WaitGroup
	queue   chan message // the delay is constant, so this is the order of delivery

	mu    sync.Mutex
	conns map[net.Conn]bool // both ends of each
}

// bytes is nil at the end of the stream.
type message struct {
	due     time.Time
	bytes   []byte
	deliver func([]byte)
}

// NewWires returns wires that delay messages in each direction.
func NewWires(delay time.Duration) (*Wires, error) {
	w := &Wires{delay: delay, queue: make(chan message, 1<<16), conns: map[net.Conn]bool{}}
	w.closed, w.close = context.WithCancel(context.Background())
	bell, err := newAlarm(w.closed)
	if err != nil {
		w.close()
		return nil, err
	}
	w.running.Go(func() {
		defer func() { _ = bell.close() }()
		for {
			select {
			case p := <-w.queue:
				if bell.wait(time.Until(p.due)) != nil {
					return
				}
				p.deliver(p.bytes)
			case <-w.closed.Done():
				return
			}
		}
	})
	return w, nil
}

// Dial connects as [net.Dialer.DialContext] does.
func (w *Wires) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	server, err := w.dialer.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.closed.Err() != nil {
		_ = server.Close()
		return nil, net.ErrClosed
	}
	near, far := net.Pipe()
	w.conns[server], w.conns[far] = true, true
	arrived := make(chan []byte, 1024)
	w.running.Go(func() {
		w.receive(far, func(b []byte) {
			if b == nil {
				w.hangUp(server, far)
			} else if _, err := server.Write(b); err != nil {
				_ = far.Close()
			}
		})
	})
	w.running.Go(func() {
		w.receive(server, func(b []byte) {
			select {
			case arrived <- b:
			case <-w.closed.Done():
			}
		})
	})
	w.running.Go(func() { // the client may be slow to read
		defer func() { _ = far.Close() }()
		for {
			select {
			case b := <-arrived:
				if b == nil {
					return
				}
				_, _ = far.Write(b) // fails once the client has closed
			case <-w.closed.Done():
				return
			}
		}
	})
	return wire{near, server}, nil
}

// receive queues what it reads for delivery.
func (w *Wires) receive(from net.Conn, deliver func([]byte)) {
	send := func(b []byte) {
		select {
		case w.queue <- message{time.Now().Add(w.delay), b, deliver}:
		case <-w.closed.Done():
		}
	}
	buf := make([]byte, 16<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			send(bytes.Clone(buf[:n]))
		}
		if err != nil {
			send(nil)
			return
		}
	}
}

func (w *Wires) hangUp(conns ...net.Conn) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, c := range conns {
		_ = c.Close()
		delete(w.conns, c)
	}
}

// Close breaks all connections. Queued messages are lost.
func (w *Wires) Close() {
	w.close()
	w.mu.Lock()
	for c := range w.conns {
		_ = c.Close()
	}
	w.mu.Unlock()
	w.running.Wait()
}

type wire struct {
	net.Conn
	server net.Conn
}

func (w wire) LocalAddr() net.Addr  { return w.server.LocalAddr() }
func (w wire) RemoteAddr() net.Addr { return w.server.RemoteAddr() }
