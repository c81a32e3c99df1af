package redlock_test

import (
	"context"
	"os"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/redlock"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func TestConformanceVirtual(t *testing.T) {
	for _, c := range []struct {
		name    string
		prepare func(ns nodes) (faulty int)
	}{
		{"all", func(nodes) int { return 5 }},
		{"faulty quorum", func(nodes) int { return 3 }},
		{"two dead", func(ns nodes) int { ns[0].dead.Store(true); ns[3].dead.Store(true); return 5 }},
		{"one dead and one frozen", func(ns nodes) int { ns[3].dead.Store(true); ns[4].hole.Store(true); return 5 }},
	} {
		t.Run(c.name, func(t *testing.T) {
			dlocktest.Run(t, dlocktest.Harness{Virtual: true, New: func(t *testing.T) dlocktest.Service {
				ns := minis(t, 5)
				faulty := c.prepare(ns)
				return ns.service(t, faulty, strings.Contains(c.name, "frozen"))
			}})
		})
	}
}

func TestConformance(t *testing.T) {
	dlocktest.Run(t, dlocktest.Harness{New: func(t *testing.T) dlocktest.Service {
		return onServers(t).service(t, 5, false)
	}})
}

func (p proc) cut(nodes ...int) (heal func()) {
	heals := make([]func(), len(nodes))
	for i, n := range nodes {
		heals[i] = p.links[n].Link().Cut()
	}
	return func() {
		for _, heal := range heals {
			heal()
		}
	}
}

// have checks that, once all is at rest, r's owner has the lock on exactly these nodes.
func (ns nodes) have(t *testing.T, r dlock.Request, want ...int) {
	t.Helper()
	synctest.Wait()
	var got []int
	for i, n := range ns {
		if v, err := n.mini.Get(lockName(r)); err == nil && strings.HasPrefix(v, r.Owner+" ") {
			got = append(got, i)
		}
	}
	require.Equal(t, want, got)
}

func noQuorum(t *testing.T, err error) {
	t.Helper()
	require.ErrorContains(t, err, "no quorum of 3")
	require.NotErrorIs(t, err, dlock.ErrLost)
}

func (n node) fence(r dlock.Request) uint64 {
	v, _ := strconv.ParseUint(n.mini.HGet(fenceName(r), "token"), 10, 64)
	return v
}

func other(r dlock.Request) dlock.Request {
	r.Owner += "'"
	return r
}

func TestFrozenNodesAreNotWaitedFor(t *testing.T) {
	for frozen := range 3 {
		on(t, 5, func(t *testing.T, ns nodes, p proc, r dlock.Request) {
			for i := range frozen {
				ns[2*i].hole.Store(true)
			}
			began := time.Now()
			g := locktest.Take(t, p, r)
			_, err := p.TryAcquire(t.Context(), other(r))
			require.ErrorIs(t, err, dlock.ErrHeld)
			require.NoError(t, p.Renew(t.Context(), g))
			require.NoError(t, p.Release(t.Context(), g))
			require.ErrorIs(t, p.Release(t.Context(), g), dlock.ErrLost)
			require.Zero(t, time.Since(began), "%d frozen", frozen)
		})
	}
}

// The answer comes at the nodes' timeout.
func TestNoQuorum(t *testing.T) {
	onFor(t, 5, redlock.Options{}, func(t *testing.T, ns nodes, p proc, r dlock.Request) { // a twentieth of the TTL
		r.TTL = 10 * time.Second
		g := locktest.Take(t, p, locktest.Request(r.TTL))
		synctest.Wait()
		for _, i := range []int{0, 2, 4} {
			ns[i].hole.Store(true)
		}
		began := time.Now()
		_, err := p.TryAcquire(t.Context(), r)
		noQuorum(t, err)
		require.Equal(t, 500*time.Millisecond, time.Since(began))
		_, err = p.Acquire(t.Context(), r)
		noQuorum(t, err)
		noQuorum(t, p.Renew(t.Context(), g))
		noQuorum(t, p.Release(t.Context(), g))
		require.Equal(t, 2*time.Second, time.Since(began))
		require.NoError(t, p.Close())
		ns.have(t, r)
	})
}

