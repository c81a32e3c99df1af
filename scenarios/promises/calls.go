package promises

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/scenarios"
)

func releaseRepeated(c *check) {
	for _, hold := range []struct {
		what string
		do   func(l scenarios.Lease) error
	}{
		{"lasted", func(scenarios.Lease) error { return nil }},
		{"had been renewed, and lasted", func(l scenarios.Lease) error { c.renewedOnce(l); return nil }},
		{"had been renewed by hand, and lasted", c.renewByHand},
	} {
		c.thrice(func() string {
			a := c.times(3)
			l := c.take(a, newKey())
			if hold.do(l) != nil {
				return ""
			}
			brief := l.TTL() / 8
			sound, asked := lasts(l, time.Now().Add(brief)), time.Now()
			err := c.do(l.Release)
			sound = sound && time.Since(asked) < brief // otherwise the server may rightly say that it was lost
			got, failed := c.try(a, newKey())
			c.free(got)
			return when(sound && err != nil && failed == nil, "three times the first release of a lease that %s returned %q", hold.what, err)
		})
	}
	for _, of := range []string{"another client", "the same client"} {
		c.often(func() (sure bool) {
			a, b, other, key := c.lasting(), c.lasting(), c.lasting(), newKey()
			l := c.take(a, key)
			c.release(l)
			if of == "the same client" {
				b = c.again(a)
			}
			later := c.take(b, key)
			_ = c.returns(l, "a release that was repeated")
			defer c.free(later)
			return c.still(later, other, key, "a release that was repeated with a grant of "+of)
		})
	}
	a, key := c.client(), newKey()
	l := c.take(a, key)
	c.slow(pause, a)
	release := func() { _ = c.returns(l, "one of four releases at once") }
	c.together(release, release, release, release)
	c.comesFree(c.client(), key, "four releases at once")
}

// returns releases l, which must return.
func (c *check) returns(l scenarios.Lease, what string) error {
	r := c.within(patience, releasing(l))
	if !r.returned {
		c.breaks("%s hadn't returned %v after its context had ended", what, patience)
	}
	return r.err
}

func releaseRetried(c *check) {
	c.releasesOn()
	c.outlasts("a release of another lock by its holder that got no reply", func(a *client, _ scenarios.Lease) call { return releasing(c.take(a, newKey())) })
	c.outlasts("a try of another lock by its holder that got no reply", func(a *client, _ scenarios.Lease) call { return trying(a, newKey()) })
	c.often(func() (sure bool) {
		a, other, key := c.times(10), c.client(), newKey() // at worst the lock comes free when the lease expires
		l := c.take(a, key)
		c.during(a, (*faults.Link).LoseReplies, releasing(l))
		later, err := c.acquire(c.again(a), key)
		if err != nil {
			c.cannot("after a release whose reply was lost nobody got the lock: %v", err)
		}
		c.free(l)
		defer c.free(later)
		return c.stays(later, other, key, "a release whose reply had been lost was retried,") // its client may retry the release, too
	})
	a, b, key := c.lasting(), c.client(), newKey()
	l := c.take(a, key)
	c.freesOrSays(l, c.during(a, (*faults.Link).LoseRequests, releasing(l)).err, b, key, "a release whose request was lost")
}

// freesOrSays checks that a release that returned err has freed the lock, or says that it hasn't, and likewise a retry. A lock that
// stays held isn't lost.
func (c *check) freesOrSays(l scenarios.Lease, err error, other *client, key, what string) {
	says := "no error"
	if err != nil && !errors.Is(err, dlock.ErrLost) {
		what += " was retried, and"
		err = c.do(l.Release)
	}
	if errors.Is(err, dlock.ErrLost) {
		err, says = nil, "that the lease had been lost"
	}
	if err == nil {
		c.comesFree(other, key, fmt.Sprintf("%s returned %s,", what, says))
	}
}

// again returns who is granted the lock that a has had: a itself, unless its releases count, whichever grant they are of.
func (c *check) again(a *client) *client {
	if c.k.Service.Reentrant {
		return c.times(10)
	}
	return a
}

