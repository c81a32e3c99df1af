package cas_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource/cas"
)

func newRedis(tb testing.TB, set ...func(*redis.Options)) cas.Redis {
	tb.Helper()
	o, err := redis.ParseURL(redisServer.URL)
	require.NoError(tb, err)
	o.ContextTimeoutEnabled = true
	o.ReadTimeout = -1 // none: swaps aren't repeated, so a stall of the machine would fail the test
	for _, f := range set {
		f(o)
	}
	c := redis.NewClient(o)
	tb.Cleanup(func() { require.NoError(tb, c.Close()) })
	return cas.Redis{Client: c}
}

func newPostgres(tb testing.TB, set ...func(*pgxpool.Config)) cas.Postgres {
	tb.Helper()
	return cas.Postgres{Pool: testmain.Pool(tb, postgresServer, set...)}
}

// onStores runs test on Redis, and on PostgreSQL at each isolation level and with values as text.
func onStores(t *testing.T, test func(t *testing.T, s cas.Store)) {
	t.Helper()
	t.Run("redis", func(t *testing.T) { test(t, newRedis(t)) })
	for _, level := range []string{"read committed", "repeatable read", "serializable"} {
		t.Run("postgres/"+level, func(t *testing.T) {
			test(t, newPostgres(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["default_transaction_isolation"] = level }))
		})
	}
	t.Run("postgres/text", func(t *testing.T) {
		test(t, newPostgres(t, func(c *pgxpool.Config) {
			c.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeSimpleProtocol
			c.ConnConfig.RuntimeParams["bytea_output"] = "escape"
		}))
	})
}

func newKey() string { return "test/" + uuid.NewString() }

func TestSwap(t *testing.T) {
	onStores(t, func(t *testing.T, s cas.Store) {
		ctx, key := t.Context(), newKey()
		holds := func(want []byte, wantVersion int64) {
			t.Helper()
			value, version, err := s.Get(ctx, key)
			require.NoError(t, err)
			require.Equal(t, want, value)
			require.Equal(t, wantVersion, version)
		}
		holds(nil, 0)
		require.ErrorIs(t, s.Swap(ctx, key, 1, []byte("a")), cas.ErrConflict)
		holds(nil, 0)
		require.NoError(t, s.Swap(ctx, key, 0, []byte("a")))
		holds([]byte("a"), 1)
		for _, version := range []int64{0, 2} {
			require.ErrorIs(t, s.Swap(ctx, key, version, []byte("b")), cas.ErrConflict)
		}
		holds([]byte("a"), 1)
		require.NoError(t, s.Swap(ctx, key, 1, nil))
		holds([]byte{}, 2)
		require.NoError(t, s.Swap(ctx, key, 2, []byte("a\x00\xff")))
		holds([]byte("a\x00\xff"), 3)

		require.ErrorContains(t, s.Swap(ctx, key, -1, nil), "versions start at 0")
		require.ErrorContains(t, s.Swap(ctx, "", 0, nil), "key is empty")
		_, _, err := s.Get(ctx, "")
		require.ErrorContains(t, err, "key is empty")
	})

	failing := newPostgres(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["default_transaction_read_only"] = "on" })
	for _, version := range []int64{0, 1} {
		err := failing.Swap(t.Context(), newKey(), version, nil)
		require.ErrorContains(t, err, "25006")
		require.NotErrorIs(t, err, cas.ErrConflict, "Update would try for ever")
	}
}

func TestValueThatCouldNotBeRead(t *testing.T) {
	err := cas.Postgres{}.Swap(t.Context(), "k", 0, make([]byte, 256<<20+1))
	require.ErrorContains(t, err, "at most 268435456 are allowed")
}

// Once ctx ends, the server commits without a standby.
func TestMissingStandby(t *testing.T) {
	server := testmain.ServeNoStandby(t, prepare)
	for name, set := range map[string]func(*pgxpool.Config){"closes": func(*pgxpool.Config) {}, "cancels": testmain.Cancels} {
		t.Run(name, func(t *testing.T) {
			s, key := cas.Postgres{Pool: testmain.Pool(t, server.Server, set)}, newKey()
			err := server.Cut(t, func(ctx context.Context) error { return s.Swap(ctx, key, 0, []byte("v")) })
			require.ErrorIs(t, err, context.Canceled)
			require.ErrorContains(t, err, "(the operation may still take effect)")
			err = server.Cut(t, func(ctx context.Context) error { // as Update's comment says
				_, err := cas.Update(ctx, s, key, func(value []byte) ([]byte, error) {
					require.Equal(t, "v", string(value))
					return value, nil
				}, nil)
				return err
			})
			require.ErrorIs(t, err, testmain.ErrCut)
		})
	}
}

