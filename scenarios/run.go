package scenarios

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/internal/proc"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

const (
	// DefaultTTL is the victim's lease where a Runner doesn't say.
	DefaultTTL = 250 * time.Millisecond
	// DefaultStepTimeout is how long a step may take beyond the TTL and the pause, where a Runner doesn't say.
	DefaultStepTimeout = 30 * time.Second
	// longTTL is the lease of workers that are no victims. No machine is so slow that it ends during a run.
	longTTL = 10 * time.Minute
)

// Runner plays scenarios.
type Runner struct {
	// Service is what is under test. Required.
	Service *Service
	// Store, if not nil, is what the workers write to. Nil: this module's resource, over HTTP, in a process of its own.
	Store *Store
	// TTL is the victim's lease, DefaultTTL if 0.
	TTL time.Duration
	// Pause is how long a freeze or a delay in the network lasts at least. 0: until the schedule goes on, which is as
	// soon as the successor has got in.
	Pause time.Duration
	// StepTimeout is how long a step may take beyond TTL and Pause, DefaultStepTimeout if 0.
	StepTimeout time.Duration
	// Command, if not nil, returns the command line that repeats a run.
	Command func(s Scenario, f history.Fencing) string
	// OnEvent, if not nil, is told of each event as it enters the history.
	OnEvent func(e history.Event)
}

// Outcome is a run's history and what the judge says of it. Where times show that the hazard never came about, the history
// says so: see [Worker].
type Outcome struct {
	Events []history.Event
	history.Result
}

// Run plays s. An error says that the schedule could not be carried out; the outcome then holds what has happened until
// then and is never safe. All processes are gone when Run returns.
func (r *Runner) Run(ctx context.Context, s Scenario, f history.Fencing) (*Outcome, error) {
	if err := s.Check(); err != nil {
		return &Outcome{}, err
	}
	if _, ok := os.LookupEnv(childEnv); ok { // it would start itself for ever
		return &Outcome{}, errors.New("scenarios: this process was started to be a worker or the resource: call scenarios.Child or " +
			"ChildWithStore first in main or TestMain")
	}
	if !slices.Contains(modes, f) {
		return &Outcome{}, fmt.Errorf("scenarios: there is no fencing mode %q; there are %v", f, modes)
	}
	if r.Service == nil {
		return &Outcome{}, errors.New("scenarios: Runner.Service is nil; say what lock service is under test")
	}
	if err := r.Service.check(&s, f); err != nil {
		return &Outcome{}, err
	}
	if r.Store != nil {
		if err := r.Store.check(&s); err != nil {
			return &Outcome{}, err
		}
	}
	ttl, step := r.TTL, r.StepTimeout
	if ttl == 0 {
		ttl = DefaultTTL
	}
	ttl = max(ttl, time.Duration(s.MinTTL))
	if step == 0 {
		step = DefaultStepTimeout
	}
	if r.Pause != 0 && r.Pause <= ttl {
		return &Outcome{}, fmt.Errorf("scenarios: a pause of %v doesn't exceed the TTL of %v; make it longer, or the TTL shorter", r.Pause, ttl)
	}
	p := &play{
		r: r, s: &s, fencing: f, ttl: ttl, step: step + ttl + r.Pause,
		keys: []string{s.Name + "/" + string(f) + "/" + uuid.NewString()}, workers: map[string]*worker{},
	}
	for _, w := range s.Workers {
		if w.Second && len(p.keys) == 1 {
			p.keys = append(p.keys, p.keys[0]+"/second")
		}
	}
	err := p.guarded(ctx)
	o := &Outcome{p.events, history.Judge(p.events)}
	if err != nil {
		err = fmt.Errorf("scenarios: %s, fencing %s: %w", s.Name, f, err)
		if o.Verdict == history.Safe {
			o.Verdict, o.Findings = history.Inconclusive, []string{err.Error()}
		}
	}
	return o, err
}

