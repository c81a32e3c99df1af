package zklock_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"runtime"
	"runtime/pprof"
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
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/zklock"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

const (
	long  = time.Hour
	short = 300 * time.Millisecond
	soon  = 30 * time.Second
)

func TestConformance(t *testing.T) {
	dlocktest.Run(t, dlocktest.Harness{NoRepeats: true, New: func(t *testing.T) dlocktest.Service { return service(t, server) }})
}

// Its servers lag behind each other.
func TestConformanceEnsemble(t *testing.T) {
	if server.Provider == testbed.External {
		t.Skip("the external ensemble has been tested already")
	}
	o := options()
	o.Args = append(o.Args, "syncLimit=100") // ticks; a slow machine must not lose a member
	c := testmain.ServeCluster(t, testbed.StartZooKeeper, 3, o)
	t.Run("kit", func(t *testing.T) {
		dlocktest.Run(t, dlocktest.Harness{NoRepeats: true, New: func(t *testing.T) dlocktest.Service { return service(t, c.Servers...) }})
	})
}

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
			zk.WithMaxBufferSize(1<<20), zk.WithMaxConnBufferSize(1<<16)) // 3 MiB by default
	})
	require.NoError(tb, err)
	tb.Cleanup(c.Close)
	return c
}

type silence struct{}

func (silence) Printf(string, ...any) {}

func nodePrefix(key, owner string) string { return "/dlock/" + key + "/" + owner + ":" }

func newKey() string { return "test-" + uuid.NewString() }

// moderate is the TTL of a waiter whose lease becomes provisional, or is written again.
const moderate = 2 * time.Second

func waitLong()   { time.Sleep(moderate / 8) }
func waitLonger() { time.Sleep(moderate * 3 / 4) }

func (p party) take(t *testing.T, key string, ttl time.Duration) dlock.Grant {
	t.Helper()
	g, err := p.TryAcquire(t.Context(), locktest.Next(key, ttl))
	require.NoError(t, err)
	return g
}

// release releases a moderate lease, which may have expired on a slow machine.
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

func (p party) waits(t *testing.T, g dlock.Grant, ttl time.Duration) <-chan locktest.Outcome {
	t.Helper()
	won := locktest.Acquire(t.Context(), p, locktest.Next(g.Key, ttl))
	p.follows(t, g.Key, g.Owner)
	return won
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

func (p party) drop(t *testing.T, key, owner string) {
	t.Helper()
	for _, name := range p.nodes(t, key) {
		if strings.HasPrefix(name, owner+":") {
			require.NoError(t, p.conn.Delete("/dlock/"+key+"/"+name, -1))
		}
	}
}

func (p party) follows(t *testing.T, key, owner string) {
	t.Helper()
	locktest.Eventually(t, func() bool { return p.link.watches(nodePrefix(key, owner)) })
}

func (p party) expire(t *testing.T) (heal func()) {
	t.Helper()
	heal = p.link.inject(cut, 0)
	p.link.drop()
	locktest.Eventually(t, func() bool { return p.conn.State() == zk.StateConnecting })
	require.NoError(t, p.link.endSession(t.Context()))
	return heal
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
	_, err = b.TryAcquire(t.Context(), locktest.Next(newKey(), most+1))
	require.ErrorIs(t, err, dlock.ErrInvalid)
	g, err := b.TryAcquire(t.Context(), locktest.Next(newKey(), most))
	require.NoError(t, err)
	g.TTL++
	require.ErrorIs(t, b.Renew(t.Context(), g), dlock.ErrInvalid)
	locktest.Release(t, b, g)

	c = client(t, newLink(server.Addr), 2*maxTimeout)
	b, err = zklock.New(c, nil)
	require.NoError(t, err)
	_, err = b.TryAcquire(t.Context(), locktest.Next(newKey(), maxTimeout))
	require.ErrorIs(t, err, dlock.ErrInvalid)

	a := connect(t, server.Addr)
	a.take(t, newKey(), most)
	heal := a.expire(t)
	a.link.mu.Lock()
	a.link.agrees = most
	a.link.mu.Unlock()
	heal()
	locktest.Eventually(t, func() bool { return a.conn.State() == zk.StateHasSession })
	_, err = a.TryAcquire(t.Context(), locktest.Next(newKey(), most))
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
	require.Equal(t, 2, a.link.sent(opCreateContainer), "its parent is a container, for which there was no root at first")
	_, err = a.TryAcquire(t.Context(), r)
	require.NoError(t, err, "roots are apart")
	for _, foreign := range []string{"/7", "/x:y"} { // without an owner, or without a number
		_, err := a.conn.Create(parent+foreign, nil, zk.FlagEphemeral, zk.WorldACL(zk.PermAll))
		require.NoError(t, err)
	}
	locktest.Release(t, b, g)
	_, err = b.TryAcquire(t.Context(), r)
	require.NoError(t, err)
}

func TestCreateReplyLost(t *testing.T) {
	a, key := connect(t, server.Addr), newKey()
	locktest.Release(t, a, a.take(t, key, long)) // creates the parent
	for _, acquire := range []func(context.Context, dlock.Request) (dlock.Grant, error){a.TryAcquire, a.Acquire} {
		lost := a.link.losses()
		defer a.link.inject(loseOneReply, opCreate)()
		r := locktest.Next(key, long)
		g, err := acquire(t.Context(), r)
		require.NoError(t, err)
		require.Equal(t, lost+1, a.link.losses())
		names := a.nodes(t, key)
		require.Len(t, names, 1, "nodes")
		require.True(t, strings.HasPrefix(names[0], r.Owner))
		_, stat, err := a.conn.Exists("/dlock/" + key + "/" + names[0])
		require.NoError(t, err)
		require.EqualValues(t, stat.Czxid, g.Fence)
		locktest.Release(t, a, g)
		require.Empty(t, a.nodes(t, key))
	}
}

func TestCreateReplyLostAndNotUndone(t *testing.T) {
	for _, refused := range []int32{0, throttled} {
		a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
		locktest.Release(t, a, a.take(t, key, long)) // creates the parent
		deletes := a.link.sent(opDelete)
		heal := a.link.inject(loseReplies, 0)
		a.link.refuses(opDelete, refused)
		_, err := a.Acquire(t.Context(), locktest.Next(key, short))
		require.Error(t, err)
		require.NotErrorIs(t, err, dlock.ErrLost)
		require.NotEmpty(t, b.nodes(t, key))
		heal()
		if refused != 0 {
			locktest.Eventually(t, func() bool { return a.link.sent(opDelete) > deletes+1 })
			require.NotEmpty(t, b.nodes(t, key))
			a.link.refuses(opDelete, 0)
		}
		locktest.Eventually(t, func() bool { return len(b.nodes(t, key)) == 0 })
		locktest.Release(t, b, b.take(t, key, long))
	}
}

// The repeated create is answered, but the first one's node can't be deleted yet.
func TestCreateReplyLostAndNotSwept(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	locktest.Release(t, a, a.take(t, key, long)) // creates the parent
	defer a.link.inject(loseOneReply, opCreate)()
	a.link.refuses(opDelete, throttled)
	_, err := a.Acquire(t.Context(), locktest.Next(key, long))
	require.Error(t, err)
	require.Len(t, b.nodes(t, key), 2)
	a.link.refuses(opDelete, 0)
	locktest.Eventually(t, func() bool { return len(b.nodes(t, key)) == 0 })
}

func TestCreateReplyLostAndNotRepeated(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	locktest.Release(t, a, a.take(t, key, long)) // creates the parent
	heal := func() {}
	a.link.once(opCreate, func() { heal = a.link.inject(cut, 0) })
	_, err := a.Acquire(t.Context(), locktest.Next(key, long))
	require.ErrorIs(t, err, zk.ErrNoServer)
	require.Len(t, b.nodes(t, key), 1)
	heal()
	locktest.Eventually(t, func() bool { return len(b.nodes(t, key)) == 0 })
}

func TestContextEndsAfterCreate(t *testing.T) {
	a, key := connect(t, server.Addr), newKey()
	ctx, cancel := context.WithCancel(t.Context())
	a.link.mu.Lock()
	a.link.before = func(op int32) {
		if op == opGetChildren {
			cancel()
		}
	}
	a.link.mu.Unlock()
	g, err := a.Acquire(ctx, locktest.Next(key, long))
	if err == nil { // the reply came just in time
		locktest.Release(t, a, g)
	}
	locktest.Eventually(t, func() bool { return len(a.nodes(t, key)) == 0 })
}

// The token of the last in the queue needs no request.
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
	a.drop(t, key, "gone") // changes the queue, of which the second is the last
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
	for _, owner := range []string{"first", "second", "third"} {
		_, err = tokens[2]()
		require.ErrorIs(t, err, dlock.ErrLost, "its node is gone")
		a.drop(t, key, owner)
	}
	_, err = tokens[2]()
	require.ErrorIs(t, err, dlock.ErrLost, "all nodes are gone")
}

