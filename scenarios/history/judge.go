package history

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Entries splits a ledger into its lines.
func Entries(ledger string) []string {
	return strings.FieldsFunc(ledger, func(r rune) bool { return r == '\n' })
}

// Append returns ledger with entry as its last line.
func Append(ledger, entry string) string { return ledger + entry + "\n" }

func cutLast(ledger string) (rest, entry string, ok bool) {
	lines, ok := strings.CutSuffix(ledger, "\n")
	i := strings.LastIndexByte(lines, '\n') + 1
	return lines[:i], lines[i:], ok && lines[i:] != ""
}

// fence repeats package resource's comparison, so that the judge doesn't share its defects.
type fence struct{ token, seq uint64 }

func (f fence) after(g fence) bool {
	return f.token > g.token || f.token == g.token && f.seq > g.seq
}

func (f fence) mayRead(seen fence) bool {
	return !seen.after(f) || f == fence{seen.token, 0}
}

func (f fence) String() string {
	switch {
	case f == fence{}:
		return "none"
	case f.seq == 1:
		return fmt.Sprint(f.token)
	}
	return fmt.Sprintf("%d.%d", f.token, f.seq)
}

// Judge judges a history. It derives the greatest fence and the ledger from the resource's decisions, and ignores times: the
// runner has recorded what they show as events.
//
// Violated, unless fencing is off and the history says that the hazard did not happen:
//   - a write was accepted without a token although fencing was on, or with a fence not greater than those of all writes and
//     fenced reads accepted before;
//   - a fenced read was accepted after a read or write that fences it off;
//   - an entry of an accepted write is missing from a later accepted write, a read or the final value;
//   - an entry appears twice, or although its write was refused;
//   - the resource forgot a fence that it had accepted.
//
// Otherwise inconclusive if any of these holds, and safe if none does:
//   - the history is incomplete, covers several runs, undeclared keys or undeclared workers, or has unknown events;
//   - a decision is not the resource's, or a fault or final value not the controller's;
//   - a worker has failed or not ended;
//   - there are fewer than two grants, grants of different locks, a grant to a worker that has the lock, or no accepted write;
//   - the hazard did not happen: no holder acted after its successor's grant or was killed before it, or the history says so;
//   - tokens don't grow (or do, if the hazard is that they regress), are used without their grant, or are missing from a grant,
//     with fencing on or if others have one;
//   - the resource checked a fence that the mode doesn't check, or the reverse, or refused what the rule admits;
//   - an accepted write is not the last ledger plus one entry, or a ledger is not the expected one;
//   - decisions are missing that a worker's report, the resource's fence or its count of refusals implies.
func Judge(events []Event) Result {
	j := judge{
		keys: map[string]*keyState{}, ended: map[string]bool{}, holders: map[holder]bool{}, holding: map[string]bool{},
		unreported: map[reply]int{},
	}
	j.structure(events)
	for i := range events {
		j.at = i
		j.event(&events[i])
	}
	j.end()
	switch {
	case len(j.violations) > 0 && (len(j.doubts) == 0 || j.fenced()):
		j.Verdict, j.Findings = Violated, slices.Concat(j.violations, j.doubts)
	case len(j.doubts)+len(j.objections) > 0:
		j.Verdict, j.Findings = Inconclusive, slices.Concat(j.doubts, j.objections, j.violations)
	default:
		j.Verdict = Safe
	}
	return j.Result
}

type judge struct {
	Result
	at                     int // of the event
	violations, objections []string
	doubts                 []string // recorded: why the hazard did not happen

	fencing    Fencing
	keys       map[string]*keyState
	ended      map[string]bool
	lock       string // of the last grant
	granted    int
	grants     []uint64 // the grants' tokens, in order, without zeros
	holders    map[holder]bool
	holding    map[string]bool // between grant and release
	unreported map[reply]int   // decisions that no worker has reported yet
	refused    int             // since the resource's last start
	late       bool            // a holder acted after a grant of a greater token, or died before its successor's grant
	orphan     bool            // the holder of the last grant died

	named      bool
	declared   []string
	tokensLost bool
	regressed  bool
	last       string // the worker of the last grant
	overtaken  bool   // a holder acted after another's grant, whatever the tokens
}

type holder struct {
	name  string
	token uint64
}

type reply struct {
	op       string
	token    uint64
	accepted bool
	ledger   string
}

type keyState struct {
	max     fence
	ledger  string
	written bool
	refused map[string]bool // entries refused, and not accepted since under a token of their worker
	own     map[string]bool // entries accepted under a token of their worker
	gap     bool
	final   bool
}

