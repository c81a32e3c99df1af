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
)

func TestConformance(t *testing.T) { conform(t, nil) }

// With sessions that are hardly longer than leases, and so renewed and ended all the time.
func TestConformanceShortSessions(t *testing.T) {
	conform(t, &consullock.Options{MinSessionTTL: 10 * time.Millisecond})
}

func TestConformanceLockDelay(t *testing.T) {
	conform(t, &consullock.Options{LockDelay: 50 * time.Millisecond})
}

func conform(t *testing.T, o *consullock.Options) {
	t.Helper()
	dlocktest.Run(t, dlocktest.Harness{New: func(t *testing.T) dlocktest.Service {
		return dlocktest.Service{
			Backend: func() dlock.Backend {
				b, _ := newBackend(t, o)
				return b
			},
			Faulty: func() (dlock.Backend, dlocktest.Link) {
				b, l := newBackend(t, o)
				return b, l.faults()
			},
		}
	}})
}

// newClient returns a client and the link that it goes over.
func newClient(t *testing.T) (*api.Client, *link) {
	t.Helper()
	l := newLink()
	t.Cleanup(l.base.CloseIdleConnections)
	c, err := api.NewClient(&api.Config{Address: server.URL, HttpClient: &http.Client{Transport: l}})
	require.NoError(t, err)
	return c, l
}

func newBackend(t *testing.T, o *consullock.Options) (*consullock.Backend, *link) {
	t.Helper()
	c, l := newClient(t)
	b, err := consullock.New(c, o)
	require.NoError(t, err)
	return b, l
}

// backend returns a Backend that is closed with the test.
func backend(t *testing.T, o *consullock.Options) (*consullock.Backend, *link) {
	t.Helper()
	b, l := newBackend(t, o)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	return b, l
}

func request(ttl time.Duration) dlock.Request {
	return dlock.Request{Key: "test/" + uuid.NewString(), Owner: uuid.NewString(), TTL: ttl}
}

// next is a request of another owner for r's key.
func next(r dlock.Request, ttl time.Duration) dlock.Request {
	return dlock.Request{Key: r.Key, Owner: uuid.NewString(), TTL: ttl}
}

func take(t *testing.T, b dlock.Backend, r dlock.Request) dlock.Grant {
	t.Helper()
	g, err := b.TryAcquire(t.Context(), r)
	require.NoError(t, err)
	return g
}

type granted struct {
	g   dlock.Grant
	err error
	at  time.Time
}

// acquiring calls Acquire in the background.
func acquiring(t *testing.T, b dlock.Backend, r dlock.Request) <-chan granted {
	t.Helper()
	won, done := make(chan granted, 1), make(chan struct{})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	go func() {
		defer close(done)
		defer cancel()
		g, err := b.Acquire(ctx, r)
		won <- granted{g, err, time.Now()}
	}()
	t.Cleanup(func() { <-done })
	return won
}

// awaits returns once a waiter's blocking query is under way on l.
func awaits(t *testing.T, l *link) {
	t.Helper()
	require.Eventually(t, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.blocking > 0
	}, 30*time.Second, time.Millisecond)
}

func entry(t *testing.T, c *api.Client, key string) *api.KVPair {
	t.Helper()
	e, _, err := c.KV().Get("lock/"+key, &api.QueryOptions{RequireConsistent: true})
	require.NoError(t, err)
	return e
}

func destroy(t *testing.T, c *api.Client, session string) {
	t.Helper()
	_, err := c.Session().Destroy(session, nil)
	require.NoError(t, err)
}

func closes(t *testing.T, c <-chan struct{}, what string) {
	t.Helper()
	select {
	case <-c:
	case <-time.After(30 * time.Second):
		require.FailNow(t, "timeout", what)
	}
}

func TestNewRefuses(t *testing.T) {
	_, err := consullock.New(nil, nil)
	require.ErrorIs(t, err, dlock.ErrInvalid)
	c, _ := newClient(t)
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
		_, err := consullock.New(c, &o)
		require.ErrorIs(t, err, dlock.ErrInvalid, "%+v", o)
	}
}

func TestTTLThatNoSessionCovers(t *testing.T) {
	b, _ := backend(t, nil)
	for _, ttl := range []time.Duration{-1, 0, 20 * time.Hour, 1<<63 - 1} {
		_, err := b.TryAcquire(t.Context(), request(ttl))
		require.ErrorIs(t, err, dlock.ErrInvalid, "TTL %v", ttl)
		require.ErrorIs(t, b.Renew(t.Context(), dlock.Grant{Key: "k", Owner: "o", TTL: ttl}), dlock.ErrInvalid, "TTL %v", ttl)
	}
	take(t, b, request(19*time.Hour))
}

