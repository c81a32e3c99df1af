package promises_test

import (
	"context"
	"encoding/json"
	"errors"
	"hash/crc32"
	"html"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/jitter"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/promises"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func TestMain(m *testing.M) {
	scenarios.Child(open(func(*simple) {}))
	debug.SetGCPercent(400)
	os.Exit(m.Run())
}

func kit(t *testing.T, open scenarios.Open) promises.Kit {
	t.Helper()
	server, err := testbed.StartRedis(t.Context(), &testbed.Options{Provider: testbed.Embedded})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, server.Close()) })
	return promises.Kit{Open: open, Service: &scenarios.Service{
		Lock: "mine", NoRenew: true, Server: server.String(), Nodes: []scenarios.Node{{Name: server.Name, Addr: server.Addr}},
	}}
}

// typed returns typed nil leases with errors, as simple adapters do, and neither a lease nor an error to a cancelled waiter.
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
	virtually(t, 1, func(ctx context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
		l, err := open(has("Close frees", "a refused try says held", "keeps goroutines"))(ctx, s)
		return typed{l}, err
	}, func(t *testing.T, k promises.Kit) {
		r := promises.Run(t, k)
		requireBroken(t, r)
		facts := map[string]string{
			"AcquireLate": "an acquisition that was refused returned that another client held the lock, which nobody had touched",
			"DataLoss": "after the servers had lost their data the next token was 1, and the one before 1: " +
				"a store that checks tokens will refuse later holders until somebody raises the lock's counter",
			"CloseEnds":    "Close freed the lock while its holder's lease lasted: first release it, or wait for its end",
			"EveryMessage": "after TryAcquire's connection broke instead of its reply number 1 its lock was held: until the end of a lease that nobody knew of",
		}
		for _, row := range r.Rows {
			if !row.Excluded {
				require.Equal(t, facts[row.Promise], row.Why, row.Promise)
			}
		}
	})
}

func TestMild(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		set           func(*simple)
		promise, fact string
	}{
		"has a fixed TTL":         {func(*simple) {}, "WaiterServed", ""},
		"polls without a pause":   {func(s *simple) { s.polls = time.Millisecond }, "WaiterServed", "a waiter sent at least 200 messages in a second"},
		"backs off for four TTLs": {func(s *simple) { s.backsOff = 4 * time.Second }, "WaiterServed", ""},
		"is slow three times":     {func(s *simple) { s.tryWaits = 3 }, "Exclusive", ""},
		"gives up after a while": {
			func(s *simple) { s.acquires = givesUp }, "WaiterServed", "an acquisition of a held lock returned before its context ended: dlock: held by another owner",
		},
		"grants to one whose context has ended": {func(s *simple) {
			has("renews")(s)
			s.acquires = func(ctx context.Context, s *simple, key string, ask asking) (scenarios.Lease, error) {
				l, err := ask(ctx)
				for end := time.Now().Add(time.Second); err != nil && ctx.Err() != nil && time.Now().Before(end); time.Sleep(time.Millisecond) {
					l, err = s.try(context.WithoutCancel(ctx), key)
				}
				return l, err
			}
		}, "WaiterServed", ""},
		"time as the token": {
			func(s *simple) { s.epoch = 946684800 }, "TokensIncrease",
			"the token 946684801 is a clock's time in units of 1s: if the clock is set back, later holders may get smaller ones",
		},
		"has an old session": {func(s *simple) { has("no Until")(s); s.tryCalls = then(inSession) }, "LeaseLasts", ""},
		"and odd TTLs":       {func(s *simple) { has("no Until")(s); s.tryCalls = then(inSession) }, "OddTTLs", ""},
		"says nothing": {
			has("a release says nothing"), "EndsWithContext",
			"a release that reached no server returned no error: the lock may stay held for the rest of its lease",
		},
		"nor after its lease": {
			has("a release says nothing"), "ReleaseStale", "the release of a lease that had run out, and whose lock another " +
				"client had had since, returned no error: only the lease's context tells its holder",
		},
		"fails while it connects again": {
			func(s *simple) { has("a majority")(s); s.releaseStops = 1 }, "Partition", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mild, servers := new(simple), 1
			if c.set(mild); mild.is("a majority") {
				servers = 3
			}
			virtually(t, servers, open(c.set), func(t *testing.T, k promises.Kit) {
				k.Only, k.Fixed, k.Service.NoRenew = []string{c.promise}, name == "has a fixed TTL", !mild.is("renews")
				row := promises.Run(t, k).Rows[0]
				require.Equal(t, promises.Kept, row.Verdict, row.Why)
				require.Equal(t, c.fact, row.Why)
			})
		})
	}
}

// stalling is how long each call takes, a release also, and when an Acquire that met no servers retries, if it does; and how
// often the servers are away, and for how long.
type stalling struct{ takes, releases, again, every, away time.Duration }

func (c stalling) set(s *simple) {
	s.polls = 90 * time.Millisecond
	start, away := time.Now().Truncate(24*time.Hour), errors.New("no leader")
	stall := func(ctx context.Context, d time.Duration) error {
		if err := jitter.Sleep(ctx, d); err != nil {
			return err
		}
		if time.Since(start)%c.every > c.every-c.away {
			return away
		}
		return nil
	}
	s.tryCalls = func(ctx context.Context, _ *simple, _ string, ask asking) (scenarios.Lease, error) {
		if err := stall(ctx, c.takes); err != nil {
			return nil, err
		}
		return ask(ctx)
	}
	s.acquires = func(ctx context.Context, s *simple, key string, ask asking) (scenarios.Lease, error) {
		l, err := s.tryCalls(ctx, s, key, ask)
		for c.again > 0 && errors.Is(err, away) { // it met no servers
			_ = jitter.Sleep(ctx, c.again)
			l, err = s.tryCalls(ctx, s, key, ask)
		}
		return l, err
	}
	s.releases = func(ctx context.Context, _ *lease, release func() error) error {
		if err := stall(ctx, c.takes+c.releases); err != nil {
			return err
		}
		return release()
	}
}

