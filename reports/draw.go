package reports

import (
	"cmp"
	"fmt"
	"html/template"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/fencelab/fencelab/scenarios/history"
)

// Measures, in CSS pixels at natural size.
const (
	width    = 680.0
	plotA    = 92.0 // the plot's left edge; lane names are before it
	plotB    = 674.0
	lanesY   = 24.0 // the top of the first lane, below the time axis
	lanePad  = 9.0
	barH     = 18.0
	fadeLen  = 26.0 // the fade at the end of a lease that expired
	leastBar = 2.0  // the least width of an interval
	tickRoom = 90.0 // the least distance of two labels on the axis
	hues     = 6
)

// px prints with one decimal.
type px float64

func (p px) String() string { return strconv.FormatFloat(math.Round(float64(p)*10)/10, 'f', -1, 64) }

// Shape and words tell marks apart, not colour alone.
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

// sign is an entry of the legend: a shape for a mark, a box for an interval.
type sign struct{ Class, Words, Shape, Pattern string }

var marks = [...]sign{
	readMark:    {"read", "read accepted", "M0-4.6 4.6 0 0 4.6-4.6 0z", ""},
	writeMark:   {"write", "write accepted", "M-4.4 0a4.4 4.4 0 1 0 8.8 0a4.4 4.4 0 1 0-8.8 0z", ""},
	refusedMark: {"refused", "refused with 409", "M-4.4 0a4.4 4.4 0 1 0 8.8 0a4.4 4.4 0 1 0-8.8 0zM-3.1-3.1 3.1 3.1M-3.1 3.1 3.1-3.1", ""},
	lostMark:    {"lost", "write accepted, its entry lost later", "M-5.2 0a5.2 5.2 0 1 0 10.4 0a5.2 5.2 0 1 0-10.4 0zM-3.2-1H3.2V1H-3.2z", ""},
	staleMark:   {"stale", "stale write accepted", "M0-6.2 6.2 4.8H-6.2z", ""},
	killMark:    {"kill", "killed", "M-4-4 4 4M-4 4 4-4", ""},
	faultMark:   {"fault", "fault of the lock’s servers", "M1.4-6-4 1H-0.4L-1.4 6 4-1H0.4z", ""},
}

var (
	leaseSign  = sign{Class: "lease", Words: "lease held"}
	fadeSign   = sign{Class: "fade", Words: "lease expires", Pattern: "fade"}
	beliefSign = sign{Class: "belief", Words: "the holder still believes in it"}
	frozenSign = sign{Class: "frozen", Words: "frozen", Pattern: "hatch"}
	heldSign   = sign{Class: "held", Words: "held in the network", Pattern: "dots"}
	downSign   = sign{Class: "down", Words: "process down"}
	cutSign    = sign{Class: "cutoff", Words: "cut off from the lock"}

	signs = append([]sign{leaseSign, fadeSign, beliefSign, frozenSign, heldSign, downSign, cutSign}, marks[1:]...)
)

type drawing struct {
	ID, Title, Desc string
	W, H            px
	Body            template.HTML
	Key             []sign
}

type lane struct {
	name, sub string
	y         float64
	notes     []note
	stacks    []stack
	taken     [][2]float64 // intervals of the bar that have a label
	tick      float64      // x of the last tick
}

func (l *lane) top() float64    { return l.y + lanePad }
func (l *lane) bottom() float64 { return l.top() + barH }
func (l *lane) mid() float64    { return l.top() + barH/2 }

const (
	grounds = iota
	boxes
	lines
	alarms
	glyphs
	words
	layers
)

// chart has lanes from top to bottom: the lock, the workers, the network if it held something, the resource. So grants come from
// above and writes go down.
type chart struct {
	*scene
	id       string
	from, to time.Duration
	unit     unit

	lanes          []*lane
	lock, resource *lane
	network        *lane // nil: nothing was held
	workers        []*lane
	layer          [layers]strings.Builder
	used           map[string]bool
}

