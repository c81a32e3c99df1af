package peers

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelab/fencelab/internal/load"
)

// openZKLock: a zk.Lock for each acquisition, on one session.
func openZKLock(_ context.Context, s Spec) (load.Lock, error) {
	conn, _, err := zk.Connect(s.Addrs, max(2*s.TTL, 10*time.Second), zk.WithLogger(silent{}), zk.WithDialer(s.spec().ZKDialer())) //nolint:contextcheck // the client lasts
	if err != nil {
		return nil, fmt.Errorf("peers: zookeeper: %w", err)
	}
	return &zkLock{conn}, nil
}

type zkLock struct{ conn *zk.Conn }

// Acquire closes the connection, and so ends the session, when ctx ends: nothing else ends a Lock that waits.
func (l *zkLock) Acquire(ctx context.Context, key string) (load.Lease, error) {
	stop := context.AfterFunc(ctx, l.conn.Close)
	defer stop()
	m := zk.NewLock(l.conn, "/"+key, zk.WorldACL(zk.PermAll))
	if err := m.Lock(); err != nil {
		if ctx.Err() != nil {
			err = errors.Join(context.Cause(ctx), err)
		}
		return nil, err
	}
	return &lease{release: func(context.Context) error { return m.Unlock() }}, nil
}

func (l *zkLock) Close() error {
	l.conn.Close()
	return nil
}

type silent struct{}

func (silent) Printf(string, ...any) {}
