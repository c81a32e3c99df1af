package zklock_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"
	"github.com/google/uuid"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/zklock"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

const (
	long  = time.Hour              // doesn't run out while a test runs
	short = 300 * time.Millisecond // is waited for
	soon  = 30 * time.Second       // ends a test that fails
)

func TestConformance(t *testing.T) {
	dlocktest.Run(t, dlocktest.Harness{New: func(t *testing.T) dlocktest.Service { return service(t, server) }})
}

// Clients of an ensemble talk to servers that lag behind each other.
func TestConformanceEnsemble(t *testing.T) {
	if server.Provider == testbed.External {
		t.Skip("the external ensemble has been tested already")
	}
	o := options()
	o.Args = append(o.Args, "syncLimit=100") // ticks; on a machine that stalls, nobody is to be given up
	c, err := testbed.StartZooKeeper(t.Context(), 3, o)
	testbed.Need(t, err)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	t.Run("kit", func(t *testing.T) {
		dlocktest.Run(t, dlocktest.Harness{New: func(t *testing.T) dlocktest.Service { return service(t, c.Servers...) }})
	})
}

// service is the servers' lock; each client talks to one of them.
func service(t *testing.T, servers ...*testbed.Server) dlocktest.Service {
	t.Helper()
	i := 0
	next := func() string {
		i++
		return servers[i%len(servers)].Addr
	}
	var links []*link
	open := func() party {
		p := connect(t, next())
		links = append(links, p.link)
		return p
	}
	return dlocktest.Service{
		Requests: func() (n int) {
			for _, l := range links {
				n += l.sent(0)
			}
			return n
		},
		Backend: func() dlock.Backend { return open().Backend },
		Faulty: func() (dlock.Backend, dlocktest.Link) {
			p := open()
			return p.Backend, p.link.faults()
		},
	}
}

// party is a Backend with a client and a link of its own.
type party struct {
	*zklock.Backend
	conn *zk.Conn
	link *link
}

func connect(t *testing.T, addr string) party {
	t.Helper()
	l := newLink(addr)
	c := client(t, l, maxTimeout)
	b, err := zklock.New(c, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	return party{b, c, l}
}

func client(tb testing.TB, l *link, timeout time.Duration) (c *zk.Conn) {
	tb.Helper()
	var err error
	pprof.Do(context.Background(), pprof.Labels("client", l.name), func(context.Context) {
		c, _, err = zk.Connect([]string{l.addr}, timeout, zk.WithDialer(l.Dial), zk.WithHostProvider(l), zk.WithLogger(silence{}),
			zk.WithMaxBufferSize(1<<20), zk.WithMaxConnBufferSize(1<<16)) // else a client has buffers of 3 MiB
	})
	require.NoError(tb, err)
	tb.Cleanup(c.Close)
	return c
}

type silence struct{}

func (silence) Printf(string, ...any) {}

func nodePrefix(key, owner string) string { return "/dlock/" + key + "/" + owner + ":" }

func newKey() string { return "test-" + uuid.NewString() }

// moderate is the TTL of a waiter that is made to wait: for so long that its lease is provisional, or has to start anew.
const moderate = 2 * time.Second

func waitLong()   { time.Sleep(moderate / 8) }
func waitLonger() { time.Sleep(moderate * 3 / 4) }

func newRequest(key string, ttl time.Duration) dlock.Request {
	return dlock.Request{Key: key, Owner: uuid.NewString(), TTL: ttl}
}

func (p party) take(t *testing.T, key string, ttl time.Duration) dlock.Grant {
	t.Helper()
	g, err := p.TryAcquire(t.Context(), newRequest(key, ttl))
	require.NoError(t, err)
	return g
}

// release gives back a moderate lease, which may have run out on a machine that stalls.
func (p party) release(t *testing.T, g dlock.Grant) {
	t.Helper()
	lasts := g.TTL
	if g.Provisional > 0 {
		lasts = g.Provisional
	}
	if err := p.Release(t.Context(), g); time.Since(g.Start) < lasts || !errors.Is(err, dlock.ErrLost) {
		require.NoError(t, err)
	}
}

// undisturbed runs a test in which moderate waits are to be neither too short nor too long. It measures; if the machine has
// stalled, it returns false and is run again: once is enough, if the machine is fast enough.
func undisturbed(t *testing.T, f func(t *testing.T) (done bool)) {
	t.Helper()
	for began := time.Now(); !f(t); {
		require.Less(t, time.Since(began), 2*time.Minute, "disturbed again and again")
	}
}

type granted struct {
	g   dlock.Grant
	err error
}

// acquire calls Acquire in the background.
func (p party) acquire(ctx context.Context, r dlock.Request) <-chan granted {
	c := make(chan granted, 1)
	go func() {
		g, err := p.Acquire(ctx, r)
		c <- granted{g, err}
	}()
	return c
}

func receive[T any](t *testing.T, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(soon):
		require.Fail(t, "nothing came")
	}
	return v
}

// nodes returns the children of key's node, as the leader knows them.
func (p party) nodes(t *testing.T, key string) []string {
	t.Helper()
	_, err := p.conn.Sync("/dlock/" + key)
	require.NoError(t, err)
	names, _, err := p.conn.Children("/dlock/" + key)
	if !errors.Is(err, zk.ErrNoNode) {
		require.NoError(t, err)
	}
	return names
}

// drop deletes owner's nodes, as somebody else might.
func (p party) drop(t *testing.T, key, owner string) {
	t.Helper()
	for _, name := range p.nodes(t, key) {
		if strings.HasPrefix(name, owner+":") {
			require.NoError(t, p.conn.Delete("/dlock/"+key+"/"+name, -1))
		}
	}
}

// follows waits until p watches owner's node.
func (p party) follows(t *testing.T, key, owner string) {
	t.Helper()
	require.Eventually(t, func() bool { return p.link.watches(nodePrefix(key, owner)) }, soon, time.Millisecond)
}

func TestNewRefuses(t *testing.T) {
	c := client(t, newLink(server.Addr), time.Minute)
	_, err := zklock.New(nil, nil)
	require.ErrorIs(t, err, dlock.ErrInvalid)
	for _, root := range []string{"/", "x", "/x/", "//x", "/x/../y", "/x//y", "."} {
		_, err := zklock.New(c, &zklock.Options{Root: root})
		require.ErrorIs(t, err, dlock.ErrInvalid, root)
	}
}

