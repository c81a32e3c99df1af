package etcdlock_test

import (
	"context"
	"fmt"
	"io"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func (n node) guardOf(tb testing.TB, g dlock.Grant) string {
	tb.Helper()
	kv := n.keyOf(tb, dlock.Request{Key: g.Key, Owner: g.Owner})
	return fmt.Sprintf("session/%x", kv.Lease)
}

// moveGuard undoes a put without a reply, and returns the guard's revision.
func (n node) moveGuard(tb testing.TB, guard string, ttl time.Duration) int64 {
	tb.Helper()
	r := locktest.Request(ttl)
	heal := n.l.inject(loseReplies)
	_, err := n.TryAcquire(tb.Context(), r)
	heal()
	require.Error(tb, err)
	require.NoError(tb, n.Release(tb.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner}))
	resp, err := n.c.Get(tb.Context(), guard)
	require.NoError(tb, err)
	require.Len(tb, resp.Kvs, 1)
	require.Equal(tb, guard, fmt.Sprintf("session/%x", resp.Kvs[0].Lease), "it goes with the session")
	return resp.Kvs[0].ModRevision
}

// goesOn checks that n, whose guard was lost, needs few requests to acquire a free key, that a holder in the store learns of its
// loss, and that its key isn't granted too early.
func (n node) goesOn(t *testing.T, held dlock.Grant, ttl time.Duration) dlock.Grant {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	before := n.l.sent(txn)
	g, err := n.TryAcquire(ctx, locktest.Request(ttl))
	after := n.l.sent(txn)
	require.NoError(t, err, "after %d transactions", after-before)
	require.LessOrEqual(t, after-before, 3)
	require.NoError(t, n.Renew(t.Context(), g))

	select {
	case <-held.Lost:
	default:
		require.Fail(t, "the holder is not told")
	}
	require.ErrorIs(t, n.Renew(t.Context(), held), dlock.ErrLost)
	r := locktest.Next(held.Key, ttl)
	_, err = n.TryAcquire(t.Context(), r)
	require.ErrorIs(t, err, dlock.ErrHeld)
	require.NoError(t, n.Release(t.Context(), held))
	n.take(t, r)
	return g
}

// snapshot returns a func that restores c, and waits until n's client has connected.
func (n node) snapshot(t *testing.T, c *testbed.Cluster, bump uint64) (restore func()) {
	t.Helper()
	rd, err := n.c.Snapshot(t.Context())
	require.NoError(t, err)
	snapshot, err := io.ReadAll(rd)
	require.NoError(t, err)
	require.NoError(t, rd.Close())
	return func() {
		require.NoError(t, c.RestoreSnapshot(t.Context(), snapshot, bump))
		locktest.Eventually(t, func() bool {
			_, err := n.c.Get(t.Context(), "test/any", clientv3.WithCountOnly())
			return err == nil
		})
	}
}

func TestRestoredSnapshot(t *testing.T) {
	for _, moved := range []bool{false, true} {
		for _, bump := range []uint64{0, 1000} {
			t.Run(fmt.Sprintf("moved=%t/bump=%d", moved, bump), func(t *testing.T) {
				c := testmain.ServeCluster(t, testbed.StartEtcd, 1, nil)
				a := newNode(t, c)
				held := a.take(t, locktest.Request(time.Hour))
				guard := a.guardOf(t, held)
				if moved {
					a.moveGuard(t, guard, time.Hour)
				}
				restore := a.snapshot(t, c, bump)
				last := a.moveGuard(t, guard, time.Hour)
				restore()
				g := a.goesOn(t, held, time.Hour)
				if bump > 0 {
					require.Greater(t, g.Fence, uint64(last))
				}
			})
		}
	}
}

