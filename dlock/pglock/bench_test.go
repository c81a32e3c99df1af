package pglock_test

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/pglock"
)

const benchTTL = 10 * time.Second

// contestant takes a free lock and gives it back.
type contestant struct {
	name string
	pair func(ctx context.Context) error
}

// contestants work on one connection each. The first is the yardstick, and half of what a lock needs at least: a plain
// UPDATE of one row, by its key, in one durable transaction.
func contestants(b *testing.B) []contestant {
	b.Helper()
	pool := func() *pgxpool.Pool {
		c, err := pgxpool.ParseConfig(server.URL)
		require.NoError(b, err)
		c.MaxConns = 1
		p, err := pgxpool.NewWithConfig(context.Background(), c)
		require.NoError(b, err)
		b.Cleanup(p.Close)
		return p
	}
	backend := func(p *pgxpool.Pool) *pglock.Backend {
		l, err := pglock.New(p, nil)
		require.NoError(b, err)
		return l
	}
	raw := pool()
	rawKey := "bench/raw/" + uuid.NewString()
	l := backend(raw)
	g, err := l.TryAcquire(context.Background(), dlock.Request{Key: rawKey, Owner: "owner", TTL: time.Hour})
	require.NoError(b, err)
	require.NoError(b, l.Release(context.Background(), g))
	require.NoError(b, l.Close())

	bare, bareKey := backend(pool()), "bench/bare/"+uuid.NewString()
	b.Cleanup(func() { require.NoError(b, bare.Close()) })
	locker, err := dlock.New(backend(pool()), &dlock.Options{TTL: benchTTL})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, locker.Close()) })
	lockerKey := "bench/locker/" + uuid.NewString()
	return []contestant{
		{"Update", func(ctx context.Context) error {
			_, err := raw.Exec(ctx, "UPDATE fencelab_lock SET fence = fence + 1 WHERE key = $1", rawKey)
			return err
		}},
		{"Backend", func(ctx context.Context) error {
			g, err := bare.TryAcquire(ctx, dlock.Request{Key: bareKey, Owner: "owner", TTL: benchTTL})
			if err != nil {
				return err
			}
			return bare.Release(ctx, g)
		}},
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
