// Package model is the protocol of lock and fence, small enough to visit every state. There is no clock: a lease may expire at
// any time, and its holder is not notified. Paused and killed workers take no steps.
package model

import (
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/fencelab/fencelab/scenarios/history"
)

// MaxWorkers is the length of [State.Workers].
const MaxWorkers = 5

// Config bounds the model and removes guards from it.
type Config struct {
	Fencing                 history.Fencing
	Workers, Grants, Writes int      // grants in all, writes per grant
	Entries                 []string // what workers may append; nil: an entry per grant
	Tokens                  int      // the lock service may skip tokens up to this one

	AcceptEqual bool // the store accepts a fence equal to the greatest
	IgnoreSeq   bool // the store compares tokens only
	ForgetFence bool // a crash of the store loses only its fence
	LoseValue   bool // a crash of the store loses the value
	NoRaise     bool // a fenced read doesn't raise the fence
	StaleReads  bool // the store accepts every fenced read
	ApplyStale  bool // the store reports a stale write as refused, but applies it
	ReleaseAny  bool // a release frees the lock, whoever holds it
	RenewAny    bool // a renewal succeeds, whoever holds the lock
	LateToken   bool // the token is read after the grant
	Regress     bool // the lock service may lose data, and repeat or lower tokens
}

// Breach is a set of broken rules.
type Breach uint8

// The breaches. The last two also need a correct lock.
const (
	EntryLost  Breach = 1 << iota // an accepted entry is no longer in the value
	StaleWrite                    // a write or fenced read was accepted after one that fences it off
	Overtaken                     // a write or fenced read was accepted after a call of a later grant
	TwoHolders
)

func (b Breach) String() string {
	var words []string
	for i, word := range []string{"an accepted entry is lost", "a stale write is accepted", "a successor is overtaken", "the lock has two holders"} {
		if b&(1<<i) != 0 {
			words = append(words, word)
		}
	}
	return strings.Join(words, ", ")
}

// Fence is what the store compares.
type Fence struct{ Token, Seq int }

func (f Fence) after(g Fence) bool {
	return f.Token > g.Token || f.Token == g.Token && f.Seq > g.Seq
}

func (f Fence) String() string { return fmt.Sprintf("%d.%d", f.Token, f.Seq) }

// Phase is a worker's phase.
type Phase uint8

// The phases.
const (
	Idle      Phase = iota
	Tokenless       // token not read
	Acquired        // value not read
	Ready           // has read, or its last write was accepted
	Waiting         // for the reply to a write
	Refused
)

// Worker is a worker's state.
type Worker struct {
	Phase  Phase
	Grant  int
	Fence  Fence
	Ledger string
	Live   bool
}

// Write is a write in the network: it may arrive at any time, many times or never. Reads need no messages.
type Write struct {
	Fence Fence
	Grant int
	Value string
}

// State is a state of the system. The fields after Seen serve to detect breaches.
type State struct {
	Workers [MaxWorkers]Worker
	Holder  int // the grant that has the lock; 0: none
	Grants  int
	Top     int
	Sent    []Write // in the order of grants
	Value   string  // one entry a line
	Seen    Fence   // the greatest that the store remembers
	Max     Fence   // the greatest accepted
	Last    int     // the latest served by the store
	Broken  Breach
}

// Verb is the event of a step, as a sentence.
type Verb string

// The verbs.
const (
	Acquire     Verb = "WHO acquires the lock, token TOKEN"
	AcquireOnly Verb = "WHO acquires the lock, and has no token yet"
	ReadToken   Verb = "WHO reads its token: TOKEN"
	Expire      Verb = "the lease of WHO expires; WHO does not know"
	Renew       Verb = "WHO renews its lease, which had expired"
	Read        Verb = "WHO reads VALUE"
	ReadRefused Verb = "WHO reads, and the store refuses"
	Send        Verb = "WHO sends write FENCE, value VALUE"
	Accept      Verb = "the store accepts write FENCE, value VALUE"
	Refuse      Verb = "the store refuses write FENCE, value VALUE"
	Release     Verb = "WHO releases"
	Crash       Verb = "the store crashes and restarts"
)

// Step is an event and the state after it.
type Step struct {
	Verb      Verb
	Worker    int  // -1: none that still waits for the reply
	ReplyLost bool // the worker gets no reply
	Fence     Fence
	Value     string
	State     State
}

func (s Step) String() string {
	line := strings.NewReplacer("WHO", string(rune('A'+s.Worker)), "TOKEN", strconv.Itoa(s.Fence.Token),
		"FENCE", s.Fence.String(), "VALUE", fmt.Sprint(history.Entries(s.Value))).Replace(string(s.Verb))
	if s.ReplyLost && s.Worker >= 0 {
		line += "; the reply is lost"
	}
	if s.State.Broken != 0 {
		line += ": " + s.State.Broken.String()
	}
	return line
}

