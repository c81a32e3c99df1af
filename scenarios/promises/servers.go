package promises

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/scenarios"
)

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
		c.free(l)
	}
	grows("at first")
	c.skewed(time.Hour, "ahead", grows)
	grows("after an hour ahead")
	c.skewed(-time.Hour, "behind", grows)
}

func (c *check) skewed(by time.Duration, says string, meanwhile func(when string)) {
	jump := func(d time.Duration) scenarios.Step {
		return scenarios.Step{Verb: "jump", Target: scenarios.LockService, Detail: d.String()}
	}
	c.fault(jump(by))
	defer c.undo(jump(-by))
	circumstance := "with the servers' clocks an hour " + says
	meanwhile(circumstance)
	c.together(func() {
		c.often(func() bool { return c.outlast(c.client(), c.client(), 0, 0, ", "+circumstance) })
	}, func() {
		if a := c.renewed(); a != nil {
			c.often(func() bool { return c.outlast(a, c.client(), 0, 2*c.k.TTL, " after renewals, "+circumstance) })
		}
	})
}

// renewed returns a client whose leases are renewed, by hand if need be, or nil.
func (c *check) renewed() *client {
	a := c.times(3)
	if !c.k.Service.NoRenew {
		return a
	}
	l := c.take(a, newKey())
	defer c.free(l)
	if _, ok := l.(renewer); !ok {
		return nil
	}
	return &client{Lock: byHand{a.Lock, c}, links: a.links}
}

// serverErrors: unlike a lost message, an error may be taken for a reply.
func serverErrors(c *check) {
	a, b, other := c.lasting(), c.lasting(), c.client()
	held, freed, unused, queued := newKey(), newKey(), newKey(), newKey()
	l, gone, awaited := c.take(a, held), c.take(a, freed), c.take(a, queued)
	c.connect(b)
	waiter := c.wait(other, queued)
	defer waiter.stop()
	time.Sleep(5 * pause)
	late, began := c.client(), newKey()
	c.connect(late)
	brief := newKey()
	ending := c.take(c.times(3), brief)
	allow, err := c.deny(b, unused)
	begun := c.wait(late, began)
	defer begun.stop()
	got, failed := c.briefly(trying(b, held)).granted()
	if failed == nil && lasts(l, time.Now()) {
		c.breaks("TryAcquire granted a lock that another client held while the servers answered writes with errors")
	}
	c.free(got)
	if errors.Is(err, dlock.ErrHeld) {
		c.notes("a TryAcquire that the servers answered with an error returned that another client held the lock, which nobody had touched")
	}
	sent := a.messages()
	if r, ok := l.(renewer); ok && c.briefly(without(r.Renew)).err == nil && a.messages() > sent {
		c.breaks("a renewal that the servers answered with an error returned no error")
	}
	released := c.briefly(releasing(gone)).err
	time.Sleep(5 * pause)
	c.ends(ending, ending.TTL()+c.k.TTL)
	allow()
	c.still(ending, c.client(), brief, "the servers had answered with errors for longer than its TTL,")
	c.still(l, b, held, "calls that the servers answered with errors")
	c.freesOrSays(gone, released, c.client(), freed, "a release that the servers answered with an error")
	c.release(awaited)
	waiter.must(c.limit(), "a waiter whom the servers had answered with errors hadn't got the lock %v after its release", c.limit())
	begun.must(c.limit(), "one who began to wait for a free lock while the servers answered with errors hadn't got it after %v", c.limit())
	c.comesFree(other, queued, "a waiter whom the servers had answered with errors was served, and its release,")
	c.comesFree(other, unused, "an acquisition that the servers had answered with an error")
	c.comesFree(b, unused, "an acquisition that the servers had answered with an error, its own client retrying,")
	if !c.isDecided() {
		c.failWaiters("met servers' errors", c.k.TTL/2, func(b *client) (heal func()) {
			allow, _ := c.deny(b, newKey())
			return allow
		})
	}
	if !c.k.Service.NoRenew {
		c.thrice(func() string {
			return when(c.endsByError(), "three times a lease ended after the servers had answered one of its renewals with an error")
		})
	}
}

