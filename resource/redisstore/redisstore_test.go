package redisstore_test

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"net"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/internal/eachcall"
	"github.com/fencelab/fencelab/resource/redisstore"
	"github.com/fencelab/fencelab/resource/storetest"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func start(t *testing.T, args ...string) *testbed.Server {
	t.Helper()
	return testmain.Own(t, testbed.StartRedis, &testbed.Options{Args: args})
}

func newClient(t *testing.T, s *testbed.Server, set ...func(*redis.Options)) *redis.Client {
	t.Helper()
	o, err := redis.ParseURL(s.URL)
	require.NoError(t, err)
	o.ContextTimeoutEnabled = true
	o.ReadTimeout = -1 // none: calls may be delayed for any time
	for _, f := range set {
		f(o)
	}
	c := redis.NewClient(o)
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	return c
}

func TestNoRoom(t *testing.T) {
	server := start(t, "--maxmemory-policy", "noeviction")
	testbed.Need(t, server.Real())
	c, ctx := newClient(t, server), t.Context()
	s := newStore(t, c)
	require.NoError(t, s.Write(ctx, "k", at(1), nil))
	require.NoError(t, c.ConfigSet(ctx, "maxmemory", "1").Err())
	for name, call := range eachcall.Of(s, "k", at(2)) {
		require.Equal(t, name != "Read", errors.Is(call(ctx), resource.ErrNoRoom), name)
	}
}

