package history

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Trace returns a history without times, keys and token values, one line per event. A token is written as its rank among the
// granted ones, from "#1", the smallest.
func Trace(events []Event) []string {
	var granted []uint64
	for _, e := range events {
		if e.Kind == KindReport && e.Name == Acquired && e.Token != 0 {
			granted = append(granted, e.Token)
		}
	}
	slices.Sort(granted)
	granted = slices.Compact(granted)
	rank := func(token uint64) string {
		if i, ok := slices.BinarySearch(granted, token); ok {
			return fmt.Sprintf("#%d", i+1)
		}
		if token == 0 {
			return "none"
		}
		return "#?"
	}
	var keys []string
	if len(events) > 0 && events[0].Run != nil {
		keys = events[0].Run.Keys
	}
	lines := make([]string, 0, len(events))
	for i := range events {
		line := traceLine(&events[i], rank)
		if n := slices.Index(keys, events[i].Key); n > 0 {
			line += fmt.Sprintf(", ledger %d", n+1)
		}
		if line != "" {
			lines = append(lines, line)
		}
	}
	return lines
}

func traceLine(e *Event, rank func(uint64) string) string {
	ledger := bracketed(Entries(e.Value))
	switch e.Kind {
	case KindRun:
		if e.Run == nil {
			break
		}
		return fmt.Sprintf("run %s, fencing %s", e.Run.Scenario, e.Run.Fencing)
	case KindReport:
		switch e.Name {
		case Acquired:
			return fmt.Sprintf("%s acquired %s", e.Actor, rank(e.Token))
		case Read, BeforeWrite:
			return fmt.Sprintf("%s %s %s", e.Actor, e.Name, ledger)
		case Failed:
			return fmt.Sprintf("%s failed: %q", e.Actor, e.Error)
		}
		return e.Actor + " " + e.Name
	case KindFault:
		line := e.Name + " " + e.Target
		if e.Detail != "" {
			line += " " + e.Detail
		}
		if len(e.Peers) > 0 {
			line += " from " + strings.Join(e.Peers, " ")
		}
		return line
	case KindDecision:
		verb := "refuses"
		if e.Accepted {
			verb = "accepts"
		}
		line := fmt.Sprintf("  resource %s %s %s", verb, e.Op, rank(e.Token))
		if e.Token == 0 {
			line = fmt.Sprintf("  resource %s unfenced %s", verb, e.Op)
		}
		if e.Op == "write" {
			line += " " + ledger
		}
		if e.Token != 0 && e.Token < e.Seen || !e.Accepted {
			line += " after " + rank(e.Seen)
			if e.SeenSeq == 0 {
				line += " has read"
			}
		}
		return line
	case KindFinal:
		return fmt.Sprintf("final %s, %d refused", ledger, e.Refusals)
	case KindDoubt:
		return "the hazard never came about"
	case KindEnd:
		return ""
	}
	return fmt.Sprintf("%s %s %s", e.Kind, e.Actor, e.Name)
}

// bracketed returns entries as "[A B]", quoting ambiguous ones.
func bracketed(entries []string) string {
	words := slices.Clone(entries)
	for i, w := range words {
		if q := strconv.Quote(w); strings.ContainsAny(w, " []") || q != `"`+w+`"` {
			words[i] = q
		}
	}
	return "[" + strings.Join(words, " ") + "]"
}
