// Package scenarios shows, on real servers, how locks fail and what fencing does about it.
//
// A [Scenario] is a value: a schedule of steps for worker processes that do a read-modify-write of a ledger under a lock.
// A worker stops at named checkpoints and goes on when told, so that faults are placed by happens-before: "A has read"
// comes before "A is frozen" comes before "B has the lock", run after run. Expiry is observed, by the next worker's being
// granted the lock, and not slept through. A [Runner] plays a scenario, records its history, and package history judges it.
//
// The workers and the resource are processes of their own: the running binary, started again. A test binary or a main
// hands over to them by calling [Child] first, or [ChildWithStore].
//
// Both the lock and what it protects may be your own: [Open] opens any [Lock], and a [Store] any [resource.Store].
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

// LockService is the target of faults that hit every server of the lock's.
const LockService = "lock"

// Leader is the target of faults that hit the leader of the lock's cluster, and of what ends them: that is for the server that
// was hit last, whoever leads by then.
const Leader = "leader"

// VariantCounters asks for a Redlock whose token is the greatest of the counters of the nodes that granted it.
const VariantCounters = "counters"

// controller is the actor of what the Runner does.
const controller = "controller"

// Scenario is one way in which a lock fails.
type Scenario struct {
	Name   string `json:"name"`   // what happens; it names the recorded run
	Hazard string `json:"hazard"` // the same as a sentence

	// Locks are the locks that have the hazard, by the name of their Service; none: every lock has it.
	Locks []string `json:"locks,omitempty"`
	// Variant asks the lock's Open for a lock that is built wrongly in a certain way; see [LockSpec].
	Variant string `json:"variant,omitempty"`
	// TokensLost says that the hazard takes the lock's source of tokens back: that tokens go backwards is then what must
	// happen, and what the resource makes of it is judged.
	TokensLost bool `json:"tokens_lost,omitempty"`

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
	// Victim gives the worker the run's TTL, so that its lease can end while others wait. A run in which another is granted
	// the lock before that time is over is inconclusive, unless the victim has said that it released or lost it, or was
	// killed. A worker whose lease a fault of the server takes away is no victim.
	Victim bool `json:"victim,omitempty"`
	// NoRenew leaves the lease to itself; otherwise it is renewed in the background while the worker runs, so that only
	// a real freeze can end it.
	NoRenew bool `json:"no_renew,omitempty"`
	// Check makes the worker look at its lease right before it writes, and give up if it is lost.
	Check bool `json:"check,omitempty"`
	// Try makes the worker ask for the lock without waiting first, and report whether it was held.
	Try bool `json:"try,omitempty"`
	// Idle makes the worker take the lock and release it, and leave the resource alone.
	Idle bool `json:"idle,omitempty"`
	// Outlive makes the worker wait, before it writes, until its lease is lost, report that, and write all the same. If its
	// lease is renewed, it has been once before the worker says that it has it: what ends it later is the schedule.
	Outlive bool `json:"outlive,omitempty"`
	// MaxHold ends the renewals, that long after the grant. 0: no run is so long. A run in which another is granted the lock
	// before is inconclusive if the worker is a victim: its lease wasn't renewed.
	MaxHold history.Duration `json:"max_hold,omitempty"`
	// Second makes the worker append its entry to a second ledger after the first, under the same grant.
	Second bool `json:"second,omitempty"`
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
	OpKill    Op = "kill"    // kill Target, a worker or the resource, with SIGKILL
	OpRestart Op = "restart" // start the resource again on the same data
	OpCut     Op = "cut"     // let nothing pass between Target and the lock's servers in Servers, or all of them
	OpRefuse  Op = "refuse"  // the same, but connections fail at once
	OpMend    Op = "mend"    // end both
	OpFault   Op = "fault"   // do Fault to Target, a server of the lock's, or to LockService, all of them
)

// Step is one step of a schedule. It is over when what it does has happened.
type Step struct {
	Op     Op     `json:"op"`
	Target string `json:"target"`
	Until  string `json:"until,omitempty"` // of run: the name of a report, see package history

	Servers []string `json:"servers,omitempty"` // of cut and refuse: the lock's servers; none: all
	Fault   string   `json:"fault,omitempty"`   // of fault: its name, see package history
	Detail  string   `json:"detail,omitempty"`  // of fault: its size, where it has one
}

// Run lets worker go on until it reports until. Where a worker stops is decided by the schedule: it waits at each
// checkpoint that it reports, and goes on when it is run again.
func Run(worker, until string) Step { return Step{Op: OpRun, Target: worker, Until: until} }

// Pause freezes worker.
func Pause(worker string) Step { return Step{Op: OpPause, Target: worker} }

// Resume ends worker's freeze.
func Resume(worker string) Step { return Step{Op: OpResume, Target: worker} }

// Hold holds in the network what worker sends to the resource from now on.
func Hold(worker string) Step { return Step{Op: OpHold, Target: worker} }

// Deliver delivers what is held of worker's.
func Deliver(worker string) Step { return Step{Op: OpDeliver, Target: worker} }

// Kill kills the process of a worker or, with [Resource], of the resource.
func Kill(target string) Step { return Step{Op: OpKill, Target: target} }

// Restart starts the resource again.
func Restart() Step { return Step{Op: OpRestart, Target: Resource} }

