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

// A waiter's lease counts from before its node was written. When it is granted, it may have lost up to an eighth of its TTL;
// or up to three quarters, if it is provisional.
const (
	mostWait  = 8  // of the TTL
	leastRest = 4  // of the TTL
	slowest   = 99 // hundredths of a waiter's clock in a hundredth of the others': 1 % is dlock's margin for drift
)

const (
	firstPause = 20 * time.Millisecond // before a request that failed is sent again; doubles with each
	mostPause  = time.Second

	mostUnsure = 3 // pauses in a row that find the client disconnected; one that isn't closed is connecting
)

// unwatched is how old a node gets before its Backend watches it. Most are gone by then, and cost neither the request nor
// the event. Until then the Backend doesn't hear that somebody has deleted it, or closed the client; nothing else ends it so
// soon.
const unwatched = 2 * time.Second

// lease is a node of ours, from when its name is known until it is gone.
type lease struct {
	b       *Backend
	at      place
	path    string
	token   int64 // see Backend.join
	session int64
	gone    chan struct{} // closed once the node is known to be gone

	mu       sync.Mutex
	guard    *time.Timer     // until it is watched
	fired    <-chan zk.Event // by the end of the node; nil: it isn't watched yet
	until    time.Time       // when the lease runs out; zero: not granted yet
	timer    *time.Timer     // nil: not granted yet
	over     bool            // run out, released or gone
	vanished bool            // gone
}

func (b *Backend) known(p place) *lease {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.leases[p]
}

// adopt returns the lease of a node at p that is this session's.
func (b *Backend) adopt(ctx context.Context, p place, path string) (*lease, error) {
	var ok bool
	var stat *zk.Stat
	err := thrice(func() (err error) { ok, stat, err = b.exists(ctx, path); return err })
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, errGone
	}
	if stat.EphemeralOwner != b.c.SessionID() {
		return nil, fmt.Errorf("%s is another session's", path) // or one's own former session's; either way not to be relied on
	}
	l := b.own(p, path, stat.EphemeralOwner)
	l.token = stat.Czxid
	b.enlist(l)
	return l, nil
}

// own returns the lease of a node at p that is the session's. It has no token yet.
func (b *Backend) own(p place, path string, session int64) *lease {
	l := &lease{b: b, at: p, path: path, session: session, gone: make(chan struct{})}
	l.mu.Lock()
	l.guard = time.AfterFunc(b.unwatched, l.watch)
	l.mu.Unlock()
	return l
}

// enlist makes l the one that requests of the same owner for the same key have.
func (b *Backend) enlist(l *lease) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.leases[l.at] = l
}

// watch returns when the node is gone, or its client closed, which comes to the same.
func (l *lease) watch() {
	for r := (retry{b: l.b}); ; {
		// It fires when the node is gone, and, other than a watch of its data, not when it is renewed; and when the session has
		// expired or the client is closed.
		fired, err := l.b.childrenW(l.b.always, l.path)
		switch {
		case err == nil:
			l.mu.Lock()
			l.fired = fired
			l.mu.Unlock()
			<-fired
			l.vanish()
			return
		case errors.Is(err, zk.ErrNoNode):
			l.vanish()
			return
		case !broken(err):
			return
		}
		if !r.again(l) {
			return
		}
	}
}

// vanish says that the node is gone.
func (l *lease) vanish() {
	l.end()
	l.mu.Lock()
	first := !l.vanished
	l.vanished = true
	l.mu.Unlock()
	if first {
		l.b.unlist(l)
		close(l.gone)
	}
}

func (b *Backend) unlist(l *lease) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.leases[l.at] == l {
		delete(b.leases, l.at)
	}
}

// forget sees to it that nothing is left of a lease that is over.
func (b *Backend) forget(ctx context.Context, l *lease) error {
	if err := b.deleteAt(ctx, l.path, -1); err != nil && !errors.Is(err, zk.ErrNoNode) {
		return err
	}
	l.vanish()
	return nil
}

