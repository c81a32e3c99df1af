package scenarios_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/open/onredis"
	"github.com/fencelab/fencelab/internal/proc"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func onRedis(redis *testbed.Server) *scenarios.Runner {
	return &scenarios.Runner{Service: onredis.Service(redis), Store: onredis.Bolt}
}

func childrenOf(pid int) (pids []int) {
	under, _ := proc.Descendants(pid)
	for _, p := range under {
		if p.Parent == pid {
			pids = append(pids, p.PID)
		}
	}
	return pids
}

func owned() (all []string) {
	for _, pid := range childrenOf(os.Getpid()) {
		all = append(all, fmt.Sprint("process ", pid))
	}
	files, _ := filepath.Glob("/proc/self/fd/*")
	for _, file := range files {
		if what, err := os.Readlink(file); err == nil && (strings.HasPrefix(what, "socket:") || strings.HasPrefix(what, "pipe:")) {
			all = append(all, what)
		}
	}
	return all
}

// requireNothingLeft returns a function that checks that no process, goroutine, socket, pipe or file started since is left.
// Processes and sockets are checked on Linux only.
func requireNothingLeft(t *testing.T) func() {
	t.Helper()
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	goroutines := goleak.IgnoreCurrent()
	percent := debug.SetGCPercent(-1) // the garbage collector would close a forgotten file
	t.Cleanup(func() { debug.SetGCPercent(percent) })
	dir, err := testbed.MkdirTemp("first")
	require.NoError(t, err)
	require.NoError(t, os.Remove(dir))
	before := owned()
	if runtime.GOOS == "linux" {
		require.NotEmpty(t, before, "the list sees nothing")
	}
	return func() {
		t.Helper()
		for began := time.Now(); ; time.Sleep(pollInterval) {
			left := slices.DeleteFunc(owned(), func(what string) bool { return slices.Contains(before, what) })
			if len(left) == 0 {
				break
			}
			require.Less(t, time.Since(began), patience, "%v", left)
		}
		files, err := os.ReadDir(tmp)
		require.NoError(t, err)
		require.Empty(t, files, "temporary files")
		require.NoError(t, testmain.FindLeaks(goroutines))
	}
}

// In lines, commas separate lines.
func schedule(t *testing.T, lines string) scenarios.Scenario {
	t.Helper()
	s, err := scenarios.Parse("Test.txt", []byte("It happens.\n\n"+strings.ReplaceAll(lines, ", ", "\n")+"\n"))
	require.NoError(t, err)
	return s
}

