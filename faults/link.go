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
)

// closeTimeout bounds [Link.Close]. Closing waits for nothing but the proxy's own goroutines, of which one may be
// connecting to a server that doesn't answer.
const closeTimeout = 10 * time.Second

// Link is a TCP connection's way from clients to one server, on which faults are placed. It relays every connection
// made to [Link.Addr] to the server, by an embedded toxiproxy.
//
// A fault rules all connections of the link, those there are and those to come: give each client a link of its own to
// hurt one and not the others. At most one fault is in force in a direction at a time; a second one is an error.
//
// A link is no more than TCP: but for [Link.Refuse] a fault never stops a client from connecting, and the server sees it
// connect, before any byte gets through or none. Either side's end of its stream closes the connection for both, also
// where that side would still read. Under a fault the end of a stream is held, late or lost, like the bytes before it.
type Link struct {
	addr     string
	proxy    *toxiproxy.Proxy
	requests *valve       // from the clients to the server
	replies  *valve       // from the server to the clients
	release  func() error // gives the port back
	close    func() error

	mu     sync.Mutex
	closed bool // nobody may listen any more
}

// register makes the valve known to toxiproxy, whose list of toxics is global.
var register = sync.OnceFunc(func() { toxics.Register("valve", new(valve)) })

// NewLink returns a link to the server at upstream ("host:port"), which need not be up yet: a client's connection is
// closed if the server can't be reached when it is made. The link listens on a free port of the loopback interface.
func NewLink(upstream string) (*Link, error) {
	register()
	addr, release, err := reserve()
	if err != nil {
		return nil, fmt.Errorf("faults: link to %s: %w", upstream, err)
	}
	server := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(nil), zerolog.Nop())
	l := &Link{proxy: toxiproxy.NewProxy(server, "link", addr, upstream), release: release}
	if l.requests, err = l.addValve("upstream"); err == nil {
		l.replies, err = l.addValve("downstream")
	}
	if err == nil {
		err = l.proxy.Start()
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("faults: link to %s: %w", upstream, err), release())
	}
	l.addr = l.proxy.Listen
	l.close = sync.OnceValue(l.shut)
	return l, nil
}

// addValve puts a valve on a toxiproxy stream that has no connections yet.
func (l *Link) addValve(stream string) (*valve, error) {
	toxic, err := l.proxy.Toxics.AddToxicJson(strings.NewReader(fmt.Sprintf(`{"type": "valve", "stream": %q}`, stream)))
	if err != nil {
		return nil, err
	}
	v, ok := toxic.Toxic.(*valve)
	if !ok {
		return nil, fmt.Errorf("toxiproxy made a %T of a valve", toxic.Toxic)
	}
	v.changed = make(chan struct{})
	v.pipes = make(map[*pipe]struct{})
	return v, nil
}

// Addr returns the address that clients connect to in the server's place.
func (l *Link) Addr() string { return l.addr }

// Close stops listening, closes every connection and loses what is held. It leaves nothing running, and returns within
// seconds whatever state the link, its clients and its server are in. The heal of a fault that is in force now fails
// with net.ErrClosed.
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
