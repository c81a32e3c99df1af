package redislock_test

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redislock"
)

// reaper returns a Backend whose keys nobody else uses.
func reaper(t *testing.T) (*redislock.Backend, *redis.Client, string) {
	t.Helper()
	_, c, _ := onServer(t, server).backend(t)
	prefix := "reap[*]?/" + uuid.NewString() + ":" // SCAN's patterns must not take it for one
	return newBackend(t, c, &redislock.Options{Prefix: prefix}), c, prefix
}

func take(t *testing.T, b *redislock.Backend, key string) dlock.Grant {
	t.Helper()
	g, err := b.TryAcquire(t.Context(), dlock.Request{Key: key, Owner: uuid.NewString(), TTL: time.Hour})
	require.NoError(t, err)
	return g
}

func TestReap(t *testing.T) {
	b, c, prefix := reaper(t)
	for i := range 1200 { // several batches
		g := take(t, b, fmt.Sprint("k", i))
		require.NoError(t, b.Release(t.Context(), g))
	}
	for range 9 {
		require.NoError(t, b.Release(t.Context(), take(t, b, "k7")))
	}
	held := take(t, b, "held")
	require.NoError(t, c.Set(t.Context(), prefix+"fence:{broken}", "x", 0).Err())

	n, err := b.Reap(t.Context(), 0)
	require.NoError(t, err)
	require.EqualValues(t, 1200, n)
	require.Equal(t, "10", c.Get(t.Context(), prefix+"fence-floor").Val(), "the greatest token of all")
	require.Equal(t, "1", c.Get(t.Context(), prefix+"fence:{held}").Val(), "the counter of a lock that is held")
	require.Equal(t, "x", c.Get(t.Context(), prefix+"fence:{broken}").Val())
	require.Zero(t, c.Exists(t.Context(), prefix+"fence:{k7}").Val())

	require.EqualValues(t, 11, take(t, b, "k7").Fence)
	require.EqualValues(t, 11, take(t, b, "never seen").Fence)
	require.NoError(t, b.Release(t.Context(), held))
	require.EqualValues(t, 2, take(t, b, "held").Fence)

	n, err = b.Reap(t.Context(), 0)
	require.NoError(t, err)
	require.Zero(t, n, "all that is left is held")
}

// traced is a client of the user's own kind.
type traced struct{ redis.UniversalClient }

// The floor holds for every client of the server, whatever its type.
func TestFloorBehindAWrapper(t *testing.T) {
	b, c, prefix := reaper(t)
	for range 5 {
		require.NoError(t, b.Release(t.Context(), take(t, b, "k")))
	}
	_, err := b.Reap(t.Context(), 0)
	require.NoError(t, err)
	require.EqualValues(t, 6, take(t, newBackend(t, traced{c}, &redislock.Options{Prefix: prefix}), "k").Fence)
}

// A counter that is used up, or was set to be, does not use up those of all other keys.
func TestReapSparesTheUsedUp(t *testing.T) {
	b, c, prefix := reaper(t)
	for name, token := range map[string]string{"last": "9007199254740991", "half": "4503599627370496"} {
		require.NoError(t, c.Set(t.Context(), prefix+"fence:{"+name+"}", token, 0).Err())
	}
	require.NoError(t, b.Release(t.Context(), take(t, b, "k")))
	n, err := b.Reap(t.Context(), 0)
	require.NoError(t, err)
	require.EqualValues(t, 1, n)
	require.EqualValues(t, 2, take(t, b, "new").Fence)
	require.EqualValues(t, 4503599627370497, take(t, b, "half").Fence)
	_, err = b.TryAcquire(t.Context(), dlock.Request{Key: "last", Owner: "o", TTL: time.Hour})
	require.ErrorContains(t, err, "out of range")
}

func TestReapSparesTheBusy(t *testing.T) {
	b, c, prefix := reaper(t)
	require.NoError(t, b.Release(t.Context(), take(t, b, "k")))
	n, err := b.Reap(t.Context(), time.Hour)
	require.NoError(t, err)
	require.Zero(t, n)
	require.Equal(t, "1", c.Get(t.Context(), prefix+"fence:{k}").Val())

	// A key whose lease has just run out, and for which somebody waits.
	require.NoError(t, c.RPush(t.Context(), prefix+"queue:{k}", "1000 wake:x somebody").Err())
	n, err = b.Reap(t.Context(), 0)
	require.NoError(t, err)
	require.Zero(t, n)
}

// Tokens grow, whenever counters are reaped.
func TestReapWhileLocksAreTaken(t *testing.T) {
	b, _, _ := reaper(t)
	var (
		wg      sync.WaitGroup
		workers atomic.Int32
		reaped  atomic.Int64
		errs    = make(chan error, 5)
	)
	for i := range 4 {
		workers.Add(1)
		wg.Go(func() {
			defer workers.Add(-1)
			key, last := fmt.Sprint("k", i), uint64(0)
			for n := 0; n < 200 || reaped.Load() < 20; n++ {
				g, err := b.TryAcquire(t.Context(), dlock.Request{Key: key, Owner: uuid.NewString(), TTL: time.Hour})
				if err == nil {
					err = b.Release(t.Context(), g)
				}
				if err == nil && g.Fence <= last {
					err = fmt.Errorf("token %d after %d", g.Fence, last)
				}
				if err != nil {
					errs <- err
					return
				}
				last = g.Fence
			}
		})
	}
	wg.Go(func() {
		for workers.Load() > 0 {
			n, err := b.Reap(t.Context(), 0)
			if err != nil {
				reaped.Store(20) // or the workers go on for ever
				errs <- err
				return
			}
			reaped.Add(n)
		}
	})
	wg.Wait()
	close(errs)
	require.NoError(t, <-errs)
}

func TestReapRefuses(t *testing.T) {
	b, _, _ := reaper(t)
	_, err := b.Reap(t.Context(), -1)
	require.ErrorIs(t, err, dlock.ErrInvalid)
	c := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	_, err = newBackend(t, c, nil).Reap(t.Context(), 0)
	require.ErrorIs(t, err, dlock.ErrInvalid)
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	t.Cleanup(func() { require.NoError(t, ring.Close()) })
	_, err = newBackend(t, ring, &redislock.Options{Mode: redislock.ModeSpin}).Reap(t.Context(), 0)
	require.ErrorIs(t, err, dlock.ErrInvalid)
}
