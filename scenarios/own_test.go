package scenarios_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/open"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/open/onredis"
	"github.com/fencelab/fencelab/internal/open/stores"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/filestore"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

const (
	own          = "mine"        // without an address; loses everything in a crash
	ownNoBare    = "plain files" // without an address; always fenced
	ownCareless  = "careless"    // ignores fences
	ownReads     = "reads don't"
	ownTwice     = "twice"
	ownElsewhere = "elsewhere" // connects to the server directly, not to StoreSpec.Addr
	ownFull      = "full"      // discards writes
	ownFails     = "on fire"
	ownRaces     = "races"
	ownNothing   = "nothing"
)

const envServer = "FENCELAB_TEST_OWN_SERVER"

func openStore(ctx context.Context, s scenarios.StoreSpec) (resource.Store, error) {
	switch s.Store {
	case ownNoBare:
		return filestore.Open(s.Dir)
	case ownFails:
		return nil, fmt.Errorf("the store is on fire: %w", syscall.ENOTSUP)
	case ownRaces:
		race()
	case ownNothing:
		return nil, nil //nolint:nilnil // what the kit should notice
	case ownElsewhere:
		s.Addr = os.Getenv(envServer)
	}
	if s.Addr == "" && s.Store != onredis.Bolt.Name {
		return variant(s.Store, resource.NewMemory()), nil
	}
	store, err := open.Store(ctx, s)
	if err != nil {
		return nil, err
	}
	return variant(s.Store, store.(resource.Overwriter)), nil
}

func variant(name string, s resource.Overwriter) resource.Store {
	switch name {
	case ownCareless:
		return careless{unraised{s}}
	case ownReads:
		return unraised{s}
	case ownTwice:
		return repeats{s}
	case ownFull:
		return full{s}
	}
	return s
}

type careless struct{ unraised }

func (c careless) Write(ctx context.Context, key string, _ resource.Fence, value []byte) error {
	return c.Overwrite(ctx, key, resource.Fence{}, value)
}

type unraised struct{ resource.Overwriter }

func (u unraised) ReadFenced(ctx context.Context, key string, _ resource.Fence) (resource.Record, error) {
	return u.Read(ctx, key)
}

type repeats struct{ resource.Overwriter }

func (r repeats) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	return errors.Join(r.Overwriter.Write(ctx, key, f, value), r.Overwriter.Write(ctx, key, f, value))
}

type full struct{ resource.Overwriter }

func (full) Write(context.Context, string, resource.Fence, []byte) error { return syscall.ENOSPC }

func onServer(name string, redis *testbed.Server) *scenarios.Store {
	s := open.OnServer(stores.Redis, redis)
	s.Name, s.Server, s.Open = name, "", openStore
	return s
}

func durableRedis(t *testing.T) *testbed.Server {
	t.Helper()
	notExternal(t)
	o := options(t)
	o.Args = open.DurableRedis()
	s, _ := ownRedis(t, o)
	return s
}

func hazard(t *testing.T, name string) scenarios.Scenario {
	t.Helper()
	s, ok := scenarios.Hazard(name)
	require.True(t, ok, "there is no hazard %q", name)
	return s
}

func playOver(t *testing.T, store *scenarios.Store, name string, f history.Fencing) (*scenarios.Outcome, error) {
	t.Helper()
	r := onRedis(sharedRedis(t))
	r.Store = store
	return r.Run(t.Context(), hazard(t, name), f)
}

func TestOwnStore(t *testing.T) {
	t.Parallel()
	sharedRedis(t)
	for _, name := range []string{"PauseExceedsTTL", "WriteDelayedInNetwork", "ResourceCrash"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			redis := sharedRedis(t)
			if name == "ResourceCrash" {
				redis = durableRedis(t)
			}
			for f := range hazard(t, name).Expect {
				runOnce(t, onredis.Service(sharedRedis(t)), onServer(ownTwice, redis), hazard(t, name), f)
			}
		})
	}
}

