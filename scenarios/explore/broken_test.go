package explore_test

import (
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
)

// sabotage gives a lock a defect: it wraps the backend, or changes what its clients send.
type sabotage func(clients []*redis.Client, b dlock.Backend) dlock.Backend

func apply(how []sabotage, clients []*redis.Client, b dlock.Backend) dlock.Backend {
	for _, s := range how {
		b = s(clients, b)
	}
	return b
}

type scripts struct {
	mu    sync.Mutex
	texts map[string]string
}

// text returns the script that cmd runs; "" if the server doesn't know it either.
func (s *scripts) text(cmd redis.Cmder) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch args := cmd.Args(); args[0] {
	case "eval":
		s.texts[hash(args[1].(string))] = args[1].(string)
		return args[1].(string)
	case "evalsha":
		return s.texts[args[1].(string)]
	}
	return ""
}

func hash(script string) string {
	sum := sha1.Sum([]byte(script))
	return hex.EncodeToString(sum[:])
}

func replace(old, changed string) sabotage {
	all := scripts{texts: map[string]string{}}
	return intercept(func(cmd redis.Cmder) bool {
		if text := strings.Replace(all.text(cmd), old, changed, 1); cmd.Name() == "eval" {
			cmd.Args()[1] = text
		} else if text != "" {
			cmd.Args()[1] = hash(text)
		}
		return false
	})
}

func intercept(f func(redis.Cmder) bool) sabotage {
	return func(clients []*redis.Client, b dlock.Backend) dlock.Backend {
		clients[0].AddHook(hook{f})
		return b
	}
}

type hook struct{ f func(redis.Cmder) bool }

func (hook) DialHook(next redis.DialHook) redis.DialHook { return next }

func (hook) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return next
}

func (h hook) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		if h.f(cmd) {
			return nil
		}
		return next(ctx, cmd)
	}
}

func reply(cmd redis.Cmder, value any) bool {
	cmd.(interface{ SetVal(any) }).SetVal(value)
	return true
}

// deaf never polls: a waiter relies on its notification.
func deaf(cmd redis.Cmder) bool {
	const again = 3 + 3 + 6 // EVALSHA, hash, number of keys; keys; arguments before
	if cmd.Name() != "evalsha" || len(cmd.Args()) != again+1 {
		return false
	}
	return reply(cmd, []any{int64(0), int64(-1), int64(2), int64(2), int64(0), int64(1)})
}

type getFirst struct {
	dlock.Backend
	c *redis.Client
}

func (b getFirst) Release(ctx context.Context, g dlock.Grant) error {
	owner, err := b.c.Get(ctx, "lock:{"+g.Key+"}").Result()
	if g.Fence != 0 && (errors.Is(err, redis.Nil) || err == nil && owner != g.Owner) {
		return dlock.ErrLost
	}
	return b.Backend.Release(ctx, g)
}

// changed changes grants; before runs before each request.
type changed struct {
	dlock.Backend
	before func(ctx context.Context, key string) (uint64, error)
	grant  func(g *dlock.Grant, drawn uint64)
}

func (b changed) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.ask(ctx, r, b.Backend.Acquire)
}

func (b changed) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.ask(ctx, r, b.Backend.TryAcquire)
}

func (b changed) ask(ctx context.Context, r dlock.Request, f func(context.Context, dlock.Request) (dlock.Grant, error)) (dlock.Grant, error) {
	var drawn uint64
	if b.before != nil {
		var err error
		if drawn, err = b.before(ctx, r.Key); err != nil {
			return dlock.Grant{}, err
		}
	}
	g, err := f(ctx, r)
	if err == nil {
		b.grant(&g, drawn)
	}
	return g, err
}

func releaseInTwo(clients []*redis.Client, b dlock.Backend) dlock.Backend {
	return getFirst{replace(ownerOnly+"if not hand_over", "if not hand_over")(clients, b), clients[0]}
}

const ownerOnly = "if redis.call('GET', lock) ~= ARGV[3] then\n  return 0\nend\n"

func tokenFirst(clients []*redis.Client, b dlock.Backend) dlock.Backend {
	return changed{b, func(ctx context.Context, key string) (uint64, error) {
		return clients[0].Incr(ctx, "fence:{"+key+"}").Uint64()
	}, func(g *dlock.Grant, drawn uint64) { g.Fence = drawn }}
}

// noCleanUp never undoes a request with an unknown outcome, whose context has ended.
type noCleanUp struct{ dlock.Backend }

func (b noCleanUp) Release(ctx context.Context, g dlock.Grant) error {
	if g.Fence == 0 {
		return context.Canceled
	}
	return b.Backend.Release(ctx, g)
}

func endedCleanUp(_ []*redis.Client, b dlock.Backend) dlock.Backend { return noCleanUp{b} }

func lasting(believed func(ttl time.Duration) time.Duration) sabotage {
	return func(_ []*redis.Client, b dlock.Backend) dlock.Backend {
		return changed{b, nil, func(g *dlock.Grant, _ uint64) { g.TTL = believed(g.TTL) }}
	}
}

// longer adds allowances for drift, one of which the Locker takes off again.
func longer(allowances time.Duration) sabotage {
	return lasting(func(ttl time.Duration) time.Duration { return ttl + allowances*min(drift, ttl/4) })
}

// yes answers for one Redlock node, so that the others need one vote less.
func yes() sabotage {
	all := scripts{texts: map[string]string{}}
	return intercept(func(cmd redis.Cmder) bool {
		switch text := all.text(cmd); {
		case text == "":
			return false
		case strings.Contains(text, "Phase one"):
			return reply(cmd, []any{int64(1), int64(0), int64(0), int64(0), ""})
		case strings.Contains(text, "Phase two"):
			return reply(cmd, []any{int64(1), int64(0)})
		}
		return reply(cmd, int64(1))
	})
}
