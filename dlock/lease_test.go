package dlock_test

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/memlock"
)

func limit(ttl time.Duration) time.Duration { return ttl - ttl/100 - 2*time.Millisecond }

func TestLossWithoutIO(t *testing.T) {
	for _, ttl := range []time.Duration{time.Millisecond, 100 * time.Millisecond, time.Second, time.Hour} {
		bubble(t, func(t *testing.T) {
			l := newLocker(t, memlock.New(), &dlock.Options{TTL: ttl})
			h := acquire(t, l, t.Context(), "k")
			<-h.Context().Done()
			want := max(limit(ttl), ttl*3/4) // a margin for drift, but not most of the lease
			require.Equal(t, want, time.Since(h.AcquiredAt()))
			require.Equal(t, h.AcquiredAt().Add(want), h.Until())
			require.ErrorIs(t, h.Context().Err(), context.Canceled)
			require.ErrorIs(t, context.Cause(h.Context()), dlock.ErrLost)
		})
	}
}

// A late grant is released and requested again, but not for ever.
func TestGrantArrivesTooLate(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		slow := 2
		f.acquire = granting(func(*dlock.Grant) {
			if slow--; slow >= 0 {
				time.Sleep(limit(time.Second))
			}
		})
		reg := prometheus.NewRegistry()
		l := newLocker(t, f, &dlock.Options{TTL: time.Second, Registerer: reg})
		h := acquire(t, l, t.Context(), "k")
		require.NoError(t, h.Context().Err())
		require.Greater(t, h.Fence(), uint64(2))
		require.Zero(t, value(t, reg, "dlock_leases_lost_total"), "nobody had them")
		require.NoError(t, h.Release(t.Context()))
		require.EqualValues(t, 1, value(t, reg, "dlock_held_seconds"))

		f.set(func() { slow = 1 << 20 })
		_, err := l.Acquire(t.Context(), "k")
		require.ErrorIs(t, err, dlock.ErrRequestLost)
		require.NotErrorIs(t, err, dlock.ErrLost)
		synctest.Wait()
		require.True(t, f.free(t, "k"), "the last grant was given back too")
	})
}

func TestNoTokenNoLease(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		f.acquire = granting(func(g *dlock.Grant) { g.Fence = 0 })
		_, err := newLocker(t, f, nil).Acquire(t.Context(), "k")
		require.ErrorContains(t, err, "without a fencing token")
		synctest.Wait()
		require.True(t, f.free(t, "k"))
	})
}

func TestLostByTheBackend(t *testing.T) {
	for name, renew := range map[string]dlock.Renew{
		"no renewals": {}, "renewals": {Every: time.Second, MaxHold: 24 * time.Hour},
	} {
		t.Run(name, func(t *testing.T) {
			faked(t, func(t *testing.T, f *fake) {
				lost := make(chan struct{})
				f.acquire = granting(func(g *dlock.Grant) { g.Lost = lost })
				h := acquire(t, newLocker(t, f, &dlock.Options{TTL: time.Hour, Renew: renew}), t.Context(), "k")
				time.Sleep(time.Minute)
				require.NoError(t, h.Context().Err())
				close(lost)
				synctest.Wait()
				require.ErrorIs(t, context.Cause(h.Context()), dlock.ErrLost)
				n := f.count("renew")
				require.Equal(t, renew.Every > 0, n > 0)
				time.Sleep(time.Minute)
				require.Equal(t, n, f.count("renew"), "renewals of a lease that is lost")
			})
		})
	}
}

func TestRenewExtends(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		h, _ := hold(t, f, time.Second)
		var last time.Time
		for range 5 {
			time.Sleep(900 * time.Millisecond)
			last = time.Now()
			require.NoError(t, h.Renew(t.Context()))
			require.Equal(t, last.Add(limit(time.Second)), h.Until())
		}
		require.ErrorIs(t, h.Renew(ended(t)), errEnough)
		synctest.Wait()
		require.Equal(t, 5, f.count("renew"))
		<-h.Context().Done()
		require.Equal(t, limit(time.Second), time.Since(last))
		require.ErrorIs(t, h.Renew(t.Context()), dlock.ErrLost)
	})
}

