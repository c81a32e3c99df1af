package history_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/fencelab/fencelab/internal/observe"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/history"
)

// wrong says how a resource breaks the fencing rule. The zero value keeps it.
type wrong struct {
	equal    bool // accepts a write whose fence is not less than the greatest, and not only a greater one
	seq      bool // looks at tokens only
	reads    bool // a fenced read doesn't raise the fence
	stale    bool // a fenced read is never refused
	forgets  bool // a crash loses the fences
	loses    bool // a crash loses the values
	pretends bool // refuses a stale write, and lets it take effect
}

// model is a resource.Overwriter of one record that does what wrong says.
type model struct {
	wrong
	rec resource.Record
}

func (m *model) Write(_ context.Context, key string, f resource.Fence, value []byte) error {
	admitted := f.Compare(m.rec.MaxFence) > 0
	switch {
	case m.equal:
		admitted = f.Compare(m.rec.MaxFence) >= 0
	case m.seq:
		admitted = f.Token >= m.rec.MaxFence.Token
	}
	err := error(nil)
	if !admitted {
		err = &resource.StaleTokenError{Key: key, Seen: m.rec.MaxFence, Got: f}
	}
	if admitted || m.pretends {
		m.rec = resource.Record{Value: value, MaxFence: m.rec.MaxFence.Max(f)}
	}
	return err
}

func (m *model) Overwrite(_ context.Context, _ string, f resource.Fence, value []byte) error {
	m.rec = resource.Record{Value: value, MaxFence: m.rec.MaxFence.Max(f)}
	return nil
}

func (m *model) Read(context.Context, string) (resource.Record, error) {
	if m.rec.Value == nil && m.rec.MaxFence == (resource.Fence{}) {
		return resource.Record{}, resource.ErrNotFound
	}
	return m.rec, nil
}

func (m *model) ReadFenced(_ context.Context, key string, token uint64) (resource.Record, error) {
	f := resource.Fence{Token: token}
	if token < m.rec.MaxFence.Token && !m.stale {
		return resource.Record{}, &resource.StaleTokenError{Key: key, Seen: m.rec.MaxFence, Got: f}
	}
	if !m.reads {
		m.rec.MaxFence = m.rec.MaxFence.Max(f)
	}
	return m.rec, nil
}

func (*model) Close() error { return nil }

func (m *model) crash() {
	if m.forgets {
		m.rec.MaxFence = resource.Fence{}
	}
	if m.loses {
		m.rec.Value = nil
	}
}

// world is a run in one goroutine: workers that take turns under a lock that keeps nobody out, and a resource behind its
// real HTTP handler, so that decisions are told by the real observer.
type world struct {
	fencing history.Fencing
	store   resource.Overwriter
	client  *resource.Client
	workers map[string]*person
	grants  uint64
	stale   int // refusals
	events  []history.Event
	// What the oracle knows, from what the store answered and not from events.
	bad bool
	max resource.Fence
	was string
}

// person is a worker: what it knows, and what it does next.
type person struct {
	token  uint64
	seq    uint64
	ledger string
	next   string // acquire, read, write, end or ""
	last   func() // has the last write delivered once more, with an answer to nobody
}

const key = "k"

// inProcess calls a handler without a network.
type inProcess struct{ http.Handler }

func (h inProcess) RoundTrip(r *http.Request) (*http.Response, error) {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Result(), nil
}

func newWorld(t require.TestingT, f history.Fencing, store resource.Overwriter) *world {
	w := &world{fencing: f, store: store, workers: map[string]*person{}}
	h, err := resource.NewHandler(observe.Store(store, w.observe), &resource.HandlerOptions{Unfenced: f == history.FencingOff})
	require.NoError(t, err)
	w.client, err = resource.NewClient("http://model", &resource.ClientOptions{
		HTTPClient: &http.Client{Transport: inProcess{h}}, AllowUnfenced: true, // wrong resources are the point
	})
	require.NoError(t, err)
	w.events = append(w.events, history.Event{Kind: history.KindRun, Run: &history.Run{Scenario: "model", Fencing: f}})
	return w
}