// Sequence numbers restart at 0, but tokens grow.
func TestParentDeleted(t *testing.T) {
	a, key := connect(t, server.Addr), newKey()
	var last uint64
	for _, want := range []string{"0000000000", "0000000001", "0000000000"} {
		g := a.take(t, key, long)
		require.Greater(t, g.Fence, last)
		require.Equal(t, []string{g.Owner + ":" + want}, a.nodes(t, key))
		locktest.Release(t, a, g)
		if want == "0000000001" {
			require.NoError(t, a.conn.Delete("/dlock/"+key, -1))
		}
		last = g.Fence
	}
}

// The counter yields 2147483647 several times, and negative numbers.
func TestSequenceOverflow(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	locktest.Release(t, a, a.take(t, key, long))
	for _, seq := range []int64{math.MaxInt32, math.MinInt32} {
		g := a.take(t, key, long)
		node := "/dlock/" + key + "/other:" + fmt.Sprintf("%010d", seq)
		_, err := a.conn.Create(node, nil, zk.FlagEphemeral, zk.WorldACL(zk.PermAll)) // without a TTL it never expires
		require.NoError(t, err)
		sent := b.link.sent(opCreate)
		_, err = b.TryAcquire(t.Context(), locktest.Next(key, long))
		require.ErrorIs(t, err, dlock.ErrHeld)
		require.Equal(t, sent, b.link.sent(opCreate))
		won := b.waits(t, g, short) // its number is less or greater than that of the node before it
		locktest.Release(t, a, g)
		b.follows(t, key, "other")
		time.Sleep(2 * short)
		require.Empty(t, won)
		require.NoError(t, a.conn.Delete(node, -1))
		w := locktest.Won(t, won)
		require.Greater(t, w.Fence, g.Fence)
		b.release(t, w)
	}
}

func TestWaiterInTheMiddleGone(t *testing.T) {
	a, b, c, key := connect(t, server.Addr), connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	ctx, cancel := context.WithCancel(t.Context())
	r := locktest.Next(key, long)
	middle := locktest.Acquire(ctx, b, r)
	b.follows(t, key, g.Owner)
	last := c.waits(t, g, long)
	heal, cancelled := b.link.inject(holdReplies, 0), time.Now()
	cancel()
	require.Error(t, locktest.Receive(t, middle).Err)
	require.GreaterOrEqual(t, time.Since(cancelled), 250*time.Millisecond, "it waits for its node to be deleted")
	heal()
	require.Empty(t, last)
	locktest.Release(t, a, g)
	w := locktest.Won(t, last)
	require.Greater(t, w.Fence, g.Fence)
}

