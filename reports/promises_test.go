package reports_test

import (
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/jsonl"
	"github.com/fencelab/fencelab/scenarios/promises"
)

// notes are the page's comments on each broken promise: whether it was ever promised, and where it is known.
var notes = map[string]map[string]string{
	"rueidislock": {
		"ServerErrors": "the release returns nothing and isn't repeated, so the lock stays held for the rest of its lease; `WithContext` tries again only " +
			"once Redis says that the lock has changed. No report known",
		"LeaseLasts": "its README: the context is \"canceled automatically and immediately once the `KeyMajority` is not held anymore\". An extension " +
			"without a reply is waited for until the end that it would have set",
		"ClockSkew": "never promised: its README documents `SET NX PXAT`, and so a time of the client's clock. `FallbackSETPX` acquires with `PX`; " +
			"extensions stay absolute (`PEXPIREAT`)",
		"EveryMessage": "the client sends the script with `SET NX` again (`NewLuaScriptRetryable`), which then finds what it has set, and leaves it. " +
			"No report known",
	},
	"etcd-mutex": {
		"LeaseLasts": "`Session.Done` is closed when a TTL has passed since the last reply arrived (before the first: 5 s, or `DialTimeout` and 1 s), " +
			"checked once a second; no time is promised",
		"DataLoss": "a waiter watches only the key ahead of it, from a revision that the emptied server hasn't reached, and not its own session: " +
			"[etcd-io/etcd#22387](https://github.com/etcd-io/etcd/pull/22387), open, ends waits whose session has expired",
		"KeysIndependent": "waiters on `k` wait for all older keys below `k/`: [etcd-io/website#710](https://github.com/etcd-io/website/issues/710), " +
			"closed as a question of use",
		"WaitersCutOff": "`Lock` deletes its key with the client's context, not the caller's: " +
			"[etcd-io/etcd#18082](https://github.com/etcd-io/etcd/issues/18082), closed as stale",
	},
	"redsync-5": {"DataLoss": nodeForgets},
	"redlock":   {"DataLoss": nodeForgets},
	"consul-api": {
		"LeaseRenewed":    "for the same reason",
		"LeaseLasts":      "[hashicorp/consul#18271](https://github.com/hashicorp/consul/issues/18271), open",
		"KeysIndependent": "a path with `//` is redirected to one with `/`: [hashicorp/consul#15933](https://github.com/hashicorp/consul/issues/15933), open",
		"WaitersCutOff":   consulCalls,
		"EndsWithContext": consulCalls,
	},
	"dynamolock": {
		"KeysIndependent": "DynamoDB's strings are UTF-8: other bytes of a key are replaced. Never promised",
		"WaiterServed":    "the release's condition names the record's version, which a renewal without a reply has changed. No report known",
		"LeaseLasts":      dynamolockMonitor,
		"LeaseRenewed": "[cirello-io/dynamolock#280](https://github.com/cirello-io/dynamolock/issues/280): the next renewal has the old version number. No " +
			"report known: the release of an expired `Lock` takes its successor off the client's list of renewals",
		"EveryMessage": "the AWS SDK sends `PutItem` again, whose condition then finds the item that the first has put. No report known",
	},
	"go-zookeeper": {
		"EveryMessage": "`Lock` returns an error, and the node that it has created stays until the session ends: " +
			"[samuel/go-zookeeper#229](https://github.com/samuel/go-zookeeper/issues/229), open",
		"NothingLeft": "never promised: `Lock` takes no context, so that an abandoned wait goes on until it is granted the lock",
	},
	"leader-election": {
		"LeaseLasts": "never promised: \"This implementation does not guarantee that only one client is acting as a leader\". With `ReleaseOnCancel` an " +
			"elector that can no longer renew first tries to release the lease, and only then ends its context and calls `OnStoppedLeading`: with the " +
			"defaults, 22 s after the last renewal of a lease of 15 s (17 s with the `Timeout` that `NewFromKubeconfig` sets). " +
			"[kubernetes#139991](https://github.com/kubernetes/kubernetes/pull/139991), open, is about the same order",
		"OddTTLs": "the record holds whole seconds, rounded down, and others go by the record. No report known",
	},
}

const nodeForgets = "of Redlock, not of a library: a server that restarts without its data votes for a second holder " +
	"([RedlockNodeRestart](../matrix)), unless it stays away for a TTL, or writes each change to its disk"

const dynamolockMonitor = "the session monitor waits for a renewal under way, and doesn't call once the lease has ended: " +
	"[cirello-io/dynamolock#446](https://github.com/cirello-io/dynamolock/issues/446), closed as a question"

const consulCalls = "never promised: `Unlock` takes no context, and the channel of `Lock` ends the wait, but no request under way"

// In the order of the tables.
var (
	others = []string{"bsm/redislock", "redsync", "redsync-5", "rueidislock", "etcd-mutex", "consul-api", "go-zookeeper", "leader-election", "dynamolock"}
	ours   = []string{"redis", "redis-spin", "redlock", "etcd", "zookeeper", "consul", "postgres", "s3"}
)

