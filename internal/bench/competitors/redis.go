package competitors

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

// Retry intervals, where the caller chooses them. With a long one the last holder takes the lock again, over and over,
// while the others sleep: the highest throughput, and starvation. With a short one many retries leave little of the
// server to the holder. bsm/redislock's examples have 100 ms; redsync draws from 50 to 250 ms.
const (
	shortRetry = 10 * time.Millisecond
	longRetry  = 100 * time.Millisecond
)

const forEver = 24 * time.Hour

func connect(s Spec) (*redis.Client, error) {
	if len(s.Addrs) != 1 {
		return nil, fmt.Errorf("competitors: %s is on one server, and there are %d addresses", s.Lock, len(s.Addrs))
	}
	o, err := redisclient.Options(s.Addrs[0], s.Dial)
	if err != nil {
		return nil, err
	}
	if s.Lock == Baton {
		o.PoolSize = 100_000 // each waiter has a connection
	}
	return redis.NewClient(o), nil
}

func openRedisSpin(s Spec) (load.Lock, error) {
	c, err := connect(s)
	if err != nil {
		return nil, err
	}
	b, err := redislock.New(c, &redislock.Options{Mode: redislock.ModeSpin})
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return fromBackend(owned{b, c}, s, dlock.Share{})
}

type owned struct {
	dlock.Backend
	client *redis.Client
}

func (o owned) Close() error { return errors.Join(o.Backend.Close(), o.client.Close()) }

// redsyncEvery: a Mutex for each acquisition, as in its README.
func redsyncEvery(retry time.Duration) func(Spec) (load.Lock, error) {
	return func(s Spec) (load.Lock, error) {
		var pools []syncredis.Pool
		var clients []*redis.Client
		closeAll := func() error {
			var errs []error
			for _, c := range clients {
				errs = append(errs, c.Close())
			}
			return errors.Join(errs...)
		}
		for _, addr := range s.Addrs {
			o, err := redisclient.Options(addr, s.Dial)
			if err != nil {
				return nil, errors.Join(err, closeAll())
			}
			c := redis.NewClient(o)
			pools, clients = append(pools, goredis.NewPool(c)), append(clients, c)
		}
		rs := redsync.New(pools...)
		acquire := func(ctx context.Context, key string) (load.Lease, error) {
			m := rs.NewMutex(key, redsync.WithExpiry(s.TTL), redsync.WithTries(math.MaxInt), redsync.WithRetryDelay(retry))
			if err := m.LockContext(ctx); err != nil {
				return nil, err
			}
			return lease{
				lost: func() bool { return time.Now().After(m.Until()) },
				release: func(ctx context.Context) error {
					ok, err := m.UnlockContext(ctx)
					if err == nil && !ok {
						err = fmt.Errorf("%w: redsync", dlock.ErrLost)
					}
					return err
				},
			}, nil
		}
		return lock{acquire, closeAll}, nil
	}
}

// redislockEvery: Obtain with a linear backoff, as in its examples. Without a deadline it gives up after one TTL.
func redislockEvery(retry time.Duration) func(Spec) (load.Lock, error) {
	return func(s Spec) (load.Lock, error) {
		c, err := connect(s)
		if err != nil {
			return nil, err
		}
		locker := bsm.New(c)
		acquire := func(ctx context.Context, key string) (load.Lease, error) {
			ctx, cancel := context.WithTimeout(ctx, forEver)
			defer cancel()
			got, err := locker.Obtain(ctx, key, s.TTL, &bsm.Options{RetryStrategy: bsm.LinearBackoff(retry)})
			if err != nil {
				return nil, err
			}
			return lease{release: func(ctx context.Context) error {
				err := got.Release(ctx)
				if errors.Is(err, bsm.ErrLockNotHeld) {
					err = fmt.Errorf("%w: %w", dlock.ErrLost, err)
				}
				return err
			}}, nil
		}
		return lock{acquire, c.Close}, nil
	}
}

// openRueidislock: the settings of its README for one Redis since 7.0.5: a majority of one key, and no notifications of
// the client's own changes. All else is at its defaults, even TryNextAfter: no reply may take longer than its 20 ms,
// though there is no next key. A thousand clients on two cores exceed that; with 2 s throughput was two to three times
// as high.
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
		return nil, fmt.Errorf("competitors: rueidislock: %w", err)
	}
	acquire := func(ctx context.Context, key string) (load.Lease, error) {
		held, cancel, err := l.WithContext(ctx, key)
		if err != nil {
			return nil, err
		}
		return lease{
			lost:    func() bool { return held.Err() != nil },
			release: func(context.Context) error { cancel(); return nil }, // it returns no error
		}, nil
	}
	return lock{acquire, func() error { l.Close(); return nil }}, nil
}

func openPing(s Spec) (load.Lock, error) {
	c, err := connect(s)
	if err != nil {
		return nil, err
	}
	ping := func(ctx context.Context) error { return c.Ping(ctx).Err() }
	return lock{func(ctx context.Context, _ string) (load.Lease, error) { return lease{release: ping}, ping(ctx) }, c.Close}, nil
}

var makeBaton = redis.NewScript(`return redis.call('SETNX', KEYS[2], 1) == 1 and redis.call('RPUSH', KEYS[1], 'baton') or 0`)

// openBaton: Redis serves clients that block on a list in FIFO order. An element is lost with its holder.
func openBaton(s Spec) (load.Lock, error) {
	c, err := connect(s)
	if err != nil {
		return nil, err
	}
	var made sync.Map // keys whose list has had its element
	acquire := func(ctx context.Context, key string) (load.Lease, error) {
		if _, ok := made.Load(key); !ok {
			if err := makeBaton.Run(ctx, c, []string{key, key + ":made"}).Err(); err != nil {
				return nil, err
			}
			made.Store(key, true)
		}
		var err error = redis.Nil
		for ctx.Err() == nil && errors.Is(err, redis.Nil) {
			err = c.BLPop(ctx, 10*time.Second, key).Err() // then it queues again
		}
		if err != nil {
			return nil, err
		}
		return lease{release: func(ctx context.Context) error { return c.RPush(ctx, key, "baton").Err() }}, nil
	}
	return lock{acquire, c.Close}, nil
}
