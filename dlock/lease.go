package dlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// recheck is the longest time between two checks of the wall clock: timers don't run while a machine is suspended.
const recheck = time.Second

// Handle is one acquisition of a lock. It is never reused and its token never changes.
type Handle struct {
	ls      *lease
	section int
	ctx     context.Context
	cancel  context.CancelCauseFunc

	releasing chan struct{} // held by one call of Release at a time
	dropped   bool          // no longer counted in ls.holds; written under ls.mu
	last      bool          // the last to be dropped, which sends the release
	done      bool
	err       error
}

// Key is the locked key.
func (h *Handle) Key() string { return h.ls.g.Key }

// Owner is a random UUID that names this lease in the lock service.
func (h *Handle) Owner() string { return h.ls.g.Owner }

// Fence is the fencing token: greater than that of every earlier grant of the key. Send it, or the pair from [Handle.Next], with
// every write.
func (h *Handle) Fence() uint64 { return h.ls.g.Fence }

// Next returns the token and the number of the grant's next call to a store: 1, 2, and so on, over all handles of a re-entered or
// shared lease. A store orders calls by both, so send them in this order. To learn whether a write took effect, repeat it with
// the same pair. After Release it returns zeros, which stores refuse.
func (h *Handle) Next() (token, seq uint64) {
	h.ls.mu.Lock()
	defer h.ls.mu.Unlock()
	if h.dropped {
		return 0, 0
	}
	h.ls.calls++
	return h.ls.g.Fence, h.ls.calls
}

// TTL is how long the lease lasts from the grant and from each renewal. After a hand-over it may be shorter until the first
// renewal, which is automatic.
func (h *Handle) TTL() time.Duration { return h.ls.g.TTL }

// AcquiredAt is when the lease began, on this process's clock: just before the winning request was sent.
func (h *Handle) AcquiredAt() time.Time { return h.ls.g.Start }

// Until is when the lease must be presumed lost unless it is renewed: its last start plus the TTL, minus a margin for clock drift
// (1 % and 2 ms). It is sooner if the machine has since been suspended or the wall clock set forward.
func (h *Handle) Until() time.Time {
	h.ls.mu.Lock()
	defer h.ls.mu.Unlock()
	now := time.Now()
	until, left := h.ls.start.Add(h.ls.limit), h.ls.limit-h.ls.age(now)
	if until.Sub(now)-left > time.Millisecond { // less is the time between the two readings, and would make Until jitter
		until = now.Add(left)
	}
	return until
}

// Context ends when the lease must be presumed lost, with a cause that wraps [ErrLost], or is released, with the cause
// [ErrReleased]. A local timer ends it, whatever the network does. Its Err method checks the clock itself, so a process that
// wakes from a freeze sees the end at once; derived contexts end by the timer.
//
// It has the values of the context given to Acquire, but not its end.
func (h *Handle) Context() context.Context { return h.ctx }

// Renew makes the lease run for its TTL from now. Its error wraps [ErrLost] if the lease is gone or ends before there is an
// answer, and [ErrMaxHold] if it was held for the longest time allowed. After any other error the old lease continues unchanged.
func (h *Handle) Renew(ctx context.Context) error {
	err := h.ended()
	if err == nil {
		err = h.ls.renew(ctx)
	}
	if err != nil {
		return fmt.Errorf("renew %q: %w", h.Key(), err)
	}
	return nil
}

func (h *Handle) ended() error { return context.Cause(h.ctx) }

