package promises_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/jitter"
	"github.com/fencelab/fencelab/scenarios"
)

// inherits has a waiter look at the one before it. If that dies, it takes the lock.
func inherits(ctx context.Context, s *simple, key string, _ asking) (scenarios.Lease, error) {
	me := uuid.NewString()
	alive, gone := key+":alive:", key+":gone:"
	is := func(key string) bool { n, err := s.redis.Exists(ctx, key).Result(); return err != nil || n > 0 }
	before, _ := s.redis.Do(ctx, "getset", key+":last", me).Text()
	if before != "" && !is(alive+before) {
		before = ""
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 100*time.Millisecond)
		defer cancel()
		s.redis.Set(ctx, gone+me, 1, time.Minute)
		s.redis.Del(ctx, alive+me)
	}()
	return polls(func() (scenarios.Lease, error) {
		s.redis.Set(ctx, alive+me, 1, s.ttl)
		return s.try(ctx, key)
	}, func() error {
		if before != "" && !is(alive+before) {
			if !is(gone + before) {
				s.redis.Del(ctx, key)
			}
			before = ""
		}
		return jitter.Sleep(ctx, 10*time.Millisecond)
	})
}

// closesAsHolder has Close free what its client waits for.
func closesAsHolder(s *simple) {
	var waits sync.Map
	s.acquires = func(ctx context.Context, _ *simple, key string, ask asking) (scenarios.Lease, error) {
		waits.Store(key, true)
		defer waits.Delete(key)
		return ask(ctx)
	}
	s.closes = func(s *simple) {
		waits.Range(func(key, _ any) bool { return s.redis.Del(context.Background(), key.(string)).Err() == nil })
	}
}

// afterLoss calls f for each lease of a client that has lost one.
func afterLoss(f func(l *lease)) func(s *simple) {
	return func(s *simple) {
		var lost atomic.Bool
		s.acquires = then(func(a *answer) {
			if a.err != nil {
				return
			}
			if lost.Load() {
				f(a.l)
				return
			}
			context.AfterFunc(a.l.ctx, func() {
				if !time.Now().Before(*a.l.until.Load()) {
					lost.Store(true)
				}
			})
		})
		s.tryCalls = s.acquires
	}
}

var (
	toldOnce      = afterLoss(func(l *lease) { l.timer.Stop() })
	overAfterLoss = afterLoss(func(l *lease) { l.cancel() })
)

// handsOver has a release hand the lock to a caller of the same client that waits.
func handsOver(next func(l *lease)) func(s *simple) {
	return func(s *simple) {
		var mu sync.Mutex
		lines := map[string][]chan *lease{}
		s.acquires = func(ctx context.Context, s *simple, key string, _ asking) (scenarios.Lease, error) {
			own := make(chan *lease, 1)
			mu.Lock()
			lines[key] = append(lines[key], own)
			mu.Unlock()
			leave := func() {
				mu.Lock()
				defer mu.Unlock()
				lines[key] = slices.DeleteFunc(lines[key], func(c chan *lease) bool { return c == own })
			}
			for {
				select {
				case l := <-own:
					return l, nil
				case <-time.After(10 * time.Millisecond):
				case <-ctx.Done():
				}
				if ctx.Err() == nil && s.redis.Exists(ctx, key).Val() > 0 {
					continue
				}
				leave()
				if len(own) > 0 {
					return <-own, nil
				}
				if l, err := s.try(ctx, key); !errors.Is(err, dlock.ErrHeld) {
					return l, err
				}
				mu.Lock()
				lines[key] = append(lines[key], own)
				mu.Unlock()
			}
		}
		s.releases = func(ctx context.Context, l *lease, free func() error) error {
			mu.Lock()
			if len(lines[l.key]) == 0 || l.ctx.Err() != nil {
				mu.Unlock()
				if l.freed.Load() {
					return dlock.ErrLost
				}
				return free()
			}
			own := lines[l.key][0]
			lines[l.key] = lines[l.key][1:]
			n := l.s.granted(context.WithValue(ctx, valueKey{}, l.value), l.key)
			n.fence = l.fence
			next(n)
			own <- n
			mu.Unlock()
			l.freed.Store(true)
			l.cancel()
			return nil
		}
	}
}

func restarted(l *lease) { renew.Run(l.ctx, l.s.redis, []string{l.key}, l.value, millis(l.s.ttl)) }

