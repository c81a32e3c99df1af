package competitors

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// ServerSpec says how a lock service is started.
type ServerSpec struct {
	Nodes int      `json:"nodes"` // of etcd and ZooKeeper: 1 or 3; 0 is 3
	Args  []string `json:"args"`  // further arguments of each server
}

// Servers is a started lock service.
type Servers struct {
	Addrs []string
	text  string
	close []func() error
}

// String is, for example, "3 × etcd 3.6.16 (local)".
func (s *Servers) String() string { return s.text }

// Close stops the servers.
func (s *Servers) Close() error {
	var errs []error
	for _, c := range s.close {
		errs = append(errs, c())
	}
	return errors.Join(errs...)
}

// Start starts a lock service: five Redlock nodes, a cluster of etcd or ZooKeeper, one server of the others.
func Start(ctx context.Context, service string, spec ServerSpec, o *testbed.Options) (*Servers, error) {
	opts := *o
	opts.Args = spec.Args
	var one *testbed.Server
	var several []*testbed.Server
	var cluster *testbed.Cluster
	var err error
	nodes := cmp.Or(spec.Nodes, 3)
	switch service {
	case locks.Redis:
		one, err = testbed.StartRedis(ctx, &opts)
	case locks.Redlock:
		several, err = testbed.StartRedisNodes(ctx, 5, &opts)
	case locks.Etcd:
		cluster, err = testbed.StartEtcd(ctx, nodes, &opts)
	case locks.ZooKeeper:
		cluster, err = testbed.StartZooKeeper(ctx, nodes, &opts)
	case locks.Consul:
		one, err = testbed.StartConsul(ctx, &opts)
	case locks.Postgres:
		one, err = testbed.StartPostgres(ctx, &opts)
	case locks.S3:
		one, err = testbed.StartS3(ctx, &opts)
	default:
		err = fmt.Errorf("competitors: there is no lock service %q; there are %s", service, strings.Join(locks.Names(), ", "))
	}
	switch {
	case err != nil:
		return nil, err
	case cluster != nil:
		return &Servers{cluster.Addrs(), cluster.String(), []func() error{cluster.Close}}, nil
	case one != nil:
		return &Servers{[]string{one.URL}, one.String(), []func() error{one.Close}}, nil
	}
	s := &Servers{text: fmt.Sprintf("%d × %s", len(several), several[0])}
	for _, n := range several {
		s.Addrs, s.close = append(s.Addrs, n.URL), append(s.close, n.Close)
	}
	return s, nil
}
