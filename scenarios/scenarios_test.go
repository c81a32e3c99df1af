package scenarios_test

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

var (
	provider = flag.String("testbed", "", "where Redis comes from: auto, containers, local, external or embedded (default: $FENCELAB_TESTBED, then auto)")
	ttl      = flag.Duration("ttl", scenarios.DefaultTTL, "the lease of the worker that the fault hits")
	pause    = flag.Duration("pause", 0, "how long the freeze, or the delay in the network, lasts at least; 0: until the successor has got in")
	record   = flag.String("record", "", "a directory in which to leave the histories, for cmd/report")
	update   = flag.Bool("update", false, "rewrite the golden traces")
)

func TestMain(m *testing.M) {
	scenarios.Child(open)
	flag.Parse()
	code := m.Run()
	if started {
		if redis, err := sharedRedis(); err == nil {
			if err := redis.Close(); err != nil {
				fmt.Fprintln(os.Stderr, err)
				code = max(code, 1)
			}
		}
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	os.Exit(code)
}

var started bool // sharedRedis has been called

// sharedRedis is the one Redis of this package's tests, started by the first that needs it.
var sharedRedis = sync.OnceValues(func() (*testbed.Redis, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	p := testbed.Provider("")
	if *provider != "" {
		var err error
		if p, err = testbed.ParseProvider(*provider); err != nil {
			return nil, err
		}
	}
	started = true
	return testbed.StartRedis(ctx, &testbed.Options{Provider: p, Progress: os.Stderr})
})

func TestPauseExceedsTTL(t *testing.T) {
	play(t, "PauseExceedsTTL", func(t *testing.T, f history.Fencing, o *scenarios.Outcome) {
		if f == history.FencingOff {
			require.Equal(t, []string{"B", "A"}, o.Writers, "two accepted writers")
			require.Equal(t, []string{"B"}, o.Lost, "the successor's entry is lost")
			require.Zero(t, final(t, o).Stale)
			return
		}
		requireRefused(t, o, 1, "B")
	})
}

func TestPauseAtWrite(t *testing.T) {
	play(t, "PauseAtWrite", func(t *testing.T, f history.Fencing, o *scenarios.Outcome) {
		if f == history.FencingOff {
			require.Equal(t, []string{"B"}, o.Lost)
			return
		}
		requireRefused(t, o, 1, "B")
	})
}

func TestWriteDelayedInNetwork(t *testing.T) {
	play(t, "WriteDelayedInNetwork", func(t *testing.T, f history.Fencing, o *scenarios.Outcome) {
		if f == history.FencingOff {
			require.Equal(t, []string{"B"}, o.Lost)
			return
		}
		requireRefused(t, o, 1, "B")
	})
}

func TestLateWriteBeforeSuccessorWrites(t *testing.T) {
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
	play(t, "ResourceCrash", func(t *testing.T, f history.Fencing, o *scenarios.Outcome) {
		if f == history.FencingOff {
			require.Equal(t, []string{"B"}, o.Lost)
			return
		}
		requireRefused(t, o, 1, "B")
	})
}

func TestReleaseTOCTOU(t *testing.T) {
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

// play runs a hazard in each fencing mode, compares verdict and trace with what they must be, and lets check look closer.
func play(t *testing.T, name string, check func(*testing.T, history.Fencing, *scenarios.Outcome)) {
	t.Helper()
	s, ok := scenarios.Hazard(name)
	require.True(t, ok, "there is no hazard %q", name)
	redis, err := sharedRedis()
	require.NoError(t, err)
	test := t.Name()
	for _, f := range []history.Fencing{history.FencingOff, history.FencingWrites, history.FencingOn} {
		want, ok := s.Expect[f]
		if !ok {
			continue
		}
		t.Run(string(f), func(t *testing.T) {
			r := scenarios.OnRedis(redis)
			r.TTL, r.Pause = *ttl, *pause
			r.Command = func(_ scenarios.Scenario, f history.Fencing) string { return command(test, f) }
			o, err := r.Run(t.Context(), s, f)
			trace := strings.Join(history.Trace(o.Events), "\n") + "\n"
			if err != nil {
				t.Fatalf("%v\n%srepeat it with: %s", err, trace, command(test, f))
			}
			if *record != "" {
				save(t, filepath.Join(*record, s.Name+"_"+string(f)+".jsonl"), o.Events)
			}
			if o.Verdict != want {
				t.Fatalf("got verdict %v, want %v: %v\n%srepeat it with: %s", o.Verdict, want, o.Findings, trace, command(test, f))
			}
			t.Logf("%v, as expected: %s\n%s", o.Verdict, strings.Join(append(o.Findings, fmt.Sprintf("%d refused", o.Refused)), "; "), trace)
			golden(t, filepath.Join("..", "testdata", "traces", s.Name+"_"+string(f)+".txt"), trace)
			check(t, f, o)
		})
	}
}

// command repeats a run.
func command(test string, f history.Fencing) string {
	var parts []string
	for part := range strings.SplitSeq(test+"/"+string(f), "/") {
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
