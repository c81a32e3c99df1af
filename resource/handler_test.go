package resource_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
)

func ask(t *testing.T, h http.Handler, method, target, body string, header ...string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), method, target, strings.NewReader(body))
	r.Header.Set("Content-Length", strconv.Itoa(len(body)))
	for _, line := range header {
		name, value, _ := strings.Cut(line, ": ")
		r.Header.Add(name, value)
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w
}

func newHandler(t *testing.T, store resource.Store, opts *resource.HandlerOptions) http.Handler {
	t.Helper()
	h, err := resource.NewHandler(store, opts)
	require.NoError(t, err)
	return h
}

func TestHandler(t *testing.T) {
	h := newHandler(t, resource.NewMemory(), nil)
	for i, c := range []struct {
		method, target, body string
		header               []string
		status               int
		want                 string
		wantHeader           string
	}{
		{"GET", "/r/k", "", nil, 404, `{"error":"key not found"}`, "X-Fence-Max: 0.0"},
		{"PUT", "/r/k", "one", []string{"X-Fence-Token: 5"}, 200, `{"key":"k","max_fence":5}`, "X-Fence-Max: 5"},
		{"PUT", "/r/k", "late", []string{"X-Fence-Token: 4"}, 409, `{"error":"stale fencing token","seen":5,"got":4,"seen_seq":1,"got_seq":1,"applied":false}`, "X-Fence-Applied: false"},
		{"PUT", "/r/k", "other", []string{"X-Fence-Token: 5"}, 409, `{"error":"stale fencing token","seen":5,"got":5,"seen_seq":1,"got_seq":1,"applied":false}`, "X-Fence-Applied: false"},
		{"PUT", "/r/k", "one", []string{"X-Fence-Token: 5"}, 409, `{"error":"stale fencing token","seen":5,"got":5,"seen_seq":1,"got_seq":1,"applied":true}`, "X-Fence-Applied: true"},
		{"GET", "/r/k", "", nil, 200, `{"key":"k","value":"one","max_fence":5}`, "X-Fence-Written: true"},
		{"PUT", "/r/k", "<two>", []string{"X-Fence-Token: 5", "X-Fence-Seq: 2"}, 200, `{"key":"k","max_fence":5}`, "X-Fence-Max: 5.2"},
		{"PUT", "/r/k", "late", []string{"X-Fence-Token: 5"}, 409, `{"error":"stale fencing token","seen":5,"got":5,"seen_seq":2,"got_seq":1,"applied":false}`, "X-Fence-Seen: 5.2"},
		{"GET", "/r/k", "", []string{"X-Fence-Token: 7"}, 200, `{"key":"k","value":"<two>","max_fence":7}`, "X-Fence-Max: 7.0"},
		{"PUT", "/r/k", "late", []string{"X-Fence-Token: 6"}, 409, `{"error":"stale fencing token","seen":7,"got":6,"seen_seq":0,"got_seq":1,"applied":false}`, "X-Fence-Seen: 7.0"},
		{"GET", "/r/k", "", []string{"X-Fence-Token: 6"}, 409, `{"error":"stale fencing token","seen":7,"got":6,"seen_seq":0,"got_seq":0,"applied":false}`, "X-Fence-Seen: 7.0"},
		{"GET", "/r/k", "", []string{"X-Fence-Token: 7", "X-Fence-Seq: 2"}, 200, `{"key":"k","value":"<two>","max_fence":7}`, "X-Fence-Max: 7.2"},
		{"GET", "/r/k", "", []string{"X-Fence-Token: 7", "X-Fence-Seq: 1"}, 409, `{"error":"stale fencing token","seen":7,"got":7,"seen_seq":2,"got_seq":1,"applied":false}`, "X-Fence-Seen: 7.2"},
		{"GET", "/r/k", "", []string{"Accept: application/octet-stream"}, 200, `<two>`, "Content-Type: application/octet-stream"},
		{"GET", "/r/k", "", []string{"Accept: text/html, Application/Octet-Stream;q=0.9"}, 200, `<two>`, "Content-Length: 5"},
		{"GET", "/r/k", "", []string{"Accept: text/html"}, 200, `{"key":"k","value":"<two>","max_fence":7}`, "Content-Type: application/json"},
		{"PUT", "/r/k", "\xff\x00", []string{"X-Fence-Token: 8"}, 200, `{"key":"k","max_fence":8}`, ""},
		{"GET", "/r/k", "", nil, 200, `{"key":"k","value_base64":"/wA=","max_fence":8}`, "Content-Type: application/json"},
		{"GET", "/r/new", "", []string{"X-Fence-Token: 3"}, 200, `{"key":"new","value":"","max_fence":3}`, "X-Fence-Written: false"},
		{"GET", "/r/new", "", nil, 200, `{"key":"new","value":"","max_fence":3}`, "X-Fence-Max: 3.0"},
		{"PUT", "/r/new", "", []string{"X-Fence-Token: 3"}, 200, `{"key":"new","max_fence":3}`, "Content-Type: application/json"},
		{"GET", "/r/new", "", nil, 200, `{"key":"new","value":"","max_fence":3}`, "X-Fence-Written: true"},
		{"PUT", "/r/top", "v", []string{"X-Fence-Token: 18446744073709551615"}, 200, `{"key":"top","max_fence":18446744073709551615}`, ""},
		{"PUT", "/r/a/b", "v", []string{"X-Fence-Token: 1", "X-Fence-Key: a%2Fb"}, 200, `{"key":"a/b","max_fence":1}`, ""},
		{"DELETE", "/r/k", "", []string{"X-Fence-Token: 9"}, 405, `{"error":"method DELETE is not supported: use PUT to write, GET or HEAD to read"}`, "Allow: GET, HEAD, PUT"},
		{"POST", "/r/k", "v", []string{"X-Fence-Token: 9"}, 405, `{"error":"method POST is not supported: use PUT to write, GET or HEAD to read"}`, "Allow: GET, HEAD, PUT"},
		{"GET", "/", "", nil, 404, `{"error":"no such page; keys are under /r/"}`, "X-Fence-Max: "},
		{"GET", "/r", "", nil, 404, `{"error":"no such page; keys are under /r/"}`, ""},
	} {
		got := ask(t, h, c.method, c.target, c.body, c.header...)
		what := fmt.Sprintf("request %d: %s %s %q %v", i, c.method, c.target, c.body, c.header)
		require.Equal(t, c.status, got.Code, what)
		if got.Header().Get("Content-Type") == "application/json" {
			c.want += "\n" // a shell's prompt comes on a line of its own
		}
		require.Equal(t, c.want, got.Body.String(), what)
		if c.wantHeader != "" {
			name, value, _ := strings.Cut(c.wantHeader, ": ")
			require.Equal(t, value, got.Header().Get(name), what)
		}
		require.Equal(t, "no-store", got.Header().Get("Cache-Control"), what)
		require.Equal(t, "nosniff", got.Header().Get("X-Content-Type-Options"), what)
	}
}

