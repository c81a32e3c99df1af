package reports_test

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/reports"
	"github.com/fencelab/fencelab/scenarios/history"
)

// draw is a page of one run of A and B, with events by their milliseconds.
func draw(t *testing.T, at map[int]history.Event) string {
	t.Helper()
	start := time.Date(2026, 11, 20, 9, 30, 0, 0, time.UTC)
	events := []history.Event{{Kind: history.KindRun, Run: &history.Run{Scenario: "S", Lock: "redlock", Workers: []string{"A", "B"}}}}
	for ms := range 100 {
		e, ok := at[ms]
		if !ok {
			continue
		}
		e.Time = start.Add(time.Duration(ms) * time.Millisecond)
		if e.Kind == "" {
			e.Kind = history.KindReport
		}
		events = append(events, e)
	}
	var page bytes.Buffer
	require.NoError(t, reports.Timeline(&page, reports.Run{Events: events, Result: history.Judge(events)}))
	return page.String()
}

// Every fault has words; a fault of a server is in the lock's lane and has no lane.
func TestFaultsOfServers(t *testing.T) {
	for _, known := range history.Faults {
		name := known.Name
		f := fault(name, "node7")
		f.Detail = "20s"
		page := draw(t, map[int]history.Event{
			1: {Actor: "A", Name: history.Acquired, Token: 1, TTL: history.Duration(time.Second)},
			9: f,
		})
		require.Contains(t, page, "node7")
		require.NotContains(t, page, "injected", name)
		require.NotContains(t, page, ">node7</text>", "%s: a lane", name)
		require.Contains(t, page, "m fault", name)
	}
	require.Contains(t, draw(t, map[int]history.Event{1: fault("flood", "node7")}), "injected flood at node7")
}

func TestCutOff(t *testing.T) {
	cut := fault("cut", "A")
	cut.Peers = []string{"redis1", "redis2"}
	page := draw(t, map[int]history.Event{
		1:  {Actor: "A", Name: history.Acquired, Token: 1, TTL: history.Duration(20 * time.Millisecond)},
		10: cut,
		30: {Actor: "A", Name: history.Lost, Token: 1},
		90: fault("mend", "A"),
	})
	for _, words := range []string{
		"cut off from redis1, redis2", "what is sent either way is lost", "was told that its lease ended", "cut off 80 ms", "reconnected",
		"A is cut off from the lock from 9 ms to 89 ms.",
	} {
		require.Contains(t, page, words)
	}
	require.NotContains(t, page, "believes it holds", "it knows better from 30 ms on")
}

// Two holders at once, of one token: the first lease ends where the lock service gave it away and not at its release,
// and each write is its sender's.
func TestTwoHolders(t *testing.T) {
	at := map[int]history.Event{
		1:  {Actor: "A", Name: history.Acquired, Token: 1, TTL: history.Duration(time.Minute)},
		30: {Actor: "B", Name: history.Acquired, Token: 1, TTL: history.Duration(time.Minute)},
		40: {Actor: "resource", Kind: history.KindDecision, Op: "write", Key: "k", Token: 1, Seq: 1, Accepted: true, Value: "B\n"},
		45: {Actor: "B", Name: history.Released, Token: 1},
		60: {Actor: "resource", Kind: history.KindDecision, Op: "write", Key: "k", Token: 1, Seq: 1, Accepted: true, Value: "A\n"},
		70: {Actor: "A", Name: history.Released, Token: 1},
	}
	page := draw(t, at)
	for _, words := range []string{
		"A is granted token 1 at 0 s; ended early at 29 ms.", "B’s write with token 1 arrives at 39 ms",
		"A’s write with token 1 arrives at 59 ms",
	} {
		require.Contains(t, page, words)
	}
	// A hand-over, where A's release crosses B's grant.
	handover := map[int]history.Event{1: at[1], 30: at[30], 31: at[70], 40: at[40], 45: at[45]}
	require.Contains(t, draw(t, handover), "A is granted token 1 at 0 s; released at 29 ms.")
	require.NotContains(t, strings.ToLower(draw(t, handover)), "ended early")
}
