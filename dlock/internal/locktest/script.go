package locktest

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/tools/txtar"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/wait"
	"github.com/fencelab/fencelab/internal/jitter"
)

var update = flag.Bool("update", false, "rewrite the requests in scripts, and the results of scripts that show nothing yet")

// Bench is what a script runs on.
type Bench struct {
	Open  func(w *Wire, options ...string) dlock.Backend
	Steps map[string]func(args ...string) (result string) // of the service's own
	Key   func(key string) string                         // the name of a script's key
	Text  func(err error) string                          // of an error that Scripts doesn't know; nil: all of it
}

// Scripts runs the scripts of a txtar file, each on a Bench of its own. A line is a step. It ends when all goroutines wait, and
// shows its result and the requests that each client sent:
//
//	a try k 10s    => #1 | a create lock 2*watch
//	b wait k       => | b create lock poll read 2*watch
//	advance 10s    => b wait k: #2 +10s | a unlock | b lock
//
// A client exists as soon as it is named, or by open CLIENT OPTION... Its steps:
//
//	try, wait K [TTL [OWNER]]  TryAcquire or Acquire, for 1h and a new owner unless given; K:1 is another grant of key K.
//	                           The result is the token's rank among the key's, with again if it is the
//	                           same owner's as before, and the lease's age
//	renew, release K [of C]    the grant, or client C's; release undoes a request that has no grant
//	cancel K, close            ends the context of the last such call; closes the Backend
//	lose, hold [every] KIND    the next request, or all until heal: of KIND, of KIND,KIND or of any, *
//	lose-, hold-, delay-, stall-reply [every] KIND [TIME]   a delay, but no stall, ends with the request's context
//	late, repeat KIND          the request is lost, and arrives on deliver; it arrives twice, and the first reply is lost
//	answer [every] KIND TEXT   not by the server
//	                           A KIND acquire/0 is one of acquire and of /0, too
//	cut, heal, deliver         loses all, also what is under way; ends the faults; sends what is held or late
//
// And advance TIME. If virtual is false, only results are checked, and scripts are skipped that advance or that have a step
// unknown to the Bench.
func Scripts(t *testing.T, file string, virtual bool, bench func(t *testing.T) Bench) {
	t.Helper()
	all, err := txtar.ParseFile(file)
	require.NoError(t, err)
	line := bytes.Count(all.Comment, []byte("\n"))
	for i, f := range all.Files {
		first := line + 2
		line += 1 + bytes.Count(f.Data, []byte("\n"))
		t.Run(f.Name, func(t *testing.T) {
			run := func(t *testing.T) {
				s := &script{
					T: t, Bench: bench(t), virtual: virtual, file: file, first: first, clients: map[string]*client{}, grants: map[string][]dlock.Grant{},
				}
				all.Files[i].Data = []byte(s.run(string(f.Data)))
			}
			if virtual {
				jitter.Seed(1)
				synctest.Test(t, run)
			} else {
				run(t)
			}
		})
	}
	if *update && virtual {
		require.NoError(t, os.WriteFile(file, txtar.Format(all), 0o644))
	}
}

type script struct {
	*testing.T
	Bench
	virtual bool
	file    string
	first   int // the file's line with the first step
	clients map[string]*client
	owners  int

	mu      sync.Mutex
	grants  map[string][]dlock.Grant // of a key
	line    int                      // of the step
	began   time.Time
	results []result
}

type client struct {
	*Wire
	dlock.Backend
	calls map[string]*call // the last, by key
}

type call struct {
	g        dlock.Grant // the request until it is granted
	cancel   context.CancelCauseFunc
	released bool
}

type result struct {
	after time.Duration
	text  string
}