func TestHandlerBadInput(t *testing.T) {
	store := resource.NewMemory()
	h := newHandler(t, store, &resource.HandlerOptions{MaxBody: 10})
	const ok = "X-Fence-Token: 7"
	for _, c := range []struct {
		method, target, body string
		header               []string
		status               int
		want                 string
	}{
		{"PUT", "/r/k", "v", nil, 400, "X-Fence-Token is missing: send the fencing token of your lock grant"},
		{"PUT", "/r/k", "v", []string{"X-Fence-Token: "}, 400, "X-Fence-Token is empty"},
		{"PUT", "/r/k", "v", []string{"X-Fence-Token: 0"}, 400, "X-Fence-Token is 0: send an integer from 1"},
		{"PUT", "/r/k", "v", []string{"X-Fence-Token: -1"}, 400, `X-Fence-Token is \"-1\": send an integer from 1`},
		{"PUT", "/r/k", "v", []string{"X-Fence-Token: +1"}, 400, `X-Fence-Token is \"+1\"`},
		{"PUT", "/r/k", "v", []string{"X-Fence-Token: 1.5"}, 400, `X-Fence-Token is \"1.5\"`},
		{"PUT", "/r/k", "v", []string{"X-Fence-Token: 0x7"}, 400, `X-Fence-Token is \"0x7\"`},
		{"PUT", "/r/k", "v", []string{"X-Fence-Token: 1_0"}, 400, `X-Fence-Token is \"1_0\"`},
		{"PUT", "/r/k", "v", []string{"X-Fence-Token: seven"}, 400, `decimal digits only`},
		{"PUT", "/r/k", "v", []string{"X-Fence-Token: 7, 8"}, 400, `decimal digits only`},
		{"PUT", "/r/k", "v", []string{"X-Fence-Token: " + strings.Repeat("x", 5000)}, 400, strings.Repeat("x", 40) + `\":`},
		{"PUT", "/r/k", "v", []string{"X-Fence-Token: 18446744073709551616"}, 400, "X-Fence-Token is too large: send an integer up to 18446744073709551615"},
		{"PUT", "/r/k", "v", []string{ok, ok}, 400, "X-Fence-Token was sent 2 times: send it once"},
		{"PUT", "/r/k", "v", []string{ok, "X-Fence-Seq: 0"}, 400, "X-Fence-Seq is 0"},
		{"PUT", "/r/k", "v", []string{ok, "X-Fence-Seq: -2"}, 400, "X-Fence-Seq is"},
		{"PUT", "/r/k", "v", []string{ok, "X-Fence-Seq: "}, 400, "X-Fence-Seq is empty"},
		{"PUT", "/r/k", "v", []string{ok, "X-Fence-Seq: 1", "X-Fence-Seq: 2"}, 400, "X-Fence-Seq was sent 2 times"},
		{"PUT", "/r/k", "v", []string{"X-Fence-Seq: 2"}, 400, "X-Fence-Seq needs X-Fence-Token: send both"},
		{"GET", "/r/k", "", []string{"X-Fence-Token: 0"}, 400, "X-Fence-Token is 0"},
		{"GET", "/r/k", "", []string{"X-Fence-Token: x"}, 400, "decimal digits only"},
		{"HEAD", "/r/k", "", []string{"X-Fence-Token: x"}, 400, ""},
		{"PUT", "/r/", "v", []string{ok}, 400, "key is empty"},
		{"GET", "/r/", "", nil, 400, "key is empty"},
		{"PUT", "/r/%00", "v", []string{ok}, 400, "control character"},
		{"PUT", "/r/%ff", "v", []string{ok}, 400, "not valid UTF-8"},
		{"PUT", "/r/" + strings.Repeat("k", 513), "v", []string{ok}, 400, "key has 513 bytes, at most 512 are allowed"},
		{"PUT", "/r/k?v=2", "v", []string{ok}, 400, "escape a ? in the key as %3F"},
		{"PUT", "/r/k?", "v", []string{ok}, 400, "escape a ? in the key as %3F"},
		{"PUT", "/r/k", "v", []string{ok, "X-Fence-Key: a%2F..%2Fk"}, 400, `X-Fence-Key is \"a%2F..%2Fk\", and the key in the path is \"k\"`},
		{"PUT", "/r/k", "v", []string{ok, "X-Fence-Key: k", "X-Fence-Key: l"}, 400, `X-Fence-Key is \"l\"`},
		{"PUT", "/r/k", "v", []string{ok, "X-Fence-Key: "}, 400, `X-Fence-Key is \"\"`},
		{"PUT", "/r/k", "v", []string{ok, "X-Fence-Key: %"}, 400, `X-Fence-Key is \"%\"`},
		{"GET", "/r/k", "", []string{ok, "X-Fence-Key: K"}, 400, `X-Fence-Key is \"K\"`},
		{"PUT", "/r/k", "v", []string{ok, `If-Match: "5"`}, 400, "If-Match is not supported: only the fence decides"},
		{"PUT", "/r/k", "v", []string{ok, "If-None-Match: *"}, 400, "If-None-Match is not supported"},
		{"PUT", "/r/k", "v", []string{ok, "If-Unmodified-Since: Sat, 29 Oct 1994 19:43:31 GMT"}, 400, "If-Unmodified-Since is not supported"},
		{"PUT", "/r/k", "v", []string{ok, "Content-Range: bytes 5-5/6"}, 400, "Content-Range is not supported"},
		{"PUT", "/r/k", "v", []string{ok, "Content-Encoding: gzip"}, 400, "Content-Encoding is not supported"},
		{"PUT", "/r/k", "01234567890", []string{ok}, 413, "the value is larger than the limit of 10 bytes"},
	} {
		got := ask(t, h, c.method, c.target, c.body, c.header...)
		what := fmt.Sprintf("%s %.40s %.80q", c.method, c.target, c.header)
		require.Equal(t, c.status, got.Code, "%s: %s", what, got.Body)
		require.Contains(t, got.Body.String(), c.want, what)
	}
	_, err := store.Read(t.Context(), "k")
	require.ErrorIs(t, err, resource.ErrNotFound, "no bad request may change anything")
	got := ask(t, h, "PUT", "/r/k", "0123456789", ok)
	require.Equal(t, 200, got.Code, "a value of exactly the limit")
}

