package load

import (
	"context"
	"math/rand/v2"
	"time"
)

// UseTimers is for virtual time.
func UseTimers() { newAlarm = timerAlarm }

// Even makes arrivals evenly spaced until undo.
func Even() (undo func()) {
	poisson := gap
	gap = func(*rand.Rand) float64 { return 1 }
	return func() { gap = poisson }
}

// PreciseAlarm is not replaced in tests.
func PreciseAlarm(ctx context.Context) (wait func(time.Duration) error, done func() error, err error) {
	a, err := preciseAlarm(ctx)
	return a.wait, a.close, err
}

// Outcome is an acquisition for [Overtaken].
type Outcome struct{ Key, Seq, Fence, Grant uint64 }

// Overtaken sorts all as order does, and counts how often each was overtaken.
func Overtaken(all []Outcome) (Order, []Outcome, []int64) {
	in := make([]outcome, len(all))
	for i, x := range all {
		in[i] = outcome{key: x.Key, seq: x.Seq, fence: x.Fence, grant: x.Grant}
	}
	o, n := order(in)
	out := make([]Outcome, len(in))
	for i, x := range in {
		out[i] = Outcome{x.key, x.seq, x.fence, x.grant}
	}
	return o, out, n
}

// NoteLate has a window without events, and arrivals that are recorded after it.
func NoteLate(begin, end time.Time, due ...time.Time) *Result {
	r := newRecorder(1, newMetrics(nil))
	r.begin(begin)
	r.sample(end, true)
	for _, at := range due {
		r.arrive(at, 0)
	}
	return r.result()
}
