package explore_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/explore"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// corrupting are defects that corrupt data in steps that a hazard can express, and a sound lock with less fencing.
var corrupting = []struct {
	name, hazard  string
	fencing       history.Fencing
	broken, sound explore.System
}{
	{"ReleaseAny", "A release frees the lock whoever holds it.", history.FencingOff, onNaive(releaseAny), onNaive(none)},
	{"GetThenDel", "A release checks the owner, and then deletes the lock, whoever owns it by then.", history.FencingOff, onNaive(getThenDel), onNaive(none)},
	{"NoFence", "A sound lock, and a store that compares no tokens.", history.FencingOff, systems[0], explore.System{}},
	{"NoFencedRead", "A sound lock, and a store that compares the tokens of writes alone.", history.FencingWrites, systems[0], explore.System{}},
}

// With -update, hazards are written to testdata/hazards.
func TestFindHazards(t *testing.T) {
	for _, c := range corrupting {
		t.Run(c.name, func(t *testing.T) {
			in := c.broken
			in.Fencing = c.fencing
			in.Without = allBut(explore.Run, explore.Release, explore.Pause, explore.Resume, explore.Kill, explore.Late, explore.Deliver, explore.Wait)
			about := scenarios.Scenario{Name: c.name, Hazard: c.hazard, Locks: []string{"redis"}}
			if c.sound.Open != nil {
				about.Variant = c.name
			}
			counts := func(s explore.Schedule) bool {
				h, err := in.Hazard(t, s, about)
				if err != nil || len(h.Expect) < 3 || c.sound.Open == nil {
					return err == nil && len(h.Expect) == 3
				}
				events, err := c.sound.Play(t, h, c.fencing)
				return err != nil || history.Judge(events).Verdict != history.Violated
			}
			o := explore.Options{Seed: 1, Schedules: most, Counts: counts}
			if c.name == "GetThenDel" { // it takes 1,332 schedules
				o.Seed = 1300
			}
			r := in.Explore(t, o)
			t.Log(r)
			require.NotNil(t, r.Found)
			h, err := in.Hazard(t, r.Schedule, about)
			require.NoError(t, err)
			file := "testdata/hazards/" + c.name + ".txt"
			if *update {
				require.NoError(t, os.WriteFile(file, scenarios.Format(h), 0o644))
			}
			if text, err := os.ReadFile(file); ordered {
				require.NoError(t, err)
				require.Equal(t, string(text), string(scenarios.Format(h)))
			}
		})
	}
}

func TestNoHazard(t *testing.T) {
	schedules, _ := recorded(t, "testdata/defects.txt")
	schedules[slow] = parse(t, "pause C")
	for is, why := range map[defect]string{
		getThenSet:    "it lacks cut C 1",
		noExpiry:      "deafen A 0",
		slow:          "it has no steps",
		tokenFromTime: "it lacks nothing",
	} {
		sys := onNaive(is)
		_, err := sys.Hazard(t, schedules[is], scenarios.Scenario{Name: "None", Hazard: "It happens."})
		require.ErrorContains(t, err, why, is)
	}
}

func named(_ context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
	for _, c := range corrupting {
		if c.sound.Open == nil && s.Variant == "" || c.name == s.Variant {
			client := explore.NewClient(s.Addrs, s.TTL)
			client.Gap = s.Gap
			return c.broken.Open(client)
		}
	}
	return nil, fmt.Errorf("there is no variant %q", s.Variant)
}

func TestHazards(t *testing.T) {
	hazards, err := scenarios.Load(os.DirFS("testdata/hazards"))
	require.NoError(t, err)
	require.Len(t, hazards, len(corrupting))
	for _, c := range corrupting {
		i := slices.IndexFunc(hazards, func(h scenarios.Scenario) bool { return h.Name == c.name })
		require.GreaterOrEqual(t, i, 0, c.name)
		h := hazards[i]
		t.Run(h.Name, func(t *testing.T) {
			require.Equal(t, history.Violated, h.Expect[c.fencing])
			for f, want := range h.Expect {
				events, err := c.broken.Play(t, h, f)
				require.NoError(t, err)
				require.Equal(t, h.Traces[string(f)], trace(events))
				require.Equal(t, want, history.Judge(events).Verdict)
			}
			t.Parallel()
			server := testmain.Serve(t, testbed.StartRedis, nil)
			r := scenarios.Runner{Service: &scenarios.Service{
				Lock: h.Locks[0], Server: server.String(), Nodes: []scenarios.Node{{Name: "redis", Addr: server.Addr}},
			}}
			for f, want := range h.Expect {
				got, err := r.Run(t.Context(), h, f)
				require.NoError(t, err)
				require.Equal(t, h.Traces[string(f)], trace(got.Events))
				require.Equal(t, want, got.Verdict, "%q", got.Findings)
			}
		})
	}
}

func TestPlayNoSuchServer(t *testing.T) {
	for _, line := range []string{"jump redis6 20s", "wipe redis0", "cut A from redis1 redis6"} {
		h, err := scenarios.Parse("X.txt", []byte("It happens.\n\nrun A until read\n"+line+"\nrun A until done\n"))
		require.NoError(t, err)
		_, err = systems[3].Play(t, h, history.FencingOn)
		require.ErrorIs(t, err, errors.ErrUnsupported, line)
		require.ErrorContains(t, err, "has no server")
	}
}

func trace(events []history.Event) string {
	return strings.Join(history.Trace(events), "\n") + "\n"
}

// One hazard is left out: in virtual time a client can't see that a server has closed its idle connection, and sends its release
// twice.
func TestPlay(t *testing.T) {
	var played []string
	for _, h := range scenarios.Hazards() {
		for _, sys := range []explore.System{systems[0], systems[2], systems[3]} {
			lock := map[int]string{1: "redis", 5: "redlock"}[sys.Servers]
			if !h.On(lock) || h.Variant != "" || h.Name == "FenceCounterWiped" {
				continue
			}
			t.Run(h.Name+"/"+sys.Name, func(t *testing.T) {
				for f, want := range h.Expect {
					events, err := sys.Play(t, h, f)
					if errors.Is(err, errors.ErrUnsupported) {
						t.Skipf("not applicable: %v", err)
					}
					require.NoError(t, err)
					require.Equal(t, h.Traces[string(f)], trace(events))
					got := history.Judge(events)
					require.Equal(t, want, got.Verdict, "%q", got.Findings)
				}
				if !slices.Contains(played, h.Name) {
					played = append(played, h.Name)
				}
			})
		}
	}
	require.Equal(t, []string{
		"HolderKilled", "LateWriteBeforeSuccessorWrites", "PauseAtWrite", "PauseExceedsTTL", "RedlockClockJump", "RedlockNodeRestart",
		"RedlockNodeRestartOvertakes", "RedlockTokensMonotonic", "WriteDelayedInNetwork",
	}, played)
}
