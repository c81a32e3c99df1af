package redislock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/jitter"
	"github.com/fencelab/fencelab/internal/redisscript"
)

// Queue is a FIFO queue: a Redis list. The script that finds the lock held appends the waiter. The script that releases the lock
// pops the first waiter, mints its token, makes it the owner, and publishes the grant to its Backend's one Pub/Sub connection.
//
// What can fail, and how long it delays the waiters:
//
//   - A waiter's process dies, or its connection breaks: no delay. The script skips waiters that aren't subscribed. In a Cluster
//     a server can't tell, and the next case applies.
//   - Waiters are frozen or cut off but still appear subscribed: one HandoffTTL for all of them, however many, plus less than a
//     second. The first is granted the lock for a HandoffTTL. The next poll calls the roll: waiters of processes that don't poll
//     within 300 ms are removed, and rejoin at the end.
//   - The holder dies. The first waiter polls when the lease is over; renewals, and waiters ahead of it that leave, tell it when.
//     After a hand-over, until the next renewal, all waiters poll, each after half to one HandoffTTL at random; if there are
//     many, about 270 times a second in total, but each at least every 30 s, and one of each process once a HandoffTTL.
//   - A notification is lost with its connection. Every waiter polls over the next one. A connection is pinged after 2 s of
//     silence and replaced 2 s later; so is one to another server than the scripts use, as after a failover. A Cluster's bus may
//     lose a message, which costs up to a HandoffTTL.
//   - Waiters give up. They leave by a script, and hand over what they were granted. One goroutine for each key retries it until the
//     server responds, for two minutes at most.
//   - A request arrives after its sender has gone. The orphaned waiter's process hands over what it is granted, except a lock
//     that was free, which stays locked for a TTL.
//   - Redis restarts. Waiters retry for about their TTL, at most 2 s or a quarter of it apart, whichever is less. The queue is as
//     durable as the locks.
//
// A handed-over lease counts from its waiter's last poll. If that is more than half a HandoffTTL ago, the waiter polls first,
// which restarts the lease.
type Queue struct {
	// Max is how many may wait for a key, 10,000 by default; one more is refused with [dlock.ErrQueueFull].
	Max int
	// HandoffTTL is the TTL of a handed-over lock until its first renewal: 10 s by default, and never longer than the TTL. A
	// shorter one makes a dead waiter cost less. It should be many times a round trip: it counts from the waiter's last poll, so
	// a stall of Redis at the hand-over may end the lease after half of it.
	HandoffTTL time.Duration
}

const (
	longestPause = 30 * time.Second      // a waiter polls at least this often
	kept         = 2 * time.Minute       // how long the scripts keep a queue that nobody polls
	pollRate     = 200                   // polls per second of all waiters of a key, at least, if many
	manyWait     = 100                   // one waiter of each process polls as if no more than that waited for the key
	retryPause   = 20 * time.Millisecond // a poll's doubles with each try
	longestRetry = time.Second
)

func (b *Backend) handoff(ttl time.Duration) time.Duration { return min(b.o.Queue.HandoffTTL, ttl) }

func (b *Backend) entryPrefix(ttl time.Duration) string {
	return strconv.FormatInt(b.handoff(ttl).Milliseconds(), 10) + " " + b.sub.channel + " "
}

func (b *Backend) queue(ctx context.Context, r dlock.Request) (g dlock.Grant, err error) {
	opens := !b.sub.isOpen()
	if opens { // only waiters need a subscription
		a, err := b.settled(ctx, r, outside)
		if err != nil || a.token != 0 {
			return a.grant(r), err
		}
		if err := b.sub.open(ctx); err != nil {
			return g, err
		}
	}
	w, err := b.sub.join(r)
	if err != nil {
		return g, err
	}
	defer b.sub.drop(w)
	a, err := b.settled(ctx, r, joining)
	if err != nil && !answered(err) && ctx.Err() == nil && b.open.Err() == nil {
		w.late = true
		a, err = b.settled(ctx, r, queued)
	}
	full := errors.Is(err, dlock.ErrQueueFull)
	if err != nil && !full || a.token != 0 {
		return a.grant(r), err
	}
	if err == nil {
		g, err = b.await(ctx, r, w, a)
		full = errors.Is(err, dlock.ErrQueueFull)
	}
	if err != nil && (!full || w.late) {
		b.sub.mu.Lock()
		defer b.sub.mu.Unlock()
		l := b.sub.scheduleLeave(r.Key, r.Owner, r.TTL) //nolint:contextcheck // ctx's end is a reason to leave the queue
		l.last[r.Owner] = !w.late && !opens             // the client library may have repeated the request outside, and the first arrive last
	}
	return g, err
}

