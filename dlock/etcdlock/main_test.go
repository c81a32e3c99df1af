package etcdlock_test

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

// one and three are the etcd of all tests, of one member and of three.
var one, three *testbed.Cluster

// steady is a cluster whose leader stays: an election fails what is under way, and by default a member that stands still for
// 700 ms is voted out.
var steady = &testbed.Options{Args: []string{"--election-timeout", "5000"}}

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) (code int) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	fail := func(err error) {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	before := goleak.IgnoreCurrent()
	defer func() {
		if code == 0 {
			fail(leak.Find(before))
		}
	}()
	options := map[int]*testbed.Options{3: steady}
	for n, c := range map[int]**testbed.Cluster{1: &one, 3: &three} {
		var err error
		if *c, err = testbed.StartEtcd(ctx, n, options[n]); err != nil {
			fail(err)
			return code
		}
		defer func() { fail((*c).Close()) }()
	}
	return m.Run()
}