// Next returns the possible steps from s.
func (c *Config) Next(s State) []Step {
	var steps []Step
	add := func(v Verb, i int, f Fence, value string, change func(n *State, me *Worker)) {
		n := s
		change(&n, &n.Workers[i])
		steps = append(steps, Step{v, i, false, f, value, n})
	}
	add(Crash, 0, Fence{}, "", func(n *State, _ *Worker) {
		if c.ForgetFence {
			n.Seen = Fence{}
		}
		if c.LoseValue {
			n.Value = ""
		}
	})
	for i, w := range s.Workers[:c.Workers] {
		if w.Phase == Idle {
			for token := 1; s.Holder == 0 && s.Grants < c.Grants && token <= max(s.Top+1, c.Tokens); token++ {
				if token > s.Top || c.Regress {
					c.acquire(token, i, add)
				}
			}
			continue
		}
		if w.Live {
			add(Expire, i, w.Fence, "", func(n *State, me *Worker) {
				me.Live = false
				n.free(w.Grant)
			})
		}
		if c.RenewAny && !w.Live && s.Holder != 0 { // other renewals change nothing
			add(Renew, i, w.Fence, "", func(n *State, me *Worker) { n.lease(me) })
		}
		token := Fence{Token: w.Fence.Token}
		fenced := c.Fencing == history.FencingOn
		switch {
		case w.Phase == Tokenless:
			add(ReadToken, i, Fence{Token: s.Top}, "", func(_ *State, me *Worker) { me.Phase, me.Fence.Token = Acquired, s.Top })
		case w.Phase != Acquired && w.Phase != Ready:
		case fenced && token.Token < s.Seen.Token && !c.StaleReads:
			add(ReadRefused, i, token, "", func(_ *State, me *Worker) { me.Phase = Refused })
		default:
			add(Read, i, token, s.Value, func(n *State, me *Worker) {
				me.Phase, me.Ledger = Ready, s.Value
				if fenced {
					n.accept(token, w.Grant, token.Token < s.Max.Token)
				}
				if c.NoRaise {
					n.Seen = s.Seen
				}
			})
		}
		for _, e := range c.entries(&w) {
			m := Write{Fence{w.Fence.Token, w.Fence.Seq + 1}, w.Grant, history.Append(w.Ledger, e)}
			add(Send, i, m.Fence, m.Value, func(n *State, me *Worker) {
				me.Phase, me.Fence, me.Ledger = Waiting, m.Fence, m.Value
				n.Sent = append(slices.Clone(s.Sent), m)
				slices.SortStableFunc(n.Sent, func(a, b Write) int { return a.Grant - b.Grant })
			})
		}
		add(Release, i, w.Fence, "", func(n *State, me *Worker) {
			*me = Worker{}
			if n.free(w.Grant); c.ReleaseAny {
				n.Holder = 0
			}
		})
	}
	for _, m := range s.Sent {
		v, n := c.deliver(s, m)
		i := slices.IndexFunc(s.Workers[:], func(w Worker) bool { return w.Phase == Waiting && w.Grant == m.Grant && w.Fence == m.Fence })
		steps = append(steps, Step{v, i, true, m.Fence, m.Value, n})
		if i >= 0 {
			n.Workers[i].Phase = Refused
			if v == Accept || m.Fence == s.Seen && m.Value == s.Value { // or the repeat of an accepted write
				n.Workers[i].Phase = Ready
			}
			steps = append(steps, Step{v, i, false, m.Fence, m.Value, n})
		}
	}
	return steps
}

func (c *Config) acquire(token, i int, add func(Verb, int, Fence, string, func(*State, *Worker))) {
	v := Acquire
	if c.LateToken {
		v = AcquireOnly
	}
	add(v, i, Fence{Token: token}, "", func(n *State, me *Worker) {
		n.Grants++
		n.Holder, n.Top = n.Grants, max(n.Top, token)
		*me = Worker{Phase: Acquired, Grant: n.Grants, Fence: Fence{Token: token}}
		if c.LateToken {
			me.Phase, me.Fence = Tokenless, Fence{}
		}
		n.lease(me)
	})
}

func (c *Config) deliver(s State, m Write) (Verb, State) {
	admitted := c.Fencing == history.FencingOff || m.Fence.after(s.Seen) ||
		c.AcceptEqual && m.Fence == s.Seen || c.IgnoreSeq && m.Fence.Token == s.Seen.Token
	if !admitted {
		if c.ApplyStale {
			s.Value = m.Value
		}
		return Refuse, s
	}
	for _, e := range history.Entries(s.Value) {
		if !slices.Contains(history.Entries(m.Value), e) {
			s.Broken |= EntryLost
		}
	}
	s.Value = m.Value
	s.accept(m.Fence, m.Grant, !m.Fence.after(s.Max))
	return Accept, s
}

// entries returns what w may append next. Naming entries after grants keeps workers exchangeable.
func (c *Config) entries(w *Worker) []string {
	switch {
	case w.Phase != Ready || w.Fence.Seq >= c.Writes:
		return nil
	case c.Entries == nil:
		return []string{string(rune('a'-1+w.Grant)) + strconv.Itoa(w.Fence.Seq+1)}
	}
	held := history.Entries(w.Ledger)
	return slices.DeleteFunc(slices.Clone(c.Entries), func(e string) bool { return slices.Contains(held, e) })
}

func (s *State) lease(w *Worker) {
	w.Live = true
	for i := range s.Workers {
		if other := &s.Workers[i]; other != w && other.Live {
			s.Broken |= TwoHolders
		}
	}
}

func (s *State) free(grant int) {
	if s.Holder == grant {
		s.Holder = 0
	}
}

func (s *State) accept(f Fence, grant int, stale bool) {
	if grant < s.Last {
		s.Broken |= Overtaken
	}
	if stale {
		s.Broken |= StaleWrite
	}
	if s.Last = max(s.Last, grant); f.after(s.Seen) {
		s.Seen = f
	}
	if f.after(s.Max) {
		s.Max = f
	}
}
