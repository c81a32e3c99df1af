package dlock_test

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/memlock"
)

func sharing(s dlock.Share) *dlock.Options { return &dlock.Options{TTL: time.Hour, Share: s} }

type section struct {
	h   *dlock.Handle
	err error
}

func queue(l *dlock.Locker, ctx context.Context, n int) []chan section { //nolint:revive // l first
	var waiters []chan section
	for range n {
		got := make(chan section, 1)
		go func() {
			h, err := l.Acquire(ctx, "k")
			got <- section{h, err}
		}()
		synctest.Wait()
		waiters = append(waiters, got)
	}
	return waiters
}

func won(t *testing.T, c <-chan section) *dlock.Handle {
	t.Helper()
	got := <-c
	require.NoError(t, got.err)
	return got.h
}

func pair(token, seq uint64) [2]uint64 { return [2]uint64{token, seq} }

func TestShare(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		l := newLocker(t, f, sharing(dlock.Share{Sections: 3, For: time.Minute}))
		h := acquire(t, l, t.Context(), "k")
		require.Equal(t, pair(1, 1), pair(h.Next()))
		foreign := acquiring(newLocker(t, f.Client(), nil), t.Context(), "k")
		synctest.Wait()
		for i, w := range queue(l, t.Context(), 4) {
			require.Empty(t, w, "one after the other")
			before := h
			require.NoError(t, before.Release(t.Context()))
			require.NoError(t, before.Release(t.Context()), "counted once")
			require.ErrorIs(t, context.Cause(before.Context()), dlock.ErrReleased)
			require.Equal(t, pair(0, 0), pair(before.Next()), "its section is over")
			require.ErrorIs(t, before.Renew(t.Context()), dlock.ErrReleased)
			synctest.Wait()
			if i == 2 { // after three sections another process gets the lock
				require.NoError(t, <-foreign)
				require.Empty(t, w)
				time.Sleep(dlock.DefaultTTL)
			}
			h = won(t, w)
			require.NoError(t, h.Context().Err())
			want := []([2]uint64){{1, 2}, {1, 3}, {3, 1}, {3, 2}}[i]
			require.Equal(t, want, pair(h.Next()))
		}
		require.NoError(t, h.Release(t.Context()))
		require.Equal(t, 2, f.count("release"))
		require.True(t, f.free(t, "k"), "nobody waits for it")
	})
}

// A shared lease isn't renewed by hand-overs, nor passed on shortly before its end. For counts from the grant's arrival.
func TestShareEnds(t *testing.T) {
	at := func(age time.Duration) func(*dlock.Grant) {
		return func(*dlock.Grant) { time.Sleep(10*time.Millisecond + age) }
	}
	for name, c := range map[string]struct {
		o      dlock.Options
		grant  func(*dlock.Grant)
		hold   time.Duration
		want   uint64
		renews int
	}{
		"young":                   {dlock.Options{TTL: time.Hour, Share: dlock.Share{Sections: 9, For: time.Minute}}, at(0), time.Minute - 1, 1, 0},
		"as old as For":           {dlock.Options{TTL: time.Hour, Share: dlock.Share{Sections: 9, For: time.Minute}}, at(0), time.Minute, 2, 0},
		"half of the lease left":  {dlock.Options{TTL: 10 * time.Second, Share: dlock.Share{Sections: 9, For: time.Minute}}, at(0), 4939 * time.Millisecond, 1, 0},
		"less than half":          {dlock.Options{TTL: 10 * time.Second, Share: dlock.Share{Sections: 9, For: time.Minute}}, at(0), 4939*time.Millisecond + 1, 2, 0},
		"less, but it is renewed": {dlock.Options{TTL: 10 * time.Second, Renew: dlock.Renew{Every: time.Second, MaxHold: time.Hour}, Share: dlock.Share{Sections: 9, For: time.Minute}}, at(0), 20500 * time.Millisecond, 1, 20},
		"a waiter's, half over":   {dlock.Options{TTL: 10 * time.Second, Share: dlock.Share{Sections: 9, For: time.Minute}}, at(5 * time.Second), 4900 * time.Millisecond, 1, 1},
		"a waiter's, nearly over": {dlock.Options{TTL: 10 * time.Second, Share: dlock.Share{Sections: 9, For: time.Minute}}, at(9800 * time.Millisecond), 4900 * time.Millisecond, 1, 1},
		"provisional":             {dlock.Options{TTL: 10 * time.Second, Share: dlock.Share{Sections: 9, For: time.Minute}}, func(g *dlock.Grant) { g.Provisional = 2500 * time.Millisecond }, 1240 * time.Millisecond, 1, 1},
		"a waiter's, fresh":       {dlock.Options{TTL: 10 * time.Second, Share: dlock.Share{Sections: 9, For: time.Minute}}, at(1200 * time.Millisecond), 3700 * time.Millisecond, 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			faked(t, func(t *testing.T, f *fake) {
				f.acquire = granting(c.grant)
				l := newLocker(t, f, &c.o)
				h := acquire(t, l, t.Context(), "k")
				f.set(func() { f.acquire = granting(at(0)) })
				next := queue(l, t.Context(), 1)[0]
				time.Sleep(c.hold)
				require.NoError(t, h.Release(t.Context()))
				h = won(t, next)
				require.Equal(t, c.want, h.Fence())
				require.Equal(t, c.renews, f.count("renew"))
				require.NoError(t, h.Release(t.Context()))
			})
		})
	}
}

