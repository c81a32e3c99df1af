package consullock_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
)

// lease is the TTL of these tests' leases; their sessions' is longer by a quarter.
const lease = 10 * time.Second

// A session's renewal that hangs doesn't keep the session's other leases from being renewed in time.
func TestStuckRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, s := inBubble(t)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		g, other := take(t, b, request(lease)), take(t, b, request(lease))
		time.Sleep(lease / 3)
		s.set(func(req *http.Request) (*http.Response, error) {
			if kind(req) != "session/renew" {
				return nil, nil //nolint:nilnil // pass
			}
			s.set(nil)
			return hangs(req)
		})
		renewed := make(chan error, 1)
		go func() { renewed <- b.Renew(ctx, g) }()
		synctest.Wait()
		began := time.Now()
		require.NoError(t, b.Renew(ctx, other))
		require.Less(t, time.Since(began), lease/4)
		require.NoError(t, <-renewed)
	})
}

// So it is with one that hangs when the session is made.
func TestStuckSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, s := inBubble(t)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		s.set(func(req *http.Request) (*http.Response, error) {
			s.set(nil)
			return hangs(req)
		})
		began := time.Now()
		_, err := b.TryAcquire(ctx, request(lease))
		require.NoError(t, err)
		require.Less(t, time.Since(began), lease/4)
	})
}

// What another lease of the same Backend holds is refused with no more questions.
func TestHeldBeside(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, s := inBubble(t)
		g := take(t, b, request(lease))
		var asked []string
		s.set(func(req *http.Request) (*http.Response, error) {
			if k := kind(req); k == "kv" || k == "txn" {
				asked = append(asked, k)
			}
			return nil, nil //nolint:nilnil // pass
		})
		_, err := b.TryAcquire(t.Context(), dlock.Request{Key: g.Key, Owner: "another", TTL: lease})
		require.ErrorIs(t, err, dlock.ErrHeld)
		require.Equal(t, []string{"txn"}, asked)
	})
}

// A Consul that is slow, and answers each request for a session after the time that the first try has, is waited for.
func TestSlowConsul(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, s := inBubble(t)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		s.set(func(req *http.Request) (*http.Response, error) {
			if !strings.HasPrefix(kind(req), "session/") {
				return nil, nil //nolint:nilnil // pass
			}
			select {
			case <-time.After(2 * time.Second):
				return nil, nil //nolint:nilnil // pass
			case <-req.Context().Done():
				return nil, req.Context().Err()
			}
		})
		g, err := b.TryAcquire(ctx, request(lease))
		require.NoError(t, err)
		time.Sleep(lease / 3)
		require.NoError(t, b.Renew(ctx, g))
	})
}

// A waiter whose request hangs repeats it, whether it was carried out or not, so that those behind it get their turn.
func TestStuckWaiter(t *testing.T) {
	for name, stuck := range map[string]struct {
		kind       string
		carriedOut bool
		at         time.Duration // before the key is freed
	}{
		"first read": {kind: "kv", at: time.Second},
		"request":    {kind: "txn"},
		"answer":     {kind: "txn", carriedOut: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, s := inBubble(t)
				r := request(time.Hour)
				free := s.hold(r.Key)
				sticks := func() {
					s.set(func(req *http.Request) (*http.Response, error) {
						if kind(req) != stuck.kind {
							return nil, nil //nolint:nilnil // pass
						}
						s.set(nil)
						if stuck.carriedOut {
							_, err := s.serve(req)
							require.NoError(t, err)
						}
						return hangs(req)
					})
				}
				if stuck.at > 0 {
					sticks()
				}
				first := acquiring(t, b, r)
				synctest.Wait()
				second := acquiring(t, b, next(r, time.Hour))
				time.Sleep(stuck.at)
				synctest.Wait()
				if stuck.at == 0 {
					sticks()
				}
				began := time.Now()
				free()
				w := <-first
				require.NoError(t, w.err)
				require.Less(t, w.at.Sub(began), lease)
				require.NoError(t, b.Release(t.Context(), w.g))
				w = <-second
				require.NoError(t, w.err)
				require.NoError(t, b.Release(t.Context(), w.g))
			})
		})
	}
}

// failing answers reads of entries with a status, or not at all if that is 0.
func failing(status int) func(*http.Request) (*http.Response, error) {
	return func(req *http.Request) (*http.Response, error) {
		switch {
		case kind(req) != "kv":
			return nil, nil //nolint:nilnil // pass
		case status == 0:
			return nil, errLink
		}
		return &http.Response{StatusCode: status, Header: http.Header{}, Request: req, Body: http.NoBody}, nil
	}
}

