package consullock_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/hashicorp/consul/api"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/consullock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
)

func TestConformance(t *testing.T) { conform(t, nil) }

// Sessions are hardly longer than leases, so renewed and ended all the time.
func TestConformanceShortSessions(t *testing.T) {
	conform(t, &consullock.Options{MinSessionTTL: 10 * time.Millisecond})
}

func TestConformanceLockDelay(t *testing.T) {
	conform(t, &consullock.Options{LockDelay: 50 * time.Millisecond})
}

func TestConformanceVirtual(t *testing.T) {
	dlocktest.Run(t, dlocktest.Harness{Virtual: true, NoRepeats: true, New: func(t *testing.T) dlocktest.Service {
		s := newConsul()
		return service(t, func() *link { return newLink(s, "consul") }, nil)
	}})
}

func conform(t *testing.T, o *consullock.Options) {
	t.Helper()
	dlocktest.Run(t, dlocktest.Harness{NoRepeats: true, New: func(t *testing.T) dlocktest.Service {
		return service(t, func() *link { return toServer(t) }, o)
	}})
}

func service(t *testing.T, link func() *link, o *consullock.Options) dlocktest.Service {
	return dlocktest.Service{
		Backend: func() dlock.Backend { return over(t, link(), o) },
		Faulty: func() (dlock.Backend, dlocktest.Link) {
			l := link()
			return over(t, l, o), l.faults()
		},
	}
}

func clientOver(tb testing.TB, l *link) *api.Client {
	tb.Helper()
	c, err := api.NewClient(&api.Config{Address: l.url, HttpClient: &http.Client{Transport: l}})
	require.NoError(tb, err)
	return c
}

func over(tb testing.TB, l *link, o *consullock.Options) *consullock.Backend {
	tb.Helper()
	b, err := consullock.New(clientOver(tb, l), o)
	require.NoError(tb, err)
	return b
}

// node is a Backend with a link of its own.
type node struct {
	*consullock.Backend
	l *link
}

func newNode(t *testing.T, o *consullock.Options) node {
	t.Helper()
	l := toServer(t)
	b := over(t, l, o)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	return node{b, l}
}

// awaits returns when l has sent a waiter's blocking query.
func awaits(t *testing.T, l *link) {
	t.Helper()
	locktest.Eventually(t, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.blocking > 0
	})
}

func entry(t *testing.T, key string) *api.KVPair {
	t.Helper()
	e, _, err := direct(t).KV().Get("lock/"+key, &api.QueryOptions{RequireConsistent: true})
	require.NoError(t, err)
	return e
}

func destroy(t *testing.T, session string) {
	t.Helper()
	_, err := direct(t).Session().Destroy(session, nil)
	require.NoError(t, err)
}

func seal(t *testing.T, session string) {
	t.Helper()
	_, err := direct(t).KV().Put(&api.KVPair{Key: "lock/=session/" + session}, nil)
	require.NoError(t, err)
}

func TestNewRefuses(t *testing.T) {
	_, err := consullock.New(nil, nil)
	require.ErrorIs(t, err, dlock.ErrInvalid)
	for _, o := range []consullock.Options{
		{Prefix: "/"},
		{Prefix: "a//b"},
		{Prefix: "../"},
		{Prefix: "a b"},
		{Prefix: "a?b"},
		{Prefix: "a%b"},
		{Prefix: "a=b"},
		{Prefix: "a:b"},
		{Prefix: ".b"},
		{MinSessionTTL: -1},
		{MinSessionTTL: time.Microsecond},
		{MinSessionTTL: 25 * time.Hour},
		{LockDelay: -1},
		{LockDelay: time.Minute + 1},
	} {
		client, err := api.NewClient(api.DefaultConfig())
		require.NoError(t, err)
		_, err = consullock.New(client, &o)
		require.ErrorIs(t, err, dlock.ErrInvalid, "%+v", o)
	}
}

func TestTTLThatNoSessionCovers(t *testing.T) {
	b := newNode(t, nil)
	for _, ttl := range []time.Duration{20 * time.Hour, 1<<63 - 1} {
		_, err := b.TryAcquire(t.Context(), locktest.Request(ttl))
		require.ErrorIs(t, err, dlock.ErrInvalid, "TTL %v", ttl)
	}
	locktest.Take(t, b, locktest.Request(19*time.Hour))
}

