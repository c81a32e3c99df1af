package etcdlock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/etcdlock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

type node struct {
	*etcdlock.Backend
	l *link
	c *clientv3.Client
}

func newNode(tb testing.TB, c *testbed.Cluster, set ...func(*clientv3.Config)) node {
	tb.Helper()
	l := newLink()
	cl := client(tb, c, l, set...)
	b, err := etcdlock.New(cl, nil)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, b.Close()) })
	return node{b, l, cl}
}

// take retries if a stall of the machine delays a short session's keep-alive, or the reply.
func (n node) take(tb testing.TB, r dlock.Request) dlock.Grant {
	tb.Helper()
	for began := time.Now(); ; {
		g, err := n.TryAcquire(tb.Context(), r)
		late := errors.Is(err, dlock.ErrLost) || err != nil && strings.Contains(err.Error(), "keep-alive: ")
		if late && r.TTL <= shortSession && time.Since(began) < 30*time.Second {
			continue
		}
		require.NoError(tb, err)
		return g
	}
}

func (n node) starts(tb testing.TB, ttl time.Duration) {
	tb.Helper()
	if err := n.Release(tb.Context(), n.take(tb, locktest.Request(ttl))); !errors.Is(err, dlock.ErrLost) { // it may have expired
		require.NoError(tb, err)
	}
}

// shortSession is so short that a stall of the machine may end the session.
const shortSession = time.Second

// waits has n wait for key, and returns when it watches.
func (n node) waits(tb testing.TB, key string, ttl time.Duration) (r dlock.Request, came <-chan locktest.Outcome) {
	tb.Helper()
	before := n.l.sent(watches)
	r = locktest.Next(key, ttl)
	came = locktest.Acquire(tb.Context(), n, r)
	n.watches(tb, before+1)
	return r, came
}

// sends returns when f has sent another transaction.
func (n node) sends(tb testing.TB, f func() (dlock.Grant, error)) <-chan locktest.Outcome {
	tb.Helper()
	calls := n.l.sent(txn)
	came := locktest.Go(f)
	locktest.Eventually(tb, func() bool { return n.l.sent(txn) > calls })
	return came
}

func (n node) watches(tb testing.TB, want int) {
	tb.Helper()
	locktest.Eventually(tb, func() bool { return n.l.sent(watches) >= want })
}

func (n node) keysOf(tb testing.TB, r dlock.Request) (keys []*mvccpb.KeyValue) {
	tb.Helper()
	resp, err := n.c.Get(tb.Context(), queue(r.Key), clientv3.WithPrefix())
	require.NoError(tb, err)
	for _, kv := range resp.Kvs {
		if owner, _, _ := strings.Cut(string(kv.Value), " "); owner == r.Owner {
			keys = append(keys, kv)
		}
	}
	return keys
}

func (n node) keyOf(tb testing.TB, r dlock.Request) *mvccpb.KeyValue {
	tb.Helper()
	keys := n.keysOf(tb, r)
	require.Len(tb, keys, 1)
	return keys[0]
}

func (n node) revoke(tb testing.TB, r dlock.Request) {
	tb.Helper()
	kv := n.keyOf(tb, r)
	_, err := n.c.Revoke(tb.Context(), clientv3.LeaseID(kv.Lease))
	require.NoError(tb, err)
}

func stillWaits(tb testing.TB, came <-chan locktest.Outcome, msg string) {
	tb.Helper()
	select {
	case o := <-came:
		require.Fail(tb, msg, "got %+v", o)
	default:
	}
}

func TestExpiredWaiterNeverAcquires(t *testing.T) {
	a, b, c := newNode(t, one), newNode(t, one), newNode(t, one)
	g := a.take(t, locktest.Request(time.Hour))
	r, expired := b.waits(t, g.Key, time.Hour)
	_, next := c.waits(t, g.Key, time.Hour)
	a.revoke(t, r)
	require.NoError(t, a.Release(t.Context(), g)) // before b's session learns of its end from a keep-alive
	o := <-expired
	require.ErrorIs(t, o.Err, dlock.ErrLost, "the waiter whose session is gone; got token %d", o.G.Fence)
	o = <-next
	require.NoError(t, o.Err)
	require.Greater(t, o.G.Fence, g.Fence)
}

