package site

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/fencelab/fencelab/reports"
)

type derived struct {
	charts map[string]*chart
	tables map[string]string
}

// Names in config.json, and the number of contenders at which locks are compared.
const (
	hotKey      = "hot key"
	network     = "network"     // the hot key, with messages as slow as between hosts
	apart       = "apart"       // the hot key, with a processor left to the server
	within      = "one process" // the hot key, whose contenders are goroutines that share a client
	withWork    = "work"
	uncontended = "uncontended"
	floor       = "ping"  // no lock: a PING for each acquisition and each release
	baton       = "baton" // no lock: a list element that is taken and given back
	crowd       = 200
)

type group struct {
	file, on string
	locks    []string
}

var groups = []group{
	{"redis", "on Redis", []string{"redis", "redis-spin", "redsync", "redsync-100ms", "redislock", "redislock-100ms", "rueidislock", "redlock", "redsync-5"}},
	{"others", "on other services", []string{"etcd", "etcd-mutex", "zookeeper", "zk-lock", "consul", "postgres"}},
}

func contention(data []byte) (*derived, error) {
	all, d, err := experiment(data, contentionClaims)
	if err != nil {
		return nil, err
	}
	hot := all.of(hotKey)
	for prefix, some := range map[string]runs{"": hot, "network-": all.of(network), "apart-": all.of(apart)} {
		d.tables[cmp.Or(strings.TrimSuffix(prefix, "-"), "throughput")] = hotTable(some, throughputCell)
		d.tables[prefix+"waits"] = hotTable(some, waitsCell)
	}
	d.tables["network-releases"] = hotTable(all.of(network), releaseCell)
	d.tables["one-process"] = processTable(all.of(within))
	for _, sweep := range []struct {
		prefix, where string
		runs          runs
	}{{"", "", hot}, {"apart-", ", the load apart", all.of(apart)}, {"network-", ", over a network", all.of(network)}} {
		for _, g := range groups {
			some := sweep.runs.where(func(r *run) bool { return slices.Contains(g.locks, r.Config.Backend) })
			if len(some) > 0 {
				d.charts[sweep.prefix+"throughput-"+g.file] = throughputChart(some, g.locks, g.on+sweep.where)
				d.charts[sweep.prefix+"waits-"+g.file] = waitsChart(some, g.locks, g.on+sweep.where)
			}
		}
	}
	d.charts["ceiling"], d.tables["ceiling"] = ceilings(all)
	open := byRate(all.of(uncontended).by("redis"))
	d.tables["rates"] = ratesTable(open, all.of(uncontended).by(floor))
	d.charts["rates"] = ratesChart(open)
	return d, nil
}

func working(w time.Duration) string {
	if w == 0 {
		return "no work"
	}
	return reports.Number(float64(w)/1e6) + " ms of work"
}

func perSecond(v float64) string { return reports.Number(v) + "/s" }

func hotTable(hot runs, cell func(*run) string) string {
	head := []string{"lock"}
	for _, n := range hot.contenders() {
		head = append(head, reports.Number(float64(n)))
	}
	var rows [][]string
	for _, lock := range hot.locks() {
		row := []string{hot.shownIn(lock)}
		for _, n := range hot.contenders() {
			text := "·"
			if r := hot.closed(lock, n, 0); r != nil {
				text = cell(r)
			}
			row = append(row, text)
		}
		rows = append(rows, row)
	}
	return table(head, rows)
}

func processTable(some runs) string {
	var rows [][]string
	for _, lock := range some.locks() {
		r := some.closed(lock, crowd, 0)
		rows = append(rows, []string{some.shownIn(lock), throughputCell(r), r.cell(0.5), r.cell(0.99), r.cell(0.999)})
	}
	return table([]string{"lock", "critical sections", "median wait, ms", "99 %", "99.9 %"}, rows)
}

func throughputCell(r *run) string {
	s := r.perSecond()
	if r.Failed > 0 {
		s += fmt.Sprintf(", %s failed", reports.Number(float64(r.Failed)))
	}
	if r.Share.Starved > 0 {
		s += fmt.Sprintf(", %d starved", r.Share.Starved)
	}
	return s
}

func waitsCell(r *run) string {
	return fmt.Sprintf("%s, %s, %s", r.cell(0.5), r.cell(0.99), r.cell(0.999))
}

func releaseCell(r *run) string {
	switch {
	case r.Release.Count == 0:
		return "·"
	case r.Release.Count < 100: // the percentile would be the maximum
		return reports.Number(r.Release.P50) + ", ·"
	default:
		return reports.Number(r.Release.P50) + ", " + reports.Number(r.Release.P99)
	}
}

