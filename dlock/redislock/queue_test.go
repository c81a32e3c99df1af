package redislock_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

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
	handoff = time.Second            // of Backends on a virtual server
	grace   = 300 * time.Millisecond // that a process has to answer a roll call
	longest = 30 * time.Second       // for which a waiter doesn't poll
)

func TestDeadWaiterSkipped(t *testing.T) {
	virtually(t, func(q *queue) {
		dead, link := q.listener()
		q.join(dead, "dead")
		w := q.line(1)[0]
		defer link.Link().Cut()()
		synctest.Wait()
		require.Zero(q, w.wins(2, q.release()), "the wait for a dead waiter")
	})
}

// Waiters that subscribe and don't react cost one HandoffTTL and a roll call, however many they and their processes are.
func TestFrozenWaitersCostAHandoff(t *testing.T) {
	for _, c := range []struct{ frozen, processes int }{{1, 1}, {3, 1}, {3, 3}, {60, 1}, {60, 60}} {
		t.Run(fmt.Sprint(c), func(t *testing.T) {
			virtually(t, func(q *queue) {
				ps := q.c.Subscribe(q.Context())
				defer func() { require.NoError(q, ps.Close()) }()
				for i := range c.frozen {
					channel := fmt.Sprint("wake:frozen-", i%c.processes)
					require.NoError(q, ps.Subscribe(q.Context(), channel))
					q.add(channel, fmt.Sprint("frozen-", i))
				}
				go func() {
					for range ps.Channel() {
						continue // it hears, and does nothing
					}
				}()
				w := q.line(1)[0]
				time.Sleep(10 * time.Minute)
				w.costsAHandoff()
			})
		})
	}
}

// A server of a Cluster doesn't know who subscribes.
func TestDeadWaitersInACluster(t *testing.T) {
	virtually(t, func(q *queue) {
		cluster := func() *redislock.Backend {
			_, c, _ := q.s.backend(q.T)
			return newBackend(q.T, traced{c}, q.s.options())
		}
		q.holder = cluster()
		dead := func() {
			for i := range 30 {
				q.add(fmt.Sprint("wake:dead-", i), uuid.NewString())
			}
		}
		dead()
		w := q.join(cluster(), "first")
		dead()
		next := q.join(cluster(), "next")
		w.costsAHandoff()
		began := time.Now()
		w.release()
		require.Zero(q, next.wins(4, began), "the wait for the dead behind the first")
	})
}

func TestRollCallKeepsTheOrder(t *testing.T) {
	both(t, func(q *queue) {
		ps := q.c.Subscribe(q.Context(), "wake:frozen") // the first hears, and does nothing
		defer func() { require.NoError(q, ps.Close()) }()
		_, err := ps.Receive(q.Context())
		require.NoError(q, err)
		q.add("wake:frozen", "frozen")
		all := q.line(4)
		q.expire()
		q.tryHeld(q.backend())
		q.inOrder(all)
	})
}

// A process that had no waiter when it was called, but an entry that was on its way out, has one by the next roll call.
func TestJoiningAnswersARollCall(t *testing.T) {
	virtually(t, func(q *queue) {
		first, p := q.line(1)[0], q.backend()
		gone := q.join(p, "gone")
		channel := strings.Fields(q.c.LIndex(q.Context(), q.list(), -1).Val())[1]
		gone.cancel(nil)
		q.queued(1)
		q.add(channel, "gone")
		next := q.line(1)[0]
		q.expire()
		q.tryHeld(q.backend())
		first.granted()
		late := q.join(p, "late")
		time.Sleep(grace)
		q.expire()
		q.tryHeld(q.backend())
		next.granted()
		began := time.Now()
		next.release()
		late.granted()
		require.Zero(q, late.at.Sub(began), "it was taken off the queue untold")
	})
}

func TestRemovedWaiterComesBack(t *testing.T) {
	virtually(t, func(q *queue) {
		frozen, link := q.listener()
		late := q.join(frozen, "late")
		deliver := link.Link().HoldReplies()
		w := q.line(1)[0]
		q.expire()
		q.tryHeld(w.b)
		w.wins(2, q.g.Start)
		q.queued(0)
		deliver()
		synctest.Wait()
		require.Equal(q, 1, q.len(), "it has come back, as soon as it could")
		w.release()
		late.wins(3, q.g.Start)
	})
}

// many has n waiters join, each by acquire.
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

// Waiters that give up while Redis doesn't serve leave soon after it does, by a few scripts, and cost the next one nothing.
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
		w := q.line(1)[0]
		require.Zero(q, w.wins(2, q.release()))
		require.NoError(q, locker.Close())
	})
}

