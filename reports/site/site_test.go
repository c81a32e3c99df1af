package site

import (
	"encoding/json"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	hdr "github.com/HdrHistogram/hdrhistogram-go"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/bench/load"
)

const recorded = "../results"

func TestRecorded(t *testing.T) {
	folder := os.DirFS(recorded)
	made, _, err := Derive(folder)
	require.NoError(t, err)
	for name, b := range made {
		committed, err := fs.ReadFile(folder, name)
		require.NoError(t, err)
		require.Equal(t, string(b), string(committed), "%s isn't what the data says: run make report, and commit what it changes", name)
	}
	charts, err := fs.Glob(folder, "*/*.svg")
	require.NoError(t, err)
	require.NotEmpty(t, charts)
	for _, chart := range charts {
		require.True(t, made[chart] != nil, "no data makes this chart: remove %s", chart)
		page, err := fs.ReadFile(folder, path.Join(path.Dir(chart), "README.md"))
		require.NoError(t, err)
		require.Contains(t, string(page), "("+path.Base(chart)+")", "its page doesn't show the chart")
	}
}

func TestHTML(t *testing.T) {
	files, err := HTML(os.DirFS(recorded))
	require.NoError(t, err)
	require.Contains(t, files, "index.html")
	timelines, err := filepath.Glob(recorded + "/*/timeline.html")
	require.NoError(t, err)
	require.NotEmpty(t, timelines)
	for _, file := range timelines {
		dir := filepath.Base(filepath.Dir(file))
		require.Contains(t, files, dir+"/timeline.html")
		require.Contains(t, string(files[dir+"/index.html"]), `<a href="timeline.html">`)
	}
	loads := regexp.MustCompile(`(?i)<(?:script|link|img|iframe|object|embed|image|use)\b|@import|url\(`)
	link := regexp.MustCompile(`href="([^"#]+)`)
	id := regexp.MustCompile(`\bid="([^"]+)"`)
	for name, b := range files {
		if path.Base(name) != "index.html" {
			continue
		}
		require.Empty(t, loads.FindString(string(b)), "%s loads something", name)
		seen := map[string]bool{}
		for _, m := range id.FindAllStringSubmatch(string(b), -1) {
			require.False(t, seen[m[1]], "%s has two elements %s", name, m[1])
			seen[m[1]] = true
		}
		for _, m := range link.FindAllStringSubmatch(string(b), -1) {
			if !strings.Contains(m[1], "://") {
				require.Contains(t, files, path.Join(path.Dir(name), m[1]), "%s links to what isn't there", name)
			}
		}
	}
}

func TestBrokenPage(t *testing.T) {
	for _, page := range []string{"# A\n[b](gone)\n", "# A\n[b](../README.md)\n", "# A\n![b](gone.svg)\n", "A\n"} {
		_, err := HTML(fstest.MapFS{"README.md": {Data: []byte(page)}})
		require.Error(t, err, page)
	}
}

func TestNames(t *testing.T) {
	line := `{"scenario":"HolderKilled","lock":"a<b","server":"","fencing":"on","ttl":"1s","verdict":"safe","stale":0,"refused":0,"lost":[],"writers":[],"tokens":[],"blocked":"1s"}`
	files, _, err := Derive(fstest.MapFS{"holder-killed/runs.jsonl": {Data: []byte(line + "\n" + strings.ReplaceAll(line, "1s", "2s") + "\n")}})
	require.NoError(t, err)
	require.Contains(t, string(files["holder-killed/blocked.svg"]), ">a&lt;b</text>")
}

var recordedRuns = sync.OnceValues(func() (runs, error) {
	data, err := os.ReadFile(recorded + "/contention/data.jsonl")
	if err != nil {
		return nil, err
	}
	return decodeRuns(data)
})

func goals(t *testing.T, change func(r *load.Result)) string {
	t.Helper()
	all, err := recordedRuns()
	require.NoError(t, err)
	var rounds runs
	for _, r := range all {
		res, waits := *r.Result, r.waits
		change(&res)
		if res.Wait != r.Wait || res.Unserved != r.Unserved {
			waits, err = load.Estimate(&res)
			require.NoError(t, err)
		}
		rounds = append(rounds, &run{Result: &res, waits: waits})
	}
	medians, err := rounds.medians()
	require.NoError(t, err)
	return claims(append(contentionClaims(medians), kept(rounds)))
}

