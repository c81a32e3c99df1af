package load

import (
	"context"
	"errors"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/fencelab/fencelab/dlock"
)

type arrival struct {
	key       uint64
	seq       uint64 // order of arrival, from 1
	at        time.Time
	contender int
}

type outcome struct {
	key, seq     uint64
	fence, grant uint64 // token, and number in the order of grants seen; grant 0: unserved
	contender    int
}

// recorder has one mutex, held three times per critical section, for a few hundred nanoseconds each.
type recorder struct {
	m *metrics

	mu         sync.Mutex
	first, end time.Time // of the window
	seq        uint64
	grants     uint64
	waiting    int64
	part       Sample
	partWait   histogram

	res                                           Result
	wait, unserved, failures, hold, release, late histogram
	outcomes                                      []outcome
	counts                                        []int64
}

func newRecorder(contenders int, m *metrics) *recorder {
	h := newHistogram
	return &recorder{
		m: m, counts: make([]int64, contenders), partWait: h(),
		wait: h(), unserved: h(), failures: h(), hold: h(), release: h(), late: h(),
	}
}

func (r *recorder) open() bool { return !r.first.IsZero() && r.end.IsZero() }

func (r *recorder) begin(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.first = now
	r.res.BacklogStart, r.res.MaxWaiting = r.waiting, r.waiting
}

// The last sample closes the window.
func (r *recorder) sample(now time.Time, last bool) Sample {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.part
	s.T, s.Waiting = now.Sub(r.first).Seconds(), r.waiting
	s.P50, s.P99 = r.partWait.quantile(50), r.partWait.quantile(99)
	r.res.Samples = append(r.res.Samples, s)
	r.part = Sample{}
	r.partWait.Reset()
	if last {
		r.end = now
	}
	return s
}

// arrive returns false when the run is over, or was when at came; ended tells which. An arrival due before the end and
// recorded after it is unserved: a load that stalls at the end must not look better for it.
func (r *recorder) arrive(at time.Time, key uint64) (a arrival, ok, ended bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	over := !r.end.IsZero()
	if over && (r.first.IsZero() || !at.Before(r.end)) {
		return a, false, true
	}
	r.seq++
	r.waiting++
	a = arrival{key: key, seq: r.seq, at: at}
	if !r.first.IsZero() {
		r.res.Arrivals++
		r.res.MaxWaiting = max(r.res.MaxWaiting, r.waiting)
	}
	if over {
		r.res.Unstarted++
		r.leave(a)
		return a, false, false
	}
	r.m.arrivals.Inc()
	r.m.waiting.Inc()
	return a, true, false
}

func (r *recorder) paced(late time.Duration) {
	r.m.late.Observe(late.Seconds())
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.open() {
		r.late.record(late)
	}
}

// served returns false if the wait ended after the window: then it is unserved.
func (r *recorder) served(a arrival) bool {
	r.m.waiting.Dec()
	if !r.end.IsZero() {
		r.leave(a)
		return false
	}
	r.waiting--
	return true
}

// leave records an acquisition that still waited at the end.
func (r *recorder) leave(a arrival) {
	if !r.first.IsZero() {
		r.unserved.record(r.end.Sub(a.at))
		r.outcomes = append(r.outcomes, outcome{key: a.key, seq: a.seq, contender: a.contender})
	}
}

func (r *recorder) granted(a arrival, now time.Time, fence uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.served(a) {
		return
	}
	r.grants++
	wait := now.Sub(a.at)
	r.m.sections.Inc()
	r.m.wait.Observe(wait.Seconds())
	if r.open() {
		r.res.Sections++
		r.part.Sections++
		r.wait.record(wait)
		r.partWait.record(wait)
		r.counts[a.contender]++
		r.outcomes = append(r.outcomes, outcome{a.key, a.seq, fence, r.grants, a.contender})
	}
}

func (r *recorder) failed(a arrival, err error) {
	waited := time.Since(a.at)
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.served(a) {
		return
	}
	r.count("acquire", err)
	if r.open() {
		r.res.Failed++
		r.part.Failed++
		r.failures.record(waited)
	}
}

