package peers

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/fencelab/fencelab/internal/locks"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// ServerSpec says how a lock service is started.
type ServerSpec struct {
	Nodes int      `json:"nodes"` // of etcd and ZooKeeper: 1 or 3; 0 is 3
	Args  []string `json:"args"`  // further arguments of each server
}

// Servers is a lock service that was started.
type Servers struct {
	Addrs []string
	text  string
	close []func() error
}

// String is, for example, "3 × etcd 3.6.16 (local)".
func (s *Servers) String() string { return s.text }

// Close ends the servers.
func (s *Servers) Close() error {
	var errs []error
	for _, c := range s.close {
		errs = append(errs, c())
	}
	return errors.Join(errs...)
}

// Start starts a lock service, one of [locks.Names]: five nodes of a Redlock, a cluster of etcd or ZooKeeper, one server
// of the others.
func Start(ctx context.Context, service string, spec ServerSpec, o *testbed.Options) (*Servers, error) {
	opts := *o
	opts.Args = spec.Args
	nodes := cmp.Or(spec.Nodes, 3)
	switch service {
	case locks.Redis:
		return single(testbed.StartRedis(ctx, &opts))
	case locks.Redlock:
		return several(testbed.StartRedisNodes(ctx, 5, &opts))
	case locks.Etcd:
		return cluster(testbed.StartEtcd(ctx, nodes, &opts))
	case locks.ZooKeeper:
		return cluster(testbed.StartZooKeeper(ctx, nodes, &opts))
	case locks.Consul:
		return single(testbed.StartConsul(ctx, &opts))
	case locks.Postgres:
		return single(testbed.StartPostgres(ctx, &opts))
	}
	return nil, fmt.Errorf("peers: there is no lock service %q; there are %s", service, strings.Join(locks.Names(), ", "))
}

func single(s *testbed.Server, err error) (*Servers, error) {
	if err != nil {
		return nil, err
	}
	return &Servers{[]string{s.URL}, s.String(), []func() error{s.Close}}, nil
}

func several(all []*testbed.Server, err error) (*Servers, error) {
	if err != nil {
		return nil, err
	}
	s := &Servers{text: fmt.Sprintf("%d × %s", len(all), all[0])}
	for _, n := range all {
		s.Addrs, s.close = append(s.Addrs, n.URL), append(s.close, n.Close)
	}
	return s, nil
}

func cluster(c *testbed.Cluster, err error) (*Servers, error) {
	if err != nil {
		return nil, err
	}
	return &Servers{c.Addrs(), c.String(), []func() error{c.Close}}, nil
}
