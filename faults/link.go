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

// closeTimeout bounds [Link.Close], which waits for the proxy's goroutines: one may be connecting to a server that doesn't
// answer.
const closeTimeout = 10 * time.Second

// Link relays TCP connections from clients to one server, by an embedded toxiproxy, and injects faults on the way.
//
// A fault affects all connections of the link, present and future; give each client a link of its own to hurt one alone. At most
// one fault is in force in a direction at a time; a second one is an error.
//
// Except under [Link.Refuse] a client can always connect, and the server sees it connect, whether or not bytes get through.
// When either side ends its stream, the connection is closed for both. Under a fault the end of a stream is held, late or
// lost, like the bytes before it.
type Link struct {
	addr     string
	proxy    *toxiproxy.Proxy
	requests *direction   // from the clients to the server
	replies  *direction   // from the server to the clients
	release  func() error // gives the port back
	close    func() error

	mu     sync.Mutex
	closed bool // nobody may listen any more
}

// register makes directions known to toxiproxy, whose list of toxics is global.
var register = sync.OnceFunc(func() { toxics.Register("direction", new(direction)) })

// NewLink returns a link to the server at upstream ("host:port"), which need not be up yet: a client's connection is
// closed if the server can't be reached when it is made. The link listens on a free port of the loopback interface.
func NewLink(upstream string) (*Link, error) {
	register()
	port, release, err := proc.ReservePort()
	if err != nil {
		return nil, fmt.Errorf("faults: link to %s: %w", upstream, err)
	}
	addr := fmt.Sprintf("127.0.0.1:%d", port)
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	l := &Link{addr: addr, proxy: toxiproxy.NewProxy(server, "link", addr, upstream), release: release}
	if l.requests, err = l.addDirection("upstream"); err == nil {
		l.replies, err = l.addDirection("downstream")
	}
	if err == nil {
		err = l.proxy.Start()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("faults: link to %s: %w", upstream, err), release())
	}
	l.close = sync.OnceValue(l.shut)
	return l, nil
}

// addDirection adds a direction to a toxiproxy stream that has no connections yet.
func (l *Link) addDirection(stream string) (*direction, error) {
	toxic, err := l.proxy.Toxics.AddToxicJson(strings.NewReader(fmt.Sprintf(`{"type": "direction", "stream": %q}`, stream)))
	if err != nil {
		return nil, err
	}
	d, ok := toxic.Toxic.(*direction)
	if !ok {
		return nil, fmt.Errorf("toxiproxy made a %T of a direction", toxic.Toxic)
	}
	d.addr = l.addr
	d.changed = make(chan struct{})
	d.pipes = make(map[*pipe]struct{})
	return d, nil
}

// both is an effect on both directions.
func (l *Link) both(f flow, by time.Duration) []effect {
	return []effect{{l.requests, f, by}, {l.replies, f, by}}
}

// Addr returns the address that clients connect to in the server's place.
func (l *Link) Addr() string { return l.addr }

// Close stops listening, closes every connection and loses what is held. It returns within seconds, in any state of the link,
// its clients and its server. The heal of a fault in force then fails with net.ErrClosed.
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
		l.proxy.Stop()
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
