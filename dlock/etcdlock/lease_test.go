package etcdlock_test

import (
	"cmp"
	"context"
	"errors"
	"net"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/etcdlock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
)

func queue(key string) string { return "lock/" + url.PathEscape(key) + "/" }

func TestSessionOutlivesGrants(t *testing.T) {
	locktest.Undisturbed(t, func(t *testing.T) (done bool) {
		const ttl = 900 * time.Millisecond
		a, b := newNode(t, one), newNode(t, one)
		first := a.take(t, locktest.Request(ttl))
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		gone := b.c.Watch(ctx, "lock/test", clientv3.WithPrefix(), clientv3.WithFilterPut(), clientv3.WithRev(int64(first.Fence)))
		defer a.l.inject(cutKeepAlives)()
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		last := first
		for {
			<-tick.C
			g, err := a.TryAcquire(t.Context(), locktest.Request(ttl))
			if err != nil {
				require.ErrorContains(t, err, "keep-alive")
				break
			}
			if g.Lost != last.Lost {
				break // the session ended meanwhile
			}
			last = g
		}
		if first.Owner == last.Owner {
			return false
		}
		for resp := range gone {
			require.NoError(t, resp.Err())
			for _, e := range resp.Events {
				if strings.HasPrefix(string(e.Kv.Key), queue(last.Key)) {
					require.GreaterOrEqual(t, time.Since(last.Start), ttl, "from the last grant's Start to its end")
					return true
				}
			}
		}
		require.Fail(t, "the watch has ended")
		return true
	})
}

func TestSessionOutlivesRenewals(t *testing.T) {
	locktest.Undisturbed(t, func(t *testing.T) (done bool) {
		const ttl = 900 * time.Millisecond
		a, b := newNode(t, one), newNode(t, one)
		g := a.take(t, locktest.Request(ttl))
		r := locktest.Next(g.Key, time.Hour)
		defer a.l.inject(cutKeepAlives)()
		won := locktest.Acquire(t.Context(), b, r)
		tick := time.NewTicker(10 * time.Millisecond)
		defer tick.Stop()
		last := g.Start
		for {
			<-tick.C
			renewed := time.Now()
			err := a.Renew(t.Context(), g)
			if err != nil && time.Since(last) >= ttl { // the lease has expired
				locktest.Won(t, won)
				return false
			}
			if err != nil {
				require.ErrorContains(t, err, "keep-alive")
				break
			}
			last = renewed
		}
		require.NotEqual(t, g.Start, last)
		o := locktest.Receive(t, won)
		require.NoError(t, o.Err)
		require.GreaterOrEqual(t, o.At.Sub(last), ttl, "from the last renewal to the successor's grant")
		return true
	})
}

// The session lasts from when the keep-alive was sent.
func TestLateKeepAlive(t *testing.T) {
	locktest.Undisturbed(t, func(t *testing.T) (done bool) {
		const ttl = 900 * time.Millisecond // S is 2 s
		a := newNode(t, one)
		a.take(t, locktest.Request(ttl))
		defer a.l.inject(holdKeepAlives)()
		before := len(a.l.keptAlive())
		locktest.Eventually(t, func() bool { return len(a.l.keptAlive()) > before })
		sent := a.l.keptAlive()[before]
		time.Sleep(time.Until(sent.Add(800 * time.Millisecond))) // it is given up after a second
		select {
		case a.l.deliver <- struct{}{}:
		case <-time.After(locktest.Timeout):
			require.Fail(t, "no reply to deliver")
		}
		if len(a.l.keptAlive()) > before+1 {
			return false // it was given up, and the next one's reply delivered
		}
		time.Sleep(time.Until(sent.Add(1200 * time.Millisecond)))
		_, err := a.TryAcquire(t.Context(), locktest.Request(ttl))
		require.ErrorContains(t, err, "keep-alive: ")
		return true
	})
}

