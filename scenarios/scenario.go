// Package scenarios shows, on real servers, how locks fail and what fencing does about it.
//
// A [Scenario] is a hazard: a schedule for worker processes that read, modify and write a ledger under a lock. Workers stop at
// checkpoints, so faults are placed by happens-before, and expiry is observed, as the next grant. A [Runner] runs a hazard and
// records its history; package history judges it.
//
// The workers and the resource are the running binary, started again: call [Child], or [ChildWithStore], first in main or
// TestMain. The lock and the store may be your own, see [Lock] and [Store].
//
// Files, in the order of a run: hazards.go and scenario.go read and check the schedule; runner.go runs it, with start.go (worker
// processes and their links), faults.go and servers.go; worker.go is a worker, started through protocol.go, on a lock (lock.go);
// decisions come from the resource (resource.go) or are inferred from a server's record (store.go); early.go reports grants made
// before the victim's lease could have expired.
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

// Resource is the target of steps that affect the resource.
const Resource = "resource"

// LockService is the target of faults of all the lock's servers.
const LockService = "lock"

// Leader is the target of faults of the cluster's leader. The undo goes to the server that was hit.
const Leader = "leader"

const controller = "controller"

// Scenario is a hazard.
type Scenario struct {
	Name   string // the file's; also names the recorded run
	Hazard string // a sentence that says what happens

	// Locks are the Services that have the hazard; none: all.
	Locks []string
	// Variant is [LockSpec].Variant.
	Variant string
	// TokensLost says that the hazard makes tokens regress.
	TokensLost bool

	// Workers has those that differ from the zero Worker.
	Workers map[string]Worker
	Steps   []Step

	// MinTTL is the minimum TTL of the victim, which must survive stalls until the fault.
	MinTTL history.Duration

	Expect map[history.Fencing]history.Verdict
	// Traces are the golden traces by fencing mode; "unfenced": with fencing off, of direct clients of a store, which send no
	// tokens.
	Traces map[string]string

	file  string
	lines map[string]int
}

// Worker describes a worker. The zero Worker's lease is renewed and outlives every run.
type Worker struct {
	// Victim gives the worker the run's TTL, so that its lease can expire. If another worker gets the lock before that, the run
	// is inconclusive, unless the victim was killed or reported that it released or lost the lock.
	Victim bool
	// NoRenew disables renewal. With renewal only a real freeze can end the lease.
	NoRenew bool
	// Check makes the worker check its lease before it writes, and give up if it is lost.
	Check bool
	// Try makes the worker first try without waiting, and report held.
	Try bool
	// Idle keeps the worker from using the resource.
	Idle bool
	// Outlive makes the worker write only after its lease is lost. With renewal it reports its grant only after a first renewal,
	// so that only the schedule can end the lease.
	Outlive bool
	// MaxHold ends renewal that long after the grant; 0: after the run. If another worker gets a victim's lock earlier, the
	// lease wasn't renewed, and the run is inconclusive.
	MaxHold history.Duration
	// Second makes the worker also append to a second ledger, under the same grant.
	Second bool
	// GetThenDel makes the worker release by GET and DEL, with a gap between them.
	GetThenDel bool
}

// Step is "run A until read", a fault or an undo of [history.Faults]. It ends when it has taken effect.
type Step struct {
	Verb   string
	Target string   // a worker, Resource, LockService, Leader or a server's name
	Until  string   // of run: the report at which the worker stops
	From   []string // of cut and refuse: the servers cut off from Target; none: all
	Detail string   // of some faults of servers

	line int
}

const verbRun = "run"

// String returns the step as in a file.
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

func (s *Scenario) workers() []string {
	var names []string
	for _, st := range s.Steps {
		if !slices.Contains(names, st.Target) && s.has(func(o Step) bool { return o.Verb == verbRun && o.Target == st.Target }) {
			names = append(names, st.Target)
		}
	}
	return names
}

func (s *Scenario) kind(target string) kind {
	switch {
	case target == Resource:
		return ofResource
	case slices.Contains(s.workers(), target):
		return ofWorker
	}
	return ofServer
}

// On reports whether the lock has the hazard.
func (s *Scenario) On(lock string) bool { return len(s.Locks) == 0 || slices.Contains(s.Locks, lock) }

// Faulty reports whether there are faults of the lock's servers.
func (s *Scenario) Faulty() bool {
	return s.has(func(st Step) bool { return s.kind(st.Target) == ofServer })
}

