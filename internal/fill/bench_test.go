package fill_test

import (
	"encoding/csv"
	"fmt"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/fill"
)

// BenchmarkRedis fills a Redis in turns with redis-benchmark, which sends the same command on as many connections in
// batches of the same size, and reports the medians of both and their ratio. redis-benchmark's keys are as long as ours and
// random, its owner is always the same, and it reads no answers but to count them.
func BenchmarkRedis(b *testing.B) {
	path, err := exec.LookPath("redis-benchmark")
	if err != nil {
		b.Fatal("there is no redis-benchmark: sudo apt-get install redis-tools (Debian, Ubuntu) or brew install redis (macOS)")
	}
	const conns, batch, n = 4, 256, 200_000
	ctx, c := b.Context(), connect(b)
	s := fill.Set{Seed: 1, N: n, TTL: time.Hour}
	script, command, err := fill.Command(ctx, nil, s.Request(0))
	require.NoError(b, err)
	host, port, ok := strings.Cut(server.Addr, ":")
	require.True(b, ok, server.Addr)
	args := []string{
		"-h", host, "-p", port, "--csv", "-c", fmt.Sprint(conns), "-P", fmt.Sprint(batch), "-n", fmt.Sprint(n),
		"-r", fmt.Sprint(1<<31 - 1),
	}
	for _, a := range command {
		args = append(args, strings.ReplaceAll(fmt.Sprint(a), s.Key(0), "gen/0000__rand_int__"))
	}
	var tool, ours, ratio []float64
	for b.Loop() {
		prepare(b, c, script)
		out, err := exec.CommandContext(ctx, path, args...).Output()
		require.NoError(b, err, "%s", out)
		rows, err := csv.NewReader(strings.NewReader(string(out))).ReadAll()
		require.NoError(b, err, "%s", out)
		rate, err := strconv.ParseFloat(rows[len(rows)-1][1], 64) // "test","rps",...
		require.NoError(b, err, "%s", out)
		require.InDelta(b, 2*n, c.DBSize(ctx).Val(), n/100, "each command took a lock: %s", out)
		tool = append(tool, rate)

		prepare(b, c, script)
		began := time.Now()
		var counts fill.Counts
		require.NoError(b, fill.Redis(ctx, c, nil, s, fill.Pipeline{Conns: conns, Batch: batch}, &counts))
		ours = append(ours, fill.Rate(counts.Granted(), time.Since(began)))
		ratio = append(ratio, ours[len(ours)-1]/rate)
	}
	median := func(v []float64) float64 { slices.Sort(v); return v[len(v)/2] }
	b.ReportMetric(0, "ns/op") // of both together: of no use
	b.ReportMetric(median(tool), "redis-benchmark/s")
	b.ReportMetric(median(ours), "fill/s")
	b.ReportMetric(median(ratio), "x-redis-benchmark")
}

func prepare(b *testing.B, c *redis.Client, script string) {
	b.Helper()
	require.NoError(b, c.FlushAll(b.Context()).Err())
	require.NoError(b, c.ScriptLoad(b.Context(), script).Err())
}
