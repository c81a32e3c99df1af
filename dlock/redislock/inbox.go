package redislock

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/google/uuid"
	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
)

// inbox is a Backend's subscription: one connection over which all of its waiters are told. One goroutine reads it without a
// deadline, since one that passes inside a message leaves the client library there; another closes a connection that is dead.
type inbox struct {
	b       *Backend
	channel string
	entry   string // of waiters whose first lease is Claim

	ctx    context.Context // ends with the Backend
	cancel context.CancelFunc
	busy   sync.WaitGroup

	mu       sync.Mutex
	opening  *opening // the attempt to make ps that is under way
	ps       *redis.PubSub
	session  int       // counts the confirmed subscriptions
	since    time.Time // when the last one was confirmed; zero if it has broken
	heard    time.Time // when ps said the last word, or began to be made
	watching bool      // check runs
	closed   bool
	waiters  map[string]*waiter // by owner
	taken    map[string]int     // by owner: in which session a grant was learnt of whose push may be under way
	leaving  map[string]leavers // by key
}

// waiter is a call of Acquire that waits.
type waiter struct {
	key, owner string
	news       chan news // the last, if nobody has read it yet
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
		b: b, channel: b.o.Prefix + "wake:" + uuid.NewString(),
		waiters: map[string]*waiter{}, taken: map[string]int{}, leaving: map[string]leavers{},
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
	o := in.begin() //nolint:contextcheck // what it begins is not the caller's, whose ctx may end
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

// subscribeTime is for how long the confirmation of the first subscription is waited for.
const subscribeTime = 5 * time.Second

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
	in.since = time.Now()
	in.heard = in.since
	in.busy.Go(func() { in.listen(ps) })
	return nil
}

// listen reads the subscription until the Backend is closed, and makes it again when it was closed from outside; when it
// breaks, the client library does.
func (in *inbox) listen(ps *redis.PubSub) {
	for in.ctx.Err() == nil {
		msg, err := ps.Receive(in.ctx)
		switch m := msg.(type) {
		case *redis.Message:
			in.deliver(m.Payload)
			runtime.Gosched() // the waiter first: the next read would find nothing yet
		case *redis.Subscription:
			in.confirmed()
		}
		in.mu.Lock()
		now := time.Now()
		if err != nil {
			in.since, in.heard = time.Time{}, now
		} else if !in.since.IsZero() {
			in.heard = now
		}
		in.mu.Unlock()
		if err != nil {
			_ = in.b.wait(in.ctx, lookPause)
		}
		if errors.Is(err, redis.ErrClosed) {
			ps = in.b.c.Subscribe(in.ctx, in.channel)
			in.mu.Lock()
			in.ps = ps
			closed := in.closed
			in.mu.Unlock()
			if closed {
				_ = ps.Close()
			}
		}
	}
}

// silence is after how long without a word, or without the confirmation of a subscription, a connection is given up.
const silence = 3 * time.Second

// check runs while somebody waits. It tries a connection that is quiet, and closes one that has been for too long.
func (in *inbox) check() {
	in.mu.Lock()
	if in.closed || len(in.waiters) == 0 {
		in.watching = false
		in.mu.Unlock()
		return
	}
	in.busy.Add(1)
	defer in.busy.Done()
	ps, quiet, sound := in.ps, time.Since(in.heard), !in.since.IsZero()
	if quiet >= silence {
		in.since, in.heard = time.Time{}, time.Now()
	}
	in.mu.Unlock()
	switch {
	case quiet >= silence:
		_ = ps.Close()
	case quiet >= silence/2 && sound:
		_ = ps.Ping(in.ctx)
	}
	time.AfterFunc(silence/2, in.check)
}

// current is the subscription that was confirmed last.
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
	if session == in.session && !in.since.IsZero() && time.Since(in.since) >= silence && !in.closed {
		in.since, in.heard = time.Time{}, time.Now()
		ps := in.ps
		in.busy.Go(func() { _ = ps.Close() })
	}
}