// A renewal without an answer leaves the caller half of the rest. It is logged, unless the caller or Close has ended it.
func TestShareOfALeaseThatCannotBeRenewed(t *testing.T) {
	const age = 5 * time.Second
	for end, after := range map[string]time.Duration{"silence": (limit(10*time.Second) - age) / 2, "the context": time.Second, "Close": time.Second} {
		faked(t, func(t *testing.T, f *fake) {
			f.acquire = granting(func(g *dlock.Grant) { g.Start = g.Start.Add(-age) })
			f.renew = hangs
			var log bytes.Buffer
			l := newLocker(t, f, &dlock.Options{
				TTL: 10 * time.Second, Share: dlock.Share{Sections: 9, For: time.Minute}, Logger: slog.New(slog.NewTextHandler(&log, nil)),
			})
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			switch end {
			case "the context":
				time.AfterFunc(after, cancel)
			case "Close":
				time.AfterFunc(after, func() { _ = l.Close() })
			}
			began := time.Now()
			h := acquire(t, l, ctx, "k")
			require.Equal(t, after, time.Since(began), end)
			require.NoError(t, h.Context().Err())
			require.Equal(t, end == "silence", strings.Contains(log.String(), "could not renew"), end)
			require.NoError(t, l.Close())
		})
	}
}

func TestShareIdle(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		l := newLocker(t, f, sharing(dlock.Share{Sections: 3, For: time.Minute, Idle: time.Second}))
		h := acquire(t, l, t.Context(), "k")
		f.set(func() { f.acquire = acquireFails }) // no request is sent
		_, err := l.TryAcquire(t.Context(), "k")
		require.ErrorIs(t, err, dlock.ErrHeld)
		for range 2 {
			require.NoError(t, h.Release(t.Context()))
			time.Sleep(time.Second - 1)
			h, err = l.TryAcquire(context.WithoutCancel(h.Context()), "k") // of a section that is over
			require.NoError(t, err)
			require.Equal(t, uint64(1), h.Fence(), "it was kept")
			_, err = l.TryAcquire(t.Context(), "k")
			require.ErrorIs(t, err, dlock.ErrHeld, "it isn't kept any more")
		}
		require.NoError(t, h.Release(t.Context()))
		require.True(t, f.free(t, "k"), "three sections")

		f.set(func() { f.acquire = nil })
		h, err = l.TryAcquire(t.Context(), "k")
		require.NoError(t, err)
		require.NoError(t, h.Release(t.Context()))
		time.Sleep(time.Second - 1)
		require.False(t, f.free(t, "k"))
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		require.True(t, f.free(t, "k"), "nobody came")

		f.set(func() { f.acquire = granting(func(*dlock.Grant) { time.Sleep(time.Second) }) })
		h = acquire(t, l, t.Context(), "k")
		time.Sleep(time.Minute - 1)
		require.NoError(t, h.Release(t.Context()))
		require.False(t, f.free(t, "k"))
		time.Sleep(time.Nanosecond)
		synctest.Wait()
		require.True(t, f.free(t, "k"), "as old as For")
	})
}

