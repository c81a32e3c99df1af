package faults_test

import (
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"testing"

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
			continue // ended since
		}
		_, state, _ := strings.Cut(string(b), "\nState:\t")
		states.WriteString(state[:1])
	}
	return states.String()
}

func TestEveryThread(t *testing.T) {
	tk := startTicker(t)
	for i := range 20 {
		resume := inForce(t)(faults.Pause(t.Context(), tk.pid()))
		states := threadStates(t, tk.pid())
		require.Empty(t, strings.Trim(states, "T"), "round %d: states %s", i, states)
		require.GreaterOrEqual(t, len(states), 3)
		require.NoError(t, resume(t.Context()))
		require.NotContains(t, threadStates(t, tk.pid()), "T", "round %d", i)
	}
	for range 10 {
		tk := startTicker(t)
		require.NoError(t, faults.Kill(t.Context(), tk.pid()))
		require.Empty(t, strings.Trim(threadStates(t, tk.pid()), "ZX"))
	}
}

// To the kernel, credentials are a thread's: one locked thread gives up root and gets EPERM. It ends with its goroutine.
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
		_, err := faults.Pause(t.Context(), tk.pid())
		errs <- err
		errs <- faults.Kill(t.Context(), tk.pid())
	}()
	require.ErrorIs(t, <-errs, os.ErrPermission)
	require.ErrorIs(t, <-errs, os.ErrPermission)
	tk.awaitTicks(t, 1)
}