// TestPromisesTable checks the page against the recorded reports. Each broken promise has a note, and no other.
func TestPromisesTable(t *testing.T) {
	const dir = "results/competitors/"
	f, err := os.Open(dir + "reports.jsonl")
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	all, err := jsonl.Decode[promises.Report](f, false)
	require.NoError(t, err)
	byLock := map[string][]promises.Report{}
	for _, r := range all {
		byLock[r.Lock] = append(byLock[r.Lock], r)
	}
	require.ElementsMatch(t, slices.Concat(others, ours), slices.Collect(maps.Keys(byLock)))

	page := dir + "README.md"
	region(t, page, "table: versions", versions(byLock))
	region(t, page, "table: others", kept(t, byLock, others))
	region(t, page, "table: ours", kept(t, byLock, ours))
	region(t, page, "table: broken", broken(t, byLock))
	region(t, page, "table: facts", facts(byLock))
}

// facts lists each observation about kept promises once, with its locks.
func facts(byLock map[string][]promises.Report) string {
	var all []string
	by := map[string][]string{}
	for _, lock := range slices.Concat(others, ours) {
		for _, r := range byLock[lock] {
			for _, row := range r.Rows {
				if row.Verdict != promises.Kept || row.Why == "" {
					continue
				}
				fact := number.ReplaceAllString(row.Why, "$1 N")
				if !slices.Contains(by[fact], lock) {
					by[fact] = append(by[fact], lock)
				}
				if !slices.Contains(all, fact) {
					all = append(all, fact)
				}
			}
		}
	}
	rows := make([]string, len(all))
	for i, fact := range all {
		rows[i] = fact + " | " + strings.Join(by[fact], ", ")
	}
	return table("what breaks no promise | locks", rows...)
}

// number matches numbers that differ from run to run.
var number = regexp.MustCompile(`(token was|one before|number) \d+`)

func versions(byLock map[string][]promises.Report) string {
	var rows []string
	for _, lock := range others {
		runs := byLock[lock]
		r := runs[0]
		rows = append(rows, fmt.Sprintf("%s | %s | %s | %s | %d on %s", lock, r.Module, strings.TrimPrefix(r.Server, lock+" on "), r.TTL, len(runs), r.Time.Format("2006-01-02")))
	}
	return table("lock | library | server | TTL | runs", rows...)
}

// verdicts counts each verdict; why is from the first run that broke the promise.
func verdicts(runs []promises.Report, promise int) (n map[promises.Verdict]int, why string) {
	n = map[promises.Verdict]int{}
	for _, r := range runs {
		row := r.Rows[promise]
		n[row.Verdict]++
		if why == "" && row.Verdict == promises.Broken {
			why = row.Why
		}
	}
	return n, why
}

func kept(t *testing.T, byLock map[string][]promises.Report, locks []string) string {
	t.Helper()
	var rows []string
	for i, p := range byLock[locks[0]][0].Rows {
		row := []string{fmt.Sprintf("**%s**: %s", p.Promise, p.Text)}
		for _, lock := range locks {
			runs := byLock[lock]
			require.Equal(t, p.Promise, runs[0].Rows[i].Promise, lock)
			n, _ := verdicts(runs, i)
			switch {
			case n[promises.Broken] > 0:
				row = append(row, fmt.Sprintf("**✕** %d of %d", n[promises.Broken], len(runs)))
			case n[promises.Kept] == len(runs):
				row = append(row, "✓")
			case n[promises.Kept] > 0:
				row = append(row, fmt.Sprintf("✓ %d of %d", n[promises.Kept], len(runs)))
			default:
				row = append(row, "–")
			}
		}
		rows = append(rows, strings.Join(row, " | "))
	}
	return table("| "+strings.Join(locks, " | "), rows...)
}

var key = regexp.MustCompile(`promises-[0-9a-f-]{36}`)

func broken(t *testing.T, byLock map[string][]promises.Report) string {
	t.Helper()
	var rows []string
	for _, lock := range slices.Concat(others, ours) {
		noted := maps.Clone(notes[lock])
		for i, row := range byLock[lock][0].Rows {
			n, why := verdicts(byLock[lock], i)
			if n[promises.Broken] == 0 {
				continue
			}
			require.NotEmpty(t, noted[row.Promise], "%s breaks %s, and the page has no note on it: %s", lock, row.Promise, why)
			rows = append(rows, fmt.Sprintf("%s | %s | %s | %s", lock, row.Promise, strings.NewReplacer("|", "\\|", "\n", "; ").Replace(key.ReplaceAllString(why, "k")), noted[row.Promise]))
			delete(noted, row.Promise)
		}
		require.Empty(t, noted, "%s: notes on promises that it keeps", lock)
	}
	return table("lock | breaks | what the first such run saw | promised? known?", rows...)
}
