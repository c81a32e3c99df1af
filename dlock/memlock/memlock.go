// Package memlock is a dlock.Backend in the memory of one process: the reference for the rules of dlock.Backend, and a lock
// service for tests. Waiters are served first come, first served. Tokens last as long as the Backend.
package memlock

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/fencelab/fencelab/dlock"
)

// Backend implements dlock.Backend.
type Backend struct {
	m         *memory
	closed    chan struct{}
	closeOnce sync.Once
}

var _ dlock.Backend = (*Backend)(nil)

// memory is the lock service; Backends are its clients.
type memory struct {
	mu    sync.Mutex
	locks map[string]*lock
}

// lock is one key. It is never removed, since its counter must only grow.
type lock struct {
	fence   uint64    // the last token
	owner   string    // "" once it has released
	until   time.Time // when the lease ends
	waiters []*waiter
	alarm   time.Time // when the next timer calls settle; zero: none
}

type waiter struct {
	r       dlock.Request
	granted chan dlock.Grant
}

// New returns a Backend with its own memory.
func New() *Backend {
	return &Backend{m: &memory{locks: map[string]*lock{}}, closed: make(chan struct{})}
}

// Client returns another Backend on the same memory, like another process. Each is closed separately.
func (b *Backend) Client() *Backend { return &Backend{m: b.m, closed: make(chan struct{})} }

// Acquire implements dlock.Backend.
func (b *Backend) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	w := &waiter{r: r, granted: make(chan dlock.Grant, 1)}
	if err := b.enter(ctx, r.TTL); err != nil {
		return dlock.Grant{}, err
	}
	l := b.m.lock(r.Key)
	l.waiters = append(l.waiters, w)
	b.m.settle(l)
	b.m.mu.Unlock()
	if len(w.granted) == 0 {
		r.NoteHeld()
	}

	var err error
	select {
	case g := <-w.granted:
		return g, nil
	case <-ctx.Done():
		err = fmt.Errorf("memlock: waiting for %q: %w", r.Key, context.Cause(ctx))
	case <-b.closed:
		err = dlock.ErrClosed
	}
	b.m.mu.Lock()
	defer b.m.mu.Unlock()
	select {
	case g := <-w.granted:
		return g, nil
	default:
	}
	l.waiters = slices.DeleteFunc(l.waiters, func(v *waiter) bool { return v == w })
	return dlock.Grant{}, err
}

// TryAcquire implements dlock.Backend.
func (b *Backend) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	if err := b.enter(ctx, r.TTL); err != nil {
		return dlock.Grant{}, err
	}
	defer b.m.mu.Unlock()
	l := b.m.lock(r.Key)
	b.m.settle(l)
	if b.m.held(l) && l.owner != r.Owner {
		return dlock.Grant{}, dlock.ErrHeld
	}
	return b.m.grant(l, r), nil
}

// Renew implements dlock.Backend.
func (b *Backend) Renew(ctx context.Context, g dlock.Grant) error {
	if err := b.enter(ctx, g.TTL); err != nil {
		return err
	}
	defer b.m.mu.Unlock()
	l := b.m.lock(g.Key)
	if !b.m.held(l) || l.owner != g.Owner {
		return dlock.ErrLost
	}
	l.until = time.Now().Add(g.TTL)
	return nil
}

// Release implements dlock.Backend.
func (b *Backend) Release(ctx context.Context, g dlock.Grant) error {
	if err := b.enter(ctx, time.Nanosecond); err != nil { // an undo has no TTL
		return err
	}
	defer b.m.mu.Unlock()
	l := b.m.lock(g.Key)
	if !b.m.held(l) || l.owner != g.Owner {
		return dlock.ErrLost
	}
	l.owner = ""
	b.m.settle(l)
	return nil
}

// Close implements dlock.Backend.
func (b *Backend) Close() error {
	b.closeOnce.Do(func() { close(b.closed) })
	return nil
}

func (b *Backend) enter(ctx context.Context, ttl time.Duration) error {
	if ctx.Err() != nil {
		return fmt.Errorf("memlock: %w", context.Cause(ctx))
	}
	if ttl <= 0 {
		return fmt.Errorf("%w: memlock: TTL %v is not positive", dlock.ErrInvalid, ttl)
	}
	select {
	case <-b.closed:
		return dlock.ErrClosed
	default:
	}
	b.m.mu.Lock()
	return nil
}

func (m *memory) lock(key string) *lock {
	l := m.locks[key]
	if l == nil {
		l = &lock{}
		m.locks[key] = l
	}
	return l
}

func (m *memory) held(l *lock) bool { return l.owner != "" && time.Now().Before(l.until) }

// settle grants a free lock to the first waiter, and sets a timer for the lease's end.
func (m *memory) settle(l *lock) {
	if len(l.waiters) == 0 {
		return
	}
	if !m.held(l) {
		m.grant(l, l.waiters[0].r)
	}
	l.waiters = slices.DeleteFunc(l.waiters, func(w *waiter) bool {
		if w.r.Owner != l.owner { // a request may be repeated while it waits
			return false
		}
		w.granted <- m.grant(l, w.r)
		return true
	})
	// A lease may end before that of the holder for whom the timer was set.
	if at := l.until; l.alarm.IsZero() || at.Before(l.alarm) {
		l.alarm = at
		time.AfterFunc(time.Until(at), func() {
			m.mu.Lock()
			defer m.mu.Unlock()
			if l.alarm.Equal(at) {
				l.alarm = time.Time{}
			}
			m.settle(l)
		})
	}
}

func (m *memory) grant(l *lock, r dlock.Request) dlock.Grant {
	start := time.Now()
	if !m.held(l) {
		l.fence++
		l.owner = r.Owner
	}
	l.until = start.Add(r.TTL)
	return dlock.Grant{Key: r.Key, Owner: r.Owner, Fence: l.fence, TTL: r.TTL, Start: start}
}
