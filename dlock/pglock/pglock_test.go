package pglock_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/uuid"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/dlocktest"
	"github.com/fencelab/fencelab/dlock/pglock"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func TestConformance(t *testing.T) { conform(t, nil) }

// Above READ COMMITTED the server undoes statements that meet a concurrent one.
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
				b, _ := newBackend(t, set, d.over)
				warm(t, b)
				return b, d.Link()
			},
		}
	}})
}

// dialer disturbs statements that have been prepared before: pgx sends them with a message of type Bind first.
type dialer struct{ *dlocktest.Dialer }

func newDialer() dialer {
	return dialer{dlocktest.NewDialer((&net.Dialer{}).DialContext, func(b []byte) bool { return b[0] == 'B' })}
}

func (d dialer) over(c *pgxpool.Config) { c.ConnConfig.DialFunc = d.DialContext }

// newPool returns a pool of one connection, so that what was said of a connection holds for the next call.
func newPool(t *testing.T, set ...func(*pgxpool.Config)) *pgxpool.Pool {
	t.Helper()
	c, err := pgxpool.ParseConfig(server.URL)
	require.NoError(t, err)
	c.MaxConns = 1
	for _, f := range set {
		if f != nil {
			f(c)
		}
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), c)
	require.NoError(t, err)
	t.Cleanup(pool.Close)
	return pool
}

func newBackend(t *testing.T, set ...func(*pgxpool.Config)) (*pglock.Backend, *pgxpool.Pool) {
	t.Helper()
	pool := newPool(t, set...)
	b, err := pglock.New(pool, nil)
	require.NoError(t, err)
	return b, pool
}

// closing has a Backend closed with the test.
func closing(t *testing.T, b *pglock.Backend) *pglock.Backend {
	t.Helper()
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	return b
}

// warm prepares every statement, so that a fault meets its run and not its preparation.
func warm(t *testing.T, b *pglock.Backend) {
	t.Helper()
	g := take(t, b, request(time.Hour))
	require.NoError(t, b.Renew(t.Context(), g))
	require.NoError(t, b.Release(t.Context(), g))
	require.ErrorIs(t, b.Release(t.Context(), dlock.Grant{Key: g.Key, Owner: g.Owner}), dlock.ErrLost)
}

func request(ttl time.Duration) dlock.Request {
	return dlock.Request{Key: "test/" + uuid.NewString(), Owner: uuid.NewString(), TTL: ttl}
}

// next is a request of another owner for r's key.
func next(r dlock.Request, ttl time.Duration) dlock.Request {
	return dlock.Request{Key: r.Key, Owner: uuid.NewString(), TTL: ttl}
}

func take(t *testing.T, b dlock.Backend, r dlock.Request) dlock.Grant {
	t.Helper()
	g, err := b.TryAcquire(t.Context(), r)
	require.NoError(t, err)
	return g
}

type granted struct {
	g   dlock.Grant
	err error
}

// acquiring calls Acquire in the background.
func acquiring(t *testing.T, b dlock.Backend, r dlock.Request) <-chan granted {
	t.Helper()
	won, done := make(chan granted, 1), make(chan struct{})
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second) // sooner than a waiter asks without being woken
	go func() {
		defer close(done)
		defer cancel()
		g, err := b.Acquire(ctx, r)
		won <- granted{g, err}
	}()
	t.Cleanup(func() { <-done })
	return won
}

// listener returns the process that serves the listening connection of the application app.
func listener(t *testing.T, watch *pgxpool.Pool, app string) int32 {
	t.Helper()
	rows, err := watch.Query(t.Context(), "SELECT pid FROM pg_stat_activity WHERE application_name = $1 AND query LIKE 'LISTEN %'", app)
	require.NoError(t, err)
	pid, err := pgx.CollectExactlyOneRow(rows, pgx.RowTo[int32])
	require.NoError(t, err)
	return pid
}

// named gives a pool's connections a name of their own, which is returned.
func named() (app string, set func(*pgxpool.Config)) {
	app = "pglock-" + uuid.NewString()
	return app, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["application_name"] = app }
}

