package promises

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/scenarios"
)

func leaseLasts(c *check) {
	var wg sync.WaitGroup
	var checked atomic.Int32
	defer wg.Wait()
	for _, slow := range []time.Duration{0, c.k.TTL / 25, c.k.TTL / 3, c.k.TTL + c.k.TTL/2} { // it may allow each of its servers little time
		a, b := c.client(), c.client()
		if slow > 0 {
			c.connect(a)
		}
		c.slow(slow, a)
		wg.Go(func() {
			if c.outlast(a, b, slow, 0, "") {
				checked.Add(1)
			}
		})
	}
	for _, slow := range []time.Duration{0, c.k.TTL / 3} {
		a, b, holder := c.slow(slow, c.client()), c.client(), c.lasting()
		wg.Go(func() {
			c.outlast(&client{Lock: waiter{a.Lock, c, holder, false}, links: a.links}, b, slow, 0, " that was waited for")
		})
	}
	if own, b := c.client(), c.client(); !c.k.Service.Reentrant { // a release may hand its lease over
		wg.Go(func() {
			c.outlast(&client{Lock: waiter{own.Lock, c, own, false}, links: own.links}, b, 0, 0, " that was waited for by its holder's client")
		})
	}
	heir, next, dead := c.client(), c.client(), c.client()
	wg.Go(func() {
		c.outlast(&client{Lock: waiter{heir.Lock, c, dead, true}, links: heir.links}, next, 0, 0, " of one who had waited for a dead holder's")
	})
	a, b := c.client(), c.client()
	wg.Go(func() { c.allTold(a, b) })
	wg.Go(func() {
		c.together(c.outlivesReleased, func() { c.longLease("acquired", func(scenarios.Lease) {}) }, func() {
			c.longLease("renewed by hand", func(l scenarios.Lease) { _ = c.renewByHand(l) })
		})
	})
	if c.k.Service.Reentrant {
		wg.Go(func() { c.together(c.nested) })
	}
	wg.Wait()
	if checked.Load() == 0 {
		c.cannot("TryAcquire of a free lock granted no lease that lasted")
	}
}

// longLease: the servers may allow no lease that is so long, or the lock may go by a default.
func (c *check) longLease(how string, renew func(l scenarios.Lease)) {
	if c.k.Fixed {
		return
	}
	const ttls = 15
	a, b, key := c.times(ttls), c.client(), newKey()
	l := c.take(a, key)
	renew(l)
	c.inject(a, (*faults.Link).Cut)
	end := time.Now().Add(ttls * c.k.TTL)
	if how == renewedItself && l.Until().IsZero() { // it may end half a lease after the cut, and be told late, see LeaseLasts
		end = time.Now().Add(ttls * c.k.TTL * 2 / 5)
	}
	for ; time.Now().Before(end) && !c.isDecided(); time.Sleep(5 * pause) {
		c.still(l, b, key, fmt.Sprintf("a lease of %v had been %s, and its holder was cut off,", l.TTL(), how))
	}
}

func (c *check) outlivesReleased() {
	c.thrice(func() string {
		a, other, key := c.client(), c.client(), newKey()
		c.free(c.take(a, key))
		time.Sleep(c.k.TTL / 2)
		same := c.take(other, newKey()) // the control
		l := c.take(a, key)
		time.Sleep(c.k.TTL * 5 / 8)
		sure := c.still(l, other, key, "the time of an earlier one, which had been released, was up")
		ended := l.Context().Err() != nil && lasts(same, time.Now())
		c.free(l, same)
		return when(ended && !sure,
			"3 times a lease ended when the time of an earlier one, which had been released, was up; that of another client lasted")
	})
}

// nested checks that a client that has got a lock twice has it until it has released it twice, and no longer.
func (c *check) nested() {
	ended := counter{c: c, last: time.Now()}
	twice := func(a *client, key string) (outer, inner scenarios.Lease) {
		outer = c.take(a, key)
		inner, err := c.try(a, key)
		if err != nil {
			c.cannot("Service.Reentrant: the client that held a lock didn't get it again: %v", err)
		}
		return outer, inner
	}
	c.often(func() (sure bool) {
		a, b, key := c.times(3), c.times(3), newKey()
		same := c.take(b, newKey()) // first, so that it isn't the last to end
		l, inner := twice(a, key)
		if c.do(inner.Release) != nil { // a second try may count, too
			c.free(l, same)
			return false
		}
		if !c.k.Service.NoRenew {
			time.Sleep(l.TTL() + c.k.TTL)
		}
		sure = c.stays(l, b, key, "the release of its holder's second grant")
		ended.see(endsAlone(l, same), "3 times a lease ended after the release of its holder's second grant; that of another client lasted")
		c.free(l, same)
		return sure
	})
	a, key := c.lasting(), newKey()
	l, inner := twice(a, key)
	c.release(inner)
	c.release(l)
	c.comesFree(c.client(), key, "both grants of a client, and their releases,")
}

