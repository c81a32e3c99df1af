package scenarios_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/open/onredis"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func TestLinkFaults(t *testing.T) {
	for verb, closes := range map[string]bool{"cut": false, "refuse": true} {
		synctest.Test(t, func(t *testing.T) {
			var ends []net.Conn
			link, err := faults.NewMemoryLink("server", func() (net.Conn, error) {
				ours, theirs := net.Pipe()
				ends = append(ends, theirs)
				return ours, nil
			})
			require.NoError(t, err)
			client, err := link.Dial(t.Context())
			require.NoError(t, err)
			ends = append(ends, client)
			heal, err := scenarios.InjectLink(t.Context(), verb, link)
			require.NoError(t, err)
			var got [2]string
			for i, end := range ends {
				go func() {
					_, err := end.Read(make([]byte, 1))
					got[i] = fmt.Sprint(err)
				}()
				_, err := end.Write([]byte("x"))
				require.Equal(t, closes, err != nil, verb)
			}
			synctest.Wait()
			require.Equal(t, map[bool][2]string{true: {"EOF", "EOF"}}[closes], got, verb)
			require.NoError(t, errors.Join(heal(t.Context()), link.Close()))
		})
	}
}

func TestFailoverIsForGood(t *testing.T) {
	s := hazard(t, "FailoverReissuesToken")
	needLock(t, locks.Redis)
	svc, ctx := servers(t, locks.Redis, s).On(), within(t, patience)
	lag := scenarios.Step{Verb: "lag", Target: "redis"}
	require.NoError(t, svc.Fault(ctx, lag))
	require.NoError(t, svc.Fault(ctx, scenarios.Step{Verb: "failover", Target: "redis"}))
	require.ErrorContains(t, svc.Fault(ctx, lag), "it has no replica")
	require.ErrorContains(t, svc.Fault(ctx, scenarios.Step{Verb: "resume", Target: "redis"}), "there is no fault for resume to undo")
}

// Each run has another leader, because the previous one was killed.
func TestLeaderOfEachRun(t *testing.T) {
	t.Parallel()
	s := hazard(t, "LeaderKilled")
	needLock(t, locks.Etcd)
	all, ctx := servers(t, locks.Etcd, s), within(t, stepTimeout)
	svc := all.On()
	restart := scenarios.Step{Verb: "restart", Target: scenarios.Leader}
	require.ErrorContains(t, svc.Fault(ctx, restart), "there is no fault for restart to undo")
	for range 2 {
		leader, err := all.Servers[0].Cluster.Leader(ctx)
		require.NoError(t, err)
		require.NoError(t, svc.Fault(ctx, scenarios.Step{Verb: "kill", Target: scenarios.Leader}))
		require.ErrorIs(t, leader.Kill(ctx), os.ErrProcessDone, "%s leads, and another was killed", leader.Name)
		_, err = all.Servers[0].Cluster.Leader(ctx, leader) // the restart still goes to the old one
		require.NoError(t, err)
		require.NoError(t, svc.Fault(ctx, restart))
	}

	// Each undo goes to the server that its own fault has hit.
	leader := func(verb string) error { return svc.Fault(ctx, scenarios.Step{Verb: verb, Target: scenarios.Leader}) }
	_, err := all.Servers[0].Cluster.Leader(ctx)
	require.NoError(t, err)
	for _, verb := range []string{"pause", "kill", "restart", "resume"} {
		require.NoError(t, leader(verb), verb)
	}
	require.ErrorContains(t, leader("resume"), "there is no fault for resume to undo")
}

