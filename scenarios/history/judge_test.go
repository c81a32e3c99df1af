package history_test

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/history"
)

const (
	noRun    = "doesn't begin with what was run"
	noEnd    = "doesn't end: the run was cut off"
	noFinal  = "holds at the end is not known"
	noWrite  = "no write was accepted"
	noHazard = "the hazard did not come about"
	oneGrant = "fewer than two grants"
	noAnswer = "but the resource's decision is missing"
	unended  = "has not ended: what it does later is not known"
	noTokens = "tokens do not grow"
)

// findings are what the judge must find in each history, in this order and nothing else.
var findings = map[string][]string{
	"safe-late-write-refused":              nil,
	"safe-late-release-unfenced":           nil,
	"safe-late-release-unfenced-store":     nil,
	"safe-late-release-writes-fenced":      nil,
	"safe-repeat-recognised":               nil,
	"safe-refusals-before-a-crash":         nil,
	"safe-entries-with-spaces":             nil,
	"safe-entry-refused-and-then-accepted": nil,
	"safe-times-backwards":                 nil,

	"safe-tokens-lost-successor-refused":   nil,
	"safe-tokens-lost-equal-token-refused": nil,
	"safe-holder-killed":                   nil,
	"safe-two-ledgers":                     nil,

	"violated-tokens-lost-stale-write-over-successor": {"entry B was accepted and is lost: the write with fence 2"},
	"violated-tokens-lost-equal-token-accepted": {
		"a stale write was accepted: fence 2 after 2", "entry B was accepted and is lost: the write with fence 2",
	},
	"violated-second-ledger-loses-an-entry":            {"a stale write was accepted: fence 1 after 2", "entry B was accepted and is lost"},
	"violated-stale-write-lower-token":                 {"a stale write was accepted: fence 1 after 2"},
	"violated-stale-write-same-fence":                  {"a stale write was accepted: fence 2 after 2"},
	"violated-stale-write-lower-seq":                   {"a stale write was accepted: fence 2 after 2.2"},
	"violated-stale-write-of-a-killed-holder":          {"a stale write was accepted: fence 1 after 2"},
	"violated-stale-write-of-a-killed-holder-unfenced": {"a stale write was accepted: fence 1 after 2"},
	"violated-write-without-a-token":                   {"a write without a token was accepted, with fencing on"},
	"violated-fenced-read-after-a-later-grant":         {"a fenced read with token 1 was accepted after 2"},
	"violated-lost-entry-with-growing-tokens":          {"entry A was accepted and is lost: the write with fence 2"},
	"violated-entry-lost-from-a-read":                  {"entry B was accepted and is lost: a read"},
	"violated-entry-lost-at-the-end":                   {"entry B was accepted and is lost: the final value"},
	"violated-lost-entry-hidden-in-another-key":        {"entry B was accepted and is lost: the final value"},
	"violated-entry-twice":                             {"entry B is twice in the write with fence 2.2", "entry B is twice in the final value"},
	"violated-entry-twice-at-the-end":                  {"entry B is twice in the final value"},
	"violated-refused-write-took-effect":               {"entry A is in the final value, although its write was refused"},
	"violated-refused-write-was-built-upon": {
		"entry A is in a read, although its write was refused",
		"entry A is in the write with fence 3, although its write was refused",
		"entry A is in the final value, although its write was refused",
	},
	"violated-fence-forgotten-after-a-crash": {
		"the resource forgot a fence: it had accepted 2, and later knew of none only",
		"a stale write was accepted: fence 1 after 2",
	},
	"violated-fence-forgotten-at-the-end": {"the resource forgot a fence: it had accepted 2, and later knew of 1 only"},
	"violated-fence-of-a-read-forgotten":  {"the resource forgot a fence: it had accepted 2.0, and later knew of 1.0 only"},

	"inconclusive-tokens-lost-but-they-grew":         {"the lock's tokens grew all the same: the hazard did not come about"},
	"inconclusive-tokens-go-backwards-unannounced":   {noTokens + ": B was granted 1 after 2"},
	"inconclusive-killed-worker-reports":             {"A reports released after its end", "A " + unended},
	"inconclusive-killed-without-the-lock":           {noHazard},
	"inconclusive-ledger-that-the-run-does-not-name": {`the run doesn't say that "k2" is one`},
	"inconclusive-second-ledger-without-final":       {`what "k2" holds at the end is not known`},
	"inconclusive-empty":                             {"the history is empty", noWrite, oneGrant, noHazard},
	"inconclusive-no-run":                            {noRun},
	"inconclusive-run-says-nothing":                  {noRun},
	"inconclusive-no-end":                            {noEnd},
	"inconclusive-cut-off":                           {noEnd, noFinal, "A " + unended},
	"inconclusive-no-final":                          {noFinal},
	"inconclusive-two-finals":                        {"several final values"},
	"inconclusive-decision-after-the-final":          {"after its final value was read"},
	"inconclusive-events-after-the-end":              {noEnd, "events follow the end of the history, event 19"},
	"inconclusive-two-runs":                          {"event 13 is another run's beginning"},
	"inconclusive-worker-not-ended":                  {"A " + unended},
	"inconclusive-worker-missing":                    {"C " + unended},
	"inconclusive-report-after-its-end":              {"B reports released after its end", "B " + unended},
	"inconclusive-worker-failed":                     {"A failed: connection refused"},
	"inconclusive-unknown-kind":                      {`unknown kind "rumour"`},
	"inconclusive-unknown-report":                    {`unknown report "overwrote"`},
	"inconclusive-unknown-fault":                     {`unknown fault "flood"`},
	"inconclusive-unknown-operation":                 {`unknown operation "delete"`},
	"inconclusive-unknown-fencing-mode":              {`no fencing mode "perhaps"`},
	"inconclusive-several-keys":                      {"about 2 keys", "about 2 keys"},
	"inconclusive-locks-of-different-keys":           {`B was granted the lock of "invoices", and others that of "ledger"`},
	"inconclusive-hazard-never-came-about":           {noHazard},
	"inconclusive-late-writer-without-a-token":       {noHazard},
	"inconclusive-one-grant":                         {oneGrant, noHazard},
	"inconclusive-no-accepted-write":                 {noWrite},
	"inconclusive-grant-without-a-token":             {"C was granted the lock without a fencing token"},
	"inconclusive-two-workers-with-one-token":        {noTokens + ": B was granted 2 after 2", noHazard},
	"inconclusive-tokens-start-again":                {noTokens + ": B was granted 1 after 5"},
	"inconclusive-token-that-nobody-was-granted":     {"token 3, which nobody was granted"},
	"inconclusive-read-not-fenced":                   {"did not look at a read's fence, with fencing on"},
	"inconclusive-fence-not-looked-at":               {"did not look at a write's fence, with fencing on"},
	"inconclusive-read-fenced-unasked":               {"looked at a read's fence, with fencing writes"},
	"inconclusive-fence-looked-at-unasked":           {"looked at a write's fence, with fencing off"},
	"inconclusive-fence-forgotten-unfenced":          {"had accepted fence 2, and later knew of 1 only"},
	"inconclusive-live-writer-refused":               {"refused a write with fence 2, although it had accepted nothing above 2.0"},
	"inconclusive-live-reader-refused":               {"refused a read with fence 2.0, although it had accepted nothing above 1.0"},
	"inconclusive-live-reader-refused-again":         {"refused a read with fence 2.0, although it had accepted nothing above 2.0"},
	"inconclusive-accepted-write-missing-and-its-repeat-refused": {
		"the resource knows fence 1, of which the history has nothing",
		`a read has "A\n" where the last accepted write has left ""`,
		`the write with fence 2 has "A\n" where the last accepted write has left ""`,
	},
	"inconclusive-refused-without-a-look":   {"refused a write without a look at its fence"},
	"inconclusive-write-adds-nothing":       {`the write with fence 2 adds no entry: ""`},
	"inconclusive-write-without-line-end":   {`the write with fence 2 adds no entry: "B"`},
	"inconclusive-write-with-empty-line":    {`the write with fence 2 has "\n" where the last accepted write has left ""`},
	"inconclusive-entries-of-one-name":      {`the write with fence 2 has "" where the last accepted write has left "same\n"`},
	"inconclusive-ledger-reordered":         {`the write with fence 2 has "B\n" where the last accepted write has left "A\n"`},
	"inconclusive-final-entry-from-nowhere": {`the final value has "B\nX\n" where the last accepted write has left "B\n"`},
	"inconclusive-final-without-line-end":   {`the final value has "B" where the last accepted write has left "B\n"`},
	"inconclusive-read-entry-from-nowhere":  {`a read has "X\n" where the last accepted write has left ""`},
	"inconclusive-accepted-read-missing":    {"the resource knows fence 2.0, of which the history has nothing"},
	"inconclusive-accepted-write-missing": {
		"the resource knows fence 2, of which the history has nothing",
		"the resource knows fence 2, of which the history has nothing",
		`the final value has "B\n" where the last accepted write has left ""`,
		noWrite,
	},
	"inconclusive-refusal-missing":              {"counts 1 refusals since it was started, the history has 0"},
	"inconclusive-read-without-decision":        {"A reports read with token 1, " + noAnswer},
	"inconclusive-read-stale-without-decision":  {"A reports read-stale with token 1, " + noAnswer},
	"inconclusive-wrote-without-decision":       {"B reports wrote with token 2, " + noAnswer},
	"inconclusive-wrote-another-ledger":         {"B reports wrote with token 2, " + noAnswer},
	"inconclusive-wrote-before-the-decision":    {"B reports wrote with token 2, " + noAnswer},
	"inconclusive-write-stale-without-decision": {"A reports write-stale with token 1, " + noAnswer},
}