func (w *world) observe(d observe.Decision) {
	w.events = append(w.events, history.Event{
		Actor: "resource", Kind: history.KindDecision, Op: d.Op, Key: d.Key, Token: d.Fence.Token, Seq: d.Fence.Seq,
		Seen: d.Seen.Token, SeenSeq: d.Seen.Seq, Accepted: d.Accepted, Enforced: d.Enforced, Value: string(d.Value),
	})
	if !d.Accepted {
		w.stale++
	}
}

func (w *world) report(name string, r history.Event) {
	r.Actor, r.Kind = name, history.KindReport
	w.events = append(w.events, r)
}

// step lets a worker do its next thing.
func (w *world) step(t require.TestingT, name string) {
	p := w.workers[name]
	ctx := context.Background()
	switch p.next {
	case "acquire":
		w.grants++
		p.token, p.next = w.grants, "read"
		w.report(name, history.Event{Name: history.Acquired, Token: p.token})
	case "read":
		read := w.client.Read
		if w.fencing == history.FencingOn {
			read = func(ctx context.Context, key string) (resource.Record, error) {
				return w.client.ReadFenced(ctx, key, p.token)
			}
		}
		rec, err := read(ctx, key)
		if _, refused := errors.AsType[*resource.StaleTokenError](err); refused {
			w.report(name, history.Event{Name: history.ReadStale, Token: p.token})
			p.next = "end"
			return
		}
		if !errors.Is(err, resource.ErrNotFound) {
			require.NoError(t, err)
		}
		p.ledger, p.next = string(rec.Value), "write"
		if w.fencing == history.FencingOn {
			w.accept(resource.Fence{Token: p.token}, p.token >= w.max.Token)
		}
		if p.ledger != w.was { // it read what is not there by right
			w.bad = true
		}
		w.report(name, history.Event{Name: history.Read, Token: p.token, Value: p.ledger})
	case "write":
		p.seq++
		f := resource.Fence{Token: p.token, Seq: p.seq}
		value := history.Append(p.ledger, fmt.Sprintf("%s%d", name, p.seq))
		p.last = func() { _ = w.write(t, f, value) }
		if err := w.write(t, f, value); err != nil {
			w.report(name, history.Event{Name: history.WriteStale, Token: f.Token})
			p.next = "end"
			return
		}
		p.ledger = value
		w.report(name, history.Event{Name: history.Wrote, Token: f.Token, Value: value})
	case "end":
		w.report(name, history.Event{Name: history.ReleaseLost, Token: p.token})
		w.report(name, history.Event{Name: history.Done})
		p.next = ""
	}
}

// write returns a refusal.
func (w *world) write(t require.TestingT, f resource.Fence, value string) error {
	err := w.client.Write(context.Background(), key, f, []byte(value))
	if stale, refused := errors.AsType[*resource.StaleTokenError](err); refused {
		return stale
	}
	require.NoError(t, err)
	w.accept(f, f.Compare(w.max) > 0)
	for _, e := range history.Entries(w.was) {
		w.bad = w.bad || !slices.Contains(history.Entries(value), e)
	}
	w.was = value
	return nil
}

// accept accounts for a call that the store has accepted.
func (w *world) accept(f resource.Fence, inOrder bool) {
	w.bad = w.bad || !inOrder
	w.max = w.max.Max(f)
}

// told are the moves in a world of whose outcome somebody is told, the simplest first.
var told = []string{"A steps", "B steps", "C steps", "A stops", "B stops", "the resource crashes"}

// all are all moves. A write may be delivered again, with an answer to nobody.
var all = append(slices.Clone(told), "A repeats", "B repeats")

