package resource_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"path"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/internal/eachcall"
)

var five = resource.Fence{Token: 5, Seq: 1}

func count(t *testing.T, h http.Handler) (url string, requests *atomic.Int64) {
	t.Helper()
	requests = new(atomic.Int64)
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		h.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	return srv.URL, requests
}

func TestClientUnfencedWrite(t *testing.T) {
	ctx := t.Context()
	c := newClient(t, serve(t, resource.NewMemory(), nil), nil)
	require.ErrorContains(t, c.WriteUnfenced(ctx, "k", nil), "400 Bad Request: X-Fence-Token is missing")
	require.NotErrorIs(t, c.WriteUnfenced(ctx, "k", nil), resource.ErrJump)

	url := serve(t, resource.NewMemory(), &resource.HandlerOptions{Unfenced: true})
	c = newClient(t, url, nil)
	require.NoError(t, c.WriteUnfenced(ctx, "k", []byte("plain")))
	require.ErrorIs(t, c.Write(ctx, "k", five, nil), resource.ErrUnfenced, "who sends a token counts on it")
	_, err := c.ReadFenced(ctx, "k", resource.Fence{Token: 5})
	require.ErrorIs(t, err, resource.ErrUnfenced)

	c = newClient(t, url, &resource.ClientOptions{AllowUnfenced: true})
	require.NoError(t, c.Write(ctx, "k", five, []byte("new")))
	require.NoError(t, c.Write(ctx, "k", resource.Fence{Token: 4, Seq: 1}, []byte("late")))
	rec, err := c.ReadFenced(ctx, "k", resource.Fence{Token: 6})
	require.NoError(t, err)
	require.Equal(t, resource.Record{Value: []byte("late"), MaxFence: five}, rec)
}

func proxied(t *testing.T, store resource.Store, edit func(r *http.Request, reply http.Header)) string {
	t.Helper()
	h := newHandler(t, store, nil)
	url, _ := count(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		edit(r, http.Header{})
		reply := httptest.NewRecorder()
		h.ServeHTTP(reply, r)
		edit(r, reply.Header())
		maps.Copy(w.Header(), reply.Header())
		w.WriteHeader(reply.Code)
		_, _ = w.Write(reply.Body.Bytes())
	}))
	return url
}

func TestClientDetectsProxy(t *testing.T) {
	ctx := t.Context()
	without := func(name string) func(*http.Request, http.Header) {
		return func(r *http.Request, reply http.Header) { r.Header.Del(name); reply.Del(name) }
	}
	written := func(value string) func(*http.Request, http.Header) {
		return func(_ *http.Request, reply http.Header) { reply.Set(resource.HeaderWritten, value) }
	}
	for _, c := range []struct {
		name                string
		edit                func(r *http.Request, reply http.Header)
		value               string
		read, fenced, write string // parts of the errors of Read, ReadFenced and a repeated write; empty: no error
	}{
		{"drops the token", without(resource.HeaderToken), "v", "", "does a proxy drop X-Fence-Token or X-Fence-Seq?", "X-Fence-Seq needs X-Fence-Token"},
		{"drops Accept", without("Accept"), "v", `the reply has type "application/json", want "application/octet-stream"`, `has type "application/json"`, "(already applied)"},
		{"drops X-Fence-Written", without(resource.HeaderWritten), "v", `has 1 bytes and X-Fence-Written ""`, `has 1 bytes and X-Fence-Written ""`, "(already applied)"},
		{"drops it of no bytes", without(resource.HeaderWritten), "", `has 0 bytes and X-Fence-Written ""`, `has 0 bytes and X-Fence-Written ""`, "(already applied)"},
		{"denies the value", written("false"), "v", "has 1 bytes and X-Fence-Written ", "has 1 bytes and X-Fence-Written ", "(already applied)"},
		{"writes nonsense", written("yes"), "v", "has 1 bytes and X-Fence-Written ", "has 1 bytes and X-Fence-Written ", "(already applied)"},
		{"drops X-Fence-Applied", without(resource.HeaderApplied), "v", "", "", "the refusal has no valid X-Fence-Applied header: does a proxy drop it?"},
	} {
		store := resource.NewMemory()
		require.NoError(t, store.Write(ctx, "k", five, []byte(c.value)))
		client := newClient(t, proxied(t, store, c.edit), nil)
		errWrite := client.Write(ctx, "k", five, []byte(c.value))
		_, errRead := client.Read(ctx, "k")
		_, errFenced := client.ReadFenced(ctx, "k", resource.Fence{Token: 6})
		for want, err := range map[*string]error{&c.read: errRead, &c.fenced: errFenced, &c.write: errWrite} {
			if *want == "" {
				require.NoError(t, err, c.name)
				continue
			}
			require.ErrorContains(t, err, *want, c.name)
			_, stale := errors.AsType[*resource.StaleTokenError](err)
			require.Equal(t, *want == "(already applied)", stale, c.name)
		}
	}
}

