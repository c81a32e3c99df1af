package history_test

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/history"
)

// A has read nothing, its write comes after B's, and C dies before it hears that its own was accepted. D's is refused.
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
		report("A", history.Read, ""), report("A", history.BeforeWrite, "A\n"),
		report("B", history.Read, ""), report("B", history.BeforeWrite, "B\n"),
		write("B\n", true), report("B", history.Wrote, "B\n"),
		write("A\n", true), report("A", history.Wrote, "A\n"),
		report("C", history.Read, "A\n"), report("C", history.BeforeWrite, "A\nC\n"), write("A\nC\n", true),
		report("D", history.Read, "A\n"), report("D", history.BeforeWrite, "A\nD\n"), write("A\nD\n", false),
		{Kind: history.KindFinal, Key: "k", Value: "A\nC\n"},
	}))
	require.Equal(t, `{:index 0, :type :invoke, :process 1, :f :txn, :value [[:r "k" nil] [:append "k" "A"]]}
{:index 1, :type :invoke, :process 0, :f :txn, :value [[:r "k" nil] [:append "k" "B"]]}
{:index 2, :type :ok, :process 0, :f :txn, :value [[:r "k" []] [:append "k" "B"]]}
{:index 3, :type :ok, :process 1, :f :txn, :value [[:r "k" []] [:append "k" "A"]]}
{:index 4, :type :invoke, :process 2, :f :txn, :value [[:r "k" nil] [:append "k" "C"]]}
{:index 5, :type :invoke, :process 3, :f :txn, :value [[:r "k" nil]]}
{:index 6, :type :ok, :process 3, :f :txn, :value [[:r "k" ["A" "C"]]]}
{:index 7, :type :info, :process 2, :f :txn, :value [[:r "k" nil] [:append "k" "C"]]}
`, b.String())
}
