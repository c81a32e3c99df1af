//go:build replay

package explore_test

import (
	"cmp"
	"maps"
	"net"
	"slices"
	"strings"
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
			got := sys.Replay(t, schedule, 20, virtual)
			require.Equal(t, byActor(virtual.Trace), byActor(got.Trace))
		})
	}
}

// byActor sorts the lines after each step by actor: a release's reply and the next holder's grant, for example, may come in any order.
func byActor(trace string) []string {
	type line struct {
		step  int
		actor string
		text  string
	}
	var lines []line
	var last line
	for text := range strings.Lines(trace) {
		switch actor, _, _ := strings.Cut(text, ":"); {
		case strings.HasPrefix(text, ">"):
			last = line{step: last.step + 1}
		case actor[0] >= 'A' && actor[0] <= 'Z':
			last.actor = actor[:1]
		}
		last.text = text
		lines = append(lines, last)
	}
	slices.SortStableFunc(lines, func(a, b line) int { return cmp.Or(cmp.Compare(a.step, b.step), cmp.Compare(a.actor, b.actor)) })
	var sorted []string
	for _, l := range lines {
		sorted = append(sorted, l.text)
	}
	return sorted
}

type real struct {
	t *testing.T
	s *testbed.Server
}

func (r real) Dial() (net.Conn, error) { return net.Dial("tcp", r.s.Addr) } //nolint:noctx // as a server in this process

func (r real) Restart(bool) { r.t.Fatal("no schedule here restarts it") }

func (r real) Jump(time.Duration) { r.t.Fatal("its clock is the machine's") }
