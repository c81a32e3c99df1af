// Package redlock is a dlock.Backend on N independent Redis nodes: the Redlock algorithm
// (https://redis.io/docs/latest/develop/clients/patterns/distributed-locks/) with a fencing token.
//
// All nodes are asked at once, and who gets a quorum of N/2+1 has the lock, however the others answer. It stays available
// while a minority of the nodes is down. Without a quorum there is no lock, and an attempt that fails is undone on every
// node, those that did not answer included.
//
// Nodes that are silent, because they are frozen or cut off without a word, cost more than nodes that refuse connections:
// when several ask at once and split the votes of the others, each could still win with a silent node's, and keeps the
// votes that it has until the NodeTimeout. Nobody gets the lock before. One that asks alone is not held up. Where nodes may
// go silent and locks are contended, set a NodeTimeout of a few round trips.
//
// # Validity
//
// A lease is good for its TTL, minus the time that the nodes took to answer, minus what the clocks may drift apart in it
// (1 % and 2 ms). A Grant has the full TTL and as its Start the time before the first request left: to count from there
// is to subtract the time that the answers took, and dlock.Locker subtracts the drift, which is the same there. Nothing
// is subtracted twice. A TTL below 9 ms is refused, for the Locker never subtracts more than a quarter of the TTL. A lease
// whose validity is over before it is known is not granted.
//
// The lock is as good as the nodes' clocks and memories. A node whose clock jumps, or that restarts without its data,
// gives its vote to a second owner while the first still counts on it. What keeps data safe is the token.
//
// # The token
//
// Independent nodes share no counter. Each keeps one by itself, redlock:fence:{KEY}: a number, and the owner who wrote
// it. A grant takes two round trips to all nodes at once:
//
//  1. The lock is taken on a quorum, whose answers carry their counters.
//  2. The highest of them, plus one, is written to a quorum. A node takes it only while it still has this attempt's
//     lock, and only if it is greater than its counter, or equal and the same owner's. If nodes are ahead, a higher
//     number is tried. The grant counts when a quorum has accepted its token.
//
// As long as no node forgets a counter that it has acknowledged,
//
//   - no two owners get the same token: both would have been accepted by one node, for two quorums share one, and it takes
//     no number twice from different owners;
//   - a grant that is asked for after another was answered has the greater token: among the nodes that it hears from in
//     the first phase is one that had accepted the other's.
//
// Neither argument uses a clock, a TTL or the lock. Clocks that jump, frozen or crashed clients, crashed nodes that come
// back with their data, messages that are lost, late or repeated, and proposers that believe at the same time to have the
// lock, break neither. Two grants asked for at the same time may get their tokens in either order. As a token is accepted
// only under the lock, one that was overtaken between the phases fails.
//
// It fails when nodes forget: on a restart without persistence or without the last writes (anything but appendfsync
// always), a failover of the node to a replica that lags, an eviction, a FLUSHALL. A token that nobody remembers in a
// quorum is given again, to another owner, or is followed by a smaller one; a resource can't tell the two owners of one
// token apart. A token sits on at least a quorum of the nodes, usually on all, and nodes that refuse their vote tell it
// too. With it on exactly three of five, one that forgets is enough, if the two that know don't answer the next in time;
// with it on all, it takes three. It fails too when clients are given different nodes. Run the
// nodes with appendfsync always and maxmemory-policy noeviction, bring a node that has lost data back only with the
// counters of a quorum of the others, or take the token from a consensus store.
package redlock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
	"sync"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
)

// Options configure a [Backend]. All clients of a lock must be given the same nodes, and the same Prefix.
type Options struct {
	// Prefix stands before the names of all keys, "" by default. Locks with different prefixes don't know each other.
	Prefix string
	// NodeTimeout is how long an answer of a node is waited for, in each phase. It should be small against the TTL, for
	// an attempt that waits for a dead node uses up its lease. Default: a twentieth of the TTL, 1 ms to 1 s.
	NodeTimeout time.Duration
	// Spin is how Acquire waits for a lock that it doesn't get.
	Spin Spin
	// UnsafeCounters replaces the token by one that is often proposed, to show that it is unsound: every node counts up
	// a counter of its own in the step in which it gives its vote, and the token is the highest answer of the quorum
	// that answered first. The nodes' counters drift apart, for an attempt that fails counts up too, and nodes are down
	// at different times. Then a later grant, with a quorum of which the node that was ahead is no part, gets a
	// smaller token, or the same. It saves a round trip. Never use it to protect data, nor on keys that were used
	// without it.
	UnsafeCounters bool
}

