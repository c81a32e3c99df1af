package consullock_test

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/fencelab/fencelab/internal/leak"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// server is the real Consul of all tests.
var server *testbed.Server

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) (code int) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	var err error
	if server, err = testbed.StartConsul(ctx, nil); err != nil {
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
	if code = m.Run(); code == 0 {
		if err := leak.Find(before); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	return code
}
