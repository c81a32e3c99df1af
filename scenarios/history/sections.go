package history

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"strings"
)

// Section is a critical section as a transaction, for checkers that know nothing of tokens: it read a ledger, then wrote it with
// one more entry. If nothing is lost, each has read what the previous one wrote.
type Section struct {
	Actor       string // "": the read of the final value, which writes nothing
	Key         string
	Read, Wrote string
	// Begin is the index of the event that reports the read, End that of the accepted write's report; -1 if there is none, as
	// after a kill.
	Begin, End int
}

// Sections returns the accepted writes, in order, then the reads of the final values.
func Sections(events []Event) (all []Section) {
	type worker struct {
		read  string
		begin int
		open  []int // indices into all: accepted writes that it hasn't reported
	}
	workers, authors := map[string]*worker{}, map[string]string{}
	for i, e := range events {
		switch w := workers[e.Actor]; {
		case e.Name == Read:
			workers[e.Actor] = &worker{read: e.Value, begin: i}
		case e.Name == BeforeWrite:
			authors[e.Value] = e.Actor // ledgers are unique: workers append their names
		case e.Name == Wrote && w != nil && len(w.open) > 0:
			all[w.open[0]].End = i
			w.open = w.open[1:]
		case e.Op == "write" && e.Accepted:
			actor := cmp.Or(authors[e.Value], "unknown")
			if w = workers[actor]; w == nil {
				w = &worker{begin: i}
				workers[actor] = w
			}
			w.open = append(w.open, len(all))
			all = append(all, Section{actor, e.Key, w.read, e.Value, w.begin, -1})
			w.read, w.begin = e.Value, i
		case e.Kind == KindFinal:
			all = append(all, Section{"", e.Key, e.Value, e.Value, i, i})
		}
	}
	return all
}

// EncodeJepsen writes the sections as a Jepsen history, in EDN: transactions for Elle's list-append checker. Each section is a
// process of its own, since a worker's sections are ordered anyway.
func EncodeJepsen(w io.Writer, events []Event) error {
	type op struct {
		at   int
		text string
	}
	var ops []op
	for i, s := range Sections(events) {
		key, read := edn(s.Key), "["+strings.Join(ednAll(Entries(s.Read)), " ")+"]"
		write := ""
		if _, entry, _ := cutLast(s.Wrote); s.Actor != "" {
			write = fmt.Sprintf(" [:append %s %s]", key, edn(entry))
		}
		add := func(at int, kind, read string) {
			ops = append(ops, op{at, fmt.Sprintf(":type :%s, :process %d, :f :txn, :value [[:r %s %s]%s]", kind, i, key, read, write)})
		}
		add(s.Begin, "invoke", "nil")
		if s.End < 0 {
			add(len(events), "info", "nil")
		} else {
			add(s.End, "ok", read)
		}
	}
	slices.SortStableFunc(ops, func(a, b op) int { return cmp.Compare(a.at, b.at) })
	for i, o := range ops {
		if _, err := fmt.Fprintf(w, "{:index %d, %s}\n", i, o.text); err != nil {
			return fmt.Errorf("history: %w", err)
		}
	}
	return nil
}

// edn is a string's literal: EDN has JSON's escapes.
func edn(s string) string {
	b, _ := json.Marshal(s)
	return string(b)
}

func ednAll(all []string) []string {
	quoted := make([]string, len(all))
	for i, s := range all {
		quoted[i] = edn(s)
	}
	return quoted
}
