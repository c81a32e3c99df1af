package load

import (
	"context"
	"errors"
	"os"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestMain(m *testing.M) {
	newAlarm = timerAlarm // for virtual time
	os.Exit(m.Run())
}

type fake struct {
	serve   func(n int) int                   // which of n waiters is next, in the order of arrival; nil: the first
	handOff func(granted int64) time.Duration // duration of a grant; nil: 0
	fail    func(asked int64) error           // nil: never
	token   func(granted int64) uint64        // nil: 1, 2, 3
	open    bool                              // it excludes nobody
	lost    bool                              // its leases say that they have ended

	mu             sync.Mutex
	held           map[string]bool
	waiters        map[string][]chan struct{}
	asked, granted int64
	taken          map[string]int
	closed         int
}

func (f *fake) client(context.Context) (Lock, error) {
	return Lock{Acquire: f.acquire, Close: func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.closed++
		return nil
	}}, nil
}

func (f *fake) acquire(ctx context.Context, key string) (Lease, error) {
	f.mu.Lock()
	f.asked++
	if f.fail != nil {
		if err := f.fail(f.asked); err != nil {
			f.mu.Unlock()
			return Lease{}, err
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
			return Lease{}, context.Cause(ctx) // nobody else waits: the run is over
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
	token := uint64(n)
	if f.token != nil {
		token = f.token(n)
	}
	return Lease{Fence: token, Lost: func() bool { return f.lost }, Release: func(context.Context) error { return f.release(key) }}, nil
}

func (f *fake) release(key string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	w := f.waiters[key]
	if len(w) == 0 {
		f.held[key] = false
		return nil
	}
	i := 0
	if f.serve != nil {
		i = f.serve(len(w))
	}
	close(w[i])
	f.waiters[key] = append(w[:i:i], w[i+1:]...)
	return nil
}

const ms = time.Millisecond

// warmup ends between two events.
const warmup = time.Second + 5500*time.Microsecond

func closed(contenders int, work time.Duration) Config {
	return Config{
		Contenders: contenders, Connections: contenders, Keys: 1, Work: Duration(work), TTL: Duration(time.Minute),
		Warmup: Duration(warmup), Duration: Duration(10 * time.Second), Seed: 1,
	}
}

func simulate(t *testing.T, c Config, f *fake) (res *Result) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		var err error
		res, err = Run(t.Context(), c, f.client, Options{})
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
