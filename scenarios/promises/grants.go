package promises

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/scenarios"
)

func exclusive(c *check) {
	c.refused(c.lasting(), c.lasting(), "two clients")
	c.barge()
	for range 4 {
		if !c.isDecided() {
			c.takeOver()
		}
	}
	c.failedTries()
	c.races()
}

// barge has one contender's tries meet the others' waits.
func (c *check) barge() {
	key, meet, barger, done := newKey(), c.overlap(pause/4), c.lasting(), make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for n := 0; n < 10; time.Sleep(pause / 4) { // no more, so that others get the lock
			if l, err := c.try(barger, key); err == nil {
				meet(l)
				c.free(l)
				n++
			}
			select {
			case <-done:
				return
			default:
			}
		}
	})
	c.contend(key, meet, c.lasting(), c.lasting(), c.lasting(), c.lasting(), c.lasting(), c.lasting())
	close(done)
	wg.Wait()
}

// races: a call that another one's overtakes may fail in another way than one that finds the lock held.
func (c *check) races() {
	const rounds = 8
	clients := []*client{c.lasting(), c.lasting(), c.lasting(), c.lasting(), c.lasting(), c.lasting()}
	c.connect(clients...)
	type loser struct {
		*client
		says string
	}
	c.thrice(func() string {
		for i := range rounds {
			var failed atomic.Pointer[loser]
			var granted atomic.Bool
			key, call := newKey(), []func(*client, string) call{trying, acquiring}[i%2]
			c.each(len(clients), func(i int) {
				asked := time.Now()
				l, err := c.within(patience, call(clients[i], key)).granted()
				switch {
				case err == nil:
					granted.Store(true)
				case !errors.Is(err, dlock.ErrHeld) && time.Since(asked) < tryLimit/10:
					failed.Store(&loser{clients[i], err.Error()})
				}
				c.free(l)
			})
			if lost := failed.Load(); lost != nil && granted.Load() { // otherwise they may have got a part of the servers each
				l, err := c.try(lost.client, newKey())
				c.free(l)
				return when(err == nil, "three times, when several clients asked for a lock at once and one got it, another's call failed with %q, "+
					"which doesn't wrap dlock.ErrHeld", lost.says)
			}
		}
		return ""
	})
}

func (c *check) failedTries() {
	dead, b, key, untried := c.client(), c.client(), newKey(), newKey()
	c.take(dead, key)
	c.take(dead, untried)
	c.inject(dead, (*faults.Link).Cut)
	l, err := c.tryFor(c.limit(), c.k.TTL/5, b, key)
	if c.free(l); err == nil {
		return
	}
	l, err = c.try(b, untried)
	c.free(l)
	if errors.Is(err, dlock.ErrHeld) { // perhaps only waiters detect expiry
		if err = c.wait(b, untried).pass(c.limitOf(b)); err == nil {
			return
		}
	}
	if err != nil {
		c.unsure("nobody gets the locks of a holder who was cut off: %v", err)
		return
	}
	l, err = c.tryFor(c.limit(), c.k.TTL/5, b, key) // the leases may expire one by one, or a try may get one late
	switch c.free(l); {
	case err == nil:
	case errors.Is(err, dlock.ErrHeld):
		c.breaks("%v after a holder was cut off, its lock that TryAcquire had polled was held, and the other free", c.limit())
	default:
		c.unsure("TryAcquire of the lock of a holder who was cut off: %v", err)
	}
}

func oneClient(c *check) {
	a, other, key := c.lasting(), c.client(), newKey()
	l := c.take(a, key)
	if !c.within(5*pause, acquiring(a, key)).returned {
		c.breaks("an acquisition of a lock that its own client held hadn't returned %v after its context had ended", patience)
	}
	c.stays(l, other, key, "a cancelled wait of its holder's client")
	c.free(l)
	c.refused(a, a, "two callers of one client")
	c.siblings(a)
	c.contend(newKey(), c.overlap(pause/4), a, a, a, a, a, a)
}