// By another client; its session is alive.
func TestWaitersKeyDeleted(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	g := a.take(t, locktest.Request(time.Hour))
	r, came := b.waits(t, g.Key, time.Hour)
	kv := a.keyOf(t, r)
	_, err := a.c.Delete(t.Context(), string(kv.Key))
	require.NoError(t, err)
	o := locktest.Receive(t, came)
	require.ErrorIs(t, o.Err, dlock.ErrLost, "got token %d", o.G.Fence)
}

// The waiter gives up when its session may be over.
func TestWaiterCutOff(t *testing.T) {
	t.Parallel()
	a, b := newNode(t, one), newNode(t, one)
	_, came := a.waits(t, b.take(t, locktest.Request(time.Hour)).Key, shortTTL)
	before := a.l.sent(keepAlive)
	defer a.l.inject(cut)()
	require.ErrorContains(t, locktest.Receive(t, came).Err, "broken link")
	require.Less(t, a.l.sent(keepAlive)-before, 100)
}

func TestPredecessorLeaves(t *testing.T) {
	a, b, c := newNode(t, one), newNode(t, one), newNode(t, one)
	g := a.take(t, locktest.Request(time.Hour))
	r, middle := b.waits(t, g.Key, time.Hour)
	_, last := c.waits(t, g.Key, time.Hour)
	c.watches(t, 2) // without a message, it watches the key before its own
	a.revoke(t, r)
	require.ErrorIs(t, (<-middle).Err, dlock.ErrLost)
	locktest.Eventually(t, func() bool { return c.l.sent(watches) >= 3 || len(last) > 0 }) // c has moved up, or believes that it is first
	stillWaits(t, last, "acquired while another holds")
	require.NoError(t, a.Release(t.Context(), g))
	o := locktest.Won(t, last)
	require.Greater(t, o.Fence, g.Fence)
	require.Zero(t, c.l.sent(fromNow), "they may miss a deletion")
}

