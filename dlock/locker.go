package dlock

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/prometheus/client_golang/prometheus"
)

// DefaultTTL is the TTL of a Locker made with nil Options.
const DefaultTTL = 10 * time.Second

// Options configure a [Locker].
type Options struct {
	// TTL is how long a grant lasts unless it is renewed, and so how long a crashed holder blocks the key. With Consul, etcd,
	// ZooKeeper and S3 it may block it for longer, see docs/which-lock.md: with Consul for up to 20 s, or 2.5 TTLs. Required, at
	// least 1 ms (nil Options have DefaultTTL). A lease that was waited for may be shorter until its first renewal: with redislock,
	// as short as half of the TTL or of Queue.HandoffTTL, whichever is less. The Locker renews it halfway through, unless it has
	// been released.
	TTL time.Duration
	// Renew, if Every is set, renews leases in the background.
	Renew Renew
	// Reentrant lets a context that descends from a handle's context acquire its key again. The inner handle has the same token;
	// the lock is freed when every handle has been released.
	Reentrant bool
	// Share, if Sections is set, lets goroutines of this process share leases.
	Share Share
	// Registerer, if not nil, gets the Locker's metrics.
	Registerer prometheus.Registerer
	// Logger logs lost leases and failed clean-ups. Nil: no logs.
	Logger *slog.Logger
}

// Renew configures background renewal. A live holder then loses its lease less often, but still can: what freezes the holder
// freezes its renewals too.
type Renew struct {
	// Every is the time between renewals; a third of the TTL is usual. 0: none, except that a lease that was waited for may be
	// renewed once.
	Every time.Duration
	// MaxHold is the time after its grant for which a lease is renewed, so that a stuck holder loses it within one more TTL.
	// Required with Every. It limits [Handle.Renew] too; 0: no limit.
	MaxHold time.Duration
}

// Locker grants leases on keys. Its methods may be called concurrently.
type Locker struct {
	b   Backend
	o   Options
	m   *metrics
	log *slog.Logger

	open  context.Context // ends with ErrClosed
	close context.CancelCauseFunc

	mu      sync.Mutex
	busy    sync.WaitGroup
	undoing chan struct{} // has room for undoMost clean-ups

	shared shared

	tasks chan func()
	idle  atomic.Int32 // waiting for a task
}

// New returns a Locker that owns b: its Close closes b. If New fails, b is still the caller's. Options that cannot work give an
// error that wraps [ErrInvalid]; nil options mean a TTL of [DefaultTTL] and no renewal.
func New(b Backend, opts *Options) (*Locker, error) {
	if b == nil {
		return nil, fmt.Errorf("%w: backend is nil", ErrInvalid)
	}
	if opts == nil {
		opts = &Options{TTL: DefaultTTL}
	}
	o := *opts
	switch r := o.Renew; {
	case o.TTL < time.Millisecond:
		return nil, fmt.Errorf("%w: Options.TTL is %v; set it to at least 1ms", ErrInvalid, o.TTL)
	case r.Every < 0 || r.MaxHold < 0:
		return nil, fmt.Errorf("%w: Options.Renew has a negative duration: Every %v, MaxHold %v", ErrInvalid, r.Every, r.MaxHold)
	case r.Every >= o.TTL-margin(o.TTL):
		return nil, fmt.Errorf("%w: Options.Renew.Every is %v, too long for a TTL of %v; a third of the TTL is usual",
			ErrInvalid, r.Every, o.TTL)
	case r.Every > 0 && r.MaxHold == 0:
		return nil, fmt.Errorf("%w: Options.Renew.MaxHold is not set; say for how long a wedged holder may go on renewing", ErrInvalid)
	}
	if err := o.Share.check(o.Renew.MaxHold); err != nil {
		return nil, err
	}
	m, err := newMetrics(o.Registerer)
	if err != nil {
		return nil, err
	}
	log := o.Logger
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	l := &Locker{b: b, o: o, m: m, log: log, undoing: make(chan struct{}, undoMost), tasks: make(chan func())}
	l.shared.keys = map[string]*turn{}
	l.open, l.close = context.WithCancelCause(context.Background())
	return l, nil
}