func TestTTLLongerThanTheSession(t *testing.T) {
	const most = 10 * time.Second
	c := client(t, newLink(server.Addr), 2*most)
	b, err := zklock.New(c, nil)
	require.NoError(t, err)
	_, err = b.TryAcquire(t.Context(), newRequest(newKey(), most+1))
	require.ErrorIs(t, err, dlock.ErrInvalid)
	g, err := b.TryAcquire(t.Context(), newRequest(newKey(), most))
	require.NoError(t, err)
	g.TTL++
	require.ErrorIs(t, b.Renew(t.Context(), g), dlock.ErrInvalid)
	require.NoError(t, b.Release(t.Context(), g))

	// What the client asks for doesn't count, but what the server agrees to.
	c = client(t, newLink(server.Addr), 2*maxTimeout)
	b, err = zklock.New(c, nil)
	require.NoError(t, err)
	_, err = b.TryAcquire(t.Context(), newRequest(newKey(), maxTimeout))
	require.ErrorIs(t, err, dlock.ErrInvalid)
}

func TestNodes(t *testing.T) {
	a := connect(t, server.Addr)
	root := "/" + uuid.NewString() + "/locks"
	b, err := zklock.New(a.conn, &zklock.Options{Root: root})
	require.NoError(t, err)
	r := dlock.Request{Key: "a/ü.:%", Owner: "o/.:", TTL: long}
	g, err := b.TryAcquire(t.Context(), r)
	require.NoError(t, err)
	parent := root + "/a%2F%C3%BC%2E%3A%25"
	names, _, err := a.conn.Children(parent)
	require.NoError(t, err)
	require.Equal(t, []string{"o%2F%2E%3A:0000000000"}, names)
	data, stat, err := a.conn.Get(parent + "/" + names[0])
	require.NoError(t, err)
	require.EqualValues(t, stat.Czxid, g.Fence)
	require.Equal(t, a.conn.SessionID(), stat.EphemeralOwner)
	require.Equal(t, long.String(), string(data))
	_, err = a.TryAcquire(t.Context(), r)
	require.NoError(t, err, "roots are apart")
}

func TestParentIsContainer(t *testing.T) {
	a, key := connect(t, server.Addr), newKey()
	a.take(t, key, long)
	require.Equal(t, 1, a.link.sent(opCreateContainer))
	b := connect(t, server.Addr)
	b.link.old = true // its server refuses to make one
	for range 2 {
		require.NoError(t, b.Release(t.Context(), b.take(t, newKey(), long)))
	}
	require.Equal(t, 1, b.link.sent(opCreateContainer), "it asked once")
}

func TestCreateReplyLost(t *testing.T) {
	a, key := connect(t, server.Addr), newKey()
	require.NoError(t, a.Release(t.Context(), a.take(t, key, long))) // its parent is there
	for _, acquire := range []func(context.Context, dlock.Request) (dlock.Grant, error){a.TryAcquire, a.Acquire} {
		lost := a.link.losses()
		defer a.link.inject(loseOneReply, opCreate)()
		r := newRequest(key, long)
		g, err := acquire(t.Context(), r)
		require.NoError(t, err)
		require.Equal(t, lost+1, a.link.losses())
		names := a.nodes(t, key)
		require.Len(t, names, 1, "nodes")
		require.True(t, strings.HasPrefix(names[0], r.Owner))
		_, stat, err := a.conn.Exists("/dlock/" + key + "/" + names[0])
		require.NoError(t, err)
		require.EqualValues(t, stat.Czxid, g.Fence)
		require.NoError(t, a.Release(t.Context(), g))
		require.Empty(t, a.nodes(t, key))
	}
}

// A node whose create was not answered, and which nobody undoes, for the connection is broken until its lease would be over,
// goes all the same, though its session lives on.
func TestCreateReplyLostAndNotUndone(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	require.NoError(t, a.Release(t.Context(), a.take(t, key, long))) // its parent is there
	heal := a.link.inject(loseReplies, 0)
	_, err := a.Acquire(t.Context(), newRequest(key, short))
	require.Error(t, err)
	require.NotErrorIs(t, err, dlock.ErrLost)
	require.NotEmpty(t, b.nodes(t, key))
	heal()
	require.Eventually(t, func() bool { return len(b.nodes(t, key)) == 0 }, soon, 10*time.Millisecond)
	require.NoError(t, b.Release(t.Context(), b.take(t, key, long)))
}

// What is left of a request without an answer isn't deleted once the request has been repeated.
func TestRepeatedInTime(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	require.NoError(t, a.Release(t.Context(), a.take(t, key, long))) // its parent is there
	r := newRequest(key, moderate)
	heal := a.link.inject(loseReplies, 0)
	_, err := a.Acquire(t.Context(), r)
	require.Error(t, err)
	over := time.After(moderate)
	heal()
	r.TTL = long
	g, err := a.Acquire(t.Context(), r)
	require.NoError(t, err)
	<-over
	for range 20 { // what is done in the background has its requests between these
		require.NoError(t, a.Renew(t.Context(), g))
	}
	require.Len(t, b.nodes(t, key), 1)
}

// A request that came to its node and no further is over. What is still done to delete that node leaves alone what the
// request comes to when it is repeated.
func TestQueueNotSeenThenRepeated(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	require.NoError(t, a.Release(t.Context(), a.take(t, key, long))) // its parent is there
	r := newRequest(key, long)
	var once sync.Once
	var heal func()
	a.link.mu.Lock()
	a.link.before = func(op int32) {
		if op == opGetChildren {
			once.Do(func() { heal = a.link.inject(loseRequests, 0); a.link.drop() })
		}
	}
	a.link.mu.Unlock()
	_, err := a.Acquire(t.Context(), r)
	require.Error(t, err)
	require.Len(t, b.nodes(t, key), 1)
	// The pauses between the tries to delete the node grow, so that the repeated request overtakes the next.
	tried := a.link.sent(opDelete)
	require.Eventually(t, func() bool { return a.link.sent(opDelete) >= tried+5 }, soon, time.Millisecond)
	heal()
	g, err := a.Acquire(t.Context(), r)
	require.NoError(t, err)
	for over := time.Now().Add(time.Second); time.Now().Before(over); { // the longest pause
		require.NoError(t, a.Renew(t.Context(), g))
	}
}

