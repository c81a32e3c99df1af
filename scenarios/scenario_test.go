package scenarios_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
)

func TestHazards(t *testing.T) {
	var source []byte
	files, err := filepath.Glob("*_test.go")
	require.NoError(t, err)
	for _, name := range files {
		text, err := os.ReadFile(name)
		require.NoError(t, err)
		source = append(source, text...)
	}
	seen := map[string]bool{}
	for _, s := range scenarios.Hazards() {
		require.NoError(t, s.Check())
		require.False(t, seen[s.Name], "two hazards are named %s", s.Name)
		seen[s.Name] = true
		require.NotEmpty(t, s.Expect, s.Name)
		require.True(t, strings.HasSuffix(s.Hazard, "."), "the hazard of %s is no sentence", s.Name)
		require.Contains(t, string(source), strconv.Quote(s.Name), "no test plays it")

		got, ok := scenarios.Hazard(s.Name)
		require.True(t, ok)
		require.Equal(t, s, got)

		text, err := json.Marshal(s)
		require.NoError(t, err)
		got, err = scenarios.Decode(strings.NewReader(string(text)))
		require.NoError(t, err)
		require.Equal(t, s, got)
	}
	_, ok := scenarios.Hazard("TheSkyFalls")
	require.False(t, ok)
}

func TestDecode(t *testing.T) {
	const text = `{
		"name": "ShortNap",
		"hazard": "The holder naps.",
		"workers": {"A": {"victim": true, "no_renew": true, "check": true, "try": true, "get_then_del": true}},
		"steps": [
			{"op": "run", "target": "A", "until": "read"},
			{"op": "pause", "target": "A"},
			{"op": "kill", "target": "resource"},
			{"op": "restart", "target": "resource"},
			{"op": "resume", "target": "A"},
			{"op": "run", "target": "A", "until": "done"}
		],
		"min_ttl": "1.5s",
		"expect": {"off": "violated", "on": "safe"}
	}`
	got, err := scenarios.Decode(strings.NewReader(text))
	require.NoError(t, err)
	require.Equal(t, scenarios.Scenario{
		Name: "ShortNap", Hazard: "The holder naps.",
		Workers: map[string]scenarios.Worker{"A": {Victim: true, NoRenew: true, Check: true, Try: true, GetThenDel: true}},
		Steps: []scenarios.Step{
			scenarios.Run("A", history.Read), scenarios.Pause("A"), scenarios.Kill(scenarios.Resource), scenarios.Restart(),
			scenarios.Resume("A"), scenarios.Run("A", history.Done),
		},
		MinTTL: history.Duration(1500 * time.Millisecond),
		Expect: map[history.Fencing]history.Verdict{history.FencingOff: history.Violated, history.FencingOn: history.Safe},
	}, got)

	for text, want := range map[string]string{
		``:                               "scenarios: EOF",
		`{"name": "x", "stepps": []}`:    `unknown field "stepps"`,
		`{"expect": {"on": "fine"}}`:     "there are [inconclusive safe violated]",
		`{"min_ttl": 3}`:                 "cannot unmarshal number",
		text + `{"name": "another"}`:     "put each scenario in a file of its own",
		`{"name": "x", "steps": []}`:     "it has no steps",
		`{"steps": [{"op": "explode"}]}`: `its name is ""`,
	} {
		_, err := scenarios.Decode(strings.NewReader(text))
		require.ErrorContains(t, err, want, text)
	}
}