// The requests are raw, and the sending side is closed.
func TestHandlerBody(t *testing.T) {
	store := resource.NewMemory()
	addr := strings.TrimPrefix(serve(t, store, &resource.HandlerOptions{MaxBody: 10}), "http://")
	for _, c := range []struct{ header, body, want string }{
		{"Transfer-Encoding: chunked", "b\r\n01234567890\r\n0\r\n\r\n", "413"},
		{"Transfer-Encoding: chunked", "3\r\nabc\r\nzz", "400"},
		{"Content-Length: 5", "abc", "400"},
		{"Content-Length: 11", "", "413"},
		{"Connection: close", "", "411"}, // curl -X PUT without -d
	} {
		conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", addr)
		require.NoError(t, err)
		_, err = fmt.Fprintf(conn, "PUT /r/k HTTP/1.1\r\nHost: h\r\nX-Fence-Token: 7\r\n%s\r\n\r\n%s", c.header, c.body)
		require.NoError(t, errors.Join(err, conn.(*net.TCPConn).CloseWrite()))
		answer, err := io.ReadAll(conn)
		require.NoError(t, errors.Join(err, conn.Close()))
		require.Equal(t, "HTTP/1.1 "+c.want, string(answer[:min(12, len(answer))]), "%s %q", c.header, c.body)
	}
	_, err := store.Read(t.Context(), "k")
	require.ErrorIs(t, err, resource.ErrNotFound, "half a value was written")
}

