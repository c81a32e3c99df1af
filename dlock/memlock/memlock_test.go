package memlock_test

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/memlock"
)

// Package dlocktest tests the rules.

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

func TestManualClockDecides(t *testing.T) {
	c := memlock.NewClock()
	b := memlock.New(&memlock.Options{Clock: c})
	_, err := b.TryAcquire(t.Context(), dlock.Request{Key: "k", Owner: "a", TTL: time.Second})
	require.NoError(t, err)
	granted := make(chan dlock.Grant, 1)
	go func() {
		g, err := b.Acquire(t.Context(), dlock.Request{Key: "k", Owner: "b", TTL: time.Second})
		if err != nil {
			t.Error(err)
		}
		granted <- g
	}()
	c.Advance(time.Second - 1)
	_, err = b.TryAcquire(t.Context(), dlock.Request{Key: "k", Owner: "c", TTL: time.Second})
	require.ErrorIs(t, err, dlock.ErrHeld)
	c.Advance(1)
	require.EqualValues(t, 2, (<-granted).Fence)
}
