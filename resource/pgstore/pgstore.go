// Package pgstore is fencing in PostgreSQL 12 or later: a guard for transactions of your own, and a [resource.Store].
//
// A service that owns its tables calls [Guard] at the beginning of the transaction in which it writes:
//
//	err := pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
//		if err := pgstore.Guard(ctx, tx, "account/acme", resource.Fence{Token: token, Seq: 1}); err != nil {
//			return err
//		}
//		_, err := tx.Exec(ctx, "UPDATE account SET balance = $1 WHERE name = 'acme'", balance)
//		return err
//	})
//
// The guard is one conditional upsert of the resource's row in the table of fences. Its check is the upsert's WHERE, which
// PostgreSQL evaluates once it holds the row's lock, on the newest version of the row; the lock lasts until the
// transaction ends. So transactions on one resource take effect one after another, in the order of their fences, and a
// fence is raised exactly if the transaction commits.
//
// # Guard first
//
// Guard, or GuardRead, before you read what you write back. At READ COMMITTED every statement sees what has been
// committed before it: a read before the guard may miss what an earlier holder commits until the guard has the row's
// lock, and the write then loses it. After the guard nobody with an earlier fence can commit any more.
//
// # Isolation levels
//
// READ COMMITTED: a guard that meets another transaction's waits for its end, and then accepts or refuses.
//
// REPEATABLE READ: the same, but if the other has committed, the guard fails with a serialization failure (SQLSTATE
// 40001) whatever the fences are, because the transaction reads from a snapshot that is too old. For the same reason a
// read before the guard is harmless.
//
// SERIALIZABLE: the same, and any later statement may fail in this way, COMMIT too.
//
// A serialization failure means that nothing of the transaction has taken effect, the fence included. Repeat all of it,
// reads and computation too, with the same fence: a stale one is refused then. A guard can't do that for you, for it
// doesn't know what else the transaction holds. [Store], whose calls are transactions of one statement, does.
//
// Two transactions that guard the same two resources in different orders may deadlock (40P01); guard in a fixed order.
//
// # A commit without an answer
//
// may have taken effect or not. Begin a transaction that you may want to repeat with [GuardOnce], the first time too, and repeat
// it with the same fence and the same request: it is refused with [resource.ErrApplied] if it has. After Guard nobody can tell
// whose the fence is. Under a new fence, of the same grant or a later one, no guard knows the transaction again: then only the
// data can tell, by the primary key of an invoice for example.
//
// # What it rests on
//
// Every writer must use the guard: a write without one is not fenced. [Guard]'s table is found by the search_path, and a
// temporary table of its name comes before it: where a transaction runs SQL of others, give [Options].Table its schema, and use
// [Store.Guard]. Rows of the table of fences must stay: a resource
// whose row is deleted accepts any fence. Business rows in another database than the fences are not guarded. A fence is as
// durable as the transaction that raised it: keep synchronous_commit on. A restore from a backup brings old fences back.
//
// # To see and to set a fence
//
// After a token that was wrong has locked a key, stop its holders, and set its fence back. [Store.SetFence] does it, or
//
//	SELECT token, seq FROM fencelab_fence WHERE key = 'acme'
//	UPDATE fencelab_fence SET token = 7, seq = 0 WHERE key = 'acme'
//
// # Failover
//
// A server that is killed and started again forgets nothing that it has committed; a transaction between its guard and its
// commit is undone whole, the fence too. A standby that is promoted knows what it had received. One that replicates
// asynchronously may lack the last transactions: their fences are forgotten together with what was written under them, and
// a holder from before could write again. So list those standbys that may be promoted in synchronous_standby_names, have
// more than one of them, since commits wait for a standby that is gone, and promote no other. Committed is then what a
// standby has on disk (https://www.postgresql.org/docs/current/warm-standby.html#SYNCHRONOUS-REPLICATION).
//
// The old primary must be stopped, or cut off from its clients, before the new one is promoted. If it goes on it has fences
// of its own, and accepts under them what the new one knows nothing of. With a synchronous standby that has left it, its
// commits wait without an end, but a wait that is cancelled or interrupted leaves the transaction committed there.
//
// A commit that a failover has cut short is one without an answer, see above; the repeat goes to the new primary.
package pgstore

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelab/fencelab/resource"
)

// Schema is the statement that makes the table of fences, under its default name, fencelab_fence. It may be run again.
//
//go:embed schema.sql
var Schema string

// AuditSchema is what makes a table fencelab_audit and a trigger that adds a line to it for every fence accepted, in the same
// transaction: it commits or is undone with it. Run it after [Schema], if you want it; it may be run again. It is for
// PostgreSQL 14 or later.
//
//go:embed audit.sql
var AuditSchema string

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