// endsByError reports whether errors end a lease that meet one of its renewals, and those with which the client may repeat it.
func (c *check) endsByError() bool {
	for i := range tries {
		a, other := c.times(min(3*time.Duration(i+1), 9)), c.client() // to deny, or to be refused, may take longer than between two renewals
		c.connect(other)
		l := c.take(a, newKey())
		c.renewedOnce(l)
		before := a.messages()
		allow, _ := c.deny(other, newKey())
		met, early := time.Now(), a.messages() > before // perhaps before the servers denied it
		for end := met.Add(l.TTL()); a.messages() == before && time.Now().Before(end); {
			time.Sleep(pause)
			met = time.Now()
		}
		time.Sleep(10 * pause) // the client may repeat it
		allow()
		once := !early && a.messages() > before && time.Since(met) < l.TTL()/3
		ended := once && (c.ends(l, l.TTL()+c.k.TTL) || !lasts(l, time.Now()))
		if c.free(l); once {
			return ended
		}
	}
	c.cannot("no renewal met the servers' errors, or they lasted for more than a third of a lease, again and again")
	return false
}

// deny has the servers answer writes with errors, also cl's TryAcquire of key: it returns that error.
func (c *check) deny(cl *client, key string) (allow func(), err error) {
	c.fault(scenarios.Step{Verb: "deny", Target: scenarios.LockService})
	allow = sync.OnceFunc(func() { c.undo(scenarios.Step{Verb: "allow", Target: scenarios.LockService}) })
	sent := cl.messages()
	l, err := c.briefly(trying(cl, key)).granted()
	if err != nil && cl.messages() > sent {
		return allow, err
	}
	allow()
	if err != nil {
		c.cannot("the servers were to answer a TryAcquire with an error, but it sent them nothing: %v", err)
	}
	second, err := c.try(c.client(), key)
	defer c.free(l, second)
	if err == nil && lasts(l, time.Now()) {
		c.breaks("TryAcquire granted a lock while the servers answered writes with errors, and then they granted it to another client")
		panic(errStop)
	}
	c.excluded = true
	c.cannot("the servers granted a lock when they were to answer writes with errors")
	return allow, err
}

func partition(c *check) {
	n := len(c.k.Service.Nodes)
	var wg sync.WaitGroup
	defer wg.Wait()
	if n > 2 { // one of two is no minority
		wg.Go(c.spared)
		wg.Go(func() { c.together(c.undoes) })
	}
	c.each(4, func(i int) {
		reached, fault := []int{n / 2, n - n/2}[i%2], (*faults.Link).Refuse // by a; b reaches the others
		if i >= 2 {
			fault = (*faults.Link).Cut
		}
		a, b, key := c.lasting(), c.lasting(), newKey()
		heals := []func(){c.inject(&client{links: a.links[reached:]}, fault), c.inject(&client{links: b.links[:reached]}, fault)}
		first, err := c.try(a, key)
		second, failed := c.try(b, key)
		now := time.Now()
		if err == nil && failed == nil && lasts(first, now) {
			c.breaks("a client that reached %d of %d servers, and one that reached the others, held the lock at once", reached, n)
		}
		if err != nil && failed != nil && i < 2 { // it may wait for silent servers until its context ends
			c.unsure("neither a client that reached %d of %d servers got the lock, nor one that reached the others: %v; %v", reached, n, err, failed)
		}
		for _, heal := range heals {
			heal()
		}
		c.free(first, second)
	})

	// Renewals reach too few servers. A service whose servers forward requests may rightly keep serving the holder.
	a, b, key := c.client(), c.client(), newKey()
	c.connect(a)
	first, err := c.try(&client{Lock: byHand{a.Lock, c}}, key)
	if err != nil {
		c.unsure("TryAcquire of a free lock: %v", err)
		return
	}
	heal := c.inject(&client{links: a.links[:n-n/2]}, (*faults.Link).Cut)
	defer func() { // it may still renew the lease
		heal()
		c.free(first)
	}()
	second, err := c.acquire(b, key)
	if err != nil {
		return
	}
	if first.Until().IsZero() { // it may be told late, see LeaseLasts
		c.ends(first, patience)
	}
	if lasts(first, time.Now()) {
		c.breaks("another client was granted the lock while the lease of a holder who reached %d of %d servers lasted", n/2, n)
	}
	c.free(second)
}

