// Package scenarios shows, on real servers, how locks fail and what fencing does about it.
//
// A [Scenario] is a value: a schedule of steps for worker processes that do a read-modify-write of a ledger under a lock.
// A worker stops at named checkpoints and goes on when told, so that faults are placed by happens-before: "A has read"
// comes before "A is frozen" comes before "B has the lock", run after run. Expiry is observed, by the next worker's being
// granted the lock, and not slept through. A [Runner] plays a scenario, records its history, and package history judges it.
//
// The workers and the resource are processes of their own: the running binary, started again. A test binary or a main
// hands over to them by calling [Child] first.
package scenarios

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/fencelab/fencelab/scenarios/history"
)

// Resource is the target of steps that act on the resource's process.
const Resource = "resource"

// controller is the actor of what the Runner does.
const controller = "controller"

// Scenario is one way in which a lock fails.
type Scenario struct {
	Name   string `json:"name"`   // what happens; also the name of the test
	Hazard string `json:"hazard"` // the same as a sentence

	// Workers says how workers differ from the plain one. Workers that only appear in Steps are plain.
	Workers map[string]Worker `json:"workers,omitempty"`
	Steps   []Step            `json:"steps"`

	// MinTTL raises the victim's lease to at least this, where the victim must reach the fault with its lease alive: it
	// then takes a stall as long as that, on top of the renewals, to spoil the run.
	MinTTL history.Duration `json:"min_ttl,omitempty"`

	// Expect is the verdict for each fencing mode in which the scenario makes sense.
	Expect map[history.Fencing]history.Verdict `json:"expect"`
}

// Worker says how a worker does its job. The zero Worker has a lease that outlives every run, and renews it.
type Worker struct {
	// Victim gives the worker the run's TTL, so that its lease can end while others wait.
	Victim bool `json:"victim,omitempty"`
	// NoRenew leaves the lease to itself; otherwise it is renewed in the background while the worker runs, so that only
	// a real freeze can end it.
	NoRenew bool `json:"no_renew,omitempty"`
	// Check makes the worker look at its lease right before it writes, and give up if it is lost.
	Check bool `json:"check,omitempty"`
	// Try makes the worker ask for the lock without waiting first, and report whether it was held.
	Try bool `json:"try,omitempty"`
	// GetThenDel makes the worker release with GET and DEL, and a gap between them, instead of the lock's own release.
	GetThenDel bool `json:"get_then_del,omitempty"`
}

// Op is what a [Step] does.
type Op string

// The operations of a schedule.
const (
	OpRun     Op = "run"     // start Target or let it go on, until it reports Until
	OpPause   Op = "pause"   // freeze Target with SIGSTOP
	OpResume  Op = "resume"  // end that, at the earliest after the Runner's Pause
	OpHold    Op = "hold"    // hold in the network what Target sends to the resource
	OpDeliver Op = "deliver" // deliver it, at the earliest after the Runner's Pause
	OpKill    Op = "kill"    // kill the resource with SIGKILL
	OpRestart Op = "restart" // start it again on the same data
)

// Step is one step of a schedule. It is over when what it does has happened.
type Step struct {
	Op     Op     `json:"op"`
	Target string `json:"target"`
	Until  string `json:"until,omitempty"` // of run: the name of a report, see package history
}

// Run lets worker go on until it reports until. Where a worker stops is decided by the schedule: it waits at each
// checkpoint that it reports, and goes on when it is run again.
func Run(worker, until string) Step { return Step{OpRun, worker, until} }

// Pause freezes worker.
func Pause(worker string) Step { return Step{Op: OpPause, Target: worker} }

// Resume ends worker's freeze.
func Resume(worker string) Step { return Step{Op: OpResume, Target: worker} }

// Hold holds in the network what worker sends to the resource from now on.
func Hold(worker string) Step { return Step{Op: OpHold, Target: worker} }

// Deliver delivers what is held of worker's.
func Deliver(worker string) Step { return Step{Op: OpDeliver, Target: worker} }

// Kill kills the resource's process.
func Kill() Step { return Step{Op: OpKill, Target: Resource} }

// Restart starts the resource again.
func Restart() Step { return Step{Op: OpRestart, Target: Resource} }

// Decode reads a scenario from JSON and checks it.
func Decode(r io.Reader) (Scenario, error) {
	var s Scenario
	dec := json.NewDecoder(r)
	dec.DisallowUnknownFields()
	if err := dec.Decode(&s); err != nil {
		return s, fmt.Errorf("scenarios: %w", err)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return s, errors.New("scenarios: something follows the scenario; put each scenario in a file of its own")
	}
	return s, s.Check()
}

// workers returns the names of the workers, in the order of their first step.
func (s *Scenario) workers() []string {
	var names []string
	for _, st := range s.Steps {
		if st.Target != Resource && !slices.Contains(names, st.Target) {
			names = append(names, st.Target)
		}
	}
	return names
}

