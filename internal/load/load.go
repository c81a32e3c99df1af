// Package load offers load to a lock and measures what becomes of it: how long acquisitions wait, how many sections a
// second get done, in which order, and who gets them.
//
// In the open model arrivals come at a rate, whatever the lock does, as the requests of a service's users do. A wait
// counts from the moment at which the arrival was due. So a stall of the lock shows in every acquisition that came in its
// course, and not only in the few that a waiting load generator would have sent (G. Tene's "coordinated omission"). In the
// closed model a number of contenders acquire, work and release over and over, which finds a hot key's ceiling.
package load

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	rtmetrics "runtime/metrics"
	"strconv"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/fencelab/fencelab/dlock"
)

// Lock is a client of a lock service. Contenders that share it call it at the same time.
type Lock interface {
	// Acquire waits until key is granted or ctx ends.
	Acquire(ctx context.Context, key string) (Lease, error)
	Close() error
}

// Lease is a grant.
type Lease interface {
	Fence() uint64 // the fencing token; 0: the lock has none
	Lost() bool    // whether the holder has been told that its lease has ended; false if it can't be
	Release(ctx context.Context) error
}

// FromLocker returns a Lock on l, which is the Lock's from now on and closed with it.
func FromLocker(l *dlock.Locker) Lock { return locker{l} }

type locker struct{ *dlock.Locker }

func (l locker) Acquire(ctx context.Context, key string) (Lease, error) {
	h, err := l.Locker.Acquire(ctx, key)
	if err != nil {
		return nil, err
	}
	return handle{h}, nil
}

type handle struct{ *dlock.Handle }

func (h handle) Lost() bool { return h.Context().Err() != nil }

// Options are the optional parts of a run.
type Options struct {
	// Registerer gets metrics of the load, with native histograms, which can be added over many processes.
	Registerer prometheus.Registerer
	// Ready is called once all clients are there, before the load; its error ends the run.
	Ready func(ctx context.Context) error
	// OnSample is called with each part of the window when it is over.
	OnSample func(Sample)
	// Server and Library are for [Machine].
	Server, Library string
	// Unlocked says that the clients lock nothing: who holds what isn't looked at.
	Unlocked bool
}

const (
	releaseTimeout = 10 * time.Second
	errorPause     = 10 * time.Millisecond // of a contender whose acquisition failed, so that a dead server isn't asked in a hot loop
	openAtOnce     = 32
)

// Check returns an error that says what is wrong with c.
func (c *Config) Check() error {
	switch {
	case c.Contenders < 1:
		return fmt.Errorf("load: %d contenders; there must be one at least", c.Contenders)
	case c.Connections < 1 || c.Connections > c.Contenders:
		return fmt.Errorf("load: %d connections for %d contenders; there must be one at least, and no more than contenders", c.Connections, c.Contenders)
	case c.Keys < 1:
		return errors.New("load: no keys; 1 is a hot key")
	case c.Zipf != 0 && c.Zipf <= 1 || !finite(c.Zipf):
		return fmt.Errorf("load: a zipf exponent of %v; it must be more than 1, or 0 for keys that are equally popular", c.Zipf)
	case c.Rate < 0 || !finite(c.Rate):
		return fmt.Errorf("load: a rate of %v arrivals a second; it must be positive, or 0 for the closed model", c.Rate)
	case c.Processors < 0:
		return fmt.Errorf("load: %d processors; 0 is all that there are", c.Processors)
	case c.Work < 0 || c.Warmup < 0 || c.Delay < 0:
		return errors.New("load: work, warm-up and delay must not be negative")
	case c.Duration < Duration(time.Millisecond):
		return fmt.Errorf("load: a duration of %v; it must be 1ms at least", c.Duration)
	case c.TTL < Duration(time.Millisecond):
		return fmt.Errorf("load: a TTL of %v; it must be 1ms at least", c.TTL)
	}
	return nil
}

func finite(x float64) bool { return !math.IsNaN(x) && !math.IsInf(x, 0) }

