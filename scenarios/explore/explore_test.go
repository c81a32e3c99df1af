package explore_test

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/dlock/redlock"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/explore"
)

func init() { redis.SetLogger(quiet{}) }

// quiet drops what go-redis logs.
type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

var (
	seconds = flag.Duration("for", 0, "explore each lock for so long; 0: 60 schedules")
	seed    = flag.Uint64("seed", 1, "the first schedule's; the next ones have the following")
	update  = flag.Bool("update", false, "write testdata")
	system  = flag.String("lock", "", "explore only this lock")
)

// ordered says that goroutines of one instant run in the same order each time.
var ordered = true

// With one processor the goroutines of a bubble run in the same order each time.
func TestMain(m *testing.M) {
	runtime.GOMAXPROCS(1)
	debug.SetGCPercent(400)
	os.Exit(m.Run())
}

// mini is a Redis in this process.
type mini struct{ m *miniredis.Miniredis }

func serveRedis(tb testing.TB) explore.Server {
	tb.Helper()
	m := miniredis.NewMiniRedis()
	m.ClockTTL(true)
	tb.Cleanup(m.Close)
	return mini{m}
}

func (s mini) Dial() (net.Conn, error) { return s.m.Dial() }

func (s mini) Restart(wipe bool) {
	s.m.Close()
	if wipe {
		s.m.FlushAll()
	}
}

func (s mini) Jump(d time.Duration) { s.m.FastForward(d) }

// client connects to a server.
func client(c *explore.Client, server int) *redis.Client {
	return redis.NewClient(&redis.Options{
		Addr: c.Addr(server), Dialer: c.Dial, ReadTimeout: 3 * c.TTL, DialerRetries: 1, PoolSize: 100, ContextTimeoutEnabled: true, DisableIdentity: true,
		MinRetryBackoff:          -1, // a backoff is random
		MaintNotificationsConfig: &maintnotifications.Config{Mode: maintnotifications.ModeDisabled},
	})
}

// owned closes what a lock is on, too.
type owned struct {
	scenarios.Lock
	closers []func() error
}

func (o owned) Close() error {
	errs := []error{o.Lock.Close()}
	for _, c := range o.closers {
		errs = append(errs, c())
	}
	return errors.Join(errs...)
}

func locker(c *explore.Client, b dlock.Backend, renew bool, closers ...func() error) (scenarios.Lock, error) {
	o := &dlock.Options{TTL: c.TTL}
	if renew {
		o.Renew = dlock.Renew{Every: c.TTL / 3, MaxHold: 20 * c.TTL}
	}
	l, err := dlock.New(b, o)
	if err != nil {
		return nil, err
	}
	return owned{scenarios.FromLocker(l), closers}, nil
}

func onRedis(name string, o redislock.Options, renew bool) explore.System {
	return explore.System{
		Name: name, TTL: time.Second, Servers: 1, Serve: serveRedis, Greeting: 1,
		Open: func(c *explore.Client) (scenarios.Lock, error) {
			rdb := client(c, 0)
			b, err := redislock.New(rdb, &o)
			if err != nil {
				return nil, err
			}
			return locker(c, b, renew, b.Close, rdb.Close)
		},
	}
}

var systems = []explore.System{
	onRedis("redislock", redislock.Options{Queue: redislock.Queue{HandoffTTL: time.Second}}, false),
	onRedis("redislock-renew", redislock.Options{Queue: redislock.Queue{HandoffTTL: time.Second}}, true),
	onRedis("redislock-spin", redislock.Options{Mode: redislock.ModeSpin}, false),
	onRedlock("redlock", redlock.Options{}),
}

// onRedlock is Redlock on five nodes. Nodes that forget and clocks that jump are known to break it.
func onRedlock(name string, o redlock.Options) explore.System {
	return explore.System{
		Name: name, TTL: time.Second, Servers: 5, Serve: serveRedis, Greeting: 1, Without: []explore.Verb{explore.Wipe, explore.Jump},
		Open: func(c *explore.Client) (scenarios.Lock, error) {
			var nodes []redis.UniversalClient
			var closers []func() error
			for i := range 5 {
				rdb := client(c, i)
				nodes = append(nodes, rdb)
				closers = append(closers, rdb.Close)
			}
			b, err := redlock.New(nodes, &o)
			if err != nil {
				return nil, err
			}
			return locker(c, b, false, append([]func() error{b.Close}, closers...)...)
		},
	}
}

