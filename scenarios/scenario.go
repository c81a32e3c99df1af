// Package scenarios shows, on real servers, how locks fail and what fencing does about it.
//
// A [Scenario] is a schedule of steps for worker processes that do a read-modify-write of a ledger under a lock.
// A worker stops at named checkpoints and goes on when told, so that faults are placed by happens-before: "A has read"
// comes before "A is frozen" comes before "B has the lock", run after run. Expiry is observed, as the next worker's grant, and
// not slept through. A [Runner] runs a scenario, records its history, and package history judges it.
//
// The workers and the resource are processes of their own: the running binary, started again. A test binary or a main
// hands over to them by calling [Child] first, or [ChildWithStore].
//
// The way of a run through the files: a schedule (hazards.go, scenario.go) is carried out by the runner (runner.go), which starts
// workers and cuts their links (workers.go), and does faults (faults.go; servers.go, those of the lock's servers). A worker
// (worker.go, in a process that protocol.go starts) takes the lock (lock.go) and writes to the store: a process that tells its
// decisions (resource.go), or a server whose record tells them (store.go). They make the history, which package history judges,
// once early.go has put into it who was granted the lock too early.
//
// Both the lock and what it protects may be your own: [Open] opens any [Lock], and a [Store] any [resource.Store].
package scenarios

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/fencelab/fencelab/scenarios/history"
)

// Resource is the target of steps that act on the resource's process.
const Resource = "resource"

// LockService is the target of faults that hit every server of the lock's.
const LockService = "lock"

// Leader is the target of faults that hit the leader of the lock's cluster. What undoes them is done to the server that was hit
// last, whoever leads by then.
const Leader = "leader"

// controller is the actor of what the Runner does.
const controller = "controller"

// Scenario is one way in which a lock fails. [Parse] reads one from text.
type Scenario struct {
	Name   string // what happens; it names the recorded run
	Hazard string // the same as a sentence

	// Locks are the locks that have the hazard, by the name of their Service; none: every lock has it.
	Locks []string
	// Variant asks the lock's Open for a lock that is built wrongly in a certain way; see [LockSpec].
	Variant string
	// TokensLost says that the hazard takes the lock's source of tokens back: that tokens go backwards is then what must
	// happen, and what the resource makes of it is judged.
	TokensLost bool

	// Workers says how workers differ from the plain one. Workers that only appear in Steps are plain.
	Workers map[string]Worker
	Steps   []Step

	// MinTTL raises the victim's lease to at least this, where the victim must still hold it when the fault hits: only a
	// stall as long as that spoils the run then.
	MinTTL history.Duration

	// Expect is the verdict for each fencing mode in which the scenario makes sense.
	Expect map[history.Fencing]history.Verdict
	// Traces are the golden traces, by fencing mode. "unfenced" is that with fencing off of workers that write straight to a
	// store, and send no tokens.
	Traces map[string]string

	file string // where it was read
}

// Worker says how a worker does its job. The zero Worker has a lease that outlives every run, and renews it.
type Worker struct {
	// Victim gives the worker the run's TTL, so that its lease can end while others wait. A run in which another is granted
	// the lock before that time is over is inconclusive, unless the victim has said that it released or lost it, or was
	// killed. A worker whose lease a fault of the server takes away is no victim.
	Victim bool
	// NoRenew leaves the lease to itself; otherwise it is renewed in the background while the worker runs, so that only
	// a real freeze can end it.
	NoRenew bool
	// Check makes the worker check its lease right before it writes, and give up if it is lost.
	Check bool
	// Try makes the worker ask for the lock without waiting first, and report whether it was held.
	Try bool
	// Idle makes the worker take the lock and release it, and leave the resource alone.
	Idle bool
	// Outlive makes the worker wait, before it writes, until its lease is lost, report that, and write all the same. A lease
	// that is renewed has been renewed once before the worker reports that it has it: what ends it later is the schedule.
	Outlive bool
	// MaxHold ends the renewals, that long after the grant. 0: no run is so long. If another is granted the lock of a victim
	// before, the lease wasn't renewed, and the run is inconclusive.
	MaxHold history.Duration
	// Second makes the worker append its entry to a second ledger after the first, under the same grant.
	Second bool
	// GetThenDel makes the worker release by GET and DEL, with a gap between them, instead of the lock's own release.
	GetThenDel bool
}

// Step is one step of a schedule: "run A until read", or a fault or what undoes it, in words of [history.Faults]. It is over when
// what it does has happened.
type Step struct {
	Verb   string   // "run", or the name of a fault
	Target string   // a worker, Resource, or servers of the lock's: a name, LockService or Leader
	Until  string   // of run: the report at which the worker stops, until it is run again
	From   []string // of cut and refuse: the lock's servers that Target can't reach; none: all
	Detail string   // of a fault of a server: its size, where it has one

	line int // of the file
}

// verbRun is the verb of a step that starts a worker, or lets it go on.
const verbRun = "run"

