// Package redislock is a dlock.Backend on one Redis: a server, with or without replicas, or a Cluster.
//
// One script takes the lock and mints the fencing token; release and renewal check the owner atomically
// (https://redis.io/docs/latest/commands/set/#patterns). Acquire of a held lock waits in a FIFO queue that all processes share,
// see [Queue]; [ModeSpin] polls instead.
//
// The keys, after [Options.Prefix]; the hash tag keeps those of a lock in one slot of a Cluster:
//
//	lock:{KEY}          string with a TTL, the owner: the lock
//	fence:{KEY}         counter, never expires: the last token
//	queue:{KEY}         list of "HANDOFF-TTL CHANNEL OWNER", kept for two minutes after the last poll: the waiters
//	queue:{KEY}:silent  set of channels: the processes that have not answered a roll call
//	fence-floor         counter: the greatest token that [Backend.Reap] has deleted
//	wake:UUID           Pub/Sub channel of a Backend
//
// The counter is as durable as the Redis: a restart without persistence, a failover to a lagging replica, an eviction or a
// FLUSHALL can set it back. Use appendonly yes, appendfsync always and maxmemory-policy noeviction, or a lock on a consensus
// store (etcdlock, zklock, consullock). docs/operations.md says how to repair a counter: by INCRBY, never SET, which could lower
// it.
//
// While a Cluster moves a key's slot, its lock can be renewed and released, but not granted: Acquire waits for the end of
// the move, and TryAcquire returns the server's TRYAGAIN, MOVED or ASK.
//
// It needs Redis 6.0.6 or later (LPOS), and a user that may run scripts on the keys lock:*, fence:*, queue:* and fence-floor,
// publish and subscribe on wake:*, and run PUBSUB. Without PUBSUB, dead waiters are not skipped at once; where scripts may not
// use queue:{KEY}:silent, which no call declares, there is no roll call.
package redislock

import (
	"cmp"
	"context"
	"embed"
	"fmt"
	"strings"
	"time"
	"unicode"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/wait"
	"github.com/fencelab/fencelab/internal/jitter"
	"github.com/fencelab/fencelab/internal/redisscript"
)

//go:embed *.lua
var lua embed.FS

var (
	acquireScript = redisscript.Load(lua, "lib.lua", "queue.lua", "acquire.lua")
	renewScript   = redisscript.Load(lua, "lib.lua", "queue.lua", "renew.lua")
	releaseScript = redisscript.Load(lua, "lib.lua", "release.lua")
	leaveScript   = redisscript.Load(lua, "lib.lua", "queue.lua", "leave.lua")
	freeScript    = redisscript.Load(lua, "free.lua")
	reapScript    = redisscript.Load(lua, "reap.lua")
)

// Options configure a [Backend]. Backends of both modes can lock the same keys.
type Options struct {
	Prefix string // before the names of all keys, "" by default. Locks with different prefixes are independent.
	Mode   Mode   // ModeQueue by default
	Queue  Queue  // for ModeQueue
	Spin   Spin   // for ModeSpin
}

// Mode is how Acquire waits.
type Mode int

const (
	// ModeQueue waits in a FIFO queue of all processes; see [Queue].
	ModeQueue Mode = iota
	// ModeSpin polls. It needs no Pub/Sub. It can't overtake the queue, except right after a lease has expired.
	ModeSpin
)

// Spin polls after a random backoff that grows from Min to Max, or sooner if the holder's lease ends. It is unfair: the first to
// poll after a release gets the lock. Defaults: 2 ms, and 100 ms or Min if that is longer.
type Spin struct{ Min, Max time.Duration }

// Backend implements dlock.Backend on any redis.UniversalClient except a redis.Ring or a struct around one. A client with
// ContextTimeoutEnabled ends a request at its context's deadline, others at their own timeouts.
type Backend struct {
	c     redis.UniversalClient
	o     Options
	floor string
	first []any // every script's first arguments: floor, "1" if its server knows all subscribers. No spare capacity: append copies it
	sub   *subscriber
	open  context.Context
	close context.CancelFunc
}

var _ dlock.Backend = (*Backend)(nil)