// Release ends the handle's context, then frees the lock. Once the lock service has answered, calling it again returns the same
// result; until then it tries again.
//
// If the lock was no longer this handle's, nothing changes, release_by_non_owner_total counts it, and the error wraps [ErrLost]:
// the critical section may have overlapped with another holder's. If nobody answers, the error wraps ErrLost only if the lease
// had already ended. Either way the lock is freed in the background or expires, and Release may be called again. If a first request
// got no answer and a second finds the lock gone, Release returns nil: presumably the first removed it, although a failover looks
// the same. With redislock and pglock it also returns nil if the lease had run out and a late copy of this handle's own request has
// locked the key again: only the end of the handle's context tells.
//
// It waits for an answer until ctx ends or, if ctx has no deadline, until a second after the lease would have ended, but at most
// until a second after [Locker.Close]. If ctx has already ended, as in a deferred call, it still tries for a second. With a ctx
// that cannot end, a client library that ignores deadlines may take until its own timeouts.
//
// Release doesn't revoke the token, which stays valid until a successor has used its own: wait for the answers to all writes
// first.
//
// While other handles of a re-entered lease are held, or if a shared lease is passed on or kept, nothing is sent; the error wraps
// [ErrLost] if the lease is lost.
func (h *Handle) Release(ctx context.Context) error {
	select {
	case h.releasing <- struct{}{}:
	default:
		if err := h.awaitRelease(ctx); err != nil {
			return fmt.Errorf("release %q: another call is in progress: %w", h.Key(), err)
		}
	}
	defer func() { <-h.releasing }()
	if h.done {
		return h.err
	}
	if !h.dropped {
		h.last, h.err = h.drop()
	}
	if h.last {
		h.done, h.err = h.ls.release(ctx)
	} else {
		h.done = true
	}
	if h.err != nil {
		h.err = fmt.Errorf("release %q: %w", h.Key(), h.err)
	}
	return h.err
}

func (h *Handle) awaitRelease(ctx context.Context) error {
	ctx, cancel := tryingOn(ctx)
	defer cancel()
	select {
	case h.releasing <- struct{}{}:
		return nil
	case <-ctx.Done():
		return cause(ctx)
	}
}

// tryingOn is ctx or, if that has ended, a context that lasts for one try.
func tryingOn(ctx context.Context) (context.Context, context.CancelFunc) {
	if ctx.Err() == nil {
		return ctx, func() {}
	}
	return context.WithTimeout(context.WithoutCancel(ctx), undoTry)
}

type lease struct {
	l    *Locker
	g    Grant
	born time.Time // when the grant arrived; MaxHold counts from here

	ctx    context.Context
	cancel context.CancelCauseFunc

	mu        sync.Mutex
	limit     time.Duration // the age at which the lease is presumed lost
	confirmAt time.Duration // the age at which a provisional or old lease is first renewed; 0: neither, or renewed
	start     time.Time     // when the current period's request was sent
	wall      time.Time     // start on the wall clock alone
	holds     int
	over      error // why it was lost or released; once set, ctx has ended, and start and timer don't change
	heldToEnd bool  // over by the last release, and not lost before
	capped    bool  // MaxHold has stopped the renewals
	timer     *time.Timer

	calls    uint64
	sections int // critical sections so far; more than one only if shared

	unsure bool // a release was sent whose outcome is unknown; used by the last handle's Release only
}

// newLease takes over a grant. Its age counts from g.Start, so a slow reply shortens the lease.
func newLease(ctx context.Context, l *Locker, g Grant) *lease { //nolint:contextcheck // the lease outlives ctx
	ls := &lease{l: l, g: g, limit: g.TTL - margin(g.TTL), start: g.Start, wall: g.Start.Round(0), born: time.Now()}
	switch p, age := g.Provisional, ls.age(ls.born); {
	case p != 0: // a negative one has expired
		ls.limit, ls.confirmAt = p-margin(p), p/2
	case age >= ls.limit/8: // it was waited for, and is as old as the waiter's last request
		ls.confirmAt = (age + ls.limit) / 2
	}
	if l.o.Share.Sections > 0 {
		ctx = l.open // the next holder must not get the first one's values
	}
	ls.ctx, ls.cancel = context.WithCancelCause(context.WithoutCancel(ctx))
	ls.mu.Lock()
	defer ls.mu.Unlock()
	ls.timer = time.AfterFunc(ls.untilCheck(), func() {
		if ls.ended() != nil {
			return
		}
		ls.mu.Lock()
		defer ls.mu.Unlock()
		if ls.over != nil {
			return
		}
		if ls.confirmAt > 0 && ls.age(time.Now()) >= ls.confirmAt {
			ls.confirmAt = 0
			if l.enter() {
				go ls.confirm()
			}
		}
		ls.timer.Reset(ls.untilCheck())
	})
	return ls
}

// begin returns the first handle, or nil if the grant came too late; nobody has held it, so no loss is reported.
func (ls *lease) begin(ctx context.Context) *Handle {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if _ = ls.expire(); ls.over != nil {
		return nil
	}
	ls.holds, ls.sections = 1, 1
	return ls.handle(ctx)
}

