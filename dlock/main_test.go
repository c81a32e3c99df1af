package dlock_test

import (
	"context"
	"errors"
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
	"github.com/fencelab/fencelab/internal/testmain"
)

func TestMain(m *testing.M) { testmain.Run(m) }

func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

func faked(t *testing.T, f func(t *testing.T, f *fake)) {
	t.Helper()
	bubble(t, func(t *testing.T) { f(t, newFake()) })
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

func acquiring(l *dlock.Locker, ctx context.Context, key string) <-chan error { //nolint:revive // l first
	done := make(chan error, 1)
	go func() {
		_, err := l.Acquire(ctx, key)
		done <- err
	}()
	return done
}

func hold(t *testing.T, f *fake, ttl time.Duration) (*dlock.Handle, *prometheus.Registry) {
	t.Helper()
	return holdWith(t, f, &dlock.Options{TTL: ttl})
}

func holdWith(t *testing.T, f *fake, o *dlock.Options) (*dlock.Handle, *prometheus.Registry) {
	t.Helper()
	reg := prometheus.NewRegistry()
	o.Registerer = reg
	return acquire(t, newLocker(t, f, o), t.Context(), "k"), reg
}

// fake is a Backend on memlock with hooks, which get the call that they replace.
type fake struct {
	*memlock.Backend

	mu      sync.Mutex
	acquire acquireHook
	renew   grantHook
	release grantHook
	calls   []string // renew and release only
}

type (
	acquireFunc func(context.Context, dlock.Request) (dlock.Grant, error)
	acquireHook func(ctx context.Context, r dlock.Request, next acquireFunc) (dlock.Grant, error)
	grantFunc   func(context.Context, dlock.Grant) error
	grantHook   func(ctx context.Context, g dlock.Grant, next grantFunc) error
)

func acquireFails(context.Context, dlock.Request, acquireFunc) (dlock.Grant, error) {
	return dlock.Grant{}, errNetwork
}

func acquireHangs(ctx context.Context, _ dlock.Request, _ acquireFunc) (dlock.Grant, error) {
	<-ctx.Done()
	return dlock.Grant{}, ctx.Err()
}

func acquireReplyLost(ctx context.Context, r dlock.Request, next acquireFunc) (dlock.Grant, error) {
	_, err := next(ctx, r)
	return dlock.Grant{}, errors.Join(errNetwork, err)
}

func granting(change func(g *dlock.Grant)) acquireHook {
	return func(ctx context.Context, r dlock.Request, next acquireFunc) (dlock.Grant, error) {
		g, err := next(ctx, r)
		change(&g)
		return g, err
	}
}

func fails(context.Context, dlock.Grant, grantFunc) error { return errNetwork }

func hangs(ctx context.Context, _ dlock.Grant, _ grantFunc) error {
	<-ctx.Done()
	return ctx.Err()
}

func repliesAfter(d time.Duration) grantHook {
	return func(ctx context.Context, g dlock.Grant, next grantFunc) error {
		err := next(ctx, g)
		time.Sleep(d)
		return err
	}
}

func firstHangs() grantHook {
	var called atomic.Bool
	return func(ctx context.Context, g dlock.Grant, next grantFunc) error {
		if !called.Swap(true) {
			return hangs(ctx, g, next)
		}
		return next(ctx, g)
	}
}

// firstLost loses the request or the reply of the first call.
func firstLost(request bool) grantHook {
	first := true
	return func(ctx context.Context, g dlock.Grant, next grantFunc) error {
		lost := first
		first = false
		if lost && request {
			return errNetwork
		}
		if err := next(ctx, g); err != nil || !lost {
			return err
		}
		return errNetwork
	}
}

func newFake() *fake { return &fake{Backend: memlock.New()} }

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
	ctx context.Context, name string, hook *grantHook, g dlock.Grant, next grantFunc,
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

func (f *fake) free(t *testing.T, key string) bool {
	t.Helper()
	another := f.Client() // f may be closed
	g, err := another.TryAcquire(t.Context(), dlock.Request{Key: key, Owner: "the test", TTL: time.Hour})
	if errors.Is(err, dlock.ErrHeld) {
		return false
	}
	require.NoError(t, err)
	require.NoError(t, another.Release(t.Context(), g))
	return true
}

func value(t *testing.T, reg *prometheus.Registry, name string) float64 {
	t.Helper()
	families, err := reg.Gather()
	require.NoError(t, err)
	family, sum := strings.CutSuffix(name, "_sum")
	for _, f := range families {
		if f.GetName() != family {
			continue
		}
		m := f.GetMetric()[0]
		if sum {
			return m.GetHistogram().GetSampleSum()
		}
		if m.GetHistogram() != nil {
			return float64(m.GetHistogram().GetSampleCount())
		}
		return m.GetCounter().GetValue()
	}
	require.Fail(t, "no such metric", name)
	return 0
}

var errNetwork = errors.New("connection reset")