// allTold checks that each lease of a client that is cut off ends.
func (c *check) allTold(a, b *client) {
	for range 2 { // it may be told once
		c.allToldOnce(a, b)
	}
}

func (c *check) allToldOnce(a, b *client) {
	keys := []string{newKey(), newKey(), newKey()}
	var leases []scenarios.Lease
	for _, key := range keys {
		l, err := c.acquire(a, key)
		if err != nil {
			return
		}
		leases = append(leases, l)
	}
	heal, err := c.injected(a, (*faults.Link).Cut)
	defer heal()
	if err != nil {
		return
	}
	for i, key := range keys {
		next, err := c.acquire(b, key)
		if err != nil {
			return
		}
		if lasts(leases[i], time.Now()) {
			c.breaks("number %d of three leases of a client that was cut off lasted after its successor's grant", i+1)
		}
		c.free(next)
	}
}

// waiter is a lock whose TryAcquire waits for most of a lease, until holder releases the lock, or for the lease of one who dies.
type waiter struct {
	scenarios.Lock
	c      *check
	holder *client
	dies   bool
}

func (w waiter) TryAcquire(ctx context.Context, key string) (scenarios.Lease, error) {
	l, err := w.c.try(w.holder, key) //nolint:contextcheck // it is the check's
	if err != nil {
		return nil, err
	}
	if !w.dies {
		released := make(chan struct{})
		defer func() { <-released }() // before its client is cut off
		time.AfterFunc(w.c.k.TTL*3/4, func() {
			defer close(released)
			w.c.release(l)
		})
	} else {
		first := w.c.wait(w.holder, key) //nolint:contextcheck // as above; it dies with its client
		defer first.stop()
		time.Sleep(5 * pause)
		if _, err := w.c.injected(w.holder, (*faults.Link).Cut); err != nil {
			return nil, err
		}
	}
	return w.Acquire(ctx, key)
}

const afterRenewals, renewedItself = " after renewals", "renewed"

func leaseRenewed(c *check) {
	var renewed [2]bool
	c.each(2, func(i int) {
		call, of := acquiring, ""
		if i == 1 {
			call, of = trying, " that TryAcquire had granted"
		}
		renewed[i] = c.renews(6*c.k.TTL, call, of)
	})
	if !renewed[0] || !renewed[1] { // first: a lock that renews nothing gets this verdict alone
		return
	}
	began, a, key := time.Now(), c.times(3), newKey()
	first := c.take(a, key)
	var wg sync.WaitGroup
	defer wg.Wait()
	for kind, loss := range losses {
		for what, n := range map[string]int{"one of its renewals": 1, "four of its renewals, not in a row,": 4} {
			wg.Go(func() {
				c.thrice(func() string {
					return when(c.endsByLoss(loss, n),
						"three times a lease ended after %s had lost its %s; one whose client had had to connect again as often went on", what, kind)
				})
			})
		}
	}
	wg.Go(func() {
		c.together(
			func() { c.many(16, 3, true) }, func() { c.many(200, 6, false) }, func() { c.waitedFor(c.times(3)) },
			func() { c.longLease(renewedItself, c.renewedOnce) },
		)
	})
	if c.restarts(); c.isDecided() {
		return
	}
	extends := func(slow time.Duration) {
		c.often(func() bool {
			a := c.times(3)
			c.connect(a)
			return c.outlast(c.slow(slow, a), c.client(), slow, 4*c.k.TTL, afterRenewals)
		})
	}
	c.together(c.sameClient, func() { extends(0) }, func() { extends(c.k.TTL / 3) }, func() {
		c.oddRenewals(func(l scenarios.Lock) scenarios.Lock { return l })
	})
	if !c.isDecided() {
		select { // if renewals add up, the lease outlasts what a dead holder is allowed
		case <-time.After(time.Until(began.Add(c.limit() + patience))):
		case <-c.ctx.Done():
		}
	}
	if first.Context().Err() != nil && !c.isDecided() {
		c.renews(time.Since(began), acquiring, "")
	}
	c.inject(a, (*faults.Link).Cut)
	c.comesFree(c.times(12), key, fmt.Sprintf("its lease had been renewed for %v, and its holder was cut off,", time.Since(began).Round(time.Second)))
}

