package load

import (
	"context"
	"math/rand/v2"
	"time"
)

// UseTimers has everything wait with the runtime's timers, which virtual time is for.
func UseTimers() { newAlarm = timerAlarm }

// Even has arrivals come at equal times until the function that it returns is called.
func Even() (undo func()) {
	poisson := gap
	gap = func(*rand.Rand) float64 { return 1 }
	return func() { gap = poisson }
}

// PreciseAlarm returns the methods of the alarm that there is outside of tests.
func PreciseAlarm(ctx context.Context) (wait func(time.Duration) error, done func() error, err error) {
	a, err := preciseAlarm(ctx)
	return a.wait, a.close, err
}

// Outcome is an acquisition for [Overtaken].
type Outcome struct{ Key, Seq, Fence, Grant uint64 }

// Overtaken sorts all by key and order of grants, and tells of each how often it was overtaken.
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

// NoteLate is the result of a window in which nothing happens, from begin to end, when arrivals are noted after it.
func NoteLate(begin, end time.Time, due ...time.Time) *Result {
	r := newRecorder(1, newMetrics(nil))
	r.begin(begin)
	r.sample(end, true)
	for _, at := range due {
		r.arrive(at, 0)
	}
	return r.result()
}
