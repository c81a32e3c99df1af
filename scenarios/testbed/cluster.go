package testbed

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/fencelab/fencelab/faults"
)

// Cluster is servers that were started together, with a leader if they elect one.
type Cluster struct {
	Servers []*Server

	open         atomic.Int32 // servers that aren't closed
	stop         func() error
	removeShared func() error
}

// Addrs returns the servers' addresses, in order.
func (c *Cluster) Addrs() []string {
	addrs := make([]string, len(c.Servers))
	for i, s := range c.Servers {
		addrs[i] = s.Addr
	}
	return addrs
}

// String returns, for example, "3 × etcd 3.6.16 (local)".
func (c *Cluster) String() string {
	if len(c.Servers) == 1 {
		return c.Servers[0].String()
	}
	return fmt.Sprintf("%d × %s", len(c.Servers), c.Servers[0])
}

// Close stops the servers and deletes their data, except external ones. It may be called again.
func (c *Cluster) Close() error { return c.stop() }

func (c *Cluster) shut() error {
	errs := make([]error, len(c.Servers))
	each(c.Servers, func(i int, s *Server) { errs[i] = s.shut() })
	if c.removeShared != nil {
		errs = append(errs, c.removeShared())
	}
	return errors.Join(errs...)
}

// Leader polls the servers, except those in but, until exactly one claims to lead. A frozen or cut-off server may still
// believe that it leads. If there are no leaders, the error matches [errors.ErrUnsupported].
func (c *Cluster) Leader(ctx context.Context, but ...*Server) (leader *Server, err error) {
	leads := c.Servers[0].serverType.leads
	if leads == nil {
		return nil, fmt.Errorf("testbed: %s has no leader: %w", c.Servers[0].serverType.title, errors.ErrUnsupported)
	}
	err = poll(ctx, func(ctx context.Context) error {
		claims := make([]bool, len(c.Servers))
		errs := make([]error, len(c.Servers))
		each(c.Servers, func(i int, s *Server) {
			if !slices.Contains(but, s) {
				claims[i], errs[i] = leads(ctx, s.Addr)
			}
		})
		leader = nil
		for i, s := range c.Servers {
			if claims[i] && leader != nil {
				return fmt.Errorf("%s and %s both claim to lead", leader.Name, s.Name)
			}
			if claims[i] {
				leader = s
			}
		}
		if leader == nil {
			return errors.Join(append(errs, errors.New("no server claims to lead"))...)
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("testbed: find the leader: %w", err)
	}
	return leader, nil
}

// Isolate cuts a server off from its cluster, but not from clients. Without containers the error matches [errors.ErrUnsupported].
func (c *Cluster) Isolate(ctx context.Context, s *Server) (faults.Heal, error) {
	if !slices.Contains(c.Servers, s) {
		return nil, fmt.Errorf("testbed: isolate %s: it is not a member of this cluster", s.Name)
	}
	box, ok := s.host.(*container)
	switch {
	case ok && box.network == "":
		return nil, fmt.Errorf("testbed: isolate %s: it has no peers: %w", s.Name, errors.ErrUnsupported)
	case !ok:
		return nil, fmt.Errorf("testbed: isolate %s: only containers have a network between them: %w", s.Name, errors.ErrUnsupported)
	}
	err := s.change(ctx, "isolate", func(ctx context.Context) error {
		if box.networks[box.network] == "" {
			return errors.New("it is already isolated")
		}
		return box.disconnect(ctx, box.network)
	})
	if err != nil {
		return nil, err
	}
	return faults.Once(func(ctx context.Context) error {
		return s.change(ctx, "rejoin", func(ctx context.Context) error { return box.connect(ctx, box.network, s.Name) })
	}), nil
}
