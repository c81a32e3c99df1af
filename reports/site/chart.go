package site

import (
	"bytes"
	"cmp"
	"fmt"
	"html"
	"image/color"
	"maps"
	"math"
	"regexp"
	"slices"
	"strconv"
	"strings"

	xfont "golang.org/x/image/font"
	"gonum.org/v1/plot"
	"gonum.org/v1/plot/font"
	"gonum.org/v1/plot/plotter"
	"gonum.org/v1/plot/text"
	"gonum.org/v1/plot/vg"
	"gonum.org/v1/plot/vg/draw"
	"gonum.org/v1/plot/vg/vgsvg"
)

// A chart is as wide as a phone, so that its text can be read there; where there is more room the whole of it grows.
const (
	width       = vg.Length(392)
	labelRoom   = vg.Length(106) // right of the axes, for the names of the lines
	lineHeight  = vg.Length(13)
	titleHeight = vg.Length(18)
)

// The colours of a chart, each with what it becomes on a dark screen. Those of the lines are Okabe and Ito's, darkened or
// lightened until they stand out from the paper. No two lines of a chart differ in colour alone.
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

func paint(name string) color.Color {
	for _, p := range palette {
		if p.name == name {
			n, err := strconv.ParseUint(p.light[1:], 16, 32)
			if err != nil {
				panic(err) // it is a constant
			}
			return color.RGBA{R: uint8(n >> 16), G: uint8(n >> 8), B: uint8(n), A: 255}
		}
	}
	panic("site: no colour " + name)
}

// look is how a line is told from the others: by colour, dashes and glyph.
type look struct {
	color string
	dash  []vg.Length
	glyph draw.GlyphDrawer
}

var (
	solid  []vg.Length
	dashed = []vg.Length{6, 3}
	dotted = []vg.Length{1.5, 2.5}
	mixed  = []vg.Length{7, 2, 1.5, 2}
)

var (
	plus  = strokes{{X: 1}, {Y: 1}}
	cross = strokes{{X: 0.75, Y: 0.75}, {X: 0.75, Y: -0.75}}
)

// looks are those of locks. This module's are solid or short of it, and filled.
var looks = map[string]look{
	"redis":           {"blue", solid, draw.CircleGlyph{}},
	"redis-spin":      {"red", dashed, draw.PyramidGlyph{}},
	"redsync":         {"green", dotted, hollow{draw.BoxGlyph{}}},
	"redislock":       {"purple", mixed, hollow{draw.PyramidGlyph{}}},
	"rueidislock":     {"brown", dashed, plus},
	"redsync-100ms":   {"green", mixed, cross},
	"redislock-100ms": {"purple", dotted, plus},
	"redlock":         {"ink", solid, draw.BoxGlyph{}},
	"redsync-5":       {"teal", dotted, cross},
	"etcd":            {"green", solid, draw.BoxGlyph{}},
	"etcd-mutex":      {"green", dashed, hollow{draw.BoxGlyph{}}},
	"zookeeper":       {"purple", solid, draw.PyramidGlyph{}},
	"zk-lock":         {"purple", dashed, hollow{draw.PyramidGlyph{}}},
	"consul":          {"brown", mixed, cross},
	"postgres":        {"red", dotted, plus},
}

// hollow is a filled glyph with a hole.
type hollow struct{ filled draw.GlyphDrawer }

// DrawGlyph implements [draw.GlyphDrawer].
func (h hollow) DrawGlyph(c *draw.Canvas, s draw.GlyphStyle, p vg.Point) {
	h.filled.DrawGlyph(c, s, p)
	s.Radius -= 1.5
	s.Color = paint("paper")
	c.SetColor(s.Color)
	h.filled.DrawGlyph(c, s, p)
}

// strokes is a glyph of lines through its middle, each by where it ends, in radii.
type strokes []vg.Point

