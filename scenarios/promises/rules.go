package promises

import (
	"context"
	"errors"
	"fmt"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/scenarios"
)

type promise struct {
	name, text string
	check      func(c *check)
	never      func(k Kit) (why string) // not "": why this lock's can't be checked
	alone      bool                     // it breaks the servers
}

var promises = []promise{
	{name: "Exclusive", text: "a lock has one holder at a time, however many contend, and TryAcquire of a held one says so", check: exclusive},
	{name: "OneClient", text: "two callers of one client don't hold a lock at once either", check: oneClient},
	{name: "LeaseLasts", text: "nobody else is granted a lock before its holder's lease ends, and the holder's context has ended by then", check: leaseLasts},
	{name: "LeaseRenewed", text: "a lease that is renewed lasts, and so until a TTL after its last renewal", check: leaseRenewed, never: unrenewed},
	{name: "HolderDisconnected", text: "nobody else is granted a lock because its holder's connections break, unless the holder has been told", check: holderDisconnected},
	{name: "HolderReturns", text: "a holder that was cut off until its lease had run out, and whose messages then arrive, doesn't disturb its successor", check: holderReturns},
	{name: "OddTTLs", text: "a TTL such as 999 µs, 1 s + 1 ns or 50 days is refused or rounded up: its lease neither ends early nor lasts for ever", check: oddTTLs, never: fixed},
	{name: "TokensIncrease", text: "each grant's token is greater than all before, also after a lease that ran out or a grant whose reply was late", check: tokensIncrease, never: tokenless},
	{name: "KeysIndependent", text: "a lock on one key blocks no other, also where one key begins with the other, or they differ in a space or in case", check: keysIndependent},
	{name: "ReleaseRepeated", text: "a release that is repeated frees no later grant, of this client or another", check: releaseRepeated},
	{name: "ReleaseRetried", text: "a release that is retried because its reply was lost frees no later grant of the same client", check: releaseRetried},
	{name: "ReleaseStale", text: "the release of a lease that has run out frees no later grant of the same client", check: releaseStale},
	{name: "ReleaseLate", text: "a release that arrives late frees no later grant", check: releaseLate},
	{name: "AcquireLate", text: "an abandoned acquisition that arrives late, or gets no reply, doesn't leave the lock blocked", check: acquireLate},
	{name: "EveryMessage", text: "whichever message of a call is lost, the lock doesn't stay blocked", check: everyMessage},
	{name: "WaiterServed", text: "a waiter gets the lock when it is released, also if the waiter was cut off at that moment", check: waiterServed},
	{name: "WaiterCancelled", text: "waiters whose contexts end return, and block nobody, at whatever moment they leave", check: waiterCancelled},
	{name: "WaitersCutOff", text: "waiters who are cut off when their contexts end return, and block nobody, however many", check: waitersCutOff},
	{name: "EndsWithContext", text: "calls end with their contexts while the servers are silent, and block nobody if their contexts had ended before", check: endsWithContext},
	{name: "CloseEnds", text: "Close ends while the servers are silent, and no lease is renewed after the client has presumed it lost", check: closeEnds},
	{name: "ClockSkew", text: "a server's clock that is an hour ahead or behind neither ends a lease early nor prolongs it, nor makes tokens smaller", check: clockSkew, alone: true},
	{name: "Partition", text: "of two clients that reach different servers at most one holds the lock", check: partition, never: single},
	{name: "NothingLeft", text: "what a client has released, tried in vain, or stopped waiting for leaves no goroutine behind", check: nothingLeft},
	{name: "DataLoss", text: "if one of several servers loses its data, nobody else gets in; if all do, an old lease's release frees no new grant", check: dataLoss, alone: true},
}

func fixed(k Kit) string {
	if k.Fixed {
		return "Kit.Fixed: the lock's TTL can't be changed"
	}
	return ""
}

func unrenewed(k Kit) string {
	if k.Service.NoRenew {
		return "Service.NoRenew: the lock doesn't renew its leases"
	}
	return ""
}

func single(k Kit) string {
	if len(k.Service.Nodes) == 1 {
		return "there is only one server"
	}
	return ""
}

func tokenless(k Kit) string {
	if k.Service.NoTokens {
		return "the lock has no tokens: a holder that is paused past its TTL can write over its successor, and no resource can tell"
	}
	return ""
}

