package reports_test

import (
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/reports/site"
)

func measured(t *testing.T, file string) map[string]map[string]float64 {
	t.Helper()
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	all, err := site.Benchmarks(b)
	require.NoError(t, err, file)
	return all
}

func metric(t *testing.T, all map[string]map[string]float64, name, unit string) float64 {
	t.Helper()
	require.Contains(t, all, name)
	require.Contains(t, all[name], unit, name)
	return all[name][unit]
}

// round rounds x to two significant digits, or to a whole number.
func round(x float64) string {
	digits := 0
	if a := math.Abs(x); a > 0 && a < 10 {
		digits = min(1-int(math.Floor(math.Log10(a))), 3)
	}
	return strconv.FormatFloat(x, 'f', digits, 64)
}

func TestCompareAndSwap(t *testing.T) {
	const dir = "results/compare-and-swap/"
	all := measured(t, dir+"bench.txt")
	get := func(store, load, work, way, unit string) float64 {
		return metric(t, all, fmt.Sprintf("Update/store=%s/%s/work=%s/%s", store, load, work, way), unit)
	}
	const many, sixteen, most = "writers=16/keys=many", "writers=16/keys=one", "writers=128/keys=one"
	ways := []string{"cas", "cas+backoff", "lock"}
	var rows []string
	for _, store := range []string{"redis", "postgres"} {
		for _, load := range []string{many, sixteen, most} {
			for _, work := range []string{"0s", "5ms"} {
				for _, way := range ways {
					writers := strings.NewReplacer("writers=", "", "/keys=", ", ").Replace(load)
					row := []string{store, writers, work, way}
					for _, unit := range []string{"updates/s", "p50-ms", "p99-ms", "max-ms", "tries/update"} {
						row = append(row, round(get(store, load, work, way, unit)))
					}
					rows = append(rows, strings.Join(row, " | "))
				}
			}
		}
		for _, work := range []string{"0s", "5ms"} {
			cas, lock := get(store, many, work, "cas", "updates/s"), get(store, many, work, "lock", "updates/s")
			require.Greater(t, cas, lock, "%s: without conflicts compare-and-swap is the faster one", store)
			require.InDelta(t, 1, get(store, many, work, "cas", "tries/update"), 0.01)
		}
		for _, load := range []string{sixteen, most} {
			for _, work := range []string{"0s", "5ms"} {
				require.InDelta(t, 1, get(store, load, work, "lock", "tries/update"), 0, "a lock's holder works once")
			}
			require.Greater(t, get(store, load, "5ms", "cas", "tries/update"), 5.0, "%s, %s: most of the work is in vain", store, load)
			require.Less(t, get(store, load, "5ms", "cas+backoff", "tries/update"), get(store, load, "5ms", "cas", "tries/update"))
		}
		require.Greater(t, get(store, sixteen, "0s", "cas+backoff", "updates/s"), get(store, sixteen, "0s", "lock", "updates/s"), store)
		for _, way := range []string{"cas", "cas+backoff"} {
			require.Less(t, get(store, sixteen, "5ms", "lock", "p99-ms"), get(store, sixteen, "5ms", way, "p99-ms"),
				"%s: the tail of %s is the longer one", store, way)
			for _, load := range []string{sixteen, most} {
				require.Less(t, get(store, load, "5ms", way, "updates/s"), 200.0, "%s: 5 ms at a time is the ceiling", way)
			}
		}
	}
	region(t, dir+"README.md", "table: updates", table("store | writers, keys | work | way | updates/s | p50 ms | p99 ms | max ms | work done for one update", rows...))
}

func TestStoreCosts(t *testing.T) {
	const dir = "results/store-costs/"
	all := measured(t, dir+"bench.txt")
	var rows []string
	for _, c := range []struct{ store, way, against string }{
		{"memory", "fenced", "unfenced"},
		{"bolt", "fenced", "unfenced"},
		{"http", "fenced", "unfenced"},
		{"redis-memory", "unfenced", "hset"},
		{"redis-memory", "fenced", "hset"},
		{"redis-fsync", "unfenced", "hset"},
		{"redis-fsync", "fenced", "hset"},
		{"postgres", "fenced", "unfenced"},
		{"postgres", "tx-guard", "tx-unfenced"},
		{"postgres", "tx-for-update", "tx-unfenced"},
		{"s3", "fenced", "unfenced"},
		{"dynamodb", "fenced", "unfenced"},
	} {
		get := func(unit string) float64 { return metric(t, all, "FenceCheck/store="+c.store, unit) }
		requests := ""
		if c.store == "s3" || c.store == "dynamodb" {
			require.InDelta(t, 1, get("requests/"+c.way), 0.01, "%s: one request in the common case", c.store)
			requests = round(get("requests/" + c.way))
		}
		require.Less(t, get("+µs/"+c.way), 1000.0, "%s, %s: less than a millisecond more", c.store, c.way)
		rows = append(rows, fmt.Sprintf("%s | %s | %s µs | %s | %s µs | %s %% | %s", c.store, c.against, round(get("µs/"+c.against)), c.way,
			round(get("+µs/"+c.way)), round(get("+%/"+c.way)), requests))
	}
	region(t, dir+"README.md", "table: checks", table("store | the yardstick | takes | the other | takes more | that is | requests", rows...))

	rows = nil
	for _, store := range []string{"memory", "bolt", "http", "redis-memory", "redis-fsync", "postgres", "s3", "dynamodb"} {
		ways := []string{"unfenced", "fenced"}
		switch {
		case strings.HasPrefix(store, "redis-"):
			ways = append([]string{"hset"}, ways...)
		case store == "postgres":
			ways = append(ways, "tx-unfenced", "tx-guard", "tx-for-update")
		}
		for _, keys := range []string{"many", "one"} {
			for _, way := range ways {
				get := func(writers int, unit string) float64 {
					return metric(t, all, fmt.Sprintf("Writers/store=%s/keys=%s/writers=%d", store, keys, writers), unit+"/"+way)
				}
				row := []string{store, keys, way}
				for _, writers := range []int{1, 16, 128} {
					row = append(row, round(get(writers, "writes/s"))+"/s")
				}
				for _, writers := range []int{16, 128} {
					refused := get(writers, "refused")
					if keys == "many" {
						require.Zero(t, refused, "a key of one writer sees rising tokens")
					}
					row = append(row, fmt.Sprintf("%.0f %%", 100*refused))
				}
				rows = append(rows, strings.Join(row, " | "))
			}
		}
	}
	region(t, dir+"README.md", "table: writers", table("store | keys | a write | 1 writer | 16 | 128 | refused of 16 | of 128", rows...))
}
