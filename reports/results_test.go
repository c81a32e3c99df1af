package reports_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/reports"
	"github.com/fencelab/fencelab/reports/site"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
)

const (
	readme = "../README.md"
	matrix = "results/matrix/matrix.jsonl"
)

// histories are SCENARIO_LOCK_FENCING.jsonl, by folder.
func histories(t *testing.T) map[string][]string {
	t.Helper()
	files, err := filepath.Glob("results/*/*_*_*.jsonl")
	require.NoError(t, err)
	require.NotEmpty(t, files)
	byDir := map[string][]string{}
	for _, file := range files {
		byDir[filepath.Dir(file)] = append(byDir[filepath.Dir(file)], file)
	}
	return byDir
}

func recordedEvents(t *testing.T, file string) []history.Event {
	t.Helper()
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	events, err := history.Decode(bytes.NewReader(b))
	require.NoError(t, err, file)
	return events
}

func TestResults(t *testing.T) {
	for dir, files := range histories(t) {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			var runs []reports.Run
			for _, file := range files {
				events := recordedEvents(t, file)
				r := reports.Run{Events: events, Result: history.Judge(events)}
				require.NotEqual(t, history.Inconclusive, r.Result.Verdict, file)
				run := events[0].Run
				on, mode := run.Lock, string(run.Fencing)
				if store := storeOf(run); store != "" {
					on += "+" + store
					if run.Fencing == history.FencingOff { // workers that send no token have traces of their own
						mode = "unfenced"
					}
				}
				require.Equal(t, fmt.Sprintf("%s_%s_%s.jsonl", run.Scenario, on, run.Fencing), filepath.Base(file))
				hazard, ok := scenarios.Hazard(run.Scenario)
				require.True(t, ok, file)
				require.Equal(t, hazard.Traces[mode], strings.Join(history.Trace(events), "\n")+"\n", "%s is of another schedule: record it again", file)
				runs = append(runs, r)
			}
			var page bytes.Buffer
			require.NoError(t, reports.Timeline(&page, runs...))
			inspect(t, page.String())
			path := filepath.Join(dir, "timeline.html")
			if *update {
				require.NoError(t, os.WriteFile(path, page.Bytes(), 0o644))
				return
			}
			want, err := os.ReadFile(path)
			require.NoError(t, err)
			require.Equal(t, string(want), page.String(), "run make report")
		})
	}
}

func TestPictures(t *testing.T) {
	page, err := os.ReadFile("results/pause-exceeds-ttl/timeline.html")
	require.NoError(t, err)
	style := regexp.MustCompile(`(?s)<style>.*?</style>`).Find(page)
	style = append(style, "<style>svg { background: var(--paper) }</style>"...) // whatever page they are shown on
	drawings := regexp.MustCompile(`(?s)(<svg [^>]*role="img"[^>]*>)(.*?</svg>)`).FindAllSubmatch(page, -1)
	require.Len(t, drawings, 3, "fencing off, on writes, on")
	for file, d := range map[string][][]byte{"../docs/fencing-off.svg": drawings[0], "../docs/fencing-on.svg": drawings[2]} {
		want := slices.Concat(d[1], style, d[2], []byte("\n"))
		if *update {
			require.NoError(t, os.WriteFile(file, want, 0o644))
			continue
		}
		got, err := os.ReadFile(file)
		require.NoError(t, err)
		require.Equal(t, string(want), string(got), "run make report")
	}
}

func summaries(t *testing.T, file string) []reports.Summary {
	t.Helper()
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	all, err := reports.DecodeSummaries(bytes.NewReader(b))
	require.NoError(t, err, file)
	require.NotEmpty(t, all, file)
	var again bytes.Buffer
	require.NoError(t, reports.EncodeSummaries(&again, all))
	require.Equal(t, string(b), again.String(), "%s is as it was written", file)
	return all
}

