package testbed

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"github.com/fencelab/fencelab/faults"
)

// Options are the optional settings of a start.
type Options struct {
	Provider      Provider  // default: FENCELAB_TESTBED, else [Auto]
	AllowEmbedded bool      // let [Auto] take [Embedded], where there is such a thing and nothing else can be had
	Args          []string  // further arguments for the server; containers and local only
	Clock         bool      // give each server a clock of its own, [Server.Clock]; Redis in containers and local only
	Progress      io.Writer // takes a line for what lasts or was decided; nil: none
}

// RestartOptions say how a server comes back.
type RestartOptions struct {
	Wipe bool     // on an empty disk
	Args []string // instead of those in [Options]; nil: as it was started last
}

// Server is a running server that holds nothing but what its users put there.
// An [External] one is the user's: it holds what it held, and Close leaves it alone.
type Server struct {
	Name     string   // "redis", "etcd2": unique among servers that were started together
	Addr     string   // host:port for clients; the same after a restart
	URL      string   // for the client library, with the credentials
	Provider Provider // where it came from; never [Auto]
	Version  string   // as the server says; "miniredis" if embedded

	// Clock is the server's wall clock, which outlives a restart; nil unless Options.Clock.
	Clock *faults.Clock

	serverType *serverType
	host       host // nil: no control over it
	placement  func() placement
	clockDir   string       // of Clock
	shut       func() error // removes it alone
	close      func() error // and what it shared, if it is the last

	ctx     context.Context //nolint:containedctx // ends with Close, and cuts a restart short
	cancel  context.CancelCauseFunc
	mu      sync.Mutex // held while the server is being changed
	args    []string   // of the last start
	running bool
	closed  bool
	run     int // counts starts: a heal must not touch a later one
}

// String is, for example, "redis 7.0.15 (containers)".
func (s *Server) String() string {
	if s.Provider == Embedded {
		return fmt.Sprintf("%s (%s)", s.Version, s.Provider)
	}
	return fmt.Sprintf("%s %s (%s)", s.serverType.name, s.Version, s.Provider)
}

// Close ends the server and removes what it left; an external one it leaves alone. It may be called again.
func (s *Server) Close() error { return s.close() }

// Pause freezes every process of the server. The heal matches [os.ErrProcessDone] if the server was killed under the pause.
//
// Pause, Kill and Restart match [errors.ErrUnsupported] for servers that are [External] or [Embedded].
func (s *Server) Pause(ctx context.Context) (faults.Heal, error) {
	var heal faults.Heal
	var run int
	err := s.change(ctx, "pause", func(ctx context.Context) (err error) {
		if !s.running {
			return os.ErrProcessDone
		}
		run = s.run
		heal, err = s.host.pause(ctx)
		return err
	})
	if err != nil {
		return nil, err
	}
	return faults.Once(func(ctx context.Context) error {
		return s.change(ctx, "resume", func(ctx context.Context) error {
			if !s.running || s.run != run {
				return os.ErrProcessDone
			}
			return heal(ctx)
		})
	}), nil
}

// Kill ends the server by SIGKILL, also while it is paused, and returns when connections to its address are refused. It
// keeps its data directory and, on Linux, its address until Close.
func (s *Server) Kill(ctx context.Context) error {
	return s.change(ctx, "kill", func(ctx context.Context) error {
		if !s.running {
			return os.ErrProcessDone
		}
		if err := s.host.kill(ctx); err != nil {
			return err
		}
		s.running = false
		ctx, cancel := context.WithTimeout(ctx, engineTimeout)
		defer cancel()
		return poll(ctx, func(ctx context.Context) error { // an engine may forward the port for a moment longer
			conn, err := new(net.Dialer).DialContext(ctx, "tcp", s.Addr)
			if err == nil {
				return errors.Join(errors.New("it is killed, and its address still accepts connections"), conn.Close())
			}
			if errors.Is(err, context.DeadlineExceeded) {
				return err
			}
			return nil
		})
	})
}

