package reports

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fencelab/fencelab/scenarios/history"
)

// The drawing's measures, in its units (CSS pixels at natural size).
const (
	width    = 680.0
	plotA    = 92.0  // the plot's left edge; lane names stand before it
	plotB    = 674.0 // the plot's right edge
	axisY    = 14.0  // the baseline of the axis labels
	lanesY   = 24.0  // the top of the first lane
	lanePad  = 9.0
	barH     = 18.0
	fadeLen  = 26.0 // over which a bar fades that ends by expiry
	leastBar = 2.0  // a shorter interval is drawn this wide
	tickRoom = 62.0 // the least distance of two labels on the axis

	maxWorkers = 24
	maxBars    = 400
	hues       = 6
)

// px is a coordinate; it prints with one decimal, which is finer than any screen.
type px float64

func (p px) String() string { return strconv.FormatFloat(math.Round(float64(p)*10)/10, 'f', -1, 64) }

// mark is the sign of a decision. Shape and words tell what colour tells.
type mark int

const (
	noMark mark = iota
	readMark
	writeMark
	refusedMark
	lostMark
	staleMark
	killMark
	faultMark
)

var marks = [...]struct{ class, path string }{
	readMark:    {"read", "M0-4.6 4.6 0 0 4.6-4.6 0z"},
	writeMark:   {"write", "M-4.4 0a4.4 4.4 0 1 0 8.8 0a4.4 4.4 0 1 0-8.8 0z"},
	refusedMark: {"refused", "M-4.4 0a4.4 4.4 0 1 0 8.8 0a4.4 4.4 0 1 0-8.8 0zM-3.1-3.1 3.1 3.1M-3.1 3.1 3.1-3.1"},
	lostMark:    {"lost", "M-5.2 0a5.2 5.2 0 1 0 10.4 0a5.2 5.2 0 1 0-10.4 0zM-3.2-1H3.2V1H-3.2z"},
	staleMark:   {"stale", "M0-6.2 6.2 4.8H-6.2z"},
	killMark:    {"kill", "M-4-4 4 4M-4 4 4-4"},
	faultMark:   {"fault", "M1.4-6-4 1H-0.4L-1.4 6 4-1H0.4z"},
}

// Shapes as the template writes them.
type (
	box   struct{ X, Y, W, H, Class, Fill string }
	line  struct{ D, Class string }
	glyph struct{ X, Y, D, Class string }
	text  struct{ X, Y, Class, Anchor, Num, Ref, Words string }
)

// drawing is one run's timeline, ready for the template.
type drawing struct {
	ID, Title, Desc string
	W, H            string
	Hues            []int
	Under           []line // beneath the boxes
	Boxes           []box
	Lines           []line
	Glyphs          []glyph
	Texts           []text
	Key             []key
}

// key explains one sign of the drawing.
type key struct {
	Box   *box
	Glyph *glyph
	Words string
}

// lane is a row of the drawing.
type lane struct {
	name, sub string
	stacks    []stack
	rows      int // room for the tallest stack, here or in a run drawn alongside
	y         float64
	taken     [][2]float64 // where the bar has words already
}

func (l *lane) bar() float64 { return l.y + lanePad }
func (l *lane) mid() float64 { return l.bar() + barH/2 }
func (l *lane) height() float64 {
	h := 2*lanePad + barH
	if l.rows > 0 {
		h += float64(l.rows)*rowStep + 2
	}
	return h
}

// chart turns a scene into a drawing. The lanes are, from top to bottom: the lock, the workers, the network if
// something was held in it, and the resource, so that grants come from above and writes go down.
type chart struct {
	*scene
	drawing
	from, to time.Duration

	lock     *lane
	workers  []*lane
	network  *lane // nil: nothing was held
	resource *lane
	unit     unit
}