func exclusive(c *check) {
	c.refused(c.lasting(), c.lasting(), "two clients")
	c.contend(c.lasting(), c.lasting(), c.lasting(), c.lasting(), c.lasting(), c.lasting())
}

func oneClient(c *check) {
	a := c.lasting()
	c.refused(a, a, "two callers of one client")
	c.contend(a, a, a, a, a, a)
}

// refused checks that b gets ErrHeld while a holds the lock.
func (c *check) refused(a, b *client, who string) {
	key := newKey()
	l := c.take(a, key)
	got, err := c.try(b, key)
	for range 3 {
		if err == nil || errors.Is(err, dlock.ErrHeld) {
			break
		}
		// A client's own time limit may have been too short for the machine: then it is too short for an unused lock too.
		unused, failed := c.try(b, newKey())
		if failed != nil {
			c.unsure("TryAcquire of a lock that nobody has touched fails: %v", failed)
			break
		}
		_ = c.do(unused.Release)
		got, err = c.try(b, key)
	}
	now := time.Now()
	switch {
	case err == nil && lasts(l, now):
		c.breaks("%s held the lock at once", who)
	case err != nil && !errors.Is(err, dlock.ErrHeld) && !c.isDecided():
		c.breaks("TryAcquire of a held lock returned %q, which doesn't wrap dlock.ErrHeld", err)
	}
	if err == nil {
		_ = c.do(got.Release)
	}
	_ = c.do(l.Release)
}

func (c *check) contend(clients ...*client) {
	const rounds = 10
	limit := 2*long*c.k.TTL + patience // a release that was lost blocks the others for a lease
	var inside atomic.Pointer[scenarios.Lease]
	var wg sync.WaitGroup
	key := newKey()
	for _, cl := range clients {
		wg.Go(func() {
			for range rounds {
				l, err := c.persist(limit, cl, key)
				if err != nil {
					c.unsure("one of %d contenders got no lock within %v: %v", len(clients), limit, err)
					return
				}
				inside.Store(&l)
				time.Sleep(pause / 4)
				// Before the release, after which any lease is over.
				if !inside.CompareAndSwap(&l, nil) && lasts(l, time.Now()) {
					c.breaks("two contenders held the lock at once")
				}
				_ = c.do(l.Release)
			}
		})
	}
	wg.Wait()
}

func leaseLasts(c *check) {
	var wg sync.WaitGroup
	var checked atomic.Int32
	defer wg.Wait()
	for _, slow := range []time.Duration{0, c.k.TTL / 3, c.k.TTL + c.k.TTL/2} {
		a, b := c.client(), c.client()
		if slow > 0 {
			c.inject(a, func(l *faults.Link, ctx context.Context) (faults.Heal, error) { return l.DelayReplies(ctx, slow) })
		}
		wg.Go(func() {
			if c.outlast(a, b, slow, 0, "") {
				checked.Add(1)
			}
		})
	}
	wg.Wait()
	if checked.Load() == 0 {
		c.cannot("TryAcquire of a free lock granted no lease that lasted")
	}
}

func leaseRenewed(c *check) {
	for _, slow := range []time.Duration{0, c.k.TTL / 3} {
		c.often(func() bool {
			a, b := c.times(3), c.client()
			_ = c.do(c.take(a, newKey()).Release) // it is connected
			if slow > 0 {
				c.inject(a, func(l *faults.Link, ctx context.Context) (faults.Heal, error) { return l.DelayReplies(ctx, slow) })
			}
			return c.outlast(a, b, slow, 4*c.k.TTL, " after renewals") || c.isDecided()
		})
	}
}

func holderDisconnected(c *check) {
	a, b, key, start := c.client(), c.client(), newKey(), time.Now()
	first := c.take(a, key)
	c.inject(a, (*faults.Link).Refuse)
	second, err := c.acquire(b, key)
	if err != nil {
		c.blocked(key, "the lease of a holder whose connections broke hadn't ended after %v: %v", c.limit(), err)
		return
	}
	if now := time.Now(); now.Before(start.Add(first.TTL())) && lasts(first, now) { // LeaseLasts is about later notifications
		c.breaks("another client was granted the lock when the holder's connections had broken, and the holder's lease of %v lasted", first.TTL())
	}
	_ = c.do(second.Release)
}

