// Package testmain runs a package's tests on servers that they share.
package testmain

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"go.uber.org/goleak"

	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// startTimeout is for images to be pulled.
const startTimeout = 5 * time.Minute

// Start starts what tests need: servers, or what is to be in them.
type Start func(ctx context.Context) (io.Closer, error)

// Run starts what the tests of m, a *testing.M, need, in order, runs them, and exits. Tests that pass and leave goroutines behind
// fail. Where this machine has no such server, none of the tests runs, and that is no failure unless [testbed.Strict].
func Run(m interface{ Run() int }, starts ...Start) {
	redisclient.Silence()
	log.SetOutput(io.Discard) // go-redis's pool logs connections that the tests break
	os.Exit(run(m, starts))
}

func run(m interface{ Run() int }, starts []Start) (code int) {
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

// patience is how long goroutines get to end that are about to. goleak itself gives them less than half a second, and a thread
// can stand still for longer than that on a machine with other work.
var patience = time.Minute

// FindLeaks returns an error if there are goroutines that don't end. net/http dials in one that no Close ends: to a container that
// was killed it tries until the kernel gives up. A connection of go-zookeeper 1.0.4 hangs for ever if it breaks in the very moment in
// which it sets its watches again: two answers go to a channel with room for one.
func FindLeaks(options ...goleak.Option) error {
	options = append(options, goleak.IgnoreAnyFunction("net/http.(*Transport).dialConn"),
		goleak.IgnoreAnyFunction("github.com/go-zookeeper/zk.(*Conn).flushRequests"))
	for began := time.Now(); ; {
		if err := goleak.Find(options...); err == nil || time.Since(began) > patience {
			return err
		}
	}
}

// Server starts one server with start and options o, and stores it in s.
func Server(s **testbed.Server, start func(context.Context, *testbed.Options) (*testbed.Server, error), o *testbed.Options) Start {
	return func(ctx context.Context) (_ io.Closer, err error) {
		*s, err = start(ctx, o)
		return *s, err
	}
}

// Redis starts a Redis, or an imitation of it where there is none, and stores it in s.
func Redis(s **testbed.Server) Start {
	return Server(s, testbed.StartRedis, &testbed.Options{AllowEmbedded: true})
}

// Cluster starts n members of a cluster.
func Cluster(
	c **testbed.Cluster, start func(ctx context.Context, n int, o *testbed.Options) (*testbed.Cluster, error), n int, o *testbed.Options,
) Start {
	return func(ctx context.Context) (_ io.Closer, err error) {
		*c, err = start(ctx, n, o)
		return *c, err
	}
}

// Prepare calls f, on servers that are there.
func Prepare(f func(ctx context.Context) error) Start {
	return func(ctx context.Context) (io.Closer, error) { return io.NopCloser(nil), f(ctx) }
}
