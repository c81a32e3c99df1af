// Package redlock is a dlock.Backend on N independent Redis nodes: the Redlock algorithm
// (https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/) with a fencing token.
//
// A request goes to all nodes at once; a quorum of N/2+1 grants the lock. A failed attempt is undone on every node, but
// keeps its votes until NodeTimeout if a node is silent: for contended locks set NodeTimeout to a few round trips.
//
// A lease is valid for its TTL, minus the time the nodes took to answer, minus 1 % and 2 ms for clock drift. A TTL below 9 ms is
// refused. A node whose clock jumps, or that restarts without its data, votes for a second owner while the first still counts on
// its vote.
//
// # The token
//
// Each node keeps a counter, redlock:fence:{KEY}: a number, and the owner who wrote it. A grant takes two round trips:
//
//  1. The lock is taken on a quorum, whose replies carry their counters.
//  2. The highest counter plus one is written to a quorum. A node accepts it only while this attempt has the node's lock,
//     and only if it is greater than its counter, or equal and written by the same owner. If nodes are ahead, a higher
//     number is tried.
//
// As long as no node forgets a counter that it has acknowledged, whatever clocks and TTLs do, and despite crashes and lost, late or
// duplicated messages,
//
//   - no two owners get the same token: two quorums share a node, and a node accepts no number from two owners;
//   - a grant requested after another was answered has the greater token: phase one hears from a node that has accepted the
//     other's. Two concurrent grants may get their tokens in either order.
//
// Both fail when nodes forget (a restart without the last writes, a failover to a lagging replica, an eviction, a FLUSHALL) or
// when clients are given different nodes: tokens repeat or regress. One forgetful node of five can be enough. Use appendonly yes,
// appendfsync always and maxmemory-policy noeviction, and bring a node that has lost data back only with the counters of a quorum
// of the others. Or use a lock on a consensus store.
package redlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/wait"
	"github.com/fencelab/fencelab/internal/jitter"
	"github.com/fencelab/fencelab/internal/redisscript"
)

// Options configure a [Backend]. All clients of a lock must be given the same nodes, and the same Prefix.
type Options struct {
	Prefix string // before the names of all keys; "" by default. Locks with different prefixes are independent.
	// NodeTimeout is how long each phase waits for a node's reply; by default a twentieth of the TTL, from 1 ms to 1 s. Keep it
	// small against the TTL: waiting for a dead node uses up the lease. If a quorum often answers later, nobody gets the lock:
	// raise it, and the TTL with it.
	NodeTimeout time.Duration
	Spin        Spin // how Acquire waits for a lock that is held
	// UnsafeCounters demonstrates an often-proposed, unsound token: every node increments its own counter when it votes, and the
	// token is the highest of the quorum. A later quorum without the node that was ahead gets a smaller token or the same. Never
	// use it to protect data, or on keys that were used without it.
	UnsafeCounters bool
}

// Spin is how Acquire retries: after a random backoff, which resolves split votes, below a limit that doubles from Min to Max, or
// sooner if enough of the leases in its way have ended. Only one of a Backend's waiters per key retries at a time. Between Backends
// it is unfair: the first to retry after a release wins. Min should be a few round trips. Defaults: 2 ms, and 100 ms or Min if that
// is longer.
type Spin struct{ Min, Max time.Duration }

// Backend implements dlock.Backend on any redis.UniversalClient but a redis.Ring. Set ContextTimeoutEnabled on the clients:
// otherwise a request to a silent node holds its connection, and delays Close, until the client's own timeouts.
type Backend struct {
	nodes  []redis.UniversalClient
	quorum int
	o      Options
	busy   sync.WaitGroup
	open   context.Context
	close  context.CancelCauseFunc

	mu     sync.Mutex
	number int64                 // of the last attempt
	loose  map[lockOf][]*attempt // given up while their requests of phase one are in flight

	waiting wait.Queues
}

type lockOf struct{ key, owner string }

var _ dlock.Backend = (*Backend)(nil)

// New returns a Backend on independent nodes, one client each, which the caller closes. An odd number is best: four nodes
// tolerate no more failures than three. New sends nothing.
func New(nodes []redis.UniversalClient, opts *Options) (*Backend, error) {
	o := *cmp.Or(opts, &Options{})
	o.Spin.Min = cmp.Or(o.Spin.Min, 2*time.Millisecond)
	o.Spin.Max = cmp.Or(o.Spin.Max, max(o.Spin.Min, 100*time.Millisecond))
	switch {
	case len(nodes) == 0:
		return nil, invalid("no nodes")
	case o.NodeTimeout < 0:
		return nil, invalid("NodeTimeout %v is negative", o.NodeTimeout)
	case o.Spin.Min <= 0 || o.Spin.Max < o.Spin.Min:
		return nil, invalid("Spin{Min: %v, Max: %v}; Min must be positive and Max at least Min", o.Spin.Min, o.Spin.Max)
	case strings.ContainsAny(o.Prefix, "{}"):
		return nil, invalid("prefix %q contains a brace, which Redis Cluster would take for a hash tag", o.Prefix)
	}
	for i, c := range nodes {
		if c == nil {
			return nil, invalid("the client of node %d is nil", i)
		}
		if err := redisscript.Check(c); err != nil {
			return nil, invalid("node %d: %w", i, err)
		}
		if j := slices.IndexFunc(nodes[:i], func(o redis.UniversalClient) bool { return reflect.ValueOf(c).Comparable() && o == c }); j >= 0 {
			return nil, invalid("nodes %d and %d have the same client, and would vote twice", j, i)
		}
	}
	b := &Backend{nodes: slices.Clone(nodes), quorum: len(nodes)/2 + 1, o: o, loose: map[lockOf][]*attempt{}}
	b.open, b.close = context.WithCancelCause(context.Background())
	return b, nil
}