// releasesOn: after each release that hangs, another client's shows whether the servers are the cause.
func (c *check) releasesOn() {
	a, b := c.lasting(), c.client()
	l := c.take(a, newKey())
	r := c.during(a, (*faults.Link).LoseReplies, releasing(l))
	if !r.returned { // EndsWithContext reports it
		return
	}
	next := c.take(a, newKey())
	for _, l := range []scenarios.Lease{l, next} {
		hangs := 0
		for ; hangs < 4; hangs++ {
			waited := false
			r := c.within(patience, without(func(ctx context.Context) error {
				err := l.Release(ctx)
				waited = err != nil && ctx.Err() != nil
				return err
			}))
			if r.returned && !waited || c.do(c.take(b, newKey()).Release) != nil {
				break
			}
		}
		if hangs == 4 {
			c.breaks("after a release whose reply was lost its client could acquire, but four more releases didn't return before their contexts ended; those of another client, after each, did")
			return
		}
	}
}

// outlasts checks that a lease outlasts a call of its client that gets no reply.
func (c *check) outlasts(what string, call func(a *client, l scenarios.Lease) call) {
	c.often(func() (sure bool) {
		a, other, key := c.lasting(), c.client(), newKey()
		l := c.take(a, key)
		if !c.during(a, (*faults.Link).LoseReplies, call(a, l)).returned || c.endsWithConnection(l) {
			return true
		}
		defer c.free(l)
		return c.stays(l, other, key, what)
	})
}

func (c *check) during(cl *client, fault linkFault, f call) result {
	defer c.inject(cl, fault)()
	return c.briefly(f)
}

// endsWithConnection waits for a lease to end with its connections, as a session's may.
func (c *check) endsWithConnection(l scenarios.Lease) bool { return c.ends(l, patience/10) }

func releaseStale(c *check) {
	c.often(func() (sure bool) {
		a, b, other, key := c.client(), c.client(), c.client(), newKey()
		stale := c.take(a, key)
		heal := c.inject(a, (*faults.Link).Cut)
		c.free(c.take(b, key))
		heal()
		later, err := c.tryFor(2*patience, pause, c.again(a), key) // it may have to reconnect
		if err != nil {
			c.cannot("a client that had been cut off got no lock within %v: %v", patience, err)
		}
		if c.returns(stale, "the release of a lease that had run out") == nil {
			c.notes("the release of a lease that had run out, and whose lock another client had had since, returned no error: only the lease's context tells its holder")
		}
		defer c.free(later)
		return c.still(later, other, key, "the release of a lease that had run out")
	})
}

// After a late message, the lock is polled every pause, at most looks times.
const (
	looks = 20
	pause = 20 * time.Millisecond
)

func releaseLate(c *check) {
	for what, fault := range map[string]linkFault{
		"a release that arrived late": (*faults.Link).HoldRequests, "a release with late replies": holdReplies,
	} {
		c.often(func() (sure bool) {
			a, b, other, key := c.client(), c.lasting(), c.client(), newKey()
			l := c.take(a, key)
			deliver := c.inject(a, fault)
			go c.within(c.limit(), releasing(l)) // a lock whose release first asks for the holder frees it then
			later, err := c.acquire(b, key)
			if err != nil {
				c.blocked(key, "after a release that was held nobody had got the lock in %v or more: %v", c.limit(), err)
				return true
			}
			deliver()
			defer c.free(later)
			return c.stays(later, other, key, what)
		})
		for i := 0; i < 2 && !c.isDecided() && !c.k.Service.Reentrant; i++ { // a reentrant lock's releases count, whichever grant they are of
			c.ownRelease(what, fault)
		}
	}
}

// ownRelease has a client acquire locks again while its releases are in flight, on other connections if it has several.
func (c *check) ownRelease(what string, fault linkFault) {
	const locks = 8 // either message may arrive first
	a, b := c.times(2), c.client()
	var keys [locks]string
	var leases [locks]scenarios.Lease
	each := func(n int, f func(i int)) {
		if c.each(n, f); c.isUnsure() {
			panic(errStop)
		}
	}
	each(2*locks, func(i int) { // opens connections for all
		key := newKey()
		if l := c.take(a, key); i < locks {
			keys[i], leases[i] = key, l
		} else {
			c.free(l)
		}
	})
	deliver := c.inject(a, fault)
	for _, l := range leases {
		go c.within(c.limit(), releasing(l))
	}
	each(locks, func(i int) { _ = c.do(c.take(b, keys[i]).Release) })
	var again [locks]wait
	for i, key := range keys {
		again[i] = c.wait(a, key)
	}
	time.Sleep(pause)
	deliver()
	each(locks, func(i int) {
		if l, err := again[i].served(c.limit()); err == nil { // HolderReturns reports errors
			c.stays(l, b, keys[i], what)
			c.free(l)
		}
	})
}

