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
		testmain.Prepare(func(ctx context.Context) error { return prepare(ctx, postgresServer) }))
}

func prepare(ctx context.Context, s *testbed.Server) error {
	pool, err := pgxpool.New(ctx, s.URL)
	if err != nil {
		return err
	}
	defer pool.Close()
	_, err = pool.Exec(ctx, cas.Schema)
	return err
}