// DrawGlyph implements [draw.GlyphDrawer].
func (l strokes) DrawGlyph(c *draw.Canvas, s draw.GlyphStyle, p vg.Point) {
	for _, d := range l {
		x, y := d.X*s.Radius, d.Y*s.Radius
		c.StrokeLine2(draw.LineStyle{Color: s.Color, Width: 1.6}, p.X-x, p.Y-y, p.X+x, p.Y+y)
	}
}

// chart is panels below each other under one title.
type chart struct {
	title  string // what is seen
	about  string // for who can't see it
	panels []panel
}

// panel is a pair of axes with lines, or with a row of marks for each name.
type panel struct {
	heading string // what its y axis has, with the unit
	height  vg.Length
	x, y    axis
	lines   []line
	rows    []string // names of rows, from the top; y of a mark is its row
	key     []line   // glyphs that are explained above it
	spans   []span
}

type axis struct {
	label    string
	log      bool
	min, max float64
	ticks    []plot.Tick // nil: as they come out
}

type line struct {
	name    string
	look    look
	xs, ys  []float64
	atLeast map[int]bool // points that are only known to be higher: an arrow says so
	points  bool         // glyphs alone
	bare    bool         // no glyphs
	thin    bool
}

// span is a stretch of the x axis that has a name.
type span struct {
	name     string
	from, to float64
}

func style(size vg.Length, ink string, x text.XAlignment) text.Style {
	return text.Style{
		Color: paint(ink), Font: font.Font{Typeface: "Liberation", Variant: "Sans", Size: size}, XAlign: x, YAlign: text.YCenter, Handler: plot.DefaultTextHandler,
	}
}

// svg draws c. Its name must be one of its own among the drawings of a page.
func (c *chart) svg(name string) ([]byte, error) {
	head := style(13.5, "ink", text.XLeft)
	head.Font.Weight = xfont.WeightBold
	title := wrap(head, c.title, width-8)
	height := titleHeight*vg.Length(len(title)) + 10
	for _, p := range c.panels {
		height += p.full()
	}
	canvas := vgsvg.New(width, height)
	dc := draw.New(canvas)
	dc.SetColor(paint("paper"))
	dc.Fill(dc.Path())
	y := height - 5
	for _, l := range title {
		dc.FillText(head, vg.Point{X: 4, Y: y - titleHeight/2}, l)
		y -= titleHeight
	}
	for i := range c.panels {
		p := &c.panels[i]
		p.draw(draw.Crop(dc, 0, 0, y-p.full(), y-height))
		y -= p.full()
	}
	var b bytes.Buffer
	if _, err := canvas.WriteTo(&b); err != nil {
		return nil, fmt.Errorf("site: %s: %w", name, err)
	}
	return c.finish(name, height, b.String()), nil
}

func (p *panel) full() vg.Length {
	h := p.height + 22
	if len(p.key) > 0 {
		h += 20
	}
	return h
}