func TestStalls(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]stalling{
		"slow releases":     {0, 800 * time.Millisecond, 0, time.Hour, 0},
		"slow":              {3 * time.Second, 0, 0, time.Hour, 0},
		"very slow":         {9 * time.Second, 0, 0, time.Hour, 0},
		"away now and then": {time.Second, 0, 0, 31 * time.Second, 7 * time.Second},
		"patient":           {0, 0, 9700 * time.Millisecond, 17 * time.Second, 12500 * time.Millisecond},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			for _, promise := range promises.Names() {
				virtually(t, 1, open(c.set), func(t *testing.T, k promises.Kit) {
					k.Only = []string{promise}
					r, err := k.Check(t.Context())
					require.NoError(t, err)
					require.NotEqual(t, promises.Broken, r.Rows[0].Verdict, "%s: %s", promise, r.Rows[0].Why)
				})
			}
		})
	}
}

// A stall of the machine excuses a lock, unless two clients held it at once.
func TestMachineStalls(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		promise string
		defect  func(*simple)
		want    promises.Verdict
	}{
		{"LeaseRenewed", has("renewals that don't restart"), promises.Unchecked},
		{"LeaseRenewed", has("renews no key twice"), promises.Unchecked},
		{"LeaseRenewed", has("renews one after the other"), promises.Unchecked},
		{"NothingLeft", has("leaves goroutines"), promises.Unchecked},
		{"Exclusive", has("granted to all"), promises.Broken},
	} {
		virtually(t, 1, open(func(s *simple) { has("renews")(s); c.defect(s) }), func(t *testing.T, k promises.Kit) {
			k.TTL, k.Only, k.Service.NoRenew = time.Second, []string{c.promise}, false
			r, err := promises.Stalling(k).Check(t.Context())
			require.NoError(t, err)
			row := r.Rows[0]
			require.Equal(t, c.want, row.Verdict, "%s: %s", c.promise, row.Why)
			require.Equal(t, c.want == promises.Unchecked, strings.HasPrefix(row.Why, "the machine stalled for more than 125ms, "), row.Why)
		})
	}
}

func TestKeptByRenewal(t *testing.T) {
	t.Parallel()
	virtually(t, 3, open(has("renews")), func(t *testing.T, k promises.Kit) {
		k.Service.NoRenew = false
		requireBroken(t, promises.Run(t, k), "DataLoss") // it is only on the first server
	})
}