func holderReturns(c *check) {
	for what, fault := range map[string]func(*faults.Link, context.Context) (faults.Heal, error){
		"had been cut off": (*faults.Link).Cut, "had been late": (*faults.Link).HoldRequests,
	} {
		c.often(func() (sure bool) {
			a, b, other, key := c.client(), c.lasting(), c.client(), newKey()
			c.take(a, key)
			heal := c.inject(a, fault)
			later, err := c.acquire(b, key)
			if err != nil {
				c.blocked(key, "the lease of a holder who was cut off hadn't ended after %v: %v", c.limit(), err)
				return true
			}
			heal()
			for end := time.Now().Add(2 * c.k.TTL); time.Now().Before(end) && !c.isDecided(); time.Sleep(pause) {
				if !c.still(later, other, key, "a holder's messages "+what) {
					return false
				}
			}
			_ = c.do(later.Release)
			c.comesFree(other, key, "a holder's messages "+what+", and its successor's release")
			return true
		})
	}
}

func oddTTLs(c *check) {
	ttls := []time.Duration{
		999 * time.Microsecond, 3 * time.Millisecond / 2, time.Second + 1, 2*c.k.TTL - time.Millisecond/2, 3*c.k.TTL - time.Millisecond/2,
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
	const days = 1<<32 + 1 // ms: one, for a server or a client that has 32 bits
	a, err := c.open(days * time.Millisecond)
	if err != nil {
		return
	}
	other, key := c.client(), newKey()
	l, err := c.try(a, key)
	if err != nil {
		c.comesFree(other, key, "an acquisition for 50 days that failed")
		return
	}
	time.Sleep(c.k.TTL / 10)
	c.still(l, other, key, "a grant for 50 days")
	_ = c.do(l.Release)
}

// outlast checks a lease of a, which a renews for as long as hold, and then granted to b. It reports whether there was one.
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
	for _, l := range a.links {
		if _, err := lose(l, c.ctx); err != nil {
			return false
		}
	}
	second, err := c.acquire(b, key)
	now := time.Now()
	if err != nil {
		c.blocked(key, "the lease of a holder who was cut off hadn't ended after %v%s: %v", c.limit(), circumstance, err)
		return true
	}
	notified := circumstance == "" // elsewhere only the servers' time matters
	if slow > 0 {
		circumstance += fmt.Sprintf(" (its replies took %v)", slow.Round(time.Millisecond))
	}
	end := first.Until()
	if end.IsZero() {
		end = start.Add(first.TTL()) // it began no earlier
	}
	if early := end.Sub(now); early > 0 {
		c.breaks("another client was granted the lock %v before the end of a lease of %v%s", early.Round(time.Microsecond), first.TTL(), circumstance)
	}
	if notified && !isOver(first) {
		select {
		case <-first.Context().Done():
			c.breaks("a holder's context ended %v after its successor's grant%s", time.Since(now).Round(10*time.Millisecond), circumstance)
		case <-time.After(patience):
			c.breaks("a holder's context hadn't ended %v after its successor's grant%s", patience, circumstance)
		case <-c.ctx.Done():
		}
	}
	_ = c.do(second.Release)
	return true
}

func tokensIncrease(c *check) {
	a, b, key := c.client(), c.client(), newKey()
	var last uint64
	next := func(cl *client, after string) scenarios.Lease {
		l := c.take(cl, key)
		if l.Fence() <= last {
			c.breaks("after %s the token was %d, and the one before %d", after, l.Fence(), last)
		}
		last = l.Fence()
		return l
	}
	for range 3 {
		_ = c.do(next(a, "a release").Release)
		_ = c.do(next(b, "a release by another client").Release)
	}
	next(a, "a release")
	heal := c.inject(a, (*faults.Link).Cut)
	_ = c.do(next(b, "a lease that ran out").Release)
	heal()

	// A token that isn't minted with its grant may be greater than the successor's.
	a, b, key = c.client(), c.lasting(), newKey()
	_ = c.do(c.take(a, newKey()).Release) // it is connected
	slow := c.k.TTL + c.k.TTL/2
	c.inject(a, func(l *faults.Link, ctx context.Context) (faults.Heal, error) { return l.DelayReplies(ctx, slow) })
	type granted struct {
		lease scenarios.Lease
		err   error
	}
	late := make(chan granted, 1)
	go func() {
		l, err := c.try(a, key)
		late <- granted{l, err}
	}()
	time.Sleep(c.k.TTL / 4) // usually a is the first then
	l := c.take(b, key)
	if r := <-late; r.err == nil && r.lease.Fence() > l.Fence() && lasts(l, time.Now()) {
		c.breaks("a grant whose replies took %v had the token %d, and its successor, who still held the lock, had %d", slow, r.lease.Fence(), l.Fence())
	}
	_ = c.do(l.Release)
}