var holdReplies = delaying(time.Hour)

const refusedTry = "an acquisition that was refused"

func acquireLate(c *check) {
	var parts []func()
	for what, fault := range map[string]linkFault{
		"an acquisition that arrived late":         (*faults.Link).HoldRequests,
		"an acquisition whose reply was lost":      (*faults.Link).LoseReplies,
		"an acquisition whose request was lost":    (*faults.Link).LoseRequests,
		"an acquisition while the link was silent": (*faults.Link).Cut,
		refusedTry: (*faults.Link).Refuse,
	} {
		parts = append(parts, func() { c.givenUp(what, fault, trying) }, func() { c.givenUp(what+" (Acquire)", fault, acquiring) })
	}
	if c.together(parts...); c.isDecided() {
		return
	}
	c.failedAcquire()
	c.lateGrant()
	c.ownCleanup()
	c.ownRetry()
}

func (c *check) givenUp(what string, fault linkFault, call func(cl *client, key string) call) {
	a, b, key, theirs := c.client(), c.lasting(), newKey(), newKey()
	c.connect(a)
	held := c.take(b, theirs)
	heal := c.inject(a, fault)
	r := c.briefly(call(a, key))
	if strings.HasPrefix(what, refusedTry) && errors.Is(c.briefly(call(a, key)).err, dlock.ErrHeld) { // its connection is closed by now
		c.notes("%s returned that another client held the lock, which nobody had touched", what)
	}
	heal()
	if got, err := r.granted(); r.returned && err == nil {
		c.free(got)
		c.breaks("%s returned a lease without a reply", what)
		return
	}
	c.still(held, a, theirs, what+", of another lock,") // a client may mistake its late reply for another call's
	c.free(held)
	c.comesFree(c.client(), key, what)
	c.comesFree(a, key, what+", its own client retrying,")
	c.comesFree(a, newKey(), what+", of another lock,")
}

// openedRefused: a client that was opened while it couldn't connect may never recover.
func (c *check) openedRefused() {
	a, err := c.open(c.k.TTL, func(cl *client) error {
		heal, err := c.injected(cl, (*faults.Link).Refuse)
		time.AfterFunc(patience/5, heal) // Open may wait for that
		return err
	})
	if err != nil { // so it says
		return
	}
	time.Sleep(patience / 5)
	c.comesFree(a, newKey(), "its client had been opened while the servers refused connections,")
}

func (c *check) failedAcquire() {
	for what, fault := range map[string]linkFault{
		"was late": (*faults.Link).HoldRequests, "got no reply": (*faults.Link).LoseReplies,
	} {
		for _, failing := range []func(cl *client, key string) call{trying, acquiring} {
			c.often(func() (sure bool) {
				a, b, other, key := c.client(), c.lasting(), c.client(), newKey()
				c.connect(a)
				l := c.take(b, key)
				if !c.during(a, fault, failing(a, key)).returned { // EndsWithContext reports it, and it takes long
					return true
				}
				c.still(l, a, key, "its own acquisition of a held lock that "+what)
				defer c.free(l)
				return c.stays(l, other, key, "an acquisition of a held lock that "+what)
			})
		}
	}
}

func (c *check) lateGrant() {
	c.often(func() (sure bool) {
		a, b, other, key := c.client(), c.lasting(), c.client(), newKey()
		c.connect(a)
		heal := c.inject(a, holdReplies)
		late := c.begin(c.limit(), trying(a, key))
		time.Sleep(pause)
		l, err := c.acquire(b, key)
		heal()
		if err != nil {
			c.blocked(key, "after an acquisition without a reply nobody had got the lock in %v or more: %v", c.limit(), err)
			return true
		}
		sure = c.stays(l, other, key, "a grant whose reply came after its lease")
		c.drop(<-late)
		c.free(l)
		return sure
	})
}

