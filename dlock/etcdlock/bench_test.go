package etcdlock_test

import (
	"context"
	"testing"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
)

// BenchmarkPair compares with what two commits cost, and with etcd's own Mutex. For many contenders see cmd/contend.
func BenchmarkPair(b *testing.B) {
	client := func() *clientv3.Client {
		c, err := clientv3.New(clientv3.Config{Endpoints: one.Addrs(), Logger: zap.NewNop()})
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, c.Close()) })
		return c
	}
	raw, name := client(), "bench/"+uuid.NewString()
	s, err := concurrency.NewSession(client(), concurrency.WithTTL(10))
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, s.Close()) })
	m := concurrency.NewMutex(s, name+"mutex")
	locktest.Compare(b, locktest.Pair{Name: "PutDelete", Do: func(ctx context.Context) error {
		if _, err := raw.Put(ctx, name, ""); err != nil {
			return err
		}
		_, err := raw.Delete(ctx, name)
		return err
	}}, func() dlock.Backend { return newBackend(b, client(), nil) }, locktest.Pair{Name: "Mutex", Do: func(ctx context.Context) error {
		if err := m.Lock(ctx); err != nil {
			return err
		}
		return m.Unlock(ctx)
	}})
}
