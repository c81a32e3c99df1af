package scenarios

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/internal/jitter"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

const (
	// DefaultTTL is the default of Runner.TTL.
	DefaultTTL = 250 * time.Millisecond
	// DefaultStepTimeout is the default of Runner.StepTimeout.
	DefaultStepTimeout = 30 * time.Second
	longTTL            = 10 * time.Minute // of other workers: longer than any run
	longHold           = time.Hour
)

// Runner runs scenarios.
type Runner struct {
	// Service is under test. Required.
	Service *Service
	// Store is what workers write to. Nil: a [resource.Memory] behind HTTP, to which ResourceCrash doesn't apply.
	Store *Store
	// TTL is that of the victim's lease. 0: DefaultTTL.
	TTL time.Duration
	// Pause is the minimum time between a fault and its undo.
	Pause time.Duration
	// StepTimeout bounds a step, beyond TTL and Pause. 0: DefaultStepTimeout.
	StepTimeout time.Duration
	// Command, if not nil, returns a command line that repeats the run.
	Command func(s Scenario, f history.Fencing) string
	// OnEvent, if not nil, is called with each event.
	OnEvent func(e history.Event)
}

// Outcome is a run's history and the judge's result.
type Outcome struct {
	Events []history.Event
	history.Result
}

// Run runs s. An error means that the schedule was not completed; the outcome then holds the history so far and is never safe. No
// process is left running.
func (r *Runner) Run(ctx context.Context, s Scenario, f history.Fencing) (*Outcome, error) {
	r = new(*r)
	r.Store = cmp.Or(r.Store, memory)
	ttl := max(cmp.Or(r.TTL, DefaultTTL), time.Duration(s.MinTTL))
	if err := r.check(&s, f, ttl); err != nil {
		return &Outcome{}, err
	}
	key := s.Name + "/" + string(f) + "/" + uuid.NewString()
	run := &run{
		Runner: r, s: &s, fencing: f, ttl: ttl, timeout: cmp.Or(r.StepTimeout, DefaultStepTimeout) + ttl + r.Pause,
		keys: []string{key}, workers: map[string]*worker{}, active: map[string]activeFault{},
	}
	for _, w := range s.Workers {
		if w.Second {
			run.keys = []string{key, key + "/second"}
		}
	}
	err := run.executeAndCleanUp(ctx)
	o := &Outcome{run.events, history.Judge(run.events)}
	if err != nil {
		err = fmt.Errorf("scenarios: %s, fencing %s: %w", s.Name, f, err)
		if o.Verdict == history.Safe {
			o.Verdict, o.Findings = history.Inconclusive, []string{err.Error()}
		}
	}
	return o, err
}

func (r *Runner) check(s *Scenario, f history.Fencing, ttl time.Duration) error {
	switch {
	case !IsChildReady(): // it would start itself again, perhaps for ever
		return errors.New("scenarios: workers and the resource are this binary, started again: call scenarios.Child or " +
			"ChildWithStore first in main or TestMain")
	case !slices.Contains(modes, f):
		return fmt.Errorf("scenarios: unknown fencing mode %q; the modes are %v", f, modes)
	case r.Service == nil:
		return errors.New("scenarios: Runner.Service is nil; set it to the lock service under test")
	case r.Pause != 0 && r.Pause <= ttl:
		return fmt.Errorf("scenarios: a pause of %v doesn't exceed the TTL of %v; make it longer, or the TTL shorter", r.Pause, ttl)
	}
	if err := s.Check(); err != nil {
		return err
	}
	if err := r.Service.check(s, f); err != nil {
		return err
	}
	return r.Store.check(s)
}

const forgetTimeout = 5 * time.Second

// executeAndCleanUp cleans up even if a signal ends the process.
func (r *run) executeAndCleanUp(ctx context.Context) error {
	ctx, cleaned := interruptible(ctx)
	defer cleaned()
	err := r.execute(ctx)
	if r.Service.Forget != nil {
		forget, cancel := context.WithTimeout(context.WithoutCancel(ctx), forgetTimeout)
		defer cancel()
		err = errors.Join(err, r.Service.Forget(forget, r.keys[0]))
	}
	return err
}

type run struct {
	*Runner
	s       *Scenario
	fencing history.Fencing
	ttl     time.Duration
	timeout time.Duration
	keys    []string // the ledgers; the first is the lock's too

	dir      string
	resource target
	workers  map[string]*worker
	active   map[string]activeFault // by undo: "resume A"
	events   []history.Event
}

