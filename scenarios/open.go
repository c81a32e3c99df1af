package scenarios

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redlock"
	"github.com/fencelab/fencelab/internal/locks"
)

// OpenLock opens the locks of this module, by name. It is what [Child] is called with where no lock of one's own is under test.
func OpenLock(ctx context.Context, s LockSpec) (Lock, error) {
	var b *locks.Backend
	err := again(ctx, func() (err error) {
		b, err = openVariant(ctx, s)
		return err
	})
	if err != nil {
		return nil, err
	}
	var backend dlock.Backend = b
	if s.Gap != nil {
		if backend, err = newGetThenDel(b, s); err != nil {
			return nil, errors.Join(err, b.Close())
		}
	}
	o := &dlock.Options{TTL: s.TTL}
	if s.Renew {
		o.Renew = dlock.Renew{Every: renewEvery(s.TTL), MaxHold: s.MaxHold}
	}
	l, err := dlock.New(backend, o)
	if err != nil {
		return nil, errors.Join(err, backend.Close())
	}
	return persistent{FromLocker(l)}, nil
}

// renewEvery is a third of a short lease, as is usual, and a smaller part of one that is to outlast a stall of the machine, of
// which a lease then bears nine tenths.
func renewEvery(ttl time.Duration) time.Duration {
	return min(ttl/3, max(ttl/10, 250*time.Millisecond))
}

// persistent asks again, as a service would: when a grant was over by the time it arrived, as it may be on a busy machine if
// leases are short, and when the lock service doesn't answer, as the one of its servers that was asked may not.
type persistent struct{ Lock }

func (p persistent) Acquire(ctx context.Context, key string) (lease Lease, err error) {
	err = again(ctx, func() (err error) {
		lease, err = p.Lock.Acquire(ctx, key)
		return err
	})
	return lease, err
}

// tries is how often a lock service is asked in vain.
const tries = 10

// again asks a lock service until it answers.
func again(ctx context.Context, ask func() error) (err error) {
	for range tries {
		err = ask()
		if err == nil || ctx.Err() != nil || errors.Is(err, dlock.ErrInvalid) || errors.Is(err, dlock.ErrClosed) {
			break
		}
	}
	return err
}

// nodeTimeout is longer than any live node takes on a busy machine: what makes a node silent in a run is a fault.
const nodeTimeout = 10 * time.Second

func openVariant(ctx context.Context, s LockSpec) (*locks.Backend, error) {
	spec := locks.Spec{Lock: s.Lock, Addrs: s.Addrs, TTL: s.TTL, MinSession: s.MinSession}
	switch {
	case s.Lock == locks.Redlock && (s.Variant == "" || s.Variant == VariantCounters):
		return locks.OpenRedlock(ctx, spec, &redlock.Options{NodeTimeout: nodeTimeout, UnsafeCounters: s.Variant != ""})
	case s.Variant == "":
		return locks.Open(ctx, spec)
	}
	return nil, fmt.Errorf("scenarios: there is no variant %q of %s", s.Variant, s.Lock)
}
