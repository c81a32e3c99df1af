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

// arrival is an acquisition from its arrival on.
type arrival struct {
	key       uint64
	seq       uint64 // its number in the order of arrival, from 1
	at        time.Time
	contender int
}

// outcome is what became of an arrival, for the order.
type outcome struct {
	key, seq     uint64
	fence, grant uint64 // token and number in the order in which grants were seen; grant 0: unserved
	contender    int
}

// recorder counts. One mutex is enough for it: it is held for some hundred nanoseconds three times a section.
type recorder struct {
	m *metrics

	mu         sync.Mutex
	first, end time.Time // of the window
	seq        uint64
	grants     uint64
	waiting    int64
	part       Sample
	partWait   *histogram

	res                                           Result
	wait, unserved, failures, hold, release, late *histogram
	outcomes                                      []outcome
	counts                                        []int64
}

func newRecorder(contenders int, m *metrics) *recorder {
	r := &recorder{m: m, counts: make([]int64, contenders), partWait: newHistogram()}
	for _, h := range []**histogram{&r.wait, &r.unserved, &r.failures, &r.hold, &r.release, &r.late} {
		*h = newHistogram()
	}
	return r
}

// open reports whether the window is open.
func (r *recorder) open() bool { return !r.first.IsZero() && r.end.IsZero() }

// begun reports whether there has been a window.
func (r *recorder) begun() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return !r.first.IsZero()
}

// begin opens the window.
func (r *recorder) begin(now time.Time) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.first = now
	r.res.BacklogStart, r.res.MaxWaiting = r.waiting, r.waiting
}

// sample ends a part of the window, and with the last one the window.
func (r *recorder) sample(now time.Time, last bool) Sample {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.part
	s.T = now.Sub(r.first).Seconds()
	s.P50, s.P99 = r.partWait.quantile(50), r.partWait.quantile(99)
	s.Waiting = r.waiting
	r.res.Samples = append(r.res.Samples, s)
	r.part = Sample{}
	r.partWait.reset()
	if last {
		r.end = now
	}
	return s
}

// arrive numbers an acquisition. It returns false when the run is over. An arrival that was due before and is noted only
// then is unserved like any other: a load that stalls at the end must not look better for it.
func (r *recorder) arrive(at time.Time, key uint64) (arrival, bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.end.IsZero() {
		if at.Before(r.end) && !r.first.IsZero() {
			r.seq++
			r.waiting++
			r.res.Arrivals++
			r.res.Unstarted++
			r.res.MaxWaiting = max(r.res.MaxWaiting, r.waiting)
			r.unservedLocked(arrival{key: key, seq: r.seq, at: at})
		}
		return arrival{}, false
	}
	r.seq++
	r.waiting++
	if r.open() {
		r.res.Arrivals++
		r.res.MaxWaiting = max(r.res.MaxWaiting, r.waiting)
	}
	r.m.arrivals.Inc()
	r.m.waiting.Inc()
	return arrival{key: key, seq: r.seq, at: at}, true
}

// due reports whether an arrival at the time given belongs to the run, which is over.
func (r *recorder) due(at time.Time) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return at.Before(r.end)
}

// paced notes how late an arrival was.
func (r *recorder) paced(late time.Duration) {
	r.m.late.Observe(late.Seconds())
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.open() {
		r.late.record(late)
	}
}

func (r *recorder) granted(a arrival, now time.Time, fence uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.m.waiting.Dec()
	if !r.end.IsZero() {
		r.unservedLocked(a)
		return
	}
	r.waiting--
	r.grants++
	wait := now.Sub(a.at)
	r.m.sections.Inc()
	r.m.wait.Observe(wait.Seconds())
	if !r.open() {
		return
	}
	r.res.Sections++
	r.part.Sections++
	r.wait.record(wait)
	r.partWait.record(wait)
	r.counts[a.contender]++
	r.outcomes = append(r.outcomes, outcome{a.key, a.seq, fence, r.grants, a.contender})
}

