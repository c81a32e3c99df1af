package testbed_test

import (
	"errors"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/testbed"
)

// A process that is interrupted takes its servers with it, and dies of the signal.
func TestInterrupted(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
		t.Run(sig.String(), func(t *testing.T) {
			if signal.Ignored(sig) {
				t.Skipf("not applicable: %v is ignored, as by nohup or in a script's background job, and so it is by what this starts", sig)
			}
			t.Run("Local", func(t *testing.T) {
				need(t, testbed.Local, "redis")
				c := startChild(t, "local", testbed.EnvProvider+"=local")
				require.NotEmpty(t, c.addr, c.output)
				require.NoError(t, c.Process.Signal(sig))
				requireSignaled(t, c.Wait(), sig)
				requireGone(t, c.addr)
				require.Empty(t, entries(t, c.tmp))
			})
			t.Run("Containers", func(t *testing.T) {
				docker := requireDocker(t, "redis")
				c := startChild(t, "containers", testbed.EnvProvider+"=containers")
				require.NotEmpty(t, c.addr, c.output)
				require.Len(t, containersOf(t, docker, c.Process.Pid), 1)
				require.NoError(t, c.Process.Signal(sig))
				requireSignaled(t, c.Wait(), sig)
				require.Empty(t, leftOf(t, docker, c.Process.Pid))
			})
		})
	}
}

// What several servers share goes too.
func TestInterruptedCluster(t *testing.T) {
	t.Run("Local", func(t *testing.T) {
		need(t, testbed.Local, "etcd")
		c := startChild(t, "etcd", testbed.EnvProvider+"=local")
		require.NotEmpty(t, c.addr, c.output)
		require.Len(t, entries(t, c.tmp), 3)
		require.NoError(t, c.Process.Signal(syscall.SIGTERM))
		requireSignaled(t, c.Wait(), syscall.SIGTERM)
		requireGone(t, c.addr)
		require.Empty(t, entries(t, c.tmp))
	})
	t.Run("Containers", func(t *testing.T) {
		docker := requireDocker(t, "etcd")
		c := startChild(t, "etcd", testbed.EnvProvider+"=containers")
		require.NotEmpty(t, c.addr, c.output)
		require.Len(t, leftOf(t, docker, c.Process.Pid), 3+1+3, "containers, the network, volumes")
		require.NoError(t, c.Process.Signal(syscall.SIGTERM))
		requireSignaled(t, c.Wait(), syscall.SIGTERM)
		require.Empty(t, leftOf(t, docker, c.Process.Pid))
	})
}

// The signal arrives while the server is starting.
func TestInterruptedStart(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	server := script(t, dir, `echo started >fifo; exec sleep 1000`)
	c := prepareChild(t, "local", testbed.EnvProvider+"=local", testbed.EnvRedisServer+"="+server)
	require.NoError(t, c.Start())
	_, err := os.ReadFile(fifo) // blocks until the script runs
	require.NoError(t, err)
	require.NoError(t, c.Process.Signal(syscall.SIGTERM))
	requireSignaled(t, c.Wait(), syscall.SIGTERM)
	require.Empty(t, entries(t, c.tmp))
}

// A process that was started to ignore a signal, as by nohup, goes on.
func TestIgnoredSignal(t *testing.T) {
	need(t, testbed.Local, "redis")
	c := prepareChild(t, "local", testbed.EnvProvider+"=local")
	ready := filepath.Join(c.tmp, "ready")
	require.NoError(t, syscall.Mkfifo(ready, 0o600))
	out, err := os.OpenFile(ready, os.O_RDWR, 0)
	require.NoError(t, err)
	defer func() { require.NoError(t, out.Close()) }()
	c.Stdout = out
	c.Args = []string{"sh", "-c", `trap "" HUP; exec "$0"`, c.Path}
	c.Path, err = exec.LookPath("sh")
	require.NoError(t, err)
	require.NoError(t, c.Start())
	line := make([]byte, 200)
	n, err := out.Read(line)
	require.NoError(t, err)
	require.Contains(t, string(line[:n]), readyPrefix)

	require.NoError(t, c.Process.Signal(syscall.SIGHUP))
	require.NoError(t, c.Process.Signal(syscall.SIGTERM))
	requireSignaled(t, c.Wait(), syscall.SIGTERM)
}