func TestCheck(t *testing.T) {
	run := scenarios.Run
	done := run("A", history.Done)
	read := run("A", history.Read)
	step := func(op scenarios.Op, target string) scenarios.Step { return scenarios.Step{Op: op, Target: target} }
	for name, c := range map[string]struct {
		change func(*scenarios.Scenario) // of a good one
		want   []string
	}{
		"good":       {func(*scenarios.Scenario) {}, nil},
		"no name":    {func(s *scenarios.Scenario) { s.Name = "" }, []string{`its name is ""; choose up to 100 letters, digits, - and _`}},
		"bad name":   {func(s *scenarios.Scenario) { s.Name = "a/b" }, []string{`its name is "a/b"; choose`}},
		"long name":  {func(s *scenarios.Scenario) { s.Name = strings.Repeat("x", 101) }, []string{"choose up to 100"}},
		"no steps":   {steps(), []string{"it has no steps"}},
		"idle":       {func(s *scenarios.Scenario) { s.Workers = map[string]scenarios.Worker{"X": {}} }, []string{`worker "X" has no step; add one, or remove the worker`}},
		"min TTL":    {func(s *scenarios.Scenario) { s.MinTTL = -1 }, []string{"min_ttl is -1ns; it must not be negative"}},
		"mode":       {expect("maybe", history.Safe), []string{`fencing mode "maybe"; there are [off writes on]`}},
		"never pass": {expect(history.FencingOn, history.Inconclusive), []string{"inconclusive, which never passes; leave that mode out"}},

		"delivered write races": {steps(
			run("A", history.BeforeWrite), scenarios.Hold("A"), run("A", history.Sent), run("B", history.BeforeWrite),
			scenarios.Deliver("A"), run("B", history.Done), done,
		), []string{"step 6, run B: what A sent has just been delivered, and this step would race with it; add a run of A before"}},
		"two waiters": {steps(
			read, run("B", history.Held), run("C", history.Acquired), done, run("B", history.Done), run("C", history.Done),
		), []string{"B waits for the lock already, and who gets it is left to chance; add a run of B before"}},
		"pause of a waiter": {steps(
			read, run("B", history.Held), scenarios.Pause("B"), done, scenarios.Resume("B"), run("B", history.Done),
		), []string{`the worker doesn't stop at "held", so where the pause hits it is left to chance; add a run before`}},

		"no target":      {steps(run("", history.Read), done), []string{`step 1, run : its target is ""; choose`}},
		"two lines":      {steps(run("A\nB", history.Done)), []string{`its target is "A\nB"; choose`}},
		"controller":     {steps(run("controller", history.Done)), []string{"controller is what a history calls the runner; choose another name"}},
		"no operation":   {steps(step("nap", "A"), done), []string{"the worker isn't started by then; add a run before"}},
		"what operation": {steps(read, step("nap", "A"), done), []string{`step 2, nap A: there is no operation "nap"; there are [run pause resume hold deliver kill restart cut refuse mend fault]`}},
		"kill a worker":  {steps(read, step(scenarios.OpKill, "A"), done), []string{"step 3, run A: the worker is done by then"}},
		"pause resource": {steps(step(scenarios.OpPause, scenarios.Resource), done), []string{"the resource can be killed and restarted"}},
		"run resource":   {steps(run(scenarios.Resource, history.Done), done), []string{"the resource can be killed and restarted"}},
		"until what":     {steps(run("A", "lunch"), done), []string{`until "lunch" is no report; there are [held acquired read`}},
		"until failed":   {steps(run("A", history.Failed), done), []string{`until "failed" is no report`}},
		"until nothing":  {steps(run("A", ""), done), []string{`until "" is no report`}},
		"pause until": {steps(read, scenarios.Step{Op: scenarios.OpPause, Target: "A", Until: history.Read}, scenarios.Resume("A"), done), []string{
			"step 2, pause A: only a run has an until; remove it", "step 3, resume A: there is no pause of A before",
		}},
		"not started":    {steps(scenarios.Pause("A"), done), []string{"step 1, pause A: the worker isn't started by then; add a run before"}},
		"early deliver":  {steps(scenarios.Deliver("A"), done), []string{"step 1, deliver A: the worker isn't started by then"}},
		"after done":     {steps(done, scenarios.Pause("A")), []string{"step 2, pause A: the worker is done by then; remove the step, or put it before"}},
		"done twice":     {steps(done, done), []string{"the worker is done by then"}},
		"sent, not held": {steps(run("A", history.Sent), done), []string{"step 1, run A: the write's answer may come before this report; add a hold before"}},
		"run paused":     {steps(read, scenarios.Pause("A"), done), []string{"step 3, run A: the worker is paused; add a resume before", "A is still paused at the end; add a resume"}},
		"pause twice":    {steps(read, scenarios.Pause("A"), scenarios.Pause("A"), scenarios.Resume("A"), done), []string{"step 3, pause A: there is no resume of A before; add one, or remove the step"}},
		"resume":         {steps(read, scenarios.Resume("A"), done), []string{"there is no pause of A before"}},
		"deliver":        {steps(read, scenarios.Deliver("A"), done), []string{"there is no hold of A before"}},
		"hold twice":     {steps(scenarios.Hold("A"), scenarios.Hold("A"), read, scenarios.Deliver("A"), done), []string{"step 2, hold A: there is no deliver of A before"}},
		"restart":        {steps(scenarios.Restart(), done), []string{"there is no kill of resource before"}},
		"kill twice":     {steps(scenarios.Kill(scenarios.Resource), scenarios.Kill(scenarios.Resource), scenarios.Restart(), done), []string{"step 2, kill resource: there is no restart of resource before"}},
		"stays held":     {steps(scenarios.Hold("A"), read), []string{"what A sends is still held at the end; add a deliver"}},
		"stays dead":     {steps(done, scenarios.Kill(scenarios.Resource)), []string{"the resource is still dead at the end; add a restart"}},
		"restart worker": {steps(read, step(scenarios.OpRestart, "A"), done), []string{"nothing else can be restarted"}},
		"kill a waiter":  {steps(read, run("B", history.Held), scenarios.Kill("B"), done), []string{`doesn't stop at "held", so where the kill hits it`}},
		"mend":           {steps(read, scenarios.Mend("A"), done), []string{"there is no cut of A before"}},
		"cut twice":      {steps(scenarios.Cut("A", "redis1"), scenarios.Refuse("A", "redis2"), read, scenarios.Mend("A"), done), nil},
		"what servers":   {steps(read, scenarios.Step{Op: scenarios.OpPause, Target: "A", Servers: []string{"redis"}}, scenarios.Resume("A"), done), []string{"only a cut or a refuse has servers"}},
		"what fault":     {steps(scenarios.Fault("redis", ""), done), []string{"it doesn't say which fault"}},
		"fault's worker": {steps(scenarios.Fault("A", history.FaultFlush), done), []string{"a fault is for a server of the lock's, and this is a worker"}},
		"fault's server": {steps(scenarios.Fault("a b", history.FaultFlush), done), []string{`its target is "a b"`}},
		"not a fault":    {steps(read, scenarios.Step{Op: scenarios.OpPause, Target: "A", Detail: "1s"}, scenarios.Resume("A"), done), []string{"only a fault has the name of one"}},
		"max hold":       {worker(scenarios.Worker{MaxHold: -1}), []string{"worker A has a max_hold of -1ns"}},
		"never ends":     {steps(read), []string{`A doesn't finish; add a run until "done"`}},
	} {
		t.Run(name, func(t *testing.T) {
			s, ok := scenarios.Hazard("PauseExceedsTTL")
			require.True(t, ok)
			c.change(&s)
			err := s.Check()
			if c.want == nil {
				require.NoError(t, err)
				return
			}
			for _, want := range c.want {
				require.ErrorContains(t, err, want)
			}
			require.ErrorContains(t, err, "scenarios: scenario ")
			o, err := new(scenarios.Runner).Run(t.Context(), s, history.FencingOn)
			require.Error(t, err, "a bad scenario is not played")
			require.Empty(t, o.Events)
			require.Equal(t, history.Inconclusive, o.Verdict)
		})
	}
}

func steps(steps ...scenarios.Step) func(*scenarios.Scenario) {
	return func(s *scenarios.Scenario) { s.Workers, s.Steps = nil, steps }
}

func worker(w scenarios.Worker) func(*scenarios.Scenario) {
	return func(s *scenarios.Scenario) { s.Workers = map[string]scenarios.Worker{"A": w} }
}

func expect(f history.Fencing, v history.Verdict) func(*scenarios.Scenario) {
	return func(s *scenarios.Scenario) { s.Expect = map[history.Fencing]history.Verdict{f: v} }
}
