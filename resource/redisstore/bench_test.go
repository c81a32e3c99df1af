package redisstore_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/redisstore"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// The benchmarks compare fenced writes with those that don't look at the fence, on a Redis that answers from memory and on
// one that waits for its disk:
//
//	go test -run '^$' -bench . ./resource/redisstore

var value = make([]byte, 128)

// last is the last token used. It rises over all runs, so that no fenced write is refused, except where writers race.
var last atomic.Uint64

// A way is a way to write value to key.
type way struct {
	name  string
	write func(ctx context.Context, key string, token uint64) error
}

// onServers runs a benchmark of the ways to write: a plain HSET, the store's unfenced script, and its fenced one.
func onServers(b *testing.B, run func(b *testing.B, all []way)) {
	b.Helper()
	for name, args := range map[string][]string{"memory": nil, "fsync": durable} {
		b.Run("redis="+name, func(b *testing.B) {
			server := server
			if args != nil {
				s, err := testbed.StartRedis(context.Background(), &testbed.Options{Args: args})
				if errors.Is(err, errors.ErrUnsupported) {
					b.Skip(err)
				}
				require.NoError(b, err)
				b.Cleanup(func() { require.NoError(b, s.Close()) })
				server = s
			}
			o, err := redis.ParseURL(server.URL)
			require.NoError(b, err)
			o.PoolSize = 128
			c := redis.NewClient(o)
			b.Cleanup(func() { require.NoError(b, c.Close()) })
			prefix := uuid.NewString() + "/"
			s, err := redisstore.New(c, &redisstore.Options{Prefix: prefix})
			require.NoError(b, err)
			run(b, []way{
				{"hset", func(ctx context.Context, key string, token uint64) error {
					return c.HSet(ctx, prefix+key, "token", token, "seq", 1, "value", value).Err()
				}},
				{"unfenced", func(ctx context.Context, key string, token uint64) error {
					return s.Overwrite(ctx, "unfenced/"+key, at(token), value)
				}},
				{"fenced", func(ctx context.Context, key string, token uint64) error {
					return s.Write(ctx, "fenced/"+key, at(token), value)
				}},
			})
		})
	}
}

// BenchmarkFenceCheck lets all ways take turns, so that they meet the same disk and noise, and reports medians: of a plain
// HSET in µs, of the others by how much they exceed it, in µs and %. A negative difference is noise.
func BenchmarkFenceCheck(b *testing.B) {
	onServers(b, func(b *testing.B, all []way) {
		b.Helper()
		times := make([][]time.Duration, len(all))
		for b.Loop() {
			for i, w := range all {
				token := last.Add(1)
				began := time.Now()
				if err := w.write(b.Context(), "k", token); err != nil {
					b.Fatal(err)
				}
				times[i] = append(times[i], time.Since(began))
			}
		}
		b.ReportMetric(0, "ns/op") // of all together: of no use
		var yard float64
		for i, w := range all {
			slices.Sort(times[i])
			median := float64(times[i][len(times[i])/2]) / 1e3
			if i == 0 {
				yard = median
				b.ReportMetric(median, "µs-"+w.name)
				continue
			}
			b.ReportMetric(median-yard, "+µs-"+w.name)
			b.ReportMetric(100*(median-yard)/yard, "+%-"+w.name)
		}
	})
}

// BenchmarkWriters is many writers, on a key each or all on one. On one key fenced writes are refused that come after a
// later one; they are counted, too, and reported.
func BenchmarkWriters(b *testing.B) {
	onServers(b, func(b *testing.B, all []way) {
		b.Helper()
		for _, keys := range []string{"many", "one"} {
			for _, writers := range []int{1, 16, 128} {
				for _, w := range all {
					b.Run(fmt.Sprintf("keys=%s/writers=%d/%s", keys, writers, w.name), func(b *testing.B) {
						writeAll(b, w, keys, writers)
					})
				}
			}
		}
	})
}

func writeAll(b *testing.B, w way, keys string, writers int) {
	b.Helper()
	var refused atomic.Int64
	work, done := make(chan uint64), make(chan struct{})
	for i := range writers {
		key := "one"
		if keys == "many" {
			key = strconv.Itoa(i)
		}
		go func() {
			for token := range work {
				err := w.write(b.Context(), key, token)
				if _, stale := errors.AsType[*resource.StaleTokenError](err); stale {
					refused.Add(1)
				} else if err != nil {
					b.Error(err)
				}
			}
			done <- struct{}{}
		}()
	}
	b.ResetTimer()
	for range b.N {
		work <- last.Add(1)
	}
	close(work)
	for range writers {
		<-done
	}
	b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "writes/s")
	b.ReportMetric(float64(refused.Load())/float64(b.N), "refused/op")
}