func TestConnectionLostWhileWaiting(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	for _, meanwhile := range []bool{false, true} { // whether the lock is released while the waiter is cut off
		g := a.take(t, key, long)
		won := b.waits(t, g, long)
		heal := b.link.inject(cut, 0)
		b.link.drop()
		locktest.Eventually(t, func() bool { return b.conn.State() == zk.StateConnecting })
		if meanwhile {
			locktest.Release(t, a, g)
		}
		heal()
		locktest.Eventually(t, func() bool { return b.conn.State() == zk.StateHasSession })
		if !meanwhile {
			locktest.Release(t, a, g)
		}
		w := locktest.Won(t, won)
		require.Len(t, a.nodes(t, key), 1)
		locktest.Release(t, b, w)
	}
}

func TestCauseIsNoAnswer(t *testing.T) {
	a, key := connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	heal := a.link.inject(holdReplies, 0)
	defer heal()
	for _, c := range []struct {
		op   int32
		call func(context.Context, dlock.Grant) error
	}{{opSetData, a.Renew}, {opDelete, a.Release}} {
		ctx, cancel := context.WithCancelCause(t.Context())
		sent, returned := a.link.sent(c.op), make(chan error, 1)
		go func() { returned <- c.call(ctx, g) }()
		locktest.Eventually(t, func() bool { return a.link.sent(c.op) > sent })
		cancel(zk.ErrNoNode)
		require.ErrorIs(t, <-returned, zk.ErrNoNode, "it isn't known whether the node was there")
	}
}

func TestReplyLostAfterWaiting(t *testing.T) {
	a, b, c, key := connect(t, server.Addr), connect(t, server.Addr), connect(t, server.Addr), newKey()
	for _, op := range []int32{opSetData, opGetChildren, opGetData} {
		first := a.take(t, key, long)
		leave := func() { locktest.Release(t, a, first) }
		if op != opSetData { // requests of a waiter that becomes the second
			ctx, cancel := context.WithCancel(t.Context())
			r := locktest.Next(key, long)
			second := locktest.Acquire(ctx, c, r)
			c.follows(t, key, first.Owner)
			leave = func() {
				locktest.Release(t, a, first)
				w := locktest.Receive(t, second)
				require.NoError(t, w.Err)
				b.follows(t, key, r.Owner)
				locktest.Release(t, c, w.G)
				cancel()
			}
		}
		r := locktest.Next(key, long)
		if op == opSetData { // it must write
			r.TTL = moderate
		}
		won := locktest.Acquire(t.Context(), b, r)
		b.follows(t, key, first.Owner)
		if op == opSetData {
			waitLonger()
		}
		lost := b.link.losses()
		heal := b.link.inject(loseOneReply, op)
		leave()
		w := locktest.Receive(t, won)
		heal()
		require.NoError(t, w.Err)
		require.Equal(t, lost+1, b.link.losses())
		b.release(t, w.G)
	}
}

func TestSessionExpires(t *testing.T) {
	a, b, c := connect(t, server.Addr), connect(t, server.Addr), connect(t, server.Addr)
	held, waited := newKey(), newKey()
	g := b.take(t, held, long)
	before := a.take(t, waited, long)
	stale := b.waits(t, before, long)
	next := c.waits(t, g, long)

	heal := b.expire(t)
	locktest.Release(t, a, before) // the dead waiter is next
	w := locktest.Won(t, next)
	require.Greater(t, w.Fence, g.Fence)
	after := a.take(t, waited, long)
	heal()

	locktest.Receive(t, g.Lost)
	s := locktest.Receive(t, stale)
	require.ErrorIs(t, s.Err, dlock.ErrLost, "a waiter whose session has expired; got token %d", s.G.Fence)
	require.Len(t, a.nodes(t, waited), 1)
	require.ErrorIs(t, b.Renew(t.Context(), g), dlock.ErrLost)
	require.ErrorIs(t, b.Release(t.Context(), g), dlock.ErrLost)
	require.NoError(t, c.Renew(t.Context(), w))
	locktest.Release(t, a, after)
	require.NoError(t, b.Release(t.Context(), b.take(t, waited, long)), "the new session works")
}

func TestStart(t *testing.T) {
	locktest.Undisturbed(t, func(t *testing.T) (done bool) {
		a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
		created, written := a.sends(opCreate), b.sends(opSetData)
		g := a.take(t, key, long)
		require.False(t, g.Start.After(<-created))
		won := b.waits(t, g, moderate)
		waitLonger()
		released := time.Now()
		locktest.Release(t, a, g)
		w := locktest.Won(t, won)
		if time.Since(released) >= moderate/8 { // maybe provisional
			return false
		}
		for len(written) > 1 {
			<-written
		}
		require.False(t, w.Start.After(<-written))
		require.True(t, w.Start.After(released))
		require.Zero(t, w.Provisional)
		return true
	})
}

func (p party) sends(op int32) <-chan time.Time {
	sent := make(chan time.Time, 8)
	p.link.mu.Lock()
	defer p.link.mu.Unlock()
	p.link.before = func(o int32) {
		if o == op {
			sent <- time.Now()
		}
	}
	return sent
}

