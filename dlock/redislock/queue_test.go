package redislock_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
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
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

const claim = time.Second // of Backends on a virtual server

// waiting is a call of Acquire.
type waiting struct {
	b      *redislock.Backend
	r      dlock.Request
	cancel context.CancelCauseFunc
	done   chan struct{}
	g      dlock.Grant
	err    error
	at     time.Time
}

func wait(t *testing.T, b *redislock.Backend, r dlock.Request) *waiting {
	t.Helper()
	ctx, cancel := context.WithCancelCause(t.Context())
	w := &waiting{b: b, r: r, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(w.done)
		w.g, w.err = b.Acquire(ctx, r)
		w.at = time.Now()
	}()
	t.Cleanup(func() {
		cancel(nil)
		<-w.done
	})
	return w
}

// granted returns the grant once it is there.
func (w *waiting) granted(t *testing.T) dlock.Grant {
	t.Helper()
	select {
	case <-w.done:
	case <-time.After(30 * time.Second):
		require.FailNow(t, "still waiting")
	}
	require.NoError(t, w.err)
	return w.g
}

// queued returns once n wait for key.
func queued(t *testing.T, c *redis.Client, key string, n int) {
	t.Helper()
	require.Eventually(t, func() bool { return c.LLen(t.Context(), "queue:{"+key+"}").Val() == int64(n) },
		30*time.Second, time.Millisecond, "%d waiters", n)
}

// line has n Backends wait for r's key in turn.
func line(t *testing.T, s redisServer, c *redis.Client, r dlock.Request, n int) []*waiting {
	t.Helper()
	before := int(c.LLen(t.Context(), "queue:{"+r.Key+"}").Val())
	all := make([]*waiting, n)
	for i := range all {
		b, _, _ := s.backend(t)
		all[i] = wait(t, b, dlock.Request{Key: r.Key, Owner: uuid.NewString(), TTL: r.TTL})
		queued(t, c, r.Key, before+i+1)
	}
	return all
}

// hold has a Backend take r's lock.
func hold(t *testing.T, s redisServer, r dlock.Request) (*redislock.Backend, *redis.Client, dlock.Grant) {
	t.Helper()
	b, c, _ := s.backend(t)
	g, err := b.TryAcquire(t.Context(), r)
	require.NoError(t, err)
	return b, c, g
}

func TestQueueIsFIFO(t *testing.T) {
	onBoth(t, func(t *testing.T, s redisServer) {
		r := request(time.Hour)
		a, c, g := hold(t, s, r)
		all := line(t, s, c, r, 8)
		require.NoError(t, a.Release(t.Context(), g))
		for i, w := range all {
			require.EqualValues(t, i+2, w.granted(t).Fence)
			for _, later := range all[i+1:] {
				select {
				case <-later.done:
					require.Fail(t, "granted out of turn")
				default:
				}
			}
			require.Equal(t, w.r.Owner, c.Get(t.Context(), "lock:{"+r.Key+"}").Val())
			_, err := a.TryAcquire(t.Context(), request(time.Hour)) // another key
			require.NoError(t, err)
			_, err = a.TryAcquire(t.Context(), dlock.Request{Key: r.Key, Owner: "barger", TTL: time.Hour})
			require.ErrorIs(t, err, dlock.ErrHeld)
			require.NoError(t, w.b.Release(t.Context(), w.g))
		}
		require.Equal(t, []string{"fence:{" + r.Key + "}"}, c.Keys(t.Context(), "*{"+r.Key+"}").Val(), "what an idle key leaves")
	})
}

// Whatever the order in which contenders ask, it is the order in which they are granted, each over connections of its own.
func TestQueueIsFair(t *testing.T) {
	s := onServer(t, server)
	r := request(time.Hour)
	a, c, g := hold(t, s, r)
	var all []*redislock.Backend
	for range 12 {
		b, _, _ := s.backend(t)
		all = append(all, b)
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range 5 {
		var (
			wg    sync.WaitGroup
			asked = random.Perm(len(all))
			got   []int // guarded by the lock under test
			errs  = make(chan error, len(all))
		)
		for n, i := range asked {
			wg.Go(func() {
				g, err := all[i].Acquire(t.Context(), dlock.Request{Key: r.Key, Owner: uuid.NewString(), TTL: time.Hour})
				if err == nil {
					got = append(got, i)
					err = all[i].Release(t.Context(), g)
				}
				errs <- err
			})
			queued(t, c, r.Key, n+1)
		}
		require.NoError(t, a.Release(t.Context(), g))
		wg.Wait()
		for range all {
			require.NoError(t, <-errs)
		}
		require.Equal(t, asked, got)
		var err error
		g, err = a.TryAcquire(t.Context(), r)
		require.NoError(t, err)
	}
}

// A waiter whose connection is gone costs nothing.
func TestDeadWaiterSkipped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		r := request(time.Hour)
		a, c, g := hold(t, s, r)
		dead, link := s.listener(t)
		wait(t, dead, dlock.Request{Key: r.Key, Owner: "dead", TTL: time.Hour})
		queued(t, c, r.Key, 1)
		w := line(t, s, c, r, 1)[0]
		defer link.Link().Cut()()
		synctest.Wait()
		began := time.Now()
		require.NoError(t, a.Release(t.Context(), g))
		require.EqualValues(t, 2, w.granted(t).Fence)
		require.Zero(t, w.at.Sub(began), "the wait for a dead waiter")
	})
}

// listener returns a Backend over a link that disturbs all that it says and hears, news included.
func (s redisServer) listener(t *testing.T) (*redislock.Backend, *dlocktest.Dialer) {
	t.Helper()
	l := dlocktest.NewDialer(s.dial, func(request []byte) bool { return bytes.Contains(request, []byte("subscribe")) })
	return newBackend(t, s.client(t, l), s.options()), l
}

// Waiters that listen and don't stir cost one Claim and the time to call them, however many they are, of however many processes.
func TestFrozenWaitersCostAClaim(t *testing.T) {
	for _, frozen := range []int{1, 3, 60} {
		for _, processes := range []int{1, frozen} {
			t.Run(fmt.Sprint(frozen, " of ", processes), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					s := newMini(t)
					r := request(time.Hour)
					a, c, g := hold(t, s, r)
					ps := c.Subscribe(t.Context())
					defer func() { require.NoError(t, ps.Close()) }()
					for i := range frozen {
						channel := fmt.Sprint("wake:frozen-", i%processes)
						require.NoError(t, ps.Subscribe(t.Context(), channel))
						require.NoError(t, c.RPush(t.Context(), "queue:{"+r.Key+"}", fmt.Sprintf("1000 %s frozen-%d", channel, i)).Err())
					}
					go func() {
						for range ps.Channel() {
							continue // it hears, and does nothing
						}
					}()
					w := line(t, s, c, r, 1)[0]
					time.Sleep(10 * time.Minute)
					requireOneClaim(t, a, g, w)
				})
			})
		}
	}
}