// Refusals are counted from the last start.
func TestRefusedBeforeACrash(t *testing.T) {
	for _, store := range []*scenarios.Store{onredis.Bolt, onServer(own, durableRedis(t))} {
		r := onRedis(sharedRedis(t))
		r.Store = store
		o, err := r.Run(t.Context(), schedule(t, "worker A victim, run A until read, pause A, run B until done, resume A, run A until done, "+
			"kill resource, restart resource"), history.FencingOn)
		require.NoError(t, err)
		require.Equal(t, history.Safe, o.Verdict, "%q", o.Findings)
		require.Equal(t, 1, o.Refused)
		require.Zero(t, o.Events[len(o.Events)-2].Refusals, "of the final value")
	}
}

func TestWithoutStore(t *testing.T) {
	o, err := playOver(t, nil, "PauseExceedsTTL", history.FencingOn)
	require.NoError(t, err)
	require.Equal(t, history.Safe, o.Verdict, "%q", o.Findings)
	require.Equal(t, "memory", o.Events[0].Run.Store)
	_, err = playOver(t, nil, "ResourceCrash", history.FencingOn)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorContains(t, err, "memory loses its data when killed")
}

func TestOwnStoreIsFoundOut(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		store   *scenarios.Store
		hazard  string
		finding string
	}{
		"checks no fence, on a server": {
			onServer(ownCareless, sharedRedis(t)), "PauseExceedsTTL", "a write without a token was accepted, with fencing on",
		},
		"forgets": {&scenarios.Store{Name: own, Open: openStore}, "ResourceCrash", "the resource forgot a fence"},
		"fences writes alone, on a server": {
			onServer(ownReads, sharedRedis(t)), "LateWriteBeforeSuccessorWrites", "entry A was accepted and is lost",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o, err := playOver(t, c.store, c.hazard, history.FencingOn)
			require.NoError(t, err)
			require.Equal(t, history.Violated, o.Verdict, "%q", o.Findings)
			require.Contains(t, strings.Join(o.Findings, "\n"), c.finding)
		})
	}
}

func TestOwnStoreThatRaisesNoFence(t *testing.T) {
	t.Parallel()
	for _, store := range []string{ownCareless, ownReads} {
		_, err := playOver(t, &scenarios.Store{Name: store, Open: openStore}, "PauseExceedsTTL", history.FencingOn)
		require.ErrorContains(t, err, "the fencing token was not enforced", store)
		require.ErrorContains(t, err, ".0, and the reply has 0.0", store) // the token is greater if a lease ran out meanwhile
	}
}

func TestOwnStoreIsBack(t *testing.T) {
	t.Parallel()
	server := durableRedis(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	store := onServer(own, server)
	kill, restart := store.Kill, store.Restart
	store.Kill = func(ctx context.Context) error {
		err := kill(ctx)
		cancel(errEnough)
		return errors.Join(err, context.Cause(ctx)) // it has died, but the kill isn't confirmed
	}
	store.Restart = func(ctx context.Context) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return restart(ctx)
	}
	r := onRedis(sharedRedis(t))
	r.Store = store
	_, err := r.Run(ctx, hazard(t, "ResourceCrash"), history.FencingOn)
	require.ErrorContains(t, err, errEnough.Error())
	client, err := redisclient.New(server.URL)
	require.NoError(t, err)
	require.NoError(t, errors.Join(client.Ping(t.Context()).Err(), client.Close()))
}

// partner is a client whose Close fails once its server was killed.
type partner struct {
	resource.Store
	dead *atomic.Int32
	at   int32 // kills before it was opened
}

func (p partner) Close() error {
	err := p.Store.Close()
	if p.dead.Load() > p.at {
		err = errors.New("broken pipe")
	}
	return err
}

func TestOwnStoreCloses(t *testing.T) {
	t.Parallel()
	store, dead := onServer(own, durableRedis(t)), &atomic.Int32{}
	store.Open = func(ctx context.Context, s scenarios.StoreSpec) (resource.Store, error) {
		client, err := openStore(ctx, s)
		return partner{client, dead, dead.Load()}, err
	}
	kill := store.Kill
	store.Kill = func(ctx context.Context) error {
		dead.Add(1)
		return kill(ctx)
	}
	o, err := playOver(t, store, "ResourceCrash", history.FencingOn)
	require.NoError(t, err)
	require.Equal(t, history.Safe, o.Verdict)
}