func (c *check) oddRenewals(renewed func(scenarios.Lock) scenarios.Lock) {
	if c.k.Fixed {
		return
	}
	c.often(func() bool {
		a, err := c.open(2*c.k.TTL - time.Millisecond/2)
		if err != nil {
			return true // refused
		}
		l, err := c.try(a, newKey())
		if err != nil {
			return true // refused; OddTTLs checks whether it blocks others
		}
		c.free(l)
		return c.outlast(&client{Lock: renewed(a.Lock), links: a.links}, c.client(), 0, 3*c.k.TTL, " after renewals, of an odd TTL")
	})
}

func (c *check) waitedFor(a *client) {
	b := c.client()
	c.often(func() (sure bool) {
		key := newKey()
		l, err := c.try(a, key)
		if err != nil {
			return false
		}
		w := c.wait(b, key)
		select {
		case r := <-w.done:
			now := time.Now()
			if got, err := r.granted(); err == nil {
				if sure = lasts(l, now); sure {
					c.breaks("a waiter was granted a lock whose holder was renewing its lease")
				}
				c.free(got)
			}
			c.free(l)
		case <-time.After(2*l.TTL() + c.k.TTL):
			sure = l.Context().Err() == nil
			c.free(l)
			_ = w.pass(c.limit()) // WaiterServed reports errors
		}
		w.stop()
		return sure
	})
}

type renewer interface {
	Renew(ctx context.Context) error
}

func (c *check) renewByHand(l scenarios.Lease) error {
	if r, ok := l.(renewer); ok {
		return c.do(r.Renew)
	}
	return errors.ErrUnsupported
}

// byHand is a lock whose leases the kit renews until a renewal fails.
type byHand struct {
	scenarios.Lock
	c *check
}

func (l byHand) TryAcquire(ctx context.Context, key string) (scenarios.Lease, error) {
	lease, err := l.Lock.TryAcquire(ctx, key)
	if err != nil {
		return nil, err
	}
	if r, ok := lease.(renewer); ok {
		go func() {
			for err := error(nil); err == nil; {
				if time.Sleep(lease.TTL() / 5); lease.Context().Err() != nil {
					return
				}
				err = l.c.do(r.Renew)
			}
		}()
	}
	return lease, nil
}

