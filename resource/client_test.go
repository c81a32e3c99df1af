package resource_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
)

var five = resource.Fence{Token: 5, Seq: 1}

// count counts requests and connections to h.
func count(t *testing.T, h http.Handler) (url string, requests, conns *atomic.Int64) {
	t.Helper()
	requests, conns = new(atomic.Int64), new(atomic.Int64)
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		h.ServeHTTP(w, r)
	}))
	srv.Config.ConnState = func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			conns.Add(1)
		}
	}
	srv.Start()
	t.Cleanup(srv.Close)
	return srv.URL, requests, conns
}

func TestClientUnfencedWrite(t *testing.T) {
	ctx := t.Context()
	c := newClient(t, serve(t, resource.NewMemory(), nil), nil)
	require.ErrorContains(t, c.WriteUnfenced(ctx, "k", nil), "400 Bad Request: X-Fence-Token is missing")

	url := serve(t, resource.NewMemory(), &resource.HandlerOptions{Unfenced: true})
	c = newClient(t, url, nil)
	require.NoError(t, c.WriteUnfenced(ctx, "k", []byte("plain")))
	require.ErrorIs(t, c.Write(ctx, "k", five, nil), resource.ErrUnfenced, "who sends a token counts on it")
	_, err := c.ReadFenced(ctx, "k", 5)
	require.ErrorIs(t, err, resource.ErrUnfenced)

	c = newClient(t, url, &resource.ClientOptions{AllowUnfenced: true})
	require.NoError(t, c.Write(ctx, "k", five, []byte("new")))
	require.NoError(t, c.Write(ctx, "k", resource.Fence{Token: 4, Seq: 1}, []byte("late")))
	rec, err := c.ReadFenced(ctx, "k", 6)
	require.NoError(t, err)
	require.Equal(t, resource.Record{Value: []byte("late"), MaxFence: five}, rec)
}

// TestClientNoticesLostToken has something on the way drop the token of a read, which makes it an unfenced one.
func TestClientNoticesLostToken(t *testing.T) {
	h, ctx := newHandler(t, resource.NewMemory(), nil), t.Context()
	url, _, _ := count(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			r.Header.Del(resource.HeaderToken)
		}
		h.ServeHTTP(w, r)
	}))
	c := newClient(t, url, nil)
	require.NoError(t, c.Write(ctx, "k", five, []byte("v")))
	for _, key := range []string{"k", "new"} {
		_, err := c.ReadFenced(ctx, key, 6)
		require.ErrorIs(t, err, resource.ErrUnfenced)
		require.NotErrorIs(t, err, resource.ErrNotFound)
		require.ErrorContains(t, err, "does something on the way drop X-Fence-Token?")
		_, err = newClient(t, url, &resource.ClientOptions{AllowUnfenced: true}).ReadFenced(ctx, key, 6)
		require.NotErrorIs(t, err, resource.ErrUnfenced)
	}
	_, err := c.Read(ctx, "new")
	require.ErrorIs(t, err, resource.ErrNotFound)
	rec, err := c.Read(ctx, "k")
	require.NoError(t, err)
	require.Equal(t, five, rec.MaxFence)
}

// TestClientNoticesRewrittenPath has something on the way unescape and clean paths, as proxies do, which makes another key's
// path of a key's.
func TestClientNoticesRewrittenPath(t *testing.T) {
	store := resource.NewMemory()
	h, ctx := newHandler(t, store, nil), t.Context()
	url, _, _ := count(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.URL.Path = path.Clean(r.URL.Path)
		h.ServeHTTP(w, r)
	}))
	c := newClient(t, url, nil)
	for _, key := range []string{"a/../b", "b/", "./b", "//b"} {
		const want = `and the key in the path is "b"`
		require.ErrorContains(t, c.Write(ctx, key, five, []byte("v")), want)
		_, err := c.Read(ctx, key)
		require.ErrorContains(t, err, want)
		_, err = c.ReadFenced(ctx, key, 5)
		require.ErrorContains(t, err, want)
	}
	_, err := store.Read(ctx, "b")
	require.ErrorIs(t, err, resource.ErrNotFound)
	require.NoError(t, c.Write(ctx, "a/b", five, []byte("v")))
}

