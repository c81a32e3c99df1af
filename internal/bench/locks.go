package bench

import (
	"cmp"
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
	"github.com/fencelab/fencelab/internal/open"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// Spec is a lock and where it is.
type Spec struct {
	Lock       string
	Addrs      []string // none: the defaults on this host
	TTL        time.Duration
	Registerer prometheus.Registerer // for the metrics of this module's locks; may be nil
	// How long redlock and rueidislock wait for a reply; 0: their defaults.
	Patience time.Duration
	Dial     func(ctx context.Context, network, addr string) (net.Conn, error)

	service string
	retry   time.Duration
}

// Retry intervals, where the caller chooses them. Long ones raise throughput through reacquisition by the last holder, and starve
// others. With short ones, retries leave little of the server to the holder. bsm/redislock's examples have 100 ms; redsync draws
// from 50 to 250 ms.
const (
	shortRetry = 10 * time.Millisecond
	longRetry  = 100 * time.Millisecond
)

const (
	redsyncModule   = "github.com/go-redsync/redsync/v4"
	redislockModule = "github.com/bsm/redislock"
)

// Not locks, but a lower bound for them, with redislock's client.
const (
	ping  = "ping"  // an acquisition and a release are a PING each
	baton = "baton" // an acquisition takes the only element of a list, a release puts it back
)

// The locks of this module and of other Go libraries, whose tokens, if any, aren't used. Except for the retry interval, each is
// used as its documentation recommends for callers that block until they have the lock.
var table = []struct {
	name, service string                          // service is one of [locks.Names] and gives the default addresses
	module        string                          // "": this module's
	retry         time.Duration                   // 0: the lock chooses
	open          func(s Spec) (load.Lock, error) // nil: openOurs
}{
	{locks.Redis, locks.Redis, "", 0, nil},
	{"redis-spin", locks.Redis, "", 0, openRedisSpin}, // redislock in ModeSpin
	{locks.Redlock, locks.Redlock, "", 0, nil},
	{locks.Etcd, locks.Etcd, "", 0, nil},
	{locks.ZooKeeper, locks.ZooKeeper, "", 0, nil},
	{locks.Consul, locks.Consul, "", 0, nil},
	{locks.Postgres, locks.Postgres, "", 0, nil},
	{locks.S3, locks.S3, "", 0, nil},
	{"redsync", locks.Redis, redsyncModule, shortRetry, openRedsync},
	{"redsync-100ms", locks.Redis, redsyncModule, longRetry, openRedsync},
	{"redsync-5", locks.Redlock, redsyncModule, shortRetry, openRedsync}, // on five nodes
	{"redislock", locks.Redis, redislockModule, shortRetry, openRedislock},
	{"redislock-100ms", locks.Redis, redislockModule, longRetry, openRedislock},
	{"rueidislock", locks.Redis, "github.com/redis/rueidis", 0, openRueidislock},
	{"etcd-mutex", locks.Etcd, "go.etcd.io/etcd/client/v3", 0, openEtcdMutex},
	{"zk-lock", locks.ZooKeeper, "github.com/go-zookeeper/zk", 0, openZKLock},
	{"redis-shared", locks.Redis, "", 0, nil}, // with dlock.Share: callers of one client share leases
	{"etcd-shared", locks.Etcd, "", 0, nil},
	{ping, locks.Redis, "", 0, openPing},
	{baton, locks.Redis, "", 0, openBaton},
}

// Names returns the names of all locks, and of ping and baton.
func Names() (all []string) {
	for _, l := range table {
		all = append(all, l.name)
	}
	return all
}

// Service returns the lock service of a lock, one of [locks.Names].
func Service(lock string) string { return table[slices.Index(Names(), lock)].service }

// library returns the module and version of another library's lock.
func library(lock string) string {
	module := table[slices.Index(Names(), lock)].module
	if info, ok := debug.ReadBuildInfo(); ok && module != "" {
		for _, d := range info.Deps {
			if d.Path == module {
				return d.Path + " " + d.Version
			}
		}
	}
	return module
}

func known(lock string) error {
	if !slices.Contains(Names(), lock) {
		return fmt.Errorf("there is no lock %q; there are %s", lock, strings.Join(Names(), ", "))
	}
	return nil
}

// Open opens a client of s.Lock. Tests replace it.
var Open = func(ctx context.Context, s Spec) (load.Lock, error) {
	if err := known(s.Lock); err != nil {
		return load.Lock{}, err
	}
	l := table[slices.Index(Names(), s.Lock)]
	if s.service, s.retry = l.service, l.retry; len(s.Addrs) == 0 {
		s.Addrs = locks.Addrs(l.service)
	}
	if l.open == nil {
		return openOurs(ctx, s)
	}
	return l.open(s)
}

func (s Spec) spec() locks.Spec {
	return locks.Spec{Lock: s.service, Addrs: s.Addrs, TTL: s.TTL, Dial: s.Dial}
}

func openOurs(ctx context.Context, s Spec) (load.Lock, error) {
	open := locks.Open
	if s.Lock == locks.Redlock && s.Patience > 0 {
		open = func(ctx context.Context, spec locks.Spec) (*locks.Backend, error) {
			return locks.OpenRedlock(ctx, spec, &redlock.Options{NodeTimeout: s.Patience})
		}
	}
	b, err := open(ctx, s.spec())
	if err != nil {
		return load.Lock{}, err
	}
	var share dlock.Share
	if strings.HasSuffix(s.Lock, "-shared") {
		share = dlock.Share{Sections: 1000, For: s.TTL / 2, Idle: 10 * time.Millisecond}
	}
	return fromBackend(b, s, share)
}

// fromBackend has no renewals, so that leases are like those of the other locks.
func fromBackend(b dlock.Backend, s Spec, share dlock.Share) (load.Lock, error) {
	l, err := dlock.New(b, &dlock.Options{TTL: s.TTL, Registerer: s.Registerer, Share: share})
	if err != nil {
		return load.Lock{}, errors.Join(err, b.Close())
	}
	return load.Lock{Close: l.Close, Acquire: func(ctx context.Context, key string) (load.Lease, error) {
		h, err := l.Acquire(ctx, key)
		if err != nil {
			return load.Lease{}, err
		}
		order := h.Fence()
		if share.Sections > 0 { // critical sections of a lease are ordered by seq
			_, seq := h.Next()
			order = order<<10 | seq // Sections fits
		}
		return load.Lease{Fence: order, Lost: func() bool { return h.Context().Err() != nil }, Release: h.Release}, nil
	}}, nil
}

// ServerSpec is how to start a lock service.
type ServerSpec struct {
	Nodes int      `json:"nodes"` // of etcd and ZooKeeper: 1 or 3; 0: 3
	Args  []string `json:"args"`
}

// Servers is a started lock service.
type Servers struct {
	open.Servers
	Addrs []string
	Text  string // as in "3 × etcd 3.6.16 (local)"
}

// Start starts a lock service, see [open.Start].
func Start(ctx context.Context, service string, spec ServerSpec, o testbed.Options) (*Servers, error) {
	o.Args = spec.Args
	all, err := open.Start(ctx, service, cmp.Or(spec.Nodes, 3), &o)
	if err != nil {
		return nil, err
	}
	on := all.On()
	s := &Servers{Servers: all, Text: on.Server}
	for _, n := range on.Nodes {
		s.Addrs = append(s.Addrs, n.Addr)
	}
	return s, nil
}
