package consullock

import (
	"context"
	"errors"
	"time"

	"github.com/hashicorp/consul/api"
)

// session is a session of Consul's, once it has been made.
type session struct {
	ttl  time.Duration
	gone chan struct{} // closed when it is known to have ended; Backend.mu guards that

	sealed bool // it gives no grants any more, not even to a request that is under way; Backend.mu guards that
	leases int  // that are held, or may be; Backend.mu guards it

	busy  chan struct{} // whoever has put something in may read and write the rest
	id    string        // "" before it has been made; doesn't change
	until time.Time     // it lasts until then at least
}

// errGone says that a session has ended.
var errGone = errors.New("consullock: the session has ended")

// ended reports whether s is known to have ended.
func (s *session) ended() bool {
	select {
	case <-s.gone:
		return true
	default:
		return false
	}
}

// patience is how long a request may take at first that makes or renews s, for meanwhile none of its leases can be renewed.
func (s *session) patience() time.Duration { return min(max(s.ttl/8, time.Second), grace) }

// sessionTTL is the TTL of the session for leases of ttl. The quarter is what saves most renewals.
func (b *Backend) sessionTTL(ttl time.Duration) time.Duration {
	s := ttl + ttl/4 + time.Millisecond - 1
	if s < ttl { // overflow
		return 1<<63 - 1
	}
	return max(s.Truncate(time.Millisecond), b.o.MinSessionTTL)
}

// cover returns a session that lasts until start + ttl at least. start is now, or when it was renewed for that.
func (b *Backend) cover(ctx context.Context, ttl time.Duration) (s *session, start time.Time, err error) {
	for {
		s := b.session(b.sessionTTL(ttl))
		start, err := b.extend(ctx, s, ttl)
		if !errors.Is(err, errGone) {
			return s, start, err
		}
	}
}

// session returns the session for new grants.
func (b *Backend) session(ttl time.Duration) *session {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.sessions[ttl]
	if s == nil {
		s = &session{ttl: ttl, gone: make(chan struct{}), busy: make(chan struct{}, 1)}
		b.sessions[ttl] = s
	}
	return s
}

// extend makes or renews s, unless it lasts until start + ttl already. It returns errGone if s has ended. A request that
// takes too long gives others their turn, and is repeated, with more time for a Consul that is slow.
func (b *Backend) extend(ctx context.Context, s *session, ttl time.Duration) (start time.Time, err error) {
	for patience := s.patience(); ; patience = min(2*patience, s.ttl) {
		start, err = b.extendOnce(ctx, s, ttl, patience)
		if !errors.Is(err, errLate) || ctx.Err() != nil || b.open.Err() != nil {
			return start, err
		}
	}
}

func (b *Backend) extendOnce(ctx context.Context, s *session, ttl, patience time.Duration) (start time.Time, err error) {
	select {
	case s.busy <- struct{}{}:
		defer func() { <-s.busy }()
	case <-ctx.Done():
		return start, failed(ctx, context.Cause(ctx))
	}
	if s.ended() {
		return start, errGone
	}
	start = time.Now() // before the request leaves: the server cannot count from earlier
	end := start.Add(ttl)
	// By both clocks: the monotonic one stops while the machine is suspended, the other may be set back.
	if s.id != "" && !end.After(s.until) && !end.Round(0).After(s.until.Round(0)) {
		return start, nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, patience, errLate)
	defer cancel()
	if s.id == "" {
		err = b.create(ctx, s)
	} else {
		err = b.renew(ctx, s)
	}
	if err == nil {
		s.until = start.Add(s.ttl)
	}
	return start, err
}

// create makes s. If the answer is lost, a session remains that holds nothing, and ends.
func (b *Backend) create(ctx context.Context, s *session) error {
	var made struct{ ID string }
	// Not through api.Session: it takes a LockDelay of 0 for none given, and the server then for 15 s.
	_, err := b.c.Raw().Write("/v1/session/create", map[string]any{
		"Name":       "fencelab/consullock",
		"TTL":        s.ttl.String(),
		"LockDelay":  b.o.LockDelay.String(),
		"Behavior":   api.SessionBehaviorDelete,
		"NodeChecks": []string{},
	}, &made, new(api.WriteOptions).WithContext(ctx))
	switch {
	case err != nil:
		return failed(ctx, err)
	case made.ID == "":
		return errors.New("consullock: a session was made without an ID")
	}
	s.id = made.ID
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open.Err() == nil {
		b.busy.Go(func() { b.watch(s, made.ID) }) //nolint:contextcheck // it goes on after ctx
	}
	return nil
}

func (b *Backend) renew(ctx context.Context, s *session) error {
	e, _, err := b.c.Session().Renew(s.id, new(api.WriteOptions).WithContext(ctx))
	switch {
	case err != nil:
		return failed(ctx, err)
	case e == nil:
		b.end(s) //nolint:contextcheck // what it starts goes on after ctx
		return errGone
	}
	return nil
}

// watch waits for the end of s.
func (b *Backend) watch(s *session, id string) {
	ctx, cancel := context.WithCancel(b.open)
	defer cancel()
	b.busy.Go(func() { // somebody else may find out
		select {
		case <-s.gone:
			cancel()
		case <-ctx.Done():
		}
	})
	for index := uint64(0); ctx.Err() == nil; {
		q, done := query(ctx, index, longPoll)
		e, meta, err := b.c.Session().Info(id, q)
		done()
		switch {
		case err != nil:
			index = 0
			b.pause(ctx, time.Second)
		case e == nil:
			b.end(s)
		default:
			index = since(index, meta.LastIndex)
		}
	}
}

// pause returns after d, or when ctx ends.
func (b *Backend) pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// retire has no new grants given on s.
func (b *Backend) retire(s *session) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sessions[s.ttl] == s {
		delete(b.sessions, s.ttl)
	}
	b.discard(s)
}

// discard destroys s if it is of no use any more. It is sealed by then, so that no grant is under way; if the request fails,
// it ends by itself. b.mu is held.
func (b *Backend) discard(s *session) {
	if b.sessions[s.ttl] == s || s.leases > 0 || s.ended() || b.open.Err() != nil {
		return
	}
	close(s.gone)
	b.busy.Go(func() {
		ctx, cancel := context.WithTimeout(b.open, expireTry)
		defer cancel()
		_, _ = b.c.Session().Destroy(s.id, new(api.WriteOptions).WithContext(ctx))
	})
}

// seal has the request for l, unless it has been answered, take effect now or never. It returns nil also if the session
// has ended.
func (b *Backend) seal(ctx context.Context, l *lease) error {
	b.mu.Lock()
	done := l.index != 0 || l.s.sealed
	b.mu.Unlock()
	if done {
		return nil
	}
	b.retire(l.s) //nolint:contextcheck // what it starts goes on after ctx
	_, no, err := b.txn(ctx, &api.KVTxnOp{Verb: api.KVLock, Key: b.sealOf(l.s), Session: l.s.id})
	switch {
	case err != nil:
		return err
	case no.is(noSession):
		b.end(l.s) //nolint:contextcheck // what it starts goes on after ctx
		return nil
	case no != nil:
		return no
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	l.s.sealed = true
	return nil
}

// end takes note that s has ended, and with it all its leases.
func (b *Backend) end(s *session) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sessions[s.ttl] == s {
		delete(b.sessions, s.ttl)
	}
	if s.ended() {
		return
	}
	close(s.gone)
	for _, l := range b.leases {
		if l.s == s {
			b.forget(l)
		}
	}
}
