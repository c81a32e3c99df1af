package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/bench"
	"github.com/fencelab/fencelab/internal/bench/competitors"
	"github.com/fencelab/fencelab/internal/bench/load"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

var redisServer *testbed.Server

// stuckEnv makes clients of this process and its children fail to close.
const stuckEnv = "CONTEND_STUCK"

type stuck struct{ load.Lock }

func (s stuck) Close() error { return errors.Join(s.Lock.Close(), errors.New("stuck")) }

func TestMain(m *testing.M) {
	bench.Open = func(ctx context.Context, s competitors.Spec) (load.Lock, error) {
		l, err := competitors.Open(ctx, s)
		if err == nil && os.Getenv(stuckEnv) != "" {
			l = stuck{l}
		}
		return l, err
	}
	if os.Getenv(bench.ChildEnv) != "" || os.Getenv("CONTEND_MAIN") != "" {
		main()
		return
	}
	testmain.Run(m, testmain.Redis(&redisServer))
}

// measured repeats a short run until it has a critical section and a release: there may be none while the machine is
// stalled.
func measured(t *testing.T, args ...string) (string, *load.Result) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "result.json")
	for d := 50 * time.Millisecond; ; d *= 2 {
		var out bytes.Buffer
		err := run(t.Context(), append(args, "-lock-addr", redisServer.URL, "-prefix", t.Name()+uuid.NewString()+"/", "-warmup", "10ms",
			"-duration", d.String(), "-o", file), &out)
		require.NoError(t, err, out.String())
		res := &results(t, file)[0]
		if res.Sections > 0 && res.Release.Count > 0 { // one that ends after the window is not counted
			return out.String(), res
		}
		require.Less(t, d, 10*time.Second, "no section or no release")
	}
}

// results are those in a file.
func results(t *testing.T, file string) (all []load.Result) {
	t.Helper()
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	for dec := json.NewDecoder(bytes.NewReader(b)); dec.More(); {
		var r load.Result
		require.NoError(t, dec.Decode(&r))
		all = append(all, r)
	}
	return all
}

// experiment returns a directory with a config.json.
func experiment(t *testing.T, config string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600))
	return dir
}

// record runs the experiment in dir on redisServer.
func record(t *testing.T, dir string, args ...string) error {
	t.Helper()
	testbed.Need(t, redisServer.Real())
	t.Setenv(testbed.EnvRedisAddr, redisServer.URL)
	return run(t.Context(), append(args, "-experiment", dir, "-testbed", "external"), io.Discard)
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
	require.Regexp(t, `^github.com/bsm/redislock`, res.Machine.Library)
	require.Equal(t, res.BacklogStart+res.Arrivals, res.Sections+res.Failed+res.Unserved.Count)
}

// TestPing: it is no lock and isn't checked as one.
func TestPing(t *testing.T) {
	out, res := measured(t, "-closed", "-backend", "ping", "-contenders", "4", "-work", "1ms")
	require.Contains(t, out, "ping (server unknown): closed model")
	require.NotContains(t, out, "checks")
	require.NotContains(t, out, "order")
	require.Zero(t, res.Checks)
	require.Zero(t, res.Failed)
	l, err := competitors.Open(t.Context(), competitors.Spec{Lock: competitors.Ping, Addrs: []string{redisServer.URL}})
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	for range 2 {
		_, err := l.Acquire(t.Context(), "k")
		require.NoError(t, err, "it keeps nobody out")
	}
}

// TestBaton: one holder at a time.
func TestBaton(t *testing.T) {
	_, res := measured(t, "-closed", "-backend", "baton", "-contenders", "4", "-prefix", t.Name()+"/")
	require.Zero(t, res.Failed)
	require.Zero(t, res.Checks)

	open := func() load.Lock {
		l, err := competitors.Open(t.Context(), competitors.Spec{Lock: competitors.Baton, Addrs: []string{redisServer.URL}})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, l.Close()) })
		return l
	}
	a, b := open(), open()
	key, other := t.Name()+uuid.NewString(), t.Name()+uuid.NewString()
	_, err := a.Acquire(t.Context(), key)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = b.Acquire(ctx, key)
	require.Error(t, err)

	// Another key: Redis may give the first one's element to a client that is gone.
	lease, err := a.Acquire(t.Context(), other)
	require.NoError(t, err)
	require.NoError(t, lease.Release(t.Context()))
	lease, err = b.Acquire(t.Context(), other)
	require.NoError(t, err)
	require.NoError(t, lease.Release(t.Context()))
}

