package servercost

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
	"golang.org/x/sync/errgroup"

	"github.com/fencelab/fencelab/dlock"
)

// Set is a set of locks, determined by the seed. A second run retries its requests: leases that haven't expired restart with
// their tokens; an expired one is a new grant, with the next token.
type Set struct {
	Seed uint64
	N    uint64
	TTL  time.Duration
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

// Each calls do for every lock of s, and counts it as granted, or as held if do's error wraps [dlock.ErrHeld]. Any other error
// ends it.
func Each(ctx context.Context, s Set, workers int, c *Counts, do func(ctx context.Context, q dlock.Request) error) error {
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
					return fmt.Errorf("lock %d of %d: %w", i+1, s.N, err)
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

// Short formats n with three digits: 950, 1.25k, 10M.
func Short[T uint64 | float64](n T) string {
	v := float64(n)
	for _, unit := range []string{"", "k", "M"} {
		if v < 999.5 {
			return strings.TrimSpace(fmt.Sprintf("%.3g%s", v, unit))
		}
		v /= 1000
	}
	return fmt.Sprintf("%.3gG", v)
}
