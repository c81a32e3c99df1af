package cas

import (
	"context"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelab/fencelab/internal/pgcall"
	"github.com/fencelab/fencelab/resource/internal/calls"
)

// Schema is the SQL that creates the table of a [Postgres]. It may be run again.
//
//go:embed schema.sql
var Schema string

// Postgres is a [Store] in the PostgreSQL table fencelab_cas, at any isolation level.
type Postgres struct {
	// Pool is closed by the caller.
	Pool *pgxpool.Pool
}

var _ Store = Postgres{}

// Get is [Store.Get].
func (p Postgres) Get(ctx context.Context, key string) (value []byte, version int64, err error) {
	if err := check(key, 0); err != nil {
		return nil, 0, err
	}
	var text string // bytea's would depend on the session's bytea_output
	err = pgcall.Do(ctx, p.Pool, func(c *pgxpool.Conn) error {
		return c.QueryRow(ctx, "SELECT encode(value, 'hex'), version FROM fencelab_cas WHERE key = $1", key).Scan(&text, &version)
	})
	if errors.Is(err, pgx.ErrNoRows) {
		return nil, 0, nil
	}
	if err == nil {
		value, err = hex.DecodeString(text)
	}
	return value, version, err
}

const maxValue = 256 << 20 // bytes, half of what PostgreSQL can send as hex, as Get does

// Swap is [Store.Swap]. A value has at most 256 MiB.
func (p Postgres) Swap(ctx context.Context, key string, version int64, value []byte) error {
	if err := check(key, version); err != nil {
		return err
	}
	if len(value) > maxValue {
		return fmt.Errorf("cas: the value of %q has %d bytes, at most %d are allowed", key, len(value), maxValue)
	}
	if value == nil {
		value = []byte{}
	}
	// PostgreSQL evaluates the WHERE on the newest version of the row, once it has locked it.
	sql, args := "UPDATE fencelab_cas SET version = version + 1, value = $2 WHERE key = $1 AND version = $3", []any{key, value, version}
	if version == 0 {
		sql, args = "INSERT INTO fencelab_cas (key, version, value) VALUES ($1, 1, $2) ON CONFLICT DO NOTHING", args[:2]
	}
	return calls.Late(ctx, pgcall.Do(ctx, p.Pool, func(c *pgxpool.Conn) error {
		done, err := c.Exec(ctx, sql, args...)
		if err == nil && done.RowsAffected() == 0 {
			err = ErrConflict
		}
		return err
	}))
}