func TestJudge(t *testing.T) {
	for name, want := range findings {
		t.Run(name, func(t *testing.T) {
			events := load(t, name)
			verdict, about, _ := strings.Cut(name, "-")
			if len(events) > 0 && events[0].Run != nil {
				require.Equal(t, strings.ReplaceAll(about, "-", " "), events[0].Run.Scenario)
			}
			got := history.Judge(events)
			require.Equal(t, verdict, got.Verdict.String(), "%q", got.Findings)
			require.Len(t, got.Findings, len(want), "%q", got.Findings)
			for i := range want {
				require.Contains(t, got.Findings[i], want[i])
			}
		})
	}
	files, err := os.ReadDir(recorded)
	require.NoError(t, err)
	for _, f := range files {
		require.Contains(t, findings, strings.TrimSuffix(f.Name(), ".jsonl"), "a history that no test looks at")
	}
}

// TestDoubt: where the hazard never came about, a run shows nothing of it, but a resource that should have refused is as
// wrong as ever.
func TestDoubt(t *testing.T) {
	const why = "B was granted the lock 1s before the end of A's lease"
	for name, want := range map[string]struct {
		verdict history.Verdict
		first   string
	}{
		"safe-late-write-refused":               {history.Inconclusive, why},
		"violated-stale-write-lower-token":      {history.Violated, "a stale write was accepted"},
		"violated-second-ledger-loses-an-entry": {history.Inconclusive, why}, // without fencing
		"violated-fence-of-a-read-forgotten":    {history.Violated, "the resource forgot a fence"},
		"inconclusive-live-reader-refused":      {history.Inconclusive, why},
		"inconclusive-hazard-never-came-about":  {history.Inconclusive, why},
	} {
		events := load(t, name)
		plain := history.Judge(events)
		events = slices.Insert(events, len(events)-1, history.Event{Kind: history.KindDoubt, Detail: why})
		got := history.Judge(events)
		require.Equal(t, want.verdict, got.Verdict, name)
		require.Contains(t, got.Findings[0], want.first, name)
		require.Subset(t, got.Findings, append(plain.Findings, why), name)
	}
}