func (ls *lease) confirm() {
	defer ls.l.busy.Done()
	for {
		left := ls.left()
		try, done := context.WithTimeout(ls.ctx, left/2)
		err := ls.renew(try)
		done()
		if err == nil || ls.ctx.Err() != nil || errors.Is(err, ErrClosed) || errors.Is(err, ErrMaxHold) {
			return
		}
		ls.l.log.Warn("dlock: could not confirm a lease; trying again until it runs out", "key", ls.g.Key, "fence", ls.g.Fence, "err", err)
		select {
		case <-ls.ctx.Done():
		case <-ls.l.open.Done():
			return
		case <-time.After(max(left/8, time.Millisecond)):
		}
	}
}

func (ls *lease) watch() {
	if ls.l.o.Renew.Every > 0 {
		ls.l.busy.Go(ls.keepAlive)
	}
	if ls.g.Lost != nil {
		ls.l.busy.Go(func() {
			select {
			case <-ls.g.Lost:
				ls.lose(fmt.Errorf("%w: the lock service ended it", ErrLost))
			case <-ls.ctx.Done():
			case <-ls.l.open.Done():
			}
		})
	}
}

func (ls *lease) handle(ctx context.Context) *Handle {
	end, cancel := ls.ctx, ls.cancel
	if ls.l.o.Reentrant || ls.l.o.Share.Sections > 0 { // a handle's context ends with its own release, the lease's with the last one
		end, cancel = context.WithCancelCause(ls.ctx)
	}
	return &Handle{
		ls: ls, section: ls.sections, ctx: &leaseContext{valuesContext{end, context.WithoutCancel(ctx)}, ls, ls.sections}, cancel: cancel,
		releasing: make(chan struct{}, 1),
	}
}

// reenter reports whether c's critical section is under way, and returns another handle on it if the Locker is reentrant.
func (c *leaseContext) reenter(ctx context.Context) (h *Handle, held bool) {
	ls := c.ls
	if ls.ended() != nil {
		return nil, false
	}
	ls.mu.Lock()
	defer ls.mu.Unlock()
	held = ls.over == nil && ls.holds > 0 && ls.sections == c.section
	if !held || !ls.l.o.Reentrant {
		return nil, held
	}
	ls.holds++
	return ls.handle(ctx), true
}

// drop ends h's context and hold. last: the lock must be released; lost: why the lease ended before.
func (h *Handle) drop() (last bool, lost error) {
	ls := h.ls
	ls.mu.Lock()
	h.dropped = true
	expired := ls.expire()
	lost = ls.over
	ls.holds--
	last = ls.holds == 0
	young := last && ls.young()
	ls.mu.Unlock()
	ls.report(expired)
	h.cancel(ErrReleased) // this critical section must end before the next begins
	if young && ls.l.shared.pass(ls) {
		return false, nil
	}
	if last {
		ls.retire()
	}
	return last, lost
}

func (ls *lease) retire() bool {
	ls.mu.Lock()
	ls.heldToEnd = ls.end(ErrReleased)
	mine := ls.heldToEnd
	ls.mu.Unlock()
	if ls.l.o.Share.Sections > 0 {
		ls.l.shared.ended(ls.g.Key, ls)
	}
	return mine
}

// age is by the faster clock: the monotonic one stops while the machine is suspended, the wall clock may be set back.
func (ls *lease) age(now time.Time) time.Duration {
	return max(now.Sub(ls.start), now.Round(0).Sub(ls.wall))
}

func (ls *lease) untilCheck() time.Duration {
	return max(min(cmp.Or(ls.confirmAt, ls.limit)-ls.age(time.Now()), recheck), 0)
}

func (ls *lease) left() time.Duration {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return ls.limit - ls.age(time.Now())
}

func (ls *lease) due() bool {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	return ls.age(time.Now()) >= ls.l.o.Renew.Every
}

// ended is why the lease is lost or released, or nil. It ends the lease if its time is up.
func (ls *lease) ended() error {
	ls.mu.Lock()
	lost := ls.expire()
	over := ls.over
	ls.mu.Unlock()
	ls.report(lost)
	return over
}

// lose ends the lease for a reason that wraps ErrLost.
func (ls *lease) lose(why error) {
	ls.mu.Lock()
	first, held := ls.end(why), ls.holds > 0
	ls.mu.Unlock()
	switch {
	case first && held:
		ls.report(why)
	case first && ls.l.o.Share.Sections > 0:
		ls.reportKept(why)
	}
}

