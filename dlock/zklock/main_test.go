package zklock_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// maxTimeout allows for the kit's leases of an hour.
const maxTimeout = 3 * time.Hour

var (
	cluster *testbed.Cluster
	server  *testbed.Server
)

func TestMain(m *testing.M) {
	testmain.Run(m, testmain.Cluster(&cluster, testbed.StartZooKeeper, 1, options()), testmain.Prepare(func(context.Context) error {
		server = cluster.Servers[0]
		return nil
	}))
}

func options() *testbed.Options {
	return &testbed.Options{Args: []string{fmt.Sprintf("maxSessionTimeout=%d", maxTimeout.Milliseconds())}}
}
