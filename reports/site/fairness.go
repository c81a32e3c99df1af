package site

import (
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/fencelab/fencelab/reports"
)

func fairness(data []byte) (*derived, error) {
	all, d, err := experiment(data, fairnessClaims)
	if err != nil {
		return nil, err
	}
	closed, open := all.of("closed"), all.of("open")
	d.tables["closed"], d.tables["open"] = closedTable(closed), openTable(open)
	d.tables["processes"] = closedTable(all.of("processes"))
	d.charts["waits"] = tails(closed)
	d.charts["shares"] = shares(closed)
	d.charts["open"] = tailsOf(open, []string{"redis", "redis-spin", "redsync", "redislock", "etcd", "zookeeper"})
	return d, nil
}

func overtaken(r *run) float64 {
	return 100 * float64(r.Order.Reordered) / float64(r.Order.Count)
}

func orderCells(r *run) []string {
	return []string{
		perSecond(r.SectionsPerS), r.cell(0.5), r.cell(0.99), r.cell(0.999), reports.Number(float64(r.Order.Inversions)),
		reports.Number(overtaken(r)) + " %", reports.Number(float64(r.Order.Max)),
	}
}

func closedTable(closed runs) string {
	var rows [][]string
	for _, n := range closed.contenders() {
		for _, w := range closed.works() {
			for _, lock := range closed.locks() {
				if r := closed.closed(lock, n, w); r != nil {
					row := append([]string{reports.Number(float64(n)), strings.TrimSuffix(working(w), " of work"), closed.shownIn(lock)}, orderCells(r)...)
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
		rows = append(rows, append([]string{open.shownIn(r.Config.Backend), perSecond(r.Config.Rate)}, append(orderCells(r), reports.Number(float64(r.Unserved.Count)))...))
	}
	return table([]string{"lock", "offered", "sections", "median, ms", "99 %", "99.9 %", "inversions", "overtaken", "most often", "waiting at the end"}, rows)
}

func tails(closed runs) *chart {
	queue, spin := closed.closed("redis", crowd, 0), closed.closed("redis-spin", crowd, 0)
	c := &chart{
		title: fmt.Sprintf("%d contenders, no work: 1 in 100 waits for longer than %s ms in the FIFO queue, and than %s ms spinning", crowd,
			trim(queue.cell(0.99)), trim(spin.cell(0.99))),
		about: "The share of acquisitions that wait for longer, in per cent, against the wait in milliseconds: without work, and with 5 ms of it. " +
			"A line that ends above the axis belongs to a lock of whose longest waits the run knows only that they are longer.",
	}
	locks := []string{"redis", "redis-spin", "etcd", "zookeeper"}
	for _, w := range closed.works() {
		var some runs
		for _, lock := range locks {
			if r := closed.closed(lock, crowd, w); r != nil {
				some = append(some, r)
			}
		}
		c.panels = append(c.panels, curves(working(w)+": % that wait for longer", some))
	}
	return c
}

// trim: the words say that it is a lower bound.
func trim(cell string) string { return strings.TrimPrefix(cell, "> ") }

func tailsOf(all runs, locks []string) *chart {
	some := all.where(func(r *run) bool { return slices.Contains(locks, r.Config.Backend) })
	r, s := best(some, shortestTail), first(some.by("redis-spin"))
	return &chart{
		title: fmt.Sprintf("Arrivals at %s, %s: 1 in 100 waits for longer than %s ms for %s, and %s ms for %s", perSecond(r.Config.Rate), working(r.Config.Work.D()),
			trim(r.cell(0.99)), shown(r.Config.Backend), trim(s.cell(0.99)), shown(s.Config.Backend)),
		about:  "The share of acquisitions that wait for longer, in per cent, against the wait in milliseconds. The table has the numbers.",
		panels: []panel{curves("% that wait for longer", some)},
	}
}

func curves(heading string, some runs) panel {
	p := panel{heading: heading, height: 220, y: axis{log: true, min: 0.1, max: 100, ticks: at(0.1, 1, 10, 100)}}
	var xs [][]float64
	for _, r := range some {
		l := line{name: shown(r.Config.Backend), look: looks[r.Config.Backend]}
		last := math.Inf(1)
		for i, s := range r.waits.Steps {
			if i > 0 && i < len(r.waits.Steps)-1 && s.Left >= last*0.95 {
				continue // a point for each 5 % that the share shrinks by is enough
			}
			l.add(max(s.Millis, 0.01), max(100*s.Left, p.y.min))
			if last = s.Left; 100*last < p.y.min {
				break
			}
		}
		xs = append(xs, l.xs)
		p.lines = append(p.lines, l)
	}
	p.x = logAxis("wait, ms", xs...)
	return p
}

func shares(closed runs) *chart {
	locks := closed.locks()
	names := slices.Clone(locks)
	even := 0
	for i, lock := range locks {
		names[i] = shown(lock)
		if r := closed.closed(lock, crowd, 0); r != nil && r.even() {
			even++
		}
	}
	c := &chart{
		title: fmt.Sprintf("%d contenders, no work: %d of %d locks share the lock evenly", crowd, even, len(locks)),
		about: "Two panels with a row for each lock: Jain's index of the contenders' critical sections, from 0 to 1, and the per cent of acquisitions that were overtaken. The table has the numbers.",
	}
	marks := map[time.Duration]look{0: {"blue", solid, circle, false}, 5 * time.Millisecond: {"red", solid, square, true}}
	for _, p := range []struct {
		heading string
		most    float64
		of      func(*run) float64
	}{
		{"Jain's index of critical sections per contender (1: all have the same)", 1, func(r *run) float64 { return r.Share.Jain }},
		{"acquisitions that a later one overtook, %", 100, overtaken},
	} {
		pan := panel{
			heading: p.heading, height: 22*float64(len(locks)) + 24, rows: names,
			x: axis{min: -0.02 * p.most, max: 1.03 * p.most, ticks: at(0, p.most/4, p.most/2, 3*p.most/4, p.most)},
		}
		for _, w := range closed.works() {
			l := line{name: working(w), look: marks[w], points: true}
			for i, lock := range locks {
				if r := closed.closed(lock, crowd, w); r != nil {
					l.add(p.of(r), float64(i))
				}
			}
			pan.lines = append(pan.lines, l)
		}
		c.panels = append(c.panels, pan)
	}
	return c
}

func fairnessClaims(all runs) (list []claim) {
	closed := all.of("closed")
	for _, n := range closed.contenders() {
		for _, w := range closed.works() {
			list = append(list, fair(fmt.Sprintf("%d contenders, %s, FIFO queue on Redis: ", n, working(w)), closed.closed("redis", n, w))...)
		}
	}
	return list
}
