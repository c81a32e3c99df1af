package scenarios_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/dlock/redlock"
	"github.com/fencelab/fencelab/internal/open"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// Renewal, release and another client's acquisition at one instant of the server's clock, in every order: one millisecond before
// the lease ends, in its last millisecond, and one after.
func TestExpiryRace(t *testing.T) {
	notExternal(t)
	needLock(t, locks.Redis)
	o := options(t)
	o.Clock = true
	redis, client := ownRedis(t, o)
	b, err := redislock.New(client, nil)
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	still, err := redis.Clock.Hold(t.Context())
	require.NoError(t, err)
	defer func() { require.NoError(t, still(context.WithoutCancel(t.Context()))) }()

	const ttl = time.Hour
	for _, order := range [][]string{
		{"renew", "release", "acquire"},
		{"renew", "acquire", "release"},
		{"release", "renew", "acquire"},
		{"release", "acquire", "renew"},
		{"acquire", "renew", "release"},
		{"acquire", "release", "renew"},
	} {
		for _, at := range []time.Duration{-time.Millisecond, 0, time.Millisecond} {
			t.Run(fmt.Sprintf("%s_%s_%s at %v", order[0], order[1], order[2], at), func(t *testing.T) {
				ctx, key := t.Context(), newKey(t)
				a, err := b.TryAcquire(ctx, dlock.Request{Key: key, Owner: uuid.NewString(), TTL: ttl})
				require.NoError(t, err)
				_, err = redis.Clock.Jump(ctx, ttl+at)
				require.NoError(t, err)

				// A lease lasts until the end of its last millisecond.
				holder, last := "A", a.Fence
				if at > 0 {
					holder = ""
				}
				for _, op := range order {
					switch op {
					case "renew":
						requireOutcome(t, op, b.Renew(ctx, a), holder == "A", dlock.ErrLost)
					case "release":
						requireOutcome(t, op, b.Release(ctx, a), holder == "A", dlock.ErrLost)
						if holder == "A" {
							holder = ""
						}
					case "acquire":
						g, err := b.TryAcquire(ctx, dlock.Request{Key: key, Owner: uuid.NewString(), TTL: ttl})
						requireOutcome(t, op, err, holder == "", dlock.ErrHeld)
						if err == nil {
							require.Greater(t, g.Fence, last, "the successor's token")
							holder, last = "B", g.Fence
						}
					}
				}
			})
		}
	}
}

func requireOutcome(t *testing.T, op string, err error, works bool, otherwise error) {
	t.Helper()
	if works {
		require.NoError(t, err, op)
		return
	}
	require.ErrorIs(t, err, otherwise, op)
}

// With fast clocks on some of Redlock's nodes there may be two holders at once, but their tokens grow.
func TestClockSkew(t *testing.T) {
	notExternal(t)
	needLock(t, locks.Redlock)
	o := options(t)
	o.Clock = true
	all, err := open.Start(t.Context(), locks.Redlock, 0, o)
	testbed.Need(t, err)
	defer func() { require.NoError(t, all.Close()) }()
	nodes := all.Servers
	addrs, clients := make([]string, len(nodes)), make([]*redis.Client, len(nodes))
	for i, n := range nodes {
		addrs[i] = n.URL
		clients[i], err = redisclient.New(n.URL)
		require.NoError(t, err)
		defer func() { require.NoError(t, clients[i].Close()) }()
		still, err := n.Clock.Hold(t.Context())
		require.NoError(t, err)
		defer func() { require.NoError(t, still(context.WithoutCancel(t.Context()))) }()
	}
	b, err := locks.OpenRedlock(t.Context(), locks.Spec{Addrs: addrs}, &redlock.Options{NodeTimeout: patience})
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()

	const ttl = time.Hour
	for ahead := range len(nodes) + 1 {
		for _, by := range []time.Duration{0, ttl / 2, ttl - time.Millisecond, ttl, ttl + time.Millisecond, 2 * ttl} {
			t.Run(fmt.Sprintf("%d nodes ahead by %v", ahead, by), func(t *testing.T) {
				ctx, key := t.Context(), newKey(t)
				first, err := b.TryAcquire(ctx, dlock.Request{Key: key, Owner: uuid.NewString(), TTL: ttl})
				require.NoError(t, err)
				// A majority was enough; wait for the other votes.
				for _, c := range clients {
					require.Eventually(t, func() bool { return c.Exists(ctx, "redlock:{"+key+"}").Val() == 1 }, patience, pollInterval)
				}
				for _, n := range nodes[:ahead] {
					back, err := n.Clock.Jump(ctx, by)
					require.NoError(t, err)
					defer func() { require.NoError(t, back(ctx)) }()
				}
				// No time has passed: the first lease lasts, and a correct lock excludes others.
				second, err := b.TryAcquire(ctx, dlock.Request{Key: key, Owner: uuid.NewString(), TTL: ttl})
				if ahead < 3 || by <= ttl {
					require.ErrorIs(t, err, dlock.ErrHeld, "exclusion")
					return
				}
				require.NoError(t, err, "a majority of the nodes takes the first lease for over")
				require.Less(t, time.Since(first.Start), ttl)
				require.Greater(t, second.Fence, first.Fence)
			})
		}
	}
}