func TestNames(t *testing.T) {
	b := newNode(t, &consullock.Options{Prefix: "app/locks-"})
	allowed := regexp.MustCompile(`^[a-zA-Z0-9,_./\-?&=]+$`) // by Consul 1.21.5
	for key, name := range map[string]string{
		"plain-" + uuid.NewString(): "", "a/b": "a/b", "a//b": "a/=/b", "/": "=/=", "=": "=3D", "%": "=25", "../.": "=2E=2E/=2E",
		"a.b": "a.b", "a..b": "a.=2Eb", "x y?z": "x=20y=3Fz", "A,b_Z:": "A,b_Z=3A", "\u00e9": "=C3=A9", "=/": "=3D/=",
	} {
		if name == "" {
			name = key
		}
		require.Regexp(t, allowed, "app/locks-"+name)
		r := dlock.Request{Key: key, Owner: uuid.NewString(), TTL: time.Hour}
		g := locktest.Take(t, b, r)
		e, _, err := direct(t).KV().Get("app/locks-"+name, nil)
		require.NoError(t, err)
		require.NotNil(t, e, "key %q", key)
		require.Equal(t, r.Owner, string(e.Value))
		require.EqualValues(t, g.Fence, e.ModifyIndex)
		require.NoError(t, b.Release(t.Context(), g))
		e, _, err = direct(t).KV().Get("app/locks-"+name, nil)
		require.NoError(t, err)
		require.Nil(t, e, "a free lock leaves nothing behind, key %q", key)
	}
}

// The token grows although LockIndex restarts with the entry.
func TestKeyDeletedUnderTheLock(t *testing.T) {
	a, b := newNode(t, nil), newNode(t, nil)
	r := locktest.Request(time.Hour)
	g := locktest.Take(t, a, r)
	require.EqualValues(t, 1, entry(t, r.Key).LockIndex)
	won := locktest.Acquire(t.Context(), b, locktest.Next(r.Key, time.Hour))
	_, err := direct(t).KV().Delete("lock/"+r.Key, nil)
	require.NoError(t, err)
	w := locktest.Won(t, won)
	require.Greater(t, w.Fence, g.Fence)
	require.EqualValues(t, 1, entry(t, r.Key).LockIndex, "of no use as a token")
	require.ErrorIs(t, a.Renew(t.Context(), g), dlock.ErrLost)
	require.ErrorIs(t, a.Release(t.Context(), g), dlock.ErrLost)
	require.Equal(t, w.Owner, string(entry(t, r.Key).Value))
}

func TestForeignEntry(t *testing.T) {
	b := newNode(t, nil)
	r := locktest.Request(time.Hour)
	_, err := direct(t).KV().Put(&api.KVPair{Key: "lock/" + r.Key, Value: []byte("data")}, nil)
	require.NoError(t, err)
	_, err = b.TryAcquire(t.Context(), r)
	require.ErrorIs(t, err, dlock.ErrHeld)
	require.Equal(t, "data", string(entry(t, r.Key).Value))
}

func TestRoundTrips(t *testing.T) {
	other := newNode(t, nil)
	held := locktest.Request(time.Hour)
	locktest.Take(t, other, held)
	b := newNode(t, nil)
	for range 50 {
		g := locktest.Take(t, b, locktest.Request(time.Minute))
		require.NoError(t, b.Release(t.Context(), g))
	}
	_, err := b.TryAcquire(t.Context(), locktest.Next(held.Key, time.Minute))
	require.ErrorIs(t, err, dlock.ErrHeld)
	counts := b.l.counts()
	delete(counts, "session/info") // the watch; answered when the session ends, or in a minute
	require.LessOrEqual(t, counts["session/renew"], 5)
	delete(counts, "session/renew") // only if the machine is very slow
	require.Equal(t, map[string]int{"session/create": 1, "txn": 101}, counts)
}