// requireOneClaim has g's lock handed to a dead waiter, and w is granted it soon after.
func requireOneClaim(t *testing.T, a *redislock.Backend, g dlock.Grant, w *waiting) {
	t.Helper()
	began := time.Now()
	require.NoError(t, a.Release(t.Context(), g))
	require.EqualValues(t, 3, w.granted(t).Fence, "the second token was lost to a dead waiter")
	cost := w.at.Sub(began)
	require.GreaterOrEqual(t, cost, claim)
	require.LessOrEqual(t, cost, claim+grace+200*time.Millisecond)
}

// grace is how long a process has to answer a roll call.
const grace = 300 * time.Millisecond

// In a Cluster, where a server doesn't know who listens, dead waiters cost no more.
func TestDeadWaitersInACluster(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		r := request(time.Hour)
		_, c, _ := s.backend(t)
		cluster := func() *redislock.Backend {
			_, c, _ := s.backend(t)
			return newBackend(t, traced{c}, s.options())
		}
		a := cluster()
		g, err := a.TryAcquire(t.Context(), r)
		require.NoError(t, err)
		dead := func() {
			for i := range 30 {
				require.NoError(t, c.RPush(t.Context(), "queue:{"+r.Key+"}", fmt.Sprintf("1000 wake:dead-%d %s", i, uuid.NewString())).Err())
			}
		}
		dead()
		w := wait(t, cluster(), dlock.Request{Key: r.Key, Owner: "first", TTL: time.Hour})
		queued(t, c, r.Key, 31)
		dead()
		next := wait(t, cluster(), dlock.Request{Key: r.Key, Owner: "next", TTL: time.Hour})
		queued(t, c, r.Key, 62)
		requireOneClaim(t, a, g, w)
		began := time.Now()
		require.NoError(t, w.b.Release(t.Context(), w.g))
		require.EqualValues(t, 4, next.granted(t).Fence)
		require.Zero(t, next.at.Sub(began), "the wait for the dead behind the first")
	})
}

// A roll call changes nothing for those that live: they are granted the lock in the order in which they came.
func TestRollCallKeepsTheOrder(t *testing.T) {
	onBoth(t, func(t *testing.T, s redisServer) {
		r := request(time.Hour)
		_, c, _ := hold(t, s, r)
		all := line(t, s, c, r, 4)
		require.NoError(t, c.Del(t.Context(), "lock:{"+r.Key+"}").Err()) // as when the lease runs out
		barger, _, _ := s.backend(t)
		_, err := barger.TryAcquire(t.Context(), dlock.Request{Key: r.Key, Owner: "barger", TTL: time.Hour})
		require.ErrorIs(t, err, dlock.ErrHeld)
		for i, w := range all {
			require.EqualValues(t, 2+i, w.granted(t).Fence)
			require.NoError(t, w.b.Release(t.Context(), w.g))
		}
	})
}

// One that was struck, since it was frozen for too long, joins the queue again.
func TestStruckWaiterComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		r := request(time.Hour)
		_, c, _ := hold(t, s, r)
		frozen, link := s.listener(t)
		late := wait(t, frozen, dlock.Request{Key: r.Key, Owner: "late", TTL: time.Hour})
		queued(t, c, r.Key, 1)
		deliver := link.Link().HoldReplies()
		w := line(t, s, c, r, 1)[0]
		require.NoError(t, c.Del(t.Context(), "lock:{"+r.Key+"}").Err())
		try := func() (dlock.Grant, error) {
			return w.b.TryAcquire(t.Context(), dlock.Request{Key: r.Key, Owner: "asker", TTL: time.Hour})
		}
		_, err := try()
		require.ErrorIs(t, err, dlock.ErrHeld)
		require.EqualValues(t, 2, w.granted(t).Fence)
		queued(t, c, r.Key, 0)
		deliver()
		synctest.Wait()
		require.EqualValues(t, 1, c.LLen(t.Context(), "queue:{"+r.Key+"}").Val(), "it has come back, as soon as it could")
		require.NoError(t, w.b.Release(t.Context(), w.g))
		require.EqualValues(t, 3, late.granted(t).Fence)
	})
}

// Waiters that give up while Redis doesn't serve are off the queue soon after it does, by a few scripts, and whoever comes
// next waits for none of them.
func TestManyGiveUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const waiters = 1200
		s := newMini(t)
		s.warm(t)
		a, c, g := hold(t, s, dlock.Request{Key: "k", Owner: "holder", TTL: time.Hour})
		var scripts atomic.Int64
		l := dlocktest.NewDialer(s.dial, func(request []byte) bool {
			n := bytes.Count(request, []byte("evalsha"))
			scripts.Add(int64(n))
			return n > 0
		})
		locker, err := dlock.New(newBackend(t, s.client(t, l), s.options()), &dlock.Options{TTL: time.Hour})
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		for range waiters {
			wg.Go(func() {
				if _, err := locker.Acquire(ctx, "k"); !errors.Is(err, context.Canceled) {
					panic(err)
				}
			})
		}
		queued(t, c, "k", waiters)
		heal := l.Link().LoseRequests()
		cancel()
		wg.Wait()
		time.Sleep(10 * time.Second)
		queued(t, c, "k", waiters)
		heal()
		scripts.Store(0)
		time.Sleep(2 * time.Second)
		queued(t, c, "k", 0)
		require.LessOrEqual(t, scripts.Load(), int64(6))
		w := line(t, s, c, dlock.Request{Key: "k", TTL: time.Hour}, 1)[0]
		began := time.Now()
		require.NoError(t, a.Release(t.Context(), g))
		require.EqualValues(t, 2, w.granted(t).Fence)
		require.Zero(t, w.at.Sub(began))
		require.NoError(t, locker.Close())
	})
}

// A Backend that is closed meanwhile tries for a last time.
func TestCloseWhileTheyLeave(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		r := request(time.Hour)
		_, c, _ := hold(t, s, r)
		b, _, l := s.backend(t)
		w := wait(t, b, dlock.Request{Key: r.Key, Owner: "w", TTL: time.Hour})
		queued(t, c, r.Key, 1)
		heal := l.Link().LoseRequests()
		w.cancel(nil)
		<-w.done
		time.Sleep(time.Minute)
		began := time.Now()
		require.NoError(t, b.Close())
		require.LessOrEqual(t, time.Since(began), 2*time.Second)
		heal()
	})
}

// counting returns a Backend and how many scripts it has run.
func (s redisServer) counting(t *testing.T) (*redislock.Backend, func() int) {
	t.Helper()
	var mu sync.Mutex
	n := 0
	l := dlocktest.NewDialer(s.dial, func(request []byte) bool {
		mu.Lock()
		defer mu.Unlock()
		n += bytes.Count(request, []byte("evalsha"))
		return false
	})
	return newBackend(t, s.client(t, l), s.options()), func() int {
		mu.Lock()
		defer mu.Unlock()
		return n
	}
}

