package etcdlock_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
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

func newNode(tb testing.TB, c *testbed.Cluster, set ...func(*clientv3.Config)) node {
	tb.Helper()
	l := newLink()
	cl := client(tb, c, l, set...)
	b, err := etcdlock.New(cl, &etcdlock.Options{FollowLeader: true})
	require.NoError(tb, err)
	tb.Cleanup(func() { require.NoError(tb, b.Close()) })
	return node{b, l, cl}
}

// take has n take a key that is free. While the machine stands still, a keep-alive of a short session goes unanswered, and
// with it a request for a lease of that session; then it asks again.
func (n node) take(tb testing.TB, r dlock.Request) dlock.Grant {
	tb.Helper()
	for began := time.Now(); ; {
		g, err := n.TryAcquire(tb.Context(), r)
		if err != nil && r.TTL <= shortSession && strings.Contains(err.Error(), "keep-alive: ") && time.Since(began) < 30*time.Second {
			continue
		}
		require.NoError(tb, err)
		return g
	}
}

// shortSession is a TTL whose session may end while a machine stands still: etcd's sessions last for two seconds at least.
const shortSession = time.Second

// undisturbed runs a test that a machine which stands still for so long that a short session ends can disturb. Then f returns
// false and is run again: once is enough, if the machine is fast enough.
func undisturbed(t *testing.T, f func(t *testing.T) (done bool)) {
	t.Helper()
	for began := time.Now(); !f(t); {
		require.Less(t, time.Since(began), 5*time.Minute, "disturbed again and again")
	}
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
		if owner, _, _ := strings.Cut(string(kv.Value), " "); owner == r.Owner {
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

func receive[T any](tb testing.TB, c <-chan T) (v T) {
	tb.Helper()
	select {
	case v = <-c:
	case <-time.After(30 * time.Second):
		require.Fail(tb, "nothing came")
	}
	return v
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
	c.watches(t, 2) // nobody has told it anything, so it watches the one before
	a.revoke(t, r)
	require.ErrorIs(t, (<-middle).err, dlock.ErrLost)
	require.Eventually(t, func() bool { // c has moved up, or thinks that it is first
		_, watches, _ := c.l.counts(txn)
		return watches >= 3 || len(last) > 0
	}, 30*time.Second, time.Millisecond)
	stillWaits(t, last, "acquired while another holds")
	require.NoError(t, a.Release(t.Context(), g))
	o := <-last
	require.NoError(t, o.err)
	require.Greater(t, o.g.Fence, g.Fence)
}

// A waiter's request that is repeated finds its place, and waits.
func TestWaiterRepeated(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	g := a.take(t, request(time.Hour))
	b.take(t, request(time.Hour)) // starts the session
	r := request(time.Hour)
	r.Key = g.Key
	heal := b.l.inject(loseReplies)
	_, err := b.Acquire(t.Context(), r)
	require.Error(t, err)
	heal()
	came := make(chan outcome, 1)
	go func() {
		g, err := b.Acquire(t.Context(), r)
		came <- outcome{g, err, time.Now()}
	}()
	require.Eventually(t, func() bool {
		_, watches, _ := b.l.counts(txn)
		return watches > 0 || len(came) > 0
	}, 30*time.Second, time.Millisecond)
	stillWaits(t, came, "acquired while another holds")
	require.NoError(t, a.Release(t.Context(), g))
	o := receive(t, came)
	require.NoError(t, o.err)
	require.Greater(t, o.g.Fence, g.Fence)
}

// One that leaves from behind tells nobody anything.
func TestLastLeaves(t *testing.T) {
	a, b, c := newNode(t, one), newNode(t, one), newNode(t, one)
	g := a.take(t, request(time.Hour))
	r, second := b.waits(t, g.Key, time.Hour)
	ctx, cancel := context.WithCancel(t.Context())
	third := make(chan error, 1)
	go func() {
		_, err := c.Acquire(ctx, dlock.Request{Key: g.Key, Owner: "last", TTL: time.Hour})
		third <- err
	}()
	c.watches(t, 1)
	cancel()
	require.ErrorIs(t, receive(t, third), context.Canceled)
	require.NoError(t, c.Close()) // what it does in the background is done
	stillWaits(t, second, "acquired while another holds")
	for _, r := range []dlock.Request{r, {Key: g.Key, Owner: g.Owner}} {
		keys := a.keysOf(t, r)
		require.Len(t, keys, 1)
		resp, err := a.c.Get(t.Context(), fmt.Sprintf("turn/%x", keys[0].Lease))
		require.NoError(t, err)
		require.Empty(t, resp.Kvs)
	}
	require.NoError(t, a.Release(t.Context(), g))
	require.NoError(t, receive(t, second).err)
}

// A watch that was interrupted goes on from a revision that is no longer there: the message is lost.
func TestCompactedWhileWaiting(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	g := a.take(t, request(time.Hour))
	_, came := b.waits(t, g.Key, time.Hour)
	heal := b.l.inject(deaf)
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

// Each of many waiters is told once, however many there are, and by the release that makes it first but for one in 32.
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
	// A machine that is slow makes each look, watch the key before its own, and look again. One that finds out so that it is
	// first, before it is told, doesn't know who follows, and its release takes two transactions.
	require.GreaterOrEqual(t, newTxns-txns, 2*waiters+1, "transactions: a put and a release for each, the first release")
	require.LessOrEqual(t, newTxns-txns, 2*waiters+1+2+newReads-reads, "transactions: those, and two messages")
	require.LessOrEqual(t, newReads-reads, 2*waiters, "reads")
	require.LessOrEqual(t, watches, 2*waiters, "watches")
	require.LessOrEqual(t, events, 2*waiters, "events")
}

// A release tells the next waiter, which needs no read, and who follows it; the next release then needs one transaction.
func TestToldByRelease(t *testing.T) {
	a, b, c, d := newNode(t, one), newNode(t, one), newNode(t, one), newNode(t, one)
	g := a.take(t, request(time.Hour))
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
		came <-chan outcome
	}{{b, second}, {c, third}, {d, fourth}} {
		o := receive(t, w.came)
		require.NoError(t, o.err)
		require.Greater(t, o.g.Fence, last.Fence)
		require.False(t, o.g.Start.After(o.at))
		before, _, _ := w.l.counts(txn)
		require.NoError(t, w.Release(t.Context(), o.g))
		require.NoError(t, w.Close()) // what it does in the background is done
		after, _, _ := w.l.counts(txn)
		require.Equal(t, 1, after-before, "transactions")
		last = o.g
	}
}

// A holder doesn't know that the one that followed it has left.
func TestFollowerLeft(t *testing.T) {
	for name, leave := range map[string]func(t *testing.T, n node, r dlock.Request, cancel func()){
		"cancelled": func(_ *testing.T, _ node, _ dlock.Request, cancel func()) { cancel() },
		"expired":   func(t *testing.T, n node, r dlock.Request, _ func()) { n.revoke(t, r) },
	} {
		t.Run(name, func(t *testing.T) {
			a, b, c, d := newNode(t, one), newNode(t, one), newNode(t, one), newNode(t, one)
			g := a.take(t, request(time.Hour))
			_, second := b.waits(t, g.Key, time.Hour)
			r := request(time.Hour)
			r.Key = g.Key
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			third := make(chan error, 1)
			go func() {
				_, err := c.Acquire(ctx, r)
				third <- err
			}()
			c.watches(t, 1)
			_, fourth := d.waits(t, g.Key, time.Hour)
			defer d.l.inject(blind)()
			require.NoError(t, a.Release(t.Context(), g))
			o := receive(t, second)
			require.NoError(t, o.err)
			leave(t, a, r, cancel)
			require.Error(t, receive(t, third))
			stillWaits(t, fourth, "acquired while another holds")
			require.NoError(t, b.Release(t.Context(), o.g))
			o = receive(t, fourth)
			require.NoError(t, o.err)
			require.Greater(t, o.g.Fence, g.Fence)
		})
	}
}

// A waiter that isn't told looks.
func TestMessageLost(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	g := a.take(t, request(time.Hour))
	_, came := b.waits(t, g.Key, time.Hour)
	defer b.l.inject(cutWatches)()
	require.NoError(t, a.Release(t.Context(), g))
	o := receive(t, came)
	require.NoError(t, o.err)
	require.Greater(t, o.g.Fence, g.Fence)
}

// etcd whose disk is full refuses a transaction that puts, and so a message. A lock can be released nevertheless, and the
// next waiter finds out for itself.
func TestNoSpace(t *testing.T) {
	a, b, c := newNode(t, one), newNode(t, one), newNode(t, one)
	g := a.take(t, request(time.Hour))
	_, second := b.waits(t, g.Key, time.Hour)
	_, third := c.waits(t, g.Key, time.Hour)
	require.NoError(t, a.Release(t.Context(), g))
	o := receive(t, second) // knows who follows
	require.NoError(t, o.err)
	full := noSpace(t, c.c)
	require.NoError(t, b.Release(t.Context(), o.g))
	o = receive(t, third)
	require.NoError(t, o.err)
	require.NoError(t, c.Release(t.Context(), o.g))
	r := request(time.Hour)
	_, err := c.Acquire(t.Context(), r)
	require.ErrorIs(t, err, rpctypes.ErrNoSpace)
	require.ErrorIs(t, c.Release(t.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL}), dlock.ErrLost, "nothing was put")
	full()
	require.NoError(t, c.Release(t.Context(), c.take(t, dlock.Request{Key: g.Key, Owner: uuid.NewString(), TTL: time.Hour})))
}

