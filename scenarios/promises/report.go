package promises

import (
	"bytes"
	"cmp"
	"context"
	_ "embed" // for the page
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"
	"time"

	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
)

// Verdict is the result for a promise, or for a hazard in the strictest fencing mode that the lock supports.
type Verdict string

// The verdicts.
const (
	Kept      Verdict = "keeps"
	Broken    Verdict = "breaks"      // or data was lost
	Unchecked Verdict = "not checked" // or inconclusive
)

// Row is the result of one promise or hazard.
type Row struct {
	Promise  string  `json:"promise"`
	Text     string  `json:"text"`
	Verdict  Verdict `json:"verdict"`
	Why      string  `json:"why,omitempty"` // what happened, why it can't be checked, or an observation
	Excluded bool    `json:"-"`             // ruled out by the lock, the servers or the platform

	// Data is a hazard's verdict in each fencing mode that ran. Violated means that data was lost.
	Data map[history.Fencing]history.Verdict `json:"data,omitempty"`

	traces map[history.Fencing][]string
}

// Report says which promises a lock keeps and breaks, and in which hazards data is lost.
type Report struct {
	Lock      string    `json:"lock"`
	Module    string    `json:"module,omitempty"` // with its version
	Server    string    `json:"server,omitempty"`
	NoTokens  bool      `json:"no_tokens,omitempty"`
	TTL       string    `json:"ttl"`
	Time      time.Time `json:"time"`
	Rows      []Row     `json:"rows"`
	Hazards   []Row     `json:"hazards,omitempty"`
	NoHazards string    `json:"no_hazards,omitempty"`
}

func (k Kit) run(ctx context.Context, hazards []scenarios.Scenario) []Row {
	var wg sync.WaitGroup
	var mu sync.Mutex
	rows := make([]Row, len(hazards))
	slots := make(chan struct{}, runtime.GOMAXPROCS(0))
	for i, s := range hazards {
		rows[i] = Row{Promise: s.Name, Text: s.Hazard, Data: map[history.Fencing]history.Verdict{}, traces: map[history.Fencing][]string{}}
		row := &rows[i]
		for f := range s.Expect {
			if k.Service.NoTokens && f != history.FencingOff {
				continue
			}
			wg.Go(func() {
				slots <- struct{}{}
				defer func() { <-slots }()
				o, err := (&scenarios.Runner{Service: k.Service, Store: k.Store, TTL: k.TTL}).Run(ctx, s, f)
				mu.Lock()
				defer mu.Unlock()
				if err == nil {
					row.Data[f], row.traces[f] = o.Verdict, slices.Concat(o.Findings, history.Trace(o.Events))
					return
				}
				no := errors.Is(err, errors.ErrUnsupported)
				if row.Why != "" && (no || !row.Excluded) {
					return // a failure tells more than an exclusion
				}
				row.Excluded = no
				row.Why = strings.TrimPrefix(strings.ReplaceAll(err.Error(), "\n", "; "), fmt.Sprintf("scenarios: scenario %q: ", s.Name))
			})
		}
	}
	wg.Wait()
	for i := range rows {
		row := &rows[i]
		row.Verdict = Unchecked
		failed := row.Why != "" && !row.Excluded
		row.Excluded = row.Excluded && len(row.Data) == 0 // other modes may not be ruled out
		for _, m := range modes {
			if v, ran := row.Data[m.fencing]; ran && !failed {
				row.Verdict = map[history.Verdict]Verdict{history.Safe: Kept, history.Violated: Broken, history.Inconclusive: Unchecked}[v]
			}
		}
	}
	return rows
}

// failures are what Kit.Strict fails for.
func (r *Report) failures() (names []string) {
	for _, row := range slices.Concat(r.Rows, r.Hazards) {
		_, fenced := row.Data[history.FencingOn]
		if row.Verdict == Broken && (row.Data == nil || fenced) || row.Verdict == Unchecked && !row.Excluded {
			names = append(names, row.Promise)
		}
	}
	return names
}

//go:embed page.html.tmpl
var pageText string

var pageTemplate = template.Must(template.New("page").Parse(pageText))