// tooEarly says who was granted the lock before the victim could have lost it to the hazard. The order of events is the same
// then: without their times, a lease that has run out, and renewals that went on until they were stopped, can't be told from
// a lock that lets everybody in, and from one that doesn't renew.
func tooEarly(s *Scenario, events []history.Event) (why []string) {
	doubt := func(format string, args ...any) { why = append(why, fmt.Sprintf(format, args...)) }
	var holder history.Event // the grant of a victim that takes the lock for its own
	for _, e := range events {
		switch {
		case e.Kind == history.KindFault && e.Name == history.FaultKill && e.Target == holder.Actor:
			holder = history.Event{} // a service that knows that a holder is dead needn't wait
		case e.Kind != history.KindReport:
		case e.Name == history.Acquired:
			if early := holder.Until.Sub(e.Time); early > 0 {
				doubt("%s was granted the lock %v before the end of %s's lease", e.Actor, early, holder.Actor)
			}
			most, ttl := time.Duration(s.Workers[holder.Actor].MaxHold), time.Duration(holder.TTL)
			switch after := e.Time.Sub(holder.Time); {
			case most == 0:
			case ttl >= most:
				doubt("%s's lease of %v outlasts its renewals, which end after %v: choose a shorter TTL", holder.Actor, ttl, most)
			case after < most:
				doubt("%s was granted the lock %v after %s, whose lease was to be renewed for %v", e.Actor, after, holder.Actor, most)
			}
			holder = history.Event{}
			if s.Workers[e.Actor].Victim {
				holder = e
			}
		case e.Actor == holder.Actor && (e.Name == history.Released || e.Name == history.Lost):
			holder = history.Event{}
		}
	}
	return why
}

// errInterrupted is why a run ends when a signal ends the process.
var errInterrupted = errors.New("interrupted")

// forgetTimeout bounds a Runner's Forget: a server that is gone has nothing to forget.
const forgetTimeout = 5 * time.Second

// guarded runs p, and cleans up after it also when a signal ends the process meanwhile.
func (p *play) guarded(ctx context.Context) (err error) {
	ctx, interrupt := context.WithCancelCause(ctx)
	defer interrupt(nil)
	cleaned := make(chan struct{})
	unguard, err := testbed.Guard(ctx, func() error {
		interrupt(errInterrupted)
		<-cleaned
		return nil
	})
	if err != nil {
		return err
	}
	defer func() {
		close(cleaned)
		err = errors.Join(err, unguard())
	}()
	err = p.run(ctx)
	if p.r.Service.Forget != nil {
		forget, cancel := context.WithTimeout(context.WithoutCancel(ctx), forgetTimeout)
		defer cancel()
		err = errors.Join(err, p.r.Service.Forget(forget, p.keys[0]))
	}
	return err
}

// play is one run under way.
type play struct {
	r       *Runner
	s       *Scenario
	fencing history.Fencing
	ttl     time.Duration
	step    time.Duration
	keys    []string // the ledgers; the first is the lock's too

	dir      string
	resource target // nil before it is made
	workers  map[string]*worker
	events   []history.Event
}

// worker is a worker's process and the faults that it is under.
type worker struct {
	*process
	stopped bool // it waits for a line from us
	link    *faults.Link
	deliver faults.Heal
	resume  faults.Heal
	since   time.Time // when the fault that it is under began

	nodes []Node                  // where it finds the lock's servers
	locks map[string]*faults.Link // to them, if the schedule cuts it off, by name
	mend  []faults.Heal
}

