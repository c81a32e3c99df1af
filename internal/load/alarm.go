package load

import (
	"context"
	"errors"
	"sync"
	"time"
)

// alarm waits for the pacer, and for the work of a holder.
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

// alarms are as many as wait at a time. The zero value is ready.
type alarms struct {
	mu        sync.Mutex
	all, idle []alarm
}

// wait returns after d, or why ctx ended, which must be the same in all calls.
func (a *alarms) wait(ctx context.Context, d time.Duration) error {
	bell, err := a.get(ctx)
	if err != nil {
		return sleep(ctx, d) // there are no more of them; it takes as long, if not as exactly
	}
	err = bell.wait(ctx, d)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.idle = append(a.idle, bell)
	return err
}

func (a *alarms) get(ctx context.Context) (bell alarm, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if n := len(a.idle); n > 0 {
		bell, a.idle = a.idle[n-1], a.idle[:n-1]
		return bell, nil
	}
	if bell, err = newAlarm(ctx); err == nil {
		a.all = append(a.all, bell)
	}
	return bell, err
}

// close closes all of them. Nobody waits any more.
func (a *alarms) close() error {
	var errs []error
	for _, bell := range a.all {
		errs = append(errs, bell.close())
	}
	return errors.Join(errs...)
}
