// Package pglock is a dlock.Backend on PostgreSQL 12 or later: one row per lock.
//
// A row holds the owner, the end of its lease by the database's clock, and a counter, the fencing token. A release keeps the row.
// Delete it only together with the key's resource, which would refuse tokens from a counter that restarts at 1.
//
// Waiters are woken by a NOTIFY in the release, or by a timer when the lease ends. A Backend has one LISTEN connection, tested
// every 5 s, and one waiter per key polls. PostgreSQL serialises commits that notify, across the whole server: at 1 ms per
// commit, all locks together allow 1000 releases a second.
//
// # Token durability
//
// The token is as durable as its transaction. With synchronous_commit = off, after a failover to a lagging asynchronous replica,
// or after a restore from a backup, the last tokens are issued again: keep synchronous_commit on, and list replicas that may be
// promoted in synchronous_standby_names. If pg_cancel_backend cancels a commit that waits for a standby, PostgreSQL reports
// success with a warning, and a failover forgets the token.
//
// Leases run on the database host's wall clock. Setting it forward ends leases early, which costs exclusion but no safety at a
// resource that checks tokens. Setting it back, or promoting a replica whose clock is behind, prolongs them.
//
// # The connection pool
//
// Behind a proxy that pools by transaction no notification arrives: a waiter polls when the holder's lease ends, and once a
// minute. Unless the database's encoding is UTF8, all clients need the same client_encoding, or one key may have two rows. All
// sessions must find the same table: one with a temporary table of that name would get locks that others hold. Where that can
// happen, set the schema in Options.Table. The table must not be unlogged: a crash empties it.
//
// By default pgx closes a connection whose context ends before the reply, and the statement may still run. The undo waits for one
// that is running or being committed. One that begins later, for example in a frozen server process, takes the lock and blocks
// others until that lease ends. With pgconn.CancelRequestContextWatcherHandler as the pool's BuildContextWatcherHandler, pgx asks
// the server to cancel, waits at most DeadlineDelay, and keeps the connection if the statement was cancelled. The polling waiter
// likewise cancels a request after 5 s without a reply, and retries on another connection.
//
// # Outages
//
// A waiter retries for a TTL or 15 s, whichever is longer, while the server doesn't reply, breaks or refuses connections, or is
// read-only. Other calls return the error at once.
package pglock

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/wait"
	"github.com/fencelab/fencelab/internal/jitter"
	"github.com/fencelab/fencelab/internal/pgcall"
)

// Schema is the SQL that creates the table of locks, under its default name, fencelab_lock. It may be run again.
//
//go:embed schema.sql
var Schema string

var (
	//go:embed acquire.sql
	acquireSQL string
	//go:embed renew.sql
	renewSQL string
	//go:embed release.sql
	releaseSQL string
	//go:embed undo.sql
	undoSQL string
)

const (
	defaultTable = "fencelab_lock"
	// channel is shared by all tables, since a table's name has several spellings. The payload is the key.
	channel = "fencelab_released"
	// recheck limits the wait for a lease's end: the database's clock may be set, and timers stop while a machine is suspended.
	recheck = time.Minute
	// patience is how long a polling waiter waits for a reply before it retries; it doubles each time, up to recheck. The LISTEN
	// connection is tested as often.
	patience = 5 * time.Second
)

var errSilent = errors.New("no answer in time")

// Options configure a [Backend].
type Options struct {
	// Table is the table of locks: a name, or a schema and a name. Default: fencelab_lock, found by the search_path.
	Table pgx.Identifier
}

func (o *Options) table() (string, error) {
	if o == nil {
		o = &Options{}
	}
	name, err := pgcall.TableName(o.Table, defaultTable)
	if err != nil {
		err = fmt.Errorf("%w: pglock: %w", dlock.ErrInvalid, err)
	}
	return name, err
}

// CreateSchema creates the table of locks unless it exists. It may run concurrently.
func CreateSchema(ctx context.Context, pool *pgxpool.Pool, opts *Options) error {
	table, err := opts.table()
	if err != nil {
		return err
	}
	return failed(ctx, pgcall.CreateTable(ctx, pool, Schema, defaultTable, table))
}

