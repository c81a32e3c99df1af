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
	"github.com/fencelab/fencelab/dlock/internal/wait"
)

var errGone = fmt.Errorf("%w: its node is gone: the session has expired, or the lease has run out", dlock.ErrLost)

// A waiter's lease counts from before its node was written. At its grant up to an eighth of the TTL may have passed; up to three
// quarters if it is provisional.
const (
	maxWaited = 8  // of the TTL
	minRest   = 4  // of the TTL
	slowest   = 99 // percent: a waiter's clock may be 1 % slow, dlock's margin for drift
)

const (
	minPause  = 20 * time.Millisecond // doubles with each retry
	maxPause  = time.Second
	maxUnsure = 3 // pauses in a row that find the client disconnected: an open client would be connecting

	unwatched = 2 * time.Second // a node's age when its Backend watches it; most are gone by then
)

// lease is a node of this Backend, from when its name is known until it is gone.
type lease struct {
	b     *Backend
	node  node
	token int64
	gone  context.Context // ends when the node is known to be gone
	lose  context.CancelFunc

	mu      sync.Mutex
	guard   *time.Timer     // starts the watch
	fired   <-chan zk.Event // by the node's end; nil: not watched yet
	expires time.Time       // zero: not granted yet
	timer   *time.Timer     // deletes the node at expires
	over    bool            // run out, released or gone
}

func (b *Backend) own(n node) *lease {
	l := &lease{b: b, node: n}
	l.gone, l.lose = context.WithCancel(b.always)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.guard = time.AfterFunc(b.unwatched, l.watch)
	l.timer = time.AfterFunc(1<<63-1, l.expire)
	return l
}

func (l *lease) watch() {
	// A watch on its children, which a renewal doesn't trigger.
	var r reply
	err := l.b.insist(l.b.always, l, func() (err error) { r, err = l.b.childrenW(l.b.always, l.node.path()); return err })
	if err == nil {
		l.mu.Lock()
		l.fired = r.fired
		l.mu.Unlock()
		<-r.fired
	}
	if err == nil || errors.Is(err, zk.ErrNoNode) {
		l.vanish()
	}
}

func (l *lease) vanish() {
	l.end()
	l.lose()
}

// write writes ttl to the node. That proves that it and its session existed, and restarts the TTL for the waiter behind.
func (b *Backend) write(ctx context.Context, l *lease, ttl time.Duration) error {
	err := b.setData(ctx, l.node.path(), []byte(ttl.String()), -1)
	if errors.Is(err, zk.ErrNoNode) {
		l.vanish()
		return errGone
	}
	return err
}

// begin makes the lease last at least until then. It reports false if it is over.
func (l *lease) begin(until time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.fired: // watch may not have run yet
		l.over = true
	default:
	}
	if l.over || !l.expires.IsZero() && !time.Now().Before(l.expires) {
		return false
	}
	if until.After(l.expires) {
		l.expires = until
		l.timer.Reset(time.Until(until))
	}
	return true
}

func (l *lease) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.over = true
	l.guard.Stop()
	l.timer.Stop()
}

func (l *lease) expire() {
	l.mu.Lock()
	due := !l.over && !time.Now().Before(l.expires) // false: it was just renewed
	l.over = l.over || due
	l.mu.Unlock()
	if due {
		l.b.remove(l)
	}
}

// remove continues in the background if it takes long.
func (b *Backend) remove(l *lease) {
	l.end()
	ctx, done := context.WithTimeout(b.always, goodbye)
	b.chore(func() {
		defer done()
		err := b.persist(l, func() error { return b.deleteAt(b.always, l.node.path(), -1) })
		if err == nil || errors.Is(err, zk.ErrNoNode) || errors.Is(err, errGone) {
			l.vanish()
		}
	})
	<-ctx.Done()
}

// clean deletes what a create without a reply may have left at p, once the client knows its outcome. Until then it occupies no
// worker, since expiring leases need the workers.
func (b *Backend) clean(p place, create error) {
	sweep := func() {
		b.chore(func() {
			_ = b.persist(nil, func() error { _, err := b.sweepAll(b.always, p); return err })
		})
	}
	if cut, ok := errors.AsType[*cutShortError](create); ok && cut.answered != nil {
		context.AfterFunc(cut.answered, sweep)
		return
	}
	sweep()
}

// persist is insist for a deletion. It also retries after other refusals, such as throttling, until the session has ended or the
// Backend is closed.
func (b *Backend) persist(l *lease, f func() error) error {
	session := b.c.SessionID()
	ended := func() bool { return b.c.SessionID() != session } // and the node with it
	err := b.repeat(b.always, l, f, func(err error) bool {
		done := err == nil || errors.Is(err, zk.ErrNoNode) || errors.Is(err, zk.ErrNoAuth)
		return broken(err) || !done && !ended() && b.open.Err() == nil
	})
	if ended() {
		return errGone
	}
	return err
}

// insist retries f while its connection is broken, until ctx ends, l's node is gone, or the client is closed. l may be nil.
func (b *Backend) insist(ctx context.Context, l *lease, f func() error) error {
	return b.repeat(ctx, l, f, broken)
}

func (b *Backend) repeat(ctx context.Context, l *lease, f func() error, again func(error) bool) error {
	gone := b.always
	if l != nil {
		gone = l.gone
	}
	unsure := 0
	for pause := minPause; ; pause = min(2*pause, maxPause) {
		err := f()
		if !again(err) {
			return err
		}
		select {
		case <-time.After(pause):
		case <-gone.Done():
			return errGone
		case <-ctx.Done():
			return fmt.Errorf("waiting: %w", ctx.Err())
		}
		// After every pause, since a client whose connections break is often disconnected for a moment.
		unsure++
		if b.c.State() != zk.StateDisconnected {
			unsure = 0
		}
		if unsure == maxUnsure {
			if l != nil {
				l.vanish()
			}
			return errGone
		}
	}
}

