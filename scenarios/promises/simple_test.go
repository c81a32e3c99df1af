package promises_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"net"
	"net/url"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/jitter"
	"github.com/fencelab/fencelab/scenarios"
)

// simple is a correct lock on one Redis, but for the defects that it is given: those that its code asks for by their names in
// TestBroken and TestBrokenOnce, and those that its hooks have.
type simple struct {
	defects []string

	redis *redis.Client
	ttl   time.Duration

	pings        int    // extra messages of an acquisition
	releaseStops int    // a release stops at an error, for so many seconds after the first
	counter      string // the suffix of the token's key
	epoch        uint64 // where tokens begin, for all keys
	mutex        sync.Map
	tried        atomic.Value // the last key that a try found held
	calls        chan struct{}
	only         atomic.Pointer[lease]
	recorded     sync.Map
	lostKeys     sync.Map
	kept         atomic.Int32
	tryWaits     int // so many tries of a client wait for five seconds
	tries        atomic.Int32
	polls        time.Duration // how often waiters poll; 0: 10 ms
	left         sync.Map
	latest       sync.Map
	replies      chan reply
	holds        [256]atomic.Int32
	lastRelease  atomic.Int64
	hash         func(key []byte) uint32 // replaces the key
	takes        func(key string) string // what the server takes for the key
	// What else a call does.
	releases func(ctx context.Context, l *lease, release func() error) error
	acquires wrapping
	tryCalls wrapping
	opens    func(ctx context.Context, s *simple)
	closes   func(s *simple)
	renews   func(ctx context.Context, l *lease, renew func() error) error        // by hand
	observes func(s *simple, ctx context.Context, key string) (takes func() bool) // by a waiter: whether it takes the lock
	deafened atomic.Bool
	leases   sync.Map // that are renewed, by key
	room     int32    // if not 0, how many leases are renewed
	renewed  atomic.Int32
	script   *redis.Script // of renewals
	backsOff time.Duration // if not 0, a waiter doubles the pause between polls, up to this

	ahead    *atomic.Int64
	released atomic.Int32
	losses   atomic.Int32
	owner    string
	data     string // names the server's data
	heldMu   sync.Mutex
	held     []*lease
	sessions []*redis.PubSub
	closed   chan struct{}
	close    sync.Once
}

// is reports whether s has one of the defects.
func (s *simple) is(one ...string) bool {
	return slices.ContainsFunc(one, func(defect string) bool { return slices.Contains(s.defects, defect) })
}

// has sets defects. A lock that renews its leases has "renews", too.
func has(defects ...string) func(*simple) {
	return func(s *simple) { s.defects = append(s.defects, defects...) }
}

type (
	asking   = func(ctx context.Context) (scenarios.Lease, error)
	wrapping = func(ctx context.Context, s *simple, key string, ask asking) (scenarios.Lease, error)
)

type lease struct {
	s        *simple
	key      string
	value    string
	freed    atomic.Bool
	renews   atomic.Int32 // with replies
	renewed  atomic.Bool
	idle     atomic.Bool   // it isn't renewed
	hands    atomic.Int32  // renewals by hand
	renewing chan struct{} // a semaphore of one
	fence    uint64
	until    atomic.Pointer[time.Time]
	ctx      context.Context
	cancel   context.CancelFunc
	timer    *time.Timer // calls cancel, unless the lock renews its leases
}

// millis rounds up: a lease must not end early.
func millis(d time.Duration) int64 { return (d + time.Millisecond - 1).Milliseconds() }

func (l *lease) Renew(ctx context.Context) error {
	if l.s.renews != nil {
		return l.s.renews(ctx, l, func() error { return l.renewNow(ctx) })
	}
	return l.renewNow(ctx)
}

func (l *lease) renewNow(ctx context.Context) (err error) {
	if l.s.is("a renewal keeps the release") {
		defer keeps(ctx, l.renewing, &err)()
	}
	start, ttl, script := time.Now(), millis(l.s.ttl), renew
	switch {
	case l.s.is("renewed by hand, blindly"):
		script = extend
	case l.s.is("renewed by hand, and taken"):
		script = upsert
	case l.s.is("renewed by hand for half"):
		ttl /= 2
	case l.s.is("renewed by hand for its client"):
		script = ofOwner
	case l.s.is("renewed by hand by a default"):
		ttl = min(ttl, 8000)
	case l.s.is("renewed by hand in whole seconds"):
		ttl = l.s.ttl.Truncate(time.Second).Milliseconds()
	case l.s.is("renewed by hand in absolute time"):
		ttl -= time.Duration(l.s.ahead.Load()).Milliseconds()
	case l.s.is("renewed by hand for nothing"):
		return nil
	case l.s.is("renewed by hand once"), l.s.is("renewed by hand, then refused"):
		if l.hands.Add(1) > 1 && l.s.is("renewed by hand once") {
			return nil
		} else if l.hands.Load() > 1 {
			return dlock.ErrLost
		}
	case l.s.is("renewed by hand, asking first"):
		if has, err := l.s.redis.Get(ctx, l.key).Result(); has != l.value {
			return errors.Join(err, dlock.ErrLost)
		}
		script = extend
	}
	n, err := l.s.runs(script)(ctx, l.s.redis, []string{l.key}, l.value, ttl).Int()
	if err == nil && n == 0 {
		err = dlock.ErrLost
	}
	if l.s.is("renewed by hand late") {
		start = time.Now()
	}
	if l.s.is("a renewal that fails frees") && isTimeout(err) {
		go l.s.insist(context.WithoutCancel(ctx), func(ctx context.Context) error { return release.Run(ctx, l.s.redis, []string{l.key}, l.value).Err() })
	}
	if until := start.Add(l.s.ttl); (err == nil || l.s.is("a renewal that fails counts") && !errors.Is(err, dlock.ErrLost)) && (l.timer == nil || l.timer.Stop()) {
		l.until.Store(&until)
		l.renewed.Store(true)
		if l.timer != nil {
			l.timer.Reset(time.Until(until))
		}
	}
	return err
}

var (
	acquire = redis.NewScript(`
		if redis.call('exists', KEYS[1]) == 1 and not (ARGV[3] == '1' and redis.call('get', KEYS[1]) == ARGV[1]) then return 0 end
		local same = ARGV[5] ~= '' and redis.call('getset', KEYS[1] .. ':last', ARGV[5]) == ARGV[5]
		local fence = ARGV[4] == '1' or redis.call('incrby', KEYS[1] .. ARGV[7], same and 0 or 1)
		local time = redis.call('time')
		if ARGV[6] ~= '' then fence = time[1] * 1000000 + time[2] + ARGV[6] end
		if ARGV[1] == '' then ARGV[1] = fence end
		if tonumber(ARGV[2]) > 0 then redis.call('set', KEYS[1], ARGV[1], 'px', ARGV[2]) end
		return fence`)
	renew   = redis.NewScript(`if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('pexpire', KEYS[1], ARGV[2]) end return 0`)
	add     = redis.NewScript(`if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('pexpire', KEYS[1], redis.call('pttl', KEYS[1]) + ARGV[2]) end return 0`)
	eight   = redis.NewScript(`if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('pexpire', KEYS[1], math.min(ARGV[2], 8000)) end return 0`)
	ofOwner = redis.NewScript(`
		if string.sub(redis.call('get', KEYS[1]) or '', 1, 36) == string.sub(ARGV[1], 1, 36) then return redis.call('pexpire', KEYS[1], ARGV[2]) end return 0`)
	extend  = redis.NewScript(`return redis.call('pexpire', KEYS[1], ARGV[2])`)
	another = redis.NewScript(`
		local has, next = redis.call('get', KEYS[1]), ARGV[1] .. '+'
		if has == ARGV[1] or has == next then return redis.call('psetex', KEYS[1], ARGV[2], next) and 1 end return 0`)
	upsert  = redis.NewScript(`local has = redis.call('get', KEYS[1]) if has and has ~= ARGV[1] then return 0 end return redis.call('psetex', KEYS[1], ARGV[2], ARGV[1]) and 1`)
	release = redis.NewScript(`if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0`)
)

// patient bounds a call whose context was cancelled: go-redis only uses deadlines.
const patient = 5 * time.Second

