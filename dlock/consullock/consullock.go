// Package consullock is a dlock.Backend on HashiCorp Consul.
//
// A lock is a key of the KV store that exists while it is held. One transaction checks that it doesn't exist and takes it
// for a session, with the owner as its value; a release, or the end of the session, deletes it. One step does both the
// check and the effect, and a free lock leaves nothing behind.
//
// # The token
//
// The token is the ModifyIndex of the entry as the grant wrote it: the index of that write in the servers' Raft log, which
// all keys share and which never falls. The usual answer is LockIndex, a counter in the entry: it begins at 1 again when
// the entry is deleted, by a release here, by a session whose behaviour is to delete, or by a hand. The index survives the
// loss of a minority of the servers. It goes backwards when the cluster's state does: after a restore from a snapshot, or
// when a cluster is made anew.
//
// # Leases and sessions
//
// Consul knows no lease on a key; it knows sessions, which it ends at some time between once and twice their TTL after the
// last renewal. So two clocks guard a grant. A timer of the Backend deletes the key when the lease's TTL has passed since its
// start without a renewal: not earlier, and soon after. If the process is dead, frozen or cut off, and after Close, its
// session ends instead, and all its keys with it: at the latest twice the session's TTL after the last renewal, or after the
// last change of the servers' leader, which gives every session its full time anew; and never before the TTL of any of its
// leases has passed, for the session's TTL is longer by a quarter and no grant is given or renewed that the session, as last
// renewed, doesn't cover. A session has no health checks, which could end it sooner.
//
// What does end it sooner is the deregistration of the node whose agent the client talks to: through the catalog, by
// consul leave, or when a client agent gets SIGTERM, unless its leave_on_terminate is false. Consul deletes the sessions of
// the node at once, and their keys. Until the holder learns of it, from [dlock.Grant].Lost or a renewal, there may be
// another: the token keeps them apart at the resource. To keep them apart here as well, set leave_on_terminate to false
// and deregister no node whose processes hold locks, or make the lock-delay as long as the leases.
//
// The session is shared by all grants of a Backend with the same TTL. It is renewed by those who need it, at most four times
// in a TTL, which takes no write on the servers. So a lock and an unlock are two round trips, as many writes, and now and
// then a third. A session for each acquisition would cost four: to create it, lock, unlock and destroy it.
//
// # Requests that come late
//
// A request whose answer never came may reach Consul long after its sender has given up, from the buffers of a frozen agent,
// say, and its session may live on for as long as another grant is renewed. Every lock is therefore taken on the condition
// that its session isn't sealed, that is, holds no entry {Prefix}=session/{ID}. Undoing a request without an answer first
// seals its session and then deletes the key: from then on the request takes nothing. Grants of a sealed session are renewed
// as before, new ones are given on another, and the session is destroyed when the last of them is over, and the seal with
// it. A failure so costs the undo a write, the next grant a session, and its end another write; a lock is one round trip
// still.
//
// A request may also be carried out twice, by something on the way that repeats it because it has lost the answer. The
// second time it finds its own entry, which it knows by the flags: a number that no other request for the session has.
//
// # The lock-delay
//
// Consul's own locks can't be taken for 15 s after a session has ended, so that a holder that doesn't know of it yet can
// finish. It is a guess about how long that takes. A token that the resource checks needs no guess, so it is 0 here unless
// [Options] say otherwise.
//
// # Limits
//
// A Backend waits with one blocking query for each key and one for each session, whatever the number of waiters; an agent
// takes 200 connections from one address unless its http_max_conns_per_client says otherwise. A waiter goes on
// asking while Consul fails, for as long as its lease is to last.
package consullock

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/fencelab/fencelab/dlock"
)

