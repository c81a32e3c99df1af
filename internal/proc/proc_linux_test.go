package proc_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/proc"
)

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

// The new process must be spared, although the reaped one's output isn't read to the end.
func TestNumberUsedAgain(t *testing.T) {
	const lastPID = "/proc/sys/kernel/ns_last_pid"
	last, err := os.ReadFile(lastPID)
	if err == nil {
		err = os.WriteFile(lastPID, []byte(strings.TrimSpace(string(last))), 0) // anybody may open it
	}
	if err != nil {
		t.Skip("needs root, to choose the number of a process: ", err)
	}
	cmd := command(waits, nil)
	unread := make(chan struct{})
	cmd.ExtraFiles, cmd.Stdin, cmd.Stdout, cmd.WaitDelay = nil, strings.NewReader(""), until(unread), time.Hour
	c, err := proc.Start(cmd)
	require.NoError(t, err)
	read := sync.OnceFunc(func() { close(unread) })
	t.Cleanup(func() {
		read()
		<-c.Exited()
	})
	require.Eventually(t, func() bool { return errors.Is(syscall.Kill(c.PID, 0), syscall.ESRCH) }, time.Minute, time.Millisecond)

	var other *exec.Cmd
	for attempts := 0; other == nil || other.Process.Pid != c.PID; attempts++ {
		if attempts == 1000 {
			t.Skip("another process has the number")
		}
		require.NoError(t, os.WriteFile(lastPID, []byte(strconv.Itoa(c.PID-1)), 0))
		other = exec.CommandContext(t.Context(), "sleep", "1h")
		other.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
		require.NoError(t, other.Start())
		if other.Process.Pid != c.PID {
			require.NoError(t, other.Process.Kill())
			require.Error(t, other.Wait())
		}
	}
	require.ErrorIs(t, c.With(func(int) error { return nil }), os.ErrProcessDone)
	time.AfterFunc(100*time.Millisecond, read)
	require.NoError(t, c.Kill())
	pid, err := syscall.Wait4(c.PID, nil, syscall.WNOHANG, nil)
	require.NoError(t, err)
	require.Zero(t, pid, "it has been killed")
	require.NoError(t, other.Process.Kill())
	require.Error(t, other.Wait())
}

type until chan struct{}

func (u until) Write(b []byte) (int, error) {
	<-u
	return len(b), nil
}

func gettid() int { return syscall.Gettid() }

func awaitThreadEnd(t *testing.T, tid int) {
	t.Helper()
	require.Eventually(t, func() bool {
		_, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", tid))
		return errors.Is(err, os.ErrNotExist)
	}, time.Minute, time.Millisecond)
}

// Files opened earlier give the errors of a call during which the process is reaped.
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
	for _, path := range []string{dir + "/task", stat} {
		_, err := os.ReadFile(path)
		require.True(t, proc.Ended(err), "%v", err)
	}
}
