package redisstore_test

import (
	"context"
	"errors"
	"testing"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource/internal/storebench"
	"github.com/fencelab/fencelab/resource/redisstore"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// go test -run '^$' -bench . ./resource/redisstore

// onServers has a Redis that answers from memory, and one that waits for its disk.
func onServers(b *testing.B, run func(b *testing.B, ways []storebench.Way)) {
	b.Helper()
	for _, store := range []struct {
		name string
		args []string
	}{{"redis-memory", nil}, {"redis-fsync", durable}} {
		b.Run("store="+store.name, func(b *testing.B) {
			server := server
			if store.args != nil {
				s, err := testbed.StartRedis(context.Background(), &testbed.Options{Args: store.args})
				if errors.Is(err, errors.ErrUnsupported) {
					b.Skip(err)
				}
				require.NoError(b, err)
				b.Cleanup(func() { require.NoError(b, s.Close()) })
				server = s
			}
			o, err := redis.ParseURL(server.URL)
			require.NoError(b, err)
			o.PoolSize = 128
			c := redis.NewClient(o)
			b.Cleanup(func() { require.NoError(b, c.Close()) })
			prefix, value := uuid.NewString()+"/", make([]byte, 128)
			s, err := redisstore.New(c, &redisstore.Options{Prefix: prefix})
			require.NoError(b, err)
			hset := storebench.Way{Name: "hset", Write: func(ctx context.Context, key string, token uint64) error {
				return c.HSet(ctx, prefix+key, "token", token, "seq", 1, "value", value).Err()
			}}
			ways := append([]storebench.Way{hset}, storebench.Ways(s, value, nil)...)
			ways[1].Against, ways[2].Against = hset.Name, hset.Name
			run(b, ways)
		})
	}
}

func BenchmarkFenceCheck(b *testing.B) { onServers(b, storebench.FenceCheck) }

func BenchmarkWriters(b *testing.B) { onServers(b, storebench.Writers) }