// noSpace raises etcd's alarm, until disarm is called.
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

// A waiter whose put was answered after another one's of its session had it watch for messages looks at once for what it
// may have missed.
func TestMessageBeforeTheWatch(t *testing.T) {
	for try := 1; ; try++ {
		took := messageBeforeTheWatch(t)
		if took < time.Second {
			return
		}
		require.Less(t, try, 5, "it took %v to look, again and again", took) // a machine that stalls does so now and then
	}
}

func messageBeforeTheWatch(t *testing.T) (took time.Duration) {
	t.Helper()
	a, b := newNode(t, one), newNode(t, one)
	first, second := a.take(t, request(time.Hour)), a.take(t, request(time.Hour))
	r := request(time.Hour)
	r.Key = first.Key
	answered, deliver := b.l.holdAnswer()
	defer deliver()
	came := make(chan outcome, 1)
	go func() {
		g, err := b.Acquire(t.Context(), r)
		came <- outcome{g, err, time.Now()}
	}()
	receive(t, answered)
	keys := a.keysOf(t, r)
	require.Len(t, keys, 1)
	require.NoError(t, a.Release(t.Context(), first))
	require.Eventually(t, func() bool {
		resp, err := a.c.Get(t.Context(), fmt.Sprintf("turn/%x", keys[0].Lease))
		return err == nil && len(resp.Kvs) == 1
	}, 30*time.Second, time.Millisecond)
	_, other := b.waits(t, second.Key, time.Hour)
	began := time.Now()
	deliver()
	o := receive(t, came)
	require.NoError(t, o.err)
	require.NoError(t, a.Release(t.Context(), second))
	require.NoError(t, receive(t, other).err)
	return o.at.Sub(began)
}

