package load

import (
	"context"
	"fmt"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// kernelTimer is an alarm that the kernel keeps. The runtime waits for it as it does for a socket, and so not in whole
// milliseconds, as for its own timers.
type kernelTimer struct {
	fd   int
	file *os.File
	stop func() bool
}

func preciseAlarm(ctx context.Context) (alarm, error) {
	fd, err := unix.TimerfdCreate(unix.CLOCK_MONOTONIC, unix.TFD_NONBLOCK|unix.TFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("load: a timer: %w", err)
	}
	k := &kernelTimer{fd: fd, file: os.NewFile(uintptr(fd), "timerfd")}
	k.stop = context.AfterFunc(ctx, func() { _ = k.file.SetReadDeadline(time.Unix(1, 0)) }) // ends a read
	return k, nil
}

func (k *kernelTimer) wait(ctx context.Context, d time.Duration) error {
	if d <= 0 {
		return context.Cause(ctx)
	}
	if err := unix.TimerfdSettime(k.fd, 0, &unix.ItimerSpec{Value: unix.NsecToTimespec(int64(d))}, nil); err != nil {
		return fmt.Errorf("load: a timer: %w", err)
	}
	var expirations [8]byte
	if _, err := k.file.Read(expirations[:]); err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return fmt.Errorf("load: a timer: %w", err)
	}
	return nil
}

func (k *kernelTimer) close() error {
	k.stop()
	return k.file.Close()
}