func TestHandlerKeys(t *testing.T) {
	store := resource.NewMemory()
	h := newHandler(t, store, nil)
	for target, key := range map[string]string{
		"/r/a/b": "a/b", "/r/a%2Fc": "a/c", "/r/a//b": "a//b", "/r//": "/", "/r/..": "..", "/r/%2e%2E/": "../", "/r/a/../b": "a/../b",
		"/r/./": "./", "/r/%25": "%", "/r/%3F": "?", "/r/a+b": "a+b", "/r/a%20b": "a b", "/r/%D0%BA": "к", "/r/a;b=c,d": "a;b=c,d",
	} {
		got := ask(t, h, "PUT", target, target, "X-Fence-Token: 1")
		require.Equal(t, 200, got.Code, target)
		require.Contains(t, got.Body.String(), `"key":`+strconv.Quote(key), target)
		rec, err := store.Read(t.Context(), key)
		require.NoError(t, err, target)
		require.Equal(t, target, string(rec.Value))
	}
}

func TestHandlerHead(t *testing.T) {
	h := newHandler(t, resource.NewMemory(), nil)
	ask(t, h, "PUT", "/r/k", "value", "X-Fence-Token: 5")
	for _, c := range []struct{ header, want string }{{"Accept: */*", "5"}, {"X-Fence-Token: 7", "7.0"}} {
		got := ask(t, h, "HEAD", "/r/k", "", c.header)
		require.Equal(t, 200, got.Code)
		require.NotEmpty(t, got.Header().Get("Content-Length"))
		require.Equal(t, c.want, got.Header().Get(resource.HeaderMax))
	}
}

func TestHandlerBearerToken(t *testing.T) {
	store := resource.NewMemory()
	url := serve(t, store, &resource.HandlerOptions{Token: "secret"})
	f := resource.Fence{Token: 5, Seq: 1}
	for _, token := range []string{"", "wrong", "secre", "secrets"} {
		c := newClient(t, url, &resource.ClientOptions{Token: token})
		require.ErrorContains(t, c.Write(t.Context(), "k", f, nil), "401 Unauthorized: the bearer token is missing or wrong")
		_, err := c.ReadFenced(t.Context(), "k", resource.Fence{Token: 5})
		require.ErrorContains(t, err, "401")
	}
	_, err := store.Read(t.Context(), "k")
	require.ErrorIs(t, err, resource.ErrNotFound)
	require.NoError(t, newClient(t, url, &resource.ClientOptions{Token: "secret"}).Write(t.Context(), "k", f, nil))

	h := newHandler(t, store, &resource.HandlerOptions{Token: "secret"})
	for header, want := range map[string]int{"Authorization: bearer secret": 200, "Authorization: Basic secret": 401, "Authorization: secret": 401} {
		got := ask(t, h, "GET", "/r/k", "", header)
		require.Equal(t, want, got.Code, header)
		require.Equal(t, want == 401, got.Header().Get("WWW-Authenticate") == "Bearer", header)
	}
}

