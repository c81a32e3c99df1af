// Package etcdlock is a dlock.Backend on etcd v3.
//
// # The queue
//
// A waiter puts a key {Prefix}lock/{KEY}/{LEASE}-{N}; the key created first has the lock. LEASE is the session, N tells a
// Backend's keys apart. Names are reused, since etcd keeps every name until compaction and reads all of them with the queue. The
// token is the key's create revision. Restoring a snapshot sets tokens back, unless it bumps the revision (etcdutl snapshot
// restore --bump-revision).
//
// The transaction that deletes the holder's key also writes a message to {Prefix}turn/{LEASE}, which the next waiter's Backend
// watches. It names the next 32 waiters, so a hand-over costs one commit and no read. A holder without that list, or whose next
// waiter has left, reads the queue in its transaction and sends the message in a second one.
//
// The message is proof: the first key stays first until its Backend deletes it or its session ends, and a grant requires a live
// session. A waiter that gets no message for a second reads whether its key is first.
//
// # Leases
//
// Two clocks bound a grant. A timer in the Backend deletes the key at Start + TTL unless it is renewed. If the process is dead,
// frozen or cut off, the key goes with the session, a lease in etcd that all grants of one TTL share. It lasts for S: the TTL and
// an eighth more (at least 1 s, at most 10 s) rounded up to seconds, or the server's minimum if that is longer. A grant is given
// or renewed only if the last answered keep-alive was sent at most S - TTL ago. Keep-alives are frequent enough for that, so a
// renewal needs no commit.
//
// A dead holder blocks a key for at most S after its last keep-alive, 500 ms for etcd's checks, and a second until a waiter
// reads; a change of etcd's leader restarts S.
//
// # Requests that arrive late
//
// A put without a reply may reach etcd long after its sender has given up. So every put is conditional on the revision of its
// session's guard, {Prefix}session/{LEASE}, which doesn't exist at first. Undoing such a put deletes the lock's key and modifies
// the guard in one transaction. A deletion is conditional on the key's create revision or, if unknown, on its unique value. While
// etcd has no space left, the key is deleted alone, and again if it arrives later; the guard is modified within about a second
// after there is space again.
//
// If a put finds the guard's revision lower than before, or its own name taken, the store was restored from a snapshot or changed
// by hand. The Backend then replaces the session, and all grants of the old one are lost.
//
// # Limits
//
// With authentication, a client needs read and write permission for {Prefix}lock/, {Prefix}turn/ and {Prefix}session/. When etcd
// has no space left, nothing can be acquired, but grants can be renewed and released, and requests undone. etcd's grpc-proxy is
// not supported: it answers keep-alives itself. A TTL must be longer than a round trip.
package etcdlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/wait"
)

// Options configure a [Backend].
type Options struct {
	// Prefix precedes the names of all keys, "" by default. Locks with different prefixes are independent.
	Prefix string
}

// Backend implements dlock.Backend. Only the Backend that gave a grant can renew it.
type Backend struct {
	c      *clientv3.Client
	prefix string
	stream atomic.Int64 // see watching

	open      context.Context // ends with dlock.ErrClosed
	close     context.CancelCauseFunc
	closeOnce sync.Once

	mu       sync.Mutex
	busy     sync.WaitGroup // calls and clean-ups
	claims   map[id]*claim
	names    map[string]*claim // by their key's name in etcd
	lives    uint64
	sessions map[int64]*slot // by requested S in seconds
}

var _ dlock.Backend = (*Backend)(nil)

// New returns a Backend on client, which stays the caller's to close. It sends nothing. Set the client's DialKeepAliveTime and
// DialKeepAliveTimeout, or calls without a deadline wait forever for a silent server.
func New(client *clientv3.Client, opts *Options) (*Backend, error) {
	if client == nil {
		return nil, fmt.Errorf("%w: etcdlock: client is nil", dlock.ErrInvalid)
	}
	o := cmp.Or(opts, &Options{})
	if strings.Contains(o.Prefix, "lock/") { // else one prefix's key could be in another's queue
		return nil, fmt.Errorf(`%w: etcdlock: prefix %q contains "lock/", which marks where a prefix ends`, dlock.ErrInvalid, o.Prefix)
	}
	b := &Backend{
		c: client, prefix: o.Prefix,
		claims: map[id]*claim{}, names: map[string]*claim{}, sessions: map[int64]*slot{},
	}
	b.open, b.close = context.WithCancelCause(context.Background())
	return b, nil
}

// No queue's prefix begins with another's, since a slash in key is escaped.
func queueOf(prefix, key string) string { return prefix + "lock/" + url.PathEscape(key) + "/" }

// Acquire implements dlock.Backend. Waiters form one FIFO queue across all processes. The error wraps dlock.ErrLost if the
// waiter's session has expired, or etcd's replies take longer than the TTL.
func (b *Backend) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.acquire(ctx, r, true)
}

// TryAcquire implements dlock.Backend. A key with waiters counts as held.
func (b *Backend) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.acquire(ctx, r, false)
}

// maxLate limits a call's puts whose replies come too late.
const maxLate = 3