// region compares the text between two comments of a file; -update replaces it.
func region(t *testing.T, file, name, want string) {
	t.Helper()
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	kind, _, _ := strings.Cut(name, ":")
	begin, end := "<!-- "+name+" -->\n", "<!-- end "+kind
	before, rest, ok := strings.Cut(string(b), begin)
	require.True(t, ok, "%s has no %q", file, begin)
	old, after, ok := strings.Cut(rest, end)
	require.True(t, ok, "%s has no %q", file, end)
	if *update {
		require.NoError(t, os.WriteFile(file, []byte(before+begin+want+end+after), 0o644))
		return
	}
	require.Equal(t, want, old, "%s: run make report", file)
}

func TestSiteTables(t *testing.T) {
	_, tables, err := site.Derive(os.DirFS("results"))
	require.NoError(t, err)
	for dir, all := range tables {
		page := "results/" + dir + "/README.md"
		for name, text := range all {
			region(t, page, "report: "+name, text)
		}
		b, err := os.ReadFile(page)
		require.NoError(t, err)
		require.Equal(t, len(all), bytes.Count(b, []byte("<!-- report: ")), "tables of %s that the data has, and places", page)
	}
}

func TestMatrix(t *testing.T) {
	all := summaries(t, matrix)
	var table strings.Builder
	require.NoError(t, reports.Matrix(&table, all, func(name string) string {
		hazard, _ := scenarios.Hazard(name)
		return hazard.Hazard
	}))
	region(t, "results/matrix/README.md", "matrix: cmd/report", table.String())
}

// harmless are the hazards that need no fencing, with what each shows.
var harmless = map[string]string{
	"HolderKilled":            "a dead holder writes nothing",
	"ReleaseCompareAndDelete": "a release that compares leaves the successor's lock alone",
	"SecondResourceUntouched": "nobody but the stale holder has touched the second resource",
}

func TestClaims(t *testing.T) {
	all := summaries(t, matrix)
	locks := map[string]map[string]bool{}
	for _, r := range all {
		name := fmt.Sprintf("%s on %s, fencing %s", r.Scenario, r.Lock, r.Fencing)
		if locks[r.Lock] == nil {
			locks[r.Lock] = map[string]bool{}
		}
		locks[r.Lock][r.Scenario] = true
		monotonic, _, smaller := order(t, &r)
		require.Equal(t, !monotonic, r.TokensLost, "%s: tokens go backwards where the hazard says so, and nowhere else", name)
		require.NotEqual(t, history.Inconclusive, r.Verdict, name)
		switch {
		case r.Fencing == history.FencingOn:
			require.Equal(t, history.Safe, r.Verdict, name)
			require.Zero(t, r.Stale, name)
			require.Empty(t, r.Lost, name)
			require.Equal(t, smaller, r.LiveRefused, "%s: the live holder is refused if its token is the smaller one", name)
		case harmless[r.Scenario] != "":
			require.Equal(t, history.Safe, r.Verdict, "%s: %s", name, harmless[r.Scenario])
		case r.Fencing == history.FencingOff:
			require.Equal(t, history.Violated, r.Verdict, name)
			require.NotEmpty(t, r.Lost, name)
		case r.Scenario == "LateWriteBeforeSuccessorWrites" || smaller:
			require.Equal(t, history.Violated, r.Verdict, "%s: the tokens of writes grow, and an entry is lost", name)
			require.Zero(t, r.Stale, name)
		default:
			require.Equal(t, history.Safe, r.Verdict, name)
		}
	}
	for _, lock := range []string{"redis", "redlock", "etcd", "zookeeper", "consul", "postgres", "s3"} {
		require.GreaterOrEqual(t, len(locks[lock]), 12, "hazards of %s", lock)
	}
}

// order reports whether all tokens of r increase, whether all differ, and whether the last is smaller than the one before.
func order(t *testing.T, r *reports.Summary) (monotonic, unique, smaller bool) {
	t.Helper()
	monotonic, unique = true, true
	var ranks []int
	for _, g := range r.Tokens {
		_, text, _ := strings.Cut(g, "#")
		rank, err := strconv.Atoi(text)
		require.NoError(t, err, g)
		unique = unique && !slices.Contains(ranks, rank)
		if n := len(ranks); n > 0 {
			smaller = rank < ranks[n-1]
			monotonic = monotonic && rank > ranks[n-1]
		}
		ranks = append(ranks, rank)
	}
	return monotonic, unique, smaller
}

