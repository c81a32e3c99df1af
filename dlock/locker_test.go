package dlock_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/memlock"
)

// endsLate is a context whose end is seen after the reply.
type endsLate struct{ context.Context }

func (endsLate) Done() <-chan struct{} { return make(chan struct{}) }

// Some clients' errors hide it, such as go-redis's.
func TestCauseHiddenByTheBackend(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for _, answer := range []error{context.Canceled, errEnough, dlock.ErrQueueFull, dlock.ErrInvalid} {
			for _, late := range []bool{false, true} {
				f := newFake()
				ctx, cancel := context.WithCancelCause(t.Context())
				f.acquire = func(context.Context, dlock.Request, acquireFunc) (dlock.Grant, error) {
					cancel(errEnough)
					return dlock.Grant{}, answer
				}
				if late {
					ctx = endsLate{ctx}
				}
				_, err := newLocker(t, f, nil).Acquire(ctx, "k")
				require.ErrorIs(t, err, errEnough)
				require.ErrorIs(t, err, context.Canceled)
				if late && (errors.Is(answer, dlock.ErrQueueFull) || errors.Is(answer, dlock.ErrInvalid)) {
					require.ErrorIs(t, err, answer)
					require.NotContains(t, err.Error(), "no answer")
				}
			}
		}
	})
}

func TestUnknownOutcomeIsUndone(t *testing.T) {
	replyLate := func(ctx context.Context, r dlock.Request, next acquireFunc) (dlock.Grant, error) {
		g, err := next(ctx, r)
		<-ctx.Done()
		return g, err
	}
	requestLate := func(ctx context.Context, r dlock.Request, next acquireFunc) (dlock.Grant, error) {
		<-ctx.Done()
		time.Sleep(3 * time.Second) // still in flight when Acquire has returned
		return next(context.WithoutCancel(ctx), r)
	}
	requestLateReplyLost := func(ctx context.Context, r dlock.Request, next acquireFunc) (dlock.Grant, error) {
		_, err := requestLate(ctx, r, next)
		return dlock.Grant{}, errors.Join(errNetwork, err)
	}
	misleading := func(ctx context.Context, r dlock.Request, next acquireFunc) (dlock.Grant, error) {
		_, err := next(ctx, r)
		<-ctx.Done()
		return dlock.Grant{}, errors.Join(context.Cause(ctx), err)
	}
	for name, acquire := range map[string]acquireHook{
		"reply lost": acquireReplyLost, "reply late": replyLate, "request late": requestLate,
		"request late, reply lost": requestLateReplyLost, "cause looks like an answer": misleading,
	} {
		t.Run(name, func(t *testing.T) {
			faked(t, func(t *testing.T, f *fake) {
				f.acquire = acquire
				f.release = func(ctx context.Context, g dlock.Grant, next grantFunc) error {
					if arrives := name == "reply late" || name == "request late"; arrives != (g.Fence != 0) {
						t.Errorf("undoes %+v; the grant with all that it has is known only if it arrives", g)
					}
					time.Sleep(time.Millisecond) // a round trip, after which a ctx that had ended would be seen
					return next(ctx, g)
				}
				l := newLocker(t, f, &dlock.Options{TTL: time.Hour})
				ctx, cancel := context.WithCancelCause(t.Context())
				time.AfterFunc(time.Second, func() { cancel(dlock.ErrHeld) })
				_, err := l.Acquire(ctx, "k")
				require.Error(t, err)
				<-ctx.Done()
				time.Sleep(4 * time.Second)
				require.True(t, f.free(t, "k"), "long before the TTL of an hour")
			})
		})
	}
}

func TestUndoTriesAgain(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		f.acquire = acquireReplyLost
		f.release = hangs
		l := newLocker(t, f, &dlock.Options{TTL: time.Hour})
		_, err := l.Acquire(t.Context(), "k")
		require.ErrorIs(t, err, errNetwork)
		time.Sleep(70 * time.Second)
		require.Equal(t, 16, f.count("release"), "each takes a second; the pauses grow from 100 ms to 5 s")
		f.set(func() { f.release = nil })
		time.Sleep(6 * time.Second)
		require.True(t, f.free(t, "k"))

		f.set(func() { f.release = hangs })
		_, err = l.Acquire(t.Context(), "k")
		require.ErrorIs(t, err, errNetwork)
		began := time.Now()
		require.NoError(t, l.Close())
		require.LessOrEqual(t, time.Since(began), time.Second, "Close gives up")
	})
}