// The first waiter is granted when the holder's lease ends. It asks then, and not before.
func TestHolderDies(t *testing.T) {
	for _, ttl := range []time.Duration{time.Millisecond, 100 * time.Millisecond, 10 * time.Second} {
		t.Run(ttl.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newMini(t)
				s.warm(t)
				r := request(ttl)
				_, _, g := hold(t, s, r)
				b, asked := s.counting(t)
				w := wait(t, b, dlock.Request{Key: r.Key, Owner: "next", TTL: time.Hour})
				next := w.granted(t)
				require.EqualValues(t, 2, next.Fence)
				require.GreaterOrEqual(t, w.at.Sub(g.Start), ttl)
				require.LessOrEqual(t, w.at.Sub(g.Start), ttl+time.Millisecond)
				require.LessOrEqual(t, asked(), 3, "held; into the queue; granted")
			})
		})
	}
}

// A holder that renews tells the first waiter, which has no reason to ask.
func TestRenewalsTellTheFirst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		s.warm(t)
		r := request(3 * time.Second)
		a, _, g := hold(t, s, r)
		b, asked := s.counting(t)
		w := wait(t, b, dlock.Request{Key: r.Key, Owner: "next", TTL: time.Hour})
		for range 1000 {
			time.Sleep(time.Second)
			require.NoError(t, a.Renew(t.Context(), g))
		}
		require.LessOrEqual(t, asked(), 2, "held; into the queue")
		died := time.Now()
		w.granted(t)
		require.LessOrEqual(t, w.at.Sub(died), r.TTL+time.Millisecond)
		require.Equal(t, 3, asked())
	})
}

// Waiters ask once per Claim or so, and many no more often together than 200 times a second.
func TestWaitersHardlyAsk(t *testing.T) {
	for claim, most := range map[time.Duration]int{
		0:                     60 / 5,      // the default
		10 * time.Millisecond: 200 * 4 / 3, // at random, so that they ask after three quarters of the time
	} {
		t.Run(claim.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				const waiters = 60
				s := newMini(t)
				s.warm(t)
				s.claim = claim
				r := request(time.Hour)
				_, c, _ := hold(t, s, r)
				var counts []func() int
				for i := range waiters {
					b, asked := s.counting(t)
					wait(t, b, dlock.Request{Key: r.Key, Owner: fmt.Sprint(i), TTL: time.Hour})
					queued(t, c, r.Key, i+1)
					counts = append(counts, asked)
				}
				const minute = 60
				time.Sleep(minute * time.Second)
				asked := 0
				for _, n := range counts {
					asked += n()
				}
				asked -= 2 * waiters // held; into the queue
				require.LessOrEqual(t, asked, most*minute*11/10)
				require.Positive(t, asked)
				require.LessOrEqual(t, c.PTTL(t.Context(), "queue:{"+r.Key+"}").Val(), 2*time.Minute)
			})
		})
	}
}

// Whatever is lost on the way to a waiter, it is granted the lock, and the others after it.
func TestPushLost(t *testing.T) {
	onBoth(t, func(t *testing.T, s redisServer) {
		r := request(time.Hour)
		a, c, g := hold(t, s, r)
		deaf, link := s.listener(t)
		lost := wait(t, deaf, dlock.Request{Key: r.Key, Owner: "deaf", TTL: time.Hour})
		queued(t, c, r.Key, 1)
		heal := link.Link().LoseReplies() // the push breaks the connection
		require.NoError(t, a.Release(t.Context(), g))
		require.Eventually(t, func() bool { return link.Lost() > 0 }, 30*time.Second, time.Millisecond)
		heal()
		require.EqualValues(t, 2, lost.granted(t).Fence, "the waiter asks over the new connection, and it is its own")
		w := line(t, s, c, r, 1)[0]
		require.NoError(t, deaf.Renew(t.Context(), lost.g))
		require.NoError(t, deaf.Release(t.Context(), lost.g))
		require.EqualValues(t, 3, w.granted(t).Fence)
	})
}

// A waiter that was frozen until its grant was over finds out by the server's clock, and doesn't return a dead lease.
func TestPushComesTooLate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		r := request(time.Hour)
		a, c, g := hold(t, s, r)
		slow, link := s.listener(t)
		late := wait(t, slow, dlock.Request{Key: r.Key, Owner: "late", TTL: time.Hour})
		queued(t, c, r.Key, 1)
		deliver := link.Link().HoldReplies()
		require.NoError(t, a.Release(t.Context(), g))
		w := wait(t, a, dlock.Request{Key: r.Key, Owner: "next", TTL: time.Hour}) // behind it
		require.EqualValues(t, 3, w.granted(t).Fence, "of the one that was next")
		deliver()
		synctest.Wait()
		select {
		case <-late.done:
			require.Fail(t, "granted a lease that was over", "%+v, err %v", late.g, late.err)
		default:
		}
		require.NoError(t, a.Release(t.Context(), w.g))
		require.EqualValues(t, 4, late.granted(t).Fence)
		require.False(t, late.g.Start.Before(w.g.Start))
	})
}

// The server's last word counts: news of a grant from before it has said that the lock is another's is no news.
func TestPushOlderThanTheLastAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		r := request(time.Hour)
		_, c, _ := hold(t, s, r)
		w := line(t, s, c, r, 1)[0]
		entry := strings.Fields(c.LIndex(t.Context(), "queue:{"+r.Key+"}", 0).Val())
		push := func(news string) { require.NoError(t, c.Publish(t.Context(), entry[1], news).Err()) }
		push("held 0 " + w.r.Owner) // it asks, and learns that the lock is still held
		time.Sleep(claim / 4)
		push(fmt.Sprintf("granted 1 %d %slock:{%s}", len(w.r.Owner), w.r.Owner, r.Key))
		synctest.Wait()
		select {
		case <-w.done:
			require.Fail(t, "granted a lock that is another's", "%+v", w.g)
		default:
		}
	})
}

// A waiter that asks and learns of its grant before the push has come keeps the lock when it comes, and whatever comes of
// an older grant, which it was too late for.
func TestPushAfterTheAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		r, other := request(time.Hour), request(time.Hour)
		_, c, _ := hold(t, s, r)
		hold(t, s, other)
		w := line(t, s, c, r, 1)[0]
		entry := strings.Fields(c.LPop(t.Context(), "queue:{"+r.Key+"}").Val())
		require.NoError(t, c.IncrBy(t.Context(), "fence:{"+r.Key+"}", 3).Err())
		require.NoError(t, c.Set(t.Context(), "lock:{"+r.Key+"}", w.r.Owner, claim).Err()) // a hand-over, but for the push
		push := func(news string) { require.NoError(t, c.Publish(t.Context(), entry[1], news).Err()) }
		push("held 0 " + w.r.Owner)
		require.EqualValues(t, 4, w.granted(t).Fence)
		wait(t, w.b, dlock.Request{Key: other.Key, Owner: "reader", TTL: time.Hour})
		queued(t, c, other.Key, 1)
		for _, token := range []int{2, 4, 2} {
			push(fmt.Sprintf("granted %d %d %slock:{%s}", token, len(w.r.Owner), w.r.Owner, r.Key))
			time.Sleep(time.Second)
			require.Equal(t, w.r.Owner, c.Get(t.Context(), "lock:{"+r.Key+"}").Val(), "after news of token %d", token)
		}
		require.NoError(t, w.b.Release(t.Context(), w.g))
	})
}