func newChart(s *scene, id string, from, to time.Duration) *chart {
	c := &chart{scene: s, from: from, to: max(to, from+time.Microsecond)}
	c.ID, c.W = id, px(width).String()
	c.unit = unitFor(c.to - c.from)
	for i := range hues {
		c.Hues = append(c.Hues, i)
	}
	c.lock = &lane{name: "lock", sub: fit(s.run.Lock, 86)}
	c.resource = &lane{name: "resource", sub: fit(s.run.Store, 86)}
	for _, w := range s.workers[:min(len(s.workers), maxWorkers)] {
		c.workers = append(c.workers, &lane{name: fit(w, 62), sub: "worker"})
	}
	if len(s.held) > 0 {
		c.network = &lane{name: "network"}
	}

	c.lock.stacks = hang(c.lockNotes(), plotA, width)
	for i, l := range c.workers {
		l.stacks = hang(c.workerNotes(s.workers[i]), plotA, width)
	}
	c.resource.stacks = hang(c.resourceNotes(), plotA, width)
	for _, l := range c.lanes() {
		for _, s := range l.stacks {
			l.rows = max(l.rows, s.depth())
		}
	}
	return c
}

func (c *chart) lanes() []*lane {
	all := append([]*lane{c.lock}, c.workers...)
	if c.network != nil {
		all = append(all, c.network)
	}
	return append(all, c.resource)
}

// align gives charts that have the same lanes the same heights, so that they can be read across.
func align(charts []*chart) {
	for _, c := range charts {
		if c.network == nil && slices.ContainsFunc(charts, func(o *chart) bool { return o.network != nil }) {
			c.network = &lane{name: "network"}
		}
	}
	for _, c := range charts[1:] {
		if !slices.EqualFunc(c.lanes(), charts[0].lanes(), func(a, b *lane) bool { return a.name == b.name }) {
			return
		}
	}
	for i := range charts[0].lanes() {
		rows := 0
		for _, c := range charts {
			rows = max(rows, c.lanes()[i].rows)
		}
		for _, c := range charts {
			c.lanes()[i].rows = rows
		}
	}
}

// x is the place of a time. A margin of 1.5 % keeps first and last events off the edges.
func (c *chart) x(at time.Duration) float64 {
	span := float64(c.to) - float64(c.from)
	f := (float64(at) - float64(c.from)) / span
	return plotA + (plotB-plotA)*(0.015+0.97*min(max(f, 0), 1))
}

func (c *chart) hue(worker string) int { return max(slices.Index(c.scene.workers, worker), 0) % hues }

func (c *chart) laneOf(target string) *lane {
	if target == resourceName {
		return c.resource
	}
	if i := slices.Index(c.scene.workers, target); i >= 0 && i < len(c.workers) {
		return c.workers[i]
	}
	return nil
}

func (l lease) label() string { return fmt.Sprintf("%s: token %d", short(l.worker, 11), l.token) }

// fits tells whether the label has room in the lease's bar.
func (l lease) fits(c *chart) bool { return ems(l.label())*fontSize+12 <= c.x(l.end)-c.x(l.from) }

func (c *chart) lockNotes() []note {
	var notes []note
	for _, l := range c.leases {
		if !l.fits(c) {
			notes = append(notes, note{x: c.x(l.from), count: 1, text: l.label(), first: l.n, last: l.n})
		}
		switch l.how {
		case expired:
			notes = append(notes, note{x: c.x(min(l.solid, l.end)), count: 1, text: fmt.Sprintf("token %d expired", l.token)})
		case superseded:
			notes = append(notes, note{
				x: c.x(l.end), count: 1, text: fmt.Sprintf("token %d ended early", l.token), class: "alarm", alarm: true,
			})
		case open, released:
		}
	}
	for _, it := range c.items {
		if it.timed && c.atServer(it) {
			notes = append(notes, note{x: c.x(it.at), first: it.n, last: it.n, count: 1, text: it.serverLabel(), mark: faultMark})
		}
	}
	slices.SortStableFunc(notes, func(a, b note) int { return cmp.Compare(a.x, b.x) })
	return notes
}

