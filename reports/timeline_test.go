package reports_test

import (
	"bytes"
	"encoding/xml"
	"errors"
	"flag"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/reports"
	"github.com/fencelab/fencelab/scenarios/history"
)

var update = flag.Bool("update", false, "write the recorded pages instead of comparing with them")

func load(t *testing.T, names ...string) []reports.Run {
	t.Helper()
	var runs []reports.Run
	for _, name := range names {
		b, err := os.ReadFile(filepath.Join("testdata", name+".jsonl"))
		require.NoError(t, err)
		events, err := history.Decode(bytes.NewReader(b))
		require.NoError(t, err)
		runs = append(runs, reports.Run{Events: events, Result: history.Judge(events)})
	}
	return runs
}

func render(t *testing.T, runs ...reports.Run) string {
	t.Helper()
	var b bytes.Buffer
	require.NoError(t, reports.Timeline(&b, runs...))
	return b.String()
}

func decision(op string, token, seq uint64, enforced bool) history.Event {
	return history.Event{
		Actor: "resource", Kind: history.KindDecision, Op: op, Key: "k", Token: token, Seq: seq, Accepted: true, Enforced: enforced,
		Value: fmt.Sprintf("e%d.%d\n", token, seq),
	}
}

// An entry is lost if the last value of its own ledger lacks it.
func TestGoneAtTheEnd(t *testing.T) {
	write := func(key string, token uint64, value string) history.Event {
		return history.Event{Actor: "resource", Kind: history.KindDecision, Op: "write", Key: key, Token: token, Seq: 1, Accepted: true, Value: value}
	}
	final := func(key, value string) history.Event {
		return history.Event{Actor: "controller", Kind: history.KindFinal, Key: key, Value: value}
	}
	for name, c := range map[string]struct {
		events []history.Event
		want   int
	}{
		"lost":                      {[]history.Event{write("k", 2, "B\n"), write("k", 1, "A\n"), final("k", "A\n")}, 1},
		"lost and back":             {[]history.Event{write("k", 1, "A\n"), write("k", 2, "B\n"), write("k", 1, "A\n"), final("k", "A\n")}, 1},
		"lost in one of two":        {[]history.Event{write("k", 2, "B\n"), write("l", 2, "B\n"), write("k", 1, "A\n"), final("k", "A\n"), final("l", "B\n")}, 1},
		"what is left is not known": {[]history.Event{write("k", 2, "B\n"), write("k", 1, "A\n")}, 0},
	} {
		events := build(c.events...)
		html := render(t, reports.Run{Events: events, Result: history.Judge(events)})
		require.Equal(t, c.want, strings.Count(html, "Its entry is gone at the end"), name)
	}
}

// build makes a history of events, those without a time one millisecond apart.
func build(events ...history.Event) []history.Event {
	all := []history.Event{{Time: began, Actor: "controller", Kind: history.KindRun, Run: &history.Run{
		Scenario: "Test", Hazard: "a test", Fencing: history.FencingOn, Workers: []string{"A", "B"},
	}}}
	for i, e := range events {
		if e.Time.IsZero() {
			e.Time = began.Add(time.Duration(i) * time.Millisecond)
		}
		if e.TTL > 0 {
			e.Until = e.Time.Add(time.Duration(e.TTL))
		}
		all = append(all, e)
	}
	end := history.Event{Time: all[len(all)-1].Time.Add(time.Millisecond), Actor: "controller", Kind: history.KindEnd}
	return append(all, end)
}

var began = time.Date(2026, 11, 20, 9, 30, 0, 0, time.UTC)

func at(ms int, e history.Event) history.Event {
	e.Time = began.Add(time.Duration(ms) * time.Millisecond)
	return e
}

func report(actor, name string) history.Event {
	return history.Event{Actor: actor, Kind: history.KindReport, Name: name}
}

func acquired(actor string, token uint64, ttl time.Duration) history.Event {
	return history.Event{Actor: actor, Kind: history.KindReport, Name: history.Acquired, Token: token, TTL: history.Duration(ttl)}
}

func fault(name, target string) history.Event {
	return history.Event{Actor: "controller", Kind: history.KindFault, Name: name, Target: target}
}