// TestClientNoticesOtherType has something on the way drop Accept, and so gets the value inside of JSON.
func TestClientNoticesOtherType(t *testing.T) {
	h, ctx := newHandler(t, resource.NewMemory(), nil), t.Context()
	url, _, _ := count(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		r.Header.Del("Accept")
		h.ServeHTTP(w, r)
	}))
	c := newClient(t, url, nil)
	require.NoError(t, c.Write(ctx, "k", five, []byte("v")))
	const want = `the answer is of type "application/json", want "application/octet-stream"`
	_, err := c.Read(ctx, "k")
	require.ErrorContains(t, err, want)
	_, err = c.ReadFenced(ctx, "k", 5)
	require.ErrorContains(t, err, want)
}

// TestClientNoticesLostWritten has something on the way drop, or change, the header that tells an empty value from none.
func TestClientNoticesLostWritten(t *testing.T) {
	store, ctx := resource.NewMemory(), t.Context()
	require.NoError(t, store.Write(ctx, "k", five, []byte("v")))
	h := newHandler(t, store, nil)
	for _, written := range []string{"", "false", "yes"} {
		url, _, _ := count(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			answer := httptest.NewRecorder()
			h.ServeHTTP(answer, r)
			maps.Copy(w.Header(), answer.Header())
			w.Header().Del(resource.HeaderWritten)
			if written != "" {
				w.Header().Set(resource.HeaderWritten, written)
			}
			_, _ = w.Write(answer.Body.Bytes())
		}))
		const want = "the answer has 1 bytes and X-Fence-Written "
		_, err := newClient(t, url, nil).Read(ctx, "k")
		require.ErrorContains(t, err, want)
		_, err = newClient(t, url, nil).ReadFenced(ctx, "k", 5)
		require.ErrorContains(t, err, want)
	}
}

// TestClientHidesPassword has every error that tells a base URL.
func TestClientHidesPassword(t *testing.T) {
	for _, base := range []string{
		"http://user:secret@h:port", "http://user:sec#ret@h", "http://user:sec?ret@h", "http://user:1#secret@h", "http://user:1?secret@h",
		"http://user:sec@ret@h/?q", "ftp://user:secret@h", "user:secret@h:80", "http://user:secret@", "http://h/?password=secret", "http://user:%secret@h",
		"http://user:sec/ret@h",
	} {
		_, err := resource.NewClient(base, nil)
		require.ErrorContains(t, err, "is not of the form http://host:port", base)
		for _, part := range []string{"sec", "ret"} {
			require.NotContains(t, err.Error(), part, base)
		}
	}
	for _, h := range []http.Handler{
		http.NotFoundHandler(),
		http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}), // no resource
		newHandler(t, resource.NewMemory(), &resource.HandlerOptions{Unfenced: true}),
	} {
		url, _, _ := count(t, h)
		c := newClient(t, strings.Replace(url, "http://", "http://user:secret@", 1), nil)
		err := c.Write(t.Context(), "k", five, nil)
		require.Error(t, err)
		require.NotContains(t, err.Error(), "secret")
	}
	err := newClient(t, "http://user:secret@127.0.0.1:1", nil).Write(t.Context(), "k", five, nil)
	require.Error(t, err)
	require.NotContains(t, err.Error(), "secret")
}

// TestClientSpeaksHTTP1 has a server with which the default transport would speak HTTP/2, and send some writes twice.
func TestClientSpeaksHTTP1(t *testing.T) {
	h := newHandler(t, resource.NewMemory(), nil)
	var proto string
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		proto = r.Proto
		h.ServeHTTP(w, r)
	}))
	srv.EnableHTTP2 = true
	srv.StartTLS()
	t.Cleanup(srv.Close)
	usual := http.DefaultTransport
	t.Cleanup(func() { http.DefaultTransport = usual })
	trusting := usual.(*http.Transport).Clone()
	trusting.TLSClientConfig = srv.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	http.DefaultTransport = trusting
	require.NoError(t, newClient(t, srv.URL, nil).Write(t.Context(), "k", five, []byte("v")))
	require.Equal(t, "HTTP/1.1", proto)

	c := newClient(t, srv.URL, &resource.ClientOptions{HTTPClient: &http.Client{Transport: trusting}})
	_, err := c.Read(t.Context(), "k")
	require.NoError(t, err)
	require.Equal(t, "HTTP/2.0", proto, "the transport that a user brings is as it was")
	trusting.CloseIdleConnections()
}

