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

// The kernel kills the child of a parent that was killed.
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
