package reports

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// clean makes s, which may come from anyone, safe to look at: at most limit runes, a note of what was cut, and every
// rune that has no picture (controls, direction overrides, broken UTF-8) spelled out instead of acted on.
// Escaping for HTML is the template's work.
func clean(s string, limit int) string {
	var b strings.Builder
	n := 0
	for i := 0; i < len(s); n++ {
		if n == limit {
			fmt.Fprintf(&b, "… (cut; %s bytes in all)", grouped(len(s)))
			break
		}
		r, size := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x%02x`, s[i])
		case unicode.IsGraphic(r):
			b.WriteRune(r)
		default:
			q := strconv.QuoteRuneToASCII(r)
			b.WriteString(q[1 : len(q)-1])
		}
		i += size
	}
	return b.String()
}

// short is clean for the drawing, where there is no room for a note.
func short(s string, limit int) string {
	r := []rune(clean(s, 4*limit))
	if len(r) > limit {
		return string(r[:limit-1]) + "…"
	}
	return string(r)
}

// grouped writes n with a comma after every three digits.
func grouped(n int) string {
	s := strconv.Itoa(n)
	for i := len(s) - 3; i > 0; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

// plural is "1 write", "2 writes", "0 entries".
func plural(n int, noun string) string {
	if n != 1 {
		stem, y := strings.CutSuffix(noun, "y")
		noun = stem + map[bool]string{true: "ies", false: "s"}[y]
	}
	return grouped(n) + " " + noun
}

// unit is what a time axis counts in.
type unit struct {
	name     string
	size     time.Duration
	decimals int // for exact times in the list
}

// unitFor picks the greatest unit of which the span has at least one.
func unitFor(span time.Duration) unit {
	switch {
	case span >= time.Second:
		return unit{"s", time.Second, 6}
	case span >= time.Millisecond:
		return unit{"ms", time.Millisecond, 3}
	default:
		return unit{"µs", time.Microsecond, 3}
	}
}

// exact writes d in u to the last decimal that is kept.
func (u unit) exact(d time.Duration) string {
	return minus(strconv.FormatFloat(float64(d)/float64(u.size), 'f', u.decimals, 64))
}

// minus writes a negative number with the minus sign, which is as wide as the plus.
func minus(s string) string {
	if rest, ok := strings.CutPrefix(s, "-"); ok {
		return "−" + rest
	}
	return s
}

// human writes a duration with three significant digits in its own best unit: "4.98 s", "300 ms", "10 min".
func human(d time.Duration) string {
	switch {
	case d == 0:
		return "0 s"
	case d >= 2*time.Minute && d%time.Minute == 0:
		return grouped(int(d/time.Minute)) + " min"
	}
	u := unitFor(max(d, -d))
	v := float64(d) / float64(u.size)
	digits := max(0, 2-int(math.Floor(math.Log10(math.Abs(v)))))
	s := strconv.FormatFloat(v, 'f', digits, 64)
	if strings.Contains(s, ".") {
		s = strings.TrimRight(strings.TrimRight(s, "0"), ".")
	}
	return minus(s) + " " + u.name
}

// fit shortens the name of a lane to the room before the plot.
func fit(s string) string {
	r := []rune(short(s, 12))
	for n := len(r); textWidth(string(r)) > plotA-8; {
		n--
		r = append(r[:n:n], '…')
	}
	return string(r)
}