const (
	maxSession   = 24 * time.Hour   // Consul's longest session TTL
	maxLockDelay = 60 * time.Second // Consul's longest lock-delay

	// longPoll is how long Consul is to hold an answer while nothing has changed; it adds up to a sixteenth.
	longPoll = time.Minute
	// delayPoll is how often a waiter asks while a lock-delay is in force. Consul doesn't tell when it ends.
	delayPoll = 100 * time.Millisecond
	// grace is how much later than that an answer may come, and how long anything else may take for which others wait.
	grace = 5 * time.Second
	// failPause is how long a waiter pauses when Consul fails.
	failPause = 100 * time.Millisecond
)

// Options configure a [Backend].
type Options struct {
	// Prefix stands before the names of all keys, "lock/" by default: letters, digits and any of ,-._/ without an empty
	// segment, or a dot that begins one or follows another. Locks with different prefixes don't know each other, unless one
	// prefix begins with the other: key "a/x" after "lock/" is key "x" after "lock/a/".
	Prefix string
	// MinSessionTTL is the shortest TTL of a session: the servers' session_ttl_min or more. Default: 10 s, which is Consul's.
	// It has nothing to do with how short a lease may be, but with how long the keys of a dead process stay locked: up to
	// twice as long, or two and a half times the lease's TTL if that is more, after the last renewal or change of leader.
	MinSessionTTL time.Duration
	// LockDelay is for how long keys can't be locked after the end of the session that held them: 0 to 60 s, see the package
	// comment. It doesn't hold up anyone after a release or the end of a lease. It takes one more round trip, and holds only
	// if all that lock the same keys have one.
	LockDelay time.Duration
}

// Backend implements dlock.Backend. A grant is renewed by the Backend that gave it.
type Backend struct {
	c *api.Client
	o Options

	open  context.Context // ends with Close
	close context.CancelFunc

	mu       sync.Mutex
	busy     sync.WaitGroup             // what goes on in the background
	sessions map[time.Duration]*session // for new grants, by TTL
	leases   map[id]*lease              // that are held, or may be
	asked    uint64                     // how many leases have been asked for
	waiting  map[string]*queue          // by key
}

var _ dlock.Backend = (*Backend)(nil)

// New returns a Backend on client, which stays the caller's. It sends nothing. The client's token needs key:write for the
// prefix, and session:write and session:read for the node of its agent.
func New(client *api.Client, opts *Options) (*Backend, error) {
	if client == nil {
		return nil, fmt.Errorf("%w: consullock: client is nil", dlock.ErrInvalid)
	}
	o := Options{}
	if opts != nil {
		o = *opts
	}
	if o.Prefix == "" {
		o.Prefix = "lock/"
	}
	if o.MinSessionTTL == 0 {
		o.MinSessionTTL = 10 * time.Second
	}
	switch {
	case clean(o.Prefix+"x") != o.Prefix+"x":
		return nil, fmt.Errorf("%w: consullock: prefix %q has an empty segment, or something in it that names have only escaped",
			dlock.ErrInvalid, o.Prefix)
	case o.MinSessionTTL < time.Millisecond || o.MinSessionTTL > maxSession:
		return nil, fmt.Errorf("%w: consullock: MinSessionTTL %v is not between 1ms and %v", dlock.ErrInvalid, o.MinSessionTTL, maxSession)
	case o.LockDelay < 0 || o.LockDelay > maxLockDelay:
		return nil, fmt.Errorf("%w: consullock: LockDelay %v is not between 0 and %v", dlock.ErrInvalid, o.LockDelay, maxLockDelay)
	}
	b := &Backend{
		c: client, o: o,
		sessions: make(map[time.Duration]*session),
		leases:   make(map[id]*lease),
		waiting:  make(map[string]*queue),
	}
	b.open, b.close = context.WithCancel(context.Background())
	return b, nil
}