func TestNames(t *testing.T) {
	c, _ := newClient(t)
	b, _ := backend(t, &consullock.Options{Prefix: "app/locks-"})
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
		g := take(t, b, r)
		e, _, err := c.KV().Get("app/locks-"+name, nil)
		require.NoError(t, err)
		require.NotNil(t, e, "key %q", key)
		require.Equal(t, r.Owner, string(e.Value))
		require.EqualValues(t, g.Fence, e.ModifyIndex)
		require.NoError(t, b.Release(t.Context(), g))
		e, _, err = c.KV().Get("app/locks-"+name, nil)
		require.NoError(t, err)
		require.Nil(t, e, "a free lock leaves nothing behind, key %q", key)
	}
}

// The token grows though the entry, and with it LockIndex, begins anew.
func TestKeyDeletedUnderTheLock(t *testing.T) {
	c, _ := newClient(t)
	a, _ := backend(t, nil)
	b, _ := backend(t, nil)
	r := request(time.Hour)
	g := take(t, a, r)
	require.EqualValues(t, 1, entry(t, c, r.Key).LockIndex)
	won := acquiring(t, b, next(r, time.Hour))
	_, err := c.KV().Delete("lock/"+r.Key, nil)
	require.NoError(t, err)
	w := <-won
	require.NoError(t, w.err)
	require.Greater(t, w.g.Fence, g.Fence)
	require.EqualValues(t, 1, entry(t, c, r.Key).LockIndex, "of no use as a token")
	require.ErrorIs(t, a.Renew(t.Context(), g), dlock.ErrLost)
	require.ErrorIs(t, a.Release(t.Context(), g), dlock.ErrLost)
	require.Equal(t, w.g.Owner, string(entry(t, c, r.Key).Value))
}

// Two owners share a session, and Consul would let one take what the other holds.
func TestOwnersOfOneSession(t *testing.T) {
	c, _ := newClient(t)
	b, _ := backend(t, nil)
	r, other := request(time.Hour), request(time.Hour)
	g := take(t, b, r)
	take(t, b, other)
	require.Equal(t, entry(t, c, r.Key).Session, entry(t, c, other.Key).Session)
	before := entry(t, c, r.Key)
	_, err := b.TryAcquire(t.Context(), next(r, time.Hour))
	require.ErrorIs(t, err, dlock.ErrHeld)
	again := take(t, b, r)
	require.Equal(t, g.Fence, again.Fence)
	require.Equal(t, before, entry(t, c, r.Key), "untouched")
}

// What somebody else has put where a lock's entry would be is not taken, nor touched.
func TestForeignEntry(t *testing.T) {
	c, _ := newClient(t)
	b, _ := backend(t, nil)
	r := request(time.Hour)
	_, err := c.KV().Put(&api.KVPair{Key: "lock/" + r.Key, Value: []byte("data")}, nil)
	require.NoError(t, err)
	_, err = b.TryAcquire(t.Context(), r)
	require.ErrorIs(t, err, dlock.ErrHeld)
	require.Equal(t, "data", string(entry(t, c, r.Key).Value))
}

// A lock and an unlock are one transaction each, and so is the refusal of what another holds; the session is made once and
// renewed when it is due.
func TestRoundTrips(t *testing.T) {
	other, _ := backend(t, nil)
	held := request(time.Hour)
	take(t, other, held)
	b, l := backend(t, nil)
	for range 50 {
		g := take(t, b, request(time.Minute))
		require.NoError(t, b.Release(t.Context(), g))
	}
	_, err := b.TryAcquire(t.Context(), next(held, time.Minute))
	require.ErrorIs(t, err, dlock.ErrHeld)
	counts := l.counts()
	delete(counts, "session/info") // the watch; answered when the session ends, or in a minute
	require.LessOrEqual(t, counts["session/renew"], 5)
	delete(counts, "session/renew") // only if the machine is very slow
	require.Equal(t, map[string]int{"session/create": 1, "txn": 101}, counts)
}

