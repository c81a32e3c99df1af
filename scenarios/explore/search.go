package explore

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"
)

// Options configure [System.Explore].
type Options struct {
	Seed      uint64 // of the first schedule; each next one adds 1
	Schedules int    // if For is 0
	Steps     int    // per schedule; 0: 24
	For       time.Duration
	Counts    func(Schedule) bool // whether to count a schedule that breaks something; nil: always
	Best      int                 // how many counted schedules to shrink, to report the shortest; 0: 1
	Log       func(format string, args ...any)
}

// Report is the outcome of [System.Explore].
type Report struct {
	Name      string
	Schedules int
	Grants    int
	Repeats   int             // requests repeated because the connection was lost before the reply
	Met       map[string]Verb // steps that had an effect, with the call in progress ("cut acquire") → the step's verb
	Took      time.Duration
	First     int           // schedules until one broke something
	After     time.Duration // time until then
	Seed      uint64        // of Schedule
	Schedule  Schedule
	Found     *Result // nil: nothing was broken
}

func (r *Report) String() string {
	s := fmt.Sprintf("%s: %d schedules, %d grants, %d repeated requests in %v (%.0f schedules/s), %d pairs of a step and the call that it met", r.Name, r.Schedules,
		r.Grants, r.Repeats, r.Took.Round(time.Millisecond), float64(r.Schedules)/r.Took.Seconds(), len(r.Met))
	if never := slices.DeleteFunc(Verbs(), func(v Verb) bool { return slices.Contains(slices.Collect(maps.Values(r.Met)), v) }); len(never) > 0 {
		s += fmt.Sprintf(", none of %v", never)
	}
	if r.Found != nil {
		s += fmt.Sprintf("; after %d, seed %d: %s, %d steps", r.First, r.Seed, r.Found.Finding, len(r.Schedule))
	}
	return s
}

// Explore runs random schedules until one breaks something, or Best do, and shrinks them.
func (sys *System) Explore(t *testing.T, o Options) *Report {
	t.Helper()
	start := time.Now()
	rep := &Report{Name: sys.Name, Met: map[string]Verb{}}
	defer func() { rep.Took = time.Since(start) }()
	steps := cmp.Or(o.Steps, 24)
	found := 0
	for logged := start; o.For == 0 && rep.Schedules < o.Schedules || o.For > 0 && time.Since(start) < o.For; rep.Schedules++ {
		seed := o.Seed + uint64(rep.Schedules)
		s := sys.Random(seed, steps)
		r := sys.Run(t, s)
		rep.Grants += r.Grants
		rep.Repeats += r.repeats
		maps.Copy(rep.Met, r.met)
		if r.Finding != "" && (o.Counts == nil || o.Counts(s)) {
			found++
			if rep.Found == nil {
				rep.First, rep.After = rep.Schedules+1, time.Since(start)
			}
			small := s.shrink(func(s Schedule) bool {
				smaller := sys.Run(t, s)
				fails := smaller.Finding == r.Finding && (o.Counts == nil || o.Counts(s)) // another finding would hide this one
				if fails {
					r = smaller
				}
				return fails
			})
			if rep.Found == nil || len(small) < len(rep.Schedule) {
				rep.Seed, rep.Schedule, rep.Found = seed, small, &r
			}
			if found >= o.Best {
				rep.Schedules++
				return rep
			}
		}
		if o.Log != nil && time.Since(logged) > 10*time.Second {
			logged = time.Now()
			rep.Took = time.Since(start)
			o.Log("%v", rep)
		}
	}
	return rep
}
