package load

import (
	"context"
	"time"

	"github.com/fencelab/fencelab/internal/jitter"
)

// alarm's wait returns why its context ended, if it did.
type alarm struct {
	wait  func(d time.Duration) error
	close func() error
}

// Tests replace it for virtual time.
var newAlarm = preciseAlarm

// timerAlarm uses the runtime's timers, which can be a millisecond late in an idle process.
func timerAlarm(ctx context.Context) (alarm, error) {
	return alarm{func(d time.Duration) error { return jitter.Sleep(ctx, d) }, func() error { return nil }}, nil
}