// seal writes ttl to the node. That it succeeds proves that the node was there, and so its session, by a quorum's word; and
// it starts the time anew for whoever waits for the node to run out.
func (b *Backend) seal(ctx context.Context, l *lease, ttl time.Duration) error {
	err := b.setData(ctx, l.path, lifetime(ttl), -1)
	if errors.Is(err, zk.ErrNoNode) {
		l.vanish()
		return errGone
	}
	return err
}

// begin makes the lease last until a time, or longer if it does so already. It reports false if it is over.
func (l *lease) begin(until time.Time) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	select {
	case <-l.fired: // events come in order, but who waits for this one may not have had its turn yet
		l.over = true
	default:
	}
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
	l.guard.Stop()
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

// remove deletes the node. If that takes long, it goes on in the background until the node is gone.
func (b *Backend) remove(l *lease) {
	l.end()
	removed := b.chore(func() {
		for r := (retry{b: b}); broken(b.forget(b.always, l)) && r.again(l); { //nolint:revive // it tries
		}
	})
	t := time.NewTimer(goodbye)
	defer t.Stop()
	select {
	case <-removed:
	case <-t.C:
	}
}

// doubt is about a place where a node may be, or more, that no lease is known of, for the answer to a request was lost.
type doubt struct {
	timer      *time.Timer
	stop, done chan struct{}
}