func TestRenewalTooLate(t *testing.T) {
	locktest.Undisturbed(t, func(t *testing.T) (done bool) {
		a, b := newNode(t, one), newNode(t, one)
		g := a.take(t, locktest.Request(shortTTL))
		deliver := a.l.inject(holdReplies)
		defer deliver()
		renewed := make(chan error, 1)
		go func() { renewed <- a.Renew(t.Context(), g) }()
		_, err := b.Acquire(t.Context(), locktest.Next(g.Key, time.Hour))
		require.NoError(t, err)
		deliver()
		err = <-renewed
		if err != nil && strings.Contains(err.Error(), "keep-alive: ") { // nothing was read
			return false
		}
		require.ErrorIs(t, err, dlock.ErrLost)
		return true
	})
}

// The put's reply is still to come, and no timer runs any more.
func TestClosedDuringAPut(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	a.take(t, locktest.Request(time.Hour)) // keeps the session
	r := locktest.Request(time.Hour)
	defer a.l.inject(holdReplies)()
	came := locktest.Acquire(t.Context(), a, r)
	locktest.Eventually(t, func() bool { return len(b.keysOf(t, r)) == 1 })
	require.NoError(t, a.Close())
	require.Empty(t, b.keysOf(t, r))
	require.ErrorIs(t, locktest.Receive(t, came).Err, dlock.ErrClosed)
}

// The earlier renewal's reply comes last.
func TestEarlierRenewal(t *testing.T) {
	a := newNode(t, one)
	g := a.take(t, locktest.Request(time.Hour))
	early := g
	early.TTL = time.Millisecond
	require.NoError(t, a.Renew(t.Context(), early))
	time.Sleep(50 * time.Millisecond)
	require.NoError(t, a.Renew(t.Context(), g))
}

// Nobody undoes it, and the session is alive.
func TestOrphanRunsOut(t *testing.T) {
	locktest.Undisturbed(t, func(t *testing.T) (done bool) {
		a, b := newNode(t, one), newNode(t, one)
		held := a.take(t, locktest.Request(shortTTL)) // keeps the session
		r := locktest.Request(shortTTL)
		heal := a.l.inject(loseReplies)
		_, err := a.TryAcquire(t.Context(), r)
		require.Error(t, err)
		heal()
		_, err = b.Acquire(t.Context(), locktest.Next(r.Key, time.Hour))
		require.NoError(t, err)
		select {
		case <-held.Lost:
			require.Greater(t, time.Since(held.Start), shortSession, "the session is gone, and not only the orphan")
			return false
		default:
		}
		return true
	})
}

// The late put's key expires. The call then waits with another.
func TestAnswerLate(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	r := locktest.Next(b.take(t, locktest.Request(time.Hour)).Key, shortTTL)
	answered, deliver := a.l.holdAnswer()
	defer deliver()
	ctx, cancel := context.WithCancel(t.Context())
	left := locktest.Acquire(ctx, a, r)
	locktest.Receive(t, answered)
	key := func() []*mvccpb.KeyValue { return b.keysOf(t, r) }
	locktest.Eventually(t, func() bool { return len(key()) == 0 })
	deliver()
	locktest.Eventually(t, func() bool { return len(key()) == 1 })
	cancel()
	require.ErrorIs(t, locktest.Receive(t, left).Err, context.Canceled)
	locktest.Eventually(t, func() bool { return len(key()) == 0 })
}

func TestLeaseStartsBeforeThePut(t *testing.T) {
	a := newNode(t, one)
	answered, deliver := a.l.holdAnswer()
	defer deliver()
	came := locktest.Acquire(t.Context(), a, locktest.Request(time.Hour))
	locktest.Receive(t, answered)
	applied := time.Now()
	deliver()
	require.False(t, locktest.Won(t, came).Start.After(applied))
}

