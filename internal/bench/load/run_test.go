package load

import (
	"context"
	"math"
	"math/rand/v2"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/stretchr/testify/require"
)

func TestFIFO(t *testing.T) {
	res := simulate(t, closed(10, 10*ms), &fake{})
	require.InDelta(t, 1000, res.Sections, 1) // one in 10 ms
	require.InDelta(t, 100, res.SectionsPerS, 0.1)
	require.InDelta(t, 90, res.Wait.P50, 1) // for nine others
	require.InDelta(t, 90, res.Wait.Max, 1)
	require.InDelta(t, 10, res.Hold.P50, 0.1)
	require.Zero(t, res.Order.Inversions)
	require.Equal(t, "token", res.Order.By)
	require.InDelta(t, 1, res.Share.Jain, 1e-4)
	require.Len(t, res.Share.Counts, 10)
	require.Zero(t, res.Share.Without)
	require.EqualValues(t, 9, res.Unserved.Count)
	require.Contains(t, []int64{9, 10}, res.MaxWaiting) // briefly ten, if the old holder is back before the next is told
	require.Len(t, res.Samples, 100)
	require.Zero(t, res.Checks)
	require.False(t, res.Cut)
}

func TestHandOff(t *testing.T) {
	res := simulate(t, closed(10, 10*ms), &fake{handOff: func(int64) time.Duration { return 90 * ms }})
	require.InDelta(t, 100, res.Sections, 1)
	require.InDelta(t, 990, res.Wait.P50, 1)
	require.EqualValues(t, 10, res.Unserved.Count)
}

// Two contenders pass the lock to each other, and the others starve.
func TestLIFO(t *testing.T) {
	res := simulate(t, closed(10, 10*ms), &fake{serve: func(n int) int { return n - 1 }})
	require.InDelta(t, 1000, res.Sections, 1)
	require.InDelta(t, 0.2, res.Share.Jain, 0.001) // two of ten have it all
	require.Equal(t, 8, res.Share.Starved)
	require.Equal(t, 8, res.Share.Without)
	require.InDelta(t, 8*1000, res.Order.Inversions, 100) // each section overtakes each of the eight
	require.InDelta(t, 10, res.Wait.Max, 1)
	require.Greater(t, res.Unserved.Max, 10_000.0) // the starvation shows only here
}

// The longest waiter is passed over while others wait.
func TestOneStarved(t *testing.T) {
	res := simulate(t, closed(10, 10*ms), &fake{serve: func(n int) int { return min(1, n-1) }})
	require.Equal(t, 1, res.Share.Starved)
	require.Equal(t, 1, res.Share.Without)
	require.InDelta(t, 0.9, res.Share.Jain, 0.001)
	require.InDelta(t, 1000, res.Order.Max, 5)
	require.EqualValues(t, 1, res.Order.Reordered)
}

func TestServedBefore(t *testing.T) {
	served := 0
	res := simulate(t, closed(10, 10*ms), &fake{serve: func(n int) int {
		if served++; served < 500 {
			return 0
		}
		return n - 1
	}})
	require.Greater(t, res.Order.Max, int64(100))
	require.Zero(t, res.Share.Starved)
}

func TestTooShort(t *testing.T) {
	c := closed(100, time.Second)
	res := simulate(t, c, &fake{})
	require.InDelta(t, 10, res.Sections, 1)
	require.GreaterOrEqual(t, res.Share.Without, 89)
	require.Zero(t, res.Share.Starved)
}

func arrivalsAt(rate float64, work time.Duration) Config {
	c := closed(100, work)
	c.Connections, c.Rate = 1, rate
	return c
}

func even(t *testing.T) {
	t.Helper()
	poisson := gap
	gap = func(*rand.Rand) float64 { return 1 }
	t.Cleanup(func() { gap = poisson })
}