func TestQuorum(t *testing.T) {
	for n := 1; n <= 5; n++ {
		on(t, n, func(t *testing.T, ns nodes, p proc, _ dlock.Request) {
			for have := range n + 1 {
				r := locktest.Request(time.Hour)
				for i := have; i < n; i++ {
					require.NoError(t, ns[i].mini.Set(lockName(r), "another 1"))
				}
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				g, err := p.TryAcquire(ctx, r)
				if have <= n/2 {
					require.ErrorIs(t, err, dlock.ErrHeld, "%d of %d", have, n)
					ns.have(t, r)
					continue
				}
				require.NoError(t, err, "%d of %d", have, n)
				ns.have(t, r, []int{0, 1, 2, 3, 4}[:have]...)

				ns[0].mini.Del(lockName(r))
				err = p.Renew(t.Context(), g)
				if have-1 <= n/2 {
					require.ErrorIs(t, err, dlock.ErrLost)
				} else {
					require.NoError(t, err)
				}
			}
		})
	}
}

// Each of two proposers gets two of five nodes, and the fifth is down. Both give up, and one wins soon.
func TestSplitVote(t *testing.T) {
	on(t, 5, func(t *testing.T, ns nodes, a proc, r dlock.Request) {
		b := ns.proc(t, patient)
		b.connect(t)
		a.cut(2)
		b.cut(2)
		heal := b.cut(0, 1)
		deliver3, deliver4 := b.links[3].Link().HoldReplies(), b.links[4].Link().HoldReplies()
		_, err := b.TryAcquire(t.Context(), r)
		noQuorum(t, err)
		ns.have(t, r, 3, 4)
		heal()

		won := locktest.Acquire(t.Context(), a, other(r))
		time.Sleep(time.Second)
		require.Empty(t, won)
		deliver3()
		deliver4()
		began := time.Now()
		first := locktest.Won(t, won)
		// go-redis asks the node that is down for up to 24 + 40 + 72 ms, and a backoff is up to 100 ms.
		require.Less(t, time.Since(began), 240*time.Millisecond)
		won = locktest.Acquire(t.Context(), b, other(other(r)))
		time.Sleep(time.Second)
		require.Empty(t, won)
		locktest.Release(t, a, first)
		require.Greater(t, locktest.Won(t, won).Fence, first.Fence)
	})
}

// Clocks may have drifted apart when a late quorum is known.
func TestValidity(t *testing.T) {
	for _, c := range []struct {
		after time.Duration // at which the replies come
		good  bool
	}{{987 * time.Millisecond, true}, {988 * time.Millisecond, false}, {1001 * time.Millisecond, false}} {
		on(t, 5, func(t *testing.T, _ nodes, p proc, r dlock.Request) {
			r.TTL = time.Second
			began := time.Now()
			deliver := p.link(5).HoldReplies()
			time.AfterFunc(c.after, deliver)
			g, err := p.Acquire(t.Context(), r)
			require.NoError(t, err)
			require.Equal(t, time.Second, g.TTL)
			if c.good {
				require.Equal(t, began, g.Start)
			} else {
				require.False(t, g.Start.Before(began.Add(c.after)), "an attempt whose lease was over was granted")
			}
		})
	}
}

// As long as it finds the lock held for a TTL in between.
func TestLateNowAndThen(t *testing.T) {
	on(t, 5, func(t *testing.T, ns nodes, p proc, r dlock.Request) {
		r.TTL = time.Second
		hold := func() {
			for _, n := range ns {
				require.NoError(t, n.mini.Set(lockName(r), "another 1"))
			}
		}
		free := func() {
			for _, n := range ns {
				n.mini.Del(lockName(r))
			}
		}
		hold()
		won := locktest.Acquire(t.Context(), p, r)
		for range 5 {
			time.Sleep(2 * r.TTL) // the waiter asks every 100 ms at least
			synctest.Wait()
			require.Empty(t, won)
			deliver := p.link(5).HoldReplies()
			free()
			time.Sleep(2 * r.TTL)
			hold()
			deliver()
		}
		time.Sleep(time.Second)
		require.Empty(t, won)
		free()
		locktest.Won(t, won)
	})
}

func TestAlwaysLate(t *testing.T) {
	on(t, 5, func(t *testing.T, _ nodes, p proc, r dlock.Request) {
		r.TTL = time.Second
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		deliver := p.link(5).HoldReplies()
		won := locktest.Acquire(ctx, p, r)
		for len(won) == 0 {
			time.Sleep(2 * r.TTL)
			deliver()
			synctest.Wait()
			deliver = p.link(5).HoldReplies()
		}
		deliver()
		require.ErrorContains(t, (<-won).Err, "the lease is over")
	})
}