func TestLastLeaves(t *testing.T) {
	a, b, c := newNode(t, one), newNode(t, one), newNode(t, one)
	g := a.take(t, locktest.Request(time.Hour))
	r, second := b.waits(t, g.Key, time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	third := locktest.Acquire(ctx, c, locktest.Next(g.Key, time.Hour))
	c.watches(t, 1)
	cancel()
	require.ErrorIs(t, locktest.Receive(t, third).Err, context.Canceled)
	require.NoError(t, c.Close())
	stillWaits(t, second, "acquired while another holds")
	for _, r := range []dlock.Request{r, {Key: g.Key, Owner: g.Owner}} {
		kv := a.keyOf(t, r)
		resp, err := a.c.Get(t.Context(), fmt.Sprintf("turn/%x", kv.Lease))
		require.NoError(t, err)
		require.Empty(t, resp.Kvs)
	}
	require.NoError(t, a.Release(t.Context(), g))
	locktest.Won(t, second)
}

func TestCompactedWhileWaiting(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	g := a.take(t, locktest.Request(time.Hour))
	_, came := b.waits(t, g.Key, time.Hour)
	heal := b.l.inject(deaf)
	require.NoError(t, a.Release(t.Context(), g))
	resp, err := a.c.Put(t.Context(), "test/compaction", "")
	require.NoError(t, err)
	_, err = a.c.Compact(t.Context(), resp.Header.Revision)
	require.NoError(t, err)
	stillWaits(t, came, "acquired without a message")
	heal()
	locktest.Release(t, b, locktest.Won(t, came))

	g = a.take(t, locktest.Next(g.Key, time.Hour))
	_, came = b.waits(t, g.Key, time.Hour)
	defer b.l.inject(blind)()
	require.NoError(t, a.Release(t.Context(), g))
	locktest.Won(t, came)
}

func TestSessionLostWhileHeld(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	r := locktest.Request(time.Hour)
	g := a.take(t, r)
	b.revoke(t, r)
	require.ErrorIs(t, a.Renew(t.Context(), g), dlock.ErrLost)
	<-g.Lost
	require.ErrorIs(t, a.Release(t.Context(), g), dlock.ErrLost)
	r.Owner = "next"
	require.Greater(t, a.take(t, r).Fence, g.Fence, "with a new session")
}

func TestSessionLostBeforeAPut(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	r := locktest.Request(time.Hour)
	a.take(t, r)
	b.revoke(t, r)
	before := a.l.sent(txn)
	a.take(t, locktest.Request(time.Hour))
	require.LessOrEqual(t, a.l.sent(txn)-before, 2)
}

// The release that makes a waiter first notifies it, except for one in 32.
func TestNoHerd(t *testing.T) {
	const waiters = 50
	n := newNode(t, one) // for one count
	nodes := make([]*etcdlock.Backend, waiters)
	for i := range nodes {
		nodes[i] = newBackend(t, n.c, nil)
		g, err := nodes[i].TryAcquire(t.Context(), locktest.Request(time.Hour)) // starts its session
		require.NoError(t, err)
		require.NoError(t, nodes[i].Release(t.Context(), g))
		t.Cleanup(func() { require.NoError(t, nodes[i].Close()) })
	}
	g := n.take(t, locktest.Request(time.Hour))
	txns := n.l.sent(txn)
	reads := n.l.sent(read)
	var all sync.WaitGroup
	var mu sync.Mutex
	var tokens []uint64
	for i, b := range nodes {
		all.Go(func() {
			r := locktest.Next(g.Key, time.Hour)
			got, err := b.Acquire(t.Context(), r)
			if err == nil {
				mu.Lock()
				tokens = append(tokens, got.Fence)
				mu.Unlock()
				err = b.Release(t.Context(), got)
			}
			if err != nil {
				t.Error(err)
			}
		})
		n.watches(t, i+1)
	}
	require.NoError(t, n.Release(t.Context(), g))
	all.Wait()
	require.Len(t, tokens, waiters)
	require.IsIncreasing(t, tokens, "first come, first served")
	newTxns, asked, told := n.l.sent(txn), n.l.sent(watches), n.l.sent(events)
	newReads := n.l.sent(read)
	// On a slow machine each may read, watch the key before its own, and read again. Its release then takes two transactions,
	// since it doesn't know who is next.
	require.GreaterOrEqual(t, newTxns-txns, 2*waiters+1, "transactions: a put and a release for each, the first release")
	require.LessOrEqual(t, newTxns-txns, 2*waiters+1+2+newReads-reads, "transactions: those, and two messages")
	require.LessOrEqual(t, newReads-reads, 2*waiters, "reads")
	require.LessOrEqual(t, asked, 2*waiters, "watches")
	require.LessOrEqual(t, told, 2*waiters, "events")
}

func TestToldByRelease(t *testing.T) {
	a, b, c, d := newNode(t, one), newNode(t, one), newNode(t, one), newNode(t, one)
	g := a.take(t, locktest.Request(time.Hour))
	_, second := b.waits(t, g.Key, time.Hour)
	defer b.l.inject(blind)()
	_, third := c.waits(t, g.Key, time.Hour)
	defer c.l.inject(blind)()
	_, fourth := d.waits(t, g.Key, time.Hour)
	defer d.l.inject(blind)()
	require.NoError(t, a.Release(t.Context(), g))
	last := g
	for _, w := range []struct {
		node
		came <-chan locktest.Outcome
	}{{b, second}, {c, third}, {d, fourth}} {
		o := locktest.Receive(t, w.came)
		require.NoError(t, o.Err)
		require.Greater(t, o.G.Fence, last.Fence)
		require.False(t, o.G.Start.After(o.At))
		before := w.l.sent(txn)
		require.NoError(t, w.Release(t.Context(), o.G))
		require.NoError(t, w.Close())
		after := w.l.sent(txn)
		require.Equal(t, 1, after-before, "transactions")
		last = o.G
	}
}

func TestFollowerLeft(t *testing.T) {
	for name, leave := range map[string]func(t *testing.T, n node, r dlock.Request, cancel func()){
		"cancelled": func(_ *testing.T, _ node, _ dlock.Request, cancel func()) { cancel() },
		"expired":   func(t *testing.T, n node, r dlock.Request, _ func()) { n.revoke(t, r) },
	} {
		t.Run(name, func(t *testing.T) {
			a, b, c, d := newNode(t, one), newNode(t, one), newNode(t, one), newNode(t, one)
			g := a.take(t, locktest.Request(time.Hour))
			_, second := b.waits(t, g.Key, time.Hour)
			r := locktest.Next(g.Key, time.Hour)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			third := locktest.Acquire(ctx, c, r)
			c.watches(t, 1)
			_, fourth := d.waits(t, g.Key, time.Hour)
			defer d.l.inject(blind)()
			require.NoError(t, a.Release(t.Context(), g))
			o := locktest.Won(t, second)
			leave(t, a, r, cancel)
			require.Error(t, locktest.Receive(t, third).Err)
			stillWaits(t, fourth, "acquired while another holds")
			require.NoError(t, b.Release(t.Context(), o))
			o = locktest.Won(t, fourth)
			require.Greater(t, o.Fence, g.Fence)
		})
	}
}

func TestMessageLost(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	g := a.take(t, locktest.Request(time.Hour))
	_, came := b.waits(t, g.Key, time.Hour)
	defer b.l.inject(cutWatches)()
	require.NoError(t, a.Release(t.Context(), g))
	o := locktest.Won(t, came)
	require.Greater(t, o.Fence, g.Fence)
}

type lastRead struct {
	clientv3.KV
	replied func()
}

func (r lastRead) Get(ctx context.Context, key string, opts ...clientv3.OpOption) (*clientv3.GetResponse, error) {
	defer r.replied()
	return r.KV.Get(ctx, key, opts...)
}

func TestContextEndsAfterARead(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	g := a.take(t, locktest.Request(time.Hour))
	ctx, cancel := context.WithCancel(t.Context())
	b.c.KV = lastRead{b.c.KV, cancel}
	_, err := b.Acquire(ctx, locktest.Next(g.Key, time.Hour))
	require.ErrorIs(t, err, context.Canceled)
}

// Messages, which are puts, are refused; the next waiter reads.
func TestNoSpace(t *testing.T) {
	a, b, c := newNode(t, one), newNode(t, one), newNode(t, one)
	g := a.take(t, locktest.Request(time.Hour))
	_, second := b.waits(t, g.Key, time.Hour)
	_, third := c.waits(t, g.Key, time.Hour)
	require.NoError(t, a.Release(t.Context(), g))
	o := locktest.Won(t, second) // it knows the next waiter
	full := noSpace(t, c.c)
	require.NoError(t, b.Release(t.Context(), o))
	o = locktest.Won(t, third)
	require.NoError(t, c.Release(t.Context(), o))
	r := locktest.Request(time.Hour)
	_, err := c.Acquire(t.Context(), r)
	require.ErrorIs(t, err, rpctypes.ErrNoSpace)
	require.ErrorIs(t, c.Release(t.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL}), dlock.ErrLost, "nothing was put")
	full()
	require.NoError(t, c.Release(t.Context(), c.take(t, locktest.Next(g.Key, time.Hour))))
}