func renumbered(l *lease) { l.fence = uint64(l.s.redis.Incr(l.ctx, l.key+":number").Val()) } //nolint:gosec // positive

var (
	joinLine = redis.NewScript(`
		if redis.call('exists', KEYS[1]) == 0 and redis.call('exists', KEYS[1] .. ':called') == 0 and redis.call('llen', KEYS[1] .. ':line') == 0 then
			redis.call('psetex', KEYS[1] .. ':called', 5000, ARGV[1]) return 1
		end
		redis.call('rpush', KEYS[1] .. ':line', ARGV[1]) return 0`)
	callHead = redis.NewScript(`
		if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
		redis.call('del', KEYS[1])
		local head = redis.call('lpop', KEYS[1] .. ':line')
		if head then redis.call('psetex', KEYS[1] .. ':called', 5000, head) end
		return 1`)
	isCalled = redis.NewScript(`
		local called = redis.call('get', KEYS[1] .. ':called')
		if called == ARGV[1] then return 1 end
		if not called and redis.call('exists', KEYS[1]) == 0 and redis.call('lindex', KEYS[1] .. ':line', 0) == ARGV[1] then
			redis.call('lpop', KEYS[1] .. ':line') redis.call('psetex', KEYS[1] .. ':called', 5000, ARGV[1]) return 1
		end
		return 0`)
	takeTurn = redis.NewScript(`
		redis.call('del', KEYS[1] .. ':called') redis.call('psetex', KEYS[1], ARGV[2], ARGV[1])
		return redis.call('incr', KEYS[1] .. ':number')`)
)

// callsNext has a release call the next waiter, who takes the lock: other waiters wait for that, but a try doesn't.
func callsNext(s *simple) {
	s.acquires = func(ctx context.Context, s *simple, key string, _ asking) (scenarios.Lease, error) {
		me := uuid.NewString()
		called, err := joinLine.Run(ctx, s.redis, []string{key}, me).Bool()
		for err == nil && !called {
			if err = jitter.Sleep(ctx, 11*time.Millisecond); err == nil {
				called, err = isCalled.Run(ctx, s.redis, []string{key}, me).Bool()
			}
		}
		if err != nil {
			go s.insist(context.WithoutCancel(ctx), func(ctx context.Context) error {
				s.redis.LRem(ctx, key+":line", 1, me)
				if s.redis.Get(ctx, key+":called").Val() == me {
					s.redis.Del(ctx, key+":called")
				}
				return s.redis.Ping(ctx).Err()
			})
			return nil, err
		}
		until := time.Now().Add(s.ttl)
		fence, err := takeTurn.Run(ctx, s.redis, []string{key}, me, millis(s.ttl)).Uint64()
		if err != nil {
			return nil, err
		}
		l := s.granted(context.WithValue(ctx, valueKey{}, me), key)
		l.fence = fence
		l.until.Store(&until)
		return l, nil
	}
	s.releases = func(ctx context.Context, l *lease, _ func() error) error {
		n, err := callHead.Run(ctx, l.s.redis, []string{l.key}, l.value).Int()
		if err == nil {
			l.cancel()
		}
		if err == nil && n == 0 {
			err = dlock.ErrLost
		}
		return err
	}
}

// signals has a message for one of a client's waiters wake one, whatever it waits for.
func signals(s *simple) {
	type waiter struct {
		key   string
		wakes chan struct{}
	}
	var once sync.Once
	var mu sync.Mutex
	var line []*waiter
	s.releases = tells
	wake := func(m any) {
		mu.Lock()
		defer mu.Unlock()
		n := len(line)
		if told, ok := m.(*redis.Message); ok { // otherwise it has connected again
			key := strings.TrimSuffix(told.Channel, ":free")
			n = min(n, 1)
			if !slices.ContainsFunc(line, func(w *waiter) bool { return w.key == key }) {
				n = 0
			}
		}
		for _, w := range line[:n] {
			close(w.wakes)
		}
		line = line[n:]
	}
	listen := func(ctx context.Context) {
		sub := s.redis.PSubscribe(context.WithoutCancel(ctx), "*:free")
		_, _ = sub.Receive(ctx)
		go func() {
			defer sub.Close() //nolint:errcheck // it is only read
			for messages := sub.ChannelWithSubscriptions(); ; {
				select {
				case m, ok := <-messages:
					if !ok {
						return
					}
					wake(m)
				case <-s.closed:
					return
				}
			}
		}()
	}
	s.acquires = func(ctx context.Context, s *simple, key string, _ asking) (scenarios.Lease, error) {
		once.Do(func() { listen(ctx) })
		var me *waiter
		leave := func() {
			mu.Lock()
			defer mu.Unlock()
			line = slices.DeleteFunc(line, func(w *waiter) bool { return w == me })
		}
		return polls(func() (scenarios.Lease, error) {
			me = &waiter{key, make(chan struct{})}
			mu.Lock()
			line = append(line, me)
			mu.Unlock()
			l, err := s.try(ctx, key)
			if !errors.Is(err, dlock.ErrHeld) {
				leave()
			}
			return l, err
		}, func() error {
			defer leave()
			select {
			case <-me.wakes:
			case <-time.After(s.redis.PTTL(ctx, key).Val()):
			case <-ctx.Done():
			}
			return ctx.Err()
		})
	}
}

