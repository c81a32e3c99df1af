// Package dlocktest checks that a dlock.Backend keeps the rules in the comment of dlock.Backend. A failure prints the rule. A
// case goes on after a failure where it can, for ten seconds; a call that outlives its context by ten seconds fails.
//
// No case sleeps: a lease has expired when a successor's Acquire is granted. Times are compared by inequalities that hold on a
// machine that stalls; a request that takes longer than its lease and fails is repeated. With Harness.Virtual exact times are
// checked, too.
//
// The kit cannot see whether tokens survive a failover, a restart or the loss of the server's data, whether the server's clock
// may jump, whether an atomic step stays atomic if the server dies in the middle of it, or what happens with more than a dozen
// clients. Without a Link it skips the cases in which a message is lost or late.
package dlocktest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
)

// Harness describes the lock service under test.
type Harness struct {
	// New prepares a case: an empty service, or a running one, since every case uses its own keys. It cleans up with t.Cleanup.
	// Required.
	New func(t *testing.T) Service
	// Virtual runs each case, New included, in a testing/synctest bubble. Otherwise cases run in parallel.
	Virtual bool
	// ShortTTL is a lease whose end a case waits for, once or twice. Default: 200 ms, or 1 s in virtual time. A client's timeouts
	// should be several times as long.
	ShortTTL time.Duration
	// Late is how long after its end a lease may block a waiter, in virtual time, if the service's clock or polls are coarse.
	Late time.Duration
	// NoRepeats says that the client library never repeats a request by itself: rule 6 then has nothing to check.
	NoRepeats bool
}

// Service is the lock service of one case.
type Service struct {
	// Backend returns a Backend with its own client, which stays the harness's; the kit closes the Backend. Required.
	Backend func() dlock.Backend
	// Faulty returns a Backend and the link between it and the service. Nil skips the cases that need one.
	Faulty func() (dlock.Backend, Link)
	// Requests counts the requests of the case's Backends, which shows whether a waiter polls. Nil skips the case.
	Requests func() int
	// Advance advances the service's clock by d. Nil: that clock runs by itself, with the process's.
	Advance func(d time.Duration)
}

// Link injects faults into a Backend's messages. Each func returns once the fault is in force, and the func that it returns once
// the fault is healed; that one may be called again. During a fault calls must fail soon: a lost message breaks the connection.
type Link struct {
	LoseRequests func() (heal func())    // calls fail and never reach the service
	LoseReplies  func() (heal func())    // calls take effect and fail
	HoldReplies  func() (deliver func()) // calls take effect, and are answered when deliver is called
	Cut          func() (heal func())    // nothing reaches the service; connections are refused
	Refuse       func() (heal func())    // the service answers with an error what would lock a key, as when it is full; other calls may pass
}

// Run checks every rule, each in a subtest.
func Run(t *testing.T, h Harness) {
	t.Helper()
	if h.New == nil {
		t.Fatal("dlocktest: Harness.New is required: it prepares the lock service of a case")
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			rule := fmt.Sprintf("rule %d of dlock.Backend, %s: %s", c.rule, c.name, c.text)
			if h.Virtual {
				synctest.Test(t, func(t *testing.T) { c.run(newEnv(t, h, rule)) })
				return
			}
			t.Parallel()
			c.run(newEnv(t, h, rule))
		})
	}
}

const (
	long     = time.Hour
	patience = 2 * time.Minute
	// grace is how much longer a case goes on after its first failure, and a call may last after its context's end.
	grace = 10 * time.Second
)

type env struct {
	*testing.T
	Service
	rule    string
	failed  func() // ends ctx soon
	ctx     context.Context
	virtual bool
	repeats bool
	short   time.Duration
	late    time.Duration
}

func (e *env) Errorf(format string, args ...any) {
	e.Helper()
	e.T.Errorf("%s"+format, append([]any{e.rule}, args...)...)
	e.failed()
}

