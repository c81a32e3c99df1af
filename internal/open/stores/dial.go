package stores

import (
	"context"
	"net"
	"net/http"
	"sync"
)

// dialer makes a store's connections, and tells when something has been sent on one.
type dialer struct {
	net.Dialer
	mu   sync.Mutex
	sent func() // called once
}

func (d *dialer) DialContext(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := d.Dialer.DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	return &conn{c, d}, nil
}

func (d *dialer) onSent(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sent = f
}

func (d *dialer) wrote() {
	d.mu.Lock()
	f := d.sent
	d.sent = nil
	d.mu.Unlock()
	if f != nil {
		f()
	}
}

type conn struct {
	net.Conn
	d *dialer
}

func (c *conn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	if n > 0 && err == nil {
		c.d.wrote()
	}
	return n, err
}

// httpClient is a client on d's connections. It doesn't speak HTTP/2, which sends some requests twice, as [resource.NewClient]
// says of its own.
func httpClient(d *dialer, fresh bool) (*http.Client, *http.Transport) {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.DialContext, t.DisableKeepAlives = d.DialContext, fresh
	t.MaxIdleConnsPerHost = t.MaxIdleConns // there is one host
	t.Protocols = new(http.Protocols)
	t.Protocols.SetHTTP1(true)
	if t.TLSClientConfig != nil { // that of a transport that speaks HTTP/2 still offers it to servers
		t.TLSClientConfig.NextProtos = nil
	}
	return &http.Client{Transport: t}, t
}
