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
	"github.com/fencelab/fencelab/dlock/redlock"
)

const benchTTL = 10 * time.Second

// BenchmarkPair is the time and the allocations of taking a free lock and giving it back, on the same five nodes. redsync is the
// yardstick, and has no token.
func BenchmarkPair(b *testing.B) {
	var clients []redis.UniversalClient
	var pools []redsyncredis.Pool
	for _, s := range servers {
		o, err := redis.ParseURL(s.URL)
		require.NoError(b, err)
		c := redis.NewClient(o)
		defer func() { require.NoError(b, c.Close()) }()
		clients, pools = append(clients, c), append(pools, goredis.NewPool(c))
	}
	rs := redsync.New(pools...)
	pair := func(o *redlock.Options) func(ctx context.Context, key string) error {
		l, err := redlock.New(clients, o)
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, l.Close()) })
		return func(ctx context.Context, key string) error {
			g, err := l.Acquire(ctx, dlock.Request{Key: key, Owner: uuid.NewString(), TTL: benchTTL})
			if err != nil {
				return err
			}
			return l.Release(ctx, g)
		}
	}
	for _, lock := range []struct {
		name string
		pair func(ctx context.Context, key string) error
	}{
		{"Redsync", func(ctx context.Context, key string) error {
			m := rs.NewMutex(key, redsync.WithExpiry(benchTTL))
			if err := m.LockContext(ctx); err != nil {
				return err
			}
			_, err := m.UnlockContext(ctx)
			return err
		}},
		{"UnsafeCounters", pair(&redlock.Options{UnsafeCounters: true})}, // as many round trips as redsync
		{"Redlock", pair(nil)},
	} {
		b.Run(lock.name, func(b *testing.B) {
			key := "bench/" + uuid.NewString()
			b.ReportAllocs()
			for b.Loop() {
				if err := lock.pair(context.Background(), key); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
