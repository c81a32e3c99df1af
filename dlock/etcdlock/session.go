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
	"github.com/fencelab/fencelab/dlock/internal/wait"
)

const (
	minSlack = time.Second      // S exceeds the TTL by at least this
	maxSlack = 10 * time.Second // and by at most this and a second, unless the server's minimum is longer
	maxEvery = 2 * time.Second  // between keep-alives
	mostS    = 9_000_000_000    // seconds; etcd's limit
	patience = time.Second      // for a reply that others wait for
	goodbye  = time.Second      // for work after a call's context has ended
	greeting = 20 * time.Second // for a session to begin; the client would wait forever for an unreachable server
)

type session struct {
	id    clientv3.LeaseID
	guard string        // puts are conditional on this key's revision
	s     time.Duration // S, as granted

	over    context.Context // ends when the server has lost the lease or its guard
	end     func()
	listens sync.Once
	from    int64         // first revision watched for messages; set by listens
	poke    chan struct{} // requests a keep-alive
	stopped chan struct{} // closed when no more keep-alives are sent

	mu    sync.Mutex
	ttl   time.Duration // the longest of its claims
	kept  time.Time     // when the last successful keep-alive was sent
	err   error         // of the last keep-alive
	round chan struct{} // closed and replaced after each keep-alive
	rev   int64         // the guard's
}

type slot struct {
	busy wait.Turn
	s    *session
}

func (b *Backend) sessionFor(ctx context.Context, ttl time.Duration) (s *session, err error) {
	if ttl/time.Second > mostS-60 {
		return nil, fmt.Errorf("%w: TTL %v is longer than etcd allows", dlock.ErrInvalid, ttl)
	}
	seconds := int64((ttl + min(max(ttl/8, minSlack), maxSlack) + time.Second - 1) / time.Second)
	b.mu.Lock()
	l := b.sessions[seconds]
	if l == nil {
		l = &slot{busy: wait.NewTurn(patience)}
		b.sessions[seconds] = l
	}
	b.mu.Unlock()
	ctx, cancel := context.WithTimeoutCause(ctx, greeting, wait.ErrNoAnswer)
	defer cancel()
	err = l.busy.Do(ctx, patience, time.Hour, func(ctx context.Context) error {
		if s = l.s; s != nil && s.over.Err() == nil {
			s.locked(func() { s.ttl = max(s.ttl, ttl) })
			return nil
		}
		sent := time.Now()
		resp, err := b.c.Grant(ctx, seconds)
		if err != nil {
			return err
		}
		s = &session{
			id: resp.ID, guard: fmt.Sprintf("%ssession/%x", b.prefix, resp.ID), s: time.Duration(resp.TTL) * time.Second,
			poke: make(chan struct{}, 1), stopped: make(chan struct{}), ttl: ttl, kept: sent, round: make(chan struct{}),
		}
		over, end := context.WithCancelCause(context.Background())
		s.over, s.end = over, func() { end(errExpired) }
		go s.keep(b.open, clientv3.RetryLeaseClient(b.c)) //nolint:contextcheck // it lives as long as the Backend
		l.s = s
		return nil
	})
	if err != nil && errors.Is(context.Cause(ctx), wait.ErrNoAnswer) {
		err = fmt.Errorf("session: %w within %v", wait.ErrNoAnswer, greeting)
	}
	return s, err
}

func (s *session) locked(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// every is the interval of keep-alives. Each must cover any grant's TTL, and the session survive three failures; but those of
// hundreds of waiters compete with the lock's requests.
func (s *session) every() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return min((s.s-s.ttl)*3/4, s.s/4, maxEvery)
}

func (s *session) covers(start time.Time, ttl time.Duration) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	after := s.kept.After(start) && ttl <= s.s // whatever the wall clock says
	return after || wait.Since(s.kept, start) <= s.s-ttl
}

// cover makes the lease last at least until start + ttl, if need be with a keep-alive, which callers share.
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
		case <-s.over.Done():
			return errExpired
		case <-ctx.Done():
			return ctx.Err()
		}
		if err := s.failing(); err != nil {
			return fmt.Errorf("keep-alive: %w", err)
		}
	}
}

func (s *session) failing() (err error) {
	s.locked(func() { err = s.err })
	return err
}

var errExpired = fmt.Errorf("%w: the session has expired", dlock.ErrLost)

func (s *session) dead() bool { return !s.covers(time.Now(), 0) }

func (s *session) guardedBy(rev int64) { s.locked(func() { s.rev = max(s.rev, rev) }) }

// keep doesn't use the client's KeepAlive, which doesn't say when a request left, nor KeepAliveOnce, which repeats a failing one
// without a pause.
func (s *session) keep(ctx context.Context, lc pb.LeaseClient) {
	defer close(s.stopped)
	ctx, end := wait.Both(ctx, s.over)
	defer end()
	for ctx.Err() == nil {
		s.finish(time.Time{}, s.stream(ctx, lc))
		s.rest(ctx, s.every()/4)
	}
}

func (s *session) stream(ctx context.Context, lc pb.LeaseClient) error {
	limit := max(s.every(), patience)
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	timeout := time.AfterFunc(limit, func() { cancel(wait.ErrNoAnswer) })
	defer timeout.Stop()
	stream, err := lc.LeaseKeepAlive(ctx)
	for err == nil {
		timeout.Reset(limit)
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
		timeout.Stop()
		s.finish(sent, nil)
		s.rest(ctx, s.every())
		err = ctx.Err()
	}
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

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

func (s *session) rest(ctx context.Context, d time.Duration) {
	ctx, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	select {
	case <-s.poke:
	case <-ctx.Done():
	}
}

func (s *session) revoke(c *clientv3.Client) {
	ctx, cancel := context.WithTimeout(context.Background(), goodbye)
	defer cancel()
	_, _ = c.Revoke(ctx, s.id)
}
