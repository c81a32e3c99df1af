package s3lock_test

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/s3lock"
)

// The kit's short leases must be longer than the steps of the server's clock.
const short = 2 * time.Second

func TestConformance(t *testing.T) {
	dlocktest.Run(t, dlocktest.Harness{ShortTTL: short, New: func(t *testing.T) dlocktest.Service {
		return service(t, realSite(t))
	}})
}

func TestConformanceVirtual(t *testing.T) {
	dlocktest.Run(t, dlocktest.Harness{Virtual: true, ShortTTL: 2 * short, Late: 2*time.Second + poll, New: func(t *testing.T) dlocktest.Service {
		return service(t, newSite(t, nil))
	}})
}

const poll = 200 * time.Millisecond

func service(t *testing.T, s site) dlocktest.Service {
	t.Helper()
	return dlocktest.Service{
		Backend: func() dlock.Backend { return s.backend(t, nil, poll) },
		Faulty:  func() (dlock.Backend, dlocktest.Link) { return s.faulty(t) },
	}
}

// virtually runs f in a bubble with a Backend, its link, and another Backend.
func virtually(t *testing.T, f func(t *testing.T, s site, b *s3lock.Backend, l *link, other *s3lock.Backend)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		s := newSite(t, nil)
		b, l := s.linked(t)
		other, _ := s.linked(t)
		f(t, s, b, l, other)
	})
}

func undo(t *testing.T, b dlock.Backend, r dlock.Request) error {
	t.Helper()
	return b.Release(t.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL})
}

func put(t *testing.T, s site, key, body string) {
	t.Helper()
	_, err := s.client(t, nil).PutObject(t.Context(), &s3.PutObjectInput{Bucket: aws.String(bucket), Key: aws.String("lock/" + key), Body: strings.NewReader(body)})
	require.NoError(t, err)
}

// A lease ends at the first second that is more than its TTL after any time that Last-Modified may stand for.
func TestWholeSeconds(t *testing.T) {
	for _, c := range []struct{ began, ttl, blocks time.Duration }{
		{0, 3 * time.Second, 4 * time.Second},
		{time.Nanosecond, 3 * time.Second, 4*time.Second - 1},
		{time.Second - 1, 3 * time.Second, 3*time.Second + 1},
		{0, 2500 * time.Millisecond, 4 * time.Second},
		{0, 3*time.Second + 1, 5 * time.Second},
		{time.Second - 1, 3*time.Second + 1, 4*time.Second + 1},
		{time.Second - 1, 1, time.Second + 1},
		{time.Second / 2, time.Hour, time.Hour + time.Second/2},
	} {
		t.Run(fmt.Sprintf("%v at %v", c.ttl, c.began), func(t *testing.T) {
			virtually(t, func(t *testing.T, _ site, b *s3lock.Backend, _ *link, other *s3lock.Backend) {
				time.Sleep(c.began)
				g, renewed := locktest.Take(t, b, locktest.Request(c.ttl)), locktest.Take(t, b, locktest.Request(1000*time.Hour))
				renewed.TTL = c.ttl // that of the renewal counts
				time.Sleep(c.blocks - 1)
				_, err := other.TryAcquire(t.Context(), locktest.Next(g.Key, c.ttl))
				require.ErrorIs(t, err, dlock.ErrHeld)
				require.NoError(t, b.Renew(t.Context(), renewed))
				time.Sleep(time.Nanosecond)
				require.ErrorIs(t, b.Renew(t.Context(), g), dlock.ErrLost)
				require.ErrorIs(t, b.Release(t.Context(), g), dlock.ErrLost)
				require.Equal(t, g.Fence+1, locktest.Take(t, other, locktest.Next(g.Key, c.ttl)).Fence)
				_, err = other.TryAcquire(t.Context(), locktest.Next(renewed.Key, c.ttl))
				require.ErrorIs(t, err, dlock.ErrHeld)
				time.Sleep(c.ttl + 2*time.Second)
				locktest.Take(t, other, locktest.Next(renewed.Key, c.ttl))
			})
		})
	}
}

