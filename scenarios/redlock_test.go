package scenarios_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
)

func TestRedlockPartition(t *testing.T) {
	t.Parallel()
	play(t, "RedlockPartition", func(t *testing.T, f history.Fencing, o *scenarios.Outcome) {
		requireLostInTime(t, o)
		requireOverwritten(t, f, o)
	})
}

// Redlock looks at the time that the acquisition took, before it takes the lock for granted. No look helps against a
// freeze after it.
func TestRedlockPause(t *testing.T) {
	t.Parallel()
	s, ok := scenarios.Hazard("PauseAtWrite")
	require.True(t, ok)
	s.Locks = []string{"redlock"}
	playScenario(t, s, requireOverwritten)
}

func TestRedlockClockJump(t *testing.T) {
	t.Parallel()
	playAlone(t, "RedlockClockJump", requireTwoHolders)
}

// A node that forgets its vote votes twice, and the token is as forgetful as the votes.
func TestRedlockNodeRestart(t *testing.T) {
	t.Parallel()
	t.Run("Reissued", func(t *testing.T) {
		playAlone(t, "RedlockNodeRestart", func(t *testing.T, f history.Fencing, o *scenarios.Outcome) {
			require.Equal(t, tokenOf(t, o, "A"), tokenOf(t, o, "B"), "two holders have one token")
			requireTwoHolders(t, f, o)
		})
	})
	t.Run("Overtaken", func(t *testing.T) { playAlone(t, "RedlockNodeRestartOvertakes", requireBackwards) })
}

func TestRedlockTokensNotMonotonic(t *testing.T) {
	t.Parallel()
	t.Run("MaximumOfCounters", func(t *testing.T) { playAlone(t, "RedlockCountersNotMonotonic", requireBackwards) })
	t.Run("ReadThenWrite", func(t *testing.T) { playAlone(t, "RedlockTokensMonotonic", requireOverwritten) })
}

// requireTwoHolders requires that B was granted the lock while A's lease was good, and the usual outcome.
func requireTwoHolders(t *testing.T, f history.Fencing, o *scenarios.Outcome) {
	t.Helper()
	a, b := event(t, o, history.KindReport, "A", history.Acquired), event(t, o, history.KindReport, "B", history.Acquired)
	require.True(t, b.Time.Before(a.Until), "B was granted the lock at %v, within A's lease until %v", b.Time, a.Until)
	requireOverwritten(t, f, o)
}