// workerNotes labels what the worker reported and what was done to it. That it ended shows in its line.
func (c *chart) workerNotes(worker string) []note {
	var notes []note
	for _, it := range c.items {
		if !it.timed || !it.concerns(worker) || it.is(history.KindReport, history.Done) {
			continue
		}
		n := note{x: c.x(it.at), first: it.n, last: it.n, count: 1, text: it.label()}
		if it.is(history.KindReport, history.Failed) {
			n.class, n.alarm = "alarm", true
		}
		notes = append(notes, n)
	}
	return notes
}

// concerns tells whether an item belongs in the worker's lane.
func (it item) concerns(worker string) bool {
	return it.Kind == history.KindReport && it.Actor == worker || it.Kind == history.KindFault && it.Target == worker
}

func (c *chart) resourceNotes() []note {
	var notes []note
	for _, it := range c.items {
		fault := it.Kind == history.KindFault && it.Target == resourceName
		if !it.timed || !fault && it.Kind != history.KindDecision {
			continue
		}
		n := note{x: c.x(it.at), first: it.n, last: it.n, count: 1, text: it.label(), mark: it.mark()}
		if n.mark == staleMark || n.mark == lostMark {
			n.class, n.alarm = "alarm", true
		}
		notes = append(notes, n)
	}
	return notes
}

// mark is the sign of an item in the resource's lane.
func (it item) mark() mark {
	switch {
	case it.is(history.KindFault, history.FaultKill):
		return killMark
	case it.Kind != history.KindDecision:
		return noMark
	case !it.Accepted:
		return refusedMark
	case it.stale:
		return staleMark
	case it.lost != "":
		return lostMark
	case it.Op == "write":
		return writeMark
	default:
		return readMark
	}
}

// draw places everything. Shapes are written in layers: grid, bars, lines, marks, words.
func (c *chart) draw() drawing {
	y := lanesY
	for _, l := range c.lanes() {
		l.y = y
		y += l.height()
	}
	c.H = px(y).String()
	c.axis(y)
	for _, l := range c.lanes() {
		c.words(text{X: px(0).String(), Y: px(l.mid() + 1).String(), Class: "lane", Words: l.name})
		if l.sub != "" {
			c.words(text{X: px(0).String(), Y: px(l.mid() + 13).String(), Class: "quiet", Words: l.sub})
		}
	}
	for i := range c.workers {
		c.life(c.scene.workers[i], c.workers[i])
	}
	c.life(resourceName, c.resource)
	for _, f := range c.frozen[:min(len(c.frozen), maxBars)] {
		if l := c.laneOf(f.target); l != nil {
			c.rect(l, "back", "", c.x(f.from), c.x(f.to))
		}
	}
	c.bars()
	c.spans()
	c.arrows()
	c.ticks()
	c.decisions()
	c.serverFaults()
	for _, l := range c.lanes() {
		for _, s := range l.stacks {
			c.hangStack(l, s)
		}
	}
	c.describe()
	c.explain()
	return c.drawing
}

// explain lists the signs that the drawing has, in words.
func (c *chart) explain() {
	for _, k := range []struct{ class, words string }{
		{"lease", "lease held"},
		{"fade", "lease expires"},
		{"belief", "the holder still believes in it"},
		{"frozen", "frozen"},
		{"held", "held in the network"},
		{"down", "process down"},
		{"cutoff", "cut off from the lock"},
	} {
		i := slices.IndexFunc(c.Boxes, func(b box) bool { return slices.Contains(strings.Fields(b.Class), k.class) })
		if i >= 0 {
			c.Key = append(c.Key, key{Box: &box{"-13", "-6", "26", "12", c.Boxes[i].Class, c.Boxes[i].Fill}, Words: k.words})
		}
	}
	for m, words := range [...]string{
		readMark: "read accepted", writeMark: "write accepted", refusedMark: "refused with 409",
		lostMark: "write accepted, its entry lost later", staleMark: "stale write accepted", killMark: "killed", faultMark: "fault of the lock’s servers",
	} {
		class := "m " + marks[m].class
		if slices.ContainsFunc(c.Glyphs, func(g glyph) bool { return words != "" && g.Class == class }) {
			c.Key = append(c.Key, key{Glyph: &glyph{"0", "0", marks[m].path, class}, Words: words})
		}
	}
}

