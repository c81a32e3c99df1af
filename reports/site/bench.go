package site

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/fencelab/fencelab/reports"
)

var processors = regexp.MustCompile(`-\d+$`)

// Benchmarks reads the output of go test -bench: metrics, by benchmark, without its prefix, and unit.
func Benchmarks(out []byte) (map[string]map[string]float64, error) {
	all := map[string]map[string]float64{}
	for line := range bytes.Lines(out) {
		text := strings.TrimSpace(string(line))
		fields := strings.Fields(text)
		for _, word := range []string{"FAIL", "SKIP", "--- FAIL", "--- SKIP"} {
			if strings.HasPrefix(text, word) {
				return nil, fmt.Errorf("not recorded to its end: %s", text)
			}
		}
		if len(fields) < 4 || !strings.HasPrefix(text, "Benchmark") {
			continue
		}
		name := processors.ReplaceAllString(strings.TrimPrefix(fields[0], "Benchmark"), "")
		if all[name] != nil {
			return nil, fmt.Errorf("%s is recorded twice", name)
		}
		all[name] = map[string]float64{}
		for i := 2; i+1 < len(fields); i += 2 {
			value, err := strconv.ParseFloat(fields[i], 64)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", name, err)
			}
			all[name][fields[i+1]] = value
		}
	}
	if len(all) == 0 {
		return nil, errors.New("there is no benchmark in it")
	}
	return all, nil
}

func updates(data []byte) (*derived, error) {
	all, err := Benchmarks(data)
	if err != nil {
		return nil, err
	}
	var rows []string
	most, least := 0.0, math.Inf(1) // times that cas does the work for one update
	tail := panel{heading: "99 % of updates take less than, ms", x: axis{log: true, min: math.Inf(1)}}
	work := panel{heading: "times that the work is done for one update", x: axis{log: true, min: 0.9}}
	ways := []line{
		{name: "cas", look: look{"red", solid, triangle, false}},
		{name: "cas+backoff", look: look{"purple", solid, square, true}},
		{name: "lock", look: look{"blue", solid, circle, false}},
	}
	for _, p := range []*panel{&tail, &work} {
		for _, l := range ways {
			p.lines = append(p.lines, line{name: l.name, look: l.look, points: true})
		}
	}
	for _, store := range []struct{ name, label string }{{"redis", "Redis"}, {"postgres", "PostgreSQL"}} {
		for _, load := range []struct{ name, label string }{
			{"writers=16/keys=many", "16, many keys"}, {"writers=16/keys=one", "16, one key"}, {"writers=128/keys=one", "128, one key"},
		} {
			for i := range ways {
				name := fmt.Sprintf("Update/store=%s/%s/work=5ms/%s", store.name, load.name, ways[i].name)
				m, ok := all[name]
				if !ok {
					return nil, fmt.Errorf("%s isn't recorded", name)
				}
				tail.lines[i].add(m["p99-ms"], float64(len(rows)))
				work.lines[i].add(m["tries/update"], float64(len(rows)))
				tail.x.min, tail.x.max = min(tail.x.min, m["p99-ms"]/1.2), max(tail.x.max, m["p99-ms"]*1.2)
				work.x.max = max(work.x.max, m["tries/update"]*1.2)
				if i == 0 && load.name != "writers=16/keys=many" {
					most, least = max(most, m["tries/update"]), min(least, m["tries/update"])
				}
			}
			rows = append(rows, store.label+", "+load.label)
		}
	}
	c := &chart{
		title: fmt.Sprintf("5 ms of work on one key: without a lock it is done %.0f to %.0f times for one update", least, most),
		about: "Two panels with a row for each server and load, and a mark for compare-and-swap without backoff, with it, and for a lock: the 99th percentile of an update's time, and how often the work is done for one update. The table has the numbers.",
	}
	for _, p := range []panel{tail, work} {
		p.rows, p.height = rows, 22*float64(len(rows))+24
		c.panels = append(c.panels, p)
	}
	return &derived{charts: map[string]*chart{"updates": c}}, nil
}

func storeCosts(data []byte) (*derived, error) {
	all, err := Benchmarks(data)
	if err != nil {
		return nil, err
	}
	type cost struct {
		name string
		more float64 // µs
	}
	var costs []cost
	for name, metrics := range all {
		store, ok := strings.CutPrefix(name, "FenceCheck/store=")
		for unit := range metrics {
			if way, isMore := strings.CutPrefix(unit, "+µs/"); ok && isMore {
				costs = append(costs, cost{store + ": " + way, metrics[unit]})
			}
		}
	}
	if len(costs) == 0 {
		return nil, errors.New("there is no FenceCheck in it")
	}
	slices.SortFunc(costs, func(a, b cost) int { return cmp.Or(cmp.Compare(b.more, a.more), cmp.Compare(a.name, b.name)) })
	marks := line{name: "more than the same write without it", look: look{"blue", solid, circle, false}, points: true}
	p := panel{heading: "µs", x: axis{min: min(0, costs[len(costs)-1].more) - 5, max: costs[0].more * 1.05}, height: 22*float64(len(costs)) + 24}
	for i, c := range costs {
		p.rows = append(p.rows, c.name)
		marks.add(c.more, float64(i))
	}
	p.lines = []line{marks}
	return &derived{charts: map[string]*chart{"checks": {
		title:  fmt.Sprintf("A fence check adds at most %s µs to a write", reports.Number(costs[0].more)),
		about:  "A row for each store and way to write: by how many microseconds it takes longer than the yardstick. The table has the numbers.",
		panels: []panel{p},
	}}}, nil
}