// String is the step as in "run A until read".
func (st Step) String() string {
	words := []string{st.Verb, st.Target}
	if st.Until != "" {
		words = append(words, "until", st.Until)
	}
	if len(st.From) > 0 {
		words = append(words, "from", strings.Join(st.From, " "))
	}
	if st.Detail != "" {
		words = append(words, st.Detail)
	}
	return strings.Join(words, " ")
}

// workers returns the names of the workers, in the order of their first step.
func (s *Scenario) workers() []string {
	var names []string
	for _, st := range s.Steps {
		if !slices.Contains(names, st.Target) && s.has(func(o Step) bool { return o.Verb == verbRun && o.Target == st.Target }) {
			names = append(names, st.Target)
		}
	}
	return names
}

// kind is what target is.
func (s *Scenario) kind(target string) kind {
	switch {
	case target == Resource:
		return ofResource
	case slices.Contains(s.workers(), target):
		return ofWorker
	}
	return ofServer
}

// On reports whether the lock of that name has the hazard.
func (s *Scenario) On(lock string) bool { return len(s.Locks) == 0 || slices.Contains(s.Locks, lock) }

// Faulty reports whether the scenario needs faults of the lock's servers.
func (s *Scenario) Faulty() bool {
	return s.has(func(st Step) bool { return s.kind(st.Target) == ofServer })
}

func (s *Scenario) has(is func(Step) bool) bool { return slices.ContainsFunc(s.Steps, is) }

// leaves reports whether a step of the schedule leaves target in a state, or any target if that is empty.
func (s *Scenario) leaves(target string, state history.State) bool {
	return s.has(func(st Step) bool {
		return (target == "" || st.Target == target) && fault(st.Verb).State == state
	})
}

// fault is the fault of that name, none if there is none.
func fault(name string) history.Fault {
	f, _ := history.FaultNamed(name)
	return f
}

// undone are the names of the faults that a verb undoes.
func undone(verb string) (names []string) {
	for _, f := range history.Faults {
		if f.Undo == verb {
			names = append(names, f.Name)
		}
	}
	return names
}

// modes are the fencing modes.
var modes = []history.Fencing{history.FencingOff, history.FencingWrites, history.FencingOn}

// Check returns an error that says what is wrong with the scenario, or nil.
func (s *Scenario) Check() error {
	var errs []error
	bad := func(line int, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s: %w", s.where(line), fmt.Errorf(format, args...)))
	}
	if err := checkName(s.Name); err != nil {
		bad(0, "its name %w", err)
	}
	if s.Hazard == "" {
		bad(0, "it doesn't begin with a sentence that says what happens")
	}
	if len(s.Steps) == 0 {
		bad(0, "it has no steps")
	}
	if s.MinTTL < 0 {
		bad(0, "min-ttl is %v; it must not be negative", time.Duration(s.MinTTL))
	}
	for f, v := range s.Expect {
		if !slices.Contains(modes, f) {
			bad(0, "it expects something of fencing mode %q; there are %v", f, modes)
		}
		if v == history.Inconclusive {
			bad(0, "it expects fencing %s to be inconclusive, which never passes; leave that mode out", f)
		}
	}
	workers := s.workers()
	c := checker{scenario: s, inForce: map[string][]history.Fault{}, started: map[string]bool{}, done: map[string]bool{}, loose: map[string]string{}}
	for name, w := range s.Workers {
		if !slices.Contains(workers, name) {
			bad(0, "worker %q is never run; add a run, or remove the worker", name)
		}
		if w.MaxHold < 0 {
			bad(0, "worker %s has a max-hold of %v; it must not be negative", name, time.Duration(w.MaxHold))
		}
	}
	for _, st := range s.Steps {
		if err := c.step(st); err != nil {
			bad(st.line, "%s: %w", st, err)
		}
	}
	for _, target := range slices.Sorted(maps.Keys(c.inForce)) {
		for _, f := range c.inForce[target] {
			if !f.From { // what a worker can't reach doesn't matter once it has ended
				bad(0, "the %s of %s is not over at the end; add %q", f.Name, target, Step{Verb: f.Undo, Target: target})
			}
		}
	}
	for _, name := range workers {
		if !c.done[name] {
			bad(0, "%s doesn't finish; add %q", name, Step{Verb: verbRun, Target: name, Until: history.Done})
		}
	}
	if len(errs) > 0 {
		return fmt.Errorf("scenarios: %w", errors.Join(errs...))
	}
	return nil
}

// checkName returns what is wrong with the name of a scenario or a worker, or nil. Names become parts of keys, and entries
// of ledgers, which are lines.
func checkName(name string) error {
	plain := func(r rune) bool { return r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r) }
	if name == "" || len(name) > 100 || strings.ContainsFunc(name, func(r rune) bool { return !plain(r) }) {
		return fmt.Errorf("is %.120q; choose up to 100 letters, digits, - and _", name)
	}
	return nil
}

// checker walks a schedule without running it.
type checker struct {
	scenario *Scenario

	inForce       map[string][]history.Fault // by worker, or the resource
	started, done map[string]bool

	loose map[string]string // workers that were run until a report at which they don't stop, and that report
	next  string            // the worker whose delivered write is on its way
}