// A caller comes at the instant at which the kept lease's time is over.
func TestShareIdleTimerIsLate(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for range 100 { // simultaneous events come in any order
			f := newFake()
			l := newLocker(t, f, sharing(dlock.Share{Sections: 9, For: time.Minute, Idle: time.Second}))
			require.NoError(t, acquire(t, l, t.Context(), "k").Release(t.Context()))
			time.Sleep(time.Second)
			h := acquire(t, l, t.Context(), "k")
			synctest.Wait()
			require.NoError(t, h.Context().Err())
			require.NoError(t, h.Release(t.Context()))
			time.Sleep(time.Second)
			h = acquire(t, l, t.Context(), "k")
			require.NoError(t, h.Release(t.Context()))
			synctest.Wait()
			require.False(t, f.free(t, "k"), "it is kept again")
		}
	})
}

func TestShareOfALeaseThatExpiresWhileItIsKept(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		l := newLocker(t, f, &dlock.Options{TTL: time.Second, Share: dlock.Share{Sections: 9, For: time.Minute, Idle: time.Minute}})
		require.NoError(t, acquire(t, l, t.Context(), "k").Release(t.Context()))
		time.Sleep(600 * time.Millisecond)
		require.True(t, f.free(t, "k"), "too little is left to pass it on")
	})
}

func TestShareKeptLeaseIsLost(t *testing.T) {
	bubble(t, func(t *testing.T) {
		f, lost := newFake(), make(chan struct{})
		f.acquire = granting(func(g *dlock.Grant) { g.Lost = lost })
		reg := prometheus.NewRegistry()
		l := newLocker(t, f, &dlock.Options{TTL: time.Hour, Registerer: reg, Share: dlock.Share{Sections: 9, For: time.Minute, Idle: time.Minute}})
		h := acquire(t, l, t.Context(), "k")
		require.NoError(t, h.Release(t.Context()))
		require.NoError(t, f.Backend.Release(t.Context(), dlock.Grant{Key: "k", Owner: h.Owner()}))
		close(lost)
		synctest.Wait()
		require.Zero(t, value(t, reg, "dlock_leases_lost_total"))
		h = acquire(t, l, t.Context(), "k")
		require.Equal(t, uint64(2), h.Fence())
		require.NoError(t, h.Release(t.Context()))
	})
	faked(t, func(t *testing.T, f *fake) {
		f.renew = fails
		h, reg := holdWith(t, f, &dlock.Options{
			TTL: 10 * time.Second, Renew: dlock.Renew{Every: time.Second, MaxHold: time.Hour},
			Share: dlock.Share{Sections: 9, For: time.Minute, Idle: time.Minute},
		})
		require.NoError(t, h.Release(t.Context()))
		time.Sleep(10 * time.Second)
		require.Zero(t, value(t, reg, "dlock_leases_lost_total"), "it has run out")
	})
}

func TestShareKeptLeaseIsFoundLost(t *testing.T) {
	for _, taken := range []bool{false, true} {
		faked(t, func(t *testing.T, f *fake) {
			var log bytes.Buffer
			o := sharing(dlock.Share{Sections: 9, For: time.Minute, Idle: time.Second})
			o.Logger = slog.New(slog.NewTextHandler(&log, nil))
			h := acquire(t, newLocker(t, f, o), t.Context(), "k")
			if taken {
				require.NoError(t, f.Backend.Release(t.Context(), dlock.Grant{Key: "k", Owner: h.Owner()}))
				other, err := f.Backend.TryAcquire(t.Context(), dlock.Request{Key: "k", Owner: "another", TTL: time.Hour})
				require.NoError(t, err)
				require.Equal(t, uint64(2), other.Fence)
			}
			require.NoError(t, h.Release(t.Context()), "the lease is kept")
			time.Sleep(time.Second)
			synctest.Wait()
			require.Equal(t, 1, f.count("release"))
			if !taken {
				require.Empty(t, log.String())
				return
			}
			require.Equal(t, 1, strings.Count(log.String(), "\n"))
			require.Contains(t, log.String(), "level=WARN")
			require.Contains(t, log.String(), "may have overlapped with another holder's")
			require.Contains(t, log.String(), "key=k fence=1 ")
		})
	}
}

