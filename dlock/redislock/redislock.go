// Package redislock is a dlock.Backend on one Redis: a server, a replicated one or a Cluster.
//
// The lock is a string with a TTL, lock:{KEY}, whose value is the owner. One script takes it and mints the fencing token
// from the counter fence:{KEY} in the same round trip; release and renewal compare the owner in the step in which they
// act (https://redis.io/docs/latest/commands/set/#patterns). The hash tag keeps both keys in one slot of a Cluster.
//
// The counter never expires, since a token that starts again would be refused by the resource, or worse, equal one that
// was already used. It is only as durable as the Redis: a restart without persistence, a failover to a replica that lags,
// an eviction or a FLUSHALL can take it back. Run the counter's Redis with appendfsync always and maxmemory-policy
// noeviction, or take the token from a consensus store.
package redislock

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
)

//go:embed acquire.lua
var acquireLua string

//go:embed renew.lua
var renewLua string

//go:embed release.lua
var releaseLua string

var (
	acquireScript = redis.NewScript(acquireLua)
	renewScript   = redis.NewScript(renewLua)
	releaseScript = redis.NewScript(releaseLua)
)

// Options configure a [Backend].
type Options struct {
	// Prefix stands before the names of all keys, "" by default. Locks with different prefixes don't know each other.
	Prefix string
	// Spin is how Acquire waits for a lock that is held.
	Spin Spin
}

// Spin is the classic way to wait: ask again after a random time that grows from Min to Max, or when the holder's lease
// ends, if that is sooner. It is unfair: whoever asks first after a release gets the lock. Zero values: 2 ms, and 100 ms or
// Min if that is longer.
type Spin struct {
	Min, Max time.Duration
}

// Backend implements dlock.Backend. It works with every redis.UniversalClient. A client with ContextTimeoutEnabled set
// ends a request at its context's deadline; without it, at the client's own timeouts.
type Backend struct {
	c redis.UniversalClient
	o Options

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
	switch {
	case o.Spin.Min <= 0 || o.Spin.Max < o.Spin.Min:
		return nil, fmt.Errorf("%w: redislock: Spin{Min: %v, Max: %v}; Min must be positive and Max at least Min",
			dlock.ErrInvalid, o.Spin.Min, o.Spin.Max)
	case strings.ContainsAny(o.Prefix, "{}"):
		return nil, fmt.Errorf("%w: redislock: prefix %q contains a brace, which Redis Cluster would take for a hash tag",
			dlock.ErrInvalid, o.Prefix)
	}
	return &Backend{c: client, o: o, closed: make(chan struct{})}, nil
}

// Acquire implements dlock.Backend. It spins; see [Spin].
func (b *Backend) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	for pause := b.o.Spin.Min; ; pause = min(2*pause, b.o.Spin.Max) {
		g, left, err := b.try(ctx, r)
		if !errors.Is(err, dlock.ErrHeld) {
			return g, err
		}
		wait := pause/2 + rand.N(pause/2+1)
		if left >= 0 {
			wait = min(wait, left+time.Millisecond) // the lease is good to the end of its last millisecond
		}
		if err := b.wait(ctx, wait); err != nil {
			return dlock.Grant{}, err
		}
	}
}

func (b *Backend) wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("redislock: waiting: %w", context.Cause(ctx))
	case <-b.closed:
		return dlock.ErrClosed
	}
}

// TryAcquire implements dlock.Backend.
func (b *Backend) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	g, _, err := b.try(ctx, r)
	return g, err
}

// try asks once. With dlock.ErrHeld it returns how long the holder's lease lasts, less than 0 if for ever: a lock without
// a TTL is not one of ours.
func (b *Backend) try(ctx context.Context, r dlock.Request) (g dlock.Grant, left time.Duration, err error) {
	lock, fence, err := b.names(r.Key)
	if err != nil {
		return g, 0, err
	}
	ms, err := millis(r.TTL)
	if err != nil {
		return g, 0, err
	}
	if b.isClosed() {
		return g, 0, dlock.ErrClosed
	}
	start := time.Now() // before the request leaves: the server cannot start the lease earlier
	reply, err := acquireScript.Run(ctx, b.c, []string{lock, fence}, r.Owner, ms).Int64Slice()
	switch {
	case err != nil:
		return g, 0, failed(ctx, err)
	case len(reply) == 2:
		return g, time.Duration(reply[1]) * time.Millisecond, dlock.ErrHeld
	case len(reply) != 1 || reply[0] < 1:
		return g, 0, fmt.Errorf("redislock: the acquire script returned %v", reply)
	}
	return dlock.Grant{Key: r.Key, Owner: r.Owner, Fence: uint64(reply[0]), TTL: r.TTL, Start: start}, 0, nil
}

// Renew implements dlock.Backend.
func (b *Backend) Renew(ctx context.Context, g dlock.Grant) error {
	lock, _, err := b.names(g.Key)
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
	n, err := renewScript.Run(ctx, b.c, []string{lock}, g.Owner, ms).Int64()
	return owned(ctx, n, err)
}

// Release implements dlock.Backend.
func (b *Backend) Release(ctx context.Context, g dlock.Grant) error {
	lock, _, err := b.names(g.Key)
	if err != nil {
		return err
	}
	if b.isClosed() {
		return dlock.ErrClosed
	}
	n, err := releaseScript.Run(ctx, once{b.c}, []string{lock}, g.Owner).Int64()
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

// Close implements dlock.Backend. Waiting calls of Acquire return dlock.ErrClosed. The client stays open.
func (b *Backend) Close() error {
	b.closeOnce.Do(func() { close(b.closed) })
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

// names returns the names of key's lock and fence counter.
func (b *Backend) names(key string) (lock, fence string, err error) {
	if strings.HasPrefix(key, "}") { // "{}" is no hash tag, so the two would part in a Cluster
		return "", "", fmt.Errorf("%w: redislock: key %q begins with a closing brace", dlock.ErrInvalid, key)
	}
	return b.o.Prefix + "lock:{" + key + "}", b.o.Prefix + "fence:{" + key + "}", nil
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
// lock free, or another's, and would report a lock as lost that it has just released. dlock.Locker asks again itself,
// and knows that it did.
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
