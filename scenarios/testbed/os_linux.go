package testbed

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"runtime"
	"strings"
	"syscall"
)

// hostID is the boot and the pid namespace.
func hostID() (string, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("testbed: %w", err)
	}
	ns, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return "", fmt.Errorf("testbed: %w", err)
	}
	return strings.TrimSpace(string(boot)) + "/" + ns, nil
}

// startTime returns the start time of a process in clock ticks since boot, field 22 of /proc/PID/stat (proc(5)),
// or fs.ErrNotExist for one that is dead, be it reaped or not.
func startTime(pid int) (string, error) {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if errors.Is(err, syscall.ESRCH) { // it died between open and read
		err = fs.ErrNotExist
	}
	if err != nil {
		return "", fmt.Errorf("testbed: process %d: %w", pid, err)
	}
	// The second field, the name in brackets, may hold spaces and brackets; after the last bracket comes the third.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	const state, start = 0, 19
	if len(fields) <= start {
		return "", fmt.Errorf("testbed: process %d: unexpected stat %q", pid, stat)
	}
	if s := fields[state]; s == "Z" || s == "X" {
		return "", fmt.Errorf("testbed: process %d is dead: %w", pid, fs.ErrNotExist)
	}
	return fields[start], nil
}

// raise sends sig to the calling thread, so that a process that does not handle it is dead before raise returns.
func raise(sig syscall.Signal) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return syscall.Tgkill(syscall.Getpid(), syscall.Gettid(), sig)
}