// A renewal of a kept lease tells what its release would have told.
func TestShareKeptLeaseIsFoundLostByARenewal(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		var log bytes.Buffer
		o := sharing(dlock.Share{Sections: 9, For: time.Minute, Idle: time.Minute})
		o.TTL, o.Renew = 10*time.Second, dlock.Renew{Every: time.Second, MaxHold: time.Hour}
		o.Logger = slog.New(slog.NewTextHandler(&log, nil))
		h := acquire(t, newLocker(t, f, o), t.Context(), "k")
		require.NoError(t, f.Backend.Release(t.Context(), dlock.Grant{Key: "k", Owner: h.Owner()}))
		require.NoError(t, h.Release(t.Context()), "the lease is kept")
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.Equal(t, 1, strings.Count(log.String(), "\n"))
		require.Contains(t, log.String(), "may have overlapped with another holder's")
	})
}

// A section has its own context's values only: with those of the first holder it could re-enter that holder's locks.
func TestShareContextValues(t *testing.T) {
	for _, reentrant := range []bool{false, true} {
		bubble(t, func(t *testing.T) {
			type userKey struct{}
			o := sharing(dlock.Share{Sections: 9, For: time.Minute, Idle: time.Second})
			o.Reentrant = reentrant
			l := newLocker(t, memlock.New(), o)
			outer := acquire(t, l, context.WithValue(t.Context(), userKey{}, "alice"), "outer")
			require.NoError(t, acquire(t, l, outer.Context(), "inner").Release(t.Context()))
			next := acquire(t, l, t.Context(), "inner")
			require.Nil(t, next.Context().Value(userKey{}))
			_, err := l.TryAcquire(next.Context(), "outer")
			require.ErrorIs(t, err, dlock.ErrHeld)
			require.NoError(t, next.Release(t.Context()))
			require.NoError(t, outer.Release(t.Context()))
		})
	}
}

func TestShareAfterAPanic(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		l := newLocker(t, f, sharing(dlock.Share{Sections: 9, For: time.Minute}))
		var waiters []chan section
		f.acquire = func(context.Context, dlock.Request, acquireFunc) (dlock.Grant, error) {
			waiters = queue(l, t.Context(), 2) //nolint:contextcheck // others' calls
			f.set(func() { f.acquire = nil })
			panic("a backend's")
		}
		require.Panics(t, func() { _, _ = l.Acquire(context.Background(), "k") })
		first := won(t, waiters[0])
		synctest.Wait()
		require.NoError(t, first.Release(t.Context()))
		second := won(t, waiters[1])
		require.Equal(t, first.Fence(), second.Fence(), "it has not sent a request of its own")
		require.NoError(t, second.Release(t.Context()))
	})
}

func TestShareFails(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		f.acquire = func(context.Context, dlock.Request, acquireFunc) (dlock.Grant, error) {
			time.Sleep(20 * time.Second)
			return dlock.Grant{}, errNetwork
		}
		l := newLocker(t, f, sharing(dlock.Share{Sections: 9, For: time.Minute}))
		began := time.Now()
		for _, w := range queue(l, context.Background(), 50) {
			require.ErrorIs(t, (<-w).err, errNetwork)
		}
		require.Equal(t, 20*time.Second, time.Since(began))
	})
}

// An error that concerns one request alone isn't passed to the others, who send their own.
func TestShareFailsForOne(t *testing.T) {
	for _, why := range []error{dlock.ErrLost, dlock.ErrQueueFull, dlock.ErrHeld} {
		faked(t, func(t *testing.T, f *fake) {
			refuse := true
			f.acquire = func(ctx context.Context, r dlock.Request, next acquireFunc) (dlock.Grant, error) {
				time.Sleep(time.Second)
				if refuse {
					refuse = false
					return dlock.Grant{}, why
				}
				return next(ctx, r)
			}
			waiters := queue(newLocker(t, f, sharing(dlock.Share{Sections: 9, For: time.Minute})), context.Background(), 2)
			require.Error(t, (<-waiters[0]).err)
			require.NoError(t, won(t, waiters[1]).Release(t.Context()))
		})
	}
}

