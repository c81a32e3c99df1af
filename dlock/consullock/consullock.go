// Package consullock is a dlock.Backend on HashiCorp Consul.
//
// A lock is a KV entry that exists while the lock is held. One transaction checks that it doesn't exist and acquires it for a
// session. The token is its ModifyIndex, the Raft index of that write. (LockIndex restarts at 1 when the entry is deleted.) The
// token goes back only when a snapshot is restored or the cluster is created again.
//
// # Leases and sessions
//
// Consul has no lease on a key, only sessions, which it ends between one and two TTLs after the last renewal. So two clocks bound
// a grant. A timer of the Backend deletes the entry once the lease's TTL has passed without a renewal. If the process is dead,
// frozen, cut off or closed, its session ends, at the latest two session TTLs after its last renewal or a change of leader. All
// grants of a Backend with one TTL share a session. Its TTL is longer by a quarter, and a grant is given or renewed only if the
// session outlasts it.
//
// A session ends sooner if the agent's node is deregistered: through the catalog, by consul leave, by SIGTERM to a client agent
// unless leave_on_terminate is false, or, if the agent is a server that fails, by Autopilot within seconds. Until the holder learns
// of it, from [dlock.Grant].Lost or a renewal, there may be two holders. So give New a client agent, or set Autopilot's
// cleanup_dead_servers to false, and don't deregister a node whose processes hold locks. If you can't avoid it, set a LockDelay as
// long as the leases.
//
// # Requests that arrive late
//
// A lock request without a reply may reach Consul long after its sender has given up. So each one requires that its session's
// seal, the entry {Prefix}=session/{ID}, doesn't exist. Undoing a request seals its session and deletes the entry in one
// transaction. Grants of a sealed session are still renewed; new ones use another. A request that a proxy repeats recognises its
// own entry by its flags, a number unique in the session. But a proxy must not repeat one whose first copy may still arrive: if
// one copy is refused, the other could later lock the key for nobody, until the session ends.
//
// # Limits
//
// A Backend has one blocking query for each key with waiters and for each session; an agent takes 200 connections from one
// address by default (http_max_conns_per_client). A waiter retries while Consul fails, for up to its TTL.
package consullock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/wait"
)

const (
	maxSession   = 24 * time.Hour
	maxLockDelay = 60 * time.Second

	longPoll  = time.Minute            // for a blocking query; Consul adds up to a sixteenth
	delayPoll = 100 * time.Millisecond // during a lock-delay, whose end Consul doesn't report
	failPause = 100 * time.Millisecond
	grace     = 5 * time.Second // for a reply that others wait for, on top of a blocking query's time
)

// Options configure a [Backend].
type Options struct {
	// Prefix precedes the names of all keys, "lock/" by default: letters, digits and ,-._/ without empty segments or a dot at the
	// start of a segment or after another dot. Locks with different prefixes are independent, unless one prefix begins with the
	// other: key "a/x" after "lock/" is key "x" after "lock/a/".
	Prefix string
	// MinSessionTTL is the shortest TTL of a session, 10 s by default, at least the servers' session_ttl_min. It doesn't limit
	// leases. A dead process's keys are free after at most twice this time or 2.5 times the lease's TTL, whichever is longer.
	MinSessionTTL time.Duration
	// LockDelay is how long keys can't be locked after the end of their holder's session: 0 to 60 s. It doesn't apply after a
	// release or the end of a lease, costs a round trip, and must be set by all clients that lock the same keys.
	LockDelay time.Duration
}

// Backend implements dlock.Backend. Only the Backend that gave a grant can renew it.
type Backend struct {
	c *api.Client
	o Options

	open  context.Context // ends with dlock.ErrClosed
	close context.CancelCauseFunc

	mu       sync.Mutex
	busy     sync.WaitGroup
	sessions map[time.Duration]*session // for new grants, by TTL
	leases   map[id]*lease              // held, or perhaps held
	requests uint64
	waiting  wait.Queues
}

var _ dlock.Backend = (*Backend)(nil)