// Cut cuts worker off from servers of the lock's, or from all of them: what is sent either way is lost, without a word.
func Cut(worker string, servers ...string) Step {
	return Step{Op: OpCut, Target: worker, Servers: servers}
}

// Refuse is [Cut], but connections between worker and the servers are closed and refused, so that it knows at once.
func Refuse(worker string, servers ...string) Step {
	return Step{Op: OpRefuse, Target: worker, Servers: servers}
}

// Mend ends all cuts of worker. Connections from before are closed.
func Mend(worker string) Step { return Step{Op: OpMend, Target: worker} }

// Fault does something to a server of the lock's: one of the names of faults in package history. Which of them can be
// done is the [Service]'s to say.
func Fault(server, fault string) Step { return Step{Op: OpFault, Target: server, Fault: fault} }

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
		if st.Target != Resource && st.Op != OpFault && !slices.Contains(names, st.Target) {
			names = append(names, st.Target)
		}
	}
	return names
}

// On reports whether the lock of that name has the hazard.
func (s *Scenario) On(lock string) bool { return len(s.Locks) == 0 || slices.Contains(s.Locks, lock) }

// Faulty reports whether the scenario needs faults of the lock's servers.
func (s *Scenario) Faulty() bool {
	return slices.ContainsFunc(s.Steps, func(st Step) bool { return st.Op == OpFault })
}

// has reports whether a step of the schedule does op to target.
func (s *Scenario) has(op Op, target string) bool {
	return slices.ContainsFunc(s.Steps, func(st Step) bool { return st.Op == op && st.Target == target })
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
	for name, w := range s.Workers {
		if w.MaxHold < 0 {
			bad("worker %s has a max_hold of %v; it must not be negative", name, time.Duration(w.MaxHold))
		}
	}
	c := checker{
		workers: names,
		paused:  map[string]bool{}, held: map[string]bool{}, killed: map[string]bool{}, cut: map[string]bool{},
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
	workers []string

	paused, held, killed, cut, started, done map[string]bool

	loose map[string]string // workers that were run until a report at which they don't stop, and that report
	next  string            // the worker whose delivered write is on its way
}

// ordered returns an error if what st does and what a worker does that is running would happen in either order.
func (c *checker) ordered(st Step) error {
	if c.next != "" && (st.Op != OpRun || st.Target != c.next) {
		return fmt.Errorf("what %s sent has just been delivered, and this step would race with it; add a run of %s before", c.next, c.next)
	}
	if (st.Op == OpPause || st.Op == OpKill) && c.loose[st.Target] != "" {
		return fmt.Errorf("the worker doesn't stop at %q, so where the %s hits it is left to chance; add a run before", c.loose[st.Target], st.Op)
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
	history.WriteStale, history.ReadStale, history.LostLease, history.Lost, history.ReleaseGap, history.Released, history.ReleaseLost,
	history.ReleaseForeign, history.Done,
}

func (c *checker) step(st Step) error {
	resource := st.Target == Resource
	switch {
	case st.Op == OpRestart && !resource || resource && st.Op != OpKill && st.Op != OpRestart:
		return errors.New("the resource can be killed and restarted, and nothing else can be restarted; all other operations are for " +
			"workers, and faults for the lock's servers")
	case st.Op != OpCut && st.Op != OpRefuse && st.Servers != nil:
		return errors.New("only a cut or a refuse has servers; remove them")
	case st.Op != OpFault && (st.Fault != "" || st.Detail != ""):
		return errors.New("only a fault has the name of one, and a detail; remove them")
	case st.Op == OpFault:
		return c.fault(st)
	case checkName(st.Target) != nil:
		return fmt.Errorf("its target %w", checkName(st.Target))
	case st.Target == controller:
		return fmt.Errorf("%s is what a history calls the runner; choose another name", controller)
	case st.Op != OpRun && st.Until != "":
		return errors.New("only a run has an until; remove it")
	case c.done[st.Target]:
		return errors.New("the worker is done by then; remove the step, or put it before")
	case st.Op != OpRun && st.Op != OpHold && st.Op != OpCut && st.Op != OpRefuse && !resource && !c.started[st.Target]:
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
	case OpKill:
		if resource {
			return toggle(c.killed, st, OpKill, OpRestart)
		}
		c.done[st.Target] = true
		c.paused[st.Target] = false
		return nil
	case OpRestart:
		return toggle(c.killed, st, OpKill, OpRestart)
	case OpCut, OpRefuse:
		c.cut[st.Target] = true // more than once, too: from other servers
		return nil
	case OpMend:
		return toggle(c.cut, st, OpCut, OpMend)
	case OpFault: // was looked at before
	}
	return fmt.Errorf("there is no operation %q; there are %v", st.Op,
		[]Op{OpRun, OpPause, OpResume, OpHold, OpDeliver, OpKill, OpRestart, OpCut, OpRefuse, OpMend, OpFault})
}

func (c *checker) fault(st Step) error {
	switch {
	case st.Fault == "":
		return errors.New("it doesn't say which fault; set its fault to the name of one")
	case st.Until != "":
		return errors.New("only a run has an until; remove it")
	case checkName(st.Target) != nil:
		return fmt.Errorf("its target %w", checkName(st.Target))
	case slices.Contains(c.workers, st.Target):
		return errors.New("a fault is for a server of the lock's, and this is a worker; pause it, kill it or cut it off")
	}
	return c.ordered(st)
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
