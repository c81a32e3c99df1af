package load

import (
	"context"
	"time"
)

// UseTimers has pacers wait with the runtime's timers, which virtual time is for.
func UseTimers() { newAlarm = func(context.Context) (alarm, error) { return timers{}, nil } }

// PreciseAlarm returns the methods of the alarm that pacers have outside of tests.
func PreciseAlarm(ctx context.Context) (wait func(context.Context, time.Duration) error, done func() error, err error) {
	a, err := preciseAlarm(ctx)
	if err != nil {
		return nil, nil, err
	}
	return a.wait, a.close, nil
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
func NoteLate(begin, end time.Time, due ...time.Time) (*Result, error) {
	m, err := newMetrics(nil)
	if err != nil {
		return nil, err
	}
	r := newRecorder(1, m)
	r.begin(begin)
	r.sample(end, true)
	for _, at := range due {
		r.arrive(at, 0)
	}
	return r.result(), nil
}

// Alarms are alarms that can be counted.
type Alarms struct{ a alarms }

func (a *Alarms) Wait(ctx context.Context, d time.Duration) error { return a.a.wait(ctx, d) }

func (a *Alarms) Close() error { return a.a.close() }

// Count is how many there are, and how many of them nobody waits for.
func (a *Alarms) Count() (all, idle int) {
	a.a.mu.Lock()
	defer a.a.mu.Unlock()
	return len(a.a.all), len(a.a.idle)
}