func newStore(t *testing.T, c redis.UniversalClient) *redisstore.Store {
	t.Helper()
	s, err := redisstore.New(c, &redisstore.Options{Prefix: uuid.NewString() + "/"})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func at(token uint64) resource.Fence { return resource.Fence{Token: token, Seq: 1} }

// Reopen kills a durable Redis.
func TestStore(t *testing.T) {
	s := start(t, durable...)
	var prefix string
	open := func() (resource.Store, error) {
		return redisstore.New(newClient(t, s), &redisstore.Options{Prefix: prefix})
	}
	storetest.Run(t, storetest.Harness{
		New: func() (resource.Store, error) {
			prefix = uuid.NewString() + "/"
			return open()
		},
		Reopen: func(store resource.Store) (resource.Store, error) {
			err := errors.Join(store.Close(), s.Kill(t.Context()))
			if err != nil {
				return nil, err
			}
			if err := s.Restart(t.Context()); err != nil {
				return nil, err
			}
			return open()
		},
		Another: open,
	})
}

func TestStoreOnMiniredis(t *testing.T) {
	storetest.Run(t, harness(newClient(t, &testbed.Server{URL: "redis://" + miniredis.RunT(t).Addr()})))
}

func harness(c redis.UniversalClient) storetest.Harness {
	var prefix string
	open := func() (resource.Store, error) { return redisstore.New(c, &redisstore.Options{Prefix: prefix}) }
	return storetest.Harness{
		New: func() (resource.Store, error) {
			prefix = uuid.NewString() + "/"
			return open()
		},
		Another: open,
	}
}

func TestCluster(t *testing.T) {
	s := start(t, "--cluster-enabled", "yes")
	c := newClient(t, s)
	require.NoError(t, c.ClusterAddSlotsRange(t.Context(), 0, 16383).Err())
	require.Eventually(t, func() bool {
		return c.Set(t.Context(), "any", "", 0).Err() == nil
	}, 30*time.Second, 10*time.Millisecond)
	cluster := redis.NewClusterClient(&redis.ClusterOptions{
		ClusterSlots: func(context.Context) ([]redis.ClusterSlot, error) { // not the node's own address
			return []redis.ClusterSlot{{Start: 0, End: 16383, Nodes: []redis.ClusterNode{{Addr: s.Addr}}}}, nil
		},
	})
	t.Cleanup(func() { require.NoError(t, cluster.Close()) })
	storetest.Run(t, harness(cluster))
}

func TestNewRefuses(t *testing.T) {
	_, err := redisstore.New(nil, nil)
	require.ErrorContains(t, err, "client is nil")
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	t.Cleanup(func() { require.NoError(t, ring.Close()) })
	_, err = redisstore.New(ring, nil)
	require.ErrorContains(t, err, "use a redis.Client or a redis.ClusterClient")
	for _, p := range []string{"{", "a}"} {
		_, err := redisstore.New(newClient(t, server), &redisstore.Options{Prefix: p})
		require.ErrorContains(t, err, "brace")
	}
}

func TestRecord(t *testing.T) {
	c, ctx, key := newClient(t, server), t.Context(), uuid.NewString()
	s, err := redisstore.New(c, nil)
	require.NoError(t, err)
	require.NoError(t, s.Write(ctx, key, resource.Fence{Token: math.MaxUint64, Seq: 2}, []byte("v")))
	fields, err := c.HGetAll(ctx, "resource:{"+key+"}").Result()
	require.NoError(t, err)
	require.Equal(t, map[string]string{"token": "18446744073709551615", "seq": "2", "value": "v"}, fields)

	for name, args := range map[string][]any{
		"a list":           {"RPUSH", "token", "1"},
		"a negative token": {"HSET", "token", "-1", "seq", "1"},
		"a large token":    {"HSET", "token", "99999999999999999999", "seq", "1"},
		"only a token":     {"HSET", "token", "1"},
		"only a seq":       {"HSET", "seq", "1"},
		"no token":         {"HSET", "value", "v"},
		"no seq":           {"HSET", "token", "1", "value", "v"},
	} {
		key := uuid.NewString()
		require.NoError(t, c.Do(ctx, append([]any{args[0], "resource:{" + key + "}"}, args[1:]...)...).Err())
		_, err := s.Read(ctx, key)
		require.Error(t, err, name)
		require.NotErrorIs(t, err, resource.ErrNotFound, name)
		err = s.Write(ctx, key, at(5), nil)
		require.Error(t, err, name)
		_, stale := errors.AsType[*resource.StaleTokenError](err)
		require.False(t, stale, name)
		_, err = s.ReadFenced(ctx, key, at(5))
		require.Error(t, err, name)
		require.NotContains(t, err.Error(), "the script returned", name)
	}
}

// Check and effect must be atomic.
func TestOneCommand(t *testing.T) {
	c, ctx := newClient(t, server), t.Context()
	s := newStore(t, c)
	_, err := s.ReadFenced(ctx, "warm", resource.Fence{Token: 1})
	require.NoError(t, errors.Join(err, s.Write(ctx, "warm", at(1), nil), s.Overwrite(ctx, "warm", at(1), nil)))
	seen := &commands{}
	c.AddHook(seen)
	for _, f := range []resource.Fence{at(2), at(2), at(1), at(3)} {
		_ = s.Write(ctx, "k", f, nil)
		_, _ = s.ReadFenced(ctx, "k", resource.Fence{Token: f.Token})
		_ = s.Overwrite(ctx, "k", f, nil)
		_, _ = s.Read(ctx, "k")
		require.Equal(t, []string{"evalsha", "evalsha", "evalsha", "hmget"}, seen.names)
		seen.names = nil
	}
}

type commands struct{ names []string }

func (*commands) DialHook(next redis.DialHook) redis.DialHook { return next }

func (c *commands) ProcessHook(next redis.ProcessHook) redis.ProcessHook {
	return func(ctx context.Context, cmd redis.Cmder) error {
		c.names = append(c.names, cmd.Name())
		return next(ctx, cmd)
	}
}

func (c *commands) ProcessPipelineHook(next redis.ProcessPipelineHook) redis.ProcessPipelineHook {
	return func(ctx context.Context, cmds []redis.Cmder) error {
		c.names = append(c.names, "pipeline")
		return next(ctx, cmds)
	}
}

func TestAnswerLost(t *testing.T) {
	for _, applied := range []bool{false, true} {
		d := dlocktest.NewDialer(new(net.Dialer).DialContext, func(b []byte) bool { return bytes.Contains(b, []byte("evalsha")) })
		s, ctx := newStore(t, newClient(t, server, func(o *redis.Options) { o.Dialer, o.MaxRetries = d.DialContext, 3 })), t.Context()
		require.NoError(t, s.Write(ctx, "warm", at(1), nil), "the script is known to the server")
		heal := d.Link().LoseRequests()
		if applied {
			d.LoseReply()
		}
		require.ErrorIs(t, s.Write(ctx, "k", at(5), []byte("v")), io.EOF)
		require.Equal(t, 1, d.Lost(), "attempts")
		heal()
		err := s.Write(ctx, "k", at(5), []byte("v"))
		require.Equal(t, applied, errors.Is(err, resource.ErrApplied), "%v", err)
		require.Equal(t, !applied, err == nil, "%v", err)

		d.LoseReply()
		rec, err := s.ReadFenced(ctx, "k", resource.Fence{Token: 6})
		require.NoError(t, err)
		require.Equal(t, resource.Record{Value: []byte("v"), MaxFence: resource.Fence{Token: 6}}, rec)
		require.Equal(t, 2, d.Lost())

		d.LoseReply()
		require.ErrorIs(t, s.Overwrite(ctx, "k", at(7), nil), io.EOF)
		require.Equal(t, 3, d.Lost())
	}
}

var errOver = errors.New("the lease is lost")

func TestSilent(t *testing.T) {
	for name := range eachcall.Of(newStore(t, newClient(t, server)), "k", at(1)) {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithCancelCause(t.Context())
			d := dlocktest.NewDialer(new(net.Dialer).DialContext, func(request []byte) bool {
				sent := bytes.Contains(request, []byte("resource:{k}"))
				if sent {
					cancel(errOver)
				}
				return sent
			})
			s := newStore(t, newClient(t, server, func(o *redis.Options) { o.Dialer = d.DialContext }))
			defer d.Link().HoldReplies()()
			ended := make(chan error, 1)
			go func() { ended <- eachcall.Of(s, "k", at(1))[name](ctx) }()
			select {
			case err := <-ended:
				require.ErrorIs(t, err, errOver)
				require.EqualError(t, err, "redisstore: the lease is lost (the operation may still take effect)")
			case <-time.After(10 * time.Second):
				require.Fail(t, "it waits for Redis")
			}
			require.NoError(t, s.Close())
		})
	}
}

