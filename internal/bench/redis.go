package bench

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"net"
	"sync"
	"time"

	bsm "github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	syncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/redis/go-redis/v9"
	"github.com/redis/rueidis"
	"github.com/redis/rueidis/rueidislock"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/internal/bench/load"
	"github.com/fencelab/fencelab/internal/redisclient"
)

const forEver = 24 * time.Hour

func connect(s Spec) (*redis.Client, error) {
	if len(s.Addrs) != 1 {
		return nil, fmt.Errorf("bench: %s is on one server, and there are %d addresses", s.Lock, len(s.Addrs))
	}
	o, err := redisclient.Options(s.Addrs[0], s.Dial)
	if err != nil {
		return nil, err
	}
	if s.Lock == baton {
		o.PoolSize = 100_000 // each waiter has a connection
	}
	return redis.NewClient(o), nil
}

func openRedisSpin(s Spec) (load.Lock, error) {
	c, err := connect(s)
	if err != nil {
		return load.Lock{}, err
	}
	b, err := redislock.New(c, &redislock.Options{Mode: redislock.ModeSpin})
	if err != nil {
		return load.Lock{}, errors.Join(err, c.Close())
	}
	return fromBackend(owned{b, c}, s, dlock.Share{})
}

type owned struct {
	dlock.Backend
	client *redis.Client
}

func (o owned) Close() error { return errors.Join(o.Backend.Close(), o.client.Close()) }

func openRedsync(s Spec) (load.Lock, error) {
	var pools []syncredis.Pool
	var clients []*redis.Client
	closeAll := func() (err error) {
		for _, c := range clients {
			err = errors.Join(err, c.Close())
		}
		return err
	}
	for _, addr := range s.Addrs {
		o, err := redisclient.Options(addr, s.Dial)
		if err != nil {
			return load.Lock{}, errors.Join(err, closeAll())
		}
		c := redis.NewClient(o)
		pools, clients = append(pools, goredis.NewPool(c)), append(clients, c)
	}
	rs := redsync.New(pools...)
	return load.Lock{Close: closeAll, Acquire: func(ctx context.Context, key string) (load.Lease, error) {
		m := rs.NewMutex(key, redsync.WithExpiry(s.TTL), redsync.WithTries(math.MaxInt), redsync.WithRetryDelay(s.retry))
		return load.Lease{
			Lost: func() bool { return time.Now().After(m.Until()) },
			Release: func(ctx context.Context) error {
				ok, err := m.UnlockContext(ctx)
				if err == nil && !ok {
					err = fmt.Errorf("%w: redsync", dlock.ErrLost)
				}
				return err
			},
		}, m.LockContext(ctx)
	}}, nil
}

// openRedislock uses Obtain with a linear backoff, as its examples do. Without a deadline it gives up after one TTL.
func openRedislock(s Spec) (load.Lock, error) {
	c, err := connect(s)
	if err != nil {
		return load.Lock{}, err
	}
	locker := bsm.New(c)
	return load.Lock{Close: c.Close, Acquire: func(ctx context.Context, key string) (load.Lease, error) {
		ctx, cancel := context.WithTimeout(ctx, forEver)
		defer cancel()
		got, err := locker.Obtain(ctx, key, s.TTL, &bsm.Options{RetryStrategy: bsm.LinearBackoff(s.retry)})
		return load.Lease{Release: func(ctx context.Context) error {
			err := got.Release(ctx)
			if errors.Is(err, bsm.ErrLockNotHeld) {
				err = fmt.Errorf("%w: %w", dlock.ErrLost, err)
			}
			return err
		}}, err
	}}, nil
}

// openRueidislock uses the settings that its README gives for one Redis since 7.0.5: a majority of one key, and no notifications
// of the client's own changes. All else is at its defaults, even TryNextAfter, which limits replies to 20 ms although there is no
// next key. A thousand clients on two cores exceed that; with 2 s throughput was two to three times as high.
func openRueidislock(s Spec) (load.Lock, error) {
	o := rueidis.ClientOption{InitAddress: s.Addrs}
	if len(s.Addrs) == 1 {
		if u, err := rueidis.ParseURL(s.Addrs[0]); err == nil {
			o = u
		}
	}
	if s.Dial != nil {
		o.DialCtxFn = func(ctx context.Context, addr string, _ *net.Dialer, config *tls.Config) (net.Conn, error) {
			c, err := s.Dial(ctx, "tcp", addr)
			if err != nil || config == nil {
				return c, err
			}
			return tls.Client(c, config), nil
		}
	}
	l, err := rueidislock.NewLocker(rueidislock.LockerOption{
		ClientOption: o, KeyMajority: 1, NoLoopTracking: true, KeyValidity: s.TTL, TryNextAfter: s.Patience,
	})
	if err != nil {
		return load.Lock{}, fmt.Errorf("bench: rueidislock: %w", err)
	}
	return load.Lock{Close: func() error { l.Close(); return nil }, Acquire: func(ctx context.Context, key string) (load.Lease, error) {
		held, cancel, err := l.WithContext(ctx, key)
		return load.Lease{
			Lost:    func() bool { return held.Err() != nil },
			Release: func(context.Context) error { cancel(); return nil },
		}, err
	}}, nil
}

func openPing(s Spec) (load.Lock, error) {
	c, err := connect(s)
	if err != nil {
		return load.Lock{}, err
	}
	ping := func(ctx context.Context) error { return c.Ping(ctx).Err() }
	return load.Lock{Close: c.Close, Acquire: func(ctx context.Context, _ string) (load.Lease, error) { return load.Lease{Release: ping}, ping(ctx) }}, nil
}

var makeBaton = redis.NewScript(`return redis.call('SETNX', KEYS[2], 1) == 1 and redis.call('RPUSH', KEYS[1], 'baton') or 0`)

// openBaton: Redis serves clients that block on a list in FIFO order. An element is lost with its holder.
func openBaton(s Spec) (load.Lock, error) {
	c, err := connect(s)
	if err != nil {
		return load.Lock{}, err
	}
	var made sync.Map
	return load.Lock{Close: c.Close, Acquire: func(ctx context.Context, key string) (load.Lease, error) {
		if _, ok := made.Load(key); !ok {
			if err := makeBaton.Run(ctx, c, []string{key, key + ":made"}).Err(); err != nil {
				return load.Lease{}, err
			}
			made.Store(key, true)
		}
		var err error = redis.Nil
		for ctx.Err() == nil && errors.Is(err, redis.Nil) {
			err = c.BLPop(ctx, 10*time.Second, key).Err() // then it queues again
		}
		return load.Lease{Release: func(ctx context.Context) error { return c.RPush(ctx, key, "baton").Err() }}, err
	}}, nil
}
