package scenarios

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/scenarios/history"
)

// Lock is the lock under test.
type Lock interface {
	Acquire(ctx context.Context, key string) (Lease, error)
	TryAcquire(ctx context.Context, key string) (Lease, error) // wraps dlock.ErrHeld if another holder has the lock
	Close() error
}

// Lease is one grant; a *dlock.Handle is one.
type Lease interface {
	Fence() uint64 // the fencing token, from 1; 0: the lock has none, and fencing must be off
	TTL() time.Duration
	Until() time.Time                  // when the lease must be presumed lost, unless renewed
	Context() context.Context          // ends when the lease is, or must be presumed, lost
	Release(ctx context.Context) error // wraps dlock.ErrLost if the lease had lost the lock; may be called concurrently
}

// FromLocker adapts a Locker.
func FromLocker(l *dlock.Locker) Lock { return locker{l} }

type locker struct{ *dlock.Locker }

func (l locker) Acquire(ctx context.Context, key string) (Lease, error) {
	return asLease(l.Locker.Acquire(ctx, key))
}

func (l locker) TryAcquire(ctx context.Context, key string) (Lease, error) {
	return asLease(l.Locker.TryAcquire(ctx, key))
}

// asLease returns a nil Lease instead of a nil *Handle in one.
func asLease(h *dlock.Handle, err error) (Lease, error) {
	if err != nil {
		return nil, err
	}
	return h, nil
}

// Adapter is a [Lock] made of a client library's functions.
type Adapter struct {
	// Get acquires the lock of key. With wait it waits until ctx ends; without, it returns at once.
	Get func(ctx context.Context, key string, wait bool) (Grant, error)
	// Held and Lost are the library's errors for a held lock and for the release of a lost lease. Nil: Get and Grant.Release wrap
	// dlock.ErrHeld and dlock.ErrLost.
	Held, Lost error
	// Shut, if not nil, frees what the client uses.
	Shut func() error
}

// Grant describes a [Lease].
type Grant struct {
	Token   uint64 // as Lease.Fence
	TTL     time.Duration
	Until   time.Time       // as Lease.Until; zero: unknown, and hazards don't run
	Lost    <-chan struct{} // closed when the lease is lost. Nil: the library doesn't say, and a timer ends the lease at Until
	Release func(ctx context.Context) error
	// Renew restarts the lease, and returns its new Until; Release may be called meanwhile. Nil: the library renews by
	// itself, or not at all.
	Renew func(ctx context.Context) (time.Time, error)
}

// Acquire implements [Lock].
func (a Adapter) Acquire(ctx context.Context, key string) (Lease, error) {
	return a.lease(ctx, key, true)
}

// TryAcquire implements [Lock].
func (a Adapter) TryAcquire(ctx context.Context, key string) (Lease, error) {
	return a.lease(ctx, key, false)
}

// Close implements [Lock].
func (a Adapter) Close() error {
	if a.Shut == nil {
		return nil
	}
	return a.Shut()
}

func (a Adapter) lease(ctx context.Context, key string, wait bool) (Lease, error) {
	if a.Get == nil {
		return nil, errors.New("scenarios: Adapter.Get is nil: it acquires the lock")
	}
	g, err := a.Get(ctx, key, wait)
	if err != nil {
		return nil, wrapAs(dlock.ErrHeld, a.Held, err)
	}
	ctx = context.WithoutCancel(ctx)
	l := &adapted{g: g, lost: a.Lost}
	switch {
	case g.Release == nil:
		return nil, errors.New("scenarios: Grant.Release is nil: it releases the lock")
	case g.Lost != nil:
		l.ctx, l.cancel = whileHeld{ctx, g.Lost}, func() {}
	case g.Until.IsZero():
		return nil, errors.New("scenarios: Grant has neither Until nor Lost: one of them says when the lease is over")
	case g.Renew == nil:
		l.ctx, l.cancel = context.WithDeadline(ctx, g.Until)
	default:
		l.ctx, l.cancel = context.WithCancel(ctx)
		l.timer = time.AfterFunc(time.Until(g.Until), l.cancel)
	}
	if g.Renew == nil {
		return l, nil
	}
	return renewable{l}, nil
}

type whileHeld struct {
	context.Context
	lost <-chan struct{}
}

func (c whileHeld) Done() <-chan struct{} { return c.lost }

func (c whileHeld) Err() error {
	select {
	case <-c.lost:
		return context.Canceled
	default:
		return nil
	}
}

type adapted struct {
	lost   error
	ctx    context.Context
	cancel context.CancelFunc
	timer  *time.Timer // ends ctx at Until. Nil: a renewal doesn't move the end

	mu sync.Mutex
	g  Grant
}

func (l *adapted) Fence() uint64            { return l.g.Token }
func (l *adapted) TTL() time.Duration       { return l.g.TTL }
func (l *adapted) Context() context.Context { return l.ctx }

func (l *adapted) Until() time.Time {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.g.Until
}

func (l *adapted) Release(ctx context.Context) error {
	l.cancel()
	if l.timer != nil {
		l.timer.Stop()
	}
	return wrapAs(dlock.ErrLost, l.lost, l.g.Release(ctx))
}

type renewable struct{ *adapted }