func TestLockerSetsTheDriftAside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ns := minis(t, 5)
		for ms := time.Duration(1); ms <= 20; ms++ {
			ttl := ms * time.Millisecond
			l, err := dlock.New(ns.proc(t, patient).Backend, &dlock.Options{TTL: ttl})
			require.NoError(t, err)
			t.Cleanup(func() { require.NoError(t, l.Close()) })
			h, err := l.TryAcquire(t.Context(), locktest.Request(ttl).Key)
			if ms < 9 {
				require.ErrorIs(t, err, dlock.ErrInvalid, "TTL %v", ttl)
				continue
			}
			require.NoError(t, err)
			require.LessOrEqual(t, h.Until().Sub(h.AcquiredAt()), ttl-ttl/100-2*time.Millisecond, "TTL %v", ttl)
			require.NoError(t, h.Release(t.Context()))
		}
	})
}

// Also on nodes whose answer was lost, although its context has ended.
func TestFailedAttemptIsUndone(t *testing.T) {
	onFor(t, 5, redlock.Options{NodeTimeout: time.Second}, func(t *testing.T, ns nodes, p proc, r dlock.Request) {
		deliver := p.link(5).HoldReplies()
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Millisecond, func() { cancel(dlock.ErrHeld) }) // as another lock's caller may
		_, err := p.Acquire(ctx, r)
		require.ErrorIs(t, err, dlock.ErrHeld)
		ns.have(t, r, 0, 1, 2, 3, 4)
		deliver()
		ns.have(t, r)

		// The replies never come.
		_ = p.link(4).HoldReplies()
		_, err = p.TryAcquire(t.Context(), r)
		noQuorum(t, err)
		began := time.Now()
		require.NoError(t, p.Close())
		require.Equal(t, time.Second, time.Since(began), "it waits for the undoing")
		ns.have(t, r)
	})
}

// A node whose first answer is late is released too.
func TestReleaseEverywhere(t *testing.T) {
	on(t, 5, func(t *testing.T, ns nodes, p proc, r dlock.Request) {
		deliver := p.links[3].Link().HoldReplies()
		g := locktest.Take(t, p, r)
		ns.have(t, r, 0, 1, 2, 3, 4)
		require.NoError(t, p.Release(t.Context(), g))
		ns.have(t, r, 3) // the release must not overtake the request
		deliver()
		ns.have(t, r)
	})
}

// It fails when all nodes have answered, or the timeout is over, so a repeated release can't overtake it.
func TestReleaseWithoutAQuorum(t *testing.T) {
	on(t, 5, func(t *testing.T, ns nodes, p proc, r dlock.Request) {
		p.cut(3, 4)
		g, err := p.TryAcquire(t.Context(), r)
		require.NoError(t, err)
		ns.have(t, r, 0, 1, 2)
		ns[2].mini.Del(lockName(r))
		deliver := p.links[1].Link().HoldReplies()
		released := make(chan error, 1)
		go func() { released <- p.Release(t.Context(), g) }()
		time.Sleep(patient.NodeTimeout / 2)
		require.Empty(t, released)
		deliver()
		noQuorum(t, <-released)
		ns.have(t, r)
		require.ErrorIs(t, p.Release(t.Context(), g), dlock.ErrLost)
	})
}

// Late requests lock nodes again after another owner has come and gone: a quorum then proves nothing.
func TestReleaseAfterLateRequests(t *testing.T) {
	on(t, 3, func(t *testing.T, ns nodes, p proc, r dlock.Request) {
		r.TTL = time.Second
		g := locktest.Take(t, p, r)
		synctest.Wait()
		late, err := ns[0].mini.Get(lockName(r))
		require.NoError(t, err)
		time.Sleep(r.TTL / 2)
		require.NoError(t, p.Renew(t.Context(), g))
		synctest.Wait()
		time.Sleep(r.TTL)
		require.NoError(t, p.Release(t.Context(), locktest.Take(t, p, other(r))))
		synctest.Wait()
		for _, n := range ns[:2] {
			require.NoError(t, n.mini.Set(lockName(r), late))
		}
		require.ErrorIs(t, p.Renew(t.Context(), g), dlock.ErrLost)
		require.ErrorIs(t, p.Release(t.Context(), g), dlock.ErrLost)
		ns.have(t, r)

		g = locktest.Take(t, p, locktest.Request(r.TTL))
		for range 2 {
			synctest.Wait()
			time.Sleep(2 * r.TTL / 3)
			require.NoError(t, p.Renew(t.Context(), g))
		}
		synctest.Wait()
		time.Sleep(2 * r.TTL / 3)
		require.NoError(t, p.Release(t.Context(), g))
	})
}

