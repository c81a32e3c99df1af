package scenarios_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/locks"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
)

// A Redis that loses the counter hands out tokens that go backwards. A resource that looks at writes alone then lets the
// stale holder write over its successor. One that the holder has shown its token to refuses the successor: no data is lost,
// and nobody can write until the counter has caught up.
func TestFenceCounterLost(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"FenceCounterFlushed", "FenceCounterWiped", "FenceCounterEvicted"} {
		t.Run(name, func(t *testing.T) { playAlone(t, name, requireBackwards) })
	}
}

func TestFailoverLosesToken(t *testing.T) {
	t.Parallel()
	t.Run("Reissued", func(t *testing.T) {
		playAlone(t, "FailoverReissuesToken", func(t *testing.T, f history.Fencing, o *scenarios.Outcome) {
			a, b := tokenOf(t, o, "A"), tokenOf(t, o, "B")
			require.Equal(t, a, b, "two holders have one token")
			if f == history.FencingOff {
				require.Equal(t, []string{"B"}, o.Lost)
				return
			}
			// The strict rule lets the first of the two write. One that let equal tokens pass would have lost B's entry.
			requireRefused(t, o, 1, "B")
		})
	})
	t.Run("Overtaken", func(t *testing.T) { playAlone(t, "FailoverOvertakesToken", requireBackwards) })
}

// A replica that has taken over follows nobody, in a later run on the same service neither.
func TestFailoverIsForGood(t *testing.T) {
	s, ok := scenarios.Hazard("FailoverReissuesToken")
	require.True(t, ok)
	if !slices.Contains(locksOf(s), locks.Redis) {
		t.Skip("-backend asks for other locks")
	}
	svc, ctx := servers(t, locks.Redis, s).On(), within(t, patience)
	lag := scenarios.Fault("redis", history.FaultLag)
	require.NoError(t, svc.Fault(ctx, lag))
	require.NoError(t, svc.Fault(ctx, scenarios.Fault("redis", history.FaultFailover)))
	require.ErrorContains(t, svc.Fault(ctx, lag), "it has no replica")
}

// requireBackwards requires what a resource makes of a successor whose token is smaller than the stale holder's.
func requireBackwards(t *testing.T, f history.Fencing, o *scenarios.Outcome) {
	t.Helper()
	require.Less(t, tokenOf(t, o, "B"), tokenOf(t, o, "A"), "the later grant has the smaller token")
	require.Contains(t, strings.Join(o.Notes, "\n"), "tokens went backwards")
	if f != history.FencingOn {
		require.Equal(t, []string{"B", "A"}, o.Writers, "the stale holder's write is accepted, even by the strict rule")
		require.Equal(t, []string{"B"}, o.Lost)
		require.Zero(t, o.Refused)
		return
	}
	require.Contains(t, strings.Join(o.Notes, "\n"), "the last to be granted the lock was refused a read")
	require.True(t, reported(o, "B", history.ReadStale), "the live holder is refused")
	requireRefused(t, o, 1, "A")
}

func tokenOf(t *testing.T, o *scenarios.Outcome, worker string) uint64 {
	t.Helper()
	return event(t, o, history.KindReport, worker, history.Acquired).Token
}
