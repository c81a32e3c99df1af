package dlock

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// instant grants every lease at once, and renews it in a time that can be set.
type instant struct {
	Backend
	renewal time.Duration
}

func (instant) Acquire(_ context.Context, r Request) (Grant, error) {
	return Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL, Fence: 1, Start: time.Now()}, nil
}

func (b instant) Renew(context.Context, Grant) error {
	time.Sleep(b.renewal)
	return nil
}
func (instant) Release(context.Context, Grant) error { return nil }
func (instant) Close() error                         { return nil }

func newInstant(t *testing.T, ttl time.Duration) *Locker {
	t.Helper()
	l, err := New(instant{renewal: ttl}, &Options{TTL: ttl})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// suspend makes the lease see what a machine that was suspended for d sees: the wall clock has moved, the monotonic
// clock has not, and no timer has run.
func suspend(h *Handle, d time.Duration) {
	h.ls.mu.Lock()
	defer h.ls.mu.Unlock()
	h.ls.wall = h.ls.wall.Add(-d)
}

func TestSuspendedMachine(t *testing.T) {
	const ttl = 10 * time.Second
	end := ttl - margin(ttl)
	t.Run("seen when asked", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			h, err := newInstant(t, ttl).Acquire(t.Context(), "k")
			if err != nil {
				t.Fatal(err)
			}
			suspend(h, end-1)
			if err := h.Context().Err(); err != nil {
				t.Errorf("got %v a moment before the end, want nil", err)
			}
			suspend(h, 1)
			// Not even the timer's turn is needed.
			if err := h.Context().Err(); !errors.Is(err, context.Canceled) {
				t.Errorf("got %v, want context canceled", err)
			}
			if err := context.Cause(h.Context()); !errors.Is(err, ErrLost) {
				t.Errorf("got cause %v, want ErrLost", err)
			}
		})
	})
	t.Run("seen by the channel", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			h, err := newInstant(t, ttl).Acquire(t.Context(), "k")
			if err != nil {
				t.Fatal(err)
			}
			done := h.Context().Done()
			suspend(h, ttl)
			began := time.Now()
			<-done
			if got := time.Since(began); got > recheck {
				t.Errorf("noticed after %v, want at most %v", got, recheck)
			}
		})
	})
	t.Run("seen by Do's context, Renew and Acquire", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			l := newInstant(t, ttl)
			err := l.Do(t.Context(), "k", func(ctx context.Context, h *Handle) error {
				suspend(h, ttl)
				if err := ctx.Err(); !errors.Is(err, context.Canceled) {
					t.Errorf("got %v, want context canceled", err)
				}
				return nil
			})
			if err != nil {
				t.Errorf("got %v, want nil: the Backend says that it was held to the end", err)
			}
			h, err := l.Acquire(t.Context(), "k")
			if err != nil {
				t.Fatal(err)
			}
			suspend(h, ttl)
			was := context.WithoutCancel(h.Context())
			if err := h.Renew(t.Context()); !errors.Is(err, ErrLost) {
				t.Errorf("Renew: got %v, want ErrLost", err)
			}
			if _, err := l.Acquire(was, "k"); err != nil {
				t.Errorf("Acquire: got %v, want a new lease", err)
			}
		})
	})
	t.Run("the wall clock is set back", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			h, err := newInstant(t, ttl).Acquire(t.Context(), "k")
			if err != nil {
				t.Fatal(err)
			}
			suspend(h, -time.Hour)
			<-h.Context().Done()
			if got := time.Since(h.AcquiredAt()); got != end {
				t.Errorf("ended after %v, want %v", got, end)
			}
		})
	})
}

// A process that is woken from a freeze may look at its context before its timers have run.
func TestFrozenProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, err := newInstant(t, 10*time.Second).Acquire(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		h.ls.mu.Lock()
		h.ls.timer.Stop()
		h.ls.mu.Unlock()
		time.Sleep(time.Minute)
		select {
		case <-h.Context().Done():
		default:
			t.Error("Done's channel is open, want it closed")
		}
		if err := h.Context().Err(); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want context canceled", err)
		}
	})
}

// The same while a renewal is under way: its answer, too late, must not make up for the freeze.
func TestFrozenDuringARenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h, err := newInstant(t, 10*time.Second).Acquire(t.Context(), "k")
		if err != nil {
			t.Fatal(err)
		}
		h.ls.mu.Lock()
		h.ls.timer.Stop()
		h.ls.mu.Unlock()
		time.Sleep(time.Second)
		if err := h.Renew(t.Context()); !errors.Is(err, ErrLost) {
			t.Errorf("got %v, want ErrLost", err)
		}
		if err := h.Context().Err(); !errors.Is(err, context.Canceled) {
			t.Errorf("got %v, want context canceled", err)
		}
	})
}
