package etcdlock

import (
	"cmp"
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
	"github.com/fencelab/fencelab/dlock/internal/wait"
)

type id struct{ key, owner string }

type state int

const (
	sent    state = iota // the key may exist now or later
	queued               // the key exists and isn't first
	held                 // the key is first: it has the lock
	leaving              // the key is being deleted
	undoing              // the same, but its put may still arrive
	gone                 // there is no key, and none will come
)

var next = map[state][]state{
	sent:    {sent, queued, held, undoing, gone},
	queued:  {queued, held, leaving, gone},
	held:    {held, leaving, gone},
	leaving: {gone},
	undoing: {gone},
}

// claim is a key in a queue, from before its put until it is known to be gone.
type claim struct {
	b        *Backend
	id       id
	s        *session
	queue    string
	name     string // its key's; unique in this Backend
	value    string // its key's, unique
	notified chan struct{}
	ended    chan struct{} // closed when the key is gone

	mu      sync.Mutex
	state   state
	expires time.Time // when the timer deletes the key, unless zero
	timer   *time.Timer
	rev     int64 // its key's create revision, once it has had the lock
	notice  notice
	waiters []position // behind the holder's key, as far as known
}

func (b *Backend) claim(r dlock.Request, s *session) *claim {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.lives++
	c := &claim{
		b: b, id: id{r.Key, r.Owner}, s: s, queue: queueOf(b.prefix, r.Key),
		value: fmt.Sprintf("%s %d", r.Owner, b.lives), notified: make(chan struct{}, 1), ended: make(chan struct{}),
	}
	prefix := fmt.Sprintf("%s%x-", c.queue, s.id)
	for n := 0; c.name == "" || b.names[c.name] != nil; n++ {
		c.name = prefix + strconv.Itoa(n)
	}
	b.names[c.name], b.claims[c.id] = c, c
	return c
}

func (c *claim) to(next state, expires time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.move(next, expires)
}

// move refuses invalid transitions. c.mu is held.
func (c *claim) move(to state, expires time.Time) bool {
	if !slices.Contains(next[c.state], to) {
		return false
	}
	c.state, c.expires = to, expires
	if c.timer != nil {
		c.timer.Stop()
	}
	if !expires.IsZero() {
		c.timer = time.AfterFunc(time.Until(expires), c.expire)
	}
	return true
}

func (c *claim) expire() {
	c.mu.Lock()
	due := !c.expires.IsZero() && !time.Now().Before(c.expires) // false: it was just renewed
	to := leaving
	if c.state == sent {
		to = undoing
	}
	due = due && c.move(to, time.Time{})
	c.mu.Unlock()
	if !due || !c.b.begin() {
		return
	}
	defer c.b.busy.Done()
	wait.Retry(c.b.open, minPause, maxPause, func() bool {
		select {
		case <-c.ended: // the put was refused late
			return true
		default:
		}
		ctx, cancel := context.WithTimeout(c.b.open, goodbye)
		defer cancel()
		_, err := c.b.remove(ctx, c, c.id.key, c.name, c.value, 0)
		if errors.Is(err, rpctypes.ErrNoSpace) { // the key alone; if its put is still to come, a retry deletes it again
			_, _ = c.b.c.Txn(ctx).If(clientv3.Compare(clientv3.Value(c.name), "=", c.value)).Then(clientv3.OpDelete(c.name)).Commit()
		}
		return err == nil
	})
}

// end forgets the claim, whose key is gone. c may be nil.
func (c *claim) end() {
	if c == nil || !c.to(gone, time.Time{}) {
		return
	}
	defer close(c.ended)
	c.b.mu.Lock()
	defer c.b.mu.Unlock()
	delete(c.b.names, c.name)
	if c.b.claims[c.id] == c {
		delete(c.b.claims, c.id)
	}
}

func (c *claim) undone(ctx context.Context) bool {
	after := time.NewTimer(3 * goodbye)
	defer after.Stop()
	select {
	case <-c.ended:
		return true
	case <-after.C:
	case <-ctx.Done():
	}
	return false
}

func (c *claim) stop() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.timer != nil {
		c.timer.Stop()
	}
	return c.state == held
}

func (c *claim) holds(fence uint64) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.state == held && uint64(c.rev) == fence && c.s.over.Err() == nil
}