// Acquire implements dlock.Backend.
func (b *Backend) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	g, _, err := b.try(ctx, r)
	if !errors.Is(err, dlock.ErrHeld) {
		return g, err
	}
	q := b.join(r.Key)
	defer b.leave(r.Key, q)
	select {
	case q.turn <- struct{}{}:
		defer func() { <-q.turn }()
	case <-ctx.Done():
		return g, failed(ctx, context.Cause(ctx))
	case <-b.open.Done():
		return g, dlock.ErrClosed
	}
	waiting, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	defer context.AfterFunc(b.open, func() { stop(dlock.ErrClosed) })() //nolint:contextcheck // it ends what has ctx's end too
	var index uint64
	wait := longPoll
	for {
		e, now, err := b.read(waiting, r.Key, index, wait)
		if err == nil {
			index, wait = since(index, now), longPoll
			held, delayed := e != nil && string(e.Value) != r.Owner, false
			if !held {
				// Whatever happens from here on has a greater index, so that the next read learns of it at once.
				g, delayed, err = b.tryInTurn(ctx, r)
				held = errors.Is(err, dlock.ErrHeld)
			}
			if delayed {
				wait = delayPoll
			}
			switch {
			case held:
				q.failing = time.Time{}
				continue
			case err == nil:
				q.failing = time.Time{}
				return g, nil
			}
		}
		switch {
		case b.open.Err() != nil:
			return g, dlock.ErrClosed
		case waiting.Err() != nil, !passing(err), q.failed() > r.TTL:
			return g, err
		}
		index = 0
		b.pause(waiting, failPause)
	}
}

// TryAcquire implements dlock.Backend.
func (b *Backend) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	g, _, err := b.try(ctx, r)
	return g, err
}

// tryInTurn is try for one that has the turn: while its request hangs, all that stand behind it would wait for nothing.
func (b *Backend) tryInTurn(ctx context.Context, r dlock.Request) (g dlock.Grant, delayed bool, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, grace, errLate)
	defer cancel()
	return b.try(ctx, r)
}

// try asks once. With dlock.ErrHeld it reports whether it is a lock-delay that is in the way.
func (b *Backend) try(ctx context.Context, r dlock.Request) (g dlock.Grant, delayed bool, err error) {
	if err := b.check(r.TTL); err != nil {
		return g, false, err
	}
	for {
		if l := b.lease(r.Key, r.Owner); l != nil {
			g, err := b.again(ctx, r, l)
			if !errors.Is(err, dlock.ErrLost) {
				return g, false, err
			}
		}
		if b.o.LockDelay > 0 {
			// Consul looks for a lock-delay when a request arrives and not when it takes effect: one that was under way when
			// the session ended would get through. One that is sent after that was seen doesn't.
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
		l := b.begin(r.Key, r.Owner, s, start.Add(r.TTL)) //nolint:contextcheck // it goes on after ctx
		index, no, err := b.lock(ctx, l)
		switch {
		case err != nil:
			// It may take effect yet. Whatever undoes it seals the session, which would refuse new grants then.
			b.retire(s)    //nolint:contextcheck // what it starts goes on after ctx
			b.settle(l, 0) //nolint:contextcheck // so does this
			return g, false, err
		case no.is(noSession):
			b.drop(l) //nolint:contextcheck // as settle
			b.end(s)  //nolint:contextcheck // as settle
			continue
		case no.is(exists(b.sealOf(s))):
			b.drop(l)   //nolint:contextcheck // as settle
			b.retire(s) //nolint:contextcheck // as settle
			continue
		case no.is(exists(b.name(r.Key))), no.is(lockDelay):
			b.drop(l) //nolint:contextcheck // as settle
			return g, no.is(lockDelay), dlock.ErrHeld
		case no != nil:
			b.drop(l) //nolint:contextcheck // as settle
			return g, false, no
		}
		b.settle(l, index) //nolint:contextcheck // what it starts goes on after ctx
		return b.grant(r, l, index, start), false, nil
	}
}

// lock sends the request for l. It returns the index with which it was carried out, or why it was refused.
func (b *Backend) lock(ctx context.Context, l *lease) (index uint64, no refusal, err error) {
	name := b.name(l.key)
	res, no, err := b.txn(ctx,
		&api.KVTxnOp{Verb: api.KVCheckNotExists, Key: b.sealOf(l.s)},
		&api.KVTxnOp{Verb: api.KVCheckNotExists, Key: name},
		&api.KVTxnOp{Verb: api.KVLock, Key: name, Value: []byte(l.owner), Flags: l.flags, Session: l.s.id})
	switch {
	case err != nil:
		return 0, nil, err
	case no == nil:
		return res[len(res)-1].KV.ModifyIndex, nil, nil
	case !no.is(exists(name)) || no.is(heldElsewhere(name)):
		return 0, no, nil
	}
	// The session has the key already: for another owner, or for l if the request was repeated on its way.
	if b.heldBeside(l) {
		return 0, no, nil
	}
	e, _, err := b.read(ctx, l.key, 0, 0)
	switch {
	case err != nil:
		return 0, nil, err
	case l.is(e):
		return e.ModifyIndex, nil, nil
	}
	return 0, no, nil
}

// heldBeside reports whether another lease of l's session is known to have l's key.
func (b *Backend) heldBeside(l *lease) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, other := range b.leases {
		if other.key == l.key && other.s == l.s && other.index != 0 {
			return true
		}
	}
	return false
}

