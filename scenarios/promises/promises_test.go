package promises_test

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"html"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/promises"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// Hazards are run on the correct lock.
func TestMain(m *testing.M) {
	scenarios.Child(open(func(*simple) {}))
	flag.Parse()
	if err := flag.Set("test.parallel", "6"); err != nil { // most tests wait most of the time
		panic(err)
	}
	os.Exit(m.Run())
}

func kit(t *testing.T, open scenarios.Open) promises.Kit { return kitOn(t, 1, open) }

// kitOn has n servers that can lose their data, and whose clocks are ahead by what the locks add to theirs.
func kitOn(t *testing.T, n int, open scenarios.Open) promises.Kit {
	t.Helper()
	s := &scenarios.Service{Lock: "mine", NoRenew: true}
	k := promises.Kit{Service: s, Open: open}
	servers, err := testbed.StartRedisNodes(t.Context(), n, &testbed.Options{Provider: testbed.Embedded})
	require.NoError(t, err)
	for _, server := range servers {
		t.Cleanup(func() { require.NoError(t, server.Close()) })
		s.Server = server.String()
		s.Nodes = append(s.Nodes, scenarios.Node{Name: server.Name, Addr: server.Addr})
	}
	ahead := new(atomic.Int64)
	k.Open = func(ctx context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
		return open(context.WithValue(ctx, aheadKey{}, ahead), s)
	}
	s.Fault = func(ctx context.Context, st scenarios.Step) error {
		if st.Verb == "jump" {
			d, err := time.ParseDuration(st.Detail)
			ahead.Add(int64(d))
			return err
		}
		for _, server := range servers {
			if st.Target == scenarios.LockService || st.Target == server.Name {
				c := redis.NewClient(&redis.Options{Addr: server.Addr})
				if err := errors.Join(c.FlushAll(ctx).Err(), c.Close()); err != nil {
					return err
				}
			}
		}
		return nil
	}
	return k
}

type aheadKey struct{}

// typed returns typed nil leases with its errors, as simple adapters do, and neither to waiters that were cancelled.
type typed struct{ scenarios.Lock }

func (l typed) TryAcquire(ctx context.Context, key string) (scenarios.Lease, error) {
	return l.behind(l.Lock.TryAcquire(ctx, key))
}

func (l typed) Acquire(ctx context.Context, key string) (scenarios.Lease, error) {
	lease, err := l.Lock.Acquire(ctx, key)
	if ctx.Err() != nil {
		return nil, nil //nolint:nilnil,nilerr // as Consul's client does
	}
	return l.behind(lease, err)
}

func (typed) behind(l scenarios.Lease, err error) (scenarios.Lease, error) {
	if err != nil {
		return (*lease)(nil), err
	}
	return l, nil
}

func TestKept(t *testing.T) {
	t.Parallel()
	r := promises.Run(t, kit(t, func(ctx context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
		l, err := open(func(*simple) {})(ctx, s)
		return typed{l}, err
	}))
	for _, row := range r.Rows {
		require.Equal(t, !row.Excluded, row.Verdict == promises.Kept, "%s: %s", row.Promise, row.Why)
	}
}

func TestKeptByRenewal(t *testing.T) {
	t.Parallel()
	k := kitOn(t, 3, open(func(s *simple) { s.renewal = renewRight }))
	k.Service.NoRenew, k.Only = false, promises.Names() // the workers' lock doesn't renew
	for _, row := range promises.Run(t, k).Rows {
		want := promises.Kept
		if row.Promise == "DataLoss" { // it is on the first server only
			want = promises.Broken
		}
		require.Equal(t, want, row.Verdict, "%s: %s", row.Promise, row.Why)
	}
}