// TestDelay: every request takes a round trip at least.
func TestDelay(t *testing.T) {
	_, res := measured(t, "-closed", "-contenders", "2", "-delay", "5ms")
	require.Zero(t, res.Failed)
	require.GreaterOrEqual(t, res.Release.Min, 10.0)
	require.GreaterOrEqual(t, res.Wait.Min, 10.0)
	require.Equal(t, load.Duration(5*time.Millisecond), res.Config.Delay)
	err := run(t.Context(), []string{"-delay", "-1ms"}, io.Discard)
	require.ErrorContains(t, err, "delay must not be negative")
}

// TestProcessors: GOMAXPROCS is limited, and restored.
func TestProcessors(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(3))
	for processors, used := range map[int]int{1: 1, 0: 3} {
		_, res := measured(t, "-closed", "-contenders", "2", "-processors", strconv.Itoa(processors))
		require.Equal(t, used, res.Machine.Used)
		require.Equal(t, processors, res.Config.Processors)
		require.Equal(t, 3, runtime.GOMAXPROCS(0))
	}
	err := run(t.Context(), []string{"-processors", "-1"}, io.Discard)
	require.ErrorContains(t, err, "-1 processors; 0 is all that there are")

	// Results of larger machines can be read.
	more := runtime.NumCPU() + 1
	want := fmt.Sprintf("-processors %d; there are %d here", more, more-1)
	err = run(t.Context(), []string{"-processors", strconv.Itoa(more), "-lock-addr", "127.0.0.1:1"}, io.Discard)
	require.ErrorContains(t, err, want)
	dir := experiment(t, fmt.Sprintf(`{"sweeps": [{"backends": ["redis"], "contenders": [1]}],
		"defaults": {"ttl": "10s", "duration": "10ms", "processors": %d}}`, more))
	_, _, err = bench.ReadExperiment(dir)
	require.NoError(t, err)
	t.Setenv(testbed.EnvRedisAddr, "127.0.0.1:1")
	err = run(t.Context(), []string{"-experiment", dir, "-testbed", "external"}, io.Discard)
	require.ErrorContains(t, err, want)
}

// TestCloseFails: if a client can't be closed, the result is still printed and saved.
func TestCloseFails(t *testing.T) {
	t.Setenv(stuckEnv, "yes")
	file := filepath.Join(t.TempDir(), "result.json")
	var out bytes.Buffer
	err := run(t.Context(), []string{
		"-closed", "-contenders", "2", "-lock-addr", redisServer.URL, "-prefix", t.Name() + "/", "-warmup", "0s", "-duration", "50ms", "-o", file,
	}, &out)
	require.ErrorContains(t, err, "load: close a client: stuck")
	require.Contains(t, out.String(), "  sections ")
	require.Equal(t, 2, results(t, file)[0].Config.Contenders)

	dir := experiment(t, `{"sweeps": [{"backends": ["redis"], "contenders": [1, 2]}],
		"defaults": {"ttl": "10s", "duration": "50ms"}}`)
	require.ErrorContains(t, record(t, dir), "load: close a client: stuck")
	require.Len(t, results(t, filepath.Join(dir, "data.jsonl")), 2)
}

// TestNowhereToWrite: it is detected before the run.
func TestNowhereToWrite(t *testing.T) {
	dir := t.TempDir()
	err := run(t.Context(), []string{"-o", filepath.Join(dir, "none", "run.json"), "-lock-addr", "127.0.0.1:1"}, io.Discard)
	require.ErrorContains(t, err, "contend: -o: ")
	require.NotContains(t, err.Error(), "127.0.0.1:1", "nobody was asked")

	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), []byte(`{"sweeps": [{"backends": ["redis"], "contenders": [1]}],
		"defaults": {"ttl": "10s", "duration": "10ms"}}`), 0o600))
	require.NoError(t, os.Mkdir(filepath.Join(dir, "data.jsonl"), 0o700))
	t.Setenv(testbed.EnvRedisAddr, "127.0.0.1:1")
	err = run(t.Context(), []string{"-experiment", dir, "-testbed", "external"}, io.Discard)
	require.ErrorContains(t, err, "data.jsonl is a directory")
	require.NotContains(t, err.Error(), "127.0.0.1:1")
}

