package testmain

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgconn/ctxwatch"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/testbed"
)

// NoStandby is a PostgreSQL whose commits wait for a standby that doesn't exist.
type NoStandby struct {
	*testbed.Server
	watch *pgxpool.Pool // whose commits don't
}

// ServeNoStandby starts one for the test, prepared by prepare.
func ServeNoStandby(tb testing.TB, prepare func(context.Context, *pgxpool.Pool) error) *NoStandby {
	tb.Helper()
	s := &NoStandby{Server: Own(tb, testbed.StartPostgres, nil)}
	s.watch = Pool(tb, s.Server, func(c *pgxpool.Config) { c.ConnConfig.RuntimeParams["synchronous_commit"] = "local" })
	require.NoError(tb, prepare(tb.Context(), s.watch))
	s.set(tb, "nobody")
	pool := Pool(tb, s.Server)
	for waits := false; !waits; { // the server reads its settings some time later
		waits, _ = s.during(tb, func(ctx context.Context) error {
			_, err := pool.Exec(ctx, "COMMENT ON SCHEMA public IS 'written'")
			return err
		}, func(cancel func(error)) { cancel(nil) })
	}
	return s
}

// Cancels has pgx ask the server to cancel a request whose context ends, and wait for the reply.
func Cancels(c *pgxpool.Config) {
	c.ConnConfig.BuildContextWatcherHandler = func(c *pgconn.PgConn) ctxwatch.Handler {
		return &pgconn.CancelRequestContextWatcherHandler{Conn: c, DeadlineDelay: time.Minute}
	}
}

// ErrCut is the cause of the end of a context.
var ErrCut = errors.New("cut")

// Cut calls f, ends its context with [ErrCut] once its commit waits for the standby, and returns its error.
func (s *NoStandby) Cut(tb testing.TB, f func(context.Context) error) error {
	tb.Helper()
	return s.waits(tb, f, func(cancel func(error)) { cancel(ErrCut) })
}

// Arrive calls f, does without a standby once its commit waits for one, and returns f's error.
func (s *NoStandby) Arrive(tb testing.TB, f func(context.Context) error) error {
	tb.Helper()
	return s.waits(tb, f, func(func(error)) { s.set(tb, "") })
}

func (s *NoStandby) waits(tb testing.TB, f func(context.Context) error, then func(cancel func(error))) error {
	tb.Helper()
	waited, err := s.during(tb, f, then)
	require.True(tb, waited, "it doesn't wait for the standby, and returns %v", err)
	return err
}

func (s *NoStandby) during(tb testing.TB, f func(context.Context) error, then func(cancel func(error))) (waited bool, err error) {
	tb.Helper()
	ctx, cancel := context.WithCancelCause(tb.Context())
	defer cancel(nil)
	done := make(chan error, 1)
	go func() { done <- f(ctx) }()
	await := func(is bool) {
		require.Eventually(tb, func() (waits bool) {
			require.NoError(tb, s.watch.QueryRow(tb.Context(), "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE wait_event = 'SyncRep')").Scan(&waits))
			return waits == is || is && len(done) > 0
		}, time.Minute, 5*time.Millisecond)
	}
	await(true)
	if len(done) > 0 {
		return false, <-done
	}
	then(cancel)
	err = <-done
	await(false)
	return true, err
}

func (s *NoStandby) set(tb testing.TB, standbys string) {
	tb.Helper()
	for _, sql := range []string{"ALTER SYSTEM SET synchronous_standby_names = '" + standbys + "'", "SELECT pg_reload_conf()"} {
		_, err := s.watch.Exec(tb.Context(), sql)
		require.NoError(tb, err)
	}
}
