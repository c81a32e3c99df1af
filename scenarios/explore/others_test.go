package explore_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/bsm/redislock"
	"github.com/go-redsync/redsync/v4"
	redsyncredis "github.com/go-redsync/redsync/v4/redis"
	"github.com/go-redsync/redsync/v4/redis/goredis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/explore"
)

// drift is the allowance for clock drift on a lease of a second.
const drift = 12 * time.Millisecond

// others are locks of other libraries, without tokens. TestSchedules says why redsync lacks two verbs.
var others = []explore.System{onBSM(drift), without(onRedsync(5), explore.Hold, explore.Pause)}

var shortcomings = []flaw{
	{"makes no allowance for clock drift: bsm/redislock", only(onBSM(0), explore.Jump), others[0]},
	{"leaves the lock held if a call's context ends: bsm/redislock", deafened(others[0]), deafened(systems[2])},
	{"renews a lease that has expired: redsync, WithSetNXOnExtend", only(onRedsync(1, redsync.WithSetNXOnExtend()), explore.Renew), onRedsync(1)},
}

// The seed is fixed: a new defect in another library must not make this module's tests fail.
func TestOthers(t *testing.T) {
	for _, sys := range others {
		t.Run(sys.Name, func(t *testing.T) {
			r := sys.Explore(t, explore.Options{Seed: 1, Schedules: few(60)})
			require.Nil(t, r.Found, "%v\n%v", r.Found, r.Schedule)
		})
	}
	find(t, "testdata/others.txt", shortcomings)
}

// deafened has leases longer than a client may wait. Requests arrive, but replies may be lost.
func deafened(sys explore.System) explore.System {
	sys.TTL, sys.Wait = 10*time.Second, 3*time.Second
	return only(sys, explore.Cancel, explore.Deafen, explore.Mend)
}

func without(sys explore.System, verbs ...explore.Verb) explore.System {
	sys.Without = slices.Concat(sys.Without, verbs)
	return sys
}

// only limits steps to calls, waiting and these verbs, which finds defects sooner.
func only(sys explore.System, verbs ...explore.Verb) explore.System {
	sys.Without = allBut(append(verbs, explore.Run, explore.Wait)...)
	return sys
}

// onBSM is bsm/redislock. A lease ends the allowance earlier than on the server.
func onBSM(allowance time.Duration) explore.System {
	return explore.System{
		Name: "bsm/redislock", TTL: time.Second, Servers: 1, Serve: serveRedis, Greeting: 1, NoTokens: true,
		Open: func(c *explore.Client) (scenarios.Lock, error) {
			rdb := client(c, 0)
			locks := redislock.New(rdb)
			return scenarios.Adapter{
				Get: func(ctx context.Context, key string, wait bool) (scenarios.Grant, error) {
					asks := backoff{next: time.Now()}
					if wait {
						asks.every = c.TTL * 7 / 100
					}
					ctx, cancel := context.WithTimeout(ctx, time.Hour) // without a deadline, Obtain gives up after the TTL
					defer cancel()
					l, err := locks.Obtain(ctx, key, c.TTL, &redislock.Options{RetryStrategy: &asks})
					return scenarios.Grant{TTL: c.TTL, Until: asks.next.Add(c.TTL - allowance), Release: l.Release}, err
				},
				Held: redislock.ErrNotObtained, Lost: redislock.ErrLockNotHeld, Shut: rdb.Close,
			}, nil
		},
	}
}

// backoff is a redislock.RetryStrategy that knows when the last request was made.
type backoff struct {
	every time.Duration
	next  time.Time
}

func (b *backoff) NextBackoff() time.Duration {
	b.next = time.Now().Add(b.every)
	return b.every
}

func onRedsync(servers int, o ...redsync.Option) explore.System {
	return explore.System{
		Name: "redsync", TTL: time.Second, Servers: servers, Serve: serveRedis, Greeting: 1, NoTokens: true,
		Open: func(c *explore.Client) (scenarios.Lock, error) {
			var nodes []redsyncredis.Pool
			var closers []func() error
			for i := range servers {
				rdb := client(c, i)
				nodes, closers = append(nodes, goredis.NewPool(rdb)), append(closers, rdb.Close)
			}
			locks := redsync.New(nodes...)
			return owned{scenarios.Adapter{
				Get: func(ctx context.Context, key string, wait bool) (scenarios.Grant, error) {
					tries := 1
					if wait {
						tries = 1 << 30
					}
					usual := []redsync.Option{redsync.WithExpiry(c.TTL), redsync.WithTries(tries), redsync.WithRetryDelay(max(c.TTL/10, drift))}
					m := locks.NewMutex(key, append(usual, o...)...)
					err := m.LockContext(ctx)
					if _, taken := errors.AsType[*redsync.ErrTaken](err); taken {
						err = fmt.Errorf("%w: %w", dlock.ErrHeld, err)
					}
					release := func(ctx context.Context) error {
						_, err := m.UnlockContext(ctx)
						return err
					}
					renew := func(ctx context.Context) (time.Time, error) {
						_, err := m.ExtendContext(ctx)
						return m.Until(), err
					}
					return scenarios.Grant{TTL: c.TTL, Until: m.Until(), Release: release, Renew: renew}, err
				},
				Lost: redsync.ErrLockAlreadyExpired,
			}, closers}, nil
		},
	}
}