func TestRepliesSlowerThanTheTTL(t *testing.T) {
	for _, late := range []fault{answerLate, sendLate} {
		for _, acquire := range []func(*etcdlock.Backend, context.Context, dlock.Request) (dlock.Grant, error){
			(*etcdlock.Backend).TryAcquire, (*etcdlock.Backend).Acquire,
		} {
			a, b := newNode(t, one), newNode(t, one)
			a.starts(t, shortTTL)
			heal := a.l.inject(late)
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			r := locktest.Request(shortTTL)
			_, err := acquire(a.Backend, ctx, r)
			heal()
			require.ErrorIs(t, err, dlock.ErrLost)
			require.ErrorContains(t, err, "set a longer TTL")
			require.Equal(t, 3, a.l.sent("late"))
			require.Empty(t, b.keysOf(t, r))
			r.TTL = time.Hour
			require.NoError(t, a.Release(t.Context(), a.take(t, r)))
		}
	}
}

// The next put doesn't wait for the last one's undo, which is lost three times, or always.
func TestUndoSlowerThanTheReply(t *testing.T) {
	for f, ttl := range map[fault]time.Duration{undoLost: 500 * time.Millisecond, undoNever: shortTTL} {
		a := newNode(t, one)
		a.starts(t, ttl)
		defer a.l.inject(f)()
		ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
		defer cancel()
		_, err := a.TryAcquire(ctx, locktest.Request(ttl))
		if f == undoNever {
			require.ErrorIs(t, err, dlock.ErrLost)
			require.ErrorContains(t, err, "set a longer TTL")
		} else {
			require.NoError(t, err)
			require.Equal(t, 3, a.l.sent("lost"))
		}
	}
}

// The client would wait for an unreachable server until the context ends.
func TestUnreachableWithoutDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		refused := errors.New("refused")
		cl, err := clientv3.New(clientv3.Config{
			Endpoints: []string{"127.0.0.1:1"}, Logger: zap.NewNop(),
			DialOptions: []grpc.DialOption{grpc.WithContextDialer(func(context.Context, string) (net.Conn, error) { return nil, refused })},
		})
		require.NoError(t, err)
		b := newBackend(t, cl, nil)
		for _, acquire := range []func(context.Context, dlock.Request) (dlock.Grant, error){b.Acquire, b.TryAcquire} {
			began := time.Now()
			_, err := acquire(context.Background(), locktest.Request(time.Hour))
			require.EqualError(t, err, "etcdlock: session: the server doesn't answer within 20s")
			require.Equal(t, 20*time.Second, time.Since(began))
		}
		require.NoError(t, b.Close())
		require.NoError(t, cl.Close())
	})
}

// If the session is over once etcd is back, another is used.
func TestNothingIsPutDuringAnOutage(t *testing.T) {
	n, b := newNode(t, one), newNode(t, one)
	r := locktest.Request(shortSession)
	g := n.take(t, r)
	kv := b.keyOf(t, r)
	locktest.Release(t, n, g)
	session, err := b.c.TimeToLive(t.Context(), clientv3.LeaseID(kv.Lease))
	require.NoError(t, err)
	streams := n.l.sent(keepAlive)
	heal := n.l.inject(cut)
	defer heal()
	locktest.Eventually(t, func() bool { return n.l.sent(keepAlive) > streams }) // the last stream is broken
	over := time.Now().Add(time.Duration(session.GrantedTTL) * time.Second)      // at the latest
	_, err = b.c.Revoke(t.Context(), clientv3.LeaseID(kv.Lease))
	require.NoError(t, err)
	time.Sleep(time.Until(over))
	before := n.l.sent(txn)
	for range 3 {
		_, err := n.TryAcquire(t.Context(), locktest.Request(shortTTL))
		require.ErrorContains(t, err, "keep-alive: ")
	}
	require.Equal(t, before, n.l.sent(txn))
	heal()
	locktest.Eventually(t, func() bool {
		_, err := n.TryAcquire(t.Context(), locktest.Request(shortSession))
		assert.NotErrorIs(t, err, dlock.ErrLost)
		return err == nil
	})
}