// A process that is killed can clean up nothing; the next one does.
func TestKilled(t *testing.T) {
	t.Run("Local", func(t *testing.T) {
		need(t, testbed.Local, "redis")
		c := startChild(t, "local", testbed.EnvProvider+"=local")
		require.NotEmpty(t, c.addr, c.output)
		require.NoError(t, c.Process.Kill())
		requireSignaled(t, c.Wait(), syscall.SIGKILL)
		require.Len(t, entries(t, c.tmp), 1)

		next := startChild(t, "local", testbed.EnvProvider+"=local", "TMPDIR="+c.tmp)
		require.NotEmpty(t, next.addr, next.output)
		require.Len(t, entries(t, c.tmp), 1, "that of the second process")
		require.Eventually(t, func() bool { return !listens(t, c.addr) }, 30*time.Second, 5*time.Millisecond)
	})
	t.Run("Containers", func(t *testing.T) {
		docker := requireDocker(t, "redis")
		c := startChild(t, "containers", testbed.EnvProvider+"=containers")
		other := startChild(t, "containers", testbed.EnvProvider+"=containers")
		require.NotEmpty(t, c.addr, c.output)
		require.NotEmpty(t, other.addr, other.output)
		require.NoError(t, c.Process.Kill())
		requireSignaled(t, c.Wait(), syscall.SIGKILL)

		next := startChild(t, "containers", testbed.EnvProvider+"=containers")
		require.NotEmpty(t, next.addr, next.output)
		requireSwept(t, docker, c.Process.Pid)
		require.Len(t, containersOf(t, docker, other.Process.Pid), 1, "the sweep leaves the living alone")
		for _, c := range []*child{other, next} {
			require.NoError(t, c.Process.Signal(syscall.SIGTERM))
			requireSignaled(t, c.Wait(), syscall.SIGTERM)
		}
	})
}

func TestKilledCluster(t *testing.T) {
	t.Run("Local", func(t *testing.T) {
		need(t, testbed.Local, "etcd")
		c := startChild(t, "etcd", testbed.EnvProvider+"=local")
		require.NotEmpty(t, c.addr, c.output)
		require.NoError(t, c.Process.Kill())
		requireSignaled(t, c.Wait(), syscall.SIGKILL)
		require.Len(t, entries(t, c.tmp), 3)

		next := startChild(t, "local", testbed.EnvProvider+"=local", "TMPDIR="+c.tmp)
		require.NotEmpty(t, next.addr, next.output)
		require.Len(t, entries(t, c.tmp), 1, "that of the second process")
		require.Eventually(t, func() bool { return !listens(t, c.addr) }, 30*time.Second, 5*time.Millisecond)
	})
	t.Run("Containers", func(t *testing.T) {
		docker := requireDocker(t, "etcd")
		c := startChild(t, "etcd", testbed.EnvProvider+"=containers")
		require.NotEmpty(t, c.addr, c.output)
		require.Len(t, leftOf(t, docker, c.Process.Pid), 3+1+3, "containers, the network, volumes") // afterwards, any process may sweep
		require.NoError(t, c.Process.Kill())
		requireSignaled(t, c.Wait(), syscall.SIGKILL)

		next := startChild(t, "containers", testbed.EnvProvider+"=containers")
		require.NotEmpty(t, next.addr, next.output)
		requireSwept(t, docker, c.Process.Pid)
	})
}

func requireSignaled(t *testing.T, err error, want syscall.Signal) {
	t.Helper()
	exit, ok := errors.AsType[*exec.ExitError](err)
	require.True(t, ok, "got %v, want an end by %v", err, want)
	status := exit.Sys().(syscall.WaitStatus)
	require.True(t, status.Signaled(), "got %v, want an end by %v", err, want)
	require.Equal(t, want, status.Signal())
}
