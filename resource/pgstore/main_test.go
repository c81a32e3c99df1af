package pgstore_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource/pgstore"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// server is the PostgreSQL of all tests but those that kill theirs.
var server *testbed.Server

func TestMain(m *testing.M) {
	testmain.Run(m, testmain.Server(&server, testbed.StartPostgres, nil), testmain.PreparePostgres(&server, prepare))
}

func prepare(ctx context.Context, pool *pgxpool.Pool) error {
	if err := pgstore.CreateSchema(ctx, pool, nil); err != nil {
		return err
	}
	_, err := pool.Exec(ctx, "CREATE TABLE IF NOT EXISTS account (name text PRIMARY KEY, holders text NOT NULL)")
	return err
}