func TestJudgeCounts(t *testing.T) {
	got := history.Judge(load(t, "violated-stale-write-lower-token"))
	require.Equal(t, 1, got.Stale)
	require.Equal(t, []string{"B", "A"}, got.Writers)
	require.Empty(t, got.Lost)

	got = history.Judge(load(t, "violated-lost-entry-with-growing-tokens"))
	require.Zero(t, got.Stale)
	require.Equal(t, []string{"A", "B"}, got.Writers)
	require.Equal(t, []string{"A"}, got.Lost)

	got = history.Judge(load(t, "safe-repeat-recognised"))
	require.Equal(t, 2, got.Refused)
	require.Equal(t, []string{"B"}, got.Writers)

	got = history.Judge(load(t, "inconclusive-live-reader-refused"))
	require.Equal(t, 2, got.Refused, "a refused read counts")
}

func TestReportUnderAForeignToken(t *testing.T) {
	events := load(t, "safe-late-write-refused")
	i := slices.IndexFunc(events, func(e history.Event) bool { return e.Name == history.Released })
	for token, want := range map[uint64]string{
		1: "B reports released under token 1, which it was not granted",
		9: "B reports released under token 9, which it was not granted",
	} {
		events[i].Token = token
		require.Equal(t, []string{want}, history.Judge(events).Findings)
	}
}

