package scenarios_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
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
)

// Names of stores, for openStore.
const (
	ownNoBare    = "plain files"   // one process's, and always fenced
	ownForgets   = "memory"        // one process's, that forgets all in a crash
	ownCareless  = "careless"      // one process's, that looks at no fence
	ownReads     = "reads don't"   // one process's, whose fenced reads don't raise the fence
	ownServer    = "map"           // a server's
	ownElsewhere = "map elsewhere" // a server's, whose client goes its own way to it
	ownFull      = "map full"      // a server's, whose client writes nothing
	ownFails     = "on fire"
	ownNothing   = "nothing"
)

const envServer = "FENCELAB_TEST_OWN_SERVER"

// openStore opens the stores of this package's tests.
func openStore(ctx context.Context, s scenarios.StoreSpec) (resource.Store, error) {
	if s.Store == onredis.Bolt.Name || slices.Contains(stores.Names(), s.Store) {
		return open.Store(ctx, s)
	}
	switch s.Store {
	case ownNoBare:
		return filestore.Open(s.Dir)
	case ownForgets:
		return resource.NewMemory(), nil
	case ownCareless:
		return careless{resource.NewMemory()}, nil
	case ownReads:
		return unraised{resource.NewMemory()}, nil
	case ownServer:
		return mapClient{"http://" + s.Addr}, nil
	case ownFull:
		return full{mapClient{"http://" + s.Addr}}, nil
	case ownElsewhere:
		return mapClient{"http://" + os.Getenv(envServer)}, nil
	case ownNothing:
		return nil, nil //nolint:nilnil // what the kit should notice
	}
	return nil, fmt.Errorf("the store is on fire: %w", syscall.ENOTSUP) // which is no reason to skip anything
}

type careless struct{ *resource.Memory }

func (c careless) Write(ctx context.Context, key string, _ resource.Fence, value []byte) error {
	return c.Overwrite(ctx, key, resource.Fence{}, value)
}

func (c careless) ReadFenced(ctx context.Context, key string, _ resource.Fence) (resource.Record, error) {
	return c.Read(ctx, key)
}

type unraised struct{ *resource.Memory }

func (u unraised) ReadFenced(ctx context.Context, key string, _ resource.Fence) (resource.Record, error) {
	return u.Read(ctx, key)
}

type full struct{ mapClient }

func (full) Write(context.Context, string, resource.Fence, []byte) error { return syscall.ENOSPC }

// mapServer is a user's store: a map behind an HTTP server with its own protocol.
type mapServer struct {
	addr   string
	data   resource.Overwriter
	port   *os.File // keeps the port reserved while the server is down
	server *http.Server
	served chan error
}

type mapCall struct {
	Op     string
	Key    string
	Fence  resource.Fence
	Value  []byte
	Record resource.Record
	Stale  *resource.StaleTokenError
	Error  string
}

func startMap(t *testing.T, data resource.Overwriter) *mapServer {
	t.Helper()
	l, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port, err := l.(*net.TCPListener).File()
	require.NoError(t, errors.Join(err, l.Close()))
	s := &mapServer{addr: l.Addr().String(), data: data, port: port}
	require.NoError(t, s.start(t.Context()))
	t.Cleanup(func() { require.NoError(t, errors.Join(s.kill(context.WithoutCancel(t.Context())), port.Close())) })
	return s
}

func (s *mapServer) store() *scenarios.Store {
	return &scenarios.Store{Name: ownServer, Addr: s.addr, Open: openStore, Kill: s.kill, Restart: s.start}
}

func (s *mapServer) start(context.Context) error {
	l, err := net.FileListener(s.port)
	if err != nil {
		return err
	}
	s.server, s.served = &http.Server{Handler: s}, make(chan error, 1) //nolint:gosec // its clients are ours
	go func(served chan<- error) {
		served <- s.server.Serve(l)
		close(served)
	}(s.served)
	return nil
}

func (s *mapServer) kill(context.Context) error {
	err := s.server.Close()
	<-s.served
	return err
}

