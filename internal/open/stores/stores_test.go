package stores_test

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/open/onaws"
	"github.com/fencelab/fencelab/internal/open/stores"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func TestMain(m *testing.M) {
	testmain.Run(m)
}

var servers = map[string]func(t *testing.T) string{
	stores.HTTP: func(t *testing.T) string {
		t.Helper()
		return testmain.Resource(t, resource.NewMemory(), nil)
	},
	stores.Postgres: func(t *testing.T) string { t.Helper(); return serve(t, testbed.StartPostgres).URL },
	stores.Redis:    func(t *testing.T) string { t.Helper(); return serve(t, testbed.StartRedis).URL },
	stores.S3: func(t *testing.T) string {
		t.Helper()
		return onaws.On(stores.S3, "bucket", serve(t, testbed.StartS3).URL)
	},
	stores.DynamoDB: func(t *testing.T) string {
		t.Helper()
		return onaws.On(stores.DynamoDB, "table", serve(t, testbed.StartDynamoDB).URL)
	},
}

func serve(t *testing.T, start func(context.Context, *testbed.Options) (*testbed.Server, error)) *testbed.Server {
	t.Helper()
	return testmain.Serve(t, start, &testbed.Options{AllowEmbedded: true})
}

func everyStore(t *testing.T, f func(t *testing.T, addr string, s *stores.Store)) {
	t.Helper()
	for _, name := range stores.Names() {
		t.Run(name, func(t *testing.T) {
			addr := servers[name](t)
			s, err := stores.Open(t.Context(), addr, stores.Options{})
			require.NoError(t, err)
			defer func() { require.NoError(t, s.Close()) }()
			require.Equal(t, name, s.Name)
			f(t, addr, s)
		})
	}
}

func at(token uint64) resource.Fence { return resource.Fence{Token: token, Seq: 1} }

// A store fences, except in WriteUnfenced, and opens existing data.
func TestOpen(t *testing.T) {
	everyStore(t, func(t *testing.T, addr string, s *stores.Store) {
		ctx := t.Context()
		require.NoError(t, s.Write(ctx, "k", at(2), []byte("two")))
		for _, o := range []stores.Options{{}, {Prepared: true}, {Fresh: true, Prepared: true}} {
			again, err := stores.Open(ctx, addr, o)
			require.NoError(t, err)
			var stale *resource.StaleTokenError
			require.ErrorAs(t, again.Write(ctx, "k", at(1), []byte("one")), &stale, "%+v", o)
			rec, err := again.Read(ctx, "k")
			require.NoError(t, err)
			require.Equal(t, resource.Record{Value: []byte("two"), MaxFence: at(2)}, rec)
			require.NoError(t, again.Close())
		}
		err := s.WriteUnfenced(ctx, "k", []byte("one"))
		if s.Name == stores.HTTP {
			require.Error(t, err, "it demands a token")
			return
		}
		require.NoError(t, err)
		rec, err := s.Read(ctx, "k")
		require.NoError(t, err)
		require.Equal(t, "one", string(rec.Value))
	})
}

// relay counts connections and round trips.
type relay struct {
	net.Listener
	to string
	wg sync.WaitGroup

	mu     sync.Mutex
	opened int
	trips  int // from client to server
	spoke  bool
}

func newRelay(t *testing.T, to string) *relay {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	r := &relay{Listener: l, to: to}
	r.wg.Go(func() {
		for {
			c, err := r.Accept()
			if err != nil {
				return
			}
			r.wg.Go(func() { r.serve(c) })
		}
	})
	t.Cleanup(func() {
		require.NoError(t, r.Close())
		r.wg.Wait()
	})
	return r
}

func (r *relay) serve(client net.Conn) {
	defer func() { _ = client.Close() }()
	server, err := new(net.Dialer).DialContext(context.Background(), "tcp", r.to)
	if err != nil {
		return
	}
	r.mu.Lock()
	r.opened++
	r.mu.Unlock()
	var wg sync.WaitGroup
	pass := func(from, to net.Conn, isClient bool) {
		defer func() { _ = to.Close() }()
		b := make([]byte, 64<<10)
		for {
			n, err := from.Read(b)
			if err != nil {
				return
			}
			r.heard(isClient)
			if _, err := to.Write(b[:n]); err != nil {
				return
			}
		}
	}
	wg.Go(func() { pass(server, client, false) })
	pass(client, server, true)
	wg.Wait()
}

func (r *relay) heard(client bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if client && !r.spoke {
		r.trips++
	}
	r.spoke = client
}

func (r *relay) counts(t *testing.T, f func() error) (opened, trips int) {
	t.Helper()
	r.mu.Lock()
	opened, trips = r.opened, r.trips
	r.mu.Unlock()
	require.NoError(t, f())
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.opened - opened, r.trips - trips
}

