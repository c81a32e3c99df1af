package reports

import (
	"cmp"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/fencelab/fencelab/scenarios/history"
)

// scene is a history prepared for drawing, without coordinates.
type scene struct {
	run     history.Run
	items   []item // by time; at the same instant as recorded
	workers []string
	leases  []lease
	frozen  []span // a worker, SIGSTOP to SIGCONT
	down    []span // a worker or the resource, SIGKILL to restart
	held    []span // a worker's messages are held in the network
	cut     []span // a worker is cut off from servers of the lock
	writes  []write
	final   *history.Event

	start    time.Time
	granted  bool // t = 0 is the first grant; otherwise the first event
	from, to time.Duration
	moved    int // events recorded in another order than that of their clocks
	complete bool
}

type item struct {
	*history.Event
	clock time.Time     // without a time of its own, its predecessor's
	n     int           // number in list and drawing, from 1
	at    time.Duration // since t = 0
	stale bool          // an accepted write that the fencing rule refuses
	lost  string        // the accepted entry that is missing at the end
}

// lease is one grant, as the server has it and as its holder believes.
type lease struct {
	worker string
	token  uint64
	n      int // number of its acquired report
	from   time.Duration
	until  time.Duration // end promised by the grant
	solid  time.Duration // certainly held until here
	end    time.Duration // certainly free from here
	belief time.Duration // when the holder knows that it is over
	how    ending
}

type ending int

const (
	open     ending = iota // the history ends first
	released               // by its owner
	expired
	superseded // another was granted, or freed it, before it expired
)

type span struct {
	target   string
	from, to time.Duration
	open     bool // not healed within the history
}

type write struct {
	worker   string
	sent     time.Duration
	decision item
}

const resourceName = "resource"

func newScene(events []history.Event, judged history.Result) *scene {
	s := &scene{}
	s.number(events)
	s.mark(events, judged)
	s.roster()
	s.domain()
	s.faults()
	s.grants()
	s.match()
	return s
}

func (s *scene) number(events []history.Event) {
	described := false
	var last time.Time
	for i := range events {
		e := &events[i]
		switch e.Kind {
		case history.KindRun:
			if e.Run != nil && !described {
				s.run, described = *e.Run, true
				continue
			}
		case history.KindEnd:
			s.complete = true
		case history.KindFinal:
			s.final = e
		default:
		}
		if !e.Time.IsZero() {
			last = e.Time
		}
		s.items = append(s.items, item{Event: e, clock: last, n: i})
	}
	slices.SortStableFunc(s.items, func(a, b item) int { return a.clock.Compare(b.clock) })

	start := slices.IndexFunc(s.items, func(it item) bool { return it.reports(history.Acquired) })
	if s.granted = start >= 0; !s.granted {
		start = slices.IndexFunc(s.items, func(it item) bool { return !it.clock.IsZero() })
	}
	if start >= 0 {
		s.start = s.items[start].clock
	}
	recorded := -1
	for i := range s.items {
		it := &s.items[i]
		if it.n < recorded {
			s.moved++
		}
		recorded = max(recorded, it.n)
		it.n, it.at = i+1, since(it.clock, s.start)
	}
}

// since is clamped so that differences of two results don't overflow.
func since(t, start time.Time) time.Duration {
	const most = time.Duration(1) << 61 // 73 years
	return min(max(t.Sub(start), -most), most)
}

// mark marks accepted writes as stale, or as lost: an entry of that name may be in another ledger, or come back.
func (s *scene) mark(events []history.Event, judged history.Result) {
	stale, final := map[*history.Event]bool{}, map[string][]string{}
	for _, i := range judged.StaleAt {
		stale[&events[i]] = true
	}
	for i := range events {
		if e := &events[i]; e.Kind == history.KindFinal {
			final[e.Key] = history.Entries(e.Value)
		}
	}
	for i := range s.items {
		it := &s.items[i]
		it.stale = stale[it.Event]
		left, known := final[it.Key]
		if own := it.entry(); it.isWrite() && it.Accepted && known && slices.Contains(judged.Lost, own) && !slices.Contains(left, own) {
			it.lost = own
		}
	}
}

