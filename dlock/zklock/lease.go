package zklock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelab/fencelab/dlock"
)

// errGone says that the own node isn't there any more.
var errGone = fmt.Errorf("%w: its node is gone: the session has expired, or the lease has run out", dlock.ErrLost)

// mostWait is which part of its TTL, an eighth, a waiter's lease may have lost when it is granted.
const mostWait = 8

const (
	firstPause = 20 * time.Millisecond // before a request that failed is sent again; doubles with each
	mostPause  = time.Second
)

// lease is a node of ours, from when its name is known until it is gone.
type lease struct {
	b     *Backend
	at    place
	path  string
	czxid int64
	gone  chan struct{} // closed once the node is known to be gone

	mu    sync.Mutex
	until time.Time   // when the lease runs out; zero: not granted yet
	timer *time.Timer // nil: not granted yet
	over  bool        // run out, released or gone
}

func (b *Backend) known(p place) *lease {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.leases[p]
}

// adopt returns the lease of a node at p that is this session's.
func (b *Backend) adopt(p place, path string) (*lease, error) {
	// An ephemeral node has no children. The watch fires when it is gone, and, other than one of its data, not when it is
	// renewed; and when the session has expired or the client is closed.
	var stat *zk.Stat
	var ch <-chan zk.Event
	err := thrice(func() (err error) { _, stat, ch, err = b.c.ChildrenW(path); return err })
	if errors.Is(err, zk.ErrNoNode) {
		return nil, errGone
	}
	if err != nil {
		return nil, err
	}
	if stat.EphemeralOwner != b.c.SessionID() {
		return nil, fmt.Errorf("%s is another session's", path) // or one's own former session's; either way not to be relied on
	}
	l := &lease{b: b, at: p, path: path, czxid: stat.Czxid, gone: make(chan struct{})}
	b.mu.Lock()
	b.leases[p] = l
	b.mu.Unlock()
	go func() {
		<-ch
		l.end()
		b.unlist(l)
		close(l.gone)
	}()
	return l, nil
}

func (b *Backend) unlist(l *lease) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.leases[l.at] == l {
		delete(b.leases, l.at)
	}
}

// forget sees to it that nothing is left of a lease that is over.
func (b *Backend) forget(l *lease) error {
	if err := b.c.Delete(l.path, -1); err != nil && !errors.Is(err, zk.ErrNoNode) {
		return err
	}
	b.unlist(l)
	return nil
}

// seal writes ttl to the node. That it succeeds proves that the node was there, and so its session, by a quorum's word; and
// it starts the time anew for whoever waits for the node to run out.
func (b *Backend) seal(l *lease, ttl time.Duration) error {
	_, err := b.c.Set(l.path, lifetime(ttl), -1)
	if errors.Is(err, zk.ErrNoNode) {
		l.end()
		return errGone
	}
	return err
}

// begin makes the lease last until a time, or longer if it does so already. It reports false if it is over.
func (l *lease) begin(until time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case l.over:
		return false
	case l.timer == nil:
		l.until = until
		l.timer = time.AfterFunc(time.Until(until), l.expire)
	case until.After(l.until):
		l.until = until
		l.timer.Reset(time.Until(until))
	}
	return true
}

// extend is begin for a lease that has begun and not run out.
func (l *lease) extend(until time.Time) bool {
	l.mu.Lock()
	live := l.timer != nil && time.Now().Before(l.until)
	l.mu.Unlock()
	return live && l.begin(until)
}

// end says that there is nothing left to run out.
func (l *lease) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = true
	if l.timer != nil {
		l.timer.Stop()
	}
}

// expire deletes the node if its time has come.
func (l *lease) expire() {
	l.mu.Lock()
	if left := time.Until(l.until); left > 0 && !l.over {
		l.timer.Reset(left)
		l.mu.Unlock()
		return
	}
	over := l.over
	l.over = true
	l.mu.Unlock()
	if !over {
		l.b.remove(l)
	}
}

// remove deletes the node. If it cannot, for the connection is broken, it goes on in the background until the node is gone.
func (b *Backend) remove(l *lease) {
	l.end()
	if !broken(b.c.Delete(l.path, -1)) {
		return
	}
	go func() {
		for pause := firstPause; ; pause = min(2*pause, mostPause) {
			select {
			case <-l.gone:
				return
			case <-time.After(pause):
			}
			if !broken(b.c.Delete(l.path, -1)) {
				return
			}
		}
	}()
}

// turn is how a node waits to be the first.
type turn struct {
	start time.Time // before the request that found or created the node
	fresh bool      // that created it
	ttl   time.Duration
	wait  bool // else dlock.ErrHeld
}

