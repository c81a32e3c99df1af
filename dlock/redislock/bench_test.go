package redislock_test

import (
	"context"
	"math/rand/v2"
	"slices"
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
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// BenchmarkPair takes and releases a free lock over one connection: by two plain commands (no token, and a release that doesn't
// compare the owner), and by libraries. It alternates them, so that a busy machine slows all alike, and reports medians (SetDel's
// in µs, the others' as multiples of it) and allocations.
func BenchmarkPair(b *testing.B) {
	testbed.Need(b, server.Real())
	const ttl = 10 * time.Second
	client := func() *redis.Client {
		o, err := redis.ParseURL(server.URL)
		require.NoError(b, err)
		o.PoolSize = 1
		c := redis.NewClient(o)
		b.Cleanup(func() { require.NoError(b, c.Close()) })
		return c
	}
	backend := func() *redislock.Backend {
		l, err := redislock.New(client(), nil)
		require.NoError(b, err)
		return l
	}
	locked := func(key string) func(context.Context) error {
		l, err := dlock.New(backend(), &dlock.Options{TTL: ttl})
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, l.Close()) })
		return func(ctx context.Context) error {
			h, err := l.Acquire(ctx, key)
			if err != nil {
				return err
			}
			return h.Release(ctx)
		}
	}
	raw, bare, key := client(), backend(), "bench/"+uuid.NewString()
	b.Cleanup(func() { require.NoError(b, bare.Close()) })
	withDeadline := locked(key + "deadline")
	rs, other := redsync.New(goredis.NewPool(client())), bsm.New(client())
	all := []struct {
		name string
		do   func(ctx context.Context) error
	}{{"SetDel", func(ctx context.Context) error {
		if err := raw.SetArgs(ctx, key, "owner", redis.SetArgs{Mode: "NX", TTL: ttl}).Err(); err != nil {
			return err
		}
		return raw.Del(ctx, key).Err()
	}}, {"Backend", func(ctx context.Context) error {
		g, err := bare.Acquire(ctx, locktest.Next(key+"bare", ttl))
		if err != nil {
			return err
		}
		return bare.Release(ctx, g)
	}}, {"Locker", locked(key + "locker")}, {"LockerDeadline", func(ctx context.Context) error {
		ctx, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		return withDeadline(ctx)
	}}, {"Redsync", func(ctx context.Context) error {
		m := rs.NewMutex(key+"redsync", redsync.WithExpiry(ttl))
		if err := m.LockContext(ctx); err != nil {
			return err
		}
		_, err := m.UnlockContext(ctx)
		return err
	}}, {"BsmRedislock", func(ctx context.Context) error {
		h, err := other.Obtain(ctx, key+"bsm", ttl, nil)
		if err != nil {
			return err
		}
		return h.Release(ctx)
	}}}
	times, ctx := make([][]time.Duration, len(all)), context.WithoutCancel(b.Context()) // a Locker needn't watch it
	for b.Loop() {
		for _, i := range rand.Perm(len(all)) { // the one after a slow one pays for it
			began := time.Now()
			require.NoError(b, all[i].do(ctx))
			times[i] = append(times[i], time.Since(began))
		}
	}
	b.ReportMetric(0, "ns/op") // the sum of all
	var yard float64
	for i, p := range all {
		slices.Sort(times[i])
		if median := float64(times[i][len(times[i])/2]); i == 0 {
			yard = median
			b.ReportMetric(yard/1e3, "µs-"+p.name)
		} else {
			b.ReportMetric(median/yard, "x-"+p.name)
		}
		b.ReportMetric(testing.AllocsPerRun(100, func() { _ = p.do(ctx) }), "allocs-"+p.name)
	}
}
