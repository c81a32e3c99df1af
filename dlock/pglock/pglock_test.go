package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/pglock"
	"github.com/fencelab/fencelab/internal/testmain"
)

func TestConformance(t *testing.T) { conform(t, func(*pgxpool.Config) {}) }

func TestConformanceSerializable(t *testing.T) {
	conform(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["default_transaction_isolation"] = "serializable" })
}

func conform(t *testing.T, set func(*pgxpool.Config)) {
	t.Helper()
	dlocktest.Run(t, dlocktest.Harness{New: func(t *testing.T) dlocktest.Service {
		return dlocktest.Service{
			Backend: func() dlock.Backend {
				b, _ := newBackend(t, set)
				return b
			},
			Faulty: func() (dlock.Backend, dlocktest.Link) {
				d := newDialer()
				b, pool := newBackend(t, set, d.over)
				locktest.UseOnce(t, b, func() {}) // a fault must hit the statement's run, not its preparation
				role := func(change string) {     // of the only connection
					_, err := pool.Exec(context.Background(), change)
					require.NoError(t, err)
				}
				link := d.Link()
				link.Refuse = func() (heal func()) {
					role("SET ROLE pg_monitor") // which has no rights on the table
					return sync.OnceFunc(func() { role("RESET ROLE") })
				}
				return b, link
			},
		}
	}})
}

// dialer disturbs prepared statements, which begin with a Bind message.
type dialer struct{ *dlocktest.Dialer }

func newDialer() dialer {
	return dialer{dlocktest.NewDialer((&net.Dialer{}).DialContext, func(b []byte) bool { return b[0] == 'B' })}
}

func (d dialer) over(c *pgxpool.Config) { c.ConnConfig.DialFunc = d.DialContext }

func newPool(t *testing.T, set ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	return testmain.Pool(t, server, append([]func(*pgxpool.Config){func(c *pgxpool.Config) { c.MaxConns = 1 }}, set...)...)
}

func newBackend(t *testing.T, set ...func(*pgxpool.Config)) (*pglock.Backend, *pgxpool.Pool) {
	t.Helper()
	pool := newPool(t, set...)
	return open(t, pool, nil), pool
}

func open(t *testing.T, pool *pgxpool.Pool, o *pglock.Options) *pglock.Backend {
	t.Helper()
	b, err := pglock.New(pool, o)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	return b
}

func listener(t *testing.T, watch *pgxpool.Pool, app string) int32 {
	t.Helper()
	rows, err := watch.Query(t.Context(), "SELECT pid FROM pg_stat_activity WHERE application_name = $1 AND query LIKE 'LISTEN %'", app)
	require.NoError(t, err)
	pid, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[int32])
	require.NoError(t, err)
	return pid
}

func named() (app string, set func(*pgxpool.Config)) {
	app = "pglock-" + uuid.NewString()
	return app, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["application_name"] = app }
}

type spy struct {
	asked chan string // each, once answered

	mu       sync.Mutex
	slow     time.Duration // before LISTEN is sent
	deaf     chan struct{} // if not nil, LISTEN waits until it is closed
	wanted   chan struct{} // full when LISTEN waits
	listener net.Conn      // the last to LISTEN
}

func newSpy() *spy { return &spy{asked: make(chan string, 1000), wanted: make(chan struct{}, 1)} }

func (s *spy) on(p *pgxpool.Config) { p.ConnConfig.Tracer = s }

func (s *spy) deafen() (heal func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	deaf := make(chan struct{})
	s.deaf = deaf
	return sync.OnceFunc(func() { close(deaf) })
}

func (s *spy) TraceQueryStart(ctx context.Context, c *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	s.mu.Lock()
	deaf, slow, listens := s.deaf, s.slow, strings.HasPrefix(d.SQL, "LISTEN")
	if listens {
		s.listener = c.PgConn().Conn()
	}
	s.mu.Unlock()
	if listens {
		time.Sleep(slow)
	}
	if deaf != nil && listens {
		s.wanted <- struct{}{}
		<-deaf
	}
	return context.WithValue(ctx, s, d.SQL)
}

func (s *spy) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	s.asked <- ctx.Value(s).(string)
}

// settled waits until the first waiter sleeps. It is refused at once, in the queue, and when LISTEN is in force.
func (s *spy) settled() {
	for range 4 {
		<-s.asked
	}
}

// contest is a lock that a holds, and for which b's callers wait.
type contest struct {
	*testing.T
	a, b  *pglock.Backend
	watch *pgxpool.Pool // a's
	*spy                // b's
	g     dlock.Grant
}

func newContest(t *testing.T, set ...func(*pgxpool.Config)) contest {
	t.Helper()
	c := contest{T: t, spy: newSpy()}
	c.a, c.watch = newBackend(t)
	c.b, _ = newBackend(t, append(set, c.on)...)
	c.g = locktest.Take(t, c.a, locktest.Request(time.Hour))
	return c
}

func (c contest) next(ttl time.Duration) dlock.Request { return locktest.Next(c.g.Key, ttl) }

