// Package promises checks whether any lock does what users expect, with faults in the middle of calls, and runs the hazards,
// which show what becomes of the data. For a dlock.Backend, dlock/dlocktest is stricter.
//
// The kit knows that a lease has expired when another client is granted the lock. A lock counts as held only while the holder's own
// lease says so. So that a stall of the machine or the servers breaks no promise, a call may take ten seconds longer than its context
// allows, and a dead holder may block a lock for four times the TTL plus twenty seconds, or for twenty times as long as a new client
// then needs for a free lock.
//
// Not tested: failovers, clocks that jump during a lease, clients whose clocks differ, servers that restart with their data, waits
// of minutes. Of locks that hash the key alone to 32 bits, it detects those that use CRC-32, FNV, Postgres's hashtext or the first
// 32 bits of MD5; of locks that hash it to 16 bits, half. If leases have no Until, one that ends less than 240 ms
// early isn't detected. A token that isn't minted with its grant is detected only when replies are late.
// "Breaks" is proved by what happened; "keeps" only means that no run broke it.
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

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/scenarios"
)

// Kit is a lock to check, and how to check it.
type Kit struct {
	// Service is the lock: its name, Nodes, NoTokens and NoRenew. With Fault, the kit also restarts the servers without their data,
	// sets their clocks, and has them deny writes: no other test may use them meanwhile. It does wipe, jump, deny and allow of
	// [scenarios.LockService], and wipe of each node. With Forget, it also deletes locks that are held.
	Service *scenarios.Service
	// Open opens a client of the lock. If its leases' Until is zero, only their Context counts. The hazards use the function that
	// was given to [scenarios.Child].
	Open scenarios.Open
	// Store is what the hazards' workers write to, as Runner.Store.
	Store *scenarios.Store
	// TTL is a short lease of several round trips. Default: one second. Set it to the lock's shortest lease, or to twice its
	// lock-delay if that is longer.
	TTL time.Duration
	// Fixed says that the TTL can't be changed, or can't be sixty times TTL.
	Fixed bool
	// Only names the promises and hazards to check. None: all.
	Only []string
	// Strict fails the test if a promise is broken, if data is lost although its token was checked on reads and writes, or if a
	// check is inconclusive, but not for Excluded rows or if no hazard can run (Report.NoHazards). By default everything is only
	// reported.
	Strict bool
	// Module is the lock's Go module. Reports give its version.
	Module string

	link func(scenarios.Node) (*faults.Link, string, error) // scenarios.Node.Link
	now  func() time.Time                                   // time.Now
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
	if k.link == nil {
		k.link = scenarios.Node.Link
	}
	if k.now == nil {
		k.now = time.Now
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
		return !s.On(k.Service.Lock) || s.Faulty() || omit(s.Name) // another lock's, or with server faults
	})
	for _, name := range k.Only {
		if !slices.Contains(names, name) {
			return nil, fmt.Errorf("promises: Kit.Only: there is no promise or hazard %q of this lock; there are %s", name, strings.Join(names, ", "))
		}
	}
	noHazards, err := k.works(ctx)
	if ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, fmt.Errorf("promises: %s: %w", k.Service.Lock, err)
	}
	report := &Report{
		Lock: k.Service.Lock, Module: k.Module, Server: k.Service.Server, NoTokens: k.Service.NoTokens, TTL: k.TTL.String(),
		Time: time.Now().UTC().Truncate(time.Second), Rows: make([]Row, len(chosen)),
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

// works checks the adapter, and returns why hazards can't run, if so.
func (k Kit) works(ctx context.Context) (noHazards string, err error) {
	asked := time.Now()
	row := k.check(ctx, promise{check: func(c *check) { //nolint:contextcheck // it is the check's
		cl := c.lasting()
		first := newKey() // connecting may take long
		l, err := c.within(6*patience, acquiring(cl, first)).granted()
		if err != nil {
			c.cannot("Acquire of a free lock: %v", err)
		}
		c.free(l)
		over := false
		l, err = c.within(patience, func(ctx context.Context) (scenarios.Lease, error) {
			l, err := cl.TryAcquire(ctx, newKey())
			over = err == nil && l != nil && l.Context() != nil && l.Context().Err() != nil
			return l, err
		}).granted()
		switch {
		case err != nil:
			c.cannot("TryAcquire of a free lock: %v", err)
		case l.Context() == nil:
			c.cannot("Lease.Context is nil: it ends when the lease must be presumed lost")
		case over:
			c.cannot("Lease.Context had ended at its grant: it ends when the lease must be presumed lost")
		case l.TTL() <= 0:
			c.cannot("Lease.TTL is %v: it is how long the lease lasts unless it is renewed", l.TTL())
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
		c.free(l)
	}})
	if row.Verdict != Kept {
		err = errors.New(row.Why)
		if fixed := k; !k.Fixed && time.Since(asked) < patience { // the long TTL may have been refused
			fixed.Fixed = true
			if _, failed := fixed.works(ctx); failed == nil {
				err = fmt.Errorf("with a TTL of %v: %w; with %v it works: if the lock's TTL can't be changed that far, set Kit.Fixed", long*k.TTL, err, k.TTL)
			}
		}
		return "", err
	}
	return noHazards, nil
}

func (k Kit) check(ctx context.Context, p promise) (row Row) {
	row = Row{Promise: p.name, Text: p.text, Verdict: Kept}
	if why := k.excludes(p.name); why != "" {
		row.Verdict, row.Why, row.Excluded = Unchecked, why, true
		return row
	}
	c := &check{k: k, ctx: ctx, probing: make(chan struct{}, 1)}
	done := make(chan struct{})
	c.ticked.Store(time.Now().UnixNano())
	go c.watch(done)
	c.together(func() { p.check(c) })
	close(done)
	c.end()
	c.mu.Lock() // an abandoned call may still run
	defer c.mu.Unlock()
	switch {
	case len(c.broken) > 0:
		row.Verdict, row.Why = Broken, strings.Join(c.broken[:min(len(c.broken), shown)], "; ")
		if more := len(c.broken) - shown; more > 0 {
			row.Why += fmt.Sprintf("; and %d more", more)
		}
	case c.why != "":
		row.Verdict, row.Why, row.Excluded = Unchecked, c.why, c.excluded
	default:
		row.Why = c.fact
	}
	return row
}
