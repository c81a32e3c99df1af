package site

import (
	"cmp"
	"fmt"
	"html"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/fencelab/fencelab/reports"
)

// A chart is as wide as a phone, so that its text is readable there, and is scaled up on wider screens.
const (
	width       = 392.0
	lineHeight  = 13.0
	titleHeight = 17.0
	letter      = 6.7 // of a label
	titleRunes  = 44
)

// Okabe and Ito's colours, with more contrast. No two lines of a chart differ in colour alone.
var palette = []struct{ name, light, dark string }{
	{"paper", "#FFFFFF", "#14171B"},
	{"ink", "#1C2127", "#E7EAEE"},
	{"quiet", "#59636E", "#9DA7B3"},
	{"rule", "#D9DEE4", "#30363D"},
	{"blue", "#0072B2", "#56B4E9"},
	{"red", "#C44E00", "#FF9A5C"},
	{"green", "#00795A", "#2FC79B"},
	{"purple", "#A24685", "#E29CC5"},
	{"brown", "#8F6200", "#E6B02E"},
	{"teal", "#2B7A99", "#9CD8F2"},
}

func ink(name string) string {
	for _, p := range palette {
		if p.name == name {
			return "var(--" + name + "," + p.light + ")"
		}
	}
	return ink("ink")
}

type look struct {
	color, dash, glyph string
	hollow             bool
}

const (
	solid  = ""
	dashed = "6 3"
	dotted = "1.5 2.5"
	mixed  = "7 2 1.5 2"

	circle   = "M-3 0a3 3 0 1 0 6 0a3 3 0 1 0-6 0z"
	square   = "M-2.6-2.6H2.6V2.6H-2.6z"
	triangle = "M0-3.4 3 2.2H-3z"
	plus     = "M-3.4 0H3.4M0-3.4V3.4"
	cross    = "M-2.6-2.6 2.6 2.6M-2.6 2.6 2.6-2.6"
)

// This module's locks have filled glyphs.
var looks = map[string]look{
	"redis":           {"blue", solid, circle, false},
	"redis-spin":      {"red", dashed, triangle, false},
	"redsync":         {"green", dotted, square, true},
	"redislock":       {"purple", mixed, triangle, true},
	"rueidislock":     {"brown", dashed, plus, false},
	"redsync-100ms":   {"green", mixed, cross, false},
	"redislock-100ms": {"purple", dotted, plus, false},
	"redlock":         {"ink", solid, square, false},
	"redsync-5":       {"teal", dotted, cross, false},
	"etcd":            {"green", solid, square, false},
	"etcd-mutex":      {"green", dashed, square, true},
	"zookeeper":       {"purple", solid, triangle, false},
	"zk-lock":         {"purple", dashed, triangle, true},
	"consul":          {"brown", mixed, cross, false},
	"postgres":        {"red", dotted, plus, false},
}

type chart struct {
	title  string // visible
	about  string // for screen readers
	panels []panel
}

type panel struct {
	heading string // of the y axis, with the unit
	height  float64
	x, y    axis
	lines   []line
	rows    []string // names of rows, from the top; a mark's y is its row
	spans   []span
}

type axis struct {
	label    string
	log      bool
	min, max float64
	ticks    []tick // nil: see usual
}

type tick struct {
	value float64
	label string
}

type line struct {
	name    string
	look    look
	xs, ys  []float64
	atLeast map[int]bool // points that are lower bounds, marked with an arrow
	points  bool         // glyphs alone
	bare    bool         // no glyphs
}

func (l *line) add(x, y float64) { l.xs, l.ys = append(l.xs, x), append(l.ys, y) }

type span struct {
	name     string
	from, to float64
}

type point struct{ x, y float64 }

type picture struct{ strings.Builder }

func (p *picture) text(class string, x, y float64, s string) {
	_, _ = fmt.Fprintf(p, "<text class=\"%s\" x=\"%.1f\" y=\"%.1f\">%s</text>\n", class, x, y, html.EscapeString(s))
}

func (p *picture) stroke(color, dash string, w float64, pts ...point) {
	_, _ = fmt.Fprintf(p, `<path style="stroke:%s" stroke-width="%v"`, ink(color), w)
	if dash != "" {
		_, _ = fmt.Fprintf(p, ` stroke-dasharray="%s"`, dash)
	}
	p.WriteString(` d="M`)
	for i, pt := range pts {
		if i > 0 {
			p.WriteString(" ")
		}
		_, _ = fmt.Fprintf(p, "%.1f %.1f", pt.x, pt.y)
	}
	p.WriteString("\" />\n")
}

func (p *picture) glyph(l look, at point) {
	fill := l.color
	if l.hollow {
		fill = "paper"
	}
	_, _ = fmt.Fprintf(p, `<path style="stroke:%s;fill:%s" stroke-width="1.4" transform="translate(%.1f %.1f)" d="%s" />`+"\n", ink(l.color), ink(fill), at.x, at.y, l.glyph)
}