// siblings checks that callers of a client that wait for a held key don't keep others from returning, nor end their waits.
func (c *check) siblings(a *client) {
	key := newKey()
	l := c.take(a, key)
	defer c.free(l)
	waiter := c.wait(a, key)
	time.Sleep(5 * pause)
	c.thrice(func() string {
		return c.slowTry(a, key, "three times, while another caller of its client waited for a held lock, TryAcquire of it waited for more than %v, too")
	})
	waiter.stop()
	b := c.client()
	for event, disturb := range map[string]func(leaves wait){
		"another caller's of its client had": func(leaves wait) { leaves.stop() },
		"its client's try had been refused":  func(wait) { _, _ = c.try(a, key) },
	} {
		c.thrice(func() string {
			leaves := c.wait(a, key)
			defer leaves.stop()
			time.Sleep(2 * pause)
			stays, another := c.wait(a, key), c.wait(b, key)
			defer stays.stop()
			defer another.stop()
			time.Sleep(5 * pause)
			if stays.failed.Load() != nil { // one client may not wait twice
				return ""
			}
			disturb(leaves)
			time.Sleep(5 * pause)
			failed := stays.failed.Load()
			return when(failed != nil && another.failed.Load() == nil,
				"three times an acquisition whose context hadn't ended returned %q when %s; another client's went on", failed, event)
		})
	}
}

// takeOver: one contender may take a lock that another, which saw the same expired lease, has just got.
func (c *check) takeOver() {
	const locks = 16
	dead, slow := c.client(), c.contenders(pause)
	var keys []string
	for range locks {
		keys = append(keys, newKey())
		c.take(dead, keys[len(keys)-1])
	}
	c.inject(dead, (*faults.Link).Cut)
	var wg sync.WaitGroup
	defer wg.Wait()
	for i, key := range keys {
		meet := c.overlap(5 * pause)
		for j, cl := range slow {
			wg.Go(func() {
				time.Sleep(time.Duration(i*j) * pause / 4)
				l, err := c.acquire(cl, key)
				if err == nil {
					meet(l)
					c.free(l)
				} else if c.gets(cl) { // otherwise its messages take too long
					c.blocked(key, "one of %d who contended for a lock whose lease had run out hadn't got it in %v or more: %v", len(slow), c.limit(), err)
				}
			})
		}
	}
}

func (c *check) refused(a, b *client, who string) {
	other, key := c.client(), newKey()
	l := c.take(a, key)
	got, err := c.try(b, key)
	for range 3 {
		if err == nil || errors.Is(err, dlock.ErrHeld) {
			break
		}
		// A client's own time limit may be too short for the machine: then it is too short for an unused lock too.
		unused, failed := c.try(b, newKey())
		if failed != nil {
			c.unsure("TryAcquire of a lock that nobody has touched fails: %v", failed)
			break
		}
		c.free(unused)
		got, err = c.try(b, key)
	}
	now := time.Now()
	if errors.Is(err, dlock.ErrHeld) {
		c.thrice(func() string {
			return c.slowTry(b, key, "three times TryAcquire of a held lock waited for more than %v; of an unused one it returned at once")
		})
	}
	switch {
	case err == nil && lasts(l, now):
		c.breaks("%s held the lock at once", who)
	case errors.Is(err, dlock.ErrHeld):
		c.still(l, other, key, "a try that was refused")
	case err != nil && !c.isDecided():
		c.breaks("TryAcquire of a held lock returned %q, which doesn't wrap dlock.ErrHeld: if it is the library's error for that, set Adapter.Held", err)
	}
	c.free(got)
	if err := c.do(l.Release); err != nil && !errors.Is(err, dlock.ErrLost) { // the lease may last longer than anybody waits
		c.unsure("Release of a held lock: %v", err)
		return
	}
	c.comesFree(c.client(), key, "a failed try, and the holder's release,") // b may wait for a whole lease
	c.comesFree(b, key, "its failed try, and the holder's release,")
	if l, err := c.try(b, key); err == nil && c.do(l.Release) == nil {
		c.comesFree(other, key, "a try that was refused, and the release of what its client's next try had got,")
	}
}

// tryLimit is how long a TryAcquire may wait.
const tryLimit = 3 * time.Second

func (c *check) slowTry(cl *client, key, format string) (says string) {
	took := func(key string) time.Duration {
		asked := time.Now()
		l, _ := c.try(cl, key)
		c.free(l)
		return time.Since(asked)
	}
	return when(took(key) > tryLimit && took(newKey()) < tryLimit/10, format, tryLimit)
}

func (c *check) contend(key string, meet func(l scenarios.Lease), clients ...*client) {
	const rounds = 10
	lease := long * c.k.TTL
	if c.k.Fixed {
		lease = c.k.TTL
	}
	limit := 2*lease + patience
	var wg sync.WaitGroup
	var left atomic.Pointer[client]
	for _, cl := range clients {
		wg.Go(func() {
			for range rounds {
				l, err := c.persist(limit, cl, key)
				if err != nil {
					left.Store(cl)
					return
				}
				meet(l)
				if c.do(l.Release) != nil && c.isDecided() { // the others may wait for a lease each time
					return
				}
			}
		})
	}
	wg.Wait()
	if cl := left.Load(); cl != nil && !c.isDecided() {
		if err := c.wait(cl, key).pass(limit); err != nil && c.gets(cl) { // its messages aren't too slow
			c.blocked(key, "one of %d contenders hadn't got the lock after %v, though the others had finished: %v", len(clients), limit, err)
		}
		c.unsure("one of %d contenders got no lock within %v", len(clients), limit)
	}
}

