package dlocktest_test

import (
	"cmp"
	"context"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
)

// TestRulesInStep compares the cases with the brackets in dlock.Backend's comment.
func TestRulesInStep(t *testing.T) {
	f, err := parser.ParseFile(token.NewFileSet(), "../backend.go", nil, parser.ParseComments)
	require.NoError(t, err)
	var doc string
	for _, d := range f.Decls {
		if g, ok := d.(*ast.GenDecl); ok && g.Tok == token.TYPE && g.Specs[0].(*ast.TypeSpec).Name.Name == "Backend" {
			doc = g.Doc.Text()
		}
	}
	want := map[string]int{}
	number := regexp.MustCompile(`^\s*(\d+)\. `)
	names := regexp.MustCompile(`\[([A-Z][A-Za-z]+(?:,\s+[A-Z][A-Za-z]+)*)\]`)
	var rules []string
	for line := range strings.Lines(doc) {
		if number.MatchString(line) {
			rules = append(rules, "")
		}
		if len(rules) > 0 {
			rules[len(rules)-1] += line
		}
	}
	for i, r := range rules {
		require.Equal(t, strconv.Itoa(i+1), number.FindStringSubmatch(r)[1], "rules are numbered in order")
		for _, m := range names.FindAllStringSubmatch(r, -1) {
			for name := range strings.FieldsFuncSeq(m[1], func(r rune) bool { return strings.ContainsRune(", \n", r) }) {
				if !strings.HasPrefix(name, "Err") && name != "CheckKey" {
					want[name] = i + 1
				}
			}
		}
	}
	require.Equal(t, want, dlocktest.Cases())
}

