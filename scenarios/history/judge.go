package history

import (
	"fmt"
	"slices"
	"strings"
)

// Entries splits a ledger into its entries: one a line.
func Entries(ledger string) []string {
	return strings.FieldsFunc(ledger, func(r rune) bool { return r == '\n' })
}

// Append returns ledger with entry as its last line.
func Append(ledger, entry string) string { return ledger + entry + "\n" }

// fence is a decision's place in the order of fences.
type fence struct{ token, seq uint64 }

func (f fence) after(g fence) bool {
	return f.token > g.token || f.token == g.token && f.seq > g.seq
}

func (f fence) String() string {
	if f.seq == 1 {
		return fmt.Sprint(f.token)
	}
	return fmt.Sprintf("%d.%d", f.token, f.seq)
}

// Judge says what a history shows. It trusts nobody's opinion: it keeps its own account of the greatest fence and of the
// entries that must be there, from the resource's decisions in their order.
//
// Violated:
//   - a write was accepted whose fence was not greater than that of every write and fenced read accepted before it;
//   - an entry that was in an accepted write is missing from a later accepted write, or at the end;
//   - an entry is there twice, or is there although its write was refused;
//   - the resource forgot a fence that it had accepted.
//
// Inconclusive, if nothing is violated:
//   - the history is incomplete, or has events that the judge doesn't know;
//   - fewer than two grants, or no accepted write;
//   - no holder did anything after its successor's grant, so that the hazard never came about;
//   - a worker failed, or believes to have written what the resource didn't decide;
//   - the resource refused what the rule admits.
func Judge(events []Event) Result {
	j := judge{keys: map[string]*keyState{}, wrote: map[uint64]bool{}, accepted: map[uint64]bool{}}
	j.structure(events)
	for i := range events {
		j.event(&events[i])
	}
	j.end()
	switch {
	case len(j.violations) > 0:
		j.Verdict, j.Findings = Violated, j.violations
	case len(j.doubts) > 0:
		j.Verdict, j.Findings = Inconclusive, j.doubts
	default:
		j.Verdict = Safe
	}
	return j.Result
}

type judge struct {
	Result
	violations, doubts []string

	keys     map[string]*keyState
	grants   []uint64        // tokens, in the order of the grants
	wrote    map[uint64]bool // tokens under which a worker believes to have written
	accepted map[uint64]bool // tokens under which the resource accepted a write
	late     bool            // a holder acted after its successor's grant
}

type keyState struct {
	max     fence
	entries []string // of the last accepted write
	known   bool     // there was one
	final   bool
}

func (j *judge) violate(format string, args ...any) {
	j.violations = append(j.violations, fmt.Sprintf(format, args...))
}

func (j *judge) doubt(format string, args ...any) {
	j.doubts = append(j.doubts, fmt.Sprintf(format, args...))
}

func (j *judge) note(format string, args ...any) {
	j.Notes = append(j.Notes, fmt.Sprintf(format, args...))
}

func (j *judge) structure(events []Event) {
	if len(events) == 0 {
		j.doubt("the history is empty")
		return
	}
	if events[0].Kind != KindRun || events[0].Run == nil {
		j.doubt("the history doesn't begin with what was run")
	}
	if events[len(events)-1].Kind != KindEnd {
		j.doubt("the history doesn't end: the run was cut off")
	}
	for _, e := range events[:len(events)-1] {
		if e.Kind == KindEnd {
			j.doubt("events follow the end of the history")
			break
		}
	}
}

func (j *judge) event(e *Event) {
	switch e.Kind {
	case KindRun, KindFault, KindEnd:
	case KindReport:
		j.report(e)
	case KindDecision:
		j.decision(e)
	case KindFinal:
		j.final(e)
	default:
		j.doubt("event of unknown kind %q", e.Kind)
	}
}

func (j *judge) report(e *Event) {
	switch e.Name {
	case Acquired:
		if e.Token == 0 {
			j.doubt("%s was granted the lock without a fencing token", e.Actor)
			return
		}
		if n := len(j.grants); n > 0 && e.Token <= j.grants[n-1] {
			j.note("the lock's tokens do not grow: %s was granted %d after %d", e.Actor, e.Token, j.grants[n-1])
		}
		j.grants = append(j.grants, e.Token)
	case Wrote:
		j.wrote[e.Token] = true
	case ReleaseLost:
		j.late = j.late || j.superseded(e.Token)
	case ReleaseForeign:
		j.late = true
		j.note("%s released another owner's lock", e.Actor)
	case Failed:
		j.doubt("%s failed: %s", e.Actor, e.Error)
	}
}

