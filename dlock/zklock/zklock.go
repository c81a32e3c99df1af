// Package zklock is a dlock.Backend on ZooKeeper, by its recipe for locks
// (https://zookeeper.apache.org/doc/current/recipes.html#sc_recipes_Locks), written out.
//
// A key is a parent node; whoever wants it creates an ephemeral sequential child there, whose name carries the owner, so
// that a node whose create reply was lost is found again. The first child has the lock. The second watches it, and every other
// one the last child but one before it: a release wakes the second, which has the lock now, and the third, which becomes the
// second. The fencing token is the winning node's czxid, the number of the transaction that created it, or that of a later one
// before the next node was created. It grows with every transaction of the ensemble, so also when the parent has vanished and
// the sequence numbers begin again at 0. It is as durable as the ensemble's data: a quorum restored from an old backup, or
// from nothing, takes it back.
//
// # Leases
//
// ZooKeeper knows no TTL of a node, only the session's timeout, one for all nodes of a client. So three things end a lease:
//
//   - Its own Backend deletes the node at Start + TTL, unless it was renewed; so too one whose creation was not answered.
//   - The waiter behind the first node deletes it when it has seen it unchanged for its TTL, which is the node's data: a
//     Delete with the version that was seen, which a renewal raises. The holder has counted from before that version was
//     written, so its time is over. Only intervals are compared, never two machines' clocks.
//   - ZooKeeper deletes the node when its session has ended.
//
// A renewal is a write: a quorum has then agreed that the node was there. A read could come from a server that has lost the
// others. What makes a waiter a holder is a write, too: the one that created its node, from before which its lease counts,
// as does every other that is granted at once. Nobody takes the lock away before that is a TTL ago, for the waiter behind
// can't have seen the node earlier. So a lease begins with less than its TTL, by the time that was waited. If that is more
// than an eighth, the lease is provisional (see dlock.Grant): the Locker renews it after half of what is left. If less than a
// quarter would be left, the waiter writes again, and its lease counts from then; it does so when it becomes the second, if
// it can, so that the first doesn't have to be done for it. The lock passes from one to the next in a queue that moves by one
// write, the deletion.
//
// The second has the lock when the event comes that the first is gone, and doesn't look again: no node can come before one
// that is there, and its own was there when it became the second. Only somebody who deletes others' nodes can make it wrong
// about that; so might he take the lock away from a holder. Both learn of it by an event, if the node is older than 2 s.
// A younger one isn't watched yet: nothing else ends it so soon, but the client's own Close, which frees every lock of its
// session at once. So close the Locker first, and the client when its sections are over. If the first is of the same client
// as the second, the second does look again, for Close would end both.
//
// A session must not end before the leases under it, so a TTL longer than half the session timeout that the server has
// agreed to is refused with dlock.ErrInvalid. (The server may have agreed to less than zk.Connect asked for: 20 ticks at
// most unless configured, 40 s.) Half, because the leader counts from the last heartbeat that it has heard of. If client
// and follower are cut off just after a grant, that is up to a third of the timeout, the client's ping interval, and half
// a tick old. A timeout of at least three ticks covers both.
//
// A holder that has died blocks a waiter for no more than its TTL after the waiter behind it has seen its last renewal, which
// is at once; the same goes for a waiter that died and comes to the front. One that has become the second because a waiter
// before it has left finds that out within its own TTL, and so the holder blocks for no more than both. None blocks longer
// than the session timeout rounded up to the server's next tick. TryAcquire doesn't wait and so can't tell a dead holder
// from a live one: to it the session timeout applies.
//
// # Connections
//
// Waiters survive the loss of a connection as long as the session does. When the session has expired, its grants are
// lost, and Acquire returns an error that wraps dlock.ErrLost: it has lost its place.
//
// Every call returns with its context. go-zookeeper keeps a request, while the server is frozen, for up to 7 session timeouts:
// a Backend leaves it 64 at most and sends no more meanwhile. What a cancelled call has asked for may still arrive, and is
// deleted in the background.
//
// # Cost
//
// A free lock costs two writes, which create the node and delete it, and one read, of the queue, whose parent's stat has the
// token. If another node has come by then, its own has to be read for that. One that waits as the second reads once more, to
// watch the first; one that comes later three times: it watches another, looks at the queue again, and then watches the first.
// So a section of a busy lock takes six or seven requests, and the server sends two events. go-zookeeper's Lock, which has no
// token and doesn't hear that its own node is gone, takes five and one; as many of them are writes. But of its requests one
// comes between the end of a section and the beginning of the next, and here none does, unless one client has both. A node
// that is still there after 2 s is watched, by one request and one event more.
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
	"sync/atomic"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelab/fencelab/dlock"
)