func (p *play) run(ctx context.Context) (err error) {
	p.dir, err = testbed.MkdirTemp("scenario")
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, p.close()) }()
	tell := func(d history.Event) {
		d.Actor = Resource
		p.append(d)
	}
	switch store := p.r.Store; {
	case store != nil && !store.served():
		p.resource = newStoreTarget(store, p.fencing, tell)
	default:
		p.resource = newHTTPResource(p.fencing, p.dir, store, tell)
	}
	run := history.Run{
		Scenario: p.s.Name, Hazard: p.s.Hazard, Fencing: p.fencing, Lock: p.r.Service.Lock, Server: p.r.Service.Server,
		Store: p.resource.name(), TTL: history.Duration(p.ttl), Pause: history.Duration(p.r.Pause), Workers: p.s.workers(),
		TokensLost: p.s.TokensLost,
	}
	if len(p.keys) > 1 {
		run.Keys = p.keys
	}
	if p.r.Command != nil {
		run.Command = p.r.Command(*p.s, p.fencing)
	}
	p.add(history.Event{Kind: history.KindRun, Run: &run})
	if err := p.beginResource(ctx); err != nil {
		return err
	}
	for i, st := range p.s.Steps {
		if err := p.do(ctx, st); err != nil {
			return fmt.Errorf("step %d, %s: %w", i+1, st, err)
		}
	}
	return p.finish(ctx)
}

// String is the step as in "run A until read".
func (st Step) String() string {
	s := string(st.Op) + " " + st.Target
	if st.Op == OpFault {
		s = strings.TrimSpace(st.Fault + " " + st.Target + " " + st.Detail)
	}
	if st.Until != "" {
		s += " until " + st.Until
	}
	if len(st.Servers) > 0 {
		s += " from " + strings.Join(st.Servers, " ")
	}
	return s
}

func (p *play) do(ctx context.Context, st Step) error {
	ctx, cancel := context.WithTimeoutCause(ctx, p.step, fmt.Errorf("it has not happened within %v", p.step))
	defer cancel()
	w := p.workers[st.Target]
	switch st.Op {
	case OpRun:
		return p.runUntil(ctx, st.Target, st.Until)
	case OpPause:
		heal, err := faults.Pause(ctx, w.PID)
		if err != nil {
			return err
		}
		w.resume, w.since = heal, time.Now()
		return p.fault(ctx, history.FaultPause, st.Target)
	case OpResume:
		if err := sleepUntil(ctx, w.since.Add(p.r.Pause)); err != nil {
			return err
		}
		if err := p.fault(ctx, history.FaultResume, st.Target); err != nil { // first: what it does next comes after
			return err
		}
		return w.resume(ctx)
	case OpHold:
		w, err := p.worker(st.Target)
		if err != nil {
			return err
		}
		heal, err := w.link.HoldRequests(ctx)
		if err != nil {
			return err
		}
		w.deliver, w.since = heal, time.Now()
		return p.fault(ctx, history.FaultHold, st.Target)
	case OpDeliver:
		if err := sleepUntil(ctx, w.since.Add(p.r.Pause)); err != nil {
			return err
		}
		if err := p.fault(ctx, history.FaultDeliver, st.Target); err != nil {
			return err
		}
		return w.deliver(ctx)
	case OpCut, OpRefuse:
		return p.cut(ctx, st)
	case OpMend:
		for i, heal := range slices.Backward(w.mend) {
			if err := heal(ctx); err != nil {
				return err
			}
			w.mend = w.mend[:i]
		}
		return p.fault(ctx, history.FaultMend, st.Target)
	case OpFault:
		if err := p.r.Service.fault(ctx, st); err != nil {
			return err
		}
		return p.happened(ctx, history.Event{Name: st.Fault, Target: st.Target, Detail: st.Detail})
	case OpKill:
		if st.Target != Resource {
			return p.killWorker(ctx, st.Target, w)
		}
		if err := p.resource.kill(ctx); err != nil {
			return err
		}
		return p.fault(ctx, history.FaultKill, Resource)
	case OpRestart:
		if err := p.resource.restart(ctx); err != nil {
			return err
		}
		return p.fault(ctx, history.FaultRestart, Resource)
	}
	return fmt.Errorf("there is no operation %q", st.Op)
}