// undoes checks that acquisitions that too few servers granted leave nothing on them.
func (c *check) undoes() {
	few := (len(c.k.Service.Nodes) - 1) / 2
	if c.k.Fixed {
		return
	}
	c.thrice(func() string {
		a, b, other, key := c.lasting(), c.lasting(), c.client(), newKey()
		c.connect(a, b, other)
		var failed int
		var heals []func()
		for i, cl := range []*client{a, b} {
			heals = append(heals, c.inject(&client{links: cl.links[:i*few]}, (*faults.Link).Refuse), c.inject(&client{links: cl.links[(i+1)*few:]}, (*faults.Link).Refuse))
			l, err := c.try(cl, key)
			if c.free(l); err != nil {
				failed++
			}
		}
		for _, heal := range heals {
			heal()
		}
		if failed < 2 { // servers forward requests
			return ""
		}
		why := c.wait(other, key).pass(c.limit())
		return when(why != nil && c.gets(other) && !c.isUnsure(), "three times, after two clients that each reached only %d of %d servers "+
			"had failed to get a lock, nobody got it in %v or more: %v", few, len(c.k.Service.Nodes), c.limit(), why)
	})
}

// spared checks what a client can do if one server doesn't answer it. Only one may be needed: a leader.
func (c *check) spared() {
	n := len(c.k.Service.Nodes)
	var mu sync.Mutex
	failed, stuck, left := map[int]string{}, map[int]string{}, map[int]string{}
	var parts []func()
	add := func(to map[int]string, i int, says string, check func() error) {
		parts = append(parts, func() {
			if why := check(); why != nil {
				mu.Lock()
				defer mu.Unlock()
				to[i] = fmt.Sprintf("server %d%s: %v", i+1, says, why)
			}
		})
	}
	for i := range n {
		add(failed, i, " was silent", func() error { return c.spares(i, (*faults.Link).Cut, false) })
		add(failed, i, " refused connections", func() error { return c.spares(i, (*faults.Link).Refuse, false) })
		add(failed, i, " refused connections of a new client", func() error { return c.spares(i, (*faults.Link).Refuse, true) })
		if c.k.Fixed { // the lease expires within the limit
			continue
		}
		add(stuck, i, "", func() error { return c.freesWithout(i) })
		if n < 5 { // of five servers, three are enough
			add(left, i, "", func() (why error) {
				if !c.repeatedly(func() bool { why = c.leavesNothing(i); return why != nil }) {
					return nil
				}
				return why
			})
		}
	}
	c.together(parts...)
	maps.DeleteFunc(stuck, func(i int, _ string) bool { return failed[i] != "" }) // it leads
	if c.isUnsure() {
		return
	}
	first := func(of map[int]string) string { return slices.Min(slices.Collect(maps.Values(of))) }
	if len(stuck) > 0 {
		c.breaks("after a release while one of %d servers refused connections nobody got the lock in %v or more: %s", n, c.limit(), first(stuck))
	}
	if len(left) > n/2 { // the holder's connection may be broken at its release
		c.breaks("one of %d servers granted a lock and its reply was lost; after the release a client that another server refused hadn't got the lock in %v or more, "+
			"though it got an unused one, three times, whichever of %d it was: %s", n, c.limit(), len(left), first(left))
	}
	if len(failed) > 1 {
		c.breaks("while one of %d servers didn't answer, a client got no lock, or couldn't renew one, in %v or more, whichever of %d it was: %s", n, c.limit(), len(failed), first(failed))
	}
}

// to is the client's connection to the i-th server.
func (cl *client) to(i int) *client { return &client{links: cl.links[i : i+1]} }

// spares returns why a client, new or already connected, gets no lock, or can't renew it by hand, without the i-th server.
func (c *check) spares(i int, fault linkFault, isNew bool) error {
	var cl *client
	if isNew {
		var err error
		for range 3 { // a stall may spoil one
			if cl, err = c.open(c.k.TTL, func(cl *client) error {
				_, err := c.injected(cl.to(i), fault)
				return err
			}); err == nil {
				break
			}
			if unused := c.unused(); unused != nil {
				c.cannot("a new client doesn't get a lock that nobody has touched: %v", unused)
			}
		}
		if err != nil {
			return err
		}
	} else {
		cl = c.client()
		c.gets(cl)
		c.inject(cl.to(i), fault)
	}
	for began := time.Now(); ; time.Sleep(pause) {
		l, err := c.acquire(cl, newKey())
		if err != nil {
			return err
		}
		if r, ok := l.(renewer); ok {
			err = c.within(l.TTL()/2, without(r.Renew)).err // it may wait for all servers until its context ends
		}
		over := err != nil || l.Context().Err() != nil
		if c.free(l); !over {
			return nil
		}
		if time.Since(began) > c.limit() {
			return errors.New("its leases were over when it got them, or it couldn't renew them")
		}
	}
}