// doubt has what there is at p deleted when its lease would be over, and after a request under way unless that is nil. Before,
// somebody may settle the doubt.
func (b *Backend) doubt(p place, until time.Time, after <-chan struct{}) {
	d := &doubt{stop: make(chan struct{}), done: make(chan struct{})}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.doubts[p] != nil { // which nobody could settle then
		return
	}
	b.doubts[p] = d
	settle := func() {
		defer close(d.done)
		if after != nil {
			select {
			case <-after:
			case <-d.stop:
			}
		}
		for r := (retry{b: b}); ; {
			select {
			case <-d.stop:
				return
			default:
			}
			if _, err := b.sweep(b.always, p); !broken(err) {
				break
			}
			select {
			case <-r.pause():
			case <-d.stop:
				return
			}
			if r.closed() {
				break
			}
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		if b.doubts[p] == d {
			delete(b.doubts, p)
		}
	}
	d.timer = time.AfterFunc(time.Until(until), func() { b.chore(settle) })
}

// settle is called by whoever sees himself to what there is at p, and reports whether there was a doubt. After it nothing is
// deleted in the background, unless ctx ends before a deletion under way has.
func (b *Backend) settle(ctx context.Context, p place) (doubted bool, err error) {
	b.mu.Lock()
	d := b.doubts[p]
	delete(b.doubts, p)
	b.mu.Unlock()
	if d != nil && !d.timer.Stop() {
		close(d.stop)
		select {
		case <-d.done:
		case <-ctx.Done():
			return true, context.Cause(ctx)
		}
	}
	return d != nil, nil
}

// retry is between the tries of a request whose connection is broken.
type retry struct {
	b      *Backend
	last   time.Duration
	unsure int
}

func (r *retry) pause() <-chan time.Time {
	r.last = min(max(2*r.last, firstPause), mostPause)
	return time.After(r.last)
}

// again pauses, and reports whether there is any use in another try for l: it is not if the node is gone, or the client closed.
func (r *retry) again(l *lease) bool {
	select {
	case <-l.gone:
		return false
	case <-r.pause():
	}
	if r.closed() {
		l.vanish()
		return false
	}
	return true
}

// closed reports whether the client is closed. It is asked after every pause, and not just after a try: one that has broken
// off finds the client disconnected for a moment, again and again if the connection doesn't last.
func (r *retry) closed() bool {
	if r.b.c.State() != zk.StateDisconnected {
		r.unsure = 0
		return false
	}
	r.unsure++
	return r.unsure >= mostUnsure
}

// turn is how a node waits to be the first.
type turn struct {
	start time.Time // before the request that found, created or wrote the node
	fresh bool      // that created or wrote it
	ttl   time.Duration
	wait  bool // else dlock.ErrHeld
	late  bool // it has had to wait
}

// win returns when l's node is the first of q, its queue, and its lease has begun. It returns the lease's start, and for how
// long it lasts if it is provisional.
//
// A waiter waits for the end of the last node but one before its own, and is the second then, at the latest. Now it waits
// for the end of the first, and after that it is the first itself, with no more questions: no node comes before one that is
// there. But if both are of one session, the end of the first may be that of the session, and so its own: then it looks.
func (b *Backend) win(ctx context.Context, l *lease, q []node, t turn) (start time.Time, provisional time.Duration, err error) {
	var w *watch
	for {
		if ctx.Err() != nil {
			return start, 0, context.Cause(ctx)
		}
		i := slices.IndexFunc(q, func(n node) bool { return n.name == l.path[len(n.parent)+1:] })
		switch {
		case i < 0:
			l.vanish()
			return start, 0, errGone
		case i == 0:
			return b.grant(ctx, l, t)
		case !t.wait:
			return start, 0, dlock.ErrHeld
		}
		t.late = true
		first, err := b.await(ctx, l, q[max(i-2, 0)], i == 1, &w, &t)
		if err != nil {
			return start, 0, err
		}
		if first {
			return b.grant(ctx, l, t)
		}
		err = b.insist(ctx, l, func() (err error) { q, err = b.list(ctx, l.at.parent); return err })
		if err != nil {
			return start, 0, err
		}
	}
}

// grant begins the lease of the first node of a queue, which it writes if it must. If it needn't, nothing shows that the
// node is there, but that it was created or written within the TTL: before start + TTL nothing takes it away. Not the
// session, which lasts longer than that from the write; not the waiter behind, which has counted from after it; and not
// this Backend, which would know. If somebody else has deleted it, who takes the lock away from holders just so, this Backend
// hears of it as a holder does: by the event, or when it begins to watch the node.
func (b *Backend) grant(ctx context.Context, l *lease, t turn) (start time.Time, provisional time.Duration, err error) {
	if err := b.refresh(ctx, l, &t); err != nil {
		return start, 0, err
	}
	start = t.start
	now := time.Now()
	waited := age(start, start.Round(0), now)
	if rest := t.rest(waited); t.late && waited > t.ttl/mostWait && rest > 0 { // if nothing is left, start says so
		start, provisional = now, rest
	}
	if !l.begin(t.start.Add(t.ttl)) {
		return start, 0, errGone
	}
	return start, provisional, nil
}

// rest is what is left of the TTL for one who has waited, by its own clock.
func (t *turn) rest(waited time.Duration) time.Duration { return t.ttl - waited - waited/slowest }

// refresh writes the node if another request than this turn's has made it, so that others have counted from before start; or
// if there isn't enough left of its TTL. Then its lease counts from now.
func (b *Backend) refresh(ctx context.Context, l *lease, t *turn) error {
	if t.fresh && t.rest(age(t.start, t.start.Round(0), time.Now())) >= t.ttl/leastRest {
		return nil
	}
	seal := func() error {
		t.start, t.fresh = time.Now(), true
		return b.seal(ctx, l, t.ttl)
	}
	if t.wait {
		return b.insist(ctx, l, seal)
	}
	return thrice(seal)
}

// age is what has passed between start, which is wall on the wall clock, and now: the larger of what the monotonic clock
// says, which stands still while the machine is suspended, and what the wall clock says, which may be set back.
func age(start, wall, now time.Time) time.Duration {
	return max(now.Sub(start), now.Round(0).Sub(wall))
}

// watched is what a watch is of.
type watched struct {
	path string
	head bool // it tells of every change, not only of the end
}

// watch is of the node for which waiters wait. The client cannot take it back, so all share it who want the same.
type watch struct {
	of      watched
	version int32         // of a head's data
	ttl     time.Duration // of a head; 0 if it has none
	ours    bool          // a head of this session's
	fired   chan struct{} // closed when event is there
	event   zk.Event
}

// await waits until there is reason to look at the queue again: n, a node before l's, is gone; or n is the head of the
// queue and has been renewed, or has run out; or it is time for a look whether it is the head. It reports whether l's node is
// the first now, which is so when n was the head, and l's the next, and n is gone, but not with its session that is l's too.
func (b *Backend) await(ctx context.Context, l *lease, n node, head bool, w **watch, t *turn) (first bool, err error) {
	if *w == nil || (*w).of != (watched{n.path(), head}) {
		err := b.insist(ctx, l, func() (err error) { *w, err = b.watch(ctx, l, watched{n.path(), head}); return err })
		if errors.Is(err, zk.ErrNoNode) {
			return false, nil
		}
		if err != nil {
			return false, err
		}
	}
	ttl := t.ttl
	if head {
		ttl = (*w).ttl
		if err := b.refresh(ctx, l, t); err != nil { // while the head has the lock, and nobody waits for this
			return false, err
		}
	}
	var alarm <-chan time.Time
	if ttl > 0 {
		timer := time.NewTimer(ttl)
		defer timer.Stop()
		alarm = timer.C
	}
	select {
	case <-(*w).fired:
		first = head && !(*w).ours && (*w).event.Type == zk.EventNodeDeleted
		*w = nil
		return first, nil
	case <-alarm:
		if !head {
			return false, nil
		}
		// It was seen at this version for all of its TTL. If it has been renewed, it has another version, whether or not the
		// watch has told so: one that is set again after a reconnection may miss a change.
		switch err := b.deleteAt(ctx, (*w).of.path, (*w).version); {
		case broken(err):
		case err == nil, errors.Is(err, zk.ErrNoNode), errors.Is(err, zk.ErrBadVersion):
			b.unwatch(*w)
			*w = nil
		default:
			return false, err
		}
	case <-l.gone:
		return false, errGone
	case <-ctx.Done():
		return false, fmt.Errorf("waiting: %w", context.Cause(ctx))
	}
	return false, nil
}

// watch watches a node for l, unless that is done already. Of a head of the queue, which may run out, it wants to know every
// change.
func (b *Backend) watch(ctx context.Context, l *lease, of watched) (*watch, error) {
	b.mu.Lock()
	w := b.watches[of]
	b.mu.Unlock()
	if w != nil {
		return w, nil
	}
	w = &watch{of: of, fired: make(chan struct{})}
	var fired <-chan zk.Event
	var err error
	if of.head {
		var data []byte
		var stat *zk.Stat
		if data, stat, fired, err = b.getW(ctx, of.path); err == nil {
			w.version, w.ours = stat.Version, stat.EphemeralOwner == l.session
			w.ttl, _ = time.ParseDuration(string(data)) // a node of another's make never runs out
		}
	} else {
		fired, err = b.childrenW(ctx, of.path) // fires when the node is gone
	}
	if err != nil {
		return nil, err
	}
	b.mu.Lock()
	b.watches[of] = w // if there is another by now, it ends as this one does
	b.mu.Unlock()
	go func() {
		w.event = <-fired
		b.unwatch(w)
		close(w.fired)
	}()
	return w, nil
}

// unwatch has nobody share a watch any more.
func (b *Backend) unwatch(w *watch) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.watches[w.of] == w {
		delete(b.watches, w.of)
	}
}

// insist repeats f for a waiter while the connection is broken, for as long as the node is there and somebody waits.
func (b *Backend) insist(ctx context.Context, l *lease, f func() error) error {
	for r := (retry{b: b}); ; {
		err := f()
		if !broken(err) {
			return err
		}
		select {
		case <-r.pause():
		case <-l.gone:
			return errGone
		case <-ctx.Done():
			return fmt.Errorf("waiting: %w", context.Cause(ctx))
		}
		if r.closed() {
			l.vanish()
			return errGone
		}
	}
}