// slow delays cl's replies, so that much happens between two messages of a call.
func (c *check) slow(by time.Duration, cl *client) *client {
	if by > 0 {
		c.inject(cl, delaying(by))
	}
	return cl
}

func (c *check) contenders(by time.Duration) (all []*client) {
	for i := range time.Duration(4) {
		all = append(all, c.slow((i+1)*by, c.lasting()))
	}
	return all
}

// overlap returns a meet for contend, which checks that no two leases overlap.
func (c *check) overlap(stay time.Duration) (meet func(l scenarios.Lease)) {
	var inside atomic.Pointer[scenarios.Lease]
	return func(l scenarios.Lease) {
		// A lease that has expired by now doesn't replace its successor's.
		until := l.Until()
		if !inside.CompareAndSwap(nil, &l) && l.Context().Err() == nil && (until.IsZero() || time.Now().Before(until)) {
			inside.Store(&l)
		}
		time.Sleep(stay)
		// After its release a lease is over.
		if !inside.CompareAndSwap(&l, nil) && lasts(l, time.Now()) {
			c.breaks("two contenders held the lock at once")
		}
	}
}

func tokensIncrease(c *check) {
	a, b, key := c.client(), c.client(), newKey()
	idle := newKey()
	early := c.take(a, idle)
	c.free(early)
	for _, unit := range []time.Duration{time.Second, time.Millisecond, time.Microsecond, time.Nanosecond} {
		if at := time.Unix(0, int64(early.Fence())*int64(unit)); time.Since(at).Abs() < time.Minute { //nolint:gosec // what doesn't fit is no time
			c.notes("the token %d is a clock's time in units of %v: if the clock is set back, later holders may get smaller ones", early.Fence(), unit)
		}
	}
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
		_ = c.do(next(a, "a release by the same client").Release)
		_ = c.do(next(b, "a release by another client").Release)
	}
	old := next(a, "a release")
	token := old.Fence()
	for range 3 {
		_ = c.renewByHand(old)
	}
	c.drop(c.within(5*pause, acquiring(b, key)))
	if last = old.Fence(); last < token {
		c.breaks("a lease had the token %d, and %d after renewals", token, last)
	}
	token = last
	heal := c.inject(a, (*faults.Link).Cut)
	_ = c.do(next(b, "a lease that ran out").Release)
	heal()
	c.gets(a)                                    // it reconnects
	if again, err := c.try(a, key); err == nil { // it may keep a lock of its own until the release
		if old.Fence() != token {
			c.breaks("a lease that ran out had the token %d, and %d when its client had got the lock again", token, old.Fence())
		}
		if again.Fence() <= last {
			c.breaks("a token of %d was followed by %d after its client's lease ran out", last, again.Fence())
		}
		last = max(last, again.Fence())
		c.free(again)
	}
	for i := range a.links {
		if len(a.links) < 3 { // one of them can't be spared
			break
		}
		few := c.client()
		c.inject(few.to(i), (*faults.Link).Refuse)
		l, err := c.try(few, newKey())
		if err != nil {
			continue
		}
		c.free(l)
		for range 2 {
			_ = c.do(next(few, "another grant").Release)
		}
		_ = c.do(next(b, "grants by all servers but one").Release)
	}

	// A token that isn't minted with its grant is greater than the successor's if minted later, and less if minted sooner.
	for _, sooner := range []bool{false, true} {
		a, b, key := c.client(), c.lasting(), newKey()
		c.connect(a)
		heal := c.inject(a, holdReplies)
		late := c.begin(c.limit(), trying(a, key))
		for range looks / 4 { // until a has it, or has sent what comes before
			time.Sleep(pause)
			l, err := c.try(b, key)
			if err != nil {
				break
			}
			c.free(l)
		}
		l := c.take(b, key)
		if sooner {
			c.free(l)
		}
		heal()
		got, err := (<-late).granted()
		now := time.Now()
		switch {
		case err != nil:
		case got.Fence() == l.Fence(): // however late; the token may have been read after the grant
			c.breaks("two grants had the token %d: that of a client whose replies were late, and its successor's", got.Fence())
		case !sooner && got.Fence() > l.Fence() && lasts(l, now):
			c.breaks("a grant whose reply was late had the token %d, and its successor, who still held the lock, had %d", got.Fence(), l.Fence())
		case sooner && got.Fence() <= l.Fence() && !got.Until().IsZero() && lasts(got, now): // a notification may be late, too
			c.breaks("a client whose replies were late was granted the lock with token %d, and another had had %d before", got.Fence(), l.Fence())
		}
		if !sooner {
			c.free(l)
		}
		c.free(got)
	}
	c.lateRequest()
	contenders := c.contenders(pause / 2)
	if own := c.lasting(); !c.k.Service.Reentrant { // its callers may hand over their lease
		contenders = append(contenders, own, own)
	}
	var mu sync.Mutex
	var greatest uint64
	c.contend(newKey(), func(l scenarios.Lease) {
		mu.Lock()
		defer mu.Unlock()
		if l.Fence() <= greatest && lasts(l, time.Now()) {
			c.breaks("a contender got the token %d after another had got %d", l.Fence(), greatest)
		}
		greatest = max(greatest, l.Fence())
	}, contenders...)
	c.close(a, patience) // what it knows of its keys may go
	if again := c.take(b, idle); again.Fence() <= early.Fence() {
		c.breaks("after a lock hadn't been used for a while its token was %d, and the one before %d", again.Fence(), early.Fence())
	}
}