// Run offers the load of c to locks that open opens: c.Connections of them. When ctx ends the run is cut short, and the
// result tells so; before the window has begun that is an error. Failed acquisitions are no errors of Run: they are in
// the result. An error beside a result is of what came after the run, such as a client that could not be closed.
func Run(ctx context.Context, c Config, open func(ctx context.Context) (Lock, error), o *Options) (res *Result, err error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	if o == nil {
		o = &Options{}
	}
	m, err := newMetrics(o.Registerer)
	if err != nil {
		return nil, err
	}
	locks, err := openAll(ctx, c.Connections, open)
	defer func() { err = errors.Join(err, closeAll(locks)) }()
	if err != nil {
		return nil, err
	}
	if o.Ready != nil {
		if err := o.Ready(ctx); err != nil {
			return nil, err
		}
	}

	r := &run{c: c, rec: newRecorder(c.Contenders, m), backlog: newBacklog(), unlocked: o.Unlocked}
	loadCtx, stop := context.WithCancelCause(context.WithoutCancel(ctx)) // ends with the window, and no sooner
	defer stop(nil)
	bell, err := newAlarm(loadCtx)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, bell.close(), r.works.close()) }()
	var all sync.WaitGroup
	for i := range c.Contenders {
		all.Go(func() { r.contend(loadCtx, i, locks[i%len(locks)]) })
	}
	var paceErr error
	if c.Rate > 0 {
		all.Go(func() { paceErr = r.pace(loadCtx, bell) })
	}
	cut := r.watch(ctx, o.OnSample)
	stop(errOver)
	r.backlog.close()
	all.Wait()
	if paceErr != nil && !errors.Is(paceErr, errOver) {
		return nil, paceErr
	}
	if cut != nil && !r.rec.begun() {
		return nil, fmt.Errorf("load: ended before the measurement began: %w", cut)
	}
	for _, a := range r.backlog.rest() {
		r.rec.unstarted(a)
	}
	res = r.rec.result()
	res.Config, res.Cut, res.Checks = c, cut != nil, r.holders.checks
	res.Config.Processes = max(c.Processes, 1)
	res.Parts = []Part{{ID: uuid.NewString(), Seed: c.Seed}}
	res.Machine = Machine{
		OS: runtime.GOOS, Arch: runtime.GOARCH, Cores: runtime.NumCPU(), Used: runtime.GOMAXPROCS(0), Go: runtime.Version(), GC: gcPercent(),
		Server: o.Server, Library: o.Library,
	}
	if c.Rate > 0 {
		res.Share = Share{}
	}
	return res, nil
}

// gcPercent is GOGC as it is now; -1: off.
func gcPercent() int {
	s := []rtmetrics.Sample{{Name: "/gc/gogc:percent"}}
	rtmetrics.Read(s)
	if v := s[0].Value.Uint64(); v <= math.MaxInt32 {
		return int(v)
	}
	return -1
}

var errOver = errors.New("load: the run is over")

func openAll(ctx context.Context, n int, open func(ctx context.Context) (Lock, error)) (locks []Lock, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var mu sync.Mutex
	var all sync.WaitGroup
	slots := make(chan struct{}, openAtOnce)
	for range n {
		slots <- struct{}{}
		all.Go(func() {
			defer func() { <-slots }()
			if ctx.Err() != nil {
				return
			}
			l, oerr := open(ctx)
			mu.Lock()
			defer mu.Unlock()
			switch {
			case oerr == nil:
				locks = append(locks, l)
			case err == nil: // the others' errors are its consequence, or the same
				err = fmt.Errorf("load: client %d of %d: %w", len(locks)+1, n, oerr)
				cancel()
			}
		})
	}
	all.Wait()
	if err == nil && len(locks) < n {
		err = context.Cause(ctx)
	}
	return locks, err
}

func closeAll(locks []Lock) error {
	errs := make([]error, len(locks))
	slots := make(chan struct{}, openAtOnce)
	var all sync.WaitGroup
	for i, l := range locks {
		slots <- struct{}{}
		all.Go(func() {
			defer func() { <-slots }()
			errs[i] = l.Close()
		})
	}
	all.Wait()
	for _, err := range errs {
		if err != nil {
			return fmt.Errorf("load: close a client: %w", err) // one stands for all
		}
	}
	return nil
}

// run is a run under way.
type run struct {
	c       Config
	rec     *recorder
	backlog *backlog
	works   alarms
	holders holders

	unlocked bool
}

