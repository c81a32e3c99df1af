package scenarios_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/tools/txtar"

	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
)

// Each hazard has a test of its name and a trace for each verdict; -update changes nothing else in its file.
func TestHazards(t *testing.T) {
	source, err := os.ReadFile("scenarios_test.go")
	require.NoError(t, err)
	var ran, names []string
	for _, m := range regexp.MustCompile(`(?m)^func Test(\w+)\(t \*testing\.T\) +\{ runHazard\(t\) \}$`).FindAllSubmatch(source, -1) {
		ran = append(ran, string(m[1]))
	}
	for _, s := range scenarios.Hazards() {
		names = append(names, s.Name)
		require.NotEmpty(t, s.Expect, s.Name)
		require.True(t, strings.HasSuffix(s.Hazard, "."), "the hazard of %s is no sentence", s.Name)
		for f := range s.Expect {
			require.NotEmpty(t, s.Traces[string(f)], "%s, fencing %s", s.Name, f)
		}
		text, err := os.ReadFile(filepath.Join("hazards", s.Name+".txt"))
		require.NoError(t, err)
		require.Equal(t, string(text), string(txtar.Format(txtar.Parse(text))))
		again, err := scenarios.Parse(s.Name+".txt", scenarios.Format(s))
		require.NoError(t, err)
		require.Equal(t, string(scenarios.Format(s)), string(scenarios.Format(again)))
		require.Equal(t, []any{s.Hazard, s.Locks, s.Variant, s.TokensLost, s.MinTTL, s.Workers, s.Expect, s.Traces, fmt.Sprint(s.Steps)},
			[]any{again.Hazard, again.Locks, again.Variant, again.TokensLost, again.MinTTL, again.Workers, again.Expect, again.Traces, fmt.Sprint(again.Steps)})
	}
	require.Equal(t, names, ran, "the hazards and the tests that run them")
	require.True(t, slices.IsSorted(names))
	_, ok := scenarios.Hazard("TheSkyFalls")
	require.False(t, ok)
}

func TestLoad(t *testing.T) {
	const nap = `# Comments may stand anywhere.
The holder naps
# A nap is short.
for a while.

# All of it.
locks redis etcd
variant sleepy
tokens-lost
min-ttl 1.5s
worker A victim no-renew check try get-then-del
worker B idle outlive second max-hold=3.5s
run A until read
pause A
kill resource
restart resource
resume A
  refuse A from redis1 redis2
mend A
jump redis1 1h0m0s

run A until done
run B until done
-- off: violated --
run ShortNap, fencing off
-- on: safe --
-- unfenced --
nothing
`
	all, err := scenarios.Load(fstest.MapFS{"ShortNap.txt": {Data: []byte(nap)}, "README.md": {Data: []byte("of naps")}})
	require.NoError(t, err)
	require.Len(t, all, 1)
	got := all[0]
	require.Equal(t, []any{"ShortNap", "The holder naps for a while.", []string{"redis", "etcd"}, "sleepy", true, history.Duration(1500 * time.Millisecond)},
		[]any{got.Name, got.Hazard, got.Locks, got.Variant, got.TokensLost, got.MinTTL})
	require.Equal(t, map[string]scenarios.Worker{
		"A": {Victim: true, NoRenew: true, Check: true, Try: true, GetThenDel: true},
		"B": {Idle: true, Outlive: true, Second: true, MaxHold: history.Duration(3500 * time.Millisecond)},
	}, got.Workers)
	var steps []string
	for _, st := range got.Steps {
		steps = append(steps, st.String())
	}
	require.Equal(t, []string{
		"run A until read", "pause A", "kill resource", "restart resource", "resume A", "refuse A from redis1 redis2", "mend A",
		"jump redis1 1h0m0s", "run A until done", "run B until done",
	}, steps)
	require.Equal(t, map[history.Fencing]history.Verdict{history.FencingOff: history.Violated, history.FencingOn: history.Safe}, got.Expect)
	require.Equal(t, map[string]string{"off": "run ShortNap, fencing off\n", "on": "", "unfenced": "nothing\n"}, got.Traces)

	require.True(t, got.Faulty(), "a server's clock jumps")
	windows, err := scenarios.Load(fstest.MapFS{"ShortNap.txt": {Data: []byte("\ufeff" + strings.ReplaceAll(nap, "\n", "\r\n"))}})
	require.NoError(t, err)
	require.Equal(t, all, windows)

	crash := hazard(t, "ResourceCrash")
	require.False(t, crash.Faulty(), "the resource is no server of the lock's")

	_, err = scenarios.Load(fstest.MapFS{})
	require.ErrorContains(t, err, "the folder has no file *.txt")
	_, err = scenarios.Load(fstest.MapFS{"a.txt": {Data: []byte("nap")}, "b.txt": {Data: []byte("It happens.\n\nworker A sleepy")}})
	require.ErrorContains(t, err, "scenarios: a.txt:1: it has no steps")
	require.ErrorContains(t, err, `scenarios: b.txt:3: unknown worker option "sleepy"; the options are check, get-then-del, idle,`)
	_, err = scenarios.Load(fstest.MapFS{"a.txt": {Data: []byte("It happens.\n\nrun A until done\n-- unfenced --\n")}})
	require.ErrorContains(t, err, `scenarios: a.txt:1: it has no expected verdict; add a section such as "-- on: safe --"`)
}