// record appends the report to a file, with its module's version, which a test binary doesn't know.
func (r *Report) record(ctx context.Context, file string) error {
	if r.Module != "" {
		out, err := exec.CommandContext(ctx, "go", "list", "-m", "-f", "{{.Path}} {{.Version}}", r.Module).Output() //nolint:gosec // the test's own
		if err != nil {
			return fmt.Errorf("promises: the version of %s: %w", r.Module, err)
		}
		r.Module = strings.TrimSpace(string(out))
	}
	var b bytes.Buffer
	err := json.NewEncoder(&b).Encode(r)
	if strings.HasSuffix(file, ".html") {
		b.Reset()
		err = pageTemplate.Execute(&b, r)
	}
	if err != nil {
		return fmt.Errorf("promises: %w", err)
	}
	f, err := os.OpenFile(file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644) //nolint:gosec // a report is no secret
	if err != nil {
		return fmt.Errorf("promises: %w", err)
	}
	_, err = f.Write(b.Bytes()) // in one write: other processes may append, too
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

var modes = []struct {
	fencing           history.Fencing
	name, first, says string
}{
	{history.FencingOff, "alone", "The lock alone lost data in %d of %d hazards", ""},
	{history.FencingWrites, "token on writes", "With its token checked on writes it lost data in %d of %d hazards", "with its token checked on writes, in %d of %d"},
	{history.FencingOn, "on reads and writes", "With its token checked on reads and writes it lost data in %d of %d hazards", "on reads and writes, in %d of %d"},
}

// Headline sums up the report in two sentences.
func (r *Report) Headline() string {
	s := fmt.Sprintf("%s breaks %d of %d promises", r.Lock, r.Count(Broken), r.Count(Broken)+r.Count(Kept))
	if n := r.Count(Unchecked); n > 0 {
		s += fmt.Sprintf("; %d not checked", n)
	}
	var lost []string
	for _, m := range modes {
		count := map[history.Verdict]int{}
		for _, h := range r.Hazards {
			if v, ran := h.Data[m.fencing]; ran {
				count[v]++
			}
		}
		says := m.says
		if len(lost) == 0 {
			says = m.first
		}
		if n := count[history.Violated]; n+count[history.Safe] > 0 {
			lost = append(lost, fmt.Sprintf(says, n, n+count[history.Safe]))
		}
	}
	if len(lost) == 0 {
		return s + "."
	}
	if r.NoTokens {
		lost = append(lost, "it has no token to check")
	}
	return s + ". " + strings.Join(lost, "; ") + "."
}

// Result is the verdict, or a hazard's verdict in each mode.
func (row *Row) Result() string {
	var all []string
	for _, m := range modes {
		if v, ran := row.Data[m.fencing]; ran {
			all = append(all, m.name+": "+v.String())
		}
	}
	return cmp.Or(strings.Join(all, ", "), string(row.Verdict))
}

// Traces are a hazard's traces in each mode.
func (row *Row) Traces() (all []string) {
	for _, m := range modes {
		if t := row.traces[m.fencing]; t != nil {
			all = append(all, m.name+": "+strings.Join(t, "\n"))
		}
	}
	return all
}

// All are the rows of promises and hazards.
func (r *Report) All() (all []*Row) {
	rows := slices.Concat(r.Rows, r.Hazards)
	if r.NoHazards != "" {
		rows = append(rows, Row{Promise: "Hazards", Text: "what becomes of the data that the lock guards", Verdict: Unchecked, Why: r.NoHazards})
	}
	for i := range rows {
		rows[i].Why = strings.TrimSuffix(rows[i].Why, ": "+errors.ErrUnsupported.Error())
		all = append(all, &rows[i])
	}
	return all
}

// String returns the report as text.
func (r *Report) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n\n", r.Headline())
	table := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	names := map[string][]string{}
	var reasons []string
	for _, row := range r.All() {
		_, _ = fmt.Fprintf(table, "%s\t%s\t%s\n", row.Promise, row.Result(), row.Text)
		if row.Why != "" && names[row.Why] == nil {
			reasons = append(reasons, row.Why)
		}
		names[row.Why] = append(names[row.Why], row.Promise)
	}
	_ = table.Flush()
	for _, why := range reasons {
		fmt.Fprintf(&b, "\n%s: %s", strings.Join(names[why], ", "), why)
	}
	return strings.TrimRight(b.String(), "\n") + "\n"
}
