package consullock

import (
	"context"
	"errors"
	"time"

	"github.com/hashicorp/consul/api"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/wait"
)

// session is a Consul session, perhaps not yet created. Backend.mu guards the first group of fields, busy the second.
type session struct {
	ttl    time.Duration
	over   context.Context // ends when it is known to have ended, or is destroyed
	finish context.CancelFunc
	sealed bool // lock requests on it fail, even one in flight
	leases int  // held, or perhaps held

	busy  wait.Turn
	id    string    // "" until it is created
	since time.Time // when the last successful creation or renewal was sent
}

var errGone = errors.New("consullock: the session has ended")

// sessionTTL adds a quarter, which saves most renewals.
func (b *Backend) sessionTTL(ttl time.Duration) time.Duration {
	ttl = min(ttl, maxSession)
	return max((ttl + ttl/4 + time.Millisecond - 1).Truncate(time.Millisecond), b.o.MinSessionTTL)
}

func (b *Backend) cover(ctx context.Context, ttl time.Duration) (s *session, start time.Time, err error) {
	for size := b.sessionTTL(ttl); ; {
		b.locked(func() {
			if s = b.sessions[size]; s == nil {
				s = &session{ttl: size, busy: wait.NewTurn(patience(size))}
				s.over, s.finish = context.WithCancel(context.Background())
				b.sessions[size] = s
			}
		})
		if start, err = b.extend(ctx, s, ttl); !errors.Is(err, errGone) {
			return s, start, err
		}
	}
}

func patience(ttl time.Duration) time.Duration { return min(max(ttl/8, time.Second), grace) }

// extend creates or renews s, unless it already lasts until start + ttl. It returns errGone if s has ended. A slow request
// doesn't keep the session's other leases from being renewed.
func (b *Backend) extend(ctx context.Context, s *session, ttl time.Duration) (start time.Time, err error) {
	err = s.busy.Do(ctx, patience(s.ttl), s.ttl, func(ctx context.Context) (err error) {
		start = time.Now() // before the request leaves
		switch {
		case s.over.Err() != nil:
			return errGone
		case b.open.Err() != nil:
			return dlock.ErrClosed
		case s.id == "":
			err = b.create(ctx, s)
		case wait.Since(s.since, start) > s.ttl: // Consul may be ending it, and still accepts renewals
			b.retire(s) //nolint:contextcheck // it outlives ctx
			return errGone
		case wait.Since(s.since, start)+ttl > s.ttl:
			err = b.renew(ctx, s)
		default:
			return nil
		}
		if err == nil {
			s.since = start
		}
		return err
	})
	if err != nil && !errors.Is(err, errGone) {
		err = failed(ctx, err)
	}
	return start, err
}

// create leaves a session that expires unused if the reply is lost.
func (b *Backend) create(ctx context.Context, s *session) error {
	var made struct{ ID string }
	// Not through api.Session, which omits a LockDelay of 0; the server's default is 15 s.
	_, err := b.c.Raw().Write("/v1/session/create", map[string]any{
		"Name":       "fencelab/consullock",
		"TTL":        s.ttl.String(),
		"LockDelay":  b.o.LockDelay.String(),
		"Behavior":   api.SessionBehaviorDelete,
		"NodeChecks": []string{},
	}, &made, new(api.WriteOptions).WithContext(ctx))
	switch {
	case err != nil:
		return err
	case made.ID == "":
		return errors.New("a session was created without an ID")
	}
	s.id = made.ID
	b.locked(func() { //nolint:contextcheck // the watch outlives ctx
		if b.open.Err() == nil {
			b.busy.Go(func() { b.watch(s, made.ID) })
		}
	})
	return nil
}

func (b *Backend) renew(ctx context.Context, s *session) error {
	e, _, err := b.c.Session().Renew(s.id, new(api.WriteOptions).WithContext(ctx))
	if err == nil && e == nil {
		b.end(s) //nolint:contextcheck // it outlives ctx
		return errGone
	}
	return err
}