func (j *judge) violate(format string, args ...any) {
	j.violations = append(j.violations, fmt.Sprintf(format, args...))
}

func (j *judge) object(format string, args ...any) {
	j.objections = append(j.objections, fmt.Sprintf(format, args...))
}

func (j *judge) note(format string, args ...any) {
	j.Notes = append(j.Notes, fmt.Sprintf(format, args...))
}

func (j *judge) structure(events []Event) {
	if len(events) == 0 {
		j.object("the history is empty")
		return
	}
	if run := events[0].Run; events[0].Kind != KindRun || run == nil {
		j.object("the first event doesn't say what was run")
	} else {
		j.begin(run)
	}
	if events[len(events)-1].Kind != KindEnd {
		j.object("the history doesn't end: the run was cut off")
	}
	for i, e := range events {
		if e.Kind == KindRun && i > 0 {
			j.object("event %d is another run's beginning", i+1)
		}
		if e.Kind == KindEnd && i < len(events)-1 {
			j.object("events follow the end of the history, event %d", i+1)
		}
	}
}

func (j *judge) begin(run *Run) {
	switch run.Fencing {
	case FencingOff, FencingWrites, FencingOn:
		j.fencing = run.Fencing
	default:
		j.object("unknown fencing mode %q", run.Fencing)
	}
	for _, name := range run.Workers {
		j.ended[name] = false
	}
	j.named, j.declared, j.tokensLost = len(run.Workers) > 0, run.Keys, run.TokensLost
}

func (j *judge) fenced() bool { return j.fencing == FencingWrites || j.fencing == FencingOn }

// actors maps kinds to the only actor that may have such events.
var actors = map[Kind]string{KindDecision: "resource", KindFault: "controller", KindFinal: "controller"}

func (j *judge) event(e *Event) {
	if only, ok := actors[e.Kind]; ok && e.Actor != only {
		j.object("a %s comes from %q, not from the %s", e.Kind, e.Actor, only)
	}
	switch e.Kind {
	case KindRun, KindEnd:
	case KindDoubt:
		j.doubts = append(j.doubts, e.Detail)
	case KindReport:
		j.report(e)
	case KindFault:
		j.fault(e)
	case KindDecision:
		j.decision(e)
	case KindFinal:
		j.final(e)
	default:
		j.object("event of unknown kind %q", e.Kind)
	}
}

func (j *judge) fault(e *Event) {
	switch f, ok := FaultNamed(e.Name); {
	case !ok:
		j.object("unknown fault %q", e.Name)
	case f.State != Down:
	case e.Target == "resource":
		j.refused = 0 // its metrics are reset
	default:
		j.orphan = j.orphan || j.holding[e.Target] && j.last == e.Target // nobody releases its lock
		j.ended[e.Target] = true
	}
}

func (j *judge) report(e *Event) {
	if _, known := j.ended[e.Actor]; j.named && !known {
		j.object("%s is not one of the run's workers", e.Actor)
	}
	if j.ended[e.Actor] {
		j.object("%s reports %s after its end", e.Actor, e.Name)
	}
	j.ended[e.Actor] = e.Name == Done || e.Name == Failed
	if e.Token != 0 && e.Name != Acquired && !j.holders[holder{e.Actor, e.Token}] {
		j.object("%s reports %s under token %d, which it was not granted", e.Actor, e.Name, e.Token)
	}
	switch e.Name {
	case Read, ReadStale, Wrote, WriteStale, ReleaseLost, ReleaseForeign:
		j.overtaken = j.overtaken || j.holding[e.Actor] && j.last != e.Actor
	}
	switch e.Name {
	case Acquired:
		j.grant(e)
	case Read:
		j.reported(e, reply{"read", e.Token, true, e.Value})
	case ReadStale:
		j.reported(e, reply{op: "read", token: e.Token})
	case Wrote:
		j.reported(e, reply{"write", e.Token, true, e.Value})
	case WriteStale:
		j.reported(e, reply{op: "write", token: e.Token})
	case ReleaseLost, ReleaseForeign:
		j.late = j.late || j.superseded(e.Token)
		delete(j.holding, e.Actor)
		if e.Name == ReleaseForeign {
			j.note("%s released another owner's lock", e.Actor)
		}
	case Failed:
		j.object("%s failed: %s", e.Actor, e.Error)
	case Released:
		delete(j.holding, e.Actor)
	case Held, Checked, BeforeWrite, Sent, ReleaseGap, LostLease, Lost, Done:
	default:
		j.object("unknown report %q", e.Name)
	}
}

