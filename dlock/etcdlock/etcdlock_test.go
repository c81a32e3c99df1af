package etcdlock_test

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/etcdlock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// shortTTL is exact although etcd counts in seconds: a session lasts longer.
const shortTTL = 200 * time.Millisecond

func TestConformance(t *testing.T) {
	t.Run("one", func(t *testing.T) { dlocktest.Run(t, harness(one)) })
	t.Run("three", func(t *testing.T) { dlocktest.Run(t, harness(three)) })
}

func harness(c *testbed.Cluster) dlocktest.Harness {
	// clientv3 retries only what was not sent.
	return dlocktest.Harness{ShortTTL: shortTTL, NoRepeats: true, New: func(t *testing.T) dlocktest.Service {
		var mu sync.Mutex
		var links []*link
		return dlocktest.Service{
			Backend: func() dlock.Backend {
				l := newLink()
				mu.Lock()
				defer mu.Unlock()
				links = append(links, l)
				return newBackend(t, client(t, c, l), nil)
			},
			Requests: func() (n int) {
				mu.Lock()
				defer mu.Unlock()
				for _, l := range links {
					n += l.requests()
				}
				return n
			},
			Faulty: func() (dlock.Backend, dlocktest.Link) {
				l := newLink()
				b := newBackend(t, client(t, c, l), nil)
				for _, ttl := range []time.Duration{shortTTL, time.Hour} {
					r := locktest.Request(ttl) // a fault must hit a claim, not the start of its session
					g, err := b.TryAcquire(t.Context(), r)
					require.NoError(t, err)
					if err := b.Release(t.Context(), g); !errors.Is(err, dlock.ErrLost) { // it may have expired
						require.NoError(t, err)
					}
				}
				return b, l.faults()
			},
		}
	}}
}

func newBackend(tb testing.TB, c *clientv3.Client, o *etcdlock.Options) *etcdlock.Backend {
	tb.Helper()
	b, err := etcdlock.New(c, o)
	require.NoError(tb, err)
	return b
}

func client(tb testing.TB, c *testbed.Cluster, l *link, set ...func(*clientv3.Config)) *clientv3.Client {
	tb.Helper()
	cfg := clientv3.Config{
		Endpoints:       c.Addrs(),
		Logger:          zap.NewNop(),
		MaxUnaryRetries: 3,
		DialOptions: []grpc.DialOption{
			grpc.WithChainUnaryInterceptor(l.unary), grpc.WithChainStreamInterceptor(l.stream),
		},
	}
	for _, f := range set {
		f(&cfg)
	}
	cl, err := clientv3.New(cfg)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, cl.Close()) })
	return cl
}