// watchesOnce has a waiter watch for one change, which may be a renewal.
func watchesOnce(s *simple) {
	s.acquires = listens(func(message string) bool { return message != "renewed" })
	s.releases = tells
	s.renews = func(ctx context.Context, l *lease, renew func() error) error {
		l.s.redis.Publish(ctx, l.key+":free", "renewed")
		return renew()
	}
}

// firstHasSession ends a client's renewals when the first of the leases that it has is released.
func firstHasSession(s *simple) {
	var mu sync.Mutex
	var leases []*lease
	s.acquires = then(func(a *answer) {
		if a.err == nil {
			mu.Lock()
			defer mu.Unlock()
			leases = append(slices.DeleteFunc(leases, func(l *lease) bool { return l.ctx.Err() != nil }), a.l)
		}
	})
	s.tryCalls = s.acquires
	s.releases = func(_ context.Context, l *lease, free func() error) error {
		mu.Lock()
		defer mu.Unlock()
		if len(leases) > 0 && leases[0] == l {
			for _, other := range leases[1:] {
				other.idle.Store(true)
			}
			leases = nil
		}
		return free()
	}
}

func beforeKey(key string) string {
	if of, ok := strings.CutPrefix(key, "fence:"); ok {
		return of + ":number"
	}
	return key
}

func resetsCounter(s *simple) {
	s.acquires = then(func(a *answer) {
		if isEnded(a.err) {
			go a.s.redis.Del(context.WithoutCancel(a.ctx), a.key+":number")
		}
	})
}

var heir = redis.NewScript(`
	local line, free = KEYS[1] .. ':line', KEYS[1] .. ':was released'
	redis.call('psetex', KEYS[1] .. ARGV[1], ARGV[2], 1)
	local held = redis.call('exists', KEYS[1]) == 1
	local head = redis.call('lindex', line, 0)
	if head and head ~= ARGV[1] and (held or redis.call('exists', free) == 1) and redis.call('exists', KEYS[1] .. head) == 0 then
		redis.call('lpop', line)
	end
	return (not held and redis.call('lindex', line, 0) == ARGV[1]) and 1 or 0`)

// deadHeir has waiters queue. A release has each see whether the one before it is dead, the end of a lease only wakes the first.
func deadHeir(s *simple) {
	s.acquires = func(ctx context.Context, s *simple, key string, _ asking) (l scenarios.Lease, err error) {
		me := uuid.NewString()
		if err = s.redis.RPush(ctx, key+":line", me).Err(); err != nil {
			return nil, err
		}
		defer func() {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 100*time.Millisecond)
			defer cancel()
			if err := s.redis.LRem(ctx, key+":line", 1, me).Err(); err == nil && l != nil {
				s.redis.Del(ctx, key+":was released")
			}
		}()
		for {
			first, err := heir.Run(ctx, s.redis, []string{key}, me, millis(s.ttl)).Bool()
			if err != nil && !isTimeout(err) && !isRefused(err) {
				return nil, err
			}
			if first {
				if l, err := s.try(ctx, key); !errors.Is(err, dlock.ErrHeld) {
					return l, err
				}
			}
			if err := jitter.Sleep(ctx, 11*time.Millisecond); err != nil {
				return nil, err
			}
		}
	}
	s.releases = func(ctx context.Context, l *lease, free func() error) error {
		if err := l.s.redis.Set(ctx, l.key+":was released", 1, 0).Err(); err != nil {
			return err
		}
		return free()
	}
}
