package promises

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/scenarios"
)

// patience is how much longer than allowed a call may take.
const patience = 10 * time.Second

// unjudged bounds what no promise covers: opening a client and server faults.
const unjudged = time.Minute

const shown = 3

// long is the TTL of a lease that outlasts a check, as a multiple of Kit.TTL.
const long = 60

type check struct {
	k   Kit
	ctx context.Context

	mu      sync.Mutex
	broken  []string
	why     string
	fact    string // an observation that breaks no promise
	clients []*client
	stalled atomic.Int64 // when the machine last stalled
	ticked  atomic.Int64
	skipped atomic.Bool // a result was dropped because of a stall

	excluded bool // ruled out by the lock or its servers

	probing chan struct{} // a semaphore of one
}

var errStop = errors.New("the check is over")

func (c *check) breaks(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if says := fmt.Sprintf(format, args...); !slices.Contains(c.broken, says) {
		c.broken = append(c.broken, says)
	}
}

func (c *check) isDecided() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.broken) > 0 || c.why != ""
}

func (c *check) isUnsure() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.why != ""
}

func (c *check) unsure(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.why = cmp.Or(c.why, fmt.Sprintf(format, args...))
}

func (c *check) notes(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.fact = cmp.Or(c.fact, fmt.Sprintf(format, args...))
}

// cannot is unsure, and ends this part of the check. Call it on a goroutine of together.
func (c *check) cannot(format string, args ...any) {
	c.unsure(format, args...)
	panic(errStop)
}

func (c *check) together(parts ...func()) {
	var wg sync.WaitGroup
	for _, part := range parts {
		wg.Go(func() {
			defer func() {
				if r := recover(); r != nil && r != errStop { //nolint:errorlint // the very value
					panic(r)
				}
			}()
			part()
		})
	}
	wg.Wait()
}

func (c *check) each(n int, part func(i int)) {
	var parts []func()
	for i := range n {
		parts = append(parts, func() { part(i) })
	}
	c.together(parts...)
}

func (c *check) end() {
	c.mu.Lock()
	all := slices.Clone(c.clients)
	c.mu.Unlock()
	c.each(len(all), func(i int) { c.shut(all[i]) })
}

func (c *check) shut(cl *client) {
	if cl.Lock != nil && !cl.closed.Load() {
		c.close(cl, patience)
	}
	for _, l := range cl.links {
		_ = l.Close()
	}
}

type client struct {
	scenarios.Lock
	ttl    time.Duration
	links  []*faults.Link
	closed atomic.Bool
}

func (c *check) close(cl *client, limit time.Duration) bool {
	cl.closed.Store(true)
	return c.call(limit, func() (scenarios.Lease, error) { return nil, cl.Close() }).returned
}

func (c *check) client() *client { return c.clientOf(c.k.TTL) }

// lasting returns a client whose leases outlast a check, unless the TTL is fixed.
func (c *check) lasting() *client { return c.times(long) }

func (c *check) times(n time.Duration) *client {
	if c.k.Fixed {
		return c.client()
	}
	return c.clientOf(n * c.k.TTL)
}

func (c *check) clientOf(ttl time.Duration) *client {
	cl, err := c.open(ttl)
	if err != nil {
		c.cannot("%v", err)
	}
	return cl
}

func (c *check) open(ttl time.Duration, prepare ...func(cl *client) error) (*client, error) {
	cl := &client{ttl: ttl}
	c.mu.Lock()
	c.clients = append(c.clients, cl)
	c.mu.Unlock()
	spec := scenarios.LockSpec{
		Lock: c.k.Service.Lock, TTL: ttl, MinSession: c.k.Service.MinSession, Renew: !c.k.Service.NoRenew, MaxHold: time.Hour,
	}
	for _, n := range c.k.Service.Nodes {
		l, addr, err := c.link(n)
		if err != nil {
			return cl, err
		}
		cl.links = append(cl.links, l)
		spec.Addrs = append(spec.Addrs, addr)
	}
	for _, f := range prepare {
		if err := f(cl); err != nil {
			return cl, err
		}
	}
	r := c.within(unjudged, func(ctx context.Context) (scenarios.Lease, error) {
		var l scenarios.Lock
		err := c.ask(func() (err error) {
			l, err = c.k.Open(ctx, spec)
			return err
		})
		if l == nil && err == nil {
			err = errors.New("got no lock and no error")
		}
		return opened{lock: l}, err
	})
	if !r.returned {
		return cl, fmt.Errorf("open: Kit.Open hasn't returned %v after its context had ended: it must return once that ends", patience)
	}
	if r.err != nil {
		return cl, fmt.Errorf("open: %w", r.err)
	}
	cl.Lock = r.lease.(opened).lock
	return cl, nil
}

