// Package locks opens the lock backends by their names, for commands and scenarios that take the name from a flag.
package locks

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"
	"time"

	"github.com/fencelab/fencelab/dlock"
)

// The names of the locks.
const (
	Redis     = "redis"
	Redlock   = "redlock"
	Etcd      = "etcd"
	ZooKeeper = "zookeeper"
	Consul    = "consul"
	Postgres  = "postgres"
)

// Spec says which lock, and where.
type Spec struct {
	Lock  string
	Addrs []string      // host:port, or URLs; none: the lock's usual address on this host
	TTL   time.Duration // of the leases that will be asked for
	// Dial, if not nil, makes the connections to the servers.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// MinSession is the shortest session that Consul allows, or that ZooKeeper is to be asked for; 0: what is usual.
	MinSession time.Duration
}

// Backend is a backend with a client of its own, which Close closes too.
type Backend struct {
	dlock.Backend
	client client
}

// client is a client of a lock service.
type client struct {
	ping  func(ctx context.Context) error // whether the service answers
	close func() error
}

// Close closes the backend and its client.
func (b *Backend) Close() error { return errors.Join(b.Backend.Close(), b.client.close()) }

// Ping returns an error if the lock service doesn't answer.
func (b *Backend) Ping(ctx context.Context) error { return b.client.ping(ctx) }

// answerTimeout is how long a server may take to answer that was not heard of before.
const answerTimeout = 5 * time.Second

// opener opens a lock.
type opener struct {
	addrs []string // the usual ones
	open  func(ctx context.Context, s Spec) (*Backend, error)
}

var openers = map[string]opener{
	Redis: {[]string{"127.0.0.1:6379"}, openRedis},
	Redlock: {
		[]string{"127.0.0.1:6381", "127.0.0.1:6382", "127.0.0.1:6383", "127.0.0.1:6384", "127.0.0.1:6385"},
		func(ctx context.Context, s Spec) (*Backend, error) { return OpenRedlock(ctx, s, nil) },
	},
	Etcd:      {[]string{"127.0.0.1:2379", "127.0.0.1:22379", "127.0.0.1:32379"}, openEtcd},
	ZooKeeper: {[]string{"127.0.0.1:2181"}, openZooKeeper},
	Consul:    {[]string{"127.0.0.1:8500"}, openConsul},
	Postgres:  {[]string{"postgres://postgres@127.0.0.1:5432/postgres?sslmode=disable"}, openPostgres},
}

// Names are the names of the locks.
func Names() []string { return slices.Sorted(maps.Keys(openers)) }

// Addrs are the usual addresses of a lock.
func Addrs(lock string) []string { return openers[lock].addrs }

// Open connects to a lock's servers. It may return before they have answered.
func Open(ctx context.Context, s Spec) (*Backend, error) {
	o, ok := openers[s.Lock]
	if !ok {
		return nil, fmt.Errorf("locks: there is no lock %q; there are %s", s.Lock, strings.Join(Names(), ", "))
	}
	if len(s.Addrs) == 0 {
		s.Addrs = o.addrs
	}
	s.Addrs = slices.Clone(s.Addrs)
	for i, addr := range s.Addrs {
		addr = strings.TrimSpace(addr)
		if addr == "" || slices.Contains(s.Addrs[:i], addr) {
			return nil, fmt.Errorf("locks: %s: the addresses %q have an empty one, or one twice", s.Lock, s.Addrs)
		}
		s.Addrs[i] = addr
	}
	return o.open(ctx, s)
}

// one is the only address of a lock with one server.
func (s Spec) one() (string, error) {
	if len(s.Addrs) != 1 {
		return "", fmt.Errorf("locks: %s is one server, and there are %d addresses", s.Lock, len(s.Addrs))
	}
	return s.Addrs[0], nil
}

// opened makes a Backend of what a backend's New has returned.
func opened(b dlock.Backend, err error, c client) (*Backend, error) {
	if err != nil {
		return nil, errors.Join(err, c.close())
	}
	return &Backend{b, c}, nil
}
