package testbed

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"github.com/fencelab/fencelab/faults"
)

// Cluster is servers that were started together. If they elect a leader, they have one when the start returns.
type Cluster struct {
	Servers []*Server
	hosts   hosts // nil: no control over them
	stop    func() error
}

// Addrs returns the addresses of the servers, in order.
func (c *Cluster) Addrs() []string {
	addrs := make([]string, len(c.Servers))
	for i, s := range c.Servers {
		addrs[i] = s.Addr
	}
	return addrs
}

// String is, for example, "3 × etcd 3.6.16 (local)".
func (c *Cluster) String() string {
	if len(c.Servers) == 1 {
		return c.Servers[0].String()
	}
	return fmt.Sprintf("%d × %s", len(c.Servers), c.Servers[0])
}

// Close ends the servers and removes what they left; external ones it leaves alone. It may be called again.
func (c *Cluster) Close() error { return c.stop() }

// Leader returns the server that says of itself that it leads. It asks until exactly one does, or until ctx ends. It
// doesn't ask those in but: one that is cut off or frozen goes on to think that it leads for a while. Its error matches
// [errors.ErrUnsupported] if such servers elect none.
func (c *Cluster) Leader(ctx context.Context, but ...*Server) (*Server, error) {
	leads := c.Servers[0].kind.leads
	if leads == nil {
		return nil, fmt.Errorf("testbed: %s has no leader: %w", c.Servers[0].kind.title, errors.ErrUnsupported)
	}
	var leader *Server
	err := poll(ctx, func(ctx context.Context) error {
		leader = nil
		said := make([]bool, len(c.Servers))
		errs := make([]error, len(c.Servers))
		each(c.Servers, func(i int, s *Server) {
			if !slices.Contains(but, s) {
				said[i], errs[i] = leads(ctx, s.Addr)
			}
		})
		for i, s := range c.Servers {
			if said[i] && leader != nil {
				return fmt.Errorf("%s and %s both say that they lead", leader.Name, s.Name)
			}
			if said[i] {
				leader = s
			}
		}
		if leader == nil {
			return errors.Join(append(errs, errors.New("none says that it leads"))...)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("testbed: find the leader: %w", err)
	}
	return leader, nil
}

// Isolate cuts a server from the others of its cluster, both ways, while clients still reach it: packets between them
// are dropped from when it returns until the heal. It needs servers in containers: without a network of their own
// between them, its error matches [errors.ErrUnsupported].
func (c *Cluster) Isolate(ctx context.Context, s *Server) (faults.Heal, error) {
	if !slices.Contains(c.Servers, s) {
		return nil, fmt.Errorf("testbed: isolate %s: it is not of this cluster", s.Name)
	}
	all, ok := c.hosts.(*containers)
	if !ok || all.network == "" {
		return nil, fmt.Errorf("testbed: isolate %s: only containers have a network that one can be taken from: %w",
			s.Name, errors.ErrUnsupported)
	}
	ctx, done, err := s.change(ctx, "isolate")
	if err != nil {
		return nil, err
	}
	defer done()
	b := s.host.(*box)
	if b.networks[all.network] == "" {
		return nil, fmt.Errorf("testbed: isolate %s: it is isolated already", s.Name)
	}
	if err := b.disconnect(ctx, all.network); err != nil {
		return nil, fmt.Errorf("testbed: %w", err)
	}
	var once sync.Mutex
	healed := false
	return func(ctx context.Context) error {
		once.Lock()
		defer once.Unlock()
		if healed {
			return nil
		}
		ctx, done, err := s.change(ctx, "rejoin")
		if err != nil {
			return err
		}
		defer done()
		if err := b.connect(ctx, all.network, s.Name); err != nil {
			return fmt.Errorf("testbed: %w", err)
		}
		healed = true
		return nil
	}, nil
}
