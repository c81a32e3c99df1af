package redislock_test

import (
	"context"
	"testing"
	"time"

	bsm "github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redislock"
)

const benchTTL = 10 * time.Second

func lockAndUnlock(ctx context.Context, l *dlock.Locker, key string) error {
	h, err := l.Acquire(ctx, key)
	if err != nil {
		return err
	}
	return h.Release(ctx)
}

// BenchmarkPair is the time and the allocations of taking a free lock and giving it back over one connection. SetDel is the
// yardstick: two plain commands, no token, and a release that doesn't compare the owner.
func BenchmarkPair(b *testing.B) {
	o, err := redis.ParseURL(server.URL)
	require.NoError(b, err)
	o.PoolSize = 1
	c := redis.NewClient(o)
	defer func() { require.NoError(b, c.Close()) }()
	backend, err := redislock.New(c, nil)
	require.NoError(b, err)
	l, err := dlock.New(backend, &dlock.Options{TTL: benchTTL})
	require.NoError(b, err)
	defer func() { require.NoError(b, l.Close()) }()
	rs, other := redsync.New(goredis.NewPool(c)), bsm.New(c)
	for _, lock := range []struct {
		name string
		pair func(ctx context.Context, key string) error
	}{
		{"SetDel", func(ctx context.Context, key string) error {
			if err := c.SetArgs(ctx, key, "owner", redis.SetArgs{Mode: "NX", TTL: benchTTL}).Err(); err != nil {
				return err
			}
			return c.Del(ctx, key).Err()
		}},
		{"Scripts", func(ctx context.Context, key string) error { // the Backend alone: two scripts, and the token
			g, err := backend.TryAcquire(ctx, dlock.Request{Key: key, Owner: "owner", TTL: benchTTL})
			if err != nil {
				return err
			}
			return backend.Release(ctx, g)
		}},
		{"Locker", func(ctx context.Context, key string) error { return lockAndUnlock(ctx, l, key) }},
		{"LockerDeadline", func(ctx context.Context, key string) error {
			ctx, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			return lockAndUnlock(ctx, l, key)
		}},
		{"Redsync", func(ctx context.Context, key string) error {
			m := rs.NewMutex(key, redsync.WithExpiry(benchTTL))
			if err := m.LockContext(ctx); err != nil {
				return err
			}
			_, err := m.UnlockContext(ctx)
			return err
		}},
		{"BsmRedislock", func(ctx context.Context, key string) error {
			h, err := other.Obtain(ctx, key, benchTTL, nil)
			if err != nil {
				return err
			}
			return h.Release(ctx)
		}},
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