func TestRequests(t *testing.T) {
	virtually(t, func(t *testing.T, _ site, b *s3lock.Backend, l *link, other *s3lock.Backend) {
		get, both := map[string]int{"GET": 1}, map[string]int{"GET": 1, "PUT": 1}
		r := locktest.Request(time.Hour)
		for range 2 {
			g := locktest.Take(t, b, r)
			require.Equal(t, both, l.requests())
			require.NoError(t, b.Renew(t.Context(), g))
			require.Equal(t, both, l.requests())
			require.NoError(t, b.Release(t.Context(), g))
			require.Equal(t, both, l.requests())
			require.ErrorIs(t, b.Release(t.Context(), g), dlock.ErrLost)
			require.Equal(t, get, l.requests())
		}
		require.ErrorIs(t, undo(t, b, r), dlock.ErrLost)
		require.Equal(t, both, l.requests())
		g := locktest.Take(t, other, r)
		require.ErrorIs(t, undo(t, b, locktest.Next(r.Key, time.Hour)), dlock.ErrLost)
		require.Equal(t, get, l.requests())

		won := locktest.Acquire(t.Context(), b, locktest.Next(r.Key, time.Hour))
		time.Sleep(10 * time.Minute)
		polls := l.requests()["GET"]
		require.Greater(t, polls, 700)
		require.Less(t, polls, 900)
		locktest.Release(t, other, g)
		released := time.Now()
		require.Less(t, locktest.Won(t, won).Start.Sub(released), time.Second)
	})
}

func (*link) hang(r *http.Request) (*http.Response, error) {
	<-r.Context().Done()
	return nil, r.Context().Err()
}

// cutOff breaks the connection while the reply arrives.
func (l *link) cutOff(r *http.Request) (*http.Response, error) {
	resp, err := l.RoundTripper.RoundTrip(r)
	if err == nil {
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(io.LimitReader(resp.Body, 10), iotest.ErrReader(errLink)), resp.Body}
	}
	return resp, err
}

// waits has b wait for a key that other holds.
func waits(ctx context.Context, t *testing.T, b, other *s3lock.Backend, r dlock.Request) (dlock.Grant, <-chan locktest.Outcome) {
	t.Helper()
	g := locktest.Take(t, other, locktest.Next(r.Key, time.Hour)) //nolint:contextcheck // ctx is the waiter's
	won := locktest.Acquire(ctx, b, r)
	synctest.Wait()
	return g, won
}

// Failures of less than its TTL, more than once.
func TestWaiterBearsFailures(t *testing.T) {
	type fault func(*link, *http.Request) (*http.Response, error)
	answers := func(status int, code string) fault {
		return func(_ *link, r *http.Request) (*http.Response, error) { return refused(r, status, code) }
	}
	for name, f := range map[string]fault{
		"broken": (*link).lose, "cut off": (*link).cutOff, "silent": (*link).hang,
		"no host": func(*link, *http.Request) (*http.Response, error) { return nil, &net.DNSError{IsNotFound: true} },
		"error":   answers(500, "InternalError"), "a proxy's": answers(522, ""), "overload": answers(503, "SlowDown"),
		"rate limit": answers(429, ""), "S3's limit": answers(400, "SlowDown"), "slow sender": answers(400, "RequestTimeout"),
	} {
		t.Run(name, func(t *testing.T) {
			virtually(t, func(t *testing.T, _ site, b *s3lock.Backend, l *link, other *s3lock.Backend) {
				r := locktest.Request(time.Minute)
				g, won := waits(t.Context(), t, b, other, r)
				for range 3 {
					l.requests()
					l.fail(func(r *http.Request) (*http.Response, error) { return f(l, r) })
					time.Sleep(r.TTL * 2 / 3)
					require.Empty(t, won)
					require.Less(t, l.requests()["GET"], 300, "it pauses")
					l.fail(nil)
					time.Sleep(21 * time.Second) // a request may be under way
				}
				locktest.Release(t, other, g)
				require.EqualValues(t, 2, locktest.Won(t, won).Fence)
			})
		})
	}
}

