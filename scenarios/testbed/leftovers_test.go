package testbed_test

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/testbed"
)

func TestKilled(t *testing.T) {
	for _, c := range []struct {
		server   string
		provider testbed.Provider
		has      int
	}{
		{"redis", testbed.Local, 1},
		{"etcd", testbed.Local, 3},
		{"redis", testbed.Containers, 1 + 1},    // a container and a volume
		{"etcd", testbed.Containers, 3 + 1 + 3}, // containers, the network, volumes
	} {
		t.Run(c.server+"/"+string(c.provider), func(t *testing.T) {
			need(t, c.provider, c.server)
			if c.provider == testbed.Containers {
				testbed.Need(t, testbed.Program("docker", "sudo apt-get install docker.io"))
			}
			has := func(p *child) int {
				if c.provider == testbed.Local {
					return len(entries(t, p.tmp))
				}
				return len(leftOf(t, newDocker(t), p.Process.Pid))
			}
			killed := startChild(t, c.server, testbed.EnvProvider+"="+string(c.provider))
			require.NotEmpty(t, killed.addr, killed.output)
			other := startChild(t, c.server, testbed.EnvProvider+"="+string(c.provider))
			require.NotEmpty(t, other.addr, other.output)
			require.Equal(t, c.has, has(killed))
			require.NoError(t, killed.Process.Kill())
			requireSignaled(t, killed.Wait(), syscall.SIGKILL)
			require.Eventually(t, func() bool { return has(killed) == 0 && !listens(t, killed.addr) }, time.Minute, 10*time.Millisecond)
			require.Equal(t, c.has, has(other))
			require.True(t, listens(t, other.addr))
		})
	}
}

func TestInterruptedStart(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	server := script(t, dir, `[ "$1" = --version ] && exit
echo $$ >fifo
exec sleep 1000`)
	c := prepareChild(t, "redis", testbed.EnvProvider+"=local", "FENCELAB_REDIS_SERVER"+"="+server)
	require.NoError(t, c.Start())
	b, err := os.ReadFile(fifo)
	require.NoError(t, err)
	require.NoError(t, c.Process.Signal(syscall.SIGTERM))
	requireSignaled(t, c.Wait(), syscall.SIGTERM)
	require.Eventually(t, func() bool {
		line, err := os.ReadFile("/proc/" + strings.TrimSpace(string(b)) + "/cmdline") // empty of a zombie
		return err != nil || len(line) == 0
	}, time.Minute, 10*time.Millisecond)
	require.Eventually(t, func() bool { return len(entries(t, c.tmp)) == 0 }, time.Minute, 10*time.Millisecond)
}

func TestWatchdogKills(t *testing.T) {
	c := startChild(t, "directory")
	orphan := exec.CommandContext(t.Context(), "sleep", "60")
	orphan.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, orphan.Start())
	require.NoError(t, os.WriteFile(filepath.Join(c.addr, "child"), []byte(strconv.Itoa(orphan.Process.Pid)), 0o600))
	require.NoError(t, c.Process.Kill())
	requireSignaled(t, c.Wait(), syscall.SIGKILL)
	requireSignaled(t, orphan.Wait(), syscall.SIGKILL)
	require.Eventually(t, func() bool { return len(entries(t, c.tmp)) == 0 }, time.Minute, 10*time.Millisecond)
}

// Once a server has ended, its process id may be reused.
func TestChildForgotten(t *testing.T) {
	tmp := t.TempDir()
	t.Setenv("TMPDIR", tmp)
	s := startRedis(t, &testbed.Options{Provider: testbed.Local})
	file := filepath.Join(tmp, entries(t, tmp)[0], "child")
	for _, byItself := range []bool{false, true, false} {
		b, err := os.ReadFile(file)
		require.NoError(t, err)
		pid, err := strconv.Atoi(string(b))
		require.NoError(t, err)
		require.NoError(t, syscall.Kill(pid, 0))
		if byItself {
			require.NoError(t, syscall.Kill(pid, syscall.SIGKILL))
			require.Eventually(t, func() bool { _, err := os.Stat(file); return os.IsNotExist(err) }, time.Minute, time.Millisecond)
		}
		require.NoError(t, s.Kill(t.Context()))
		require.NoFileExists(t, file)
		require.NoError(t, s.Restart(t.Context()))
	}
}

func TestWatchdogReadsLines(t *testing.T) {
	tmp := filepath.Join(t.TempDir(), "two\nlines")
	require.NoError(t, os.Mkdir(tmp, 0o700))
	t.Setenv("TMPDIR", tmp)
	_, err := testbed.MkdirTemp("any")
	require.ErrorContains(t, err, "has two lines")
	require.Empty(t, entries(t, tmp))
}

func requireSignaled(t *testing.T, err error, want syscall.Signal) {
	t.Helper()
	exit, ok := errors.AsType[*exec.ExitError](err)
	require.True(t, ok, "got %v, want an end by %v", err, want)
	status := exit.Sys().(syscall.WaitStatus)
	require.True(t, status.Signaled(), "got %v, want an end by %v", err, want)
	require.Equal(t, want, status.Signal())
}