// After a planned failover a waiter may still listen to the old master, which passes on what the new one publishes. The new
// one doesn't know of it, and must not tell it what it then takes back.
func TestListenerOfAnotherServer(t *testing.T) {
	if server.Provider == testbed.External {
		t.Skip("needs a replica")
	}
	master, err := testbed.StartRedis(t.Context(), nil)
	testbed.Need(t, err)
	t.Cleanup(func() { require.NoError(t, master.Close()) })
	replica, err := testbed.StartRedisReplica(t.Context(), master, nil)
	testbed.Need(t, err)
	t.Cleanup(func() { require.NoError(t, replica.Close()) })
	s, old := onServer(t, master), onServer(t, replica)
	r := request(time.Hour)
	a, c, g := hold(t, s, r)
	ps := redis.NewClient(&redis.Options{Addr: replica.Addr, Username: old.opts.Username, Password: old.opts.Password})
	t.Cleanup(func() { require.NoError(t, ps.Close()) })
	sub := ps.Subscribe(t.Context(), "wake:far", "done")
	t.Cleanup(func() { require.NoError(t, sub.Close()) })
	for range 2 {
		_, err = sub.Receive(t.Context())
		require.NoError(t, err)
	}
	require.NoError(t, c.RPush(t.Context(), "queue:{"+r.Key+"}", "60000 wake:far far").Err())
	w := line(t, s, c, r, 1)[0]
	require.NoError(t, a.Release(t.Context(), g))
	require.EqualValues(t, 2, w.granted(t).Fence)
	require.NoError(t, c.Publish(t.Context(), "done", "done").Err()) // behind all that was said before
	msg, err := sub.ReceiveMessage(t.Context())
	require.NoError(t, err)
	require.Equal(t, "done", msg.Payload, "what a waiter that was passed over has heard")
}

// deafConn is a connection that may go dead without a word: what comes is dropped, and what is sent goes nowhere.
type deafConn struct {
	net.Conn
	subscribes, dead *atomic.Bool
}

func (c deafConn) Write(b []byte) (int, error) {
	if c.dead.Load() {
		return len(b), nil
	}
	if bytes.Contains(b, []byte("subscribe")) {
		c.subscribes.Store(true)
	}
	return c.Conn.Write(b)
}

func (c deafConn) Read(b []byte) (int, error) {
	for {
		n, err := c.Conn.Read(b)
		if err != nil || !c.dead.Load() {
			return n, err
		}
	}
}

// mortal returns a Backend and a func that has its subscription go dead.
func (s redisServer) mortal(t *testing.T) (*redislock.Backend, func()) {
	t.Helper()
	var conns []deafConn // the bubble's goroutines dial in turn
	dial := s.dial
	s.dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		d := deafConn{conn, new(atomic.Bool), new(atomic.Bool)}
		conns = append(conns, d)
		return d, err
	}
	b, _, _ := s.backend(t)
	return b, func() {
		for _, d := range conns {
			d.dead.Store(d.subscribes.Load())
		}
	}
}

// deaf has a Backend wait for r's key, whose subscription then goes dead.
func (s redisServer) deaf(t *testing.T, c *redis.Client, r dlock.Request) *waiting {
	t.Helper()
	b, die := s.mortal(t)
	w := wait(t, b, dlock.Request{Key: r.Key, Owner: "deaf", TTL: time.Hour})
	queued(t, c, r.Key, 1)
	die()
	return w
}

// A subscription that has silently died is replaced, whatever the kernel thinks of it.
func TestSilentConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		r := request(time.Hour)
		a, c, g := hold(t, s, r)
		w := s.deaf(t, c, r)
		began := time.Now()
		require.NoError(t, a.Release(t.Context(), g))
		w.granted(t)
		require.LessOrEqual(t, w.at.Sub(began), 8*time.Second, "sooner than it would ask by itself")
	})
}

// One that has died while nobody waited is replaced sooner: it is tried when somebody comes.
func TestSilentConnectionOfAnIdleBackend(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		s.claim = time.Minute // so that it doesn't ask by itself
		r := request(time.Hour)
		a, c, g := hold(t, s, r)
		b, die := s.mortal(t)
		w := wait(t, b, dlock.Request{Key: r.Key, Owner: "first", TTL: time.Hour})
		queued(t, c, r.Key, 1)
		require.NoError(t, a.Release(t.Context(), g))
		g = w.granted(t)
		require.NoError(t, b.Renew(t.Context(), g))
		time.Sleep(10 * time.Minute)
		die()
		w = wait(t, b, dlock.Request{Key: r.Key, Owner: "next", TTL: time.Hour})
		queued(t, c, r.Key, 1)
		began := time.Now()
		require.NoError(t, a.Release(t.Context(), g))
		w.granted(t)
		require.LessOrEqual(t, w.at.Sub(began), 2*time.Second)
	})
}

// slowConn is a connection on which each byte that comes takes its time, if slow.
type slowConn struct {
	net.Conn
	slow  *atomic.Bool
	until time.Time
	rest  []byte
}

func (c *slowConn) SetReadDeadline(t time.Time) error {
	c.until = t
	return c.Conn.SetReadDeadline(t)
}

func (c *slowConn) Read(b []byte) (int, error) {
	if len(c.rest) == 0 {
		buf := make([]byte, 4096)
		n, err := c.Conn.Read(buf)
		if c.rest = buf[:n]; err != nil {
			return 0, err
		}
	}
	if c.slow.Load() {
		time.Sleep(10 * time.Millisecond)
		if !c.until.IsZero() && !time.Now().Before(c.until) {
			return 0, os.ErrDeadlineExceeded
		}
		b = b[:1]
	}
	n := copy(b, c.rest)
	c.rest = c.rest[n:]
	return n, nil
}

// However long a message is under way, it is read to its end.
func TestSlowMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		s.claim = time.Minute
		r := request(time.Hour)
		a, c, g := hold(t, s, r)
		var slow atomic.Bool
		dial := s.dial
		s.dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
			conn, err := dial(ctx, network, addr)
			return &slowConn{Conn: conn, slow: &slow}, err
		}
		b, _, _ := s.backend(t)
		w := wait(t, b, dlock.Request{Key: r.Key, Owner: strings.Repeat("long", 20), TTL: time.Hour})
		queued(t, c, r.Key, 1)
		time.Sleep(time.Second / 3)
		slow.Store(true)
		began := time.Now()
		require.NoError(t, a.Release(t.Context(), g))
		w.granted(t)
		require.Greater(t, w.at.Sub(began), 2*time.Second, "it was slow")
		require.True(t, w.g.Start.Before(began), "it was granted by the message, and not when it asked again")
	})
}