func TestStuckSession(t *testing.T) {
	a := newNode(t, one)
	defer a.l.inject(holdGrant)()
	first := locktest.Acquire(t.Context(), a, locktest.Request(time.Hour))
	locktest.Eventually(t, func() bool { return a.l.sent(grant) == 1 })
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	_, err := a.TryAcquire(ctx, locktest.Request(time.Hour))
	require.NoError(t, err)
	locktest.Won(t, first)
}

func TestLatePut(t *testing.T) {
	for _, acquire := range []func(*etcdlock.Backend, context.Context, dlock.Request) (dlock.Grant, error){
		(*etcdlock.Backend).TryAcquire, (*etcdlock.Backend).Acquire,
	} {
		a, b := newNode(t, one), newNode(t, one)
		g := a.take(t, locktest.Request(time.Hour)) // starts the session
		r := locktest.Request(time.Hour)
		ctx, cancel := context.WithCancel(t.Context())
		deliver := a.l.inject(holdOneRequest)
		came := a.sends(t, func() (dlock.Grant, error) { return acquire(a.Backend, ctx, r) })
		cancel()
		require.ErrorIs(t, (<-came).Err, context.Canceled)
		require.ErrorIs(t, a.Release(t.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner}), dlock.ErrLost)
		deliver()
		<-a.l.late
		require.Empty(t, b.keysOf(t, r), "the late put's key")

		r.Owner = "next"
		g2, err := acquire(a.Backend, t.Context(), r)
		require.NoError(t, err)
		require.NoError(t, a.Release(t.Context(), g2))
		require.NoError(t, a.Renew(t.Context(), g))
	}
}

func TestLatePutNotUndone(t *testing.T) {
	t.Parallel()
	const ttl = 5 * time.Second
	a, b := newNode(t, one), newNode(t, one)
	guard := a.guardOf(t, a.take(t, locktest.Request(ttl))) // starts the session
	r := locktest.Request(ttl)
	ctx, cancel := context.WithCancel(t.Context())
	deliver := a.l.inject(holdOneRequest)
	came := a.sends(t, func() (dlock.Grant, error) { return a.TryAcquire(ctx, r) })
	cancel()
	require.ErrorIs(t, (<-came).Err, context.Canceled)
	locktest.Eventually(t, func() bool {
		resp, err := b.c.Get(t.Context(), guard)
		return err == nil && len(resp.Kvs) == 1
	})
	deliver()
	<-a.l.late
	require.Empty(t, b.keysOf(t, r), "the late put's key")
}

// The key's name is in use again; the new key stays.
func TestLateDelete(t *testing.T) {
	t.Run("another owner", func(t *testing.T) { lateDelete(t, "next") })
	t.Run("the same owner", func(t *testing.T) { lateDelete(t, "") })
}

func lateDelete(t *testing.T, owner string) {
	t.Helper()
	a, b := newNode(t, one), newNode(t, one)
	r := locktest.Request(time.Hour)
	first := a.take(t, r)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	deliver := a.l.inject(holdOneRequest)
	undo := dlock.Grant{Key: r.Key, Owner: r.Owner}
	released := a.sends(t, func() (dlock.Grant, error) { return undo, a.Release(ctx, undo) })
	cancel()
	require.ErrorIs(t, (<-released).Err, context.Canceled)
	require.NoError(t, a.Release(t.Context(), undo))
	r.Owner = cmp.Or(owner, r.Owner)
	g := a.take(t, r)
	require.Equal(t, first.State, g.State, "the same name")
	deliver()
	<-a.l.late
	_, err := b.TryAcquire(t.Context(), locktest.Next(r.Key, time.Hour))
	require.ErrorIs(t, err, dlock.ErrHeld)
	require.NoError(t, a.Renew(t.Context(), g))
}

// The deletion is retried although another client has deleted the key.
func TestRepeatedDelete(t *testing.T) {
	t.Run("another owner", func(t *testing.T) { repeatedDelete(t, "next") })
	t.Run("the same owner", func(t *testing.T) { repeatedDelete(t, "") })
}

