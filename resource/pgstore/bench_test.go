package pgstore_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/pgstore"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// The benchmarks compare fenced writes with those that don't look at the fence, on a server that waits for its disk:
//
//	go test -run '^$' -bench . ./resource/pgstore

var value = make([]byte, 128)

// last is the last token used. It rises over all runs, so that no fenced write is refused, except where writers race.
var last atomic.Uint64

// A way is a way to write value to key.
type way struct {
	name  string
	write func(ctx context.Context, key string, token uint64) error
}

// ways returns the ways to write: a Store's, fenced or not, and a business transaction's, guarded by one conditional
// upsert, guarded by a lock on the row first (SELECT FOR UPDATE, then compare, then write), or not guarded.
func ways(b *testing.B) []way {
	b.Helper()
	server := server
	if server.Provider != testbed.External {
		s, err := testbed.StartPostgres(context.Background(), &testbed.Options{Args: []string{"-c", "fsync=on"}})
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, s.Close()) })
		require.NoError(b, prepare(context.Background(), s))
		server = s
	}
	c, err := pgxpool.ParseConfig(server.URL)
	require.NoError(b, err)
	c.MaxConns = 128
	pool, err := pgxpool.NewWithConfig(context.Background(), c)
	require.NoError(b, err)
	b.Cleanup(pool.Close)
	s, err := pgstore.New(pool, nil)
	require.NoError(b, err)
	business := func(guard func(ctx context.Context, tx pgx.Tx, key string, token uint64) error) func(context.Context, string, uint64) error {
		return func(ctx context.Context, key string, token uint64) error {
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				if err := guard(ctx, tx, key, token); err != nil {
					return err
				}
				return adds(ctx, tx, key, strconv.FormatUint(token, 10))
			})
		}
	}
	return []way{
		{"store/unfenced", func(ctx context.Context, key string, token uint64) error {
			return s.Overwrite(ctx, "unfenced/"+key, at(token), value)
		}},
		{"store/fenced", func(ctx context.Context, key string, token uint64) error {
			return s.Write(ctx, "fenced/"+key, at(token), value)
		}},
		{"tx/unfenced", business(func(context.Context, pgx.Tx, string, uint64) error { return nil })},
		{"tx/guard", business(func(ctx context.Context, tx pgx.Tx, key string, token uint64) error {
			return pgstore.Guard(ctx, tx, "guard/"+key, at(token))
		})},
		{"tx/for-update", business(func(ctx context.Context, tx pgx.Tx, key string, token uint64) error {
			return pessimistic(ctx, tx, "for-update/"+key, token)
		})},
	}
}

// pessimistic is what Guard is not: two statements, the first of which locks the row.
func pessimistic(ctx context.Context, tx pgx.Tx, key string, token uint64) error {
	var seen int64
	err := tx.QueryRow(ctx, "SELECT token::bigint FROM fencelab_fence WHERE key = $1 FOR UPDATE", key).Scan(&seen)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		_, err = tx.Exec(ctx, "INSERT INTO fencelab_fence (key, token, seq) VALUES ($1, $2, 1) ON CONFLICT DO NOTHING", key, int64(token))
		return err
	case err != nil:
		return err
	case token <= uint64(seen):
		return &resource.StaleTokenError{Key: key, Seen: at(uint64(seen)), Got: at(token)}
	}
	_, err = tx.Exec(ctx, "UPDATE fencelab_fence SET token = $2, seq = 1 WHERE key = $1", key, int64(token))
	return err
}

// BenchmarkFenceCheck lets all ways take turns, so that they meet the same disk and noise, and reports medians: of the
// unfenced ones in µs, of the others by how much they exceed theirs, in µs and %. A negative difference is noise.
func BenchmarkFenceCheck(b *testing.B) {
	all := ways(b)
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
		if w.name == "store/unfenced" || w.name == "tx/unfenced" {
			yard = median
			b.ReportMetric(median, "µs-"+w.name)
			continue
		}
		b.ReportMetric(median-yard, "+µs-"+w.name)
		b.ReportMetric(100*(median-yard)/yard, "+%-"+w.name)
	}
}

// BenchmarkWriters is many writers, on a key each or all on one. On one key fenced writes are refused that come after a
// later one; they are counted, too, and reported.
func BenchmarkWriters(b *testing.B) {
	all := ways(b)
	for _, keys := range []string{"many", "one"} {
		for _, writers := range []int{1, 16, 128} {
			for _, w := range all {
				b.Run(fmt.Sprintf("keys=%s/writers=%d/%s", keys, writers, w.name), func(b *testing.B) {
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
				})
			}
		}
	}
}