// A place in doubt stays so when the request that is to settle it can't be sent.
func TestDoubtThatIsNotSettled(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	require.NoError(t, a.Release(t.Context(), a.take(t, key, long))) // its parent is there
	r := newRequest(key, short)
	heal := a.link.inject(loseReplies, 0)
	_, err := a.Acquire(t.Context(), r)
	require.Error(t, err)
	heal()
	heal = a.link.inject(cut, 0)
	a.link.drop()
	_, err = a.Acquire(t.Context(), r)
	require.Error(t, err)
	heal()
	require.Eventually(t, func() bool { return len(b.nodes(t, key)) == 0 }, soon, 10*time.Millisecond)
}

// TestTokenByQueue: tokens are in the order of the nodes, whenever a waiter looks at the queue and whoever has left by then.
// One that comes last there has its token from what it sees, and asks no more.
func TestTokenByQueue(t *testing.T) {
	a, key := connect(t, server.Addr), newKey()
	var tokens []func() (uint64, error)
	place := func(owner string) {
		token, err := a.Place(key, owner)
		require.NoError(t, err)
		tokens = append(tokens, token)
	}
	place("first")
	place("second")
	place("gone")
	a.drop(t, key, "gone") // after it the queue has changed, and the second is the last
	asked := a.link.sent(opExists)
	first, err := tokens[0]()
	require.NoError(t, err)
	require.Equal(t, asked+1, a.link.sent(opExists))
	second, err := tokens[1]()
	require.NoError(t, err)
	require.Equal(t, asked+1, a.link.sent(opExists), "the last of the queue knows")
	place("third")
	third, err := tokens[3]()
	require.NoError(t, err)
	require.Less(t, first, second)
	require.Less(t, second, third)
	late, err := tokens[1]()
	require.NoError(t, err)
	require.Less(t, first, late)
	require.Less(t, late, third)
	_, err = tokens[2]()
	require.ErrorIs(t, err, dlock.ErrLost, "its node is gone")
}

// The parent's deletion starts the sequence anew, and tokens go on.
func TestParentDeleted(t *testing.T) {
	a, key := connect(t, server.Addr), newKey()
	var last dlock.Grant
	for _, want := range []string{"0000000000", "0000000001", "0000000000"} {
		g := a.take(t, key, long)
		require.Greater(t, g.Fence, last.Fence)
		names := a.nodes(t, key)
		require.Len(t, names, 1)
		require.Equal(t, g.Owner+":"+want, names[0])
		require.NoError(t, a.Release(t.Context(), g))
		if want == "0000000001" {
			require.NoError(t, a.conn.Delete("/dlock/"+key, -1))
		}
		last = g
	}
}

// A parent that has outlived its counter gives the number 2147483647 again and again, and negative ones.
func TestSequenceOverflow(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	require.NoError(t, a.Release(t.Context(), a.take(t, key, long)))
	for _, seq := range []int64{math.MaxInt32, math.MinInt32} {
		node := "/dlock/" + key + "/other:" + fmt.Sprintf("%010d", seq)
		_, err := a.conn.Create(node, []byte(long.String()), zk.FlagEphemeral, zk.WorldACL(zk.PermAll))
		require.NoError(t, err)
		_, err = b.TryAcquire(t.Context(), newRequest(key, long))
		require.ErrorIs(t, err, dlock.ErrHeld)
		won := b.acquire(t.Context(), newRequest(key, long)) // its node has a smaller number, or a greater one
		b.follows(t, key, "other")
		require.Empty(t, won)
		require.NoError(t, a.conn.Delete(node, -1))
		w := receive(t, won)
		require.NoError(t, w.err)
		require.NoError(t, b.Release(t.Context(), w.g))
	}
}

func TestCancelledWaiterLeavesNoNode(t *testing.T) {
	a, b := connect(t, server.Addr), connect(t, server.Addr)
	for _, fault := range []fault{none, loseReplies, loseRequests} {
		key := newKey()
		g := a.take(t, key, long)
		ctx, cancel := context.WithCancel(t.Context())
		gone := b.acquire(ctx, newRequest(key, long))
		b.follows(t, key, g.Owner)
		heal := b.link.inject(fault, 0)
		cancel()
		require.ErrorIs(t, receive(t, gone).err, context.Canceled)
		heal()
		if fault == none {
			require.Len(t, a.nodes(t, key), 1)
		}
		require.Eventually(t, func() bool { return len(a.nodes(t, key)) == 1 }, soon, time.Millisecond)
		require.NoError(t, a.Release(t.Context(), g))
	}
}

// The follower of a waiter that is gone has not become the first.
func TestWaiterInTheMiddleGone(t *testing.T) {
	a, b, c, key := connect(t, server.Addr), connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	ctx, cancel := context.WithCancel(t.Context())
	r := newRequest(key, long)
	middle := b.acquire(ctx, r)
	b.follows(t, key, g.Owner)
	last := c.acquire(t.Context(), newRequest(key, long))
	c.follows(t, key, g.Owner)
	cancel()
	require.Error(t, receive(t, middle).err)
	require.Empty(t, last)
	require.NoError(t, a.Release(t.Context(), g))
	w := receive(t, last)
	require.NoError(t, w.err)
	require.Greater(t, w.g.Fence, g.Fence)
}

func TestConnectionLostWhileWaiting(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	for _, meanwhile := range []bool{false, true} { // the lock is released while the waiter is cut off
		g := a.take(t, key, long)
		won := b.acquire(t.Context(), newRequest(key, long))
		b.follows(t, key, g.Owner)
		heal := b.link.inject(cut, 0)
		b.link.drop()
		require.Eventually(t, func() bool { return b.conn.State() == zk.StateConnecting }, soon, time.Millisecond)
		if meanwhile {
			require.NoError(t, a.Release(t.Context(), g))
		}
		heal()
		require.Eventually(t, func() bool { return b.conn.State() == zk.StateHasSession }, soon, time.Millisecond)
		if !meanwhile {
			require.NoError(t, a.Release(t.Context(), g))
		}
		w := receive(t, won)
		require.NoError(t, w.err)
		require.Len(t, a.nodes(t, key), 1)
		require.NoError(t, b.Release(t.Context(), w.g))
	}
}