// svg requires a name that is unique on the page.
func (c *chart) svg(name string) []byte {
	var body picture
	y := 5.0
	for _, l := range wrap(c.title, titleRunes) {
		body.text("title", 4, y+13, l)
		y += titleHeight
	}
	y += 5
	for i := range c.panels {
		y = c.panels[i].draw(&body, y)
	}

	var b strings.Builder
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="560" viewBox="0 0 %v %v" role="img" aria-labelledby="%s-title %s-desc">`+"\n", width, math.Ceil(y), name, name)
	fmt.Fprintf(&b, "<title id=\"%s-title\">%s</title>\n<desc id=\"%s-desc\">%s</desc>\n<style>\n.chart {", name, html.EscapeString(c.title), name, html.EscapeString(c.about))
	for _, p := range palette {
		fmt.Fprintf(&b, " --%s: %s;", p.name, p.light)
	}
	b.WriteString(" }\n@media screen and (prefers-color-scheme: dark) { .chart {")
	for _, p := range palette {
		fmt.Fprintf(&b, " --%s: %s;", p.name, p.dark)
	}
	b.WriteString(" } }\n")
	b.WriteString(".chart text { font: 11px Arial, Helvetica, \"Liberation Sans\", sans-serif; fill: " + ink("ink") + "; }\n")
	b.WriteString(".chart .title { font-size: 12.5px; font-weight: bold; }\n.chart .quiet { fill: " + ink("quiet") + "; }\n")
	b.WriteString(".chart .middle { text-anchor: middle; }\n.chart .end { text-anchor: end; }\n.chart path { fill: none; }\n</style>\n")
	fmt.Fprintf(&b, "<rect style=\"fill:%s\" width=\"100%%\" height=\"100%%\" />\n", ink("paper"))
	return []byte(b.String() + body.String() + "</svg>\n")
}

func (p *panel) draw(b *picture, top float64) float64 {
	if p.heading != "" {
		b.text("quiet", 4, top+14, p.heading)
	}
	top += 22
	if p.rows != nil { // the legend is above
		x := 12.0
		for _, k := range p.lines {
			b.glyph(k.look, point{x, top + 7})
			b.text("", x+9, top+11, k.name)
			x += 25 + letter*float64(len(k.name))
		}
		top += 20
	}
	bottom, end := top+p.height, top+p.height+2
	x, y := p.x, p.y
	right := width - 10
	for _, l := range p.lines {
		if l.name != "" && p.rows == nil {
			right = min(right, width-26-letter*float64(len(l.name)))
		}
	}
	if p.rows != nil {
		y = axis{min: float64(len(p.rows)) - 0.5, max: -0.5} // from the top
		for i, name := range p.rows {
			y.ticks = append(y.ticks, tick{float64(i), name})
		}
	}
	for _, a := range []*axis{&x, &y} {
		if a.ticks == nil {
			a.ticks = a.usual()
		}
	}
	bottom -= 16
	if x.label != "" {
		bottom -= 15
	}
	left := 0.0
	for _, t := range y.ticks {
		left = max(left, 12+letter*float64(len([]rune(t.label))))
	}
	toX := func(v float64) float64 { return left + (right-left)*x.share(v) }
	toY := func(v float64) float64 { return bottom - (bottom-top)*y.share(v) }
	at := func(l *line, i int) point { return point{toX(l.xs[i]), toY(l.ys[i])} }

	for _, t := range x.ticks {
		b.stroke("rule", "", 0.7, point{toX(t.value), top}, point{toX(t.value), bottom})
		b.text("quiet middle", toX(t.value), bottom+13, t.label)
	}
	for _, t := range y.ticks {
		b.stroke("rule", "", 0.7, point{left, toY(t.value)}, point{right, toY(t.value)})
		class := "quiet end"
		if p.rows != nil {
			class = "end"
		}
		b.text(class, left-6, toY(t.value)+4, t.label)
	}
	b.stroke("quiet", "", 0.7, point{left, top}, point{left, bottom}, point{right, bottom})
	b.text("quiet middle", (left+right)/2, bottom+28, x.label)
	for _, s := range p.spans {
		from, to := toX(s.from), toX(s.to)
		b.stroke("quiet", dotted, 0.6, point{to, top}, point{to, bottom})
		if letter*float64(len(s.name)) < to-from-2 {
			b.text("quiet middle", (from+to)/2, top+10, s.name)
		}
	}
	for i := range p.lines {
		l := &p.lines[i]
		var pts []point
		for j := range l.xs {
			pts = append(pts, at(l, j))
		}
		if !l.points && len(pts) > 0 {
			b.stroke(l.look.color, l.look.dash, 1.7, pts...)
		}
		if !l.bare {
			for _, pt := range spread(pts) {
				b.glyph(l.look, pt)
			}
		}
	}
	for i := range p.lines {
		l := &p.lines[i]
		for _, j := range slices.Sorted(maps.Keys(l.atLeast)) {
			pt := at(l, j)
			b.stroke(l.look.color, "", 1.1, point{pt.x, pt.y - 3}, point{pt.x, pt.y - 11}, point{pt.x - 3, pt.y - 8}, point{pt.x, pt.y - 11}, point{pt.x + 3, pt.y - 8})
		}
	}
	if p.rows == nil {
		p.names(b, right, top, bottom, at)
	}
	return end
}

func spread(pts []point) (some []point) {
	for i, p := range pts {
		if n := len(some); i == 0 || math.Hypot(p.x-some[n-1].x, p.y-some[n-1].y) >= 16 {
			some = append(some, p)
		}
	}
	return some
}

// names writes the name of each line at its end, moved up or down until none overlap.
func (p *panel) names(b *picture, right, top, bottom float64, at func(*line, int) point) {
	type label struct {
		l   *line
		end point
		y   float64
	}
	var all []label
	for i := range p.lines {
		if l := &p.lines[i]; l.name != "" && len(l.xs) > 0 {
			end := at(l, len(l.xs)-1)
			all = append(all, label{l, end, end.y})
		}
	}
	slices.SortStableFunc(all, func(a, b label) int { return cmp.Compare(a.y, b.y) })
	for range 200 { // each pass moves neighbours apart by half of the missing distance
		for i := 1; i < len(all); i++ {
			if lack := lineHeight - (all[i].y - all[i-1].y); lack > 0 {
				all[i-1].y -= lack / 2
				all[i].y += lack / 2
			}
		}
		for i := range all {
			all[i].y = min(max(all[i].y, top-4+float64(i)*lineHeight), bottom-float64(len(all)-1-i)*lineHeight)
		}
	}
	x := right + 16
	for _, l := range all {
		b.stroke("quiet", "", 0.5, point{l.end.x + 5, l.end.y}, point{x - 5, l.y})
		text := x + 7
		if l.l.bare {
			b.stroke(l.l.look.color, l.l.look.dash, 1.7, point{x - 5, l.y}, point{x + 7, l.y})
			text += 3
		} else {
			b.glyph(l.l.look, point{x, l.y})
		}
		b.text("", text, l.y+4, l.l.name)
	}
}

func (a *axis) share(v float64) float64 {
	lo, hi := a.min, a.max
	if a.log {
		lo, hi, v = math.Log(lo), math.Log(hi), math.Log(v)
	}
	return min(max((v-lo)/(hi-lo), 0), 1)
}

func (a *axis) usual() (ticks []tick) {
	if a.log {
		return decades(a.min, a.max)
	}
	step := math.Pow(10, math.Floor(math.Log10((a.max-a.min)/2)))
	for _, times := range []float64{2, 2.5, 2} { // 2, 5, 10
		if (a.max-a.min)/step > 6 {
			step *= times
		}
	}
	for k := math.Ceil(a.min / step); k*step <= a.max; k++ {
		ticks = append(ticks, at(k*step)...)
	}
	return ticks
}

func decades(lo, hi float64) (ticks []tick) {
	for e := math.Ceil(math.Log10(lo) - 1e-9); e <= math.Log10(hi)+1e-9; e++ {
		v := math.Pow(10, e)
		ticks = append(ticks, tick{v, reports.Number(v)})
	}
	return ticks
}

// logAxis goes from one power of ten to another. Zero is below everything else, as "none".
func logAxis(label string, values ...[]float64) axis {
	lo, hi, none := math.Inf(1), math.Inf(-1), false
	for _, v := range slices.Concat(values...) {
		if v > 0 {
			lo, hi = min(lo, v), max(hi, v)
		} else {
			none = true
		}
	}
	if math.IsInf(lo, 1) {
		lo, hi = 1, 10
	}
	a := axis{label: label, log: true, min: math.Pow(10, math.Floor(math.Log10(lo))), max: math.Pow(10, math.Ceil(math.Log10(hi)))}
	if a.min == a.max {
		a.max *= 10
	}
	if none {
		a.ticks = append(decades(a.min, a.max), tick{a.min / 3, "none"})
		a.min /= 3
	}
	return a
}

func at(values ...float64) (ticks []tick) {
	for _, v := range values {
		ticks = append(ticks, tick{v, reports.Number(v)})
	}
	return ticks
}

func wrap(s string, n int) (lines []string) {
	for word := range strings.FieldsSeq(s) {
		if k := len(lines) - 1; k >= 0 && len([]rune(lines[k]+" "+word)) <= n {
			lines[k] += " " + word
		} else {
			lines = append(lines, word)
		}
	}
	return lines
}
