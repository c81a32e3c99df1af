package reports

import (
	"math"
	"strconv"
	"strings"
	"time"
	"unicode"
)

// clean replaces what isn't safe to read in untrusted s. The template escapes HTML.
func clean(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsGraphic(r) {
			return r
		}
		return unicode.ReplacementChar
	}, s)
}

func short(s string, limit int) string {
	r := []rune(clean(s))
	if len(r) > limit {
		return string(r[:limit-1]) + "…"
	}
	return string(r)
}

// Number formats v with commas and three significant digits, or as a whole number: "0.123", "12,345".
func Number(v float64) string {
	if v == 0 {
		return "0"
	}
	s := strconv.FormatFloat(v, 'f', max(0, 2-int(math.Floor(math.Log10(math.Abs(v))))), 64)
	if strings.Contains(s, ".") {
		s = strings.TrimRight(strings.TrimRight(s, "0"), ".")
	}
	for i := strings.IndexByte(s+".", '.') - 3; i > 0 && s[i-1] != '-'; i -= 3 {
		s = s[:i] + "," + s[i:]
	}
	return s
}

func grouped(n int) string { return Number(float64(n)) }

// plural is "1 write", "2 writes", "0 entries".
func plural(n int, noun string) string {
	if n != 1 {
		stem, y := strings.CutSuffix(noun, "y")
		noun = stem + map[bool]string{true: "ies", false: "s"}[y]
	}
	return grouped(n) + " " + noun
}

type unit struct {
	name     string
	size     time.Duration
	decimals int // of exact times in the list
}

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

func (u unit) exact(d time.Duration) string {
	return minus(strconv.FormatFloat(float64(d)/float64(u.size), 'f', u.decimals, 64))
}

// The minus sign is as wide as the plus.
func minus(s string) string { return strings.Replace(s, "-", "−", 1) }

// human has three significant digits: "4.98 s", "300 ms", "10 min".
func human(d time.Duration) string {
	switch {
	case d == 0:
		return "0 s"
	case d >= 2*time.Minute && d%time.Minute == 0:
		return grouped(int(d/time.Minute)) + " min"
	}
	u := unitFor(max(d, -d))
	return minus(Number(float64(d)/float64(u.size))) + " " + u.name
}

func fit(s string) string {
	r := []rune(short(s, 12))
	for n := len(r); textWidth(string(r)) > plotA-8; {
		n--
		r = append(r[:n:n], '…')
	}
	return string(r)
}