func TestBroken(t *testing.T) {
	t.Parallel()
	all := map[string]flaw{
		"and has no Until":              {want: "Exclusive", also: "get, then set; no Until"},
		"seventeen messages":            {want: "EveryMessage", set: func(s *simple) { s.pings = 14 }},
		"256 locks for all keys":        {want: "KeysIndependent", set: func(s *simple) { s.hash = func(key []byte) uint32 { return crc32.ChecksumIEEE(key) % 256 } }},
		"a release deletes a prefix":    {want: "KeysIndependent", set: func(s *simple) { s.releases = deletesPrefix }},
		"a lost release frees others":   {want: "ReleaseRetried", set: func(s *simple) { s.releases = freesOthers }},
		"two releases at once panic":    {want: "ReleaseRepeated", set: func(s *simple) { s.releases = panicsTwice() }},
		"waiters take what is renewed":  {want: "LeaseRenewed", also: "renews", set: func(s *simple) { s.observes = (*simple).expects }},
		"and what is renewed by hand":   {want: "RenewedByHand", set: func(s *simple) { s.observes = (*simple).expects }},
		"renews 64 leases":              {want: "LeaseRenewed", also: "renews", set: func(s *simple) { s.room = 64 }},
		"renewals add up":               {want: "LeaseRenewed", also: "renews", set: func(s *simple) { s.script = add }},
		"renewals by hand add up":       {want: "RenewedByHand", set: func(s *simple) { s.script = add }},
		"a try remembers":               {want: "WaiterServed", set: func(s *simple) { s.tryCalls = remembers() }},
		"a try is abandoned":            {want: "NothingLeft", set: func(s *simple) { s.tryCalls = abandons }},
		"a waiter leaves a goroutine":   {want: "NothingLeft", set: func(s *simple) { s.acquires = then(leavesWaiter) }},
		"a deadline shortens the lease": {want: "EndsWithContext", set: func(s *simple) { s.acquires = then(hurries) }},
		"grants when it is refused":     {want: "EndsWithContext", set: func(s *simple) { s.acquires = grantsOn(isRefused) }},
		"a try waits":                   {want: "Exclusive", set: func(s *simple) { s.tryWaits = math.MaxInt }},
		"a release stops at an error":   {want: "Partition", also: "a majority", set: func(s *simple) { s.releaseStops = 3600 }},
		"subscribes too late":           {want: "WaiterServed", set: func(s *simple) { s.acquires = misses; s.releases = tells }},
		"timers renew what is released": {want: "NothingLeft", also: "renews", set: func(s *simple) { s.releases = asksOn }},
		"a wait ends its client's":      {want: "OneClient", set: func(s *simple) { endsOwn(s, false) }},
		"a refused try ends its own":    {want: "OneClient", set: func(s *simple) { endsOwn(s, true) }},
		"takes its own lease for new":   {want: "AcquireLate", set: func(s *simple) { s.tryCalls = recognizes }},
		"renews by a default":           {want: "LeaseRenewed", also: "renews", set: func(s *simple) { s.script = eight }},
		"a repeated release hangs":      {want: "ReleaseRepeated", set: func(s *simple) { s.releases = hangs }},
		"a late release hangs":          {want: "ReleaseStale", set: func(s *simple) { s.releases = hangs }},
		"a failed release insists":      {want: "ReleaseRetried", set: func(s *simple) { s.releases = insists }},
		"backs off without a limit":     {want: "WaiterServed", set: func(s *simple) { s.backsOff = time.Hour }},
		"wakes once":                    {want: "WaiterServed", set: func(s *simple) { s.acquires = listens(func(string) bool { return false }); s.releases = tells }},
		"a failed wait ends others":     {want: "AcquireLate", set: func(s *simple) { s.acquires = spoils(isEnded, false) }},
		"a refused wait ends a key's":   {want: "AcquireLate", set: func(s *simple) { s.acquires = spoils(isRefused, true) }},
		"a refused wait ends others":    {want: "AcquireLate", set: func(s *simple) { s.acquires = spoils(isRefused, false) }},
		"a failed try ends others":      {want: "AcquireLate", set: func(s *simple) { s.acquires = spoils(isEnded, false); s.tryCalls = s.acquires }},
		"a refused try ends others":     {want: "AcquireLate", set: func(s *simple) { s.acquires = spoils(isRefused, false); s.tryCalls = s.acquires }},
		"failed waiters get the lock":   {want: "WaitersCutOff ServerErrors", set: func(s *simple) { s.acquires = queues(false) }},
		"joins a queue for ever":        {want: "EveryMessage", set: func(s *simple) { s.acquires = queues(true) }},
		"releases the last 100 only":    {want: "KeysIndependent", set: func(s *simple) { releasesLast(s, errors.New("unknown lease")) }},
		"and says that others are lost": {want: "KeysIndependent", set: func(s *simple) { releasesLast(s, dlock.ErrLost) }},
		"releases say that they fail":   {want: "ReleaseRepeated", set: func(s *simple) { s.releases = answers(errors.New("unexpected reply")) }},
		"lost, if it was renewed":       {want: "ReleaseRepeated", also: "renews", set: func(s *simple) { s.releases = saysLostRenewed }},
		"lost, if renewed by hand":      {want: "ReleaseRepeated", set: func(s *simple) { s.releases = saysLostRenewed }},
		"a waiter's isn't renewed":      {want: "LeaseRenewed", also: "renews", set: renewsBut(func(_ *simple, _ string, waited bool) bool { return waited })},
		"odd keys aren't renewed":       {want: "LeaseRenewed", also: "renews", set: renewsBut(func(_ *simple, key string, _ bool) bool { return isOdd(key) })},
		"a successor's isn't renewed":   {want: "LeaseRenewed", also: "renews", set: renewsSucceeding},
		"a successor's has no TTL":      {want: "LeaseLasts", set: func(s *simple) { succeeding(s, func(l *lease) { l.s.redis.Persist(l.ctx, l.key) }) }},
		"a failed release ends the next": {want: "LeaseRenewed", also: "renews", set: func(s *simple) {
			renewsBut(isMarked)(s)
			s.releases = func(_ context.Context, l *lease, free func() error) error {
				err := free()
				if isEnded(err) {
					l.s.latest.Store(l.key, true)
				}
				return err
			}
		}},
		"a failed try ends the next": {want: "LeaseRenewed", also: "renews", set: func(s *simple) {
			renewsBut(isMarked)(s)
			renewed := s.tryCalls
			s.tryCalls = func(ctx context.Context, s *simple, key string, try asking) (scenarios.Lease, error) {
				l, err := renewed(ctx, s, key, try)
				if isEnded(err) {
					s.latest.Store(key, true)
				}
				return l, err
			}
		}},
		"odd keys aren't released": {want: "KeysIndependent", set: func(s *simple) {
			s.releases = func(_ context.Context, l *lease, free func() error) error {
				if isOdd(l.key) {
					return nil
				}
				return free()
			}
		}},
		"a race is an error":             {want: "Exclusive", set: conflicts()},
		"odd keys' waiters aren't told":  {want: "WaiterServed", set: func(s *simple) { s.acquires = sleepsIf(isOdd) }},
		"a key is a pattern":             {want: "WaiterServed", set: func(s *simple) { s.acquires = sleepsIf(func(key string) bool { return strings.Contains(key, "[") }) }},
		"Close frees what is lost":       {want: "CloseEnds", set: func(s *simple) { s.closes = deletesAll; s.releases = unchanged }},
		"opened in vain":                 {want: "EveryMessage", set: opensInVain},
		"a cancelled wait fails others":  {want: "OneClient", set: func(s *simple) { failsWaits(s, func(err error) bool { return errors.Is(err, context.Canceled) }) }},
		"a refused try fails waits":      {want: "OneClient", set: func(s *simple) { failsWaits(s, func(err error) bool { return errors.Is(err, dlock.ErrHeld) }) }},
		"short waits are endless":        {want: "WaiterCancelled", set: func(s *simple) { s.acquires = roundsDown; s.tryCalls = roundsDown }},
		"a refused try's goroutine":      {want: "NothingLeft", set: func(s *simple) { s.tryCalls = leavesOn(isRefused) }},
		"a renewal's goroutine":          {want: "NothingLeft", set: func(s *simple) { s.renews = leavesRenewal }},
		"tries though its context ended": {want: "EndsWithContext", set: func(s *simple) { s.tryCalls = triesOn }},
		"an ended context loses":         {want: "RenewedByHand", set: func(s *simple) { s.renews = losesIfEnded }},
		"renewing panics when closed":    {want: "CloseEnds", set: func(s *simple) { s.renews = panicsIfClosed }},
		"a try's isn't renewed": {want: "LeaseRenewed", also: "renews", set: func(s *simple) {
			s.tryCalls = then(func(a *answer) {
				if a.err == nil {
					a.l.idle.Store(true)
				}
			})
		}},
		"a try's ends at its deadline": {want: "EndsWithContext", set: func(s *simple) {
			s.tryCalls = then(func(a *answer) {
				if end, ok := a.ctx.Deadline(); a.err == nil && ok {
					time.AfterFunc(time.Until(end), a.l.cancel)
				}
			})
		}},
		"its first lease alone ends": {want: "LeaseLasts", also: "no Until", set: func(s *simple) {
			var leases atomic.Int32
			s.acquires = then(func(a *answer) {
				if a.err == nil && leases.Add(1) > 1 {
					a.l.timer.Stop()
				}
			})
		}},
		"renewed without a reply": {want: "RenewedByHand", set: func(s *simple) {
			s.renews = func(_ context.Context, _ *lease, renew func() error) error {
				if err := renew(); !isTimeout(err) {
					return err
				}
				return nil
			}
		}},
		"a renewal has a new token": {want: "TokensIncrease", set: func(s *simple) {
			s.renews = func(_ context.Context, l *lease, renew func() error) error {
				l.fence++
				return renew()
			}
		}},
		"lost, if nobody knows": {want: "ReleaseRetried", set: func(s *simple) {
			s.releases = func(_ context.Context, _ *lease, free func() error) error {
				err := free()
				if isEnded(err) {
					return dlock.ErrLost
				}
				return err
			}
		}},
		"remembers 64 leases":          {want: "KeysIndependent", set: func(s *simple) { s.tryCalls = forgetsOld() }},
		"a try hangs when closed":      {want: "CloseEnds", set: func(s *simple) { s.tryCalls = hangsIfClosed }},
		"an old lease has a new token": {want: "TokensIncrease", set: func(s *simple) { s.tryCalls = then(sharesToken); s.acquires = s.tryCalls }},
		"renewed by hand ten times": {want: "RenewedByHand", set: func(s *simple) {
			s.renews = skips(func(l *lease) bool { return l.hands.Add(1) > 10 })
		}},
		"a key's second isn't renewed by hand": {want: "RenewedByHand", set: func(s *simple) {
			var seen, second sync.Map
			marks(s, func(a *answer) {
				if a.err == nil {
					if _, again := seen.LoadOrStore(a.key, true); again {
						second.Store(a.l, true)
					}
				}
			})
			s.renews = skips(func(l *lease) bool { _, ok := second.Load(l); return ok })
		}},
		"a waiter's isn't renewed by hand": {want: "RenewedByHand", set: func(s *simple) {
			s.acquires = then(func(a *answer) {
				if a.err == nil && a.took > 50*time.Millisecond {
					a.l.idle.Store(true)
				}
			})
			s.renews = skips(func(l *lease) bool { return l.idle.Load() })
		}},
		"odd keys aren't renewed by hand": {want: "RenewedByHand", set: func(s *simple) {
			s.renews = skips(func(l *lease) bool { return isOdd(l.key) })
		}},
		"a refused try keeps the next": {want: "Exclusive OneClient", set: func(s *simple) {
			var refused sync.Map
			s.tryCalls = then(func(a *answer) {
				if errors.Is(a.err, dlock.ErrHeld) {
					refused.Store(a.key, true)
				} else if _, ok := refused.Load(a.key); ok && a.err == nil {
					a.l.idle.Store(true)
				}
			})
			s.releases = freesBut
		}},
		"Close forgets tokens": {want: "TokensIncrease", set: func(s *simple) {
			var used sync.Map
			marks(s, func(a *answer) { used.Store(a.key, true) })
			s.closes = func(s *simple) {
				used.Range(func(key, _ any) bool {
					s.redis.Del(context.Background(), key.(string)+":number")
					return true
				})
			}
		}},
		"only the last key's waiters are told": {want: "WaiterServed", set: tellsLast},
		"releases at once are one": {want: "KeysIndependent", set: func(s *simple) {
			var under atomic.Int32
			s.releases = func(_ context.Context, _ *lease, free func() error) error {
				defer under.Add(-1)
				if under.Add(1) > 1 {
					return nil
				}
				return free()
			}
		}},
		"takes a dead waiter's turn":     {want: "WaiterServed", set: func(s *simple) { s.acquires = inherits }},
		"a closed waiter frees":          {want: "CloseEnds", set: closesAsHolder},
		"tells of its first loss":        {want: "LeaseLasts", also: "no Until", set: toldOnce},
		"over after a loss":              {want: "HolderReturns", set: overAfterLoss},
		"handed over with its token":     {want: "TokensIncrease", set: handsOver(restarted)},
		"handed over with its age":       {want: "LeaseLasts", set: handsOver(renumbered)},
		"a try overtakes who was called": {want: "Exclusive", set: callsNext},
		"wakes another key's waiter":     {want: "WaiterServed", set: signals},
		"a renewal uses up the watch":    {want: "WaiterServed", set: watchesOnce},
		"a first lease has the session":  {want: "LeaseRenewed", also: "renews", set: firstHasSession},
		"a counter before the key":       {want: "KeysIndependent", set: func(s *simple) { s.takes = beforeKey }},
		"a waiter that leaves resets":    {want: "TokensIncrease", set: resetsCounter},
		"a dead heir's turn":             {want: "LeaseLasts", set: deadHeir},
		"a lease from its last vote":     {want: "LeaseLasts", also: "a majority; late until"},
	}
	for name, takes := range map[string]func(key string) string{
		"one lock for all":      func(string) string { return "all" },
		"four bytes are a ?":    strings.NewReplacer("🍣", "?", "🍺", "?").Replace,
		"spaces at the end":     func(key string) string { return strings.TrimRight(key, " ") },
		"no case":               strings.ToLower,
		"no bytes but UTF-8":    func(key string) string { return strings.ToValidUTF8(key, "\uFFFD") },
		"accents are composed":  func(key string) string { return strings.ReplaceAll(key, "e\u0301", "é") },
		"lines are trimmed":     strings.NewReplacer("\n", "").Replace,
		"a dot is no directory": func(key string) string { return strings.ReplaceAll(key, "/./", "/") },
		"keys end at a #":       func(key string) string { return strings.Split(key, "#")[0] },
		"keys of 512 bytes":     func(key string) string { return key[:min(len(key), 512)] },
		"keys of 1,024 bytes":   func(key string) string { return key[:min(len(key), 1024)] },
		"the last after a :":    func(key string) string { return key[strings.LastIndex(key, ":")+1:] },
		"slashes at the start":  func(key string) string { return strings.TrimLeft(key, "/") },
	} {
		all[name] = flaw{want: "KeysIndependent", set: func(s *simple) { s.takes = takes }}
	}
	for i, hash := range []string{"CRC-32", "FNV-1a", "hashtext", "FNV-1", "CRC-32C", "an MD5"} {
		all["the key is "+hash] = flaw{want: "KeysIndependent", set: func(s *simple) { s.hash = promises.Hashes[i] }}
	}
	byName(all, "", map[string][]string{
		"AcquireLate": {
			"a try deletes", "a late grant deletes", "a try that is undone late", "takes a lock for its own",
			"takes a late reply for its",
		},
		"AcquireLate EveryMessage": {"locks itself out"},
		"ClockSkew":                {"time as the token", "renewed by hand in absolute time"},
		"CloseEnds":                {"deaf Close", "Close forgets a release"},
		"EndsWithContext": {
			"deaf", "grants without a reply", "ends with the acquisition", "calls end at deadlines", "acquisitions take turns",
			"a renewal keeps the release",
		},
		"EveryMessage":                 {"two messages", "repeats as another", "repeats, and counts"},
		"Exclusive":                    {"granted to all", "get, then set", "sweeps, then sets", "an opaque error"},
		"Exclusive HolderReturns":      {"a try takes the lock"},
		"HolderDisconnected":           {"ends with sessions"},
		"KeysIndependent":              {"one for each client", "prefixes are held", "released with its last"},
		"LeaseLasts":                   {"late until", "counted from a wait", "no TTL", "never ends", "sleeps for ever", "late until, if it waited"},
		"NothingLeft":                  {"leaves goroutines", "failed tries keep connections"},
		"OddTTLs":                      {"TTLs of 32 bits"},
		"OneClient":                    {"reentrant", "waits for its own lock"},
		"Partition":                    {"any server"},
		"ReleaseLate":                  {"a release asks first"},
		"ReleaseRepeated":              {"panics"},
		"ReleaseRepeated ReleaseStale": {"one owner"},
		"ReleaseRepeated ReleaseStale ReleaseLate": {"plain delete"},
		"ReleaseRetried": {"releases keep a mutex", "releases keep a key's mutex"},
		"RenewedByHand": {
			"renewed by hand, asking first", "renewed by hand, blindly", "renewed by hand, and taken", "renewed by hand for half",
			"renewed by hand late", "renewed by hand for nothing", "a renewal that fails counts", "a renewal that fails frees",
			"renewed by hand once", "renewed by hand, then refused",
		},
		"TokensIncrease": {
			"random tokens", "a token after the grant", "a token before the wait", "a token for each client",
			"a token that is forgotten", "its own time as the token",
		},
		"WaiterCancelled":            {"a wait ends a session"},
		"WaiterServed":               {"waiters are deaf after errors", "waits for a message", "a client's calls queue", "never releases"},
		"WaitersCutOff WaiterServed": {"a queue of the dead"},
	})
	byName(all, "renews", map[string][]string{
		"CloseEnds":       {"renews when closed"},
		"EndsWithContext": {"renewed until it ends", "releases too late"},
		"EveryMessage":    {"renews after a failed release"},
		"HolderReturns": {
			"renews blindly", "renews and takes", "renews what it had", "tells the holder, and renews", "renews no key twice",
		},
		"LeaseRenewed": {
			"renews in seconds", "renewed late", "a release ends its key's", "stops, and says nothing",
			"renewals that don't restart", "renews one after the other", "renews nothing", "a try ends renewals",
			"untold after renewals",
		},
		"NothingLeft":  {"a lease leaves one at Close"},
		"WaiterServed": {"renewed, and not released", "renewed after its release"},
	})
	byName(all, "a majority", map[string][]string{
		"Partition": {"needs all servers to open", "a renewal needs all servers", "a silent server isn't freed", "a refused try stays", "a timeout is a vote"},
	})
	testFlaws(t, false, all)
}

