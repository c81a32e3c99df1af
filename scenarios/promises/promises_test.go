package promises_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/promises"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func kit(t *testing.T, open scenarios.Open) promises.Kit {
	t.Helper()
	server, err := testbed.StartRedis(t.Context(), &testbed.Options{Provider: testbed.Embedded})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Close()) })
	return promises.Kit{
		Open: open,
		Service: &scenarios.Service{
			Lock: "mine", Server: server.String(), Nodes: []scenarios.Node{{Name: "server", Addr: server.Addr}}, NoRenew: true,
		},
	}
}

// simple is a plain, correct lock on one Redis; each field breaks it in one way.
type simple struct {
	redis *redis.Client
	ttl   time.Duration

	plainDelete  bool // a release deletes the key, whoever has it
	oneOwner     bool // all grants of a client have one owner
	lateUntil    bool // a lease is counted from its reply
	seconds      bool // TTLs are truncated to seconds
	noTTL        bool // leases never end
	patternHeld  bool // a key that begins with a held one is held
	randomTokens bool // tokens don't grow
	deaf         bool // calls don't end with their contexts
	deafClose    bool // Close releases what is held, and waits for it
	queue        bool // waiters queue, and leave only if the server replies
	opaque       bool // TryAcquire's error doesn't say that the lock is held
	neverTold    bool // a lease's context doesn't end
	claimsTwice  bool // an acquisition first marks the key in another message, without a TTL
	everybody    bool // TryAcquire always succeeds
	getThenSet   bool // a waiter checks the key, and then sets it
	oneLock      bool // all keys are one
	untold       bool // Until is zero
	owner        string
	held         []*lease
}

type lease struct {
	s      *simple
	key    string
	value  string
	fence  uint64
	until  time.Time
	ctx    context.Context
	cancel context.CancelFunc
}

var (
	acquire = redis.NewScript(`
		if redis.call('exists', KEYS[1]) == 1 then return 0 end
		redis.call('set', KEYS[1], ARGV[1], 'px', ARGV[2])
		return redis.call('incr', KEYS[1] .. ':fence')`)
	release = redis.NewScript(`if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0`)
)

// patient bounds a call whose context was cancelled: go-redis only uses deadlines.
const patient = 5 * time.Second

func open(set func(*simple)) scenarios.Open {
	return func(_ context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
		l := &simple{redis: redis.NewClient(&redis.Options{Addr: s.Addrs[0], MaxRetries: -1, ContextTimeoutEnabled: true, ReadTimeout: patient}), ttl: s.TTL, owner: uuid.NewString()}
		set(l)
		if l.deaf || l.deafClose { // nothing else ends a call
			l.redis.Options().ReadTimeout = -1
		}
		return l, nil
	}
}

func (s *simple) call(ctx context.Context) context.Context {
	if s.deaf {
		return context.WithoutCancel(ctx)
	}
	return ctx
}

func (s *simple) TryAcquire(ctx context.Context, key string) (scenarios.Lease, error) {
	value, ttl, start := uuid.NewString(), s.ttl, time.Now()
	if s.oneLock {
		key = "all"
	}
	if s.oneOwner {
		value = s.owner
	}
	if s.seconds {
		ttl = ttl.Truncate(time.Second)
	}
	if s.patternHeld {
		for i := 1; i < len(key); i++ {
			if n, err := s.redis.Exists(ctx, key[:i]).Result(); n > 0 || err != nil {
				return nil, errors.Join(dlock.ErrHeld, err)
			}
		}
	}
	if s.claimsTwice {
		if ok, err := s.redis.SetNX(ctx, key+":claim", value, 0).Result(); !ok || err != nil {
			return nil, errors.Join(dlock.ErrHeld, err)
		}
		defer s.redis.Del(ctx, key+":claim")
	}
	fence, err := acquire.Run(s.call(ctx), s.redis, []string{key}, value, (ttl + time.Millisecond - 1).Milliseconds()).Uint64()
	if err != nil {
		return nil, err
	}
	if fence == 0 && !s.everybody {
		if s.opaque {
			return nil, errors.New("try again")
		}
		return nil, dlock.ErrHeld
	}
	if s.noTTL {
		if err := s.redis.Persist(ctx, key).Err(); err != nil {
			return nil, err
		}
	}
	if s.lateUntil {
		start = time.Now()
	}
	if s.randomTokens {
		fence = 1 + uint64(time.Now().UnixNano()%1000)
	}
	l := &lease{s: s, key: key, value: value, fence: max(fence, 1), until: start.Add(s.ttl)}
	l.ctx, l.cancel = context.WithDeadline(context.WithoutCancel(ctx), l.until)
	if s.neverTold {
		l.ctx, l.cancel = context.WithCancel(context.WithoutCancel(ctx))
	}
	if s.deafClose {
		s.held = append(s.held, l)
	}
	return l, nil
}