func TestRingRefused(t *testing.T) {
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	t.Cleanup(func() { require.NoError(t, ring.Close()) })
	const want = "use a redis.Client or a redis.ClusterClient"
	_, _, err := cas.Redis{Client: ring}.Get(t.Context(), "k")
	require.ErrorContains(t, err, want)
	require.ErrorContains(t, cas.Redis{Client: ring}.Swap(t.Context(), "k", 0, nil), want)
}

func TestDamagedRecord(t *testing.T) {
	s := newRedis(t)
	for _, fields := range [][]any{{"version", "1"}, {"value", "v"}, {"version", "x", "value", "v"}} {
		key := newKey()
		require.NoError(t, s.Client.HSet(t.Context(), "cas:{"+key+"}", fields...).Err())
		_, _, err := s.Get(t.Context(), key)
		require.ErrorContains(t, err, "is damaged", "%q", fields)
	}
}

// As doubles the versions would be equal.
func TestLargeVersion(t *testing.T) {
	s, key, ctx := newRedis(t), newKey(), t.Context()
	require.NoError(t, s.Client.HSet(ctx, "cas:{"+key+"}", "version", 1<<53+1, "value", "v").Err())
	require.ErrorIs(t, s.Swap(ctx, key, 1<<53, nil), cas.ErrConflict)
	require.NoError(t, s.Swap(ctx, key, 1<<53+1, nil))
}

// conflicts is a store whose first swaps conflict.
type conflicts struct{ left int }

func (*conflicts) Get(context.Context, string) ([]byte, int64, error) { return nil, 0, nil }

func (c *conflicts) Swap(context.Context, string, int64, []byte) error {
	if c.left--; c.left >= 0 {
		return cas.ErrConflict
	}
	return nil
}

// The longest of many random waits is near the limit.
func TestBackoff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var longest [9]time.Duration
		for range 200 {
			tries, last := 0, time.Now()
			_, err := cas.Update(t.Context(), &conflicts{len(longest)}, "k", func([]byte) ([]byte, error) {
				if tries++; tries > 1 {
					longest[tries-2] = max(longest[tries-2], time.Since(last))
				}
				last = time.Now()
				return nil, nil
			}, &cas.Options{Backoff: time.Second})
			require.NoError(t, err)
		}
		for i, got := range longest {
			limit := time.Second << min(i, 6)
			require.Less(t, got, limit, "wait %d", i)
			require.Greater(t, got, limit/2, "wait %d", i)
		}
	})
}