func (p *panel) draw(dc draw.Canvas) {
	top := dc.Max.Y
	if p.heading != "" {
		dc.FillText(style(11.5, "quiet", text.XLeft), vg.Point{X: 4, Y: top - 10}, p.heading)
	}
	top -= 20
	if len(p.key) > 0 {
		x := vg.Length(8)
		for _, k := range p.key {
			s := style(11.5, "ink", text.XLeft)
			dc.DrawGlyph(k.look.glyphStyle(), vg.Point{X: x + 4, Y: top - 6})
			dc.FillText(s, vg.Point{X: x + 13, Y: top - 6}, k.name)
			x += 13 + s.Width(k.name) + 16
		}
		top -= 20
	}
	room := labelRoom
	if p.rows != nil {
		room = 10
	}
	area := draw.Crop(dc, 2, -room, 4, top-dc.Max.Y)

	pl := plot.New()
	pl.BackgroundColor = color.Transparent
	p.x.set(&pl.X)
	p.y.set(&pl.Y)
	if p.rows != nil {
		var ticks []plot.Tick
		for i, name := range p.rows {
			ticks = append(ticks, plot.Tick{Value: float64(i), Label: name})
		}
		pl.Y.Tick.Marker = plot.ConstantTicks(ticks)
		pl.Y.Scale = plot.InvertedScale{Normalizer: plot.LinearScale{}}
		pl.Y.Min, pl.Y.Max = -0.5, float64(len(p.rows))-0.5
		pl.Y.Tick.Label.Color = paint("ink")
		pl.Y.Tick.Length = 0
	}
	rule := draw.LineStyle{Color: paint("rule"), Width: 0.7}
	pl.Add(&plotter.Grid{Vertical: rule, Horizontal: rule})
	pl.Draw(area)
	data := pl.DataCanvas(area)
	tx, ty := pl.Transforms(&data)
	at := func(l *line, i int) vg.Point { return vg.Point{X: tx(l.xs[i]), Y: ty(l.ys[i])} }

	for _, s := range p.spans {
		from, to := tx(s.from), tx(s.to)
		data.StrokeLine2(draw.LineStyle{Color: paint("quiet"), Width: 0.6, Dashes: dotted}, to, data.Min.Y, to, data.Max.Y)
		if st := style(10, "quiet", text.XCenter); st.Width(s.name) < to-from-2 {
			data.FillText(st, vg.Point{X: (from + to) / 2, Y: data.Max.Y - 6}, s.name)
		}
	}
	for i := range p.lines {
		l := &p.lines[i]
		var pts []vg.Point
		for j := range l.xs {
			pts = append(pts, at(l, j))
		}
		if !l.points {
			w := vg.Length(1.7)
			if l.thin {
				w = 1
			}
			data.StrokeLines(draw.LineStyle{Color: paint(l.look.color), Width: w, Dashes: l.look.dash}, data.ClipLinesXY(pts)...)
		}
		if !l.bare {
			for _, pt := range spread(pts) {
				data.DrawGlyph(l.look.glyphStyle(), pt)
			}
		}
	}
	for _, l := range p.lines {
		for _, i := range slices.Sorted(maps.Keys(l.atLeast)) {
			arrow(&data, l.look.color, at(&l, i))
		}
	}
	if p.rows == nil {
		p.names(dc, data, at)
	}
}

// arrow points up from p.
func arrow(c *draw.Canvas, ink string, p vg.Point) {
	const from, tip, wing = 3, 11, 3
	c.StrokeLines(draw.LineStyle{Color: paint(ink), Width: 1.1},
		[]vg.Point{{X: p.X, Y: p.Y + from}, {X: p.X, Y: p.Y + tip}},
		[]vg.Point{{X: p.X - wing, Y: p.Y + tip - wing}, {X: p.X, Y: p.Y + tip}, {X: p.X + wing, Y: p.Y + tip - wing}})
}

// spread is those of the points that are far enough from each other for a glyph.
func spread(pts []vg.Point) (some []vg.Point) {
	for i, p := range pts {
		if n := len(some); i == 0 || math.Hypot(float64(p.X-some[n-1].X), float64(p.Y-some[n-1].Y)) >= 16 {
			some = append(some, p)
		}
	}
	return some
}