// watch waits for the end of the warm-up, opens the window, takes the samples and closes the window. It returns why ctx
// ended, if it ended first.
func (r *run) watch(ctx context.Context, onSample func(Sample)) error {
	if err := sleep(ctx, r.c.Warmup.D()); err != nil {
		return err
	}
	every := time.Second
	if r.c.Duration.D() <= 10*time.Second {
		every = 100 * time.Millisecond
	}
	begin := time.Now()
	r.rec.begin(begin)
	end := begin.Add(r.c.Duration.D())
	for at := begin; at.Before(end); {
		if at = at.Add(every); at.After(end) {
			at = end
		}
		err := sleep(ctx, time.Until(at))
		last := err != nil || at.Equal(end)
		s := r.rec.sample(time.Now(), last)
		if onSample != nil {
			onSample(s)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// contend is a contender's life.
func (r *run) contend(ctx context.Context, i int, l Lock) {
	keys := newKeys(r.c, uint64(i)+1)
	if r.c.Rate == 0 && r.c.Contenders > 1 {
		// They don't all come at once: an order of arrival that the scheduler decides says nothing about the lock.
		if sleep(ctx, time.Duration(i)*(r.c.Warmup.D()/2)/time.Duration(r.c.Contenders)) != nil {
			return
		}
	}
	for ctx.Err() == nil {
		var a arrival
		var ok bool
		if r.c.Rate > 0 {
			a, ok = r.backlog.take()
		} else {
			a, ok = r.rec.arrive(time.Now(), keys.next())
		}
		if !ok {
			return
		}
		a.contender = i
		if !r.section(ctx, l, a) {
			_ = sleep(ctx, errorPause) // the loop looks at ctx
		}
	}
}

// section serves an arrival, and reports whether the lock was granted.
func (r *run) section(ctx context.Context, l Lock, a arrival) bool {
	lease, err := l.Acquire(ctx, keyName(r.c.Prefix, a.key))
	granted := time.Now()
	if err != nil {
		r.rec.failed(a, err)
		return false
	}
	var in *holder
	if !r.unlocked {
		in = r.holders.enter(a.key, lease)
	}
	r.rec.granted(a, granted, lease.Fence())
	if r.c.Work > 0 {
		_ = r.works.wait(ctx, r.c.Work.D()) // at the end of the run work is cut short
	}
	if !r.unlocked {
		r.holders.leave(in)
	}
	rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	began := time.Now()
	err = lease.Release(rctx)
	r.rec.released(began.Sub(granted), time.Since(began), err)
	return true
}

// pace offers arrivals until the run is over, each at its time or, if the machine has let it sleep too long, as soon as it
// wakes up.
func (r *run) pace(ctx context.Context, bell alarm) error {
	keys := newKeys(r.c, 0)
	gaps := rand.New(rand.NewPCG(r.c.Seed, 1<<63))
	mean := float64(time.Second) / r.c.Rate
	begin, at := time.Now(), 0.0 // nanoseconds from begin: sums of rounded gaps would drift from the rate
	for {
		if r.c.Even {
			at += mean
		} else {
			at += gaps.ExpFloat64() * mean
		}
		due := begin.Add(time.Duration(at))
		if wait := time.Until(due); wait > 0 {
			if err := bell.wait(ctx, wait); err != nil {
				return err
			}
		}
		a, ok := r.rec.arrive(due, keys.next())
		if !ok && r.rec.due(due) {
			continue // until all that were due have been counted
		}
		if !ok {
			return nil
		}
		r.rec.paced(time.Since(due))
		r.backlog.put(a)
	}
}

// sleep waits for d, or returns why ctx ended.
func sleep(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return context.Cause(ctx)
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// keyChooser chooses keys.
type keyChooser struct {
	next func() uint64
}

func newKeys(c Config, stream uint64) keyChooser {
	r := rand.New(rand.NewPCG(c.Seed, stream))
	switch {
	case c.Keys <= 1:
		return keyChooser{func() uint64 { return 0 }}
	case c.Zipf > 0:
		return keyChooser{rand.NewZipf(r, c.Zipf, 1, c.Keys-1).Uint64}
	}
	return keyChooser{func() uint64 { return r.Uint64N(c.Keys) }}
}

func keyName(prefix string, key uint64) string { return prefix + strconv.FormatUint(key, 10) }

// backlog is the arrivals that no contender has taken up yet, first come, first served. It has no bound: an arrival that
// is dropped because nobody was free would be missing from the waits.
type backlog struct {
	mu     sync.Mutex
	some   *sync.Cond
	queue  []arrival
	head   int
	closed bool
}

func newBacklog() *backlog {
	b := &backlog{}
	b.some = sync.NewCond(&b.mu)
	return b
}

func (b *backlog) put(a arrival) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.queue = append(b.queue, a)
	b.some.Signal()
}

// take waits for an arrival; false once the backlog is closed.
func (b *backlog) take() (arrival, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.head == len(b.queue) && !b.closed {
		b.some.Wait()
	}
	if b.closed {
		return arrival{}, false
	}
	a := b.queue[b.head]
	b.head++
	switch {
	case b.head == len(b.queue):
		b.queue, b.head = b.queue[:0], 0
	case b.head >= 1024 && b.head > len(b.queue)/2:
		b.queue, b.head = append(b.queue[:0], b.queue[b.head:]...), 0
	}
	return a, true
}

func (b *backlog) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	b.some.Broadcast()
}

// rest is what was never taken.
func (b *backlog) rest() []arrival {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.queue[b.head:]
}