// New returns a Backend on client, which stays the caller's. It sends nothing. The client's token needs key:write for the prefix,
// and session:write and session:read for its agent's node.
func New(client *api.Client, opts *Options) (*Backend, error) {
	if client == nil {
		return nil, fmt.Errorf("%w: consullock: client is nil", dlock.ErrInvalid)
	}
	o := *cmp.Or(opts, &Options{})
	o.Prefix = cmp.Or(o.Prefix, "lock/")
	o.MinSessionTTL = cmp.Or(o.MinSessionTTL, 10*time.Second)
	switch {
	case clean(o.Prefix+"x") != o.Prefix+"x":
		return nil, fmt.Errorf("%w: consullock: prefix %q has an empty segment, or characters that must be escaped", dlock.ErrInvalid, o.Prefix)
	case o.MinSessionTTL < time.Millisecond || o.MinSessionTTL > maxSession:
		return nil, fmt.Errorf("%w: consullock: MinSessionTTL %v is not between 1ms and %v", dlock.ErrInvalid, o.MinSessionTTL, maxSession)
	case o.LockDelay < 0 || o.LockDelay > maxLockDelay:
		return nil, fmt.Errorf("%w: consullock: LockDelay %v is not between 0 and %v", dlock.ErrInvalid, o.LockDelay, maxLockDelay)
	}
	b := &Backend{
		c: client, o: o,
		sessions: make(map[time.Duration]*session), leases: make(map[id]*lease),
	}
	b.open, b.close = context.WithCancelCause(context.Background())
	return b, nil
}

// Acquire implements dlock.Backend.
func (b *Backend) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	g, _, err := b.try(ctx, r)
	switch { // after ctx's end err may wrap any cause
	case err == nil, ctx.Err() == nil && !errors.Is(err, dlock.ErrHeld):
		return g, err
	case ctx.Err() != nil:
		return g, failed(ctx, ctx.Err())
	}
	r.NoteHeld()
	ctx, end := wait.Both(ctx, b.open)
	defer end()
	q, err := b.waiting.Join(ctx, r.Key, r.TTL)
	switch {
	case err != nil && ctx.Err() != nil:
		return g, failed(ctx, ctx.Err())
	case err != nil:
		return g, err
	}
	defer q.Leave()
	var index uint64
	for poll := longPoll; ; {
		e, now, err := b.read(ctx, r.Key, index, poll)
		if err == nil {
			index, poll, err = since(index, now), longPoll, dlock.ErrHeld
			if e == nil {
				var delayed bool
				once, cancel := context.WithTimeoutCause(ctx, grace, wait.ErrNoAnswer) // other waiters depend on it
				g, delayed, err = b.try(once, r)
				cancel()
				if delayed {
					poll = delayPoll
				}
			}
		}
		switch {
		case err == nil:
			q.Failing = time.Time{}
			return g, nil
		case ctx.Err() != nil:
			return g, failed(ctx, ctx.Err())
		case errors.Is(err, dlock.ErrHeld):
			q.Failing = time.Time{}
			continue
		}
		q.Failing = cmp.Or(q.Failing, time.Now())
		if !retryable(err) {
			return g, err
		}
		if q.Fail(q.Failing, err); time.Since(q.Failing) >= r.TTL {
			return g, err
		}
		index = 0
		wait.For(ctx, failPause)
	}
}

// TryAcquire implements dlock.Backend.
func (b *Backend) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	g, _, err := b.try(ctx, r)
	return g, err
}