// expire ends the lease if its time is up, and returns the loss to report: nil if nobody held it. ls.mu is held.
func (ls *lease) expire() (lost error) {
	if ls.over == nil && ls.age(time.Now()) >= ls.limit {
		lost = ErrLost
		if ls.capped {
			lost = fmt.Errorf("%w: %w", ErrLost, ErrMaxHold)
		}
		ls.end(lost)
		if ls.holds == 0 {
			return nil
		}
	}
	return lost
}

// report is called without ls.mu: the logger is the user's.
func (ls *lease) report(lost error) {
	if lost == nil {
		return
	}
	ls.l.m.lost.Inc()
	attrs := []any{"key", ls.g.Key, "fence", ls.g.Fence, "ttl", ls.g.TTL}
	if !errors.Is(ErrLost, lost) { // lost says why
		attrs = append(attrs, "err", lost)
	}
	ls.l.log.Warn(ErrLost.Error(), attrs...)
}

// end reports whether it was the first. ls.mu is held, so whoever sees the lease over sees an ended context too.
func (ls *lease) end(why error) bool {
	if ls.over != nil {
		return false
	}
	ls.over = why
	ls.timer.Stop()
	ls.cancel(why)
	if ls.sections > 0 {
		ls.l.m.heldSeconds.Observe(time.Since(ls.born).Seconds())
	}
	return true
}

func (ls *lease) renew(ctx context.Context) error {
	if err := ls.ended(); err != nil {
		return err
	}
	if ctx.Err() != nil {
		return ls.unanswered(ctx, cause(ctx))
	}
	if most := ls.l.o.Renew.MaxHold; most > 0 && time.Since(ls.born) >= most {
		ls.mu.Lock()
		ls.capped = true
		ls.mu.Unlock()
		return fmt.Errorf("%w (%v)", ErrMaxHold, most)
	}
	if !ls.l.enter() {
		return ErrClosed
	}
	defer ls.l.busy.Done()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(ls.ctx, func() { cancel(context.Cause(ls.ctx)) })() //nolint:contextcheck // it ends with both

	start := time.Now() // before the request is sent, as for the grant
	err := ls.l.await(ctx, 0, func() error { return ls.l.b.Renew(ctx, ls.g) })
	if errors.Is(err, ErrLost) && !unknown(ctx, err) {
		why := err
		if errors.Is(ErrLost, why) { // err doesn't say why
			why = fmt.Errorf("%w: the lock service gave it to another owner or let it run out", ErrLost)
		}
		ls.lose(why)
	}
	if err != nil {
		if over := ls.ended(); errors.Is(over, ErrReleased) {
			return over
		}
		return ls.unanswered(ctx, err)
	}
	ls.mu.Lock()
	lost := ls.expire() // a late reply renews nothing: an ended context stays ended
	over := ls.over
	if over == nil && !start.Before(ls.start) {
		ls.start, ls.wall = start, start.Round(0)
		ls.limit, ls.confirmAt = ls.g.TTL-margin(ls.g.TTL), 0
	}
	ls.mu.Unlock()
	ls.report(lost)
	if over != nil {
		return over
	}
	ls.l.m.renewals.Inc()
	return nil
}

// unanswered makes a call's error wrap ErrLost if this lease is lost, and only then: ctx may have ended with another lease.
func (ls *lease) unanswered(ctx context.Context, err error) error {
	switch over := ls.ended(); {
	case errors.Is(over, ErrLost) == errors.Is(err, ErrLost):
		return err
	case errors.Is(over, ErrLost):
		return fmt.Errorf("%w: %w", over, err)
	default:
		return fmt.Errorf("%w: %v", cmp.Or(ctx.Err(), context.Canceled), err) //nolint:errorlint // not to wrap it is the point
	}
}

func (ls *lease) keepAlive() {
	every := ls.l.o.Renew.Every
	tick := time.NewTicker(every)
	defer tick.Stop()
	var check <-chan time.Time
	if every > recheck {
		checks := time.NewTicker(recheck)
		defer checks.Stop()
		check = checks.C
	}
	var err error
	for {
		select {
		case <-ls.ctx.Done():
			return
		case <-ls.l.open.Done():
			return
		case <-check: // tick stands still while the machine is suspended
			if err != nil || !ls.due() {
				continue
			}
			tick.Reset(every)
		case <-tick.C:
		}
		try, done := context.WithTimeout(ls.ctx, max(every, ls.left()/3))
		err = ls.renew(try)
		done()
		switch {
		case err == nil, ls.ctx.Err() != nil, errors.Is(err, ErrClosed):
		case errors.Is(err, ErrMaxHold):
			ls.l.log.Warn("dlock: no more renewals; the lease ends within its TTL", "key", ls.g.Key, "fence", ls.g.Fence, "err", err)
			return
		default:
			ls.l.log.Warn("dlock: renewal failed; trying again until the lease runs out", "key", ls.g.Key, "fence", ls.g.Fence, "err", err)
		}
	}
}