// New returns a Backend on client, which stays the caller's to close. opts may be nil. New sends nothing.
func New(client redis.UniversalClient, opts *Options) (*Backend, error) {
	if client == nil {
		return nil, invalid("client is nil")
	}
	o := *cmp.Or(opts, &Options{})
	o.Spin.Min = cmp.Or(o.Spin.Min, 2*time.Millisecond)
	o.Spin.Max = cmp.Or(o.Spin.Max, max(o.Spin.Min, 100*time.Millisecond))
	o.Queue.Max = cmp.Or(o.Queue.Max, 10_000)
	o.Queue.HandoffTTL = cmp.Or(o.Queue.HandoffTTL, dlock.DefaultTTL)
	switch q := o.Queue; {
	case o.Mode != ModeQueue && o.Mode != ModeSpin:
		return nil, invalid("Mode %d; want ModeQueue or ModeSpin", o.Mode)
	case redisscript.Check(client) != nil:
		return nil, invalid("%w", redisscript.Check(client))
	case q.Max < 1 || q.HandoffTTL < time.Millisecond || q.HandoffTTL%time.Millisecond != 0:
		return nil, invalid("Queue{Max: %d, HandoffTTL: %v}; Max must be positive and HandoffTTL a whole number of milliseconds", q.Max, q.HandoffTTL)
	case o.Spin.Min <= 0 || o.Spin.Max < o.Spin.Min:
		return nil, invalid("Spin{Min: %v, Max: %v}; Min must be positive and Max at least Min", o.Spin.Min, o.Spin.Max)
	case strings.ContainsAny(o.Prefix, "{}"):
		return nil, invalid("prefix %q contains a brace, which Redis Cluster would take for a hash tag", o.Prefix)
	case strings.ContainsFunc(o.Prefix, unicode.IsSpace):
		return nil, invalid("prefix %q contains a space, which separates the words of an entry in a queue", o.Prefix)
	}
	b := &Backend{c: client, o: o, floor: o.Prefix + "fence-floor"}
	b.open, b.close = context.WithCancel(context.Background())
	b.first = []any{b.floor, "0"}
	if _, single := client.(*redis.Client); single {
		b.first[1] = "1"
	}
	b.sub = &subscriber{
		b: b, channel: o.Prefix + "wake:" + uuid.NewString(),
		waiters: map[string]*waiter{}, watch: map[string]*waiter{}, taken: map[string]uint64{}, leaving: map[string][]*batch{},
	}
	return b, nil
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: redislock: "+format, append([]any{dlock.ErrInvalid}, args...)...)
}

// Acquire implements dlock.Backend. In ModeQueue it returns [dlock.ErrQueueFull] if too many wait already.
func (b *Backend) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	if b.o.Mode == ModeSpin {
		return b.spin(ctx, r)
	}
	return b.queue(ctx, r)
}

// TryAcquire implements dlock.Backend.
func (b *Backend) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	a, err := b.poll(ctx, r, outside)
	if err == nil && a.token == 0 {
		err = dlock.ErrHeld
	}
	return a.grant(r), err
}

func (b *Backend) spin(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	for pause := b.o.Spin.Min; ; pause += min(pause, b.o.Spin.Max-pause) {
		a, err := b.settled(ctx, r, outside)
		if err != nil || a.token != 0 {
			return a.grant(r), err
		}
		d := pause/2 + jitter.N(pause/2+1)
		if a.left >= 0 { // less: the lock has no TTL
			d = min(d, a.left+time.Millisecond) // the lease is valid to the end of its last millisecond
		}
		if _, err := b.wait(ctx, d, nil); err != nil {
			return dlock.Grant{}, err
		}
	}
}

type answer struct {
	at               time.Time // when the request was sent: the server can't start the lease earlier
	token            uint64    // 0: the lock is held
	left             time.Duration
	position, length int64  // of a waiter in the queue, from 1, and of the queue
	last             uint64 // the last token before the answer, if it is known
	unheard          bool   // the server knows of no subscription of the waiter
}

func (a answer) grant(r dlock.Request) dlock.Grant {
	if a.token == 0 {
		return dlock.Grant{}
	}
	return dlock.Grant{Key: r.Key, Owner: r.Owner, Fence: a.token, TTL: r.TTL, Start: a.at}
}

type phase int

const (
	outside phase = iota // it doesn't wait
	joining              // the queue, if the lock is held
	queued               // perhaps: an earlier request joined
	polling              // as queued; a reply means that no earlier request is under way
)