// run draws a run.
func (w *world) run(t *rapid.T, moves []string) []history.Event {
	for _, move := range rapid.SliceOfN(rapid.SampledFrom(moves), 0, 16).Draw(t, "moves") {
		name, what, _ := strings.Cut(move, " ")
		p := w.workers[name]
		switch {
		case what == "steps" && p == nil:
			w.workers[name] = &person{next: "acquire"}
			w.step(t, name)
		case what == "steps":
			w.step(t, name)
		case what == "stops" && p != nil && p.next == "write":
			p.next = "end"
		case what == "repeats" && p != nil && p.last != nil:
			p.last()
		case what == "resource crashes":
			w.crash()
		}
	}
	for _, name := range slices.Sorted(maps.Keys(w.workers)) {
		for p := w.workers[name]; p.next != ""; {
			if p.next == "write" && p.seq > 0 {
				p.next = "end"
			}
			w.step(t, name)
		}
	}
	return w.finish(t)
}

func (w *world) crash() {
	if m, ok := w.store.(*model); ok {
		m.crash()
	}
	w.stale = 0
	w.events = append(w.events,
		history.Event{Kind: history.KindFault, Name: "kill", Target: "resource"},
		history.Event{Kind: history.KindFault, Name: "restart", Target: "resource"})
}

func (w *world) finish(t require.TestingT) []history.Event {
	rec, err := w.store.Read(context.Background(), key)
	if !errors.Is(err, resource.ErrNotFound) {
		require.NoError(t, err)
	}
	w.bad = w.bad || string(rec.Value) != w.was
	return append(w.events,
		history.Event{Kind: history.KindFinal, Key: key, Value: string(rec.Value), Seen: rec.MaxFence.Token, SeenSeq: rec.MaxFence.Seq, Stale: w.stale},
		history.Event{Kind: history.KindEnd})
}

// With fencing on, a resource that keeps the rule is never accused, and never under suspicion.
func TestTheRuleIsSafe(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t, history.FencingOn, resource.NewMemory())
		got := history.Judge(w.run(t, all))
		require.False(t, w.bad, "the model's own account")
		require.NotEqual(t, history.Violated, got.Verdict, "%q", got.Findings)
		requireHarmless(t, got)
	})
}

// requireHarmless requires that nothing is wrong with a run that is not safe: it only shows nothing.
func requireHarmless(t require.TestingT, got history.Result) {
	for _, f := range got.Findings {
		shown := !slices.ContainsFunc([]string{noWrite, oneGrant, noHazard}, func(s string) bool { return strings.Contains(f, s) })
		require.False(t, shown && got.Verdict == history.Inconclusive, f)
	}
}

// Without fenced reads or without any fencing, entries are lost; the judge finds it exactly when the model does.
func TestTheJudgeAgreesWithTheModel(t *testing.T) {
	for _, f := range []history.Fencing{history.FencingOff, history.FencingWrites, history.FencingOn} {
		t.Run(string(f), rapid.MakeCheck(func(t *rapid.T) {
			w := newWorld(t, f, &model{})
			got := history.Judge(w.run(t, all))
			require.Equal(t, w.bad, got.Verdict == history.Violated, "%v %q", got.Verdict, got.Findings)
			if f != history.FencingOff {
				require.Zero(t, got.Stale, "the rule keeps stale writes out")
			}
		}))
	}
}

// Without tokens, too, the judge finds lost entries exactly when there are any, and what else it finds is that nothing was
// shown.
func TestTheJudgeNeedsNoTokens(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newWorld(t, history.FencingOff, &model{})
		events := withoutTokens(w.run(t, told))
		lost, was := false, ""
		for _, e := range events {
			if e.Kind != history.KindDecision || e.Op != "write" {
				continue
			}
			for _, entry := range history.Entries(was) {
				lost = lost || !slices.Contains(history.Entries(e.Value), entry)
			}
			was = e.Value
		}
		got := history.Judge(events)
		require.Equal(t, lost, got.Verdict == history.Violated, "%v %q", got.Verdict, got.Findings)
		requireHarmless(t, got)
	})
}