// TestProcessFails: a killed child ends the experiment with an error that names the run.
func TestProcessFails(t *testing.T) {
	testbed.Need(t, redisServer.Real())
	t.Setenv(testbed.EnvRedisAddr, redisServer.URL)
	dir := experiment(t, `{"sweeps": [{"backends": ["redis"], "contenders": [1]}],
		"defaults": {"ttl": "10s", "duration": "1h"}}`)
	late, done := context.WithTimeout(t.Context(), time.Minute)
	defer done()
	killed := make(chan error, 1)
	go func() {
		var pids []int
		for len(pids) == 0 && late.Err() == nil {
			pids = children(t)
		}
		killed <- syscall.Kill(slices.Max(pids), syscall.SIGKILL)
	}()
	err := run(late, []string{"-experiment", dir, "-testbed", "external"}, io.Discard)
	require.NoError(t, <-killed)
	require.ErrorContains(t, err, "run 1 of 1, redis, 1 contenders, work 0s: contend: a process of the run failed: signal: killed")
	require.Empty(t, children(t), "processes that are still there")
	require.NoFileExists(t, filepath.Join(dir, "data.jsonl"))
}

func granted(ctx context.Context, t *testing.T, prefix string, n int) {
	t.Helper()
	client, err := redisclient.New(redisServer.URL)
	assert.NoError(t, err)
	for got := 0; got < n && ctx.Err() == nil; {
		got, _ = client.Get(ctx, "fence:{"+prefix+"0}").Int()
	}
	assert.NoError(t, client.Close())
}

func children(t *testing.T) (pids []int) {
	t.Helper()
	tasks, err := filepath.Glob("/proc/self/task/*/children")
	assert.NoError(t, err)
	for _, f := range tasks {
		b, err := os.ReadFile(f)
		if err != nil {
			continue // the thread has gone
		}
		for pid := range strings.FieldsSeq(string(b)) {
			env, _ := os.ReadFile("/proc/" + pid + "/environ")
			n, err := strconv.Atoi(pid)
			assert.NoError(t, err)
			if strings.Contains(string(env), bench.ChildEnv+"=1") {
				pids = append(pids, n)
			}
		}
	}
	return pids
}

// TestExperimentInterrupted: no child or server survives it. Earlier data and partial results do.
func TestExperimentInterrupted(t *testing.T) {
	testbed.Need(t, redisServer.Real()) // the experiment starts one itself
	dir := experiment(t, `{"defaults": {"backend": "redis", "ttl": "10s", "contenders": 2},
		"sweeps": [{"name": "short", "duration": "10ms"}, {"name": "long", "duration": "1h"}]}`)
	file := filepath.Join(dir, "data.jsonl")
	require.NoError(t, os.WriteFile(file, []byte("earlier"), 0o600))
	mark := "CONTEND_TEST=" + dir // of all that it starts
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-experiment", dir)
	cmd.Env = append(os.Environ(), "CONTEND_MAIN=1", mark)
	stderr, err := cmd.StderrPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	said := bufio.NewScanner(stderr)
	for said.Scan() {
		if strings.HasPrefix(said.Text(), "[1/2") {
			break
		}
	}
	require.NoError(t, said.Err())
	served := func() {
		t.Helper()
		all := results(t, file+".partial")
		require.Len(t, all, 1)
		require.Equal(t, "short", all[0].Config.Name)
	}
	served() // by now: a killed process couldn't write it later
	require.NotEmpty(t, marked(t, mark))
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	var last string
	for said.Scan() { // to the end: all that could write there has gone
		last = said.Text()
	}
	require.Error(t, cmd.Wait())
	require.Regexp(t, `data\.jsonl is as it was, and .*data\.jsonl\.partial has what was run: run 2 of 2`, last)
	require.Eventually(t, func() bool { return len(marked(t, mark)) == 0 }, time.Minute, time.Millisecond) // the kernel may still be at it
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "earlier", string(b))
	served()
}