// entry is the one that a write adds.
func (it item) entry() string {
	entries := history.Entries(it.Value)
	if len(entries) == 0 {
		return ""
	}
	return entries[len(entries)-1]
}

func (it item) isWrite() bool { return it.Kind == history.KindDecision && it.Op == "write" }

func (it item) fault() history.Fault {
	if it.Kind != history.KindFault {
		return history.Fault{}
	}
	f, _ := history.FaultNamed(it.Name)
	return f
}

func (it item) reports(name string) bool { return it.Kind == history.KindReport && it.Name == name }

// roster lists the declared workers, then any others. If workers are declared, other targets of faults are servers of the lock.
func (s *scene) roster() {
	known := map[string]bool{"": true, resourceName: true}
	add := func(name string) {
		if !known[name] {
			known[name] = true
			s.workers = append(s.workers, name)
		}
	}
	for _, w := range s.run.Workers {
		add(w)
	}
	for _, it := range s.items {
		switch it.Kind {
		case history.KindReport:
			add(it.Actor)
		case history.KindFault:
			if len(s.run.Workers) == 0 {
				add(it.Target)
			}
		default:
		}
	}
}

func (s *scene) atServer(it item) bool {
	return it.Kind == history.KindFault && it.Target != resourceName && !slices.Contains(s.workers, it.Target)
}

// domain leaves out the controller's epilogue: it records what was found after the run, not when.
func (s *scene) domain() {
	first := true
	for _, it := range s.items {
		if slices.Contains([]history.Kind{history.KindDoubt, history.KindFinal, history.KindEnd}, it.Kind) {
			continue
		}
		if first {
			s.from, s.to, first = it.at, it.at, false
		}
		s.from, s.to = min(s.from, it.at), max(s.to, it.at)
	}
}

func (s *scene) faults() {
	s.frozen = s.during(history.Frozen)
	s.down = s.during(history.Down)
	s.held = s.during(history.Delayed)
	s.cut = s.during(history.CutOff)
}

func (s *scene) during(state history.State) []span {
	var spans []span
	current := make(map[string]int)
	undo := "" // the same for all faults of a state
	for _, it := range s.items {
		i, on := current[it.Target]
		f := it.fault()
		switch {
		case !on && f.State == state:
			undo = f.Undo
			current[it.Target] = len(spans)
			spans = append(spans, span{target: it.Target, from: it.at, to: s.to, open: true})
		case on && f.Name == undo:
			spans[i].to, spans[i].open = it.at, false
			delete(current, it.Target)
		}
	}
	return spans
}

// grants derives each lease's end. Renewals aren't reported, so a lease counts as held until its owner released it. One that was
// never released ended at the latest when the next was granted, and at the earliest when it expired or, if its holder was frozen,
// when the holder could last renew.
func (s *scene) grants() {
	for _, it := range s.items {
		if !it.reports(history.Acquired) {
			continue
		}
		l := lease{worker: it.Actor, token: it.Token, n: it.n, from: it.at, until: it.at + time.Duration(it.TTL), belief: s.to}
		if !it.Until.IsZero() {
			l.until = since(it.Until, s.start)
		}
		s.leases = append(s.leases, l)
	}
	for i := range s.leases {
		l := &s.leases[i]
		next, hasNext := s.to, i+1 < len(s.leases)
		if hasNext {
			next = s.leases[i+1].from
		}
		gone, ok := s.leaves(l, i)

		l.solid = l.until
		for _, f := range s.frozen {
			if f.target == l.worker && f.from >= l.from && f.from <= next {
				l.solid = max(l.solid, f.from)
			}
		}
		switch {
		case ok && gone <= next:
			l.solid, l.end, l.how = gone, gone, released
		case ok && hasNext && l.until > next && !s.goesOn(s.leases[i+1], gone): // the two reports crossed
			l.solid, l.end, l.how = next, next, released
		case hasNext && l.until <= next:
			l.solid, l.end, l.how = min(l.solid, next), next, expired
		case hasNext:
			l.solid, l.end, l.how = next, next, superseded
		case l.until < s.to && s.stopped(l):
			l.solid, l.end, l.how = min(l.solid, s.to), s.to, expired
		default:
			l.solid, l.end, l.how = s.to, s.to, open
		}
	}
	for _, it := range s.items {
		for i := range s.leases {
			if l := &s.leases[i]; it.reports(history.ReleaseForeign) && l.worker != it.Actor && l.from <= it.at && it.at < l.end {
				l.solid, l.end, l.how = it.at, it.at, superseded
			}
		}
	}
}