// A caller that finds a kept lease too old keeps its turn while that is released, but not beyond its context.
func TestShareOldLease(t *testing.T) {
	for _, silent := range []bool{false, true} {
		faked(t, func(t *testing.T, f *fake) {
			l := newLocker(t, f, &dlock.Options{
				TTL: 10 * time.Second, Renew: dlock.Renew{Every: 9 * time.Second, MaxHold: time.Hour},
				Share: dlock.Share{Sections: 9, For: time.Minute, Idle: time.Minute},
			})
			require.NoError(t, acquire(t, l, t.Context(), "k").Release(t.Context()))
			time.Sleep(6 * time.Second)
			began := time.Now()
			if silent {
				f.set(func() { f.release = hangs })
				ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
				defer cancel()
				_, err := l.Acquire(ctx, "k")
				require.ErrorIs(t, err, context.DeadlineExceeded)
				require.Equal(t, 10*time.Millisecond, time.Since(began))
				return
			}
			other := newLocker(t, f.Client(), nil)
			f.set(func() {
				f.release = func(ctx context.Context, g dlock.Grant, next grantFunc) error {
					f.set(func() { f.release = nil })
					time.Sleep(time.Second / 4)
					err := next(ctx, g)
					h, _ := other.TryAcquire(ctx, "k")                                   // before those that wait
					time.AfterFunc(time.Second/4, func() { _ = h.Release(t.Context()) }) //nolint:contextcheck // ctx ends before
					return err
				}
			})
			for i, w := range queue(l, t.Context(), 3) {
				h := won(t, w)
				require.Equal(t, time.Second/2, time.Since(began), "the old lease is released, and not waited out")
				require.Equal(t, pair(3, uint64(i+1)), pair(h.Next()))
				require.NoError(t, h.Release(t.Context()))
			}
		})
	}
}

// A stuck section holds up the others until the lease ends.
func TestShareLost(t *testing.T) {
	bubble(t, func(t *testing.T) {
		l := newLocker(t, memlock.New(), &dlock.Options{TTL: time.Second, Share: dlock.Share{Sections: 9, For: time.Minute}})
		first := acquire(t, l, t.Context(), "k")
		waiters := queue(l, t.Context(), 2)
		require.NoError(t, first.Release(t.Context()))
		stuck := (<-waiters[0]).h
		time.Sleep(time.Second)
		h := won(t, waiters[1])
		require.Equal(t, pair(2, 1), pair(h.Next()))
		require.ErrorIs(t, context.Cause(stuck.Context()), dlock.ErrLost)
		require.ErrorIs(t, stuck.Release(t.Context()), dlock.ErrLost)
		require.NoError(t, h.Context().Err(), "it has another lease")
		require.NoError(t, h.Release(t.Context()))
	})
}

func TestShareLostByTheService(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		l := newLocker(t, f, sharing(dlock.Share{Sections: 9, For: time.Minute}))
		h := acquire(t, l, t.Context(), "k")
		next := queue(l, t.Context(), 1)[0]
		require.NoError(t, f.Backend.Release(t.Context(), dlock.Grant{Key: "k", Owner: h.Owner()}))
		require.ErrorIs(t, h.Renew(t.Context()), dlock.ErrLost)
		require.ErrorIs(t, h.Release(t.Context()), dlock.ErrLost)
		h = won(t, next)
		require.Equal(t, uint64(2), h.Fence())
		require.NoError(t, h.Release(t.Context()))
	})
}

// If the lease is lost as it is passed on, only the goroutine that gets it sends a request.
func TestShareLostOnTheWay(t *testing.T) {
	bubble(t, func(t *testing.T) {
		for range 100 { // the next section may begin before the loss
			f, lost := newFake(), make(chan struct{})
			f.acquire = granting(func(g *dlock.Grant) {
				if g.Fence == 1 {
					g.Lost = lost
				}
			})
			l := newLocker(t, f, sharing(dlock.Share{Sections: 9, For: time.Minute}))
			h := acquire(t, l, t.Context(), "k")
			waiters := queue(l, t.Context(), 2)
			require.NoError(t, f.Backend.Release(t.Context(), dlock.Grant{Key: "k", Owner: h.Owner()}))
			require.NoError(t, h.Release(t.Context()))
			close(lost)
			first := won(t, waiters[0])
			want := pair(2, 1)
			if first.Fence() == 2 {
				require.Equal(t, want, pair(first.Next()))
				require.NoError(t, first.Release(t.Context()))
				want = pair(2, 2)
			}
			second := won(t, waiters[1])
			require.Equal(t, want, pair(second.Next()))
			require.NoError(t, second.Release(t.Context()))
		}
	})
}

