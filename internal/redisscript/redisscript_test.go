package redisscript_test

import (
	"context"
	"io"
	"net"
	"testing"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/redisscript"
)

type wrapped struct{ redis.UniversalClient }

func TestCheck(t *testing.T) {
	ring := redis.NewRing(&redis.RingOptions{Addrs: map[string]string{"a": "127.0.0.1:1"}})
	t.Cleanup(func() { require.NoError(t, ring.Close()) })
	c := redis.NewClient(&redis.Options{Addr: "127.0.0.1:1"})
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	for _, client := range []redis.UniversalClient{ring, wrapped{ring}, &wrapped{&wrapped{ring}}, struct{ *redis.Ring }{ring}} {
		require.ErrorContains(t, redisscript.Check(client), "redis.Ring", "%T", client)
	}
	for _, o := range []*redis.Options{
		{Addr: "127.0.0.1:1", ClientSideCacheConfig: &redis.ClientSideCacheConfig{}},
		{Addr: "127.0.0.1:1", ClientSideCache: struct{ redis.Cache }{}},
	} {
		cached := redis.NewClient(o)
		t.Cleanup(func() { require.NoError(t, cached.Close()) })
		for _, client := range []redis.UniversalClient{cached, wrapped{cached}, &wrapped{cached}, struct{ *redis.Client }{cached}} {
			require.ErrorContains(t, redisscript.Check(client), "old records", "%T", client)
		}
	}
	for _, client := range []redis.UniversalClient{nil, c, wrapped{c}, &wrapped{}, redisscript.Once{UniversalClient: c}} {
		require.NoError(t, redisscript.Check(client), "%T", client)
	}
}

func TestOnce(t *testing.T) {
	dialed := 0
	c := redis.NewClient(&redis.Options{
		Addr: "127.0.0.1:1", DialerRetries: 1, MaxRetries: 5, MinRetryBackoff: -1,
		Dialer: func(context.Context, string, string) (net.Conn, error) {
			dialed++
			return nil, io.EOF
		},
	})
	t.Cleanup(func() { require.NoError(t, c.Close()) })
	require.Error(t, c.EvalSha(t.Context(), "", nil).Err())
	require.Equal(t, 6, dialed)
	dialed = 0
	require.Error(t, redisscript.Once{UniversalClient: c}.EvalSha(t.Context(), "", []string{"k"}).Err())
	require.Equal(t, 1, dialed)
	require.Error(t, redisscript.Once{UniversalClient: c}.Eval(t.Context(), "", []string{"k"}).Err())
	require.Equal(t, 2, dialed)
}
