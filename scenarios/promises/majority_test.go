package promises_test

import (
	"context"
	"errors"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/scenarios"
)

// majority is a lock on most of several servers. Its token is that of the first which grants it.
type majority struct {
	locks []scenarios.Lock
	limit time.Duration // of a request to one of them
}

func openMajority(ctx context.Context, s scenarios.LockSpec, set func(*simple), unlimited bool) (scenarios.Lock, error) {
	m := majority{limit: s.TTL / 4}
	if unlimited {
		m.limit = time.Hour
	}
	for _, addr := range s.Addrs {
		one := s
		one.Addrs = []string{addr}
		l, err := open(set)(ctx, one)
		if err != nil {
			return nil, err
		}
		m.locks = append(m.locks, l)
	}
	return m, nil
}

func (m majority) TryAcquire(ctx context.Context, key string) (scenarios.Lease, error) {
	var l most
	var failed error
	for _, one := range m.locks {
		short, cancel := context.WithTimeout(ctx, m.limit)
		got, err := one.TryAcquire(short, key)
		cancel()
		if err == nil {
			l.leases = append(l.leases, got)
			l.Lease = l.leases[0]
			continue
		}
		if failed = err; errors.Is(err, dlock.ErrHeld) {
			break // another who tried later mustn't get the others
		}
	}
	if len(l.leases) > len(m.locks)/2 {
		return l, nil
	}
	_ = l.Release(context.WithoutCancel(ctx))
	return nil, failed
}

func (m majority) Acquire(ctx context.Context, key string) (scenarios.Lease, error) {
	for {
		l, err := m.TryAcquire(ctx, key)
		if !errors.Is(err, dlock.ErrHeld) {
			return l, err
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (m majority) Close() (err error) {
	for _, one := range m.locks {
		err = errors.Join(err, one.Close())
	}
	return err
}

// most is a lease by most of the servers.
type most struct {
	scenarios.Lease
	leases []scenarios.Lease
}

func (l most) Release(ctx context.Context) (err error) {
	for _, one := range l.leases {
		err = errors.Join(err, one.Release(ctx))
	}
	return err
}
