package redislock

import (
	"context"
	"errors"
	"math/rand/v2"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
)

// Queue waits in line.
//
// The queue is a Redis list, queue:{KEY}. The script that finds the lock held puts the waiter at its end, in the same
// round trip; the script that releases the lock hands it to the first waiter: it takes that one off the list, mints its
// token, makes it the owner, and then pushes the news to it over the one Pub/Sub connection that a Backend has for all its
// keys and waiters. So a section costs the queue one message on the critical path, and nobody asks in vain.
//
// What can go wrong, and what it costs:
//
//   - A waiter's process dies, or its connection breaks. The script asks the server whether anybody listens there, and goes
//     on to the next waiter: nothing is lost. In a Cluster a server can't tell, and the next case applies.
//   - A waiter is frozen or cut off, so that it still seems to listen. It is granted the lock, and its lease runs out after
//     Claim. Whoever asks then has all processes in the queue called, and strikes the waiters of those that don't answer
//     within 300 ms: however many dead there are, together they cost one Claim. One that was struck joins the queue again,
//     at its end.
//   - The holder dies. Its lease runs out; the first waiter is told at each renewal for how long it lasts, and asks when it
//     is over. Between a hand-over and its renewal the one that has become first doesn't know it; so the others ask, too:
//     at random after half a Claim to a Claim, or, if there are more than 2,000 (at a Claim of 10 s), so that all ask 200
//     times a second, up to every 30 s. One that then finds a lease that ends sooner asks at its end.
//   - The push is lost. That is a broken connection, and when it is there again every waiter asks. A connection on which
//     nothing is heard is tried after 1.5 s and replaced after as much again, and so is one over which the server knows of
//     no subscription, as when it leads to a server that was the master once. Within a Cluster, whose bus may lose a
//     message, it takes a Claim until a waiter asks by itself.
//   - Waiters give up. They leave the queue, a thousand with one script, which is tried until the server serves or the
//     Backend is closed; what they were granted meanwhile is handed on.
//   - The reply to a request is lost. The waiter asks whether it stands in the queue already. A request that arrives so
//     late that its sender has gone puts an orphan into the queue; its process hands on what the orphan is granted. If it
//     finds the lock free, it takes it for its TTL, as in every mode.
//   - A Cluster moves the slot. Held locks are renewed and released; who wants one waits until all keys are there.
//   - Redis restarts. Waiters ask for up to their TTL until it is back; the queue is as durable as the locks.
//   - Everybody dies. The list expires two minutes after anyone has asked.
//
// A grant that is pushed counts from when its waiter has asked last, for that was before. If that is more than half a Claim
// ago, the waiter asks again, and the lease starts anew: one round trip more, while everybody waits. So a waiter that was
// frozen finds out, when it wakes, whether the lock is still its own.
type Queue struct {
	// Max is how many may wait for a key, 10,000 by default; one more is refused with [dlock.ErrQueueFull].
	Max int
	// Claim is the TTL of a lock that is handed over, until its first renewal: 10 s by default, as [dlock.DefaultTTL], and
	// never longer than the TTL. So a stall of Redis ends a handed-over lease no sooner than another; a shorter Claim gives
	// that up, and has the others wait less for a dead waiter. It should be many times a round trip.
	Claim time.Duration
}

const (
	longestLook = 30 * time.Second // a waiter asks at least this often: well within the two minutes for which a queue is kept
	looks       = 200              // how often all waiters of a key together ask per second, if they are many
	lookPause   = 20 * time.Millisecond
)

// lease is how long a grant to a waiter lasts until it is renewed.
func (b *Backend) lease(ttl time.Duration) time.Duration { return min(b.o.Queue.Claim, ttl) }

// entry is what stands for a waiter in the queue before its name: its first lease in ms, and the channel to tell it.
func (b *Backend) entry(ttl time.Duration) string {
	if ttl >= b.o.Queue.Claim {
		return b.inbox.entry
	}
	return strconv.FormatInt(ttl.Milliseconds(), 10) + " " + b.inbox.channel + " "
}

// queue is Acquire in ModeQueue.
func (b *Backend) queue(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	if !b.inbox.isOpen() { // only those that have to wait need a subscription
		a, err := b.settled(ctx, b.c, r, place{})
		if err != nil || a.token != 0 {
			return a.grant(r), err
		}
		if err := b.inbox.open(ctx); err != nil {
			return dlock.Grant{}, err
		}
	}
	w, err := b.inbox.join(r)
	if err != nil {
		return dlock.Grant{}, err
	}
	defer b.inbox.drop(w)
	p := place{entry: b.entry(r.TTL)}
	a, err := b.settled(ctx, once{b.c}, r, p)
	p.again = true
	if err != nil && !answered(err) && ctx.Err() == nil && !b.isClosed() {
		a, err = b.settled(ctx, b.c, r, p)
	}
	if err != nil || a.token != 0 {
		return a.grant(r), err
	}
	return b.await(ctx, r, p, w, a)
}