func open(set func(*simple)) scenarios.Open {
	return func(ctx context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
		l := &simple{ttl: s.TTL, owner: uuid.NewString(), calls: make(chan struct{}, 1), closed: make(chan struct{})}
		switch set(l); {
		case l.is("waiters take all connections"):
			l.calls = make(chan struct{}, 10)
		case l.is("failed tries keep connections"):
			l.calls = make(chan struct{}, 20)
		case l.is("takes a late reply for its"):
			l.replies = make(chan reply, 1000)
		}
		if l.is("a majority") && len(s.Addrs) > 1 {
			return openMajority(ctx, s, set, l)
		}
		o := &redis.Options{
			Addr: s.Addrs[0], MaxRetries: -1, ContextTimeoutEnabled: true, ReadTimeout: patient, DialerRetries: 1, DisableIdentity: true,
			PoolSize:                 1000, // a wait for a connection may use a timer of another bubble
			MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
		}
		dial := new(net.Dialer).DialContext
		if w, ok := ctx.Value(networkKey{}).(*network); ok {
			l.ahead, dial = &w.ahead, w.dial
		}
		o.Dialer = dial
		if l.is("any server") {
			o.Dialer = func(ctx context.Context, _, _ string) (conn net.Conn, err error) {
				for _, addr := range s.Addrs {
					if conn, err = dial(ctx, "tcp", addr); err == nil {
						break
					}
				}
				return conn, err
			}
		}
		l.redis = redis.NewClient(o)
		if l.opens != nil {
			l.opens(ctx, l)
		}
		if l.is("a closed client's goroutine") {
			go func() {
				<-l.closed
				time.Sleep(50 * time.Second)
			}()
		}
		if l.is("renews what somebody deleted") {
			l.redis.SetNX(ctx, "data", l.owner, 0)
			l.data = l.redis.Get(ctx, "data").Val()
		}
		if l.is("loads a script once") {
			release.Load(ctx, l.redis)
		}
		if l.is("loads the renewals' script once") {
			renew.Load(ctx, l.redis)
		}
		if l.is("deaf", "deaf Close", "calls end at deadlines") { // nothing else ends a call
			l.redis.Options().ReadTimeout = -1
		}
		return l, nil
	}
}

func (s *simple) call(ctx context.Context) context.Context {
	if s.is("deaf") {
		return context.WithoutCancel(ctx)
	}
	return ctx
}