// reports are the reports up to which a worker can be run.
var reports = []string{
	history.Held, history.Acquired, history.Read, history.BeforeWrite, history.Checked, history.Sent, history.Wrote,
	history.WriteStale, history.ReadStale, history.LostLease, history.Lost, history.ReleaseGap, history.Released, history.ReleaseLost,
	history.ReleaseForeign, history.Done,
}

func (c *checker) step(st Step) error {
	f, on := fault(st.Verb), c.scenario.kind(st.Target)
	switch {
	case checkName(st.Target) != nil:
		return fmt.Errorf("its target %w", checkName(st.Target))
	case st.Target == controller:
		return fmt.Errorf("%s is what a history calls the runner; choose another name", controller)
	case st.Verb != verbRun && st.Until != "":
		return errors.New("only a run has an until; remove it")
	case !f.From && st.From != nil:
		return errors.New("only what is between a worker and the lock's servers has a from; remove it")
	case (st.Verb == verbRun || on != ofServer) && st.Detail != "":
		return errors.New("only a fault of a server has a detail; remove it")
	case st.Verb != verbRun && f.Name == "":
		var names []string
		for _, f := range history.Faults {
			names = append(names, f.Name)
		}
		return fmt.Errorf("no line begins with %q; these do: %s", st.Verb, strings.Join(slices.Concat(settings, []string{verbRun}, names), ", "))
	case st.Verb == verbRun && st.Target == Resource:
		return errors.New("the resource runs by itself; remove the step")
	case st.Verb != verbRun && !slices.Contains(verbs(on), st.Verb):
		return fmt.Errorf("there is no %s of %v; there are %s", st.Verb, on, strings.Join(verbs(on), ", "))
	case c.done[st.Target]:
		return errors.New("the worker is done by then; remove the step, or put it before")
	}
	if err := c.ordered(st); err != nil {
		return err
	}
	if st.Verb == verbRun {
		return c.run(st)
	}
	if on == ofServer {
		return nil
	}
	return c.fault(st, f)
}

// ordered returns an error if what st does and what a worker does that is running would happen in either order.
func (c *checker) ordered(st Step) error {
	if c.next != "" && (st.Verb != verbRun || st.Target != c.next) {
		return fmt.Errorf("what %s sent has just been delivered, and this step would race with it; add a run of %s before", c.next, c.next)
	}
	if injections[st.Verb].process != nil && c.loose[st.Target] != "" {
		return fmt.Errorf("the worker doesn't stop at %q, so where the %s hits it is left to chance; add a run before", c.loose[st.Target], st.Verb)
	}
	if st.Verb == verbRun && !c.started[st.Target] {
		for name, at := range c.loose {
			if at == history.Held {
				return fmt.Errorf("%s waits for the lock already, and who gets it is left to chance; add a run of %s before", name, name)
			}
		}
	}
	return nil
}

func (c *checker) run(st Step) error {
	in := func(state history.State) bool {
		return slices.ContainsFunc(c.inForce[st.Target], func(f history.Fault) bool { return f.State == state })
	}
	switch {
	case !slices.Contains(reports, st.Until):
		return fmt.Errorf("until %q is no report; there are %v", st.Until, reports)
	case in(history.Frozen):
		return errors.New("the worker is frozen; let it go on before")
	case st.Until == history.Sent && !in(history.Delayed):
		return errors.New("the write's answer may come before this report; add a hold before")
	}
	c.started[st.Target] = true
	c.done[st.Target] = st.Until == history.Done
	c.next = ""
	delete(c.loose, st.Target)
	if st.Until == history.Held || st.Until == history.Sent {
		c.loose[st.Target] = st.Until
	}
	return nil
}

// fault is a step that begins or ends a fault of a worker or the resource.
func (c *checker) fault(st Step, f history.Fault) error {
	before := c.inForce[st.Target]
	if what := undone(st.Verb); what != nil {
		c.inForce[st.Target] = slices.DeleteFunc(slices.Clone(before), func(f history.Fault) bool {
			if f.Undo == st.Verb && f.State == history.Delayed && c.loose[st.Target] == history.Sent {
				c.next = st.Target
			}
			return f.Undo == st.Verb
		})
		if len(c.inForce[st.Target]) == len(before) {
			return fmt.Errorf("there is no %s of %s before; add one, or remove the step", strings.Join(what, " or "), st.Target)
		}
		return nil
	}
	twice := slices.ContainsFunc(before, func(o history.Fault) bool { return o.Name == f.Name })
	switch {
	case injections[st.Verb].process != nil && st.Target != Resource && !c.started[st.Target]:
		return errors.New("the worker isn't started by then; add a run before")
	case twice && !f.From: // these may be from other servers
		return fmt.Errorf("there is no %s of %s before; add one, or remove the step", f.Undo, st.Target)
	case f.State == history.Down && st.Target != Resource:
		c.done[st.Target] = true
		delete(c.inForce, st.Target)
		return nil
	}
	c.inForce[st.Target] = append(before, f)
	return nil
}
