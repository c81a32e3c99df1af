package scenarios_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"golang.org/x/tools/txtar"

	"github.com/fencelab/fencelab/internal/open"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/open/onredis"
	"github.com/fencelab/fencelab/internal/open/stores"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/model"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

var (
	provider = flag.String("testbed", "", "where servers come from: auto, containers, local, external or embedded (default: $FENCELAB_TESTBED, then auto)")
	backend  = flag.String("backend", os.Getenv("FENCELAB_BACKEND"), "the lock to test, of redis, redlock, etcd, zookeeper, consul, postgres and s3, or several with commas; empty: all")
	over     = flag.String("resource", "", "what the workers write to, of http, postgres, redis, s3 and dynamodb, or several with commas, on the lock of -backend\n"+
		"or redis; empty: http on every lock, and where a test is over every store, those on redis")
	ttl    = flag.Duration("ttl", scenarios.DefaultTTL, "the lease of the worker that the fault hits")
	pause  = flag.Duration("pause", 0, "minimum duration of the freeze or network delay; 0: no minimum, the scenario's steps decide")
	record = flag.String("record", "", "a directory in which to leave the histories, for cmd/report")
	update = flag.Bool("update", false, "rewrite the golden traces")
)

func TestMain(m *testing.M) {
	scenarios.ChildWithStore(openLock, openStore)
	flag.Parse()
	for name := range strings.SplitSeq(*backend, ",") {
		if name != "" && !slices.Contains(locks.Names(), name) {
			fmt.Fprintf(os.Stderr, "-backend: there is no lock %q; there are %s\n", name, strings.Join(locks.Names(), ", "))
			os.Exit(2)
		}
	}
	for name := range strings.SplitSeq(*over, ",") {
		if name != "" && !slices.Contains(stores.Names(), name) {
			fmt.Fprintf(os.Stderr, "-resource: there is no store %q; there are %s\n", name, strings.Join(stores.Names(), ", "))
			os.Exit(2)
		}
	}
	parallel()
	code := m.Run()
	if err := errors.Join(shared.Close(), sharedStores.Close()); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	if code == 0 {
		if err := testmain.FindLeaks(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// parallel raises the default number of parallel tests to four: they mostly wait.
func parallel() {
	given := false
	flag.Visit(func(f *flag.Flag) { given = given || f.Name == "test.parallel" })
	if f := flag.Lookup("test.parallel"); !given {
		_ = f.Value.Set(strconv.Itoa(max(4, runtime.GOMAXPROCS(0))))
	}
}

func TestEtcdSnapshotRestore(t *testing.T)            { runHazard(t) }
func TestEtcdSnapshotRestoreBumped(t *testing.T)      { runHazard(t) }
func TestFailoverOvertakesToken(t *testing.T)         { runHazard(t) }
func TestFailoverReissuesToken(t *testing.T)          { runHazard(t) }
func TestFenceCounterEvicted(t *testing.T)            { runHazard(t) }
func TestFenceCounterFlushed(t *testing.T)            { runHazard(t) }
func TestFenceCounterWiped(t *testing.T)              { runHazard(t) }
func TestHolderKilled(t *testing.T)                   { runHazard(t) }
func TestHolderPartitioned(t *testing.T)              { runHazard(t) }
func TestLateWriteBeforeSuccessorWrites(t *testing.T) { runHazard(t) }
func TestLeaderFrozen(t *testing.T)                   { runHazard(t) }
func TestLeaderIsolated(t *testing.T)                 { runHazard(t) }
func TestLeaderKilled(t *testing.T)                   { runHazard(t) }
func TestPauseAtWrite(t *testing.T)                   { runHazard(t) }
func TestPauseExceedsTTL(t *testing.T)                { runHazard(t) }
func TestRedlockClockJump(t *testing.T)               { runHazard(t) }
func TestRedlockCountersNotMonotonic(t *testing.T)    { runHazard(t) }
func TestRedlockNodeRestart(t *testing.T)             { runHazard(t) }
func TestRedlockNodeRestartOvertakes(t *testing.T)    { runHazard(t) }
func TestRedlockPartition(t *testing.T)               { runHazard(t) }
func TestRedlockTokensMonotonic(t *testing.T)         { runHazard(t) }
func TestReleaseCompareAndDelete(t *testing.T)        { runHazard(t) }
func TestReleaseGetThenDel(t *testing.T)              { runHazard(t) }
func TestResourceCrash(t *testing.T)                  { runHazard(t) }
func TestSecondResourceUntouched(t *testing.T)        { runHazard(t) }
func TestTwoResources(t *testing.T)                   { runHazard(t) }
func TestWedgedHolder(t *testing.T)                   { runHazard(t) }
func TestWorkExceedsTTL(t *testing.T)                 { runHazard(t) }
func TestWriteDelayedInNetwork(t *testing.T)          { runHazard(t) }
func TestZooKeeperSequenceResets(t *testing.T)        { runHazard(t) }

// runHazard compares verdict and trace with the hazard's file, on every lock that has it and in each fencing mode. With a section
// "unfenced" it also runs over every store.
func runHazard(t *testing.T) {
	t.Helper()
	s, ok := scenarios.Hazard(strings.TrimPrefix(t.Name(), "Test"))
	require.True(t, ok, "no hazard is named like the test")
	_, overStores := s.Traces["unfenced"]
	if !overStores {
		t.Parallel()
	}
	if len(locksOf(s)) == 0 {
		t.Skip("-backend asks for other locks")
	}
	if !overStores && !wantsStore(stores.HTTP) {
		t.Skip("-resource asks for other resources")
	}
	inEachMode := func(name string, run func(*testing.T, history.Fencing)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, f := range fencings {
				if _, ok := s.Expect[f]; ok {
					t.Run(string(f), func(t *testing.T) { run(t, f) })
				}
			}
		})
	}
	for _, lock := range locksOf(s) {
		if wantsStore(stores.HTTP) {
			inEachMode(lock, func(t *testing.T, f history.Fencing) { runOnce(t, serversFor(t, lock, s).On(), onredis.Bolt, s, f) })
		}
	}
	lock := locksOf(s)[0]
	if slices.Contains(locksOf(s), locks.Redis) {
		lock = locks.Redis
	}
	for _, store := range stores.Names() {
		if overStores && store != stores.HTTP && wantsStore(store) {
			inEachMode(lock+"+"+store, func(t *testing.T, f history.Fencing) {
				runOnce(t, sharedServers(t, lock).On(), open.OnServer(store, storeServer(t, store)), s, f)
			})
		}
	}
}

// stepTimeout allows for restarts and leader elections on a busy machine.
const stepTimeout = 2 * time.Minute

var fencings = []history.Fencing{history.FencingOff, history.FencingWrites, history.FencingOn}

// runOnce runs a hazard over the HTTP resource or a store. Traces differ only with fencing off over a store, whose clients send
// no tokens.
func runOnce(t *testing.T, svc *scenarios.Service, store *scenarios.Store, s scenarios.Scenario, f history.Fencing) {
	t.Helper()
	again, direct := command(t.Name()), store != onredis.Bolt
	r := scenarios.Runner{Service: svc, Store: store, TTL: *ttl, Pause: *pause, StepTimeout: stepTimeout}
	r.Command = func(scenarios.Scenario, history.Fencing) string { return again }
	o, err := r.Run(t.Context(), s, f)
	trace := strings.Join(history.Trace(o.Events), "\n") + "\n"
	if _, missing := errors.AsType[*testbed.MissingError](err); missing {
		testbed.Need(t, err)
	}
	if direct && errors.Is(err, errors.ErrUnsupported) {
		t.Skipf("not applicable: %v", err)
	}
	if err != nil {
		t.Fatalf("%s%v\nrepeat it with: %s", trace, err, again)
	}
	on, mode := svc.Lock, string(f)
	if direct {
		on += "+" + store.Name
		if f == history.FencingOff {
			mode = "unfenced"
		}
	}
	if *record != "" {
		save(t, filepath.Join(*record, s.Name+"_"+on+"_"+string(f)+".jsonl"), o.Events)
	}
	if want := s.Expect[f]; o.Verdict != want {
		t.Fatalf("%sgot verdict %v, want %v: %v\nrepeat it with: %s", trace, o.Verdict, want, o.Findings, again)
	}
	t.Logf("%v, as expected: %s\n%s", o.Verdict, strings.Join(slices.Concat(o.Findings, o.Notes, []string{fmt.Sprintf("%d refused", o.Refused)}), "; "), trace)
	golden(t, s, mode, trace)
	requireLeases(t, o)
	getThenDel := slices.ContainsFunc(slices.Collect(maps.Values(s.Workers)), func(w scenarios.Worker) bool { return w.GetThenDel })
	_, err = model.Config{ReleaseAny: getThenDel}.Replay(o.Events)
	require.NoError(t, err, "no run of the model")
}

func command(test string) string {
	var parts []string
	for part := range strings.SplitSeq(test, "/") {
		parts = append(parts, "^"+part+"$")
	}
	line := fmt.Sprintf("go test ./scenarios -count=1 -run '%s' -ttl=%v", strings.Join(parts, "/"), *ttl)
	if *pause != 0 {
		line += fmt.Sprintf(" -pause=%v", *pause)
	}
	if *provider != "" {
		line += " -testbed=" + *provider
	}
	return line
}

func golden(t *testing.T, s scenarios.Scenario, mode, got string) {
	t.Helper()
	if !*update {
		require.Equal(t, s.Traces[mode], got, "the trace differs from hazards/%s.txt; if the change is meant, run go test ./scenarios -update", s.Name)
		return
	}
	updating.Lock()
	defer updating.Unlock()
	file := filepath.Join("hazards", s.Name+".txt")
	archive, err := txtar.ParseFile(file)
	require.NoError(t, err)
	for i, section := range archive.Files {
		if name, _, _ := strings.Cut(section.Name, ":"); name == mode {
			archive.Files[i].Data = []byte(got)
		}
	}
	require.NoError(t, os.WriteFile(file, txtar.Format(archive), 0o644))
}

// updating serializes updates of one file by runs on several locks.
var updating sync.Mutex

func save(t *testing.T, path string, events []history.Event) {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, history.Encode(&b, events))
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, b.Bytes(), 0o644))
}