func (s *Scenario) has(is func(Step) bool) bool { return slices.ContainsFunc(s.Steps, is) }

func (s *Scenario) leaves(target string, state history.State) bool {
	return s.has(func(st Step) bool {
		return (target == "" || st.Target == target) && fault(st.Verb).State == state
	})
}

func fault(name string) history.Fault {
	f, _ := history.FaultNamed(name)
	return f
}

func undone(verb string) (names []string) {
	for _, f := range history.Faults {
		if f.Undo == verb {
			names = append(names, f.Name)
		}
	}
	return names
}

var modes = []history.Fencing{history.FencingOff, history.FencingWrites, history.FencingOn}

// Check returns all errors in the hazard, or nil.
func (s *Scenario) Check() error {
	var errs []error
	bad := func(line int, format string, args ...any) {
		errs = append(errs, fmt.Errorf("%s: %w", s.where(line), fmt.Errorf(format, args...)))
	}
	if err := checkName(s.Name); err != nil {
		bad(0, "its name %w", err)
	}
	if s.Hazard == "" {
		bad(0, "it must begin with a sentence that describes the hazard")
	}
	if len(s.Steps) == 0 {
		bad(0, "it has no steps")
	}
	if s.MinTTL < 0 {
		bad(s.lines["min-ttl"], "min-ttl is %v; it must not be negative", time.Duration(s.MinTTL))
	}
	for f, v := range s.Expect {
		if !slices.Contains(modes, f) {
			bad(s.lines["-- "+string(f)], "unknown fencing mode %q; the modes are %v", f, modes)
		}
		if v == history.Inconclusive {
			bad(s.lines["-- "+string(f)], "it expects fencing %s to be inconclusive, which never passes; leave that mode out", f)
		}
	}
	workers := s.workers()
	c := checker{scenario: s, inForce: map[string][]history.Fault{}, undos: map[string]bool{}, started: map[string]bool{}, done: map[string]bool{}, running: map[string]string{}}
	for name, w := range s.Workers {
		if !slices.Contains(workers, name) {
			bad(s.lines["worker "+name], "worker %q is never run; add a run, or remove the worker", name)
		}
		if w.MaxHold < 0 {
			bad(s.lines["worker "+name], "worker %s has a max-hold of %v; it must not be negative", name, time.Duration(w.MaxHold))
		}
	}
	for _, st := range s.Steps {
		if err := c.step(st); err != nil {
			bad(st.line, "%s: %w", st, err)
		}
	}
	last := func(verb, target string) (line int) {
		for _, st := range s.Steps {
			if st.Verb == verb && st.Target == target {
				line = st.line
			}
		}
		return line
	}
	for _, target := range slices.Sorted(maps.Keys(c.inForce)) {
		for _, f := range c.inForce[target] {
			if !f.From { // what a worker can't reach doesn't matter after its end
				bad(last(f.Name, target), "the %s of %s is still in force at the end; add %q", f.Name, target, Step{Verb: f.Undo, Target: target})
			}
		}
	}
	for _, name := range workers {
		if !c.done[name] {
			bad(last(verbRun, name), "%s doesn't finish; add %q", name, Step{Verb: verbRun, Target: name, Until: history.Done})
		}
	}
	if len(errs) > 0 {
		return fmt.Errorf("scenarios: %w", errors.Join(errs...))
	}
	return nil
}

// checkName checks a name that becomes part of keys and ledger lines.
func checkName(name string) error {
	plain := func(r rune) bool { return r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r) }
	if name == "" || len(name) > 100 || strings.ContainsFunc(name, func(r rune) bool { return !plain(r) }) {
		return fmt.Errorf("is %.120q; choose up to 100 letters, digits, - and _", name)
	}
	return nil
}

type checker struct {
	scenario *Scenario

	inForce       map[string][]history.Fault // by worker or Resource
	undos         map[string]bool            // in force, of servers: "resume leader"
	started, done map[string]bool

	running   map[string]string // worker → the report of its last run, if it doesn't stop there
	delivered string            // the worker whose held write has just been delivered
}

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
	case st.Verb != verbRun && f.Name == "":
		return fmt.Errorf("unknown keyword %q; the keywords are %s", st.Verb, strings.Join(keywords(), ", "))
	case st.Verb == verbRun && st.Detail != "":
		return fmt.Errorf("write %q", Step{Verb: verbRun, Target: st.Target, Until: st.Detail})
	case on != ofServer && st.Detail != "":
		return fmt.Errorf("only a fault of a server has a detail; remove %q", st.Detail)
	case st.Verb == verbRun && st.Target == Resource:
		return errors.New("the resource runs by itself; remove the step")
	case st.Verb != verbRun && !slices.Contains(verbs(on), st.Verb):
		return fmt.Errorf("%s doesn't apply to %v; these do: %s", st.Verb, on, strings.Join(verbs(on), ", "))
	case st.Verb == "jump" && !isDuration(st.Detail):
		return errors.New("it needs a duration other than 0, such as 11m or -11m")
	case c.done[st.Target]:
		return errors.New("the worker has finished by then; remove the step, or move it up")
	}
	if err := c.ordered(st); err != nil {
		return err
	}
	if st.Verb == verbRun {
		return c.run(st)
	}
	if on == ofServer {
		return c.server(st, f)
	}
	return c.fault(st, f)
}

