// Package http1 has the transport of this module's HTTP clients.
package http1

import (
	"net"
	"net/http"
	"time"
)

// Transport returns a copy of [http.DefaultTransport] for one host, with connections of its own and without HTTP/2, over which a request
// that the server has reset may be sent twice. If the default is of another type, as one that traces requests is, the copy is of what
// Go has there, with the environment's proxy.
func Transport() *http.Transport {
	t, ok := http.DefaultTransport.(*http.Transport)
	if !ok {
		t = &http.Transport{
			Proxy: http.ProxyFromEnvironment, DialContext: (&net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}).DialContext,
			MaxIdleConns: 100, IdleConnTimeout: 90 * time.Second, TLSHandshakeTimeout: 10 * time.Second, ExpectContinueTimeout: time.Second,
		}
	}
	t = t.Clone()
	t.MaxIdleConnsPerHost = t.MaxIdleConns
	t.Protocols = new(http.Protocols)
	t.Protocols.SetHTTP1(true)
	if t.TLSClientConfig != nil { // that of a transport that speaks HTTP/2 still offers it
		t.TLSClientConfig.NextProtos = nil
	}
	return t
}