func TestShareSaysWhatItWaitedFor(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		l := newLocker(t, f, sharing(dlock.Share{Sections: 1, For: time.Minute}))
		second, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		h := acquire(t, l, t.Context(), "k")
		require.ErrorIs(t, (<-queue(l, second, 1)[0]).err, dlock.ErrHeld, "by this process")

		ctx, giveUp := context.WithCancelCause(t.Context())
		late := queue(l, endsLate{ctx}, 1)[0]
		giveUp(errEnough)
		require.NoError(t, h.Release(t.Context()))
		err := (<-late).err // its turn came no sooner than its context's end
		require.ErrorIs(t, err, errEnough)
		require.ErrorIs(t, err, dlock.ErrHeld)
		h = acquire(t, l, t.Context(), "k")

		minute, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		waiters := queue(l, minute, 2)
		f.set(func() {
			f.acquire = func(ctx context.Context, r dlock.Request, next acquireFunc) (dlock.Grant, error) {
				if _, ends := ctx.Deadline(); ends {
					return acquireHangs(ctx, r, next)
				}
				return next(ctx, r)
			}
		})
		require.NoError(t, h.Release(t.Context()))
		for _, w := range waiters { // the first has sent a request, the second waits for the first
			err := (<-w).err
			require.ErrorContains(t, err, "no answer from the lock service")
			require.NotErrorIs(t, err, dlock.ErrHeld)
		}
		silent, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		waiter, behind := queue(l, silent, 1)[0], queue(l, t.Context(), 1)[0]
		_, err = l.TryAcquire(silent, "k")
		require.NotErrorIs(t, err, dlock.ErrHeld, "it is asked, and nobody has said so")
		require.ErrorContains(t, (<-waiter).err, "no answer from the lock service")
		require.NoError(t, won(t, behind).Release(t.Context()), "the deadline of the one that asked was its own")
	})
}

func TestShareWaitersGiveUp(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		l := newLocker(t, f, sharing(dlock.Share{Sections: 9, For: time.Minute}))
		foreign := acquire(t, newLocker(t, f.Client(), nil), t.Context(), "k")
		cause := fmt.Errorf("enough")
		asking, giveUp := context.WithCancelCause(t.Context())
		asks, waits := queue(l, asking, 2), queue(l, t.Context(), 1)
		giveUp(cause)
		for _, w := range asks {
			err := (<-w).err
			require.ErrorIs(t, err, cause)
			require.ErrorIs(t, err, dlock.ErrHeld)
		}
		synctest.Wait()
		require.NoError(t, foreign.Release(t.Context()))
		require.NoError(t, won(t, waits[0]).Release(t.Context()), "it asks in its turn")

		f.set(func() { f.acquire = acquireFails })
		for _, w := range queue(l, t.Context(), 3) {
			require.ErrorIs(t, (<-w).err, errNetwork)
		}
	})
}

func TestShareClose(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		l, err := dlock.New(f, sharing(dlock.Share{Sections: 9, For: time.Minute, Idle: time.Minute}))
		require.NoError(t, err)
		require.NoError(t, acquire(t, l, t.Context(), "kept").Release(t.Context()))
		held := acquire(t, l, t.Context(), "k")
		waiter := queue(l, t.Context(), 1)[0]
		require.False(t, f.free(t, "kept"))
		began := time.Now()
		require.NoError(t, l.Close())
		require.Zero(t, time.Since(began))
		require.True(t, f.free(t, "kept"), "nobody holds it")
		require.False(t, f.free(t, "k"))
		require.ErrorIs(t, (<-waiter).err, dlock.ErrClosed)
		require.ErrorIs(t, held.Release(t.Context()), dlock.ErrClosed)
	})
}

// Close takes a few seconds, however many leases are kept.
func TestShareCloseWhileTheServiceIsSilent(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		l := newLocker(t, f, sharing(dlock.Share{Sections: 9, For: time.Minute, Idle: time.Minute}))
		for i := range 500 {
			require.NoError(t, acquire(t, l, t.Context(), fmt.Sprint(i)).Release(t.Context()))
		}
		f.set(func() { f.release = hangs })
		began := time.Now()
		require.NoError(t, l.Close())
		require.LessOrEqual(t, time.Since(began), 3*time.Second)
	})
}

