package etcdlock_test

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/etcdlock"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// node is a Backend with a client of its own.
type node struct {
	*etcdlock.Backend
	l *link
	c *clientv3.Client
}

func newNode(tb testing.TB, c *testbed.Cluster) node {
	tb.Helper()
	l := newLink()
	cl := client(tb, c, l)
	b, err := etcdlock.New(cl, nil)
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, b.Close()) })
	return node{b, l, cl}
}

func (n node) take(tb testing.TB, r dlock.Request) dlock.Grant {
	tb.Helper()
	g, err := n.TryAcquire(tb.Context(), r)
	require.NoError(tb, err)
	return g
}

type outcome struct {
	g   dlock.Grant
	err error
	at  time.Time
}

// waits has n wait for key, and returns when it is in the queue and watches.
func (n node) waits(tb testing.TB, key string, ttl time.Duration) (r dlock.Request, came <-chan outcome) {
	tb.Helper()
	_, before, _ := n.l.counts(txn)
	r = request(ttl)
	r.Key = key
	c := make(chan outcome, 1)
	var done sync.WaitGroup
	done.Go(func() {
		g, err := n.Acquire(tb.Context(), r)
		c <- outcome{g, err, time.Now()}
	})
	tb.Cleanup(done.Wait)
	n.watches(tb, before+1)
	return r, c
}

// watches waits until n has asked for as many watches.
func (n node) watches(tb testing.TB, want int) {
	tb.Helper()
	require.Eventually(tb, func() bool {
		_, got, _ := n.l.counts(txn)
		return got >= want
	}, 30*time.Second, time.Millisecond)
}

// keysOf returns an owner's keys in etcd, of which there is one at most.
func (n node) keysOf(tb testing.TB, r dlock.Request) (keys []*mvccpb.KeyValue) {
	tb.Helper()
	resp, err := n.c.Get(tb.Context(), queue(r.Key), clientv3.WithPrefix())
	require.NoError(tb, err)
	for _, kv := range resp.Kvs {
		if string(kv.Value) == r.Owner {
			keys = append(keys, kv)
		}
	}
	return keys
}

// revoke ends the session of an owner's key, and with it the key.
func (n node) revoke(tb testing.TB, r dlock.Request) {
	tb.Helper()
	kvs := n.keysOf(tb, r)
	require.Len(tb, kvs, 1)
	_, err := n.c.Revoke(tb.Context(), clientv3.LeaseID(kvs[0].Lease))
	require.NoError(tb, err)
}

func stillWaits(tb testing.TB, came <-chan outcome, msg string) {
	tb.Helper()
	select {
	case o := <-came:
		require.Fail(tb, msg, "got %+v", o)
	default:
	}
}

func TestExpiredWaiterNeverAcquires(t *testing.T) {
	a, b, c := newNode(t, one), newNode(t, one), newNode(t, one)
	g := a.take(t, request(time.Hour))
	r, expired := b.waits(t, g.Key, time.Hour)
	_, next := c.waits(t, g.Key, time.Hour)
	a.revoke(t, r)
	require.NoError(t, a.Release(t.Context(), g)) // before b's session learns of its end from a keep-alive
	o := <-expired
	require.ErrorIs(t, o.err, dlock.ErrLost, "the waiter whose session is gone; got token %d", o.g.Fence)
	o = <-next
	require.NoError(t, o.err)
	require.Greater(t, o.g.Fence, g.Fence)
}

// The one before leaves from the middle of the queue: its follower moves up and must not take itself for the first.
func TestPredecessorLeaves(t *testing.T) {
	a, b, c := newNode(t, one), newNode(t, one), newNode(t, one)
	g := a.take(t, request(time.Hour))
	r, middle := b.waits(t, g.Key, time.Hour)
	_, last := c.waits(t, g.Key, time.Hour)
	a.revoke(t, r)
	require.ErrorIs(t, (<-middle).err, dlock.ErrLost)
	require.Eventually(t, func() bool { // c has moved up, or thinks that it is first
		_, watches, _ := c.l.counts(txn)
		return watches == 2 || len(last) > 0
	}, 30*time.Second, time.Millisecond)
	stillWaits(t, last, "acquired while another holds")
	require.NoError(t, a.Release(t.Context(), g))
	o := <-last
	require.NoError(t, o.err)
	require.Greater(t, o.g.Fence, g.Fence)
}