// write puts words into the lane's bar from x on, if the room up to limit lets them and nothing is there yet.
func (c *chart) write(l *lane, class, words string, x, limit float64) {
	end := x + ems(words)*fontSize
	if end > limit || slices.ContainsFunc(l.taken, func(t [2]float64) bool { return x < t[1]+4 && t[0] < end+4 }) {
		return
	}
	l.taken = append(l.taken, [2]float64{x, end})
	c.words(text{X: px(x).String(), Y: px(l.mid() + 4).String(), Class: class, Words: words})
}

func (c *chart) words(t text)         { c.Texts = append(c.Texts, t) }
func (c *chart) path(class, d string) { c.Lines = append(c.Lines, line{D: d, Class: class}) }
func (c *chart) vline(class string, x, a, b float64) {
	c.path(class, fmt.Sprintf("M%v %vV%v", px(x), px(a), px(b)))
}

func (c *chart) under(class string, y, a, b float64) {
	c.Under = append(c.Under, line{fmt.Sprintf("M%v %vH%v", px(a), px(y), px(b)), class})
}

// rect draws a stretch of a lane's bar from a to b.
func (c *chart) rect(l *lane, class, fill string, a, b float64) {
	c.Boxes = append(c.Boxes, box{px(a).String(), px(l.bar()).String(), px(b - a).String(), px(barH).String(), class, fill})
}

func (c *chart) glyph(m mark, x, y float64) {
	c.Glyphs = append(c.Glyphs, glyph{px(x).String(), px(y).String(), marks[m].path, "m " + marks[m].class})
}

// axis draws lane borders, the grid and the time.
func (c *chart) axis(bottom float64) {
	for _, l := range c.lanes() {
		c.under("border", l.y, 0, width)
	}
	span := float64(c.to) - float64(c.from)
	size := float64(c.unit.size)
	step := niceStep(span * tickRoom / (plotB - plotA))
	name := func(at float64) string {
		if at == 0 {
			return "0"
		}
		decimals := max(0, -int(math.Floor(math.Log10(step/size)+1e-9)))
		return minus(strconv.FormatFloat(at/size, 'f', decimals, 64)) + " " + c.unit.name
	}
	longest := max(ems(name(float64(c.from)-step)), ems(name(float64(c.to)))) * fontSize
	for step/span*(plotB-plotA)*0.97 < longest+6 {
		step = niceStep(step * 1.01)
	}
	for k := math.Ceil(float64(c.from)/step - 1e-9); k*step <= float64(c.to)+step*1e-9; k++ {
		x := c.x(time.Duration(k * step))
		c.Under = append(c.Under, line{fmt.Sprintf("M%v %vV%v", px(x), px(lanesY), px(bottom)), "grid"})
		if words := name(k * step); x+ems(words)*fontSize/2 <= width {
			c.words(text{X: px(x).String(), Y: px(axisY).String(), Class: "axis", Anchor: "middle", Words: words})
		}
	}
}

// niceStep is the least of 1, 2 and 5 times a power of ten that is at least v.
func niceStep(v float64) float64 {
	p := math.Pow(10, math.Floor(math.Log10(v)))
	for _, f := range []float64{1, 2, 5} {
		if f*p >= v {
			return f * p
		}
	}
	return 10 * p
}