// names writes the name of each line where it ends, moved up or down until none hides another.
func (p *panel) names(dc, data draw.Canvas, at func(*line, int) vg.Point) {
	type label struct {
		l    *line
		end  vg.Point
		y    vg.Length
		rank int
	}
	var all []label
	for i := range p.lines {
		if l := &p.lines[i]; l.name != "" && len(l.xs) > 0 {
			end := at(l, len(l.xs)-1)
			end.X, end.Y = min(end.X, data.Max.X), min(max(end.Y, data.Min.Y), data.Max.Y)
			all = append(all, label{l, end, end.Y, i})
		}
	}
	slices.SortFunc(all, func(a, b label) int { return cmp.Or(cmp.Compare(a.end.Y, b.end.Y), cmp.Compare(b.rank, a.rank)) })
	for range 200 { // each pass moves neighbours apart by half of what they lack
		for i := 1; i < len(all); i++ {
			if lack := lineHeight - (all[i].y - all[i-1].y); lack > 0 {
				all[i-1].y -= lack / 2
				all[i].y += lack / 2
			}
		}
		for i := range all {
			all[i].y = min(max(all[i].y, data.Min.Y+vg.Length(i)*lineHeight), data.Max.Y+4-vg.Length(len(all)-1-i)*lineHeight)
		}
	}
	x := data.Max.X + 16
	for _, l := range all {
		dc.StrokeLines(draw.LineStyle{Color: paint("quiet"), Width: 0.5}, []vg.Point{{X: l.end.X + 5, Y: l.end.Y}, {X: x - 5, Y: l.y}})
		if l.l.bare {
			dc.StrokeLine2(draw.LineStyle{Color: paint(l.l.look.color), Width: 1.7, Dashes: l.l.look.dash}, x-5, l.y, x+7, l.y)
			dc.FillText(style(11.5, "ink", text.XLeft), vg.Point{X: x + 10, Y: l.y + 1}, l.l.name)
			continue
		}
		dc.DrawGlyph(l.l.look.glyphStyle(), vg.Point{X: x, Y: l.y})
		dc.FillText(style(11.5, "ink", text.XLeft), vg.Point{X: x + 7, Y: l.y + 1}, l.l.name)
	}
}

func (l look) glyphStyle() draw.GlyphStyle {
	return draw.GlyphStyle{Color: paint(l.color), Radius: 3.4, Shape: l.glyph}
}

func (a *axis) set(x *plot.Axis) {
	x.Min, x.Max = a.min, a.max
	x.Label.Text = a.label
	x.Label.TextStyle = style(11.5, "quiet", text.XCenter)
	x.Label.TextStyle.YAlign = text.YBottom
	x.Label.Padding = 2
	label := x.Tick.Label
	x.Tick.Label = style(11, "quiet", label.XAlign)
	x.Tick.Label.YAlign = label.YAlign
	x.Tick.LineStyle = draw.LineStyle{Color: paint("quiet"), Width: 0.7}
	x.Tick.Length = 3
	x.LineStyle = draw.LineStyle{Color: paint("quiet"), Width: 0.7}
	x.Padding = 0
	if a.log {
		x.Scale = plot.LogScale{}
		x.Tick.Marker = plot.ConstantTicks(decades(a.min, a.max))
	}
	if a.ticks != nil {
		x.Tick.Marker = plot.ConstantTicks(a.ticks)
	}
}

// decades are the powers of ten from lo to hi.
func decades(lo, hi float64) (ticks []plot.Tick) {
	for e := math.Ceil(math.Log10(lo) - 1e-9); e <= math.Log10(hi)+1e-9; e++ {
		v := math.Pow(10, e)
		ticks = append(ticks, plot.Tick{Value: v, Label: number(v)})
	}
	return ticks
}

// logAxis is an axis that has room for all of the values, and ends at powers of ten.
func logAxis(label string, values ...float64) axis {
	lo, hi := math.Inf(1), math.Inf(-1)
	for _, v := range values {
		if v > 0 {
			lo, hi = min(lo, v), max(hi, v)
		}
	}
	if math.IsInf(lo, 1) {
		lo, hi = 1, 10
	}
	lo, hi = math.Pow(10, math.Floor(math.Log10(lo))), math.Pow(10, math.Ceil(math.Log10(hi)))
	if lo == hi {
		hi *= 10
	}
	return axis{label: label, log: true, min: lo, max: hi}
}

// at are ticks at the values.
func at(values ...float64) (ticks []plot.Tick) {
	for _, v := range values {
		ticks = append(ticks, plot.Tick{Value: v, Label: number(v)})
	}
	return ticks
}