// settled polls until the script's keys are on one server: a Cluster that moves their slot refuses the script.
func (b *Backend) settled(ctx context.Context, r dlock.Request, p phase) (answer, error) {
	redirects := 0
	for pause := retryPause; ; pause = min(2*pause, longestRetry) {
		a, err := b.poll(ctx, r, p)
		if err == nil && a.position > 0 && a.unheard {
			b.sub.unheard(a.at)
		}
		switch {
		case tryAgain(err):
			redirects = 0
		case redirected(err) && redirects < 3: // a redis.Client follows none, however often it tries
			redirects++
		default:
			return a, err
		}
		if _, err := b.wait(ctx, pause+jitter.N(pause), nil); err != nil {
			return a, err
		}
	}
}

// tryAgain and redirected report whether a Cluster refused a script because it moves the slot, or has just moved it, after all
// redirects that go-redis follows.
func tryAgain(err error) bool { return err != nil && redis.HasErrorPrefix(err, "TRYAGAIN ") }

func redirected(err error) bool {
	return err != nil && (redis.HasErrorPrefix(err, "MOVED ") || redis.HasErrorPrefix(err, "ASK "))
}

func (b *Backend) await(ctx context.Context, r dlock.Request, w *waiter, a answer) (g dlock.Grant, err error) {
	var failing time.Time // since when polls fail
	var retry time.Duration
	next := time.Now().Add(b.pause(w, a))
	for {
		n, err := b.wait(ctx, time.Until(next), w.notices)
		switch {
		case err != nil:
			return g, err
		case n.first && failing.IsZero(): // else a poll is due, which the server may answer now
			next = time.Now().Add(until(n.left))
			continue
		case n.token != 0 && n.token <= a.last:
			continue // a grant that was over when the server said that the lock is held
		case n.token != 0 && time.Since(a.at) <= b.handoff(r.TTL)/2:
			a.token = n.token
			g := a.grant(r)
			if handoff := b.handoff(r.TTL); handoff < r.TTL {
				g.Provisional = handoff
			}
			return g, nil
		}
		later, err := b.settled(ctx, r, polling) // also if too much of a handed-over lease may have passed
		if err == nil && later.token != 0 {
			return later.grant(r), nil
		}
		if err == nil {
			a, failing, retry, next = later, time.Time{}, 0, time.Now().Add(b.pause(w, later))
			continue
		}
		w.late = w.late || !answered(err)
		failing = cmp.Or(failing, time.Now())
		if answered(err) || ctx.Err() != nil || b.open.Err() != nil || time.Since(failing) > r.TTL {
			return g, err
		}
		// All waiters retry, and must not swamp a server that starts.
		retry = min(max(2*retry, retryPause), max(r.TTL/8, retryPause), longestRetry)
		next = time.Now().Add(retry + jitter.N(retry))
	}
}

func (b *Backend) pause(w *waiter, a answer) time.Duration {
	if a.position == 1 && a.left >= 0 {
		return until(a.left)
	}
	length := time.Duration(a.length)
	if length > manyWait && b.sub.watches(w) { // most of the others may be dead
		length = manyWait
	}
	d := min(max(b.o.Queue.HandoffTTL, length*time.Second/pollRate), longestPause)
	d = d/2 + jitter.N(d/2+1)
	if a.left >= 0 { // with jitter, so that many don't poll at once
		d = min(d, until(a.left)+jitter.N(length*time.Millisecond))
	}
	return d
}

// until is when to poll after a lease that lasts for left: it is valid to the end of its last millisecond.
func until(left time.Duration) time.Duration { return min(max(left, 0)+time.Millisecond, longestPause) }

// written matches Redis 6's error for a script that may not write now; later versions return the code itself.
var written = regexp.MustCompile(`: -(READONLY|MISCONF|NOREPLICAS) `)