// settled is ask for one that waits: while a Cluster moves the slot, keys that a script names may be on two servers, and it
// is refused. And it heeds the answer's word on whether the asker is heard.
func (b *Backend) settled(ctx context.Context, c redis.Scripter, r dlock.Request, p place) (answer, error) {
	for {
		session := b.inbox.current()
		a, err := b.ask(ctx, c, r, p)
		if err == nil && a.unheard {
			b.inbox.unheard(session)
		}
		if !redis.HasErrorPrefix(err, tryAgain) {
			return a, err
		}
		if err := b.wait(ctx, lookPause+rand.N(lookPause)); err != nil {
			return a, err
		}
	}
}

const tryAgain = "TRYAGAIN "

// await waits in the queue after the answer a.
func (b *Backend) await(ctx context.Context, r dlock.Request, p place, w *waiter, a answer) (g dlock.Grant, err error) {
	defer func() { //nolint:contextcheck // ctx's end is a reason to leave the queue
		if err != nil && !errors.Is(err, dlock.ErrQueueFull) {
			b.inbox.mu.Lock()
			defer b.inbox.mu.Unlock()
			b.inbox.leaves(r.Key, r.Owner, r.TTL)
		}
	}()
	var failing time.Time // since when asking fails
	ask := time.Now().Add(b.pause(a))
	for {
		n, err := b.inbox.hear(ctx, w, ask)
		switch {
		case err != nil:
			return g, err
		case n.first:
			ask = time.Now().Add(until(n.left))
			continue
		case n.token != 0 && n.token <= a.last:
			continue // a grant that was over when the server said that the lock is held
		}
		if g := b.handed(r, a, n); g.Fence != 0 {
			return g, nil
		}
		next, err := b.settled(ctx, b.c, r, p)
		switch {
		case err == nil && next.token != 0:
			return next.grant(r), nil
		case err == nil:
			a, failing = next, time.Time{}
			ask = time.Now().Add(b.pause(a))
			continue
		case failing.IsZero():
			failing = time.Now()
		}
		if answered(err) || ctx.Err() != nil || b.isClosed() || time.Since(failing) > r.TTL {
			return g, err
		}
		ask = time.Now().Add(lookPause + rand.N(lookPause))
	}
}

// handed is the grant that a waiter whose last answer is a has been handed, unless so much of its lease may be over that
// it had better ask.
func (b *Backend) handed(r dlock.Request, a answer, n news) dlock.Grant {
	lease := b.lease(r.TTL)
	if n.token == 0 || time.Since(a.asked) > lease/2 {
		return dlock.Grant{}
	}
	g := dlock.Grant{Key: r.Key, Owner: r.Owner, Fence: n.token, TTL: r.TTL, Start: a.asked}
	if lease < r.TTL {
		g.Provisional = lease
	}
	return g
}

// pause is how long a waiter goes without asking after the answer a, if nothing is heard.
func (b *Backend) pause(a answer) time.Duration {
	if a.place == 1 && a.left >= 0 {
		return until(a.left)
	}
	d := min(max(b.o.Queue.Claim, time.Duration(a.length)*time.Second/looks), longestLook)
	d = d/2 + rand.N(d/2+1)
	if a.left >= 0 { // many don't all ask when the lease ends
		d = min(d, until(a.left)+rand.N(time.Duration(a.length)*time.Millisecond))
	}
	return d
}

// until is when to ask after a lease that lasts for left: it is good to the end of its last millisecond.
func until(left time.Duration) time.Duration { return min(max(left, 0)+time.Millisecond, longestLook) }

// answered reports whether err is an answer that will be the same the next time, unlike a broken connection or a server
// that is starting up.
func answered(err error) bool {
	if errors.Is(err, dlock.ErrQueueFull) || errors.Is(err, dlock.ErrInvalid) || errors.Is(err, dlock.ErrClosed) {
		return true
	}
	reply, ok := errors.AsType[redis.Error](err)
	if !ok {
		return false
	}
	code, rest, _ := strings.Cut(reply.Error(), " ")
	switch code {
	case "ERR":
		return !strings.HasPrefix(rest, "max number of clients")
	case "WRONGTYPE", "NOPERM", "NOAUTH", "OOM", "CROSSSLOT":
		return true
	}
	return false
}
