package pglock_test

import (
	"context"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
	"github.com/fencelab/fencelab/dlock/pglock"
)

// BenchmarkPair compares with half of what a lock needs: a plain UPDATE of one row, by its key, in one durable transaction.
func BenchmarkPair(b *testing.B) {
	backend := func() (*pglock.Backend, *pgxpool.Pool) {
		c, err := pgxpool.ParseConfig(server.URL)
		require.NoError(b, err)
		c.MaxConns = 1
		p, err := pgxpool.NewWithConfig(context.Background(), c)
		require.NoError(b, err)
		b.Cleanup(p.Close)
		l, err := pglock.New(p, nil)
		require.NoError(b, err)
		return l, p
	}
	l, raw := backend()
	g, err := l.TryAcquire(b.Context(), locktest.Request(time.Hour)) // makes the row
	require.NoError(b, err)
	locktest.Release(b, l, g)
	require.NoError(b, l.Close())
	locktest.Compare(b, locktest.Pair{Name: "Update", Do: func(ctx context.Context) error {
		_, err := raw.Exec(ctx, "UPDATE fencelab_lock SET fence = fence + 1 WHERE key = $1", g.Key)
		return err
	}}, func() dlock.Backend { l, _ := backend(); return l })
}