// The key is deleted with its session.
func TestDeletedKeyIsBack(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	r := locktest.Request(shortSession)
	g := a.take(t, r)
	kv := b.keyOf(t, r)
	require.NoError(t, a.Release(t.Context(), g))
	_, err := b.c.Put(t.Context(), string(kv.Key), string(kv.Value), clientv3.WithLease(clientv3.LeaseID(kv.Lease)))
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for _, owner := range []string{"next", r.Owner} {
		then, err := a.Acquire(ctx, dlock.Request{Key: r.Key, Owner: owner, TTL: r.TTL})
		require.NoError(t, err)
		require.Greater(t, then.Fence, g.Fence)
	}
}

// The restored store hasn't reached the watch's first revision.
func TestWatchAfterARestore(t *testing.T) {
	c := testmain.ServeCluster(t, testbed.StartEtcd, 1, nil)
	a, b := newNode(t, c), newNode(t, c)
	g := a.take(t, locktest.Request(time.Hour))
	_, came := b.waits(t, g.Key, time.Hour)
	restore := a.snapshot(t, c, 0)
	for range 100 {
		_, err := a.c.Put(t.Context(), "test/unrelated", "")
		require.NoError(t, err)
	}
	b.watches(t, 2) // the key before its own, from a later revision
	restore()
	a.revoke(t, dlock.Request{Key: g.Key, Owner: g.Owner}) // so that nobody is notified
	locktest.Won(t, came)
}

// Another claim's undo overtakes a put, which is repeated on the same session.
func TestGuardMoves(t *testing.T) {
	a := newNode(t, one)
	held := a.take(t, locktest.Request(time.Hour))
	try := func(ctx context.Context, r dlock.Request) <-chan locktest.Outcome {
		return a.sends(t, func() (dlock.Grant, error) { return a.TryAcquire(ctx, r) })
	}
	undone := locktest.Request(time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	defer a.l.inject(holdOneRequest)()
	lost := try(ctx, undone)
	cancel()
	require.ErrorIs(t, (<-lost).Err, context.Canceled)
	deliver := a.l.inject(delayOneRequest)
	defer deliver()
	overtaken := try(t.Context(), locktest.Request(time.Hour))
	require.ErrorIs(t, a.Release(t.Context(), dlock.Grant{Key: undone.Key, Owner: undone.Owner}), dlock.ErrLost)
	before := a.l.sent(txn)
	deliver()
	o := locktest.Won(t, overtaken)
	after := a.l.sent(txn)
	require.Equal(t, 1, after-before, "repeated once")
	require.Equal(t, held.Lost, o.Lost, "the same session")
	require.Regexp(t, "-0$", o.State, "the same name")
	require.NoError(t, a.Renew(t.Context(), held))
	<-a.l.late
}

// The next put knows the undo, or learns of it if its reply is lost.
func TestGuardMovedBefore(t *testing.T) {
	a := newNode(t, one)
	ctx, cancel := context.WithTimeout(t.Context(), locktest.Timeout)
	defer cancel()
	a.take(t, locktest.Request(time.Hour)) // starts the session
	for _, lost := range []bool{false, true} {
		r := locktest.Request(time.Hour)
		heal := a.l.inject(loseReplies)
		_, err := a.TryAcquire(t.Context(), r)
		require.Error(t, err)
		if !lost {
			heal()
		}
		err = a.Release(t.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner})
		heal()
		require.Equal(t, lost, err != nil, "%v", err)
		before := a.l.sent(txn)
		_, err = a.TryAcquire(ctx, locktest.Request(time.Hour))
		require.NoError(t, err)
		want := 1
		if lost {
			want = 2
		}
		require.Equal(t, want, a.l.sent(txn)-before, "puts")
	}
}

func TestRetriesPause(t *testing.T) {
	a := newNode(t, one)
	defer a.l.inject(forgetLeases)()
	ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
	defer cancel()
	_, err := a.TryAcquire(ctx, locktest.Request(shortTTL))
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.LessOrEqual(t, a.l.sent(txn), 7, "pauses of 20, 40, 80, 160 and 320 ms")
}