// A provisional lease counts from before its node was created, needs no request, and is extended to its TTL by a renewal.
func TestProvisional(t *testing.T) {
	locktest.Undisturbed(t, func(t *testing.T) (done bool) {
		a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
		g := a.take(t, key, long)
		created := b.sends(opCreate)
		b.WatchAfter(long)
		asked := time.Now()
		won := b.waits(t, g, moderate)
		waitLong()
		sent, released := b.link.sent(0), time.Now()
		locktest.Release(t, a, g)
		w := locktest.Won(t, won)
		now := b.link.sent(0)
		if time.Since(asked) > moderate/2 { // too slow: it may have written, or have little left
			return false
		}
		require.Equal(t, sent, now)
		require.True(t, w.Start.After(released))
		require.False(t, w.Start.After(time.Now()))
		require.GreaterOrEqual(t, w.Provisional, moderate/4)
		require.Equal(t, moderate, w.TTL)
		end, most := w.Start.Add(w.Provisional), (<-created).Add(moderate)
		require.False(t, end.After(most.Add(-moderate/8/100)), "and 1 % of the wait less")

		renewed := time.Now()
		err := b.Renew(t.Context(), w)
		if errors.Is(err, dlock.ErrLost) && time.Now().After(end) {
			return false
		}
		require.NoError(t, err)
		locktest.Won(t, locktest.Acquire(t.Context(), a, locktest.Next(key, long)))
		require.GreaterOrEqual(t, time.Since(renewed), moderate)
		locktest.Receive(t, w.Lost)
		return true
	})
}

func TestSlowGrantIsNotProvisional(t *testing.T) {
	locktest.Undisturbed(t, func(t *testing.T) (done bool) {
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
			g, err := acquire(t.Context(), locktest.Next(key, moderate))
			require.NoError(t, err)
			require.Zero(t, g.Provisional)
			require.False(t, g.Start.Before(asked))
			age := time.Since(g.Start)
			if time.Since(asked) > moderate/2 { // too slow: it may have written
				return false
			}
			require.Greater(t, age, moderate/8)
			a.release(t, g)
		}
		return true
	})
}

func TestProvisionalEnds(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	won := b.waits(t, g, moderate)
	waitLong()
	locktest.Release(t, a, g)
	w := locktest.Won(t, won)
	next := locktest.Acquire(t.Context(), a, locktest.Next(key, long))
	end := w.Start.Add(cmp.Or(w.Provisional, w.TTL))
	time.Sleep(time.Until(end) + moderate/50) // plus 1 % for drift
	require.ErrorIs(t, b.Renew(t.Context(), w), dlock.ErrLost)
	require.GreaterOrEqual(t, locktest.Receive(t, next).At, end)
}

func TestProvisionalIsConfirmed(t *testing.T) {
	locktest.Undisturbed(t, func(t *testing.T) (done bool) {
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
		locktest.Release(t, a, g)
		h := locktest.Receive(t, won)
		first := h.Until()
		slow := func() bool { return time.Since(asked) > moderate*3/4 } // it may have written, or lost the lease
		locktest.Eventually(t, func() bool { return h.Until().After(first) || slow() })
		sent, err := b.link.sent(opSetData), h.Release(t.Context())
		if slow() {
			return false
		}
		require.NoError(t, err)
		require.Equal(t, 1, sent)
		return true
	})
}

// A waiter writes its node while it is second, and needs no request when it is first.
func TestSecondWrites(t *testing.T) {
	locktest.Undisturbed(t, func(t *testing.T) (done bool) {
		a, b, c, key := connect(t, server.Addr), connect(t, server.Addr), connect(t, server.Addr), newKey()
		g := a.take(t, key, long)
		r := locktest.Next(key, long)
		first := locktest.Acquire(t.Context(), b, r)
		b.follows(t, key, g.Owner)
		c.WatchAfter(long)
		asked := time.Now()
		second := c.waits(t, g, moderate)
		waitLonger()
		require.Zero(t, c.link.sent(opSetData))
		locktest.Release(t, a, g)
		f := locktest.Won(t, first)
		c.follows(t, key, r.Owner)
		locktest.Eventually(t, func() bool { return c.link.sent(opSetData) > 0 })
		require.Empty(t, second)
		locktest.Release(t, b, f)
		locktest.Won(t, second)
		if time.Since(asked) >= moderate { // too slow: it may have read or written again
			return false
		}
		require.Equal(t, 1, c.link.sent(opSetData))
		require.Equal(t, 1, c.link.sent(opGetData))
		require.Equal(t, 3, c.link.sent(opGetChildren))
		return true
	})
}

func TestWaiterDead(t *testing.T) {
	a, b, c, key := connect(t, server.Addr), connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	r := locktest.Next(key, short)
	ctx, cancel := context.WithCancel(t.Context())
	dead := locktest.Acquire(ctx, b, r)
	b.follows(t, key, g.Owner)
	last := c.waits(t, g, long) // a long TTL, so it doesn't wait for its own
	heal := b.link.inject(cut, 0)
	b.link.drop()
	locktest.Release(t, a, g)
	locktest.Won(t, last)
	heal()
	require.Error(t, locktest.Receive(t, dead).Err)
	cancel()
}

// The one behind it was the third when it began to watch.
func TestHolderDeadAndSecondGone(t *testing.T) {
	a, b, c, key := connect(t, server.Addr), connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, moderate)
	a.link.inject(cut, 0)
	a.link.drop()
	ctx, cancel := context.WithCancel(t.Context())
	second := locktest.Acquire(ctx, b, locktest.Next(key, long))
	b.follows(t, key, g.Owner)
	third := locktest.Acquire(t.Context(), c, locktest.Next(key, short))
	c.follows(t, key, g.Owner)
	cancel()
	if s := locktest.Receive(t, second); s.Err == nil { // the machine stalled for the holder's TTL
		locktest.Release(t, b, s.G)
	}
	locktest.Won(t, third)
	require.GreaterOrEqual(t, time.Since(g.Start), moderate, "the third's own TTL ends nobody's lease")
}