// TestClientReusesConnection has every kind of answer: each must be read to its end, and closed, or its connection is of no
// more use.
func TestClientReusesConnection(t *testing.T) {
	url, requests, conns := count(t, newHandler(t, resource.NewMemory(), nil))
	ask := func(c *resource.Client) {
		ctx := t.Context()
		for range 3 {
			_, _ = c.Read(ctx, "unknown")
			_ = c.Write(ctx, "k", five, make([]byte, 1<<20))
			_, _ = c.ReadFenced(ctx, "k", 1)
			_ = c.WriteUnfenced(ctx, "k", nil)
			rec, err := c.Read(ctx, "k")
			require.NoError(t, err)
			require.Len(t, rec.Value, 1<<20)
		}
	}
	ask(newClient(t, url, nil))
	require.EqualValues(t, 15, requests.Load())
	require.Less(t, conns.Load(), requests.Load()) // one is usual, but net/http drops one whose writer is 50 ms late

	watched := &watchedTransport{Transport: http.DefaultTransport.(*http.Transport).Clone()}
	ask(newClient(t, url, &resource.ClientOptions{HTTPClient: &http.Client{Transport: watched}}))
	require.Len(t, watched.bodies, 15)
	for i, b := range watched.bodies {
		require.True(t, b.ended, "body %d was read to its end", i)
		require.True(t, b.closed, "body %d was closed", i)
	}
}

// watchedTransport keeps the bodies of its answers.
type watchedTransport struct {
	*http.Transport
	bodies []*watchedBody
}

type watchedBody struct {
	io.ReadCloser
	ended, closed bool
}

func (w *watchedTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := w.Transport.RoundTrip(r)
	if err == nil {
		b := &watchedBody{ReadCloser: resp.Body}
		w.bodies = append(w.bodies, b)
		resp.Body = b
	}
	return resp, err
}

func (b *watchedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.ended = b.ended || errors.Is(err, io.EOF)
	return n, err
}

func (b *watchedBody) Close() error {
	b.closed = true
	return b.ReadCloser.Close()
}

// TestClientNeverRepeatsWrite loses the answers to writes on a connection that was in use before, where a transport
// that took writes for idempotent would send them again.
func TestClientNeverRepeatsWrite(t *testing.T) {
	store := resource.NewMemory()
	h := newHandler(t, store, nil)
	for _, applied := range []bool{true, false} {
		lose := new(atomic.Bool)
		url, requests, _ := count(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if !lose.Load() {
				h.ServeHTTP(w, r)
				return
			}
			if applied {
				h.ServeHTTP(httptest.NewRecorder(), r)
			}
			_, _ = io.Copy(io.Discard, r.Body)
			conn, _, err := http.NewResponseController(w).Hijack()
			if err == nil {
				_ = conn.Close()
			}
		}))
		c := newClient(t, url, nil)
		key := fmt.Sprint(applied)
		_, err := c.Read(t.Context(), key)
		require.ErrorIs(t, err, resource.ErrNotFound)
		lose.Store(true)
		err = c.Write(t.Context(), key, five, []byte("v"))
		require.Error(t, err)
		_, stale := errors.AsType[*resource.StaleTokenError](err)
		require.False(t, stale, err)
		require.EqualValues(t, 2, requests.Load(), "the write was sent more than once")

		lose.Store(false)
		err = c.Write(t.Context(), key, five, []byte("v"))
		require.Equal(t, applied, errors.Is(err, resource.ErrApplied), "a repeat tells: %v", err)
		require.Equal(t, !applied, err == nil, "a repeat tells: %v", err)
	}
}

