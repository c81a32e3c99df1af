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

// The verbs. What a step can't do, because its worker is in another state, it leaves undone, so that any part of a schedule is a
// schedule.
const (
	Run       Verb = "run"       // the worker makes its next call: acquire, fenced read, write, release
	Try       Verb = "try"       // the worker acquires without waiting
	Renew     Verb = "renew"     // the worker renews its lease
	Release   Verb = "release"   // the worker releases the lock, whatever it has done
	Rerelease Verb = "rerelease" // the worker releases its previous lease once more
	Cancel    Verb = "cancel"    // the context of the worker's call ends
	Kill      Verb = "kill"      // the worker's process dies
	Pause     Verb = "pause"     // nothing enters or leaves the worker's process, after N more requests have left
	Resume    Verb = "resume"    //
	Cut       Verb = "cut"       // requests are lost, after N more have passed; no new connection can be made meanwhile
	Deafen    Verb = "deafen"    // replies are lost, after N more have passed; no new connection can be made meanwhile
	Hold      Verb = "hold"      // requests are kept in the network, after N more have passed; no new connection can be made meanwhile
	Lag       Verb = "lag"       // replies are kept in the network, after N more have passed; no new connection can be made meanwhile
	Mend      Verb = "mend"      // ends cut, deafen, hold and lag: what is held arrives, connections that have lost something are closed
	Reset     Verb = "reset"     // the worker's connections are closed
	Late      Verb = "late"      // the worker's next write stays in the network
	Deliver   Verb = "deliver"   // a late write arrives
	Duplicate Verb = "duplicate" // the worker's last write arrives again
	Restart   Verb = "restart"   // a server restarts with its data
	Wipe      Verb = "wipe"      // a server restarts without its data
	Jump      Verb = "jump"      // a server's clock jumps forward by For
	Wait      Verb = "wait"      // time passes
)

// Step is one step of a [Schedule].
type Step struct {
	Verb   Verb
	Worker int           // of all but those of servers, and wait
	Server int           // of restart, wipe and jump; of cut, deafen, hold and lag: the server whose connections are hit, or All
	N      int           // of cut, deafen, hold, lag and pause: how many messages pass before
	For    time.Duration // of wait and jump
}

// All is every server.
const All = -1

// Schedule is what happens, one step after the other.
type Schedule []Step

// String is the schedule as text, a step a line, which [Parse] reads.
func (s Schedule) String() string {
	var b strings.Builder
	for _, st := range s {
		fmt.Fprintln(&b, st)
	}
	return b.String()
}

func (st Step) String() string {
	switch st.Verb {
	case Wait:
		return fmt.Sprintf("%s %v", st.Verb, st.For)
	case Restart, Wipe:
		return fmt.Sprintf("%s %d", st.Verb, st.Server)
	case Jump:
		return fmt.Sprintf("%s %d %v", st.Verb, st.Server, st.For)
	case Cut, Deafen, Hold, Lag:
		if st.Server != All {
			return fmt.Sprintf("%s %s %d %d", st.Verb, name(st.Worker), st.N, st.Server)
		}
		return fmt.Sprintf("%s %s %d", st.Verb, name(st.Worker), st.N)
	default:
		if st.Verb == Pause && st.N > 0 {
			return fmt.Sprintf("%s %s %d", st.Verb, name(st.Worker), st.N)
		}
		return fmt.Sprintf("%s %s", st.Verb, name(st.Worker))
	}
}

// name is that of a worker: A, B, C.
func name(worker int) string { return string(rune('A' + worker)) }

// Parse reads a schedule. Empty lines and those that begin with # are skipped.
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