func TestSessionDestroyed(t *testing.T) {
	c, _ := newClient(t)
	a, _ := backend(t, nil)
	b, _ := backend(t, nil)
	r, r2 := request(time.Hour), request(time.Hour)
	g, g2 := take(t, a, r), take(t, a, r2)
	won := acquiring(t, b, next(r, time.Hour))
	session := entry(t, c, r.Key).Session
	destroy(t, c, session)
	closes(t, g.Lost, "Lost of a grant whose session was destroyed")
	closes(t, g2.Lost, "Lost of another grant of that session")
	w := <-won
	require.NoError(t, w.err)
	require.Greater(t, w.g.Fence, g.Fence)
	require.ErrorIs(t, a.Renew(t.Context(), g), dlock.ErrLost)
	require.ErrorIs(t, a.Release(t.Context(), g2), dlock.ErrLost)
	select {
	case <-w.g.Lost:
		require.Fail(t, "Lost of a grant of another session")
	default:
	}
	g2 = take(t, a, r2)
	require.NotEqual(t, session, entry(t, c, r2.Key).Session)
	require.NoError(t, a.Renew(t.Context(), g2))
}

// Renew learns of the end of the session by itself, with no time for the watch to do so.
func TestRenewOfADestroyedSession(t *testing.T) {
	c, _ := newClient(t)
	b, l := backend(t, nil)
	l.set(func(req *http.Request) (*http.Response, error) {
		if kind(req) == "session/info" {
			return nil, errLink
		}
		return nil, nil //nolint:nilnil // pass
	})
	r := request(time.Hour)
	g := take(t, b, r)
	destroy(t, c, entry(t, c, r.Key).Session)
	require.ErrorIs(t, b.Renew(t.Context(), g), dlock.ErrLost)
	again := take(t, b, next(r, time.Hour))
	require.Greater(t, again.Fence, g.Fence)
}

// A session that ends just before the request arrives takes nothing; another is made.
func TestDeadSessionNeverAcquires(t *testing.T) {
	c, _ := newClient(t)
	a, _ := backend(t, nil)
	b, l := backend(t, nil)
	mine := request(time.Hour)
	lost := take(t, b, mine)
	dead := entry(t, c, mine.Key).Session
	r := request(time.Hour)
	g := take(t, a, r)
	won := acquiring(t, b, next(r, time.Hour))
	awaits(t, l)
	l.set(func(req *http.Request) (*http.Response, error) {
		if kind(req) == "txn" { // it is the waiter's, and names the session
			l.set(nil)
			destroy(t, c, dead)
		}
		return nil, nil //nolint:nilnil // pass
	})
	require.NoError(t, a.Release(t.Context(), g))
	w := <-won
	require.NoError(t, w.err)
	closes(t, lost.Lost, "Lost of the grant that had the session")
	live := entry(t, c, r.Key).Session
	require.NotEqual(t, dead, live)
	s, _, err := c.Session().Info(live, nil)
	require.NoError(t, err)
	require.NotNil(t, s)
	require.NoError(t, b.Renew(t.Context(), w.g))
}

// Nobody acquires before the lock-delay is over, which counts from the end of the session.
func TestLockDelay(t *testing.T) {
	const delay = time.Second
	c, _ := newClient(t)
	a, _ := backend(t, &consullock.Options{LockDelay: delay})
	b, l := backend(t, &consullock.Options{LockDelay: delay})
	r := request(time.Hour)
	require.NoError(t, a.Release(t.Context(), take(t, a, r)))
	g := take(t, a, r) // a release is no reason to wait
	won := acquiring(t, b, next(r, time.Hour))
	awaits(t, l)
	require.Zero(t, l.counts()["txn"], "a request that is under way when the session ends would get through")
	began := time.Now()
	destroy(t, c, entry(t, c, r.Key).Session)
	closes(t, g.Lost, "Lost")
	early, err := b.TryAcquire(t.Context(), next(r, time.Hour))
	if err == nil { // the machine was too slow for it to be early
		require.GreaterOrEqual(t, time.Since(began), delay)
		require.NoError(t, b.Release(t.Context(), early))
	} else {
		require.ErrorIs(t, err, dlock.ErrHeld)
	}
	w := <-won
	require.NoError(t, w.err)
	require.GreaterOrEqual(t, w.at.Sub(began), delay)
}

