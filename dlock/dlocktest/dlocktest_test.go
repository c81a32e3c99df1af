package dlocktest_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/memlock"
)

func TestMemlock(t *testing.T) {
	t.Run("virtual", func(t *testing.T) {
		dlocktest.Run(t, dlocktest.Harness{New: memory(nil), Virtual: true})
	})
	t.Run("real", func(t *testing.T) {
		dlocktest.Run(t, dlocktest.Harness{New: memory(nil)})
	})
	t.Run("stalled", func(t *testing.T) {
		wrap := func(b dlock.Backend) dlock.Backend { return &stalled{Backend: b} }
		dlocktest.Run(t, dlocktest.Harness{New: memory(func() func(dlock.Backend) dlock.Backend { return wrap })})
	})
}

// stalled stalls for longer than a hand-over lasts: before every other such grant is known, and before every release of what
// Acquire got, so that others wait.
type stalled struct {
	dlock.Backend
	late atomic.Bool
}

const (
	claim = 20 * time.Millisecond
	stall = 2 * claim
)

func (s *stalled) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	g, err := s.TryAcquire(ctx, r)
	g.State = s
	if !errors.Is(err, dlock.ErrHeld) {
		return g, err
	}
	if r.TTL <= claim {
		return s.Backend.Acquire(ctx, r)
	}
	g, err = s.Backend.Acquire(ctx, dlock.Request{Key: r.Key, Owner: r.Owner, TTL: claim, OnHeld: r.OnHeld})
	if err != nil {
		return g, err
	}
	g.State = s
	g.TTL, g.Provisional = r.TTL, claim
	if late := s.late.Load(); s.late.CompareAndSwap(late, !late) && !late {
		time.Sleep(stall)
	}
	return g, nil
}

func (s *stalled) Release(ctx context.Context, g dlock.Grant) error {
	if g.State != nil {
		time.Sleep(stall)
	}
	return s.Backend.Release(ctx, g)
}

func memory(wrapping func() func(dlock.Backend) dlock.Backend) func(*testing.T) dlocktest.Service {
	return func(*testing.T) dlocktest.Service {
		wrap := func(b dlock.Backend) dlock.Backend { return b }
		if wrapping != nil {
			wrap = wrapping()
		}
		return service(memlock.New(), wrap)
	}
}

func service(m *memlock.Backend, wrap func(dlock.Backend) dlock.Backend) dlocktest.Service {
	var requests atomic.Int32
	return dlocktest.Service{
		Requests: func() int { return int(requests.Load()) },
		Backend:  func() dlock.Backend { return wrap(&counted{m.Client(), &requests}) },
		Faulty: func() (dlock.Backend, dlocktest.Link) {
			l := &link{Backend: m.Client()}
			return wrap(l), dlocktest.Link{
				LoseRequests: l.set(&l.loseRequests),
				LoseReplies:  l.set(&l.loseReplies),
				HoldReplies:  l.hold,
				Cut:          l.set(&l.loseRequests),
				Refuse:       l.set(&l.refuse),
			}
		},
	}
}

type counted struct {
	dlock.Backend
	n *atomic.Int32
}

func (c *counted) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	c.n.Add(1)
	return c.Backend.Acquire(ctx, r)
}

func (c *counted) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	c.n.Add(1)
	return c.Backend.TryAcquire(ctx, r)
}

type link struct {
	dlock.Backend

	mu                                sync.Mutex
	loseRequests, loseReplies, refuse bool
	held                              chan struct{} // closed on delivery; nil if replies aren't held
}

func (l *link) set(fault *bool) func() (heal func()) {
	to := func(v bool) {
		l.mu.Lock()
		defer l.mu.Unlock()
		*fault = v
	}
	return func() func() {
		to(true)
		return func() { to(false) }
	}
}

func (l *link) hold() (deliver func()) {
	held := make(chan struct{})
	l.mu.Lock()
	defer l.mu.Unlock()
	l.held = held
	return sync.OnceFunc(func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.held = nil
		close(held)
	})
}

var (
	errLink    = errors.New("broken link")
	errRefused = errors.New("the server is full")
)

func (l *link) call(ctx context.Context, f func() error) error {
	l.mu.Lock()
	fault, refuse := l.loseRequests, l.refuse
	l.mu.Unlock()
	switch {
	case fault:
		return errLink
	case refuse:
		return errRefused
	}
	err := f()
	l.mu.Lock()
	fault, held := l.loseReplies, l.held
	l.mu.Unlock()
	if fault {
		return errLink
	}
	if held != nil {
		select {
		case <-held:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return err
}

func (l *link) Acquire(ctx context.Context, r dlock.Request) (g dlock.Grant, err error) {
	err = l.call(ctx, func() (err error) { g, err = l.Backend.Acquire(ctx, r); return err })
	return g, err
}

func (l *link) TryAcquire(ctx context.Context, r dlock.Request) (g dlock.Grant, err error) {
	err = l.call(ctx, func() (err error) { g, err = l.Backend.TryAcquire(ctx, r); return err })
	return g, err
}

func (l *link) Renew(ctx context.Context, g dlock.Grant) error {
	return l.call(ctx, func() error { return l.Backend.Renew(ctx, g) })
}

func (l *link) Release(ctx context.Context, g dlock.Grant) error {
	return l.call(ctx, func() error { return l.Backend.Release(ctx, g) })
}