// try reports, with dlock.ErrHeld, whether a lock-delay is the reason.
func (b *Backend) try(ctx context.Context, r dlock.Request) (g dlock.Grant, delayed bool, err error) {
	if err := b.check(r.TTL); err != nil {
		return g, false, err
	}
	// A later grant would have expired, and a frozen server may never reply.
	ctx, cancel := context.WithTimeoutCause(ctx, max(r.TTL, 3*grace), wait.ErrNoAnswer)
	defer cancel()
	for {
		if b.o.LockDelay > 0 {
			// Consul checks the lock-delay when a request arrives, not when it is applied: one sent before the session's end
			// would succeed.
			if e, _, err := b.read(ctx, r.Key, 0, 0); err != nil {
				return g, false, err
			} else if e != nil {
				return g, false, dlock.ErrHeld
			}
		}
		s, start, err := b.cover(ctx, r.TTL)
		if err != nil {
			return g, false, err
		}
		l := b.begin(r.Key, r.Owner, s, start.Add(r.TTL)) //nolint:contextcheck // it outlives ctx
		index, no, err := b.lock(ctx, l)
		switch {
		case err != nil: // it may still be applied
			b.locked(func() { b.expireAt(l, time.Now()) })
			return g, false, err
		case no == nil:
			b.locked(func() { l.index = index })
			return dlock.Grant{Key: r.Key, Owner: r.Owner, Fence: index, TTL: r.TTL, Start: start, Lost: s.over.Done(), State: l}, false, nil
		}
		b.drop(l) //nolint:contextcheck // it outlives ctx
		switch {
		case no.noSession():
			b.end(s) //nolint:contextcheck // it outlives ctx
		case no.exists(b.sealOf(s)):
			b.retire(s) //nolint:contextcheck // it outlives ctx
		case no.exists(b.name(r.Key)), no.lockDelay():
			return g, no.lockDelay(), dlock.ErrHeld
		default:
			return g, false, no
		}
	}
}

func (b *Backend) lock(ctx context.Context, l *lease) (index uint64, no refusal, err error) {
	name := b.name(l.key)
	index, no, err = b.txn(ctx,
		&api.KVTxnOp{Verb: api.KVCheckNotExists, Key: b.sealOf(l.s)},
		&api.KVTxnOp{Verb: api.KVCheckNotExists, Key: name},
		&api.KVTxnOp{Verb: api.KVLock, Key: name, Value: []byte(l.owner), Flags: l.flags, Session: l.s.id})
	switch {
	case err != nil, no == nil:
		return index, nil, err
	case !no.exists(name), no.heldElsewhere(name), b.heldBeside(l):
		return 0, no, nil
	}
	// This session has the key already: for l, if the request was repeated in transit, or for another owner.
	e, _, err := b.read(ctx, l.key, 0, 0)
	switch {
	case err != nil:
		return 0, nil, err
	case l.wrote(e):
		return e.ModifyIndex, nil, nil
	}
	return 0, no, nil
}

func (b *Backend) heldBeside(l *lease) (held bool) {
	b.locked(func() {
		for _, other := range b.leases {
			held = held || other.key == l.key && other.s == l.s && other.index != 0
		}
	})
	return held
}

// Renew implements dlock.Backend.
func (b *Backend) Renew(ctx context.Context, g dlock.Grant) error {
	if err := b.check(g.TTL); err != nil {
		return err
	}
	l, ok := g.State.(*lease)
	switch {
	case !ok || l.b != b:
		return errors.New("consullock: only the Backend that has given a grant can renew it")
	case !b.keep(l, time.Time{}):
		return dlock.ErrLost
	}
	start, err := b.extend(ctx, l.s, g.TTL)
	if errors.Is(err, errGone) {
		return dlock.ErrLost
	} else if err != nil {
		return err
	}
	// From here on only this Backend deletes the entry before the lease is over.
	_, no, err := b.txn(ctx, &api.KVTxnOp{Verb: api.KVCheckIndex, Key: b.name(g.Key), Index: g.Fence})
	switch {
	case err != nil:
		return err
	case no.changed():
		b.drop(l) //nolint:contextcheck // it outlives ctx
		return dlock.ErrLost
	case no != nil:
		return no
	case !b.keep(l, start.Add(g.TTL)):
		return dlock.ErrLost
	}
	return nil
}

// Release implements dlock.Backend.
func (b *Backend) Release(ctx context.Context, g dlock.Grant) error {
	if b.open.Err() != nil {
		return dlock.ErrClosed
	}
	what := id{g.Key, g.Owner}
	l, _ := g.State.(*lease)
	if l == nil || l.b != b {
		b.locked(func() { l = b.leases[what] })
	}
	err := b.remove(ctx, what, l, g.Fence)
	if l != nil && (err == nil || ctx.Err() == nil && errors.Is(err, dlock.ErrLost)) {
		b.drop(l) //nolint:contextcheck // it outlives ctx
	}
	return err
}