func TestRunFails(t *testing.T) {
	for name, c := range map[string]struct {
		steps   string
		variant string
		change  func(*scenarios.Runner, context.CancelCauseFunc)
		want    string
		last    string // of the trace; "": it varies
	}{
		"a lock that is never released": {
			steps:  "run A until read, run B until acquired, run A until done, run B until done",
			change: endAfter("A", history.Read),
			want:   "step 2, run B until acquired: B: waiting for its next report: the user has had enough",
			last:   "A read []",
		},
		"a fault that never comes into force": {
			steps: "pause redis, run A until done",
			change: func(r *scenarios.Runner, _ context.CancelCauseFunc) {
				r.StepTimeout = 5 * time.Second
				r.Service.Fault = func(ctx context.Context, _ scenarios.Step) error {
					<-ctx.Done()
					return context.Cause(ctx)
				}
			},
			want: "step 1, pause redis: the step did not finish within 5.25s",
			last: "run Test, fencing on",
		},
		"a report that never comes, while another is frozen": {
			steps: "worker A victim, run A until read, pause A, run B until read-stale, resume A, run A until done, run B until done",
			want:  `step 3, run B until read-stale: B was done without reporting "read-stale"`,
			last:  "B done",
		},
		"a report that never comes, while a write is held": {
			steps: "worker A victim no-renew, run A until before-write, hold A, run A until sent, run B until read-stale, deliver A, run A until done, run B until done",
			want:  `step 4, run B until read-stale: B was done without reporting "read-stale"`,
			last:  "B done",
		},
		"a dead resource": {
			steps:  "run A until acquired, kill resource, run A until read, restart resource, run A until done",
			change: endAfter(scenarios.Resource, "kill"),
			want:   "step 3, run A until read: A: waiting for its next report: the user has had enough",
			last:   "kill resource",
		},
		"a lock that can't be opened": {
			steps:   "run A until acquired, run A until done",
			variant: "test-cannot-open",
			want:    "step 1, run A until acquired: A failed: the lock server is on fire",
			last:    `A failed: "the lock server is on fire"`,
		},
		"a lock that can't be closed": {
			steps:   "run A until done",
			variant: "test-cannot-close",
			want:    "step 1, run A until done: A failed: the lock server is on fire",
			last:    `A failed: "the lock server is on fire"`,
		},
		"a failure behind a refusal": {
			steps:   "worker A victim, run A until read, pause A, run B until done, resume A, run A until done",
			variant: "test-fails-late",
			want:    "step 5, run A until done: A failed: release: the lock server is on fire",
			last:    `A failed: "release: the lock server is on fire"`,
		},
		"a worker that is killed": {
			steps:   "run A until acquired, run A until done",
			variant: "test-kills-A",
			want:    "step 1, run A until acquired: A: its process ended with signal: killed",
			last:    "run Test, fencing on",
		},
		"a resource that dies": {
			steps:   "run A until acquired, run A until done",
			variant: "test-kills-resource",
			want:    "step 1, run A until acquired: resource: its process ended with signal: killed",
			last:    "run Test, fencing on",
		},
		"a resource that dies before a request": {
			steps:   "run A until done",
			variant: "test-kills-later",
			want:    "step 1, run A until done: resource: its process ended with signal: killed",
			last:    "A acquired #1",
		},
		"a worker that is killed at a checkpoint": {
			steps:   "worker A victim try, run A until read, run B until read, run A until done, run B until done",
			variant: "test-kills-A",
			want:    "step 3, run A until done: A: its process ended with signal: killed",
			last:    "B read []",
		},
		"a worker that has died before it is to be killed": {
			steps:   "worker A victim try, run A until read, run B until read, kill A, run B until done",
			variant: "test-kills-A",
			want:    "step 3, kill A: os: process already finished",
			last:    "B read []",
		},
		"a context that ends": {
			steps: "run A until read, run B until read, run A until done, run B until done",
			change: func(r *scenarios.Runner, cancel context.CancelCauseFunc) {
				r.Command = func(scenarios.Scenario, history.Fencing) string { cancel(errEnough); return "" }
			},
			want: "the user has had enough",
		},
		"a lock's remains that can't be removed": {
			steps: "worker A victim, run A until read, pause A, run B until done, resume A, run A until done",
			change: func(r *scenarios.Runner, _ context.CancelCauseFunc) {
				r.Service.Forget = func(context.Context, string) error { return errors.New("the lock server is on fire") }
			},
			want: "scenarios: Test, fencing on: the lock server is on fire",
			last: "final [B], 1 refused",
		},
	} {
		t.Run(name, func(t *testing.T) {
			r := onRedis(sharedRedis(t))
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			if c.change != nil {
				c.change(r, cancel)
			}
			forget, forgets := r.Service.Forget, false
			r.Service.Forget = func(ctx context.Context, key string) error {
				if forgets = ctx.Err() == nil; forget == nil {
					return nil
				}
				return forget(ctx, key)
			}
			nothingLeft := requireNothingLeft(t)
			s := schedule(t, c.steps)
			s.Variant = c.variant
			o, err := r.Run(ctx, s, history.FencingOn)
			require.ErrorContains(t, err, c.want)
			require.NotEqual(t, history.Safe, o.Verdict)
			require.NotEmpty(t, o.Findings)
			require.True(t, forgets, "the lock's remains are removed, with a context that goes on")
			if trace := history.Trace(o.Events); c.last != "" {
				require.Equal(t, c.last, trace[len(trace)-1])
			}
			nothingLeft()
		})
	}
}