// Spin is how Acquire waits: it asks again after a random time below a limit that grows from Min to Max, or when a quorum
// of the leases in its way has ended, if that is sooner. Chance is what ends a split vote, in which two get a minority each.
// It is unfair: whoever asks first after a release gets the lock. Min should be a few round trips. Zero values: 2 ms, and
// 100 ms or Min if that is longer.
type Spin struct {
	Min, Max time.Duration
}

// Backend implements dlock.Backend. It works with every redis.UniversalClient. Set ContextTimeoutEnabled on the clients:
// without it a request to a node that doesn't answer occupies its connection, and delays Close, until the client's own
// timeouts.
type Backend struct {
	nodes  []redis.UniversalClient
	quorum int
	o      Options

	mu     sync.Mutex
	closed chan struct{}
	busy   sync.WaitGroup // calls and requests under way
	number int64          // of the last attempt
}

var _ dlock.Backend = (*Backend)(nil)

// New returns a Backend on nodes that know nothing of each other, a client for each; the clients stay the caller's to
// close. An odd number is best: with four nodes no more may fail than with three. It sends nothing.
func New(nodes []redis.UniversalClient, opts *Options) (*Backend, error) {
	if len(nodes) == 0 {
		return nil, fmt.Errorf("%w: redlock: no nodes", dlock.ErrInvalid)
	}
	for i, c := range nodes {
		if c == nil {
			return nil, fmt.Errorf("%w: redlock: the client of node %d is nil", dlock.ErrInvalid, i)
		}
		for j, d := range nodes[:i] {
			if c == d {
				return nil, fmt.Errorf("%w: redlock: nodes %d and %d have the same client, and would vote twice", dlock.ErrInvalid, j, i)
			}
		}
	}
	var o Options
	if opts != nil {
		o = *opts
	}
	o.Spin.Min = cmp.Or(o.Spin.Min, 2*time.Millisecond)
	o.Spin.Max = cmp.Or(o.Spin.Max, max(o.Spin.Min, 100*time.Millisecond))
	switch {
	case o.NodeTimeout < 0:
		return nil, fmt.Errorf("%w: redlock: NodeTimeout %v is negative", dlock.ErrInvalid, o.NodeTimeout)
	case o.Spin.Min <= 0 || o.Spin.Max < o.Spin.Min:
		return nil, fmt.Errorf("%w: redlock: Spin{Min: %v, Max: %v}; Min must be positive and Max at least Min",
			dlock.ErrInvalid, o.Spin.Min, o.Spin.Max)
	case strings.ContainsAny(o.Prefix, "{}"):
		return nil, fmt.Errorf("%w: redlock: prefix %q contains a brace, which Redis Cluster would take for a hash tag",
			dlock.ErrInvalid, o.Prefix)
	}
	return &Backend{
		nodes: append([]redis.UniversalClient(nil), nodes...), quorum: len(nodes)/2 + 1, o: o, closed: make(chan struct{}),
	}, nil
}

// Acquire implements dlock.Backend. It spins; see [Spin].
func (b *Backend) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.acquire(ctx, r, true)
}

// TryAcquire implements dlock.Backend. It returns dlock.ErrHeld when a quorum of the nodes names the same other owner.
// A lock that nobody can have, because several got a minority each or one is being released, is asked for again, for as
// long as a node may take to answer.
func (b *Backend) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	return b.acquire(ctx, r, false)
}

// arrivals is how often an acquisition is tried when its lease is over before it is known, and the lock wasn't others' for a
// TTL in between.
const arrivals = 3