func TestSessionDestroyed(t *testing.T) {
	a, b := newNode(t, nil), newNode(t, nil)
	r, r2 := locktest.Request(time.Hour), locktest.Request(time.Hour)
	g, g2 := locktest.Take(t, a, r), locktest.Take(t, a, r2)
	won := locktest.Acquire(t.Context(), b, locktest.Next(r.Key, time.Hour))
	session := entry(t, r.Key).Session
	destroy(t, session)
	locktest.Receive(t, g.Lost)
	locktest.Receive(t, g2.Lost)
	w := locktest.Won(t, won)
	require.Greater(t, w.Fence, g.Fence)
	require.ErrorIs(t, a.Renew(t.Context(), g), dlock.ErrLost)
	require.ErrorIs(t, a.Release(t.Context(), g2), dlock.ErrLost)
	select {
	case <-w.Lost:
		require.Fail(t, "Lost of a grant of another session")
	default:
	}
	g2 = locktest.Take(t, a, r2)
	require.NotEqual(t, session, entry(t, r2.Key).Session)
	require.NoError(t, a.Renew(t.Context(), g2))
}

func TestRenewOfADestroyedSession(t *testing.T) {
	b := newNode(t, nil)
	b.l.on("session/info", func(*http.Request) (*http.Response, error) { return nil, errLink })
	r := locktest.Request(time.Hour)
	g := locktest.Take(t, b, r)
	destroy(t, entry(t, r.Key).Session)
	require.ErrorIs(t, b.Renew(t.Context(), g), dlock.ErrLost)
	again := locktest.Take(t, b, locktest.Next(r.Key, time.Hour))
	require.Greater(t, again.Fence, g.Fence)
}

// A session that the token may not read is there all the same.
func TestUnreadableSession(t *testing.T) {
	b := newNode(t, nil)
	asked := make(chan struct{}, 1000)
	b.l.on("session/info", func(*http.Request) (*http.Response, error) {
		asked <- struct{}{}
		return &http.Response{
			StatusCode: http.StatusOK, Body: io.NopCloser(strings.NewReader("[]")),
			Header: http.Header{
				"X-Consul-Results-Filtered-By-Acls": {"true"}, "X-Consul-Index": {"1"}, "X-Consul-Lastcontact": {"0"}, "X-Consul-Knownleader": {"true"},
			},
		}, nil
	})
	g := locktest.Take(t, b, locktest.Request(time.Hour))
	<-asked
	<-asked // what the first said has been heard
	select {
	case <-g.Lost:
		require.Fail(t, "the session lives")
	default:
	}
	require.NoError(t, b.Renew(t.Context(), g))
}

func TestDeadSessionNeverAcquires(t *testing.T) {
	a, b := newNode(t, nil), newNode(t, nil)
	mine := locktest.Request(time.Hour)
	lost := locktest.Take(t, b, mine)
	dead := entry(t, mine.Key).Session
	r := locktest.Request(time.Hour)
	g := locktest.Take(t, a, r)
	won := locktest.Acquire(t.Context(), b, locktest.Next(r.Key, time.Hour))
	awaits(t, b.l)
	b.l.once("txn", func(req *http.Request) (*http.Response, error) { // the waiter's, which names the session
		destroy(t, dead)
		return pass(req)
	})
	require.NoError(t, a.Release(t.Context(), g))
	w := locktest.Won(t, won)
	locktest.Receive(t, lost.Lost)
	live := entry(t, r.Key).Session
	require.NotEqual(t, dead, live)
	s, _, err := direct(t).Session().Info(live, nil)
	require.NoError(t, err)
	require.NotNil(t, s)
	require.NoError(t, b.Renew(t.Context(), w))
}

func TestLockDelay(t *testing.T) {
	const delay = time.Second
	a, b := newNode(t, &consullock.Options{LockDelay: delay}), newNode(t, &consullock.Options{LockDelay: delay})
	r := locktest.Request(time.Hour)
	require.NoError(t, a.Release(t.Context(), locktest.Take(t, a, r)))
	g := locktest.Take(t, a, r) // a release is no reason to wait
	won := locktest.Acquire(t.Context(), b, locktest.Next(r.Key, time.Hour))
	awaits(t, b.l)
	require.Zero(t, b.l.counts()["txn"], "a request that is under way when the session ends would get through")
	began := time.Now()
	destroy(t, entry(t, r.Key).Session)
	locktest.Receive(t, g.Lost)
	early, err := b.TryAcquire(t.Context(), locktest.Next(r.Key, time.Hour))
	if err == nil { // the machine was too slow for it to be early
		require.GreaterOrEqual(t, time.Since(began), delay)
		require.NoError(t, b.Release(t.Context(), early))
	} else {
		require.ErrorIs(t, err, dlock.ErrHeld)
	}
	w := locktest.Receive(t, won)
	require.NoError(t, w.Err)
	require.GreaterOrEqual(t, w.At.Sub(began), delay)
}

