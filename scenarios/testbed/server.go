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
	URL      string   // for the client library; with the credentials, if there are any
	Provider Provider // where it came from; never [Auto]
	Version  string   // as the server says; "miniredis" if embedded

	// Clock is the server's wall clock, which it also keeps over a restart; nil unless Options.Clock.
	Clock *faults.Clock

	kind     *kind
	host     host // nil: no control over it
	place    func() place
	command  func(ctx context.Context, at place) (command, error)
	clockDir string       // of Clock
	stop     func() error // Close

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
	return fmt.Sprintf("%s %s (%s)", s.kind.name, s.Version, s.Provider)
}

// Close ends the server and removes what it left; an external one it leaves alone. It may be called again.
func (s *Server) Close() error { return s.stop() }

// Pause freezes the server, by SIGSTOP of every one of its processes or by the container engine's freezer. In force
// means that none of them runs. The heal matches [os.ErrProcessDone] if the server was killed under the pause.
//
// Pause, Kill and Restart match [errors.ErrUnsupported] where the provider has no control over the server: [External]
// and [Embedded].
func (s *Server) Pause(ctx context.Context) (faults.Heal, error) {
	ctx, done, err := s.change(ctx, "pause")
	if err != nil {
		return nil, err
	}
	defer done()
	if !s.running {
		return nil, fmt.Errorf("testbed: pause %s: %w", s.Name, os.ErrProcessDone)
	}
	heal, err := s.host.pause(ctx)
	if err != nil {
		return nil, fmt.Errorf("testbed: pause %s: %w", s.Name, err)
	}
	run, healed := s.run, false
	return func(ctx context.Context) error {
		ctx, done, err := s.change(ctx, "resume")
		if err != nil {
			return err
		}
		defer done()
		if healed {
			return nil
		}
		if !s.running || s.run != run {
			return fmt.Errorf("testbed: resume %s: %w", s.Name, os.ErrProcessDone)
		}
		if err := heal(ctx); err != nil {
			return fmt.Errorf("testbed: resume %s: %w", s.Name, err)
		}
		healed = true
		return nil
	}, nil
}

// Kill ends the server by SIGKILL, also while it is paused. In force means that its processes are gone and connections
// to its address are refused. The data directory stays its own until Close; so does, on Linux, the address.
func (s *Server) Kill(ctx context.Context) error {
	ctx, done, err := s.change(ctx, "kill")
	if err != nil {
		return err
	}
	defer done()
	if !s.running {
		return fmt.Errorf("testbed: kill %s: %w", s.Name, os.ErrProcessDone)
	}
	if err := s.host.kill(ctx); err != nil {
		return fmt.Errorf("testbed: kill %s: %w", s.Name, err)
	}
	s.running = false
	ctx, cancel := context.WithTimeout(ctx, engineTimeout)
	defer cancel()
	err = poll(ctx, func(ctx context.Context) error { // an engine may forward the port for a moment longer
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", s.Addr)
		if err == nil {
			return errors.Join(errors.New("it is killed, and its address still accepts connections"), conn.Close())
		}
		if errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("testbed: kill %s: %w", s.Name, err)
	}
	return nil
}

// Restart starts a server that was killed, at the same address, and returns once it answers.
func (s *Server) Restart(ctx context.Context, o RestartOptions) error {
	ctx, done, err := s.change(ctx, "restart")
	if err != nil {
		return err
	}
	defer done()
	if s.running {
		return fmt.Errorf("testbed: restart %s: it runs; kill it first", s.Name)
	}
	if o.Wipe {
		if err := s.host.wipe(ctx); err != nil {
			return fmt.Errorf("testbed: restart %s: %w", s.Name, err)
		}
	}
	if o.Args != nil {
		s.args = o.Args
	}
	if err := s.begin(ctx); err != nil {
		return fmt.Errorf("testbed: restart %s: %w", s.Name, err)
	}
	return nil
}

// change makes the caller the only one who changes the server, until done. The context also ends with Close.
func (s *Server) change(ctx context.Context, verb string) (_ context.Context, done func(), err error) {
	if s.host == nil {
		return nil, nil, s.kind.beyond(s.Provider, fmt.Errorf("testbed: %s %s: a server of provider %s is out of reach: %w",
			verb, s.Name, s.Provider, errors.ErrUnsupported))
	}
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, nil, fmt.Errorf("testbed: %s %s: %w", verb, s.Name, errClosed)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	unhook := context.AfterFunc(s.ctx, func() { cancel(context.Cause(s.ctx)) })
	return ctx, func() {
		unhook()
		cancel(nil)
		s.mu.Unlock()
	}, nil
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
		return fmt.Errorf("testbed: %w", err)
	}
	if s.Clock, err = faults.NewClock(ctx, s.clockDir); err != nil {
		return err
	}
	if err := s.begin(ctx); err != nil {
		return err
	}
	return s.Clock.Confirm(ctx, func(ctx context.Context) (time.Time, error) { return s.kind.clock(ctx, s.Addr) })
}

// begin starts the server and returns once it answers. If it fails, the server is killed.
func (s *Server) begin(ctx context.Context) error {
	at := s.place()
	at.More = s.args
	c, err := s.command(ctx, at)
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

// await waits until the server answers at its address. The first time, that is one of its host's, and sets Addr, URL and
// Version.
func (s *Server) await(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, s.kind.timeout)
	defer cancel()
	addrs := []string{s.Addr}
	if s.Addr == "" {
		var err error
		if addrs, err = s.host.addrs(ctx); err != nil {
			return errors.Join(err, s.host.ended(ctx))
		}
	}
	type result struct {
		addr, version string
		err           error
	}
	var asking sync.Mutex // a host isn't called concurrently
	results := make(chan result)
	for _, addr := range addrs {
		go func() {
			r := result{addr: addr}
			r.err = poll(ctx, func(tryCtx context.Context) (err error) {
				if r.version, err = s.kind.ready(tryCtx, addr, s.host.pid()); err == nil {
					return nil
				}
				asking.Lock()
				defer asking.Unlock()
				return cmp.Or(s.host.ended(ctx), err)
			})
			results <- r
		}()
	}
	var first result
	var errs []error
	for range addrs {
		r := <-results
		if r.err == nil && first.addr == "" {
			first = r
		}
		if _, ok := errors.AsType[permanent](r.err); ok || r.err == nil {
			cancel() // the other address won't do better
		}
		errs = append(errs, r.err)
	}
	if first.addr == "" {
		return fmt.Errorf("does not answer: %w", errors.Join(errs...))
	}
	if s.Addr == "" { // who uses the server reads them without asking
		s.Addr, s.URL, s.Version = first.addr, s.kind.url(first.addr), first.version
	}
	return nil
}

// shut removes the server. It may be called again.
func (s *Server) shut() error {
	if s.host == nil {
		return nil
	}
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
