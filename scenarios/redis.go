package scenarios

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// wedged is for how long a lease is renewed at most; no run takes so long.
const wedged = time.Hour

// OpenRedis is an [Open]: redislock on the Redis at the spec's Addr, a redis:// URL.
func OpenRedis(_ context.Context, s LockSpec) (Lock, error) {
	client, err := redisClient(s.Addr)
	if err != nil {
		return nil, err
	}
	b, err := redislock.New(client, nil)
	if err != nil {
		return nil, errors.Join(err, client.Close())
	}
	var backend dlock.Backend = b
	if s.Gap != nil {
		backend = getThenDel{Backend: b, client: client, gap: s.Gap}
	}
	o := &dlock.Options{TTL: s.TTL}
	if s.Renew {
		o.Renew = dlock.Renew{Every: s.TTL / 3, MaxHold: wedged}
	}
	l, err := dlock.New(backend, o)
	if err != nil {
		return nil, errors.Join(err, client.Close())
	}
	return redisLock{FromLocker(l), client}, nil
}

func redisClient(url string) (*redis.Client, error) {
	o, err := redis.ParseURL(url)
	if err != nil {
		return nil, fmt.Errorf("scenarios: %w", err)
	}
	o.ContextTimeoutEnabled = true
	return redis.NewClient(o), nil
}

type redisLock struct {
	Lock
	client *redis.Client
}

func (l redisLock) Close() error { return errors.Join(l.Lock.Close(), l.client.Close()) }

// getThenDel releases in the way that is wrong: it looks whether the lock is its own, and then deletes it, whosever it is
// by then. Only the value that the deletion returns tells what was deleted.
type getThenDel struct {
	*redislock.Backend
	client *redis.Client
	gap    func() error
}

func (b getThenDel) Release(ctx context.Context, g dlock.Grant) error {
	lock := redisKeys(g.Key)[0]
	owner, err := b.client.Get(ctx, lock).Result()
	if errors.Is(err, redis.Nil) || err == nil && owner != g.Owner {
		return dlock.ErrLost
	}
	if err != nil {
		return err
	}
	if err := b.gap(); err != nil {
		return err
	}
	owner, err = b.client.GetDel(ctx, lock).Result()
	switch {
	case errors.Is(err, redis.Nil):
		return dlock.ErrLost
	case err != nil:
		return err
	case owner != g.Owner:
		return fmt.Errorf("%w: %s", dlock.ErrForeignRelease, owner)
	}
	return nil
}

// redisKeys are the keys of redislock for a lock.
func redisKeys(key string) []string { return []string{"lock:{" + key + "}", "fence:{" + key + "}"} }

// OnRedis returns a Runner for [OpenRedis] on r. It removes what runs leave in a Redis that is the user's; others go with
// all that they hold.
func OnRedis(r *testbed.Redis) *Runner {
	runner := &Runner{Addr: r.URL, Lock: "redis", Server: r.String()}
	if r.Provider == testbed.External {
		runner.Forget = func(ctx context.Context, key string) error {
			client, err := redisClient(r.URL)
			if err != nil {
				return err
			}
			return errors.Join(client.Del(ctx, redisKeys(key)...).Err(), client.Close())
		}
	}
	return runner
}