// broken are backends that each break a rule. The cases in want must fail, those in may can; all others pass.
var broken = []struct {
	name      string
	brk       func(b *breaker)
	want, may []string
}{
	{"not at all", func(*breaker) {}, nil, nil},
	{"release without owner check", func(b *breaker) {
		b.release = func(ctx context.Context, g dlock.Grant) error { return b.Backend.Release(ctx, b.asHolder(g)) }
	}, []string{"ReleaseByNonOwner"}, []string{
		"ReleaseRepeated", "WaitersCutOff",
		// A clean-up after the key became another's does harm only without the check.
		"WaiterCancelled", "WaiterOutlivesHolder", "AcquireReplyLost", "AcquireRequestLost", "ReleaseReplyLost", "ReleaseRequestLost",
	}},
	{"release checks, then deletes", func(b *breaker) {
		b.release = func(ctx context.Context, g dlock.Grant) error {
			if err := b.Backend.Renew(ctx, dlock.Grant{Key: g.Key, Owner: g.Owner, TTL: cmp.Or(g.TTL, time.Hour)}); err != nil {
				return err
			}
			return b.Backend.Release(ctx, b.asHolder(g))
		}
	}, []string{"ReleaseAtomic"}, nil},
	{"renew without owner check", func(b *breaker) {
		b.renew = func(ctx context.Context, g dlock.Grant) error { return b.Backend.Renew(ctx, b.asHolder(g)) }
	}, []string{"RenewByNonOwner"}, nil},
	{"renew checks, then extends", func(b *breaker) {
		b.renew = func(ctx context.Context, g dlock.Grant) error {
			if err := b.Backend.Renew(ctx, g); err != nil {
				return err
			}
			return b.Backend.Renew(ctx, b.asHolder(g))
		}
	}, []string{"RenewAtomic"}, nil},
	{"renew does not extend", func(b *breaker) {
		b.renew = func(ctx context.Context, g dlock.Grant) error {
			g.TTL = max(time.Until(g.Start.Add(g.TTL)), 1)
			return b.Backend.Renew(ctx, g)
		}
	}, []string{"RenewExtends"}, []string{"TTLNotRounded"}},
	{"token minted after the grant", func(b *breaker) {
		b.granted = func(g *dlock.Grant) {
			b.mu.Lock()
			defer b.mu.Unlock()
			if b.tokens[g.Owner] == 0 {
				b.minted++
				b.tokens[g.Owner] = b.minted
			}
			g.Fence = b.tokens[g.Owner]
		}
	}, []string{"TokenMintedWithGrant"}, nil},
	{"token starts again after a release", func(b *breaker) {
		b.granted = func(g *dlock.Grant) { g.Fence -= b.base(g.Key) }
		b.release = func(ctx context.Context, g dlock.Grant) error {
			err := b.Backend.Release(ctx, g)
			if err == nil {
				b.rebase(g.Key, g.Fence)
			}
			return err
		}
	}, []string{"TokensIncrease"}, nil},
	{"token starts again after an expiry", func(b *breaker) {
		var last time.Time
		b.granted = func(g *dlock.Grant) {
			if !last.IsZero() && g.Start.Sub(last) >= time.Second {
				b.rebase(g.Key, g.Fence-1)
			}
			last = g.Start
			g.Fence -= b.base(g.Key)
		}
	}, []string{"TokensSurviveExpiry"}, nil},
	{"start taken after the reply", func(b *breaker) {
		b.granted = func(g *dlock.Grant) { g.Start = time.Now() }
	}, []string{"StartBeforeRequest"}, nil},
	{"start of a handed-over grant taken when it is known", func(b *breaker) {
		b.acquire = func(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
			g, err := b.Backend.TryAcquire(ctx, r)
			if errors.Is(err, dlock.ErrHeld) {
				g, err = b.Backend.Acquire(ctx, r)
				g.Start = time.Now()
			}
			return g, err
		}
	}, []string{"StartBeforeRequest"}, nil},
	{"handed over for less than it says", func(b *breaker) {
		b.acquire = func(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
			g, err := b.Backend.TryAcquire(ctx, r)
			if errors.Is(err, dlock.ErrHeld) {
				g, err = b.Backend.Acquire(ctx, dlock.Request{Key: r.Key, Owner: r.Owner, TTL: r.TTL / 20, OnHeld: r.OnHeld})
				g.Provisional = r.TTL / 2
			}
			return g, err
		}
	}, []string{"StartBeforeRequest"}, nil},
	{"repeated request restarts nothing", func(b *breaker) {
		b.try = func(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
			if g, ok := b.holds(r); ok {
				g.Start = time.Now()
				return g, nil
			}
			return b.Backend.TryAcquire(ctx, r)
		}
	}, []string{"RetrySameOwner"}, nil},
	{"repeated request waits for itself", func(b *breaker) {
		b.try = func(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
			if _, ok := b.holds(r); ok {
				return dlock.Grant{}, dlock.ErrHeld
			}
			return b.Backend.TryAcquire(ctx, r)
		}
	}, []string{"RetrySameOwner", "AcquireReplyLost"}, nil},
	{"cancelled waiter stays in the queue", func(b *breaker) {
		b.acquire = func(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
			return b.leaves(ctx, r, func() bool { return false })
		}
	}, []string{"WaiterCancelled"}, []string{"WaitersCutOff"}},
	{"cause hidden", func(b *breaker) {
		b.acquire = func(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
			g, err := b.Backend.Acquire(ctx, r)
			if ctx.Err() != nil {
				err = errors.New("acquire failed")
			}
			return g, err
		}
	}, []string{"WaiterCancelled"}, nil},
	{"waiter sleeps through a release", func(b *breaker) {
		b.acquire = func(ctx context.Context, r dlock.Request) (dlock.Grant, error) { return b.polls(ctx, r, time.Hour) }
	}, []string{"WaiterWakes", "WaiterOutlivesHolder"}, []string{"*"}},
	{"TTL rounded", func(b *breaker) {
		b.ttl = func(d time.Duration) time.Duration { return d.Truncate(time.Millisecond) }
	}, []string{"TTLNotRounded"}, nil},
	{"renewal for any TTL", func(b *breaker) {
		b.renew = func(ctx context.Context, g dlock.Grant) error {
			g.TTL = max(g.TTL, time.Second)
			return b.Backend.Renew(ctx, g)
		}
	}, []string{"TTLNotRounded"}, nil},
	{"lease ends early", func(b *breaker) {
		b.ttl = func(d time.Duration) time.Duration { return d / 2 }
	}, []string{"WaiterOutlivesHolder"}, []string{"StartBeforeRequest", "RetrySameOwner", "RenewExtends", "TTLNotRounded"}},
	{"grant tied to ctx", func(b *breaker) {
		b.bound = true
	}, []string{"GrantOutlivesContext"}, []string{"*"}},
	{"two at once", func(b *breaker) {
		b.key = func(r dlock.Request) string { return r.Key + r.Owner }
	}, []string{"Exclusive", "TryHeld"}, []string{"*"}},
	{"grants although it cannot know", func(b *breaker) {
		b.try = func(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
			g, err := b.Backend.TryAcquire(ctx, r)
			if errors.Is(err, errLink) {
				return dlock.Grant{Key: r.Key, Owner: r.Owner, Fence: 1, TTL: r.TTL, Start: time.Now()}, nil
			}
			return g, err
		}
	}, []string{"Unreachable", "AcquireReplyLost", "AcquireRequestLost"}, nil},
	{"waits while the server refuses", func(b *breaker) {
		b.acquire = func(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
			for {
				g, err := b.Backend.Acquire(ctx, r)
				if !errors.Is(err, errRefused) || ctx.Err() != nil {
					return g, err
				}
				time.Sleep(time.Second)
			}
		}
	}, []string{"Refused"}, nil},
	{"a refused renewal is a loss", func(b *breaker) {
		b.renew = insteadOf(errRefused, b.Backend.Renew, dlock.ErrLost)
	}, []string{"Refused"}, nil},
	{"a refused release is done", func(b *breaker) {
		b.release = insteadOf(errRefused, b.Backend.Release, nil)
	}, []string{"Refused"}, nil},
	{"release knows what it cannot know", func(b *breaker) {
		b.release = insteadOf(errLink, b.Backend.Release, dlock.ErrLost)
	}, []string{"Unreachable", "ReleaseReplyLost", "ReleaseRequestLost"}, nil},
	{"renew knows what it cannot know", func(b *breaker) {
		b.renew = insteadOf(errLink, b.Backend.Renew, dlock.ErrLost)
	}, []string{"Unreachable", "RenewReplyLost", "RenewRequestLost"}, nil},
	{"release says that it has tried", func(b *breaker) {
		b.release = insteadOf(errLink, b.Backend.Release, nil)
	}, []string{"Unreachable", "ReleaseReplyLost", "ReleaseRequestLost"}, nil},
	{"undo needs a grant", func(b *breaker) {
		b.release = func(ctx context.Context, g dlock.Grant) error {
			if g.Fence == 0 {
				return dlock.ErrLost
			}
			return b.Backend.Release(ctx, g)
		}
	}, []string{"AcquireReplyLost"}, nil},
	{"keys without case", func(b *breaker) {
		b.key = func(r dlock.Request) string { return strings.ToLower(r.Key) }
	}, []string{"KeysIndependent"}, nil},
	{"keys cut at a brace", func(b *breaker) {
		b.key = func(r dlock.Request) string { s, _, _ := strings.Cut(r.Key, "}"); return s }
	}, []string{"AwkwardKeys"}, nil},
	{"cut-off waiter stays in the queue", func(b *breaker) {
		b.acquire = func(ctx context.Context, r dlock.Request) (dlock.Grant, error) { return b.leaves(ctx, r, b.reachable) }
	}, []string{"WaitersCutOff"}, nil},
	{"each waiter that is gone has its turn", func(b *breaker) {
		b.acquire = func(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
			g, err := b.Backend.TryAcquire(ctx, r)
			if !errors.Is(err, dlock.ErrHeld) {
				return g, err
			}
			turn := dlock.Request{Key: r.Key, Owner: r.Owner, TTL: min(r.TTL, time.Second), OnHeld: r.OnHeld}
			g, err = b.leaves(ctx, turn, func() bool { return false })
			if err == nil && turn.TTL < r.TTL {
				g.Start = time.Now()
				err = b.Backend.Renew(ctx, dlock.Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL})
			}
			return g, err
		}
	}, []string{"WaitersCutOff"}, nil},
	{"waiter polls", func(b *breaker) {
		b.acquire = func(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
			return b.polls(ctx, r, time.Millisecond)
		}
	}, []string{"WaiterIsTold"}, nil},
	{"doesn't say that the key is held", func(b *breaker) {
		b.acquire = func(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
			r.OnHeld = nil
			return b.Backend.Acquire(ctx, r)
		}
	}, []string{"WaiterCancelled"}, nil},
	{"says that a free key is held", func(b *breaker) {
		b.acquire = func(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
			r.NoteHeld()
			return b.Backend.Acquire(ctx, r)
		}
	}, []string{"WaiterCancelled"}, nil},
	{"release frees what its client holds", func(b *breaker) {
		mine := map[string]string{}
		b.granted = func(g *dlock.Grant) {
			b.mu.Lock()
			defer b.mu.Unlock()
			mine[g.Key] = g.Owner
		}
		b.release = func(ctx context.Context, g dlock.Grant) error {
			err := b.Backend.Release(ctx, g)
			b.mu.Lock()
			g.Owner = mine[g.Key]
			b.mu.Unlock()
			if errors.Is(err, dlock.ErrLost) {
				err = b.Backend.Release(ctx, g)
			}
			return err
		}
	}, []string{"ReleaseRepeated"}, nil},
	{"call waits for its answer for ever", func(b *breaker) {
		b.try = func(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
			if ctx.Err() != nil {
				return dlock.Grant{}, context.Cause(ctx)
			}
			return b.Backend.TryAcquire(context.WithoutCancel(ctx), r)
		}
	}, []string{"Silent"}, nil},
	{"waits on after Close", func(b *breaker) {
		b.acquire = func(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
			g, err := b.Backend.Acquire(ctx, r)
			if errors.Is(err, dlock.ErrClosed) {
				time.Sleep(time.Second)
			}
			return g, err
		}
	}, []string{"Closed"}, nil},
	{"works after Close", func(b *breaker) { b.open = true }, []string{"Closed"}, nil},
}

