// Package calls has what the calls of all stores share.
package calls

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"

	"github.com/fencelab/fencelab/resource"
)

// Calls counts a store's calls in flight. The zero value is open.
type Calls struct {
	mu       sync.Mutex
	closed   bool
	inFlight sync.WaitGroup
}

// Begin starts a call, unless ctx has ended, key is invalid, invalid has an error, or the store is closed.
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

// End ends a call that Begin started.
func (c *Calls) End() { c.inFlight.Done() }

// Close refuses new calls and waits for those in flight. It may be called again.
func (c *Calls) Close() {
	c.mu.Lock()
	c.closed = true
	c.mu.Unlock()
	c.inFlight.Wait()
}

// Wrap puts the store's name before a client's error, and ctx's cause if ctx has ended. Refusals and [resource.ErrNotFound] stay
// unchanged.
func Wrap(ctx context.Context, store string, err error) error {
	if _, stale := errors.AsType[*resource.StaleTokenError](err); err == nil || stale || errors.Is(err, resource.ErrNotFound) {
		return err
	}
	if ctx.Err() != nil && !errors.Is(err, context.Cause(ctx)) {
		return fmt.Errorf("%s: %w: %w", store, context.Cause(ctx), err)
	}
	return fmt.Errorf("%s: %w", store, err)
}

// Late returns err, the error of a call that was sent. If ctx's end is why, it says that the call may still take effect.
func Late(ctx context.Context, err error) error {
	if ctx.Err() == nil || !errors.Is(err, ctx.Err()) && !errors.Is(err, context.Cause(ctx)) {
		return err
	}
	return fmt.Errorf("%w (the operation may still take effect)", err)
}

// Await returns what f does, or ctx's cause if that ends first, for clients that may ignore ctx while they wait. f then goes on,
// and must not use what the caller may change. If f panics, so does Await, or f's goroutine if Await has returned.
func Await[T any](ctx context.Context, f func() (T, error)) (T, error) {
	if ctx.Done() == nil {
		return f()
	}
	replied, gone := make(chan func() (T, error)), make(chan struct{})
	defer close(gone)
	go func() {
		reply := caught(f)
		select {
		case replied <- reply:
		case <-gone:
			_, _ = reply()
		}
	}()
	select {
	case reply := <-replied:
		return reply()
	case <-ctx.Done():
		select {
		case reply := <-replied: // both are ready
			return reply()
		default:
		}
		var none T
		return none, Late(ctx, context.Cause(ctx))
	}
}

func caught[T any](f func() (T, error)) (reply func() (T, error)) {
	defer func() {
		if p := recover(); p != nil {
			err := &panicError{p, debug.Stack()}
			reply = func() (T, error) { panic(err) }
		}
	}()
	value, err := f()
	return func() (T, error) { return value, err }
}

type panicError struct {
	value any
	stack []byte
}

func (p *panicError) Error() string { return fmt.Sprintf("%v\n\n%s", p.value, p.stack) }

func (p *panicError) Unwrap() error {
	err, _ := p.value.(error)
	return err
}