func provisional(lease time.Duration) acquireHook {
	return func(ctx context.Context, r dlock.Request, next acquireFunc) (dlock.Grant, error) {
		g, err := next(ctx, dlock.Request{Key: r.Key, Owner: r.Owner, TTL: lease})
		g.TTL, g.Provisional = r.TTL, lease
		return g, err
	}
}

func TestProvisionalLease(t *testing.T) {
	const lease, half = time.Second, time.Second / 2
	left := limit(lease) - half
	for name, c := range map[string]struct {
		renew   grantHook
		maxHold time.Duration
		ends    func(l *dlock.Locker, h *dlock.Handle) error // before it is confirmed
		tries   int                                          // 3: or more
		lasts   time.Duration
	}{
		"confirmed":              {tries: 1, lasts: half + limit(time.Hour)}, // only the first renewal is the Locker's own
		"at the second try":      {renew: firstLost(true), tries: 2, lasts: half + left/8 + limit(time.Hour)},
		"no answer to the first": {renew: firstHangs(), tries: 2, lasts: half + left/2 + left/8 + limit(time.Hour)},
		"it cannot be":           {renew: fails, tries: 3, lasts: limit(lease)},
		"held for too long":      {maxHold: time.Second / 4, lasts: limit(lease)},
		"released":               {ends: func(_ *dlock.Locker, h *dlock.Handle) error { return h.Release(context.Background()) }, lasts: half - 1},
		"the Locker is closed":   {ends: func(l *dlock.Locker, _ *dlock.Handle) error { return l.Close() }, lasts: limit(lease)},
	} {
		t.Run(name, func(t *testing.T) {
			faked(t, func(t *testing.T, f *fake) {
				f.acquire = provisional(lease)
				f.renew = c.renew
				var log bytes.Buffer
				l := newLocker(t, f, &dlock.Options{
					TTL: time.Hour, Renew: dlock.Renew{MaxHold: c.maxHold}, Logger: slog.New(slog.NewTextHandler(&log, nil)),
				})
				h := acquire(t, l, t.Context(), "k")
				require.Equal(t, time.Hour, h.TTL())
				require.Equal(t, limit(lease), h.Until().Sub(h.AcquiredAt()), "what can be relied on until it is confirmed")
				time.Sleep(half - 1)
				require.Zero(t, f.count("renew"))
				if c.ends != nil {
					require.NoError(t, c.ends(l, h))
				}
				<-h.Context().Done()
				require.Equal(t, c.lasts, time.Since(h.AcquiredAt()))
				require.Equal(t, c.maxHold > 0, errors.Is(context.Cause(h.Context()), dlock.ErrMaxHold))
				time.Sleep(time.Minute)
				synctest.Wait()
				require.Equal(t, c.tries, min(f.count("renew"), 3))
				require.Equal(t, c.tries > 1, strings.Contains(log.String(), "trying again"))
			})
		})
	}
}

// A waiter's lease is as old as its last request. It is renewed halfway, unless it is fresh.
func TestWaitersLease(t *testing.T) {
	const ttl = time.Minute
	for name, c := range map[string]struct {
		age, lasts time.Duration
		fails      bool
	}{
		"fresh":               {age: limit(ttl)/8 - 1, lasts: limit(ttl)*7/8 + 1},
		"old":                 {age: limit(ttl) / 8, lasts: limit(ttl)*7/16 + limit(ttl)},
		"it can't be renewed": {age: ttl / 2, lasts: limit(ttl) - ttl/2, fails: true},
	} {
		t.Run(name, func(t *testing.T) {
			faked(t, func(t *testing.T, f *fake) {
				f.acquire = granting(func(g *dlock.Grant) { g.Start = g.Start.Add(-c.age) })
				if c.fails {
					f.renew = fails
				}
				h := acquire(t, newLocker(t, f, &dlock.Options{TTL: ttl}), t.Context(), "k")
				granted := time.Now()
				<-h.Context().Done()
				require.Equal(t, c.lasts, time.Since(granted))
			})
		})
	}
}

func TestProvisionalLeaseWithNothingLeft(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		f.acquire = granting(func(g *dlock.Grant) { g.Provisional = -time.Millisecond })
		_, err := newLocker(t, f, &dlock.Options{TTL: time.Hour}).Acquire(t.Context(), "k")
		require.ErrorIs(t, err, dlock.ErrRequestLost)
		time.Sleep(time.Minute) // what was granted is undone
	})
}

