package load

import (
	"cmp"
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

// Kinds of measured times. The first three are ends of a wait.
const (
	served = iota
	failed
	unserved // at the end
	hold
	release
	late // of the pacer
	part // served, since the last sample
	kinds
)

// recorder has one mutex, held three times per critical section, for a few hundred nanoseconds each.
type recorder struct {
	m *metrics

	mu         sync.Mutex
	first, end time.Time // of the window
	seq        uint64
	grants     uint64
	waiting    int64
	res        Result
	times      [kinds]histogram
	outcomes   []outcome
	counts     []int64

	// Arrivals of the open model that no contender has taken. Dropping some would hide their waits.
	queue []arrival
	some  sync.Cond
	over  bool
}

func newRecorder(contenders int, m *metrics) *recorder {
	r := &recorder{m: m, counts: make([]int64, contenders)}
	r.some.L = &r.mu
	for i := range r.times {
		r.times[i] = newHistogram()
	}
	return r
}

func (r *recorder) open() bool { return !r.first.IsZero() && r.end.IsZero() }

func (r *recorder) record(kind int, d time.Duration) {
	if r.open() {
		r.times[kind].record(d)
	}
}

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
	waits := r.times[part]
	s := Sample{
		T: now.Sub(r.first).Seconds(), Sections: waits.TotalCount(), Failed: r.times[failed].TotalCount() - r.res.Failed,
		P50: waits.quantile(50), P99: waits.quantile(99), Waiting: r.waiting,
	}
	r.res.Failed += s.Failed
	r.res.Samples = append(r.res.Samples, s)
	waits.Reset()
	if last {
		r.end = now
	}
	return s
}

// arrive requires the mutex.
func (r *recorder) arrive(at time.Time, key uint64) arrival {
	r.m.arrivals.Inc()
	r.m.waiting.Inc()
	r.seq++
	r.waiting++
	if !r.first.IsZero() {
		r.res.Arrivals++
		r.res.MaxWaiting = max(r.res.MaxWaiting, r.waiting)
	}
	return arrival{key: key, seq: r.seq, at: at}
}

// call is an arrival of the closed model. It returns false after the window.
func (r *recorder) call(key uint64) (a arrival, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.end.IsZero() {
		return a, false
	}
	return r.arrive(time.Now(), key), true
}

// offer queues an arrival of the open model. It returns false when no more are due in the window. One that was due in it but is
// late counts as unserved: a load that stalls must not look better for it.
func (r *recorder) offer(due time.Time, key uint64) (more bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.end.IsZero() && !due.Before(r.end) {
		return false
	}
	behind := time.Since(due)
	r.m.late.Observe(behind.Seconds())
	r.record(late, behind)
	r.queue = append(r.queue, r.arrive(due, key))
	r.some.Signal()
	return true
}

// take waits for an arrival. It returns false once the run is over.
func (r *recorder) take() (a arrival, ok bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for len(r.queue) == 0 && !r.over {
		r.some.Wait()
	}
	if r.over {
		return a, false
	}
	a, r.queue = r.queue[0], r.queue[1:]
	return a, true
}

func (r *recorder) stop() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.over = true
	r.some.Broadcast()
}

func (r *recorder) leave(a arrival) {
	r.times[unserved].record(r.end.Sub(a.at))
	r.outcomes = append(r.outcomes, outcome{key: a.key, seq: a.seq, contender: a.contender})
}

// ended records a grant or an error. After the window it is unserved.
func (r *recorder) ended(a arrival, now time.Time, fence uint64, err error) {
	wait := now.Sub(a.at)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.m.waiting.Dec()
	if !r.end.IsZero() {
		r.leave(a)
		return
	}
	r.waiting--
	if err != nil {
		r.count("acquire", err)
		r.record(failed, wait)
		return
	}
	r.grants++
	r.m.sections.Inc()
	r.m.wait.Observe(wait.Seconds())
	r.record(served, wait)
	r.record(part, wait)
	if r.open() {
		r.counts[a.contender]++
		r.outcomes = append(r.outcomes, outcome{a.key, a.seq, fence, r.grants, a.contender})
	}
}

func (r *recorder) released(held, took time.Duration, err error) {
	r.m.hold.Observe(held.Seconds())
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil && r.end.IsZero() {
		r.count("release", err)
	}
	r.record(hold, held)
	r.record(release, took)
}

func (r *recorder) count(op string, err error) {
	kind := op + ": " + errorKind(err)
	r.m.errors.WithLabelValues(kind).Inc()
	if r.res.Errors == nil {
		r.res.Errors = map[string]Errors{}
	}
	e := r.res.Errors[kind]
	r.res.Errors[kind] = Errors{e.Count + 1, cmp.Or(e.Example, err.Error())}
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
	for _, a := range r.queue {
		r.res.Unstarted++
		r.ended(a, r.end, 0, nil)
	}
	res := r.res
	res.Start, res.Seconds = r.first.UTC().Round(time.Millisecond), r.end.Sub(r.first).Seconds()
	res.Sections, res.Failed = r.times[served].TotalCount(), r.times[failed].TotalCount()
	res.SectionsPerS = float64(res.Sections) / res.Seconds
	for i, l := range []*Latency{&res.Wait, &res.FailedAfter, &res.Unserved, &res.Hold, &res.Release, &res.Pacer} {
		*l = r.times[i].latency()
	}
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

// enter records a grant, before its holder begins to release it. So a sound lock's grants come in order, unless a lease has
// ended.
func (h *holders) enter(key uint64, l Lease) *holder {
	h.mu.Lock()
	defer h.mu.Unlock()
	fence := l.Fence
	if before := h.keys[key]; before != nil {
		switch {
		case !before.inside:
		case before.lease.lost() || l.lost():
			h.checks.Late++
		default:
			h.checks.Overlaps++
		}
		if fence > 0 && fence <= before.fence && !l.lost() {
			h.checks.TokenRegressions++
		}
		fence = max(fence, before.fence)
	}
	in := &holder{l, fence, true}
	h.keys[key] = in
	return in
}

func (h *holders) leave(in *holder) {
	h.mu.Lock()
	defer h.mu.Unlock()
	in.inside, in.lease = false, Lease{}
}
