package redislock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
)

// subscriber notifies a Backend's waiters, over one subscription at a time.
type subscriber struct {
	b       *Backend
	channel string
	busy    sync.WaitGroup // what Close waits for; added to with mu held and the Backend open, or by counted work

	mu      sync.Mutex
	opening *opening            // nil until somebody has to wait, and after it has failed
	current *subscription       // the last that was confirmed
	waiters map[string]*waiter  // by owner
	watch   map[string]*waiter  // by key: the one that polls often, if many wait
	taken   map[string]uint64   // tokens of owners that have the lock already; its notification may be in flight
	leaving map[string][]*batch // by key; the first is being sent
}

type opening struct {
	done chan struct{}
	err  error // readable when done is closed
}

// subscription is one connection. It is read without a deadline: one that passes within a message desynchronises go-redis.
type subscription struct {
	ps     *redis.PubSub
	ctx    context.Context // when it ends, ps is closed
	cancel context.CancelCauseFunc
	silent atomic.Bool // since the last probe
	since  time.Time   // when it was confirmed
}

type waiter struct {
	key, owner string
	notices    chan notice // the last, if it is unread
	late       bool        // a request was not answered, and may still arrive
}

// notice is a message to a waiter; the zero value makes it poll.
type notice struct {
	token uint64
	first bool // first in the queue, and the lock is held for left
	left  time.Duration
}

func (sub *subscriber) isOpen() bool {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	return sub.current != nil
}

// open waits until the first subscription is confirmed: before that a hand-over would skip the waiter.
func (sub *subscriber) open(ctx context.Context) error {
	sub.mu.Lock()
	if sub.opening == nil && sub.b.open.Err() == nil {
		o := &opening{done: make(chan struct{})}
		sub.opening = o
		sub.busy.Go(func() { sub.listen(o) }) //nolint:contextcheck // it isn't the caller's, whose ctx may end
	}
	o := cmp.Or(sub.opening, &opening{})
	sub.mu.Unlock()
	select {
	case <-o.done:
	case <-ctx.Done():
	case <-sub.b.open.Done():
	}
	if ctx.Err() != nil || sub.b.open.Err() != nil {
		return sub.b.ended(ctx)
	}
	return o.err
}

// listen subscribes again whenever a subscription ends; o gets the first attempt's outcome.
func (sub *subscriber) listen(o *opening) {
	for {
		err := sub.read(o)
		if !sub.isOpen() {
			sub.mu.Lock()
			defer sub.mu.Unlock()
			sub.opening = nil
			o.err = fmt.Errorf("redislock: subscribe (where Redis has no Pub/Sub for this client, use ModeSpin): %w", err)
			close(o.done)
			return
		}
		if _, err := sub.b.wait(sub.b.open, retryPause, nil); err != nil {
			return
		}
	}
}

func (sub *subscriber) read(o *opening) error {
	s := &subscription{ps: sub.b.c.Subscribe(sub.b.open)} // to nothing yet, so that it doesn't connect
	s.ctx, s.cancel = context.WithCancelCause(sub.b.open)
	defer s.cancel(nil)
	sub.busy.Go(func() { sub.probe(s) })
	sub.mu.Lock()
	clear(sub.taken) // messages to earlier subscriptions aren't read any more
	sub.mu.Unlock()
	err := s.ps.Subscribe(s.ctx, sub.channel)
	for err == nil {
		var msg any
		msg, err = s.ps.Receive(s.ctx)
		s.silent.Store(false)
		switch m := msg.(type) {
		case *redis.Message:
			sub.deliver(m.Payload)
			runtime.Gosched() // let the waiter run first: the next read would find nothing yet
		case *redis.Subscription:
			sub.confirmed(s, o)
		}
	}
	return cmp.Or(context.Cause(s.ctx), err)
}

// silence is the time without a message after which a subscription is pinged, and then closed.
const silence = 2 * time.Second

func (sub *subscriber) probe(s *subscription) {
	defer func() { _ = s.ps.Close() }()
	for {
		if _, err := sub.b.wait(s.ctx, silence, nil); err != nil {
			return
		}
		if s.silent.Swap(true) {
			s.cancel(errors.New("the server is silent"))
			return
		}
		sub.busy.Go(func() { _ = s.ps.Ping(s.ctx) }) // it may have to wait while the client library connects
	}
}