// A call that lost its fence must not look as if the fence had been checked.
func TestClientDetectsLostFence(t *testing.T) {
	noToken := func(r *http.Request, _ http.Header) { r.Header.Del(resource.HeaderToken) }
	noSeq := func(r *http.Request, _ http.Header) { r.Header.Del(resource.HeaderSeq) }
	otherToken := func(r *http.Request, _ http.Header) { r.Header.Set(resource.HeaderToken, "5") }
	for name, c := range map[string]struct {
		edit         func(r *http.Request, reply http.Header)
		stored, sent resource.Fence // stored is zero for a new key; reads are sent with Seq 0
		want         string
	}{
		"a fenced read of a new key":   {noToken, resource.Fence{}, at(6, 0), ""},
		"a stale fenced read":          {noToken, at(7, 1), at(6, 0), ""},
		"a later write as the first":   {noSeq, resource.Fence{}, at(6, 2), "the request had fence 6.2, and the reply has 6: "},
		"an equal write as its repeat": {noSeq, at(6, 1), at(6, 2), "the request had fence 6.2, and the reply has 6: "},
		"a fenced read as a stale one": {otherToken, at(7, 1), at(8, 0), "the request had fence 8.0, and the reply has 7: "},
	} {
		store := resource.NewMemory()
		if c.stored.Token > 0 {
			require.NoError(t, store.Write(t.Context(), "k", c.stored, nil))
		}
		client := newClient(t, proxied(t, store, c.edit), nil)
		err := client.Write(t.Context(), "k", c.sent, nil)
		if c.sent.Seq == 0 {
			_, err = client.ReadFenced(t.Context(), "k", c.sent)
		}
		require.ErrorIs(t, err, resource.ErrUnfenced, name)
		require.NotErrorIs(t, err, resource.ErrNotFound, name)
		require.NotErrorIs(t, err, resource.ErrApplied, name)
		require.ErrorContains(t, err, c.want+"does a proxy drop X-Fence-Token or X-Fence-Seq?", name)
	}
	url := proxied(t, resource.NewMemory(), noToken)
	_, err := newClient(t, url, &resource.ClientOptions{AllowUnfenced: true}).ReadFenced(t.Context(), "new", at(6, 0))
	require.NotErrorIs(t, err, resource.ErrUnfenced)
	_, err = newClient(t, url, nil).Read(t.Context(), "new")
	require.ErrorIs(t, err, resource.ErrNotFound)
}

func TestClientDetectsRewrittenPath(t *testing.T) {
	store, ctx := resource.NewMemory(), t.Context()
	c := newClient(t, proxied(t, store, func(r *http.Request, _ http.Header) { r.URL.Path = path.Clean(r.URL.Path) }), nil)
	for _, key := range []string{"a/../b", "b/", "./b", "//b"} {
		for name, call := range eachcall.Of(c, key, five) {
			require.ErrorContains(t, call(ctx), `and the key in the path is "b"`, name)
		}
	}
	_, err := store.Read(ctx, "b")
	require.ErrorIs(t, err, resource.ErrNotFound)
	require.NoError(t, c.Write(ctx, "a/b", five, []byte("v")))
}

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
		url, _ := count(t, h)
		c := newClient(t, strings.Replace(url, "http://", "http://user:secret@", 1), nil)
		err := c.Write(t.Context(), "k", five, nil)
		require.Error(t, err)
		require.NotContains(t, err.Error(), "secret")
	}
	err := newClient(t, "http://user:secret@127.0.0.1:1", nil).Write(t.Context(), "k", five, nil)
	require.Error(t, err)
	require.NotContains(t, err.Error(), "secret")
}

// The default transport would speak HTTP/2 with this server.
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

