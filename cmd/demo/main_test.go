package main

import (
	"bufio"
	"bytes"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/open/onredis"
	"github.com/fencelab/fencelab/reports"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
)

var update = flag.Bool("update", false, "rewrite the README's transcript from the recorded histories")

func TestMain(m *testing.M) {
	if os.Getenv("DEMO_MAIN") != "" {
		main()
		return
	}
	scenarios.Child(onredis.Lock)
	os.Exit(m.Run())
}

func TestDemo(t *testing.T) {
	dir := t.TempDir()
	page := filepath.Join(dir, "demo.html")
	var out bytes.Buffer
	err := run(t.Context(), []string{"-testbed", "embedded", "-ttl", "1s", "-pause", "0", "-o", page, "-record", dir}, &out)
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

// TestInterrupted ends a demo in the middle of a run, with a worker frozen.
func TestInterrupted(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-testbed", "embedded", "-ttl", "1h", "-pause", "2h", "-o", filepath.Join(dir, "demo.html"))
	cmd.Env = append(os.Environ(), "DEMO_MAIN=1", "TMPDIR="+dir)
	stdout, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var said strings.Builder
	for lines := bufio.NewScanner(stdout); lines.Scan(); {
		said.WriteString(lines.Text() + "\n")
		if strings.HasSuffix(lines.Text(), "pause A") {
			require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		}
	}
	require.Error(t, cmd.Wait(), said.String())
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
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
		events := load(t, filepath.Join(results, "PauseExceedsTTL_redis_"+f+".jsonl"))
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