// spy tells of the statements that a pool's connections run.
type spy struct {
	asked chan string // each, once it has been answered

	mu     sync.Mutex
	deaf   chan struct{} // if not nil, LISTEN isn't sent before it is closed
	wanted chan struct{} // LISTEN waits for that
}

func newSpy() *spy { return &spy{asked: make(chan string, 1000), wanted: make(chan struct{}, 1)} }

func (s *spy) on(p *pgxpool.Config) { p.ConnConfig.Tracer = s }

// deafen holds back every LISTEN from now on, until heal is called.
func (s *spy) deafen() (heal func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	deaf := make(chan struct{})
	s.deaf = deaf
	return sync.OnceFunc(func() { close(deaf) })
}

func (s *spy) TraceQueryStart(ctx context.Context, _ *pgx.Conn, d pgx.TraceQueryStartData) context.Context {
	s.mu.Lock()
	deaf := s.deaf
	s.mu.Unlock()
	if deaf != nil && strings.HasPrefix(d.SQL, "LISTEN") {
		s.wanted <- struct{}{}
		<-deaf
	}
	return context.WithValue(ctx, s, d.SQL)
}

func (s *spy) TraceQueryEnd(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryEndData) {
	s.asked <- ctx.Value(s).(string)
}

// settled waits until the first waiter of a Backend has been refused for the last time before it sleeps: at once, in the
// queue, and again when LISTEN is in force, each in this order but for the second and LISTEN.
func (s *spy) settled() {
	for range 4 {
		<-s.asked
	}
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
	here, err := pglock.New(pool, nil)
	require.NoError(t, err)
	closing(t, here)
	r := request(time.Hour)
	require.EqualValues(t, 1, take(t, here, r).Fence)
	for _, name := range []string{"locks", `"; DROP TABLE fencelab_lock; --`, "fencelab_lock", strings.Repeat("x", 63)} {
		o := &pglock.Options{Table: pgx.Identifier{schema, name}}
		b, err := pglock.New(pool, o)
		require.NoError(t, err)
		closing(t, b)
		_, err = b.TryAcquire(t.Context(), r)
		require.ErrorContains(t, err, "CreateSchema", "a table that is missing is not made behind anyone's back")
		require.NotErrorIs(t, err, dlock.ErrInvalid)
		require.NoError(t, pglock.CreateSchema(t.Context(), pool, o))
		g := take(t, b, r)
		require.EqualValues(t, 1, g.Fence, "tables are apart")
		require.NoError(t, pglock.CreateSchema(t.Context(), pool, o), "again")
		won := acquiring(t, b, next(r, time.Hour))
		require.NoError(t, b.Release(t.Context(), g))
		require.NoError(t, (<-won).err)
	}
}

func TestCreateSchemaAtOnce(t *testing.T) {
	o := &pglock.Options{Table: pgx.Identifier{"at_once_" + strings.ReplaceAll(uuid.NewString(), "-", "")}}
	pool := newPool(t)
	errs := make(chan error)
	for range 8 {
		p := newPool(t)
		go func() { errs <- pglock.CreateSchema(t.Context(), p, o) }()
	}
	for range 8 {
		require.NoError(t, <-errs)
	}
	_, err := pool.Exec(t.Context(), "DROP TABLE "+o.Table.Sanitize())
	require.NoError(t, err)
}

// The row stays, and with it the counter, whatever ends the lease.
func TestCounterSurvives(t *testing.T) {
	b, pool := newBackend(t)
	closing(t, b)
	r := request(time.Hour)
	g := take(t, b, r)
	require.EqualValues(t, 1, g.Fence)
	require.Equal(t, r.Owner, *read(t, pool, r.Key).Owner)
	require.NoError(t, b.Release(t.Context(), g))
	free := read(t, pool, r.Key)
	require.Nil(t, free.Owner)
	require.EqualValues(t, 1, free.Fence)

	g = take(t, b, next(r, time.Microsecond))
	require.EqualValues(t, 2, g.Fence)
	w := <-acquiring(t, b, next(r, time.Hour))
	require.NoError(t, w.err)
	require.EqualValues(t, 3, w.g.Fence)
	require.ErrorIs(t, b.Release(t.Context(), g), dlock.ErrLost)
	require.Equal(t, w.g.Owner, *read(t, pool, r.Key).Owner)
}

