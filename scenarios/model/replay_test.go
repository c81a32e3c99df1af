package model

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/history"
)

func read(t *testing.T, file string) []history.Event {
	t.Helper()
	f, err := os.Open(file)
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	events, err := history.Decode(f)
	require.NoError(t, err)
	return events
}

func getThenDel(events []history.Event) bool {
	return strings.HasPrefix(events[0].Run.Scenario, "ReleaseGetThenDel") || events[0].Run.Scenario == "ReleaseTOCTOU"
}

func TestRecordedHistories(t *testing.T) {
	files, err := filepath.Glob("../../reports/results/*/*_*_*.jsonl")
	require.NoError(t, err)
	more, err := filepath.Glob("../../reports/testdata/*.jsonl")
	require.NoError(t, err)
	files = append(files, more...)
	require.Greater(t, len(files), 70)
	for _, file := range files {
		events := read(t, file)
		broken, err := Config{ReleaseAny: getThenDel(events)}.Replay(events)
		require.NoError(t, err, file)
		require.Equal(t, history.Judge(events).Verdict == history.Violated, broken&damage != 0, "%s: %v", file, broken)
		if getThenDel(events) {
			_, err = Config{}.Replay(events)
			require.ErrorContains(t, err, "A release-foreign", file)
		}
	}
}

// The golden file says from which event on the model forbids a history. It allows safe ones, and forbids those violated with
// fencing on.
func TestHandMadeHistories(t *testing.T) {
	files, err := filepath.Glob("../../testdata/histories/*.jsonl")
	require.NoError(t, err)
	var b strings.Builder
	for _, file := range files {
		events := read(t, file)
		broken, err := Config{}.Replay(events)
		says := "allowed"
		if err != nil {
			says = fmt.Sprint("forbidden, ", err)
		} else if broken != 0 {
			says = fmt.Sprint("allowed, and unsafe: ", broken)
		}
		fmt.Fprintf(&b, "%s: %s\n", strings.TrimSuffix(filepath.Base(file), ".jsonl"), says)
		switch verdict := history.Judge(events).Verdict; {
		case verdict == history.Safe:
			require.NoError(t, err, file)
			require.Zero(t, broken&damage, file)
		case verdict == history.Violated && events[0].Run.Fencing == history.FencingOn:
			require.Error(t, err, file)
		case verdict == history.Violated && err == nil:
			require.NotZero(t, broken&damage, file)
		}
	}
	golden(t, "histories.txt", b.String())
}

func TestBrokenStore(t *testing.T) {
	c := Config{AcceptEqual: true}
	broken, err := c.Replay(read(t, "../../testdata/histories/violated-tokens-lost-equal-token-accepted.jsonl"))
	require.NoError(t, err)
	require.Equal(t, EntryLost|StaleWrite|Overtaken, broken)
}

func record(c Config, steps []Step) []history.Event {
	events := []history.Event{{Kind: history.KindRun, Run: &history.Run{Scenario: "model", Fencing: c.Fencing, TokensLost: c.Regress, Workers: []string{"A", "B", "C"}}}}
	var was State
	refused := 0
	for _, step := range steps {
		worker := history.Event{Actor: string(rune('A' + step.Worker)), Kind: history.KindReport, Token: uint64(step.Fence.Token)}
		write := step.Verb == Accept || step.Verb == Refuse
		decision := history.Event{
			Actor: "resource", Kind: history.KindDecision, Key: "k", Op: "read", Value: step.Value, Seen: uint64(was.Seen.Token), SeenSeq: uint64(was.Seen.Seq),
			Accepted: step.Verb == Accept || step.Verb == Read, Enforced: c.Fencing == history.FencingOn || write && c.Fencing == history.FencingWrites,
		}
		if write {
			decision.Op, decision.Seq = "write", uint64(step.Fence.Seq)
		}
		if write || c.Fencing == history.FencingOn {
			decision.Token = uint64(step.Fence.Token)
		}
		if !decision.Accepted && !write {
			decision.Value = ""
		}
		switch step.Verb {
		case Acquire:
			worker.Name = history.Acquired
		case Read:
			worker.Name, worker.Value = history.Read, step.Value
		case ReadRefused:
			worker.Name = history.ReadStale
		case Send:
			worker.Name, worker.Value = history.BeforeWrite, step.Value
		case Accept, Refuse:
			worker.Name = history.WriteStale
			if !step.ReplyLost && step.State.Workers[step.Worker].Phase == Ready {
				worker.Name, worker.Value = history.Wrote, step.Value
			}
		case Release:
			worker.Name = history.ReleaseLost
			if was.Holder == was.Workers[step.Worker].Grant {
				worker.Name = history.Released
			} else if was.Holder != step.State.Holder {
				worker.Name = history.ReleaseForeign
			}
		case Crash:
			events = append(events, history.Event{Actor: "controller", Kind: history.KindFault, Name: "kill", Target: "resource"})
			refused = 0
		case AcquireOnly, ReadToken, Expire, Renew:
		}
		if write || step.Verb == Read || step.Verb == ReadRefused {
			events = append(events, decision)
			if !decision.Accepted {
				refused++
			}
		}
		if worker.Name != "" && !step.ReplyLost {
			events = append(events, worker)
		}
		was = step.State
	}
	for _, name := range events[0].Run.Workers {
		events = append(events, history.Event{Actor: name, Kind: history.KindReport, Name: history.Done})
	}
	return append(events, history.Event{
		Actor: "controller", Kind: history.KindFinal, Key: "k", Value: was.Value, Seen: uint64(was.Seen.Token), SeenSeq: uint64(was.Seen.Seq), Refusals: refused,
	}, history.Event{Kind: history.KindEnd})
}

