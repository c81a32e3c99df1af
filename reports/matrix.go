package reports

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/fencelab/fencelab/scenarios/history"
)

// locksOrder is the order of the matrix's columns. Other locks follow.
var locksOrder = []string{"redis", "redlock", "etcd", "zookeeper", "consul", "postgres"}

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

// Cell returns what runs came to with fencing off, on writes alone, and on, as in "✕ ✓ ✓": ✕ violated, ✓ safe, ✓! safe
// with the live holder refused, ? inconclusive, · not run. The worst run of a mode counts.
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

// Matrix writes Markdown: a table of the hazards that more than two locks have, with a column for each lock; one of the
// others, with a row for each lock; and the [Tally].
func Matrix(w io.Writer, runs []Summary) error {
	var locks, names []string
	by := map[string]map[string][]Summary{}
	for _, r := range runs {
		if by[r.Scenario] == nil {
			by[r.Scenario] = map[string][]Summary{}
			names = append(names, r.Scenario)
		}
		by[r.Scenario][r.Lock] = append(by[r.Scenario][r.Lock], r)
		if !slices.Contains(locks, r.Lock) {
			locks = append(locks, r.Lock)
		}
	}
	slices.Sort(names)
	order := func(lock string) int {
		if i := slices.Index(locksOrder, lock); i >= 0 {
			return i
		}
		return len(locksOrder)
	}
	slices.SortFunc(locks, func(a, b string) int { return cmp.Or(order(a)-order(b), strings.Compare(a, b)) })

	var wide, narrow strings.Builder
	fmt.Fprintf(&wide, "| hazard | %s |\n| --- |%s\n", strings.Join(locks, " | "), strings.Repeat(" --- |", len(locks)))
	narrow.WriteString("| hazard of one lock or two | lock | off, writes, on |\n| --- | --- | --- |\n")
	few := 0
	for _, name := range names {
		if len(by[name]) > 2 || len(by[name]) == len(locks) {
			cells := make([]string, len(locks))
			for i, lock := range locks {
				cells[i] = Cell(by[name][lock])
			}
			fmt.Fprintf(&wide, "| `%s` | %s |\n", name, strings.Join(cells, " | "))
			continue
		}
		for _, lock := range locks {
			if len(by[name][lock]) > 0 {
				few++
				fmt.Fprintf(&narrow, "| `%s` | %s | %s |\n", name, lock, Cell(by[name][lock]))
			}
		}
	}
	text := wide.String()
	if few > 0 {
		text += "\n" + narrow.String()
	}
	_, err := io.WriteString(w, text+"\n"+Tally(runs)+"\n")
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
