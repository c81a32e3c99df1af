package consullock_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/consullock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
)

const lease = 10 * time.Second

// It doesn't block the renewal of the session's other leases.
func TestStuckRenewal(t *testing.T) {
	virtually(t, func(t *testing.T, b *consullock.Backend, s *consul) {
		g, other := locktest.Take(t, b, locktest.Request(lease)), locktest.Take(t, b, locktest.Request(lease))
		time.Sleep(lease / 3)
		s.once("session/renew", hangs)
		renewed := make(chan error, 1)
		go func() { renewed <- b.Renew(t.Context(), g) }()
		synctest.Wait()
		began := time.Now()
		require.NoError(t, b.Renew(t.Context(), other))
		require.Less(t, time.Since(began), lease/4)
		require.NoError(t, <-renewed)
	})
}

// A session is renewed when a grant or a renewal needs it.
func TestSessionCoversLeases(t *testing.T) {
	virtually(t, func(t *testing.T, b *consullock.Backend, s *consul) {
		s.delays("session/create", time.Second) // it lasts from before
		g := locktest.Take(t, b, locktest.Request(lease))
		time.Sleep(lease/4 - time.Second)
		locktest.Take(t, b, locktest.Request(lease))
		require.Zero(t, s.counts()["session/renew"], "it lasts as long as this lease")
		time.Sleep(time.Millisecond)
		locktest.Take(t, b, locktest.Request(lease))
		require.Equal(t, 1, s.counts()["session/renew"])
		time.Sleep(lease/4 + time.Millisecond)
		require.NoError(t, b.Renew(t.Context(), g))
		require.Equal(t, 1, s.counts()["session/renew"])
	})
}

// The answer comes when the lease is over.
func TestLateRenewal(t *testing.T) {
	virtually(t, func(t *testing.T, b *consullock.Backend, s *consul) {
		g := locktest.Take(t, b, locktest.Request(lease))
		s.delays("txn", 2*lease)
		require.ErrorIs(t, b.Renew(t.Context(), g), dlock.ErrLost)
	})
}

func TestCloseWaits(t *testing.T) {
	virtually(t, func(t *testing.T, b *consullock.Backend, s *consul) {
		s.on("session/info", func(req *http.Request) (*http.Response, error) {
			<-req.Context().Done()
			time.Sleep(time.Second)
			return nil, errLink
		})
		locktest.Take(t, b, locktest.Request(lease))
		synctest.Wait()
		began := time.Now()
		require.NoError(t, b.Close())
		require.Equal(t, time.Second, time.Since(began))
	})
}

func TestStuckSession(t *testing.T) {
	virtually(t, func(t *testing.T, b *consullock.Backend, s *consul) {
		s.once("session/create", hangs)
		began := time.Now()
		_, err := b.TryAcquire(t.Context(), locktest.Request(lease))
		require.NoError(t, err)
		require.Less(t, time.Since(began), lease/4)
	})
}

// It is refused without a read.
func TestHeldBeside(t *testing.T) {
	virtually(t, func(t *testing.T, b *consullock.Backend, s *consul) {
		g := locktest.Take(t, b, locktest.Request(lease))
		var asked []string
		s.set(func(req *http.Request) (*http.Response, error) {
			if k := kind(req); k == "kv" || k == "txn" {
				asked = append(asked, k)
			}
			return pass(req)
		})
		_, err := b.TryAcquire(t.Context(), dlock.Request{Key: g.Key, Owner: "another", TTL: lease})
		require.ErrorIs(t, err, dlock.ErrHeld)
		require.Equal(t, []string{"txn"}, asked)
	})
}

func TestSlowConsul(t *testing.T) {
	virtually(t, func(t *testing.T, b *consullock.Backend, s *consul) {
		s.set(func(req *http.Request) (*http.Response, error) {
			if !strings.HasPrefix(kind(req), "session/") {
				return pass(req)
			}
			select {
			case <-time.After(2 * time.Second):
			case <-req.Context().Done():
			}
			return nil, req.Context().Err()
		})
		g, err := b.TryAcquire(t.Context(), locktest.Request(lease))
		require.NoError(t, err)
		time.Sleep(lease / 3)
		require.NoError(t, b.Renew(t.Context(), g))
	})
}