func (s *script) run(text string) string {
	lines, width := strings.Split(strings.TrimSuffix(text, "\n"), "\n"), 0
	for _, l := range lines {
		step, _, _ := strings.Cut(l, " =>")
		switch name, _, _ := strings.Cut(step, " "); {
		case strings.HasPrefix(l, "#"):
		case !s.virtual && (name == "advance" || len(name) > 1 && name != "open" && s.Steps[name] == nil):
			s.Skip("not applicable: it needs virtual time")
		default:
			width = max(width, min(len(strings.TrimSpace(step)), 28))
		}
	}
	for i, l := range lines {
		step, shown, _ := strings.Cut(l, "=>")
		results, requests, _ := strings.Cut(shown, "| ")
		step, results = strings.TrimSpace(step), strings.TrimSpace(results)
		if step == "" || step[0] == '#' {
			continue
		}
		s.mu.Lock()
		s.line, s.began = i, time.Now()
		s.mu.Unlock()
		s.do(strings.Fields(step))
		came, sent := s.settle(results, requests)
		if !s.virtual || *update {
			requests = sent
		}
		if *update && !strings.Contains(text, "=>") {
			results = came
		}
		show := func(results, requests string) string {
			if requests != "" {
				results = strings.TrimSpace(results + " | " + requests)
			}
			if results == "" {
				return step
			}
			return fmt.Sprintf("%-*s => %s", width, step, results)
		}
		lines[i] = show(results, requests)
		if got := show(came, sent); got != lines[i] {
			s.Errorf("%s (-update accepts other requests):\n got %s\nwant %s", s.at(), got, lines[i])
		}
	}
	return strings.Join(lines, "\n") + "\n"
}

func (s *script) at() string { return fmt.Sprintf("%s:%d", s.file, s.first+s.line) }

func (s *script) do(f []string) {
	name, n, line := strings.Join(f[:min(3, len(f))], " "), len(f), s.line
	f = append(f, make([]string, 4)...)
	duration := func(text string) time.Duration {
		d, err := time.ParseDuration(text)
		require.NoError(s, err, s.at())
		return d
	}
	if own := s.Steps[f[0]]; own != nil {
		s.says(line, name, own(f[1:n]...))
		return
	}
	switch {
	case f[0] == "advance":
		wait.For(s.Context(), duration(f[1]))
		return
	case f[0] == "open":
		s.open(f[1], f[2:n])
		return
	case s.clients[f[0]] == nil:
		s.open(f[0], nil)
	}
	c := s.clients[f[0]]
	begin := func(l *call, do func(context.Context, dlock.Grant) error) {
		require.NotNil(s, l, "%s: %s of what?", s.at(), name)
		s.mu.Lock()
		defer s.mu.Unlock()
		ctx, cancel := context.WithCancelCause(s.Context())
		g := l.g
		l.cancel = cancel
		go func() { s.says(line, name, s.outcome(do(ctx, g))) }()
	}
	switch verb, key := f[1], f[2]; verb {
	case "try", "wait":
		s.owners++
		lock, _, _ := strings.Cut(key, ":")
		r := dlock.Request{Key: s.Key(lock), Owner: cmp.Or(f[4], fmt.Sprint(f[0], s.owners)), TTL: duration(cmp.Or(f[3], "1h"))}
		l := &call{g: dlock.Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL}}
		c.calls[key] = l
		acquire := c.TryAcquire
		if verb == "wait" {
			acquire = c.Acquire
		}
		begin(l, func(ctx context.Context, _ dlock.Grant) error {
			g, err := acquire(ctx, r)
			if err != nil {
				return err
			}
			return s.granted(l, g, f[0]+" "+key)
		})
	case "renew":
		begin(s.clients[cmp.Or(f[4], f[0])].calls[key], c.Renew)
	case "release":
		l := s.clients[cmp.Or(f[4], f[0])].calls[key]
		begin(l, func(ctx context.Context, g dlock.Grant) error {
			s.mu.Lock()
			l.released = true
			s.mu.Unlock()
			return c.Release(ctx, g)
		})
	case "close":
		begin(&call{}, func(context.Context, dlock.Grant) error { return c.Close() })
	case "cancel":
		c.calls[key].cancel(errCancelled)
	case "deliver":
		c.deliver()
	case "heal":
		require.NoError(s, c.heal(), s.at())
	default:
		require.Contains(s, faults, verb, s.at())
		every := key == "every"
		if every {
			f = slices.Delete(f, 2, 3)
		}
		c.inject(&fault{verb: verb, kinds: strings.Split(f[2], ","), arg: strings.TrimSpace(strings.Join(f[3:], " ")), every: every})
	}
}