// again is try for a request that has been sent before and may have been granted: it is the same acquisition, with a
// lease that starts anew. It returns dlock.ErrLost if it isn't held, or no longer.
func (b *Backend) again(ctx context.Context, r dlock.Request, l *lease) (g dlock.Grant, err error) {
	// Before the look, so that it isn't granted after it was found not to be.
	if err := b.seal(ctx, l); err != nil {
		return g, err
	}
	e, _, err := b.read(ctx, r.Key, 0, 0)
	if err != nil {
		return g, err
	}
	if !l.is(e) {
		b.drop(l) //nolint:contextcheck // as settle
		return g, dlock.ErrLost
	}
	start, err := b.extend(ctx, l.s, r.TTL)
	switch {
	case errors.Is(err, errGone):
		return g, dlock.ErrLost
	case err != nil:
		return g, err
	case !b.keep(l, start.Add(r.TTL)): //nolint:contextcheck // what it starts goes on after ctx
		return g, dlock.ErrLost
	}
	return b.grant(r, l, e.ModifyIndex, start), nil
}

func (b *Backend) grant(r dlock.Request, l *lease, index uint64, start time.Time) dlock.Grant {
	return dlock.Grant{Key: r.Key, Owner: r.Owner, Fence: index, TTL: r.TTL, Start: start, Lost: l.s.gone, State: b}
}

// Renew implements dlock.Backend.
func (b *Backend) Renew(ctx context.Context, g dlock.Grant) error {
	if err := b.check(g.TTL); err != nil {
		return err
	}
	l := b.lease(g.Key, g.Owner)
	switch {
	case l == nil && g.State != b:
		return errors.New("consullock: only the Backend that has given a grant can renew it")
	case l == nil:
		return dlock.ErrLost
	}
	start, err := b.extend(ctx, l.s, g.TTL)
	if errors.Is(err, errGone) {
		return dlock.ErrLost
	} else if err != nil {
		return err
	}
	// The entry is as the grant wrote it; from here on nobody but this Backend takes it away before the lease is over.
	_, no, err := b.txn(ctx, &api.KVTxnOp{Verb: api.KVCheckIndex, Key: b.name(g.Key), Index: g.Fence})
	switch {
	case err != nil:
		return err
	case no.is(changed):
		b.drop(l) //nolint:contextcheck // as settle
		return dlock.ErrLost
	case no != nil:
		return no
	case !b.keep(l, start.Add(g.TTL)): //nolint:contextcheck // what it starts goes on after ctx
		// It ran out meanwhile.
		return dlock.ErrLost
	}
	return nil
}

