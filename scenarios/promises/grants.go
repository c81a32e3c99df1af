package promises

import (
	"context"
	"errors"
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
	for range 2 {
		a, b, key := c.client(), c.lasting(), newKey()
		_ = c.do(c.take(a, newKey()).Release) // it is connected
		heal := c.inject(a, holdReplies)
		late := make(chan result, 1)
		go func() {
			late <- c.within(c.limit(), func(ctx context.Context) (scenarios.Lease, error) { return a.TryAcquire(ctx, key) })
		}()
		for range looks { // until a has it
			time.Sleep(pause)
			l, err := c.try(b, key)
			if err != nil {
				break
			}
			_ = c.do(l.Release)
		}
		l := c.take(b, key)
		heal()
		got, err := (<-late).granted()
		if err == nil && got.Fence() > l.Fence() && lasts(l, time.Now()) {
			c.breaks("a grant whose reply was late had the token %d, and its successor, who still held the lock, had %d", got.Fence(), l.Fence())
		}
		_ = c.do(l.Release)
		if err == nil {
			break
		}
	}
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
