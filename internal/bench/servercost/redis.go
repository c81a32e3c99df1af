package servercost

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/internal/bench/load"
	"github.com/fencelab/fencelab/internal/bench/populate"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// RedisConfig is for two runs: with active expiry, and with it suspended at first.
type RedisConfig struct {
	Keys  uint64        `json:"keys"`
	TTL   load.Duration `json:"ttl"`
	Conns int           `json:"conns"` // times Batch is the number of concurrent requests
	Batch int           `json:"batch"`
	// How many keys are tested one by one.
	Check uint64 `json:"check"`
}

func (r *recorder) startRedis(ctx context.Context) (*redis.Client, *redislock.Backend, error) {
	server, err := testbed.StartRedis(ctx, nil)
	if err != nil {
		return nil, nil, err
	}
	r.closeLater(server.Close)
	r.uses(server)
	client, err := redisclient.New(server.URL)
	if err != nil {
		return nil, nil, err
	}
	r.closeLater(client.Close)
	backend, err := redislock.New(client, nil)
	if err != nil {
		return nil, nil, err
	}
	r.closeLater(backend.Close)
	return client, backend, nil
}

func (r *recorder) uses(server fmt.Stringer) {
	if s := server.String(); !slices.Contains(r.servers, s) {
		r.servers = append(r.servers, s)
	}
}

type redisBed struct {
	*recorder
	client  *redis.Client
	backend *redislock.Backend
	server  *populate.Server
	set     populate.Set
}

func (r *recorder) onRedis(ctx context.Context, run string) (*redisBed, error) {
	r.begin(run)
	client, backend, err := r.startRedis(ctx)
	if err != nil {
		return nil, err
	}
	server := populate.WatchRedis(ctx, client)
	r.closeLater(func() error { server.Close(); return nil })
	r.began = time.Now()
	return &redisBed{r, client, backend, server, populate.Set{Seed: r.config.Seed, N: r.config.Redis.Keys, TTL: r.config.Redis.TTL.D()}}, nil
}

func (b *redisBed) fill() phase {
	var counts populate.Counts
	return phase{"fill", func(ctx context.Context) (uint64, map[string]float64, error) {
		pipelined, err := populate.Pipelined(b.client, nil)
		if err != nil {
			return 0, nil, err
		}
		defer func() { _ = pipelined.Close() }()
		c := b.config.Redis
		err = populate.Each(ctx, b.set, c.Conns*c.Batch, &counts, populate.Take(pipelined))
		if err == nil && counts.Held.Load() > 0 {
			err = fmt.Errorf("%d locks are held by others", counts.Held.Load())
		}
		return counts.Granted.Load(), nil, err
	}, counts.Done}
}

func (b *redisBed) expiry(on int) phase {
	return phase{do: func(ctx context.Context) (uint64, map[string]float64, error) {
		if err := b.client.Do(ctx, "DEBUG", "SET-ACTIVE-EXPIRE", on).Err(); err != nil {
			return 0, nil, fmt.Errorf("DEBUG SET-ACTIVE-EXPIRE: %w (redis-server needs --enable-debug-command yes)", err)
		}
		return 0, nil, nil
	}}
}

// reclaim waits until Redis has deleted all keys with a TTL.
func (b *redisBed) reclaim(name string) phase {
	return phase{name: name, do: func(ctx context.Context) (uint64, map[string]float64, error) {
		s, err := b.server.Ask(ctx)
		if err != nil {
			return 0, nil, err
		}
		before := s.Redis.ExpiredKeys
		err = until(ctx, func() (bool, error) {
			s, err = b.server.Ask(ctx)
			return err == nil && s.Redis.Expires == 0, err
		})
		if err != nil {
			return 0, nil, err
		}
		return s.Redis.ExpiredKeys - before, nil, nil
	}}
}

// purge waits for Redis to update its RSS, which it does ten times a second.
func (b *redisBed) purge() phase {
	return phase{name: "purge", do: func(ctx context.Context) (uint64, map[string]float64, error) {
		if err := b.client.Do(ctx, "MEMORY", "PURGE").Err(); err != nil {
			return 0, nil, err
		}
		return 0, nil, pause(ctx, 2*b.config.SampleEvery.D())
	}}
}

// take acquires and releases the i-th key for another owner, and returns the token.
func (b *redisBed) take(ctx context.Context, i uint64) (float64, error) {
	q := b.set.Request(i)
	q.Owner, q.TTL = "another", tokenTTL
	g, err := b.backend.TryAcquire(ctx, q)
	if err != nil {
		return 0, fmt.Errorf("the lock of key %d: %w", i, err)
	}
	return float64(g.Fence), b.backend.Release(ctx, g)
}

// redisActive fills Redis with active expiry on, and then reaps the counters.
func (r *recorder) redisActive(ctx context.Context) error {
	b, err := r.onRedis(ctx, "redis active")
	if err != nil {
		return err
	}
	tokens := make([]float64, r.config.Redis.Check)
	return r.phases(
		ctx, b.server, phase{name: "empty", do: nothing}, b.fill(), b.reclaim("drain"), b.purge(),
		// Some keys are locked again, so that counters differ.
		phase{name: "use", do: func(ctx context.Context) (n uint64, _ map[string]float64, err error) {
			for i := range tokens {
				for range 1 + i%5 {
					if tokens[i], err = b.take(ctx, uint64(i)); err != nil {
						return n, nil, err
					}
					n++
				}
			}
			return n, map[string]float64{"greatest": slices.Max(tokens)}, nil
		}},
		phase{name: "reap", do: func(ctx context.Context) (uint64, map[string]float64, error) {
			n, err := b.backend.Reap(ctx)
			return uint64(n), nil, err
		}},
		b.purge(),
		phase{name: "reuse", do: func(ctx context.Context) (uint64, map[string]float64, error) {
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
		}},
	)
}

// redisLazy suspends active expiry until all leases have ended, so that only keys that are accessed are deleted.
func (r *recorder) redisLazy(ctx context.Context) error {
	b, err := r.onRedis(ctx, "redis lazy")
	if err != nil {
		return err
	}
	return r.phases(
		ctx, b.server, phase{name: "empty", do: nothing}, b.expiry(0), b.fill(),
		phase{name: "expire", do: func(ctx context.Context) (uint64, map[string]float64, error) {
			return 0, nil, pause(ctx, b.set.TTL) // every lease began before the fill ended
		}},
		phase{name: "touch", do: func(ctx context.Context) (uint64, map[string]float64, error) {
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
		}},
		b.expiry(1), b.reclaim("reclaim"), b.purge(),
	)
}