func (c *check) lateRequest() {
	a, b, key := c.lasting(), c.lasting(), newKey()
	c.connect(a)
	heal := c.inject(a, (*faults.Link).HoldRequests)
	late := c.begin(c.limit(), trying(a, key))
	time.Sleep(pause)
	l := c.take(b, key)
	c.free(l)
	heal()
	got, err := (<-late).granted()
	if err != nil {
		return
	}
	if got.Fence() <= l.Fence() && lasts(got, time.Now()) {
		c.breaks("a client whose request was late was granted the lock with token %d, and another had had %d before", got.Fence(), l.Fence())
	}
	c.free(got)
}

func keysIndependent(c *check) {
	a, b := c.lasting(), c.lasting()
	for _, more := range []string{"/a", "a", "-1", ":a"} {
		short := newKey()
		for _, keys := range [][2]string{{short, short + more}, {short + more, short}} {
			c.thrice(func() string {
				l := c.take(a, keys[0])
				got, err := c.within(c.limit(), acquiring(b, keys[1])).granted()
				c.free(l)
				if err == nil {
					c.still(got, a, keys[1], fmt.Sprintf("the release of %q", keys[0]))
					c.free(got)
					return ""
				}
				asked := time.Now()
				free, failed := c.within(c.limit(), acquiring(b, keys[1])).granted()
				took := time.Since(asked)
				c.free(free)
				if failed != nil || 4*took > c.limit() {
					c.cannot("while %q was held nobody got %q: %v; then that took %v: %v", keys[0], keys[1], err, took, failed)
				}
				return fmt.Sprintf("three times, while %q was held, nobody got %q: %v", keys[0], keys[1], err)
			})
		}
	}
	c.often(func() (sure bool) {
		first, second := newKey(), newKey()
		l := c.take(a, first)
		also := c.take(a, second)
		sure = c.still(l, b, first, "its holder's grant of another key")
		c.free(also)
		defer c.free(l)
		return c.still(l, b, first, "its holder's release of another key") && sure
	})
	c.releasedAtOnce(a, c.client())
	base := newKey()
	c.thrice(func() string { // a client may mistake its own late request for another's
		refused := c.refusedWhileOthersHeld(base, a, b)
		return when(refused != "", "three times, while other keys were held, nobody got %.80q", refused)
	})
}

// releasedAtOnce: releases of a client may share a message.
func (c *check) releasedAtOnce(a, other *client) {
	var keys [4]string
	var leases [4]scenarios.Lease
	for i := range keys {
		keys[i] = newKey()
		leases[i] = c.take(a, keys[i])
	}
	defer c.inject(a, delaying(pause))()
	c.each(len(keys), func(i int) {
		if c.do(leases[i].Release) == nil {
			c.comesFree(other, keys[i], "one of four releases of different keys at once")
		}
	})
}

// refusedAgain reports whether cl is refused key three more times but gets unused locks. A slow machine may cause one refusal.
func (c *check) refusedAgain(cl *client, key string) bool {
	for range 3 {
		for _, k := range []string{key, newKey()} {
			l, err := c.try(cl, k)
			c.free(l)
			if k == key && !errors.Is(err, dlock.ErrHeld) || k != key && err != nil {
				return false
			}
		}
	}
	return true
}