func hotPanel(heading string, height float64, hot runs, locks []string, add func(l *line, contenders float64, r *run)) panel {
	list := hot.contenders()
	p := panel{heading: heading, height: height, x: axis{label: "contenders", log: true, min: float64(list[0]) * 0.9, max: float64(list[len(list)-1]) * 1.1}}
	for _, n := range list {
		p.x.ticks = append(p.x.ticks, at(float64(n))...)
	}
	var ys [][]float64
	for _, lock := range locks {
		l := line{name: shown(lock), look: looks[lock]}
		for _, n := range list {
			if r := hot.closed(lock, n, 0); r != nil {
				add(&l, float64(n), r)
			}
		}
		p.lines, ys = append(p.lines, l), append(ys, l.ys)
	}
	p.y = logAxis("", ys...)
	return p
}

func throughputChart(hot runs, locks []string, on string) *chart {
	r := best(hot.where(func(r *run) bool {
		return slices.Contains(locks, r.Config.Backend) && r.Config.Contenders == crowd && r.Config.Work == 0
	}), fastest)
	return &chart{
		title:  fmt.Sprintf("Hot key %s, no work: with %d contenders %s is the fastest (%s)", on, crowd, shown(r.Config.Backend), perSecond(r.SectionsPerS)),
		about:  "Critical sections per second against the number of contenders, a line for each lock. The table has the numbers.",
		panels: []panel{hotPanel("critical sections per second", 250, hot, locks, func(l *line, n float64, r *run) { l.add(n, r.SectionsPerS) })},
	}
}

func waitsChart(hot runs, locks []string, on string) *chart {
	r, s := hot.closed(locks[0], crowd, 0), best(competitorsOf(hot, locks, crowd), fastest)
	c := &chart{
		title: fmt.Sprintf("Hot key %s, %d contenders, no work: 1 in 100 waits for more than %s ms for %s, and %s ms for %s", on, crowd,
			trim(r.cell(0.99)), locks[0], trim(s.cell(0.99)), shown(s.Config.Backend)),
		about: "Three panels: median, 99th and 99.9th percentile of waits in milliseconds against the number of contenders, a line for each lock. " +
			"An arrow says that the wait is longer than that. Where too few waited to tell there is no point. The table has the numbers.",
	}
	for _, p := range []struct {
		name string
		q    float64
	}{{"median wait, ms", 0.5}, {"99th percentile, ms", 0.99}, {"99.9th percentile, ms", 0.999}} {
		c.panels = append(c.panels, hotPanel(p.name, 190, hot, locks, func(l *line, n float64, r *run) { l.addWait(n, r, p.q) }))
	}
	return c
}

func (l *line) addWait(x float64, r *run, q float64) {
	w := r.waits.Quantile(q)
	if math.IsNaN(w.Millis) {
		return
	}
	if w.Longer {
		if l.atLeast == nil {
			l.atLeast = map[int]bool{}
		}
		l.atLeast[len(l.xs)] = true
	}
	l.add(x, max(w.Millis, 0.01)) // where the axis ends
}

func competitorsOf(hot runs, locks []string, contenders int) runs {
	return hot.where(func(r *run) bool {
		return r.Machine.Library != "" && r.Config.Contenders == contenders && r.Config.Work == 0 && slices.Contains(locks, r.Config.Backend)
	})
}

// handOff is the shortest critical section of a lock without work, from a release to the next.
func handOff(hot runs, lock string) time.Duration {
	most := 0.0
	for _, n := range hot.contenders() {
		if r := hot.closed(lock, n, 0); r != nil {
			most = max(most, r.SectionsPerS)
		}
	}
	return time.Duration(float64(time.Second) / most)
}

// ceiling is r's throughput if each critical section took only the work of r's holders and the hand-off, and how much of it r
// reached.
func ceiling(hot runs, r *run) (perS, share float64) {
	each := handOff(hot, r.Config.Backend).Seconds()
	if r.Config.Work > 0 {
		each += max(r.Hold.Mean/1e3, r.Config.Work.D().Seconds())
	}
	return 1 / each, r.SectionsPerS * each
}