func (b *Backend) watch(s *session, id string) {
	ctx, cancel := wait.Both(b.open, s.over)
	defer cancel()
	for index := uint64(0); ctx.Err() == nil; {
		q, done := query(ctx, index, longPoll)
		e, meta, err := b.c.Session().Info(id, q)
		done()
		switch {
		case err != nil:
			index = 0
			wait.For(ctx, time.Second)
		case e == nil && meta.ResultsFilteredByACLs: // Renew will tell
			index = 0
			wait.For(ctx, time.Second)
		case e == nil:
			b.end(s)
			return
		default:
			index = since(index, meta.LastIndex)
		}
	}
}

func (b *Backend) retire(s *session) {
	b.locked(func() {
		if b.sessions[s.ttl] == s {
			delete(b.sessions, s.ttl)
		}
		b.discard(s)
	})
}

// discard destroys s if it is retired and has no leases. If the request fails, s expires. b.mu is held.
func (b *Backend) discard(s *session) {
	if b.sessions[s.ttl] == s || s.leases > 0 || s.over.Err() != nil || b.open.Err() != nil {
		return
	}
	s.finish()
	b.busy.Go(func() {
		ctx, cancel := context.WithTimeout(b.open, expireTry)
		defer cancel()
		_, _ = b.c.Session().Destroy(s.id, new(api.WriteOptions).WithContext(ctx))
	})
}

func (b *Backend) end(s *session) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.sessions[s.ttl] == s {
		delete(b.sessions, s.ttl)
	}
	if s.over.Err() != nil {
		return
	}
	s.finish()
	for _, l := range b.leases {
		if l.s == s {
			b.forget(l)
		}
	}
}

type id struct{ key, owner string }

// lease is a key that this Backend holds, or may hold. Backend.mu guards what changes.
type lease struct {
	id
	b       *Backend
	s       *session
	flags   uint64 // of the entry; unique in s
	index   uint64 // of the write that took the key; 0 until the reply
	expires time.Time
	timer   *time.Timer
	ending  bool // expired; the entry is being deleted
	over    bool // not held, and never will be; s doesn't count it
}

func (l *lease) wrote(e *api.KVPair) bool {
	return l != nil && e != nil && e.Session == l.s.id && e.Flags == l.flags && string(e.Value) == l.owner
}

// begin registers a request before it is sent. It is undone when it expires.
func (b *Backend) begin(key, owner string, s *session, expires time.Time) *lease {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.requests++
	l := &lease{id: id{key, owner}, b: b, s: s, flags: b.requests}
	l.timer = time.AfterFunc(1<<63-1, func() { b.expire(l) })
	s.leases++
	b.leases[l.id] = l
	b.expireAt(l, expires)
	return l
}

func (b *Backend) expireAt(l *lease, at time.Time) {
	l.expires = at
	l.timer.Stop()
	if b.open.Err() == nil {
		l.timer.Reset(time.Until(at))
	}
}

// keep extends l to at least that time. It reports false if l has expired.
func (b *Backend) keep(l *lease, at time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if l.ending || l.over {
		return false
	}
	if at.After(l.expires) {
		b.expireAt(l, at)
	}
	return true
}

func (b *Backend) drop(l *lease) { b.locked(func() { b.forget(l) }) }

// forget is drop with b.mu held.
func (b *Backend) forget(l *lease) {
	l.timer.Stop()
	if b.leases[l.id] == l {
		delete(b.leases, l.id)
	}
	if !l.over {
		l.over = true
		l.s.leases--
		b.discard(l.s)
	}
}

const (
	expireTry      = 5 * time.Second
	expirePause    = 50 * time.Millisecond
	expireMaxPause = time.Second
)

// expire retries until it has deleted l's entry, or the session has ended.
func (b *Backend) expire(l *lease) {
	b.mu.Lock()
	if l.ending || l.over || b.open.Err() != nil || time.Now().Before(l.expires) { // it was just renewed
		b.mu.Unlock()
		return
	}
	l.ending = true
	b.busy.Add(1)
	b.mu.Unlock()
	defer b.busy.Done()
	wait.Retry(b.open, expirePause, expireMaxPause, func() bool {
		ctx, cancel := context.WithTimeout(b.open, expireTry)
		defer cancel()
		err := b.remove(ctx, l.id, l, 0)
		return err == nil || errors.Is(err, dlock.ErrLost) || l.s.over.Err() != nil
	})
	b.drop(l)
}