// A request is undone at once, as far as that needs no put, and entirely when there is space again.
func TestNoSpaceForAnUndo(t *testing.T) {
	a, b, c := newNode(t, one), newNode(t, one), newNode(t, one)
	guard := a.guardOf(t, a.take(t, locktest.Request(time.Hour))) // starts the session
	g := b.take(t, locktest.Request(time.Hour))
	r := locktest.Next(g.Key, time.Hour)
	heal := a.l.inject(loseReplies)
	_, err := a.Acquire(t.Context(), r)
	require.Error(t, err)
	heal()
	kv := a.keyOf(t, r)
	_, came := c.waits(t, g.Key, time.Hour)

	full := noSpace(t, c.c)
	undo := dlock.Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL}
	require.ErrorIs(t, a.Release(t.Context(), undo), rpctypes.ErrNoSpace, "the put may still arrive")
	require.NoError(t, b.Release(t.Context(), g))
	o := locktest.Won(t, came)

	heal = a.l.inject(cut)
	full()
	arrives := func() bool {
		put := clientv3.OpPut(string(kv.Key), string(kv.Value), clientv3.WithLease(clientv3.LeaseID(kv.Lease)))
		resp, err := b.c.Txn(t.Context()).If(clientv3.Compare(clientv3.ModRevision(guard), "=", 0)).Then(put).Commit()
		require.NoError(t, err)
		return resp.Succeeded
	}
	require.True(t, arrives())
	heal()
	locktest.Eventually(t, func() bool { return len(b.keysOf(t, r)) == 0 })
	require.False(t, arrives())
	require.ErrorIs(t, a.Release(t.Context(), undo), dlock.ErrLost)
	require.NoError(t, c.Release(t.Context(), o))
}

