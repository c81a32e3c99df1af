package cas_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource/cas"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

var redisServer, postgresServer *testbed.Server

func TestMain(m *testing.M) {
	testmain.Run(m, testmain.Redis(&redisServer), testmain.Server(&postgresServer, testbed.StartPostgres, nil),
		testmain.PreparePostgres(&postgresServer, prepare))
}

func prepare(ctx context.Context, pool *pgxpool.Pool) error {
	_, err := pool.Exec(ctx, cas.Schema)
	return err
}
