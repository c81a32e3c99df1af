package pglock_test

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/fencelab/fencelab/dlock/pglock"
	"github.com/fencelab/fencelab/internal/leak"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// server is the real PostgreSQL of all tests.
var server *testbed.Server

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) (code int) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	var err error
	if server, err = testbed.StartPostgres(ctx, nil); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() {
		if err := server.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}()
	before := goleak.IgnoreCurrent() // the server's
	if err := prepare(ctx); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if code = m.Run(); code == 0 {
		if err := leak.Find(before); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	return code
}

func prepare(ctx context.Context) error {
	pool, err := pgxpool.New(ctx, server.URL)
	if err != nil {
		return err
	}
	defer pool.Close()
	return pglock.CreateSchema(ctx, pool, nil)
}