// Each defect is detected by the promises in want and, except perhaps for the dear ones, by no others.
func TestBrokenOnce(t *testing.T) {
	t.Parallel()
	all := map[string]flaw{
		"an error renews":                  {want: "ServerErrors", also: "renews; no Until"},
		"an error grants to waiters":       {want: "WaiterServed WaitersCutOff ServerErrors", set: func(s *simple) { s.acquires = then(believes) }},
		"a failed release is lost":         {want: "ReleaseRetried ServerErrors", set: func(s *simple) { s.releases = forgets() }},
		"an error frees":                   {want: "ServerErrors", set: func(s *simple) { s.releases = freesByError }},
		"an error grants":                  {want: "ServerErrors", set: func(s *simple) { s.tryCalls = grantsOn(isServers) }},
		"a release says that it was lost":  {want: "ReleaseRepeated", set: func(s *simple) { s.releases = answers(dlock.ErrLost) }},
		"a refused try joins a queue":      {want: "EveryMessage", set: joins},
		"a client's calls take turns":      {want: "OneClient", set: takesTurns},
		"waits end together":               {want: "OneClient", set: sharesWaits},
		"waiters register with the server": {want: "DataLoss", set: func(s *simple) { s.acquires = registers }},
		"and of those by hand":             {want: "DataLoss", also: "loads the renewals' script once"},
		"a served waiter ends the others":  {want: "WaiterServed", set: func(s *simple) { s.acquires = endsOthers }},
		"a counter that is also a key":     {want: "KeysIndependent", set: func(s *simple) { s.counter = ":fence" }},
		"granted when it is closed":        {want: "CloseEnds", also: "renews", set: func(s *simple) { s.acquires = goesOn }},
		"Close tells no holder":            {want: "CloseEnds", also: "renews; no Until"},
	}
	byName(all, "", map[string][]string{
		"ClockSkew":                          {"absolute time"},
		"CloseEnds":                          {"waits on when it is closed", "two Closes at once panic"},
		"DataLoss":                           {"the token is the owner", "remembers its records", "loads a script once", "one of three servers"},
		"Exclusive":                          {"a try prolongs the lease"},
		"Exclusive OneClient TokensIncrease": {"tires"},
		"LeaseLasts":                         {"renewed by hand by a default", "at most eight seconds"},
		"LeaseLasts RenewedByHand":           {"a timer that isn't stopped"},
		"NothingLeft":                        {"a closed client's goroutine", "a failed try leaves a connection"},
		"OddTTLs":                            {"whole seconds", "the nearest second", "microseconds are for ever"},
		"ReleaseLate ReleaseRetried RenewedByHand ServerErrors": {"released late, by one owner"},
		"ReleaseRetried ReleaseLate RenewedByHand":              {"released again after a lost reply"},
		"ReleaseRetried ServerErrors":                           {"releases once", "a release says nothing"},
		"RenewedByHand":                                         {"renewed by hand for its client", "renewed by hand in whole seconds"},
		"TokensIncrease":                                        {"a token read after the grant"},
		"WaiterServed":                                          {"counted from a wait by its holder", "a waiter leaves with others"},
		"WaiterServed DataLoss":                                 {"a queue that forgets"},
	})
	byName(all, "renews", map[string][]string{
		"DataLoss":                        {"renews what the server forgot", "renews what somebody deleted", "loads the renewals' script once"},
		"HolderDisconnected ServerErrors": {"stops when it is refused"},
		"HolderReturns LeaseRenewed":      {"renewed until one is lost"},
		"LeaseRenewed":                    {"renewed until three have failed", "a watchdog for all leases", "renewed until another is lost"},
		"LeaseRenewed ServerErrors":       {"renewed twice, and no more", "renewed until one fails"},
		"LeaseRenewed WaiterServed":       {"waiters take all connections"},
		"NothingLeft":                     {"a lost lease leaves a goroutine", "renewed while it is released"},
		"ServerErrors":                    {"renewed until an error", "stops silently at an error"},
		"WaiterCancelled":                 {"cancelled as it is granted"},
		"WaiterServed RenewedByHand":      {"released while it is renewed"},
	})
	byName(all, "a majority", map[string][]string{
		"TokensIncrease DataLoss":           {"the first server's token"},
		"TokensIncrease DataLoss Partition": {"waits for each server", "one server renews a lease"},
	})
	testFlaws(t, true, all)
}

