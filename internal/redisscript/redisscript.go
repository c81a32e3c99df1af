// Package redisscript runs Redis scripts once, whatever the client's MaxRetries, and detects clients that move keys.
package redisscript

import (
	"context"
	"embed"
	"errors"
	"reflect"
	"strings"

	"github.com/redis/go-redis/v9"
)

// Load joins the named files into a script. It panics if one is missing.
func Load(files embed.FS, names ...string) *redis.Script {
	var src strings.Builder
	for _, name := range names {
		b, err := files.ReadFile(name)
		if err != nil {
			panic(err)
		}
		src.Write(b)
	}
	return redis.NewScript(src.String())
}

// Check returns an error if client caches records or is a ring.
func Check(client redis.UniversalClient) error {
	if IsRing(client) {
		return errors.New("a redis.Ring moves keys to other servers when one doesn't answer, and their records stay behind: " +
			"use a redis.Client or a redis.ClusterClient")
	}
	if within(reflect.ValueOf(client), caches) {
		return errors.New("a redis.Client with ClientSideCacheConfig or ClientSideCache returns old records: use one without")
	}
	return nil
}

func caches(client reflect.Value) bool {
	if client.Type() != reflect.TypeFor[*redis.Client]() || client.IsNil() || !client.CanInterface() {
		return false
	}
	o := client.Interface().(*redis.Client).Options()
	return o.ClientSideCacheConfig != nil || o.ClientSideCache != nil
}

// IsRing reports whether client is a *redis.Ring, or a struct around one.
func IsRing(client redis.UniversalClient) bool {
	return within(reflect.ValueOf(client), func(c reflect.Value) bool { return c.Type() == reflect.TypeFor[*redis.Ring]() })
}

func within(client reflect.Value, is func(reflect.Value) bool) bool {
	for client.Kind() == reflect.Interface || client.Kind() == reflect.Pointer {
		if is(client) {
			return true
		}
		client = client.Elem()
	}
	if client.Kind() != reflect.Struct || client.Type().PkgPath() == reflect.TypeFor[redis.Ring]().PkgPath() {
		return false
	}
	for i := range client.NumField() {
		if f := client.Type().Field(i).Type; f.Implements(reflect.TypeFor[redis.UniversalClient]()) && within(client.Field(i), is) {
			return true
		}
	}
	return false
}

// Once is a client for [redis.Script.Run] without go-redis's retries. A script repeated after a lost reply would find its own
// effect, such as a lock that it has released; only the caller can tell.
type Once struct{ redis.UniversalClient }

type cmd struct{ *redis.Cmd }

func (cmd) NoRetry() bool { return true }

func (c Once) do(ctx context.Context, name, what string, keys []string, args []any) *redis.Cmd {
	a := make([]any, 0, 3+len(keys)+len(args))
	a = append(a, name, what, len(keys))
	for _, k := range keys {
		a = append(a, k)
	}
	run := redis.NewCmd(ctx, append(a, args...)...)
	run.SetFirstKeyPos(3) // where a Cluster client finds the slot
	_ = c.Process(ctx, cmd{run})
	return run
}

// Eval sends a script once.
func (c Once) Eval(ctx context.Context, script string, keys []string, args ...any) *redis.Cmd {
	return c.do(ctx, "eval", script, keys, args)
}

// EvalSha sends a script's hash once.
func (c Once) EvalSha(ctx context.Context, sha1 string, keys []string, args ...any) *redis.Cmd {
	return c.do(ctx, "evalsha", sha1, keys, args)
}