// run returns 30 random steps, then releases by all workers, and the final state. With reported, the 30 are steps that are
// reported, and no read is repeated.
func run(c Config, reported bool, seed uint64) (steps []Step, end State) {
	random := rand.New(rand.NewPCG(seed, 0))
	take := func(step Step) { steps, end = append(steps, step), step.State }
	for range 30 {
		next := slices.DeleteFunc(c.Next(end), func(step Step) bool {
			return reported && (step.ReplyLost || step.Verb == Release || step.Verb == Read && end.Workers[step.Worker].Phase == Ready)
		})
		take(next[random.IntN(len(next))])
	}
	for worker := range c.Workers {
		next := c.Next(end)
		if i := slices.IndexFunc(next, func(step Step) bool { return step.Verb == Release && step.Worker == worker }); i >= 0 {
			take(next[i])
		}
	}
	return steps, end
}

const damage = EntryLost | StaleWrite

var modes = []history.Fencing{history.FencingOff, history.FencingWrites, history.FencingOn}

// The judge finds the same violations as the model, and with all guards and fencing on there are none.
func TestRandomRuns(t *testing.T) {
	found := map[bool]int{}
	for _, f := range modes {
		for n, c := range []Config{{}, {Regress: true}, {AcceptEqual: true}, {IgnoreSeq: true}, {ReleaseAny: true}} {
			for seed := range uint64(12) {
				c := bounded(f, c)
				steps, end := run(c, false, 100*uint64(n)+seed)
				events := record(c, steps)
				broken, err := c.Replay(events)
				require.NoError(t, err, "%v", steps)
				verdict := history.Judge(events)
				unsafe := end.Broken&damage != 0
				require.Equal(t, unsafe, broken&damage != 0, "%v", steps)
				require.Equal(t, unsafe, verdict.Verdict == history.Violated, "%v %v", verdict.Findings, steps)
				found[unsafe]++
				if unsafe && f == history.FencingOn {
					_, err = Config{}.Replay(events)
					require.Error(t, err, "%v", steps)
				}
				if n == 0 {
					requireHarmless(t, verdict)
				}
			}
		}
	}
	require.Greater(t, min(found[true], found[false]), 30, "%v", found)
}

func requireHarmless(t *testing.T, got history.Result) {
	t.Helper()
	for _, f := range got.Findings {
		require.True(t, got.Verdict == history.Violated || f == "no write was accepted" || f == "fewer than two grants" ||
			f == "no holder acted after its successor's grant: the hazard did not occur", f)
	}
}

func TestRandomRunsWithoutTokens(t *testing.T) {
	for seed := range uint64(100) {
		c := bounded(history.FencingOff, Config{})
		steps, end := run(c, true, seed)
		events := record(c, steps)
		for i := range events {
			events[i].Token, events[i].Seq, events[i].Seen, events[i].SeenSeq = 0, 0, 0, 0
		}
		got := history.Judge(events)
		require.Equal(t, end.Broken&EntryLost != 0, got.Verdict == history.Violated, "%v %v", got, steps)
		requireHarmless(t, got)
	}
}

func TestDefectiveStores(t *testing.T) {
	for _, d := range []struct {
		config  Config
		finding string
	}{
		{Config{AcceptEqual: true}, "a stale write was accepted"},
		{Config{IgnoreSeq: true}, "a stale write was accepted"},
		{Config{NoRaise: true}, "the resource forgot a fence"},
		{Config{StaleReads: true}, "a fenced read with fence"},
		{Config{ForgetFence: true}, "the resource forgot a fence"},
		{Config{LoseValue: true}, "was accepted and is lost"},
		{Config{ApplyStale: true}, "although its write was refused"},
	} {
		found := 0
		for seed := range uint64(200) {
			c := bounded(history.FencingOn, d.config)
			steps, end := run(c, false, seed)
			got := history.Judge(record(c, steps))
			if strings.Contains(strings.Join(got.Findings, "; "), d.finding) {
				require.Equal(t, history.Violated, got.Verdict)
				found++
			}
			if !c.LoseValue && !c.ApplyStale { // the model doesn't see that damage
				require.False(t, got.Verdict == history.Safe && end.Broken&damage != 0, "%+v: %v", c, steps)
			}
		}
		require.Positive(t, found, "%+v", d)
	}
}

