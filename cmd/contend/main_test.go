package main

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/rogpeppe/go-internal/testscript"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/bench"
	"github.com/fencelab/fencelab/internal/bench/load"
	"github.com/fencelab/fencelab/internal/jsonl"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

var redisServer *testbed.Server

func TestMain(m *testing.M) {
	testscript.Main(withRedis{m}, map[string]func(){"contend": main})
}

type withRedis struct{ m *testing.M }

func (w withRedis) Run() int { return testmain.Code(w.m, testmain.Redis(&redisServer)) }

// Errors must be detected before a server is asked or started.
func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{Dir: "testdata", RequireExplicitExec: true, Setup: func(e *testscript.Env) error {
		results, err := filepath.Abs("../../reports/results")
		e.Setenv("RESULTS", results)
		e.Setenv("FENCELAB_LOCK", "redis://127.0.0.1:1")
		e.Setenv(testbed.EnvRedisAddr, "127.0.0.1:1")
		return err
	}})
}

// measured repeats a short run until it has a critical section and a release, which a stalled machine may not have.
func measured(t *testing.T, args ...string) (string, *load.Result) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "result.json")
	for d := 50 * time.Millisecond; ; d *= 2 {
		var out bytes.Buffer
		err := run(t.Context(), append(args, "-lock", redisServer.URL, "-prefix", t.Name()+uuid.NewString()+"/", "-warmup", "10ms",
			"-duration", d.String(), "-o", file), &out)
		require.NoError(t, err, out.String())
		res := &results(t, file)[0]
		if res.Sections > 0 && res.Release.Count > 0 { // releases after the window don't count
			return out.String(), res
		}
		require.Less(t, d, 10*time.Second, "no section or no release")
	}
}

func results(t *testing.T, file string) (all []load.Result) {
	t.Helper()
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	all, err = jsonl.Decode[load.Result](bytes.NewReader(b), false)
	require.NoError(t, err)
	return all
}

func experiment(t *testing.T, config string) (dir string) {
	t.Helper()
	dir = t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600))
	return dir
}

func record(t *testing.T, dir string, args ...string) error {
	t.Helper()
	testbed.Need(t, redisServer.Real())
	t.Setenv(testbed.EnvRedisAddr, redisServer.URL)
	return run(t.Context(), append(args, "-experiment", dir, "-testbed", "external"), io.Discard)
}

func TestRuns(t *testing.T) {
	for _, c := range []struct{ args, says, library string }{
		{"-contenders 10 -work 1ms", "redis (server unknown): closed model, 10 contenders on 10 connections, a hot key, work 1ms, TTL 10s\n", ""},
		{"-backend ping -contenders 4 -work 1ms", "ping (server unknown): closed model", ""},
		{"-backend baton -contenders 4 -work 1ms", "baton (server unknown): closed model", ""},
		{
			"-closed=false -rate 200 -keys 1000 -backend redislock -contenders 20 -connections 2",
			"redislock (server unknown): 200 arrivals/s, 20 contenders on 2 connections, 1000 keys,", "github.com/bsm/redislock",
		},
	} {
		out, res := measured(t, append([]string{"-closed"}, strings.Fields(c.args)...)...)
		require.Contains(t, out, c.says)
		ping := res.Config.Backend == "ping"
		require.Equal(t, !ping, strings.Contains(out, "  checks     0 overlaps, 0 token regressions, 0 grants after a lease's end\n"))
		require.Equal(t, !ping && res.Config.Keys == 1, strings.Contains(out, "order"))
		require.Zero(t, res.Checks)
		require.Zero(t, res.Failed)
		require.True(t, strings.HasPrefix(res.Machine.Library, c.library) && (c.library == "") == (res.Machine.Library == ""))
		require.Equal(t, res.BacklogStart+res.Arrivals, res.Sections+res.Unserved.Count)
	}
}

func TestBaton(t *testing.T) {
	l, err := bench.Open(t.Context(), bench.Spec{Lock: "baton", Addrs: []string{redisServer.URL}})
	require.NoError(t, err)
	defer func() { require.NoError(t, l.Close()) }()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	key := t.Name() + uuid.NewString()
	for range 2 {
		lease, err := l.Acquire(ctx, key)
		require.NoError(t, err)
		require.NoError(t, lease.Release(ctx))
	}
}

func TestDelay(t *testing.T) {
	_, res := measured(t, "-closed", "-contenders", "2", "-delay", "5ms")
	require.Zero(t, res.Failed)
	require.GreaterOrEqual(t, res.Release.Min, 10.0)
	require.GreaterOrEqual(t, res.Wait.Min, 10.0)
	require.Equal(t, load.Duration(5*time.Millisecond), res.Config.Delay)
}

func TestProcessors(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(3))
	for processors, used := range map[int]int{1: 1, 0: 3} {
		_, res := measured(t, "-closed", "-contenders", "2", "-processors", strconv.Itoa(processors))
		require.Equal(t, used, res.Machine.Used)
		require.Equal(t, processors, res.Config.Processors)
		require.Equal(t, 3, runtime.GOMAXPROCS(0))
	}
}

