package site

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"gonum.org/v1/plot/vg"
)

func fairness(data []byte) (*derived, error) {
	rounds, err := decodeRuns(data)
	if err != nil {
		return nil, err
	}
	all, err := rounds.medians()
	if err != nil {
		return nil, err
	}
	closed, open := all.of("closed"), all.of("open")
	d := &derived{charts: map[string]*chart{}, tables: map[string]string{"machine": rounds.machine()}}
	d.tables["goals"] = claims(append(fairnessClaims(closed), kept(rounds)))
	d.tables["closed"], d.tables["open"] = closedTable(closed), openTable(open)
	d.charts["waits"] = tails(closed)
	d.charts["shares"] = shares(closed)
	d.charts["open"] = tailsOf("Arrivals at a rate", open, []string{"redis", "redis-spin", "redsync", "redislock", "etcd", "zookeeper"})
	return d, nil
}

func overtaken(r *run) float64 {
	if r.Order.Count == 0 {
		return 0
	}
	return 100 * float64(r.Order.Reordered) / float64(r.Order.Count)
}

func orderCells(r *run) []string {
	return []string{
		perSecond(r.SectionsPerS), r.waits.cell(0.5), r.waits.cell(0.99), r.waits.cell(0.999), number(float64(r.Order.Inversions)),
		number(overtaken(r)) + " %", number(float64(r.Order.Max)),
	}
}

func closedTable(closed runs) string {
	var rows [][]string
	for _, n := range closed.contenders() {
		for _, w := range closed.works() {
			for _, lock := range closed.locks() {
				if r := closed.closed(lock, n, w); r != nil {
					row := append([]string{number(float64(n)), strings.TrimSuffix(working(w), " of work"), lock}, orderCells(r)...)
					rows = append(rows, append(row, fmt.Sprintf("%.4f", r.Share.Jain), fmt.Sprint(r.Share.Without), fmt.Sprint(r.Share.Starved)))
				}
			}
		}
	}
	return table([]string{"contenders", "work", "lock", "sections", "median, ms", "99 %", "99.9 %", "inversions", "overtaken", "most often", "Jain", "without", "starved"}, rows)
}

func openTable(open runs) string {
	var rows [][]string
	for _, r := range open {
		rows = append(rows, append([]string{r.Config.Backend, perSecond(r.Config.Rate)}, append(orderCells(r), number(float64(r.Unserved.Count)))...))
	}
	return table([]string{"lock", "offered", "sections", "median, ms", "99 %", "99.9 %", "inversions", "overtaken", "most often", "waiting at the end"}, rows)
}

// tails is the distribution of waits with and without work, for each way to wait.
func tails(closed runs) *chart {
	c := &chart{
		title: fmt.Sprintf("%d contenders: who waits for how long", crowd),
		about: "The share of acquisitions that wait for longer, in per cent, against the wait in milliseconds: without work, and with 5 ms of it. " +
			"A line that ends above the axis belongs to a lock of whose longest waits the run knows only that they are longer.",
	}
	locks := []string{"redis", "redis-spin", "etcd", "zookeeper"}
	queue, spin := closed.closed("redis", crowd, 0), closed.closed("redis-spin", crowd, 0)
	if queue != nil && spin != nil && queue.waits.tells(0.99) && spin.waits.tells(0.99) {
		c.title = fmt.Sprintf("%d contenders, no work: 1 in 100 waits for longer than %s ms in line, and than %s ms spinning", crowd,
			trim(queue.waits.cell(0.99)), trim(spin.waits.cell(0.99)))
	}
	for _, w := range closed.works() {
		var some runs
		for _, lock := range locks {
			if r := closed.closed(lock, crowd, w); r != nil {
				some = append(some, r)
			}
		}
		if len(some) > 0 {
			c.panels = append(c.panels, curves(working(w)+": % that wait for longer", some))
		}
	}
	return c
}

// trim takes away that a wait is known only to be longer, where the words say it.
func trim(cell string) string { return strings.TrimPrefix(cell, "> ") }

func tailsOf(title string, all runs, locks []string) *chart {
	var some runs
	for _, r := range all {
		if slices.Contains(locks, r.Config.Backend) {
			some = append(some, r)
		}
	}
	c := &chart{title: title, about: "The share of acquisitions that wait for longer, in per cent, against the wait in milliseconds. The table has the numbers."}
	if len(some) == 0 {
		return c
	}
	c.title = fmt.Sprintf("Arrivals at %s, %s: who waits for how long", perSecond(some[0].Config.Rate), working(some[0].Config.Work.D()))
	r, s := best(some, shortestTail), find(some, "redis-spin")
	if r != nil && s != nil && r != s && r.waits.tells(0.99) && s.waits.tells(0.99) {
		c.title = fmt.Sprintf("Arrivals at %s, %s: 1 in 100 waits for longer than %s ms for %s, and %s ms for %s", perSecond(r.Config.Rate), working(r.Config.Work.D()),
			trim(r.waits.cell(0.99)), r.Config.Backend, trim(s.waits.cell(0.99)), s.Config.Backend)
	}
	c.panels = []panel{curves("% that wait for longer", some)}
	return c
}

