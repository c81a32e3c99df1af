package scenarios_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/dlock/redlock"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// Renewal, release, another's acquisition and the lease's end meet in one instant of the server's clock, which stands still:
// in every order, one millisecond before the lease ends, at its last one, and one after.
func TestExpiryRace(t *testing.T) {
	notExternal(t)
	if len(locksOf(scenarios.Scenario{Locks: []string{locks.Redis}})) == 0 {
		t.Skip("-backend asks for other locks")
	}
	o := options(t)
	o.Clock = true
	redis, err := testbed.StartRedis(t.Context(), o)
	testbed.Need(t, err)
	defer func() { require.NoError(t, redis.Close()) }()
	client, err := redisclient.New(redis.URL)
	require.NoError(t, err)
	defer func() { require.NoError(t, client.Close()) }()
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

				// What must come of it: a lease is good to the end of its last millisecond.
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

// TestClockSkew lets the clocks of some of Redlock's nodes run ahead. Two holders at once are a matter of how many and how
// far; what becomes of the data is not, where the resource looks at the token.
func TestClockSkew(t *testing.T) {
	notExternal(t)
	if len(locksOf(scenarios.Scenario{Locks: []string{locks.Redlock}})) == 0 {
		t.Skip("-backend asks for other locks")
	}
	o := options(t)
	o.Clock = true
	nodes, err := testbed.StartRedisNodes(t.Context(), 5, o)
	testbed.Need(t, err)
	defer func() { require.NoError(t, on(nodes...).Close()) }()
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
	for ahead := range len(nodes) + 1 { // nodes whose clocks are fast
		for _, by := range []time.Duration{0, ttl / 2, ttl - time.Millisecond, ttl, ttl + time.Millisecond, 2 * ttl} {
			t.Run(fmt.Sprintf("%d nodes ahead by %v", ahead, by), func(t *testing.T) {
				ctx, key := t.Context(), newKey(t)
				first, err := b.TryAcquire(ctx, dlock.Request{Key: key, Owner: uuid.NewString(), TTL: ttl})
				require.NoError(t, err)
				// The lock was had with a majority of the votes; the others are still on their way.
				for _, c := range clients {
					require.Eventually(t, func() bool { return c.Exists(ctx, "redlock:{"+key+"}").Val() == 1 }, patience, look)
				}
				for _, n := range nodes[:ahead] {
					back, err := n.Clock.Jump(ctx, by)
					require.NoError(t, err)
					defer func() { require.NoError(t, back(ctx)) }()
				}
				// No time has passed: the first holder's lease is good, and a lock that keeps its word keeps others out.
				second, err := b.TryAcquire(ctx, dlock.Request{Key: key, Owner: uuid.NewString(), TTL: ttl})
				if ahead < 3 || by <= ttl {
					require.ErrorIs(t, err, dlock.ErrHeld, "exclusion")
					return
				}
				require.NoError(t, err, "a majority of the nodes takes the first lease for over")
				require.Less(t, time.Since(first.Start), ttl)
				requireFenced(t, first, second)
			})
		}
	}
}

// requireFenced has two holders at once work on one resource, each from before the other's write.
func requireFenced(t *testing.T, first, second dlock.Grant) {
	t.Helper()
	ctx, store := t.Context(), resource.NewMemory()
	for _, g := range []dlock.Grant{first, second} {
		_, err := store.ReadFenced(ctx, g.Key, g.Fence)
		require.True(t, err == nil || errors.Is(err, resource.ErrNotFound), "%v", err)
	}
	require.NoError(t, store.Write(ctx, second.Key, resource.Fence{Token: second.Fence, Seq: 1}, []byte("second")))
	var stale *resource.StaleTokenError
	require.ErrorAs(t, store.Write(ctx, first.Key, resource.Fence{Token: first.Fence, Seq: 1}, []byte("first")), &stale)
	rec, err := store.Read(ctx, second.Key)
	require.NoError(t, err)
	require.Equal(t, "second", string(rec.Value))
}
