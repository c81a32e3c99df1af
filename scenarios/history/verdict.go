package history

import (
	"fmt"
	"slices"
)

// Verdict is the judge's verdict. The zero value never passes.
type Verdict int

// The verdicts.
const (
	Inconclusive Verdict = iota // the history doesn't show enough; never a pass
	Safe                        // the history shows the hazard and no violation
	Violated                    // see Judge
)

var verdictNames = [...]string{"inconclusive", "safe", "violated"}

func (v Verdict) String() string {
	if v < 0 || int(v) >= len(verdictNames) {
		return fmt.Sprintf("Verdict(%d)", int(v))
	}
	return verdictNames[v]
}

// MarshalText implements [encoding.TextMarshaler].
func (v Verdict) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (v *Verdict) UnmarshalText(b []byte) error {
	i := slices.Index(verdictNames[:], string(b))
	if i < 0 {
		return fmt.Errorf("history: unknown verdict %q; the verdicts are %v", b, verdictNames)
	}
	*v = Verdict(i)
	return nil
}

// Result is a verdict and its reasons.
type Result struct {
	Verdict  Verdict
	Findings []string // what was violated, or why the history is inconclusive
	Notes    []string // without effect on the verdict
	Stale    int      // accepted writes with a fence not greater than every earlier accepted one
	StaleAt  []int    // their indexes among the events
	Refused  int      // refused writes and reads
	Lost     []string // entries that were accepted and are gone
	Writers  []string // the entries of accepted writes, in the order of first acceptance
}