type activeFault struct {
	since time.Time
	heals heals // none for a server, whose Service undoes faults
}

func (r *run) execute(ctx context.Context) (err error) {
	r.dir, err = testbed.MkdirTemp("scenario")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.close(ctx)) }()
	decided := func(d history.Event) {
		d.Actor = Resource
		r.append(d)
	}
	if r.Store.served() {
		r.resource = &httpResource{Store: r.Store, fencing: r.fencing, dir: r.dir, record: decided}
	} else {
		r.resource = newStoreTarget(r.Store, r.fencing, decided)
	}
	about := history.Run{
		Scenario: r.s.Name, Hazard: r.s.Hazard, Fencing: r.fencing, Lock: r.Service.Lock, Server: r.Service.Server,
		Store: r.resource.name(), TTL: history.Duration(r.ttl), Pause: history.Duration(r.Pause), Workers: r.s.workers(),
		TokensLost: r.s.TokensLost,
	}
	if len(r.keys) > 1 {
		about.Keys = r.keys
	}
	if r.Command != nil {
		about.Command = r.Command(*r.s, r.fencing)
	}
	r.add(history.Event{Kind: history.KindRun, Run: &about})
	if err := r.within(ctx, "the resource was not ready", func(ctx context.Context) error { return r.resource.begin(ctx, r.keys) }); err != nil {
		return err
	}
	for i, st := range r.s.Steps {
		if err := r.within(ctx, "the step did not finish", func(ctx context.Context) error { return r.do(ctx, st) }); err != nil {
			return fmt.Errorf("step %d, %s: %w", i+1, st, err)
		}
	}
	return r.within(ctx, "the resource did not exit", r.finish)
}

func (r *run) within(ctx context.Context, what string, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, r.timeout, fmt.Errorf("%s within %v", what, r.timeout))
	defer cancel()
	return f(ctx)
}

func (r *run) do(ctx context.Context, st Step) error {
	switch {
	case st.Verb == verbRun:
		return r.resource.watch(ctx, func(ctx context.Context) error { return r.runUntil(ctx, st.Target, st.Until) })
	case undone(st.Verb) != nil:
		return r.undo(ctx, st)
	}
	heal, err := r.inject(ctx, st)
	if err != nil {
		return err
	}
	undo := fault(st.Verb).Undo + " " + st.Target
	b := activeFault{time.Now(), r.active[undo].heals}
	if heal != nil {
		b.heals = append(b.heals, heal)
	}
	r.active[undo] = b
	r.recordStep(st)
	return nil
}

func (r *run) inject(ctx context.Context, st Step) (faults.Heal, error) {
	inject := injections[st.Verb]
	switch r.s.kind(st.Target) {
	case ofResource:
		return inject.resource(ctx, r.resource)
	case ofServer:
		return nil, r.Service.fault(ctx, st)
	case ofWorker:
	}
	w, err := r.worker(st.Target)
	switch {
	case err != nil:
		return nil, err
	case inject.process != nil:
		return inject.process(ctx, w)
	}
	return inject.links(ctx, w, st)
}

// undo records the undo first, so that the target's next events come after.
func (r *run) undo(ctx context.Context, st Step) error {
	b := r.active[st.Verb+" "+st.Target]
	if err := jitter.Sleep(ctx, time.Until(b.since.Add(r.Pause))); err != nil {
		return err
	}
	r.recordStep(st)
	var err error
	if r.s.kind(st.Target) == ofServer {
		err = r.Service.fault(ctx, st)
	} else {
		err = b.heals.heal(ctx)
	}
	if err == nil {
		delete(r.active, st.Verb+" "+st.Target)
	}
	return err
}

// recordStep records st, after the resource's decisions so far.
func (r *run) recordStep(st Step) {
	r.add(history.Event{Kind: history.KindFault, Name: st.Verb, Target: st.Target, Peers: st.From, Detail: st.Detail})
}

