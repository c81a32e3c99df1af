package scenarios

import (
	"slices"
	"time"

	"github.com/fencelab/fencelab/scenarios/history"
)

// alive is the lease of a victim that must still hold it when the fault hits: a machine with other work may stand still for
// two seconds.
const alive = history.Duration(3 * time.Second)

// wedgedFor is for how long a wedged holder's lease is renewed: for longer than the lease is by itself.
const wedgedFor = history.Duration(3500 * time.Millisecond)

// backwards is the verdict where a later grant has the smaller token. A stale holder then has the greater one, and a
// resource that looks at writes alone lets it write over its successor. One that was told of the holder's token at its
// first read refuses the successor instead: nothing is lost, and the lock is of no use until the tokens have caught up.
var backwards = map[history.Fencing]history.Verdict{
	history.FencingOff:    history.Violated,
	history.FencingWrites: history.Violated,
	history.FencingOn:     history.Safe,
}

// expect is the usual verdict: whoever relies on the lock alone loses data, whoever fences doesn't.
var expect = map[history.Fencing]history.Verdict{
	history.FencingOff:    history.Violated,
	history.FencingWrites: history.Safe,
	history.FencingOn:     history.Safe,
}

// Hazards are the ways in which a lock fails, in the order in which they are best read.
func Hazards() []Scenario {
	return slices.Concat(holderHazards(), redlockHazards(), tokenHazards(), serverHazards())
}