func (s *simple) Acquire(ctx context.Context, key string) (scenarios.Lease, error) {
	if s.queue {
		return s.line(ctx, key)
	}
	for {
		if s.getThenSet {
			if n, err := s.redis.Exists(ctx, key).Result(); n > 0 || err != nil {
				time.Sleep(time.Millisecond)
				continue
			}
			time.Sleep(3 * time.Millisecond) // so that two waiters check before one sets
			if err := s.redis.Del(ctx, key).Err(); err != nil {
				return nil, err
			}
		}
		l, err := s.TryAcquire(ctx, key)
		if !errors.Is(err, dlock.ErrHeld) {
			return l, err
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// line waits in a queue, and stays in it if the server doesn't reply.
func (s *simple) line(ctx context.Context, key string) (scenarios.Lease, error) {
	me := uuid.NewString()
	if err := s.redis.RPush(ctx, key+":queue", me).Err(); err != nil {
		return nil, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 100*time.Millisecond)
		defer cancel()
		_ = s.redis.LRem(ctx, key+":queue", 1, me).Err()
	}()
	for {
		if first, err := s.redis.LIndex(ctx, key+":queue", 0).Result(); err != nil {
			return nil, err
		} else if first == me {
			if l, err := s.TryAcquire(ctx, key); !errors.Is(err, dlock.ErrHeld) {
				return l, err
			}
		}
		select {
		case <-time.After(10 * time.Millisecond):
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

func (s *simple) Close() error {
	if s.deafClose {
		for _, l := range s.held {
			_ = l.Release(context.Background())
		}
	}
	return s.redis.Close()
}

func (l *lease) Fence() uint64      { return l.fence }
func (l *lease) TTL() time.Duration { return l.s.ttl }
func (l *lease) Until() time.Time {
	if l.s.untold {
		return time.Time{}
	}
	return l.until
}
func (l *lease) Context() context.Context { return l.ctx }

func (l *lease) Release(ctx context.Context) error {
	l.cancel()
	if l.s.plainDelete {
		return l.s.redis.Del(ctx, l.key).Err()
	}
	n, err := release.Run(l.s.call(ctx), l.s.redis, []string{l.key}, l.value).Int()
	if err == nil && n == 0 {
		err = fmt.Errorf("%w: another has it", dlock.ErrLost)
	}
	return err
}

// typed returns typed nil leases with its errors, as simple adapters do.
type typed struct{ scenarios.Lock }

func (l typed) TryAcquire(ctx context.Context, key string) (scenarios.Lease, error) {
	return l.behind(l.Lock.TryAcquire(ctx, key))
}

func (l typed) Acquire(ctx context.Context, key string) (scenarios.Lease, error) {
	return l.behind(l.Lock.Acquire(ctx, key))
}

func (typed) behind(l scenarios.Lease, err error) (scenarios.Lease, error) {
	if err != nil {
		return (*lease)(nil), err
	}
	return l, nil
}

func TestKept(t *testing.T) {
	r := promises.Run(t, kit(t, func(ctx context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
		l, err := open(func(*simple) {})(ctx, s)
		return typed{l}, err
	}))
	for _, row := range r.Rows {
		require.Equal(t, promises.Kept, row.Verdict, "%s: %s", row.Promise, row.Why)
	}
}

// Each broken promise is detected.
func TestBroken(t *testing.T) {
	for name, c := range map[string]struct {
		set  func(*simple)
		want []string
	}{
		"granted to all":      {func(s *simple) { s.everybody = true }, []string{"Exclusive"}},
		"get, then set":       {func(s *simple) { s.getThenSet = true }, []string{"Exclusive"}},
		"and it doesn't tell": {func(s *simple) { s.getThenSet, s.untold = true, true }, []string{"Exclusive"}},
		"one lock for all":    {func(s *simple) { s.oneLock = true }, []string{"KeysIndependent"}},
		"an opaque error":     {func(s *simple) { s.opaque = true }, []string{"Exclusive"}},
		"late until":          {func(s *simple) { s.lateUntil = true }, []string{"LeaseLasts"}},
		"whole seconds":       {func(s *simple) { s.seconds = true }, []string{"LeaseLasts"}},
		"no TTL":              {func(s *simple) { s.noTTL = true }, []string{"LeaseLasts"}},
		"never told":          {func(s *simple) { s.neverTold = true }, []string{"LeaseLasts"}},
		"random tokens":       {func(s *simple) { s.randomTokens = true }, []string{"TokensIncrease"}},
		"prefixes are held":   {func(s *simple) { s.patternHeld = true }, []string{"KeysIndependent"}},
		"plain delete":        {func(s *simple) { s.plainDelete = true }, []string{"ReleaseRepeated", "ReleaseStale", "ReleaseLate"}},
		"one owner":           {func(s *simple) { s.oneOwner = true }, []string{"ReleaseRepeated", "ReleaseStale"}},
		"two messages":        {func(s *simple) { s.claimsTwice = true }, []string{"EveryMessage"}},
		"a queue of the dead": {func(s *simple) { s.queue = true }, []string{"WaitersCutOff"}},
		"deaf":                {func(s *simple) { s.deaf = true }, []string{"EndsWithContext"}},
		"deaf Close":          {func(s *simple) { s.deafClose = true }, []string{"CloseEnds"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := kit(t, open(c.set))
			k.Only = c.want
			r := promises.Run(t, k)
			require.Len(t, r.Rows, len(c.want))
			for _, row := range r.Rows {
				require.Equal(t, promises.Broken, row.Verdict, "%s: %s", row.Promise, row.Why)
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
		"Kit.Service and Kit.Open are required":          func(k *promises.Kit) { k.Open = nil },
		"Kit.TTL -1s is negative":                        func(k *promises.Kit) { k.TTL = -time.Second },
		"Service.Nodes is empty":                         func(k *promises.Kit) { k.Service = &scenarios.Service{} },
		`Kit.Only: there is no promise "Exclusiv"`:       func(k *promises.Kit) { k.Only = []string{"Exclusiv"} },
		"Lease.Fence is 1, and Service.NoTokens is true": func(k *promises.Kit) { k.Service.NoTokens = true },
		"the lock has returned neither a lease nor an error": func(k *promises.Kit) {
			k.Open = func(context.Context, scenarios.LockSpec) (scenarios.Lock, error) { return silent{}, nil }
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
		got.Rows[0].Took = w.Rows[0].Took
		require.Equal(t, *w, got)
		require.Equal(t, promises.Broken, got.Rows[0].Verdict)
		require.Regexp(t, `^github.com/redis/go-redis/v9 v9\.\d+`, got.Module)
	}
	require.False(t, lines.More())
	require.ErrorContains(t, json.Unmarshal([]byte(`{"rows": [{"verdict": "kept"}]}`), new(promises.Report)), `no verdict "kept"`)
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
		{Promise: "Exclusive", Text: "one at a time"},
		{Promise: "LeaseLasts", Text: "as long as it says", Verdict: promises.Broken, Why: "it was 1 s short"},
		{Promise: "TokensIncrease", Text: "always", Verdict: promises.Unchecked, Why: "it has none"},
	}}
	require.Equal(t, `mine breaks 1 of 2 promises; 1 not checked.

Exclusive       keeps        one at a time
LeaseLasts      breaks       as long as it says
TokensIncrease  not checked  always

breaks LeaseLasts: it was 1 s short
not checked TokensIncrease: it has none
`, r.String())
}
