package redlock_test

import (
	"context"
	"testing"
	"time"

	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/redlock"
)

// BenchmarkPair compares with redsync, which has no token, on the same five nodes.
func BenchmarkPair(b *testing.B) {
	const ttl = 10 * time.Second
	var clients []redis.UniversalClient
	var pools []redsyncredis.Pool
	for _, s := range servers {
		o, err := redis.ParseURL(s.URL)
		require.NoError(b, err)
		c := redis.NewClient(o)
		b.Cleanup(func() { require.NoError(b, c.Close()) })
		clients, pools = append(clients, c), append(pools, goredis.NewPool(c))
	}
	backend := func(o *redlock.Options) dlock.Backend {
		l, err := redlock.New(clients, o)
		require.NoError(b, err)
		return l
	}
	rs, key := redsync.New(pools...), "bench/"+uuid.NewString()
	unsafe := backend(&redlock.Options{UnsafeCounters: true}) // as many round trips as redsync
	b.Cleanup(func() { require.NoError(b, unsafe.Close()) })
	locktest.Compare(b, locktest.Pair{Name: "Redsync", Do: func(ctx context.Context) error {
		m := rs.NewMutex(key, redsync.WithExpiry(ttl))
		if err := m.LockContext(ctx); err != nil {
			return err
		}
		_, err := m.UnlockContext(ctx)
		return err
	}}, func() dlock.Backend { return backend(nil) }, locktest.Pair{Name: "UnsafeCounters", Do: func(ctx context.Context) error {
		g, err := unsafe.Acquire(ctx, locktest.Next(key+"unsafe", ttl))
		if err != nil {
			return err
		}
		return unsafe.Release(ctx, g)
	}})
}