func TestRenewInBackground(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		var log bytes.Buffer
		l := newLocker(t, f, &dlock.Options{
			TTL: time.Second, Renew: dlock.Renew{Every: 300 * time.Millisecond, MaxHold: 10 * time.Second},
			Logger: slog.New(slog.NewTextHandler(&log, nil)),
		})
		h := acquire(t, l, t.Context(), "k")
		select {
		case <-h.Context().Done():
		case <-time.After(time.Hour):
			require.Fail(t, "renewed for ever")
		}
		// The last renewal is at 9.9 s.
		require.Equal(t, 9900*time.Millisecond+limit(time.Second), time.Since(h.AcquiredAt()))
		require.ErrorIs(t, context.Cause(h.Context()), dlock.ErrLost)
		require.ErrorIs(t, context.Cause(h.Context()), dlock.ErrMaxHold)
		require.Equal(t, 33, f.count("renew"))
		synctest.Wait()
		require.Equal(t, 1, strings.Count(log.String(), "no more renewals"), log.String())

		h = acquire(t, l, t.Context(), "k2")
		time.Sleep(time.Second)
		require.NoError(t, h.Release(t.Context()))
		n := f.count("renew")
		time.Sleep(5 * time.Second)
		require.Equal(t, n, f.count("renew"), "renewals after Release")
	})
}

// MaxHold counts from the grant's arrival.
func TestRenewCappedByHand(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		f.acquire = granting(func(*dlock.Grant) { time.Sleep(100 * time.Millisecond) })
		h, _ := holdWith(t, f, &dlock.Options{TTL: time.Second, Renew: dlock.Renew{MaxHold: 1500 * time.Millisecond}})
		for _, held := range []time.Duration{800 * time.Millisecond, 1500*time.Millisecond - 1} {
			time.Sleep(time.Until(h.AcquiredAt().Add(100*time.Millisecond + held)))
			require.NoError(t, h.Renew(t.Context()))
		}
		time.Sleep(time.Nanosecond)
		require.ErrorIs(t, h.Renew(t.Context()), dlock.ErrMaxHold)
		require.NoError(t, h.Context().Err(), "the lease continues to its end")
		<-h.Context().Done()
		require.Equal(t, 1600*time.Millisecond-1+limit(time.Second), time.Since(h.AcquiredAt()))
	})
}

// A failed renewal is retried after Every, however often the clock is checked.
func TestRenewFails(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		f.renew = firstHangs()
		h, _ := holdWith(t, f, &dlock.Options{TTL: time.Second, Renew: dlock.Renew{Every: 300 * time.Millisecond, MaxHold: time.Hour}})
		time.Sleep(10 * time.Second)
		require.NoError(t, h.Context().Err(), "one lost renewal of several")

		synctest.Wait()
		until := h.Until()
		f.set(func() { f.renew = hangs })
		<-h.Context().Done()
		require.Equal(t, until, time.Now())
		require.ErrorIs(t, context.Cause(h.Context()), dlock.ErrLost)
	})
	faked(t, func(t *testing.T, f *fake) {
		f.renew = fails
		h, _ := holdWith(t, f, &dlock.Options{TTL: 10 * time.Second, Renew: dlock.Renew{Every: 3 * time.Second, MaxHold: time.Hour}})
		<-h.Context().Done()
		require.Equal(t, 3, f.count("renew"))
	})
	faked(t, func(t *testing.T, f *fake) { // each may take a third of the time left
		var limits []time.Duration
		f.renew = func(ctx context.Context, _ dlock.Grant, _ grantFunc) error {
			end, _ := ctx.Deadline()
			limits = append(limits, time.Until(end))
			return errNetwork
		}
		h, _ := holdWith(t, f, &dlock.Options{TTL: 30 * time.Second, Renew: dlock.Renew{Every: time.Second, MaxHold: time.Hour}})
		<-h.Context().Done()
		synctest.Wait()
		require.Equal(t, (limit(30*time.Second)-time.Second)/3, limits[0])
		require.Equal(t, time.Second, limits[len(limits)-1])
	})
}