// Whether the request was applied or not. The waiters behind are served.
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
			virtually(t, func(t *testing.T, b *consullock.Backend, s *consul) {
				r := locktest.Request(time.Hour)
				free := s.hold(r.Key)
				sticks := func() {
					s.once(stuck.kind, func(req *http.Request) (*http.Response, error) {
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
				first := locktest.Acquire(t.Context(), b, r)
				synctest.Wait()
				second := locktest.Acquire(t.Context(), b, locktest.Next(r.Key, time.Hour))
				time.Sleep(stuck.at)
				synctest.Wait()
				if stuck.at == 0 {
					sticks()
				}
				began := time.Now()
				free()
				w := <-first
				require.NoError(t, w.Err)
				require.Less(t, w.At.Sub(began), lease)
				require.NoError(t, b.Release(t.Context(), w.G))
				w = <-second
				require.NoError(t, w.Err)
				require.NoError(t, b.Release(t.Context(), w.G))
			})
		})
	}
}

// failing answers reads of entries with a status, or with an error if that is 0.
func failing(status int) func(*http.Request) (*http.Response, error) {
	return func(req *http.Request) (*http.Response, error) {
		switch {
		case kind(req) != "kv":
			return pass(req)
		case status == 0:
			return nil, errLink
		}
		return &http.Response{StatusCode: status, Header: http.Header{}, Request: req, Body: http.NoBody}, nil
	}
}

// Failures of less than its TTL, more than once.
func TestWaiterBearsFailures(t *testing.T) {
	for _, status := range []int{0, http.StatusInternalServerError, http.StatusTooManyRequests} {
		t.Run(fmt.Sprintf("status %d", status), func(t *testing.T) {
			virtually(t, func(t *testing.T, b *consullock.Backend, s *consul) {
				r := locktest.Request(lease)
				free := s.hold(r.Key)
				won := locktest.Acquire(t.Context(), b, r)
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
				require.NoError(t, (<-won).Err)
			})
		})
	}
}

func TestWaitersGiveUp(t *testing.T) {
	virtually(t, func(t *testing.T, b *consullock.Backend, s *consul) {
		r := locktest.Request(lease)
		s.hold(r.Key)
		s.set(failing(0)) //nolint:bodyclose // it is a string
		for range 2 {     // those that come later start anew
			began := time.Now()
			first, second := locktest.Acquire(t.Context(), b, r), locktest.Acquire(t.Context(), b, locktest.Next(r.Key, lease))
			for _, won := range []<-chan locktest.Outcome{first, second} {
				w := <-won
				require.ErrorIs(t, w.Err, errLink)
				require.Greater(t, w.At.Sub(began), lease)
				require.Less(t, w.At.Sub(began), lease+time.Second)
			}
		}
	})
}

// It looks again: nothing is written that would tell it that the key is still free.
func TestWaiterFailsToTakeAFreeKey(t *testing.T) {
	virtually(t, func(t *testing.T, b *consullock.Backend, s *consul) {
		r := locktest.Request(lease)
		free := s.hold(r.Key)
		won := locktest.Acquire(t.Context(), b, r)
		time.Sleep(lease) // the session must be renewed
		s.once("session/renew", func(*http.Request) (*http.Response, error) { return nil, errLink })
		began := time.Now()
		free()
		w := <-won
		require.NoError(t, w.Err)
		require.Less(t, w.At.Sub(began), time.Second)
	})
}

// Consul's index goes back.
func TestSnapshotRestored(t *testing.T) {
	virtually(t, func(t *testing.T, b *consullock.Backend, s *consul) {
		s.index = 1000
		r := locktest.Request(time.Hour)
		free := s.hold(r.Key)
		won := locktest.Acquire(t.Context(), b, r)
		synctest.Wait()
		s.mu.Lock()
		s.index = 1
		s.mu.Unlock()
		time.Sleep(2 * time.Minute) // its blocking query is answered
		began := time.Now()
		free()
		require.Zero(t, locktest.Won(t, won).Start.Sub(began))
	})
}

func TestWaiterIsRefused(t *testing.T) {
	virtually(t, func(t *testing.T, b *consullock.Backend, s *consul) {
		r := locktest.Request(lease)
		s.hold(r.Key)
		s.set(failing(http.StatusForbidden)) //nolint:bodyclose // it is a string
		began := time.Now()
		w := <-locktest.Acquire(t.Context(), b, r)
		require.ErrorContains(t, w.Err, "403")
		require.Zero(t, w.At.Sub(began))
	})
}

