package reports_test

import (
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/bench/servercost"
)

const (
	keysDir  = "results/ten-million-keys/"
	costsDir = "results/token-costs/"
)

func serverCosts(t *testing.T, dir string) []servercost.Line {
	t.Helper()
	f, err := os.Open(dir + "data.jsonl")
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	lines, err := servercost.Decode(f)
	require.NoError(t, err)
	config, err := servercost.Load(dir)
	require.NoError(t, err)
	require.Equal(t, config, lines[0].Setup.Config, "the config has changed: record it again")
	return lines
}

func machine(lines []servercost.Line) string {
	s := lines[0].Setup
	return fmt.Sprintf("Recorded %s on %d cores (%s/%s, %s), on which other work went on, with %s.\n",
		s.Start.Format(time.DateOnly), s.Cores, s.OS, s.Arch, s.Go, strings.Join(s.Servers, ", "))
}

func table(head string, rows ...string) string {
	n := strings.Count(head, "|") + 1
	return "| " + head + " |\n|" + strings.Repeat(" --- |", n) + "\n| " + strings.Join(rows, " |\n| ") + " |\n"
}

func size(n uint64) string { return servercost.Short(n) + "B" }

func perSecond(l servercost.Line) string {
	if l.Count == 0 {
		return ""
	}
	return servercost.Short(float64(l.Count) / l.Seconds)
}

func redisPhases(lines []servercost.Line, run string) string {
	var rows []string
	for _, l := range lines {
		if l.Kind == servercost.KindPhase && l.Run == run {
			s := l.Redis
			rows = append(rows, fmt.Sprintf("%s | %.1f s | %s | %s | %s | %.2f | %s | %s | %s | %.1f ms", l.Phase, l.Seconds, perSecond(l),
				size(s.UsedMemory), size(s.UsedMemoryRSS), s.Fragmentation, servercost.Short(s.Keys), servercost.Short(s.Expires),
				servercost.Short(s.ExpiredKeys), float64(s.PingMax)/1e6))
		}
	}
	return table("phase | took | keys/s | `used_memory` | RSS | RSS / used | keys | with a TTL | `expired_keys` | longest PING", rows...)
}

func etcdPhases(lines []servercost.Line, run string) string {
	var rows []string
	for _, l := range lines {
		if l.Kind == servercost.KindPhase && l.Run == run {
			s := l.Etcd
			rows = append(rows, fmt.Sprintf("%s | %.1f s | %s | %d | %d | %d | %s | %s | %s | %.0f ms", l.Phase, l.Seconds, perSecond(l),
				s.Revision, s.Keys, s.LeasesGranted-s.LeasesRevoked, size(s.DBSize), size(s.DBSizeInUse), size(s.RSS), float64(s.PingMax)/1e6))
		}
	}
	return table("phase | took | keys/s | revision | keys | leases | file | in use | RSS | longest read", rows...)
}