// requireLeases checks times, for this module's locks: a killed holder's lease expires before the next grant; a holder relies on
// its lease no longer than TTL after the last possible renewal, and not beyond another's grant.
func requireLeases(t *testing.T, o *scenarios.Outcome) {
	t.Helper()
	var grant, lost, last history.Event // A's
	for _, e := range o.Events {
		fault, _ := history.FaultNamed(e.Name)
		switch {
		case e.Name == history.Acquired && e.Actor == "A":
			grant, last = e, e
			if e.Until.Sub(e.Time) <= time.Duration(e.TTL)*7/8 { // the Locker may have renewed a lease that was old at its grant
				last.Time = e.Until
			}
		case e.Name == history.Acquired && e.Actor == "B" && killed(o, "A"):
			require.False(t, e.Time.Before(grant.Until), "B was granted the lock at %v, and A's lease was to last until %v", e.Time, grant.Until)
		case e.Name == history.Acquired && e.Actor == "B" && lost.Name != "":
			require.False(t, lost.Until.After(e.Time), "A's lease was to last until %v, and B was granted the lock at %v", lost.Until, e.Time)
		case fault.State == history.CutOff:
			last = e
		case e.Name == history.Lost:
			lost = e
			require.False(t, lost.Until.IsZero(), "the end of A's lease")
			end := last.Time.Add(time.Duration(grant.TTL))
			require.False(t, lost.Until.After(end), "A's lease was to last until %v, and can't have lasted longer than %v", lost.Until, end)
		}
	}
}

func killed(o *scenarios.Outcome, worker string) bool {
	return slices.ContainsFunc(o.Events, func(e history.Event) bool { return e.Kind == history.KindFault && is(e, worker, "kill") })
}
