package etcdlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/fencelab/fencelab/dlock"
)

// id is what a claim is known by.
type id struct{ key, owner string }

// claim is one owner's place in a queue, from its first request until its key is known to be gone.
type claim struct {
	b     *Backend
	id    id
	queue string
	turn  chan struct{} // held by the attempt under way

	n     int    // belongs to b.mu, as name and value do
	name  string // "" before there is a session
	value string // of the key: no other key of its name ever has it

	mu     sync.Mutex
	s      *session
	rev    int64         // create revision of the key, while it is known to have the lock; else 0
	strays int           // puts without an answer, so far
	timer  *time.Timer   // deletes the key, if it exists, when its time is up
	until  time.Time     // when that is
	period int           // counts the timer's starts
	clear  chan struct{} // not nil once the time was up; closed when the key is gone
	last   turn          // the last turn that it was told of
	told   chan struct{} // that it was told something; buffered
	line   []place       // who follows the key that has the lock, as far as it was told
}

// claim returns the claim of r's owner, a new one if there is none.
func (b *Backend) claim(r dlock.Request) *claim {
	b.mu.Lock()
	defer b.mu.Unlock()
	c := b.claims[id{r.Key, r.Owner}]
	if c == nil {
		c = &claim{
			b: b, id: id{r.Key, r.Owner}, queue: queueOf(b.prefix, r.Key),
			turn: make(chan struct{}, 1), told: make(chan struct{}, 1),
		}
		b.enlist(c)
	}
	return c
}

// enlist remembers c, unless it is remembered, and gives it the lowest number that is free in its queue. b.mu is held.
func (b *Backend) enlist(c *claim) {
	if b.claims[c.id] == c {
		return
	}
	b.claims[c.id] = c
	used := b.queues[c.queue]
	if used == nil {
		used = map[int]bool{}
		b.queues[c.queue] = used
	}
	c.n = 0
	for used[c.n] {
		c.n++
	}
	used[c.n] = true
	b.lives++
	c.value = fmt.Sprintf("%s %d", c.id.owner, b.lives)
}

// call names c's key, which is to be put with s. b.mu is held.
func (b *Backend) call(c *claim, s *session) {
	if b.names[c.name] == c { // it may be another's by now
		delete(b.names, c.name)
	}
	c.name = fmt.Sprintf("%s%x-%d", c.queue, s.id, c.n)
	b.names[c.name] = c
}

// strike is the reverse of enlist. b.mu is held.
func (b *Backend) strike(c *claim) {
	if b.claims[c.id] != c {
		return
	}
	delete(b.claims, c.id)
	if b.names[c.name] == c {
		delete(b.names, c.name)
	}
	if used := b.queues[c.queue]; len(used) > 1 {
		delete(used, c.n)
	} else {
		delete(b.queues, c.queue)
	}
}

// take puts the key and, if wait, waits until it is first.
func (c *claim) take(ctx context.Context, ttl time.Duration, wait bool) (dlock.Grant, error) {
	rest := minPause
	for try := 0; ; try++ {
		if try > 1 { // one retry at once is enough for whatever happens once
			pause(ctx, rest)
			rest = min(2*rest, maxPause)
		}
		if err := c.cleared(ctx); err != nil {
			return dlock.Grant{}, err
		}
		s, err := c.b.sessionFor(ctx, ttl)
		if err != nil {
			c.drop()
			return dlock.Grant{}, err
		}
		if !c.ready() {
			continue
		}
		guard := s.revision()                            // before the timer starts, so that what it does makes this put too late
		start := time.Now()                              // before the request leaves: the server cannot start the lease earlier
		c.sending(s, start.Add(max(ttl, minUnanswered))) //nolint:contextcheck // the timer outlives the call
		a, err := c.put(ctx, s, guard, wait)
		if leaseGone(err) {
			c.answered(0)
			s.end()
			continue
		}
		if errors.Is(err, rpctypes.ErrNoSpace) { // nothing was put
			c.answered(0)
			c.drop()
			return dlock.Grant{}, fmt.Errorf("joining the queue: %w", err)
		}
		if err != nil { // the timer cleans up, unless somebody does before
			if c.b.open.Err() != nil {
				c.leave(ctx)
			}
			return dlock.Grant{}, fmt.Errorf("joining the queue: %w", err)
		}
		switch {
		case a.stale:
			c.answered(0)
			if a.guard < guard { // it was there before the put left, and in a store that remembers it never goes back
				s.end()
			} else {
				s.guardedBy(a.guard)
			}
		case a.held:
			c.answered(0)
			if a.rev != 0 {
				c.leave(ctx)
			} else {
				c.drop()
			}
			return dlock.Grant{}, dlock.ErrHeld
		case a.first:
			c.answered(a.rev)
			g, err := c.grant(ctx, s, turn{rev: a.rev, as: start}, ttl)
			if errors.Is(err, errExpired) && ctx.Err() == nil {
				continue // it was over when the put arrived, but etcd had not looked yet; there is no place to lose
			}
			return g, err
		case c.queued():
			return c.wait(ctx, s, ttl, a)
		}
	}
}