func (c *check) ownCleanup() {
	for _, fault := range []linkFault{
		(*faults.Link).LoseRequests, (*faults.Link).HoldRequests, (*faults.Link).Refuse,
	} {
		c.often(func() (sure bool) {
			a, other, key := c.lasting(), c.client(), newKey()
			c.connect(a)
			if !c.during(a, fault, trying(a, key)).returned {
				return true
			}
			l, err := c.persist(c.limit(), a, key) // its own late request may hold it for a lease
			if err != nil {
				return true // comesFree reports it
			}
			defer c.free(l)
			return c.stays(l, other, key, "an acquisition of the same client that had failed")
		})
	}
}

func (c *check) ownRetry() {
	a, b, key := c.times(6), c.client(), newKey()
	c.connect(a)
	if !c.during(a, (*faults.Link).LoseReplies, trying(a, key)).returned {
		return
	}
	l, err := c.try(a, key)
	if err != nil || l.Until().IsZero() { // held by that earlier request
		c.free(l)
		return
	}
	c.inject(a, (*faults.Link).Cut)
	next, err := c.tryFor(time.Until(l.Until()), pause, b, key) // later grants prove nothing
	if now := time.Now(); err == nil && lasts(l, now) {
		c.breaks("after an acquisition that got no reply its client got the lock, and another was granted it %v before the end of that lease", l.Until().Sub(now))
	}
	c.free(next)
}

func (c *check) stays(l scenarios.Lease, other *client, key, after string) (sure bool) {
	for n, began := 0, time.Now(); n < 2 || n < looks && time.Since(began) < looks*pause; n++ {
		if sure = c.still(l, other, key, after); !sure || c.isDecided() {
			break
		}
		time.Sleep(pause)
	}
	return sure
}

const maxMessages = 30

var losses = map[string]lossFault{
	"requests": (*faults.Link).LoseRequestsFrom, "replies": (*faults.Link).LoseRepliesFrom,
}

func everyMessage(c *check) {
	b, holder, more := c.client(), c.lasting(), ""
	const refused, few = "TryAcquire of a held lock", 4 // an adapter's may poll
	for _, what := range []string{"Acquire", "Release", refused} {
		for kind, loss := range losses {
			for n := 1; ; n++ {
				if what == refused && n > few {
					break
				}
				if n > maxMessages {
					more = fmt.Sprintf("%s has more than %d %s: the loss of those behind was not tried", what, maxMessages, kind)
					break
				}
				lease := time.Duration(1)
				if what == "Release" && !c.k.Service.NoRenew { // the lease outlasts the fault, and renewals may continue
					lease = 4
				}
				a, key := c.times(lease), newKey()
				c.connect(a)
				var l scenarios.Lease
				call := acquiring(a, key)
				switch what {
				case "Release":
					l = c.take(a, key)
					call = releasing(l)
				case refused:
					l = c.take(holder, key)
					call = trying(a, key)
				}
				heal := c.inject(a, loss.from(n))
				r := c.briefly(call)
				if !r.returned {
					c.cannot("%s hadn't returned %v after its context had ended when it lost its %s from number %d on", what, patience, kind, n)
				}
				lost := a.loses()
				heal()
				c.drop(r)
				after := fmt.Sprintf("%s lost its %s from number %d on", what, kind, n)
				if what == refused {
					after += ", and its holder's release,"
					if lasts(l, time.Now()) {
						c.release(l)
					}
				}
				c.comesFree(b, key, after)
				c.free(l)
				if c.comesFree(a, key, after+", its own client retrying,"); c.isDecided() {
					return
				}
				if c.shut(a); !lost {
					break
				}
			}
		}
	}
	c.brokenCalls()
	c.openedRefused()
	if more != "" && !c.isDecided() {
		c.excluded = true
		c.unsure("%s", more)
	}
}