func renewedByHand(c *check) {
	c.thrice(func() string {
		says := c.renewsAgain(c.take(c.times(3), newKey()))
		return when(says != "", "three times a holder renewed its lease every half TTL, and %s", says)
	})
	c.thrice(func() string { // it has waited for a key that it has had, and renews often
		a, b := c.times(3), c.lasting()
		key := c.odd(a)
		c.free(c.take(a, key))
		held := c.take(b, key)
		time.AfterFunc(5*pause, func() { c.free(held) })
		l := c.take(a, key)
		for range 12 {
			_ = c.renewByHand(l)
		}
		says := c.renewsAgain(l)
		return when(says != "", "three times a holder that had waited for %.80q renewed its lease 12 times and then every half TTL, and %s", key, says)
	})
	hold := 4 * c.k.TTL
	if c.k.Fixed { // the TTL may be long
		hold = 2 * c.k.TTL
	}
	extends := func(slow time.Duration) bool {
		a := c.times(3)
		c.connect(a)
		c.slow(slow, a)
		return c.outlast(&client{Lock: byHand{a.Lock, c}, links: a.links}, c.client(), slow, hold, afterRenewals)
	}
	succeeds := func(l scenarios.Lease, when string) {
		if c.do(l.(renewer).Renew) == nil {
			c.breaks("the renewal of a lease %s returned no error", when)
		}
	}
	parts := []func(){
		func() { c.often(func() bool { return extends(0) }) },
		func() {
			if !c.k.Fixed {
				extends(c.k.TTL / 3) // its requests may have a shorter time limit
			}
		},
		func() {
			c.outlasts("a renewal by its holder that got no reply", func(_ *client, l scenarios.Lease) call { return without(l.(renewer).Renew) })
		},
		func() {
			a := c.lasting()
			l := c.take(a, newKey())
			if r := c.during(a, (*faults.Link).LoseReplies, without(l.(renewer).Renew)); r.returned && r.err == nil {
				c.breaks("a renewal that got no reply returned no error")
			}
			c.free(l)
		},
		func() {
			c.outlasts("a renewal by its holder whose context had ended before", func(_ *client, l scenarios.Lease) call {
				return func(ctx context.Context) (scenarios.Lease, error) {
					ended, end := context.WithCancel(ctx)
					end()
					return nil, l.(renewer).Renew(ended)
				}
			})
		},
		func() { c.waitedFor(&client{Lock: byHand{c.times(3).Lock, c}}) }, c.addUp,
		func() { c.oddRenewals(func(l scenarios.Lock) scenarios.Lock { return byHand{l, c} }) },
	}
	for what, fault := range map[string]linkFault{
		"renewal of a lease that had run out": (*faults.Link).Cut, "renewal that arrived late": (*faults.Link).HoldRequests, lateReplies: holdReplies,
		refusedRenewal: (*faults.Link).Refuse,
	} {
		parts = append(parts, func() {
			c.often(func() (sure bool) {
				a, b, other, key := c.client(), c.lasting(), c.client(), newKey()
				old := c.take(a, key)
				heal := c.inject(a, fault)
				if what == refusedRenewal { // so that a refused renewal that still counts makes a difference
					time.Sleep(old.TTL() / 2)
				}
				late := c.begin(patience, without(old.(renewer).Renew))
				later, err := c.acquire(b, key)
				if now := time.Now(); err == nil && !old.Until().IsZero() && lasts(old, now) {
					c.breaks("another client was granted the lock %v before the end of its holder's lease, whose renewal hadn't succeeded", old.Until().Sub(now))
				}
				heal()
				<-late
				if err != nil {
					c.blocked(key, "the lease of a holder who was cut off hadn't ended after %v: %v", c.limit(), err)
					return true
				}
				if now := time.Now(); lasts(later, now) {
					succeeds(old, "whose lock another client had")
				}
				if what == lateReplies && !c.k.Fixed { // it may have cut the successor's lease to its own TTL
					time.Sleep(old.TTL() * 5 / 4)
				}
				sure = c.stays(later, other, key, "a "+what)
				if err := c.do(later.Release); err == nil {
					succeeds(old, "whose lock another client had had since")
					c.comesFree(other, key, "a "+what+", and its successor's release,")
				}
				return sure
			})
		})
	}
	c.together(parts...)
	a, key := c.lasting(), newKey()
	l := c.take(a, key)
	if c.do(l.Release) == nil {
		succeeds(l, "that had been released")
		c.comesFree(c.client(), key, "the renewal of a lease that had been released")
		if !c.k.Service.Reentrant && !c.isDecided() { // one owner may stand for all grants of its client
			later := c.take(a, key)
			succeeds(l, "that had been released, and whose lock its client had got again,")
			c.free(later)
		}
	}
}

// renewsAgain returns what is wrong with a lease that is renewed again and again, or "". Slow servers excuse it.
func (c *check) renewsAgain(l scenarios.Lease) (says string) {
	defer c.free(l)
	r, ok := l.(renewer)
	if !ok {
		c.excluded = true
		c.cannot("the lease has no Renew (Grant.Renew)")
	}
	until := l.Until()
	for range 3 {
		time.Sleep(l.TTL() / 2)
		if !lasts(l, time.Now()) {
			return says
		}
		asked := time.Now()
		err := c.do(r.Renew)
		switch {
		case time.Since(asked) > l.TTL()/8:
			return ""
		case err != nil:
			return fmt.Sprintf("Renew returned %q", err)
		case l.TTL() > 2*time.Second && !until.IsZero() && !l.Until().After(until): // it may be in whole seconds
			return "Lease.Until was the same as before, without an error"
		}
		says, until = "the lease ended", l.Until()
	}
	return ""
}

const lateReplies, refusedRenewal = "renewal whose replies were late", "renewal that was refused"

func (c *check) addUp() {
	a, key := c.client(), newKey()
	l := c.take(a, key)
	n := int(3*(c.limit()+patience)/l.TTL()) + 10 // more than two clients in turn may wait for a dead holder
	renewals := 0
	for renewals < n && c.do(l.(renewer).Renew) == nil {
		renewals++
	}
	c.inject(a, (*faults.Link).Cut)
	c.comesFree(c.client(), key, fmt.Sprintf("%d renewals in a row, and the loss of its holder,", renewals))
}