func (r *recorder) failed(a arrival, err error) {
	waited := time.Since(a.at)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.m.waiting.Dec()
	if !r.end.IsZero() {
		r.unservedLocked(a)
		return
	}
	r.waiting--
	r.errorLocked("acquire", err)
	if r.open() {
		r.res.Failed++
		r.part.Failed++
		r.failures.record(waited)
	}
}

// unstarted notes an arrival that no contender has taken up.
func (r *recorder) unstarted(a arrival) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.m.waiting.Dec()
	r.res.Unstarted++
	r.unservedLocked(a)
}

func (r *recorder) unservedLocked(a arrival) {
	if r.first.IsZero() {
		return
	}
	r.unserved.record(r.end.Sub(a.at))
	r.outcomes = append(r.outcomes, outcome{key: a.key, seq: a.seq, contender: a.contender})
}

func (r *recorder) released(hold, release time.Duration, err error) {
	r.m.hold.Observe(hold.Seconds())
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.end.IsZero() {
		return
	}
	if err != nil {
		r.errorLocked("release", err)
	}
	if r.open() {
		r.hold.record(hold)
		r.release.record(release)
	}
}

// errorLocked counts an error; those of the warm-up too, for they are the same problem.
func (r *recorder) errorLocked(op string, err error) {
	kind := op + ": " + errorKind(err)
	r.m.errors.WithLabelValues(kind).Inc()
	if r.res.Errors == nil {
		r.res.Errors = map[string]Errors{}
	}
	e, ok := r.res.Errors[kind]
	if !ok {
		e.Example = err.Error()
	}
	e.Count++
	r.res.Errors[kind] = e
}

// errorKind is a word for err.
func errorKind(err error) string {
	for _, k := range []struct {
		err  error
		name string
	}{
		{dlock.ErrLost, "lost"},
		{dlock.ErrRequestLost, "lost"},
		{dlock.ErrHeld, "held"},
		{dlock.ErrClosed, "closed"},
		{dlock.ErrInvalid, "invalid"},
		{context.DeadlineExceeded, "deadline"},
		{context.Canceled, "canceled"},
	} {
		if errors.Is(err, k.err) {
			return k.name
		}
	}
	if ne, ok := errors.AsType[net.Error](err); ok {
		if ne.Timeout() {
			return "timeout"
		}
		return "network"
	}
	return "other"
}

// result is the result of a window that is over, and of a run whose contenders are gone.
func (r *recorder) result() *Result {
	r.mu.Lock()
	defer r.mu.Unlock()
	res := r.res
	res.Start, res.Seconds = r.first.UTC().Round(time.Millisecond), r.end.Sub(r.first).Seconds()
	res.SectionsPerS = float64(res.Sections) / res.Seconds
	res.Wait, res.Unserved, res.FailedAfter = r.wait.latency(), r.unserved.latency(), r.failures.latency()
	res.Hold, res.Release, res.Pacer = r.hold.latency(), r.release.latency(), r.late.latency()
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

// share is how counts are shared.
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

// holders looks at who holds what, as far as this process can see.
type holders struct {
	mu     sync.Mutex
	keys   map[uint64]*holder
	checks Checks
}

// holder is the latest holder of a key.
type holder struct {
	lease  Lease
	fence  uint64 // the greatest of the key
	inside bool
}

// enter notes a grant of key. Its holder hasn't begun to release it, so the grants of a sound lock come here in the order
// in which they were made, unless a lease has ended in between.
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
	if h.keys == nil {
		h.keys = map[uint64]*holder{}
	}
	in := &holder{l, fence, true}
	h.keys[key] = in
	return in
}

// leave notes that the holder has stopped to work.
func (h *holders) leave(in *holder) {
	h.mu.Lock()
	defer h.mu.Unlock()
	in.inside, in.lease = false, nil
}