// margin is how much earlier than the server a holder presumes its lease expired, since its clock may run slower: 1 % and 2 ms,
// Redlock's figures for drift and for the server's resolution
// (https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/), but at most a quarter of the TTL.
func margin(ttl time.Duration) time.Duration {
	return min(ttl/100+2*time.Millisecond, ttl/4)
}

// Acquire waits until key is granted or ctx ends, and returns a handle that the caller must Release.
//
// Its error wraps [ErrClosed], [ErrNotReentrant], [ErrRequestLost], the backend's error or, when ctx ends, ctx's cause. It then
// wraps [ErrHeld] too if the lock service has said that another holds the lock; otherwise the service has not answered. After an
// error nothing stays locked for longer than a crashed holder would keep it: a request whose outcome is unknown is undone in the
// background, by a goroutine of its own. While the lock service is frozen each call that was given up keeps it, about 10 kB, for at
// most one TTL after the client library has given up, too.
//
// The end of ctx after Acquire has returned doesn't affect the lease; see [Handle.Context].
func (l *Locker) Acquire(ctx context.Context, key string) (*Handle, error) {
	return l.acquire(ctx, key, true)
}

// TryAcquire is [Locker.Acquire] without the wait: it returns [ErrHeld] when another holder has the lock.
func (l *Locker) TryAcquire(ctx context.Context, key string) (*Handle, error) {
	return l.acquire(ctx, key, false)
}

// Do calls f while it holds key, with a context that ends when the handle's does or ctx ends. It returns the error of
// [Locker.Acquire], or f's error joined with that of [Handle.Release] or the loss of the lease. [ErrLost] then means that f may
// have overlapped with another holder. Only the resource's replies to f say whether f's writes took effect.
func (l *Locker) Do(ctx context.Context, key string, f func(ctx context.Context, h *Handle) error) (err error) {
	h, err := l.Acquire(ctx, key)
	if err != nil {
		return err
	}
	fctx, cancel := context.WithCancelCause(h.Context())
	stop := context.AfterFunc(ctx, func() { cancel(context.Cause(ctx)) })
	defer func() { // also when f panics
		stop()
		why := h.ended()
		rerr := h.Release(ctx)
		if err != nil && rerr == nil && errors.Is(why, ErrLost) && !errors.Is(err, ErrLost) { // err may be just fctx's end
			rerr = why
		}
		err = errors.Join(err, rerr)
	}()
	return f(&leaseContext{valuesContext{deadlineContext{fctx, ctx}, context.WithoutCancel(h.Context())}, h.ls, h.section}, h) //nolint:contextcheck // it has ctx's end
}

// deadlineContext adds the deadline of a context whose end ends it: some clients, such as go-redis, check only the deadline.
type deadlineContext struct {
	context.Context
	until context.Context
}

func (c deadlineContext) Deadline() (time.Time, bool) { return c.until.Deadline() }

// Close stops the Locker's background work, waits for it, and closes the backend. Calls that wait return [ErrClosed]. Held leases
// aren't released, and expire; those kept for the next caller (see [Share]) are released. Close may be called again.
func (l *Locker) Close() error {
	l.shared.close()
	l.mu.Lock()
	l.close(ErrClosed)
	l.mu.Unlock()
	l.busy.Wait()
	return l.b.Close()
}

// enter registers work that Close waits for; false on a closed Locker. Registered work may register more through l.busy.
func (l *Locker) enter() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open.Err() != nil {
		return false
	}
	l.busy.Add(1)
	return true
}

const maxIdle = 16

// run calls f in another goroutine, an idle one if possible: growing a new stack takes longer than the rest of an Acquire.
func (l *Locker) run(f func()) {
	select {
	case l.tasks <- f:
		return
	default:
	}
	l.busy.Go(func() {
		f()
		for l.idle.Add(1) <= maxIdle {
			select {
			case f := <-l.tasks:
				l.idle.Add(-1)
				f()
			case <-l.open.Done():
				return
			}
		}
		l.idle.Add(-1)
	})
}

