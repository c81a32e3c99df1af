package fill_test

import (
	"context"
	"errors"
	"os"
	"os/exec"
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
	"github.com/fencelab/fencelab/internal/fill"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

var server *testbed.Server

func TestMain(m *testing.M) { testmain.Run(m, testmain.Server(&server, testbed.StartRedis, nil)) }

// connect returns a client of the server, which it empties.
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

// The tests don't empty a Redis that is the user's.
func TestExternal(t *testing.T) {
	c := connect(t)
	require.NoError(t, c.Set(t.Context(), "a user's key", "x", 0).Err())
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.v", "-test.run=^(TestRedis|TestRedisErrors)$")
	cmd.Env = append(os.Environ(), testbed.EnvProvider+"="+string(testbed.External), testbed.EnvRedisAddr+"="+server.Addr)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Equal(t, 2, strings.Count(string(out), "not applicable to an external server"), "%s", out)
	require.Equal(t, "x", c.Get(t.Context(), "a user's key").Val())
}

// TestSet is a golden test: data that was recorded with a seed is of no use once the seed means other keys.
func TestSet(t *testing.T) {
	s := fill.Set{Seed: 1}
	require.Equal(t, "gen/7ab40e090f363a7d", s.Key(0))
	require.Equal(t, "gen/bfef8030ddc2d772", s.Key(1))
	require.Equal(t, "445018e3-0581-4b78-9dc2-0aa7b2a27137", s.Owner(0))
	require.NotEqual(t, s.Key(0), fill.Set{Seed: 2}.Key(0))
	keys, owners := map[string]bool{}, map[string]bool{}
	const n = 100_000
	for i := range uint64(n) {
		keys[s.Key(i)], owners[s.Owner(i)] = true, true
	}
	require.Len(t, keys, n)
	require.Len(t, owners, n)
	for i := range uint64(100) {
		id, err := uuid.Parse(s.Owner(i))
		require.NoError(t, err)
		require.Equal(t, uuid.Version(4), id.Version())
		require.Equal(t, uuid.RFC4122, id.Variant())
	}
}

// TestRedis holds what the pipeline has made against what redislock says of it.
func TestRedis(t *testing.T) {
	ctx, c := t.Context(), connect(t)
	opts := &redislock.Options{Prefix: "p:"}
	s := fill.Set{Seed: 7, N: 1000, TTL: time.Hour}
	b, err := redislock.New(c, opts)
	require.NoError(t, err)
	_, err = b.TryAcquire(ctx, dlock.Request{Key: s.Key(999), Owner: "another", TTL: time.Hour})
	require.NoError(t, err)

	var counts fill.Counts
	require.NoError(t, fill.Redis(ctx, c, opts, s, fill.Pipeline{Conns: 3, Batch: 64}, &counts))
	require.EqualValues(t, 999, counts.Granted())
	require.EqualValues(t, 1, counts.Held())
	require.EqualValues(t, 2000, c.DBSize(ctx).Val(), "a lock and a counter for each")
	for i := range s.N - 1 {
		_, err := b.TryAcquire(ctx, dlock.Request{Key: s.Key(i), Owner: "another", TTL: time.Hour})
		require.ErrorIs(t, err, dlock.ErrHeld)
		require.NoError(t, b.Renew(ctx, dlock.Grant{Key: s.Key(i), Owner: s.Owner(i), TTL: time.Hour}))
	}

	counts = fill.Counts{}
	require.NoError(t, fill.Redis(ctx, c, opts, s, fill.Pipeline{}, &counts), "again")
	require.EqualValues(t, 999, counts.Granted())
	require.EqualValues(t, 2000, c.DBSize(ctx).Val())
	for i := range s.N - 1 {
		require.NoError(t, b.Release(ctx, dlock.Grant{Key: s.Key(i), Owner: s.Owner(i)}), "its owner has it still")
		g, err := b.TryAcquire(ctx, dlock.Request{Key: s.Key(i), Owner: "another", TTL: time.Hour})
		require.NoError(t, err)
		require.EqualValues(t, 2, g.Fence, "the second fill minted no token")
	}
}

func TestRedisErrors(t *testing.T) {
	ctx, c := t.Context(), connect(t)
	s := fill.Set{N: 10, TTL: time.Second}
	var counts fill.Counts
	require.ErrorContains(t, fill.Redis(ctx, c, nil, s, fill.Pipeline{Conns: -1}, &counts), "want 1 at least")
	require.ErrorIs(t, fill.Redis(ctx, c, nil, fill.Set{N: 10, TTL: time.Microsecond}, fill.Pipeline{}, &counts), dlock.ErrInvalid)
	require.ErrorIs(t, fill.Redis(ctx, c, &redislock.Options{Prefix: "{"}, s, fill.Pipeline{}, &counts), dlock.ErrInvalid)
	require.NoError(t, c.Set(ctx, "fence:{"+s.Key(3)+"}", "no number", 0).Err())
	require.ErrorContains(t, fill.Redis(ctx, c, nil, s, fill.Pipeline{Batch: 2}, &counts), "locks 3 to 4 of 10")
	cause := errors.New("enough")
	ended, cancel := context.WithCancelCause(ctx)
	cancel(cause)
	require.Error(t, fill.Redis(ended, c, nil, s, fill.Pipeline{}, &counts))
}

func TestLocks(t *testing.T) {
	ctx := t.Context()
	b := memlock.New(nil)
	s := fill.Set{Seed: 7, N: 100, TTL: time.Hour}
	_, err := b.TryAcquire(ctx, dlock.Request{Key: s.Key(50), Owner: "another", TTL: time.Hour})
	require.NoError(t, err)
	var counts fill.Counts
	require.NoError(t, fill.Locks(ctx, b, s, 8, &counts))
	require.EqualValues(t, 99, counts.Granted())
	require.EqualValues(t, 1, counts.Held())
	require.EqualValues(t, 100, counts.Done())
	require.NoError(t, b.Close())
	require.ErrorIs(t, fill.Locks(ctx, b, s, 8, &counts), dlock.ErrClosed)
}

func TestRedisSampler(t *testing.T) {
	ctx, c := t.Context(), connect(t)
	sampler := fill.NewRedisSampler(ctx, c)
	defer sampler.Close()
	before, err := sampler.Sample(ctx)
	require.NoError(t, err)
	require.Zero(t, before.Keys)
	require.Positive(t, before.UsedMemory)
	require.Positive(t, before.UsedMemoryRSS)
	require.Positive(t, before.Fragmentation)
	require.NoError(t, fill.Redis(ctx, c, nil, fill.Set{N: 500, TTL: time.Hour}, fill.Pipeline{}, &fill.Counts{}))
	require.EventuallyWithT(t, func(t *assert.CollectT) {
		s, err := sampler.Sample(ctx)
		require.NoError(t, err)
		require.Equal(t, []uint64{1000, 500}, []uint64{s.Keys, s.Expires})
		require.Greater(t, s.UsedMemory, before.UsedMemory)
		require.Positive(t, s.Count)
		require.Positive(t, int64(s.PingP50))
		require.GreaterOrEqual(t, s.PingMax, s.PingP50)
	}, time.Minute, 20*time.Millisecond)
}
