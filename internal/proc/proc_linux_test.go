package proc_test

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A parent that is killed can't clean up after itself; the kernel does.
func TestChildDiesWithParent(t *testing.T) {
	c := start(t, starts)
	require.NoError(t, syscall.Kill(c.PID, syscall.SIGKILL)) // the parent alone, not its group
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
