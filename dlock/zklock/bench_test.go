package zklock_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/zklock"
)

const benchTTL = 10 * time.Second

// contestant takes a free lock and gives it back.
type contestant struct {
	name string
	pair func(ctx context.Context) error
}

// plain returns a client as users have it.
func plain(b *testing.B) *zk.Conn {
	b.Helper()
	c, _, err := zk.Connect([]string{server.Addr}, 2*benchTTL, zk.WithLogger(silence{}))
	require.NoError(b, err)
	b.Cleanup(c.Close)
	return c
}

func plainBackend(b *testing.B) *zklock.Backend {
	b.Helper()
	l, err := zklock.New(plain(b), nil)
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, l.Close()) })
	return l
}

func benchPath() string { return "/bench-" + uuid.NewString() }

// contestants work on one connection each. The first is the yardstick: two writes, no queue and no token.
func contestants(b *testing.B) []contestant {
	b.Helper()
	raw, rawPath := plain(b), benchPath()
	bare, bareKey := plainBackend(b), newKey()
	locker, err := dlock.New(plainBackend(b), &dlock.Options{TTL: benchTTL})
	require.NoError(b, err)
	b.Cleanup(func() { require.NoError(b, locker.Close()) })
	lockerKey := newKey()
	recipe := zk.NewLock(plain(b), benchPath(), zk.WorldACL(zk.PermAll))
	return []contestant{
		{"CreateDelete", func(context.Context) error {
			if _, err := raw.Create(rawPath, nil, zk.FlagEphemeral, zk.WorldACL(zk.PermAll)); err != nil {
				return err
			}
			return raw.Delete(rawPath, -1)
		}},
		{"Backend", func(ctx context.Context) error {
			g, err := bare.Acquire(ctx, dlock.Request{Key: bareKey, Owner: uuid.NewString(), TTL: benchTTL})
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
		{"GoZooKeeperLock", func(context.Context) error { // no token
			if err := recipe.Lock(); err != nil {
				return err
			}
			return recipe.Unlock()
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

// BenchmarkHotKey is the time from a lock's grant to its next one, under 50 clients that all want it.
func BenchmarkHotKey(b *testing.B) {
	const clients = 50
	ctx := context.Background()
	for _, c := range []struct {
		name string
		open func(key string) (pair func() error)
	}{
		{"Backend", func(key string) func() error {
			l := plainBackend(b)
			return func() error {
				g, err := l.Acquire(ctx, dlock.Request{Key: key, Owner: uuid.NewString(), TTL: benchTTL})
				if err != nil {
					return err
				}
				return l.Release(ctx, g)
			}
		}},
		{"GoZooKeeperLock", func(key string) func() error {
			l := zk.NewLock(plain(b), "/"+key, zk.WorldACL(zk.PermAll))
			return func() error {
				if err := l.Lock(); err != nil {
					return err
				}
				return l.Unlock()
			}
		}},
	} {
		key := newKey()
		pairs := make([]func() error, clients)
		for i := range pairs {
			pairs[i] = c.open(key)
			require.NoError(b, pairs[i]())
		}
		b.Run(c.name, func(b *testing.B) {
			turns := make(chan struct{})
			var wg sync.WaitGroup
			for _, pair := range pairs {
				wg.Go(func() {
					for range turns {
						if err := pair(); err != nil {
							b.Error(err)
						}
					}
				})
			}
			for b.Loop() {
				turns <- struct{}{}
			}
			close(turns)
			wg.Wait()
		})
	}
}
