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

// An interrupted process stops its servers, and dies of the signal.
func TestInterrupted(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP} {
		t.Run(sig.String(), func(t *testing.T) {
			if signal.Ignored(sig) {
				t.Skipf("not applicable: %v is ignored, as by nohup or in a script's background job, and so it is by what this starts", sig)
			}
			t.Run("Local", func(t *testing.T) {
				need(t, testbed.Local, "redis")
				c := startChild(t, "redis", testbed.EnvProvider+"=local")
				require.NotEmpty(t, c.addr, c.output)
				require.NoError(t, c.Process.Signal(sig))
				requireSignaled(t, c.Wait(), sig)
				requireGone(t, c.addr)
				require.Empty(t, entries(t, c.tmp))
			})
			t.Run("Containers", func(t *testing.T) {
				docker := requireDocker(t, "redis")
				c := startChild(t, "redis", testbed.EnvProvider+"=containers")
				require.NotEmpty(t, c.addr, c.output)
				require.Len(t, leftOf(t, docker, c.Process.Pid), 2, "a container and a volume")
				require.NoError(t, c.Process.Signal(sig))
				requireSignaled(t, c.Wait(), sig)
				require.Empty(t, leftOf(t, docker, c.Process.Pid))
			})
		})
	}
}

func TestInterruptedCluster(t *testing.T) {
	docker := requireDocker(t, "etcd")
	c := startChild(t, "etcd", testbed.EnvProvider+"=containers")
	require.NotEmpty(t, c.addr, c.output)
	require.Len(t, leftOf(t, docker, c.Process.Pid), 3+1+3, "containers, the network, volumes")
	require.NoError(t, c.Process.Signal(syscall.SIGTERM))
	requireSignaled(t, c.Wait(), syscall.SIGTERM)
	require.Empty(t, leftOf(t, docker, c.Process.Pid))
}

// The signal arrives during the start.
func TestInterruptedStart(t *testing.T) {
	dir := t.TempDir()
	fifo := filepath.Join(dir, "fifo")
	require.NoError(t, syscall.Mkfifo(fifo, 0o600))
	server := script(t, dir, `echo started >fifo; exec sleep 1000`)
	c := prepareChild(t, "redis", testbed.EnvProvider+"=local", "FENCELAB_REDIS_SERVER"+"="+server)
	require.NoError(t, c.Start())
	_, err := os.ReadFile(fifo) // blocks until the script runs
	require.NoError(t, err)
	require.NoError(t, c.Process.Signal(syscall.SIGTERM))
	requireSignaled(t, c.Wait(), syscall.SIGTERM)
	require.Empty(t, entries(t, c.tmp))
}

