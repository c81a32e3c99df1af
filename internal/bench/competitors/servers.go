package competitors

import (
	"cmp"
	"context"

	"github.com/fencelab/fencelab/internal/open"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// ServerSpec says how a lock service is started.
type ServerSpec struct {
	Nodes int      `json:"nodes"` // of etcd and ZooKeeper: 1 or 3; 0 is 3
	Args  []string `json:"args"`  // further arguments of each server
}

// Servers is a started lock service.
type Servers struct {
	open.Servers
	Addrs []string
	text  string
}

// String is, for example, "3 × etcd 3.6.16 (local)".
func (s *Servers) String() string { return s.text }

// Start starts a lock service, see [open.Start].
func Start(ctx context.Context, service string, spec ServerSpec, o *testbed.Options) (*Servers, error) {
	opts := *o
	opts.Args = spec.Args
	all, err := open.Start(ctx, service, cmp.Or(spec.Nodes, 3), &opts)
	if err != nil {
		return nil, err
	}
	on := all.On()
	s := &Servers{Servers: all, text: on.Server}
	for _, n := range on.Nodes {
		s.Addrs = append(s.Addrs, n.Addr)
	}
	return s, nil
}