func (r *run) runUntil(ctx context.Context, name, until string) error {
	w, err := r.worker(name)
	if err != nil {
		return err
	}
	if w.process == nil {
		if err := r.start(name, w); err != nil {
			return err
		}
	}
	for {
		if w.stopped {
			if err := w.sendLine(ctx, "go on"); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
		m, err := w.next(ctx)
		switch {
		case err != nil && ctx.Err() != nil && until == history.Lost && w.toLock != nil:
			return fmt.Errorf("%s: %w; it is cut off, but its lease doesn't end: does Open connect to LockSpec.Addrs, and does the lease end "+
				"when it can't be renewed?", name, err)
		case err != nil:
			return fmt.Errorf("%s: %w", name, err)
		case m.Event == nil:
			return fmt.Errorf("%s sent a message without an event", name)
		}
		m.Event.Actor = name
		w.stopped = m.Stops
		if err := r.resource.sync(ctx, m.Event); err != nil { // its earlier decisions come first
			return err
		}
		r.append(*m.Event)
		ended := m.Event.Name == history.Done || m.Event.Name == history.Failed
		switch {
		case ended && m.Event.Name == until:
			if err := w.exit(ctx); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			return nil
		case ended && m.Event.Name == history.Failed:
			return fmt.Errorf("%s failed: %s", name, m.Event.Error)
		case ended:
			return fmt.Errorf("%s was done without reporting %q", name, until)
		case m.Event.Name == until && until == history.Sent:
			return w.awaitHeldWrite(ctx, name)
		case m.Event.Name == until:
			return nil
		case m.Event.Name == history.Acquired && until == history.Held && r.s.Workers[name].Try:
			return fmt.Errorf("%s was granted the lock, although another worker should hold it", name)
		}
	}
}

// awaitHeldWrite waits until the network holds the write that the worker has announced.
func (w *worker) awaitHeldWrite(ctx context.Context, name string) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	held := make(chan error, 1)
	go func() { held <- w.toStore.AwaitHeld(ctx) }()
	const elsewhere = "does OpenStore connect to StoreSpec.Addr?"
	for {
		select {
		case err := <-held:
			if err != nil {
				return fmt.Errorf("the link holds no write of %s: %w; %s", name, err, elsewhere)
			}
			return nil
		case m, ok := <-w.messages:
			switch {
			case !ok:
				_, err := w.next(ctx)
				return fmt.Errorf("%s: %w", name, err)
			case m.Event == nil:
				return fmt.Errorf("%s sent a message without an event", name)
			case m.Event.Name == history.Failed:
				return fmt.Errorf("%s failed before the link held its write: %s", name, m.Event.Error)
			case m.Event.Name == history.Wrote || m.Event.Name == history.WriteStale:
				return fmt.Errorf("%s's write bypassed the link that should hold it; %s", name, elsewhere)
			case m.Stops:
				if err := w.sendLine(ctx, "go on"); err != nil {
					return fmt.Errorf("%s: %w", name, err)
				}
			}
		}
	}
}

func (r *run) add(e history.Event) {
	e.Time, e.Actor = time.Now(), controller
	r.append(e)
}

func (r *run) append(e history.Event) {
	r.events = append(r.events, e)
	if r.OnEvent != nil {
		r.OnEvent(e)
	}
}

func (r *run) finish(ctx context.Context) error {
	if err := r.resource.sync(ctx, nil); err != nil {
		return err
	}
	var ledgers map[string]resource.Record
	var refused int
	err := r.resource.watch(ctx, func(ctx context.Context) (err error) {
		ledgers, refused, err = r.resource.final(ctx)
		return err
	})
	if err != nil {
		return err
	}
	for _, key := range r.keys {
		rec := ledgers[key]
		r.add(history.Event{
			Kind: history.KindFinal, Key: key, Value: string(rec.Value),
			Seen: rec.MaxFence.Token, SeenSeq: rec.MaxFence.Seq, Refusals: refused,
		})
	}
	if err := r.resource.end(ctx); err != nil {
		return err
	}
	for _, name := range r.s.workers() {
		if w := r.workers[name]; w.bypasses() {
			return fmt.Errorf("%s was never cut off: it used the lock through none of its links; does Open connect to LockSpec.Addrs?", name)
		}
	}
	for _, why := range tooEarly(r.s, r.events) {
		r.add(history.Event{Kind: history.KindDoubt, Detail: why})
	}
	r.add(history.Event{Kind: history.KindEnd})
	return nil
}

func (r *run) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), r.timeout)
	defer cancel()
	var errs []error
	for what := range r.active { // a server outlives the run, and must not stay frozen
		if verb, target, _ := strings.Cut(what, " "); verb != "" && r.s.kind(target) == ofServer {
			errs = append(errs, r.Service.fault(ctx, Step{Verb: verb, Target: target}))
		}
	}
	for _, w := range r.workers {
		errs = append(errs, w.close())
	}
	if r.resource != nil {
		errs = append(errs, r.resource.close())
	}
	return errors.Join(append(errs, os.RemoveAll(r.dir))...)
}
