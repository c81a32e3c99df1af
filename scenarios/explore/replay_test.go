//go:build replay

package explore_test

import (
	"maps"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/explore"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func TestReplay(t *testing.T) {
	schedules, _ := recorded(t, "testdata/defects.txt")
	more, _ := recorded(t, "testdata/others.txt")
	maps.Copy(schedules, more)
	for _, k := range slices.Concat(known, shortcomings) {
		if !k.played(schedules[k.is]) {
			continue
		}
		t.Run(string(k.is), func(t *testing.T) {
			sys, schedule := k.broken, schedules[k.is]
			virtual := sys.Run(t, schedule)
			require.NotEmpty(t, virtual.Finding)
			t.Parallel()
			sys.Serve = func(testing.TB) explore.Server {
				return real{t, testmain.Serve(t, testbed.StartRedis, nil)}
			}
			got := sys.Replay(t, schedule, 20)
			require.Equal(t, virtual.Trace, got.Trace)
		})
	}
}

type real struct {
	t *testing.T
	s *testbed.Server
}

func (r real) Dial() (net.Conn, error) { return net.Dial("tcp", r.s.Addr) } //nolint:noctx // as a server in this process

func (r real) Restart(bool) { r.t.Fatal("no schedule here restarts it") }

func (r real) Jump(time.Duration) { r.t.Fatal("its clock is the machine's") }
