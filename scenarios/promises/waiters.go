package promises

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/scenarios"
)

func waiterServed(c *check) { c.together(c.longHolds, c.shortHolds) }

// longHolds: a waiter whose pauses between polls grow without a limit may be served as late as it has waited. When it polls isn't
// known, so the locks are released at different times.
func (c *check) longHolds() {
	if c.k.Fixed {
		return
	}
	limit := c.limit()
	most := min(limit, 3*patience/2)
	c.each(3, func(i int) {
		key, hold := newKey(), most+most>>i
		l := c.take(c.lasting(), key)
		w := c.wait(c.client(), key)
		defer w.stop()
		select {
		case <-time.After(hold):
		case <-c.ctx.Done():
		}
		_ = c.renewByHand(l) // it may wake the waiter in vain
		time.Sleep(5 * pause)
		c.release(l)
		w.must(limit-patience, "a waiter for a lock that was held for %v hadn't got it %v after its release", hold, limit) // it allows patience more
	})
}

func (c *check) shortHolds() {
	c.ownWaiters()
	c.polls()
	c.together(
		func() { c.failedBefore("been cut off", (*faults.Link).Cut) }, func() { c.failedBefore("been refused", (*faults.Link).Refuse) },
		c.releasedBetween, c.oddKey,
	)
	c.together(func() { c.longWaiter("had been cut off", (*faults.Link).Cut) }, func() { c.longWaiter("had waited", nil) })
	c.released("")
	if !c.k.Service.NoRenew && !c.k.Fixed && !c.isDecided() { // a lock-delay may be half of a fixed lease
		c.released(afterRenewals)
		c.released(underWay)
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	const waited, gone = "waited", "was cut off for good"
	for what, fault := range map[string]linkFault{
		waited: nil, "was cut off": (*faults.Link).Cut, "got no replies": (*faults.Link).LoseReplies, "was refused": (*faults.Link).Refuse,
		gone: (*faults.Link).Cut,
	} {
		a, b, next, other, key := c.lasting(), c.client(), c.client(), c.client(), newKey()
		quick := c.client()
		if what == waited { // it wakes first: the others must wait for its release, not for the end of its lease
			quick, b, next = c.lasting(), c.slow(pause/4, b), c.slow(pause/4, next)
		}
		c.connect(b, next, quick)
		l, theirs, elsewhere := c.take(a, key), newKey(), 0
		if what == waited {
			c.take(quick, theirs)
			elsewhere = 8 // they must not be woken in the others' place
		}
		wg.Go(func() {
			for range elsewhere {
				defer c.wait(b, theirs).stop()
			}
			leaves := c.wait(b, key)
			time.Sleep(pause)
			first := c.wait(b, key)
			time.Sleep(pause)
			same, wakes := first, first
			if what == waited {
				same, wakes = c.wait(b, key), c.wait(quick, key)
			}
			second := c.wait(next, key)
			for range 5 { // they wait by the time that other has done this
				l, _ := c.try(other, newKey())
				c.free(l)
				time.Sleep(5 * pause)
			}
			wg.Go(leaves.leave)
			time.Sleep(pause)
			heal, err := c.injected(b, fault)
			if err != nil {
				c.unsure("%v", err)
			}
			if time.Sleep(5 * pause); len(first.done) > 0 && lasts(l, time.Now()) {
				c.breaks("a waiter who %s was granted a lock that another client held", what)
			}
			released := c.do(l.Release)
			time.Sleep(c.k.TTL / 2)
			served := func(who string, waiter wait) {
				err := waiter.pass(c.limit())
				switch {
				case err == nil:
				case released != nil && !errors.Is(released, dlock.ErrLost):
					c.unsure("Release by the holder: %v", released)
				default:
					c.blocked(key, "%s%s while the lock was released hadn't got it after %v: %v", who, what, c.limit(), err)
				}
			}
			behind := func() { served("a waiter behind one who ", second) }
			if what == gone {
				behind()
				heal()
			} else {
				heal()
				wg.Go(behind)
			}
			if what == waited { // whichever is served first must leave the other's subscription alone
				wg.Go(func() { served("one of two waiters of a client that ", same) })
				wg.Go(func() { _ = wakes.pass(c.limitOf(quick)) })
			}
			served("a waiter who ", first)
		})
	}
}

// waiting has n waiters wait for a held key; the i-th is cancelled when leave(i) returns. It is unsure if none waited until then, or for
// a quarter of a TTL.
func (c *check) waiting(cl *client, key string, held scenarios.Lease, n int, leave func(i int)) {
	var wg sync.WaitGroup
	var stood atomic.Int32
	defer func() {
		if stood.Load() == 0 {
			c.unsure("none of %d waiters waited until it was cancelled", n)
		}
	}()
	for i := range n {
		wg.Go(func() {
			ctx, cancel := context.WithCancel(c.ctx)
			defer cancel()
			go func() {
				leave(i)
				cancel()
			}()
			done, began := make(chan struct{}), time.Now()
			go func() {
				defer close(done)
				l, err := c.guarded(func() (scenarios.Lease, error) { return cl.Acquire(ctx, key) })
				if err != nil || l == nil {
					return
				}
				if lasts(held, time.Now()) {
					c.breaks("a waiter was granted a lock that another client held")
				}
				c.free(l)
			}()
			select {
			case <-done:
				if time.Since(began) > c.k.TTL/4 {
					stood.Add(1)
				}
				return
			case <-ctx.Done():
				stood.Add(1)
			}
			if !c.call(patience, func() (scenarios.Lease, error) { <-done; return nil, nil }).returned {
				c.breaks("a waiter hadn't returned %v after its context had ended", patience)
			}
		})
	}
	wg.Wait()
}

func waiterCancelled(c *check) {
	a, b, key := c.lasting(), c.client(), newKey()
	l := c.take(a, key)
	const waiters = 40
	c.waiting(b, key, l, waiters, func(i int) { time.Sleep(time.Duration(i) * 5 * time.Millisecond) })
	if c.freeAfter(l, b, key, waiters, "were cancelled"); !c.isDecided() {
		c.othersCall()
		c.cancelledAtGrant()
	}
}

func (c *check) freeAfter(l scenarios.Lease, cl *client, key string, waiters int, how string) {
	if c.isDecided() {
		return
	}
	c.release(l)
	c.comesFree(c.client(), key, fmt.Sprintf("%d waiters %s", waiters, how))
	c.comesFree(cl, key, fmt.Sprintf("%d of its waiters %s", waiters, how))
}

func (c *check) cancelledAtGrant() {
	a, b, other, key := c.lasting(), c.client(), c.client(), newKey()
	c.connect(b)
	l := c.take(a, key)
	heal := c.inject(b, delaying(10*pause))
	ctx, cancel := context.WithCancel(c.ctx)
	defer cancel()
	done := make(chan result, 1)
	go func() {
		done <- c.call(2*c.limit(), func() (scenarios.Lease, error) { return b.Acquire(ctx, key) })
	}()
	time.Sleep(20 * pause)
	c.release(l)
	for end := time.Now().Add(c.limit()); time.Now().Before(end); time.Sleep(4 * pause) {
		got, err := c.try(other, key)
		if err != nil {
			break
		}
		c.free(got)
	}
	cancel()
	r := <-done
	heal()
	c.drop(r)
	c.comesFree(other, key, "a waiter was cancelled as it was granted the lock,")
}

func (c *check) othersCall() {
	for _, fault := range []linkFault{nil, (*faults.Link).LoseReplies} {
		c.often(func() (sure bool) {
			a, b, other, mine, theirs := c.lasting(), c.lasting(), c.client(), newKey(), newKey()
			l, held := c.take(a, mine), c.take(b, theirs)
			heal := c.inject(a, fault)
			r := c.within(5*pause+pause/3, acquiring(a, theirs)) // between two polls
			heal()
			if !r.returned && fault == nil {
				c.breaks("an acquisition of a held lock hadn't returned %v after its deadline", patience)
			}
			if !r.returned || fault != nil && c.endsWithConnection(l) {
				return true
			}
			defer c.free(l, held)
			return c.stays(l, other, mine, "a cancelled wait of its holder for another lock")
		})
	}
}

func waitersCutOff(c *check) {
	c.failWaiters("were cut off", 0, func(b *client) (heal func()) { return c.inject(b, (*faults.Link).Cut) })
	c.failWaiters("met refused connections", c.k.TTL/2, func(b *client) (heal func()) { return c.inject(b, (*faults.Link).Refuse) })
}

// failWaiters ends waits some time after a fault. Each that has failed by then may have left what gets the lock for a lease.
func (c *check) failWaiters(how string, after time.Duration, fail func(b *client) (heal func())) {
	a, b, key := c.lasting(), c.client(), newKey()
	c.connect(b)
	l := c.take(a, key)
	const waiters = 100
	cut, leave := context.WithCancel(c.ctx)
	left := make(chan struct{})
	defer func() {
		leave()
		<-left
	}()
	go func() {
		defer close(left)
		c.waiting(b, key, l, waiters, func(int) { <-cut.Done() }) //nolint:contextcheck // it has the check's
	}()
	time.Sleep(c.k.TTL / 2)
	heal := fail(b)
	time.Sleep(after)
	leave()
	<-left
	heal()
	c.freeAfter(l, b, key, waiters, how)
}

func (c *check) ownWaiters() {
	const n, others = 6, 24
	b, key, theirs := c.times(10), newKey(), newKey()
	l := c.take(b, key)
	c.take(c.lasting(), theirs)
	for range others / 2 {
		defer c.wait(b, theirs).stop()
	}
	var waits []wait
	for range n {
		w := c.wait(b, key)
		defer w.stop()
		waits = append(waits, w)
	}
	time.Sleep(pause) // so that they aren't the last
	for range others / 2 {
		defer c.wait(b, theirs).stop()
	}
	time.Sleep(10 * pause)
	c.comesFree(b, newKey(), fmt.Sprintf("%d of its callers waited for other locks", n+others))
	c.free(l)
	var wg sync.WaitGroup
	var served atomic.Int32
	var failed atomic.Value
	for _, w := range waits {
		wg.Go(func() {
			if err := w.pass(c.limitOf(b)); err != nil {
				failed.Store(err.Error())
			} else {
				served.Add(1)
			}
		})
	}
	wg.Wait()
	if served.Load() == 0 {
		c.blocked(key, "none of %d waiters of a client got the lock that it had released after %v: %v", n, c.limit(), failed.Load())
	}
}

func (c *check) failedBefore(how string, fault linkFault) {
	a, b, key := c.lasting(), c.client(), newKey()
	l := c.take(a, key)
	c.within(5*pause, acquiring(b, key)) // connects, and waits
	c.during(b, fault, acquiring(b, key))
	c.connect(b)
	w := c.wait(b, key)
	time.Sleep(10 * pause)
	c.release(l)
	w.must(c.limit(), "a waiter whose client had %s during an earlier wait hadn't got the lock %v after its release", how, c.limit())
}

// releasedBetween: a client that begins to wait may miss the notification.
func (c *check) releasedBetween() {
	const messages, delay = 6, 5 * pause
	a := c.lasting()
	c.each(messages, func(i int) {
		b, key := c.client(), newKey()
		l := c.take(a, key)
		c.connect(b)
		heal := c.inject(b, delaying(delay))
		w := c.wait(b, key)
		defer w.stop()
		began := delay/2 + time.Duration(i)*delay
		time.Sleep(began) // it waits for one reply, and has another message to send
		c.release(l)
		heal()
		w.must(c.limit(), "a client that began to wait for a lock %v before its release hadn't got it after %v", began, c.limit())
	})
}

// odd returns a long key with odd characters, unless the lock has no such keys.
func (c *check) odd(cl *client) string {
	key := newKey() + strings.Repeat("/ é%2F@{x}[*]", 3)
	l, err := c.try(cl, key)
	if c.free(l); err != nil {
		return newKey()
	}
	return key
}

// oddKey: a waiter may expect its notification under another name.
func (c *check) oddKey() {
	a, b := c.lasting(), c.client()
	key := c.odd(a)
	l := c.take(a, key)
	c.connect(b)
	w := c.wait(b, key)
	time.Sleep(10 * pause)
	c.release(l)
	w.must(c.limit(), "a waiter for %q hadn't got the lock %v after its release", key, c.limit())
}

func (c *check) polls() {
	const most = 200
	a, b, key := c.lasting(), c.client(), newKey()
	c.connect(b)
	l := c.take(a, key)
	waiter := c.wait(b, key)
	defer waiter.stop()
	time.Sleep(10 * pause)
	heal := c.inject(b, losses["requests"].from(most))
	time.Sleep(time.Second)
	if b.loses() {
		c.notes("a waiter sent at least %d messages in a second", most)
	}
	waiter.stop()
	heal()
	c.free(l)
}

// longWaiter has a waiter wait, perhaps cut off, for longer than its session lasts, if it has one.
func (c *check) longWaiter(what string, fault linkFault) {
	over, ttls := counter{c: c, last: time.Now()}, time.Duration(5)
	if c.k.Fixed { // the TTL may be long
		ttls = 3
	}
	c.often(func() bool {
		a, b, other, key := c.lasting(), c.client(), c.client(), newKey()
		c.connect(b)
		l := c.take(a, key)
		waiter := c.wait(b, key)
		defer waiter.stop()
		time.Sleep(5 * pause)
		behind := c.wait(c.client(), key)
		defer behind.stop()
		heal := c.inject(b, fault)
		time.Sleep(ttls * max(c.k.TTL, c.k.Service.MinSession))
		heal()
		early := len(behind.done) > 0
		go func() { c.drop(<-behind.done) }()
		if !lasts(l, time.Now()) { // a fixed lease that isn't renewed: others have had the lock since
			return true
		}
		if early {
			c.breaks("a waiter behind one who %s for %d TTLs was granted a lock that another client held", what, ttls)
		}
		go c.release(l) // it may take longer than the waiter's lease
		got, err := waiter.served(c.limit())
		if err != nil {
			c.blocked(key, "a waiter who %s for %d TTLs hadn't got the lock %v after its release: %v", what, ttls, c.limit(), err)
			return true
		}
		if why := waiter.failed.Load(); why != nil && fault == nil {
			c.notes("an acquisition of a held lock returned before its context ended: %v", why)
		}
		ended := !lasts(got, time.Now())
		sure := c.still(got, other, key, fmt.Sprintf("a waiter who %s for %d TTLs was served", what, ttls))
		c.free(got)
		if ended && fault == nil { // one that was cut off may be told late
			fresh := c.take(other, newKey())
			over.see(lasts(fresh, time.Now()),
				"3 times the lease of a waiter who %s for %d TTLs was over when it got it; that of a client that hadn't waited lasted", what, ttls)
		}
		return sure
	})
}

const underWay = " while a renewal was under way"

func (c *check) released(circumstance string) {
	const again = "held again by nobody"
	how, began := "", time.Now()
	for range 3 {
		a, b, key := c.times(3), c.client(), newKey()
		renewed := circumstance != ""
		c.connect(b)
		start := time.Now()
		l := c.take(a, key)
		heal := func() {}
		switch circumstance {
		case "":
			_, _ = c.try(b, key) // the client may remember that it was held
		case afterRenewals:
			time.Sleep(l.TTL() + c.k.TTL)
		case underWay:
			heal = c.inject(a, holdReplies)
			time.Sleep(l.TTL() * 2 / 3)
			time.AfterFunc(5*pause, heal) // the release has been sent
			if l.Context().Err() != nil {
				return
			}
		}
		if renewed {
			start = time.Now().Add(-l.TTL() / 4)
		}
		if err := c.do(l.Release); err != nil && (!renewed || !errors.Is(err, dlock.ErrLost)) {
			return
		}
		heal()
		how = "held for the rest of its lease"
		var held time.Time // since when tries have been refused
		for {
			end := start.Add(l.TTL() * 3 / 4)
			if how == again && !held.IsZero() { // a lock-delay after the granted try is shorter
				end = held.Add(l.TTL() / 4)
			}
			if time.Now().After(end) {
				break
			}
			got, err := c.try(b, key)
			if err == nil {
				held, how, err = time.Time{}, again, c.do(got.Release)
			} else if held.IsZero() {
				held = time.Now()
			}
			if held.IsZero() && !renewed || err != nil && !errors.Is(err, dlock.ErrHeld) {
				return
			}
			time.Sleep(pause + pause/3) // out of step with renewals
		}
		if held.IsZero() { // or the servers were too slow for a try
			return
		}
		unused, err := c.try(b, newKey())
		if err != nil { // it gets no lock in time
			return
		}
		c.free(unused)
	}
	c.suspects(began, "three times a lock that had been released%s was %s", circumstance, how)
}