// Each broken promise is detected.
func TestBroken(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		set  func(*simple)
		want []string
	}{
		"granted to all":            {func(s *simple) { s.everybody = true }, []string{"Exclusive"}},
		"get, then set":             {func(s *simple) { s.getThenSet = true }, []string{"Exclusive"}},
		"and has no Until":          {func(s *simple) { s.getThenSet, s.endless = true, true }, []string{"Exclusive"}},
		"sweeps, then sets":         {func(s *simple) { s.sweeps = true }, []string{"Exclusive"}},
		"one for each client":       {func(s *simple) { s.single = true }, []string{"KeysIndependent"}},
		"one lock for all":          {func(s *simple) { s.oneLock = true }, []string{"KeysIndependent"}},
		"an opaque error":           {func(s *simple) { s.opaque = true }, []string{"Exclusive"}},
		"late until":                {func(s *simple) { s.lateUntil = true }, []string{"LeaseLasts"}},
		"counted from a wait":       {func(s *simple) { s.queued = true }, []string{"LeaseLasts"}},
		"no TTL":                    {func(s *simple) { s.noTTL = true }, []string{"LeaseLasts"}},
		"never ends":                {func(s *simple) { s.neverEnds = true }, []string{"LeaseLasts"}},
		"random tokens":             {func(s *simple) { s.randomTokens = true }, []string{"TokensIncrease"}},
		"prefixes are held":         {func(s *simple) { s.patternHeld = true }, []string{"KeysIndependent"}},
		"plain delete":              {func(s *simple) { s.plainDelete = true }, []string{"ReleaseRepeated", "ReleaseStale", "ReleaseLate"}},
		"one owner":                 {func(s *simple) { s.oneOwner = true }, []string{"ReleaseRepeated", "ReleaseStale"}},
		"two messages":              {func(s *simple) { s.claimsTwice = true }, []string{"EveryMessage"}},
		"a queue of the dead":       {func(s *simple) { s.queue = true }, []string{"WaitersCutOff"}},
		"deaf":                      {func(s *simple) { s.deaf = true }, []string{"EndsWithContext"}},
		"deaf Close":                {func(s *simple) { s.deafClose = true }, []string{"CloseEnds"}},
		"reentrant":                 {func(s *simple) { s.reentrant = true }, []string{"OneClient"}},
		"renews blindly":            {func(s *simple) { s.renewal = renewBlindly }, []string{"HolderReturns"}},
		"renews and takes":          {func(s *simple) { s.renewal = renewOverwrites }, []string{"HolderReturns"}},
		"renews in seconds":         {func(s *simple) { s.renewal = renewSeconds }, []string{"LeaseRenewed"}},
		"renews what it had":        {func(s *simple) { s.renewal = renewAsks }, []string{"HolderReturns"}},
		"renewed late":              {func(s *simple) { s.renewal = renewLate }, []string{"LeaseRenewed"}},
		"renews when closed":        {func(s *simple) { s.renewal = renewForEver }, []string{"CloseEnds"}},
		"ends with sessions":        {func(s *simple) { s.session = true }, []string{"HolderDisconnected"}},
		"any server":                {func(s *simple) { s.anyServer = true }, []string{"Partition"}},
		"sleeps for ever":           {func(s *simple) { s.asleep = true }, []string{"LeaseLasts"}},
		"locks itself out":          {func(s *simple) { s.mutexes = true }, []string{"AcquireLate", "EveryMessage"}},
		"a token after the grant":   {func(s *simple) { s.tokenAfter = true }, []string{"TokensIncrease"}},
		"a token before the wait":   {func(s *simple) { s.tokenFirst = true }, []string{"TokensIncrease"}},
		"a token for each client":   {func(s *simple) { s.tokenByOwner = true }, []string{"TokensIncrease"}},
		"a token that is forgotten": {func(s *simple) { s.tokenEnds = true }, []string{"TokensIncrease"}},
		"time as the token":         {func(s *simple) { s.clockToken = true }, []string{"ClockSkew"}},
		"spaces at the end":         {func(s *simple) { s.padded = true }, []string{"KeysIndependent"}},
		"no case":                   {func(s *simple) { s.folded = true }, []string{"KeysIndependent"}},
		"TTLs of 32 bits":           {func(s *simple) { s.short = true }, []string{"OddTTLs"}},
		"leaves goroutines":         {func(s *simple) { s.leaks = true }, []string{"NothingLeft"}},
		"a release asks first":      {func(s *simple) { s.asksFirst = true }, []string{"ReleaseLate"}},
		"waits for a message":       {func(s *simple) { s.subscribed = true }, []string{"WaiterServed"}},
		"releases too late":         {func(s *simple) { s.renewal, s.late = renewRight, true }, []string{"EndsWithContext"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			broken, servers := new(simple), 1
			if c.set(broken); broken.anyServer {
				servers = 3
			}
			k := kitOn(t, servers, open(c.set))
			if k.Service.NoRenew = broken.renewal == renewNever; !k.Service.NoRenew {
				k.TTL = 3 * time.Second // a stall must not end what is to be renewed
			}
			k.Only = c.want
			var r *promises.Report
			for range 3 { // an overloaded machine may hide a defect: a kept promise has only not been seen broken
				r = promises.Run(t, k)
				if !slices.ContainsFunc(r.Rows, func(row promises.Row) bool { return row.Verdict != promises.Broken }) {
					break
				}
			}
			require.Len(t, r.Rows, len(c.want))
			for _, row := range r.Rows {
				require.Equal(t, promises.Broken, row.Verdict, "%s: %s", row.Promise, row.Why)
			}
		})
	}
}