func TestCloseFails(t *testing.T) {
	open := bench.Open
	defer func() { bench.Open = open }()
	bench.Open = func(ctx context.Context, s bench.Spec) (load.Lock, error) {
		l, err := open(ctx, s)
		done := l.Close
		l.Close = func() error { return errors.Join(done(), errors.New("stuck")) }
		return l, err
	}
	file := filepath.Join(t.TempDir(), "result.json")
	var out bytes.Buffer
	err := run(t.Context(), []string{
		"-closed", "-contenders", "2", "-lock", redisServer.URL, "-prefix", t.Name() + "/", "-warmup", "0s", "-duration", "50ms", "-o", file,
	}, &out)
	require.ErrorContains(t, err, "load: close a client: stuck")
	require.Contains(t, out.String(), "  sections ")
	require.Equal(t, 2, results(t, file)[0].Config.Contenders)

	dir := experiment(t, `{"sweeps": [{"backends": ["redis"], "contenders": [1, 2]}],
		"defaults": {"ttl": "10s", "duration": "50ms"}}`)
	require.ErrorContains(t, record(t, dir), "load: close a client: stuck")
	require.Len(t, results(t, filepath.Join(dir, "data.jsonl")), 2)
}

// Earlier data and partial results survive.
func TestExperimentInterrupted(t *testing.T) {
	testbed.Need(t, redisServer.Real()) // the experiment starts one itself
	dir := experiment(t, `{"defaults": {"backend": "redis", "ttl": "10s", "contenders": 2},
		"sweeps": [{"name": "short", "duration": "10ms"}, {"name": "long", "duration": "1h"}]}`)
	file := filepath.Join(dir, "data.jsonl")
	require.NoError(t, os.WriteFile(file, []byte("earlier"), 0o600))
	cmd := exec.CommandContext(t.Context(), "contend", "-experiment", dir)
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
	served() // a killed process couldn't write it later
	require.NoError(t, cmd.Process.Signal(os.Interrupt))
	var last string
	for said.Scan() { // until all writers have ended
		last = said.Text()
	}
	require.Error(t, cmd.Wait())
	require.Regexp(t, `data\.jsonl is as it was, and .*data\.jsonl\.partial has what was run: run 2 of 2`, last)
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "earlier", string(b))
	served()
}

func TestInterrupted(t *testing.T) {
	testbed.Need(t, redisServer.Real())              // the command starts one itself
	t.Setenv("FENCELAB_LOCK", "redis://127.0.0.1:1") // -testbed wins
	running, own := "-lock="+redisServer.URL, "-testbed="+cmp.Or(os.Getenv("FENCELAB_TESTBED"), "auto")
	for _, server := range []string{running, own} {
		file, prefix := filepath.Join(t.TempDir(), "result.json"), t.Name()+uuid.NewString()+"/"
		args := []string{
			server, "-closed", "-contenders", "4", "-warmup", "0s", "-duration", "1h", "-o", file, "-prefix", prefix,
		}
		served := server == running
		if served {
			args = append(args, "-metrics", "127.0.0.1:0")
		}
		cmd := exec.CommandContext(t.Context(), "contend", args...)
		stderr, err := cmd.StderrPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		said := bufio.NewScanner(stderr)
		address, measuring := regexp.MustCompile(`http://\S+`), regexp.MustCompile(`[1-9]\d* sections/s`)
		var url string
		for !measuring.MatchString(said.Text()) && said.Scan() {
			url = cmp.Or(address.FindString(said.Text()), url)
		}
		if served {
			_, text := testmain.Get(t, url)
			require.Contains(t, text, "contend_sections_total")
			require.Contains(t, text, "dlock_acquire_successes_total")
		}
		require.NoError(t, cmd.Process.Signal(syscall.SIGTERM))
		for said.Scan() { // so that no writer blocks
		}
		require.NoError(t, cmd.Wait())
		res := results(t, file)[0]
		require.True(t, res.Cut)
		require.Positive(t, res.Sections)
		require.Less(t, res.Seconds, 3600.0)
	}
}

func TestExperiment(t *testing.T) {
	dir := experiment(t, `{
		"defaults": {"ttl": "10s", "duration": "20ms", "warmup": "10ms", "seed": 5},
		"sweeps": [
			{"name": "a", "backends": ["redis", "redislock"], "contenders": [2, 4], "work": ["0s", "1ms"]},
			{"name": "b", "backends": ["redis-spin", "ping"], "contenders": [4], "connections": {"redis-spin": 2, "ping": 2}, "rates": [100], "keys": 10, "delay": "1ms", "processors": 1}
		]}`)
	require.NoError(t, record(t, dir))
	var got []string
	for _, r := range results(t, filepath.Join(dir, "data.jsonl")) {
		got = append(got, fmt.Sprintf("%s %s %d/%d %v %v %d %v %d", r.Config.Name, r.Config.Backend, r.Config.Contenders, r.Config.Connections, r.Config.Work, r.Config.Rate, r.Config.Keys, r.Config.Delay, r.Config.Processors))
		require.Contains(t, r.Machine.Server, "(external)")
		require.EqualValues(t, 5, r.Config.Seed)
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