func TestUndoEndsWithTheLease(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		f.acquire = acquireFails
		f.release = fails
		l := newLocker(t, f, &dlock.Options{TTL: time.Second})
		_, err := l.Acquire(t.Context(), "k")
		require.ErrorIs(t, err, errNetwork)
		time.Sleep(time.Second)
		n := f.count("release")
		require.Positive(t, n)
		time.Sleep(time.Hour)
		require.Equal(t, n, f.count("release"))

		f.set(func() { f.release = nil })
		_, err = l.Acquire(t.Context(), "k")
		require.ErrorIs(t, err, errNetwork)
		time.Sleep(time.Second)
		require.Equal(t, n+1, f.count("release"), "that there is nothing to release is an answer")
	})
}

func TestUndoIsBounded(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		f.acquire = acquireReplyLost
		f.release = hangs
		var log bytes.Buffer
		l := newLocker(t, f, &dlock.Options{TTL: time.Minute, Logger: slog.New(slog.NewTextHandler(&log, nil))})
		const calls = 1000
		fail := func() {
			for i := range calls {
				_, err := l.Acquire(t.Context(), fmt.Sprint(i))
				require.ErrorIs(t, err, errNetwork)
			}
			synctest.Wait()
		}
		fail()
		require.Equal(t, 256, f.count("release"))
		f.set(func() { f.release, f.acquire = nil, nil })
		time.Sleep(10 * time.Second)
		for i := range calls {
			require.True(t, f.free(t, fmt.Sprint(i)))
		}
		require.Empty(t, log.String())

		f.set(func() { f.acquire, f.release = acquireFails, fails })
		fail()
		time.Sleep(time.Minute + 1)
		synctest.Wait()
		require.Equal(t, calls, strings.Count(log.String(), "could not undo"))
	})
}

// While the lock service is frozen each call that is given up leaves a goroutine, or two if the client library doesn't return,
// until the library does and one TTL longer.
func TestGivenUpWhileFrozen(t *testing.T) {
	const calls, ttl, library = 10_000, 10 * time.Second, 30 * time.Second
	for stuck, most := range map[time.Duration]int{0: calls, library: 2 * calls} {
		faked(t, func(t *testing.T, f *fake) {
			f.acquire = func(ctx context.Context, _ dlock.Request, _ acquireFunc) (dlock.Grant, error) {
				<-ctx.Done()
				time.Sleep(stuck)
				return dlock.Grant{}, ctx.Err()
			}
			f.release = hangs
			l := newLocker(t, f, &dlock.Options{TTL: ttl})
			ctx, cancel := context.WithCancel(t.Context())
			before := runtime.NumGoroutine()
			var given []<-chan error
			for i := range calls {
				given = append(given, acquiring(l, ctx, fmt.Sprint(i)))
			}
			synctest.Wait()
			cancel()
			for _, err := range given {
				require.ErrorIs(t, <-err, context.Canceled)
			}
			synctest.Wait()
			require.InDelta(t, most, runtime.NumGoroutine()-before, 100)
			time.Sleep(stuck + ttl)
			synctest.Wait()
			require.Less(t, runtime.NumGoroutine()-before, 100, "idle workers may stay")
		})
	}
}

func TestCloseUndoesMany(t *testing.T) {
	for _, answers := range []bool{true, false} {
		faked(t, func(t *testing.T, f *fake) {
			f.acquire = acquireReplyLost
			f.release = hangs
			var log bytes.Buffer
			l := newLocker(t, f, &dlock.Options{TTL: time.Hour, Logger: slog.New(slog.NewTextHandler(&log, nil))})
			const calls = 1000
			for i := range calls {
				_, err := l.Acquire(t.Context(), fmt.Sprint(i))
				require.ErrorIs(t, err, errNetwork)
			}
			synctest.Wait()
			if answers {
				f.set(func() { f.release = nil })
			}
			began := time.Now()
			require.NoError(t, l.Close())
			require.LessOrEqual(t, time.Since(began), 2*time.Second)
			left := 0
			for i := range calls {
				if !f.free(t, fmt.Sprint(i)) {
					left++
				}
			}
			require.Equal(t, left, strings.Count(log.String(), "could not undo"))
			if answers {
				require.LessOrEqual(t, left, 256, "those that were under way")
			}
		})
	}
}

