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

var errInterrupted = errors.New("testbed: interrupted")

const teardownTimeout = time.Minute

// On SIGINT, SIGTERM or SIGHUP a guard tears down what must not outlive the process, and then raises the signal again. It listens
// only while it guards something, and not to ignored signals.
type guard struct {
	mu      sync.Mutex
	guarded map[*guarded]struct{}
	unwatch func()        // not nil while something is guarded
	raised  chan struct{} // not nil during teardown; closed when the signal has been raised again
}

var servers = guard{guarded: make(map[*guarded]struct{})}

type guarded struct {
	cancel  context.CancelCauseFunc // of the start
	started chan struct{}           // closed after the start; stop is set if it succeeded
	stop    func() error
}

// Guard calls stop once: when done is called, or when a signal ends the process before.
func Guard(ctx context.Context, stop func() error) (done func() error, err error) {
	return servers.start(ctx, func(context.Context) (func() error, error) { return stop, nil })
}

// start runs f, whose context also ends on an interrupt, and returns f's stop, made idempotent. If f fails, it must have cleaned
// up. An interrupted start returns after the signal has been raised again.
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

// watch listens for signals until unwatch. The caller holds mu.
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

func again(sig os.Signal) {
	if err := raise(sig.(syscall.Signal)); err != nil {
		fmt.Fprintln(os.Stderr, "testbed: cannot raise", sig, "again:", err)
	}
}

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
