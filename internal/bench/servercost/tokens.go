package servercost

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
)

// TokenConfig says how often tokens are made. Sources alternate, so that a busy machine slows all.
type TokenConfig struct {
	Rounds   int    `json:"rounds"`
	Serial   uint64 `json:"serial"`   // by one client, per round
	Parallel uint64 `json:"parallel"` // by all clients, per round
	Clients  int    `json:"clients"`
}

// Cost is the cost of one source's tokens.
type Cost struct {
	Source  string `json:"source"`
	Servers int    `json:"servers"` // members of the cluster
	// One client: median and p99 over all rounds.
	Serial int           `json:"serial"`
	P50    time.Duration `json:"p50_ns"`
	P99    time.Duration `json:"p99_ns"`
	// All clients: the median of the rounds.
	Clients   int     `json:"clients"`
	PerSecond float64 `json:"per_second"`
}

// Tokens are those of two keys, locked a b a b a, with an unrelated write after each.
type Tokens struct {
	Source string   `json:"source"`
	A      []uint64 `json:"a"`
	B      []uint64 `json:"b"`
}

type source struct {
	Cost
	mint func(ctx context.Context, q dlock.Request) error

	took  []time.Duration
	rates []float64
}

const tokenTTL = time.Hour

func (r *recorder) tokens(ctx context.Context) error {
	r.begin("tokens")
	client, backend, err := r.startRedis(ctx)
	if err != nil {
		return err
	}
	var all []*source
	add := func(name string, servers int, mint func(context.Context, dlock.Request) error) {
		all = append(all, &source{Cost: Cost{Source: name, Servers: servers}, mint: mint})
	}
	add("Redis: SET NX PX, a lock without a token", 1, func(ctx context.Context, q dlock.Request) error {
		return client.SetArgs(ctx, "bare:"+q.Key, q.Owner, redis.SetArgs{Mode: "NX", TTL: q.TTL}).Err()
	})
	add("Redis: INCR, a token without a lock", 1, func(ctx context.Context, q dlock.Request) error {
		return client.Incr(ctx, "token:"+q.Key).Err()
	})
	add("Redis: `redislock`, INCR in the script", 1, Take(backend))
	if err := r.order(ctx, "`redislock`", backend, func(ctx context.Context) error { return client.Set(ctx, "unrelated", "", 0).Err() }); err != nil {
		return err
	}
	for _, n := range []int{1, 3} {
		client, backend, err := r.startEtcd(ctx, n, 8<<30, "--election-timeout", "5000") // ms: an election, which a busy machine can cause, fails writes
		if err != nil {
			return err
		}
		put := func(ctx context.Context, key string) error {
			_, err := client.Put(ctx, key, "") // its reply has the revision
			return err
		}
		add("etcd: Put, a token without a lock", n, func(ctx context.Context, q dlock.Request) error { return put(ctx, "token/"+q.Key) })
		add("etcd: `etcdlock`, the revision of its key", n, Take(backend))
		if n == 1 {
			if err := r.order(ctx, "`etcdlock`", backend, func(ctx context.Context) error { return put(ctx, "unrelated") }); err != nil {
				return err
			}
		}
	}
	if err := r.compare(ctx, all); err != nil {
		return err
	}
	for _, s := range all {
		slices.Sort(s.took)
		slices.Sort(s.rates)
		n := len(s.took)
		s.Serial, s.P50, s.P99 = n, s.took[n/2], s.took[n*99/100]
		s.Clients, s.PerSecond = r.config.Tokens.Clients, s.rates[len(s.rates)/2]
		r.lines = append(r.lines, Line{Kind: KindCost, Run: r.run, Cost: &s.Cost})
		r.say("  %-48s %d  p50 %v  p99 %v  %s/s", s.Source, s.Servers, s.P50, s.P99, Short(s.PerSecond))
	}
	return nil
}

// compare alternates sources. Each request has its own key.
func (r *recorder) compare(ctx context.Context, all []*source) error {
	c := r.config.Tokens
	for round := range c.Rounds {
		for _, s := range all {
			warm := c.Serial / 10 // not counted: an idle server is slower
			set := Set{Seed: r.config.Seed + 2*uint64(round), N: warm + c.Serial, TTL: tokenTTL}
			for i := range set.N {
				q := set.Request(i)
				began := time.Now()
				if err := s.mint(ctx, q); err != nil {
					return fmt.Errorf("%s: %w", s.Source, err)
				}
				if i >= warm {
					s.took = append(s.took, time.Since(began))
				}
			}
			set.Seed, set.N = set.Seed+1, c.Parallel
			began := time.Now()
			if err := Each(ctx, set, c.Clients, new(Counts), s.mint); err != nil {
				return fmt.Errorf("%s: %w", s.Source, err)
			}
			s.rates = append(s.rates, float64(c.Parallel)/time.Since(began).Seconds())
		}
	}
	return nil
}

func (r *recorder) order(ctx context.Context, name string, b dlock.Backend, unrelated func(context.Context) error) error {
	t := Tokens{Source: name}
	for i := range 5 {
		q := dlock.Request{Key: "a", Owner: fmt.Sprint("owner ", i), TTL: tokenTTL}
		tokens := &t.A
		if i%2 == 1 {
			q.Key, tokens = "b", &t.B
		}
		g, err := b.TryAcquire(ctx, q)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		if err := errors.Join(b.Release(ctx, g), unrelated(ctx)); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		*tokens = append(*tokens, g.Fence)
	}
	r.lines = append(r.lines, Line{Kind: KindTokens, Run: r.run, Tokens: &t})
	return nil
}