func (c *claim) renewed(fence uint64, expires time.Time) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if uint64(c.rev) != fence {
		return false
	}
	return !expires.After(c.expires) || c.move(held, expires) // a later renewal's reply may have come first
}

var (
	errAgain = errors.New("nothing was put")
	errLate  = fmt.Errorf("%w in time", errAgain)
)

func (c *claim) take(ctx context.Context, r dlock.Request, queue bool) (g dlock.Grant, err error) {
	s, ttl := c.s, r.TTL
	var guard int64
	s.locked(func() { guard = s.rev }) // before the timer starts: its undo must make this put fail
	start := time.Now()                // before the request leaves
	c.to(sent, start.Add(max(ttl, minUnanswered)))
	a, err := c.put(ctx, guard, queue)
	again := errAgain
	c.mu.Lock()
	if c.state != sent { // the timer was faster
		again = errLate
	}
	c.mu.Unlock()
	switch {
	case leaseGone(err):
		c.end()
		s.end()
		return g, again
	case errors.Is(err, rpctypes.ErrNoSpace): // refused or applied, but not in flight
		c.to(queued, time.Time{})
		c.leave(ctx)
		return g, fmt.Errorf("joining the queue: %w", err)
	case forbidden(err):
		c.end()
		return g, fmt.Errorf("joining the queue: %w", err)
	case err != nil: // the timer cleans up, but not after Close
		if c.b.open.Err() != nil {
			c.leave(ctx)
		}
		return g, fmt.Errorf("joining the queue: %w", err)
	case a.stale:
		c.end()
		if a.guard < guard { // the store was restored
			s.end()
		}
		s.guardedBy(a.guard)
		return g, again
	case a.held:
		c.end()
		return g, dlock.ErrHeld
	case a.first:
		g, err = c.grant(ctx, notice{rev: a.rev, at: start}, ttl)
		if errors.Is(err, errExpired) { // the put arrived before etcd noticed the session's end
			err = again
		}
		return g, err
	case !c.to(queued, time.Time{}):
		return g, errLate
	}
	r.NoteHeld()
	return c.wait(ctx, ttl, a)
}

type answer struct {
	rev    int64 // create revision of the claim's key; 0: none
	first  bool
	before string // else the key before it, if known
	since  int64  // its create revision
	at     int64  // revision of this state
	held   bool   // by another; nothing was put
	stale  bool   // nothing was put: the session's guard is at another revision:
	guard  int64  // 0: no such key; -1: the claim's name is taken
}

// put appends the claim's key to the queue; without join, only if it is empty.
func (c *claim) put(ctx context.Context, guard int64, join bool) (a answer, err error) {
	absent := clientv3.Compare(clientv3.CreateRevision(c.name), "=", 0)
	if !join {
		absent = clientv3.Compare(clientv3.CreateRevision(c.queue), "=", 0).WithPrefix() // no key at all
	}
	first := clientv3.OpGet(c.queue, append(clientv3.WithFirstCreate(), clientv3.WithKeysOnly())...)
	anyone := clientv3.OpGet(c.queue, clientv3.WithPrefix(), clientv3.WithKeysOnly(), clientv3.WithLimit(1)) // sorting is slow
	put := clientv3.OpPut(c.name, c.value, clientv3.WithLease(c.s.id))
	then := []clientv3.Op{put}
	if join {
		then = []clientv3.Op{anyone, put}
	}
	resp, err := c.b.c.Txn(ctx).
		If(absent, clientv3.Compare(clientv3.ModRevision(c.s.guard), "=", guard)).
		Then(then...).
		Else(clientv3.OpGet(c.name), clientv3.OpGet(c.s.guard), first).
		Commit()
	if err != nil {
		return a, err
	}
	a.at = resp.Header.Revision
	if resp.Succeeded {
		a.rev = resp.Header.Revision // the transaction created the key
		a.first = len(resp.Responses[0].GetResponseRange().GetKvs()) == 0
		return a, nil
	}
	own, sess := resp.Responses[0].GetResponseRange().Kvs, resp.Responses[1].GetResponseRange().Kvs
	queue := resp.Responses[2].GetResponseRange().Kvs
	switch {
	case len(own) > 0: // a deleted key is back: the store was restored
		a.stale, a.guard = true, -1
	case len(queue) > 0 && !join:
		a.held = true
	default:
		a.stale = true
		if len(sess) > 0 {
			a.guard = sess[0].ModRevision
		}
	}
	return a, nil
}

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