func (s *mapServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var c mapCall
	err := json.NewDecoder(r.Body).Decode(&c)
	ctx := context.WithoutCancel(r.Context())
	switch {
	case err != nil:
	case c.Op == "write":
		err = s.data.Write(ctx, c.Key, c.Fence, c.Value)
	case c.Op == "overwrite":
		err = s.data.Overwrite(ctx, c.Key, c.Fence, c.Value)
	case c.Op == "read":
		c.Record, err = s.data.Read(ctx, c.Key)
	default:
		c.Record, err = s.data.ReadFenced(ctx, c.Key, c.Fence)
	}
	if err != nil {
		c.Error = err.Error()
		c.Stale, _ = errors.AsType[*resource.StaleTokenError](err)
		if errors.Is(err, resource.ErrNotFound) {
			c.Error = "no such key"
		}
	}
	_ = json.NewEncoder(w).Encode(c)
}

// mapClient connects for each call.
type mapClient struct{ url string }

func (m mapClient) call(ctx context.Context, c mapCall) (resource.Record, error) {
	text, err := json.Marshal(c)
	if err != nil {
		return resource.Record{}, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, m.url, strings.NewReader(string(text)))
	if err != nil {
		return resource.Record{}, err
	}
	resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Do(req)
	if err != nil {
		return resource.Record{}, err
	}
	var answer mapCall
	err = errors.Join(json.NewDecoder(resp.Body).Decode(&answer), resp.Body.Close())
	switch {
	case err != nil:
		return resource.Record{}, err
	case answer.Stale != nil:
		return resource.Record{}, answer.Stale
	case answer.Error == "no such key":
		return resource.Record{}, resource.ErrNotFound
	case answer.Error != "":
		return resource.Record{}, errors.New(answer.Error)
	}
	return answer.Record, nil
}

func (m mapClient) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	_, err := m.call(ctx, mapCall{Op: "write", Key: key, Fence: f, Value: value})
	return err
}

func (m mapClient) Overwrite(ctx context.Context, key string, f resource.Fence, value []byte) error {
	_, err := m.call(ctx, mapCall{Op: "overwrite", Key: key, Fence: f, Value: value})
	return err
}

func (m mapClient) Read(ctx context.Context, key string) (resource.Record, error) {
	return m.call(ctx, mapCall{Op: "read", Key: key})
}

func (m mapClient) ReadFenced(ctx context.Context, key string, f resource.Fence) (resource.Record, error) {
	return m.call(ctx, mapCall{Op: "read fenced", Key: key, Fence: f})
}

func (mapClient) Close() error { return nil }

func hazard(t *testing.T, name string) scenarios.Scenario {
	t.Helper()
	s, ok := scenarios.Hazard(name)
	require.True(t, ok, "there is no hazard %q", name)
	return s
}

// playOver runs a hazard on Redis over a user's store.
func playOver(t *testing.T, store *scenarios.Store, name string, f history.Fencing) (*scenarios.Outcome, error) {
	t.Helper()
	r := onRedis(sharedRedis(t))
	r.Store = store
	return r.Run(t.Context(), hazard(t, name), f)
}

// Over a user's store the hazards have the same traces.
func TestOwnStore(t *testing.T) {
	t.Parallel()
	sharedRedis(t)
	for _, name := range []string{"PauseExceedsTTL", "WriteDelayedInNetwork", "ResourceCrash"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store := startMap(t, repeats{resource.NewMemory()}).store()
			for f := range hazard(t, name).Expect {
				runOnce(t, onredis.Service(sharedRedis(t)), store, hazard(t, name), f)
			}
		})
	}
}

type repeats struct{ *resource.Memory }

func (r repeats) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	return errors.Join(r.Memory.Write(ctx, key, f, value), r.Memory.Write(ctx, key, f, value))
}

