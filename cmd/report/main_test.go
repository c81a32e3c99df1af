package main

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const histories = "../../reports/testdata/"

func TestExit(t *testing.T) {
	dir := t.TempDir()
	write := func(name, from string, change func(string) string) string {
		b, err := os.ReadFile(histories + from)
		require.NoError(t, err)
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, []byte(change(string(b))), 0o644))
		return path
	}
	violatedOn := write("violated-on", "pause-off.jsonl", func(s string) string {
		return strings.Replace(s, `"fencing": "off"`, `"fencing": "on"`, 1)
	})
	violatedUnknown := write("violated-unknown", "pause-off.jsonl", func(s string) string {
		_, rest, _ := strings.Cut(s, "\n") // without the run event
		return rest
	})
	cut := write("cut", "pause-on.jsonl", func(s string) string { return s[:strings.LastIndex(s[:len(s)-1], "\n")+1] })
	garbage := write("garbage", "pause-on.jsonl", func(s string) string { return s + "{\"time\": 3}\n" })
	empty := write("empty", "pause-on.jsonl", func(string) string { return "" })

	for name, c := range map[string]struct {
		args   []string
		stdout string
		err    string
		page   bool
	}{
		"safe and, unfenced, violated": {
			[]string{histories + "pause-off.jsonl", histories + "pause-on.jsonl"}, "violated     " + histories + "pause-off.jsonl", "", true,
		},
		"violated with fencing on writes": {[]string{histories + "late-writes.jsonl"}, "fencing writes", "", true},
		"violated with fencing on":        {[]string{violatedOn, histories + "pause-on.jsonl"}, "violated", "is violated", true},
		"violated, fencing unknown":       {[]string{violatedUnknown}, "an unknown run", "is violated", true},
		"inconclusive":                    {[]string{cut}, "inconclusive", "is inconclusive", true},
		"empty":                           {[]string{empty}, "inconclusive", "is inconclusive", true},
		"not a history":                   {[]string{garbage}, "", "history: line ", false},
		"no such file":                    {[]string{filepath.Join(dir, "absent")}, "", "no such file", false},
		"no file":                         {nil, "", "name one or more files", false},
		"unknown flag":                    {[]string{"-x"}, "", "report -h", false},
		"for Elle":                        {[]string{"-jepsen", histories + "pause-off.jsonl"}, `[[:r "ledger" []] [:append "ledger" "B2"]]`, "", false},
		"two for Elle":                    {[]string{"-jepsen", cut, cut}, "", "-jepsen takes exactly one history, not 2", false},
	} {
		t.Run(name, func(t *testing.T) {
			page := filepath.Join(t.TempDir(), "timeline.html")
			var stdout bytes.Buffer
			err := run(context.Background(), append([]string{"-o", page}, c.args...), &stdout)
			if c.err == "" {
				require.NoError(t, err)
			} else {
				require.ErrorContains(t, err, c.err)
			}
			require.Contains(t, stdout.String(), c.stdout)
			_, err = os.Stat(page)
			require.Equal(t, c.page, err == nil, "page written: %v", err)
		})
	}
}

func TestMatrix(t *testing.T) {
	dir := t.TempDir()
	write := func(names ...string) (lines, table string) {
		args := []string{"-matrix", filepath.Join(dir, "m.jsonl"), "-o", filepath.Join(dir, "page.html")}
		for _, name := range names {
			args = append(args, histories+name)
		}
		var stdout bytes.Buffer
		require.NoError(t, run(context.Background(), args, &stdout))
		b, err := os.ReadFile(filepath.Join(dir, "m.jsonl"))
		require.NoError(t, err)
		return string(b), stdout.String()
	}
	lines, table := write("pause-off.jsonl", "pause-on.jsonl", "late-writes.jsonl")
	require.Equal(t, 3, strings.Count(lines, "\n"))
	require.True(t, strings.HasPrefix(lines, `{"scenario":"LateWrite`), lines)
	require.Contains(t, table, "| `PauseExceedsTTL` | redis | ✕ · ✓ |")
	require.Contains(t, table, "* fencing off: 1 run, 1 violated; writes accepted under a token that was not greater: 1, accepted entries lost: 1")
	again, _ := write("late-writes.jsonl", "pause-on.jsonl", "pause-off.jsonl")
	require.Equal(t, lines, again)
	_, err := os.Stat(filepath.Join(dir, "page.html"))
	require.ErrorIs(t, err, os.ErrNotExist)
	err = run(context.Background(), []string{"-matrix", filepath.Join(dir, "absent", "m"), histories + "pause-on.jsonl"}, &bytes.Buffer{})
	require.ErrorContains(t, err, "no such file")
}

// Package site tests the contents of site and charts.
func TestSite(t *testing.T) {
	results, web := filepath.Join(t.TempDir(), "results"), filepath.Join(t.TempDir(), "web")
	require.NoError(t, os.CopyFS(results, os.DirFS("../../reports/results")))
	chart := filepath.Join("holder-killed", "blocked.svg")
	drawn, err := os.ReadFile(filepath.Join(results, chart))
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(filepath.Join(results, chart), []byte("<svg/>"), 0o644))
	var stdout bytes.Buffer
	require.NoError(t, run(context.Background(), []string{"-results", results, "-site", web}, &stdout))
	require.Contains(t, stdout.String(), ", 1 of them changed")
	again, err := os.ReadFile(filepath.Join(results, chart))
	require.NoError(t, err)
	require.Equal(t, string(drawn), string(again))
	page, err := os.ReadFile(filepath.Join(web, "holder-killed", "index.html"))
	require.NoError(t, err)
	require.Contains(t, string(page), string(drawn))

	err = run(context.Background(), []string{"-site", web, histories + "pause-on.jsonl"}, &bytes.Buffer{})
	require.ErrorContains(t, err, "takes neither histories")
	err = run(context.Background(), []string{"-site", web, "-results", filepath.Join(results, "absent")}, &bytes.Buffer{})
	require.ErrorContains(t, err, "absent: open README.md: no such file")
	require.ErrorContains(t, err, "name it with -results")
	require.NoError(t, os.WriteFile(filepath.Join(results, "contention", "data.jsonl"), []byte("{"), 0o644))
	err = run(context.Background(), []string{"-site", web, "-results", results}, &bytes.Buffer{})
	require.ErrorContains(t, err, "contention/data.jsonl: line 1")
}

func TestTerminal(t *testing.T) {
	name := filepath.Join(t.TempDir(), "h")
	event := `{"time":"2026-11-20T09:30:00Z","actor":"\u001b[31mA\u202e","kind":"report","name":"failed","error":"\u0007"}` + "\n"
	require.NoError(t, os.WriteFile(name, []byte(event), 0o644))
	var stdout bytes.Buffer
	err := run(context.Background(), []string{"-o", filepath.Join(t.TempDir(), "t.html"), name}, &stdout)
	require.ErrorContains(t, err, "inconclusive")
	require.Contains(t, stdout.String(), "failed")
	require.NotContains(t, stdout.String(), "\x1b")
	require.NotContains(t, stdout.String(), "\u202e")
}

func TestInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancelCause(context.Background())
	stop := errors.New("stop")
	cancel(stop)
	err := run(ctx, []string{"-o", filepath.Join(t.TempDir(), "t.html"), histories + "crash-on.jsonl"}, &bytes.Buffer{})
	require.ErrorIs(t, err, stop)
}
