package explore_test

import (
	"context"
	"errors"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/explore"
)

type defect string

const (
	none          defect = ""
	getThenDel    defect = "releases by GET, then DEL"
	releaseAny    defect = "releases whoever holds it"
	getThenSet    defect = "takes the lock by GET, then SET"
	fromReply     defect = "counts the lease from the reply"
	tokenFromTime defect = "takes tokens from the server's clock"
	noExpiry      defect = "sets no expiry"
	slow          defect = "polls every three TTLs"
	oneWaiter     defect = "forgets all waiters but the first"
	renewAny      defect = "renews it whoever holds it"
	hidesLoss     defect = "hides that a lease was lost when it is released"
)

// naive is a lock on one Redis as it is often written: SET NX PX, a counter, and polling.
type naive struct {
	*redis.Client
	is  defect
	gap func() error // see explore.Client
}

var (
	naiveAcquire = redis.NewScript(`if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return redis.call('INCR', KEYS[2]) end return 0`)
	naiveRelease = redis.NewScript(`if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0`)
	naiveRenew   = redis.NewScript(`if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0`)
)

func (n naive) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	g := dlock.Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL, Start: time.Now()}
	if n.is == noExpiry {
		r.TTL *= 1000
	}
	var token int64
	var err error
	if n.is == getThenSet {
		err = n.Get(ctx, r.Key).Err()
		if err == nil {
			return g, dlock.ErrHeld
		}
		if errors.Is(err, redis.Nil) {
			err = n.Set(ctx, r.Key, r.Owner, r.TTL).Err()
		}
		if err == nil {
			token, err = n.Incr(ctx, "fence").Result()
		}
	} else {
		token, err = naiveAcquire.Run(ctx, n, []string{r.Key, "fence"}, r.Owner, r.TTL.Milliseconds()).Int64()
	}
	switch {
	case err != nil:
		return g, err
	case token == 0:
		return g, dlock.ErrHeld
	}
	switch n.is {
	case tokenFromTime:
		var now time.Time
		now, err = n.Time(ctx).Result()
		token = now.UnixMilli() / 100
	case fromReply:
		g.Start = time.Now()
	default:
	}
	g.Fence = uint64(token)
	return g, err
}

func (n naive) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	for {
		g, err := n.TryAcquire(ctx, r)
		if !errors.Is(err, dlock.ErrHeld) {
			return g, err
		}
		r.NoteHeld()
		if n.is == oneWaiter {
			if first, err := n.SetNX(ctx, "waiter", r.Owner, r.TTL).Result(); err == nil && !first && n.Get(ctx, "waiter").Val() != r.Owner {
				<-ctx.Done()
				return g, ctx.Err()
			}
		}
		pause := max(10*time.Millisecond, min(r.TTL, time.Second)/20) // a holder's TTL may be shorter
		if n.is == slow {
			pause = 3 * r.TTL
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return g, ctx.Err()
		}
	}
}

func lost(changed int64, err error) error {
	if err == nil && changed == 0 {
		return dlock.ErrLost
	}
	return err
}

func (n naive) pause() error {
	if n.gap == nil {
		return nil
	}
	return n.gap()
}

// takeAway deletes the lock after the gap, and returns whose it was.
func (n naive) takeAway(ctx context.Context, g dlock.Grant) error {
	if err := n.pause(); err != nil {
		return err
	}
	owner, err := n.GetDel(ctx, g.Key).Result()
	switch {
	case errors.Is(err, redis.Nil):
		return dlock.ErrLost
	case err == nil && owner != g.Owner:
		return dlock.ErrForeignRelease
	}
	return err
}

func (n naive) Renew(ctx context.Context, g dlock.Grant) error {
	if n.is == renewAny {
		return n.PExpire(ctx, g.Key, g.TTL).Err()
	}
	return lost(naiveRenew.Run(ctx, n, []string{g.Key}, g.Owner, g.TTL.Milliseconds()).Int64())
}

func (n naive) Release(ctx context.Context, g dlock.Grant) error {
	switch n.is {
	case releaseAny:
		return lost(n.Del(ctx, g.Key).Result())
	case getThenDel:
		owner, err := n.Get(ctx, g.Key).Result()
		if errors.Is(err, redis.Nil) || err == nil && owner != g.Owner {
			return dlock.ErrLost
		}
		if err != nil {
			return err
		}
		return n.takeAway(ctx, g)
	case none: // a lock with one request stops before it
		if err := n.pause(); err != nil {
			return err
		}
	case hidesLoss:
		return naiveRelease.Run(ctx, n, []string{g.Key}, g.Owner).Err()
	default:
	}
	return lost(naiveRelease.Run(ctx, n, []string{g.Key}, g.Owner).Int64())
}

func onNaive(is defect) explore.System {
	return explore.System{
		Name: "naive " + string(is), TTL: time.Second, Servers: 1, Serve: serveRedis, Greeting: 1, Gap: is == getThenDel || is == none,
		Open: func(c *explore.Client) (scenarios.Lock, error) {
			n := naive{client(c, 0), is, c.Gap}
			return locker(c, n, plain)
		},
	}
}