// In whatever order the server deletes the nodes, the client's waiter isn't granted the lock.
func TestClientClosedUnderBoth(t *testing.T) {
	for range 10 {
		a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
		g := a.take(t, key, long)
		waits := a.waits(t, g, long)
		next := b.waits(t, g, long)
		a.conn.Close()
		locktest.Receive(t, g.Lost)
		w := locktest.Receive(t, waits)
		require.ErrorIs(t, w.Err, dlock.ErrLost, "got token %d", w.G.Fence)
		locktest.Release(t, b, locktest.Won(t, next))
	}
}

func TestOneClient(t *testing.T) {
	a, key := connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	won := a.waits(t, g, long)
	locktest.Release(t, a, g)
	w := locktest.Won(t, won)
	require.Greater(t, w.Fence, g.Fence)
	require.NoError(t, a.Renew(t.Context(), w))

	b := connect(t, server.Addr)
	a.link.inject(cut, 0)
	a.link.drop()
	ctx, cancel := context.WithTimeout(t.Context(), short)
	defer cancel()
	require.Error(t, b.Renew(ctx, w), "another client's renewal doesn't prove that the session lives")
}

// If the reply to its write as the first comes after the TTL, the grant says so.
func TestLateReplyAfterWaiting(t *testing.T) {
	locktest.Undisturbed(t, func(t *testing.T) (done bool) {
		a, b, c, key := connect(t, server.Addr), connect(t, server.Addr), connect(t, server.Addr), newKey()
		g := a.take(t, key, long)
		r := locktest.Next(key, short)
		won := locktest.Acquire(t.Context(), b, r)
		b.follows(t, key, g.Owner)
		next := c.waits(t, g, long)
		time.Sleep(short) // so that it must write
		heal := b.link.inject(holdReplies, 0)
		locktest.Release(t, a, g)
		n := locktest.Won(t, next)
		taken := time.Now()
		heal()
		w := locktest.Receive(t, won)
		if errors.Is(w.Err, dlock.ErrLost) { // the one behind was faster
			return false
		}
		require.NoError(t, w.Err)
		require.GreaterOrEqual(t, w.G.Provisional, time.Duration(0))
		lasts := w.G.TTL
		if w.G.Provisional > 0 {
			lasts = w.G.Provisional
		}
		require.False(t, w.G.Start.Add(lasts).After(taken), "a lease that ends %v after the next has begun", w.G.Start.Add(lasts).Sub(taken))
		require.ErrorIs(t, b.Renew(t.Context(), w.G), dlock.ErrLost)
		require.NoError(t, c.Renew(t.Context(), n))
		return true
	})
}

// The number of goroutines stays bounded.
func TestFrozenServer(t *testing.T) {
	h, p := connect(t, server.Addr), connect(t, server.Addr)
	key := newKey()
	held := h.take(t, key, long)
	mine := p.take(t, newKey(), long)
	l, err := dlock.New(connect(t, server.Addr), &dlock.Options{TTL: long})
	require.NoError(t, err)
	_, err = l.Acquire(t.Context(), newKey())
	require.NoError(t, err)
	ended, cancel := context.WithCancelCause(t.Context())
	var waiting []<-chan locktest.Outcome
	for range 50 {
		waiting = append(waiting, locktest.Acquire(ended, p, locktest.Next(key, long)))
	}
	locktest.Eventually(t, func() bool { return len(h.nodes(t, key)) == 51 })

	heal, err := server.Pause(t.Context())
	require.NoError(t, err)
	thaw := sync.OnceFunc(func() { require.NoError(t, heal(context.Background())) })
	t.Cleanup(thaw)
	before := runtime.NumGoroutine()
	requests, returned := make([]dlock.Request, 200), make(chan error, 202)
	call := func(f func(context.Context) error) {
		go func() {
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			returned <- f(ctx)
		}()
	}
	call(func(ctx context.Context) error { return p.Renew(ctx, mine) })
	call(func(ctx context.Context) error { return p.Release(ctx, mine) })
	for i := range requests {
		requests[i] = locktest.Next(key, long)
		acquire := []func(context.Context, dlock.Request) (dlock.Grant, error){p.Acquire, p.TryAcquire}[i%2]
		call(func(ctx context.Context) error {
			_, err := acquire(ctx, requests[i])
			return err
		})
	}
	for range cap(returned) {
		require.ErrorIs(t, locktest.Receive(t, returned), context.DeadlineExceeded)
	}
	why := errors.New("why")
	cancel(why)
	for _, w := range waiting {
		require.ErrorIs(t, locktest.Receive(t, w).Err, why)
	}
	locktest.Eventually(t, func() bool { return runtime.NumGoroutine() < before+60 },
		"what is under way has 64 and 8 goroutines at most; 50 waited before")
	closed := make(chan error, 1)
	go func() { closed <- l.Close() }()
	require.NoError(t, locktest.Receive(t, closed))

	thaw()
	for _, r := range requests {
		if err := p.Release(t.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL}); !errors.Is(err, dlock.ErrLost) {
			require.NoError(t, err)
		}
	}
	locktest.Eventually(t, func() bool { return len(h.nodes(t, key)) == 1 })
	locktest.Release(t, h, held)
}

func TestWatchesAreShared(t *testing.T) {
	h, p := connect(t, server.Addr), connect(t, server.Addr)
	key := newKey()
	g := h.take(t, key, long)
	ctx, cancel := context.WithCancel(t.Context())
	first := locktest.Acquire(ctx, p, locktest.Next(key, long))
	locktest.Eventually(t, func() bool { return p.Watches() == 1 })
	cancel()
	require.ErrorIs(t, locktest.Receive(t, first).Err, context.Canceled)
	for range 20 {
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		_, err := p.Acquire(ctx, locktest.Next(key, long))
		cancel()
		require.ErrorIs(t, err, context.DeadlineExceeded)
	}
	require.Equal(t, 1, p.link.sent(opGetData))
	won := p.waits(t, g, long)
	locktest.Release(t, h, g)
	locktest.Won(t, won)
	locktest.Eventually(t, func() bool { return p.Watches() == 0 })
}

