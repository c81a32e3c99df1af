package consullock_test

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/hashicorp/consul/api"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/consullock"
)

const benchTTL = 10 * time.Second

// contestant takes a free lock and gives it back.
type contestant struct {
	name string
	pair func(ctx context.Context) error
}

// contestants work with a client each. The first is the yardstick, and half of what a lock needs at least: one write of
// one entry.
func contestants(b *testing.B) []contestant {
	b.Helper()
	client := func() *api.Client {
		base := &http.Transport{}
		b.Cleanup(base.CloseIdleConnections)
		c, err := api.NewClient(&api.Config{Address: server.URL, HttpClient: &http.Client{Transport: base}})
		require.NoError(b, err)
		return c
	}
	backend := func() *consullock.Backend {
		l, err := consullock.New(client(), nil)
		require.NoError(b, err)
		return l
	}
	raw, n := client(), 0
	bare, bareKey := backend(), "bench/bare/"+uuid.NewString()
	b.Cleanup(func() { require.NoError(b, bare.Close()) })
	locker, err := dlock.New(backend(), &dlock.Options{TTL: benchTTL})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, locker.Close()) })
	lockerKey := "bench/locker/" + uuid.NewString()
	return []contestant{
		{"Put", func(context.Context) error {
			n++ // a value that doesn't change is not written
			_, err := raw.KV().Put(&api.KVPair{Key: "bench/raw", Value: strconv.AppendInt(nil, int64(n), 10)}, nil)
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