// loses applies the next transaction, and loses its reply.
func (s *consul) loses() {
	s.once("txn", func(req *http.Request) (*http.Response, error) {
		_, err := s.serve(req)
		return nil, errors.Join(errLink, err)
	})
}

func TestRetiredSession(t *testing.T) {
	virtually(t, func(t *testing.T, b *consullock.Backend, s *consul) {
		has := func(n int, when string) {
			t.Helper()
			synctest.Wait()
			sessions, watches := s.state()
			require.Equal(t, n, sessions, "sessions %s", when)
			require.Equal(t, n, watches, "watches %s", when)
		}
		require.NoError(t, b.Release(t.Context(), locktest.Take(t, b, locktest.Request(lease))))
		has(1, "that may give more grants")
		other := locktest.Take(t, b, locktest.Request(lease))
		s.loses()
		r := locktest.Request(lease)
		_, err := b.TryAcquire(t.Context(), r)
		require.ErrorIs(t, err, errLink)
		time.Sleep(lease / 2)
		require.NoError(t, b.Renew(t.Context(), other))
		has(1, "that has a grant")
		require.Nil(t, s.entries["lock/"+r.Key], "undone")
		time.Sleep(lease * 2 / 3)
		require.NoError(t, b.Renew(t.Context(), other))
		require.NoError(t, b.Release(t.Context(), other))
		has(0, "that has none")
		require.Empty(t, s.entries, "the seal")
		locktest.Take(t, b, r)
		has(1, "anew")
	})
}

// Its deletion is late, and it isn't taken for the same owner's new grant.
func TestEntryOfALeaseThatRanOut(t *testing.T) {
	virtually(t, func(t *testing.T, b *consullock.Backend, s *consul) {
		r := locktest.Request(lease)
		g := locktest.Take(t, b, r)
		arrive := make(chan struct{})
		s.set(func(req *http.Request) (*http.Response, error) {
			if strings.Contains(said(t, req), `"delete"`) {
				select {
				case <-arrive:
				case <-req.Context().Done():
				}
			}
			return pass(req)
		})
		time.Sleep(lease)
		synctest.Wait()
		_, err := b.TryAcquire(t.Context(), r)
		require.ErrorIs(t, err, dlock.ErrHeld)
		close(arrive)
		synctest.Wait()
		require.Greater(t, locktest.Take(t, b, r).Fence, g.Fence)
	})
}

// Others take and release the key all the time.
func TestUndoOfABusyKey(t *testing.T) {
	virtually(t, func(t *testing.T, b *consullock.Backend, s *consul) {
		r := locktest.Request(lease)
		var reads atomic.Int32
		s.once("txn", func(*http.Request) (*http.Response, error) {
			s.on("kv", func(req *http.Request) (*http.Response, error) {
				if reads.Add(1) > 20 {
					return nil, errors.New("reads again and again")
				}
				defer s.hold(r.Key)
				return s.serve(req)
			})
			return nil, errLink
		})
		_, err := b.TryAcquire(t.Context(), r)
		require.ErrorIs(t, err, errLink)
		require.ErrorIs(t, b.Release(t.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner}), dlock.ErrLost)
		synctest.Wait()
		require.LessOrEqual(t, reads.Load(), int32(6), "by Release and in the background")
	})
}

func TestUndoOverlapsTheRequest(t *testing.T) {
	virtually(t, func(t *testing.T, b *consullock.Backend, s *consul) {
		locktest.Take(t, b, locktest.Request(lease)) // keeps the session alive
		r := locktest.Request(lease)
		s.once("txn", func(late *http.Request) (*http.Response, error) {
			late = late.Clone(context.WithoutCancel(late.Context()))
			late.Body = io.NopCloser(strings.NewReader(said(t, late)))
			s.once("kv", func(req *http.Request) (*http.Response, error) {
				resp, err := s.serve(req)
				applied, failure := s.serve(late)
				require.Equal(t, http.StatusOK, applied.StatusCode)
				return resp, errors.Join(err, failure, applied.Body.Close())
			})
			return nil, errLink
		})
		_, err := b.TryAcquire(t.Context(), r)
		require.ErrorIs(t, err, errLink)
		synctest.Wait()
		require.Nil(t, s.entries["lock/"+r.Key])
	})
}
