package faults

import (
	"context"
	"fmt"
	"net"
	"sync"
	"syscall"

	"github.com/Shopify/toxiproxy/v2/stream"
)

// NewMemoryLink returns a link to a server in this process: dial connects to it, and clients connect with [Link.Dial]. It has no
// sockets, so it works in virtual time, in a bubble of testing/synctest, and no buffers: a write returns when the other side has
// read its bytes. [Link.Addr] returns addr.
func NewMemoryLink(addr string, dial func() (net.Conn, error)) (*Link, error) {
	l, err := newLink(addr, addr)
	if err != nil {
		return nil, err
	}
	l.memory = &memory{dial: dial, ends: map[*end]struct{}{}}
	l.start, l.stop, l.release = l.memory.start, l.memory.stop, func() error { return nil }
	return l, nil
}

type memory struct {
	dial func() (net.Conn, error)

	mu     sync.Mutex
	refuse bool
	opened int
	ends   map[*end]struct{}
}

type end struct {
	net.Conn
	m *memory
}

func (e *end) Close() error {
	e.m.mu.Lock()
	delete(e.m.ends, e)
	e.m.mu.Unlock()
	return e.Conn.Close()
}

func (m *memory) start() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.refuse = false
	return nil
}

func (m *memory) stop() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.refuse = true
	for e := range m.ends {
		_ = e.Conn.Close()
	}
}

// Dial connects a client.
func (l *Link) Dial(ctx context.Context) (net.Conn, error) {
	m := l.memory
	if m == nil {
		return new(net.Dialer).DialContext(ctx, "tcp", l.addr)
	}
	server, err := m.dial()
	if err != nil {
		return nil, fmt.Errorf("faults: dial link %s: %w", l.addr, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.refuse {
		_ = server.Close()
		return nil, fmt.Errorf("faults: dial link %s: %w", l.addr, syscall.ECONNREFUSED)
	}
	client, inside := net.Pipe()
	ours, theirs := &end{inside, m}, &end{server, m}
	m.ends[ours], m.ends[theirs] = struct{}{}, struct{}{}
	m.opened++
	name := fmt.Sprint(m.opened)
	l.proxy.Toxics.StartLink(l.server, name+"upstream", ours, theirs, stream.Upstream)
	l.proxy.Toxics.StartLink(l.server, name+"downstream", theirs, ours, stream.Downstream)
	return client, nil
}