// The lock stalls for a second, and all that arrive meanwhile wait. Coordinated omission would record one wait of a second and
// ten thousand short ones.
func TestStall(t *testing.T) {
	even(t)
	for _, contenders := range []int{1, 1200} { // even without a free contender
		c := arrivalsAt(1000, 0)
		c.Contenders = contenders
		res := simulate(t, c, &fake{handOff: func(granted int64) time.Duration {
			if granted == 3000 { // 1,995 ms into the window
				return time.Second
			}
			return 0
		}})
		require.InDelta(t, 10_000, res.Sections, 2)
		require.InDelta(t, 10_000, res.Arrivals, 2)
		require.InDelta(t, 0, res.Wait.P50, 0.001)
		require.InDelta(t, 900, res.Wait.P99, 5) // of 10,000 a thousand wait for 1 s to 0 s
		require.InDelta(t, 990, res.Wait.P999, 5)
		require.InDelta(t, 1000, res.Wait.Max, 1)
		require.InDelta(t, 100, res.Wait.Mean*res.SectionsPerS/500, 1) // ∑ = 1000 × 1 s / 2
		require.InDelta(t, 1000, res.MaxWaiting, 2)
		require.Zero(t, res.Unserved.Count)
		require.Zero(t, res.Order.Inversions)
		require.InDelta(t, 0, res.Pacer.Max, 0.001)
		require.Equal(t, res.Arrivals, res.Pacer.Count)
		require.InDelta(t, 0, res.Samples[10].Waiting, 1)
		require.InDelta(t, 505, res.Samples[24].Waiting, 2) // the queue grows: 2.5 s
	}
}

func TestOverload(t *testing.T) {
	even(t)
	for _, contenders := range []int{100, 6000} {
		c := arrivalsAt(1000, 2*ms)
		c.Contenders = contenders
		res := simulate(t, c, &fake{})
		require.InDelta(t, 5000, res.Sections, 2)
		require.InDelta(t, 10_000, res.Arrivals, 2)
		require.InDelta(t, 503, res.BacklogStart, 3)
		require.InDelta(t, 5503, res.Unserved.Count, 3)
		require.InDelta(t, 5503, res.MaxWaiting, 3)
		require.InDelta(t, max(0, 5503-contenders), res.Unstarted, 3)
		require.InDelta(t, 5500, res.Unserved.Max, 15) // of those who came first
		require.InDelta(t, 3000, res.Samples[49].Waiting, 5)
		require.Zero(t, res.Share)
	}
}

func TestArrivals(t *testing.T) {
	c := arrivalsAt(1000, 0)
	first, again := simulate(t, c, &fake{}), simulate(t, c, &fake{})
	require.InDelta(t, 10_000, first.Arrivals, 300) // 3 standard deviations of a Poisson process
	require.Equal(t, sections(first), sections(again))
	c.Seed = 2
	require.NotEqual(t, sections(first), sections(simulate(t, c, &fake{})))

	var sum, squares float64 // the variance of a Poisson process's counts is their mean
	for _, s := range first.Samples {
		sum += float64(s.Sections)
		squares += float64(s.Sections) * float64(s.Sections)
	}
	mean := sum / float64(len(first.Samples))
	require.InDelta(t, 1, (squares/float64(len(first.Samples))-mean*mean)/mean, 0.4)
}

func sections(r *Result) (all []int64) {
	for _, s := range r.Samples {
		all = append(all, s.Sections)
	}
	return all
}

func TestKeys(t *testing.T) {
	c := arrivalsAt(1000, 0)
	c.Keys, c.Prefix = 10, "key/"
	f := &fake{}
	simulate(t, c, f)
	require.Len(t, f.taken, 10)
	for _, n := range f.taken {
		require.InDelta(t, 1100, n, 150)
	}
}

func TestChecks(t *testing.T) {
	res := simulate(t, closed(10, 10*ms), &fake{token: func(int64) uint64 { return 7 }})
	require.InDelta(t, 1100, res.Checks.TokenRegressions, 5)
	require.Zero(t, res.Checks.Overlaps)

	res = simulate(t, closed(2, 7*ms), &fake{open: true}) // they begin 250 ms apart, which is 5 ms into a section
	require.InDelta(t, 2*10_750/7, res.Checks.Overlaps, 5)
	require.Zero(t, res.Checks.Late)

	res = simulate(t, closed(2, 7*ms), &fake{open: true, lost: true})
	require.Zero(t, res.Checks.Overlaps, "they have been told")
	require.InDelta(t, 2*10_750/7, res.Checks.Late, 5)

	res = simulate(t, closed(10, 10*ms), &fake{token: func(int64) uint64 { return 0 }})
	require.Zero(t, res.Checks)
	require.Equal(t, "grant", res.Order.By)
	require.Zero(t, res.Order.Inversions)
}