// Options configure a [Backend].
type Options struct {
	// Root is the path of the node below which keys are, "/dlock" by default. It is created if it isn't there. Locks
	// with different roots don't know each other.
	Root string
	// ACL is that of all nodes; by default everybody may do everything. Each client needs every permission.
	ACL []zk.ACL
}

// Backend implements dlock.Backend.
type Backend struct {
	c    *zk.Conn
	root string
	acl  []zk.ACL

	plain atomic.Bool // the server knows no containers

	unwatched time.Duration // see there

	always context.Context // for what outlives a call
	open   context.Context // ends with dlock.ErrClosed
	close  context.CancelCauseFunc

	asked chan struct{} // has one for each request that may be cut short

	mu      sync.Mutex
	session int64         // the session whose timeout is known
	timeout time.Duration // of that session
	leases  map[place]*lease
	doubts  map[place]*doubt
	watches map[watched]*watch // those that haven't fired
	chores  []func()
	workers int
}

var _ dlock.Backend = (*Backend)(nil)

// New returns a Backend on client, which stays the caller's to close. It sends nothing.
func New(client *zk.Conn, opts *Options) (*Backend, error) {
	if client == nil {
		return nil, fmt.Errorf("%w: zklock: client is nil", dlock.ErrInvalid)
	}
	var o Options
	if opts != nil {
		o = *opts
	}
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
		asked:  make(chan struct{}, mostAsked),
		leases: map[place]*lease{}, doubts: map[place]*doubt{}, watches: map[watched]*watch{},
	}
	b.always = context.Background()
	b.open, b.close = context.WithCancelCause(b.always)
	return b, nil
}

// sessionTimeout is the session timeout in ms that the server has agreed to. The client has no method that tells, and a
// wrong guess would be a promise that the server doesn't keep. The client writes it whenever it connects, without a lock, so
// it may only be read between the answer to a request and the next request.
func sessionTimeout(c *zk.Conn) reflect.Value {
	return reflect.ValueOf(c).Elem().FieldByName("sessionTimeoutMs")
}

// Acquire implements dlock.Backend. Waiters are served first come, first served.
func (b *Backend) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.acquire(ctx, r, true)
}

// TryAcquire implements dlock.Backend. It makes no node for a key that is held.
func (b *Backend) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.acquire(ctx, r, false)
}

func (b *Backend) acquire(ctx context.Context, r dlock.Request, wait bool) (dlock.Grant, error) {
	if err := b.enter(ctx); err != nil {
		return dlock.Grant{}, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(b.open, func() { cancel(dlock.ErrClosed) })() //nolint:contextcheck // the Backend's ends, too
	if err := b.check(ctx, r.TTL); err != nil {
		return dlock.Grant{}, failed(ctx, err)
	}
	p := b.place(r.Key, r.Owner)
	if !wait {
		held, err := b.held(ctx, p)
		if err != nil {
			return dlock.Grant{}, failed(ctx, err)
		}
		if held {
			return dlock.Grant{}, dlock.ErrHeld
		}
	}
	doubted, err := b.settle(ctx, p)
	if err != nil {
		b.doubt(p, time.Now(), nil)
		return dlock.Grant{}, failed(ctx, err)
	}
	l := b.known(p)
	g, err := b.try(ctx, p, r, l, wait)
	if l != nil && errors.Is(err, errGone) { // the request is repeated, and what it had come to has run out
		if err = b.forget(ctx, l); err == nil {
			g, err = b.try(ctx, p, r, nil, wait)
		}
	}
	if err != nil {
		if doubted { // this request may not even have been sent
			b.doubt(p, time.Now().Add(r.TTL), nil)
		}
		return dlock.Grant{}, failed(ctx, err)
	}
	return g, nil
}

// try joins the queue, unless the request has its place l there already, and waits for its turn.
func (b *Backend) try(ctx context.Context, p place, r dlock.Request, l *lease, wait bool) (dlock.Grant, error) {
	t := turn{ttl: r.TTL, wait: wait, start: time.Now()} // before the request leaves: nobody counts from earlier
	var q []node
	var err error
	if l == nil {
		l, q, t.fresh, err = b.join(ctx, p, r.TTL, t.start.Add(r.TTL))
	} else {
		q, err = b.list(ctx, p.parent)
	}
	if err != nil {
		return dlock.Grant{}, err
	}
	start, provisional, err := b.win(ctx, l, q, t)
	if err != nil {
		if !errors.Is(err, errGone) {
			b.remove(l)
		}
		return dlock.Grant{}, err
	}
	return dlock.Grant{
		Key: r.Key, Owner: r.Owner, Fence: uint64(l.token), TTL: r.TTL, Start: start, Provisional: provisional,
		Lost: l.gone, State: l,
	}, nil
}

// Renew implements dlock.Backend. If it fails without ErrLost, the lease may last until one TTL from now.
func (b *Backend) Renew(ctx context.Context, g dlock.Grant) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	if err := b.check(ctx, g.TTL); err != nil {
		return failed(ctx, err)
	}
	l, ok := g.State.(*lease)
	if !ok {
		l = b.known(b.place(g.Key, g.Owner))
	}
	if l == nil || !l.extend(time.Now().Add(g.TTL)) {
		return dlock.ErrLost
	}
	if err := l.b.seal(ctx, l, g.TTL); err != nil { // by its own session: another's would prove nothing
		return failed(ctx, err)
	}
	return nil
}