func draw(s *scene, id, title string, from, to time.Duration) *drawing {
	c := &chart{scene: s, id: id, from: from, to: max(to, from+time.Microsecond), used: map[string]bool{}}
	c.unit = unitFor(c.to - c.from)
	add := func(name, sub string) *lane {
		c.lanes = append(c.lanes, &lane{name: fit(name), sub: fit(sub), tick: math.Inf(-1)})
		return c.lanes[len(c.lanes)-1]
	}
	c.lock = add("lock", s.run.Lock)
	for _, w := range s.workers {
		c.workers = append(c.workers, add(w, "worker"))
	}
	if len(s.held) > 0 {
		c.network = add("network", "")
	}
	c.resource = add(resourceName, s.run.Store)

	bottom := c.arrange()
	c.axis(bottom)
	c.lives()
	c.intervals()
	c.arrows()
	c.points()
	for _, l := range c.lanes {
		for _, s := range l.stacks {
			c.hangStack(l, s)
		}
	}
	d := &drawing{ID: id, Title: title, Desc: c.describe(), W: width, H: px(bottom)}
	for i := range c.layer {
		d.Body += template.HTML(c.layer[i].String())
	}
	for _, s := range signs {
		if c.used[s.Class] {
			d.Key = append(d.Key, s)
		}
	}
	return d
}

func (c *chart) x(at time.Duration) float64 {
	f := (float64(at) - float64(c.from)) / (float64(c.to) - float64(c.from))
	return plotA + (plotB-plotA)*(0.015+0.97*min(max(f, 0), 1))
}

func (c *chart) hue(worker string) string {
	return fmt.Sprintf("w%d", max(slices.Index(c.scene.workers, worker), 0)%hues)
}

func (c *chart) laneOf(who string) *lane {
	if who == resourceName {
		return c.resource
	}
	if i := slices.Index(c.scene.workers, who); i >= 0 && i < len(c.workers) {
		return c.workers[i]
	}
	return nil
}

func (c *chart) laneOfEvent(it item) *lane {
	switch {
	case it.Kind == history.KindDecision:
		return c.resource
	case c.atServer(it):
		return c.lock
	case it.Kind == history.KindFault:
		return c.laneOf(it.Target)
	case it.Kind == history.KindReport:
		return c.laneOf(it.Actor)
	}
	return nil
}

func (it item) concerns(worker string) bool {
	return it.Kind == history.KindReport && it.Actor == worker || it.Kind == history.KindFault && it.Target == worker
}

