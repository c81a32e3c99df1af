// Package zklock is a dlock.Backend on ZooKeeper 3.5 or later, by its recipe for locks
// (https://zookeeper.apache.org/doc/current/recipes.html#sc_recipes_Locks).
//
// A key is a container node. A waiter creates an ephemeral sequential child, whose name carries the owner. The first child has
// the lock. The second watches it, and each later one the node two ahead: a release wakes the new holder and the new second. They
// need not read, since no new node can come before an existing one. The token is the czxid of the holder's node or a later zxid
// before the next node's. Zxids grow even when sequence numbers restart, but go back when a quorum is restored from an old
// backup.
//
// # Leases
//
// ZooKeeper nodes have no TTL, only a session timeout for all nodes of a client. So three things end a lease:
//
//   - Its own Backend deletes the node at Start + TTL unless it was renewed.
//   - The waiter behind the first node deletes it once its version has not changed for the TTL stored in it. A renewal writes
//     the node. Only intervals are compared, never two machines' clocks.
//   - ZooKeeper deletes the node when its session ends.
//
// A waiter's lease counts from the write that created its node. If more than an eighth has passed when it is granted, it is
// provisional (see dlock.Grant). If less than a quarter would be left, the waiter writes its node again, if possible while it is
// the second.
//
// The client's Close deletes all its nodes: close the Locker first, and the client after its critical sections. If another client
// deletes a node, its Backend notices only once the node is 2 s old.
//
// A TTL longer than half the session timeout is refused with dlock.ErrInvalid. The server may agree to less than zk.Connect asked
// for: by default at most 20 ticks, 40 s. The limit is half because the last heartbeat that the leader knows of may be a third of
// the timeout and half a tick old. So the timeout should be at least three ticks, 6 s by default; servers accept two.
//
// A dead holder, or a dead waiter that comes to the front, blocks others for its TTL, plus that of the waiter behind it if that
// one has just become the second because another left; but at most for the session timeout, which is the bound for TryAcquire.
//
// # Connections
//
// Waiters survive the loss of a connection while the session lasts. After that, Acquire returns an error that wraps
// dlock.ErrLost. Every call returns with its context. go-zookeeper keeps a request for up to 7 session timeouts while the server
// is frozen, so a Backend has at most 64 in flight. A node whose create had no reply is deleted in the background.
package zklock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path"
	"reflect"
	"slices"
	"sync"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/wait"
)

// Options configure a [Backend].
type Options struct {
	// Root is the path of the node that holds the keys, "/dlock" by default, created if need be. Locks with different roots are
	// independent.
	Root string
	// ACL is the ACL of all nodes, by default open to everybody. Each client needs every permission.
	ACL []zk.ACL
}

// Backend implements dlock.Backend.
type Backend struct {
	c    *zk.Conn
	root string
	acl  []zk.ACL

	unwatched time.Duration // see the constant

	always context.Context // for what outlives a call
	open   context.Context // ends with dlock.ErrClosed
	close  context.CancelCauseFunc

	inFlight chan struct{} // a semaphore for requests that a context may cut short

	mu      sync.Mutex
	session int64 // whose timeout is known
	timeout time.Duration
	watches map[watched]*watch // not yet fired
	chores  []func()
	workers int
}

var _ dlock.Backend = (*Backend)(nil)

// New returns a Backend on client, which stays the caller's to close. It sends nothing.
func New(client *zk.Conn, opts *Options) (*Backend, error) {
	if client == nil {
		return nil, fmt.Errorf("%w: zklock: client is nil", dlock.ErrInvalid)
	}
	o := *cmp.Or(opts, &Options{})
	o.Root = cmp.Or(o.Root, "/dlock")
	if o.Root[0] != '/' || o.Root == "/" || path.Clean(o.Root) != o.Root {
		return nil, fmt.Errorf("%w: zklock: root %q is not a path like /dlock", dlock.ErrInvalid, o.Root)
	}
	if o.ACL == nil {
		o.ACL = zk.WorldACL(zk.PermAll)
	}
	if !sessionTimeout(client).CanInt() {
		return nil, fmt.Errorf("%w: zklock: this version of go-zookeeper/zk hides its session timeout", dlock.ErrInvalid)
	}
	b := &Backend{
		c: client, root: o.Root, acl: slices.Clone(o.ACL), unwatched: unwatched,
		always: context.Background(), inFlight: make(chan struct{}, maxInFlight), watches: map[watched]*watch{},
	}
	b.open, b.close = context.WithCancelCause(b.always)
	return b, nil
}

