// Package redisstore is a [resource.Store] in Redis 4 or later, which may be replicated or a Cluster. A record is a hash,
// resource:{KEY}, with the fields token, seq and value.
//
// A Redis that loses writes loses fences, and then a stale holder gets through:
//   - A restart without persistence loses everything; with appendfsync everysec (the default) it loses the last second. Use
//     appendonly yes and appendfsync always.
//   - A failover loses what the new primary has not received. WAIT doesn't prevent that: it neither undoes the write if there are
//     too few replicas nor keeps a lagging one from promotion.
//   - A partitioned old primary accepts writes until it learns of the new one, and then drops them.
//   - An eviction, FLUSHALL, DEL or a TTL deletes the fence. Use maxmemory-policy noeviction.
//
// If you can't tolerate that, use a store with a quorum or a synchronous standby.
package redisstore

import (
	"bytes"
	"context"
	"embed"
	"errors"
	"fmt"
	"strings"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/internal/redisscript"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/internal/calls"
)

//go:embed *.lua
var lua embed.FS

var (
	writeScript     = redisscript.Load(lua, "fence.lua", "write.lua")
	raiseScript     = redisscript.Load(lua, "fence.lua", "raise.lua")
	overwriteScript = redisscript.Load(lua, "fence.lua", "overwrite.lua")
	setScript       = redisscript.Load(lua, "fence.lua", "set.lua")
)

// Options configure a [Store].
type Options struct {
	// Prefix begins all keys. Stores with different prefixes share nothing.
	Prefix string
}

// Store is a [resource.Store] in Redis. If a *redis.ClusterClient reads from replicas (ReadOnly, RouteByLatency, RouteRandomly),
// Read may return an old record.
type Store struct {
	c      redis.UniversalClient
	prefix string
	calls  calls.Calls
}

var (
	_ resource.Overwriter  = (*Store)(nil)
	_ resource.FenceSetter = (*Store)(nil)
)

// New returns a Store on client, which the caller closes. opts may be nil. It refuses a *redis.Ring, which moves a silent
// server's keys to another one without fences, and client-side caching. While Redis is silent a call ends with its ctx, but keeps
// its connection until the client's ReadTimeout, or with ContextTimeoutEnabled until ctx's deadline.
func New(client redis.UniversalClient, opts *Options) (*Store, error) {
	if client == nil {
		return nil, errors.New("redisstore: client is nil")
	}
	if err := redisscript.Check(client); err != nil {
		return nil, fmt.Errorf("redisstore: %w", err)
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

// Write is [resource.Store.Write]. It is sent once, whatever the client's MaxRetries.
func (s *Store) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	value = bytes.Clone(value) // see do
	_, err := s.do(ctx, key, resource.CheckFence(f), func(name []string) (none resource.Record, err error) {
		reply, err := writeScript.Run(ctx, redisscript.Once{UniversalClient: s.c}, name, f.Token, f.Seq, value).StringSlice()
		if err != nil || len(reply) == 0 {
			return none, err
		}
		if len(reply) != 3 {
			return none, fmt.Errorf("the script returned %q", reply)
		}
		seen, err := parse(reply[0], reply[1])
		if err != nil {
			return none, err
		}
		return none, &resource.StaleTokenError{Key: key, Seen: seen, Got: f, Applied: reply[2] == "1"}
	})
	return err
}

// Overwrite is [resource.Overwriter.Overwrite]. It is sent once, like Write.
func (s *Store) Overwrite(ctx context.Context, key string, f resource.Fence, value []byte) error {
	value = bytes.Clone(value) // see do
	_, err := s.do(ctx, key, resource.CheckOffered(f), func(name []string) (resource.Record, error) {
		return resource.Record{}, overwriteScript.Run(ctx, redisscript.Once{UniversalClient: s.c}, name, f.Token, f.Seq, value).Err()
	})
	return err
}

// Read is [resource.Store.Read].
func (s *Store) Read(ctx context.Context, key string) (resource.Record, error) {
	return s.do(ctx, key, nil, func(name []string) (none resource.Record, err error) {
		fields, err := s.c.HMGet(ctx, name[0], "token", "seq", "value").Result()
		if err != nil {
			return none, err
		}
		if fields[0] == nil && fields[1] == nil && fields[2] == nil {
			return none, resource.ErrNotFound
		}
		return record(fields)
	})
}

// ReadFenced is [resource.Store.ReadFenced].
func (s *Store) ReadFenced(ctx context.Context, key string, f resource.Fence) (resource.Record, error) {
	return s.do(ctx, key, resource.CheckToken(f.Token), func(name []string) (none resource.Record, err error) {
		fields, err := raiseScript.Run(ctx, s.c, name, f.Token, f.Seq).Slice()
		if err != nil {
			return none, err
		}
		rec, err := record(fields)
		if err == nil {
			err = rec.CheckRead(key, f)
		}
		if err != nil {
			return none, err
		}
		return rec, nil
	})
}

// SetFence is [resource.FenceSetter.SetFence]. By hand:
//
//	redis-cli HMGET 'resource:{acme}' token seq
//	redis-cli HSET 'resource:{acme}' token 7 seq 0
func (s *Store) SetFence(ctx context.Context, key string, token uint64) error {
	_, err := s.do(ctx, key, resource.CheckToken(token), func(name []string) (none resource.Record, err error) {
		set, err := setScript.Run(ctx, s.c, name, token).Bool()
		if err == nil && !set {
			err = resource.ErrNotFound
		}
		return none, err
	})
	return err
}

// Close is [resource.Store.Close]. The client stays open. It doesn't wait for calls that ended with their ctx while Redis was
// silent.
func (s *Store) Close() error {
	s.calls.Close()
	return nil
}

// do doesn't wait for f beyond ctx's end: while it waits for a reply, go-redis heeds only ctx's deadline.
func (s *Store) do(ctx context.Context, key string, invalid error, f func(name []string) (resource.Record, error)) (resource.Record, error) {
	if err := s.calls.Begin(ctx, key, invalid); err != nil {
		return resource.Record{}, err
	}
	defer s.calls.End()
	rec, err := calls.Await(ctx, func() (resource.Record, error) { return f([]string{s.prefix + "resource:{" + key + "}"}) })
	if err != nil && strings.Contains(err.Error(), "OOM command not allowed") { // wrapped before Redis 7
		err = fmt.Errorf("%w: %w", resource.ErrNoRoom, err)
	}
	return rec, calls.Wrap(ctx, "redisstore", err)
}

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

func parse(token, seq string) (resource.Fence, error) {
	f, err := resource.ParseFence(token + "." + seq)
	if err != nil {
		return resource.Fence{}, fmt.Errorf("the record is damaged: %w", err)
	}
	return f, nil
}