func TestOwnStoreRefuses(t *testing.T) {
	t.Parallel()
	addr := sharedRedis(t).URL
	for name, c := range map[string]struct {
		store       *scenarios.Store
		hazard      string
		fencing     history.Fencing
		unsupported bool
		want        string
	}{
		"it is always fenced": {
			&scenarios.Store{Name: ownNoBare, Open: openStore}, "PauseExceedsTTL", history.FencingOff,
			true, "resource: plain files can't be written to with fencing off: its *filestore.Store has no Overwrite, see resource.Overwriter",
		},
		"a server's is": {
			&scenarios.Store{Name: ownNoBare, Addr: addr, Open: func(context.Context, scenarios.StoreSpec) (resource.Store, error) {
				return struct{ resource.Store }{resource.NewMemory()}, nil
			}}, "PauseExceedsTTL", history.FencingOff, true, "has no Overwrite",
		},
		"it can't be killed": {
			&scenarios.Store{Name: own, Addr: addr, Open: openStore}, "ResourceCrash", history.FencingOn,
			true, "mine can't be killed: its Store has no Kill and Restart",
		},
		"it has one ledger": {onServer(own, sharedRedis(t)), "TwoResources", history.FencingOn, true, "worker A writes two ledgers, and a Store has one"},
		"it is nowhere": {
			&scenarios.Store{Name: own, Addr: "/srv/ledgers", Open: openStore}, "WriteDelayedInNetwork", history.FencingOn,
			true, "calls to mine can't be delayed: its address has no host and port",
		},
		"it forgets": {
			&scenarios.Store{Name: onredis.Bolt.Name, Open: openStore, Volatile: true}, "ResourceCrash", history.FencingOn,
			true, "loses its data when killed",
		},
		"there is none": {&scenarios.Store{Name: onredis.Bolt.Name}, "PauseExceedsTTL", history.FencingOn, false, "Runner.Store has no Open or no Name"},
		"it has no name": {
			&scenarios.Store{Open: openStore}, "PauseExceedsTTL", history.FencingOn,
			false, "Runner.Store has no Open or no Name",
		},
		"it doesn't open": {
			&scenarios.Store{Name: ownFails, Open: openStore}, "PauseExceedsTTL", history.FencingOn,
			false, "scenarios: PauseExceedsTTL, fencing on: resource: open on fire: the store is on fire",
		},
		"a server's doesn't open": {
			&scenarios.Store{Name: ownFails, Addr: addr, Open: openStore}, "PauseExceedsTTL", history.FencingOn,
			false, "scenarios: PauseExceedsTTL, fencing on: open on fire: the store is on fire",
		},
		"it is nil": {
			&scenarios.Store{Name: ownNothing, Open: openStore}, "PauseExceedsTTL", history.FencingOn,
			false, "resource: open nothing: got no store and no error",
		},
	} {
		t.Run(name, func(t *testing.T) {
			o, err := playOver(t, c.store, c.hazard, c.fencing)
			require.ErrorContains(t, err, c.want)
			require.Equal(t, c.unsupported, errors.Is(err, errors.ErrUnsupported))
			require.Equal(t, history.Inconclusive, o.Verdict)
		})
	}
	for _, secret := range []string{"redis://u:hunter2@h", "redis://u:hunter2@h:port"} {
		_, err := playOver(t, &scenarios.Store{Name: own, Addr: secret, Open: openStore}, "WriteDelayedInNetwork", history.FencingOn)
		require.ErrorContains(t, err, "calls to mine can't be delayed")
		require.NotContains(t, err.Error(), "hunter2")
	}
	_, err := scenarios.OpenOwn(t.Context(), nil, scenarios.StoreSpec{Store: onredis.Bolt.Name})
	require.ErrorContains(t, err, "pass Runner.Store.Open to scenarios.ChildWithStore in TestMain or main")
}

var errEnough = errors.New("the user has had enough")