// life draws a thin line while a process was there: a worker from its first event to its end, the resource always.
// A kill leaves a gap.
func (c *chart) life(who string, l *lane) {
	from, to := c.from, c.to
	if who != resourceName {
		mine := func(it item) bool { return it.timed && it.concerns(who) }
		i := slices.IndexFunc(c.items, mine)
		if i < 0 {
			return
		}
		from = c.items[i].at
		if i := slices.IndexFunc(c.items, func(it item) bool { return mine(it) && it.is(history.KindReport, history.Done) }); i >= 0 {
			to = max(from, c.items[i].at)
		}
	}
	a := c.x(from)
	for _, d := range c.down {
		if d.target != who || d.from < from {
			continue
		}
		c.under("life", l.mid(), a, c.x(d.from))
		a = c.x(d.to)
		if d.open {
			return
		}
	}
	if b := c.x(to); b > a {
		c.under("life", l.mid(), a, b)
	}
}

// bars draws each lease twice: in the lock's lane as long as it lasted, and in its holder's lane, where a dashed
// outline goes on for as long as the holder believed in it.
func (c *chart) bars() {
	for _, l := range c.leases[:min(len(c.leases), maxBars)] {
		a, b := c.x(l.from), max(c.x(l.end), c.x(l.from)+leastBar)
		c.bar(c.lock, l, a, b)
		if l.fits(c) {
			c.write(c.lock, "in", l.label(), a+6, b)
		}
		own := c.laneOf(l.worker)
		if own == nil {
			continue
		}
		stop := min(b, max(c.x(l.belief), a+leastBar))
		c.bar(own, l, a, stop)
		if l.how == expired {
			c.vline("guide", c.x(min(l.solid, l.end)), c.lock.bar()+barH, own.bar()+barH)
		}
		believes := l.end
		for _, f := range c.frozen {
			if f.target == l.worker && f.from <= believes && believes < f.to {
				believes = f.to
			}
		}
		b, end := max(b, c.x(believes)), c.x(l.belief)
		if end-b < 1 {
			continue
		}
		c.rect(own, fmt.Sprintf("back belief w%d", c.hue(l.worker)), "", b, end)
		if !c.interrupted(l.worker, believes, l.belief) {
			c.write(own, "in", "believes it holds", b+6, end-6)
		}
	}
}

// bar draws a lease from a to b: it ends with an edge where it was released, and fades where it expired.
func (c *chart) bar(l *lane, le lease, a, b float64) {
	w := c.hue(le.worker)
	class := fmt.Sprintf("lease w%d", w)
	c.rect(l, "back", "", a, b)
	if le.how != expired {
		c.rect(l, class, "", a, b)
		c.vline(fmt.Sprintf("edge w%d", w), a, l.bar(), l.bar()+barH)
		switch le.how {
		case released:
			c.vline(fmt.Sprintf("edge w%d", w), b, l.bar(), l.bar()+barH)
		case superseded:
			c.vline("edge cut", b, l.bar()-2, l.bar()+barH+2)
		case open, expired:
		}
		return
	}
	fade := max(min(c.x(le.solid), b-fadeLen), a+(b-a)/3)
	c.rect(l, class, "", a, fade)
	c.rect(l, "fade", fmt.Sprintf("url(#%s-fade%d)", c.ID, w), fade, b)
	c.vline(fmt.Sprintf("edge w%d", w), a, l.bar(), l.bar()+barH)
}

// interrupted tells whether the worker was frozen or down within an interval.
func (c *chart) interrupted(worker string, from, to time.Duration) bool {
	return slices.ContainsFunc(slices.Concat(c.frozen, c.down), func(s span) bool {
		return s.target == worker && s.from < to && s.to > from
	})
}

