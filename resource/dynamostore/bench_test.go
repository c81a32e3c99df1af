package dynamostore_test

import (
	"context"
	"crypto/rand"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelab/fencelab/resource"
)

// The benchmarks compare a fenced write with one that doesn't look at the fence:
//
//	go test -run '^$' -bench . ./resource/dynamostore

// token rises over all runs, so that no fenced write of a single writer is refused.
var token atomic.Uint64

// BenchmarkFenceCheck does fenced and unfenced writes in turn, so that both meet the same server and noise, and reports the
// median of each, by how much they differ, and how many requests each took.
func BenchmarkFenceCheck(b *testing.B) {
	s, link := open(b)
	value, key := make([]byte, 128), rand.Text()
	var fenced, unfenced []time.Duration
	sent := map[bool]int{}
	timed := func(isFenced bool, write func() error) time.Duration {
		link.sent()
		start := time.Now()
		if err := write(); err != nil {
			b.Fatal(err)
		}
		took := time.Since(start)
		sent[isFenced] += link.sent()
		return took
	}
	for b.Loop() {
		fenced = append(fenced, timed(true, func() error { return s.Write(b.Context(), key, at(token.Add(1)), value) }))
		unfenced = append(unfenced, timed(false, func() error { return s.Overwrite(b.Context(), key, resource.Fence{}, value) }))
	}
	slices.Sort(fenced)
	slices.Sort(unfenced)
	with, without := float64(fenced[len(fenced)/2]), float64(unfenced[len(unfenced)/2])
	b.ReportMetric(0, "ns/op") // of a pair, which is of no interest
	b.ReportMetric(with/1e3, "fenced-µs")
	b.ReportMetric(without/1e3, "unfenced-µs")
	b.ReportMetric(100*(with-without)/without, "%more")
	b.ReportMetric(float64(sent[true])/float64(b.N), "requests/fenced")
	b.ReportMetric(float64(sent[false])/float64(b.N), "requests/unfenced")
}

// BenchmarkWriters is many writers, each with a key of its own or all with one. On one key the write of a token that is
// overtaken is refused; it counts.
func BenchmarkWriters(b *testing.B) {
	for _, keys := range []string{"own", "one"} {
		for _, writers := range []int{1, 16, 128} {
			for _, write := range []string{"fenced", "unfenced"} {
				b.Run(fmt.Sprintf("key=%s/writers=%d/write=%s", keys, writers, write), func(b *testing.B) {
					s, link := open(b)
					ctx, value, prefix := context.Background(), make([]byte, 128), rand.Text()
					work, done := make(chan uint64), make(chan int)
					for w := range writers {
						key := prefix
						if keys == "own" {
							key += strconv.Itoa(w)
						}
						go func() {
							accepted := 0
							for token := range work {
								var err error
								if write == "fenced" {
									err = s.Write(ctx, key, at(token), value)
								} else {
									err = s.Overwrite(ctx, key, resource.Fence{}, value)
								}
								if err == nil {
									accepted++
								}
							}
							done <- accepted
						}()
					}
					b.ResetTimer()
					for range b.N {
						work <- token.Add(1)
					}
					close(work)
					accepted := 0
					for range writers {
						accepted += <-done
					}
					b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "writes/s")
					b.ReportMetric(float64(accepted)/float64(b.N), "accepted")
					b.ReportMetric(float64(link.sent())/float64(b.N), "requests/write")
				})
			}
		}
	}
}