// Replies take longer than the time between two renewals.
func TestRenewSlowly(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		f.renew = func(ctx context.Context, g dlock.Grant, next grantFunc) error {
			select {
			case <-time.After(400 * time.Millisecond):
				return next(ctx, g)
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		l := newLocker(t, f, &dlock.Options{
			TTL: 10 * time.Second, Renew: dlock.Renew{Every: 100 * time.Millisecond, MaxHold: time.Hour},
		})
		h := acquire(t, l, t.Context(), "k")
		time.Sleep(time.Minute)
		require.NoError(t, h.Context().Err())
		require.NoError(t, h.Release(t.Context()))
	})
}

// A context's cause may be another lock's loss, which must not pass for this one's.
func TestRenewWithAContextLostElsewhere(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		f.renew = func(ctx context.Context, _ dlock.Grant, _ grantFunc) error {
			<-ctx.Done()
			return context.Cause(ctx)
		}
		f.release = f.renew
		l := newLocker(t, f, nil)
		a := acquire(t, newLocker(t, f.Client(), &dlock.Options{TTL: time.Second}), t.Context(), "a")
		b := acquire(t, l, t.Context(), "b")
		for range 2 { // its context ends during the call, and before
			err := b.Renew(a.Context())
			require.ErrorIs(t, err, context.Canceled)
			require.NotErrorIs(t, err, dlock.ErrLost)
		}
		within, done := context.WithTimeoutCause(t.Context(), time.Second, dlock.ErrLost)
		defer done()
		err := b.Renew(within)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.NotErrorIs(t, err, dlock.ErrLost)
		require.NoError(t, b.Context().Err())

		c := acquire(t, newLocker(t, f.Client(), &dlock.Options{TTL: time.Second}), t.Context(), "c")
		err = b.Release(c.Context())
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, dlock.ErrLost)
		f.set(func() { f.release = nil })
		time.Sleep(2 * time.Second)
		require.True(t, f.free(t, "b"), "released in the background")
		require.NoError(t, b.Release(t.Context()))
	})
}

// A renewed lease counts from the request; a reply after the lease's end revives nothing.
func TestSlowRenewal(t *testing.T) {
	for held, late := range map[time.Duration]bool{100 * time.Millisecond: false, 800 * time.Millisecond: true} {
		faked(t, func(t *testing.T, f *fake) {
			f.renew = repliesAfter(400 * time.Millisecond)
			h := acquire(t, newLocker(t, f, &dlock.Options{TTL: time.Second}), t.Context(), "k")
			time.Sleep(held)
			if err := h.Renew(t.Context()); late {
				require.ErrorIs(t, err, dlock.ErrLost)
				require.ErrorIs(t, context.Cause(h.Context()), dlock.ErrLost)
				held = 0
			} else {
				require.NoError(t, err)
			}
			require.Equal(t, h.AcquiredAt().Add(held+limit(time.Second)), h.Until())
		})
	}
}

func TestRenewalsOvertakeEachOther(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		var renewals atomic.Int32
		f.renew = func(ctx context.Context, g dlock.Grant, next grantFunc) error {
			if renewals.Add(1) == 1 {
				time.Sleep(400 * time.Millisecond)
			}
			return next(ctx, g)
		}
		h := acquire(t, newLocker(t, f, &dlock.Options{TTL: time.Second}), t.Context(), "k")
		first := make(chan error, 1)
		go func() { first <- h.Renew(t.Context()) }()
		time.Sleep(100 * time.Millisecond)
		require.NoError(t, h.Renew(t.Context()))
		until := time.Now().Add(limit(time.Second))
		require.Equal(t, until, h.Until())
		require.NoError(t, <-first)
		require.Equal(t, until, h.Until())
	})
}

// A clock may be coarse.
func TestRenewAtTheInstantOfTheGrant(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		f.acquire = provisional(time.Second)
		h, _ := hold(t, f, time.Hour)
		require.NoError(t, h.Renew(t.Context()))
		require.Equal(t, limit(time.Hour), h.Until().Sub(h.AcquiredAt()))
	})
}

