// Package redislock is a dlock.Backend on one Redis: a server, a replicated one or a Cluster.
//
// The lock is a string with a TTL, lock:{KEY}, whose value is the owner. One script takes it and mints the fencing token
// from the counter fence:{KEY} in the same round trip; release and renewal compare the owner in the step in which they
// act (https://redis.io/docs/latest/commands/set/#patterns). The hash tag keeps both keys in one slot of a Cluster.
//
// Acquire of a lock that is held waits in a line that all processes share, and gets the lock in its turn: see [Queue] for
// how, and for what happens when somebody in the line dies. [ModeSpin] is the classic way, without a line.
//
// The counter never expires, since a token that starts again would be refused by the resource, or worse, equal one that
// was already used; [Backend.Reap] gives back the memory of counters without taking a token back. The counter is only as
// durable as the Redis: a restart without persistence, a failover to a replica that lags, an eviction or a FLUSHALL can
// take it back. Run the counter's Redis with appendfsync always and maxmemory-policy noeviction, or take the token from a
// consensus store. If it was taken back, the resource refuses the new holders, and its error tells which token it has seen:
// INCRBY fence:{KEY} by that, and the next grant is greater. (SET could take it back once more, or give the token that was seen
// to another.)
//
// While a Cluster moves the slot of a key, its lock can be renewed and released. Nobody is granted it until all its keys have
// moved: Acquire waits for that, and TryAcquire returns the server's TRYAGAIN.
//
// It needs Redis 6.0.6 or later (LPOS), and a user that may run scripts on the keys lock:*, fence:*, queue:* and
// fence-floor, publish and subscribe on wake:*, and run PUBSUB. Without PUBSUB, dead waiters are not passed over at once.
package redislock

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"sync"
	"time"
	"unicode"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
)

//go:embed lib.lua
var libLua string

//go:embed acquire.lua
var acquireLua string

//go:embed renew.lua
var renewLua string

//go:embed release.lua
var releaseLua string

//go:embed free.lua
var freeLua string

//go:embed leave.lua
var leaveLua string

//go:embed reap.lua
var reapLua string

var (
	acquireScript = redis.NewScript(libLua + acquireLua)
	renewScript   = redis.NewScript(libLua + renewLua)
	releaseScript = redis.NewScript(libLua + releaseLua)
	freeScript    = redis.NewScript(freeLua)
	leaveScript   = redis.NewScript(libLua + leaveLua)
	reapScript    = redis.NewScript(reapLua)
)

// Options configure a [Backend].
type Options struct {
	// Prefix stands before the names of all keys, "" by default. Locks with different prefixes don't know each other.
	Prefix string
	// Mode is how Acquire waits for a lock that is held: ModeQueue by default. Backends of both modes exclude each other,
	// and a spinner cannot overtake a waiter of the queue but in the moment after a lease has run out.
	Mode Mode
	// Queue is for ModeQueue.
	Queue Queue
	// Spin is for ModeSpin.
	Spin Spin
}

// Mode is a way to wait.
type Mode int

const (
	// ModeQueue waits in line: whoever asked first is granted first, among all processes. Its comment is at [Queue].
	ModeQueue Mode = iota
	// ModeSpin asks again and again. It needs no subscription, so it also works where Redis has no Pub/Sub for the client.
	ModeSpin
)

// Spin is the classic way to wait: ask again after a random time that grows from Min to Max, or when the holder's lease
// ends, if that is sooner. It is unfair: whoever asks first after a release gets the lock. Zero values: 2 ms, and 100 ms or
// Min if that is longer.
type Spin struct {
	Min, Max time.Duration
}

// Backend implements dlock.Backend. It works with every redis.UniversalClient. A client with ContextTimeoutEnabled set
// ends a request at its context's deadline; without it, at the client's own timeouts.
type Backend struct {
	c       redis.UniversalClient
	o       Options
	counted string // "1" if the server that runs a script knows all who listen
	floor   string // the name of the counters' floor
	inbox   *inbox

	closeOnce sync.Once
	closed    chan struct{}
}

