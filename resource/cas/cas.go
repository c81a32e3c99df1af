// Package cas is compare-and-swap on a version: it prevents lost updates without a lock or a token, however long a writer is
// paused. [Update] reads a value with its version, computes, and writes if the version is still the same; otherwise it starts
// over.
//
// Prefer it to a lock if a critical section only replaces one value, and is short or rarely contended. Avoid it for side effects
// such as a payment, which a losing attempt has already made; for expensive work, since N-1 of N concurrent writers start over;
// and for values in several stores.
//
// Versions must only grow. After a record is deleted, or its server loses a write, a different value may get the version that a
// writer has read. Packages redisstore and pgstore say when servers lose writes.
package cas

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/fencelab/fencelab/internal/jitter"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/internal/calls"
)

// ErrConflict is returned by [Store.Swap] if the version has changed. Nothing was written.
var ErrConflict = errors.New("cas: the version has changed")

// Store holds versioned values. [Redis] and [Postgres] are Stores.
type Store interface {
	// Get returns key's value and version, nil and 0 if there is none.
	Get(ctx context.Context, key string) (value []byte, version int64, err error)
	// Swap atomically sets key's value and increments its version if that equals version, or returns [ErrConflict]. After any
	// other error the swap may have taken effect.
	Swap(ctx context.Context, key string, version int64, value []byte) error
}

// Options configure [Update].
type Options struct {
	// Backoff limits the random wait after a conflict; it doubles with each, up to 64 times. Zero: Update retries at once.
	Backoff time.Duration
}

const maxDoublings = 6

// Update replaces key's value, nil for a new key, with what change returns for it. It retries after conflicts until a swap
// succeeds, change returns an error, or ctx ends, and returns how often it called change. opts may be nil.
//
// If a swap fails with any other error, the change may have taken effect. To repeat Update safely, put a mark into the value,
// such as a request's ID, that change can detect. Then let it return the value unchanged, not an error: a swap waits for a
// synchronous standby, which the first one's commit may have failed to reach; a read doesn't.
func Update(ctx context.Context, s Store, key string, change func(value []byte) ([]byte, error), opts *Options) (tries int, err error) {
	if err := resource.CheckKey(key); err != nil {
		return 0, fmt.Errorf("cas: %w", err)
	}
	var o Options
	if opts != nil {
		o = *opts
	}
	if o.Backoff < 0 {
		return 0, fmt.Errorf("cas: Options.Backoff is %v; it must not be negative", o.Backoff)
	}
	for {
		if err := resource.CheckContext(ctx); err != nil {
			return tries, fmt.Errorf("cas: %d tries: %w", tries, err)
		}
		value, version, err := s.Get(ctx, key)
		if err != nil {
			return tries, calls.Wrap(ctx, "cas", err)
		}
		tries++
		if value, err = change(value); err != nil {
			return tries, err
		}
		if err = s.Swap(ctx, key, version, value); !errors.Is(err, ErrConflict) {
			return tries, calls.Wrap(ctx, "cas", err)
		}
		if o.Backoff > 0 {
			_ = jitter.Sleep(ctx, rand.N(o.Backoff<<min(tries-1, maxDoublings))) // the next try checks ctx
		}
	}
}

func check(key string, version int64) error {
	err := resource.CheckKey(key)
	if err == nil && version < 0 {
		err = fmt.Errorf("version is %d; versions start at 0", version)
	}
	return err
}
