package scenarios_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fencelab/fencelab/internal/leak"
	"github.com/fencelab/fencelab/internal/locks"
	"github.com/fencelab/fencelab/internal/open"
	"github.com/fencelab/fencelab/internal/stores"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

var (
	provider = flag.String("testbed", "", "where servers come from: auto, containers, local, external or embedded (default: $FENCELAB_TESTBED, then auto)")
	backend  = flag.String("backend", os.Getenv("FENCELAB_BACKEND"), "the lock to test, of redis, redlock, etcd, zookeeper, consul and postgres, or several with commas; empty: all")
	over     = flag.String("resource", "", "what the workers write to, of http, postgres, redis, s3 and dynamodb, or several with commas, on the lock of -backend\n"+
		"or redis; empty: http on every lock, and where a test is over every store, those on redis")
	ttl    = flag.Duration("ttl", scenarios.DefaultTTL, "the lease of the worker that the fault hits")
	pause  = flag.Duration("pause", 0, "how long the freeze, or the delay in the network, lasts at least; 0: until the successor has got in")
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
	if err := closeShared(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		code = max(code, 1)
	}
	if code == 0 {
		// net/http dials in a goroutine that no Close ends: to a container that was killed it tries until the kernel gives up.
		if err := leak.Find(goleak.IgnoreAnyFunction("net/http.(*Transport).dialConn")); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

// parallel has as many tests run at once as two cores bear, unless the command line says how many: they wait most of the time.
func parallel() {
	said := false
	flag.Visit(func(f *flag.Flag) { said = said || f.Name == "test.parallel" })
	if f := flag.Lookup("test.parallel"); !said {
		_ = f.Value.Set(strconv.Itoa(max(4, runtime.GOMAXPROCS(0))))
	}
}

// play runs a hazard on every lock that has it, in each fencing mode, compares verdict and trace with what they must be,
// and lets check look closer.
func play(t *testing.T, name string, check func(*testing.T, history.Fencing, *scenarios.Outcome)) {
	t.Helper()
	s, ok := scenarios.Hazard(name)
	require.True(t, ok, "there is no hazard %q", name)
	playScenario(t, s, check)
}

func playScenario(t *testing.T, s scenarios.Scenario, check func(*testing.T, history.Fencing, *scenarios.Outcome)) {
	t.Helper()
	if !wantsStore(stores.HTTP) {
		t.Skip("-resource asks for other resources")
	}
	if len(locksOf(s)) == 0 {
		t.Skip("-backend asks for other locks")
	}
	for _, lock := range locksOf(s) {
		t.Run(lock, func(t *testing.T) {
			t.Parallel() // it waits most of the time
			playOn(t, service(t, lock), s, check)
		})
	}
}

// playOn runs s on a service, in each fencing mode.
func playOn(t *testing.T, svc *scenarios.Service, s scenarios.Scenario, check func(*testing.T, history.Fencing, *scenarios.Outcome)) {
	t.Helper()
	for _, f := range fencings {
		if _, ok := s.Expect[f]; ok {
			t.Run(string(f), func(t *testing.T) { check(t, f, playOnce(t, svc, nil, s, f)) })
		}
	}
}

// playAlone is play on servers that no other test has, and that a run may break. So nothing keeps such tests from running in
// parallel with each other.
func playAlone(t *testing.T, name string, check func(*testing.T, history.Fencing, *scenarios.Outcome)) {
	t.Helper()
	s, ok := scenarios.Hazard(name)
	require.True(t, ok, "there is no hazard %q", name)
	playScenarioAlone(t, s, check)
}

func playScenarioAlone(t *testing.T, s scenarios.Scenario, check func(*testing.T, history.Fencing, *scenarios.Outcome)) {
	t.Helper()
	if !wantsStore(stores.HTTP) {
		t.Skip("-resource asks for other resources")
	}
	if len(locksOf(s)) == 0 {
		t.Skip("-backend asks for other locks")
	}
	for _, lock := range locksOf(s) {
		t.Run(lock, func(t *testing.T) {
			t.Parallel()
			fresh := func(t *testing.T) open.Servers { t.Helper(); return servers(t, lock, s) }
			if outlivesFaults(s) {
				all := fresh(t)
				fresh = func(*testing.T) open.Servers { return all }
			}
			for _, f := range fencings {
				if _, ok := s.Expect[f]; ok {
					t.Run(string(f), func(t *testing.T) { check(t, f, playOnce(t, fresh(t).On(), nil, s, f)) })
				}
			}
		})
	}
}

// outlivesFaults reports whether servers are as good after s as before, for a run with a key of its own: they lose data, or their
// clocks are wrong, by which leases that begin later last as long as ever. Others lose a replica, a leader or their past.
func outlivesFaults(s scenarios.Scenario) bool {
	return !slices.ContainsFunc(s.Steps, func(st scenarios.Step) bool {
		return st.Op == scenarios.OpFault && !slices.Contains([]string{
			history.FaultWipe, history.FaultFlush, history.FaultEvict, history.FaultJump, history.FaultReap,
		}, st.Fault)
	})
}

// stepTimeout ends a run that fails: servers that are restarted, and elect a leader, may take long on a machine with other work.
const stepTimeout = 2 * time.Minute

// fencings are the fencing modes, in the order of what they protect.
var fencings = []history.Fencing{history.FencingOff, history.FencingWrites, history.FencingOn}

// playOnce runs a scenario once, over the HTTP resource or a store, and compares its trace with the golden one, which is the
// same for every lock and every resource. Only a store's clients that know nothing of fencing have traces of their own: they
// send no tokens, where those of the HTTP resource do.
func playOnce(t *testing.T, svc *scenarios.Service, store *scenarios.Store, s scenarios.Scenario, f history.Fencing) *scenarios.Outcome {
	t.Helper()
	again := command(t.Name())
	r := scenarios.Runner{Service: svc, Store: store, TTL: *ttl, Pause: *pause, StepTimeout: stepTimeout}
	r.Command = func(scenarios.Scenario, history.Fencing) string { return again }
	o, err := r.Run(t.Context(), s, f)
	trace := strings.Join(history.Trace(o.Events), "\n") + "\n"
	if _, missing := errors.AsType[*testbed.MissingError](err); missing {
		testbed.Need(t, err)
	}
	if store != nil && errors.Is(err, errors.ErrUnsupported) {
		t.Skipf("not applicable: %v", err)
	}
	if err != nil {
		t.Fatalf("%v\n%srepeat it with: %s", err, trace, again)
	}
	on, mode := svc.Lock, string(f)
	if store != nil {
		on += "+" + store.Name
		if f == history.FencingOff {
			mode = "unfenced"
		}
	}
	if *record != "" {
		save(t, filepath.Join(*record, s.Name+"_"+on+"_"+string(f)+".jsonl"), o.Events)
	}
	if want := s.Expect[f]; o.Verdict != want {
		t.Fatalf("got verdict %v, want %v: %v\n%srepeat it with: %s", o.Verdict, want, o.Findings, trace, again)
	}
	t.Logf("%v, as expected: %s\n%s", o.Verdict, strings.Join(slices.Concat(o.Findings, o.Notes, []string{fmt.Sprintf("%d refused", o.Refused)}), "; "), trace)
	golden(t, filepath.Join("..", "testdata", "traces", s.Name+"_"+mode+".txt"), trace)
	return o
}

// command repeats the test of that name.
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

func TestPauseExceedsTTL(t *testing.T) {
	playEverywhere(t, "PauseExceedsTTL", requireOverwritten)
}

func TestPauseAtWrite(t *testing.T) {
	t.Parallel()
	play(t, "PauseAtWrite", requireOverwritten)
}

func TestWriteDelayedInNetwork(t *testing.T) {
	playEverywhere(t, "WriteDelayedInNetwork", requireOverwritten)
}

func TestLateWriteBeforeSuccessorWrites(t *testing.T) {
	t.Parallel()
	play(t, "LateWriteBeforeSuccessorWrites", func(t *testing.T, f history.Fencing, o *scenarios.Outcome) {
		if f == history.FencingOn {
			requireRefused(t, o, 1, "B")
			return
		}
		require.Equal(t, []string{"A"}, o.Lost, "the stale holder's entry was accepted and is lost")
		require.Zero(t, o.Stale, "no token went backwards: fencing writes alone cannot see it")
	})
}

func TestResourceCrash(t *testing.T) {
	playEverywhere(t, "ResourceCrash", requireOverwritten)
}

func TestReleaseTOCTOU(t *testing.T) {
	t.Parallel()
	t.Run("GetThenDel", func(t *testing.T) {
		play(t, "ReleaseGetThenDel", func(t *testing.T, f history.Fencing, o *scenarios.Outcome) {
			require.True(t, reported(o, "A", history.ReleaseForeign), "A deleted B's lock")
			if f == history.FencingOff {
				require.Equal(t, []string{"C"}, o.Lost)
				return
			}
			requireRefused(t, o, 1, "A", "C")
		})
	})
	t.Run("CompareAndDelete", func(t *testing.T) {
		play(t, "ReleaseCompareAndDelete", func(t *testing.T, _ history.Fencing, o *scenarios.Outcome) {
			require.True(t, reported(o, "A", history.ReleaseLost), "A left B's lock alone")
			require.True(t, reported(o, "C", history.Held), "C was kept out")
			requireRefused(t, o, 0, "A", "B", "C")
		})
	})
}

func golden(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
		require.NoError(t, os.WriteFile(path, []byte(got), 0o644))
		return
	}
	want, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, string(want), got, "the trace differs from %s; if the change is meant, run go test ./scenarios -update", path)
}