func TestWaiterGivesUp(t *testing.T) {
	virtually(t, func(t *testing.T, _ site, b *s3lock.Backend, l *link, other *s3lock.Backend) {
		r := locktest.Request(10 * time.Second)
		_, won := waits(t.Context(), t, b, other, r)
		l.fail(l.lose)
		began := time.Now()
		w := <-won
		require.ErrorIs(t, w.Err, errLink)
		require.Greater(t, w.At.Sub(began), r.TTL)
		require.Less(t, w.At.Sub(began), r.TTL+2*time.Second)
		_, err := b.Acquire(t.Context(), r)
		require.ErrorIs(t, err, errLink, "one that has not seen the lock held")
		require.Equal(t, w.At, time.Now())
	})
}

func TestWaiterThatFailsEndsWithItsContext(t *testing.T) {
	virtually(t, func(t *testing.T, _ site, b *s3lock.Backend, l *link, other *s3lock.Backend) {
		for name, fault := range map[string]func(*http.Request) (*http.Response, error){"broken": l.lose, "silent": l.hang} {
			l.fail(nil)
			ctx, cancel := context.WithCancelCause(t.Context())
			_, won := waits(ctx, t, b, other, locktest.Request(time.Hour))
			l.fail(fault)
			time.Sleep(30 * time.Second)
			synctest.Wait()
			require.Empty(t, won, name)
			why := fmt.Errorf("why: %w", &net.OpError{Op: "dial", Err: errLink})
			began := time.Now()
			cancel(why)
			w := <-won
			require.ErrorIs(t, w.Err, why, name)
			require.Equal(t, began, w.At, name)
		}
		l.fail(nil)
		_, won := waits(t.Context(), t, b, other, locktest.Request(time.Hour))
		l.fail(l.lose)
		time.Sleep(30 * time.Second)
		began := time.Now()
		require.NoError(t, b.Close())
		w := <-won
		require.ErrorIs(t, w.Err, dlock.ErrClosed)
		require.Equal(t, began, w.At)
	})
}

func TestWaiterIsRefused(t *testing.T) {
	virtually(t, func(t *testing.T, s site, b *s3lock.Backend, l *link, other *s3lock.Backend) {
		r := locktest.Request(time.Hour)
		for code, status := range map[string]int{"AccessDenied": 403, "NoSuchBucket": 404, "InvalidRequest": 400} {
			l.fail(nil)
			g, won := waits(t.Context(), t, b, other, r)
			l.fail(func(r *http.Request) (*http.Response, error) { return refused(r, status, code) })
			l.requests()
			require.ErrorContains(t, (<-won).Err, code)
			require.Equal(t, map[string]int{"GET": 1}, l.requests())
			locktest.Release(t, other, g)
		}
		l.fail(nil)
		_, won := waits(t.Context(), t, b, other, r)
		put(t, s, r.Key, "data")
		began := time.Now()
		w := <-won
		require.ErrorContains(t, w.Err, "is not a lock")
		require.LessOrEqual(t, w.At.Sub(began), time.Second)
	})
}

