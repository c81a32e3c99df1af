// Package etcdlock is a dlock.Backend on etcd v3.
//
// # The queue
//
// Everyone who wants a lock puts a key {Prefix}lock/{KEY}/{LEASE}-{N}, whose value is the owner and a number that makes it
// unique, and whoever's key was created first has the lock. LEASE is the session (see below), and N tells the owners of one
// Backend apart. Names are used again and again, because etcd remembers every name until it is compacted, and goes through
// all of them whenever it looks at the queue: with a name for each owner, locking would become slower with every
// acquisition.
//
// One transaction looks whether anybody is in the queue and puts the own key at its end: if nobody was, that was the whole
// acquisition, one round trip and one commit. Otherwise the waiter has to be told when it is first. Whoever leaves the queue
// tells, in the transaction that deletes its key: a holder that releases knows who follows, for it was told itself by the
// one before, and writes to that session's inbox, {Prefix}turn/{LEASE}, "you are first, and these follow you", if that key is
// still there. The session's Backend watches the inbox. So a hand-over costs one commit and no read, and concerns one
// waiter. Whoever leaves and doesn't know, or is wrong about, who follows reads that in the same transaction and writes the
// message in another; one holder in 32 does, for the message names 32 at most. A waiter of the same Backend is told
// directly.
//
// The message is proof: what has the lock keeps it until its key is deleted, and nobody gets in between; so, too, has the
// one that a committed read showed to be first. The transaction that writes it finds the waiter's key there. It may be old
// when it is read, but the key is deleted by nobody but the waiter's own Backend, or with its session, which a grant
// requires to be alive (see below).
//
// A holder that has died tells nobody. A waiter that has heard nothing for a second therefore looks, by one linearizable
// read, whether its key is first, and whether it still exists; then it watches the key before its own, and that key only.
// When that has gone, from whatever place in the queue, and no message comes, it looks again. Every 10 s it
// asks whether both keys are there.
//
// The token is the create revision of the own key. The store gives revisions in the order of its commits and the queue is
// sorted by them, so tokens grow with the queue. The key is never modified. A restored snapshot takes revisions back,
// and tokens with them, unless it is restored with a revision bump (etcdutl snapshot restore --bump-revision).
//
// # Leases
//
// Two clocks bound a grant. A timer in the Backend deletes its key at Start + TTL unless it is renewed; it is the same
// clock as the holder's, so a TTL is exact, of any length, in whole seconds or not. The key also hangs on the Backend's
// session, a lease in etcd that all grants of one TTL share. It protects against a process that is dead, frozen or cut
// off, whose timer is of no use. The session lasts for S, whole seconds: the TTL and an eighth more (at least 1 s, at most
// 10 s) rounded up, or the server's minimum (1.5 times its election timeout) if that is longer. A grant is given or
// renewed only if the session is known to last as long as is promised: it was kept alive by a request which the server
// has answered, and which left no more than S - TTL ago on the monotonic clock and on the wall clock (the former stops
// while a machine is suspended). Otherwise it is kept alive first, which is rare: it is kept alive anyway, 1.3 times or more
// in S - TTL. A renewal therefore needs no commit.
//
// A dead holder blocks a key for at most S after its last keep-alive, and 500 ms, at which interval etcd looks for
// expired leases; a change of etcd's leader in that time starts S anew. A waiter that came in the last second of that time
// takes up to a second more. The same holds for a dead waiter, and for what is
// held when a Backend is closed.
//
// # Requests that come late
//
// A put whose answer never came may reach etcd long after its sender has given up, from the buffers of a frozen server,
// say, and would then block the lock for as long as the session lives. Every put is therefore conditional on the revision
// of one key of its session, {Prefix}session/{LEASE}, which doesn't exist at first. Undoing a put without an answer
// deletes the lock's key and moves that revision in one transaction: from then on the put fails.
//
// A deletion may come as late, when the name is in use again, by the same owner even, whose put was repeated. It therefore
// deletes only the key of its create revision or, if that isn't known, of its value.
//
// If a put finds that revision to be lower than it was, or its key gone, or its own name taken, the store has forgotten
// something: it was restored from a snapshot, or somebody has deleted or put keys. Then the Backend gives the session up and
// starts another. All grants of the old one are lost, and told so: which of them the store still knows is uncertain. Keys
// that it does know are not deleted before their time, by their timers or with the session, which is kept alive no more.
//
// # Limits
//
// With authentication, a client needs read and write permission for {Prefix}lock/, {Prefix}turn/ and {Prefix}session/.
// While etcd has no space left, nothing can be acquired, and what is held can be renewed and released.
//
// etcd's grpc-proxy is not supported: it answers keep-alives by itself, so an answer doesn't prove how long the session lasts,
// and acquisitions fail now and then. A proxy that passes bytes on is no problem.
package etcdlock

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelab/fencelab/dlock"
)

