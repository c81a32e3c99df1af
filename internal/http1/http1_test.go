package http1_test

import (
	"net/http"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/http1"
)

type traced struct{ http.RoundTripper }

// Under a wrapped default, a transport is as it is under Go's own.
func TestWrappedDefault(t *testing.T) {
	usual := http.DefaultTransport
	t.Cleanup(func() { http.DefaultTransport = usual })
	settings := func() []any {
		c := http1.Transport()
		return []any{
			c.Proxy != nil, c.DialContext != nil, c.Protocols.String(), c.MaxIdleConns, c.MaxIdleConnsPerHost,
			c.IdleConnTimeout, c.TLSHandshakeTimeout, c.ExpectContinueTimeout,
		}
	}
	want := settings()
	http.DefaultTransport = traced{usual}
	require.Equal(t, want, settings())
}
