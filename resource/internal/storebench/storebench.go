// Package storebench compares ways to write to a store, in the stores' benchmarks.
package storebench

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelab/fencelab/resource"
)

// Way is a way to write.
type Way struct {
	Name     string
	Write    func(ctx context.Context, key string, token uint64) error
	Against  string     // name of the way to compare with; empty: this is a baseline
	Requests func() int // since the last call; may be nil
}

// Names of [Ways].
const (
	Unfenced = "unfenced"
	Fenced   = "fenced"
)

// Ways returns the ways to write value to s without and with a check of the fence.
func Ways(s resource.Overwriter, value []byte, requests func() int) []Way {
	return []Way{
		{Name: Unfenced, Requests: requests, Write: func(ctx context.Context, key string, token uint64) error {
			return s.Overwrite(ctx, Unfenced+"/"+key, resource.Fence{Token: token, Seq: 1}, value)
		}},
		{Name: Fenced, Against: Unfenced, Requests: requests, Write: func(ctx context.Context, key string, token uint64) error {
			return s.Write(ctx, Fenced+"/"+key, resource.Fence{Token: token, Seq: 1}, value)
		}},
	}
}

// lastToken rises over all runs, so that only races cause refusals.
var lastToken atomic.Uint64

// rounds is how often the ways alternate in one iteration of [FenceCheck].
const rounds = 300

// FenceCheck has one writer on one key. The ways alternate, each first equally often, to meet the same noise. It reports medians:
// a baseline's in µs, and how much longer the others took in the same round, in µs and %.
func FenceCheck(b *testing.B, ways []Way) {
	b.Helper()
	took, requests := make([][]float64, len(ways)), make([]int, len(ways))
	write := func(i int) float64 {
		began := time.Now()
		if err := ways[i].Write(b.Context(), "one", lastToken.Add(1)); err != nil {
			b.Fatalf("%s: %v", ways[i].Name, err)
		}
		return float64(time.Since(began)) / 1e3
	}
	for i := range ways {
		write(i)
	}
	for b.Loop() {
		for round := range rounds {
			for n := range ways {
				i := (round + n) % len(ways)
				ways[i].sent()
				took[i] = append(took[i], write(i))
				requests[i] += ways[i].sent()
			}
		}
	}
	b.ReportMetric(0, "ns/op")
	for i, w := range ways {
		if w.Requests != nil {
			b.ReportMetric(float64(requests[i])/float64(len(took[i])), "requests/"+w.Name)
		}
		if w.Against == "" {
			b.ReportMetric(median(took[i]), "µs/"+w.Name)
			continue
		}
		baseline := took[slices.IndexFunc(ways, func(o Way) bool { return o.Name == w.Against })]
		more := make([]float64, len(baseline))
		for round := range baseline {
			more[round] = took[i][round] - baseline[round]
		}
		b.ReportMetric(median(more), "+µs/"+w.Name)
		b.ReportMetric(100*median(more)/median(baseline), "+%/"+w.Name)
	}
}

func median(of []float64) float64 { return slices.Sorted(slices.Values(of))[len(of)/2] }

// slice is how long one way's writers run in turn, in [Writers].
const slice = 25 * time.Millisecond

// Writers has 1, 16 and 128 writers, on a key each or all on one, in sub-benchmarks keys=K/writers=N. The ways alternate. It
// reports writes per second, including refused ones, and the share of those.
func Writers(b *testing.B, ways []Way) {
	b.Helper()
	for _, keys := range []string{"many", "one"} {
		for _, writers := range []int{1, 16, 128} {
			b.Run(fmt.Sprintf("keys=%s/writers=%d", keys, writers), func(b *testing.B) {
				for _, w := range ways {
					new(writes).add(b, w, keys, writers, 0)
				}
				all := make([]writes, len(ways))
				for round := 0; b.Loop(); round++ {
					for n := range ways {
						i := (round + n) % len(ways)
						all[i].add(b, ways[i], keys, writers, slice)
					}
				}
				b.ReportMetric(0, "ns/op")
				for i, w := range ways {
					made := float64(all[i].made.Load())
					b.ReportMetric(made/all[i].elapsed.Seconds(), "writes/s/"+w.Name)
					b.ReportMetric(float64(all[i].refused.Load())/made, "refused/"+w.Name)
					if w.Requests != nil {
						b.ReportMetric(float64(all[i].requests)/made, "requests/"+w.Name)
					}
				}
			})
		}
	}
}

type writes struct {
	made, refused atomic.Int64
	requests      int
	elapsed       time.Duration
}

func (all *writes) add(b *testing.B, w Way, keys string, writers int, d time.Duration) {
	b.Helper()
	w.sent()
	var wg sync.WaitGroup
	start := time.Now()
	for i := range writers {
		key := "one"
		if keys == "many" {
			key = strconv.Itoa(i)
		}
		wg.Go(func() {
			for ok := true; ok; ok = time.Since(start) < d {
				err := w.Write(b.Context(), key, lastToken.Add(1))
				if _, stale := errors.AsType[*resource.StaleTokenError](err); stale {
					all.refused.Add(1)
				} else if err != nil {
					b.Errorf("%s: %v", w.Name, err)
					return
				}
				all.made.Add(1)
			}
		})
	}
	wg.Wait()
	all.elapsed += time.Since(start)
	all.requests += w.sent()
}

func (w Way) sent() int {
	if w.Requests == nil {
		return 0
	}
	return w.Requests()
}
