package locks_test

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"net"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

var (
	chaosFor  = flag.Duration("chaos", 300*time.Millisecond, "for how long TestChaos disturbs each lock")
	chaosSeed = flag.Uint64("seed", 0, "of what TestChaos does; 0: the clock's")
)

const (
	ttl     = 500 * time.Millisecond
	keys    = 3
	clients = 4 // at a time, as if each were a process
	callers = 4
	slack   = 20 * time.Second // for a busy machine, beyond a lock's promise
)

// TestChaos injects random faults. A seed repeats the faults, not the servers' reactions. There must never be two holders at a
// time, a token that doesn't grow, a stale grant renewed or released, a waiter stuck after the faults, or anything left in the
// process or on the servers.
func TestChaos(t *testing.T) {
	for _, l := range chaosLocks {
		t.Run(l.name, func(t *testing.T) {
			w := &world{
				t: t, chaosLock: l, servers: l.startServers(t), stopped: make([]sync.Mutex, 5),
				seed: cmp.Or(*chaosSeed, uint64(time.Now().UnixNano())), began: time.Now(),
				counts: map[string]int{}, held: map[string]*dlock.Handle{}, tokens: map[string]uint64{}, seen: map[string]bool{},
			}
			var calms context.CancelFunc
			w.calm, calms = context.WithCancel(t.Context())
			before, restarted := goleak.IgnoreCurrent(), goleak.IgnoreAnyFunction("github.com/fencelab/fencelab/internal/proc.Start.func1")
			w.disturb()
			calms()
			w.drain()
			w.gone("on the servers", l.bound+slack, func(ctx context.Context) error { return l.left(ctx, w.servers) })
			// Docker's client, which restarted the servers, keeps connections for half a minute.
			reading, writing := goleak.IgnoreAnyFunction("net/http.(*persistConn).readLoop"), goleak.IgnoreAnyFunction("net/http.(*persistConn).writeLoop")
			w.gone("in the process", l.bound+slack, func(context.Context) error { return goleak.Find(before, restarted, reading, writing) })
			w.gone("in the process", time.Minute, func(context.Context) error { return goleak.Find(before, restarted) })
			t.Logf("-seed=%d: %v", w.seed, w.counts)
		})
	}
}

type world struct {
	chaosLock
	t       *testing.T
	servers []*testbed.Server
	stopped []sync.Mutex // held while a server is frozen or down
	seed    uint64
	began   time.Time
	calm    context.Context //nolint:containedctx // ends with the faults
	slots   [clients]struct {
		sync.Mutex // held while its client is replaced
		atomic.Pointer[client]
	}

	mu     sync.Mutex
	events []string
	counts map[string]int
	held   map[string]*dlock.Handle // by key
	tokens map[string]uint64        // the greatest
	seen   map[string]bool          // key and token
}

func key(i int) string { return fmt.Sprintf("chaos/%d", i) }

func (w *world) rand(stream uint64) *rand.Rand { return rand.New(rand.NewPCG(w.seed, stream)) }

func (w *world) note(kind, format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.counts[kind]++
	event := fmt.Sprintf("%9.4f %s: ", time.Since(w.began).Seconds(), kind) + fmt.Sprintf(format, args...)
	w.events = append(w.events[max(0, len(w.events)-200):], event)
}

func (w *world) fail(format string, args ...any) {
	w.note("FAILED", format, args...)
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.t.Failed() {
		w.t.Errorf("-run TestChaos/%s -seed=%d; the last events:\n%s", w.name, w.seed, strings.Join(w.events, "\n"))
	}
}

// inTime calls f, which must return within the lock's bound.
func (w *world) inTime(what string, f func(ctx context.Context)) {
	ctx, cancel := context.WithTimeout(context.Background(), w.bound+slack)
	defer cancel()
	defer time.AfterFunc(w.bound+slack, func() {
		w.mu.Lock()
		debug.SetTraceback("all")
		panic(fmt.Sprintf("not after %v: %s, with -seed=%d; the last events:\n%s", w.bound+slack, what, w.seed, strings.Join(w.events, "\n")))
	}).Stop()
	f(ctx)
}

func (w *world) gone(where string, limit time.Duration, find func(ctx context.Context) error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	for err := find(ctx); err != nil; err = find(ctx) {
		if time.Sleep(ttl / 20); ctx.Err() != nil {
			w.fail("left %s: %v", where, err)
			return
		}
	}
}