// freesWithout returns why nobody gets a lock whose holder released it while the i-th server refused connections.
func (c *check) freesWithout(i int) (err error) {
	a, b, key := c.lasting(), c.client(), newKey()
	l := c.take(a, key)
	c.inject(a.to(i), (*faults.Link).Refuse)
	for end := time.Now().Add(patience / 2); ; time.Sleep(5 * pause) { // the client may fail at once while it connects to another server
		if err = c.do(l.Release); err == nil || errors.Is(err, dlock.ErrLost) || time.Now().After(end) {
			break
		}
	}
	if held := c.wait(b, key).pass(c.limit()); held != nil {
		return fmt.Errorf("the release returned %s; then an acquisition: %w", fmt.Sprint(err), held)
	}
	return nil
}

// leavesNothing loses the i-th server's reply to a grant. It returns why, after the release, a client that the next server
// refuses doesn't get the lock, which the i-th may still have.
func (c *check) leavesNothing(i int) error {
	a, b, key := c.lasting(), c.client(), newKey()
	c.gets(a)
	heal := c.inject(a.to(i), (*faults.Link).LoseReplies)
	l, err := c.within(patience, acquiring(a, key)).granted()
	heal()
	if err != nil {
		return nil //nolint:nilerr // it needs that server
	}
	before := a.links[i].Messages()
	for range 3 { // it reconnects to all
		c.gets(a)
	}
	if a.links[i].Messages() == before { // it avoids that server for a while
		return nil
	}
	err = c.persistentRelease(l)
	c.gets(b)
	c.inject(b.to((i+1)%len(b.links)), (*faults.Link).Refuse)
	if err != nil || !c.gets(b) {
		return nil //nolint:nilerr // the release failed, or b needs that server
	}
	if err = c.wait(b, key).pass(c.limit()); err == nil || !c.gets(b) {
		return nil
	}
	return err
}

func (c *check) oneInCommon() {
	nodes := c.k.Service.Nodes
	common := len(nodes) / 2
	c.often(func() (sure bool) {
		a, key := c.lasting(), newKey()
		c.inject(&client{links: a.links[common+1:]}, (*faults.Link).Refuse)
		l, err := c.acquire(a, key)
		if err != nil {
			return true // it needs more servers
		}
		c.fault(scenarios.Step{Verb: "wipe", Target: nodes[common].Name})
		b := c.lasting()
		c.inject(&client{links: b.links[:common]}, (*faults.Link).Refuse)
		c.still(l, b, key, fmt.Sprintf("the only one of %d servers that two clients both reached had lost its data,", len(nodes)))
		defer c.free(l)
		return l.Context().Err() == nil // the other servers may wait for a lease before they vote
	})
}

func dataLoss(c *check) {
	if c.k.Service.Forget != nil {
		c.together(func() { c.lost("somebody had deleted the lock", c.forget) })
		c.fact = "" // Forget may have deleted the counter
	}
	nodes := c.k.Service.Nodes
	if len(nodes) < 3 {
		nodes = nil // one of two is no minority
	}
	for _, n := range nodes {
		c.often(func() (sure bool) {
			key := newKey()
			l := c.take(c.lasting(), key)
			c.fault(scenarios.Step{Verb: "wipe", Target: n.Name})
			defer c.free(l)
			return c.still(l, c.client(), key, "one of "+fmt.Sprint(len(nodes))+" servers had lost its data")
		})
	}
	if len(nodes)%2 == 1 {
		c.oneInCommon()
	}
	c.lost("the servers had lost their data", func(...string) { c.fault(scenarios.Step{Verb: "wipe", Target: scenarios.LockService}) })
}