// The client isn't taken for closed.
func TestConnectionsThatDoNotLast(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	b.link.mu.Lock()
	b.link.pause = 5 * time.Millisecond
	b.link.mu.Unlock()
	g := a.take(t, key, long)
	won := b.waits(t, g, moderate)
	waitLonger()
	heal := b.link.inject(loseReplies, 0)
	lost := b.link.losses()
	locktest.Release(t, a, g)
	locktest.Eventually(t, func() bool { return len(won) > 0 || b.link.losses() >= lost+5 })
	heal()
	w := locktest.Won(t, won)
	b.release(t, w)
}

func TestShortWait(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	asked := time.Now()
	created := b.sends(opCreate)
	b.WatchAfter(long)
	won := b.waits(t, g, long)
	locktest.Release(t, a, g)
	w := locktest.Won(t, won)
	require.Greater(t, w.Fence, g.Fence)
	require.False(t, w.Start.Before(asked))
	require.False(t, w.Start.After(<-created))
	require.Zero(t, b.link.sent(opSetData))
	locktest.Release(t, b, w)
	locktest.Receive(t, w.Lost)
	// opExists is for the session timeout.
	for op, want := range map[int32]int{opCreate: 1, opExists: 1, opGetChildren: 1, opGetData: 1, opDelete: 1} {
		require.Equal(t, want, b.link.sent(op), "requests of kind %d", op)
	}
}

func TestNodeGoneBeforeTheGrant(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	r := locktest.Next(key, moderate)
	won := locktest.Acquire(t.Context(), b, r)
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
	locktest.Release(t, a, g)
	w := locktest.Receive(t, won)
	require.ErrorIs(t, w.Err, dlock.ErrLost, "got token %d", w.G.Fence)
}

func TestQueueChangesMeanwhile(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	b.link.once(opGetData, func() { assert.NoError(t, a.Release(t.Context(), g)) }) // before it watches the first
	won := locktest.Acquire(t.Context(), b, locktest.Next(key, long))
	locktest.Release(t, b, locktest.Won(t, won))

	b.link.once(opCreate, func() {
		var err error
		g, err = a.TryAcquire(t.Context(), locktest.Next(key, long))
		assert.NoError(t, err)
	})
	ctx, cancel := context.WithTimeout(t.Context(), locktest.Timeout)
	defer cancel()
	_, err := b.TryAcquire(ctx, locktest.Next(key, long))
	require.ErrorIs(t, err, dlock.ErrHeld)
	require.Len(t, a.nodes(t, key), 1)
	locktest.Release(t, a, g)

	g = a.take(t, key, short)
	zklock.Stall(g)
	b.link.once(opDelete, func() { a.drop(t, key, g.Owner) }) // as if its lease had expired
	locktest.Won(t, locktest.Acquire(t.Context(), b, locktest.Next(key, long)))
}

// The client's server may lag: a refusal and an undoing depend on the queue as it is behind a write.
func TestQueueIsUpToDate(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	a.take(t, key, long)
	_, err := b.TryAcquire(t.Context(), locktest.Next(key, long))
	require.ErrorIs(t, err, dlock.ErrHeld)
	require.Equal(t, 1, b.link.sent(opSetData))
	require.ErrorIs(t, b.Release(t.Context(), dlock.Grant{Key: key, Owner: "other", TTL: long}), dlock.ErrLost)
	require.Equal(t, 2, b.link.sent(opSetData))
}

func TestLateWriteIsLost(t *testing.T) {
	a := connect(t, server.Addr)
	a.link.once(opCreate, func() {
		time.Sleep(short) // so that it must write
		a.link.once(opSetData, func() { a.link.inject(loseReplies, 0) })
	})
	ctx, cancel := context.WithTimeout(t.Context(), locktest.Timeout)
	defer cancel()
	_, err := a.TryAcquire(ctx, locktest.Next(newKey(), short))
	require.Error(t, err)
	require.NoError(t, ctx.Err())
}

func TestNodeGoneBeforeItIsWatched(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	for _, age := range []time.Duration{short, long} { // detected by the watch, or by a renewal
		a.WatchAfter(age)
		g := a.take(t, key, long)
		b.drop(t, key, g.Owner)
		if age == long {
			require.ErrorIs(t, a.Renew(t.Context(), g), dlock.ErrLost)
		}
		locktest.Receive(t, g.Lost)
	}
}

func TestNodeGoneWhileWatched(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	a.WatchAfter(0)
	g := a.take(t, key, long)
	a.follows(t, key, g.Owner)
	require.False(t, zklock.Ended(g))
	b.drop(t, key, g.Owner)
	locktest.Eventually(t, func() bool { return zklock.Ended(g) })
}

