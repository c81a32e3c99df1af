package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/load"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// redis is a Redis for all tests.
var redis *testbed.Server

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) != "" || os.Getenv("CONTEND_MAIN") != "" {
		main()
		return
	}
	os.Exit(test(m))
}

func test(m *testing.M) (code int) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	var err error
	if redis, err = testbed.StartRedis(ctx, nil); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() {
		if err := redis.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}()
	return m.Run()
}

// measured runs contend on the server and returns what it says and the result.
func measured(t *testing.T, args ...string) (string, *load.Result) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "result.json")
	var out bytes.Buffer
	err := run(t.Context(), append(args, "-lock-addr", redis.URL, "-prefix", t.Name()+"/", "-warmup", "100ms", "-duration", "300ms", "-o", file), &out)
	require.NoError(t, err, out.String())
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	res := &load.Result{}
	require.NoError(t, json.Unmarshal(b, res))
	return out.String(), res
}

func TestClosed(t *testing.T) {
	out, res := measured(t, "-closed", "-contenders", "10", "-work", "1ms")
	require.Contains(t, out, "redis (server unknown): closed model, 10 contenders on 10 connections in 1 processes, a hot key, work 1ms, TTL 10s\n")
	require.Contains(t, out, "  checks     0 overlaps, 0 token regressions, 0 grants after a lease's end\n")
	require.Equal(t, "redis", res.Config.Backend)
	require.Empty(t, res.Machine.Library)
	require.Equal(t, res.Sections, res.Wait.Count)
}

func TestOpen(t *testing.T) {
	out, res := measured(t, "-rate", "200", "-keys", "1000", "-backend", "redislock", "-contenders", "20", "-connections", "2")
	require.Contains(t, out, "redislock (server unknown): 200 arrivals/s, 20 contenders on 2 connections in 1 processes, 1000 keys,")
	require.Contains(t, out, "  pacer late")
	require.Regexp(t, `^github.com/bsm/redislock`, res.Machine.Library)
}

// TestProcesses spreads the contenders over processes, which contend with each other and are gone afterwards.
func TestProcesses(t *testing.T) {
	out, res := measured(t, "-closed", "-contenders", "10", "-processes", "3")
	require.Contains(t, out, "10 contenders on 10 connections in 3 processes")
	require.Len(t, res.Share.Counts, 10)
	require.Equal(t, 3, res.Config.Processes)
	require.Equal(t, res.BacklogStart+res.Arrivals, res.Sections+res.Failed+res.Unserved.Count)
	requireNoChildren(t)
}

// TestProcessFails: a process that fails ends the run, and the others with it.
func TestProcessFails(t *testing.T) {
	c := load.Config{
		Backend: "redlock", Contenders: 4, Connections: 4, Processes: 2, Keys: 1, TTL: load.Duration(time.Second), Duration: load.Duration(time.Hour),
	}
	_, err := spread(t.Context(), job{Config: c, Addrs: []string{redis.URL, redis.URL}}, nil) // a majority of one server
	require.ErrorContains(t, err, "contend: a process of the run failed: exit status 1: load: client 1 of 2: locks: redlock: the addresses")
	requireNoChildren(t)

	ctx, cancel := context.WithCancelCause(t.Context()) // before they are ready
	cancel(io.ErrUnexpectedEOF)
	_, err = spread(ctx, job{Config: c, Addrs: []string{redis.URL}}, nil)
	require.Error(t, err)
	requireNoChildren(t)
}

// requireNoChildren looks for child processes, besides the server.
func requireNoChildren(t *testing.T) {
	t.Helper()
	tasks, err := filepath.Glob("/proc/self/task/*/children")
	require.NoError(t, err)
	for _, f := range tasks {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // the thread has gone
		}
		for pid := range strings.FieldsSeq(string(b)) {
			env, _ := os.ReadFile("/proc/" + pid + "/environ")
			require.NotContains(t, string(env), childEnv+"=1", "process %s is still there", pid)
		}
	}
}

// TestInterrupted asks a run in another process for its metrics and interrupts it.
func TestInterrupted(t *testing.T) {
	for _, processes := range []string{"1", "2"} {
		file := filepath.Join(t.TempDir(), "result.json")
		args := []string{
			"-lock-addr", redis.URL, "-closed", "-contenders", "4", "-warmup", "0s", "-duration", "1h", "-o", file, "-prefix", t.Name() + "/",
			"-processes", processes,
		}
		if processes == "1" {
			args = append(args, "-metrics", "127.0.0.1:0")
		}
		cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
		cmd.Env = append(os.Environ(), "CONTEND_MAIN=1")
		stderr, err := cmd.StderrPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		said := bufio.NewScanner(stderr)
		address := regexp.MustCompile(`http://\S+`)
		var url string
		for said.Scan() {
			if u := address.FindString(said.Text()); u != "" {
				url = u
			}
			if strings.Contains(said.Text(), "sections/s") { // a second of the window is over
				break
			}
		}
		if processes == "1" {
			text := get(t, url)
			require.Contains(t, text, "contend_sections_total")
			require.Contains(t, text, "dlock_acquire_successes_total")
		}
		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		for said.Scan() { // to the end, so that nobody waits for a reader
		}
		require.NoError(t, cmd.Wait())
		b, err := os.ReadFile(file)
		require.NoError(t, err)
		var res load.Result
		require.NoError(t, json.Unmarshal(b, &res))
		require.True(t, res.Cut)
		require.Positive(t, res.Sections)
		require.Less(t, res.Seconds, 3600.0)
	}
}