// A waiter whose connection breaks when it looks whether its turn has come looks again.
func TestReplyLostAfterWaiting(t *testing.T) {
	a, b, c, key := connect(t, server.Addr), connect(t, server.Addr), connect(t, server.Addr), newKey()
	for _, op := range []int32{opSetData, opGetChildren, opGetData} {
		first := a.take(t, key, long)
		leave := func() { require.NoError(t, a.Release(t.Context(), first)) }
		if op != opSetData { // these are the questions of the one that becomes the second
			ctx, cancel := context.WithCancel(t.Context())
			r := newRequest(key, long)
			second := c.acquire(ctx, r)
			c.follows(t, key, first.Owner)
			leave = func() {
				require.NoError(t, a.Release(t.Context(), first))
				w := receive(t, second)
				require.NoError(t, w.err)
				b.follows(t, key, r.Owner)
				require.NoError(t, c.Release(t.Context(), w.g))
				cancel()
			}
		}
		r := newRequest(key, long)
		if op == opSetData { // it has waited for too long
			r.TTL = moderate
		}
		won := b.acquire(t.Context(), r)
		b.follows(t, key, first.Owner)
		if op == opSetData {
			waitLonger()
		}
		lost := b.link.losses()
		heal := b.link.inject(loseOneReply, op)
		leave()
		w := receive(t, won)
		heal()
		require.NoError(t, w.err)
		require.Equal(t, lost+1, b.link.losses())
		b.release(t, w.g)
	}
}

func TestSessionExpires(t *testing.T) {
	a, b, c := connect(t, server.Addr), connect(t, server.Addr), connect(t, server.Addr)
	held, waited := newKey(), newKey()
	g := b.take(t, held, long)
	before := a.take(t, waited, long)
	stale := b.acquire(t.Context(), newRequest(waited, long))
	b.follows(t, waited, before.Owner)
	next := c.acquire(t.Context(), newRequest(held, long))
	c.follows(t, held, g.Owner)

	heal := b.link.inject(cut, 0)
	b.link.drop()
	require.Eventually(t, func() bool { return b.conn.State() == zk.StateConnecting }, soon, time.Millisecond)
	require.NoError(t, b.link.endSession(t.Context()))
	require.NoError(t, a.Release(t.Context(), before)) // it would be the waiter's turn, if it weren't dead
	w := receive(t, next)
	require.NoError(t, w.err)
	require.Greater(t, w.g.Fence, g.Fence)
	after := a.take(t, waited, long)
	heal()

	receive(t, g.Lost)
	s := receive(t, stale)
	require.ErrorIs(t, s.err, dlock.ErrLost, "a waiter whose session has expired; got token %d", s.g.Fence)
	require.Len(t, a.nodes(t, waited), 1)
	require.ErrorIs(t, b.Renew(t.Context(), g), dlock.ErrLost)
	require.ErrorIs(t, b.Release(t.Context(), g), dlock.ErrLost)
	require.NoError(t, c.Renew(t.Context(), w.g))
	require.NoError(t, a.Release(t.Context(), after))
	require.NoError(t, b.Release(t.Context(), b.take(t, waited, long)), "the new session works")
}

func TestNodeDeletedByOthers(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	waits := b.acquire(t.Context(), newRequest(key, long))
	b.follows(t, key, g.Owner)
	for _, name := range a.nodes(t, key) {
		if !strings.HasPrefix(name, g.Owner) {
			require.NoError(t, a.conn.Delete("/dlock/"+key+"/"+name, -1))
		}
	}
	require.ErrorIs(t, receive(t, waits).err, dlock.ErrLost)
	require.NoError(t, a.conn.Delete("/dlock/"+key+"/"+a.nodes(t, key)[0], -1))
	receive(t, g.Lost)
	require.ErrorIs(t, a.Renew(t.Context(), g), dlock.ErrLost)
}

// A lease's start is before the write that made it, and a waiter's not long before.
func TestStart(t *testing.T) { undisturbed(t, start) }

func start(t *testing.T) (done bool) {
	t.Helper()
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	written := make(chan time.Time, 8)
	watchWrites := func(p party, op int32) {
		p.link.mu.Lock()
		defer p.link.mu.Unlock()
		p.link.before = func(o int32) {
			if o == op {
				written <- time.Now()
			}
		}
	}
	watchWrites(a, opCreate)
	g := a.take(t, key, long)
	require.False(t, g.Start.After(<-written))
	watchWrites(b, opSetData)
	won := b.acquire(t.Context(), newRequest(key, moderate))
	b.follows(t, key, g.Owner)
	waitLonger()
	released := time.Now()
	require.NoError(t, a.Release(t.Context(), g))
	w := receive(t, won)
	require.NoError(t, w.err)
	if time.Since(released) >= moderate/8 { // it may be provisional
		return false
	}
	for len(written) > 1 {
		<-written
	}
	require.False(t, w.g.Start.After(<-written))
	require.True(t, w.g.Start.After(released))
	require.Zero(t, w.g.Provisional)
	return true
}

// creations tells when p sends its creates.
func (p party) creations() <-chan time.Time {
	created := make(chan time.Time, 8)
	p.link.mu.Lock()
	defer p.link.mu.Unlock()
	p.link.before = func(op int32) {
		if op == opCreate {
			created <- time.Now()
		}
	}
	return created
}

// A waiter that has waited for long, though not too long, has what is left of its TTL from before its node was created, and
// the whole of it once it has renewed that. It asks nothing more when its turn comes.
func TestProvisional(t *testing.T) { undisturbed(t, provisional) }

