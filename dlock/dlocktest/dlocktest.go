// Package dlocktest checks that a dlock.Backend keeps the rules in the comment of dlock.Backend. Each case has the name
// that stands there in brackets; a failure prints the rule.
//
// Nothing is slept through and hoped for. That a lease has run out is seen by a successor's Acquire that is granted;
// times are compared by inequalities that hold on a machine that stalls; that a lock is still held is only claimed of a
// lease of an hour; a request for a short lease, and one whose grant is a provisional one for a short time, is repeated if
// it failed after more time than the lease lasts. In a
// testing/synctest bubble (Harness.Virtual) the same cases ask for exact times as well.
//
// What the kit cannot see: whether tokens survive the loss of the server's data, a failover or a restart; whether the
// server's clock may jump; whether an atomic step stays atomic when the server dies in its middle; what happens at a
// larger scale than a dozen clients. Without a Link it cannot see what happens when a message is lost or late, and
// says so by skipping those cases.
package dlocktest

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
)

// Harness tells the kit about the lock service under test.
type Harness struct {
	// New prepares a case: an empty service, or one that runs already, since every case uses keys of its own. What it
	// starts it ends by t.Cleanup. Required.
	New func(t *testing.T) Service
	// Virtual runs each case, New included, in a testing/synctest bubble. Otherwise cases run in parallel.
	Virtual bool
	// ShortTTL is a lease that a case waits for, once or twice. Default: 200 ms, or 1 s in virtual time. A client's
	// timeouts should be several times as long.
	ShortTTL time.Duration
	// NoRepeats says that the client library never repeats a request by itself: rule 6 has nothing to check then.
	NoRepeats bool
}

// Service is the lock service of one case.
type Service struct {
	// Backend returns a Backend with a client of its own. The kit closes it; the client is the harness's. Required.
	Backend func() dlock.Backend
	// Faulty returns a Backend and the link between it and the service. Nil skips the cases that need one.
	Faulty func() (dlock.Backend, Link)
	// Requests says how many requests the case's Backends have sent, which shows whether a waiter polls. Nil skips the case.
	Requests func() int
	// Advance moves the service's clock on by d. Nil: it runs by itself, with the process's.
	Advance func(d time.Duration)
}

// Link is how a Backend's messages get lost. Each func returns when the fault is in force, and the returned one when
// it is healed, and may be called again. While a fault is in force calls must fail soon: a lost message breaks the
// connection.
type Link struct {
	LoseRequests func() (heal func())    // calls fail and never reach the service
	LoseReplies  func() (heal func())    // calls take effect and fail
	HoldReplies  func() (deliver func()) // calls take effect, and are answered when deliver is called
	Cut          func() (heal func())    // nothing reaches the service; connections are refused
}

// Run checks every rule, each in a subtest.
func Run(t *testing.T, h Harness) {
	t.Helper()
	if h.New == nil {
		t.Fatal("dlocktest: Harness.New is required: it prepares the lock service of a case")
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Cleanup(func() {
				if t.Failed() {
					t.Logf("rule %d of dlock.Backend, %s: %s", c.rule, c.name, c.text)
				}
			})
			if h.Virtual {
				synctest.Test(t, func(t *testing.T) { c.run(newEnv(t, h)) })
				return
			}
			t.Parallel()
			c.run(newEnv(t, h))
		})
	}
}

const (
	// long is a lease that doesn't run out while a case runs.
	long = time.Hour
	// patience is when a case gives up. It ends a failing case and is no part of a passing one.
	patience = 2 * time.Minute
)

// env is what a case works with. Its methods end the case when they fail.
type env struct {
	*testing.T
	Service
	ctx     context.Context
	virtual bool
	repeats bool
	short   time.Duration
}

