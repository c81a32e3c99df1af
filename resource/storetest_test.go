package resource_test

import (
	"net/http/httptest"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/storetest"
)

func TestMemory(t *testing.T) {
	storetest.Run(t, storetest.Harness{New: func() (resource.Store, error) { return resource.NewMemory(), nil }})
}

func TestHTTP(t *testing.T) {
	var url string
	open := func() (resource.Store, error) { return newClient(t, url, nil), nil }
	storetest.Run(t, storetest.Harness{
		New: func() (resource.Store, error) {
			url = serve(t, resource.NewMemory(), nil)
			return open()
		},
		Another: open,
	})
}

func serve(t *testing.T, store resource.Store, opts *resource.HandlerOptions) string {
	t.Helper()
	h, err := resource.NewHandler(store, opts)
	require.NoError(t, err)
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return srv.URL
}

func newClient(t *testing.T, url string, opts *resource.ClientOptions) *resource.Client {
	t.Helper()
	c, err := resource.NewClient(url, opts)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}