// A watch that was interrupted goes on from a revision that is no longer there.
func TestCompactedWhileWaiting(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	g := a.take(t, request(time.Hour))
	_, came := b.waits(t, g.Key, time.Hour)
	heal := b.l.inject(cutWatches)
	require.NoError(t, a.Release(t.Context(), g))
	resp, err := a.c.Put(t.Context(), "test/compaction", "")
	require.NoError(t, err)
	_, err = a.c.Compact(t.Context(), resp.Header.Revision)
	require.NoError(t, err)
	stillWaits(t, came, "acquired without a message")
	heal()
	require.NoError(t, (<-came).err)
}

func TestSessionLostWhileHeld(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	r := request(time.Hour)
	g := a.take(t, r)
	b.revoke(t, r)
	require.ErrorIs(t, a.Renew(t.Context(), g), dlock.ErrLost)
	<-g.Lost
	require.ErrorIs(t, a.Release(t.Context(), g), dlock.ErrLost)
	r.Owner = "next"
	require.Greater(t, a.take(t, r).Fence, g.Fence, "with a new session")
}

// Each of many waiters is woken once and asks once, however many there are.
func TestNoHerd(t *testing.T) {
	const waiters = 50
	n := newNode(t, one) // one client, so that there is one count
	nodes := make([]*etcdlock.Backend, waiters)
	for i := range nodes {
		nodes[i] = newBackend(t, n.c, nil)
		g, err := nodes[i].TryAcquire(t.Context(), request(time.Hour)) // starts its session
		require.NoError(t, err)
		require.NoError(t, nodes[i].Release(t.Context(), g))
		t.Cleanup(func() { require.NoError(t, nodes[i].Close()) })
	}
	g := n.take(t, request(time.Hour))
	txns, _, _ := n.l.counts(txn)
	reads, _, _ := n.l.counts(read)
	var all sync.WaitGroup
	var mu sync.Mutex
	var tokens []uint64
	for i, b := range nodes {
		all.Go(func() {
			r := request(time.Hour)
			r.Key = g.Key
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
	newTxns, watches, events := n.l.counts(txn)
	newReads, _, _ := n.l.counts(read)
	require.Equal(t, 2*waiters+1, newTxns-txns, "transactions: a put and a release for each, and the first release")
	require.LessOrEqual(t, newReads-reads, waiters, "reads")
	require.Equal(t, waiters, watches, "watches")
	require.LessOrEqual(t, events, waiters, "events")
}

func TestLeaderKilledWhileWaiting(t *testing.T) {
	if three.Servers[0].Provider == testbed.External {
		t.Skip("kills a server")
	}
	cluster, err := testbed.StartEtcd(t.Context(), 3, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, cluster.Close()) })
	a, b := newNode(t, cluster), newNode(t, cluster)
	g := a.take(t, request(time.Hour))
	_, came := b.waits(t, g.Key, time.Hour)
	leader, err := cluster.Leader(t.Context())
	require.NoError(t, err)
	require.NoError(t, leader.Kill(t.Context()))
	_, err = cluster.Leader(t.Context(), leader)
	require.NoError(t, err)
	stillWaits(t, came, "acquired by an election")
	require.Eventually(t, func() bool { // its client finds another member
		err := a.Release(t.Context(), g)
		return err == nil || errors.Is(err, dlock.ErrLost)
	}, 30*time.Second, 10*time.Millisecond)
	o := <-came
	require.NoError(t, o.err)
	require.Greater(t, o.g.Fence, g.Fence)
}

// A release wakes the next waiter of its own Backend by its answer, without a watch.
func TestHandOver(t *testing.T) {
	a := newNode(t, one)
	g := a.take(t, request(time.Hour))
	_, came := a.waits(t, g.Key, time.Hour)
	heal := a.l.inject(cutWatches)
	defer heal()
	require.NoError(t, a.Release(t.Context(), g))
	o := <-came
	require.NoError(t, o.err)
	require.Greater(t, o.g.Fence, g.Fence)
	require.NoError(t, a.Release(t.Context(), o.g))
}

func TestCancelledWaiterLeavesNoKey(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	g := a.take(t, request(time.Hour))
	r := request(time.Hour)
	r.Key = g.Key
	ctx, cancel := context.WithCancel(t.Context())
	came := make(chan error, 1)
	go func() {
		_, err := b.Acquire(ctx, r)
		came <- err
	}()
	b.watches(t, 1)
	require.Len(t, a.keysOf(t, r), 1)
	cancel()
	require.ErrorIs(t, <-came, context.Canceled)
	require.Empty(t, a.keysOf(t, r))
}
