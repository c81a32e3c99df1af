package scenarios

import (
	"context"
	"errors"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/locks"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// getThenDel releases in the way that is wrong: it looks whether the lock is its own, and then deletes it, whosever it is
// by then. Only the value that the deletion returns tells what was deleted.
type getThenDel struct {
	*locks.Backend
	client *redis.Client
	gap    func() error
}

func newGetThenDel(b *locks.Backend, s LockSpec) (dlock.Backend, error) {
	if s.Lock != locks.Redis {
		return nil, fmt.Errorf("scenarios: %s has no release by GET and DEL; that is %s's", s.Lock, locks.Redis)
	}
	client, err := locks.RedisClient(s.Addrs[0])
	if err != nil {
		return nil, err
	}
	return getThenDel{b, client, s.Gap}, nil
}

func (b getThenDel) Close() error { return errors.Join(b.Backend.Close(), b.client.Close()) }

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

// OnRedis is the service of one Redis.
func OnRedis(r *testbed.Server) *Service {
	return Servers{Lock: locks.Redis, Servers: []*testbed.Server{r}}.On()
}

// forgetRedis removes what redislock has left of key.
func forgetRedis(ctx context.Context, url, key string) error {
	return withRedis(url, func(c *redis.Client) error { return c.Del(ctx, redisKeys(key)...).Err() })
}

func withRedis(url string, f func(c *redis.Client) error) error {
	client, err := locks.RedisClient(url)
	if err != nil {
		return err
	}
	return errors.Join(f(client), client.Close())
}

func flushRedis(ctx context.Context, s *testbed.Server) error {
	return withRedis(s.URL, func(c *redis.Client) error { return c.FlushAll(ctx).Err() })
}

// evictRedis fills the server's memory, in effect: with room for nothing, it drops all keys before it refuses a write.
func evictRedis(ctx context.Context, s *testbed.Server) error {
	return withRedis(s.URL, func(c *redis.Client) (err error) {
		was, err := c.ConfigGet(ctx, "maxmemory*").Result()
		if err != nil {
			return err
		}
		defer func() {
			ctx := context.WithoutCancel(ctx)
			for _, name := range []string{"maxmemory", "maxmemory-policy"} {
				err = errors.Join(err, c.ConfigSet(ctx, name, was[name]).Err())
			}
		}()
		if err := errors.Join(
			c.ConfigSet(ctx, "maxmemory-policy", "allkeys-random").Err(), c.ConfigSet(ctx, "maxmemory", "1").Err(),
		); err != nil {
			return err
		}
		if err := c.Set(ctx, "more", "x", 0).Err(); err == nil {
			return errors.New("there was room for more")
		}
		left, err := c.DBSize(ctx).Result()
		if err == nil && left > 0 {
			err = fmt.Errorf("%d keys were not evicted", left)
		}
		return err
	})
}

// lagRedis stops the replication of s once the replica has all that s has.
func lagRedis(ctx context.Context, s, replica *testbed.Server) error {
	if replica == nil {
		return fmt.Errorf("it has no replica: %w", errors.ErrUnsupported)
	}
	return withRedis(s.URL, func(c *redis.Client) error {
		// WAIT tells of what the same connection has written, so write something.
		conn := c.Conn()
		defer func() { _ = conn.Close() }()
		if err := conn.Set(ctx, "last", "replicated", 0).Err(); err != nil {
			return err
		}
		n, err := conn.Wait(ctx, 1, 0).Result()
		if err != nil {
			return err
		}
		if n != 1 {
			return fmt.Errorf("%d replicas have all that it has, want 1", n)
		}
		// From now on the replica gets nothing: it follows a server that isn't there.
		return withRedis(replica.URL, func(c *redis.Client) error { return c.Do(ctx, "REPLICAOF", "127.0.0.1", "1").Err() })
	})
}

// promoteRedis makes a replica a primary. The old one goes on, for those who still reach it.
func promoteRedis(ctx context.Context, replica *testbed.Server) error {
	if replica == nil {
		return fmt.Errorf("it has no replica: %w", errors.ErrUnsupported)
	}
	return withRedis(replica.URL, func(c *redis.Client) error { return c.Do(ctx, "REPLICAOF", "NO", "ONE").Err() })
}
