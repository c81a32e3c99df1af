package pglock_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelab/fencelab/dlock/pglock"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

var server *testbed.Server

func TestMain(m *testing.M) {
	testmain.Run(m, testmain.Server(&server, testbed.StartPostgres, nil),
		testmain.PreparePostgres(&server, func(ctx context.Context, pool *pgxpool.Pool) error { return pglock.CreateSchema(ctx, pool, nil) }))
}
