package site_test

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"io"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/fstest"

	hdr "github.com/HdrHistogram/hdrhistogram-go"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/bench/load"
	"github.com/fencelab/fencelab/reports/site"
)

const recorded = "../results"

var recordedPages = sync.OnceValues(func() (site.Files, error) { return site.Pages(os.DirFS(recorded)) })

// TestRecorded: charts and tables match their data, and every chart is on a page.
func TestRecorded(t *testing.T) {
	folder := os.DirFS(recorded)
	pages, err := recordedPages()
	require.NoError(t, err)
	differ, err := pages.Differ(folder)
	require.NoError(t, err)
	require.Empty(t, differ, "run make report, and commit what it changes: these aren't what the data says")
	charts, err := fs.Glob(folder, "*/*.svg")
	require.NoError(t, err)
	require.NotEmpty(t, charts)
	for _, chart := range charts {
		require.True(t, pages[chart] != nil, "no data makes this chart: remove %s", chart)
		page, err := fs.ReadFile(folder, path.Join(path.Dir(chart), "README.md"))
		require.NoError(t, err)
		require.Contains(t, string(page), "("+path.Base(chart)+")", "its page doesn't show the chart")
	}
}

// TestHTML: well-formed drawings, working links, and nothing from the network.
func TestHTML(t *testing.T) {
	files, err := site.HTML(os.DirFS(recorded))
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

// TestBrokenPage: a dead link, one out of the site, and a page without heading are errors.
func TestBrokenPage(t *testing.T) {
	for _, page := range []string{"# A\n[b](gone)\n", "# A\n[b](../README.md)\n", "A\n"} {
		_, err := site.HTML(fstest.MapFS{"README.md": {Data: []byte(page)}})
		require.Error(t, err, page)
	}
}

// TestNames: names from the data are escaped.
func TestNames(t *testing.T) {
	line := `{"scenario":"HolderKilled","lock":"a<b","server":"","fencing":"on","ttl":"1s","verdict":"safe","stale":0,"refused":0,"lost":[],"writers":[],"tokens":[],"blocked":"1s"}`
	files, err := site.Pages(fstest.MapFS{"holder-killed/runs.jsonl": {Data: []byte(line + "\n" + strings.ReplaceAll(line, "1s", "2s") + "\n")}})
	require.NoError(t, err)
	require.Contains(t, string(files["holder-killed/blocked.svg"]), ">a&lt;b</text>")
}

// served is a run with waits in ms, ended and unserved.
func served(t *testing.T, change func(*load.Result), ended, unserved []int64) string {
	t.Helper()
	latency := func(list []int64) load.Latency {
		if len(list) == 0 {
			return load.Latency{}
		}
		h := hdr.New(100, 3_600_000_000_000, 3)
		for _, ms := range list {
			require.NoError(t, h.RecordValue(ms*1_000_000))
		}
		b, err := h.Encode(hdr.V2CompressedEncodingCookieBase)
		require.NoError(t, err)
		return load.Latency{Count: int64(len(list)), HDR: string(b)}
	}
	r := load.Result{
		Config:  load.Config{Name: "hot key", Backend: "redis", Contenders: 200, Keys: 1},
		Seconds: 1, Sections: int64(len(ended)), SectionsPerS: float64(len(ended)), Wait: latency(ended), Unserved: latency(unserved),
		Share: load.Share{Jain: 1},
	}
	change(&r)
	b, err := json.Marshal(r)
	require.NoError(t, err)
	return string(b) + "\n"
}

func repeat(ms int64, n int) []int64 { return slices.Repeat([]int64{ms}, n) }

// places is a page with places for tables.
func places(tables ...string) string {
	var b strings.Builder
	for _, name := range tables {
		b.WriteString("<!-- report: " + name + " -->\nwhat was there\n<!-- end report: " + name + " -->\n")
	}
	return b.String()
}

var contentionPage = places("machine", "goals", "throughput", "waits", "network", "network-waits", "network-releases", "apart", "apart-waits", "one-process", "ceiling", "rates")

func contention(data string) fstest.MapFS {
	return fstest.MapFS{
		"contention/data.jsonl": {Data: []byte(data)},
		"contention/README.md":  {Data: []byte(contentionPage)},
	}
}

func pageOf(t *testing.T, data string) string {
	t.Helper()
	files, err := site.Pages(contention(data))
	require.NoError(t, err)
	return string(files["contention/README.md"])
}

// TestWaits: how tables show estimates, which package load tests.
func TestWaits(t *testing.T) {
	same := func(*load.Result) {}
	for name, c := range map[string]struct {
		ended, unserved []int64
		want            string // median, p99, p999
	}{
		"all served":          {repeat(10, 1000), nil, "| **redis** | 10, 10, 10 |"},
		"a few starve":        {repeat(1, 970), repeat(900, 30), "| **redis** | 1, > 900, > 900 |"},
		"nobody came":         {nil, nil, "| **redis** | —, —, — |"},
		"one too few to tell": {repeat(10, 999), nil, "| **redis** | 10, 10, · |"},
		"far too few":         {repeat(10, 99), nil, "| **redis** | 10, ·, · |"},
	} {
		t.Run(name, func(t *testing.T) {
			require.Contains(t, pageOf(t, served(t, same, c.ended, c.unserved)), c.want)
		})
	}
}

// TestGoals: missed goals say so, and those without a record too.
func TestGoals(t *testing.T) {
	peer := func(r *load.Result) {
		r.Config.Backend, r.Machine.Library = "redsync", "github.com/go-redsync/redsync/v4"
	}
	work := func(r *load.Result) {
		r.Config.Name, r.Config.Work, r.Hold.Mean = "work", load.Duration(5e6), 5.25
	}
	const (
		sections = "| 200 contenders: at least as fast as the fastest other library on Redis | "
		tail     = "| 200 contenders: p99 of waits at most 1/10 of that of the other library with the most throughput | "
		spread   = "| 200 contenders: p99 at most 2.5 × the median | "
		even     = "| 200 contenders: Jain's index at least 0.999 | "
		starving = "| 200 contenders: nobody starves | "
		shortest = "| 200 contenders: p99 of waits at most 1/10 of that of the other library with the shortest tail | "
		etcd     = "| 200 contenders: etcdlock at least 2 × as fast as `concurrency.Mutex` | "
		first    = "| uncontended, at the lowest offered rate: p99 below 3 ms | "
		rate     = "| uncontended: at least 5,000 per second with p99 below 5 ms | "
		word     = "| this module's locks: never two holders with a lease, and tokens that increase | "
		ceiling  = "| 200 contenders, 5 ms of work: at least 90 % of the ceiling | "
	)
	same := func(*load.Result) {}
	of := func(lock string) func(*load.Result) { return func(r *load.Result) { r.Config.Backend = lock } }
	other := func(r *load.Result) { peer(r); r.Config.Backend = "redislock" }
	few := func(r *load.Result) { r.Config.Contenders = 50 }
	over := func(r *load.Result) {
		r.Config.Name, r.Config.Delay = "network", load.Duration(250e3)
		r.Release = load.Latency{Count: r.Sections / 5, P50: 0.6, P99: 7}
	}
	aside := func(r *load.Result) { r.Config.Name, r.Config.Processors, r.Machine.Cores = "apart", 1, 2 }
	offered := func(rate float64, ms int64) string {
		return served(t, func(r *load.Result) { r.Config.Name, r.Config.Rate, r.SectionsPerS = "uncontended", rate, rate }, repeat(ms, 1000), nil)
	}
	for name, c := range map[string]struct {
		data string
		want []string
	}{
		"alone": {served(t, same, repeat(10, 1000), nil), []string{sections + "not recorded | ? |", spread + "10 ms ÷ 10 ms = 1 | ✓ |"}},
		"met": {
			served(t, same, repeat(10, 1000), nil) + served(t, peer, append(repeat(1, 400), repeat(101, 100)...), nil),
			[]string{sections + "2 × redsync's (rounds: 2 to 2) | ✓ |", tail + "10 ms ÷ 101 ms (redsync) = 0.099 | ✓ |"},
		},
		"missed": {
			served(t, same, append(repeat(10, 400), repeat(26, 50)...), nil) + served(t, peer, append(repeat(1, 400), repeat(100, 100)...), nil),
			[]string{sections + "0.9 × redsync's (rounds: 0.9 to 0.9) | ✗ |", tail + "26 ms ÷ 100 ms (redsync) = 0.26 | ✗ |", spread + "26 ms ÷ 10 ms = 2.6 | ✗ |"},
		},
		"too few to tell a tail": {
			served(t, same, repeat(10, 99), nil) + served(t, peer, repeat(1, 99), nil) +
				served(t, func(r *load.Result) { r.Config.Name, r.Config.Rate = "uncontended", 99 }, repeat(1, 99), nil),
			[]string{tail + "not recorded | ? |", spread + "not recorded | ? |", first + "not recorded | ? |", rate + "at no rate | ✗ |"},
		},
		"unknown for how much longer": {served(t, same, repeat(10, 100), repeat(20, 30)), []string{spread + "> 20 ms ÷ 10 ms = 2 | ✗ |"}},
		"unfair": {
			served(t, func(r *load.Result) { r.Share = load.Share{Jain: 0.9, Starved: 3, Without: 4} }, repeat(10, 10000), nil),
			[]string{even + "0.90000 | ✗ |", starving + "3 starved, 4 never held the lock | ✗ |"},
		},
		"as even as whole sections can be": { // 150 have 4 and 50 have 3
			served(t, func(r *load.Result) { r.Share = load.Share{Jain: 0.98684}; r.Config.Contenders = 200 }, repeat(10, 750), nil),
			[]string{even + "0.98684, and 0.98684 is the most with 3.75 critical sections each | ? |"},
		},
		"too few sections, and uneven besides": {
			served(t, func(r *load.Result) { r.Share = load.Share{Jain: 0.98} }, repeat(10, 750), nil), []string{even + "0.98000 | ✗ |"},
		},
		"sections enough, and uneven": {
			served(t, func(r *load.Result) { r.Share = load.Share{Jain: 0.9989} }, repeat(10, 7500), nil), []string{even + "0.99890 | ✗ |"},
		},
		"the ceiling": { // a hand-off of 1 ms, and 5 ms of work that took 5.25
			served(t, same, repeat(10, 1000), nil) + served(t, work, repeat(10, 150), nil), []string{ceiling + "150/s of 160/s = 93.8 % | ✓ |"},
		},
		"a share of the ceiling that few had": {
			served(t, same, repeat(10, 1000), nil) +
				served(t, func(r *load.Result) { work(r); r.Share = load.Share{Starved: 117} }, repeat(1, 150), repeat(900, 50)),
			[]string{"| **redis** | 5 ms | 5.25 ms | 1 ms | 160/s | 150/s | 94 % | > 900 | 117 |"},
		},
		"the ceiling is of the lock's best": {
			served(t, same, repeat(10, 500), nil) + served(t, few, repeat(10, 1000), nil) + served(t, work, repeat(10, 140), nil),
			[]string{ceiling + "140/s of 160/s = 87.5 % | ✗ |"},
		},
		"two others": {
			served(t, same, repeat(10, 1000), nil) + served(t, peer, repeat(200, 500), nil) + served(t, other, repeat(50, 400), nil),
			[]string{sections + "2 × redsync's (rounds: 2 to 2)", tail + "10 ms ÷ 200 ms (redsync) = 0.05 | ✓ |", shortest + "10 ms ÷ 50 ms (bsm/redislock) = 0.2 | ✗ |"},
		},
		"one that starves some has no short tail": {
			served(t, same, repeat(10, 1000), nil) + served(t, peer, repeat(1, 500), repeat(20, 500)) + served(t, other, repeat(50, 400), nil),
			[]string{tail + "10 ms ÷ 20 ms (redsync) = 0.5, or less | ✗ |", shortest + "10 ms ÷ 50 ms (bsm/redislock) = 0.2 | ✗ |"},
		},
		"over a network": {
			served(t, over, repeat(10, 1000), nil) + served(t, func(r *load.Result) { over(r); peer(r) }, repeat(1, 500), nil) +
				served(t, func(r *load.Result) { over(r); r.Config.Backend = "etcd" }, repeat(10, 50), nil) +
				served(t, func(r *load.Result) { over(r); r.Config.Backend = "etcd-mutex" }, repeat(10, 30), nil),
			[]string{
				sections + "not recorded | ? |", etcd + "not recorded | ? |", "| over a network, 0.5 ms there and back, " + sections[2:] + "2 × redsync's (rounds: 2 to 2) | ✓ |",
				"| over a network, 0.5 ms there and back, " + etcd[2:] + "1.67 × concurrency.Mutex's (rounds: 1.67 to 1.67) | ✗ |", "| **redis** | 1,000/s |", "| redsync | 1, 1, · |",
				"| redsync | 0.6, 7 |", "| concurrency.Mutex | 0.6, · |",
			},
		},
		"the load apart": {
			served(t, aside, repeat(10, 400), nil) + served(t, func(r *load.Result) { aside(r); peer(r) }, repeat(1, 500), nil),
			[]string{sections + "not recorded | ? |", "| the load on 1 of 2 processors, " + sections[2:] + "0.8 × redsync's (rounds: 0.8 to 0.8) | ✗ |", "| **redis** | 400/s |", "| redsync | 1, 1, · |"},
		},
		"etcd, met":    {served(t, of("etcd"), repeat(10, 100), nil) + served(t, of("etcd-mutex"), repeat(10, 50), nil), []string{etcd + "2 × concurrency.Mutex's (rounds: 2 to 2) | ✓ |"}},
		"etcd, missed": {served(t, of("etcd"), repeat(10, 99), nil) + served(t, of("etcd-mutex"), repeat(10, 50), nil), []string{etcd + "1.98 × concurrency.Mutex's (rounds: 1.98 to 1.98) | ✗ |"}},
		"sustained": {
			offered(20000, 80) + offered(7500, 4) + offered(1000, 1),
			[]string{first + "1 ms at 1,000/s | ✓ |", rate + "7,500/s served of 7,500/s | ✓ |"},
		},
		"a rate that recovers isn't sustained": {
			offered(1000, 4) + offered(5000, 6) + offered(10000, 1), []string{first + "4 ms at 1,000/s | ✗ |", rate + "1,000/s served of 1,000/s | ✗ |"},
		},
		"a word that was not kept": {
			served(t, func(r *load.Result) { r.Checks.Overlaps, r.Checks.TokenRegressions = 1, 2 }, repeat(10, 100), nil),
			[]string{word + "in 1 runs 1 overlaps, 2 tokens that did not increase | ✗ |"},
		},
		"a floor is no lock": {
			served(t, func(r *load.Result) { r.Config.Name, r.Config.Backend, r.Config.Rate = "uncontended", "ping", 1000 }, repeat(5, 1000), nil) + offered(1000, 1),
			[]string{first + "1 ms at 1,000/s | ✓ |", word + "in 1 runs 0 overlaps, 0 tokens that did not increase | ✓ |", "| 1 | 1 | 1 | 0 | 0 | 5 | 5 |"},
		},
		"nor is a baton": {
			served(t, of("baton"), repeat(1, 5000), nil) + served(t, same, repeat(10, 1000), nil) + served(t, peer, repeat(1, 500), nil),
			[]string{sections + "2 × redsync's (rounds: 2 to 2) | ✓ |", word + "in 1 runs 0 overlaps, 0 tokens that did not increase | ✓ |", "| **redis** | 1,000/s |\n| baton | 5,000/s |\n| redsync | 500/s |"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			page := pageOf(t, c.data)
			for _, want := range c.want {
				require.Contains(t, page, want)
			}
		})
	}
}

// TestRounds: medians of rounds, and of their ratios.
func TestRounds(t *testing.T) {
	round := func(n int, lock string, sections int) string {
		return served(t, func(r *load.Result) {
			r.Config.Backend, r.Config.Round = lock, n
			if lock == "redsync" {
				r.Machine.Library = "github.com/go-redsync/redsync/v4"
			}
		}, repeat(10, sections), nil)
	}
	const goal = "| 200 contenders: at least as fast as the fastest other library on Redis | "
	two := round(1, "redis", 100) + round(1, "redsync", 50) + round(2, "redis", 300) + round(2, "redsync", 200)
	page := pageOf(t, two)
	for _, want := range []string{
		"Medians of 2 rounds. ", "| **redis** | 100/s (100 to 300) |", "| redsync | 50/s (50 to 200) |", goal + "1.5 × redsync's (rounds: 1.5 to 2) | ✓ |", "in 2 runs 0 overlaps",
	} {
		require.Contains(t, page, want)
	}
	// 0.5, 2 and 0.9: the ratio of the medians would be 1.8.
	page = pageOf(t, round(1, "redis", 100)+round(1, "redsync", 200)+round(2, "redis", 200)+round(2, "redsync", 100)+round(3, "redis", 90)+round(3, "redsync", 100))
	for _, want := range []string{"| **redis** | 100/s (90 to 200) |", goal + "0.9 × redsync's (rounds: 0.5 to 2) | ✗ |", "in 3 runs 0 overlaps"} {
		require.Contains(t, page, want)
	}
	shared := func(n, sections int, s load.Share) string {
		return served(t, func(r *load.Result) { r.Config.Round, r.Share = n, s }, repeat(10, sections), nil)
	}
	page = pageOf(t, shared(2, 9000, load.Share{Jain: 1})+shared(1, 9100, load.Share{Jain: 0.5, Starved: 3, Without: 4})+shared(3, 8000, load.Share{Jain: 1, Starved: 1}))
	for _, want := range []string{"Jain's index at least 0.999 | 0.50000 | ✗ |", "nobody starves | 4 starved, 4 never held the lock | ✗ |"} {
		require.Contains(t, page, want, "the worst of all rounds")
	}
	// Rounds are paired by number; one without a critical section has no ratio.
	page = pageOf(t, round(2, "redis", 300)+round(1, "redis", 100)+round(1, "redsync", 50)+round(2, "redsync", 200))
	require.Contains(t, page, goal+"1.5 × redsync's (rounds: 1.5 to 2) | ✓ |")
	page = pageOf(t, round(1, "redis", 100)+round(2, "redis", 100)+round(1, "redsync", 50)+round(2, "redsync", 0))
	require.Contains(t, page, goal+"not recorded | ? |")
	offered := func(n int, ms int64) string {
		return served(t, func(r *load.Result) {
			r.Config.Name, r.Config.Rate, r.Config.Round, r.SectionsPerS = "uncontended", 5000, n, 5000+float64(ms)
		}, repeat(ms, 1000), nil)
	}
	require.Contains(t, pageOf(t, offered(1, 9)+offered(2, 2)+offered(3, 4)), "at the lowest offered rate: p99 below 3 ms | 4 ms at 5,000/s | ✗ |")

	_, err := site.Pages(contention(two + round(3, "redis", 1)))
	require.ErrorContains(t, err, "there are 3 rounds of redis with 200 contenders and 2 of redsync with 200")
}

func TestFairness(t *testing.T) {
	closed := func(lock string, order load.Order, share load.Share) string {
		return served(t, func(r *load.Result) {
			r.Config.Name, r.Config.Backend, r.Order, r.Share = "closed", lock, order, share
		}, repeat(10, 100), []int64{10})
	}
	page := places("machine", "goals", "closed", "open")
	two := closed("redis", load.Order{Count: 200, Reordered: 1, Inversions: 2, Max: 2}, load.Share{Jain: 0.9995}) +
		closed("redis-spin", load.Order{Count: 200, Reordered: 50, Inversions: 4000, Max: 900}, load.Share{Jain: 0.5, Without: 7, Starved: 3})
	pages := func(data string) site.Files {
		files, err := site.Pages(fstest.MapFS{"fairness/README.md": {Data: []byte(page)}, "fairness/data.jsonl": {Data: []byte(data)}})
		require.NoError(t, err)
		return files
	}
	files := pages(two)
	got := string(files["fairness/README.md"])
	for _, want := range []string{
		"| 200 | no work | **redis** | 100/s | 10 | 10 | · | 2 | 0.5 % | 2 | 0.9995 | 0 | 0 |",
		"| 200 | no work | **redis-spin** | 100/s | 10 | 10 | · | 4,000 | 25 % | 900 | 0.5000 | 7 | 3 |",
		"| 200 contenders, no work, FIFO queue on Redis: Jain's index at least 0.999 | 0.99950 | ✓ |",
	} {
		require.Contains(t, got, want)
	}
	require.Contains(t, string(files["fairness/shares.svg"]), "1 of 2 locks share the lock evenly")

	slow := served(t, func(r *load.Result) { // 3 or 4 sections for each, and no lock could share them better
		r.Config.Name, r.Config.Backend, r.Share = "closed", "zookeeper", load.Share{Jain: 0.98684}
	}, repeat(10, 750), nil)
	require.Contains(t, string(pages(two + slow)["fairness/shares.svg"]), "2 of 3 locks share the lock evenly")
}

// TestPage keeps a page's words. A table without a place, and a place without a table, are errors.
func TestPage(t *testing.T) {
	data := served(t, func(*load.Result) {}, repeat(10, 100), nil)
	page := func(text string) (string, error) {
		f := contention(data)
		f["contention/README.md"] = &fstest.MapFile{Data: []byte(text)}
		files, err := site.Pages(f)
		return string(files["contention/README.md"]), err
	}
	got, err := page("# Words\n" + contentionPage + "more\n")
	require.NoError(t, err)
	require.True(t, strings.HasPrefix(got, "# Words\n<!-- report: machine -->\nRecorded "), got)
	require.True(t, strings.HasSuffix(got, "<!-- end report: rates -->\nmore\n"), got)
	require.Equal(t, 1, strings.Count(got, "# Words"))
	require.NotContains(t, got, "what was there")
	again, err := page(got)
	require.NoError(t, err)
	require.Equal(t, got, again)

	_, err = page(strings.ReplaceAll(contentionPage, "report: goals", "report: gaols"))
	require.ErrorContains(t, err, `the data has no table "gaols"; it has apart, apart-waits, ceiling, goals`)
	_, err = page(strings.Replace(contentionPage, "<!-- end report: goals -->", "", 1))
	require.ErrorContains(t, err, "there is no <!-- end report: goals -->")
	_, err = page(strings.ReplaceAll(contentionPage, "<!-- report: rates -->\nwhat was there\n<!-- end report: rates -->", ""))
	require.ErrorContains(t, err, `no place for the table "rates"`)
}

// TestData: impossible data is refused, and the error names the run.
func TestData(t *testing.T) {
	good := served(t, func(*load.Result) {}, repeat(10, 100), nil)
	for name, c := range map[string]struct{ data, err string }{
		"empty":              {"", "contention/data.jsonl: there are no runs in it"},
		"not JSON":           {good + "x", "run 2"},
		"recorded twice":     {good + good, "run 2 is of the same config"},
		"no time":            {served(t, func(r *load.Result) { r.Seconds = 0 }, nil, nil), "it lasted no time"},
		"a broken histogram": {served(t, func(r *load.Result) { r.Wait.HDR = "x" }, repeat(10, 100), nil), "run 1 (redis): load: a histogram can't be decoded"},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := site.Pages(contention(c.data))
			require.ErrorContains(t, err, c.err)
		})
	}
	none, err := site.Pages(fstest.MapFS{})
	require.NoError(t, err)
	require.Empty(t, none, "what isn't recorded yet has no charts")
}

// TestCharts: well-formed, with text alternatives and colours for dark screens.
func TestCharts(t *testing.T) {
	files, err := recordedPages()
	require.NoError(t, err)
	for name, b := range files {
		if path.Ext(name) != ".svg" {
			continue
		}
		dec := xml.NewDecoder(strings.NewReader(string(b)))
		names := map[string]int{}
		for {
			tok, err := dec.Token()
			if errors.Is(err, io.EOF) {
				break
			}
			require.NoError(t, err, name)
			if e, ok := tok.(xml.StartElement); ok {
				names[e.Name.Local]++
			}
		}
		require.Equal(t, 1, names["title"], name)
		require.Equal(t, 1, names["desc"], name)
		require.Greater(t, names["path"], 5, "%s is empty", name)
		_, drawn, _ := strings.Cut(string(b), "</style>")
		bare := regexp.MustCompile(`[^,]#[0-9A-Fa-f]{3,6}`).FindString(drawn)
		require.Empty(t, bare, "%s: a colour that stays as it is on a dark screen", name)
		require.NotContains(t, drawn, "NaN", name)
		require.NotContains(t, drawn, "Inf", name)
	}
}
