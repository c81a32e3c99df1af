package pglock

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencelab/fencelab/dlock/internal/wait"
)

// queue is where the calls of Acquire wait that want one key.
type queue struct {
	n    int           // how many there are; Backend.mu guards it
	turn chan struct{} // whoever has put something in is the one that asks the database
	wake chan struct{} // something has happened: ask again
}

// join enters key's queue, and starts to listen if that is the first wait.
func (b *Backend) join(key string) *queue {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.listens && b.open.Err() == nil {
		b.listens = true
		b.busy.Go(b.listen)
	}
	q := b.waiting[key]
	if q == nil {
		q = &queue{turn: make(chan struct{}, 1), wake: make(chan struct{}, 1)}
		b.waiting[key] = q
	}
	q.n++
	return q
}

func (b *Backend) leave(key string, q *queue) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if q.n--; q.n == 0 {
		delete(b.waiting, key)
	}
}

// woken has the waiters for key ask again.
func (b *Backend) woken(key string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if q := b.waiting[key]; q != nil {
		q.poke()
	}
}

// allWoken has the waiters for all keys ask again.
func (b *Backend) allWoken() {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, q := range b.waiting {
		q.poke()
	}
}

func (q *queue) poke() {
	select {
	case q.wake <- struct{}{}:
	default: // it will ask anyhow
	}
}

const (
	listenPause    = 50 * time.Millisecond // before the second try to get a connection; doubles with each
	listenMaxPause = time.Second
	goodbye        = time.Second // how long a connection that is of no more use may take to end
)

// listen wakes waiters until the Backend is closed. Whatever was notified while nobody listened is made up for by waking
// all: when the connection stands, and when it cannot be had, so that they learn from their own requests how things are.
func (b *Backend) listen() {
	for pause := listenPause; b.open.Err() == nil; pause = min(2*pause, listenMaxPause) {
		if b.listenOnce() {
			pause = listenPause
		}
		b.allWoken()
		wait.For(b.open, pause)
	}
}

// listenOnce listens until the connection is lost. It reports whether there was one.
func (b *Backend) listenOnce() bool {
	pooled, err := b.pool.Acquire(b.open)
	if err != nil {
		return false
	}
	c := pooled.Hijack() // it isn't coming back, and must not take the place of one that does
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(b.open), goodbye)
		defer cancel()
		_ = c.Close(ctx)
		select { // pgx may be closing it in the background
		case <-c.PgConn().CleanupDone():
		case <-ctx.Done():
		}
	}()
	if _, err := c.Exec(b.open, "LISTEN "+pgx.Identifier{channel}.Sanitize()); err != nil {
		return false
	}
	b.allWoken()
	for {
		n, err := c.WaitForNotification(b.open)
		if err != nil {
			return true
		}
		b.woken(n.Payload)
	}
}
