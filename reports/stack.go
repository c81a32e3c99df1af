package reports

import (
	"fmt"
	"html/template"
	"strings"
)

const (
	rowStep  = 14.0
	stemGap  = 6.0  // from a stem to its rows
	markRoom = 13.0 // for the mark before a row
	near     = 36.0 // events closer than this share a stem
)

// textWidth is an upper estimate for common fonts.
func textWidth(s string) float64 {
	w := 0.0
	for _, r := range s {
		if w += 7; r > '~' {
			w += 6
		}
	}
	return w
}

type note struct {
	x                  float64
	first, last, count int // its events; count 0: none
	text, class        string
	mark               mark
}

func (n note) parts() (number, words string) {
	switch n.count {
	case 0:
		return "", n.text
	case 1:
		return fmt.Sprint(n.first), n.text
	default:
		return fmt.Sprintf("%d–%d", n.first, n.last), fmt.Sprintf("%s ×%s", n.text, grouped(n.count))
	}
}

func (n note) width() float64 {
	number, words := n.parts()
	w := stemGap + textWidth(number+" "+words)
	if n.mark != noMark {
		w += markRoom
	}
	return w
}

type stack struct {
	rows  []note
	x, x1 float64
	left  bool    // the rows are left of the first event, not right of the last
	a, b  float64 // the interval that it covers
	base  int     // rows left free above its first
}

// hang puts notes, sorted by x, into stacks. A stack that would overlap another hangs lower.
func hang(notes []note) (stacks []stack) {
	for _, n := range notes {
		if k := len(stacks) - 1; k < 0 || n.x-stacks[k].x >= near {
			stacks = append(stacks, stack{x: n.x})
		}
		stacks[len(stacks)-1].add(n)
	}
	for i := range stacks {
		stacks[i].place(stacks[:i])
	}
	return stacks
}

func (s *stack) add(n note) {
	s.x1 = n.x
	k := len(s.rows)
	if k > 0 && s.rows[k-1].text == n.text && n.count > 0 && s.rows[k-1].count > 0 {
		s.rows[k-1].last = n.last
		s.rows[k-1].count += n.count
		return
	}
	s.rows = append(s.rows, n)
}

func (s *stack) place(others []stack) {
	w := 0.0
	for _, n := range s.rows {
		w = max(w, n.width())
	}
	s.a, s.b = s.x, s.x1+w
	if s.left = s.b > width && s.x-w >= plotA; s.left {
		s.a, s.b = s.x-w, s.x1
	}
	for i := 0; i < len(others); i++ {
		o := others[i]
		if o.a < s.b && s.a < o.b && o.base < s.base+len(s.rows) && s.base < o.base+len(o.rows) {
			s.base, i = o.base+len(o.rows), -1
		}
	}
}

func (c *chart) hangStack(l *lane, s stack) {
	stem, side, anchor := s.x1, 1.0, ""
	if s.left {
		stem, side, anchor = s.x, -1, ` text-anchor="end"`
	}
	top := l.bottom()
	c.path(lines, "stem", "M%v %vH%vM%v %vV%v", px(s.x), px(top+3), px(s.x1), px(stem), px(top), px(top+float64(s.base+len(s.rows))*rowStep))
	for i, n := range s.rows {
		x, y := stem+side*stemGap, top+float64(s.base+i+1)*rowStep-2
		if n.mark != noMark {
			c.glyph(n.mark, x+side*4, y-4)
			x += side * markRoom
		}
		number, text := n.parts()
		link, end := "", ""
		if number != "" {
			link, end = fmt.Sprintf(`<a href="#%s-e%d">`, c.id, n.first), "</a>"
			number = `<tspan class="n">` + number + "</tspan> "
		}
		c.put(words, `%s<text class="%s" x="%v" y="%v"%s>%s%s</text>%s`,
			link, strings.TrimSpace("row "+n.class), px(x), px(y), anchor, number, template.HTMLEscapeString(text), end)
	}
}