var _ dlock.Backend = (*Backend)(nil)

// New returns a Backend on client, which stays the caller's to close. It sends nothing.
func New(client redis.UniversalClient, opts *Options) (*Backend, error) {
	if client == nil {
		return nil, fmt.Errorf("%w: redislock: client is nil", dlock.ErrInvalid)
	}
	var o Options
	if opts != nil {
		o = *opts
	}
	o.Spin.Min = cmp.Or(o.Spin.Min, 2*time.Millisecond)
	o.Spin.Max = cmp.Or(o.Spin.Max, max(o.Spin.Min, 100*time.Millisecond))
	o.Queue.Max = cmp.Or(o.Queue.Max, 10_000)
	o.Queue.Claim = cmp.Or(o.Queue.Claim, dlock.DefaultTTL)
	switch {
	case o.Mode != ModeQueue && o.Mode != ModeSpin:
		return nil, fmt.Errorf("%w: redislock: Mode %d; want ModeQueue or ModeSpin", dlock.ErrInvalid, o.Mode)
	case o.Mode == ModeQueue && isRing(reflect.ValueOf(client)):
		return nil, fmt.Errorf("%w: redislock: a redis.Ring subscribes on one of its servers, not on each key's; set Mode to ModeSpin",
			dlock.ErrInvalid)
	case o.Queue.Max < 1 || o.Queue.Claim < time.Millisecond || o.Queue.Claim%time.Millisecond != 0:
		return nil, fmt.Errorf("%w: redislock: Queue{Max: %d, Claim: %v}; Max must be positive and Claim a whole number of milliseconds",
			dlock.ErrInvalid, o.Queue.Max, o.Queue.Claim)
	case o.Spin.Min <= 0 || o.Spin.Max < o.Spin.Min:
		return nil, fmt.Errorf("%w: redislock: Spin{Min: %v, Max: %v}; Min must be positive and Max at least Min",
			dlock.ErrInvalid, o.Spin.Min, o.Spin.Max)
	case strings.ContainsAny(o.Prefix, "{}"):
		return nil, fmt.Errorf("%w: redislock: prefix %q contains a brace, which Redis Cluster would take for a hash tag",
			dlock.ErrInvalid, o.Prefix)
	case strings.ContainsFunc(o.Prefix, unicode.IsSpace):
		return nil, fmt.Errorf("%w: redislock: prefix %q contains a space, which separates what stands in a queue",
			dlock.ErrInvalid, o.Prefix)
	}
	b := &Backend{c: client, o: o, counted: "0", floor: o.Prefix + "fence-floor", closed: make(chan struct{})}
	if _, single := client.(*redis.Client); single {
		b.counted = "1"
	}
	b.inbox = newInbox(b)
	return b, nil
}

// isRing reports whether client is a redis.Ring, or a struct around one.
func isRing(client reflect.Value) bool {
	for client.Kind() == reflect.Interface || client.Kind() == reflect.Pointer {
		if client.Type() == reflect.TypeFor[*redis.Ring]() {
			return true
		}
		client = client.Elem()
	}
	if client.Kind() != reflect.Struct || client.Type().PkgPath() == reflect.TypeFor[redis.Ring]().PkgPath() {
		return false
	}
	for i := range client.NumField() {
		if f := client.Type().Field(i).Type; f.Implements(reflect.TypeFor[redis.UniversalClient]()) && isRing(client.Field(i)) {
			return true
		}
	}
	return false
}

// Acquire implements dlock.Backend. It waits as Options.Mode says. In ModeQueue it returns [dlock.ErrQueueFull] if too
// many wait already.
func (b *Backend) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	if b.o.Mode == ModeSpin {
		return b.spin(ctx, r)
	}
	return b.queue(ctx, r)
}

// TryAcquire implements dlock.Backend.
func (b *Backend) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	g, _, err := b.try(ctx, r)
	return g, err
}

