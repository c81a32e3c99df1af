package site

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/fencelab/fencelab/internal/bench/load"
)

type run struct {
	*load.Result
	waits  waits
	rounds runs // the runs of the same config, this one included, by round; set by medians
}

// In recorded order.
type runs []*run

func decodeRuns(data []byte) (runs, error) {
	var all runs
	seen := map[load.Config]bool{}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	for {
		r := &run{Result: &load.Result{}}
		err := dec.Decode(r.Result)
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("run %d: %w", len(all)+1, err)
		}
		if r.Seconds <= 0 {
			return nil, fmt.Errorf("run %d (%s): it lasted no time: record it again", len(all)+1, r.Config.Backend)
		}
		if seen[r.Config] {
			return nil, fmt.Errorf("run %d is of the same config as one before it: each is recorded once", len(all)+1)
		}
		seen[r.Config] = true
		if r.waits.Waits, err = load.Estimate(r.Result); err != nil {
			return nil, fmt.Errorf("run %d (%s): %w", len(all)+1, r.Config.Backend, err)
		}
		all = append(all, r)
	}
	if len(all) == 0 {
		return nil, errors.New("there are no runs in it")
	}
	return all, nil
}

// medians are one run of each config, with its rounds: the one with the median throughput, or in the open model, where
// throughput is what was offered, with the median p99. Of two in the middle it is the worse.
func (all runs) medians() (runs, error) {
	var configs []load.Config
	rounds := map[load.Config]runs{}
	for _, r := range all {
		c := r.Config
		c.Round = 0
		if rounds[c] == nil {
			configs = append(configs, c)
		}
		rounds[c] = append(rounds[c], r)
	}
	var medians runs
	for _, c := range configs {
		some, first := rounds[c], rounds[configs[0]]
		slices.SortStableFunc(some, func(a, b *run) int { return cmp.Compare(a.Config.Round, b.Config.Round) })
		if len(some) != len(first) {
			return nil, fmt.Errorf("there are %d rounds of %s with %d contenders and %d of %s with %d: record all of them again",
				len(first), configs[0].Backend, configs[0].Contenders, len(some), c.Backend, c.Contenders)
		}
		better := fastest
		if c.Rate > 0 {
			better = shortestTail
		}
		r := slices.SortedStableFunc(slices.Values(some), better)[len(some)/2]
		r.rounds = some
		medians = append(medians, r)
	}
	return medians, nil
}

func (all runs) rounds() int {
	n := 1
	for _, r := range all {
		n = max(n, r.Config.Round)
	}
	return n
}

// perSecond is r's throughput, with the lowest and highest of all rounds.
func (r *run) perSecond() string {
	s := perSecond(r.SectionsPerS)
	if len(r.rounds) > 1 {
		least, most := slices.MaxFunc(r.rounds, fastest), slices.MinFunc(r.rounds, fastest)
		s += fmt.Sprintf(" (%s to %s)", number(least.SectionsPerS), number(most.SectionsPerS))
	}
	return s
}

func (r *run) worst() *run {
	return slices.MinFunc(r.rounds, func(a, b *run) int { return cmp.Compare(a.Share.Jain, b.Share.Jain) })
}

func (r *run) starved() (starved, without int) {
	for _, r := range r.rounds {
		starved, without = starved+r.Share.Starved, without+r.Share.Without
	}
	return starved, without
}

func (r *run) idle() bool {
	return slices.ContainsFunc(r.rounds, func(r *run) bool { return r.Sections == 0 })
}

// times is r's throughput divided by that of s, with its basis in words. Runs of one round follow each other, so it is
// the median of the rounds' ratios; of two in the middle, the lesser.
func (r *run) times(s *run) (ratio float64, from string) {
	var ratios []float64
	for i := range r.rounds {
		ratios = append(ratios, r.rounds[i].SectionsPerS/s.rounds[i].SectionsPerS)
	}
	slices.Sort(ratios)
	ratio = ratios[(len(ratios)-1)/2]
	return ratio, fmt.Sprintf("%s × %s's (rounds: %s to %s)", number(ratio), s.Config.Backend, number(ratios[0]), number(ratios[len(ratios)-1]))
}