// find returns the first run of a lock, or nil.
func find(some runs, lock string) *run {
	if i := slices.IndexFunc(some, func(r *run) bool { return r.Config.Backend == lock }); i >= 0 {
		return some[i]
	}
	return nil
}

func curves(heading string, some runs) panel {
	p := panel{heading: heading, height: 220, y: axis{log: true, min: 0.1, max: 100, ticks: at(0.1, 1, 10, 100)}}
	var values []float64
	for _, r := range some {
		l := line{name: r.Config.Backend, look: looks[r.Config.Backend]}
		ms, percent := r.waits.curve()
		for i := range ms {
			if percent[i] < p.y.min {
				l.xs, l.ys = append(l.xs, ms[i]), append(l.ys, p.y.min)
				break
			}
			l.xs, l.ys = append(l.xs, ms[i]), append(l.ys, percent[i])
		}
		values = append(values, l.xs...)
		p.lines = append(p.lines, l)
	}
	p.x = logAxis("wait, ms", values...)
	return p
}

// shares shows how evenly sections are shared, and how many are overtaken.
func shares(closed runs) *chart {
	locks := closed.locks()
	c := &chart{
		title: fmt.Sprintf("%d contenders: locks that queue share evenly, locks that retry don't", crowd),
		about: "Two panels with a row for each lock: Jain's index of the contenders' sections, from 0 to 1, and the per cent of acquisitions that were overtaken. The table has the numbers.",
	}
	marks := map[time.Duration]look{0: {"blue", nil, looks["redis"].glyph}, 5 * time.Millisecond: {"red", nil, hollow{looks["etcd"].glyph}}}
	var key []line
	jain := panel{
		heading: "Jain's index of sections per contender (1: all have the same)", height: 22*vg.Length(len(locks)) + 24,
		rows: locks, x: axis{min: -0.02, max: 1.03, ticks: at(0, 0.25, 0.5, 0.75, 1)},
	}
	over := panel{
		heading: "acquisitions that a later one overtook, %", height: 22*vg.Length(len(locks)) + 24,
		rows: locks, x: axis{min: -2, max: 103, ticks: at(0, 25, 50, 75, 100)},
	}
	for _, w := range closed.works() {
		key = append(key, line{name: working(w), look: marks[w]})
		a, b := line{look: marks[w], points: true}, line{look: marks[w], points: true}
		for i, lock := range locks {
			if r := closed.closed(lock, crowd, w); r != nil {
				a.xs, a.ys = append(a.xs, r.Share.Jain), append(a.ys, float64(i))
				b.xs, b.ys = append(b.xs, overtaken(r)), append(b.ys, float64(i))
			}
		}
		jain.lines, over.lines = append(jain.lines, a), append(over.lines, b)
	}
	jain.key, over.key = key, key
	c.panels = []panel{jain, over}
	var evenly []string
	for _, lock := range locks {
		if r := closed.closed(lock, crowd, 0); r != nil && r.evenly() {
			evenly = append(evenly, lock)
		}
	}
	switch len(evenly) {
	case 0:
		c.title = fmt.Sprintf("%d contenders: how sections are shared, and who is overtaken", crowd)
	case 1:
		c.title = fmt.Sprintf("%d contenders, no work: only %s shares its sections evenly", crowd, evenly[0])
	default:
		c.title = fmt.Sprintf("%d contenders, no work: %d of %d locks share their sections evenly", crowd, len(evenly), len(locks))
	}
	return c
}

func fairnessClaims(closed runs) (list []claim) {
	for _, n := range closed.contenders() {
		for _, w := range closed.works() {
			r := closed.closed("redis", n, w)
			says := fmt.Sprintf("%d contenders, %s, in line on Redis: ", n, working(w))
			if r == nil || r.waits.Count == 0 {
				list = append(list, claim{says: says + "fair", missing: true})
				continue
			}
			p50, p99 := r.waits.Quantile(0.5), r.waits.Quantile(0.99)
			starved, _ := r.starved()
			list = append(list,
				evenness(says, r),
				claim{says: says + "nobody starves", measured: fmt.Sprint(starved), holds: starved == 0},
				claim{
					says: says + "p99 at most 2.5 × the median", missing: !r.waits.tells(0.99),
					measured: fmt.Sprintf("%s ÷ %s = %s", r.waits.cell(0.99), r.waits.cell(0.5), number(p99.Millis/p50.Millis)),
					holds:    !p50.Longer && !p99.Longer && p99.Millis <= 2.5*p50.Millis,
				},
			)
		}
	}
	return list
}
