package dlock_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/memlock"
	"github.com/fencelab/fencelab/internal/testmain"
)

func TestMain(m *testing.M) { testmain.Run(m) }

// bubble runs f in virtual time. Every goroutine that f started must end before the bubble does.
func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

func newLocker(t *testing.T, b dlock.Backend, o *dlock.Options) *dlock.Locker {
	t.Helper()
	l, err := dlock.New(b, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	return l
}

func acquire(t *testing.T, l *dlock.Locker, ctx context.Context, key string) *dlock.Handle { //nolint:revive // t first
	t.Helper()
	h, err := l.Acquire(ctx, key)
	require.NoError(t, err)
	return h
}

// fake is a Backend on memlock whose calls can be watched and replaced. Replacements get the call that they replace.
type fake struct {
	*memlock.Backend

	mu      sync.Mutex
	acquire func(ctx context.Context, r dlock.Request, next acquireFunc) (dlock.Grant, error)
	renew   func(ctx context.Context, g dlock.Grant, next grantFunc) error
	release func(ctx context.Context, g dlock.Grant, next grantFunc) error
	calls   []string // renew and release only
}

type (
	acquireFunc func(context.Context, dlock.Request) (dlock.Grant, error)
	grantFunc   func(context.Context, dlock.Grant) error
)

func newFake() *fake { return &fake{Backend: memlock.New(nil)} }

func (f *fake) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return f.ask(ctx, r, f.Backend.Acquire)
}

func (f *fake) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return f.ask(ctx, r, f.Backend.TryAcquire)
}

func (f *fake) ask(ctx context.Context, r dlock.Request, next acquireFunc) (dlock.Grant, error) {
	f.mu.Lock()
	acquire := f.acquire
	f.mu.Unlock()
	if acquire == nil {
		return next(ctx, r)
	}
	return acquire(ctx, r, next)
}

func (f *fake) Renew(ctx context.Context, g dlock.Grant) error {
	return f.tell(ctx, "renew", &f.renew, g, f.Backend.Renew)
}

func (f *fake) Release(ctx context.Context, g dlock.Grant) error {
	return f.tell(ctx, "release", &f.release, g, f.Backend.Release)
}

func (f *fake) tell(
	ctx context.Context, name string, hook *func(context.Context, dlock.Grant, grantFunc) error, g dlock.Grant, next grantFunc,
) error {
	f.mu.Lock()
	f.calls = append(f.calls, name)
	h := *hook
	f.mu.Unlock()
	if h == nil {
		return next(ctx, g)
	}
	return h(ctx, g, next)
}

// set changes hooks while the Backend is in use.
func (f *fake) set(change func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	change()
}

func (f *fake) count(name string) (n int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, c := range f.calls {
		if c == name {
			n++
		}
	}
	return n
}

// holder tells who could take key: nil if it is free.
func (f *fake) free(t *testing.T, key string) bool {
	t.Helper()
	g, err := f.Backend.TryAcquire(t.Context(), dlock.Request{Key: key, Owner: "the test", TTL: time.Hour})
	if errors.Is(err, dlock.ErrHeld) {
		return false
	}
	require.NoError(t, err)
	require.NoError(t, f.Backend.Release(t.Context(), g))
	return true
}

func value(t *testing.T, reg *prometheus.Registry, name string) float64 {
	t.Helper()
	families, err := reg.Gather()
	require.NoError(t, err)
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		m := f.GetMetric()[0]
		if m.GetHistogram() != nil {
			return float64(m.GetHistogram().GetSampleCount())
		}
		return m.GetCounter().GetValue()
	}
	require.Fail(t, "no such metric", name)
	return 0
}

var errNetwork = errors.New("connection reset")
