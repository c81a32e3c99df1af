//go:build unix && !linux

package testbed

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// hostID is the host's name: elsewhere than on Linux, a start time with a date tells boots apart as well.
func hostID() (string, error) { return os.Hostname() }

// startTime returns the start time of a process as ps prints it, or fs.ErrNotExist for one that is dead.
func startTime(pid int) (string, error) {
	if err := syscall.Kill(pid, 0); errors.Is(err, syscall.ESRCH) {
		return "", fmt.Errorf("testbed: process %d: %w", pid, fs.ErrNotExist)
	}
	cmd := exec.Command("ps", "-o", "lstart=", "-p", strconv.Itoa(pid))
	cmd.Env = append(os.Environ(), "LC_ALL=C", "TZ=UTC")
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("testbed: process %d: ps: %w", pid, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// raise sends sig to this process, and leaves it a moment to die: the signal may be another thread's to take.
func raise(sig syscall.Signal) error {
	err := syscall.Kill(os.Getpid(), sig)
	time.Sleep(100 * time.Millisecond)
	return err
}
