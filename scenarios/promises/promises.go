// Package promises checks what users expect of every lock, on a lock of anybody's: it opens clients of the lock, each over links
// of its own to the servers, breaks these links in the midst of calls, and says promise by promise what the lock keeps, what it
// breaks, and what can't be checked. The lock needs the few methods of a scenarios.Lock; one with fencing tokens that implements
// dlock.Backend has a stricter kit, dlock/dlocktest.
//
// That a lease has run out is observed, by a successor's grant, never slept for. That a lock is still held is only claimed
// while the holder's lease lasts by its own word. A call may take ten seconds more than it was given, and a dead holder may block
// a lock for four times the TTL and ten seconds more: a machine that stalls breaks no promise.
//
// What it cannot see: whether the servers keep what they granted over a crash, a failover or a clock that jumps; whether a token is
// minted in the same step as its grant. A broken promise is always shown by what happened; a promise that is kept has only not been
// seen broken.
package promises

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/scenarios"
)

// Kit is a lock to check, and how.
type Kit struct {
	// Service is the lock: its name and Nodes, and what it never promised: NoTokens, NoRenew.
	Service *scenarios.Service
	// Open opens a client of the lock, as for the hazards; but a lease's Until may be the zero time, if the lock doesn't tell: what
	// counts is then its Context alone.
	Open scenarios.Open
	// TTL is a short lease that the lock allows and that is several times a round trip. Default: one second.
	TTL time.Duration
	// Fixed says that the lock's leases can't have another TTL.
	Fixed bool
	// Only are the names of the promises to check. None: all.
	Only []string
	// Strict has a broken promise fail the test. By default it is a finding, and the test passes. One that couldn't be checked
	// never fails it: see the report.
	Strict bool
	// Module is the path of the Go module that the lock comes from. A report that is recorded has its version.
	Module string
}

// recordEnv names the file to which Run appends each report as a line of JSON.
const recordEnv = "FENCELAB_PROMISES"

// Run checks every promise, all at once, and logs the report. It fails the test if the lock couldn't be checked at all. If the
// environment's FENCELAB_PROMISES is the name of a file, it appends the report there, as a line of JSON.
func Run(t *testing.T, k Kit) *Report {
	t.Helper()
	r, err := k.Check(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + r.String())
	if file := os.Getenv(recordEnv); file != "" {
		if err := r.append(t.Context(), file); err != nil {
			t.Fatal(err)
		}
	}
	if r.Count(Broken) > 0 && k.Strict {
		t.Errorf("%s breaks promises, see above", k.Service.Lock)
	}
	return r
}

// Check is Run without a test. It returns an error if no client of the lock can be opened or none gets a free lock, and when ctx ends.
func (k Kit) Check(ctx context.Context) (*Report, error) {
	if k.TTL == 0 {
		k.TTL = time.Second
	}
	switch {
	case k.Service == nil || k.Open == nil:
		return nil, errors.New("promises: Kit.Service and Kit.Open are required")
	case k.TTL < 0:
		return nil, fmt.Errorf("promises: Kit.TTL %v is negative", k.TTL)
	case len(k.Service.Nodes) == 0:
		return nil, errors.New("promises: Service.Nodes is empty: without the servers' addresses no link to them can be broken")
	}
	chosen := slices.Clone(promises)
	for _, name := range k.Only {
		if !slices.ContainsFunc(promises, func(p promise) bool { return p.name == name }) {
			return nil, fmt.Errorf("promises: Kit.Only: there is no promise %q", name)
		}
		chosen = slices.DeleteFunc(chosen, func(p promise) bool { return !slices.Contains(k.Only, p.name) })
	}
	if err := k.works(ctx); err != nil && ctx.Err() == nil {
		return nil, fmt.Errorf("promises: %s: %w", k.Service.Lock, err)
	}
	report := &Report{
		Lock: k.Service.Lock, Module: k.Module, Server: k.Service.Server, TTL: k.TTL.String(), Time: time.Now().UTC().Truncate(time.Second),
		Rows: make([]Row, len(chosen)),
	}
	var wg sync.WaitGroup
	for i, p := range chosen {
		wg.Go(func() { report.Rows[i] = k.check(ctx, p) })
	}
	wg.Wait()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("promises: %s: %w", k.Service.Lock, context.Cause(ctx))
	}
	return report, nil
}