func TestAcquireSaysWhatItWaitedFor(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		l := newLocker(t, f, &dlock.Options{TTL: time.Hour})
		h := acquire(t, l, t.Context(), "k")
		try := func() error {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			defer cancel()
			began := time.Now()
			_, err := l.Acquire(ctx, "k")
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.Equal(t, time.Second, time.Since(began))
			require.ErrorContains(t, err, `acquire "k"`)
			return err
		}
		err := try()
		require.ErrorIs(t, err, dlock.ErrHeld)
		require.NotContains(t, err.Error(), "no answer")
		f.set(func() { f.acquire = acquireHangs })
		err = try()
		require.NotErrorIs(t, err, dlock.ErrHeld)
		require.ErrorContains(t, err, "no answer from the lock service")
		f.set(func() { f.acquire = nil })
		require.NoError(t, h.Release(t.Context()))
	})
}

func TestNotReentrant(t *testing.T) {
	bubble(t, func(t *testing.T) {
		m := memlock.New()
		l := newLocker(t, m, nil)
		h := acquire(t, l, t.Context(), "k")
		for _, f := range []func(context.Context, string) (*dlock.Handle, error){l.Acquire, l.TryAcquire} {
			_, err := f(h.Context(), "k")
			require.ErrorIs(t, err, dlock.ErrNotReentrant)
		}
		require.NoError(t, acquire(t, l, h.Context(), "another").Release(t.Context()))
		_, err := newLocker(t, m.Client(), nil).TryAcquire(h.Context(), "k")
		require.ErrorIs(t, err, dlock.ErrHeld, "another Locker knows nothing of this one's leases")

		// The context of a lease that is over has no effect.
		was := context.WithoutCancel(h.Context())
		require.NoError(t, h.Release(t.Context()))
		h = acquire(t, l, was, "k")
		was = context.WithoutCancel(h.Context())
		<-h.Context().Done()
		require.NoError(t, acquire(t, l, was, "k").Release(t.Context()))
	})
}

func TestReentrant(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		l := newLocker(t, f, &dlock.Options{TTL: time.Hour, Reentrant: true})
		outer := acquire(t, l, t.Context(), "k")
		inner := acquire(t, l, outer.Context(), "k")
		third, err := l.TryAcquire(inner.Context(), "k")
		require.NoError(t, err)
		for _, h := range []*dlock.Handle{inner, third} {
			require.Equal(t, outer.Fence(), h.Fence(), "the token stays the same")
			require.Equal(t, outer.Owner(), h.Owner())
		}
		require.NoError(t, inner.Release(t.Context()))
		require.NoError(t, inner.Release(t.Context()), "counted once")
		require.ErrorIs(t, context.Cause(inner.Context()), dlock.ErrReleased)
		require.ErrorIs(t, inner.Renew(t.Context()), dlock.ErrReleased)
		_, err = l.Acquire(inner.Context(), "k")
		require.ErrorIs(t, err, dlock.ErrReleased, "a context that has ended")
		require.NoError(t, outer.Context().Err())
		require.NoError(t, outer.Release(t.Context()), "not the last")
		require.NoError(t, third.Context().Err())
		require.False(t, f.free(t, "k"))
		require.Zero(t, f.count("release"))
		require.NoError(t, third.Renew(t.Context()))
		require.NoError(t, third.Release(t.Context()))
		require.True(t, f.free(t, "k"))
		require.Equal(t, 1, f.count("release"))

		h := acquire(t, l, t.Context(), "k")
		_, err = l.TryAcquire(t.Context(), "k")
		require.Equal(t, dlock.ErrHeld, err, "as it is")
		require.NoError(t, h.Release(t.Context()))
	})
}

func TestNext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		l := newLocker(t, memlock.New(), &dlock.Options{TTL: time.Hour, Reentrant: true})
		outer := acquire(t, l, t.Context(), "k")
		inner := acquire(t, l, outer.Context(), "k")
		const writers, writes = 8, 100
		given := make(chan [2]uint64, writers*writes)
		var wg sync.WaitGroup
		for i := range writers {
			wg.Go(func() {
				for range writes {
					if again, err := l.Acquire(inner.Context(), "k"); err != nil || again.Release(t.Context()) != nil {
						t.Errorf("re-entry by many goroutines: %v", err)
					}
					given <- pair([]*dlock.Handle{outer, inner}[i%2].Next())
				}
			})
		}
		wg.Wait()
		numbers := map[[2]uint64]bool{}
		for range writers * writes {
			numbers[<-given] = true
		}
		for seq := range uint64(writers * writes) {
			require.True(t, numbers[pair(1, seq+1)], seq+1)
		}
		require.NoError(t, errors.Join(inner.Release(t.Context()), outer.Release(t.Context())))
	})
}

