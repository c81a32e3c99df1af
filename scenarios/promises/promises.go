// Package promises is the kit for any lock: it checks what users expect of one, with faults in the middle of calls, and runs the
// hazards, which show what becomes of the data. For a dlock.Backend, dlock/dlocktest is stricter.
//
// Expiry is observed, as a successor's grant. A lock counts as held only while the holder's own lease says so. A call may take ten
// seconds longer than it was given, and a dead holder may block a lock for four times the TTL plus ten seconds: a stalled machine
// breaks no promise.
//
// It cannot see failovers, nor clocks that jump during a lease, nor whether a token is minted atomically with its grant. A broken
// promise is proved by what happened; a kept one has only not been seen broken.
package promises

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
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
	// Service is the lock: its name and Nodes, NoTokens, NoRenew. With Fault, which must have the faults wipe and jump of
	// [scenarios.LockService] and wipe of each node, the kit also restarts the servers without their data and sets their clocks: no
	// other test may use them meanwhile.
	Service *scenarios.Service
	// Open opens a client of the lock. Until of its leases may be zero; then only their Context counts. The hazards use what was given
	// to [scenarios.Child].
	Open scenarios.Open
	// Store is what the hazards' workers write to, as Runner.Store.
	Store *scenarios.Store
	// TTL is a short lease, several times a round trip. Default: one second.
	TTL time.Duration
	// Fixed says that the TTL can't be changed.
	Fixed bool
	// Only are the promises and hazards to check, by name. None: all.
	Only []string
	// Strict fails the test if a promise is broken, if data is lost although its token was checked on reads and writes, or if a check
	// came to no result. It doesn't fail for what the lock, the servers or the platform rule out: those rows are Excluded. By default
	// everything is only reported.
	Strict bool
	// Module is the lock's Go module, whose version reports name.
	Module string
}

const recordEnv = "FENCELAB_PROMISES"

// Run checks every promise, runs the hazards if the process has called [scenarios.Child], and logs the report. It fails the test if
// the lock can't be checked at all. If FENCELAB_PROMISES names a file, it appends the report as a line of JSON, or as a page if the
// name ends in .html.
func Run(t *testing.T, k Kit) *Report {
	t.Helper()
	r, err := k.Check(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Log("\n" + r.String())
	if file := os.Getenv(recordEnv); file != "" {
		if err := r.record(t.Context(), file); err != nil {
			t.Fatal(err)
		}
	}
	if bad := r.failures(); len(bad) > 0 && k.Strict {
		t.Errorf("%s: Kit.Strict: these broke, or came to no result (see above): %s", k.Service.Lock, strings.Join(bad, ", "))
	}
	return r
}

// Check is Run without a test. It fails if no client of the lock can be opened or acquires a free lock, or if ctx ends.
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
	var names []string
	omit := func(name string) bool {
		names = append(names, name)
		return len(k.Only) > 0 && !slices.Contains(k.Only, name)
	}
	chosen := slices.DeleteFunc(slices.Clone(promises), func(p promise) bool { return omit(p.name) })
	hazards := slices.DeleteFunc(scenarios.Hazards(), func(s scenarios.Scenario) bool {
		return !s.On(k.Service.Lock) || s.Faulty() || omit(s.Name) // another lock's, or with faults of its servers
	})
	for _, name := range k.Only {
		if !slices.Contains(names, name) {
			return nil, fmt.Errorf("promises: Kit.Only: there is no promise or hazard %q of this lock; there are %s", name, strings.Join(names, ", "))
		}
	}
	noHazards, err := k.works(ctx)
	if err != nil && ctx.Err() == nil {
		return nil, fmt.Errorf("promises: %s: %w", k.Service.Lock, err)
	}
	report := &Report{
		Lock: k.Service.Lock, Module: k.Module, Server: k.Service.Server, TTL: k.TTL.String(), Time: time.Now().UTC().Truncate(time.Second),
		Rows: make([]Row, len(chosen)),
	}
	var wg sync.WaitGroup
	for i, p := range chosen {
		if !p.alone {
			wg.Go(func() { report.Rows[i] = k.check(ctx, p) })
		}
	}
	wg.Wait()
	switch {
	case len(hazards) == 0:
	case noHazards != "":
		report.NoHazards = noHazards
	default:
		report.Hazards = k.run(ctx, hazards)
	}
	for i, p := range chosen {
		row := &report.Rows[i]
		if !p.alone && (row.Verdict != Unchecked || row.Excluded) {
			continue
		}
		if again := k.check(ctx, p); p.alone || again.Verdict != Unchecked { // the other checks may have stalled it
			*row = again
		}
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("promises: %s: %w", k.Service.Lock, context.Cause(ctx))
	}
	return report, nil
}

