// Package pgstore is fencing in PostgreSQL 12 or later: [Guard] for your own transactions, and [Store]. A fence is a row of the
// table fencelab_fence, which [CreateSchema] creates, or [Schema] in your migrations. A transaction locks the row, compares, and
// keeps the lock until it ends, so transactions take effect in the order of their fences.
//
// It requires that
//   - every writer uses the guard, and nobody deletes fences;
//   - synchronous_commit is on;
//   - the search_path finds the same table of fences in all sessions. A temporary or unlogged one is refused, but not by Read,
//     Overwrite and SetFence. An unlogged partition is not: `fencelab probe` finds it under the default name. Where others'
//     SQL runs, give [Options].Table a schema and use [Store.Guard];
//   - a promoted standby has every committed transaction: list all that may be promoted in synchronous_standby_names
//     (https://www.postgresql.org/docs/current/warm-standby.html#SYNCHRONOUS-REPLICATION), and stop the old primary first;
//   - nobody cancels a commit that waits for a standby (pg_cancel_backend): PostgreSQL then reports success with a warning only.
//
// pgx cancels one whose ctx ends. A call of Store then fails, even if the server reports success, and its repeat waits for the
// standby again. In your own transactions check ctx after Commit, see [Guard].
//
// A restored backup brings old fences back.
package pgstore

import (
	"cmp"
	"context"
	"database/sql"
	_ "embed"
	"encoding/hex"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelab/fencelab/internal/pgcall"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/internal/calls"
)

// Schema is SQL that creates the table fencelab_fence. It may be run again.
//
//go:embed schema.sql
var Schema string

var (
	//go:embed write.sql
	writeSQL string
	//go:embed raise.sql
	raiseSQL string
	//go:embed read.sql
	readSQL string
	//go:embed overwrite.sql
	overwriteSQL string
	//go:embed set_fence.sql
	setFenceSQL string
)

const defaultTable = "fencelab_fence" // as in the SQL files

// Options configure a [Store].
type Options struct {
	// Table is the table of fences, with or without its schema; fencelab_fence if nil. Without a schema, the search_path decides.
	Table pgx.Identifier
}

func (o *Options) table() (string, error) {
	if o == nil {
		o = &Options{}
	}
	name, err := pgcall.TableName(o.Table, defaultTable)
	if err != nil {
		err = fmt.Errorf("pgstore: %w", err)
	}
	return name, err
}

// CreateSchema creates the table of fences unless it exists. It may be called concurrently.
func CreateSchema(ctx context.Context, pool *pgxpool.Pool, opts *Options) error {
	table, err := opts.table()
	if err != nil {
		return err
	}
	return failed(ctx, pgcall.CreateTable(ctx, pool, Schema, defaultTable, table))
}

// Store is a [resource.Store] on a table of fences that also holds the values. Each call is one statement at the connection's
// default isolation level, retried after a serialization failure.
type Store struct {
	pool  *pgxpool.Pool
	t     table
	calls calls.Calls
}

var (
	_ resource.Overwriter  = (*Store)(nil)
	_ resource.FenceSetter = (*Store)(nil)
)

// New returns a Store on pool, which the caller closes. It sends nothing. The table must exist. opts may be nil.
func New(pool *pgxpool.Pool, opts *Options) (*Store, error) {
	if pool == nil {
		return nil, errors.New("pgstore: pool is nil")
	}
	name, err := opts.table()
	if err != nil {
		return nil, err
	}
	return &Store{pool: pool, t: tableNamed(name)}, nil
}

// maxValue is the largest value in bytes, half of what PostgreSQL can send as hex, as reads do.
const maxValue = 256 << 20

func fits(key string, value []byte) error {
	if len(value) > maxValue {
		return fmt.Errorf("%w: that of %q has %d bytes, at most %d are allowed", resource.ErrTooLarge, key, len(value), maxValue)
	}
	return nil
}

// Write is [resource.Store.Write]. A value has at most 256 MiB.
func (s *Store) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	return s.do(ctx, key, cmp.Or(resource.CheckFence(f), fits(key, value)), func(c *pgxpool.Conn) error {
		return s.t.accept(ctx, c, key, f, orEmpty(value), nil)
	})
}

// Overwrite is [resource.Overwriter.Overwrite].
func (s *Store) Overwrite(ctx context.Context, key string, f resource.Fence, value []byte) error {
	return s.do(ctx, key, cmp.Or(resource.CheckOffered(f), fits(key, value)), func(c *pgxpool.Conn) error {
		_, err := c.Exec(ctx, s.t.overwrite, key, number(f.Token), number(f.Seq), orEmpty(value))
		return err
	})
}

// Read is [resource.Store.Read].
func (s *Store) Read(ctx context.Context, key string) (rec resource.Record, err error) {
	err = s.do(ctx, key, nil, func(c *pgxpool.Conn) (err error) {
		rec, err = scan(c.QueryRow(ctx, s.t.read, key))
		if errors.Is(err, sql.ErrNoRows) {
			return resource.ErrNotFound
		}
		return err
	})
	return rec, err
}

