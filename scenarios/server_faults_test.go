package scenarios_test

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/locks"
	"github.com/fencelab/fencelab/internal/open/onredis"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// A lock that a majority has agreed on, and its token, outlive the leader.
func TestEtcdLeaderFault(t *testing.T) { leaderFault(t, locks.Etcd) }

func TestZooKeeperLeaderFault(t *testing.T) { leaderFault(t, locks.ZooKeeper) }

func leaderFault(t *testing.T, lock string) {
	t.Helper()
	t.Parallel()
	for _, name := range []string{"LeaderKilled", "LeaderFrozen", "LeaderIsolated"} {
		s, ok := scenarios.Hazard(name)
		require.True(t, ok)
		if !s.On(lock) {
			continue
		}
		s.Locks = []string{lock}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if p := providerOf(t); name == "LeaderIsolated" && p != testbed.Containers {
				t.Skipf("not applicable to %s servers: only containers have a network between them that one can be cut off from", p)
			}
			playScenarioAlone(t, s, requireOverwritten)
		})
	}
}

// One service is played on several times, and each run's leader is another: the one before has been killed.
func TestLeaderOfEachRun(t *testing.T) {
	t.Parallel()
	s, ok := scenarios.Hazard("LeaderKilled")
	require.True(t, ok)
	if !slices.Contains(locksOf(s), locks.Etcd) {
		t.Skip("-backend asks for other locks")
	}
	all, ctx := servers(t, locks.Etcd, s), within(t, stepTimeout)
	svc := all.On()
	restart := scenarios.Fault(scenarios.Leader, history.FaultRestart)
	require.ErrorContains(t, svc.Fault(ctx, restart), "there is nothing that restart would end")
	for range 2 {
		leader, err := all.Cluster.Leader(ctx)
		require.NoError(t, err)
		require.NoError(t, svc.Fault(ctx, scenarios.Fault(scenarios.Leader, history.FaultKill)))
		require.ErrorIs(t, leader.Kill(ctx), os.ErrProcessDone, "%s leads, and another was killed", leader.Name)
		_, err = all.Cluster.Leader(ctx, leader) // the restart is for the old one all the same
		require.NoError(t, err)
		require.NoError(t, svc.Fault(ctx, restart))
	}
}

// A Redis that has dropped keys for want of memory has room again, as much as before.
func TestEvictIsUndone(t *testing.T) {
	notExternal(t)
	o := options(t)
	o.Args = []string{"--maxmemory", "100mb", "--maxmemory-policy", "volatile-lru"}
	server, err := testbed.StartRedis(t.Context(), o)
	testbed.Need(t, err)
	defer func() { require.NoError(t, server.Close()) }()
	c, err := redisclient.New(server.URL)
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	ctx := within(t, patience)
	before, err := c.ConfigGet(ctx, "maxmemory*").Result()
	require.NoError(t, err)
	require.Equal(t, "volatile-lru", before["maxmemory-policy"])
	require.NoError(t, c.Set(ctx, "a key", "x", 0).Err())
	require.NoError(t, onredis.Service(server).Fault(ctx, scenarios.Fault("redis", history.FaultEvict)))
	require.Zero(t, c.DBSize(ctx).Val())
	after, err := c.ConfigGet(ctx, "maxmemory*").Result()
	require.NoError(t, err)
	require.Equal(t, before, after)
}

// What a server that is the user's holds is no run's to lose, and tests that would are not applicable to it.
func TestExternalIsLeftAlone(t *testing.T) {
	notExternal(t)
	server, err := testbed.StartRedis(t.Context(), options(t))
	testbed.Need(t, err)
	defer func() { require.NoError(t, server.Close()) }()
	testbed.Need(t, server.Real())
	c, err := redisclient.New(server.URL)
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
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
		for _, fault := range []string{
			history.FaultFlush, history.FaultEvict, history.FaultPause, history.FaultResume, history.FaultKill, history.FaultRestart,
			history.FaultWipe, history.FaultLag, history.FaultFailover, history.FaultJump, history.FaultIsolate, history.FaultRejoin,
			history.FaultSnapshot, history.FaultRestore, history.FaultReap,
		} {
			for _, target := range []string{external.Name, scenarios.LockService} {
				require.ErrorIs(t, svc.Fault(ctx, scenarios.Fault(target, fault)), errors.ErrUnsupported, "%s %s", fault, target)
				untouched(t, fault)
			}
		}
	})
	t.Run("tests", func(t *testing.T) {
		cmd := exec.CommandContext(ctx, os.Args[0], "-test.v", "-backend=redis,redlock", "-resource=http,redis", "-test.run="+
			"^(TestFenceCounterLost|TestFailoverLosesToken|TestRedlockClockJump|TestRedlockNodeRestart|TestRedlockTokensNotMonotonic|"+
			"TestCoordinatorDown|TestExpiryRace|TestClockSkew|TestEvictIsUndone|TestResourceCrash/redis.redis)$")
		cmd.Env = append(os.Environ(), testbed.EnvProvider+"="+string(testbed.External))
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		require.Contains(t, string(out), "not applicable to external servers")
		require.NotRegexp(t, `--- PASS: \S+/(off|writes|on) `, string(out), "it was played")
		untouched(t, string(out))
	})
}

// etcd's revision is a sound token as long as nobody takes it back, as a restore from a snapshot does.
func TestEtcdSnapshotRestore(t *testing.T) {
	t.Parallel()
	t.Run("Plain", func(t *testing.T) { playAlone(t, "EtcdSnapshotRestore", requireBackwards) })
	t.Run("RevisionBumped", func(t *testing.T) { playAlone(t, "EtcdSnapshotRestoreBumped", requireOverwritten) })
}

// The czxid of a node grows with every change of the ensemble. The number in its name starts again with its parent.
func TestZooKeeperSequenceResets(t *testing.T) {
	t.Parallel()
	playAlone(t, "ZooKeeperSequenceResets", func(t *testing.T, f history.Fencing, o *scenarios.Outcome) {
		require.Less(t, tokenOf(t, o, "W"), tokenOf(t, o, "A"))
		requireOverwritten(t, f, o)
	})
}