// It recognises its own grant: the token is the same, the lease begins again. If it gives up, the grant is undone.
func TestWaiterLosesTheReplyToItsGrant(t *testing.T) {
	for name, c := range map[string]struct {
		fails time.Duration
		late  bool // the PUT arrives when requests have failed for that long
	}{
		"at once": {}, "applied": {fails: 6 * time.Second}, "late": {fails: 6 * time.Second, late: true}, "for too long": {fails: time.Minute},
	} {
		t.Run(name, func(t *testing.T) {
			virtually(t, func(t *testing.T, s site, _ *s3lock.Backend, _ *link, other *s3lock.Backend) {
				b, l := s.linked(t, once)
				r := locktest.Request(10 * time.Second)
				g, won := waits(t.Context(), t, b, other, r)
				locktest.Release(t, other, g)
				fails := make(chan struct{})
				k := lateRequest{l: l}
				l.on("PUT", func(r *http.Request) (*http.Response, error) {
					defer close(fails)
					l.fail(l.lose)
					if c.late {
						return k.keep(r)
					}
					return l.reply(r)
				})
				<-fails
				if c.fails > r.TTL {
					require.ErrorIs(t, (<-won).Err, errLink)
					l.fail(nil)
					if err := undo(t, b, r); !errors.Is(err, dlock.ErrLost) { // it may have run out
						require.NoError(t, err)
					}
					require.EqualValues(t, 3, locktest.Take(t, other, locktest.Next(r.Key, time.Hour)).Fence)
					return
				}
				if time.Sleep(c.fails); c.late {
					require.Equal(t, http.StatusOK, k.arrive(t))
				}
				_, err := other.TryAcquire(t.Context(), locktest.Next(r.Key, time.Hour))
				require.ErrorIs(t, err, dlock.ErrHeld)
				require.Empty(t, won)
				l.fail(nil)
				healed := time.Now()
				w := locktest.Won(t, won)
				require.EqualValues(t, 2, w.Fence)
				require.False(t, w.Start.Before(healed))
				locktest.Release(t, b, w)
				require.EqualValues(t, 3, locktest.Take(t, other, locktest.Next(r.Key, time.Hour)).Fence)
			})
		})
	}
}

// reply loses the reply to a request that is carried out; lose loses the request.
func (l *link) reply(r *http.Request) (*http.Response, error) {
	resp, err := l.RoundTripper.RoundTrip(r)
	if err == nil {
		_, _ = io.Copy(io.Discard, resp.Body)
		err = cmp.Or(resp.Body.Close(), errLink)
	}
	return nil, err
}

func (l *link) lose(*http.Request) (*http.Response, error) { return nil, errLink }

var errLink = errors.New("broken link")

// lateRequest is kept back until arrive carries it out and returns the status.
type lateRequest struct {
	l    *link
	kept *http.Request
}

func (k *lateRequest) keep(r *http.Request) (*http.Response, error) {
	body, err := io.ReadAll(r.Body)
	k.kept = r.Clone(context.WithoutCancel(r.Context()))
	k.kept.Body = io.NopCloser(bytes.NewReader(body))
	return nil, errors.Join(errLink, err)
}

func (k *lateRequest) arrive(t *testing.T) int {
	t.Helper()
	resp, err := k.l.RoundTripper.RoundTrip(k.kept)
	require.NoError(t, err)
	require.NoError(t, resp.Body.Close())
	return resp.StatusCode
}

// The client repeats a PUT that was carried out, or not, or is carried out when the repeated one is refused with 409.
func TestRepeatedPut(t *testing.T) {
	virtually(t, func(t *testing.T, _ site, b *s3lock.Backend, l *link, other *s3lock.Backend) {
		for name, fault := range map[string]func(){
			"reply lost":   func() { l.on("PUT", l.reply) },
			"request lost": func() { l.on("PUT", l.lose) },
			"conflict":     func() { l.on("PUT", conflict) },
			"late": func() {
				k := lateRequest{l: l}
				l.on("PUT", k.keep, func(r *http.Request) (*http.Response, error) {
					defer k.arrive(t)
					return conflict(r)
				})
			},
			"late, a while": func() {
				k := lateRequest{l: l}
				l.on("PUT", k.keep, conflict, func(r *http.Request) (*http.Response, error) {
					require.Equal(t, http.StatusOK, k.arrive(t))
					return l.RoundTripper.RoundTrip(r)
				})
			},
		} {
			r := locktest.Request(time.Hour)
			for fence := range uint64(2) {
				began := time.Now()
				fault()
				g := locktest.Take(t, b, r)
				require.Equal(t, dlock.Grant{Key: r.Key, Owner: r.Owner, Fence: fence + 1, TTL: r.TTL, Start: began}, g, name)
				fault()
				require.NoError(t, b.Renew(t.Context(), g), name)
				_, err := other.TryAcquire(t.Context(), locktest.Next(r.Key, time.Hour))
				require.ErrorIs(t, err, dlock.ErrHeld, name)
				fault()
				require.NoError(t, b.Release(t.Context(), g), name)
			}
			require.EqualValues(t, 3, locktest.Take(t, other, locktest.Next(r.Key, time.Hour)).Fence, name)
		}
	})
}

