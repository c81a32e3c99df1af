package redislock

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
)

// Queue waits in line.
//
// The queue is a Redis list, queue:{KEY}. The script that finds the lock held puts the waiter at its end, in the same
// round trip; the script that releases the lock hands it to the first waiter: it takes that one off the list, mints its
// token, makes it the owner, and then pushes the news to it over the one Pub/Sub connection that a Backend has for all its
// keys and waiters. So a section costs the queue one message on the critical path, and nobody asks in vain.
//
// What can go wrong, and what it costs:
//
//   - A waiter's process dies, or its connection breaks. The script asks the server whether anybody listens there, and goes
//     on to the next waiter: nothing is lost. In a Cluster a server can't tell, and the next case applies.
//   - A waiter is frozen or cut off, so that it still seems to listen. A lock that is handed over is leased for Claim at
//     first. A live owner renews that by itself after half of it, if it hasn't released the lock by then (see
//     dlock.Grant.Provisional); of one that doesn't, the lock is free after Claim.
//   - The holder dies. Its lease runs out; whoever asks next then hands the lock to the first waiter, which is told at
//     each renewal for how long the lease lasts, and asks when it is over. Between a hand-over and its renewal the one
//     that has become first doesn't know it; so all the others ask, too, at long random intervals: about four times per
//     Claim in all, or each of them every 15 to 30 s, if that is more. One that then finds a lease that ends within Claim
//     asks again at its end.
//   - The push is lost. That is a broken connection, and when it is there again every waiter asks. A connection on which
//     nothing is heard is tried after some seconds, and one over which the server knows of no subscription, as when it
//     leads to a server that was the master once, is replaced when a waiter that asks is told so. One that was passed over
//     joins the queue again, at its end. Within a Cluster, whose bus may lose a message, it may take 30 s until a waiter asks
//     by itself.
//   - The waiter gives up. It leaves the queue; if it was granted the lock meanwhile, it hands it on.
//   - The reply to a request is lost. The waiter asks whether it stands in the queue already. A request that arrives so
//     late that its sender has gone puts a ghost into the queue. Its process hands on what the ghost is granted, if another
//     waiter reads the news there; else it is a dead waiter. If it finds the lock free, it takes it for its TTL, as in
//     every mode.
//   - Redis restarts. Waiters ask for up to their TTL until it is back; the queue is as durable as the locks.
//   - Everybody dies. The list expires two minutes after anyone has asked.
//
// A grant that is pushed counts from when its waiter has asked last, for that was before. If that is more than half a Claim
// ago, the waiter asks again, and the lease starts anew: one round trip more, while everybody waits. So a waiter that was
// frozen finds out, when it wakes, whether the lock is still its own. So as not to have to, waiters ask ahead of their turn,
// if no more than a thousand were before them: after two fifths of a Claim each sees how fast the queue moves, and asks again
// a quarter of a Claim before it expects to be the next. If the queue stands still then, it asks after twice as long each
// time, until the intervals above are shorter.
type Queue struct {
	// Max is how many may wait for a key, 10,000 by default; one more is refused with [dlock.ErrQueueFull].
	Max int
	// Claim is for how long a waiter that doesn't stir may stand in the others' way once it is its turn: 1 s by default,
	// and never longer than the TTL. It should be many times a round trip.
	Claim time.Duration
}

const (
	longestLook = 30 * time.Second // a waiter asks at least this often: well within the two minutes for which a queue is kept
	looks       = 4                // how often all waiters of a key together ask per Claim, without being first
	farthest    = 1000             // the last place from which a waiter asks ahead: to find it, the server looks at all before it
	leaveTime   = time.Second      // how long a waiter that gives up tries to leave the queue
	lookPause   = 20 * time.Millisecond
)

// lease is how long a grant to a waiter lasts until it is renewed.
func (b *Backend) lease(ttl time.Duration) time.Duration { return min(b.o.Queue.Claim, ttl) }

// entry is what stands for a waiter in the queue before its name: its first lease in ms, and the channel to tell it.
func (b *Backend) entry(ttl time.Duration) string {
	if ttl >= b.o.Queue.Claim {
		return b.inbox.entry
	}
	return strconv.FormatInt(ttl.Milliseconds(), 10) + " " + b.inbox.channel + " "
}

