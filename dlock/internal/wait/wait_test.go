package wait_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"
	"unsafe"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/wait"
)

// While the machine is suspended only the wall clock runs, which may also be set back.
func TestSince(t *testing.T) {
	then := time.Now()
	for _, c := range []struct{ monotonic, wall, want time.Duration }{
		{time.Second, time.Second, time.Second},
		{time.Second, time.Hour, time.Hour},
		{time.Second, -time.Hour, time.Second},
	} {
		now := then.Add(c.wall)
		*(*int64)(unsafe.Add(unsafe.Pointer(&now), 8)) += int64(c.monotonic - c.wall) // the monotonic clock's reading
		require.Equal(t, c.monotonic, now.Sub(then))
		require.Equal(t, c.wall, now.Round(0).Sub(then.Round(0)))
		require.Equal(t, c.want, wait.Since(then, now))
	}
}

func TestRetry(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		var at []time.Duration
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		try := func() bool {
			at = append(at, time.Since(began))
			return len(at) == 5
		}
		wait.Retry(ctx, time.Second, 3*time.Second, try)
		require.Equal(t, []time.Duration{0, time.Second, 3 * time.Second, 6 * time.Second, 9 * time.Second}, at)
		wait.Retry(ctx, time.Second, time.Hour, func() bool { return false })
		require.Equal(t, 20*time.Second, time.Since(began), "until ctx ends")
	})
}

func TestTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turn, began := wait.NewTurn(time.Second), time.Now()
		slow := make(chan []time.Duration, 1)
		go func() {
			var limits []time.Duration
			err := turn.Do(t.Context(), time.Second, 3*time.Second, func(ctx context.Context) error {
				deadline, _ := ctx.Deadline()
				limits = append(limits, time.Until(deadline))
				if len(limits) == 4 {
					return nil
				}
				<-ctx.Done()
				return ctx.Err()
			})
			require.NoError(t, err)
			slow <- limits
		}()
		synctest.Wait()
		require.NoError(t, turn.Do(t.Context(), time.Second, time.Second, func(context.Context) error { return nil }))
		require.Equal(t, time.Second, time.Since(began), "one limit")
		require.Equal(t, []time.Duration{time.Second, time.Second, 2 * time.Second, 3 * time.Second}, <-slow)

		no, calls := errors.New("no"), 0
		require.ErrorIs(t, turn.Do(t.Context(), time.Second, time.Hour, func(context.Context) error { calls++; return no }), no)
		require.Equal(t, 1, calls, "an answer in time")
		began = time.Now()
		require.NoError(t, turn.Do(t.Context(), time.Second, time.Hour, func(ctx context.Context) error { calls++; <-ctx.Done(); return nil }))
		require.Equal(t, 2, calls, "a success, however late")
		require.Equal(t, time.Second, time.Since(began), "the limit is as before")
		ctx, cancel := context.WithCancel(t.Context())
		require.ErrorIs(t, turn.Do(ctx, time.Second, time.Hour, func(ctx context.Context) error {
			<-ctx.Done()
			cancel()
			calls++
			return ctx.Err()
		}), context.DeadlineExceeded)
		require.Equal(t, 3, calls, "not again after the end of ctx")
		var call context.Context
		require.NoError(t, turn.Do(t.Context(), time.Second, time.Hour, func(ctx context.Context) error { call = ctx; return nil }))
		require.Error(t, call.Err(), "nothing is left of it")
		<-turn
		ctx, cancel = context.WithTimeoutCause(t.Context(), time.Second, no)
		defer cancel()
		require.ErrorIs(t, turn.Do(ctx, time.Hour, time.Hour, nil), no, "another's turn")
	})
}

// The server takes longer than the first limit, but the callers together wait only for that and for its reply.
func TestTurnOfMany(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		turn, began := wait.NewTurn(time.Second), time.Now()
		made := false
		ends := make(chan error, 20)
		for range cap(ends) {
			go func() {
				ends <- turn.Do(t.Context(), time.Second, time.Hour, func(ctx context.Context) error {
					if !made {
						select {
						case <-time.After(1500 * time.Millisecond):
							made = true
						case <-ctx.Done():
							return ctx.Err()
						}
					}
					return nil
				})
			}()
		}
		for range cap(ends) {
			require.NoError(t, <-ends)
		}
		require.Equal(t, 2500*time.Millisecond, time.Since(began))
	})
}

// watched is a context that counts who waits for its end.
type watched struct {
	context.Context
	done chan struct{}
	by   *int
}

func (c watched) Done() <-chan struct{} { return c.done }

func (c watched) AfterFunc(func()) (stop func() bool) {
	*c.by++
	return func() bool {
		*c.by--
		return true
	}
}

func TestBoth(t *testing.T) {
	open, end := context.WithCancelCause(t.Context())
	watched := watched{open, make(chan struct{}), new(int)}
	both, stop := wait.Both(t.Context(), watched)
	require.Equal(t, 1, *watched.by)
	stop()
	require.Error(t, both.Err())
	require.Zero(t, *watched.by)
	both, stop = wait.Both(t.Context(), open)
	defer stop()
	end(dlock.ErrClosed)
	<-both.Done()
	require.Equal(t, dlock.ErrClosed, wait.Failed(both, "lock", errors.New("no reply")))
}

// A context's cause isn't taken for the Backend's error.
func TestFailed(t *testing.T) {
	no := errors.New("no answer")
	ended := func(cause error) context.Context {
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(cause)
		return ctx
	}
	shutdown := fmt.Errorf("shutting down: %w", dlock.ErrClosed)
	held := fmt.Errorf("enough: %w", dlock.ErrHeld)
	for _, c := range []struct {
		ctx  context.Context
		err  error
		want string
	}{
		{t.Context(), no, "mine: no answer"},
		{t.Context(), fmt.Errorf("wait: %w", dlock.ErrClosed), dlock.ErrClosed.Error()},
		{ended(dlock.ErrClosed), no, dlock.ErrClosed.Error()},
		{ended(nil), dlock.ErrHeld, dlock.ErrHeld.Error()},
		{ended(nil), no, "mine: context canceled: no answer"},
		{ended(nil), fmt.Errorf("read: %w", context.Canceled), "mine: read: context canceled"},
		{ended(shutdown), no, "mine: shutting down: " + dlock.ErrClosed.Error() + ": no answer"},
		{ended(shutdown), fmt.Errorf("read: %w", shutdown), "mine: read: shutting down: " + dlock.ErrClosed.Error()},
		{ended(held), fmt.Errorf("read: %w", held), "mine: read: enough: " + dlock.ErrHeld.Error()},
	} {
		require.EqualError(t, wait.Failed(c.ctx, "mine", c.err), c.want)
	}
	require.NoError(t, wait.Failed(ended(no), "mine", nil))
}