// Consul's default is 15 s.
func TestNoLockDelay(t *testing.T) {
	a := newNode(t, nil)
	r := locktest.Request(time.Hour)
	locktest.Take(t, a, r)
	id := entry(t, r.Key).Session
	s, _, err := direct(t).Session().Info(id, nil)
	require.NoError(t, err)
	require.Zero(t, s.LockDelay)
	require.Empty(t, s.NodeChecks)
	require.Equal(t, api.SessionBehaviorDelete, s.Behavior)
	require.Equal(t, "1h15m0s", s.TTL)
	destroy(t, id)
	b := newNode(t, nil)
	locktest.Take(t, b, locktest.Next(r.Key, time.Hour))
}

func TestHolderGone(t *testing.T) {
	const ttl = 200 * time.Millisecond
	a, b := newNode(t, &consullock.Options{MinSessionTTL: 10 * time.Millisecond}), newNode(t, nil)
	r := locktest.Request(ttl)
	g := locktest.Take(t, a, r)
	require.NoError(t, a.Close())
	w := locktest.Receive(t, locktest.Acquire(t.Context(), b, locktest.Next(r.Key, time.Hour)))
	require.NoError(t, w.Err)
	require.GreaterOrEqual(t, w.At.Sub(g.Start), ttl)
}

func TestRenewed(t *testing.T) {
	const ttl = 300 * time.Millisecond // and the session at most 750 ms
	a, b := newNode(t, &consullock.Options{MinSessionTTL: 10 * time.Millisecond}), newNode(t, nil)
	for {
		a.l.counts() // of earlier rounds
		r := locktest.Request(ttl)
		g := locktest.Take(t, a, r)
		began, last := time.Now(), time.Now()
		var err error
		for err == nil && time.Since(began) < 5*ttl {
			now := time.Now()
			if err = a.Renew(t.Context(), g); err == nil {
				last = now
			}
		}
		if errors.Is(err, dlock.ErrLost) && time.Since(last) >= ttl {
			continue // the machine was too slow for this lease
		}
		require.NoError(t, err)
		_, err = b.TryAcquire(t.Context(), locktest.Next(r.Key, time.Hour))
		if time.Since(last) < ttl {
			require.ErrorIs(t, err, dlock.ErrHeld)
		}
		require.Less(t, a.l.counts()["session/renew"], 40, "renewed when it is due and not each time")
		return
	}
}

// said reads a request's body, and restores it.
func said(t *testing.T, req *http.Request) string {
	t.Helper()
	if req.Body == nil {
		return ""
	}
	body, err := io.ReadAll(req.Body)
	if err != nil {
		t.Error(err)
	}
	req.Body = io.NopCloser(bytes.NewReader(body))
	return string(body)
}

// later loses the next transaction on key. deliver sends it after all, and returns the status.
func later(t *testing.T, l *link, key string) (deliver func() int) {
	t.Helper()
	var late *http.Request
	l.set(func(req *http.Request) (*http.Response, error) {
		body := said(t, req)
		if kind(req) != "txn" || !strings.Contains(body, key) {
			return pass(req)
		}
		l.set(nil)
		var err error
		late, err = http.NewRequestWithContext(context.WithoutCancel(req.Context()), req.Method, req.URL.String(), strings.NewReader(body))
		require.NoError(t, err)
		return nil, errLink
	})
	return func() int {
		resp, err := l.base.RoundTrip(late)
		require.NoError(t, err)
		require.NoError(t, resp.Body.Close())
		return resp.StatusCode
	}
}

// Its session is still alive.
func TestLateRequest(t *testing.T) {
	a, b := newNode(t, nil), newNode(t, nil)
	other, r := locktest.Request(time.Hour), locktest.Request(time.Hour)
	g := locktest.Take(t, a, other)
	session := entry(t, other.Key).Session
	deliver := later(t, a.l, r.Key)
	_, err := a.TryAcquire(t.Context(), r)
	require.ErrorIs(t, err, errLink)
	require.ErrorIs(t, a.Release(t.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner}), dlock.ErrLost)
	require.NoError(t, a.Renew(t.Context(), g))
	require.Equal(t, http.StatusConflict, deliver())
	require.NoError(t, a.Renew(t.Context(), g), "the session lives on")
	require.NoError(t, b.Release(t.Context(), locktest.Take(t, b, r)))
	locktest.Take(t, a, r)
	require.NotEqual(t, session, entry(t, r.Key).Session)
	require.NotNil(t, entry(t, "=session/"+session))
	destroy(t, session)
	require.Nil(t, entry(t, "=session/"+session), "nothing is left behind")
	locktest.Receive(t, g.Lost)
}

