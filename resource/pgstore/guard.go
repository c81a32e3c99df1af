package pgstore

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencelab/fencelab/resource"
)

// Tx is what a guard needs of a transaction: a [pgx.Tx], or [SQL].
type Tx interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
	Rollback(ctx context.Context) error
}

// SQL returns a transaction of database/sql as a [Tx]. Its driver must be pgx's package stdlib, or lib/pq.
func SQL(tx *sql.Tx) Tx { return sqlTx{tx} }

type sqlTx struct{ *sql.Tx }

func (tx sqlTx) QueryRow(ctx context.Context, query string, args ...any) pgx.Row {
	return tx.QueryRowContext(ctx, query, args...)
}

// Rollback returns when ctx ends. If the server doesn't answer, database/sql goes on, and then discards the connection.
func (tx sqlTx) Rollback(ctx context.Context) error {
	done := make(chan error, 1)
	go func() { done <- tx.Tx.Rollback() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// fences is the Store of the package's functions, without a pool.
var fences = &Store{t: tableNamed(pgx.Identifier{defaultTable}.Sanitize())}

// Guard returns a [*resource.StaleTokenError] if resourceID has accepted f or a later fence. Otherwise it raises the fence to f, if
// and only if tx commits. f comes from the lock: resource.NewFence(h.Next()), called once per transaction, not again when it is
// repeated. Guard every resource that tx writes, in a fixed order to avoid deadlocks (SQLSTATE 40P01), and before you read what you
// write back: at READ COMMITTED an earlier read may miss what a holder commits while Guard waits for the row's lock.
//
// Guard waits for a concurrent guard's transaction to end, also if its process is frozen or its host is dead, however short the
// lock's TTL: PostgreSQL keeps a frozen one's transaction without limit, a dead host's until TCP keepalive detects it, by default
// after more than two hours. Set idle_in_transaction_session_timeout, longer than your transactions pause, and
// tcp_keepalives_idle; lock_timeout (55P03) or ctx limits the wait. At REPEATABLE READ and SERIALIZABLE, if that transaction
// commits, Guard returns a serialization failure (40001); at SERIALIZABLE so may any later statement, and the commit. Then repeat
// tx with the same fence.
//
// After an error tx is rolled back (a nested transaction to its savepoint, so guard where you write), and its Commit returns
// [pgx.ErrTxClosed] or [sql.ErrTxDone]. The rollback continues after ctx ends, for at most 5 s.
//
// With synchronous standbys check ctx after Commit: with pgconn.CancelRequestContextWatcherHandler, a commit whose ctx has ended
// may return nil though no standby has it. Treat that as an unknown outcome, as if Commit had failed.
//
// Guard uses the table fencelab_fence, [Store.Guard] the Store's.
func Guard(ctx context.Context, tx Tx, resourceID string, f resource.Fence) error {
	return fences.Guard(ctx, tx, resourceID, f)
}

// GuardOnce is [Guard] for a transaction that you repeat if its commit had no reply; use it for the first attempt too. request,
// at least one byte, identifies the transaction. If it was committed, the repeat with the same fence and request is refused with
// [resource.ErrApplied], unless a later fence was accepted in between. Under another fence only the data can tell, for example an
// invoice's primary key.
//
// The refused transaction is rolled back, so with synchronous standbys [resource.ErrApplied] doesn't say that one of them has the
// first attempt, whose wait may have been cut short. To be sure, commit a transaction with [GuardRead] at the same fence.
func GuardOnce(ctx context.Context, tx Tx, resourceID string, f resource.Fence, request []byte) error {
	return fences.GuardOnce(ctx, tx, resourceID, f, request)
}

// GuardRead raises the fence of resourceID to f, as a fenced read does; f.Seq may be 0. Call it before you read what you write
// back, in tx or later. What tx reads is protected once tx has committed, for which a synchronous standby is waited for even if f
// was accepted before. Otherwise it is like [Guard].
func GuardRead(ctx context.Context, tx Tx, resourceID string, f resource.Fence) error {
	return fences.GuardRead(ctx, tx, resourceID, f)
}

// Guard is the function [Guard] on the Store's table; guards and the Store's calls share a key's fence.
func (s *Store) Guard(ctx context.Context, tx Tx, resourceID string, f resource.Fence) error {
	return s.guard(ctx, tx, resourceID, f, []byte{})
}

// GuardOnce is the function [GuardOnce] on the Store's table.
func (s *Store) GuardOnce(ctx context.Context, tx Tx, resourceID string, f resource.Fence, request []byte) error {
	if len(request) == 0 {
		return ended(ctx, tx, errors.New("the request is empty"))
	}
	return s.guard(ctx, tx, resourceID, f, request)
}

// GuardRead is the function [GuardRead] on the Store's table.
func (s *Store) GuardRead(ctx context.Context, tx Tx, resourceID string, f resource.Fence) error {
	err := cmp.Or(resource.CheckKey(resourceID), resource.CheckToken(f.Token))
	if err == nil {
		_, err = s.t.raise(ctx, tx, resourceID, f, false)
	}
	return ended(ctx, tx, err)
}

func (s *Store) guard(ctx context.Context, tx Tx, resourceID string, f resource.Fence, request []byte) error {
	err := cmp.Or(resource.CheckKey(resourceID), resource.CheckFence(f))
	if err == nil {
		err = s.t.accept(ctx, tx, resourceID, f, nil, request)
	}
	return ended(ctx, tx, err)
}

// rollbackTimeout bounds a rollback. After it the connection is closed, so the server rolls back.
const rollbackTimeout = 5 * time.Second

func ended(ctx context.Context, tx Tx, err error) error {
	if err == nil {
		return nil
	}
	// Not with ctx: if it has ended, pgx sends nothing, and the outer transaction could commit what a nested one wrote.
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	if e := tx.Rollback(end); e != nil && !errors.Is(e, pgx.ErrTxClosed) {
		if tx, ok := tx.(pgx.Tx); ok {
			_ = tx.Conn().Close(end)
		}
	}
	return failed(ctx, err)
}