// A write whose ctx has ended is still being sent while its caller reuses the value.
func TestValueOutlivesCall(t *testing.T) {
	for _, write := range []func(*redisstore.Store, context.Context, string, resource.Fence, []byte) error{
		(*redisstore.Store).Write, (*redisstore.Store).Overwrite,
	} {
		ctx, cancel := context.WithCancelCause(t.Context())
		proceed := make(chan struct{})
		d := dlocktest.NewDialer(new(net.Dialer).DialContext, func(request []byte) bool {
			if bytes.Contains(request, []byte("resource:{k}")) {
				cancel(errOver)
				<-proceed
			}
			return false
		})
		s := newStore(t, newClient(t, server, func(o *redis.Options) { o.Dialer = d.DialContext }))
		require.NoError(t, write(s, t.Context(), "warm", at(1), nil), "the script is known to the server")
		value := bytes.Repeat([]byte("v"), 1<<20) // more than go-redis buffers
		require.ErrorIs(t, write(s, ctx, "k", at(1), value), errOver)
		clear(value)
		close(proceed)
		var got resource.Record
		require.Eventually(t, func() (arrived bool) {
			var err error
			got, err = s.Read(t.Context(), "k")
			return err == nil
		}, 10*time.Second, time.Millisecond)
		require.True(t, bytes.Equal(bytes.Repeat([]byte("v"), 1<<20), got.Value), "the value is torn")
	}
}

// TestCommands runs the commands in SetFence's comment.
func TestCommands(t *testing.T) {
	c, ctx := newClient(t, server), t.Context()
	s, err := redisstore.New(c, nil)
	require.NoError(t, err)
	require.NoError(t, c.Del(ctx, "resource:{acme}").Err())
	require.NoError(t, s.Write(ctx, "acme", at(math.MaxUint64), []byte("v")))
	source, err := os.ReadFile("redisstore.go")
	require.NoError(t, err)
	var replies []any
	for _, m := range regexp.MustCompile("(?m)^//\tredis-cli (.*)$").FindAllStringSubmatch(string(source), -1) {
		var args []any
		for word := range strings.FieldsSeq(m[1]) {
			args = append(args, strings.Trim(word, "'"))
		}
		reply, err := c.Do(ctx, args...).Result()
		require.NoError(t, err)
		replies = append(replies, reply)
	}
	require.Equal(t, []any{[]any{"18446744073709551615", "1"}, int64(0)}, replies)
	rec, err := s.Read(ctx, "acme")
	require.NoError(t, err)
	require.Equal(t, resource.Record{Value: []byte("v"), MaxFence: resource.Fence{Token: 7}}, rec)
	require.NoError(t, s.Write(ctx, "acme", at(7), []byte("v")))
}