func (s *script) open(name string, options []string) {
	c := &client{Wire: NewWire(), calls: map[string]*call{}}
	c.says = func(what, result string) { s.says(-1, name+" "+what, result) }
	c.Backend = s.Open(c.Wire, options...)
	s.clients[name] = c
	s.Cleanup(func() {
		assert.NoError(s, c.heal(), name)
		c.deliver()
		assert.NoError(s, c.Close())
	})
}

// granted returns what a grant shows, as an error.
func (s *script) granted(l *call, g dlock.Grant, name string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if g.Lost != nil {
		go func() {
			select {
			case <-g.Lost:
			case <-s.Context().Done():
				return
			}
			s.mu.Lock()
			released := l.released
			s.mu.Unlock()
			if !released {
				s.says(-1, name, "lost")
			}
		}()
	}
	all := s.grants[g.Key]
	text := fmt.Sprintf("#%d", len(all)+1)
	if len(all) > 0 {
		switch last := all[len(all)-1]; {
		case g.Fence == last.Fence && g.Owner == last.Owner:
			text = fmt.Sprintf("#%d again", len(all))
			all = all[:len(all)-1]
		case g.Fence <= last.Fence:
			text = "a token that doesn't grow"
		}
	}
	s.grants[g.Key] = append(all, g)
	if g.TTL != l.g.TTL {
		text += fmt.Sprintf(" for %v", g.TTL)
	}
	if age := time.Since(g.Start).Round(time.Microsecond); s.virtual && age > 0 {
		text += fmt.Sprintf(" %v old", age)
	}
	l.g = g
	return errors.New(text)
}

var outcomes = []struct {
	error
	text string
}{
	{dlock.ErrHeld, "held"},
	{dlock.ErrLost, "lost"},
	{dlock.ErrInvalid, "invalid"},
	{dlock.ErrClosed, "closed"},
	{ErrWire, "broken wire"},
}

// errCancelled is a cause such as a caller of other locks may have.
var errCancelled = fmt.Errorf("cancelled: %w, %w", dlock.ErrHeld, &net.OpError{Op: "dial", Err: io.EOF})

func (s *script) outcome(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, errCancelled):
		return "cancelled"
	}
	var is []string
	for _, o := range outcomes {
		if errors.Is(err, o.error) {
			is = append(is, o.text)
		}
	}
	if len(is) == 0 && s.Text != nil {
		return s.Text(err)
	}
	return cmp.Or(strings.Join(is, ", "), err.Error())
}

func (s *script) says(line int, step, text string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if text == "" {
		return
	}
	if line != s.line {
		text = step + ": " + text
	}
	r := result{text: text}
	if after := time.Since(s.began).Round(time.Microsecond); s.virtual && after > 0 {
		r = result{after, fmt.Sprintf("%s +%v", text, after)}
	}
	s.results = append(s.results, r)
}

// settle returns when all goroutines wait; on a real server when the expected results have come, or no longer can.
func (s *script) settle(results, requests string) (came, sent string) {
	for {
		if s.virtual {
			synctest.Wait()
		}
		came = s.came()
		done := s.virtual || came == results && s.haveSent(requests)
		if !done && time.Since(s.began) > Timeout {
			came, done = came+", or too few requests", true
		}
		if done {
			break
		}
		wait.For(s.Context(), time.Millisecond)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.results = nil
	var all []string
	for _, name := range slices.Sorted(maps.Keys(s.clients)) {
		if kinds := s.clients[name].sent(); kinds != "" {
			all = append(all, name+kinds)
		}
	}
	return came, strings.Join(all, " | ")
}

func (s *script) came() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	slices.SortFunc(s.results, func(a, b result) int { return cmp.Or(cmp.Compare(a.after, b.after), cmp.Compare(a.text, b.text)) })
	all := make([]string, len(s.results))
	for i, r := range s.results {
		all[i] = r.text
	}
	return strings.Join(all, "; ")
}

func (s *script) haveSent(requests string) bool {
	for part := range strings.SplitSeq(requests, "|") {
		f := strings.Fields(part)
		for _, kind := range f[min(1, len(f)):] {
			n := 1
			_, _ = fmt.Sscanf(strings.Replace(kind, "*", " ", 1), "%d %s", &n, &kind)
			if s.clients[f[0]].count(kind) < n {
				return false
			}
		}
	}
	return true
}