// superseded reports whether a greater token than token has been granted.
func (j *judge) superseded(token uint64) bool {
	return slices.ContainsFunc(j.grants, func(t uint64) bool { return t > token })
}

func (j *judge) key(name string) *keyState {
	k := j.keys[name]
	if k == nil {
		k = &keyState{}
		j.keys[name] = k
	}
	return k
}

func (j *judge) decision(e *Event) {
	k := j.key(e.Key)
	got := fence{e.Token, e.Seq}
	if !e.Accepted {
		j.Refused++
	}
	if e.Enforced {
		if said := (fence{e.Seen, e.SeenSeq}); said != k.max {
			if k.max.after(said) {
				j.violate("the resource forgot a fence: it had accepted %v, and later knew of %v only", k.max, said)
			} else {
				j.doubt("the resource knows fence %v, of which the history has nothing", said)
			}
		}
	}
	switch e.Op {
	case "read":
		if e.Enforced && !e.Accepted && got.token >= k.max.token {
			j.doubt("the resource refused a fenced read with token %d, although it had accepted nothing above %v", got.token, k.max)
		}
		if e.Enforced && e.Accepted {
			if got.token < k.max.token {
				j.violate("a fenced read with token %d was accepted after %v", got.token, k.max)
			}
			if got.after(k.max) {
				k.max = got
			}
		}
	case "write":
		j.late = j.late || j.superseded(e.Token)
		if !e.Accepted {
			if e.Enforced && got.after(k.max) {
				j.doubt("the resource refused a write with fence %v, although it had accepted nothing above %v", got, k.max)
			}
			return
		}
		j.accept(e, k, got)
	default:
		j.doubt("decision about an unknown operation %q", e.Op)
	}
}

// accept accounts for an accepted write.
func (j *judge) accept(e *Event, k *keyState, got fence) {
	j.accepted[e.Token] = true
	switch {
	case e.Token == 0: // a writer without a lock; its entries tell
	case !got.after(k.max):
		j.Stale++
		j.violate("a stale write was accepted: fence %v after %v", got, k.max)
	default:
		k.max = got
	}
	entries := Entries(e.Value)
	if d := duplicate(entries); d != "" {
		j.violate("entry %s was written twice", d)
	}
	if k.known {
		j.lose(k.entries, entries)
	}
	for _, w := range entries {
		if !slices.Contains(k.entries, w) {
			j.Writers = append(j.Writers, w)
		}
	}
	k.entries, k.known = entries, true
}

// lose records what is in before and no longer in after.
func (j *judge) lose(before, after []string) {
	for _, w := range before {
		if !slices.Contains(after, w) && !slices.Contains(j.Lost, w) {
			j.Lost = append(j.Lost, w)
			j.violate("entry %s was accepted and is lost", w)
		}
	}
}

func duplicate(entries []string) string {
	for i, w := range entries {
		if slices.Contains(entries[:i], w) {
			return w
		}
	}
	return ""
}

func (j *judge) final(e *Event) {
	k := j.key(e.Key)
	k.final = true
	entries := Entries(e.Value)
	if !k.known {
		if len(entries) > 0 {
			j.violate("the resource ends with %v, although no write was accepted", entries)
		}
		return
	}
	j.lose(k.entries, entries)
	for _, w := range entries {
		if !slices.Contains(k.entries, w) {
			j.violate("entry %s is there at the end, although no accepted write had it", w)
		}
	}
}

func (j *judge) end() {
	writes := false
	for name, k := range j.keys {
		writes = writes || k.known
		if k.known && !k.final {
			j.doubt("what %q holds at the end is not known", name)
		}
	}
	if !writes {
		j.doubt("no write was accepted")
	}
	if len(j.grants) < 2 {
		j.doubt("fewer than two grants")
	}
	if !j.late {
		j.doubt("no holder acted after its successor's grant: the hazard did not come about")
	}
	for _, t := range j.grants {
		if j.wrote[t] && !j.accepted[t] {
			j.doubt("the holder of token %d believes to have written, but the resource's decision is missing", t)
		}
	}
}