type breaker struct {
	dlock.Backend
	*books

	acquire, try   func(context.Context, dlock.Request) (dlock.Grant, error)
	renew, release func(context.Context, dlock.Grant) error
	granted        func(*dlock.Grant)
	ttl            func(time.Duration) time.Duration
	key            func(dlock.Request) string
	bound, open    bool
}

type books struct {
	mu     sync.Mutex
	last   map[string]dlock.Grant // by key
	tokens map[string]uint64      // by owner
	bases  map[string]uint64      // by key
	minted uint64
}

func breaking(brk func(*breaker)) func() func(dlock.Backend) dlock.Backend {
	return func() func(dlock.Backend) dlock.Backend {
		bk := &books{last: map[string]dlock.Grant{}, tokens: map[string]uint64{}, bases: map[string]uint64{}}
		return func(inner dlock.Backend) dlock.Backend {
			b := &breaker{Backend: inner, books: bk}
			b.acquire, b.try, b.renew, b.release = inner.Acquire, inner.TryAcquire, inner.Renew, inner.Release
			b.granted = func(*dlock.Grant) {}
			b.ttl = func(d time.Duration) time.Duration { return d }
			b.key = func(r dlock.Request) string { return r.Key }
			brk(b)
			return b
		}
	}
}

func insteadOf(this error, f func(context.Context, dlock.Grant) error, instead error) func(context.Context, dlock.Grant) error {
	return func(ctx context.Context, g dlock.Grant) error {
		err := f(ctx, g)
		if errors.Is(err, this) {
			return instead
		}
		return err
	}
}

