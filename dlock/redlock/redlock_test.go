package redlock_test

import (
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

// After a lost reply, a node that has nothing to release doesn't say whether it had.
func TestReleaseReplyLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ns := minis(t, 5)
		ns.warm(t)
		for lost := range 6 {
			p := ns.proc(t, patient)
			g := locktest.Take(t, p, locktest.Request(time.Hour))
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
			synctest.Wait()
			locktest.Take(t, p, locktest.Next(g.Key, time.Hour))
		}
	})
}

// The client repeats a request whose reply was lost. Its own vote must not refuse it.
func TestAcquireReplyLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ns := minis(t, 5)
		for _, unsafe := range []bool{false, true} {
			p := ns.proc(t, redlock.Options{NodeTimeout: patient.NodeTimeout, UnsafeCounters: unsafe})
			locktest.UseOnce(t, p, func() {}) // the nodes know the scripts then
			synctest.Wait()
			for _, l := range p.links {
				l.LoseReply()
			}
			require.NoError(t, p.Release(t.Context(), locktest.Take(t, p, locktest.Request(time.Hour))))
		}
	})
}

// Waiters of one process poll in turn, but learn together that the nodes don't reply.
func TestWaitersPollInTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ns := minis(t, 5)
		p := ns.proc(t, redlock.Options{NodeTimeout: time.Second})
		g := locktest.Take(t, p, locktest.Request(time.Hour))
		synctest.Wait() // it returned with the third reply; a node that it lacked would be taken, and released, by each poll
		const waiters = 50
		errs := make(chan error, waiters)
		for range waiters {
			go func() {
				_, err := p.Acquire(t.Context(), locktest.Next(g.Key, time.Hour))
				errs <- err
			}()
		}
		time.Sleep(time.Second) // each has asked once
		before := ns[0].mini.CommandCount()
		time.Sleep(10 * time.Second)
		require.Less(t, ns[0].mini.CommandCount()-before, 1000, "one waiter polls 20 times a second, and a poll counts as four commands")
		for _, n := range ns[:3] {
			n.hole.Store(true)
		}
		silent := time.Now()
		for range waiters {
			require.ErrorContains(t, <-errs, "no quorum")
		}
		require.Less(t, time.Since(silent), 2*time.Second)
		for _, n := range ns {
			n.hole.Store(false)
		}
		require.NoError(t, p.Release(t.Context(), g))
		locktest.Take(t, p, locktest.Next(g.Key, time.Hour))
	})
}

func TestScriptsFlushed(t *testing.T) {
	p := onServers(t).proc(t, patient)
	locktest.UseOnce(t, p, func() { // servers may lose scripts at any time
		for _, c := range p.clients {
			require.NoError(t, c.ScriptFlush(t.Context()).Err())
		}
	})
}

func TestNewRefuses(t *testing.T) {
	client := func() redis.UniversalClient {
		c := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
		t.Cleanup(func() { require.NoError(t, c.Close()) })
		return c
	}
	a, b := client(), client()
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	t.Cleanup(func() { require.NoError(t, ring.Close()) })
	for _, nodes := range [][]redis.UniversalClient{nil, {}, {nil}, {a, nil}, {a, b, a}, {a, b, ring}, {a, b, struct{ *redis.Ring }{ring}}} {
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
	type wrapped struct { // not comparable
		redis.UniversalClient
		_ []string
	}
	_, err := redlock.New([]redis.UniversalClient{wrapped{UniversalClient: a}, wrapped{UniversalClient: b}}, nil)
	require.NoError(t, err)
	backend, err := redlock.New([]redis.UniversalClient{a}, &redlock.Options{Spin: redlock.Spin{Min: 1, Max: 1}})
	require.NoError(t, err)
	_, err = backend.TryAcquire(t.Context(), dlock.Request{Key: "}x", Owner: "o", TTL: time.Second})
	require.ErrorIs(t, err, dlock.ErrInvalid, "its keys would share no slot of a Cluster")
	require.NoError(t, backend.Close())
}
