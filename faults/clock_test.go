package faults_test

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func newClock(t *testing.T) *faults.Clock {
	t.Helper()
	if runtime.GOOS != "linux" {
		t.Skip("clock faults need Linux")
	}
	clock, err := faults.NewClock(t.Context(), t.TempDir())
	require.NoError(t, err)
	return clock
}

func startRedis(t *testing.T) (*faults.Clock, *redis.Client) {
	t.Helper()
	s := testmain.Serve(t, testbed.StartRedis, &testbed.Options{Provider: testbed.Local, Clock: true})
	client := redis.NewClient(&redis.Options{Addr: s.Addr, ContextTimeoutEnabled: true})
	t.Cleanup(func() { require.NoError(t, client.Close()) })
	return s.Clock, client
}

func requireShows(t *testing.T, client *redis.Client, clock *faults.Clock, offset time.Duration) {
	t.Helper()
	require.Equal(t, offset, clock.Offset())
	before := time.Now().Add(offset).Truncate(time.Microsecond)
	got, err := client.Time(t.Context()).Result()
	require.NoError(t, err)
	after := time.Now().Add(offset)
	require.False(t, got.Before(before) || got.After(after), "got %v, want from %v to %v", got, before, after)
}

func pttl(t *testing.T, client *redis.Client, key string) time.Duration {
	t.Helper()
	ttl, err := client.PTTL(t.Context(), key).Result()
	require.NoError(t, err)
	return ttl
}

const gone = -2 // PTTL's reply for a missing key

func TestClockJump(t *testing.T) {
	clock, client := startRedis(t)
	requireShows(t, client, clock, 0)

	start := time.Now()
	require.NoError(t, client.Set(t.Context(), "short", "x", 10*time.Second).Err())
	require.NoError(t, client.Set(t.Context(), "long", "x", time.Hour).Err())
	ahead := inForce(t)(clock.Jump(t.Context(), 20*time.Second))
	requireShows(t, client, clock, 20*time.Second)
	require.EqualValues(t, gone, pttl(t, client, "short"))
	require.LessOrEqual(t, pttl(t, client, "long"), time.Hour-20*time.Second)

	back := inForce(t)(clock.Jump(t.Context(), -60*time.Second))
	requireShows(t, client, clock, -40*time.Second)
	require.NoError(t, ahead(t.Context()))
	requireShows(t, client, clock, -60*time.Second)
	require.NoError(t, ahead(t.Context()))
	requireShows(t, client, clock, -60*time.Second)
	require.NoError(t, client.Set(t.Context(), "short", "x", 10*time.Second).Err())
	require.NoError(t, back(t.Context()))
	requireShows(t, client, clock, 0)
	require.EqualValues(t, gone, pttl(t, client, "short"), "it was to expire 50 s ago")
	long := pttl(t, client, "long")
	require.LessOrEqual(t, long, time.Hour)
	require.GreaterOrEqual(t, long, time.Hour-time.Since(start)-time.Millisecond)

	inForce(t)(clock.Jump(t.Context(), -40*time.Second))
	require.GreaterOrEqual(t, pttl(t, client, "long"), time.Hour+40*time.Second-time.Since(start)-time.Millisecond)
}

func TestClockRate(t *testing.T) {
	clock, client := startRedis(t)
	const ahead = time.Hour
	inForce(t)(clock.Jump(t.Context(), ahead))
	for _, rate := range []float64{0.001, 0.5, 2, 1000} {
		require.NoError(t, client.Set(t.Context(), "k", "x", 10*time.Second).Err())
		before := time.Now()
		heal := inForce(t)(clock.Rate(t.Context(), rate))
		after := time.Now()
		requireBusy(t)(clock.Rate(t.Context(), 2))
		requireBusy(t)(clock.Hold(t.Context()))

		// For a fault that began at an instant s between before and after, the clock shows s + rate * (now - s).
		at := func(now, s time.Time) time.Time {
			return s.Add(ahead + time.Duration(rate*float64(now.Sub(s))))
		}
		for enough := after.Add(20 * time.Millisecond); ; {
			asked := time.Now()
			got, err := client.Time(t.Context()).Result()
			require.NoError(t, err)
			answered := time.Now()
			first, last := at(asked, after), at(answered, before)
			if rate < 1 {
				first, last = at(asked, before), at(answered, after)
			}
			require.False(t, got.Before(first.Add(-time.Microsecond)) || got.After(last.Add(time.Microsecond)),
				"rate %v: got %v, want from %v to %v", rate, got, first, last)
			if asked.After(enough) {
				break
			}
		}
		if rate == 1000 {
			require.EqualValues(t, gone, pttl(t, client, "k"), "20 ms are 20 s")
		}
		require.NoError(t, heal(t.Context()))
		require.NoError(t, heal(t.Context()))
		requireShows(t, client, clock, ahead)
	}
}