func (b *Backend) acquire(ctx context.Context, r dlock.Request, patient bool) (dlock.Grant, error) {
	keys, err := b.names(r.Key)
	if err != nil {
		return dlock.Grant{}, err
	}
	ttl, err := millis(r.TTL)
	if err != nil {
		return dlock.Grant{}, err
	}
	if !b.enter() {
		return dlock.Grant{}, errClosed
	}
	defer b.busy.Done()
	timeout := b.timeout(r.TTL)
	giveUp := time.Now().Add(timeout)
	late := 0
	var last time.Time // when it was late
	for pause := b.o.Spin.Min; ; pause = min(2*pause, b.o.Spin.Max) {
		a := &attempt{b: b, r: r, keys: keys, ttl: ttl, number: b.next(), timeout: timeout}
		token, err := a.run(ctx)
		switch {
		case err == nil:
			return dlock.Grant{Key: r.Key, Owner: r.Owner, Fence: token, TTL: r.TTL, Start: a.start, State: a}, nil
		case errors.Is(err, errLate):
			late++
			last = time.Now()
		case errors.Is(err, dlock.ErrHeld):
			if time.Since(last) > r.TTL { // a long wait may win too late now and then
				late = 0
			}
		default:
			return dlock.Grant{}, err
		}
		if late == arrivals || !patient && (a.held() || !time.Now().Before(giveUp)) {
			return dlock.Grant{}, err
		}
		wait := rand.N(pause)
		if free, ok := a.free(); ok {
			wait = min(wait, max(time.Until(free), 0)+time.Millisecond) // a lease is good to the end of its last millisecond
		}
		if err := b.wait(ctx, wait); err != nil {
			return dlock.Grant{}, err
		}
	}
}

func (b *Backend) wait(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ended(ctx)
	case <-b.closed:
		return errClosed
	}
}

// Renew implements dlock.Backend. It needs a quorum: a minority may have been renewed when it returns an error, which
// makes nobody's lease longer than its holder's.
func (b *Backend) Renew(ctx context.Context, g dlock.Grant) error {
	ttl, err := millis(g.TTL)
	if err != nil {
		return err
	}
	return b.each(ctx, g, renewing, func(ctx context.Context, c redis.UniversalClient, lock string) (bool, error) {
		n, err := renewScript.Run(ctx, c, []string{lock}, g.Owner, ttl).Int64()
		return n == 1, err
	})
}

// Release implements dlock.Backend. It returns when a quorum has freed the lock, and goes on with the other nodes in the
// background. Without the State of a grant it undoes a request, which is done when a quorum has nothing of it, whether
// this call or the request's own failure has freed it there.
func (b *Backend) Release(ctx context.Context, g dlock.Grant) error {
	number := b.next() // all that the owner has asked for until now
	why := undoing
	if a, granted := g.State.(*attempt); granted {
		why, number = releasing, max(number, a.number)
	}
	return b.each(ctx, g, why, func(ctx context.Context, c redis.UniversalClient, lock string) (bool, error) {
		return releaseOn(ctx, c, lock, g.Owner, number)
	})
}

// purpose is what each asks the nodes for.
type purpose int

const (
	renewing  purpose = iota
	releasing         // what has been granted
	undoing           // what may have been granted
)

