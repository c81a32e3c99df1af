package history_test

import (
	"math"
	"os"
	"path/filepath"
	"testing"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/history"
)

// section is a critical section, as a transaction: it read one ledger and wrote another. The last one of a history only reads.
type section struct{ key, read, wrote string }

// ledger allows a section only in the state that it has read. A history of sections is linearizable if each built on what its
// predecessor wrote: none was lost.
var ledger = porcupine.Model{
	Partition: func(all []porcupine.Operation) (parts [][]porcupine.Operation) {
		byKey := map[string][]porcupine.Operation{}
		for _, op := range all {
			key := op.Input.(section).key
			byKey[key] = append(byKey[key], op)
		}
		for _, part := range byKey {
			parts = append(parts, part)
		}
		return parts
	},
	Init: func() any { return "" },
	Step: func(state, input, _ any) (bool, any) {
		s := input.(section)
		return s.read == state, s.wrote
	},
}

// sections translates a history. Only accepted writes count: a refused one changed nothing. A section began when its worker read. Its
// end is the worker's own report, or never: the worker may have died before it.
func sections(events []history.Event) (ops []porcupine.Operation) {
	type open struct {
		read  string // the ledger that its next write builds on
		since int
		ops   []int
	}
	state, clients := map[string]*open{}, map[string]int{}
	for i, e := range events {
		at := int64(i)
		switch {
		case e.Kind == history.KindReport && e.Name == history.Read:
			state[e.Actor] = &open{read: e.Value, since: i}
			clients[e.Actor] = len(clients)
		case e.Kind == history.KindReport && e.Name == history.Wrote && len(state[e.Actor].ops) > 0:
			s := state[e.Actor]
			ops[s.ops[0]].Return = at
			s.ops = s.ops[1:]
		case e.Kind == history.KindDecision && e.Op == "write" && e.Accepted:
			entries := history.Entries(e.Value)
			name := entries[len(entries)-1] // workers append their names
			s := state[name]
			s.ops = append(s.ops, len(ops))
			ops = append(ops, porcupine.Operation{
				ClientId: clients[name], Input: section{e.Key, s.read, e.Value}, Call: int64(s.since), Return: math.MaxInt64 - 1,
			})
			s.read, s.since = e.Value, i
		case e.Kind == history.KindFinal:
			ops = append(ops, porcupine.Operation{ClientId: -1, Input: section{e.Key, e.Value, e.Value}, Call: math.MaxInt64, Return: math.MaxInt64})
		}
	}
	return ops
}

// TestPorcupine has a linearizability checker that knows nothing of tokens look at the recorded runs. It finds a run that the judge
// calls safe linearizable, and one that lost an entry not.
func TestPorcupine(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("..", "..", "reports", "results", "*", "*_*.jsonl"))
	require.NoError(t, err)
	require.Greater(t, len(files), 30)
	for _, file := range files {
		f, err := os.Open(file)
		require.NoError(t, err)
		events, err := history.Decode(f)
		require.NoError(t, f.Close())
		require.NoError(t, err, file)
		want := porcupine.Ok
		if r := history.Judge(events); r.Verdict != history.Safe {
			want = porcupine.Illegal
		}
		require.Equal(t, want, porcupine.CheckOperationsTimeout(ledger, sections(events), 0), file)
	}
}
