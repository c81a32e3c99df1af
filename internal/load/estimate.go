package load

import (
	"math"
	"slices"
)

// Waits is how long acquisitions waited, as the Kaplan-Meier estimate has it. Of those that were still waiting at the end,
// or failed, it is known only that they waited for longer than they had by then. To leave them out makes a lock that starves
// some look fast, and to count them as served makes every lock look faster than it is.
type Waits struct {
	Count int64  // acquisitions: granted, failed and still waiting
	Steps []Step // by Millis
}

// Step is a time at which a wait ended, or was seen last.
type Step struct {
	Millis float64
	Left   float64 // the share of acquisitions that wait for longer
}

// Quantile is the wait that a share of acquisitions doesn't exceed.
type Quantile struct {
	Millis float64 // NaN: the run can't tell
	Longer bool    // it is longer than that, and for how much the run can't tell
}

// Estimate returns the waits of r. The failures of a result that hasn't FailedAfter are left out.
func Estimate(r *Result) (Waits, error) {
	var w Waits
	type step struct{ served, gone int64 }
	steps := map[int64]*step{}
	for _, l := range []struct {
		*Latency
		served bool
	}{{&r.Wait, true}, {&r.Unserved, false}, {&r.FailedAfter, false}} {
		h, err := l.histogram()
		if err != nil {
			return Waits{}, err
		}
		for _, bar := range h.Distribution() {
			if bar.Count == 0 {
				continue
			}
			s := steps[bar.To]
			if s == nil {
				s = &step{}
				steps[bar.To] = s
			}
			if l.served {
				s.served += bar.Count
			}
			s.gone += bar.Count
			w.Count += bar.Count
		}
	}
	times := make([]int64, 0, len(steps))
	for t := range steps {
		times = append(times, t)
	}
	slices.Sort(times)
	waiting, left := w.Count, 1.0
	for _, t := range times {
		s := steps[t]
		if s.served > 0 {
			left *= 1 - float64(s.served)/float64(waiting)
		}
		waiting -= s.gone
		w.Steps = append(w.Steps, Step{float64(t) / 1e6, left})
	}
	return w, nil
}

// Quantile is the wait that the share q of acquisitions doesn't exceed. Where there are too few for one of them to lie above
// it, what they have of it is their longest wait and no quantile, so they can't tell. But if a quantile that they can tell is
// known only to be longer than a time, so is every greater one.
func (w Waits) Quantile(q float64) Quantile {
	if w.Count == 0 {
		return Quantile{Millis: math.NaN()}
	}
	finest := 1 - 1/float64(w.Count) // one lies above it
	x := w.at(min(q, finest))
	if q > finest+slack && !x.Longer {
		return Quantile{Millis: math.NaN()}
	}
	return x
}

// Max is the longest wait of all.
func (w Waits) Max() Quantile {
	if w.Count == 0 {
		return Quantile{Millis: math.NaN()}
	}
	return w.at(1)
}

const slack = 1e-9 // for the rounding of products

func (w Waits) at(q float64) Quantile {
	for _, s := range w.Steps {
		if s.Left <= 1-q+slack {
			return Quantile{Millis: s.Millis}
		}
	}
	return Quantile{Millis: w.Steps[len(w.Steps)-1].Millis, Longer: true}
}
