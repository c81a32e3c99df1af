package pgstore_test

import (
	"context"
	"errors"
	"math"
	"os"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/internal/eachcall"
	"github.com/fencelab/fencelab/resource/pgstore"
	"github.com/fencelab/fencelab/resource/storetest"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

var levels = []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable}

func onLevels(t *testing.T, test func(t *testing.T, level pgx.TxIsoLevel)) {
	t.Helper()
	for _, level := range levels {
		t.Run(strings.ReplaceAll(string(level), " ", "-"), func(t *testing.T) { test(t, level) })
	}
}

func byDefault(level pgx.TxIsoLevel) func(*pgxpool.Config) {
	return func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["default_transaction_isolation"] = string(level) }
}

func TestStandby(t *testing.T) {
	pool := testmain.Pool(t, server, func(c *pgxpool.Config) { c.MaxConns = 1 })
	s, ctx := newStore(t, pool, newTable(t, pool)), t.Context()
	require.NoError(t, s.Write(ctx, "k", at(1), nil))
	calls := eachcall.Of(s, "k", at(2))
	delete(calls, "Read")
	for name, call := range calls {
		require.NoError(t, s.SetFence(ctx, "k", 1))
		_, err := pool.Exec(ctx, "SET default_transaction_read_only = on")
		require.NoError(t, err)
		err = call(ctx)
		require.Equal(t, "25006", sqlState(err), "%s: %v", name, err)
		require.NoError(t, call(ctx), name)
	}
}

func TestCreateSchemaWithoutRights(t *testing.T) {
	one := func(c *pgxpool.Config) { c.MaxConns = 1 }
	admin, name := testmain.Pool(t, server), "least_"+strings.ReplaceAll(uuid.NewString(), "-", "")
	o := &pgstore.Options{Table: pgx.Identifier{name, "fences"}}
	_, err := admin.Exec(t.Context(), "CREATE SCHEMA "+name)
	require.NoError(t, err)
	require.NoError(t, pgstore.CreateSchema(t.Context(), admin, o))
	_, err = admin.Exec(t.Context(), strings.ReplaceAll("CREATE ROLE NAME; GRANT USAGE ON SCHEMA NAME TO NAME; GRANT SELECT, INSERT, UPDATE ON NAME.fences TO NAME", "NAME", name))
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := admin.Exec(context.Background(), strings.ReplaceAll("DROP SCHEMA NAME CASCADE; DROP ROLE NAME", "NAME", name))
		require.NoError(t, err)
	})
	pool := testmain.Pool(t, server, one)
	_, err = pool.Exec(t.Context(), "SET ROLE "+name)
	require.NoError(t, err)
	require.NoError(t, pgstore.CreateSchema(t.Context(), pool, o))
	require.NoError(t, newStore(t, pool, o).Write(t.Context(), "k", resource.Fence{Token: 1, Seq: 1}, nil))
}

func newTable(t *testing.T, pool *pgxpool.Pool) *pgstore.Options {
	t.Helper()
	o := &pgstore.Options{Table: pgx.Identifier{"fences_" + strings.ReplaceAll(uuid.NewString(), "-", "")}}
	require.NoError(t, pgstore.CreateSchema(t.Context(), pool, o))
	return o
}