func (w *world) granted(c *client, h *dlock.Handle) {
	key := h.Key()
	token, seq := h.Next() // seq tells the sections of a shared lease apart
	name := fmt.Sprintf("%s #%d.%d", key, token, seq)
	w.note("grant", "%s has %s", c.name, name)
	w.mu.Lock()
	last, highest, again := w.held[key], w.tokens[key], w.seen[name]
	// In this order: a lease that has ended stays so.
	held := last != nil && last.Context().Err() == nil
	holds := h.Context().Err() == nil
	if w.seen[name], w.tokens[key] = true, max(highest, token); holds {
		w.held[key] = h
	}
	w.mu.Unlock()
	switch {
	case held && holds:
		w.fail("%s has %s beside #%d, which lasts for another %v", c.name, name, last.Fence(), time.Until(last.Until()))
	case again:
		w.fail("%s has %s, as another had", c.name, name)
	case holds && token < highest:
		w.fail("%s has %s after #%d", c.name, name, highest)
	}
}

func (w *world) disturb() {
	var under sync.WaitGroup
	for i := range w.slots {
		under.Go(func() { w.replace(i, "open", w.rand(uint64(i))) })
	}
	under.Wait()
	for r := w.rand(clients); !w.t.Failed() && time.Since(w.began) < *chaosFor; {
		time.Sleep(time.Duration(r.Int64N(int64(ttl / 5))))
		fault := w.rand(r.Uint64())
		under.Go(func() { w.fault(fault) })
	}
	w.inTime("the faults are over", func(context.Context) { under.Wait() })
	w.note("calm", "")
}

func (w *world) fault(r *rand.Rand) {
	slot, during := r.IntN(clients), time.Duration(r.Int64N(int64(ttl)*3/2))
	c := w.slots[slot].Load()
	switch n := r.IntN(20); {
	case n == 0:
		w.replace(slot, "crash", r)
	case n == 1:
		w.replace(slot, "close", r)
	case c == nil || len(c.links) == 0: // being replaced
	case n < 4:
		w.stop(r.IntN(len(w.servers)), r.IntN(4) == 0, during)
	case n < 12:
		c.breaks(r, during)
	default:
		c.cut(r.IntN(3) == 0)
	}
}

func (w *world) stop(i int, kill bool, during time.Duration) {
	if !w.stopped[i].TryLock() {
		return
	}
	defer w.stopped[i].Unlock()
	s, ctx := w.servers[i], context.Background()
	heal := func(ctx context.Context) error { return s.Restart(ctx) }
	var err error
	if kill {
		w.note("kill", "%s for %v", s.Name, during)
		err = s.Kill(ctx)
	} else {
		w.note("freeze", "%s for %v", s.Name, during)
		heal, err = s.Pause(ctx)
	}
	if err == nil {
		time.Sleep(during)
		err = heal(ctx)
	}
	if err != nil {
		w.fail("%s: %v", s.Name, err)
	}
	w.note("healed", "%s", s.Name)
}

// replace ends a slot's client and opens another. A crash cuts the old one off first.
func (w *world) replace(slot int, how string, r *rand.Rand) {
	s := &w.slots[slot]
	if !s.TryLock() {
		return
	}
	defer s.Unlock()
	if c := s.Swap(nil); c != nil {
		w.note(how, "%s", c.name)
		if how == "crash" {
			c.hangUp()
		}
		c.end()
	}
	w.inTime("a new client", func(ctx context.Context) {
		for ctx.Err() == nil {
			c, err := w.connect(ctx, r)
			if err != nil {
				w.note("error", "connect: %v", err)
				time.Sleep(ttl / 100)
				continue
			}
			for range callers {
				r := w.rand(r.Uint64())
				c.working.Go(func() { c.work(r) }) //nolint:contextcheck // it works on
			}
			s.Store(c)
			return
		}
	})
}

// drain waits until every caller has had a lock, ends all clients, and lets another acquire every lock.
func (w *world) drain() {
	w.inTime("every waiter has a lock", func(context.Context) {
		for i := range w.slots {
			w.slots[i].Load().working.Wait()
		}
	})
	for i := range w.slots {
		w.slots[i].Load().end()
	}
	w.inTime("a new client has each lock", func(ctx context.Context) {
		for i := 0; i < keys && ctx.Err() == nil; {
			c, err := w.connect(ctx, w.rand(uint64(i)))
			if err != nil {
				w.note("error", "connect: %v", err)
				continue
			}
			if h, err := c.Acquire(ctx, key(i)); err != nil {
				w.note("error", "%s: %v", c.name, err)
			} else if w.granted(c, h); c.release(ctx, h) {
				i++
			}
			c.end() //nolint:contextcheck // in a time of its own
		}
	})
}