func TestConcurrent(t *testing.T) {
	onStores(t, func(t *testing.T, s cas.Store) {
		const writers, each = 16, 8
		key := newKey()
		var wg sync.WaitGroup
		for i := range writers {
			wg.Go(func() {
				for range each {
					if _, err := cas.Update(t.Context(), s, key, addOne, &cas.Options{Backoff: time.Duration(i%2) * time.Millisecond}); err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		value, version, err := s.Get(t.Context(), key)
		require.NoError(t, err)
		require.Equal(t, strconv.Itoa(writers*each), string(value))
		require.EqualValues(t, writers*each, version)
	})
}

func addOne(value []byte) ([]byte, error) {
	n := 0
	if len(value) > 0 {
		var err error
		if n, err = strconv.Atoi(string(value)); err != nil {
			return nil, err
		}
	}
	return strconv.AppendInt(nil, int64(n)+1, 10), nil
}

type ending struct {
	cas.Store
	do  func(ctx context.Context, key string, version int64, value []byte) error
	err error
}

func (e ending) Swap(ctx context.Context, key string, version int64, value []byte) error {
	return errors.Join(e.do(ctx, key, version, value), e.err)
}

func TestUpdateEnds(t *testing.T) {
	s, key := newRedis(t), newKey()
	bad := errors.New("no funds")
	tries, err := cas.Update(t.Context(), s, key, func([]byte) ([]byte, error) { return nil, bad }, nil)
	require.Equal(t, bad, err, "as change has it")
	require.Equal(t, 1, tries)

	cut := errors.New("the connection was cut")
	tries, err = cas.Update(t.Context(), ending{s, s.Swap, cut}, key, func(value []byte) ([]byte, error) {
		if value != nil {
			return nil, errors.New("tried again")
		}
		return addOne(value)
	}, nil)
	require.ErrorIs(t, err, cut, "and isn't tried again: it may have taken effect")
	require.Equal(t, 1, tries)
	value, _, err := s.Get(t.Context(), key)
	require.NoError(t, err)
	require.Equal(t, "1", string(value))

	over := errors.New("over")
	for _, opts := range []*cas.Options{nil, {Backoff: time.Hour}} {
		ctx, cancel := context.WithCancelCause(t.Context())
		ends := func(context.Context, string, int64, []byte) error {
			cancel(over)
			return nil
		}
		tries, err = cas.Update(ctx, ending{s, ends, cas.ErrConflict}, key, addOne, opts)
		require.ErrorIs(t, err, over)
		require.Equal(t, 1, tries)
		tries, err = cas.Update(ctx, &conflicts{}, key, addOne, opts)
		require.ErrorIs(t, err, over)
		require.Zero(t, tries)
	}

	_, err = cas.Update(t.Context(), s, "", addOne, nil)
	require.ErrorContains(t, err, "key is empty")
	_, err = cas.Update(t.Context(), s, key, addOne, &cas.Options{Backoff: -1})
	require.ErrorContains(t, err, "must not be negative")
}

// The ctx has no deadline. A swap may still be sent later, with the value that it had.
func TestSilent(t *testing.T) {
	over := errors.New("over")
	silent := func(call func(ctx context.Context, s cas.Redis, key string) error) (cas.Redis, string) {
		ctx, cancel := context.WithCancelCause(t.Context())
		key, proceed := newKey(), make(chan struct{})
		defer close(proceed)
		d := dlocktest.NewDialer(new(net.Dialer).DialContext, func(request []byte) bool {
			if strings.Contains(string(request), key) {
				cancel(over)
				<-proceed
			}
			return false
		})
		s := newRedis(t, func(o *redis.Options) { o.Dialer = d.DialContext })
		require.ErrorIs(t, s.Swap(t.Context(), newKey(), 1, nil), cas.ErrConflict, "the server knows the script then")
		ended := make(chan error, 1)
		go func() { ended <- call(ctx, s, key) }()
		select {
		case err := <-ended:
			require.ErrorIs(t, err, over)
		case <-time.After(10 * time.Second):
			require.Fail(t, "it waits for Redis")
		}
		return s, key
	}
	silent(func(ctx context.Context, s cas.Redis, key string) error { _, _, err := s.Get(ctx, key); return err })
	s, key := silent(func(ctx context.Context, s cas.Redis, key string) error {
		value := bytes.Repeat([]byte("v"), 1<<20) // more than go-redis buffers
		defer clear(value)
		return s.Swap(ctx, key, 0, value)
	})
	var got []byte
	require.Eventually(t, func() bool {
		var version int64
		var err error
		got, version, err = s.Get(t.Context(), key)
		return err == nil && version == 1
	}, 10*time.Second, time.Millisecond)
	require.True(t, bytes.Equal(bytes.Repeat([]byte("v"), 1<<20), got), "the value is torn")
}

// A retried swap would conflict with itself.
func TestReplyLost(t *testing.T) {
	d := dlocktest.NewDialer(new(net.Dialer).DialContext, dlocktest.RedisScripts)
	s := newRedis(t, func(o *redis.Options) { o.Dialer, o.MaxRetries = d.DialContext, 3 })
	key := newKey()
	require.ErrorIs(t, s.Swap(t.Context(), key, 1, nil), cas.ErrConflict, "the server knows the script then")
	d.LoseReply()
	tries, err := cas.Update(t.Context(), s, key, addOne, nil)
	require.ErrorIs(t, err, io.EOF)
	require.Equal(t, 1, tries)
	require.Equal(t, 1, d.Lost())
	value, version, err := s.Get(t.Context(), key)
	require.NoError(t, err)
	require.Equal(t, "1", string(value))
	require.EqualValues(t, 1, version)
}