// Without a store the resource keeps its records in memory; only hazards that kill it don't apply.
func TestWithoutStore(t *testing.T) {
	o, err := playOver(t, nil, "PauseExceedsTTL", history.FencingOn)
	require.NoError(t, err)
	require.Equal(t, history.Safe, o.Verdict, "%q", o.Findings)
	require.Equal(t, "memory", o.Events[0].Run.Store)
	_, err = playOver(t, nil, "ResourceCrash", history.FencingOn)
	require.ErrorIs(t, err, errors.ErrUnsupported)
	require.ErrorContains(t, err, "memory keeps nothing over a kill")
}

// The hazards detect the defects of a user's store.
func TestOwnStoreIsFoundOut(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		store   func(t *testing.T) *scenarios.Store
		hazard  string
		finding string
	}{
		"looks at no fence, on a server": {
			func(t *testing.T) *scenarios.Store {
				t.Helper()
				return startMap(t, careless{resource.NewMemory()}).store()
			},
			"PauseExceedsTTL", "a write without a token was accepted, with fencing on",
		},
		"forgets": {
			func(*testing.T) *scenarios.Store { return &scenarios.Store{Name: ownForgets, Open: openStore} },
			"ResourceCrash", "the resource forgot a fence",
		},
		"fences writes alone, on a server": {
			func(t *testing.T) *scenarios.Store {
				t.Helper()
				return startMap(t, unraised{resource.NewMemory()}).store()
			},
			"LateWriteBeforeSuccessorWrites", "entry A was accepted and is lost",
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o, err := playOver(t, c.store(t), c.hazard, history.FencingOn)
			require.NoError(t, err)
			require.Equal(t, history.Violated, o.Verdict, "%q", o.Findings)
			require.Contains(t, strings.Join(o.Findings, "\n"), c.finding)
		})
	}
}

// Behind the resource's process, the worker's client detects a store whose fenced reads don't raise the fence.
func TestOwnStoreThatRaisesNoFence(t *testing.T) {
	t.Parallel()
	for _, store := range []string{ownCareless, ownReads} {
		_, err := playOver(t, &scenarios.Store{Name: store, Open: openStore}, "PauseExceedsTTL", history.FencingOn)
		require.ErrorContains(t, err, "the fencing token was not enforced", store)
		require.ErrorContains(t, err, ".0, and the reply has 0.0", store) // the token is greater if a lease ran out meanwhile
	}
}

// A run that ends while the server is down restarts it.
func TestOwnStoreIsBack(t *testing.T) {
	t.Parallel()
	server := startMap(t, resource.NewMemory())
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	store := server.store()
	store.Kill = func(ctx context.Context) error {
		err := server.kill(ctx)
		cancel(errEnough)
		return err
	}
	store.Restart = func(ctx context.Context) error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return server.start(ctx)
	}
	r := onRedis(sharedRedis(t))
	r.Store = store
	_, err := r.Run(ctx, hazard(t, "ResourceCrash"), history.FencingOn)
	require.ErrorContains(t, err, errEnough.Error())
	_, err = mapClient{"http://" + server.addr}.Read(t.Context(), "none")
	require.ErrorIs(t, err, resource.ErrNotFound)
}

// partner is a client whose Close fails once its server was killed.
type partner struct {
	mapClient
	dead *atomic.Int32 // kills so far
	at   int32         // kills before it was opened
}

func (p partner) Close() error {
	if p.dead.Load() > p.at {
		return errors.New("broken pipe")
	}
	return p.mapClient.Close()
}

func TestOwnStoreCloses(t *testing.T) {
	t.Parallel()
	server := startMap(t, resource.NewMemory())
	store, dead := server.store(), &atomic.Int32{}
	store.Open = func(context.Context, scenarios.StoreSpec) (resource.Store, error) {
		return partner{mapClient{"http://" + server.addr}, dead, dead.Load()}, nil
	}
	store.Kill = func(ctx context.Context) error {
		dead.Add(1)
		return server.kill(ctx)
	}
	o, err := playOver(t, store, "ResourceCrash", history.FencingOn)
	require.NoError(t, err)
	require.Equal(t, history.Safe, o.Verdict)
}