// What a session says about the form of values changes nothing: under the simple protocol all of them are text.
func TestTextFormats(t *testing.T) {
	for _, mode := range []pgx.QueryExecMode{pgx.QueryExecModeCacheStatement, pgx.QueryExecModeSimpleProtocol} {
		for _, style := range []string{"postgres", "postgres_verbose", "sql_standard", "iso_8601"} {
			for _, ttl := range []time.Duration{400*24*time.Hour + time.Microsecond, 90 * time.Minute, 400 * time.Millisecond} {
				t.Run(fmt.Sprint(mode, "/", style, "/", ttl), func(t *testing.T) {
					holder, _ := newBackend(t)
					closing(t, holder)
					s := newSpy()
					b, _ := newBackend(t, s.on, func(c *pgxpool.Config) {
						c.ConnConfig.DefaultQueryExecMode = mode
						c.ConnConfig.RuntimeParams["IntervalStyle"] = style
					})
					closing(t, b)
					g := take(t, holder, request(ttl))
					won := acquiring(t, b, next(dlock.Request{Key: g.Key}, ttl))
					if ttl > time.Minute {
						for range 4 { // as in settled
							select {
							case <-s.asked:
							case w := <-won:
								require.Fail(t, "it doesn't wait", "%v", w.err)
							}
						}
						select {
						case <-s.asked:
							require.Fail(t, "it doesn't know how long the lease lasts")
						case <-time.After(20 * time.Millisecond):
						}
						require.NoError(t, holder.Release(t.Context(), g))
					} // else it runs out
					w := <-won
					require.NoError(t, w.err)
					require.Less(t, len(s.asked), 10)
					require.NoError(t, b.Renew(t.Context(), w.g))
					require.NoError(t, b.Release(t.Context(), w.g))
				})
			}
		}
	}
}

// A counter at its end yields an error and no lock.
func TestCounterExhausted(t *testing.T) {
	b, pool := newBackend(t)
	closing(t, b)
	r := request(time.Hour)
	require.NoError(t, b.Release(t.Context(), take(t, b, r)))
	_, err := pool.Exec(t.Context(), "UPDATE fencelab_lock SET fence = 9223372036854775806 WHERE key = $1", r.Key)
	require.NoError(t, err)
	g := take(t, b, r)
	require.EqualValues(t, 9223372036854775807, g.Fence)
	require.NoError(t, b.Release(t.Context(), g))
	_, err = b.TryAcquire(t.Context(), r)
	require.ErrorContains(t, err, "out of range")
	require.Nil(t, read(t, pool, r.Key).Owner)
}

// The lease ends by the database's clock, and is as long as was asked for to the microsecond.
func TestExpiryIsExact(t *testing.T) {
	b, pool := newBackend(t)
	closing(t, b)
	for _, ttl := range []time.Duration{time.Microsecond, 1234567 * time.Microsecond, 400 * 24 * time.Hour, 200 * 365 * 24 * time.Hour} {
		tx, err := pool.Begin(t.Context())
		require.NoError(t, err)
		var before, after time.Time
		require.NoError(t, tx.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&before))
		require.NoError(t, tx.Rollback(t.Context()))
		r := request(ttl)
		take(t, b, r)
		require.NoError(t, pool.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&after))
		began := read(t, pool, r.Key).Expires.Add(-ttl)
		require.False(t, began.Before(before), "TTL %v: began %v before %v", ttl, began, before)
		require.False(t, began.After(after), "TTL %v: began %v after %v", ttl, began, after)
	}
	for _, ttl := range []time.Duration{-time.Second, 0, 1, 999, 1001, time.Second + 1} {
		r := request(ttl)
		_, err := b.TryAcquire(t.Context(), r)
		require.ErrorIs(t, err, dlock.ErrInvalid, "TTL %v", ttl)
		require.ErrorIs(t, b.Renew(t.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner, TTL: ttl}), dlock.ErrInvalid, "TTL %v", ttl)
	}
}