// Each of these is found by one promise only. A lease that is seen to end early has a TTL that a stall doesn't hide, and there only
// that promise is checked.
func TestBrokenOnce(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		nodes int
		ttl   time.Duration
		set   func(*simple)
		want  string
	}{
		"released again after a lost reply": {1, 0, func(s *simple) { s.releaseOnce = true }, "ReleaseRetried"},
		"whole tens of seconds":             {1, 10 * time.Second, func(s *simple) { s.tens = true }, "OddTTLs"},
		"microseconds are for ever":         {1, 0, func(s *simple) { s.shortForEver = true }, "OddTTLs"},
		"absolute time":                     {1, 5 * time.Second, func(s *simple) { s.absolute = true }, "ClockSkew"},
		"the token is the owner":            {1, 0, func(s *simple) { s.tokenOwner = true }, "DataLoss"},
		"one of three servers":              {3, 0, func(*simple) {}, "DataLoss"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := kitOn(t, c.nodes, open(c.set))
			k.TTL, k.Only = c.ttl, promises.Names()
			if c.ttl > 0 {
				k.Only = []string{c.want}
			}
			for _, row := range promises.Run(t, k).Rows {
				want := promises.Kept
				switch {
				case row.Promise == c.want:
					want = promises.Broken
				case row.Excluded:
					want = promises.Unchecked
				}
				require.Equal(t, want, row.Verdict, "%s: %s", row.Promise, row.Why)
				if row.Promise == c.want && name == "absolute time" {
					require.Regexp(t, "granted the lock .* an hour ahead; the lease .* hadn't ended .* an hour behind", row.Why)
				}
			}
		})
	}
}

type silent struct{ scenarios.Lock }

func (silent) Acquire(context.Context, string) (scenarios.Lease, error) { return nil, nil }
func (silent) Close() error                                             { return nil }

