package main

import (
	"bytes"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/reports"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
)

var update = flag.Bool("update", false, "rewrite the README's transcript from the recorded histories")

func TestMain(m *testing.M) {
	scenarios.Child(scenarios.OpenRedis)
	os.Exit(m.Run())
}

func TestDemo(t *testing.T) {
	dir := t.TempDir()
	page := filepath.Join(dir, "demo.html")
	var out bytes.Buffer
	err := run(t.Context(), []string{"-testbed", "embedded", "-ttl", "100ms", "-pause", "0", "-o", page, "-record", dir}, &out)
	require.NoError(t, err, out.String())
	require.Regexp(t, `verdict: VIOLATED +≠ +verdict: SAFE`, out.String())
	require.Contains(t, out.String(), "entry B was accepted and is lost")
	require.Contains(t, out.String(), "The lock: miniredis (embedded).")
	html, err := os.ReadFile(page)
	require.NoError(t, err)
	require.Contains(t, string(html), "PauseExceedsTTL")
	events := load(t, filepath.Join(dir, "PauseExceedsTTL_on.jsonl"))
	require.Equal(t, history.Safe, history.Judge(events).Verdict)
}

func TestUnknownHazard(t *testing.T) {
	err := run(t.Context(), []string{"-scenario", "Flood"}, &bytes.Buffer{})
	require.ErrorContains(t, err, "PauseExceedsTTL, PauseAtWrite")
}

// TestReadme keeps the README's transcript what the recorded run says.
func TestReadme(t *testing.T) {
	const results, readme = "../../reports/results/pause-exceeds-ttl", "../../README.md"
	var runs []reports.Run
	for _, f := range []string{"off", "on"} {
		events := load(t, filepath.Join(results, "PauseExceedsTTL_"+f+".jsonl"))
		runs = append(runs, reports.Run{Events: events, Result: history.Judge(events)})
	}
	text, err := os.ReadFile(readme)
	require.NoError(t, err)
	before, rest, ok := strings.Cut(string(text), "<!-- transcript: cmd/demo -->\n")
	require.True(t, ok)
	old, after, ok := strings.Cut(rest, "<!-- end transcript -->")
	require.True(t, ok)
	want := "```text\n" + sideBySide(runs[0], runs[1]) + "```\n"
	if *update {
		require.NoError(t, os.WriteFile(readme, []byte(before+"<!-- transcript: cmd/demo -->\n"+want+"<!-- end transcript -->"+after), 0o644))
		return
	}
	require.Equal(t, want, old, "run go test ./cmd/demo -run TestReadme -update")
}

func load(t *testing.T, path string) []history.Event {
	t.Helper()
	f, err := os.Open(path)
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	events, err := history.Decode(f)
	require.NoError(t, err)
	return events
}
