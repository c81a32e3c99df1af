// Package fill puts many locks into a lock service: the same ones for the same seed.
//
// The locks are taken by the backends themselves, so they have the names, the owners, the leases and the fencing tokens
// that a service under load would have. An owner follows from the seed as its key does. So whoever fills again repeats
// his own acquisitions, which every backend takes for a reply that was lost: leases that still last start anew and keep
// their tokens, and no key is added. Only a lease that has ended in the meantime is a new grant, with the next token.
package fill

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fencelab/fencelab/dlock"
)

// Set is a set of locks.
type Set struct {
	Seed uint64
	N    uint64        // how many
	TTL  time.Duration // of each lease
}

// golden is 2^64 divided by the golden ratio, made odd: the step of SplitMix64.
const golden = 0x9E3779B97F4A7C15

// mix is the output function of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
// It is a bijection.
func mix(z uint64) uint64 {
	z = (z ^ z>>30) * 0xBF58476D1CE4E5B9
	z = (z ^ z>>27) * 0x94D049BB133111EB
	return z ^ z>>31
}

// Key is the set's i-th key. Different i have different keys, since every step from i to the key is a bijection. It
// doesn't depend on N, so a larger set of the same seed contains the smaller one.
func (s Set) Key(i uint64) string {
	var key [20]byte
	copy(key[:], "gen/")
	hexadecimal(key[4:], mix(mix(s.Seed)+i*golden))
	return string(key[:])
}

// Owner is who holds the i-th lock: a UUID of version 4, as dlock.Locker's owners are.
func (s Set) Owner(i uint64) string {
	base := mix(s.Seed ^ golden)
	hi, lo := mix(base+2*i*golden), mix(base+(2*i+1)*golden)
	hi = hi&^0xf000 | 0x4000
	lo = lo&^(3<<62) | 1<<63
	var digits [32]byte
	hexadecimal(digits[:16], hi)
	hexadecimal(digits[16:], lo)
	var id [36]byte
	copy(id[:], digits[:8])
	for at, from := 8, 8; from < 20; at, from = at+5, from+4 {
		id[at] = '-'
		copy(id[at+1:], digits[from:from+4])
	}
	id[23] = '-'
	copy(id[24:], digits[20:])
	return string(id[:])
}

// Request is what takes the i-th lock.
func (s Set) Request(i uint64) dlock.Request {
	return dlock.Request{Key: s.Key(i), Owner: s.Owner(i), TTL: s.TTL}
}

func hexadecimal(dst []byte, v uint64) {
	var b [8]byte
	for i := range b {
		b[i] = byte(v >> (56 - 8*i))
	}
	hex.Encode(dst, b[:])
}

// Counts tells how far a fill has come. It is read while the fill goes on.
type Counts struct {
	granted, held atomic.Uint64
}

// Granted is how many locks of the set are held by their owners.
func (c *Counts) Granted() uint64 { return c.granted.Load() }

// Held is how many could not be had, because somebody else holds them.
func (c *Counts) Held() uint64 { return c.held.Load() }

// Done is how many were asked for.
func (c *Counts) Done() uint64 { return c.Granted() + c.Held() }

// each calls do for [from, to) of all i below n, in batches, by so many workers. The first error ends it.
func each(ctx context.Context, n, batch uint64, workers int, do func(ctx context.Context, from, to uint64) error) error {
	if batch < 1 || workers < 1 {
		return fmt.Errorf("fill: batches of %d by %d workers; want 1 at least", batch, workers)
	}
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	var next atomic.Uint64
	var wg sync.WaitGroup
	for range workers {
		wg.Go(func() {
			for ctx.Err() == nil {
				from := next.Add(batch) - batch
				if from >= n {
					return
				}
				if err := do(ctx, from, min(from+batch, n)); err != nil {
					stop(err)
				}
			}
		})
	}
	wg.Wait()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return nil
}

// Each calls do for every lock of s, by so many workers at a time, and counts it as granted, or as held if that is what
// do's error wraps.
func Each(ctx context.Context, s Set, workers int, c *Counts, do func(ctx context.Context, q dlock.Request) error) error {
	return each(ctx, s.N, 1, workers, func(ctx context.Context, i, _ uint64) error {
		err := do(ctx, s.Request(i))
		switch {
		case errors.Is(err, dlock.ErrHeld):
			c.held.Add(1)
		case err != nil:
			return fmt.Errorf("fill: lock %d of %d: %w", i+1, s.N, err)
		default:
			c.granted.Add(1)
		}
		return nil
	})
}

// Locks takes the locks of s one by one with b, by so many workers at a time. A lock that another owner holds is counted,
// and left.
func Locks(ctx context.Context, b dlock.Backend, s Set, workers int, c *Counts) error {
	return Each(ctx, s, workers, c, func(ctx context.Context, q dlock.Request) error {
		_, err := b.TryAcquire(ctx, q)
		return err
	})
}