// A defect of the adapter is an error, not a broken promise.
func TestAdapter(t *testing.T) {
	t.Parallel()
	good := kit(t, open(func(*simple) {}))
	for want, change := range map[string]func(*promises.Kit){
		"Kit.Service and Kit.Open are required": func(k *promises.Kit) { k.Open = nil },
		"Kit.TTL -1s is negative":               func(k *promises.Kit) { k.TTL = -time.Second },
		"Service.Nodes is empty":                func(k *promises.Kit) { k.Service = &scenarios.Service{} },
		`Kit.Only: there is no promise or hazard "Exclusiv" of this lock; there are Exclusive, OneClient, `: func(k *promises.Kit) { k.Only = []string{"Exclusiv"} },
		"Lease.Fence is 1, and Service.NoTokens is true":                                                    func(k *promises.Kit) { k.Service.NoTokens = true },
		"the lock has returned neither a lease nor an error": func(k *promises.Kit) {
			k.Open = func(context.Context, scenarios.LockSpec) (scenarios.Lock, error) { return silent{}, nil }
		},
		"mine: open: got no lock and no error": func(k *promises.Kit) {
			k.Open = func(context.Context, scenarios.LockSpec) (scenarios.Lock, error) { return nil, nil } //nolint:nilnil // the defect
		},
		"mine: open: no such server": func(k *promises.Kit) {
			k.Open = func(context.Context, scenarios.LockSpec) (scenarios.Lock, error) {
				return nil, errors.New("no such server")
			}
		},
	} {
		k, service := good, *good.Service
		k.Service = &service
		change(&k)
		_, err := k.Check(t.Context())
		require.ErrorContains(t, err, want)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	enough := errors.New("the user has had enough")
	cancel(enough)
	_, err := good.Check(ctx)
	require.ErrorIs(t, err, enough)
}

// A constructor that ignores its context ends as a finding. What it returns later is closed.
func TestOpenHangs(t *testing.T) {
	t.Parallel()
	k := kit(t, nil)
	returns, closed := make(chan struct{}), make(chan struct{})
	k.Open = func(context.Context, scenarios.LockSpec) (scenarios.Lock, error) {
		<-returns
		return scenarios.Adapter{Shut: func() error { close(closed); return nil }}, nil
	}
	_, err := k.Check(t.Context())
	require.ErrorContains(t, err, "mine: open: Kit.Open hasn't returned 10s after its context had ended: it must return once that ends")
	close(returns)
	<-closed
}

// What came to no result is checked again, when nothing else runs.
func TestCheckedAgain(t *testing.T) {
	t.Parallel()
	var opened atomic.Int32
	k := kit(t, func(ctx context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
		if opened.Add(1) == 2 { // the first is the adapter's trial
			return nil, errors.New("out of order")
		}
		return open(func(*simple) {})(ctx, s)
	})
	k.Only = []string{"CloseEnds"}
	row := promises.Run(t, k).Rows[0]
	require.Equal(t, promises.Kept, row.Verdict, row.Why)
}

// With tokens no data is lost. What the lock and the store can't have isn't judged.
func TestHazards(t *testing.T) {
	file := filepath.Join(t.TempDir(), "mine.html")
	t.Setenv("FENCELAB_PROMISES", file)
	k := kit(t, open(func(*simple) {}))
	k.Only, k.Strict = []string{"CloseEnds", "PauseExceedsTTL", "WedgedHolder"}, true
	r := promises.Run(t, k)
	require.Equal(t, "mine breaks 0 of 1 promises. The lock alone lost data in 1 of 1 hazards; with its token checked on writes, in 0 of 1; "+
		"on reads and writes, in 0 of 1.", r.Headline())
	require.Equal(t, []string{"PauseExceedsTTL", "WedgedHolder"}, []string{r.Hazards[0].Promise, r.Hazards[1].Promise})
	require.Equal(t, promises.Kept, r.Hazards[0].Verdict)
	require.True(t, r.Hazards[1].Excluded, r.Hazards[1].Why)
	page, err := os.ReadFile(file)
	require.NoError(t, err)
	for _, want := range []string{r.Headline(), "CloseEnds", "alone: violated, token on writes: safe, on reads and writes: safe", "resume A\n", r.Hazards[1].Text} {
		require.Contains(t, string(page), html.EscapeString(want))
	}

	k.Service.NoTokens = true
	k.Open = func(ctx context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
		return open(func(s *simple) { s.endless = true })(ctx, s)
	}
	_, err = k.Check(t.Context())
	require.ErrorContains(t, err, "Lease.Fence is 1, and Service.NoTokens is true")
	k.Service.NoTokens = false
	r, err = k.Check(t.Context())
	require.NoError(t, err)
	require.Equal(t, "Lease.Until is the zero time: a worker can't tell when its lease must be presumed lost", r.NoHazards)
	require.Empty(t, r.Hazards)
}

// TestStrict fails in a process of its own.
func TestStrict(t *testing.T) {
	const env = "FENCELAB_TEST_STRICT"
	stalls := errors.New("out of order")
	for name, c := range map[string]struct {
		open scenarios.Open
		only []string
		want string // "": it passes
	}{
		"broken": {open(func(s *simple) { s.plainDelete = true }), []string{"CloseEnds", "ReleaseRepeated"}, ": ReleaseRepeated\n"},
		"no result": {func(ctx context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
			l, err := open(func(*simple) {})(ctx, s)
			if s.TTL == time.Second { // not of the trial
				err = stalls
			}
			return l, err
		}, []string{"CloseEnds"}, ": CloseEnds\n"},
		"ruled out": {open(func(*simple) {}), []string{"OddTTLs"}, ""},
	} {
		if os.Getenv(env) == name {
			k := kit(t, c.open)
			k.Only, k.Fixed, k.Strict = c.only, name == "ruled out", true
			promises.Run(t, k)
		}
		if os.Getenv(env) != "" {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestStrict$")
			cmd.Env = append(os.Environ(), env+"="+name)
			out, err := cmd.CombinedOutput()
			require.Equal(t, c.want == "", err == nil, "%s", out)
			if c.want != "" {
				require.Contains(t, string(out), "mine: Kit.Strict: these broke, or came to no result (see above)"+c.want)
			}
		})
	}
}