// A lease that has run out isn't renewed or released, though nobody has taken its place.
func TestExpiredIsLost(t *testing.T) {
	b, pool := newBackend(t)
	closing(t, b)
	g := take(t, b, request(time.Microsecond))
	expires := read(t, pool, g.Key).Expires // asked later than granted: a microsecond has gone
	require.ErrorIs(t, b.Renew(t.Context(), g), dlock.ErrLost)
	require.ErrorIs(t, b.Release(t.Context(), g), dlock.ErrLost)
	require.Equal(t, expires, read(t, pool, g.Key).Expires)
}

// lockRow makes a row for r's key and locks it, so that b's next request for it waits for the server.
func lockRow(t *testing.T, b dlock.Backend, r dlock.Request) (unlock func()) {
	t.Helper()
	require.NoError(t, b.Release(t.Context(), take(t, b, r)))
	tx, err := newPool(t).Begin(t.Context())
	require.NoError(t, err)
	_, err = tx.Exec(t.Context(), "SELECT FROM fencelab_lock WHERE key = $1 FOR UPDATE", r.Key)
	require.NoError(t, err)
	unlock = sync.OnceFunc(func() { require.NoError(t, tx.Rollback(context.Background())) })
	t.Cleanup(unlock)
	return unlock
}

// awaitBlocked waits until an acquire does.
func awaitBlocked(t *testing.T) {
	t.Helper()
	require.Eventually(t, blocked(t, "Takes the lock"), 30*time.Second, 5*time.Millisecond)
}

// blocked returns what reports whether a statement that contains text waits for another.
func blocked(t *testing.T, text string) func() bool {
	t.Helper()
	pool := newPool(t)
	return func() (blocked bool) {
		require.NoError(t, pool.QueryRow(t.Context(), `SELECT EXISTS (SELECT FROM pg_stat_activity
			WHERE wait_event_type = 'Lock' AND query LIKE '%' || $1 || '%')`, text).Scan(&blocked))
		return blocked
	}
}

// A lease begins when it is granted, on the database's clock, and not when its request left or began to wait for the row.
func TestLeaseBeginsAfterTheWaitForTheRow(t *testing.T) {
	b, _ := newBackend(t)
	closing(t, b)
	r := request(time.Hour)
	unlock := lockRow(t, b, r)
	won := acquiring(t, b, r)
	awaitBlocked(t)
	pool := newPool(t)
	var freed time.Time
	require.NoError(t, pool.QueryRow(t.Context(), "SELECT clock_timestamp()").Scan(&freed))
	unlock()
	require.NoError(t, (<-won).err)
	began := read(t, pool, r.Key).Expires.Add(-r.TTL)
	require.False(t, began.Before(freed), "the lease began %v before it could be granted", freed.Sub(began))
}

// A try in vain writes nothing: no row version, no transaction ID, no WAL to wait for.
func TestTryInVainWritesNothing(t *testing.T) {
	b, pool := newBackend(t)
	closing(t, b)
	r := request(time.Hour)
	take(t, b, r)
	version := func() (v string) {
		require.NoError(t, pool.QueryRow(t.Context(),
			"SELECT ctid::text || xmin::text || xmax::text FROM fencelab_lock WHERE key = $1", r.Key).Scan(&v))
		return v
	}
	before := version()
	_, err := b.TryAcquire(t.Context(), next(r, time.Hour))
	require.ErrorIs(t, err, dlock.ErrHeld)
	require.Equal(t, before, version())
}

// A release wakes a waiter of another Backend, long before the holder's lease ends.
func TestNotified(t *testing.T) {
	a, _ := newBackend(t)
	spy := newSpy()
	b, _ := newBackend(t, spy.on)
	closing(t, a)
	closing(t, b)
	r := request(time.Hour)
	g := take(t, a, r)
	won := acquiring(t, b, next(r, time.Hour))
	spy.settled()
	require.NoError(t, a.Release(t.Context(), g))
	w := <-won
	require.NoError(t, w.err)
	require.EqualValues(t, 2, w.g.Fence)
}