func TestReentrantLost(t *testing.T) {
	bubble(t, func(t *testing.T) {
		m := memlock.New()
		l := newLocker(t, m, &dlock.Options{TTL: time.Second, Reentrant: true})
		outer := acquire(t, l, t.Context(), "k")
		inner := acquire(t, l, outer.Context(), "k")
		time.Sleep(time.Second)
		for _, h := range []*dlock.Handle{inner, outer} {
			require.ErrorIs(t, context.Cause(h.Context()), dlock.ErrLost)
			err := h.Release(t.Context())
			require.ErrorIs(t, err, dlock.ErrLost)
			require.Equal(t, err, h.Release(t.Context()), "the same answer")
		}
	})
}

func TestDo(t *testing.T) {
	errWork := errors.New("work failed")
	faked(t, func(t *testing.T, f *fake) {
		l := newLocker(t, f, &dlock.Options{TTL: time.Second})
		require.NoError(t, l.Do(t.Context(), "k", func(ctx context.Context, h *dlock.Handle) error {
			require.NoError(t, ctx.Err())
			require.NotZero(t, h.Fence())
			_, err := f.TryAcquire(ctx, dlock.Request{Key: "k", Owner: "another", TTL: time.Hour})
			require.ErrorIs(t, err, dlock.ErrHeld)
			_, err = l.Acquire(ctx, "k")
			require.ErrorIs(t, err, dlock.ErrNotReentrant, "f's context holds the key")
			return nil
		}))
		require.True(t, f.free(t, "k"))

		within, done := context.WithTimeout(t.Context(), time.Minute)
		defer done()
		require.NoError(t, l.Do(within, "k", func(ctx context.Context, _ *dlock.Handle) error {
			want, _ := within.Deadline()
			got, _ := ctx.Deadline()
			require.Equal(t, want, got, "go-redis heeds nothing else")
			return nil
		}))

		err := l.Do(t.Context(), "k", func(context.Context, *dlock.Handle) error { return errWork })
		require.ErrorIs(t, err, errWork)
		require.True(t, f.free(t, "k"))

		require.EqualError(t, l.Do(t.Context(), "k", func(ctx context.Context, h *dlock.Handle) error {
			require.NoError(t, h.Release(ctx))
			return errWork
		}), errWork.Error(), "that f has released the lock is no loss")

		require.PanicsWithValue(t, "work", func() {
			_ = l.Do(t.Context(), "k", func(context.Context, *dlock.Handle) error { panic("work") })
		})
		require.True(t, f.free(t, "k"), "released although f panicked")

		err = l.Do(t.Context(), "k", func(ctx context.Context, _ *dlock.Handle) error {
			<-ctx.Done()
			time.Sleep(limit(time.Second))
			return errors.Join(errWork, context.Cause(ctx))
		})
		require.ErrorIs(t, err, errWork)
		require.ErrorIs(t, err, dlock.ErrLost)

		ctx, cancel := context.WithCancelCause(t.Context())
		err = l.Do(ctx, "k", func(ctx context.Context, h *dlock.Handle) error {
			cancel(errEnough)
			<-ctx.Done()
			require.NoError(t, h.Context().Err(), "the lease goes on")
			return context.Cause(ctx)
		})
		require.ErrorIs(t, err, errEnough)
		require.NotErrorIs(t, err, dlock.ErrLost)
		require.True(t, f.free(t, "k"), "released although ctx has ended")

		require.ErrorIs(t, l.Do(ended(t), "k", func(context.Context, *dlock.Handle) error {
			require.Fail(t, "f was called without the lock")
			return nil
		}), errEnough)
	})
}

// A frozen process may find both its grant and its context over: another request would only have to be undone.
func TestNoRequestAfterTheContext(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		ctx, cancel := context.WithCancelCause(t.Context())
		var requests atomic.Int32
		f.acquire = granting(func(g *dlock.Grant) {
			requests.Add(1)
			g.Start = g.Start.Add(-time.Hour)
			cancel(errEnough)
		})
		_, err := newLocker(t, f, nil).Acquire(endsLate{ctx}, "k")
		require.ErrorIs(t, err, errEnough)
		require.EqualValues(t, 1, requests.Load())
	})
}