func TestHandlerUnfenced(t *testing.T) {
	h := newHandler(t, resource.NewMemory(), &resource.HandlerOptions{Unfenced: true})
	for i, c := range []struct {
		method, body string
		header       []string
		status       int
		want         string
	}{
		{"GET", "", []string{"X-Fence-Token: 5"}, 200, `{"key":"k","value":"","max_fence":0}`},
		{"GET", "", nil, 404, `{"error":"key not found"}`}, // the read above left no trace
		{"PUT", "a", []string{"X-Fence-Token: 5"}, 200, `{"key":"k","max_fence":5}`},
		{"GET", "", []string{"X-Fence-Token: 9"}, 200, `{"key":"k","value":"a","max_fence":5}`},
		{"PUT", "late", []string{"X-Fence-Token: 3"}, 200, `{"key":"k","max_fence":3}`},
		{"PUT", "plain", nil, 200, `{"key":"k","max_fence":0}`},
		{"GET", "", []string{"X-Fence-Token: 1"}, 200, `{"key":"k","value":"plain","max_fence":5}`},
		{"PUT", "b", []string{"X-Fence-Token: x"}, 400, `{"error":"X-Fence-Token is \"x\": send an integer from 1, decimal digits only"}`},
	} {
		got := ask(t, h, c.method, "/r/k", c.body, c.header...)
		require.Equal(t, c.status, got.Code, "request %d", i)
		require.Equal(t, c.want+"\n", got.Body.String(), "request %d", i)
	}
	_, err := resource.NewHandler(onlyStore{resource.NewMemory()}, &resource.HandlerOptions{Unfenced: true})
	require.ErrorContains(t, err, "has no Overwrite")
	got := ask(t, newHandler(t, noReads{resource.NewMemory()}, &resource.HandlerOptions{Unfenced: true}), "GET", "/r/k", "", "X-Fence-Token: 5")
	require.Equal(t, 500, got.Code)
}

type onlyStore struct{ resource.Store }

type noReads struct{ *resource.Memory }

func (noReads) Read(context.Context, string) (resource.Record, error) {
	return resource.Record{}, io.EOF
}

func TestHandlerOptionsRefused(t *testing.T) {
	_, err := resource.NewHandler(resource.NewMemory(), &resource.HandlerOptions{MaxBody: -1})
	require.ErrorContains(t, err, "MaxBody is -1")
	for _, token := range []string{" ", "a b", "a\n", "\t", "\x7f"} {
		_, err = resource.NewHandler(resource.NewMemory(), &resource.HandlerOptions{Token: token})
		require.ErrorContains(t, err, "Token has a space or a control character", "%q", token)
	}
	reg := prometheus.NewRegistry()
	newHandler(t, resource.NewMemory(), &resource.HandlerOptions{Registerer: reg})
	_, err = resource.NewHandler(resource.NewMemory(), &resource.HandlerOptions{Registerer: reg})
	require.Error(t, err, "metrics registered twice")
}

func TestHandlerMetrics(t *testing.T) {
	reg := prometheus.NewRegistry()
	h := newHandler(t, resource.NewMemory(), &resource.HandlerOptions{Registerer: reg})
	for _, token := range []string{"5", "4", "5", "6", "bad"} {
		ask(t, h, "PUT", "/r/k", "v", "X-Fence-Token: "+token)
	}
	ask(t, h, "GET", "/r/k", "", "X-Fence-Token: 1")
	ask(t, h, "GET", "/r/k", "")
	ask(t, h, "GET", "/r/unknown", "")
	page := ask(t, promhttp.HandlerFor(reg, promhttp.HandlerOpts{}), "GET", "/metrics", "").Body.String()
	for _, want := range []string{
		"resource_stale_token_rejections_total 3",
		"resource_writes_accepted_total 2",
		"resource_reads_accepted_total 1",
		`resource_request_duration_seconds_count{op="write"} 5`,
		`resource_request_duration_seconds_count{op="read"} 3`,
	} {
		require.Contains(t, page, "\n"+want+"\n")
	}
}

type failing struct {
	resource.Store
	err error
}

func (f failing) Write(context.Context, string, resource.Fence, []byte) error { return f.err }