// endsByLoss reports whether a lease ends because that many renewals lose a message, each after one that succeeded, and not because
// the connection breaks with it, as a session may: another, whose client has had to connect again as often, lasts.
func (c *check) endsByLoss(loss lossFault, losses int) bool {
	var clients []*client
	var leases []scenarios.Lease
	for range 2 {
		ttl := 9 * c.k.TTL
		if losses > 1 { // it takes long
			ttl = 6 * c.k.TTL
		}
		if c.k.Fixed {
			ttl = c.k.TTL
		}
		cl, err := c.open(ttl)
		if err != nil {
			return false
		}
		l, err := c.acquire(cl, newKey())
		if err != nil {
			return false
		}
		defer c.free(l)
		clients, leases = append(clients, cl), append(leases, l)
	}
	for n := 1; n <= losses && leases[1].Context().Err() == nil; n++ {
		for i, fault := range []linkFault{(*faults.Link).Refuse, loss.from(1)} {
			heal, err := c.injected(clients[i], fault)
			for end := time.Now().Add(leases[i].TTL()); i == 1 && !clients[i].loses() && time.Now().Before(end) && c.ctx.Err() == nil; {
				time.Sleep(pause)
			}
			lost := i == 0 || clients[i].loses()
			heal()
			if err != nil || !lost || !c.gets(clients[i]) { // it connects again
				return false
			}
		}
		if n < losses {
			c.renewedOnce(leases[1])
		}
	}
	c.ends(leases[1], leases[1].TTL()+c.k.TTL)
	return endsAlone(leases[1], leases[0])
}

// renewedOnce waits until a lease has been renewed or has ended.
func (c *check) renewedOnce(l scenarios.Lease) {
	until := l.Until()
	if until.IsZero() { // after that it can't last without a renewal
		c.ends(l, max(l.TTL(), c.k.Service.MinSession))
		return
	}
	for l.Context().Err() == nil && l.Until().Equal(until) && time.Now().Before(until) && c.ctx.Err() == nil {
		time.Sleep(pause)
	}
}

// renews checks that leases that a call grants are renewed for as long as hold.
func (c *check) renews(hold time.Duration, call func(*client, string) call, of string) bool {
	says, began := "hadn't been renewed; is Service.NoRenew missing?", time.Now()
	for range 3 { // a stall may end one
		l, err := c.within(c.limit(), call(c.times(3), newKey())).granted()
		if err != nil {
			c.cannot("a free lock isn't granted: %v", err)
		}
		end, start := l.Until(), time.Now()
		if !c.ends(l, max(hold, l.TTL()+c.k.TTL)) {
			c.free(l)
			return true
		}
		if lasted := time.Since(start); !l.Until().Equal(end) || end.IsZero() && lasted > l.TTL()+c.k.TTL/2 {
			says = fmt.Sprintf("were renewed no more, the last after %v", lasted.Round(10*time.Millisecond))
		}
	}
	asked := time.Now()
	if err := c.unused(); err != nil {
		c.cannot("a new client doesn't get a lock that nobody has touched: %v", err)
	}
	if took := time.Since(asked); took > 2*c.k.TTL { // then renewals are as slow
		c.cannot("three leases ended, and a new client needs %v for a lock that nobody has touched", took)
	}
	c.suspects(began, "three leases%s ended and %s", of, says)
	return false
}

