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

	"github.com/fencelab/fencelab/internal/load"
)

// run is a line of an experiment's data, with what follows from it.
type run struct {
	*load.Result
	waits  waits
	rounds runs // those that differ in the round alone, this one among them, in their order; set by medians
}

// runs are those of an experiment, in the order in which they were made.
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

// medians are one run of each config, and its rounds with it: the one with the median of the sections per second. In the
// open model, where those are as many as were offered, it is that of the 99th percentile of waits. Of two in the middle it
// is the worse one.
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
			return nil, fmt.Errorf("there are %d rounds of %s with %d contenders and %d of %s with %d: record all anew",
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

// rounds is how often each run was made.
func (all runs) rounds() int {
	n := 1
	for _, r := range all {
		n = max(n, r.Config.Round)
	}
	return n
}

// perSecond is r's sections per second, and the fewest and the most of all rounds.
func (r *run) perSecond() string {
	s := perSecond(r.SectionsPerS)
	if len(r.rounds) > 1 {
		least, most := slices.MaxFunc(r.rounds, fastest), slices.MinFunc(r.rounds, fastest)
		s += fmt.Sprintf(" (%s to %s)", number(least.SectionsPerS), number(most.SectionsPerS))
	}
	return s
}

// all are r's rounds, or itself.
func (r *run) all() runs {
	if r.rounds == nil {
		return runs{r}
	}
	return r.rounds
}

// worst is the round whose sections were shared least evenly.
func (r *run) worst() *run {
	return slices.MinFunc(r.all(), func(a, b *run) int { return cmp.Compare(a.Share.Jain, b.Share.Jain) })
}

// starved is how many contenders starved, and how many had no section, in all rounds.
func (r *run) starved() (starved, without int) {
	for _, r := range r.all() {
		starved, without = starved+r.Share.Starved, without+r.Share.Without
	}
	return starved, without
}

// idle reports whether there was no section in a round.
func (r *run) idle() bool {
	return slices.ContainsFunc(r.all(), func(r *run) bool { return r.Sections == 0 })
}

// times is by how many times r made more sections per second than s, and how that follows from what was measured. The
// runs of one round follow each other, so it is the median of the rounds' ratios; of two in the middle, the lesser.
func (r *run) times(s *run) (ratio float64, from string) {
	if len(r.rounds) < 2 {
		ratio = r.SectionsPerS / s.SectionsPerS
		return ratio, fmt.Sprintf("%s ÷ %s (%s) = %s", perSecond(r.SectionsPerS), perSecond(s.SectionsPerS), s.Config.Backend, number(ratio))
	}
	var ratios []float64
	for i := range r.rounds {
		ratios = append(ratios, r.rounds[i].SectionsPerS/s.rounds[i].SectionsPerS)
	}
	slices.Sort(ratios)
	ratio = ratios[(len(ratios)-1)/2]
	return ratio, fmt.Sprintf("%s × %s's (rounds: %s to %s)", number(ratio), s.Config.Backend, number(ratios[0]), number(ratios[len(ratios)-1]))
}

// of are the runs of a sweep.
func (all runs) of(sweep string) (some runs) {
	for _, r := range all {
		if r.Config.Name == sweep {
			some = append(some, r)
		}
	}
	return some
}

// by are the runs of a lock.
func (all runs) by(lock string) (some runs) {
	for _, r := range all {
		if r.Config.Backend == lock {
			some = append(some, r)
		}
	}
	return some
}

// own reports whether r is of one of this module's locks.
func (r *run) own() bool {
	return r.Machine.Library == "" && r.Config.Backend != floor && r.Config.Backend != baton
}

// closed returns the run of the closed model, or nil.
func (all runs) closed(lock string, contenders int, work time.Duration) *run {
	for _, r := range all {
		if c := r.Config; c.Backend == lock && c.Contenders == contenders && c.Work.D() == work && c.Rate == 0 {
			return r
		}
	}
	return nil
}

// locks are the names of those that were measured, this module's first.
func (all runs) locks() (names []string) {
	for _, own := range []bool{true, false} {
		for _, r := range all {
			if r.own() == own && !slices.Contains(names, r.Config.Backend) {
				names = append(names, r.Config.Backend)
			}
		}
	}
	return names
}

// contenders are the numbers of them, in order.
func (all runs) contenders() (list []int) {
	for _, r := range all {
		if !slices.Contains(list, r.Config.Contenders) {
			list = append(list, r.Config.Contenders)
		}
	}
	slices.Sort(list)
	return list
}

// works are the lengths of the work under the lock, in order.
func (all runs) works() (list []time.Duration) {
	for _, r := range all {
		if !slices.Contains(list, r.Config.Work.D()) {
			list = append(list, r.Config.Work.D())
		}
	}
	slices.Sort(list)
	return list
}

// waits are those of a run, for tables and drawings.
type waits struct{ load.Waits }

// tells reports whether there are acquisitions enough for the quantile.
func (w waits) tells(q float64) bool { return !math.IsNaN(w.Quantile(q).Millis) }

// cell is a quantile as a table has it: a point where there are too few to tell.
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

// curve is the share of acquisitions that wait for longer, in per cent, against the wait.
func (w waits) curve() (ms, percent []float64) {
	last := math.Inf(1)
	for i, s := range w.Steps {
		// Enough points for a drawing: one for each twentieth that the share shrinks by, and the ends.
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

// machine says where the runs were made.
func (all runs) machine() string {
	m := all[0].Machine
	var servers, libraries []string
	for _, r := range all {
		if s := r.Machine.Server; s != "" && !slices.Contains(servers, s) {
			servers = append(servers, s)
		}
		if l := r.Machine.Library; l != "" && !slices.Contains(libraries, l) {
			libraries = append(libraries, l)
		}
	}
	s := ""
	if n := all.rounds(); n > 1 {
		s = fmt.Sprintf("Medians of %d rounds. ", n)
	}
	s += fmt.Sprintf("Recorded %s on %d cores (%s/%s, %s) that load and servers share, with %s", all[0].Start.UTC().Format(time.DateOnly),
		m.Cores, m.OS, m.Arch, m.Go, strings.Join(servers, ", "))
	if m.GC > 0 {
		s += fmt.Sprintf("; the load runs with GOGC=%d", m.GC)
	}
	if len(libraries) > 0 {
		s += "; against " + strings.Join(libraries, ", ")
	}
	return s + ".\n"
}

// best is the run that comes first in the order of by, or nil.
func best(all runs, by func(a, b *run) int) *run {
	if len(all) == 0 {
		return nil
	}
	return slices.MinFunc(all, by)
}

func fastest(a, b *run) int { return cmp.Compare(b.SectionsPerS, a.SectionsPerS) }

func shortestTail(a, b *run) int {
	last := func(x load.Quantile) int { // one that is only known to be longer comes late, and one that isn't known last
		switch {
		case math.IsNaN(x.Millis):
			return 2
		case x.Longer:
			return 1
		}
		return 0
	}
	x, y := a.waits.Quantile(0.99), b.waits.Quantile(0.99)
	return cmp.Or(cmp.Compare(last(x), last(y)), cmp.Compare(x.Millis, y.Millis))
}

// even is the Jain's index from which on sections count as shared evenly.
const even = 0.999

// mostEven is the greatest Jain's index that r could have: sections are whole, so where they are few some contenders have
// one more than the others, whatever the lock.
func (r *run) mostEven() float64 {
	n := int64(r.Config.Contenders)
	if r.Sections == 0 || n == 0 {
		return 0
	}
	each, more := r.Sections/n, r.Sections%n
	squares := float64(more*(each+1)*(each+1) + (n-more)*each*each)
	return float64(r.Sections) * float64(r.Sections) / (float64(n) * squares)
}

// tooFew reports whether it is only for want of sections that r's index is below even.
func (r *run) tooFew() bool {
	most := r.mostEven()
	return r.Share.Jain < even && most < even && r.Share.Jain >= most-(1-even)
}

// evenly reports whether sections were shared evenly, as far as r can tell: everybody could have had one at least.
func (r *run) evenly() bool {
	return r.Share.Jain >= even || r.tooFew() && r.Sections >= int64(r.Config.Contenders)
}

// evenness is the goal that says of r, nil if it wasn't recorded, that sections are shared evenly, in every round.
func evenness(says string, r *run) claim {
	c := claim{says: says + "Jain's index at least 0.999", missing: r == nil}
	if r == nil {
		return c
	}
	r = r.worst()
	c.measured, c.holds, c.open = fmt.Sprintf("%.5f", r.Share.Jain), r.Share.Jain >= even, r.tooFew()
	if c.open {
		c.measured += fmt.Sprintf(", and %.5f is the most with %s sections for each", r.mostEven(), number(float64(r.Sections)/float64(r.Config.Contenders)))
	}
	return c
}

// table is one in Markdown.
func table(head []string, rows [][]string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "| %s |\n|%s\n", strings.Join(head, " | "), strings.Repeat(" --- |", len(head)))
	for _, r := range rows {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(r, " | "))
	}
	return b.String()
}

// claim is something that should be so, and what the data says.
type claim struct {
	says     string
	measured string
	holds    bool
	missing  bool // it was not recorded
	open     bool // what was recorded can't tell
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

// kept is whether this module's locks have kept their word in all runs.
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
		says:     "this module's locks: never two holders with a lease, and tokens that grow",
		measured: fmt.Sprintf("in %d runs %d overlaps, %d tokens that didn't grow", n, c.Overlaps, c.TokenRegressions),
		holds:    c.Overlaps == 0 && c.TokenRegressions == 0, missing: n == 0,
	}
}