// A release while the listening connection was gone is heard of all the same.
func TestListenerKilled(t *testing.T) {
	app, name := named()
	spy := newSpy()
	a, watch := newBackend(t)
	b, _ := newBackend(t, name, spy.on)
	closing(t, a)
	closing(t, b)
	r := request(time.Hour)
	g := take(t, a, r)
	won := acquiring(t, b, next(r, time.Hour))
	spy.settled()
	pid := listener(t, watch, app)
	heal := spy.deafen()
	defer heal()
	_, err := watch.Exec(t.Context(), "SELECT pg_terminate_backend($1, 10000)", pid)
	require.NoError(t, err)
	<-spy.asked // the waiter has looked what was up
	<-spy.wanted
	require.NoError(t, a.Release(t.Context(), g)) // nobody hears it
	heal()
	w := <-won
	require.NoError(t, w.err)
	for len(spy.asked) > 0 {
		<-spy.asked
	}

	won = acquiring(t, b, next(r, time.Hour))
	<-spy.asked
	<-spy.asked // it sleeps, and the new connection listens
	require.NotEqual(t, pid, listener(t, watch, app))
	require.NoError(t, a.Release(t.Context(), w.g))
	require.NoError(t, (<-won).err)
}

// One Backend has one listening connection, and its waiters for a key ask in turn: a release costs the same with fifty
// as with two.
func TestFiftyWaiters(t *testing.T) {
	const waiters = 50
	app, name := named()
	spy := newSpy()
	a, watch := newBackend(t)
	b, _ := newBackend(t, name, spy.on, func(c *pgxpool.Config) { c.MaxConns = 4 })
	closing(t, a)
	closing(t, b)
	r := request(time.Hour)
	g := take(t, a, r)
	var won [waiters]<-chan granted
	all := make(chan granted, waiters)
	for i := range won {
		won[i] = acquiring(t, b, next(r, time.Hour))
		go func() { all <- <-won[i] }()
	}
	for range waiters + 3 { // each asks once, the first again in the queue, then it listens, then the first asks again
		<-spy.asked
	}
	require.NoError(t, a.Release(t.Context(), g))
	last := g.Fence
	for range waiters {
		w := <-all
		require.NoError(t, w.err)
		require.Equal(t, last+1, w.g.Fence)
		last = w.g.Fence
		require.NoError(t, a.Release(t.Context(), w.g))
	}
	listener(t, watch, app) // one
	require.LessOrEqual(t, len(spy.asked), 3*waiters, "statements for %d grants", waiters)
}

// A waiter that gives up hands its turn on: the one behind it hears of the release.
func TestTurnIsHandedOn(t *testing.T) {
	a, _ := newBackend(t)
	closing(t, a)
	spy := newSpy()
	b, _ := newBackend(t, spy.on)
	closing(t, b)
	r := request(time.Hour)
	g := take(t, a, r)
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	first := make(chan error, 1)
	go func() {
		_, err := b.Acquire(ctx, next(r, time.Hour))
		first <- err
	}()
	spy.settled()
	second := acquiring(t, b, next(r, time.Hour))
	<-spy.asked // it has been refused, and queues up
	why := errors.New("enough")
	cancel(why)
	require.ErrorIs(t, <-first, why)
	require.NoError(t, a.Release(t.Context(), g))
	require.NoError(t, (<-second).err)
}

// A holder that took the lock over from a waiter's own Backend, and dies, doesn't keep those behind it waiting for the
// lease of the holder before.
func TestWaitersLearnOfTheNewHolder(t *testing.T) {
	a, _ := newBackend(t)
	spy := newSpy()
	b, _ := newBackend(t, spy.on)
	closing(t, a)
	closing(t, b)
	r := request(time.Hour)
	g := take(t, a, r)
	won := []<-chan granted{acquiring(t, b, next(r, 50*time.Millisecond))}
	spy.settled()
	for range 2 {
		won = append(won, acquiring(t, b, next(r, 50*time.Millisecond)))
		<-spy.asked
	}
	require.NoError(t, a.Release(t.Context(), g))
	for _, c := range won { // none of them releases
		require.NoError(t, (<-c).err)
	}
}