// A hazard that doesn't apply to a store is unsupported, and other errors say what to change.
func TestOwnStoreRefuses(t *testing.T) {
	t.Parallel()
	server := startMap(t, resource.NewMemory())
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
			&scenarios.Store{Name: ownNoBare, Addr: server.addr, Open: func(context.Context, scenarios.StoreSpec) (resource.Store, error) {
				return struct{ resource.Store }{resource.NewMemory()}, nil
			}}, "PauseExceedsTTL", history.FencingOff, true, "has no Overwrite",
		},
		"nobody can kill it": {
			&scenarios.Store{Name: ownServer, Addr: server.addr, Open: openStore}, "ResourceCrash", history.FencingOn,
			true, "map can't be killed: its Store has no Kill and Restart",
		},
		"it has one ledger": {server.store(), "TwoResources", history.FencingOn, true, "worker A has two ledgers, and over a store there is one"},
		"it is nowhere": {
			&scenarios.Store{Name: ownServer, Addr: "/srv/ledgers", Open: openStore}, "WriteDelayedInNetwork", history.FencingOn,
			true, "map is at no host and port on the way to which a call could be late",
		},
		"it forgets": {
			&scenarios.Store{Name: onredis.Bolt.Name, Open: openStore, Volatile: true}, "ResourceCrash", history.FencingOn,
			true, "keeps nothing over a kill",
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
			&scenarios.Store{Name: ownFails, Addr: server.addr, Open: openStore}, "PauseExceedsTTL", history.FencingOn,
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
	_, err := scenarios.OpenOwn(t.Context(), nil, scenarios.StoreSpec{Store: onredis.Bolt.Name})
	require.ErrorContains(t, err, "call scenarios.ChildWithStore in TestMain or main, with the function in Runner.Store.Open")
}

var errEnough = errors.New("the user has had enough")

// endAfter cancels a run some time after an event.
func endAfter(actorOrTarget, name string) func(*scenarios.Runner, context.CancelCauseFunc) {
	return func(r *scenarios.Runner, cancel context.CancelCauseFunc) {
		r.OnEvent = func(e history.Event) {
			if is(e, actorOrTarget, name) {
				time.AfterFunc(500*time.Millisecond, func() { cancel(errEnough) })
			}
		}
	}
}

// A write that doesn't get to the link can't be delayed, and the error says why.
func TestOwnStoreNotDelayed(t *testing.T) {
	server := startMap(t, resource.NewMemory())
	t.Setenv(envServer, server.addr)
	for name, want := range map[string]string{
		ownElsewhere: "A's write, which was to be late, has been answered; does OpenStore connect to StoreSpec.Addr?",
		ownFull:      "A failed before its write was on its way: no space left on device",
	} {
		t.Run(name, func(t *testing.T) {
			r := onRedis(sharedRedis(t))
			r.Store = server.store()
			r.Store.Name = name
			o, err := r.Run(t.Context(), hazard(t, "WriteDelayedInNetwork"), history.FencingOn)
			require.ErrorContains(t, err, want)
			require.NotEqual(t, history.Safe, o.Verdict)
		})
	}
}

// Variants of openLock.
const (
	variantNoToken     = "test-no-token"
	variantNeverRenews = "test-never-renews"
	variantElsewhere   = "test-elsewhere"
	variantBelieves    = "test-believes"
	variantGoesOn      = "test-goes-on"
	variantNoEnd       = "test-no-end"
	variantNoLease     = "test-no-lease"
	variantNoLock      = "test-no-lock"
	variantLetsIn      = "test-lets-in"
	variantCannotOpen  = "test-cannot-open"
	variantFailsLate   = "test-fails-late"
	variantKills       = "test-kills-" // and a worker's name, or "resource"
)

const envRedis = "FENCELAB_TEST_OWN_REDIS"

