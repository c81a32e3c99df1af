// Package pgcall sends single statements to PostgreSQL, and creates a table.
package pgcall

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
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
	if err != nil { // ctx's end alone would look like a silent server
		return fmt.Errorf("get a connection from the pool: %w", err)
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
		err = cmp.Or(err, ctx.Err())
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

const maxName = 63 // bytes of a name

// TableName returns table for use in SQL, the usual one if it is nil.
func TableName(table pgx.Identifier, usual string) (string, error) {
	if table == nil {
		table = pgx.Identifier{usual}
	}
	if n := len(table); n < 1 || n > 2 {
		return "", fmt.Errorf("table %q has %d parts; it must be a name, or a schema and a name", table, n)
	}
	for _, name := range table {
		if name == "" || len(name) > maxName || strings.ContainsRune(name, 0) {
			return "", fmt.Errorf("%q in table %q is not a valid name: 1 to %d bytes without a zero", name, table, maxName)
		}
	}
	return table.Sanitize(), nil
}

// CreateTable creates the table, as schema does under its usual name, unless it exists. It may run concurrently.
func CreateTable(ctx context.Context, pool *pgxpool.Pool, schema, usual, table string) error {
	return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		var there bool // then no CREATE privilege is needed
		if err := tx.QueryRow(ctx, "SELECT to_regclass($1::text) IS NOT NULL", table).Scan(&there); err != nil || there {
			return err
		}
		// CREATE TABLE IF NOT EXISTS fails if another runs at the same time.
		if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock(hashtext($1::text))", usual); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, strings.ReplaceAll(schema, usual, table))
		return err
	})
}