func (s *simple) turn(ctx context.Context) (end func(), err error) {
	if !s.is("a client's calls queue", "waiters take all connections", "failed tries keep connections", "takes a late reply for its") {
		return func() {}, nil
	}
	select {
	case s.calls <- struct{}{}:
		return func() { <-s.calls }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func (s *simple) TryAcquire(ctx context.Context, key string) (scenarios.Lease, error) {
	if s.tryCalls != nil {
		return s.tryCalls(ctx, s, key, func(ctx context.Context) (scenarios.Lease, error) { return s.try(ctx, key) })
	}
	end, err := s.turn(ctx)
	if err != nil {
		return nil, err
	}
	l, err := s.try(ctx, key)
	if !s.is("failed tries keep connections") || !errors.Is(err, dlock.ErrHeld) {
		end()
	}
	switch {
	case err == nil:
		return l, nil
	case errors.Is(err, dlock.ErrHeld) && int(s.tries.Add(1)) <= s.tryWaits:
		time.Sleep(5 * time.Second)
	case s.is("a refused try says held") && isRefused(err):
		return nil, dlock.ErrHeld
	case !errors.Is(err, dlock.ErrHeld):
		if s.is("takes a lock for its own") {
			s.latest.Store(key, true)
		}
		if s.is("a try deletes") {
			go s.insist(context.WithoutCancel(ctx), func(ctx context.Context) error { return s.redis.Del(ctx, key).Err() })
		}
		if s.is("a try that is undone late") {
			go s.insist(context.WithoutCancel(ctx), func(ctx context.Context) error { return release.Run(ctx, s.redis, []string{key}, s.owner).Err() })
		}
		return l, err
	}
	if _, failed := s.latest.LoadAndDelete(key); failed && s.is("takes a lock for its own") {
		return s.granted(ctx, key), nil
	}
	s.tried.Store(key)
	if s.is("a try takes the lock") {
		s.redis.SetXX(ctx, key, s.owner, redis.KeepTTL)
	}
	if s.is("a failed try leaves a connection") {
		s.redis.Conn().Ping(ctx)
	}
	if s.is("a try prolongs the lease") && s.redis.PTTL(ctx, key).Val() < min(s.ttl, time.Second) {
		s.redis.PExpire(ctx, key, min(s.ttl, time.Second))
	}
	return l, err
}

// keeps waits for a turn, which ends with the call or, if that gets no reply, with its context.
func keeps(ctx context.Context, turn chan struct{}, err *error) (end func()) {
	turn <- struct{}{}
	return func() {
		if isTimeout(*err) {
			<-ctx.Done()
		}
		<-turn
	}
}

func (s *simple) insist(ctx context.Context, f func(ctx context.Context) error) {
	for range 30 {
		time.Sleep(100 * time.Millisecond)
		short, cancel := context.WithTimeout(ctx, time.Second)
		err := f(short)
		if cancel(); err == nil {
			return
		}
	}
}

func (s *simple) try(ctx context.Context, key string) (_ scenarios.Lease, err error) {
	if s.is("leaves goroutines") || s.is("keeps goroutines") && s.kept.Add(1) <= 80 {
		go func() { <-s.closed }()
	}
	if s.is("acquisitions take turns") {
		defer keeps(ctx, s.calls, &err)()
	}
	value, ttl, start := uuid.NewString(), s.ttl, time.Now()
	if given, ok := ctx.Value(valueKey{}).(string); ok {
		value = given
	}
	if s.is("one owner", "released again after a lost reply", "released late, by one owner", "reentrant", "a try that is undone late") {
		value = s.owner
	}
	if s.is("renewed by hand for its client") {
		value = s.owner + value
	}
	if s.is("at most eight seconds") {
		ttl = min(ttl, 8*time.Second)
	}
	if s.hash != nil {
		key = fmt.Sprint(s.hash([]byte(key)))
	}
	if s.takes != nil {
		key = s.takes(key)
	}
	if s.is("TTLs of 32 bits") {
		ttl = time.Duration(uint32(ttl.Milliseconds())) * time.Millisecond //nolint:gosec // the defect
	}
	if s.is("the token is the owner") {
		value = ""
	}
	if s.is("microseconds are for ever") && s.ttl < time.Millisecond {
		ttl = time.Hour
	}
	if s.is("absolute time") {
		ttl -= time.Duration(s.ahead.Load())
	}
	if s.is("sweeps, then sets") {
		if end, err := s.redis.Get(ctx, key+":end").Int64(); err == nil && time.Now().UnixNano() > end {
			s.redis.Del(ctx, key)
		}
		ttl = time.Hour
	}
	if s.is("ends with sessions") {
		if n, err := s.redis.PubSubNumSub(ctx, key+":holder").Result(); err != nil || n[key+":holder"] == 0 && s.redis.Del(ctx, key).Err() != nil {
			return nil, errors.New("out of order")
		}
	}
	if s.is("whole seconds") && ttl > time.Second {
		ttl = ttl.Truncate(time.Second)
	}
	if s.is("the nearest second") && ttl > time.Second+time.Millisecond { // less makes no difference but in virtual time
		ttl = ttl.Round(time.Second)
	}
	if s.is("prefixes are held") {
		for i := 1; i < len(key); i++ {
			if n, err := s.redis.Exists(ctx, key[:i]).Result(); n > 0 || err != nil {
				return nil, errors.Join(dlock.ErrHeld, err)
			}
		}
	}
	if s.is("locks itself out") {
		if _, locked := s.mutex.LoadOrStore(key, true); locked {
			return nil, dlock.ErrHeld
		}
	}
	if s.is("two messages") {
		if ok, err := s.redis.SetNX(ctx, key+":claim", value, 0).Result(); !ok || err != nil {
			return nil, errors.Join(dlock.ErrHeld, err)
		}
		defer s.redis.Del(ctx, key+":claim")
	}
	first, waited := ctx.Value(tokenKey{}).(uint64)
	if s.is("a token before the wait") && !waited {
		first = s.mint(ctx, key)
	}
	last, ahead := "", ""
	if s.is("a token for each client") {
		last = s.owner
	}
	if s.is("time as the token") {
		ahead = fmt.Sprint(time.Duration(s.ahead.Load()).Microseconds())
	}
	ms := millis(ttl)
	if s.is("remembers its records") {
		if _, created := s.recorded.LoadOrStore(key, true); !created {
			if s.redis.SetNX(ctx, key+":record", 1, 0).Err() != nil {
				s.recorded.Delete(key)
			}
		}
		if n, err := s.redis.Exists(ctx, key+":record").Result(); n == 0 || err != nil {
			return nil, errors.Join(dlock.ErrHeld, err)
		}
	}
	call := func(ctx context.Context) (uint64, error) {
		return acquire.Run(ctx, s.redis, []string{key},
			value, ms, s.is("reentrant"), s.is("a token after the grant"), last, ahead, cmp.Or(s.counter, ":number")).Uint64()
	}
	if s.is("takes a late reply for its") {
		call = s.mixed(call)
	}
	fence, err := call(s.call(ctx))
	if again := s.is("repeats as another", "repeats, and counts"); again && err != nil && !isTimeout(err) && ctx.Err() == nil {
		if s.is("repeats as another") {
			value = uuid.NewString()
		}
		fence, err = acquire.Run(ctx, s.redis, []string{key}, value, ms, s.is("repeats, and counts"), false, last, ahead, ":number").Uint64()
		if s.is("repeats, and counts") && err == nil {
			err = s.redis.Incr(ctx, key+":holds").Err()
		}
	}
	if err != nil && s.is("grants without a reply") {
		fence, err = 1, nil
	}
	if err != nil {
		return nil, err
	}
	if fence > 0 {
		if err := s.chat(ctx, key); err != nil {
			return nil, err
		}
	}
	if s.is("a token after the grant") && fence > 0 {
		if fence, err = s.redis.Incr(ctx, key+":number").Uint64(); err != nil {
			return nil, err
		}
	}
	if s.is("a token read after the grant") && fence > 0 {
		if fence, err = s.redis.Get(ctx, key+":number").Uint64(); err != nil {
			return nil, err
		}
	}
	if fence == 0 && !s.is("granted to all") {
		s.mutex.Delete(key)
		if s.is("an opaque error") {
			return nil, errors.New("try again")
		}
		return nil, dlock.ErrHeld
	}
	if s.is("the token is the owner") {
		value = fmt.Sprint(fence)
	}
	if s.is("sweeps, then sets") {
		s.redis.Set(ctx, key+":end", start.Add(s.ttl).UnixNano(), 0)
	}
	if s.is("a token before the wait") {
		fence = first
	}
	if s.is("a token that is forgotten") {
		s.redis.PExpire(ctx, key+":number", 2*ttl)
	}
	if s.is("ends with sessions") {
		sub := s.redis.Subscribe(ctx, key+":holder")
		if _, err := sub.Receive(ctx); err != nil {
			return nil, err
		}
		s.sessions = append(s.sessions, sub)
	}
	if s.is("microseconds are for ever") && s.ttl < time.Millisecond {
		return nil, errors.New("granted too late")
	}
	if s.is("no TTL") {
		if err := s.redis.Persist(ctx, key).Err(); err != nil {
			return nil, err
		}
	}
	if s.is("a late grant deletes") && time.Since(start) >= s.ttl {
		s.redis.Del(context.WithoutCancel(ctx), key)
		s.redis.Del(context.WithoutCancel(ctx), key)
		return nil, errors.New("granted too late")
	}
	if s.is("late until") || s.is("late until, if it waited") && ctx.Value(waitedKey{}) != nil {
		start = time.Now()
	}
	if began, ok := ctx.Value(waitedKey{}).(time.Time); ok && s.is("counted from a wait by its holder") {
		start = began
	}
	if s.is("its own time as the token") {
		fence = uint64(start.UnixNano()) //nolint:gosec // positive
	}
	if s.is("random tokens") {
		fence = 1 + uint64(time.Now().UnixNano()%1000)
	}
	l := &lease{s: s, key: key, value: value, fence: s.epoch + max(fence, 1), renewing: make(chan struct{}, 1)}
	if s.is("one for each client") {
		if before := s.only.Swap(l); before != nil {
			release.Run(ctx, s.redis, []string{before.key}, before.value)
		}
	}
	if s.is("released with its last") {
		s.holds[crc32.ChecksumIEEE([]byte(key))%256].Add(1)
	}
	until := start.Add(s.ttl)
	l.until.Store(&until)
	l.ctx, l.cancel = context.WithCancel(context.WithoutCancel(ctx))
	if !s.is("renews") {
		l.timer = time.AfterFunc(time.Until(until), l.cancel)
	} else {
		if !s.is("renewed until it ends") {
			ctx = context.WithoutCancel(ctx)
		}
		if !s.is("renewals that don't restart") || time.Now().UnixNano()-s.lastRelease.Load() > int64(400*time.Millisecond) {
			go l.renew(ctx)
		} else {
			time.AfterFunc(time.Until(until), l.cancel)
		}
	}
	if s.is("ends with the acquisition") {
		l.ctx, l.cancel = context.WithDeadline(ctx, until)
	}
	if s.is("never ends") {
		l.ctx, l.cancel = context.WithCancel(context.WithoutCancel(ctx))
	}
	if s.is("a timer that isn't stopped") {
		s.latest.Store(key, value)
		time.AfterFunc(s.ttl, func() {
			if value, _ := s.latest.Load(key); l.ctx.Err() != nil {
				release.Run(context.WithoutCancel(ctx), s.redis, []string{key}, value)
			}
		})
	}
	if s.is("deaf Close", "Close frees", "a wait ends a session") || s.releases != nil || s.is("renews when closed") {
		s.heldMu.Lock()
		s.held = append(s.held, l)
		s.heldMu.Unlock()
	}
	return l, nil
}

type reply struct {
	n   uint64
	err error
}

func (s *simple) mixed(call func(ctx context.Context) (uint64, error)) func(ctx context.Context) (uint64, error) {
	return func(ctx context.Context) (uint64, error) {
		go func() {
			n, err := call(context.WithoutCancel(ctx))
			s.replies <- reply{n, err}
		}()
		select {
		case r := <-s.replies:
			return r.n, r.err
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	}
}

func (s *simple) chat(ctx context.Context, key string) error {
	for range s.pings {
		if err := s.redis.Ping(ctx).Err(); err != nil {
			return err
		}
	}
	if !s.is("seventeen messages") {
		return nil
	}
	return errors.Join(s.redis.Persist(ctx, key).Err(), s.redis.PExpire(ctx, key, s.ttl).Err())
}

type (
	tokenKey  struct{}
	waitedKey struct{}
	valueKey  struct{}
)

func (s *simple) mint(ctx context.Context, key string) uint64 {
	return uint64(s.redis.Incr(ctx, key+":first").Val()) //nolint:gosec // positive
}

func (l *lease) renew(ctx context.Context) {
	refused, untold, failed := false, false, 0
	defer func() {
		if !refused && !untold {
			if l.ctx.Err() == nil {
				l.s.losses.Add(1)
				l.s.lostKeys.Store(l.key, true)
				if l.s.is("a lost lease leaves a goroutine") {
					defer func() { <-l.s.closed }()
				}
			}
			l.cancel()
		}
	}()
	releases, losses := l.s.released.Load(), l.s.losses.Load()
	l.s.leases.Store(l.key, l)
	number := l.s.renewed.Add(1)
	defer l.s.renewed.Add(-1)
	script := renew
	if l.s.is("renewed after its release") {
		script = upsert
	}
	orphan := l.s.is("granted when it is closed") && isClosed(l.s.closed)
	forEver := l.s.is("renews when closed", "tells the holder, and renews")
	for tries := 0; forEver || l.s.is("renewed after its release") && tries%3 != 0 || l.ctx.Err() == nil && time.Now().Before(*l.until.Load()); {
		tries++
		closed := l.s.closed
		if l.s.is("renews when closed") || orphan {
			closed = nil
		}
		select {
		case <-time.After(l.s.ttl / 10):
		case <-closed:
			if l.s.is("a lease leaves one at Close") {
				time.Sleep(50 * time.Second)
			}
			untold = untold || l.s.is("Close tells no holder")
			return
		}
		if _, ok := l.s.leases.Load(l.key); l.s.is("a release ends its key's") && !ok || l.s.room > 0 && number > l.s.room {
			continue
		}
		released := l.s.released.Load() != releases
		if released && l.s.is("a watchdog for all leases") {
			return
		}
		if l.s.is("a try ends renewals") && l.s.tried.Load() == l.key {
			return
		}
		if tries%3 != 0 || ctx.Err() != nil || l.idle.Load() || l.s.is("renews nothing") || l.s.is("renewed twice, and no more") && tries > 6 ||
			l.s.is("renewed until one is lost") && l.s.losses.Load() > 0 || l.s.is("renewed until another is lost") && l.s.losses.Load() != losses {
			continue
		}
		if _, lost := l.s.lostKeys.Load(l.key); lost && l.s.is("renews no key twice") {
			continue
		}
		start, ttl := time.Now(), millis(l.s.ttl)
		short, cancel := context.WithDeadline(ctx, *l.until.Load())
		if forEver {
			short = ctx
		}
		var err error
		if l.s.is("renews one after the other") {
			l.s.calls <- struct{}{}
		}
		if l.s.is("waiters take all connections") {
			end, err := l.s.turn(short)
			if err != nil {
				cancel()
				continue
			}
			end()
		}
		switch {
		case l.s.is("renews blindly"):
			err = l.s.redis.PExpire(short, l.key, l.s.ttl).Err()
		case l.s.is("renews what somebody deleted"):
			if data, _ := l.s.redis.Get(short, "data").Result(); data != l.s.data {
				err = errors.New("the server has lost its data")
				break
			}
			err = script.Run(short, l.s.redis, []string{l.key}, l.value, ttl).Err()
		case l.s.is("renews what it had"):
			var has string
			if has, err = l.s.redis.Get(ctx, l.key).Result(); has != l.value {
				err = errors.Join(err, dlock.ErrLost)
				break
			}
			short = ctx
			fallthrough
		case l.s.is("renewed, and not released"):
			err = l.s.redis.SetXX(short, l.key, l.value+"+", l.s.ttl).Err()
		case l.s.is("released while it is renewed"):
			var n int
			if n, err = another.Run(short, l.s.redis, []string{l.key}, l.version(), ttl).Int(); err == nil && n == 0 {
				err = dlock.ErrLost
			} else if err == nil {
				l.renews.Add(1)
			}
		case l.s.is("renews and takes"):
			err = l.s.redis.Set(short, l.key, l.value, l.s.ttl).Err()
		case l.s.is("renews in seconds"):
			ttl /= 1000
			fallthrough
		default:
			if released && l.s.is("stops, and says nothing") {
				break
			}
			var n int
			n, err = l.s.runs(script)(short, l.s.redis, []string{l.key}, l.value, ttl).Int()
			if err == nil && n == 0 && !l.s.is("renews what the server forgot") {
				err = dlock.ErrLost
			}
		}
		cancel()
		if l.s.is("renews one after the other") {
			<-l.s.calls
		}
		if l.s.is("renewed while it is released") && l.s.released.Load() != releases && l.ctx.Err() != nil {
			<-l.s.closed
		}
		if refused = err != nil && l.s.is("stops when it is refused") && !errors.Is(err, dlock.ErrLost) && !isTimeout(err); refused {
			return
		}
		if isServers(err) && l.s.is("stops silently at an error") {
			untold = true
			return
		}
		if isServers(err) && l.s.is("an error renews") {
			err = nil
		}
		if errors.Is(err, dlock.ErrLost) || errors.Is(err, redis.ErrClosed) || err != nil && l.s.is("renews when closed") ||
			isServers(err) && l.s.is("renewed until an error") {
			return
		}
		if err != nil && l.s.is("tells the holder, and renews") {
			l.cancel()
		}
		if err != nil {
			failed++
		}
		if failed > 0 && l.s.is("renewed until one fails") || failed > 2 && l.s.is("renewed until three have failed") {
			return
		}
		if l.s.is("renewed late") {
			start = time.Now()
		}
		untold = untold || err == nil && l.s.is("untold after renewals")
		if until := start.Add(l.s.ttl); err == nil && until.After(*l.until.Load()) {
			l.until.Store(&until)
			l.renewed.Store(true)
		}
	}
}

func (s *simple) runs(script *redis.Script) func(context.Context, redis.Scripter, []string, ...any) *redis.Cmd {
	if s.is("loads the renewals' script once") {
		return script.EvalSha
	}
	if s.script != nil {
		script = s.script
	}
	return script.Run
}

// expects takes the lock when the first lease that it saw would have expired.
func (s *simple) expects(ctx context.Context, key string) (takes func() bool) {
	seen, due := s.redis.Get(ctx, key).Val(), time.Now().Add(s.redis.PTTL(ctx, key).Val())
	return func() bool {
		return time.Now().After(due) && release.Run(ctx, s.redis, []string{key}, seen).Err() == nil
	}
}

func deletesPrefix(ctx context.Context, l *lease, release func() error) error {
	err := release()
	for _, key := range l.s.redis.Keys(ctx, "*").Val() {
		if strings.HasPrefix(key, l.key) && !strings.HasSuffix(key, ":number") {
			l.s.redis.Del(ctx, key)
		}
	}
	return err
}

// freesOthers has a failed release free all that the client has released or tried to release, as the end of a session does.
func freesOthers(ctx context.Context, l *lease, free func() error) error {
	err := free()
	if err != nil && !errors.Is(err, dlock.ErrLost) {
		for _, other := range l.s.allHeld() {
			go release.Run(context.WithoutCancel(ctx), l.s.redis, []string{other.key}, other.value)
		}
	}
	return err
}

func panicsTwice() func(ctx context.Context, l *lease, release func() error) error {
	var under sync.Map
	return func(_ context.Context, l *lease, release func() error) error {
		if _, both := under.LoadOrStore(l, true); both {
			panic("close of closed channel")
		}
		defer under.Delete(l)
		return release()
	}
}

// forgets has a release that has failed say, when it is retried, that the lease was lost.
func forgets() func(ctx context.Context, l *lease, release func() error) error {
	var called sync.Map
	return func(_ context.Context, l *lease, release func() error) error {
		if _, again := called.LoadOrStore(l, true); again {
			return dlock.ErrLost
		}
		return release()
	}
}

// hangs has a release wait for a goroutine that has ended: with the lease, or with an earlier release.
func hangs(_ context.Context, l *lease, release func() error) error {
	if l.ctx.Err() != nil && l.freed.Load() == l.s.is("a repeated release hangs") {
		<-l.s.closed
	}
	return release()
}

// remembers has tries fail until the lease that an earlier try saw would have expired.
func remembers() wrapping {
	var held sync.Map
	return func(ctx context.Context, s *simple, key string, try asking) (scenarios.Lease, error) {
		if until, ok := held.Load(key); ok && time.Now().Before(until.(time.Time)) {
			return nil, dlock.ErrHeld
		}
		l, err := try(ctx)
		if errors.Is(err, dlock.ErrHeld) {
			held.Store(key, time.Now().Add(s.redis.PTTL(ctx, key).Val()))
		}
		return l, err
	}
}

func abandons(ctx context.Context, s *simple, _ string, try asking) (scenarios.Lease, error) {
	done := make(chan func() (scenarios.Lease, error))
	go func() {
		l, err := try(context.WithoutCancel(ctx))
		select {
		case done <- func() (scenarios.Lease, error) { return l, err }:
		case <-s.closed:
		}
	}()
	select {
	case r := <-done:
		return r()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// answer is what an acquisition has returned, and after how long.
type answer struct {
	ctx  context.Context //nolint:containedctx // the acquisition's
	s    *simple
	key  string
	l    *lease
	err  error
	took time.Duration
}

// then has an acquisition do more at its end; it may change the answer.
func then(f func(a *answer)) wrapping {
	return func(ctx context.Context, s *simple, key string, ask asking) (scenarios.Lease, error) {
		began := time.Now()
		l, err := ask(ctx)
		a := &answer{ctx: ctx, s: s, key: key, err: err, took: time.Since(began)}
		a.l, _ = l.(*lease)
		if f(a); a.err != nil {
			return nil, a.err
		}
		return a.l, nil
	}
}

func leavesWaiter(a *answer) {
	if a.err == nil && a.took > time.Millisecond {
		go func() { <-a.s.closed }()
	}
}

// believes takes an error that ends a wait for a grant.
func believes(a *answer) {
	if a.err != nil && !isTimeout(a.err) && a.ctx.Err() == nil && a.took > time.Millisecond {
		a.l, a.err = a.s.granted(a.ctx, a.key), nil
	}
}

func hurries(a *answer) {
	if end, ok := a.ctx.Deadline(); a.err == nil && ok && time.Until(end) < a.s.ttl {
		a.s.redis.PExpire(a.ctx, a.key, time.Until(end))
	}
}

func grantsOn(is func(error) bool) wrapping {
	return then(func(a *answer) {
		if is(a.err) {
			a.l, a.err = a.s.granted(a.ctx, a.key), nil
		}
	})
}

func isRefused(err error) bool { return err != nil && strings.Contains(err.Error(), "refused") }

// granted returns a lease that no server knows of.
func (s *simple) granted(ctx context.Context, key string) *lease {
	until := time.Now().Add(s.ttl)
	l := &lease{s: s, key: key, fence: 1}
	l.value, _ = ctx.Value(valueKey{}).(string)
	l.until.Store(&until)
	l.ctx, l.cancel = context.WithDeadline(context.WithoutCancel(ctx), until)
	return l
}

// version is the lease's value on the server if every renewal got a reply.
func (l *lease) version() string { return l.value + strings.Repeat("+", int(l.renews.Load())) }

func isTimeout(err error) bool {
	n, ok := errors.AsType[net.Error](err)
	return ok && n.Timeout() || errors.Is(err, context.DeadlineExceeded)
}

func (s *simple) Acquire(ctx context.Context, key string) (_ scenarios.Lease, err error) {
	if s.acquires != nil {
		return s.acquires(ctx, s, key, func(ctx context.Context) (scenarios.Lease, error) { return s.acquire(ctx, key) })
	}
	return s.acquire(ctx, key)
}

func (s *simple) acquire(ctx context.Context, key string) (_ scenarios.Lease, err error) {
	if s.is("a queue of the dead", "a queue that forgets") {
		return s.line(ctx, key)
	}
	end, err := s.turn(ctx)
	if err != nil {
		return nil, err
	}
	if s.is("failed tries keep connections") {
		end()
	} else {
		defer end()
	}
	if s.is("waits for its own lock") {
		own, _ := s.mutex.LoadOrStore(key, make(chan struct{}, 1))
		select {
		case own.(chan struct{}) <- struct{}{}:
		case <-s.closed:
			return nil, dlock.ErrClosed
		}
		defer func() {
			if err != nil {
				<-own.(chan struct{})
			}
		}()
	}
	began := time.Now()
	defer func() { // not where the wait ends: a poll may be under way then
		if ctx.Err() == nil {
			return
		}
		if s.is("a waiter leaves with others") {
			s.left.Store(key, time.Now())
		}
		if s.is("a wait ends a session") {
			for _, l := range s.allHeld() {
				release.Run(context.WithoutCancel(ctx), s.redis, []string{l.key}, l.value)
			}
		}
	}()
	if s.is("a token before the wait") {
		ctx = context.WithValue(ctx, tokenKey{}, s.mint(ctx, key))
	}
	ctx = context.WithValue(ctx, waitedKey{}, began)
	var takes func() bool
	for {
		if s.is("get, then set") {
			if n, err := s.redis.Exists(ctx, key).Result(); n > 0 || err != nil {
				time.Sleep(time.Millisecond)
				continue
			}
			time.Sleep(3 * time.Millisecond) // two waiters must check before one sets
			if err := s.redis.Del(ctx, key).Err(); err != nil {
				return nil, err
			}
		}
		l, err := s.try(ctx, key)
		if s.is("waits on when it is closed") && errors.Is(err, redis.ErrClosed) {
			time.Sleep(3 * patient)
		}
		if err == nil && s.is("cancelled as it is granted") && ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err == nil && s.is("counted from a wait") {
			s.redis.PExpire(ctx, key, s.ttl-time.Since(began))
		}
		if !errors.Is(err, dlock.ErrHeld) {
			if err != nil {
				s.deafened.Store(s.is("waiters are deaf after errors"))
			}
			return l, err
		}
		if s.observes != nil && takes == nil {
			takes = s.observes(s, ctx, key)
		}
		again := cmp.Or(s.polls, 10*time.Millisecond)
		var messages <-chan *redis.Message
		if s.is("waits for a message", "sleeps for ever") {
			sub := s.redis.Subscribe(ctx, key+":free")
			defer sub.Close() //nolint:errcheck // it is only read
			messages = sub.Channel()
			if again, err = s.redis.PTTL(ctx, key).Result(); err != nil {
				return nil, err
			}
		}
		if s.is("sleeps for ever") {
			again = time.Hour
		}
		if s.deafened.Load() {
			again = s.redis.PTTL(ctx, key).Val()
		}
		for isHeld := true; isHeld; {
			if left, ok := s.left.Load(key); ok && left.(time.Time).After(began) {
				again = max(again, s.redis.PTTL(ctx, key).Val())
			}
			select {
			case <-messages:
				isHeld = false
			case <-time.After(again):
				if takes != nil && takes() {
					takes, isHeld = nil, false
					break
				}
				isHeld = messages == nil && !s.is("sweeps, then sets", "ends with sessions", "reentrant") &&
					s.redis.Exists(ctx, key).Val() > 0 // faster than a script
				if s.backsOff > 0 {
					again = min(2*again, s.backsOff)
				}
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	}
}

// line waits in a queue, and stays in it if the server doesn't reply.
func (s *simple) line(ctx context.Context, key string) (scenarios.Lease, error) {
	me, forgets := uuid.NewString(), s.is("a queue that forgets")
	if forgets {
		s.redis.Set(ctx, key+":"+me, 1, 4*time.Second)
	}
	if err := s.redis.RPush(ctx, key+":line", me).Err(); err != nil {
		return nil, err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 100*time.Millisecond)
		defer cancel()
		_ = s.redis.LRem(ctx, key+":line", 1, me).Err()
	}()
	for {
		if first, err := s.redis.LIndex(ctx, key+":line", 0).Result(); err != nil && (!forgets || !errors.Is(err, redis.Nil)) {
			return nil, err
		} else if forgets && first != me && first != "" && s.redis.Exists(ctx, key+":"+first).Val() == 0 && ctx.Err() == nil {
			s.redis.LRem(ctx, key+":line", 1, first)
		} else if first == me {
			if l, err := s.try(ctx, key); !errors.Is(err, dlock.ErrHeld) {
				return l, err
			}
		}
		// Never when the servers lose their data: a try could follow an older check.
		if err := jitter.Sleep(ctx, 11*time.Millisecond); err != nil {
			return nil, err
		}
	}
}

func (s *simple) allHeld() []*lease {
	s.heldMu.Lock()
	defer s.heldMu.Unlock()
	return slices.Clone(s.held)
}

func (s *simple) Close() error {
	ends := s.close.Do
	if s.is("two Closes at once panic") {
		if isClosed(s.closed) {
			return nil
		}
		time.Sleep(time.Millisecond)
		ends = func(f func()) { f() }
	}
	ends(func() { close(s.closed) })
	if s.closes != nil {
		s.closes(s)
	}
	if s.is("granted when it is closed") {
		return nil
	}
	for _, sub := range s.sessions {
		_ = sub.Close()
	}
	if s.is("deaf Close", "Close frees") {
		for _, l := range s.allHeld() {
			if s.is("Close frees") {
				release.Run(context.Background(), s.redis, []string{l.key}, l.value)
			} else {
				_ = l.Release(context.Background())
			}
		}
	}
	if s.is("renews when closed") {
		for _, l := range s.allHeld() {
			l.cancel()
		}
		return nil // the renewals end with the server
	}
	return s.redis.Close()
}

func (l *lease) Fence() uint64      { return l.fence }
func (l *lease) TTL() time.Duration { return l.s.ttl }
func (l *lease) Until() time.Time {
	if l.s.is("no Until") {
		return time.Time{}
	}
	return *l.until.Load()
}
func (l *lease) Context() context.Context { return l.ctx }

func (l *lease) Release(ctx context.Context) error {
	if l.s.releases != nil {
		return l.s.releases(ctx, l, func() error { return l.release(ctx) })
	}
	return l.release(ctx)
}

func (l *lease) release(ctx context.Context) (err error) {
	if l.s.is("a renewal keeps the release") {
		defer keeps(ctx, l.renewing, &err)()
	}
	if l.s.is("a release ends its key's") && !l.freed.Load() {
		l.s.leases.Delete(l.key)
	}
	if l.s.is("releases too late") && ctx.Err() != nil {
		return ctx.Err()
	}
	if l.s.is("panics") && l.freed.Load() {
		panic("close of closed channel")
	}
	if l.s.is("tells the holder, and renews") && l.ctx.Err() != nil {
		return dlock.ErrLost
	}
	if !l.s.is("renews after a failed release") {
		l.cancel()
	}
	l.s.released.Add(1)
	l.s.lastRelease.Store(time.Now().UnixNano())
	if own, ok := l.s.mutex.Load(l.key); l.s.is("waits for its own lock") && ok && !l.freed.Load() {
		<-own.(chan struct{})
		l.freed.Store(true)
	}
	if l.s.is("Close forgets a release") {
		go func() {
			select {
			case <-time.After(500 * time.Millisecond):
				release.Run(context.WithoutCancel(ctx), l.s.redis, []string{l.key}, l.value)
			case <-l.s.closed:
			}
		}()
		return nil
	}
	if l.s.is("never releases") ||
		l.s.is("tires") && l.s.redis.Incr(ctx, l.key+":releases").Val() == 20 && l.s.redis.Persist(ctx, l.key).Err() == nil {
		return nil
	}
	if l.s.is("repeats, and counts") && l.s.redis.Decr(ctx, l.key+":holds").Val() >= 0 {
		return nil
	}
	if l.s.is("released again after a lost reply", "released late, by one owner") && (l.freed.Load() || time.Now().After(l.Until())) {
		return dlock.ErrLost
	}
	if l.s.is("releases once") && l.freed.Load() {
		return nil
	}
	l.freed.Store(l.s.is("released late, by one owner", "releases once"))
	l.s.mutex.Delete(l.key)
	if l.s.is("waits for a message", "sleeps for ever") {
		defer l.s.redis.Publish(ctx, l.key+":free", 1)
	}
	if l.s.is("released with its last") && !l.freed.Load() {
		l.freed.Store(true)
		if l.s.holds[crc32.ChecksumIEEE([]byte(l.key))%256].Add(-1) > 0 {
			return nil
		}
	}
	if l.s.is("a release asks first") {
		if has, err := l.s.redis.Get(ctx, l.key).Result(); has != l.value {
			return errors.Join(err, dlock.ErrLost)
		}
	}
	if l.s.is("plain delete", "a release asks first") {
		return l.s.redis.Del(ctx, l.key).Err()
	}
	run := release.Run
	if l.s.is("loads a script once") {
		run = release.EvalSha
	}
	if l.s.is("releases keep a mutex", "releases keep a key's mutex") {
		of := l.key
		if l.s.is("releases keep a mutex") {
			of = ""
		}
		own, _ := l.s.mutex.LoadOrStore("release "+of, make(chan struct{}, 1))
		mutex := own.(chan struct{})
		select {
		case mutex <- struct{}{}:
		case <-ctx.Done():
			return ctx.Err()
		}
		n, err := run(ctx, l.s.redis, []string{l.key}, l.version()).Int()
		if err != nil {
			return err
		}
		<-mutex
		if n == 0 {
			err = fmt.Errorf("%w: another has it", dlock.ErrLost)
		}
		return err
	}
	n, err := run(l.s.call(ctx), l.s.redis, []string{l.key}, l.version()).Int()
	if err == nil {
		l.freed.Store(true)
	}
	if l.s.is("a release says nothing") {
		return nil
	}
	if err == nil {
		l.cancel()
	}
	if err == nil && n == 0 {
		err = fmt.Errorf("%w: another has it", dlock.ErrLost)
	}
	return err
}

// registers adds a waiter to the server's list once, and polls only while it is listed.
func registers(ctx context.Context, s *simple, key string, _ asking) (scenarios.Lease, error) {
	list, me := key+":list", uuid.NewString()
	defer s.redis.SRem(context.WithoutCancel(ctx), list, me)
	if err := s.redis.SAdd(ctx, list, me).Err(); err != nil {
		return nil, err
	}
	return polls(func() (scenarios.Lease, error) {
		listed, err := s.redis.SIsMember(ctx, list, me).Result()
		if listed {
			return s.TryAcquire(ctx, key)
		}
		return nil, cmp.Or(err, dlock.ErrHeld)
	}, func() error { return jitter.Sleep(ctx, 23*time.Millisecond) }) // as in line
}

// misses has a waiter subscribe only after a refused try. It retries on a message or a reconnect.
func misses(ctx context.Context, s *simple, key string, _ asking) (scenarios.Lease, error) {
	return polls(func() (scenarios.Lease, error) { return s.TryAcquire(ctx, key) }, func() error {
		left := s.redis.PTTL(ctx, key).Val()
		sub := s.redis.Subscribe(ctx, key+":free")
		_, err := sub.Receive(ctx)
		if err == nil {
			select {
			case <-sub.ChannelWithSubscriptions():
			case <-time.After(left):
			case <-ctx.Done():
				err = ctx.Err()
			}
		}
		return errors.Join(err, sub.Close())
	})
}

// polls tries, and pauses, while the lock is held.
func polls(try func() (scenarios.Lease, error), pause func() error) (scenarios.Lease, error) {
	for {
		l, err := try()
		if !errors.Is(err, dlock.ErrHeld) {
			return l, err
		}
		if err := pause(); err != nil {
			return nil, err
		}
	}
}

// listens has a waiter try again on each message after which it still listens, or when the lease has expired.
func listens(still func(message string) bool) wrapping {
	return func(ctx context.Context, s *simple, key string, _ asking) (scenarios.Lease, error) {
		sub := s.redis.Subscribe(ctx, key+":free")
		defer sub.Close() //nolint:errcheck // it is only read
		if _, err := sub.Receive(ctx); err != nil {
			return nil, err
		}
		messages := sub.ChannelWithSubscriptions()
		return polls(func() (scenarios.Lease, error) { return s.TryAcquire(ctx, key) }, func() error {
			select {
			case m := <-messages: // or it has connected again
				if told, ok := m.(*redis.Message); ok && !still(told.Payload) {
					messages = nil
				}
			case <-time.After(s.redis.PTTL(ctx, key).Val()):
			case <-ctx.Done():
			}
			return ctx.Err()
		})
	}
}

var says = redis.NewScript(`
	if redis.call('get', KEYS[1]) ~= ARGV[1] then return 0 end
	redis.call('publish', KEYS[1] .. ':free', 1) return redis.call('del', KEYS[1])`)

func tells(ctx context.Context, l *lease, _ func() error) error {
	n, err := says.Run(ctx, l.s.redis, []string{l.key}, l.value).Int()
	if err == nil {
		l.cancel()
	}
	if err == nil && n == 0 {
		err = dlock.ErrLost
	}
	return err
}

// endsOthers has a waiter that is served end its client's other subscriptions; those waiters then wait for the lease to expire.
func endsOthers(ctx context.Context, s *simple, key string, _ asking) (scenarios.Lease, error) {
	began, due := time.Now(), time.Time{}
	l, err := polls(func() (scenarios.Lease, error) { return s.TryAcquire(ctx, key) }, func() error {
		if due.IsZero() {
			due = time.Now().Add(s.redis.PTTL(ctx, key).Val())
		}
		for isHeld := true; isHeld; {
			if err := jitter.Sleep(ctx, 10*time.Millisecond); err != nil {
				return err
			}
			isHeld = s.redis.Exists(ctx, key).Val() > 0
			if left, ok := s.left.Load(key); ok && !left.(time.Time).Before(began) && time.Now().Before(due) {
				isHeld = true
			}
		}
		return nil
	})
	if err == nil && !due.IsZero() {
		s.left.Store(key, time.Now())
	}
	return l, err
}

// asksOn has timers go on renewing a released lease, in vain.
func asksOn(ctx context.Context, l *lease, free func() error) error {
	var again func()
	again = func() {
		select {
		case <-l.s.closed:
		default:
			short, cancel := context.WithTimeout(context.WithoutCancel(ctx), l.s.ttl)
			defer cancel()
			renew.Run(short, l.s.redis, []string{l.key}, l.value, millis(l.s.ttl))
			time.AfterFunc(l.s.ttl/3, again)
		}
	}
	time.AfterFunc(l.s.ttl/3, again)
	return free()
}

func insists(ctx context.Context, l *lease, free func() error) error {
	err := free()
	if err != nil && !errors.Is(err, dlock.ErrLost) {
		go l.s.insist(context.WithoutCancel(ctx), func(ctx context.Context) error { return l.s.redis.Del(ctx, l.key).Err() })
	}
	return err
}

// isServers reports whether a server answered with an error.
func isServers(err error) bool {
	_, ok := errors.AsType[redis.Error](err)
	return ok && !errors.Is(err, redis.Nil)
}

func freesByError(_ context.Context, _ *lease, free func() error) error {
	if err := free(); !isServers(err) {
		return err
	}
	return nil
}

// answers has a release that succeeds return err.
func answers(err error) func(ctx context.Context, l *lease, free func() error) error {
	return func(_ context.Context, _ *lease, free func() error) error { return cmp.Or(free(), err) }
}

// saysLostRenewed says so of leases that have been renewed.
func saysLostRenewed(_ context.Context, l *lease, free func() error) error {
	if err := free(); err != nil || !l.renewed.Load() {
		return err
	}
	return dlock.ErrLost
}

// releasesLast releases the last 100 leases of a client. The release of an older one returns err.
func releasesLast(s *simple, err error) {
	var got atomic.Int64
	var numbers sync.Map
	s.acquires = then(func(a *answer) {
		if a.err == nil {
			numbers.Store(a.l, got.Add(1))
		}
	})
	s.tryCalls = s.acquires
	s.releases = func(_ context.Context, l *lease, free func() error) error {
		if number, ok := numbers.Load(l); ok && got.Load()-number.(int64) >= 100 {
			return err
		}
		return free()
	}
}

func isEnded(err error) bool { return isTimeout(err) || errors.Is(err, context.Canceled) }

// spoils has an acquisition that failed so make its client's later ones hang, of the same key or of others.
func spoils(isSo func(error) bool, same bool) wrapping {
	var failed sync.Map
	return func(ctx context.Context, _ *simple, key string, ask asking) (scenarios.Lease, error) {
		spoilt := false
		failed.Range(func(k, _ any) bool {
			spoilt = spoilt || (k == key) == same
			return true
		})
		if spoilt {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		l, err := ask(ctx)
		if isSo(err) {
			failed.Store(key, true)
		}
		return l, err
	}
}

var next = redis.NewScript(`
	redis.call('sadd', KEYS[2] .. ':joined', ARGV[1])
	redis.call('psetex', KEYS[2] .. ARGV[1], 1000, 1)
	local head = redis.call('lindex', KEYS[2], 0)
	if ARGV[3] == '1' and head and redis.call('sismember', KEYS[2] .. ':joined', head) == 1 and redis.call('exists', KEYS[2] .. head) == 0 then
		redis.call('lpop', KEYS[2])
	elseif redis.call('exists', KEYS[1]) == 0 and (ARGV[3] == '0' or head == ARGV[1]) then
		local first = redis.call('lpop', KEYS[2])
		if first then redis.call('incr', KEYS[3]) redis.call('set', KEYS[1], first, 'px', ARGV[2]) end
	end
	return redis.call('get', KEYS[1]) == ARGV[1] and tonumber(redis.call('get', KEYS[3])) or 0`)

// queues has waiters queue for the lock. One that fails, but not because its context ends, stays in the queue until it is granted the
// lock. If joining, one that fails as it joins stays for ever, and others until they haven't polled for a second.
func queues(joining bool) wrapping {
	return func(ctx context.Context, s *simple, key string, _ asking) (scenarios.Lease, error) {
		me, waits := uuid.NewString(), false
		err := s.redis.RPush(ctx, key+":line", me).Err()
		for err == nil {
			waits = true
			var fence uint64
			until := time.Now().Add(s.ttl)
			if fence, err = next.Run(ctx, s.redis, []string{key, key + ":line", key + ":number"}, me, millis(s.ttl), joining).Uint64(); fence > 0 {
				l := s.granted(context.WithValue(ctx, valueKey{}, me), key)
				l.fence = fence
				l.until.Store(&until)
				return l, nil
			}
			if err == nil {
				err = jitter.Sleep(ctx, 19*time.Millisecond)
			}
		}
		if isEnded(err) || joining && waits {
			go s.insist(context.WithoutCancel(ctx), func(ctx context.Context) error {
				err := s.redis.LRem(ctx, key+":line", 1, me).Err()
				return errors.Join(err, release.Run(ctx, s.redis, []string{key}, me).Err())
			})
		}
		return nil, err
	}
}

// joins has a try that is refused join a queue, and leave it in another message.
func joins(s *simple) {
	blocked := func(ctx context.Context, key string) error {
		n, err := s.redis.LLen(ctx, key+":line").Result()
		if n > 0 {
			err = dlock.ErrHeld
		}
		return err
	}
	s.tryCalls = func(ctx context.Context, s *simple, key string, try asking) (scenarios.Lease, error) {
		if err := blocked(ctx, key); err != nil {
			return nil, err
		}
		l, err := try(ctx)
		if errors.Is(err, dlock.ErrHeld) {
			s.redis.RPush(ctx, key+":line", 1)
			s.redis.LRem(ctx, key+":line", 1, 1)
		}
		return l, err
	}
	s.acquires = func(ctx context.Context, _ *simple, key string, acquire asking) (scenarios.Lease, error) {
		for errors.Is(blocked(ctx, key), dlock.ErrHeld) {
			time.Sleep(13 * time.Millisecond)
		}
		return acquire(ctx)
	}
}

// takesTurns has a client's calls for a key wait for each other.
func takesTurns(s *simple) {
	var turns sync.Map
	s.acquires = func(ctx context.Context, _ *simple, key string, ask asking) (scenarios.Lease, error) {
		turn, _ := turns.LoadOrStore(key, make(chan struct{}, 1))
		select {
		case turn.(chan struct{}) <- struct{}{}:
			defer func() { <-turn.(chan struct{}) }()
			return ask(ctx)
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	s.tryCalls = s.acquires
}

// sharesWaits has a client's waiters of a key wait together, until the context of the first ends.
func sharesWaits(s *simple) {
	type shared struct {
		done chan struct{}
		err  error
	}
	var waits sync.Map
	s.acquires = func(ctx context.Context, s *simple, key string, _ asking) (scenarios.Lease, error) {
		for {
			l, err := s.try(ctx, key)
			if !errors.Is(err, dlock.ErrHeld) {
				return l, err
			}
			mine := &shared{done: make(chan struct{})}
			theirs, joined := waits.LoadOrStore(key, mine)
			if w := theirs.(*shared); joined {
				select {
				case <-w.done:
					err = w.err
				case <-ctx.Done():
					err = ctx.Err()
				}
			} else {
				for err = nil; err == nil && s.redis.Exists(ctx, key).Val() > 0; {
					err = jitter.Sleep(ctx, 17*time.Millisecond)
				}
				mine.err = err
				waits.Delete(key)
				close(mine.done)
			}
			if err != nil {
				return nil, err
			}
		}
	}
}

// endsOwn has a cancelled wait, or a refused try, release the lock if its own client holds it.
func endsOwn(s *simple, tries bool) {
	ends := func(isSo bool) wrapping {
		return then(func(a *answer) {
			if own, ok := s.latest.Load(a.key); a.err == nil {
				s.latest.Store(a.key, a.l.value)
			} else if ok && isSo {
				release.Run(context.WithoutCancel(a.ctx), s.redis, []string{a.key}, own)
			}
		})
	}
	s.tryCalls, s.acquires = ends(tries), ends(!tries)
}

// recognizes takes the lease of an earlier try, whose reply was lost, for a new one.
func recognizes(ctx context.Context, s *simple, key string, try asking) (scenarios.Lease, error) {
	value := uuid.NewString()
	l, err := try(context.WithValue(ctx, valueKey{}, value))
	if err != nil && !errors.Is(err, dlock.ErrHeld) {
		s.latest.Store(key, value)
	}
	if own, ok := s.latest.Load(key); ok && errors.Is(err, dlock.ErrHeld) && s.redis.Get(ctx, key).Val() == own {
		again := s.granted(context.WithValue(ctx, valueKey{}, own), key)
		again.fence, err = s.redis.Get(ctx, key+":number").Uint64()
		return again, err
	}
	return l, err
}

// inSession has a lease end, and its holder be told, with a session whose last renewal was half a TTL ago.
func inSession(a *answer) {
	if a.err == nil {
		a.l.timer.Reset(a.s.ttl/2 - a.took)
		a.err = a.s.redis.PExpire(a.ctx, a.key, a.s.ttl/2).Err()
	}
}

// hold is a lock that a client has got n times.
type hold struct {
	l *lease
	n int
}

// counting has a client get the lock that it holds again. nested is called for each such grant, and for each release but the last.
func counting(nested func(h *hold, gets bool)) func(s *simple) {
	return func(s *simple) {
		var mu sync.Mutex
		holds := map[string]*hold{}
		held := func(key string, more int) (l *lease, n int) {
			mu.Lock()
			defer mu.Unlock()
			h := holds[key]
			if h == nil || h.l.ctx.Err() != nil || !time.Now().Before(*h.l.until.Load()) { // its context may end later in the same instant
				return nil, 0
			}
			if h.n += more; h.n == 0 {
				delete(holds, key)
			} else {
				nested(h, more > 0)
			}
			return h.l, h.n
		}
		s.acquires = func(ctx context.Context, _ *simple, key string, ask asking) (scenarios.Lease, error) {
			if l, _ := held(key, 1); l != nil {
				return l, nil
			}
			l, err := ask(ctx)
			if err == nil {
				mu.Lock()
				defer mu.Unlock()
				holds[key] = &hold{l.(*lease), 1}
			}
			return l, err
		}
		s.tryCalls = s.acquires
		s.releases = func(ctx context.Context, l *lease, release func() error) error {
			switch h, n := held(l.key, -1); {
			case h == nil:
				return release()
			case n > 0:
				return nil
			default:
				return h.release(ctx)
			}
		}
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// goesOn has a waiter return when its client is closed, and wait for the lock nevertheless.
func goesOn(ctx context.Context, s *simple, _ string, acquire asking) (scenarios.Lease, error) {
	type result struct {
		l   scenarios.Lease
		err error
	}
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	leaves := context.AfterFunc(ctx, end)
	done := make(chan result, 1)
	go func() {
		l, err := acquire(life)
		done <- result{l, err}
	}()
	select {
	case r := <-done:
		return r.l, r.err
	case <-s.closed:
		leaves()
		return nil, dlock.ErrClosed
	}
}

// givesUp has a waiter wait for two seconds at most.
func givesUp(ctx context.Context, _ *simple, _ string, acquire asking) (scenarios.Lease, error) {
	short, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	l, err := acquire(short)
	if err != nil && ctx.Err() == nil {
		err = dlock.ErrHeld
	}
	return l, err
}

// renewsBut renews leases except those of which isSo.
func renewsBut(isSo func(s *simple, key string, waited bool) bool) func(s *simple) {
	return func(s *simple) {
		has("renews")(s)
		renews := func(waits bool) wrapping {
			return then(func(a *answer) {
				if a.err == nil && isSo(s, a.key, waits && a.took > 50*time.Millisecond) {
					a.l.idle.Store(true)
				}
			})
		}
		s.acquires, s.tryCalls = renews(true), renews(false)
	}
}

func isOdd(key string) bool { return url.PathEscape(key) != key }

func isMarked(s *simple, key string, _ bool) bool {
	_, ok := s.latest.Load(key)
	return ok
}

// succeeding does something with a lease whose predecessor hasn't been released.
func succeeding(s *simple, do func(l *lease)) {
	s.acquires = then(func(a *answer) {
		if a.err == nil && a.s.redis.Incr(context.WithoutCancel(a.ctx), a.key+":grants").Val() > 1 {
			do(a.l)
		}
	})
	s.tryCalls = s.acquires
	s.releases = func(ctx context.Context, l *lease, free func() error) error {
		err := free()
		if err == nil {
			l.s.redis.Del(ctx, l.key+":grants")
		}
		return err
	}
}

func renewsSucceeding(s *simple) {
	has("renews")(s)
	succeeding(s, func(l *lease) { l.idle.Store(true) })
}

func sleepsIf(isSo func(key string) bool) wrapping {
	return func(ctx context.Context, s *simple, key string, acquire asking) (scenarios.Lease, error) {
		if !isSo(key) {
			return acquire(ctx)
		}
		return polls(func() (scenarios.Lease, error) { return s.try(ctx, key) }, func() error {
			return jitter.Sleep(ctx, s.redis.PTTL(ctx, key).Val())
		})
	}
}

// forgetsOld has a try of a lock that its client holds refused if it is one of the last 64, and granted otherwise.
func forgetsOld() wrapping {
	var mu sync.Mutex
	var keys []string
	return func(ctx context.Context, s *simple, key string, try asking) (scenarios.Lease, error) {
		l, err := try(ctx)
		mu.Lock()
		defer mu.Unlock()
		if i := slices.Index(keys, key); err != nil && i >= 0 && i < len(keys)-64 {
			return s.granted(ctx, key), nil
		} else if err == nil {
			keys = append(keys, key)
		}
		return l, err
	}
}

func unchanged(_ context.Context, _ *lease, free func() error) error { return free() }

func deletesAll(s *simple) {
	for _, l := range s.allHeld() {
		if !l.freed.Load() {
			s.redis.Del(context.Background(), l.key)
		}
	}
}

// opensInVain has a client that can't connect when it opens fail for ever.
func opensInVain(s *simple) {
	var failed error
	s.opens = func(ctx context.Context, s *simple) { failed = s.redis.Ping(ctx).Err() }
	s.acquires = func(ctx context.Context, _ *simple, _ string, ask asking) (scenarios.Lease, error) {
		if failed != nil {
			return nil, failed
		}
		return ask(ctx)
	}
	s.tryCalls = s.acquires
}

// failsWaits has a client's waiters fail when one of its calls does so.
func failsWaits(s *simple, so func(error) bool) {
	var mu sync.Mutex
	waits, closed := map[int]context.CancelCauseFunc{}, errors.New("connection closed")
	ends := func(err error) {
		if so(err) {
			mu.Lock()
			defer mu.Unlock()
			for _, end := range waits {
				end(closed)
			}
		}
	}
	s.acquires = func(ctx context.Context, _ *simple, _ string, acquire asking) (scenarios.Lease, error) {
		own, end := context.WithCancelCause(ctx)
		mu.Lock()
		n := len(waits)
		waits[n] = end
		mu.Unlock()
		l, err := acquire(own)
		if err != nil && errors.Is(context.Cause(own), closed) {
			return nil, closed
		}
		ends(err)
		return l, err
	}
	s.tryCalls = func(ctx context.Context, _ *simple, _ string, try asking) (scenarios.Lease, error) {
		l, err := try(ctx)
		ends(err)
		return l, err
	}
}

// roundsDown has the server wait for whole seconds, and 0 mean for ever, unless the client itself has had the lock.
func roundsDown(ctx context.Context, s *simple, key string, ask asking) (scenarios.Lease, error) {
	if end, ok := ctx.Deadline(); ok && time.Until(end) < time.Second && ctx.Err() == nil && !isMarked(s, key, false) {
		ctx = context.WithoutCancel(ctx)
	}
	l, err := ask(ctx)
	if err == nil {
		s.latest.Store(key, true)
	}
	return l, err
}

func leavesOn(isSo func(error) bool) wrapping {
	return then(func(a *answer) {
		if isSo(a.err) {
			go func() { <-a.s.closed }()
		}
	})
}

func leavesRenewal(_ context.Context, l *lease, renew func() error) error {
	go func() { <-l.s.closed }()
	return renew()
}

// triesOn sends a try whose context has ended, and nobody knows what it got.
func triesOn(ctx context.Context, _ *simple, _ string, try asking) (scenarios.Lease, error) {
	if ctx.Err() != nil {
		l, err := try(context.WithoutCancel(ctx))
		if err == nil {
			l.(*lease).s.redis.Persist(context.WithoutCancel(ctx), l.(*lease).key)
		}
		return nil, ctx.Err()
	}
	return try(ctx)
}

func losesIfEnded(ctx context.Context, l *lease, renew func() error) error {
	if ctx.Err() != nil {
		l.s.redis.Del(context.WithoutCancel(ctx), l.key)
	}
	return renew()
}

func panicsIfClosed(_ context.Context, l *lease, renew func() error) error {
	if isClosed(l.s.closed) {
		panic("send on closed channel")
	}
	return renew()
}

func hangsIfClosed(ctx context.Context, s *simple, _ string, try asking) (scenarios.Lease, error) {
	if isClosed(s.closed) {
		time.Sleep(50 * time.Second)
	}
	return try(ctx)
}

// sharesToken has a client's leases of a key share their token.
func sharesToken(a *answer) {
	if a.err == nil {
		if old, ok := a.s.latest.Swap(a.key, a.l); ok {
			old.(*lease).fence = a.l.fence
		}
	}
}

// conflicts has an acquisition fail that meets another.
func conflicts() func(s *simple) {
	var now sync.Map
	return func(s *simple) {
		s.acquires = func(ctx context.Context, _ *simple, key string, acquire asking) (scenarios.Lease, error) {
			n, _ := now.LoadOrStore(key, new(atomic.Int32))
			defer n.(*atomic.Int32).Add(-1)
			if n.(*atomic.Int32).Add(1) > 1 {
				return nil, errors.New("could not serialize access")
			}
			return acquire(ctx)
		}
	}
}

// marks has both kinds of acquisitions do f at their ends.
func marks(s *simple, f func(a *answer)) { s.acquires, s.tryCalls = then(f), then(f) }

// skips has renewals by hand of some leases do nothing.
func skips(isSo func(l *lease) bool) func(context.Context, *lease, func() error) error {
	return func(_ context.Context, l *lease, renew func() error) error {
		if isSo(l) {
			return nil
		}
		return renew()
	}
}

func freesBut(_ context.Context, l *lease, free func() error) error {
	if l.idle.Load() {
		return nil
	}
	return free()
}

// tellsLast has a client's waiters poll only for the key that one began to wait for last.
func tellsLast(s *simple) {
	var last atomic.Value
	s.acquires = func(ctx context.Context, s *simple, key string, _ asking) (scenarios.Lease, error) {
		l, err := s.try(ctx, key)
		if errors.Is(err, dlock.ErrHeld) {
			last.Store(key)
		}
		for errors.Is(err, dlock.ErrHeld) {
			if err := jitter.Sleep(ctx, 11*time.Millisecond); err != nil {
				return nil, err
			}
			if last.Load() == key {
				l, err = s.try(ctx, key)
			}
		}
		return l, err
	}
}