// Without an event a violated history must not be safe, nor a safe one if the verdict rests on the event. That needs reports of
// everything.
func TestDroppedEvents(t *testing.T) {
	found := map[history.Verdict]int{}
	for _, f := range modes {
		for seed := range uint64(100) {
			c := Config{Fencing: f, Workers: 2, Grants: 3, Writes: 2}
			steps, _ := run(c, true, seed)
			events := record(c, steps)
			whole := history.Judge(events).Verdict
			found[whole]++
			for i, e := range events {
				got := history.Judge(slices.Delete(slices.Clone(events), i, i+1)).Verdict
				switch {
				case whole == history.Violated:
					require.NotEqual(t, history.Safe, got, "without event %d, %+v", i+1, e)
				case whole == history.Safe && (e.Kind == history.KindFault || e.Kind == history.KindReport && e.Name != history.Acquired && e.Name != history.Done):
					require.NotEqual(t, history.Violated, got, "without event %d, %+v", i+1, e)
				case whole == history.Safe:
					require.Equal(t, history.Inconclusive, got, "without event %d, %+v", i+1, e)
				}
			}
		}
	}
	require.Greater(t, min(found[history.Safe], found[history.Violated]), 20, "%v", found)
}

func TestShortHistories(t *testing.T) {
	tell := func(actor, name string, token uint64, value string) history.Event {
		return history.Event{Actor: actor, Kind: history.KindReport, Name: name, Token: token, Value: value}
	}
	decide := func(op, value string) history.Event {
		return history.Event{Actor: "resource", Kind: history.KindDecision, Op: op, Key: "k", Value: value, Accepted: true}
	}
	a, b := tell("A", history.Acquired, 1, ""), tell("B", history.Acquired, 2, "")
	start := []history.Event{{Kind: history.KindRun, Run: &history.Run{Fencing: history.FencingOff}}}
	for name, events := range map[string][]history.Event{
		"held though free":          {a, tell("A", history.Released, 1, ""), tell("B", history.Held, 0, "")},
		"held after a late release": {a, b, tell("A", history.Released, 1, ""), tell("C", history.Held, 0, "")}, // which found the lock free
		"sent before it has read":   {a, tell("A", history.Sent, 1, "")},
		"goes on after it failed":   {a, tell("A", history.Failed, 0, ""), tell("A", history.Released, 1, "")},
		"checks no lease":           {tell("A", history.Checked, 0, "")},
		"reads another ledger's":    {a, decide("read", ""), {Kind: history.KindDecision, Op: "read", Key: "k2", Accepted: true}, tell("B", history.Read, 0, "")},
		"adds two entries":          {a, decide("read", ""), tell("A", history.Read, 1, ""), tell("A", history.BeforeWrite, 1, "x\ny\n")},
		"reports another's token":   {a, b, tell("A", history.Released, 2, "")},
		"a token that never was":    {tell("A", history.Acquired, 5, ""), {Kind: history.KindDecision, Op: "read", Token: 3, Accepted: true}},
		"reports a token like that": {tell("A", history.Acquired, 5, ""), tell("A", history.Checked, 3, "")},
		"acquires under its grant":  {a, tell("A", history.Acquired, 2, "")},
		"a second grant is smaller": {b, a},
		"a sixth worker": {
			a, b, tell("C", history.Done, 0, ""), tell("D", history.Done, 0, ""), tell("E", history.Done, 0, ""), tell("F", history.Done, 0, ""),
		},
	} {
		_, err := Config{}.Replay(append(start, events...))
		require.ErrorContains(t, err, fmt.Sprintf("event %d:", len(events)+1), name)
	}
	_, err := Config{}.Replay([]history.Event{
		{Kind: history.KindRun, Run: &history.Run{Fencing: history.FencingOn}},
		a,
		{Kind: history.KindDecision, Op: "read", Accepted: true, Enforced: true},
	})
	require.ErrorContains(t, err, "event 3:", "a fence without a token")
	// Whether B's lease was lost before A frees the lock is open; if not, there are two holders.
	broken, err := Config{ReleaseAny: true}.Replay(append(start, a, b, tell("A", history.ReleaseForeign, 1, ""), tell("C", history.Acquired, 3, "")))
	require.NoError(t, err)
	require.Zero(t, broken)
	// A reads again after B has written, and the store gets no tokens: nothing is lost, and fences show nothing.
	broken, err = Config{}.Replay(append(start, a, b, decide("read", ""), tell("B", history.Read, 2, ""), decide("write", "b\n"),
		tell("B", history.Wrote, 2, "b\n"), decide("read", "b\n"), tell("A", history.Read, 1, "b\n"), decide("write", "b\na\n"), tell("A", history.Wrote, 1, "b\na\n")))
	require.NoError(t, err)
	require.Equal(t, Overtaken, broken)
	_, err = Config{}.Replay(append(start, tell("A", history.Acquired, 0, ""), tell("A", history.Checked, 0, ""), tell("B", history.Acquired, 0, ""),
		tell("A", history.Lost, 0, ""), tell("A", history.LostLease, 0, ""), tell("B", history.ReleaseGap, 0, "")))
	require.NoError(t, err, "a lock without tokens")
	_, err = Config{ForgetFence: true}.Replay(read(t, "../../testdata/histories/safe-holder-killed.jsonl"))
	require.NoError(t, err, "a worker's death is no crash of the store")
}
