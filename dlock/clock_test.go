package dlock

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

type instant struct {
	Backend
	renewal  time.Duration
	renewals *atomic.Int64
}

func (instant) Acquire(_ context.Context, r Request) (Grant, error) {
	return Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL, Fence: 1, Start: time.Now()}, nil
}

func (b instant) Renew(context.Context, Grant) error {
	if b.renewals != nil {
		b.renewals.Add(1)
	}
	time.Sleep(b.renewal)
	return nil
}
func (instant) Release(context.Context, Grant) error { return nil }
func (instant) Close() error                         { return nil }

const ttl = 10 * time.Second

func held(t *testing.T, f func(t *testing.T, l *Locker, h *Handle)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		l, err := New(instant{renewal: ttl}, &Options{TTL: ttl})
		require.NoError(t, err)
		t.Cleanup(func() { _ = l.Close() })
		h, err := l.Acquire(t.Context(), "k")
		require.NoError(t, err)
		f(t, l, h)
	})
}

// suspend simulates a suspended machine: the wall clock has moved, the monotonic clock has not, and no timer has run.
func suspend(h *Handle, d time.Duration) {
	h.ls.mu.Lock()
	defer h.ls.mu.Unlock()
	h.ls.wall = h.ls.wall.Add(-d)
}

func TestSuspendedMachine(t *testing.T) {
	end := ttl - margin(ttl)
	t.Run("seen by Err", func(t *testing.T) {
		held(t, func(t *testing.T, _ *Locker, h *Handle) {
			suspend(h, end-1)
			require.NoError(t, h.Context().Err(), "a moment before the end")
			suspend(h, 1)
			require.ErrorIs(t, h.Context().Err(), context.Canceled)
			require.ErrorIs(t, context.Cause(h.Context()), ErrLost)
		})
	})
	t.Run("seen by the channel", func(t *testing.T) {
		held(t, func(t *testing.T, _ *Locker, h *Handle) {
			done := h.Context().Done()
			suspend(h, ttl)
			began := time.Now()
			<-done
			require.LessOrEqual(t, time.Since(began), recheck)
		})
	})
	t.Run("seen by Do's context, Renew and Acquire", func(t *testing.T) {
		held(t, func(t *testing.T, l *Locker, h *Handle) {
			require.NoError(t, l.Do(t.Context(), "k", func(ctx context.Context, h *Handle) error {
				suspend(h, ttl)
				require.ErrorIs(t, ctx.Err(), context.Canceled)
				return nil
			}), "the Backend says that it was held to the end")
			require.ErrorIs(t, l.Do(t.Context(), "k", func(_ context.Context, h *Handle) error {
				suspend(h, ttl)
				return io.EOF
			}), ErrLost, "it may be why f failed")
			was := context.WithoutCancel(h.Context())
			suspend(h, ttl)
			h, err := l.Acquire(was, "k")
			require.NoError(t, err, "a new lease")
			suspend(h, ttl)
			began := time.Now()
			require.ErrorIs(t, h.Renew(t.Context()), ErrLost)
			require.Zero(t, time.Since(began), "nothing is sent")
		})
	})
	t.Run("seen by an inner Release", func(t *testing.T) {
		held(t, func(t *testing.T, l *Locker, h *Handle) {
			l.o.Reentrant = true
			inner, err := l.Acquire(h.Context(), "k")
			require.NoError(t, err)
			suspend(h, ttl)
			require.ErrorIs(t, inner.Release(t.Context()), ErrLost)
		})
	})
	t.Run("the wall clock is set back", func(t *testing.T) {
		held(t, func(t *testing.T, _ *Locker, h *Handle) {
			suspend(h, -time.Hour)
			<-h.Context().Done()
			require.Equal(t, end, time.Since(h.AcquiredAt()))
		})
	})
}

func TestSuspendedMachineUntil(t *testing.T) {
	held(t, func(t *testing.T, _ *Locker, h *Handle) {
		until := h.Until()
		time.Sleep(time.Second)
		require.Equal(t, until, h.Until())
		suspend(h, 3*time.Second)
		require.Equal(t, until.Add(-3*time.Second), h.Until())
		<-h.Context().Done()
		require.Less(t, time.Since(h.Until()), recheck)
	})
	synctest.Test(t, func(t *testing.T) {
		l, err := New(instant{renewal: 3 * time.Second}, &Options{TTL: ttl})
		require.NoError(t, err)
		defer func() { require.NoError(t, l.Close()) }()
		h, err := l.Acquire(t.Context(), "k")
		require.NoError(t, err)
		require.NoError(t, h.Renew(t.Context()))
		until := h.Until()
		suspend(h, time.Second)
		require.Equal(t, until.Add(-time.Second), h.Until())
	})
	for _, every := range []time.Duration{700 * time.Millisecond, 3 * time.Second, ttl / 3} {
		synctest.Test(t, func(t *testing.T) {
			var renewals atomic.Int64
			l, err := New(instant{renewals: &renewals}, &Options{TTL: ttl, Renew: Renew{Every: every, MaxHold: time.Hour}})
			require.NoError(t, err)
			defer func() { require.NoError(t, l.Close()) }()
			h, err := l.Acquire(t.Context(), "k")
			require.NoError(t, err)
			time.Sleep(9*every + 1)
			require.Equal(t, int64(9), renewals.Load(), "one after each time")
			suspend(h, every)
			time.Sleep(min(every, recheck))
			require.Equal(t, int64(10), renewals.Load(), "one soon after the suspension")
			require.LessOrEqual(t, time.Until(h.Until()), ttl-margin(ttl))
			require.Greater(t, time.Until(h.Until()), ttl-margin(ttl)-recheck)
			time.Sleep(9 * every)
			require.Equal(t, int64(19), renewals.Load(), "one after each time again")
		})
	}
}

// Calls may come before its timers have run. A late reply to a renewal doesn't extend the lease.
func TestFrozenProcess(t *testing.T) {
	for name, call := range map[string]func(h *Handle){
		"done": func(h *Handle) {
			select {
			case <-h.Context().Done():
			default:
				t.Error("Done's channel is open, want it closed")
			}
		},
		"renew": func(h *Handle) {
			if err := h.Renew(context.Background()); !errors.Is(err, ErrLost) {
				t.Errorf("Renew: %v, want ErrLost", err)
			}
		},
		"release": func(h *Handle) { _ = h.Release(context.Background()) }, // the Backend says that it was held to the end
	} {
		held(t, func(t *testing.T, l *Locker, h *Handle) {
			var log bytes.Buffer
			l.log = slog.New(slog.NewTextHandler(&log, nil))
			h.ls.mu.Lock()
			h.ls.timer.Stop()
			h.ls.mu.Unlock()
			if name == "renew" {
				time.Sleep(time.Second)
			} else {
				time.Sleep(time.Minute)
			}
			call(h)
			require.ErrorIs(t, h.Context().Err(), context.Canceled)
			require.Equal(t, 1, strings.Count(log.String(), ErrLost.Error()), "%s: %s", name, log.String())
		})
	}
}
