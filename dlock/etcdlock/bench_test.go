package etcdlock_test

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
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
		{"Backends", func(key string) func(context.Context) error { return pairOf(backend(ours), key) }}, // one each
		{"Backend", func(key string) func(context.Context) error { return pairOf(shared, key) }},         // one for all
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

func etcdlockUser(b *testing.B, c *clientv3.Client, key string) (func(context.Context) error, func() error) {
	b.Helper()
	l, err := etcdlock.New(c, &etcdlock.Options{FollowLeader: true})
	require.NoError(b, err)
	return pairOf(l, key), l.Close
}

func mutexUser(b *testing.B, c *clientv3.Client, key string) (func(context.Context) error, func() error) {
	b.Helper()
	s, err := concurrency.NewSession(c, concurrency.WithTTL(int(benchTTL/time.Second)))
	require.NoError(b, err)
	m := concurrency.NewMutex(s, "bench/"+key)
	return func(ctx context.Context) error {
		if err := m.Lock(ctx); err != nil {
			return err
		}
		return m.Unlock(ctx)
	}, s.Close
}

func pairOf(l *etcdlock.Backend, key string) func(ctx context.Context) error {
	return func(ctx context.Context) error {
		g, err := l.Acquire(ctx, dlock.Request{Key: key, Owner: uuid.NewString(), TTL: benchTTL})
		if err != nil {
			return err
		}
		return l.Release(ctx, g)
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

// BenchmarkHotKey has many contenders, with a client, a Backend and a session each, take one lock over and over, and holds
// this package against etcd's own Mutex on a cluster of three. The two take turns, so that a busy machine is busy for both;
// nothing is left of one when the other's turn comes.
func BenchmarkHotKey(b *testing.B) {
	for _, users := range []int{50, 200} {
		b.Run(strconv.Itoa(users), func(b *testing.B) {
			kinds := []*hotKey{{name: "Mutex", user: mutexUser}, {name: "etcdlock", user: etcdlockUser}}
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

// hotKey is what a kind of contender makes of one key.
type hotKey struct {
	name  string
	user  func(b *testing.B, c *clientv3.Client, key string) (pair func(ctx context.Context) error, leave func() error)
	spent time.Duration
	waits []time.Duration // from asking for the lock to having given it back
}

// hotTime is for how long a round lasts. What ends later is not counted: the queue runs empty then.
const hotTime = 3 * time.Second

func (k *hotKey) round(b *testing.B, users int) {
	b.Helper()
	key := uuid.NewString()
	var all sync.WaitGroup
	var mu sync.Mutex
	ready, start := make(chan error), make(chan time.Time)
	for range users {
		all.Go(func() {
			c, err := clientv3.New(clientv3.Config{Endpoints: three.Addrs(), Logger: zap.NewNop()})
			if !assert.NoError(b, err) {
				ready <- err
				return
			}
			defer func() { assert.NoError(b, c.Close()) }()
			pair, leave := k.user(b, c, key)
			defer func() { assert.NoError(b, leave()) }()
			ready <- pair(b.Context()) // has connected, and started a session
			began := <-start
			var waits []time.Duration
			for {
				asked := time.Now()
				if err := pair(b.Context()); !assert.NoError(b, err) {
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