// brokenCalls breaks connections during calls: what a client sends again meets the effect of its first request.
func (c *check) brokenCalls() {
	b := c.client()
	for _, what := range []string{"TryAcquire", "Acquire", "Release"} {
		if what == "TryAcquire" && c.k.Fixed { // leftover locks expire soon anyway
			continue
		}
		for n, lost := 1, true; lost && n <= maxMessages && !c.isDecided(); n++ {
			a, key := c.lasting(), newKey()
			if what == "Acquire" { // unlike a lease that nobody knows of, a position in a queue may stay
				a = c.client()
			}
			c.connect(a)
			var r result
			call := trying(a, key)
			switch what {
			case "Acquire":
				call = acquiring(a, key)
			case "Release":
				call = releasing(c.take(a, key))
			}
			r, lost = c.breaking(a, n, call)
			after := fmt.Sprintf("%s's connection broke instead of its reply number %d", what, n)
			switch l, err := r.granted(); {
			case !r.returned: // EndsWithContext reports it
				return
			case what == "Release" && r.err == nil:
				c.comesFree(b, key, after+", and it returned no error,")
			case what == "Release" && errors.Is(r.err, dlock.ErrLost):
				c.notes("after %s it said that the lease had been lost: its own first request had released it", after)
			case what == "Release": // outcome unknown
			case err == nil:
				if c.do(l.Release) == nil {
					c.comesFree(b, key, after+", it was granted the lock, and released it,")
				}
			case what == "Acquire":
				c.comesFree(b, key, after)
			case c.freed(b, key):
			case errors.Is(err, dlock.ErrHeld) && !c.guesses(a):
				c.breaks("after %s it returned that another client held the lock: what it had sent first held it", after)
			default:
				c.notes("after %s its lock was held: until the end of a lease that nobody knew of", after)
			}
			c.shut(a)
		}
	}
}

// guesses reports whether cl returns ErrHeld without a server's reply. An adapter without a real try may.
func (c *check) guesses(cl *client) bool {
	return errors.Is(c.during(cl, (*faults.Link).Cut, trying(cl, newKey())).err, dlock.ErrHeld)
}

func (c *check) breaking(cl *client, n int, f call) (r result, lost bool) {
	heal := c.inject(cl, lossFault((*faults.Link).LoseRepliesFrom).from(n))
	done := c.begin(patience, f)
	for {
		select {
		case r = <-done:
			lost = lost || cl.loses()
			heal()
			return r, lost
		case <-time.After(pause / 20):
			if cl.hasLost() { // before that, the request may still arrive after one that the client sends again
				lost = true
				heal()
			}
		}
	}
}

func (c *check) freed(cl *client, key string) bool {
	for end := time.Now().Add(2 * max(c.k.TTL, c.k.Service.MinSession)); time.Now().Before(end); time.Sleep(pause) {
		l, err := c.try(cl, key)
		c.free(l)
		if !errors.Is(err, dlock.ErrHeld) {
			return true
		}
	}
	return false
}

func (cl *client) loses() bool { return slices.ContainsFunc(cl.links, (*faults.Link).Loses) }

func (cl *client) hasLost() bool { return slices.ContainsFunc(cl.links, (*faults.Link).HasLost) }

func (cl *client) connections() (n int) {
	for _, l := range cl.links {
		n = max(n, l.Connections())
	}
	return n
}

func (cl *client) messages() (n int) {
	for _, l := range cl.links {
		n += l.Messages()
	}
	return n
}

func endsWithContext(c *check) {
	for _, name := range []string{"TryAcquire", "Acquire", "Release", "TryAcquire cancelled", "Acquire cancelled", "Release cancelled"} {
		name, cancelled := strings.CutSuffix(name, " cancelled")
		a := c.client()
		l := c.take(a, newKey())
		call := map[string]call{"TryAcquire": trying(a, newKey()), "Acquire": acquiring(a, newKey()), "Release": releasing(l)}[name]
		heal := c.inject(a, (*faults.Link).Cut)
		others := []<-chan result{c.begin(2*patience, acquiring(a, newKey()))} // the call may wait for these
		if r, ok := l.(renewer); ok {
			others = append(others, c.begin(2*patience, without(r.Renew)))
		}
		time.Sleep(pause)
		if name == "Release" {
			time.Sleep(c.k.TTL * 2 / 3) // a renewal is under way
		}
		returns := c.briefly
		if cancelled { // a connection's deadline isn't enough
			returns = c.cancelled
		}
		switch r := returns(call); {
		case !r.returned:
			c.breaks("%s, while the servers were silent and other calls of its client waited, hadn't returned %v after its context had ended", name, patience)
		case r.err == nil && r.lease != nil:
			c.breaks("%s granted a lock while no server replied, or its client connects to other addresses than LockSpec.Addrs", name)
		case r.err == nil && name == "Release":
			c.notes("a release that reached no server returned no error: the lock may stay held for the rest of its lease")
		}
		heal()
		for _, other := range others {
			c.drop(<-other)
		}
	}
	alone := c.client()
	c.inject(alone, (*faults.Link).Refuse)
	switch r := c.briefly(acquiring(alone, newKey())); {
	case !r.returned:
		c.breaks("Acquire, while the servers refused connections, hadn't returned %v after its context had ended", patience)
	case r.err == nil && r.lease != nil:
		c.breaks("Acquire granted a lock while all servers refused connections, or its client connects to other addresses than LockSpec.Addrs")
	}
	ended, end := context.WithCancel(c.ctx)
	end()
	a, b, released, acquired := c.client(), c.client(), newKey(), newKey()
	l := c.take(a, released)
	c.call(patience, func() (scenarios.Lease, error) { return nil, l.Release(ended) })
	for _, call := range []call{acquiring(a, acquired), trying(a, acquired)} {
		c.drop(c.call(patience, func() (scenarios.Lease, error) { return call(ended) }))
		c.comesFree(b, acquired, "an acquisition whose context had ended before")
	}
	c.comesFree(b, released, "a release whose context had ended before")
	c.together(func() { c.outlives(acquiring) }, func() { c.outlives(trying) })
}

