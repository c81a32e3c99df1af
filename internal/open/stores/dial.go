package stores

import (
	"context"
	"net"
	"net/http"
	"sync"
)

// dialer makes connections, and calls sent once when bytes have been sent on one.
type dialer struct {
	net.Dialer
	mu   sync.Mutex
	sent func()
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

// httpClient returns a client on d's connections, without HTTP/2: see [resource.NewClient].
func httpClient(d *dialer, fresh bool) (*http.Client, *http.Transport) {
	t := http.DefaultTransport.(*http.Transport).Clone()
	t.DialContext, t.DisableKeepAlives = d.DialContext, fresh
	t.MaxIdleConnsPerHost = t.MaxIdleConns // there is one host
	t.Protocols = new(http.Protocols)
	t.Protocols.SetHTTP1(true)
	if t.TLSClientConfig != nil { // the default transport's still offers HTTP/2
		t.TLSClientConfig.NextProtos = nil
	}
	return &http.Client{Transport: t}, t
}
