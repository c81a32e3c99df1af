package pgstore

import (
	"cmp"
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/fencelab/fencelab/resource"
)

// fences is the table of the package's functions.
var fences = tableNamed(pgx.Identifier{defaultTable}.Sanitize())

// Guard makes tx a write at f: the fence of resourceID is raised to f if and only if tx commits. It returns a
// [*resource.StaleTokenError] if f is not greater than every fence accepted. Others who guard the resource wait until tx
// ends. A transaction that writes more than one resource guards each.
//
// A guard that returns an error has rolled tx back, so that a caller who overlooks it can't commit: tx.Commit returns
// [pgx.ErrTxClosed]. If tx is a nested transaction, that is rolled back to its savepoint; guard in the one that you write in.
// The rollback doesn't end with ctx, but after 5 s at most.
//
// Guard uses the table fencelab_fence; [Store.Guard] uses the Store's.
func Guard(ctx context.Context, tx pgx.Tx, resourceID string, f resource.Fence) error {
	return fences.guard(ctx, tx, resourceID, f, nil)
}

// GuardOnce is [Guard] for a transaction that may be repeated because its commit had no answer. The request says what the
// transaction is about, an idempotency key for example: a repeat with the same fence and the same request, after it was
// committed, is refused with an error that matches [resource.ErrApplied], unless a later fence has come in between. The
// fence alone doesn't tell: a lock service that has lost data may hand out a token twice. A request has at least one byte.
func GuardOnce(ctx context.Context, tx pgx.Tx, resourceID string, f resource.Fence, request []byte) error {
	return fences.guardOnce(ctx, tx, resourceID, f, request)
}

// GuardRead is a new holder's first touch, before it reads what it will write back, be it in this transaction or in a
// later one: it raises the fence of resourceID to (token, 0) with tx, so that a write of an earlier grant that comes later
// is refused. It returns a [*resource.StaleTokenError] if a later grant has touched the resource, and changes nothing if
// its own has. The rest is as with [Guard].
//
// What tx reads counts from the moment at which it has committed.
func GuardRead(ctx context.Context, tx pgx.Tx, resourceID string, token uint64) error {
	return fences.guardRead(ctx, tx, resourceID, token)
}

// Guard is the function [Guard] on the Store's table. Store and guards share the fence of a key.
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

// rollbackTimeout is how long a rollback may take; after it the connection is closed, and the server rolls back.
const rollbackTimeout = 5 * time.Second

// ended rolls tx back if there is an error, which it returns.
func ended(ctx context.Context, tx pgx.Tx, err error) error {
	if err == nil {
		return nil
	}
	// Not with ctx: if that has ended, pgx sends nothing, and a nested transaction would be over without going back to its
	// savepoint, with the outer one left to commit what it wrote. If the rollback fails, nothing may be committed either.
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), rollbackTimeout)
	defer cancel()
	if e := tx.Rollback(end); e != nil && !errors.Is(e, pgx.ErrTxClosed) {
		_ = tx.Conn().Close(end)
	}
	return failed(ctx, err)
}