// link makes a link without goroutine labels, so that its goroutines don't count as the lock's.
func (c *check) link(n scenarios.Node) (l *faults.Link, addr string, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		pprof.SetGoroutineLabels(context.Background())
		l, addr, err = c.k.link(n)
	}()
	<-done
	return l, addr, err
}

// opened is a lock as a lease: its release closes a lock that was opened too late.
type opened struct {
	scenarios.Lease
	lock scenarios.Lock
}

func (o opened) Release(context.Context) error { return o.lock.Close() }

func (c *check) fault(st scenarios.Step) {
	err := fmt.Errorf("Service.Fault is nil: %w", errors.ErrUnsupported)
	if c.k.Service.Fault != nil {
		err = c.within(unjudged, func(ctx context.Context) (scenarios.Lease, error) {
			return nil, c.ask(func() error { return c.k.Service.Fault(ctx, st) })
		}).err
	}
	if err != nil {
		c.excluded = errors.Is(err, errors.ErrUnsupported)
		c.cannot("%s: %v", st, err)
	}
}

// undo is fault for a step that must be carried out even if the check has been cancelled.
func (c *check) undo(st scenarios.Step) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), unjudged)
	defer cancel()
	if err := c.ask(func() error { return c.k.Service.Fault(ctx, st) }); err != nil {
		c.cannot("%s: %v", st, err)
	}
}

type result struct {
	lease    scenarios.Lease
	err      error
	returned bool
}

// call gives up on f after limit, and releases a lease that arrives later.
func (c *check) call(limit time.Duration, f func() (scenarios.Lease, error)) result {
	done := make(chan result, 1)
	go func() {
		l, err := c.guarded(f)
		done <- result{l, err, true}
	}()
	after := time.NewTimer(limit)
	defer after.Stop()
	select {
	case r := <-done:
		return r
	case <-after.C:
		select { // a process that was frozen may have had no time for f
		case r := <-done:
			return r
		case <-time.After(patience / 10):
		}
		go func() { c.drop(<-done) }()
		return result{err: errors.New("the call hasn't returned")}
	case <-c.ctx.Done():
		return result{nil, context.Cause(c.ctx), true}
	}
}

// ask calls a function of the kit's user, whose panic isn't the lock's.
func (c *check) ask(f func() error) (err error) {
	defer func() {
		if r := recover(); r != nil {
			err = fmt.Errorf("the adapter panicked: %v\n%s", r, debug.Stack())
			c.unsure("%v", err)
		}
	}()
	return f()
}

// guarded calls f. A panic of the lock breaks any promise.
func (c *check) guarded(f func() (scenarios.Lease, error)) (l scenarios.Lease, err error) {
	defer func() {
		if r := recover(); r != nil {
			c.breaks("a call panicked: %v at %s", r, culprit())
			err = fmt.Errorf("it panicked: %v", r)
		}
	}()
	return f()
}

func culprit() string {
	pcs := make([]uintptr, 32)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(4, pcs)]) // skips guarded's frames and the runtime's first
	for {
		f, more := frames.Next()
		if !more || !strings.HasPrefix(f.Function, "runtime.") {
			return fmt.Sprintf("%s:%d", f.File, f.Line)
		}
	}
}

func (c *check) within(limit time.Duration, f call) result {
	ctx, cancel := context.WithTimeout(c.ctx, limit)
	defer cancel()
	return c.call(limit+patience, func() (scenarios.Lease, error) { return f(ctx) })
}

func (c *check) do(f func(ctx context.Context) error) error {
	return c.within(patience, without(f)).err
}

func (c *check) briefly(f call) result { return c.within(patience/5, f) }

func (c *check) begin(limit time.Duration, f call) <-chan result {
	done := make(chan result, 1)
	go func() { done <- c.within(limit, f) }()
	return done
}

type call = func(ctx context.Context) (scenarios.Lease, error)

func acquiring(cl *client, key string) call {
	return func(ctx context.Context) (scenarios.Lease, error) { return cl.Acquire(ctx, key) }
}

func trying(cl *client, key string) call {
	return func(ctx context.Context) (scenarios.Lease, error) { return cl.TryAcquire(ctx, key) }
}

func releasing(l scenarios.Lease) call { return without(l.Release) }

func without(f func(ctx context.Context) error) call {
	return func(ctx context.Context) (scenarios.Lease, error) { return nil, f(ctx) }
}