// answer is what a put has come to.
type answer struct {
	rev    int64  // create revision of the own key, 0 if there is none
	first  bool   // the own key is first
	before string // else the key before it; "" if that wasn't asked
	since  int64  // create revision of that
	at     int64  // revision of this state
	held   bool   // another has the lock, and the own key was not put
	stale  bool   // nothing was put, for the session's guard is at another revision:
	guard  int64  // 0 if there is no such key; -1: the own key's name is another's
}

// put puts the own key at the end of the queue, or if not wait only into an empty queue, unless it is there already.
func (c *claim) put(ctx context.Context, s *session, guard int64, wait bool) (a answer, err error) {
	absent := clientv3.Compare(clientv3.CreateRevision(c.name), "=", 0)
	if !wait {
		absent = clientv3.Compare(clientv3.CreateRevision(c.queue), "=", 0).WithPrefix() // holds if there is no key at all
	}
	first := clientv3.OpGet(c.queue, append(clientv3.WithFirstCreate(), clientv3.WithKeysOnly())...)
	anyone := clientv3.OpGet(c.queue, clientv3.WithPrefix(), clientv3.WithKeysOnly(), clientv3.WithLimit(1)) // sorting is slow
	put := clientv3.OpPut(c.name, c.value, clientv3.WithLease(s.id))
	then := []clientv3.Op{put}
	if wait {
		then = []clientv3.Op{anyone, put}
	}
	resp, err := c.b.router.commit(ctx,
		[]clientv3.Cmp{absent, clientv3.Compare(clientv3.ModRevision(s.guard), "=", guard)},
		then,
		[]clientv3.Op{clientv3.OpGet(c.name), clientv3.OpGet(s.guard), first})
	if err != nil {
		return a, err
	}
	a.at = resp.Header.Revision
	if resp.Succeeded {
		a.rev = resp.Header.Revision
		a.first = len(resp.Responses[0].GetResponseRange().GetKvs()) == 0
		return a, nil
	}
	own, sess := resp.Responses[0].GetResponseRange().Kvs, resp.Responses[1].GetResponseRange().Kvs
	queue := resp.Responses[2].GetResponseRange().Kvs
	switch {
	case len(own) > 0 && string(own[0].Value) != c.value: // one that is known to be gone is back, in a store that was restored
		a.stale, a.guard = true, -1
	case len(own) > 0: // a request repeated
		a.rev = own[0].CreateRevision
		a.first = string(queue[0].Key) == c.name
		a.held = !a.first && !wait
	case len(queue) > 0 && !wait:
		a.held = true
	default:
		a.stale = true
		if len(sess) > 0 {
			a.guard = sess[0].ModRevision
		}
	}
	return a, nil
}

// look tells where the own key, created at rev, is in the queue. It is a linearizable read.
func (c *claim) look(ctx context.Context, rev int64) (a answer, err error) {
	resp, err := c.b.c.Get(ctx, c.queue, clientv3.WithPrefix(), clientv3.WithMaxCreateRev(rev), clientv3.WithKeysOnly(),
		clientv3.WithSort(clientv3.SortByCreateRevision, clientv3.SortDescend), clientv3.WithLimit(2))
	if err != nil {
		return a, err
	}
	a.at = resp.Header.Revision
	if len(resp.Kvs) == 0 || string(resp.Kvs[0].Key) != c.name {
		return a, nil
	}
	a.rev, a.first = rev, len(resp.Kvs) == 1
	if !a.first {
		a.before, a.since = string(resp.Kvs[1].Key), resp.Kvs[1].CreateRevision
	}
	return a, nil
}

