package explore

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Verb is what a step does.
type Verb string

// The verbs. A step that its worker's state doesn't allow does nothing, so any part of a schedule is a schedule. For cut, deafen,
// hold and lag, the fault begins after N more messages, and no new connection can be made while it lasts.
const (
	Run       Verb = "run" // the worker makes its next call: acquire, fenced read, write, release
	Try       Verb = "try" // acquires without waiting
	Renew     Verb = "renew"
	Release   Verb = "release"   // releases the lock, whatever the worker has done
	Rerelease Verb = "rerelease" // releases the previous lease again
	Crowd     Verb = "crowd"     // twelve more goroutines of the process acquire the lock, and release it at once
	Cancel    Verb = "cancel"    // ends the contexts of the worker's call and of its crowd
	Kill      Verb = "kill"
	Pause     Verb = "pause"  // nothing enters or leaves the process, once N more requests have left
	Resume    Verb = "resume" //
	Cut       Verb = "cut"    // requests are lost
	Deafen    Verb = "deafen" // replies are lost
	Hold      Verb = "hold"   // the network holds requests
	Lag       Verb = "lag"    // the network holds replies
	Mend      Verb = "mend"   // ends cut, deafen, hold and lag: held messages arrive, connections that lost a message are closed
	Reset     Verb = "reset"  // closes the worker's connections
	Late      Verb = "late"   // the network holds the worker's next write
	Deliver   Verb = "deliver"
	Duplicate Verb = "duplicate" // the worker's last write arrives again
	Restart   Verb = "restart"   // of a server, which keeps its data
	Wipe      Verb = "wipe"      // a restart without the data
	Jump      Verb = "jump"      // sets a server's clock forward by For
	Wait      Verb = "wait"
	TTL       Verb = "ttl" // sets the TTL of the worker's process, which must not have done anything yet
)

// Step is one step of a [Schedule].
type Step struct {
	Verb   Verb
	Worker int           // not of restart, wipe, jump and wait
	Server int           // of restart, wipe and jump; of cut, deafen, hold and lag: one server, or All
	N      int           // of cut, deafen, hold, lag and pause: messages that pass first
	For    time.Duration // of wait, jump and ttl
}

// All means every server.
const All = -1

// Schedule is a list of steps.
type Schedule []Step

// String returns the schedule as text for [Parse], one step a line.
func (s Schedule) String() string {
	var b strings.Builder
	for _, st := range s {
		fmt.Fprintln(&b, st)
	}
	return b.String()
}

func (st Step) String() string {
	words := []string{string(st.Verb)}
	for arg := range strings.FieldsSeq(st.Verb.args()) {
		switch {
		case arg == "[n]" && st.N == 0, arg == "[server]" && st.Server == All:
		case arg == "worker":
			words = append(words, name(st.Worker))
		case arg == "duration":
			words = append(words, st.For.String())
		case strings.Contains(arg, "server"):
			words = append(words, strconv.Itoa(st.Server))
		default:
			words = append(words, strconv.Itoa(st.N))
		}
	}
	return strings.Join(words, " ")
}

func name(worker int) string { return string(rune('A' + worker)) }

// Parse reads a schedule. It skips empty lines and those that begin with #.
func Parse(text string) (Schedule, error) {
	var s Schedule
	n := 0
	for line := range strings.Lines(text) {
		n++
		words := strings.Fields(line)
		if len(words) == 0 || strings.HasPrefix(words[0], "#") {
			continue
		}
		st, err := parseStep(words)
		if err != nil {
			return nil, fmt.Errorf("explore: line %d, %q: %w", n, strings.TrimSpace(line), err)
		}
		s = append(s, st)
	}
	return s, nil
}

func parseStep(words []string) (Step, error) {
	st := Step{Verb: Verb(words[0])}
	if !slices.Contains(Verbs(), st.Verb) {
		return st, fmt.Errorf("unknown verb %q; the verbs are %v", st.Verb, Verbs())
	}
	ok, rest := true, words[1:]
	for arg := range strings.FieldsSeq(st.Verb.args()) {
		switch {
		case len(rest) > 0:
			ok, rest = ok && st.set(strings.Trim(arg, "[]"), rest[0]), rest[1:]
		case arg == "[server]":
			st.Server = All
		default:
			ok = ok && arg == "[n]"
		}
	}
	if !ok || len(rest) > 0 {
		return st, fmt.Errorf("want %s %s; a worker is A to %s, servers count from 0, a duration is as in 1.5s", st.Verb, st.Verb.args(), name(MaxWorkers-1))
	}
	return st, nil
}

func (st *Step) set(arg, word string) bool {
	var err error
	switch arg {
	case "worker":
		st.Worker = int(word[0]) - 'A'
		return len(word) == 1 && 0 <= st.Worker && st.Worker < MaxWorkers
	case "server":
		st.Server, err = strconv.Atoi(word)
	case "n":
		st.N, err = strconv.Atoi(word)
	default:
		st.For, err = time.ParseDuration(word)
	}
	return err == nil && st.Server >= 0 && st.N >= 0 && st.For >= 0
}

// MaxWorkers is the maximum number of workers in a schedule.
const MaxWorkers = 5

// verbSpec is a verb, its arguments (optional ones in brackets) and its frequency.
type verbSpec struct {
	Verb
	takes  string
	weight int
}