// It tries each batch once more, or one if the server doesn't serve.
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

// Calls that undo requests of one key share batches, also while the last batch is being sent.
func TestManyUndone(t *testing.T) {
	b, _, _ := newMini(t).backend(t)
	key := locktest.Request(time.Hour).Key
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			for range 200 {
				err := b.Release(t.Context(), dlock.Grant{Key: key, Owner: uuid.NewString(), TTL: time.Hour})
				if !errors.Is(err, dlock.ErrLost) {
					t.Errorf("undo of nothing: %v", err)
				}
			}
		})
	}
	wg.Wait()
}

// About once per HandoffTTL, and many no more often together than 200 times a second.
func TestWaitersHardlyPoll(t *testing.T) {
	const waiters = 60
	for _, l := range []struct {
		handoff     time.Duration
		least, most int // in a second
		seconds     int
	}{
		{0, waiters / 10, waiters / 5, 60}, // the default
		{10 * time.Millisecond, 200 * 9 / 10, 200 * 2, 5},
	} {
		virtually(t, func(q *queue) {
			q.s.handoff = l.handoff
			polled := 0
			var counts []func() int
			for i := range waiters {
				b, _, count := q.counting()
				q.join(b, fmt.Sprint(i))
				counts = append(counts, count)
				polled -= count()
			}
			time.Sleep(time.Duration(l.seconds) * time.Second)
			for _, count := range counts {
				polled += count()
			}
			require.GreaterOrEqual(q, polled, l.least*l.seconds*9/10)
			require.LessOrEqual(q, polled, l.most*l.seconds*11/10)
			q.expires()
		})
	}
}

// The waiter is granted the lock, and the others after it.
func TestNotificationLost(t *testing.T) {
	both(t, func(q *queue) {
		deaf, link := q.listener()
		lost := q.join(deaf, "deaf")
		heal := link.Link().LoseReplies() // the message breaks the connection
		q.release()
		require.Eventually(q, func() bool { return link.Lost() > 0 }, 30*time.Second, time.Millisecond)
		heal()
		lost.wins(2, q.g.Start) // it polls over the new connection
		w := q.line(1)[0]
		require.NoError(q, deaf.Renew(q.Context(), lost.g))
		lost.release()
		w.wins(3, q.g.Start)
	})
}

// It detects by the server's clock that its grant was over.
func TestNotificationTooLate(t *testing.T) {
	virtually(t, func(q *queue) {
		slow, link := q.listener()
		late := q.join(slow, "late")
		deliver := link.Link().HoldReplies()
		q.release()
		w := q.acquire(q.holder, "next") // behind it
		w.wins(3, q.g.Start)
		deliver()
		synctest.Wait()
		late.waits()
		w.release()
		late.wins(4, q.g.Start)
		require.False(q, late.g.Start.Before(w.g.Start))
	})
}

// What Redis answers of a counter is passed on: go-redis repeats some, and leaves a server that is a replica now.
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
	w.wins(2, q.g.Start)
	q.publishTo("done", "done") // behind all that was said before
	msg, err := sub.ReceiveMessage(t.Context())
	require.NoError(t, err)
	require.Equal(t, "done", msg.Payload, "what a waiter that was passed over has heard")
}

// It learns of it when it polls, and subscribes where the lock is.
func TestSubscriberOfAnotherServerComesOver(t *testing.T) {
	virtually(t, func(q *queue) {
		old, h := newMini(q.T), &hooks{}
		h.subscribe.Store(new(func(c *hooked, b []byte) (n int, err error) {
			if c.Conn, err = old.dial(q.Context(), "", ""); err == nil {
				n, err = c.Conn.Write(b)
			}
			return n, err
		}))
		w := q.join(q.s.hooked(q.T, h), "far")
		time.Sleep(longest + time.Second)
		require.Zero(q, w.wins(2, q.release()))
	})
}

