package explore

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
)

// Hazard converts a schedule to a hazard, which a [scenarios.Runner] can run on real servers: the order in which workers reach
// their checkpoints, and the faults between them. What a hazard can't express is left out. Workers, steps, verdicts and traces of
// about are replaced, for the fencing modes in which [System.Play] can run the steps. If the hazard isn't violated in the
// System's mode, the error says why, and what was left out.
func (sys *System) Hazard(t *testing.T, s Schedule, about scenarios.Scenario) (scenarios.Scenario, error) {
	t.Helper()
	b := &hazardBuilder{frozen: map[string]bool{}}
	about.Steps, about.Workers, about.MinTTL = nil, map[string]scenarios.Worker{}, 0
	b.Scenario = &about
	sys.inBubble(t, func(w *world) {
		w.builder = b
		w.serve(history.Run{TokensLost: true})
		for _, st := range s {
			w.step(st)
			w.pass(settle)
		}
		if !w.finish(w.liftFaults()) {
			b.omit("that a worker waits for ever")
		}
		w.close()
	})
	b.rename()
	if err := about.Check(); err != nil {
		return about, err
	}
	about.Expect, about.Traces = map[history.Fencing]history.Verdict{}, map[string]string{}
	why := map[history.Fencing]error{}
	for _, f := range []history.Fencing{history.FencingOff, history.FencingWrites, history.FencingOn} {
		events, err := sys.Play(t, about, f)
		if err != nil { // a refused worker doesn't report what an accepted one does
			why[f] = fmt.Errorf("Play can't run it: %w", err)
			continue
		}
		v := history.Judge(events).Verdict
		if v != history.Inconclusive {
			about.Expect[f], about.Traces[string(f)] = v, strings.Join(history.Trace(events), "\n")+"\n"
		}
		if v != history.Violated {
			why[f] = fmt.Errorf("the scenario is %v", v)
		}
	}
	if f := cmp.Or(sys.Fencing, history.FencingOn); why[f] != nil {
		return about, fmt.Errorf("explore: with fencing %s %w; it lacks %s", f, why[f], cmp.Or(strings.Join(b.omitted, ", "), "nothing"))
	}
	return about, nil
}

type hazardBuilder struct {
	*scenarios.Scenario
	frozen  map[string]bool
	omitted []string // what a hazard can't express
}

func (b *hazardBuilder) omit(what string) bool {
	b.omitted = append(b.omitted, what)
	return false
}

func (b *hazardBuilder) run(actor, until string) {
	if n := len(b.Steps); n == 0 || b.Steps[n-1].Verb != "run" || b.Steps[n-1].Target != actor {
		b.Steps = append(b.Steps, scenarios.Step{Verb: "run", Target: actor})
	}
	b.Steps[len(b.Steps)-1].Until = until
}

func (b *hazardBuilder) fault(k *worker, verb string) {
	b.Steps = append(b.Steps, scenarios.Step{Verb: verb, Target: k.actor})
}

// step reports whether a hazard can express a step, and records it.
func (b *hazardBuilder) step(k *worker, st Step) bool {
	between := k.busy == "" && k.lease != nil && !k.dead
	switch v := st.Verb; {
	case v == Run, v == Mend: // liftFaults calls Mend too
	case v == Release && (!between || k.at != "read"): // a hazard's worker that reads also writes
	case v == Resume:
		if k.client.isFrozen() {
			b.fault(k, "resume")
			b.frozen[k.actor] = false
		}
	case v == Deliver:
		if k.sent != nil {
			b.fault(k, "deliver")
		}
	case v == Pause && between && st.N == 0:
		if !k.client.isFrozen() {
			b.fault(k, "pause")
			b.frozen[k.actor] = true
		}
	case v == Pause && between && st.N == 1 && k.sys.Gap && k.at == "write": // see call
	case v == Kill && between:
		b.fault(k, "kill")
		b.frozen[k.actor] = true
	case v == Late && between && k.at == "read":
		if !k.late {
			b.fault(k, "hold")
		}
	default:
		return b.omit(st.String())
	}
	return true
}

func (b *hazardBuilder) call(k *worker, what string) {
	if what != "release" {
		return
	}
	w := b.Workers[k.actor]
	w.Idle = k.at == ""
	if k.client.freeze == 1 && !w.Idle {
		w.GetThenDel = true
		b.MinTTL = history.Duration(3 * time.Second) // it must hold the lock until then, even on a machine that stalls
		b.run(k.actor, history.ReleaseGap)
		b.fault(k, "pause")
		b.frozen[k.actor] = true
	}
	b.Workers[k.actor] = w
}