// Check returns an error that says what is wrong with the scenario, or nil.
func (s *Scenario) Check() error {
	var errs []error
	bad := func(format string, args ...any) { errs = append(errs, fmt.Errorf(format, args...)) }
	if err := checkName(s.Name); err != nil {
		bad("its name %w", err)
	}
	if len(s.Steps) == 0 {
		bad("it has no steps")
	}
	if s.MinTTL < 0 {
		bad("min_ttl is %v; it must not be negative", time.Duration(s.MinTTL))
	}
	for f, v := range s.Expect {
		if !slices.Contains(modes, f) {
			bad("it expects something of fencing mode %q; there are %v", f, modes)
		}
		if v == history.Inconclusive {
			bad("it expects fencing %s to be inconclusive, which never passes; leave that mode out", f)
		}
	}
	names := s.workers()
	for name := range s.Workers {
		if !slices.Contains(names, name) {
			bad("worker %q has no step; add one, or remove the worker", name)
		}
	}
	c := checker{
		paused: map[string]bool{}, held: map[string]bool{}, killed: map[string]bool{},
		started: map[string]bool{}, done: map[string]bool{},
		loose: map[string]string{},
	}
	for i, st := range s.Steps {
		if err := c.step(st); err != nil {
			bad("step %d, %s %s: %w", i+1, st.Op, st.Target, err)
		}
	}
	for _, name := range names {
		switch {
		case c.paused[name]:
			bad("%s is still paused at the end; add a resume", name)
		case c.held[name]:
			bad("what %s sends is still held at the end; add a deliver", name)
		case !c.done[name]:
			bad("%s doesn't finish; add a run until %q", name, history.Done)
		}
	}
	if c.killed[Resource] {
		bad("the resource is still dead at the end; add a restart")
	}
	if len(errs) > 0 {
		return fmt.Errorf("scenarios: scenario %q: %w", s.Name, errors.Join(errs...))
	}
	return nil
}

// modes are the fencing modes.
var modes = []history.Fencing{history.FencingOff, history.FencingWrites, history.FencingOn}

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
	paused, held, killed, started, done map[string]bool

	loose map[string]string // workers that were run until a report at which they don't stop, and that report
	next  string            // the worker whose delivered write is on its way
}

// ordered returns an error if what st does and what a worker does that is running would happen in either order.
func (c *checker) ordered(st Step) error {
	if c.next != "" && (st.Op != OpRun || st.Target != c.next) {
		return fmt.Errorf("what %s sent has just been delivered, and this step would race with it; add a run of %s before", c.next, c.next)
	}
	if st.Op == OpPause && c.loose[st.Target] != "" {
		return fmt.Errorf("the worker doesn't stop at %q, so where it freezes is left to chance; add a run before", c.loose[st.Target])
	}
	if st.Op == OpRun && !c.started[st.Target] {
		for name, at := range c.loose {
			if at == history.Held {
				return fmt.Errorf("%s waits for the lock already, and who gets it is left to chance; add a run of %s before", name, name)
			}
		}
	}
	return nil
}

// reports are the reports up to which a worker can be run.
var reports = []string{
	history.Held, history.Acquired, history.Read, history.BeforeWrite, history.Checked, history.Sent, history.Wrote,
	history.WriteStale, history.ReadStale, history.LostLease, history.ReleaseGap, history.Released, history.ReleaseLost,
	history.ReleaseForeign, history.Done,
}

func (c *checker) step(st Step) error {
	if resource := st.Target == Resource; resource != (st.Op == OpKill || st.Op == OpRestart) {
		return errors.New("kill and restart are for the resource, all other operations are for workers")
	}
	switch {
	case checkName(st.Target) != nil:
		return fmt.Errorf("its target %w", checkName(st.Target))
	case st.Target == controller:
		return fmt.Errorf("%s is what a history calls the runner; choose another name", controller)
	case st.Op != OpRun && st.Until != "":
		return errors.New("only a run has an until; remove it")
	case c.done[st.Target]:
		return errors.New("the worker is done by then; remove the step, or put it before")
	case st.Op != OpRun && st.Op != OpHold && st.Target != Resource && !c.started[st.Target]:
		return errors.New("the worker isn't started by then; add a run before")
	}
	if err := c.ordered(st); err != nil {
		return err
	}
	switch st.Op {
	case OpRun:
		if !slices.Contains(reports, st.Until) {
			return fmt.Errorf("until %q is no report; there are %v", st.Until, reports)
		}
		if c.paused[st.Target] {
			return errors.New("the worker is paused; add a resume before")
		}
		if st.Until == history.Sent && !c.held[st.Target] {
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
	case OpPause, OpResume:
		return toggle(c.paused, st, OpPause, OpResume)
	case OpHold, OpDeliver:
		if st.Op == OpDeliver && c.loose[st.Target] == history.Sent {
			c.next = st.Target
		}
		return toggle(c.held, st, OpHold, OpDeliver)
	case OpKill, OpRestart:
		return toggle(c.killed, st, OpKill, OpRestart)
	}
	return fmt.Errorf("there is no operation %q; there are %v", st.Op,
		[]Op{OpRun, OpPause, OpResume, OpHold, OpDeliver, OpKill, OpRestart})
}

// toggle is a step that is on or off, which must take turns.
func toggle(m map[string]bool, st Step, on, off Op) error {
	if m[st.Target] == (st.Op == on) {
		other := on
		if st.Op == on {
			other = off
		}
		return fmt.Errorf("there is no %s of %s before; add one, or remove the step", other, st.Target)
	}
	m[st.Target] = st.Op == on
	return nil
}
