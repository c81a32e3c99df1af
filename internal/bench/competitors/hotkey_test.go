package competitors_test

import (
	"context"
	"fmt"
	"math"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/bench/competitors"
	"github.com/fencelab/fencelab/internal/bench/load"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// BenchmarkHotKey has contenders with a client each take one lock over and over, for two seconds. It reports the last run's
// critical sections per second, waits in ms, Jain's index, how many still waited at the end and how many starved. The former
// count in the waits: where unserved isn't 0 a wait may be longer. To compare two versions:
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
	var r *load.Result
	for b.Loop() {
		c := load.Config{
			Backend: lock, Contenders: contenders, Connections: contenders, Keys: 1, TTL: load.Duration(10 * time.Second),
			Warmup: load.Duration(time.Second), Duration: load.Duration(2 * time.Second),
			Prefix: fmt.Sprintf("bench-%d/", time.Now().UnixNano()), // nobody's leftovers are in the way
		}
		switch lock {
		case "postgres":
			c.Connections = 8 // each a pool; the server's connections are processes
		case competitors.RedisShared, competitors.EtcdShared:
			c.Connections = 1 // one process
		}
		var err error
		r, err = load.Run(b.Context(), c, func(ctx context.Context) (load.Lock, error) {
			return competitors.Open(ctx, competitors.Spec{Lock: lock, Addrs: s.Addrs, TTL: c.TTL.D()})
		}, nil)
		require.NoError(b, err)
		require.Zero(b, r.Checks)
	}
	waits, err := load.Estimate(r)
	require.NoError(b, err)
	b.ReportMetric(0, "ns/op") // of no use: the time is given
	b.ReportMetric(r.SectionsPerS, "sections/s")
	b.ReportMetric(r.Share.Jain, "jain")
	b.ReportMetric(float64(r.Unserved.Count), "unserved")
	b.ReportMetric(float64(r.Share.Starved), "starved")
	for unit, q := range map[string]float64{"p50-ms": 0.5, "p99-ms": 0.99, "p999-ms": 0.999} {
		if x := waits.Quantile(q); !math.IsNaN(x.Millis) { // else there are too few to tell
			b.ReportMetric(x.Millis, unit)
		}
	}
}