// refusedWhileOthersHeld has the clients hold many keys, and returns one that was refused but is free, or "".
func (c *check) refusedWhileOthersHeld(base string, clients ...*client) string {
	held, refused := map[string]scenarios.Lease{}, ""
	keys := []string{"/" + base + "x", " " + base + "x", "y/" + base + "x", "y:" + base + "x"}
	for _, more := range append(collisions(base), "/x", ":x", ".x", "-x", "_x", " x", "+x", "x", "/X", "//x", "/x/", "/./x", "/y/../x", "%2Fx", "{x}", "{y}", "x ", "Aa", "BB",
		"01", "e", "é", "e\u0301", "\x00y", "\x00z", "\xfey", "\xffy", "", "\n", "\r", "\t", "%", "*",
		"?a", "?b", "#a", "#b", "Ab", "BA", ",x", ";x", "=x", "&x", "|x", "@x", "$x", "\\x", "'x", "\"x", "🍣", "🍺",
		// What a lock may keep beside its key.
		":fence", ":token", ":counter", ":lock", "/lock", ".lock", "-lock", "_lock", ":owner", ":queue", ":waiters", ":channel", ":timeout") {
		keys = append(keys, base+more)
	}
	for _, name := range []string{"fence", "token", "counter", "lock", "owner", "queue", "waiters", "channel", "timeout"} {
		keys = append(keys, name+":"+base+"x", name+"/"+base+"x")
	}
	for _, n := range []int{300, 512, 1024} {
		keys = append(keys, base+strings.Repeat("x", n), base+strings.Repeat("x", n+1))
	}
	const small = 300 // if keys share few locks, two of them share one
	for i := range small {
		keys = append(keys, base+strconv.Itoa(i))
	}
	end := time.Now().Add(2 * patience)
	for i, key := range keys {
		if i > len(keys)-small && time.Now().After(end) {
			break
		}
		l, err := c.try(clients[i%2], key)
		if err == nil {
			held[key] = l
			if i >= 160 && i%10 == 0 && !c.k.Service.Reentrant { // each may remember the last few of its own
				c.hasAlready(clients[i%2], keys[i-160], held[keys[i-160]])
			}
		} else if errors.Is(err, dlock.ErrHeld) && c.refusedAgain(clients[i%2], key) {
			refused = key
			break
		}
	}
	released := map[string]error{}
	for n := range clients {
		for i, key := range keys {
			l, ok := held[key]
			if !ok || i%2 != n {
				continue
			}
			if n == 1 && i < len(keys)-small { // the first client has released its own
				c.still(l, clients[0], key, "the release of other keys")
			}
			released[key] = c.do(l.Release)
		}
	}
	for i, key := range keys[:len(keys)-small+100] { // CRC-32 of fewer that differ in two digits may have no byte in common with others'
		err, ok := released[key]
		if !ok || !c.refusedAgain(clients[0], key) {
			continue
		}
		if err != nil { // the servers may have failed it
			err = c.persistentRelease(held[key])
		}
		if err == nil || c.do(c.take(clients[i%2], newKey()).Release) == nil {
			c.comesFree(c.client(), key, fmt.Sprintf("the release of %.80q, while its client held others, returned \"%v\",", key, err))
		}
		break
	}
	if refused == "" {
		return ""
	}
	l, err := c.try(clients[0], refused)
	if before, after, _ := strings.Cut(refused, base); errors.Is(err, dlock.ErrHeld) {
		c.taken(before, base, after)
	}
	if err != nil {
		return ""
	}
	c.free(l)
	return refused
}

func (c *check) hasAlready(cl *client, key string, l scenarios.Lease) {
	again, err := c.try(cl, key)
	if l != nil && err == nil && lasts(l, time.Now()) {
		c.breaks("a client that held %.80q and many others was granted it again", key)
	}
	c.free(again)
}

// taken detects a key that the lock of base uses for itself.
func (c *check) taken(before, base, after string) {
	cl, key := c.lasting(), before+base+after
	l, err := c.try(cl, before+newKey()+after)
	if err != nil { // an adapter may say so of any key that its lock can't have
		return
	}
	c.free(l)
	limit := c.limitOf(cl) // longer than a lease that its own late request may have got
	c.wait(cl, key).must(limit, "after a grant of %q nobody had got %q in %v or more, which nobody held", base, key, limit)
}
