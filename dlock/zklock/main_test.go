package zklock_test

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

// maxTimeout is the longest session timeout that the server agrees to. The kit asks for leases of an hour.
const maxTimeout = 3 * time.Hour

// server is the ZooKeeper of all tests but those of an ensemble.
var server *testbed.Server

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) (code int) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cluster, err := testbed.StartZooKeeper(ctx, 1, options())
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() {
		if err := cluster.Close(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}()
	server = cluster.Servers[0]
	before := goleak.IgnoreCurrent() // the server's
	if code = m.Run(); code == 0 {
		if err := leak.Find(before); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	return code
}

func options() *testbed.Options {
	return &testbed.Options{Args: []string{fmt.Sprintf("maxSessionTimeout=%d", maxTimeout.Milliseconds())}}
}