func save(t *testing.T, path string, events []history.Event) {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, history.Encode(&b, events))
	require.NoError(t, os.MkdirAll(filepath.Dir(path), 0o755))
	require.NoError(t, os.WriteFile(path, b.Bytes(), 0o644))
}

func final(t *testing.T, o *scenarios.Outcome) history.Event {
	t.Helper()
	i := slices.IndexFunc(o.Events, func(e history.Event) bool { return e.Kind == history.KindFinal })
	require.GreaterOrEqual(t, i, 0, "no final event")
	return o.Events[i]
}

// requireRefused requires n refusals, by the resource's own metric too, no stale write, and a ledger of just these entries.
func requireRefused(t *testing.T, o *scenarios.Outcome, n int, ledger ...string) {
	t.Helper()
	require.Equal(t, n, o.Refused, "refused calls")
	require.Equal(t, n, final(t, o).Stale, "resource_stale_token_rejections_total")
	require.Zero(t, o.Stale, "stale writes accepted")
	require.Empty(t, o.Lost)
	require.Equal(t, ledger, history.Entries(final(t, o).Value))
}

func reported(o *scenarios.Outcome, actor, name string) bool {
	return slices.ContainsFunc(o.Events, func(e history.Event) bool {
		return e.Kind == history.KindReport && e.Actor == actor && e.Name == name
	})
}