func TestNodeGoneWhileWaiting(t *testing.T) {
	t.Run("third", func(t *testing.T) { // it reads the queue
		a, b, c, key := connect(t, server.Addr), connect(t, server.Addr), connect(t, server.Addr), newKey()
		g := a.take(t, key, long)
		middle := c.waits(t, g, long)
		r := locktest.Next(key, long)
		won := locktest.Acquire(t.Context(), b, r)
		b.follows(t, key, g.Owner)
		b.link.muffle(nodePrefix(key, r.Owner))
		b.drop(t, key, r.Owner)
		locktest.Release(t, a, g)
		locktest.Won(t, middle)
		w := locktest.Receive(t, won)
		require.ErrorIs(t, w.Err, dlock.ErrLost, "got token %d", w.G.Fence)
	})
	t.Run("second", func(t *testing.T) { // it is notified
		for _, released := range []bool{true, false} {
			a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
			b.WatchAfter(0)
			g := a.take(t, key, long)
			r := locktest.Next(key, long)
			won := locktest.Acquire(t.Context(), b, r)
			b.follows(t, key, g.Owner)
			b.follows(t, key, r.Owner)
			b.drop(t, key, r.Owner)
			if released {
				locktest.Release(t, a, g)
			}
			w := locktest.Receive(t, won)
			require.ErrorIs(t, w.Err, dlock.ErrLost, "got token %d", w.G.Fence)
		}
	})
}

func TestLeaseRunsOut(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	a.WatchAfter(short / 2)
	began := time.Now()
	a.release(t, a.take(t, key, short))
	inTime := time.Since(began) < short/2
	g := a.take(t, key, short)
	locktest.Receive(t, g.Lost)
	require.GreaterOrEqual(t, time.Since(g.Start), short)
	if inTime {
		require.Equal(t, 2, a.link.sent(opDelete), "a lease that was released doesn't run out")
		require.LessOrEqual(t, a.link.sent(opGetChildren), 5, "nor is it watched: two reads for each, and the second's watch")
	}
	require.Empty(t, a.nodes(t, key))
	require.ErrorIs(t, a.Renew(t.Context(), g), dlock.ErrLost)
	require.Greater(t, b.take(t, key, long).Fence, g.Fence)
}

// Even if the node can't be deleted.
func TestRenewalTooLate(t *testing.T) {
	a := connect(t, server.Addr)
	b, err := zklock.New(a.conn, &zklock.Options{Root: "/" + uuid.NewString(), ACL: zk.WorldACL(zk.PermAll &^ zk.PermDelete)})
	require.NoError(t, err)
	g, err := b.TryAcquire(t.Context(), locktest.Next(newKey(), short))
	require.NoError(t, err)
	locktest.Eventually(t, func() bool { return a.link.sent(opDelete) > 0 })
	require.ErrorIs(t, b.Renew(t.Context(), g), dlock.ErrLost)
	ctx, cancel := context.WithTimeout(t.Context(), locktest.Timeout)
	defer cancel()
	_, err = b.Acquire(ctx, locktest.Next(g.Key, long))
	require.ErrorIs(t, err, zk.ErrNoAuth, "a waiter that can't delete it either")
}

// The lease lasts until the later end.
func TestEarlierRenewal(t *testing.T) {
	a := connect(t, server.Addr)
	g := a.take(t, newKey(), long)
	early := g
	early.TTL = time.Millisecond
	require.NoError(t, a.Renew(t.Context(), early))
	time.Sleep(50 * time.Millisecond)
	require.NoError(t, a.Renew(t.Context(), g))
	locktest.Release(t, a, g)
}

// The timer fires during a renewal or the release, or late.
func TestTimer(t *testing.T) {
	a := connect(t, server.Addr)
	g := a.take(t, newKey(), long)
	zklock.Expire(g)
	require.NoError(t, a.Renew(t.Context(), g))
	locktest.Release(t, a, g)

	g = a.take(t, newKey(), short)
	zklock.Stall(g)
	time.Sleep(time.Until(g.Start.Add(short)))
	require.ErrorIs(t, a.Renew(t.Context(), g), dlock.ErrLost)
}

func TestLeaseRunsOutWhileCutOff(t *testing.T) {
	for _, closed := range []bool{false, true} {
		a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
		g := a.take(t, key, short)
		heal := a.link.inject(loseRequests, 0)
		require.Error(t, a.Release(t.Context(), g)) // so that it isn't known to be lost
		if closed {
			require.NoError(t, a.Close())
		}
		locktest.Eventually(t, func() bool { return a.link.losses() > 2 })
		require.Len(t, b.nodes(t, key), 1)
		heal()
		locktest.Receive(t, g.Lost)
		require.Empty(t, b.nodes(t, key))
	}
}

// Reply codes that are unknown to the client.
const (
	throttled = -127
	overQuota = -125
)

// cantDelete returns an expired lease after so many deletes have been refused.
func (p party) cantDelete(t *testing.T, key string, code int32, times int) dlock.Grant {
	t.Helper()
	p.WatchAfter(long)
	g := p.take(t, key, short)
	p.link.refuses(opDelete, code)
	locktest.Eventually(t, func() bool { return p.link.sent(opDelete) > times })
	return g
}

func TestDeletionIsRefused(t *testing.T) {
	for _, code := range []int32{throttled, -1, -7} { // system error, timeout
		a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
		g := a.cantDelete(t, key, code, 4)
		require.Greater(t, time.Since(g.Start), short+(20+40+80+160)*time.Millisecond, "the pauses double")
		_, err := b.TryAcquire(t.Context(), locktest.Next(key, long))
		require.ErrorIs(t, err, dlock.ErrHeld)
		a.link.refuses(opDelete, 0)
		locktest.Receive(t, g.Lost)
		require.Greater(t, b.take(t, key, long).Fence, g.Fence)
	}
}

func TestDeletionIsNotRepeated(t *testing.T) {
	for _, code := range []int32{-101, -102} { // no node, no permission
		a := connect(t, server.Addr)
		g := a.cantDelete(t, newKey(), code, 0)
		if code == -101 {
			locktest.Receive(t, g.Lost)
		}
		time.Sleep(short)
		require.Equal(t, 1, a.link.sent(opDelete), code)
	}
}

