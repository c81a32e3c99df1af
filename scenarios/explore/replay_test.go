//go:build replay

package explore_test

import (
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/explore"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// What breaks the naive lock in virtual time breaks it on a real Redis, in the same steps. The clock of a real server can't be held still
// for two grants.
func TestReplay(t *testing.T) {
	schedules, _ := recorded(t, "testdata/defects.txt")
	for _, k := range known[:8] {
		if k.is == tokenFromTime {
			continue
		}
		t.Run(string(k.is), func(t *testing.T) {
			sys, schedule := k.broken, schedules[k.is]
			virtual := sys.Run(t, schedule)
			require.NotEmpty(t, virtual.Finding)
			t.Parallel()
			server, err := testbed.StartRedis(t.Context(), &testbed.Options{})
			testbed.Need(t, err)
			t.Cleanup(func() { require.NoError(t, server.Close()) })
			sys.Serve = func(testing.TB) explore.Server { return real{t, server} }
			got := sys.Replay(t, schedule, 20)
			require.Equal(t, virtual.Trace, got.Trace)
		})
	}
}

// real is a Redis that runs in a process of its own.
type real struct {
	t *testing.T
	s *testbed.Server
}

func (r real) Dial() (net.Conn, error) { return net.Dial("tcp", r.s.Addr) } //nolint:noctx // as a server in this process

func (r real) Restart(bool) { r.t.Fatal("no schedule here restarts it") }

func (r real) Jump(time.Duration) { r.t.Fatal("its clock is the machine's") }