func (all runs) where(ok func(*run) bool) (some runs) {
	for _, r := range all {
		if ok(r) {
			some = append(some, r)
		}
	}
	return some
}

func (all runs) of(sweep string) runs {
	return all.where(func(r *run) bool { return r.Config.Name == sweep })
}

func (all runs) by(lock string) runs {
	return all.where(func(r *run) bool { return r.Config.Backend == lock })
}

// This module's locks.
func (r *run) own() bool {
	return r.Machine.Library == "" && r.Config.Backend != floor && r.Config.Backend != baton
}

func (all runs) closed(lock string, contenders int, work time.Duration) *run {
	return first(all.where(func(r *run) bool {
		c := r.Config
		return c.Backend == lock && c.Contenders == contenders && c.Work.D() == work && c.Rate == 0
	}))
}

func first(all runs) *run {
	if len(all) == 0 {
		return nil
	}
	return all[0]
}

func distinct[R any, T comparable](all []R, of func(R) T) (list []T) {
	for _, r := range all {
		if v := of(r); !slices.Contains(list, v) {
			list = append(list, v)
		}
	}
	return list
}

func backend(r *run) string { return r.Config.Backend }

// This module's are first.
func (all runs) locks() []string {
	return append(distinct(all.where((*run).own), backend), distinct(all.where(func(r *run) bool { return !r.own() }), backend)...)
}

func (all runs) contenders() []int {
	return slices.Sorted(slices.Values(distinct(all, func(r *run) int { return r.Config.Contenders })))
}

func (all runs) works() []time.Duration {
	return slices.Sorted(slices.Values(distinct(all, func(r *run) time.Duration { return r.Config.Work.D() })))
}

type waits struct{ load.Waits }

// There are enough acquisitions for the quantile.
func (w waits) tells(q float64) bool { return !math.IsNaN(w.Quantile(q).Millis) }

func (r *run) tells() bool { return r != nil && r.waits.tells(0.99) }

func (w waits) cell(q float64) string {
	x := w.Quantile(q)
	switch {
	case w.Count == 0:
		return "—"
	case !w.tells(q):
		return "·"
	case x.Longer:
		return "> " + number(x.Millis)
	default:
		return number(x.Millis)
	}
}

// curve is the percentage of acquisitions that wait longer, against the wait.
func (w waits) curve() (ms, percent []float64) {
	last := math.Inf(1)
	for i, s := range w.Steps {
		// One point for each 5 % that the share shrinks by.
		if i == 0 || i == len(w.Steps)-1 || s.Left < last*0.95 {
			if s.Left < 1e-4 {
				s.Left = 1e-4
			}
			ms, percent, last = append(ms, max(s.Millis, 0.01)), append(percent, 100*s.Left), s.Left
			if s.Left <= 1e-4 {
				break
			}
		}
	}
	return ms, percent
}

func (all runs) machine() string {
	m := all[0].Machine
	given := func(of func(*run) string) string {
		list := distinct(all, of)
		return strings.Join(slices.DeleteFunc(list, func(s string) bool { return s == "" }), ", ")
	}
	libraries := given(func(r *run) string { return r.Machine.Library })
	s := ""
	if n := all.rounds(); n > 1 {
		s = fmt.Sprintf("Medians of %d rounds. ", n)
	}
	s += fmt.Sprintf("Recorded %s on %d cores (%s/%s, %s) that load and servers share, with %s", all[0].Start.UTC().Format(time.DateOnly),
		m.Cores, m.OS, m.Arch, m.Go, given(func(r *run) string { return r.Machine.Server }))
	if m.GC > 0 {
		s += fmt.Sprintf("; the load runs with GOGC=%d", m.GC)
	}
	if libraries != "" {
		s += "; against " + libraries
	}
	return s + ".\n"
}

func best(all runs, by func(a, b *run) int) *run {
	if len(all) == 0 {
		return nil
	}
	return slices.MinFunc(all, by)
}

func fastest(a, b *run) int { return cmp.Compare(b.SectionsPerS, a.SectionsPerS) }