// queue is Acquire in ModeQueue.
func (b *Backend) queue(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	if !b.inbox.isOpen() { // only those that have to wait need a subscription
		a, err := b.ask(ctx, b.c, r, place{})
		if err != nil || a.token != 0 {
			return a.grant(r), err
		}
		if err := b.inbox.open(ctx); err != nil {
			return dlock.Grant{}, err
		}
	}
	w, err := b.inbox.join(r.Owner)
	if err != nil {
		return dlock.Grant{}, err
	}
	defer b.inbox.leave(w)
	p := place{entry: b.entry(r.TTL), again: w.again}
	a, err := b.askHeard(ctx, once{b.c}, r, p)
	p.again = true
	if err != nil && !answered(err) && ctx.Err() == nil && !b.isClosed() {
		a, err = b.askHeard(ctx, b.c, r, p)
	}
	if err != nil || a.token != 0 {
		if err != nil && !answered(err) {
			b.inbox.strayed(r.Owner)
		}
		return a.grant(r), err
	}
	return b.await(ctx, r, p, w, a)
}

// askHeard is ask for one that listens: it heeds the answer's word on whether it is heard.
func (b *Backend) askHeard(ctx context.Context, c redis.Scripter, r dlock.Request, p place) (answer, error) {
	session := b.inbox.current()
	a, err := b.ask(ctx, c, r, p)
	if err == nil && a.unheard {
		b.inbox.unheard(session)
	}
	return a, err
}

// tryStanding is TryAcquire of one that may stand in the queue, since an earlier request of the same owner came to no known
// end. It may be told of its turn while it asks. If nobody were there to hear it, the lock would be freed under its grant.
func (b *Backend) tryStanding(ctx context.Context, r dlock.Request) (g dlock.Grant, err error) {
	in := b.inbox
	w, err := in.join(r.Owner)
	if err != nil {
		return g, err
	}
	defer func() { //nolint:contextcheck // what it was told of is disposed of in the background
		in.mu.Lock()
		defer in.mu.Unlock()
		delete(in.waiters, w.owner)
		select {
		case n := <-w.news:
			if err != nil && n.token != 0 { // its turn has come after the answer
				in.leaves(r.Owner, func(ctx context.Context) { _ = b.release(ctx, r.Key, r.Owner, r.TTL, n.token) })
			}
		default:
		}
		in.busy.Done()
	}()
	g, _, err = b.try(ctx, r)
	return g, err
}

// await waits in the queue after the answer a.
func (b *Backend) await(ctx context.Context, r dlock.Request, p place, w *waiter, a answer) (g dlock.Grant, err error) {
	defer func() { //nolint:contextcheck // ctx's end is a reason to leave the queue
		if err != nil && !errors.Is(err, dlock.ErrQueueFull) {
			b.inbox.mu.Lock()
			defer b.inbox.mu.Unlock()
			b.inbox.leaves(r.Owner, func(ctx context.Context) {
				if err := b.release(ctx, r.Key, r.Owner, r.TTL, 0); err != nil && !errors.Is(err, dlock.ErrLost) {
					b.inbox.strayed(r.Owner)
				}
			})
		}
	}()
	var failing time.Time // since when asking fails
	o := outlook{b: b, lease: b.lease(r.TTL)}
	ask := time.Now().Add(o.pause(a))
	for {
		n, err := b.inbox.hear(ctx, w, ask)
		switch {
		case err != nil:
			return g, err
		case n.first:
			ask = time.Now().Add(until(n.left))
			continue
		case n.token != 0 && n.token <= a.last:
			continue // a grant that was over when the server said that the lock is held
		}
		if g := b.handed(r, a, n); g.Fence != 0 {
			return g, nil
		}
		next, err := b.askHeard(ctx, b.c, r, p)
		switch {
		case err == nil && next.token != 0:
			return next.grant(r), nil
		case err == nil:
			a, failing = next, time.Time{}
			ask = time.Now().Add(o.pause(a))
			continue
		case failing.IsZero():
			failing = time.Now()
		}
		if answered(err) || ctx.Err() != nil || b.isClosed() || time.Since(failing) > r.TTL {
			return g, err
		}
		ask = time.Now().Add(lookPause + rand.N(lookPause))
	}
}

// handed is the grant that a waiter whose last answer is a has been handed, unless so much of its lease may be over that
// it had better ask.
func (b *Backend) handed(r dlock.Request, a answer, n news) dlock.Grant {
	lease := b.lease(r.TTL)
	if n.token == 0 || time.Since(a.asked) > lease/2 {
		return dlock.Grant{}
	}
	g := dlock.Grant{Key: r.Key, Owner: r.Owner, Fence: n.token, TTL: r.TTL, Start: a.asked}
	if lease < r.TTL {
		g.Provisional = lease
	}
	return g
}