func sleepUntil(ctx context.Context, t time.Time) error {
	timer := time.NewTimer(time.Until(t))
	defer timer.Stop()
	select {
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// runUntil lets a worker go on until it reports until.
func (p *play) runUntil(ctx context.Context, name, until string) error {
	w, err := p.worker(name)
	if err != nil {
		return err
	}
	switch {
	case w.process == nil:
		if err := p.startWorker(name, w); err != nil {
			return err
		}
	case w.stopped:
		if err := w.goOn(ctx); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	for {
		m, err := w.next(ctx)
		switch {
		case err != nil && ctx.Err() != nil && until == history.Lost && len(w.mend) > 0:
			return fmt.Errorf("%s: %w; it is cut off, and its lease goes on: does Open connect to LockSpec.Addrs, and does the lease end "+
				"when it can't be renewed?", name, err)
		case err != nil:
			return fmt.Errorf("%s: %w", name, err)
		}
		if m.Event == nil {
			return fmt.Errorf("%s sent a message without an event", name)
		}
		m.Event.Actor = name
		w.stopped = m.Stops
		if err := p.record(ctx, *m.Event); err != nil {
			return err
		}
		ended := m.Event.Name == history.Done || m.Event.Name == history.Failed
		switch {
		case ended && m.Event.Name == until:
			return w.exit(ctx)
		case ended && m.Event.Name == history.Failed:
			return fmt.Errorf("%s failed: %s", name, m.Event.Error)
		case ended:
			return fmt.Errorf("%s was done without reporting %q", name, until)
		case m.Event.Name == until && until == history.Sent && w.deliver != nil:
			if err := w.link.AwaitHeld(ctx); err != nil { // now it is in the network, and not merely about to be
				return fmt.Errorf("%s's write isn't on the way on which it was to be late: %w; does OpenStore connect to StoreSpec.Addr?",
					name, err)
			}
			return nil
		case m.Event.Name == until:
			return nil
		case m.Event.Name == history.Acquired && until == history.Held && p.s.Workers[name].Try:
			return fmt.Errorf("%s was granted the lock, which it should have found %s", name, until)
		case m.Stops:
			if err := w.goOn(ctx); err != nil {
				return fmt.Errorf("%s: %w", name, err)
			}
		}
	}
}

// killWorker kills a worker, which stands at a checkpoint and so has said all that it has to say.
func (p *play) killWorker(ctx context.Context, name string, w *worker) error {
	if err := faults.Kill(ctx, w.PID); err != nil {
		return err
	}
	if err := w.end(); err != nil {
		return err
	}
	return p.fault(ctx, history.FaultKill, name)
}

// cut cuts a worker off from servers of the lock's.
func (p *play) cut(ctx context.Context, st Step) error {
	w, err := p.worker(st.Target)
	if err != nil {
		return err
	}
	for _, n := range w.nodes {
		if len(st.Servers) > 0 && !slices.Contains(st.Servers, n.Name) {
			continue
		}
		link := w.locks[n.Name]
		fault := link.Cut
		if st.Op == OpRefuse {
			fault = link.Refuse
		}
		heal, err := fault(ctx)
		if err != nil {
			return fmt.Errorf("%s: %w", n.Name, err)
		}
		w.mend = append(w.mend, heal)
	}
	return p.happened(ctx, history.Event{Name: string(st.Op), Target: st.Target, Peers: st.Servers})
}

// worker returns the worker of that name, with a link of its own to the resource if the schedule holds what it sends, and
// links to the lock's servers if the schedule cuts it off.
func (p *play) worker(name string) (*worker, error) {
	if w := p.workers[name]; w != nil {
		return w, nil
	}
	w := &worker{}
	p.workers[name] = w
	w.nodes = slices.Clone(p.r.Service.Nodes)
	var err error
	if p.s.has(OpHold, name) {
		if w.link, err = faults.NewLink(p.resource.hostPort()); err != nil {
			return nil, err
		}
	}
	if !p.s.has(OpCut, name) && !p.s.has(OpRefuse, name) {
		return w, nil
	}
	w.locks = map[string]*faults.Link{}
	for i, n := range w.nodes {
		upstream, err := hostPort(n.Addr)
		if err != nil {
			return nil, err
		}
		link, err := faults.NewLink(upstream)
		if err != nil {
			return nil, err
		}
		w.locks[n.Name] = link
		if w.nodes[i].Addr, err = through(n.Addr, link.Addr()); err != nil {
			return nil, err
		}
	}
	return w, nil
}

func (p *play) startWorker(name string, w *worker) error {
	how := p.s.Workers[name]
	spec := childSpec{
		Name: name, Fencing: p.fencing, Key: p.keys[0], Lock: p.r.Service.Lock, Variant: p.s.Variant, TTL: longTTL, Worker: how, MinSession: p.r.Service.MinSession,
	}
	if store := p.r.Store; store != nil && !store.served() {
		spec.Straight, spec.Own = true, store.Name
	}
	for _, st := range p.s.Steps {
		spec.Sent = spec.Sent || st.Op == OpRun && st.Target == name && st.Until == history.Sent
	}
	for _, n := range w.nodes {
		spec.Addrs = append(spec.Addrs, n.Addr)
	}
	if how.Second {
		spec.Second = p.keys[1]
	}
	if how.Victim {
		spec.TTL = p.ttl
	}
	var link linked
	if w.link != nil {
		link = w.link
	}
	var err error
	if spec.URL, err = p.resource.url(link); err != nil {
		return err
	}
	w.process, err = start(spec)
	return err
}

// beginResource makes the resource ready.
func (p *play) beginResource(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, p.step, fmt.Errorf("the resource was not ready within %v", p.step))
	defer cancel()
	return p.resource.begin(ctx, p.keys)
}

// add appends an event of ours.
func (p *play) add(e history.Event) {
	e.Time, e.Actor = time.Now(), controller
	p.append(e)
}

func (p *play) append(e history.Event) {
	p.events = append(p.events, e)
	if p.r.OnEvent != nil {
		p.r.OnEvent(e)
	}
}

func (p *play) fault(ctx context.Context, name, target string) error {
	return p.happened(ctx, history.Event{Name: name, Target: target})
}

// happened appends a fault, after the decisions of the resource that came before it.
func (p *play) happened(ctx context.Context, e history.Event) error {
	if err := p.resource.sync(ctx, nil); err != nil {
		return err
	}
	e.Kind = history.KindFault
	p.add(e)
	return nil
}

// record appends an event of a worker's, after the decisions of the resource that came before it.
func (p *play) record(ctx context.Context, e history.Event) error {
	if err := p.resource.sync(ctx, &e); err != nil {
		return err
	}
	p.append(e)
	return nil
}

// finish reads what the resource holds at the end, and ends it.
func (p *play) finish(ctx context.Context) error {
	ctx, cancel := context.WithTimeoutCause(ctx, p.step, fmt.Errorf("the resource did not end within %v", p.step))
	defer cancel()
	if err := p.resource.sync(ctx, nil); err != nil {
		return err
	}
	ledgers, refused, err := p.resource.final(ctx)
	if err != nil {
		return err
	}
	for _, key := range p.keys {
		rec := ledgers[key]
		p.add(history.Event{
			Kind: history.KindFinal, Key: key, Value: string(rec.Value),
			Seen: rec.MaxFence.Token, SeenSeq: rec.MaxFence.Seq, Stale: refused,
		})
	}
	if err := p.resource.end(ctx); err != nil {
		return err
	}
	for _, why := range tooEarly(p.s, p.events) {
		p.add(history.Event{Kind: history.KindDoubt, Detail: why})
	}
	p.add(history.Event{Kind: history.KindEnd})
	return nil
}

// close ends all that is left of the run.
func (p *play) close() error {
	var errs []error
	for _, w := range p.workers {
		if w.process != nil {
			errs = append(errs, w.end())
		}
		if w.link != nil {
			errs = append(errs, w.link.Close())
		}
		for _, link := range w.locks {
			errs = append(errs, link.Close())
		}
	}
	if p.resource != nil {
		errs = append(errs, p.resource.close())
	}
	return errors.Join(append(errs, os.RemoveAll(p.dir))...)
}

// process is a child and our ends of its pipes.
type process struct {
	*proc.Child
	messages chan message // closed when the child has closed its end
	control  *os.File
	output   *output
}

// backlog is how many messages a child can be ahead of us. A child of ours sends a few dozen in its life.
const backlog = 1024

// start starts this binary as a child. The files are the child's from descriptor listenFile on.
func start(spec childSpec, files ...*os.File) (*process, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	text, err := json.Marshal(spec)
	if err != nil {
		return nil, err
	}
	eventsR, eventsW, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	defer func() { _ = eventsW.Close() }()
	controlR, controlW, err := os.Pipe()
	if err != nil {
		return nil, errors.Join(err, eventsR.Close())
	}
	defer func() { _ = controlR.Close() }()

	p := &process{messages: make(chan message, backlog), control: controlW, output: &output{}}
	cmd := exec.Command(exe) //nolint:noctx // ended by close, also when it is stopped
	// A program built with the race detector sleeps for a second when it exits, unless it is told not to.
	race := os.Getenv("GORACE") + " atexit_sleep_ms=0"
	if spec.Lock == "zookeeper" {
		// go-zookeeper 1.0.4 has a race of its own: a connection that is made again reads Conn.lastZxid, for the watches
		// that it sets again, beside the goroutine that writes it. What it finds in a worker is printed, and no failure.
		race += " exitcode=0"
	}
	cmd.Env = append(os.Environ(), childEnv+"="+string(text), "GORACE="+race)
	cmd.Stdout, cmd.Stderr = p.output, p.output
	cmd.ExtraFiles = append([]*os.File{eventsW, controlR}, files...)
	p.Child, err = proc.Start(cmd)
	if err != nil {
		return nil, errors.Join(err, eventsR.Close(), controlW.Close())
	}
	go func() {
		defer func() { _ = eventsR.Close() }()
		readMessages(eventsR, p.messages)
	}()
	return p, nil
}

// tell sends a line.
func (p *process) tell(ctx context.Context, line string) error {
	if _, err := fmt.Fprintln(p.control, line); err != nil { // nobody reads any more
		return cmp.Or(p.exit(ctx), fmt.Errorf("tell it %q: %w%s", line, err, p.output))
	}
	return nil
}

func (w *worker) goOn(ctx context.Context) error {
	w.stopped = false
	return w.tell(ctx, "go on")
}

// next returns the child's next message.
func (p *process) next(ctx context.Context) (message, error) {
	select {
	case m, ok := <-p.messages:
		if !ok {
			if err := p.exit(ctx); err != nil {
				return m, err
			}
			return m, fmt.Errorf("its process has ended%s", p.output)
		}
		return m, nil
	case <-ctx.Done():
		return message{}, fmt.Errorf("waiting for its next report: %w%s", context.Cause(ctx), p.output)
	}
}

// exit lets the child end by itself, and returns an error if it didn't end well; a data race that it found, for example.
func (p *process) exit(ctx context.Context) error {
	p.close()
	select {
	case <-p.Exited():
	case <-ctx.Done():
		return fmt.Errorf("waiting for its end: %w", context.Cause(ctx))
	}
	if err := p.Wait(); err != nil {
		return fmt.Errorf("its process ended with %w%s", err, p.output)
	}
	return nil
}

// kill kills the child, and is in force when it is gone.
func (p *process) kill(ctx context.Context) error { return faults.Kill(ctx, p.PID) }

// end kills the child, if it is still there.
func (p *process) end() error {
	err := p.Kill()
	for range p.messages {
		continue // until its reader has ended
	}
	p.close()
	return err
}

// close closes the control pipe, which tells the child that nothing more will come.
func (p *process) close() { _ = p.control.Close() }

// output is what a child has printed, for error messages.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(b)
}

// String is empty, or begins with a line break.
func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.buf.Len() == 0 {
		return ""
	}
	return "\n--- it printed:\n" + o.buf.String()
}