func TestClockHold(t *testing.T) {
	clock, client := startRedis(t)
	heal := inForce(t)(clock.Hold(t.Context()))
	held := clock.Now()
	jump := func(d time.Duration) faults.Heal {
		back := inForce(t)(clock.Jump(t.Context(), d))
		held = held.Add(d)
		require.Equal(t, held, clock.Now())
		got, err := client.Time(t.Context()).Result()
		require.NoError(t, err)
		require.Equal(t, held.Truncate(time.Microsecond), got)
		return back
	}
	const ttl = 10 * time.Second
	require.NoError(t, client.Set(t.Context(), "k", "x", ttl).Err())
	jump(0)
	require.Equal(t, ttl, pttl(t, client, "k"))
	jump(ttl - time.Millisecond)
	require.Equal(t, time.Millisecond, pttl(t, client, "k"))
	last := jump(time.Millisecond)
	require.Zero(t, pttl(t, client, "k"), "to Redis a key lives through the millisecond at which it expires")
	back := jump(time.Millisecond)
	require.EqualValues(t, gone, pttl(t, client, "k"))

	require.NoError(t, back(t.Context()))
	require.NoError(t, last(t.Context()))
	require.NoError(t, heal(t.Context()))
	requireShows(t, client, clock, ttl-time.Millisecond)
	again := inForce(t)(clock.Hold(t.Context()))
	require.NoError(t, heal(t.Context()))
	held = clock.Now()
	jump(0)
	require.NoError(t, again(t.Context()))
}

func TestClockConfirm(t *testing.T) {
	clock, client := startRedis(t)
	ask := func(ctx context.Context) (time.Time, error) { return client.Time(ctx).Result() }
	require.NoError(t, clock.Confirm(t.Context(), ask))
	requireShows(t, client, clock, 0)

	other := newClock(t)
	require.ErrorContains(t, other.Confirm(t.Context(), ask), "doesn't follow")
	enough := errors.New("enough")
	err := clock.Confirm(t.Context(), func(context.Context) (time.Time, error) { return time.Time{}, enough })
	require.ErrorIs(t, err, enough)
	require.Zero(t, clock.Offset())
}

// clockReader reads the clock continuously until SIGTERM, then prints how far it ever went back.
const clockReader = `
#include <signal.h>
#include <stdio.h>
#include <time.h>
static volatile sig_atomic_t over;
static void end(int sig) { over = sig; }
int main(void) {
	long long last = 0, back = 0;
	signal(SIGTERM, end);
	puts("ready");
	fflush(stdout);
	while (!over) {
		struct timespec ts;
		clock_gettime(CLOCK_REALTIME, &ts);
		long long now = ts.tv_sec * 1000000000LL + ts.tv_nsec;
		if (last - now > back) back = last - now;
		last = now;
	}
	printf("%lld\n", back);
}`

