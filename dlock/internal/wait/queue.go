package wait

import (
	"context"
	"sync"
	"time"
)

// Queues lets one of a Backend's waiters per key poll at a time: all at once they would crowd one another out. The zero value is
// ready for use.
type Queues struct {
	mu  sync.Mutex
	all map[string]*Queue
}

// Queue holds the waiters for one key.
type Queue struct {
	Wake chan struct{} // full when it is time to poll
	// Failing is when polls began to fail, zero if they don't. Only the one that polls may use it. It outlives the poller, or each
	// waiter would sit out an outage, one after the other.
	Failing time.Time

	of   *Queues
	key  string
	turn chan struct{} // full while one polls

	// Guarded by Queues.mu.
	waiters int
	failed  *failure // the next one
}

type failure struct {
	done  chan struct{} // closed when the rest is set
	since time.Time
	err   error
}

// Join waits until the caller may poll for key; the caller must then call Leave. It returns ctx's cause, or the error of another's
// poll if polls have failed, and the caller has waited, for at least the tolerance.
func (qs *Queues) Join(ctx context.Context, key string, tolerance time.Duration) (q *Queue, err error) {
	q, failed := qs.enter(key)
	joined := time.Now()
	for err == nil {
		select {
		case q.turn <- struct{}{}:
			return q, nil
		case <-failed.done:
			if min(time.Since(failed.since), time.Since(joined)) >= tolerance {
				err = failed.err
			}
			failed = q.next()
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
	}
	q.quit()
	return nil, err
}

// Leave lets the next waiter poll.
func (q *Queue) Leave() {
	<-q.turn
	q.quit()
}

// Fail tells the waiters that polls have failed since then, now with err. If each found out by a poll of its own, the last of many
// would give up after as many time limits.
func (q *Queue) Fail(since time.Time, err error) {
	q.of.mu.Lock()
	defer q.of.mu.Unlock()
	q.failed.since, q.failed.err = since, err
	close(q.failed.done)
	q.failed = &failure{done: make(chan struct{})}
}

func (q *Queue) next() *failure {
	q.of.mu.Lock()
	defer q.of.mu.Unlock()
	return q.failed
}

// Notify fills the key's Wake.
func (qs *Queues) Notify(key string) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	if q := qs.all[key]; q != nil {
		q.wake()
	}
}

// NotifyAll fills every key's Wake.
func (qs *Queues) NotifyAll() {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	for _, q := range qs.all {
		q.wake()
	}
}

// Len returns the number of keys with waiters.
func (qs *Queues) Len() int {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	return len(qs.all)
}

func (q *Queue) wake() {
	select {
	case q.Wake <- struct{}{}:
	default: // it polls anyway
	}
}

func (qs *Queues) enter(key string) (*Queue, *failure) {
	qs.mu.Lock()
	defer qs.mu.Unlock()
	q := qs.all[key]
	if q == nil {
		if qs.all == nil {
			qs.all = map[string]*Queue{}
		}
		q = &Queue{
			of: qs, key: key, Wake: make(chan struct{}, 1), turn: make(chan struct{}, 1), failed: &failure{done: make(chan struct{})},
		}
		qs.all[key] = q
	}
	q.waiters++
	return q, q.failed
}

func (q *Queue) quit() {
	q.of.mu.Lock()
	defer q.of.mu.Unlock()
	if q.waiters--; q.waiters == 0 {
		delete(q.of.all, q.key)
	}
}
