package testbed

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"

	"github.com/fencelab/fencelab/internal/proc"
)

// hostID returns the boot and the pid namespace.
func hostID() (string, error) {
	boot, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", err
	}
	ns, err := os.Readlink("/proc/self/ns/pid")
	return strings.TrimSpace(string(boot)) + "/" + ns, err
}

// startTime returns a process's start in clock ticks since boot, or fs.ErrNotExist if it is dead or a zombie.
func startTime(pid int) (string, error) {
	stat, err := proc.Stat(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	if s := stat[proc.State]; s == "Z" || s == "X" {
		return "", fmt.Errorf("process %d is dead: %w", pid, fs.ErrNotExist)
	}
	return stat[proc.Started], nil
}

// children maps each process to its children.
func children() (map[int][]int, error) {
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	found := make(map[int][]int)
	for _, file := range files {
		stat, err := proc.Stat(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // ended since
		}
		if err != nil {
			return nil, err
		}
		pid, pidErr := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		parent, err := strconv.Atoi(stat[proc.Parent])
		if err := errors.Join(pidErr, err); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		found[parent] = append(found[parent], pid)
	}
	return found, nil
}

// raise sends sig to the calling thread: without a handler, the process is dead before raise returns.
func raise(sig syscall.Signal) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return syscall.Tgkill(syscall.Getpid(), syscall.Gettid(), sig)
}