// stands reports whether the own key and the one before it are still those of a.
func (c *claim) stands(ctx context.Context, a answer) bool {
	resp, err := c.b.c.Txn(ctx).Then(clientv3.OpGet(c.name, clientv3.WithKeysOnly()), clientv3.OpGet(a.before, clientv3.WithKeysOnly())).Commit()
	if err != nil {
		return false // whoever looks finds that out
	}
	for i, rev := range []int64{a.rev, a.since} {
		if kvs := resp.Responses[i].GetResponseRange().Kvs; len(kvs) == 0 || kvs[0].CreateRevision != rev {
			return false
		}
	}
	return true
}

// minUnanswered is how long at least a put may take to be answered before it is undone. With a TTL shorter than a round
// trip every put would be undone before it has arrived.
const minUnanswered = 100 * time.Millisecond

const (
	minPause = 20 * time.Millisecond // after a failed watch, read or clean-up, or a put's second retry; doubles with each
	maxPause = time.Second
)

// wait waits until the own key is first in the queue. If it returns an error, the key is gone or will be.
func (c *claim) wait(ctx context.Context, s *session, ttl time.Duration, a answer) (dlock.Grant, error) {
	heard := s.listen(c.b, a.at+1) //nolint:contextcheck // for all who wait on the session
	rest := minPause
	for {
		var t turn
		var err error
		if heard {
			t, err = c.mayBeFirst(ctx, s, a)
		}
		heard = true // from here on: a look comes after the state from which the session listens
		if err == nil && t.rev != 0 {
			return c.grant(ctx, s, t, ttl)
		}
		start, now := time.Now(), a
		if err == nil {
			now, err = c.look(ctx, a.rev)
		}
		switch {
		case ctx.Err() != nil, err != nil && (!passing(err) && !staleToken(err) || s.dead()):
			c.leave(ctx)
			return dlock.Grant{}, err
		case err != nil:
			pause(ctx, rest)
			rest = min(2*rest, maxPause)
			continue
		case now.rev == 0 || s.ended():
			c.leave(ctx)
			return dlock.Grant{}, fmt.Errorf("%w: the waiter's key is gone, and with it its place in the queue", dlock.ErrLost)
		case now.first:
			return c.grant(ctx, s, turn{rev: a.rev, as: start}, ttl)
		}
		a, rest = now, minPause
	}
}

// mayBeFirst waits until the own key is said to be first, and returns that; or until there is reason to look, and returns
// a turn without a revision. The reason is that the key before it is deleted, if it is known which that is, or that
// nobody has said anything for a while; or that it cannot tell any more.
func (c *claim) mayBeFirst(ctx context.Context, s *session, a answer) (t turn, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	quiet := time.NewTimer(quietTime)
	defer quiet.Stop()
	gone := false // the key before it
	var w clientv3.WatchChan
	opened := make(chan clientv3.WatchChan, 1)
	if a.before != "" {
		quiet.Reset(longQuietTime)
		watched, refused := c.b.watching(ctx)
		defer func() { refused(err) }()
		go func() { // Watch returns when the server has answered, which may be late
			// From the revision of the read on, so that no deletion is missed.
			opened <- c.b.c.Watch(watched, a.before, clientv3.WithRev(a.at+1), clientv3.WithFilterPut())
		}()
	}
	for {
		if t := c.turnOf(a.rev); t.rev != 0 {
			return t, nil
		}
		select {
		case w = <-opened:
		case <-c.told:
		case <-quiet.C:
			if a.before == "" || gone || !c.stands(ctx, a) {
				return t, nil
			}
			quiet.Reset(longQuietTime)
		case <-s.done:
			return t, errExpired
		case <-ctx.Done():
			if err := s.failing(); err != nil {
				return t, fmt.Errorf("waiting in the queue; etcd didn't answer the last keep-alive: %w: %w", err, ctx.Err())
			}
			return t, fmt.Errorf("waiting in the queue: %w", ctx.Err())
		case resp, ok := <-w:
			switch err := resp.Err(); {
			case errors.Is(err, rpctypes.ErrCompacted):
				return t, nil // what happened since then can be seen, if not watched
			case err != nil:
				return t, err
			case !ok:
				return t, rpctypes.ErrNoLeader // or anything else: it has ended without a reason
			case len(resp.Events) > 0: // by a release, most likely, whose message is on its way
				gone = true
				quiet.Reset(messageTime)
			}
		}
	}
}