// holderHazards are about a holder that is late or dead. Most locks have them all.
func holderHazards() []Scenario {
	return []Scenario{
		{
			Name:    "PauseExceedsTTL",
			Hazard:  "The holder has read, is frozen for longer than its TTL, and writes when it wakes.",
			Workers: map[string]Worker{"A": {Victim: true}},
			Steps: []Step{
				Run("A", history.Read), Pause("A"), Run("B", history.Done), Resume("A"), Run("A", history.Done),
			},
			Expect: expect,
		},
		{
			Name:    "PauseAtWrite",
			Hazard:  "The holder checks that it still holds the lock, and is frozen between that check and the write.",
			Workers: map[string]Worker{"A": {Victim: true, Check: true}},
			MinTTL:  alive,
			Steps: []Step{
				Run("A", history.Checked), Pause("A"), Run("B", history.Done), Resume("A"), Run("A", history.Done),
			},
			Expect: expect,
		},
		{
			Name:    "WriteDelayedInNetwork",
			Hazard:  "The holder never stops, but its write stays in the network until after its lease has ended.",
			Workers: map[string]Worker{"A": {Victim: true, NoRenew: true}},
			Steps: []Step{
				Run("A", history.BeforeWrite), Hold("A"), Run("A", history.Sent),
				Run("B", history.Done), Deliver("A"), Run("A", history.Done),
			},
			Expect: expect,
		},
		{
			Name:    "LateWriteBeforeSuccessorWrites",
			Hazard:  "The stale holder wakes after its successor has read, and before it has written.",
			Workers: map[string]Worker{"A": {Victim: true}},
			Steps: []Step{
				Run("A", history.Read), Pause("A"), Run("B", history.Read), Resume("A"),
				Run("A", history.Done), Run("B", history.Done),
			},
			// Tokens of writes alone never go backwards here, and an accepted entry is lost all the same: the successor's
			// first touch must raise the fence, not its first write.
			Expect: map[history.Fencing]history.Verdict{
				history.FencingOff:    history.Violated,
				history.FencingWrites: history.Violated,
				history.FencingOn:     history.Safe,
			},
		},
		{
			Name:    "ResourceCrash",
			Hazard:  "The resource is killed and restarted between the successor's write and the stale holder's.",
			Workers: map[string]Worker{"A": {Victim: true}},
			Steps: []Step{
				Run("A", history.Read), Pause("A"), Run("B", history.Done), Kill(Resource), Restart(),
				Resume("A"), Run("A", history.Done),
			},
			Expect: expect,
		},
		{
			Name:    "ReleaseGetThenDel",
			Hazard:  "A release by GET and DEL deletes the successor's lock, so that a third worker gets in beside it.",
			Locks:   []string{"redis"},
			Workers: map[string]Worker{"A": {Victim: true, GetThenDel: true}},
			MinTTL:  alive,
			Steps: []Step{
				Run("A", history.ReleaseGap), Pause("A"), Run("B", history.Read), Resume("A"), Run("A", history.Done),
				Run("C", history.Done), Run("B", history.Done),
			},
			Expect: expect,
		},
		{
			Name:    "ReleaseCompareAndDelete",
			Hazard:  "The same late release as one script leaves the successor's lock alone, and the third worker waits.",
			Workers: map[string]Worker{"A": {Victim: true}, "C": {Try: true}},
			Steps: []Step{
				Run("A", history.Wrote), Pause("A"), Run("B", history.Read), Resume("A"), Run("A", history.Done),
				Run("C", history.Held), Run("B", history.Done), Run("C", history.Done),
			},
			Expect: map[history.Fencing]history.Verdict{
				history.FencingOff: history.Safe,
				history.FencingOn:  history.Safe,
			},
		},
		{
			Name:    "HolderKilled",
			Hazard:  "The holder is killed, and its lock stays until the lease has run out.",
			Workers: map[string]Worker{"A": {Victim: true}},
			Steps:   []Step{Run("A", history.Read), Kill("A"), Run("B", history.Done)},
			Expect: map[history.Fencing]history.Verdict{
				history.FencingOff: history.Safe, // a dead process writes nothing
				history.FencingOn:  history.Safe,
			},
		},
		{
			Name:    "WorkExceedsTTL",
			Hazard:  "The holder never stops and doesn't renew: its work takes longer than its lease.",
			Workers: map[string]Worker{"A": {Victim: true, NoRenew: true, Outlive: true}},
			Steps:   []Step{Run("A", history.Lost), Run("B", history.Done), Run("A", history.Done)},
			Expect:  expect,
		},
		{
			Name:    "WedgedHolder",
			Hazard:  "The holder hangs in its work while its renewals go on, until they are stopped, and then writes.",
			Workers: map[string]Worker{"A": {Victim: true, MaxHold: wedgedFor}},
			MinTTL:  alive,
			Steps:   []Step{Run("A", history.Read), Run("B", history.Done), Run("A", history.Done)},
			Expect:  expect,
		},
		{
			Name:    "HolderPartitioned",
			Hazard:  "The holder is cut off from the lock service, and not from the resource, and writes after its lease has ended.",
			Workers: map[string]Worker{"A": {Victim: true, Outlive: true}},
			Steps: []Step{
				Run("A", history.Read), Cut("A"), Run("A", history.Lost), Run("B", history.Done), Mend("A"), Run("A", history.Done),
			},
			Expect: expect,
		},
		{
			Name:    "TwoResources",
			Hazard:  "The holder writes to two resources, and is frozen longer than its TTL between the two.",
			Workers: map[string]Worker{"A": {Victim: true, Second: true}, "B": {Second: true}},
			Steps: []Step{
				Run("A", history.Wrote), Run("A", history.Read), Pause("A"), Run("B", history.Done), Resume("A"), Run("A", history.Done),
			},
			Expect: expect, // of each by itself; that A's work is half done is for the successor to see
		},
		{
			Name:    "SecondResourceUntouched",
			Hazard:  "The same, and the successor touches the first resource only.",
			Workers: map[string]Worker{"A": {Victim: true, Second: true}},
			Steps: []Step{
				Run("A", history.Wrote), Run("A", history.Read), Pause("A"), Run("B", history.Done), Resume("A"), Run("A", history.Done),
			},
			// The second resource has seen no later token, so it takes the stale holder's write, and nothing is lost there.
			Expect: map[history.Fencing]history.Verdict{
				history.FencingOff: history.Safe,
				history.FencingOn:  history.Safe,
			},
		},
	}
}

