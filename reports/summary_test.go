package reports_test

import (
	"bytes"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/reports"
	"github.com/fencelab/fencelab/scenarios/history"
)

func TestSummarize(t *testing.T) {
	start := time.Date(2026, 11, 20, 9, 30, 0, 0, time.UTC)
	event := func(ms int, actor, name string, token uint64) history.Event {
		return history.Event{Time: start.Add(time.Duration(ms) * time.Millisecond), Actor: actor, Kind: history.KindReport, Name: name, Token: token}
	}
	kill := fault("kill", "A")
	kill.Time = start.Add(10 * time.Millisecond)
	server := fault("kill", "leader")
	server.Time = start.Add(20 * time.Millisecond)
	events := []history.Event{
		{Kind: history.KindRun, Run: &history.Run{Scenario: "S", Lock: "l", Server: "s", Fencing: history.FencingOn, Workers: []string{"W", "A", "B"}, TokensLost: true}},
		event(1, "W", history.Acquired, 700), event(2, "A", history.Acquired, 900), event(3, "A", history.WriteStale, 900), kill, server,
		event(50, "B", history.Acquired, 700), event(51, "B", history.ReadStale, 700),
	}
	s := reports.Summarize(events)
	require.Equal(t, []string{"W#1", "A#2", "B#1"}, s.Tokens)
	require.True(t, s.LiveRefused)
	require.Equal(t, history.Duration(40*time.Millisecond), s.Blocked)
	require.Equal(t, history.Inconclusive, s.Verdict, "it has no end")
	require.True(t, reports.Summarize(events[:4]).LiveRefused, "A was the last by then")
	require.False(t, reports.Summarize(events[:7]).LiveRefused, "B was not refused anything yet")
	require.Equal(t, history.Inconclusive, reports.Summarize(nil).Verdict)

	var b bytes.Buffer
	require.NoError(t, reports.EncodeSummaries(&b, []reports.Summary{s, reports.Summarize(nil)}))
	back, err := reports.DecodeSummaries(&b)
	require.NoError(t, err)
	require.Equal(t, []reports.Summary{s, reports.Summarize(nil)}, back)
	_, err = reports.DecodeSummaries(strings.NewReader("{}\n{\"x\":1}\n"))
	require.ErrorContains(t, err, "line 2")
}

func TestCell(t *testing.T) {
	run := func(f history.Fencing, v history.Verdict, live bool) reports.Summary {
		return reports.Summary{Fencing: f, Verdict: v, LiveRefused: live}
	}
	off, on := run(history.FencingOff, history.Violated, false), run(history.FencingOn, history.Safe, false)
	require.Equal(t, "· · ·", reports.Cell(nil))
	require.Equal(t, "✕ · ✓", reports.Cell([]reports.Summary{on, off}))
	for want, worse := range map[string]reports.Summary{
		"✕ · ✓!": run(history.FencingOn, history.Safe, true),
		"✕ · ✕":  run(history.FencingOn, history.Violated, true),
		"✕ · ?":  run(history.FencingOn, history.Inconclusive, false),
	} {
		runs := []reports.Summary{off, worse, on}
		require.Equal(t, want, reports.Cell(runs), "the worst counts")
		slices.Reverse(runs)
		require.Equal(t, want, reports.Cell(runs), "in any order")
	}
}

func TestMatrixRows(t *testing.T) {
	var runs []reports.Summary
	for _, lock := range []string{"etcd", "redis"} {
		for _, hazard := range []string{"A", "B"} {
			runs = append(runs, reports.Summary{Scenario: hazard, Lock: lock, Fencing: history.FencingOn, Verdict: history.Safe})
		}
	}
	runs[0].Verdict = history.Violated // A on etcd
	var table strings.Builder
	require.NoError(t, reports.Matrix(&table, runs, nil))
	for _, row := range []string{"| `A` | redis | · · ✓ |\n", "| `A` | etcd | · · ✕ |\n", "| `B` | all 2 | · · ✓ |\n"} {
		require.Contains(t, table.String(), row)
	}
	require.Equal(t, 5, strings.Count(table.String(), "|\n"), table.String())
}
