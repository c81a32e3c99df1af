// Package observe reports a store's decisions in order, for tests and experiments.
package observe

import (
	"context"
	"errors"
	"fmt"
	"hash/maphash"
	"sync"

	"github.com/fencelab/fencelab/resource"
)

// Decision is a store's decision.
type Decision struct {
	Op       string
	Key      string
	Fence    resource.Fence // offered; zero for an unfenced read
	Seen     resource.Fence // the greatest accepted for Key before this call
	Accepted bool
	Enforced bool   // false: unchecked (an unfenced read, or an Overwrite)
	Value    []byte // read or offered, nil for a refused read; not to be kept or changed
}

// Operations of a [Decision].
const (
	Read  = "read"
	Write = "write"
)

// Store wraps store and calls record with every decision before the caller gets it. It serializes calls on a key, so its decisions
// come in the store's order if it has no other user. A started call finishes even if its ctx ends. Errors other than refusals are
// not reported. A write that the store's own retry refused as applied counts as accepted.
func Store(store resource.Store, record func(Decision)) resource.Overwriter {
	return &observed{Store: store, record: record, seed: maphash.MakeSeed()}
}

type observed struct {
	resource.Store
	record  func(Decision)
	seed    maphash.Seed
	stripes [64]sync.Mutex // by key
}

func (o *observed) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	d := Decision{Op: Write, Key: key, Fence: f, Enforced: true, Value: value}
	_, err := o.decide(ctx, d, func(ctx context.Context) (resource.Record, error) {
		return resource.Record{}, o.Store.Write(ctx, key, f, value)
	})
	return err
}

func (o *observed) Overwrite(ctx context.Context, key string, f resource.Fence, value []byte) error {
	store, ok := o.Store.(resource.Overwriter)
	if !ok {
		return fmt.Errorf("a %T has no Overwrite: %w", o.Store, errors.ErrUnsupported)
	}
	_, err := o.decide(ctx, Decision{Op: Write, Key: key, Fence: f, Value: value}, func(ctx context.Context) (resource.Record, error) {
		return resource.Record{}, store.Overwrite(ctx, key, f, value)
	})
	return err
}

func (o *observed) Read(ctx context.Context, key string) (resource.Record, error) {
	return o.decide(ctx, Decision{Op: Read, Key: key}, func(ctx context.Context) (resource.Record, error) {
		return o.Store.Read(ctx, key)
	})
}

func (o *observed) ReadFenced(ctx context.Context, key string, f resource.Fence) (resource.Record, error) {
	d := Decision{Op: Read, Key: key, Fence: f, Enforced: true}
	return o.decide(ctx, d, func(ctx context.Context) (resource.Record, error) { return o.Store.ReadFenced(ctx, key, f) })
}

func (o *observed) decide(ctx context.Context, d Decision, do func(context.Context) (resource.Record, error)) (resource.Record, error) {
	mu := &o.stripes[maphash.String(o.seed, d.Key)%uint64(len(o.stripes))]
	mu.Lock()
	defer mu.Unlock()
	if err := resource.CheckContext(ctx); err != nil {
		return resource.Record{}, err
	}
	ctx = context.WithoutCancel(ctx) // an unreported effect would be a gap in the history
	before, err := o.Store.Read(ctx, d.Key)
	if err != nil && !errors.Is(err, resource.ErrNotFound) {
		return resource.Record{}, err
	}
	rec, err := do(ctx)
	stale, refused := errors.AsType[*resource.StaleTokenError](err)
	if refused && stale.Applied && resource.AdmitsWrite(before.MaxFence, d.Fence) {
		err, refused = nil, false // it was not applied before, and no other call has run since: the store retried it
	}
	switch {
	case refused:
		d.Seen = stale.Seen
	case err == nil, errors.Is(err, resource.ErrNotFound):
		d.Seen, d.Accepted = before.MaxFence, true
		if d.Op == Read {
			d.Value = rec.Value
		}
	default:
		return rec, err
	}
	o.record(d)
	return rec, err
}
