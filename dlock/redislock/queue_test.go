package redislock_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	minidriver "github.com/alicebob/miniredis/v2/server"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

const (
	handoff = time.Second      // of Backends on a virtual server
	longest = 30 * time.Second // for which a waiter doesn't poll
)

func TestRollCallKeepsTheOrder(t *testing.T) {
	q := hold(t, onServer(t, server))
	ps := q.c.Subscribe(t.Context(), "wake:frozen") // the first waiter subscribes but doesn't respond
	defer func() { require.NoError(t, ps.Close()) }()
	_, err := ps.Receive(t.Context())
	require.NoError(t, err)
	q.add("wake:frozen", "frozen")
	all := q.line(4)
	require.NoError(t, q.c.Del(t.Context(), q.lock()).Err()) // it expires
	_, err = q.backend().TryAcquire(t.Context(), locktest.Next(q.key, time.Hour))
	require.ErrorIs(t, err, dlock.ErrHeld)
	q.inOrder(all)
}

func (q *queue) many(n int, acquire func(ctx context.Context, i int)) (giveUp func()) {
	q.Helper()
	ctx, cancel := context.WithCancel(q.Context())
	var wg sync.WaitGroup
	for i := range n {
		if i%10 == 0 {
			synctest.Wait() // go-redis lets timers of one bubble out into another where a command waits for a connection
		}
		wg.Go(func() { acquire(ctx, i) })
	}
	q.queued(n)
	return func() {
		cancel()
		wg.Wait()
	}
}

// Waiters that give up while Redis doesn't respond leave soon after it does, by a few scripts, without delaying the next one.
func TestManyGiveUp(t *testing.T) {
	virtually(t, func(q *queue) {
		const waiters = 1200
		b, l, scripts := q.counting()
		locker, err := dlock.New(b, &dlock.Options{TTL: time.Hour})
		require.NoError(q, err)
		giveUp := q.many(waiters, func(ctx context.Context, _ int) {
			if _, err := locker.Acquire(ctx, q.key); !errors.Is(err, context.Canceled) || !errors.Is(err, dlock.ErrHeld) {
				panic(err)
			}
		})
		heal := l.Link().LoseRequests()
		giveUp()
		time.Sleep(10 * time.Second)
		require.Equal(q, waiters, q.len())
		heal()
		before := scripts()
		time.Sleep(2 * time.Second)
		require.Zero(q, q.len())
		require.LessOrEqual(q, scripts()-before, 6)
		w, began := q.line(1)[0], time.Now()
		q.release()
		require.Equal(q, began, w.wins(2).At)
		require.NoError(q, locker.Close())
	})
}

// Close tries each batch once more, or only one if the server doesn't respond.
func TestCloseWhileTheyLeave(t *testing.T) {
	for _, serves := range []bool{true, false} {
		virtually(t, func(q *queue) {
			q.s.opts.ContextTimeoutEnabled = true
			b, _, l := q.s.backend(q.T)
			giveUp := q.many(2500, func(ctx context.Context, i int) {
				_, _ = b.Acquire(ctx, dlock.Request{Key: q.key, Owner: fmt.Sprint(i), TTL: time.Hour})
			})
			fault := l.Link().HoldReplies
			if serves {
				fault = l.Link().LoseRequests
			}
			heal := fault()
			giveUp()
			time.Sleep(time.Minute)
			if serves {
				heal()
			}
			began := time.Now()
			require.NoError(q, b.Close())
			require.LessOrEqual(q, time.Since(began), 2500*time.Millisecond)
			if serves {
				require.Zero(q, q.len())
			}
			heal()
		})
	}
}

// Waiters that seem to subscribe but are dead cost the next one a HandoffTTL, however many they are.
func TestDeadBacklog(t *testing.T) {
	for _, processes := range []int{1, 50} {
		for _, leave := range []int{0, 20} { // before the hand-over, the one that polls often among them
			virtually(t, func(q *queue) {
				const backlog = 10_000
				q.deadBacklog(backlog, processes)
				o := q.s.options()
				o.Queue.Max = 2 * backlog
				b := newBackend(q.T, q.s.client(q.T, q.s.link()), o)
				other := locktest.Take(q, q.holder, locktest.Request(time.Hour)).Key
				ctx, cancel := context.WithCancel(q.Context())
				defer cancel()
				for i := range leave {
					locktest.Acquire(q.Context(), b, locktest.Next(other, time.Hour))
					locktest.Acquire(ctx, b, dlock.Request{Key: q.key, Owner: fmt.Sprint("leaves", i), TTL: time.Hour})
					q.queued(backlog + 1 + i)
				}
				w := q.join(b, "stays")
				time.Sleep(time.Minute)
				cancel()
				synctest.Wait()
				time.Sleep(handoff / 2)
				began := time.Now()
				q.release()
				require.LessOrEqual(q, w.wins(3).At.Sub(began), handoff+600*time.Millisecond)
			})
		}
	}
}

