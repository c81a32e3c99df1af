package pgstore_test

import (
	"bytes"
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/pgstore"
)

func begin(ctx context.Context, t *testing.T, pool *pgxpool.Pool, level pgx.TxIsoLevel) pgx.Tx {
	t.Helper()
	tx, err := pool.BeginTx(ctx, pgx.TxOptions{IsoLevel: level})
	require.NoError(t, err)
	t.Cleanup(func() { _ = tx.Rollback(context.WithoutCancel(ctx)) })
	return tx
}

func adds(ctx context.Context, tx pgx.Tx, name, holders string) error {
	_, err := tx.Exec(ctx, `INSERT INTO account (name, holders) VALUES ($1, $2)
		ON CONFLICT (name) DO UPDATE SET holders = excluded.holders`, name, holders)
	return err
}

type q interface {
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

func holders(ctx context.Context, t *testing.T, from q, name string) (s string) {
	t.Helper()
	err := from.QueryRow(ctx, "SELECT holders FROM account WHERE name = $1", name).Scan(&s)
	if !errors.Is(err, pgx.ErrNoRows) {
		require.NoError(t, err)
	}
	return s
}

func fenceOf(t *testing.T, pool *pgxpool.Pool, key string) resource.Fence {
	t.Helper()
	rec, err := newStore(t, pool, nil).Read(t.Context(), key)
	if !errors.Is(err, resource.ErrNotFound) {
		require.NoError(t, err)
	}
	return rec.MaxFence
}

// meets runs second, ends first once second waits for a lock, and returns second's result. If fails, second first gets a
// serialization failure.
func meets(t *testing.T, pool *pgxpool.Pool, second func() error, first func(context.Context) error, fails bool) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- second() }()
	require.Eventually(t, func() (blocked bool) {
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE wait_event_type = 'Lock' AND query LIKE '-- Raises the fence of a key%')`).Scan(&blocked))
		return blocked
	}, 30*time.Second, 5*time.Millisecond)
	require.NoError(t, first(t.Context()))
	err := <-done
	if fails {
		require.Equal(t, "40001", sqlState(err), "got %v", err)
		err = second()
	}
	return err
}

func isStale(t *testing.T, err error, key string, seen, got resource.Fence, applied bool) {
	t.Helper()
	stale, ok := errors.AsType[*resource.StaleTokenError](err)
	require.True(t, ok, "got %v, want a *StaleTokenError", err)
	require.Equal(t, &resource.StaleTokenError{Key: key, Seen: seen, Got: got, Applied: applied}, stale)
}

func TestGuard(t *testing.T) {
	onLevels(t, func(t *testing.T, level pgx.TxIsoLevel) {
		pool, key, ctx := testmain.Pool(t, server), newKey(), t.Context()
		write := func(f resource.Fence, value string, end error) error {
			return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
				if err := pgstore.Guard(ctx, tx, key, f); err != nil {
					return err
				}
				if err := adds(ctx, tx, key, value); err != nil {
					return err
				}
				return end
			})
		}
		changedMind := errors.New("changed its mind")
		require.ErrorIs(t, write(at(5), "5", changedMind), changedMind)
		require.Zero(t, fenceOf(t, pool, key), "of a transaction that was rolled back")
		require.NoError(t, write(at(5), "5", nil))
		require.Equal(t, at(5), fenceOf(t, pool, key))
		require.NoError(t, write(resource.Fence{Token: 5, Seq: 3}, "5.3", nil))
		for _, f := range []resource.Fence{at(4), {Token: 4, Seq: 9}, {Token: 5, Seq: 2}, {Token: 5, Seq: 3}} {
			isStale(t, write(f, "late", nil), key, resource.Fence{Token: 5, Seq: 3}, f, false)
		}
		require.NoError(t, write(at(10), "10", nil), "tokens are numbers and not text")
		require.ErrorIs(t, write(at(11), "11", changedMind), changedMind)
		require.Equal(t, "10", holders(ctx, t, pool, key))
		require.Equal(t, at(10), fenceOf(t, pool, key))

		tx := begin(ctx, t, pool, level)
		require.NoError(t, adds(ctx, tx, key, "before its guard"))
		isStale(t, pgstore.Guard(ctx, tx, key, at(9)), key, at(10), at(9), false)
		require.ErrorIs(t, adds(ctx, tx, key, "overlooked the error"), pgx.ErrTxClosed)
		require.ErrorIs(t, tx.Commit(ctx), pgx.ErrTxClosed)
		require.Equal(t, "10", holders(ctx, t, pool, key))

		tx = begin(ctx, t, pool, level) // several writes in one transaction
		require.NoError(t, pgstore.GuardRead(ctx, tx, key, resource.Fence{Token: 12}))
		require.NoError(t, pgstore.Guard(ctx, tx, key, at(12)))
		require.NoError(t, pgstore.GuardRead(ctx, tx, key, resource.Fence{Token: 12}))
		require.NoError(t, pgstore.Guard(ctx, tx, key, resource.Fence{Token: 12, Seq: 2}))
		require.NoError(t, tx.Commit(ctx))
		require.Equal(t, resource.Fence{Token: 12, Seq: 2}, fenceOf(t, pool, key))
	})
}

func TestGuardSQL(t *testing.T) {
	onLevels(t, func(t *testing.T, level pgx.TxIsoLevel) {
		pool, key, ctx := testmain.Pool(t, server), newKey(), t.Context()
		db := stdlib.OpenDBFromPool(pool)
		t.Cleanup(func() { require.NoError(t, db.Close()) })
		isolation := map[pgx.TxIsoLevel]sql.IsolationLevel{pgx.RepeatableRead: sql.LevelRepeatableRead, pgx.Serializable: sql.LevelSerializable}[level]
		begin := func() *sql.Tx {
			tx, err := db.BeginTx(ctx, &sql.TxOptions{Isolation: isolation})
			require.NoError(t, err)
			t.Cleanup(func() { _ = tx.Rollback() })
			return tx
		}
		write := func(f resource.Fence, value, request string, first func(*sql.Tx)) error {
			tx := begin()
			first(tx)
			if err := guard(ctx, pgstore.SQL(tx), key, f, request); err != nil {
				require.ErrorIs(t, tx.Commit(), sql.ErrTxDone)
				return err
			}
			_, err := tx.ExecContext(ctx, "INSERT INTO account VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET holders = excluded.holders", key, value)
			require.NoError(t, err)
			return tx.Commit()
		}
		none := func(*sql.Tx) {}
		require.NoError(t, write(at(5), "5", "transfer 17", none))
		isStale(t, write(at(5), "again", "transfer 17", none), key, at(5), at(5), true)
		isStale(t, write(at(4), "late", "", none), key, at(5), at(4), false)
		require.NoError(t, write(at(6), "6", "", func(tx *sql.Tx) {
			require.NoError(t, pgstore.GuardRead(ctx, pgstore.SQL(tx), key, resource.Fence{Token: 6}))
		}))

		isStale(t, write(at(3), "late", "", func(tx *sql.Tx) {
			_, err := tx.ExecContext(ctx, "UPDATE account SET holders = 'late' WHERE name = $1", key)
			require.NoError(t, err)
		}), key, at(6), at(3), false)
		// A busy connection takes neither guard nor rollback, and isn't used again.
		var rows *sql.Rows
		require.ErrorContains(t, write(at(7), "7", "", func(tx *sql.Tx) {
			_, err := tx.ExecContext(ctx, "UPDATE account SET holders = 'busy' WHERE name = $1", key)
			require.NoError(t, err)
			rows, err = tx.QueryContext(ctx, "SELECT 1") //nolint:rowserrcheck,sqlclosecheck // it is, below
			require.NoError(t, err)
		}), "conn busy")
		require.ErrorIs(t, rows.Err(), context.Canceled)
		require.Equal(t, "6", holders(ctx, t, pool, key))
		require.Equal(t, at(6), fenceOf(t, pool, key))

		old, young := begin(), begin()
		require.NoError(t, pgstore.Guard(ctx, pgstore.SQL(young), key, at(9)))
		err := meets(t, pool, func() error { return pgstore.Guard(ctx, pgstore.SQL(old), key, at(8)) }, func(context.Context) error { return young.Commit() }, false)
		if level == pgx.ReadCommitted {
			isStale(t, err, key, at(9), at(8), false)
		} else {
			require.Equal(t, "40001", sqlState(err))
		}
		require.ErrorIs(t, old.Commit(), sql.ErrTxDone)
	})
}

// A temporary table, empty or a copy, must not replace the fences.
func TestTemporaryTable(t *testing.T) {
	for _, like := range []string{
		"TABLE NAME (LIKE public.NAME INCLUDING ALL)",
		"TABLE NAME (LIKE public.NAME INCLUDING ALL); INSERT INTO NAME TABLE public.NAME",
		"VIEW NAME AS TABLE public.NAME",
	} {
		pool, key, ctx := testmain.Pool(t, server, func(c *pgxpool.Config) { c.MaxConns = 1 }), newKey(), t.Context()
		o := newTable(t, pool)
		name := o.Table[0]
		s, named := newStore(t, pool, o), newStore(t, pool, &pgstore.Options{Table: pgx.Identifier{"public", name}})
		require.NoError(t, s.Write(ctx, key, at(7), []byte("v")))
		_, err := pool.Exec(ctx, "CREATE TEMPORARY "+strings.ReplaceAll(like, "NAME", name))
		require.NoError(t, err)
		for what, call := range map[string]func(resource.Fence) error{
			"Guard": func(f resource.Fence) error { return s.Guard(ctx, begin(ctx, t, pool, pgx.ReadCommitted), key, f) },
			"GuardOnce": func(f resource.Fence) error {
				return s.GuardOnce(ctx, begin(ctx, t, pool, pgx.ReadCommitted), key, f, []byte("r"))
			},
			"GuardRead": func(f resource.Fence) error { return s.GuardRead(ctx, begin(ctx, t, pool, pgx.ReadCommitted), key, f) },
			"Write":     func(f resource.Fence) error { return s.Write(ctx, key, f, []byte("v")) },
			"ReadFenced": func(f resource.Fence) error {
				_, err := s.ReadFenced(ctx, key, f)
				return err
			},
		} {
			for _, f := range []resource.Fence{at(6), at(7), at(8)} {
				require.ErrorContains(t, call(f), "or a temporary one shadows it", "%s at %v under %s", what, f, like)
			}
		}
		isStale(t, named.Write(ctx, key, at(6), nil), key, at(7), at(6), false)
		require.NoError(t, named.Write(ctx, key, at(8), nil))
	}
}

func TestValueThatCouldNotBeRead(t *testing.T) {
	pool := testmain.Pool(t, server)
	s := newStore(t, pool, newTable(t, pool))
	large := make([]byte, 256<<20+1)
	require.ErrorIs(t, s.Write(t.Context(), newKey(), at(7), large), resource.ErrTooLarge)
	require.ErrorIs(t, s.Overwrite(t.Context(), newKey(), at(7), large), resource.ErrTooLarge)
}

// A crash empties it.
func TestUnloggedTable(t *testing.T) {
	pool := testmain.Pool(t, server)
	o := newTable(t, pool)
	s := newStore(t, pool, o)
	_, err := pool.Exec(t.Context(), "ALTER TABLE "+o.Table.Sanitize()+" SET UNLOGGED")
	require.NoError(t, err)
	require.ErrorContains(t, s.Write(t.Context(), newKey(), at(7), nil), "the table of fences is unlogged")
	_, err = s.ReadFenced(t.Context(), newKey(), at(7))
	require.ErrorContains(t, err, "the table of fences is unlogged")
}

func TestGuardRefusesInvalid(t *testing.T) {
	pool, key := testmain.Pool(t, server), newKey()
	ended, end := context.WithCancelCause(t.Context())
	cause := errors.New("the cause")
	end(cause)
	for name, guard := range map[string]func(tx pgx.Tx) error{
		"zero token":    func(tx pgx.Tx) error { return pgstore.Guard(t.Context(), tx, key, resource.Fence{Seq: 1}) },
		"zero seq":      func(tx pgx.Tx) error { return pgstore.Guard(t.Context(), tx, key, resource.Fence{Token: 1}) },
		"no key":        func(tx pgx.Tx) error { return pgstore.Guard(t.Context(), tx, "", at(1)) },
		"no request":    func(tx pgx.Tx) error { return pgstore.GuardOnce(t.Context(), tx, key, at(1), []byte{}) },
		"read at zero":  func(tx pgx.Tx) error { return pgstore.GuardRead(t.Context(), tx, key, resource.Fence{Token: 0}) },
		"read, no key":  func(tx pgx.Tx) error { return pgstore.GuardRead(t.Context(), tx, "", at(1)) },
		"context ended": func(tx pgx.Tx) error { return pgstore.Guard(ended, tx, key, at(1)) },
	} {
		tx := begin(t.Context(), t, pool, pgx.ReadCommitted)
		err := guard(tx)
		require.Error(t, err, name)
		_, stale := errors.AsType[*resource.StaleTokenError](err)
		require.False(t, stale, name)
		require.Equal(t, name == "context ended", errors.Is(err, cause), name)
		require.ErrorIs(t, tx.Commit(t.Context()), pgx.ErrTxClosed, name)
	}
	require.Zero(t, fenceOf(t, pool, key))
}

// interrupted is a transaction whose connection breaks within its reply.
type interrupted struct{}

func (interrupted) Rollback(context.Context) error                     { return pgx.ErrTxClosed }
func (i interrupted) QueryRow(context.Context, string, ...any) pgx.Row { return i }
func (interrupted) Scan(dest ...any) error {
	token := "7"
	*dest[0].(**string) = &token
	return io.ErrUnexpectedEOF
}

func TestReplyInterrupted(t *testing.T) {
	require.ErrorIs(t, pgstore.Guard(t.Context(), interrupted{}, "k", at(1)), io.ErrUnexpectedEOF)
}

// Its connection now belongs to another transaction.
func TestGuardOfAnEndedTransaction(t *testing.T) {
	pool, key := testmain.Pool(t, server, func(c *pgxpool.Config) { c.MaxConns = 1 }), newKey()
	tx := begin(t.Context(), t, pool, pgx.ReadCommitted)
	require.NoError(t, tx.Commit(t.Context()))
	require.ErrorIs(t, pgstore.Guard(t.Context(), tx, key, at(1)), pgx.ErrTxClosed)
	require.Zero(t, fenceOf(t, pool, key))
	require.EqualValues(t, 1, pool.Stat().NewConnsCount())
}

func TestGuardFailsNested(t *testing.T) {
	pool, ctx := testmain.Pool(t, server), t.Context()
	ended, end := context.WithCancel(ctx)
	end()
	nested := func(key string) (outer, inner pgx.Tx) {
		outer = begin(ctx, t, pool, pgx.ReadCommitted)
		require.NoError(t, adds(ctx, outer, key, "outer"))
		inner, err := outer.Begin(ctx)
		require.NoError(t, err)
		require.NoError(t, adds(ctx, inner, key, "before its guard"))
		return outer, inner
	}
	for name, ctx := range map[string]context.Context{"zero token": ctx, "context ended": ended} {
		key := newKey()
		outer, inner := nested(key)
		require.Error(t, pgstore.Guard(ctx, inner, key, resource.Fence{Seq: 1}), name)
		require.ErrorIs(t, inner.Commit(t.Context()), pgx.ErrTxClosed, name)
		require.NoError(t, outer.Commit(t.Context()), name)
		require.Equal(t, "outer", holders(t.Context(), t, pool, key), name)
	}

	key := newKey() // busy connections take no rollback either
	outer, inner := nested(key)
	rows, err := inner.Query(ctx, "SELECT 1")
	require.NoError(t, err)
	require.ErrorContains(t, pgstore.Guard(ctx, inner, key, at(1)), "conn busy")
	rows.Close()
	require.Error(t, outer.Commit(ctx))
	require.Empty(t, holders(ctx, t, pool, key))
}

func TestGuardsMeet(t *testing.T) {
	onLevels(t, func(t *testing.T, level pgx.TxIsoLevel) {
		for _, c := range []struct {
			name          string
			before        []resource.Fence
			first, second resource.Fence
			commits       bool
		}{
			{"rising", []resource.Fence{at(1)}, at(2), at(3), true},
			{"falling", []resource.Fence{at(1)}, at(3), at(2), true},
			{"equal", []resource.Fence{at(1)}, at(2), at(2), true},
			{"rising, first touch", nil, at(2), at(3), true},
			{"falling, first touch", nil, at(3), at(2), true},
			{"falling, rolled back", []resource.Fence{at(1)}, at(3), at(2), false},
			{"falling, first touch, rolled back", nil, at(3), at(2), false},
		} {
			t.Run(c.name, func(t *testing.T) {
				pool, key, ctx := testmain.Pool(t, server), newKey(), t.Context()
				for _, f := range c.before {
					require.NoError(t, newStore(t, pool, nil).Write(ctx, key, f, nil))
				}
				first := begin(ctx, t, pool, level)
				require.NoError(t, pgstore.Guard(ctx, first, key, c.first))
				second := func() error {
					return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
						return pgstore.Guard(ctx, tx, key, c.second)
					})
				}
				end := first.Commit
				if !c.commits {
					end = first.Rollback
				}
				err := meets(t, pool, second, end, c.commits && level != pgx.ReadCommitted)
				if c.commits && !resource.AdmitsWrite(c.first, c.second) {
					isStale(t, err, key, c.first, c.second, false)
					require.Equal(t, c.first, fenceOf(t, pool, key))
					return
				}
				require.NoError(t, err)
				require.Equal(t, c.second, fenceOf(t, pool, key))
			})
		}
	})
}

// It sees the earlier holder's write, whose later writes are refused.
func TestGuardReadMeetsWrite(t *testing.T) {
	onLevels(t, func(t *testing.T, level pgx.TxIsoLevel) {
		pool, key, ctx := testmain.Pool(t, server), newKey(), t.Context()
		old := begin(ctx, t, pool, level)
		require.NoError(t, pgstore.Guard(ctx, old, key, at(1)))
		require.NoError(t, adds(ctx, old, key, "A"))
		var saw string
		read := func() error {
			return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
				err := pgstore.GuardRead(ctx, tx, key, resource.Fence{Token: 2})
				if err == nil {
					saw = holders(ctx, t, tx, key)
				}
				return err
			})
		}
		require.NoError(t, meets(t, pool, read, old.Commit, level != pgx.ReadCommitted))
		require.Equal(t, "A", saw)
		require.Equal(t, resource.Fence{Token: 2}, fenceOf(t, pool, key))
		late := begin(ctx, t, pool, level)
		isStale(t, pgstore.Guard(ctx, late, key, resource.Fence{Token: 1, Seq: 2}), key, resource.Fence{Token: 2}, resource.Fence{Token: 1, Seq: 2}, false)
		late = begin(ctx, t, pool, level)
		isStale(t, pgstore.GuardRead(ctx, late, key, resource.Fence{Token: 1}), key, resource.Fence{Token: 2}, resource.Fence{Token: 1}, false)
	})
}

func TestReadMeetsOwnWrite(t *testing.T) {
	for _, before := range []uint64{0, 6} { // new row; existing row
		pool, key, ctx := testmain.Pool(t, server), newKey(), t.Context()
		s := newStore(t, pool, nil)
		if before > 0 {
			require.NoError(t, s.Write(ctx, key, at(before), []byte("v")))
		}
		own := begin(ctx, t, pool, pgx.ReadCommitted)
		require.NoError(t, pgstore.Guard(ctx, own, key, resource.Fence{Token: 7, Seq: 2}))
		var rec resource.Record
		require.NoError(t, meets(t, pool, func() (err error) {
			rec, err = s.ReadFenced(ctx, key, resource.Fence{Token: 7})
			return err
		}, own.Commit, false))
		require.Equal(t, resource.Fence{Token: 7, Seq: 2}, rec.MaxFence)
		require.Equal(t, resource.Fence{Token: 7, Seq: 2}, fenceOf(t, pool, key))
	}
}

// Some calls are refused whether or not the other transaction commits.
func TestRefusalDoesNotWait(t *testing.T) {
	pool := testmain.Pool(t, server, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["lock_timeout"] = "100ms" })
	s, key, ctx := newStore(t, pool, nil), newKey(), t.Context()
	require.NoError(t, s.Write(ctx, key, at(5), []byte("v")))
	require.NoError(t, pgstore.Guard(ctx, begin(ctx, t, pool, pgx.ReadCommitted), key, at(7)))
	isStale(t, s.Write(ctx, key, at(4), nil), key, at(5), at(4), false)
	_, err := s.ReadFenced(ctx, key, resource.Fence{Token: 4})
	isStale(t, err, key, at(5), resource.Fence{Token: 4}, false)
	rec, err := s.ReadFenced(ctx, key, resource.Fence{Token: 5})
	require.NoError(t, err)
	require.Equal(t, resource.Record{Value: []byte("v"), MaxFence: at(5)}, rec)
	require.Equal(t, "55P03", sqlState(s.Write(ctx, key, at(6), nil)), "others wait")
}

func TestStoreAndGuard(t *testing.T) {
	pool, key, ctx := testmain.Pool(t, server), newKey(), t.Context()
	s := newStore(t, pool, nil)
	guard := func(f resource.Fence, request string) error {
		return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return guard(ctx, tx, key, f, request) })
	}
	require.NoError(t, s.Write(ctx, key, at(1), []byte("v")))
	require.NoError(t, guard(at(2), ""))
	rec, err := s.Read(ctx, key)
	require.NoError(t, err)
	require.Equal(t, resource.Record{Value: []byte("v"), MaxFence: at(2)}, rec, "a guard leaves the value alone")
	isStale(t, s.Write(ctx, key, at(2), []byte("v")), key, at(2), at(2), false)
	isStale(t, guard(at(2), ""), key, at(2), at(2), false)
	isStale(t, guard(at(2), "r"), key, at(2), at(2), false)
	require.NoError(t, guard(at(3), "r"))
	isStale(t, guard(at(3), "r"), key, at(3), at(3), true)
	for _, other := range []string{"s", "another"} { // of the same length, too
		isStale(t, guard(at(3), other), key, at(3), at(3), false)
	}
	isStale(t, guard(at(2), "r"), key, at(3), at(2), false)
	isStale(t, guard(at(3), ""), key, at(3), at(3), false)
	isStale(t, s.Write(ctx, key, at(3), []byte("r")), key, at(3), at(3), false)
	require.NoError(t, s.Write(ctx, key, at(4), []byte("r")))
	isStale(t, guard(at(4), "r"), key, at(4), at(4), false)
	isStale(t, s.Write(ctx, key, at(4), []byte("r")), key, at(4), at(4), true)
}

func TestCommitWithoutAnswer(t *testing.T) {
	onLevels(t, func(t *testing.T, level pgx.TxIsoLevel) {
		for _, applied := range []bool{false, true} {
			for _, request := range []string{"", "transfer 17"} {
				key, ctx := newKey(), t.Context()
				d := dlocktest.NewDialer(new(net.Dialer).DialContext, func(b []byte) bool { return bytes.Contains(b, []byte("commit\x00")) })
				pool := testmain.Pool(t, server, func(c *pgxpool.Config) { c.ConnConfig.DialFunc = d.DialContext })
				write := func() error {
					return pgx.BeginTxFunc(ctx, pool, pgx.TxOptions{IsoLevel: level}, func(tx pgx.Tx) error {
						if err := guard(ctx, tx, key, at(1), request); err != nil {
							return err
						}
						return adds(ctx, tx, key, holders(ctx, t, tx, key)+"A")
					})
				}
				lose, want := d.Link().LoseRequests, io.EOF
				if applied {
					lose, want = d.Link().LoseReplies, io.ErrUnexpectedEOF
				}
				heal := lose()
				require.ErrorIs(t, write(), want)
				heal()
				err := write()
				if applied {
					isStale(t, err, key, at(1), at(1), request != "")
				} else {
					require.NoError(t, err)
				}
				require.Equal(t, "A", holders(ctx, t, pool, key), "once")
			}
		}
	})
}

func guard(ctx context.Context, tx pgstore.Tx, key string, f resource.Fence, request string) error {
	if request == "" {
		return pgstore.Guard(ctx, tx, key, f)
	}
	return pgstore.GuardOnce(ctx, tx, key, f, []byte(request))
}

type lastArgs struct{ args []any }

func (tx *lastArgs) QueryRow(_ context.Context, _ string, args ...any) pgx.Row {
	tx.args = args
	return tx
}

func (*lastArgs) Scan(...any) error { return io.EOF }

func (*lastArgs) Rollback(context.Context) error { return nil }

// lib/pq before 1.11 sends a nil []byte as an empty value.
func TestGuardHasNoValue(t *testing.T) {
	var tx lastArgs
	require.ErrorIs(t, pgstore.Guard(t.Context(), &tx, "k", at(1)), io.EOF)
	require.Equal(t, []any{"k", "1", "1", nil, []byte{}}, tx.args)
}

type silent struct{}

func (s silent) Connect(context.Context) (driver.Conn, error) { return s, nil }
func (s silent) Driver() driver.Driver                        { return s }
func (s silent) Open(string) (driver.Conn, error)             { return s, nil }
func (silent) Close() error                                   { return nil }
func (s silent) Begin() (driver.Tx, error)                    { return s, nil }
func (silent) Prepare(string) (driver.Stmt, error)            { return nil, io.EOF }
func (silent) Commit() error                                  { return nil }
func (silent) Rollback() error                                { time.Sleep(time.Hour); return nil }

func TestRollbackUnanswered(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := sql.OpenDB(silent{})
		defer func() { require.NoError(t, db.Close()) }()
		tx, err := db.BeginTx(t.Context(), nil)
		require.NoError(t, err)
		began := time.Now()
		require.ErrorIs(t, pgstore.Guard(t.Context(), pgstore.SQL(tx), "k", at(1)), io.EOF)
		require.Equal(t, 5*time.Second, time.Since(began))
		require.ErrorIs(t, tx.Commit(), sql.ErrTxDone)
		time.Sleep(time.Hour)
	})
}
