package etcdlock_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/etcdlock"
)

const benchTTL = 10 * time.Second

// contestant makes ways to lock key: each call one of a user of its own.
type contestant struct {
	name string
	user func(key string) (pair func(ctx context.Context) error)
}

// contestants share nothing but the server. The first is the yardstick: what two commits cost.
func contestants(b *testing.B) []contestant {
	b.Helper()
	client := func() *clientv3.Client {
		c, err := clientv3.New(clientv3.Config{Endpoints: one.Addrs(), Logger: zap.NewNop()})
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, c.Close()) })
		return c
	}
	backend := func(c *clientv3.Client) *etcdlock.Backend {
		l, err := etcdlock.New(c, nil)
		require.NoError(b, err)
		b.Cleanup(func() { require.NoError(b, l.Close()) })
		return l
	}
	pair := func(l *etcdlock.Backend, key string) func(ctx context.Context) error {
		return func(ctx context.Context) error {
			g, err := l.Acquire(ctx, dlock.Request{Key: key, Owner: uuid.NewString(), TTL: benchTTL})
			if err != nil {
				return err
			}
			return l.Release(ctx, g)
		}
	}
	raw, ours, shared, theirs := client(), client(), backend(client()), client()
	locker, err := dlock.New(backend(client()), &dlock.Options{TTL: benchTTL})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, locker.Close()) })
	return []contestant{
		{"PutDelete", func(key string) func(context.Context) error { // no lock at all
			name := "bench/" + key + uuid.NewString()
			return func(ctx context.Context) error {
				if _, err := raw.Put(ctx, name, ""); err != nil {
					return err
				}
				_, err := raw.Delete(ctx, name)
				return err
			}
		}},
		{"Mutex", func(key string) func(context.Context) error { // a session for each, kept
			s, err := concurrency.NewSession(theirs, concurrency.WithTTL(int(benchTTL/time.Second)))
			require.NoError(b, err)
			b.Cleanup(func() { require.NoError(b, s.Close()) })
			m := concurrency.NewMutex(s, "bench/"+key)
			return func(ctx context.Context) error {
				if err := m.Lock(ctx); err != nil {
					return err
				}
				return m.Unlock(ctx)
			}
		}},
		{"Backends", func(key string) func(context.Context) error { return pair(backend(ours), key) }}, // one each
		{"Backend", func(key string) func(context.Context) error { return pair(shared, key) }},         // one for all
		{"Locker", func(key string) func(context.Context) error {
			return func(ctx context.Context) error {
				h, err := locker.Acquire(ctx, key)
				if err != nil {
					return err
				}
				return h.Release(ctx)
			}
		}},
	}
}

// BenchmarkPair takes turns in taking a free lock and giving it back, so that a busy machine is busy for all, and
// reports medians: of the first in µs, of the others as multiples of it.
func BenchmarkPair(b *testing.B) {
	all := contestants(b)
	times := make([][]time.Duration, len(all))
	pairs := make([]func(context.Context) error, len(all))
	for i, c := range all {
		pairs[i] = c.user(uuid.NewString())
		require.NoError(b, pairs[i](b.Context())) // starts a session
	}
	for b.Loop() {
		for i, pair := range pairs {
			began := time.Now()
			if err := pair(b.Context()); err != nil {
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

// BenchmarkHotKey is the time of one section when 50 want the same lock over and over.
func BenchmarkHotKey(b *testing.B) {
	const users = 50
	for _, c := range contestants(b)[1:] {
		b.Run(c.name, func(b *testing.B) {
			key := uuid.NewString()
			pairs := make([]func(context.Context) error, users)
			for i := range pairs {
				pairs[i] = c.user(key)
				require.NoError(b, pairs[i](b.Context()))
			}
			b.ResetTimer()
			var all sync.WaitGroup
			left := make(chan struct{}, b.N)
			for range b.N {
				left <- struct{}{}
			}
			close(left)
			for _, pair := range pairs {
				all.Go(func() {
					for range left {
						if err := pair(b.Context()); err != nil {
							b.Error(err)
							return
						}
					}
				})
			}
			all.Wait()
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "sections/s")
		})
	}
}
