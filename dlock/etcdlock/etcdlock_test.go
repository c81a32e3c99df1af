package etcdlock_test

import (
	"errors"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/etcdlock"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// shortTTL is exact although etcd counts in seconds: a session lasts longer.
const shortTTL = 200 * time.Millisecond

func TestConformance(t *testing.T) {
	t.Run("one", func(t *testing.T) { dlocktest.Run(t, harness(one, etcdBackend)) })
	t.Run("three", func(t *testing.T) { dlocktest.Run(t, harness(three, etcdBackend)) })
}

func harness(c *testbed.Cluster, open func(*testing.T, *clientv3.Client) dlock.Backend) dlocktest.Harness {
	return dlocktest.Harness{ShortTTL: shortTTL, New: func(t *testing.T) dlocktest.Service {
		return dlocktest.Service{
			Backend: func() dlock.Backend { return open(t, client(t, c, newLink())) },
			Faulty: func() (dlock.Backend, dlocktest.Link) {
				l := newLink()
				b := open(t, client(t, c, l))
				for _, ttl := range []time.Duration{shortTTL, time.Hour} {
					if _, own := b.(*etcdlock.Backend); !own {
						break
					} // so that a fault meets a claim and not the start of its session
					r := request(ttl)
					g, err := b.TryAcquire(t.Context(), r)
					require.NoError(t, err)
					if err := b.Release(t.Context(), g); !errors.Is(err, dlock.ErrLost) { // it may have run out
						require.NoError(t, err)
					}
				}
				return b, l.faults()
			},
		}
	}}
}

func etcdBackend(t *testing.T, c *clientv3.Client) dlock.Backend {
	t.Helper()
	return newBackend(t, c, &etcdlock.Options{FollowLeader: true})
}

func newBackend(t *testing.T, c *clientv3.Client, o *etcdlock.Options) *etcdlock.Backend {
	t.Helper()
	b, err := etcdlock.New(c, o)
	require.NoError(t, err)
	return b
}

// client returns a client over l with the library's defaults, except that it gives up soon.
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

func request(ttl time.Duration) dlock.Request {
	return dlock.Request{Key: "test/" + uuid.NewString(), Owner: uuid.NewString(), TTL: ttl}
}
