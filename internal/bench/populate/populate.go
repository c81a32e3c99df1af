// Package populate takes many locks of a lock service, the same ones for the same seed.
//
// The backends take them, with names, owners, leases and fencing tokens as under load. A second run's requests are
// retries: leases that haven't expired restart with their tokens. An expired lease is a new grant, with the next token.
package populate

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"golang.org/x/sync/errgroup"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redislock"
)

// Set is a set of locks.
type Set struct {
	Seed uint64
	N    uint64        // how many
	TTL  time.Duration // of each lease
}

// Request returns the request for the i-th lock. A larger set contains a smaller one of the same seed.
func (s Set) Request(i uint64) dlock.Request {
	sum := sha256.Sum256(binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(nil, s.Seed), i))
	owner := uuid.Must(uuid.NewRandomFromReader(bytes.NewReader(sum[8:])))
	return dlock.Request{Key: fmt.Sprintf("gen/%x", sum[:8]), Owner: owner.String(), TTL: s.TTL}
}

// Counts is progress that can be read concurrently.
type Counts struct {
	Granted, Held atomic.Uint64 // locks held by their owners, and by others
}

// Done counts requests.
func (c *Counts) Done() uint64 { return c.Granted.Load() + c.Held.Load() }

// Each calls do for every lock of s, and counts it as granted, or as held if do's error wraps [dlock.ErrHeld]. Any
// other error ends it.
func Each(ctx context.Context, s Set, workers int, c *Counts, do func(ctx context.Context, q dlock.Request) error) error {
	if workers < 1 {
		return fmt.Errorf("populate: %d workers; there must be one at least", workers)
	}
	all, ctx := errgroup.WithContext(ctx)
	var next atomic.Uint64
	for range workers {
		all.Go(func() error {
			for i := next.Add(1) - 1; i < s.N; i = next.Add(1) - 1 {
				if ctx.Err() != nil {
					return context.Cause(ctx)
				}
				switch err := do(ctx, s.Request(i)); {
				case errors.Is(err, dlock.ErrHeld):
					c.Held.Add(1)
				case err != nil:
					return fmt.Errorf("populate: lock %d of %d: %w", i+1, s.N, err)
				default:
					c.Granted.Add(1)
				}
			}
			return nil
		})
	}
	return all.Wait()
}

// Take returns a function that requests a lock of b once.
func Take(b dlock.Backend) func(context.Context, dlock.Request) error {
	return func(ctx context.Context, q dlock.Request) error {
		_, err := b.TryAcquire(ctx, q)
		return err
	}
}

// Pipelined returns a redislock.Backend that pipelines concurrent requests. It doesn't close the client.
func Pipelined(client *redis.Client, opts *redislock.Options) (dlock.Backend, error) {
	pipe, err := client.AutoPipeline()
	if err != nil {
		return nil, fmt.Errorf("populate: %w", err)
	}
	b, err := redislock.New(pipe, opts)
	if err != nil {
		return nil, errors.Join(err, pipe.Close())
	}
	return &pipelined{b, pipe}, nil
}

type pipelined struct {
	dlock.Backend
	pipe *redis.AutoPipeliner
}

func (p *pipelined) Close() error { return errors.Join(p.Backend.Close(), p.pipe.Close()) }

// Rate is n per second.
func Rate(n uint64, d time.Duration) float64 {
	if d <= 0 {
		return 0
	}
	return float64(n) / d.Seconds()
}

// Short formats v with three digits: 950, 1.25k, 10M.
func Short(v float64) string {
	for _, unit := range []string{"", "k", "M"} {
		if v < 999.5 {
			return strings.TrimSpace(fmt.Sprintf("%.3g%s", v, unit))
		}
		v /= 1000
	}
	return fmt.Sprintf("%.3gG", v)
}