// redlockHazards are about a lock on five independent Redis nodes, redis1 to redis5.
func redlockHazards() []Scenario {
	only := []string{"redlock"}
	// A gets the lock of the first three nodes, because it can't reach the others.
	first := func(worker string) Step { return Refuse(worker, "redis4", "redis5") }
	last := func(worker string) Step { return Refuse(worker, "redis1", "redis2") }
	// A server's clock jumps over the lease of a holder that is alive.
	after := func(server string) Step {
		return Step{Op: OpFault, Target: server, Fault: history.FaultJump, Detail: (longTTL + time.Minute).String()}
	}
	monotonic := []Step{
		Refuse("U", "redis4", "redis5"), Run("U", history.Done),
		Refuse("V", "redis2", "redis3"), Run("V", history.Done),
		Refuse("W", "redis3", "redis5"), Run("W", history.Done),
		Refuse("A", "redis2", "redis4"), Run("A", history.Read), after(LockService),
		Refuse("B", "redis1", "redis5"), Run("B", history.Done),
		Run("A", history.Done),
	}
	idle := map[string]Worker{"U": {Idle: true}, "V": {Idle: true}, "W": {Idle: true}}
	return []Scenario{
		{
			Name:    "RedlockPartition",
			Hazard:  "The holder of a majority is cut off from it, and writes after its lease has ended.",
			Locks:   only,
			Workers: map[string]Worker{"A": {Victim: true, Outlive: true}},
			Steps: []Step{
				first("A"), Run("A", history.Read), Cut("A", "redis1", "redis2", "redis3"), Run("A", history.Lost),
				Run("B", history.Done), Mend("A"), Run("A", history.Done),
			},
			Expect: expect,
		},
		{
			Name:   "RedlockClockJump",
			Hazard: "The clock of one node jumps forward, and the node gives away the lock of a holder that is alive and in time.",
			Locks:  only,
			Steps: []Step{
				first("A"), Run("A", history.Read),
				after("redis3"), Run("B", history.Done), Run("A", history.Done),
			},
			Expect: expect,
		},
		{
			Name:       "RedlockNodeRestart",
			Hazard:     "A node comes back without its data and votes again, so that there are two holders, with one token.",
			Locks:      only,
			TokensLost: true,
			Steps: []Step{
				first("A"), Run("A", history.Read), Fault("redis3", history.FaultWipe),
				last("B"), Run("B", history.Done), Run("A", history.Done),
			},
			Expect: expect, // of two equal tokens the first to write wins; a resource that lets equals pass would lose it
		},
		{
			Name:       "RedlockNodeRestartOvertakes",
			Hazard:     "The same after an earlier grant, so that the second holder's token is smaller than the first's.",
			Locks:      only,
			TokensLost: true,
			Workers:    map[string]Worker{"W": {Idle: true}},
			Steps: []Step{
				first("W"), Run("W", history.Done), first("A"), Run("A", history.Read), Fault("redis3", history.FaultWipe),
				last("B"), Run("B", history.Done), Run("A", history.Done),
			},
			Expect: backwards,
		},
		{
			Name:       "RedlockCountersNotMonotonic",
			Hazard:     "The token is the greatest of a majority's own counters, and a later majority's counters are behind.",
			Locks:      only,
			Variant:    VariantCounters,
			TokensLost: true,
			Workers:    idle,
			Steps:      monotonic,
			Expect:     backwards,
		},
		{
			Name:    "RedlockTokensMonotonic",
			Hazard:  "The same majorities, where the token is read from a majority and written to one before it counts.",
			Locks:   only,
			Workers: idle,
			Steps:   monotonic,
			Expect:  expect,
		},
	}
}

// tokenHazards are about locks that lose their source of tokens.
func tokenHazards() []Scenario {
	// W's token is the first, A's the second, and B's is what is left. A's lease is a long one: the fault takes it away,
	// and not time.
	lost := func(name, hazard, fault string) Scenario {
		return Scenario{
			Name: name, Hazard: hazard, Locks: []string{"redis"}, TokensLost: true,
			Workers: map[string]Worker{"W": {Idle: true}},
			Steps: []Step{
				Run("W", history.Done), Run("A", history.Read), Pause("A"), Fault("redis", fault), Run("B", history.Done),
				Resume("A"), Run("A", history.Done),
			},
			Expect: backwards,
		}
	}
	return []Scenario{
		lost("FenceCounterFlushed", "FLUSHALL deletes the lock and its counter.", history.FaultFlush),
		lost("FenceCounterWiped", "Redis is restarted without persistence, and the counter starts again.", history.FaultWipe),
		lost("FenceCounterEvicted", "Redis runs out of memory and evicts the counter, which has no TTL to spare it.", history.FaultEvict),
		{
			Name:       "FailoverReissuesToken",
			Hazard:     "Redis fails over to a replica that lags by one grant, which hands out the holder's token again.",
			Locks:      []string{"redis"},
			TokensLost: true,
			Workers:    map[string]Worker{"W": {Idle: true}},
			Steps: []Step{
				Run("W", history.Done), Fault("redis", history.FaultLag), Run("A", history.Read), Pause("A"),
				Fault("redis", history.FaultFailover), Run("B", history.Done), Resume("A"), Run("A", history.Done),
			},
			Expect: expect,
		},
		{
			Name:       "FailoverOvertakesToken",
			Hazard:     "Redis fails over to a replica that lags by two grants, so that the successor's token is the smaller one.",
			Locks:      []string{"redis"},
			TokensLost: true,
			Workers:    map[string]Worker{"W": {Idle: true}, "X": {Idle: true}},
			Steps: []Step{
				Run("W", history.Done), Fault("redis", history.FaultLag), Run("X", history.Done), Run("A", history.Read), Pause("A"),
				Fault("redis", history.FaultFailover), Run("B", history.Done), Resume("A"), Run("A", history.Done),
			},
			Expect: backwards,
		},
	}
}