func shortestTail(a, b *run) int { return cmp.Compare(a.tail(), b.tail()) }

// tail is a sort key, the p99: lower bounds come late, unknown ones last.
func (r *run) tail() float64 {
	switch p99 := r.waits.Quantile(0.99); {
	case !r.tells():
		return math.Inf(1)
	case p99.Longer:
		return 1e12 + p99.Millis
	default:
		return p99.Millis
	}
}

// The least Jain's index that counts as even.
const evenly = 0.999

// mostEven is the greatest possible Jain's index of r: with few critical sections, some contenders have one more than
// others.
func (r *run) mostEven() float64 {
	n := int64(r.Config.Contenders)
	if r.Sections == 0 || n == 0 {
		return 0
	}
	each, more := r.Sections/n, r.Sections%n
	squares := float64(more*(each+1)*(each+1) + (n-more)*each*each)
	return float64(r.Sections) * float64(r.Sections) / (float64(n) * squares)
}

// r's index is below evenly only because there were too few critical sections.
func (r *run) tooFew() bool {
	most := r.mostEven()
	return r.Share.Jain < evenly && most < evenly && r.Share.Jain >= most-(1-evenly)
}

// even also requires one critical section for each contender.
// contender at least.
func (r *run) even() bool {
	return r.Share.Jain >= evenly || r.tooFew() && r.Sections >= int64(r.Config.Contenders)
}

// The goals of a lock with a queue.
func fair(says string, r *run) []claim {
	even := claim{says: says + "Jain's index at least 0.999", missing: r == nil}
	fed := claim{says: says + "nobody starves", missing: r == nil}
	tail := claim{says: says + "p99 at most 2.5 × the median", missing: !r.tells()}
	if r == nil {
		return []claim{even, fed, tail}
	}
	worst := r.worst()
	even.measured, even.holds, even.open = fmt.Sprintf("%.5f", worst.Share.Jain), worst.Share.Jain >= evenly, worst.tooFew()
	if even.open {
		even.measured += fmt.Sprintf(", and %.5f is the most with %s critical sections each", worst.mostEven(), number(float64(worst.Sections)/float64(worst.Config.Contenders)))
	}
	starved, without := r.starved()
	fed.measured, fed.holds = fmt.Sprintf("%d starved, %d never held the lock", starved, without), starved == 0
	p50, p99 := r.waits.Quantile(0.5), r.waits.Quantile(0.99)
	tail.measured = fmt.Sprintf("%s ms ÷ %s ms = %s", r.waits.cell(0.99), r.waits.cell(0.5), number(p99.Millis/p50.Millis))
	tail.holds = !p50.Longer && !p99.Longer && p99.Millis <= 2.5*p50.Millis
	return []claim{even, fed, tail}
}

// Markdown.
func table(head []string, rows [][]string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "| %s |\n|%s\n", strings.Join(head, " | "), strings.Repeat(" --- |", len(head)))
	for _, r := range rows {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(r, " | "))
	}
	return b.String()
}

type claim struct {
	says     string
	measured string
	holds    bool
	missing  bool // it was not recorded
	open     bool // the data is not enough to tell
}

func claims(list []claim) string {
	var rows [][]string
	for _, c := range list {
		mark := "✗"
		switch {
		case c.missing:
			mark, c.measured = "?", "not recorded"
		case c.open:
			mark = "?"
		case c.holds:
			mark = "✓"
		}
		rows = append(rows, []string{c.says, c.measured, mark})
	}
	return table([]string{"goal", "measured", "met"}, rows)
}

func kept(all runs) claim {
	var c load.Checks
	n := 0
	for _, r := range all {
		if r.own() {
			n++
			c.Overlaps += r.Checks.Overlaps
			c.TokenRegressions += r.Checks.TokenRegressions
		}
	}
	return claim{
		says:     "this module's locks: never two holders with a lease, and tokens that increase",
		measured: fmt.Sprintf("in %d runs %d overlaps, %d tokens that did not increase", n, c.Overlaps, c.TokenRegressions),
		holds:    c.Overlaps == 0 && c.TokenRegressions == 0, missing: n == 0,
	}
}