func (c *check) forget(keys ...string) {
	for _, key := range keys {
		if err := c.do(func(ctx context.Context) error { return c.ask(func() error { return c.k.Service.Forget(ctx, key) }) }); err != nil {
			c.cannot("Service.Forget: %v", err)
		}
	}
}

func (c *check) lost(after string, lose func(keys ...string)) {
	stopped := counter{c: c, last: time.Now()}
	renewed := func(cl *client) (lasts bool) {
		for range 2 { // the first may have belonged to a session that was lost, too
			l, err := c.acquire(cl, newKey())
			if err != nil {
				return true
			}
			time.Sleep(l.TTL() + c.k.TTL)
			lasts = l.Context().Err() == nil
			if c.free(l); lasts {
				break
			}
		}
		return lasts
	}
	c.often(func() (sure bool) {
		keeper := c.times(3)
		c.connect(keeper)
		key, brief, known, queued := newKey(), newKey(), newKey(), newKey()
		old, told, early, other := c.take(c.lasting(), key), c.take(c.client(), brief), c.lasting(), c.client()
		c.free(c.take(early, known))
		c.take(c.times(3), queued)
		waiting := c.times(3) // it may poll at the end of a lease
		c.connect(waiting)
		waits := c.wait(waiting, queued)
		defer waits.stop()
		time.Sleep(5 * pause)
		lose(key, brief, known, queued)
		if c.wait(early, newKey()).pass(patience/5) != nil {
			c.client() // creates what the servers need, such as a table
		}
		goesOn := make(chan bool, 1)
		go func() {
			goesOn <- c.k.Service.NoRenew || renewed(keeper)
		}()
		kept := sync.OnceValue(func() bool { return <-goesOn })
		defer kept()
		c.comesFree(early, known, after+", for a client that had had the lock before,")
		served := make(chan error, 1)
		go func() { served <- waits.pass(c.limitOf(waiting)) }()
		later, err := c.acquire(early, key)
		if err != nil {
			if _, failed := c.try(other, key); errors.Is(failed, dlock.ErrHeld) && lasts(old, time.Now()) {
				c.cannot("after %s its holder had it still, or again", after)
			}
			c.blocked(key, "after %s nobody had got the lock in %v or more: %v", after, c.limit(), err)
			return true
		}
		if r, ok := later.(renewer); ok {
			var err error
			for range 3 { // it may have to reconnect
				if err = c.do(r.Renew); err == nil {
					break
				}
				time.Sleep(pause)
			}
			if err != nil { // last, since a new client may repair it
				if fresh := c.take(c.lasting(), newKey()); c.do(fresh.(renewer).Renew) == nil && lasts(later, time.Now()) {
					c.breaks("after %s, and a connected client's grant, its renewal failed three times: %v", after, err)
				}
			}
		}
		if !c.k.Service.NoTokens && later.Fence() <= old.Fence() {
			c.notes("after %s the next token was %d, and the one before %d: a store that checks tokens will refuse later holders until somebody raises the lock's counter", after, later.Fence(), old.Fence())
		}
		for range 3 {
			err = c.briefly(releasing(old)).err
			sure = c.still(later, other, key, after+", and a lease from before was released,")
			if err == nil || errors.Is(err, dlock.ErrLost) || c.isDecided() {
				break
			}
		}
		_ = c.persistentRelease(later) // a lock that can't release any more breaks the promise
		c.comesFree(other, key, after+", and a connected client had got the lock and released it,")
		if err := <-served; err != nil && c.freed(other, queued) {
			c.blocked(queued, "after %s one who waited for a lock hadn't got it in %v or more, and it was free: %v", after, c.limitOf(waiting), err)
		}
		if c.wait(early, brief).pass(c.limitOf(early)) != nil { // its holder may have renewed it since
			return sure
		}
		for end := time.Now().Add(c.limit()); lasts(told, time.Now()); time.Sleep(pause) {
			if time.Now().After(end) {
				c.breaks("a holder hadn't been told %v after %s and another client had got the lock", c.limit(), after)
				break
			}
		}
		stopped.see(!kept() && renewed(c.times(3)), "3 times the lease that a connected client had acquired after %s wasn't renewed; a new client's was", after)
		return sure && kept()
	})
}
