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
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
)

// ask sends one request; header lines are "Name: value".
func ask(t *testing.T, h http.Handler, method, target, body string, header ...string) *httptest.ResponseRecorder {
	t.Helper()
	r := httptest.NewRequestWithContext(t.Context(), method, target, strings.NewReader(body))
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

// TestHandler is the interface as it's documented, byte by byte.
func TestHandler(t *testing.T) {
	h := newHandler(t, resource.NewMemory(), nil)
	for i, c := range []struct {
		method, target, body string
		header               []string
		status               int
		want                 string
		wantHeader           string // one line, or none
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
		{"GET", "/r/k", "", []string{"Accept: application/octet-stream"}, 200, `<two>`, "Content-Type: application/octet-stream"},
		{"GET", "/r/k", "", []string{"Accept: text/html, Application/Octet-Stream;q=0.9"}, 200, `<two>`, "Content-Length: 5"},
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
		require.Equal(t, c.want, got.Body.String(), what)
		if c.wantHeader != "" {
			name, value, _ := strings.Cut(c.wantHeader, ": ")
			require.Equal(t, value, got.Header().Get(name), what)
		}
		require.Equal(t, "no-store", got.Header().Get("Cache-Control"), what)
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
		want                 string // part of the sentence
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
		{"PUT", "/r/k", "v", []string{ok, ok}, 400, "X-Fence-Token is there 2 times: send it once"},
		{"PUT", "/r/k", "v", []string{ok, "X-Fence-Seq: 0"}, 400, "X-Fence-Seq is 0"},
		{"PUT", "/r/k", "v", []string{ok, "X-Fence-Seq: -2"}, 400, "X-Fence-Seq is"},
		{"PUT", "/r/k", "v", []string{ok, "X-Fence-Seq: "}, 400, "X-Fence-Seq is empty"},
		{"PUT", "/r/k", "v", []string{ok, "X-Fence-Seq: 1", "X-Fence-Seq: 2"}, 400, "X-Fence-Seq is there 2 times"},
		{"PUT", "/r/k", "v", []string{"X-Fence-Seq: 2"}, 400, "X-Fence-Seq is there and X-Fence-Token is not"},
		{"GET", "/r/k", "", []string{ok, "X-Fence-Seq: 2"}, 400, "X-Fence-Seq belongs to writes"},
		{"GET", "/r/k", "", []string{"X-Fence-Token: 0"}, 400, "X-Fence-Token is 0"},
		{"GET", "/r/k", "", []string{"X-Fence-Token: x"}, 400, "decimal digits only"},
		{"HEAD", "/r/k", "", []string{"X-Fence-Token: x"}, 400, ""},
		{"PUT", "/r/", "v", []string{ok}, 400, "key is empty"},
		{"GET", "/r/", "", nil, 400, "key is empty"},
		{"PUT", "/r/%00", "v", []string{ok}, 400, "control character"},
		{"PUT", "/r/%ff", "v", []string{ok}, 400, "not valid UTF-8"},
		{"PUT", "/r/" + strings.Repeat("k", 513), "v", []string{ok}, 400, "key has 513 bytes, at most 512 are allowed"},
		{"PUT", "/r/k?v=2", "v", []string{ok}, 400, "escape a ? in the key as %3F"},
		{"PUT", "/r/k", "v", []string{ok, "X-Fence-Key: a%2F..%2Fk"}, 400, `X-Fence-Key is \"a%2F..%2Fk\", and the key in the path is \"k\"`},
		{"PUT", "/r/k", "v", []string{ok, "X-Fence-Key: k", "X-Fence-Key: l"}, 400, `X-Fence-Key is \"l\"`},
		{"PUT", "/r/k", "v", []string{ok, "X-Fence-Key: "}, 400, `X-Fence-Key is \"\"`},
		{"PUT", "/r/k", "v", []string{ok, "X-Fence-Key: %"}, 400, `X-Fence-Key is \"%\"`},
		{"GET", "/r/k", "", []string{ok, "X-Fence-Key: K"}, 400, `X-Fence-Key is \"K\"`},
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

// TestHandlerBody has bodies that don't say their length, or that end before it.
func TestHandlerBody(t *testing.T) {
	store := resource.NewMemory()
	addr := strings.TrimPrefix(serve(t, store, &resource.HandlerOptions{MaxBody: 10}), "http://")
	for _, c := range []struct{ header, body, want string }{
		{"Transfer-Encoding: chunked", "b\r\n01234567890\r\n0\r\n\r\n", "413"},
		{"Transfer-Encoding: chunked", "3\r\nabc\r\nzz", "400"},
		{"Content-Length: 5", "abc", "400"},
		{"Content-Length: 11", "", "413"},
	} {
		conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", addr)
		require.NoError(t, err)
		_, err = fmt.Fprintf(conn, "PUT /r/k HTTP/1.1\r\nHost: h\r\nX-Fence-Token: 7\r\n%s\r\n\r\n%s", c.header, c.body)
		require.NoError(t, err)
		require.NoError(t, conn.(*net.TCPConn).CloseWrite())
		answer, err := io.ReadAll(conn)
		require.NoError(t, err)
		require.NoError(t, conn.Close())
		require.Equal(t, "HTTP/1.1 "+c.want, string(answer[:min(12, len(answer))]), "%s %q", c.header, c.body)
	}
	_, err := store.Read(t.Context(), "k")
	require.ErrorIs(t, err, resource.ErrNotFound, "half a value was written")
}

// TestHandlerKeys sends keys as raw request lines, which no client library has cleaned.
func TestHandlerKeys(t *testing.T) {
	store := resource.NewMemory()
	addr := strings.TrimPrefix(serve(t, store, nil), "http://")
	token := 0
	for target, key := range map[string]string{
		"/r/a/b": "a/b", "/r/a%2Fb": "a/b", "/r/a//b": "a//b", "/r//": "/", "/r/..": "..", "/r/%2e%2E": "..", "/r/a/../b": "a/../b",
		"/r/./": "./", "/r/%25": "%", "/r/%3F": "?", "/r/a+b": "a+b", "/r/a%20b": "a b", "/r/%D0%BA": "к", "/r/a;b=c,d": "a;b=c,d",
	} {
		token++
		conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", addr)
		require.NoError(t, err)
		_, err = fmt.Fprintf(conn, "PUT %s HTTP/1.1\r\nHost: h\r\nConnection: close\r\nX-Fence-Token: %d\r\nContent-Length: %d\r\n\r\n%s",
			target, token, len(target), target)
		require.NoError(t, err)
		answer, err := io.ReadAll(conn)
		require.NoError(t, err)
		require.NoError(t, conn.Close())
		require.Contains(t, string(answer), "HTTP/1.1 200", target)
		require.Contains(t, string(answer), `"key":`+strconv.Quote(key), target)
		rec, err := store.Read(t.Context(), key)
		require.NoError(t, err, target)
		require.Equal(t, target, string(rec.Value))
	}
}

func TestHandlerHead(t *testing.T) {
	url := serve(t, resource.NewMemory(), nil)
	c := newClient(t, url, nil)
	require.NoError(t, c.Write(t.Context(), "k", resource.Fence{Token: 5, Seq: 1}, []byte("value")))
	for _, c := range []struct{ token, want string }{{"", "5"}, {"7", "7.0"}} { // a fenced HEAD raises like a fenced GET
		req, err := http.NewRequestWithContext(t.Context(), http.MethodHead, url+"/r/k", nil)
		require.NoError(t, err)
		if c.token != "" {
			req.Header.Set(resource.HeaderToken, c.token)
		}
		resp, err := http.DefaultClient.Do(req)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		require.Equal(t, 200, resp.StatusCode)
		require.Positive(t, resp.ContentLength)
		require.Equal(t, c.want, resp.Header.Get(resource.HeaderMax))
	}
}

func TestHandlerBearerToken(t *testing.T) {
	store := resource.NewMemory()
	url := serve(t, store, &resource.HandlerOptions{Token: "secret"})
	f := resource.Fence{Token: 5, Seq: 1}
	for _, token := range []string{"", "wrong", "secre", "secrets"} {
		c := newClient(t, url, &resource.ClientOptions{Token: token})
		require.ErrorContains(t, c.Write(t.Context(), "k", f, nil), "401 Unauthorized: the bearer token is missing or wrong")
		_, err := c.ReadFenced(t.Context(), "k", 5)
		require.ErrorContains(t, err, "401")
	}
	_, err := store.Read(t.Context(), "k")
	require.ErrorIs(t, err, resource.ErrNotFound)
	require.NoError(t, newClient(t, url, &resource.ClientOptions{Token: "secret"}).Write(t.Context(), "k", f, nil))

	h := newHandler(t, store, &resource.HandlerOptions{Token: "secret"})
	for header, want := range map[string]int{"Authorization: bearer secret": 200, "Authorization: Basic secret": 401, "Authorization: secret": 401} {
		got := ask(t, h, "GET", "/r/k", "", header)
		require.Equal(t, want, got.Code, header)
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
		{"GET", "", []string{"X-Fence-Token: 5"}, 200, `{"key":"k","value":"","max_fence":0}`}, // as with fencing on
		{"GET", "", nil, 404, `{"error":"key not found"}`},                                     // the read above left no trace
		{"PUT", "a", []string{"X-Fence-Token: 5"}, 200, `{"key":"k","max_fence":5}`},
		{"GET", "", []string{"X-Fence-Token: 9"}, 200, `{"key":"k","value":"a","max_fence":5}`},
		{"PUT", "late", []string{"X-Fence-Token: 3"}, 200, `{"key":"k","max_fence":5}`},
		{"PUT", "plain", nil, 200, `{"key":"k","max_fence":5}`},
		{"GET", "", []string{"X-Fence-Token: 1"}, 200, `{"key":"k","value":"plain","max_fence":5}`},
		{"PUT", "b", []string{"X-Fence-Token: x"}, 400, `{"error":"X-Fence-Token is \"x\": send an integer from 1, decimal digits only"}`},
	} {
		got := ask(t, h, c.method, "/r/k", c.body, c.header...)
		require.Equal(t, c.status, got.Code, "request %d", i)
		require.Equal(t, c.want, got.Body.String(), "request %d", i)
	}
	_, err := resource.NewHandler(onlyStore{resource.NewMemory()}, &resource.HandlerOptions{Unfenced: true})
	require.ErrorContains(t, err, "has no Overwrite")
}

// onlyStore hides everything but the Store of what it wraps.
type onlyStore struct{ resource.Store }

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
	for _, token := range []string{"5", "4", "5", "6", "bad"} { // accepted, stale, repeat, accepted, invalid
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

// failing is a store whose writes fail.
type failing struct {
	resource.Store
	err error
}

func (f failing) Write(context.Context, string, resource.Fence, []byte) error { return f.err }

func TestHandlerStoreFails(t *testing.T) {
	var log bytes.Buffer
	var decisions int
	h := newHandler(t, failing{resource.NewMemory(), errors.New("disk /dev/sda1 on fire")}, &resource.HandlerOptions{
		Logger:   slog.New(slog.NewTextHandler(&log, nil)),
		Observer: func(resource.Decision) { decisions++ },
	})
	got := ask(t, h, "PUT", "/r/k", "v", "X-Fence-Token: 5")
	require.Equal(t, 500, got.Code)
	require.Equal(t, `{"error":"the store failed; a write may have taken effect: repeat it to find out"}`, got.Body.String())
	require.Contains(t, log.String(), "disk /dev/sda1 on fire")
	require.Zero(t, decisions, "an unknown outcome is no decision")

	closed := resource.NewMemory()
	require.NoError(t, closed.Close())
	got = ask(t, newHandler(t, closed, nil), "PUT", "/r/k", "v", "X-Fence-Token: 5")
	require.Equal(t, 503, got.Code)
}

// TestHandlerStoreRefusesSize has a store that takes less than the handler: who asks again would be refused again.
func TestHandlerStoreRefusesSize(t *testing.T) {
	var log bytes.Buffer
	tooLarge := fmt.Errorf("%w: that of \"k\" has 11 bytes, at most 10 are allowed", resource.ErrTooLarge)
	for _, o := range []resource.HandlerOptions{{}, {Observer: func(resource.Decision) { t.Error("nothing was decided") }}} {
		o.Logger = slog.New(slog.NewTextHandler(&log, nil))
		got := ask(t, newHandler(t, failing{resource.NewMemory(), tooLarge}, &o), "PUT", "/r/k", "01234567890", "X-Fence-Token: 5")
		require.Equal(t, 413, got.Code)
		require.Equal(t, `{"error":"nothing was written: value is too large: that of \"k\" has 11 bytes, at most 10 are allowed"}`, got.Body.String())
	}
	require.Empty(t, log.String(), "no failure of the store")
}

// TestHandlerStoreFull has a store without room: a repeat is of no use, and the operator learns of it.
func TestHandlerStoreFull(t *testing.T) {
	var log bytes.Buffer
	full := fmt.Errorf("/var/lib/resource.db: %w: no space left on device", resource.ErrNoRoom)
	url := serve(t, failing{resource.NewMemory(), full}, &resource.HandlerOptions{
		Logger:   slog.New(slog.NewTextHandler(&log, nil)),
		Observer: func(resource.Decision) { t.Error("nothing was decided") },
	})
	err := newClient(t, url, nil).Write(t.Context(), "k", five, nil)
	require.ErrorIs(t, err, resource.ErrNoRoom)
	require.ErrorContains(t, err, "507 Insufficient Storage: nothing was changed: the store has no room")
	require.NotContains(t, err.Error(), "/var/lib")
	require.Contains(t, log.String(), "/var/lib/resource.db")
}

// answered is a ResponseWriter that notes when the answer leaves.
type answered struct {
	*httptest.ResponseRecorder
	note func()
}

func (a answered) WriteHeader(status int) {
	a.note()
	a.ResponseRecorder.WriteHeader(status)
}

// TestObserver checks what the Observer is told, and that it's told before the answer leaves.
func TestObserver(t *testing.T) {
	var log []string
	h := newHandler(t, resource.NewMemory(), &resource.HandlerOptions{Observer: func(d resource.Decision) {
		log = append(log, fmt.Sprintf("%s %s at %v, seen %v, accepted %t, enforced %t: %q", d.Op, d.Key, d.Fence, d.Seen, d.Accepted, d.Enforced, d.Value))
	}})
	for _, c := range []struct{ method, token, body string }{
		{"GET", "", ""}, {"GET", "4", ""}, {"PUT", "5", "a"}, {"PUT", "4", "b"}, {"GET", "4", ""}, {"GET", "6", ""}, {"PUT", "6", "c"}, {"GET", "", ""}, {"PUT", "x", ""},
	} {
		r := httptest.NewRequestWithContext(t.Context(), c.method, "/r/k", strings.NewReader(c.body))
		if c.token != "" {
			r.Header.Set(resource.HeaderToken, c.token)
		}
		h.ServeHTTP(answered{httptest.NewRecorder(), func() { log = append(log, "answer") }}, r)
	}
	require.Equal(t, []string{
		`read k at 0.0, seen 0.0, accepted true, enforced false: ""`, "answer",
		`read k at 4.0, seen 0.0, accepted true, enforced true: ""`, "answer",
		`write k at 5, seen 4.0, accepted true, enforced true: "a"`, "answer",
		`write k at 4, seen 5, accepted false, enforced true: "b"`, "answer",
		`read k at 4.0, seen 5, accepted false, enforced true: ""`, "answer",
		`read k at 6.0, seen 5, accepted true, enforced true: "a"`, "answer",
		`write k at 6, seen 6.0, accepted true, enforced true: "c"`, "answer",
		`read k at 0.0, seen 6, accepted true, enforced false: "c"`, "answer",
		"answer", // to the bad request, which decides nothing
	}, log)
}

// repeating is a store that loses the answer to each write and sends it again, as Amazon's clients do.
type repeating struct{ resource.Store }

func (r repeating) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	_ = r.Store.Write(ctx, key, f, value)
	return r.Store.Write(ctx, key, f, value)
}

// TestObserverStoreRepeats has a store that refuses its own writes as applied. The first is accepted; what a client repeats,
// or another value at the same fence, is not.
func TestObserverStoreRepeats(t *testing.T) {
	var told []string
	reg := prometheus.NewRegistry()
	h := newHandler(t, repeating{resource.NewMemory()}, &resource.HandlerOptions{Registerer: reg, Observer: func(d resource.Decision) {
		told = append(told, fmt.Sprintf("%v, seen %v, accepted %t", d.Fence, d.Seen, d.Accepted))
	}})
	for _, c := range []struct {
		token, value string
		status       int
	}{{"5", "a", 200}, {"5", "a", 409}, {"5", "b", 409}, {"4", "a", 409}, {"6", "a", 200}} {
		got := ask(t, h, "PUT", "/r/k", c.value, "X-Fence-Token: "+c.token)
		require.Equal(t, c.status, got.Code, "%s at %s", c.value, c.token)
	}
	require.Equal(t, []string{
		"5, seen 0.0, accepted true", "5, seen 5, accepted false", "5, seen 5, accepted false", "4, seen 5, accepted false",
		"6, seen 5, accepted true",
	}, told)
	page := ask(t, promhttp.HandlerFor(reg, promhttp.HandlerOpts{}), "GET", "/metrics", "").Body.String()
	require.Contains(t, page, "\nresource_writes_accepted_total 2\n")
	require.Contains(t, page, "\nresource_stale_token_rejections_total 3\n")
}

// TestObserverUnfenced checks that the unsafe baseline is told as such.
func TestObserverUnfenced(t *testing.T) {
	var got []resource.Decision
	h := newHandler(t, resource.NewMemory(), &resource.HandlerOptions{Unfenced: true, Observer: func(d resource.Decision) {
		d.Value = bytes.Clone(d.Value)
		got = append(got, d)
	}})
	ask(t, h, "PUT", "/r/k", "new", "X-Fence-Token: 5")
	ask(t, h, "PUT", "/r/k", "late", "X-Fence-Token: 4")
	ask(t, h, "GET", "/r/k", "", "X-Fence-Token: 6")
	five := resource.Fence{Token: 5, Seq: 1}
	require.Equal(t, []resource.Decision{
		{Op: resource.OpWrite, Key: "k", Fence: five, Accepted: true, Value: []byte("new")},
		{Op: resource.OpWrite, Key: "k", Fence: resource.Fence{Token: 4, Seq: 1}, Seen: five, Accepted: true, Value: []byte("late")},
		{Op: resource.OpRead, Key: "k", Fence: resource.Fence{Token: 6}, Seen: five, Accepted: true, Value: []byte("late")},
	}, got)
}

// crowded is a store that counts how many calls are in it at once, and gives others every chance to come in.
type crowded struct {
	resource.Store
	inside, most atomic.Int64
}

func (c *crowded) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	n := c.inside.Add(1)
	defer c.inside.Add(-1)
	if n > c.most.Load() {
		c.most.Store(n)
	}
	for range 100 {
		runtime.Gosched()
	}
	return c.Store.Write(ctx, key, f, value)
}

// TestObserverOneAtATime has many requests to one key at once, of which the store must see one after the other.
func TestObserverOneAtATime(t *testing.T) {
	store := &crowded{Store: resource.NewMemory()}
	h := newHandler(t, store, &resource.HandlerOptions{Observer: func(resource.Decision) {}})
	var wg sync.WaitGroup
	for i := range 100 {
		wg.Go(func() { ask(t, h, "PUT", "/r/k", "", "X-Fence-Token: "+strconv.Itoa(i+1)) })
	}
	wg.Wait()
	require.EqualValues(t, 1, store.most.Load())
}

// TestObserverOrder has many clients on two keys at once: what the Observer hears must be a possible history of each.
func TestObserverOrder(t *testing.T) {
	var mu sync.Mutex
	told := map[string][]resource.Decision{}
	url := serve(t, resource.NewMemory(), &resource.HandlerOptions{Observer: func(d resource.Decision) {
		mu.Lock()
		defer mu.Unlock()
		told[d.Key] = append(told[d.Key], d)
	}})
	c := newClient(t, url, nil)
	const writers = 50
	var wg sync.WaitGroup
	for i := range 2 * writers {
		wg.Go(func() {
			_ = c.Write(t.Context(), "key"+strconv.Itoa(i%2), resource.Fence{Token: uint64(1 + i*37%writers), Seq: uint64(1 + i/writers)}, nil)
		})
	}
	wg.Wait()
	for key, decisions := range told {
		require.Len(t, decisions, writers)
		var seen resource.Fence
		for i, d := range decisions {
			require.Equal(t, seen, d.Seen, "%s, decision %d", key, i)
			require.Equal(t, resource.AdmitsWrite(seen, d.Fence), d.Accepted, "%s, decision %d", key, i)
			seen = seen.Max(d.Fence)
		}
	}
}

// TestObserverClientGone has a client that goes away while its write is decided. The write takes effect, so the
// Observer must be told of it.
func TestObserverClientGone(t *testing.T) {
	store := resource.NewMemory()
	ctx, leave := context.WithCancel(t.Context())
	var told []resource.Decision
	h := newHandler(t, leaving{store, leave}, &resource.HandlerOptions{Observer: func(d resource.Decision) { told = append(told, d) }})
	for range 2 { // the second request finds the client gone before it is decided
		r := httptest.NewRequestWithContext(ctx, http.MethodPut, "/r/k", strings.NewReader("v"))
		r.Header.Set(resource.HeaderToken, "5")
		h.ServeHTTP(httptest.NewRecorder(), r)
	}
	require.Len(t, told, 1)
	require.True(t, told[0].Accepted)
}

// leaving is a store whose caller goes away when a write begins.
type leaving struct {
	resource.Store
	leave func()
}

func (l leaving) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	l.leave()
	return l.Store.Write(ctx, key, f, value)
}

// FuzzTokenHeader checks that a header is either the canonical or a zero-padded decimal, or refused.
func FuzzTokenHeader(f *testing.F) {
	for _, s := range []string{"7", "007", "0", "-1", "+1", "", " 7", "1e3", "18446744073709551615", "18446744073709551616", "٣", "1,2", "0b1"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, token string) {
		h := newHandler(t, resource.NewMemory(), nil)
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPut, "/r/k", nil)
		r.Header[resource.HeaderToken] = []string{token}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		n, err := strconv.ParseUint(strings.TrimLeft(token, "0"), 10, 64)
		valid := err == nil && n > 0 && strings.Trim(token, "0123456789") == ""
		switch {
		case valid && (w.Code != 200 || w.Body.String() != fmt.Sprintf(`{"key":"k","max_fence":%d}`, n)):
			t.Errorf("token %q: got %d %s", token, w.Code, w.Body)
		case !valid && w.Code != 400:
			t.Errorf("token %q: got %d %s, want 400", token, w.Code, w.Body)
		}
	})
}

// FuzzKey checks that a key arrives as it was sent, through the client's escaping and the handler's.
func FuzzKey(f *testing.F) {
	for _, key := range []string{"a", "a/b", "//", "..", ".", "%2F", "a?b#c", "\xff", "", "a b", "ключ", "a\\b"} {
		f.Add(key)
	}
	f.Fuzz(func(t *testing.T, key string) {
		if resource.CheckKey(key) != nil {
			return
		}
		store := resource.NewMemory()
		mux := http.NewServeMux() // which redirects what it wants cleaned
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

// direct is a transport without a network: the request line is written and parsed as it would be on the wire.
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