// A waiter whose connection goes silent while it is its turn asks again on another, although it had been granted the lock,
// and those behind it get on.
func TestSilentConnection(t *testing.T) {
	a, watch := newBackend(t)
	d, spy := newDialer(), newSpy()
	b, _ := newBackend(t, d.over, spy.on)
	b.Patience(3 * time.Second) // nothing else takes so long
	closing(t, a)
	closing(t, b)
	r := request(time.Hour)
	g := take(t, a, r)
	first := next(r, time.Hour)
	won := acquiring(t, b, first)
	spy.settled()
	behind := acquiring(t, b, next(r, time.Hour))
	<-spy.asked // it has been refused, and queues up
	heal := d.Link().HoldReplies()
	defer heal()
	require.NoError(t, a.Release(t.Context(), g))
	require.Eventually(t, func() bool { return d.Lost() > 0 }, 10*time.Second, time.Millisecond)
	require.Eventually(t, func() bool {
		owner := read(t, watch, r.Key).Owner
		return owner != nil && *owner == first.Owner
	}, 10*time.Second, time.Millisecond)
	heal()
	w := <-won
	require.NoError(t, w.err)
	require.EqualValues(t, 2, w.g.Fence)
	require.NoError(t, b.Release(t.Context(), w.g))
	require.NoError(t, (<-behind).err)
}

// A waiter whose server stays silent gives up.
func TestSilentServer(t *testing.T) {
	a, _ := newBackend(t)
	d, spy := newDialer(), newSpy()
	b, _ := newBackend(t, d.over, spy.on)
	b.Patience(time.Second)
	closing(t, a)
	closing(t, b)
	r := request(time.Hour)
	g := take(t, a, r)
	won := acquiring(t, b, next(r, time.Second))
	spy.settled()
	heal := d.Link().HoldReplies()
	defer heal()
	require.NoError(t, a.Release(t.Context(), g))
	require.ErrorContains(t, (<-won).err, "no answer in time")
}

// While the server cannot be reached, a waiter fails rather than wait for ever.
func TestServerGoneWhileWaiting(t *testing.T) {
	a, _ := newBackend(t)
	d, spy := newDialer(), newSpy()
	b, _ := newBackend(t, d.over, spy.on)
	closing(t, a)
	closing(t, b)
	r := request(time.Hour)
	g := take(t, a, r)
	won := acquiring(t, b, next(r, time.Hour))
	spy.settled()
	heal := d.Link().Cut()
	err := (<-won).err
	require.Error(t, err)
	require.NotErrorIs(t, err, context.DeadlineExceeded)
	heal()
	require.NoError(t, a.Release(t.Context(), g))
	require.NoError(t, (<-acquiring(t, b, next(r, time.Hour))).err)
}

// The first acquisition of a key is undone although its row is not to be seen yet, because its commit takes long.
func TestUndoOfAnUncommittedRow(t *testing.T) {
	for _, isolation := range []string{"read committed", "serializable"} {
		t.Run(isolation, func(t *testing.T) {
			b, pool := newBackend(t, func(c *pgxpool.Config) {
				c.ConnConfig.RuntimeParams["default_transaction_isolation"] = isolation
			})
			closing(t, b)
			r := request(time.Hour)
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
			require.EqualValues(t, 2, take(t, b, next(r, time.Hour)).Fence)
		})
	}
}

// Undoing what nobody has asked for, or what is another's, takes nothing and frees nothing.
func TestUndoOfNothing(t *testing.T) {
	b, pool := newBackend(t)
	closing(t, b)
	r := request(time.Hour)
	undo := dlock.Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL}
	for range 2 {
		require.ErrorIs(t, b.Release(t.Context(), undo), dlock.ErrLost)
	}
	g := take(t, b, next(r, time.Hour))
	require.ErrorIs(t, b.Release(t.Context(), undo), dlock.ErrLost)
	require.Equal(t, g.Owner, *read(t, pool, r.Key).Owner)
	require.NoError(t, b.Renew(t.Context(), g))
}