// A clock that no fault sets back never goes back, even if it is stopped or its rate changes.
func TestClockNeverTorn(t *testing.T) {
	clock := newClock(t)
	reader := exec.CommandContext(context.WithoutCancel(t.Context()), compile(t, clockReader))
	reader.Env = clock.Env()
	reader.SysProcAttr = dieWithParent()
	stdout, err := reader.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, reader.Start())
	defer func() { _ = reader.Process.Kill() }()
	lines := bufio.NewReader(stdout)
	_, err = lines.ReadString('\n')
	require.NoError(t, err)
	for range 2000 {
		for _, rate := range []float64{0, 0.5, 0.999} {
			heal := inForce(t)(clock.Rate(t.Context(), rate))
			require.NoError(t, heal(t.Context()), "which sets the clock forward")
		}
		inForce(t)(clock.Jump(t.Context(), time.Millisecond))
	}
	inForce(t)(clock.Rate(t.Context(), 1000))
	require.NoError(t, reader.Process.Signal(syscall.SIGTERM))
	rest, err := io.ReadAll(lines)
	require.NoError(t, err)
	require.NoError(t, reader.Wait())
	require.Equal(t, "0\n", string(rest), "ns by which the clock went back")
}

func compile(t *testing.T, source string) (program string) {
	t.Helper()
	program = filepath.Join(t.TempDir(), "program")
	cc := exec.CommandContext(t.Context(), "cc", "-O2", "-pthread", "-x", "c", "-o", program, "-")
	cc.Stdin = strings.NewReader(source)
	output, err := cc.CombinedOutput()
	require.NoError(t, err, "%s", output)
	return program
}

// clockFunctions prints the time from each function of libc, in seconds, then the monotonic clock.
const clockFunctions = `
#include <stdio.h>
#include <sys/time.h>
#include <time.h>
int main(void) {
	struct timespec real, coarse, iso, mono;
	struct timeval day;
	time_t at;
	clock_gettime(CLOCK_REALTIME, &real);
	clock_gettime(CLOCK_REALTIME_COARSE, &coarse);
	clock_gettime(CLOCK_MONOTONIC, &mono);
	gettimeofday(&day, NULL);
	time_t now = time(&at);
	if (timespec_get(&iso, TIME_UTC) != TIME_UTC)
		return 1;
	printf("%lld %lld %lld %lld %lld %lld %lld", (long long)real.tv_sec, (long long)coarse.tv_sec, (long long)day.tv_sec,
		(long long)now, (long long)at, (long long)iso.tv_sec, (long long)mono.tv_sec);
}`

func TestClockFunctions(t *testing.T) {
	clock := newClock(t)
	program := compile(t, clockFunctions)
	ask := func() (seconds [7]int64) {
		cmd := exec.CommandContext(t.Context(), program)
		cmd.Env = clock.Env()
		output, err := cmd.Output()
		require.NoError(t, err)
		_, err = fmt.Sscan(string(output), &seconds[0], &seconds[1], &seconds[2], &seconds[3], &seconds[4], &seconds[5], &seconds[6])
		require.NoError(t, err, "%s", output)
		return seconds
	}
	before := ask()[6]
	inForce(t)(clock.Hold(t.Context()))
	inForce(t)(clock.Jump(t.Context(), time.Hour))
	got, now := ask(), clock.Now().Unix()
	mono := got[6]
	require.Equal(t, [7]int64{now, now, now, now, now, now, mono}, got)
	require.GreaterOrEqual(t, mono, before)
	require.Less(t, mono, before+3600)
}

func TestClockReaderWaits(t *testing.T) {
	clock := newClock(t)
	page, err := os.ReadFile(clock.Page())
	require.NoError(t, err)
	change := func(by uint64, shown uint64) {
		order := binary.NativeEndian
		order.PutUint64(page, order.Uint64(page)+by)
		order.PutUint64(page[16:], shown)
		order.PutUint64(page[24:], math.Float64bits(0))
		f, err := os.OpenFile(clock.Page(), os.O_WRONLY, 0)
		require.NoError(t, err)
		_, err = f.WriteAt(page, 0)
		require.NoError(t, errors.Join(err, f.Close()))
	}
	change(1, 1e9)
	shown := make(chan string, 1)
	go func() {
		cmd := exec.CommandContext(t.Context(), "date", "+%s")
		cmd.Env = clock.Env()
		b, err := cmd.Output()
		shown <- fmt.Sprint(string(b), err)
	}()
	select {
	case got := <-shown:
		t.Fatalf("got %q under half a law", got)
	case <-time.After(50 * time.Millisecond): // longer than date takes
	}
	change(0, 2e9)
	change(1, 2e9)
	require.Equal(t, "2\n<nil>", <-shown)
}