// outlook is what a waiter knows of its turn.
type outlook struct {
	b      *Backend
	lease  time.Duration // of its grant until that is renewed
	joined answer        // with which it came to the end of the queue
	last   answer
	ahead  time.Duration // how long it has waited for the last answer, if it asked ahead of its turn
}

// pause is how long a waiter goes without asking after the answer a, if nothing is heard.
func (o *outlook) pause(a answer) time.Duration {
	claim := o.b.o.Queue.Claim
	if a.place == 1 && a.left >= 0 {
		return until(a.left)
	}
	d := min(max(claim, claim*time.Duration(a.length)/looks), longestLook)
	d = d/2 + rand.N(d/2+1)
	if a.left >= 0 && a.left <= claim && (o.ahead == 0 || a.length <= looks) { // of many, those who look at random are enough
		d = min(d, until(a.left))
	}
	next := o.early(a)
	if next >= d {
		next = 0
	}
	o.last, o.ahead = a, next
	return cmp.Or(next, d)
}

// early is how long a waiter pauses to ask ahead of its turn, so that its grant finds an answer that is young enough for the
// lease to count from; 0 if it had better not.
func (o *outlook) early(a answer) time.Duration {
	if a.place > o.last.place { // it has just come, or was passed over
		o.joined = a
	}
	soon := o.lease * 2 / 5 // a little less than what is young enough
	took, passed := a.asked.Sub(o.joined.asked), o.joined.place-a.place
	switch {
	case o.joined.place > farthest:
		return 0
	case took == 0:
		return soon // it shows then how fast the queue moves
	case a.place == o.last.place && o.ahead > 0:
		return 2 * o.ahead // it stands still
	}
	left := took * time.Duration(a.place) / time.Duration(passed+1) // the next may be about to pass
	if left <= soon {
		return soon // it is not asked if the grant comes first
	}
	return left - o.lease/4
}

// until is when to ask after a lease that lasts for left: it is good to the end of its last millisecond.
func until(left time.Duration) time.Duration { return min(max(left, 0)+time.Millisecond, longestLook) }

// answered reports whether err is an answer that will be the same the next time, unlike a broken connection or a server
// that is starting up.
func answered(err error) bool {
	if errors.Is(err, dlock.ErrQueueFull) || errors.Is(err, dlock.ErrInvalid) || errors.Is(err, dlock.ErrClosed) {
		return true
	}
	for _, prefix := range []string{"ERR ", "WRONGTYPE ", "NOPERM ", "NOAUTH ", "OOM ", "CROSSSLOT "} {
		if redis.HasErrorPrefix(err, prefix) {
			return true
		}
	}
	return false
}

// inbox is a Backend's subscription: one connection over which all of its waiters are told. One of them at a time reads it,
// for all: what it hears for itself need not wake another goroutine, which would take longer than all the rest.
type inbox struct {
	b       *Backend
	channel string
	entry   string // of waiters whose first lease is Claim

	ctx    context.Context // ends with the Backend
	cancel context.CancelFunc
	busy   sync.WaitGroup

	turn chan struct{} // has room for one: what it holds when nobody reads

	// Belong to whoever has the turn: one waiter's read is often shorter than the silence that tells.
	silent time.Duration // for how long the connection was read without a word
	tried  bool          // it was tried, and silent counts from there
	doubt  bool          // the server may not know of the subscription: none was confirmed since there was reason to think so
	unsure time.Duration // for how long the connection was read in doubt
	deaf   atomic.Bool   // a reason to doubt: the server doesn't know of the subscription that was confirmed last

	mu      sync.Mutex
	opening *opening // the attempt to make ps that is under way
	ps      *redis.PubSub
	session int // counts the connections
	closed  bool
	waiters map[string]*waiter  // by owner
	taken   map[string]taken    // by owner: grants that were learnt of without the push
	leaving map[string]*leaving // by owner
	// Owners that may stand in a queue, for their request came to no known end; until their release. Of very many the latest,
	// in two parts, of which the older one is dropped when the newer one is full or old.
	astray, earlier map[string]struct{}
	parted          time.Time // when the newer part began
}