// Calls that undo requests of one key share batches, also while the last batch is being sent.
func TestManyUndone(t *testing.T) {
	b, _, _ := newMini(t).backend(t)
	key := locktest.Request(time.Hour).Key
	var wg sync.WaitGroup
	for i := range 32 {
		wg.Go(func() {
			for range 200 {
				r, want := locktest.Next(key, time.Hour), dlock.ErrLost
				if i == 0 { // of those in a batch one may have the lock
					want = nil
					if _, err := b.TryAcquire(t.Context(), r); err != nil {
						t.Error(err)
						return
					}
				}
				if err := b.Release(t.Context(), dlock.Grant{Key: key, Owner: r.Owner, TTL: r.TTL}); !errors.Is(err, want) {
					t.Errorf("undo: %v, want %v", err, want)
				}
			}
		})
	}
	wg.Wait()
}

func TestNotificationLost(t *testing.T) {
	q := hold(t, onServer(t, server))
	deaf, link := q.listener()
	lost := q.join(deaf, "deaf")
	heal := link.Link().LoseReplies() // the message breaks the connection
	q.release()
	locktest.Eventually(t, func() bool { return link.Lost() > 0 })
	heal()
	g := lost.wins(2).G // it polls over the new connection
	w := q.line(1)[0]
	require.NoError(t, deaf.Renew(t.Context(), g))
	locktest.Release(t, deaf, g)
	w.wins(3)
}

// Redis's errors about a counter are passed on: go-redis retries some, and leaves a server that is a replica now.
func TestErrorsOfTheCounter(t *testing.T) {
	srv := testmain.Own(t, testbed.StartRedis, &testbed.Options{Args: []string{"--min-replicas-to-write", "1"}})
	testbed.Need(t, srv.Real())
	b, _, _ := onServer(t, srv).backend(t)
	_, err := b.TryAcquire(t.Context(), locktest.Request(time.Hour))
	require.ErrorContains(t, err, "NOREPLICAS")
}

// After a planned failover a waiter may still subscribe to the old master, which relays what the new one publishes. The new
// one doesn't know of it, and must not notify it of a grant that it then takes back.
func TestSubscriberOfAnotherServer(t *testing.T) {
	master := testmain.Own(t, testbed.StartRedis, nil)
	replica, err := testbed.StartRedisReplica(t.Context(), master, nil)
	replica = testmain.Started(t, replica, err)
	q, old := hold(t, onServer(t, master)), onServer(t, replica)
	_, c, _ := old.backend(t)
	sub := c.Subscribe(t.Context(), "wake:far", "done")
	t.Cleanup(func() { require.NoError(t, sub.Close()) })
	for range 2 {
		_, err = sub.Receive(t.Context())
		require.NoError(t, err)
	}
	q.add("wake:far", "far")
	w := q.line(1)[0]
	q.release()
	w.wins(2)
	require.NoError(t, q.c.Publish(t.Context(), "done", "done").Err()) // after all earlier messages
	msg, err := sub.ReceiveMessage(t.Context())
	require.NoError(t, err)
	require.Equal(t, "done", msg.Payload, "what a waiter that was passed over has heard")
}

// A waiter gets the lock by a poll and outlives its lease; then another of its polls arrives, late. What that is granted is handed over.
func TestLatePollOfAHolder(t *testing.T) {
	q := hold(t, onServer(t, server))
	expire := func() { require.NoError(t, q.c.Del(t.Context(), q.lock()).Err()) }
	w := q.line(1)[0]
	entry := q.c.LIndex(t.Context(), q.list(), 0).Val()
	expire()
	require.NoError(t, q.c.Publish(t.Context(), strings.Fields(entry)[1], "lapsed "+q.lock()).Err()) // it polls
	g := w.wins(2).G
	expire()
	other := q.backend()
	successor := locktest.Take(t, other, locktest.Next(q.key, time.Hour))
	require.NoError(t, q.c.RPush(t.Context(), q.list(), entry).Err())
	next, began := q.line(1)[0], time.Now()
	locktest.Release(t, other, successor)
	next.wins(5)
	require.Less(t, time.Since(began), dlock.DefaultTTL/2, "no HandoffTTL has passed")
	require.ErrorIs(t, w.b.Release(t.Context(), g), dlock.ErrLost)
}

