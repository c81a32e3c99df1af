package explore_test

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/explore"
)

// others are locks of other libraries, without tokens.
var others = []explore.System{
	{Name: "bsm/redislock", TTL: time.Second, Servers: 1, Serve: serveRedis, Greeting: 1, NoTokens: true, Open: openBSM},
	{Name: "redsync", TTL: time.Second, Servers: 5, Serve: serveRedis, Greeting: 1, NoTokens: true, Open: openRedsync},
}

func openBSM(c *explore.Client) (scenarios.Lock, error) {
	rdb := client(c, 0)
	locks := redislock.New(rdb)
	return scenarios.Adapter{
		Get: func(ctx context.Context, key string, wait bool) (scenarios.Grant, error) {
			retry := redislock.NoRetry()
			if wait {
				retry = redislock.LinearBackoff(c.TTL / 10)
			}
			ctx, cancel := context.WithTimeout(ctx, time.Hour) // without a deadline, Obtain gives up after the TTL
			defer cancel()
			l, err := locks.Obtain(ctx, key, c.TTL, &redislock.Options{RetryStrategy: retry})
			if err != nil {
				return scenarios.Grant{}, err
			}
			asked := time.Now()
			left, err := l.TTL(ctx)
			return scenarios.Grant{TTL: c.TTL, Until: asked.Add(left), Release: l.Release}, err
		},
		Held: redislock.ErrNotObtained, Lost: redislock.ErrLockNotHeld, Shut: rdb.Close,
	}, nil
}

func openRedsync(c *explore.Client) (scenarios.Lock, error) {
	var nodes []redsyncredis.Pool
	var shut []func() error
	for i := range 5 {
		rdb := client(c, i)
		nodes, shut = append(nodes, goredis.NewPool(rdb)), append(shut, rdb.Close)
	}
	locks := redsync.New(nodes...)
	return scenarios.Adapter{
		Get: func(ctx context.Context, key string, wait bool) (scenarios.Grant, error) {
			tries := 1
			if wait {
				tries = 1 << 30
			}
			m := locks.NewMutex(key, redsync.WithExpiry(c.TTL), redsync.WithTries(tries), redsync.WithRetryDelay(c.TTL/10))
			err := m.LockContext(ctx)
			if taken := (*redsync.ErrTaken)(nil); errors.As(err, &taken) {
				err = fmt.Errorf("%w: %w", dlock.ErrHeld, err)
			}
			return scenarios.Grant{TTL: c.TTL, Until: m.Until(), Release: func(ctx context.Context) error {
				_, err := m.UnlockContext(ctx)
				return err
			}}, err
		},
		Lost: redsync.ErrLockAlreadyExpired,
		Shut: func() (err error) {
			for _, f := range shut {
				err = errors.Join(err, f())
			}
			return err
		},
	}, nil
}