func keysIndependent(c *check) {
	a, b := c.lasting(), c.lasting()
	for _, more := range []string{"/a", "a", "-1", ":a"} {
		short := newKey()
		for _, keys := range [][2]string{{short, short + more}, {short + more, short}} {
			l := c.take(a, keys[0])
			got, err := c.acquire(b, keys[1])
			_ = c.do(l.Release)
			if err == nil {
				_ = c.do(got.Release)
				continue
			}
			got, again := c.acquire(b, keys[1])
			if again != nil {
				c.cannot("nobody gets %q, whether or not %q is held: %v", keys[1], keys[0], again)
			}
			_ = c.do(got.Release)
			c.breaks("while %q was held nobody got %q: %v", keys[0], keys[1], err)
			return
		}
	}
	base := newKey()
	held, refused := map[string]scenarios.Lease{}, ""
	for i, more := range []string{"/x", ":x", ".x", "-x", "_x", " x", "x", "/X", "//x", "/x/", "%2Fx", "{x}", "{y}", strings.Repeat("x", 300), strings.Repeat("x", 301)} {
		l, err := c.try([]*client{a, b}[i%2], base+more)
		switch {
		case err == nil:
			held[base+more] = l
		case errors.Is(err, dlock.ErrHeld):
			refused = base + more
		}
	}
	for _, l := range held {
		_ = c.do(l.Release)
	}
	if refused == "" {
		return
	}
	if l, err := c.try(a, refused); err == nil {
		_ = c.do(l.Release)
		c.breaks("while other keys were held nobody got %.80q", refused)
	}
}

func releaseRepeated(c *check) {
	for _, of := range []string{"another client", "the same client"} {
		c.often(func() (sure bool) {
			a, b, other, key := c.lasting(), c.lasting(), c.lasting(), newKey()
			l := c.take(a, key)
			c.release(l)
			if of == "the same client" {
				b = a
			}
			later := c.take(b, key)
			_ = c.do(l.Release)
			sure = c.still(later, other, key, "a release that was repeated with a grant of "+of)
			_ = c.do(later.Release)
			return sure
		})
	}
}

func releaseRetried(c *check) {
	c.often(func() (sure bool) {
		a, other, key := c.times(10), c.client(), newKey() // at the worst the lock comes free when the lease ends
		l := c.take(a, key)
		heal := c.inject(a, (*faults.Link).LoseReplies)
		c.briefly(releasing(l))
		heal()
		later, err := c.acquire(a, key)
		if err != nil {
			c.cannot("after a release whose reply was lost its client got no lock: %v", err)
		}
		_ = c.do(l.Release)
		sure = c.still(later, other, key, "a release whose reply had been lost was retried,")
		_ = c.do(later.Release)
		return sure
	})
}

func releaseStale(c *check) {
	c.often(func() (sure bool) {
		a, b, other, key := c.client(), c.client(), c.client(), newKey()
		stale := c.take(a, key)
		heal := c.inject(a, (*faults.Link).Cut)
		_ = c.do(c.take(b, key).Release)
		heal()
		later, err := c.try(a, key)
		for end := time.Now().Add(patience); err != nil && time.Now().Before(end); { // it may have to reconnect
			time.Sleep(pause)
			later, err = c.try(a, key)
		}
		if err != nil {
			c.cannot("a client that had been cut off got no lock within %v: %v", patience, err)
		}
		_ = c.do(stale.Release)
		sure = c.still(later, other, key, "the release of a lease that had run out")
		_ = c.do(later.Release)
		return sure
	})
}

// After a late message, still is called looks times, every pause.
const (
	looks = 20
	pause = 20 * time.Millisecond
)

func releaseLate(c *check) {
	c.often(func() (sure bool) {
		a, b, other, key := c.client(), c.lasting(), c.client(), newKey()
		l := c.take(a, key)
		deliver := c.inject(a, (*faults.Link).HoldRequests)
		c.briefly(releasing(l))
		later, err := c.acquire(b, key)
		if err != nil {
			c.blocked(key, "after a release that was held nobody had got the lock within %v: %v", c.limit(), err)
			return true
		}
		deliver()
		for range looks {
			if !c.still(later, other, key, "a release that arrived late") {
				return false
			}
			if c.isDecided() {
				break
			}
			time.Sleep(pause) // the server may not have read the message yet
		}
		_ = c.do(later.Release)
		return true
	})
}

