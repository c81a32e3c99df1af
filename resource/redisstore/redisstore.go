// Package redisstore is a [resource.Store] in Redis 4 or later: a server, a replicated one or a Cluster.
//
// A record is one hash, resource:{KEY}, with the fields token, seq and value. One script checks the fence and acts on it,
// and Redis runs one script at a time. A KEY that is its name's hash tag shares its slot of a Cluster with other keys of
// the same tag.
//
// # What it rests on
//
// The store is as safe as the Redis is durable. A Redis that loses writes forgets fences with them, and a stale holder
// that comes after that gets through, with the value going back in time, too:
//
//   - A restart forgets all without persistence, and the last second with appendfsync everysec, which is the default of
//     an append-only file. Use appendonly yes and appendfsync always: then an answer waits for the disk.
//   - A failover to a replica forgets what the replica didn't have yet. Replication is asynchronous. WAIT makes it
//     unlikely and not impossible: it counts replicas that have a write, and neither undoes the write nor refuses it to
//     readers if there are too few, nor keeps a replica without it from being promoted. WAIT is no consensus.
//   - An old primary that is cut off goes on accepting writes until it learns of the new one, and they are lost then.
//   - An eviction takes the fence with its record: use maxmemory-policy noeviction. So do FLUSHALL, DEL and a TTL.
//
// Where a lost fence isn't tolerable use a store with a quorum or a synchronous standby.
//
// # To see and to set a fence
//
// After a token that was wrong has locked a key, stop its holders, and set its fence back. [Store.SetFence] does it, or
//
//	redis-cli HMGET 'resource:{acme}' token seq
//	redis-cli HSET 'resource:{acme}' token 7 seq 0
package redisstore

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/resource"
)

var (
	//go:embed fence.lua
	fenceLua string
	//go:embed write.lua
	writeLua string
	//go:embed raise.lua
	raiseLua string
	//go:embed overwrite.lua
	overwriteLua string
	//go:embed set.lua
	setLua string
)

var (
	writeScript     = redis.NewScript(fenceLua + writeLua)
	raiseScript     = redis.NewScript(fenceLua + raiseLua)
	overwriteScript = redis.NewScript(fenceLua + overwriteLua)
	setScript       = redis.NewScript(fenceLua + setLua)
)

// Options configure a [Store].
type Options struct {
	// Prefix stands before the names of all keys, "" by default. Stores with different prefixes don't know each other.
	Prefix string
}

// Store is a [resource.Store] in Redis. Its methods may be called concurrently. It works with a client that finds a key's one
// record, or fails: a *redis.Client, one with a Sentinel too, and a *redis.ClusterClient, whose Read may return an old record
// if it has ReadOnly, RouteByLatency or RouteRandomly set. It doesn't with a *redis.Ring, which looks for a key on another
// server as soon as its own doesn't answer: there is no fence there, and a stale holder gets through. A client with
// ContextTimeoutEnabled set ends a call at its context's deadline; without it, at the client's own timeouts.
type Store struct {
	c      redis.UniversalClient
	prefix string

	mu     sync.Mutex
	closed bool
	calls  sync.WaitGroup // calls in flight
}

var (
	_ resource.Overwriter  = (*Store)(nil)
	_ resource.FenceSetter = (*Store)(nil)
)

// New returns a Store on client, which stays the caller's to close, and is not a *redis.Ring. It sends nothing. A nil opts is
// the zero Options.
func New(client redis.UniversalClient, opts *Options) (*Store, error) {
	if client == nil {
		return nil, errors.New("redisstore: client is nil")
	}
	if _, ring := client.(*redis.Ring); ring {
		return nil, errors.New("redisstore: a redis.Ring moves keys to other servers when one doesn't answer, and their fences stay " +
			"behind: use a redis.Client or a redis.ClusterClient")
	}
	var o Options
	if opts != nil {
		o = *opts
	}
	if strings.ContainsAny(o.Prefix, "{}") {
		return nil, fmt.Errorf("redisstore: prefix %q contains a brace, which Redis Cluster would take for a hash tag", o.Prefix)
	}
	return &Store{c: client, prefix: o.Prefix}, nil
}

