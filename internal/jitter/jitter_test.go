package jitter_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/jitter"
)

func TestN(t *testing.T) {
	draw := func() (all []time.Duration) {
		for range 100 {
			d := jitter.N(time.Second)
			require.GreaterOrEqual(t, d, time.Duration(0))
			require.Less(t, d, time.Second)
			all = append(all, d)
		}
		return all
	}
	require.NotEqual(t, draw(), draw())
	jitter.Seed(1)
	first := draw()
	require.NotEqual(t, first, draw())
	jitter.Seed(1)
	require.Equal(t, first, draw())
}
