// Package onredis provides redislock's lock, its Redis's faults, and a durable resource to package scenarios.
package onredis

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/boltstore"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// Name is the lock's name.
const Name = "redis"

// Lock opens the lock.
var Lock = scenarios.FromBackend(Backend)

// Backend opens the lock's backend, which owns its client.
func Backend(_ context.Context, s scenarios.LockSpec) (dlock.Backend, error) {
	if s.Lock != Name {
		return nil, fmt.Errorf("%s has no release by GET and DEL; that is %s's", s.Lock, Name)
	}
	if s.Variant != "" {
		return nil, fmt.Errorf("there is no variant %q of %s", s.Variant, s.Lock)
	}
	if len(s.Addrs) != 1 {
		return nil, fmt.Errorf("%s takes one server, but %d addresses were given", s.Lock, len(s.Addrs))
	}
	client, err := redisclient.New(s.Addrs[0])
	if err != nil {
		return nil, err
	}
	b, err := redislock.New(client, nil)
	if err != nil {
		return nil, errors.Join(err, client.Close())
	}
	owned := backend{b, client}
	if s.Gap != nil {
		return getThenDel{owned, s.Gap}, nil
	}
	return owned, nil
}

type backend struct {
	dlock.Backend
	client *redis.Client
}

func (b backend) Close() error { return errors.Join(b.Backend.Close(), b.client.Close()) }

// getThenDel releases wrongly: it checks the owner, and then deletes the lock, whoever owns it by then.
type getThenDel struct {
	backend
	gap func() error
}

func (b getThenDel) Release(ctx context.Context, g dlock.Grant) error {
	lock := keys(g.Key)[0]
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

// Bolt is package boltstore's store, in the resource's process.
var Bolt = &scenarios.Store{Name: "bolt", Open: Store}

// Store opens Bolt.
func Store(_ context.Context, s scenarios.StoreSpec) (resource.Store, error) {
	return boltstore.Open(filepath.Join(s.Dir, "resource.db"), nil)
}

func keys(key string) []string { return []string{"lock:{" + key + "}", "fence:{" + key + "}"} }

// Service is On without a replica.
func Service(r *testbed.Server) *scenarios.Service {
	return On(scenarios.ServerSet{Lock: Name, Servers: []*testbed.Server{r}}, nil)
}

// On returns the lock's service on one Redis. replica may be nil. On an external Redis, runs delete their keys.
func On(s scenarios.ServerSet, replica *testbed.Server) *scenarios.Service {
	var svc *scenarios.Service
	s.Faults = Faults()
	s.Faults["lag"] = func(ctx context.Context, r *testbed.Server, _ scenarios.Step) error { return lag(ctx, r, replica) }
	s.Faults["failover"] = func(ctx context.Context, r *testbed.Server, _ scenarios.Step) error {
		if err := promote(ctx, replica); err != nil {
			return err
		}
		i := slices.IndexFunc(svc.Nodes, func(n scenarios.Node) bool { return n.Name == r.Name })
		svc.Nodes[i].Addr = replica.URL
		replica = nil // a primary from now on
		return nil
	}
	svc = s.On()
	if r := s.Servers[0]; r.Provider == testbed.External {
		svc.Forget = func(ctx context.Context, key string) error {
			return with(r.URL, func(c *redis.Client) error { return c.Del(ctx, keys(key)...).Err() })
		}
	}
	return svc
}

// Faults returns the faults of one Redis.
func Faults() map[string]func(context.Context, *testbed.Server, scenarios.Step) error {
	return map[string]func(context.Context, *testbed.Server, scenarios.Step) error{
		"flush": func(ctx context.Context, r *testbed.Server, _ scenarios.Step) error {
			return with(r.URL, func(c *redis.Client) error { return c.FlushAll(ctx).Err() })
		},
		"evict": func(ctx context.Context, r *testbed.Server, _ scenarios.Step) error {
			if err := r.Real(); err != nil {
				return err
			}
			return with(r.URL, func(c *redis.Client) error { return evict(ctx, c) })
		},
	}
}

func with(url string, f func(c *redis.Client) error) error {
	client, err := redisclient.New(url)
	if err != nil {
		return err
	}
	return errors.Join(f(client), client.Close())
}

func evict(ctx context.Context, c *redis.Client) (err error) {
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
}

func lag(ctx context.Context, s, replica *testbed.Server) error {
	if replica == nil {
		return fmt.Errorf("it has no replica: %w", errors.ErrUnsupported)
	}
	return with(s.URL, func(c *redis.Client) error {
		// WAIT refers to writes of the same connection.
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
		return with(replica.URL, func(c *redis.Client) error { return c.Do(ctx, "REPLICAOF", "127.0.0.1", "1").Err() })
	})
}

func promote(ctx context.Context, replica *testbed.Server) error {
	if replica == nil {
		return fmt.Errorf("it has no replica: %w", errors.ErrUnsupported)
	}
	return with(replica.URL, func(c *redis.Client) error { return c.Do(ctx, "REPLICAOF", "NO", "ONE").Err() })
}