// A claim that is put again, because the answer took longer than its lease lasts, doesn't take the messages of the one
// that has its name by now.
func TestNameTakenOver(t *testing.T) { undisturbed(t, nameTakenOver) }

func nameTakenOver(t *testing.T) (done bool) {
	t.Helper()
	a, b := newNode(t, one), newNode(t, one)
	held := b.take(t, request(time.Hour))
	slow := request(shortTTL)
	slow.Key = held.Key
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan error, 1)
	answered, deliver := a.l.holdAnswer()
	defer func() {
		cancel()
		deliver()
		<-left
	}()
	go func() {
		_, err := a.Acquire(ctx, slow)
		left <- err
	}()
	receive(t, answered)
	require.Eventually(t, func() bool { return len(b.keysOf(t, slow)) == 0 }, 30*time.Second, time.Millisecond, "its timer")
	require.ErrorIs(t, a.Release(t.Context(), dlock.Grant{Key: slow.Key, Owner: slow.Owner}), dlock.ErrLost)
	r, came := a.waits(t, held.Key, shortTTL)
	keys := b.keysOf(t, r)
	if len(keys) != 1 || !strings.HasSuffix(string(keys[0].Key), "-0") { // the session is gone
		return false
	}
	deliver()
	require.Eventually(t, func() bool { return len(b.keysOf(t, slow)) == 1 || len(left) > 0 }, 30*time.Second, time.Millisecond)
	defer a.l.inject(blind)()
	require.NoError(t, b.Release(t.Context(), held))
	o := receive(t, came)
	if o.err != nil && (errors.Is(o.err, dlock.ErrLost) || strings.Contains(o.err.Error(), "keep-alive: ")) {
		return false
	}
	require.NoError(t, o.err)
	return true
}