// withoutTokens is what would have happened with a lock that has none, and with fencing off.
func withoutTokens(events []history.Event) []history.Event {
	events = slices.Clone(events)
	for i := range events {
		events[i].Token, events[i].Seq, events[i].Seen, events[i].SeenSeq = 0, 0, 0, 0
	}
	return events
}

// Of a lock without tokens the order of grants tells who came later, and what was lost tells what came of it.
func TestLockWithoutTokens(t *testing.T) {
	const note = "the lock has no fencing tokens: no resource can tell a stale holder from its successor"
	for name, want := range map[string]struct {
		verdict  history.Verdict
		findings []string
	}{
		"safe-late-release-unfenced":               {history.Safe, nil},
		"safe-late-release-unfenced-store":         {history.Safe, nil},
		"violated-second-ledger-loses-an-entry":    {history.Violated, []string{"entry B was accepted and is lost"}},
		"inconclusive-late-writer-without-a-token": {history.Inconclusive, []string{noHazard}},
		"inconclusive-ledger-reordered":            {history.Inconclusive, []string{`the write with fence none has "B\n" where the last accepted write has left "A\n"`}},
		"inconclusive-fence-looked-at-unasked":     {history.Inconclusive, findings["inconclusive-fence-looked-at-unasked"]},
	} {
		t.Run(name, func(t *testing.T) {
			events := withoutTokens(load(t, name))
			require.Equal(t, history.FencingOff, events[0].Run.Fencing)
			got := history.Judge(events)
			require.Equal(t, want.verdict, got.Verdict, "%q", got.Findings)
			require.Len(t, got.Findings, len(want.findings), "%q", got.Findings)
			for i := range want.findings {
				require.Contains(t, got.Findings[i], want.findings[i])
			}
			require.Contains(t, got.Notes, note)
			require.NotContains(t, history.Judge(load(t, name)).Notes, note)
		})
	}

	events := withoutTokens(load(t, "safe-late-release-unfenced"))
	events[0].Run.TokensLost = true
	got := history.Judge(events)
	require.Equal(t, history.Inconclusive, got.Verdict, "it has none to lose")
	events[0].Run.TokensLost = false
	i := slices.IndexFunc(events, func(e history.Event) bool { return e.Actor == "B" && e.Name == history.Acquired })
	events[i].Token = 1
	require.Equal(t, []string{"1 of 2 grants have a fencing token: a lock has them always or never", "no holder acted after its successor's grant: " + noHazard},
		history.Judge(events).Findings)
	events[i].Token, events[i].Key = 0, "another"
	require.Contains(t, history.Judge(events).Findings[0], "they don't keep each other out")
	events[i].Key = ""
	events = slices.Delete(events, 1, 2)
	require.Equal(t, []string{oneGrant, "no holder acted after its successor's grant: " + noHazard}, history.Judge(events).Findings)

	for _, f := range []history.Fencing{history.FencingWrites, history.FencingOn} {
		events := withoutTokens(load(t, "safe-late-release-unfenced"))
		events[0].Run.Fencing = f
		require.NotEqual(t, history.Safe, history.Judge(events).Verdict)
		require.Contains(t, strings.Join(history.Judge(events).Findings, "\n"), "a write without a token was accepted, with fencing "+string(f))
	}
}

