package model

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"

	"github.com/fencelab/fencelab/scenarios/history"
)

// Replay follows a history, perhaps incomplete at its end, as the set of possible states after each event. It returns the
// breaches common to all possible runs, or an error that names the event that the model forbids.
func (c Config) Replay(events []history.Event) (Breach, error) {
	if len(events) == 0 || events[0].Run == nil {
		return 0, fmt.Errorf("event 1: the first event doesn't say what was run")
	}
	c.Fencing, c.Regress = events[0].Run.Fencing, events[0].Run.TokensLost
	c.Writes = math.MaxInt
	r := replay{Config: c}
	keys, entries, tokens := map[string]bool{}, map[string]bool{}, map[uint64]bool{0: true}
	for _, e := range events {
		switch {
		case e.Kind == history.KindDecision, e.Kind == history.KindFinal:
			keys[e.Key] = true
			r.hasTokens = r.hasTokens || e.Token != 0
		case e.Name == history.Acquired:
			tokens[e.Token] = true
		}
		if held := history.Entries(e.Value); len(held) > 0 && (e.Op == "write" || e.Name == history.BeforeWrite) {
			entries[held[len(held)-1]] = true
		}
	}
	if len(keys) == 0 {
		keys[""] = true
	}
	r.Entries, r.tokens, r.alone = slices.Sorted(maps.Keys(entries)), slices.Sorted(maps.Keys(tokens)), len(keys) == 1
	r.Tokens = len(tokens) - 1
	var broken Breach
	for _, r.key = range slices.Sorted(maps.Keys(keys)) {
		b, err := r.follow(events)
		if err != nil {
			return 0, err
		}
		broken |= b
	}
	if !r.hasTokens {
		broken &^= StaleWrite
	}
	return broken, nil
}

type replay struct {
	Config
	key       string
	alone     bool     // the only key: workers' reports are about it
	hasTokens bool     // the store got tokens
	tokens    []uint64 // the model uses their ranks
	workers   []string
	ended     []string
}

// point is a possible state, with replies that workers have not reported yet.
type point struct {
	State
	unreported [MaxWorkers]Verb
}

func (p *point) key() string {
	key := []byte(p.State.key(true))
	for _, v := range p.unreported {
		key = append(append(key, v...), '\n')
	}
	return string(key)
}

func (r *replay) follow(events []history.Event) (Breach, error) {
	points := map[string]point{"": {}}
	r.workers, r.ended = nil, nil
	for i := range events {
		next := map[string]point{}
		for _, p := range points {
			r.explain(&events[i], p, next)
		}
		if len(next) == 0 {
			lines := history.Trace(events[:i+1])
			return 0, fmt.Errorf("event %d: %s", i+1, strings.TrimSpace(lines[len(lines)-1]))
		}
		points = next
		switch e := &events[i]; {
		case e.Kind == history.KindReport && (e.Name == history.Done || e.Name == history.Failed):
			r.ended = append(r.ended, e.Actor)
		case kills(e):
			r.ended = append(r.ended, e.Target)
		}
	}
	broken := ^Breach(0)
	for _, p := range points {
		broken &= p.Broken
	}
	return broken, nil
}

func kills(e *history.Event) bool {
	f, _ := history.FaultNamed(e.Name)
	return e.Kind == history.KindFault && f.State == history.Down
}

// explain adds to next the states that e may lead to from p. Expiry and sending happen without an event, but only when they
// matter: before a grant or a release, and before a decision.
func (r *replay) explain(e *history.Event, p point, next map[string]point) {
	after := p // possible clears the reply that e reports
	ok, wanted := r.possible(e, &after)
	if wanted == nil {
		if ok {
			next[after.key()] = after
		}
		return
	}
	r.Workers, r.Grants = min(len(r.workers), MaxWorkers), 0 // other workers and grants do not matter
	if e.Name == history.Acquired {
		r.Grants = math.MaxInt
	}
	for _, step := range r.Next(p.State) {
		q := p
		q.State = step.State
		if step.Verb == Expire && e.Kind == history.KindReport || step.Verb == Send && e.Kind == history.KindDecision {
			r.explain(e, q, next)
		}
		if !ok || !wanted(&step) {
			continue
		}
		if i := step.Worker; i >= 0 && !step.ReplyLost {
			q.unreported[i] = step.Verb
			if step.Verb == Refuse && q.Workers[i].Phase == Ready { // the repeat of an accepted write
				q.unreported[i] = Accept
			}
		}
		next[q.key()] = q
	}
}