func newEnv(t *testing.T, h Harness, rule string) *env {
	t.Helper()
	e := &env{T: t, rule: rule, virtual: h.Virtual, repeats: !h.NoRepeats, short: h.ShortTTL, late: h.Late}
	if e.short == 0 {
		e.short = 200 * time.Millisecond
		if e.virtual {
			e.short = time.Second
		}
	}
	limit := patience + 4*e.short
	if !e.virtual {
		if end, ok := t.Deadline(); ok { // when go test kills the process
			limit = min(limit, (time.Until(end)-2*grace)/2)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	t.Cleanup(cancel)
	e.ctx = ctx
	e.failed = sync.OnceFunc(func() { time.AfterFunc(grace, cancel) })
	e.Service = h.New(t)
	if e.Backend == nil {
		t.Fatal("dlocktest: Service.Backend is required: it returns a Backend with a client of its own")
	}
	plain := e.Backend
	e.Backend = func() dlock.Backend { return bounded{plain(), e} }
	return e
}

func (e *env) backend() dlock.Backend {
	e.Helper()
	b := e.Backend()
	e.Cleanup(func() { assert.NoError(e, b.Close()) })
	return b
}

// bounded is a Backend whose calls must return within grace of their context's end.
type bounded struct {
	dlock.Backend
	e *env
}

func bound[T any](ctx context.Context, b bounded, call string, f func() (T, error)) (got T, err error) {
	done := make(chan struct{})
	var g T
	var gErr error
	go func() {
		defer close(done)
		g, gErr = f()
	}()
	select {
	case <-done:
		return g, gErr
	case <-ctx.Done():
	}
	select {
	case <-done:
		return g, gErr
	case <-time.After(grace):
		err := fmt.Errorf("the call hasn't returned %v after its context had ended", grace)
		b.e.Errorf("\n%s: %v", call, err)
		return got, err
	}
}

func (b bounded) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return bound(ctx, b, "Acquire", func() (dlock.Grant, error) { return b.Backend.Acquire(ctx, r) })
}

func (b bounded) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return bound(ctx, b, "TryAcquire", func() (dlock.Grant, error) { return b.Backend.TryAcquire(ctx, r) })
}

func (b bounded) Renew(ctx context.Context, g dlock.Grant) error {
	_, err := bound(ctx, b, "Renew", func() (any, error) { return nil, b.Backend.Renew(ctx, g) })
	return err
}

func (b bounded) Release(ctx context.Context, g dlock.Grant) error {
	_, err := bound(ctx, b, "Release", func() (any, error) { return nil, b.Backend.Release(ctx, g) })
	return err
}

func (b bounded) Close() error {
	_, err := bound(b.e.ctx, b, "Close, when the case was over", func() (any, error) { return nil, b.Backend.Close() })
	return err
}

// faulty is backend with a fault of its link. It skips the case if there is no such link or fault.
func (e *env) faulty(f faultOf) (b dlock.Backend, inject func() (heal func())) {
	e.Helper()
	if e.Faulty == nil {
		e.Skip("Service.Faulty is nil: without a link the kit cannot lose or delay messages")
	}
	plain, l := e.Faulty()
	b = bounded{plain, e}
	e.Cleanup(func() { assert.NoError(e, b.Close()) })
	if inject = f(l); inject == nil {
		e.Skip("not applicable: the harness's link cannot produce this fault")
	}
	return b, inject
}

func (e *env) locker(b dlock.Backend, o *dlock.Options) *dlock.Locker {
	e.Helper()
	l, err := dlock.New(b, o)
	require.NoError(e, err)
	e.Cleanup(func() { assert.NoError(e, l.Close()) })
	return l
}

func newKey() string { return "dlocktest/" + uuid.NewString() }

func request(key string, ttl time.Duration) dlock.Request {
	return dlock.Request{Key: key, Owner: uuid.NewString(), TTL: ttl}
}

func (e *env) take(b dlock.Backend, key string, ttl time.Duration) dlock.Grant {
	e.Helper()
	return e.try(b, request(key, ttl))
}

func (e *env) try(b dlock.Backend, r dlock.Request) dlock.Grant {
	e.Helper()
	g, err := e.tryShort(b, r)
	require.NoError(e, err, "TryAcquire of a free key")
	e.checkGrant(r, g)
	return g
}

