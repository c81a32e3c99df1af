package pgstore_test

import (
	"context"
	"errors"
	"strconv"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/internal/storebench"
	"github.com/fencelab/fencelab/resource/pgstore"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// go test -run '^$' -bench . ./resource/pgstore

// ways are a Store's, and transactions with a conditional upsert, with a lock on the row first, or without a guard. The server
// waits for its disk.
func ways(b *testing.B) []storebench.Way {
	b.Helper()
	server := server
	if server.Provider != testbed.External {
		server = testmain.Serve(b, testbed.StartPostgres, &testbed.Options{Args: []string{"-c", "fsync=on"}})
	}
	pool := testmain.Pool(b, server, func(c *pgxpool.Config) { c.MaxConns = 90 }) // below a server's default of 100
	require.NoError(b, prepare(b.Context(), pool))
	s, err := pgstore.New(pool, nil)
	require.NoError(b, err)
	business := func(name, against string, guard func(ctx context.Context, tx pgx.Tx, key string, token uint64) error) storebench.Way {
		return storebench.Way{Name: name, Against: against, Write: func(ctx context.Context, key string, token uint64) error {
			key = name + "/" + key
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				if err := guard(ctx, tx, key, token); err != nil {
					return err
				}
				_, err := tx.Exec(ctx, `INSERT INTO account (name, holders) VALUES ($1, $2)
					ON CONFLICT (name) DO UPDATE SET holders = excluded.holders`, key, strconv.FormatUint(token, 10))
				return err
			})
		}}
	}
	return append(storebench.Ways(s, make([]byte, 128), nil),
		business("tx-unfenced", "", func(context.Context, pgx.Tx, string, uint64) error { return nil }),
		business("tx-guard", "tx-unfenced", func(ctx context.Context, tx pgx.Tx, key string, token uint64) error {
			return pgstore.Guard(ctx, tx, key, at(token))
		}),
		business("tx-for-update", "tx-unfenced", pessimistic))
}

func pessimistic(ctx context.Context, tx pgx.Tx, key string, token uint64) error {
	var seen int64
	err := tx.QueryRow(ctx, "SELECT token::bigint FROM fencelab_fence WHERE key = $1 FOR UPDATE", key).Scan(&seen)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		_, err = tx.Exec(ctx, "INSERT INTO fencelab_fence (key, token, seq) VALUES ($1, $2, 1) ON CONFLICT DO NOTHING", key, int64(token))
		return err
	case err != nil:
		return err
	case token <= uint64(seen):
		return &resource.StaleTokenError{Key: key, Seen: at(uint64(seen)), Got: at(token)}
	}
	_, err = tx.Exec(ctx, "UPDATE fencelab_fence SET token = $2, seq = 1 WHERE key = $1", key, int64(token))
	return err
}

func BenchmarkFenceCheck(b *testing.B) {
	b.Run("store=postgres", func(b *testing.B) { storebench.FenceCheck(b, ways(b)) })
}

func BenchmarkWriters(b *testing.B) {
	b.Run("store=postgres", func(b *testing.B) { storebench.Writers(b, ways(b)) })
}
