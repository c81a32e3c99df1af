package promises

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// Verdict is what is known of a promise.
type Verdict int

// The verdicts.
const (
	Kept      Verdict = iota // not seen broken
	Broken                   // seen broken
	Unchecked                // can't be checked
)

var verdicts = [...]string{"keeps", "breaks", "not checked"}

func (v Verdict) String() string { return verdicts[v] }

// MarshalText implements [encoding.TextMarshaler].
func (v Verdict) MarshalText() ([]byte, error) { return []byte(v.String()), nil }

// UnmarshalText implements [encoding.TextUnmarshaler].
func (v *Verdict) UnmarshalText(text []byte) error {
	i := slices.Index(verdicts[:], string(text))
	if i < 0 {
		return fmt.Errorf("promises: there is no verdict %q; there are %q", text, verdicts)
	}
	*v = Verdict(i)
	return nil
}

// Row is the result of one promise.
type Row struct {
	Promise string        `json:"promise"` // its name
	Text    string        `json:"text"`    // the promise as a sentence
	Verdict Verdict       `json:"verdict"`
	Why     string        `json:"why,omitempty"` // what happened, or why it can't be checked
	Took    time.Duration `json:"-"`             // the check
}

// Report says which promises a lock keeps and breaks.
type Report struct {
	Lock   string    `json:"lock"`
	Module string    `json:"module,omitempty"` // Kit.Module and its version
	Server string    `json:"server,omitempty"`
	TTL    string    `json:"ttl"`
	Time   time.Time `json:"time"`
	Rows   []Row     `json:"rows"`
}

// append appends the report to a file, with its module's version, which a test binary lacks.
func (r *Report) append(ctx context.Context, file string) error {
	if r.Module != "" {
		out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Path}} {{.Version}}", r.Module).Output() //nolint:gosec // the test's own
		if err != nil {
			return fmt.Errorf("promises: the version of %s: %w", r.Module, err)
		}
		r.Module = strings.TrimSpace(string(out))
	}
	line, err := json.Marshal(r)
	if err != nil {
		return fmt.Errorf("promises: %w", err)
	}
	f, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644) //nolint:gosec // a report is no secret
	if err != nil {
		return fmt.Errorf("promises: %w", err)
	}
	_, err = f.Write(append(line, '\n')) // at once: other processes may append, too
	return errors.Join(err, f.Close())
}

// Count counts promises with verdict v.
func (r *Report) Count(v Verdict) (n int) {
	for _, row := range r.Rows {
		if row.Verdict == v {
			n++
		}
	}
	return n
}

// String returns the report as text.
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