// number is v as a tick or a cell has it: three digits that count, thousands apart.
func number(v float64) string {
	if v == 0 {
		return "0"
	}
	digits := max(0, 2-int(math.Floor(math.Log10(math.Abs(v)))))
	s := strconv.FormatFloat(v, 'f', digits, 64)
	if strings.Contains(s, ".") {
		s = strings.TrimRight(strings.TrimRight(s, "0"), ".")
	}
	whole, frac, _ := strings.Cut(s, ".")
	for i := len(whole) - 3; i > 0 && whole[i-1] != '-'; i -= 3 {
		whole = whole[:i] + "," + whole[i:]
	}
	if frac != "" {
		return whole + "." + frac
	}
	return whole
}

// wrap breaks s into lines that aren't wider than w.
func wrap(st text.Style, s string, w vg.Length) (lines []string) {
	for word := range strings.FieldsSeq(s) {
		if n := len(lines); n > 0 && st.Width(lines[n-1]+" "+word) <= w {
			lines[n-1] += " " + word
		} else {
			lines = append(lines, word)
		}
	}
	return lines
}

var (
	svgHead  = regexp.MustCompile(`(?s)^.*?<svg .*?>\n`)
	svgFont  = regexp.MustCompile(`font-family:[^;]*;font-variant:[^;]*;font-weight:([^;]*);font-style:[^;"]*;?`)
	svgText  = regexp.MustCompile(`(<text [^>]*font-size:([\d.]+)px[^>]*)>([^<]*)</text>`)
	svgBreak = regexp.MustCompile(`\n\t(style=)`)
	svgColor = regexp.MustCompile(`#[0-9A-F]{6}`)
)

// finish gives the drawing a title, a description, and colours that follow the screen's.
func (c *chart) finish(name string, height vg.Length, s string) []byte {
	s = svgHead.ReplaceAllString(s, "")
	s = svgBreak.ReplaceAllString(s, " $1")
	// Whatever font a screen has instead of the measured one, words end where they were to end.
	s = svgText.ReplaceAllStringFunc(s, func(t string) string {
		m := svgText.FindStringSubmatch(t)
		size, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			return t
		}
		st := style(vg.Length(size), "ink", text.XLeft)
		if strings.Contains(m[1], "font-weight:bold") {
			st.Font.Weight = xfont.WeightBold
		}
		return fmt.Sprintf(`%s textLength="%.1f" lengthAdjust="spacingAndGlyphs">%s</text>`, m[1], float64(st.Width(html.UnescapeString(m[3]))), m[3])
	})
	s = svgFont.ReplaceAllStringFunc(s, func(m string) string {
		if svgFont.FindStringSubmatch(m)[1] == "bold" {
			return "font-weight:bold;"
		}
		return ""
	})
	s = svgColor.ReplaceAllStringFunc(s, func(m string) string {
		for _, p := range palette {
			if p.light == m {
				return "var(--" + p.name + "," + m + ")"
			}
		}
		return m
	})
	var b bytes.Buffer
	fmt.Fprintf(&b, `<svg xmlns="http://www.w3.org/2000/svg" class="chart" width="%d" viewBox="0 0 %d %d" role="img" aria-labelledby="%s-title %s-desc">`+"\n",
		560, int(width), int(math.Ceil(float64(height))), name, name)
	fmt.Fprintf(&b, "<title id=\"%s-title\">%s</title>\n<desc id=\"%s-desc\">%s</desc>\n", name, html.EscapeString(c.title), name, html.EscapeString(c.about))
	b.WriteString("<style>\n.chart { font-family: Arial, Helvetica, \"Liberation Sans\", sans-serif;")
	for _, p := range palette {
		fmt.Fprintf(&b, " --%s: %s;", p.name, p.light)
	}
	b.WriteString(" }\n@media screen and (prefers-color-scheme: dark) { .chart {")
	for _, p := range palette {
		fmt.Fprintf(&b, " --%s: %s;", p.name, p.dark)
	}
	b.WriteString(" } }\n</style>\n")
	b.WriteString(s)
	return b.Bytes()
}
