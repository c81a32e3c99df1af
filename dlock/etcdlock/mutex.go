package etcdlock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/concurrency"

	"github.com/fencelab/fencelab/dlock"
)

// MutexBackend is etcd's own mutex (go.etcd.io/etcd/client/v3/concurrency) as a dlock.Backend, for comparison. Every
// acquisition has a session of its own, for a session that locks a key twice is told twice that it has it. The session
// is kept alive while the Mutex waits; then the lease runs by itself, until a renewal keeps it alive once.
//
// It cannot keep some of the rules of dlock.Backend:
//
//   - 5 and 9: if the answer to its put is lost, or ctx ends after the put has been committed, Mutex.Lock returns an
//     error and the key stays until its session ends. The Mutex doesn't tell its session's name for the key, so a Release
//     with Key and Owner alone has nothing to delete; it revokes the session, if this MutexBackend made it, and finds
//     none after a restart.
//   - 6: a request repeated with the same Owner is another acquisition, with another session, and waits for the first.
//   - 8: Mutex.Unlock deletes the key whether it exists or not, and reports success.
//   - 7: a lease is kept alive whether the key exists or not.
//
// A TTL that is not a whole number of seconds is raised to one, and so reported.
type MutexBackend struct {
	c      *clientv3.Client
	prefix string

	open  context.Context
	close context.CancelCauseFunc

	mu   sync.Mutex
	held map[string]*mutexGrant // by owner
}

type mutexGrant struct {
	m    *concurrency.Mutex
	s    *concurrency.Session
	turn chan struct{} // held by the release under way
}

var _ dlock.Backend = (*MutexBackend)(nil)

// NewMutex returns a MutexBackend on client, which stays the caller's to close. It sends nothing.
func NewMutex(client *clientv3.Client, opts *Options) (*MutexBackend, error) {
	if client == nil {
		return nil, fmt.Errorf("%w: etcdlock: client is nil", dlock.ErrInvalid)
	}
	b := &MutexBackend{c: client, held: map[string]*mutexGrant{}}
	if opts != nil {
		b.prefix = opts.Prefix
	}
	if err := checkPrefix(b.prefix); err != nil {
		return nil, err
	}
	b.open, b.close = context.WithCancelCause(context.Background())
	return b, nil
}

// Acquire implements dlock.Backend.
func (b *MutexBackend) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.acquire(ctx, r, (*concurrency.Mutex).Lock)
}

// TryAcquire implements dlock.Backend.
func (b *MutexBackend) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.acquire(ctx, r, (*concurrency.Mutex).TryLock)
}

func (b *MutexBackend) acquire(
	ctx context.Context, r dlock.Request, lock func(*concurrency.Mutex, context.Context) error,
) (g dlock.Grant, err error) {
	if r.TTL <= 0 {
		return g, fmt.Errorf("%w: etcdlock: TTL %v is not positive", dlock.ErrInvalid, r.TTL)
	}
	ctx, leave, err := b.enter(ctx)
	if err != nil {
		return g, err
	}
	defer leave()
	lease, err := b.c.Grant(ctx, int64((r.TTL+time.Second-1)/time.Second))
	if err != nil {
		return g, failed(ctx, err)
	}
	s, err := concurrency.NewSession(b.c, concurrency.WithLease(lease.ID))
	if err != nil {
		return g, failed(ctx, err)
	}
	m := concurrency.NewMutex(s, strings.TrimSuffix(queueOf(b.prefix, r.Key), "/"))
	b.mu.Lock()
	b.held[r.Owner] = &mutexGrant{m, s, make(chan struct{}, 1)}
	b.mu.Unlock()
	err = lock(m, ctx)
	s.Orphan()                        // what isn't renewed runs out
	if err == concurrency.ErrLocked { //nolint:errorlint // returned as it is
		if err := b.forget(ctx, r.Owner); err != nil {
			return g, err
		}
		return g, dlock.ErrHeld
	}
	if err != nil {
		return g, failed(ctx, err)
	}
	start := time.Now()
	if err := b.keepAlive(ctx, s); err != nil {
		return g, failed(ctx, err)
	}
	owner := m.IsOwner()
	rev := (*pb.Compare)(&owner).GetCreateRevision()
	return dlock.Grant{
		Key: r.Key, Owner: r.Owner, Fence: uint64(rev), TTL: time.Duration(lease.TTL) * time.Second, Start: start,
	}, nil
}

// Renew implements dlock.Backend.
func (b *MutexBackend) Renew(ctx context.Context, g dlock.Grant) error {
	ctx, leave, err := b.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	b.mu.Lock()
	h := b.held[g.Owner]
	b.mu.Unlock()
	if h == nil {
		return dlock.ErrLost
	}
	if err := b.keepAlive(ctx, h.s); leaseGone(err) {
		return dlock.ErrLost
	} else if err != nil {
		return failed(ctx, err)
	}
	return nil
}

// keepAlive restarts a session's lease. The client library repeats it without a pause until ctx ends.
func (b *MutexBackend) keepAlive(ctx context.Context, s *concurrency.Session) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	_, err := b.c.KeepAliveOnce(ctx, s.Lease())
	return err
}

// Release implements dlock.Backend.
func (b *MutexBackend) Release(ctx context.Context, g dlock.Grant) error {
	ctx, leave, err := b.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	b.mu.Lock()
	h := b.held[g.Owner]
	b.mu.Unlock()
	if h == nil {
		return dlock.ErrLost
	}
	select {
	case h.turn <- struct{}{}:
		defer func() { <-h.turn }()
	case <-ctx.Done():
		return failed(ctx, ctx.Err())
	}
	b.mu.Lock()
	done := b.held[g.Owner] != h
	b.mu.Unlock()
	if done { // by a release that was faster
		return dlock.ErrLost
	}
	if g.Fence != 0 { // an earlier release may have come as far as this
		if err := h.m.Unlock(ctx); err != nil && !errors.Is(err, concurrency.ErrLockReleased) {
			return failed(ctx, err)
		}
	}
	return b.forget(ctx, g.Owner)
}

// forget revokes an owner's session.
func (b *MutexBackend) forget(ctx context.Context, owner string) error {
	b.mu.Lock()
	h := b.held[owner]
	b.mu.Unlock()
	if _, err := b.c.Revoke(ctx, h.s.Lease()); err != nil && !leaseGone(err) {
		return failed(ctx, err)
	}
	b.mu.Lock()
	delete(b.held, owner)
	b.mu.Unlock()
	return nil
}

// Close implements dlock.Backend.
func (b *MutexBackend) Close() error {
	b.close(dlock.ErrClosed)
	return nil
}

func (b *MutexBackend) enter(ctx context.Context) (call context.Context, leave func(), err error) {
	switch {
	case b.open.Err() != nil:
		return nil, nil, dlock.ErrClosed
	case ctx.Err() != nil:
		return nil, nil, failed(ctx, ctx.Err())
	}
	call, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(b.open, func() { cancel(dlock.ErrClosed) })
	return call, func() { stop(); cancel(nil) }, nil
}
