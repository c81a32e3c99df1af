// Package load offers load to a lock and measures waits, throughput, the order of grants and fairness.
//
// In the open model arrivals come at a given rate, and a wait counts from when the arrival was due: a stall shows in every
// acquisition that came during it (no "coordinated omission"). In the closed model contenders acquire, hold and release
// repeatedly, which shows a hot key's maximum throughput.
package load

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	rtmetrics "runtime/metrics"
	"slices"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/fencelab/fencelab/internal/jitter"
)

// Lock is a client of a lock service. Contenders call it concurrently.
type Lock struct {
	Acquire func(ctx context.Context, key string) (Lease, error)
	Close   func() error
}

// Lease is a grant.
type Lease struct {
	Fence   uint64      // the fencing token; 0: none
	Lost    func() bool // whether the holder was notified that its lease has ended; nil: not supported
	Release func(ctx context.Context) error
}

func (l Lease) lost() bool { return l.Lost != nil && l.Lost() }

// Options are optional settings of a run.
type Options struct {
	Registerer prometheus.Registerer
	OnSample   func(Sample)
}

const (
	releaseTimeout = 10 * time.Second
	errorPause     = 10 * time.Millisecond
	openAtOnce     = 32
)

// Check returns an error if c is invalid.
func (c *Config) Check() error {
	switch {
	case c.Contenders < 1:
		return fmt.Errorf("load: %d contenders; there must be one at least", c.Contenders)
	case c.Connections < 1 || c.Connections > c.Contenders:
		return fmt.Errorf("load: %d connections for %d contenders; there must be one at least, and no more than contenders", c.Connections, c.Contenders)
	case c.Keys < 1:
		return errors.New("load: no keys; 1 is a hot key")
	case !(c.Rate >= 0) || math.IsInf(c.Rate, 1): // also if NaN
		return fmt.Errorf("load: a rate of %v arrivals a second; it must be positive, or 0 for the closed model", c.Rate)
	case c.Processors < 0:
		return fmt.Errorf("load: %d processors; 0 is all that there are", c.Processors)
	case c.Work < 0 || c.Warmup < 0 || c.Delay < 0:
		return errors.New("load: work, warm-up and delay must not be negative")
	case min(c.Duration, c.TTL) < Duration(time.Millisecond):
		return fmt.Errorf("load: a duration of %v and a TTL of %v; they must be 1ms at least", c.Duration, c.TTL)
	}
	return nil
}

// Run offers the load of c to c.Connections locks from open. If ctx ends in the window, the result says that the run was cut
// short; before it, that is an error. Failed acquisitions are in the result. An error with a result is from after the run.
func Run(ctx context.Context, c Config, open func(ctx context.Context) (Lock, error), o Options) (res *Result, err error) {
	if err := c.Check(); err != nil {
		return nil, err
	}
	locks, err := openAll(ctx, c.Connections, open)
	defer func() { err = errors.Join(err, closeAll(locks)) }()
	if err != nil {
		return nil, err
	}

	r := &run{c: c, rec: newRecorder(c.Contenders, newMetrics(o.Registerer))}
	r.holders.keys = map[uint64]*holder{}
	loadCtx, stop := context.WithCancelCause(context.WithoutCancel(ctx))
	defer stop(nil)
	var all errgroup.Group
	for i := range c.Contenders {
		all.Go(func() error {
			r.contend(loadCtx, i, locks[i%len(locks)])
			return nil
		})
	}
	if c.Rate > 0 {
		all.Go(func() error { return r.pace(loadCtx) })
	}
	cut := r.watch(ctx, o.OnSample)
	stop(errOver)
	r.rec.stop()
	if err := all.Wait(); err != nil && !errors.Is(err, errOver) {
		return nil, err
	}
	if cut != nil && r.rec.first.IsZero() {
		return nil, fmt.Errorf("load: ended before the measurement began: %w", cut)
	}
	res = r.rec.result()
	res.Config, res.Cut, res.Checks = c, cut != nil, r.holders.checks
	res.Machine = Machine{
		OS: runtime.GOOS, Arch: runtime.GOARCH, Cores: runtime.NumCPU(), Used: runtime.GOMAXPROCS(0), Go: runtime.Version(), GC: gcPercent(),
	}
	if c.Rate > 0 {
		res.Share = Share{}
	}
	return res, nil
}

