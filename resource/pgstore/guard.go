package pgstore

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencelab/fencelab/resource"
)

// fences is the table that the package's functions use.
var fences = tableNamed(pgx.Identifier{defaultTable}.Sanitize())

// Guard makes tx a write at f: it raises the fence of resourceID to f if and only if tx commits, or returns a
// [*resource.StaleTokenError]. Guard every resource that tx writes, in a fixed order to avoid deadlocks (SQLSTATE 40P01), and
// before you read what you write back: at READ COMMITTED an earlier read may miss what a holder commits while Guard waits for
// the row's lock.
//
// Guard waits for a concurrent guard's transaction to end. At REPEATABLE READ and SERIALIZABLE, if that one commits, it returns
// a serialization failure (40001); at SERIALIZABLE so may any later statement, and the commit. Then repeat the transaction with
// the same fence.
//
// A guard that returns an error has rolled tx back: tx.Commit returns [pgx.ErrTxClosed]. A nested transaction is rolled back to
// its savepoint, so guard in the transaction in which you write. The rollback continues after ctx ends, for at most 5 s.
//
// Guard uses the table fencelab_fence, [Store.Guard] the Store's.
func Guard(ctx context.Context, tx pgx.Tx, resourceID string, f resource.Fence) error {
	return fences.guard(ctx, tx, resourceID, f, nil)
}

// GuardOnce is [Guard] for a transaction that you may have to repeat because its commit had no reply. request, at least one
// byte, identifies the transaction, as an idempotency key does. If the first attempt, also with GuardOnce, was committed, the
// repeat with the same fence and request is refused with [resource.ErrApplied], unless a later fence has come in between.
// Under another fence only the data can tell, by an invoice's primary key for example.
func GuardOnce(ctx context.Context, tx pgx.Tx, resourceID string, f resource.Fence, request []byte) error {
	return fences.guardOnce(ctx, tx, resourceID, f, request)
}

// GuardRead is [resource.Store].ReadFenced with tx, before a read of what the holder writes back, in tx or a later transaction.
// What tx reads is protected once tx has committed. The rest is as with [Guard].
func GuardRead(ctx context.Context, tx pgx.Tx, resourceID string, token uint64) error {
	return fences.guardRead(ctx, tx, resourceID, token)
}

// Guard is the function [Guard] on the Store's table. The Store's calls and its guards share the fence of a key.
func (s *Store) Guard(ctx context.Context, tx pgx.Tx, resourceID string, f resource.Fence) error {
	return s.t.guard(ctx, tx, resourceID, f, nil)
}

// GuardOnce is the function [GuardOnce] on the Store's table.
func (s *Store) GuardOnce(ctx context.Context, tx pgx.Tx, resourceID string, f resource.Fence, request []byte) error {
	return s.t.guardOnce(ctx, tx, resourceID, f, request)
}

// GuardRead is the function [GuardRead] on the Store's table.
func (s *Store) GuardRead(ctx context.Context, tx pgx.Tx, resourceID string, token uint64) error {
	return s.t.guardRead(ctx, tx, resourceID, token)
}

func (t table) guard(ctx context.Context, tx pgx.Tx, resourceID string, f resource.Fence, request []byte) error {
	err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(resourceID), resource.CheckFence(f))
	if err == nil {
		err = t.accept(ctx, tx, resourceID, f, nil, orEmpty(request))
	}
	return ended(ctx, tx, err)
}

func (t table) guardOnce(ctx context.Context, tx pgx.Tx, resourceID string, f resource.Fence, request []byte) error {
	if len(request) == 0 {
		return ended(ctx, tx, errors.New("the request is empty"))
	}
	return t.guard(ctx, tx, resourceID, f, request)
}

func (t table) guardRead(ctx context.Context, tx pgx.Tx, resourceID string, token uint64) error {
	err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(resourceID), resource.CheckToken(token))
	if err == nil {
		_, err = t.raise(ctx, tx, resourceID, token, false)
	}
	return ended(ctx, tx, err)
}

// rollbackTimeout bounds a rollback. Then the connection is closed, and the server rolls back.
const rollbackTimeout = 5 * time.Second

// ended rolls tx back if there is an error, which it returns.
func ended(ctx context.Context, tx pgx.Tx, err error) error {
	if err == nil {
		return nil
	}
	// Not with ctx: if it has ended, pgx sends nothing, and the outer transaction could commit what a nested one wrote.
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	if e := tx.Rollback(end); e != nil && !errors.Is(e, pgx.ErrTxClosed) {
		_ = tx.Conn().Close(end)
	}
	return failed(ctx, err)
}
