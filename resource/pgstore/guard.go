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

// Guard makes tx a write at f: it raises the fence of resourceID to f if and only if tx commits. It returns a
// [*resource.StaleTokenError] if f is not greater than every fence accepted. Guard each resource that the transaction writes,
// in a fixed order, because two guards in different orders may deadlock (SQLSTATE 40P01).
//
// Guard, or GuardRead, before you read what you write back. At READ COMMITTED a read before the guard may miss what an
// earlier holder commits while the guard waits for the row's lock, and the write then loses it. After the guard, no
// transaction with an earlier fence can commit.
//
// A guard that meets another one's waits for the end of that transaction. Then it accepts or refuses at READ COMMITTED. At
// REPEATABLE READ and SERIALIZABLE, if the other one has committed, it fails with a serialization failure (40001), whatever
// the fences are, because the snapshot is too old; at SERIALIZABLE so may any later statement, and the commit. Nothing of the
// transaction has taken effect then. Repeat all of it with the same fence: a stale one is refused. [Store] does that by
// itself.
//
// A guard that returns an error has rolled tx back, so that a caller who ignores the error can't commit: tx.Commit returns
// [pgx.ErrTxClosed]. A nested transaction is rolled back to its savepoint, so guard in the transaction in which you write.
// The rollback continues after ctx ends, for at most 5 s.
//
// Guard uses the table fencelab_fence. [Store.Guard] uses the Store's.
func Guard(ctx context.Context, tx pgx.Tx, resourceID string, f resource.Fence) error {
	return fences.guard(ctx, tx, resourceID, f, nil)
}

// GuardOnce is [Guard] for a transaction that you may want to repeat because its commit had no reply. request identifies the
// transaction, by an idempotency key for example, and has at least one byte: the fence is not enough, because a lock service
// that has lost data may grant a token twice. Use it for the first attempt too. If the transaction was committed, the repeat
// with the same fence and request is refused with an error that matches [resource.ErrApplied], unless a later fence has come
// in between.
//
// Under another fence, of the same grant or a later one, no guard recognises the transaction. Then only the data can tell,
// by the primary key of an invoice for example.
func GuardOnce(ctx context.Context, tx pgx.Tx, resourceID string, f resource.Fence, request []byte) error {
	return fences.guardOnce(ctx, tx, resourceID, f, request)
}

// GuardRead is what a new holder calls before it reads what it will write back, in this transaction or a later one. It
// raises the fence of resourceID to (token, 0) with tx, so that a later write of an earlier grant is refused. It returns a
// [*resource.StaleTokenError] if a later grant has touched the resource, and leaves the fence alone if its own grant has.
// What tx reads is protected once tx has committed. The rest is as with [Guard].
func GuardRead(ctx context.Context, tx pgx.Tx, resourceID string, token uint64) error {
	return fences.guardRead(ctx, tx, resourceID, token)
}

// Guard is the function [Guard] on the Store's table. The Store and its guards share the fence of a key.
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

// rollbackTimeout bounds a rollback. After it the connection is closed, and the server rolls back.
const rollbackTimeout = 5 * time.Second

// ended rolls tx back if there is an error, which it returns.
func ended(ctx context.Context, tx pgx.Tx, err error) error {
	if err == nil {
		return nil
	}
	// Not with ctx: once it has ended, pgx sends nothing, and the outer transaction could commit what a nested one wrote.
	// After a failed rollback nothing may be committed either.
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	if e := tx.Rollback(end); e != nil && !errors.Is(e, pgx.ErrTxClosed) {
		_ = tx.Conn().Close(end)
	}
	return failed(ctx, err)
}
