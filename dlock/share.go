package dlock

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Share lets the goroutines of a process pass a lease on among themselves, first come, first served, without a round trip (cohort
// locking: D. Dice, V. J. Marathe, N. Shavit, "Lock Cohorting", 2012). Each critical section has its own [Handle]. They share the
// token, and [Handle.Next] keeps counting, so a store orders all of them. Read and write with Next: with the token alone, a store
// refuses the writes of the second critical section.
//
// If the lock is first come, first served, a waiter in another process waits for at most Sections critical sections, or until the
// lease is For old and the critical section under way ends. The lease may be idle for part of that time. While one goroutine
// waits for the lock service, those behind it wait too; if it gives up, the next one sends its own request, behind the other
// processes' waiters. If the lock service fails, all of them fail.
//
// The loss of the lease ends the critical section under way. A Release that passes the lease on doesn't contact the service, so a
// loss is detected by a renewal, by [Grant].Lost or by the final Release. A lease that was waited for may be renewed once as it
// arrives. Without Options.Renew a critical section may begin with
// half of the TTL left. If a process exits without [Locker.Close], the leases that it keeps block others for their TTL.
type Share struct {
	// Sections is the greatest number of critical sections under one lease. 0: leases aren't shared.
	Sections int
	// For is the age at which a lease is no longer passed on; nor is one with less than half of its time left. Required with
	// Sections, and less than Renew.MaxHold.
	For time.Duration
	// Idle is how long a lease without local waiters is kept for the next caller. 0: it is released at once.
	Idle time.Duration
}

func (s Share) check(maxHold time.Duration) error {
	switch {
	case s.Sections < 0 || s.For < 0 || s.Idle < 0:
		return fmt.Errorf("%w: Options.Share has a negative value: %+v", ErrInvalid, s)
	case s.Sections == 0 && s != Share{}:
		return fmt.Errorf("%w: Options.Share.Sections is not set; say how many critical sections may share a lease", ErrInvalid)
	case s.Sections > 0 && s.For == 0:
		return fmt.Errorf("%w: Options.Share.For is not set; say for how long a lease may be passed on", ErrInvalid)
	case maxHold > 0 && s.For >= maxHold:
		return fmt.Errorf("%w: Options.Share.For is %v; it must be less than Renew.MaxHold, %v, to leave time for the last section",
			ErrInvalid, s.For, maxHold)
	}
	return nil
}

// shared has the keys that this process holds, keeps or requests. Its mutex is never locked while a lease's is held.
type shared struct {
	mu      sync.Mutex
	keys    map[string]*turn
	freeing sync.WaitGroup // leases whose idle time is over
	closed  bool
}

// turn is the right to use a key, which goroutines get in FIFO order. The one that has it holds lease or, if lease is nil, is
// requesting one or has just been handed one. If idle isn't nil, nobody has the turn. When lease ends, the turn goes to the next
// waiter.
type turn struct {
	lease *lease
	idle  *time.Timer
	queue []chan handed
	held  atomic.Bool // somebody has the lock
}

// handed is what the next waiter gets: the lease, an error, or neither if it must send a request itself.
type handed struct {
	ls  *lease
	err error
}

func (l *Locker) share(ctx context.Context, key string, wait bool) (*Handle, error) {
	t, ls, err := l.shared.await(ctx, l.open, key, wait)
	switch {
	case err != nil:
		return nil, err
	case t == nil:
		return l.grant(ctx, key, wait, nil) // it isn't passed on
	case ls == nil:
		return l.ask(ctx, t, key, wait)
	}
	if h := l.shared.goesOn(ctx, t, ls); h != nil {
		return h, nil
	}
	// It is too old or has just ended. If it is still held, release it before the next request.
	freed := make(chan struct{})
	l.busy.Go(func() {
		ls.free()
		close(freed)
	})
	select {
	case <-freed:
	case <-ctx.Done():
	}
	return l.ask(ctx, t, key, wait)
}

// ask requests a lease for the owner of t, unless ctx has ended meanwhile.
func (l *Locker) ask(ctx context.Context, t *turn, key string, wait bool) (h *Handle, err error) {
	defer func() { // also when the backend panics
		if h == nil {
			l.shared.failed(ctx, key, err)
		}
	}()
	switch {
	case l.open.Err() != nil:
		return nil, ErrClosed
	case ctx.Err() != nil:
		return nil, gaveUp(t.held.Load(), cause(ctx))
	}
	t.held.Store(false)
	if h, err = l.grant(ctx, key, wait, &t.held); err == nil {
		l.shared.began(t, h.ls)
		h.ls.refresh(ctx)
	}
	return h, err
}

// await waits for the key's turn, and returns it with the lease if there is one. If it returns no turn, the caller sends a
// request of its own.
func (s *shared) await(ctx, open context.Context, key string, wait bool) (*turn, *lease, error) {
	s.mu.Lock()
	t := s.keys[key]
	switch {
	case t == nil:
		t = new(turn)
		s.keys[key] = t
		s.mu.Unlock()
		return t, nil, nil
	case t.idle != nil:
		t.idle.Stop() // if too late, the timer sees that idle is nil
		ls := t.lease
		t.lease, t.idle = nil, nil
		s.mu.Unlock()
		return t, ls, nil
	case !wait:
		s.mu.Unlock()
		if t.held.Load() {
			return nil, nil, ErrHeld
		}
		return nil, nil, nil
	}
	mine := make(chan handed, 1)
	t.queue = append(t.queue, mine)
	s.mu.Unlock()

	select {
	case got := <-mine:
		return t, got.ls, got.err
	case <-ctx.Done():
	case <-open.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(t.queue, mine)
	if i < 0 { // the turn has come meanwhile and must be taken
		got := <-mine
		return t, got.ls, got.err
	}
	t.queue = slices.Delete(t.queue, i, i+1)
	if ctx.Err() == nil {
		return nil, nil, ErrClosed
	}
	return nil, nil, gaveUp(t.held.Load(), cause(ctx))
}

func (s *shared) began(t *turn, ls *lease) {
	s.mu.Lock()
	t.lease = ls
	s.mu.Unlock()
	t.held.Store(true)
	context.AfterFunc(ls.ctx, func() { s.ended(ls.g.Key, ls) })
}

// goesOn begins the next critical section under ls, which came with the turn.
func (s *shared) goesOn(ctx context.Context, t *turn, ls *lease) *Handle {
	s.mu.Lock()
	defer s.mu.Unlock()
	h := ls.section(ctx)
	if h != nil {
		t.lease = ls // before its end can be noted
	}
	return h
}

// failed passes the turn on after a failed request. If the lock service is at fault, all waiters get the error: if each asked in
// turn, the last would wait for the sum of their time limits.
func (s *shared) failed(ctx context.Context, key string, err error) {
	all := err != nil && ctx.Err() == nil && !slices.ContainsFunc([]error{ErrHeld, ErrQueueFull, ErrRequestLost}, func(own error) bool { return errors.Is(err, own) })
	s.mu.Lock()
	defer s.mu.Unlock()
	for t := s.keys[key]; all && len(t.queue) > 0; {
		t.give(handed{err: err})
	}
	s.next(key)
}

func (s *shared) ended(key string, ls *lease) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.keys[key]
	if t == nil || t.lease != ls {
		return
	}
	if t.idle != nil {
		t.idle.Stop()
	}
	t.lease, t.idle = nil, nil
	s.next(key)
}

func (s *shared) next(key string) {
	if t := s.keys[key]; len(t.queue) > 0 {
		t.give(handed{})
		return
	}
	delete(s.keys, key)
}

func (t *turn) give(h handed) {
	t.queue[0] <- h
	t.queue = t.queue[1:]
}

// pass hands a lease that nobody holds to the next waiter, or keeps it for a while. It reports whether it did either.
func (s *shared) pass(ls *lease) bool {
	idle := ls.keptFor()
	s.mu.Lock()
	defer s.mu.Unlock()
	t := s.keys[ls.g.Key]
	switch {
	case s.closed || t == nil || t.lease != ls: // closed, just ended, or a lease without a turn
		return false
	case len(t.queue) > 0:
		t.lease = nil
		t.give(handed{ls: ls})
		return true
	case idle <= 0:
		return false
	}
	var timer *time.Timer
	timer = time.AfterFunc(idle, func() {
		s.mu.Lock()
		over := t.idle == timer
		if over {
			t.idle = nil
			s.freeing.Add(1)
		}
		s.mu.Unlock()
		if over {
			defer s.freeing.Done()
			ls.free()
		}
	})
	t.idle = timer
	return true
}

// close releases the kept leases, as far as a second allows.
func (s *shared) close() {
	var kept []*lease
	s.mu.Lock()
	s.closed = true
	for _, t := range s.keys {
		if t.idle != nil {
			t.idle.Stop()
			t.idle = nil
			kept = append(kept, t.lease)
		}
	}
	s.mu.Unlock()
	began, room := time.Now(), make(chan struct{}, freeMost)
	for _, ls := range kept {
		if room <- struct{}{}; time.Since(began) >= undoTry {
			break
		}
		s.freeing.Go(func() {
			ls.free()
			<-room
		})
	}
	s.freeing.Wait()
}

const freeMost = 64 // leases that close releases at once

func (ls *lease) keptFor() time.Duration {
	s := ls.l.o.Share
	d := min(s.Idle, s.For-time.Since(ls.born))
	if ls.l.o.Renew.Every == 0 { // nobody could use it later
		ls.mu.Lock()
		d = min(d, ls.limit/2-ls.age(time.Now()))
		ls.mu.Unlock()
	}
	return d
}

// young reports whether the lease may be passed on. ls.mu is held.
func (ls *lease) young() bool {
	s := ls.l.o.Share
	return ls.over == nil && ls.sections < s.Sections && time.Since(ls.born) < s.For && ls.limit-ls.age(time.Now()) >= ls.limit/2
}

// refresh renews a lease that isn't fresh: a waiter's is provisional, or as old as its last request. Otherwise it would be passed
// on for less time than the leases of processes that needn't wait, or not at all.
func (ls *lease) refresh(ctx context.Context) {
	ls.mu.Lock()
	fresh := ls.confirmAt == 0
	ls.mu.Unlock()
	if fresh {
		return
	}
	try, done := context.WithTimeout(ctx, ls.left()/2)
	defer done()
	if err := ls.renew(try); err != nil && ctx.Err() == nil && !errors.Is(err, ErrClosed) {
		ls.l.log.Warn("dlock: could not renew a lease that began with less than its TTL", "key", ls.g.Key, "fence", ls.g.Fence, "err", err)
	}
}

func (ls *lease) section(ctx context.Context) *Handle {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if !ls.young() {
		return nil
	}
	ls.holds++
	ls.sections++
	return ls.handle(ctx)
}

// free releases a lease that nobody holds. It takes a second at most, since the lease's context has ended.
func (ls *lease) free() {
	if !ls.retire() {
		return
	}
	_, err := ls.release(ls.ctx) // if the outcome is unknown, it is undone in the background, and err isn't ErrLost
	if errors.Is(err, ErrLost) {
		ls.reportKept(err)
	}
}

// reportKept logs a loss that no Release has returned.
func (ls *lease) reportKept(lost error) {
	ls.l.log.Warn("dlock: a shared lease was lost before its release; its critical sections may have overlapped with another holder's",
		"key", ls.g.Key, "fence", ls.g.Fence, "err", lost)
}
