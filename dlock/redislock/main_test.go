package redislock_test

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/scenarios/testbed"
)

// server is the real Redis of all tests.
var server *testbed.Server

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) (code int) {
	redis.SetLogger(silence{})
	log.SetOutput(io.Discard) // go-redis's pool logs connections that the tests break
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	var err error
	if server, err = testbed.StartRedis(ctx, nil); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() {
		if err := server.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}()
	return m.Run()
}

type silence struct{}

func (silence) Printf(context.Context, string, ...any) {}