func (c *check) cancelled(f call) result {
	ctx, cancel := context.WithCancel(c.ctx)
	time.AfterFunc(c.k.TTL/5, cancel)
	return c.call(patience+c.k.TTL/5, func() (scenarios.Lease, error) { return f(ctx) })
}

func (c *check) outlives(call func(*client, string) call) {
	deadline := c.k.TTL
	if c.k.Fixed {
		deadline /= 4
	}
	c.thrice(func() string {
		cl, other, key := c.times(3), c.client(), newKey()
		ctx, cancel := context.WithCancel(c.ctx)
		defer cancel()
		before, err := c.call(c.limit(), func() (scenarios.Lease, error) { return cl.Acquire(ctx, newKey()) }).granted()
		if err != nil {
			c.cannot("Acquire of a free lock: %v", err)
		}
		ended, err := c.within(deadline, call(cl, key)).granted()
		if err != nil {
			ended = c.take(cl, key)
		}
		if c.k.Service.NoRenew {
			time.Sleep(ended.TTL() / 2) // until the acquisition's deadline has passed
		} else { // renewals may end with it
			time.Sleep(ended.TTL() + c.k.TTL)
		}
		c.still(ended, other, key, "the end of its acquisition's context")
		defer c.free(ended, before)
		return when(endsAlone(ended, before), "3 times a lease ended with the context of its acquisition; an older one, whose context lived on, lasted")
	})
}

func closeEnds(c *check) {
	a := c.client()
	c.take(a, newKey())
	heal := c.inject(a, (*faults.Link).Cut)
	defer heal()
	time.Sleep(c.k.TTL * 2 / 3)
	limit := c.k.TTL + patience
	if !c.close(a, limit) {
		c.breaks("Close hadn't returned after %v while the servers were silent", limit)
	}
	closed, b, key := c.times(3), c.client(), newKey()
	l := c.take(closed, key)
	began := time.Now()
	c.close(closed, limit)
	probe, first := c.try(b, key)
	c.free(probe)
	next, err := c.acquire(b, key)
	now := time.Now()
	switch {
	case err != nil && isOver(l):
		c.blocked(key, "after Close nobody had got the lock in %v or more, though the lease was over: %v", c.limit(), err)
	case err != nil, !lasts(l, now):
	case errors.Is(first, dlock.ErrHeld) && now.Sub(began) > l.TTL()/2+pause && l.Until().IsZero() && !c.ends(l, patience): // it ran out
		c.breaks("Close ended renewals, another client was granted the lock, and %v later its holder's context hadn't ended", patience)
	default:
		c.notes("Close freed the lock while its holder's lease lasted: first release it, or wait for its end")
	}
	c.free(next)
	c.releasedAndClosed()
	c.lostAndClosed()
	if !c.isDecided() {
		c.closedCalls()
	}
}

