// Package calls is what all stores share: the checks at the start of a call, a Close that waits for calls in flight, and
// the wrapping of a client's errors.
package calls

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/fencelab/fencelab/resource"
)

// Calls counts the calls in flight of one store. The zero value is open.
type Calls struct {
	mu       sync.Mutex
	closed   bool
	inFlight sync.WaitGroup
}

// Begin starts a call, unless ctx has ended, the key is invalid, invalid has an error, or the store is closed. A call that
// has begun must call End.
func (c *Calls) Begin(ctx context.Context, key string, invalid ...error) error {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), cmp.Or(invalid...)); err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return resource.ErrClosed
	}
	c.inFlight.Add(1)
	return nil
}

// End ends a call.
func (c *Calls) End() { c.inFlight.Done() }

// Close refuses new calls and waits for those in flight. It may be called again.
func (c *Calls) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.inFlight.Wait()
}

// Wrap puts a store's name before a client's error, and ctx's cause too if ctx has ended, since clients report ctx.Err at
// best. A refusal and [resource.ErrNotFound] stay as they are.
func Wrap(ctx context.Context, store string, err error) error {
	if _, stale := errors.AsType[*resource.StaleTokenError](err); err == nil || stale || errors.Is(err, resource.ErrNotFound) {
		return err
	}
	if ctx.Err() != nil && !errors.Is(err, context.Cause(ctx)) {
		return fmt.Errorf("%s: %w: %w", store, context.Cause(ctx), err)
	}
	return fmt.Errorf("%s: %w", store, err)
}
