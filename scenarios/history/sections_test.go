package history_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/history"
)

// A has read nothing, its write comes after B's, and C dies before it learns that its own was accepted. D's is refused. E writes
// twice before it learns of the first, and builds on that. Nobody has announced X. F has reported no read.
func TestEncodeJepsen(t *testing.T) {
	report := func(actor, name, value string) history.Event {
		return history.Event{Actor: actor, Kind: history.KindReport, Name: name, Value: value}
	}
	write := func(value string, accepted bool) history.Event {
		return history.Event{Actor: "resource", Kind: history.KindDecision, Op: "write", Key: "k", Value: value, Accepted: accepted}
	}
	var b strings.Builder
	require.NoError(t, history.EncodeJepsen(&b, []history.Event{
		{Kind: history.KindRun},
		{Actor: "resource", Kind: history.KindDecision, Op: "read", Key: "k", Accepted: true},
		report("A", history.Read, ""), report("A", history.BeforeWrite, "A\n"),
		report("B", history.Read, ""), report("B", history.BeforeWrite, "B\n"),
		write("B\n", true), report("B", history.Wrote, "B\n"),
		write("A\n", true), report("A", history.Lost, ""),
		report("C", history.Read, "A\n"), report("C", history.BeforeWrite, "A\nC\n"), write("A\nC\n", true),
		report("D", history.Read, "A\n"), report("D", history.BeforeWrite, "A\nD\n"), write("A\nD\n", false),
		report("E", history.Read, "A\nC\n"), report("E", history.BeforeWrite, "A\nC\nE\n"), report("A", history.Wrote, "A\n"), write("A\nC\nE\n", true),
		report("E", history.BeforeWrite, "A\nC\nE\nE2\n"), write("A\nC\nE\nE2\n", true),
		report("E", history.Wrote, "A\nC\nE\n"), report("E", history.Wrote, "A\nC\nE\nE2\n"),
		write("A\nC\nE\nE2\nX\n", true),
		report("F", history.BeforeWrite, "F\n"), write("F\n", true), report("F", history.Wrote, "F\n"),
		{Kind: history.KindFinal, Key: "k", Value: "A\nC\nE\nE2\nX\n"},
	}))
	require.Equal(t, `{:index 0, :type :invoke, :process 1, :f :txn, :value [[:r "k" nil] [:append "k" "A"]]}
{:index 1, :type :invoke, :process 0, :f :txn, :value [[:r "k" nil] [:append "k" "B"]]}
{:index 2, :type :ok, :process 0, :f :txn, :value [[:r "k" []] [:append "k" "B"]]}
{:index 3, :type :invoke, :process 2, :f :txn, :value [[:r "k" nil] [:append "k" "C"]]}
{:index 4, :type :invoke, :process 3, :f :txn, :value [[:r "k" nil] [:append "k" "E"]]}
{:index 5, :type :ok, :process 1, :f :txn, :value [[:r "k" []] [:append "k" "A"]]}
{:index 6, :type :invoke, :process 4, :f :txn, :value [[:r "k" nil] [:append "k" "E2"]]}
{:index 7, :type :ok, :process 3, :f :txn, :value [[:r "k" ["A" "C"]] [:append "k" "E"]]}
{:index 8, :type :ok, :process 4, :f :txn, :value [[:r "k" ["A" "C" "E"]] [:append "k" "E2"]]}
{:index 9, :type :invoke, :process 5, :f :txn, :value [[:r "k" nil] [:append "k" "X"]]}
{:index 10, :type :invoke, :process 6, :f :txn, :value [[:r "k" nil] [:append "k" "F"]]}
{:index 11, :type :ok, :process 6, :f :txn, :value [[:r "k" []] [:append "k" "F"]]}
{:index 12, :type :invoke, :process 7, :f :txn, :value [[:r "k" nil]]}
{:index 13, :type :ok, :process 7, :f :txn, :value [[:r "k" ["A" "C" "E" "E2" "X"]]]}
{:index 14, :type :info, :process 2, :f :txn, :value [[:r "k" nil] [:append "k" "C"]]}
{:index 15, :type :info, :process 5, :f :txn, :value [[:r "k" nil] [:append "k" "X"]]}
`, b.String())
	disk := errors.New("disk on fire")
	require.ErrorIs(t, history.EncodeJepsen(broken{disk}, []history.Event{{Kind: history.KindFinal}}), disk)
}