// The transport reuses a connection only if each body was read to its end and closed.
func TestClientReusesConnection(t *testing.T) {
	ctx, watched := t.Context(), &watchedTransport{Transport: http.DefaultTransport.(*http.Transport).Clone()}
	mine := &http.Client{Transport: watched}
	c := newClient(t, serve(t, resource.NewMemory(), nil), &resource.ClientOptions{HTTPClient: mine})
	for range 2 {
		_, _ = c.Read(ctx, "unknown")
		_ = c.Write(ctx, "k", five, make([]byte, 1<<20))
		_, _ = c.ReadFenced(ctx, "k", resource.Fence{Token: 1})
		_ = c.WriteUnfenced(ctx, "k", nil)
		rec, err := c.Read(ctx, "k")
		require.NoError(t, err)
		require.Len(t, rec.Value, 1<<20)
	}
	require.Equal(t, []int{10, 10, 10}, []int{watched.bodies, watched.ended, watched.closed}, "bodies, read to their ends, and closed")
	require.NoError(t, c.Close())
	require.True(t, watched.idle, "idle connections are closed")
	require.Nil(t, mine.CheckRedirect, "the user's client follows redirects as before")
}

type watchedTransport struct {
	*http.Transport
	bodies, ended, closed int
	idle                  bool
}

func (w *watchedTransport) CloseIdleConnections() {
	w.idle = true
	w.Transport.CloseIdleConnections()
}

func (w *watchedTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := w.Transport.RoundTrip(r)
	if err == nil {
		w.bodies++
		resp.Body = &watchedBody{resp.Body, w}
	}
	return resp, err
}

type watchedBody struct {
	io.ReadCloser
	w *watchedTransport
}

func (b *watchedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if errors.Is(err, io.EOF) {
		b.w.ended++
	}
	return n, err
}

func (b *watchedBody) Close() error {
	b.w.closed++
	return b.ReadCloser.Close()
}

// On a reused connection, a transport retries idempotent requests.
func TestClientNeverRepeatsWrite(t *testing.T) {
	store := resource.NewMemory()
	h := newHandler(t, store, nil)
	for _, applied := range []bool{true, false} {
		lose := new(atomic.Bool)
		url, requests := count(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
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
		"redirect":        {status: 307, header: "Location: https://u:secret@h/r/k", want: `307 Temporary Redirect to "...@h/r/k": redirects are not followed: correct the base URL`},
		"no location":     {status: 308, want: "308 Permanent Redirect"},
		"proxy's limit":   {status: 413, body: "<html>", want: "413 Request Entity Too Large: not from the resource: raise the limit of the proxy"},
		"bad gateway":     {status: 502, body: `{"error":"upstream is down"}`, want: "502 Bad Gateway: upstream is down"},
		"malformed fence": {status: 409, header: "X-Fence-Seen: nine", want: "409 Conflict"},
		"another status":  {status: 500, header: "X-Fence-Seen: 9", body: `{"error":"the store failed"}`, want: "500 Internal Server Error: the store failed"},
		"no sentence":     {status: 413, body: `{"message":"too big"}`, want: "not from the resource: raise the limit of the proxy"},
		"created":         {status: 201, header: "Location: /r/k", want: "201 Created"},
		"no content":      {status: 204, header: "X-Fence-Max: 5", want: "204 No Content"},
		"endless page":    {status: 500, body: strings.Repeat("x", 5000), want: "larger than the limit of 4096 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			url, requests := count(t, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				if name, value, ok := strings.Cut(c.header, ": "); ok {
					w.Header().Set(name, value)
				}
				w.WriteHeader(c.status)
				_, _ = io.WriteString(w, c.body)
			}))
			client := newClient(t, url, &resource.ClientOptions{MaxBody: 1})
			calls := eachcall.Of(client, "k", five)
			calls["WriteUnfenced"] = func(ctx context.Context) error { return client.WriteUnfenced(ctx, "k", []byte("v")) }
			for name, call := range calls {
				err := call(t.Context())
				require.ErrorContains(t, err, c.want, name)
				require.Equal(t, strings.Contains(c.want, "redirects"), strings.Contains(err.Error(), "redirects"), name)
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
	url := serve(t, store, nil)
	for key, size := range map[string]int{"fits": 5000, "large": 5001, "larger": 1<<20 + 1} {
		require.NoError(t, store.Write(t.Context(), key, five, make([]byte, size)))
	}
	_, err := newClient(t, url, nil).Read(t.Context(), "larger")
	require.ErrorContains(t, err, "larger than the limit of 1048576 bytes")
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

// A transport may report the end of ctx with its own error. A reply that says what happened stays as it is.
func TestClientContext(t *testing.T) {
	cause := errors.New("the lease is lost")
	store, end := resource.NewMemory(), func() {}
	require.NoError(t, store.Write(t.Context(), "k", five, nil))
	h := newHandler(t, store, nil)
	answered := newClient(t, "http://h", &resource.ClientOptions{HTTPClient: &http.Client{Transport: direct{
		http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			h.ServeHTTP(w, r)
			end()
		}),
	}}})
	for _, c := range []struct {
		call, key string
		want      error
	}{{"Read", "new", resource.ErrNotFound}, {"Write", "k", &resource.StaleTokenError{Key: "k", Seen: five, Got: at(4, 1)}}} {
		ctx, cancel := context.WithCancelCause(t.Context())
		end = func() { cancel(cause) }
		require.Equal(t, c.want, eachcall.Of(answered, c.key, at(4, 1))[c.call](ctx))
	}
	for said, want := range map[error]string{
		errors.New("canceled"): `resource: PUT "k": the lease is lost: Put "http://h/r/k": canceled`,
		cause:                  `resource: PUT "k": Put "http://h/r/k": the lease is lost (the operation may still take effect)`,
	} {
		c := newClient(t, "http://h", &resource.ClientOptions{HTTPClient: &http.Client{Transport: roundTrip(func() error {
			end()
			return said
		})}})
		ending := func() context.Context {
			ctx, cancel := context.WithCancelCause(t.Context())
			end = func() { cancel(cause) }
			return ctx
		}
		err := c.Write(ending(), "k", five, nil)
		require.ErrorIs(t, err, cause)
		require.EqualError(t, err, want)
		require.EqualError(t, c.WriteUnfenced(ending(), "k", nil), want)
		_, err = c.Read(ending(), "k")
		require.ErrorIs(t, err, cause)
		require.NotContains(t, err.Error(), "take effect", "a read without a fence")
	}
}

func TestClientCloseWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		release, said := make(chan struct{}), errors.New("late")
		c := newClient(t, "http://h", &resource.ClientOptions{HTTPClient: &http.Client{Transport: roundTrip(func() error {
			<-release
			return said
		})}})
		written, closed := make(chan error, 1), make(chan error, 1)
		go func() { written <- c.Write(t.Context(), "k", five, nil) }()
		synctest.Wait()
		go func() { closed <- c.Close() }()
		synctest.Wait()
		require.Empty(t, closed, "Close waits for the write")
		_, err := c.Read(t.Context(), "k")
		require.ErrorIs(t, err, resource.ErrClosed)
		close(release)
		require.ErrorIs(t, <-written, said)
		require.NoError(t, <-closed)
	})
}

// A transport may send the body after it has returned, while the caller reuses the value.
func TestClientCopiesValue(t *testing.T) {
	later := &laterTransport{}
	c, value := newClient(t, "http://h", &resource.ClientOptions{HTTPClient: &http.Client{Transport: later}}), []byte("value")
	for name, write := range map[string]func() error{
		"Write":         func() error { return c.Write(t.Context(), "k", five, value) },
		"WriteUnfenced": func() error { return c.WriteUnfenced(t.Context(), "k", value) },
	} {
		require.ErrorIs(t, write(), io.EOF, name)
		value[0]++
		sent, err := io.ReadAll(later.body)
		require.NoError(t, err)
		value[0]--
		require.Equal(t, "value", string(sent), name)
	}
}

type laterTransport struct{ body io.Reader }

func (l *laterTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	l.body = r.Body
	return nil, io.EOF
}

type roundTrip func() error

func (f roundTrip) RoundTrip(*http.Request) (*http.Response, error) { return nil, f() }

func TestNewClientRefuses(t *testing.T) {
	for _, url := range []string{"", "127.0.0.1:8080", "localhost", "ftp://h", "http://", "http://h/?q", "http://h/#f", "http://h/?", "http://h#", "http://h:port"} {
		_, err := resource.NewClient(url, nil)
		require.Error(t, err, url)
	}
	_, err := resource.NewClient("http://h", &resource.ClientOptions{MaxBody: -1})
	require.Error(t, err)
	c := newClient(t, "http://127.0.0.1:1/", nil)
	for _, call := range eachcall.Of(c, "", five) {
		require.EqualError(t, call(t.Context()), "resource: key is empty", "it is not sent")
	}
	ended, end := context.WithCancel(t.Context())
	end()
	for _, call := range eachcall.Of(c, "k", five) {
		require.EqualError(t, call(ended), "resource: context canceled", "it is not sent")
	}
	_, err = c.ReadFenced(t.Context(), "k", resource.Fence{})
	require.EqualError(t, err, "resource: fencing token is 0; tokens start at 1")
	err = c.Write(t.Context(), "k", five, nil)
	require.ErrorContains(t, err, `resource: PUT "k": Put "http://127.0.0.1:1/r/k": dial tcp 127.0.0.1:1`)
}