// No read need last long for that: here the waiter asks every two seconds, when the lease that it knows of is over.
func TestSilentConnectionOfShortReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		r := request(2 * time.Second)
		a, c, g := hold(t, s, r)
		w := s.deaf(t, c, r)
		for range 9 {
			time.Sleep(time.Second)
			require.NoError(t, a.Renew(t.Context(), g)) // which tells the first
		}
		began := time.Now()
		require.NoError(t, a.Release(t.Context(), g))
		require.EqualValues(t, 2, w.granted(t).Fence)
		require.Zero(t, w.at.Sub(began), "the news of the hand-over was heard")
	})
}

// firstConn is a connection whose request to subscribe may be dealt with otherwise, once.
type firstConn struct {
	net.Conn
	next *atomic.Pointer[func(net.Conn, []byte) (int, error)]
}

func (c firstConn) Write(b []byte) (int, error) {
	if bytes.Contains(b, []byte("subscribe")) {
		if f := c.next.Swap(nil); f != nil {
			return (*f)(c.Conn, b)
		}
	}
	return c.Conn.Write(b)
}

// A connection that is well, but over which the subscription was not made, is replaced.
func TestSubscriptionNotMade(t *testing.T) {
	for name, subscribe := range map[string]func(net.Conn, []byte) (int, error){
		"the request breaks the connection": func(net.Conn, []byte) (int, error) { return 0, io.ErrClosedPipe },
		"the server refuses": func(c net.Conn, b []byte) (int, error) { // as it does while it is busy with a script
			_, err := c.Write([]byte("*1\r\n$4\r\nbusy\r\n"))
			return len(b), err
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newMini(t)
				r := request(time.Hour)
				a, c, g := hold(t, s, r)
				var next atomic.Pointer[func(net.Conn, []byte) (int, error)]
				dial := s.dial
				s.dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
					conn, err := dial(ctx, network, addr)
					return firstConn{conn, &next}, err
				}
				w := s.deaf(t, c, r) // so that its connection is replaced
				next.Store(&subscribe)
				time.Sleep(20 * time.Second)
				require.Nil(t, next.Load())
				began := time.Now()
				require.NoError(t, a.Release(t.Context(), g))
				require.EqualValues(t, 2, w.granted(t).Fence)
				require.Zero(t, w.at.Sub(began), "the news of the hand-over was heard")
			})
		})
	}
}

// After a planned failover a waiter may still listen to the old master, which is well. It is passed over until it listens
// where the lock is, and that is soon.
func TestListenerOfAnotherServerComesOver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		old, s := newMini(t), newMini(t)
		var moved atomic.Bool
		var mu sync.Mutex
		var conns []deafConn
		far := redisServer{dial: func(ctx context.Context, network, addr string) (net.Conn, error) {
			dial := old.dial
			if moved.Load() {
				dial = s.dial
			}
			conn, err := dial(ctx, network, addr)
			d := deafConn{conn, new(atomic.Bool), new(atomic.Bool)}
			mu.Lock()
			defer mu.Unlock()
			conns = append(conns, d)
			return d, err
		}}
		r := request(time.Hour)
		a, c, g := hold(t, old, r)
		b, _, _ := far.backend(t)
		w := wait(t, b, dlock.Request{Key: r.Key, Owner: "far", TTL: time.Hour})
		queued(t, c, r.Key, 1)
		require.NoError(t, a.Release(t.Context(), g))
		require.NoError(t, b.Release(t.Context(), w.granted(t)))
		moved.Store(true)
		mu.Lock()
		before := slices.Clone(conns)
		mu.Unlock()
		for _, d := range before {
			if !d.subscribes.Load() {
				require.NoError(t, d.Close())
			}
		}

		// Where the lock is, somebody has it at all times.
		var others sync.WaitGroup
		var enough atomic.Bool
		errs := make(chan error, 2)
		for i := range cap(errs) {
			x, _, _ := s.backend(t)
			others.Go(func() {
				for !enough.Load() {
					g, err := x.Acquire(t.Context(), dlock.Request{Key: r.Key, Owner: uuid.NewString(), TTL: time.Hour})
					if err == nil {
						time.Sleep(time.Duration(i+1) * claim / 10)
						err = x.Release(t.Context(), g)
					}
					if err != nil {
						errs <- err
						return
					}
				}
				errs <- nil
			})
		}
		time.Sleep(time.Second)
		began := time.Now()
		w = wait(t, b, dlock.Request{Key: r.Key, Owner: "far", TTL: time.Hour})
		select {
		case <-w.done:
		case <-time.After(2 * time.Minute):
		}
		served := time.Since(began)
		enough.Store(true)
		require.NoError(t, b.Release(t.Context(), w.granted(t)))
		others.Wait()
		require.NoError(t, <-errs)
		require.NoError(t, <-errs)
		require.LessOrEqual(t, served, longest+8*time.Second)
	})
}

// A lease that was handed over counts from when its waiter has asked last, and from a new question if that is long ago.
func TestStartOfAPushedGrant(t *testing.T) {
	for _, waited := range []time.Duration{0, claim / 4, claim / 2, claim/2 + 1, claim - 1, claim, 2 * claim} {
		t.Run(waited.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := newMini(t)
				r := request(2 * time.Hour)
				a, c, g := hold(t, s, r)
				slow, link := s.listener(t)
				asked := time.Now()
				w := wait(t, slow, dlock.Request{Key: r.Key, Owner: "slow", TTL: time.Hour})
				synctest.Wait()
				deliver := link.Link().HoldReplies()
				require.NoError(t, a.Release(t.Context(), g))
				time.Sleep(waited)
				deliver()
				got := w.granted(t)
				require.Equal(t, time.Hour, got.TTL)
				if waited <= claim/2 {
					require.Equal(t, asked, got.Start)
					require.Equal(t, claim, got.Provisional)
				} else {
					require.Zero(t, got.Provisional)
					require.WithinRange(t, got.Start, asked.Add(waited).Add(-longest), w.at)
					require.Equal(t, "slow", c.Get(t.Context(), "lock:{"+r.Key+"}").Val())
					require.Greater(t, c.PTTL(t.Context(), "lock:{"+r.Key+"}").Val(), time.Hour-longest)
				}
			})
		})
	}
}

// longest is for how long a waiter doesn't ask.
const longest = 30 * time.Second

