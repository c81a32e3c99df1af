package load

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestAlarm(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	bell, err := preciseAlarm(ctx)
	require.NoError(t, err)
	for _, d := range []time.Duration{-1, 0, 1, 50 * time.Microsecond, 3 * time.Millisecond} {
		began := time.Now()
		require.NoError(t, bell.wait(d))
		require.GreaterOrEqual(t, time.Since(began), d)
	}
	why := errors.New("enough")
	time.AfterFunc(time.Millisecond, func() { cancel(why) })
	require.ErrorIs(t, bell.wait(time.Hour), why)
	require.ErrorIs(t, bell.wait(time.Hour), why)
	require.NoError(t, bell.close())
}
