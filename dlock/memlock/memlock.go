// Package memlock is a dlock.Backend in the memory of one process: the reference for what the rules of dlock.Backend mean,
// and a lock service for tests. It has no part in production, where processes are what a lock keeps apart.
//
// Waiters are served first come, first served. Tokens are kept for as long as the Backend exists.
package memlock

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/fencelab/fencelab/dlock"
)

// Options configure a [Backend].
type Options struct {
	// Clock is the server's clock, which decides when a lease has run out. Nil: the process's own.
	Clock Clock
}

// Backend implements dlock.Backend.
type Backend struct {
	clock  Clock
	closed chan struct{}

	mu    sync.Mutex // guards what follows, and the closing of closed
	locks map[string]*lock
}

var _ dlock.Backend = (*Backend)(nil)

// lock is one key. It is never removed, since its counter must only grow.
type lock struct {
	fence   uint64    // the last token
	owner   string    // the last owner; "" once it has released
	until   time.Time // when the owner's lease runs out, on the server's clock
	waiters []*waiter // in order of arrival
	alarm   bool      // a timer will call settle
}

type waiter struct {
	r       dlock.Request
	granted chan dlock.Grant // has room for the grant
}

// New returns an empty Backend. It cannot fail.
func New(opts *Options) *Backend {
	b := &Backend{clock: realClock{}, closed: make(chan struct{}), locks: map[string]*lock{}}
	if opts != nil && opts.Clock != nil {
		b.clock = opts.Clock
	}
	return b
}

// Acquire implements dlock.Backend.
func (b *Backend) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	w := &waiter{r: r, granted: make(chan dlock.Grant, 1)}
	if err := b.enter(ctx, r.TTL); err != nil {
		return dlock.Grant{}, err
	}
	l := b.lock(r.Key)
	l.waiters = append(l.waiters, w)
	b.settle(l)
	b.mu.Unlock()

	var err error
	select {
	case g := <-w.granted:
		return g, nil
	case <-ctx.Done():
		err = fmt.Errorf("memlock: waiting for %q: %w", r.Key, context.Cause(ctx))
	case <-b.closed:
		err = dlock.ErrClosed
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	select {
	case g := <-w.granted: // just now
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
	defer b.mu.Unlock()
	l := b.lock(r.Key)
	b.settle(l)
	if b.held(l) && l.owner != r.Owner {
		return dlock.Grant{}, dlock.ErrHeld
	}
	return b.grant(l, r), nil
}

// Renew implements dlock.Backend.
func (b *Backend) Renew(ctx context.Context, g dlock.Grant) error {
	if err := b.enter(ctx, g.TTL); err != nil {
		return err
	}
	defer b.mu.Unlock()
	l := b.lock(g.Key)
	if !b.held(l) || l.owner != g.Owner {
		return dlock.ErrLost
	}
	l.until = b.clock.Now().Add(g.TTL)
	return nil
}

// Release implements dlock.Backend.
func (b *Backend) Release(ctx context.Context, g dlock.Grant) error {
	if err := b.enter(ctx, time.Nanosecond); err != nil { // an undo has no TTL
		return err
	}
	defer b.mu.Unlock()
	l := b.lock(g.Key)
	if !b.held(l) || l.owner != g.Owner {
		return dlock.ErrLost
	}
	l.owner = ""
	b.settle(l)
	return nil
}

// Close implements dlock.Backend.
func (b *Backend) Close() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.isClosed() {
		close(b.closed)
	}
	return nil
}

// enter locks b.mu, unless the call must be refused.
func (b *Backend) enter(ctx context.Context, ttl time.Duration) error {
	if ctx.Err() != nil {
		return fmt.Errorf("memlock: %w", context.Cause(ctx))
	}
	if ttl <= 0 {
		return fmt.Errorf("%w: memlock: TTL %v is not positive", dlock.ErrInvalid, ttl)
	}
	b.mu.Lock()
	if b.isClosed() {
		b.mu.Unlock()
		return dlock.ErrClosed
	}
	return nil
}

func (b *Backend) isClosed() bool {
	select {
	case <-b.closed:
		return true
	default:
		return false
	}
}

func (b *Backend) lock(key string) *lock {
	l := b.locks[key]
	if l == nil {
		l = &lock{}
		b.locks[key] = l
	}
	return l
}

func (b *Backend) held(l *lock) bool { return l.owner != "" && b.clock.Now().Before(l.until) }

// settle gives the lock, if it is free, to whoever has waited longest, and looks again when the lease runs out.
func (b *Backend) settle(l *lock) {
	if len(l.waiters) == 0 {
		return
	}
	if !b.held(l) {
		b.grant(l, l.waiters[0].r)
	}
	l.waiters = slices.DeleteFunc(l.waiters, func(w *waiter) bool {
		if w.r.Owner != l.owner { // a request may have been repeated while it waited
			return false
		}
		w.granted <- b.grant(l, w.r)
		return true
	})
	if len(l.waiters) > 0 && !l.alarm {
		l.alarm = true
		b.clock.AfterFunc(l.until.Sub(b.clock.Now()), func() {
			b.mu.Lock()
			defer b.mu.Unlock()
			l.alarm = false
			if !b.isClosed() {
				b.settle(l)
			}
		})
	}
}

// grant gives the lock to r, or again to r with the same token if it has it.
func (b *Backend) grant(l *lock, r dlock.Request) dlock.Grant {
	start := time.Now() // the holder's clock, read before the server's
	if !b.held(l) || l.owner != r.Owner {
		l.fence++
		l.owner = r.Owner
	}
	l.until = b.clock.Now().Add(r.TTL)
	return dlock.Grant{Key: r.Key, Owner: r.Owner, Fence: l.fence, TTL: r.TTL, Start: start}
}
