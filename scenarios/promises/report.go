package promises

import (
	"fmt"
	"strings"
	"text/tabwriter"
	"time"
)

// Verdict says what is known of a promise.
type Verdict int

// What can be known of a promise.
const (
	Kept      Verdict = iota // it wasn't seen broken
	Broken                   // it was
	Unchecked                // it can't be checked, and why
)

func (v Verdict) String() string {
	return [...]string{"keeps", "breaks", "not checked"}[v]
}

// Row is what is known of one promise.
type Row struct {
	Promise string        // its name
	Text    string        // what is promised, in a sentence
	Verdict Verdict       //
	Why     string        // what happened, or why it can't be checked
	Took    time.Duration // to find out
}

// Report says what a lock keeps and what it breaks.
type Report struct {
	Lock string
	Rows []Row
}

// Count returns how many promises have a verdict.
func (r *Report) Count(v Verdict) (n int) {
	for _, row := range r.Rows {
		if row.Verdict == v {
			n++
		}
	}
	return n
}

// String is the report as text: a sentence, a table, and what happened.
func (r *Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s breaks %d of %d promises", r.Lock, r.Count(Broken), r.Count(Broken)+r.Count(Kept))
	if n := r.Count(Unchecked); n > 0 {
		fmt.Fprintf(&b, "; %d not checked", n)
	}
	b.WriteString(".\n\n")
	table := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	for _, row := range r.Rows {
		_, _ = fmt.Fprintf(table, "%s\t%s\t%s\n", row.Promise, row.Verdict, row.Text) // a Builder takes everything
	}
	_ = table.Flush()
	for _, v := range []Verdict{Broken, Unchecked} {
		for _, row := range r.Rows {
			if row.Verdict == v {
				fmt.Fprintf(&b, "\n%s %s: %s", v, row.Promise, row.Why)
			}
		}
	}
	return strings.TrimRight(b.String(), "\n") + "\n"
}