func TestHandlerStoreFails(t *testing.T) {
	for _, c := range []struct {
		err        error
		status     int
		reply, log string
	}{
		{
			err: errors.New("disk /dev/sda1 on fire"), status: 500, log: "disk /dev/sda1 on fire",
			reply: "the store failed; a write may have taken effect: repeat it to find out",
		},
		{
			err: fmt.Errorf("%w: that of \"k\" has 11 bytes", resource.ErrTooLarge), status: 413,
			reply: `nothing was written: value is too large: that of "k" has 11 bytes`,
		},
		{
			err: fmt.Errorf("/var/lib/resource.db: %w", resource.ErrNoRoom), status: 507, log: "/var/lib/resource.db",
			reply: "nothing was changed: the store has no room",
		},
		{
			err: fmt.Errorf("%w: 9", resource.ErrJump), status: 400, log: `level=WARN msg="fencing token too far ahead" path=/r/k`,
			reply: "the fencing token is too far ahead: 9",
		},
		{err: resource.ErrClosed, status: 503, reply: "the resource is shutting down"},
	} {
		var log bytes.Buffer
		url := serve(t, failing{resource.NewMemory(), c.err}, &resource.HandlerOptions{Logger: slog.New(slog.NewTextHandler(&log, nil))})
		err := newClient(t, url, nil).Write(t.Context(), "k", five, nil)
		require.ErrorContains(t, err, fmt.Sprintf("%d %s: %s", c.status, http.StatusText(c.status), c.reply))
		require.Equal(t, c.status == 400, errors.Is(err, resource.ErrJump), "%v", err)
		require.Equal(t, c.status == 413, errors.Is(err, resource.ErrTooLarge), "%v", err)
		require.Equal(t, c.status == 507, errors.Is(err, resource.ErrNoRoom), "%v", err)
		require.Equal(t, c.log == "", log.Len() == 0, "%s", &log)
		if c.log != "" {
			require.Contains(t, log.String(), c.log)
			require.NotContains(t, err.Error(), c.log)
		}
	}
}

func TestHandlerClientGone(t *testing.T) {
	gone, leave := context.WithCancel(t.Context())
	leave()
	canceled := fmt.Errorf("boltstore: %w", context.Canceled)
	for _, c := range []struct {
		ctx  context.Context
		err  error
		want string
	}{
		{gone, canceled, `level=DEBUG msg="the client has disconnected"`},
		{gone, io.EOF, `level=ERROR msg="the store failed"`},
		{t.Context(), canceled, `level=ERROR msg="the store failed"`},
	} {
		var log bytes.Buffer
		h := newHandler(t, failing{resource.NewMemory(), c.err},
			&resource.HandlerOptions{Logger: slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))})
		r := httptest.NewRequestWithContext(c.ctx, http.MethodPut, "/r/k", strings.NewReader("v"))
		r.Header.Set(resource.HeaderToken, "5")
		h.ServeHTTP(httptest.NewRecorder(), r)
		require.Contains(t, log.String(), c.want)
	}
}

func FuzzKey(f *testing.F) {
	for _, key := range []string{"a", "a/b", "//", "..", ".", "%2F", "a?b#c", "\xff", "", "a b", "ключ", "a\\b"} {
		f.Add(key)
	}
	f.Fuzz(func(t *testing.T, key string) {
		if resource.CheckKey(key) != nil {
			return
		}
		store := resource.NewMemory()
		mux := http.NewServeMux() // it redirects paths that are not clean
		mux.Handle("/r/", newHandler(t, store, nil))
		c := newClient(t, "http://in.process", &resource.ClientOptions{HTTPClient: &http.Client{Transport: direct{mux}}})
		if err := c.Write(t.Context(), key, resource.Fence{Token: 1, Seq: 1}, []byte("v")); err != nil {
			t.Fatalf("key %q: %v", key, err)
		}
		if _, err := store.Read(t.Context(), key); err != nil {
			t.Errorf("key %q: %v", key, err)
		}
	})
}

// direct is a transport without a network that parses the request line as a server does.
type direct struct{ http.Handler }

func (d direct) RoundTrip(req *http.Request) (*http.Response, error) {
	r := req.Clone(req.Context())
	var err error
	if r.URL, err = url.ParseRequestURI(req.URL.RequestURI()); err != nil {
		return nil, err
	}
	w := httptest.NewRecorder()
	d.ServeHTTP(w, r)
	return w.Result(), nil
}