const (
	// defaultTable is the table's name in the files of SQL.
	defaultTable = "fencelab_fence"
	// maxName is how long a name may be in PostgreSQL, in bytes.
	maxName = 63
	// serializationFailure is the SQLSTATE of a transaction that was undone because of a concurrent one.
	serializationFailure = "40001"
)

// Options configure a [Store].
type Options struct {
	// Table is the name of the table of fences, with its schema if it has two parts. Default: fencelab_fence, as found by
	// the connection's search_path.
	Table pgx.Identifier
}

// table returns the table's name, quoted.
func (o *Options) table() (string, error) {
	if o == nil || o.Table == nil {
		return pgx.Identifier{defaultTable}.Sanitize(), nil
	}
	if n := len(o.Table); n < 1 || n > 2 {
		return "", fmt.Errorf("pgstore: table %q has %d parts; it is a name, or a schema and a name", o.Table, n)
	}
	for _, name := range o.Table {
		if name == "" || len(name) > maxName || strings.ContainsRune(name, 0) {
			return "", fmt.Errorf("pgstore: %q in table %q is no name: 1 to %d bytes without a zero", name, o.Table, maxName)
		}
	}
	return o.Table.Sanitize(), nil
}

// CreateSchema makes the table of fences unless it exists. Any number of processes may do so at once.
func CreateSchema(ctx context.Context, pool *pgxpool.Pool, opts *Options) error {
	table, err := opts.table()
	if err != nil {
		return err
	}
	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// CREATE TABLE IF NOT EXISTS fails when another does the same at this moment.
		if _, err := tx.Exec(ctx, "SELECT pg_advisory_xact_lock(hashtext($1::text))", defaultTable); err != nil {
			return err
		}
		_, err := tx.Exec(ctx, strings.ReplaceAll(Schema, defaultTable, table))
		return err
	})
	return failed(ctx, err)
}

// Store is a [resource.Store] on a table of fences, which holds the values, too. Its methods may be called concurrently.
//
// Each call is one statement, in a transaction of its own at the connection's default isolation level, and is repeated
// if PostgreSQL undoes it with a serialization failure.
type Store struct {
	pool *pgxpool.Pool
	t    table

	mu     sync.Mutex
	closed bool
	calls  sync.WaitGroup // calls in flight
}

var (
	_ resource.Overwriter  = (*Store)(nil)
	_ resource.FenceSetter = (*Store)(nil)
)

// New returns a Store on pool, which stays the caller's to close. It sends nothing: the table must exist, see [Schema] and
// [CreateSchema]. A nil opts is the zero Options.
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

// Write is [resource.Store.Write].
func (s *Store) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckFence(f)); err != nil {
		return err
	}
	return s.do(ctx, func() error { return s.t.accept(ctx, s.pool, key, f, orEmpty(value), nil) })
}

// Overwrite is [resource.Overwriter.Overwrite].
func (s *Store) Overwrite(ctx context.Context, key string, f resource.Fence, value []byte) error {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckOffered(f)); err != nil {
		return err
	}
	return s.do(ctx, func() error {
		_, err := s.pool.Exec(ctx, s.t.overwrite, key, number(f.Token), number(f.Seq), orEmpty(value))
		return err
	})
}

// Read is [resource.Store.Read].
func (s *Store) Read(ctx context.Context, key string) (rec resource.Record, err error) {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key)); err != nil {
		return rec, err
	}
	err = s.do(ctx, func() (err error) {
		rec, err = scan(s.pool.QueryRow(ctx, s.t.read, key))
		if errors.Is(err, pgx.ErrNoRows) {
			return resource.ErrNotFound
		}
		return err
	})
	return rec, err
}

// ReadFenced is [resource.Store.ReadFenced].
func (s *Store) ReadFenced(ctx context.Context, key string, token uint64) (rec resource.Record, err error) {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckToken(token)); err != nil {
		return rec, err
	}
	err = s.do(ctx, func() (err error) {
		rec, err = s.t.raise(ctx, s.pool, key, token, true)
		return err
	})
	return rec, err
}

// SetFence is [resource.FenceSetter.SetFence].
func (s *Store) SetFence(ctx context.Context, key string, token uint64) error {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckToken(token)); err != nil {
		return err
	}
	return s.do(ctx, func() error {
		tag, err := s.pool.Exec(ctx, s.t.setFence, key, number(token))
		if err == nil && tag.RowsAffected() == 0 {
			err = resource.ErrNotFound
		}
		return err
	})
}