func acquireLate(c *check) {
	for what, fault := range map[string]func(*faults.Link, context.Context) (faults.Heal, error){
		"an acquisition that arrived late":         (*faults.Link).HoldRequests,
		"an acquisition whose reply was lost":      (*faults.Link).LoseReplies,
		"an acquisition whose request was lost":    (*faults.Link).LoseRequests,
		"an acquisition while the link was silent": (*faults.Link).Cut,
	} {
		a, b, key := c.client(), c.client(), newKey()
		_ = c.do(c.take(a, newKey()).Release) // it is connected
		heal := c.inject(a, fault)
		r := c.briefly(func(ctx context.Context) (scenarios.Lease, error) { return a.TryAcquire(ctx, key) })
		heal()
		if r.returned && r.err == nil {
			c.breaks("TryAcquire was granted a lock without its reply")
			continue
		}
		if c.comesFree(b, key, what); c.isDecided() {
			break
		}
	}
}

const maxMessages = 12

func everyMessage(c *check) {
	lose := map[string]func(*faults.Link, context.Context, int) (faults.Heal, error){
		"request": (*faults.Link).LoseRequestsFrom, "reply": (*faults.Link).LoseRepliesFrom,
	}
	b := c.client()
	for _, what := range []string{"Acquire", "Release"} {
		for kind, from := range lose {
			for n := 1; n <= maxMessages; n++ {
				a, key := c.client(), newKey()
				_ = c.do(c.take(a, newKey()).Release)
				var l scenarios.Lease
				if what == "Release" {
					l = c.take(a, key)
				}
				heal := c.inject(a, func(l *faults.Link, ctx context.Context) (faults.Heal, error) { return from(l, ctx, n) })
				call := func(ctx context.Context) (scenarios.Lease, error) { return a.Acquire(ctx, key) }
				if what == "Release" {
					call = releasing(l)
				}
				r := c.briefly(call)
				if !r.returned { // neither would the others
					c.cannot("%s hadn't returned %v after its context had ended when %s %d was lost", what, patience, kind, n)
				}
				lost := a.loses()
				heal()
				if got, err := r.granted(); err == nil && got != nil {
					_ = c.do(got.Release)
				}
				c.comesFree(b, key, fmt.Sprintf("the %s of message %d of %s was lost", kind, n, what))
				if !lost || c.isDecided() {
					break
				}
			}
		}
	}
}

func waiterServed(c *check) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for what, fault := range map[string]func(*faults.Link, context.Context) (faults.Heal, error){
		"waited": nil, "was cut off": (*faults.Link).Cut, "got no replies": (*faults.Link).LoseReplies, "was refused": (*faults.Link).Refuse,
	} {
		a, b, other, key := c.lasting(), c.client(), c.client(), newKey()
		_ = c.do(c.take(b, newKey()).Release) // it is connected
		l := c.take(a, key)
		wg.Go(func() {
			served := make(chan error, 1)
			go func() {
				l, err := c.acquire(b, key)
				if err == nil {
					_ = c.do(l.Release)
				}
				served <- err
			}()
			time.Sleep(c.k.TTL / 2) // usually b waits then
			if fault == nil {
				_ = c.do(l.Release)
			} else {
				heal := c.inject(b, fault)
				_ = c.do(l.Release)
				time.Sleep(c.k.TTL / 2)
				heal()
			}
			err := <-served
			if err == nil {
				return
			}
			// A stall of the machine or of the servers would also delay a new client.
			if _, failed := c.try(other, key); failed != nil {
				c.unsure("neither does a new client get the lock: %v", failed)
				return
			}
			c.breaks("a waiter, who %s while the lock was released, hadn't got it after %v, and a new client got it at once: %v", what, c.limit(), err)
		})
	}
}

func (cl *client) loses() bool {
	for _, l := range cl.links {
		if l.Loses() {
			return true
		}
	}
	return false
}

