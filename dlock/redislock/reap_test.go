package redislock_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/redislock"
)

type reaping struct {
	*testing.T
	b      *redislock.Backend
	c      *redis.Client
	prefix string
}

func newReaping(t *testing.T) reaping {
	t.Helper()
	_, c, _ := onServer(t, server).backend(t)
	prefix := "reap[*]?/" + uuid.NewString() + ":" // not a pattern to SCAN
	return reaping{t, newBackend(t, c, &redislock.Options{Prefix: prefix}), c, prefix}
}

func (r reaping) take(key string) dlock.Grant {
	r.Helper()
	g, err := r.b.TryAcquire(r.Context(), dlock.Request{Key: key, Owner: uuid.NewString(), TTL: time.Hour})
	require.NoError(r, err)
	return g
}

func (r reaping) use(key string) uint64 {
	r.Helper()
	g := r.take(key)
	require.NoError(r, r.b.Release(r.Context(), g))
	return g.Fence
}

func (r reaping) set(key, counter string) {
	r.Helper()
	require.NoError(r, r.c.Set(r.Context(), r.prefix+"fence:{"+key+"}", counter, 0).Err())
}

func (r reaping) counter(key string) string {
	return r.c.Get(r.Context(), r.prefix+"fence:{"+key+"}").Val()
}

func (r reaping) reap(want int) {
	r.Helper()
	n, err := r.b.Reap(r.Context())
	require.NoError(r, err)
	require.EqualValues(r, want, n)
}

func TestReap(t *testing.T) {
	r := newReaping(t)
	for i := range 1200 { // several batches
		r.use(fmt.Sprint("k", i))
	}
	for range 9 {
		r.use("k7")
	}
	held := r.take("held")
	r.set("broken", "x")
	require.Equal(t, "10", r.counter("k7"))

	r.reap(1200)
	require.Equal(t, "10", r.c.Get(t.Context(), r.prefix+"fence-floor").Val(), "the greatest token of all")
	require.Equal(t, []string{"1", "x", ""}, []string{r.counter("held"), r.counter("broken"), r.counter("k7")})
	require.EqualValues(t, 11, r.use("k7"))
	require.EqualValues(t, 11, r.use("never seen"))
	require.NoError(t, r.b.Release(t.Context(), held))
	require.EqualValues(t, 2, r.take("held").Fence)
	r.b = newBackend(t, traced{r.c}, &redislock.Options{Prefix: r.prefix})
	require.EqualValues(t, 11, r.use("by a client of the user's own kind"))

	// An expired lock with a waiter.
	require.NoError(t, r.c.RPush(t.Context(), r.prefix+"queue:{k7}", "1000 wake:x somebody").Err())
	r.reap(2)
	require.Equal(t, "11", r.counter("k7"))
}

// traced is a client of the user's own kind.
type traced struct{ redis.UniversalClient }

// A script that fails halfway keeps what it has written.
func TestFloorThatIsNotANumber(t *testing.T) {
	r := newReaping(t)
	floor := r.prefix + "fence-floor"
	refused := func(bad string) {
		for range 2 {
			_, err := r.b.TryAcquire(t.Context(), dlock.Request{Key: "k", Owner: uuid.NewString(), TTL: time.Hour})
			require.ErrorContains(t, err, floor+", where counters start, is not a number", bad)
			require.Empty(t, r.counter("k"), bad)
		}
	}
	for _, bad := range []string{"20.", "", "020", "-1", "9007199254740991", "18446744073709551615"} {
		require.NoError(t, r.c.Set(t.Context(), floor, bad, 0).Err())
		refused(bad)
	}
	require.NoError(t, r.c.Set(t.Context(), floor, "abc", 0).Err())
	r.set("other", "5")
	_, err := r.b.Reap(t.Context())
	require.ErrorContains(t, err, floor+", where counters start, is not a number")
	require.NoError(t, r.c.Del(t.Context(), floor).Err())
	require.NoError(t, r.c.LPush(t.Context(), floor, 1).Err())
	refused("a list")
	require.NoError(t, r.c.Set(t.Context(), floor, 20, 0).Err())
	require.EqualValues(t, 21, r.use("k"))
}

// With a floor near the maximum, other keys would run out of tokens.
func TestReapSparesTheUsedUp(t *testing.T) {
	r := newReaping(t)
	r.set("last", "9007199254740991")
	r.set("half", "4503599627370496")
	r.use("k")
	r.reap(1)
	require.EqualValues(t, 2, r.use("new"))
	require.EqualValues(t, 4503599627370497, r.use("half"))
	_, err := r.b.TryAcquire(t.Context(), dlock.Request{Key: "last", Owner: "o", TTL: time.Hour})
	require.ErrorContains(t, err, "out of range")
}