// It is replaced, whatever the kernel says, and whether or not somebody waits. So is a sound connection without a
// subscription.
func TestSilentConnection(t *testing.T) {
	breaks := func(*hooked, []byte) (int, error) { return 0, io.ErrClosedPipe }
	refuses := func(c *hooked, b []byte) (int, error) { // as it does while it is busy with a script
		_, err := c.Conn.Write([]byte("*1\r\n$4\r\nbusy\r\n"))
		return len(b), err
	}
	for _, l := range []struct {
		name string
		idle time.Duration // before it dies; then nobody waits
		dead time.Duration // before the hand-over
		next func(*hooked, []byte) (int, error)
		most time.Duration
	}{
		{name: "at the hand-over", most: 4100 * time.Millisecond},
		{name: "before", dead: 5 * time.Second},
		{name: "of an idle Backend", idle: 10 * time.Minute, dead: 5 * time.Second},
		{name: "the next request breaks the connection", dead: 5 * time.Second, next: breaks},
		{name: "the server refuses the next", dead: 5 * time.Second, next: refuses},
	} {
		t.Run(l.name, func(t *testing.T) {
			virtually(t, func(q *queue) {
				q.s.handoff = time.Minute // so that it doesn't poll
				h := &hooks{}
				b := q.s.hooked(q.T, h)
				token := uint64(2)
				w := q.join(b, "w")
				if l.idle > 0 {
					q.release()
					w.wins(token, q.g.Start)
					q.holder, q.g = b, w.g
					token++
					require.NoError(q, b.Renew(q.Context(), q.g))
					time.Sleep(l.idle)
				}
				h.sub.Load().dead.Store(true)
				if l.next != nil {
					h.subscribe.Store(&l.next)
				}
				time.Sleep(l.dead)
				if l.idle > 0 {
					w = q.join(b, "next")
				}
				require.LessOrEqual(q, w.wins(token, q.release()), l.most)
			})
		})
	}
}

func TestSlowMessage(t *testing.T) {
	virtually(t, func(q *queue) {
		q.s.handoff = time.Minute
		var slow atomic.Bool
		h := &hooks{}
		h.read = func(c *hooked, b []byte) (int, error) {
			if h.sub.Load() != c {
				return c.Conn.Read(b)
			}
			n, err := c.Conn.Read(b[:1])
			if slow.Load() {
				time.Sleep(8 * time.Millisecond)
			}
			if !c.deadline.IsZero() && !time.Now().Before(c.deadline) {
				return 0, os.ErrDeadlineExceeded
			}
			return n, err
		}
		w := q.join(q.s.hooked(q.T, h), strings.Repeat("long", 20))
		slow.Store(true)
		began := q.release()
		require.Greater(q, w.wins(2, began), 1500*time.Millisecond, "it was slow")
		// The clock may stand still from the last poll to the release.
		require.False(q, w.g.Start.After(began), "it was granted by the message, and not when it polled")
	})
}

// It counts from its waiter's last poll, and from a new one if that is long ago.
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
			got := w.granted()
			require.Equal(q, time.Hour, got.TTL)
			if waited <= handoff/2 {
				require.Equal(q, polled, got.Start)
				require.Equal(q, handoff, got.Provisional)
			} else {
				require.Zero(q, got.Provisional)
				require.WithinRange(q, got.Start, polled.Add(waited).Add(-longest), w.at)
				require.Equal(q, "slow", q.owner())
				require.Greater(q, q.c.PTTL(q.Context(), q.lock()).Val(), time.Hour-longest)
			}
		})
	}
}