func (b *Backend) acquire(ctx context.Context, r dlock.Request, queue bool) (dlock.Grant, error) {
	if r.TTL <= 0 {
		return dlock.Grant{}, fmt.Errorf("%w: etcdlock: TTL %v is not positive", dlock.ErrInvalid, r.TTL)
	}
	ctx, leave, err := b.enter(ctx)
	if err != nil {
		return dlock.Grant{}, err
	}
	defer leave()
	rest, late := minPause, 0
	for try := 0; ; try++ {
		if try > 1 {
			wait.For(ctx, rest)
			rest = min(2*rest, maxPause)
		}
		s, err := b.sessionFor(ctx, r.TTL)
		if err == nil && s.dead() { // in an outage, puts that can't be undone would pile up
			err = s.cover(ctx, time.Now(), 0)
		}
		if errors.Is(err, errExpired) {
			continue
		}
		if err != nil {
			return dlock.Grant{}, failed(ctx, err)
		}
		c := b.claim(r, s)
		g, err := c.take(ctx, r, queue)
		if errors.Is(err, errLate) {
			late++
			if !c.undone(ctx) { // its key would be ahead of the next put's
				late = maxLate
			}
			if late == maxLate && ctx.Err() == nil {
				return g, fmt.Errorf("%w: etcdlock: etcd's replies take longer than the TTL %v; set a longer TTL", dlock.ErrLost, r.TTL)
			}
		}
		if errors.Is(err, errAgain) && ctx.Err() == nil {
			continue
		}
		return g, failed(ctx, err)
	}
}

// Renew implements dlock.Backend.
func (b *Backend) Renew(ctx context.Context, g dlock.Grant) error {
	if g.TTL <= 0 {
		return fmt.Errorf("%w: etcdlock: TTL %v is not positive", dlock.ErrInvalid, g.TTL)
	}
	ctx, leave, err := b.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	c, name, _ := b.find(g)
	if c == nil || !c.holds(g.Fence) {
		return dlock.ErrLost
	}
	start := time.Now()
	if err := c.s.cover(ctx, start, g.TTL); err != nil {
		return failed(ctx, err)
	}
	// The read makes it linearizable.
	resp, err := b.c.Txn(ctx).If(owns(name, g.Fence)).Then(clientv3.OpGet(name, clientv3.WithCountOnly())).Commit()
	if err != nil {
		return failed(ctx, err)
	}
	if !resp.Succeeded {
		c.end()
		return dlock.ErrLost
	}
	if !c.renewed(g.Fence, start.Add(g.TTL)) { // the timer was faster
		return dlock.ErrLost
	}
	return nil
}

// Release implements dlock.Backend.
func (b *Backend) Release(ctx context.Context, g dlock.Grant) error {
	ctx, leave, err := b.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	c, name, value := b.find(g)
	if name == "" || c == nil && g.Fence == 0 { // never put by this Backend, or known to be gone
		return dlock.ErrLost
	}
	had, err := b.remove(ctx, c, g.Key, name, value, g.Fence)
	switch {
	case err != nil:
		return failed(ctx, err)
	case !had:
		return dlock.ErrLost
	}
	return nil
}

// IsOwner returns a condition that holds while g is held: a transaction with it writes to the same etcd only for the holder. A
// grant of this Backend needs only Key, Owner and Fence, which a dlock.Handle has.
func (b *Backend) IsOwner(g dlock.Grant) clientv3.Cmp {
	_, name, _ := b.find(g)
	if name == "" {
		name = queueOf(b.prefix, g.Key) // which no key has
	}
	return owns(name, cmp.Or(g.Fence, math.MaxUint64)) // 0, as from a released handle's Next, would match a missing key
}

// find returns g's claim, nil if it has ended, and its key's name and value, "" if unknown.
func (b *Backend) find(g dlock.Grant) (c *claim, name, value string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	name, _ = g.State.(string)
	c = b.claims[id{g.Key, g.Owner}]
	if c == nil {
		return nil, name, ""
	}
	if name == "" {
		name = c.name
	}
	return c, name, c.value
}

func owns(name string, fence uint64) clientv3.Cmp {
	return clientv3.Compare(clientv3.CreateRevision(name), "=", int64(fence))
}

// Close implements dlock.Backend. Waiting calls leave the queue and return dlock.ErrClosed. Grants end with their sessions, which
// are no longer kept alive; unused sessions are revoked. It takes a second or two if the server doesn't reply.
func (b *Backend) Close() error {
	b.closeOnce.Do(func() {
		b.mu.Lock()
		b.close(dlock.ErrClosed)
		b.mu.Unlock()
		b.busy.Wait()
		b.mu.Lock()
		defer b.mu.Unlock()
		inUse := map[*session]bool{}
		for _, c := range b.claims {
			if c.stop() {
				inUse[c.s] = true
			}
		}
		var revoked sync.WaitGroup
		for _, l := range b.sessions {
			if s := l.s; s != nil {
				<-s.stopped
				if !inUse[s] && s.over.Err() == nil {
					revoked.Go(func() { s.revoke(b.c) })
				}
			}
		}
		revoked.Wait()
	})
	return nil
}

func (b *Backend) enter(ctx context.Context) (call context.Context, leave func(), err error) {
	if ctx.Err() != nil {
		return nil, nil, failed(ctx, ctx.Err())
	}
	if !b.begin() {
		return nil, nil, dlock.ErrClosed
	}
	call, end := wait.Both(ctx, b.open)
	return call, func() {
		end()
		b.busy.Done()
	}, nil
}

// begin registers work that Close waits for. It reports false once the Backend is closed.
func (b *Backend) begin() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open.Err() != nil {
		return false
	}
	b.busy.Add(1)
	return true
}

func failed(ctx context.Context, err error) error { return wait.Failed(ctx, "etcdlock", err) }

func leaseGone(err error) bool { return errors.Is(err, rpctypes.ErrLeaseNotFound) }