// finish makes a holder do its next call: first all read, then one by one they write and release.
func (b *hazardBuilder) finish(workers []*worker) {
	var next *worker
	for _, k := range workers {
		if k.busy == "" && k.lease != nil && (next == nil || k.at == "" && next.at != "") {
			next = k
		}
	}
	if next != nil {
		next.call(Run)
	}
}

func (b *hazardBuilder) report(k *worker, name string) {
	switch name {
	case history.Failed:
		b.omit("that a call fails")
	case history.Acquired:
		for _, other := range k.workers {
			if other == nil || other == k || other.lease == nil || other.lease.Until().After(time.Now()) {
				continue
			}
			if frozen, holds := b.frozen[other.actor]; holds {
				w := b.Workers[other.actor]
				w.Victim, w.NoRenew = true, w.NoRenew || !frozen
				b.Workers[other.actor] = w
			}
		}
		b.frozen[k.actor] = false
	case history.Released, history.ReleaseLost, history.ReleaseForeign:
		delete(b.frozen, k.actor)
		name = history.Done
	}
	b.run(k.actor, name)
}

// rename names the workers A, B and so on, in the order of their first step. A2 is A's second grant.
func (b *hazardBuilder) rename() {
	names := map[byte]string{}
	rename := func(name string) string {
		if names[name[0]] == "" {
			names[name[0]] = string(rune('A' + len(names)))
		}
		if name[1:] == "1" {
			return names[name[0]]
		}
		return names[name[0]] + name[1:]
	}
	for i := range b.Steps {
		b.Steps[i].Target = rename(b.Steps[i].Target)
	}
	workers := map[string]scenarios.Worker{}
	for name, w := range b.Workers {
		if w != (scenarios.Worker{}) {
			workers[rename(name)] = w
		}
	}
	b.Workers = workers
}

// Play runs a hazard in virtual time, as a [scenarios.Runner] does with processes, and returns its history. The lock's servers
// are named redis, or redis1 to redis5. If Play lacks an option or a fault, the error matches errors.ErrUnsupported.
func (sys *System) Play(t *testing.T, s scenarios.Scenario, f history.Fencing) (events []history.Event, err error) {
	t.Helper()
	in := *sys
	in.Fencing = f
	in.inBubble(t, func(w *world) {
		w.roles = map[string]scenarios.Worker{}
		var names []string
		for _, st := range s.Steps {
			if st.Verb == "run" && !slices.Contains(names, st.Target) {
				names = append(names, st.Target)
				w.roles[st.Target] = s.Workers[st.Target]
			}
		}
		if len(names) > len(w.workers) {
			err = fmt.Errorf("%d workers: %w", len(names), errors.ErrUnsupported)
			return
		}
		w.serve(history.Run{Scenario: s.Name, TokensLost: s.TokensLost, Workers: names})
		for i, name := range names {
			role := w.roles[name]
			missing := role.GetThenDel && !sys.Gap
			role.Victim, role.NoRenew, role.Idle, role.Check, role.GetThenDel = false, false, false, false, false
			if missing || role != (scenarios.Worker{}) {
				err = errors.Join(err, fmt.Errorf("worker %s: %w", name, errors.ErrUnsupported))
				continue
			}
			w.mu.Lock()
			w.addWorker(i, name)
			w.mu.Unlock()
		}
		for i, st := range s.Steps {
			if err == nil {
				if err = w.runStep(st); err != nil {
					err = fmt.Errorf("step %d, %v: %w", i+1, st, err)
				}
			}
		}
		w.mu.Lock()
		refused := 0
		for _, e := range w.events {
			if e.Kind == history.KindDecision && !e.Accepted {
				refused++
			}
		}
		rec, _ := w.data.Read(t.Context(), key)
		w.add(history.Event{
			Kind: history.KindFinal, Key: key, Value: string(rec.Value), Seen: rec.MaxFence.Token, SeenSeq: rec.MaxFence.Seq, Refusals: refused,
		})
		w.add(history.Event{Kind: history.KindEnd})
		events = w.events
		for _, k := range w.workers {
			if k != nil && k.gap != nil {
				close(k.gap)
			}
		}
		w.mu.Unlock()
		w.close()
	})
	return events, err
}