// A lock that was handed over lasts for its TTL once it has been renewed, which the Locker does by itself.
func TestHandedOverLockLasts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		a, c, g := hold(t, s, dlock.Request{Key: "k", Owner: "first", TTL: time.Hour})
		b, _, _ := s.backend(t)
		l, err := dlock.New(b, &dlock.Options{TTL: time.Minute})
		require.NoError(t, err)
		defer func() { require.NoError(t, l.Close()) }()
		got := make(chan *dlock.Handle)
		go func() {
			h, err := l.Acquire(t.Context(), "k")
			if err != nil {
				panic(err)
			}
			got <- h
		}()
		queued(t, c, "k", 1)
		require.NoError(t, a.Release(t.Context(), g))
		h := <-got
		require.Equal(t, time.Minute, h.TTL())
		require.LessOrEqual(t, c.PTTL(t.Context(), "lock:{k}").Val(), claim)
		time.Sleep(claim / 2)
		synctest.Wait() // the renewal is due at this very time
		confirmed := c.PTTL(t.Context(), "lock:{k}").Val()
		require.Greater(t, confirmed, 59*time.Second, "half a Claim after the hand-over")
		time.Sleep(30 * time.Second)
		require.NoError(t, h.Context().Err())
		require.NoError(t, h.Release(t.Context()))
	})
}

// With default options, a stall of Redis ends a lock that was handed over no sooner than one that was free.
func TestHandedOverLockBearsAStall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		a, c, g := hold(t, s, dlock.Request{Key: "k", Owner: "first", TTL: time.Hour})
		l := s.link()
		b, err := redislock.New(s.client(t, l), nil)
		require.NoError(t, err)
		locker, err := dlock.New(b, nil)
		require.NoError(t, err)
		defer func() { require.NoError(t, locker.Close()) }()
		got := make(chan *dlock.Handle)
		go func() {
			h, err := locker.Acquire(t.Context(), "k")
			if err != nil {
				panic(err)
			}
			got <- h
		}()
		queued(t, c, "k", 1)
		require.NoError(t, a.Release(t.Context(), g))
		h := <-got
		heal := l.Link().Cut()
		time.Sleep(dlock.DefaultTTL * 9 / 10)
		require.NoError(t, h.Context().Err())
		heal()
		require.NoError(t, h.Release(t.Context()))
	})
}

// A user who may not ask who listens loses no waiter.
func TestUserWithoutPubSubCommand(t *testing.T) {
	testbed.Need(t, server.Real()) // ACL
	if server.Provider == testbed.External {
		t.Skip("needs a Redis whose users it may set")
	}
	s := onServer(t, server)
	_, admin, _ := s.backend(t)
	for name, rule := range map[string]string{"may ask": "+pubsub", "may not": "-pubsub"} {
		t.Run(name, func(t *testing.T) {
			user := uuid.NewString()
			require.NoError(t, admin.Do(t.Context(), "ACL", "SETUSER", user, "on", ">secret",
				"~lock:*", "~fence:*", "~queue:*", "~fence-floor", "&wake:*", "+@all", "-@dangerous", rule).Err())
			t.Cleanup(func() { require.NoError(t, admin.Do(context.Background(), "ACL", "DELUSER", user).Err()) })
			s := s
			s.opts.Username, s.opts.Password = user, "secret"
			r := request(time.Hour)
			a, _, g := hold(t, s, r)
			all := line(t, s, admin, r, 3)
			require.NoError(t, a.Release(t.Context(), g))
			for i, w := range all {
				require.EqualValues(t, 2+i, w.granted(t).Fence)
				require.NoError(t, w.b.Release(t.Context(), w.g))
			}
		})
	}
}

// Nor does one that may not tell the waiter: it is first until somebody may.
func TestUserWhoMayNotPublish(t *testing.T) {
	testbed.Need(t, server.Real()) // ACL
	if server.Provider == testbed.External {
		t.Skip("needs a Redis whose users it may set")
	}
	s := onServer(t, server)
	_, admin, _ := s.backend(t)
	user := uuid.NewString()
	require.NoError(t, admin.Do(t.Context(), "ACL", "SETUSER", user, "on", ">secret", "~*", "resetchannels", "+@all").Err())
	t.Cleanup(func() { require.NoError(t, admin.Do(context.Background(), "ACL", "DELUSER", user).Err()) })
	mute := s
	mute.opts.Username, mute.opts.Password = user, "secret"
	r := request(time.Hour)
	a, _, g := hold(t, mute, r)
	w := line(t, s, admin, r, 1)[0]
	require.NoError(t, a.Release(t.Context(), g))
	queued(t, admin, r.Key, 1)
	entry := strings.Fields(admin.LIndex(t.Context(), "queue:{"+r.Key+"}", 0).Val())
	require.NoError(t, admin.Publish(t.Context(), entry[1], "held 0 "+w.r.Owner).Err())
	require.Greater(t, w.granted(t).Fence, uint64(1))
}

// A waiter whose key's counter is broken is told so, and doesn't ask until its TTL is over.
func TestCounterBreaksWhileTheyWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		s.warm(t)
		r := request(10 * time.Second)
		_, c, _ := hold(t, s, r)
		b, asked := s.counting(t)
		w := wait(t, b, dlock.Request{Key: r.Key, Owner: "next", TTL: time.Hour})
		queued(t, c, r.Key, 1)
		require.NoError(t, c.Set(t.Context(), "fence:{"+r.Key+"}", "abc", 0).Err())
		<-w.done
		require.ErrorContains(t, w.err, "fence counter")
		synctest.Wait()
		require.LessOrEqual(t, asked(), 4, "held; into the queue; the lease is over; it leaves")
	})
}

func TestCancelledWaiterLeaves(t *testing.T) {
	onBoth(t, func(t *testing.T, s redisServer) {
		r := request(time.Hour)
		a, c, g := hold(t, s, r)
		all := line(t, s, c, r, 3)
		why := errors.New("enough")
		all[1].cancel(why)
		<-all[1].done
		require.ErrorIs(t, all[1].err, why)
		queued(t, c, r.Key, 2)
		require.NoError(t, a.Release(t.Context(), g))
		require.NoError(t, all[0].b.Release(t.Context(), all[0].granted(t)))
		require.EqualValues(t, 3, all[2].granted(t).Fence, "no token for one that has left")
	})
}

// One that gives up in the moment in which it is granted the lock hands it on.
func TestGrantOfOneThatHasGone(t *testing.T) {
	onBoth(t, func(t *testing.T, s redisServer) {
		r := request(time.Hour)
		a, c, g := hold(t, s, r)
		b, _, _ := s.backend(t)
		wait(t, b, dlock.Request{Key: r.Key, Owner: "b", TTL: time.Hour})
		queued(t, c, r.Key, 1)
		entry := c.LIndex(t.Context(), "queue:{"+r.Key+"}", 0).Val()
		ghost := strings.TrimSuffix(entry, "b") + "ghost" // a request of b's process that arrived after its sender had gone
		require.NoError(t, c.LPush(t.Context(), "queue:{"+r.Key+"}", ghost).Err())
		w := line(t, s, c, r, 1)[0]
		require.NoError(t, a.Release(t.Context(), g))
		// ghost, b, w: the ghost's lock goes to b, which takes it.
		require.Eventually(t, func() bool { return c.Get(t.Context(), "lock:{"+r.Key+"}").Val() == "b" }, 30*time.Second, time.Millisecond)
		require.NoError(t, b.Release(t.Context(), dlock.Grant{Key: r.Key, Owner: "b", TTL: time.Hour}))
		require.EqualValues(t, 4, w.granted(t).Fence)
	})
}

