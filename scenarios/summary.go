package scenarios

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"text/tabwriter"

	"github.com/fencelab/fencelab/scenarios/history"
)

// Summary summarizes the hazards that ran on one lock: a sentence, a table, and what did not run and why. Add may be called
// concurrently.
type Summary struct {
	mu   sync.Mutex
	said map[string]map[history.Fencing]string // by hazard
	why  map[string]string                     // it couldn't run in one of its modes
}

const notRun = "-"

// Add adds the result of [Runner.Run].
func (s *Summary) Add(sc Scenario, f history.Fencing, o *Outcome, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.said == nil {
		s.said, s.why = map[string]map[history.Fencing]string{}, map[string]string{}
	}
	if s.said[sc.Name] == nil {
		s.said[sc.Name] = map[history.Fencing]string{}
	}
	says := o.Verdict.String()
	if err != nil {
		s.why[sc.Name] = strings.ReplaceAll(err.Error(), "\n", "; ")
		says = "failed"
		if errors.Is(err, errors.ErrUnsupported) {
			says = notRun
		}
	}
	s.said[sc.Name][f] = says
}

var columns = []struct {
	fencing     history.Fencing
	says, table string
}{
	{history.FencingOff, "The lock alone lost data in %d of %d hazards", "fencing off"},
	{history.FencingWrites, "with its token checked on writes, in %d of %d", "on writes"},
	{history.FencingOn, "on reads and writes, in %d of %d", "on reads and writes"},
}

// String returns the summary as text.
func (s *Summary) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	rows := slices.Sorted(maps.Keys(s.said))
	lines := make([]string, 1+len(rows))
	lines[0] = "hazard"
	copy(lines[1:], rows)
	var headline []string
	for _, c := range columns {
		violated, judged := 0, 0
		for i, name := range rows {
			says := cmp.Or(s.said[name][c.fencing], notRun)
			lines[1+i] += "\t" + says
			if says == history.Violated.String() {
				violated++
			}
			if says == history.Violated.String() || says == history.Safe.String() {
				judged++
			}
		}
		lines[0] += "\t" + c.table
		if judged > 0 {
			headline = append(headline, fmt.Sprintf(c.says, violated, judged))
		}
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s.\n\n", strings.Join(headline, "; "))
	table := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(table, strings.Join(lines, "\n")) // a Builder takes everything
	_ = table.Flush()
	for _, name := range rows {
		if why := s.why[name]; why != "" {
			fmt.Fprintf(&b, "%s: %s\n", name, strings.TrimPrefix(why, fmt.Sprintf("scenarios: scenario %q: ", name)))
		}
	}
	return b.String()
}
