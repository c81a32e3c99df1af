package testbed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"sync/atomic"
)

// bindTries is how often servers are started whose ports somebody else took between their choice and the servers' bind.
const bindTries = 10

// start starts g's servers where the options and the environment say, and returns once all of them answer.
func start(ctx context.Context, g *group, o *Options) (*Cluster, error) {
	if o == nil {
		o = &Options{}
	}
	p, err := ParseProvider(cmp.Or(string(o.Provider), os.Getenv(EnvProvider), string(Auto)))
	if err != nil {
		return nil, err
	}
	if o.Clock && g.clock == nil {
		return nil, fmt.Errorf("testbed: %s can't be given a clock: %w", g.title, errors.ErrUnsupported)
	}
	progress := o.Progress
	if progress == nil {
		progress = io.Discard
	}
	var c *Cluster
	if p == Auto {
		c, err = startAnywhere(ctx, g, o, progress)
	} else if c, err = startAt(ctx, p, g, o, progress); err != nil {
		err = fmt.Errorf("%s: %w", p, err)
	}
	if err != nil {
		return nil, fmt.Errorf("testbed: no %s: %w", g.title, err)
	}
	return c, nil
}

// startAnywhere tries the providers that need nothing from the caller, best first.
func startAnywhere(ctx context.Context, g *group, o *Options, progress io.Writer) (*Cluster, error) {
	try := []Provider{Containers, Local}
	if o.AllowEmbedded && g.embedded != nil && !Strict() {
		try = append(try, Embedded)
	}
	var failed []string
	missing := true
	for i, p := range try {
		c, err := startAt(ctx, p, g, o, progress)
		if err == nil {
			return c, nil
		}
		if ctx.Err() != nil || errors.Is(err, errInterrupted) {
			return nil, fmt.Errorf("%s: %w", p, err)
		}
		failed = append(failed, fmt.Sprintf("%s: %v", p, err))
		_, ok := errors.AsType[*MissingError](err)
		missing = missing && ok
		if i+1 < len(try) {
			_, _ = fmt.Fprintf(progress, "testbed: no %s from %s: %v; trying %s\n", g.title, p, err, try[i+1])
		}
	}
	err := fmt.Errorf("tried every way:\n  %s\n  external: set %s=external and %s=host:port to use a server of yours",
		strings.Join(failed, "\n  "), EnvProvider, g.envAddr())
	if missing {
		err = g.missing(err)
	}
	return nil, err
}

func startAt(ctx context.Context, p Provider, g *group, o *Options, progress io.Writer) (*Cluster, error) {
	c := &Cluster{}
	stop, err := servers.start(ctx, func(ctx context.Context) (stop func() error, err error) {
		switch p {
		case Containers:
			return c.startHosted(ctx, g, o, func(ctx context.Context) (hosts, error) { return newContainers(ctx, g, progress) })
		case Local:
			return c.startHosted(ctx, g, o, func(ctx context.Context) (hosts, error) { return newProcesses(ctx, g) })
		default:
			if len(o.Args) > 0 || o.Clock || len(g.join) > 0 {
				return nil, g.beyond(p, fmt.Errorf("this server takes no arguments and no clock, and follows none: %w", errors.ErrUnsupported))
			}
			if p == External {
				return c.findExternal(ctx, g)
			}
			return c.startEmbedded(g)
		}
	})
	if err != nil {
		return nil, err
	}
	c.stop = stop
	var open atomic.Int32
	open.Store(int32(len(c.Servers)))
	for _, s := range c.Servers {
		s.Provider = p
		stopOne := s.stop
		s.stop = sync.OnceValue(func() error {
			err := stopOne()
			if open.Add(-1) == 0 {
				err = errors.Join(err, stop()) // and what they shared
			}
			return err
		})
	}
	tell(c)
	return c, nil
}

// EnvPlayed is the environment variable that names a file, to which a line is added for every kind of server that a process starts:
// the working directory, a tab, and what the server calls itself.
const EnvPlayed = "FENCELAB_PLAYED"

var told sync.Map

// tell writes that line. The file is for a summary alone, so that an error is none of the caller's.
func tell(c *Cluster) {
	path := os.Getenv(EnvPlayed)
	line := c.String()
	if _, before := told.LoadOrStore(line, true); path == "" || before {
		return
	}
	f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return
	}
	dir, _ := os.Getwd()
	_, _ = fmt.Fprintf(f, "%s\t%s\n", dir, line)
	_ = f.Close()
}

// errBind is why servers are started again, on other ports.
var errBind = errors.New("the port was taken")