func provisional(t *testing.T) (done bool) {
	t.Helper()
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	created := b.creations()
	b.WatchAfter(long)
	asked := time.Now()
	won := b.acquire(t.Context(), newRequest(key, moderate))
	b.follows(t, key, g.Owner)
	waitLong()
	sent, released := b.link.sent(0), time.Now()
	require.NoError(t, a.Release(t.Context(), g))
	w := receive(t, won)
	require.NoError(t, w.err)
	now := b.link.sent(0)
	if time.Since(asked) > moderate/2 { // so that it may have had to write, or have hardly anything left
		return false
	}
	require.Equal(t, sent, now)
	require.True(t, w.g.Start.After(released))
	require.False(t, w.g.Start.After(time.Now()))
	require.GreaterOrEqual(t, w.g.Provisional, moderate/4)
	require.Equal(t, moderate, w.g.TTL)
	end, most := w.g.Start.Add(w.g.Provisional), (<-created).Add(moderate)
	require.False(t, end.After(most.Add(-moderate/8/100)), "and 1 % of the wait less")

	renewed := time.Now()
	err := b.Renew(t.Context(), w.g)
	if errors.Is(err, dlock.ErrLost) && time.Now().After(end) {
		return false
	}
	require.NoError(t, err)
	next := receive(t, a.acquire(t.Context(), newRequest(key, long)))
	require.NoError(t, next.err)
	require.GreaterOrEqual(t, time.Since(renewed), moderate)
	receive(t, w.g.Lost)
	return true
}

// A lease that was granted without a wait isn't provisional, however long the answers took.
func TestSlowGrantIsNotProvisional(t *testing.T) { undisturbed(t, slowGrantIsNotProvisional) }

func slowGrantIsNotProvisional(t *testing.T) (done bool) {
	t.Helper()
	a, key := connect(t, server.Addr), newKey()
	a.link.mu.Lock()
	a.link.before = func(op int32) {
		if op == opCreate {
			waitLong()
		}
	}
	a.link.mu.Unlock()
	for _, acquire := range []func(context.Context, dlock.Request) (dlock.Grant, error){a.TryAcquire, a.Acquire} {
		asked := time.Now()
		g, err := acquire(t.Context(), newRequest(key, moderate))
		require.NoError(t, err)
		require.Zero(t, g.Provisional)
		require.False(t, g.Start.Before(asked))
		age := time.Since(g.Start)
		if time.Since(asked) > moderate/2 { // so that it may have written again, for hardly anything was left
			return false
		}
		require.Greater(t, age, moderate/8)
		a.release(t, g)
	}
	return true
}

// A provisional lease that isn't renewed ends when it says, and not before.
func TestProvisionalEnds(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	won := b.acquire(t.Context(), newRequest(key, moderate))
	b.follows(t, key, g.Owner)
	waitLong()
	require.NoError(t, a.Release(t.Context(), g))
	w := receive(t, won)
	require.NoError(t, w.err)
	next := receive(t, a.acquire(t.Context(), newRequest(key, long)))
	require.NoError(t, next.err)
	end := w.g.Start.Add(w.g.Provisional)
	require.GreaterOrEqual(t, time.Now(), end)
	require.ErrorIs(t, b.Renew(t.Context(), w.g), dlock.ErrLost)
}

// A Locker renews a provisional lease by itself when the section is long.
func TestProvisionalIsConfirmed(t *testing.T) { undisturbed(t, provisionalIsConfirmed) }

func provisionalIsConfirmed(t *testing.T) (done bool) {
	t.Helper()
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	l, err := dlock.New(b, &dlock.Options{TTL: moderate})
	require.NoError(t, err)
	g := a.take(t, key, long)
	defer func() { require.NoError(t, l.Close()) }()
	won := make(chan *dlock.Handle, 1)
	asked := time.Now()
	go func() {
		h, err := l.Acquire(t.Context(), key)
		assert.NoError(t, err)
		won <- h
	}()
	b.follows(t, key, g.Owner)
	waitLong()
	require.NoError(t, a.Release(t.Context(), g))
	h := receive(t, won)
	first := h.Until()
	slow := func() bool { return time.Since(asked) > moderate*3/4 } // for then it may have had to write, or lost the lease
	require.Eventually(t, func() bool { return h.Until().After(first) || slow() }, soon, time.Millisecond)
	sent, err := b.link.sent(opSetData), h.Release(t.Context())
	if slow() {
		return false
	}
	require.NoError(t, err)
	require.Equal(t, 1, sent)
	return true
}

// One that becomes the second and has waited for too long writes while the first has the lock, and so asks nothing more when
// its turn comes.
func TestSecondWrites(t *testing.T) { undisturbed(t, secondWrites) }

func secondWrites(t *testing.T) (done bool) {
	t.Helper()
	a, b, c, key := connect(t, server.Addr), connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	r := newRequest(key, long)
	first := b.acquire(t.Context(), r)
	b.follows(t, key, g.Owner)
	c.WatchAfter(long)
	asked := time.Now()
	second := c.acquire(t.Context(), newRequest(key, moderate))
	c.follows(t, key, g.Owner)
	waitLonger()
	require.Zero(t, c.link.sent(opSetData))
	require.NoError(t, a.Release(t.Context(), g))
	f := receive(t, first)
	require.NoError(t, f.err)
	c.follows(t, key, r.Owner)
	require.Eventually(t, func() bool { return c.link.sent(opSetData) > 0 }, soon, time.Millisecond)
	require.Empty(t, second)
	require.NoError(t, b.Release(t.Context(), f.g))
	s := receive(t, second)
	require.NoError(t, s.err)
	if time.Since(asked) >= moderate { // after its TTL it looks whether it is the second, and it may have had to write again
		return false
	}
	require.Equal(t, 1, c.link.sent(opSetData))
	require.Equal(t, 1, c.link.sent(opGetData))
	require.Equal(t, 3, c.link.sent(opGetChildren))
	return true
}

// A waiter that died is found when it comes to the front: the one behind begins to count then, not a TTL of its own later.
func TestWaiterDead(t *testing.T) {
	a, b, c, key := connect(t, server.Addr), connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	r := newRequest(key, short)
	ctx, cancel := context.WithCancel(t.Context())
	dead := b.acquire(ctx, r)
	b.follows(t, key, g.Owner)
	last := c.acquire(t.Context(), newRequest(key, long)) // its own TTL is not what it waits for
	c.follows(t, key, g.Owner)
	heal := b.link.inject(cut, 0)
	b.link.drop()
	require.NoError(t, a.Release(t.Context(), g))
	require.NoError(t, receive(t, last).err)
	heal()
	require.Error(t, receive(t, dead).err)
	cancel()
}