// Release implements dlock.Backend.
func (b *Backend) Release(ctx context.Context, g dlock.Grant) error {
	if err := b.enter(ctx); err != nil {
		return err
	}
	if l, ok := g.State.(*lease); ok {
		switch err := b.deleteAt(ctx, l.path, -1); {
		case err == nil:
			l.vanish()
			return nil
		case errors.Is(err, zk.ErrNoNode):
			l.vanish()
			return dlock.ErrLost
		default:
			return failed(ctx, err)
		}
	}
	p := b.place(g.Key, g.Owner)
	n, err := b.sweep(ctx, p)
	if err != nil {
		return failed(ctx, err)
	}
	if l := b.known(p); l != nil {
		l.vanish()
	}
	if n == 0 {
		return dlock.ErrLost
	}
	return nil
}

// Close implements dlock.Backend. Waiting calls of Acquire return dlock.ErrClosed. The client stays open, and the leases
// that it has run out as they would have.
func (b *Backend) Close() error {
	b.close(dlock.ErrClosed)
	return nil
}

// enter refuses a call that must not begin.
func (b *Backend) enter(ctx context.Context) error {
	if b.open.Err() != nil {
		return dlock.ErrClosed
	}
	if ctx.Err() != nil {
		return fmt.Errorf("zklock: %w", context.Cause(ctx))
	}
	return nil
}

// check refuses a TTL that the session cannot promise.
func (b *Backend) check(ctx context.Context, ttl time.Duration) error {
	if ttl <= 0 {
		return fmt.Errorf("%w: zklock: TTL %v is not positive", dlock.ErrInvalid, ttl)
	}
	id := b.c.SessionID()
	b.mu.Lock()
	known, timeout := id != 0 && id == b.session, b.timeout
	b.mu.Unlock()
	if !known {
		if _, _, err := b.exists(ctx, b.root); err != nil { // an answer: there is a session, with a timeout
			return err
		}
		timeout = time.Duration(sessionTimeout(b.c).Int()) * time.Millisecond
		b.mu.Lock()
		b.session, b.timeout = b.c.SessionID(), timeout
		b.mu.Unlock()
	}
	if ttl > timeout/2 {
		return fmt.Errorf("%w: zklock: TTL %v is longer than half the session timeout, %v, to which the server has agreed",
			dlock.ErrInvalid, ttl, timeout)
	}
	return nil
}

// failed wraps an error of the client. After ctx's end it tells the cause too.
func failed(ctx context.Context, err error) error {
	if errors.Is(err, dlock.ErrClosed) {
		return dlock.ErrClosed
	}
	if errors.Is(err, dlock.ErrHeld) {
		return err
	}
	if ctx.Err() != nil && !errors.Is(err, context.Cause(ctx)) {
		return fmt.Errorf("zklock: %w: %w", context.Cause(ctx), err)
	}
	return fmt.Errorf("zklock: %w", err)
}
