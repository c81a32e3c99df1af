package main

import (
	"context"
	"fmt"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/internal/load"
	"github.com/fencelab/fencelab/internal/locks"
	"github.com/fencelab/fencelab/internal/peers"
)

// ping is no lock but what is measured beside one: an acquisition and a release are a PING each, sent by the client that
// redislock uses, with the same options. What is longer with a lock is the lock's.
const ping = "ping"

// names are what -backend takes.
func names() []string { return append(peers.Names(), ping) }

// service is the lock service that a backend needs, one of [locks.Names].
func service(backend string) string {
	if backend == ping {
		return locks.Redis
	}
	return peers.Service(backend)
}

// open opens a client of the lock.
func open(ctx context.Context, s peers.Spec) (load.Lock, error) {
	if s.Lock != ping {
		return peers.Open(ctx, s)
	}
	if len(s.Addrs) == 0 {
		s.Addrs = locks.Addrs(locks.Redis)
	}
	if len(s.Addrs) != 1 {
		return nil, fmt.Errorf("contend: %s is to one Redis, and there are %d addresses", ping, len(s.Addrs))
	}
	c, err := locks.RedisClient(s.Addrs[0])
	if err != nil {
		return nil, err
	}
	return pinger{c}, nil
}

type pinger struct{ *redis.Client }

func (p pinger) Acquire(ctx context.Context, _ string) (load.Lease, error) {
	return p, p.Ping(ctx).Err()
}

func (p pinger) Release(ctx context.Context) error { return p.Ping(ctx).Err() }

func (pinger) Fence() uint64 { return 0 }

func (pinger) Lost() bool { return false }