// serverHazards are about faults of one kind of server.
func serverHazards() []Scenario {
	// A's lock outlives the fault, and its token stays below B's.
	leader := func(name, hazard string, before, after Step, in ...string) Scenario {
		return Scenario{
			Name: name, Hazard: hazard, Locks: in, Workers: map[string]Worker{"A": {Victim: true}},
			Steps: []Step{
				Run("A", history.Read), Pause("A"), before, Run("B", history.Done), after, Resume("A"), Run("A", history.Done),
			},
			Expect: map[history.Fencing]history.Verdict{history.FencingOff: history.Violated, history.FencingOn: history.Safe},
		}
	}
	restore := func(name, hazard, detail string, lost bool, want map[history.Fencing]history.Verdict) Scenario {
		return Scenario{
			Name: name, Hazard: hazard, Locks: []string{"etcd"}, TokensLost: lost,
			Workers: map[string]Worker{"W": {Idle: true}, "X": {Idle: true}},
			Steps: []Step{
				Run("W", history.Done), Fault("etcd1", history.FaultSnapshot), Run("X", history.Done), Run("A", history.Read),
				Pause("A"),
				{Op: OpFault, Target: "etcd1", Fault: history.FaultRestore, Detail: detail},
				Run("B", history.Done), Resume("A"), Run("A", history.Done),
			},
			Expect: want,
		}
	}
	return []Scenario{
		leader("LeaderKilled", "The leader of the lock's cluster is killed while the holder is frozen.",
			Fault(Leader, history.FaultKill), Fault(Leader, history.FaultRestart), "etcd", "zookeeper"),
		leader("LeaderFrozen", "The leader of the lock's cluster is frozen with the holder, and wakes up in a cluster with another leader.",
			// Not ZooKeeper: go-zookeeper waits for more than six session timeouts for a server that is there and silent.
			Fault(Leader, history.FaultPause), Fault(Leader, history.FaultResume), "etcd"),
		leader("LeaderIsolated", "The leader of the lock's cluster is cut off from its peers while clients still reach it.",
			Fault(Leader, history.FaultIsolate), Fault(Leader, history.FaultRejoin), "etcd", "zookeeper"),
		restore("EtcdSnapshotRestore", "etcd is restored from a snapshot, and its revision goes back behind the holder's token.", "",
			true, backwards),
		restore("EtcdSnapshotRestoreBumped", "etcd is restored with its revision raised above all that were given out.", "bumped",
			false, expect),
		{
			Name:    "ZooKeeperSequenceResets",
			Hazard:  "The parent of a lock that nobody uses is deleted, and the numbers of its children start again.",
			Locks:   []string{"zookeeper"},
			Workers: map[string]Worker{"W": {Idle: true}, "A": {Victim: true}},
			Steps: []Step{
				Run("W", history.Done), Fault("zk1", history.FaultReap), Run("A", history.Read), Pause("A"),
				Run("B", history.Done), Resume("A"), Run("A", history.Done),
			},
			Expect: expect,
		},
	}
}

// Hazard returns the hazard of that name.
func Hazard(name string) (Scenario, bool) {
	for _, s := range Hazards() {
		if s.Name == name {
			return s, true
		}
	}
	return Scenario{}, false
}
