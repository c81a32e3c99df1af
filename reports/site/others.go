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

	"gonum.org/v1/plot"
	"gonum.org/v1/plot/vg/draw"

	"github.com/fencelab/fencelab/internal/footprint"
	"github.com/fencelab/fencelab/reports"
)

// blocked draws how long a dead holder is in the way against its TTL.
func blocked(data []byte) (*derived, error) {
	all, err := reports.DecodeSummaries(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	type key struct {
		lock string
		ttl  time.Duration
	}
	sum, count := map[key]float64{}, map[key]float64{}
	var ttls []float64
	var locks []string
	most, least := 0.0, 0.0 // of a lock's time by its TTL
	for _, r := range all {
		ttl, b := time.Duration(r.TTL), time.Duration(r.Blocked)
		if ttl <= 0 || b <= 0 {
			return nil, fmt.Errorf("%s, TTL %v: blocked for %v", r.Lock, ttl, b)
		}
		k := key{r.Lock, ttl}
		sum[k] += b.Seconds()
		count[k]++
		if !slices.Contains(ttls, ttl.Seconds()) {
			ttls = append(ttls, ttl.Seconds())
		}
		if !slices.Contains(locks, r.Lock) {
			locks = append(locks, r.Lock)
		}
		times := b.Seconds() / ttl.Seconds()
		most = max(most, times)
		if least == 0 || times < least {
			least = times
		}
	}
	if len(all) == 0 {
		return nil, errors.New("there are no runs in it")
	}
	slices.Sort(ttls)
	slices.Sort(locks)
	first, last := ttls[0], ttls[len(ttls)-1]
	lines := []line{{name: "the TTL", look: look{"quiet", dotted, nil}, xs: []float64{first, last}, ys: []float64{first, last}, bare: true, thin: true}}
	values := []float64{first}
	for _, lock := range locks {
		l := line{name: lock, look: looks[lock]}
		for _, ttl := range ttls {
			if k := (key{lock, time.Duration(ttl * float64(time.Second))}); count[k] > 0 {
				l.xs, l.ys = append(l.xs, ttl), append(l.ys, sum[k]/count[k])
				values = append(values, sum[k]/count[k])
			}
		}
		lines = append(lines, l)
	}
	y := logAxis("", values...)
	return &derived{charts: map[string]*chart{"blocked": {
		title: fmt.Sprintf("A killed holder is in the way for %.1f to %.1f × its TTL", least, most),
		about: "Seconds from the holder's death to the next grant against the lease's TTL, a line for each lock. The table has the numbers.",
		panels: []panel{{
			heading: "seconds until the next grant", height: 250,
			x: axis{label: "TTL, seconds", log: true, min: first * 0.9, max: last * 1.1, ticks: at(ttls...)}, y: y, lines: lines,
		}},
	}}}, nil
}

// memory draws what Redis uses while ten million locks are made and expire.
func memory(data []byte) (*derived, error) {
	all, err := footprint.Decode(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	d := &derived{charts: map[string]*chart{}}
	for _, run := range []struct{ name, file, words string }{
		{"redis active", "active", "Active expiry"},
		{"redis lazy", "lazy", "Lazy expiry alone"},
	} {
		used := line{name: "used", look: look{"blue", solid, nil}, bare: true}
		rss := line{name: "RSS", look: look{"red", dashed, nil}, bare: true}
		keys := line{name: "all", look: look{"ink", solid, nil}, bare: true}
		ttl := line{name: "with a TTL", look: look{"green", dashed, nil}, bare: true}
		var spans []span
		began, top, most := 0.0, 0.0, 0.0
		for _, l := range all {
			if l.Run != run.name || l.Redis == nil {
				continue
			}
			s := l.Redis
			for _, x := range []*line{&used, &rss, &keys, &ttl} {
				x.xs = append(x.xs, l.T)
			}
			used.ys, rss.ys = append(used.ys, float64(s.UsedMemory)/1e9), append(rss.ys, float64(s.UsedMemoryRSS)/1e9)
			keys.ys, ttl.ys = append(keys.ys, float64(s.Keys)/1e6), append(ttl.ys, float64(s.Expires)/1e6)
			top, most = max(top, float64(s.UsedMemory)/1e9, float64(s.UsedMemoryRSS)/1e9), max(most, float64(s.Keys)/1e6)
			if l.Kind == footprint.KindPhase {
				spans = append(spans, span{l.Phase, began, l.T})
				began = l.T
			}
		}
		if len(used.xs) == 0 {
			continue
		}
		peak := slices.Max(used.ys)
		x := axis{label: "seconds", min: 0, max: used.xs[len(used.xs)-1]}
		d.charts[run.file] = &chart{
			title: fmt.Sprintf("%s: used_memory reaches %s MB and ends at %s MB", run.words, number(peak*1e3), number(used.ys[len(used.ys)-1]*1e3)),
			about: "Above, gigabytes that Redis uses and that the system has given it, against seconds. Below, millions of keys, and of those with a TTL. Phases are marked.",
			panels: []panel{
				{heading: "GB", height: 190, x: x, y: axis{min: 0, max: top * 1.12}, lines: []line{used, rss}, spans: spans},
				{heading: "millions of keys", height: 150, x: x, y: axis{min: 0, max: most * 1.12}, lines: []line{keys, ttl}, spans: spans},
			},
		}
	}
	return d, nil
}

// shortSources are the sources of tokens as a tick has them, for which there is little room.
var shortSources = map[string]string{
	"Redis: SET NX PX, a lock without a token":  "SET",
	"Redis: INCR, a token without a lock":       "INCR",
	"Redis: `redislock`, INCR in the script":    "script",
	"etcd: Put, a token without a lock":         "Put",
	"etcd: `etcdlock`, the revision of its key": "lock",
}

// tokens draws what a token costs, a place on the axis for each source.
func tokens(data []byte) (*derived, error) {
	all, err := footprint.Decode(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	p50 := line{name: "median", look: look{"blue", solid, draw.CircleGlyph{}}, points: true}
	p99 := line{name: "99 %", look: look{"red", solid, draw.PyramidGlyph{}}, points: true}
	rate := line{name: "64 clients", look: look{"green", solid, draw.BoxGlyph{}}, points: true}
	var x axis
	most, least := 0.0, math.Inf(1) // of the medians in Redis, and in etcd
	for _, l := range all {
		if l.Cost == nil {
			continue
		}
		at := float64(len(p50.xs))
		for _, q := range []*line{&p50, &p99, &rate} {
			q.xs = append(q.xs, at)
		}
		ms := float64(l.Cost.P50) / 1e6
		if strings.HasPrefix(l.Cost.Source, "Redis") {
			most = max(most, ms)
		} else {
			least = min(least, ms)
		}
		p50.ys, p99.ys = append(p50.ys, ms), append(p99.ys, float64(l.Cost.P99)/1e6)
		rate.name = fmt.Sprintf("%d clients", l.Cost.Clients)
		rate.ys = append(rate.ys, l.Cost.PerSecond)
		name := cmp.Or(shortSources[l.Cost.Source], l.Cost.Source)
		if l.Cost.Servers > 1 {
			name = fmt.Sprintf("%d×%s", l.Cost.Servers, name)
		}
		x.ticks = append(x.ticks, plot.Tick{Value: at, Label: name})
	}
	if len(p50.xs) == 0 {
		return nil, errors.New("no source was measured in it")
	}
	x.min, x.max = -0.4, float64(len(p50.xs))-0.6
	return &derived{charts: map[string]*chart{"costs": {
		title: fmt.Sprintf("The median of a token for one client: %s ms at most from Redis, %s ms at least from etcd", number(most), number(least)),
		about: "Above, milliseconds for one token of one client, median and 99th percentile, for each source. Below, tokens a second of many clients. The table has the numbers.",
		panels: []panel{
			{heading: "ms for one token", height: 200, x: x, y: logAxis("", append(slices.Clone(p50.ys), p99.ys...)...), lines: []line{p50, p99}},
			{heading: "tokens a second", height: 160, x: x, y: logAxis("", rate.ys...), lines: []line{rate}},
		},
	}}}, nil
}
