package cas_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/pglock"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/cas"
	"github.com/fencelab/fencelab/resource/pgstore"
	"github.com/fencelab/fencelab/resource/redisstore"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// A way reads a value, works, writes the result, and returns how often it worked.
type way struct {
	name   string
	update func(ctx context.Context, key string, work func()) (tries int, err error)
}

const backoff = 2 * time.Millisecond

func swaps(name string, s cas.Store, opts *cas.Options) way {
	return way{name, func(ctx context.Context, key string, work func()) (int, error) {
		return cas.Update(ctx, s, key, func(value []byte) ([]byte, error) {
			work()
			return addOne(value)
		}, opts)
	}}
}

func locked(b *testing.B, backend dlock.Backend, s resource.Store) way {
	b.Helper()
	locker, err := dlock.New(backend, &dlock.Options{TTL: 10 * time.Second})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, locker.Close()) })
	return way{"lock", func(ctx context.Context, key string, work func()) (int, error) {
		return 1, locker.Do(ctx, key, func(ctx context.Context, h *dlock.Handle) error {
			rec, err := s.ReadFenced(ctx, key, resource.Fence{Token: h.Fence()})
			if err != nil {
				return err
			}
			work()
			value, err := addOne(rec.Value)
			if err != nil {
				return err
			}
			return s.Write(ctx, key, resource.Fence{Token: h.Fence(), Seq: 1}, value)
		})
	}}
}

// connections leaves some of a PostgreSQL's default of 100 to spare.
const connections = 80

func onRedis(b *testing.B) []way {
	b.Helper()
	r := newRedis(b, func(o *redis.Options) { o.PoolSize = connections })
	backend, err := redislock.New(r.Client, nil)
	require.NoError(b, err)
	s, err := redisstore.New(r.Client, nil)
	require.NoError(b, err)
	return []way{swaps("cas", r, nil), swaps("cas+backoff", r, &cas.Options{Backoff: backoff}), locked(b, backend, s)}
}

// onPostgres has a server that waits for its disk.
func onPostgres(b *testing.B) []way {
	b.Helper()
	server := postgresServer
	if server.Provider != testbed.External {
		server = testmain.Serve(b, testbed.StartPostgres, &testbed.Options{Args: []string{"-c", "fsync=on"}})
	}
	pool := testmain.Pool(b, server, func(c *pgxpool.Config) { c.MaxConns = connections })
	require.NoError(b, prepare(b.Context(), pool))
	require.NoError(b, pglock.CreateSchema(b.Context(), pool, nil))
	require.NoError(b, pgstore.CreateSchema(b.Context(), pool, nil))
	backend, err := pglock.New(pool, nil)
	require.NoError(b, err)
	s, err := pgstore.New(pool, nil)
	require.NoError(b, err)
	p := cas.Postgres{Pool: pool}
	return []way{swaps("cas", p, nil), swaps("cas+backoff", p, &cas.Options{Backoff: backoff}), locked(b, backend, s)}
}

// window is how long updates begin.
const window = 3 * time.Second

// BenchmarkUpdate compares compare-and-swap with a lock and fenced writes in the same store, for
// reports/results/compare-and-swap:
//
//	go test -run '^$' -bench Update -benchtime 1x ./resource/cas
func BenchmarkUpdate(b *testing.B) {
	for _, store := range []struct {
		name string
		open func(b *testing.B) []way
	}{{"redis", onRedis}, {"postgres", onPostgres}} {
		b.Run("store="+store.name, func(b *testing.B) {
			all := store.open(b)
			for _, load := range []struct {
				writers int
				keys    string
			}{{16, "many"}, {16, "one"}, {128, "one"}} {
				for _, work := range []time.Duration{0, 5 * time.Millisecond} {
					for _, w := range all {
						b.Run(fmt.Sprintf("writers=%d/keys=%s/work=%v/%s", load.writers, load.keys, work, w.name), func(b *testing.B) {
							update(b, w, load.writers, load.keys == "many", work)
						})
					}
				}
			}
		})
	}
}

const manyKeys = 10_000

func update(b *testing.B, w way, writers int, many bool, work time.Duration) {
	b.Helper()
	prefix := uuid.NewString() + "/"
	var begun, tries atomic.Int64
	took := make([][]time.Duration, writers)
	var wg sync.WaitGroup
	start := time.Now()
	for i := range writers {
		wg.Go(func() {
			for began := start; began.Sub(start) < window; began = time.Now() {
				key := prefix
				if many {
					key += strconv.FormatInt(begun.Add(1)%manyKeys, 10)
				}
				done, err := w.update(b.Context(), key, func() { time.Sleep(work) })
				took[i] = append(took[i], time.Since(began))
				tries.Add(int64(done))
				if err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	elapsed := time.Since(start)
	all := slices.Sorted(slices.Values(slices.Concat(took...)))
	ms := func(share float64) float64 { return all[min(int(share*float64(len(all))), len(all)-1)].Seconds() * 1e3 }
	b.ReportMetric(0, "ns/op") // cases differ by a factor of a thousand
	b.ReportMetric(float64(len(all))/elapsed.Seconds(), "updates/s")
	b.ReportMetric(float64(tries.Load())/float64(len(all)), "tries/update")
	b.ReportMetric(ms(0.5), "p50-ms")
	b.ReportMetric(ms(0.99), "p99-ms")
	b.ReportMetric(ms(1), "max-ms")
}
