package zklock_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"
	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
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

// BenchmarkHotKey has many contenders with a client each take one lock over and over, and holds this package against
// go-zookeeper's own Lock, which writes as often and asks less, but while nobody has the lock; see Cost in the package's comment. The two take turns, so
// that a busy machine is busy for both; nothing is left of one when the other's turn comes.
func BenchmarkHotKey(b *testing.B) {
	for _, users := range []int{50, 200} {
		b.Run(strconv.Itoa(users), func(b *testing.B) {
			kinds := []*hotKey{{name: "Lock", user: lockUser}, {name: "zklock", user: zklockUser}}
			for b.Loop() {
				for _, k := range kinds {
					k.round(b, users)
				}
			}
			b.ReportMetric(0, "ns/op") // of all together: of no use
			for _, k := range kinds {
				k.report(b)
			}
			b.ReportMetric(kinds[1].rate()/kinds[0].rate(), "x-"+kinds[1].name)
		})
	}
}

func zklockUser(b *testing.B, c *zk.Conn, key string) (pair func() error) {
	b.Helper()
	l, err := zklock.New(c, nil)
	require.NoError(b, err)
	return func() error {
		g, err := l.Acquire(b.Context(), dlock.Request{Key: key, Owner: uuid.NewString(), TTL: benchTTL})
		if err != nil {
			return err
		}
		return l.Release(b.Context(), g)
	}
}

func lockUser(b *testing.B, c *zk.Conn, key string) (pair func() error) {
	b.Helper()
	l := zk.NewLock(c, "/"+key, zk.WorldACL(zk.PermAll))
	return func() error {
		if err := l.Lock(); err != nil {
			return err
		}
		return l.Unlock()
	}
}

// hotKey is what a kind of contender makes of one key.
type hotKey struct {
	name  string
	user  func(b *testing.B, c *zk.Conn, key string) (pair func() error)
	spent time.Duration
	waits []time.Duration // from asking for the lock to having given it back
}

// hotTime is for how long a round lasts. What ends later is not counted: the queue runs empty then.
const hotTime = time.Second

func (k *hotKey) round(b *testing.B, users int) {
	b.Helper()
	key := newKey()
	var all sync.WaitGroup
	var mu sync.Mutex
	ready, start := make(chan error), make(chan time.Time)
	for range users {
		all.Go(func() {
			c, events, err := zk.Connect([]string{server.Addr}, 2*benchTTL, zk.WithLogger(silence{}),
				zk.WithMaxBufferSize(1<<20), zk.WithMaxConnBufferSize(1<<16))
			if err != nil {
				ready <- err
				return
			}
			defer c.Close()
			for e := range events { // while many connect, a request may fail for want of a connection
				if e.State == zk.StateHasSession {
					break
				}
			}
			pair := k.user(b, c, key)
			ready <- pair()
			began := <-start
			var waits []time.Duration
			for {
				asked := time.Now()
				if err := pair(); !assert.NoError(b, err) {
					break
				}
				now := time.Now()
				if now.Sub(began) > hotTime {
					break
				}
				waits = append(waits, now.Sub(asked))
			}
			mu.Lock()
			defer mu.Unlock()
			k.waits = append(k.waits, waits...)
		})
	}
	for range users {
		require.NoError(b, <-ready)
	}
	began := time.Now()
	for range users {
		start <- began
	}
	all.Wait()
	k.spent += hotTime
}

func (k *hotKey) rate() float64 { return float64(len(k.waits)) / k.spent.Seconds() }

func (k *hotKey) report(b *testing.B) {
	b.Helper()
	b.ReportMetric(k.rate(), "sections/s-"+k.name)
	slices.Sort(k.waits)
	for _, p := range []int{50, 99} {
		b.ReportMetric(k.waits[len(k.waits)*p/100].Seconds()*1e3, fmt.Sprintf("p%d-ms-%s", p, k.name))
	}
}