// A reply to the put no longer makes it a grant.
func TestNoSpaceForAnUndoInFlight(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	r := locktest.Request(time.Hour)
	earlier := a.take(t, r) // starts the session
	require.NoError(t, a.Release(t.Context(), earlier))
	answered, deliver := a.l.holdAnswer()
	defer deliver()
	came := locktest.Acquire(t.Context(), a, r)
	locktest.Receive(t, answered)
	noSpace(t, b.c)
	require.ErrorIs(t, a.Release(t.Context(), earlier), dlock.ErrLost)
	require.NotEmpty(t, b.keysOf(t, r))
	require.ErrorIs(t, a.Release(t.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL}), rpctypes.ErrNoSpace)
	locktest.Eventually(t, func() bool { return len(b.keysOf(t, r)) == 0 })
	deliver()
	require.ErrorIs(t, locktest.Receive(t, came).Err, dlock.ErrLost)
}

func TestNoSpaceButApplied(t *testing.T) {
	a, b, c := newNode(t, one), newNode(t, one), newNode(t, one)
	r := locktest.Request(time.Hour)
	heal := a.l.inject(fillDisk)
	_, err := a.TryAcquire(t.Context(), r)
	require.ErrorIs(t, err, rpctypes.ErrNoSpace)
	heal()
	g := b.take(t, locktest.Next(r.Key, time.Hour))

	_, second := a.waits(t, g.Key, time.Hour)
	_, third := c.waits(t, g.Key, time.Hour)
	require.NoError(t, b.Release(t.Context(), g))
	o := locktest.Won(t, second) // it knows the next waiter
	heal = a.l.inject(fillDisk)
	err = a.Release(t.Context(), o)
	require.Error(t, err, "it may have been another's")
	require.NotErrorIs(t, err, dlock.ErrLost, "it was freed")
	require.ErrorIs(t, a.Release(t.Context(), o), dlock.ErrLost)
	heal()
	o = locktest.Won(t, third)
	require.NoError(t, c.Release(t.Context(), o))
}

func noSpace(t *testing.T, c *clientv3.Client) (disarm func()) {
	t.Helper()
	r := &pb.AlarmRequest{Action: pb.AlarmRequest_ACTIVATE, Alarm: pb.AlarmType_NOSPACE, MemberID: 1}
	_, err := pb.NewMaintenanceClient(c.ActiveConnection()).Alarm(t.Context(), r)
	require.NoError(t, err)
	disarm = sync.OnceFunc(func() {
		_, err := c.AlarmDisarm(context.Background(), &clientv3.AlarmMember{})
		require.NoError(t, err)
	})
	t.Cleanup(disarm)
	return disarm
}

// The put was applied before its session's watch began, and answered after. The waiter reads at once.
func TestMessageBeforeTheWatch(t *testing.T) {
	for try := 1; ; try++ {
		took := messageBeforeTheWatch(t)
		if took < time.Second {
			return
		}
		require.Less(t, try, 5, "it took %v to look, again and again", took) // the machine may have stalled
	}
}