func (c *claim) exists(ctx context.Context, a answer) bool {
	resp, err := c.b.c.Txn(ctx).Then(clientv3.OpGet(c.name, clientv3.WithKeysOnly()), clientv3.OpGet(a.before, clientv3.WithKeysOnly())).Commit()
	if err != nil {
		return false
	}
	for i, rev := range []int64{a.rev, a.since} {
		if kvs := resp.Responses[i].GetResponseRange().Kvs; len(kvs) == 0 || kvs[0].CreateRevision != rev {
			return false
		}
	}
	return true
}

// minUnanswered is the shortest time after which a put without a reply is undone: with a shorter TTL, every slow put would be
// undone before it arrives.
const minUnanswered = 100 * time.Millisecond

const (
	minPause = 20 * time.Millisecond // doubles with each retry
	maxPause = time.Second
)

func (c *claim) wait(ctx context.Context, ttl time.Duration, a answer) (dlock.Grant, error) {
	s := c.s
	complete := s.listen(c.b, a.at+1) //nolint:contextcheck // for all who wait on the session
	rest := minPause
	for {
		var n notice
		var err error
		if complete {
			n, err = c.mayBeFirst(ctx, a)
		}
		complete = true // the read below is later than the watch's start
		if err == nil && n.rev != 0 {
			return c.grant(ctx, n, ttl)
		}
		start, now := time.Now(), a
		if err == nil {
			now, err = c.look(ctx, a.rev)
		}
		switch {
		case ctx.Err() != nil, err != nil && (!passing(err) && !staleToken(err) || s.dead()):
			c.leave(ctx)
			return dlock.Grant{}, cmp.Or(err, ctx.Err())
		case err != nil:
			wait.For(ctx, rest)
			rest = min(2*rest, maxPause)
			continue
		case now.rev == 0 || s.over.Err() != nil:
			c.leave(ctx)
			return dlock.Grant{}, fmt.Errorf("%w: the waiter's key is gone", dlock.ErrLost)
		case now.first:
			return c.grant(ctx, notice{rev: a.rev, at: start}, ttl)
		}
		a, rest = now, minPause
	}
}

// mayBeFirst waits for a message that the claim's key is first. It also returns, without a revision, when the key may be first:
// the key before it, if known, was deleted, or no message came for a while.
func (c *claim) mayBeFirst(ctx context.Context, a answer) (n notice, err error) {
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
		go func() { // Watch returns only when the server replies
			opened <- c.b.c.Watch(watched, a.before, clientv3.WithRev(a.at+1), clientv3.WithFilterPut())
		}()
	}
	for {
		if n := c.noticeOf(a.rev); n.rev != 0 {
			return n, nil
		}
		select {
		case w = <-opened:
		case <-c.notified:
		case <-quiet.C:
			if a.before == "" || gone || !c.exists(ctx, a) {
				return n, nil
			}
			quiet.Reset(longQuietTime)
		case <-c.s.over.Done():
			return n, errExpired
		case <-ctx.Done():
			if err := c.s.failing(); err != nil {
				return n, fmt.Errorf("waiting in the queue; the last keep-alive failed: %w: %w", err, ctx.Err())
			}
			return n, fmt.Errorf("waiting in the queue: %w", ctx.Err())
		case resp, ok := <-w:
			switch err := resp.Err(); {
			case errors.Is(err, rpctypes.ErrCompacted):
				return n, nil
			case err != nil:
				return n, err
			case !ok:
				return n, rpctypes.ErrNoLeader // or any transient error
			case len(resp.Events) > 0: // a message may be on its way
				gone = true
				quiet.Reset(messageTime)
			}
		}
	}
}

// forbidden reports whether etcd has refused a put without applying it, as for lack of permission. It would refuse the undo, too.
func forbidden(err error) bool {
	e, ok := errors.AsType[rpctypes.EtcdError](err)
	return ok && slices.Contains([]codes.Code{codes.PermissionDenied, codes.Unauthenticated, codes.InvalidArgument}, e.Code())
}

func passing(err error) bool {
	if e, ok := errors.AsType[rpctypes.EtcdError](err); ok {
		return e.Code() == codes.Unavailable
	}
	return status.Code(err) == codes.Unavailable
}