func TestUnusualHistories(t *testing.T) {
	const ms = time.Millisecond
	swapped := build(acquired("A", 1, time.Second), report("A", history.Read), report("A", history.Released))
	swapped[1], swapped[2] = swapped[2], swapped[1]
	instant := build(acquired("A", 1, time.Second), report("A", history.Read), report("A", history.Released))
	for i := range instant {
		instant[i].Time = instant[0].Time
	}
	cut := build(acquired("A", 1, time.Second), report("A", history.Read))
	cut = cut[:len(cut)-1]

	for name, c := range map[string]struct {
		events []history.Event
		want   []string
	}{
		"empty":             {nil, []string{"The history is empty", "no final value", "inconclusive"}},
		"only the run":      {build()[:1], []string{"no event beyond the description"}},
		"never acquired":    {build(report("A", history.Held), report("A", history.Done)), []string{"Nobody was granted the lock", "found it held"}},
		"broken off":        {cut, []string{"The history is incomplete"}},
		"out of order":      {swapped, []string{"1 event recorded in another order"}},
		"zero duration":     {instant, []string{"released", "<svg"}},
		"no run":            {build(acquired("A", 1, time.Second))[1:], []string{"A history without a name", "Fencing unknown"}},
		"unknown kind":      {build(history.Event{Actor: "C", Kind: "comet", Name: "seen"}), []string{"does not know: comet seen"}},
		"unknown report":    {build(report("C", "yawned")), []string{"reported yawned", "yawned</text>"}},
		"unknown fault":     {build(fault("bribe", "resource")), []string{"injected bribe at resource"}},
		"resume alone":      {build(fault("resume", "A")), []string{"resumed A (SIGCONT)"}},
		"frozen to the end": {build(fault("pause", "A"), report("B", history.Held)), []string{"froze A (SIGSTOP)", "to the end"}},
		"second run event":  {append(build(), build()[0]), []string{"described a run, though not as the first event"}},
		"unowned write": {
			build(history.Event{Actor: "resource", Kind: history.KindDecision, Op: "write", Token: 9, Seq: 1, Accepted: true, Value: "x\n"}),
			[]string{"accepted a write with token 9"},
		},
		// Endings of leases that no recorded page has, in the text alternative.
		"released, reports crossed": {
			build(acquired("A", 1, 9*ms), acquired("B", 2, 9*ms), report("A", history.Released), report("B", history.Released)),
			[]string{"A is granted token 1 at 0 s; released at 1 ms."},
		},
		"renewed beyond its first end": {
			build(acquired("A", 1, ms), report("A", history.Read), report("A", history.Read), report("A", history.Released)),
			[]string{"A is granted token 1 at 0 s; released at 3 ms."},
		},
		"killed": {
			build(acquired("A", 1, ms), fault("kill", "A"), report("B", history.Held), report("B", history.Held)),
			[]string{"A is granted token 1 at 0 s; expired by 3 ms."},
		},
		"still held": {
			build(acquired("A", 1, ms), report("A", history.Read), report("A", history.Read)),
			[]string{"A is granted token 1 at 0 s; still held at the end of the history."},
		},
	} {
		t.Run(name, func(t *testing.T) {
			got := render(t, reports.Run{Events: c.events, Result: history.Judge(c.events)})
			for _, want := range c.want {
				has(t, got, want)
			}
			inspect(t, got)
		})
	}
	require.Error(t, reports.Timeline(io.Discard), "no runs at all")
}

func TestHostileHistory(t *testing.T) {
	const attack = `<script>alert(1)</script>"'><img src=x onerror=alert(1)>]]>-->{{.}}&amp;</style></title></svg>`
	bad := attack + "\x00\x1b[31m\u202eevil\u2066\xff\ufeff" + strings.Repeat("long ", 400)
	events := build(
		acquired(bad, 1, time.Millisecond), report(bad, bad), fault("pause", bad), fault(bad, bad),
		history.Event{Actor: bad, Kind: history.Kind(bad), Name: bad},
		history.Event{Actor: "B", Kind: history.KindReport, Name: history.Failed, Error: bad},
		history.Event{Actor: bad, Kind: history.KindDecision, Op: bad, Key: bad, Token: math.MaxUint64, Seq: math.MaxUint64, Value: bad},
		history.Event{Actor: "resource", Kind: history.KindDecision, Op: "write", Token: 1, Seq: 1, Accepted: true, Value: bad + "\n" + bad},
		history.Event{Actor: "controller", Kind: history.KindFinal, Value: bad + "\n"},
	)
	events[0].Run = &history.Run{
		Scenario: bad, Hazard: bad, Fencing: history.Fencing(bad), Lock: bad, Server: bad, Store: bad,
		TTL: math.MaxInt64, Pause: math.MinInt64, Workers: []string{bad, bad + "2", "lock", "resource", ""}, Command: bad,
	}
	res := history.Result{Verdict: history.Verdict(77), Findings: []string{bad}, Notes: []string{bad}, Lost: []string{bad, "e"}}
	got := render(t, reports.Run{Events: events, Result: res})
	inspect(t, got)
	lacks(t, got, "\u202e") // a direction override
}

