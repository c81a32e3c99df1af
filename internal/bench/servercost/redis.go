package servercost

import (
	"context"
	"fmt"
	"slices"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/internal/bench/load"
	"github.com/fencelab/fencelab/internal/jitter"
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
	if err = r.opened.add(server, err); err != nil {
		return nil, nil, err
	}
	r.uses(server)
	client, err := redisclient.New(server.URL)
	if err = r.opened.add(client, err); err != nil {
		return nil, nil, err
	}
	backend, err := redislock.New(client, nil)
	return client, backend, r.opened.add(backend, err)
}

func (r *recorder) uses(server fmt.Stringer) {
	if s := server.String(); !slices.Contains(r.setup.Servers, s) {
		r.setup.Servers = append(r.setup.Servers, s)
	}
}

type redisBed struct {
	*recorder
	client  *redis.Client
	backend *redislock.Backend
	set     Set
}

func (r *recorder) onRedis(ctx context.Context, run string) (*redisBed, error) {
	r.begin(run)
	client, backend, err := r.startRedis(ctx)
	if err != nil {
		return nil, err
	}
	r.watch(WatchRedis(ctx, client))
	return &redisBed{r, client, backend, Set{Seed: r.config.Seed, N: r.config.Redis.Keys, TTL: r.config.Redis.TTL.D()}}, nil
}

func (b *redisBed) fill() phase {
	counts := &Counts{}
	return phase{"fill", func(ctx context.Context, _ *Line) error {
		pipelined, err := b.opened.pipelined(b.client)
		if err != nil {
			return err
		}
		err = Each(ctx, b.set, b.config.Redis.Conns*b.config.Redis.Batch, counts, Take(pipelined))
		if err == nil && counts.Held.Load() > 0 {
			err = fmt.Errorf("%d locks are held by others", counts.Held.Load())
		}
		return err
	}, counts}
}

func (b *redisBed) expiry(on int) phase {
	return phase{do: func(ctx context.Context, _ *Line) error {
		if err := b.client.Do(ctx, "DEBUG", "SET-ACTIVE-EXPIRE", on).Err(); err != nil {
			return fmt.Errorf("DEBUG SET-ACTIVE-EXPIRE: %w (redis-server needs --enable-debug-command yes)", err)
		}
		return nil
	}}
}

func (b *redisBed) reclaim(name string) phase {
	return phase{name: name, do: func(ctx context.Context, end *Line) error {
		s, err := b.server.Ask(ctx)
		if err != nil {
			return err
		}
		before := s.Redis.ExpiredKeys
		if s, err = b.until(ctx, func(s Sample) bool { return s.Redis.Expires == 0 }); err != nil {
			return err
		}
		end.Count = s.Redis.ExpiredKeys - before
		return nil
	}}
}

// purge waits for Redis to update its RSS, which it does ten times a second.
func (b *redisBed) purge() phase {
	return phase{name: "purge", do: func(ctx context.Context, _ *Line) error {
		if err := b.client.Do(ctx, "MEMORY", "PURGE").Err(); err != nil {
			return err
		}
		return jitter.Sleep(ctx, 2*b.config.SampleEvery.D())
	}}
}

// check takes and releases each tested key as another owner, and passes its tokens to found.
func (b *redisBed) check(name string, times func(i int) int, found func(end *Line, i int, token float64)) phase {
	return phase{name: name, do: func(ctx context.Context, end *Line) error {
		end.Values = map[string]float64{}
		for i := range int(b.config.Redis.Check) {
			for range times(i) {
				q := b.set.Request(uint64(i))
				g, err := b.backend.TryAcquire(ctx, dlock.Request{Key: q.Key, Owner: "another", TTL: tokenTTL})
				if err != nil {
					return fmt.Errorf("the lock of key %d: %w", i, err)
				}
				if err := b.backend.Release(ctx, g); err != nil {
					return err
				}
				end.Count++
				found(end, i, float64(g.Fence))
			}
		}
		return nil
	}}
}

func once(int) int { return 1 }

func (r *recorder) redisActive(ctx context.Context) error {
	b, err := r.onRedis(ctx, "redis active")
	if err != nil {
		return err
	}
	tokens := make([]float64, r.config.Redis.Check)
	return r.phases(
		ctx, empty, b.fill(), b.reclaim("drain"), b.purge(),
		// Some keys are locked again, so that counters differ.
		b.check("use", func(i int) int { return 1 + i%5 }, func(end *Line, i int, token float64) {
			tokens[i] = token
			end.Values["greatest"] = max(end.Values["greatest"], token)
		}),
		phase{name: "reap", do: func(ctx context.Context, end *Line) error {
			n, err := b.backend.Reap(ctx)
			end.Count = uint64(n)
			return err
		}},
		b.purge(),
		b.check("reuse", once, func(end *Line, i int, token float64) {
			if token > tokens[i] {
				end.Values["greater"]++
			}
			end.Values["greatest"] = max(end.Values["greatest"], token)
		}),
	)
}

// redisLazy suspends active expiry until all leases have ended, so that only keys that are accessed are deleted.
func (r *recorder) redisLazy(ctx context.Context) error {
	b, err := r.onRedis(ctx, "redis lazy")
	if err != nil {
		return err
	}
	return r.phases(
		ctx, empty, b.expiry(0), b.fill(),
		// Every lease began before the fill ended.
		phase{name: "expire", do: func(ctx context.Context, _ *Line) error { return jitter.Sleep(ctx, b.set.TTL) }},
		b.check("touch", once, func(end *Line, _ int, token float64) {
			if token == 2 {
				end.Values["second_token"]++
			}
		}),
		b.expiry(1), b.reclaim("reclaim"), b.purge(),
	)
}