// openLock opens the locks of this package's tests, with the defect that the variant names.
func openLock(ctx context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
	what := s.Variant
	if !strings.HasPrefix(what, "test-") {
		return open.Lock(ctx, s)
	}
	s.Variant = ""
	switch what {
	case variantCannotOpen:
		return nil, errors.New("the lock server is on fire")
	case variantNeverRenews:
		s.Renew = false
	case variantElsewhere:
		s.Addrs = []string{os.Getenv(envRedis)}
	case variantNoLock:
		return nil, nil //nolint:nilnil // what the kit should notice
	}
	l, err := open.Lock(ctx, s)
	return ownLock{l, what, s.Addrs[0]}, err
}

type ownLock struct {
	scenarios.Lock
	what, addr string
}

func (l ownLock) Acquire(ctx context.Context, key string) (scenarios.Lease, error) {
	if victim, ok := strings.CutPrefix(l.what, variantKills); ok {
		if err := killSibling(victim); err != nil {
			return nil, err
		}
	}
	if l.what == variantLetsIn {
		c, err := redisclient.New(l.addr)
		if err != nil {
			return nil, err
		}
		if err := errors.Join(c.Del(ctx, "lock:{"+key+"}").Err(), c.Close()); err != nil {
			return nil, err
		}
	}
	lease, err := l.Lock.Acquire(ctx, key)
	if err != nil || l.what == variantNoLease {
		return nil, err
	}
	return ownLease{lease, l.what}, nil
}

func (l ownLock) TryAcquire(ctx context.Context, key string) (scenarios.Lease, error) {
	if l.what == variantLetsIn {
		return l.Acquire(ctx, key)
	}
	return l.Lock.TryAcquire(ctx, key)
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
	what string
}

func (l ownLease) Fence() uint64 {
	if l.what == variantNoToken {
		return 0
	}
	return l.Lease.Fence()
}

func (l ownLease) Context() context.Context {
	if l.what == variantBelieves || l.what == variantGoesOn {
		return context.Background()
	}
	return l.Lease.Context()
}

func (l ownLease) Until() time.Time {
	switch l.what {
	case variantBelieves:
		return time.Now().Add(l.TTL())
	case variantNoEnd:
		return time.Time{}
	}
	return l.Lease.Until()
}

func (l ownLease) Release(ctx context.Context) error {
	err := l.Lease.Release(ctx)
	if err != nil && l.what == variantFailsLate { // with an error that says nothing
		return errors.New("the lock server is on fire")
	}
	return err
}

// A lock without tokens has the usual verdicts with fencing off, and can't run with fencing on.
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
			s.Variant = variantNoToken
			o, err := onRedis(sharedRedis(t)).Run(t.Context(), s, history.FencingOff)
			require.NoError(t, err)
			require.Equal(t, s.Expect[history.FencingOff], o.Verdict, "%q", o.Findings)
			require.Contains(t, o.Notes, "the lock has no fencing tokens: no resource can tell a stale holder from its successor")
			require.Equal(t, withoutTokens(t, name), history.Trace(o.Events))
		})
	}
	for _, f := range []history.Fencing{history.FencingWrites, history.FencingOn} {
		s := hazard(t, "PauseExceedsTTL")
		s.Variant = variantNoToken
		o, err := onRedis(sharedRedis(t)).Run(t.Context(), s, f)
		require.ErrorContains(t, err, "A failed: the lock has granted a lease without a fencing token, Lease.Fence is 0: with fencing "+string(f))
		require.Equal(t, history.Inconclusive, o.Verdict)
	}
	// A direct client of a store with fencing off never sends tokens.
	r := onRedis(sharedRedis(t))
	r.Store = startMap(t, resource.NewMemory()).store()
	s := hazard(t, "PauseExceedsTTL")
	s.Variant = variantNoToken
	o, err := r.Run(t.Context(), s, history.FencingOff)
	require.NoError(t, err)
	require.Equal(t, history.Violated, o.Verdict, "%q", o.Findings)
	require.Equal(t, withoutTokens(t, "PauseExceedsTTL"), history.Trace(o.Events))
}

