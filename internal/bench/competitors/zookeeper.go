package competitors

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelab/fencelab/internal/bench/load"
)

// openZKLock: a zk.Lock for each acquisition, on one session.
func openZKLock(s Spec) (load.Lock, error) {
	conn, _, err := zk.Connect(s.Addrs, max(2*s.TTL, 10*time.Second), zk.WithLogger(silent{}), zk.WithDialer(s.spec().ZKDialer()))
	if err != nil {
		return nil, fmt.Errorf("competitors: zookeeper: %w", err)
	}
	acquire := func(ctx context.Context, key string) (load.Lease, error) {
		stop := context.AfterFunc(ctx, conn.Close) // nothing else ends a Lock that waits
		defer stop()
		m := zk.NewLock(conn, "/"+key, zk.WorldACL(zk.PermAll))
		if err := m.Lock(); err != nil {
			if ctx.Err() != nil {
				err = errors.Join(context.Cause(ctx), err)
			}
			return nil, err
		}
		return lease{release: func(context.Context) error { return m.Unlock() }}, nil
	}
	return lock{acquire, func() error { conn.Close(); return nil }}, nil
}

type silent struct{}

func (silent) Printf(string, ...any) {}