// A holder that dies leaves its lock behind, whether the lock has tokens or not.
func TestKilledHolderWithoutTokens(t *testing.T) {
	events := load(t, "safe-holder-killed")
	events[0].Run.Fencing = history.FencingOff
	for i := range events {
		events[i].Enforced = false
	}
	got := history.Judge(withoutTokens(events))
	require.Equal(t, history.Safe, got.Verdict, "%q", got.Findings)
}

func TestForeignReleaseIsNoted(t *testing.T) {
	events := load(t, "safe-late-release-unfenced")
	i := slices.IndexFunc(events, func(e history.Event) bool { return e.Name == history.ReleaseLost })
	events[i].Name = history.ReleaseForeign
	got := history.Judge(events)
	require.Equal(t, history.Safe, got.Verdict, "%q", got.Findings)
	require.Equal(t, []string{"A released another owner's lock"}, got.Notes)
}

// A release that finds the lock lost is a late act only if there is a successor.
func TestLostWithoutSuccessorIsNotLate(t *testing.T) {
	for _, name := range []string{history.ReleaseLost, history.ReleaseForeign} {
		for _, actor := range []string{"A", "B"} {
			events := load(t, "inconclusive-hazard-never-came-about")
			i := slices.IndexFunc(events, func(e history.Event) bool { return e.Actor == actor && e.Name == history.Released })
			events[i].Name = name
			require.Equal(t, history.Inconclusive, history.Judge(events).Verdict, "%s by %s", name, actor)
			events[i].Token = 0
			require.Equal(t, history.Inconclusive, history.Judge(events).Verdict, "%s by %s, without a token", name, actor)
		}
	}
}

// Only the kill of the resource starts its count of refusals again.
func TestRefusalsAreCountedFromTheLastStart(t *testing.T) {
	events := load(t, "safe-refusals-before-a-crash")
	i := slices.IndexFunc(events, func(e history.Event) bool { return e.Name == history.FaultKill })
	events[i].Target = "A"
	require.Equal(t, history.Inconclusive, history.Judge(events).Verdict)
}

// What counts is the order of the events. No time makes a difference.
func TestJudgeIgnoresTimes(t *testing.T) {
	for name := range findings {
		events := load(t, name)
		want := history.Judge(events)
		for i := range events {
			events[i].Time = time.Unix(int64(-i), 0)
			events[i].Until = time.Unix(int64(i*i%7), 0)
		}
		require.Equal(t, want, history.Judge(events), name)
	}
}

// Every file but the safe ones differs from a safe history in one respect, so no single event of it may be what keeps it
// from passing: dropping any event of a violated history never makes it safe.
func TestDroppingAnEventNeverClears(t *testing.T) {
	for name := range findings {
		if !strings.HasPrefix(name, "violated-") {
			continue
		}
		events := load(t, name)
		for i := range events {
			less := slices.Delete(slices.Clone(events), i, i+1)
			got := history.Judge(less)
			require.NotEqual(t, history.Safe, got.Verdict, "%s without event %d, %+v", name, i+1, events[i])
		}
	}
}

// Judge and Trace take what anybody may have written to a file.
func FuzzJudge(f *testing.F) {
	files, err := filepath.Glob(filepath.Join(recorded, "*.jsonl"))
	require.NoError(f, err)
	for _, file := range files {
		b, err := os.ReadFile(file)
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
			return // a year that JSON has no form for
		}
		again, err := history.Decode(strings.NewReader(b.String()))
		require.NoError(t, err)
		require.Equal(t, got, history.Judge(again), "judged again from what was written")
	})
}
