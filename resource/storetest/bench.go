package storetest

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

// Way is a way to write, for the benchmarks that compare them.
type Way struct {
	Name string
	// Write writes to key, with token if the way is a fenced one. A refusal is a [*resource.StaleTokenError].
	Write func(ctx context.Context, key string, token uint64) error
	// Against is the name of the way that this one is compared with; empty: it's a yardstick itself.
	Against string
	// Requests returns the number of requests sent since it was last asked. May be nil.
	Requests func() int
}

// Unfenced and Fenced are the names of the ways of [Ways].
const (
	Unfenced = "unfenced"
	Fenced   = "fenced"
)

// Ways are the two ways to write value to s: without a look at the fence, and with one. requests may be nil.
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

// lastToken rises over all runs, so that no fenced write is refused, except where writers race.
var lastToken atomic.Uint64

// rounds is how often all ways take their turn in one iteration of [BenchFenceCheck], so that a median is one.
const rounds = 300

// BenchFenceCheck is one writer on one key, and all ways take turns, each first as often as the others, so that they meet
// the same disk and noise. It reports medians: of yardsticks in µs, and for the others of what they took more in the same
// round, in µs and in % of the yardstick's. Less than nothing is noise.
func BenchFenceCheck(b *testing.B, ways []Way) {
	b.Helper()
	took, requests := make([][]float64, len(ways)), make([]int, len(ways))
	index := map[string]int{}
	write := func(i int) float64 {
		began := time.Now()
		if err := ways[i].Write(b.Context(), "one", lastToken.Add(1)); err != nil {
			b.Fatalf("%s: %v", ways[i].Name, err)
		}
		return float64(time.Since(began)) / 1e3
	}
	for i, w := range ways {
		index[w.Name] = i
		write(i) // the first write of a key isn't like the others
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
	b.ReportMetric(0, "ns/op") // of all rounds together: of no interest
	for i, w := range ways {
		if w.Requests != nil {
			b.ReportMetric(float64(requests[i])/float64(len(took[i])), "requests/"+w.Name)
		}
		if w.Against == "" {
			b.ReportMetric(median(took[i]), "µs/"+w.Name)
			continue
		}
		against, ok := index[w.Against]
		if !ok {
			b.Fatalf("%s is against %s, which there isn't", w.Name, w.Against)
		}
		yard := took[against]
		more := make([]float64, len(yard))
		for round := range yard {
			more[round] = took[i][round] - yard[round]
		}
		b.ReportMetric(median(more), "+µs/"+w.Name)
		b.ReportMetric(100*median(more)/median(yard), "+%/"+w.Name)
	}
}

func median(of []float64) float64 { return slices.Sorted(slices.Values(of))[len(of)/2] }

// turn is for how long the writers of a way begin writes until it's the next way's turn, in [BenchWriters].
const turn = 25 * time.Millisecond

// BenchWriters is 1, 16 and 128 writers, on a key each or all on one: sub-benchmarks keys=K/writers=N, in which the ways
// take turns. It reports writes a second. On one key a fenced write is refused that comes after one of a later token; it
// counts, and the share of those is reported.
func BenchWriters(b *testing.B, ways []Way) {
	b.Helper()
	for _, keys := range []string{"many", "one"} {
		for _, writers := range []int{1, 16, 128} {
			b.Run(fmt.Sprintf("keys=%s/writers=%d", keys, writers), func(b *testing.B) {
				for _, w := range ways { // connections are made, and the first write of a key isn't like the others
					new(writes).add(b, w, keys, writers, 0)
				}
				all := make([]writes, len(ways))
				for round := 0; b.Loop(); round++ {
					for n := range ways {
						i := (round + n) % len(ways)
						all[i].add(b, ways[i], keys, writers, turn)
					}
				}
				b.ReportMetric(0, "ns/op") // of all turns together: of no interest
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

// writes are what has become of a way's.
type writes struct {
	made, refused atomic.Int64
	requests      int
	elapsed       time.Duration
}

// add lets writers write for some time, and at least once each.
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
