package pglock

import (
	"context"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/fencelab/fencelab/dlock/internal/wait"
)

func (b *Backend) listenFromNow() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.listens && b.open.Err() == nil {
		b.listens = true
		b.busy.Go(b.listen)
	}
}

const (
	retryPause    = 50 * time.Millisecond // doubles up to retryMaxPause
	retryMaxPause = time.Second
	goodbye       = time.Second // for closing the LISTEN connection
)

// listen wakes waiters until Close: all of them when it starts or stops listening, since notifications are missed in between.
func (b *Backend) listen() {
	patience := b.patience
	for pause := retryPause; b.open.Err() == nil; pause = min(2*pause, retryMaxPause) {
		if b.listenOnce(patience) {
			pause, patience = retryPause, b.patience
		} else {
			patience = min(2*patience, b.recheck) // a slow server must get to reply
		}
		b.waiting.NotifyAll()
		wait.For(b.open, pause)
	}
}

// listenOnce returns when the connection is lost or doesn't reply within patience. It reports whether it listened.
func (b *Backend) listenOnce(patience time.Duration) bool {
	pooled, err := b.pool.Acquire(b.open)
	if err != nil {
		return false
	}
	c := pooled.Hijack() // so that it doesn't count towards MaxConns
	conn := c.PgConn().Conn()
	// Calls end by a read deadline: when a context ends, pgx may ask the server to cancel, and wait for that.
	listening := context.WithoutCancel(b.open)
	end := func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) }
	stop := context.AfterFunc(b.open, end)
	ask := func(sql string) error {
		_ = conn.SetReadDeadline(time.Now().Add(patience)) // for replies and notifications
		if b.open.Err() != nil {                           // it may have replaced Close's
			end()
		}
		_, err := c.Exec(listening, sql)
		return err
	}
	defer func() {
		stop()
		ctx, cancel := context.WithTimeout(listening, goodbye)
		defer cancel()
		_ = c.Close(ctx)
		select { // pgx may be closing it in the background
		case <-c.PgConn().CleanupDone():
		case <-ctx.Done():
		}
	}()
	if ask("LISTEN "+pgx.Identifier{channel}.Sanitize()) != nil {
		return false
	}
	b.waiting.NotifyAll()
	for {
		n, err := c.WaitForNotification(listening)
		switch {
		case err == nil:
			b.waiting.Notify(n.Payload)
		// Behind a NAT, or if the server's host is gone, a dead connection reports no error.
		case !pgconn.Timeout(err), b.open.Err() != nil, ask("SELECT 1") != nil:
			return true
		}
	}
}
