package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/internal/load"
	"github.com/fencelab/fencelab/internal/locks"
	"github.com/fencelab/fencelab/internal/peers"
	"github.com/fencelab/fencelab/internal/redisclient"
)

// What is no lock but is measured beside locks, by the client that redislock uses, with the same options: what is longer
// with a lock is the lock's.
const (
	ping  = "ping"  // an acquisition and a release are a PING each
	baton = "baton" // an acquisition takes the only element of a list, a release gives it back
)

var floors = []string{ping, baton}

// names are what -backend takes.
func names() []string { return append(peers.Names(), floors...) }

// service is the lock service that a backend needs, one of [locks.Names].
func service(backend string) string {
	if slices.Contains(floors, backend) {
		return locks.Redis
	}
	return peers.Service(backend)
}

// openLock is open but in tests.
var openLock = open

// open opens a client of the lock.
func open(ctx context.Context, s peers.Spec) (load.Lock, error) {
	if !slices.Contains(floors, s.Lock) {
		return peers.Open(ctx, s)
	}
	if len(s.Addrs) == 0 {
		s.Addrs = locks.Addrs(locks.Redis)
	}
	if len(s.Addrs) != 1 {
		return nil, fmt.Errorf("contend: %s is on one Redis, and there are %d addresses", s.Lock, len(s.Addrs))
	}
	o, err := redisclient.Options(s.Addrs[0], s.Dial)
	if err != nil {
		return nil, err
	}
	if s.Lock == ping {
		return pinger{redis.NewClient(o)}, nil
	}
	o.PoolSize = waiters
	return &passer{client: redis.NewClient(o)}, nil
}

// noLock is what a lease of no lock has to say.
type noLock struct{}

func (noLock) Fence() uint64 { return 0 }

func (noLock) Lost() bool { return false }

type pinger struct{ client *redis.Client }

func (p pinger) Acquire(ctx context.Context, _ string) (load.Lease, error) {
	return pong{client: p.client}, p.client.Ping(ctx).Err()
}

func (p pinger) Close() error { return p.client.Close() }

type pong struct {
	noLock
	client *redis.Client
}

func (p pong) Release(ctx context.Context) error { return p.client.Ping(ctx).Err() }

// passer passes the only element of a key's list on: Redis serves those who wait for a list in the order in which they
// came. One that is lost with its holder stays lost; another -prefix has another.
type passer struct {
	client *redis.Client
	made   sync.Map // keys whose list has had its element
}

// waiters is how many clients of one connection each may wait at a time: more than there are contenders.
const waiters = 100_000

// place is for how long one keeps its place in the line before it looks whether its run is over, and takes another.
const place = 10 * time.Second

func (p *passer) Acquire(ctx context.Context, key string) (load.Lease, error) {
	err := p.make(ctx, key)
	for err == nil {
		err = p.client.BLPop(ctx, place, key).Err()
		switch {
		case err == nil:
			return held{client: p.client, key: key}, nil
		case ctx.Err() == nil && errors.Is(err, redis.Nil):
			err = nil
		}
	}
	return nil, err
}

var makeBaton = redis.NewScript(`return redis.call('SETNX', KEYS[2], 1) == 1 and redis.call('RPUSH', KEYS[1], 'baton') or 0`)

// make gives the list of key its element, unless somebody has.
func (p *passer) make(ctx context.Context, key string) error {
	if _, ok := p.made.Load(key); ok {
		return nil
	}
	err := makeBaton.Run(ctx, p.client, []string{key, key + ":made"}).Err()
	if err == nil {
		p.made.Store(key, true)
	}
	return err
}

func (p *passer) Close() error { return p.client.Close() }

type held struct {
	noLock
	client *redis.Client
	key    string
}

func (h held) Release(ctx context.Context) error { return h.client.RPush(ctx, h.key, "baton").Err() }
