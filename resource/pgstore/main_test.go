package pgstore_test

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/fencelab/fencelab/internal/leak"
	"github.com/fencelab/fencelab/resource/pgstore"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// server is the real PostgreSQL of all tests but those that kill theirs.
var server *testbed.Server

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) (code int) {
	// An image may have to be pulled.
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
	if err := prepare(ctx, server); err != nil {
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

// prepare makes the table of fences, and a table of business rows.
func prepare(ctx context.Context, s *testbed.Server) error {
	pool, err := pgxpool.New(ctx, s.URL)
	if err != nil {
		return err
	}
	defer pool.Close()
	if err := pgstore.CreateSchema(ctx, pool, nil); err != nil {
		return err
	}
	_, err = pool.Exec(ctx, "CREATE TABLE IF NOT EXISTS account (name text PRIMARY KEY, holders text NOT NULL)")
	return err
}