// Options configure a [Backend].
type Options struct {
	// Prefix stands before the names of all keys, "" by default. Locks with different prefixes don't know each other.
	Prefix string

	// FollowLeader has transactions sent to the member that leads the cluster, where the client knows several endpoints. It
	// alone can commit. Any other passes a transaction on to it, and hears of the commit, as does who watches there, by the
	// leader's next message; and a client takes its endpoints in turn.
	//
	// The Backend asks one endpoint after the other whether it leads, and keeps a connection of its own to the one that does, which
	// it makes with the client's Dial. The transactions that put and delete the locks' keys go there, and the watch for
	// messages. When that connection breaks, nothing is answered for a second, or an answer says that
	// another may lead, these go where the client sends them, until the leader is found: it is searched for about a second
	// later, and less often the more often that was needed, until the pauses are about 30 s.
	//
	// It is for speed alone, and safe if all endpoints are of one cluster. Those that have changed (SetEndpoints, AutoSyncInterval)
	// are followed, but Dial reads them without the client's lock: the race detector may tell. A client whose KV or
	// Watcher was replaced, as package namespace does, can't be used with it: New refuses what it can tell from etcd's own. With
	// grpc.WithBlock among its options, a client should have a DialTimeout: a search that meets an endpoint that is down leaves an
	// attempt to connect behind, one for each Backend, which ends with that time, or with the client.
	FollowLeader bool
}

// Backend implements dlock.Backend. A grant is renewed only by the Backend that gave it, and in its own time.
type Backend struct {
	c      *clientv3.Client
	prefix string
	follow bool // the leader
	router *router
	stream atomic.Int64 // see watching

	open      context.Context // ends with dlock.ErrClosed
	close     context.CancelCauseFunc
	closeOnce sync.Once

	mu       sync.Mutex
	busy     sync.WaitGroup // calls and clean-ups under way
	claims   map[id]*claim
	names    map[string]*claim       // by the name of their key in etcd
	lives    uint64                  // how many keys have had a value
	queues   map[string]map[int]bool // the numbers that are in use in each queue
	sessions map[int64]*slot         // by what S is asked for, in seconds
}

var _ dlock.Backend = (*Backend)(nil)

// New returns a Backend on client, which stays the caller's to close. It sends nothing.
//
// Calls without a deadline end when the client gives up: set its DialKeepAliveTime and DialKeepAliveTimeout, or one that
// waits for a silent server waits for ever.
func New(client *clientv3.Client, opts *Options) (*Backend, error) {
	if client == nil {
		return nil, fmt.Errorf("%w: etcdlock: client is nil", dlock.ErrInvalid)
	}
	var o Options
	if opts != nil {
		o = *opts
	}
	if err := checkPrefix(o.Prefix); err != nil {
		return nil, err
	}
	if o.FollowLeader {
		if err := checkPlain(client); err != nil {
			return nil, err
		}
	}
	b := &Backend{
		c: client, prefix: o.Prefix, follow: o.FollowLeader,
		claims: map[id]*claim{}, names: map[string]*claim{}, queues: map[string]map[int]bool{}, sessions: map[int64]*slot{},
	}
	b.open, b.close = context.WithCancelCause(context.Background())
	b.router = b.newRouter()
	return b, nil
}

// checkPrefix makes sure that no key of one prefix is in a queue of another: "lock/" comes first where the prefix ends.
func checkPrefix(prefix string) error {
	if strings.Contains(prefix, "lock/") {
		return fmt.Errorf(`%w: etcdlock: prefix %q contains "lock/", which ends a prefix`, dlock.ErrInvalid, prefix)
	}
	return nil
}

// queueOf is what the names of all keys in key's queue begin with. A slash in key is escaped, so no queue's names begin
// with another's.
func queueOf(prefix, key string) string { return prefix + "lock/" + url.PathEscape(key) + "/" }

// Acquire implements dlock.Backend. Waiters are served in the order in which they came, those of all processes in one
// queue. A waiter whose session has expired has lost its place: it gets an error that wraps dlock.ErrLost.
func (b *Backend) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.acquire(ctx, r, true)
}

// TryAcquire implements dlock.Backend. A key that others wait for is held, too.
func (b *Backend) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.acquire(ctx, r, false)
}