func (ls *lease) release(ctx context.Context) (known bool, err error) {
	if !ls.l.enter() {
		return false, ls.unanswered(ctx, ErrClosed)
	}
	defer ls.l.busy.Done()
	ctx, cancel := tryingOn(ctx)
	defer cancel()
	endless := ctx.Done() == nil // then no second goroutine: it would take a quarter of a release's time
	limit := max(ls.left(), 0) + undoTry
	if deadline, ok := ctx.Deadline(); ok {
		limit = time.Until(deadline)
	}
	ctx, stop := context.WithTimeout(ctx, limit)
	defer stop() // also for a call that is still running: Close waits for it
	if endless {
		defer context.AfterFunc(ls.l.open, func() { time.AfterFunc(undoTry, stop) })() //nolint:contextcheck // the Locker's
	}
	try := func() (err error) {
		unsure := ls.unsure
		ls.unsure = true // also if the backend panics
		if endless {
			if err = ls.l.b.Release(ctx, ls.g); ctx.Err() != nil && ls.l.open.Err() != nil && err != nil {
				err = fmt.Errorf("%w: %w", ErrClosed, err)
			}
		} else {
			err = ls.l.await(ctx, undoTry, func() error { return ls.l.b.Release(ctx, ls.g) })
		}
		ls.unsure = unsure || unknown(ctx, err)
		return err
	}
	err = try()
	if unknown(ctx, err) && ctx.Err() == nil {
		err = try()
	}
	switch {
	case ls.l.open.Err() != nil && errors.Is(err, ErrClosed): // the lease expires by itself
		err = ls.unanswered(ctx, err)
	case unknown(ctx, err):
		ls.l.busy.Go(func() { ls.l.undo(ctx, ls.g) })
		return false, ls.unanswered(ctx, err)
	case errors.Is(err, ErrForeignRelease):
		ls.l.m.nonOwner.Inc()
		ls.l.m.nonOwnerApplied.Inc()
		err = fmt.Errorf("%w: %w", ErrLost, err)
	case errors.Is(err, ErrLost) && ls.unsure && ls.heldToEnd:
		err = nil // the lease was held when the first request was sent, which removed it, or it has expired since
	case errors.Is(err, ErrLost):
		ls.l.m.nonOwner.Inc()
	}
	return true, err
}

// await returns when f or ctx ends, or grace after the Locker's end.
func (l *Locker) await(ctx context.Context, grace time.Duration, f func() error) error {
	replied := make(chan error, 1)
	l.run(func() { replied <- f() })
	var why error
	select {
	case err := <-replied:
		return err
	case <-ctx.Done():
		why = cause(ctx)
	case <-l.open.Done():
		select {
		case err := <-replied:
			return err
		case <-ctx.Done():
			why = cause(ctx)
		case <-time.After(grace):
			why = ErrClosed
		}
	}
	return fmt.Errorf("no answer from the lock service: %w", why)
}

type heldKey struct {
	l   *Locker
	key string
}

// leaseContext checks the clocks on every call: after a freeze the caller may run before the timer.
type leaseContext struct {
	valuesContext
	ls      *lease
	section int
}

func (c *leaseContext) Err() error {
	_ = c.ls.ended()
	return c.Context.Err()
}

func (c *leaseContext) Done() <-chan struct{} {
	_ = c.ls.ended()
	return c.Context.Done()
}

func (c *leaseContext) Value(key any) any {
	if key == (heldKey{c.ls.l, c.ls.g.Key}) {
		return c
	}
	return c.valuesContext.Value(key)
}

// valuesContext has the end of one context and the values of another.
type valuesContext struct {
	context.Context
	values context.Context
}

func (c *valuesContext) Value(key any) any {
	if v := c.values.Value(key); v != nil {
		return v
	}
	return c.Context.Value(key) // the standard library's own
}
