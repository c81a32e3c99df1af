package faults_test

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/faults"
)

func dieWithParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }

// threadStates returns every thread's state letter, from a file that the package doesn't read.
func threadStates(t *testing.T, pid int) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join("/proc", strconv.Itoa(pid), "task", "*", "status"))
	require.NoError(t, err)
	var states strings.Builder
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		_, state, _ := strings.Cut(string(b), "\nState:\t")
		states.WriteString(state[:1])
	}
	return states.String()
}

func TestEveryThread(t *testing.T) {
	tk := startTicker(t)
	for i := range 20 {
		resume := inForce(t)(faults.Pause(soon(t), tk.pid()))
		states := threadStates(t, tk.pid())
		require.Empty(t, strings.Trim(states, "T"), "round %d: states %s", i, states)
		require.GreaterOrEqual(t, len(states), 3)
		require.NoError(t, resume(soon(t)))
		require.NotContains(t, threadStates(t, tk.pid()), "T", "round %d", i)
	}
	for range 10 {
		tk := startTicker(t)
		require.NoError(t, faults.Kill(soon(t), tk.pid()))
		require.Empty(t, strings.Trim(threadStates(t, tk.pid()), "ZX"))
	}
}

// headless ends its main thread but keeps another.
const headless = `
#include <pthread.h>
#include <unistd.h>
static void *stay(void *none) { for (;;) pause(); return none; }
int main(void) {
	pthread_t other;
	pthread_create(&other, NULL, stay, NULL);
	pthread_exit(NULL);
}`

func TestMainThreadEnded(t *testing.T) {
	cmd := exec.CommandContext(context.Background(), compile(t, headless))
	cmd.SysProcAttr = dieWithParent()
	require.NoError(t, cmd.Start())
	pid := cmd.Process.Pid
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	states := func() string {
		s := []byte(threadStates(t, pid))
		slices.Sort(s)
		return string(s)
	}
	await(t, "end of the main thread", func() bool { return states() == "SZ" })
	ctx := soon(t)
	resume := inForce(t)(faults.Pause(ctx, pid))
	require.Equal(t, "TZ", states())
	require.NoError(t, resume(ctx))
	require.NotContains(t, states(), "T")
	require.NoError(t, faults.Kill(ctx, pid))
	require.Empty(t, strings.Trim(states(), "XZ"))
}

// Here the process can't be stopped because a thread is traced. It must not stop later.
func TestPauseFails(t *testing.T) {
	tk := startTicker(t)
	runtime.LockOSThread() // for the kernel, the tracer is a thread
	defer runtime.UnlockOSThread()
	if err := syscall.PtraceAttach(tk.pid()); err != nil {
		t.Skip("needs ptrace: ", err)
	}
	_, err := syscall.Wait4(tk.pid(), nil, syscall.WALL, nil)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err = faults.Pause(ctx, tk.pid())
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, syscall.PtraceDetach(tk.pid()))
	tk.awaitTicks(t, 1)
}

// For the kernel, credentials belong to a thread: one locked thread gives up root and gets EPERM. It ends with its goroutine.
func TestNotPermitted(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root, to start a process that somebody else may not signal")
	}
	tk := startTicker(t)
	errs := make(chan error)
	go func() {
		runtime.LockOSThread()
		const nobody = 65534
		if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, nobody, nobody, nobody); errno != 0 {
			errs <- errno
			errs <- errno
			return
		}
		_, err := faults.Pause(soon(t), tk.pid())
		errs <- err
		errs <- faults.Kill(soon(t), tk.pid())
	}()
	require.ErrorIs(t, <-errs, os.ErrPermission)
	require.ErrorIs(t, <-errs, os.ErrPermission)
	tk.awaitTicks(t, 1)
}

func openFiles(t *testing.T, part string) (n int) {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, fd := range fds {
		if name, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.Contains(name, part) {
			n++
		}
	}
	return n
}

func TestNoPidfdLeft(t *testing.T) {
	tk := startTicker(t)
	before := openFiles(t, "pidfd")
	resume := inForce(t)(faults.Pause(soon(t), tk.pid()))
	paused := openFiles(t, "pidfd")
	if paused == before {
		t.Skip("the kernel has no pidfds")
	}
	_, err := faults.Pause(soon(t), tk.pid())
	require.Error(t, err)
	require.Equal(t, paused, openFiles(t, "pidfd"), "after a refused pause")
	require.NoError(t, resume(soon(t)))
	require.Equal(t, before, openFiles(t, "pidfd"), "after the heal")
	require.NoError(t, faults.Kill(soon(t), tk.pid()))
	require.Equal(t, before, openFiles(t, "pidfd"), "after a kill")
}

// A server may run as another user, and changes of the clock must not leak files or mappings.
func TestClockFiles(t *testing.T) {
	old := syscall.Umask(0o077)
	defer syscall.Umask(old)
	clock := newClock(t)
	for _, path := range []string{clock.Shim(), clock.Page()} {
		info, err := os.Stat(path)
		require.NoError(t, err)
		require.Equal(t, os.FileMode(0o644), info.Mode(), path)
	}
	inForce(t)(clock.Jump(soon(t), 1))
	require.Zero(t, openFiles(t, clock.Page()))
	maps, err := os.ReadFile("/proc/self/maps")
	require.NoError(t, err)
	require.NotContains(t, string(maps), clock.Page())
}
