package history

import (
	"fmt"
	"slices"
)

// Verdict is what the judge says of a history. Its zero value is Inconclusive, so that a forgotten verdict never passes.
type Verdict int

// The verdicts.
const (
	Inconclusive Verdict = iota // the history does not show enough to say; never a pass
	Safe                        // no stale write was accepted and no accepted entry was lost
	Violated                    // a stale write was accepted or an accepted entry was lost
)

var verdictNames = [...]string{"inconclusive", "safe", "violated"}

func (v Verdict) String() string {
	if v < 0 || int(v) >= len(verdictNames) {
		return fmt.Sprintf("Verdict(%d)", int(v))
	}
	return verdictNames[v]
}

// MarshalText writes v as String does.
func (v Verdict) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// UnmarshalText reads what MarshalText writes.
func (v *Verdict) UnmarshalText(b []byte) error {
	i := slices.Index(verdictNames[:], string(b))
	if i < 0 {
		return fmt.Errorf("history: there is no verdict %q; there are %v", b, verdictNames)
	}
	*v = Verdict(i)
	return nil
}

// Result is a verdict and what it rests on.
type Result struct {
	Verdict  Verdict
	Findings []string // sentences: what was violated, or why the history is inconclusive
	Notes    []string // sentences that don't bear on the verdict
	Stale    int      // accepted writes whose fence was not greater than every fence accepted before
	Refused  int      // refused writes and reads
	Lost     []string // entries that were accepted and are gone
	Writers  []string // the entries of accepted writes, in the order in which they were first accepted
}
