package testmain

import (
	"context"
	"io"
	"os"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/testbed"
)

// Serve starts a server for one test.
func Serve(tb testing.TB, start func(context.Context, *testbed.Options) (*testbed.Server, error), o *testbed.Options) *testbed.Server {
	tb.Helper()
	s, err := start(tb.Context(), o)
	return Started(tb, s, err)
}

// Own starts a server that the test may stop or configure. It skips the test if servers are the user's.
func Own(tb testing.TB, start func(context.Context, *testbed.Options) (*testbed.Server, error), o *testbed.Options) *testbed.Server {
	tb.Helper()
	if (o == nil || o.Provider == "") && os.Getenv(testbed.EnvProvider) == string(testbed.External) { // an external server would refuse arguments
		tb.Skip("not applicable to an external server: the test stops or configures it")
	}
	return Serve(tb, start, o)
}

// ServeCluster starts a cluster of n members for one test.
func ServeCluster(
	tb testing.TB, start func(ctx context.Context, n int, o *testbed.Options) (*testbed.Cluster, error), n int, o *testbed.Options,
) *testbed.Cluster {
	tb.Helper()
	c, err := start(tb.Context(), n, o)
	return Started(tb, c, err)
}

// Started closes started when the test ends, and skips the test if err says that there is no such server.
func Started[S io.Closer](tb testing.TB, started S, err error) S {
	tb.Helper()
	testbed.Need(tb, err)
	tb.Cleanup(func() { require.NoError(tb, started.Close()) })
	return started
}

// PreparePostgres calls f with a pool on s.
func PreparePostgres(s **testbed.Server, f func(context.Context, *pgxpool.Pool) error) Start {
	return Prepare(func(ctx context.Context) error {
		pool, err := pgxpool.New(ctx, (*s).URL)
		if err != nil {
			return err
		}
		defer pool.Close()
		return f(ctx, pool)
	})
}

// Pool returns a pool on s, configured by set, for one test.
func Pool(tb testing.TB, s *testbed.Server, set ...func(*pgxpool.Config)) *pgxpool.Pool {
	tb.Helper()
	c, err := pgxpool.ParseConfig(s.URL)
	require.NoError(tb, err)
	for _, f := range set {
		f(c)
	}
	pool, err := pgxpool.NewWithConfig(context.Background(), c)
	require.NoError(tb, err)
	tb.Cleanup(pool.Close)
	return pool
}