// win returns when l's node is the first of q, its queue, and its lease has begun. It returns the lease's start.
func (b *Backend) win(ctx context.Context, l *lease, q []node, t turn) (start time.Time, err error) {
	var w watch
	for {
		if err := b.enter(ctx); err != nil {
			return start, err
		}
		i := slices.IndexFunc(q, func(n node) bool { return n.name == l.path[len(n.parent)+1:] })
		switch {
		case i < 0:
			return start, errGone
		case i == 0:
			return b.grant(ctx, l, t)
		case !t.wait:
			return start, dlock.ErrHeld
		}
		if err := b.await(ctx, l, q[i-1], i == 1, &w, t.ttl); err != nil {
			return start, err
		}
		err := b.insist(ctx, l, func() (err error) { q, err = b.list(l.at.parent); return err })
		if err != nil {
			return start, err
		}
	}
}

// grant begins the lease of the first node of a queue. That the node is there, the queue has shown, also if nothing is
// written: every client sees all changes in their order, so a queue from which the node before is gone lacks ours too if
// that went first. What the server that has shown the queue may not know yet came later, and nothing ends the lease before
// start + TTL: not the session, which lasts longer than that from the write that created the node, and not the waiter
// behind, which has counted from after that write.
func (b *Backend) grant(ctx context.Context, l *lease, t turn) (start time.Time, err error) {
	start = t.start
	if !t.fresh || age(start, start.Round(0), time.Now()) > t.ttl/mostWait { // else the write that created the node is as good
		seal := func() error {
			start = time.Now()
			return b.seal(l, t.ttl)
		}
		if t.wait {
			err = b.insist(ctx, l, seal)
		} else {
			err = thrice(seal)
		}
		if err != nil {
			return start, err
		}
	}
	if !l.begin(start.Add(t.ttl)) {
		return start, errGone
	}
	return start, nil
}

// age is what has passed between start, which is wall on the wall clock, and now: the larger of what the monotonic clock
// says, which stands still while the machine is suspended, and what the wall clock says, which may be set back.
func age(start, wall, now time.Time) time.Duration {
	return max(now.Sub(start), now.Round(0).Sub(wall))
}

// watch is the one that a waiter has set, and for which it waits. The client cannot take it back.
type watch struct {
	path    string
	head    bool          // it tells of every change, not only of the end
	version int32         // of a head's data
	ttl     time.Duration // of a head; 0 if it has none
	fired   <-chan zk.Event
}

// await waits until there is reason to look at the queue again: n, the node before l's, is gone; or n is the head of the
// queue and has been renewed, or has run out; or it is time for a look whether it is the head.
func (b *Backend) await(ctx context.Context, l *lease, n node, head bool, w *watch, ttl time.Duration) error {
	if w.path != n.path() || w.head != head {
		err := b.insist(ctx, l, func() (err error) { *w, err = b.watch(n, head); return err })
		if errors.Is(err, zk.ErrNoNode) {
			return nil
		}
		if err != nil {
			return err
		}
	}
	if head {
		ttl = w.ttl
	}
	var alarm <-chan time.Time
	if ttl > 0 {
		timer := time.NewTimer(ttl)
		defer timer.Stop()
		alarm = timer.C
	}
	select {
	case <-w.fired:
		*w = watch{}
	case <-alarm:
		if !head {
			return nil
		}
		// It was seen at this version for all of its TTL. If it has been renewed, it has another version, whether or not the
		// watch has told so: one that is set again after a reconnection may miss a change.
		switch err := b.c.Delete(w.path, w.version); {
		case broken(err):
		case err == nil, errors.Is(err, zk.ErrNoNode), errors.Is(err, zk.ErrBadVersion):
			*w = watch{}
		default:
			return err
		}
	case <-l.gone:
		return errGone
	case <-ctx.Done():
		return fmt.Errorf("waiting: %w", context.Cause(ctx))
	case <-b.closed:
		return dlock.ErrClosed
	}
	return nil
}

// watch watches n. Of a head of the queue, which may run out, it wants to know every change.
func (b *Backend) watch(n node, head bool) (watch, error) {
	w := watch{path: n.path(), head: head}
	if !head {
		_, _, fired, err := b.c.ChildrenW(w.path) // fires when the node is gone
		w.fired = fired
		return w, err
	}
	data, stat, fired, err := b.c.GetW(w.path)
	if err != nil {
		return w, err
	}
	w.fired, w.version = fired, stat.Version
	w.ttl, _ = time.ParseDuration(string(data)) // a node of another's make never runs out
	return w, nil
}

// insist repeats f for a waiter while the connection is broken, for as long as the node is there and somebody waits.
func (b *Backend) insist(ctx context.Context, l *lease, f func() error) error {
	for pause := firstPause; ; pause = min(2*pause, mostPause) {
		err := f()
		if !broken(err) {
			return err
		}
		select {
		case <-time.After(pause):
		case <-l.gone:
			return errGone
		case <-ctx.Done():
			return fmt.Errorf("waiting: %w", context.Cause(ctx))
		case <-b.closed:
			return dlock.ErrClosed
		}
	}
}
