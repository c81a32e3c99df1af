package scenarios

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"syscall"
	"time"
)

var errInterrupted = errors.New("interrupted")

// interruptible returns a context that also ends on a signal that would end the process. cleaned raises the signal again, which
// ends the process once no other run has to clean up.
func interruptible(ctx context.Context) (_ context.Context, cleaned func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	signals, caught := make(chan os.Signal, 1), make(chan os.Signal, 1)
	for _, sig := range []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGHUP} {
		if !signal.Ignored(sig) {
			signal.Notify(signals, sig)
		}
	}
	go func() {
		defer close(caught)
		if sig, ok := <-signals; ok {
			signal.Stop(signals) // a second signal ends the process at once
			cancel(errInterrupted)
			caught <- sig
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		close(signals)
		if sig, ok := <-caught; ok {
			_ = syscall.Kill(os.Getpid(), sig.(syscall.Signal))
			time.Sleep(100 * time.Millisecond) // another thread may get the signal
		}
		cancel(nil)
	}
}
