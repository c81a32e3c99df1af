//go:build race

package scenarios_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
)

func TestRaceInAChild(t *testing.T) {
	for name, c := range map[string]struct {
		store, variant, want string
	}{
		"worker":   {own, "test-races", "step 1, run A until done: A: its process ended with exit status 66"},
		"resource": {ownRaces, "", "resource: its process ended with exit status 66"},
	} {
		t.Run(name, func(t *testing.T) {
			r := onRedis(sharedRedis(t))
			r.Store = &scenarios.Store{Name: c.store, Open: openStore}
			s := schedule(t, "run A until done")
			s.Variant = c.variant
			_, err := r.Run(t.Context(), s, history.FencingOn)
			require.ErrorContains(t, err, c.want)
			require.ErrorContains(t, err, "DATA RACE")
		})
	}
}