// each has f act on the lock of every node. f reports whether the lock was the owner's there, which it must be on a quorum;
// to undo, it need not have been.
func (b *Backend) each(
	ctx context.Context, g dlock.Grant, why purpose,
	f func(ctx context.Context, c redis.UniversalClient, lock string) (bool, error),
) error {
	keys, err := b.names(g.Key)
	if err != nil {
		return err
	}
	if !b.enter() {
		return errClosed
	}
	defer b.busy.Done()
	if ctx.Err() != nil {
		return ended(ctx)
	}
	a, _ := g.State.(*attempt)
	p := ask(ctx, b, b.timeout(g.TTL), func(ctx context.Context, i int) (bool, error) {
		if a != nil {
			if err := a.nodes[i].settled(ctx); err != nil {
				return false, err
			}
		}
		return f(ctx, b.nodes[i], keys[0])
	})
	minority := len(b.nodes) - b.quorum
	var owned, lost, failed int
	var failure error
	undo := why == undoing
	for owned < b.quorum {
		open := owned+p.left >= b.quorum || lost+p.left > minority // one of the answers that are left may settle it
		switch {
		case undo && owned > 0 && owned+lost >= b.quorum:
			return nil
		case lost > minority && (!undo || lost >= b.quorum): // of an even number, half of the nodes could still be the owner's
			return dlock.ErrLost
		case undo && failed > minority, why == renewing && !open:
			return b.unavailable(failed, failure)
		case why == releasing && p.left == 0: // not before: one that is repeated could overtake this one, where it is under way
			return b.unavailable(failed, failure)
		}
		v, err := p.next(ctx)
		switch {
		case err != nil:
			return err
		case v.err != nil:
			failed++
			failure = first(failure, v.node, v.err)
		case v.val:
			owned++
		default:
			lost++
		}
	}
	return nil
}

// Close implements dlock.Backend. Waiting calls return dlock.ErrClosed. It waits for the requests that are under way, the
// undoing of failed attempts among them. The clients stay open.
func (b *Backend) Close() error {
	b.mu.Lock()
	if !b.isClosed() {
		close(b.closed)
	}
	b.mu.Unlock()
	b.busy.Wait()
	return nil
}

func (b *Backend) isClosed() bool {
	select {
	case <-b.closed:
		return true
	default:
		return false
	}
}

// enter registers a call that Close waits for. It reports false on a closed Backend.
func (b *Backend) enter() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.isClosed() {
		return false
	}
	b.busy.Add(1)
	return true
}

// next numbers attempts. A late release of one that failed must not free what a later attempt of the same owner has
// taken. The clock orders those of different Backends.
func (b *Backend) next() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.number = max(b.number+1, time.Now().UnixMicro())
	return b.number
}

func (b *Backend) timeout(ttl time.Duration) time.Duration {
	switch {
	case b.o.NodeTimeout > 0:
		return b.o.NodeTimeout
	case ttl <= 0: // the release of a request whose grant never came
		return time.Second
	}
	return min(max(ttl/20, time.Millisecond), time.Second)
}

// names returns the names of key's lock and fence counter. The hash tag keeps both in one slot, should a node be a Cluster.
func (b *Backend) names(key string) ([]string, error) {
	if strings.HasPrefix(key, "}") { // "{}" is no hash tag
		return nil, fmt.Errorf("%w: redlock: key %q begins with a closing brace", dlock.ErrInvalid, key)
	}
	return []string{b.o.Prefix + "redlock:{" + key + "}", b.o.Prefix + "redlock:fence:{" + key + "}"}, nil
}

// drift is how far clocks may run apart in a TTL, and Redis's resolution: the figures of the algorithm's description.
func drift(ttl time.Duration) time.Duration { return ttl/100 + 2*time.Millisecond }

// millis is ttl in Redis's unit. In a shorter one than it lets pass, the Locker would set less aside than drift.
func millis(ttl time.Duration) (int64, error) {
	if ttl%time.Millisecond != 0 || ttl/4 < drift(ttl) {
		return 0, fmt.Errorf("%w: redlock: TTL %v; it must be whole milliseconds, the unit of Redis, and at least 9ms, for 2 ms and 1 %% are set aside for drift",
			dlock.ErrInvalid, ttl)
	}
	return ttl.Milliseconds(), nil
}

var errClosed = fmt.Errorf("redlock: %w", dlock.ErrClosed)

// ended is the error of a call whose context has ended.
func ended(ctx context.Context) error { return fmt.Errorf("redlock: %w", context.Cause(ctx)) }

func (b *Backend) unavailable(failed int, err error) error {
	if err == nil {
		err = errNoAnswer
	}
	return fmt.Errorf("redlock: no quorum of %d: %d of %d nodes failed, first %w", b.quorum, failed, len(b.nodes), err)
}
