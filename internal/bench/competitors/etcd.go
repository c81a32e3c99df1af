package competitors

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"
	"go.uber.org/zap"

	"github.com/fencelab/fencelab/internal/bench/load"
)

// openEtcdMutex: concurrency.Mutex, with sessions that are reused.
func openEtcdMutex(s Spec) (load.Lock, error) {
	c, err := clientv3.New(clientv3.Config{Endpoints: s.Addrs, Logger: zap.NewNop(), DialOptions: s.spec().EtcdDial()})
	if err != nil {
		return nil, fmt.Errorf("competitors: etcd: %w", err)
	}
	return &etcdMutex{client: c, ttl: max(1, int((s.TTL+time.Second-1)/time.Second))}, nil
}

type etcdMutex struct {
	client *clientv3.Client
	ttl    int // in seconds

	mu   sync.Mutex
	idle []*concurrency.Session // two acquisitions of one session would share the lock
}

func (l *etcdMutex) Acquire(ctx context.Context, key string) (load.Lease, error) {
	s, err := l.session(ctx)
	if err != nil {
		return nil, err
	}
	m := concurrency.NewMutex(s, "/"+key)
	if err := m.Lock(ctx); err != nil {
		// The key may be left in the queue, where it would block others while the session lives.
		return nil, errors.Join(err, s.Close())
	}
	return lease{
		lost: func() bool { return s.Ctx().Err() != nil },
		release: func(ctx context.Context) error {
			if err := m.Unlock(ctx); err != nil {
				return errors.Join(err, s.Close())
			}
			l.mu.Lock()
			defer l.mu.Unlock()
			l.idle = append(l.idle, s)
			return nil
		},
	}, nil
}

// etcd's client would wait for a server without end.
const leaseTimeout = 5 * time.Second

func (l *etcdMutex) session(ctx context.Context) (*concurrency.Session, error) {
	l.mu.Lock()
	if n := len(l.idle); n > 0 {
		s := l.idle[n-1]
		l.idle = l.idle[:n-1]
		l.mu.Unlock()
		return s, nil
	}
	l.mu.Unlock()
	ctx, cancel := context.WithTimeoutCause(ctx, leaseTimeout, fmt.Errorf("no lease within %v: start it there, or give the address where it runs", leaseTimeout))
	defer cancel()
	granted, err := l.client.Grant(ctx, int64(l.ttl)) // NewSession would grant with the session's context, which lasts
	if err != nil {
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return nil, fmt.Errorf("competitors: etcd at %s: %w", strings.Join(l.client.Endpoints(), ", "), err)
	}
	return concurrency.NewSession(l.client, concurrency.WithTTL(l.ttl), concurrency.WithLease(granted.ID))
}

func (l *etcdMutex) Close() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	var errs []error
	for _, s := range l.idle {
		errs = append(errs, s.Close())
	}
	l.idle = nil
	return errors.Join(append(errs, l.client.Close())...)
}