func (c *check) sameClient() {
	freesOld := func(_ *client, _, _ string, old scenarios.Lease) {
		if !c.k.Service.Reentrant { // its releases count, whichever grant they are of
			c.free(old)
		}
	}
	leaves := func(*client, string, string, scenarios.Lease) {}
	calls := map[string]func(a *client, key, held string, old scenarios.Lease){
		"the release of an old lease of the same lock": freesOld,
		olderLock:                        func(_ *client, _, _ string, old scenarios.Lease) { c.free(old) },
		"a failed try of its own client": func(a *client, key, _ string, _ scenarios.Lease) { _, _ = c.try(a, key) },
		"its client's release of another lock, and a failed try": func(a *client, _, held string, _ scenarios.Lease) {
			c.connect(a)
			_, _ = c.try(a, held)
		},
		"64 callers of its own client began to wait": func(a *client, key, held string, old scenarios.Lease) { // more than a pool has connections
			for i := range 64 {
				time.AfterFunc(old.TTL()+c.k.TTL, c.wait(a, []string{key, held}[i%2]).stop)
			}
		},
	}
	if c.k.Service.Forget != nil {
		calls["somebody had deleted another lock of its client"] = func(a *client, _, _ string, old scenarios.Lease) {
			deleted := newKey()
			c.take(a, deleted)
			c.forget(deleted)
			time.Sleep(old.TTL()) // until a renewal sees that
		}
	}
	var parts []func()
	for what, call := range map[string]func(a *client, key, held string, old scenarios.Lease){
		afterLoss: freesOld, afterWait: leaves, afterDeath: leaves, afterRelease: leaves, afterTry: leaves,
	} {
		if what == afterRelease && c.k.Service.Reentrant { // its releases count, whichever grant they are of
			continue
		}
		parts = append(parts, func() { c.keepsOn(what, call) })
	}
	for what, call := range calls {
		parts = append(parts, func() { c.keepsOn(what, call) })
	}
	c.together(parts...)
}

func (c *check) restarts() {
	const moments = 10
	var ended [moments]atomic.Int32
	began := time.Now()
	for n := int32(1); n <= 3; n++ {
		c.each(moments, func(i int) {
			a, other := c.times(3), c.times(3)
			defer func() { c.shut(a); c.shut(other) }()
			first := c.take(a, newKey())
			time.Sleep(first.TTL() / 2)
			if c.do(first.Release) != nil {
				return
			}
			time.Sleep(time.Duration(i) * c.k.TTL / moments)
			l, same := c.take(a, newKey()), c.take(other, newKey())
			time.Sleep(l.TTL() + c.k.TTL)
			if endsAlone(l, same) { // a stall may end one
				ended[i].Add(1)
			}
			c.free(l, same)
		})
		again := false
		for i := range ended {
			if ended[i].Load() == 3 {
				c.suspects(began, "three times a lease ended that its client had acquired %v after it had released its only one; that of another client was renewed", time.Duration(i)*c.k.TTL/moments)
			}
			again = again || ended[i].Load() == n
		}
		if !again || c.isDecided() {
			return
		}
	}
}

func (c *check) many(leases int, ttls time.Duration, delayed bool) {
	const few = 16
	c.thrice(func() string {
		a, other, b := c.times(ttls), c.times(ttls), c.client()
		same := c.take(other, newKey())
		var mu sync.Mutex
		held := map[string]scenarios.Lease{}
		end := time.Now().Add(same.TTL() / 8) // the service may be slow, and as many renewals must follow
		c.each(few, func(i int) {
			for n := i; n < leases && (n == i || time.Now().Before(end)); n += few {
				key := newKey()
				l, err := c.within(c.k.TTL, acquiring(a, key)).granted()
				if err != nil { // it may have no connection left
					return
				}
				mu.Lock()
				held[key] = l
				mu.Unlock()
			}
		})
		if len(held) < leases/2 {
			return ""
		}
		slow, how := time.Duration(0), ""
		if delayed {
			slow = same.TTL() / 12
			how = fmt.Sprintf(" while replies took %v longer", slow)
			warm := c.inject(a, delaying(slow/4))
			time.Sleep(same.TTL()) // overlapping renewals open the connections that they need
			warm()
			c.slow(slow, a)
			c.slow(slow, other)
		}
		time.Sleep(same.TTL() + c.k.TTL)
		ended, looked := 0, 0
		for key, l := range held {
			if l.Context().Err() != nil {
				ended++
			} else if looked < few && !c.isDecided() { // its holder may be told late
				looked++
				c.still(l, b, key, fmt.Sprintf("renewals of %d leases of a client%s", len(held), how))
			}
		}
		sound := ended <= len(held)/4 || same.Context().Err() != nil // a stall may end some
		c.shut(a)
		c.shut(other)
		return when(!sound && !c.isDecided(), "3 times some of a client's leases ended, last time %d of %d%s; another client's only lease was renewed: "+
			"do renewals wait for each other, or for a connection?", ended, len(held), how)
	})
}

// What comes before a lease.
const (
	afterLoss    = "the release of a lease of the same lock that had run out"
	afterWait    = "its holder had waited for a release"
	afterDeath   = "its holder had waited for the end of another's lease"
	afterRelease = "a release of the same lock that got no reply"
	afterTry     = "a try of the same lock that got no reply"
	olderLock    = "its client's release of a lock that it had had for longer"
)

