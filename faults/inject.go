package faults

import (
	"context"
	"errors"
	"fmt"
	"time"
)

type effect struct {
	dir   *direction
	flow  flow
	delay time.Duration // of flow delay
}

// inject puts all effects in force as one fault, or none: if one direction is taken or closed, no connection is affected. The
// heal tries to end all of them.
func inject(ctx context.Context, name string, effects ...effect) (Heal, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("faults: %s: %w", name, context.Cause(ctx))
	}
	claimed := 0
	undo := func(addr string, err error) (Heal, error) {
		for _, e := range effects[:claimed] {
			e.dir.release()
		}
		return nil, fmt.Errorf("faults: %s on link %s: %w", name, addr, err)
	}
	var heals []Heal
	for _, e := range effects {
		if err := e.dir.claim(); err != nil {
			return undo(e.dir.addr, err)
		}
		claimed++
		heals = append(heals, Once(e.dir.heal))
	}
	for _, e := range effects {
		if err := e.dir.enforce(ctx, e.flow, e.delay); err != nil {
			return undo(e.dir.addr, err)
		}
	}
	return func(ctx context.Context) error {
		var errs []error
		for i, e := range effects {
			if err := heals[i](ctx); err != nil {
				errs = append(errs, fmt.Errorf("faults: heal %s on link %s: %w", name, e.dir.addr, err))
			}
		}
		return errors.Join(errs...)
	}, nil
}
