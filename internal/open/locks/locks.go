// Package locks opens lock backends by name.
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
	"github.com/fencelab/fencelab/internal/cli"
)

// The names of the locks.
const (
	Redis     = "redis"
	Redlock   = "redlock"
	Etcd      = "etcd"
	ZooKeeper = "zookeeper"
	Consul    = "consul"
	Postgres  = "postgres"
	S3        = "s3"
)

// Spec selects a lock and its servers.
type Spec struct {
	Lock  string
	Addrs []string      // host:port, or URLs; none: the default addresses
	TTL   time.Duration // of the leases
	// Dial, if not nil, connects to servers.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
	// MinSession is Consul's shortest session, or ZooKeeper's requested session timeout; 0: the default.
	MinSession time.Duration
}

// Backend owns its client.
type Backend struct {
	dlock.Backend
	client client
}

type client struct {
	ping  func(ctx context.Context) error
	close func() error
}

// Close also closes the client.
func (b *Backend) Close() error { return errors.Join(b.Backend.Close(), b.client.close()) }

// Ping returns an error if the lock service doesn't reply.
func (b *Backend) Ping(ctx context.Context) error { return b.client.ping(ctx) }

const answerTimeout = 5 * time.Second

type opener struct {
	addrs   []string
	schemes map[string]string // URL schemes, with the prefix of each server's address
	open    func(ctx context.Context, s Spec) (*Backend, error)
}

var openers = map[string]opener{
	Redis: {[]string{"127.0.0.1:6379"}, map[string]string{"redis": "redis://", "rediss": "rediss://"}, openRedis},
	Redlock: {
		[]string{"127.0.0.1:6381", "127.0.0.1:6382", "127.0.0.1:6383", "127.0.0.1:6384", "127.0.0.1:6385"},
		map[string]string{"redlock": "redis://", "redlocks": "rediss://"},
		func(ctx context.Context, s Spec) (*Backend, error) { return OpenRedlock(ctx, s, nil) },
	},
	Etcd: {
		[]string{"127.0.0.1:2379", "127.0.0.1:22379", "127.0.0.1:32379"},
		map[string]string{"etcd": "http://", "etcds": "https://"},
		openEtcd,
	},
	ZooKeeper: {[]string{"127.0.0.1:2181"}, map[string]string{"zookeeper": ""}, openZooKeeper},
	Consul:    {[]string{"127.0.0.1:8500"}, map[string]string{"consul": "http://", "consuls": "https://"}, openConsul},
	Postgres: {
		[]string{"postgres://postgres@127.0.0.1:5432/postgres?sslmode=disable"},
		map[string]string{"postgres": "", "postgresql": ""},
		openPostgres,
	},
	S3: {[]string{"http://id:secret@127.0.0.1:7070"}, map[string]string{"s3": ""}, openS3},
}

// Names returns all locks.
func Names() []string { return slices.Sorted(maps.Keys(openers)) }

// Addrs returns a lock's default addresses.
func Addrs(lock string) []string { return openers[lock].addrs }

// Reach is Open within five seconds, or a minute for S3, where s3lock.Open sends about twenty requests, and a reply of the service
// within five: one at a wrong address would look like a held lock.
func Reach(ctx context.Context, s Spec) (b *Backend, err error) {
	limit := cli.ReachTimeout
	if s.Lock == S3 {
		limit = time.Minute
	}
	err = cli.ReachWithin(ctx, limit, func(ctx context.Context) (err error) {
		b, err = Open(ctx, s)
		return err
	})
	if err != nil {
		return nil, err
	}
	if err := cli.Reach(ctx, b.Ping); err != nil {
		return nil, errors.Join(err, b.Close())
	}
	return b, nil
}

// Acquire acquires the lock of a key within a limit, the flag -wait; 0: none.
func Acquire(ctx context.Context, l *dlock.Locker, key string, wait time.Duration) (*dlock.Handle, error) {
	if wait > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, wait, fmt.Errorf("the lock was not free within %v (-wait)", wait))
		defer cancel()
	}
	return l.Acquire(ctx, key)
}

// Open opens a lock. It may return before servers have replied.
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
			return nil, fmt.Errorf("locks: the addresses of %v include an empty or repeated one", s)
		}
		s.Addrs[i] = addr
	}
	return o.open(ctx, s)
}

func (s Spec) one() (string, error) {
	if len(s.Addrs) != 1 {
		return "", fmt.Errorf("locks: %s takes one server, but %d addresses were given", s.Lock, len(s.Addrs))
	}
	return s.Addrs[0], nil
}

func opened(b dlock.Backend, err error, c client) (*Backend, error) {
	if err != nil {
		return nil, errors.Join(err, c.close())
	}
	return &Backend{b, c}, nil
}
