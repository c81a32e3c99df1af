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

	"github.com/fencelab/fencelab/scenarios/history"
)

// Resource is the target of steps that act on the resource's process.
const Resource = "resource"

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
	OpDeliver Op = "deliver" // deliver it
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
	if s.Name == "" {
		bad("it has no name")
	}
	names := s.workers()
	for name := range s.Workers {
		if !slices.Contains(names, name) {
			bad("worker %q has no step", name)
		}
	}
	c := checker{paused: map[string]bool{}, held: map[string]bool{}, started: map[string]bool{}, done: map[string]bool{}}
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
	if c.killed {
		bad("the resource is still dead at the end; add a restart")
	}
	if len(errs) > 0 {
		return fmt.Errorf("scenarios: scenario %q: %w", s.Name, errors.Join(errs...))
	}
	return nil
}

// checker walks a schedule without running it.
type checker struct {
	paused, held, started, done map[string]bool
	killed                      bool
}

// reports are the reports up to which a worker can be run.
var reports = []string{
	history.Held, history.Acquired, history.Read, history.BeforeWrite, history.Checked, history.Sent, history.Wrote,
	history.WriteStale, history.ReadStale, history.LostLease, history.ReleaseGap, history.Released, history.ReleaseLost,
	history.ReleaseForeign, history.Done,
}

func (c *checker) step(st Step) error {
	if resource := st.Target == Resource; resource != (st.Op == OpKill || st.Op == OpRestart) {
		return errors.New("kill and restart are for the resource, everything else is for workers")
	}
	switch {
	case st.Target == "":
		return errors.New("it has no target")
	case st.Op != OpRun && st.Until != "":
		return errors.New("only run has an until")
	case c.done[st.Target]:
		return errors.New("the worker is done by then")
	case st.Op != OpRun && st.Op != OpHold && st.Target != Resource && !c.started[st.Target]:
		return errors.New("the worker isn't started by then")
	}
	switch st.Op {
	case OpRun:
		if !slices.Contains(reports, st.Until) {
			return fmt.Errorf("until %q is no report; there are %v", st.Until, reports)
		}
		if c.paused[st.Target] {
			return errors.New("the worker is paused; add a resume")
		}
		c.started[st.Target] = true
		c.done[st.Target] = st.Until == history.Done
	case OpPause, OpResume:
		return toggle(c.paused, st.Target, st.Op == OpPause)
	case OpHold, OpDeliver:
		return toggle(c.held, st.Target, st.Op == OpHold)
	case OpKill, OpRestart:
		if c.killed == (st.Op == OpKill) {
			return errors.New("it is so already")
		}
		c.killed = st.Op == OpKill
	default:
		return fmt.Errorf("there is no such operation")
	}
	return nil
}

func toggle(m map[string]bool, name string, on bool) error {
	if m[name] == on {
		return errors.New("it is so already")
	}
	m[name] = on
	return nil
}
