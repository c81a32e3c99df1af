package zklock_test

import (
	"context"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"
	"github.com/google/uuid"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/zklock"
)

// BenchmarkPair compares with two writes, and with go-zookeeper's own Lock, which has no token. For many contenders see
// cmd/contend.
func BenchmarkPair(b *testing.B) {
	client := func() *zk.Conn {
		c, _, err := zk.Connect([]string{server.Addr}, 20*time.Second, zk.WithLogger(silence{}))
		require.NoError(b, err)
		b.Cleanup(c.Close)
		return c
	}
	raw, path, all := client(), "/bench-"+uuid.NewString(), zk.WorldACL(zk.PermAll)
	recipe := zk.NewLock(client(), path+"-lock", all)
	locktest.Compare(b, locktest.Pair{Name: "CreateDelete", Do: func(context.Context) error {
		if _, err := raw.Create(path, nil, zk.FlagEphemeral, all); err != nil {
			return err
		}
		return raw.Delete(path, -1)
	}}, func() dlock.Backend {
		l, err := zklock.New(client(), nil)
		require.NoError(b, err)
		return l
	}, locktest.Pair{Name: "GoZooKeeperLock", Do: func(context.Context) error {
		if err := recipe.Lock(); err != nil {
			return err
		}
		return recipe.Unlock()
	}})
}