func TestQueueFull(t *testing.T) {
	onBoth(t, func(t *testing.T, s redisServer) {
		r := request(time.Hour)
		a, c, g := hold(t, s, r)
		all := line(t, s, c, r, 2)
		_, client, _ := s.backend(t)
		b := newBackend(t, client, &redislock.Options{Queue: redislock.Queue{Max: 2, Claim: s.claim}})
		l, err := dlock.New(b, &dlock.Options{TTL: time.Hour})
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, l.Close()) })
		_, err = l.Acquire(t.Context(), r.Key)
		require.ErrorIs(t, err, dlock.ErrQueueFull)
		require.EqualValues(t, 2, c.LLen(t.Context(), "queue:{"+r.Key+"}").Val())
		require.NoError(t, a.Release(t.Context(), g))
		all[0].granted(t)
		w := wait(t, b, dlock.Request{Key: r.Key, Owner: "third", TTL: time.Hour})
		queued(t, c, r.Key, 2)
		require.NoError(t, all[0].b.Release(t.Context(), all[0].g))
		require.NoError(t, all[1].b.Release(t.Context(), all[1].granted(t)))
		w.granted(t)
	})
}

// Everybody dies: the queue is gone two minutes later.
func TestForgottenQueueExpires(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		r := request(time.Second)
		_, c, _ := hold(t, s, r)
		b, link := s.listener(t)
		wait(t, b, dlock.Request{Key: r.Key, Owner: "dead", TTL: time.Second})
		queued(t, c, r.Key, 1)
		heal := link.Link().Cut()
		time.Sleep(2*time.Minute + time.Millisecond)
		require.Zero(t, c.Exists(t.Context(), "queue:{"+r.Key+"}", "lock:{"+r.Key+"}").Val())
		heal()
		time.Sleep(2 * time.Second) // the client library's own attempts to connect end
	})
}

// One Locker waits for any number of keys over one subscription.
func TestOneSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		a, c, _ := s.backend(t)
		b, _, _ := s.backend(t)
		var held []dlock.Grant
		var all []*waiting
		for range 20 {
			r := request(time.Hour)
			g, err := a.TryAcquire(t.Context(), r)
			require.NoError(t, err)
			held = append(held, g)
			all = append(all, wait(t, b, dlock.Request{Key: r.Key, Owner: uuid.NewString(), TTL: time.Hour}))
		}
		for _, g := range held {
			queued(t, c, g.Key, 1)
		}
		channels := c.PubSubChannels(t.Context(), "wake:*").Val()
		require.Len(t, channels, 1)
		require.EqualValues(t, 1, c.PubSubNumSub(t.Context(), channels...).Val()[channels[0]])
		for i := range held {
			require.NoError(t, a.Release(t.Context(), held[i]))
			all[i].granted(t)
		}
	})
}

// A waiter that doesn't know whether it stands in the queue asks, and stands there once.
func TestEnqueueReplyLost(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		s.warm(t)
		r, other := request(time.Hour), request(time.Hour)
		a, c, g := hold(t, s, r)
		_, err := a.TryAcquire(t.Context(), other)
		require.NoError(t, err)
		b, _, l := s.backend(t)
		wait(t, b, dlock.Request{Key: other.Key, Owner: "other", TTL: time.Hour}) // so that b listens
		queued(t, c, other.Key, 1)

		l.LoseReply()
		w := wait(t, b, dlock.Request{Key: r.Key, Owner: "w", TTL: time.Hour})
		time.Sleep(10 * time.Second) // whatever the client library may repeat by itself
		require.Equal(t, 1, l.Lost())
		require.EqualValues(t, 1, c.LLen(t.Context(), "queue:{"+r.Key+"}").Val())
		require.NoError(t, a.Release(t.Context(), g))
		w.granted(t)
	})
}

// tap does what a test wants at a client's next script: before it is sent, or once it was carried out, when its reply is
// lost.
type tap struct {
	send, lose atomic.Pointer[func()]
}

type tappedConn struct {
	net.Conn
	*tap
	script atomic.Bool // the reply that is waited for is a script's
}

func (c *tappedConn) Write(b []byte) (int, error) {
	script := bytes.Contains(b, []byte("evalsha"))
	c.script.Store(script)
	if script {
		if f := c.send.Swap(nil); f != nil {
			(*f)()
		}
	}
	return c.Conn.Write(b)
}

func (c *tappedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if err == nil && c.script.Load() {
		if f := c.lose.Swap(nil); f != nil {
			(*f)()
			_ = c.Close()
			return 0, io.EOF
		}
	}
	return n, err
}

// tapped returns a Backend and the tap on its connections.
func (s redisServer) tapped(t *testing.T) (*redislock.Backend, *tap) {
	t.Helper()
	s.warm(t)
	tap, dial := &tap{}, s.dial
	s.dial = func(ctx context.Context, network, addr string) (net.Conn, error) {
		conn, err := dial(ctx, network, addr)
		return &tappedConn{Conn: conn, tap: tap}, err
	}
	b, _, _ := s.backend(t)
	return b, tap
}

// deafened returns a Backend that listens, and a func that returns when it has read all that it was told. It has acted on that
// when it is closed.
func (s redisServer) deafened(t *testing.T) (*redislock.Backend, *tap, func()) {
	t.Helper()
	b, tap := s.tapped(t)
	r := request(time.Hour)
	a, c, g := hold(t, s, r)
	first := wait(t, b, dlock.Request{Key: r.Key, Owner: "first", TTL: time.Hour})
	queued(t, c, r.Key, 1)
	require.NoError(t, a.Release(t.Context(), g))
	first.granted(t)
	return b, tap, func() {
		second := wait(t, b, dlock.Request{Key: r.Key, Owner: "second", TTL: time.Hour})
		queued(t, c, r.Key, 1)
		require.NoError(t, a.Release(t.Context(), first.g)) // in the first's name
		second.granted(t)                                   // by a push behind all others
	}
}

// A waiter whose reply was lost may learn by asking again that it has been handed the lock. The push, which is read
// later, must not free the lock under it.
func TestHandedOverWhileTheReplyWasLost(t *testing.T) {
	onBoth(t, func(t *testing.T, s redisServer) {
		b, tap, read := s.deafened(t)
		r := request(time.Hour)
		a, c, g := hold(t, s, r)
		tap.lose.Store(new(func() {
			if err := a.Release(t.Context(), g); err != nil { // to mine, which stands in the queue
				panic(err)
			}
		}))
		won, err := b.Acquire(t.Context(), dlock.Request{Key: r.Key, Owner: "mine", TTL: time.Hour})
		require.NoError(t, err)
		require.EqualValues(t, 2, won.Fence)
		read()
		require.NoError(t, b.Close())
		require.Equal(t, "mine", c.Get(t.Context(), "lock:{"+r.Key+"}").Val(), "after the push was read")
	})
}

