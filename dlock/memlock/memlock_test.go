package memlock_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/memlock"
)

// Before a test in which a lease that never ends would be waited for.
func TestLeaseEndsAtItsTTL(t *testing.T) {
	c := memlock.NewClock()
	b := memlock.New(&memlock.Options{Clock: c})
	for owner, at := range []time.Duration{0, time.Second - 1, time.Second} {
		c.Advance(at - time.Duration(c.Now().UnixNano()))
		_, err := b.TryAcquire(t.Context(), dlock.Request{Key: "k", Owner: fmt.Sprint(owner), TTL: time.Second})
		if at == time.Second-1 {
			require.ErrorIs(t, err, dlock.ErrHeld)
		} else {
			require.NoError(t, err)
		}
	}
}

// Package dlocktest also runs it over a link that fails.
func TestConformance(t *testing.T) {
	t.Run("virtual", func(t *testing.T) { conform(t, true, func() (memlock.Clock, func(time.Duration)) { return nil, nil }) })
	t.Run("manual", func(t *testing.T) {
		conform(t, false, func() (memlock.Clock, func(time.Duration)) { c := memlock.NewClock(); return c, c.Advance })
	})
}

func conform(t *testing.T, virtual bool, clock func() (memlock.Clock, func(time.Duration))) {
	t.Helper()
	dlocktest.Run(t, dlocktest.Harness{Virtual: virtual, New: func(*testing.T) dlocktest.Service {
		c, advance := clock()
		m := memlock.New(&memlock.Options{Clock: c})
		return dlocktest.Service{Backend: func() dlock.Backend { return m.Client() }, Advance: advance}
	}})
}

func TestFirstComeFirstServed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := memlock.New(nil)
		g, err := b.TryAcquire(t.Context(), dlock.Request{Key: "k", Owner: "holder", TTL: time.Second})
		require.NoError(t, err)
		const waiters = 5
		order := make(chan int, waiters)
		for i := range waiters {
			go func() {
				g, err := b.Client().Acquire(t.Context(), dlock.Request{Key: "k", Owner: fmt.Sprint(i), TTL: time.Second})
				if err != nil {
					t.Error(err)
				}
				if got, want := time.Since(g.Start), time.Duration(0); got != want {
					t.Errorf("waiter %d: the grant is %v old, want %v", i, got, want)
				}
				order <- i // and lets the lease run out
			}()
			synctest.Wait()
		}
		for i := range waiters {
			require.Equal(t, i, <-order)
			require.Equal(t, time.Duration(i+1)*time.Second, time.Since(g.Start), "granted when the lease before ran out")
		}
	})
}

func TestManualClock(t *testing.T) {
	c := memlock.NewClock()
	var got []string
	note := func(s string) func() {
		return func() { got = append(got, fmt.Sprint(s, " at ", c.Now().Unix())) }
	}
	c.AfterFunc(3*time.Second, note("third"))
	c.AfterFunc(time.Second, func() {
		note("first")()
		c.AfterFunc(time.Second, note("second"))
		c.AfterFunc(time.Minute, note("never"))
	})
	c.Advance(500 * time.Millisecond)
	require.Empty(t, got)
	c.Advance(10 * time.Second)
	require.Equal(t, []string{"first at 1", "second at 2", "third at 3"}, got)
	require.Equal(t, time.Unix(10, 5e8), c.Now())
}

type countingClock struct {
	*memlock.ManualClock
	timers int
}

func (c *countingClock) AfterFunc(d time.Duration, f func()) {
	c.timers++
	c.ManualClock.AfterFunc(d, f)
}

// Some wait with the same request, which was repeated.
func TestManualClockDecides(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := &countingClock{ManualClock: memlock.NewClock()}
		b := memlock.New(&memlock.Options{Clock: c})
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
		require.Equal(t, 1, c.timers, "all wait for the same time")
		c.Advance(time.Second - 1)
		_, err = b.TryAcquire(t.Context(), dlock.Request{Key: "k", Owner: "d", TTL: time.Second})
		require.ErrorIs(t, err, dlock.ErrHeld)
		c.Advance(1)
		synctest.Wait()
		require.Len(t, granted, 3)
		require.Equal(t, dlock.Grant{Key: "k", Owner: "b", Fence: 2, TTL: time.Second, Start: time.Now()}, <-granted)
	})
}
