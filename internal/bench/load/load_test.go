package load_test

import (
	"context"
	"errors"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/bench/load"
)

func TestMain(m *testing.M) {
	load.UseTimers()
	os.Exit(m.Run())
}

type fake struct {
	serve           func(n int) int                   // which of n waiters is next, in the order of arrival; nil: the first
	handOff         func(granted int64) time.Duration // how long a grant takes; nil: no time
	fail            func(asked int64) error           // nil: never
	token           func(granted int64) uint64        // nil: 1, 2, 3
	tokenless, open bool                              // open: it excludes nobody
	lost            bool                              // its leases say that they have ended
	stuck           error                             // what Close returns

	mu             sync.Mutex
	held           map[string]bool
	waiters        map[string][]chan struct{}
	asked, granted int64
	taken          map[string]int // by key
	closed         int
}

func (f *fake) client(context.Context) (load.Lock, error) { return client{f}, nil }

type client struct{ *fake }

func (c client) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed++
	return c.stuck
}

func (f *fake) Acquire(ctx context.Context, key string) (load.Lease, error) {
	f.mu.Lock()
	f.asked++
	if f.fail != nil {
		if err := f.fail(f.asked); err != nil {
			f.mu.Unlock()
			return nil, err
		}
	}
	if f.held == nil {
		f.held, f.waiters, f.taken = map[string]bool{}, map[string][]chan struct{}{}, map[string]int{}
	}
	if !f.held[key] || f.open {
		f.held[key] = true
		f.mu.Unlock()
	} else {
		turn := make(chan struct{})
		f.waiters[key] = append(f.waiters[key], turn)
		f.mu.Unlock()
		select {
		case <-turn:
		case <-ctx.Done():
			return nil, context.Cause(ctx) // the run is over; nobody else will want it
		}
	}
	f.mu.Lock()
	f.granted++
	n := f.granted
	f.taken[key]++
	f.mu.Unlock()
	if f.handOff != nil {
		time.Sleep(f.handOff(n))
	}
	l := &lease{f: f, key: key, fence: uint64(n)}
	switch {
	case f.tokenless:
		l.fence = 0
	case f.token != nil:
		l.fence = f.token(n)
	}
	return l, nil
}

type lease struct {
	f     *fake
	key   string
	fence uint64
}

func (l *lease) Fence() uint64 { return l.fence }
func (l *lease) Lost() bool    { return l.f.lost }

func (l *lease) Release(context.Context) error {
	f := l.f
	f.mu.Lock()
	defer f.mu.Unlock()
	w := f.waiters[l.key]
	if len(w) == 0 {
		f.held[l.key] = false
		return nil
	}
	i := 0
	if f.serve != nil {
		i = f.serve(len(w))
	}
	close(w[i])
	f.waiters[l.key] = append(w[:i:i], w[i+1:]...)
	return nil
}

const ms = time.Millisecond

// warmup ends between two events.
const warmup = time.Second + 5500*time.Microsecond

func closed(contenders int, work time.Duration) load.Config {
	return load.Config{
		Contenders: contenders, Connections: contenders, Keys: 1, Work: load.Duration(work), TTL: load.Duration(time.Minute),
		Warmup: load.Duration(warmup), Duration: load.Duration(10 * time.Second), Seed: 1,
	}
}

// simulate runs c in virtual time.
func simulate(t *testing.T, c load.Config, f *fake) (res *load.Result) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		var err error
		res, err = load.Run(t.Context(), c, f.client, nil)
		require.NoError(t, err)
	})
	require.Equal(t, c.Connections, f.closed)
	require.Equal(t, res.BacklogStart+res.Arrivals, res.Sections+res.Failed+res.Unserved.Count, "an arrival is missing, or counted twice")
	require.Equal(t, res.Sections, res.Wait.Count)
	require.Equal(t, res.Failed, res.FailedAfter.Count)
	var sum int64
	for _, s := range res.Samples {
		sum += s.Sections
	}
	require.Equal(t, res.Sections, sum)
	require.Equal(t, res.Order.Count, res.Sections+res.Unserved.Count)
	return res
}

var errBroken = errors.New("broken")