func (c contest) first(r dlock.Request) <-chan locktest.Outcome {
	won := locktest.Acquire(c.Context(), c.b, r)
	c.settled()
	return won
}

func (c contest) another(ttl time.Duration) <-chan locktest.Outcome {
	won := locktest.Acquire(c.Context(), c.b, c.next(ttl))
	<-c.asked // refused
	return won
}

func (c contest) release() {
	c.Helper()
	locktest.Release(c, c.a, c.g)
}

type row struct {
	Owner   *string
	Fence   int64
	Expires time.Time
}

func read(t *testing.T, c *pgxpool.Pool, key string) row {
	t.Helper()
	rows, err := c.Query(t.Context(), "SELECT owner, fence, expires FROM fencelab_lock WHERE key = $1", key)
	require.NoError(t, err)
	r, err := pgx.CollectExactlyOneRow(rows, pgx.RowToStructByPos[row])
	require.NoError(t, err)
	return r
}

func TestNewRefuses(t *testing.T) {
	_, err := pglock.New(nil, nil)
	require.ErrorIs(t, err, dlock.ErrInvalid)
	deaf := newPool(t, func(c *pgxpool.Config) { c.ConnConfig.OnNotification = func(*pgconn.PgConn, *pgconn.Notification) {} })
	_, err = pglock.New(deaf, nil)
	require.ErrorIs(t, err, dlock.ErrInvalid)
	pool := newPool(t)
	for _, table := range []pgx.Identifier{{}, {""}, {"a", ""}, {"a", "b", "c"}, {"a\x00b"}, {strings.Repeat("x", 64)}} {
		_, err := pglock.New(pool, &pglock.Options{Table: table})
		require.ErrorIs(t, err, dlock.ErrInvalid, "%q", table)
		require.ErrorIs(t, pglock.CreateSchema(t.Context(), pool, &pglock.Options{Table: table}), dlock.ErrInvalid, "%q", table)
	}
}

func TestTables(t *testing.T) {
	pool := newPool(t)
	schema := `an"odd schema'` + uuid.NewString()
	_, err := pool.Exec(t.Context(), "CREATE SCHEMA "+pgx.Identifier{schema}.Sanitize())
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := pool.Exec(context.Background(), "DROP SCHEMA "+pgx.Identifier{schema}.Sanitize()+" CASCADE")
		require.NoError(t, err)
	})
	r := locktest.Request(time.Hour)
	require.EqualValues(t, 1, locktest.Take(t, open(t, pool, nil), r).Fence)
	for _, name := range []string{"locks", `"; DROP TABLE fencelab_lock; --`, "fencelab_lock", strings.Repeat("x", 63)} {
		o := &pglock.Options{Table: pgx.Identifier{schema, name}}
		b := open(t, pool, o)
		_, err := b.TryAcquire(t.Context(), r)
		require.ErrorContains(t, err, "CreateSchema", "a table that is missing is not made behind anyone's back")
		require.NotErrorIs(t, err, dlock.ErrInvalid)
		require.NoError(t, pglock.CreateSchema(t.Context(), pool, o))
		g := locktest.Take(t, b, r)
		require.EqualValues(t, 1, g.Fence, "tables are apart")
		require.NoError(t, pglock.CreateSchema(t.Context(), pool, o), "again")
		won := locktest.Acquire(t.Context(), b, locktest.Next(r.Key, time.Hour))
		require.NoError(t, b.Release(t.Context(), g))
		locktest.Won(t, won)
	}
}

// The commit fails after the row was sent; then another is faster.
func TestRowOfAFailedCommit(t *testing.T) {
	b, pool := newBackend(t)
	r, name := locktest.Request(time.Hour), pgx.Identifier{uuid.NewString()}.Sanitize()
	_, err := pool.Exec(t.Context(), strings.NewReplacer("NAME", name, "LATE", pgx.Identifier{uuid.NewString()}.Sanitize(), "KEY", r.Key).Replace(`
		CREATE SEQUENCE NAME;
		CREATE FUNCTION NAME() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
			IF TG_WHEN = 'AFTER' THEN RAISE 'fails' USING ERRCODE = '40001'; END IF;
			IF nextval('NAME') = 1 THEN RETURN NEW; END IF;
			RETURN NULL;
		END $$;
		CREATE TRIGGER NAME BEFORE INSERT ON fencelab_lock FOR EACH ROW WHEN (NEW.key = 'KEY') EXECUTE FUNCTION NAME();
		CREATE CONSTRAINT TRIGGER LATE AFTER INSERT ON fencelab_lock DEFERRABLE INITIALLY DEFERRED
			FOR EACH ROW WHEN (NEW.key = 'KEY') EXECUTE FUNCTION NAME()`))
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := pool.Exec(context.Background(), strings.ReplaceAll("DROP FUNCTION NAME CASCADE; DROP SEQUENCE NAME", "NAME", name))
		require.NoError(t, err)
	})
	_, err = b.TryAcquire(t.Context(), r)
	require.ErrorIs(t, err, dlock.ErrHeld)
}