func repeatedDelete(t *testing.T, owner string) {
	t.Helper()
	a, b := newNode(t, one), newNode(t, one)
	held := b.take(t, locktest.Request(time.Hour))
	r := locktest.Next(held.Key, time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	left := locktest.Acquire(ctx, a, r)
	a.watches(t, 1)
	kv := b.keyOf(t, r)
	name := kv.Key

	calls := a.l.sent(txn)
	a.l.mu.Lock()
	a.l.refuse = 1 // the waiter's request on leaving
	a.l.mu.Unlock()
	deliver := a.l.inject(delayOneRequest) // then its timer's
	defer deliver()
	cancel()
	require.ErrorIs(t, (<-left).Err, context.Canceled)
	locktest.Eventually(t, func() bool { return a.l.sent(txn) == calls+2 })
	require.NoError(t, a.Release(t.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner}))
	require.NoError(t, b.Release(t.Context(), held))
	r.Owner = cmp.Or(owner, r.Owner)
	g := a.take(t, r)
	require.EqualValues(t, name, g.State, "the same name")
	answered, passOn := a.l.holdAnswer()
	passOn()
	deliver()
	locktest.Receive(t, answered)
	_, err := b.TryAcquire(t.Context(), locktest.Next(r.Key, time.Hour))
	require.ErrorIs(t, err, dlock.ErrHeld)
	require.NoError(t, a.Renew(t.Context(), g))
}

func TestKeepAlivesAreFew(t *testing.T) {
	for name, c := range map[string]struct {
		ttls        []time.Duration // all of one session, of 12 s if they are about 10 s
		least, most time.Duration   // between keep-alives; at most S - TTL
	}{
		"one TTL":      {[]time.Duration{10 * time.Second}, 1300 * time.Millisecond, 2 * time.Second},
		"a short one":  {[]time.Duration{shortTTL}, 400 * time.Millisecond, time.Second}, // S is 2 s
		"an hour":      {[]time.Duration{time.Hour}, 1800 * time.Millisecond, 2400 * time.Millisecond},
		"a longer one": {[]time.Duration{9800 * time.Millisecond, 10660 * time.Millisecond}, 900 * time.Millisecond, 1340 * time.Millisecond},
		"the longest":  {[]time.Duration{10660 * time.Millisecond, 9800 * time.Millisecond}, 900 * time.Millisecond, 1340 * time.Millisecond},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newNode(t, one)
			for _, ttl := range c.ttls {
				a.take(t, locktest.Request(ttl))
			}
			for i := 2; ; i++ { // the last TTL may not be known before
				locktest.Eventually(t, func() bool { return len(a.l.keptAlive()) > i }, 30*time.Second, 10*time.Millisecond)
				kept := a.l.keptAlive()
				gap := kept[i].Sub(kept[i-1])
				require.Greater(t, gap, c.least)
				if gap < c.most {
					return
				}
				require.Less(t, i, 15, "the last of several gaps that are too long: %v", gap) // the machine may have stalled
			}
		})
	}
}

func TestSessionLength(t *testing.T) {
	n := newNode(t, one)
	for ttl, want := range map[time.Duration]int64{
		shortTTL: 2, 1500 * time.Millisecond: 3, 8 * time.Second: 9, 10 * time.Second: 12, time.Hour: 3610,
	} {
		r := locktest.Request(ttl)
		n.take(t, r)
		lease, err := n.c.TimeToLive(t.Context(), clientv3.LeaseID(n.keyOf(t, r).Lease))
		require.NoError(t, err)
		require.Equal(t, want, lease.GrantedTTL, "TTL %v", ttl)
	}
	ctx, cancel := context.WithTimeout(t.Context(), locktest.Timeout)
	defer cancel()
	_, err := n.TryAcquire(ctx, locktest.Request(1<<63-1))
	require.ErrorIs(t, err, dlock.ErrInvalid)
}

