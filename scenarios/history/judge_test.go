package history_test

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/history"
)

var update = flag.Bool("update", false, "rewrite testdata/judged.txt")

// recorded has hand-made histories. A file's name is its verdict and what happens.
var recorded = filepath.Join("..", "..", "testdata", "histories")

func load(t *testing.T, name string) []history.Event {
	t.Helper()
	f, err := os.Open(filepath.Join(recorded, name+".jsonl"))
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	events, err := history.Decode(f)
	require.NoError(t, err)
	return events
}

func names(tb testing.TB) (all []string) {
	tb.Helper()
	files, err := os.ReadDir(recorded)
	require.NoError(tb, err)
	for _, f := range files {
		all = append(all, strings.TrimSuffix(f.Name(), ".jsonl"))
	}
	return all
}

func withoutTokens(events []history.Event) []history.Event {
	for i := range events {
		events[i].Token, events[i].Seq, events[i].Seen, events[i].SeenSeq, events[i].Enforced = 0, 0, 0, 0, false
	}
	if events[0].Run != nil {
		events[0].Run.Fencing = history.FencingOff
	}
	return events
}

func change(who, name string, to func(e *history.Event)) func([]history.Event) []history.Event {
	return func(events []history.Event) []history.Event {
		i := slices.IndexFunc(events, func(e history.Event) bool { return (e.Actor == who || e.Target == who) && e.Name == name })
		to(&events[i])
		return events
	}
}

func twice(name string) func([]history.Event) []history.Event {
	return func(events []history.Event) []history.Event {
		i := slices.IndexFunc(events, func(e history.Event) bool { return e.Name == name })
		return slices.Insert(events, i, events[i])
	}
}

func leavesLock(worker string) func([]history.Event) []history.Event {
	return func(events []history.Event) []history.Event {
		events = change(worker, history.Done, func(e *history.Event) {
			*e = history.Event{Actor: "controller", Kind: history.KindFault, Name: "kill", Target: worker}
		})(events)
		return slices.DeleteFunc(events, func(e history.Event) bool {
			return e.Actor == worker && (e.Name == history.Released || e.Name == history.ReleaseLost)
		})
	}
}

func refusedTwice(events []history.Event) []history.Event {
	events[17].Refusals = 2
	return slices.Insert(events, 14, events[13], events[14])
}