// try asks once. With dlock.ErrHeld it returns how long the holder's lease lasts, less than 0 if for ever: a lock without
// a TTL is not one of ours.
func (b *Backend) try(ctx context.Context, r dlock.Request) (dlock.Grant, time.Duration, error) {
	a, err := b.ask(ctx, b.c, r, place{})
	if err == nil && a.token == 0 {
		err = dlock.ErrHeld
	}
	return a.grant(r), a.left, err
}

// place is what a waiter says of its place in the queue; the zero value is that of one that doesn't wait.
type place struct {
	entry string // how it is to be granted the lock and told of it, up to its name
	again bool   // it may be in the queue already
}

// answer is what the acquire script says.
type answer struct {
	asked time.Time // before the request left: the server cannot start the lease earlier
	token uint64    // 0: the lock is held
	left  time.Duration

	place, length int64  // of the asker in the queue, from 1, and of the queue
	last          uint64 // the last token before the answer, if it is known
	unheard       bool   // the server knows of nobody who listens for the asker
}

func (a answer) grant(r dlock.Request) dlock.Grant {
	if a.token == 0 {
		return dlock.Grant{}
	}
	return dlock.Grant{Key: r.Key, Owner: r.Owner, Fence: a.token, TTL: r.TTL, Start: a.asked}
}

// ask runs the acquire script.
func (b *Backend) ask(ctx context.Context, c redis.Scripter, r dlock.Request, p place) (a answer, err error) {
	keys, err := b.names(r.Key)
	if err != nil {
		return a, err
	}
	ms, err := millis(r.TTL)
	if err != nil {
		return a, err
	}
	if b.isClosed() {
		return a, dlock.ErrClosed
	}
	args := append(make([]any, 0, 7), r.Owner, ms, b.floor, b.counted)
	if p.entry != "" {
		args = append(args, p.entry, b.o.Queue.Max)
	}
	if p.again {
		args = append(args, 1)
	}
	a.asked = time.Now()
	reply, err := acquireScript.Run(ctx, c, keys, args...).Int64Slice()
	switch {
	case err != nil:
		return a, failed(ctx, err)
	case len(reply) >= 1 && reply[0] > 0:
		a.token = uint64(reply[0])
		if len(reply) == 2 { // it was r.Owner's already, and the push that said so may be under way
			b.inbox.took(r.Owner)
		}
	case len(reply) == 1 && reply[0] < 0:
		return a, fmt.Errorf("%w (redislock: %d)", dlock.ErrQueueFull, b.o.Queue.Max)
	case len(reply) >= 2 && reply[0] == 0:
		a.left = time.Duration(reply[1]) * time.Millisecond
		if len(reply) >= 3 {
			a.place, a.length = reply[2], reply[2]
		}
		if len(reply) == 6 {
			a.length, a.last, a.unheard = reply[3], uint64(reply[4]), reply[5] == 0
		}
	default:
		return a, fmt.Errorf("redislock: the acquire script returned %v", reply)
	}
	return a, nil
}

// Renew implements dlock.Backend.
func (b *Backend) Renew(ctx context.Context, g dlock.Grant) error {
	keys, err := b.names(g.Key)
	if err != nil {
		return err
	}
	ms, err := millis(g.TTL)
	if err != nil {
		return err
	}
	if b.isClosed() {
		return dlock.ErrClosed
	}
	n, err := renewScript.Run(ctx, b.c, keys[:1], g.Owner, ms, keys[2]).Int64()
	return owned(ctx, n, err)
}