func TestRenewalsWriteNothing(t *testing.T) {
	a := newNode(t, three)
	g := a.take(t, locktest.Request(time.Hour))
	before := a.l.sent(txn)
	writes := a.l.writes
	for range 10 {
		require.NoError(t, a.Renew(t.Context(), g))
	}
	after := a.l.sent(txn)
	require.Equal(t, 10, after-before)
	require.Equal(t, writes, a.l.writes)
}

func TestCloseRevokesIdleSessions(t *testing.T) {
	locktest.Undisturbed(t, func(t *testing.T) (done bool) {
		n := newNode(t, one)
		lease := func(r dlock.Request) clientv3.LeaseID {
			kv := n.keyOf(t, r)
			return clientv3.LeaseID(kv.Lease)
		}
		b := newBackend(t, n.c, nil)
		held, idle := locktest.Request(time.Hour), locktest.Request(time.Minute)
		_, err := b.TryAcquire(t.Context(), held)
		require.NoError(t, err)
		g, err := b.TryAcquire(t.Context(), idle)
		require.NoError(t, err)
		heldLease, idleLease := lease(held), lease(idle)
		require.NotEqual(t, heldLease, idleLease)
		require.NoError(t, b.Release(t.Context(), g))
		began := time.Now()
		require.NoError(t, b.Close())
		took := time.Since(began)
		left, err := n.c.TimeToLive(t.Context(), heldLease)
		require.NoError(t, err)
		require.Positive(t, left.TTL)
		left, err = n.c.TimeToLive(t.Context(), idleLease)
		require.NoError(t, err)
		if left.TTL != -1 && took >= time.Second { // Close has given up
			return false
		}
		require.EqualValues(t, -1, left.TTL)
		return true
	})
}

// The grant's keep-alive reveals the session's end.
func TestSessionEndsUnderAGrant(t *testing.T) {
	locktest.Undisturbed(t, func(t *testing.T) bool { return sessionEndsUnderAGrant(t, 0) })
	// The first deletion fails; the retry leaves the next key alone.
	locktest.Undisturbed(t, func(t *testing.T) bool { return sessionEndsUnderAGrant(t, 1) })
}

