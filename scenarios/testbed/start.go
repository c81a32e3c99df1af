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
	"time"
)

const startTimeout = 3 * time.Minute // an exit is noticed at once, but on a busy machine Consul may take more than a minute

func startGroupOfOne(ctx context.Context, g *group, o *Options) (*Server, error) {
	c, err := start(ctx, g, o)
	if err != nil {
		return nil, err
	}
	return c.Servers[0], nil
}

func start(ctx context.Context, g *group, opts *Options) (*Cluster, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	p, err := parseProvider(cmp.Or(string(o.Provider), os.Getenv(EnvProvider), string(Auto)))
	if err != nil {
		return nil, err
	}
	if o.Clock && g.clock == nil {
		return nil, fmt.Errorf("testbed: %s doesn't support Options.Clock: %w", g.title, errors.ErrUnsupported)
	}
	if p == Embedded && o.Provider == "" && !o.AllowEmbedded {
		return nil, g.cannot(p, fmt.Errorf("testbed: this needs a real %s, but %s is %s: %s, and unset it", g.title, EnvProvider, p, g.installCommand()))
	}
	chosen, providers := p, []Provider{p}
	if p == Auto {
		providers = []Provider{Containers, Local}
	}
	lastResort := p == Auto || o.Provider == "" && (p == Containers || p == Local)
	if lastResort && o.AllowEmbedded && g.embedded != nil && !Strict() {
		providers = append(providers, Embedded)
	}
	var failed []string
	missing := true
	for i, p := range providers {
		c, err := startAt(ctx, p, g, &o)
		if err == nil {
			return c, nil
		}
		_, lacks := errors.AsType[*MissingError](err)
		if len(providers) == 1 || p == chosen && !lacks || ctx.Err() != nil {
			return nil, fmt.Errorf("testbed: no %s: %s: %w", g.title, p, err)
		}
		if i+1 < len(providers) {
			_, _ = fmt.Fprintf(o.Progress, "testbed: no %s from %s: %v; trying %s\n", g.title, p, err, providers[i+1])
		}
		failed = append(failed, fmt.Sprintf("%s: %v", p, err))
		missing = missing && lacks
	}
	tried := "auto found none"
	if chosen != Auto {
		tried = fmt.Sprintf("%s is %s", EnvProvider, chosen)
	}
	err = fmt.Errorf("testbed: no %s: %s:\n  %s\n  external: set %s=external and %s=host:port to use a server of yours",
		g.title, tried, strings.Join(failed, "\n  "), EnvProvider, g.env("ADDR"))
	if missing {
		err = g.missing(err)
	}
	return nil, err
}

func startAt(ctx context.Context, p Provider, g *group, o *Options) (*Cluster, error) {
	c := &Cluster{}
	var err error
	switch {
	case p == Containers:
		err = c.startHosted(ctx, g, o, newContainers)
	case p == Local:
		err = c.startHosted(ctx, g, o, newProcesses)
	case len(o.Args) > 0 || o.Clock || len(g.join) > 0:
		err = g.cannot(p, fmt.Errorf("this provider doesn't support Options.Args, Options.Clock and replicas: %w", errors.ErrUnsupported))
	case p == External:
		err = c.findExternal(ctx, g)
	default:
		err = c.startEmbedded(g)
	}
	if err != nil {
		return nil, err
	}
	c.stop = sync.OnceValue(c.shut)
	c.open.Store(int32(len(c.Servers)))
	for _, s := range c.Servers {
		s.Provider, s.Cluster = p, c
		s.close = sync.OnceValue(func() error {
			if c.open.Add(-1) == 0 {
				return c.stop() // with what they share
			}
			return s.shut()
		})
	}
	record(c)
	return c, nil
}

var recorded sync.Map

func record(c *Cluster) {
	path, line := os.Getenv(EnvStarted), c.String()
	if _, before := recorded.LoadOrStore(line, true); path == "" || before {
		return
	}
	if f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0); err == nil {
		dir, _ := os.Getwd()
		_, _ = fmt.Fprintf(f, "%s\t%s\n", dir, line)
		_ = f.Close()
	}
}

// opener makes the hosts of a group. removeShared removes what they share, if anything, after them.
type opener func(context.Context, *group, *Options) (all []host, removeShared func() error, err error)

func (c *Cluster) startHosted(ctx context.Context, g *group, o *Options, open opener) error {
	all, removeShared, err := open(ctx, g, o)
	if err != nil {
		return err
	}
	c.removeShared = removeShared
	for i, name := range g.names {
		s := &Server{Name: name, serverType: g.serverType, host: all[i], args: o.Args}
		s.ctx, s.cancel = context.WithCancelCause(context.Background())
		s.placement = func() placement {
			at := all[i].placement()
			at.Self = i
			for j, h := range all {
				at.Peers = append(at.Peers, h.peer(g.names[j]))
			}
			for _, joined := range g.join {
				at.Joined = append(at.Joined, joined.host.peer(joined.Name))
			}
			return at
		}
		s.shut = sync.OnceValue(s.remove)
		c.Servers = append(c.Servers, s)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var failed sync.Once
	each(c.Servers, func(_ int, s *Server) {
		s.mu.Lock()
		defer s.mu.Unlock()
		if oneErr := s.beginFirst(ctx, o); oneErr != nil {
			failed.Do(func() {
				if err = oneErr; len(c.Servers) > 1 {
					err = fmt.Errorf("%s: %w", s.Name, err)
				}
				cancel(err)
			})
		}
	})
	if err != nil {
		return errors.Join(err, c.shut())
	}
	return nil
}

func each(all []*Server, f func(i int, s *Server)) {
	var wg sync.WaitGroup
	for i, s := range all {
		wg.Go(func() { f(i, s) })
	}
	wg.Wait()
}

func (c *Cluster) findExternal(ctx context.Context, g *group) error {
	env := g.env("ADDR")
	if os.Getenv(env) == "" {
		return &MissingError{g.title, "set " + env, fmt.Errorf("%s is not set: set it to %s of your server", env, g.addrFormat())}
	}
	set := strings.Split(os.Getenv(env), ",")
	if len(set) < len(g.names) {
		return fmt.Errorf("%s names %d of %d servers; separate them by commas", env, len(set), len(g.names))
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for i, name := range g.names {
		addr, url, err := g.parseAddr(set[i])
		if err != nil {
			return err
		}
		version, err := g.ready(ctx, addr, url, false)
		if err != nil {
			return fmt.Errorf("the server at %s (%s) does not answer: %w", addr, env, err)
		}
		c.Servers = append(c.Servers, &Server{
			Name: name, Addr: addr, URL: url, Version: version, serverType: g.serverType, shut: func() error { return nil },
		})
	}
	return nil
}

func (c *Cluster) startEmbedded(g *group) error {
	if g.embedded == nil {
		return g.missing(fmt.Errorf("there is no imitation of %s: %w", g.title, errors.ErrUnsupported))
	}
	for _, name := range g.names {
		addr, version, stop, err := g.embedded()
		if err != nil {
			return errors.Join(err, c.shut())
		}
		c.Servers = append(c.Servers, &Server{
			Name: name, Addr: addr, URL: fmt.Sprintf(g.url, addr), Version: version, serverType: g.serverType, shut: sync.OnceValue(stop),
		})
	}
	return nil
}