// The reply comes half a TTL after the request, from which the lease counts.
func TestSlowRenewal(t *testing.T) {
	on(t, 3, func(t *testing.T, _ nodes, p proc, r dlock.Request) {
		r.TTL = time.Second
		g := locktest.Take(t, p, r)
		synctest.Wait()
		time.Sleep(r.TTL / 2)
		time.AfterFunc(r.TTL/2, p.link(3).HoldReplies())
		require.NoError(t, p.Renew(t.Context(), g))
		time.Sleep(r.TTL/2 - 11*time.Millisecond) // within the drift
		require.ErrorIs(t, p.Renew(t.Context(), g), dlock.ErrLost)
	})
}

// It must not free what the next attempt of the same owner has taken.
func TestLateUndo(t *testing.T) {
	on(t, 5, func(t *testing.T, ns nodes, p proc, r dlock.Request) {
		before := locktest.Take(t, p, other(r))
		require.NoError(t, p.Release(t.Context(), before))
		synctest.Wait()
		deliver := p.links[0].Link().HoldReplies()
		heal := p.cut(1, 2, 3, 4)
		_, err := p.TryAcquire(t.Context(), r)
		noQuorum(t, err)
		heal()
		g := locktest.Take(t, p, r)
		require.Greater(t, g.Fence, before.Fence, "that it had a node before doesn't make another owner's token its own")
		ns.have(t, r, 0, 1, 2, 3, 4)
		deliver()
		ns.have(t, r, 0, 1, 2, 3, 4)
		require.NoError(t, p.Release(t.Context(), g))
		ns.have(t, r)
	})
}

// However long the backoff has grown.
func TestWakesWhenAQuorumIsFree(t *testing.T) {
	for _, c := range []struct {
		left []time.Duration // on each node; 0: free, -1: for ever, -2: it is down
		want time.Duration
	}{
		{[]time.Duration{9, 9, 9, 9, 9}, 9},
		{[]time.Duration{10, 20, 30, 40, 50}, 30},
		{[]time.Duration{0, 20, 30, 40, 0}, 20},
		{[]time.Duration{0, -1, -1, 40, 0}, 40},
		{[]time.Duration{5, -1, 6, 1, -1}, 6},
		{[]time.Duration{40, 0, 0, -2, -2}, 40},
	} {
		o := patient
		o.Spin.Min = 1000 * time.Hour
		onFor(t, 5, o, func(t *testing.T, ns nodes, p proc, r dlock.Request) {
			for i, left := range c.left {
				switch {
				case left == -2:
					p.cut(i)
				case left != 0:
					require.NoError(t, ns[i].mini.Set(lockName(r), "another 1"))
				}
				if left > 0 {
					ns[i].mini.SetTTL(lockName(r), left*time.Second)
				}
			}
			began := time.Now()
			_, err := p.Acquire(t.Context(), r)
			require.NoError(t, err)
			require.GreaterOrEqual(t, time.Since(began), c.want*time.Second)
			require.LessOrEqual(t, time.Since(began), c.want*time.Second+5*time.Millisecond)
		})
	}
}

// A repeat gets the same token, whichever nodes answer, and a later owner a greater one.
func TestTokens(t *testing.T) {
	on(t, 5, func(t *testing.T, ns nodes, p proc, r dlock.Request) {
		last := uint64(0)
		minorities := [][]int{{}, {0}, {1, 2}, {3, 4}, {0, 4}, {2}, {1, 3}, {0, 1}}
		for _, first := range minorities {
			for _, second := range minorities {
				r = other(r)
				heal := p.cut(first...)
				g := locktest.Take(t, p, r)
				time.Sleep(time.Second) // go-redis has given up
				require.Greater(t, g.Fence, last)
				last = g.Fence
				heal()
				time.Sleep(2 * time.Second) // after many failures it dials once a second
				heal = p.cut(second...)
				require.Equal(t, last, locktest.Take(t, p, r).Fence)
				time.Sleep(time.Second)
				heal()
				time.Sleep(2 * time.Second)
				require.NoError(t, p.Release(t.Context(), g))
				ns.have(t, r)
			}
		}
		require.Greater(t, locktest.Take(t, p, r).Fence, last, "once released, a lock is taken anew whoever asks")
	})
}