func TestRunUndoes(t *testing.T) {
	for _, c := range []struct {
		steps       string
		interrupted bool
		fails       string
		want        []string
	}{
		{"pause redis, jump redis 5s, run A until read-stale, resume redis, run A until done", false, "", []string{"pause redis", "jump redis 5s", "resume redis"}},
		{"pause redis, run A until done, resume redis", true, "", []string{"pause redis", "resume redis"}},
		{"pause redis, run A until done, resume redis", true, "resume redis", []string{"pause redis", "resume redis"}},
		{"run A until done, kill redis", false, "", []string{"kill redis", "restart redis"}},
		{"jump redis 1s, pause redis, run A until done, resume redis", false, "", []string{"jump redis 1s", "pause redis", "resume redis"}},
		{"pause redis, resume redis, run A until done", false, "resume redis", []string{"pause redis", "resume redis", "resume redis"}},
	} {
		r := onRedis(sharedRedis(t))
		ctx, cancel := context.WithCancelCause(t.Context())
		defer cancel(nil)
		r.OnEvent = func(e history.Event) {
			if c.interrupted && is(e, "redis", "pause") {
				cancel(errEnough)
			}
		}
		var got []string
		r.Service.Fault = func(ctx context.Context, st scenarios.Step) error {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			got = append(got, st.String())
			if st.String() == c.fails && len(got) == slices.Index(got, c.fails)+1 {
				return errors.New("it stays frozen")
			}
			return nil
		}
		_, err := r.Run(ctx, schedule(t, c.steps), history.FencingOn)
		require.Equal(t, c.want, got)
		if c.fails != "" {
			require.ErrorContains(t, err, "it stays frozen")
		}
	}
}

// One mend ends every fault between a worker and the servers.
func TestMendEndsAll(t *testing.T) {
	r := onRedis(sharedRedis(t))
	r.Service.Nodes = append(r.Service.Nodes, scenarios.Node{Name: "spare", Addr: r.Service.Nodes[0].Addr})
	s := schedule(t, "refuse A from redis, cut A from spare, mend A, run A until done")
	s.Variant = "test-first-server-only"
	_, err := r.Run(t.Context(), s, history.FencingOn)
	require.NoError(t, err)

	// It ends no fault of a worker whose lock doesn't use the links.
	r.Service.Env = []string{envRedis + "=" + r.Service.Nodes[0].Addr}
	s.Variant = "test-elsewhere"
	_, err = r.Run(t.Context(), s, history.FencingOn)
	require.ErrorContains(t, err, "A was never cut off: it used the lock through none of its links; does Open connect to LockSpec.Addrs?")
}

func TestRunInterrupted(t *testing.T) {
	raised := make(chan os.Signal, 2)
	signal.Notify(raised, syscall.SIGTERM)
	defer signal.Stop(raised)
	signal.Ignore(syscall.SIGHUP)
	defer signal.Reset(syscall.SIGHUP)
	for sig, want := range map[syscall.Signal]string{syscall.SIGHUP: "", syscall.SIGTERM: "step 2, jump redis 1s: interrupted"} {
		r, undone := onRedis(sharedRedis(t)), false
		r.Service.Fault = func(ctx context.Context, st scenarios.Step) error {
			undone = st.Verb == "resume" && ctx.Err() == nil
			if st.Verb != "jump" {
				return nil
			}
			if err := syscall.Kill(os.Getpid(), sig); err != nil || want == "" {
				return err
			}
			<-ctx.Done()
			return context.Cause(ctx)
		}
		_, err := r.Run(t.Context(), schedule(t, "pause redis, jump redis 1s, resume redis, run A until done"), history.FencingOn)
		require.True(t, undone)
		if want == "" {
			require.NoError(t, err)
			continue
		}
		require.ErrorContains(t, err, want)
		for range 2 {
			select {
			case got := <-raised:
				require.Equal(t, sig, got)
			case <-time.After(patience):
				require.Fail(t, "the signal isn't raised again")
			}
		}
	}
}

