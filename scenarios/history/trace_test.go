package history_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/history"
)

func TestTrace(t *testing.T) {
	require.Equal(t, []string{
		"run late write refused, fencing on",
		"A acquired #1",
		"  resource accepts read #1",
		"A read []",
		"pause A",
		"B acquired #2",
		"  resource accepts read #2",
		"B read []",
		"  resource accepts write #2 [B]",
		"B wrote",
		"B released",
		"B done",
		"resume A",
		"  resource refuses write #1 [A] after #2",
		"A write-stale",
		"A release-lost",
		"A done",
		"final [B], 1 refused",
	}, history.Trace(load(t, "safe-late-write-refused")))
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
	require.Equal(t, []string{"rumour A x"}, history.Trace([]history.Event{{Kind: "rumour", Actor: "A", Name: "x"}}))
	require.Empty(t, history.Trace(nil))
}

// A trace says what happened and not which numbers and names the servers happened to hand out.
func TestTraceHasNoTokensAndTimes(t *testing.T) {
	for name := range findings {
		want := history.Trace(load(t, name))
		events := load(t, name)
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
			e.Time = e.Time.Add(1)
		}
		require.Equal(t, want, history.Trace(events), name)
		require.Equal(t, history.Judge(load(t, name)).Verdict, history.Judge(events).Verdict, name)
	}
}

// Ranks are by token and not by the order in which the grants are told.
func TestTraceRanks(t *testing.T) {
	tokens := []uint64{40, 10, 30, 10, 20}
	rand.New(rand.NewPCG(1, 2)).Shuffle(len(tokens), func(i, j int) { tokens[i], tokens[j] = tokens[j], tokens[i] })
	var events []history.Event
	var want []string
	for _, token := range tokens {
		events = append(events, history.Event{Kind: history.KindReport, Name: history.Acquired, Actor: "A", Token: token})
		want = append(want, "A acquired #"+string('0'+rune(token/10)))
	}
	require.Equal(t, want, history.Trace(events))
	slices.Reverse(events)
	slices.Reverse(want)
	require.Equal(t, want, history.Trace(events))
}