// works checks the adapter, whose errors would look like broken promises, and returns why hazards can't run, if so.
func (k Kit) works(ctx context.Context) (noHazards string, err error) {
	row := k.check(ctx, promise{check: func(c *check) { //nolint:contextcheck // it is the check's
		cl := c.lasting()
		first := newKey() // it may take long to connect
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
		switch {
		case l.Until().IsZero():
			noHazards = "Lease.Until is the zero time: a worker can't tell when its lease must be presumed lost"
		case !scenarios.IsChildReady():
			noHazards = "call scenarios.Child first in TestMain: workers are this binary, started again"
		case runtime.GOOS != "linux":
			noHazards = "the hazards' faults need Linux"
		}
		_ = c.do(l.Release)
	}})
	if row.Verdict != Kept {
		return "", errors.New(row.Why)
	}
	return noHazards, nil
}

func (k Kit) check(ctx context.Context, p promise) (row Row) {
	row = Row{Promise: p.name, Text: p.text, Verdict: Kept}
	if p.never != nil {
		if why := p.never(k); why != "" {
			row.Verdict, row.Why, row.Excluded = Unchecked, why, true
			return row
		}
	}
	c := &check{k: k, ctx: ctx}
	func() {
		defer func() {
			if r := recover(); r != nil && r != errStop { //nolint:errorlint // the very value
				panic(r)
			}
		}()
		p.check(c)
	}()
	c.end()
	c.mu.Lock() // a call that was given up may still run
	defer c.mu.Unlock()
	switch {
	case len(c.broken) > 0:
		row.Verdict, row.Why = Broken, strings.Join(c.broken[:min(len(c.broken), shown)], "; ")
		if more := len(c.broken) - shown; more > 0 {
			row.Why += fmt.Sprintf("; and %d more", more)
		}
	case c.why != "":
		row.Verdict, row.Why, row.Excluded = Unchecked, c.why, c.excluded
	}
	return row
}

// patience is how much longer than allowed a call may take.
const patience = 10 * time.Second

const faultLimit = time.Minute

const shown = 3

// long is the TTL of a lease that outlasts a check, in TTLs of the kit.
const long = 60

type check struct {
	k   Kit
	ctx context.Context

	mu      sync.Mutex
	broken  []string
	why     string // it couldn't be checked
	clients []*client

	excluded bool // by the servers
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

// unsure records why the promise can't be checked, unless it is broken.
func (c *check) unsure(format string, args ...any) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.why = fmt.Sprintf(format, args...)
}

// cannot is unsure and ends the check. Call it on the check's own goroutine.
func (c *check) cannot(format string, args ...any) {
	c.unsure(format, args...)
	panic(errStop)
}

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

type client struct {
	scenarios.Lock
	links []*faults.Link
	close func() error // once
}

func (c *check) client() *client { return c.clientOf(c.k.TTL) }

// lasting returns a client whose leases outlast a check, unless the TTL is fixed.
func (c *check) lasting() *client { return c.times(long) }

// times returns a client whose leases last for n TTLs, unless the TTL is fixed.
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
	r := c.within(patience, func(ctx context.Context) (scenarios.Lease, error) {
		l, err := c.k.Open(ctx, spec)
		if l == nil && err == nil {
			err = errors.New("got no lock and no error")
		}
		return opened{lock: l}, err
	})
	if !r.returned {
		return nil, fmt.Errorf("open: Kit.Open hasn't returned %v after its context had ended: it must return once that ends", patience)
	}
	if r.err != nil {
		return nil, fmt.Errorf("open: %w", r.err)
	}
	cl.Lock = r.lease.(opened).lock
	cl.close = sync.OnceValue(cl.Close)
	return cl, nil
}

// opened has a lock that is opened too late closed, as a lease is released.
type opened struct {
	scenarios.Lease
	lock scenarios.Lock
}

func (o opened) Release(context.Context) error { return o.lock.Close() }

// fault carries out a fault of the lock's servers.
func (c *check) fault(st scenarios.Step) {
	err := fmt.Errorf("Service.Fault is nil: %w", errors.ErrUnsupported)
	if c.k.Service.Fault != nil {
		err = c.within(faultLimit, func(ctx context.Context) (scenarios.Lease, error) { return nil, c.k.Service.Fault(ctx, st) }).err
	}
	if err != nil {
		c.excluded = errors.Is(err, errors.ErrUnsupported)
		c.cannot("%s: %v", st, err)
	}
}

type result struct {
	lease    scenarios.Lease
	err      error
	returned bool
}

// call gives up on f after limit. A later lease is released.
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