// unheard handles a poll whose server knew of no subscription. A subscription confirmed long before must be to another server.
func (sub *subscriber) unheard(at time.Time) {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	if sub.current != nil && at.Sub(sub.current.since) >= silence {
		sub.current.cancel(nil)
	}
}

// confirmed has every waiter poll: it may have missed a message.
func (sub *subscriber) confirmed(s *subscription, o *opening) {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	if sub.current == nil {
		close(o.done)
	}
	sub.current, s.since = s, time.Now()
	for _, w := range sub.waiters {
		w.notify(notice{})
	}
}

// deliver processes a message: "granted TOKEN OWNER LOCK", "held MS OWNER", or "lapsed LOCK", a roll call, which the
// process answers by polling.
func (sub *subscriber) deliver(payload string) {
	kind, rest, _ := strings.Cut(payload, " ")
	number, name, _ := strings.Cut(rest, " ")
	n, err := strconv.ParseUint(number, 10, 63)
	sub.mu.Lock()
	defer sub.mu.Unlock()
	switch {
	case kind == "granted" && err == nil:
		owner, lock, _ := strings.Cut(name, " ")
		if w := sub.waiters[owner]; w != nil {
			w.notify(notice{token: n})
		} else if n > sub.taken[owner] { // nobody here has waited for it
			sub.scheduleLeave(sub.key(lock), owner, 0)
		}
	case kind == "held" && err == nil:
		if w := sub.waiters[name]; w != nil {
			w.notify(notice{first: true, left: time.Duration(n) * time.Millisecond})
		}
	case kind == "lapsed":
		most := 4 // some may be about to leave
		for _, w := range sub.waiters {
			if w.key == sub.key(rest) && most > 0 {
				w.notify(notice{})
				most--
			}
		}
	}
}

func (sub *subscriber) key(lock string) string {
	return strings.TrimSuffix(strings.TrimPrefix(lock, sub.b.o.Prefix+"lock:{"), "}")
}

// notify replaces w's unread notice, unless that is a later grant, or a poll and n only says how long the lease lasts. A poll
// replaces any, since it finds the grant too. sub.mu is held, so there is no other sender.
func (w *waiter) notify(n notice) {
	select {
	case last := <-w.notices:
		if n != (notice{}) && (last.token > n.token || n.first && !last.first) {
			n = last
		}
	default:
	}
	w.notices <- n
}

// join makes r's owner a waiter. It must precede the request that may put it into the queue.
func (sub *subscriber) join(r dlock.Request) (*waiter, error) {
	w := &waiter{key: r.Key, owner: r.Owner, notices: make(chan notice, 1)}
	sub.mu.Lock()
	defer sub.mu.Unlock()
	switch {
	case sub.b.open.Err() != nil:
		return nil, dlock.ErrClosed
	case sub.waiters[w.owner] != nil:
		return nil, fmt.Errorf("%w: redislock: owner %q waits already", dlock.ErrInvalid, w.owner)
	}
	sub.waiters[w.owner] = w
	sub.busy.Add(1)
	return w, nil
}

func (sub *subscriber) drop(w *waiter) {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	delete(sub.waiters, w.owner)
	sub.busy.Done()
	if sub.watch[w.key] != w {
		return
	}
	delete(sub.watch, w.key)
	for _, next := range sub.waiters {
		if next.key == w.key {
			sub.watch[w.key] = next
			next.notify(notice{})
			return
		}
	}
}

// watches reports whether w is the one of the process's waiters for its key that polls often.
func (sub *subscriber) watches(w *waiter) bool {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	if sub.watch[w.key] == nil {
		sub.watch[w.key] = w
	}
	return sub.watch[w.key] == w
}

// take notes that owner has the lock, so a late notification is not an orphan's.
func (sub *subscriber) take(owner string, token uint64) {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	sub.taken[owner] = token
}

func (sub *subscriber) forget(owner string) {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	delete(sub.taken, owner)
}