func (j *judge) grant(e *Event) {
	if j.holding[e.Actor] {
		j.object("%s was granted the lock again before it released it", e.Actor)
		return
	}
	if e.Token == 0 && j.fencing != FencingOff {
		j.object("%s was granted the lock without a fencing token", e.Actor)
		return
	}
	if n := len(j.grants); n > 0 && e.Token != 0 && e.Token <= j.grants[n-1] {
		if j.tokensLost {
			j.regressed = true
			j.note("the lock's tokens went backwards: %s was granted %d after %d", e.Actor, e.Token, j.grants[n-1])
		} else {
			j.object("the lock's tokens do not grow: %s was granted %d after %d", e.Actor, e.Token, j.grants[n-1])
		}
	}
	if j.granted > 0 && e.Key != j.lock {
		j.object("%s was granted the lock of %q, and others that of %q: these don't exclude each other", e.Actor, e.Key, j.lock)
	}
	j.lock = e.Key
	j.granted++
	j.late = j.late || j.orphan
	if e.Token != 0 {
		j.grants = append(j.grants, e.Token)
		j.holders[holder{e.Actor, e.Token}] = true
	}
	j.holding[e.Actor] = true
	j.last = e.Actor
}

func (j *judge) reported(e *Event, a reply) {
	if (a.op == "read" || j.fencing == FencingOff) && j.unreported[a] == 0 {
		a.token = 0 // unfenced reads and clients without fencing send none
	}
	if j.unreported[a] == 0 {
		j.object("%s reports %s with token %d, but the resource's decision is missing", e.Actor, e.Name, e.Token)
		return
	}
	j.unreported[a]--
}

func (j *judge) superseded(token uint64) bool {
	return slices.Contains(j.grants, token) && slices.Max(j.grants) > token
}

func (j *judge) key(name string) *keyState {
	k := j.keys[name]
	if k == nil {
		k = &keyState{refused: map[string]bool{}, own: map[string]bool{}}
		j.keys[name] = k
	}
	return k
}

func (j *judge) decision(e *Event) {
	k := j.key(e.Key)
	if k.final {
		j.object("the resource decided about %q after its final value was read", e.Key)
	}
	if e.Token != 0 && !slices.Contains(j.grants, e.Token) {
		j.object("the resource decided about token %d, which nobody was granted", e.Token)
	}
	switch fenced := j.fencing == FencingOn || j.fencing == FencingWrites && e.Op == "write"; {
	case fenced && (!e.Enforced || e.Token == 0 && e.Op == "read"):
		j.object("the resource did not check a %s's fence, with fencing %s", e.Op, j.fencing)
	case !fenced && e.Enforced && j.fencing != "":
		j.object("the resource checked a %s's fence, with fencing %s", e.Op, j.fencing)
	}
	j.checkSeen(k, fence{e.Seen, e.SeenSeq})
	j.late = j.late || j.superseded(e.Token)
	a := reply{op: e.Op, token: e.Token, accepted: e.Accepted}
	if e.Accepted {
		a.ledger = e.Value
	} else {
		j.Refused++
		j.refused++
		if j.regressed && e.Token == j.grants[len(j.grants)-1] && e.Token < e.Seen {
			j.note("the last to be granted the lock was refused a %s: its token %d is behind %d", e.Op, e.Token, e.Seen)
		}
	}
	j.unreported[a]++
	got := fence{e.Token, e.Seq}
	switch {
	case e.Op != "read" && e.Op != "write":
		j.object("decision about an unknown operation %q", e.Op)
	case e.Accepted && e.Op == "read":
		j.acceptRead(e, k, got)
	case e.Accepted:
		j.acceptWrite(e, k, got)
	default:
		j.refuse(e, k, got)
	}
}

func (j *judge) checkSeen(k *keyState, seen fence) {
	switch {
	case seen == k.max:
	case seen.after(k.max):
		k.gap = true
		j.object("the resource reports fence %v, which is not in the history", seen)
	case !j.fenced(): // it need not keep them
		j.object("the resource had accepted fence %v, and later reported only %v", k.max, seen)
	default:
		j.violate("the resource forgot a fence: it had accepted %v, and later reported only %v", k.max, seen)
	}
}

func (j *judge) acceptRead(e *Event, k *keyState, got fence) {
	if e.Enforced {
		if !got.mayRead(k.max) {
			j.violate("a fenced read with fence %v was accepted after %v", got, k.max)
		}
		if got.after(k.max) {
			k.max = got
		}
	}
	j.compare(k, "a read", e.Value, e.Value)
}