// sessionTimeout is the negotiated session timeout in ms. The client has no method for it, and writes the field without a lock on
// connecting: read it only between a reply and the next request.
func sessionTimeout(c *zk.Conn) reflect.Value {
	return reflect.ValueOf(c).Elem().FieldByName("sessionTimeoutMs")
}

// Acquire implements dlock.Backend. Waiters form a FIFO queue.
func (b *Backend) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.acquire(ctx, r, true)
}

// TryAcquire implements dlock.Backend. It creates no node for a key that is held.
func (b *Backend) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.acquire(ctx, r, false)
}

func (b *Backend) acquire(ctx context.Context, r dlock.Request, queue bool) (g dlock.Grant, err error) {
	if err := b.enter(ctx); err != nil {
		return g, err
	}
	ctx, end := wait.Both(ctx, b.open)
	defer end()
	if err := b.check(ctx, r.TTL); err != nil {
		return g, failed(ctx, err)
	}
	p := b.place(r.Key, r.Owner)
	if !queue {
		held, err := b.held(ctx, p.parent)
		if held && err == nil {
			err = dlock.ErrHeld
		}
		if err != nil {
			return g, failed(ctx, err)
		}
	}
	w := wanted{Request: r, queue: queue, start: time.Now()} // before the request leaves
	l, q, err := b.join(ctx, p, r.TTL)
	if err != nil {
		return g, failed(ctx, err)
	}
	if g, err = b.win(ctx, l, q, w); err != nil {
		if !errors.Is(err, errGone) {
			b.remove(l)
		}
		return g, failed(ctx, err)
	}
	return g, nil
}

// Renew implements dlock.Backend. If it fails without ErrLost, the lease may still last until a TTL from now.
func (b *Backend) Renew(ctx context.Context, g dlock.Grant) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	if err := b.check(ctx, g.TTL); err != nil {
		return failed(ctx, err)
	}
	l, ok := g.State.(*lease)
	if !ok || !l.begin(time.Now().Add(g.TTL)) {
		return dlock.ErrLost
	}
	if err := l.b.write(ctx, l, g.TTL); err != nil { // by its own session: another's would prove nothing
		return failed(ctx, err)
	}
	return nil
}

// Release implements dlock.Backend.
func (b *Backend) Release(ctx context.Context, g dlock.Grant) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	var n int
	var err error
	if l, ok := g.State.(*lease); ok {
		n, err = b.sweep(ctx, []node{l.node}, l.node.owner, "")
		if err == nil {
			l.vanish()
		}
	} else {
		n, err = b.sweepAll(ctx, b.place(g.Key, g.Owner))
	}
	switch {
	case err != nil:
		return failed(ctx, err)
	case n == 0:
		return dlock.ErrLost
	}
	return nil
}

// Close implements dlock.Backend. Waiting calls of Acquire return dlock.ErrClosed. Leases still expire on time.
func (b *Backend) Close() error {
	b.close(dlock.ErrClosed)
	return nil
}

func (b *Backend) enter(ctx context.Context) error {
	if b.open.Err() != nil {
		return dlock.ErrClosed
	}
	if ctx.Err() != nil {
		return failed(ctx, context.Cause(ctx))
	}
	return nil
}

func (b *Backend) check(ctx context.Context, ttl time.Duration) error {
	if ttl <= 0 {
		return fmt.Errorf("%w: zklock: TTL %v is not positive", dlock.ErrInvalid, ttl)
	}
	id := b.c.SessionID()
	b.mu.Lock()
	known, timeout := id != 0 && id == b.session, b.timeout
	b.mu.Unlock()
	if !known {
		if _, err := b.exists(ctx, b.root); err != nil { // a reply: the session has a timeout
			return err
		}
		timeout = time.Duration(sessionTimeout(b.c).Int()) * time.Millisecond
		b.mu.Lock()
		b.session, b.timeout = b.c.SessionID(), timeout
		b.mu.Unlock()
	}
	if ttl > timeout/2 {
		return fmt.Errorf("%w: zklock: TTL %v is longer than half the session timeout, %v, to which the server has agreed (its maxSessionTimeout is the limit)",
			dlock.ErrInvalid, ttl, timeout)
	}
	return nil
}

func failed(ctx context.Context, err error) error { return wait.Failed(ctx, "zklock", err) }