func conflict(r *http.Request) (*http.Response, error) {
	return refused(r, http.StatusConflict, "ConditionalRequestConflict")
}

func refused(r *http.Request, status int, code string) (*http.Response, error) {
	resp := &http.Response{
		StatusCode: status, Request: r, Header: http.Header{"Content-Type": {"application/xml"}},
		Body: io.NopCloser(strings.NewReader("<Error><Code>" + code + "</Code></Error>")),
	}
	if r.Body == nil {
		return resp, nil
	}
	return resp, r.Body.Close()
}

// Undoing a request of which nothing is known makes sure that it can't be carried out any more.
func TestUndoneRequestArrivesLate(t *testing.T) {
	for name, before := range map[string]func(t *testing.T, other dlock.Backend, r dlock.Request){
		"never locked": func(*testing.T, dlock.Backend, dlock.Request) {},
		"free": func(t *testing.T, other dlock.Backend, r dlock.Request) {
			locktest.Release(t, other, locktest.Take(t, other, r))
		},
		"expired": func(t *testing.T, other dlock.Backend, r dlock.Request) {
			r.TTL = time.Second
			locktest.Take(t, other, r)
			time.Sleep(3 * time.Second)
		},
	} {
		t.Run(name, func(t *testing.T) {
			virtually(t, func(t *testing.T, s site, _ *s3lock.Backend, _ *link, other *s3lock.Backend) {
				b, l := s.linked(t, once)
				r := locktest.Request(time.Hour)
				before(t, other, locktest.Next(r.Key, r.TTL))
				k := lateRequest{l: l}
				l.on("PUT", k.keep)
				_, err := b.TryAcquire(t.Context(), r)
				require.ErrorIs(t, err, errLink)
				l.on("PUT", conflict) // once more
				require.ErrorIs(t, undo(t, b, r), dlock.ErrLost)
				require.Equal(t, http.StatusPreconditionFailed, k.arrive(t))
				locktest.Take(t, other, locktest.Next(r.Key, time.Hour))
			})
		})
	}
}

// A server that accepts a request and doesn't reply is an error, also to a caller without a deadline.
func TestSilentServer(t *testing.T) {
	virtually(t, func(t *testing.T, _ site, b *s3lock.Backend, l *link, _ *s3lock.Backend) {
		silent := func(r *http.Request) (*http.Response, error) {
			<-r.Context().Done()
			return nil, r.Context().Err()
		}
		for _, method := range []string{"GET", "PUT"} {
			began := time.Now()
			l.on(method, silent)
			_, err := b.Acquire(context.Background(), locktest.Request(time.Hour))
			require.ErrorContains(t, err, "the server doesn't answer", method)
			require.Equal(t, 1, strings.Count(err.Error(), "s3lock: "), "%v", err)
			require.Equal(t, 20*time.Second, time.Since(began), method)
		}
	})
}

// A renewal that arrives after its lease has run out and was released brings nothing back.
func TestLateRenewal(t *testing.T) {
	virtually(t, func(t *testing.T, _ site, b *s3lock.Backend, l *link, other *s3lock.Backend) {
		r := locktest.Request(time.Second)
		g := locktest.Take(t, b, r)
		k := lateRequest{l: l}
		l.on("PUT", k.keep, k.keep, k.keep) // the client's repeats too
		require.ErrorIs(t, b.Renew(t.Context(), g), errLink)
		time.Sleep(3 * time.Second)
		require.ErrorIs(t, b.Release(t.Context(), g), dlock.ErrLost)
		require.Equal(t, http.StatusPreconditionFailed, k.arrive(t))
		locktest.Take(t, other, locktest.Next(r.Key, time.Hour))
	})
}

