package proc_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/proc"
)

// The kernel kills the child of a parent that was killed.
func TestChildDiesWithParent(t *testing.T) {
	c := start(t, starts)
	require.NoError(t, syscall.Kill(c.PID, syscall.SIGKILL)) // the parent alone, not its group
	c.requireGone(t)
}

func TestGroupDiesWithLeader(t *testing.T) {
	c := start(t, leaves)
	require.NoError(t, c.in.(*os.File).Close())
	<-c.Exited()
	c.requireGone(t)
}

func gettid() int { return syscall.Gettid() }

func awaitThreadEnd(t *testing.T, tid int) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", tid))
		return errors.Is(err, os.ErrNotExist)
	}, time.Minute, time.Millisecond)
}

// Files held open since before the process was reaped give what a call gives whose process is reaped in its midst.
func TestEndsDuringCall(t *testing.T) {
	c := start(t, waits)
	held := func(name string) string {
		f, err := os.Open(fmt.Sprintf("/proc/%d/%s", c.PID, name))
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, f.Close()) })
		return fmt.Sprintf("/proc/self/fd/%d", f.Fd())
	}
	dir, stat := held(""), held("stat")
	require.NoError(t, c.Kill())
	require.Equal(t, syscall.SIGKILL, signalOf(t, c.Wait()))
	_, err := proc.ReadDir(dir + "/task")
	require.ErrorIs(t, err, fs.ErrNotExist)
	_, err = proc.Stat(stat)
	require.ErrorIs(t, err, fs.ErrNotExist)
}