func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: redlock: "+format, append([]any{dlock.ErrInvalid}, args...)...)
}

// Acquire implements dlock.Backend. See [Spin].
func (b *Backend) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.acquire(ctx, r, true)
}

// TryAcquire implements dlock.Backend. It returns dlock.ErrHeld when a quorum names the same other owner. While no owner has a
// quorum (a split vote, a release in flight), it retries for up to NodeTimeout.
func (b *Backend) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.acquire(ctx, r, false)
}

// maxLate limits the attempts that win too late to be used. Seeing another holder more than a TTL later resets the count.
const maxLate = 3

func (b *Backend) acquire(ctx context.Context, r dlock.Request, patient bool) (dlock.Grant, error) {
	ttl, err := millis(r.TTL)
	if err != nil {
		return dlock.Grant{}, err
	}
	ctx, keys, done, err := b.enter(ctx, r.Key)
	if err != nil {
		return dlock.Grant{}, err
	}
	defer done()
	timeout := b.timeout(r.TTL)
	giveUp := time.Now().Add(timeout)
	late := 0
	var last time.Time // of the last late attempt
	var q *wait.Queue
	for pause := b.o.Spin.Min; ; pause += min(pause, b.o.Spin.Max-pause) {
		a := &attempt{b: b, r: r, keys: keys, ttl: ttl, number: b.next(), timeout: timeout, holders: map[string]int{}}
		token, err := a.run(ctx)
		switch {
		case err == nil:
			return dlock.Grant{Key: r.Key, Owner: r.Owner, Fence: token, TTL: r.TTL, Start: a.start, State: a}, nil
		case errors.Is(err, errLate):
			late++
			last = time.Now()
		case errors.Is(err, dlock.ErrHeld):
			r.NoteHeld()
			if time.Since(last) > r.TTL { // late wins are normal in a long wait
				late = 0
			}
		default:
			if q != nil && ctx.Err() == nil {
				q.Fail(a.start, err)
			}
			return dlock.Grant{}, err
		}
		if late == maxLate || !patient && (a.held || !time.Now().Before(giveUp)) {
			return dlock.Grant{}, err
		}
		if patient && q == nil && errors.Is(err, dlock.ErrHeld) {
			q, err = b.waiting.Join(ctx, r.Key, timeout)
			switch {
			case err == nil:
				defer q.Leave()
			case ctx.Err() != nil:
				return dlock.Grant{}, ended(ctx)
			default:
				return dlock.Grant{}, err
			}
		}
		backoff := jitter.N(pause)
		if free, ok := a.free(); ok {
			backoff = min(backoff, time.Until(free)+time.Millisecond) // a lease lasts to the end of its last millisecond
		}
		if wait.For(ctx, backoff); ctx.Err() != nil { // whose cause may be an ErrHeld
			return dlock.Grant{}, ended(ctx)
		}
	}
}

// Renew implements dlock.Backend. It needs a quorum. After an error a minority may have been renewed, which extends no lease.
func (b *Backend) Renew(ctx context.Context, g dlock.Grant) error {
	ttl, err := millis(g.TTL)
	if err != nil {
		return err
	}
	a, granted := g.State.(*attempt)
	if granted && a.over() { // what a quorum has then proves nothing, see Release
		return dlock.ErrLost
	}
	start := time.Now()
	err = b.each(ctx, g, renewing, func(ctx context.Context, c redis.UniversalClient, lock string) (bool, error) {
		n, err := renewScript.Run(ctx, c, []string{lock}, g.Owner, ttl).Int64()
		return n == 1, err
	})
	if granted && err == nil {
		a.extend(start)
	}
	return err
}

// Release implements dlock.Backend. It returns when a quorum has freed the lock, and frees the other nodes in the background.
// Without g.State it undoes a request, and returns when a quorum has no trace of it. Once the lease has ended it returns
// dlock.ErrLost: what it frees may have been locked by a late request.
func (b *Backend) Release(ctx context.Context, g dlock.Grant) error {
	number := b.next() // covers all that the owner has requested until now
	why, over := undoing, false
	if a, granted := g.State.(*attempt); granted {
		why, number, over = releasing, max(number, a.number), a.over()
	}
	err := b.each(ctx, g, why, func(ctx context.Context, c redis.UniversalClient, lock string) (bool, error) {
		return releaseOn(ctx, c, lock, g.Owner, number)
	})
	if err == nil && over {
		return dlock.ErrLost
	}
	return err
}