func (b *breaker) polls(ctx context.Context, r dlock.Request, every time.Duration) (dlock.Grant, error) {
	for {
		g, err := b.Backend.TryAcquire(ctx, r)
		if !errors.Is(err, dlock.ErrHeld) {
			return g, err
		}
		r.NoteHeld()
		select {
		case <-ctx.Done():
			return g, context.Cause(ctx)
		case <-time.After(every):
		}
	}
}

// leaves is Acquire by a waiter that leaves the queue after ctx's end only if it can.
func (b *breaker) leaves(ctx context.Context, r dlock.Request, can func() bool) (dlock.Grant, error) {
	if ctx.Err() != nil {
		return dlock.Grant{}, context.Cause(ctx)
	}
	type reply struct {
		g   dlock.Grant
		err error
	}
	c := make(chan reply, 2)
	stay, leave := context.WithCancelCause(context.WithoutCancel(ctx))
	context.AfterFunc(ctx, func() {
		if can() {
			leave(context.Cause(ctx))
			return
		}
		c <- reply{err: context.Cause(ctx)}
	})
	go func() {
		g, err := b.Backend.Acquire(stay, r)
		c <- reply{g, err}
	}()
	rep := <-c
	return rep.g, rep.err
}

func (b *breaker) reachable() bool {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	return !errors.Is(b.Backend.Renew(ctx, dlock.Grant{Key: "probe", Owner: "probe", TTL: time.Hour}), errLink)
}

func (b *breaker) asHolder(g dlock.Grant) dlock.Grant {
	b.mu.Lock()
	defer b.mu.Unlock()
	g.Owner = b.last[g.Key].Owner
	return g
}

func (b *breaker) holds(r dlock.Request) (dlock.Grant, bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	g := b.last[r.Key]
	return g, g.Owner == r.Owner && g.Fence != 0
}

