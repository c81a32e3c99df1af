package redlock_test

import (
	"context"
	"fmt"
	"slices"
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

// contestant takes a free lock and gives it back.
type contestant struct {
	name string
	pair func(ctx context.Context) error
}

// contestants are ways to do so on the same five nodes. The first is the yardstick, and has no token.
func contestants(b *testing.B) []contestant {
	b.Helper()
	clients := func() []redis.UniversalClient {
		cs := make([]redis.UniversalClient, len(servers))
		for i, s := range servers {
			o, err := redis.ParseURL(s.URL)
			require.NoError(b, err)
			c := redis.NewClient(o)
			b.Cleanup(func() { require.NoError(b, c.Close()) })
			cs[i] = c
		}
		return cs
	}
	backend := func(o *redlock.Options) *redlock.Backend {
		l, err := redlock.New(clients(), o)
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, l.Close()) })
		return l
	}
	pair := func(l *redlock.Backend) func(ctx context.Context) error {
		key := "bench/" + uuid.NewString()
		return func(ctx context.Context) error {
			g, err := l.Acquire(ctx, dlock.Request{Key: key, Owner: uuid.NewString(), TTL: benchTTL})
			if err != nil {
				return err
			}
			return l.Release(ctx, g)
		}
	}
	pools := make([]redsyncredis.Pool, len(servers))
	for i, c := range clients() {
		pools[i] = goredis.NewPool(c)
	}
	rs, rsKey := redsync.New(pools...), "bench/"+uuid.NewString()
	locker, err := dlock.New(backend(nil), &dlock.Options{TTL: benchTTL})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, locker.Close()) })
	lockerKey := "bench/" + uuid.NewString()
	return []contestant{
		{"Redsync", func(ctx context.Context) error {
			m := rs.NewMutex(rsKey, redsync.WithExpiry(benchTTL))
			if err := m.LockContext(ctx); err != nil {
				return err
			}
			_, err := m.UnlockContext(ctx)
			return err
		}},
		{"UnsafeCounters", pair(backend(&redlock.Options{UnsafeCounters: true}))}, // as many round trips as redsync
		{"Redlock", pair(backend(nil))},
		{"Locker", func(ctx context.Context) error {
			h, err := locker.Acquire(ctx, lockerKey)
			if err != nil {
				return err
			}
			return h.Release(ctx)
		}},
	}
}

// BenchmarkPair is the time and the allocations of taking a free lock and giving it back.
func BenchmarkPair(b *testing.B) {
	for _, c := range contestants(b) {
		b.Run(c.name, func(b *testing.B) {
			ctx := context.Background()
			b.ReportAllocs()
			for b.Loop() {
				if err := c.pair(ctx); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// BenchmarkRatio takes turns, so that a machine that is busy with other things is busy for all, and reports medians: of
// the first in µs, of the others as multiples of it.
func BenchmarkRatio(b *testing.B) {
	all := contestants(b)
	ctx := context.Background()
	times := make([][]time.Duration, len(all))
	for b.Loop() {
		for i, c := range all {
			began := time.Now()
			if err := c.pair(ctx); err != nil {
				b.Fatal(err)
			}
			times[i] = append(times[i], time.Since(began))
		}
	}
	median := func(i int) float64 {
		slices.Sort(times[i])
		return float64(times[i][len(times[i])/2])
	}
	yard := median(0)
	b.ReportMetric(0, "ns/op") // of all together: of no use
	b.ReportMetric(yard/1e3, "µs-"+all[0].name)
	for i, c := range all[1:] {
		b.ReportMetric(median(i+1)/yard, fmt.Sprintf("x-%s", c.name))
	}
}
