package load

import (
	"context"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// preciseAlarm is a timerfd. The runtime polls it like a socket, not in whole milliseconds.
func preciseAlarm(ctx context.Context) (alarm, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return alarm{}, fmt.Errorf("load: a timer: %w", err)
	}
	file := os.NewFile(uintptr(fd), "timerfd")
	stop := context.AfterFunc(ctx, func() { _ = file.SetReadDeadline(time.Unix(1, 0)) }) // ends a read
	wait := func(d time.Duration) error {
		if d <= 0 || ctx.Err() != nil {
			return context.Cause(ctx)
		}
		err := unix.TimerfdSettime(fd, 0, &unix.ItimerSpec{Value: unix.NsecToTimespec(int64(d))}, nil)
		if err == nil {
			_, err = file.Read(make([]byte, 8))
		}
		if err != nil && ctx.Err() == nil {
			return fmt.Errorf("load: a timer: %w", err)
		}
		return context.Cause(ctx)
	}
	return alarm{wait, func() error { stop(); return file.Close() }}, nil
}