func messageBeforeTheWatch(t *testing.T) (took time.Duration) {
	t.Helper()
	a, b := newNode(t, one), newNode(t, one)
	first, second := a.take(t, locktest.Request(time.Hour)), a.take(t, locktest.Request(time.Hour))
	r := locktest.Next(first.Key, time.Hour)
	answered, deliver := b.l.holdAnswer()
	defer deliver()
	came := locktest.Acquire(t.Context(), b, r)
	locktest.Receive(t, answered)
	kv := a.keyOf(t, r)
	require.NoError(t, a.Release(t.Context(), first))
	locktest.Eventually(t, func() bool {
		resp, err := a.c.Get(t.Context(), fmt.Sprintf("turn/%x", kv.Lease))
		return err == nil && len(resp.Kvs) == 1 && resp.Kvs[0].Lease == kv.Lease // it goes with the session
	})
	_, other := b.waits(t, second.Key, time.Hour)
	began := time.Now()
	deliver()
	o := locktest.Receive(t, came)
	require.NoError(t, o.Err)
	require.NoError(t, a.Release(t.Context(), second))
	locktest.Won(t, other)
	return o.At.Sub(began)
}

func TestOtherMessages(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	g := a.take(t, locktest.Request(time.Hour))
	r, came := b.waits(t, g.Key, time.Hour)
	kv := a.keyOf(t, r)
	name := strings.TrimPrefix(string(kv.Key), queue(g.Key))
	before := b.l.sent(events)
	messages := []string{
		"", "\n", name, name + " x \n" + queue(g.Key), " \n" + queue(g.Key),
		fmt.Sprintf("%s %d \n%s", name, kv.CreateRevision-1, queue(g.Key)),
		fmt.Sprintf("%s %d \n%s", name, kv.CreateRevision, queue("other")),
	}
	for _, m := range messages {
		_, err := a.c.Put(t.Context(), fmt.Sprintf("turn/%x", kv.Lease), m)
		require.NoError(t, err)
	}
	locktest.Eventually(t, func() bool { return b.l.sent(events) == before+len(messages) })
	require.NoError(t, a.Renew(t.Context(), g))
	stillWaits(t, came, "acquired while another holds")
	require.NoError(t, a.Release(t.Context(), g))
	locktest.Won(t, came)
}

// The error says whether the call waited for another holder or for etcd.
func TestDeadline(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	g := a.take(t, locktest.Request(time.Hour))
	b.take(t, locktest.Request(time.Hour)) // starts the session
	tells := func(want, never string) {
		t.Helper()
		for limit := shortTTL; ; limit *= 2 { // it may be too short to get that far
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			_, err := b.Acquire(ctx, dlock.Request{Key: g.Key, Owner: "waiter", TTL: time.Hour})
			cancel()
			require.ErrorIs(t, err, context.DeadlineExceeded)
			if never != "" {
				require.NotContains(t, err.Error(), never)
			}
			if strings.Contains(err.Error(), want) {
				return
			}
			require.Less(t, limit, 10*time.Second, "no machine is so slow: %v", err)
		}
	}
	const joining, waiting = "joining the queue: ", "waiting in the queue"
	tells(waiting, "")
	defer b.l.inject(holdReplies)()
	tells(joining, waiting)
}

// Waiters of the same Backend need no watch.
func TestHandOver(t *testing.T) {
	a := newNode(t, one)
	g := a.take(t, locktest.Request(time.Hour))
	waiters := make([]<-chan locktest.Outcome, 3)
	for i := range waiters {
		r := locktest.Next(g.Key, time.Hour)
		came := locktest.Acquire(t.Context(), a, r)
		locktest.Eventually(t, func() bool { return len(a.keysOf(t, r)) == 1 })
		waiters[i] = came
	}
	heal := a.l.inject(deaf)
	defer heal()
	for _, came := range waiters {
		require.NoError(t, a.Release(t.Context(), g))
		o := locktest.Won(t, came)
		require.Greater(t, o.Fence, g.Fence)
		g = o
	}
	require.NoError(t, a.Release(t.Context(), g))
}
