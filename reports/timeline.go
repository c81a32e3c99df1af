// Package reports draws what runs recorded, for people who decide by it: histories as timelines that are to scale.
package reports

import (
	"bytes"
	"embed"
	"errors"
	"fmt"
	"html/template"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/fencelab/fencelab/scenarios/history"
)

// What a page shows at most of things that have no end of their own. What is left out is counted on the page.
const (
	headEvents  = 300
	tailEvents  = 100
	mostEntries = 100
	mostFinding = 40
	valueRunes  = 240
)

// Run is a recorded history and what the judge says of it.
type Run struct {
	Events []history.Event
	Result history.Result
}

//go:embed page.html.tmpl style.css
var files embed.FS

var pageTemplate = template.Must(template.ParseFS(files, "page.html.tmpl", "style.css"))

// Timeline writes one HTML page that shows the runs: for each its verdict, a drawing of who held the lock, who
// believed so and what the resource accepted, drawn to scale, and the list of all events. Runs of the same scenario
// stand beside each other on the same time axis, in the order given.
//
// The page needs nothing but itself: no script, no network. The same runs give the same bytes. A history may come
// from anywhere; whatever its strings hold is shown as text. Histories that are empty or broken off are shown as far
// as they go, with a sentence that says so.
func Timeline(w io.Writer, runs ...Run) error {
	if len(runs) == 0 {
		return errors.New("reports: no runs to draw")
	}
	var b bytes.Buffer
	if err := pageTemplate.ExecuteTemplate(&b, "page.html.tmpl", newPage(runs)); err != nil {
		return fmt.Errorf("reports: %w", err)
	}
	_, err := w.Write(b.Bytes())
	if err != nil {
		return fmt.Errorf("reports: %w", err)
	}
	return nil
}

// The page as the template writes it.
type (
	page struct {
		Title  string
		Groups []*group
	}
	group struct {
		Scenario, Hazard string
		Runs             []*panel
	}
	panel struct {
		ID                 string
		Fencing, Rule      string
		Verdict, Mark      string
		Class              string // of the verdict
		Lead               string
		Findings, Notes    []string
		Drawing            *drawing
		Ledger, Lost       []string
		NoLedger, MoreLost string
		Facts              []fact
		Command            string
		Unit               string
		Events             []row
		scene              *scene
	}
	fact struct{ Name, Value string }
	row  struct {
		ID, N, Time, Actor, Words, Value string
		Alarm                            bool
	}
)

func newPage(runs []Run) page {
	var p page
	for i, r := range runs {
		v := newPanel(fmt.Sprintf("r%d", i+1), r)
		name, hazard := clean(v.scene.run.Scenario, 80), clean(v.scene.run.Hazard, 200)
		if name == "" {
			name = "A history without a name"
		}
		at := slices.IndexFunc(p.Groups, func(g *group) bool { return g.Scenario == name && g.Hazard == hazard })
		if at < 0 {
			at = len(p.Groups)
			p.Groups = append(p.Groups, &group{Scenario: name, Hazard: hazard})
		}
		p.Groups[at].Runs = append(p.Groups[at].Runs, v)
	}
	var names []string
	for _, g := range p.Groups {
		names = append(names, g.Scenario)
		g.draw()
	}
	p.Title = clean(strings.Join(names, ", "), 120)
	return p
}

// draw draws the group's runs on one time axis, unless one is so much longer than another that it would hide it.
func (g *group) draw() {
	const atMost = 4
	var from, to, least time.Duration
	var panels []*panel
	for _, p := range g.Runs {
		s := p.scene
		if !slices.ContainsFunc(s.items, func(it item) bool { return it.timed }) {
			continue
		}
		span := max(s.to-s.from, time.Microsecond)
		if len(panels) == 0 {
			from, to, least = s.from, s.to, span
		}
		from, to, least = min(from, s.from), max(to, s.to), min(least, span)
		panels = append(panels, p)
	}
	shared := len(panels) > 1 && (to-from)/atMost <= least
	var charts []*chart
	for _, p := range panels {
		a, b := p.scene.from, p.scene.to
		if shared {
			a, b = from, to
		} else if len(panels) > 1 {
			p.Notes = append(p.Notes, "The runs differ much in length, so each is drawn to a scale of its own.")
		}
		charts = append(charts, newChart(p.scene, p.ID, a, b))
	}
	if len(charts) == 0 {
		return
	}
	align(charts)
	for i, c := range charts {
		p := panels[i]
		c.Title = fmt.Sprintf("Timeline, %s: %s", strings.ToLower(p.Fencing), p.Verdict)
		d := c.draw()
		p.Drawing = &d
	}
}

func newPanel(id string, r Run) *panel {
	s := newScene(r.Events, r.Result.Lost)
	p := &panel{ID: id, scene: s, Verdict: r.Result.Verdict.String(), Command: clean(s.run.Command, 400)}
	switch r.Result.Verdict {
	case history.Safe:
		p.Class, p.Mark = "safe", "✓"
	case history.Violated:
		p.Class, p.Mark = "violated", "✕"
	default:
		p.Class, p.Mark = "inconclusive", "?"
	}
	p.Lead = lead(r.Result)
	switch s.run.Fencing {
	case history.FencingOff:
		p.Fencing, p.Rule = "Fencing off", "The resource accepts everything."
	case history.FencingWrites:
		p.Fencing, p.Rule = "Fencing on writes", "Writes carry the token, reads don’t."
	case history.FencingOn:
		p.Fencing, p.Rule = "Fencing on", "Writes carry the token, and a grant’s first read raises the fence too."
	default:
		p.Fencing, p.Rule = "Fencing unknown", "The history does not say which fencing was in force."
	}
	findings := slices.Concat(r.Result.Findings, r.Result.Notes)
	for _, f := range findings[:min(len(findings), mostFinding)] {
		p.Findings = append(p.Findings, clean(f, 400))
	}
	if n := len(findings) - mostFinding; n > 0 {
		p.Findings = append(p.Findings, plural(n, "more finding")+".")
	}
	p.remarks(r)
	p.ledger(r.Result.Lost)
	p.facts()
	p.list(id)
	return p
}