// Release implements dlock.Backend.
func (b *Backend) Release(ctx context.Context, g dlock.Grant) error {
	if b.open.Err() != nil {
		return dlock.ErrClosed
	}
	l := b.lease(g.Key, g.Owner)
	if l != nil {
		if err := b.seal(ctx, l); err != nil {
			return err
		}
	}
	err := b.free(ctx, id{g.Key, g.Owner}, "", g.Fence)
	if l != nil && (err == nil || errors.Is(err, dlock.ErrLost)) {
		b.drop(l) //nolint:contextcheck // as settle
	}
	return err
}

// free deletes a key if it is the owner's. index is that of the write that took it; 0 if it isn't known: then session is
// that for which it was taken, unless that isn't known either.
func (b *Backend) free(ctx context.Context, what id, session string, index uint64) error {
	known := index != 0
	for {
		if !known {
			e, _, err := b.read(ctx, what.key, 0, 0)
			if err != nil {
				return err
			}
			if e == nil || string(e.Value) != what.owner || session != "" && e.Session != session {
				return dlock.ErrLost
			}
			index = e.ModifyIndex
		}
		_, no, err := b.txn(ctx,
			&api.KVTxnOp{Verb: api.KVCheckIndex, Key: b.name(what.key), Index: index},
			&api.KVTxnOp{Verb: api.KVDelete, Key: b.name(what.key)})
		switch {
		case err != nil:
			return err
		case no == nil:
			return nil
		case !no.is(changed):
			return no
		case known:
			return dlock.ErrLost
		}
	}
}

// check returns why a call cannot work.
func (b *Backend) check(ttl time.Duration) error {
	if ttl <= 0 || b.sessionTTL(ttl) > maxSession {
		return fmt.Errorf("%w: consullock: TTL %v; it must be positive, and a session that is longer by a quarter at most %v",
			dlock.ErrInvalid, ttl, maxSession)
	}
	if b.open.Err() != nil {
		return dlock.ErrClosed
	}
	return nil
}

// Close implements dlock.Backend. Waiting calls of Acquire return dlock.ErrClosed. Leases stay until their sessions end.
func (b *Backend) Close() error {
	b.mu.Lock()
	b.close()
	for _, l := range b.leases {
		if l.timer != nil {
			l.timer.Stop()
		}
	}
	b.mu.Unlock()
	b.busy.Wait()
	return nil
}

// name is key's name in the KV store.
func (b *Backend) name(key string) string { return b.o.Prefix + clean(key) }

// sealOf is the name of s's seal. It is no key's: clean writes nothing but two hexadecimal digits, or the segment's end,
// after an equals sign.
func (b *Backend) sealOf(s *session) string { return b.o.Prefix + "=session/" + s.id }

// clean escapes what wouldn't arrive in a URL's path as it left, or isn't allowed in a name: Consul 1.21.5 and the releases of
// that time refuse all that isn't of ^[a-zA-Z0-9,_./\-?&=]+$, and two dots in a row. An empty segment becomes one that is no
// other's. Different keys have different names.
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

// queue is where the calls of Acquire wait that want one key.
type queue struct {
	n    int           // how many there are; Backend.mu guards it
	turn chan struct{} // whoever has put something in is the one that asks Consul

	failing time.Time // since when that fails; zero if it doesn't. The one that asks may read and write it
}

// failed notes that asking has failed, and returns for how long it has. The next in turn goes on from there: otherwise each
// would bear it for a TTL of its own, one after the other.
func (q *queue) failed() time.Duration {
	if q.failing.IsZero() {
		q.failing = time.Now()
	}
	return time.Since(q.failing)
}

func (b *Backend) join(key string) *queue {
	b.mu.Lock()
	defer b.mu.Unlock()
	q := b.waiting[key]
	if q == nil {
		q = &queue{turn: make(chan struct{}, 1)}
		b.waiting[key] = q
	}
	q.n++
	return q
}

func (b *Backend) leave(key string, q *queue) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if q.n--; q.n == 0 {
		delete(b.waiting, key)
	}
}
