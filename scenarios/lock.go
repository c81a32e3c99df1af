package scenarios

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/scenarios/history"
)

// Lock is what a scenario needs of a lock; [FromLocker] makes one of a *dlock.Locker.
type Lock interface {
	Acquire(ctx context.Context, key string) (Lease, error)    // waits
	TryAcquire(ctx context.Context, key string) (Lease, error) // wraps dlock.ErrHeld when another holder has it
	Close() error
}

// Lease is what a scenario needs of a grant; a *dlock.Handle is one.
type Lease interface {
	Fence() uint64                     // the fencing token, from 1; 0 of a lock that has none, which runs with fencing off
	TTL() time.Duration                // how long the lease lasts, from the grant
	Until() time.Time                  // when it must be presumed lost unless it is renewed
	Context() context.Context          // ends when it is, or must be presumed, lost
	Release(ctx context.Context) error // wraps dlock.ErrLost when the lock was no longer the lease's
}

// FromLocker makes a [Lock] of a Locker.
func FromLocker(l *dlock.Locker) Lock { return locker{l} }

type locker struct{ *dlock.Locker }

func (l locker) Acquire(ctx context.Context, key string) (Lease, error) {
	return leased(l.Locker.Acquire(ctx, key))
}

func (l locker) TryAcquire(ctx context.Context, key string) (Lease, error) {
	return leased(l.Locker.TryAcquire(ctx, key))
}

// leased keeps a nil *Handle from becoming a Lease that is not nil.
func leased(h *dlock.Handle, err error) (Lease, error) {
	if err != nil {
		return nil, err
	}
	return h, nil
}

// Open opens the lock that a worker uses, in the worker's process.
type Open func(ctx context.Context, s LockSpec) (Lock, error)

// LockSpec says what lock a worker needs.
type LockSpec struct {
	Lock    string        // the Service's Lock: which lock
	Addrs   []string      // those of the Service's Nodes: where its servers are
	TTL     time.Duration // of the leases
	Renew   bool          // renew them in the background: HolderPartitioned and WedgedHolder detect a lock that doesn't;
	MaxHold time.Duration // for so long
	// MinSession is the shortest session that the servers allow; 0: what is usual.
	MinSession time.Duration
	// Variant, if not empty, asks for a lock that is built wrongly in a certain way. Open returns an error for one that it
	// doesn't know.
	Variant string
	// Gap, if not nil, asks for a release that is not atomic: GET, Gap, DEL. A lock that has no such release returns an error.
	Gap func() error `json:"-"`
}

// FromBackend is the [Open] of a lock whose [dlock.Backend] open returns.
func FromBackend(open func(ctx context.Context, s LockSpec) (dlock.Backend, error)) Open {
	return func(ctx context.Context, s LockSpec) (Lock, error) {
		var backend dlock.Backend
		err := again(ctx, func() (err error) {
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

// renewEvery is a third of a short lease, as is usual. Of a lease that is to outlast a stall of the machine it is less, so that
// the lease survives a stall of nine tenths of its TTL.
func renewEvery(ttl time.Duration) time.Duration {
	return min(ttl/3, max(ttl/10, 250*time.Millisecond))
}

// retryingLock retries, as a service would: when a short lease had expired by the time the grant arrived, and when the lock
// service did not answer.
type retryingLock struct{ Lock }

func (l retryingLock) Acquire(ctx context.Context, key string) (lease Lease, err error) {
	err = again(ctx, func() (err error) {
		lease, err = l.Lock.Acquire(ctx, key)
		return err
	})
	return lease, err
}

// maxTries bounds the calls to a lock service that fails.
const maxTries = 10

// again calls a lock service until it succeeds, or until a retry is pointless.
func again(ctx context.Context, call func() error) (err error) {
	for range maxTries {
		err = call()
		if err == nil || ctx.Err() != nil || errors.Is(err, dlock.ErrInvalid) || errors.Is(err, dlock.ErrClosed) {
			break
		}
	}
	return err
}

// checkedLock is a lock whose grants are checked before they count.
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

// acquire acquires the lock. Where the schedule ends renewals, it retries until a lease has been renewed: one that is not, because
// the lock doesn't or the machine stood still, would end by itself.
func (l checkedLock) acquire(ctx context.Context, acquire func() (Lease, error)) (Lease, error) {
	how := l.spec.Worker
	n := max(2, min(maxTries, int(DefaultStepTimeout/2/max(l.spec.Lock.TTL, time.Millisecond)))) // within a step
	for range n {
		lease, err := acquire()
		if err != nil {
			return nil, err
		}
		if err := l.check(lease); err != nil {
			return nil, err
		}
		if !how.Outlive || how.NoRenew || renewed(ctx, lease) {
			return lease, nil
		}
		_ = lease.Release(ctx) // it is lost
	}
	return nil, fmt.Errorf("the lock's lease has ended %d times without being renewed: with LockSpec.Renew the lock is to renew it in the "+
		"background, and Lease.Until to tell; if it is one that doesn't, set Service.NoRenew", n)
}

func (l checkedLock) check(lease Lease) error {
	switch {
	case lease == nil:
		return errors.New("the lock has returned neither a lease nor an error")
	case lease.Until().IsZero():
		return errors.New("Lease.Until is the zero time: it tells when the lease must be presumed lost")
	case lease.Fence() == 0 && l.spec.Fencing != history.FencingOff:
		return fmt.Errorf("the lock has granted a lease without a fencing token, Lease.Fence is 0: with fencing %s the resource has "+
			"nothing to compare; if it is a lock that has none, set Service.NoTokens, and see with fencing off what becomes of the data",
			l.spec.Fencing)
	}
	return nil
}

// renewed waits until the lease is renewed, and reports whether it was.
func renewed(ctx context.Context, lease Lease) bool {
	first := lease.Until()
	poll := time.NewTicker(2 * time.Millisecond)
	defer poll.Stop()
	for !lease.Until().After(first) {
		select {
		case <-poll.C:
			if time.Since(first) > 0 { // of a context that goes on there is more to say later
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
