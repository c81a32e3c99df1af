package load

import (
	"maps"
	"math"
	"slices"
)

// Waits is the Kaplan-Meier estimate of waits, since only a lower bound is known for acquisitions that failed or still waited at
// the end. Without them a lock that starves some looks fast; counted as served they make every lock look too fast.
type Waits struct {
	Count int64  // granted, failed and still waiting
	Steps []Step // by Millis
}

// Step is a time at which a wait ended, or was last observed.
type Step struct {
	Millis float64
	Left   float64 // the share of acquisitions that wait longer
}

// Quantile is the wait that a share of acquisitions doesn't exceed.
type Quantile struct {
	Millis float64 // NaN: unknown
	Longer bool    // only a lower bound
}

// Estimate returns the waits of r.
func Estimate(r *Result) (Waits, error) {
	var w Waits
	served, ended := map[int64]int64{}, map[int64]int64{}
	for _, l := range []*Latency{&r.Wait, &r.Unserved, &r.FailedAfter} {
		h, err := l.histogram()
		if err != nil {
			return Waits{}, err
		}
		for _, bar := range h.Distribution() {
			if bar.Count > 0 {
				ended[bar.To] += bar.Count
				w.Count += bar.Count
				if l == &r.Wait {
					served[bar.To] += bar.Count
				}
			}
		}
	}
	waiting, left := w.Count, 1.0
	for _, t := range slices.Sorted(maps.Keys(ended)) {
		left *= 1 - float64(served[t])/float64(waiting)
		waiting -= ended[t]
		w.Steps = append(w.Steps, Step{float64(t) / 1e6, left})
	}
	return w, nil
}

// Quantile is the wait that the share q of acquisitions doesn't exceed. It is unknown unless at least one lies above it; but if a
// smaller quantile is only a lower bound, so is this one.
func (w Waits) Quantile(q float64) Quantile {
	finest := 1 - 1/float64(w.Count)
	x := w.at(min(q, finest))
	if q > finest+slack && !x.Longer {
		return Quantile{Millis: math.NaN()}
	}
	return x
}

// Max is the longest wait.
func (w Waits) Max() Quantile { return w.at(1) }

const slack = 1e-9 // for the rounding of products

func (w Waits) at(q float64) Quantile {
	for _, s := range w.Steps {
		if s.Left <= 1-q+slack {
			return Quantile{Millis: s.Millis}
		}
	}
	if w.Count == 0 {
		return Quantile{Millis: math.NaN()}
	}
	return Quantile{Millis: w.Steps[len(w.Steps)-1].Millis, Longer: true}
}