func TestContextValues(t *testing.T) {
	type name struct{}
	bubble(t, func(t *testing.T) {
		l := newLocker(t, memlock.New(), &dlock.Options{TTL: time.Hour, Reentrant: true})
		ctx, cancel := context.WithCancel(context.WithValue(t.Context(), name{}, "outer"))
		outer := acquire(t, l, ctx, "k")
		cancel()
		require.NoError(t, outer.Context().Err(), "the end of Acquire's context doesn't touch the lease")
		require.Equal(t, "outer", outer.Context().Value(name{}))
		inner := acquire(t, l, context.WithValue(outer.Context(), name{}, "inner"), "k")
		require.Equal(t, "inner", inner.Context().Value(name{}))
		require.NoError(t, inner.Release(t.Context()))
		require.ErrorIs(t, context.Cause(inner.Context()), dlock.ErrReleased)
		require.NoError(t, outer.Release(t.Context()))
	})
}

func TestRelease(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		h := acquire(t, newLocker(t, f, nil), t.Context(), "k")
		require.NoError(t, h.Release(ended(t)), "as in a deferred call")
		require.ErrorIs(t, context.Cause(h.Context()), dlock.ErrReleased)
		require.NoError(t, h.Release(t.Context()), "again")
		require.Equal(t, 1, f.count("release"))
		require.ErrorIs(t, h.Renew(t.Context()), dlock.ErrReleased)
		require.True(t, f.free(t, "k"))
	})
}

func TestReleaseByNonOwner(t *testing.T) {
	for name, want := range map[string]struct {
		err     error
		applied int
	}{"taken": {}, "gone": {}, "freed another's": {dlock.ErrForeignRelease, 1}} {
		t.Run(name, func(t *testing.T) {
			faked(t, func(t *testing.T, f *fake) {
				h, reg := hold(t, f, time.Minute)
				switch name {
				case "taken":
					next := acquire(t, newLocker(t, f.Client(), nil), t.Context(), "k")
					defer func() { require.NoError(t, next.Release(t.Context())) }()
				case "gone": // only the release detects it
					require.NoError(t, f.Backend.Release(t.Context(), dlock.Grant{Key: "k", Owner: h.Owner()}))
				default:
					f.release = func(context.Context, dlock.Grant, grantFunc) error { return want.err }
				}
				for range 2 {
					err := h.Release(t.Context())
					require.ErrorIs(t, err, dlock.ErrLost)
					require.Equal(t, want.err != nil, errors.Is(err, dlock.ErrForeignRelease))
				}
				require.Equal(t, name == "gone", f.free(t, "k"))
				require.EqualValues(t, 1, value(t, reg, "release_by_non_owner_total"))
				require.EqualValues(t, want.applied, value(t, reg, "release_by_non_owner_applied_total"))
			})
		})
	}
}

// The second request finds the lock free, which is a loss only if the lease had ended before.
func TestReleaseReplyLost(t *testing.T) {
	for name, lost := range map[string]func(f *fake, h *dlock.Handle){
		"held to the end": nil,
		"it ran out":      func(*fake, *dlock.Handle) { time.Sleep(time.Second) },
		"a renewal found it lost": func(f *fake, h *dlock.Handle) {
			_ = f.Backend.Release(context.Background(), dlock.Grant{Key: "k", Owner: h.Owner()})
			_ = h.Renew(context.Background())
		},
	} {
		t.Run(name, func(t *testing.T) {
			faked(t, func(t *testing.T, f *fake) {
				f.release = firstLost(lost != nil)
				h, reg := hold(t, f, time.Second)
				if lost == nil {
					require.NoError(t, h.Release(t.Context()))
					require.Zero(t, value(t, reg, "release_by_non_owner_total"))
					return
				}
				lost(f, h)
				require.ErrorIs(t, h.Release(t.Context()), dlock.ErrLost)
				require.EqualValues(t, 1, value(t, reg, "release_by_non_owner_total"))
			})
		})
	}
}

func TestReleaseGoesOnInTheBackground(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		f.release = fails
		h, reg := hold(t, f, time.Hour)
		err := h.Release(t.Context())
		require.ErrorIs(t, err, errNetwork)
		require.ErrorContains(t, err, `release "k": `)
		require.Equal(t, pair(0, 0), pair(h.Next()), "a write could still carry the token")
		require.ErrorIs(t, h.Release(t.Context()), errNetwork, "it may be called again")
		f.set(func() { f.release = nil })
		time.Sleep(6 * time.Second) // the longest pause between tries, and one try
		require.True(t, f.free(t, "k"))
		require.NoError(t, h.Release(t.Context()), "released in the background, and never lost")
		require.Zero(t, value(t, reg, "release_by_non_owner_total"))
	})
}