// flaw is a defect, which has the name of its test.
type flaw struct {
	want string // the promises that detect it
	also string // what the lock has beside the defect
	set  func(*simple)
}

// byName adds defects that simple's code asks for by name, by the promises that detect them.
func byName(all map[string]flaw, also string, defects map[string][]string) {
	for want, names := range defects {
		for _, name := range names {
			all[name] = flaw{want: want, also: also}
		}
	}
}

// testFlaws requires that each defect is detected by the promises in want and, if alone, by no others except perhaps dear ones.
func testFlaws(t *testing.T, alone bool, all map[string]flaw) {
	t.Helper()
	for name, c := range all {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			set := func(s *simple) {
				has(append(strings.Split(c.also, "; "), name)...)(s)
				if c.set != nil {
					c.set(s)
				}
			}
			lock, servers := new(simple), 1
			if set(lock); lock.is("any server") || lock.is("a majority") || lock.is("one of three servers") {
				servers = 3
			}
			want := strings.Fields(c.want)
			require.Subset(t, promises.Names(), want)
			for _, promise := range promises.Names() {
				broken := slices.Contains(want, promise)
				if !broken && (!alone || slices.Contains(dear, promise)) {
					continue
				}
				// With all keys on one server, they take most of the test's time.
				virtually(t, servers, open(set), func(t *testing.T, k promises.Kit) {
					k.Only, k.Fixed, k.Service.NoRenew = []string{promise}, name == "never releases", !lock.is("renews")
					r := promises.Run(t, k)
					if !broken {
						requireBroken(t, r)
						return
					}
					requireBroken(t, r, promise)
					switch name {
					case "absolute time":
						require.Regexp(t, "granted the lock .* an hour ahead; the lease .* hadn't ended .* an hour behind", r.Rows[0].Why)
					case "leaves goroutines":
						require.Contains(t, r.Rows[0].Why, "(*simple).try.func1", "it says what runs on")
					}
				})
			}
		})
	}
}