// A message that is about an earlier key of the same name, or nothing of the kind, is no turn.
func TestOtherMessages(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	g := a.take(t, request(time.Hour))
	r, came := b.waits(t, g.Key, time.Hour)
	keys := a.keysOf(t, r)
	require.Len(t, keys, 1)
	name := strings.TrimPrefix(string(keys[0].Key), queue(g.Key))
	_, _, before := b.l.counts(txn)
	messages := []string{
		"", "\n", name, name + " x \n" + queue(g.Key), " \n" + queue(g.Key),
		fmt.Sprintf("%s %d \n%s", name, keys[0].CreateRevision-1, queue(g.Key)),
		fmt.Sprintf("%s %d \n%s", name, keys[0].CreateRevision, queue("other")),
	}
	for _, m := range messages {
		_, err := a.c.Put(t.Context(), fmt.Sprintf("turn/%x", keys[0].Lease), m)
		require.NoError(t, err)
	}
	require.Eventually(t, func() bool {
		_, _, events := b.l.counts(txn)
		return events == before+len(messages)
	}, 30*time.Second, time.Millisecond)
	require.NoError(t, a.Renew(t.Context(), g)) // a moment later
	stillWaits(t, came, "acquired while another holds")
	require.NoError(t, a.Release(t.Context(), g))
	require.NoError(t, receive(t, came).err)
}

// A call that ran out of time tells whether it was for others or for etcd.
func TestDeadline(t *testing.T) {
	a, b := newNode(t, one), newNode(t, one)
	g := a.take(t, request(time.Hour))
	b.take(t, request(time.Hour)) // starts the session
	tells := func(want, never string) {
		t.Helper()
		for limit := shortTTL; ; limit *= 2 { // it may be too short to get as far as that
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

func TestLeaderKilledWhileWaiting(t *testing.T) {
	if three.Servers[0].Provider == testbed.External {
		t.Skip("kills a server")
	}
	cluster, err := testbed.StartEtcd(t.Context(), 3, steady)
	testbed.Need(t, err)
	t.Cleanup(func() { require.NoError(t, cluster.Close()) })
	a, b := newNode(t, cluster), newNode(t, cluster)
	followed := byLeader(t, a, b)
	g := a.take(t, request(time.Hour))
	_, came := b.waits(t, g.Key, time.Hour)
	leader, err := cluster.Leader(t.Context())
	require.NoError(t, err)
	require.NoError(t, leader.Kill(t.Context()))
	until(t, func() bool { return b.l.watchedBy() != followed }) // though it sends nothing
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

// A release tells the next waiter of its own Backend by its answer, without a watch.
func TestHandOver(t *testing.T) {
	a := newNode(t, one)
	g := a.take(t, request(time.Hour))
	waiters := make([]<-chan outcome, 3)
	for i := range waiters {
		r := request(time.Hour)
		r.Key = g.Key
		came := make(chan outcome, 1)
		go func() {
			g, err := a.Acquire(t.Context(), r)
			came <- outcome{g, err, time.Now()}
		}()
		require.Eventually(t, func() bool { return len(a.keysOf(t, r)) == 1 }, 30*time.Second, time.Millisecond)
		waiters[i] = came
	}
	heal := a.l.inject(deaf)
	defer heal()
	for _, came := range waiters {
		require.NoError(t, a.Release(t.Context(), g))
		o := receive(t, came)
		require.NoError(t, o.err)
		require.Greater(t, o.g.Fence, g.Fence)
		g = o.g
	}
	require.NoError(t, a.Release(t.Context(), g))
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
	// It has been deleted, unless that took longer than the call wanted to wait: then it is in the background.
	require.Eventually(t, func() bool { return len(a.keysOf(t, r)) == 0 }, 30*time.Second, time.Millisecond)
}