var verbSpecs = []verbSpec{
	{Run, "worker", 40},
	{Try, "worker", 4},
	{Renew, "worker", 4},
	{Release, "worker", 6},
	{Rerelease, "worker", 3},
	{Crowd, "worker", 1},
	{Cancel, "worker", 6},
	{Kill, "worker", 2},
	{Pause, "worker [n]", 5},
	{Resume, "worker", 5},
	{Cut, "worker n [server]", 4},
	{Deafen, "worker n [server]", 5},
	{Hold, "worker n [server]", 6},
	{Lag, "worker n [server]", 4},
	{Mend, "worker", 9},
	{Reset, "worker", 3},
	{Late, "worker", 2},
	{Deliver, "worker", 3},
	{Duplicate, "worker", 3},
	{Restart, "server", 1},
	{Wipe, "server", 1},
	{Jump, "server duration", 3},
	{Wait, "duration", 14},
	{TTL, "worker duration", 0}, // only at the start of a schedule
}

func (v Verb) args() string {
	return verbSpecs[slices.Index(Verbs(), v)].takes
}

// Verbs returns all verbs.
func Verbs() []Verb {
	all := make([]Verb, len(verbSpecs))
	for i, l := range verbSpecs {
		all[i] = l.Verb
	}
	return all
}

// Random returns a schedule of about n steps, determined by the seed. Half of it is episodes: a fault hits a worker during a
// call, time passes, others make their calls, the fault ends.
func (sys *System) Random(seed uint64, n int) Schedule {
	g := generator{System: sys, Rand: rand.New(rand.NewPCG(seed, 0))}
	g.workers = 2 + g.IntN(2)
	if seed%8 == 0 {
		g.workers = MaxWorkers - g.IntN(2)
	}
	calm := g.IntN(4) == 0 // the shorter System.Wait then applies
	for _, l := range verbSpecs {
		skip := calm && (needsServer(l.Verb) || l.Verb == Kill || l.Verb == Pause)
		if skip || slices.Contains(sys.Without, l.Verb) || g.IntN(4) == 0 && l.Verb != Run { // with fewer verbs a schedule gets further
			continue
		}
		g.specs = append(g.specs, l)
	}
	var s Schedule
	for i := range g.workers {
		if seed%8 == 1 && !slices.Contains(sys.Without, TTL) && g.IntN(2) == 0 {
			s = append(s, Step{Verb: TTL, Worker: i, For: []time.Duration{1, 3, 10, 100}[g.IntN(4)] * time.Millisecond})
		}
	}
	for len(s) < n {
		if g.IntN(6) > 0 {
			s = append(s, g.step(g.pick(), g.IntN(g.workers)))
		} else {
			s = append(s, g.episode()...)
		}
	}
	return s.clean()
}

func needsServer(v Verb) bool {
	return slices.Contains([]Verb{Cut, Deafen, Hold, Lag, Mend, Reset, Restart, Wipe, Jump}, v)
}

type generator struct {
	*System
	*rand.Rand
	workers int
	specs   []verbSpec
}

// pick returns a random verb, of those given if any; Run if the schedule uses none of them.
func (g *generator) pick(of ...Verb) Verb {
	specs := slices.DeleteFunc(slices.Clone(g.specs), func(l verbSpec) bool { return len(of) > 0 && !slices.Contains(of, l.Verb) })
	total := 0
	for _, l := range specs {
		total += l.weight
	}
	if total == 0 {
		return Run
	}
	at := g.IntN(total)
	for _, l := range specs {
		if at -= l.weight; at < 0 {
			return l.Verb
		}
	}
	panic("unreachable")
}

func (g *generator) step(v Verb, worker int) Step {
	st := Step{Verb: v, Worker: worker, N: g.IntN(3), For: g.TTL * time.Duration([]int{1, 10, 40, 90, 110, 250}[g.IntN(6)]) / 100}
	if v == Jump && g.IntN(2) == 0 {
		st.For = g.TTL / 100
	}
	st.Server = g.IntN(g.Servers)
	if (v == Cut || v == Deafen || v == Hold || v == Lag) && (g.Servers < 2 || g.IntN(3) == 0) {
		st.Server = All
	}
	return st
}

func (g *generator) episode() Schedule {
	victim := g.IntN(g.workers)
	other := func() Step { return g.step(Run, (victim+1+g.IntN(g.workers-1))%g.workers) }
	fault, undo := g.pick(Hold, Deafen, Cut, Lag, Pause), Mend
	if fault == Pause {
		undo = Resume
	}
	s := Schedule{g.step(fault, victim), g.step(g.pick(Run, Release, Renew, Try), victim)}
	if g.IntN(2) == 0 {
		s = append(s, other())
	}
	s = append(s, Step{Verb: Wait, For: g.TTL * time.Duration([]int{40, 110, 250}[g.IntN(3)]) / 100})
	for range g.IntN(3) {
		s = append(s, other())
	}
	s = append(s, Step{Verb: undo, Worker: victim})
	for range 1 + g.IntN(3) {
		s = append(s, other())
	}
	return s
}

func (s Schedule) clean() Schedule {
	for i, st := range s {
		s[i], _ = parseStep(strings.Fields(st.String()))
	}
	return s
}

// shrink returns a small schedule for which fails still holds: it removes steps, then makes faults begin earlier.
func (s Schedule) shrink(fails func(Schedule) bool) Schedule {
	for size := len(s) / 2; size > 0; {
		smaller := false
		for at := 0; at+size <= len(s); {
			if without := slices.Delete(slices.Clone(s), at, at+size); fails(without) {
				s, smaller = without, true
			} else {
				at++
			}
		}
		if !smaller || size > len(s) {
			size = min(size, len(s)) / 2
		}
	}
	for i := range s {
		for s[i].N > 0 {
			less := slices.Clone(s)
			less[i].N--
			if !fails(less) {
				break
			}
			s = less
		}
	}
	return s
}