// TestClientForeignAnswers has answers that something else than a resource gives, a proxy or a wrong port. None of them
// may be taken for a decision.
func TestClientForeignAnswers(t *testing.T) {
	for name, c := range map[string]struct {
		status int
		header string
		body   string
		want   string
	}{
		"login page":      {status: 200, body: "<html>", want: "has no valid X-Fence-Max header: is there a resource at http"},
		"other API":       {status: 404, body: "nothing here", want: "404 Not Found"},
		"other conflict":  {status: 409, body: `{"error":"stale fencing token","seen":9,"got":5}`, want: "409 Conflict: stale fencing token"},
		"redirect":        {status: 307, header: "Location: /elsewhere", want: "307 Temporary Redirect"},
		"bad gateway":     {status: 502, body: `{"error":"upstream is down"}`, want: "502 Bad Gateway: upstream is down"},
		"malformed fence": {status: 409, header: "X-Fence-Seen: nine", want: "409 Conflict"},
		"no content":      {status: 204, header: "X-Fence-Max: 5", want: "204 No Content"},
		"endless page":    {status: 500, body: strings.Repeat("x", 5000), want: "larger than the limit of 4096 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			url, requests, _ := count(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				if name, value, ok := strings.Cut(c.header, ": "); ok {
					w.Header().Set(name, value)
				}
				w.WriteHeader(c.status)
				_, _ = io.WriteString(w, c.body)
			}))
			client := newClient(t, url, &resource.ClientOptions{MaxBody: 1})
			errRead := func(_ resource.Record, err error) error { return err }
			for _, err := range []error{
				client.Write(t.Context(), "k", five, []byte("v")),
				client.WriteUnfenced(t.Context(), "k", []byte("v")),
				errRead(client.Read(t.Context(), "k")),
				errRead(client.ReadFenced(t.Context(), "k", 5)),
			} {
				require.ErrorContains(t, err, c.want)
				require.NotErrorIs(t, err, resource.ErrNotFound)
				_, stale := errors.AsType[*resource.StaleTokenError](err)
				require.False(t, stale)
			}
			require.EqualValues(t, 4, requests.Load(), "redirects are not followed, nothing is repeated")
		})
	}
}

func TestClientMaxBody(t *testing.T) {
	store := resource.NewMemory()
	url := serve(t, store, &resource.HandlerOptions{MaxBody: 1 << 20})
	require.NoError(t, store.Write(t.Context(), "fits", five, make([]byte, 5000)))
	require.NoError(t, store.Write(t.Context(), "large", five, make([]byte, 5001)))
	c := newClient(t, url, &resource.ClientOptions{MaxBody: 5000})
	rec, err := c.Read(t.Context(), "fits")
	require.NoError(t, err)
	require.Len(t, rec.Value, 5000)
	_, err = c.Read(t.Context(), "large")
	require.ErrorContains(t, err, "larger than the limit of 5000 bytes")
	err = c.Write(t.Context(), "k", five, make([]byte, 1<<20+1))
	require.ErrorIs(t, err, resource.ErrTooLarge)
	require.ErrorContains(t, err, "413 Request Entity Too Large: the value is larger than the limit of 1048576 bytes")
}

// TestClientContext ends ctx while the server holds the answer back.
func TestClientContext(t *testing.T) {
	arrived, release := make(chan struct{}), make(chan struct{})
	url := serve(t, blocking{resource.NewMemory(), arrived, release}, nil)
	t.Cleanup(func() { close(release) })
	cause := errors.New("the lease is lost")
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() {
		<-arrived
		cancel(cause)
	}()
	err := newClient(t, url, nil).Write(ctx, "k", five, nil)
	require.ErrorIs(t, err, cause)
	require.ErrorContains(t, err, `resource: PUT "k"`)

	// A transport may answer a ctx that ends in words of its own.
	ctx, cancel = context.WithCancelCause(t.Context())
	c := newClient(t, "http://h", &resource.ClientOptions{HTTPClient: &http.Client{Transport: roundTrip(func() error {
		cancel(cause)
		return errors.New("operation was canceled")
	})}})
	err = c.Write(ctx, "k", five, nil)
	require.ErrorIs(t, err, cause)
	require.ErrorContains(t, err, "operation was canceled")
}

// roundTrip is a transport that fails.
type roundTrip func() error

func (f roundTrip) RoundTrip(*http.Request) (*http.Response, error) { return nil, f() }

// blocking is a store whose writes wait.
type blocking struct {
	resource.Store
	arrived, release chan struct{}
}

func (b blocking) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	close(b.arrived)
	<-b.release
	return b.Store.Write(ctx, key, f, value)
}

func TestNewClientRefuses(t *testing.T) {
	for _, url := range []string{"", "127.0.0.1:8080", "localhost", "ftp://h", "http://", "http://h/?q", "http://h/#f", "http://h:port"} {
		_, err := resource.NewClient(url, nil)
		require.Error(t, err, url)
	}
	_, err := resource.NewClient("http://h", &resource.ClientOptions{MaxBody: -1})
	require.Error(t, err)
	c := newClient(t, "http://127.0.0.1:1/", nil)
	err = c.Write(t.Context(), "k", five, nil)
	require.ErrorContains(t, err, `resource: PUT "k": Put "http://127.0.0.1:1/r/k": dial tcp 127.0.0.1:1`)
}
