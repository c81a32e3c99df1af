package site

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"time"

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
