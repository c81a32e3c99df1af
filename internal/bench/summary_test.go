package bench

import (
	"testing"
	"time"

	hdr "github.com/HdrHistogram/hdrhistogram-go"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/bench/load"
)

func latency(t *testing.T, d time.Duration, n int64) load.Latency {
	t.Helper()
	h := hdr.New(100, int64(time.Hour), 3)
	require.NoError(t, h.RecordValues(int64(d), n))
	b, err := h.Encode(hdr.V2CompressedEncodingCookieBase)
	require.NoError(t, err)
	return load.Latency{Count: n, HDR: string(b)}
}

func TestSummaryWaits(t *testing.T) {
	res := &load.Result{Wait: latency(t, time.Millisecond, 950), Unserved: latency(t, 900*time.Millisecond, 30), FailedAfter: latency(t, 900*time.Millisecond, 20)}
	require.Contains(t, Summary(res), "\n  wait       p50 1.0 ms  p90 1.0 ms  p99 > 900 ms  p999 > 900 ms  max > 900 ms\n")
	res = &load.Result{Wait: latency(t, time.Millisecond, 350)}
	require.Contains(t, Summary(res), "\n  wait       p50 1.0 ms  p90 1.0 ms  p99 1.0 ms  p999 unknown  max 1.0 ms\n")
	res = &load.Result{Unserved: latency(t, 2*time.Second, 30)}
	require.Contains(t, Summary(res), "\n  wait       p50 > 2.00 s  p90 > 2.00 s  p99 > 2.00 s  p999 > 2.00 s  max > 2.00 s\n")
	res.Unserved.HDR = "x"
	require.Contains(t, Summary(res), "\n  wait       unknown: load: a histogram can't be decoded")
	require.Equal(t, "p50 1.0 ms  p99 unknown  max 1.0 ms", waits(&load.Result{Wait: latency(t, time.Millisecond, 99)}, 0.5, 0.99, 1))
}

func TestSummary(t *testing.T) {
	res := &load.Result{Config: load.Config{Backend: "redis", Keys: 1, Rate: 200}, Pacer: load.Latency{Count: 1, P50: 2, Max: 150}}
	require.Regexp(t, `\n  pacer late +p50 2\.0 ms .* max 150 ms\n`, Summary(res))
	require.NotContains(t, Summary(res), "  wait  ")
	require.NotContains(t, Summary(res), "  share")
	require.NotContains(t, Summary(&load.Result{}), "  pacer late")
}

func TestBroken(t *testing.T) {
	require.NoError(t, Broken(&load.Result{}))
	require.ErrorContains(t, Broken(&load.Result{Checks: load.Checks{Overlaps: 2}}), "2 times")
	require.ErrorContains(t, Broken(&load.Result{Checks: load.Checks{TokenRegressions: 3}}), "3 tokens")
	require.NoError(t, Broken(&load.Result{Checks: load.Checks{Late: 1}}), "that is what fencing is for")
	require.ErrorContains(t, Idle(&load.Result{Failed: 2, Errors: map[string]load.Errors{"acquire: other": {Count: 2, Example: "no"}}}), "no")
	require.NoError(t, Idle(&load.Result{}))
}