// Backend implements dlock.Backend.
type Backend struct {
	pool                          *pgxpool.Pool
	acquire, renew, release, undo string
	patience, recheck             time.Duration

	open  context.Context
	close context.CancelFunc

	mu      sync.Mutex
	busy    sync.WaitGroup
	listens bool
	waiting wait.Queues
}

var _ dlock.Backend = (*Backend)(nil)

// New returns a Backend on pool, which stays the caller's to close. It sends nothing: the table must exist, see [Schema] and
// [CreateSchema]. From its first wait until Close, the Backend has one connection beyond the pool's MaxConns.
func New(pool *pgxpool.Pool, opts *Options) (*Backend, error) {
	if pool == nil {
		return nil, fmt.Errorf("%w: pglock: pool is nil", dlock.ErrInvalid)
	}
	if pool.Config().ConnConfig.OnNotification != nil {
		return nil, fmt.Errorf("%w: pglock: the pool's OnNotification intercepts the notifications that waiters need", dlock.ErrInvalid)
	}
	table, err := opts.table()
	if err != nil {
		return nil, err
	}
	on := func(sql string) string { return strings.ReplaceAll(sql, defaultTable, table) }
	b := &Backend{
		pool: pool, acquire: on(acquireSQL), renew: on(renewSQL), release: on(releaseSQL), undo: on(undoSQL),

		patience: patience, recheck: recheck,
	}
	b.open, b.close = context.WithCancel(context.Background())
	return b, nil
}

// Acquire implements dlock.Backend.
func (b *Backend) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	g, _, err := b.try(ctx, r)
	switch {
	case !errors.Is(err, dlock.ErrHeld):
		return g, err
	case ctx.Err() != nil: // its cause may be another lock's ErrHeld
		return g, gaveUp(ctx)
	}
	r.NoteHeld()
	b.listenFromNow()
	waits, end := wait.Both(ctx, b.open)
	q, err := b.waiting.Join(waits, r.Key, b.tolerance(r))
	end()
	switch {
	case err == nil:
		defer q.Leave()
	case ctx.Err() != nil:
		return g, gaveUp(ctx)
	case b.open.Err() != nil:
		return g, dlock.ErrClosed
	default:
		return g, err
	}
	for {
		// Join first, or a release may be missed.
		g, left, err := b.poll(ctx, q, r)
		if !errors.Is(err, dlock.ErrHeld) {
			return g, err
		}
		if err := b.wait(ctx, q, min(left, b.recheck)); err != nil {
			return g, err
		}
	}
}

// poll retries try on other connections; a repeated request is the same acquisition. It gives up after a TTL or 15 s, whichever
// is longer, without a reply or with failures only.
func (b *Backend) poll(ctx context.Context, q *wait.Queue, r dlock.Request) (dlock.Grant, time.Duration, error) {
	began := time.Now()
	for d, pause := b.patience, retryPause; ; pause = min(2*pause, retryMaxPause) {
		once, cancel := context.WithTimeoutCause(ctx, d, errSilent)
		g, left, err := b.try(once, r)
		cancel()
		since := began
		switch {
		case err != nil && ctx.Err() != nil:
			return g, 0, gaveUp(ctx)
		case err == nil, errors.Is(err, dlock.ErrHeld):
			q.Failing = time.Time{}
			return g, left, err
		case errors.Is(err, errSilent):
			d = min(2*d, b.recheck) // a slow server must get to reply
		case passes(err):
			q.Failing = cmp.Or(q.Failing, time.Now())
			since = q.Failing
		default:
			return g, 0, err
		}
		if q.Fail(since, err); time.Since(since) >= b.tolerance(r) {
			return g, 0, err
		}
		if err := b.wait(ctx, q, pause/2+jitter.N(pause/2)); err != nil {
			return g, 0, err
		}
	}
}

// tolerance is how long a waiter retries.
func (b *Backend) tolerance(r dlock.Request) time.Duration { return max(r.TTL, 3*b.patience) }

func (b *Backend) wait(ctx context.Context, q *wait.Queue, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-q.Wake:
		return nil
	case <-ctx.Done():
		return gaveUp(ctx)
	case <-b.open.Done():
		return dlock.ErrClosed
	}
}

// TryAcquire implements dlock.Backend.
func (b *Backend) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	g, _, err := b.try(ctx, r)
	return g, err
}

