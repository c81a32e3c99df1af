package etcdlock

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/fencelab/fencelab/dlock"
)

const (
	minSlack = time.Second      // S is longer than the TTL by at least this
	maxSlack = 10 * time.Second // and, but for what the server makes of it, by at most this and a second
	maxEvery = 2 * time.Second  // the longest time between keep-alives
	mostS    = 9_000_000_000    // seconds; etcd's limit
	patience = time.Second      // for a keep-alive's answer, if the time between keep-alives isn't longer
	goodbye  = time.Second      // for what is done after a call's context has ended
)

// session is a lease in etcd which the claims of one TTL share.
type session struct {
	id    clientv3.LeaseID
	guard string        // name of the key whose revision tells which puts are too late
	s     time.Duration // S, as the server has granted it

	done    chan struct{} // closed when the server has said that the lease is gone, or has forgotten its guard
	endOnce sync.Once
	listens sync.Once
	from    int64         // the inbox is watched from this revision on; written by listens
	poke    chan struct{} // asks for a keep-alive now
	stopped chan struct{} // closed when no more keep-alives are sent

	mu    sync.Mutex
	ttl   time.Duration // the longest for which the session was asked
	kept  time.Time     // when the last request left that is known to have restarted the lease
	err   error         // what the last keep-alive came to
	round chan struct{} // closed, and replaced, when a keep-alive has come to something
	rev   int64         // guard's revision: puts that were sent under another one fail
}

// slot has the current session of one S.
type slot struct {
	turn chan struct{} // held by whoever looks for the session
	s    *session
}

// sessionFor returns a live session whose S is good for ttl. The first call for an S starts it.
func (b *Backend) sessionFor(ctx context.Context, ttl time.Duration) (*session, error) {
	if ttl/time.Second > mostS-60 {
		return nil, fmt.Errorf("%w: TTL %v is longer than etcd allows", dlock.ErrInvalid, ttl)
	}
	seconds := int64((ttl + min(max(ttl/8, minSlack), maxSlack) + time.Second - 1) / time.Second)
	b.mu.Lock()
	l := b.sessions[seconds]
	if l == nil {
		l = &slot{turn: make(chan struct{}, 1)}
		b.sessions[seconds] = l
	}
	b.mu.Unlock()
	select {
	case l.turn <- struct{}{}:
		defer func() { <-l.turn }()
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if l.s != nil && !l.s.ended() {
		l.s.serve(ttl)
		return l.s, nil
	}
	sent := time.Now()
	resp, err := b.c.Grant(ctx, seconds)
	if err != nil {
		return nil, err
	}
	s := &session{
		id: resp.ID, guard: fmt.Sprintf("%ssession/%x", b.prefix, resp.ID),
		s:    time.Duration(resp.TTL) * time.Second,
		done: make(chan struct{}), poke: make(chan struct{}, 1), stopped: make(chan struct{}),
		ttl: ttl, kept: sent, round: make(chan struct{}),
	}
	go s.keep(b.open, clientv3.RetryLeaseClient(b.c)) //nolint:contextcheck // it lives as long as the Backend
	if b.follow {
		b.router.begin() //nolint:contextcheck // and so does this
	}
	l.s = s
	return s, nil
}

// serve has the session kept alive for grants of ttl, too.
func (s *session) serve(ttl time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ttl = max(s.ttl, ttl)
}

// every is the time between keep-alives: short enough for a grant, whenever it comes, to find that the last one covers its
// TTL, and for the session to outlive three that are refused; and no shorter, for a queue is full of sessions that only wait: with
// hundreds of them, the keep-alives compete with the sections.
func (s *session) every() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return min((s.s-s.ttl)*3/4, s.s/4, maxEvery)
}

// covers reports whether the lease is known to last until start + ttl at least.
func (s *session) covers(start time.Time, ttl time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return since(s.kept, start) <= s.s-ttl
}

// since is how long before now then was: the larger of what the monotonic clock says, which stops while the machine is
// suspended, and what the wall clock says, which may be set back.
func since(then, now time.Time) time.Duration {
	return max(now.Sub(then), now.Round(0).Sub(then.Round(0)))
}

// cover makes sure that the lease lasts until start + ttl at least, with a keep-alive if need be, which all who want one
// at the same time share.
func (s *session) cover(ctx context.Context, start time.Time, ttl time.Duration) error {
	for {
		s.mu.Lock()
		round := s.round
		s.mu.Unlock()
		if s.covers(start, ttl) {
			return nil
		}
		select {
		case s.poke <- struct{}{}:
		default:
		}
		select {
		case <-round:
		case <-s.done:
			return errExpired
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := s.failing(); err != nil {
			return fmt.Errorf("keep-alive: %w", err)
		}
	}
}

// failing returns what the last keep-alive has come to, if it failed.
func (s *session) failing() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// errExpired is what becomes of a claim whose session is gone.
var errExpired = fmt.Errorf("%w: the session has expired", dlock.ErrLost)

// end gives the session up, whose lease the server doesn't know any more, or whose guard it has forgotten. It is kept alive
// no more, and its grants are lost.
func (s *session) end() { s.endOnce.Do(func() { close(s.done) }) }

func (s *session) ended() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

// dead reports whether the server, if it could be asked, might say that the lease is gone.
func (s *session) dead() bool { return !s.covers(time.Now(), 0) }

// revision is what puts are conditional on.
func (s *session) revision() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rev
}

func (s *session) guardedBy(rev int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.rev = max(s.rev, rev)
}

// keep sends keep-alives until ctx ends or the lease is gone.
//
// The client's own KeepAlive doesn't tell when an answer's request left, and its KeepAliveOnce repeats a failing request
// without a pause.
func (s *session) keep(ctx context.Context, lc pb.LeaseClient) {
	defer close(s.stopped)
	for ctx.Err() == nil && !s.ended() {
		s.finish(time.Time{}, s.stream(ctx, lc))
		s.rest(ctx, s.every()/4)
	}
}

// stream sends keep-alives until one fails.
func (s *session) stream(ctx context.Context, lc pb.LeaseClient) error {
	wait := max(s.every(), patience)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	limit := time.AfterFunc(wait, func() { cancel(errNoAnswer) })
	defer limit.Stop()
	stream, err := lc.LeaseKeepAlive(ctx)
	for err == nil {
		limit.Reset(wait)
		sent := time.Now()
		if err = stream.Send(&pb.LeaseKeepAliveRequest{ID: int64(s.id)}); err != nil {
			_, err = stream.Recv() // tells why
			break
		}
		var resp *pb.LeaseKeepAliveResponse
		if resp, err = stream.Recv(); err != nil {
			break
		}
		if resp.TTL <= 0 {
			s.end()
			return errExpired
		}
		limit.Stop()
		s.finish(sent, nil)
		s.rest(ctx, s.every())
		if err = ctx.Err(); err == nil && s.ended() { // given up: what hangs on it must end
			err = errExpired
		}
	}
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

var errNoAnswer = errors.New("the server doesn't answer")

// finish notes what a keep-alive has come to: it left at sent and was answered, or failed.
func (s *session) finish(sent time.Time, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil {
		s.kept = sent
	}
	s.err = err
	close(s.round)
	s.round = make(chan struct{})
}

// rest waits for d, or until a keep-alive is asked for.
func (s *session) rest(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-s.poke:
	case <-s.done:
	case <-ctx.Done():
	}
}

// revoke ends the lease now rather than later, if it can.
func (s *session) revoke(c *clientv3.Client) {
	ctx, cancel := context.WithTimeout(context.Background(), goodbye)
	defer cancel()
	_, _ = c.Revoke(ctx, s.id)
}