func newEnv(t *testing.T, h Harness) *env {
	t.Helper()
	e := &env{T: t, virtual: h.Virtual, repeats: !h.NoRepeats, short: h.ShortTTL}
	if e.short == 0 {
		e.short = 200 * time.Millisecond
		if e.virtual {
			e.short = time.Second
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience+4*e.short)
	t.Cleanup(cancel)
	e.ctx = ctx
	e.Service = h.New(t)
	if e.Backend == nil {
		t.Fatal("dlocktest: Service.Backend is required: it returns a Backend with a client of its own")
	}
	return e
}

// backend returns a Backend that is closed with the case.
func (e *env) backend() dlock.Backend {
	e.Helper()
	b := e.Backend()
	e.Cleanup(func() { require.NoError(e, b.Close()) })
	return b
}

// faulty is backend with a link. It skips the case if the harness has none, or if has says that it lacks the fault.
func (e *env) faulty(has func(Link) bool) (dlock.Backend, Link) {
	e.Helper()
	if e.Faulty == nil {
		e.Skip("Service.Faulty is nil: without a link the kit cannot lose or delay messages")
	}
	b, l := e.Faulty()
	e.Cleanup(func() { require.NoError(e, b.Close()) })
	if !has(l) {
		e.Skip("not applicable: the harness's link cannot produce this fault")
	}
	return b, l
}

// locker returns a Locker, which closes b with the case.
func (e *env) locker(b dlock.Backend, o *dlock.Options) *dlock.Locker {
	e.Helper()
	l, err := dlock.New(b, o)
	require.NoError(e, err)
	e.Cleanup(func() { require.NoError(e, l.Close()) })
	return l
}

func newKey() string { return "dlocktest/" + uuid.NewString() }

func request(key string, ttl time.Duration) dlock.Request {
	return dlock.Request{Key: key, Owner: uuid.NewString(), TTL: ttl}
}

// take has a new owner take a key that is free.
func (e *env) take(b dlock.Backend, key string, ttl time.Duration) dlock.Grant {
	e.Helper()
	return e.try(b, request(key, ttl))
}

func (e *env) try(b dlock.Backend, r dlock.Request) dlock.Grant {
	e.Helper()
	g, err := e.ask(b, r)
	require.NoError(e, err, "TryAcquire of a free key")
	e.checkGrant(r, g)
	return g
}

// ask calls TryAcquire, again if the machine was too slow for the lease. What the earlier call has left may be in the way for
// a time.
func (e *env) ask(b dlock.Backend, r dlock.Request) (dlock.Grant, error) {
	var said error
	for {
		began := time.Now()
		g, err := b.TryAcquire(e.ctx, r)
		switch {
		case err != nil && said != nil && e.ctx.Err() != nil:
			return g, said // and not that the case's time is over
		case said != nil && errors.Is(err, dlock.ErrHeld):
		case err == nil, errors.Is(err, dlock.ErrInvalid), errors.Is(err, dlock.ErrHeld), !e.slow(began, time.Now(), r.TTL):
			return g, err
		default:
			said = err
		}
		select {
		case <-time.After(time.Millisecond):
		case <-e.ctx.Done():
		}
	}
}

// hold has a Locker take a key that is free.
func (e *env) hold(b dlock.Backend, key string, o *dlock.Options) *dlock.Handle {
	e.Helper()
	for l := e.locker(b, o); ; {
		began := time.Now()
		h, err := l.Acquire(e.ctx, key)
		if err != nil && e.slow(began, time.Now(), o.TTL) {
			continue
		}
		require.NoError(e, err, "Locker.Acquire of a free key")
		return h
	}
}

// slow reports whether a call has taken so long that a lease of ttl may have been over before it was known, for which a
// Backend may return an error. A case is over when its time is.
func (e *env) slow(from, to time.Time, ttl time.Duration) bool {
	return !e.virtual && e.Advance == nil && to.Sub(from) >= ttl && e.ctx.Err() == nil
}

// await has a new owner wait for a key. It returns the grant and when it was known.
func (e *env) await(b dlock.Backend, key string) (dlock.Grant, time.Time) {
	e.Helper()
	r := request(key, long)
	w := e.acquire(e.ctx, b, r)
	require.NoError(e, w.err, "Acquire")
	e.checkGrant(r, w.g)
	return w.g, w.at
}

func (e *env) checkGrant(r dlock.Request, g dlock.Grant) {
	e.Helper()
	require.Equal(e, r.Key, g.Key, "the grant's key")
	require.Equal(e, r.Owner, g.Owner, "the grant's owner")
	require.GreaterOrEqual(e, g.TTL, r.TTL, "the grant's TTL")
	require.NotZero(e, g.Fence, "the grant's token")
}

// requireHeld claims that another owner doesn't get key. The holder's lease must be a long one.
func (e *env) requireHeld(b dlock.Backend, key string) {
	e.Helper()
	g, err := b.TryAcquire(e.ctx, request(key, long))
	require.ErrorIs(e, err, dlock.ErrHeld, "TryAcquire of a key that is held for an hour; got token %d", g.Fence)
}

// requireFree claims that another owner gets key, and gives it back.
func (e *env) requireFree(b dlock.Backend, key string) {
	e.Helper()
	g, err := b.TryAcquire(e.ctx, request(key, long))
	require.NoError(e, err, "TryAcquire of a key that should be free")
	e.release(b, g)
}

func (e *env) release(b dlock.Backend, g dlock.Grant) {
	e.Helper()
	require.NoError(e, b.Release(e.ctx, g), "Release by the holder")
}

// requireDoubt claims that err leaves open whether a call took effect.
func (e *env) requireDoubt(err error) {
	e.Helper()
	require.Error(e, err, "a call over a broken link")
	for _, known := range []error{dlock.ErrHeld, dlock.ErrLost, dlock.ErrInvalid, dlock.ErrClosed} {
		require.False(e, errors.Is(err, known), "a call over a broken link: got %q, which claims to know the outcome", err)
	}
}

// slack is how much less than ttl a lease may last by the kit's clock: a server's may drift, and count in milliseconds.
func (e *env) slack(ttl time.Duration) time.Duration {
	if e.virtual {
		return 0
	}
	return ttl/100 + 2*time.Millisecond
}

// requireOver claims that a lease which began not before start lasted for ttl, and in virtual time not longer: the
// successor's grant was known at end.
func (e *env) requireOver(start time.Time, ttl time.Duration, end time.Time) {
	e.Helper()
	got := end.Sub(start)
	require.GreaterOrEqual(e, got, ttl-e.slack(ttl), "time from the lease's start to the successor's grant")
	if e.virtual && e.Advance == nil {
		require.LessOrEqual(e, got, ttl+2*time.Millisecond, "time from the lease's start to the successor's grant")
	}
}

// pass lets d pass on the service's clock, by seeing a lease of d run out. Every event of the case that was under way
// has had that much time too, but nothing may depend on it.
func (e *env) pass(d time.Duration) {
	e.Helper()
	if e.Advance != nil {
		e.Advance(d)
		return
	}
	b, key := e.backend(), newKey()
	e.take(b, key, d)
	e.await(b, key)
}

// begin calls f in a goroutine, which the case waits for, and returns its answer's channel.
func begin[T any](e *env, f func() T) <-chan T {
	e.Helper()
	c, done := make(chan T, 1), make(chan struct{})
	go func() {
		defer close(done)
		c <- f()
	}()
	e.Cleanup(func() { <-done })
	return c
}

// granted is what an Acquire in the background came to.
type granted struct {
	g    dlock.Grant
	err  error
	at   time.Time // when the grant was known
	done time.Time // when it was renewed, if it was provisional
}

// acquire calls Acquire, and renews a provisional grant at once, as the Locker does in time. It asks again if the machine
// was too slow for that.
func (e *env) acquire(ctx context.Context, b dlock.Backend, r dlock.Request) granted {
	for {
		g, err := b.Acquire(ctx, r)
		at := time.Now()
		if err == nil {
			err = provisional(g)
		}
		if err == nil && g.Provisional > 0 {
			err = b.Renew(ctx, g)
			if errors.Is(err, dlock.ErrLost) && e.slow(g.Start, time.Now(), g.Provisional) {
				continue
			}
		}
		return granted{g, err, at, time.Now()}
	}
}

// provisional returns what is wrong with the grant's Provisional, or nil.
func provisional(g dlock.Grant) error {
	if g.Provisional != 0 && (g.Provisional < 0 || g.Provisional >= g.TTL) {
		return fmt.Errorf("got a grant with Provisional %v and TTL %v, want it between 0 and the TTL", g.Provisional, g.TTL)
	}
	return nil
}

// acquiring is acquire in the background.
func (e *env) acquiring(ctx context.Context, b dlock.Backend, r dlock.Request) <-chan granted {
	e.Helper()
	return begin(e, func() granted { return e.acquire(ctx, b, r) })
}
