package history_test

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/history"
)

func TestEncodeDecode(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 6, time.UTC)
	want := []history.Event{
		{Time: at, Actor: "controller", Kind: history.KindRun, Run: &history.Run{
			Scenario: "s", Hazard: "It happens.", Fencing: history.FencingOn, Lock: "l", Server: "redis 7", Store: "bolt",
			TTL: history.Duration(250 * time.Millisecond), Pause: history.Duration(90 * time.Second),
			Workers: []string{"A", "B"}, Command: "go test -run '^A$'",
		}},
		{Time: at, Actor: "A", Kind: history.KindReport, Name: history.Acquired, Token: 1<<64 - 1, TTL: 1, Until: at.Add(time.Hour)},
		{Time: at, Actor: "A", Kind: history.KindReport, Name: history.Failed, Error: "two\nlines"},
		{Time: at, Actor: "controller", Kind: history.KindFault, Name: "pause", Target: "A"},
		{
			Time: at, Actor: "resource", Kind: history.KindDecision, Op: "write", Key: "k", Token: 7, Seq: 2, Seen: 7, SeenSeq: 1,
			Accepted: true, Enforced: true, Value: "A\n<B>\n",
		},
		{Time: at, Actor: "controller", Kind: history.KindFinal, Key: "k", Value: "A\n", Seen: 7, SeenSeq: 2, Refusals: 3},
		{Time: at, Actor: "controller", Kind: history.KindEnd},
	}
	var b strings.Builder
	require.NoError(t, history.Encode(&b, want))
	require.Equal(t, len(want), strings.Count(b.String(), "\n"), "a line an event")
	got, err := history.Decode(strings.NewReader(b.String()))
	require.NoError(t, err)
	require.Equal(t, want, got)

	got, err = history.Decode(strings.NewReader("\n" + strings.ReplaceAll(b.String(), "\n", "\r\n \n")))
	require.NoError(t, err, "blank lines and other line ends")
	require.Equal(t, want, got)

	got, err = history.Decode(strings.NewReader(""))
	require.NoError(t, err)
	require.Empty(t, got)
}

func TestDecodeNamesTheLine(t *testing.T) {
	const good = `{"actor":"controller","kind":"end"}` + "\n"
	for name, c := range map[string]struct{ text, want string }{
		"unknown field":  {good + `{"kind":"end","colour":"red"}`, `line 2: json: unknown field "colour"`},
		"unknown in run": {good + `{"kind":"run","run":{"colour":"red"}}`, `line 2: json: unknown field "colour"`},
		"cut off":        {good + good + `{"kind":"en`, "line 3: unexpected EOF"},
		"no JSON":        {"# a comment\n" + good, "line 1: invalid character '#'"},
		"blank lines":    {"\n\n" + `{"kind":1}`, "line 3: json: cannot unmarshal number"},
		"two events":     {good + `{"kind":"end"}{"kind":"end"}`, "line 2: unexpected data after the event"},
		"one brace more": {`{"kind":"end"}}`, "line 1: unexpected data after the event"},
		"negative token": {`{"kind":"report","token":-1}`, "line 1: json: cannot unmarshal number -1"},
		"token too big":  {`{"kind":"report","token":18446744073709551616}`, "line 1: json: cannot unmarshal number"},
		"bad duration":   {good + `{"kind":"report","ttl":"soon"}`, "line 2: time: invalid duration"},
		"bad time":       {`{"time":"noon"}`, "line 1: parsing time"},
		"an array":       {`[]`, "line 1: json: cannot unmarshal array"},
		"too long":       {good + `{"kind":"` + strings.Repeat("x", 8<<20) + `"}`, "line 2: bufio.Scanner: token too long"},
	} {
		t.Run(name, func(t *testing.T) {
			events, err := history.Decode(strings.NewReader(c.text))
			require.ErrorContains(t, err, "history: "+c.want)
			require.Nil(t, events, "part of a history is none")
		})
	}
}

func TestDecodeLongLine(t *testing.T) {
	want := strings.Repeat("x", 7<<20)
	events, err := history.Decode(strings.NewReader(`{"kind":"final","value":"` + want + `"}`))
	require.NoError(t, err)
	require.Len(t, events, 1)
	require.Equal(t, len(want), len(events[0].Value))
}

type broken struct{ err error }

func (b broken) Read([]byte) (int, error)  { return 0, b.err }
func (b broken) Write([]byte) (int, error) { return 0, b.err }

func TestErrorsAreWrapped(t *testing.T) {
	disk := errors.New("disk on fire")
	_, err := history.Decode(broken{disk})
	require.ErrorIs(t, err, disk)
	err = history.Encode(broken{disk}, make([]history.Event, 1))
	require.ErrorIs(t, err, disk)
	require.ErrorContains(t, err, "history: event 1")
}

func TestEntries(t *testing.T) {
	require.Empty(t, history.Entries(""))
	ledger := history.Append(history.Append("", "A"), "an entry of B")
	require.Equal(t, "A\nan entry of B\n", ledger)
	require.Equal(t, []string{"A", "an entry of B"}, history.Entries(ledger))
}

func TestVerdict(t *testing.T) {
	var forgotten history.Verdict
	require.Equal(t, history.Inconclusive, forgotten, "the zero value must not pass")
	for v, text := range map[history.Verdict]string{
		history.Inconclusive: "inconclusive", history.Safe: "safe", history.Violated: "violated",
	} {
		require.Equal(t, text, v.String())
		b, err := json.Marshal(map[string]history.Verdict{"v": v})
		require.NoError(t, err)
		require.JSONEq(t, `{"v":"`+text+`"}`, string(b))
		var got struct{ V history.Verdict }
		require.NoError(t, json.Unmarshal(b, &got))
		require.Equal(t, v, got.V)
	}
	require.Equal(t, "Verdict(3)", history.Verdict(3).String())
	require.Equal(t, "Verdict(-1)", history.Verdict(-1).String())
	v := history.Violated
	for _, text := range []string{"", "Safe", "fine", "Verdict(1)"} {
		require.ErrorContains(t, v.UnmarshalText([]byte(text)), "the verdicts are [inconclusive safe violated]")
		require.Equal(t, history.Violated, v, "an error leaves the verdict alone")
	}
}
