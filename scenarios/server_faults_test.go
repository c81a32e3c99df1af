package scenarios_test

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/locks"
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
