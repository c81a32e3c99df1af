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

// hostID returns the host's name: here start times contain dates.
func hostID() (string, error) { return os.Hostname() }

// startTime returns a process's start as ps prints it, or fs.ErrNotExist if it is dead.
func startTime(pid int) (string, error) {
	if err := syscall.Kill(pid, 0); errors.Is(err, syscall.ESRCH) {
		return "", fmt.Errorf("process %d: %w", pid, fs.ErrNotExist)
	}
	cmd := exec.Command("ps", "-o", "lstart=", "-p", strconv.Itoa(pid))
	cmd.Env = append(os.Environ(), "LC_ALL=C", "TZ=UTC")
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("process %d: ps: %w", pid, err)
	}
	return strings.TrimSpace(string(out)), nil
}

// raise sends sig to this process and waits: another thread may take the signal.
func raise(sig syscall.Signal) error {
	err := syscall.Kill(os.Getpid(), sig)
	time.Sleep(100 * time.Millisecond)
	return err
}

// children maps each process to its children.
func children() (map[int][]int, error) {
	out, err := exec.Command("ps", "-A", "-o", "ppid=,pid=").Output() //nolint:noctx // ps ends by itself
	if err != nil {
		return nil, fmt.Errorf("ps: %w", err)
	}
	found := make(map[int][]int)
	for line := range strings.Lines(string(out)) {
		var parent, pid int
		if _, err := fmt.Sscan(line, &parent, &pid); err != nil {
			return nil, fmt.Errorf("ps: %q: %w", line, err)
		}
		found[parent] = append(found[parent], pid)
	}
	return found, nil
}
