package cas

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strconv"

	"github.com/redis/go-redis/v9"
)

//go:embed swap.lua
var swapLua string

// Redis is a [Store] in Redis 4 or later: a hash cas:{KEY} with the fields version and value, and a script that compares.
type Redis struct {
	// Client is the caller's to close. It isn't a *redis.Ring, which looks for a key on another server as soon as its own
	// doesn't answer: the version there is another one. It may be any other, see package redisstore.
	Client redis.UniversalClient
}

var _ Store = Redis{}

func name(key string) string { return "cas:{" + key + "}" }

// Get is [Store.Get].
func (r Redis) Get(ctx context.Context, key string) ([]byte, int64, error) {
	if err := cmp.Or(check(ctx, key, 0), r.check()); err != nil {
		return nil, 0, err
	}
	fields, err := r.Client.HMGet(ctx, name(key), "version", "value").Result()
	if err != nil || fields[0] == nil && fields[1] == nil {
		return nil, 0, err
	}
	text, ok := fields[0].(string)
	value, okValue := fields[1].(string)
	if !ok || !okValue {
		return nil, 0, fmt.Errorf("the record of %q is damaged: it lacks a field", key)
	}
	version, err := strconv.ParseInt(text, 10, 64)
	if err != nil {
		return nil, 0, fmt.Errorf("the record of %q is damaged: %w", key, err)
	}
	return []byte(value), version, nil
}

// Swap is [Store.Swap]. It is sent once, whatever the client's MaxRetries: a repeat of a swap whose answer was lost would
// find a conflict with itself.
func (r Redis) Swap(ctx context.Context, key string, version int64, value []byte) error {
	if err := cmp.Or(check(ctx, key, version), r.check()); err != nil {
		return err
	}
	if value == nil {
		value = []byte{}
	}
	cmd := redis.NewCmd(ctx, "eval", swapLua, 1, name(key), version, version+1, value)
	cmd.SetFirstKeyPos(3) // where a Cluster client looks for the slot
	_ = r.Client.Process(ctx, once{cmd})
	swapped, err := cmd.Int()
	switch {
	case err != nil:
		return err
	case swapped == 0:
		return ErrConflict
	case swapped != 1:
		return errors.New("the script returned " + strconv.Itoa(swapped))
	}
	return nil
}

// check returns what is wrong with r, or nil.
func (r Redis) check() error {
	if _, ring := r.Client.(*redis.Ring); ring {
		return errors.New("a redis.Ring moves keys to other servers when one doesn't answer, and their versions stay behind: " +
			"use a redis.Client or a redis.ClusterClient")
	}
	return nil
}

// once is a command that go-redis doesn't repeat.
type once struct{ *redis.Cmd }

func (once) NoRetry() bool { return true }
