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
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/redislock"
)

// BenchmarkPair compares with two plain commands (no token, and a release that doesn't compare the owner), and with other
// libraries, over one connection each.
func BenchmarkPair(b *testing.B) {
	const ttl = 10 * time.Second
	client := func() *redis.Client {
		o, err := redis.ParseURL(server.URL)
		require.NoError(b, err)
		o.PoolSize = 1
		c := redis.NewClient(o)
		b.Cleanup(func() { require.NoError(b, c.Close()) })
		return c
	}
	backend := func() dlock.Backend {
		l, err := redislock.New(client(), nil)
		require.NoError(b, err)
		return l
	}
	raw, key := client(), "bench/"+uuid.NewString()
	l, err := dlock.New(backend(), &dlock.Options{TTL: ttl})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, l.Close()) })
	rs, other := redsync.New(goredis.NewPool(client())), bsm.New(client())
	locktest.Compare(b, locktest.Pair{Name: "SetDel", Do: func(ctx context.Context) error {
		if err := raw.SetArgs(ctx, key, "owner", redis.SetArgs{Mode: "NX", TTL: ttl}).Err(); err != nil {
			return err
		}
		return raw.Del(ctx, key).Err()
	}}, backend, locktest.Pair{Name: "LockerDeadline", Do: func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		h, err := l.Acquire(ctx, key+"deadline")
		if err != nil {
			return err
		}
		return h.Release(ctx)
	}}, locktest.Pair{Name: "Redsync", Do: func(ctx context.Context) error {
		m := rs.NewMutex(key+"redsync", redsync.WithExpiry(ttl))
		if err := m.LockContext(ctx); err != nil {
			return err
		}
		_, err := m.UnlockContext(ctx)
		return err
	}}, locktest.Pair{Name: "BsmRedislock", Do: func(ctx context.Context) error {
		h, err := other.Obtain(ctx, key+"bsm", ttl, nil)
		if err != nil {
			return err
		}
		return h.Release(ctx)
	}})
}