// It is carried out between the undoing's GET and PUT.
func TestUndoOverlapsTheRequest(t *testing.T) {
	virtually(t, func(t *testing.T, s site, _ *s3lock.Backend, _ *link, other *s3lock.Backend) {
		b, l := s.linked(t, once)
		r := locktest.Request(time.Hour)
		k := lateRequest{l: l}
		l.on("PUT", k.keep, func(undo *http.Request) (*http.Response, error) {
			require.Equal(t, http.StatusOK, k.arrive(t))
			return l.RoundTripper.RoundTrip(undo)
		})
		_, err := b.TryAcquire(t.Context(), r)
		require.ErrorIs(t, err, errLink)
		require.NoError(t, undo(t, b, r))
		require.EqualValues(t, 2, locktest.Take(t, other, locktest.Next(r.Key, time.Hour)).Fence)
	})
}

// One that finds the object changed has nothing left to prevent.
func TestManyUndo(t *testing.T) {
	virtually(t, func(t *testing.T, _ site, b *s3lock.Backend, l *link, _ *s3lock.Backend) {
		const many = 50
		r := locktest.Request(time.Hour)
		undone := make(chan error, many)
		for range many {
			go func() { undone <- undo(t, b, locktest.Next(r.Key, time.Hour)) }()
		}
		for range many {
			require.ErrorIs(t, <-undone, dlock.ErrLost)
		}
		require.LessOrEqual(t, l.requests()["PUT"], many)
	})
}

// interfere has f carried out between the GET and the PUT of the next call.
func (l *link) interfere(f func()) {
	l.on("PUT", func(r *http.Request) (*http.Response, error) {
		f()
		return l.RoundTripper.RoundTrip(r)
	})
}

func TestLostRace(t *testing.T) {
	virtually(t, func(t *testing.T, _ site, b *s3lock.Backend, l *link, other *s3lock.Backend) {
		r, rival := locktest.Request(time.Second), dlock.Grant{}
		steal := func() { rival = locktest.Take(t, other, locktest.Next(r.Key, time.Hour)) }
		l.interfere(steal)
		_, err := b.TryAcquire(t.Context(), r)
		require.ErrorIs(t, err, dlock.ErrHeld)

		l.interfere(func() { locktest.Release(t, other, rival) })
		require.ErrorIs(t, b.Renew(t.Context(), dlock.Grant{Key: r.Key, Owner: rival.Owner, TTL: time.Hour}), dlock.ErrLost)

		l.interfere(func() {
			steal()
			locktest.Release(t, other, rival)
			time.Sleep(time.Second)
		})
		began := time.Now()
		g := locktest.Take(t, b, r)
		require.Equal(t, rival.Fence+1, g.Fence)
		require.Equal(t, began.Add(time.Second), g.Start, "the lease begins with the PUT that succeeded")

		for name, call := range map[string]func(context.Context, dlock.Grant) error{"renew": b.Renew, "release": b.Release} {
			l.interfere(func() {
				time.Sleep(3 * time.Second)
				steal()
			})
			err := call(t.Context(), g)
			require.Error(t, err)
			require.Equal(t, name == "renew", errors.Is(err, dlock.ErrLost), "the PUT may be a release's repeat, and then the first was in time")
			require.ErrorIs(t, b.Release(t.Context(), g), dlock.ErrLost)
			_, err = other.TryAcquire(t.Context(), r)
			require.ErrorIs(t, err, dlock.ErrHeld)
			locktest.Release(t, other, rival)
			g = locktest.Take(t, b, locktest.Next(r.Key, time.Second))
		}
	})
}