func sessionEndsUnderAGrant(t *testing.T, refuse int) bool {
	t.Helper()
	var done atomic.Bool
	const ttl = 900 * time.Millisecond
	a, b := newNode(t, one), newNode(t, one)
	a.take(t, locktest.Request(ttl)) // starts the session
	r := locktest.Request(ttl)
	heal := a.l.inject(cutKeepAlives)
	defer heal()
	time.Sleep(1200 * time.Millisecond) // too long for the last keep-alive to cover a grant
	a.l.mu.Lock()
	a.l.after = func() {
		if kvs := b.keysOf(t, r); len(kvs) == 1 {
			_, err := b.c.Revoke(t.Context(), clientv3.LeaseID(kvs[0].Lease))
			done.Store(err == nil)
		}
		heal()
		a.l.mu.Lock()
		a.l.refuse = refuse
		a.l.mu.Unlock()
	}
	a.l.mu.Unlock()
	g, err := a.TryAcquire(t.Context(), r)
	if err != nil && !errors.Is(err, dlock.ErrLost) && strings.Contains(err.Error(), "keep-alive: ") {
		return false
	}
	require.NoError(t, err)
	if err := a.Renew(t.Context(), g); err != nil {
		require.GreaterOrEqual(t, time.Since(g.Start), ttl)
		return false
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err = b.Acquire(ctx, locktest.Next(r.Key, time.Hour))
	require.NoError(t, err, "the key of a lease that is over goes")
	require.GreaterOrEqual(t, time.Since(g.Start), ttl)
	return done.Load()
}

func TestNew(t *testing.T) {
	_, err := etcdlock.New(nil, nil)
	require.ErrorIs(t, err, dlock.ErrInvalid)
	n := newNode(t, one)
	_, err = etcdlock.New(n.c, &etcdlock.Options{Prefix: "a/lock/b"})
	require.ErrorIs(t, err, dlock.ErrInvalid, "a prefix that can be mistaken for a lock")
	b := newBackend(t, n.c, &etcdlock.Options{Prefix: "app/"})
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	r := locktest.Request(time.Hour)
	g := n.take(t, r)
	other, err := b.TryAcquire(t.Context(), r)
	require.NoError(t, err, "prefixes are apart")
	require.Greater(t, other.Fence, g.Fence)
	resp, err := n.c.Get(t.Context(), "app/"+queue(r.Key), clientv3.WithPrefix())
	require.NoError(t, err)
	require.Len(t, resp.Kvs, 1)
	require.EqualValues(t, other.Fence, resp.Kvs[0].CreateRevision)
	require.Equal(t, resp.Kvs[0].CreateRevision, resp.Kvs[0].ModRevision)
}

func TestNamesAreUsedAgain(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	r := locktest.Request(time.Hour)
	names := map[string]bool{}
	for range 10 {
		held := b.take(t, locktest.Next(r.Key, time.Hour))
		_, err := a.TryAcquire(t.Context(), r)
		require.ErrorIs(t, err, dlock.ErrHeld)
		locktest.Release(t, b, held)
		r.Owner = uuid.NewString()
		g := a.take(t, r)
		kv := a.keyOf(t, r)
		names[string(kv.Key)] = true
		require.NoError(t, a.Release(t.Context(), g))
	}
	require.Len(t, names, 1)
}

func TestStaleGrantOfAName(t *testing.T) {
	locktest.Undisturbed(t, func(t *testing.T) (done bool) {
		a, b := newNode(t, one), newNode(t, one)
		r := locktest.Request(shortTTL)
		first := a.take(t, r)
		mid, err := b.Acquire(t.Context(), dlock.Request{Key: r.Key, Owner: "between", TTL: time.Hour}) // first has expired
		require.NoError(t, err)
		require.NoError(t, b.Release(t.Context(), mid))
		r.Owner = "next"
		r.TTL = shortSession // the same S
		second := a.take(t, r)
		if first.State != second.State && time.Since(first.Start) > shortSession { // another session
			return false
		}
		require.Equal(t, first.State, second.State)
		require.ErrorIs(t, a.Release(t.Context(), first), dlock.ErrLost)
		require.ErrorIs(t, a.Renew(t.Context(), first), dlock.ErrLost)
		return true
	})
}

func TestEarlierGrant(t *testing.T) {
	n := newNode(t, one)
	r := locktest.Request(time.Hour)
	earlier := n.take(t, r)
	require.NoError(t, n.Release(t.Context(), earlier))
	g := n.take(t, r)
	require.ErrorIs(t, n.Release(t.Context(), earlier), dlock.ErrLost)
	require.ErrorIs(t, n.Renew(t.Context(), earlier), dlock.ErrLost)
	require.NoError(t, n.Renew(t.Context(), g))
}

func TestIsOwner(t *testing.T) {
	n := newNode(t, one)
	r := locktest.Request(time.Hour)
	g := n.take(t, r)
	write := func(g dlock.Grant) bool {
		resp, err := n.c.Txn(t.Context()).If(n.IsOwner(g)).Then(clientv3.OpPut("test/guarded", "")).Commit()
		require.NoError(t, err)
		return resp.Succeeded
	}
	require.True(t, write(g))
	require.NoError(t, n.Release(t.Context(), g))
	require.False(t, write(g))
	require.False(t, write(dlock.Grant{Key: g.Key, Owner: g.Owner}), "no token: nobody's key is no reason to write")
	again := n.take(t, r)
	require.False(t, write(g), "the same owner's earlier grant")
	require.True(t, write(dlock.Grant{Key: again.Key, Owner: again.Owner, Fence: again.Fence}))
}
