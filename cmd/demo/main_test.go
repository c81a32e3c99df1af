package main

import (
	"bufio"
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/open/onredis"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
)

func TestMain(m *testing.M) {
	if os.Getenv("DEMO_MAIN") != "" {
		main()
		return
	}
	scenarios.ChildWithStore(onredis.Lock, onredis.Store)
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
	recorded, err := os.ReadFile(filepath.Join(dir, "PauseExceedsTTL_on.jsonl"))
	require.NoError(t, err)
	events, err := history.Decode(bytes.NewReader(recorded))
	require.NoError(t, err)
	require.Equal(t, history.Safe, history.Judge(events).Verdict)
}

func TestInterrupted(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-testbed", "embedded", "-ttl", "1h", "-pause", "2h", "-o", filepath.Join(dir, "demo.html"))
	cmd.Env = append(os.Environ(), "DEMO_MAIN=1", "TMPDIR="+dir)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
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
	require.EqualError(t, cmd.Wait(), "exit status 1", said.String())
	require.Regexp(t, "interrupted|terminated signal received", stderr.String()) // by the runner, or by the command
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
}

func TestUnknownHazard(t *testing.T) {
	err := run(t.Context(), []string{"-scenario", "Flood"}, &bytes.Buffer{})
	require.ErrorContains(t, err, "PauseAtWrite, PauseExceedsTTL")
}

func TestPageIsADirectory(t *testing.T) {
	err := run(t.Context(), []string{"-o", t.TempDir()}, &bytes.Buffer{})
	require.ErrorContains(t, err, "is a directory; choose another file with -o")
}