func TestParse(t *testing.T) {
	for text, want := range map[string]string{
		"nap A, run A until done":                             `Test.txt:3: nap A: unknown keyword "nap"; the keywords are locks, variant, tokens-lost, min-ttl, worker, run, pause, resume,`,
		"flsuh redis, run A until done":                       `Test.txt:3: flsuh redis: unknown keyword "flsuh"`,
		"nap, run A until done":                               `Test.txt:3: nap : its target is ""; choose up to 100 letters`,
		"locks, run A until done":                             "Test.txt:3: it names no lock",
		"variant a b, run A until done":                       "Test.txt:3: variant takes one value, not 2",
		"tokens-lost here, run A until done":                  "Test.txt:3: tokens-lost takes no value",
		"min-ttl soon, run A until done":                      `Test.txt:3: time: invalid duration "soon"`,
		"min-ttl -1s, run A until done":                       "Test.txt:3: min-ttl is -1s; it must not be negative",
		"locks redis, locks etcd, run A until done":           `Test.txt:4: duplicate line "locks"`,
		"variant a, variant b, run A until done":              `Test.txt:4: duplicate line "variant"`,
		"tokens-lost, tokens-lost, run A until done":          `Test.txt:4: duplicate line "tokens-lost"`,
		"min-ttl 3s, run A until done, min-ttl 1s":            `Test.txt:5: duplicate line "min-ttl"`,
		"worker A max-hold=1s max-hold=2s, run A until done":  "Test.txt:3: duplicate max-hold",
		"run A until done, worker":                            "Test.txt:4: it names no worker",
		"worker A, worker A, run A until done":                "Test.txt:4: worker A is already declared",
		"worker A max-hold=soon":                              "Test.txt:3: time: invalid duration",
		"worker A max-hold=-1s, run A until done":             "Test.txt:3: worker A has a max-hold of -1s",
		"worker X, run A until done":                          `Test.txt:3: worker "X" is never run; add a run, or remove the worker`,
		"run A till done":                                     `Test.txt:3: unexpected "till done" after A; want until and a report, from and servers, or one word`,
		"run A until done, -- on --":                          `Test.txt:4: section "on" is not a fencing mode and a verdict, as in "on: safe": history: unknown verdict "";`,
		"run A until done, -- on: fine --":                    `Test.txt:4: section "on: fine" is not`,
		"run A until done, -- on: safe --, x, -- on: safe --": `Test.txt:6: duplicate section "on"`,
		"run A until done, -- unfenced: safe --":              `Test.txt:4: unknown fencing mode "unfenced"`,
		"run A until done, -- maybe: safe --":                 `Test.txt:4: unknown fencing mode "maybe"; the modes are [off writes on]`,
		"run A until done, -- on: inconclusive --":            "Test.txt:4: it expects fencing on to be inconclusive, which never passes; leave that mode out",
		"": "Test.txt:1: it has no steps",
		"run A until done, -- on: safe --, x, --off: violated --": `Test.txt:6: "--off: violated --" doesn't begin a section; "-- on: safe --", for example, does`,
		"run A until done, -- on: safe --, x, y,  -- writes: x--": `Test.txt:7: "-- writes: x--" doesn't begin a section`,

		"run A until before-write, hold A, run A until sent, run B until before-write, deliver A, run B until done, run A until done": "Test.txt:8: run B until done: what A sent has just been delivered, and this step would race with it; add a run of A first",
		"run A until before-write, hold A, run A until sent, deliver A, kill resource, restart resource, run A until done":            "Test.txt:7: kill resource: what A sent has just been delivered, and this step would race with it",
		"run A until read, run B until held, run C until acquired, run A until done, run B until done, run C until done":              "Test.txt:5: run C until acquired: B is already waiting for the lock, so either may get it; add a run of B first",
		"run A until read, run B until held, pause B, run A until done, resume B, run B until done":                                   `Test.txt:5: pause B: the worker doesn't stop at "held", so the pause may hit it anywhere; add a run first`,
		"run A until read, run B until held, kill B, run A until done":                                                                `doesn't stop at "held", so the kill may hit it anywhere`,

		"run a/b until done":                           `its target is "a/b"; choose up to 100 letters, digits, - and _`,
		"run controller until done":                    "controller is what a history calls the runner; choose another name",
		"pause A until read":                           "only a run has an until; remove it",
		"run A until lunch":                            `unknown report "lunch"; the reports are [held acquired read`,
		"run A until failed":                           `unknown report "failed"`,
		"run A":                                        `unknown report ""`,
		"run A until sent":                             "the write's answer may come before this report; add a hold first",
		"run resource until done":                      "the resource runs by itself; remove the step",
		"pause resource":                               "pause doesn't apply to the resource; these do: kill, restart",
		"restart A, run A until done":                  "Test.txt:3: restart A: restart doesn't apply to a worker; these do: pause, resume, kill, hold,",
		"flush A, run A until done":                    "flush doesn't apply to a worker; these do: pause, resume, kill, hold, deliver, cut, mend, refuse",
		"hold redis":                                   "hold doesn't apply to a lock server; these do: pause, resume, kill, restart, isolate, rejoin, wipe, jump, deny, allow, flush,",
		"pause A from redis, run A until done":         "only what is between a worker and the lock's servers has a from",
		"pause A 1s, run A until done":                 `Test.txt:3: pause A 1s: only a fault of a server has a detail; remove "1s"`,
		"pause A, run A until done":                    "Test.txt:3: pause A: the worker hasn't started by then; add a run first",
		"deliver A, run A until done":                  "there is no hold of A before this step; add one",
		"resume A, run A until done":                   "there is no pause of A before",
		"mend A, run A until done":                     "there is no cut or refuse of A before",
		"restart resource":                             "there is no kill of resource before",
		"run A until done, pause A":                    "Test.txt:4: pause A: the worker has finished by then; remove the step, or move it up",
		"run A until done, run A until done":           "the worker has finished by then",
		"run A until read, kill A, run A until done":   "Test.txt:5: run A until done: the worker has finished by then",
		"run A until read, pause A, run A until done":  "Test.txt:5: run A until done: the worker is frozen",
		"run A until read, pause A, pause A, resume A": "Test.txt:5: pause A: there is no resume of A before this step; add one",
		"hold A, hold A, run A until read":             "there is no deliver of A before",
		"kill resource, kill resource":                 "there is no restart of resource before",
		"run A until read, pause A":                    `Test.txt:4: the pause of A is still in force at the end; add "resume A"`,
		"hold A, run A until read":                     `Test.txt:3: the hold of A is still in force at the end; add "deliver A"`,
		"kill resource, run A until done":              `Test.txt:3: the kill of resource is still in force at the end; add "restart resource"`,
		"run A until read":                             `Test.txt:3: A doesn't finish; add "run A until done"`,

		"worker A check, run A until held, run A until checked, run A until done": `Test.txt:4: run A until held: the worker never reports that; add "try" to its line: worker A try`,
		"run A until release-gap, run A until done":                               `Test.txt:3: run A until release-gap: the worker never reports that; add "get-then-del" to its line`,
		"run A until lost-lease, run A until done":                                `Test.txt:3: run A until lost-lease: the worker never reports that; add "check" to its line`,
		"run A until lost, run A until done":                                      `Test.txt:3: run A until lost: the worker never reports that; add "outlive" to its line: worker A outlive`,
		"jump redis, run A until done":                                            "Test.txt:3: jump redis: it needs a duration other than 0, such as 11m",
		"jump redis 0s, run A until done":                                         "Test.txt:3: jump redis 0s: it needs a duration other than 0",

		"kill leader, kill leader, run A until done": "Test.txt:4: kill leader: there is no restart leader before this step; add one",
		"pause redis, pause redis, run A until done": "Test.txt:4: pause redis: there is no resume redis before",

		"run A done": `Test.txt:3: run A done: write "run A until done"`,

		"kill lock, restart redis1, restart redis2, kill leader, restart etcd1, kill etcd1, restart leader, run A until done":       "",
		"kill redis1, restart lock, restore etcd1 bumped, run A until done":                                                         "",
		"kill redis, restart redis, kill redis, wipe redis2, wipe redis2, run A until done":                                         "",
		"cut A from redis1, refuse A from redis2, run A until read, mend A, run A until done":                                       "",
		"cut A from redis1, cut A from redis2, run A until done":                                                                    "",
		"hold A, run A until read, deliver A, run B until acquired, run A until done, run B until done":                             "",
		"worker B try, run A until read, run B until held, run A until done, run B until read, pause B, resume B, run B until done": "",
		"cut A, run A until done":           "",
		"run A until read, pause A, kill A": "",
		"run A until read, kill resource, restart resource, kill resource, restart resource, run A until done": "",
	} {
		s, err := scenarios.Parse("Test.txt", []byte("It happens.\n\n"+strings.ReplaceAll(text, ", ", "\n")+"\n"))
		if want == "" {
			require.NoError(t, err, text)
			continue
		}
		require.ErrorContains(t, err, want, text)
		require.ErrorContains(t, err, "scenarios: Test", text)
		o, err := new(scenarios.Runner).Run(t.Context(), s, history.FencingOn)
		require.Error(t, err, "a bad scenario does not run: %s", text)
		require.Empty(t, o.Events)
		require.Equal(t, history.Inconclusive, o.Verdict)
	}
	_, err := scenarios.Parse("a b.txt", []byte("It happens.\n\nrun A until done"))
	require.ErrorContains(t, err, `its name is "a b"; choose`)
	_, err = scenarios.Parse(strings.Repeat("x", 101)+".txt", []byte("It happens.\n\nrun A until done"))
	require.ErrorContains(t, err, "choose up to 100")
	_, err = scenarios.Parse(strings.Repeat("x", 100)+".txt", []byte("It happens.\n\nrun A until done"))
	require.NoError(t, err)
	_, err = scenarios.Parse("Test.txt", []byte("The holder\nnaps.\nlocks redis\nworker A victim\nrun A until read\n\nrun A until done"))
	for i, word := range []string{"locks", "worker", "run"} {
		require.ErrorContains(t, err, fmt.Sprintf("Test.txt:%d: the sentence continues on a line that begins with %q", i+3, word))
	}
	_, err = scenarios.Parse("Test.txt", nil)
	require.ErrorContains(t, err, "it must begin with a sentence that describes the hazard")
}