// A wait that ends in an error is only a lower bound.
func TestFailures(t *testing.T) {
	res := simulate(t, closed(1, 10*ms), &fake{fail: func(asked int64) error {
		if asked%3 == 0 {
			time.Sleep(50 * ms)
			return errBroken
		}
		return nil
	}})
	require.InDelta(t, 250, res.Sections, 2) // two sections, the failure and a pause of 10 ms take 80 ms
	require.InDelta(t, 125, res.Failed, 2)
	require.InDelta(t, 50, res.FailedAfter.Min, 0.1)
	require.InDelta(t, 50, res.FailedAfter.Max, 0.1)
	require.InDelta(t, 137, res.Errors["acquire: other"].Count, 2)
	require.Equal(t, "broken", res.Errors["acquire: other"].Example)
	require.Len(t, res.Errors, 1)
}

func TestCutShort(t *testing.T) {
	for at, begun := range map[time.Duration]bool{500 * ms: false, 3505 * ms: true} {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(at, func() { cancel(errBroken) })
			f := &fake{}
			res, err := Run(ctx, closed(10, 10*ms), f.client, Options{})
			require.Equal(t, 10, f.closed)
			if !begun {
				require.ErrorIs(t, err, errBroken)
				return
			}
			require.NoError(t, err)
			require.True(t, res.Cut)
			require.InDelta(t, 2.4995, res.Seconds, 1e-9)
			require.InDelta(t, 250, res.Sections, 1)
			require.InDelta(t, 100, res.SectionsPerS, 1)
		})
	}
}

func TestOpenFails(t *testing.T) {
	f := &fake{}
	n := 0
	_, err := Run(t.Context(), closed(5, 0), func(ctx context.Context) (Lock, error) {
		f.mu.Lock()
		n++
		last := n == 5
		f.mu.Unlock()
		if last {
			return Lock{}, errBroken
		}
		return f.client(ctx)
	}, Options{})
	require.ErrorIs(t, err, errBroken)
	require.Equal(t, 4, f.closed)
}

func TestCheck(t *testing.T) {
	for want, spoil := range map[string]func(c *Config){
		"0 contenders":         func(c *Config) { c.Contenders = 0 },
		"11 connections":       func(c *Config) { c.Connections = 11 },
		"no keys":              func(c *Config) { c.Keys = 0 },
		"a rate of -1":         func(c *Config) { c.Rate = -1 },
		"a rate of NaN":        func(c *Config) { c.Rate = math.NaN() },
		"a rate of +Inf":       func(c *Config) { c.Rate = math.Inf(1) },
		"must not be negative": func(c *Config) { c.Work = -1 },
		"a duration of 0s and": func(c *Config) { c.Duration = 0 },
		"and a TTL of 0s":      func(c *Config) { c.TTL = 0 },
	} {
		c := closed(10, 0)
		require.NoError(t, c.Check())
		spoil(&c)
		_, err := Run(t.Context(), c, nil, Options{})
		require.ErrorContains(t, err, want)
	}
}

func TestMetrics(t *testing.T) {
	reg := prometheus.NewRegistry()
	synctest.Test(t, func(t *testing.T) {
		_, err := Run(t.Context(), closed(10, 10*ms), (&fake{}).client, Options{Registerer: reg})
		require.NoError(t, err)
	})
	all, err := reg.Gather()
	require.NoError(t, err)
	got := map[string]float64{}
	for _, f := range all {
		m := f.GetMetric()[0]
		got[f.GetName()] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		if h := m.GetHistogram(); h != nil && h.GetSampleCount() > 0 {
			require.NotNil(t, h.Schema, "%s is no native histogram", f.GetName())
			require.NotEmpty(t, h.GetPositiveSpan(), f.GetName())
		}
	}
	require.InDelta(t, 1100, got["contend_sections_total"], 2)
	require.InDelta(t, 1100, got["contend_wait_seconds"], 2)
	require.InDelta(t, 1110, got["contend_arrivals_total"], 2)
	require.Zero(t, got["contend_waiting"])
}

// A load that stalls at the end has still offered what was due.
func TestDueBeforeTheEndNotedAfterIt(t *testing.T) {
	begin := time.Now()
	end := begin.Add(time.Second)
	r := newRecorder(1, newMetrics(nil))
	r.begin(begin)
	r.sample(end, true)
	for _, due := range []time.Time{begin.Add(time.Second / 4), end.Add(-time.Millisecond), end, end.Add(time.Second)} {
		require.Equal(t, due.Before(end), r.offer(due, 0))
	}
	res := r.result()
	require.EqualValues(t, 2, res.Arrivals)
	require.EqualValues(t, 2, res.Unstarted)
	require.EqualValues(t, 2, res.Unserved.Count)
	require.InDelta(t, 750, res.Unserved.Max, 1)
}
