// Package competitors opens locks by name for load: those of this module, and those of other Go libraries, whose fencing
// tokens, if any, it doesn't use. Each is used as its documentation recommends for callers that block until they have the
// lock, except for the retry interval, which is the same for all that poll.
package competitors

import (
	"context"
	"errors"
	"fmt"
	"net"
	"runtime/debug"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redlock"
	"github.com/fencelab/fencelab/internal/bench/load"
	"github.com/fencelab/fencelab/internal/open/locks"
)

// Names besides [locks.Names].
const (
	RedisSpin     = "redis-spin" // redislock in ModeSpin
	Redsync       = "redsync"    // github.com/go-redsync/redsync on one Redis, polling every 10 ms
	Redislock     = "redislock"  // github.com/bsm/redislock, polling every 10 ms
	RedsyncSlow   = "redsync-100ms"
	RedislockSlow = "redislock-100ms"
	Redsync5      = "redsync-5"    // redsync on five Redlock nodes
	Rueidislock   = "rueidislock"  // github.com/redis/rueidis/rueidislock
	EtcdMutex     = "etcd-mutex"   // concurrency.Mutex of etcd's client
	ZKLock        = "zk-lock"      // Lock of github.com/go-zookeeper/zk
	RedisShared   = "redis-shared" // redislock and etcdlock with dlock.Share: callers of one client share leases
	EtcdShared    = "etcd-shared"

	// Not locks, but a lower bound for them, with redislock's client.
	Ping  = "ping"  // an acquisition and a release are a PING each
	Baton = "baton" // an acquisition takes the only element of a list, a release puts it back
)

// Spec says which lock, and where.
type Spec struct {
	Lock       string
	Addrs      []string // none: the usual ones on this host
	TTL        time.Duration
	Registerer prometheus.Registerer // for the metrics of this module's locks; may be nil
	// How long redlock and rueidislock wait for a reply; 0: their defaults.
	Patience time.Duration
	// Connects to the servers, if not nil.
	Dial func(ctx context.Context, network, addr string) (net.Conn, error)
}

func (s Spec) spec() locks.Spec {
	return locks.Spec{Lock: s.Lock, Addrs: s.Addrs, TTL: s.TTL, Dial: s.Dial}
}

type competitor struct {
	service string // whose addresses it takes, a name of [locks.Names]
	module  string // "" if it is this module's
	open    func(s Spec) (load.Lock, error)
}

const (
	redsyncModule   = "github.com/go-redsync/redsync/v4"
	redislockModule = "github.com/bsm/redislock"
)

var all = map[string]competitor{
	RedisSpin:     {locks.Redis, "", openRedisSpin},
	Redsync:       {locks.Redis, redsyncModule, redsyncEvery(shortRetry)},
	RedsyncSlow:   {locks.Redis, redsyncModule, redsyncEvery(longRetry)},
	Redsync5:      {locks.Redlock, redsyncModule, redsyncEvery(shortRetry)},
	Redislock:     {locks.Redis, redislockModule, redislockEvery(shortRetry)},
	RedislockSlow: {locks.Redis, redislockModule, redislockEvery(longRetry)},
	Rueidislock:   {locks.Redis, "github.com/redis/rueidis", openRueidislock},
	EtcdMutex:     {locks.Etcd, "go.etcd.io/etcd/client/v3", openEtcdMutex},
	ZKLock:        {locks.ZooKeeper, "github.com/go-zookeeper/zk", openZKLock},
	RedisShared:   {locks.Redis, "", openShared(locks.Redis)},
	EtcdShared:    {locks.Etcd, "", openShared(locks.Etcd)},
	Ping:          {locks.Redis, "", openPing},
	Baton:         {locks.Redis, "", openBaton},
}

// Names returns the names of all locks, this module's first.
func Names() []string {
	return []string{
		locks.Redis, RedisSpin, locks.Redlock, locks.Etcd, locks.ZooKeeper, locks.Consul, locks.Postgres, locks.S3,
		Redsync, RedsyncSlow, Redsync5, Redislock, RedislockSlow, Rueidislock, EtcdMutex, ZKLock, RedisShared, EtcdShared,
	}
}

// All returns [Names], Ping and Baton.
func All() []string { return append(Names(), Ping, Baton) }

// Service returns the lock service of a lock, one of [locks.Names].
func Service(lock string) string {
	if c, ok := all[lock]; ok {
		return c.service
	}
	return lock
}

// Library returns the module and version of another library.
func Library(lock string) string {
	module := all[lock].module
	if info, ok := debug.ReadBuildInfo(); ok && module != "" {
		for _, d := range info.Deps {
			if d.Path == module {
				return d.Path + " " + d.Version
			}
		}
	}
	return module
}

// Open opens a client of s.Lock.
func Open(ctx context.Context, s Spec) (load.Lock, error) {
	if !slices.Contains(All(), s.Lock) {
		return nil, fmt.Errorf("competitors: there is no lock %q; there are %s", s.Lock, strings.Join(All(), ", "))
	}
	if len(s.Addrs) == 0 {
		s.Addrs = locks.Addrs(Service(s.Lock))
	}
	if c, ok := all[s.Lock]; ok {
		return c.open(s)
	}
	open := locks.Open
	if s.Lock == locks.Redlock && s.Patience > 0 {
		open = func(ctx context.Context, spec locks.Spec) (*locks.Backend, error) {
			return locks.OpenRedlock(ctx, spec, &redlock.Options{NodeTimeout: s.Patience})
		}
	}
	b, err := open(ctx, s.spec())
	if err != nil {
		return nil, err
	}
	return fromBackend(b, s, dlock.Share{})
}

func openShared(name string) func(Spec) (load.Lock, error) {
	return func(s Spec) (load.Lock, error) {
		s.Lock = name
		b, err := locks.Open(context.Background(), s.spec())
		if err != nil {
			return nil, err
		}
		return fromBackend(b, s, dlock.Share{Sections: 1000, For: s.TTL / 2, Idle: 10 * time.Millisecond})
	}
}

// fromBackend has no renewals, so that leases are like those of the others.
func fromBackend(b dlock.Backend, s Spec, share dlock.Share) (load.Lock, error) {
	l, err := dlock.New(b, &dlock.Options{TTL: s.TTL, Registerer: s.Registerer, Share: share})
	if err != nil {
		return nil, errors.Join(err, b.Close())
	}
	acquire := func(ctx context.Context, key string) (load.Lease, error) {
		h, err := l.Acquire(ctx, key)
		if err != nil {
			return nil, err
		}
		order := h.Fence()
		if share.Sections > 0 {
			_, seq := h.Next()
			order = order<<10 | seq // Sections fits
		}
		return section{h, order}, nil
	}
	return lock{acquire, l.Close}, nil
}

// section is a critical section. Under a shared lease, sections are ordered by token and number.
type section struct {
	*dlock.Handle
	order uint64
}

func (s section) Fence() uint64 { return s.order }
func (s section) Lost() bool    { return s.Context().Err() != nil }

type lock struct {
	acquire func(ctx context.Context, key string) (load.Lease, error)
	close   func() error
}

func (l lock) Acquire(ctx context.Context, key string) (load.Lease, error) {
	return l.acquire(ctx, key)
}
func (l lock) Close() error { return l.close() }

// lease is for libraries without tokens.
type lease struct {
	lost    func() bool // nil: the library can't tell
	release func(ctx context.Context) error
}

func (l lease) Fence() uint64                     { return 0 }
func (l lease) Lost() bool                        { return l.lost != nil && l.lost() }
func (l lease) Release(ctx context.Context) error { return l.release(ctx) }