// works tries the adapter out, so that its errors aren't taken for broken promises.
func (k Kit) works(ctx context.Context) error {
	row := k.check(ctx, promise{check: func(c *check) { //nolint:contextcheck // it is the check's
		cl := c.lasting()
		first := newKey() // its connection may take its time
		l, err := c.within(6*patience, func(ctx context.Context) (scenarios.Lease, error) { return cl.Acquire(ctx, first) }).granted()
		if err != nil {
			c.cannot("Acquire of a free lock: %v", err)
		}
		_ = c.do(l.Release)
		if l, err = c.try(cl, newKey()); err != nil {
			c.cannot("TryAcquire of a free lock: %v", err)
		}
		switch {
		case l.Context() == nil:
			c.cannot("Lease.Context is nil: it ends when the lease must be presumed lost")
		case (l.Fence() == 0) != k.Service.NoTokens:
			c.cannot("Lease.Fence is %d, and Service.NoTokens is %v: 0 is for a lock without tokens", l.Fence(), k.Service.NoTokens)
		}
		_ = c.do(l.Release)
	}})
	if row.Verdict != Kept {
		return errors.New(row.Why)
	}
	return nil
}

func (k Kit) check(ctx context.Context, p promise) (row Row) {
	row = Row{Promise: p.name, Text: p.text}
	if p.never != nil {
		if why := p.never(k); why != "" {
			row.Verdict, row.Why = Unchecked, why
			return row
		}
	}
	c := &check{k: k, ctx: ctx}
	start := time.Now()
	func() {
		defer func() {
			if r := recover(); r != nil && r != errStop { //nolint:errorlint // the very value
				panic(r)
			}
		}()
		p.check(c)
	}()
	c.end()
	row.Took = time.Since(start)
	c.mu.Lock() // what was given up on may go on
	defer c.mu.Unlock()
	switch {
	case len(c.broken) > 0:
		row.Verdict, row.Why = Broken, strings.Join(c.broken[:min(len(c.broken), shown)], "; ")
		if more := len(c.broken) - shown; more > 0 {
			row.Why += fmt.Sprintf("; and %d more", more)
		}
	case c.why != "":
		row.Verdict, row.Why = Unchecked, c.why
	}
	return row
}

// patience is how much longer than it should a call may take.
const patience = 10 * time.Second

// shown is how many findings of one promise are told.
const shown = 3

// long is a lease that doesn't run out in what is done with it, in TTLs.
const long = 60

// check is one promise's check.
type check struct {
	k   Kit
	ctx context.Context

	mu      sync.Mutex
	broken  []string
	why     string // it couldn't be checked
	clients []*client
}

// errStop ends a check from within.
var errStop = errors.New("the check is over")

// breaks says that the promise is broken. The check goes on.
func (c *check) breaks(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if says := fmt.Sprintf(format, args...); !slices.Contains(c.broken, says) {
		c.broken = append(c.broken, says)
	}
}

// isDecided reports whether the verdict is certain already.
func (c *check) isDecided() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.broken) > 0 || c.why != ""
}

// unsure says why there is nothing to say of the promise, unless it is broken.
func (c *check) unsure(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.why = fmt.Sprintf(format, args...)
}

// cannot is unsure, and ends the check. It must be called on the check's own goroutine.
func (c *check) cannot(format string, args ...any) {
	c.unsure(format, args...)
	panic(errStop)
}

// end closes all clients. One that doesn't close in time is left behind, without its links.
func (c *check) end() {
	var wg sync.WaitGroup
	for _, cl := range c.clients {
		wg.Go(func() {
			if cl.Lock != nil {
				c.call(patience, func() (scenarios.Lease, error) { return nil, cl.close() })
			}
			for _, l := range cl.links {
				_ = l.Close()
			}
		})
	}
	wg.Wait()
}

// client is a client of the lock with links of its own.
type client struct {
	scenarios.Lock
	links []*faults.Link
	close func() error // once
}