// Only the Backend undoes it.
func TestLateRequestNotUndone(t *testing.T) {
	const ttl = 300 * time.Millisecond
	a, b := newNode(t, &consullock.Options{MinSessionTTL: 10 * time.Millisecond}), newNode(t, nil)
	for began := time.Now(); ; {
		g, r := locktest.Take(t, a, locktest.Request(ttl)), locktest.Request(ttl)
		held := entry(t, g.Key)
		if held == nil {
			continue // the machine was too slow for this lease
		}
		deliver := later(t, a.l, r.Key)
		_, err := a.TryAcquire(t.Context(), r)
		require.ErrorIs(t, err, errLink)
		sealed := false
		for err = nil; !sealed && err == nil; err = a.Renew(t.Context(), g) {
			require.Less(t, time.Since(began), 30*time.Second, "nothing undoes it")
			sealed = entry(t, "=session/"+held.Session) != nil
		}
		if errors.Is(err, dlock.ErrLost) {
			continue // too slow, again
		}
		require.NoError(t, err)
		require.Equal(t, http.StatusConflict, deliver())
		require.Nil(t, entry(t, r.Key))
		locktest.Take(t, b, locktest.Next(r.Key, time.Hour))
		return
	}
}

// It is retried after a lost reply, and leaves the same owner's next grant alone.
func TestRepeatedDelete(t *testing.T) {
	for name, answered := range map[string]bool{"answered": true, "unanswered": false} {
		t.Run(name, func(t *testing.T) {
			a := newNode(t, &consullock.Options{MinSessionTTL: 2 * time.Hour}) // one session for all TTLs
			r := locktest.Request(200 * time.Millisecond)
			type own struct{}
			ctx := context.WithValue(t.Context(), own{}, true) // of this test's requests, not of those in the background
			deleted, repeated := make(chan struct{}), make(chan struct{}, 100)
			hold := make(chan struct{})
			goOn := sync.OnceFunc(func() { close(hold) })
			t.Cleanup(goOn)
			var once atomic.Bool
			a.l.set(func(req *http.Request) (*http.Response, error) {
				k := kind(req)
				switch {
				case req.Context().Value(own{}) != nil || k != "kv" && k != "txn":
					return pass(req)
				case once.Load():
					<-hold
					resp, err := a.l.base.RoundTrip(req)
					repeated <- struct{}{}
					return resp, err
				case !strings.Contains(said(t, req), `"delete"`):
					return pass(req)
				}
				resp, err := a.l.base.RoundTrip(req) // it is carried out, and the answer lost
				if err == nil {
					err = resp.Body.Close()
				}
				once.Store(true)
				close(deleted)
				return nil, errors.Join(errLink, err)
			})
			heal := func() {}
			if !answered {
				heal = a.l.inject(loseReplies)
			}
			first, err := a.TryAcquire(ctx, r)
			heal()
			require.Equal(t, answered, err == nil)
			locktest.Receive(t, deleted)
			r.TTL = time.Hour
			g, err := a.TryAcquire(ctx, r)
			require.NoError(t, err)
			require.Greater(t, g.Fence, first.Fence)
			goOn()
			<-repeated
			require.Never(t, func() bool { return entry(t, r.Key) == nil }, 100*time.Millisecond, 10*time.Millisecond)
			require.NoError(t, a.Renew(ctx, g))
		})
	}
}