func between(t *testing.T, p proc, r dlock.Request, f func()) (g dlock.Grant, err error) {
	t.Helper()
	deliver := p.link(5).HoldReplies()
	done := make(chan struct{})
	go func() {
		defer close(done)
		g, err = p.TryAcquire(t.Context(), r)
	}()
	synctest.Wait()
	f()
	deliver()
	<-done
	return g, err
}

func TestCounterRisesBetweenThePhases(t *testing.T) {
	for _, counter := range []uint64{1, 9} {
		for ahead := 3; ahead <= 5; ahead++ {
			on(t, 5, func(t *testing.T, ns nodes, p proc, r dlock.Request) {
				g, err := between(t, p, r, func() {
					for _, n := range ns[:ahead] {
						n.mini.HSet(fenceName(r), "token", strconv.FormatUint(counter, 10), "owner", "another")
					}
				})
				require.NoError(t, err)
				require.Equal(t, counter+1, g.Fence)
			})
		}
	}
}

// The nodes' clocks jumped, and another took the lock.
func TestOvertakenBetweenThePhases(t *testing.T) {
	on(t, 5, func(t *testing.T, ns nodes, p proc, r dlock.Request) {
		q := ns.proc(t, patient)
		_, err := between(t, p, r, func() {
			for _, n := range ns {
				n.mini.FastForward(2 * time.Hour)
			}
			require.EqualValues(t, 1, locktest.Take(t, q, other(r)).Fence)
			synctest.Wait()
		})
		require.ErrorIs(t, err, dlock.ErrHeld)
		for _, n := range ns {
			require.EqualValues(t, 1, n.fence(r))
		}
	})
}

// A later attempt of the same owner has taken the lock over.
func TestLateRequest(t *testing.T) {
	on(t, 1, func(t *testing.T, ns nodes, p proc, r dlock.Request) {
		locktest.Take(t, p, r)
		want, err := ns[0].mini.Get(lockName(r))
		require.NoError(t, err)
		script, err := os.ReadFile("acquire.lua")
		require.NoError(t, err)
		v, err := p.clients[0].Eval(t.Context(), string(script), []string{lockName(r), fenceName(r)}, r.Owner, 1, 5).Slice()
		require.NoError(t, err)
		require.EqualValues(t, 0, v[0])
		got, err := ns[0].mini.Get(lockName(r))
		require.NoError(t, err)
		require.Equal(t, want, got)
		require.Equal(t, time.Hour, ns[0].mini.TTL(lockName(r)))
	})
}

// After a lost reply, a node that has nothing to release doesn't say whether it had.
func TestReleaseReplyLost(t *testing.T) {
	for lost := range 6 {
		on(t, 5, func(t *testing.T, ns nodes, p proc, r dlock.Request) {
			g := locktest.Take(t, p, r)
			synctest.Wait()
			for _, l := range p.links[:lost] {
				l.LoseReply()
			}
			err := p.Release(t.Context(), g)
			if lost <= 2 {
				require.NoError(t, err)
			} else {
				require.Error(t, err)
				require.NotErrorIs(t, err, dlock.ErrLost)
			}
			ns.have(t, r)
		})
	}
}

// A request is undone when a quorum has nothing of it. Half of an even number is none: the other half could block
// everybody.
func TestUndoOfAnEvenNumber(t *testing.T) {
	on(t, 4, func(t *testing.T, ns nodes, p proc, r dlock.Request) {
		locktest.Take(t, p, r)
		synctest.Wait()
		for _, n := range ns[:2] {
			n.mini.Del(lockName(r))
		}
		for _, n := range ns[2:] {
			n.hole.Store(true)
		}
		err := p.Release(t.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL})
		require.Error(t, err)
		require.NotErrorIs(t, err, dlock.ErrLost, "then nobody would try again")
		ns.have(t, r, 2, 3)
	})
}