// Nor must the push free the lock before its holder does, which would be told that it had lost it.
func TestPushDuringTheRelease(t *testing.T) {
	onBoth(t, func(t *testing.T, s redisServer) {
		b, tap, read := s.deafened(t)
		r := request(time.Hour)
		a, c, g := hold(t, s, r)
		tap.lose.Store(new(func() {
			if err := a.Release(t.Context(), g); err != nil {
				panic(err)
			}
		}))
		won, err := b.Acquire(t.Context(), dlock.Request{Key: r.Key, Owner: "mine", TTL: time.Hour})
		require.NoError(t, err)
		tap.send.Store(new(func() {
			read()
			require.NoError(t, b.Close())
		}))
		require.NoError(t, b.Release(t.Context(), won))
		require.Zero(t, c.Exists(t.Context(), "lock:{"+r.Key+"}").Val())
	})
}

// However many want a subscription that isn't confirmed, they wait for it together, and begin anew when they come again.
func TestSubscriptionNotConfirmed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		r := request(time.Hour)
		a, c, g := hold(t, s, r)
		b, link := s.listener(t)
		heal := link.Link().HoldReplies()
		began := time.Now()
		var all []*waiting
		for i := range 4 {
			all = append(all, wait(t, b, dlock.Request{Key: r.Key, Owner: fmt.Sprint(i), TTL: time.Hour}))
			time.Sleep(time.Second)
		}
		for _, w := range all {
			<-w.done
			require.ErrorContains(t, w.err, "subscribe")
			require.Equal(t, 5*time.Second, w.at.Sub(began))
		}
		heal()
		w := wait(t, b, dlock.Request{Key: r.Key, Owner: "again", TTL: time.Hour})
		queued(t, c, r.Key, 1)
		require.NoError(t, a.Release(t.Context(), g))
		w.granted(t)
	})
}

// One whose context ends, or whose Backend is closed, doesn't wait for the confirmation.
func TestSubscriptionNotWaitedFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newMini(t)
		r := request(time.Hour)
		hold(t, s, r)
		b, link := s.listener(t)
		link.Link().HoldReplies()
		began := time.Now()
		gone := wait(t, b, dlock.Request{Key: r.Key, Owner: "gone", TTL: time.Hour})
		stays := wait(t, b, dlock.Request{Key: r.Key, Owner: "stays", TTL: time.Hour})
		time.Sleep(time.Second)
		why := errors.New("enough")
		gone.cancel(why)
		<-gone.done
		require.ErrorIs(t, gone.err, why)
		require.NoError(t, b.Close())
		<-stays.done
		require.ErrorIs(t, stays.err, dlock.ErrClosed)
		require.Equal(t, time.Second, time.Since(began))
	})
}

// Waiters outlive a restart of Redis, and so do the locks and the queue, as far as Redis keeps them.
func TestRedisRestarts(t *testing.T) {
	if server.Provider == testbed.External {
		t.Skip("needs a Redis that can be restarted")
	}
	srv, err := testbed.StartRedis(t.Context(), &testbed.Options{Args: []string{"--appendonly", "yes", "--appendfsync", "always"}})
	testbed.Need(t, err)
	t.Cleanup(func() { require.NoError(t, srv.Close()) })
	s := onServer(t, srv)
	r := request(time.Hour)
	a, c, g := hold(t, s, r)
	all := line(t, s, c, r, 3)
	require.NoError(t, srv.Kill(t.Context()))
	require.NoError(t, srv.Restart(t.Context(), testbed.RestartOptions{}))
	// They may ask in another order than the one they stood in, but nobody is lost and nobody is granted twice.
	require.Eventually(t, func() bool { return c.PubSubNumSub(t.Context()).Err() == nil }, 30*time.Second, 10*time.Millisecond)
	require.NoError(t, releaseOn(t, a, g))
	tokens := map[uint64]bool{}
	for range all {
		i := firstOf(t, all, tokens)
		require.NoError(t, releaseOn(t, all[i].b, all[i].g))
	}
	require.Len(t, tokens, 3)
}

// releaseOn releases over a client whose connections may be broken.
func releaseOn(t *testing.T, b *redislock.Backend, g dlock.Grant) error {
	t.Helper()
	for {
		err := b.Release(t.Context(), g)
		if err == nil || errors.Is(err, dlock.ErrLost) || t.Context().Err() != nil {
			return err
		}
	}
}

// firstOf returns the next that is granted and notes its token.
func firstOf(t *testing.T, all []*waiting, tokens map[uint64]bool) int {
	t.Helper()
	found := -1
	require.Eventually(t, func() bool {
		for i, w := range all {
			select {
			case <-w.done:
				if w.err == nil && !tokens[w.g.Fence] {
					found = i
					return true
				}
			default:
			}
		}
		return false
	}, 30*time.Second, time.Millisecond, "nobody is granted")
	require.NoError(t, all[found].err)
	tokens[all[found].g.Fence] = true
	return found
}

// Both modes exclude each other, and a spinner's release hands over to the queue.
func TestSpinnerAmongWaiters(t *testing.T) {
	onBoth(t, func(t *testing.T, s redisServer) {
		r := request(time.Hour)
		_, client, _ := s.backend(t)
		spinner := newBackend(t, client, &redislock.Options{Mode: redislock.ModeSpin})
		g, err := spinner.Acquire(t.Context(), r)
		require.NoError(t, err)
		w := line(t, s, client, r, 1)[0]
		require.NoError(t, spinner.Release(t.Context(), g))
		require.EqualValues(t, 2, w.granted(t).Fence)
	})
}

func TestNewRefusesQueue(t *testing.T) {
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	t.Cleanup(func() { require.NoError(t, ring.Close()) })
	for _, client := range []redis.UniversalClient{ring, traced{ring}, &traced{&traced{ring}}, struct{ *redis.Ring }{ring}} {
		_, err := redislock.New(client, nil)
		require.ErrorIs(t, err, dlock.ErrInvalid, "%T", client)
	}
	_, err := redislock.New(ring, &redislock.Options{Mode: redislock.ModeSpin})
	require.NoError(t, err)
	c := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	_, err = redislock.New(traced{c}, nil)
	require.NoError(t, err)
	for _, o := range []redislock.Options{
		{Mode: 7},
		{Queue: redislock.Queue{Max: -1}},
		{Queue: redislock.Queue{Claim: time.Microsecond}},
		{Queue: redislock.Queue{Claim: 1500 * time.Microsecond}},
		{Queue: redislock.Queue{Claim: -time.Second}},
	} {
		_, err := redislock.New(c, &o)
		require.ErrorIs(t, err, dlock.ErrInvalid, "%+v", o)
	}
}