// keepsOn checks that what came before, or call by the holder's client a, doesn't end the renewals of key's lease. Another client
// holds held; old is an earlier lease of key.
func (c *check) keepsOn(what string, call func(a *client, key, held string, old scenarios.Lease)) {
	ended := counter{c: c, last: time.Now()}
	c.often(func() (sure bool) {
		a, b, key, held := c.times(3), c.times(3), newKey(), newKey()
		first := a
		if what == afterWait || what == afterDeath {
			first = c.client()
			c.connect(a)
			key = c.odd(first)
		}
		of := key
		if what == olderLock {
			of = newKey()
		}
		old, heal := c.take(first, of), func() {}
		switch what {
		case olderLock: // it is still held
		case afterWait:
			time.AfterFunc(5*pause, func() { c.free(old) })
		case afterDeath:
			c.inject(first, (*faults.Link).Cut)
		case afterLoss:
			heal = c.inject(a, (*faults.Link).Cut)
		case afterRelease:
			c.during(a, (*faults.Link).LoseReplies, releasing(old))
		case afterTry:
			c.free(old)
			c.during(a, (*faults.Link).LoseReplies, trying(a, key))
		default:
			c.free(old)
		}
		if what == afterLoss || what == afterRelease || what == afterTry {
			if c.wait(b, key).pass(4*max(a.ttl, c.k.Service.MinSession)+patience) != nil { // other promises' checks report it
				return true
			}
		}
		heal()
		l, same := c.take(a, key), c.take(b, held)
		time.Sleep(l.TTL() / 2) // until it has been renewed
		call(a, key, held, old)
		time.Sleep(l.TTL() + c.k.TTL)
		sure = c.still(l, b, key, what)
		ended.see(endsAlone(l, same), "3 times renewals of %.100q stopped after %s; those of another client went on", key, what)
		c.free(l, same)
		return sure
	})
}

func holderDisconnected(c *check) {
	a, b, key, start := c.times(5), c.client(), newKey(), time.Now()
	first := c.take(a, key)
	c.inject(a, (*faults.Link).Refuse)
	second, err := c.acquire(b, key)
	if err != nil {
		return // LeaseLasts reports it
	}
	if now := time.Now(); now.Before(start.Add(first.TTL())) && lasts(first, now) { // LeaseLasts covers later notifications
		c.breaks("another client was granted the lock when the holder's connections had broken, and the holder's lease of %v lasted", first.TTL())
	} else if !c.ends(first, patience) { // LeaseLasts covers a holder that is told late
		c.breaks("a holder whose connections had broken hadn't been told %v after its successor's grant", patience)
	}
	c.free(second)
}

func holderReturns(c *check) {
	c.toldAndRenewed()
	for what, fault := range map[string]linkFault{
		"came back": (*faults.Link).Cut, "sent late requests": (*faults.Link).HoldRequests, "got late replies": holdReplies,
	} {
		ended := counter{c: c, last: time.Now()}
		c.often(func() (sure bool) {
			a, b, other, key := c.client(), c.lasting(), c.client(), newKey()
			l := c.take(a, key)
			heal := c.inject(a, fault)
			later, err := c.acquire(b, key)
			if err != nil {
				c.blocked(key, "the lease of a holder who was cut off hadn't ended after %v: %v", c.limit(), err)
				return true
			}
			heal()
			look := 2 * c.k.TTL
			if c.k.Fixed { // the successor's lease is as short
				look = c.k.TTL / 2
			}
			for end := time.Now().Add(look); time.Now().Before(end) && !c.isDecided(); time.Sleep(pause) {
				if !c.still(later, other, key, "the old holder "+what+",") {
					return false
				}
			}
			got, err := c.briefly(trying(a, key)).granted()
			if err == nil && lasts(later, time.Now()) { // it may go by what it remembers
				c.breaks("the old holder %s, and was granted the lock while its successor's lease lasted", what)
			}
			c.free(got)
			c.release(later)
			c.comesFree(other, key, "the old holder "+what+" and the new one released,")
			c.free(l) // a client may keep a lock of its own until then
			if c.comesFree(a, key, "it "+what+","); c.isDecided() {
				return true
			}
			same, next := c.take(other, newKey()), c.take(a, key)
			if !c.k.Service.NoRenew {
				time.Sleep(next.TTL() + c.k.TTL)
			}
			alone := endsAlone(next, same)
			ended.see(alone, "3 times the next lease of a holder that %s ended without a release; that of another client lasted", what)
			return !alone
		})
	}
}