func endAfter(actorOrTarget, name string) func(*scenarios.Runner, context.CancelCauseFunc) {
	return func(r *scenarios.Runner, cancel context.CancelCauseFunc) {
		r.OnEvent = func(e history.Event) {
			if is(e, actorOrTarget, name) {
				time.AfterFunc(500*time.Millisecond, func() { cancel(errEnough) })
			}
		}
	}
}

func TestOwnStoreNotDelayed(t *testing.T) {
	t.Setenv(envServer, sharedRedis(t).URL)
	for name, want := range map[string]string{
		ownElsewhere: "A's write bypassed the link that should hold it; does OpenStore connect to StoreSpec.Addr?",
		ownFull:      "A failed before the link held its write: no space left on device",
	} {
		t.Run(name, func(t *testing.T) {
			r := onRedis(sharedRedis(t))
			r.Store = onServer(name, sharedRedis(t))
			o, err := r.Run(t.Context(), hazard(t, "WriteDelayedInNetwork"), history.FencingOn)
			require.ErrorContains(t, err, want)
			require.NotEqual(t, history.Safe, o.Verdict)
		})
	}
}

const (
	envRedis   = "FENCELAB_TEST_OWN_REDIS"
	envHelpers = "FENCELAB_TEST_OWN_HELPERS"
)

func openLock(ctx context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
	what := s.Variant
	if !strings.HasPrefix(what, "test-") {
		return open.Lock(ctx, s)
	}
	s.Variant = ""
	switch what {
	case "test-cannot-open":
		return nil, errors.New("the lock server is on fire")
	case "test-races":
		race()
	case "test-never-renews":
		s.Renew = false
	case "test-elsewhere":
		s.Addrs = []string{os.Getenv(envRedis)}
	case "test-first-server-only":
		s.Addrs = s.Addrs[:1]
	case "test-helpers":
		if err := startHelpers(); err != nil {
			return nil, err
		}
	case "test-no-lock":
		return nil, nil //nolint:nilnil // what the kit should notice
	}
	l, err := open.Lock(ctx, s)
	return ownLock{l, what, s.Addrs[0]}, err
}

func race() {
	n, done := 0, make(chan struct{})
	go func() {
		n++
		close(done)
	}()
	n++
	<-done
}

// startHelpers starts two processes that outlive this one and share its output; the second has its own session.
func startHelpers() error {
	pids, err := os.OpenFile(os.Getenv(envHelpers), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	for _, own := range []bool{false, true} {
		cmd := exec.Command("sleep", "600") //nolint:noctx // it is to be left
		cmd.Stdout, cmd.SysProcAttr = os.Stdout, &syscall.SysProcAttr{Setsid: own}
		if err := cmd.Start(); err != nil {
			return err
		}
		if _, err := fmt.Fprintln(pids, cmd.Process.Pid); err != nil {
			return err
		}
	}
	return pids.Close()
}

type ownLock struct {
	scenarios.Lock
	what, addr string
}

func (l ownLock) Acquire(ctx context.Context, key string) (scenarios.Lease, error) {
	if victim, ok := strings.CutPrefix(l.what, "test-kills-"); ok {
		if err := killSibling(victim); err != nil {
			return nil, err
		}
	}
	if l.what == "test-lets-in" {
		c, err := redisclient.New(l.addr)
		if err != nil {
			return nil, err
		}
		if err := errors.Join(c.Del(ctx, "lock:{"+key+"}").Err(), c.Close()); err != nil {
			return nil, err
		}
	}
	lease, err := l.Lock.Acquire(ctx, key)
	if err != nil || l.what == "test-no-lease" {
		return nil, err
	}
	return &ownLease{Lease: lease, what: l.what}, nil
}

func (l ownLock) TryAcquire(ctx context.Context, key string) (scenarios.Lease, error) {
	if l.what == "test-lets-in" {
		return l.Acquire(ctx, key)
	}
	return l.Lock.TryAcquire(ctx, key)
}

func (l ownLock) Close() error {
	err := l.Lock.Close()
	if l.what == "test-cannot-close" {
		err = errors.Join(err, errors.New("the lock server is on fire"))
	}
	return err
}

func killSibling(name string) error {
	for _, pid := range childrenOf(os.Getppid()) {
		env, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", pid))
		if err == nil && bytes.Contains(env, fmt.Appendf(nil, `{"Name":%q`, name)) {
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
				return err
			}
		}
	}
	return nil
}