// ReadFenced is [resource.Store.ReadFenced].
func (s *Store) ReadFenced(ctx context.Context, key string, f resource.Fence) (rec resource.Record, err error) {
	err = s.do(ctx, key, resource.CheckToken(f.Token), func(c *pgxpool.Conn) (err error) {
		rec, err = s.t.raise(ctx, c, key, f, true)
		return err
	})
	return rec, err
}

// SetFence is [resource.FenceSetter.SetFence]. In SQL:
//
//	SELECT token, seq FROM fencelab_fence WHERE key = 'acme'
//	UPDATE fencelab_fence SET token = 7, seq = 0 WHERE key = 'acme'
func (s *Store) SetFence(ctx context.Context, key string, token uint64) error {
	return s.do(ctx, key, resource.CheckToken(token), func(c *pgxpool.Conn) error {
		tag, err := c.Exec(ctx, s.t.setFence, key, number(token))
		if err == nil && tag.RowsAffected() == 0 {
			err = resource.ErrNotFound
		}
		return err
	})
}

// Close is [resource.Store.Close]. The pool stays open.
func (s *Store) Close() error {
	s.calls.Close()
	return nil
}

func (s *Store) do(ctx context.Context, key string, invalid error, f func(*pgxpool.Conn) error) error {
	if err := s.calls.Begin(ctx, key, invalid); err != nil {
		return err
	}
	defer s.calls.End()
	sent := false
	err := pgcall.Do(ctx, s.pool, func(c *pgxpool.Conn) error {
		sent = true
		return f(c)
	})
	if ctx.Err() != nil && errors.Is(err, resource.ErrApplied) { // by a call that may still wait for a standby
		err = ctx.Err()
	}
	if sent {
		err = calls.Late(ctx, err)
	}
	return failed(ctx, err)
}

type table struct{ write, raiseTo, read, overwrite, setFence string }

func tableNamed(name string) table {
	literal := "E'" + strings.NewReplacer(`\`, `\\`, "'", "''").Replace(name) + "'"
	on := strings.NewReplacer("'"+defaultTable+"'", literal, defaultTable, name).Replace
	return table{write: on(writeSQL), raiseTo: on(raiseSQL), read: on(readSQL), overwrite: on(overwriteSQL), setFence: on(setFenceSQL)}
}

type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// accept raises key's fence to f, see write.sql. value and request are []byte or untyped nil: lib/pq before 1.11 doesn't send a
// nil []byte as NULL.
func (t table) accept(ctx context.Context, q querier, key string, f resource.Fence, value, request any) error {
	var token, seq *string
	var applied bool
	err := ask(func() error {
		return q.QueryRow(ctx, t.write, key, number(f.Token), number(f.Seq), value, request).Scan(&token, &seq, &applied)
	})
	if err != nil || token == nil {
		return err
	}
	seen, err := resource.ParseFence(*token + "." + *seq)
	if err != nil {
		return err
	}
	return &resource.StaleTokenError{Key: key, Seen: seen, Got: f, Applied: applied}
}

func (t table) raise(ctx context.Context, q querier, key string, f resource.Fence, withValue bool) (rec resource.Record, err error) {
	err = ask(func() (err error) {
		rec, err = scan(q.QueryRow(ctx, t.raiseTo, key, number(f.Token), number(f.Seq), withValue))
		return err
	})
	if err == nil {
		err = rec.CheckRead(key, f)
	}
	if err != nil {
		return resource.Record{}, err
	}
	return rec, nil
}

// ask retries a statement that returns no row: at READ COMMITTED, a concurrent one has committed the same fence since it began,
// or a later one, or first the one and then the other.
func ask(f func() error) error {
	for range 3 {
		if err := f(); !errors.Is(err, sql.ErrNoRows) { // pgx.ErrNoRows wraps it
			return err
		}
	}
	return errors.New("the fence was neither raised nor refused: the table of fences is unlogged, or a temporary one shadows it (give it " +
		"its schema, in Options.Table), a trigger or a rule interferes, or the row was deleted meanwhile")
}

func scan(row pgx.Row) (rec resource.Record, err error) {
	var token, seq string
	var value *string
	if err = row.Scan(&token, &seq, &value); err == nil {
		rec.MaxFence, err = resource.ParseFence(token + "." + seq)
	}
	if err == nil && value != nil {
		rec.Value, err = hex.DecodeString(*value)
	}
	return rec, err
}

func number(n uint64) string { return strconv.FormatUint(n, 10) }

func orEmpty(value []byte) []byte {
	if value == nil {
		return []byte{}
	}
	return value
}

func failed(ctx context.Context, err error) error {
	if pgcall.Code(err) == "42P01" {
		err = fmt.Errorf("the table of fences is missing; create it with pgstore.CreateSchema, or the default one with resource/pgstore/schema.sql: %w", err)
	}
	if pgcall.Code(err) == "53100" { // disk full
		err = fmt.Errorf("%w: %w", resource.ErrNoRoom, err)
	}
	return calls.Wrap(ctx, "pgstore", err)
}
