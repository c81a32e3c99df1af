package locktest

import (
	"context"
	"os"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"
)

// RedisHook sends a client's scripts over a Wire. An answer is Redis's error.
type RedisHook struct {
	*Wire
	Kinds  map[any]string
	Suffix string // of kinds
}

// RedisKinds returns the names of scripts by hash and by text: files NAME.lua, which may begin with lib.lua, or with it and
// queue.lua.
func RedisKinds(t *testing.T, names ...string) map[any]string {
	t.Helper()
	kinds := map[any]string{}
	lib, _ := os.ReadFile("lib.lua")
	queue, _ := os.ReadFile("queue.lua")
	for _, name := range names {
		src, err := os.ReadFile(name + ".lua")
		require.NoError(t, err)
		for _, text := range []string{string(src), string(lib) + string(src), string(lib) + string(queue) + string(src)} {
			kinds[text], kinds[redis.NewScript(text).Hash()] = name, name
		}
	}
	return kinds
}

// DialHook implements redis.Hook.
func (RedisHook) DialHook(next redis.DialHook) redis.DialHook { return next }

// ProcessPipelineHook implements redis.Hook.
func (RedisHook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

// ProcessHook implements redis.Hook.
func (h RedisHook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c, ok := cmd.(interface {
			redis.Cmder
			SetVal(v any)
		})
		if !ok || h.Kinds[c.Args()[1]] == "" {
			return next(ctx, cmd)
		}
		v, err := Do(ctx, h.Wire, h.Kinds[c.Args()[1]]+h.Suffix, func(ctx context.Context, answer string) (any, error) {
			if answer != "" {
				return nil, redisError(answer)
			}
			own := redis.NewCmd(ctx, c.Args()...) // the reply may come when c has been given up
			err := next(ctx, own)
			return own.Val(), err
		})
		c.SetVal(v)
		c.SetErr(err)
		return err
	}
}

type redisError string

func (e redisError) Error() string { return string(e) }
func (redisError) RedisError()     {}
