// Package pgcall runs the calls of stores on PostgreSQL.
package pgcall

import (
	"context"
	"errors"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelab/fencelab/resource"
)

const (
	serializationFailure = "40001" // rolled back because of a concurrent transaction
	readOnly             = "25006"
	cancelled            = "57014"
)

// Do calls f, which sends one statement, and repeats it after serialization failures, each of which means that another
// transaction has committed. Once ctx has ended, a success counts as ctx's error: pgx may have asked the server to cancel, which
// ends a commit's wait for a standby.
func Do(ctx context.Context, pool *pgxpool.Pool, f func(*pgxpool.Conn) error) error {
	c, err := pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer c.Release()
	for {
		if err = f(c); Code(err) != serializationFailure {
			break
		}
	}
	switch {
	case Code(err) == readOnly: // now a standby; its name may resolve to the new primary
		pool.Reset()
	case ctx.Err() != nil && Code(err) != cancelled: // a late cancel request would hit the next statement
		_ = c.Conn().Close(context.WithoutCancel(ctx)) // doesn't wait for the server
		if err == nil || errors.Is(err, resource.ErrApplied) {
			err = ctx.Err()
		}
	}
	return err
}

// Code returns the SQLSTATE of err, if it has one.
func Code(err error) string {
	if e, ok := errors.AsType[interface { // of pgx and lib/pq
		error
		SQLState() string
	}](err); ok {
		return e.SQLState()
	}
	return ""
}