// Whatever a history holds, the page is well-formed, self-contained, reproducible, and its labels don't overlap.
func TestRandomHistories(t *testing.T) {
	names := []string{
		history.Held, history.Acquired, history.Read, history.Checked, history.BeforeWrite, history.Sent, history.Wrote, history.WriteStale,
		history.Released, history.ReleaseLost, history.ReleaseForeign, history.Failed, history.Done, "other",
	}
	var faults []string
	for _, f := range history.Faults {
		faults = append(faults, f.Name)
	}
	actors := []string{"A", "B", "a-worker-with-a-long-name", "W&W", "世界世界世界世界世界世界", "resource"}
	for seed := range uint64(60) {
		r := rand.New(rand.NewPCG(seed, 0))
		pick := func(from []string) string { return from[r.IntN(len(from))] }
		at := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
		events := build()[:1]
		scale := time.Duration(math.Pow(10, r.Float64()*16))
		for range r.IntN(80) {
			if r.IntN(3) > 0 {
				at = at.Add(time.Duration(r.Float64()*float64(scale)) - scale/10)
			}
			e := history.Event{Time: at, Actor: pick(actors), Token: r.Uint64N(4), Seq: r.Uint64N(3)}
			switch r.IntN(6) {
			case 0:
				e.Kind, e.Name, e.Target = history.KindFault, pick(faults), pick(actors)
			case 1:
				e.Kind, e.Op, e.Accepted, e.Value = history.KindDecision, []string{"read", "write", "wave"}[r.IntN(3)], r.IntN(2) == 0, "x\ny"
			default:
				e.Kind, e.Name = history.KindReport, pick(names)
				if e.Name == history.Acquired {
					e.TTL, e.Until = history.Duration(scale), at.Add(scale)
				}
			}
			events = append(events, e)
		}
		runs := []reports.Run{{Events: events, Result: history.Judge(events)}, {Events: events}}
		got := render(t, runs...)
		require.Equal(t, got, render(t, runs...), "seed %d", seed)
		if !t.Run(fmt.Sprint("seed ", seed), func(t *testing.T) { inspect(t, got) }) {
			return
		}
	}
}

func TestWriterError(t *testing.T) {
	full := errors.New("disk full")
	err := reports.Timeline(failing{full}, load(t, "crash-on")...)
	require.ErrorIs(t, err, full)
}

type failing struct{ err error }

func (f failing) Write([]byte) (int, error) { return 0, f.err }

func has(t *testing.T, html, want string) {
	t.Helper()
	if !strings.Contains(html, want) {
		t.Errorf("the page lacks %q", want)
	}
}

func lacks(t *testing.T, html, banned string) {
	t.Helper()
	if i := strings.Index(html, banned); i >= 0 {
		t.Errorf("the page has %q: …%q…", banned, html[max(0, i-60):min(len(html), i+60)])
	}
}

// elements of a page: none of them loads or runs anything.
var elements = func() map[string]bool {
	m := make(map[string]bool)
	for e := range strings.FieldsSeq(`html head meta title style body main section header div article h1 h2 h3 p strong span figure
		figcaption ul ol li code pre del em dl dt dd table thead tbody tr th td br a
		details summary svg desc defs pattern linearGradient stop path rect circle text tspan`) {
		m[e] = true
	}
	return m
}()