// crowd is a context that counts who waits for its end.
type crowd struct {
	endsLate
	size *atomic.Int32
}

func (c crowd) AfterFunc(func()) (stop func() bool) {
	c.size.Add(1)
	return func() bool {
		c.size.Add(-1)
		return true
	}
}

// A service's context may outlive any number of calls, and must not keep what they leave.
func TestDoLeavesNothingWithItsContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		ctx := crowd{endsLate{t.Context()}, new(atomic.Int32)}
		l := newLocker(t, memlock.New(), nil)
		require.NoError(t, l.Do(ctx, "k", func(context.Context, *dlock.Handle) error {
			require.Positive(t, ctx.size.Load())
			return nil
		}))
		synctest.Wait()
		require.Zero(t, ctx.size.Load())
	})
}

// At every level of re-entry.
func TestDoLostUnnoticed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		l := newLocker(t, memlock.New(), &dlock.Options{TTL: time.Second, Reentrant: true})
		sleep := func(context.Context, *dlock.Handle) error {
			time.Sleep(time.Second)
			return nil
		}
		require.ErrorIs(t, l.Do(t.Context(), "k", sleep), dlock.ErrLost)
		var inner error
		require.ErrorIs(t, l.Do(t.Context(), "k", func(ctx context.Context, _ *dlock.Handle) error {
			inner = l.Do(ctx, "k", sleep)
			return nil
		}), dlock.ErrLost)
		require.ErrorIs(t, inner, dlock.ErrLost)
	})
}

// f returns just the end of its context, and the release is in time.
func TestDoTellsTheLoss(t *testing.T) {
	bubble(t, func(t *testing.T) {
		l := newLocker(t, memlock.New(), &dlock.Options{TTL: time.Second})
		err := l.Do(t.Context(), "k", func(ctx context.Context, _ *dlock.Handle) error {
			<-ctx.Done()
			return ctx.Err()
		})
		require.ErrorIs(t, err, context.Canceled)
		require.ErrorIs(t, err, dlock.ErrLost)
		err = l.Do(t.Context(), "k", func(ctx context.Context, _ *dlock.Handle) error {
			<-ctx.Done()
			return context.Cause(ctx)
		})
		require.Equal(t, 1, strings.Count(err.Error(), dlock.ErrLost.Error()), "once: %v", err)

		// Another lock's loss has ended the caller's context.
		ctx, cancel := context.WithCancelCause(t.Context())
		err = l.Do(ctx, "k", func(ctx context.Context, _ *dlock.Handle) error {
			cancel(dlock.ErrLost)
			<-ctx.Done()
			return ctx.Err()
		})
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, dlock.ErrLost)
	})
}

// To the caller of Acquire ErrLost would mean the loss of a lease.
func TestRefusalIsNotUndone(t *testing.T) {
	bubble(t, func(t *testing.T) {
		deadline, stop := context.WithTimeout(t.Context(), time.Hour)
		defer stop()
		for refusal, want := range map[error]error{
			dlock.ErrHeld: dlock.ErrHeld, dlock.ErrQueueFull: dlock.ErrQueueFull, dlock.ErrInvalid: dlock.ErrInvalid,
			dlock.ErrLost: dlock.ErrRequestLost,
		} {
			for _, ctx := range []context.Context{context.Background(), deadline} {
				f := newFake()
				f.acquire = func(context.Context, dlock.Request, acquireFunc) (dlock.Grant, error) {
					return dlock.Grant{}, fmt.Errorf("%w: the session has expired", refusal)
				}
				_, err := newLocker(t, f, nil).Acquire(ctx, "k")
				require.ErrorIs(t, err, want)
				require.ErrorContains(t, err, "the session has expired")
				require.NotErrorIs(t, err, dlock.ErrLost)
				require.NotErrorIs(t, err, dlock.ErrClosed)
				synctest.Wait()
				require.Zero(t, f.count("release"), "%v", refusal)
			}
		}
	})
}