// spans draws the intervals in which a fault was in force.
func (c *chart) spans() {
	draw := func(l *lane, s span, class, fill, words string) {
		if l == nil {
			return
		}
		a, b := c.x(s.from), max(c.x(s.to), c.x(s.from)+leastBar)
		c.rect(l, class, fill, a, b)
		words += " " + human(s.to-s.from)
		if s.open {
			words += ", to the end"
		}
		c.write(l, "over", words, max(a+6, (a+b-ems(words)*fontSize)/2), b-6)
	}
	for _, s := range c.frozen[:min(len(c.frozen), maxBars)] {
		draw(c.laneOf(s.target), s, "frozen", fmt.Sprintf("url(#%s-hatch)", c.ID), "frozen")
	}
	for _, s := range c.down[:min(len(c.down), maxBars)] {
		draw(c.laneOf(s.target), s, "down", "", "down")
	}
	for _, s := range c.cut[:min(len(c.cut), maxBars)] {
		draw(c.laneOf(s.target), s, "cutoff", "", "cut off")
	}
	for _, s := range c.held[:min(len(c.held), maxBars)] {
		for _, w := range c.writes {
			if s.carries(w) {
				s.from = max(s.from, w.sent)
				break
			}
		}
		draw(c.network, s, "held", fmt.Sprintf("url(#%s-dots)", c.ID), short(s.target, 11)+"’s write held")
	}
}

// carries tells whether a write was on its way while what its sender sends was held.
func (s span) carries(w write) bool {
	return s.target == w.worker && s.from <= w.decision.at && w.sent <= s.to && w.decision.at > w.sent
}

// arrows draws each write from its sender to the resource, through the network's lane if it was held there. Arrows
// that fall on the same place are drawn once, the stale ones last and so on top.
func (c *chart) arrows() {
	type place struct {
		a, b  int
		class string
	}
	seen := make(map[place]bool)
	var plain, bad []line
	for _, w := range c.writes {
		own := c.laneOf(w.worker)
		if own == nil || !w.decision.timed {
			continue
		}
		class := map[mark]string{refusedMark: " no", staleMark: " bad"}[w.decision.mark()]
		a, b := c.x(w.sent), c.x(w.decision.at)
		at := place{int(a), int(b), own.name + class}
		if seen[at] {
			continue
		}
		seen[at] = true
		from, tip := px(own.bar()+barH), px(c.resource.mid()-8)
		d := fmt.Sprintf("M%v %vL%v %v", px(a), from, px(b), tip)
		if slices.ContainsFunc(c.held, func(s span) bool { return s.carries(w) }) {
			d = fmt.Sprintf("M%v %vV%vM%v %vV%v", px(a), from, px(c.network.mid()), px(b), px(c.network.mid()), tip)
		}
		l := line{D: d + "m-2.6-4.2 2.6 4.2 2.6-4.2", Class: "arrow" + class}
		if w.decision.stale {
			bad = append(bad, l)
		} else {
			plain = append(plain, l)
		}
	}
	c.Lines = append(c.Lines, plain[:min(len(plain), maxBars)]...)
	c.Lines = append(c.Lines, bad[:min(len(bad), maxBars)]...)
}

// ticks marks each event of a worker at its exact time.
func (c *chart) ticks() {
	for i, l := range c.workers {
		last := math.Inf(-1)
		for _, it := range c.items {
			if !it.timed || !it.concerns(c.scene.workers[i]) {
				continue
			}
			if x := c.x(it.at); x-last >= 1 {
				c.vline("tick", x, l.bar()-2, l.bar()+barH+2)
				last = x
			}
			if it.is(history.KindFault, history.FaultKill) {
				c.glyph(killMark, c.x(it.at), l.mid())
			}
		}
	}
}

// decisions marks what the resource decided. Where marks would cover one another the gravest is drawn; the rows
// below have them all.
func (c *chart) decisions() {
	type spot struct {
		x float64
		m mark
	}
	var spots []spot
	for _, it := range c.items {
		m := it.mark()
		if !it.timed || it.Kind != history.KindDecision {
			continue
		}
		x := c.x(it.at)
		if n := len(spots); n > 0 && x-spots[n-1].x < 6 {
			if m > spots[n-1].m {
				spots[n-1] = spot{x, m}
			}
			continue
		}
		spots = append(spots, spot{x, m})
	}
	for _, s := range spots {
		c.glyph(s.m, s.x, c.resource.mid())
	}
}