// try polls once. With dlock.ErrHeld it returns the rest of the holder's lease, 0 if unknown.
func (b *Backend) try(ctx context.Context, r dlock.Request) (g dlock.Grant, left time.Duration, err error) {
	if err := b.check(r.TTL); err != nil {
		return g, 0, err
	}
	// A later grant would have expired, and a frozen server may never reply.
	ctx, cancel := context.WithTimeoutCause(ctx, max(r.TTL, 3*b.patience), errSilent)
	defer cancel()
	var fence, micros *int64
	var start time.Time
	err = b.do(ctx, func(c *pgxpool.Conn) error {
		fence, micros = nil, nil
		start = time.Now() // before the request leaves
		err := c.QueryRow(ctx, b.acquire, r.Key, r.Owner, r.TTL).Scan(&fence, &micros)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil
		}
		return err
	})
	switch {
	case err != nil:
		return g, 0, err
	case fence != nil:
		return dlock.Grant{Key: r.Key, Owner: r.Owner, Fence: uint64(*fence), TTL: r.TTL, Start: start}, 0, nil
	case micros != nil:
		left = time.Duration(*micros) * time.Microsecond
	}
	return g, left, dlock.ErrHeld
}

// Renew implements dlock.Backend.
func (b *Backend) Renew(ctx context.Context, g dlock.Grant) error {
	if err := b.check(g.TTL); err != nil {
		return err
	}
	return b.update(ctx, b.renew, g.Key, g.Owner, g.TTL)
}

// Release implements dlock.Backend.
func (b *Backend) Release(ctx context.Context, g dlock.Grant) error {
	if b.open.Err() != nil {
		return dlock.ErrClosed
	}
	sql := b.release
	if g.Fence == 0 { // the grant never arrived, and may not have been made yet
		sql = b.undo
	}
	return b.update(ctx, sql, g.Key, g.Owner)
}

func (b *Backend) update(ctx context.Context, sql string, args ...any) error {
	var tag pgconn.CommandTag
	err := b.do(ctx, func(c *pgxpool.Conn) (err error) {
		tag, err = c.Exec(ctx, sql, args...)
		return err
	})
	if err == nil && tag.RowsAffected() == 0 {
		return dlock.ErrLost
	}
	return err
}

func (b *Backend) check(ttl time.Duration) error {
	// Rounding would make the database's lease differ from the holder's.
	if ttl <= 0 || ttl%time.Microsecond != 0 {
		return fmt.Errorf("%w: pglock: TTL %v is not a whole number of microseconds, the unit of PostgreSQL; at least 1µs",
			dlock.ErrInvalid, ttl)
	}
	if b.open.Err() != nil {
		return dlock.ErrClosed
	}
	return nil
}

func (b *Backend) do(ctx context.Context, f func(*pgxpool.Conn) error) error {
	return failed(ctx, pgcall.Do(ctx, b.pool, f))
}

// Close implements dlock.Backend. Waiting calls of Acquire return dlock.ErrClosed. The pool stays open.
func (b *Backend) Close() error {
	b.mu.Lock()
	b.close()
	b.mu.Unlock()
	b.busy.Wait()
	return nil
}

func gaveUp(ctx context.Context) error { return fmt.Errorf("pglock: waiting: %w", context.Cause(ctx)) }

func failed(ctx context.Context, err error) error {
	switch pgcall.Code(err) {
	case "42P01":
		err = fmt.Errorf("the table of locks is missing; create it with pglock.CreateSchema, or the default one with dlock/pglock/schema.sql: %w", err)
	case "22P05", "22021":
		err = fmt.Errorf("%w: the key cannot be written in the database's encoding: %w", dlock.ErrInvalid, err)
	}
	return wait.Failed(ctx, "pglock", err)
}

// passes reports whether err may be temporary: the server restarts, isn't the primary, or has no free connection.
func passes(err error) bool {
	switch c := pgcall.Code(err); c {
	case "":
	case "57P01", "57P02", "57P03", "57P05", "53300", "25006":
		return true
	default:
		return strings.HasPrefix(c, "08")
	}
	_, dialled := errors.AsType[*pgconn.ConnectError](err)
	_, network := errors.AsType[net.Error](err)
	return dialled || network || errors.Is(err, io.ErrUnexpectedEOF) || pgconn.SafeToRetry(err)
}