// Clients that are closed leave nothing behind that goes on trying.
func TestClientClosed(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	waits := b.acquire(t.Context(), newRequest(key, long))
	b.follows(t, key, g.Owner)
	b.conn.Close()
	require.ErrorIs(t, receive(t, waits).err, dlock.ErrLost)
	a.conn.Close()
	receive(t, g.Lost)
}

// A client that is closed ends its nodes all at once. Whoever waited for one of them has not got the lock.
func TestClientClosedUnderBoth(t *testing.T) {
	for range 10 { // the server ends the nodes in any order
		a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
		g := a.take(t, key, long)
		waits := a.acquire(t.Context(), newRequest(key, long))
		a.follows(t, key, g.Owner)
		next := b.acquire(t.Context(), newRequest(key, long))
		b.follows(t, key, g.Owner)
		a.conn.Close()
		w := receive(t, waits)
		require.ErrorIs(t, w.err, dlock.ErrLost, "got token %d", w.g.Fence)
		n := receive(t, next)
		require.NoError(t, n.err)
		require.NoError(t, b.Release(t.Context(), n.g))
	}
}

// Two waiters of one client are granted the lock one after the other.
func TestOneClient(t *testing.T) {
	a, key := connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	won := a.acquire(t.Context(), newRequest(key, long))
	a.follows(t, key, g.Owner)
	require.NoError(t, a.Release(t.Context(), g))
	w := receive(t, won)
	require.NoError(t, w.err)
	require.Greater(t, w.g.Fence, g.Fence)
	require.NoError(t, a.Renew(t.Context(), w.g))
}

// A waiter that has written its node when its turn came, and gets the answer after its TTL, has lost the lock to the one
// behind: the grant must not say that it lasts longer.
func TestLateReplyAfterWaiting(t *testing.T) { undisturbed(t, lateReplyAfterWaiting) }

func lateReplyAfterWaiting(t *testing.T) (done bool) {
	t.Helper()
	a, b, c, key := connect(t, server.Addr), connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	r := newRequest(key, short)
	won := b.acquire(t.Context(), r)
	b.follows(t, key, g.Owner)
	next := c.acquire(t.Context(), newRequest(key, long))
	c.follows(t, key, g.Owner)
	time.Sleep(short) // it must write now
	heal := b.link.inject(holdReplies, 0)
	require.NoError(t, a.Release(t.Context(), g))
	n := receive(t, next)
	require.NoError(t, n.err)
	taken := time.Now()
	heal()
	w := receive(t, won)
	if errors.Is(w.err, dlock.ErrLost) { // the one behind was faster than its write
		return false
	}
	require.NoError(t, w.err)
	require.GreaterOrEqual(t, w.g.Provisional, time.Duration(0))
	lasts := w.g.TTL
	if w.g.Provisional > 0 {
		lasts = w.g.Provisional
	}
	require.False(t, w.g.Start.Add(lasts).After(taken), "a lease that ends %v after the next has begun", w.g.Start.Add(lasts).Sub(taken))
	require.ErrorIs(t, b.Renew(t.Context(), w.g), dlock.ErrLost)
	require.NoError(t, c.Renew(t.Context(), n.g))
	return true
}

// A client whose connections don't last is not closed.
// Every call returns with its context, whether the server is frozen or not; what is under way then costs a bounded number of
// goroutines, and when the server is back nothing is left of it.
func TestFrozenServer(t *testing.T) {
	h, p := connect(t, server.Addr), connect(t, server.Addr)
	key := newKey()
	held := h.take(t, key, long)
	mine := p.take(t, newKey(), long)
	l, err := dlock.New(connect(t, server.Addr).Backend, &dlock.Options{TTL: time.Minute})
	require.NoError(t, err)
	ended, cancel := context.WithCancelCause(t.Context())
	var waiting []<-chan granted
	for range 50 {
		waiting = append(waiting, p.acquire(ended, newRequest(key, long)))
	}
	require.Eventually(t, func() bool { return len(h.nodes(t, key)) == 51 }, soon, time.Millisecond)

	heal, err := server.Pause(t.Context())
	require.NoError(t, err)
	thaw := sync.OnceFunc(func() { require.NoError(t, heal(context.Background())) })
	t.Cleanup(thaw)
	before := runtime.NumGoroutine()
	calls := map[string]func(context.Context) error{
		"renew":   func(ctx context.Context) error { return p.Renew(ctx, mine) },
		"release": func(ctx context.Context) error { return p.Release(ctx, mine) },
		"locker": func(ctx context.Context) error {
			_, err := l.Acquire(ctx, newKey())
			return err
		},
	}
	requests := make([]dlock.Request, 200)
	for i := range requests {
		requests[i] = newRequest(key, long)
		f := p.Acquire
		if i%2 == 0 {
			f = p.TryAcquire
		}
		calls[fmt.Sprint("acquire ", i)] = func(ctx context.Context) error {
			_, err := f(ctx, requests[i])
			return err
		}
	}
	returned := make(chan error, len(calls))
	for name, call := range calls {
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			err := call(ctx)
			if !errors.Is(err, context.DeadlineExceeded) {
				err = fmt.Errorf("%s: %w", name, err)
			} else {
				err = nil
			}
			returned <- err
		}()
	}
	for range calls {
		require.NoError(t, receive(t, returned))
	}
	why := errors.New("why")
	cancel(why)
	for _, w := range waiting {
		require.ErrorIs(t, receive(t, w).err, why)
	}
	closed := make(chan error, 1)
	go func() { closed <- l.Close() }()
	require.NoError(t, receive(t, closed))
	require.Eventually(t, func() bool { return runtime.NumGoroutine() < before+60 }, soon, time.Millisecond,
		"what is under way has 64 and 8 goroutines at most; 50 waited before")

	thaw()
	for _, r := range requests { // as the Locker does
		if err := p.Release(t.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL}); !errors.Is(err, dlock.ErrLost) {
			require.NoError(t, err)
		}
	}
	require.Eventually(t, func() bool { return len(h.nodes(t, key)) == 1 }, soon, time.Millisecond)
	require.NoError(t, h.Release(t.Context(), held))
}

