package servercost

import (
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
)

// TestSet is a golden test: a second run with a seed must find the locks of the first.
func TestSet(t *testing.T) {
	require.Equal(t, dlock.Request{Key: "gen/783825822a6f9e62", Owner: "da2190e8-28e4-49d2-976e-5977e3a0b362", TTL: time.Hour}, Set{Seed: 1, TTL: time.Hour}.Request(0))
}

func TestShort(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 7: "7", 999: "999", 999.6: "1k", 1250: "1.25k", 99_949: "99.9k", 999_400: "999k", 999_900: "1M",
		1e7: "10M", 2.68e9: "2.68G", 5e12: "5e+03G",
	} {
		require.Equal(t, want, Short(v), v)
	}
}

func TestParseInfo(t *testing.T) {
	info := map[string]map[string]string{
		"Memory":   {"used_memory": "100", "used_memory_rss": "150", "mem_fragmentation_ratio": "1.50"},
		"Stats":    {"expired_keys": "3"},
		"Keyspace": {"db0": "keys=5,expires=2,avg_ttl=0", "db3": "keys=10,expires=1,avg_ttl=7"},
	}
	s, err := parseInfo(info)
	require.NoError(t, err)
	require.Equal(t, RedisSample{
		UsedMemory: 100, UsedMemoryRSS: 150, Fragmentation: 1.5, Keys: 15, Expires: 3, ExpiredKeys: 3,
	}, s)
	info["Keyspace"]["db3"] = "keys=x"
	_, err = parseInfo(info)
	require.ErrorContains(t, err, "INFO says db3:keys=x")
	for _, section := range []string{"Memory", "Stats"} {
		for field, was := range info[section] {
			delete(info[section], field)
			_, err := parseInfo(info)
			require.ErrorContains(t, err, field)
			info[section][field] = was
		}
	}
}

func TestParseMetrics(t *testing.T) {
	const page = `# TYPE etcd_debugging_mvcc_current_revision gauge
etcd_debugging_mvcc_current_revision 7
# TYPE etcd_debugging_mvcc_keys_total gauge
etcd_debugging_mvcc_keys_total 6
# TYPE etcd_mvcc_db_total_size_in_bytes gauge
etcd_mvcc_db_total_size_in_bytes 2.048e+04
# TYPE etcd_mvcc_db_total_size_in_use_in_bytes gauge
etcd_mvcc_db_total_size_in_use_in_bytes 16384
# TYPE process_resident_memory_bytes gauge
process_resident_memory_bytes 3e7
# TYPE etcd_debugging_lease_granted_total counter
etcd_debugging_lease_granted_total 5
# TYPE etcd_debugging_lease_revoked_total counter
etcd_debugging_lease_revoked_total 4
`
	s, err := parseMetrics(strings.NewReader(page))
	require.NoError(t, err)
	require.Equal(t, EtcdSample{
		Revision: 7, Keys: 6, DBSize: 20480, DBSizeInUse: 16384, RSS: 30_000_000, LeasesGranted: 5, LeasesRevoked: 4,
	}, s)
	_, err = parseMetrics(strings.NewReader(strings.ReplaceAll(page, "keys_total", "keys_gone")))
	require.ErrorContains(t, err, "/metrics of etcd has no etcd_debugging_mvcc_keys_total")
	_, err = parseMetrics(strings.NewReader("<html>"))
	require.ErrorContains(t, err, "/metrics of etcd")
}
