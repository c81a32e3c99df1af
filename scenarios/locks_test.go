package scenarios_test

import (
	"context"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/open"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

const (
	patience     = 30 * time.Second
	pollInterval = 5 * time.Millisecond // between polls
)

func newKey(t *testing.T) string {
	t.Helper()
	return t.Name() + "/" + uuid.NewString()
}

func within(t *testing.T, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), d)
	t.Cleanup(cancel)
	return ctx
}

// A lock service that is down grants nothing, and its leases end by themselves.
func TestCoordinatorDown(t *testing.T) {
	notExternal(t)
	for _, lock := range locksOf(scenarios.Scenario{}) {
		t.Run(lock, func(t *testing.T) {
			t.Parallel()
			all, ctx := servers(t, lock, scenarios.Scenario{}), within(t, patience)
			svc := all.On()
			spec := scenarios.LockSpec{Lock: lock, TTL: 2 * time.Second, MinSession: svc.MinSession}
			for _, n := range svc.Nodes {
				spec.Addrs = append(spec.Addrs, n.Addr)
			}
			l, err := open.Lock(ctx, spec)
			require.NoError(t, err)
			defer func() { require.NoError(t, l.Close()) }()
			h, err := l.Acquire(ctx, newKey(t))
			require.NoError(t, err)
			for _, s := range all.Servers {
				testbed.Need(t, s.Kill(ctx))
			}
			_, err = l.TryAcquire(within(t, time.Second), newKey(t))
			require.Error(t, err, "TryAcquire of a free key, of a service that is down")
			require.NotErrorIs(t, err, dlock.ErrHeld)
			_, err = l.Acquire(within(t, time.Second), newKey(t))
			require.Error(t, err, "Acquire, of a service that is down")
			select {
			case <-h.Context().Done(): // by the holder's own clock
			case <-ctx.Done():
				t.Fatal("the holder's context goes on without the service")
			}
			require.ErrorIs(t, context.Cause(h.Context()), dlock.ErrLost)
			require.Error(t, h.Release(within(t, time.Second)), "Release, of a service that is down")
		})
	}
}