func (b *breaker) base(key string) uint64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.bases[key]
}

func (b *breaker) rebase(key string, by uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.bases[key] += by
}

func (b *breaker) ask(
	ctx context.Context, r dlock.Request, f func(context.Context, dlock.Request) (dlock.Grant, error),
) (dlock.Grant, error) {
	below := dlock.Request{Key: b.key(r), Owner: r.Owner, TTL: b.ttl(r.TTL), OnHeld: r.OnHeld}
	g, err := f(ctx, below)
	if err == nil {
		g.Key, g.TTL = r.Key, r.TTL
		b.granted(&g)
	}
	if err == nil || errors.Is(err, errLink) { // it may be the holder now
		b.mu.Lock()
		b.last[r.Key] = dlock.Grant{Key: r.Key, Owner: r.Owner, Fence: g.Fence, TTL: r.TTL, Start: g.Start}
		b.mu.Unlock()
	}
	if err != nil {
		return g, err
	}
	if b.bound {
		context.AfterFunc(ctx, func() { _ = b.Backend.Release(context.WithoutCancel(ctx), g) })
	}
	return g, nil
}

func (b *breaker) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.ask(ctx, r, b.acquire)
}

func (b *breaker) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.ask(ctx, r, b.try)
}

func (b *breaker) Renew(ctx context.Context, g dlock.Grant) error {
	g.Key = b.key(dlock.Request{Key: g.Key, Owner: g.Owner})
	return b.renew(ctx, g)
}

func (b *breaker) Release(ctx context.Context, g dlock.Grant) error {
	g.Key = b.key(dlock.Request{Key: g.Key, Owner: g.Owner})
	return b.release(ctx, g)
}

func (b *breaker) Close() error {
	if b.open {
		return nil
	}
	return b.Backend.Close()
}

const brokenEnv = "DLOCKTEST_BROKEN"

// TestBroken uses child processes, since they fail.
func TestBroken(t *testing.T) {
	failed := regexp.MustCompile(`(?m)^\s*--- FAIL: TestChild/(\w+) `)
	for _, b := range broken {
		t.Run(b.name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestChild$", "-test.v", "-test.timeout=10m")
			cmd.Env = append(os.Environ(), brokenEnv+"="+b.name)
			out, err := cmd.CombinedOutput()
			require.Equal(t, len(b.want) == 0, err == nil, "%s", out)
			got := map[string]bool{}
			for _, m := range failed.FindAllStringSubmatch(string(out), -1) {
				got[m[1]] = true
				require.Regexp(t, `rule \d+ of dlock\.Backend, `+m[1]+`: `, string(out), "a failure prints its rule")
			}
			for _, name := range b.want {
				require.True(t, got[name], "%s didn't see it\n%s", name, out)
			}
			for name := range got {
				seen := slices.Contains(b.want, name) || slices.Contains(b.may, name) || slices.Contains(b.may, "*")
				require.True(t, seen, "%s failed, and has nothing to do with it\n%s", name, out)
			}
			require.NotContains(t, string(out), "DATA RACE")
			if b.name == "two at once" { // a case goes on
				require.Greater(t, strings.Count(string(out), "rule 1 of dlock.Backend, Exclusive: "), 1, "%s", out)
			}
		})
	}
}

const neverReturns = "never returns"

func TestNeverReturns(t *testing.T) {
	t.Parallel()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestChild$/^TryHeld$", "-test.timeout=40s")
	cmd.Env = append(os.Environ(), brokenEnv+"="+neverReturns)
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Regexp(t, `(?s)rule 4 of dlock\.Backend, TryHeld: .*TryAcquire: the call hasn't returned 10s after its context had ended`, string(out))
	require.NotContains(t, string(out), "panic: ")
}

func TestChild(t *testing.T) {
	name := os.Getenv(brokenEnv)
	if name == neverReturns {
		dlocktest.Run(t, dlocktest.Harness{New: memory(breaking(func(b *breaker) {
			b.try = func(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
				g, err := b.Backend.TryAcquire(ctx, r)
				if errors.Is(err, dlock.ErrHeld) {
					select {}
				}
				return g, err
			}
		}))})
	}
	for _, b := range broken {
		if b.name == name {
			dlocktest.Run(t, dlocktest.Harness{New: memory(breaking(b.brk)), Virtual: true})
		}
	}
}