func TestNoAnswerTellsTheLoss(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		f.release = fails
		l := newLocker(t, f, &dlock.Options{TTL: time.Second})
		err := l.Do(t.Context(), "k", func(context.Context, *dlock.Handle) error { return nil })
		require.ErrorIs(t, err, errNetwork)
		require.NotErrorIs(t, err, dlock.ErrLost)
		err = l.Do(t.Context(), "k2", func(ctx context.Context, h *dlock.Handle) error {
			<-ctx.Done()
			require.ErrorIs(t, h.Renew(ctx), dlock.ErrLost)
			return ctx.Err()
		})
		require.ErrorIs(t, err, errNetwork)
		require.ErrorIs(t, err, dlock.ErrLost)
		err = l.Do(t.Context(), "k3", func(context.Context, *dlock.Handle) error {
			defer time.Sleep(time.Second)
			return l.Close()
		})
		require.ErrorIs(t, err, dlock.ErrClosed)
		require.ErrorIs(t, err, dlock.ErrLost)
	})
}

func TestRenewOvertakenByRelease(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		h, _ := hold(t, f, time.Second)
		late := make(chan struct{})
		f.renew = func(ctx context.Context, g dlock.Grant, next grantFunc) error {
			<-late
			return next(context.WithoutCancel(ctx), g)
		}
		renewed := make(chan error)
		go func() { renewed <- h.Renew(t.Context()) }()
		synctest.Wait()
		require.NoError(t, h.Release(t.Context()))
		close(late)
		require.ErrorIs(t, <-renewed, dlock.ErrReleased)
	})
}

func TestReleaseDuringAnother(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		f.release = func(ctx context.Context, g dlock.Grant, next grantFunc) error {
			time.Sleep(2 * time.Second)
			return next(ctx, g)
		}
		h := acquire(t, newLocker(t, f, nil), t.Context(), "k")
		first := make(chan error, 1)
		go func() { first <- h.Release(context.Background()) }()
		synctest.Wait()
		ctx, cancel := context.WithTimeoutCause(t.Context(), 50*time.Millisecond, errEnough)
		defer cancel()
		began := time.Now()
		err := h.Release(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.ErrorIs(t, err, errEnough)
		require.Equal(t, 50*time.Millisecond, time.Since(began))
		require.ErrorIs(t, h.Release(ctx), context.DeadlineExceeded)
		require.Equal(t, 1050*time.Millisecond, time.Since(began), "whose context has ended still tries for a second")
		require.NoError(t, h.Release(t.Context()), "the first one's answer")
		require.NoError(t, <-first)
		require.Equal(t, 1, f.count("release"))
	})
}