// Some goroutines wait for the next call, not as many as there were calls at once.
func TestIdleWorkers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		l := newLocker(t, memlock.New(), &dlock.Options{TTL: time.Hour})
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		workers := func() int { // not NumGoroutine: another test's may be about to end
			stacks := make([]byte, 1<<20)
			return strings.Count(string(stacks[:runtime.Stack(stacks, true)]), "dlock.(*Locker).run.func")
		}
		before := workers()
		for range 100 {
			h := acquire(t, l, ctx, "k")
			synctest.Wait() // its worker is idle
			require.NoError(t, h.Release(ctx))
			synctest.Wait()
		}
		require.Equal(t, before+1, workers(), "one is used again and again")
		h := acquire(t, l, ctx, "k")
		ctx, cancel = context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		for range 100 {
			_ = acquiring(l, ctx, "k")
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.LessOrEqual(t, workers(), before+16)
		require.NoError(t, h.Release(t.Context()))
		ctx, cancel = context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		for range 20 {
			require.NoError(t, acquire(t, l, ctx, "k").Release(ctx))
		}
		require.Positive(t, workers()-before, "none has gone with those that were too many")
	})
}

func TestNoAnswer(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		l := newLocker(t, f, &dlock.Options{TTL: time.Minute})
		h := acquire(t, l, t.Context(), "k")
		hang := func(ctx context.Context, _ dlock.Grant, _ grantFunc) error {
			<-ctx.Done()
			time.Sleep(time.Second) // ignores ctx
			return ctx.Err()
		}
		f.set(func() {
			f.renew, f.release = hang, hang
			f.acquire = func(ctx context.Context, _ dlock.Request, _ acquireFunc) (dlock.Grant, error) {
				return dlock.Grant{}, hang(ctx, dlock.Grant{}, nil)
			}
		})
		try := func(ctx context.Context) error { _, err := l.TryAcquire(ctx, "another"); return err }
		for _, call := range []func(context.Context) error{try, h.Renew, h.Release} {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			began := time.Now()
			err := call(ctx)
			cancel()
			require.ErrorIs(t, err, context.DeadlineExceeded)
			require.ErrorContains(t, err, "no answer from the lock service")
			require.Equal(t, time.Second, time.Since(began), "not waiting for the client")
		}
		f.set(func() { f.renew, f.release, f.acquire = nil, nil, nil })
	})
}

func TestClose(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		reg := prometheus.NewRegistry()
		l := newLocker(t, f, &dlock.Options{
			TTL: time.Minute, Registerer: reg, Renew: dlock.Renew{Every: time.Second, MaxHold: time.Hour},
		})
		lost := make(chan struct{})
		f.acquire = granting(func(g *dlock.Grant) { g.Lost = lost })
		h := acquire(t, l, t.Context(), "k")
		waits := acquiring(l, t.Context(), "k")
		time.Sleep(1500 * time.Millisecond)
		require.Equal(t, 1, f.count("renew"))

		require.NoError(t, l.Close())
		require.ErrorIs(t, <-waits, dlock.ErrClosed)
		require.NoError(t, l.Close(), "again")
		for _, call := range []func() error{
			func() error { _, err := l.Acquire(t.Context(), "k2"); return err },
			func() error { _, err := l.TryAcquire(t.Context(), "k2"); return err },
			func() error { return h.Renew(t.Context()) },
			func() error { return h.Release(t.Context()) },
			func() error { _, err := f.Backend.TryAcquire(t.Context(), dlock.Request{TTL: 1}); return err },
		} {
			require.ErrorIs(t, call(), dlock.ErrClosed)
		}
		n := f.count("renew")
		require.False(t, f.free(t, "k"), "leases are not released")
		time.Sleep(time.Minute)
		require.Equal(t, n, f.count("renew"))
		require.True(t, f.free(t, "k"), "they run out")
	})
}

// A call that waits ends, whatever the backend says, and its grant is undone.
func TestCloseEndsCalls(t *testing.T) {
	granted := func(ctx context.Context, r dlock.Request, next acquireFunc) (dlock.Grant, error) {
		_, err := next(ctx, r)
		<-ctx.Done()
		return dlock.Grant{}, errors.Join(context.Cause(ctx), err)
	}
	for _, hook := range []acquireHook{acquireHangs, granted} {
		for _, cancellable := range []bool{false, true} {
			faked(t, func(t *testing.T, f *fake) {
				f.acquire = hook
				ctx := context.Background()
				if cancellable {
					ctx = t.Context()
				}
				l := newLocker(t, f, &dlock.Options{TTL: time.Hour})
				waits := acquiring(l, ctx, "k")
				synctest.Wait()
				require.NoError(t, l.Close())
				require.ErrorIs(t, <-waits, dlock.ErrClosed)
				require.True(t, f.free(t, "k"))
			})
		}
	}
}