// By default there is none, although Consul would take that for 15 s.
func TestNoLockDelay(t *testing.T) {
	c, _ := newClient(t)
	a, _ := backend(t, nil)
	r := request(time.Hour)
	take(t, a, r)
	id := entry(t, c, r.Key).Session
	s, _, err := c.Session().Info(id, nil)
	require.NoError(t, err)
	require.Zero(t, s.LockDelay)
	require.Empty(t, s.NodeChecks)
	require.Equal(t, api.SessionBehaviorDelete, s.Behavior)
	require.Equal(t, "1h15m0s", s.TTL)
	destroy(t, c, id)
	b, _ := backend(t, nil)
	take(t, b, next(r, time.Hour))
}

// A process that has gone: nothing is left of it but its session, which ends with all its keys, though not before the
// lease.
func TestHolderGone(t *testing.T) {
	const ttl = 200 * time.Millisecond
	a, _ := newBackend(t, &consullock.Options{MinSessionTTL: 10 * time.Millisecond})
	b, _ := backend(t, nil)
	r := request(ttl)
	g := take(t, a, r)
	require.NoError(t, a.Close())
	w := <-acquiring(t, b, next(r, time.Hour))
	require.NoError(t, w.err)
	require.GreaterOrEqual(t, w.at.Sub(g.Start), ttl)
}

// Renewals keep the session.
func TestRenewed(t *testing.T) {
	const ttl = 300 * time.Millisecond // and the session at most 750 ms
	a, l := backend(t, &consullock.Options{MinSessionTTL: 10 * time.Millisecond})
	b, _ := backend(t, nil)
	for {
		l.counts() // of earlier rounds
		r := request(ttl)
		g := take(t, a, r)
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
		_, err = b.TryAcquire(t.Context(), next(r, time.Hour))
		if time.Since(last) < ttl {
			require.ErrorIs(t, err, dlock.ErrHeld)
		}
		require.Less(t, l.counts()["session/renew"], 40, "renewed when it is due and not each time")
		return
	}
}

// A request without an answer that nobody undoes is undone when its lease would be over.
func TestReplyLostAndNotUndone(t *testing.T) {
	a, l := backend(t, nil)
	b, _ := backend(t, nil)
	r := request(200 * time.Millisecond)
	heal := l.inject(loseReplies)
	_, err := a.TryAcquire(t.Context(), r)
	require.ErrorIs(t, err, errLink)
	_, err = b.TryAcquire(t.Context(), next(r, time.Hour))
	require.ErrorIs(t, err, dlock.ErrHeld, "it took effect, and can't be undone yet")
	won := acquiring(t, b, next(r, time.Hour))
	heal()
	require.NoError(t, (<-won).err)
}

// said returns a request's body, and leaves it to be read.
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

