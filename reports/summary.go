package reports

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/fencelab/fencelab/internal/jsonl"
	"github.com/fencelab/fencelab/scenarios/history"
)

// Summary is a run in one line.
type Summary struct {
	Scenario string           `json:"scenario"`
	Lock     string           `json:"lock"`
	Server   string           `json:"server"`
	Fencing  history.Fencing  `json:"fencing"`
	TTL      history.Duration `json:"ttl"` // the lease of the worker that the fault hits
	Verdict  history.Verdict  `json:"verdict"`
	Stale    int              `json:"stale"`   // accepted writes whose fence was not greater than all accepted before
	Refused  int              `json:"refused"` // writes and reads
	Lost     []string         `json:"lost"`    // accepted entries that are missing
	Writers  []string         `json:"writers"` // the entries of accepted writes, in order
	// The grants in order, each with its token's rank among the run's: "A#2".
	Tokens []string `json:"tokens"`
	// The hazard makes the lock lose tokens.
	TokensLost bool `json:"tokens_lost,omitempty"`
	// The holder of the last grant was refused something.
	LiveRefused bool `json:"live_refused,omitempty"`
	// From a worker's kill to the next grant; 0: none was killed.
	Blocked history.Duration `json:"blocked,omitempty"`
}

// Summarize judges a history.
func Summarize(events []history.Event) Summary {
	r := history.Judge(events)
	s := Summary{Verdict: r.Verdict, Stale: r.Stale, Refused: r.Refused, Tokens: []string{}}
	s.Lost, s.Writers = append([]string{}, r.Lost...), append([]string{}, r.Writers...) // empty ones encode as []
	var run history.Run
	if len(events) > 0 && events[0].Run != nil {
		run = *events[0].Run
	}
	s.Scenario, s.Lock, s.Server, s.Fencing, s.TTL, s.TokensLost = run.Scenario, run.Lock, run.Server, run.Fencing, run.TTL, run.TokensLost
	var tokens []uint64
	for _, e := range events {
		if e.Kind == history.KindReport && e.Name == history.Acquired {
			tokens = append(tokens, e.Token)
		}
	}
	slices.Sort(tokens)
	tokens = slices.Compact(tokens)
	var killed time.Time
	last := ""
	for _, e := range events {
		fault, _ := history.FaultNamed(e.Name)
		switch {
		case e.Kind == history.KindFault && fault.State == history.Down && slices.Contains(run.Workers, e.Target):
			killed = e.Time
		case e.Kind == history.KindReport && e.Name == history.Acquired:
			rank, _ := slices.BinarySearch(tokens, e.Token)
			s.Tokens = append(s.Tokens, fmt.Sprintf("%s#%d", e.Actor, rank+1))
			last, s.LiveRefused = e.Actor, false
			if !killed.IsZero() {
				s.Blocked = history.Duration(e.Time.Sub(killed).Round(time.Millisecond))
				killed = time.Time{}
			}
		case e.Kind == history.KindReport && e.Actor == last && (e.Name == history.ReadStale || e.Name == history.WriteStale):
			s.LiveRefused = true
		}
	}
	return s
}

// SortSummaries sorts by scenario, lock, TTL and fencing: off, writes, on.
func SortSummaries(all []Summary) {
	slices.SortStableFunc(all, func(a, b Summary) int {
		return cmp.Or(
			cmp.Compare(a.Scenario, b.Scenario), cmp.Compare(a.Lock, b.Lock), cmp.Compare(a.TTL, b.TTL),
			cmp.Compare(slices.Index(modes, a.Fencing), slices.Index(modes, b.Fencing)),
		)
	})
}

var modes = []history.Fencing{history.FencingOff, history.FencingWrites, history.FencingOn}

// EncodeSummaries writes one JSON line per run.
func EncodeSummaries(w io.Writer, all []Summary) error { return jsonl.Encode(w, all...) }

// DecodeSummaries reads what EncodeSummaries writes. Errors name the line.
func DecodeSummaries(r io.Reader) ([]Summary, error) { return jsonl.Decode[Summary](r, true) }