// within ends f's context after limit, and gives up patience later.
func (c *check) within(limit time.Duration, f func(ctx context.Context) (scenarios.Lease, error)) result {
	ctx, cancel := context.WithTimeout(c.ctx, limit)
	defer cancel()
	return c.call(limit+patience, func() (scenarios.Lease, error) { return f(ctx) })
}

func (c *check) do(f func(ctx context.Context) error) error {
	return c.within(patience, func(ctx context.Context) (scenarios.Lease, error) { return nil, f(ctx) }).err
}

func (c *check) briefly(f func(ctx context.Context) (scenarios.Lease, error)) result {
	return c.within(patience/5, f)
}

func releasing(l scenarios.Lease) func(ctx context.Context) (scenarios.Lease, error) {
	return func(ctx context.Context) (scenarios.Lease, error) { return nil, l.Release(ctx) }
}

// inject puts a fault in force on all of the client's links. heal ignores bytes that can't be delivered any more.
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

func (c *check) acquire(cl *client, key string) (scenarios.Lease, error) {
	return c.persist(c.limit(), cl, key)
}

// persist retries: the lock's own timeout may be too short.
func (c *check) persist(limit time.Duration, cl *client, key string) (scenarios.Lease, error) {
	for end := time.Now().Add(limit); ; time.Sleep(pause) {
		l, err := c.within(time.Until(end), func(ctx context.Context) (scenarios.Lease, error) { return cl.Acquire(ctx, key) }).granted()
		if err == nil || time.Until(end) < pause || c.ctx.Err() != nil {
			return l, err
		}
	}
}

// limit bounds how long a dead holder may block others: some services end a lease after two and a half times its TTL.
func (c *check) limit() time.Duration { return 4*max(c.k.TTL, c.k.Service.MinSession) + patience }

func (r result) granted() (scenarios.Lease, error) {
	if r.err == nil && r.lease == nil {
		return nil, errors.New("the lock has returned neither a lease nor an error")
	}
	return r.lease, r.err
}

func (c *check) take(cl *client, key string) scenarios.Lease {
	l, err := c.acquire(cl, key)
	if err != nil {
		c.cannot("Acquire of a free lock: %v", err)
	}
	return l
}

func (c *check) try(cl *client, key string) (scenarios.Lease, error) {
	return c.within(patience, func(ctx context.Context) (scenarios.Lease, error) { return cl.TryAcquire(ctx, key) }).granted()
}

func (c *check) release(l scenarios.Lease) {
	if err := c.do(l.Release); err != nil {
		c.cannot("Release by the holder: %v", err)
	}
}

func (c *check) comesFree(cl *client, key, after string) {
	l, err := c.acquire(cl, key)
	if err != nil {
		c.blocked(key, "after %s nobody had got the lock within %v: %v", after, c.limit(), err)
		return
	}
	_ = c.do(l.Release)
}

// blocked records that nobody gets the lock of key: the promise is broken if new clients, at the same time, get an unused lock and
// still not this one. Otherwise it is unsure: the machine or the servers have stalled.
func (c *check) blocked(key, format string, args ...any) {
	get := func(key string) <-chan error {
		done := make(chan error, 1)
		cl, err := c.open(c.k.TTL)
		if err != nil {
			done <- err
			return done
		}
		go func() {
			l, err := c.acquire(cl, key)
			if err == nil {
				_ = c.do(l.Release)
			}
			done <- err
		}()
		return done
	}
	unused, again := get(newKey()), get(key)
	if err := <-unused; err != nil {
		<-again
		c.unsure("a new client doesn't get a lock that nobody has touched: %v", err)
		return
	}
	if err := <-again; err == nil {
		c.unsure("a new client got it in the end")
		return
	}
	c.breaks(format, args...)
}

// still checks that no other client gets the lock while l lasts. It reports false if the lease has expired or TryAcquire failed.
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

// grace is how long after its successor's grant a holder's timer may fire.
const grace = 240 * time.Millisecond

// lasts reports whether l, by its own account, lasted at a time just past.
func lasts(l scenarios.Lease, at time.Time) bool {
	if until := l.Until(); !until.IsZero() {
		return l.Context().Err() == nil && at.Before(until)
	}
	return !isOver(l)
}

// isOver waits up to grace until the holder learns that its lease is over.
func isOver(l scenarios.Lease) bool {
	for range grace / pause { // in steps: a stall of the machine counts once
		if l.Context().Err() == nil {
			time.Sleep(pause)
		}
	}
	return l.Context().Err() != nil
}

// often retries f while a stall of the machine spoils it.
func (c *check) often(f func() (sure bool)) {
	const tries = 10
	for range tries {
		if f() {
			return
		}
	}
	c.cannot("the lease ran out, or TryAcquire failed, %d times before anything could be seen: set a longer Kit.TTL", tries)
}