func (it item) mark() mark {
	switch {
	case it.fault().State == history.Down:
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

func (c *chart) arrange() float64 {
	for _, l := range c.leases {
		note := func(at time.Duration, class, text string) {
			c.lock.notes = append(c.lock.notes, note{x: c.x(at), class: class, text: text})
		}
		if !l.fits(c) {
			note(l.from, "", l.label())
			last := &c.lock.notes[len(c.lock.notes)-1]
			last.first, last.last, last.count = l.n, l.n, 1
		}
		if l.how == expired {
			note(min(l.solid, l.end), "", fmt.Sprintf("token %d expired", l.token))
		}
		if l.how == superseded {
			note(l.end, "alarm", fmt.Sprintf("token %d ended early", l.token))
		}
	}
	for _, it := range c.items {
		l := c.laneOfEvent(it)
		if l == nil || it.reports(history.Done) { // the end of its line shows it
			continue
		}
		n := note{x: c.x(it.at), first: it.n, last: it.n, count: 1, text: it.label()}
		switch l {
		case c.lock:
			n.text, n.mark = it.serverLabel(), faultMark
		case c.resource:
			n.mark = it.mark()
		}
		if n.mark == staleMark || n.mark == lostMark || it.reports(history.Failed) {
			n.class = "alarm"
		}
		l.notes = append(l.notes, n)
	}
	slices.SortStableFunc(c.lock.notes, func(a, b note) int { return cmp.Compare(a.x, b.x) })

	y := lanesY
	for _, l := range c.lanes {
		l.y, l.stacks = y, hang(l.notes)
		y += 2*lanePad + barH
		depth := 0
		for _, s := range l.stacks {
			depth = max(depth, s.base+len(s.rows))
		}
		if depth > 0 {
			y += float64(depth)*rowStep + 2
		}
	}
	return y
}

func (l lease) label() string { return fmt.Sprintf("%s: token %d", short(l.worker, 11), l.token) }

func (l lease) fits(c *chart) bool { return textWidth(l.label())+12 <= c.x(l.end)-c.x(l.from) }

func (c *chart) put(layer int, format string, args ...any) {
	fmt.Fprintf(&c.layer[layer], format+"\n", args...)
}

func (c *chart) path(layer int, class, format string, args ...any) {
	c.put(layer, `<path class="%s" d="%s" />`, class, fmt.Sprintf(format, args...))
}

func (c *chart) vline(class string, x, a, b float64) {
	c.path(lines, class, "M%v %vV%v", px(x), px(a), px(b))
}

func (c *chart) box(l *lane, s sign, hue string, a, b float64) {
	c.used[s.Class] = true
	fill := ""
	if s.Pattern != "" {
		fill = fmt.Sprintf(` fill="url(#%s-%s)"`, c.id, s.Pattern)
	}
	c.put(boxes, `<rect class="%s"%s x="%v" y="%v" width="%v" height="%v" />`, strings.TrimSpace(s.Class+" "+hue), fill, px(a), px(l.top()), px(b-a), px(barH))
}

func (c *chart) glyph(m mark, x, y float64) {
	c.used[marks[m].Class] = true
	c.put(glyphs, `<path class="m %s" transform="translate(%v %v)" d="%s" />`, marks[m].Class, px(x), px(y), marks[m].Shape)
}

func (c *chart) text(class, anchor string, x, y float64, s string) {
	if anchor != "" {
		anchor = ` text-anchor="` + anchor + `"`
	}
	c.put(words, `<text class="%s" x="%v" y="%v"%s>%s</text>`, class, px(x), px(y), anchor, template.HTMLEscapeString(s))
}

// label writes s into the lane's bar between a and b, unless it is too long or overlaps another label.
func (c *chart) label(l *lane, class, anchor, s string, x, a, b float64) {
	w := textWidth(s)
	left := x
	if anchor == "middle" {
		left -= w / 2
	}
	if left < a || left+w > b || slices.ContainsFunc(l.taken, func(t [2]float64) bool { return left < t[1]+4 && t[0] < left+w+4 }) {
		return
	}
	l.taken = append(l.taken, [2]float64{left, left + w})
	c.text(class, anchor, x, l.mid()+4, s)
}

func (c *chart) axis(bottom float64) {
	for _, l := range c.lanes {
		c.path(grounds, "border", "M0 %vH%v", px(l.y), px(width))
		c.text("lane", "", 0, l.mid()+1, l.name)
		if l.sub != "" {
			c.text("quiet", "", 0, l.mid()+13, l.sub)
		}
	}
	span := float64(c.to) - float64(c.from)
	step := niceStep(span * tickRoom / (plotB - plotA))
	decimals := max(0, -int(math.Floor(math.Log10(step/float64(c.unit.size))+1e-9)))
	for k := math.Ceil(float64(c.from)/step - 1e-9); k*step <= float64(c.to)+step*1e-9; k++ {
		x, name := c.x(time.Duration(k*step)), "0"
		if k != 0 {
			name = minus(strconv.FormatFloat(k*step/float64(c.unit.size), 'f', decimals, 64)) + " " + c.unit.name
		}
		c.path(grounds, "grid", "M%v %vV%v", px(x), px(lanesY), px(bottom))
		if x+textWidth(name)/2 <= width {
			c.text("axis", "middle", x, lanesY-10, name)
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

func (c *chart) lives() {
	line := func(l *lane, from, to time.Duration) {
		if a, b := c.x(from), c.x(to); b > a {
			c.path(grounds, "life", "M%v %vH%v", px(a), px(l.mid()), px(b))
		}
	}
	for i, l := range c.workers {
		from, to := c.to, c.to
		for _, it := range c.items {
			if it.concerns(c.scene.workers[i]) {
				if from = min(from, it.at); it.reports(history.Done) {
					to = it.at
					break
				}
			}
		}
		line(l, from, to)
	}
	line(c.resource, c.from, c.to)
}

type fault struct {
	span
	lane        *lane
	sign        sign
	label, does string
}

func (c *chart) inForce() (all []fault) {
	for _, kind := range []struct {
		spans       []span
		sign        sign
		label, does string
	}{
		{c.frozen, frozenSign, "frozen", "%s is frozen"},
		{c.held, heldSign, "", "What %s sends is held in the network"},
		{c.cut, cutSign, "cut off", "%s is cut off from the lock"},
		{c.down, downSign, "down", "%s is down"},
	} {
		for _, s := range kind.spans {
			f := fault{span: s, lane: c.laneOf(s.target), sign: kind.sign, label: kind.label}
			f.does = fmt.Sprintf(kind.does+" from %s to %s.", short(s.target, 30), human(s.from), human(s.to))
			if kind.label == "" { // drawn from when a write was sent
				f.lane, f.label = c.network, short(s.target, 11)+"’s write held"
				if i := slices.IndexFunc(c.writes, s.carries); i >= 0 {
					f.from = max(s.from, c.writes[i].sent)
				}
			}
			all = append(all, f)
		}
	}
	return all
}

// intervals draws each lease in the lock's lane and in its holder's, there with a dashed outline while the holder believed in it
// after its end.
func (c *chart) intervals() {
	faults := c.inForce()
	for _, f := range faults {
		if f.sign == frozenSign && f.lane != nil {
			c.box(f.lane, sign{Class: "back"}, "", c.x(f.from), c.x(f.to))
		}
	}
	for _, l := range c.leases {
		hue := c.hue(l.worker)
		a, b := c.x(l.from), max(c.x(l.end), c.x(l.from)+leastBar)
		c.bar(c.lock, l, a, b)
		if l.fits(c) {
			c.label(c.lock, "in", "", l.label(), a+6, a, b)
		}
		own := c.laneOf(l.worker)
		if own == nil {
			continue
		}
		c.bar(own, l, a, min(b, max(c.x(l.belief), a+leastBar)))
		if l.how == expired {
			c.vline("guide", c.x(min(l.solid, l.end)), c.lock.bottom(), own.bottom())
		}
		believes := l.end
		for _, f := range c.frozen {
			if f.target == l.worker && f.from <= believes && believes < f.to {
				believes = f.to
			}
		}
		if b, end := max(b, c.x(believes)), c.x(l.belief); end-b >= 1 {
			c.box(own, beliefSign, hue, b, end)
			if !c.interrupted(l.worker, believes, l.belief) {
				c.label(own, "in", "", "believes it holds", b+6, b, end-6)
			}
		}
	}
	for _, f := range faults {
		if f.lane == nil {
			continue
		}
		a, b := c.x(f.from), max(c.x(f.to), c.x(f.from)+leastBar)
		c.box(f.lane, f.sign, "", a, b)
		label := f.label + " " + human(f.to-f.from)
		if f.open {
			label += ", to the end"
		}
		c.label(f.lane, "over", "middle", label, (a+b)/2, a+6, b-6)
	}
}

func (c *chart) bar(l *lane, le lease, a, b float64) {
	hue := c.hue(le.worker)
	c.box(l, sign{Class: "back"}, "", a, b)
	c.box(l, leaseSign, hue, a, b)
	c.vline("edge "+hue, a, l.top(), l.bottom())
	if le.how == expired {
		c.box(l, fadeSign, "", max(min(c.x(le.solid), b-fadeLen), a+(b-a)/3), b)
	}
	if le.how == released {
		c.vline("edge "+hue, b, l.top(), l.bottom())
	}
	if le.how == superseded {
		c.vline("edge cut", b, l.top()-2, l.bottom()+2)
	}
}

func (c *chart) interrupted(worker string, from, to time.Duration) bool {
	return slices.ContainsFunc(slices.Concat(c.frozen, c.down), func(s span) bool {
		return s.target == worker && s.from < to && s.to > from
	})
}

// carries reports whether a write was in flight while its sender's messages were held.
func (s span) carries(w write) bool {
	return s.target == w.worker && s.from <= w.decision.at && w.sent <= s.to && w.decision.at > w.sent
}

// arrows draws each write from its sender to the resource. Of several on the same pixels one is drawn; stale ones are on top.
func (c *chart) arrows() {
	seen := map[string]bool{}
	for _, w := range c.writes {
		own := c.laneOf(w.worker)
		if own == nil {
			continue
		}
		layer, class := lines, "arrow"
		switch w.decision.mark() {
		case refusedMark:
			class += " no"
		case staleMark:
			layer, class = alarms, class+" bad"
		default:
		}
		a, b := c.x(w.sent), c.x(w.decision.at)
		at := fmt.Sprintf("%d %d %v %s", int(a), int(b), own.y, class)
		if seen[at] {
			continue
		}
		seen[at] = true
		from, tip := px(own.bottom()), px(c.resource.mid()-8)
		d := fmt.Sprintf("M%v %vL%v %v", px(a), from, px(b), tip)
		if slices.ContainsFunc(c.held, func(s span) bool { return s.carries(w) }) {
			d = fmt.Sprintf("M%v %vV%vM%v %vV%v", px(a), from, px(c.network.mid()), px(b), px(c.network.mid()), tip)
		}
		c.path(layer, class, "%sm-2.6-4.2 2.6 4.2 2.6-4.2", d)
	}
}

// points marks events at their exact times. Of decisions that would overlap, only the gravest is drawn; the rows below have all.
func (c *chart) points() {
	x, gravest := math.Inf(-1), noMark
	flush := func() {
		if gravest != noMark {
			c.glyph(gravest, x, c.resource.mid())
		}
	}
	for _, it := range c.items {
		l, at := c.laneOfEvent(it), c.x(it.at)
		switch {
		case l == nil:
		case l != c.resource:
			if at-l.tick >= 1 {
				c.vline("tick", at, l.top()-2, l.bottom()+2)
				l.tick = at
			}
			if l != c.lock && it.fault().State == history.Down {
				c.glyph(killMark, at, l.mid())
			}
		case it.Kind != history.KindDecision:
		case at-x < 6:
			if m := it.mark(); m > gravest {
				x, gravest = at, m
			}
		default:
			flush()
			x, gravest = at, it.mark()
		}
	}
	flush()
}

func (c *chart) describe() string {
	const most = 16
	var say []string
	for _, l := range c.leases {
		how := map[ending]string{
			open: "still held at the end of the history", released: "released at " + human(l.end),
			expired: "expired by " + human(l.end), superseded: "ended early at " + human(l.end),
		}[l.how]
		say = append(say, fmt.Sprintf("%s is granted token %d at %s; %s.", short(l.worker, 30), l.token, human(l.from), how))
	}
	for _, f := range c.inForce() {
		say = append(say, f.does)
	}
	for _, it := range c.items {
		if c.atServer(it) {
			say = append(say, fmt.Sprintf("At %s: %s.", human(it.at), it.serverLabel()))
		}
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
	return strings.Join(append(say, "The list of events has every step with its exact time."), " ")
}