// A process that was started to ignore a signal, as by nohup, survives it.
func TestIgnoredSignal(t *testing.T) {
	need(t, testbed.Local, "redis")
	c := prepareChild(t, "redis", testbed.EnvProvider+"=local")
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

// After a SIGKILL, the kernel ends local servers, and the next process removes their directories.
func TestKilled(t *testing.T) {
	for server, dirs := range map[string]int{"redis": 1, "etcd": 3} {
		t.Run(server, func(t *testing.T) {
			need(t, testbed.Local, server)
			c := startChild(t, server, testbed.EnvProvider+"=local")
			require.NotEmpty(t, c.addr, c.output)
			require.NoError(t, c.Process.Kill())
			requireSignaled(t, c.Wait(), syscall.SIGKILL)
			require.Len(t, entries(t, c.tmp), dirs)

			next := startChild(t, server, testbed.EnvProvider+"=local", "TMPDIR="+c.tmp)
			require.NotEmpty(t, next.addr, next.output)
			require.Len(t, entries(t, c.tmp), dirs, "those of the second process")
			require.Eventually(t, func() bool { return !listens(t, c.addr) }, 30*time.Second, 5*time.Millisecond)
		})
	}
}

// The next process kills servers in a dead process's directories, where the kernel didn't. It leaves alone what belongs to a living
// process or an unknown one.
func TestSweepDirs(t *testing.T) {
	need(t, testbed.Local, "redis")
	start := func() (*exec.Cmd, string) {
		cmd := exec.CommandContext(t.Context(), "sleep", "60")
		cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		require.NoError(t, cmd.Start())
		identity, err := testbed.Identify(cmd.Process.Pid)
		require.NoError(t, err)
		return cmd, identity
	}
	orphan, running := start()
	other, reused := start() // has the pid of a server that ended long ago
	me, err := testbed.Identify(os.Getpid())
	require.NoError(t, err)
	tmp := t.TempDir()
	for name, owner := range map[string]string{
		"gone": dead(t), "reused": dead(t), "alive": me, "foreign": "elsewhere" + dead(t), "unreadable": "",
	} {
		dir := filepath.Join(tmp, "fencelab-"+name)
		require.NoError(t, os.Mkdir(dir, 0o700))
		require.NoError(t, os.WriteFile(filepath.Join(dir, "owner"), []byte(owner), 0o600))
		if child := map[string]string{"gone": running, "reused": reused + "0"}[name]; child != "" {
			require.NoError(t, os.WriteFile(filepath.Join(dir, "child"), []byte(child), 0o600))
		}
	}
	next := startChild(t, "redis", testbed.EnvProvider+"=local", "TMPDIR="+tmp)
	require.NotEmpty(t, next.addr, next.output)
	requireSignaled(t, orphan.Wait(), syscall.SIGKILL)
	require.NoError(t, other.Process.Signal(syscall.SIGTERM))
	requireSignaled(t, other.Wait(), syscall.SIGTERM)
	require.NoDirExists(t, filepath.Join(tmp, "fencelab-gone"))
	require.NoDirExists(t, filepath.Join(tmp, "fencelab-reused"))
	for _, name := range []string{"alive", "foreign", "unreadable"} {
		require.DirExists(t, filepath.Join(tmp, "fencelab-"+name))
	}
}

func TestGuardStopsOnce(t *testing.T) {
	stops := 0
	done, err := testbed.Guard(t.Context(), func() error { stops++; return os.ErrClosed })
	require.NoError(t, err)
	for range 2 {
		require.ErrorIs(t, done(), os.ErrClosed)
	}
	require.Equal(t, 1, stops)
}

func dead(t *testing.T) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "sleep", "1000")
	require.NoError(t, cmd.Start())
	identity, err := testbed.Identify(cmd.Process.Pid)
	require.NoError(t, err)
	require.NoError(t, cmd.Process.Kill())
	requireSignaled(t, cmd.Wait(), syscall.SIGKILL)
	return identity
}

// The watchdog of a process that is killed, or panics, cleans up the engine at once.
func TestWatchdog(t *testing.T) {
	docker := needEngine(t)
	testbed.Need(t, testbed.Program("docker", "sudo apt-get install docker.io"))
	for _, how := range []syscall.Signal{syscall.SIGKILL, syscall.SIGQUIT} { // Go panics at the latter
		c := startChild(t, "watchdog")
		c.Stderr = nil
		identity, err := testbed.Identify(c.Process.Pid)
		require.NoError(t, err)
		leave(t, docker, identity)
		require.Never(t, func() bool { return len(labelled(t, docker, identity)) < 2 }, 300*time.Millisecond, 50*time.Millisecond,
			"before the process has ended")
		require.NoError(t, c.Process.Signal(how))
		require.Error(t, c.Wait())
		require.Eventually(t, func() bool { return len(labelled(t, docker, identity)) == 0 }, time.Minute, 10*time.Millisecond)
	}
}

// The containers of a killed process are removed, those of others stay.
func TestKilledContainers(t *testing.T) {
	docker := requireDocker(t, "redis")
	c := startChild(t, "redis", testbed.EnvProvider+"=containers")
	other := startChild(t, "redis", testbed.EnvProvider+"=containers")
	require.NotEmpty(t, c.addr, c.output)
	require.NotEmpty(t, other.addr, other.output)
	require.NoError(t, c.Process.Kill())
	requireSignaled(t, c.Wait(), syscall.SIGKILL)
	require.Eventually(t, func() bool { return len(leftOf(t, docker, c.Process.Pid)) == 0 }, time.Minute, 10*time.Millisecond)
	require.Len(t, leftOf(t, docker, other.Process.Pid), 2, "a container and a volume")
}

func requireSignaled(t *testing.T, err error, want syscall.Signal) {
	t.Helper()
	exit, ok := errors.AsType[*exec.ExitError](err)
	require.True(t, ok, "got %v, want an end by %v", err, want)
	status := exit.Sys().(syscall.WaitStatus)
	require.True(t, status.Signaled(), "got %v, want an end by %v", err, want)
	require.Equal(t, want, status.Signal())
}