// A watch can't be taken back, so those who come and go share one.
func TestWatchesAreShared(t *testing.T) {
	h, p := connect(t, server.Addr), connect(t, server.Addr)
	key := newKey()
	g := h.take(t, key, long)
	ctx, cancel := context.WithCancel(t.Context())
	first := p.acquire(ctx, newRequest(key, long))
	require.Eventually(t, func() bool { return p.Watches() == 1 }, soon, time.Millisecond)
	cancel()
	require.ErrorIs(t, receive(t, first).err, context.Canceled)
	for range 20 {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		_, err := p.Acquire(ctx, newRequest(key, long))
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
	require.Equal(t, 1, p.link.sent(opGetData))
	won := p.acquire(t.Context(), newRequest(key, long))
	p.follows(t, key, g.Owner)
	require.NoError(t, h.Release(t.Context(), g))
	require.NoError(t, receive(t, won).err)
	require.Eventually(t, func() bool { return p.Watches() == 0 }, soon, time.Millisecond)
}

func TestConnectionsThatDoNotLast(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	b.link.mu.Lock()
	b.link.pause = 5 * time.Millisecond
	b.link.mu.Unlock()
	g := a.take(t, key, long)
	won := b.acquire(t.Context(), newRequest(key, moderate))
	b.follows(t, key, g.Owner)
	waitLonger()
	heal := b.link.inject(loseReplies, 0)
	lost := b.link.losses()
	require.NoError(t, a.Release(t.Context(), g))
	require.Eventually(t, func() bool { return len(won) > 0 || b.link.losses() >= lost+5 }, soon, time.Millisecond)
	heal()
	w := receive(t, won)
	require.NoError(t, w.err)
	b.release(t, w.g)
}

// A waiter that hasn't waited for long is granted a lease that counts from before its node was created, without a write
// but those of its node's beginning and end.
func TestShortWait(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	asked := time.Now()
	created := b.creations()
	b.WatchAfter(long)
	won := b.acquire(t.Context(), newRequest(key, long))
	b.follows(t, key, g.Owner)
	require.NoError(t, a.Release(t.Context(), g))
	w := receive(t, won)
	require.NoError(t, w.err)
	require.Greater(t, w.g.Fence, g.Fence)
	require.False(t, w.g.Start.Before(asked))
	require.False(t, w.g.Start.After(<-created))
	require.Zero(t, b.link.sent(opSetData))
	require.NoError(t, b.Release(t.Context(), w.g))
	// What it asked for by opExists is the session's timeout; its token it saw in the queue.
	for op, want := range map[int32]int{opCreate: 1, opExists: 1, opGetChildren: 1, opGetData: 1, opDelete: 1} {
		require.Equal(t, want, b.link.sent(op), "requests of kind %d", op)
	}
}

// A waiter that has seen that it is the first, and whose node goes before it has the lock, doesn't get it, though nothing
// but the answer to its last request tells it so.
func TestNodeGoneBeforeTheGrant(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	r := newRequest(key, moderate)
	won := b.acquire(t.Context(), r)
	b.follows(t, key, g.Owner)
	waitLonger()
	b.link.mu.Lock()
	b.link.before = func(op int32) {
		if op != opSetData {
			return
		}
		b.link.muffle("/")
		for _, name := range a.nodes(t, key) {
			assert.NoError(t, a.conn.Delete("/dlock/"+key+"/"+name, -1))
		}
	}
	b.link.mu.Unlock()
	require.NoError(t, a.Release(t.Context(), g))
	w := receive(t, won)
	require.ErrorIs(t, w.err, dlock.ErrLost, "got token %d", w.g.Fence)
}

// A waiter whose node went while it waited doesn't get the lock when the node before is gone: neither while another holds it,
// nor if it would be free for it.
func TestNodeGoneWhileWaiting(t *testing.T) {
	t.Run("third", func(t *testing.T) { // it isn't told: it looks
		a, b, c, key := connect(t, server.Addr), connect(t, server.Addr), connect(t, server.Addr), newKey()
		g := a.take(t, key, long)
		middle := c.acquire(t.Context(), newRequest(key, long))
		c.follows(t, key, g.Owner)
		r := newRequest(key, long)
		won := b.acquire(t.Context(), r)
		b.follows(t, key, g.Owner)
		b.link.muffle(nodePrefix(key, r.Owner))
		b.drop(t, key, r.Owner)
		require.NoError(t, a.Release(t.Context(), g))
		require.NoError(t, receive(t, middle).err)
		w := receive(t, won)
		require.ErrorIs(t, w.err, dlock.ErrLost, "got token %d", w.g.Fence)
	})
	t.Run("second", func(t *testing.T) { // it is told
		a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
		b.WatchAfter(0)
		g := a.take(t, key, long)
		r := newRequest(key, long)
		won := b.acquire(t.Context(), r)
		b.follows(t, key, g.Owner)
		b.follows(t, key, r.Owner)
		b.drop(t, key, r.Owner)
		require.NoError(t, a.Release(t.Context(), g))
		w := receive(t, won)
		require.ErrorIs(t, w.err, dlock.ErrLost, "got token %d", w.g.Fence)
	})
}

// A node that an earlier request made, whose answer was lost, may have been seen by the waiter behind it, which has counted
// from then on. So it is written again, with the TTL of the request that has found it.
func TestFoundNodeIsWritten(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	require.NoError(t, a.Release(t.Context(), a.take(t, key, long))) // its parent is there
	r := newRequest(key, long)
	heal := a.link.inject(loseReplies, 0)
	_, err := a.Acquire(t.Context(), r)
	require.Error(t, err)
	heal()
	first := slices.Min(b.nodes(t, key))
	require.True(t, strings.HasPrefix(first, r.Owner))
	r.TTL = long / 2
	asked := time.Now()
	g, err := a.Acquire(t.Context(), r)
	require.NoError(t, err)
	require.False(t, g.Start.Before(asked))
	require.Equal(t, []string{first}, b.nodes(t, key))
	data, stat, err := b.conn.Get("/dlock/" + key + "/" + first)
	require.NoError(t, err)
	require.EqualValues(t, stat.Czxid, g.Fence)
	require.Positive(t, stat.Version, "a waiter that has seen the node must begin to count anew")
	require.Equal(t, r.TTL.String(), string(data))
}

// A wait in which the machine was suspended is as long as the wall clock says.
func TestAge(t *testing.T) {
	now := time.Now()
	start := now.Add(-time.Second)
	for moved, want := range map[time.Duration]time.Duration{
		0: time.Second, time.Hour: time.Hour + time.Second, -time.Hour: time.Second,
	} {
		require.Equal(t, want, zklock.Age(start, start.Round(0).Add(-moved), now), "wall clock moved by %v", moved)
	}
}

// A lease that isn't renewed ends by itself, though nobody waits for it.
func TestLeaseRunsOut(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, short)
	receive(t, g.Lost)
	require.GreaterOrEqual(t, time.Since(g.Start), short)
	require.Empty(t, a.nodes(t, key))
	require.ErrorIs(t, a.Renew(t.Context(), g), dlock.ErrLost)
	require.Greater(t, b.take(t, key, long).Fence, g.Fence)
}