// inspect reads the page as XML, which is stricter than HTML. Ids are unique, references have a target, nothing is loaded from
// elsewhere, and a drawing's labels are inside of it and apart.
func inspect(t *testing.T, html string) {
	t.Helper()
	for _, banned := range []string{"@import", "@font-face", "ZgotmplZ", "NaN", "+Inf", "-Inf", "%!"} {
		lacks(t, html, banned)
	}
	for _, u := range regexp.MustCompile(`url\([^)]*\)|https?://[^"]*"`).FindAllString(html, -1) {
		if !strings.HasPrefix(u, "url(#") && !strings.HasPrefix(u, "http://www.w3.org/") {
			t.Errorf("the page refers to %s", u)
		}
	}
	var page node
	require.NoError(t, xml.Unmarshal([]byte(html), &page), "the page is well-formed")
	ids, refs := map[string]bool{}, map[string]bool{}
	for n := range page.all {
		require.True(t, elements[n.XMLName.Local], "the page has an element %s", n.XMLName.Local)
		for _, a := range n.Attrs {
			name := a.Name.Local
			require.False(t, strings.HasPrefix(name, "on") || name == "src" || name == "style", "attribute %s", name)
			switch {
			case name == "id":
				require.False(t, ids[a.Value], "id %s is used twice", a.Value)
				ids[a.Value] = true
			case name == "href":
				require.True(t, strings.HasPrefix(a.Value, "#"), "a link to %s", a.Value)
				refs[a.Value[1:]] = true
			case name == "aria-labelledby":
				for id := range strings.FieldsSeq(a.Value) {
					refs[id] = true
				}
			case strings.HasPrefix(a.Value, "url(#"):
				refs[a.Value[len("url(#"):len(a.Value)-1]] = true
			}
		}
		if n.attr("role") == "img" {
			n.inspectLabels(t)
		}
	}
	for ref := range refs {
		require.True(t, ids[ref], "%s has no target", ref)
	}
}

type node struct {
	XMLName  xml.Name
	Attrs    []xml.Attr `xml:",any,attr"`
	Text     string     `xml:",chardata"`
	Children []node     `xml:",any"`
}

func (n node) all(yield func(node) bool) {
	if !yield(n) {
		return
	}
	for _, c := range n.Children {
		c.all(yield)
	}
}

func (n node) attr(name string) string {
	for _, a := range n.Attrs {
		if a.Name.Local == name {
			return a.Value
		}
	}
	return ""
}

func (n node) inspectLabels(t *testing.T) {
	t.Helper()
	box := strings.Fields(n.attr("viewBox"))
	width, height := num(t, box[2]), num(t, box[3])
	var labels []label
	for c := range n.all {
		if c.XMLName.Local != "text" {
			continue
		}
		a := measure(t, c)
		if a.x0 < -0.5 || a.y0 < -0.5 || a.x1 > width+0.5 || a.y1 > height+0.5 {
			t.Errorf("label %q [%.0f %.0f %.0f %.0f] is outside the drawing (%.0f × %.0f)", a.words, a.x0, a.y0, a.x1, a.y1, width, height)
		}
		for _, b := range labels {
			if a.x0 < b.x1 && b.x0 < a.x1 && a.y0 < b.y1 && b.y0 < a.y1 {
				t.Errorf("labels %q and %q overlap", a.words, b.words)
			}
		}
		labels = append(labels, a)
	}
}

func num(t *testing.T, s string) float64 {
	t.Helper()
	v, err := strconv.ParseFloat(s, 64)
	require.NoError(t, err)
	return v
}

type label struct {
	words          string
	x0, y0, x1, y1 float64
}

// measure computes a label's box from 7 px a character, which common fonts need at most, on average; 13 px for wide ones.
func measure(t *testing.T, e node) label {
	t.Helper()
	var words strings.Builder
	for c := range e.all {
		words.WriteString(c.Text)
	}
	w := 0.0
	for _, r := range words.String() {
		w += map[bool]float64{true: 7, false: 13}[r <= '~']
	}
	const size = 11
	l, y := label{words: words.String(), x0: num(t, e.attr("x"))}, num(t, e.attr("y"))
	switch e.attr("text-anchor") {
	case "middle":
		l.x0 -= w / 2
	case "end":
		l.x0 -= w
	}
	l.x1, l.y0, l.y1 = l.x0+w, y-0.76*size, y+0.24*size
	return l
}
