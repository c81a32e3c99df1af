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

	"github.com/fencelab/fencelab/internal/bench/servercost"
	"github.com/fencelab/fencelab/reports"
	"github.com/fencelab/fencelab/scenarios/history"
)

func blocked(data []byte) (*derived, error) {
	all, err := reports.DecodeSummaries(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, errors.New("there are no runs in it")
	}
	most, least := 0.0, math.Inf(1) // of the ratio to the TTL
	for _, r := range all {
		if r.TTL <= 0 || r.Blocked <= 0 {
			return nil, fmt.Errorf("%s, TTL %v: blocked for %v", r.Lock, time.Duration(r.TTL), time.Duration(r.Blocked))
		}
		times := float64(r.Blocked) / float64(r.TTL)
		most, least = max(most, times), min(least, times)
	}
	seconds := func(d history.Duration) float64 { return time.Duration(d).Seconds() }
	ttls := slices.Sorted(slices.Values(distinct(all, func(r reports.Summary) float64 { return seconds(r.TTL) })))
	first, last := ttls[0], ttls[len(ttls)-1]
	lines := []line{{name: "the TTL", look: look{color: "quiet", dash: dotted}, xs: []float64{first, last}, ys: []float64{first, last}, bare: true}}
	values := []float64{first}
	for _, lock := range slices.Sorted(slices.Values(distinct(all, func(r reports.Summary) string { return r.Lock }))) {
		l := line{name: lock, look: looks[lock]}
		for _, ttl := range ttls {
			sum, n := 0.0, 0.0
			for _, r := range all {
				if r.Lock == lock && seconds(r.TTL) == ttl {
					sum, n = sum+seconds(r.Blocked), n+1
				}
			}
			if n > 0 {
				l.add(ttl, sum/n)
			}
		}
		lines, values = append(lines, l), append(values, l.ys...)
	}
	y := logAxis("", values)
	return &derived{charts: map[string]*chart{"blocked": {
		title: fmt.Sprintf("A killed holder is in the way for %.1f to %.1f × its TTL", least, most),
		about: "Seconds from the holder's death to the next grant against the lease's TTL, a line for each lock. The table has the numbers.",
		panels: []panel{{
			heading: "seconds until the next grant", height: 250,
			x: axis{label: "TTL, seconds", log: true, min: first * 0.9, max: last * 1.1, ticks: at(ttls...)}, y: y, lines: lines,
		}},
	}}}, nil
}

func memory(data []byte) (*derived, error) {
	all, err := servercost.Decode(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	d := &derived{charts: map[string]*chart{}}
	for _, run := range []struct{ name, file, words string }{
		{"redis active", "active", "Active expiry"},
		{"redis lazy", "lazy", "Lazy expiry alone"},
	} {
		used := line{name: "used", look: look{color: "blue", dash: solid}, bare: true}
		rss := line{name: "RSS", look: look{color: "red", dash: dashed}, bare: true}
		keys := line{name: "all", look: look{color: "ink", dash: solid}, bare: true}
		ttl := line{name: "with a TTL", look: look{color: "green", dash: dashed}, bare: true}
		var spans []span
		began, top, most := 0.0, 0.0, 0.0
		for _, l := range all {
			if l.Run != run.name || l.Redis == nil {
				continue
			}
			s := l.Redis
			used.add(l.T, float64(s.UsedMemory)/1e9)
			rss.add(l.T, float64(s.UsedMemoryRSS)/1e9)
			keys.add(l.T, float64(s.Keys)/1e6)
			ttl.add(l.T, float64(s.Expires)/1e6)
			top, most = max(top, float64(s.UsedMemory)/1e9, float64(s.UsedMemoryRSS)/1e9), max(most, float64(s.Keys)/1e6)
			if l.Kind == servercost.KindPhase {
				spans = append(spans, span{l.Phase, began, l.T})
				began = l.T
			}
		}
		peak := slices.Max(used.ys)
		x := axis{label: "seconds", min: 0, max: used.xs[len(used.xs)-1]}
		d.charts[run.file] = &chart{
			title: fmt.Sprintf("%s: used_memory reaches %s MB and ends at %s MB", run.words, reports.Number(peak*1e3), reports.Number(used.ys[len(used.ys)-1]*1e3)),
			about: "Above, gigabytes that Redis uses and that the system has given it, against seconds. Below, millions of keys, and of those with a TTL. Phases are marked.",
			panels: []panel{
				{heading: "GB", height: 190, x: x, y: axis{min: 0, max: top * 1.12}, lines: []line{used, rss}, spans: spans},
				{heading: "millions of keys", height: 150, x: x, y: axis{min: 0, max: most * 1.12}, lines: []line{keys, ttl}, spans: spans},
			},
		}
	}
	return d, nil
}

var shortSources = map[string]string{
	"Redis: SET NX PX, a lock without a token":  "SET",
	"Redis: INCR, a token without a lock":       "INCR",
	"Redis: `redislock`, INCR in the script":    "script",
	"etcd: Put, a token without a lock":         "Put",
	"etcd: `etcdlock`, the revision of its key": "lock",
}

func tokens(data []byte) (*derived, error) {
	all, err := servercost.Decode(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	p50 := line{name: "median", look: look{"blue", solid, circle, false}, points: true}
	p99 := line{name: "99 %", look: look{"red", solid, triangle, false}, points: true}
	rate := line{name: "64 clients", look: look{"green", solid, square, false}, points: true}
	var x axis
	most, least := 0.0, math.Inf(1) // of the medians in Redis, and in etcd
	for _, l := range all {
		if l.Cost == nil {
			continue
		}
		at := float64(len(p50.xs))
		ms := float64(l.Cost.P50) / 1e6
		if strings.HasPrefix(l.Cost.Source, "Redis") {
			most = max(most, ms)
		} else {
			least = min(least, ms)
		}
		p50.add(at, ms)
		p99.add(at, float64(l.Cost.P99)/1e6)
		rate.add(at, l.Cost.PerSecond)
		rate.name = fmt.Sprintf("%d clients", l.Cost.Clients)
		name := cmp.Or(shortSources[l.Cost.Source], l.Cost.Source)
		if l.Cost.Servers > 1 {
			name = fmt.Sprintf("%d×%s", l.Cost.Servers, name)
		}
		x.ticks = append(x.ticks, tick{at, name})
	}
	x.min, x.max = -0.4, float64(len(p50.xs))-0.6
	return &derived{charts: map[string]*chart{"costs": {
		title: fmt.Sprintf("The median of a token for one client: %s ms at most from Redis, %s ms at least from etcd", reports.Number(most), reports.Number(least)),
		about: "Above, milliseconds for one token of one client, median and 99th percentile, for each source. Below, tokens a second of many clients. The table has the numbers.",
		panels: []panel{
			{heading: "ms for one token", height: 200, x: x, y: logAxis("", p50.ys, p99.ys), lines: []line{p50, p99}},
			{heading: "tokens a second", height: 160, x: x, y: logAxis("", rate.ys), lines: []line{rate}},
		},
	}}}, nil
}