func TestTenMillionKeys(t *testing.T) {
	lines := serverCosts(t, keysDir)
	region(t, keysDir+"README.md", "machine", machine(lines))
	for name, run := range map[string]string{"active": "redis active", "lazy": "redis lazy"} {
		region(t, keysDir+"README.md", "table: "+name, redisPhases(lines, run))
	}
	for name, run := range map[string]string{"shared": "etcd shared", "leases": "etcd leases"} {
		region(t, keysDir+"README.md", "table: "+name, etcdPhases(lines, run))
	}

	c := lines[0].Setup.Config
	n := float64(c.Redis.Keys)
	require.EqualValues(t, 10_000_000, c.Redis.Keys, "the page speaks of ten million")
	active, lazy := servercost.Phases(lines, "redis active"), servercost.Phases(lines, "redis lazy")
	used := func(l servercost.Line) float64 { return float64(l.Redis.UsedMemory) }
	peak := 0.0 // with active expiry, while it was populated
	for _, l := range lines {
		if l.Run == "redis active" && l.Phase == "fill" {
			peak = max(peak, used(l))
		}
	}
	stale := used(lazy["expire"]) - used(lazy["purge"])
	counters := used(active["purge"]) - used(active["empty"])
	left := used(active["purge2"]) - used(active["empty"])
	region(t, keysDir+"README.md", "table: bytes", table("what | bytes | a key",
		fmt.Sprintf("locks and counters, none of them deleted | %s | %.0f", size(uint64(used(lazy["fill"]))), used(lazy["fill"])/n),
		fmt.Sprintf("of them locks whose lease is over, and which nobody has asked for | %s | %.0f", size(uint64(stale)), stale/n),
		fmt.Sprintf("counters | %s | %.0f", size(uint64(counters)), counters/n),
		fmt.Sprintf("left when the counters are reaped | %s | %.1f", size(uint64(left)), left/n),
		fmt.Sprintf("the most while the server expired keys by itself, filling | %s | %.0f", size(uint64(peak)), peak/n)))

	require.Zero(t, active["drain"].Redis.Expires)
	require.Equal(t, c.Redis.Keys, active["drain"].Redis.Keys, "a counter for each key")
	require.Equal(t, c.Redis.Keys, active["reap"].Count)
	require.InDelta(t, active["use"].Values["greatest"]+1, active["reuse"].Values["greatest"], 0, "tokens go on after the reaping")
	require.InDelta(t, c.Redis.Check, lazy["touch"].Values["second_token"], 0, "expired locks are granted again")
	require.Greater(t, stale, used(lazy["expire"])/2, "more than half of used_memory is what nobody holds")
	require.InDelta(t, used(lazy["fill"]), used(lazy["expire"]), used(lazy["fill"])/100, "and used_memory doesn't tell")
	require.Less(t, peak, used(lazy["fill"]), "active expiry keeps it lower")
	require.Less(t, left, counters/10, "reaping gives back more than nine tenths of what counters take")
	require.Greater(t, lazy["reclaim"].Redis.Fragmentation, 1.5, "RSS stays when keys go")

	shared, leases := servercost.Phases(lines, "etcd shared"), servercost.Phases(lines, "etcd leases")
	require.Greater(t, shared["release"].Etcd.DBSize, shared["fill"].Etcd.DBSize, "a release makes the file larger")
	require.GreaterOrEqual(t, shared["compact"].Etcd.DBSize, shared["release"].Etcd.DBSize, "compaction leaves the file as large as it was")
	require.Less(t, shared["compact"].Etcd.DBSizeInUse, shared["release"].Etcd.DBSizeInUse/10, "and frees what is in it")
	require.Less(t, shared["defrag"].Etcd.DBSize, shared["release"].Etcd.DBSize/10, "nine tenths of the file were history")
	v := leases["expire"].Values
	rate := float64(leases["expire"].Count) / v["expiring"]
	require.LessOrEqual(t, rate, 1050.0, "etcd ends no more than 1000 leases a second")
	made := float64(leases["fill"].Count) / leases["fill"].Seconds
	region(t, keysDir+"README.md", "table: rates", table("a second | locks on one lease | locks with a lease each",
		fmt.Sprintf("made | %s | %s", perSecond(shared["fill"]), servercost.Short(made)),
		fmt.Sprintf("ended | %s, released | %s, expired", perSecond(shared["release"]), servercost.Short(rate))))
	each := func(l, empty servercost.Line) float64 {
		return (float64(l.Etcd.DBSize) - float64(empty.Etcd.DBSize)) / float64(l.Count)
	}
	sharedEnded, leasesEnded := each(shared["release"], shared["empty"]), each(leases["expire"], leases["empty"])
	fit := func(quota, bytes float64) string { return servercost.Short(quota / bytes) }
	const gib = 1 << 30
	region(t, keysDir+"README.md", "table: etcd bytes", table("bytes of the file for each | locks on one lease | locks with a lease each",
		fmt.Sprintf("lock that was made | %.0f | %.0f", each(shared["fill"], shared["empty"]), each(leases["fill"], leases["empty"])),
		fmt.Sprintf("lock that was made and has ended | %.0f | %.0f", sharedEnded, leasesEnded),
		fmt.Sprintf("made and ended until 2 GiB are full, without compaction | %s | %s", fit(2*gib, sharedEnded), fit(2*gib, leasesEnded)),
		fmt.Sprintf("until 8 GiB are full | %s | %s", fit(8*gib, sharedEnded), fit(8*gib, leasesEnded))))
}

func TestTokenCosts(t *testing.T) {
	lines := serverCosts(t, costsDir)
	region(t, costsDir+"README.md", "machine", machine(lines))
	var costs, tokens []string
	p50, rate := map[string]float64{}, map[string]float64{} // by source and servers
	first := 0.0
	for _, l := range lines {
		switch c := l.Cost; l.Kind {
		case servercost.KindCost:
			if len(costs) == 0 {
				first = float64(c.P50)
			}
			p50[fmt.Sprint(c.Source, c.Servers)], rate[fmt.Sprint(c.Source, c.Servers)] = float64(c.P50), c.PerSecond
			costs = append(costs, fmt.Sprintf("%s | %d | %.0f µs | %.2f | %.1f ms | %s", c.Source, c.Servers,
				float64(c.P50)/1e3, float64(c.P50)/first, float64(c.P99)/1e6, servercost.Short(c.PerSecond)))
		case servercost.KindTokens:
			tokens = append(tokens, fmt.Sprintf("%s | %s | %s", l.Tokens.Source, numbers(l.Tokens.A), numbers(l.Tokens.B)))
		}
	}
	region(t, costsDir+"README.md", "table: costs", table("token | servers | median | × the first row | p99 | a second, 64 clients", costs...))
	region(t, costsDir+"README.md", "table: tokens", table("lock | tokens of a | of b", tokens...))
	require.Equal(t, 64, lines[0].Setup.Config.Tokens.Clients)
	const bare, script = "Redis: SET NX PX, a lock without a token1", "Redis: `redislock`, INCR in the script1"
	set, incr, both := p50[bare], p50["Redis: INCR, a token without a lock1"], p50[script]
	require.Less(t, both, set+incr, "the token costs less than a round trip of its own")
	require.Less(t, rate[script], rate[bare], "and the server more than a SET")
	one, three := p50["etcd: Put, a token without a lock1"], p50["etcd: Put, a token without a lock3"]
	require.Greater(t, one, 10*both, "a revision costs an order of magnitude more")
	require.Greater(t, three, one, "and more with a majority")
	require.Less(t, p50["etcd: `etcdlock`, the revision of its key3"], 2*three, "and the lock costs less than a second commit")
}

func numbers(all []uint64) string {
	return strings.Trim(strings.ReplaceAll(fmt.Sprint(all), " ", ", "), "[]")
}