func newStore(t *testing.T, pool *pgxpool.Pool, o *pgstore.Options) *pgstore.Store {
	t.Helper()
	s, err := pgstore.New(pool, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func newKey() string { return "test/" + uuid.NewString() }

func at(token uint64) resource.Fence { return resource.Fence{Token: token, Seq: 1} }

func sqlState(err error) string {
	if e, ok := errors.AsType[*pgconn.PgError](err); ok {
		return e.Code
	}
	return ""
}

// Reopen kills the server.
func TestStore(t *testing.T) {
	s := testmain.Own(t, testbed.StartPostgres, nil)
	onLevels(t, func(t *testing.T, level pgx.TxIsoLevel) {
		pool := testmain.Pool(t, s, byDefault(level))
		var o *pgstore.Options
		open := func() (resource.Store, error) { return pgstore.New(pool, o) }
		storetest.Run(t, storetest.Harness{
			New: func() (resource.Store, error) {
				o = newTable(t, pool)
				return open()
			},
			Reopen: func(store resource.Store) (resource.Store, error) {
				if err := errors.Join(store.Close(), s.Kill(t.Context())); err != nil {
					return nil, err
				}
				if err := s.Restart(t.Context()); err != nil {
					return nil, err
				}
				pool.Reset()
				return open()
			},
			Another: open,
		})
	})
}

func TestNewRefuses(t *testing.T) {
	_, err := pgstore.New(nil, nil)
	require.ErrorContains(t, err, "pool is nil")
	pool := testmain.Pool(t, server)
	for _, table := range []pgx.Identifier{{}, {""}, {"a", ""}, {"a", "b", "c"}, {"a\x00b"}, {strings.Repeat("x", 64)}} {
		_, err := pgstore.New(pool, &pgstore.Options{Table: table})
		require.Error(t, err, "%q", table)
		require.Error(t, pgstore.CreateSchema(t.Context(), pool, &pgstore.Options{Table: table}), "%q", table)
	}
}

func TestTables(t *testing.T) {
	pool := testmain.Pool(t, server)
	schema := `an"odd\ schema'` + uuid.NewString()
	_, err := pool.Exec(t.Context(), "CREATE SCHEMA "+pgx.Identifier{schema}.Sanitize())
	require.NoError(t, err)
	key := newKey()
	require.NoError(t, newStore(t, pool, nil).Write(t.Context(), key, at(9), nil))
	for _, name := range []string{"fences", `"; DROP TABLE fencelab_fence; --`, "fencelab_fence", strings.Repeat("x", 63)} {
		o := &pgstore.Options{Table: pgx.Identifier{schema, name}}
		s := newStore(t, pool, o)
		require.ErrorContains(t, s.Write(t.Context(), key, at(1), nil), "CreateSchema", "a missing table isn't made behind anyone's back")
		var wg sync.WaitGroup
		for range 4 {
			wg.Go(func() {
				if err := pgstore.CreateSchema(t.Context(), pool, o); err != nil {
					t.Errorf("CreateSchema at once: %v", err)
				}
			})
		}
		wg.Wait()
		require.NoError(t, s.Write(t.Context(), key, at(1), nil), "tables are apart")
		require.NoError(t, pgx.BeginFunc(t.Context(), pool, func(tx pgx.Tx) error {
			if err := s.GuardRead(t.Context(), tx, key, resource.Fence{Token: 1}); err != nil {
				return err
			}
			if err := s.Guard(t.Context(), tx, key, at(2)); err != nil {
				return err
			}
			return s.GuardOnce(t.Context(), tx, key, at(3), []byte("r"))
		}))
		rec, err := s.Read(t.Context(), key)
		require.NoError(t, err)
		require.Equal(t, at(3), rec.MaxFence)
	}
}

func TestExecModes(t *testing.T) {
	for _, m := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run(m.String(), func(t *testing.T) {
			pool := testmain.Pool(t, server, func(c *pgxpool.Config) {
				c.ConnConfig.DefaultQueryExecMode = m
				c.ConnConfig.RuntimeParams["bytea_output"] = "escape" // shows where a value is sent as text
			})
			s, key, ctx := newStore(t, pool, nil), newKey(), t.Context()
			top := resource.Fence{Token: 1<<64 - 1, Seq: 1<<64 - 2}
			require.NoError(t, s.Overwrite(ctx, key, resource.Fence{}, []byte("\xff\x00'")))
			require.NoError(t, s.Write(ctx, key, top, []byte("\xff\x00'")))
			require.ErrorIs(t, s.Write(ctx, key, top, []byte("\xff\x00'")), resource.ErrApplied)
			rec, err := s.ReadFenced(ctx, key, resource.Fence{Token: top.Token})
			require.NoError(t, err)
			require.Equal(t, resource.Record{Value: []byte("\xff\x00'"), MaxFence: top}, rec)
			top.Seq++
			require.NoError(t, pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error { return pgstore.Guard(ctx, tx, key, top) }))
			require.NoError(t, s.Overwrite(ctx, key, at(1), nil))
			rec, err = s.Read(ctx, key)
			require.NoError(t, err)
			require.Equal(t, resource.Record{Value: []byte{}, MaxFence: top}, rec)
		})
	}
}

func TestPoolExhausted(t *testing.T) {
	pool := testmain.Pool(t, server, func(c *pgxpool.Config) { c.MaxConns = 1 })
	s := newStore(t, pool, nil)
	c, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer c.Release()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	err = s.Write(ctx, newKey(), at(1), nil)
	require.EqualError(t, err, "pgstore: get a connection from the pool: context deadline exceeded", "it was not sent")
}

// Check and effect must be atomic.
func TestOneStatement(t *testing.T) {
	seen := &statements{}
	pool := testmain.Pool(t, server, func(c *pgxpool.Config) { c.ConnConfig.Tracer = seen })
	s, key, ctx := newStore(t, pool, nil), newKey(), t.Context()
	for _, f := range []resource.Fence{at(2), at(2), at(1), at(3)} {
		for name, call := range eachcall.Of(s, key, f) {
			seen.n = 0
			_ = call(ctx)
			require.Equal(t, 1, seen.n, "%s at %v", name, f)
		}
		for name, guard := range map[string]func(pgx.Tx) error{
			"Guard":     func(tx pgx.Tx) error { return pgstore.Guard(ctx, tx, key, resource.Fence{Token: f.Token, Seq: 2}) },
			"GuardRead": func(tx pgx.Tx) error { return pgstore.GuardRead(ctx, tx, key, resource.Fence{Token: f.Token}) },
		} {
			seen.n = 0
			_ = pgx.BeginFunc(ctx, pool, guard)
			require.Equal(t, 3, seen.n, "%s at %v: with BEGIN and its end", name, f)
		}
	}
}

