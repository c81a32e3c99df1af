package faults

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// effect is what a fault does to one direction of a link.
type effect struct {
	dir   *direction
	flow  flow
	delay time.Duration // if the flow is delay
}

// inject puts effects in force as one fault, and names it in errors: all or none. If one of them meets another fault, or a
// closed link, no connection feels any of them. The heal heals all of them, though some may fail.
func inject(ctx context.Context, name string, effects ...effect) (Heal, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("faults: %s: %w", name, context.Cause(ctx))
	}
	var claims []int
	undo := func(addr string, err error) (Heal, error) {
		for i, claim := range claims {
			effects[i].dir.end(claim)
		}
		return nil, fmt.Errorf("faults: %s on link %s: %w", name, addr, err)
	}
	for _, e := range effects {
		claim, err := e.dir.claim()
		if err != nil {
			return undo(e.dir.addr, err)
		}
		claims = append(claims, claim)
	}
	for _, e := range effects {
		if err := e.dir.enforce(ctx, e.flow, e.delay); err != nil {
			return undo(e.dir.addr, err)
		}
	}
	return func(ctx context.Context) error {
		var errs []error
		for i, e := range effects {
			if err := e.dir.heal(ctx, claims[i]); err != nil {
				errs = append(errs, fmt.Errorf("faults: heal %s on link %s: %w", name, e.dir.addr, err))
			}
		}
		return errors.Join(errs...)
	}, nil
}
