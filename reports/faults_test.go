package reports_test

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/reports"
	"github.com/fencelab/fencelab/scenarios/history"
)

func draw(t *testing.T, events ...history.Event) string {
	t.Helper()
	return render(t, reports.Run{Events: build(events...)})
}

// Every fault has words; a fault of a server is in the lock's lane and has no lane.
func TestFaultsOfServers(t *testing.T) {
	for _, known := range history.Faults {
		name := known.Name
		f := fault(name, "node7")
		f.Detail = "20s"
		page := draw(t, acquired("A", 1, time.Second), f)
		require.Contains(t, page, "node7")
		require.NotContains(t, page, "injected", name)
		require.NotContains(t, page, ">node7</text>", "%s: a lane", name)
		require.Contains(t, page, "m fault", name)
	}
	require.Contains(t, draw(t, fault("flood", "node7")), "injected flood at node7")
}

func TestCutOff(t *testing.T) {
	cut := fault("cut", "A")
	cut.Peers = []string{"redis1", "redis2"}
	page := draw(t, acquired("A", 1, 20*time.Millisecond), at(9, cut), at(29, report("A", history.Lost)), at(89, fault("mend", "A")))
	for _, words := range []string{
		"cut off from redis1, redis2", "what is sent either way is lost", "was told that its lease ended", "cut off 80 ms", "reconnected",
		"A is cut off from the lock from 9 ms to 89 ms.",
	} {
		require.Contains(t, page, words)
	}
	require.NotContains(t, page, "believes it holds", "it knows better from 29 ms on")
}

// Two holders have the same token: the first lease ends when the second is granted, not at its release, and each write is its
// sender's.
func TestTwoHolders(t *testing.T) {
	write := func(by string) history.Event {
		e := decision("write", 1, 1, false)
		e.Value = by + "\n"
		return e
	}
	a, b := acquired("A", 1, time.Minute), at(29, acquired("B", 1, time.Minute))
	page := draw(t, a, b, at(39, write("B")), at(44, report("B", history.Released)), at(59, write("A")), at(69, report("A", history.Released)))
	for _, words := range []string{
		"A is granted token 1 at 0 s; ended early at 29 ms.", "B’s write with token 1 arrives at 39 ms",
		"A’s write with token 1 arrives at 59 ms",
	} {
		require.Contains(t, page, words)
	}
	// A hand-over, where A's release crosses B's grant.
	page = draw(t, a, b, at(30, report("A", history.Released)), at(39, write("B")), at(44, report("B", history.Released)))
	require.Contains(t, page, "A is granted token 1 at 0 s; released at 29 ms.")
	require.NotContains(t, strings.ToLower(page), "ended early")
}
