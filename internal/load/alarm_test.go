package load_test

import (
	"context"
	"errors"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/load"
)

// TestAlarm: it is never early, and the end of its context ends it.
func TestAlarm(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	wait, closeAlarm, err := load.PreciseAlarm(ctx)
	require.NoError(t, err)
	for _, d := range []time.Duration{-1, 0, 1, 50 * time.Microsecond, 3 * time.Millisecond} {
		began := time.Now()
		require.NoError(t, wait(ctx, d))
		require.GreaterOrEqual(t, time.Since(began), d)
	}
	why := errors.New("enough")
	time.AfterFunc(time.Millisecond, func() { cancel(why) })
	require.ErrorIs(t, wait(ctx, time.Hour), why)
	require.ErrorIs(t, wait(ctx, time.Hour), why)
	require.NoError(t, closeAlarm())
}

// TestAlarms: there are as many as wait at a time, and no more.
func TestAlarms(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var a load.Alarms
	for range 10 {
		began := time.Now()
		require.NoError(t, a.Wait(ctx, 10*time.Microsecond))
		require.GreaterOrEqual(t, time.Since(began), 10*time.Microsecond)
	}
	all, idle := a.Count()
	require.Equal(t, []int{1, 1}, []int{all, idle})
	var waiting sync.WaitGroup
	for range 3 {
		waiting.Go(func() { assert.ErrorIs(t, a.Wait(ctx, time.Hour), context.Canceled) })
	}
	for all < 3 || idle > 0 {
		runtime.Gosched()
		all, idle = a.Count()
	}
	cancel()
	waiting.Wait()
	all, idle = a.Count()
	require.Equal(t, []int{3, 3}, []int{all, idle})
	require.NoError(t, a.Close())
}