// passing reports whether err may be over when the cluster has found itself again.
func passing(err error) bool {
	if e, ok := errors.AsType[rpctypes.EtcdError](err); ok {
		return e.Code() == codes.Unavailable
	}
	return status.Code(err) == codes.Unavailable
}

// watching returns the context of a watch, which leaves a member without a leader. To refused goes the error that ended it:
// etcd refuses every watch on a stream whose token has expired since it was opened. The client has one stream for all
// contexts of the same metadata, so the next watch gets other metadata, and with it a new stream and token.
func (b *Backend) watching(ctx context.Context) (_ context.Context, refused func(error)) {
	n := b.stream.Load()
	ctx = metadata.AppendToOutgoingContext(clientv3.WithRequireLeader(ctx), "fencelab-stream", strconv.FormatInt(n, 10))
	return ctx, func(err error) {
		if staleToken(err) {
			b.stream.CompareAndSwap(n, n+1)
		}
	}
}

// staleToken reports whether err, of a watch, may be over with another token. etcd tells it to a watch as a text.
func staleToken(err error) bool {
	return err != nil && slices.ContainsFunc([]error{rpctypes.ErrInvalidAuthToken, rpctypes.ErrAuthOldRevision, rpctypes.ErrUserEmpty},
		func(e error) bool { return strings.HasSuffix(err.Error(), rpctypes.ErrorDesc(e)) })
}

// grant is the grant of a key that is first in its queue.
func (c *claim) grant(ctx context.Context, s *session, t turn, ttl time.Duration) (dlock.Grant, error) {
	c.won(t, t.as.Add(ttl)) //nolint:contextcheck // the timer outlives the call
	if err := s.cover(ctx, t.as, ttl); err != nil {
		c.leave(ctx)
		return dlock.Grant{}, err
	}
	return dlock.Grant{
		Key: c.id.key, Owner: c.id.owner, Fence: uint64(t.rev), TTL: ttl, Start: t.as, Lost: s.done, State: c.name,
	}, nil
}

// leave deletes the key now, although ctx may have ended; if that fails, in the background.
func (c *claim) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), goodbye)
	defer cancel()
	if _, err := c.b.remove(ctx, c, c.id.key, c.name, c.value, 0); err != nil {
		c.start(time.Now()) //nolint:contextcheck // the timer outlives the call
	}
}

// remove deletes a key of key's queue, if it was created at the revision fence or, if that is 0, has the value, and reports
// whether it did. If a put of it may be under way, that will fail. Unless c is nil, it is forgotten. Whoever is first then
// is told so.
func (b *Backend) remove(ctx context.Context, c *claim, key, name, value string, fence uint64) (had bool, err error) {
	queue := queueOf(b.prefix, key)
	cond := owns(name, fence)
	if fence == 0 { // not whatever there is: it may arrive, or be repeated, when another key has the name
		cond = clientv3.Compare(clientv3.Value(name), "=", value)
	}
	line := c.followers(fence)
	pass, told := b.pass(queue, line)
	then, otherwise := []clientv3.Op{pass, clientv3.OpDelete(name)}, []clientv3.Op(nil)
	s := c.strayed()
	if s != nil {
		moved := clientv3.OpPut(s.guard, "", clientv3.WithLease(s.id))
		then, otherwise = append(then, moved), append(otherwise, moved)
	}
	sent := time.Now()
	resp, err := b.router.commit(ctx, []clientv3.Cmp{cond}, then, otherwise)
	if s == nil && told && errors.Is(err, rpctypes.ErrNoSpace) { // it puts the message; without one, the next finds out for itself
		line = nil
		pass, told = b.pass(queue, nil)
		resp, err = b.router.commit(ctx, []clientv3.Cmp{cond}, []clientv3.Op{pass, clientv3.OpDelete(name)}, nil)
	}
	if s != nil && leaseGone(err) { // and all its keys with it
		s.end()
		c.forget()
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if s != nil {
		s.guardedBy(resp.Header.Revision)
	}
	c.removed(fence)
	if resp.Succeeded {
		b.passed(ctx, queue, name, line, resp.Responses[0], told, sent)
	}
	return resp.Succeeded, nil
}

// sending notes that a put is about to leave: from now on the key may exist, until its time is up.
func (c *claim) sending(s *session, until time.Time) {
	c.b.mu.Lock()
	c.b.enlist(c) // it may have been forgotten with an earlier key
	c.b.call(c, s)
	c.b.mu.Unlock()
	c.mu.Lock()
	c.s = s
	c.strays++
	c.mu.Unlock()
	c.start(until)
}

// answered notes a put's answer.
func (c *claim) answered(rev int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.strays--
	c.rev = rev
}

// queued notes that the key waits, and has all the time it needs. It reports false if the answer took so long that the
// key is being deleted.
func (c *claim) queued() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.strays--
	if c.clear != nil {
		return false
	}
	c.period++
	c.timer.Stop()
	return true
}