// A request that is repeated after its lease has run out is granted anew.
func TestRetryTooLate(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	r := newRequest(key, short)
	g, err := a.TryAcquire(t.Context(), r)
	require.NoError(t, err)
	heal := a.link.inject(loseRequests, 0) // so that the node stays
	require.Eventually(t, func() bool { return a.link.losses() > 0 }, soon, time.Millisecond)
	heal()
	again, err := a.TryAcquire(t.Context(), r)
	require.NoError(t, err)
	require.Greater(t, again.Fence, g.Fence)
	receive(t, g.Lost)
	receive(t, again.Lost)
	require.NoError(t, b.Release(t.Context(), b.take(t, key, long)))
}

// A lease that has run out isn't taken up again, though its node is still there: here it can't be deleted.
func TestRetryOfALeaseThatIsOver(t *testing.T) {
	a := connect(t, server.Addr)
	b, err := zklock.New(a.conn, &zklock.Options{Root: "/" + uuid.NewString(), ACL: zk.WorldACL(zk.PermAll &^ zk.PermDelete)})
	require.NoError(t, err)
	r := newRequest(newKey(), short)
	_, err = b.TryAcquire(t.Context(), r)
	require.NoError(t, err)
	require.Eventually(t, func() bool { return a.link.sent(opDelete) > 0 }, soon, time.Millisecond)
	_, err = b.TryAcquire(t.Context(), r)
	require.ErrorIs(t, err, zk.ErrNoAuth)
}

// A Backend that is cut off when a lease of its runs out deletes the node later.
func TestLeaseRunsOutWhileCutOff(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, short)
	heal := a.link.inject(loseRequests, 0)
	require.Eventually(t, func() bool { return a.link.losses() > 2 }, soon, time.Millisecond)
	require.Len(t, b.nodes(t, key), 1)
	heal()
	receive(t, g.Lost)
	require.Empty(t, b.nodes(t, key))
}

// A dead holder's session lasts for hours here. Its successor ends its lease.
func TestHolderDead(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, short)
	a.link.inject(cut, 0)
	a.link.drop()
	w := receive(t, b.acquire(t.Context(), newRequest(key, long)))
	require.NoError(t, w.err)
	require.GreaterOrEqual(t, time.Since(g.Start), short)
	require.Greater(t, w.g.Fence, g.Fence)
}

// Renewals start the successor's count anew.
func TestHolderDeadAfterRenewals(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, short)
	won := b.acquire(t.Context(), newRequest(key, long))
	var renewed time.Time
	for range 6 {
		now := time.Now()
		err := a.Renew(t.Context(), g)
		if errors.Is(err, dlock.ErrLost) {
			break // the machine was too slow
		}
		require.NoError(t, err)
		renewed = now
		time.Sleep(short / 3)
	}
	a.link.inject(cut, 0)
	a.link.drop()
	w := receive(t, won)
	require.NoError(t, w.err)
	require.GreaterOrEqual(t, time.Since(renewed), short)
}

// A renewal of which the waiter has not been told, as it may be when its connection broke, keeps it out all the same.
func TestRenewalUnseen(t *testing.T) {
	done := false
	for !done { // once is enough, if the machine is fast enough
		done = renewalUnseen(t)
	}
}

func renewalUnseen(t *testing.T) (done bool) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, short)
	won := b.acquire(t.Context(), newRequest(key, long))
	require.Eventually(t, func() bool { return len(won) > 0 || b.link.watches(nodePrefix(key, g.Owner)) }, soon, time.Millisecond)
	b.link.muffle("/")
	time.Sleep(short / 2)
	renewed := time.Now()
	err := a.Renew(t.Context(), g)
	a.link.inject(cut, 0)
	a.link.drop()
	require.NoError(t, receive(t, won).err)
	if errors.Is(err, dlock.ErrLost) {
		return false
	}
	require.NoError(t, err)
	require.GreaterOrEqual(t, time.Since(renewed), short)
	return true
}

// One release wakes two of many: the one whose turn it is, which asks nothing, and the one that is the second now.
func TestNoHerd(t *testing.T) {
	const waiters = 30
	a, key := connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	all := make([]party, waiters)
	won := make([]<-chan granted, waiters)
	owners := []string{g.Owner, g.Owner} // of the first, and of those before the last
	for i := range all {
		all[i] = connect(t, server.Addr)
		all[i].WatchAfter(long)
		r := newRequest(key, long)
		won[i] = all[i].acquire(t.Context(), r)
		all[i].follows(t, key, owners[i])
		owners = append(owners, r.Owner)
	}
	sent := func() (n []int) {
		for _, p := range all {
			n = append(n, p.link.sent(opGetChildren)+p.link.sent(opGetData)+p.link.sent(opSetData))
		}
		return n
	}
	for i := range all { // first come, first served
		before := sent()
		if i == 0 {
			require.NoError(t, a.Release(t.Context(), g))
		} else {
			require.NoError(t, all[i-1].Release(t.Context(), g))
		}
		w := receive(t, won[i])
		require.NoError(t, w.err)
		require.Greater(t, w.g.Fence, g.Fence)
		g = w.g
		if i+1 < waiters {
			require.Eventually(t, func() bool { return sent()[i+1] >= before[i+1]+2 }, soon, time.Millisecond)
			all[i+1].follows(t, key, g.Owner)
			before[i+1] += 2 // it looks at the queue, and at its first
		}
		require.Equal(t, before, sent(), "requests of the waiters when %d was granted the lock", i)
	}
}