// possible reports whether e can happen at p, and as which steps; nil: it changes nothing.
func (r *replay) possible(e *history.Event, p *point) (ok bool, wanted func(*Step) bool) {
	token, seen := slices.Index(r.tokens, e.Token), slices.Index(r.tokens, e.Seen)
	remembers := !r.hasTokens || p.Seen == Fence{seen, int(e.SeenSeq)}
	switch e.Kind {
	case history.KindRun, history.KindDoubt, history.KindEnd:
		return true, nil
	case history.KindReport:
		return r.report(e, p, token)
	case history.KindFault:
		if kills(e) && e.Target == "resource" {
			wanted = func(s *Step) bool { return s.Verb == Crash }
		}
		return true, wanted
	case history.KindFinal:
		return e.Key != r.key || e.Value == p.Value && remembers, nil
	case history.KindDecision:
		if e.Key != r.key {
			return true, nil
		}
		read := e.Op == "read"
		fenced := r.Fencing == history.FencingOn || r.Fencing == history.FencingWrites && !read
		verbs := map[string][2]Verb{"read": {ReadRefused, Read}, "write": {Refuse, Accept}}[e.Op]
		verb := verbs[map[bool]int{true: 1}[e.Accepted]]
		return remembers && e.Enforced == fenced && (e.Token != 0 || !fenced), func(s *Step) bool {
			carried := s.Fence.Token == token && (read || s.Fence.Seq == int(e.Seq)) || e.Token == 0 && (read || !r.hasTokens)
			return s.Verb == verb && carried && (s.Value == e.Value || verb == ReadRefused)
		}
	}
	return false, nil
}

func (r *replay) report(e *history.Event, p *point, token int) (ok bool, wanted func(*Step) bool) {
	i := slices.Index(r.workers, e.Actor)
	if i < 0 {
		i = len(r.workers)
		r.workers = append(r.workers, e.Actor)
	}
	if i >= MaxWorkers || slices.Contains(r.ended, e.Actor) {
		return false, nil
	}
	w := p.Workers[i]
	holds := w.Phase != Idle
	if holds && e.Token != 0 && token != w.Fence.Token {
		return false, nil
	}
	does := func(v Verb) func(*Step) bool { return func(s *Step) bool { return s.Verb == v && s.Worker == i } }
	verb := map[string]Verb{history.Read: Read, history.ReadStale: ReadRefused, history.Wrote: Accept, history.WriteStale: Refuse}[e.Name]
	switch e.Name {
	case history.Done, history.Failed:
		return true, nil
	case history.Held:
		return p.Holder != 0, nil
	case history.Acquired:
		return true, func(s *Step) bool {
			return does(Acquire)(s) && (s.Fence.Token == token || e.Token == 0 && r.Fencing == history.FencingOff)
		}
	case history.Released: // a lock still held is released by way of Expire
		return p.Holder == 0, does(Release)
	case history.ReleaseLost:
		return p.Holder != w.Grant, does(Release)
	case history.ReleaseForeign:
		return p.Holder != w.Grant, func(s *Step) bool { return does(Release)(s) && s.State.Holder != p.Holder }
	case history.Checked, history.ReleaseGap, history.Lost, history.LostLease:
		return holds, nil
	case history.BeforeWrite, history.Sent, history.Read, history.ReadStale, history.Wrote, history.WriteStale:
		if !r.alone { // the report doesn't name its key
			return holds, nil
		}
	}
	switch e.Name {
	case history.BeforeWrite:
		return true, func(s *Step) bool { return does(Send)(s) && s.Value == e.Value }
	case history.Sent:
		return w.Phase == Waiting, nil
	}
	matches := verb != "" && p.unreported[i] == verb && (e.Value == w.Ledger || e.Value == "")
	p.unreported[i] = ""
	return matches, nil
}