func TestRecord(t *testing.T) {
	file := filepath.Join(t.TempDir(), "reports.jsonl")
	t.Setenv("FENCELAB_PROMISES", file)
	k := kit(t, open(func(s *simple) { s.plainDelete = true }))
	k.Only, k.Module = []string{"ReleaseRepeated"}, "github.com/redis/go-redis/v9"
	want := []*promises.Report{promises.Run(t, k), promises.Run(t, k)}
	f, err := os.Open(file)
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	lines := json.NewDecoder(f)
	for _, w := range want {
		var got promises.Report
		require.NoError(t, lines.Decode(&got))
		require.Equal(t, *w, got)
		require.Equal(t, promises.Broken, got.Rows[0].Verdict)
		require.Regexp(t, `^github.com/redis/go-redis/v9 v9\.\d+`, got.Module)
	}
	require.False(t, lines.More())
}

// brittle is a lock that fails after a number of calls of TryAcquire.
type brittle struct {
	scenarios.Lock
	left *atomic.Int32
}

func (b brittle) TryAcquire(ctx context.Context, key string) (scenarios.Lease, error) {
	if b.left.Add(-1) < 0 {
		return nil, errors.New("out of order")
	}
	return b.Lock.TryAcquire(ctx, key)
}

func (b brittle) Acquire(ctx context.Context, key string) (scenarios.Lease, error) {
	if b.left.Load() < 0 {
		return nil, errors.New("out of order")
	}
	return b.Lock.Acquire(ctx, key)
}

// A lock that serves nobody breaks no promise.
func TestNobodyIsServed(t *testing.T) {
	t.Parallel()
	var left atomic.Int32
	left.Store(1) // the adapter's trial
	k := kit(t, func(ctx context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
		l, err := open(func(*simple) {})(ctx, s)
		return brittle{l, &left}, err
	})
	k.Only = []string{"AcquireLate"}
	row := promises.Run(t, k).Rows[0]
	require.Equal(t, promises.Unchecked, row.Verdict, row.Why)
	require.Equal(t, "a new client doesn't get a lock that nobody has touched: out of order", row.Why)
}

func TestReport(t *testing.T) {
	r := promises.Report{Lock: "mine", Rows: []promises.Row{
		{Promise: "Exclusive", Text: "one at a time", Verdict: promises.Kept},
		{Promise: "LeaseLasts", Text: "as long as it says", Verdict: promises.Broken, Why: "it was 1 s short"},
		{Promise: "TokensIncrease", Text: "always", Verdict: promises.Unchecked, Why: "it has none"},
	}, NoHazards: "there is no time"}
	require.Equal(t, `mine breaks 1 of 2 promises; 1 not checked.

Exclusive       keeps        one at a time
LeaseLasts      breaks       as long as it says
TokensIncrease  not checked  always
Hazards         not checked  what becomes of the data that the lock guards

LeaseLasts: it was 1 s short
TokensIncrease: it has none
Hazards: there is no time
`, r.String())

	r = promises.Report{Lock: "mine", Hazards: []promises.Row{
		{Promise: "Nap", Data: verdicts{history.FencingOff: history.Violated, history.FencingWrites: history.Violated, history.FencingOn: history.Safe}},
		{Promise: "Crash", Data: verdicts{history.FencingOff: history.Safe, history.FencingOn: history.Inconclusive}},
		{Promise: "Lag", Verdict: promises.Unchecked, Why: "there is no replica"},
	}}
	require.Equal(t, `mine breaks 0 of 0 promises. The lock alone lost data in 1 of 2 hazards; with its token checked on writes, in 1 of 1; on reads and writes, in 0 of 1.

Nap    alone: violated, token on writes: violated, on reads and writes: safe  
Crash  alone: safe, on reads and writes: inconclusive                         
Lag    not checked                                                            

Lag: there is no replica
`, r.String())
}

type verdicts = map[history.Fencing]history.Verdict