// testdata/judged.txt has the result for each hand-made history, and for edits of some.
func TestJudge(t *testing.T) {
	var b strings.Builder
	write := func(name string, events []history.Event) history.Result {
		got := history.Judge(events)
		_, _ = fmt.Fprintf(&b, "== %s\n%v, %d stale, %d refused, writers %q, lost %q\n", name, got.Verdict, got.Stale, got.Refused, got.Writers, got.Lost)
		for _, f := range got.Findings {
			_, _ = fmt.Fprintln(&b, " -", f)
		}
		for _, n := range got.Notes {
			_, _ = fmt.Fprintln(&b, " note:", n)
		}
		return got
	}
	for _, name := range names(t) {
		verdict, about, _ := strings.Cut(name, "-")
		events := load(t, name)
		if len(events) > 0 && events[0].Run != nil {
			require.Equal(t, strings.ReplaceAll(about, "-", " "), events[0].Run.Scenario)
		}
		got := write(name, events)
		require.Equal(t, verdict, got.Verdict.String(), name)
		if verdict == "safe" {
			_, _ = fmt.Fprintln(&b, strings.Join(history.Trace(events), "\n"))
		}
		if len(events) == 0 {
			continue
		}
		const why = "B was granted the lock too early"
		events = slices.Insert(events, len(events)-1, history.Event{Kind: history.KindDoubt, Detail: why})
		doubted := history.Judge(events)
		_, _ = fmt.Fprintln(&b, "in doubt:", doubted.Verdict)
		require.Subset(t, doubted.Findings, append(got.Findings, why), name)
		if events[0].Run != nil && events[0].Run.Fencing == history.FencingOff {
			write(name+", without tokens", withoutTokens(load(t, name)))
		}
	}
	for _, c := range []struct {
		name, what string
		edit       func([]history.Event) []history.Event
	}{
		{"safe-holder-killed", "without tokens", withoutTokens},
		{"safe-late-write-refused", "a release under another's token", change("B", history.Released, func(e *history.Event) { e.Token = 1 })},
		{"safe-late-write-refused", "a release under nobody's token", change("B", history.Released, func(e *history.Event) { e.Token = 9 })},
		{"safe-late-write-refused", "a read numbered less than an accepted call", func(events []history.Event) []history.Event {
			for i := range events {
				events[i].Seq, events[i].SeenSeq = 3*events[i].Seq, 3*events[i].SeenSeq
			}
			return slices.Insert(events, 9, history.Event{
				Actor: "resource", Kind: history.KindDecision, Op: "read", Key: "k", Token: 2, Seq: 2, Seen: 2, SeenSeq: 3, Accepted: true, Enforced: true, Value: "B\n",
			})
		}},
		{"safe-late-write-refused", "a read without a token", func(events []history.Event) []history.Event {
			events[2].Token, events[6].Seen = 0, 0
			return events
		}},
		{"safe-late-release-unfenced", "a foreign release", change("A", history.ReleaseLost, func(e *history.Event) { e.Name = history.ReleaseForeign })},
		{"safe-late-release-unfenced", "then a foreign release in time", change("B", history.Released, func(e *history.Event) { e.Name = history.ReleaseForeign })},
		{"safe-refusals-before-a-crash", "a worker is killed instead", change("resource", "kill", func(e *history.Event) { e.Target = "A" })},
		{"inconclusive-hazard-never-came-about", "lost without a successor", change("A", history.Released, func(e *history.Event) { e.Name = history.ReleaseLost })},
		{"inconclusive-hazard-never-came-about", "the last is lost", change("B", history.Released, func(e *history.Event) { e.Name = history.ReleaseLost })},
		{"inconclusive-hazard-never-came-about", "a foreign one without a successor", change("A", history.Released, func(e *history.Event) {
			e.Name, e.Token = history.ReleaseForeign, 0
		})},
		{"safe-late-release-unfenced", "no tokens to lose", func(events []history.Event) []history.Event {
			events[0].Run.TokensLost = true
			return withoutTokens(events)
		}},
		{"safe-late-release-unfenced", "no tokens, a foreign release", func(events []history.Event) []history.Event {
			return change("A", history.ReleaseLost, func(e *history.Event) { e.Name = history.ReleaseForeign })(withoutTokens(events))
		}},
		{"safe-late-release-unfenced", "no tokens, killed after a late read", func(events []history.Event) []history.Event {
			events = withoutTokens(events)
			late := slices.IndexFunc(events, func(e history.Event) bool { return e.Name == history.ReleaseLost })
			read := slices.IndexFunc(events, func(e history.Event) bool { return e.Actor == "B" && e.Name == history.Read })
			again := events[read]
			again.Actor = "A"
			return leavesLock("A")(slices.Insert(events, late, events[read-1], again))
		}},
		{"safe-late-release-unfenced", "one token of two", func(events []history.Event) []history.Event {
			return change("B", history.Acquired, func(e *history.Event) { e.Token = 1 })(withoutTokens(events))
		}},
		{"safe-late-release-unfenced", "no tokens, other keys", func(events []history.Event) []history.Event {
			return change("B", history.Acquired, func(e *history.Event) { e.Key = "another" })(withoutTokens(events))
		}},
		{"safe-late-release-unfenced", "no tokens, one grant", func(events []history.Event) []history.Event {
			return slices.Delete(withoutTokens(events), 1, 2)
		}},
		{"safe-late-release-unfenced", "no tokens, fenced", func(events []history.Event) []history.Event {
			events = withoutTokens(events)
			events[0].Run.Fencing = history.FencingOn
			return events
		}},
		{"safe-late-release-unfenced", "one token of two, the first", func(events []history.Event) []history.Event {
			return change("A", history.Acquired, func(e *history.Event) { e.Token = 1 })(withoutTokens(events))
		}},
		{"safe-late-write-refused", "it begins twice", func(events []history.Event) []history.Event { return slices.Insert(events, 1, events[0]) }},
		{"inconclusive-tokens-lost-but-they-grew", "a grant reported twice", twice(history.Acquired)},
		{"inconclusive-one-grant", "without tokens, reported twice, then killed", func(events []history.Event) []history.Event {
			return leavesLock("A")(twice(history.Acquired)(withoutTokens(events)))
		}},
		{"safe-holder-killed", "without a successor", func(events []history.Event) []history.Event {
			events[4] = history.Event{Actor: "A", Kind: history.KindReport, Name: history.Released, Token: 1}
			return leavesLock("B")(slices.Insert(events, 5, history.Event{Actor: "A", Kind: history.KindReport, Name: history.Done}))
		}},
		{"safe-late-write-refused", "killed after its successor's grant", func(events []history.Event) []history.Event {
			events[0].Run.Workers, events[17].Refusals = []string{"A", "B", "C"}, 0
			return slices.Insert(leavesLock("A")(slices.Delete(events, 12, 15)), 13,
				history.Event{Actor: "C", Kind: history.KindReport, Name: history.Acquired, Token: 3},
				history.Event{Actor: "C", Kind: history.KindReport, Name: history.Done})
		}},
		{"safe-holder-killed", "another is killed, too", func(events []history.Event) []history.Event {
			events[0].Run.Workers = append(events[0].Run.Workers, "C")
			return slices.Insert(events, 5, history.Event{Actor: "controller", Kind: history.KindFault, Name: "kill", Target: "C"})
		}},
		{"safe-late-release-unfenced", "a grant after a foreign release", func(events []history.Event) []history.Event {
			events[11].Name = history.ReleaseForeign
			return slices.Insert(events, 12, history.Event{Actor: "A", Kind: history.KindReport, Name: history.Acquired, Token: 3})
		}},
		{"safe-late-write-refused", "a grant's own read after its write", func(events []history.Event) []history.Event {
			return slices.Insert(events, 9, history.Event{
				Actor: "resource", Kind: history.KindDecision, Op: "read", Key: "k", Token: 2, Seen: 2, SeenSeq: 1, Accepted: true, Enforced: true, Value: "B\n",
			})
		}},
		{"safe-late-write-refused", "a run that names no workers", func(events []history.Event) []history.Event {
			events[0].Run.Workers = nil
			return events
		}},
		{"violated-entry-lost-from-a-read", "and at the end", func(events []history.Event) []history.Event {
			events[len(events)-2].Value = ""
			return events
		}},
		{"safe-late-write-refused", "refused twice", refusedTwice},
		{"violated-refused-write-took-effect", "refused twice", refusedTwice},
		{"safe-late-write-refused", "then live ones are refused", func(events []history.Event) []history.Event {
			live := events[13]
			live.Token, live.Seq, events[17].Refusals = 2, 2, 3
			read := live
			read.Op, read.Seq = "read", 0
			return slices.Insert(events, 15, live, read)
		}},
		{"safe-late-write-refused", "a refusal reported twice", twice(history.WriteStale)},
		{"safe-late-write-refused", "a write refused for want of a token", func(events []history.Event) []history.Event {
			events[13].Token, events[13].Seq = 0, 0
			return events
		}},
		{"violated-write-without-a-token", "with fencing of writes", func(events []history.Event) []history.Event {
			events[0].Run.Fencing = history.FencingWrites
			for i := range events {
				if events[i].Op == "read" {
					events[i].Token, events[i].Enforced = 0, false
				}
			}
			return events
		}},
		{"safe-late-write-refused", "a refusal under nobody's token", func(events []history.Event) []history.Event {
			for i := range events { // B has 3
				e := &events[i]
				e.Token, e.Seen = e.Token+e.Token/2, e.Seen+e.Seen/2
			}
			nobodys := events[13]
			nobodys.Token, events[17].Refusals = 2, 2
			return slices.Insert(events, 15, nobodys)
		}},
		{"safe-late-write-refused", "another ledger, without events", func(events []history.Event) []history.Event {
			events[0].Run.Keys = []string{"k", "k2"}
			return events
		}},
		{"safe-late-write-refused", "two doubts", func(events []history.Event) []history.Event {
			return slices.Insert(events, 18, history.Event{Kind: history.KindDoubt, Detail: "one"}, history.Event{Kind: history.KindDoubt, Detail: "two"})
		}},
		{"safe-entry-refused-and-then-accepted", "an entry twice, and another between", func(events []history.Event) []history.Event {
			events[len(events)-2].Value = "B\nA\nB\n"
			return events
		}},
		{"safe-tokens-lost-successor-refused", "late is only a write of one that has released", func(events []history.Event) []history.Event {
			events[7], events[8] = events[18], events[19]
			events[7].Name = history.Released
			return slices.Delete(slices.Delete(events, 17, 20), 14, 16)
		}},
		{"safe-late-write-refused", "its entry is accepted under another's token", func(events []history.Event) []history.Event {
			i := slices.IndexFunc(events, func(e history.Event) bool { return e.Op == "write" && e.Accepted })
			again := events[i]
			again.Value, again.Seq, again.Seen, again.SeenSeq = history.Append(again.Value, "A"), again.Seq+1, again.Token, again.Seq
			for j := i + 1; j < len(events); j++ {
				if e := &events[j]; e.Seen == again.Token {
					e.SeenSeq = again.Seq
				}
				if e := &events[j]; e.Kind == history.KindFinal {
					e.Value = again.Value
				}
			}
			return slices.Insert(events, i+1, again)
		}},
		{"safe-entry-refused-and-then-accepted", "under another's token", func(events []history.Event) []history.Event {
			for i := range events {
				if e := &events[i]; e.Actor == "A" && e.Token == 3 {
					e.Actor = "B"
				}
			}
			return events
		}},
		{"safe-entry-refused-and-then-accepted", "then the refused write comes again", func(events []history.Event) []history.Event {
			write := func(accepted bool) int {
				return slices.IndexFunc(events, func(e history.Event) bool {
					_, entry, _ := strings.Cut(e.Value, "B\n")
					return e.Op == "write" && e.Accepted == accepted && (entry == "A\n" || e.Value == "A\n")
				})
			}
			late, own := events[write(false)], write(true)
			late.Seen, late.SeenSeq = events[own].Token, events[own].Seq
			events[len(events)-2].Refusals++
			return slices.Insert(events, own+1, late)
		}},
		{"safe-late-write-refused", "a decision by a worker", change("resource", "", func(e *history.Event) { e.Actor = "A" })},
		{"safe-late-write-refused", "a fault by a worker", change("controller", "pause", func(e *history.Event) { e.Actor = "A" })},
		{"safe-late-write-refused", "a final by the resource", func(events []history.Event) []history.Event {
			events[len(events)-2].Actor = "resource"
			return events
		}},
		{"safe-late-write-refused", "a worker that the run doesn't name", func(events []history.Event) []history.Event {
			events[0].Run.Workers = []string{"B"}
			return events
		}},
	} {
		write(c.name+", "+c.what, c.edit(load(t, c.name)))
	}
	golden := filepath.Join("testdata", "judged.txt")
	if *update {
		require.NoError(t, os.WriteFile(golden, []byte(b.String()), 0o644))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	require.Equal(t, string(want), b.String(), "if the change is meant, run go test ./scenarios/history -update, and read it")
}

func TestReportsWithoutEffect(t *testing.T) {
	for _, name := range []string{
		history.Held, history.Checked, history.BeforeWrite, history.Sent, history.ReleaseGap, history.LostLease, history.Lost,
	} {
		report := history.Event{Actor: "A", Kind: history.KindReport, Name: name}
		require.Equal(t, history.Safe, history.Judge(slices.Insert(load(t, "safe-late-write-refused"), 2, report)).Verdict, name)
	}
}

func TestTimesAndNamesMeanNothing(t *testing.T) {
	for _, name := range names(t) {
		events := load(t, name)
		want, trace := history.Judge(events), history.Trace(events)
		for i := range events {
			events[i].Time, events[i].Until = time.Unix(int64(-i), 0), time.Unix(int64(i*i%7), 0)
		}
		require.Equal(t, want, history.Judge(events), name)
		for i := range events {
			e := &events[i]
			if e.Token != 0 {
				e.Token += 1000
			}
			if e.Seen != 0 {
				e.Seen += 1000
			}
			e.Key += "/other"
			if e.Run != nil {
				for i := range e.Run.Keys {
					e.Run.Keys[i] += "/other"
				}
			}
		}
		require.Equal(t, trace, history.Trace(events), name)
		require.Equal(t, want.Verdict, history.Judge(events).Verdict, name)
	}
}

func TestTraceLines(t *testing.T) {
	acquired := history.Event{Kind: history.KindReport, Name: history.Acquired, Actor: "A", Token: 7}
	for want, e := range map[string]history.Event{
		"  resource accepts unfenced read":             {Op: "read", Accepted: true, Seen: 7, SeenSeq: 1},
		"  resource accepts unfenced write [X]":        {Op: "write", Accepted: true, Value: "X\n", Seen: 7, SeenSeq: 1},
		"  resource refuses read #1 after #?":          {Op: "read", Token: 7, Seen: 9, SeenSeq: 1},
		"  resource refuses write #1 [X] after #1":     {Op: "write", Token: 7, Seq: 1, Seen: 7, SeenSeq: 1, Value: "X\n"},
		"  resource refuses read #? after #1 has read": {Op: "read", Token: 6, Seen: 7},
		"  resource accepts write #? [X] after #1":     {Op: "write", Token: 6, Seq: 1, Seen: 7, SeenSeq: 1, Value: "X\n", Accepted: true},
		`  resource accepts write #1 ["two words" X]`:  {Op: "write", Token: 7, Seq: 1, Value: "two words\nX\n", Accepted: true},
		`  resource accepts write #1 ["[X]" "\"X\""]`:  {Op: "write", Token: 7, Seq: 1, Value: "[X]\n\"X\"\n", Accepted: true},
	} {
		e.Kind = history.KindDecision
		require.Equal(t, []string{"A acquired #1", want}, history.Trace([]history.Event{acquired, e}))
	}
	require.Equal(t, []string{`A failed: "two\nlines"`},
		history.Trace([]history.Event{{Kind: history.KindReport, Name: history.Failed, Actor: "A", Error: "two\nlines"}}))
	unranked := acquired
	unranked.Token = 0
	require.Equal(t, []string{"A acquired none", "A acquired #1"}, history.Trace([]history.Event{unranked, acquired}))
	require.Equal(t, []string{"run controller "}, history.Trace([]history.Event{{Kind: history.KindRun, Actor: "controller"}}))
	for want, e := range map[string]history.Event{
		"jump redis 11m":              {Kind: history.KindFault, Name: "jump", Target: "redis", Detail: "11m"},
		"cut A from redis1":           {Kind: history.KindFault, Name: "cut", Target: "A", Peers: []string{"redis1"}},
		"the hazard never came about": {Kind: history.KindDoubt, Detail: "B was granted the lock too early"},
	} {
		require.Equal(t, []string{want}, history.Trace([]history.Event{e}))
	}
	require.Equal(t, []string{"rumour A x"}, history.Trace([]history.Event{{Kind: "rumour", Actor: "A", Name: "x"}}))
	require.Empty(t, history.Trace(nil))
}

func TestDroppingAnEventNeverClears(t *testing.T) {
	for _, name := range names(t) {
		if !strings.HasPrefix(name, "violated-") {
			continue
		}
		events := load(t, name)
		for i := range events {
			less := slices.Delete(slices.Clone(events), i, i+1)
			got := history.Judge(less)
			require.NotEqual(t, history.Safe, got.Verdict, "%s without event %d, %+v", name, i+1, events[i])
			require.NotPanics(t, func() { history.Sections(less) })
		}
	}
}

func FuzzJudge(f *testing.F) {
	for _, name := range names(f) {
		b, err := os.ReadFile(filepath.Join(recorded, name+".jsonl"))
		require.NoError(f, err)
		f.Add(string(b))
	}
	f.Add(`{"kind":"run"}` + "\n" + `{"kind":"end"}`)
	f.Add("null")
	f.Fuzz(func(t *testing.T, text string) {
		events, err := history.Decode(strings.NewReader(text))
		if err != nil {
			return
		}
		got := history.Judge(events)
		require.Equal(t, got.Verdict == history.Safe, len(got.Findings) == 0, "only a safe history has no findings")
		for _, line := range history.Trace(events) {
			require.NotEmpty(t, line)
		}
		var b strings.Builder
		if err := history.Encode(&b, events); err != nil {
			return // JSON can't express every year
		}
		again, err := history.Decode(strings.NewReader(b.String()))
		require.NoError(t, err)
		require.Equal(t, got, history.Judge(again), "judged again from what was written")
	})
}

// A fenced read raises the fence, even one of the same token.
func TestReadRaisesSeq(t *testing.T) {
	decision := func(op string, seq, seenSeq uint64, value string) history.Event {
		return history.Event{
			Actor: "resource", Kind: history.KindDecision, Key: "k", Op: op, Token: 2, Seq: seq, Seen: 2, SeenSeq: seenSeq,
			Accepted: true, Enforced: true, Value: value,
		}
	}
	events := load(t, "safe-late-write-refused")
	for i := range events {
		events[i].Seq, events[i].SeenSeq = 3*events[i].Seq, 3*events[i].SeenSeq
	}
	got := history.Judge(slices.Insert(events, 9, decision("read", 5, 3, "B\n"), decision("write", 4, 5, "B\nB2\n")))
	require.Equal(t, history.Violated, got.Verdict)
	require.Contains(t, strings.Join(got.Findings, "; "), "a stale write was accepted: fence 2.4 after 2.5")
}