// The simple protocol sends all values as text.
func TestTextFormats(t *testing.T) {
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec,
		pgx.QueryExecModeSimpleProtocol,
	} {
		for _, style := range []string{"postgres", "postgres_verbose", "sql_standard", "iso_8601"} {
			for _, ttl := range []time.Duration{400*24*time.Hour + time.Microsecond, 90 * time.Minute, 400 * time.Millisecond} {
				t.Run(fmt.Sprint(mode, "/", style, "/", ttl), func(t *testing.T) {
					holder, _ := newBackend(t)
					s := newSpy()
					b, _ := newBackend(t, s.on, func(c *pgxpool.Config) {
						c.ConnConfig.DefaultQueryExecMode = mode
						c.ConnConfig.RuntimeParams["IntervalStyle"] = style
					})
					g := locktest.Take(t, holder, locktest.Request(ttl))
					won := locktest.Acquire(t.Context(), b, locktest.Next(g.Key, max(ttl, time.Hour)))
					if ttl > time.Minute {
						for range 4 { // as in settled
							select {
							case <-s.asked:
							case w := <-won:
								require.Fail(t, "it doesn't wait", "%v", w.Err)
							}
						}
						select {
						case <-s.asked:
							require.Fail(t, "it doesn't know how long the lease lasts")
						case <-time.After(20 * time.Millisecond):
						}
						require.NoError(t, holder.Release(t.Context(), g))
					} // else it expires
					w := locktest.Won(t, won)
					require.Less(t, len(s.asked), 10)
					require.NoError(t, b.Renew(t.Context(), w))
					require.NoError(t, b.Release(t.Context(), w))
				})
			}
		}
	}
}

func TestCounterExhausted(t *testing.T) {
	b, pool := newBackend(t)
	r := locktest.Request(time.Hour)
	require.NoError(t, b.Release(t.Context(), locktest.Take(t, b, r)))
	_, err := pool.Exec(t.Context(), "UPDATE fencelab_lock SET fence = 9223372036854775806 WHERE key = $1", r.Key)
	require.NoError(t, err)
	g := locktest.Take(t, b, r)
	require.EqualValues(t, 9223372036854775807, g.Fence)
	require.NoError(t, b.Release(t.Context(), g))
	_, err = b.TryAcquire(t.Context(), r)
	require.ErrorContains(t, err, "out of range")
	require.Nil(t, read(t, pool, r.Key).Owner)
}

// To the microsecond, on the database's clock.
func TestExpiryIsExact(t *testing.T) {
	b, pool := newBackend(t)
	_, err := b.TryAcquire(t.Context(), locktest.Request(time.Hour+1))
	require.ErrorIs(t, err, dlock.ErrInvalid)
	for _, ttl := range []time.Duration{time.Microsecond, 1234567 * time.Microsecond, 400 * 24 * time.Hour, 200 * 365 * 24 * time.Hour} {
		tx, err := pool.Begin(t.Context())
		require.NoError(t, err)
		var before, after time.Time
		require.NoError(t, tx.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&before))
		require.NoError(t, tx.Rollback(t.Context()))
		r := locktest.Request(ttl)
		locktest.Take(t, b, r)
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&after))
		began := read(t, pool, r.Key).Expires.Add(-ttl)
		require.False(t, began.Before(before), "TTL %v: began %v before %v", ttl, began, before)
		require.False(t, began.After(after), "TTL %v: began %v after %v", ttl, began, after)
	}
}

func TestExpiredIsLost(t *testing.T) {
	b, pool := newBackend(t)
	g := locktest.Take(t, b, locktest.Request(time.Microsecond))
	expires := read(t, pool, g.Key).Expires // later than the grant: the microsecond has passed
	require.ErrorIs(t, b.Renew(t.Context(), g), dlock.ErrLost)
	require.ErrorIs(t, b.Release(t.Context(), g), dlock.ErrLost)
	for _, key := range []string{g.Key, g.Key + "new"} {
		require.ErrorIs(t, b.Release(t.Context(), dlock.Grant{Key: key, Owner: g.Owner}), dlock.ErrLost, "nothing to undo")
	}
	require.Equal(t, expires, read(t, pool, g.Key).Expires)
}

// lockRow locks r.Key's row, so that b's next request waits.
func lockRow(t *testing.T, b dlock.Backend, r dlock.Request) (unlock func()) {
	t.Helper()
	require.NoError(t, b.Release(t.Context(), locktest.Take(t, b, r)))
	tx, err := newPool(t).Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT FROM fencelab_lock WHERE key = $1 FOR UPDATE", r.Key)
	require.NoError(t, err)
	unlock = sync.OnceFunc(func() { require.NoError(t, tx.Rollback(context.Background())) })
	t.Cleanup(unlock)
	return unlock
}

func awaitBlocked(t *testing.T) {
	t.Helper()
	require.Eventually(t, blocked(t, "Takes the lock"), 30*time.Second, 5*time.Millisecond)
}