func (r *recorder) unstarted(a arrival) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.res.Unstarted++
	r.served(a)
}

func (r *recorder) released(hold, release time.Duration, err error) {
	r.m.hold.Observe(hold.Seconds())
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil && r.end.IsZero() {
		r.count("release", err)
	}
	if r.open() {
		r.hold.record(hold)
		r.release.record(release)
	}
}

// Errors of the warm-up count too: they are the same problem.
func (r *recorder) count(op string, err error) {
	kind := op + ": " + errorKind(err)
	r.m.errors.WithLabelValues(kind).Inc()
	e, ok := r.res.Errors[kind]
	if !ok {
		e.Example = err.Error()
	}
	e.Count++
	if r.res.Errors == nil {
		r.res.Errors = map[string]Errors{}
	}
	r.res.Errors[kind] = e
}

func errorKind(err error) string {
	for _, k := range []struct {
		err  error
		name string
	}{
		{dlock.ErrLost, "lost"},
		{dlock.ErrRequestLost, "lost"},
		{dlock.ErrClosed, "closed"},
		{dlock.ErrInvalid, "invalid"},
		{context.DeadlineExceeded, "deadline"},
		{context.Canceled, "canceled"},
		{dlock.ErrHeld, "held"},
	} {
		if errors.Is(err, k.err) {
			return k.name
		}
	}
	if _, ok := errors.AsType[net.Error](err); ok {
		return "network"
	}
	return "other"
}

// result requires that the window is closed and all contenders have ended.
func (r *recorder) result() *Result {
	res := r.res
	res.Start, res.Seconds = r.first.UTC().Round(time.Millisecond), r.end.Sub(r.first).Seconds()
	res.SectionsPerS = float64(res.Sections) / res.Seconds
	res.Wait, res.Unserved, res.Hold = r.wait.latency(), r.unserved.latency(), r.hold.latency()
	res.Release, res.Pacer, res.FailedAfter = r.release.latency(), r.late.latency(), r.failures.latency()
	var overtaken []int64
	res.Order, overtaken = order(r.outcomes)
	res.Share = share(r.counts)
	for i, o := range r.outcomes { // order has sorted them
		if o.grant == 0 && r.counts[o.contender] == 0 && overtaken[i] >= max(1, int64(len(r.counts))/10) {
			res.Share.Starved++
		}
	}
	return &res
}

func share(counts []int64) Share {
	s := Share{Counts: counts, Min: slices.Min(counts), Max: slices.Max(counts)}
	var sum, squares float64
	for _, n := range counts {
		sum += float64(n)
		squares += float64(n) * float64(n)
		if n == 0 {
			s.Without++
		}
	}
	if squares > 0 {
		s.Jain = sum * sum / (float64(len(counts)) * squares)
	}
	return s
}

// holders checks exclusion, as far as this process can see.
type holders struct {
	mu     sync.Mutex
	keys   map[uint64]*holder
	checks Checks
}

type holder struct {
	lease  Lease
	fence  uint64 // the greatest of the key
	inside bool
}

// enter records a grant. Its holder hasn't begun to release it, so a sound lock's grants come here in order, unless a
// lease has ended in between.
func (h *holders) enter(key uint64, l Lease) *holder {
	h.mu.Lock()
	defer h.mu.Unlock()
	fence := l.Fence()
	if before := h.keys[key]; before != nil {
		switch {
		case !before.inside:
		case before.lease.Lost() || l.Lost():
			h.checks.Late++
		default:
			h.checks.Overlaps++
		}
		if fence > 0 && fence <= before.fence && !l.Lost() {
			h.checks.TokenRegressions++
		}
		fence = max(fence, before.fence)
	}
	in := &holder{l, fence, true}
	h.keys[key] = in
	return in
}

// leave is called before the release.
func (h *holders) leave(in *holder) {
	h.mu.Lock()
	defer h.mu.Unlock()
	in.inside, in.lease = false, nil
}