type purpose int

const (
	renewing  purpose = iota
	releasing         // a grant
	undoing           // what may have been granted
)

// each calls f for every node. f reports whether the owner had the lock there: a quorum must, unless the purpose is to undo.
func (b *Backend) each(
	ctx context.Context, g dlock.Grant, why purpose,
	f func(ctx context.Context, c redis.UniversalClient, lock string) (bool, error),
) error {
	ctx, keys, done, err := b.enter(ctx, g.Key)
	if err != nil {
		return err
	}
	defer done()
	attempts := b.inFlight(g)
	p := broadcast(ctx, b, b.timeout(g.TTL), func(ctx context.Context, i int) (bool, error) {
		for _, a := range attempts {
			if err := a.nodes[i].settled(ctx); err != nil {
				return false, err
			}
		}
		return f(ctx, b.nodes[i], keys[0])
	})
	minority := len(b.nodes) - b.quorum
	var owned, lost int
	undo := why == undoing
	for owned < b.quorum {
		open := owned+p.left >= b.quorum || lost+p.left > minority // the replies still to come may decide it
		switch {
		case undo && owned > 0 && owned+lost >= b.quorum:
			return nil
		case lost > minority && (!undo || lost >= b.quorum): // of an even number, half of the nodes could still be the owner's
			return dlock.ErrLost
		case undo && p.failed > minority, why == renewing && !open,
			why == releasing && p.left == 0: // not before: a repeated release could overtake this one where it is in flight
			return p.unavailable()
		}
		had, ok, err := p.next(ctx)
		switch {
		case err != nil:
			return err
		case ok && had:
			owned++
		case ok:
			lost++
		}
	}
	return nil
}

// inFlight returns the attempts whose requests could arrive after those of a call for g.
func (b *Backend) inFlight(g dlock.Grant) []*attempt {
	b.mu.Lock()
	all := slices.Clone(b.loose[lockOf{g.Key, g.Owner}])
	b.mu.Unlock()
	if a, granted := g.State.(*attempt); granted {
		all = append(all, a)
	}
	return all
}

func (b *Backend) givenUp(a *attempt) {
	of := lockOf{a.r.Key, a.r.Owner}
	b.mu.Lock()
	b.loose[of] = append(b.loose[of], a)
	b.mu.Unlock()
	b.busy.Go(func() {
		for i := range a.nodes {
			<-a.nodes[i].done
		}
		b.mu.Lock()
		defer b.mu.Unlock()
		b.loose[of] = slices.DeleteFunc(b.loose[of], func(other *attempt) bool { return other == a })
		if len(b.loose[of]) == 0 {
			delete(b.loose, of)
		}
	})
}

// Close implements dlock.Backend. It waits for requests in flight and for failed attempts to be undone.
func (b *Backend) Close() error {
	b.mu.Lock()
	b.close(dlock.ErrClosed)
	b.mu.Unlock()
	b.busy.Wait()
	return nil
}

// enter begins a call, which Close waits for until done is called. Its context also ends with the Backend. The hash tag keeps a
// key's names in one slot of a Cluster.
func (b *Backend) enter(ctx context.Context, key string) (_ context.Context, names []string, done func(), err error) {
	if strings.HasPrefix(key, "}") { // "{}" is no hash tag
		return nil, nil, nil, invalid("key %q begins with a closing brace", key)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open.Err() != nil {
		return nil, nil, nil, ended(b.open)
	}
	b.busy.Add(1)
	ctx, end := wait.Both(ctx, b.open)
	names = []string{b.o.Prefix + "redlock:{" + key + "}", b.o.Prefix + "redlock:fence:{" + key + "}"}
	return ctx, names, func() { end(); b.busy.Done() }, nil
}

// next numbers attempts: a late release of a failed attempt must not free what a later attempt of the same owner has taken.
// The clock orders those of different Backends.
func (b *Backend) next() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.number = max(b.number+1, time.Now().UnixMicro())
	return b.number
}

func (b *Backend) timeout(ttl time.Duration) time.Duration {
	return cmp.Or(b.o.NodeTimeout, min(max(ttl/20, time.Millisecond), time.Second))
}

// drift is the algorithm's own allowance for clock drift and for Redis's resolution.
func drift(ttl time.Duration) time.Duration { return ttl/100 + 2*time.Millisecond }

// millis is ttl in Redis's unit. For a shorter TTL the Locker's margin would be smaller than drift.
func millis(ttl time.Duration) (int64, error) {
	if ttl%time.Millisecond != 0 || ttl/4 < drift(ttl) {
		return 0, invalid("TTL %v; it must be whole milliseconds, the unit of Redis, and at least 9ms, because 2 ms and 1 %% are set aside for drift", ttl)
	}
	return ttl.Milliseconds(), nil
}

func ended(ctx context.Context) error { return fmt.Errorf("redlock: %w", context.Cause(ctx)) }