func (c *check) client() *client { return c.clientOf(c.k.TTL) }

// lasting returns a client whose leases don't run out by themselves, as far as the lock has such.
func (c *check) lasting() *client {
	if c.k.Fixed {
		return c.client()
	}
	return c.clientOf(long * c.k.TTL)
}

func (c *check) clientOf(ttl time.Duration) *client {
	cl, err := c.open(ttl)
	if err != nil {
		c.cannot("%v", err)
	}
	return cl
}

func (c *check) open(ttl time.Duration) (*client, error) {
	cl := &client{}
	c.mu.Lock()
	c.clients = append(c.clients, cl)
	c.mu.Unlock()
	spec := scenarios.LockSpec{
		Lock: c.k.Service.Lock, TTL: ttl, MinSession: c.k.Service.MinSession, Renew: !c.k.Service.NoRenew, MaxHold: time.Hour,
	}
	for _, n := range c.k.Service.Nodes {
		l, addr, err := n.Link()
		if err != nil {
			return nil, err
		}
		cl.links = append(cl.links, l)
		spec.Addrs = append(spec.Addrs, addr)
	}
	ctx, cancel := context.WithTimeout(c.ctx, patience)
	defer cancel()
	var err error
	if cl.Lock, err = c.k.Open(ctx, spec); err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	cl.close = sync.OnceValue(cl.Close)
	return cl, nil
}

// result is what a call has returned, and whether it has.
type result struct {
	lease    scenarios.Lease
	err      error
	returned bool
}

// call calls f, and gives up on it at the limit. A lease that comes later is released.
func (c *check) call(limit time.Duration, f func() (scenarios.Lease, error)) result {
	done := make(chan result, 1)
	go func() {
		l, err := f()
		done <- result{l, err, true}
	}()
	after := time.NewTimer(limit)
	defer after.Stop()
	select {
	case r := <-done:
		return r
	case <-after.C:
		go func() {
			if l, err := (<-done).granted(); err == nil && l != nil {
				_ = c.do(l.Release)
			}
		}()
		return result{err: errors.New("the call hasn't returned")}
	case <-c.ctx.Done():
		return result{nil, context.Cause(c.ctx), true}
	}
}

// within calls f with a context that ends at the limit, and gives up on it some time later.
func (c *check) within(limit time.Duration, f func(ctx context.Context) (scenarios.Lease, error)) result {
	ctx, cancel := context.WithTimeout(c.ctx, limit)
	defer cancel()
	return c.call(limit+patience, func() (scenarios.Lease, error) { return f(ctx) })
}

// do is within for a call that returns no lease.
func (c *check) do(f func(ctx context.Context) error) error {
	return c.within(patience, func(ctx context.Context) (scenarios.Lease, error) { return nil, f(ctx) }).err
}

// briefly is within for a call that can't succeed.
func (c *check) briefly(f func(ctx context.Context) (scenarios.Lease, error)) result {
	return c.within(patience/5, f)
}

// releasing is a release as within and ends want it.
func releasing(l scenarios.Lease) func(ctx context.Context) (scenarios.Lease, error) {
	return func(ctx context.Context) (scenarios.Lease, error) { return nil, l.Release(ctx) }
}

// inject puts a fault in force on all of the client's links. The heal may be called again. What can't be delivered any more, because
// the server has closed the connection meanwhile, does no harm.
func (c *check) inject(cl *client, fault func(*faults.Link, context.Context) (faults.Heal, error)) (heal func()) {
	var heals []faults.Heal
	for _, l := range cl.links {
		h, err := fault(l, c.ctx)
		if err != nil {
			c.cannot("%v", err)
		}
		heals = append(heals, h)
	}
	return sync.OnceFunc(func() {
		for _, h := range heals {
			_ = c.do(h)
		}
	})
}

func newKey() string { return "promises-" + uuid.NewString() }

// acquire waits for a lock that should be free now, or when the lease of somebody gone has run out.
func (c *check) acquire(cl *client, key string) (scenarios.Lease, error) {
	return c.persist(c.limit(), cl, key)
}

