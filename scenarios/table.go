package scenarios

import (
	"time"

	"github.com/fencelab/fencelab/scenarios/history"
)

// alive is the lease of a victim that must still hold it when the fault hits.
const alive = history.Duration(time.Second)

// expect is the usual verdict: whoever relies on the lock alone loses data, whoever fences doesn't.
var expect = map[history.Fencing]history.Verdict{
	history.FencingOff:    history.Violated,
	history.FencingWrites: history.Safe,
	history.FencingOn:     history.Safe,
}

// Hazards are the ways in which a lock fails, in the order in which they are best read.
func Hazards() []Scenario {
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
				Run("A", history.Read), Pause("A"), Run("B", history.Done), Kill(), Restart(),
				Resume("A"), Run("A", history.Done),
			},
			Expect: expect,
		},
		{
			Name:    "ReleaseGetThenDel",
			Hazard:  "A release by GET and DEL deletes the successor's lock, so that a third worker gets in beside it.",
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