// TestGoals changes runs so that a goal that is met is missed, or the reverse. The pages' tables, which a test of reports compares,
// show all else.
func TestGoals(t *testing.T) {
	of := func(sweep, lock string, contenders int) func(*load.Result) bool {
		return func(r *load.Result) bool {
			return r.Config.Name == sweep && r.Config.Backend == lock && (contenders == 0 || r.Config.Contenders == contenders)
		}
	}
	queue, other := of("hot key", "redis", 200), func(r *load.Result) bool {
		return r.Config.Name == "hot key" && r.Config.Contenders == 200 && r.Machine.Library != ""
	}
	slower := func(r *load.Result) { r.SectionsPerS /= 100 }
	faster := func(r *load.Result) { r.SectionsPerS *= 100 }
	waits := func(ms int64) func(*load.Result) {
		h := hdr.New(100, 3_600_000_000_000, 3)
		require.NoError(t, h.RecordValues(ms*1_000_000, 1000))
		b, err := h.Encode(hdr.V2CompressedEncodingCookieBase)
		require.NoError(t, err)
		return func(r *load.Result) { r.Wait, r.Unserved = load.Latency{Count: 1000, HDR: string(b)}, load.Latency{} }
	}
	at := func(rate float64) func(*load.Result) bool {
		return func(r *load.Result) bool { return of("uncontended", "redis", 0)(r) && r.Config.Rate == rate }
	}
	unserved := func(r *load.Result) { r.Unserved, r.Wait = r.Wait, load.Latency{} }
	for name, c := range map[string]struct {
		which  func(*load.Result) bool
		change func(*load.Result)
		want   []string
	}{
		"fast":                {queue, faster, []string{`^\| 200 contenders: at least 1 × as fast as the fastest other library on Redis \| .* \| ✓ \|$`}},
		"slow over a network": {of("network", "redis", 1000), slower, []string{`^\| over a network, 0.5 ms there and back, 1,000 contenders: at least 1.5 × as fast .* \| ✗ \|$`}},
		"a load that is fast apart from the server": {of("apart", "redis", 200), faster, []string{`^\| the load on 1 of 2 processors, 200 contenders: at least 1 × as fast .* \| ✓ \|$`}},
		"some wait for ever": {queue, unserved, []string{
			`^\| 200 contenders: p99 of waits at most 1/10 of that of the other library with the shortest tail \| > \S+ ms ÷ .* \| ✗ \|$`,
			`^\| 200 contenders: p99 at most 2.5 × the median \| > .* \| ✗ \|$`,
		}},
		"others wait for ever":    {other, unserved, []string{`^\| 200 contenders: p99 of waits .* with the most throughput \| .*, or less \| ✓ \|$`}},
		"a tail that is too long": {queue, waits(100), []string{`^\| 200 contenders: p99 of waits .* with the most throughput \| 100 ms ÷ .* \| ✗ \|$`}},
		"unfair in one round": {
			func(r *load.Result) bool { return queue(r) && r.Config.Round == 2 },
			func(r *load.Result) { r.Share.Jain, r.Share.Starved, r.Share.Without = 0.5, 3, 4 },
			[]string{`^\| 200 contenders: Jain's index at least 0.999 \| 0.50000 \| ✗ \|$`, `^\| 200 contenders: nobody starves \| 3 starved, 4 never held the lock \| ✗ \|$`},
		},
		"below the ceiling":                 {of("work", "redis", 200), slower, []string{`^\| 200 contenders, 5 ms of work: at least 90 % of the ceiling \| .* \| ✗ \|$`}},
		"the ceiling is of the lock's best": {of("hot key", "redis", 50), func(r *load.Result) { r.SectionsPerS = 1e9 }, []string{`^\| 200 contenders, 5 ms of work: at least 90 % of the ceiling \| \S+ of 19[6-9]/s = .*$`}},
		"fast on etcd":                      {of("hot key", "etcd", 200), faster, []string{`^\| 200 contenders: etcdlock at least 2.4 × as fast as .concurrency.Mutex. \| .* \| ✓ \|$`}},
		"slow in one process":               {of("one process", "etcd-shared", 200), slower, []string{`^\| 200 goroutines of one process: etcd-shared at least 50 × .* \| ✗ \|$`}},
		"slow without contention": {of("uncontended", "redis", 0), func(r *load.Result) { waits(1)(r); unserved(r) }, []string{
			`^\| uncontended, at the lowest offered rate: p99 below 3 ms \| > .* \| ✗ \|$`, `^\| uncontended: at least 5,000 per second with p99 below 5 ms \| at no rate \| ✗ \|$`,
		}},
		"slower at the lowest rate":    {at(1000), waits(4), []string{`^\| uncontended, at the lowest offered rate: p99 below 3 ms \| 4 ms at 1,000/s \| ✗ \|$`}},
		"slow at a rate that recovers": {at(2500), waits(6), []string{`^\| uncontended: at least 5,000 per second with p99 below 5 ms \| \S+ served of 1,000/s \| ✗ \|$`}},
		"two holders":                  {queue, func(r *load.Result) { r.Checks.Overlaps, r.Checks.TokenRegressions = 1, 2 }, []string{`^\| this module's locks: .* \| in \d+ runs [1-9]\d* overlaps, [2-9]\d* tokens that did not increase \| ✗ \|$`}},
	} {
		t.Run(name, func(t *testing.T) {
			n := 0
			got := goals(t, func(r *load.Result) {
				if c.which(r) {
					c.change(r)
					n++
				}
			})
			require.Positive(t, n)
			for _, want := range c.want {
				require.Regexp(t, "(?m)"+want, got)
			}
		})
	}
}