// Renew restarts the lease.
func (l renewable) Renew(ctx context.Context) error {
	until, err := l.g.Renew(ctx)
	if err != nil {
		return wrapAs(dlock.ErrLost, l.lost, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.timer != nil {
		if !l.timer.Stop() { // the lease has ended for good; the library's error is judged
			return nil
		}
		l.timer.Reset(time.Until(until))
	}
	l.g.Until = until
	return nil
}

func wrapAs(ours, theirs, err error) error {
	if theirs != nil && errors.Is(err, theirs) {
		return fmt.Errorf("%w: %w", ours, err)
	}
	return err
}

// Open opens the lock in a worker's process.
type Open func(ctx context.Context, s LockSpec) (Lock, error)

// LockSpec describes the lock that a worker needs.
type LockSpec struct {
	Lock    string // Service.Lock
	Addrs   []string
	TTL     time.Duration
	Renew   bool          // in the background; HolderPartitioned and WedgedHolder detect a lock that doesn't
	MaxHold time.Duration // ends renewal
	// MinSession is the servers' shortest session; 0: the usual one.
	MinSession time.Duration
	// Variant, if not empty, names a defect that the lock must have. Open returns an error for an unknown one.
	Variant string
	// Gap, if not nil, requests a non-atomic release: GET, Gap, DEL. Open may refuse.
	Gap func() error `json:"-"`
}

// FromBackend returns the [Open] of a lock on a [dlock.Backend].
func FromBackend(open func(ctx context.Context, s LockSpec) (dlock.Backend, error)) Open {
	return func(ctx context.Context, s LockSpec) (Lock, error) {
		var backend dlock.Backend
		err := retry(ctx, func() (err error) {
			backend, err = open(ctx, s)
			return err
		})
		if err != nil {
			return nil, err
		}
		o := &dlock.Options{TTL: s.TTL}
		if s.Renew {
			o.Renew = dlock.Renew{Every: renewEvery(s.TTL), MaxHold: s.MaxHold}
		}
		l, err := dlock.New(backend, o)
		if err != nil {
			return nil, errors.Join(err, backend.Close())
		}
		return retryingLock{FromLocker(l)}, nil
	}
}

// renewEvery is a third of a short TTL, and a tenth of a long one, which survives a stall of nine tenths.
func renewEvery(ttl time.Duration) time.Duration {
	return min(ttl/3, max(ttl/10, 250*time.Millisecond))
}

// retryingLock retries after lost replies and grants that arrive too late.
type retryingLock struct{ Lock }

func (l retryingLock) Acquire(ctx context.Context, key string) (lease Lease, err error) {
	err = retry(ctx, func() (err error) {
		lease, err = l.Lock.Acquire(ctx, key)
		return err
	})
	return lease, err
}

const maxAttempts = 10

func retry(ctx context.Context, call func() error) (err error) {
	for range maxAttempts {
		if err = call(); err == nil || ctx.Err() != nil {
			break
		}
	}
	return err
}

type checkedLock struct {
	Lock
	spec *childSpec
}

func (l checkedLock) Acquire(ctx context.Context, key string) (Lease, error) {
	return l.acquire(ctx, func() (Lease, error) { return l.Lock.Acquire(ctx, key) })
}

func (l checkedLock) TryAcquire(ctx context.Context, key string) (Lease, error) {
	return l.acquire(ctx, func() (Lease, error) { return l.Lock.TryAcquire(ctx, key) })
}

// acquire retries until a lease has been renewed, if only the schedule may end the lease.
func (l checkedLock) acquire(ctx context.Context, acquire func() (Lease, error)) (Lease, error) {
	n := max(2, min(maxAttempts, int(DefaultStepTimeout/2/max(l.spec.Lock.TTL, time.Millisecond))))
	for range n {
		lease, err := acquire()
		if err != nil {
			return nil, err
		}
		if err := l.check(lease); err != nil {
			return nil, err
		}
		if w := l.spec.Worker; !w.Outlive || w.NoRenew || renewed(ctx, lease) {
			return lease, nil
		}
		_ = lease.Release(ctx)
	}
	return nil, fmt.Errorf("the lease has ended %d times without being renewed: with LockSpec.Renew the lock must renew it "+
		"in the background, and Lease.Until must show that; if the lock doesn't renew, set Service.NoRenew", n)
}

func (l checkedLock) check(lease Lease) error {
	switch {
	case lease == nil:
		return errors.New("the lock returned neither a lease nor an error")
	case lease.Until().IsZero():
		return errors.New("Lease.Until is the zero time: it must be when the lease is presumed lost")
	case lease.Fence() == 0 && l.spec.Fencing != history.FencingOff:
		return fmt.Errorf("the lock has granted a lease without a fencing token, Lease.Fence is 0: with fencing %s the resource has "+
			"nothing to compare; if the lock has no tokens, set Service.NoTokens and run with fencing off",
			l.spec.Fencing)
	}
	return nil
}

func renewed(ctx context.Context, lease Lease) bool {
	first := lease.Until()
	poll := time.NewTicker(2 * time.Millisecond)
	defer poll.Stop()
	for !lease.Until().After(first) {
		select {
		case <-poll.C:
			if time.Since(first) > 0 { // a context that doesn't end is reported later
				return false
			}
		case <-lease.Context().Done():
			return false
		case <-ctx.Done():
			return false
		}
	}
	return true
}