// The signal is raised again, which may end the process, only when all runs have cleaned up.
func TestRunsInterrupted(t *testing.T) {
	raised := make(chan os.Signal, 3)
	signal.Notify(raised, syscall.SIGTERM)
	defer signal.Stop(raised)
	redis := sharedRedis(t)
	begun, first, second := make(chan bool), make(chan error, 1), make(chan error, 1)
	run := func(ended chan error, forget func(context.Context, string) error) {
		r := onRedis(redis)
		r.Service.Forget = forget
		r.Service.Fault = func(ctx context.Context, _ scenarios.Step) error {
			begun <- true
			<-ctx.Done()
			return context.Cause(ctx)
		}
		_, err := r.Run(t.Context(), schedule(t, "jump redis 1s, run A until done"), history.FencingOn)
		ended <- err
	}
	early := 0
	go run(first, nil)
	go run(second, func(ctx context.Context, _ string) error {
		err := <-first
		_, begun := onRedis(redis).Run(ctx, schedule(t, "run A until done"), history.FencingOn)
		early = len(raised)
		return errors.Join(err, begun)
	})
	<-begun
	<-begun
	require.NoError(t, syscall.Kill(os.Getpid(), syscall.SIGTERM))
	require.Equal(t, syscall.SIGTERM, <-raised)
	require.Equal(t, 3, strings.Count((<-second).Error(), "interrupted"), "both runs, and one that would begin meanwhile")
	require.Zero(t, early, "the signal was raised while a run was still cleaning up")
	require.Equal(t, syscall.SIGTERM, <-raised)
	require.Empty(t, raised)
	_, err := onRedis(redis).Run(t.Context(), schedule(t, "run A until done"), history.FencingOn)
	require.NoError(t, err, "a later run")
}

func TestRunLeavesNothing(t *testing.T) {
	redis := sharedRedis(t)
	for _, name := range []string{"WriteDelayedInNetwork", "ResourceCrash"} {
		s := hazard(t, name)
		nothingLeft := requireNothingLeft(t)
		_, err := onRedis(redis).Run(t.Context(), s, history.FencingOn)
		require.NoError(t, err)
		nothingLeft()
	}
}

func TestRunEndsHelpers(t *testing.T) {
	file := filepath.Join(t.TempDir(), "pids")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	t.Setenv(envHelpers, file)
	t.Cleanup(func() { // half of the helpers have sessions of their own
		b, _ := os.ReadFile(file)
		for i, pid := range strings.Fields(string(b)) {
			if n, err := strconv.Atoi(pid); err == nil && i%2 == 1 {
				_ = syscall.Kill(n, syscall.SIGKILL)
			}
		}
	})
	s := hazard(t, "HolderKilled")
	s.Variant = "test-helpers"
	_, err := onRedis(sharedRedis(t)).Run(t.Context(), s, history.FencingOn)
	require.NoError(t, err)
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	pids := strings.Fields(string(b))
	require.Len(t, pids, 4)
	for i, pid := range pids {
		if i%2 == 1 {
			continue
		}
		require.Eventually(t, func() bool {
			line, err := os.ReadFile("/proc/" + pid + "/cmdline") // empty for a zombie
			return err != nil || len(line) == 0
		}, patience, pollInterval)
	}
}

