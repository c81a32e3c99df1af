package scenarios

import (
	"context"
	"errors"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"
)

var errInterrupted = errors.New("interrupted")

// interrupts are what the runs of this process share.
var interrupts struct {
	sync.Mutex
	runs   int       // that may have to clean up
	caught os.Signal // by one of them, and not raised again yet
}

// interruptible returns a context that also ends on a signal that would end the process. The last run to call cleaned raises the
// signal again, unless it has ended the caller's context too: then the program itself ends in order. Until then no run begins.
func interruptible(caller context.Context) (_ context.Context, cleaned func()) {
	ctx, cancel := context.WithCancelCause(caller)
	signals, done := make(chan os.Signal, 1), make(chan struct{})
	for _, sig := range []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGHUP} {
		if !signal.Ignored(sig) {
			signal.Notify(signals, sig)
		}
	}
	interrupts.Lock()
	defer interrupts.Unlock()
	interrupts.runs++
	if interrupts.caught != nil {
		signal.Stop(signals)
		cancel(errInterrupted)
	}
	go func() {
		defer close(done)
		if sig, ok := <-signals; ok {
			interrupts.Lock()
			interrupts.caught = sig
			interrupts.Unlock()
			signal.Stop(signals) // a second signal ends the process at once
			cancel(errInterrupted)
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		close(signals)
		<-done
		cancel(nil)
		interrupts.Lock()
		defer interrupts.Unlock()
		interrupts.runs--
		if sig, ok := interrupts.caught.(syscall.Signal); ok && interrupts.runs == 0 {
			interrupts.caught = nil
			if caller.Err() != nil {
				return
			}
			_ = syscall.Kill(os.Getpid(), sig)
			time.Sleep(100 * time.Millisecond) // another thread may get the signal
		}
	}
}
