package dlocktest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
)

var cases = []struct {
	name string
	rule int // of dlock.Backend
	text string
	run  func(e *env)
}{
	{"Exclusive", 1, "a key has at most one live grant", exclusive},
	{"TokensIncrease", 2, "a grant's token is at least 1 and greater than that of every earlier grant of the key", tokensIncrease},
	{"TokensSurviveExpiry", 2, "tokens also grow when the previous lease ran out", tokensSurviveExpiry},
	{"TokenMintedWithGrant", 2, "the token is minted in the same atomic step as the grant", tokenMintedWithGrant},
	{"StartBeforeRequest", 3, "a grant's Start is not later than the moment at which the server began to count its TTL", startBeforeRequest},
	{"TryHeld", 4, "TryAcquire of a held key returns ErrHeld and leaves nothing behind", tryHeld},
	{"WaiterWakes", 5, "Acquire is granted after a release", waiterWakes},
	{"WaiterOutlivesHolder", 5, "Acquire is granted once the holder's lease has run out, and not before", waiterOutlivesHolder},
	{"WaiterCancelled", 5, "when ctx ends, Acquire returns its cause, and the waiter blocks nobody", waiterCancelled},
	{"WaitersCutOff", 5, "waiters whose ctx ends while their messages are lost block nobody once undone, however many", waitersCutOff},
	{"WaiterIsTold", 5, "a waiter doesn't poll if the server can notify it", waiterIsTold},
	{"RetrySameOwner", 6, "a request that the client library repeats is the same acquisition, with a lease that restarts", retrySameOwner},
	{"RenewExtends", 7, "Renew makes the lease run for its TTL from now", renewExtends},
	{"RenewByNonOwner", 7, "Renew by anyone but the holder changes nothing and returns ErrLost", renewByNonOwner},
	{"RenewAtomic", 7, "Renew's check and effect are one atomic step", renewAtomic},
	{"ReleaseByNonOwner", 8, "Release by anyone but the holder changes nothing and returns ErrLost", releaseByNonOwner},
	{"ReleaseRepeated", 8, "a release that is repeated late frees no later grant of the same Backend", releaseRepeated},
	{"ReleaseAtomic", 8, "Release's check and effect are one atomic step", releaseAtomic},
	{"AcquireReplyLost", 9, "a grant whose reply was lost is undone by Release with Key and Owner", func(e *env) { acquireFails(e, repliesLost) }},
	{"AcquireRequestLost", 9, "a request that never arrived leaves nothing; Release undoes nothing", func(e *env) { acquireFails(e, requestsLost) }},
	{"RenewReplyLost", 9, "a renewal whose reply was lost is not reported as a lost lease", func(e *env) { renewFails(e, repliesLost) }},
	{"RenewRequestLost", 9, "a renewal that never arrived is not reported as a lost lease", func(e *env) { renewFails(e, requestsLost) }},
	{"ReleaseReplyLost", 9, "a release whose reply was lost is not reported as a lost lease", func(e *env) { releaseFails(e, repliesLost) }},
	{"ReleaseRequestLost", 9, "a release that never arrived is not reported as done", releaseRequestLost},
	{"Unreachable", 10, "a server that cannot be reached yields an error, never a grant", unreachable},
	{"Refused", 10, "a server that refuses yields an error at once, never a grant or a loss", refused},
	{"Silent", 10, "while a server is silent, calls end with ctx or at the client's own timeout, and Locker.Close returns", silent},
	{"KeysIndependent", 11, "keys are independent", keysIndependent},
	{"AwkwardKeys", 11, "every key that CheckKey accepts works or is refused with ErrInvalid", awkwardKeys},
	{"TTLNotRounded", 12, "a TTL that is not positive, or not exact on the server, is refused with ErrInvalid, not rounded", ttlNotRounded},
	{"GrantOutlivesContext", 13, "a grant outlives the ctx of its request", grantOutlivesContext},
	{"Closed", 13, "after Close every method returns ErrClosed, and leases stay", closed},
}