func TestRefusedDeletionEnds(t *testing.T) {
	t.Run("session", func(t *testing.T) {
		a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
		g := a.cantDelete(t, key, throttled, 1)
		a.expire(t)()
		locktest.Receive(t, g.Lost)
		b.take(t, key, long)
	})
	t.Run("client", func(t *testing.T) {
		a, key := connect(t, server.Addr), newKey()
		g := a.cantDelete(t, key, throttled, 1)
		a.conn.Close()
		locktest.Receive(t, g.Lost)
	})
	t.Run("backend", func(t *testing.T) {
		a, key := connect(t, server.Addr), newKey()
		a.cantDelete(t, key, throttled, 1)
		require.NoError(t, a.Close())
		for try, sent := 0, -1; sent != a.link.sent(opDelete); time.Sleep(2 * time.Second) { // retries come within a second
			require.Less(t, try, 5, "retried for ever")
			try, sent = try+1, a.link.sent(opDelete)
		}
	})
}

func TestLeaseRunsOutBesideSilentCreates(t *testing.T) {
	locktest.Undisturbed(t, func(t *testing.T) (done bool) {
		a, b, key, other := connect(t, server.Addr), connect(t, server.Addr), newKey(), newKey()
		locktest.Release(t, a, a.take(t, other, long)) // creates the parent
		g := a.take(t, key, moderate)
		sent := a.link.sent(opCreate)
		heal := a.link.inject(holdReplies, 0)
		defer heal()
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		const many = 64 // more than the workers, and the most in flight
		var silent []<-chan locktest.Outcome
		for range many {
			silent = append(silent, locktest.Acquire(ctx, a, locktest.Next(other, long)))
		}
		locktest.Eventually(t, func() bool { return a.link.sent(opCreate) == sent+many })
		cancel()
		for _, s := range silent {
			require.ErrorIs(t, locktest.Receive(t, s).Err, context.Canceled)
		}
		if time.Since(g.Start) >= moderate {
			return false
		}
		locktest.Eventually(t, func() bool { return len(b.nodes(t, key)) == 0 })
		heal()
		locktest.Eventually(t, func() bool { return len(b.nodes(t, other)) == 0 })
		return true
	})
}

func TestHolderDeadAfterRenewals(t *testing.T) {
	a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
	g := a.take(t, key, short)
	won := locktest.Acquire(t.Context(), b, locktest.Next(key, long))
	var renewed time.Time
	for range 6 {
		now := time.Now()
		err := a.Renew(t.Context(), g)
		if errors.Is(err, dlock.ErrLost) {
			break // too slow
		}
		require.NoError(t, err)
		renewed = now
		time.Sleep(short / 3)
	}
	a.link.inject(cut, 0)
	a.link.drop()
	locktest.Won(t, won)
	require.GreaterOrEqual(t, time.Since(renewed), short)
}

func TestBroken(t *testing.T) {
	for _, err := range []error{
		zk.ErrConnectionClosed, zk.ErrNoServer, zk.ErrClosing, zk.ErrSessionExpired, zk.ErrSessionMoved, &net.OpError{Err: io.EOF},
	} {
		require.True(t, zklock.Broken(fmt.Errorf("zk: %w", err)), "%v", err)
	}
	for _, err := range []error{nil, zk.ErrNoNode, zk.ErrNoAuth, dlock.ErrHeld, zklock.CutShort(context.DeadlineExceeded)} {
		require.False(t, zklock.Broken(err), "%v", err)
	}
}

func TestRenewalUnseen(t *testing.T) {
	locktest.Undisturbed(t, func(t *testing.T) (done bool) {
		a, b, key := connect(t, server.Addr), connect(t, server.Addr), newKey()
		g := a.take(t, key, short)
		won := locktest.Acquire(t.Context(), b, locktest.Next(key, long))
		locktest.Eventually(t, func() bool { return len(won) > 0 || b.link.watches(nodePrefix(key, g.Owner)) })
		b.link.muffle("/")
		time.Sleep(short / 2)
		renewed := time.Now()
		err := a.Renew(t.Context(), g)
		a.link.inject(cut, 0)
		a.link.drop()
		locktest.Won(t, won)
		if errors.Is(err, dlock.ErrLost) {
			return false
		}
		require.NoError(t, err)
		require.GreaterOrEqual(t, time.Since(renewed), short)
		return true
	})
}

func TestNoHerd(t *testing.T) {
	const waiters = 30
	a, key := connect(t, server.Addr), newKey()
	g := a.take(t, key, long)
	all := make([]party, waiters)
	won := make([]<-chan locktest.Outcome, waiters)
	owners := []string{g.Owner, g.Owner} // watched by the second, and by each third
	for i := range all {
		all[i] = connect(t, server.Addr)
		all[i].WatchAfter(long)
		r := locktest.Next(key, long)
		won[i] = locktest.Acquire(t.Context(), all[i], r)
		all[i].follows(t, key, owners[i])
		owners = append(owners, r.Owner)
	}
	sent := func() (n []int) {
		for _, p := range all {
			n = append(n, p.link.sent(opGetChildren)+p.link.sent(opGetData)+p.link.sent(opSetData))
		}
		return n
	}
	for i := range all {
		before := sent()
		if i == 0 {
			locktest.Release(t, a, g)
		} else {
			require.NoError(t, all[i-1].Release(t.Context(), g))
		}
		w := locktest.Won(t, won[i])
		require.Greater(t, w.Fence, g.Fence)
		g = w
		if i+1 < waiters {
			locktest.Eventually(t, func() bool { return sent()[i+1] >= before[i+1]+2 })
			all[i+1].follows(t, key, g.Owner)
			before[i+1] += 2 // it reads the queue and the first node
		}
		require.Equal(t, before, sent(), "requests of the waiters when %d was granted the lock", i)
	}
}
