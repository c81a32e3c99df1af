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
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
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
		l, err := open(func(s *simple) { s.closeFrees, s.saysHeld, s.keeps = true, true, true })(ctx, s)
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
			s.renewal = renewRight
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
		"has an old session": {func(s *simple) { s.endless, s.tryCalls = true, inSession }, "LeaseLasts", ""},
		"and odd TTLs":       {func(s *simple) { s.endless, s.tryCalls = true, inSession }, "OddTTLs", ""},
		"says nothing": {
			func(s *simple) { s.saysNothing = true }, "EndsWithContext",
			"a release that reached no server returned no error: the lock may stay held for the rest of its lease",
		},
		"nor after its lease": {
			func(s *simple) { s.saysNothing = true }, "ReleaseStale", "the release of a lease that had run out, and whose lock another " +
				"client had had since, returned no error: only the lease's context tells its holder",
		},
		"fails while it connects again": {
			func(s *simple) { s.majority, s.releaseStops = true, 1 }, "Partition", "",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			mild, servers := new(simple), 1
			if c.set(mild); mild.majority {
				servers = 3
			}
			virtually(t, servers, open(c.set), func(t *testing.T, k promises.Kit) {
				k.Only, k.Fixed, k.Service.NoRenew = []string{c.promise}, name == "has a fixed TTL", mild.renewal == renewNever
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
		select {
		case <-time.After(d):
		case <-ctx.Done():
			return ctx.Err()
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
			select {
			case <-time.After(c.again):
			case <-ctx.Done():
			}
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
		{"LeaseRenewed", func(s *simple) { s.renewal, s.restless = renewRight, true }, promises.Unchecked},
		{"LeaseRenewed", func(s *simple) { s.renewal = renewKeyOnce }, promises.Unchecked},
		{"LeaseRenewed", func(s *simple) { s.renewal = renewInTurn }, promises.Unchecked},
		{"NothingLeft", func(s *simple) { s.renewal, s.leaks = renewRight, true }, promises.Unchecked},
		{"Exclusive", func(s *simple) { s.renewal, s.everybody = renewRight, true }, promises.Broken},
	} {
		virtually(t, 1, open(c.defect), func(t *testing.T, k promises.Kit) {
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
	virtually(t, 3, open(func(s *simple) { s.renewal = renewRight }), func(t *testing.T, k promises.Kit) {
		k.Service.NoRenew = false
		requireBroken(t, promises.Run(t, k), "DataLoss") // it is only on the first server
	})
}

func TestBroken(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		set  func(*simple)
		want []string
	}{
		"granted to all":                {func(s *simple) { s.everybody = true }, []string{"Exclusive"}},
		"get, then set":                 {func(s *simple) { s.getThenSet = true }, []string{"Exclusive"}},
		"and has no Until":              {func(s *simple) { s.getThenSet, s.endless = true, true }, []string{"Exclusive"}},
		"sweeps, then sets":             {func(s *simple) { s.sweeps = true }, []string{"Exclusive"}},
		"one for each client":           {func(s *simple) { s.single = true }, []string{"KeysIndependent"}},
		"one lock for all":              {func(s *simple) { s.takes = func(string) string { return "all" } }, []string{"KeysIndependent"}},
		"an opaque error":               {func(s *simple) { s.opaque = true }, []string{"Exclusive"}},
		"late until":                    {func(s *simple) { s.lateUntil = true }, []string{"LeaseLasts"}},
		"counted from a wait":           {func(s *simple) { s.queued = true }, []string{"LeaseLasts"}},
		"no TTL":                        {func(s *simple) { s.noTTL = true }, []string{"LeaseLasts"}},
		"never ends":                    {func(s *simple) { s.neverEnds = true }, []string{"LeaseLasts"}},
		"random tokens":                 {func(s *simple) { s.randomTokens = true }, []string{"TokensIncrease"}},
		"prefixes are held":             {func(s *simple) { s.patternHeld = true }, []string{"KeysIndependent"}},
		"plain delete":                  {func(s *simple) { s.plainDelete = true }, []string{"ReleaseRepeated", "ReleaseStale", "ReleaseLate"}},
		"one owner":                     {func(s *simple) { s.oneOwner = true }, []string{"ReleaseRepeated", "ReleaseStale"}},
		"two messages":                  {func(s *simple) { s.claimsTwice = true }, []string{"EveryMessage"}},
		"seventeen messages":            {func(s *simple) { s.pings, s.ttlAgain = 14, true }, []string{"EveryMessage"}},
		"a queue of the dead":           {func(s *simple) { s.queue = true }, []string{"WaitersCutOff", "WaiterServed"}},
		"deaf":                          {func(s *simple) { s.deaf = true }, []string{"EndsWithContext"}},
		"deaf Close":                    {func(s *simple) { s.deafClose = true }, []string{"CloseEnds"}},
		"reentrant":                     {func(s *simple) { s.reentrant = true }, []string{"OneClient"}},
		"renews blindly":                {func(s *simple) { s.renewal = renewBlindly }, []string{"HolderReturns"}},
		"renews and takes":              {func(s *simple) { s.renewal = renewOverwrites }, []string{"HolderReturns"}},
		"renews in seconds":             {func(s *simple) { s.renewal = renewSeconds }, []string{"LeaseRenewed"}},
		"renews what it had":            {func(s *simple) { s.renewal = renewAsks }, []string{"HolderReturns"}},
		"renewed late":                  {func(s *simple) { s.renewal = renewLate }, []string{"LeaseRenewed"}},
		"renews when closed":            {func(s *simple) { s.renewal = renewForEver }, []string{"CloseEnds"}},
		"ends with sessions":            {func(s *simple) { s.session = true }, []string{"HolderDisconnected"}},
		"any server":                    {func(s *simple) { s.anyServer = true }, []string{"Partition"}},
		"sleeps for ever":               {func(s *simple) { s.asleep = true }, []string{"LeaseLasts"}},
		"locks itself out":              {func(s *simple) { s.mutexes = true }, []string{"AcquireLate", "EveryMessage"}},
		"a token after the grant":       {func(s *simple) { s.tokenAfter = true }, []string{"TokensIncrease"}},
		"a token before the wait":       {func(s *simple) { s.tokenFirst = true }, []string{"TokensIncrease"}},
		"a token for each client":       {func(s *simple) { s.tokenByOwner = true }, []string{"TokensIncrease"}},
		"a token that is forgotten":     {func(s *simple) { s.tokenEnds = true }, []string{"TokensIncrease"}},
		"time as the token":             {func(s *simple) { s.clockToken = true }, []string{"ClockSkew"}},
		"spaces at the end":             {func(s *simple) { s.takes = func(key string) string { return strings.TrimRight(key, " ") } }, []string{"KeysIndependent"}},
		"no case":                       {func(s *simple) { s.takes = strings.ToLower }, []string{"KeysIndependent"}},
		"no bytes but UTF-8":            {func(s *simple) { s.takes = func(key string) string { return strings.ToValidUTF8(key, "\uFFFD") } }, []string{"KeysIndependent"}},
		"accents are composed":          {func(s *simple) { s.takes = func(key string) string { return strings.ReplaceAll(key, "e\u0301", "é") } }, []string{"KeysIndependent"}},
		"lines are trimmed":             {func(s *simple) { s.takes = strings.NewReplacer("\n", "").Replace }, []string{"KeysIndependent"}},
		"256 locks for all keys":        {func(s *simple) { s.hash = func(key []byte) uint32 { return crc32.ChecksumIEEE(key) % 256 } }, []string{"KeysIndependent"}},
		"the key is CRC-32":             {func(s *simple) { s.hash = promises.Hashes[0] }, []string{"KeysIndependent"}},
		"the key is FNV-1a":             {func(s *simple) { s.hash = promises.Hashes[1] }, []string{"KeysIndependent"}},
		"the key is hashtext":           {func(s *simple) { s.hash = promises.Hashes[2] }, []string{"KeysIndependent"}},
		"the key is FNV-1":              {func(s *simple) { s.hash = promises.Hashes[3] }, []string{"KeysIndependent"}},
		"the key is CRC-32C":            {func(s *simple) { s.hash = promises.Hashes[4] }, []string{"KeysIndependent"}},
		"the key is an MD5":             {func(s *simple) { s.hash = promises.Hashes[5] }, []string{"KeysIndependent"}},
		"a dot is no directory":         {func(s *simple) { s.takes = func(key string) string { return strings.ReplaceAll(key, "/./", "/") } }, []string{"KeysIndependent"}},
		"keys end at a #":               {func(s *simple) { s.takes = func(key string) string { return strings.Split(key, "#")[0] } }, []string{"KeysIndependent"}},
		"a release deletes a prefix":    {func(s *simple) { s.releases = deletesPrefix }, []string{"KeysIndependent"}},
		"a lost release frees others":   {func(s *simple) { s.releases = freesOthers }, []string{"ReleaseRetried"}},
		"two releases at once panic":    {func(s *simple) { s.releases = panicsTwice() }, []string{"ReleaseRepeated"}},
		"waiters take what is renewed":  {func(s *simple) { s.renewal, s.observes = renewRight, (*simple).expects }, []string{"LeaseRenewed"}},
		"and what is renewed by hand":   {func(s *simple) { s.observes = (*simple).expects }, []string{"RenewedByHand"}},
		"waiters are deaf after errors": {func(s *simple) { s.deafens = true }, []string{"WaiterServed"}},
		"a release ends its key's":      {func(s *simple) { s.renewal, s.perKey = renewRight, true }, []string{"LeaseRenewed"}},
		"renews 64 leases":              {func(s *simple) { s.renewal, s.room = renewRight, 64 }, []string{"LeaseRenewed"}},
		"renewals add up":               {func(s *simple) { s.renewal, s.script = renewRight, add }, []string{"LeaseRenewed"}},
		"renewals by hand add up":       {func(s *simple) { s.script = add }, []string{"RenewedByHand"}},
		"renewed by hand, asking first": {func(s *simple) { s.byHand = handAsks }, []string{"RenewedByHand"}},
		"a try remembers":               {func(s *simple) { s.tryCalls = remembers() }, []string{"WaiterServed"}},
		"a try is abandoned":            {func(s *simple) { s.tryCalls = abandons }, []string{"NothingLeft"}},
		"a waiter leaves a goroutine":   {func(s *simple) { s.acquires = leavesWaiter }, []string{"NothingLeft"}},
		"a lease leaves one at Close":   {func(s *simple) { s.renewal, s.closeStays = renewRight, true }, []string{"NothingLeft"}},
		"a deadline shortens the lease": {func(s *simple) { s.acquires = hurries }, []string{"EndsWithContext"}},
		"grants when it is refused":     {func(s *simple) { s.acquires = grantsOn(isRefused) }, []string{"EndsWithContext"}},
		"keys of 512 bytes":             {func(s *simple) { s.takes = func(key string) string { return key[:min(len(key), 512)] } }, []string{"KeysIndependent"}},
		"keys of 1,024 bytes":           {func(s *simple) { s.takes = func(key string) string { return key[:min(len(key), 1024)] } }, []string{"KeysIndependent"}},
		"stops, and says nothing":       {func(s *simple) { s.renewal = renewPretends }, []string{"LeaseRenewed"}},
		"TTLs of 32 bits":               {func(s *simple) { s.short = true }, []string{"OddTTLs"}},
		"renewed by hand, blindly":      {func(s *simple) { s.byHand = handBlindly }, []string{"RenewedByHand"}},
		"renewed by hand, and taken":    {func(s *simple) { s.byHand = handTakes }, []string{"RenewedByHand"}},
		"renewed by hand for half":      {func(s *simple) { s.byHand = handShort }, []string{"RenewedByHand"}},
		"renewed by hand late":          {func(s *simple) { s.byHand = handLate }, []string{"RenewedByHand"}},
		"renewed by hand for nothing":   {func(s *simple) { s.byHand = handNothing }, []string{"RenewedByHand"}},
		"waits for its own lock":        {func(s *simple) { s.own = true }, []string{"OneClient"}},
		"a try waits":                   {func(s *simple) { s.tryWaits = math.MaxInt }, []string{"Exclusive"}},
		"renewals that don't restart":   {func(s *simple) { s.renewal, s.restless = renewRight, true }, []string{"LeaseRenewed"}},
		"renews after a failed release": {func(s *simple) { s.renewal = renewUnreleased }, []string{"EveryMessage"}},
		"grants without a reply":        {func(s *simple) { s.failsOpen = true }, []string{"EndsWithContext"}},
		"renews one after the other":    {func(s *simple) { s.renewal = renewInTurn }, []string{"LeaseRenewed"}},
		"tells the holder, and renews":  {func(s *simple) { s.renewal = renewDespite }, []string{"HolderReturns"}},
		"renews no key twice":           {func(s *simple) { s.renewal = renewKeyOnce }, []string{"HolderReturns"}},
		"repeats as another":            {func(s *simple) { s.repeats = true }, []string{"EveryMessage"}},
		"repeats, and counts":           {func(s *simple) { s.counts = true }, []string{"EveryMessage"}},
		"leaves goroutines":             {func(s *simple) { s.leaks = true }, []string{"NothingLeft"}},
		"a release asks first":          {func(s *simple) { s.asksFirst = true }, []string{"ReleaseLate"}},
		"waits for a message":           {func(s *simple) { s.subscribed = true }, []string{"WaiterServed"}},
		"a try takes the lock":          {func(s *simple) { s.tryTakes = true }, []string{"Exclusive", "HolderReturns"}},
		"ends with the acquisition":     {func(s *simple) { s.tied = true }, []string{"EndsWithContext"}},
		"renewed until it ends":         {func(s *simple) { s.renewal = renewTied }, []string{"EndsWithContext"}},
		"calls end at deadlines":        {func(s *simple) { s.onlyDeadline = true }, []string{"EndsWithContext"}},
		"a client's calls queue":        {func(s *simple) { s.oneCall = true }, []string{"WaiterServed"}},
		"never releases":                {func(s *simple) { s.noRelease = true }, []string{"WaiterServed"}},
		"a wait ends a session":         {func(s *simple) { s.waitCloses = true }, []string{"WaiterCancelled"}},
		"panics":                        {func(s *simple) { s.panics = true }, []string{"ReleaseRepeated"}},
		"a try deletes":                 {func(s *simple) { s.tryDeletes = true }, []string{"AcquireLate"}},
		"a late grant deletes":          {func(s *simple) { s.lateDeletes = true }, []string{"AcquireLate"}},
		"a try that is undone late":     {func(s *simple) { s.cleansUp = true }, []string{"AcquireLate"}},
		"late until, if it waited":      {func(s *simple) { s.lateWaited = true }, []string{"LeaseLasts"}},
		"its own time as the token":     {func(s *simple) { s.callTime = true }, []string{"TokensIncrease"}},
		"Close forgets a release":       {func(s *simple) { s.lost = true }, []string{"CloseEnds"}},
		"renews nothing":                {func(s *simple) { s.renewal = renewNothing }, []string{"LeaseRenewed"}},
		"a try ends renewals":           {func(s *simple) { s.renewal = renewToTry }, []string{"LeaseRenewed"}},
		"untold after renewals":         {func(s *simple) { s.renewal = renewUntold }, []string{"LeaseRenewed"}},
		"renewed, and not released":     {func(s *simple) { s.renewal = renewVersion }, []string{"WaiterServed"}},
		"renewed after its release":     {func(s *simple) { s.renewal = renewUpserts }, []string{"WaiterServed"}},
		"slashes at the start":          {func(s *simple) { s.takes = func(key string) string { return strings.TrimLeft(key, "/") } }, []string{"KeysIndependent"}},
		"released with its last":        {func(s *simple) { s.bucketed = true }, []string{"KeysIndependent"}},
		"failed tries keep connections": {func(s *simple) { s.tryKeeps = true }, []string{"NothingLeft"}},
		"takes a lock for its own":      {func(s *simple) { s.claims = true }, []string{"AcquireLate"}},
		"releases keep a mutex":         {func(s *simple) { s.stuck = true }, []string{"ReleaseRetried"}},
		"releases keep a key's mutex":   {func(s *simple) { s.stuckKey = true }, []string{"ReleaseRetried"}},
		"takes a late reply for its":    {func(s *simple) { s.mixes = true }, []string{"AcquireLate"}},
		"acquisitions take turns":       {func(s *simple) { s.alone = true }, []string{"EndsWithContext"}},
		"a renewal keeps the release":   {func(s *simple) { s.busy = true }, []string{"EndsWithContext"}},
		"needs all servers to open":     {func(s *simple) { s.majority, s.opensAll = true, true }, []string{"Partition"}},
		"a renewal needs all servers":   {func(s *simple) { s.majority, s.allRenew = true, true }, []string{"Partition"}},
		"a release stops at an error":   {func(s *simple) { s.majority, s.releaseStops = true, 3600 }, []string{"Partition"}},
		"subscribes too late":           {func(s *simple) { s.acquires, s.releases = misses, tells }, []string{"WaiterServed"}},
		"releases too late":             {func(s *simple) { s.renewal, s.late = renewRight, true }, []string{"EndsWithContext"}},
		"timers renew what is released": {func(s *simple) { s.renewal, s.releases = renewRight, asksOn }, []string{"NothingLeft"}},
		"a wait ends its client's":      {func(s *simple) { endsOwn(s, false) }, []string{"OneClient"}},
		"a refused try ends its own":    {func(s *simple) { endsOwn(s, true) }, []string{"OneClient"}},
		"a renewal that fails counts":   {func(s *simple) { s.hopes = true }, []string{"RenewedByHand"}},
		"a silent server isn't freed":   {func(s *simple) { s.majority, s.spares = true, true }, []string{"Partition"}},
		"a refused try stays":           {func(s *simple) { s.majority, s.tryStays = true, true }, []string{"Partition"}},
		"takes its own lease for new":   {func(s *simple) { s.tryCalls = recognizes }, []string{"AcquireLate"}},
		"a renewal that fails frees":    {func(s *simple) { s.renewFrees = true }, []string{"RenewedByHand"}},
		"renews by a default":           {func(s *simple) { s.renewal, s.script = renewRight, eight }, []string{"LeaseRenewed"}},
		"a repeated release hangs":      {func(s *simple) { s.releases, s.hangsAgain = hangs, true }, []string{"ReleaseRepeated"}},
		"a late release hangs":          {func(s *simple) { s.releases = hangs }, []string{"ReleaseStale"}},
		"a failed release insists":      {func(s *simple) { s.releases = insists }, []string{"ReleaseRetried"}},
		"backs off without a limit":     {func(s *simple) { s.backsOff = time.Hour }, []string{"WaiterServed"}},
		"wakes once":                    {func(s *simple) { s.acquires, s.releases = wakesOnce, tells }, []string{"WaiterServed"}},
		"a failed wait ends others":     {func(s *simple) { s.acquires = spoils(isEnded, false) }, []string{"AcquireLate"}},
		"a refused wait ends a key's":   {func(s *simple) { s.acquires = spoils(isRefused, true) }, []string{"AcquireLate"}},
		"a refused wait ends others":    {func(s *simple) { s.acquires = spoils(isRefused, false) }, []string{"AcquireLate"}},
		"a failed try ends others":      {func(s *simple) { s.acquires = spoils(isEnded, false); s.tryCalls = s.acquires }, []string{"AcquireLate"}},
		"a refused try ends others":     {func(s *simple) { s.acquires = spoils(isRefused, false); s.tryCalls = s.acquires }, []string{"AcquireLate"}},
		"failed waiters get the lock":   {func(s *simple) { s.acquires = queues(false) }, []string{"WaitersCutOff", "ServerErrors"}},
		"joins a queue for ever":        {func(s *simple) { s.acquires = queues(true) }, []string{"EveryMessage"}},
		"releases the last 100 only":    {func(s *simple) { releasesLast(s, errors.New("unknown lease")) }, []string{"KeysIndependent"}},
		"and says that others are lost": {func(s *simple) { releasesLast(s, dlock.ErrLost) }, []string{"KeysIndependent"}},
		"releases say that they fail":   {func(s *simple) { s.releases = saysFailed }, []string{"ReleaseRepeated"}},
		"lost, if it was renewed":       {func(s *simple) { s.renewal, s.releases = renewRight, saysLostRenewed }, []string{"ReleaseRepeated"}},
		"lost, if renewed by hand":      {func(s *simple) { s.releases = saysLostRenewed }, []string{"ReleaseRepeated"}},
		"renewed by hand once":          {func(s *simple) { s.byHand = handOnce }, []string{"RenewedByHand"}},
		"renewed by hand, then refused": {func(s *simple) { s.byHand = handFails }, []string{"RenewedByHand"}},
		"a waiter's isn't renewed":      {renewsBut(func(_ *simple, _ string, waited bool) bool { return waited }), []string{"LeaseRenewed"}},
		"odd keys aren't renewed":       {renewsBut(func(_ *simple, key string, _ bool) bool { return isOdd(key) }), []string{"LeaseRenewed"}},
		"a successor's isn't renewed":   {renewsSucceeding, []string{"LeaseRenewed"}},
		"a successor's has no TTL":      {func(s *simple) { succeeding(s, func(l *lease) { l.s.redis.Persist(l.ctx, l.key) }) }, []string{"LeaseLasts"}},
		"a failed release ends the next": {func(s *simple) {
			renewsBut(isMarked)(s)
			s.releases = func(_ context.Context, l *lease, free func() error) error {
				err := free()
				if isEnded(err) {
					l.s.latest.Store(l.key, true)
				}
				return err
			}
		}, []string{"LeaseRenewed"}},
		"a failed try ends the next": {func(s *simple) {
			renewsBut(isMarked)(s)
			renewed := s.tryCalls
			s.tryCalls = func(ctx context.Context, s *simple, key string, try asking) (scenarios.Lease, error) {
				l, err := renewed(ctx, s, key, try)
				if isEnded(err) {
					s.latest.Store(key, true)
				}
				return l, err
			}
		}, []string{"LeaseRenewed"}},
		"odd keys aren't released": {func(s *simple) {
			s.releases = func(_ context.Context, l *lease, free func() error) error {
				if isOdd(l.key) {
					return nil
				}
				return free()
			}
		}, []string{"KeysIndependent"}},
		"a race is an error":             {conflicts(), []string{"Exclusive"}},
		"odd keys' waiters aren't told":  {func(s *simple) { s.acquires = sleepsIfOdd }, []string{"WaiterServed"}},
		"Close frees what is lost":       {func(s *simple) { s.closes = deletesAll; s.releases = unchanged }, []string{"CloseEnds"}},
		"opened in vain":                 {opensInVain, []string{"EveryMessage"}},
		"a cancelled wait fails others":  {func(s *simple) { failsWaits(s, func(err error) bool { return errors.Is(err, context.Canceled) }) }, []string{"OneClient"}},
		"a refused try fails waits":      {func(s *simple) { failsWaits(s, func(err error) bool { return errors.Is(err, dlock.ErrHeld) }) }, []string{"OneClient"}},
		"short waits are endless":        {func(s *simple) { s.acquires, s.tryCalls = roundsDown, roundsDown }, []string{"WaiterCancelled"}},
		"a refused try's goroutine":      {func(s *simple) { s.tryCalls = leavesOn(isRefused) }, []string{"NothingLeft"}},
		"a renewal's goroutine":          {func(s *simple) { s.renews = leavesRenewal }, []string{"NothingLeft"}},
		"tries though its context ended": {func(s *simple) { s.tryCalls = triesOn }, []string{"EndsWithContext"}},
		"an ended context loses":         {func(s *simple) { s.renews = losesIfEnded }, []string{"RenewedByHand"}},
		"renewing panics when closed":    {func(s *simple) { s.renews = panicsIfClosed }, []string{"CloseEnds"}},
		"a try hangs when closed":        {func(s *simple) { s.tryCalls = hangsIfClosed }, []string{"CloseEnds"}},
		"an old lease has a new token":   {func(s *simple) { s.tryCalls = sharesToken; s.acquires = sharesToken }, []string{"TokensIncrease"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			broken, servers := new(simple), 1
			if c.set(broken); broken.anyServer || broken.majority {
				servers = 3
			}
			virtually(t, servers, open(c.set), func(t *testing.T, k promises.Kit) {
				k.Service.NoRenew = broken.renewal == renewNever
				k.Only, k.Fixed = c.want, broken.noRelease
				r := promises.Run(t, k)
				requireBroken(t, r, c.want...)
				if broken.leaks {
					require.Contains(t, r.Rows[0].Why, "(*simple).try.func1", "it says what runs on")
				}
			})
		})
	}
}

// Each defect is detected by the promises in want and, except perhaps for the dear ones, by no others.
func TestBrokenOnce(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		nodes int
		set   func(*simple)
		want  string
	}{
		"released again after a lost reply": {1, func(s *simple) { s.releaseOnce = true }, "ReleaseRetried ReleaseLate RenewedByHand"},
		"released late, by one owner":       {1, func(s *simple) { s.sendsOnce = true }, "ReleaseLate ReleaseRetried RenewedByHand ServerErrors"},
		"a token read after the grant":      {1, func(s *simple) { s.tokenRead = true }, "TokensIncrease"},
		"renewed twice, and no more":        {1, func(s *simple) { s.renewal = renewTwice }, "LeaseRenewed ServerErrors"},
		"cancelled as it is granted":        {1, func(s *simple) { s.renewal, s.dropsGrant = renewRight, true }, "WaiterCancelled"},
		"renewed until three have failed":   {1, func(s *simple) { s.renewal = renewThrice }, "LeaseRenewed"},
		"renewed until one fails":           {1, func(s *simple) { s.renewal = renewFragile }, "LeaseRenewed ServerErrors"},
		"renewed until an error":            {1, func(s *simple) { s.renewal = renewToError }, "ServerErrors"},
		"stops silently at an error":        {1, func(s *simple) { s.renewal = renewSilently }, "ServerErrors"},
		"an error renews":                   {1, func(s *simple) { s.renewal, s.endless = renewHopes, true }, "ServerErrors"},
		"an error grants to waiters":        {1, func(s *simple) { s.acquires = believes }, "WaiterServed WaitersCutOff ServerErrors"},
		"a failed release is lost":          {1, func(s *simple) { s.releases = forgets() }, "ReleaseRetried ServerErrors"},
		"an error frees":                    {1, func(s *simple) { s.releases = freesByError }, "ServerErrors"},
		"an error grants":                   {1, func(s *simple) { s.tryCalls = grantsOn(isServers) }, "ServerErrors"},
		"a release says that it was lost":   {1, func(s *simple) { s.releases = saysLost }, "ReleaseRepeated"},
		"a refused try joins a queue":       {1, joins, "EveryMessage"},
		"a client's calls take turns":       {1, takesTurns, "OneClient"},
		"waits end together":                {1, sharesWaits, "OneClient"},
		"renewed by hand for its client":    {1, func(s *simple) { s.byHand = handOwn }, "RenewedByHand"},
		"renewed by hand by a default":      {1, func(s *simple) { s.byHand = handCapped }, "LeaseLasts"},
		"renewed by hand in whole seconds":  {1, func(s *simple) { s.byHand = handWhole }, "RenewedByHand"},
		"at most eight seconds":             {1, func(s *simple) { s.capped = true }, "LeaseLasts"},
		"renewed until one is lost":         {1, func(s *simple) { s.renewal = renewToLoss }, "HolderReturns LeaseRenewed"},
		"a closed client's goroutine":       {1, func(s *simple) { s.leaksClosed = true }, "NothingLeft"},
		"waits on when it is closed":        {1, func(s *simple) { s.waitsOn = true }, "CloseEnds"},
		"whole seconds":                     {1, func(s *simple) { s.seconds = true }, "OddTTLs"},
		"the nearest second":                {1, func(s *simple) { s.nearest = true }, "OddTTLs"},
		"microseconds are for ever":         {1, func(s *simple) { s.shortForEver = true }, "OddTTLs"},
		"absolute time":                     {1, func(s *simple) { s.absolute = true }, "ClockSkew"},
		"the token is the owner":            {1, func(s *simple) { s.tokenOwner = true }, "DataLoss"},
		"a try prolongs the lease":          {1, func(s *simple) { s.tryExtends = true }, "Exclusive"},
		"a watchdog for all leases":         {1, func(s *simple) { s.renewal = renewToRelease }, "LeaseRenewed"},
		"the first server's token":          {3, func(s *simple) { s.majority = true }, "TokensIncrease DataLoss"},
		"waits for each server":             {3, func(s *simple) { s.majority, s.unlimited = true, true }, "TokensIncrease DataLoss Partition"},
		"a failed try leaves a connection":  {1, func(s *simple) { s.tryConnects = true }, "NothingLeft"},
		"renews what the server forgot":     {1, func(s *simple) { s.renewal = renewRegardless }, "DataLoss"},
		"renews what somebody deleted":      {1, func(s *simple) { s.renewal = renewAlive }, "DataLoss"},
		"renewed until another is lost":     {1, func(s *simple) { s.renewal = renewGroup }, "LeaseRenewed"},
		"waiters register with the server":  {1, func(s *simple) { s.acquires = registers }, "DataLoss"},
		"remembers its records":             {1, func(s *simple) { s.records = true }, "DataLoss"},
		"loads the renewals' script once":   {1, func(s *simple) { s.renewal, s.renewOnce = renewRight, true }, "DataLoss"},
		"and of those by hand":              {1, func(s *simple) { s.renewOnce = true }, "DataLoss"},
		"one server renews a lease":         {3, func(s *simple) { s.majority, s.anyRenewal = true, true }, "TokensIncrease DataLoss Partition"},
		"loads a script once":               {1, func(s *simple) { s.loadedOnce = true }, "DataLoss"},
		"tires":                             {1, func(s *simple) { s.tires = true }, "Exclusive OneClient TokensIncrease"},
		"stops when it is refused":          {1, func(s *simple) { s.renewal = renewToRefusal }, "HolderDisconnected ServerErrors"},
		"waiters take all connections":      {1, func(s *simple) { s.renewal, s.pooled = renewRight, true }, "LeaseRenewed WaiterServed"},
		"counted from a wait by its holder": {1, func(s *simple) { s.fromWait = true }, "WaiterServed"},
		"a waiter leaves with others":       {1, func(s *simple) { s.leavesAll = true }, "WaiterServed"},
		"releases once":                     {1, func(s *simple) { s.oneRelease = true }, "ReleaseRetried ServerErrors"},
		"a queue that forgets":              {1, func(s *simple) { s.forgets = true }, "WaiterServed DataLoss"},
		"a timer that isn't stopped":        {1, func(s *simple) { s.timers = true }, "LeaseLasts"},
		"a lost lease leaves a goroutine":   {1, func(s *simple) { s.renewal, s.lostStays = renewRight, true }, "NothingLeft"},
		"renewed while it is released":      {1, func(s *simple) { s.renewal = renewStays }, "NothingLeft"},
		"released while it is renewed":      {1, func(s *simple) { s.renewal = renewVersions }, "WaiterServed RenewedByHand"},
		"a served waiter ends the others":   {1, func(s *simple) { s.acquires = endsOthers }, "WaiterServed"},
		"a counter that is also a key":      {1, func(s *simple) { s.counter = ":fence" }, "KeysIndependent"},
		"two Closes at once panic":          {1, func(s *simple) { s.closeRaces = true }, "CloseEnds"},
		"granted when it is closed":         {1, func(s *simple) { s.renewal, s.waitStays, s.acquires = renewRight, true, goesOn }, "CloseEnds"},
		"Close tells no holder":             {1, func(s *simple) { s.renewal, s.endless = renewUnclosed, true }, "CloseEnds"},
		"a release says nothing":            {1, func(s *simple) { s.saysNothing = true }, "ReleaseRetried ServerErrors"},
		"one of three servers":              {3, func(*simple) {}, "DataLoss"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			lock := new(simple)
			c.set(lock)
			require.Subset(t, promises.Names(), strings.Fields(c.want))
			for _, promise := range promises.Names() {
				broken := slices.Contains(strings.Fields(c.want), promise)
				if slices.Contains(dear, promise) && !broken {
					continue
				}
				// With all keys on one server, they take most of the test's time.
				virtually(t, c.nodes, open(c.set), func(t *testing.T, k promises.Kit) {
					k.Only, k.Service.NoRenew = []string{promise}, lock.renewal == renewNever
					r := promises.Run(t, k)
					if !broken {
						requireBroken(t, r)
						return
					}
					requireBroken(t, r, promise)
					if name == "absolute time" {
						require.Regexp(t, "granted the lock .* an hour ahead; the lease .* hadn't ended .* an hour behind", r.Rows[0].Why)
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
		"counts, and renews":     {func(s *simple) { s.renewal = renewRight; counting(counts)(s) }, nil},
		"an inner release frees": {func(s *simple) { s.reentrant = true }, []string{"LeaseLasts"}},
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
			s.renewal = renewRight
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
				k.Service.Reentrant, k.Service.NoRenew = true, lock.renewal == renewNever
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
		virtually(t, 1, open(func(s *simple) { s.renewal = renewRight; c.set(s) }), func(t *testing.T, k promises.Kit) {
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
		k := kit(t, open(func(s *simple) { s.plainDelete = c.broken != nil }))
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

// TestStrict fails in a child process.
func TestStrict(t *testing.T) {
	const env = "FENCELAB_TEST_STRICT"
	stalls := errors.New("out of order")
	for name, c := range map[string]struct {
		open scenarios.Open
		only []string
		want string
	}{
		"broken": {open(func(s *simple) { s.plainDelete = true }), []string{"CloseEnds", "ReleaseRepeated"}, ": ReleaseRepeated\n"},
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
