package redlock_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"os"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"go.uber.org/goleak"

	"github.com/fencelab/fencelab/internal/leak"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// servers are the real Redis nodes of all tests.
var servers []*testbed.Server

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) (code int) {
	redis.SetLogger(silence{})
	log.SetOutput(io.Discard) // go-redis's pool logs connections that the tests break
	before := goleak.IgnoreCurrent()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	var err error
	if servers, err = testbed.StartRedisNodes(ctx, 5, nil); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	code = m.Run()
	errs := make([]error, 0, len(servers)+1)
	for _, s := range servers {
		errs = append(errs, s.Close())
	}
	errs = append(errs, leak.Find(before))
	if err := errors.Join(errs...); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return code
}

type silence struct{}

func (silence) Printf(context.Context, string, ...any) {}