// The server answers 409 for ever. The object doesn't change.
func TestConflictForEver(t *testing.T) {
	virtually(t, func(t *testing.T, _ site, b *s3lock.Backend, l *link, _ *s3lock.Backend) {
		var busy [100]func(*http.Request) (*http.Response, error)
		for i := range busy {
			busy[i] = conflict
		}
		l.on("PUT", busy[:]...)
		began := time.Now()
		_, err := b.TryAcquire(t.Context(), locktest.Request(time.Hour))
		require.ErrorContains(t, err, "8 conditional writes in a row failed, but the object has not changed")
		require.ErrorContains(t, err, "ConditionalRequestConflict")
		require.Equal(t, map[string]int{"GET": 9, "PUT": 8}, l.requests())
		require.Greater(t, time.Since(began), 600*time.Millisecond, "its pauses double")
	})
}

func TestForeignObject(t *testing.T) {
	virtually(t, func(t *testing.T, s site, b *s3lock.Backend, _ *link, _ *s3lock.Backend) {
		for body, want := range map[string]string{
			"": "is not a lock", "data": "is not a lock", "{}": "is not a lock",
			strings.Repeat(" ", 1<<20) + `{"fence":1,"nonce":"n"}`: "is not a lock",
			`{"fence":18446744073709551615,"nonce":"n"}`:           "the token is out of range",
		} {
			put(t, s, "k", body)
			_, err := b.Acquire(t.Context(), dlock.Request{Key: "k", Owner: "o", TTL: time.Hour})
			require.ErrorContains(t, err, want)
		}
	})
}

func TestDeleted(t *testing.T) {
	virtually(t, func(t *testing.T, s site, b *s3lock.Backend, l *link, other *s3lock.Backend) {
		remove := func(key string) {
			_, err := s.client(t, nil).DeleteObject(t.Context(), &s3.DeleteObjectInput{Bucket: aws.String(bucket), Key: aws.String("lock/" + key)})
			require.NoError(t, err)
		}
		g := locktest.Take(t, b, locktest.Request(time.Hour))
		remove(g.Key)
		require.ErrorIs(t, b.Renew(t.Context(), g), dlock.ErrLost)
		require.ErrorIs(t, b.Release(t.Context(), g), dlock.ErrLost)
		require.EqualValues(t, 1, locktest.Take(t, other, locktest.Next(g.Key, time.Hour)).Fence, "as the package comment warns")
		g = locktest.Take(t, b, locktest.Request(time.Hour))
		l.interfere(func() { remove(g.Key) })
		require.ErrorIs(t, b.Renew(t.Context(), g), dlock.ErrLost)
		g = locktest.Take(t, b, locktest.Request(time.Hour))
		l.on("PUT", func(r *http.Request) (*http.Response, error) { // as S3 answers it
			remove(g.Key)
			return refused(r, http.StatusNotFound, "NoSuchKey")
		})
		require.ErrorIs(t, b.Renew(t.Context(), g), dlock.ErrLost)
	})
}

// The counter is raised by hand, as the documentation advises.
func TestRaisedCounter(t *testing.T) {
	virtually(t, func(t *testing.T, s site, b *s3lock.Backend, _ *link, _ *s3lock.Backend) {
		put(t, s, "k", `{"owner":"","fence":10,"ttl":0,"held":false,"nonce":"n"}`)
		require.EqualValues(t, 11, locktest.Take(t, b, dlock.Request{Key: "k", Owner: "o", TTL: time.Hour}).Fence)
	})
}

// A server behind something that removes the headers.
func TestNoDate(t *testing.T) {
	for _, header := range []string{"Date", "Last-Modified"} {
		synctest.Test(t, func(t *testing.T) {
			b, _ := newSite(t, func(h http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					answer := httptest.NewRecorder()
					h.ServeHTTP(answer, r)
					maps.Copy(w.Header(), answer.Header())
					w.Header()[header] = nil
					w.WriteHeader(answer.Code)
					_, _ = w.Write(answer.Body.Bytes())
				})
			}).linked(t)
			r := locktest.Request(time.Hour)
			locktest.Take(t, b, r)
			_, err := b.TryAcquire(t.Context(), r)
			require.ErrorContains(t, err, "without Date, Last-Modified or ETag")
		})
	}
}

