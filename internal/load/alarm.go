package load

import (
	"context"
	"time"
)

// alarm waits for the pacer.
type alarm interface {
	// wait returns after d, or why ctx ended.
	wait(ctx context.Context, d time.Duration) error
	close() error
}

// newAlarm is changed by tests, which live in virtual time.
var newAlarm = preciseAlarm

// timers is an alarm of the runtime's timers. In a process that is otherwise idle they can be a millisecond late.
type timers struct{}

func (timers) wait(ctx context.Context, d time.Duration) error { return sleep(ctx, d) }

func (timers) close() error { return nil }