type statements struct{ n int }

func (s *statements) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	s.n++
	return ctx
}

func (*statements) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func TestNeitherRaisedNorRefused(t *testing.T) {
	pool := testmain.Pool(t, server)
	o := newTable(t, pool)
	s, ctx := newStore(t, pool, o), t.Context()
	require.NoError(t, s.Write(ctx, "k", at(4), nil))
	_, err := pool.Exec(ctx, `CREATE OR REPLACE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';
		CREATE TRIGGER skip BEFORE UPDATE ON `+o.Table.Sanitize()+` FOR EACH ROW EXECUTE FUNCTION skip()`)
	require.NoError(t, err)
	require.ErrorContains(t, s.Write(ctx, "k", at(5), nil), "neither raised nor refused")
	_, err = s.ReadFenced(ctx, "k", resource.Fence{Token: 5})
	require.ErrorContains(t, err, "neither raised nor refused")
	tx := begin(ctx, t, pool, pgx.ReadCommitted)
	require.ErrorContains(t, s.Guard(ctx, tx, "k", at(5)), "neither raised nor refused")
	require.ErrorIs(t, tx.Commit(ctx), pgx.ErrTxClosed)
}

// As if others had been faster twice.
func TestFasterTwice(t *testing.T) {
	pool := testmain.Pool(t, server)
	o := newTable(t, pool)
	s, ctx := newStore(t, pool, o), t.Context()
	require.NoError(t, s.Write(ctx, "k", at(4), nil))
	_, err := pool.Exec(ctx, strings.NewReplacer("TRIES", o.Table[0]+"_tries", "TABLE", o.Table.Sanitize()).Replace(`
		CREATE SEQUENCE TRIES;
		CREATE FUNCTION TRIES() RETURNS trigger LANGUAGE plpgsql AS
			$$ BEGIN IF nextval('TRIES') > 2 THEN RETURN NEW; END IF; RETURN NULL; END $$;
		CREATE TRIGGER skip BEFORE UPDATE ON TABLE FOR EACH ROW EXECUTE FUNCTION TRIES()`))
	require.NoError(t, err)
	require.NoError(t, s.Write(ctx, "k", at(5), nil))
}

func TestDiskFull(t *testing.T) {
	pool, ctx := testmain.Pool(t, server), t.Context()
	o := newTable(t, pool)
	s := newStore(t, pool, o)
	_, err := pool.Exec(ctx, `CREATE OR REPLACE FUNCTION fails() RETURNS trigger LANGUAGE plpgsql AS
			$$ BEGIN RAISE 'fails' USING ERRCODE = convert_from(NEW.value, 'UTF8'); END $$;
		CREATE TRIGGER fails BEFORE INSERT ON `+o.Table.Sanitize()+` FOR EACH ROW EXECUTE FUNCTION fails()`)
	require.NoError(t, err)
	err = s.Write(ctx, "k", at(1), []byte("53100"))
	require.ErrorIs(t, err, resource.ErrNoRoom)
	require.Equal(t, "53100", sqlState(err))
	err = s.Write(ctx, "k", at(1), []byte("53200")) // out of memory
	require.Equal(t, "53200", sqlState(err))
	require.NotErrorIs(t, err, resource.ErrNoRoom)
}

// TestCommands runs the SQL in SetFence's comment.
func TestCommands(t *testing.T) {
	pool, ctx := testmain.Pool(t, server), t.Context()
	s := newStore(t, pool, nil)
	_, err := pool.Exec(ctx, "DELETE FROM fencelab_fence WHERE key = 'acme'")
	require.NoError(t, err)
	require.NoError(t, s.Write(ctx, "acme", at(math.MaxUint64), []byte("v")))
	source, err := os.ReadFile("pgstore.go")
	require.NoError(t, err)
	statements := regexp.MustCompile(`(?m)^//\t(?:(SELECT .*)|(UPDATE fencelab_fence .*))$`).FindAllStringSubmatch(string(source), -1)
	require.Len(t, statements, 2)
	var token, seq string
	require.NoError(t, pool.QueryRow(ctx, statements[0][1]).Scan(&token, &seq))
	require.Equal(t, "18446744073709551615.1", token+"."+seq)
	tag, err := pool.Exec(ctx, statements[1][2])
	require.NoError(t, err)
	require.EqualValues(t, 1, tag.RowsAffected())
	rec, err := s.Read(ctx, "acme")
	require.NoError(t, err)
	require.Equal(t, resource.Record{Value: []byte("v"), MaxFence: resource.Fence{Token: 7}}, rec)
	require.NoError(t, s.Write(ctx, "acme", at(7), []byte("v")))
}