// A resource that breaks the rule is caught: some run, and rapid shrinks it to a short one, is judged violated; and no
// run in which it did wrong is judged safe.
func TestWrongRulesAreCaught(t *testing.T) {
	for name, c := range map[string]struct {
		wrong
		most int // events of the shrunk run
	}{
		"accepts an equal fence":    {wrong{equal: true}, 14},
		"looks at tokens only":      {wrong{seq: true}, 14},
		"reads don't raise":         {wrong{reads: true}, 10},
		"reads are never refused":   {wrong{stale: true}, 17},
		"forgets fences in a crash": {wrong{forgets: true}, 12},
		"loses values in a crash":   {wrong{loses: true}, 14},
		"refuses and takes effect":  {wrong{pretends: true}, 18},
	} {
		t.Run(name, func(t *testing.T) {
			var found []history.Event
			caught := falsify(t, func(t *rapid.T) {
				w := newWorld(t, history.FencingOn, &model{wrong: c.wrong})
				events := w.run(t, all)
				if got := history.Judge(events); got.Verdict == history.Violated {
					found = events
					t.Fatalf("%q", got.Findings)
				}
			})
			require.True(t, caught, "no run was judged violated")
			require.LessOrEqual(t, len(found), c.most, "the shortest run found:\n%s", strings.Join(history.Trace(found), "\n"))

			rapid.Check(t, func(t *rapid.T) {
				w := newWorld(t, history.FencingOn, &model{wrong: c.wrong})
				got := history.Judge(w.run(t, all))
				if w.bad {
					require.NotEqual(t, history.Safe, got.Verdict)
				}
			})
		})
	}
}

// What is missing never makes a history better: without any one event a violated history is not safe; and without one
// that the verdict rests on, a safe history is not safe, and not violated either. That holds where every answer is told:
// of a write that was delivered again, to nobody's knowledge, nothing but its decision may tell.
func TestNoEventCanBeDropped(t *testing.T) {
	for _, f := range []history.Fencing{history.FencingOff, history.FencingWrites, history.FencingOn} {
		t.Run(string(f), rapid.MakeCheck(func(t *rapid.T) {
			w := newWorld(t, f, &model{})
			events := w.run(t, told)
			whole := history.Judge(events)
			for i, e := range events {
				got := history.Judge(slices.Delete(slices.Clone(events), i, i+1))
				switch whole.Verdict {
				case history.Violated:
					require.NotEqual(t, history.Safe, got.Verdict, "without event %d, %+v", i+1, e)
				case history.Safe:
					require.NotEqual(t, history.Violated, got.Verdict, "without event %d, %+v: %q", i+1, e, got.Findings)
					if e.Kind != history.KindFault && (e.Kind != history.KindReport || e.Name == history.Acquired || e.Name == history.Done) {
						require.Equal(t, history.Inconclusive, got.Verdict, "without event %d, %+v", i+1, e)
					}
				case history.Inconclusive:
				}
			}
		}))
	}
}

// falsify reports whether rapid finds a run in which prop fails. The runs are the same each time.
func falsify(t *testing.T, prop func(*rapid.T)) bool {
	t.Helper()
	for name, value := range map[string]string{
		"rapid.seed": "1", "rapid.nofailfile": "true", "rapid.checks": "2000",
		"rapid.shrinktime": "1h", // a run that is cut off isn't the shortest
	} {
		f := flag.Lookup(name)
		before := f.Value.String()
		require.NoError(t, f.Value.Set(value))
		defer func() { require.NoError(t, f.Value.Set(before)) }()
	}
	tb := &quiet{TB: t}
	done := make(chan struct{})
	go func() {
		defer close(done)
		rapid.Check(tb, prop)
	}()
	<-done
	return tb.failed
}

// quiet is a test whose failure is not its parent's.
type quiet struct {
	rapid.TB
	failed bool
}

func (q *quiet) Fatalf(string, ...any) { q.FailNow() }
func (q *quiet) Fatal(...any)          { q.FailNow() }
func (q *quiet) Errorf(string, ...any) { q.Fail() }
func (q *quiet) Error(...any)          { q.Fail() }
func (q *quiet) Fail()                 { q.failed = true }
func (q *quiet) Failed() bool          { return q.failed }
func (q *quiet) Logf(string, ...any)   {}
func (q *quiet) Log(...any)            {}

func (q *quiet) FailNow() {
	q.failed = true
	runtime.Goexit()
}