// later has l lose the next transaction on key, and returns what delivers it after all and tells the answer's status.
func later(t *testing.T, l *link, key string) (deliver func() int) {
	t.Helper()
	var late *http.Request
	l.set(func(req *http.Request) (*http.Response, error) {
		body := said(t, req)
		if kind(req) != "txn" || !strings.Contains(body, key) {
			return nil, nil //nolint:nilnil // pass
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

// A request that arrives after it was undone takes nothing, although its session lives on with a lease that is renewed.
func TestLateRequest(t *testing.T) {
	c, _ := newClient(t)
	for name, undo := range map[string]func(t *testing.T, a dlock.Backend, r dlock.Request){
		"released": func(t *testing.T, a dlock.Backend, r dlock.Request) {
			t.Helper()
			require.ErrorIs(t, a.Release(t.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner}), dlock.ErrLost)
		},
		"repeated": func(t *testing.T, a dlock.Backend, r dlock.Request) {
			t.Helper()
			require.NoError(t, a.Release(t.Context(), take(t, a, r)))
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, l := backend(t, nil)
			b, _ := backend(t, nil)
			other, r := request(time.Hour), request(time.Hour)
			g := take(t, a, other)
			session := entry(t, c, other.Key).Session
			deliver := later(t, l, r.Key)
			_, err := a.TryAcquire(t.Context(), r)
			require.ErrorIs(t, err, errLink)
			undo(t, a, r)
			require.NoError(t, a.Renew(t.Context(), g))
			require.Equal(t, http.StatusConflict, deliver())
			require.NoError(t, a.Renew(t.Context(), g), "the session lives on")
			require.NoError(t, b.Release(t.Context(), take(t, b, r)))
			take(t, a, r)
			require.NotEqual(t, session, entry(t, c, r.Key).Session)
			require.NotNil(t, entry(t, c, "=session/"+session))
			destroy(t, c, session)
			require.Nil(t, entry(t, c, "=session/"+session), "nothing is left behind")
			closes(t, g.Lost, "Lost")
		})
	}
}

// The same if nobody undoes it: then the Backend does when the lease would be over.
func TestLateRequestNotUndone(t *testing.T) {
	const ttl = 300 * time.Millisecond
	c, _ := newClient(t)
	a, l := backend(t, &consullock.Options{MinSessionTTL: 10 * time.Millisecond})
	b, _ := backend(t, nil)
	for began := time.Now(); ; {
		g, r := take(t, a, request(ttl)), request(ttl)
		held := entry(t, c, g.Key)
		if held == nil {
			continue // the machine was too slow for this lease
		}
		deliver := later(t, l, r.Key)
		_, err := a.TryAcquire(t.Context(), r)
		require.ErrorIs(t, err, errLink)
		sealed := false
		for err = nil; !sealed && err == nil; err = a.Renew(t.Context(), g) {
			require.Less(t, time.Since(began), 30*time.Second, "nothing undoes it")
			sealed = entry(t, c, "=session/"+held.Session) != nil
		}
		if errors.Is(err, dlock.ErrLost) {
			continue // too slow, again
		}
		require.NoError(t, err)
		require.Equal(t, http.StatusConflict, deliver())
		require.Nil(t, entry(t, c, r.Key))
		take(t, b, next(r, time.Hour))
		return
	}
}

// The deletion of a lease that has run out is repeated if its answer was lost. What the same owner has been granted since is
// left alone, whether the request for the first lease was answered or not.
func TestRepeatedDelete(t *testing.T) {
	c, _ := newClient(t)
	for name, answered := range map[string]bool{"answered": true, "unanswered": false} {
		t.Run(name, func(t *testing.T) {
			a, l := backend(t, &consullock.Options{MinSessionTTL: 2 * time.Hour}) // one session for all TTLs
			r := request(200 * time.Millisecond)
			type own struct{}
			ctx := context.WithValue(t.Context(), own{}, true) // of this test's requests, not of those in the background
			deleted, repeated := make(chan struct{}), make(chan struct{}, 100)
			hold := make(chan struct{})
			goOn := sync.OnceFunc(func() { close(hold) })
			t.Cleanup(goOn)
			var once atomic.Bool
			l.set(func(req *http.Request) (*http.Response, error) {
				k := kind(req)
				switch {
				case req.Context().Value(own{}) != nil || k != "kv" && k != "txn":
					return nil, nil //nolint:nilnil // pass
				case once.Load():
					<-hold
					resp, err := l.base.RoundTrip(req)
					repeated <- struct{}{}
					return resp, err
				case !strings.Contains(said(t, req), `"delete"`):
					return nil, nil //nolint:nilnil // pass
				}
				resp, err := l.base.RoundTrip(req) // it is carried out, and the answer lost
				if err == nil {
					err = resp.Body.Close()
				}
				once.Store(true)
				close(deleted)
				return nil, errors.Join(errLink, err)
			})
			heal := func() {}
			if !answered {
				heal = l.inject(loseReplies)
			}
			first, err := a.TryAcquire(ctx, r)
			heal()
			require.Equal(t, answered, err == nil)
			closes(t, deleted, "the key of a lease that is over")
			r.TTL = time.Hour
			g, err := a.TryAcquire(ctx, r)
			require.NoError(t, err)
			require.Greater(t, g.Fence, first.Fence)
			goOn()
			<-repeated
			require.Never(t, func() bool { return entry(t, c, r.Key) == nil }, 100*time.Millisecond, 10*time.Millisecond)
			require.NoError(t, a.Renew(ctx, g))
		})
	}
}

// A request that is carried out twice, because something on the way has lost the answer, is granted once and to its owner.
func TestRepeatedOnTheWay(t *testing.T) {
	c, _ := newClient(t)
	b, _ := backend(t, nil)
	for name, between := range map[string]func(session string){
		"at once": func(string) {},
		"sealed": func(session string) {
			_, err := c.KV().Put(&api.KVPair{Key: "lock/=session/" + session}, nil)
			require.NoError(t, err)
		},
	} {
		t.Run(name, func(t *testing.T) {
			a, l := backend(t, nil)
			r := request(time.Hour)
			l.set(func(req *http.Request) (*http.Response, error) {
				body := said(t, req)
				if kind(req) != "txn" {
					return nil, nil //nolint:nilnil // pass
				}
				l.set(nil)
				lost := req.Clone(req.Context())
				lost.Body = io.NopCloser(strings.NewReader(body))
				resp, err := l.base.RoundTrip(lost)
				require.NoError(t, err)
				require.Equal(t, http.StatusOK, resp.StatusCode)
				require.NoError(t, resp.Body.Close())
				between(entry(t, c, r.Key).Session)
				return nil, nil //nolint:nilnil // and again
			})
			g := take(t, a, r)
			require.Equal(t, entry(t, c, r.Key).ModifyIndex, g.Fence)
			_, err := b.TryAcquire(t.Context(), next(r, time.Hour))
			require.ErrorIs(t, err, dlock.ErrHeld)
			_, err = a.TryAcquire(t.Context(), next(r, time.Hour))
			require.ErrorIs(t, err, dlock.ErrHeld, "another owner of the same session")
			require.NoError(t, a.Renew(t.Context(), g))
			require.NoError(t, a.Release(t.Context(), g))
			require.Nil(t, entry(t, c, r.Key))
		})
	}
}

// A request that finds its session sealed, for another's sake, is granted on a new one.
func TestSealedUnderARequest(t *testing.T) {
	c, _ := newClient(t)
	a, l := backend(t, nil)
	g, r := take(t, a, request(time.Hour)), request(time.Hour)
	session := entry(t, c, g.Key).Session
	l.set(func(req *http.Request) (*http.Response, error) {
		if kind(req) == "txn" {
			l.set(nil)
			_, err := c.KV().Put(&api.KVPair{Key: "lock/=session/" + session}, nil)
			require.NoError(t, err)
		}
		return nil, nil //nolint:nilnil // pass
	})
	take(t, a, r)
	require.NotEqual(t, session, entry(t, c, r.Key).Session)
	require.NoError(t, a.Renew(t.Context(), g))
}

// One blocking query waits for a key, whatever the number of waiters.
func TestFiftyWaiters(t *testing.T) {
	const waiters = 50
	a, _ := backend(t, nil)
	b, l := backend(t, nil)
	r := request(time.Hour)
	g := take(t, a, r)
	all := make(chan granted, waiters)
	for range waiters {
		won := acquiring(t, b, next(r, time.Hour))
		go func() { all <- <-won }()
	}
	awaits(t, l)
	require.Eventually(t, func() bool {
		l.mu.Lock()
		defer l.mu.Unlock()
		return l.count["txn"] == waiters
	}, 30*time.Second, time.Millisecond, "each is refused once")
	require.NoError(t, a.Release(t.Context(), g))
	last := g.Fence
	for range waiters {
		w := <-all
		require.NoError(t, w.err)
		require.Greater(t, w.g.Fence, last)
		last = w.g.Fence
		require.NoError(t, b.Release(t.Context(), w.g))
	}
	counts := l.counts()
	require.LessOrEqual(t, counts["txn"], 3*waiters+5)
	require.LessOrEqual(t, counts["kv"], 3*waiters+5)
}

// A refusal whose reason isn't known is an error, and no reason to wait.
func TestUnknownRefusal(t *testing.T) {
	b, l := backend(t, nil)
	l.set(func(req *http.Request) (*http.Response, error) {
		if kind(req) != "txn" {
			return nil, nil //nolint:nilnil // pass
		}
		body := `{"Errors":[{"OpIndex":1,"What":"Permission denied: lacks permission 'key:write' on \"lock/key exists\""}]}`
		return &http.Response{StatusCode: http.StatusConflict, Header: http.Header{}, Request: req, Body: io.NopCloser(strings.NewReader(body))}, nil
	})
	for _, acquire := range []func(context.Context, dlock.Request) (dlock.Grant, error){b.Acquire, b.TryAcquire} {
		_, err := acquire(t.Context(), request(time.Hour))
		require.ErrorContains(t, err, "Permission denied")
		require.NotErrorIs(t, err, dlock.ErrHeld)
	}
}

// Another Backend may release a grant, for it is the owner that counts; its lease it can't renew, and says so.
func TestRenewByAnotherBackend(t *testing.T) {
	a, _ := backend(t, nil)
	b, _ := backend(t, nil)
	g := take(t, a, request(time.Hour))
	err := b.Renew(t.Context(), g)
	require.Error(t, err)
	require.NotErrorIs(t, err, dlock.ErrLost)
	require.NoError(t, b.Release(t.Context(), g))
	require.ErrorIs(t, a.Renew(t.Context(), g), dlock.ErrLost)
}