func (l *Locker) acquire(ctx context.Context, key string, wait bool) (h *Handle, err error) {
	defer func() {
		op := "acquire"
		if !wait {
			op = "try acquire"
		}
		if err != nil && (!errors.Is(err, ErrHeld) || ctx.Err() != nil) {
			err = fmt.Errorf("%s %q: %w", op, key, err)
		}
	}()
	if err := CheckKey(key); err != nil {
		return nil, err
	}
	if !l.enter() {
		return nil, ErrClosed
	}
	defer l.busy.Done()
	began := time.Now()
	l.m.attempts.Inc()
	h, err = l.take(ctx, key, wait)
	switch {
	case err == nil:
		l.m.successes.Inc()
		l.m.acquireSeconds.Observe(time.Since(began).Seconds())
	case ctx.Err() != nil:
		l.m.timeouts.Inc()
	}
	return h, err
}

func (l *Locker) take(ctx context.Context, key string, wait bool) (*Handle, error) {
	if ctx.Err() != nil {
		return nil, cause(ctx)
	}
	if outer, ok := ctx.Value(heldKey{l, key}).(*leaseContext); ok {
		switch h, held := outer.reenter(ctx); {
		case h != nil:
			return h, nil
		case held:
			return nil, ErrNotReentrant
		}
	}
	if l.o.Share.Sections > 0 {
		return l.share(ctx, key, wait)
	}
	return l.grant(ctx, key, wait, nil)
}

// maxAttempts is how often an acquisition is tried when its grants arrive too late.
const maxAttempts = 3

// grant requests a lease. It sets held, unless that is nil, when another holds the lock.
func (l *Locker) grant(ctx context.Context, key string, wait bool, held *atomic.Bool) (*Handle, error) {
	if held == nil && ctx.Done() != nil {
		held = new(atomic.Bool)
	}
	for range maxAttempts {
		if ctx.Err() != nil { // ended since the last attempt
			return nil, cause(ctx)
		}
		r := Request{Key: key, Owner: uuid.NewString(), TTL: l.o.TTL}
		if held != nil {
			r.OnHeld = func() { held.Store(true) }
		}
		g, err := l.request(ctx, r, wait)
		switch {
		case err == nil:
		case ctx.Err() == nil, errors.Is(err, ErrHeld), errors.Is(err, ErrQueueFull), errors.Is(err, ErrInvalid):
			return nil, err
		default:
			return nil, gaveUp(held.Load(), err)
		}
		ls := newLease(ctx, l, g)
		if h := ls.begin(ctx); h != nil {
			ls.watch()
			return h, nil
		}
		l.busy.Go(func() { l.undo(ctx, g) }) // it may already be somebody else's; the backend can tell
	}
	return nil, fmt.Errorf("%w: its grant took longer to arrive than it lasts (TTL %v); set a longer TTL", ErrRequestLost, l.o.TTL)
}

func gaveUp(held bool, why error) error {
	if held {
		return fmt.Errorf("%w: %w", ErrHeld, why)
	}
	return fmt.Errorf("no answer from the lock service: %w", why)
}

// request returns when ctx or the Locker ends, even if the client library doesn't. A request whose outcome is unknown is undone.
func (l *Locker) request(ctx context.Context, r Request, wait bool) (Grant, error) {
	f := l.b.Acquire
	if !wait {
		f = l.b.TryAcquire
	}
	if ctx.Done() == nil { // then only Close could interrupt the call, and it waits for the reply anyway
		call := &valuesContext{l.open, ctx}
		g, err := f(call, r) //nolint:contextcheck // call has all that ctx has: its values
		g, err = l.answer(ctx, call, r, g, err)
		if err != nil && call.Err() != nil && !errors.Is(err, ErrClosed) {
			err = fmt.Errorf("%w: %w", ErrClosed, err)
		}
		return g, err
	}
	type reply struct {
		g   Grant
		err error
	}
	call, cancel := context.WithCancel(ctx)
	defer cancel()
	replied := make(chan reply, 1)
	l.run(func() {
		g, err := f(call, r)
		replied <- reply{g, err}
	})
	var err error
	select {
	case rep := <-replied:
		if end, ok := ctx.Deadline(); ok && rep.err != nil && !time.Now().Before(end) {
			select { // a connection may report ctx's deadline before ctx does, as an i/o timeout
			case <-ctx.Done():
			case <-time.After(time.Second): // a caller's own type of context may never end
			}
		}
		return l.answer(ctx, call, r, rep.g, rep.err)
	case <-ctx.Done():
		err = cause(ctx)
	case <-l.open.Done():
		err = ErrClosed
	}
	l.busy.Go(func() {
		late := <-replied // the undo must not overtake the request
		if late.err != nil {
			late.g = r.grant()
		}
		l.undo(ctx, late.g)
	})
	return Grant{}, err
}

