package fill_test

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/fill"
)

func TestBar(t *testing.T) {
	var out bytes.Buffer
	bar := fill.NewBar(&out, 10_000_000)
	require.NoError(t, bar.ShowAt(10*time.Second, 1_000_000, "so far"))
	require.NoError(t, bar.ShowAt(11*time.Second, 1_200_000, ""))
	require.NoError(t, bar.ShowAt(50*time.Second, 10_000_000, "done"))
	require.NoError(t, bar.End())
	require.Equal(t, ` 10.0 %  1M of 10M  100k/s  ETA 1m30s  so far
 12.0 %  1.2M of 10M  200k/s  ETA 1m21s
100.0 %  10M of 10M  226k/s  done
`, out.String())

	out.Reset()
	bar = fill.NewBar(&out, 4)
	bar.OnTerminal()
	require.NoError(t, bar.ShowAt(time.Second, 1, "a long line"))
	require.NoError(t, bar.ShowAt(2*time.Second, 4, ""))
	require.NoError(t, bar.End())
	require.Equal(t, "\r\x1b[J[=====               ]  25.0 %  1 of 4  1/s  ETA 3s  a long line"+
		"\r\x1b[J[====================] 100.0 %  4 of 4  3/s\n", out.String())

	out.Reset()
	bar = fill.NewBar(&out, 10_000_000)
	bar.OnTerminal()
	const sample = "used 49.5MB, RSS 66MB (1.35)  373k keys, 187k with a TTL  expired 0 (stale 0 %)  ping 8.418ms, max 15.284ms"
	require.NoError(t, bar.ShowAt(time.Second, 1_000_000, sample))
	require.NoError(t, bar.ShowAt(10*time.Second, 10_000_000, sample))
	require.NoError(t, bar.End())
	require.Equal(t, "\r\x1b[J[==                  ]  10.0 %  1M of 10M  1M/s  ETA 9s\n"+
		"used 49.5MB, RSS 66MB (1.35)  373k keys, 187k with a TTL  expired 0 (stale 0 %)\n"+
		"ping 8.418ms, max 15.284ms"+
		"\r\x1b[2A\x1b[J[====================] 100.0 %  10M of 10M  1M/s  used 49.5MB, RSS 66MB (1.35)\n"+
		"373k keys, 187k with a TTL  expired 0 (stale 0 %)  ping 8.418ms, max 15.284ms\n", out.String())
}

func TestShort(t *testing.T) {
	for v, want := range map[float64]string{
		0: "0", 7: "7", 999: "999", 999.6: "1k", 1250: "1.25k", 99_949: "99.9k", 999_400: "999k", 999_900: "1M",
		1e7: "10M", 2.68e9: "2.68G", 5e12: "5e+03G",
	} {
		require.Equal(t, want, fill.Short(v), v)
	}
}

func TestParseInfo(t *testing.T) {
	const info = "# Memory\r\nused_memory:100\r\nused_memory_rss:150\r\nmem_fragmentation_ratio:1.50\r\n# Stats\r\nexpired_keys:3\r\n" +
		"expired_stale_perc:12.50\r\n# Keyspace\r\ndb0:keys=5,expires=2,avg_ttl=0\r\ndb3:keys=10,expires=1,avg_ttl=7\r\n"
	s, err := fill.ParseInfo(info)
	require.NoError(t, err)
	require.Equal(t, fill.RedisSample{
		UsedMemory: 100, UsedMemoryRSS: 150, Fragmentation: 1.5, Keys: 15, Expires: 3, ExpiredKeys: 3, ExpiredStalePerc: 12.5,
	}, s)
	for _, field := range []string{"used_memory", "used_memory_rss", "mem_fragmentation_ratio", "expired_keys", "expired_stale_perc"} {
		_, err := fill.ParseInfo(strings.Replace(info, "\n"+field+":", "\nx:", 1))
		require.ErrorContains(t, err, field)
	}
	_, err = fill.ParseInfo(strings.Replace(info, "keys=10", "keys=x", 1))
	require.ErrorContains(t, err, "INFO says db3:x, which is no number")
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
# TYPE etcd_server_proposals_committed_total gauge
etcd_server_proposals_committed_total 30
# TYPE etcd_disk_wal_fsync_duration_seconds histogram
etcd_disk_wal_fsync_duration_seconds_bucket{le="+Inf"} 20
etcd_disk_wal_fsync_duration_seconds_sum 0.5
etcd_disk_wal_fsync_duration_seconds_count 20
`
	s, err := fill.ParseMetrics(strings.NewReader(page))
	require.NoError(t, err)
	require.Equal(t, fill.EtcdSample{
		Revision: 7, Keys: 6, DBSize: 20480, DBSizeInUse: 16384, RSS: 30_000_000, LeasesGranted: 5, LeasesRevoked: 4,
		Proposals: 30, Syncs: 20,
	}, s)
	_, err = fill.ParseMetrics(strings.NewReader(strings.ReplaceAll(page, "keys_total", "keys_gone")))
	require.ErrorContains(t, err, "/metrics of etcd has no etcd_debugging_mvcc_keys_total")
	_, err = fill.ParseMetrics(strings.NewReader("<html>"))
	require.ErrorContains(t, err, "/metrics of etcd")
}
