package populate_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/memlock"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/internal/bench/populate"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

var server *testbed.Server

func TestMain(m *testing.M) { testmain.Run(m, testmain.Server(&server, testbed.StartRedis, nil)) }

// connect empties the server.
func connect(tb testing.TB) *redis.Client {
	tb.Helper()
	if server.Provider == testbed.External {
		tb.Skip("not applicable to an external server: the test empties it")
	}
	c, err := redisclient.New(server.URL)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, c.Close()) })
	require.NoError(tb, c.FlushAll(tb.Context()).Err())
	return c
}

// The tests don't empty a user's Redis.
func TestExternal(t *testing.T) {
	c := connect(t)
	require.NoError(t, c.Set(t.Context(), "a user's key", "x", 0).Err())
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.v", "-test.run=^(TestPipelined|TestWatchRedis)$")
	cmd.Env = append(os.Environ(), testbed.EnvProvider+"="+string(testbed.External), testbed.EnvRedisAddr+"="+server.Addr)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Equal(t, 2, strings.Count(string(out), "not applicable to an external server"), "%s", out)
	require.Equal(t, "x", c.Get(t.Context(), "a user's key").Val())
}

// TestSet is a golden test: a second run with a seed must find the locks of the first.
func TestSet(t *testing.T) {
	first := populate.Set{Seed: 1, TTL: time.Hour}.Request(0)
	require.Equal(t, dlock.Request{Key: "gen/783825822a6f9e62", Owner: "da2190e8-28e4-49d2-976e-5977e3a0b362", TTL: time.Hour}, first)
	keys, owners := map[string]bool{}, map[string]bool{}
	for _, seed := range []uint64{1, 2} {
		for i := range uint64(10_000) {
			r := populate.Set{Seed: seed}.Request(i)
			id, err := uuid.Parse(r.Owner)
			require.NoError(t, err)
			require.Equal(t, uuid.Version(4), id.Version(), "as a Locker's")
			keys[r.Key], owners[r.Owner] = true, true
		}
	}
	require.Len(t, keys, 20_000)
	require.Len(t, owners, 20_000)
}

// TestPipelined: same keys as redislock's, and a second run adds none.
func TestPipelined(t *testing.T) {
	ctx, c := t.Context(), connect(t)
	opts := &redislock.Options{Prefix: "p:"}
	s := populate.Set{Seed: 7, N: 1000, TTL: time.Hour}
	b, err := redislock.New(c, opts)
	require.NoError(t, err)
	last := s.Request(999)
	last.Owner = "another"
	_, err = b.TryAcquire(ctx, last)
	require.NoError(t, err)
	before := commands(t, c)
	for range 2 {
		pipelined, err := populate.Pipelined(c, opts)
		require.NoError(t, err)
		var counts populate.Counts
		require.NoError(t, populate.Locks(ctx, pipelined, s, 100, &counts))
		require.NoError(t, pipelined.Close())
		require.EqualValues(t, 999, counts.Granted())
		require.EqualValues(t, 1, counts.Held())
		require.EqualValues(t, 2000, c.DBSize(ctx).Val(), "a lock and a counter for each")
	}
	require.Less(t, commands(t, c)-before, 1000, "that many reads of the server's for 2000 requests")
	for i := range s.N - 1 {
		q := s.Request(i)
		grant := dlock.Grant{Key: q.Key, Owner: q.Owner, TTL: time.Hour}
		q.Owner = "another"
		_, err := b.TryAcquire(ctx, q)
		require.ErrorIs(t, err, dlock.ErrHeld)
		require.NoError(t, b.Release(ctx, grant), "its owner has it still")
		g, err := b.TryAcquire(ctx, q)
		require.NoError(t, err)
		require.EqualValues(t, 2, g.Fence, "the second run minted no token")
	}
	require.NoError(t, b.Close())
}

// commands is how often the server has read requests, one or many at a time.
func commands(t *testing.T, c *redis.Client) int {
	t.Helper()
	info, err := c.InfoMap(t.Context()).Result()
	require.NoError(t, err)
	n, err := strconv.Atoi(info["Stats"]["total_reads_processed"])
	require.NoError(t, err)
	return n
}

func TestLocks(t *testing.T) {
	ctx := t.Context()
	b := memlock.New(nil)
	s := populate.Set{Seed: 7, N: 100, TTL: time.Hour}
	held := s.Request(50)
	held.Owner = "another"
	_, err := b.TryAcquire(ctx, held)
	require.NoError(t, err)
	var counts populate.Counts
	require.NoError(t, populate.Locks(ctx, b, s, 8, &counts))
	require.EqualValues(t, 99, counts.Granted())
	require.EqualValues(t, 1, counts.Held())
	require.EqualValues(t, 100, counts.Done())
	require.NoError(t, b.Close())
	err = populate.Locks(ctx, b, s, 1, &counts)
	require.ErrorIs(t, err, dlock.ErrClosed)
	require.ErrorContains(t, err, "lock 1 of 100")
	require.ErrorContains(t, populate.Locks(ctx, b, s, 0, &counts), "there must be one at least")
	cause := errors.New("enough")
	ended, cancel := context.WithCancelCause(ctx)
	cancel(cause)
	require.ErrorIs(t, populate.Locks(ended, b, s, 8, &counts), cause)
}

func TestWatchRedis(t *testing.T) {
	ctx, c := t.Context(), connect(t)
	server := populate.WatchRedis(ctx, c)
	defer server.Close()
	before, err := server.Sample(ctx)
	require.NoError(t, err)
	require.Zero(t, before.Redis.Keys)
	require.Positive(t, before.Redis.UsedMemory)
	require.Positive(t, before.Redis.UsedMemoryRSS)
	require.Positive(t, before.Redis.Fragmentation)
	b, err := redislock.New(c, nil)
	require.NoError(t, err)
	require.NoError(t, populate.Locks(ctx, b, populate.Set{N: 500, TTL: time.Hour}, 8, &populate.Counts{}))
	require.NoError(t, b.Close())
	require.EventuallyWithT(t, func(t *assert.CollectT) {
		sample, err := server.Sample(ctx)
		require.NoError(t, err)
		s := sample.Redis
		require.Equal(t, []uint64{1000, 500}, []uint64{s.Keys, s.Expires})
		require.Greater(t, s.UsedMemory, before.Redis.UsedMemory)
		require.Positive(t, s.Count)
		require.Positive(t, int64(s.PingP50))
		require.GreaterOrEqual(t, s.PingMax, s.PingP50)
	}, time.Minute, 20*time.Millisecond)
}
