package footprint

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/internal/fill"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// RedisConfig is what is done to Redis, twice: with active expiry, and with it switched off at first.
type RedisConfig struct {
	Keys  uint64   `json:"keys"`
	TTL   Duration `json:"ttl"`
	Conns int      `json:"conns"`
	Batch int      `json:"batch"`
	// Check is how many of the keys are looked at one by one.
	Check uint64 `json:"check"`
}

// bed is a Redis of an experiment.
type bed struct {
	*recorder
	client  *redis.Client
	backend *redislock.Backend
	sampler *fill.RedisSampler
	set     fill.Set
}

// onRedis runs f on a Redis of its own.
func (r *recorder) onRedis(ctx context.Context, run string, f func(context.Context, *bed) error) (err error) {
	c := r.config.Redis
	if c.Keys == 0 || c.TTL.Duration <= 0 || c.Check > c.Keys {
		return errors.New("config.json: redis: keys and ttl must be positive, and check not more than keys")
	}
	server, err := testbed.StartRedis(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Close()) }()
	client, err := redisclient.New(server.URL)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, client.Close()) }()
	backend, err := redislock.New(client, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, backend.Close()) }()
	sampler := fill.NewRedisSampler(ctx, client)
	defer sampler.Close()
	b := &bed{r, client, backend, sampler, fill.Set{Seed: r.config.Seed, N: c.Keys, TTL: c.TTL.Duration}}
	if err := r.begin(run, server.String()); err != nil {
		return err
	}
	err = b.do(ctx, "empty", func(context.Context) (uint64, map[string]float64, error) { return 0, nil, nil })
	if err != nil {
		return err
	}
	return f(ctx, b)
}

// do is a phase.
func (b *bed) do(ctx context.Context, name string, do func(context.Context) (uint64, map[string]float64, error)) error {
	return b.phase(ctx, name, b.watch, nil, do)
}

func (b *bed) watch(ctx context.Context) (*fill.RedisSample, *fill.EtcdSample, error) {
	s, err := b.sampler.Sample(ctx)
	return &s, nil, err
}

// fill takes all locks.
func (b *bed) fill(ctx context.Context) error {
	var counts fill.Counts
	return b.phase(ctx, "fill", b.watch, counts.Done, func(ctx context.Context) (uint64, map[string]float64, error) {
		p := fill.Pipeline{Conns: b.config.Redis.Conns, Batch: b.config.Redis.Batch}
		err := fill.Redis(ctx, b.client, nil, b.set, p, &counts)
		if err == nil && counts.Held() > 0 {
			err = fmt.Errorf("%d locks are held by others", counts.Held())
		}
		return counts.Granted(), nil, err
	})
}

// expiry switches active expiry on or off.
func (b *bed) expiry(ctx context.Context, on int) error {
	if err := b.client.Do(ctx, "DEBUG", "SET-ACTIVE-EXPIRE", on).Err(); err != nil {
		return fmt.Errorf("DEBUG SET-ACTIVE-EXPIRE: %w (redis-server needs --enable-debug-command yes)", err)
	}
	return nil
}

// reclaim waits until Redis has deleted every key that has a TTL, and counts how many those were.
func (b *bed) reclaim(ctx context.Context, name string) error {
	return b.do(ctx, name, func(ctx context.Context) (uint64, map[string]float64, error) {
		s, err := fill.AskRedis(ctx, b.client)
		if err != nil {
			return 0, nil, err
		}
		before := s.ExpiredKeys
		err = until(ctx, func(ctx context.Context) (bool, error) {
			s, err = fill.AskRedis(ctx, b.client)
			return s.Expires == 0, err
		})
		return s.ExpiredKeys - before, nil, err
	})
}

// settle is longer than Redis takes to resize its tables and to look at its RSS, which it does ten times a second.
const settle = 2 * time.Second