// answer validates the backend's reply; it schedules clean-up if the outcome is unknown.
func (l *Locker) answer(ctx, call context.Context, r Request, g Grant, err error) (Grant, error) {
	if err == nil && g.Fence == 0 {
		err = errors.New("the backend granted a lease without a fencing token")
	}
	if err == nil {
		return g, nil
	}
	if unknown(call, err) {
		l.busy.Go(func() { l.undo(ctx, r.grant()) })
	}
	switch {
	case ctx.Err() != nil:
		err = withCause(ctx, err)
	case errors.Is(err, ErrLost): // a waiter's, which had no lease yet
		err = fmt.Errorf("%w: %v", ErrRequestLost, err) //nolint:errorlint // not to wrap it is the point
	}
	return Grant{}, err
}

// unknown reports whether err, from a backend's call with ctx, leaves open whether the call took effect. After ctx's end err may
// be just ctx's cause, even another lock's ErrLost.
func unknown(ctx context.Context, err error) bool {
	if err == nil {
		return false
	}
	for _, known := range []error{ErrHeld, ErrQueueFull, ErrLost, ErrInvalid, ErrClosed, ErrForeignRelease} {
		if errors.Is(err, known) {
			return ctx.Err() != nil
		}
	}
	return true
}

const (
	undoTry      = time.Second            // one try's timeout
	undoPause    = 100 * time.Millisecond // after the first try; doubles with each
	undoMaxPause = 5 * time.Second
	undoMost     = 256 // at once; others wait
)

// undo releases what a request may have left, until its lease has expired. It ignores ctx's end, often the reason for the call.
func (l *Locker) undo(ctx context.Context, g Grant) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), g.TTL)
	defer cancel()
	err := errors.New("too many requests are being undone")
	if l.mayUndo(ctx) {
		err = l.tryUndo(ctx, g)
		<-l.undoing
	}
	if err != nil {
		l.log.WarnContext(ctx, "dlock: could not undo a request; its lease, if there is one, runs out by itself",
			"key", g.Key, "ttl", g.TTL, "err", err)
	}
}

// mayUndo waits for room in l.undoing; after Close, until the tries in flight have ended.
func (l *Locker) mayUndo(ctx context.Context) bool {
	select {
	case l.undoing <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	case <-l.open.Done():
	}
	select {
	case l.undoing <- struct{}{}:
		return true
	case <-ctx.Done():
	case <-time.After(undoTry * 3 / 2):
	}
	return false
}

func (l *Locker) tryUndo(ctx context.Context, g Grant) error {
	for pause := undoPause; ; pause = min(2*pause, undoMaxPause) {
		try, done := context.WithTimeout(ctx, undoTry)
		err := l.b.Release(try, g)
		done()
		if !unknown(ctx, err) {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-l.open.Done(): // a closed Locker tries only once
			return err
		case <-time.After(pause):
		}
	}
}

func cause(ctx context.Context) error {
	err, why := ctx.Err(), context.Cause(ctx)
	if errors.Is(why, err) {
		return why
	}
	return fmt.Errorf("%w: %w", err, why)
}

// withCause adds ctx's cause to an error that came after its end, unless the error wraps it.
func withCause(ctx context.Context, err error) error {
	if errors.Is(err, ctx.Err()) && errors.Is(err, context.Cause(ctx)) {
		return err
	}
	return fmt.Errorf("%w: %w", cause(ctx), err)
}