// closedCalls checks that calls of a closed client return, one that waited when it was closed, too, and that this leaves nothing.
func (c *check) closedCalls() {
	a, b, key := c.lasting(), c.client(), newKey()
	held, l := c.take(a, key), c.take(b, newKey())
	limit := 4*c.k.TTL + patience // it may wait for the calls under way
	waited := c.begin(4*c.k.TTL, acquiring(b, key))
	time.Sleep(5 * pause)
	shut := func() {
		if !c.close(b, limit) {
			c.breaks("Close hadn't returned after %v while an acquisition of its client waited", limit)
		}
	}
	calls := map[string]call{"Release": releasing(l), "Acquire": acquiring(b, key), "TryAcquire": trying(b, key)}
	if r, ok := l.(renewer); ok {
		calls["Renew"] = without(r.Renew)
	}
	if _, ok := b.Lock.(scenarios.Adapter); ok { // Shut is the user's, and may be called once
		shut()
	} else {
		c.together(shut, shut, shut, shut)
		calls["Close"] = without(func(context.Context) error { return b.Close() })
	}
	c.stays(held, c.client(), key, "Close of a client that waited for the lock")
	c.release(held)
	time.Sleep(c.k.TTL) // what goes on in its place may poll
	r := <-waited
	if !r.returned {
		c.breaks("an acquisition that waited when its client was closed hadn't returned %v after its context had ended", patience)
	}
	c.drop(r)
	c.comesFree(c.client(), key, "a client was closed while an acquisition of it waited, and the holder's release,")
	for what, call := range calls {
		if !c.briefly(call).returned {
			c.breaks("after Close, %s hadn't returned %v after its context had ended", what, patience)
		}
	}
}

func (c *check) releasedAndClosed() {
	a, b, key := c.lasting(), c.client(), newKey()
	if c.do(c.take(a, key).Release) == nil {
		c.close(a, patience)
		c.comesFree(b, key, "a release, and Close,")
	}
}

// lostAndClosed: Close may free what the client doesn't have any more.
func (c *check) lostAndClosed() {
	if c.k.Fixed && c.k.Service.NoRenew { // the successor's lease may end meanwhile
		return
	}
	c.often(func() (sure bool) {
		a, b, other, key := c.client(), c.lasting(), c.client(), newKey()
		c.take(a, key)
		heal := c.inject(a, (*faults.Link).Cut)
		l, err := c.acquire(b, key)
		heal()
		if err != nil { // LeaseLasts reports it
			return true
		}
		defer c.free(l)
		c.gets(a) // it reconnects
		c.close(a, patience)
		return c.stays(l, other, key, "Close of a client that had lost the lock")
	})
}