// serverFaults marks the faults of the lock's servers in its lane.
func (c *chart) serverFaults() {
	last := math.Inf(-1)
	for _, it := range c.items {
		if !it.timed || !c.atServer(it) {
			continue
		}
		if x := c.x(it.at); x-last >= 1 {
			c.vline("tick", x, c.lock.bar()-2, c.lock.bar()+barH+2)
			last = x
		}
	}
}

// hangStack writes a stack's rows beside its stem.
func (c *chart) hangStack(l *lane, s stack) {
	rows := s.rows()
	top := l.bar() + barH
	stem := s.stem()
	c.path("stem", fmt.Sprintf("M%v %vH%vM%v %vV%v", px(s.x), px(top+3), px(s.x1), px(stem), px(top), px(top+float64(s.depth())*rowStep)))
	for i, n := range rows {
		y := top + float64(s.base+i+1)*rowStep - 2
		x, anchor, step := stem+stemGap, "", 1.0
		if s.left {
			x, anchor, step = stem-stemGap, "end", -1
		}
		if n.mark != noMark {
			c.glyph(n.mark, x+step*4, y-4)
			x += step * markRoom
		}
		t := text{X: px(x).String(), Y: px(y).String(), Class: strings.TrimSpace("row " + n.class), Anchor: anchor, Num: n.number(), Words: n.words()}
		if n.first != 0 {
			t.Ref = fmt.Sprintf("%s-e%d", c.ID, n.first)
		}
		c.words(t)
	}
}

// describe writes the text alternative: the intervals and the decisions, as long as they are few.
func (c *chart) describe() {
	const most = 16
	var say []string
	for _, l := range c.leases {
		how := map[ending]string{
			open: "still held at the end of the history", released: "released at " + human(l.end),
			expired: "expired by " + human(l.end), superseded: "ended early at " + human(l.end),
		}[l.how]
		say = append(say, fmt.Sprintf("%s is granted token %d at %s; %s.", short(l.worker, 30), l.token, human(l.from), how))
	}
	for _, s := range c.frozen {
		say = append(say, fmt.Sprintf("%s is frozen from %s to %s.", short(s.target, 30), human(s.from), human(s.to)))
	}
	for _, s := range c.held {
		say = append(say, fmt.Sprintf("What %s sends is held in the network from %s to %s.", short(s.target, 30), human(s.from), human(s.to)))
	}
	for _, s := range c.cut {
		say = append(say, fmt.Sprintf("%s is cut off from the lock from %s to %s.", short(s.target, 30), human(s.from), human(s.to)))
	}
	for _, it := range c.items {
		if c.atServer(it) {
			say = append(say, fmt.Sprintf("At %s: %s.", human(it.at), it.serverLabel()))
		}
	}
	for _, s := range c.down {
		say = append(say, fmt.Sprintf("%s is down from %s to %s.", short(s.target, 30), human(s.from), human(s.to)))
	}
	for _, w := range c.writes {
		what := map[mark]string{
			refusedMark: "refused with 409", staleMark: "accepted although stale", lostMark: "accepted, and lost later", writeMark: "accepted",
		}[w.decision.mark()]
		say = append(say, fmt.Sprintf("%s’s write with token %d arrives at %s and is %s.", short(w.worker, 30), w.decision.Token, human(w.decision.at), what))
	}
	if n := len(say); n > most {
		say = append(say[:most], fmt.Sprintf("%s more.", grouped(n-most)))
	}
	c.Desc = strings.Join(append(say, "The list of events has every step with its exact time."), " ")
}
