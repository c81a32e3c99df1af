package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// Every test finds it empty.
var redisServer *testbed.Server

func TestMain(m *testing.M) { testmain.Run(m, testmain.Server(&redisServer, testbed.StartRedis, nil)) }

// connect empties the server, and checks for leaked goroutines.
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
		require.NoError(t, testmain.FindLeaks(before))
	})
	require.NoError(t, c.FlushAll(t.Context()).Err())
	return c
}

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
	err := run(t.Context(), append([]string{"-lock", redisServer.URL, "-keys", "1"}, args...), &out)
	return out.String(), err
}

func TestGen(t *testing.T) {
	ctx, c := t.Context(), connect(t)
	args := []string{"-keys", "1000", "-seed", "5"}
	before := reads(t, c)
	out, err := gen(t, args...)
	require.NoError(t, err)
	require.Less(t, reads(t, c)-before, 500, "requests share pipelines")
	require.Contains(t, out, "1000 locks taken in ")
	require.EqualValues(t, 2000, c.DBSize(ctx).Val())
	keys := c.Keys(ctx, "*").Val()

	require.Regexp(t, `1k of 1k  used .*B, RSS .*  2k keys, 1k with a TTL  expired 0  ping .*s at most\n`, out)

	out, err = gen(t, args...)
	require.NoError(t, err, "again")
	require.Contains(t, out, "1000 locks taken in ")
	require.ElementsMatch(t, keys, c.Keys(ctx, "*").Val(), "and nothing is added")

	if _, err := exec.LookPath("redis-cli"); err == nil { // the command removes all of the locks, and nothing else
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

// reads returns how often the server has read, one or many requests at a time.
func reads(t *testing.T, c *redis.Client) int {
	t.Helper()
	info, err := c.InfoMap(t.Context()).Result()
	require.NoError(t, err)
	n, err := strconv.Atoi(info["Stats"]["total_reads_processed"])
	require.NoError(t, err)
	return n
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

type writer func(p string) error

func (w writer) Write(p []byte) (int, error) { return len(p), w(string(p)) }

func TestInterrupted(t *testing.T) {
	c := connect(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var out strings.Builder
	err := run(ctx, []string{"-lock", redisServer.URL, "-keys", "100000000"}, writer(func(s string) error {
		cancel()
		out.WriteString(s)
		return nil
	}))
	require.Contains(t, out.String(), "\nto remove them: redis-cli -u ")
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "run it again to complete the set")
	require.NoError(t, c.FlushAll(t.Context()).Err())

	full := fmt.Errorf("disk full")
	err = run(t.Context(), []string{"-lock", redisServer.URL, "-keys", "100000000"}, writer(func(string) error { return full }))
	require.ErrorIs(t, err, full)
}

func TestEtcd(t *testing.T) {
	connect(t)
	cluster := testmain.ServeCluster(t, testbed.StartEtcd, 1, nil)
	args := []string{"-lock", "etcd://" + cluster.Addrs()[0], "-keys", "200", "-contenders", "16"}
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
	require.EqualError(t, run(t.Context(), nil, io.Discard),
		"gen: want -keys: how many locks to take on redis at 127.0.0.1:6379")
	for _, c := range []struct {
		args []string
		want string
	}{
		{[]string{"-keys", "0"}, "want -keys: how many locks"},
		{[]string{"-ttl", "-1s"}, "gen: -ttl -1s: it must be more than 0 (the default is 1h0m0s)"},
		{[]string{"-contenders", "0"}, "gen: -contenders 0: it must be"},
		{[]string{"-ttl", "1us"}, "gen: after 0 locks: lock 1 of 1: dlock: invalid: redislock: TTL 1µs"},
		{[]string{"-lock", "consul"}, "gen: -lock: gen populates redis and etcd only, not consul"},
		{[]string{"-lock", "redis://127.0.0.1:1", "-keys", "1"}, "gen: redis at 127.0.0.1:1 (-lock) doesn't answer: "},
		{[]string{"-lock", "127.0.0.1:1"}, "want a URL"},
		{[]string{"-experiment", "/nowhere"}, "gen: servercost: open /nowhere/config.json: "},
	} {
		_, err := gen(t, c.args...)
		require.ErrorContains(t, err, c.want, "%q", c.args)
	}
}