func TestData(t *testing.T) {
	good := load.Result{Config: load.Config{Backend: "redis", Contenders: 2}, Seconds: 1}
	lines := func(all ...load.Result) string {
		var b strings.Builder
		for _, r := range all {
			require.NoError(t, json.NewEncoder(&b).Encode(r))
		}
		return b.String()
	}
	short, broken, other, later := good, good, good, good
	short.Seconds = 0
	broken.Wait = load.Latency{Count: 1, HDR: "x"}
	other.Config.Contenders = 3
	later.Config.Round = 2
	for name, c := range map[string]struct{ data, err string }{
		"empty":              {"", "contention/data.jsonl: there are no runs in it"},
		"not JSON":           {lines(good) + "x", "line 2"},
		"recorded twice":     {lines(good, good), "run 2 is of the same config"},
		"a round too few":    {lines(good, other, later), "record all of them again"},
		"no time":            {lines(short), "it lasted no time"},
		"a broken histogram": {lines(broken), "run 1 (redis): load: a histogram can't be decoded"},
	} {
		t.Run(name, func(t *testing.T) {
			_, _, err := Derive(fstest.MapFS{"contention/data.jsonl": {Data: []byte(c.data)}})
			require.ErrorContains(t, err, c.err)
		})
	}
	none, _, err := Derive(fstest.MapFS{})
	require.NoError(t, err)
	require.Empty(t, none, "what isn't recorded yet has no charts")
}

func TestBenchmarks(t *testing.T) {
	const line = "BenchmarkA/x-2 \t 10\t 2.5 ns/op\t 7 writes/s\n"
	got, err := Benchmarks([]byte("goos: linux\n" + line + "BenchmarkB\t1\t3 ns/op\nPASS\n"))
	require.NoError(t, err)
	require.Equal(t, map[string]map[string]float64{"A/x": {"ns/op": 2.5, "writes/s": 7}, "B": {"ns/op": 3}}, got)
	for bad, want := range map[string]string{
		"PASS\n":                  "there is no benchmark in it",
		line + line:               "A/x is recorded twice",
		line + "--- SKIP: B\n":    "not recorded to its end: --- SKIP: B",
		line + "FAIL\n":           "not recorded to its end: FAIL",
		"BenchmarkA 1 some ns/op": `A: strconv.ParseFloat: parsing "some"`,
	} {
		_, err := Benchmarks([]byte(bad))
		require.ErrorContains(t, err, want, bad)
	}
}
