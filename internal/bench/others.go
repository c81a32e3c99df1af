package bench

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/go-zookeeper/zk"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"

	"github.com/fencelab/fencelab/internal/bench/load"
)

// openEtcdMutex uses concurrency.Mutex with a session per acquisition, since two of one session would share the lock, and reuses
// sessions.
func openEtcdMutex(s Spec) (load.Lock, error) {
	c, err := clientv3.New(clientv3.Config{Endpoints: s.Addrs, Logger: zap.NewNop(), DialOptions: s.spec().EtcdDial()})
	if err != nil {
		return load.Lock{}, fmt.Errorf("bench: etcd: %w", err)
	}
	ttl := max(1, int((s.TTL+time.Second-1)/time.Second))
	idle := make(chan *concurrency.Session, 1<<16)
	session := func(ctx context.Context) (*concurrency.Session, error) {
		select {
		case s := <-idle:
			return s, nil
		default:
		}
		granted, err := c.Grant(ctx, int64(ttl)) // NewSession would grant with the session's context, which lasts
		if err != nil {
			return nil, err
		}
		return concurrency.NewSession(c, concurrency.WithTTL(ttl), concurrency.WithLease(granted.ID))
	}
	closeAll := func() (err error) {
		for len(idle) > 0 {
			err = errors.Join(err, (<-idle).Close())
		}
		return errors.Join(err, c.Close())
	}
	return load.Lock{Close: closeAll, Acquire: func(ctx context.Context, key string) (load.Lease, error) {
		s, err := session(ctx)
		if err != nil {
			return load.Lease{}, err
		}
		m := concurrency.NewMutex(s, "/"+key)
		if err := m.Lock(ctx); err != nil {
			// The key may still be queued, and would block others while the session lives.
			return load.Lease{}, errors.Join(err, s.Close())
		}
		return load.Lease{
			Lost: func() bool { return s.Ctx().Err() != nil },
			Release: func(ctx context.Context) error {
				if err := m.Unlock(ctx); err != nil {
					return errors.Join(err, s.Close())
				}
				idle <- s
				return nil
			},
		}, nil
	}}, nil
}

func openZKLock(s Spec) (load.Lock, error) {
	conn, _, err := zk.Connect(s.Addrs, max(2*s.TTL, 10*time.Second), zk.WithLogger(silent{}), zk.WithDialer(s.spec().ZKDialer()))
	if err != nil {
		return load.Lock{}, fmt.Errorf("bench: zookeeper: %w", err)
	}
	return load.Lock{Close: func() error { conn.Close(); return nil }, Acquire: func(ctx context.Context, key string) (load.Lease, error) {
		stop := context.AfterFunc(ctx, conn.Close) // nothing else ends a Lock that waits
		defer stop()
		m := zk.NewLock(conn, "/"+key, zk.WorldACL(zk.PermAll))
		return load.Lease{Release: func(context.Context) error { return m.Unlock() }}, m.Lock()
	}}, nil
}

type silent struct{}

func (silent) Printf(string, ...any) {}