func ceilings(all runs) (*chart, string) {
	hot, work := all.of(hotKey), all.of(withWork)
	var rows [][]string
	works := append([]time.Duration{0}, work.works()...)
	pan := panel{
		heading: "share of the lock's own ceiling", height: 230,
		x: axis{label: "work under the lock", min: -0.15, max: float64(len(works)) - 0.85}, y: axis{min: 0, max: 1.05},
	}
	for i, w := range works {
		pan.x.ticks = append(pan.x.ticks, tick{float64(i), strings.TrimSuffix(working(w), " of work")})
	}
	for v := 0.0; v < 1.1; v += 0.25 {
		pan.y.ticks = append(pan.y.ticks, tick{v, fmt.Sprintf("%.0f %%", 100*v)})
	}
	title := "How much of its ceiling a lock reaches"
	for _, lock := range work.locks() {
		l := line{name: shown(lock), look: looks[lock]}
		for i, w := range works {
			r := work.closed(lock, crowd, w)
			if w == 0 {
				r = hot.closed(lock, crowd, 0)
			}
			if r == nil {
				continue
			}
			c, share := ceiling(hot, r)
			held := "—"
			if w > 0 {
				held = reports.Number(r.Hold.Mean) + " ms"
			}
			rows = append(rows, []string{
				work.shownIn(lock), strings.TrimSuffix(working(w), " of work"), held, reports.Number(float64(handOff(hot, lock))/1e6) + " ms", perSecond(c), perSecond(r.SectionsPerS),
				fmt.Sprintf("%.0f %%", 100*share), r.cell(0.99), fmt.Sprint(r.Share.Starved),
			})
			l.add(float64(i), share)
			pan.y.max = max(pan.y.max, share*1.03)
			if lock == "redis" && i == 1 {
				title = fmt.Sprintf("With %d contenders and %s, redis reaches %.0f %% of its ceiling", crowd, working(w), 100*share)
			}
		}
		pan.lines = append(pan.lines, l)
	}
	return &chart{
		title: title, about: "Critical sections per second by the ceiling, 1/(work + hand-off), against the work under the lock. The table has the numbers.",
		panels: []panel{pan},
	}, table([]string{"lock", "work", "held for", "hand-off", "ceiling", "measured", "share", "99 % of waits, ms", "starved"}, rows)
}

const quick = 5

// sustained is the run of the highest rate up to which p99 stayed below quick, or nil.
func sustained(open runs) *run {
	var last *run
	for _, r := range open {
		if p99 := r.waits.Quantile(0.99); !r.tells() || p99.Longer || p99.Millis >= quick {
			break
		}
		last = r
	}
	return last
}

func byRate(open runs) runs {
	open = slices.Clone(open)
	slices.SortFunc(open, func(a, b *run) int { return cmp.Compare(a.Config.Rate, b.Config.Rate) })
	return open
}

func ratesTable(open, floors runs) string {
	var rows [][]string
	for _, r := range open {
		row := []string{
			perSecond(r.Config.Rate), perSecond(r.SectionsPerS), r.cell(0.5), r.cell(0.99), r.cell(0.999), reports.Number(r.Pacer.P99),
			reports.Number(float64(r.MaxWaiting)), "·", "·",
		}
		for _, f := range floors {
			if f.Config.Rate == r.Config.Rate {
				row[len(row)-2], row[len(row)-1] = f.cell(0.5), f.cell(0.99)
			}
		}
		rows = append(rows, row)
	}
	return table([]string{"offered", "served", "median, ms", "99 %", "99.9 %", "pacer late, 99 %", "waiting at most", "PING: median, ms", "99 %"}, rows)
}

func ratesChart(open runs) *chart {
	served := line{name: "redis", look: looks["redis"]}
	quantiles := []line{
		{name: "99.9 %", look: looks["redsync"]}, {name: "99 %", look: looks["redis"]}, {name: "median", look: looks["redlock"]},
	}
	for _, r := range open {
		served.add(r.Config.Rate, r.SectionsPerS)
		for i, q := range []float64{0.999, 0.99, 0.5} {
			quantiles[i].addWait(r.Config.Rate, r, q)
		}
	}
	most := open[len(open)-1].Config.Rate
	x := axis{label: "arrivals offered per second", min: 0, max: 1.03 * most, ticks: at(0, most/3, 2*most/3, most)}
	y := x
	y.label = ""
	ideal := line{name: "as offered", look: look{color: "quiet", dash: dotted}, xs: []float64{0, most}, ys: []float64{0, most}, bare: true}
	title := fmt.Sprintf("Uncontended, ten million keys: at no offered rate did 99 %% of acquisitions take less than %d ms", quick)
	if r := sustained(open); r != nil {
		title = fmt.Sprintf("Uncontended, ten million keys: up to %s arrivals per second 99 %% of acquisitions take less than %d ms", reports.Number(r.Config.Rate), quick)
	}
	return &chart{
		title: title,
		about: "Above, waits in milliseconds against the offered rate: median, 99th and 99.9th percentile. Below, acquisitions served per second. The table has the numbers.",
		panels: []panel{
			{heading: "wait from when the arrival was due, ms", height: 200, x: x, y: logAxis("", quantiles[0].ys, quantiles[1].ys, quantiles[2].ys), lines: quantiles},
			{heading: "acquisitions served per second", height: 190, x: x, y: y, lines: []line{ideal, served}},
		},
	}
}