// Close is [resource.Store.Close]. The pool stays open.
func (s *Store) Close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.calls.Wait()
	return nil
}

// do runs a transaction of one statement, again if PostgreSQL says that it has undone it because of a concurrent one: each
// time another has got through.
func (s *Store) do(ctx context.Context, f func() error) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return resource.ErrClosed
	}
	s.calls.Add(1)
	s.mu.Unlock()
	defer s.calls.Done()
	for {
		if err := f(); err == nil || code(err) != serializationFailure || ctx.Err() != nil {
			return failed(ctx, err)
		}
	}
}

// table is the statements for one table.
type table struct{ write, raiseTo, read, overwrite, setFence string }

func tableNamed(name string) table {
	sql := func(s string) string { return strings.ReplaceAll(s, defaultTable, name) }
	return table{write: sql(writeSQL), raiseTo: sql(raiseSQL), read: sql(readSQL), overwrite: sql(overwriteSQL), setFence: sql(setFenceSQL)}
}

// querier is a transaction, or a pool, on which every statement is one.
type querier interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// accept raises key's fence to f, or returns a [*resource.StaleTokenError]; see write.sql.
func (t table) accept(ctx context.Context, q querier, key string, f resource.Fence, value, request []byte) error {
	var token, seq *string
	var applied bool
	err := t.ask(func() error {
		return q.QueryRow(ctx, t.write, key, number(f.Token), number(f.Seq), value, request).Scan(&token, &seq, &applied)
	})
	if err != nil || token == nil {
		return err
	}
	seen, err := parse(*token, *seq)
	if err != nil {
		return err
	}
	return &resource.StaleTokenError{Key: key, Seen: seen, Got: f, Applied: applied}
}

// raise raises key's fence to (token, 0), or returns a [*resource.StaleTokenError]; see raise.sql.
func (t table) raise(ctx context.Context, q querier, key string, token uint64, withValue bool) (rec resource.Record, err error) {
	err = t.ask(func() (err error) {
		rec, err = scan(q.QueryRow(ctx, t.raiseTo, key, number(token), withValue))
		return err
	})
	if err == nil {
		err = rec.CheckRead(key, token)
	}
	if err != nil {
		return resource.Record{}, err
	}
	return rec, nil
}

// ask runs a statement that has no row for an answer if a concurrent one with the same or a later fence was committed
// while it ran. What it has to say about that one it says when it is run again, and sees it from the beginning. This only
// happens at READ COMMITTED, where a statement sees what was committed before it.
func (t table) ask(f func() error) error {
	for range 2 {
		if err := f(); !errors.Is(err, pgx.ErrNoRows) {
			return err
		}
	}
	return errors.New("the fence was neither raised nor refused: a trigger or a rule is in the way, or its row was deleted meanwhile")
}

// scan reads a record.
func scan(row pgx.Row) (resource.Record, error) {
	var token, seq string
	var rec resource.Record
	if err := row.Scan(&token, &seq, &rec.Value); err != nil {
		return resource.Record{}, err
	}
	f, err := parse(token, seq)
	if err != nil {
		return resource.Record{}, err
	}
	rec.MaxFence = f
	return rec, nil
}

// number is how a uint64 travels as a numeric.
func number(n uint64) string { return strconv.FormatUint(n, 10) }

func parse(token, seq string) (f resource.Fence, err error) {
	if f.Token, err = strconv.ParseUint(token, 10, 64); err == nil {
		f.Seq, err = strconv.ParseUint(seq, 10, 64)
	}
	return f, err
}

// orEmpty makes an empty value one that is none: a nil slice would be NULL.
func orEmpty(value []byte) []byte {
	if value == nil {
		return []byte{}
	}
	return value
}

// failed wraps a client's error, if there is one. After ctx's end that is ctx.Err at best, which doesn't tell the cause.
func failed(ctx context.Context, err error) error {
	if _, stale := errors.AsType[*resource.StaleTokenError](err); err == nil || stale || errors.Is(err, resource.ErrNotFound) {
		return err
	}
	switch {
	case ctx.Err() != nil && !errors.Is(err, context.Cause(ctx)):
		return fmt.Errorf("pgstore: %w: %w", context.Cause(ctx), err)
	case code(err) == "42P01":
		return fmt.Errorf("pgstore: the table of fences is missing; see CreateSchema: %w", err)
	}
	return fmt.Errorf("pgstore: %w", err)
}

// code is the SQLSTATE with which the server refused a statement, or "".
func code(err error) string {
	if e, ok := errors.AsType[*pgconn.PgError](err); ok {
		return e.Code
	}
	return ""
}