type wanted struct {
	dlock.Request
	queue bool      // else dlock.ErrHeld
	start time.Time // before the node's last write
	late  bool      // it has had to wait
}

// win returns l's grant when its node is the first of q, its queue. A waiter waits for the end of the node two ahead, which makes
// it the second at the latest, and then for the end of the first.
func (b *Backend) win(ctx context.Context, l *lease, q []node, w wanted) (g dlock.Grant, err error) {
	for first := false; !first; {
		i := slices.IndexFunc(q, func(n node) bool { return n.name == l.node.name })
		switch {
		case i < 0:
			l.vanish()
			return g, errGone
		case i == 0:
			return b.grant(ctx, l, w)
		case !w.queue:
			return g, dlock.ErrHeld
		}
		w.late = true
		w.NoteHeld()
		if first, err = b.await(ctx, l, q[max(i-2, 0)].path(), i == 1, &w); err != nil {
			return g, err
		}
		if !first {
			err = b.insist(ctx, l, func() (err error) { q, _, err = b.queue(ctx, l.node.parent); return err })
			if err != nil {
				return g, err
			}
		}
	}
	return b.grant(ctx, l, w)
}

// grant begins the lease of the first node of a queue, without reading it: it was written within the TTL, and before start + TTL
// neither its session, nor the waiter behind, nor this Backend ends it. If another client did, Lost is closed.
func (b *Backend) grant(ctx context.Context, l *lease, w wanted) (g dlock.Grant, err error) {
	if err := b.refresh(ctx, l, &w); err != nil {
		return g, err
	}
	g = dlock.Grant{
		Key: w.Key, Owner: w.Owner, Fence: uint64(l.token), TTL: w.TTL, Start: w.start, Lost: l.gone.Done(), State: l,
	}
	now := time.Now()
	waited := wait.Since(w.start, now)
	if rest := w.rest(waited); w.late && waited > w.TTL/maxWaited && rest > 0 { // if nothing is left, Start says so
		g.Start, g.Provisional = now, rest
	}
	if !l.begin(w.start.Add(w.TTL)) {
		return g, errGone
	}
	return g, nil
}

func (w *wanted) rest(waited time.Duration) time.Duration { return w.TTL - waited - waited/slowest }

// refresh writes the node if too little of its TTL is left. Its lease then counts from now.
func (b *Backend) refresh(ctx context.Context, l *lease, w *wanted) error {
	if w.rest(wait.Since(w.start, time.Now())) >= w.TTL/minRest {
		return nil
	}
	write := func() error { w.start = time.Now(); return b.write(ctx, l, w.TTL) }
	if w.queue {
		return b.insist(ctx, l, write)
	}
	return thrice(write)
}

type watched struct {
	path string
	head bool // every change, not only the end
}

// watch is a watch on a node. The client can't remove a watch, so waiters share it.
type watch struct {
	of      watched
	version int32         // a head's
	ttl     time.Duration // a head's; 0: none
	ours    bool          // a head of this session
	fired   chan struct{} // closed when event is set
	event   zk.Event
}

// await waits until the queue must be read again: a node before l's is gone; the head was renewed or has expired; or l's node may
// be the head. It reports whether l's node is now the first: it followed the head, which is gone, but not with l's own session.
func (b *Backend) await(ctx context.Context, l *lease, path string, head bool, w *wanted) (first bool, err error) {
	var at *watch
	err = b.insist(ctx, l, func() (err error) { at, err = b.watch(ctx, watched{path, head}); return err })
	if errors.Is(err, zk.ErrNoNode) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	ttl := w.TTL
	if head {
		ttl = at.ttl
		if err := b.refresh(ctx, l, w); err != nil { // while the head has the lock, so that nobody waits for it
			return false, err
		}
	}
	var alarm <-chan time.Time
	if ttl > 0 {
		alarm = time.After(ttl)
	}
	select {
	case <-at.fired:
		return head && !at.ours && at.event.Type == zk.EventNodeDeleted, nil
	case <-alarm:
		if !head {
			return false, nil
		}
		// A renewed head has another version, even if the watch hasn't fired: one that is set again on reconnecting may miss a
		// change.
		err := b.deleteAt(ctx, path, at.version)
		if err == nil || errors.Is(err, zk.ErrNoNode) || errors.Is(err, zk.ErrBadVersion) {
			b.unwatch(at)
		} else if !broken(err) {
			return false, err
		}
		return false, nil
	case <-l.gone.Done():
		return false, errGone
	case <-ctx.Done():
		return false, fmt.Errorf("waiting: %w", ctx.Err())
	}
}

func (b *Backend) watch(ctx context.Context, of watched) (*watch, error) {
	b.mu.Lock()
	w := b.watches[of]
	b.mu.Unlock()
	if w != nil {
		return w, nil
	}
	set := b.childrenW // fires when the node is gone
	if of.head {
		set = b.getW
	}
	r, err := set(ctx, of.path)
	if err != nil {
		return nil, err
	}
	w = &watch{of: of, fired: make(chan struct{})}
	if of.head {
		w.version, w.ours = r.stat.Version, r.stat.EphemeralOwner == b.c.SessionID()
		w.ttl, _ = time.ParseDuration(string(r.data)) // a node without a TTL never expires
	}
	b.mu.Lock()
	b.watches[of] = w // may replace one set meanwhile, which ends when this one does
	b.mu.Unlock()
	go func() {
		w.event = <-r.fired
		b.unwatch(w)
		close(w.fired)
	}()
	return w, nil
}

func (b *Backend) unwatch(w *watch) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.watches[w.of] == w {
		delete(b.watches, w.of)
	}
}