// A reentrant lock keeps what it has until all its grants are released. Releases may count, whichever grants they are of.
func TestReentrant(t *testing.T) {
	t.Parallel()
	counts := func(*hold, bool) {}
	for name, c := range map[string]struct {
		set    func(*simple)
		broken []string
	}{
		"counts":                 {counting(counts), nil},
		"counts, and renews":     {func(s *simple) { has("renews")(s); counting(counts)(s) }, nil},
		"an inner release frees": {has("reentrant"), []string{"LeaseLasts"}},
		"a lost lease is granted again": {func(s *simple) {
			counting(counts)(s)
			counted, released := s.acquires, s.releases
			s.acquires = func(ctx context.Context, s *simple, key string, acquire asking) (scenarios.Lease, error) {
				l, err := counted(ctx, s, key, acquire)
				if err == nil {
					s.latest.Store(key, true)
				} else if errors.Is(err, dlock.ErrHeld) && isMarked(s, key, false) {
					return s.granted(ctx, key), nil
				}
				return l, err
			}
			s.tryCalls = s.acquires
			s.releases = func(ctx context.Context, l *lease, free func() error) error {
				l.s.latest.Delete(l.key)
				return released(ctx, l, free)
			}
		}, []string{"HolderReturns"}},
		"an inner grant counts twice": {counting(func(h *hold, gets bool) {
			if gets {
				h.n++
			}
		}), []string{"LeaseLasts"}},
		"an inner release ends renewals": {func(s *simple) {
			has("renews")(s)
			counting(func(h *hold, gets bool) {
				if !gets {
					h.l.cancel()
				}
			})(s)
		}, []string{"LeaseLasts"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			lock := new(simple)
			c.set(lock)
			virtually(t, 1, open(c.set), func(t *testing.T, k promises.Kit) {
				k.Only = []string{"LeaseLasts", "LeaseRenewed", "HolderReturns", "ReleaseRepeated", "ReleaseRetried", "ReleaseStale"}
				k.Service.Reentrant, k.Service.NoRenew = true, !lock.is("renews")
				requireBroken(t, promises.Run(t, k), c.broken...)
			})
		})
	}
}

