package bench

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/fencelab/fencelab/internal/bench/load"
)

// Progress returns a function that writes a line to w for each second of samples.
func Progress(w io.Writer) func(load.Sample) {
	var acc load.Sample
	return func(s load.Sample) {
		acc.Sections, acc.Failed = acc.Sections+s.Sections, acc.Failed+s.Failed
		acc.P50, acc.P99 = max(acc.P50, s.P50), max(acc.P99, s.P99)
		if s.T-acc.T < 0.95 {
			return
		}
		_, _ = fmt.Fprintf(w, "%4.0f s  %8.0f sections/s  wait p50 %s p99 %s  waiting %d  failed %d\n", s.T,
			float64(acc.Sections)/(s.T-acc.T), millis(acc.P50), millis(acc.P99), s.Waiting, acc.Failed)
		acc = load.Sample{T: s.T}
	}
}

func millis(ms float64) string {
	switch {
	case ms >= 1000:
		return fmt.Sprintf("%.2f s", ms/1000)
	case ms >= 100:
		return fmt.Sprintf("%.0f ms", ms)
	case ms >= 1:
		return fmt.Sprintf("%.1f ms", ms)
	}
	return fmt.Sprintf("%.3f ms", ms)
}

// Summary is a result as text.
func Summary(r *load.Result) string {
	var b strings.Builder
	c := r.Config
	model, keys := "closed model", "a hot key"
	if c.Rate > 0 {
		model = fmt.Sprintf("%g arrivals/s", c.Rate)
	}
	if c.Keys > 1 {
		keys = fmt.Sprintf("%d keys", c.Keys)
	}
	fmt.Fprintf(&b, "%s (%s): %s, %d contenders on %d connections, %s, work %v, TTL %v\n",
		c.Backend, cmp.Or(r.Machine.Server, "server unknown"), model, c.Contenders, c.Connections, keys, c.Work, c.TTL)
	fmt.Fprintf(&b, "  sections   %d in %.1f s: %.0f per second; %d failed\n", r.Sections, r.Seconds, r.SectionsPerS, r.Failed)
	latency := func(name string, l load.Latency) {
		if l.Count > 0 {
			fmt.Fprintf(&b, "  %-9s  p50 %s  p90 %s  p99 %s  p999 %s  max %s\n", name, millis(l.P50), millis(l.P90), millis(l.P99), millis(l.P999), millis(l.Max))
		}
	}
	if n := r.Wait.Count + r.Unserved.Count + r.FailedAfter.Count; n > 0 {
		fmt.Fprintf(&b, "  wait       %s\n", waits(r, 0.5, 0.9, 0.99, 0.999, 1))
	}
	latency("hold", r.Hold)
	latency("release", r.Release)
	if r.Unserved.Count > 0 {
		fmt.Fprintf(&b, "  unserved   %d still waited at the end, for %s at most; for %d of them no contender was ever free\n",
			r.Unserved.Count, millis(r.Unserved.Max), r.Unstarted)
	}
	fmt.Fprintf(&b, "  waiting    %d at most\n", r.MaxWaiting)
	latency("pacer late", r.Pacer)
	if c.Keys == 1 && c.Backend != ping {
		fmt.Fprintf(&b, "  order      by %s: overtaken %.2f times on average, p99 %d, max %d\n", r.Order.By, r.Order.Mean, r.Order.P99, r.Order.Max)
	}
	if c.Rate == 0 {
		fmt.Fprintf(&b, "  share      Jain %.4f, %d to %d sections each, %d contenders without, %d starved\n",
			r.Share.Jain, r.Share.Min, r.Share.Max, r.Share.Without, r.Share.Starved)
	}
	if c.Backend != ping {
		fmt.Fprintf(&b, "  checks     %d overlaps, %d token regressions, %d grants after a lease's end\n",
			r.Checks.Overlaps, r.Checks.TokenRegressions, r.Checks.Late)
	}
	for _, kind := range slices.Sorted(maps.Keys(r.Errors)) {
		fmt.Fprintf(&b, "  error      %s, %d times, first: %s\n", kind, r.Errors[kind].Count, r.Errors[kind].Example)
	}
	return b.String()
}

// waits formats quantiles of all waits, including unserved ones; 1 is the longest.
func waits(r *load.Result, quantiles ...float64) string {
	w, err := load.Estimate(r)
	if err != nil {
		return fmt.Sprintf("unknown: %v", err)
	}
	var words []string
	for _, q := range quantiles {
		name, x := "max", w.Max()
		if q < 1 {
			name, x = "p"+strings.ReplaceAll(fmt.Sprint(100*q), ".", ""), w.Quantile(q)
		}
		switch {
		case math.IsNaN(x.Millis):
			words = append(words, name+" unknown")
		case x.Longer:
			words = append(words, name+" > "+millis(x.Millis))
		default:
			words = append(words, name+" "+millis(x.Millis))
		}
	}
	return strings.Join(words, "  ")
}

// Broken returns an error if the lock didn't exclude, or its tokens didn't increase.
func Broken(res *load.Result) error {
	switch c := res.Checks; {
	case c.Overlaps > 0:
		return fmt.Errorf("contend: %s granted a key %d times while its holder was at work and its lease not known to have ended: "+
			"set a -ttl that is longer than the -work and every stall, or don't trust it", res.Config.Backend, c.Overlaps)
	case c.TokenRegressions > 0:
		return fmt.Errorf("contend: %s granted %d tokens that were not greater than the one before", res.Config.Backend, c.TokenRegressions)
	}
	return nil
}

// Idle returns an error if nothing was granted and something failed.
func Idle(res *load.Result) error {
	if res.Sections == 0 && res.Failed > 0 {
		for kind, e := range res.Errors {
			return fmt.Errorf("contend: no acquisition was granted, and %d failed (%s): %s", res.Failed, kind, e.Example)
		}
	}
	return nil
}