// answered reports whether a retry would get the same err, unlike that of a broken connection.
func answered(err error) bool {
	if errors.Is(err, dlock.ErrQueueFull) || errors.Is(err, dlock.ErrInvalid) || errors.Is(err, dlock.ErrClosed) {
		return true
	}
	reply, ok := errors.AsType[redis.Error](err)
	if !ok {
		return false
	}
	code, rest, _ := strings.Cut(reply.Error(), " ")
	return slices.Contains([]string{"WRONGTYPE", "NOPERM", "NOAUTH", "OOM", "CROSSSLOT"}, code) ||
		code == "ERR" && !strings.HasPrefix(rest, "max number of clients") && !written.MatchString(rest)
}

// batch is a set of owners that leave a key's queue by one script, which hands on the lock if one of them has it. It is retried
// until the server responds or the queue has expired; after Close, it is tried once.
type batch struct {
	entries map[string]string // in the queue, by owner
	last    map[string]bool   // owners of whom no request is under way: while this is sent, they needn't leave again
	began   time.Time
	sent    bool
	done    chan struct{}
	holder  string // whose lock was handed on; readable, as err, when done is closed
	err     error
}

const (
	leaveTimeout = time.Second
	leavePause   = 50 * time.Millisecond
	leaveBatch   = 1000 // owners of one script
)

// scheduleLeave returns the batch by which owner leaves key's queue. sub.mu is held, and the Backend is open or Close waits for
// the caller. ttl is the request's, which identifies its entry, or 0 if only its lock is known.
func (sub *subscriber) scheduleLeave(key, owner string, ttl time.Duration) *batch {
	all, running := sub.leaving[key]
	i := slices.IndexFunc(all, func(l *batch) bool { return l.entries[owner] != "" && (!l.sent || l.last[owner]) })
	if i < 0 {
		i = len(all) - 1
		if i < 0 || all[i].sent || len(all[i].entries) == leaveBatch {
			all = append(all, &batch{entries: map[string]string{}, last: map[string]bool{}, began: time.Now(), done: make(chan struct{})})
			sub.leaving[key] = all
			i++
		}
	}
	if !all[i].sent && (all[i].entries[owner] == "" || ttl != 0) {
		all[i].entries[owner] = sub.b.entryPrefix(ttl) + owner
	}
	if !running {
		sub.busy.Go(func() { sub.sendBatches(key) })
	}
	return all[i]
}

func (sub *subscriber) sendBatches(key string) {
	pause := leavePause
	var gone error // the server doesn't serve, and Close must end
	for {
		sub.mu.Lock()
		if len(sub.leaving[key]) == 0 {
			delete(sub.leaving, key)
			sub.mu.Unlock()
			return
		}
		l := sub.leaving[key][0]
		l.sent = true
		sub.mu.Unlock()
		last := sub.b.open.Err() != nil
		holder, err := "", gone
		if gone == nil {
			holder, err = sub.b.leave(key, l)
		}
		switch {
		case err == nil, answered(err), time.Since(l.began) > kept:
			pause = leavePause
		case last:
			gone = err
		default:
			_, _ = sub.b.wait(sub.b.open, pause, nil)
			pause = min(2*pause, time.Second)
			continue
		}
		sub.mu.Lock()
		sub.leaving[key] = sub.leaving[key][1:]
		sub.mu.Unlock()
		l.holder, l.err = holder, err
		close(l.done)
	}
}

func (b *Backend) leave(key string, l *batch) (holder string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), leaveTimeout)
	defer cancel()
	args := append(make([]any, 0, 2+len(l.entries)), b.first...)
	for _, entry := range l.entries {
		args = append(args, entry)
	}
	holder, err = leaveScript.Run(ctx, redisscript.Once{UniversalClient: b.c}, b.names(key), args...).Text()
	return holder, failed(ctx, err)
}

// leave returns nil if the Backend is closed.
func (sub *subscriber) leave(g dlock.Grant) *batch {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	if sub.b.open.Err() != nil {
		return nil
	}
	return sub.scheduleLeave(g.Key, g.Owner, g.TTL)
}

func (sub *subscriber) undo(ctx context.Context, g dlock.Grant) error {
	l := sub.leave(g) //nolint:contextcheck // it continues when ctx has ended
	if l == nil {
		return dlock.ErrClosed
	}
	select {
	case <-l.done:
	case <-ctx.Done():
		return fmt.Errorf("redislock: leaving the queue: %w", context.Cause(ctx))
	}
	if l.err == nil && l.holder != g.Owner {
		return dlock.ErrLost
	}
	return l.err
}