// waiting starts n waiters for a held key, and returns when all have returned. The i-th is cancelled when leave(i) returns. It is
// unsure if none waited until then.
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
			done := make(chan struct{})
			go func() {
				defer close(done)
				l, err := cl.Acquire(ctx, key)
				if err != nil {
					return
				}
				if lasts(held, time.Now()) {
					c.breaks("a waiter was granted a lock that another client held")
				}
				_ = c.do(l.Release)
			}()
			select {
			case <-done:
				return
			case <-ctx.Done():
				stood.Add(1)
			}
			select {
			case <-done:
			case <-time.After(patience):
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
	c.waiting(b, key, l, waiters, func(i int) { time.Sleep(time.Duration(i) * 5 * time.Millisecond) }) // at many moments
	if !c.isDecided() {
		c.release(l)
		c.comesFree(c.client(), key, fmt.Sprintf("%d waiters that were cancelled", waiters))
	}
}

func waitersCutOff(c *check) {
	a, b, key := c.lasting(), c.client(), newKey()
	_ = c.do(c.take(b, newKey()).Release)
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
	time.Sleep(c.k.TTL / 2) // most of them wait by then
	heal := c.inject(b, (*faults.Link).Cut)
	leave()
	<-left
	heal()
	if !c.isDecided() {
		c.release(l)
		c.comesFree(c.client(), key, fmt.Sprintf("%d waiters that were cut off", waiters))
	}
}

func endsWithContext(c *check) {
	for _, name := range []string{"TryAcquire", "Acquire", "Release"} {
		a := c.client()
		call := releasing(c.take(a, newKey()))
		switch name {
		case "TryAcquire":
			call = func(ctx context.Context) (scenarios.Lease, error) { return a.TryAcquire(ctx, newKey()) }
		case "Acquire":
			call = func(ctx context.Context) (scenarios.Lease, error) { return a.Acquire(ctx, newKey()) }
		}
		heal := c.inject(a, (*faults.Link).Cut)
		if !c.briefly(call).returned {
			c.breaks("%s, while the servers were silent, hadn't returned %v after its context had ended", name, patience)
		}
		heal()
	}
	ended, end := context.WithCancel(c.ctx)
	end()
	a, b, released, acquired := c.client(), c.client(), newKey(), newKey()
	l := c.take(a, released)
	c.call(patience, func() (scenarios.Lease, error) { return nil, l.Release(ended) })
	c.call(patience, func() (scenarios.Lease, error) {
		l, err := a.Acquire(ended, acquired)
		if err == nil {
			_ = c.do(l.Release)
		}
		return nil, err
	})
	c.comesFree(b, released, "a release whose context had ended before")
	c.comesFree(b, acquired, "an acquisition whose context had ended before")
}

func closeEnds(c *check) {
	a := c.client()
	c.take(a, newKey())
	heal := c.inject(a, (*faults.Link).Cut)
	defer heal()
	limit := c.k.TTL + patience
	if r := c.call(limit, func() (scenarios.Lease, error) { return nil, a.close() }); !r.returned {
		c.breaks("Close hadn't returned after %v while the servers were silent", limit)
	}
	closed, b, key := c.client(), c.client(), newKey()
	l := c.take(closed, key)
	c.call(limit, func() (scenarios.Lease, error) { return nil, closed.close() })
	next, err := c.acquire(b, key)
	switch {
	case err == nil:
		_ = c.do(next.Release)
	case isOver(l):
		c.blocked(key, "after Close nobody had got the lock within %v, though the lease was over: %v", c.limit(), err)
	}
}

func clockSkew(c *check) {
	key, last := newKey(), uint64(0)
	grows := func(when string) {
		if c.k.Service.NoTokens {
			return
		}
		l := c.take(c.client(), key)
		if l.Fence() <= last {
			c.breaks("%s the token was %d, and the one before %d", when, l.Fence(), last)
		}
		last = l.Fence()
		_ = c.do(l.Release)
	}
	grows("at first")
	c.skewed(time.Hour, "ahead", grows)
	grows("after an hour ahead")
	c.skewed(-time.Hour, "behind", grows)
}

func (c *check) skewed(by time.Duration, says string, meanwhile func(when string)) {
	jump := func(d time.Duration) {
		c.fault(scenarios.Step{Verb: "jump", Target: scenarios.LockService, Detail: d.String()})
	}
	jump(by)
	defer jump(-by)
	circumstance := "with the servers' clocks an hour " + says
	meanwhile(circumstance)
	c.often(func() bool {
		return c.outlast(c.client(), c.client(), 0, 0, ", "+circumstance) || c.isDecided()
	})
}

