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

// inbox is where a Backend's waiters are notified: all over one subscription at a time.
type inbox struct {
	b       *Backend
	channel string
	busy    sync.WaitGroup // what Close waits for; it grows while mu is held and the Backend is open, or from within

	mu      sync.Mutex
	opening *opening            // nil until somebody has to wait, and after it has failed
	sub     *subscription       // the last that was confirmed
	waiters map[string]*waiter  // by owner
	taken   map[string]bool     // owners that have learnt of a grant whose notification may be under way
	leaving map[string][]*batch // by key; the first is being sent
}

// opening is the first attempt to subscribe, which all waiters share.
type opening struct {
	done chan struct{}
	err  error // readable when done is closed
}

// subscription is one connection. It is read without a deadline: one that passes within a message desynchronises go-redis.
type subscription struct {
	ps     *redis.PubSub
	ctx    context.Context // ps is closed when it ends
	cancel context.CancelCauseFunc
	silent atomic.Bool // since the last probe
	since  time.Time   // when it was confirmed
}

// waiter is a call of Acquire that waits.
type waiter struct {
	key, owner string
	told       chan notice // the last, if it is unread
}

// notice is what a waiter is told; the zero value is that it is to poll.
type notice struct {
	token uint64 // of its grant
	first bool   // in the queue, and the lock is held for
	left  time.Duration
}

func (in *inbox) isOpen() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.sub != nil
}

// open waits until the first subscription is confirmed: before that a hand-over would pass the waiter over.
func (in *inbox) open(ctx context.Context) error {
	in.mu.Lock()
	if in.opening == nil && in.b.open.Err() == nil {
		o := &opening{done: make(chan struct{})}
		in.opening = o
		in.busy.Go(func() { in.listen(o) }) //nolint:contextcheck // it isn't the caller's, whose ctx may end
	}
	o := cmp.Or(in.opening, &opening{})
	in.mu.Unlock()
	select {
	case <-o.done:
	case <-ctx.Done():
	case <-in.b.open.Done():
	}
	if ctx.Err() != nil || in.b.open.Err() != nil {
		return in.b.ended(ctx)
	}
	return o.err
}

// listen subscribes, whenever a subscription has ended, until the Backend is closed; o is the first attempt's outcome.
func (in *inbox) listen(o *opening) {
	for {
		err := in.read(o)
		if !in.isOpen() {
			in.mu.Lock()
			defer in.mu.Unlock()
			in.opening = nil
			o.err = fmt.Errorf("redislock: subscribe (where Redis has no Pub/Sub for this client, use ModeSpin): %w", err)
			close(o.done)
			return
		}
		if _, err := in.b.wait(in.b.open, retryPause, nil); err != nil {
			return
		}
	}
}

// read makes a subscription and reads it until it breaks. It returns why.
func (in *inbox) read(o *opening) error {
	s := &subscription{ps: in.b.c.Subscribe(in.b.open)} // to nothing yet, so that it doesn't connect
	s.ctx, s.cancel = context.WithCancelCause(in.b.open)
	defer s.cancel(nil)
	in.busy.Go(func() { in.probe(s) })
	in.mu.Lock()
	clear(in.taken) // what was sent to earlier subscriptions is not read any more
	in.mu.Unlock()
	err := s.ps.Subscribe(s.ctx, in.channel)
	for err == nil {
		var msg any
		msg, err = s.ps.Receive(s.ctx)
		s.silent.Store(false)
		switch m := msg.(type) {
		case *redis.Message:
			in.deliver(m.Payload)
			runtime.Gosched() // the waiter first: the next read would find nothing yet
		case *redis.Subscription:
			in.confirmed(s, o)
		}
	}
	return cmp.Or(context.Cause(s.ctx), err)
}

// silence is after how long without a message a subscription is pinged, and how much later it is closed.
const silence = 2 * time.Second

// probe ends s when nothing is heard.
func (in *inbox) probe(s *subscription) {
	defer func() { _ = s.ps.Close() }()
	for {
		if _, err := in.b.wait(s.ctx, silence, nil); err != nil {
			return
		}
		if s.silent.Swap(true) {
			s.cancel(errors.New("the server is silent"))
			return
		}
		in.busy.Go(func() { _ = s.ps.Ping(s.ctx) }) // it may have to wait while the client library connects
	}
}

// unheard notes that the server of the scripts knew of no subscription. One confirmed long before leads to another server.
func (in *inbox) unheard(at time.Time) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.sub != nil && at.Sub(in.sub.since) >= silence {
		in.sub.cancel(nil)
	}
}

// confirmed tells every waiter that it may have missed something.
func (in *inbox) confirmed(s *subscription, o *opening) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.sub == nil {
		close(o.done)
	}
	in.sub, s.since = s, time.Now()
	for _, w := range in.waiters {
		w.tell(notice{})
	}
}

// deliver acts on a message: "granted TOKEN OWNER LOCK", "held MS OWNER", or "lapsed LOCK", which calls the roll: the
// process answers by polling.
func (in *inbox) deliver(payload string) {
	kind, rest, _ := strings.Cut(payload, " ")
	number, name, _ := strings.Cut(rest, " ")
	n, err := strconv.ParseUint(number, 10, 63)
	in.mu.Lock()
	defer in.mu.Unlock()
	switch {
	case kind == "granted" && err == nil:
		owner, lock, _ := strings.Cut(name, " ")
		if w := in.waiters[owner]; w != nil {
			w.tell(notice{token: n})
		} else if !in.taken[owner] { // nobody here has waited for it
			in.scheduleLeave(in.key(lock), owner, 0)
		}
	case kind == "held" && err == nil:
		if w := in.waiters[name]; w != nil {
			w.tell(notice{first: true, left: time.Duration(n) * time.Millisecond})
		}
	case kind == "lapsed":
		most := 4 // some may be about to leave
		for _, w := range in.waiters {
			if w.key == in.key(rest) && most > 0 {
				w.tell(notice{})
				most--
			}
		}
	}
}

// key is what the lock of that name locks.
func (in *inbox) key(lock string) string {
	return strings.TrimSuffix(strings.TrimPrefix(lock, in.b.o.Prefix+"lock:{"), "}")
}

// tell makes n what w is to read, unless a later grant is. in.mu is held, so there is no other sender.
func (w *waiter) tell(n notice) {
	select {
	case last := <-w.told:
		if last.token > n.token {
			n = last
		}
	default:
	}
	w.told <- n
}

// join makes r's owner a waiter, before the request leaves that may put it into the queue.
func (in *inbox) join(r dlock.Request) (*waiter, error) {
	w := &waiter{key: r.Key, owner: r.Owner, told: make(chan notice, 1)}
	in.mu.Lock()
	defer in.mu.Unlock()
	switch {
	case in.b.open.Err() != nil:
		return nil, dlock.ErrClosed
	case in.waiters[w.owner] != nil:
		return nil, fmt.Errorf("%w: redislock: owner %q waits already", dlock.ErrInvalid, w.owner)
	}
	in.waiters[w.owner] = w
	in.busy.Add(1)
	return w, nil
}

func (in *inbox) drop(w *waiter) {
	in.mu.Lock()
	defer in.mu.Unlock()
	delete(in.waiters, w.owner)
	in.busy.Done()
}

// take notes that owner has the lock, whose notification, if it is yet to be read, is not for an orphan; or that it is released.
func (in *inbox) take(owner string, has bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	delete(in.taken, owner)
	if has {
		in.taken[owner] = true
	}
}
