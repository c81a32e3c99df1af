// Package reports draws recorded runs: histories as timelines to scale.
package reports

import (
	"bytes"
	"cmp"
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

// Run is a recorded history and its verdict.
type Run struct {
	Events []history.Event
	Result history.Result
}

//go:embed page.html.tmpl style.css
var files embed.FS

var pageTemplate = template.Must(template.ParseFS(files, "page.html.tmpl", "style.css"))

// Timeline writes one HTML page of the runs: verdict, drawing to scale, list of all events. Runs of the same scenario share a
// time axis, in the order of fencing: off, on writes, on.
//
// The page needs no script and no network, and is the same for the same runs. Strings of histories are untrusted, and shown as
// text. The page says if a history is empty or incomplete.
func Timeline(w io.Writer, runs ...Run) error {
	if len(runs) == 0 {
		return errors.New("reports: no runs to draw")
	}
	var b bytes.Buffer
	if err := pageTemplate.ExecuteTemplate(&b, "page.html.tmpl", newPage(runs)); err != nil {
		return fmt.Errorf("reports: %w", err)
	}
	if _, err := w.Write(b.Bytes()); err != nil {
		return fmt.Errorf("reports: %w", err)
	}
	return nil
}

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
		ID                  string
		Fencing, Rule       string
		Verdict, Mark, Lead string
		Findings, Notes     []string
		Drawing             *drawing
		Ledger, Lost        []string
		NoLedger            string
		Facts               []fact
		Command             string
		Unit                string
		Events              []row
		scene               *scene
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
		name, hazard := clean(v.scene.run.Scenario), clean(v.scene.run.Hazard)
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
		slices.SortStableFunc(g.Runs, func(a, b *panel) int {
			return cmp.Compare(slices.Index(modes, a.scene.run.Fencing), slices.Index(modes, b.scene.run.Fencing))
		})
		g.draw()
	}
	p.Title = clean(strings.Join(names, ", "))
	return p
}

func (g *group) draw() {
	from, to := g.Runs[0].scene.from, g.Runs[0].scene.to
	for _, p := range g.Runs {
		from, to = min(from, p.scene.from), max(to, p.scene.to)
	}
	for _, p := range g.Runs {
		if len(p.scene.items) > 0 {
			p.Drawing = draw(p.scene, p.ID, fmt.Sprintf("Timeline, %s: %s", strings.ToLower(p.Fencing), p.Verdict), from, to)
		}
	}
}

func newPanel(id string, r Run) *panel {
	s := newScene(r.Events, r.Result)
	p := &panel{ID: id, scene: s, Verdict: r.Result.Verdict.String(), Command: clean(s.run.Command)}
	p.Mark = map[history.Verdict]string{history.Safe: safeSign, history.Violated: brokenSign}[r.Result.Verdict]
	if p.Mark == "" {
		p.Verdict, p.Mark = history.Inconclusive.String(), unknownSign
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
	p.Findings = shown(slices.Concat(r.Result.Findings, r.Result.Notes))
	p.remarks(r)
	p.Lost = shown(r.Result.Lost)
	switch f := s.final; {
	case f == nil:
		p.NoLedger = "The history has no final value."
	case f.Value == "":
		p.NoLedger = "The ledger is empty."
	default:
		p.Ledger = shown(history.Entries(f.Value))
	}
	p.facts()
	p.list(id)
	return p
}

func lead(r history.Result) string {
	refused := plural(r.Refused, "call") + " refused."
	switch r.Verdict {
	case history.Safe:
		return "No stale write accepted, no accepted entry lost; " + refused
	case history.Violated:
		return plural(r.Stale, "stale write") + " accepted, " + plural(len(r.Lost), "accepted entry") + " lost; " + refused
	default:
		return "The history does not show enough to say. That is never a pass."
	}
}

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
		say("Events are in the order of their clocks; %s recorded in another order.", plural(s.moved, "event"))
	}
}

func shown(list []string) (some []string) {
	for _, e := range list {
		some = append(some, clean(e))
	}
	return some
}

func (p *panel) facts() {
	s := p.scene
	add := func(name, value string) {
		if value != "" {
			p.Facts = append(p.Facts, fact{name, clean(value)})
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

func (p *panel) list(id string) {
	s := p.scene
	u := unitFor(s.to - s.from)
	p.Unit = u.name
	for _, it := range s.items {
		r := row{
			ID: fmt.Sprintf("%s-e%d", id, it.n), N: fmt.Sprint(it.n), Time: u.exact(it.at), Actor: clean(it.Actor), Words: it.sentence(),
			Value: clean(strings.Join(history.Entries(it.Value), " ⏎ ")),
			Alarm: it.stale || it.lost != "" || it.reports(history.Failed),
		}
		p.Events = append(p.Events, r)
	}
}