func (e *env) contend(key string) []uint64 {
	const clients, rounds = 6, 8
	var (
		wg     sync.WaitGroup
		inside atomic.Int32
		tokens []uint64 // guarded by the lock under test
		errs   = make(chan error, clients)
	)
	for range clients {
		b := e.backend()
		wg.Go(func() {
			for range rounds {
				w := e.acquire(e.ctx, b, request(key, long))
				if w.err != nil {
					errs <- w.err
					return
				}
				if inside.Add(1) != 1 {
					errs <- errors.New("two owners hold the key at once")
					return
				}
				tokens = append(tokens, w.g.Fence)
				inside.Add(-1)
				if err := b.Release(e.ctx, w.g); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		assert.NoError(e, err)
	}
	require.Len(e, tokens, clients*rounds)
	return tokens
}

func exclusive(e *env) {
	a, b, key := e.backend(), e.backend(), newKey()
	e.take(a, key, long)
	e.checkHeld(b, key)
	e.checkHeld(a, key) // the owner counts, not the client
	e.contend(newKey())
}

func tokensIncrease(e *env) {
	a, b, key := e.backend(), e.backend(), newKey()
	last := uint64(0)
	for _, c := range []dlock.Backend{a, b, b, a} {
		g := e.take(c, key, long)
		assert.Greater(e, g.Fence, last, "token after a release")
		e.release(c, g)
		last = g.Fence
	}
	tokens := e.contend(key)
	assert.Greater(e, tokens[0], last)
	assert.True(e, slices.IsSorted(tokens) && len(slices.Compact(slices.Clone(tokens))) == len(tokens),
		"tokens in the order of their grants: got %v, want them to increase", tokens)
}

func tokensSurviveExpiry(e *env) {
	a, b, key := e.backend(), e.backend(), newKey()
	last := e.take(a, key, e.short)
	for range 3 {
		began := time.Now()
		won := e.acquiring(e.ctx, b, request(key, e.short))
		e.pass(e.short)
		next := <-won
		from := last.Start.Add(last.TTL) // the waiter's own lease can't have begun before
		if from.Before(began) {
			from = began
		}
		for next.err != nil && e.slow(from, next.done, e.short) {
			from = time.Now()
			next = <-e.acquiring(e.ctx, b, request(key, e.short))
		}
		require.NoError(e, next.err)
		assert.Greater(e, next.g.Fence, last.Fence, "token after an expiry")
		last = next.g
	}
}

// lateGrant has a take a key over a link that holds the reply until b has taken it too, after a's lease has expired. It returns
// both results, and whether a detected that its grant came too late, and got another after b's.
func lateGrant(e *env) (first, second granted, again bool) {
	a, hold := e.faulty(repliesHeld)
	b := e.backend()
	for {
		r := request(newKey(), e.short)
		deliver := hold()
		defer deliver()
		ctx, cancel := context.WithCancel(e.ctx)
		defer cancel()
		late := e.acquiring(ctx, a, r)
		e.pass(e.short / 4)
		g, err := b.TryAcquire(e.ctx, request(r.Key, long))
		if err == nil && !e.virtual { // a's request came too late, or its lease is over already: start over
			e.release(b, g)
			cancel()
			deliver()
			<-late
			continue
		}
		assert.ErrorIs(e, err, dlock.ErrHeld)
		won := e.acquiring(e.ctx, b, request(r.Key, long))
		e.pass(e.short)
		second = e.won(won)
		deliver()
		e.pass(e.short / 4)
		select {
		case first = <-late:
		default: // a retries, and waits for b
			e.release(b, second.g)
			first = <-late
			again = first.g.Start.After(second.at)
		}
		if e.virtual {
			assert.NoError(e, first.err) // elsewhere a's client may have given up
		}
		return first, second, again
	}
}

func tokenMintedWithGrant(e *env) {
	first, second, again := lateGrant(e)
	switch {
	case first.err != nil:
		return
	case again:
		assert.Greater(e, first.g.Fence, second.g.Fence, "token of a grant after the other's release")
		return
	}
	assert.Less(e, first.g.Fence, second.g.Fence, "token of a grant whose reply came late")
}

// handedOver has b wait for a key until its holder releases it. Nobody renews b's lease, which must last as long as b was told.
// If hold isn't nil, b learns of its grant late. With ttl > e.short only a provisional lease is checked.
func handedOver(e *env, b dlock.Backend, hold func() (deliver func()), ttl time.Duration) {
	a, c := e.backend(), e.backend()
	for {
		r := request(newKey(), ttl)
		g := e.take(a, r.Key, long)
		waits := begin(e, func() granted {
			g, err := b.Acquire(e.ctx, r)
			return granted{g: g, err: err, done: time.Now()}
		})
		e.pass(e.short / 4) // let it queue up
		deliver := func() {}
		if hold != nil {
			deliver = hold()
			defer deliver()
		}
		released := time.Now()
		e.release(a, g)
		if hold != nil {
			e.pass(e.short / 4)
			deliver()
		}
		w := <-waits
		if w.err != nil && (e.slow(released, w.done, e.short) || hold != nil && !e.virtual && e.ctx.Err() == nil) {
			continue // the machine was too slow, or b's client has given up
		}
		assert.NoError(e, w.err, "Acquire of a key that was released")
		e.checkGrant(r, w.g)
		assert.NoError(e, provisional(w.g))
		if ttl > e.short && w.g.Provisional == 0 {
			e.release(b, w.g)
			return
		}
		next := e.won(e.acquiring(e.ctx, c, request(r.Key, long)))
		lease := cmp.Or(w.g.Provisional, w.g.TTL)
		assert.GreaterOrEqual(e, next.at.Sub(w.g.Start), lease-e.slack(lease), "time from a handed-over lease's start to the successor's grant")
		return
	}
}

func startBeforeRequest(e *env) {
	if e.Advance != nil {
		return // the service's clock can't be compared with ours
	}
	ttls := []time.Duration{e.short, e.short + 4*time.Second} // shorter than a provisional lease usually is, and longer
	b := e.backend()
	for _, ttl := range ttls {
		handedOver(e, b, nil, ttl)
	}
	if first, second, again := lateGrant(e); first.err == nil && !again {
		e.checkOver(first.g.Start, first.g.TTL, second.at)
	}
	b, hold := e.faulty(repliesHeld)
	for _, ttl := range ttls {
		handedOver(e, b, hold, ttl)
	}
}

func tryHeld(e *env) {
	a, b, key := e.backend(), e.backend(), newKey()
	g := e.take(a, key, long)
	e.checkHeld(b, key)
	l := e.locker(b, &dlock.Options{TTL: long})
	_, err := l.TryAcquire(e.ctx, key)
	assert.ErrorIs(e, err, dlock.ErrHeld, "Locker.TryAcquire")
	e.release(a, g)
	e.checkFree(a, key)
}

func waiterWakes(e *env) {
	a, key := e.backend(), newKey()
	g := e.take(a, key, long)
	const waiters = 3
	type winner struct {
		granted
		b dlock.Backend
	}
	won := make(chan winner, waiters)
	for range waiters {
		b := e.backend()
		begin(e, func() granted {
			w := e.acquire(e.ctx, b, request(key, long))
			won <- winner{w, b}
			return w
		})
	}
	e.pass(e.short / 4)
	e.release(a, g)
	for range waiters {
		w := <-won
		assert.NoError(e, w.err)
		e.checkHeld(a, key)
		e.release(w.b, w.g)
	}
	e.checkFree(a, key)
}

func waiterOutlivesHolder(e *env) {
	a, b, key := e.backend(), e.backend(), newKey()
	g := e.take(a, key, e.short)
	won := e.acquiring(e.ctx, b, request(key, long))
	e.pass(e.short)
	w := e.won(won)
	if e.Advance != nil {
		return // the Locker's timer doesn't follow the service's clock
	}
	e.checkOver(g.Start, g.TTL, w.at)

	key = newKey()
	h := e.hold(a, key, &dlock.Options{TTL: e.short})
	_, at := e.await(b, key)
	assert.ErrorIs(e, h.Context().Err(), context.Canceled, "the holder's context when the successor has been granted")
	assert.ErrorIs(e, context.Cause(h.Context()), dlock.ErrLost)
	e.checkOver(h.AcquiredAt(), h.TTL(), at)
	assert.ErrorIs(e, h.Release(e.ctx), dlock.ErrLost, "Release after the successor has been granted")
}

func waiterCancelled(e *env) {
	a, b, key := e.backend(), e.backend(), newKey()
	// The cause may be another lock's error, as in an errgroup.
	why := fmt.Errorf("the caller has had enough: %w, %w, %w", dlock.ErrHeld, dlock.ErrLost, dlock.ErrQueueFull)
	ended, end := context.WithCancelCause(e.ctx)
	end(why)
	_, err := b.Acquire(ended, request(key, long))
	assert.ErrorIs(e, err, why, "Acquire of a free key with a ctx that has ended")
	_, err = b.TryAcquire(ended, request(key, long))
	assert.ErrorIs(e, err, why, "TryAcquire of a free key with a ctx that has ended")

	r, held := request(key, long), make(chan struct{})
	r.OnHeld = func() { assert.Fail(e, "Acquire of a free key called NoteHeld") }
	g := e.won(e.acquiring(e.ctx, a, r)).g
	ctx, cancel := context.WithCancelCause(e.ctx)
	defer cancel(nil)
	r = request(key, long)
	r.OnHeld = sync.OnceFunc(func() { close(held) })
	gone := e.acquiring(ctx, b, r)
	select {
	case <-held:
	case <-e.ctx.Done():
		assert.Fail(e, "Acquire of a key that is held didn't call NoteHeld")
	}
	e.pass(e.short / 4)
	stays := e.acquiring(e.ctx, b, request(key, long))
	e.pass(e.short / 4)
	cancel(why)
	assert.ErrorIs(e, (<-gone).err, why, "Acquire whose ctx ended")
	e.release(a, g)
	w := <-stays
	assert.NoError(e, w.err, "Acquire of one that waited behind the cancelled waiter")
	e.release(b, w.g)
	e.checkFree(a, key)

	// The same through the Locker, and without anyone behind.
	g = e.take(a, key, long)
	l := e.locker(e.Backend(), &dlock.Options{TTL: long})
	ctx, cancel = context.WithCancelCause(e.ctx)
	defer cancel(nil)
	failed := begin(e, func() error {
		_, err := l.Acquire(ctx, key)
		return err
	})
	e.pass(e.short / 4)
	cancel(why)
	err = <-failed
	assert.ErrorIs(e, err, why, "Locker.Acquire whose ctx ended")
	assert.ErrorIs(e, err, context.Canceled, "Locker.Acquire whose ctx ended")
	e.release(a, g)
	w = e.won(e.acquiring(e.ctx, b, request(key, long)))
}

// waitersCutOff starts so many waiters that a one-second hand-over to each dead one would exceed the case's time.
func waitersCutOff(e *env) {
	const waiters = 200
	a, loseRequests := e.faulty(requestsLost)
	b, key := e.backend(), newKey()
	g := e.take(b, key, long)
	l := e.locker(a, &dlock.Options{TTL: long})
	ctx, cancel := context.WithCancel(e.ctx)
	defer cancel()
	var left []<-chan error
	for range waiters {
		left = append(left, begin(e, func() error {
			_, err := l.Acquire(ctx, key)
			return err
		}))
	}
	e.pass(e.short)
	heal := loseRequests()
	defer heal()
	cancel()
	for _, err := range left {
		assert.Error(e, <-err, "Acquire whose ctx ended")
	}
	heal()
	e.release(b, g)
	w := <-e.acquiring(e.ctx, b, request(key, long))
	assert.NoError(e, w.err, "Acquire behind waiters that are gone")
	e.release(b, w.g)
}

func waiterIsTold(e *env) {
	if e.Requests == nil {
		e.Skip("Service.Requests is nil: the kit cannot see whether a waiter polls")
	}
	a, b, key := e.backend(), e.backend(), newKey()
	g := e.take(a, key, long)
	won := e.acquiring(e.ctx, b, request(key, long))
	e.pass(e.short / 4)
	const times = 20
	before := e.Requests()
	for range times {
		e.pass(e.short)
	}
	spent := e.Requests() - before
	e.release(a, g)
	w := e.won(won)
	e.release(b, w.g)
	before = e.Requests()
	e.pass(e.short)
	passing := e.Requests() - before // the kit's own, to let time pass
	assert.LessOrEqual(e, spent, times*(passing+2), "requests while a waiter waits for %d times the short TTL", times)
}

func retrySameOwner(e *env) {
	if !e.repeats {
		e.Skip("not applicable: Harness.NoRepeats says that the client library repeats nothing")
	}
	a, b, key := e.backend(), e.backend(), newKey()
	r := request(key, long)
	g := e.try(a, r)
	assert.Equal(e, g.Fence, e.try(a, r).Fence, "token of a repeated TryAcquire")
	again, err := a.Acquire(e.ctx, r)
	require.NoError(e, err, "Acquire repeated by the holder")
	assert.Equal(e, g.Fence, again.Fence, "token of a repeated Acquire")
	e.checkHeld(b, key)
	e.release(a, again)
	e.checkFree(b, key)

	for {
		r = request(newKey(), e.short)
		first := e.try(a, r)
		e.pass(e.short / 2)
		g, err = e.tryShort(a, r)
		if err != nil && e.slow(first.Start, time.Now(), first.TTL) { // the first lease ended, and may block it for a while
			continue
		}
		require.NoError(e, err, "TryAcquire repeated by the holder")
		e.checkGrant(r, g)
		break
	}
	won := e.acquiring(e.ctx, b, request(r.Key, long))
	e.pass(e.short)
	w := e.won(won)
	if e.Advance == nil {
		e.checkOver(g.Start, g.TTL, w.at)
	}
}

func renewExtends(e *env) {
	a, b := e.backend(), e.backend()
	for {
		key := newKey()
		g := e.take(a, key, e.short)
		won := e.acquiring(e.ctx, b, request(key, long))
		e.pass(e.short / 2)
		renewed := time.Now()
		err := a.Renew(e.ctx, g)
		if err != nil && e.slow(g.Start, time.Now(), g.TTL) {
			continue
		}
		require.NoError(e, err, "Renew by the holder")
		if e.Advance != nil {
			e.pass(e.short - 1)
			e.checkHeld(a, key)
			e.pass(1)
		}
		w := e.won(won)
		if e.Advance == nil {
			e.checkOver(renewed, g.TTL, w.at)
		}
		return
	}
}

func renewByNonOwner(e *env) {
	a, b, key := e.backend(), e.backend(), newKey()
	first := e.take(a, key, e.short)
	won := e.acquiring(e.ctx, b, request(key, long))
	e.pass(e.short)
	second := e.won(won)
	assert.ErrorIs(e, a.Renew(e.ctx, first), dlock.ErrLost, "Renew of a lease that another has taken over")
	e.pass(2 * e.short) // had it changed the successor's lease, that would be over now
	e.checkHeld(a, key)
	e.release(b, second.g)
	assert.ErrorIs(e, a.Renew(e.ctx, first), dlock.ErrLost, "Renew of a key that is free")
	assert.ErrorIs(e, b.Renew(e.ctx, second.g), dlock.ErrLost, "Renew after Release")
	e.checkFree(a, key)
}

// successor has b take over a's short lease on key while the reply to a's call f is held.
func successor(e *env, f func(a dlock.Backend, g dlock.Grant) error) (b dlock.Backend, key string) {
	a, hold := e.faulty(repliesHeld)
	b, key = e.backend(), newKey()
	g := e.take(a, key, e.short)
	deliver := hold()
	defer deliver()
	answer := begin(e, func() error { return f(a, g) })
	won := e.acquiring(e.ctx, b, request(key, long))
	e.pass(e.short)
	e.pass(e.short)
	e.won(won)
	deliver()
	<-answer // only the outcome counts
	return b, key
}

func renewAtomic(e *env) {
	b, key := successor(e, func(a dlock.Backend, g dlock.Grant) error { return a.Renew(e.ctx, g) })
	e.pass(2 * e.short)
	e.checkHeld(b, key)
}

func releaseByNonOwner(e *env) {
	a, b, key := e.backend(), e.backend(), newKey()
	first := e.take(a, key, e.short)
	won := e.acquiring(e.ctx, b, request(key, long))
	e.pass(e.short)
	second := e.won(won)
	assert.ErrorIs(e, a.Release(e.ctx, first), dlock.ErrLost, "Release of a lease that another has taken over")
	e.checkHeld(a, key)
	e.release(b, second.g)
	assert.ErrorIs(e, b.Release(e.ctx, second.g), dlock.ErrLost, "Release of a key that is free")
	e.checkFree(a, key)
	if e.Advance != nil {
		return
	}

	reg := prometheus.NewRegistry()
	h := e.hold(a, key, &dlock.Options{TTL: e.short, Registerer: reg})
	e.await(b, key)
	assert.ErrorIs(e, h.Release(e.ctx), dlock.ErrLost, "Handle.Release of a lease that another has taken over")
	e.checkHeld(b, key)
	e.checkCount(reg, "release_by_non_owner_total", 1)
	e.checkCount(reg, "release_by_non_owner_applied_total", 0)
}

func releaseRepeated(e *env) {
	a, b, key := e.backend(), e.backend(), newKey()
	first := e.take(a, key, long)
	e.release(a, first)
	second := e.take(a, key, long)
	assert.ErrorIs(e, a.Release(e.ctx, first), dlock.ErrLost, "Release of an earlier grant, repeated")
	e.checkHeld(b, key)
	// By rule 9 this undoes an acquire, and there may be something to undo, such as a vote that the release hasn't reached yet.
	if err := a.Release(e.ctx, dlock.Grant{Key: key, Owner: first.Owner, TTL: long}); err != nil {
		assert.ErrorIs(e, err, dlock.ErrLost, "Release of an earlier grant, as of an acquire without a reply")
	}
	e.checkHeld(b, key)
	e.release(a, second)
	e.checkFree(b, key)
}

func silent(e *env) {
	a, hold := e.faulty(repliesHeld)
	l := e.locker(a, &dlock.Options{TTL: long})
	h, err := l.Acquire(e.ctx, newKey())
	require.NoError(e, err)
	deliver := hold()
	defer deliver()
	for _, call := range []func(context.Context) error{
		func(ctx context.Context) error { _, err := l.Acquire(ctx, newKey()); return err },
		func(ctx context.Context) error { _, err := l.TryAcquire(ctx, newKey()); return err },
		h.Release,
	} {
		ctx, cancel := context.WithTimeout(e.ctx, e.short)
		err := call(ctx)
		cancel()
		assert.Error(e, err, "a call that isn't answered")
	}
	select {
	case err := <-begin(e, l.Close):
		require.NoError(e, err)
	case <-e.ctx.Done():
		assert.Fail(e, "Locker.Close waits for a server that is silent")
	}
}

func (e *env) checkCount(reg *prometheus.Registry, name string, want float64) {
	e.Helper()
	families, err := reg.Gather()
	require.NoError(e, err)
	i := slices.IndexFunc(families, func(f *dto.MetricFamily) bool { return f.GetName() == name })
	require.GreaterOrEqual(e, i, 0, "metric %s", name)
	assert.Equal(e, want, families[i].GetMetric()[0].GetCounter().GetValue(), name)
}

func releaseAtomic(e *env) {
	b, key := successor(e, func(a dlock.Backend, g dlock.Grant) error { return a.Release(e.ctx, g) })
	e.checkHeld(b, key)
}

// faultOf is one of a Link's faults.
type faultOf = func(Link) func() (heal func())

func requestsLost(l Link) func() func() { return l.LoseRequests }
func repliesLost(l Link) func() func()  { return l.LoseReplies }
func repliesHeld(l Link) func() func()  { return l.HoldReplies }
func linkCut(l Link) func() func()      { return l.Cut }
func refusals(l Link) func() func()     { return l.Refuse }

func acquireFails(e *env, f faultOf) {
	a, inject := e.faulty(f)
	b, key := e.backend(), newKey()
	for _, acquire := range []func(context.Context, dlock.Request) (dlock.Grant, error){a.TryAcquire, a.Acquire} {
		r := request(key, long)
		heal := inject()
		_, err := acquire(e.ctx, r)
		heal()
		e.checkDoubt(err)
		// As the Locker does.
		if err := a.Release(e.ctx, dlock.Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL}); !errors.Is(err, dlock.ErrLost) {
			assert.NoError(e, err, "Release that undoes a request")
		}
		e.checkFree(b, key)

		if !e.repeats {
			continue
		}
		// As a client library does.
		heal = inject()
		_, err = acquire(e.ctx, r)
		heal()
		e.checkDoubt(err)
		g := e.try(a, r)
		e.checkHeld(b, key)
		e.release(a, g)
		e.checkFree(b, key)
	}

	l := e.locker(a, &dlock.Options{TTL: long})
	heal := inject()
	_, err := l.Acquire(e.ctx, key)
	heal()
	e.checkDoubt(err)
	g, _ := e.await(b, key) // long before the TTL: the Locker has undone it
	e.release(b, g)
}

func renewFails(e *env, f faultOf) {
	a, inject := e.faulty(f)
	b, key := e.backend(), newKey()
	g := e.take(a, key, long)
	heal := inject()
	err := a.Renew(e.ctx, g)
	heal()
	e.checkDoubt(err)
	e.checkHeld(b, key)
	assert.NoError(e, a.Renew(e.ctx, g), "Renew after the link has healed")
	e.release(a, g)

	l := e.locker(a, &dlock.Options{TTL: long})
	h, err := l.Acquire(e.ctx, key)
	require.NoError(e, err)
	heal = inject()
	err = h.Renew(e.ctx)
	heal()
	e.checkDoubt(err)
	assert.NoError(e, h.Context().Err(), "the handle's context after a renewal without answer")
	assert.NoError(e, h.Renew(e.ctx), "Handle.Renew after the link has healed")
	assert.NoError(e, h.Release(e.ctx))
}

func releaseRequestLost(e *env) {
	a, inject := e.faulty(requestsLost)
	b, key := e.backend(), newKey()
	g := e.take(a, key, long)
	heal := inject()
	e.checkDoubt(a.Release(e.ctx, g))
	e.checkHeld(b, key)
	heal()
	e.release(a, g)
	e.checkFree(b, key)
	releaseFails(e, requestsLost)
}

func releaseFails(e *env, f faultOf) {
	a, inject := e.faulty(f)
	b, key := e.backend(), newKey()
	g := e.take(a, key, long)
	heal := inject()
	err := a.Release(e.ctx, g)
	heal()
	e.checkDoubt(err)
	if err := a.Release(e.ctx, g); !errors.Is(err, dlock.ErrLost) {
		assert.NoError(e, err, "Release repeated")
	}
	e.checkFree(b, key)

	reg := prometheus.NewRegistry()
	l := e.locker(a, &dlock.Options{TTL: long, Registerer: reg})
	h, err := l.Acquire(e.ctx, key)
	require.NoError(e, err)
	heal = inject()
	err = h.Release(e.ctx)
	heal()
	e.checkDoubt(err)
	g, _ = e.await(b, key) // long before the TTL: the Locker keeps trying
	assert.NoError(e, h.Release(e.ctx), "Handle.Release repeated: the lock was never anybody else's before it was free")
	e.checkHeld(a, key)
	e.release(b, g)
	e.checkCount(reg, "release_by_non_owner_total", 0)
}

func unreachable(e *env) {
	a, cut := e.faulty(linkCut)
	b, key := e.backend(), newKey()
	g := e.take(a, key, long)
	free := request(newKey(), long)
	heal := cut()
	_, err := a.TryAcquire(e.ctx, free)
	e.checkDoubt(err)
	_, err = a.Acquire(e.ctx, free)
	e.checkDoubt(err)
	e.checkDoubt(a.Renew(e.ctx, g))
	e.checkDoubt(a.Release(e.ctx, g))
	_, err = e.locker(a, &dlock.Options{TTL: long}).Acquire(e.ctx, newKey())
	e.checkDoubt(err)
	heal()
	e.checkHeld(b, key)
	e.checkFree(b, free.Key)
}

func refused(e *env) {
	a, refuse := e.faulty(refusals)
	b, key := e.backend(), newKey()
	g := e.take(a, key, long)
	heal := refuse()
	defer heal()
	var asked []dlock.Request
	for _, acquire := range []func(context.Context, dlock.Request) (dlock.Grant, error){a.TryAcquire, a.Acquire} {
		r := request(newKey(), long)
		asked = append(asked, r)
		ctx, cancel := context.WithTimeout(e.ctx, grace)
		_, err := acquire(ctx, r)
		assert.NoError(e, ctx.Err(), "the ctx of an acquire that the server refuses, after %v", grace)
		cancel()
		e.checkDoubt(err)
	}
	if err := a.Renew(e.ctx, g); err != nil {
		e.checkDoubt(err)
	}
	err := a.Release(e.ctx, g)
	heal()
	if err != nil {
		e.checkDoubt(err)
		e.checkHeld(b, key)
		e.release(a, g)
	}
	e.checkFree(b, key)
	for _, r := range asked {
		if err := a.Release(e.ctx, dlock.Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL}); !errors.Is(err, dlock.ErrLost) {
			assert.NoError(e, err, "Release that undoes a request")
		}
		e.checkFree(b, r.Key)
	}
}

func keysIndependent(e *env) {
	a, b, key := e.backend(), e.backend(), newKey()
	keys := []string{key, key + "/", key + "/x", key + "x", strings.ToUpper(key), key[:len(key)-1]}
	grants := make([]dlock.Grant, len(keys))
	for i, k := range keys {
		grants[i] = e.take(a, k, long)
	}
	for i, k := range keys {
		e.checkHeld(b, k)
		e.release(a, grants[i])
		e.checkFree(b, k)
	}
}

func awkwardKeys(e *env) {
	a, b := e.backend(), e.backend()
	id := newKey()
	starts := []string{
		"{", "}", "{}", "}{", "{{}}", "{a}", "a{b}c", "lock:{x}", "fence:{x}", "/", "//", "./", "../", " ", "\\", "%00", "%", "*",
		"?x=y", "#", "'\";--", "$1", "\u00e9", "e\u0301", "\u65e5\u672c", "\U0001f512", "\u202e", "\ufeff", strings.Repeat("k", dlock.MaxKeyLen-len(id)),
	}
	grants := map[string]dlock.Grant{}
	for _, s := range starts {
		for _, k := range []string{s + id, id + s} {
			assert.NoError(e, dlock.CheckKey(k))
			g, err := a.TryAcquire(e.ctx, request(k, long))
			if errors.Is(err, dlock.ErrInvalid) {
				continue
			}
			require.NoError(e, err, "TryAcquire of %q, which nobody holds", k)
			grants[k] = g
		}
	}
	for k, g := range grants {
		e.checkHeld(b, k)
		e.release(a, g)
		e.checkFree(b, k)
	}
}

func ttlNotRounded(e *env) {
	a, b := e.backend(), e.backend()
	held := e.take(a, newKey(), long)
	refused := func(ttl time.Duration) {
		_, err := a.TryAcquire(e.ctx, request(newKey(), ttl))
		assert.ErrorIs(e, err, dlock.ErrInvalid, "TryAcquire with a TTL of %v", ttl)
		_, err = a.Acquire(e.ctx, request(newKey(), ttl))
		assert.ErrorIs(e, err, dlock.ErrInvalid, "Acquire with a TTL of %v", ttl)
		g := held
		g.TTL = ttl
		assert.ErrorIs(e, a.Renew(e.ctx, g), dlock.ErrInvalid, "Renew with a TTL of %v", ttl)
	}
	refused(-time.Second)
	refused(0)
	for _, ttl := range []time.Duration{
		1, time.Microsecond, 999 * time.Microsecond, 1500 * time.Microsecond, e.short + 1, e.short + e.short/3 + 1, e.short + e.short/3,
	} {
		key := newKey()
		g, err := e.tryShort(a, request(key, ttl))
		if errors.Is(err, dlock.ErrInvalid) {
			e.checkFree(b, key)
			refused(ttl)
			continue
		}
		require.NoError(e, err, "TryAcquire with a TTL of %v", ttl)
		assert.GreaterOrEqual(e, g.TTL, ttl, "the grant's TTL")
		won := e.acquiring(e.ctx, b, request(key, long))
		if e.Advance != nil {
			e.Advance(g.TTL - 1)
			e.checkHeld(a, key)
			e.Advance(1)
		}
		w := e.won(won)
		if e.Advance == nil {
			e.checkOver(g.Start, g.TTL, w.at)
		}
	}
}

func grantOutlivesContext(e *env) {
	a, b, key := e.backend(), e.backend(), newKey()
	for _, acquire := range []func(context.Context, dlock.Request) (dlock.Grant, error){a.TryAcquire, a.Acquire} {
		ctx, cancel := context.WithCancel(e.ctx)
		g, err := acquire(ctx, request(key, long))
		cancel()
		require.NoError(e, err)
		e.pass(e.short)
		e.checkHeld(b, key)
		assert.NoError(e, a.Renew(e.ctx, g), "Renew after the end of the ctx of its request")
		e.release(a, g)
	}
}

func closed(e *env) {
	a, b, key := e.Backend(), e.backend(), newKey()
	g := e.take(a, key, long)
	waits := e.acquiring(e.ctx, a, request(key, long))
	e.pass(e.short / 4)
	at, soon := time.Now(), grace
	if e.virtual {
		soon = e.short
	}
	assert.NoError(e, a.Close())
	w := <-waits
	assert.ErrorIs(e, w.err, dlock.ErrClosed, "Acquire that waited when the Backend was closed")
	assert.Less(e, w.at.Sub(at), soon, "time that Acquire waited after Close")
	assert.NoError(e, a.Close(), "Close again")
	_, err := a.Acquire(e.ctx, request(newKey(), long))
	assert.ErrorIs(e, err, dlock.ErrClosed, "Acquire")
	_, err = a.TryAcquire(e.ctx, request(newKey(), long))
	assert.ErrorIs(e, err, dlock.ErrClosed, "TryAcquire")
	assert.ErrorIs(e, a.Renew(e.ctx, g), dlock.ErrClosed, "Renew")
	assert.ErrorIs(e, a.Release(e.ctx, g), dlock.ErrClosed, "Release")
	e.checkHeld(b, key)
	e.release(b, g) // the owner counts, not the client
	e.checkFree(b, key)
}
