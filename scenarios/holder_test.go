package scenarios_test

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
)

func TestHolderKilled(t *testing.T) {
	t.Parallel()
	play(t, "HolderKilled", func(t *testing.T, _ history.Fencing, o *scenarios.Outcome) {
		killed, got := event(t, o, history.KindFault, "controller", history.FaultKill), event(t, o, history.KindReport, "B", history.Acquired)
		t.Logf("blocked for %v after the holder's death, with a lease of %v", got.Time.Sub(killed.Time), *ttl)
		lease := event(t, o, history.KindReport, "A", history.Acquired)
		require.False(t, got.Time.Before(lease.Until), "B was granted the lock at %v, and A's lease was to last until %v", got.Time, lease.Until)
		requireRefused(t, o, 0, "B")
	})
}

func TestWorkExceedsTTL(t *testing.T) {
	t.Parallel()
	play(t, "WorkExceedsTTL", func(t *testing.T, f history.Fencing, o *scenarios.Outcome) {
		requireLostInTime(t, o)
		requireOverwritten(t, f, o)
	})
}

// Renewals narrow the window in which a holder can be late, and never close it: a freeze stops them too, and a holder that
// hangs renews until somebody stops it.
func TestRenewNarrowsNeverCloses(t *testing.T) {
	t.Parallel()
	t.Run("Frozen", func(t *testing.T) { play(t, "PauseExceedsTTL", requireOverwritten) })
	t.Run("Wedged", func(t *testing.T) { play(t, "WedgedHolder", requireOverwritten) })
}

func TestHolderPartitioned(t *testing.T) {
	t.Parallel()
	play(t, "HolderPartitioned", func(t *testing.T, f history.Fencing, o *scenarios.Outcome) {
		requireLostInTime(t, o)
		requireOverwritten(t, f, o)
	})
}

// One token fences each resource by itself, and not both together.
func TestTwoResources(t *testing.T) {
	t.Parallel()
	t.Run("BothTouched", func(t *testing.T) {
		play(t, "TwoResources", func(t *testing.T, f history.Fencing, o *scenarios.Outcome) {
			first, second := ledgers(o)
			require.Equal(t, []string{"A", "B"}, first)
			if f == history.FencingOff {
				require.Equal(t, []string{"A"}, second, "B's entry is lost")
				return
			}
			require.Equal(t, []string{"B"}, second, "A's work is half done: whoever comes next has to see that, and finish it or take it back")
		})
	})
	t.Run("OneUntouched", func(t *testing.T) {
		play(t, "SecondResourceUntouched", func(t *testing.T, _ history.Fencing, o *scenarios.Outcome) {
			first, second := ledgers(o)
			require.Equal(t, []string{"A", "B"}, first)
			require.Equal(t, []string{"A"}, second, "the second resource knows nothing of B, and takes A's late write")
			require.Zero(t, o.Refused)
		})
	})
}

// ledgers are the final entries of the two resources.
func ledgers(o *scenarios.Outcome) (first, second []string) {
	var all [][]string
	for _, e := range o.Events {
		if e.Kind == history.KindFinal {
			all = append(all, history.Entries(e.Value))
		}
	}
	if len(all) != 2 {
		return nil, nil
	}
	return all[0], all[1]
}

// requireOverwritten requires the usual outcome: A writes over B's entry unless it is refused.
func requireOverwritten(t *testing.T, f history.Fencing, o *scenarios.Outcome) {
	t.Helper()
	if f == history.FencingOff {
		require.Equal(t, []string{"B", "A"}, o.Writers, "two accepted writers")
		require.Equal(t, []string{"B"}, o.Lost, "the successor's entry is lost")
		require.Zero(t, final(t, o).Stale)
		return
	}
	requireRefused(t, o, 1, "B")
}

// requireLostInTime requires that A counted on its lease for no longer than its TTL after the last moment at which it can
// have been renewed, and not when B was granted the lock. That its context has ended by then is what its report says.
func requireLostInTime(t *testing.T, o *scenarios.Outcome) {
	t.Helper()
	began := event(t, o, history.KindReport, "A", history.Acquired)
	last := began.Time
	for _, e := range o.Events {
		if e.Kind == history.KindFault && e.Name == history.FaultCut {
			last = e.Time
		}
	}
	lost, got := event(t, o, history.KindReport, "A", history.Lost), event(t, o, history.KindReport, "B", history.Acquired)
	require.False(t, lost.Until.After(last.Add(time.Duration(began.TTL))), "A's lease was to last until %v, and began before %v", lost.Until, last)
	require.False(t, lost.Until.After(got.Time), "A's lease was to last until %v, and B was granted the lock at %v", lost.Until, got.Time)
}

// event is the first event of that kind, actor and name.
func event(t *testing.T, o *scenarios.Outcome, kind history.Kind, actor, name string) history.Event {
	t.Helper()
	for _, e := range o.Events {
		if e.Kind == kind && e.Actor == actor && e.Name == name {
			return e
		}
	}
	require.FailNow(t, "no such event", "%s %s %s", kind, actor, name)
	return history.Event{}
}