// A handed-over lease counts from its waiter's last poll, or from a new one if that is long ago.
func TestStartOfAHandedOverLease(t *testing.T) {
	for _, waited := range []time.Duration{0, handoff / 2, handoff/2 + 1, handoff - 1, handoff, 2 * handoff} {
		virtually(t, func(q *queue) {
			slow, link := q.listener()
			polled := time.Now()
			w := q.acquire(slow, "slow")
			synctest.Wait()
			deliver := link.Link().HoldReplies()
			q.release()
			time.Sleep(waited)
			deliver()
			came := locktest.Receive(q, w.came)
			require.NoError(q, came.Err)
			got := came.G
			require.Equal(q, time.Hour, got.TTL)
			if waited <= handoff/2 {
				require.Equal(q, polled, got.Start)
				require.Equal(q, handoff, got.Provisional)
			} else {
				require.Zero(q, got.Provisional)
				require.WithinRange(q, got.Start, polled.Add(waited).Add(-longest), came.At)
				require.Equal(q, "slow", q.c.Get(q.Context(), q.lock()).Val())
				require.Greater(q, q.c.PTTL(q.Context(), q.lock()).Val(), time.Hour-longest)
			}
		})
	}
}

func TestHandedOverLockLasts(t *testing.T) {
	virtually(t, func(q *queue) {
		h := q.handedOver(q.backend(), &dlock.Options{TTL: time.Minute}, 0)
		ttl := func() time.Duration { return q.c.PTTL(q.Context(), q.lock()).Val() }
		require.Equal(q, time.Minute, h.TTL())
		require.LessOrEqual(q, ttl(), handoff)
		time.Sleep(handoff / 2)
		synctest.Wait() // the renewal is due at this very time
		require.Greater(q, ttl(), 59*time.Second, "half a HandoffTTL after the hand-over")
		time.Sleep(30 * time.Second)
		require.NoError(q, h.Context().Err())
		require.NoError(q, h.Release(q.Context()))
	})
	virtually(t, func(q *queue) {
		h := q.handedOver(q.backend(), &dlock.Options{TTL: handoff}, 0)
		time.Sleep(handoff / 2)
		synctest.Wait()
		require.LessOrEqual(q, q.c.PTTL(q.Context(), q.lock()).Val(), handoff/2, "it lasts for its TTL anyway: no renewal")
		require.NoError(q, h.Release(q.Context()))
	})
}

// A stall of Redis at the hand-over ends the lease sooner by the time since its waiter's last poll: half its TTL at most.
func TestHandedOverLockBearsAStall(t *testing.T) {
	for waited, less := range map[time.Duration]time.Duration{0: 0, 4900 * time.Millisecond: 4900 * time.Millisecond, 5100 * time.Millisecond: 0} {
		virtually(t, func(q *queue) {
			l := q.s.link()
			h := q.handedOver(newBackend(q.T, q.s.client(q.T, l), nil), nil, waited)
			heal := l.Link().Cut()
			time.Sleep(dlock.DefaultTTL*49/50 - less)
			require.NoError(q, h.Context().Err())
			time.Sleep(dlock.DefaultTTL / 50)
			require.ErrorIs(q, context.Cause(h.Context()), dlock.ErrLost)
			heal()
			_ = h.Release(q.Context())
			time.Sleep(2 * time.Second) // until go-redis no longer tries to dial
		})
	}
}

// as returns the server for a user with these rules, and an admin's client.
func as(t *testing.T, rules ...any) (redisServer, *redis.Client) {
	t.Helper()
	testbed.Need(t, server.Real()) // ACL
	if server.Provider == testbed.External {
		t.Skip("needs a Redis whose users it may set")
	}
	s := onServer(t, server)
	_, admin, _ := s.backend(t)
	user := uuid.NewString()
	require.NoError(t, admin.Do(t.Context(), append([]any{"ACL", "SETUSER", user, "on", ">secret"}, rules...)...).Err())
	t.Cleanup(func() { require.NoError(t, admin.Do(context.Background(), "ACL", "DELUSER", user).Err()) })
	s.opts.Username, s.opts.Password = user, "secret"
	return s, admin
}