func (b *Backend) acquire(ctx context.Context, r dlock.Request, wait bool) (dlock.Grant, error) {
	if r.TTL <= 0 {
		return dlock.Grant{}, fmt.Errorf("%w: etcdlock: TTL %v is not positive", dlock.ErrInvalid, r.TTL)
	}
	ctx, leave, err := b.enter(ctx)
	if err != nil {
		return dlock.Grant{}, err
	}
	defer leave()
	c := b.claim(r)
	select { // an earlier attempt of the same owner may be under way
	case c.turn <- struct{}{}:
		defer func() { <-c.turn }()
	case <-ctx.Done():
		return dlock.Grant{}, failed(ctx, ctx.Err())
	}
	g, err := c.take(ctx, r.TTL, wait)
	if err != nil && !errors.Is(err, dlock.ErrHeld) {
		err = failed(ctx, err)
	}
	return g, err
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
	s := c.held(g.Fence)
	if s == nil {
		return dlock.ErrLost
	}
	start := time.Now()
	if err := s.cover(ctx, start, g.TTL); err != nil {
		return failed(ctx, err)
	}
	// Writes nothing. Without the read, a member would answer from what it has itself, which may be old.
	resp, err := b.c.Txn(ctx).If(owns(name, g.Fence)).Then(clientv3.OpGet(name, clientv3.WithCountOnly())).Commit()
	if err != nil {
		return failed(ctx, err)
	}
	if !resp.Succeeded {
		c.forget()
		return dlock.ErrLost
	}
	// The timer is the other half of the step: if it was faster, the key is being deleted.
	if !c.renewed(g.Fence, start.Add(g.TTL)) { //nolint:contextcheck // the timer outlives the call
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
	if name == "" || c == nil && g.Fence == 0 { // nothing that this Backend has put, or it is known to be gone
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

// IsOwner is a condition that holds while g is held: with it a transaction writes into the same etcd only on behalf of
// the lock's holder. A grant of this Backend needs no more than Key, Owner and Fence, which a dlock.Handle tells.
func (b *Backend) IsOwner(g dlock.Grant) clientv3.Cmp {
	_, name, _ := b.find(g)
	if name == "" {
		name = queueOf(b.prefix, g.Key) // there is no such key, so the condition never holds
	}
	return owns(name, g.Fence)
}

// find returns g's claim, nil if there is none any more, and the name of its key and its value, "" if they are unknown.
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

// owns is the condition that a key exists and was created at a revision.
func owns(name string, fence uint64) clientv3.Cmp {
	return clientv3.Compare(clientv3.CreateRevision(name), "=", int64(fence))
}

// Close implements dlock.Backend. Calls that wait return dlock.ErrClosed, after they have left the queue. What is held is
// kept alive no more and ends with its session; a session on which nothing is held is revoked. It takes a second or two
// if the server doesn't answer. The client stays open.
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
			if s := c.stop(); s != nil {
				inUse[s] = true
			}
		}
		var revoked sync.WaitGroup
		for _, l := range b.sessions {
			if s := l.s; s != nil {
				<-s.stopped
				if !inUse[s] && !s.ended() {
					revoked.Go(func() { s.revoke(b.c) })
				}
			}
		}
		revoked.Wait()
	})
	return nil
}

// enter registers a call, whose context ends with the Backend, too. The call must leave.
func (b *Backend) enter(ctx context.Context) (call context.Context, leave func(), err error) {
	if ctx.Err() != nil {
		return nil, nil, failed(ctx, ctx.Err())
	}
	if !b.begin() {
		return nil, nil, dlock.ErrClosed
	}
	call, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(b.open, func() { cancel(dlock.ErrClosed) })
	return call, func() {
		stop()
		cancel(nil)
		b.busy.Done()
	}, nil
}

// begin registers something that Close waits for. It reports false on a closed Backend.
func (b *Backend) begin() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open.Err() != nil {
		return false
	}
	b.busy.Add(1)
	return true
}

// failed wraps a client's error. After ctx's end that is ctx.Err at best, which doesn't tell the cause.
func failed(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		if errors.Is(cause, dlock.ErrClosed) {
			return dlock.ErrClosed
		}
		return fmt.Errorf("etcdlock: %w: %w", cause, err)
	}
	return fmt.Errorf("etcdlock: %w", err)
}

// leaseGone reports whether err says that a session doesn't exist (any more). Nothing was done then.
func leaseGone(err error) bool { return errors.Is(err, rpctypes.ErrLeaseNotFound) }

// pause waits for d or for the end of ctx.
func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