func TestRunRefuses(t *testing.T) {
	s := hazard(t, "PauseExceedsTTL")
	o, err := new(scenarios.Runner).Run(t.Context(), s, "sometimes")
	require.EqualError(t, err, `scenarios: unknown fencing mode "sometimes"; the modes are [off writes on]`)
	require.Equal(t, history.Inconclusive, o.Verdict)

	r := scenarios.Runner{Service: &scenarios.Service{}, TTL: time.Second, Pause: time.Second}
	o, err = r.Run(t.Context(), s, history.FencingOn)
	require.ErrorContains(t, err, "a pause of 1s doesn't exceed the TTL of 1s; make it longer, or the TTL shorter")
	require.Equal(t, history.Inconclusive, o.Verdict)

	s = hazard(t, "HolderPartitioned")
	s.Workers = map[string]scenarios.Worker{"A": {Victim: true, Outlive: true, NoRenew: true}} // then the lease is lost without a cut
	r = scenarios.Runner{Service: &scenarios.Service{Lock: "mine"}}
	o, err = r.Run(t.Context(), s, history.FencingOn)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorContains(t, err, "scenarios: HolderPartitioned.txt:5: step 2, cut A: mine has no Nodes to be cut off from")
	require.Equal(t, history.Inconclusive, o.Verdict)

	_, err = onRedis(sharedRedis(t)).Run(t.Context(), schedule(t, "pause redis9, run A until done, resume redis9"), history.FencingOn)
	require.ErrorContains(t, err, "scenarios: Test.txt:3: step 1, pause redis9: ")
	require.ErrorContains(t, err, `has no server "redis9"`)
	for _, who := range []string{scenarios.Leader, scenarios.LockService} { // a link is to one server: nothing would be cut
		_, err = onRedis(sharedRedis(t)).Run(t.Context(), schedule(t, "run A until read, cut A from "+who+", run A until done"), history.FencingOn)
		require.ErrorContains(t, err, fmt.Sprintf("step 2, cut A from %s: ", who))
		require.ErrorContains(t, err, fmt.Sprintf("has no server %q", who))
	}
}

func TestHazardDoesNotBite(t *testing.T) {
	minute := history.Duration(time.Minute)
	for name, c := range map[string]struct {
		hazard  string
		variant string
		hold    history.Duration
		ttl     time.Duration
		want    string
	}{
		"a lock that doesn't renew":             {"WedgedHolder", "test-never-renews", minute, 0, `^B was granted the lock \S+s after A, whose lease was to be renewed for 1m0s$`},
		"renewals that are over before a lease": {"WedgedHolder", "", history.Duration(400 * time.Millisecond), 500 * time.Millisecond, `^A's lease of 500ms outlasts its renewals, which end after 400ms: choose a shorter TTL$`},
		"a lock that lets everybody in":         {"PauseExceedsTTL", "test-lets-in", 0, time.Minute, `^B was granted the lock \S+s before the end of A's lease$`},
	} {
		t.Run(name, func(t *testing.T) {
			s := hazard(t, c.hazard)
			s.MinTTL, s.Variant = 0, c.variant
			if c.hold > 0 {
				s.Workers = map[string]scenarios.Worker{"A": {Victim: true, MaxHold: c.hold}}
			}
			for f := range s.Expect {
				r := onRedis(sharedRedis(t))
				r.TTL = c.ttl
				o, err := r.Run(t.Context(), s, f)
				require.NoError(t, err)
				require.Equal(t, history.Judge(o.Events), o.Result)
				require.Equal(t, history.Inconclusive, o.Verdict)
				require.Regexp(t, c.want, o.Findings[0])
			}
		})
	}
}

func TestOnlyAFreezeEndsTheLease(t *testing.T) {
	redis := sharedRedis(t)
	const steps = ", run A until read, run B until done, run A until done"
	r := onRedis(redis)
	r.TTL = 3 * time.Second // only a stall of more than two seconds ends the lease
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	r.OnEvent = func(e history.Event) {
		if is(e, "A", history.Read) {
			time.AfterFunc(r.TTL+time.Second, func() { cancel(errors.New("a lease that isn't renewed has ended")) })
		}
	}

	o, err := r.Run(ctx, schedule(t, "worker A victim"+steps), history.FencingOn)
	require.ErrorContains(t, err, "step 2, run B until done: B: waiting for its next report: a lease that isn't renewed has ended",
		"%s", strings.Join(history.Trace(o.Events), "\n"))
	require.Equal(t, history.Inconclusive, o.Verdict)
	require.Equal(t, []string{"run Test, fencing on", "A acquired #1", "  resource accepts read #1", "A read []"}, history.Trace(o.Events))

	r.OnEvent = nil
	o, err = r.Run(t.Context(), schedule(t, "worker A victim no-renew"+steps), history.FencingOn)
	require.NoError(t, err, "without renewals the lease ends by itself")
	require.Equal(t, history.Safe, o.Verdict, "%q", o.Findings)
}