// purge asks the allocator to give back what it doesn't use.
func (b *bed) purge(ctx context.Context) error {
	return b.do(ctx, "purge", func(ctx context.Context) (uint64, map[string]float64, error) {
		if err := b.client.Do(ctx, "MEMORY", "PURGE").Err(); err != nil {
			return 0, nil, err
		}
		return 0, nil, pause(ctx, settle)
	})
}

// take acquires and releases the i-th key for somebody who had nothing to do with the fill, and returns the token. That lease
// doesn't end by itself.
func (b *bed) take(ctx context.Context, i uint64) (float64, error) {
	q := b.set.Request(i)
	q.Owner, q.TTL = "another", tokenTTL
	g, err := b.backend.TryAcquire(ctx, q)
	if err != nil {
		return 0, fmt.Errorf("the lock of key %d: %w", i, err)
	}
	return float64(g.Fence), b.backend.Release(ctx, g)
}

// redisActive lets Redis expire keys as it does by itself, while they are made and after that, and then reaps the
// counters.
func (r *recorder) redisActive(ctx context.Context) error {
	return r.onRedis(ctx, "redis active", func(ctx context.Context, b *bed) error {
		if err := b.fill(ctx); err != nil {
			return err
		}
		if err := b.reclaim(ctx, "drain"); err != nil {
			return err
		}
		if err := b.purge(ctx); err != nil {
			return err
		}
		// Some keys are locked a few times more, so that not all counters are the same.
		tokens := make([]float64, r.config.Redis.Check)
		err := b.do(ctx, "use", func(ctx context.Context) (n uint64, _ map[string]float64, err error) {
			for i := range tokens {
				for range 1 + i%5 {
					if tokens[i], err = b.take(ctx, uint64(i)); err != nil {
						return n, nil, err
					}
					n++
				}
			}
			return n, map[string]float64{"greatest": slices.Max(tokens)}, nil
		})
		if err != nil {
			return err
		}
		err = b.do(ctx, "reap", func(ctx context.Context) (uint64, map[string]float64, error) {
			n, err := b.backend.Reap(ctx, 0)
			return uint64(n), nil, err
		})
		if err != nil {
			return err
		}
		if err := b.purge(ctx); err != nil {
			return err
		}
		return b.do(ctx, "reuse", func(ctx context.Context) (uint64, map[string]float64, error) {
			v := map[string]float64{"greater": 0}
			for i := range tokens {
				token, err := b.take(ctx, uint64(i))
				if err != nil {
					return 0, nil, err
				}
				if token > tokens[i] {
					v["greater"]++
				}
				v["greatest"] = max(v["greatest"], token)
			}
			return uint64(len(tokens)), v, nil
		})
	})
}

// redisLazy suspends active expiry until all leases have ended, so that only a key that somebody asks for is deleted.
func (r *recorder) redisLazy(ctx context.Context) error {
	return r.onRedis(ctx, "redis lazy", func(ctx context.Context, b *bed) error {
		if err := b.expiry(ctx, 0); err != nil {
			return err
		}
		if err := b.fill(ctx); err != nil {
			return err
		}
		err := b.do(ctx, "expire", func(ctx context.Context) (uint64, map[string]float64, error) {
			return 0, nil, pause(ctx, b.set.TTL) // every lease began before the fill ended
		})
		if err != nil {
			return err
		}
		err = b.do(ctx, "touch", func(ctx context.Context) (uint64, map[string]float64, error) {
			v := map[string]float64{"second_token": 0}
			n := r.config.Redis.Check
			for i := range n {
				token, err := b.take(ctx, i)
				if err != nil {
					return 0, nil, err // held: the lease has not ended
				}
				if token == 2 {
					v["second_token"]++
				}
			}
			return n, v, nil
		})
		if err != nil {
			return err
		}
		if err := b.expiry(ctx, 1); err != nil {
			return err
		}
		if err := b.reclaim(ctx, "reclaim"); err != nil {
			return err
		}
		return b.purge(ctx)
	})
}