func get(t *testing.T, url string) string {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
	require.NoError(t, err)
	resp, err := http.DefaultClient.Do(req)
	require.NoError(t, err)
	b, err := io.ReadAll(resp.Body)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return string(b)
}

func TestExperiment(t *testing.T) {
	dir := t.TempDir()
	config := `{
		"defaults": {"ttl": "10s", "duration": "100ms", "warmup": "50ms", "seed": 1},
		"sweeps": [
			{"name": "a", "backends": ["redis", "redislock"], "contenders": [2, 4], "work": ["0s", "1ms"]},
			{"name": "b", "backends": ["redis-spin"], "contenders": [4], "connections": {"redis-spin": 2}, "rates": [100], "keys": 10}
		]}`
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600))
	t.Setenv(testbed.EnvRedisAddr, redis.URL)
	require.NoError(t, run(t.Context(), []string{"-experiment", dir, "-testbed", "external"}, io.Discard))
	b, err := os.ReadFile(filepath.Join(dir, "data.jsonl"))
	require.NoError(t, err)
	var got []string
	for line := range bytes.Lines(b) {
		var r load.Result
		require.NoError(t, json.Unmarshal(line, &r))
		got = append(got, fmt.Sprintf("%s %s %d/%d %v %v %d", r.Config.Name, r.Config.Backend, r.Config.Contenders, r.Config.Connections, r.Config.Work, r.Config.Rate, r.Config.Keys))
		require.Contains(t, r.Machine.Server, "(external)")
		require.Positive(t, r.Seconds)
	}
	require.Equal(t, []string{
		"a redis 2/2 0s 0 1", "a redislock 2/2 0s 0 1", "a redis 4/4 0s 0 1", "a redislock 4/4 0s 0 1",
		"a redis 2/2 1ms 0 1", "a redislock 2/2 1ms 0 1", "a redis 4/4 1ms 0 1", "a redislock 4/4 1ms 0 1",
		"b redis-spin 4/2 0s 100 10",
	}, got)
}

// TestCommitted: the experiments of this repository can be read, and their data are of their configuration.
func TestCommitted(t *testing.T) {
	for _, name := range []string{"contention", "fairness"} {
		dir := filepath.Join("../../reports/results", name)
		_, configs, err := readExperiment(dir)
		require.NoError(t, err)
		b, err := os.ReadFile(filepath.Join(dir, "data.jsonl"))
		require.NoError(t, err)
		var recorded []load.Config
		for line := range bytes.Lines(b) {
			var r load.Result
			require.NoError(t, json.Unmarshal(line, &r))
			require.Zero(t, r.Checks)
			recorded = append(recorded, r.Config)
		}
		require.Equal(t, configs, recorded, "record it again: contend -experiment reports/results/%s", name)
	}
}

func TestRefuses(t *testing.T) {
	for want, args := range map[string][]string{
		"-rate 0; it must be positive, or ask for the closed model with -closed": {"-rate", "0"},
		"-processes 0; there must be one at least":                               {"-processes", "0"},
		"-processes 3; there must be one at least, and a connection (of 2)":      {"-processes", "3", "-connections", "2"},
		"-metrics is of one process":                                             {"-processes", "2", "-metrics", "127.0.0.1:0"},
		"-arrivals even is for one process":                                      {"-processes", "2", "-arrivals", "even"},
		"a zipf exponent of 0.5":                                                 {"-zipf", "0.5", "-keys", "10"},
		"want redis or redis-spin or redlock":                                    {"-backend", "memcached"},
		"-experiment wants a directory with a config.json":                       {"-experiment", t.TempDir()},
		"redis at 127.0.0.1:1 doesn't answer":                                    {"-lock-addr", "127.0.0.1:1"},
	} {
		err := run(t.Context(), args, io.Discard)
		require.ErrorContains(t, err, want)
	}
	for want, config := range map[string]string{
		`unknown field "sweep"`:        `{"sweep": []}`,
		"no runs":                      `{"sweeps": []}`,
		`there is no lock "memcached"`: `{"sweeps": [{"backends": ["memcached"]}]}`,
		"want a duration such as 50ms": `{"sweeps": [{"work": ["50"]}]}`,
		"sweep 1: load: 0 contenders":  `{"sweeps": [{"backends": ["redis"], "contenders": [0]}]}`,
	} {
		dir := t.TempDir()
		require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600))
		_, _, err := readExperiment(dir)
		require.ErrorContains(t, err, want)
	}
}

// TestBroken: a lock that doesn't exclude, or whose tokens don't grow, makes contend fail.
func TestBroken(t *testing.T) {
	require.NoError(t, broken(&load.Result{}))
	require.ErrorContains(t, broken(&load.Result{Checks: load.Checks{Overlaps: 2}}), "2 times")
	require.ErrorContains(t, broken(&load.Result{Checks: load.Checks{TokenRegressions: 3}}), "3 tokens")
	require.NoError(t, broken(&load.Result{Checks: load.Checks{Late: 1}}), "that is what fencing is for")
	require.ErrorContains(t, idle(&load.Result{Failed: 2, Errors: map[string]load.Errors{"acquire: other": {Count: 2, Example: "no"}}}), "no")
	require.NoError(t, idle(&load.Result{}))
}