// goesOn reports whether the holder of l reports more than its grant before a time. It then held the lock, which its
// predecessor's release at that time didn't free.
func (s *scene) goesOn(l lease, before time.Duration) bool {
	return slices.ContainsFunc(s.items[l.n:], func(it item) bool {
		return it.Kind == history.KindReport && it.Actor == l.worker && it.at < before
	})
}

// leaves sets belief to when the holder of l learned that its grant is over, and returns when the holder released the lock, if it
// did.
func (s *scene) leaves(l *lease, i int) (gone time.Duration, ok bool) {
	limit := time.Duration(math.MaxInt64)
	if again := slices.IndexFunc(s.leases[i+1:], func(later lease) bool { return later.worker == l.worker }); again >= 0 {
		limit = s.leases[i+1+again].from
	}
	for _, it := range s.items[l.n:] {
		if it.at > limit {
			break
		}
		if !it.concerns(l.worker) {
			continue
		}
		switch it.Name {
		case history.Released:
			l.belief = min(l.belief, it.at)
			return it.at, true
		case history.ReleaseLost, history.ReleaseForeign, history.LostLease, history.Lost, history.WriteStale, history.ReadStale, history.Failed, history.Done:
			l.belief = min(l.belief, it.at)
		default:
			if it.fault().State == history.Down {
				l.belief = min(l.belief, it.at)
			}
		}
	}
	l.belief = min(l.belief, limit)
	return 0, false
}

// stopped reports whether the holder of l couldn't renew to the end.
func (s *scene) stopped(l *lease) bool {
	return l.belief < s.to || slices.ContainsFunc(slices.Concat(s.frozen, s.down), func(f span) bool {
		return f.target == l.worker && f.from >= l.from
	})
}

// match ties each write that reached the resource to its sender: the last worker granted its token, or of several with that
// token, the one whose entry it adds.
func (s *scene) match() {
	sent := make(map[string][]time.Duration)
	for _, it := range s.items {
		if it.reports(history.Sent) {
			sent[it.Actor] = append(sent[it.Actor], it.at)
		}
	}
	for _, it := range s.items {
		if !it.isWrite() {
			continue
		}
		w := write{decision: it, sent: it.at}
		own := it.entry()
		for _, l := range s.leases {
			if l.token == it.Token && (l.from <= it.at || w.worker == "") && (w.worker == "" || w.worker != own) {
				w.worker = l.worker
			}
		}
		if w.worker == "" {
			continue
		}
		if q := sent[w.worker]; len(q) > 0 {
			w.sent, sent[w.worker] = min(q[0], it.at), q[1:] // a decision can overtake the report of the send
		}
		s.writes = append(s.writes, w)
	}
	slices.SortStableFunc(s.writes, func(a, b write) int { return cmp.Compare(a.sent, b.sent) })
}

func (it item) label() string {
	switch it.Kind {
	case history.KindReport:
		if it.Name == history.Acquired {
			return fmt.Sprintf("acquired, token %d", it.Token)
		}
		return cmp.Or(reportWords[it.Name].label, short(it.Name, 22))
	case history.KindFault:
		switch f := it.fault(); {
		case f.From:
			return it.from(strings.TrimSpace(f.Label))
		case f.Name != "":
			return strings.TrimLeft(f.Label, ": ")
		}
		return short(it.Name, 22)
	case history.KindDecision:
		what := short(it.Op, 12)
		if it.Token != 0 {
			what = fmt.Sprintf("%s, token %d", what, it.Token)
		}
		switch {
		case !it.Accepted:
			return what + ": 409"
		case it.stale:
			return what + ": stale"
		case it.lost != "":
			return what + ": lost"
		default:
			return what
		}
	default:
		return short(string(it.Kind), 22)
	}
}

