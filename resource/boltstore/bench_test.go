package boltstore_test

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/boltstore"
)

// The benchmarks compare a fenced write with one that doesn't look at the fence, for both stores:
//
//	go test -run '^$' -bench . -benchmem ./resource/boltstore

var value = make([]byte, 128)

func stores(b *testing.B, run func(b *testing.B, s resource.Overwriter)) {
	b.Helper()
	b.Run("store=memory", func(b *testing.B) { run(b, resource.NewMemory()) })
	b.Run("store=bolt", func(b *testing.B) {
		s, err := boltstore.Open(filepath.Join(b.TempDir(), "resource.db"), nil)
		require.NoError(b, err)
		defer func() { require.NoError(b, s.Close()) }()
		run(b, s)
	})
}

// both runs a benchmark with fenced and with unfenced writes, each with its own rising tokens.
func both(b *testing.B, s resource.Overwriter, run func(b *testing.B, write func(key string, token uint64))) {
	b.Helper()
	for _, w := range []struct {
		name string
		call func(context.Context, string, resource.Fence, []byte) error
	}{{"write=fenced", s.Write}, {"write=unfenced", s.Overwrite}} {
		b.Run(w.name, func(b *testing.B) {
			b.ReportAllocs()
			ctx := b.Context()
			run(b, func(key string, token uint64) {
				if err := w.call(ctx, w.name+key, at(token), value); err != nil {
					b.Error(err)
				}
			})
		})
	}
}

// token rises over all runs, so that no fenced write is refused.
var token atomic.Uint64

// BenchmarkWrite is one writer on one key.
func BenchmarkWrite(b *testing.B) {
	stores(b, func(b *testing.B, s resource.Overwriter) {
		b.Helper()
		both(b, s, func(b *testing.B, write func(string, uint64)) {
			b.Helper()
			for b.Loop() {
				write("k", token.Add(1))
			}
		})
	})
}

// BenchmarkWriters is many writers, each with a key of its own: how far one sync goes.
func BenchmarkWriters(b *testing.B) {
	stores(b, func(b *testing.B, s resource.Overwriter) {
		b.Helper()
		for _, writers := range []int{1, 16, 128} {
			b.Run(fmt.Sprintf("writers=%d", writers), func(b *testing.B) {
				both(b, s, func(b *testing.B, write func(string, uint64)) {
					b.Helper()
					work := make(chan uint64)
					done := make(chan struct{})
					for w := range writers {
						go func() {
							for token := range work {
								write(strconv.Itoa(w), token)
							}
							done <- struct{}{}
						}()
					}
					b.ResetTimer()
					for range b.N {
						work <- token.Add(1)
					}
					close(work)
					for range writers {
						<-done
					}
					b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "writes/s")
				})
			})
		}
	})
}

// BenchmarkFenceCheck does fenced and unfenced writes in turn, so that both meet the same disk and noise, and reports the median
// of each and by how much they differ. A negative difference is noise, too.
func BenchmarkFenceCheck(b *testing.B) {
	stores(b, func(b *testing.B, s resource.Overwriter) {
		b.Helper()
		var fenced, unfenced []time.Duration
		timed := func(write func(context.Context, string, resource.Fence, []byte) error, key string) time.Duration {
			start := time.Now()
			if err := write(b.Context(), key, at(token.Add(1)), value); err != nil {
				b.Fatal(err)
			}
			return time.Since(start)
		}
		for b.Loop() {
			fenced = append(fenced, timed(s.Write, "fenced"))
			unfenced = append(unfenced, timed(s.Overwrite, "unfenced"))
		}
		slices.Sort(fenced)
		slices.Sort(unfenced)
		with, without := float64(fenced[len(fenced)/2]), float64(unfenced[len(unfenced)/2])
		b.ReportMetric(0, "ns/op") // of a pair, which is of no interest
		b.ReportMetric(with, "fenced-ns")
		b.ReportMetric(without, "unfenced-ns")
		b.ReportMetric(100*(with-without)/without, "%more")
	})
}

// BenchmarkRule is the fence check alone: what it adds to a write, without the noise of the disk.
func BenchmarkRule(b *testing.B) {
	rec := resource.Record{Value: value, MaxFence: at(1)}
	b.ReportAllocs()
	for b.Loop() {
		if err := rec.CheckWrite("k", at(2), value); err != nil {
			b.Fatal(err)
		}
	}
}