// dear are promises that take a quarter of a second of processor time or more to check.
var dear = []string{"Exclusive", "KeysIndependent", "LeaseRenewed", "NothingLeft", "ReleaseLate", "WaiterServed", "WaitersCutOff"}

type silent struct{ scenarios.Lock }

func (silent) Acquire(context.Context, string) (scenarios.Lease, error) { return nil, nil }
func (silent) Close() error                                             { return nil }

// ended ends a lease's context with the call that got it.
type ended struct{ scenarios.Lock }

func (l ended) TryAcquire(ctx context.Context, key string) (scenarios.Lease, error) {
	got, err := l.Lock.TryAcquire(ctx, key)
	if err == nil {
		got.(*lease).cancel()
	}
	return got, err
}

// The values are from PostgreSQL 15.
func TestHashtext(t *testing.T) {
	t.Parallel()
	for key, want := range map[string]int32{"": -1477818771, "promises-1": 1678175891, "0123456789abcdefg": -688301431} {
		require.Equal(t, want, int32(promises.Hashes[2]([]byte(key)))) //nolint:gosec // as Postgres has it
	}
}

// A key that occurs twice would be held at its second try. With this base two hashes collide at the same count.
func TestCollisions(t *testing.T) {
	t.Parallel()
	const base = "promises-a3dad041-3a41-4441-8f12-a2465e378bf8"
	endings := promises.Collisions(base)
	for i, hash := range promises.Hashes {
		require.Equal(t, hash([]byte(base+endings[2*i])), hash([]byte(base+endings[2*i+1])))
	}
	slices.Sort(endings)
	require.Len(t, slices.Compact(endings), 2*len(promises.Hashes))
}

func TestAdapter(t *testing.T) {
	t.Parallel()
	virtually(t, 1, open(func(*simple) {}), testAdapter)
}

func testAdapter(t *testing.T, good promises.Kit) {
	good.Only = nil
	for want, change := range map[string]func(*promises.Kit){
		"Kit.Service and Kit.Open are required": func(k *promises.Kit) { k.Open = nil },
		"Kit.TTL -1s is negative":               func(k *promises.Kit) { k.TTL = -time.Second },
		"Service.Nodes is empty":                func(k *promises.Kit) { k.Service = &scenarios.Service{} },
		`Kit.Only: there is no promise or hazard "Exclusiv" of this lock; there are Exclusive, OneClient, `: func(k *promises.Kit) { k.Only = []string{"Exclusiv"} },
		"Lease.Fence is 1, and Service.NoTokens is true":                                                    func(k *promises.Kit) { k.Service.NoTokens = true },
		"the lock returned neither a lease nor an error": func(k *promises.Kit) {
			k.Open = func(context.Context, scenarios.LockSpec) (scenarios.Lock, error) { return silent{}, nil }
		},
		"Lease.Context had ended at its grant": func(k *promises.Kit) {
			open := k.Open
			k.Open = func(ctx context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
				l, err := open(ctx, s)
				return ended{l}, err
			}
		},
		"mine: open: got no lock and no error": func(k *promises.Kit) {
			k.Open = func(context.Context, scenarios.LockSpec) (scenarios.Lock, error) { return nil, nil } //nolint:nilnil // the defect
		},
		"mine: open: no such server": func(k *promises.Kit) {
			k.Open = func(context.Context, scenarios.LockSpec) (scenarios.Lock, error) {
				return nil, errors.New("no such server")
			}
		},
		"mine: with a TTL of 1m0s: open: at most a second; with 1s it works: if the lock's TTL can't be changed that far, set Kit.Fixed": func(k *promises.Kit) {
			open := k.Open
			k.Open = func(ctx context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
				if s.TTL > time.Second {
					return nil, errors.New("at most a second")
				}
				return open(ctx, s)
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

func TestAdapterPanics(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct {
		only   string
		change func(*promises.Kit)
	}{
		"Open": {"OddTTLs", func(k *promises.Kit) {
			open := k.Open
			k.Open = func(ctx context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
				if s.TTL < time.Second { // a panic isn't a refusal
					panic("out of order")
				}
				return open(ctx, s)
			}
		}},
		"Fault": {"DataLoss", func(k *promises.Kit) {
			k.Service.Fault = func(context.Context, scenarios.Step) error { panic("out of order") }
		}},
		"Forget": {"DataLoss", func(k *promises.Kit) {
			k.Service.Forget = func(context.Context, string) error { panic("out of order") }
		}},
	} {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			virtually(t, 1, open(func(*simple) {}), func(t *testing.T, k promises.Kit) {
				k.Only = []string{c.only}
				c.change(&k)
				row := promises.Run(t, k).Rows[0]
				require.Equal(t, promises.Unchecked, row.Verdict, row.Why)
				require.False(t, row.Excluded)
				require.Regexp(t, `^the adapter panicked: out of order\ngoroutine (?s:.*)promises_test.go`, row.Why)
			})
		})
	}
}

func TestDeny(t *testing.T) {
	t.Parallel()
	var denials atomic.Int32
	for says, c := range map[string]struct {
		denies func(n int32) bool // the nth time
		set    func(s *simple)
	}{
		"the servers granted a lock when they were to answer writes with errors": {func(n int32) bool { return n < 2 }, func(*simple) {}},
		"the servers were to answer a TryAcquire with an error, but it sent them nothing: try later": {
			func(int32) bool { return true }, func(s *simple) {
				s.tryCalls = func(ctx context.Context, _ *simple, _ string, ask asking) (scenarios.Lease, error) {
					if denials.Load() > 0 {
						return nil, errors.New("try later")
					}
					return ask(ctx)
				}
			},
		},
	} {
		virtually(t, 1, open(func(s *simple) { has("renews")(s); c.set(s) }), func(t *testing.T, k promises.Kit) {
			fault := k.Service.Fault
			k.Only, k.Service.NoRenew = []string{"ServerErrors"}, false
			k.Service.Fault = func(ctx context.Context, st scenarios.Step) error {
				if st.Verb == "deny" && !c.denies(denials.Add(1)) {
					return nil
				}
				return fault(ctx, st)
			}
			denials.Store(0)
			row := promises.Run(t, k).Rows[0]
			require.Equal(t, promises.Unchecked, row.Verdict, row.Why)
			require.Equal(t, says, row.Why)
		})
	}
}

func TestOpenHangs(t *testing.T) {
	t.Parallel()
	virtually(t, 1, nil, func(t *testing.T, k promises.Kit) {
		returns, closed := make(chan struct{}), make(chan struct{})
		k.Open = func(context.Context, scenarios.LockSpec) (scenarios.Lock, error) {
			<-returns
			return scenarios.Adapter{Shut: func() error { close(closed); return nil }}, nil
		}
		_, err := k.Check(t.Context())
		require.ErrorContains(t, err, "mine: open: Kit.Open hasn't returned 10s after its context had ended: it must return once that ends")
		close(returns)
		<-closed
	})
}

func TestCheckedAgain(t *testing.T) {
	t.Parallel()
	var opened atomic.Int32
	virtually(t, 1, func(ctx context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
		if opened.Add(1) == 2 { // the first is the adapter's trial
			return nil, errors.New("out of order")
		}
		return open(func(*simple) {})(ctx, s)
	}, func(t *testing.T, k promises.Kit) {
		k.Only = []string{"CloseEnds"}
		requireBroken(t, promises.Run(t, k))
	})
}

func TestTCP(t *testing.T) {
	t.Parallel()
	for what, c := range map[string]struct{ only, broken []string }{
		"sound":        {[]string{"HolderDisconnected", "AcquireLate", "EveryMessage"}, nil},
		"plain delete": {[]string{"ReleaseRepeated", "ReleaseLate"}, []string{"ReleaseRepeated", "ReleaseLate"}},
	} {
		k := kit(t, open(has(what)))
		k.Only = c.only
		t.Run(what, func(t *testing.T) { requireBroken(t, promises.Run(t, k), c.broken...) })
	}
}

func TestHeadline(t *testing.T) {
	data := map[history.Fencing]history.Verdict{history.FencingOff: history.Violated}
	r := promises.Report{Lock: "mine", NoTokens: true, Hazards: []promises.Row{{Data: data}}}
	require.Equal(t, "mine breaks 0 of 0 promises. The lock alone lost data in 1 of 1 hazards; it has no token to check.", r.Headline())
	r.NoTokens = false
	data[history.FencingOn] = history.Inconclusive
	require.Equal(t, "mine breaks 0 of 0 promises. The lock alone lost data in 1 of 1 hazards.", r.Headline())
	data[history.FencingOff], data[history.FencingOn] = history.Inconclusive, history.Safe
	require.Equal(t, "mine breaks 0 of 0 promises. With its token checked on reads and writes it lost data in 0 of 1 hazards.", r.Headline())
}

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
		return open(has("no Until"))(ctx, s)
	}
	_, err = k.Check(t.Context())
	require.ErrorContains(t, err, "Lease.Fence is 1, and Service.NoTokens is true")
	k.Service.NoTokens = false
	r, err = k.Check(t.Context())
	require.NoError(t, err)
	require.Equal(t, "Lease.Until is the zero time: a worker can't tell when its lease must be presumed lost", r.NoHazards)
	require.Empty(t, r.Hazards)
}