func (c *Cluster) startHosted(
	ctx context.Context, g *group, o *Options, open func(context.Context) (hosts, error),
) (stop func() error, err error) {
	for range bindTries {
		stop, err = c.startHostedOnce(ctx, g, o, open)
		if !errors.Is(err, errBind) {
			break
		}
	}
	return stop, err
}

func (c *Cluster) startHostedOnce(
	ctx context.Context, g *group, o *Options, open func(context.Context) (hosts, error),
) (func() error, error) {
	all, err := open(ctx)
	if err != nil {
		return nil, err
	}
	c.hosts, c.Servers = all, nil
	for i, name := range g.names {
		s := &Server{Name: name, kind: g.kind, host: all.host(i), args: o.Args}
		s.ctx, s.cancel = context.WithCancelCause(context.Background())
		s.place, s.command = func() place { return all.place(i) }, g.command
		s.stop = s.shut
		c.Servers = append(c.Servers, s)
	}
	// One that fails leaves no reason to wait for the others.
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var failed sync.Once
	each(c.Servers, func(_ int, s *Server) {
		s.mu.Lock()
		defer s.mu.Unlock()
		oneErr := s.beginFirst(ctx, o)
		if oneErr == nil {
			return
		}
		failed.Do(func() { // the others only fail because of the first
			if err = oneErr; len(c.Servers) > 1 {
				err = fmt.Errorf("%s: %w", s.Name, err)
			}
			cancel(err)
		})
	})
	if err != nil {
		return nil, errors.Join(err, c.shut()) //nolint:contextcheck // it removes them whatever has become of ctx
	}
	return c.shut, nil
}

// shut removes the servers and what they share.
func (c *Cluster) shut() error {
	errs := make([]error, len(c.Servers))
	each(c.Servers, func(i int, s *Server) { errs[i] = s.shut() })
	return errors.Join(append(errs, c.hosts.remove(context.Background()))...)
}

// each calls f for all servers at the same time.
func each(all []*Server, f func(i int, s *Server)) {
	var wg sync.WaitGroup
	for i, s := range all {
		wg.Go(func() { f(i, s) })
	}
	wg.Wait()
}

func (c *Cluster) findExternal(ctx context.Context, g *group) (func() error, error) {
	set := os.Getenv(g.envAddr())
	if set == "" {
		return nil, &MissingError{g.title, "set " + g.envAddr(), fmt.Errorf("%s is not set: set it to the %s of your server", g.envAddr(), g.want)}
	}
	find := g.external
	if find == nil {
		find = findExternal
	}
	ctx, cancel := context.WithTimeout(ctx, g.timeout)
	defer cancel()
	found, err := find(ctx, g.kind, set)
	if err != nil {
		return nil, err
	}
	if len(found) < len(g.names) {
		return nil, fmt.Errorf("%s names %d of %d servers; separate them by commas", g.envAddr(), len(found), len(g.names))
	}
	c.take(g, found[:len(g.names)])
	return func() error { return nil }, nil
}

// findExternal takes a list of host:port.
func findExternal(ctx context.Context, k *kind, set string) ([]*Server, error) {
	var found []*Server
	for addr := range strings.SplitSeq(set, ",") {
		version, err := k.ready(ctx, addr, 0)
		if err != nil {
			return nil, fmt.Errorf("the server at %s (%s) does not answer: %w", addr, k.envAddr(), err)
		}
		found = append(found, &Server{Addr: addr, URL: k.url(addr), Version: version})
	}
	return found, nil
}

func (c *Cluster) startEmbedded(g *group) (func() error, error) {
	if g.embedded == nil {
		return nil, g.missing(fmt.Errorf("there is no imitation of %s: %w", g.title, errors.ErrUnsupported))
	}
	var stops []func() error
	stop := func() error {
		var errs []error
		for _, stop := range stops {
			errs = append(errs, stop())
		}
		return errors.Join(errs...)
	}
	var started []*Server
	for range g.names {
		addr, version, stopOne, err := g.embedded()
		if err != nil {
			return nil, errors.Join(err, stop())
		}
		stops = append(stops, stopOne)
		started = append(started, &Server{Addr: addr, URL: g.url(addr), Version: version, stop: sync.OnceValue(stopOne)})
	}
	c.take(g, started)
	return stop, nil
}

// take makes servers that have no host the group's.
func (c *Cluster) take(g *group, all []*Server) {
	for i, s := range all {
		s.Name, s.kind = g.names[i], g.kind
		if s.stop == nil {
			s.stop = func() error { return nil }
		}
	}
	c.Servers = all
}