// poll runs the acquire script. A request that joins isn't repeated: it would be in the queue twice.
func (b *Backend) poll(ctx context.Context, r dlock.Request, p phase) (a answer, err error) {
	ms, err := b.check(r.Key, r.TTL)
	if err != nil {
		return a, err
	}
	args := append(append(make([]any, 0, 7), b.first...), r.Owner, ms)
	var c redis.Scripter = b.c
	switch p {
	case outside:
	case joining:
		args = append(args, b.entryPrefix(r.TTL), b.o.Queue.Max)
		c = redisscript.Once{UniversalClient: b.c}
	case queued, polling:
		args = append(args, b.entryPrefix(r.TTL), b.o.Queue.Max, 1)
		if p == polling {
			c = redisscript.Once{UniversalClient: b.c}
		}
	}
	a.at = time.Now()
	reply, err := acquireScript.Run(ctx, c, b.names(r.Key), args...).Int64Slice()
	switch {
	case err != nil:
		return a, failed(ctx, err)
	case len(reply) == 6:
		r.NoteHeld()
		a.left = time.Duration(reply[1]) * time.Millisecond
		a.position, a.length, a.last, a.unheard = reply[2], reply[3], uint64(reply[4]), reply[5] == 0
	case len(reply) == 0 || reply[0] == 0:
		return a, fmt.Errorf("redislock: the acquire script returned %v", reply)
	case reply[0] < 0:
		return a, fmt.Errorf("%w (redislock: %d)", dlock.ErrQueueFull, b.o.Queue.Max)
	default:
		a.token = uint64(reply[0])
		if len(reply) == 2 || p >= queued { // it was r.Owner's already, or a grant that has lapsed may still be announced
			b.sub.take(r.Owner, a.token)
		}
	}
	return a, nil
}

// Renew implements dlock.Backend.
func (b *Backend) Renew(ctx context.Context, g dlock.Grant) error {
	ms, err := b.check(g.Key, g.TTL)
	if err != nil {
		return err
	}
	keys := b.names(g.Key)
	n, err := renewScript.Run(ctx, b.c, keys[:1], append(b.first, g.Owner, ms, keys[2])...).Int64()
	if err == nil && n == 0 { // perhaps nobody releases it: a shared lease may be idle
		b.sub.forget(g.Owner)
	}
	return owned(ctx, n, err)
}

// Release implements dlock.Backend. Without a token it undoes a request, and also removes g's owner from the queue.
func (b *Backend) Release(ctx context.Context, g dlock.Grant) error {
	if _, err := b.check(g.Key, time.Millisecond); err != nil {
		return err
	}
	defer b.sub.forget(g.Owner) // not before: a notification read meanwhile must not release the lock first
	if g.Fence == 0 {
		return b.sub.undo(ctx, g)
	}
	c, keys := redisscript.Once{UniversalClient: b.c}, b.names(g.Key)
	n, err := releaseScript.Run(ctx, c, keys, append(b.first, g.Owner)...).Int64()
	if tryAgain(err) || redirected(err) { // waiters are notified when it has moved
		if n, err = freeScript.Run(ctx, c, keys[:1], g.Owner).Int64(); n == 1 {
			b.sub.leave(g) //nolint:contextcheck // it continues when ctx has ended
		}
	}
	return owned(ctx, n, err)
}

func owned(ctx context.Context, n int64, err error) error {
	if err == nil && n == 0 {
		return dlock.ErrLost
	}
	return failed(ctx, err)
}

func failed(ctx context.Context, err error) error { return wait.Failed(ctx, "redislock", err) }

// Close implements dlock.Backend. Calls of Acquire that wait leave the queue and return dlock.ErrClosed.
func (b *Backend) Close() error {
	b.sub.mu.Lock()
	b.close() // ends the subscription, so that hand-overs pass its waiters over
	b.sub.mu.Unlock()
	b.sub.busy.Wait()
	return nil
}

// wait returns after d, or sooner with a notice, or with an error when ctx ends or the Backend is closed.
func (b *Backend) wait(ctx context.Context, d time.Duration, notices <-chan notice) (notice, error) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case n := <-notices:
		return n, nil
	case <-timer.C:
		return notice{}, nil
	case <-ctx.Done():
	case <-b.open.Done():
	}
	return notice{}, b.ended(ctx)
}

func (b *Backend) ended(ctx context.Context) error {
	if ctx.Err() != nil {
		return fmt.Errorf("redislock: waiting: %w", context.Cause(ctx))
	}
	return dlock.ErrClosed
}

// check returns ttl in Redis's unit, or an error for a call that can't work. The holder must not believe a rounded TTL.
func (b *Backend) check(key string, ttl time.Duration) (ms int64, err error) {
	switch {
	case strings.HasPrefix(key, "}"): // "{}" is no hash tag, so its keys would be apart in a Cluster
		return 0, invalid("key %q begins with a closing brace", key)
	case ttl < time.Millisecond || ttl%time.Millisecond != 0:
		return 0, invalid("TTL %v is not a whole number of milliseconds, the unit of Redis; at least 1ms", ttl)
	case b.open.Err() != nil:
		return 0, dlock.ErrClosed
	}
	return ttl.Milliseconds(), nil
}

func (b *Backend) names(key string) []string {
	return []string{b.o.Prefix + "lock:{" + key + "}", b.o.Prefix + "fence:{" + key + "}", b.o.Prefix + "queue:{" + key + "}"}
}