// toldAndRenewed: after broken connections have ended a lease, its renewals reach the servers again.
func (c *check) toldAndRenewed() {
	if c.k.Service.NoRenew {
		return
	}
	a, b, key := c.client(), c.client(), newKey()
	l := c.take(a, key)
	heal := c.inject(a, (*faults.Link).Refuse)
	told := c.ends(l, l.TTL()+patience) // HolderDisconnected reports a holder that isn't told
	if heal(); !told || c.wait(b, key).pass(c.limit()) == nil {
		return
	}
	c.release(l)
	if next, err := c.try(b, key); err == nil {
		c.free(next)
		c.notes("a holder had been told that its lease was lost, and the lock stayed held until it called Release")
		return
	}
	c.comesFree(b, key, "a holder had been told that its lease was lost, and had released it,")
}

func oddTTLs(c *check) {
	ttls := []time.Duration{
		999 * time.Microsecond, 3 * time.Millisecond / 2, time.Second + 1, 2*c.k.TTL - time.Millisecond/2, 3*c.k.TTL - time.Millisecond/2,
		c.k.TTL.Truncate(time.Second) + 1400*time.Millisecond, // not the nearest second
	}
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, ttl := range ttls {
		a, err := c.open(ttl)
		if err != nil {
			continue // refused
		}
		b := c.client()
		wg.Go(func() { c.outlast(a, b, 0, 0, fmt.Sprintf(", of a TTL of %v", ttl)) })
	}
	const wraps = (1<<32 + 1) * time.Millisecond // some 50 days; 1 ms in 32 bits
	a, err := c.open(wraps)
	if err != nil {
		return
	}
	other, key := c.client(), newKey()
	asked := time.Now()
	l, err := c.try(a, key)
	switch took := time.Since(asked); {
	case err == nil:
	case took > patience/10: // not refused: it may have been granted, without a reply
		c.unsure("an acquisition for 50 days failed after %v: %v", took, err)
		return
	default:
		c.comesFree(other, key, "an acquisition for 50 days that failed")
		return
	}
	time.Sleep(c.k.TTL / 10)
	c.still(l, other, key, "a grant for 50 days")
	c.free(l)
}

// outlast checks a lease that a renews for as long as hold, and that is then granted to b. It reports whether a got one.
func (c *check) outlast(a, b *client, slow, hold time.Duration, circumstance string) bool {
	key, start := newKey(), time.Now()
	first, err := c.try(a, key)
	if err != nil { // the TTL is refused, or the lease known to be over
		c.comesFree(b, key, "an acquisition that failed"+circumstance)
		return false
	}
	for end := time.Now().Add(hold); time.Now().Before(end); time.Sleep(pause) {
		if !c.still(first, b, key, "renewals") || c.isDecided() {
			return false
		}
	}
	lose := (*faults.Link).Cut
	if slow > 0 { // the replies have a fault already
		lose = (*faults.Link).LoseRequests
	}
	if _, err := c.injected(a, lose); err != nil {
		return false
	}
	second, err := c.acquire(b, key)
	now := time.Now()
	if err != nil {
		c.blocked(key, "the lease of a holder who was cut off hadn't ended after %v%s: %v", c.limit(), circumstance, err)
		return true
	}
	renewed := circumstance == afterRenewals
	notified := circumstance == "" || renewed // elsewhere only the servers' time matters
	if slow > 0 {
		circumstance += fmt.Sprintf(" (its replies took %v)", slow.Round(time.Millisecond))
	}
	end := first.Until()
	told := isOver(first)
	known := !end.IsZero()
	if !known {
		end = start.Add(first.TTL()) // it began no earlier, but its session may have: then its holder is told
	}
	if early := end.Sub(now); early > 0 && (known || !told) {
		c.breaks("another client was granted the lock %v before the end of a lease of %v%s", early, first.TTL(), circumstance)
	}
	if notified && !told {
		if !c.ends(first, patience) {
			c.breaks("a holder's context hadn't ended %v after its successor's grant%s", patience, circumstance)
		} else if !renewed { // LeaseLasts covers a holder that is told late
			c.breaks("a holder's context ended %v after its successor's grant%s", time.Since(now).Round(10*time.Millisecond), circumstance)
		}
	}
	c.free(second)
	return true
}