// Write is [resource.Store.Write]. It is sent once, whatever the client's MaxRetries: if it were repeated behind the
// caller's back after a lost answer, the caller would be refused without having been told of the loss.
func (s *Store) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckFence(f)); err != nil {
		return err
	}
	return s.do(ctx, func() error {
		reply, err := writeScript.Run(ctx, once{s.c}, s.names(key), f.Token, f.Seq, value).StringSlice()
		if err != nil || len(reply) == 0 {
			return err
		}
		if len(reply) != 3 {
			return fmt.Errorf("the script returned %q", reply)
		}
		seen, err := parse(reply[0], reply[1])
		if err != nil {
			return err
		}
		return &resource.StaleTokenError{Key: key, Seen: seen, Got: f, Applied: reply[2] == "1"}
	})
}

// Overwrite is [resource.Overwriter.Overwrite]. It is sent once, like Write.
func (s *Store) Overwrite(ctx context.Context, key string, f resource.Fence, value []byte) error {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckOffered(f)); err != nil {
		return err
	}
	return s.do(ctx, func() error {
		return overwriteScript.Run(ctx, once{s.c}, s.names(key), f.Token, f.Seq, value).Err()
	})
}

// Read is [resource.Store.Read].
func (s *Store) Read(ctx context.Context, key string) (rec resource.Record, err error) {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key)); err != nil {
		return rec, err
	}
	err = s.do(ctx, func() (err error) {
		fields, err := s.c.HMGet(ctx, s.names(key)[0], "token", "seq", "value").Result()
		if err != nil {
			return err
		}
		if fields[0] == nil && fields[1] == nil && fields[2] == nil {
			return resource.ErrNotFound
		}
		rec, err = record(fields)
		return err
	})
	return rec, err
}

// ReadFenced is [resource.Store.ReadFenced].
func (s *Store) ReadFenced(ctx context.Context, key string, token uint64) (rec resource.Record, err error) {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckToken(token)); err != nil {
		return rec, err
	}
	err = s.do(ctx, func() error {
		fields, err := raiseScript.Run(ctx, s.c, s.names(key), token).Slice()
		if err != nil {
			return err
		}
		got, err := record(fields)
		if err == nil {
			err = got.CheckRead(key, token)
		}
		if err == nil {
			rec = got
		}
		return err
	})
	return rec, err
}

// SetFence is [resource.FenceSetter.SetFence].
func (s *Store) SetFence(ctx context.Context, key string, token uint64) error {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckToken(token)); err != nil {
		return err
	}
	return s.do(ctx, func() error {
		set, err := setScript.Run(ctx, s.c, s.names(key), token).Bool()
		if err == nil && !set {
			err = resource.ErrNotFound
		}
		return err
	})
}

// Close is [resource.Store.Close]. The client stays open.
func (s *Store) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.calls.Wait()
	return nil
}

// do runs a call, unless the store is closed.
func (s *Store) do(ctx context.Context, f func() error) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return resource.ErrClosed
	}
	s.calls.Add(1)
	s.mu.Unlock()
	defer s.calls.Done()
	return failed(ctx, f())
}

// names returns the names of the Redis keys of key's record: one.
func (s *Store) names(key string) []string { return []string{s.prefix + "resource:{" + key + "}"} }

// record makes a record of a hash's token, seq and value.
func record(fields []any) (rec resource.Record, err error) {
	if len(fields) != 3 {
		return rec, fmt.Errorf("the script returned %q", fields)
	}
	token, ok := fields[0].(string)
	seq, okSeq := fields[1].(string)
	if !ok || !okSeq {
		return rec, errors.New("the record is damaged: it has no fence")
	}
	if rec.MaxFence, err = parse(token, seq); err != nil {
		return resource.Record{}, err
	}
	if value, ok := fields[2].(string); ok {
		rec.Value = []byte(value)
	}
	return rec, nil
}

func parse(token, seq string) (f resource.Fence, err error) {
	if f.Token, err = strconv.ParseUint(token, 10, 64); err == nil {
		f.Seq, err = strconv.ParseUint(seq, 10, 64)
	}
	if err != nil {
		return resource.Fence{}, fmt.Errorf("the record is damaged: %w", err)
	}
	return f, nil
}

// failed wraps a client's error, if there is one. After ctx's end that is ctx.Err at best, which doesn't tell the cause.
func failed(ctx context.Context, err error) error {
	if _, stale := errors.AsType[*resource.StaleTokenError](err); err == nil || stale || errors.Is(err, resource.ErrNotFound) {
		return err
	}
	if ctx.Err() != nil && !errors.Is(err, context.Cause(ctx)) {
		return fmt.Errorf("redisstore: %w: %w", context.Cause(ctx), err)
	}
	return fmt.Errorf("redisstore: %w", err)
}

// once runs scripts without go-redis's retries.
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
