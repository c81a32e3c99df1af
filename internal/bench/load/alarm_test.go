package load_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/bench/load"
)

// TestAlarm: never early, and cancelled with its context.
func TestAlarm(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	wait, closeAlarm, err := load.PreciseAlarm(ctx)
	require.NoError(t, err)
	for _, d := range []time.Duration{-1, 0, 1, 50 * time.Microsecond, 3 * time.Millisecond} {
		began := time.Now()
		require.NoError(t, wait(d))
		require.GreaterOrEqual(t, time.Since(began), d)
	}
	why := errors.New("enough")
	time.AfterFunc(time.Millisecond, func() { cancel(why) })
	require.ErrorIs(t, wait(time.Hour), why)
	require.ErrorIs(t, wait(time.Hour), why)
	require.NoError(t, closeAlarm())
}
