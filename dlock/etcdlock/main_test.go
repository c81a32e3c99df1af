package etcdlock_test

import (
	"testing"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

var one, three *testbed.Cluster

// steady has a stable leader: by default a member that stops for 700 ms loses an election.
var steady = &testbed.Options{Args: []string{"--election-timeout", "5000"}}

func TestMain(m *testing.M) {
	testmain.Run(m, testmain.Cluster(&one, testbed.StartEtcd, 1, nil), testmain.Cluster(&three, testbed.StartEtcd, 3, steady))
}