// waiter is a call of Acquire that waits.
type waiter struct {
	owner string
	again bool      // it may stand in the queue already
	news  chan news // the last, if nobody has read it yet
}

// taken is a grant whose push may be under way.
type taken struct {
	token   uint64
	session int // when it was learnt of
}

// leaving is what an owner's leaving still does in the background.
type leaving struct {
	n    int           // requests under way
	over chan struct{} // closed when there are none
}

// news is what a waiter is told: that it has been granted the lock, that it is first and the lock is held for some time
// yet, or neither: that something may have been lost.
type news struct {
	token uint64 // if it is granted
	first bool   // it is first, and the lock is held for left
	left  time.Duration
}

func newInbox(b *Backend) *inbox {
	in := &inbox{
		b: b, channel: b.o.Prefix + "wake:" + uuid.NewString(), turn: make(chan struct{}, 1),
		waiters: map[string]*waiter{}, taken: map[string]taken{}, leaving: map[string]*leaving{}, astray: map[string]struct{}{},
	}
	in.entry = strconv.FormatInt(b.o.Queue.Claim.Milliseconds(), 10) + " " + in.channel + " "
	in.ctx, in.cancel = context.WithCancel(context.Background())
	return in
}

func (in *inbox) isOpen() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.ps != nil
}

// opening is an attempt to subscribe. All who come while it is under way share what comes of it.
type opening struct {
	done chan struct{} // closed at its end
	err  error         // readable then
}

// open waits until there is a subscription; not on a closed inbox, which none can join.
func (in *inbox) open(ctx context.Context) error {
	o := in.begin()
	if o == nil {
		return nil
	}
	select {
	case <-o.done:
		return o.err
	case <-ctx.Done():
	case <-in.b.closed:
	}
	return in.ended(ctx)
}

// begin returns the attempt to subscribe that is under way. If there is none it begins one, unless that is done.
func (in *inbox) begin() *opening {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.opening == nil && in.ps == nil && !in.closed {
		o := &opening{done: make(chan struct{})}
		in.opening = o
		in.busy.Go(func() { // not the caller's, whose ctx may end
			defer close(o.done)
			o.err = in.subscribe()
		})
	}
	return in.opening
}

// subscribe makes ps.
func (in *inbox) subscribe() error {
	ps := in.b.c.Subscribe(in.ctx, in.channel)
	stop := context.AfterFunc(in.ctx, func() { _ = ps.Close() }) // the client library may not look at a context while it reads
	_, err := ps.ReceiveTimeout(in.ctx, subscribeTime)           // nobody may count on being heard before the server has confirmed it
	stop()
	in.mu.Lock()
	defer in.mu.Unlock()
	in.opening = nil
	switch {
	case in.closed:
		err = dlock.ErrClosed
	case err != nil:
		err = fmt.Errorf("redislock: subscribe (where Redis has no Pub/Sub for this client, use ModeSpin): %w", err)
	}
	if err != nil {
		_ = ps.Close()
		return err
	}
	in.ps, in.session = ps, 1
	in.turn <- struct{}{}
	return nil
}

// subscribeTime is for how long the confirmation of a subscription is waited for.
const subscribeTime = 5 * time.Second

// hear returns w's news, or none at the time given, or an error when ctx ends or the Backend is closed.
func (in *inbox) hear(ctx context.Context, w *waiter, until time.Time) (news, error) {
	select {
	case <-in.turn:
		return in.read(ctx, w, until)
	default:
	}
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case n := <-w.news:
		return n, nil
	case <-in.turn:
		return in.read(ctx, w, until)
	case <-timer.C:
		return news{}, nil
	case <-ctx.Done():
	case <-in.b.closed:
	}
	return news{}, in.ended(ctx)
}

// ended is why a waiter waits no more, or nil.
func (in *inbox) ended(ctx context.Context) error {
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("redislock: waiting: %w", context.Cause(ctx))
	case in.b.isClosed():
		return dlock.ErrClosed
	}
	return nil
}

const (
	// longestRead bounds a read, and so how long a waiter whose connection is dead takes to see that its context has
	// ended, but for the time that the client library takes to connect again.
	longestRead = time.Second
	// silence is after how long without a word a connection that is read is tried, and then given up; or, whatever is heard,
	// without the confirmation of a subscription that is in doubt.
	silence = 3 * time.Second

	mostAstray = 1000            // owners in each part
	longAstray = 2 * time.Minute // of the newer part
)