// It retries for a while, as the others give up soon.
func TestTryAcquireOfALockThatNobodyHas(t *testing.T) {
	for _, forever := range []bool{false, true} {
		on(t, 5, func(t *testing.T, ns nodes, p proc, r dlock.Request) {
			for i, owner := range []string{"a 1", "a 1", "b 1", "b 1"} {
				require.NoError(t, ns[i].mini.Set(lockName(r), owner))
				if !forever {
					ns[i].mini.SetTTL(lockName(r), time.Second)
				}
			}
			began := time.Now()
			_, err := p.TryAcquire(t.Context(), r)
			if forever {
				require.ErrorIs(t, err, dlock.ErrHeld)
				require.InDelta(t, patient.NodeTimeout, time.Since(began), float64(200*time.Millisecond))
			} else {
				require.NoError(t, err)
				require.InDelta(t, time.Second, time.Since(began), float64(200*time.Millisecond))
			}
		})
	}
}

func TestNodeAhead(t *testing.T) {
	on(t, 5, func(t *testing.T, ns nodes, p proc, r dlock.Request) {
		for i, ahead := range []string{"7", "0", "9", "0", "8"} {
			ns[i].mini.HSet(fenceName(r), "token", ahead, "owner", "gone")
		}
		g := locktest.Take(t, p, r)
		require.Greater(t, g.Fence, uint64(7))
		synctest.Wait()
		written := 0
		for i := range ns {
			if ns[i].fence(r) == g.Fence {
				written++
			}
		}
		require.GreaterOrEqual(t, written, 3)
	})
}

// Two attempts reach one node alone and fail; the next grants come from quorums with it and without.
func TestUnsafeCountersGoBackwards(t *testing.T) {
	tokens := func(o redlock.Options) (tokens []uint64) {
		o.NodeTimeout = patient.NodeTimeout
		onFor(t, 5, o, func(t *testing.T, _ nodes, p proc, r dlock.Request) {
			for range 2 {
				r = other(r)
				heal := p.cut(1, 2, 3, 4)
				_, err := p.TryAcquire(t.Context(), r)
				noQuorum(t, err)
				synctest.Wait()
				heal()
			}
			for _, down := range [][]int{{3, 4}, {0, 1}} {
				r = other(r)
				heal := p.cut(down...)
				g := locktest.Take(t, p, r)
				require.Equal(t, g.Fence, locktest.Take(t, p, r).Fence, "a repeat")
				require.NoError(t, p.Release(t.Context(), g))
				synctest.Wait()
				heal()
				tokens = append(tokens, g.Fence)
			}
		})
		return tokens
	}
	require.Equal(t, []uint64{3, 2}, tokens(redlock.Options{UnsafeCounters: true}))
	require.Equal(t, []uint64{1, 2}, tokens(redlock.Options{}))
}

// A node that restarts without its data votes twice. If the token was on no more than a quorum, it is also issued twice,
// which no scheme on independent nodes can prevent.
func TestNodeForgets(t *testing.T) {
	for _, c := range []struct {
		cut     []int // the first owner from these
		then    []int // the second
		granted bool  // the second owner gets the lock too
		token   uint64
	}{
		{nil, nil, false, 0},
		{[]int{3}, []int{1, 2}, false, 0},
		{[]int{3, 4}, []int{1}, true, 2}, // a node that refuses knows the token
		{[]int{3, 4}, []int{1, 2}, true, 1},
	} {
		on(t, 5, func(t *testing.T, ns nodes, p proc, r dlock.Request) {
			q := ns.proc(t, patient)
			heal := p.cut(c.cut...)
			require.EqualValues(t, 1, locktest.Take(t, p, r).Fence)
			synctest.Wait()
			heal()
			ns[0].mini.FlushAll()
			q.cut(c.then...)
			deliver := q.links[4].Link().HoldReplies()
			time.AfterFunc(time.Millisecond, deliver) // node 2's refusal comes before
			g, err := q.TryAcquire(t.Context(), other(r))
			require.Equal(t, c.granted, err == nil)
			require.Equal(t, c.token, g.Fence)
		})
	}
}