func (it item) from(what string) string {
	if len(it.Peers) == 0 {
		return what + " the lock"
	}
	return short(what+" "+strings.Join(it.Peers, ", "), 44)
}

func (it item) serverLabel() string {
	who := short(it.Target, 14)
	if it.Target == "lock" {
		who = "all servers"
	}
	detail := ""
	if it.Detail != "" {
		detail = " " + short(it.Detail, 14)
	}
	if f := it.fault(); f.Name != "" {
		return who + f.Label + detail
	}
	return short(it.Name, 22) + " " + who + detail
}

func (it item) sentence() string {
	switch it.Kind {
	case history.KindReport:
		switch it.Name {
		case history.Acquired:
			return fmt.Sprintf("was granted the lock: token %d, lease %s", it.Token, human(time.Duration(it.TTL)))
		case history.Failed:
			return "failed: " + clean(it.Error)
		}
		return cmp.Or(reportWords[it.Name].sentence, "reported "+clean(it.Name))
	case history.KindFault:
		return it.faultSentence()
	case history.KindDecision:
		return it.decisionSentence()
	case history.KindFinal:
		return "read the final value; " + plural(it.Refusals, "refusal") + " counted by the resource"
	case history.KindDoubt:
		return "found that the hazard never came about: " + clean(it.Detail)
	case history.KindEnd:
		return "closed the history"
	case history.KindRun:
		return "described a run, though not as the first event"
	default:
		return "recorded an event of a kind that this report does not know: " + clean(string(it.Kind)+" "+it.Name)
	}
}

// reportWords are reports' words in the drawing and in the list. Without a label the drawing has the name.
var reportWords = map[string]struct{ label, sentence string }{
	history.Held:           {"found it held", "found the lock held by another"},
	history.Read:           {"", "read the ledger"},
	history.ReadStale:      {"read refused", "learned that its read was refused (409)"},
	history.Checked:        {"", "checked its lease and found it held"},
	history.BeforeWrite:    {"", "computed the value to write"},
	history.Sent:           {"", "sent its write"},
	history.Wrote:          {"", "learned that its write was accepted"},
	history.WriteStale:     {"write refused", "learned that its write was refused (409)"},
	history.ReleaseGap:     {"", "was between the check and the delete of its release"},
	history.Released:       {"", "released the lock"},
	history.ReleaseLost:    {"release: not owner", "found that the lock was no longer its own to release"},
	history.ReleaseForeign: {"freed another’s lock", "freed another owner’s lock with its release"},
	history.LostLease:      {"lease lost", "checked its lease, found it lost and gave up"},
	history.Lost:           {"lease ended", "was told that its lease ended, and goes on"},
	history.Done:           {"", "ended"},
}

func (it item) faultSentence() string {
	sentence := it.fault().Sentence
	if sentence == "" {
		sentence = "injected " + clean(it.Name) + " at {target}"
	}
	if !strings.Contains(sentence, "{detail}") && it.Detail != "" {
		sentence += " ({detail})"
	}
	return strings.NewReplacer("{target}", clean(it.Target), "{from}", it.peers(), "{detail}", clean(it.Detail)).Replace(sentence)
}

func (it item) peers() string {
	if len(it.Peers) == 0 {
		return "all servers of the lock"
	}
	return clean(strings.Join(it.Peers, ", "))
}

func (it item) decisionSentence() string {
	s := "accepted a " + clean(it.Op)
	if !it.Accepted {
		s = "refused (409) a " + clean(it.Op)
	}
	if it.Token == 0 {
		return s + " without a token"
	}
	s += fmt.Sprintf(" with token %d", it.Token)
	if it.Seq > 1 {
		s += fmt.Sprintf(" (number %d under this grant)", it.Seq)
	}
	switch {
	case !it.Enforced:
		s += " without checking the fence"
	case it.Seen == 0:
		s += "; no token seen before"
	case it.SeenSeq == 0:
		s += fmt.Sprintf("; seen before: %d, by a read", it.Seen)
	default:
		s += fmt.Sprintf("; seen before: %d", it.Seen)
	}
	if it.stale {
		s += ". The write is stale"
	}
	if it.lost != "" {
		s += ". Its entry is gone at the end"
	}
	return s
}