// marked are the processes with env in their environment.
func marked(t *testing.T, env string) (names []string) {
	t.Helper()
	files, err := filepath.Glob("/proc/[0-9]*/environ")
	require.NoError(t, err)
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && strings.Contains(string(b), env) { // else it has gone, or is another user's
			names = append(names, f)
		}
	}
	return names
}

// TestInterrupted reads a run's metrics in another process and interrupts it.
func TestInterrupted(t *testing.T) {
	testbed.Need(t, redisServer.Real()) // the command starts one itself
	running, own := "-lock-addr="+redisServer.URL, "-testbed="+cmp.Or(os.Getenv("FENCELAB_TESTBED"), "auto")
	for _, server := range []string{running, own} {
		file, prefix := filepath.Join(t.TempDir(), "result.json"), t.Name()+uuid.NewString()+"/"
		args := []string{
			server, "-closed", "-contenders", "4", "-warmup", "0s", "-duration", "1h", "-o", file, "-prefix", prefix,
		}
		served := server == running
		if served {
			args = append(args, "-metrics", "127.0.0.1:0")
		}
		cmd := exec.CommandContext(t.Context(), os.Args[0], args...)
		cmd.Env = append(os.Environ(), "CONTEND_MAIN=1")
		stderr, err := cmd.StderrPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		said := bufio.NewScanner(stderr)
		address, measuring := regexp.MustCompile(`http://\S+`), regexp.MustCompile(`[1-9]\d* sections/s`)
		var url string
		for (served && url == "" || !served && !measuring.MatchString(said.Text())) && said.Scan() {
			url = address.FindString(said.Text())
		}
		if served {
			granted(t.Context(), t, prefix, 200) // some of them in its window
			text := get(t, url)
			require.Contains(t, text, "contend_sections_total")
			require.Contains(t, text, "dlock_acquire_successes_total")
		}
		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		for said.Scan() { // to the end, so that nobody waits for a reader
		}
		require.NoError(t, cmd.Wait())
		res := results(t, file)[0]
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
	dir := experiment(t, `{
		"defaults": {"ttl": "10s", "duration": "20ms", "warmup": "10ms", "seed": 1},
		"sweeps": [
			{"name": "a", "backends": ["redis", "redislock"], "contenders": [2, 4], "work": ["0s", "1ms"]},
			{"name": "b", "backends": ["redis-spin", "ping"], "contenders": [4], "connections": {"redis-spin": 2, "ping": 2}, "rates": [100], "keys": 10, "delay": "1ms", "processors": 1}
		]}`)
	require.NoError(t, record(t, dir))
	var got []string
	for _, r := range results(t, filepath.Join(dir, "data.jsonl")) {
		got = append(got, fmt.Sprintf("%s %s %d/%d %v %v %d %v %d", r.Config.Name, r.Config.Backend, r.Config.Contenders, r.Config.Connections, r.Config.Work, r.Config.Rate, r.Config.Keys, r.Config.Delay, r.Config.Processors))
		require.Contains(t, r.Machine.Server, "(external)")
		require.Positive(t, r.Seconds)
		require.Equal(t, gcPercent, r.Machine.GC)
	}
	require.Equal(t, []string{
		"a redis 2/2 0s 0 1 0s 0", "a redislock 2/2 0s 0 1 0s 0", "a redis 4/4 0s 0 1 0s 0", "a redislock 4/4 0s 0 1 0s 0",
		"a redis 2/2 1ms 0 1 0s 0", "a redislock 2/2 1ms 0 1 0s 0", "a redis 4/4 1ms 0 1 0s 0", "a redislock 4/4 1ms 0 1 0s 0",
		"b redis-spin 4/2 0s 100 10 1ms 1", "b ping 4/2 0s 100 10 1ms 1",
	}, got)
	require.NoFileExists(t, filepath.Join(dir, "data.jsonl.partial"))
}

// TestSweep: only its runs are replaced.
func TestSweep(t *testing.T) {
	dir := experiment(t, `{
		"defaults": {"backend": "redis", "ttl": "10s", "duration": "20ms", "seed": 1}, "rounds": 2,
		"sweeps": [
			{"name": "a", "contenders": [1, 2]},
			{"name": "b", "contenders": [3], "rates": [0.9]},
			{"name": "a", "contenders": [4]},
			{"name": "c", "contenders": [1]}
		]}`)
	_, configs, err := bench.ReadExperiment(dir)
	require.NoError(t, err)
	require.Len(t, configs, 10)
	line := func(c load.Config) string {
		b, err := json.Marshal(load.Result{Config: c, Seconds: 1})
		require.NoError(t, err)
		return " " + string(b) + "\n" // not as contend writes it
	}
	file := filepath.Join(dir, "data.jsonl")
	sweep := func(name string, lines ...string) error {
		require.NoError(t, os.WriteFile(file, []byte(strings.Join(lines, "")), 0o600))
		return record(t, dir, "-sweep", name)
	}
	for _, name := range []string{"a", "b"} {
		old := []string{line(load.Config{Name: name, Backend: "gone"})} // which config.json had before
		for _, c := range slices.Backward(configs) {
			if c.Name != name || c.Round == 1 { // one round was never run
				old = append(old, line(c))
			}
		}
		require.NoError(t, sweep(name, old...))
		b, err := os.ReadFile(file)
		require.NoError(t, err)
		lines := slices.Collect(bytes.Lines(b))
		require.Len(t, lines, len(configs))
		for i, c := range configs {
			var r load.Result
			require.NoError(t, json.Unmarshal(lines[i], &r))
			require.Equal(t, c, r.Config)
			require.Equal(t, c.Name != name, line(c) == string(lines[i]), "line %d", i+1)
			require.Equal(t, c.Name != name, len(r.Parts) == 0, "line %d", i+1)
		}
		require.NoFileExists(t, file+".partial")
	}
}

// TestSweepRefuses: data with missing or foreign runs is detected before the first run.
func TestSweepRefuses(t *testing.T) {
	dir := experiment(t, `{
		"defaults": {"backend": "redis", "ttl": "10s", "duration": "20ms", "seed": 1},
		"sweeps": [{"name": "a b", "contenders": [1]}, {"name": "c", "contenders": [1, 2]}, {"name": "a b", "contenders": [3]}]}`)
	_, configs, err := bench.ReadExperiment(dir)
	require.NoError(t, err)
	line := func(c load.Config) string {
		b, err := json.Marshal(load.Result{Config: c})
		require.NoError(t, err)
		return string(b) + "\n"
	}
	gone := configs[1]
	gone.Contenders = 7
	file := filepath.Join(dir, "data.jsonl")
	t.Setenv(testbed.EnvRedisAddr, "127.0.0.1:1") // which would be another error
	for want, c := range map[string]struct {
		lines string
		args  []string
	}{
		`there is no sweep of that name; there are "a b", "c"`:                             {"", []string{"-sweep", "a"}},
		`data.jsonl has no line of "c": redis, 2 contenders`:                               {line(configs[1]), []string{"-sweep", "a b"}},
		`data.jsonl, line 1, is of a run that config.json doesn't have, "c": redis, 1 con`: {line(configs[1]) + line(configs[2]), []string{"-sweep", "a b", "-seed", "9"}},
		`data.jsonl, line 2, is of a run that config.json doesn't have, "c": redis, 7 con`: {line(configs[1]) + line(gone) + line(configs[2]), []string{"-sweep", "a b"}},
		`data.jsonl, line 2, is of the same run as one before it`:                          {line(configs[1]) + line(configs[1]), []string{"-sweep", "a b"}},
		`data.jsonl, line 1: invalid character`:                                            {"earlier\n", []string{"-sweep", "a b"}},
	} {
		require.NoError(t, os.WriteFile(file, []byte(c.lines), 0o600))
		err := run(t.Context(), append(c.args, "-experiment", dir, "-testbed", "external"), io.Discard)
		require.ErrorContains(t, err, want)
		b, err := os.ReadFile(file)
		require.NoError(t, err)
		require.Equal(t, c.lines, string(b))
	}
	require.NoError(t, os.Remove(file))
	err = run(t.Context(), []string{"-experiment", dir, "-testbed", "external", "-sweep", "c"}, io.Discard)
	require.ErrorContains(t, err, `data.jsonl has no line of "a b": redis, 1 contenders`)
	require.ErrorContains(t, run(t.Context(), []string{"-sweep", "a"}, io.Discard), "-sweep is for an experiment")
}

func TestExperimentSeed(t *testing.T) {
	dir := experiment(t, `{"sweeps": [{"backends": ["redis"]}],
		"defaults": {"ttl": "10s", "duration": "10ms", "contenders": 1, "seed": 5}}`)
	for want, args := range map[uint64][]string{5: nil, 7: {"-seed", "7"}, 1: {"-seed", "1"}} {
		require.NoError(t, record(t, dir, args...))
		require.Equal(t, want, results(t, filepath.Join(dir, "data.jsonl"))[0].Config.Seed)
	}
}

// TestMetricsFail: a failing listener is an error, whatever the run's result.
func TestMetricsFail(t *testing.T) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0) // which run closes
	require.NoError(t, err)
	require.NoError(t, syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})) // and nobody listens: nothing can be accepted
	name, err := syscall.Getsockname(fd)
	require.NoError(t, err)
	address := fmt.Sprintf("127.0.0.1:%d", name.(*syscall.SockaddrInet4).Port)
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	go func() { // the run goes on until its server has given up, and the address is free
		defer cancel()
		for ctx.Err() == nil {
			if ln, err := new(net.ListenConfig).Listen(ctx, "tcp", address); err == nil {
				_ = ln.Close()
				return
			}
			time.Sleep(time.Millisecond)
		}
	}()
	err = run(ctx, []string{
		"-closed", "-contenders", "1", "-lock-addr", redisServer.URL, "-prefix", t.Name() + "/", "-warmup", "0s", "-duration", "1h",
		"-metrics", fmt.Sprintf("fd:%d", fd),
	}, io.Discard)
	require.ErrorContains(t, err, "accept")
}

