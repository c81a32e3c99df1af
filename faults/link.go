package faults

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	toxiproxy "github.com/Shopify/toxiproxy/v2"
	"github.com/Shopify/toxiproxy/v2/toxics"
	"github.com/rs/zerolog"

	"github.com/fencelab/fencelab/internal/proc"
)

// closeTimeout bounds [Link.Close]: the proxy may be dialing.
const closeTimeout = 10 * time.Second

// Link relays TCP connections to one server through an embedded toxiproxy, and injects faults. A fault affects all present and
// future connections; to affect one client alone, give it a link of its own. A second fault in one direction is an error.
//
// A fault that discards, holds or delays bytes is in force once no byte leaves the link that it should discard or hold, or, under a
// delay of d, less than d after the link read it. Injecting it fails if the receiver's socket accepts nothing for 10 s.
//
// Except under [Link.Refuse] clients can always connect, and the server sees the connection. When either side ends its stream,
// the connection is closed for both; a fault holds, delays or loses that end like the bytes before it.
type Link struct {
	addr     string
	server   *toxiproxy.ApiServer
	proxy    *toxiproxy.Proxy
	requests *direction
	replies  *direction
	start    func() error
	stop     func()
	release  func() error
	close    func() error
	memory   *memory // nil: the link listens

	mu     sync.Mutex
	closed bool
}

var register = sync.OnceFunc(func() { toxics.Register("direction", new(direction)) })

// NewLink returns a link to the server at upstream ("host:port"), listening on a free loopback port. If the server can't be
// reached when a client connects, the client's connection is closed.
func NewLink(upstream string) (*Link, error) {
	port, release, err := proc.ReservePort()
	if err != nil {
		return nil, fmt.Errorf("faults: link to %s: %w", upstream, err)
	}
	l, err := newLink(fmt.Sprintf("127.0.0.1:%d", port), upstream)
	if err == nil {
		l.start, l.stop, l.release = l.proxy.Start, l.proxy.Stop, release
		err = l.start()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("faults: link to %s: %w", upstream, err), release())
	}
	return l, nil
}

func newLink(addr, upstream string) (l *Link, err error) {
	register()
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	l = &Link{addr: addr, server: server, proxy: toxiproxy.NewProxy(server, "link", addr, upstream)}
	if l.requests, err = l.addDirection("upstream"); err == nil {
		l.replies, err = l.addDirection("downstream")
	}
	l.close = sync.OnceValue(l.shut)
	return l, err
}

func (l *Link) addDirection(stream string) (*direction, error) {
	toxic, err := l.proxy.Toxics.AddToxicJson(strings.NewReader(fmt.Sprintf(`{"type": "direction", "stream": %q}`, stream)))
	if err != nil {
		return nil, err
	}
	d, ok := toxic.Toxic.(*direction)
	if !ok {
		return nil, fmt.Errorf("toxiproxy created a %T instead of a direction", toxic.Toxic)
	}
	d.addr = l.addr
	d.changed = make(chan struct{})
	d.pipes = make(map[*pipe]struct{})
	return d, nil
}

func (l *Link) both(f flow, by time.Duration) []effect {
	return []effect{{l.requests, f, by}, {l.replies, f, by}}
}

// Addr returns the address for clients.
func (l *Link) Addr() string { return l.addr }

// Connections returns the number of open connections.
func (l *Link) Connections() int {
	l.requests.mu.Lock()
	defer l.requests.mu.Unlock()
	return len(l.requests.pipes)
}

// Messages returns how many messages clients have sent, as [Link.LoseRequestsFrom] counts them.
func (l *Link) Messages() int {
	l.requests.mu.Lock()
	defer l.requests.mu.Unlock()
	return l.requests.pieces
}

// Close stops listening, closes every connection and discards held bytes, within seconds. Later heals fail with net.ErrClosed.
func (l *Link) Close() error { return l.close() }

func (l *Link) shut() error {
	l.mu.Lock()
	l.closed = true
	l.mu.Unlock()
	l.requests.shut()
	l.replies.shut()
	ctx, cancel := context.WithTimeoutCause(context.Background(), closeTimeout,
		errors.New("still connecting to the server"))
	defer cancel()
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		l.stop()
	}()
	select {
	case <-stopped:
	case <-ctx.Done():
		return errors.Join(fmt.Errorf("faults: close link %s: %w", l.Addr(), context.Cause(ctx)), l.release())
	}
	if err := errors.Join(l.requests.drained(ctx), l.replies.drained(ctx), l.release()); err != nil {
		return fmt.Errorf("faults: close link %s: %w", l.Addr(), err)
	}
	return nil
}