func blocked(t *testing.T, text string) func() bool {
	t.Helper()
	pool := newPool(t)
	return func() (blocked bool) {
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE wait_event_type = 'Lock' AND query LIKE '%' || $1 || '%')`, text).Scan(&blocked))
		return blocked
	}
}

func TestLeaseBeginsAfterTheWaitForTheRow(t *testing.T) {
	b, _ := newBackend(t)
	r := locktest.Request(time.Hour)
	unlock := lockRow(t, b, r)
	won := locktest.Acquire(t.Context(), b, r)
	awaitBlocked(t)
	pool := newPool(t)
	var freed time.Time
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&freed))
	unlock()
	locktest.Won(t, won)
	began := read(t, pool, r.Key).Expires.Add(-r.TTL)
	require.False(t, began.Before(freed), "the lease began %v before it could be granted", freed.Sub(began))
}

// Another takes the row for which a waiter's request waits, so the reply doesn't say how long that lease lasts.
func TestWaiterOvertaken(t *testing.T) {
	c := newContest(t)
	won := c.first(c.next(time.Hour))
	_, err := c.watch.Exec(t.Context(), "UPDATE fencelab_lock SET owner = NULL WHERE key = $1", c.g.Key)
	require.NoError(t, err)
	tx, err := newPool(t).Begin(t.Context())
	require.NoError(t, err)
	defer func() { _ = tx.Rollback(context.Background()) }()
	_, err = tx.Exec(t.Context(), "UPDATE fencelab_lock SET owner = 'other', expires = clock_timestamp() + '1 s' WHERE key = $1", c.g.Key)
	require.NoError(t, err)
	_, err = c.watch.Exec(t.Context(), "SELECT pg_notify('fencelab_released', $1)", c.g.Key)
	require.NoError(t, err)
	awaitBlocked(t)
	require.NoError(t, tx.Commit(t.Context()))
	locktest.Won(t, won)
}

func TestTryInVainWritesNothing(t *testing.T) {
	b, pool := newBackend(t)
	r := locktest.Request(time.Hour)
	locktest.Take(t, b, r)
	version := func() (v string) {
		require.NoError(t, pool.QueryRow(t.Context(),
			"SELECT ctid::text || xmin::text || xmax::text FROM fencelab_lock WHERE key = $1", r.Key).Scan(&v))
		return v
	}
	before := version()
	_, err := b.TryAcquire(t.Context(), locktest.Next(r.Key, time.Hour))
	require.ErrorIs(t, err, dlock.ErrHeld)
	require.Equal(t, before, version())
}

func TestNotified(t *testing.T) {
	for _, undo := range []bool{false, true} {
		c := newContest(t)
		won := c.first(c.next(time.Hour))
		if undo {
			c.g = dlock.Grant{Key: c.g.Key, Owner: c.g.Owner, TTL: c.g.TTL}
		}
		c.release()
		require.EqualValues(t, 2, locktest.Won(t, won).Fence)
	}
}

func TestListenerKilled(t *testing.T) {
	app, name := named()
	c := newContest(t, name)
	other := locktest.Take(t, c.a, locktest.Request(time.Hour))
	won := c.first(c.next(time.Hour))
	wonOther := locktest.Acquire(t.Context(), c.b, locktest.Next(other.Key, time.Hour))
	<-c.asked
	<-c.asked // in the queue
	pid := listener(t, c.watch, app)
	heal := c.deafen()
	defer heal()
	_, err := c.watch.Exec(t.Context(), "SELECT pg_terminate_backend($1, 10000)", pid)
	require.NoError(t, err)
	for range 2 { // each waiter polls
		locktest.Receive(t, c.asked)
	}
	<-c.wanted
	c.release() // nobody is notified
	locktest.Release(t, c.a, other)
	heal()
	w := locktest.Won(t, won)
	locktest.Won(t, wonOther)
	for len(c.asked) > 0 {
		<-c.asked
	}

	won = c.another(time.Hour)
	<-c.asked // it sleeps, and the new connection listens
	require.NotEqual(t, pid, listener(t, c.watch, app))
	locktest.Release(t, c.a, w)
	locktest.Won(t, won)
}

// mutable is a connection on which nothing arrives once it is muted.
type mutable struct {
	net.Conn
	mute atomic.Bool
}

func (m *mutable) Read(b []byte) (int, error) {
	for {
		n, err := m.Conn.Read(b)
		if err != nil || !m.mute.Load() {
			return n, err
		}
	}
}

// An idle connection is tested; one that doesn't reply is replaced.
func TestListenerSilent(t *testing.T) {
	c := newContest(t, func(o *pgxpool.Config) {
		o.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := new(net.Dialer).DialContext(ctx, network, addr)
			return &mutable{Conn: c}, err
		}
	})
	c.b.Patience(time.Second)
	won := c.first(c.next(time.Hour))
	for <-c.asked != "SELECT 1" { // a stall may replace the connection
		continue
	}
	c.mu.Lock()
	c.listener.(*mutable).mute.Store(true)
	c.mu.Unlock()
	c.release()
	locktest.Won(t, won)
}

func TestListenerSlow(t *testing.T) {
	c := newContest(t)
	c.b.Patience(200 * time.Millisecond)
	c.slow = 300 * time.Millisecond
	locktest.Acquire(t.Context(), c.b, c.next(time.Hour))
	locktest.Eventually(t, func() bool {
		for len(c.asked) > 0 {
			if <-c.asked == "SELECT 1" {
				return true
			}
		}
		return false
	})
}

func TestOtherKey(t *testing.T) {
	c := newContest(t)
	other := locktest.Take(t, c.a, locktest.Request(time.Hour))
	first := c.first(c.next(time.Hour))
	second := locktest.Acquire(t.Context(), c.b, locktest.Next(other.Key, time.Hour))
	<-c.asked
	<-c.asked // in the queue
	c.release()
	locktest.Won(t, first)
	locktest.Take(t, c.b, locktest.Request(time.Hour)) // on the one connection, after earlier statements
	require.Len(t, c.asked, 2, "the waiter for the other key sleeps on")
	locktest.Release(t, c.a, other)
	locktest.Won(t, second)
}

func TestRecheck(t *testing.T) {
	c := newContest(t)
	c.b.Recheck(20 * time.Millisecond)
	won := locktest.Acquire(t.Context(), c.b, c.next(time.Hour))
	c.settled()
	_, err := c.watch.Exec(t.Context(), "UPDATE fencelab_lock SET owner = NULL WHERE key = $1", c.g.Key)
	require.NoError(t, err)
	locktest.Won(t, won)
}

func TestFiftyWaiters(t *testing.T) {
	const waiters = 50
	app, name := named()
	c := newContest(t, name, func(c *pgxpool.Config) { c.MaxConns = 4 })
	all := make(chan locktest.Outcome, waiters)
	for range waiters {
		won := locktest.Acquire(t.Context(), c.b, c.next(time.Hour))
		go func() { all <- <-won }()
	}
	for range waiters + 3 { // each polls once, the first again in the queue; LISTEN; the first again
		<-c.asked
	}
	c.release()
	last := c.g.Fence
	for range waiters {
		w := locktest.Won(t, all)
		require.Equal(t, last+1, w.Fence)
		last = w.Fence
		locktest.Release(t, c.a, w)
	}
	listener(t, c.watch, app) // only one
	require.LessOrEqual(t, len(c.asked), 3*waiters, "statements for %d grants", waiters)
	require.Zero(t, c.b.Waiting())
}

func TestTurnIsHandedOn(t *testing.T) {
	c := newContest(t)
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	first := locktest.Acquire(ctx, c.b, c.next(time.Hour))
	c.settled()
	second := c.another(time.Hour)
	why := errors.New("enough")
	cancel(why)
	require.ErrorIs(t, locktest.Receive(t, first).Err, why)
	c.release()
	locktest.Won(t, second)
}

// The new holder, of the same Backend, dies.
func TestWaitersLearnOfTheNewHolder(t *testing.T) {
	c := newContest(t)
	const ttl = 50 * time.Millisecond
	won := []<-chan locktest.Outcome{c.first(c.next(ttl)), c.another(ttl), c.another(ttl)}
	c.release()
	for _, w := range won {
		locktest.Won(t, w)
	}
}

// The lock was granted on it.
func TestSilentConnection(t *testing.T) {
	d := newDialer()
	c := newContest(t, d.over)
	c.b.Patience(3 * time.Second) // longer than anything else takes
	first := c.next(time.Hour)
	won := c.first(first)
	behind := c.another(time.Hour)
	heal := d.Link().HoldReplies()
	defer heal()
	c.release()
	require.Eventually(t, func() bool { return d.Lost() > 0 }, 10*time.Second, time.Millisecond)
	require.Eventually(t, func() bool {
		owner := read(t, c.watch, first.Key).Owner
		return owner != nil && *owner == first.Owner
	}, 10*time.Second, time.Millisecond)
	heal()
	w := locktest.Won(t, won)
	require.EqualValues(t, 2, w.Fence)
	locktest.Release(t, c.b, w)
	locktest.Won(t, behind)
}

// A waiter retries after one patience and gives up after three, even with a shorter TTL.
func TestSilentServer(t *testing.T) {
	d := newDialer()
	c := newContest(t, d.over)
	const patience = time.Second
	c.b.Patience(patience)
	won := c.first(c.next(time.Microsecond))
	heal := d.Link().HoldReplies()
	defer heal()
	released := time.Now()
	c.release()
	require.ErrorContains(t, locktest.Receive(t, won).Err, "no answer in time")
	require.GreaterOrEqual(t, time.Since(released), 3*patience)
	require.LessOrEqual(t, d.Lost(), 2, "the second request has twice the time")
}

func TestSilentTry(t *testing.T) {
	d := newDialer()
	b, _ := newBackend(t, d.over)
	b.Patience(100 * time.Millisecond)
	defer d.Link().HoldReplies()()
	for _, acquire := range []func(context.Context, dlock.Request) (dlock.Grant, error){b.TryAcquire, b.Acquire} {
		_, err := acquire(context.Background(), locktest.Request(time.Microsecond))
		require.ErrorContains(t, err, "no answer in time")
	}
}

func TestPoolExhausted(t *testing.T) {
	b, pool := newBackend(t, func(c *pgxpool.Config) { c.MaxConns = 1 })
	b.Patience(10 * time.Millisecond)
	c, err := pool.Acquire(t.Context())
	require.NoError(t, err)
	defer c.Release()
	_, err = b.TryAcquire(t.Context(), locktest.Request(time.Millisecond))
	require.EqualError(t, err, "pglock: no answer in time: get a connection from the pool: context deadline exceeded")
}

// The listener isn't ready yet.
func TestClosedBeforeListening(t *testing.T) {
	c := newContest(t)
	heal := c.deafen()
	defer heal()
	waits := locktest.Acquire(t.Context(), c.b, c.next(time.Hour))
	<-c.asked
	<-c.asked // in the queue
	<-c.wanted
	closed := make(chan error, 1)
	go func() { closed <- c.b.Close() }()
	require.ErrorIs(t, locktest.Receive(t, waits).Err, dlock.ErrClosed)
	heal()
	require.NoError(t, locktest.Receive(t, closed))
}

func TestClosedWhileSilent(t *testing.T) {
	d := newDialer()
	c := newContest(t, d.over)
	c.b.Patience(time.Hour)
	r := c.next(time.Hour)
	first, behind := c.first(r), c.another(time.Hour)
	heal := d.Link().HoldReplies()
	defer heal()
	c.release()
	locktest.Eventually(t, func() bool { return read(t, c.watch, r.Key).Owner != nil })
	require.NoError(t, c.b.Close())
	require.ErrorIs(t, locktest.Receive(t, behind).Err, dlock.ErrClosed)
	heal()
	locktest.Receive(t, first)
}

func (d dialer) counted() (dials *atomic.Int32, set func(*pgxpool.Config)) {
	dials = new(atomic.Int32)
	return dials, func(c *pgxpool.Config) {
		c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			dials.Add(1)
			return d.DialContext(ctx, network, addr)
		}
	}
}

// Even if the server had granted the lock.
func TestWaitersBearABrokenLink(t *testing.T) {
	d := newDialer()
	link := d.Link()
	for name, fault := range map[string]func() (heal func()){
		"requests lost": link.LoseRequests, "replies lost": link.LoseReplies, "cut": link.Cut,
	} {
		t.Run(name, func(t *testing.T) {
			dials, set := d.counted()
			c := newContest(t, set)
			r := c.next(time.Hour)
			first, behind := c.first(r), c.another(time.Hour)
			heal, before := fault(), dials.Load()
			defer heal()
			c.release()
			locktest.Eventually(t, func() bool { return dials.Load() >= before+4 || len(first) > 0 })
			if name == "replies lost" {
				require.Equal(t, r.Owner, *read(t, c.watch, r.Key).Owner)
			}
			heal()
			w := locktest.Won(t, first)
			require.EqualValues(t, 2, w.Fence)
			locktest.Release(t, c.b, w)
			require.EqualValues(t, 3, locktest.Won(t, behind).Fence)
		})
	}
}

// Temporary errors are retried with growing pauses, others returned at once.
func TestErrorsWhileWaiting(t *testing.T) {
	for state, passes := range map[string]bool{"57P03": true, "25006": true, "42501": false, "28P01": false} {
		t.Run(state, func(t *testing.T) {
			c := newContest(t)
			won := c.first(c.next(time.Hour))
			name := "fails_" + strings.ReplaceAll(uuid.NewString(), "-", "")
			_, err := c.watch.Exec(t.Context(), strings.NewReplacer("NAME", name, "KEY", c.g.Key, "STATE", state).Replace(`
				CREATE SEQUENCE NAME; -- no rollback changes it
				CREATE FUNCTION NAME() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
					IF nextval('NAME') <= 5 THEN RAISE 'fails' USING ERRCODE = 'STATE'; END IF;
					RETURN NEW;
				END $$;
				CREATE TRIGGER NAME BEFORE INSERT ON fencelab_lock FOR EACH ROW WHEN (NEW.key = 'KEY') EXECUTE FUNCTION NAME()`))
			require.NoError(t, err)
			t.Cleanup(func() {
				_, err := c.watch.Exec(context.Background(), strings.ReplaceAll("DROP FUNCTION NAME CASCADE; DROP SEQUENCE NAME", "NAME", name))
				require.NoError(t, err)
			})
			released := time.Now()
			c.release()
			if passes {
				locktest.Won(t, won)
				require.Greater(t, time.Since(released), 700*time.Millisecond) // at least half of 50, 100, 200, 400 and 800 ms
				return
			}
			var e *pgconn.PgError
			require.ErrorAs(t, locktest.Receive(t, won).Err, &e)
			require.Equal(t, state, e.Code)
			var tries int
			require.NoError(t, c.watch.QueryRow(t.Context(), "SELECT last_value FROM "+name).Scan(&tries))
			require.Equal(t, 1, tries)
		})
	}
}

func TestPasses(t *testing.T) {
	states := map[string]bool{
		"08000": true, "08006": true, "08P01": true, "25006": true, "53300": true, "57P01": true, "57P02": true, "57P03": true, "57P05": true,
		"22021": false, "25001": false, "28000": false, "28P01": false, "3D000": false, "40P01": false, "42501": false, "42P01": false,
		"53100": false, "57014": false, "57P04": false, "XX000": false,
	}
	// dial returns what pgx makes of an error while connecting.
	dial := func(err error) error {
		c, perr := pgconn.ParseConfig("postgres://h/d?sslmode=disable")
		require.NoError(t, perr)
		c.LookupFunc = func(context.Context, string) ([]string, error) { return nil, err }
		_, err = pgconn.ConnectConfig(t.Context(), c)
		return err
	}
	for state, want := range states {
		err := &pgconn.PgError{Code: state}
		require.Equal(t, want, pglock.Passes(fmt.Errorf("pglock: %w", err)), "%v", err)
		require.Equal(t, want, pglock.Passes(dial(err)), "%v while it connects", err)
	}
	reset := &net.OpError{Op: "read", Err: syscall.ECONNRESET}
	for _, err := range []error{dial(errors.New("standby")), reset, syscall.ETIMEDOUT, io.ErrUnexpectedEOF, notSentError{}} {
		require.True(t, pglock.Passes(fmt.Errorf("pglock: %w", err)), "%v", err)
	}
	for _, err := range []error{errors.New("closed pool"), dlock.ErrClosed, dlock.ErrInvalid} {
		require.False(t, pglock.Passes(err), "%v", err)
	}
}

type notSentError struct{}

func (notSentError) Error() string     { return "conn closed" }
func (notSentError) SafeToRetry() bool { return true }

// Each after its TTL, or three times its patience if that is longer, since the last reply.
func TestWaitersGiveUp(t *testing.T) {
	d := newDialer()
	dials, set := d.counted()
	c := newContest(t, set)
	const patience, least, ttl = 500 * time.Millisecond, 1500 * time.Millisecond, 3 * time.Second
	c.b.Patience(patience)
	first, behind := c.first(c.next(time.Microsecond)), c.another(ttl)
	d.LoseReply()
	_, err := c.watch.Exec(t.Context(), "SELECT pg_notify('fencelab_released', $1)", c.g.Key)
	require.NoError(t, err)
	<-c.asked // the reply is lost
	<-c.asked // it retries
	time.Sleep(least)
	cut, before := time.Now(), dials.Load()
	defer d.Link().Cut()()
	one, other := locktest.Receive(t, first), locktest.Receive(t, behind)
	require.ErrorIs(t, one.Err, io.EOF)
	require.ErrorIs(t, other.Err, io.EOF)
	require.GreaterOrEqual(t, one.At.Sub(cut), least)
	require.GreaterOrEqual(t, other.At.Sub(cut), ttl)
	require.Less(t, other.At.Sub(one.At), ttl, "counted anew for the second")
	require.Less(t, dials.Load()-before, int32(50), "the listener and the waiter pause, longer each time")
}

// When the server is silent, the second's own poll would take as long again.
func TestWaitersGiveUpTogether(t *testing.T) {
	d := newDialer()
	_, set := d.counted()
	c := newContest(t, set)
	const patience = time.Second
	c.b.Patience(patience)
	first, behind := c.first(c.next(time.Microsecond)), c.another(time.Microsecond)
	defer d.Link().HoldReplies()()
	_, err := c.watch.Exec(t.Context(), "SELECT pg_notify('fencelab_released', $1)", c.g.Key)
	require.NoError(t, err)
	one, other := locktest.Receive(t, first), locktest.Receive(t, behind)
	require.Error(t, one.Err)
	require.Equal(t, one.Err, other.Err)
	require.Less(t, other.At.Sub(one.At), patience)
}

func TestEndedWhileFailing(t *testing.T) {
	d := newDialer()
	dials, set := d.counted()
	c := newContest(t, set)
	l, err := dlock.New(c.b, &dlock.Options{TTL: time.Hour})
	require.NoError(t, err)
	why := errors.New("enough")
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	left := make(chan error, 1)
	go func() {
		_, err := l.Acquire(ctx, c.g.Key)
		left <- err
	}()
	c.settled()
	behind := c.another(time.Hour)
	heal := d.Link().LoseReplies()
	defer heal()
	c.release()
	locktest.Eventually(t, func() bool { return d.Lost() >= 3 })
	cancel(why)
	require.ErrorIs(t, locktest.Receive(t, left), why)
	heal()
	w := locktest.Won(t, behind) // the lease expires
	require.EqualValues(t, 3, w.Fence)

	waits := locktest.Acquire(t.Context(), c.b, c.next(time.Hour))
	locktest.Eventually(t, func() bool { return c.b.Waiting() > 0 })
	before := dials.Load()
	defer d.Link().Cut()()
	locktest.Eventually(t, func() bool { return dials.Load() >= before+4 })
	require.NoError(t, l.Close())
	require.ErrorIs(t, locktest.Receive(t, waits).Err, dlock.ErrClosed)
}

// Its commit takes long.
func TestUndoOfAnUncommittedRow(t *testing.T) {
	for _, isolation := range []string{"read committed", "serializable"} {
		t.Run(isolation, func(t *testing.T) {
			b, pool := newBackend(t, func(c *pgxpool.Config) {
				c.ConnConfig.RuntimeParams["default_transaction_isolation"] = isolation
			})
			r := locktest.Request(time.Hour)
			tx, err := newPool(t).Begin(t.Context())
			require.NoError(t, err)
			defer func() { _ = tx.Rollback(context.Background()) }()
			_, err = tx.Exec(t.Context(), "INSERT INTO fencelab_lock VALUES ($1, $2, 1, clock_timestamp() + $3::interval)", r.Key, r.Owner, r.TTL)
			require.NoError(t, err)
			undone := make(chan error, 1)
			go func() { undone <- b.Release(t.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL}) }()
			waits := blocked(t, "Frees the lock")
			require.Eventually(t, func() bool { return waits() || len(undone) > 0 }, 30*time.Second, 5*time.Millisecond)
			require.NoError(t, tx.Commit(t.Context()))
			require.NoError(t, <-undone)
			require.Nil(t, read(t, pool, r.Key).Owner)
			require.EqualValues(t, 2, locktest.Take(t, b, locktest.Next(r.Key, time.Hour)).Fence)
		})
	}
}

// As the package doc advises.
func TestCancelledRequest(t *testing.T) {
	b, pool := newBackend(t, testmain.Cancels)
	r := locktest.Request(time.Hour)
	r.OnHeld = func() { t.Error("nobody had the lock") }
	unlock := lockRow(t, b, r)
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	failed := make(chan error, 1)
	go func() {
		_, err := b.Acquire(ctx, r)
		failed <- err
	}()
	awaitBlocked(t)
	why := fmt.Errorf("another lock: %w", dlock.ErrHeld) // not the server's answer, after which it would listen
	cancel(why)
	require.ErrorIs(t, <-failed, why)
	unlock()
	require.Nil(t, read(t, pool, r.Key).Owner)
	require.EqualValues(t, 1, pool.Stat().NewConnsCount())
}

// A listening connection has no statement to cancel, so it must not wait for that.
func TestClosedWhileListening(t *testing.T) {
	var dialled, open atomic.Int32
	c := newContest(t, testmain.Cancels, func(c *pgxpool.Config) {
		c.ConnConfig.DialFunc = func(ctx context.Context, network, addr string) (net.Conn, error) {
			dialled.Add(1)
			open.Add(1)
			conn, err := new(net.Dialer).DialContext(ctx, network, addr)
			return slowlyClosed{conn, sync.OnceFunc(func() {
				time.Sleep(50 * time.Millisecond)
				open.Add(-1)
			})}, err
		}
	})
	waits := c.first(c.next(time.Hour))
	before := dialled.Load()
	closed := make(chan error, 1)
	go func() { closed <- c.b.Close() }()
	require.NoError(t, locktest.Receive(t, closed))
	require.ErrorIs(t, locktest.Receive(t, waits).Err, dlock.ErrClosed)
	require.Equal(t, before, dialled.Load())
	require.EqualValues(t, 1, open.Load(), "the pool's; Close waits for the end of the listener's")
}

type slowlyClosed struct {
	net.Conn
	first func()
}

func (c slowlyClosed) Close() error {
	c.first()
	return c.Conn.Close()
}

func TestOtherEncoding(t *testing.T) {
	_, admin := newBackend(t)
	name := "latin_" + strings.ReplaceAll(uuid.NewString(), "-", "")
	_, err := admin.Exec(t.Context(), fmt.Sprintf("CREATE DATABASE %s ENCODING 'LATIN1' LC_COLLATE 'C' LC_CTYPE 'C' TEMPLATE template0", name))
	require.NoError(t, err)
	t.Cleanup(func() {
		_, err := admin.Exec(context.Background(), "DROP DATABASE "+name+" WITH (FORCE)")
		require.NoError(t, err)
	})
	b, pool := newBackend(t, func(c *pgxpool.Config) {
		c.ConnConfig.Database = name
		c.ConnConfig.RuntimeParams["client_encoding"] = "UTF8"
	})
	require.NoError(t, pglock.CreateSchema(t.Context(), pool, nil))
	locktest.Take(t, b, dlock.Request{Key: "caf\u00e9", Owner: "o", TTL: time.Hour})
	_, err = b.TryAcquire(t.Context(), dlock.Request{Key: "\u65e5", Owner: "o", TTL: time.Hour})
	require.ErrorIs(t, err, dlock.ErrInvalid)

	b, _ = newBackend(t, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["client_encoding"] = "EUC_JP" })
	_, err = b.TryAcquire(t.Context(), dlock.Request{Key: "\U0001f512", Owner: "o", TTL: time.Hour}) // sent as UTF-8 all the same
	require.ErrorIs(t, err, dlock.ErrInvalid)
}
