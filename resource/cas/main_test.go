package cas_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/fencelab/fencelab/internal/leak"
	"github.com/fencelab/fencelab/resource/cas"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// The real servers of all tests.
var redisServer, postgresServer *testbed.Server

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) (code int) {
	redis.SetLogger(silence{})
	log.SetOutput(io.Discard) // go-redis's pool logs connections that the tests break
	// An image may have to be pulled.
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	err := start(ctx)
	defer func() {
		if err := stop(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	before := goleak.IgnoreCurrent() // the servers'
	if code = m.Run(); code == 0 {
		if err := leak.Find(before); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	return code
}

func start(ctx context.Context) (err error) {
	if redisServer, err = testbed.StartRedis(ctx, nil); err != nil {
		return err
	}
	if postgresServer, err = testbed.StartPostgres(ctx, nil); err != nil {
		return err
	}
	return prepare(ctx, postgresServer)
}

func stop() (err error) {
	for _, s := range []*testbed.Server{redisServer, postgresServer} {
		if s != nil {
			err = errors.Join(err, s.Close())
		}
	}
	return err
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

type silence struct{}

func (silence) Printf(context.Context, string, ...any) {}
