package promises_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/google/uuid"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/jitter"
	"github.com/fencelab/fencelab/scenarios"
)

// majority is a lock on a majority of servers. Its token is that of the first server that grants it.
type majority struct {
	*simple // its defects
	locks   []scenarios.Lock
	limit   time.Duration // of a request to one of them
	renew   int           // how many are enough to renew a lease
}

func openMajority(ctx context.Context, s scenarios.LockSpec, set func(*simple), l *simple) (scenarios.Lock, error) {
	m := majority{simple: l, limit: s.TTL / 4, renew: 2}
	if l.is("waits for each server") {
		m.limit = time.Hour
	}
	switch {
	case l.is("one server renews a lease"):
		m.renew = 1
	case l.is("a renewal needs all servers"):
		m.renew = len(s.Addrs)
	}
	for _, addr := range s.Addrs {
		one := s
		one.Addrs = []string{addr}
		lock, err := open(set)(ctx, one)
		if err == nil && l.is("needs all servers to open") {
			err = lock.(*simple).redis.Ping(ctx).Err()
		}
		if err != nil {
			return nil, err
		}
		m.locks = append(m.locks, lock)
	}
	return m, nil
}

func (m majority) TryAcquire(ctx context.Context, key string) (scenarios.Lease, error) {
	l, start := most{m: m}, time.Now()
	var failed error
	ctx = context.WithValue(ctx, valueKey{}, uuid.NewString())
	for _, one := range m.locks {
		short, cancel := context.WithTimeout(ctx, m.limit)
		got, err := one.TryAcquire(short, key)
		cancel()
		if err == nil {
			l.leases = append(l.leases, got)
			l.Lease = l.leases[0]
			continue
		}
		if failed = err; !m.is("a silent server isn't freed") && isTimeout(err) {
			l.perhaps = append(l.perhaps, one.(*simple).granted(ctx, key))
		}
	}
	votes := len(l.leases)
	if votes > 0 && m.is("a timeout is a vote") {
		votes += len(l.perhaps)
	}
	if votes > len(m.locks)/2 {
		if m.is("late until") {
			start = time.Now()
		}
		until := start.Add(l.TTL())
		l.until.Store(&until)
		var end context.CancelFunc
		l.ctx, end = context.WithCancel(context.WithoutCancel(ctx))
		if l.timer = time.AfterFunc(time.Until(until), end); time.Now().After(until) {
			end()
		}
		return &l, nil
	}
	if !m.is("a refused try stays") || errors.Is(failed, dlock.ErrHeld) {
		_ = l.Release(context.WithoutCancel(ctx))
	}
	return nil, failed
}

func (m majority) Acquire(ctx context.Context, key string) (scenarios.Lease, error) {
	return polls(func() (scenarios.Lease, error) { return m.TryAcquire(ctx, key) }, func() error {
		return jitter.Sleep(ctx, 10*time.Millisecond+rand.N(20*time.Millisecond)) //nolint:gosec // so that not all try at once
	})
}

func (m majority) Close() (err error) {
	for _, one := range m.locks {
		err = errors.Join(err, one.Close())
	}
	return err
}

type most struct {
	scenarios.Lease
	m       majority
	leases  []scenarios.Lease
	perhaps []scenarios.Lease // of servers that didn't reply
	until   atomic.Pointer[time.Time]
	ctx     context.Context
	timer   *time.Timer
	failed  atomic.Pointer[time.Time] // when a release first failed
}

func (l *most) Until() time.Time { return *l.until.Load() }

func (l *most) Context() context.Context { return l.ctx }

func (l *most) Renew(ctx context.Context) error {
	until, renewed := time.Now().Add(l.TTL()), 0
	for _, one := range l.leases {
		short, cancel := context.WithTimeout(ctx, l.m.limit)
		if one.(*lease).Renew(short) == nil {
			renewed++
		}
		cancel()
	}
	if renewed < l.m.renew || !l.timer.Stop() {
		return errors.New("too few servers, or too late")
	}
	l.until.Store(&until)
	l.timer.Reset(time.Until(until))
	return nil
}

func (l *most) Release(ctx context.Context) (err error) {
	for _, one := range l.perhaps {
		short, cancel := context.WithTimeout(ctx, min(l.m.limit, time.Second))
		_ = one.Release(short)
		cancel()
	}
	for _, one := range l.leases {
		err = errors.Join(err, one.Release(ctx))
		if err == nil || errors.Is(err, dlock.ErrLost) {
			continue
		}
		now := time.Now()
		if l.failed.CompareAndSwap(nil, &now); now.Before(l.failed.Load().Add(time.Duration(l.m.releaseStops) * time.Second)) {
			return err
		}
	}
	return err
}