// watching returns a context for a watch, which then leaves a member without a leader. Pass the watch's error to refused: etcd
// refuses every watch on a stream whose token has expired, and other metadata makes the client open a new stream.
func (b *Backend) watching(ctx context.Context) (_ context.Context, refused func(error)) {
	n := b.stream.Load()
	ctx = metadata.AppendToOutgoingContext(clientv3.WithRequireLeader(ctx), "fencelab-stream", strconv.FormatInt(n, 10))
	return ctx, func(err error) {
		if staleToken(err) {
			b.stream.CompareAndSwap(n, n+1)
		}
	}
}

// staleToken reports whether a watch's err, which is text, may pass with another token.
func staleToken(err error) bool {
	return err != nil && slices.ContainsFunc([]error{rpctypes.ErrInvalidAuthToken, rpctypes.ErrAuthOldRevision, rpctypes.ErrUserEmpty},
		func(e error) bool { return strings.HasSuffix(err.Error(), rpctypes.ErrorDesc(e)) })
}

func (c *claim) grant(ctx context.Context, n notice, ttl time.Duration) (g dlock.Grant, err error) {
	c.mu.Lock()
	c.rev, c.waiters = n.rev, n.waiters
	inTime := c.move(held, n.at.Add(ttl))
	c.mu.Unlock()
	if !inTime {
		return g, errLate
	}
	if err := c.s.cover(ctx, n.at, ttl); err != nil {
		c.leave(ctx)
		return g, err
	}
	return dlock.Grant{
		Key: c.id.key, Owner: c.id.owner, Fence: uint64(n.rev), TTL: ttl, Start: n.at, Lost: c.s.over.Done(), State: c.name,
	}, nil
}

func (c *claim) leave(ctx context.Context) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), goodbye)
	defer cancel()
	if _, err := c.b.remove(ctx, c, c.id.key, c.name, c.value, 0); err != nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.move(c.state, time.Now())
	}
}

// remove deletes a key that was created at the revision fence or, if that is 0, has the value, and reports whether it did. It
// notifies the next waiter. If c's put is in flight, it will fail. c may be nil.
func (b *Backend) remove(ctx context.Context, c *claim, key, name, value string, fence uint64) (had bool, err error) {
	queue := queueOf(b.prefix, key)
	cond := owns(name, fence)
	if fence == 0 { // another key may have this name by then
		cond = clientv3.Compare(clientv3.Value(name), "=", value)
	}
	var s *session // of a put that may still arrive
	var waiters []position
	if c != nil {
		c.mu.Lock()
		mine := fence == 0 || uint64(c.rev) == fence
		if mine && (c.state == sent || c.state == undoing) && c.s.over.Err() == nil {
			s = c.s
		}
		if fence != 0 && mine {
			waiters = c.waiters
		}
		c.mu.Unlock()
		if !mine { // but an earlier grant's
			c = nil
		}
	}
	next, notifies := b.handOver(queue, waiters)
	then, otherwise := []clientv3.Op{next, clientv3.OpDelete(name)}, []clientv3.Op(nil)
	if s != nil {
		moved := clientv3.OpPut(s.guard, "", clientv3.WithLease(s.id))
		then, otherwise = append(then, moved), append(otherwise, moved)
	}
	start := time.Now()
	resp, err := b.c.Txn(ctx).If(cond).Then(then...).Else(otherwise...).Commit()
	if s == nil && notifies && errors.Is(err, rpctypes.ErrNoSpace) { // without the message, which is a put
		waiters = nil
		next, notifies = b.handOver(queue, nil)
		full := err
		resp, err = b.c.Txn(ctx).If(cond).Then(next, clientv3.OpDelete(name)).Commit()
		if err == nil && !resp.Succeeded { // the first was applied, or the key was gone
			c.end()
			return false, full
		}
	}
	if s != nil && errors.Is(err, rpctypes.ErrNoSpace) {
		c.to(sent, time.Now()) // expire deletes the key alone, once no reply to the put can make it a grant
	}
	if s != nil && leaseGone(err) { // with all its keys
		s.end()
		c.end()
		return false, nil
	}
	if err != nil {
		return false, err
	}
	if s != nil {
		s.guardedBy(resp.Header.Revision)
	}
	c.end()
	if resp.Succeeded {
		b.handedOver(ctx, queue, name, waiters, resp.Responses[0], notifies, start)
	}
	return resp.Succeeded, nil
}
