package testbed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/fencelab/fencelab/faults"
)

// Options are the optional settings of a start.
type Options struct {
	Provider      Provider  // default: FENCELAB_TESTBED, else [Auto]
	AllowEmbedded bool      // [Embedded] may be the last resort, unless Provider is set to another or [Strict]
	Args          []string  // more arguments for the server; containers and local only
	Clock         bool      // give each server its own [Server.Clock]; Redis in containers and local only
	Progress      io.Writer // gets a line for each long operation or decision; may be nil
}

// Server is a running server, empty at its start unless [External].
type Server struct {
	Name     string   // "redis", "etcd2": unique among servers that were started together
	Addr     string   // host:port for clients; the same after a restart
	URL      string   // for client libraries, with credentials
	Provider Provider // never [Auto]
	Version  string   // as reported by the server; "miniredis" if embedded
	Cluster  *Cluster // the servers that were started together

	// Clock survives restarts; nil unless Options.Clock.
	Clock *faults.Clock

	serverType *serverType
	host       host // nil: out of reach
	placement  func() placement
	clockDir   string
	shut       func() error
	close      func() error // and what it shared, if it is the last

	ctx     context.Context //nolint:containedctx // ends with Close
	cancel  context.CancelCauseFunc
	mu      sync.Mutex // held while the server is being changed
	args    []string
	running bool
	closed  bool
	run     int // counts starts: a heal must not affect a later one
}

// String returns, for example, "redis 7.0.15 (containers)".
func (s *Server) String() string {
	if s.Provider == Embedded {
		return fmt.Sprintf("%s (%s)", s.Version, s.Provider)
	}
	return fmt.Sprintf("%s %s (%s)", s.serverType.name, s.Version, s.Provider)
}

// Close stops the server and deletes its data, unless it is external. It may be called again.
func (s *Server) Close() error { return s.close() }

// Pause freezes every process of the server. If the server was killed meanwhile, the heal matches [os.ErrProcessDone].
//
// Pause, Kill, Restart and Wipe match [errors.ErrUnsupported] for [External] and [Embedded] servers.
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

// Deny has a Redis answer writes with errors until the heal; one that is [Embedded] answers all commands with errors.
// For other and [External] servers the error matches [errors.ErrUnsupported].
func (s *Server) Deny(ctx context.Context) (faults.Heal, error) {
	if s.serverType.deny == nil || s.Provider == External {
		return nil, fmt.Errorf("testbed: %s can't be made to deny writes: %w", s, errors.ErrUnsupported)
	}
	heal := func(ctx context.Context) error { return s.serverType.deny(ctx, s.Addr, false) }
	return faults.Once(heal), s.serverType.deny(ctx, s.Addr, true)
}

// Kill kills the server with SIGKILL, even if it is paused, and returns when connections are refused. Its data and, on Linux, its
// address stay reserved until Close.
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
		return poll(ctx, func(ctx context.Context) error { // an engine may forward the port a moment longer
			conn, err := new(net.Dialer).DialContext(ctx, "tcp", s.Addr)
			if err == nil {
				return errors.Join(errors.New("its address still accepts connections after the kill"), conn.Close())
			}
			if errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET) {
				return nil
			}
			return err
		})
	})
}

// Restart restarts a killed server at its address, and returns once it answers.
func (s *Server) Restart(ctx context.Context) error { return s.restart(ctx, s.begin) }

// Wipe kills the server and restarts it without its data. For a cluster's member, which must not rejoin then, the error matches
// [errors.ErrUnsupported].
func (s *Server) Wipe(ctx context.Context) error {
	if s.serverType.linked && len(s.Cluster.Servers) > 1 {
		return fmt.Errorf("testbed: a cluster member that lost its data must not rejoin as the same member: %w", errors.ErrUnsupported)
	}
	if err := s.Kill(ctx); err != nil {
		return err
	}
	return s.restart(ctx, func(ctx context.Context) error {
		if err := s.host.wipe(ctx); err != nil {
			return err
		}
		return s.begin(ctx)
	})
}

func (s *Server) restart(ctx context.Context, begin func(context.Context) error) error {
	return s.change(ctx, "restart", func(ctx context.Context) error {
		if s.running {
			return errors.New("it is running; kill it first")
		}
		return begin(ctx)
	})
}

// change calls f with s.mu held. f's context also ends with Close.
func (s *Server) change(ctx context.Context, verb string, f func(context.Context) error) error {
	if s.host == nil {
		return s.serverType.cannot(s.Provider, fmt.Errorf("testbed: %s %s: a server of provider %s is out of reach (%s=%s starts one that isn't): %w",
			verb, s.Name, s.Provider, EnvProvider, Local, errors.ErrUnsupported))
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

func (s *Server) beginFirst(ctx context.Context, o *Options) (err error) {
	if !o.Clock {
		return s.begin(ctx)
	}
	if s.clockDir, err = MkdirTemp("clock"); err != nil {
		return err
	}
	if err := os.Chmod(s.clockDir, 0o755); err != nil { // the server may run as another user
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

func (s *Server) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	addr := s.host.addr()
	url := fmt.Sprintf(s.serverType.url, addr)
	err := poll(ctx, func(ctx context.Context) error {
		tryCtx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		version, err := s.serverType.ready(tryCtx, addr, url, s.placement().Provider == Local)
		if err != nil {
			return cmp.Or(s.host.exitError(ctx), err)
		}
		if s.Addr == "" { // set once: it is read without a lock
			s.Addr, s.URL, s.Version = addr, url, version
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("does not answer: %w", err)
	}
	return nil
}

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