// persist calls Acquire until it grants a lease: a client's own time limit may be too short for the machine.
func (c *check) persist(limit time.Duration, cl *client, key string) (scenarios.Lease, error) {
	for end := time.Now().Add(limit); ; time.Sleep(pause) {
		l, err := c.within(time.Until(end), func(ctx context.Context) (scenarios.Lease, error) { return cl.Acquire(ctx, key) }).granted()
		if err == nil || time.Until(end) < pause || c.ctx.Err() != nil {
			return l, err
		}
	}
}

// limit is how long a lease of somebody gone may be in the way: some lock services end it only after two and a half times its TTL, which
// is up to one and a half times the kit's.
func (c *check) limit() time.Duration { return 4*max(c.k.TTL, c.k.Service.MinSession) + patience }

// granted is the result of a call that returns a lease.
func (r result) granted() (scenarios.Lease, error) {
	if r.err == nil && r.lease == nil {
		return nil, errors.New("the lock has returned neither a lease nor an error")
	}
	return r.lease, r.err
}

// take has a client acquire a key that is free.
func (c *check) take(cl *client, key string) scenarios.Lease {
	l, err := c.acquire(cl, key)
	if err != nil {
		c.cannot("Acquire of a free lock: %v", err)
	}
	return l
}

// try has a client try to acquire a lock.
func (c *check) try(cl *client, key string) (scenarios.Lease, error) {
	return c.within(patience, func(ctx context.Context) (scenarios.Lease, error) { return cl.TryAcquire(ctx, key) }).granted()
}

func (c *check) release(l scenarios.Lease) {
	if err := c.do(l.Release); err != nil {
		c.cannot("Release by the holder: %v", err)
	}
}

// comesFree says that the promise is broken if nobody gets the lock in the time that a dead holder may block it.
func (c *check) comesFree(cl *client, key, after string) {
	l, err := c.acquire(cl, key)
	if err != nil {
		c.blocked("after %s nobody had got the lock within %v: %v", after, c.limit(), err)
		return
	}
	_ = c.do(l.Release)
}

// blocked says that the promise is broken, because nobody gets a lock, unless a new client doesn't get a new one either: then it
// is the servers or the machine that don't serve, and there is nothing to say of the promise.
func (c *check) blocked(format string, args ...any) {
	cl, err := c.open(c.k.TTL)
	if err == nil {
		var l scenarios.Lease
		if l, err = c.acquire(cl, newKey()); err == nil {
			_ = c.do(l.Release)
			c.breaks(format, args...)
			return
		}
	}
	c.unsure("a new client doesn't get a lock that nobody has touched: %v", err)
}

// still says that the promise is broken if another client gets the lock while l is a lease by its own word. It reports false if
// that can't be said: the lease has run out.
func (c *check) still(l scenarios.Lease, other *client, key, after string) (sure bool) {
	got, err := c.try(other, key)
	if err != nil {
		return errors.Is(err, dlock.ErrHeld) && l.Context().Err() == nil
	}
	now := time.Now()
	defer func() { _ = c.do(got.Release) }()
	if !lasts(l, now) {
		return false
	}
	c.breaks("after %s another client was granted the lock while the holder's lease lasted", after)
	return true
}

// told is how much later than its successor's grant a holder may notice: its timer has to get a processor.
const told = 240 * time.Millisecond

// lasts reports whether l is still a lease at a moment, which has just been, by its own word.
func lasts(l scenarios.Lease, at time.Time) bool {
	if until := l.Until(); !until.IsZero() {
		return l.Context().Err() == nil && at.Before(until)
	}
	return !isTold(l)
}

// isTold reports whether the holder is told by now, or soon, that its lease is over.
func isTold(l scenarios.Lease) bool {
	for range told / pause { // in steps, or a stall of the machine would count
		if l.Context().Err() == nil {
			time.Sleep(pause)
		}
	}
	return l.Context().Err() != nil
}

// often repeats a part of a check that a machine which stalls can spoil.
func (c *check) often(f func() (sure bool)) {
	const tries = 10
	for range tries {
		if f() {
			return
		}
	}
	c.cannot("the lease ran out, or TryAcquire failed, %d times before anything could be seen: set a longer Kit.TTL", tries)
}