func TestSilence(t *testing.T) {
	faked(t, func(t *testing.T, f *fake) {
		f.renew, f.release = hangs, hangs
		l := newLocker(t, f, &dlock.Options{TTL: 10 * time.Second})
		ctx := context.Background()
		h := acquire(t, l, t.Context(), "k")
		require.ErrorIs(t, h.Renew(ctx), dlock.ErrLost)
		require.Equal(t, h.Until(), time.Now())
		err := h.Release(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded, "it may have been released before")
		require.NotErrorIs(t, err, dlock.ErrClosed)
		require.Equal(t, h.Until().Add(time.Second), time.Now())

		lost := acquire(t, l, t.Context(), "k6")
		h = acquire(t, l, t.Context(), "k4")
		minute, done := context.WithTimeout(ctx, time.Minute)
		defer done()
		require.ErrorIs(t, h.Release(minute), context.DeadlineExceeded)
		require.Equal(t, time.Minute, time.Since(h.AcquiredAt()), "as long as the caller wants")

		renewed, released := acquire(t, l, t.Context(), "k1"), acquire(t, l, t.Context(), "k2")
		another, brief := acquire(t, l, t.Context(), "k3"), acquire(t, l, t.Context(), "k5")
		began := time.Now()
		ends, hurried, late := make(chan error, 3), make(chan error, 1), make(chan error, 1)
		go func() { ends <- renewed.Renew(ctx) }()
		synctest.Wait()
		long, cancel := context.WithTimeout(ctx, time.Hour)
		defer cancel()
		go func() { ends <- released.Release(long) }()
		go func() { ends <- another.Release(ctx) }()
		hurry, cancel := context.WithTimeout(ctx, time.Second/2)
		defer cancel()
		go func() { hurried <- brief.Release(hurry) }()
		go func() { late <- lost.Release(long) }()
		synctest.Wait()
		closed := make(chan error, 1)
		go func() { closed <- l.Close() }()
		require.ErrorIs(t, <-ends, dlock.ErrClosed)
		require.Zero(t, time.Since(began), "a renewal")
		require.ErrorIs(t, <-hurried, context.DeadlineExceeded)
		require.Equal(t, time.Second/2, time.Since(began), "a release whose context ends")
		for range 2 {
			require.ErrorIs(t, <-ends, dlock.ErrClosed)
			require.Equal(t, time.Second, time.Since(began), "a release")
		}
		err = <-late
		require.ErrorIs(t, err, dlock.ErrClosed)
		require.ErrorIs(t, err, dlock.ErrLost)
		require.NoError(t, <-closed)
		require.Equal(t, 3*time.Second/2, time.Since(began), "Close, which also undoes what the hurried release may have left")
	})
}

// While Close waits, or after it has ended the call's context, which the backend ignores.
func TestReleaseAnsweredAfterClose(t *testing.T) {
	for reply, cancellable := range map[time.Duration]bool{time.Second / 2: true, 2 * time.Second: false} {
		faked(t, func(t *testing.T, f *fake) {
			f.release = func(context.Context, dlock.Grant, grantFunc) error {
				time.Sleep(reply)
				return nil
			}
			ctx := context.Background()
			if cancellable {
				ctx = t.Context()
			}
			l := newLocker(t, f, nil)
			h := acquire(t, l, t.Context(), "k")
			released := make(chan error, 1)
			go func() { released <- h.Release(ctx) }()
			synctest.Wait()
			require.NoError(t, l.Close())
			require.NoError(t, <-released)
		})
	}
}

// A renewal that Close ends is not logged.
func TestCloseDuringARenewal(t *testing.T) {
	for _, acquired := range []acquireHook{nil, provisional(2 * time.Second)} { // keepAlive renews it, or confirm
		faked(t, func(t *testing.T, f *fake) {
			f.acquire, f.renew = acquired, hangs
			var log bytes.Buffer
			o := &dlock.Options{TTL: time.Minute, Logger: slog.New(slog.NewTextHandler(&log, nil))}
			if acquired == nil {
				o.Renew = dlock.Renew{Every: time.Second, MaxHold: time.Hour}
			}
			l := newLocker(t, f, o)
			acquire(t, l, t.Context(), "k")
			time.Sleep(time.Second)
			synctest.Wait()
			require.Equal(t, 1, f.count("renew"))
			require.NoError(t, l.Close())
			require.Empty(t, log.String())
		})
	}
}

var errEnough = errors.New("the caller has had enough")

func ended(t *testing.T) context.Context {
	t.Helper()
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(errEnough)
	return ctx
}

// A release that panicked may or may not have freed the lock: the next one asks.
func TestReleasePanics(t *testing.T) {
	for _, sent := range []bool{false, true} {
		faked(t, func(t *testing.T, f *fake) {
			h, reg := hold(t, f, time.Hour)
			f.release = func(ctx context.Context, g dlock.Grant, next grantFunc) error {
				if sent {
					require.NoError(t, next(ctx, g))
				}
				panic("a backend's")
			}
			require.Panics(t, func() { _ = h.Release(context.Background()) })
			require.Equal(t, sent, f.free(t, "k"))
			f.set(func() { f.release = nil })
			require.NoError(t, h.Release(context.Background()))
			require.Equal(t, 2, f.count("release"))
			require.True(t, f.free(t, "k"))
			require.Zero(t, value(t, reg, "release_by_non_owner_total"))
			require.NoError(t, h.Release(context.Background()))
			require.Equal(t, 2, f.count("release"), "the answer is known")
		})
	}
}