func TestShareReentrant(t *testing.T) {
	for _, reentrant := range []bool{false, true} {
		bubble(t, func(t *testing.T) {
			o := sharing(dlock.Share{Sections: 9, For: time.Minute})
			o.Reentrant = reentrant
			l := newLocker(t, memlock.New(), o)
			first := acquire(t, l, t.Context(), "k")
			inner, err := l.TryAcquire(first.Context(), "k")
			next := queue(l, t.Context(), 1)[0]
			if reentrant {
				require.NoError(t, err)
				require.NoError(t, first.Release(t.Context()))
				first = inner
			} else {
				require.ErrorIs(t, err, dlock.ErrNotReentrant)
			}
			synctest.Wait()
			require.Empty(t, next)
			left := context.WithoutCancel(first.Context()) // of a section that is over soon
			require.NoError(t, first.Release(t.Context()))
			second := (<-next).h
			_, err = l.TryAcquire(left, "k")
			require.ErrorIs(t, err, dlock.ErrHeld, "it is another section's")
			require.NoError(t, second.Release(t.Context()))
		})
	}
}

func TestShareByManyGoroutines(t *testing.T) {
	f := newFake()
	l := newLocker(t, f, &dlock.Options{TTL: time.Minute, Share: dlock.Share{Sections: 10, For: time.Minute, Idle: time.Millisecond}})
	var in, sections int // guarded by the lock, as the race detector sees
	last := pair(0, 0)
	var wg sync.WaitGroup
	for range 16 {
		wg.Go(func() {
			for n := range 100 {
				ctx, cancel := t.Context(), func() {}
				if n%3 == 0 { // waits that end as the turn comes
					ctx, cancel = context.WithTimeout(ctx, time.Duration(n)*time.Microsecond)
				}
				err := l.Do(ctx, "k", func(_ context.Context, h *dlock.Handle) error {
					in++
					now := pair(h.Next())
					if in != 1 || now[0] < last[0] || now[0] == last[0] && now[1] <= last[1] {
						t.Errorf("%d in the section, pair %v after %v", in, now, last)
					}
					last = now
					sections++
					in--
					return nil
				})
				cancel()
				if n%3 > 0 && err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	require.GreaterOrEqual(t, sections, 16*66)
	require.Less(t, f.count("release"), sections/4, "most were passed on")
	require.NoError(t, l.Close())
	require.True(t, f.free(t, "k"), "nothing is left")
}

func TestShareOptions(t *testing.T) {
	for want, o := range map[string]dlock.Options{
		"negative value":            {Share: dlock.Share{Sections: -1}},
		"For:-1ns":                  {Share: dlock.Share{Sections: 2, For: -1}},
		"Idle:-1ns":                 {Share: dlock.Share{Sections: 2, For: 1, Idle: -1}},
		"Share.Sections is not set": {Share: dlock.Share{Idle: time.Second}},
		"Share.For is not set":      {Share: dlock.Share{Sections: 2}},
		"less than Renew.MaxHold":   {Renew: dlock.Renew{Every: 1, MaxHold: time.Minute}, Share: dlock.Share{Sections: 2, For: time.Minute}},
	} {
		o.TTL = time.Second
		_, err := dlock.New(memlock.New(), &o)
		require.ErrorIs(t, err, dlock.ErrInvalid)
		require.ErrorContains(t, err, want)
	}
}

// late is a context that ends a moment after its deadline, as timers do.
type late struct {
	context.Context
	deadline time.Time
}

func (c late) Deadline() (time.Time, bool) { return c.deadline, true }

// A connection reports the deadline of the one that asks before its context does. That isn't the lock service's failure.
func TestShareAfterADeadline(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		asked := false
		f.acquire = func(ctx context.Context, r dlock.Request, next acquireFunc) (dlock.Grant, error) {
			if asked {
				return next(ctx, r)
			}
			asked = true
			deadline, _ := ctx.Deadline()
			time.Sleep(time.Until(deadline))
			return dlock.Grant{}, os.ErrDeadlineExceeded
		}
		l := newLocker(t, f, sharing(dlock.Share{Sections: 3, For: time.Minute}))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second+time.Millisecond)
		defer cancel()
		began := time.Now()
		first := acquiring(l, late{ctx, began.Add(time.Second)}, "k")
		synctest.Wait()
		second := acquiring(l, t.Context(), "k")
		require.ErrorIs(t, <-first, context.DeadlineExceeded)
		require.Equal(t, time.Second+time.Millisecond, time.Since(began))
		require.NoError(t, <-second, "it has no deadline")

		asked = false
		_, err := l.Acquire(late{t.Context(), time.Now().Add(time.Second)}, "endless")
		require.ErrorIs(t, err, os.ErrDeadlineExceeded, "a context that never ends")
	})
}