func TestClockRefuses(t *testing.T) {
	clock := newClock(t)
	for _, rate := range []float64{-1, -0.001, 1000.1, math.NaN(), math.Inf(1), math.Inf(-1)} {
		_, err := clock.Rate(t.Context(), rate)
		require.ErrorContains(t, err, "rate must be", "rate %v", rate)
	}
	for _, d := range []time.Duration{math.MinInt64, -100 * 365 * 24 * time.Hour, 100 * 365 * 24 * time.Hour, math.MaxInt64} {
		_, err := clock.Jump(t.Context(), d)
		require.ErrorContains(t, err, "would leave the years", "%v", d)
	}
	enough := errors.New("enough")
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(enough)
	_, err := clock.Jump(ended, time.Hour)
	require.ErrorIs(t, err, enough)
	_, err = clock.Hold(ended)
	require.ErrorIs(t, err, enough)
	_, err = faults.NewClock(ended, t.TempDir())
	require.ErrorIs(t, err, enough)
	require.Zero(t, clock.Offset())

	back, on := inForce(t)(clock.Jump(t.Context(), time.Hour)), inForce(t)(clock.Hold(t.Context()))
	require.NoError(t, back(ended), "heals work all the same")
	require.NoError(t, on(ended))
	require.Zero(t, clock.Offset())

	_, err = faults.NewClock(t.Context(), filepath.Dir(clock.Page()))
	require.ErrorIs(t, err, os.ErrExist)
	for _, name := range []string{"a b", "a:b"} {
		_, err = faults.NewClock(t.Context(), filepath.Join(t.TempDir(), name))
		require.ErrorContains(t, err, "with a space or a colon in its name")
	}
	_, err = faults.NewClock(t.Context(), filepath.Join(t.TempDir(), "missing"))
	require.ErrorIs(t, err, os.ErrNotExist)

	require.NoError(t, os.Remove(clock.Shim()))
	_, err = faults.NewClock(t.Context(), filepath.Dir(clock.Page()))
	require.ErrorIs(t, err, os.ErrExist)
	require.NoFileExists(t, clock.Shim())

	heal := inForce(t)(clock.Hold(t.Context()))
	require.NoError(t, os.Remove(clock.Page()))
	require.ErrorIs(t, heal(t.Context()), os.ErrNotExist)
	_, err = clock.Jump(t.Context(), time.Hour)
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestClockWithoutPage(t *testing.T) {
	clock := newClock(t)
	cmd := exec.CommandContext(t.Context(), "date")
	cmd.Env = append(clock.Env(), "FENCELAB_CLOCK="+filepath.Join(t.TempDir(), "missing"))
	output, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Equal(t, "fencelab: cannot open the clock that FENCELAB_CLOCK names\n", string(output))

	inForce(t)(clock.Jump(t.Context(), time.Hour))
	cmd = exec.CommandContext(t.Context(), "date", "+%s")
	cmd.Env = clock.Env()[:1]
	before := time.Now().Unix()
	output, err = cmd.CombinedOutput()
	require.NoError(t, err)
	shown, err := strconv.ParseInt(strings.TrimSpace(string(output)), 10, 64)
	require.NoError(t, err)
	require.GreaterOrEqual(t, shown, before)
	require.LessOrEqual(t, shown, time.Now().Unix(), "without the variable the shim does nothing")
}

func TestClockCompiler(t *testing.T) {
	t.Setenv("CC", "no-such-compiler")
	dir := t.TempDir()
	_, err := faults.NewClock(t.Context(), dir)
	if runtime.GOOS != "linux" {
		require.ErrorIs(t, err, errors.ErrUnsupported)
		return
	}
	require.ErrorContains(t, err, "there is no no-such-compiler: a C compiler and")
	require.ErrorContains(t, err, "apt-get install gcc libc6-dev")
	t.Setenv("CC", "false")
	_, err = faults.NewClock(t.Context(), dir)
	require.ErrorContains(t, err, "apt-get install gcc libc6-dev")
	left, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Empty(t, left)
}
