package etcdlock_test

import (
	"context"
	"errors"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/stretchr/testify/require"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/namespace"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/etcdlock"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// handOver has a lock go from a to b. An election in between may fail it.
func handOver(t *testing.T, a, b node) error {
	t.Helper()
	r := request(time.Hour)
	g, err := a.TryAcquire(t.Context(), r)
	if err != nil {
		return err
	}
	answers, _ := b.l.told()
	came := make(chan outcome, 1)
	go func() {
		g, err := b.Acquire(t.Context(), dlock.Request{Key: r.Key, Owner: uuid.NewString(), TTL: r.TTL})
		came <- outcome{g: g, err: err}
	}()
	until(t, func() bool { // it waits
		now, _ := b.l.told()
		return now > answers || len(came) > 0
	})
	until(t, func() bool {
		err = a.Release(t.Context(), g)
		return err == nil || errors.Is(err, dlock.ErrLost)
	})
	o := receive(t, came)
	if o.err == nil {
		o.err = b.Release(t.Context(), o.g)
	}
	return o.err
}

// until has f called until it returns true.
func until(t *testing.T, f func() bool) {
	t.Helper()
	for began := time.Now(); !f(); time.Sleep(time.Millisecond) {
		require.Less(t, time.Since(began), 30*time.Second)
	}
}

// onlyFrom has locks handed over until none but one member has answered, and told of it.
func onlyFrom(t *testing.T, member uint64, a, b node) {
	t.Helper()
	until(t, func() bool {
		_, before := b.l.told()
		err := handOver(t, a, b)
		_, events := b.l.told()
		who := slices.Concat(a.l.whoAnswered(), b.l.whoAnswered())
		return err == nil && events > before && !slices.ContainsFunc(who, func(m uint64) bool { return m != member })
	})
}

// byLeader has locks handed over to b until it follows the leader, and returns by which connection.
func byLeader(t *testing.T, a, b node) (leader *grpc.ClientConn) {
	t.Helper()
	until(t, func() bool {
		require.NoError(t, handOver(t, a, b))
		sent, heard := b.l.by()
		leader = sent
		return sent == heard && sent != b.c.ActiveConnection()
	})
	return leader
}

// A Backend sends its transactions to the leader, and is told of its turns by that one, whoever it is.
func TestByWayOfTheLeader(t *testing.T) {
	if three.Servers[0].Provider == testbed.External {
		t.Skip("moves the lead")
	}
	a, b := newNode(t, three), newNode(t, three)
	leads := func() (clientv3.StatusResponse, *testbed.Server) {
		s, err := three.Leader(t.Context())
		require.NoError(t, err)
		st, err := a.c.Status(t.Context(), s.Addr)
		require.NoError(t, err)
		return *st, s
	}
	st, server := leads()
	onlyFrom(t, st.Header.MemberId, a, b)

	c, err := clientv3.New(clientv3.Config{Endpoints: []string{server.Addr}, Logger: zap.NewNop()})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	all, err := c.MemberList(t.Context())
	require.NoError(t, err)
	for _, m := range all.Members {
		if m.ID != st.Leader {
			_, err := c.MoveLeader(t.Context(), m.ID)
			require.NoError(t, err)
			break
		}
	}
	now, _ := leads()
	require.NotEqual(t, st.Leader, now.Leader)
	onlyFrom(t, now.Leader, a, b)
}

// A leader that gives no answer is asked no more, whether or not anybody still waits for one.
func TestSilentLeader(t *testing.T) {
	for _, c := range []struct {
		name     string
		patience time.Duration // of the one that gets no answer
		another  bool          // gets one after that one has asked
	}{{"waiting", time.Hour, false}, {"given up", 50 * time.Millisecond, false}, {"another was answered", time.Hour, true}} {
		t.Run(c.name, func(t *testing.T) {
			undisturbed(t, func(t *testing.T) (done bool) {
				a, b := newNode(t, three), newNode(t, three)
				leader := byLeader(t, a, b)
				acquire := func(patience time.Duration) (came chan error, sent bool) {
					calls, _, _ := b.l.counts(txn)
					came = make(chan error, 1)
					go func() {
						ctx, cancel := context.WithTimeout(t.Context(), patience)
						defer cancel()
						_, err := b.Acquire(ctx, request(time.Hour))
						came <- err
					}()
					until(t, func() bool {
						now, _, _ := b.l.counts(txn)
						sent = now > calls
						return sent || len(came) > 0
					})
					return came, sent
				}
				answer := func() {}
				var answered chan error
				if c.another {
					answer = b.l.inject(delayOneRequest)
					answered, _ = acquire(time.Hour)
				}
				_, watches, _ := b.l.counts(txn)
				b.l.mu.Lock()
				b.l.silent = leader
				b.l.mu.Unlock()
				unanswered, sent := acquire(c.patience)
				if answer(); c.another {
					require.NoError(t, receive(t, answered))
				}
				if by, _ := b.l.by(); by != leader || !sent { // the machine stood still for so long that it was left before
					return false
				}
				b.watches(t, watches+1) // another way
				now, _ := acquire(time.Hour)
				require.NoError(t, receive(t, now))
				if c.patience < time.Hour {
					require.ErrorIs(t, receive(t, unanswered), context.DeadlineExceeded)
					return true
				}
				require.Empty(t, unanswered)
				require.NoError(t, b.Close())
				require.ErrorIs(t, receive(t, unanswered), dlock.ErrClosed)
				return true
			})
		})
	}
}

// A member that leads no more, and knows none that does, is left when it says so.
func TestLeaderless(t *testing.T) {
	t.Run("asked", func(t *testing.T) {
		undisturbed(t, func(t *testing.T) (done bool) {
			a, b := newNode(t, three), newNode(t, three)
			leader := byLeader(t, a, b)
			b.l.mu.Lock()
			b.l.leaderless = leader
			b.l.mu.Unlock()
			_, err := b.TryAcquire(t.Context(), request(time.Hour))
			if by, _ := b.l.by(); by != leader {
				return false
			}
			require.ErrorContains(t, err, "no leader")
			require.NoError(t, handOver(t, a, b))
			return true
		})
	})
	t.Run("watched", func(t *testing.T) { // and not asked anything
		a, b := newNode(t, three), newNode(t, three)
		leader := byLeader(t, a, b)
		b.l.mu.Lock()
		b.l.leaderless = leader
		close(b.l.broken)
		b.l.broken = make(chan struct{})
		b.l.mu.Unlock()
		until(t, func() bool { return b.l.watchedBy() != leader })
		require.NoError(t, handOver(t, a, b))
	})
}

// A session's end is no reason to leave the leader.
func TestSessionEndsLeaderStays(t *testing.T) {
	undisturbed(t, func(t *testing.T) (done bool) {
		a, b := newNode(t, three), newNode(t, three)
		leader := byLeader(t, a, b)
		held := a.take(t, request(2*time.Hour))
		r, came := b.waits(t, held.Key, 2*time.Hour) // on a session of its own
		b.revoke(t, r)
		require.ErrorIs(t, receive(t, came).err, dlock.ErrLost)
		b.take(t, request(2*time.Hour)) // with another session, when it finds that the old one has ended
		require.NoError(t, handOver(t, a, b))
		sent, heard := b.l.by()
		return sent == leader && heard == leader // else it was left because the machine stood still, or always is
	})
}

// A client that is told of other endpoints may talk to another cluster: nothing goes to the leader of the old one.
func TestOtherCluster(t *testing.T) {
	a, b, other := newNode(t, three), newNode(t, three), newNode(t, one)
	byLeader(t, a, b)
	b.c.SetEndpoints(one.Addrs()...)
	cluster := func(n node) uint64 {
		resp, err := n.c.Get(t.Context(), "any", clientv3.WithCountOnly())
		require.NoError(t, err)
		return resp.Header.ClusterId
	}
	until(t, func() bool { return cluster(b) == cluster(other) })
	r := request(time.Hour)
	b.take(t, r)
	r.Owner = "another"
	_, err := other.TryAcquire(t.Context(), r)
	require.ErrorIs(t, err, dlock.ErrHeld)
}

// Where connecting blocks, nobody waits for a search among endpoints of which one is dead.
func TestCloseDuringASearch(t *testing.T) {
	ln, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, ln.Close())
	c, err := clientv3.New(clientv3.Config{
		Endpoints: append([]string{ln.Addr().String()}, three.Addrs()...), Logger: zap.NewNop(),
		DialOptions: []grpc.DialOption{grpc.WithBlock()}, //nolint:staticcheck // it is what clientv3 recommends
	})
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	b := newBackend(t, c, &etcdlock.Options{FollowLeader: true})
	r := request(time.Hour)
	g, err := b.TryAcquire(t.Context(), r)
	require.NoError(t, err)
	require.NoError(t, b.Release(t.Context(), g))
	closed := make(chan error, 1)
	go func() { closed <- b.Close() }()
	require.NoError(t, receive(t, closed))
}

// What a client has put before all names isn't bypassed.
func TestFollowLeaderRefuses(t *testing.T) {
	for part, replace := range map[string]func(*clientv3.Client){
		"KV":      func(c *clientv3.Client) { c.KV = namespace.NewKV(c.KV, "mine/") },
		"Watcher": func(c *clientv3.Client) { c.Watcher = namespace.NewWatcher(c.Watcher, "mine/") },
	} {
		c := client(t, three, newLink())
		replace(c)
		_, err := etcdlock.New(c, &etcdlock.Options{FollowLeader: true})
		require.ErrorIs(t, err, dlock.ErrInvalid)
		require.ErrorContains(t, err, "would bypass the client's "+part)
		b := newBackend(t, c, nil)
		require.NoError(t, b.Close())
	}
}