// gcPercent returns GOGC, or -1 if it is off.
func gcPercent() int {
	s := []rtmetrics.Sample{{Name: "/gc/gogc:percent"}}
	rtmetrics.Read(s)
	return int(int32(s[0].Value.Uint64())) // off is the greatest uint64
}

var errOver = errors.New("load: the run is over")

func openAll(ctx context.Context, n int, open func(ctx context.Context) (Lock, error)) ([]Lock, error) {
	locks := make([]Lock, n)
	all, ctx := errgroup.WithContext(ctx)
	all.SetLimit(openAtOnce)
	for i := range locks {
		all.Go(func() (err error) {
			if locks[i], err = open(ctx); err != nil {
				err = fmt.Errorf("load: client %d of %d: %w", i+1, n, err)
			}
			return err
		})
	}
	err := all.Wait()
	return slices.DeleteFunc(locks, func(l Lock) bool { return l.Close == nil }), err
}

func closeAll(locks []Lock) error {
	var all errgroup.Group
	all.SetLimit(openAtOnce)
	for _, l := range locks {
		all.Go(l.Close)
	}
	if err := all.Wait(); err != nil {
		return fmt.Errorf("load: close a client: %w", err)
	}
	return nil
}

type run struct {
	c       Config
	rec     *recorder
	holders holders
}

// watch opens the window, takes samples and closes it. It returns why ctx ended, if it ended first.
func (r *run) watch(ctx context.Context, onSample func(Sample)) error {
	if err := jitter.Sleep(ctx, r.c.Warmup.D()); err != nil {
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
		err := jitter.Sleep(ctx, time.Until(at))
		s := r.rec.sample(time.Now(), err != nil || at.Equal(end))
		if onSample != nil {
			onSample(s)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (r *run) contend(ctx context.Context, i int, l Lock) {
	take := r.rec.take
	if r.c.Rate == 0 {
		next := keys(r.c, uint64(i)+1)
		take = func() (arrival, bool) { return r.rec.call(next()) }
		// Staggered: an order of arrival that the scheduler decides says nothing about the lock.
		_ = jitter.Sleep(ctx, time.Duration(i)*(r.c.Warmup.D()/2)/time.Duration(r.c.Contenders)) // the loop checks ctx
	}
	for ctx.Err() == nil {
		a, ok := take()
		if !ok {
			return
		}
		a.contender = i
		if !r.hold(ctx, l, a) {
			_ = jitter.Sleep(ctx, errorPause)
		}
	}
}

func (r *run) hold(ctx context.Context, l Lock, a arrival) bool {
	lease, err := l.Acquire(ctx, r.c.Prefix+strconv.FormatUint(a.key, 10))
	granted := time.Now()
	if err != nil {
		r.rec.ended(a, granted, 0, err)
		return false
	}
	in := r.holders.enter(a.key, lease)
	r.rec.ended(a, granted, lease.Fence, nil)
	if r.c.Work > 0 {
		_ = jitter.Sleep(ctx, r.c.Work.D())
	}
	r.holders.leave(in)
	rctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	began := time.Now()
	err = lease.Release(rctx)
	r.rec.released(began.Sub(granted), time.Since(began), err)
	return true
}

// gap is a gap between arrivals, in means. Tests replace it.
var gap = (*rand.Rand).ExpFloat64

func (r *run) pace(ctx context.Context) (err error) {
	bell, err := newAlarm(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, bell.close()) }()
	next := keys(r.c, 0)
	gaps := rand.New(rand.NewPCG(r.c.Seed, 1<<63))
	begin, at := time.Now(), 0.0 // in seconds from begin: sums of rounded gaps would drift from the rate
	for {
		at += gap(gaps) / r.c.Rate
		due := begin.Add(time.Duration(at * float64(time.Second)))
		if wait := time.Until(due); wait > 0 {
			if err := bell.wait(wait); err != nil {
				return err
			}
		}
		if !r.rec.offer(due, next()) {
			return nil
		}
	}
}

func keys(c Config, stream uint64) func() uint64 {
	r := rand.New(rand.NewPCG(c.Seed, stream))
	return func() uint64 { return r.Uint64N(c.Keys) }
}