// Release implements dlock.Backend. Without a token, which undoes a request, it also takes g's owner out of the queue.
func (b *Backend) Release(ctx context.Context, g dlock.Grant) error {
	keys, err := b.names(g.Key)
	if err != nil {
		return err
	}
	if b.isClosed() {
		return dlock.ErrClosed
	}
	defer b.inbox.forget(g.Owner) // not before: its push, if it is read meanwhile, must not release it first
	if g.Fence == 0 {
		return b.inbox.undo(ctx, g.Key, g.Owner, g.TTL)
	}
	n, err := releaseScript.Run(ctx, once{b.c}, keys, g.Owner, b.floor, b.counted).Int64()
	if redis.HasErrorPrefix(err, tryAgain) { // a Cluster moves the slot: who waits is told when it has
		if n, err = freeScript.Run(ctx, once{b.c}, keys[:1], g.Owner).Int64(); n == 1 {
			b.inbox.leave(g.Key, g.Owner, g.TTL) //nolint:contextcheck // it goes on when ctx has ended
		}
	}
	return owned(ctx, n, err)
}

// owned turns a script's answer into an error: 0 means that the owner was another.
func owned(ctx context.Context, n int64, err error) error {
	switch {
	case err != nil:
		return failed(ctx, err)
	case n == 0:
		return dlock.ErrLost
	}
	return nil
}

// failed wraps a client's error. After ctx's end that is ctx.Err at best, which doesn't tell the cause.
func failed(ctx context.Context, err error) error {
	if ctx.Err() != nil && !errors.Is(err, context.Cause(ctx)) {
		return fmt.Errorf("redislock: %w: %w", context.Cause(ctx), err)
	}
	return fmt.Errorf("redislock: %w", err)
}

// Close implements dlock.Backend. Waiting calls of Acquire leave the queue and return dlock.ErrClosed. The client stays
// open.
func (b *Backend) Close() error {
	b.closeOnce.Do(func() { close(b.closed) })
	b.inbox.close()
	return nil
}

func (b *Backend) isClosed() bool {
	select {
	case <-b.closed:
		return true
	default:
		return false
	}
}

// names returns the names of what belongs to key: lock, fence counter, queue.
func (b *Backend) names(key string) ([]string, error) {
	if strings.HasPrefix(key, "}") { // "{}" is no hash tag, so they would part in a Cluster
		return nil, fmt.Errorf("%w: redislock: key %q begins with a closing brace", dlock.ErrInvalid, key)
	}
	return []string{b.o.Prefix + "lock:{" + key + "}", b.o.Prefix + "fence:{" + key + "}", b.o.Prefix + "queue:{" + key + "}"}, nil
}

// millis is ttl in Redis's unit. Rounding would make the server's lease shorter, or longer, than the holder believes.
func millis(ttl time.Duration) (int64, error) {
	if ttl < time.Millisecond || ttl%time.Millisecond != 0 {
		return 0, fmt.Errorf("%w: redislock: TTL %v is not a whole number of milliseconds, the unit of Redis; at least 1ms",
			dlock.ErrInvalid, ttl)
	}
	return ttl.Milliseconds(), nil
}

// once runs scripts without go-redis's retries. A release that is repeated behind our back after a lost reply finds the
// lock free, or another's, and would report a lock as lost that it has just released; a waiter would stand in the queue
// twice. Whoever asks again must know that it did.
type once struct{ redis.UniversalClient }

type onceCmd struct{ *redis.Cmd }

func (onceCmd) NoRetry() bool { return true }

func (c once) do(ctx context.Context, name, what string, keys []string, args []any) *redis.Cmd {
	a := make([]any, 0, 3+len(keys)+len(args))
	a = append(a, name, what, len(keys))
	for _, k := range keys {
		a = append(a, k)
	}
	cmd := redis.NewCmd(ctx, append(a, args...)...)
	cmd.SetFirstKeyPos(3) // where a Cluster client looks for the slot
	_ = c.Process(ctx, onceCmd{cmd})
	return cmd
}

func (c once) Eval(ctx context.Context, script string, keys []string, args ...any) *redis.Cmd {
	return c.do(ctx, "eval", script, keys, args)
}

func (c once) EvalSha(ctx context.Context, sha1 string, keys []string, args ...any) *redis.Cmd {
	return c.do(ctx, "evalsha", sha1, keys, args)
}
