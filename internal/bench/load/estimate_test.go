package load

import (
	"math"
	"slices"
	"testing"
	"time"

	hdr "github.com/HdrHistogram/hdrhistogram-go"
	"github.com/stretchr/testify/require"
)

func latency(t require.TestingT, times ...int64) Latency {
	if len(times) == 0 {
		return Latency{}
	}
	h := hdr.New(100, int64(time.Hour), 3)
	for _, v := range times {
		require.NoError(t, h.RecordValue(v*int64(ms)))
	}
	b, err := h.Encode(hdr.V2CompressedEncodingCookieBase)
	require.NoError(t, err)
	return Latency{Count: int64(len(times)), HDR: string(b)}
}

func estimate(t require.TestingT, served, unserved, failed []int64) Waits {
	w, err := Estimate(&Result{
		Wait: latency(t, served...), Unserved: latency(t, unserved...), FailedAfter: latency(t, failed...),
	})
	require.NoError(t, err)
	require.EqualValues(t, len(served)+len(unserved)+len(failed), w.Count)
	return w
}

func repeat(v int64, n int) []int64 { return slices.Repeat([]int64{v}, n) }

func TestEstimate(t *testing.T) {
	const unknown = -1
	longer := func(v float64) Quantile { return Quantile{Millis: v, Longer: true} }
	is := func(v float64) Quantile { return Quantile{Millis: v} }
	for name, c := range map[string]struct {
		served, unserved, failed []int64
		p50, p99, p999, most     Quantile
	}{
		"all served":                  {repeat(10, 1000), nil, nil, is(10), is(10), is(10), is(10)},
		"a line of the like":          {repeat(10, 1000), []int64{1, 2, 3, 4, 5, 6, 7, 8, 9}, nil, is(10), is(10), is(10), is(10)},
		"a few starve":                {repeat(1, 970), repeat(900, 30), nil, is(1), longer(900), longer(900), longer(900)},
		"a few fail":                  {repeat(1, 970), nil, repeat(900, 30), is(1), longer(900), longer(900), longer(900)},
		"most fail, and early":        {append(repeat(1, 100), repeat(50, 100)...), nil, repeat(2, 800), is(50), is(50), is(50), is(50)},
		"the longest is served":       {append(repeat(1, 970), 1000), repeat(900, 29), nil, is(1), is(1000), is(1000), is(1000)},
		"most starve":                 {repeat(1, 10), repeat(900, 30), nil, longer(900), longer(900), longer(900), longer(900)},
		"one waits for the rest":      {append(repeat(1, 998), 50, 60), nil, nil, is(1), is(1), is(50), is(60)},
		"cut off before the tail":     {append(repeat(1, 900), repeat(100, 50)...), repeat(10, 50), nil, is(1), is(100), is(100), is(100)},
		"some leave as one is served": {append(repeat(10, 501), 20), repeat(10, 500), nil, is(10), is(20), is(20), is(20)},
		"nobody was served":           {nil, repeat(900, 30), nil, longer(900), longer(900), longer(900), longer(900)},
		"nobody came":                 {nil, nil, nil, is(unknown), is(unknown), is(unknown), is(unknown)},
		"one too few":                 {repeat(10, 999), nil, nil, is(10), is(10), is(unknown), is(10)},
		"one of few starves":          {repeat(1, 349), []int64{900}, nil, is(1), is(1), is(unknown), longer(900)},
		"two of few starve":           {repeat(1, 348), []int64{900, 900}, nil, is(1), is(1), longer(900), longer(900)},
		"one came":                    {[]int64{5}, nil, nil, is(unknown), is(unknown), is(unknown), is(5)},
		"one waits":                   {nil, []int64{5}, nil, is(unknown), is(unknown), is(unknown), longer(5)},
	} {
		t.Run(name, func(t *testing.T) {
			w := estimate(t, c.served, c.unserved, c.failed)
			for _, q := range []struct {
				name      string
				got, want Quantile
			}{
				{"median", w.Quantile(0.5), c.p50},
				{"p99", w.Quantile(0.99), c.p99},
				{"p999", w.Quantile(0.999), c.p999},
				{"max", w.Max(), c.most},
			} {
				require.Equal(t, q.want.Longer, q.got.Longer, q.name)
				if q.want.Millis == unknown {
					require.True(t, math.IsNaN(q.got.Millis), "%s: got %v", q.name, q.got.Millis)
					continue
				}
				require.InEpsilon(t, q.want.Millis, q.got.Millis, 0.001, q.name)
			}
		})
	}
	_, err := Estimate(&Result{Wait: Latency{Count: 1, HDR: "x"}})
	require.ErrorContains(t, err, "a histogram can't be decoded")
}
