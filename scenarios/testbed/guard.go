package testbed

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/signal"
	"slices"
	"sync"
	"syscall"
	"time"
)

// errInterrupted is the cause with which a start ends that a signal cut short.
var errInterrupted = errors.New("testbed: interrupted")

// teardownTimeout bounds how long an interrupted process stays to tear its servers down.
const teardownTimeout = time.Minute

// A guard tears down what must not outlive the process when SIGINT, SIGTERM or SIGHUP arrives, and then sends the signal
// again, so that the process dies of it, or its own handler sees it. It listens only while it guards something, and never to
// a signal that the process was started to ignore.
type guard struct {
	mu      sync.Mutex
	guarded map[*guarded]struct{}
	unwatch func()        // set while something is guarded
	raised  chan struct{} // set while the process is being torn down; closed when the signal has been sent again
}

// servers is the guard of this process.
var servers = guard{guarded: make(map[*guarded]struct{})}

type guarded struct {
	cancel  context.CancelCauseFunc // cuts the start short
	started chan struct{}           // closed when the start is over; stop is set if it succeeded
	stop    func() error
}

// Guard has stop called if a signal ends the process before the returned function is called, which calls stop too. stop is
// called once. Processes and files of a run are so torn down with the servers.
func Guard(ctx context.Context, stop func() error) (done func() error, err error) {
	return servers.start(ctx, func(context.Context) (func() error, error) { return stop, nil })
}

// start runs f and returns the stop that f returned, made idempotent. f's context ends when the process is interrupted, or
// with ctx. An f that fails must have cleaned up after itself.
//
// A start that was interrupted returns after the signal has been sent again, lest its caller report an ordinary failure.
func (g *guard) start(ctx context.Context, f func(context.Context) (stop func() error, err error)) (func() error, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	s := &guarded{cancel: cancel, started: make(chan struct{})}
	if raised := g.add(s); raised != nil {
		<-raised
		return nil, errInterrupted
	}
	stop, err := f(ctx)
	if err == nil {
		s.stop = sync.OnceValue(func() error {
			defer g.remove(s)
			return stop()
		})
		close(s.started)
		return s.stop, nil
	}
	raised := g.remove(s)
	close(s.started)
	if raised != nil {
		<-raised
	}
	return nil, err
}

// add guards s, unless the process is being torn down.
func (g *guard) add(s *guarded) (raised <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.raised != nil {
		return g.raised
	}
	if len(g.guarded) == 0 {
		g.watch()
	}
	g.guarded[s] = struct{}{}
	return nil
}

func (g *guard) remove(s *guarded) (raised <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	delete(g.guarded, s)
	if len(g.guarded) == 0 {
		g.unwatch()
	}
	return g.raised
}

// watch starts to listen for signals, until unwatch. The caller holds mu.
func (g *guard) watch() {
	signals := make(chan os.Signal, 1)
	for _, sig := range []os.Signal{os.Interrupt, syscall.SIGTERM, syscall.SIGHUP} {
		if !signal.Ignored(sig) {
			signal.Notify(signals, sig)
		}
	}
	done := make(chan struct{})
	g.unwatch = func() {
		signal.Stop(signals)
		close(done)
	}
	go func() {
		select {
		case sig := <-signals:
			g.teardown()
			signal.Stop(signals)
			again(sig)
			g.mu.Lock()
			close(g.raised)
			g.raised = nil
			g.mu.Unlock()
		case <-done:
			select {
			case sig := <-signals: // arrived while the last server was being closed
				again(sig)
			default:
			}
		}
	}()
}

// again sends a signal that was held up to this process again.
func again(sig os.Signal) {
	if err := raise(sig.(syscall.Signal)); err != nil {
		fmt.Fprintln(os.Stderr, "testbed: cannot raise", sig, "again:", err)
	}
}

// teardown stops all that is guarded, at once, and refuses what comes later.
func (g *guard) teardown() {
	g.mu.Lock()
	g.raised = make(chan struct{})
	all := slices.Collect(maps.Keys(g.guarded))
	g.mu.Unlock()

	done := make(chan struct{})
	go func() {
		defer close(done)
		var wg sync.WaitGroup
		for _, s := range all {
			wg.Go(func() {
				s.cancel(errInterrupted)
				<-s.started
				if s.stop == nil {
					return
				}
				if err := s.stop(); err != nil {
					fmt.Fprintln(os.Stderr, "testbed: interrupted, and left behind:", err)
				}
			})
		}
		wg.Wait()
	}()
	select {
	case <-done:
	case <-time.After(teardownTimeout):
		fmt.Fprintln(os.Stderr, "testbed: interrupted, and gave up tearing servers down after", teardownTimeout)
	}
}