// TestStrict fails in a child process.
func TestStrict(t *testing.T) {
	const env = "FENCELAB_TEST_STRICT"
	stalls := errors.New("out of order")
	for name, c := range map[string]struct {
		open scenarios.Open
		only []string
		want string
	}{
		"broken": {open(has("plain delete")), []string{"CloseEnds", "ReleaseRepeated"}, ": ReleaseRepeated\n"},
		"no result": {func(ctx context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
			l, err := open(func(*simple) {})(ctx, s)
			if s.TTL == time.Second {
				err = stalls
			}
			return l, err
		}, []string{"CloseEnds"}, ": CloseEnds\n"},
		"ruled out": {open(func(*simple) {}), []string{"OddTTLs"}, ""},
	} {
		if os.Getenv(env) == name {
			virtually(t, 1, c.open, func(t *testing.T, k promises.Kit) {
				k.Only, k.Fixed, k.Strict = c.only, name == "ruled out", true
				promises.Run(t, k)
			})
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
	k := kit(t, open(has("plain delete")))
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

func TestNobodyIsServed(t *testing.T) {
	t.Parallel()
	var left atomic.Int32
	left.Store(1) // the adapter's trial
	virtually(t, 1, open(func(s *simple) {
		s.acquires = func(ctx context.Context, _ *simple, _ string, ask asking) (scenarios.Lease, error) {
			if left.Load() < 0 {
				return nil, errors.New("out of order")
			}
			return ask(ctx)
		}
		s.tryCalls = func(ctx context.Context, s *simple, key string, ask asking) (scenarios.Lease, error) {
			left.Add(-1)
			return s.acquires(ctx, s, key, ask)
		}
	}), func(t *testing.T, k promises.Kit) {
		k.Only = []string{"AcquireLate"}
		row := promises.Run(t, k).Rows[0]
		require.Equal(t, promises.Unchecked, row.Verdict, row.Why)
		require.Equal(t, "a new client doesn't get a lock that nobody has touched: out of order", row.Why)
	})
}

func TestTooManyMessages(t *testing.T) {
	t.Parallel()
	virtually(t, 1, open(func(s *simple) { s.pings = 40 }), func(t *testing.T, k promises.Kit) {
		k.Only = []string{"EveryMessage"}
		row := promises.Run(t, k).Rows[0]
		require.Equal(t, promises.Unchecked, row.Verdict, row.Why)
		require.Regexp(t, "^Acquire has more than 30 (requests|replies): the loss of those behind was not tried$", row.Why)
	})
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