var (
	named   = regexp.MustCompile("`([A-Za-z]+)`")
	testOf  = regexp.MustCompile("`(Test[A-Za-z]+)(?:/([A-Za-z]+))?`(?: in `([a-z/]+)`)?")
	command = regexp.MustCompile(`\bTest[A-Za-z]+`)
)

// rows are the cells of a page's tables, by column.
func rows(page string) (all []map[string]string) {
	cells := func(line string) (list []string) {
		for c := range strings.SplitSeq(strings.Trim(line, "| "), "|") {
			list = append(list, strings.TrimSpace(c))
		}
		return list
	}
	var head []string
	for line := range strings.Lines(page) {
		line = strings.TrimSpace(line)
		switch {
		case !strings.HasPrefix(line, "|"):
			head = nil
		case head == nil:
			head = cells(line)
		case !strings.HasPrefix(line, "| ---"):
			row := map[string]string{}
			for i, c := range cells(line) {
				if i < len(head) {
					row[head[i]] = c
				}
			}
			all = append(all, row)
		}
	}
	return all
}

// TestPages checks hand-written tables against the runs that they name, and that the tests that pages name exist.
func TestPages(t *testing.T) {
	pages, err := filepath.Glob("results/*/README.md")
	require.NoError(t, err)
	recorded, shared, checked := histories(t), summaries(t, matrix), 0
	for _, page := range pages {
		t.Run(filepath.Base(filepath.Dir(page)), func(t *testing.T) {
			b, err := os.ReadFile(page)
			require.NoError(t, err)
			for _, name := range command.FindAllString(string(b), -1) {
				requireTest(t, "", name) // or the beginning of one
			}
			var own []reports.Summary
			for _, file := range recorded[filepath.Dir(page)] {
				own = append(own, reports.Summarize(recordedEvents(t, file)))
			}
			for _, row := range rows(string(b)) {
				for _, m := range testOf.FindAllStringSubmatch(row["run"], -1) {
					requireTest(t, m[3], m[1]+"(")
					if m[2] != "" {
						scripts, err := os.ReadFile("../" + m[3] + "/testdata/scripts.txt")
						require.NoError(t, err)
						require.True(t, bytes.Contains(scripts, []byte("\n-- "+m[2]+" --\n")), "there is no script %s in %s", m[2], m[3])
					}
					checked++
				}
				m := named.FindStringSubmatch(row["run"])
				if m == nil || strings.HasPrefix(m[1], "Test") {
					continue
				}
				runs := of(own, m[1])
				if len(runs) == 0 {
					runs = of(shared, m[1])
				}
				require.NotEmpty(t, runs, "no run of %s", m[1])
				requireRow(t, row, runs)
				checked++
			}
		})
	}
	require.Greater(t, checked, 20, "rows")
}

func of(all []reports.Summary, scenario string) []reports.Summary {
	return slices.DeleteFunc(slices.Clone(all), func(s reports.Summary) bool { return s.Scenario != scenario })
}

func requireRow(t *testing.T, row map[string]string, runs []reports.Summary) {
	t.Helper()
	yes := map[bool]string{true: "yes", false: "no"}
	name := runs[0].Scenario
	for column, cell := range row {
		switch column {
		case "off, writes, on":
			require.Equal(t, reports.Cell(runs), cell, name)
		case "tokens":
			for _, r := range runs {
				require.Equal(t, strings.Join(r.Tokens, " "), cell, name)
			}
		case "monotonic":
			for _, r := range runs {
				monotonic, _, _ := order(t, &r)
				require.Equal(t, yes[monotonic], cell, name)
			}
		case "unique":
			for _, r := range runs {
				_, unique, _ := order(t, &r)
				require.Equal(t, yes[unique], cell, name)
			}
		}
	}
}