// The Locker renews it by itself.
func TestHandedOverLockLasts(t *testing.T) {
	virtually(t, func(q *queue) {
		h := q.handedOver(q.backend(), &dlock.Options{TTL: time.Minute})
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
}

// A stall of Redis ends it no sooner than one that was free.
func TestHandedOverLockBearsAStall(t *testing.T) {
	virtually(t, func(q *queue) {
		l := q.s.link()
		h := q.handedOver(newBackend(q.T, q.s.client(q.T, l), nil), nil)
		heal := l.Link().Cut()
		time.Sleep(dlock.DefaultTTL * 9 / 10)
		require.NoError(q, h.Context().Err())
		heal()
		require.NoError(q, h.Release(q.Context()))
	})
}

// as returns the server for a user with rules, and an admin's client.
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

// The waiter stays first until somebody may publish.
func TestUserWhoMayNotPublish(t *testing.T) {
	mute, admin := as(t, "~*", "resetchannels", "+@all")
	q := hold(t, mute)
	q.c, q.s = admin, onServer(t, server)
	w := q.line(1)[0]
	q.release()
	q.queued(1)
	q.publish("held 0 " + w.owner)
	require.Greater(t, w.granted().Fence, uint64(1))
}

func TestForgottenQueueExpires(t *testing.T) {
	virtually(t, func(q *queue) {
		b, link := q.listener()
		w := q.join(b, "dead")
		heal := link.Link().Cut()
		q.expires()
		w.cancel(nil)
		<-w.done
		heal()
		q.add("wake:dead", "dead")
		q.line(1)[0].cancel(nil)
		q.expire()
		time.Sleep(2*time.Minute + time.Millisecond)
		require.Zero(q, q.c.Exists(q.Context(), q.list(), q.lock()).Val())
	})
}

// It may learn by polling that it has the lock. The notification, read later, must not release the lock under it; nor
// before its holder does, who would get ErrLost.
func TestHandedOverWhileTheReplyWasLost(t *testing.T) {
	for _, releases := range []bool{false, true} {
		both(t, func(q *queue) {
			q.s.warm(q.T)
			var send, lose atomic.Pointer[func()] // done at the next script: before it is sent, or when its reply is lost
			done := func(c *hooked, at *atomic.Pointer[func()]) bool {
				f := (*func())(nil)
				if c.script.Load() {
					f = at.Swap(nil)
				}
				if f != nil {
					(*f)()
				}
				return f != nil
			}
			b := q.s.hooked(q.T, &hooks{
				write: func(c *hooked, b []byte) (int, error) {
					done(c, &send)
					return c.Conn.Write(b)
				},
				read: func(c *hooked, b []byte) (int, error) {
					n, err := c.Conn.Read(b)
					if err == nil && done(c, &lose) {
						_ = c.Close()
						return 0, io.EOF
					}
					return n, err
				},
			})
			other := hold(q.T, q.s)
			first := other.join(b, "first")
			other.release()
			first.granted()
			heard := func() { // returns when b has read all that it was told; it has acted on that when it is closed
				second := other.join(b, "second")
				require.NoError(q, other.holder.Release(q.Context(), first.g)) // in the first's name
				second.granted()                                               // by a message behind all others
			}

			lose.Store(new(func() { q.release() })) // to mine, which is in the queue
			won := q.acquire(b, "mine")
			won.wins(2, q.g.Start)
			if releases {
				send.Store(new(func() {
					heard()
					require.NoError(q, b.Close())
				}))
				won.release()
				require.Zero(q, q.c.Exists(q.Context(), q.lock()).Val())
				return
			}
			heard()
			require.NoError(q, b.Close())
			require.Equal(q, "mine", q.owner(), "after the message was read")
		})
	}
}

// They wait for it together, and retry when they come again. One whose context ends, or whose Backend is closed, returns.
func TestSubscriptionNotConfirmed(t *testing.T) {
	virtually(t, func(q *queue) {
		b, link := q.listener()
		heal := link.Link().HoldReplies()
		began := time.Now()
		var all []*waiting
		for i := range 4 {
			all = append(all, q.acquire(b, fmt.Sprint(i)))
			time.Sleep(time.Second - 1)
		}
		for _, w := range all {
			<-w.done
			require.ErrorContains(q, w.err, "subscribe")
			require.NotErrorIs(q, w.err, context.Canceled)
			require.Equal(q, 4*time.Second, w.at.Sub(began))
		}
		heal()
		w := q.join(b, "again")
		q.release()
		w.granted()
	})
	virtually(t, func(q *queue) {
		b, link := q.listener()
		link.Link().HoldReplies()
		began := time.Now()
		gone, stays := q.acquire(b, "gone"), q.acquire(b, "stays")
		time.Sleep(time.Second)
		why := errors.New("enough")
		gone.cancel(why)
		<-gone.done
		require.ErrorIs(q, gone.err, why)
		require.NoError(q, b.Close())
		<-stays.done
		require.ErrorIs(q, stays.err, dlock.ErrClosed)
		require.Equal(q, time.Second, time.Since(began))
	})
}

// So do the locks and the queue, as far as Redis keeps them.
func TestRedisRestarts(t *testing.T) {
	srv := testmain.Own(t, testbed.StartRedis, &testbed.Options{Args: []string{"--appendonly", "yes", "--appendfsync", "always"}})
	q := hold(t, onServer(t, srv))
	all := q.line(3)
	require.NoError(t, srv.Kill(t.Context()))
	require.NoError(t, srv.Restart(t.Context(), testbed.RestartOptions{}))
	require.Eventually(t, func() bool { return q.c.Ping(t.Context()).Err() == nil }, 30*time.Second, 10*time.Millisecond)
	release := func(b *redislock.Backend, g dlock.Grant) { // over a client whose connections may be broken
		for t.Context().Err() == nil {
			if err := b.Release(t.Context(), g); err == nil || errors.Is(err, dlock.ErrLost) {
				return
			}
		}
	}
	release(q.holder, q.g)
	// They may ask in another order than that of the queue, but nobody is lost and nobody is granted twice.
	var wg sync.WaitGroup
	for _, w := range all {
		wg.Go(func() {
			<-w.done
			release(w.b, w.g)
		})
	}
	wg.Wait()
	tokens := map[uint64]bool{}
	for _, w := range all {
		tokens[w.granted().Fence] = true
	}
	require.Len(t, tokens, 3)
}