type ownLease struct {
	scenarios.Lease
	what     string
	reported bool
}

// TTL is asked for when the grant is reported. The next call is Fence, before the first request.
func (l *ownLease) TTL() time.Duration {
	l.reported = true
	return l.Lease.TTL()
}

func (l *ownLease) Fence() uint64 {
	switch {
	case l.what == "test-no-token":
		return 0
	case l.what == "test-kills-later" && l.reported:
		if err := killSibling(scenarios.Resource); err != nil {
			panic(err)
		}
	}
	return l.Lease.Fence()
}

func (l *ownLease) Context() context.Context {
	if l.what == "test-believes" || l.what == "test-goes-on" {
		return context.Background()
	}
	return l.Lease.Context()
}

func (l *ownLease) Until() time.Time {
	switch l.what {
	case "test-believes":
		return time.Now().Add(l.TTL())
	case "test-no-end":
		return time.Time{}
	}
	return l.Lease.Until()
}

func (l *ownLease) Release(ctx context.Context) error {
	err := l.Lease.Release(ctx)
	if err != nil && l.what == "test-fails-late" {
		return errors.New("the lock server is on fire")
	}
	return err
}

func TestLockWithoutTokens(t *testing.T) {
	t.Parallel()
	sharedRedis(t)
	for _, name := range []string{
		"PauseExceedsTTL", "WriteDelayedInNetwork", "LateWriteBeforeSuccessorWrites", "ResourceCrash", "ReleaseCompareAndDelete",
		"HolderKilled", "WorkExceedsTTL", "HolderPartitioned", "TwoResources", "SecondResourceUntouched",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := hazard(t, name)
			s.Variant = "test-no-token"
			o, err := onRedis(sharedRedis(t)).Run(t.Context(), s, history.FencingOff)
			require.NoError(t, err)
			require.Equal(t, s.Expect[history.FencingOff], o.Verdict, "%q", o.Findings)
			require.Contains(t, o.Notes, "the lock has no fencing tokens: no resource can tell a stale holder from its successor")
			require.Equal(t, withoutTokens(t, name), history.Trace(o.Events))
		})
	}
	for _, f := range []history.Fencing{history.FencingWrites, history.FencingOn} {
		s := hazard(t, "PauseExceedsTTL")
		s.Variant = "test-no-token"
		o, err := onRedis(sharedRedis(t)).Run(t.Context(), s, f)
		require.ErrorContains(t, err, "A failed: the lock has granted a lease without a fencing token, Lease.Fence is 0: with fencing "+string(f))
		require.Equal(t, history.Inconclusive, o.Verdict)
	}
	r := onRedis(sharedRedis(t))
	r.Store = onServer(own, sharedRedis(t))
	s := hazard(t, "PauseExceedsTTL")
	s.Variant = "test-no-token"
	o, err := r.Run(t.Context(), s, history.FencingOff)
	require.NoError(t, err)
	require.Equal(t, history.Violated, o.Verdict, "%q", o.Findings)
	require.Equal(t, withoutTokens(t, "PauseExceedsTTL"), history.Trace(o.Events))
}

func withoutTokens(t *testing.T, name string) []string {
	t.Helper()
	text := regexp.MustCompile(`(?m)^(\w+ acquired) #\d$`).ReplaceAllString(hazard(t, name).Traces["off"], "$1 none")
	text = regexp.MustCompile(`(?m)^(  resource accepts) write #\d (\[.*\])(?: after #\d)?((?:, ledger \d)?)$`).ReplaceAllString(text, "$1 unfenced write $2$3")
	require.NotContains(t, text, "#")
	return strings.Split(strings.TrimSuffix(text, "\n"), "\n")
}

