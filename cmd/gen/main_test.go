package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/internal/leak"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// redisServer is the Redis of all tests, each of which finds it empty.
var redisServer *testbed.Server

func TestMain(m *testing.M) { testmain.Run(m, testmain.Server(&redisServer, testbed.StartRedis, nil)) }

// connect returns a client of the server, which it empties, and sees to it that the test leaves no goroutine behind.
func connect(t *testing.T) *redis.Client {
	t.Helper()
	if redisServer.Provider == testbed.External {
		t.Skip("not applicable to an external server: the test empties it")
	}
	before := goleak.IgnoreCurrent()
	c, err := redisclient.New(redisServer.URL)
	require.NoError(t, err)
	t.Cleanup(func() {
		require.NoError(t, c.Close())
		require.NoError(t, leak.Find(before))
	})
	require.NoError(t, c.FlushAll(t.Context()).Err())
	return c
}

// The tests don't empty a Redis that is the user's.
func TestExternal(t *testing.T) {
	c := connect(t)
	require.NoError(t, c.Set(t.Context(), "a user's key", "x", 0).Err())
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.v", "-test.run=^(TestGen|TestInterrupted)$")
	cmd.Env = append(os.Environ(), testbed.EnvProvider+"="+string(testbed.External), testbed.EnvRedisAddr+"="+redisServer.Addr)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Equal(t, 2, strings.Count(string(out), "not applicable to an external server"), "%s", out)
	require.Equal(t, "x", c.Get(t.Context(), "a user's key").Val())
}

func gen(t *testing.T, args ...string) (string, error) {
	t.Helper()
	var out bytes.Buffer
	err := run(t.Context(), append([]string{"-lock-addr", redisServer.URL}, args...), &out)
	return out.String(), err
}

func TestGen(t *testing.T) {
	ctx, c := t.Context(), connect(t)
	file := filepath.Join(t.TempDir(), "samples.jsonl")
	args := []string{"-keys", "1000", "-seed", "5", "-batch", "64", "-o", file}
	out, err := gen(t, args...)
	require.NoError(t, err)
	require.Contains(t, out, "100.0 %  1k of 1k")
	require.Contains(t, out, "1000 locks taken in ")
	require.NotContains(t, out, "\r", "not a terminal")
	require.EqualValues(t, 2000, c.DBSize(ctx).Val())
	keys := c.Keys(ctx, "*").Val()

	b, err := os.ReadFile(file)
	require.NoError(t, err)
	lines := strings.Split(strings.TrimSpace(string(b)), "\n")
	var last map[string]float64
	require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &last))
	require.EqualValues(t, 1000, last["done"])
	require.EqualValues(t, 2000, last["keys"])
	require.Positive(t, last["used_memory"])
	require.Contains(t, last, "expired_stale_perc")

	out, err = gen(t, args...)
	require.NoError(t, err, "again")
	require.Contains(t, out, "1000 locks taken in ")
	require.ElementsMatch(t, keys, c.Keys(ctx, "*").Val(), "and nothing is added")

	if _, err := exec.LookPath("redis-cli"); err == nil { // the command that it prints removes all of them, and nothing else
		defer func() {
			require.NoError(t, c.Set(ctx, "lock:{mine}", "x", 0).Err())
			_, remove, ok := strings.Cut(out, "to remove them: ")
			require.True(t, ok, out)
			text, err := exec.CommandContext(ctx, "sh", "-c", remove).CombinedOutput()
			require.NoError(t, err, "%s", text)
			require.Equal(t, []string{"lock:{mine}"}, c.Keys(ctx, "*").Val())
		}()
	}

	_, err = gen(t, "-keys", "500", "-seed", "6")
	require.NoError(t, err)
	require.EqualValues(t, 3000, c.DBSize(ctx).Val(), "another seed has other keys")
}

func TestHeldByAnother(t *testing.T) {
	ctx, c := t.Context(), connect(t)
	_, err := gen(t, "-keys", "10")
	require.NoError(t, err)
	lock := c.Keys(ctx, "lock:*").Val()[0]
	key := strings.TrimSuffix(strings.TrimPrefix(lock, "lock:{"), "}")
	require.NoError(t, c.Del(ctx, lock).Err())
	b, err := redislock.New(c, nil)
	require.NoError(t, err)
	_, err = b.TryAcquire(ctx, dlock.Request{Key: key, Owner: "another", TTL: time.Hour})
	require.NoError(t, err)
	require.NoError(t, b.Close())
	out, err := gen(t, "-keys", "10")
	require.ErrorContains(t, err, "gen: 1 locks are held by others: wait for their leases to end, or take another -seed")
	require.Contains(t, out, "9 locks taken")
}

// writer calls each with every write.
type writer func(p string) error

func (w writer) Write(p []byte) (int, error) { return len(p), w(string(p)) }

func TestInterrupted(t *testing.T) {
	c := connect(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	err := run(ctx, []string{"-lock-addr", redisServer.URL, "-keys", "100000000", "-conns", "1", "-batch", "16", "-every", "10ms"}, writer(func(string) error {
		cancel()
		return nil
	}))
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "run it again to complete the set")
	require.NoError(t, c.FlushAll(t.Context()).Err())

	full := fmt.Errorf("disk full")
	err = run(t.Context(), []string{"-lock-addr", redisServer.URL, "-keys", "100000000", "-conns", "1", "-batch", "16", "-every", "10ms"}, writer(func(string) error { return full }))
	require.ErrorIs(t, err, full)
}

