package cas

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strconv"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/internal/redisscript"
	"github.com/fencelab/fencelab/resource/internal/calls"
)

//go:embed swap.lua
var swapLua string

var swapScript = redis.NewScript(swapLua)

// Redis is a [Store] in Redis 4 or later: a hash cas:{KEY} with the fields version and value. While Redis is silent a call ends
// with its ctx, but keeps its connection until the client's timeout.
type Redis struct {
	// Client is closed by the caller. It must not be a *redis.Ring or cache on the client side.
	Client redis.UniversalClient
}

var _ Store = Redis{}

func name(key string) string { return "cas:{" + key + "}" }

// Get is [Store.Get].
func (r Redis) Get(ctx context.Context, key string) ([]byte, int64, error) {
	if err := cmp.Or(check(key, 0), redisscript.Check(r.Client)); err != nil {
		return nil, 0, err
	}
	fields, err := calls.Await(ctx, func() ([]any, error) { return r.Client.HMGet(ctx, name(key), "version", "value").Result() })
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

// Swap is [Store.Swap]. It ignores the client's MaxRetries: a retry would conflict with the first attempt.
func (r Redis) Swap(ctx context.Context, key string, version int64, value []byte) error {
	if err := cmp.Or(check(key, version), redisscript.Check(r.Client)); err != nil {
		return err
	}
	value = append([]byte{}, value...) // the caller may return before it is written
	client := redisscript.Once{UniversalClient: r.Client}
	swapped, err := calls.Await(ctx, func() (int, error) {
		return swapScript.Run(ctx, client, []string{name(key)}, version, version+1, value).Int()
	})
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