func TestHolderNotPartitioned(t *testing.T) {
	redis := sharedRedis(t)
	for name, c := range map[string]struct {
		variant string
		hazard  string
		ends    bool
		want    []string
	}{
		"a lock that doesn't renew": {"test-never-renews", "HolderPartitioned", true, []string{
			"A failed: the lease has ended 10 times without being renewed: with LockSpec.Renew", "set Service.NoRenew",
		}},
		"a lock that isn't cut off": {"test-elsewhere", "HolderPartitioned", false, []string{
			"the user has had enough; it is cut off, but its lease doesn't end: does Open connect to LockSpec.Addrs",
		}},
		"a lease that goes on and on": {"test-believes", "HolderPartitioned", false, []string{
			"the user has had enough; it is cut off, but its lease doesn't end", "does the lease end when it can't be renewed?",
		}},
		// Cut off, it would fail in the same way, some seconds later.
		"a lease whose context never ends": {"test-goes-on", "WorkExceedsTTL", true, []string{
			"A failed: the lease's context is still live 500ms after the end of the lease",
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s := hazard(t, c.hazard)
			s.Variant = c.variant
			r := onRedis(redis)
			r.Service.Env = []string{envRedis + "=" + redis.URL}
			ctx, cancel := context.WithCancelCause(t.Context())
			defer cancel(nil)
			if !c.ends {
				r.TTL = 10 * time.Second // a stall must not end the lease
				endAfter("A", "cut")(r, cancel)
			}
			o, err := r.Run(ctx, s, history.FencingOn)
			for _, want := range c.want {
				require.ErrorContains(t, err, want, "%s", strings.Join(history.Trace(o.Events), "\n"))
			}
			require.Equal(t, history.Inconclusive, o.Verdict)
		})
	}
}

func TestServiceWithoutRenewals(t *testing.T) {
	for _, s := range scenarios.Hazards() {
		if !s.On(locks.Redis) || s.Faulty() {
			continue
		}
		svc := onredis.Service(sharedRedis(t))
		svc.NoRenew = true
		ends := s.Name == "WedgedHolder" || s.Name == "HolderPartitioned"
		err := svc.Check(&s, history.FencingOn)
		require.Equal(t, ends, errors.Is(err, errors.ErrUnsupported), "%s: %v", s.Name, err)
		if ends {
			require.ErrorContains(t, err, "worker A must lose a lease that is renewed, but ")
		}
	}
}

func TestServiceWithoutTokens(t *testing.T) {
	for _, name := range []string{"PauseExceedsTTL", "HolderKilled"} {
		s := hazard(t, name)
		svc := onredis.Service(sharedRedis(t))
		svc.NoTokens = true
		for f := range s.Expect {
			err := svc.Check(&s, f)
			require.Equal(t, f != history.FencingOff, errors.Is(err, errors.ErrUnsupported), "%s: %v", f, err)
			if err != nil {
				require.ErrorContains(t, err, ": redis has no tokens, and with fencing "+string(f)+" each grant needs one")
			}
		}
	}
}

func TestOwnLockIsVetted(t *testing.T) {
	for variant, want := range map[string]string{
		"test-no-end":   "A failed: Lease.Until is the zero time: it must be when the lease is presumed lost",
		"test-no-lease": "A failed: the lock returned neither a lease nor an error",
		"test-no-lock":  "A failed: open: got no lock and no error",
	} {
		s := hazard(t, "PauseExceedsTTL")
		s.Variant = variant
		o, err := onRedis(sharedRedis(t)).Run(t.Context(), s, history.FencingOn)
		require.ErrorContains(t, err, want)
		require.NotEqual(t, history.Safe, o.Verdict)
	}

	s := hazard(t, "ReleaseCompareAndDelete")
	s.Variant = "test-lets-in"
	o, err := onRedis(sharedRedis(t)).Run(t.Context(), s, history.FencingOn)
	require.ErrorContains(t, err, "run C until held: C was granted the lock, although another worker should hold it")
	require.NotEqual(t, history.Safe, o.Verdict)
}

func TestRunWithoutChild(t *testing.T) {
	scenarios.NoChild()
	defer scenarios.Child(nil)
	r := scenarios.Runner{Service: &scenarios.Service{}}
	o, err := r.Run(t.Context(), hazard(t, "PauseExceedsTTL"), history.FencingOn)
	require.ErrorContains(t, err, "call scenarios.Child or ChildWithStore first in main or TestMain")
	require.Equal(t, history.Inconclusive, o.Verdict)
	require.Empty(t, o.Events)
}