// The undo continues after errors.
func TestFaultOfSeveralServers(t *testing.T) {
	notExternal(t)
	nodes, err := testbed.StartRedisNodes(t.Context(), 2, options(t))
	testbed.Need(t, err)
	set, ctx := scenarios.ServerSet{Servers: nodes}, within(t, patience)
	t.Cleanup(func() { require.NoError(t, set.Close()) })
	testbed.Need(t, nodes[0].Real())
	svc := set.On()
	require.NoError(t, svc.Fault(ctx, scenarios.Step{Verb: "kill", Target: nodes[1].Name}))
	require.ErrorContains(t, svc.Fault(ctx, scenarios.Step{Verb: "pause", Target: scenarios.LockService}), nodes[1].Name)
	require.ErrorContains(t, svc.Fault(ctx, scenarios.Step{Verb: "restart", Target: scenarios.LockService}), "there is no fault for restart to undo")
	step := func(verb string) error { return svc.Fault(ctx, scenarios.Step{Verb: verb, Target: nodes[0].Name}) }
	require.NoError(t, errors.Join(step("pause"), step("kill")))
	require.ErrorIs(t, step("resume"), os.ErrProcessDone)
	require.NoError(t, errors.Join(step("restart"), step("pause"), step("resume")))
	ended, end := context.WithCancel(ctx)
	end()
	require.Error(t, svc.Fault(ended, scenarios.Step{Verb: "kill", Target: nodes[0].Name}), "a kill that is not confirmed is undone")
	for _, s := range nodes {
		c, err := redisclient.New(s.URL)
		require.NoError(t, err)
		require.NoError(t, c.Ping(ctx).Err(), s.Name)
		require.NoError(t, c.Close())
	}
}

func TestEvictIsUndone(t *testing.T) {
	notExternal(t)
	o := options(t)
	o.Args = []string{"--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru"}
	server, c := ownRedis(t, o)
	ctx := within(t, patience)
	before, err := c.ConfigGet(ctx, "maxmemory*").Result()
	require.NoError(t, err)
	require.Equal(t, "volatile-lru", before["maxmemory-policy"])
	require.NoError(t, c.Set(ctx, "a key", "x", 0).Err())
	require.NoError(t, onredis.Service(server).Fault(ctx, scenarios.Step{Verb: "evict", Target: "redis"}))
	require.Zero(t, c.DBSize(ctx).Val())
	after, err := c.ConfigGet(ctx, "maxmemory*").Result()
	require.NoError(t, err)
	require.Equal(t, before, after)
}

func TestExternalIsLeftAlone(t *testing.T) {
	notExternal(t)
	server, c := ownRedis(t, options(t))
	testbed.Need(t, server.Real())
	ctx := within(t, stepTimeout)
	require.NoError(t, c.Set(ctx, "a user's key", "x", 0).Err())
	before, err := c.ConfigGet(ctx, "*").Result()
	require.NoError(t, err)
	untouched := func(t *testing.T, by string) {
		t.Helper()
		require.Equal(t, "x", c.Get(ctx, "a user's key").Val(), by)
		after, err := c.ConfigGet(ctx, "*").Result()
		require.NoError(t, err)
		require.Equal(t, before, after, by)
	}

	t.Setenv(testbed.EnvRedisAddr, server.Addr)
	t.Run("faults", func(t *testing.T) {
		external, err := testbed.StartRedis(ctx, &testbed.Options{Provider: testbed.External})
		testbed.Need(t, err)
		defer func() { require.NoError(t, external.Close()) }()
		svc := onredis.Service(external)
		for _, f := range history.Faults {
			for _, target := range []string{external.Name, scenarios.LockService} {
				require.ErrorIs(t, svc.Fault(ctx, scenarios.Step{Verb: f.Name, Target: target}), errors.ErrUnsupported, "%s %s", f.Name, target)
				untouched(t, f.Name)
			}
		}
	})
	t.Run("tests", func(t *testing.T) {
		cmd := exec.CommandContext(ctx, os.Args[0], "-test.v", "-backend=redis,redlock", "-resource=http", "-test.run="+
			"^Test(FenceCounter.*|Failover.*|RedlockClockJump|RedlockNodeRestart.*|RedlockCounters.*|RedlockTokens.*|"+
			"CoordinatorDown|ExpiryRace|ClockSkew|EvictIsUndone)$")
		cmd.Env = append(os.Environ(), testbed.EnvProvider+"="+string(testbed.External))
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "not applicable to external servers")
		require.NotRegexp(t, `--- PASS: \S+/(off|writes|on) `, string(out), "it ran")
		untouched(t, string(out))
	})
}