func through(t *testing.T, addr string, o stores.Options) (*relay, *stores.Store) {
	t.Helper()
	u, err := url.Parse(addr)
	require.NoError(t, err)
	to := u.Host
	if endpoint := u.Query().Get("endpoint"); endpoint != "" {
		_, to, _ = strings.Cut(endpoint, "://")
	}
	r := newRelay(t, to)
	s, err := stores.Open(t.Context(), strings.Replace(addr, to, r.Addr().String(), 1), o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return r, s
}

// Otherwise a slow network could hold something other than the write.
func TestAWriteIsOneTrip(t *testing.T) {
	everyStore(t, func(t *testing.T, addr string, direct *stores.Store) {
		ctx := t.Context()
		if direct.Name != stores.HTTP {
			require.NoError(t, direct.WriteUnfenced(ctx, "k", []byte{}))
		}
		require.NoError(t, direct.Write(ctx, "other", at(1), nil)) // Redis now has the script
		r, s := through(t, addr, stores.Options{Prepared: true})
		_, err := s.Read(ctx, "k")
		if err != nil {
			require.ErrorIs(t, err, resource.ErrNotFound)
		}
		for i, write := range []func() error{
			func() error { return s.Write(ctx, "k", at(1), []byte("one")) },
			func() error { return s.Write(ctx, "k", at(2), []byte("two")) },
			func() error { return s.WriteUnfenced(ctx, "k", []byte("three")) },
		} {
			if i == 2 && s.Name == stores.HTTP {
				break // it has no unfenced writes by default
			}
			if i == 1 && s.Name == stores.Postgres {
				time.Sleep(1100 * time.Millisecond) // by default the pool pings a connection that was idle for a second
			}
			opened, trips := r.counts(t, write)
			require.Equal(t, 1, trips, "round trips of write %d", i+1)
			if s.Name == stores.Postgres || s.Name == stores.Redis { // a new HTTP connection has no greeting
				require.Zero(t, opened, "connections for write %d", i+1)
			}
		}
	})
}

func TestAWriteIsSentOnce(t *testing.T) {
	for name, addr := range map[string]string{
		stores.HTTP: "http://%s", stores.S3: "s3://id:secret@name?endpoint=http://%s", stores.DynamoDB: "dynamodb://id:secret@name?endpoint=http://%s",
	} {
		t.Run(name, func(t *testing.T) {
			var writes atomic.Int32
			s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodGet { // for S3: no such object
					w.WriteHeader(http.StatusNotFound)
					_, _ = io.WriteString(w, "<Error><Code>NoSuchKey</Code></Error>")
					return
				}
				writes.Add(1)
				_, _ = io.Copy(io.Discard, r.Body)
				if c, _, err := http.NewResponseController(w).Hijack(); err == nil {
					_ = c.Close()
				}
			}))
			t.Cleanup(s.Close)
			store, err := stores.Open(t.Context(), fmt.Sprintf(addr, s.Listener.Addr()), stores.Options{Prepared: true})
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, store.Close()) })
			require.Error(t, store.WriteUnfenced(t.Context(), "k", []byte("v")))
			require.EqualValues(t, 1, writes.Load())
			require.Error(t, store.Write(t.Context(), "k", at(1), []byte("v")))
			require.EqualValues(t, 2, writes.Load())
		})
	}
}

// Over HTTP/2 the default transport sends some writes twice.
func TestHTTP1(t *testing.T) {
	h, err := resource.NewHandler(resource.NewMemory(), nil)
	require.NoError(t, err)
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
	s, err := stores.Open(t.Context(), srv.URL, stores.Options{})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	require.NoError(t, s.Write(t.Context(), "k", at(1), []byte("v")))
	require.Equal(t, "HTTP/1.1", proto)
}

func TestFresh(t *testing.T) {
	everyStore(t, func(t *testing.T, addr string, _ *stores.Store) {
		r, s := through(t, addr, stores.Options{Prepared: true, Fresh: true})
		require.NoError(t, s.Write(t.Context(), "k", at(1), []byte("one")))
		for range 2 {
			opened, _ := r.counts(t, func() error { _, err := s.Read(t.Context(), "k"); return err })
			require.Equal(t, 1, opened)
		}
	})
}

func TestOpenRefuses(t *testing.T) {
	for _, name := range []string{"AWS_ACCESS_KEY_ID", "AWS_PROFILE"} {
		t.Setenv(name, "")
	}
	t.Setenv("AWS_CONFIG_FILE", os.DevNull)
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", os.DevNull)
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	const secret = "hunter2"
	for addr, want := range map[string]string{
		"redis": `unknown URL scheme ""; use one of http://HOST:PORT`,
		"s3+http://id:" + secret + "@host/bucket":       `unknown URL scheme "s3+http"`,
		"s3://id:" + secret + "@/?region=here":          "the s3 address is not of the form s3://[ID:SECRET@]NAME?endpoint=URL&region=NAME",
		"s3://id:" + secret + "@bucket?end=here":        "the s3 address is not of the form",
		"dynamodb://id:" + secret + "@table/prefix":     "the dynamodb address is not of the form",
		"s3://b?endpoint=http://u:" + secret + "@h":     "the endpoint of s3 is not of the form http://HOST:PORT",
		"s3://id:" + secret + "@b?endpoint=h:1":         "the endpoint of s3 is not of the form http://HOST:PORT",
		"s3://bucket?endpoint=http://host":              "there are no credentials for s3://bucket?endpoint=http://host: put them into the address, or set AWS_ACCESS_KEY_ID",
		"dynamodb://table":                              "there are no credentials",
		"postgres://u:" + secret + "@host:port/db":      "the address is not a URL",
		"postgres://h/db?sslmode=zz&password=" + secret: "not a postgres:// URL",
		"http://host:1/?q":                              "is not of the form http://host:port",
	} {
		s, err := stores.Open(t.Context(), addr, stores.Options{})
		require.ErrorContains(t, err, want, addr)
		require.NotContains(t, err.Error()+stores.Redacted(addr), secret)
		require.Nil(t, s)
	}
}
