// Package wait has what backends share: delays, retries, elapsed time, and the errors and contexts of calls.
package wait

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/fencelab/fencelab/dlock"
)

// For waits for d, or for the end of ctx.
func For(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// Retry calls f until it reports done or ctx ends. The delays in between double, from least to most.
func Retry(ctx context.Context, least, most time.Duration, f func() (done bool)) {
	for d := least; !f() && ctx.Err() == nil; d = min(2*d, most) {
		For(ctx, d)
	}
}

// Since is the time since then by the faster clock: the monotonic one stops while the machine is suspended, the wall clock may be
// set back.
func Since(then, now time.Time) time.Duration {
	return max(now.Sub(then), now.Round(0).Sub(then.Round(0)))
}

// ErrNoAnswer is the cause of a context whose time for a reply is over.
var ErrNoAnswer = errors.New("the server doesn't answer")

// Turn lets one caller at a time call a server. While nobody has it, the channel holds the next call's time limit.
type Turn chan time.Duration

// NewTurn returns a Turn whose calls may take limit.
func NewTurn(limit time.Duration) Turn {
	t := make(Turn, 1)
	t <- limit
	return t
}

// Do calls f. If f exceeds its time limit, its context ends, and f is retried after the other callers. The next caller gets twice
// the time, at most longest, until a success resets the limit: with one short limit, many callers could keep one another from a slow
// server.
func (t Turn) Do(ctx context.Context, limit, longest time.Duration, f func(context.Context) error) error {
	for {
		var may time.Duration
		select {
		case may = <-t:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		bounded, cancel := context.WithTimeoutCause(ctx, may, ErrNoAnswer)
		err := f(bounded)
		late := errors.Is(context.Cause(bounded), ErrNoAnswer)
		cancel()
		switch {
		case err == nil:
			may = limit
		case late:
			may = min(2*may, longest)
		}
		t <- may
		if err == nil || !late || ctx.Err() != nil {
			return err
		}
	}
}

// Both returns a context that ends with ctx, or with open and its cause. end releases it.
func Both(ctx, open context.Context) (both context.Context, end func()) {
	both, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(open, func() { cancel(context.Cause(open)) })
	return both, func() {
		stop()
		cancel(nil)
	}
}

// Failed wraps an error from a backend's client. After ctx's end it adds the cause, which the client's error lacks.
func Failed(ctx context.Context, backend string, err error) error {
	if err == nil {
		return nil
	}
	cause := context.Cause(ctx)
	switch {
	case cause == dlock.ErrClosed, cause == nil && errors.Is(err, dlock.ErrClosed): //nolint:errorlint // a caller's cause may wrap it
		return dlock.ErrClosed
	case errors.Is(err, dlock.ErrHeld) && !errors.Is(cause, dlock.ErrHeld):
		return err
	case cause != nil && !errors.Is(err, cause):
		return fmt.Errorf("%s: %w: %w", backend, cause, err)
	}
	return fmt.Errorf("%s: %w", backend, err)
}