// withoutTokens returns the golden trace with fencing off, as it is for a lock without tokens.
func withoutTokens(t *testing.T, name string) []string {
	t.Helper()
	text := regexp.MustCompile(`(?m)^(\w+ acquired) #\d$`).ReplaceAllString(hazard(t, name).Traces["off"], "$1 none")
	text = regexp.MustCompile(`(?m)^(  resource accepts) write #\d (\[.*\])(?: after #\d)?((?:, ledger \d)?)$`).ReplaceAllString(text, "$1 unfenced write $2$3")
	require.NotContains(t, text, "#")
	return strings.Split(strings.TrimSuffix(text, "\n"), "\n")
}

// HolderPartitioned needs a lock that renews, and that loses its lease when cut off; other locks get an error that says what is
// wrong.
func TestHolderNotPartitioned(t *testing.T) {
	redis := sharedRedis(t)
	for name, c := range map[string]struct {
		variant string
		hazard  string
		ends    bool // the run, by itself
		want    []string
	}{
		"a lock that doesn't renew": {variantNeverRenews, "HolderPartitioned", true, []string{
			"A failed: the lock's lease has ended 10 times without being renewed: with LockSpec.Renew", "set Service.NoRenew",
		}},
		"a lock that isn't cut off": {variantElsewhere, "HolderPartitioned", false, []string{
			"the user has had enough; it is cut off, and its lease goes on: does Open connect to LockSpec.Addrs",
		}},
		"a lease that goes on and on": {variantBelieves, "HolderPartitioned", false, []string{
			"the user has had enough; it is cut off, and its lease goes on", "does the lease end when it can't be renewed?",
		}},
		// Cut off, it would fail in the same way, some seconds later.
		"a lease whose end nobody is told": {variantGoesOn, "WorkExceedsTTL", true, []string{
			"A failed: the lease's context goes on 500ms after the end of the lease",
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
				r.TTL = 10 * time.Second // the lease must not end by a stall
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

// For a service with NoRenew, hazards that end renewals don't apply.
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
			require.ErrorContains(t, err, "worker A is to lose a lease that is renewed, and ")
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
				require.ErrorContains(t, err, "has no tokens, and with fencing "+string(f)+" each grant needs one")
			}
		}
	}
}

func TestOwnLockIsVetted(t *testing.T) {
	for variant, want := range map[string]string{
		variantNoEnd:   "A failed: Lease.Until is the zero time: it tells when the lease must be presumed lost",
		variantNoLease: "A failed: the lock has returned neither a lease nor an error",
		variantNoLock:  "A failed: open: got no lock and no error",
	} {
		s := hazard(t, "PauseExceedsTTL")
		s.Variant = variant
		o, err := onRedis(sharedRedis(t)).Run(t.Context(), s, history.FencingOn)
		require.ErrorContains(t, err, want)
		require.NotEqual(t, history.Safe, o.Verdict)
	}

	s := hazard(t, "ReleaseCompareAndDelete")
	s.Variant = variantLetsIn
	o, err := onRedis(sharedRedis(t)).Run(t.Context(), s, history.FencingOn)
	require.ErrorContains(t, err, "run C until held: C was granted the lock, which it should have found held")
	require.NotEqual(t, history.Safe, o.Verdict)
}

// A binary whose main doesn't call Child would start itself forever.
func TestRunInAChild(t *testing.T) {
	t.Setenv(scenarios.ChildEnv, "{}")
	r := scenarios.Runner{Service: &scenarios.Service{}}
	o, err := r.Run(t.Context(), hazard(t, "PauseExceedsTTL"), history.FencingOn)
	require.ErrorContains(t, err, "call scenarios.Child or ChildWithStore first in main or TestMain")
	require.Equal(t, history.Inconclusive, o.Verdict)
	require.Empty(t, o.Events)
}

// An Adapter's errors, and how its leases end.
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
	err = held
	_, got := a.TryAcquire(t.Context(), "k")
	require.ErrorIs(t, got, dlock.ErrHeld)
	require.ErrorIs(t, got, held)
	require.False(t, waits)
	err = nil
	_, got = a.Acquire(t.Context(), "k")
	require.ErrorContains(t, got, "neither Until nor Lost")
	require.True(t, waits)

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