func (j *judge) acceptWrite(e *Event, k *keyState, got fence) {
	switch {
	case e.Token == 0 && !j.fenced():
	case e.Token == 0:
		j.violate("a write without a token was accepted, with fencing %s", j.fencing)
	case !got.after(k.max):
		j.Stale++
		j.StaleAt = append(j.StaleAt, j.at)
		j.violate("a stale write was accepted: fence %v after %v", got, k.max)
	default:
		k.max = got
	}
	base, entry, ok := cutLast(e.Value)
	if !ok {
		j.object("the write with fence %v adds no entry: %q", got, e.Value)
	}
	j.compare(k, fmt.Sprintf("the write with fence %v", got), base, e.Value)
	if ok && !slices.Contains(Entries(k.ledger), entry) {
		j.Writers = append(j.Writers, entry)
	}
	if j.regressed && j.holding[entry] && entry != j.last {
		j.note("a write of %s was accepted, although %s had been granted the lock since", entry, j.last)
	}
	if _, isWorker := j.ended[entry]; !isWorker || e.Token == 0 || j.holders[holder{entry, e.Token}] {
		delete(k.refused, entry)
		k.own[entry] = true
	}
	k.ledger, k.written = e.Value, true
}

func (j *judge) refuse(e *Event, k *keyState, got fence) {
	admitted := got.after(k.max)
	if e.Op == "read" {
		admitted = got.mayRead(k.max)
	}
	switch {
	case !e.Enforced:
		j.object("the resource refused a %s without checking its fence", e.Op)
	case admitted:
		j.object("the resource refused a %s with fence %v, although it had accepted nothing above %v", e.Op, got, k.max)
	}
	// The repeat of an accepted write is refused too.
	if _, entry, _ := cutLast(e.Value); !k.own[entry] || !slices.Contains(Entries(k.ledger), entry) {
		k.refused[entry] = true
	}
}

// compare compares the ledger whole with the last accepted one, which base should equal.
func (j *judge) compare(k *keyState, where, base, whole string) {
	held, there := Entries(k.ledger), Entries(whole)
	for _, w := range held {
		if !slices.Contains(there, w) {
			j.violate("entry %s was accepted and is lost: %s doesn't have it", w, where)
			if !slices.Contains(j.Lost, w) {
				j.Lost = append(j.Lost, w)
			}
		}
	}
	for _, w := range Entries(base) {
		if k.refused[w] && !k.gap { // else the missing decision may be its acceptance
			j.violate("entry %s is in %s, although its write was refused", w, where)
		}
	}
	for i, w := range there {
		if slices.Contains(there[:i], w) {
			j.violate("entry %s appears twice in %s", w, where)
		}
	}
	if base != k.ledger {
		j.object("%s has %q where the last accepted write left %q", where, base, k.ledger)
	}
}

func (j *judge) final(e *Event) {
	k := j.key(e.Key)
	if k.final {
		j.object("%q has several final values", e.Key)
	}
	k.final = true
	j.checkSeen(k, fence{e.Seen, e.SeenSeq})
	j.compare(k, "the final value", e.Value, e.Value)
	if e.Refusals != j.refused {
		j.object("the resource counts %d refusals since it was started, the history has %d", e.Refusals, j.refused)
	}
}

func (j *judge) end() {
	written := false
	for _, name := range j.declared {
		j.key(name)
	}
	for _, name := range slices.Sorted(maps.Keys(j.keys)) {
		written = written || j.keys[name].written
		if !j.keys[name].final {
			j.object("%q has no final value", name)
		}
	}
	if len(j.keys) > 1 {
		for _, name := range slices.Sorted(maps.Keys(j.keys)) {
			if !slices.Contains(j.declared, name) {
				j.object("the history covers %d keys, but the run doesn't declare %q", len(j.keys), name)
			}
		}
	}
	for _, name := range slices.Sorted(maps.Keys(j.ended)) {
		if !j.ended[name] {
			j.object("%s has not ended: what it does later is not known", name)
		}
	}
	if !written {
		j.object("no write was accepted")
	}
	if j.granted < 2 {
		j.object("fewer than two grants")
	}
	if n := len(j.grants); n > 0 && n < j.granted {
		j.object("%d of %d grants have a fencing token: a lock has them always or never", n, j.granted)
	}
	acted := j.late
	switch {
	case j.tokensLost: // tokens don't show the order of grants
		acted = j.overtaken
	case len(j.grants) == 0:
		acted = j.late || j.overtaken
	}
	if j.granted > 0 && len(j.grants) == 0 {
		j.note("the lock has no fencing tokens: no resource can tell a stale holder from its successor")
	}
	switch {
	case j.tokensLost && !j.regressed:
		j.object("the lock's tokens never regressed: the hazard did not occur")
	case !acted:
		j.object("no holder acted after its successor's grant: the hazard did not occur")
	}
}
