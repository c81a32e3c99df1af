package main

import (
	"cmp"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"strings"
	"sync"

	"github.com/fencelab/fencelab/internal/load"
)

// progress tells once a second what is going on: on a terminal in one line that is written over, else in lines.
type progress struct {
	w        io.Writer
	terminal bool

	mu   sync.Mutex
	acc  load.Sample // since the last line
	last float64     // T of it
	tag  string
}

func newProgress(w io.Writer, terminal bool) *progress { return &progress{w: w, terminal: terminal} }

func isTerminal(f *os.File) bool {
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

func (p *progress) sample(s load.Sample) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.acc.Sections += s.Sections
	p.acc.Failed += s.Failed
	p.acc.P50, p.acc.P99 = max(p.acc.P50, s.P50), max(p.acc.P99, s.P99)
	if s.T < p.last { // another run
		p.last = 0
	}
	if s.T-p.last < 0.95 {
		return
	}
	line := fmt.Sprintf("%s%4.0f s  %8.0f sections/s  wait p50 %s p99 %s  waiting %d", p.tag, s.T,
		float64(p.acc.Sections)/(s.T-p.last), millis(p.acc.P50), millis(p.acc.P99), s.Waiting)
	if p.acc.Failed > 0 {
		line += fmt.Sprintf("  failed %d", p.acc.Failed)
	}
	if p.terminal {
		_, _ = fmt.Fprintf(p.w, "\r\x1b[K%s", line)
	} else {
		_, _ = fmt.Fprintln(p.w, line)
	}
	p.acc, p.last = load.Sample{}, s.T
}

// done ends a line that was written over.
func (p *progress) done() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.terminal && p.last > 0 {
		_, _ = fmt.Fprint(p.w, "\r\x1b[K")
	}
	p.acc, p.last = load.Sample{}, 0
}

func (p *progress) printf(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, _ = fmt.Fprintf(p.w, format, args...)
}

// millis prints milliseconds with as many digits as they are worth.
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

// summary is a result for people.
func summary(r *load.Result) string {
	var b strings.Builder
	c := r.Config
	model := "closed model"
	if c.Rate > 0 {
		model = fmt.Sprintf("%g arrivals/s", c.Rate)
	}
	keys := "a hot key"
	if c.Keys > 1 {
		keys = fmt.Sprintf("%d keys", c.Keys)
	}
	fmt.Fprintf(&b, "%s (%s): %s, %d contenders on %d connections in %d processes, %s, work %v, TTL %v\n",
		c.Backend, cmp.Or(r.Machine.Server, "server unknown"), model, c.Contenders, c.Connections, c.Processes, keys, c.Work, c.TTL)
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
		fmt.Fprintf(&b, "  unserved   %d still waited at the end, for %s at most; %d of them had never been taken up\n",
			r.Unserved.Count, millis(r.Unserved.Max), r.Unstarted)
	}
	fmt.Fprintf(&b, "  waiting    %d at most\n", r.MaxWaiting)
	latency("pacer late", r.Pacer)
	if c.Keys == 1 && c.Backend != ping {
		if tooFew(c) {
			fmt.Fprintf(&b, "  order      unknown: a process sees who overtakes among its own contenders, which are fewer than %d\n", crowd)
		} else {
			fmt.Fprintf(&b, "  order      by %s: overtaken %.2f times on average, p99 %d, max %d%s\n", r.Order.By, r.Order.Mean, r.Order.P99, r.Order.Max, within(c))
		}
	}
	if c.Rate == 0 {
		fmt.Fprintf(&b, "  share      Jain %.4f, %d to %d sections each, %d contenders without, %s\n",
			r.Share.Jain, r.Share.Min, r.Share.Max, r.Share.Without, starved(r))
	}
	if c.Backend != ping {
		fmt.Fprintf(&b, "  checks     %d overlaps, %d token regressions, %d grants after a lease's end%s\n",
			r.Checks.Overlaps, r.Checks.TokenRegressions, r.Checks.Late, within(c))
	}
	kinds := make([]string, 0, len(r.Errors))
	for kind := range r.Errors {
		kinds = append(kinds, kind)
	}
	slices.Sort(kinds)
	for _, kind := range kinds {
		fmt.Fprintf(&b, "  error      %s, %d times, first: %s\n", kind, r.Errors[kind].Count, r.Errors[kind].Example)
	}
	return b.String()
}

// waits are quantiles of the waits of all, those who weren't served among them; 1 is the longest wait.
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

// crowd is how many contenders a process must have for it to tell who overtakes and who starves. It sees its own alone: of
// one that is by itself none is ever overtaken, whatever the lock does.
const crowd = 10

// tooFew reports whether the processes of c have too few contenders each to tell.
func tooFew(c load.Config) bool { return c.Processes > 1 && c.Contenders/c.Processes < crowd }

// within says of what a process sees that there are others.
func within(c load.Config) string {
	if c.Processes > 1 {
		return ", within each process"
	}
	return ""
}

// starved is how many contenders starved.
func starved(r *load.Result) string {
	if tooFew(r.Config) {
		return "starved unknown"
	}
	return fmt.Sprintf("%d starved%s", r.Share.Starved, within(r.Config))
}