// requireTest requires a test with such a prefix in a folder, or if dir is empty, in any that the pages name.
func requireTest(t *testing.T, dir, name string) {
	t.Helper()
	pattern := "../" + dir + "/*_test.go"
	var files []string
	for _, p := range []string{pattern, "../scenarios/*_test.go", "../scenarios/*/*_test.go", "../dlock/*/*_test.go", "../resource/*/*_test.go", "../internal/*/*_test.go", "../internal/*/*/*_test.go", "*_test.go"} {
		if dir == "" || p == pattern {
			found, err := filepath.Glob(p)
			require.NoError(t, err)
			files = append(files, found...)
		}
	}
	for _, f := range files {
		b, err := os.ReadFile(f)
		require.NoError(t, err)
		if bytes.Contains(b, []byte("func "+name)) {
			return
		}
	}
	require.Fail(t, "there is no such test", "%s in %q", name, dir)
}

func TestHolderKilledTable(t *testing.T) {
	const dir = "results/holder-killed/"
	all := summaries(t, dir+"runs.jsonl")
	ttls := []time.Duration{500 * time.Millisecond, 2 * time.Second, 10 * time.Second}
	head := []string{"lock"}
	for _, ttl := range ttls {
		head = append(head, fmt.Sprintf("TTL %v", ttl))
	}
	var rows []string
	for _, lock := range []string{"redis", "redlock", "postgres", "zookeeper", "etcd", "consul"} {
		row := []string{lock}
		for _, ttl := range ttls {
			var got []string
			for _, r := range all {
				if r.Lock == lock && time.Duration(r.TTL) == ttl {
					require.Equal(t, "HolderKilled", r.Scenario)
					require.Equal(t, history.Safe, r.Verdict)
					require.Positive(t, r.Blocked)
					got = append(got, fmt.Sprintf("%.2f", time.Duration(r.Blocked).Seconds()))
				}
			}
			require.Len(t, got, 2, "%s, %v", lock, ttl)
			row = append(row, strings.Join(got, ", ")+" s")
		}
		rows = append(rows, strings.Join(row, " | "))
	}
	region(t, dir+"README.md", "table: blocked", table(strings.Join(head, " | "), rows...))
}

// Each subtest that passed requires what its cell says.
func TestClockSkewTable(t *testing.T) {
	const dir = "results/redlock/"
	passed, err := os.ReadFile(dir + "clock-skew.txt")
	require.NoError(t, err)
	steps := []string{"0s", "30m0s", "59m59.999s", "1h0m0s", "1h0m0.001s", "2h0m0s"}
	var rows []string
	for n := range 6 {
		row := []string{fmt.Sprintf("%d of 5", n)}
		for i, by := range steps {
			require.Contains(t, string(passed), fmt.Sprintf("--- PASS: TestClockSkew/%d_nodes_ahead_by_%s ", n, by))
			cell := "one holder"
			if n >= 3 && i >= 4 {
				cell = "**two**, late write refused"
			}
			row = append(row, cell)
		}
		rows = append(rows, strings.Join(row, " | "))
	}
	region(t, dir+"README.md", "table: clock skew", table("clocks ahead | "+strings.Join(steps, " | "), rows...))
}

func TestRenewalsTable(t *testing.T) {
	const dir = "results/renewals"
	waits := map[string][]string{}
	for _, file := range histories(t)[dir] { // off, on, writes
		events := recordedEvents(t, file)
		var granted []time.Time
		for _, e := range events {
			if e.Kind == history.KindReport && e.Name == history.Acquired {
				granted = append(granted, e.Time)
			}
		}
		require.Len(t, granted, 2, file)
		name := events[0].Run.Scenario
		waits[name] = append(waits[name], fmt.Sprint(granted[1].Sub(granted[0]).Milliseconds()))
	}
	var rows []string
	for _, name := range []string{"WorkExceedsTTL", "PauseExceedsTTL", "WedgedHolder"} {
		require.Len(t, waits[name], 3, name)
		rows = append(rows, fmt.Sprintf("`%s` | %s | %s | %s", name, waits[name][0], waits[name][2], waits[name][1]))
	}
	region(t, dir+"/README.md", "table: renewals", table("run | fencing off | on writes alone | on", rows...))
}