// read is hear for the one whose turn it is. It hands out what is for others. The client library connects again by itself.
func (in *inbox) read(ctx context.Context, w *waiter, until time.Time) (news, error) {
	defer func() { in.turn <- struct{}{} }()
	ps := in.ps
	defer context.AfterFunc(ctx, func() { _ = ps.Ping(in.ctx) })() // the answer ends the read
	for {
		select {
		case n := <-w.news:
			return n, nil
		default:
		}
		if err := in.ended(ctx); err != nil {
			return news{}, err
		}
		began := time.Now()
		left := until.Sub(began)
		if left <= 0 {
			return news{}, nil
		}
		msg, err := ps.ReceiveTimeout(in.ctx, min(left, longestRead)) //nolint:contextcheck // it is read for all, and outlives this one
		switch m := msg.(type) {
		case *redis.Message:
			in.deliver(m.Payload) //nolint:contextcheck // it may be for another
		case *redis.Subscription:
			in.reconnected()
		}
		spent := time.Since(began)
		if in.doubt || in.deaf.Load() {
			in.unsure += spent
		}
		switch timeout, ok := errors.AsType[net.Error](err); {
		case err == nil:
			in.silent, in.tried = 0, false
		case ok && timeout.Timeout():
			in.silent += spent
		default: // it broke and the client library has made another, or the server refuses the subscription
			in.silent, in.tried, in.doubt = 0, false, true
			until = time.Now().Add(min(left, lookPause)) // it asks then, as often as the connection breaks
			_ = in.b.wait(ctx, min(left, lookPause))
		}
		switch {
		case in.unsure >= silence:
			return news{}, in.renew(ctx)
		case in.silent < silence:
		case !in.tried:
			in.silent, in.tried = 0, true
			_ = ps.Ping(in.ctx) //nolint:contextcheck // as it is read
		default:
			return news{}, in.renew(ctx)
		}
	}
}

// renew replaces a connection on which nothing is heard, or nothing but that it is well. Whoever calls it reads.
func (in *inbox) renew(ctx context.Context) error {
	_ = in.ps.Close()
	in.silent, in.tried = 0, false
	in.doubt, in.unsure = true, 0
	ps := in.b.c.Subscribe(ctx, in.channel)
	in.mu.Lock()
	in.ps = ps
	closed := in.closed
	in.mu.Unlock()
	if closed {
		_ = ps.Close()
	}
	return in.ended(ctx) // the confirmation comes when ps is read
}

// current is the connection that was confirmed last.
func (in *inbox) current() int {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.session
}

// unheard is told when the server was found not to know of the subscription that had been confirmed last before, as session
// says.
func (in *inbox) unheard(session int) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if session == in.session {
		in.deaf.Store(true)
	}
}

// reconnected tells every waiter that it may have missed something. Whoever calls it reads.
func (in *inbox) reconnected() {
	in.doubt, in.unsure = false, 0
	in.mu.Lock()
	defer in.mu.Unlock()
	in.deaf.Store(false)
	in.session++
	for owner, t := range in.taken {
		if t.session < in.session-1 { // a push over the connection before this one can still be under way to deliver
			delete(in.taken, owner)
		}
	}
	for _, w := range in.waiters {
		w.put(news{})
	}
}

// deliver takes a message apart: "granted TOKEN LENGTH OWNER+LOCK" or "held MS OWNER".
func (in *inbox) deliver(payload string) {
	kind, rest, _ := strings.Cut(payload, " ")
	switch kind {
	case "granted":
		g, names, ok := parseGrant(rest)
		if !ok {
			return
		}
		owner, lock := names[0], names[1]
		key := strings.TrimSuffix(strings.TrimPrefix(lock, in.b.o.Prefix+"lock:{"), "}")
		in.tell(owner, g, func(ctx context.Context) { _ = in.b.release(ctx, key, owner, time.Millisecond, g.token) })
	case "held":
		ms, owner, _ := strings.Cut(rest, " ")
		if left, err := strconv.ParseInt(ms, 10, 64); err == nil && left >= 0 {
			in.tell(owner, news{first: true, left: time.Duration(left) * time.Millisecond}, nil)
		}
	}
}

// parseGrant returns what a message says after its first word, and the names of the owner and of the lock.
func parseGrant(s string) (g news, names [2]string, ok bool) {
	token, s, _ := strings.Cut(s, " ")
	length, s, _ := strings.Cut(s, " ")
	t, err := strconv.ParseUint(token, 10, 64)
	n, err2 := strconv.Atoi(length)
	if err != nil || err2 != nil || n < 0 || n > len(s) {
		return g, names, false
	}
	return news{token: t}, [2]string{s[:n], s[n:]}, true
}