func TestUserWithoutPubSubCommand(t *testing.T) {
	for _, rule := range []string{"+pubsub", "-pubsub"} {
		s, admin := as(t, "~lock:*", "~fence:*", "~queue:*", "~fence-floor", "&wake:*", "+@all", "-@dangerous", rule)
		q := hold(t, s)
		q.c = admin
		all := q.line(3)
		q.release()
		q.inOrder(all)
	}
}

// Without queue:{KEY}:silent there is no roll call: an expired lease goes to the first waiter.
func TestUserWithoutRollCall(t *testing.T) {
	s, admin := as(t, "~lock:*", "~fence:*", "~queue:{*}", "~fence-floor", "&wake:*", "+@all", "-@dangerous")
	q := hold(t, s)
	q.c = admin
	all := q.line(3)
	require.NoError(t, q.c.Del(t.Context(), q.lock()).Err())
	_, err := q.backend().TryAcquire(t.Context(), locktest.Next(q.key, time.Hour))
	require.ErrorIs(t, err, dlock.ErrHeld)
	q.inOrder(all)
}

// The errors of Redis 6 and later for a key that is elsewhere while a Cluster moves the slot. The lock could be there too.
func TestNoRollCallWhileTheSlotMoves(t *testing.T) {
	m := miniredis.RunT(t)
	c := redis.NewClient(&redis.Options{Addr: m.Addr()})
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	b := newBackend(t, c, nil)
	require.NoError(t, c.RPush(t.Context(), "queue:{k}", "1000 wake:x x").Err())
	for _, who := range []string{"Script", "@user_script: 132: Lua script"} {
		m.Server().SetPreHook(func(p *minidriver.Peer, _ string, args ...string) bool {
			if !slices.Equal(args, []string{"queue:{k}:silent"}) {
				return false
			}
			p.WriteError("ERR " + who + " attempted to access a non local key in a cluster node")
			return true
		})
		_, err := b.TryAcquire(t.Context(), dlock.Request{Key: "k", Owner: "owner", TTL: time.Hour})
		require.ErrorIs(t, err, dlock.ErrHeld)
	}
}

// The waiter stays first until somebody may publish.
func TestUserWhoMayNotPublish(t *testing.T) {
	mute, admin := as(t, "~*", "resetchannels", "+@all")
	q := hold(t, mute)
	q.c, q.s = admin, onServer(t, server)
	w := q.line(1)[0]
	q.release()
	q.queued(1)
	channel := strings.Fields(q.c.LIndex(t.Context(), q.list(), 0).Val())[1]
	require.NoError(t, q.c.Publish(t.Context(), channel, "held 0 "+w.owner).Err())
	require.Greater(t, locktest.Won(t, w.came).Fence, uint64(1))
}

// Locks and the queue survive as far as Redis keeps them.
func TestRedisRestarts(t *testing.T) {
	srv := testmain.Own(t, testbed.StartRedis, &testbed.Options{Args: []string{"--appendonly", "yes", "--appendfsync", "always"}})
	q := hold(t, onServer(t, srv))
	all := q.line(3)
	require.NoError(t, srv.Kill(t.Context()))
	require.NoError(t, srv.Restart(t.Context()))
	locktest.Eventually(t, func() bool { return q.c.Ping(t.Context()).Err() == nil })
	release := func(b *redislock.Backend, g dlock.Grant) { // over a client whose connections may be broken
		for t.Context().Err() == nil {
			if err := b.Release(t.Context(), g); err == nil || errors.Is(err, dlock.ErrLost) {
				return
			}
		}
	}
	release(q.holder, q.g)
	// They may poll in another order than the queue's, but each is granted once.
	var wg sync.WaitGroup
	tokens := make([]uint64, len(all))
	for i, w := range all {
		wg.Go(func() {
			o := <-w.came
			release(w.b, o.G)
			tokens[i] = o.G.Fence // 0 after an error
		})
	}
	wg.Wait()
	slices.Sort(tokens)
	require.Positive(t, tokens[0])
	require.Len(t, slices.Compact(tokens), 3)
}