// confirmed tells every waiter that it may have missed something.
func (in *inbox) confirmed() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.session++
	in.since = time.Now()
	for owner, session := range in.taken {
		if session < in.session-1 { // a push over the connection before this one can still be under way to deliver
			delete(in.taken, owner)
		}
	}
	for _, w := range in.waiters {
		w.put(news{})
	}
}

// hear returns w's news, or none at the time given, or an error when ctx ends or the Backend is closed.
func (in *inbox) hear(ctx context.Context, w *waiter, until time.Time) (news, error) {
	timer := time.NewTimer(time.Until(until))
	defer timer.Stop()
	select {
	case n := <-w.news:
		return n, nil
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

// deliver takes a message apart: "granted TOKEN LENGTH OWNER+LOCK", "held MS OWNER", or "lapsed LOCK" and "struck LOCK", to
// which a waiter of the lock replies, and which all of them do, by asking.
func (in *inbox) deliver(payload string) {
	kind, rest, _ := strings.Cut(payload, " ")
	switch kind {
	case "granted":
		g, names, ok := parseGrant(rest)
		if ok {
			in.tell(in.key(names[1]), names[0], g)
		}
	case "held":
		ms, owner, _ := strings.Cut(rest, " ")
		if left, err := strconv.ParseInt(ms, 10, 64); err == nil && left >= 0 {
			in.tell("", owner, news{first: true, left: time.Duration(left) * time.Millisecond})
		}
	case "lapsed":
		in.call(in.key(rest), 4) // some may be about to leave
	case "struck":
		in.call(in.key(rest), -1)
	}
}

// key is what the lock of that name locks.
func (in *inbox) key(lock string) string {
	return strings.TrimSuffix(strings.TrimPrefix(lock, in.b.o.Prefix+"lock:{"), "}")
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

// tell gives owner's waiter the news. A grant that nobody here has waited for is handed on.
func (in *inbox) tell(key, owner string, n news) {
	in.mu.Lock()
	defer in.mu.Unlock()
	if w := in.waiters[owner]; w != nil {
		w.put(n)
		return
	}
	if _, taken := in.taken[owner]; !taken && n.token != 0 {
		in.leaves(key, owner, 0)
	}
}

// call has most waiters of key ask; all if it is negative.
func (in *inbox) call(key string, most int) {
	in.mu.Lock()
	defer in.mu.Unlock()
	for _, w := range in.waiters {
		if w.key == key && most != 0 {
			w.put(news{})
			most--
		}
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

// join makes r's owner a waiter, before the request leaves that may put it into the queue.
func (in *inbox) join(r dlock.Request) (*waiter, error) {
	w := &waiter{key: r.Key, owner: r.Owner, news: make(chan news, 1)}
	in.mu.Lock()
	defer in.mu.Unlock()
	switch {
	case in.closed:
		return nil, dlock.ErrClosed
	case in.waiters[w.owner] != nil:
		return nil, fmt.Errorf("%w: redislock: owner %q waits already", dlock.ErrInvalid, w.owner)
	}
	in.waiters[w.owner] = w
	in.busy.Add(1)
	if !in.watching {
		in.watching = true
		in.heard = later(in.heard, time.Now().Add(-silence/2)) // nobody has listened for long: it is tried at once
		time.AfterFunc(silence/2-time.Since(in.heard), in.check)
	}
	return w, nil
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func (in *inbox) drop(w *waiter) {
	in.mu.Lock()
	defer in.mu.Unlock()
	delete(in.waiters, w.owner)
	in.busy.Done()
}

// took remembers that owner holds the lock although its push may be unread, which must not be taken for one of nobody's.
func (in *inbox) took(owner string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.taken[owner] = in.session
}

// forget is told that owner has been released.
func (in *inbox) forget(owner string) {
	in.mu.Lock()
	defer in.mu.Unlock()
	delete(in.taken, owner)
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