type client struct {
	*dlock.Locker
	w       *world
	name    string
	backend backend
	links   []*faults.Link // to all servers
	broken  sync.Mutex     // held during a fault
	working sync.WaitGroup

	mu     sync.Mutex
	hungUp bool
	conns  map[*conn]bool
	held   []*dlock.Handle
	grants []dlock.Grant
}

// backend records grants, and closes its client library.
type backend struct {
	dlock.Backend
	close func() error
	c     *client
}

func (b backend) noted(g dlock.Grant, err error) (dlock.Grant, error) {
	if err == nil {
		b.c.mu.Lock()
		defer b.c.mu.Unlock()
		b.c.grants = append(b.c.grants[max(0, len(b.c.grants)-50):], g)
	}
	return g, err
}

func (b backend) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.noted(b.Backend.Acquire(ctx, r))
}

func (b backend) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.noted(b.Backend.TryAcquire(ctx, r))
}

func (w *world) connect(ctx context.Context, r *rand.Rand) (_ *client, err error) {
	c := &client{w: w, conns: map[*conn]bool{}}
	defer func() {
		if err != nil {
			c.hangUp()
		}
	}()
	spec := locks.Spec{TTL: ttl, Dial: c.dial}
	for _, s := range w.servers {
		l, err := faults.NewLink(s.Addr)
		if err != nil {
			return nil, err
		}
		c.links = append(c.links, l)
		spec.Addrs = append(spec.Addrs, strings.Replace(s.URL, s.Addr, l.Addr(), 1))
	}
	if c.backend, err = w.open(ctx, spec, r); err != nil {
		return nil, err
	}
	c.backend.c = c
	o := &dlock.Options{TTL: ttl}
	if r.IntN(2) == 0 {
		o.Renew = dlock.Renew{Every: ttl / 3, MaxHold: 2 * ttl}
	}
	if r.IntN(3) == 0 {
		o.Share = dlock.Share{Sections: 1 + r.IntN(5), For: ttl, Idle: time.Duration(r.Int64N(int64(ttl / 10)))}
	}
	c.Locker, err = dlock.New(c.backend, o)
	w.mu.Lock()
	c.name = fmt.Sprintf("c%d", w.counts["client"])
	w.mu.Unlock()
	w.note("client", "%s", c.name)
	return c, err
}

// end closes the client library only once nothing is held, since closing some releases all locks.
func (c *client) end() {
	c.w.inTime("closed", func(context.Context) {
		if err := c.Close(); err != nil {
			c.w.fail("%s: %v", c.name, err)
		}
		c.working.Wait()
		for _, h := range c.held {
			<-h.Context().Done()
		}
		if err := c.backend.close(); err != nil {
			c.w.note("error", "%s: %v", c.name, err)
		}
	})
	c.hangUp()
}

func (c *client) hangUp() {
	c.mu.Lock()
	c.hungUp = true
	c.mu.Unlock()
	for _, l := range c.links {
		if err := l.Close(); err != nil {
			c.w.fail("%v", err)
		}
	}
}

// work acquires and releases locks until it has done so after the faults.
func (c *client) work(r *rand.Rand) {
	pause := ttl / 100
	for {
		calm := c.w.calm.Err() != nil
		h, err := c.acquire(r, calm)
		switch {
		case err == nil && c.hold(r, h) && calm, errors.Is(err, dlock.ErrClosed):
			return
		case errors.Is(err, dlock.ErrInvalid), errors.Is(err, dlock.ErrNotReentrant), errors.Is(err, dlock.ErrQueueFull):
			c.w.fail("%s: %v", c.name, err)
			return
		case err != nil:
			c.w.note("error", "%s: %v", c.name, err)
			time.Sleep(time.Duration(r.Int64N(int64(pause))))
			if calm { // servers may be slow because all retry at once
				pause = min(2*pause, 4*ttl)
			}
		}
		if r.IntN(8) == 0 {
			c.repeat(r)
		}
	}
}

func (c *client) acquire(r *rand.Rand, calm bool) (h *dlock.Handle, err error) {
	key, take, how, d := key(r.IntN(keys)), c.Acquire, r.IntN(4), time.Duration(r.Int64N(int64(ttl)))
	ctx, cancel := context.Background(), func() {} // a context that never ends takes another path through the Locker
	end := time.Now().Add(d)
	switch {
	case calm || how == 0:
		end = end.Add(time.Hour)
	case how == 1:
		ctx, cancel = context.WithDeadline(ctx, end)
	default:
		if ctx, cancel = context.WithCancel(ctx); how == 2 {
			take = c.TryAcquire
		}
		defer time.AfterFunc(d, cancel).Stop()
	}
	defer cancel()
	h, err = take(ctx, key)
	if late := time.Since(end); late > slack {
		c.w.fail("%s: a call returns %v after its context's end: %v", c.name, late, err)
	}
	if err != nil {
		return nil, err
	}
	c.w.granted(c, h)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held = append(slices.DeleteFunc(c.held, func(h *dlock.Handle) bool { return h.Context().Err() != nil }), h)
	return h, nil
}