func TestMetrics(t *testing.T) {
	connect(t)
	var page string
	err := run(t.Context(), []string{"-lock-addr", redisServer.URL, "-keys", "100", "-metrics", "127.0.0.1:0"}, &scraper{t: t, page: &page})
	require.NoError(t, err)
	for _, want := range []string{
		"gen_locks_granted_total 100\n", "gen_locks_held_total 0\n", "gen_locks_wanted 100\n", `gen_sample{field="keys"} 200`,
		`gen_sample{field="used_memory"} `, `gen_sample{field="ping_max_ns"} `,
	} {
		require.Contains(t, page, want)
	}
}

// scraper reads /metrics when gen writes that all is done, and before it goes on.
type scraper struct {
	t    *testing.T
	url  string
	page *string
}

func (s *scraper) Write(p []byte) (int, error) {
	text := string(p)
	if url, ok := strings.CutPrefix(text, "metrics on "); ok {
		s.url = strings.TrimSpace(url)
	}
	if strings.Contains(text, "100.0 %") {
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		req, err := http.NewRequestWithContext(s.t.Context(), http.MethodGet, s.url, nil)
		if err != nil {
			return 0, err
		}
		resp, err := client.Do(req)
		if err != nil {
			return 0, err
		}
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			return 0, err
		}
		*s.page += string(b)
		return len(p), resp.Body.Close()
	}
	return len(p), nil
}

func TestEtcd(t *testing.T) {
	connect(t)
	cluster, err := testbed.StartEtcd(t.Context(), 1, nil)
	testbed.Need(t, err)
	t.Cleanup(func() { require.NoError(t, cluster.Close()) })
	args := []string{"-backend", "etcd", "-lock-addr", cluster.Addrs()[0], "-keys", "200", "-contenders", "16"}
	var out bytes.Buffer
	require.NoError(t, run(t.Context(), args, &out))
	require.Contains(t, out.String(), "200 locks taken")
	require.Contains(t, out.String(), "200 keys, 1 leases")
	out.Reset()
	require.NoError(t, run(t.Context(), args, &out))
	require.Contains(t, out.String(), "0 locks taken")
	require.Contains(t, out.String(), "200 were held")
	require.Contains(t, out.String(), "200 keys, ")
}

func TestErrors(t *testing.T) {
	connect(t)
	ln, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, ln.Close()) }()
	kept := filepath.Join(t.TempDir(), "samples")
	require.NoError(t, os.WriteFile(kept, []byte("of another run"), 0o600))
	_, err = gen(t, "-o", kept, "-metrics", ln.Addr().String())
	require.ErrorContains(t, err, "is in use")
	b, err := os.ReadFile(kept)
	require.NoError(t, err)
	require.Equal(t, "of another run", string(b), "a mistake costs nobody their samples")
	require.EqualError(t, run(t.Context(), nil, io.Discard),
		"gen: it would put 10000000 locks into 127.0.0.1:6379: say how many with -keys, or where with -lock-addr")
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"-keys", "0"}, "gen: -keys 0: it must be more than 0 (the default is 10000000)"},
		{[]string{"-ttl", "-1s"}, "gen: -ttl -1s: it must be more than 0 (the default is 1h0m0s)"},
		{[]string{"-conns", "-1"}, "gen: -conns -1: it must be"},
		{[]string{"-batch", "0"}, "gen: -batch 0: it must be"},
		{[]string{"-contenders", "0"}, "gen: -contenders 0: it must be"},
		{[]string{"-every", "0s"}, "gen: -every 0s: it must be"},
		{[]string{"-ttl", "1us"}, "TTL 1µs"},
		{[]string{"-conns", "100000"}, "gen: -conns 100000: the client has "},
		{[]string{"-backend", "consul"}, "want redis or etcd"},
		{[]string{"-lock-addr", "127.0.0.1:1"}, "gen: redis at 127.0.0.1:1 (-lock-addr) doesn't answer: "},
		{[]string{"-lock-addr", "a:1,b:1"}, "gen: redis is one server, and -lock-addr has 2 addresses"},
		{[]string{"-lock-addr", "ftp://x"}, "no redis:// URL"},
		{[]string{"-o", "/nowhere/samples"}, "gen: -o: "},
		{[]string{"-metrics", "nowhere"}, "gen: can't listen on -metrics nowhere: "},
		{[]string{"-metrics", ln.Addr().String()}, "is in use: stop what listens there, or choose another with -metrics"},
		{[]string{"-experiment", "/nowhere"}, "gen: footprint: open /nowhere/config.json"},
		{[]string{"-experiment", "../../reports/results/contention"}, "describes an experiment of another command: contend -experiment ../../reports/results/contention"},
	} {
		_, err := gen(t, c.args...)
		require.ErrorContains(t, err, c.want, "%q", c.args)
	}
}

func TestExperiment(t *testing.T) {
	connect(t)
	dir := t.TempDir()
	config := `{"seed": 1, "sample_every": "50ms", "limit": "1m",
		"redis": {"keys": 1000, "ttl": "100ms", "conns": 2, "batch": 64, "check": 20}}`
	require.NoError(t, os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600))
	out, err := gen(t, "-experiment", dir)
	require.NoError(t, err)
	require.Contains(t, out, "redis active")
	b, err := os.ReadFile(filepath.Join(dir, "data.jsonl"))
	require.NoError(t, err)
	require.NotEmpty(t, b)
}