// A waiter bears with a Consul that fails for less than its TTL, and more than once.
func TestWaiterBearsFailures(t *testing.T) {
	for _, status := range []int{0, http.StatusInternalServerError, http.StatusTooManyRequests} {
		t.Run(fmt.Sprintf("status %d", status), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, s := inBubble(t)
				r := request(lease)
				free := s.hold(r.Key)
				won := acquiring(t, b, r)
				for range 2 {
					synctest.Wait()
					s.set(failing(status)) //nolint:bodyclose // it is a string
					s.hold(r.Key)          // has the waiter look
					time.Sleep(lease * 2 / 3)
					require.Empty(t, won)
					s.set(nil)
					time.Sleep(time.Second)
				}
				free()
				require.NoError(t, (<-won).err)
			})
		})
	}
}

// After its TTL it gives up, and so do those behind it.
func TestWaitersGiveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, s := inBubble(t)
		r := request(lease)
		s.hold(r.Key)
		s.set(failing(0)) //nolint:bodyclose // it is a string
		began := time.Now()
		first, second := acquiring(t, b, r), acquiring(t, b, next(r, lease))
		for _, won := range []<-chan granted{first, second} {
			w := <-won
			require.ErrorIs(t, w.err, errLink)
			require.Greater(t, w.at.Sub(began), lease)
			require.Less(t, w.at.Sub(began), lease+time.Second)
		}
	})
}

// What Consul refuses it would refuse again.
func TestWaiterIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, s := inBubble(t)
		r := request(lease)
		s.hold(r.Key)
		s.set(failing(http.StatusForbidden)) //nolint:bodyclose // it is a string
		began := time.Now()
		w := <-acquiring(t, b, r)
		require.ErrorContains(t, w.err, "403")
		require.Zero(t, w.at.Sub(began))
	})
}

// loses has s carry out the next transaction and lose the answer.
func (s *consul) loses() {
	s.set(func(req *http.Request) (*http.Response, error) {
		if kind(req) != "txn" {
			return nil, nil //nolint:nilnil // pass
		}
		s.set(nil)
		_, err := s.serve(req)
		return nil, errors.Join(errLink, err)
	})
}

// A session that gives no grants any more is destroyed when the last of them is over, and nothing waits for its end.
func TestRetiredSession(t *testing.T) {
	for name, undo := range map[string]func(t *testing.T, b dlock.Backend, r dlock.Request){
		"undone": func(t *testing.T, b dlock.Backend, r dlock.Request) {
			t.Helper()
			require.NoError(t, b.Release(t.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner}))
		},
		"run out": func(*testing.T, dlock.Backend, dlock.Request) { time.Sleep(lease * 2 / 3) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b, s := inBubble(t)
				has := func(n int, when string) {
					t.Helper()
					synctest.Wait()
					sessions, watches := s.state()
					require.Equal(t, n, sessions, "sessions %s", when)
					require.Equal(t, n, watches, "watches %s", when)
				}
				require.NoError(t, b.Release(t.Context(), take(t, b, request(lease))))
				has(1, "that may give more grants")
				other := take(t, b, request(lease))
				s.loses()
				r := request(lease)
				_, err := b.TryAcquire(t.Context(), r)
				require.ErrorIs(t, err, errLink)
				time.Sleep(lease / 2)
				require.NoError(t, b.Renew(t.Context(), other))
				undo(t, b, r)
				has(1, "that has a grant")
				require.NoError(t, b.Renew(t.Context(), other))
				require.NoError(t, b.Release(t.Context(), other))
				has(0, "that has none")
				require.Empty(t, s.entries, "the seal")
				take(t, b, r)
				has(1, "anew")
			})
		})
	}
}

// The entry of a lease that has run out, and is about to be deleted, isn't taken for a new grant of the same owner.
func TestEntryOfALeaseThatRanOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b, s := inBubble(t)
		r := request(lease)
		g := take(t, b, r)
		arrive := make(chan struct{})
		s.set(func(req *http.Request) (*http.Response, error) {
			if strings.Contains(said(t, req), `"delete"`) {
				select {
				case <-arrive:
				case <-req.Context().Done():
				}
			}
			return nil, nil //nolint:nilnil // pass
		})
		time.Sleep(lease)
		synctest.Wait()
		_, err := b.TryAcquire(t.Context(), r)
		require.ErrorIs(t, err, dlock.ErrHeld)
		close(arrive)
		synctest.Wait()
		require.Greater(t, take(t, b, r).Fence, g.Fence)
	})
}
