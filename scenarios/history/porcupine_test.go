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

// ledger allows a section only in the state that it has read. A history of sections is linearizable if each built on what its
// predecessor wrote: none was lost.
var ledger = porcupine.Model{
	Partition: func(all []porcupine.Operation) (parts [][]porcupine.Operation) {
		byKey := map[string][]porcupine.Operation{}
		for _, op := range all {
			key := op.Input.(history.Section).Key
			byKey[key] = append(byKey[key], op)
		}
		for _, part := range byKey {
			parts = append(parts, part)
		}
		return parts
	},
	Init: func() any { return "" },
	Step: func(state, input, _ any) (bool, any) {
		s := input.(history.Section)
		return s.Read == state, s.Wrote
	},
}

func operations(events []history.Event) (ops []porcupine.Operation) {
	for i, s := range history.Sections(events) {
		op := porcupine.Operation{ClientId: i, Input: s, Call: int64(s.Begin), Return: int64(s.End)}
		switch {
		case s.Actor == "": // it follows all others, also those whose ends aren't known
			op.Call, op.Return = math.MaxInt64, math.MaxInt64
		case s.End < 0:
			op.Return = math.MaxInt64 - 1
		}
		ops = append(ops, op)
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
		require.Equal(t, want, porcupine.CheckOperationsTimeout(ledger, operations(events), 0), file)
	}
}
