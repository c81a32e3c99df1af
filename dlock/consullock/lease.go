package consullock

import (
	"context"
	"errors"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/fencelab/fencelab/dlock"
)

// id is what a lease is known by.
type id struct{ key, owner string }

// lease is a key that is held through this Backend, or may be: its request was sent, and hasn't been refused.
// Backend.mu guards what changes.
type lease struct {
	id
	s     *session
	flags uint64    // of the entry; no other request for s has the same
	index uint64    // of the write that took the key; 0 while the request hasn't been answered
	until time.Time // when it runs out
	timer *time.Timer
	over  bool // it is not held, and can't come to be: s no longer counts it
}

// is reports whether e was written by the request for l.
func (l *lease) is(e *api.KVPair) bool {
	return e != nil && e.Session == l.s.id && e.Flags == l.flags && string(e.Value) == l.owner
}

// begin notes that key is about to be taken, until then. Whatever becomes of the request, it will be given back.
func (b *Backend) begin(key, owner string, s *session, until time.Time) *lease {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.asked++
	l := &lease{id: id{key, owner}, s: s, flags: b.asked, until: until}
	s.leases++
	b.leases[l.id] = l
	b.arm(l)
	return l
}

// arm has l run out when its time has come. b.mu is held.
func (b *Backend) arm(l *lease) {
	if l.timer != nil {
		l.timer.Stop()
	}
	if b.open.Err() == nil {
		l.timer = time.AfterFunc(time.Until(l.until), func() { b.expire(l) })
	}
}

// settle notes that the request for l has been carried out with that index, or may be if it wasn't answered: then index is 0.
// If l has run out meanwhile, there may have been nothing yet to give back then.
func (b *Backend) settle(l *lease, index uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	l.index = index
	if l.s.ended() || b.leases[l.id] == l {
		return
	}
	b.leases[l.id] = l
	b.arm(l)
}

func (b *Backend) indexOf(l *lease) uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return l.index
}

func (b *Backend) lease(key, owner string) *lease {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.leases[id{key, owner}]
}

// keep has l run out at until. It reports false if it already has.
func (b *Backend) keep(l *lease, until time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.leases[l.id] != l {
		return false
	}
	if until.After(l.until) {
		l.until = until
		b.arm(l)
	}
	return true
}

// forget removes l. b.mu is held.
func (b *Backend) forget(l *lease) {
	if l.timer != nil {
		l.timer.Stop()
	}
	if b.leases[l.id] == l {
		delete(b.leases, l.id)
	}
	b.finish(l)
}

// finish takes note that l is over. b.mu is held.
func (b *Backend) finish(l *lease) {
	if !l.over {
		l.over = true
		l.s.leases--
		b.discard(l.s)
	}
}

// drop removes l, which isn't held.
func (b *Backend) drop(l *lease) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.forget(l)
}

const (
	expireTry      = 5 * time.Second // one try's timeout
	expirePause    = 50 * time.Millisecond
	expireMaxPause = time.Second
)

// expire lets others in when l has run out. Its session would do that much later. It may have to try again, and the owner
// may have been granted the key anew by then: that is of another index, or of another session, for l's is sealed.
func (b *Backend) expire(l *lease) {
	b.mu.Lock()
	if b.leases[l.id] != l || b.open.Err() != nil || time.Now().Before(l.until) { // renewed at this moment
		b.mu.Unlock()
		return
	}
	delete(b.leases, l.id)
	b.busy.Add(1)
	b.mu.Unlock()
	defer func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.finish(l)
		b.busy.Done()
	}()
	for pause := expirePause; b.open.Err() == nil; pause = min(2*pause, expireMaxPause) {
		ctx, cancel := context.WithTimeout(b.open, expireTry)
		err := b.seal(ctx, l)
		if err == nil {
			err = b.free(ctx, l.id, l.s.id, b.indexOf(l))
		}
		cancel()
		if err == nil || errors.Is(err, dlock.ErrLost) {
			return
		}
		b.pause(b.open, pause)
		select {
		case <-l.s.gone:
			return
		default:
		}
	}
}
