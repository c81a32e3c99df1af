// Package testmain starts servers for a package's tests, or for one test.
package testmain

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

const startTimeout = 5 * time.Minute

// Start starts what tests need: servers, or data in them.
type Start func(ctx context.Context) (io.Closer, error)

// Run calls starts, runs the tests of m, a *testing.M, and exits. It fails if passing tests leak goroutines. If this machine
// lacks a server, no test runs: a failure only if [testbed.Strict].
func Run(m interface{ Run() int }, starts ...Start) { os.Exit(Code(m, starts...)) }

// Code is [Run], but returns the exit code.
func Code(m interface{ Run() int }, starts ...Start) (code int) {
	redisclient.Silence()
	log.SetOutput(io.Discard) // go-redis's pool logs connections that the tests break
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	fail := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	for _, start := range starts {
		started, err := start(ctx)
		if missing, ok := errors.AsType[*testbed.MissingError](err); ok && !testbed.Strict() {
			fmt.Printf("no tests were run: no %s here: %s\n", missing.Server, missing.Get)
			return 0
		}
		if err != nil {
			fail(err)
			return code
		}
		defer func() { fail(started.Close()) }()
	}
	before := goleak.IgnoreCurrent() // the servers'
	if code = m.Run(); code == 0 {
		fail(FindLeaks(before))
	}
	return code
}

// patience: goleak's half a second is too short on a loaded machine.
var patience = time.Minute

// FindLeaks returns an error if goroutines remain, except two: net/http dialing a killed container, and a go-zookeeper 1.0.4
// connection that broke while setting its watches again: two replies go to a channel of capacity 1.
func FindLeaks(options ...goleak.Option) error {
	options = append(options, goleak.IgnoreAnyFunction("net/http.(*Transport).dialConn"),
		goleak.IgnoreAnyFunction("github.com/go-zookeeper/zk.(*Conn).flushRequests"))
	for began := time.Now(); ; {
		if err := goleak.Find(options...); err == nil || time.Since(began) > patience {
			return err
		}
	}
}

// Server stores a server in s.
func Server(s **testbed.Server, start func(context.Context, *testbed.Options) (*testbed.Server, error), o *testbed.Options) Start {
	return func(ctx context.Context) (_ io.Closer, err error) {
		*s, err = start(ctx, o)
		return *s, err
	}
}

// Redis stores a Redis, or an imitation, in s.
func Redis(s **testbed.Server) Start {
	return Server(s, testbed.StartRedis, &testbed.Options{AllowEmbedded: true})
}

// Cluster stores a cluster of n members in c.
func Cluster(
	c **testbed.Cluster, start func(ctx context.Context, n int, o *testbed.Options) (*testbed.Cluster, error), n int, o *testbed.Options,
) Start {
	return func(ctx context.Context) (_ io.Closer, err error) {
		*c, err = start(ctx, n, o)
		return *c, err
	}
}

// Prepare calls f.
func Prepare(f func(ctx context.Context) error) Start {
	return func(ctx context.Context) (io.Closer, error) { return io.NopCloser(nil), f(ctx) }
}

// Resource serves a store for one test.
func Resource(tb testing.TB, store resource.Store, o *resource.HandlerOptions) (url string) {
	tb.Helper()
	h, err := resource.NewHandler(store, o)
	require.NoError(tb, err)
	s := httptest.NewServer(h)
	tb.Cleanup(s.Close)
	return s.URL
}

// Get returns the status and the body of a page.
func Get(tb testing.TB, url string) (status int, body string) {
	tb.Helper()
	req, err := http.NewRequestWithContext(tb.Context(), http.MethodGet, url, nil)
	require.NoError(tb, err)
	resp, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
	require.NoError(tb, err)
	b, err := io.ReadAll(resp.Body)
	require.NoError(tb, errors.Join(err, resp.Body.Close()))
	return resp.StatusCode, string(b)
}
