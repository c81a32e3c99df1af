package redlock_test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redlock"
)

// The search simulates seeded schedules of three proposers on three nodes in virtual time. Every request and reply waits
// until the schedule delivers it, late or never; clocks of nodes jump; holders stall for longer than leases. All is at rest
// between two steps, so a seed is a schedule.

type scheduler struct {
	mu      sync.Mutex
	waiting map[*step]struct{}
	free    bool // nothing waits any more
}

// step waits for the schedule.
type step struct {
	key string
	ok  chan bool
}

// ask waits for the schedule to let key happen or fail.
func (s *scheduler) ask(key string) bool {
	s.mu.Lock()
	if s.free {
		s.mu.Unlock()
		return true
	}
	st := &step{key, make(chan bool, 1)}
	s.waiting[st] = struct{}{}
	s.mu.Unlock()
	return <-st.ok
}

func (s *scheduler) steps() []*step {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]*step, 0, len(s.waiting))
	for st := range s.waiting {
		all = append(all, st)
	}
	slices.SortFunc(all, func(a, b *step) int { return strings.Compare(a.key, b.key) })
	return all
}

func (s *scheduler) let(st *step, ok bool) {
	s.mu.Lock()
	delete(s.waiting, st)
	s.mu.Unlock()
	st.ok <- ok
}

func (s *scheduler) letAll() {
	s.mu.Lock()
	s.free = true
	s.mu.Unlock()
	for _, st := range s.steps() {
		s.let(st, true)
	}
}

// stepConn's scripts and their replies are steps. It has no deadline: what is late comes late.
type stepConn struct {
	net.Conn
	s    *scheduler
	name string

	mu  sync.Mutex
	key string
}

func (c *stepConn) Write(b []byte) (int, error) {
	if i := bytes.Index(bytes.ToLower(b), []byte("eval")); i >= 0 {
		c.mu.Lock()
		c.key = c.name + string(b[i:])
		key := c.key
		c.mu.Unlock()
		if !c.s.ask(key + ">") {
			_ = c.Close()
			return 0, io.EOF
		}
	}
	return c.Conn.Write(b)
}

func (c *stepConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.mu.Lock()
	key := c.key
	c.key = ""
	c.mu.Unlock()
	if err == nil && key != "" && !c.s.ask(key+"<") {
		_ = c.Close()
		return 0, io.EOF
	}
	return n, err
}

func (*stepConn) SetDeadline(time.Time) error      { return nil }
func (*stepConn) SetReadDeadline(time.Time) error  { return nil }
func (*stepConn) SetWriteDeadline(time.Time) error { return nil }

type outcome struct {
	owner      string
	fence      uint64
	start, end time.Time
}

// simulate returns the grants of one schedule.
func simulate(t *testing.T, seed uint64, unsafe, forget bool) (grants []outcome) {
	t.Helper()
	const procs, size, steps, ttl = 3, 3, 250, time.Second
	synctest.Test(t, func(t *testing.T) {
		ns := minis(t, size)
		ns.warm(t)
		s := &scheduler{waiting: map[*step]struct{}{}}
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		var mu sync.Mutex
		var wg sync.WaitGroup
		for p := range procs {
			clients := make([]redis.UniversalClient, size)
			for i, n := range ns {
				clients[i] = redis.NewClient(&redis.Options{
					Addr: "127.0.0.1:1", MaxRetries: -1, Dialer: func(ctx context.Context, network, addr string) (net.Conn, error) {
						c, err := n.dial(ctx, network, addr)
						return &stepConn{Conn: c, s: s, name: fmt.Sprint(p, " to ", i, ": ")}, err
					},
				})
			}
			b, err := redlock.New(clients, &redlock.Options{NodeTimeout: ttl / 4, Spin: redlock.Spin{Min: 1, Max: 1}, UnsafeCounters: unsafe})
			require.NoError(t, err)
			wg.Go(func() {
				for round := 0; ctx.Err() == nil; round++ {
					r := dlock.Request{Key: "k", Owner: fmt.Sprintf("%d/%d", p, round), TTL: ttl}
					g, err := b.Acquire(ctx, r)
					if err == nil {
						mu.Lock()
						grants = append(grants, outcome{r.Owner, g.Fence, g.Start, time.Now()})
						mu.Unlock()
					}
					if s.ask(r.Owner+" is done") && err == nil {
						_ = b.Release(ctx, g)
					}
				}
				_ = b.Close()
				for _, c := range clients {
					_ = c.Close()
				}
			})
		}
		rnd := rand.New(rand.NewPCG(seed, 0))
		favourite := 0 // goes ahead for a while, or nobody would get anywhere
		for range steps {
			time.Sleep(time.Nanosecond) // so that times tell the order of steps
			synctest.Wait()
			all := s.steps()
			if rnd.IntN(20) == 0 {
				favourite = rnd.IntN(procs)
			}
			if rnd.IntN(10) > 0 {
				some := slices.DeleteFunc(slices.Clone(all), func(st *step) bool { return !strings.HasPrefix(st.key, fmt.Sprint(favourite)) })
				if len(some) > 0 {
					all = some
				}
			}
			switch n := rnd.IntN(100); {
			case n < 4 || len(all) == 0:
				time.Sleep([]time.Duration{ttl / 8, ttl / 3, ttl}[rnd.IntN(3)])
			case n < 7: // the clocks of some nodes jump
				for _, n := range ns {
					if rnd.IntN(2) == 0 {
						n.mini.FastForward(ttl)
					}
				}
			case n < 9 && forget:
				ns[rnd.IntN(size)].mini.FlushAll()
			default:
				s.let(all[rnd.IntN(len(all))], n < 97)
			}
		}
		synctest.Wait()
		cancel()
		s.letAll()
		wg.Wait()
	})
	return grants
}

// wrong names two grants whose tokens break a promise.
func wrong(grants []outcome) string {
	for _, a := range grants {
		for _, b := range grants {
			if a.owner != b.owner && a.fence == b.fence {
				return fmt.Sprintf("%s and %s have token %d", a.owner, b.owner, a.fence)
			}
			if a.end.Before(b.start) && a.fence >= b.fence {
				return fmt.Sprintf("%s has token %d; %s, who asked after that was granted, has %d", a.owner, a.fence, b.owner, b.fence)
			}
		}
	}
	return ""
}

const schedules = 80

func TestTokensUnderAnySchedule(t *testing.T) {
	total, overlapping := 0, 0
	for seed := range uint64(schedules) {
		grants := simulate(t, seed, false, false)
		require.Empty(t, wrong(grants), "seed %d", seed)
		total += len(grants)
		for i := 1; i < len(grants); i++ {
			if grants[i].start.Before(grants[i-1].end) {
				overlapping++
			}
		}
	}
	t.Logf("%d grants, %d of which were asked for before the last had been given", total, overlapping)
	require.Greater(t, total, 2*schedules)
	require.Positive(t, overlapping)
}

// The same schedules show what is wrong with independent counters, and with nodes that forget.
func TestTokensThatFail(t *testing.T) {
	for _, c := range []struct {
		name           string
		unsafe, forget bool
	}{{"UnsafeCounters", true, false}, {"nodes that forget", false, true}} {
		t.Run(c.name, func(t *testing.T) {
			for seed := range uint64(schedules) {
				if w := wrong(simulate(t, seed, c.unsafe, c.forget)); w != "" {
					t.Logf("seed %d: %s", seed, w)
					return
				}
			}
			t.Error("no schedule shows it")
		})
	}
}
