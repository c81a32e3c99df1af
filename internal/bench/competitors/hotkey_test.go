package competitors_test

import (
	"context"
	"fmt"
	"math"
	"os"
	"testing"
	"time"

	hdr "github.com/HdrHistogram/hdrhistogram-go"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/bench/competitors"
	"github.com/fencelab/fencelab/internal/bench/load"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// BenchmarkHotKey has contenders with a client each take one lock over and over, for two seconds, b.N times. It reports
// critical sections per second, waits in ms, Jain's index, and per run how many still waited at the end and how many
// starved. The former count in the waits: where unserved isn't 0 a wait may be longer. To compare two versions:
//
//	go test ./internal/bench/competitors -run '^$' -bench 'HotKey/lock=redis/' -count 10 >old.txt    # and new.txt
//	benchstat old.txt new.txt
func BenchmarkHotKey(b *testing.B) {
	started := map[string]*competitors.Servers{}
	b.Cleanup(func() {
		for _, s := range started {
			require.NoError(b, s.Close())
		}
	})
	for _, lock := range competitors.Names() {
		service := competitors.Service(lock)
		for _, contenders := range []int{50, 200} {
			b.Run(fmt.Sprintf("lock=%s/contenders=%d", lock, contenders), func(b *testing.B) {
				s := started[service]
				if s == nil {
					var err error
					s, err = competitors.Start(context.WithoutCancel(b.Context()), service, competitors.ServerSpec{}, &testbed.Options{Progress: os.Stderr})
					require.NoError(b, err)
					started[service] = s
				}
				hotKey(b, lock, s, contenders)
			})
		}
	}
}

func hotKey(b *testing.B, lock string, s *competitors.Servers, contenders int) {
	b.Helper()
	var all []*load.Result
	for b.Loop() {
		c := load.Config{
			Backend: lock, Contenders: contenders, Connections: contenders, Keys: 1, TTL: load.Duration(10 * time.Second),
			Warmup: load.Duration(time.Second), Duration: load.Duration(2 * time.Second),
			Prefix: fmt.Sprintf("bench-%d-%d/", time.Now().UnixNano(), len(all)), // nobody's leftovers are in the way
		}
		switch lock {
		case "postgres":
			c.Connections = 8 // each a pool; the server's connections are processes
		case competitors.RedisShared, competitors.EtcdShared:
			c.Connections = 1 // one process
		}
		r, err := load.Run(b.Context(), c, func(ctx context.Context) (load.Lock, error) {
			return competitors.Open(ctx, competitors.Spec{Lock: lock, Addrs: s.Addrs, TTL: c.TTL.D()})
		}, nil)
		require.NoError(b, err)
		require.Zero(b, r.Checks)
		all = append(all, r)
	}
	metrics, err := hotKeyMetrics(all)
	require.NoError(b, err)
	b.ReportMetric(0, "ns/op") // of no use: the time is given
	for unit, v := range metrics {
		b.ReportMetric(v, unit)
	}
}

// hotKeyMetrics is by unit.
func hotKeyMetrics(all []*load.Result) (map[string]float64, error) {
	runs := float64(len(all))
	var jain, seconds float64
	for _, r := range all {
		jain += r.Share.Jain / runs
		seconds += r.Seconds
	}
	sum, err := load.Merge(all) // distributions and counts; the seconds are those of one
	if err != nil {
		return nil, err
	}
	waits, err := load.Estimate(sum)
	if err != nil {
		return nil, err
	}
	metrics := map[string]float64{
		"sections/s": float64(sum.Sections) / seconds, "jain": jain,
		"unserved": float64(sum.Unserved.Count) / runs, "starved": float64(sum.Share.Starved) / runs,
	}
	for unit, q := range map[string]float64{"p50-ms": 0.5, "p99-ms": 0.99, "p999-ms": 0.999} {
		if x := waits.Quantile(q); !math.IsNaN(x.Millis) { // else there are too few to tell
			metrics[unit] = x.Millis
		}
	}
	return metrics, nil
}

// TestHotKeyMetrics: a lock that leaves most contenders waiting doesn't look fast.
func TestHotKeyMetrics(t *testing.T) {
	latency := func(d time.Duration, n int64) load.Latency {
		h := hdr.New(100, int64(time.Hour), 3)
		require.NoError(t, h.RecordValues(int64(d), n))
		b, err := h.Encode(hdr.V2CompressedEncodingCookieBase)
		require.NoError(t, err)
		return load.Latency{Count: n, HDR: string(b)}
	}
	r := &load.Result{
		Sections: 400, Seconds: 2, Wait: latency(time.Millisecond, 400), Unserved: latency(2*time.Second, 600),
		Share: load.Share{Starved: 6, Counts: []int64{400, 0}},
	}
	got, err := hotKeyMetrics([]*load.Result{r, r})
	require.NoError(t, err)
	for unit, want := range map[string]float64{
		"sections/s": 200, "unserved": 600, "starved": 6, "p50-ms": 2000, "p99-ms": 2000, "p999-ms": 2000,
	} {
		require.InEpsilon(t, want, got[unit], 0.001, unit)
	}
	few := &load.Result{Sections: 99, Seconds: 2, Wait: latency(time.Millisecond, 99)}
	got, err = hotKeyMetrics([]*load.Result{few})
	require.NoError(t, err)
	require.NotContains(t, got, "p99-ms")
	require.Contains(t, got, "p50-ms")
}