// It votes twice, too, but the tokens differ.
func TestClockJump(t *testing.T) {
	on(t, 5, func(t *testing.T, ns nodes, p proc, r dlock.Request) {
		first := locktest.Take(t, p, r)
		synctest.Wait()
		for i := range 3 {
			ns[i].mini.FastForward(2 * time.Hour)
		}
		second := locktest.Take(t, p, other(r))
		require.Greater(t, second.Fence, first.Fence)
		require.ErrorIs(t, p.Renew(t.Context(), first), dlock.ErrLost)
		require.ErrorIs(t, p.Release(t.Context(), first), dlock.ErrLost)
	})
}

func TestCounterUnusable(t *testing.T) {
	on(t, 3, func(t *testing.T, ns nodes, p proc, _ dlock.Request) {
		for _, counter := range []string{"abc", "1.5", "", "-5", "9007199254740991", "9007199254740992", "1e300"} {
			r := locktest.Request(time.Hour)
			for _, n := range ns[:2] {
				n.mini.HSet(fenceName(r), "token", counter, "owner", "gone")
			}
			_, err := p.TryAcquire(t.Context(), r)
			require.Error(t, err, "counter %q", counter)
			require.NotErrorIs(t, err, dlock.ErrHeld)
			ns.have(t, r)
		}
		r := locktest.Request(time.Hour)
		ns[0].mini.HSet(fenceName(r), "token", "9007199254740990", "owner", "gone")
		ns[1].mini.HSet(fenceName(r), "token", "9007199254740990", "owner", "gone")
		g := locktest.Take(t, p, r)
		require.EqualValues(t, 9007199254740991, g.Fence)
		synctest.Wait()
		require.Equal(t, g.Fence, locktest.Take(t, p, r).Fence)
	})
}

func TestScriptsFlushed(t *testing.T) {
	p := onServers(t).proc(t, patient)
	locktest.UseOnce(t, p, func() { // every server may lose scripts at any time
		for _, c := range p.clients {
			require.NoError(t, c.ScriptFlush(t.Context()).Err())
		}
	})
}

func TestStoppedNodes(t *testing.T) {
	if servers[0].Provider == testbed.External {
		t.Skip("an external server cannot be stopped")
	}
	ns := onServers(t)
	ns.warm(t)
	p, r := ns.proc(t, patient), locktest.Request(time.Hour)
	last := uint64(0)
	for _, stopped := range [][]int{{0, 1}, {3, 4}, {1, 3}} {
		heals := make([]func() error, 0, len(stopped))
		for _, i := range stopped {
			heal, err := servers[i].Pause(t.Context())
			testbed.Need(t, err)
			heals = append(heals, func() error { return heal(context.WithoutCancel(t.Context())) })
		}
		r = other(r)
		g, err := p.Acquire(t.Context(), r)
		if err == nil {
			err = p.Release(t.Context(), g)
		}
		for _, heal := range heals {
			require.NoError(t, heal())
		}
		require.NoError(t, err)
		require.Greater(t, g.Fence, last)
		last = g.Fence
	}
}

func TestNewRefuses(t *testing.T) {
	client := func() redis.UniversalClient {
		c := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
		t.Cleanup(func() { require.NoError(t, c.Close()) })
		return c
	}
	a, b := client(), client()
	for _, nodes := range [][]redis.UniversalClient{nil, {}, {nil}, {a, nil}, {a, b, a}} {
		_, err := redlock.New(nodes, nil)
		require.ErrorIs(t, err, dlock.ErrInvalid)
	}
	for _, o := range []redlock.Options{
		{Prefix: "{app}"},
		{NodeTimeout: -1},
		{Spin: redlock.Spin{Min: -1}},
		{Spin: redlock.Spin{Max: -1}},
		{Spin: redlock.Spin{Min: time.Second, Max: time.Millisecond}},
	} {
		_, err := redlock.New([]redis.UniversalClient{a, b}, &o)
		require.ErrorIs(t, err, dlock.ErrInvalid, "%+v", o)
	}
	backend, err := redlock.New([]redis.UniversalClient{a}, nil)
	require.NoError(t, err)
	_, err = backend.TryAcquire(t.Context(), dlock.Request{Key: "}x", Owner: "o", TTL: time.Second})
	require.ErrorIs(t, err, dlock.ErrInvalid, "its keys would share no slot of a Cluster")
	require.NoError(t, backend.Close())
}
