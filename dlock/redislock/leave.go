package redislock

import (
	"context"
	"fmt"
	"time"

	"github.com/fencelab/fencelab/dlock"
)

// leavers are the owners that leave a key's queue, and give back its lock if it was granted to them. The script for all of
// them is tried until the server serves.
type leavers map[string]*leaver

type leaver struct {
	entry string // in the queue
	sent  bool   // the script is under way
	over  chan struct{}
	err   error // of Release; readable when over is closed
}

const (
	leaveTime    = time.Second // one try's timeout
	leavePause   = 50 * time.Millisecond
	leaveMaxWait = time.Second // between tries
	leaveBatch   = 1000        // owners of one script
	mostLeaving  = 100_000     // of a key; what more there is leaves when it is granted the lock
)

// leave is leaves for one that doesn't keep the Backend from closing. It returns nil if that is closed.
func (in *inbox) leave(key, owner string, ttl time.Duration) *leaver {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.closed {
		return nil
	}
	return in.leaves(key, owner, ttl)
}

// leaves begins to take owner off key's queue, unless that is about to be done. in.mu is held. A closing Backend waits for
// it, as for whoever calls this: a waiter, or who reads for them.
func (in *inbox) leaves(key, owner string, ttl time.Duration) *leaver {
	all := in.leaving[key]
	l := all[owner]
	if l != nil && !l.sent {
		if ttl != 0 {
			l.entry = in.b.entry(ttl) + owner
		}
		return l
	}
	l = &leaver{entry: in.b.entry(ttl) + owner, over: make(chan struct{})}
	switch {
	case all == nil:
		in.leaving[key] = leavers{owner: l}
		in.busy.Go(func() { in.clear(key) })
	case len(all) >= mostLeaving:
		l.err = fmt.Errorf("redislock: %d owners leave the queue of %q already", len(all), key)
		close(l.over)
	default:
		all[owner] = l
	}
	return l
}

// clear takes all that leave key's queue off it. It goes on until they have left, or the Backend is closed.
func (in *inbox) clear(key string) {
	for pause := leavePause; ; {
		in.mu.Lock()
		all := in.leaving[key]
		if len(all) == 0 {
			delete(in.leaving, key)
			in.mu.Unlock()
			return
		}
		batch := make(leavers)
		for owner, l := range all {
			if len(batch) == leaveBatch {
				break
			}
			l.sent = true
			batch[owner] = l
		}
		last := in.closed
		in.mu.Unlock()

		holder, err := in.b.leave(key, batch)
		known := err == nil || answered(err)
		in.mu.Lock()
		for owner, l := range batch {
			if l.sent = false; !known && !last && all[owner] == l {
				continue
			}
			if l.err = err; err == nil && owner != holder {
				l.err = dlock.ErrLost
			}
			close(l.over)
			if all[owner] == l {
				delete(all, owner)
			}
		}
		in.mu.Unlock()
		if known {
			pause = leavePause
		} else if !last {
			_ = in.b.wait(in.ctx, pause)
			pause = min(2*pause, leaveMaxWait)
		}
	}
}

// leave runs the script for a batch and returns the owner whose lock it gave back.
func (b *Backend) leave(key string, batch leavers) (holder string, err error) {
	keys, err := b.names(key)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(context.Background(), leaveTime)
	defer cancel()
	args := append(make([]any, 0, 2+len(batch)), b.floor, b.counted)
	for _, l := range batch {
		args = append(args, l.entry)
	}
	holder, err = leaveScript.Run(ctx, once{b.c}, keys, args...).Text()
	if err != nil {
		err = failed(ctx, err)
	}
	return holder, err
}

// undo takes owner off key's queue and frees its lock, and returns what has come of it.
func (in *inbox) undo(ctx context.Context, key, owner string, ttl time.Duration) error {
	l := in.leave(key, owner, ttl) //nolint:contextcheck // it goes on when ctx has ended
	if l == nil {
		return dlock.ErrClosed
	}
	select {
	case <-l.over:
		return l.err
	case <-ctx.Done():
		return fmt.Errorf("redislock: leaving the queue: %w", context.Cause(ctx))
	}
}
