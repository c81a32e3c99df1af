// Package cas is compare-and-swap on a version: the answer to lost updates that needs neither a lock nor a token.
//
// Read a value with its version, compute, and write if the version is still the same; else begin again. It is safe by
// itself, however long a writer is frozen in between: no lease can expire where there is none. Prefer it to a lock with
// fenced writes where all that the work does is to replace one value, and the work is short or conflicts are rare:
//
//	tries, err := cas.Update(ctx, cas.Redis{Client: client}, "acme", func(value []byte) ([]byte, error) {
//		return append(value, "invoice 17\n"...), nil
//	}, nil)
//
// [Redis] and [Postgres] are stores; any other that compares in the step in which it writes is a [Store] in two methods.
// It doesn't fit
//
//   - work that has effects outside of the value, such as a payment or a mail: a try that loses has had them already;
//   - work that is dear: of N writers on one key that begin together N-1 work in vain, and nobody is promised a turn;
//   - several values in several stores: each would be compared for itself.
//
// # An answer that is lost
//
// A swap that ends in an error other than [ErrConflict] may have taken effect. To go on as after a conflict could apply the
// change twice, so that [Update] returns the error, and neither store lets its client repeat a swap. A caller who wants to
// repeat an Update puts a mark into the value, such as a request's ID, by which change sees that it is there already.
//
// # What it rests on
//
// Versions only grow. A record that is deleted, or a server that loses what it has answered, begins again at 0, and a
// writer from before may find the version that it has read, under another value. See packages redisstore and pgstore for when
// servers lose data.
package cas

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"time"

	"github.com/fencelab/fencelab/resource"
)

// ErrConflict is returned by [Store.Swap] if somebody else has written since. Nothing was changed.
var ErrConflict = errors.New("cas: the version has changed")

// Store holds versioned values.
type Store interface {
	// Get returns key's value and its version, nil and 0 if there is none.
	Get(ctx context.Context, key string) (value []byte, version int64, err error)
	// Swap sets key's value and raises its version by one if that is version, else it returns [ErrConflict]. Any other
	// error leaves open whether the swap took effect.
	Swap(ctx context.Context, key string, version int64, value []byte) error
}

// Options configure [Update].
type Options struct {
	// Backoff is the longest that Update waits after its first conflict. The limit doubles with each conflict, up to
	// 64 times the first, and each wait is a random one below it. Zero: it tries again at once.
	Backoff time.Duration
}

const maxDoublings = 6

// Update replaces key's value by what change makes of it, and returns how often it called change: once, and once more
// for each conflict. An error of change ends it, and so does ctx; otherwise it goes on until a swap succeeds, or fails with
// more than a conflict. change gets nil for a key that doesn't exist. A nil opts is the zero Options.
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
			return tries, failed(ctx, err)
		}
		tries++
		if value, err = change(value); err != nil {
			return tries, err
		}
		if err = s.Swap(ctx, key, version, value); !errors.Is(err, ErrConflict) {
			return tries, failed(ctx, err)
		}
		if o.Backoff > 0 {
			wait(ctx, rand.N(o.Backoff<<min(tries-1, maxDoublings)))
		}
	}
}

func wait(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// failed wraps an error, if there is one, with ctx's cause if that has ended.
func failed(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if ctx.Err() != nil && !errors.Is(err, context.Cause(ctx)) {
		return fmt.Errorf("cas: %w: %w", context.Cause(ctx), err)
	}
	return fmt.Errorf("cas: %w", err)
}

// check is for what a store is handed.
func check(ctx context.Context, key string, version int64) error {
	err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key))
	if err == nil && version < 0 {
		err = fmt.Errorf("version is %d; versions start at 0", version)
	}
	return err
}