// TestCommitted: recorded data matches its config.
func TestCommitted(t *testing.T) {
	for _, name := range []string{"contention", "fairness"} {
		dir := filepath.Join("../../reports/results", name)
		_, configs, err := bench.ReadExperiment(dir)
		require.NoError(t, err)
		var recorded []load.Config
		for _, r := range results(t, filepath.Join(dir, "data.jsonl")) {
			require.Zero(t, r.Checks)
			recorded = append(recorded, r.Config)
		}
		require.Equal(t, configs, recorded, "record it again: contend -experiment reports/results/%s", name)
	}
}

func TestRefuses(t *testing.T) {
	ln, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, ln.Close()) }()
	for want, args := range map[string][]string{
		"-rate 0; it must be positive, or ask for the closed model with -closed": {"-rate", "0"},
		"a rate of NaN":                                    {"-rate", "NaN"},
		"a rate of +Inf":                                   {"-rate", "+Inf"},
		"want redis or redis-spin or redlock":              {"-backend", "memcached"},
		"-experiment wants a directory with a config.json": {"-experiment", t.TempDir()},
		"redis at 127.0.0.1:1 doesn't answer":              {"-lock-addr", "127.0.0.1:1"},
		"or choose another with -metrics":                  {"-lock-addr", "127.0.0.1:1", "-metrics", ln.Addr().String()},
		"experiment of another command: gen -experiment ../../reports/results/token-costs": {"-experiment", "../../reports/results/token-costs"},
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
		`no lock service "zk"`:         `{"servers": {"zk": {"nodes": 1}}, "sweeps": [{"backends": ["redis"], "contenders": [1]}]}`,
		`connections of "postgre"`:     `{"sweeps": [{"backends": ["redis", "postgres"], "contenders": [1], "connections": {"postgre": 1}}]}`,
		"a run that is there already":  `{"defaults": {"ttl": "1s", "duration": "1s"}, "sweeps": [{"backends": ["redis"], "contenders": [2, 2]}]}`,
	} {
		_, _, err := bench.ReadExperiment(experiment(t, config))
		require.ErrorContains(t, err, want)
	}
}