// won notes that the key has the lock, until then.
func (c *claim) won(t turn, until time.Time) {
	c.mu.Lock()
	over := c.clear != nil
	c.rev, c.line = t.rev, t.line
	c.mu.Unlock()
	if !over { // an answer that took longer than the lease lasts finds it being deleted
		c.start(until)
	}
}

// held returns the session of a grant, or nil if it is not, or no longer, this claim's.
func (c *claim) held(fence uint64) *session {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.rev == 0 || uint64(c.rev) != fence || c.clear != nil || c.s.ended() {
		return nil
	}
	return c.s
}

// strayed returns the session on which a put without an answer may still arrive, or nil.
func (c *claim) strayed() *session {
	if c == nil {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.strays == 0 || c.s.ended() {
		return nil
	}
	return c.s
}

// start has the key deleted at until, and not when it was to be before.
func (c *claim) start(until time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.restart(until)
}

func (c *claim) restart(until time.Time) {
	if c.timer != nil {
		c.timer.Stop()
	}
	c.period++
	period := c.period
	c.until = until
	c.timer = time.AfterFunc(time.Until(until), func() { c.expire(period) })
}

// renewed is start for a renewed grant. It reports false if the timer was faster.
func (c *claim) renewed(fence uint64, until time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.clear != nil || c.rev == 0 || uint64(c.rev) != fence {
		return false
	}
	if until.After(c.until) { // else a later renewal was answered before this one
		c.restart(until)
	}
	return true
}

// expire deletes the key, whose time is up. It tries until it is gone.
func (c *claim) expire(period int) {
	c.mu.Lock()
	gone := make(chan struct{})
	mine := c.period == period && c.clear == nil
	if mine {
		c.clear = gone
	}
	c.mu.Unlock()
	if !mine {
		return
	}
	if !c.b.begin() {
		close(gone)
		return
	}
	go func() {
		defer c.b.busy.Done()
		defer close(gone)
		for rest := minPause; ; rest = min(2*rest, maxPause) {
			ctx, cancel := context.WithTimeout(c.b.open, goodbye)
			_, err := c.b.remove(ctx, c, c.id.key, c.name, c.value, 0)
			cancel()
			if err == nil || c.b.open.Err() != nil {
				return
			}
			pause(c.b.open, rest)
		}
	}()
}

// cleared waits until the key, if its time was up, is gone.
func (c *claim) cleared(ctx context.Context) error {
	c.mu.Lock()
	gone := c.clear
	c.mu.Unlock()
	if gone == nil {
		return nil
	}
	select {
	case <-gone:
	case <-ctx.Done():
		return ctx.Err()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.clear, c.rev = nil, 0
	return nil
}

// ready stops the timer of an earlier put, whose key is gone with its session, or is the one that is put now. It reports
// false if that timer was faster, and the key is being deleted.
func (c *claim) ready() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.clear != nil {
		return false
	}
	c.period++
	if c.timer != nil {
		c.timer.Stop()
	}
	return true
}

// drop forgets the claim, unless the timer has something to clean up.
func (c *claim) drop() {
	c.mu.Lock()
	known := c.strays == 0 && c.rev == 0
	c.mu.Unlock()
	if known {
		c.forget()
	}
}

// removed forgets the claim after a deletion of its key with the given fence.
func (c *claim) removed(fence uint64) {
	if c == nil {
		return
	}
	c.mu.Lock()
	other := fence != 0 && uint64(c.rev) != fence
	c.mu.Unlock()
	if !other {
		c.forget()
	}
}

// forget ends the claim: its key is gone.
func (c *claim) forget() {
	c.stop()
	c.mu.Lock()
	c.rev = 0
	c.mu.Unlock()
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	c.b.strike(c)
}

// stop stops the timer and returns the session if the claim has the lock.
func (c *claim) stop() *session {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.period++
	if c.timer != nil {
		c.timer.Stop()
	}
	if c.rev == 0 || c.clear != nil {
		return nil
	}
	return c.s
}