func parseStep(words []string) (st Step, err error) {
	st.Verb = Verb(words[0])
	if !slices.ContainsFunc(alphabet, func(l letter) bool { return l.Verb == st.Verb }) {
		return st, fmt.Errorf("there is no verb %q; there are %v", st.Verb, verbs())
	}
	args := words[1:]
	want := "a worker, as in \"run A\""
	switch st.Verb {
	case Wait:
		want = "how long, as in \"wait 1s\""
		if len(args) == 1 {
			st.For, err = time.ParseDuration(args[0])
		}
	case Restart, Wipe:
		want = "a server's number, as in \"wipe 0\""
		if len(args) == 1 {
			st.Server, err = strconv.Atoi(args[0])
		}
	case Jump:
		want = "a server's number and how far, as in \"jump 0 5s\""
		if len(args) == 2 {
			st.Server, err = strconv.Atoi(args[0])
			if err == nil {
				st.For, err = time.ParseDuration(args[1])
			}
			args = args[:1]
		} else {
			args = nil
		}
	case Cut, Deafen, Hold, Lag:
		want = "a worker, how many messages pass before, and perhaps a server, as in \"cut A 0\" and \"cut A 0 2\""
		st.Server = All
		switch len(args) {
		case 3:
			st.Server, err = strconv.Atoi(args[2])
			if err != nil || st.Server < 0 {
				return st, fmt.Errorf("it wants %s", want)
			}
			fallthrough
		case 2:
			st.N, err = strconv.Atoi(args[1])
		default:
			args = nil
		}
		fallthrough
	default:
		if st.Verb == Pause && len(args) == 2 {
			st.N, err = strconv.Atoi(args[1])
			args = args[:1]
		}
		if len(args) > 0 && len(args[0]) == 1 && 'A' <= args[0][0] && args[0][0] < 'A'+MaxWorkers {
			st.Worker = int(args[0][0] - 'A')
			args = args[:1]
		} else {
			args = nil
		}
	}
	if len(args) != 1 || err != nil || st.N < 0 || st.Server < All || st.For < 0 {
		return st, fmt.Errorf("it wants %s", want)
	}
	return st, nil
}

// MaxWorkers is how many workers a schedule may have.
const MaxWorkers = 5

// letter is a verb and how often schedules use it.
type letter struct {
	Verb
	weight int
}

var alphabet = []letter{
	{Run, 40},
	{Try, 4},
	{Renew, 4},
	{Release, 6},
	{Rerelease, 3},
	{Cancel, 6},
	{Kill, 2},
	{Pause, 5},
	{Resume, 5},
	{Cut, 4},
	{Deafen, 5},
	{Hold, 6},
	{Lag, 4},
	{Mend, 9},
	{Reset, 3},
	{Late, 2},
	{Deliver, 3},
	{Duplicate, 3},
	{Restart, 1},
	{Wipe, 1},
	{Jump, 3},
	{Wait, 14},
}

func verbs() []Verb {
	all := make([]Verb, len(alphabet))
	for i, l := range alphabet {
		all[i] = l.Verb
	}
	return all
}

// Random returns a schedule of about n steps that follows from the seed. Half of it are single steps, and half are episodes: a fault hits
// a worker in the midst of a call, time passes, others make their calls, the fault ends.
func (sys *System) Random(seed uint64, n int) Schedule {
	g := generator{System: sys, Rand: rand.New(rand.NewPCG(seed, 0))}
	g.workers = 2 + g.IntN(2)
	calm := g.IntN(4) == 0 // System.Wait is longer after a fault
	for _, l := range alphabet {
		skip := (calm || sys.Servers == 0) && needsServer(l.Verb) || calm && (l.Verb == Kill || l.Verb == Pause)
		if skip || slices.Contains(sys.Without, l.Verb) || g.IntN(4) == 0 && l.Verb != Run { // with fewer verbs a schedule gets further
			continue
		}
		g.letters = append(g.letters, l)
	}
	var s Schedule
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
	letters []letter
}

// pick returns one of the verbs, if any are given that the schedule may have, or of all.
func (g *generator) pick(of ...Verb) Verb {
	letters := slices.DeleteFunc(slices.Clone(g.letters), func(l letter) bool { return len(of) > 0 && !slices.Contains(of, l.Verb) })
	total := 0
	for _, l := range letters {
		total += l.weight
	}
	if total == 0 {
		return Run
	}
	at := g.IntN(total)
	for _, l := range letters {
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
	if g.Servers > 0 {
		st.Server = g.IntN(g.Servers)
	}
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

// clean clears what a step's verb doesn't use.
func (s Schedule) clean() Schedule {
	for i, st := range s {
		s[i], _ = parseStep(strings.Fields(st.String()))
	}
	return s
}

// shrink returns the smallest schedule that it finds for which fails still holds, by leaving out steps, and then by faults that hit earlier.
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
