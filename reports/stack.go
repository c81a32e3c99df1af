package reports

import (
	"fmt"
	"slices"
)

// Sizes of text in the drawing, in its units (CSS pixels at natural size).
const (
	fontSize = 11.0
	rowStep  = 14.0
	stemGap  = 6.0  // from a stem to its rows
	markRoom = 13.0 // for the mark before a row of the resource
	stackGap = 8.0  // between two stacks
	near     = 36.0 // events that are closer share a stem

	stackRows  = 8 // what a stack shows before it counts the rest
	alarmExtra = 3 // rows of alarm that it shows beyond that
	mostDepth  = 16
)

// note is one event's label, hung from its exact place in a lane.
type note struct {
	x           float64
	first, last int // the numbers that it stands for; 0: none
	count       int
	text        string
	mark        mark // none: no mark before the text
	class       string
	alarm       bool
}

// moreClass marks the row that counts the rest.
const moreClass = "quiet"

// number is what the list knows the note's events by.
func (n note) number() string {
	switch {
	case n.first == 0:
		return ""
	case n.count == 1:
		return fmt.Sprint(n.first)
	case n.last-n.first == n.count-1:
		return fmt.Sprintf("%d–%d", n.first, n.last)
	case n.count == 2:
		return fmt.Sprintf("%d, %d", n.first, n.last)
	default:
		return fmt.Sprintf("%d … %d", n.first, n.last)
	}
}

func (n note) words() string {
	switch {
	case n.class == moreClass:
		return fmt.Sprintf("and %s more", grouped(n.count))
	case n.count > 1:
		return fmt.Sprintf("%s ×%s", n.text, grouped(n.count))
	default:
		return n.text
	}
}

func (n note) width() float64 {
	w := ems(n.words())
	if num := n.number(); num != "" {
		w += ems(num + " ")
	}
	w *= fontSize
	if n.alarm {
		w *= bold
	}
	if n.mark != noMark {
		w += markRoom
	}
	return w
}

// stack is a column of labels that hangs from a stem beside its events. Events that are close share a stack, in order,
// so the k-th tick is the k-th row. A stack that would run into an earlier one hangs lower.
type stack struct {
	notes []note
	more  int     // how many events did not fit
	x, x1 float64 // the places of the first event and of the last that is near it
	left  bool    // the rows end before the first event instead of starting after the last
	a, b  float64 // what it covers
	base  int     // the rows that it leaves free above its first
}

// hang puts notes, in order of x, into stacks between left and right of which none covers another.
func hang(notes []note, left, right float64) []stack {
	var stacks []stack
	for _, n := range notes {
		last := len(stacks) - 1
		if last >= 0 && n.x-stacks[last].x < near {
			stacks[last].add(n)
		} else {
			stacks = append(stacks, stack{x: n.x})
			last++
			stacks[last].add(n)
		}
		stacks[last].place(left, right)
		stacks[last].settle(stacks[:last])
		for ; last > 0 && stacks[last].depth() > mostDepth; last-- {
			for _, n := range stacks[last].rows() {
				stacks[last-1].add(n)
			}
			stacks = stacks[:last]
			stacks[last-1].place(left, right)
			stacks[last-1].settle(stacks[:last-1])
		}
	}
	return stacks
}

// settle lowers s until it is clear of the others.
func (s *stack) settle(others []stack) {
	s.base = 0
	for i := 0; i < len(others); i++ {
		o := &others[i]
		beside := o.b+stackGap <= s.a || s.b+stackGap <= o.a
		if beside || o.depth() <= s.base || s.depth() <= o.base {
			continue
		}
		s.base = o.depth()
		i = -1
	}
}

// depth is the number of rows from the lane's bar down to the end of s.
func (s *stack) depth() int { return s.base + len(s.rows()) }

// add appends n: to the last row if it says the same, to a row of its own, or to the count of the rest.
func (s *stack) add(n note) {
	if s.x1 = max(s.x, s.x1); n.x-s.x < near {
		s.x1 = max(s.x1, n.x)
	}
	if n.class == moreClass {
		s.more += n.count
		return
	}
	if len(s.notes) > 0 && s.more == 0 {
		if last := &s.notes[len(s.notes)-1]; last.text == n.text && last.first != 0 && n.first != 0 {
			last.last, last.count = n.last, last.count+n.count
			return
		}
	}
	if len(s.notes) < stackRows && s.more == 0 || n.alarm && len(s.notes) < stackRows+alarmExtra {
		s.notes = append(s.notes, n)
		return
	}
	s.more += n.count
}

// rows are the notes and, where some did not fit, the count of the rest.
func (s *stack) rows() []note {
	if s.more == 0 {
		return s.notes
	}
	return append(slices.Clone(s.notes), note{x: s.x1, count: s.more, class: moreClass})
}

func (s *stack) place(left, right float64) {
	w := stemGap
	for _, n := range s.rows() {
		w = max(w, n.width()+stemGap)
	}
	s.left = s.x1+w > right && s.x-w >= left
	s.a, s.b = s.x, s.x1+w
	if s.left {
		s.a, s.b = s.x-w, s.x1
	}
}

// stem is the place of the stem.
func (s *stack) stem() float64 {
	if s.left {
		return s.x
	}
	return s.x1
}
