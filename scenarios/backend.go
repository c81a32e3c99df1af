package scenarios

import (
	"context"
	"errors"
	"time"

	"github.com/fencelab/fencelab/dlock"
)

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