// tell gives owner's waiter the news. Of a grant that nobody here has waited for it disposes in the background.
func (in *inbox) tell(owner string, n news, dispose func(context.Context)) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if w := in.waiters[owner]; w != nil {
		w.put(n)
		return
	}
	t, taken := in.taken[owner]
	if n.token >= t.token {
		delete(in.taken, owner) // a grant is pushed once
	}
	if !taken && dispose != nil {
		in.leaves(owner, dispose)
	}
}

// put makes n the news, unless a grant is. The inbox's lock is held, so there is no other sender.
func (w *waiter) put(n news) {
	select {
	case last := <-w.news:
		if last.token > n.token {
			n = last
		}
	default:
	}
	w.news <- n
}

// join makes owner a waiter, before the request leaves that may put it into the queue.
func (in *inbox) join(owner string) (*waiter, error) {
	w := &waiter{owner: owner, news: make(chan news, 1)}
	in.mu.Lock()
	defer in.mu.Unlock()
	switch {
	case in.closed:
		return nil, dlock.ErrClosed
	case in.waiters[owner] != nil:
		return nil, fmt.Errorf("%w: redislock: owner %q waits already", dlock.ErrInvalid, owner)
	}
	w.again = in.isAstray(owner)
	in.waiters[owner] = w
	in.busy.Add(1)
	return w, nil
}

func (in *inbox) leave(w *waiter) {
	in.mu.Lock()
	defer in.mu.Unlock()
	delete(in.waiters, w.owner)
	in.busy.Done()
}

// took remembers that owner holds the lock although its push may be unread, which must not be taken for one of nobody's.
func (in *inbox) took(owner string, token uint64) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.taken[owner] = taken{token, in.session}
}

// mayStand reports whether owner may stand in a queue without waiting here.
func (in *inbox) mayStand(owner string) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.isAstray(owner)
}

// isAstray is mayStand. in.mu is held.
func (in *inbox) isAstray(owner string) bool {
	_, late := in.astray[owner]
	_, early := in.earlier[owner]
	return late || early
}

// strayed remembers that owner may stand in a queue. If it comes back, it must learn what the last token is: it may yet be
// told of a turn that it had before.
func (in *inbox) strayed(owner string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if now := time.Now(); len(in.astray) >= mostAstray || now.Sub(in.parted) >= longAstray {
		in.astray, in.earlier, in.parted = map[string]struct{}{}, in.astray, now
	}
	in.astray[owner] = struct{}{}
}

// forget is told that owner has been released, and whether it is known that nothing is left of it.
func (in *inbox) forget(owner string, known bool) {
	in.mu.Lock()
	defer in.mu.Unlock()
	delete(in.taken, owner)
	if known {
		delete(in.astray, owner)
		delete(in.earlier, owner)
	}
}

// leaves runs f in the background, which takes from owner what nobody waits for. A closing Backend waits for it, as it does
// for its callers, the waiters; and so does a request of the same owner, whose grant f could take. in.mu is held.
func (in *inbox) leaves(owner string, f func(context.Context)) {
	l := in.leaving[owner]
	if l == nil {
		l = &leaving{over: make(chan struct{})}
		in.leaving[owner] = l
	}
	l.n++
	in.busy.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), leaveTime)
		defer cancel()
		f(ctx)
		in.mu.Lock()
		defer in.mu.Unlock()
		if l.n--; l.n == 0 {
			close(l.over)
			delete(in.leaving, owner)
		}
	})
}

// left waits until owner, if it was here before, has left.
func (in *inbox) left(ctx context.Context, owner string) error {
	in.mu.Lock()
	l := in.leaving[owner]
	in.mu.Unlock()
	if l == nil {
		return nil
	}
	select {
	case <-l.over:
		return nil
	case <-ctx.Done():
	case <-in.b.closed:
	}
	return in.ended(ctx)
}

// close ends the subscription, so that hand-overs pass these waiters over, and waits for what is under way.
func (in *inbox) close() {
	in.mu.Lock()
	ps := in.ps
	in.closed = true
	in.mu.Unlock()
	in.cancel()
	if ps != nil {
		_ = ps.Close()
	}
	in.busy.Wait()
}