func TestRepeatedOnTheWay(t *testing.T) {
	b := newNode(t, nil)
	for name, between := range map[string]func(session string){
		"at once": func(string) {},
		"sealed":  func(session string) { seal(t, session) },
	} {
		t.Run(name, func(t *testing.T) {
			a := newNode(t, nil)
			r := locktest.Request(time.Hour)
			a.l.once("txn", func(req *http.Request) (*http.Response, error) {
				body := said(t, req)
				lost := req.Clone(req.Context())
				lost.Body = io.NopCloser(strings.NewReader(body))
				resp, err := a.l.base.RoundTrip(lost)
				require.NoError(t, err)
				require.Equal(t, http.StatusOK, resp.StatusCode)
				require.NoError(t, resp.Body.Close())
				between(entry(t, r.Key).Session)
				return nil, nil //nolint:nilnil // and again
			})
			g := locktest.Take(t, a, r)
			require.Equal(t, entry(t, r.Key).ModifyIndex, g.Fence)
			_, err := b.TryAcquire(t.Context(), locktest.Next(r.Key, time.Hour))
			require.ErrorIs(t, err, dlock.ErrHeld)
			_, err = a.TryAcquire(t.Context(), locktest.Next(r.Key, time.Hour))
			require.ErrorIs(t, err, dlock.ErrHeld, "another owner of the same session")
			require.NoError(t, a.Renew(t.Context(), g))
			require.NoError(t, a.Release(t.Context(), g))
			require.Nil(t, entry(t, r.Key))
		})
	}
}

func TestSealedUnderARequest(t *testing.T) {
	a := newNode(t, nil)
	g, r := locktest.Take(t, a, locktest.Request(time.Hour)), locktest.Request(time.Hour)
	session := entry(t, g.Key).Session
	a.l.once("txn", func(req *http.Request) (*http.Response, error) {
		seal(t, session)
		return pass(req)
	})
	locktest.Take(t, a, r)
	require.NotEqual(t, session, entry(t, r.Key).Session)
	require.NoError(t, a.Renew(t.Context(), g))
}

func TestFiftyWaiters(t *testing.T) {
	const waiters = 50
	a, b := newNode(t, nil), newNode(t, nil)
	r := locktest.Request(time.Hour)
	g := locktest.Take(t, a, r)
	all := make(chan locktest.Outcome, waiters)
	for range waiters {
		won := locktest.Acquire(t.Context(), b, locktest.Next(r.Key, time.Hour))
		go func() { all <- <-won }()
	}
	awaits(t, b.l)
	locktest.Eventually(t, func() bool {
		b.l.mu.Lock()
		defer b.l.mu.Unlock()
		return b.l.count["txn"] == waiters
	}, "each is refused once")
	require.NoError(t, a.Release(t.Context(), g))
	last := g.Fence
	for range waiters {
		w := locktest.Won(t, all)
		require.Greater(t, w.Fence, last)
		last = w.Fence
		require.NoError(t, b.Release(t.Context(), w))
	}
	counts := b.l.counts()
	require.LessOrEqual(t, counts["txn"], 3*waiters+5)
	require.LessOrEqual(t, counts["kv"], 3*waiters+5)
}

func TestUnknownAnswer(t *testing.T) {
	for _, c := range []struct {
		status     int
		body, want string
	}{
		{http.StatusConflict, `{"Errors":[{"OpIndex":1,"What":"Permission denied: lacks permission 'key:write' on \"lock/key exists\""}]}`, "Permission denied"},
		{http.StatusConflict, `{}`, "without a reason"},
		{http.StatusOK, `{"Results":[]}`, "no results"},
		{http.StatusOK, `{"Results":[{}]}`, "no results"},
		{http.StatusOK, `{"Results":[null]}`, "no results"},
	} {
		virtually(t, func(t *testing.T, b *consullock.Backend, s *consul) {
			s.on("txn", func(req *http.Request) (*http.Response, error) {
				return &http.Response{StatusCode: c.status, Header: http.Header{}, Request: req, Body: io.NopCloser(strings.NewReader(c.body))}, nil
			})
			for _, acquire := range []func(context.Context, dlock.Request) (dlock.Grant, error){b.Acquire, b.TryAcquire} {
				_, err := acquire(t.Context(), locktest.Request(time.Hour))
				require.ErrorContains(t, err, c.want)
				require.NotErrorIs(t, err, dlock.ErrHeld)
			}
		})
	}
}

func TestRenewByAnotherBackend(t *testing.T) {
	a, b := newNode(t, nil), newNode(t, nil)
	g := locktest.Take(t, a, locktest.Request(time.Hour))
	err := b.Renew(t.Context(), g)
	require.Error(t, err)
	require.NotErrorIs(t, err, dlock.ErrLost)
	require.NoError(t, b.Release(t.Context(), g))
	select {
	case <-g.Lost:
		require.Fail(t, "the session, which isn't its own, was ended")
	default:
	}
	require.ErrorIs(t, a.Renew(t.Context(), g), dlock.ErrLost)
}
