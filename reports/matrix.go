package reports

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/fencelab/fencelab/scenarios/history"
)

// locksOrder is the order of locks in the matrix. Others follow.
var locksOrder = []string{"redis", "redlock", "etcd", "zookeeper", "consul", "postgres", "s3"}

// The signs of a matrix cell, from best to worst.
const (
	notRun      = "·"
	safeSign    = "✓"
	refusedSign = "✓!" // safe, but the live holder was refused
	brokenSign  = "✕"
	unknownSign = "?"
)

var cellSigns = []string{notRun, safeSign, refusedSign, brokenSign, unknownSign}

func (s *Summary) sign() string {
	switch {
	case s.Verdict == history.Violated:
		return brokenSign
	case s.Verdict != history.Safe:
		return unknownSign
	case s.LiveRefused:
		return refusedSign
	}
	return safeSign
}

// Cell returns the results of runs with fencing off, on writes alone, and on, as in "✕ ✓ ✓": ✕ violated, ✓ safe, ✓! safe with the
// live holder refused, ? inconclusive, · not run. The worst run of a mode counts.
func Cell(runs []Summary) string {
	var words []string
	for _, mode := range modes {
		worst := 0
		for i := range runs {
			if runs[i].Fencing == mode {
				worst = max(worst, slices.Index(cellSigns, runs[i].sign()))
			}
		}
		words = append(words, cellSigns[worst])
	}
	return strings.Join(words, " ")
}

// Matrix writes Markdown: a table with a row for each hazard, or several where results differ between locks, and the [Tally].
// About, if not nil, returns a sentence on a hazard.
func Matrix(w io.Writer, runs []Summary, about func(hazard string) string) error {
	hazards, locks := map[string]map[string][]Summary{}, map[string]bool{} // runs by lock
	for _, r := range runs {
		if hazards[r.Scenario] == nil {
			hazards[r.Scenario] = map[string][]Summary{}
		}
		hazards[r.Scenario][r.Lock] = append(hazards[r.Scenario][r.Lock], r)
		locks[r.Lock] = true
	}
	order := func(lock string) int {
		if i := slices.Index(locksOrder, lock); i >= 0 {
			return i
		}
		return len(locksOrder)
	}
	var text strings.Builder
	text.WriteString("| hazard | locks | off, writes, on |\n| --- | --- | --- |\n")
	for _, name := range slices.SortedFunc(maps.Keys(hazards), func(a, b string) int {
		return cmp.Or(len(hazards[b])-len(hazards[a]), strings.Compare(a, b))
	}) {
		alike := map[string][]string{} // locks by cell
		for _, lock := range slices.SortedFunc(maps.Keys(hazards[name]), func(a, b string) int { return cmp.Or(order(a)-order(b), strings.Compare(a, b)) }) {
			cell := Cell(hazards[name][lock])
			alike[cell] = append(alike[cell], lock)
		}
		words := "`" + name + "`"
		if about != nil {
			words += ": " + about(name)
		}
		for _, cell := range slices.Sorted(maps.Keys(alike)) {
			on := strings.Join(alike[cell], ", ")
			if n := len(alike[cell]); n == len(locks) && n > 1 {
				on = fmt.Sprintf("all %d", n)
			}
			fmt.Fprintf(&text, "| %s | %s | %s |\n", words, on, cell)
		}
	}
	_, err := io.WriteString(w, text.String()+"\n"+Tally(runs)+"\n")
	return err
}

// Tally is a Markdown line for each fencing mode.
func Tally(runs []Summary) string {
	names := map[history.Fencing]string{
		history.FencingOff: "off", history.FencingWrites: "on writes alone", history.FencingOn: "on",
	}
	var lines []string
	for _, mode := range modes {
		var n, violated, stale, lost, live int
		for _, r := range runs {
			if r.Fencing != mode {
				continue
			}
			n++
			stale += r.Stale
			lost += len(r.Lost)
			if r.Verdict == history.Violated {
				violated++
			}
			if r.LiveRefused {
				live++
			}
		}
		lines = append(lines, fmt.Sprintf(
			"* fencing %s: %s, %d violated; writes accepted under a token that was not greater: %d, accepted entries lost: %d, live holders refused: %d",
			names[mode], plural(n, "run"), violated, stale, lost, live))
	}
	return strings.Join(lines, "\n")
}