func contentionClaims(all runs) (list []claim) {
	hot, work, open := all.of(hotKey), all.of(withWork), byRate(all.of(uncontended).by("redis"))
	redis := groups[0].locks
	queue := func(n int) *run { return hot.closed("redis", n, 0) }
	add := func(holds bool, says, measured string) {
		list = append(list, claim{says: says, measured: measured, holds: holds})
	}
	atLeast := func(says string, r, s *run, times float64) {
		ratio, from := r.times(s)
		add(ratio >= times, says, from)
	}
	type place struct {
		where string
		runs  runs
		times float64 // as fast as others on Redis
	}
	here, far, few := place{"", hot, 1}, place{runs: all.of(network), times: 1.5}, place{runs: all.of(apart), times: 1}
	far.where = "over a network, " + reports.Number(2*far.runs[0].Config.Delay.D().Seconds()*1e3) + " ms there and back, "
	few.where = fmt.Sprintf("the load on %d of %d processors, ", few.runs[0].Config.Processors, few.runs[0].Machine.Cores)
	for _, p := range []place{here, few, far} {
		for _, n := range []int{crowd, 1000} {
			atLeast(fmt.Sprintf("%s%s contenders: at least %s × as fast as the fastest other library on Redis", p.where, reports.Number(float64(n)), reports.Number(p.times)),
				p.runs.closed("redis", n, 0), best(competitorsOf(p.runs, redis, n), fastest), p.times)
		}
	}
	r := queue(crowd)
	for _, c := range []struct {
		name string
		by   func(a, b *run) int
		part float64
	}{{"with the most throughput", fastest, 15}, {"with the shortest tail", shortestTail, 10}} {
		s := best(competitorsOf(hot, redis, crowd), c.by)
		a, b := r.waits.Quantile(0.99), s.waits.Quantile(0.99) // if b is a lower bound, the true ratio is even better
		add(!a.Longer && a.Millis <= b.Millis/c.part, fmt.Sprintf("%d contenders: p99 of waits at most 1/%.0f of that of the other library %s", crowd, c.part, c.name),
			fmt.Sprintf("%s ms ÷ %s ms (%s) = %s", r.cell(0.99), reports.Number(b.Millis), shown(s.Config.Backend), reports.Number(a.Millis/b.Millis))+
				map[bool]string{true: ", or less", false: ""}[b.Longer])
	}
	for _, n := range []int{crowd, 1000} {
		list = append(list, fair(reports.Number(float64(n))+" contenders: ", queue(n))...)
	}
	for _, w := range []time.Duration{5 * time.Millisecond, 50 * time.Millisecond} {
		r := work.closed("redis", crowd, w)
		c, share := ceiling(hot, r)
		add(share >= 0.9, fmt.Sprintf("%d contenders, %s: at least 90 %% of the ceiling", crowd, working(w)),
			fmt.Sprintf("%s of %s = %.1f %%", perSecond(r.SectionsPerS), perSecond(c), 100*share))
	}
	for _, c := range []struct {
		lock, own, other, name string
		times                  float64
	}{{"etcdlock", "etcd", "etcd-mutex", "`concurrency.Mutex`", 2.4}, {"zklock", "zookeeper", "zk-lock", "go-zookeeper", 1.1}} {
		for _, p := range []place{here, far} {
			for _, n := range []int{50, crowd} {
				atLeast(fmt.Sprintf("%s%d contenders: %s at least %s × as fast as %s", p.where, n, c.lock, reports.Number(c.times), c.name),
					p.runs.closed(c.own, n, 0), p.runs.closed(c.other, n, 0), c.times)
			}
		}
	}
	for _, lock := range []string{"redis", "etcd"} {
		i := slices.IndexFunc(groups, func(g group) bool { return slices.Contains(g.locks, lock) })
		some := all.of(within)
		atLeast(fmt.Sprintf("%d goroutines of one process: %s-shared at least 50 × as fast as the fastest other library", crowd, lock),
			some.closed(lock+"-shared", crowd, 0), best(competitorsOf(some, groups[i].locks, crowd), fastest), 50)
	}
	slow := open[0]
	p99 := slow.waits.Quantile(0.99)
	add(!p99.Longer && p99.Millis < 3, "uncontended, at the lowest offered rate: p99 below 3 ms", fmt.Sprintf("%s ms at %s", slow.cell(0.99), perSecond(slow.Config.Rate)))
	served, at := 0.0, "at no rate"
	if s := sustained(open); s != nil {
		served, at = s.SectionsPerS, perSecond(s.SectionsPerS)+" served of "+perSecond(s.Config.Rate)
	}
	add(served >= 5000*0.98, fmt.Sprintf("uncontended: at least 5,000 per second with p99 below %d ms", quick), at)
	return list
}