// Close ends a GET that isn't answered and a waiter's pause, but no PUT, whose outcome would be unknown.
func TestClose(t *testing.T) {
	virtually(t, func(t *testing.T, _ site, b *s3lock.Backend, l *link, _ *s3lock.Backend) {
		r := locktest.Request(time.Hour)
		g := locktest.Take(t, b, r)
		paused := locktest.Acquire(t.Context(), b, locktest.Next(r.Key, time.Hour))
		synctest.Wait()
		l.on("GET", l.hang)
		silent := locktest.Acquire(t.Context(), b, locktest.Next(r.Key, time.Hour))
		synctest.Wait()
		closed := make(chan struct{})
		l.interfere(func() { <-closed })
		writes := locktest.Acquire(t.Context(), b, locktest.Request(time.Hour))
		synctest.Wait()
		began := time.Now()
		require.NoError(t, b.Close())
		require.ErrorIs(t, (<-paused).Err, dlock.ErrClosed)
		require.ErrorIs(t, (<-silent).Err, dlock.ErrClosed)
		close(closed)
		require.NoError(t, (<-writes).Err)
		require.Equal(t, began, time.Now())
		require.Equal(t, dlock.ErrClosed, b.Renew(t.Context(), g))
	})
}

func TestNewRefuses(t *testing.T) {
	_, err := s3lock.New(nil, bucket, nil)
	require.ErrorContains(t, err, "client is nil")
	client := s3.New(s3.Options{})
	_, err = s3lock.New(client, "", nil)
	require.ErrorContains(t, err, "bucket is empty")
	_, err = s3lock.New(client, bucket, &s3lock.Options{Prefix: strings.Repeat("p", 825)})
	require.ErrorContains(t, err, "prefix has 825 bytes, at most 824 are allowed")
	_, err = s3lock.New(client, bucket, &s3lock.Options{Poll: time.Microsecond})
	require.ErrorContains(t, err, "Poll is 1µs; it is at least 1ms")
	require.ErrorIs(t, err, dlock.ErrInvalid)
}

func TestOpen(t *testing.T) {
	for _, ignored := range []string{"", "If-Match", "If-None-Match"} {
		synctest.Test(t, func(t *testing.T) {
			s := newSite(t, func(h http.Handler) http.Handler {
				return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					r.Header.Del(ignored)
					h.ServeHTTP(w, r)
				})
			})
			b, err := s3lock.Open(t.Context(), s.client(t, nil), bucket, nil)
			if ignored == "" {
				require.NoError(t, err)
				require.NoError(t, b.Close())
				return
			}
			require.ErrorIs(t, err, s3lock.ErrNoConditions)
			require.ErrorContains(t, err, "it ignores "+ignored)
			require.Nil(t, b)
		})
	}
}

func TestPrefix(t *testing.T) {
	virtually(t, func(t *testing.T, s site, b *s3lock.Backend, _ *link, _ *s3lock.Backend) {
		other, err := s3lock.New(s.client(t, nil), bucket, &s3lock.Options{Prefix: "other/"})
		require.NoError(t, err)
		g := locktest.Take(t, b, dlock.Request{Key: "a/b", Owner: "o", TTL: time.Hour})
		locktest.Take(t, other, dlock.Request{Key: "a/b", Owner: "o", TTL: time.Hour})
		require.NoError(t, other.Close())
		list, err := s.client(t, nil).ListObjectsV2(t.Context(), &s3.ListObjectsV2Input{Bucket: aws.String(bucket)})
		require.NoError(t, err)
		var names []string
		for _, o := range list.Contents {
			names = append(names, *o.Key)
		}
		require.Equal(t, []string{"lock/a!2Fb", "other/a!2Fb"}, names)
		require.NoError(t, b.Release(t.Context(), g))
	})
}
