package scenarios_test

import (
	"context"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/load"
	"github.com/fencelab/fencelab/internal/peers"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// BenchmarkHotKey has contenders with a client each take one lock over and over: every lock of this module, and others to
// compare. It measures for two seconds, b.N times, and reports sections per second, waits in milliseconds and
// Jain's fairness index. To compare two versions:
//
//	go test ./scenarios -run '^$' -bench 'HotKey/lock=redis/' -count 10 >old.txt    # and new.txt
//	benchstat old.txt new.txt
func BenchmarkHotKey(b *testing.B) {
	started := map[string]*peers.Servers{}
	b.Cleanup(func() {
		for _, s := range started {
			require.NoError(b, s.Close())
		}
	})
	for _, lock := range peers.Names() {
		service := peers.Service(lock)
		if *backend != "" && !slices.Contains(strings.Split(*backend, ","), service) {
			continue
		}
		for _, contenders := range []int{50, 200} {
			b.Run(fmt.Sprintf("lock=%s/contenders=%d", lock, contenders), func(b *testing.B) {
				s := started[service]
				if s == nil {
					var err error
					s, err = peers.Start(context.WithoutCancel(b.Context()), service, peers.ServerSpec{}, benchOptions(b))
					require.NoError(b, err)
					started[service] = s
				}
				hotKey(b, lock, s, contenders)
			})
		}
	}
}

func hotKey(b *testing.B, lock string, s *peers.Servers, contenders int) {
	b.Helper()
	var all []*load.Result
	for b.Loop() {
		c := load.Config{
			Backend: lock, Contenders: contenders, Connections: contenders, Keys: 1, TTL: load.Duration(10 * time.Second),
			Warmup: load.Duration(time.Second), Duration: load.Duration(2 * time.Second),
			Prefix: fmt.Sprintf("bench-%d-%d/", time.Now().UnixNano(), len(all)), // nobody's leftovers are in the way
		}
		if lock == "postgres" {
			c.Connections = 8 // each a pool; the server's connections are processes
		}
		r, err := load.Run(b.Context(), c, func(ctx context.Context) (load.Lock, error) {
			return peers.Open(ctx, peers.Spec{Lock: lock, Addrs: s.Addrs, TTL: c.TTL.D()})
		}, nil)
		require.NoError(b, err)
		require.Zero(b, r.Checks)
		all = append(all, r)
	}
	var jain, seconds float64
	for _, r := range all {
		jain += r.Share.Jain / float64(len(all))
		seconds += r.Seconds
	}
	sum, err := load.Merge(all) // distributions and counts; the seconds are those of one
	require.NoError(b, err)
	b.ReportMetric(0, "ns/op") // of no use: the time is given
	b.ReportMetric(float64(sum.Sections)/seconds, "sections/s")
	b.ReportMetric(sum.Wait.P50, "p50-ms")
	b.ReportMetric(sum.Wait.P99, "p99-ms")
	b.ReportMetric(sum.Wait.P999, "p999-ms")
	b.ReportMetric(jain, "jain")
}

func benchOptions(b *testing.B) *testbed.Options {
	b.Helper()
	o := &testbed.Options{Progress: os.Stderr}
	if *provider != "" {
		var err error
		o.Provider, err = testbed.ParseProvider(*provider)
		require.NoError(b, err)
	}
	return o
}