type linkFault = func(*faults.Link, context.Context) (faults.Heal, error)

type lossFault func(l *faults.Link, ctx context.Context, n int) (faults.Heal, error)

func (f lossFault) from(n int) linkFault {
	return func(l *faults.Link, ctx context.Context) (faults.Heal, error) { return f(l, ctx, n) }
}

func delaying(by time.Duration) linkFault {
	return func(l *faults.Link, ctx context.Context) (faults.Heal, error) { return l.DelayReplies(ctx, by) }
}

// inject puts a fault in force on all of the client's links. heal ignores bytes that can no longer be delivered.
func (c *check) inject(cl *client, fault linkFault) (heal func()) {
	heal, err := c.injected(cl, fault)
	if err != nil {
		c.cannot("%v", err)
	}
	return heal
}

// injected is inject for goroutines that aren't the check's own. The fault may be nil.
func (c *check) injected(cl *client, fault linkFault) (heal func(), err error) {
	if fault == nil {
		return func() {}, nil
	}
	var heals []faults.Heal
	for _, l := range cl.links {
		h, failed := fault(l, c.ctx)
		if failed != nil {
			err = failed
			break
		}
		heals = append(heals, h)
	}
	return sync.OnceFunc(func() {
		for _, h := range heals {
			_ = c.do(h)
		}
	}), err
}

func newKey() string { return "promises-" + uuid.NewString() }

func (c *check) acquire(cl *client, key string) (scenarios.Lease, error) {
	return c.persist(c.limitOf(cl), cl, key)
}

func (c *check) persist(limit time.Duration, cl *client, key string) (scenarios.Lease, error) {
	return c.wait(cl, key).served(limit)
}

type wait struct {
	c      *check
	key    string
	stop   context.CancelFunc
	done   chan result
	failed *atomic.Value // why one of its calls returned before its context ended, as a string
}

// wait starts an acquisition that retries, since the lock's own timeout may be too short. Call served to end it.
func (c *check) wait(cl *client, key string) wait {
	ctx, stop := context.WithCancel(c.ctx)
	w := wait{c, key, stop, make(chan result, 1), new(atomic.Value)}
	go func() {
		for why := error(nil); ; time.Sleep(pause) {
			l, err := c.guarded(func() (scenarios.Lease, error) { return cl.Acquire(ctx, key) })
			r := result{lease: l, err: err}
			_, err = r.granted()
			if err == nil || ctx.Err() != nil {
				if err != nil && why != nil {
					r.err = why
				}
				w.done <- r
				return
			}
			why = err
			w.failed.Store(fmt.Sprint(err))
		}
	}()
	return w
}

// served ends the wait after limit or, if longer, after ten times what a new client then needs for an unused lock, plus as much
// again: slow servers and machines break no promise. The check is unsure if new clients get no unused lock.
func (w wait) served(limit time.Duration) (scenarios.Lease, error) {
	defer w.stop()
	for began, allowed, sound := time.Now(), limit, false; ; {
		select {
		case r := <-w.done:
			return r.granted()
		case <-time.After(time.Until(began.Add(allowed))):
		case <-w.c.ctx.Done():
		}
		select { // one at a time: a server may not have room for more new clients
		case r := <-w.done:
			return r.granted()
		case w.c.probing <- struct{}{}:
		}
		asked := time.Now()
		var err error
		if !w.c.isUnsure() {
			err = w.c.unused()
		}
		<-w.c.probing
		took, waited := time.Since(asked), time.Since(began)
		switch {
		case w.c.ctx.Err() != nil, w.c.isUnsure():
		case err != nil && waited < limit+unjudged:
			sound, allowed = false, waited+patience/5
			continue
		case err != nil:
			w.c.unsure("a new client doesn't get a lock that nobody has touched: %v", err)
		case waited > limit+5*unjudged:
			w.c.unsure("a new client needs %v for a lock that nobody has touched", took)
		case waited < 10*took:
			allowed = 10 * took
			continue
		case !sound: // a waiter may poll later than a new client
			sound, allowed = true, waited+max(patience, 10*took)
			continue
		}
		w.stop()
		l, err := w.c.call(patience, func() (scenarios.Lease, error) { return (<-w.done).granted() }).granted()
		if err == context.Canceled { //nolint:errorlint // the check's own
			err = errors.New("it waited until the check gave up")
		}
		return l, err
	}
}

// leave ends the wait; a lock may be granted all the same.
func (w wait) leave() {
	w.stop()
	w.c.drop(w.c.call(patience, func() (scenarios.Lease, error) { return (<-w.done).granted() }))
}