// tryShort repeats TryAcquire while the machine is too slow for the lease. The earlier call's lease may block it for a while.
func (e *env) tryShort(b dlock.Backend, r dlock.Request) (dlock.Grant, error) {
	var said error
	for {
		began := time.Now()
		g, err := b.TryAcquire(e.ctx, r)
		switch {
		case err != nil && said != nil && e.ctx.Err() != nil:
			return g, said // not that the case's time is over
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

// slow reports whether a call took so long that a lease of ttl may have ended meanwhile, for which a Backend may return an error.
// It may set aside for drift what the Locker does, 1 % and 2 ms.
func (e *env) slow(from, to time.Time, ttl time.Duration) bool {
	return !e.virtual && e.Advance == nil && to.Sub(from) >= ttl-ttl/100-2*time.Millisecond && e.ctx.Err() == nil
}

func (e *env) await(b dlock.Backend, key string) (dlock.Grant, time.Time) {
	e.Helper()
	r := request(key, long)
	w := e.won(e.acquiring(e.ctx, b, r))
	e.checkGrant(r, w.g)
	return w.g, w.at
}

func (e *env) won(c <-chan granted) granted {
	e.Helper()
	w := <-c
	require.NoError(e, w.err, "Acquire")
	return w
}

func (e *env) checkGrant(r dlock.Request, g dlock.Grant) {
	e.Helper()
	assert.Equal(e, r.Key, g.Key, "the grant's key")
	assert.Equal(e, r.Owner, g.Owner, "the grant's owner")
	assert.GreaterOrEqual(e, g.TTL, r.TTL, "the grant's TTL")
	assert.NotZero(e, g.Fence, "the grant's token")
}

// checkHeld checks that another owner doesn't get key. The holder's lease must be long.
func (e *env) checkHeld(b dlock.Backend, key string) {
	e.Helper()
	g, err := b.TryAcquire(e.ctx, request(key, long))
	assert.ErrorIs(e, err, dlock.ErrHeld, "TryAcquire of a key that is held for an hour; got token %d", g.Fence)
}

func (e *env) checkFree(b dlock.Backend, key string) {
	e.Helper()
	g, err := b.TryAcquire(e.ctx, request(key, long))
	if assert.NoError(e, err, "TryAcquire of a key that should be free") {
		e.release(b, g)
	}
}

func (e *env) release(b dlock.Backend, g dlock.Grant) {
	e.Helper()
	assert.NoError(e, b.Release(e.ctx, g), "Release by the holder")
}

func (e *env) checkDoubt(err error) {
	e.Helper()
	assert.Error(e, err, "a call over a broken link")
	for _, known := range []error{dlock.ErrHeld, dlock.ErrLost, dlock.ErrInvalid, dlock.ErrClosed} {
		assert.False(e, errors.Is(err, known), "a call over a broken link: got %q, which claims to know the outcome", err)
	}
}

// slack is how much less than ttl a lease may last by the kit's clock: a server's may drift, and count in milliseconds.
func (e *env) slack(ttl time.Duration) time.Duration {
	if e.virtual {
		return 0
	}
	return ttl/100 + 2*time.Millisecond
}

// checkOver checks that a lease that began at start or later lasted for ttl, and in virtual time no longer. The successor's grant
// was known at end.
func (e *env) checkOver(start time.Time, ttl time.Duration, end time.Time) {
	e.Helper()
	got := end.Sub(start)
	assert.GreaterOrEqual(e, got, ttl-e.slack(ttl), "time from the lease's start to the successor's grant")
	if e.virtual && e.Advance == nil {
		assert.LessOrEqual(e, got, ttl+e.late+2*time.Millisecond, "time from the lease's start to the successor's grant")
	}
}

// pass lets d pass on the service's clock, by waiting for a lease of d to expire. That much time need not pass elsewhere.
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

type granted struct {
	g    dlock.Grant
	err  error
	at   time.Time
	done time.Time // when it was renewed, if it was provisional
}

// acquire calls Acquire, and renews a provisional grant at once. It retries if the machine was too slow for that.
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

func provisional(g dlock.Grant) error {
	if g.Provisional != 0 && (g.Provisional < 0 || g.Provisional >= g.TTL) {
		return fmt.Errorf("got a grant with Provisional %v and TTL %v, want it between 0 and the TTL", g.Provisional, g.TTL)
	}
	return nil
}

func (e *env) acquiring(ctx context.Context, b dlock.Backend, r dlock.Request) <-chan granted {
	e.Helper()
	return begin(e, func() granted { return e.acquire(ctx, b, r) })
}
