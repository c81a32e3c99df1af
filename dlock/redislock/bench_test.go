package redislock_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
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

// contestant takes a free lock and gives it back.
type contestant struct {
	name string
	pair func(ctx context.Context) error
}

// contestants are ways to do so on one connection each. The first is the yardstick: two plain commands, no token, and a
// release that doesn't look whose lock it is.
func contestants(b *testing.B) []contestant {
	b.Helper()
	client := func() *redis.Client {
		o, err := redis.ParseURL(server.URL)
		require.NoError(b, err)
		o.PoolSize = 1
		c := redis.NewClient(o)
		b.Cleanup(func() { require.NoError(b, c.Close()) })
		return c
	}
	key := func(name string) string { return "bench/" + name + "/" + uuid.NewString() }

	raw, rawKey := client(), key("raw")
	script, err := redislock.New(client(), nil)
	require.NoError(b, err)
	scriptKey := key("script")
	backend, err := redislock.New(client(), nil)
	require.NoError(b, err)
	locker, err := dlock.New(backend, &dlock.Options{TTL: benchTTL})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, locker.Close()) })
	lockerKey := key("locker")
	rs, rsKey := redsync.New(goredis.NewPool(client())), key("redsync")
	other, otherKey := bsm.New(client()), key("bsm")

	lock := func(ctx context.Context) error {
		h, err := locker.Acquire(ctx, lockerKey)
		if err != nil {
			return err
		}
		return h.Release(ctx)
	}
	return []contestant{
		{"SetDel", func(ctx context.Context) error {
			if err := raw.SetArgs(ctx, rawKey, "owner", redis.SetArgs{Mode: "NX", TTL: benchTTL}).Err(); err != nil {
				return err
			}
			return raw.Del(ctx, rawKey).Err()
		}},
		{"Scripts", func(ctx context.Context) error { // the Backend alone: two scripts, and the token
			g, err := script.TryAcquire(ctx, dlock.Request{Key: scriptKey, Owner: "owner", TTL: benchTTL})
			if err != nil {
				return err
			}
			return script.Release(ctx, g)
		}},
		{"Locker", lock},
		{"LockerDeadline", func(ctx context.Context) error {
			ctx, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			return lock(ctx)
		}},
		{"Redsync", func(ctx context.Context) error {
			m := rs.NewMutex(rsKey, redsync.WithExpiry(benchTTL))
			if err := m.LockContext(ctx); err != nil {
				return err
			}
			_, err := m.UnlockContext(ctx)
			return err
		}},
		{"BsmRedislock", func(ctx context.Context) error {
			l, err := other.Obtain(ctx, otherKey, benchTTL, nil)
			if err != nil {
				return err
			}
			return l.Release(ctx)
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

// BenchmarkHandOver is a hot key: each contender waits over a connection pool of its own, so every section is handed over.
func BenchmarkHandOver(b *testing.B) {
	for _, contenders := range []int{2, 16} {
		b.Run(fmt.Sprint(contenders), func(b *testing.B) {
			key := "bench/hot/" + uuid.NewString()
			lockers := make([]*dlock.Locker, contenders)
			for i := range lockers {
				o, err := redis.ParseURL(server.URL)
				require.NoError(b, err)
				c := redis.NewClient(o)
				backend, err := redislock.New(c, nil)
				require.NoError(b, err)
				lockers[i], err = dlock.New(backend, &dlock.Options{TTL: benchTTL})
				require.NoError(b, err)
				b.Cleanup(func() {
					require.NoError(b, lockers[i].Close())
					require.NoError(b, c.Close())
				})
			}
			ctx := context.Background()
			var left atomic.Int64
			left.Store(int64(b.N))
			b.ResetTimer()
			var wg sync.WaitGroup
			for _, l := range lockers {
				wg.Go(func() {
					for left.Add(-1) >= 0 {
						h, err := l.Acquire(ctx, key)
						if err == nil {
							err = h.Release(ctx)
						}
						if err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			wg.Wait()
		})
	}
}