func (w wait) pass(limit time.Duration) error {
	l, err := w.served(limit)
	w.c.free(l)
	return err
}

// must is pass for a wait that must be served; otherwise the format says what is broken, see blocked.
func (w wait) must(limit time.Duration, format string, args ...any) {
	if err := w.pass(limit); err != nil {
		w.c.blocked(w.key, format+": %v", append(args, err)...)
	}
}

func (c *check) tryFor(limit, every time.Duration, cl *client, key string) (l scenarios.Lease, err error) {
	for end := time.Now().Add(limit); ; time.Sleep(every) {
		if l, err = c.try(cl, key); err == nil || time.Now().After(end) || c.ctx.Err() != nil {
			return l, err
		}
	}
}

func (c *check) gets(cl *client) bool { return c.wait(cl, newKey()).pass(c.limitOf(cl)) == nil }

func (c *check) unused() error {
	cl, err := c.open(c.k.TTL)
	defer c.shut(cl)
	if err != nil {
		return err
	}
	l, err := c.within(unjudged/2, acquiring(cl, newKey())).granted()
	if err != nil {
		return err
	}
	if err := c.do(l.Release); err != nil {
		return fmt.Errorf("it can't release it: %w", err)
	}
	return nil
}

// limit bounds how long a dead holder may block others: some services end a lease after two and a half times its TTL.
func (c *check) limit() time.Duration { return 4*max(c.k.TTL, c.k.Service.MinSession) + patience }

func (c *check) limitOf(cl *client) time.Duration { return max(c.limit(), cl.ttl) }

func (r result) granted() (scenarios.Lease, error) {
	switch {
	case r.err != nil:
		return nil, r.err
	case r.lease == nil:
		return nil, errors.New("the lock returned neither a lease nor an error")
	default:
		return r.lease, nil
	}
}

// drop frees what a call has got, if anything.
func (c *check) drop(r result) {
	l, _ := r.granted()
	c.free(l)
}

func (c *check) take(cl *client, key string) scenarios.Lease {
	l, err := c.acquire(cl, key)
	if err != nil {
		c.cannot("Acquire of a free lock: %v", err)
	}
	return l
}

func (c *check) connect(clients ...*client) {
	for _, cl := range clients {
		c.free(c.take(cl, newKey()))
	}
}

func (c *check) try(cl *client, key string) (scenarios.Lease, error) {
	return c.within(patience, trying(cl, key)).granted()
}

func (c *check) free(leases ...scenarios.Lease) {
	for _, l := range leases {
		if l != nil {
			_ = c.do(l.Release)
		}
	}
}

// release is unsure if it fails, since others may have to wait until the lease expires.
func (c *check) release(l scenarios.Lease) {
	if err := c.persistentRelease(l); err != nil && !errors.Is(err, dlock.ErrLost) {
		c.unsure("Release by the holder: %v", err)
	}
}

func (c *check) persistentRelease(l scenarios.Lease) (err error) {
	for range 3 { // the client may have to reconnect
		if err = c.do(l.Release); err == nil || errors.Is(err, dlock.ErrLost) {
			break
		}
	}
	return err
}

func (c *check) comesFree(cl *client, key, after string) {
	if !c.isDecided() {
		c.wait(cl, key).must(c.limitOf(cl), "after %s a client hadn't got the lock in %v or more", after, c.limitOf(cl))
	}
}

// blocked records that a waiter hasn't got key's lock. The promise is broken if a new client gets it at once, or gets an unused
// lock meanwhile but not this one. Otherwise it is unsure: the machine or the servers have stalled.
func (c *check) blocked(key, format string, args ...any) {
	if c.isUnsure() {
		return
	}
	if cl, err := c.open(c.k.TTL); err == nil {
		if l, err := c.try(cl, key); err == nil {
			c.free(l)
			c.breaks(format+"; then a new client got it at once", args...)
			return
		}
	}
	again := make(chan error, 1)
	go func() {
		cl, err := c.open(c.k.TTL)
		if err != nil {
			c.unsure("%v", err)
		} else {
			err = c.wait(cl, key).pass(c.limitOf(cl))
		}
		again <- err
	}()
	unused := c.unused()
	switch late := <-again; {
	case unused != nil:
		c.unsure("a new client doesn't get a lock that nobody has touched: %v", unused)
	case late == nil:
		c.unsure("a new client got the lock, late")
	case !c.isUnsure():
		c.breaks(format, args...)
	}
}