func TestWorkerGivesUp(t *testing.T) {
	s := schedule(t, "worker A victim no-renew outlive check, run A until lost-lease, run B until acquired, run A until done, run B until done")
	o, err := onRedis(sharedRedis(t)).Run(t.Context(), s, history.FencingOn)
	require.NoError(t, err)
	require.Equal(t, history.Safe, o.Verdict, "%q", o.Findings)
	require.Subset(t, history.Trace(o.Events), []string{"A lost", "A lost-lease", "A release-lost", "final [B], 0 refused"})
}

func TestFaultMayTakeAPause(t *testing.T) {
	r := onRedis(sharedRedis(t))
	r.Pause = time.Hour
	r.Service.Fault = func(ctx context.Context, _ scenarios.Step) error {
		end, _ := ctx.Deadline()
		require.Greater(t, time.Until(end), r.Pause, "an undo waits for that long")
		return nil
	}
	_, err := r.Run(t.Context(), schedule(t, "jump redis 1s, run A until done"), history.FencingOn)
	require.NoError(t, err)
}

func TestRunDescribed(t *testing.T) {
	for given, want := range map[time.Duration]time.Duration{0: 300 * time.Millisecond, 400 * time.Millisecond: 400 * time.Millisecond} {
		r := onRedis(sharedRedis(t))
		r.TTL, r.Pause = given, time.Second
		r.Command = func(s scenarios.Scenario, f history.Fencing) string { return s.Name + " " + string(f) }
		o, err := r.Run(t.Context(), schedule(t, "tokens-lost, min-ttl 300ms, worker A victim second, run A until done"), history.FencingWrites)
		require.NoError(t, err)
		key := o.Events[1].Key
		require.Equal(t, &history.Run{
			Scenario: "Test", Hazard: "It happens.", Fencing: history.FencingWrites, Lock: locks.Redis, Server: r.Service.Server,
			Store: onredis.Bolt.Name, TTL: history.Duration(want), Pause: history.Duration(time.Second), Workers: []string{"A"},
			Keys: []string{key, key + "/second"}, TokensLost: true, Command: "Test writes",
		}, o.Events[0].Run)
		require.Equal(t, history.Duration(want), o.Events[1].TTL, "A's grant")
	}
}

func TestRefusedOnTheFirstLedger(t *testing.T) {
	s := schedule(t, "worker A victim second, run A until before-write, pause A, run B until done, resume A, run A until done")
	o, err := onRedis(sharedRedis(t)).Run(t.Context(), s, history.FencingOn)
	require.NoError(t, err)
	require.Equal(t, history.Safe, o.Verdict, "%q", o.Findings)
	require.NotContains(t, strings.Join(history.Trace(o.Events), "\n"), "read #1, ledger 2")
}

func TestPauseLasts(t *testing.T) {
	redis := sharedRedis(t)
	for name, faults := range map[string][2]string{
		"PauseExceedsTTL":       {"pause", "resume"},
		"WriteDelayedInNetwork": {"hold", "deliver"},
	} {
		s := hazard(t, name)
		r := onRedis(redis)
		r.Pause = time.Second
		o, err := r.Run(t.Context(), s, history.FencingOn)
		require.NoError(t, err)
		require.Equal(t, history.Safe, o.Verdict, "%q", o.Findings)
		at := func(fault string) int {
			return slices.IndexFunc(o.Events, func(e history.Event) bool { return e.Kind == history.KindFault && e.Name == fault })
		}
		last, end := o.Events[at(faults[0])-1], o.Events[at(faults[1])]
		require.Equal(t, "A", last.Actor)
		require.GreaterOrEqual(t, end.Time.Sub(last.Time), r.Pause, name)
	}
}

func TestEmbedded(t *testing.T) {
	t.Parallel()
	redis, _ := ownRedis(t, &testbed.Options{Provider: testbed.Embedded})
	for _, s := range scenarios.Hazards() {
		if !s.On(locks.Redis) || s.Faulty() {
			continue
		}
		for f := range s.Expect {
			t.Run(s.Name+"/"+string(f), func(t *testing.T) {
				t.Parallel()
				runOnce(t, onredis.Service(redis), onredis.Bolt, s, f)
			})
		}
	}
}