func TestReapWhileLocksAreTaken(t *testing.T) {
	r := newReaping(t)
	var wg sync.WaitGroup
	var reaped atomic.Int64
	for i := range 4 {
		wg.Go(func() {
			for n, last := 0, uint64(0); n < 200 || reaped.Load() < 20; n++ {
				g, err := r.b.TryAcquire(t.Context(), dlock.Request{Key: fmt.Sprint("k", i), Owner: uuid.NewString(), TTL: time.Hour})
				if err == nil {
					err = r.b.Release(t.Context(), g)
				}
				if err != nil || g.Fence <= last {
					t.Errorf("token %d after %d, %v", g.Fence, last, err)
					return
				}
				last = g.Fence
			}
		})
	}
	defer wg.Wait()
	defer reaped.Add(100) // they go on until counters were reaped
	for reaped.Load() < 20 && !t.Failed() {
		n, err := r.b.Reap(t.Context())
		require.NoError(t, err)
		reaped.Add(n)
	}
}

// A user who may not read the floor gets no token from below it.
func TestReapedForUserWhoMayNotReadFloor(t *testing.T) {
	prefix := uuid.NewString() + ":"
	mute, admin := as(t, "~"+prefix+"lock:*", "~"+prefix+"fence:*", "~"+prefix+"queue:*", "&"+prefix+"wake:*", "+@all")
	_, c, _ := mute.backend(t)
	b, all := newBackend(t, c, &redislock.Options{Prefix: prefix}), newBackend(t, admin, &redislock.Options{Prefix: prefix})
	r := locktest.Request(time.Hour)
	use := func(b *redislock.Backend) (uint64, error) {
		g, err := b.TryAcquire(t.Context(), r)
		if err == nil {
			err = b.Release(t.Context(), g)
		}
		return g.Fence, err
	}
	for range 7 {
		_, err := use(all)
		require.NoError(t, err)
	}
	_, err := all.Reap(t.Context())
	require.NoError(t, err)
	for range 2 {
		_, err = use(b)
		require.ErrorContains(t, err, "NOPERM "+prefix+"fence-floor, where counters start: ")
	}
	token, err := use(all)
	require.NoError(t, err)
	require.Greater(t, token, uint64(7))
}

func TestReapWhereScriptsCannotReadTheFloor(t *testing.T) {
	for failure, invalid := range map[error]bool{
		redirect("ERR Error running script: @user_script:1: script tried accessing undeclared key"): true, io.ErrUnexpectedEOF: false,
	} {
		r := newReaping(t)
		r.use("k")
		b := newBackend(t, r.c, &redislock.Options{Prefix: r.prefix})
		// It refuses undeclared keys, as Dragonfly does, or breaks off.
		r.c.AddHook(hook(func(ctx context.Context, cmd redis.Cmder, next redis.ProcessHook) error {
			if args, floor := cmd.Args(), any(r.prefix+"fence-floor"); strings.HasPrefix(cmd.Name(), "eval") {
				n := 3 + args[2].(int)
				if slices.Contains(args[n:], floor) && !slices.Contains(args[3:n], floor) {
					cmd.SetErr(failure)
					return cmd.Err()
				}
			}
			return next(ctx, cmd)
		}))
		_, err := b.Reap(t.Context())
		require.ErrorContains(t, err, failure.Error())
		require.Equal(t, invalid, errors.Is(err, dlock.ErrInvalid), failure)
		require.Equal(t, "1", r.counter("k"), failure)
	}
}

func TestReapByUserWithoutThePermission(t *testing.T) {
	for _, c := range []struct{ may, want string }{
		{"", "a script can't read "}, {"%W~", "a script can't read "}, {"%R~", "permission"},
	} {
		prefix := uuid.NewString() + ":"
		rules := []any{"~" + prefix + "lock:*", "~" + prefix + "fence:*", "~" + prefix + "queue:*", "&*", "+@all"}
		if c.may != "" {
			rules = append(rules, c.may+prefix+"fence-floor")
		}
		s, admin := as(t, rules...)
		_, client, _ := s.backend(t)
		r := reaping{t, newBackend(t, admin, &redislock.Options{Prefix: prefix}), admin, prefix}
		r.use("k")
		_, err := newBackend(t, client, &redislock.Options{Prefix: prefix}).Reap(t.Context())
		require.ErrorContains(t, err, c.want, c.may)
		require.Equal(t, "1", r.counter("k"), c.may)
	}
}

func TestReapRefuses(t *testing.T) {
	cluster := redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{"127.0.0.1:1"}})
	_, err := newBackend(t, cluster, nil).Reap(t.Context())
	require.ErrorIs(t, err, dlock.ErrInvalid)
	require.NoError(t, cluster.Close())
}
