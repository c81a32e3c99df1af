package peers

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"math"
	"net"
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
	"github.com/fencelab/fencelab/internal/load"
	"github.com/fencelab/fencelab/internal/redisclient"
)

// Between two tries of the libraries that poll, which leave it to the caller. A long pause serves the one that has just
// released: it takes its own lock again, over and over, while the others sleep. That makes the most sections, as no other
// client has to be handed the lock, and has some starve. With a short pause the questions of many leave little of the server
// to the holder. bsm/redislock's examples have 100 ms, redsync draws from 50 to 250 ms.
const (
	shortPause = 10 * time.Millisecond
	longPause  = 100 * time.Millisecond
)

// forEver is the deadline of a caller that waits for as long as it takes; it is cancelled at the end of the run.
const forEver = 24 * time.Hour

// clients connects to each address.
func clients(s Spec) (all []*redis.Client, err error) {
	for _, addr := range s.Addrs {
		o, err := redisclient.Options(addr, s.Dial)
		if err != nil {
			return nil, errors.Join(err, closeClients(all))
		}
		all = append(all, redis.NewClient(o))
	}
	return all, nil
}

func closeClients(all []*redis.Client) error {
	errs := make([]error, len(all))
	for i, c := range all {
		errs[i] = c.Close()
	}
	return errors.Join(errs...)
}

// one connects to the only address.
func one(s Spec) (*redis.Client, error) {
	if len(s.Addrs) != 1 {
		return nil, fmt.Errorf("peers: %s is on one server, and there are %d addresses", s.Lock, len(s.Addrs))
	}
	all, err := clients(s)
	if err != nil {
		return nil, err
	}
	return all[0], nil
}

func openRedisSpin(_ context.Context, s Spec) (load.Lock, error) {
	c, err := one(s)
	if err != nil {
		return nil, err
	}
	b, err := redislock.New(c, &redislock.Options{Mode: redislock.ModeSpin})
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return fromBackend(&owned{b, c}, s)
}

// owned is a backend that closes its client.
type owned struct {
	dlock.Backend
	client *redis.Client
}

func (o *owned) Close() error { return errors.Join(o.Backend.Close(), o.client.Close()) }

// openRedsync: a Mutex for each acquisition, as its README has it, that tries again after pause until its context ends.
func openRedsync(s Spec, pause time.Duration) (load.Lock, error) {
	all, err := clients(s)
	if err != nil {
		return nil, err
	}
	pools := make([]syncredis.Pool, len(all))
	for i, c := range all {
		pools[i] = goredis.NewPool(c)
	}
	return &redsyncLock{redsync.New(pools...), all, s.TTL, pause}, nil
}

type redsyncLock struct {
	rs      *redsync.Redsync
	clients []*redis.Client
	ttl     time.Duration
	pause   time.Duration
}

func (l *redsyncLock) Acquire(ctx context.Context, key string) (load.Lease, error) {
	m := l.rs.NewMutex(key, redsync.WithExpiry(l.ttl), redsync.WithTries(math.MaxInt), redsync.WithRetryDelay(l.pause))
	if err := m.LockContext(ctx); err != nil {
		return nil, err
	}
	return &lease{
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

func (l *redsyncLock) Close() error { return closeClients(l.clients) }

// openRedislock: Obtain with a linear backoff and a deadline of its own, as its examples have it. Without a deadline it
// would give up after one TTL.
func openRedislock(s Spec, pause time.Duration) (load.Lock, error) {
	c, err := one(s)
	if err != nil {
		return nil, err
	}
	return &bsmLock{bsm.New(c), c, s.TTL, pause}, nil
}

type bsmLock struct {
	locker *bsm.Client
	client *redis.Client
	ttl    time.Duration
	pause  time.Duration
}

func (l *bsmLock) Acquire(ctx context.Context, key string) (load.Lease, error) {
	ctx, cancel := context.WithTimeout(ctx, forEver)
	defer cancel()
	got, err := l.locker.Obtain(ctx, key, l.ttl, &bsm.Options{RetryStrategy: bsm.LinearBackoff(l.pause)})
	if err != nil {
		return nil, err
	}
	return &lease{release: func(ctx context.Context) error {
		err := got.Release(ctx)
		if errors.Is(err, bsm.ErrLockNotHeld) {
			err = fmt.Errorf("%w: %w", dlock.ErrLost, err)
		}
		return err
	}}, nil
}

func (l *bsmLock) Close() error { return l.client.Close() }

// openRueidislock: a Locker with the settings that its README has for one Redis of version 7.0.5 or later: a majority of
// one key, and no notices of the client's own changes. It waits for the server's invalidations, and renews. What its README
// doesn't name is left at its defaults, also TryNextAfter: there is no next key, and yet no answer may take longer than its
// 20 ms. On two cores a thousand clients exceed that, and twice to three times as many sections were made with 2 s.
func openRueidislock(_ context.Context, s Spec) (load.Lock, error) {
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
		ClientOption: o, KeyMajority: 1, NoLoopTracking: true, KeyValidity: s.TTL,
	})
	if err != nil {
		return nil, fmt.Errorf("peers: rueidislock: %w", err)
	}
	return rueidisLock{l}, nil
}

type rueidisLock struct{ rueidislock.Locker }

func (l rueidisLock) Acquire(ctx context.Context, key string) (load.Lease, error) {
	held, cancel, err := l.WithContext(ctx, key)
	if err != nil {
		return nil, err
	}
	return &lease{
		lost:    func() bool { return held.Err() != nil },
		release: func(context.Context) error { cancel(); return nil }, // it doesn't say whether it worked
	}, nil
}

func (l rueidisLock) Close() error {
	l.Locker.Close()
	return nil
}