func (w *world) addWorker(i int, name string) {
	role := w.roles[name]
	ttl := 10 * time.Minute
	if role.Victim {
		ttl = w.sys.TTL
	}
	k := &worker{world: w, name: name}
	var gap func() error
	if role.GetThenDel {
		gap = func() error {
			w.mu.Lock()
			k.event(history.ReleaseGap, nil)
			resumed := make(chan struct{})
			k.gap = resumed
			w.mu.Unlock()
			<-resumed
			return nil
		}
	}
	k.process = w.process(i, ttl, gap)
	w.workers[i] = k
}

func (w *world) runStep(st scenarios.Step) error {
	var k *worker
	i := slices.IndexFunc(w.workers[:], func(k *worker) bool { return k != nil && k.name == st.Target })
	if i >= 0 {
		k = w.workers[i]
	}
	if st.Verb == "run" {
		return w.runUntil(k, st.Until)
	}
	names := st.From
	if k == nil {
		names = []string{st.Target}
	}
	var servers []int
	for _, name := range names {
		n, ok := w.sys.server(name)
		if !ok {
			return fmt.Errorf("%s has no server %q: %w", w.sys.Name, name, errors.ErrUnsupported)
		}
		servers = append(servers, n)
	}
	if len(servers) == 0 {
		servers = []int{All}
	}
	var do []Step
	switch verb := map[string]Verb{
		"pause": Pause, "resume": Resume, "kill": Kill, "hold": Late, "deliver": Deliver, "cut": Cut, "refuse": Cut, "mend": Mend,
	}[st.Verb]; {
	case k != nil && verb == Cut:
		for _, n := range servers {
			do = append(do, Step{Verb: Cut, Worker: i, Server: n})
		}
	case k != nil && verb != "":
		do = append(do, Step{Verb: verb, Worker: i})
	case k == nil && (st.Verb == "jump" || st.Verb == "wipe"):
		d, err := time.ParseDuration(cmp.Or(st.Detail, "0s"))
		if err != nil {
			return err
		}
		for n := range w.servers {
			if servers[0] == All || servers[0] == n {
				do = append(do, Step{Verb: Verb(st.Verb), Server: n, For: d})
			}
		}
	default:
		return fmt.Errorf("no %s of %s: %w", st.Verb, st.Target, errors.ErrUnsupported)
	}
	event := func() {
		w.mu.Lock()
		w.add(history.Event{Kind: history.KindFault, Name: st.Verb, Target: st.Target, Peers: st.From, Detail: st.Detail})
		w.mu.Unlock()
	}
	undoes := slices.ContainsFunc(history.Faults, func(f history.Fault) bool { return f.Undo == st.Verb })
	if undoes {
		event() // before the target's next events
	}
	for _, st := range do {
		w.apply(st)
	}
	w.pass(settle)
	if !undoes {
		event()
	}
	return nil
}

func (sys *System) server(name string) (n int, ok bool) {
	switch name {
	case "redis":
		return 0, sys.Servers == 1
	case scenarios.LockService:
		return All, true
	}
	digits, ok := strings.CutPrefix(name, "redis")
	n, err := strconv.Atoi(digits)
	return n - 1, ok && err == nil && 1 <= n && n <= sys.Servers
}

func (w *world) runUntil(k *worker, report string) error {
	w.mu.Lock()
	from := len(w.events)
	if k.gap != nil {
		close(k.gap)
		k.gap = nil
	}
	w.mu.Unlock()
	for began := time.Now(); time.Since(began) < 4*w.sys.TTL; w.pass(w.sys.TTL/20 + settle) {
		for again := true; again; {
			w.mu.Lock()
			reported := func(name string) bool {
				return slices.ContainsFunc(w.events[from:], func(e history.Event) bool { return e.Actor == k.name && e.Name == name })
			}
			switch {
			case reported(report):
				w.mu.Unlock()
				return nil
			case reported(history.Failed), reported(history.Done), k.dead:
				w.mu.Unlock()
				return fmt.Errorf("%s ended before", k.name)
			}
			again = k.busy == ""
			switch {
			case !again:
			case (report == history.BeforeWrite || report == history.Checked) && k.lease != nil && k.at == "read" && !k.announced:
				k.event(history.BeforeWrite, func(e *history.Event) { e.Value = history.Append(k.ledger, k.name) })
				k.announced = true
			case w.roles[k.name].Check && k.announced && k.lease.Context().Err() == nil && !reported(history.Checked):
				k.event(history.Checked, nil)
			case w.roles[k.name].Idle && k.lease != nil:
				k.call(Release)
			default:
				k.call(Run)
			}
			w.mu.Unlock()
			if again {
				w.pass(settle)
			}
		}
	}
	return fmt.Errorf("%s has not reported %q", k.name, report)
}