// The locks that run on Redis break nothing.
func TestExplore(t *testing.T) {
	known := slices.ContainsFunc(systems, func(sys explore.System) bool { return *system == "" || *system == sys.Name })
	require.True(t, known, "there is no lock %q", *system)
	for _, sys := range systems {
		if *system != "" && *system != sys.Name {
			continue
		}
		t.Run(sys.Name, func(t *testing.T) {
			t.Logf("-seed %d", *seed)
			report := sys.Explore(t, explore.Options{Seed: *seed, Schedules: few(60), For: *seconds, Log: t.Logf})
			t.Log(report)
			if report.Found != nil {
				t.Errorf("%s: %s\n%s\n%s", report.Found.Finding, report.Found.Detail, report.Schedule, report.Found.Trace)
			}
		})
	}
}

// A schedule does the same each time.
func TestReproducible(t *testing.T) {
	for _, sys := range append(systems, onNaive(none)) {
		t.Run(sys.Name, func(t *testing.T) {
			for seed := range uint64(few(25)) {
				s := sys.Random(seed, 30)
				a, b := sys.Run(t, s), sys.Run(t, s)
				require.Equal(t, a.Finding, b.Finding)
				if ordered {
					require.Equal(t, a.Trace, b.Trace, "seed %d:\n%s", seed, s)
				}
			}
		})
	}
}

// What is known to be wrong is found, and shrunk; a lock without a defect breaks nothing in as many schedules. With -update the shortest
// schedules are written to testdata.
func TestDefects(t *testing.T) {
	var all strings.Builder
	for _, is := range []defect{none, getThenDel, releaseAny, getThenSet, fromReply, tokenFromTime} {
		t.Run(string(is), func(t *testing.T) {
			sys := onNaive(is)
			o := explore.Options{Seed: 1, Schedules: most, Best: few(5)}
			if is == none {
				o.Schedules = few(most)
			}
			r := sys.Explore(t, o)
			t.Log(r)
			if is == none {
				require.Nil(t, r.Found, "%v\n%v", r.Found, r.Schedule)
				return
			}
			require.NotNil(t, r.Found)
			require.LessOrEqual(t, len(r.Schedule), 12)
			fmt.Fprintf(&all, "# It %s.\n# %s, found by schedule %d, at best in %d steps: %s\n%s\n", is, r.Found.Finding, r.First, len(r.Schedule),
				r.Found.Detail, r.Schedule)
		})
	}
	if *update {
		require.NoError(t, os.WriteFile("testdata/defects.txt", []byte(all.String()), 0o644))
	}
}

// recorded are the schedules in testdata, by the defect that they find, and what they find.
func recorded(t *testing.T) (schedules map[defect]explore.Schedule, findings map[defect]explore.Finding) {
	t.Helper()
	text, err := os.ReadFile("testdata/defects.txt")
	require.NoError(t, err)
	schedules, findings = map[defect]explore.Schedule{}, map[defect]explore.Finding{}
	for found := range strings.SplitSeq(strings.TrimSpace(string(text)), "\n\n") {
		is, rest, _ := strings.Cut(strings.TrimPrefix(found, "# It "), ".\n")
		finding, _, _ := strings.Cut(strings.TrimPrefix(rest, "# "), ",")
		schedules[defect(is)], err = explore.Parse(found)
		require.NoError(t, err)
		findings[defect(is)] = explore.Finding(finding)
	}
	return schedules, findings
}

// The recorded schedules break the lock that has the defect, and not the one that hasn't.
func TestRecorded(t *testing.T) {
	schedules, findings := recorded(t)
	require.Len(t, schedules, 5)
	for is, s := range schedules {
		broken, sound := onNaive(is), onNaive(none)
		require.Equal(t, findings[is], broken.Run(t, s).Finding, "%s:\n%s", is, s)
		require.Empty(t, sound.Run(t, s).Finding, "%s:\n%s", is, s)
	}
}

// most is how many schedules a defect may take.
const most = 300

// few is n, or less under the race detector, which makes a schedule take five times as long.
func few(n int) int {
	if ordered {
		return n
	}
	return n / 5
}

// Counters as tokens of Redlock, which its documentation calls unsound.
func TestUnsafeCounters(t *testing.T) {
	sys := onRedlock("redlock", redlock.Options{UnsafeCounters: true})
	r := sys.Explore(t, explore.Options{Seed: 1, Schedules: most})
	t.Log(r)
	require.NotNil(t, r.Found)
	require.Equal(t, explore.TokenRegress, r.Found.Finding)
	t.Logf("%s\n%s", r.Found.Detail, r.Schedule)
}