func TestAdapter(t *testing.T) {
	held, lost := errors.New("taken"), errors.New("too late")
	over := make(chan struct{})
	var grant scenarios.Grant
	var waits bool
	var err error
	a := scenarios.Adapter{Held: held, Lost: lost, Get: func(_ context.Context, _ string, wait bool) (scenarios.Grant, error) {
		waits = wait
		return grant, err
	}}
	require.NoError(t, a.Close())
	a.Shut = func() error { return lost }
	require.ErrorIs(t, a.Close(), lost)
	err = held
	_, got := a.TryAcquire(t.Context(), "k")
	require.ErrorIs(t, got, dlock.ErrHeld)
	require.ErrorIs(t, got, held)
	require.False(t, waits)
	err = nil
	_, got = a.Acquire(t.Context(), "k")
	require.ErrorContains(t, got, "Grant.Release is nil")
	require.True(t, waits)
	grant.Release = func(context.Context) error { return lost }
	_, got = a.Acquire(t.Context(), "k")
	require.ErrorContains(t, got, "neither Until nor Lost")
	_, got = scenarios.Adapter{}.Acquire(t.Context(), "k")
	require.ErrorContains(t, got, "Adapter.Get is nil")

	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	grant = scenarios.Grant{Token: 7, TTL: time.Hour, Until: time.Now().Add(time.Hour), Release: func(context.Context) error { return lost }}
	l, got := a.Acquire(ctx, "k")
	require.NoError(t, got)
	require.Equal(t, []any{uint64(7), time.Hour, grant.Until}, []any{l.Fence(), l.TTL(), l.Until()})
	cancel()
	require.NoError(t, l.Context().Err(), "a lease outlives the context of its acquisition")
	end, _ := l.Context().Deadline()
	require.Equal(t, grant.Until, end)
	require.ErrorIs(t, l.Release(t.Context()), dlock.ErrLost)
	require.ErrorIs(t, l.Context().Err(), context.Canceled)

	grant.Until, grant.Lost = time.Time{}, over
	l, got = a.Acquire(t.Context(), "k")
	require.NoError(t, got)
	require.NoError(t, l.Context().Err())
	close(over)
	<-l.Context().Done()
	require.ErrorIs(t, l.Context().Err(), context.Canceled)
}

func TestAdapterRenews(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		type renewer interface {
			Renew(ctx context.Context) error
		}
		const ttl = time.Second
		lost := errors.New("too late")
		var err error
		grant := scenarios.Grant{Release: func(context.Context) error { return nil }}
		acquire := func() scenarios.Lease {
			grant.Until = time.Now().Add(ttl)
			a := scenarios.Adapter{Lost: lost, Get: func(context.Context, string, bool) (scenarios.Grant, error) { return grant, nil }}
			l, err := a.Acquire(t.Context(), "k")
			require.NoError(t, err)
			return l
		}
		_, ok := acquire().(renewer)
		require.False(t, ok)
		grant.Renew = func(context.Context) (time.Time, error) { return time.Now().Add(ttl), err }
		l, start := acquire(), time.Now()
		time.Sleep(ttl / 2)
		require.NoError(t, l.(renewer).Renew(t.Context()))
		require.Equal(t, start.Add(ttl*3/2), l.Until())
		err = lost
		require.ErrorIs(t, l.(renewer).Renew(t.Context()), dlock.ErrLost)
		<-l.Context().Done()
		require.Equal(t, ttl*3/2, time.Since(start))
		err = nil
		require.NoError(t, l.(renewer).Renew(t.Context()))
		require.Equal(t, start.Add(ttl*3/2), l.Until(), "one that has ended stays so")
		require.Error(t, l.Context().Err())
		grant.Lost = make(chan struct{})
		l = acquire()
		time.Sleep(ttl / 2)
		require.NoError(t, l.(renewer).Renew(t.Context()))
		require.Equal(t, time.Now().Add(ttl), l.Until())
	})
}