// Undoing a grant wakes those who wait.
func TestUndoNotifies(t *testing.T) {
	a, _ := newBackend(t)
	spy := newSpy()
	b, _ := newBackend(t, spy.on)
	closing(t, a)
	closing(t, b)
	r := request(time.Hour)
	take(t, a, r)
	won := acquiring(t, b, next(r, time.Hour))
	spy.settled()
	require.NoError(t, a.Release(t.Context(), dlock.Grant{Key: r.Key, Owner: r.Owner, TTL: r.TTL}))
	require.NoError(t, (<-won).err)
}

// cancels has a pool's connections ask the server to cancel what is under way when its context ends.
func cancels(c *pgxpool.Config) {
	c.ConnConfig.BuildContextWatcherHandler = func(c *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.CancelRequestContextWatcherHandler{Conn: c, DeadlineDelay: 30 * time.Second}
	}
}

// With a pool that cancels requests, as the package comment advises, one whose context ends leaves nothing behind, nor
// does it cost the connection.
func TestCancelledRequest(t *testing.T) {
	b, pool := newBackend(t, cancels)
	closing(t, b)
	r := request(time.Hour)
	unlock := lockRow(t, b, r)
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	failed := make(chan error, 1)
	go func() {
		_, err := b.Acquire(ctx, r)
		failed <- err
	}()
	awaitBlocked(t)
	why := errors.New("enough")
	cancel(why)
	require.ErrorIs(t, <-failed, why)
	unlock()
	require.Nil(t, read(t, pool, r.Key).Owner)
	require.EqualValues(t, 1, pool.Stat().NewConnsCount())
}

// A commit that is cancelled while it waits for a synchronous standby is a success to PostgreSQL, but no grant: a standby
// that is promoted would hand out the token again.
func TestCancelledBeforeReplicated(t *testing.T) {
	if server.Provider == testbed.External {
		t.Skip("an external server has the standbys that it has")
	}
	s, err := testbed.StartPostgres(t.Context(), &testbed.Options{Args: []string{"-c", "synchronous_standby_names=nobody"}})
	testbed.Need(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	there := func(c *pgxpool.Config) {
		var err error
		c.ConnConfig, err = pgx.ParseConfig(s.URL)
		require.NoError(t, err)
	}
	watch := newPool(t, there, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["synchronous_commit"] = "local" })
	require.NoError(t, pglock.CreateSchema(t.Context(), watch, nil))
	b, _ := newBackend(t, there, cancels)
	closing(t, b)
	r := request(time.Hour)
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	tried := make(chan error, 1)
	go func() {
		_, err := b.TryAcquire(ctx, r)
		tried <- err
	}()
	require.Eventually(t, func() (waits bool) {
		require.NoError(t, watch.QueryRow(t.Context(),
			"SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep')").Scan(&waits))
		return waits
	}, 30*time.Second, 5*time.Millisecond)
	why := errors.New("enough")
	cancel(why)
	require.ErrorIs(t, <-tried, why)
	require.Equal(t, r.Owner, *read(t, watch, r.Key).Owner, "the server has committed it")
}

// A key that cannot be written in the database's encoding is refused.
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
	closing(t, b)
	require.NoError(t, pglock.CreateSchema(t.Context(), pool, nil))
	take(t, b, dlock.Request{Key: "caf\u00e9", Owner: "o", TTL: time.Hour})
	_, err = b.TryAcquire(t.Context(), dlock.Request{Key: "\u65e5", Owner: "o", TTL: time.Hour})
	require.ErrorIs(t, err, dlock.ErrInvalid)
}

// The statements work in every way in which pgx can send them.
func TestExecModes(t *testing.T) {
	for _, m := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		b, _ := newBackend(t, func(c *pgxpool.Config) { c.ConnConfig.DefaultQueryExecMode = m })
		closing(t, b)
		r := request(3 * time.Hour)
		g := take(t, b, r)
		require.EqualValues(t, 1, g.Fence, "%v", m)
		_, err := b.TryAcquire(t.Context(), next(r, time.Hour))
		require.ErrorIs(t, err, dlock.ErrHeld, "%v", m)
		require.NoError(t, b.Renew(t.Context(), g), "%v", m)
		require.NoError(t, b.Release(t.Context(), g), "%v", m)
		require.ErrorIs(t, b.Release(t.Context(), g), dlock.ErrLost, "%v", m)
	}
}
