package model

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
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

// getThenDel reports whether events are those of the lock that is to release wrongly.
func getThenDel(events []history.Event) bool {
	return strings.HasPrefix(events[0].Run.Scenario, "ReleaseGetThenDel") || events[0].Run.Scenario == "ReleaseTOCTOU"
}

// Every recorded history is a run of the model, and the judge says what the model says of it.
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
		require.Equal(t, history.Judge(events).Verdict == history.Violated, broken&(EntryLost|StaleWrite) != 0, "%s: %v", file, broken)
		if getThenDel(events) {
			_, err = Config{}.Replay(events)
			require.ErrorContains(t, err, "A release-foreign", file)
		}
	}
}

// Of those made by hand, the golden file says what the model forbids, and from which event. It allows what the judge
// calls safe; and what is violated with fencing on it forbids, or the store would be safe and violated.
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
			require.Zero(t, broken&(EntryLost|StaleWrite), file)
		case verdict == history.Violated && events[0].Run.Fencing == history.FencingOn:
			require.Error(t, err, file)
		case verdict == history.Violated && err == nil:
			require.NotZero(t, broken&(EntryLost|StaleWrite), file)
		}
	}
	golden(t, "histories.txt", b.String())
}

// What a broken store did, the model does without that guard.
func TestBrokenStore(t *testing.T) {
	c := Config{AcceptEqual: true}
	broken, err := c.Replay(read(t, "../../testdata/histories/violated-tokens-lost-equal-token-accepted.jsonl"))
	require.NoError(t, err)
	require.Equal(t, EntryLost|StaleWrite|Overtaken, broken)
}

// record writes steps as a history.
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
			if !step.Unheard && step.State.Workers[step.Worker].Phase == Ready {
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
			events = append(events, history.Event{Kind: history.KindFault, Name: "kill", Target: "resource"})
			refused = 0
		case AcquireOnly, ReadToken, Expire, Renew: // nobody tells
		}
		if write || step.Verb == Read || step.Verb == ReadRefused {
			events = append(events, decision)
			if !decision.Accepted {
				refused++
			}
		}
		if worker.Name != "" && !step.Unheard {
			events = append(events, worker)
		}
		was = step.State
	}
	for _, name := range events[0].Run.Workers {
		events = append(events, history.Event{Actor: name, Kind: history.KindReport, Name: history.Done})
	}
	return append(events, history.Event{
		Kind: history.KindFinal, Key: "k", Value: was.Value, Seen: uint64(was.Seen.Token), SeenSeq: uint64(was.Seen.Seq), Stale: refused,
	}, history.Event{Kind: history.KindEnd})
}

// What the model does is a history that the model allows; the judge finds it violated exactly when the model does; and
// with fencing on, the model with its guards forbids it then.
func TestRandomRuns(t *testing.T) {
	found := map[bool]int{}
	for _, f := range []history.Fencing{history.FencingOff, history.FencingWrites, history.FencingOn} {
		for n, c := range []Config{{}, {Regress: true}, {AcceptEqual: true}, {IgnoreSeq: true}, {ReleaseAny: true}} {
			for seed := range uint64(12) {
				random := rand.New(rand.NewPCG(seed, uint64(n)))
				c := bounded(f, c)
				var s State
				var steps []Step
				for range 30 {
					next := c.Next(s)
					steps = append(steps, next[random.IntN(len(next))])
					s = steps[len(steps)-1].State
				}
				events := record(c, steps)
				broken, err := c.Replay(events)
				require.NoError(t, err, "%v", steps)
				verdict := history.Judge(events)
				unsafe := s.Broken&(EntryLost|StaleWrite) != 0
				require.Equal(t, unsafe, broken&(EntryLost|StaleWrite) != 0, "%v", steps)
				require.Equal(t, unsafe, verdict.Verdict == history.Violated, "%v %v", verdict.Findings, steps)
				found[unsafe]++
				if unsafe && f == history.FencingOn {
					_, err = Config{}.Replay(events)
					require.Error(t, err, "%v", steps)
				}
			}
		}
	}
	require.Greater(t, min(found[true], found[false]), 30, "%v", found)
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
		"sent before it has read":   {a, tell("A", history.Sent, 1, "")},
		"adds two entries":          {a, decide("read", ""), tell("A", history.Read, 1, ""), tell("A", history.BeforeWrite, 1, "x\ny\n")},
		"reports another's token":   {a, b, tell("A", history.Released, 2, "")},
		"a token that never was":    {tell("A", history.Acquired, 5, ""), {Kind: history.KindDecision, Op: "read", Token: 3, Accepted: true}},
		"reports a token like that": {tell("A", history.Acquired, 5, ""), tell("A", history.Checked, 3, "")},
		"acquires under its grant":  {a, tell("A", history.Acquired, 2, "")},
		"a second grant is smaller": {b, a},
	} {
		_, err := Config{}.Replay(append(start, events...))
		require.ErrorContains(t, err, fmt.Sprintf("event %d:", len(events)+1), name)
	}
	// A reads again after B has written, and the store isn't told who writes: nothing is lost, and fences say nothing.
	broken, err := Config{}.Replay(append(start, a, b, decide("read", ""), tell("B", history.Read, 2, ""), decide("write", "b\n"),
		tell("B", history.Wrote, 2, "b\n"), decide("read", "b\n"), tell("A", history.Read, 1, "b\n"), decide("write", "b\na\n"), tell("A", history.Wrote, 1, "b\na\n")))
	require.NoError(t, err)
	require.Equal(t, Overtaken, broken)
	_, err = Config{}.Replay(append(start, tell("A", history.Acquired, 0, ""), tell("B", history.Acquired, 0, "")))
	require.NoError(t, err, "a lock without tokens")
}
