package load

import (
	"context"
	"time"
)

// alarm waits for a time, or returns why the context that it was made with ended.
type alarm struct {
	wait  func(d time.Duration) error
	close func() error
}

// newAlarm is another in tests, which run in virtual time.
var newAlarm = preciseAlarm

// timerAlarm is an alarm of the runtime's timers, which can be a millisecond late in a process that is otherwise idle.
func timerAlarm(ctx context.Context) (alarm, error) {
	return alarm{func(d time.Duration) error { return sleep(ctx, d) }, func() error { return nil }}, nil
}
