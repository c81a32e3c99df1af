package server_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/server"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
)

func TestMain(m *testing.M) { testmain.Run(m) }

func serve(t *testing.T, store resource.Store, opts server.Options) (url string, stop func() error) {
	t.Helper()
	ln, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	ctx, cancel := context.WithCancelCause(t.Context())
	done := make(chan error, 1)
	go func() { done <- server.Serve(ctx, ln, store, opts) }()
	return "http://" + ln.Addr().String(), func() error {
		cancel(errors.New("enough"))
		return <-done
	}
}

func TestServe(t *testing.T) {
	store := resource.NewMemory()
	var log bytes.Buffer
	url, stop := serve(t, store, server.Options{
		Handler: resource.HandlerOptions{Token: "secret"},
		Logger:  slog.New(slog.NewTextHandler(&log, nil)),
	})
	for path, want := range map[string]int{"/healthz": 200, "/metrics": 200, "/r/k": 401, "/r/a/../metrics": 401, "/": 404, "/metrics/": 404} {
		status, body := testmain.Get(t, url+path)
		require.Equal(t, want, status, "%s: %s", path, body)
	}
	require.NoError(t, stop())
	require.Contains(t, log.String(), `msg="shutting down" cause=enough`)
	_, err := store.Read(t.Context(), "k")
	require.ErrorIs(t, err, resource.ErrClosed)
}

func TestHealth(t *testing.T) {
	store := resource.NewMemory()
	var log bytes.Buffer
	url, stop := serve(t, store, server.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))})
	status, body := testmain.Get(t, url+"/healthz")
	require.Equal(t, 200, status)
	require.Equal(t, "ok\n", body)
	require.NoError(t, store.Close())
	status, body = testmain.Get(t, url+"/healthz")
	require.Equal(t, 503, status)
	require.Equal(t, "unhealthy: the log says why\n", body, "and not where the file is")
	require.NoError(t, stop())
	require.Contains(t, log.String(), `error="resource: store is closed"`)
}

// After an error, listener and store are closed.
func TestServeRefuses(t *testing.T) {
	ln, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	store := resource.NewMemory()
	err = server.Serve(t.Context(), ln, store, server.Options{Handler: resource.HandlerOptions{MaxBody: -1}})
	require.ErrorContains(t, err, "MaxBody")
	require.ErrorIs(t, ln.Close(), net.ErrClosed)
	_, err = store.Read(t.Context(), "k")
	require.ErrorIs(t, err, resource.ErrClosed)

	require.ErrorIs(t, server.Serve(t.Context(), ln, resource.NewMemory(), server.Options{}), net.ErrClosed)
}