// hold behaves like various holders, and reports whether it has released the lock. After the faults it is quick.
func (c *client) hold(r *rand.Rand, h *dlock.Handle) bool {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	sleep := func(d time.Duration) {
		select {
		case <-time.After(d):
		case <-c.w.calm.Done():
		}
	}
	switch how := r.IntN(60); {
	case c.w.calm.Err() != nil:
	case how < 3:
		return false
	case how < 6:
		sleep(3 * ttl) // longer than the lease
	case how == 6:
		for range 3 {
			sleep(time.Duration(r.Int64N(int64(ttl / 2))))
			_ = h.Renew(ctx)
		}
	case how < 10: // twice, concurrently
		c.working.Go(func() { c.release(context.Background(), h) })
	case how < 13:
		cancel()
	default:
		sleep(time.Duration(r.Int64N(int64(ttl / 20))))
	}
	return c.release(ctx, h)
}

func (c *client) release(ctx context.Context, h *dlock.Handle) bool {
	err := h.Release(ctx)
	c.w.note("release", "%s, of %s #%d: %v", c.name, h.Key(), h.Fence(), err)
	if errors.Is(err, dlock.ErrForeignRelease) {
		c.w.fail("%s: %v", c.name, err)
	}
	return err == nil
}

// repeat renews or releases a stale grant, as a late request would.
func (c *client) repeat(r *rand.Rand) {
	var g dlock.Grant
	c.mu.Lock()
	if n := len(c.grants); n > 0 {
		g = c.grants[r.IntN(n)]
	}
	c.mu.Unlock()
	c.w.mu.Lock()
	stale := c.w.tokens[g.Key] > g.Fence
	c.w.mu.Unlock()
	if !stale {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), ttl)
	defer cancel()
	what, f := "renewed", c.backend.Renew
	if r.IntN(2) == 0 {
		what, f = "released", c.backend.Release
	}
	err := f(ctx, g)
	c.w.note("stale", "%s #%d of %s, %s: %v", g.Key, g.Fence, c.name, what, err)
	if err == nil {
		c.w.fail("another had the lock since")
	}
}

func (c *client) breaks(r *rand.Rand, during time.Duration) {
	if !c.broken.TryLock() {
		return
	}
	defer c.broken.Unlock()
	links := c.links
	if i := r.IntN(len(links)); r.IntN(2) == 0 {
		links = links[i : i+1]
	}
	kinds := []struct {
		name   string
		inject func(*faults.Link, context.Context) (faults.Heal, error)
	}{
		{"cut", (*faults.Link).Cut},
		{"lose requests", (*faults.Link).LoseRequests},
		{"lose replies", (*faults.Link).LoseReplies},
		{"hold requests", (*faults.Link).HoldRequests},
		{"refuse", (*faults.Link).Refuse},
		{"delay", func(l *faults.Link, ctx context.Context) (faults.Heal, error) { return l.Delay(ctx, during/4) }},
	}
	kind := kinds[r.IntN(len(kinds))]
	c.w.note(kind.name, "%s, on %d of %d links, for %v", c.name, len(links), len(c.links), during)
	var all sync.WaitGroup
	for _, l := range links {
		all.Go(func() {
			ctx, cancel := context.WithTimeout(context.Background(), slack)
			defer cancel()
			heal, err := kind.inject(l, ctx)
			if err == nil {
				time.Sleep(during)
				err = heal(ctx)
			}
			if err != nil { // the client is gone, or its server is frozen
				c.w.note("error", "%s: %v", c.name, err)
			}
		})
	}
	all.Wait()
	c.w.note("healed", "%s", c.name)
}

type conn struct {
	*net.TCPConn
	c *client
}

func (c *client) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	under, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.hungUp { // the link's port may have been reused
		return nil, errors.Join(net.ErrClosed, under.Close())
	}
	n := &conn{under.(*net.TCPConn), c}
	c.conns[n] = true
	return n, nil
}

func (n *conn) Close() error {
	n.c.mu.Lock()
	delete(n.c.conns, n)
	n.c.mu.Unlock()
	return n.TCPConn.Close()
}

func (c *client) cut(all bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for n := range c.conns {
		c.w.note("cut connection", "%s", c.name)
		if _, _ = n.CloseRead(), n.CloseWrite(); !all {
			return
		}
	}
}