// server refuses a second fault of a server before the undo of the first: after a change of leader nothing would undo the first.
func (c *checker) server(st Step, f history.Fault) error {
	undo := f.Undo + " " + st.Target
	switch {
	case undone(st.Verb) != nil:
		delete(c.undos, st.Verb+" "+st.Target)
	case c.undos[undo]:
		return fmt.Errorf("there is no %s before this step; add one, or remove the step", undo)
	case f.Undo != "":
		c.undos[undo] = true
	}
	return nil
}

// ordered refuses steps that would race with a running worker.
func (c *checker) ordered(st Step) error {
	if c.delivered != "" && (st.Verb != verbRun || st.Target != c.delivered) {
		return fmt.Errorf("what %s sent has just been delivered, and this step would race with it; add a run of %s first", c.delivered, c.delivered)
	}
	if injections[st.Verb].process != nil && c.running[st.Target] != "" {
		return fmt.Errorf("the worker doesn't stop at %q, so the %s may hit it anywhere; add a run first", c.running[st.Target], st.Verb)
	}
	if st.Verb == verbRun && !c.started[st.Target] {
		for name, at := range c.running {
			if at == history.Held {
				return fmt.Errorf("%s is already waiting for the lock, so either may get it; add a run of %s first", name, name)
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
		return fmt.Errorf("unknown report %q; the reports are %v", st.Until, reports)
	case in(history.Frozen):
		return errors.New("the worker is frozen; resume it first")
	case st.Until == history.Sent && !in(history.Delayed):
		return errors.New("the write's answer may come before this report; add a hold first")
	}
	c.started[st.Target] = true
	c.done[st.Target] = st.Until == history.Done
	c.delivered = ""
	delete(c.running, st.Target)
	if st.Until == history.Held || st.Until == history.Sent {
		c.running[st.Target] = st.Until
	}
	w := c.scenario.Workers[st.Target]
	option := map[string]string{
		history.Held: "try", history.Checked: "check", history.LostLease: "check", history.Lost: "outlive",
		history.ReleaseGap: "get-then-del",
	}[st.Until]
	if set := w.flags()[option]; set != nil && !*set {
		return fmt.Errorf("the worker never reports that; add %q to its line: worker %s %[1]s", option, st.Target)
	}
	return nil
}

func isDuration(s string) bool {
	d, err := time.ParseDuration(s)
	return err == nil && d != 0
}

func (c *checker) fault(st Step, f history.Fault) error {
	before := c.inForce[st.Target]
	if what := undone(st.Verb); what != nil {
		c.inForce[st.Target] = slices.DeleteFunc(slices.Clone(before), func(f history.Fault) bool {
			if f.Undo == st.Verb && f.State == history.Delayed && c.running[st.Target] == history.Sent {
				c.delivered = st.Target
			}
			return f.Undo == st.Verb
		})
		if len(c.inForce[st.Target]) == len(before) {
			return fmt.Errorf("there is no %s of %s before this step; add one, or remove the step", strings.Join(what, " or "), st.Target)
		}
		return nil
	}
	twice := slices.ContainsFunc(before, func(o history.Fault) bool { return o.Name == f.Name })
	switch {
	case injections[st.Verb].process != nil && st.Target != Resource && !c.started[st.Target]:
		return errors.New("the worker hasn't started by then; add a run first")
	case twice && !f.From: // those may be from other servers
		return fmt.Errorf("there is no %s of %s before this step; add one, or remove the step", f.Undo, st.Target)
	case f.State == history.Down && st.Target != Resource:
		c.done[st.Target] = true
		delete(c.inForce, st.Target)
		return nil
	}
	c.inForce[st.Target] = append(before, f)
	return nil
}