func partition(c *check) {
	n := len(c.k.Service.Nodes)
	for _, reached := range []int{n / 2, n - n/2} { // by a; b reaches the others
		a, b, key := c.lasting(), c.lasting(), newKey()
		heals := []func(){
			c.inject(&client{links: a.links[reached:]}, (*faults.Link).Refuse), c.inject(&client{links: b.links[:reached]}, (*faults.Link).Refuse),
		}
		first, err := c.try(a, key)
		second, failed := c.try(b, key)
		now := time.Now()
		if err == nil && failed == nil && lasts(first, now) {
			c.breaks("a client that reached %d of %d servers, and one that reached the others, held the lock at once", reached, n)
		}
		if err != nil && failed != nil {
			c.unsure("neither a client that reached %d of %d servers got the lock, nor one that reached the others: %v; %v", reached, n, err, failed)
		}
		for _, heal := range heals {
			heal()
		}
		if err == nil {
			_ = c.do(first.Release)
		}
		if failed == nil {
			_ = c.do(second.Release)
		}
	}

	// Renewals by too few servers. A service whose servers forward requests rightly goes on serving the holder.
	a, b, key := c.client(), c.client(), newKey()
	first := c.take(a, key)
	c.inject(&client{links: a.links[n/2:]}, (*faults.Link).Cut)
	second, err := c.acquire(b, key)
	if err != nil {
		return
	}
	if lasts(first, time.Now()) {
		c.breaks("another client was granted the lock while the lease of a holder who reached %d of %d servers lasted", n/2, n)
	}
	_ = c.do(second.Release)
}

func nothingLeft(c *check) {
	const calls = 100
	a, b, key := c.lasting(), c.lasting(), newKey()
	held := c.take(b, key)
	for what, call := range map[string]func(){
		"grants and releases": func() { _ = c.do(c.take(a, newKey()).Release) },
		"tries in vain":       func() { _, _ = c.try(a, key) },
		"cancelled waits": func() {
			_, _ = c.within(pause, func(ctx context.Context) (scenarios.Lease, error) { return a.Acquire(ctx, key) }).granted()
		},
	} {
		mark := newKey()
		pprof.Do(c.ctx, pprof.Labels("promises", mark), func(context.Context) {
			for range calls {
				call()
			}
		})
		left := goroutines(mark)
		for end := time.Now().Add(patience); left >= calls/2 && time.Now().Before(end); left = goroutines(mark) {
			time.Sleep(pause)
		}
		if left >= calls/2 {
			c.breaks("%v after %d %s, %d of the goroutines that they had started still ran", patience, calls, what, left)
		}
	}
	_ = c.do(held.Release)
}

// goroutines counts those that have a label, which a goroutine inherits from the one that starts it.
func goroutines(label string) (n int) {
	var all strings.Builder
	_ = pprof.Lookup("goroutine").WriteTo(&all, 1)
	_, records, _ := strings.Cut(all.String(), "\n")
	for same := range strings.SplitSeq(records, "\n\n") {
		if strings.Contains(same, label) {
			count, _, _ := strings.Cut(same, " @ ")
			some, _ := strconv.Atoi(count)
			n += some
		}
	}
	return n
}

func dataLoss(c *check) {
	nodes := c.k.Service.Nodes
	if len(nodes) < 3 {
		nodes = nil // one of two is no minority
	}
	for _, n := range nodes {
		c.often(func() (sure bool) {
			key := newKey()
			l := c.take(c.lasting(), key)
			c.fault(scenarios.Step{Verb: "wipe", Target: n.Name})
			sure = c.still(l, c.client(), key, "one of "+fmt.Sprint(len(nodes))+" servers had lost its data")
			_ = c.do(l.Release)
			return sure
		})
	}
	c.often(func() (sure bool) {
		key := newKey()
		old := c.take(c.lasting(), key)
		c.fault(scenarios.Step{Verb: "wipe", Target: scenarios.LockService})
		later, err := c.acquire(c.lasting(), key)
		if err != nil {
			c.blocked(key, "after the servers had lost their data nobody had got the lock within %v: %v", c.limit(), err)
			return true
		}
		other := c.client()
		for range 3 { // it may have to reconnect
			err = c.briefly(releasing(old)).err
			sure = c.still(later, other, key, "the servers had lost their data, and a lease from before was released,")
			if err == nil || errors.Is(err, dlock.ErrLost) || c.isDecided() {
				break
			}
		}
		_ = c.do(later.Release)
		return sure
	})
}