// lead is the verdict as a sentence.
func lead(r history.Result) string {
	count := func(n int, one, many string) string {
		switch n {
		case 0:
			return "no " + one
		case 1:
			return "1 " + one
		default:
			return grouped(n) + " " + many
		}
	}
	switch r.Verdict {
	case history.Safe:
		return fmt.Sprintf("No stale write accepted, no accepted entry lost; %s refused.", count(r.Refused, "call", "calls"))
	case history.Violated:
		stale := count(r.Stale, "stale write", "stale writes")
		return fmt.Sprintf("%s%s accepted, %s lost; %s refused.", strings.ToUpper(stale[:1]), stale[1:],
			count(len(r.Lost), "accepted entry", "accepted entries"), count(r.Refused, "call", "calls"))
	default:
		return "The history does not show enough to say. That is never a pass."
	}
}

// remarks says what a reader must know before trusting the drawing.
func (p *panel) remarks(r Run) {
	s := p.scene
	say := func(format string, args ...any) { p.Notes = append(p.Notes, fmt.Sprintf(format, args...)) }
	switch {
	case len(r.Events) == 0:
		say("The history is empty: there is nothing to draw.")
		return
	case len(s.items) == 0:
		say("The history holds no event beyond the description of the run: there is nothing to draw.")
		return
	case s.start.IsZero():
		say("No event has a time: there is nothing to draw. The list has them as they were recorded.")
	case !s.granted:
		say("Nobody was granted the lock; t = 0 is the first event.")
	}
	if !s.complete {
		say("The history is incomplete: it has no end event.")
	}
	if s.run.TokensLost {
		say("The hazard takes the lock’s tokens back. A write is called stale by its token, not by its grant.")
	}
	if s.moved > 0 {
		say("Events are shown by their own clocks; %s recorded in another order.", were(s.moved))
	}
	if n := len(s.workers) - maxWorkers; n > 0 {
		say("%s without a lane; the list has their events.", are(n, "worker"))
	}
	if n := len(s.leases) - maxBars; n > 0 {
		say("%s without a bar; the list has them.", are(n, "later grant"))
	}
}

func are(n int, noun string) string {
	if n == 1 {
		return "1 " + noun + " is"
	}
	return plural(n, noun) + " are"
}

func were(n int) string {
	if n == 1 {
		return "1 was"
	}
	return grouped(n) + " were"
}

func (p *panel) ledger(lost []string) {
	switch f := p.scene.final; {
	case f == nil:
		p.NoLedger = "The history has no final value."
	case f.Value == "":
		p.NoLedger = "The ledger is empty."
	default:
		p.Ledger, p.NoLedger = entryTexts(history.Entries(f.Value))
	}
	p.Lost, p.MoreLost = entryTexts(lost)
}

// entryTexts is what the page shows of entries, and a sentence on those that it does not.
func entryTexts(entries []string) (texts []string, more string) {
	for _, e := range entries[:min(len(entries), mostEntries)] {
		texts = append(texts, clean(e, valueRunes))
	}
	if n := len(entries) - mostEntries; n > 0 {
		noun := "more entries"
		if n == 1 {
			noun = "more entry"
		}
		more = grouped(n) + " " + noun + "."
	}
	return texts, more
}

func (p *panel) facts() {
	s := p.scene
	add := func(name, value string) {
		if value != "" {
			p.Facts = append(p.Facts, fact{name, clean(value, 120)})
		}
	}
	length := func(d history.Duration) string {
		if d <= 0 {
			return ""
		}
		return human(time.Duration(d))
	}
	add("Lock", s.run.Lock)
	add("Lock server", s.run.Server)
	add("Store", s.run.Store)
	add("TTL", length(s.run.TTL))
	add("Pause", length(s.run.Pause))
	if s.run.Pause == 0 && len(s.frozen) > 0 {
		add("Pause", "as long as the schedule takes")
	}
	if !s.start.IsZero() {
		add("t = 0 at", s.start.UTC().Format("2006-01-02 15:04:05.000000 UTC"))
	}
}

// list fills the table of events: all of them, or the first and the last and how many are between.
func (p *panel) list(id string) {
	s := p.scene
	u := unitFor(s.to - s.from)
	p.Unit = u.name
	for i, it := range s.items {
		if skipped := len(s.items) - headEvents - tailEvents; skipped > 0 && i >= headEvents && i < headEvents+skipped {
			if i == headEvents {
				p.Events = append(p.Events, row{N: "…", Words: plural(skipped, "event") + " left out here; the history has them"})
			}
			continue
		}
		r := row{ID: fmt.Sprintf("%s-e%d", id, it.n), N: fmt.Sprint(it.n), Time: "–", Actor: clean(it.Actor, 40), Words: it.sentence()}
		if it.timed {
			r.Time = u.exact(it.at)
		}
		r.Value = clean(strings.Join(history.Entries(it.Value), " ⏎ "), valueRunes)
		r.Alarm = it.stale || it.lost != "" || it.is(history.KindReport, history.Failed)
		p.Events = append(p.Events, r)
	}
}