// still checks that no other client gets the lock while l lasts. It reports false if the lease has expired or TryAcquire failed.
func (c *check) still(l scenarios.Lease, other *client, key, after string) (sure bool) {
	got, err := c.try(other, key)
	if err != nil {
		return errors.Is(err, dlock.ErrHeld) && l.Context().Err() == nil
	}
	now := time.Now()
	defer c.free(got)
	if !lasts(l, now) {
		return false
	}
	c.breaks("after %s another client was granted the lock while the holder's lease lasted", after)
	return true
}

// grace is how long after its successor's grant a holder's timer may fire.
const grace = 240 * time.Millisecond

// lasts reports whether, by its own account, l lasted at a time just past.
func lasts(l scenarios.Lease, at time.Time) bool {
	if until := l.Until(); !until.IsZero() {
		return l.Context().Err() == nil && at.Before(until)
	}
	return !isOver(l)
}

func isOver(l scenarios.Lease) bool {
	for range grace / pause { // in steps, so that a stall of the machine counts once
		if l.Context().Err() == nil {
			time.Sleep(pause)
		}
	}
	return l.Context().Err() != nil
}

func (c *check) ends(l scenarios.Lease, limit time.Duration) bool {
	select {
	case <-l.Context().Done():
	case <-time.After(limit):
	case <-c.ctx.Done():
	}
	return l.Context().Err() != nil
}

// watch records ticks, and when one was late by an eighth of a TTL for want of a processor, which may end leases.
func (c *check) watch(done <-chan struct{}) {
	for last := c.k.now(); ; {
		c.ticked.Store(time.Now().UnixNano())
		select {
		case <-done:
			return
		case <-time.After(pause):
		}
		now := c.k.now()
		if now.Sub(last) > pause+c.k.TTL/8 {
			c.stalled.Store(time.Now().UnixNano())
		}
		last = now
	}
}

// stalledSince is also true if a stall is about to be recorded.
func (c *check) stalledSince(t time.Time) bool {
	return c.stalled.Load() >= t.UnixNano() || time.Now().UnixNano()-c.ticked.Load() > int64(pause+c.k.TTL/8)
}

// suspects breaks the promise, unless the machine has stalled since began and may be the cause.
func (c *check) suspects(began time.Time, format string, args ...any) {
	if c.stalledSince(began) {
		c.unsure("the machine stalled for more than %v, when "+format, append([]any{c.k.TTL / 8}, args...)...)
		return
	}
	c.breaks(format, args...)
}

// tries bounds retries of what a stall of the machine has spoilt.
const tries = 10

// repeatedly reports whether f finds the promise broken three times and never finds it kept.
func (c *check) repeatedly(f func() (isBroken bool)) bool {
	found := 0
	for range tries {
		began := time.Now()
		if c.isDecided() || !f() {
			return false
		}
		if !c.stalledSince(began) {
			found++
		}
		if found == 3 {
			return true
		}
	}
	c.unsure("the machine stalled for more than %v, again and again", c.k.TTL/8)
	return false
}

// thrice breaks the promise if f says three times how it is broken, and never says nothing.
func (c *check) thrice(f func() (says string)) {
	says := ""
	if c.repeatedly(func() bool { says = f(); return says != "" }) {
		c.breaks("%s", says)
	}
}

func when(isSo bool, format string, args ...any) (says string) {
	if isSo {
		says = fmt.Sprintf(format, args...)
	}
	return says
}

// counter counts what the servers may cause once.
type counter struct {
	c    *check
	n    int
	last time.Time
}

// see breaks the promise the third time that isSo is true. Times when the machine stalled don't count.
func (t *counter) see(isSo bool, format string, args ...any) {
	last := t.last
	t.last = time.Now()
	switch {
	case !isSo:
	case t.c.stalledSince(last):
		t.c.skipped.Store(true)
	default:
		if t.n++; t.n == 3 {
			t.c.breaks(format, args...)
		}
	}
}

// endsAlone rules out the machine and the servers as the cause.
func endsAlone(l, another scenarios.Lease) bool {
	return l.Context().Err() != nil && another.Context().Err() == nil
}

// often retries f while a stall of the machine spoils it.
func (c *check) often(f func() (sure bool)) {
	for range tries {
		if f() || c.isDecided() {
			return
		}
	}
	if c.skipped.Load() {
		c.cannot("the machine stalled for more than %v, again and again", c.k.TTL/8)
	}
	c.cannot("the lease ran out, or TryAcquire failed, %d times before anything could be seen: set a longer Kit.TTL", tries)
}