func nothingLeft(c *check) {
	a, b, key := c.client(), c.lasting(), newKey() // a may clean up for as long as leases that it never got would have lasted
	held := c.take(b, key)
	c.connect(a)
	const clients, many = "clients", 40
	closed := []*client{a}
	connections := func() (n int) {
		for _, cl := range closed {
			n += cl.connections()
		}
		return n
	}
	sends := func() int {
		if a.ttl > patience/2 {
			return 0
		}
		before := a.messages()
		time.Sleep(a.ttl)
		return a.messages() - before
	}
	talk := sends()
	for _, kind := range []struct {
		what        string
		times, each int // calls of do, and operations in each
		do          func()
	}{
		{"grants, renewals by hand and releases", 100, 1, func() {
			l := c.take(a, newKey())
			_ = c.renewByHand(l)
			c.free(l)
		}},
		{"failed tries", 100, 1, func() { _, _ = c.try(a, key) }},
		{"cancelled waits", 100, 1, func() { c.within(pause, acquiring(a, key)) }},
		{"waits that were served", 3, many, func() {
			var wg sync.WaitGroup
			for range many {
				key := newKey()
				l, err := c.try(b, key)
				if err != nil {
					continue
				}
				w := c.wait(a, key)
				wg.Go(func() {
					time.Sleep(pause)
					c.free(l)
					_ = w.pass(c.limit())
				})
			}
			wg.Wait()
		}},
		{"tries without a reply, and as many without a connection", 3, many, func() {
			for _, fault := range []linkFault{(*faults.Link).LoseReplies, (*faults.Link).Refuse} {
				heal := c.inject(a, fault)
				c.each(many, func(int) { c.within(a.ttl/5, trying(a, newKey())) })
				heal()
			}
		}},
		{"leases that were lost, and as many releases while a renewal was under way", 3, many / 2, func() {
			var leases []scenarios.Lease
			for range many {
				if l, err := c.try(a, newKey()); err == nil {
					leases = append(leases, l)
				}
			}
			heal := c.inject(a, (*faults.Link).LoseReplies)
			time.Sleep(a.ttl * 2 / 3)
			for _, l := range leases[len(leases)/2:] {
				go c.within(patience, releasing(l))
			}
			time.Sleep(a.ttl)
			heal()
			c.free(leases...)
		}},
		{clients, 30, 1, func() { // servers may not have room for more
			cl := c.client()
			closed = append(closed, cl)
			c.connect(cl)
			c.take(cl, newKey())
			c.close(cl, c.k.TTL+patience)
		}},
	} {
		what, mark, before, lingers := kind.what, newKey(), connections(), patience
		if what == clients {
			if l, ok := a.Lock.(scenarios.Adapter); ok && l.Shut == nil { // its clients share what they leave
				continue
			}
			lingers += max(c.k.TTL, c.k.Service.MinSession) // until each one's lease expires
		}
		// A client may keep a pool, larger on a slow machine, and keep sessions alive, but they must stop growing.
		pool, pooled := 0, 0
		for round := 1; ; round++ {
			n, last := 0, round == 3 || round == 2 && what == clients
			pprof.Do(c.ctx, pprof.Labels("promises", mark), func(context.Context) {
				for end := time.Now().Add(patience); n < kind.times && time.Now().Before(end); n++ {
					kind.do()
				}
			})
			n *= kind.each
			few := (n - 1) / 2
			most := max(few, 20) // few calls complete if they are slow
			// What ends slowly, such as clean-up on a slow machine, isn't a leak.
			count := func() (left, open int, where string) {
				left, where = goroutines(mark)
				return left - pool, connections() - before - pooled, where
			}
			left, open, where := count()
			began := time.Now()
			for least, since := math.MaxInt, began; left > few || open > most; {
				if left+open < least {
					least, since = left+open, time.Now()
				}
				if time.Since(since) > lingers || c.ctx.Err() != nil {
					break
				}
				if time.Since(began) > 6*lingers {
					c.cannot("%v after %d %s, %d goroutines and %d connections were left, and ended one after the other", 6*lingers, n, what, left, open)
				}
				time.Sleep(patience / 20)
				left, open, where = count()
			}
			sent := 0
			if what != clients {
				if sent = sends() - talk; sent > most && last { // it may also be cleaning up
					time.Sleep(lingers)
					sent = sends() - talk
				}
			}
			if (left > few || open > most || sent > most) && !last {
				pool, pooled, talk = pool+max(left, 0), pooled+max(open, 0), talk+max(sent, 0)
				continue
			}
			switch {
			case left > most:
				c.suspects(began, "after %d %s, %d of the goroutines that they had started ran on, and none ended for %v; most are %s", n, what, left, lingers, where)
			case left > few:
				c.unsure("%d %s in %v left %d goroutines: too few to tell", n, what, patience, left)
			}
			if open > most {
				c.suspects(began, "after %d %s, %d more connections to a server were open than before, and none was closed for %v", n, what, open, lingers)
			}
			if sent > most && open <= 0 { // a connection may send some by itself
				c.suspects(began, "after each %d %s the idle client sent more messages than before, the last time %d more in %v", n, what, sent, a.ttl)
				return
			}
			c.comesFree(a, newKey(), fmt.Sprintf("%d %s", n, what))
			break
		}
	}
	c.free(held)
}

// goroutines counts those with a label, which they inherit, and returns what most of them run.
func goroutines(label string) (n int, most string) {
	var highest int
	var all strings.Builder
	_ = pprof.Lookup("goroutine").WriteTo(&all, 1)
	_, records, _ := strings.Cut(all.String(), "\n")
	for same := range strings.SplitSeq(records, "\n\n") {
		if strings.Contains(same, label) {
			count, _, _ := strings.Cut(same, " @ ")
			some, _ := strconv.Atoi(count)
			n += some
			if fields := strings.Fields(same); some > highest { // the last line is the function that was started, and its file
				highest, most = some, fields[len(fields)-2]
			}
		}
	}
	return n, most
}
