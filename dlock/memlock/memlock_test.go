package memlock_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/memlock"
)

// Runs first: later tests would hang if a lease never ended.
func TestScripts(t *testing.T) {
	locktest.Scripts(t, "testdata/scripts.txt", true, func(*testing.T) locktest.Bench {
		b := memlock.New()
		return locktest.Bench{
			Key:  func(key string) string { return key },
			Open: func(w *locktest.Wire, _ ...string) dlock.Backend { return locktest.Wired(b.Client(), w) },
		}
	})
}

// Package dlocktest's tests also run it over a link that fails.
func TestConformance(t *testing.T) {
	dlocktest.Run(t, dlocktest.Harness{Virtual: true, New: func(*testing.T) dlocktest.Service {
		m := memlock.New()
		return dlocktest.Service{Backend: func() dlock.Backend { return m.Client() }}
	}})
}

// Nobody waits for it, so its record is still there.
func TestExpiredLeaseIsLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memlock.New()
		g := locktest.Take(t, b, locktest.Request(time.Second))
		time.Sleep(time.Second)
		require.ErrorIs(t, b.Renew(t.Context(), g), dlock.ErrLost)
		require.ErrorIs(t, b.Release(t.Context(), g), dlock.ErrLost)
	})
}

// The waiter's timer may be late.
func TestTryAcquireDoesNotOvertake(t *testing.T) {
	for range 100 {
		synctest.Test(t, func(t *testing.T) {
			b := memlock.New()
			g := locktest.Take(t, b, locktest.Request(time.Second))
			came := locktest.Acquire(t.Context(), b, locktest.Next(g.Key, time.Hour))
			synctest.Wait()
			time.Sleep(time.Second)
			_, err := b.TryAcquire(t.Context(), locktest.Next(g.Key, time.Hour))
			require.ErrorIs(t, err, dlock.ErrHeld)
			require.NoError(t, (<-came).Err)
		})
	}
}

// The waiter's context ends just before its grant: it has the lock, or has left.
func TestGrantedWhileLeaving(t *testing.T) {
	for range 100 { // the waiter may be faster
		synctest.Test(t, func(t *testing.T) {
			b := memlock.New()
			g := locktest.Take(t, b, locktest.Request(time.Hour))
			ctx, cancel := context.WithCancel(t.Context())
			came := locktest.Acquire(ctx, b, locktest.Next(g.Key, time.Hour))
			synctest.Wait()
			cancel()
			locktest.Release(t, b, g)
			if w := <-came; w.Err == nil {
				locktest.Release(t, b, w.G)
			}
			locktest.Take(t, b, locktest.Next(g.Key, time.Hour))
		})
	}
}

// Some wait with the same, repeated request.
func TestRequestRepeated(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memlock.New()
		_, err := b.TryAcquire(t.Context(), dlock.Request{Key: "k", Owner: "a", TTL: time.Second})
		require.NoError(t, err)
		granted := make(chan dlock.Grant, 3)
		for _, owner := range []string{"b", "c", "b", "b"} {
			go func() {
				g, err := b.Acquire(t.Context(), dlock.Request{Key: "k", Owner: owner, TTL: time.Second})
				if err == nil {
					granted <- g
				}
			}()
			synctest.Wait()
		}
		time.Sleep(time.Second)
		synctest.Wait()
		require.Len(t, granted, 3)
		require.Equal(t, dlock.Grant{Key: "k", Owner: "b", Fence: 2, TTL: time.Second, Start: time.Now()}, <-granted)
	})
}
