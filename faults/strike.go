package faults

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// strike is what a fault does to one direction of a link.
type strike struct {
	link  *Link
	valve *valve // of the link
	flow  flow
	delay time.Duration // if the flow is delay
}

// inject puts strikes in force as one fault, and names it in errors: all or none. If one of them meets another fault,
// or a closed link, no connection feels any of them. The heal heals all of them, though some may fail.
func inject(ctx context.Context, name string, strikes ...strike) (Heal, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("faults: %s: %w", name, context.Cause(ctx))
	}
	faults := make([]int, len(strikes))
	for i, s := range strikes {
		var err error
		if faults[i], err = s.valve.claim(); err != nil {
			for i, s := range strikes[:i] {
				s.valve.end(faults[i])
			}
			return nil, fmt.Errorf("faults: %s on link %s: %w", name, s.link.Addr(), err)
		}
	}
	for _, s := range strikes {
		if err := s.valve.enforce(ctx, s.flow, s.delay); err != nil {
			for i, s := range strikes {
				s.valve.end(faults[i])
			}
			return nil, fmt.Errorf("faults: %s on link %s: %w", name, s.link.Addr(), err)
		}
	}
	return func(ctx context.Context) error {
		var errs []error
		for i, s := range strikes {
			if err := s.valve.heal(ctx, faults[i]); err != nil {
				errs = append(errs, fmt.Errorf("faults: heal %s on link %s: %w", name, s.link.Addr(), err))
			}
		}
		return errors.Join(errs...)
	}, nil
}
