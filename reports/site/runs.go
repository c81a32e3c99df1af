package site

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/fencelab/fencelab/internal/bench/load"
	"github.com/fencelab/fencelab/internal/jsonl"
	"github.com/fencelab/fencelab/reports"
)

type run struct {
	*load.Result
	waits  load.Waits
	rounds runs // the runs of the same config, this one included, by round; set by medians
}

type runs []*run

func decodeRuns(data []byte) (runs, error) {
	results, err := jsonl.Decode[load.Result](bytes.NewReader(data), false) // old ones have more fields
	if err != nil {
		return nil, err
	}
	var all runs
	seen := map[load.Config]bool{}
	for i := range results {
		r := &run{Result: &results[i]}
		if r.Seconds <= 0 {
			return nil, fmt.Errorf("run %d (%s): it lasted no time: record it again", len(all)+1, r.Config.Backend)
		}
		if seen[r.Config] {
			return nil, fmt.Errorf("run %d is of the same config as one before it: each is recorded once", len(all)+1)
		}
		seen[r.Config] = true
		if r.waits, err = load.Estimate(r.Result); err != nil {
			return nil, fmt.Errorf("run %d (%s): %w", len(all)+1, r.Config.Backend, err)
		}
		all = append(all, r)
	}
	if len(all) == 0 {
		return nil, errors.New("there are no runs in it")
	}
	return all, nil
}

// experiment returns the medians of an experiment's runs, and what every page has.
func experiment(data []byte, goals func(all runs) []claim) (runs, *derived, error) {
	rounds, err := decodeRuns(data)
	if err != nil {
		return nil, nil, err
	}
	all, err := rounds.medians()
	if err != nil {
		return nil, nil, err
	}
	return all, &derived{charts: map[string]*chart{}, tables: map[string]string{
		"machine": rounds.machine(), "goals": claims(append(goals(all), kept(rounds))),
	}}, nil
}

// medians returns one run of each config, with its rounds: that with the median throughput or, in the open model, the median p99.
// Of two in the middle it is the worse.
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

func (r *run) perSecond() string {
	s := perSecond(r.SectionsPerS)
	if len(r.rounds) > 1 {
		least, most := slices.MaxFunc(r.rounds, fastest), slices.MinFunc(r.rounds, fastest)
		s += fmt.Sprintf(" (%s to %s)", reports.Number(least.SectionsPerS), reports.Number(most.SectionsPerS))
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

// times is the median of the rounds' ratios, since runs of one round follow each other; of two in the middle, the lesser.
func (r *run) times(s *run) (ratio float64, from string) {
	var ratios []float64
	for i := range r.rounds {
		ratios = append(ratios, r.rounds[i].SectionsPerS/s.rounds[i].SectionsPerS)
	}
	slices.Sort(ratios)
	ratio = ratios[(len(ratios)-1)/2]
	return ratio, fmt.Sprintf("%s × %s's (rounds: %s to %s)", reports.Number(ratio), shown(s.Config.Backend), reports.Number(ratios[0]), reports.Number(ratios[len(ratios)-1]))
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

// otherNames replace names of other libraries' locks that could be taken for this module's.
var otherNames = map[string]string{
	"redislock": "bsm/redislock", "redislock-100ms": "bsm/redislock-100ms", "etcd-mutex": "concurrency.Mutex", "zk-lock": "go-zookeeper",
}

func shown(lock string) string { return cmp.Or(otherNames[lock], lock) }

func (all runs) shownIn(lock string) string {
	if r := first(all.by(lock)); r != nil && r.own() && otherNames[lock] == "" {
		return "**" + lock + "**"
	}
	return shown(lock)
}

func (all runs) locks() []string {
	return append(distinct(all.where((*run).own), backend), distinct(all.where(func(r *run) bool { return !r.own() }), backend)...)
}

func (all runs) contenders() []int {
	return slices.Sorted(slices.Values(distinct(all, func(r *run) int { return r.Config.Contenders })))
}

func (all runs) works() []time.Duration {
	return slices.Sorted(slices.Values(distinct(all, func(r *run) time.Duration { return r.Config.Work.D() })))
}

// tells reports whether there were enough acquisitions for p99.
func (r *run) tells() bool { return !math.IsNaN(r.waits.Quantile(0.99).Millis) }

func (r *run) cell(q float64) string {
	x := r.waits.Quantile(q)
	switch {
	case math.IsNaN(x.Millis):
		return "·"
	case x.Longer:
		return "> " + reports.Number(x.Millis)
	default:
		return reports.Number(x.Millis)
	}
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

const evenly = 0.999

// mostEven is the greatest possible Jain's index of r: some contenders have one critical section more than others.
func (r *run) mostEven() float64 {
	n := int64(r.Config.Contenders)
	each, more := r.Sections/n, r.Sections%n
	squares := float64(more*(each+1)*(each+1) + (n-more)*each*each)
	return float64(r.Sections) * float64(r.Sections) / (float64(n) * squares)
}

// tooFew reports whether the index is below evenly only because there were too few sections.
func (r *run) tooFew() bool {
	most := r.mostEven()
	return r.Share.Jain < evenly && most < evenly && r.Share.Jain >= most-(1-evenly)
}

// even also requires one critical section for each contender.
func (r *run) even() bool {
	return r.Share.Jain >= evenly || r.tooFew() && r.Sections >= int64(r.Config.Contenders)
}

func fair(says string, r *run) []claim {
	even := claim{says: says + "Jain's index at least 0.999"}
	fed := claim{says: says + "nobody starves"}
	tail := claim{says: says + "p99 at most 2.5 × the median"}
	worst := r.worst()
	even.measured, even.holds, even.open = fmt.Sprintf("%.5f", worst.Share.Jain), worst.Share.Jain >= evenly, worst.tooFew()
	if even.open {
		even.measured += fmt.Sprintf(", and %.5f is the most with %s critical sections each", worst.mostEven(), reports.Number(float64(worst.Sections)/float64(worst.Config.Contenders)))
	}
	starved, without := r.starved()
	fed.measured, fed.holds = fmt.Sprintf("%d starved, %d never held the lock", starved, without), starved == 0
	p50, p99 := r.waits.Quantile(0.5), r.waits.Quantile(0.99)
	tail.measured = fmt.Sprintf("%s ms ÷ %s ms = %s", r.cell(0.99), r.cell(0.5), reports.Number(p99.Millis/p50.Millis))
	tail.holds = !p50.Longer && !p99.Longer && p99.Millis <= 2.5*p50.Millis
	return []claim{even, fed, tail}
}

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
	open     bool // too little data to tell
}

func claims(list []claim) string {
	var rows [][]string
	for _, c := range list {
		mark := "✗"
		switch {
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
		holds:    c.Overlaps == 0 && c.TokenRegressions == 0,
	}
}