// remove deletes the entry of a grant or request, or returns dlock.ErrLost if there is none. l may be nil; index is then that of
// the write that took the key, 0 if unknown. If l's request has no reply, the transaction also seals its session, so that the
// request can't succeed later.
func (b *Backend) remove(ctx context.Context, what id, l *lease, index uint64) error {
	seals := false
	if l != nil {
		b.locked(func() { index, seals = l.index, l.index == 0 && !l.s.sealed })
	}
	if seals {
		b.retire(l.s) //nolint:contextcheck // it outlives ctx
	}
	name := b.name(what.key)
	for {
		at, found := index, true
		if index == 0 {
			e, _, err := b.read(ctx, what.key, 0, 0)
			if err != nil {
				return err
			}
			if found = l.wrote(e) || l == nil && e != nil && string(e.Value) == what.owner; found {
				at = e.ModifyIndex
			}
		}
		var ops []*api.KVTxnOp
		if found {
			ops = append(ops, &api.KVTxnOp{Verb: api.KVCheckIndex, Key: name, Index: at}, &api.KVTxnOp{Verb: api.KVDelete, Key: name})
		} else if !seals {
			return dlock.ErrLost
		}
		if seals {
			ops = append(ops, &api.KVTxnOp{Verb: api.KVLock, Key: b.sealOf(l.s), Session: l.s.id})
		}
		_, no, err := b.txn(ctx, ops...)
		switch {
		case err != nil:
			return err
		case no == nil:
			if seals {
				b.locked(func() { l.s.sealed = true })
			}
			if found {
				return nil
			}
			seals = false // retry: the request may have arrived before the seal
		case no.noSession(), no.lockDelay(): // its entries are gone, perhaps the seal too
			b.end(l.s) //nolint:contextcheck // it outlives ctx
			return dlock.ErrLost
		case !no.changed():
			return no
		case index != 0:
			return dlock.ErrLost
		}
	}
}

func (b *Backend) check(ttl time.Duration) error {
	if ttl <= 0 || b.sessionTTL(ttl) > maxSession {
		return fmt.Errorf("%w: consullock: TTL %v; it must be positive, and a session, which is longer by a quarter, can last for at most %v",
			dlock.ErrInvalid, ttl, maxSession)
	}
	if b.open.Err() != nil {
		return dlock.ErrClosed
	}
	return nil
}

// Close implements dlock.Backend. Waiting calls of Acquire return dlock.ErrClosed. Leases stay until their sessions end.
func (b *Backend) Close() error {
	b.locked(func() {
		b.close(dlock.ErrClosed)
		for _, l := range b.leases {
			l.timer.Stop()
		}
	})
	b.busy.Wait()
	return nil
}

func (b *Backend) locked(f func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f()
}

func (b *Backend) name(key string) string { return b.o.Prefix + clean(key) }

// No key has a seal's name: clean never writes "=s".
func (b *Backend) sealOf(s *session) string { return b.o.Prefix + "=session/" + s.id }

// clean escapes what a URL's path would change, and what Consul 1.21.5 refuses: all but ^[a-zA-Z0-9,_./\-?&=]+$, and two dots in
// a row. Different keys have different names.
func clean(key string) string {
	var name strings.Builder
	name.Grow(len(key))
	last := byte('/')
	for i := range len(key) {
		c := key[i]
		switch {
		case c == '/' && last == '/':
			name.WriteString("=/")
		case 'a' <= c && c <= 'z', 'A' <= c && c <= 'Z', '0' <= c && c <= '9',
			c == '/', c == '-', c == '_', c == ',', c == '.' && last != '/' && last != '.':
			name.WriteByte(c)
		default:
			fmt.Fprintf(&name, "=%02X", c)
		}
		last = c
	}
	if last == '/' {
		name.WriteByte('=')
	}
	return name.String()
}
