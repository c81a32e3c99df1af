package history_test

import (
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/anishathalye/porcupine"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/history"
)

// ledger allows a section only in the state that it read. So sections are linearizable if no write was lost.
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
		case s.Actor == "": // it follows all others, even those whose end isn't known
			op.Call, op.Return = math.MaxInt64, math.MaxInt64
		case s.End < 0:
			op.Return = math.MaxInt64 - 1
		}
		ops = append(ops, op)
	}
	return ops
}

// told is what the lock or the store told a worker. A write is unheard until its outcome is reported.
type told struct {
	op               string
	token, seq       uint64
	value            string
	refused, unheard bool
}

// fenced is a lock whose tokens grow, and a register that compares fences as the mode says. The controller reads the final value.
func fenced(run *history.Run) porcupine.Model {
	type state struct {
		top, token, seq uint64
		value           string
	}
	m := porcupine.NondeterministicModel{
		Init: func() []any { return []any{state{}} },
		Step: func(from, input, _ any) (to []any) {
			was, c := from.(state), input.(told)
			now, older := was, c.token < was.token || c.token == was.token && c.seq <= was.seq
			switch c.op {
			case history.Acquired:
				now.top = c.token
				if c.token > was.top || c.token == 0 || run.TokensLost {
					to = append(to, now)
				}
				return to
			case history.Read:
				older = run.Fencing == history.FencingOn && c.token < was.token
				if run.Fencing == history.FencingOn && c.token > was.token {
					now.token, now.seq = c.token, 0
				}
				if !older && c.value != was.value {
					return nil
				}
			default:
				older = older && run.Fencing != history.FencingOff
				now.value, now.token, now.seq = c.value, max(c.token, was.token), c.seq
			}
			if !older && !c.refused {
				to = append(to, now)
			}
			if c.unheard || c.refused && older {
				to = append(to, was)
			}
			return to
		},
	}
	return m.ToModel()
}

// A call begins after the worker's previous report.
func calls(events []history.Event) (ops []porcupine.Operation) {
	begun, seqs, unheard := map[string]int{}, map[string]uint64{}, map[string]porcupine.Operation{}
	for i, e := range events {
		c := told{op: e.Name, token: e.Token, value: e.Value}
		op := porcupine.Operation{Input: c, Call: int64(begun[e.Actor]), Return: int64(i)}
		begun[e.Actor] = i
		switch {
		case e.Kind == history.KindFinal:
			c.op, c.token = history.Read, math.MaxUint64
			op.Call, op.Return = math.MaxInt64, math.MaxInt64
		case e.Name == history.BeforeWrite:
			seqs[e.Actor]++
			c.seq, c.unheard = seqs[e.Actor], true
			op.Input, op.Return = c, math.MaxInt64-1
			unheard[e.Actor] = op
			continue
		case e.Name == history.Wrote, e.Name == history.WriteStale:
			sent, ok := unheard[e.Actor]
			if !ok {
				continue
			}
			delete(unheard, e.Actor)
			op.Call, c = sent.Call, sent.Input.(told)
			c.refused, c.unheard = e.Name == history.WriteStale, false
		case e.Name == history.ReadStale:
			c.op, c.refused = history.Read, true
		case e.Name == history.Acquired:
			seqs[e.Actor] = 0
		case e.Name != history.Read:
			continue
		}
		op.Input = c
		ops = append(ops, op)
	}
	return slices.AppendSeq(ops, maps.Values(unheard))
}

// TestPorcupine requires that the critical sections of a safe run, without tokens, are linearizable, but not those of a run that
// lost an entry; and that what workers were told is linearizable in every run, but not if it is changed.
func TestPorcupine(t *testing.T) {
	files, err := filepath.Glob(filepath.Join("..", "..", "reports", "results", "*", "*_*.jsonl"))
	require.NoError(t, err)
	require.Greater(t, len(files), 30)
	lies := map[string]int{}
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
		run := events[0].Run
		if len(run.Keys) > 1 { // reports don't say which was read
			continue
		}
		require.True(t, porcupine.CheckOperations(fenced(run), calls(events)), file)
		for i, e := range events {
			switch {
			case e.Name == history.Acquired && e.Token > 1 && !run.TokensLost:
				e.Token = 1
			case e.Name == history.Read:
				e.Value += "X\n"
			case run.Fencing != history.FencingOn: // without fences, writes may have been in another order
				continue
			case e.Name == history.Wrote:
				e.Name = history.WriteStale
			case e.Name == history.WriteStale:
				e.Name = history.Wrote
			default:
				continue
			}
			lies[e.Name]++
			lie := slices.Clone(events)
			lie[i] = e
			require.False(t, porcupine.CheckOperations(fenced(run), calls(lie)), "%s: %+v", file, e)
		}
	}
	require.Len(t, lies, 4)
}