// Restart starts a server that was killed, at the same address, and returns once it answers.
func (s *Server) Restart(ctx context.Context, o RestartOptions) error {
	return s.change(ctx, "restart", func(ctx context.Context) error {
		if s.running {
			return errors.New("it runs; kill it first")
		}
		if o.Wipe {
			if err := s.host.wipe(ctx); err != nil {
				return err
			}
		}
		if o.Args != nil {
			s.args = o.Args
		}
		return s.begin(ctx)
	})
}

// change runs f while nobody else changes the server. f's context also ends with Close.
func (s *Server) change(ctx context.Context, verb string, f func(context.Context) error) error {
	if s.host == nil {
		return s.serverType.cannot(s.Provider, fmt.Errorf("testbed: %s %s: a server of provider %s is out of reach: %w",
			verb, s.Name, s.Provider, errors.ErrUnsupported))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return fmt.Errorf("testbed: %s %s: %w", verb, s.Name, errClosed)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.ctx, func() { cancel(context.Cause(s.ctx)) })() //nolint:contextcheck // what ends with the server
	if err := f(ctx); err != nil {
		return fmt.Errorf("testbed: %s %s: %w", verb, s.Name, err)
	}
	return nil
}

var errClosed = fmt.Errorf("the server is closed: %w", os.ErrProcessDone)

// beginFirst starts the server for the first time, with the clock that it will keep.
func (s *Server) beginFirst(ctx context.Context, o *Options) (err error) {
	if !o.Clock {
		return s.begin(ctx)
	}
	if s.clockDir, err = MkdirTemp("clock"); err != nil {
		return err
	}
	if err := os.Chmod(s.clockDir, 0o755); err != nil { // the server may run as a user of its own
		return err
	}
	if s.Clock, err = faults.NewClock(ctx, s.clockDir); err != nil {
		return err
	}
	if err := s.begin(ctx); err != nil {
		return err
	}
	return s.Clock.Confirm(ctx, func(ctx context.Context) (time.Time, error) { return s.serverType.clock(ctx, s.Addr) })
}

// begin starts the server and returns once it answers. If it fails, the server is killed.
func (s *Server) begin(ctx context.Context) error {
	at := s.placement()
	at.More = s.args
	c, err := s.serverType.command(ctx, at)
	if err != nil {
		return err
	}
	if s.Clock != nil {
		c.Env = append(c.Env, s.Clock.Env()...)
		c.mounts = append(c.mounts, s.Clock.Shim(), s.Clock.Page())
	}
	s.run++
	err = s.host.start(ctx, c)
	if err == nil {
		err = s.await(ctx)
	}
	if err != nil {
		return errors.Join(err, s.host.kill(context.WithoutCancel(ctx)))
	}
	s.running = true
	return nil
}

// await waits until the server answers. The first time it finds out at which of its host's addresses.
func (s *Server) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	addrs := []string{s.Addr}
	if s.Addr == "" {
		var err error
		if addrs, err = s.host.addrs(ctx); err != nil {
			return errors.Join(err, s.host.ended(ctx))
		}
	}
	err := poll(ctx, func(ctx context.Context) error {
		var errs []error
		for _, addr := range addrs {
			tryCtx, cancel := context.WithTimeout(ctx, time.Second/time.Duration(len(addrs)))
			url := fmt.Sprintf(s.serverType.url, addr)
			version, err := s.serverType.ready(tryCtx, addr, url, s.placement().Provider == Local)
			cancel()
			if err == nil {
				if s.Addr == "" { // later they are read without a lock
					s.Addr, s.URL, s.Version = addr, url, version
				}
				return nil
			}
			errs = append(errs, err)
		}
		if err := s.host.ended(ctx); err != nil {
			return err
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return fmt.Errorf("does not answer: %w", err)
	}
	return nil
}

// remove ends the server and removes what is left of it.
func (s *Server) remove() error {
	s.cancel(errClosed)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed, s.running = true, false
	err := s.host.remove(context.Background())
	if s.clockDir != "" {
		err = errors.Join(err, os.RemoveAll(s.clockDir))
	}
	return err
}
