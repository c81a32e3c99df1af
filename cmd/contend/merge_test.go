package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/bench"
	"github.com/fencelab/fencelab/internal/bench/load"
)

// TestMerge adds up two processes' results in a log of containers.
func TestMerge(t *testing.T) {
	var logs strings.Builder
	var sections int64
	var first load.Result
	for i := range 2 {
		var out bytes.Buffer
		require.NoError(t, run(t.Context(), []string{
			"-closed", "-contenders", "3", "-lock-addr", redisServer.URL, "-prefix", t.Name() + "/", "-warmup", "50ms", "-duration", "200ms", "-o", "-",
		}, &out))
		require.Equal(t, 1, strings.Count(out.String(), "\n"), "a line")
		var r load.Result
		require.NoError(t, json.Unmarshal(out.Bytes(), &r))
		if i == 0 {
			first = r
		}
		r.Start, r.Seconds = first.Start, first.Seconds // as if they had been at it together
		sections += r.Sections
		line, err := json.Marshal(r)
		require.NoError(t, err)
		fmt.Fprintf(&logs, "contend_%d  | metrics on http://[::]:9100/metrics\ncontend_%d  | %s\n", i, i, line)
	}
	file := filepath.Join(t.TempDir(), "logs")
	require.NoError(t, os.WriteFile(file, []byte(logs.String()), 0o600))
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), []string{"-merge", file, "-o", "-"}, &out))
	var merged load.Result
	require.NoError(t, json.Unmarshal(out.Bytes(), &merged))
	require.Equal(t, sections, merged.Sections)
	require.Equal(t, sections, merged.Wait.Count, "the distributions are added")
	require.Equal(t, 6, merged.Config.Contenders)
	require.Equal(t, 2, merged.Config.Processes)
	out.Reset()
	require.NoError(t, run(t.Context(), []string{"-merge", file}, &out))
	require.Contains(t, out.String(), "6 contenders on 6 connections in 2 processes")

	again, err := json.Marshal(merged) // with a part that it has already
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(file, append(append(again, '\n'), logs.String()...), 0o600))
	require.ErrorContains(t, run(t.Context(), []string{"-merge", file}, io.Discard), "results 1 and 2 are of the same process")
}

// TestStartAt: a process starts at the time, and not after it.
func TestStartAt(t *testing.T) {
	require.ErrorIs(t, run(t.Context(), []string{"-start-at", "2001-01-01T00:00:00Z"}, io.Discard), bench.ErrLate)
	require.ErrorContains(t, run(t.Context(), []string{"-start-at", "soon"}, io.Discard), "want a time such as")
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond) // it waits: without the start the run would be over
	defer cancel()
	require.ErrorIs(t, run(ctx, []string{
		"-closed", "-contenders", "2", "-lock-addr", redisServer.URL, "-prefix", t.Name() + "/", "-warmup", "0s", "-duration", "10ms",
		"-start-at", "2999-01-01T00:00:00Z",
	}, io.Discard), context.DeadlineExceeded)
}

func TestMergeRefuses(t *testing.T) {
	at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	lines := func(change func(second *load.Result)) string {
		c := load.Config{Backend: "redis", Contenders: 1, Connections: 1, Processes: 1, Keys: 1, Seed: 1, Duration: load.Duration(10 * time.Second)}
		first := load.Result{Config: c, Start: at, Seconds: 10, Parts: []load.Part{{ID: "a", Seed: 1}}}
		second := first
		second.Parts = []load.Part{{ID: "b", Seed: 2}}
		change(&second)
		if second.Config.Rate > 0 { // both
			first.Config.Rate = 7
		}
		var b bytes.Buffer
		require.NoError(t, json.NewEncoder(&b).Encode(first))
		require.NoError(t, json.NewEncoder(&b).Encode(second))
		return b.String()
	}
	results := func(s string) error {
		_, err := bench.Merge(strings.NewReader(s))
		return err
	}
	for _, fine := range []func(*load.Result){
		func(*load.Result) {},
		func(r *load.Result) { r.Start = at.Add(time.Second) },
		func(r *load.Result) { r.Config.Contenders, r.Config.Connections = 5, 5 },
		func(r *load.Result) { r.Config.Rate = 100 },
		func(r *load.Result) { r.Parts[0].Seed = 1 }, // there is nothing random about a hot key in the closed model
		func(r *load.Result) { r.Config.Rate, r.Parts = 7, []load.Part{{ID: "b", Seed: 2}, {ID: "c", Seed: 3}} },
	} {
		require.NoError(t, results(lines(fine)))
	}
	for want, broken := range map[string]func(*load.Result){
		"of 10.0 s they overlap for 8.0 s":                     func(r *load.Result) { r.Start = at.Add(2 * time.Second) },
		"they overlap for 0.0 s":                               func(r *load.Result) { r.Start = at.Add(-time.Minute) },
		"overlap for 3.0 s":                                    func(r *load.Result) { r.Seconds = 3 },
		"1 and 2 are not of one run":                           func(r *load.Result) { r.Config.Work = 1 },
		"the processes of results 1 and 2 both had the seed 1": func(r *load.Result) { r.Config.Rate, r.Parts[0].Seed = 7, 1 },
		"both had the seed 1,":                                 func(r *load.Result) { r.Config.Rate, r.Parts = 7, []load.Part{{ID: "b", Seed: 0}, {ID: "c", Seed: 1}} },
		"results 1 and 2 are of the same process (a)":          func(r *load.Result) { r.Parts = []load.Part{{ID: "b", Seed: 2}, {ID: "a", Seed: 1}} },
	} {
		require.ErrorContains(t, results(lines(broken)), want)
	}
	whole := lines(func(*load.Result) {})
	require.ErrorContains(t, results(whole[:len(whole)-20]), "line 2 has a result that can't be read")
	require.ErrorContains(t, results("contend: redis at redis:6379 doesn't answer\n"), "no result in 1 lines")
	require.ErrorContains(t, run(t.Context(), []string{"-merge", filepath.Join(t.TempDir(), "none")}, io.Discard), "-merge")
}
