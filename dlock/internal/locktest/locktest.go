// Package locktest has helpers of the backends' own tests.
package locktest

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
)

// Timeout ends a failing test.
const Timeout = 30 * time.Second

// Request is a new owner's request for a new key.
func Request(ttl time.Duration) dlock.Request { return Next("test-"+uuid.NewString(), ttl) }

// Next is a new owner's request for key.
func Next(key string, ttl time.Duration) dlock.Request {
	return dlock.Request{Key: key, Owner: uuid.NewString(), TTL: ttl}
}

// Outcome is the result of an acquire, and when it came.
type Outcome struct {
	G   dlock.Grant
	Err error
	At  time.Time
}

// Go calls acquire in the background.
func Go(acquire func() (dlock.Grant, error)) <-chan Outcome {
	c := make(chan Outcome, 1)
	go func() {
		g, err := acquire()
		c <- Outcome{g, err, time.Now()}
	}()
	return c
}

// Acquire calls Acquire in the background.
func Acquire(ctx context.Context, b dlock.Backend, r dlock.Request) <-chan Outcome {
	return Go(func() (dlock.Grant, error) { return b.Acquire(ctx, r) })
}

// Receive returns what comes from c.
func Receive[T any](tb testing.TB, c <-chan T) (v T) {
	tb.Helper()
	select {
	case v = <-c:
	case <-time.After(Timeout):
		require.Fail(tb, "nothing came")
	}
	return v
}

// Won returns the grant that comes from c.
func Won(tb testing.TB, c <-chan Outcome) dlock.Grant {
	tb.Helper()
	o := Receive(tb, c)
	require.NoError(tb, o.Err)
	return o.G
}

// Take returns the grant of a lock that is free.
func Take(tb testing.TB, b dlock.Backend, r dlock.Request) dlock.Grant {
	tb.Helper()
	g, err := b.TryAcquire(tb.Context(), r)
	require.NoError(tb, err)
	require.Equal(tb, r.TTL, g.TTL)
	return g
}

// UseOnce has b run each of its scripts or statements once, and calls before before each.
func UseOnce(tb testing.TB, b dlock.Backend, before func()) {
	tb.Helper()
	before()
	g := Take(tb, b, Request(time.Hour))
	before()
	require.NoError(tb, b.Renew(tb.Context(), g))
	before()
	Release(tb, b, g)
	before()
	undo := dlock.Grant{Key: g.Key, Owner: g.Owner, TTL: g.TTL}
	if err := b.Release(tb.Context(), undo); !errors.Is(err, dlock.ErrLost) { // a minority may not have been freed yet
		require.NoError(tb, err)
	}
}

// Eventually waits until f reports true.
func Eventually(tb testing.TB, f func() bool, msg ...any) {
	tb.Helper()
	require.Eventually(tb, f, Timeout, time.Millisecond, msg...)
}

// Release has b release g.
func Release(tb testing.TB, b dlock.Backend, g dlock.Grant) {
	tb.Helper()
	require.NoError(tb, b.Release(tb.Context(), g))
}

// Undisturbed repeats a test until no stall of the machine disturbed it.
func Undisturbed(t *testing.T, f func(t *testing.T) (done bool)) {
	t.Helper()
	for began := time.Now(); !f(t); {
		require.Less(t, time.Since(began), 5*time.Minute, "disturbed again and again")
	}
}

// Link returns the faults of a dlocktest.Link: inject keeps a fault in force until heal is called.
func Link[F any](inject func(F) (heal func()), loseRequests, loseReplies, holdReplies, cut F) dlocktest.Link {
	fault := func(f F) func() func() { return func() func() { return inject(f) } }
	return dlocktest.Link{
		LoseRequests: fault(loseRequests), LoseReplies: fault(loseReplies), HoldReplies: fault(holdReplies), Cut: fault(cut),
	}
}
