package testbed

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
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
	stat, err := readStat(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", err
	}
	if s := stat[statState]; s == "Z" || s == "X" {
		return "", fmt.Errorf("testbed: process %d is dead: %w", pid, fs.ErrNotExist)
	}
	return stat[statStart], nil
}

// Fields of what readStat returns.
const (
	statState  = 0
	statParent = 1
	statStart  = 19
)

// readStat returns the fields of a /proc/PID/stat from the third on (proc(5)), or fs.ErrNotExist.
func readStat(file string) ([]string, error) {
	stat, err := os.ReadFile(file)
	if errors.Is(err, syscall.ESRCH) { // it died between open and read
		err = fs.ErrNotExist
	}
	if err != nil {
		return nil, fmt.Errorf("testbed: %s: %w", file, err)
	}
	// The second field, the name in brackets, may hold spaces and brackets; after the last bracket comes the third.
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	if len(fields) <= statStart {
		return nil, fmt.Errorf("testbed: %s: unexpected %q", file, stat)
	}
	return fields, nil
}

// children returns the processes that each process has started.
func children() (map[int][]int, error) {
	files, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, fmt.Errorf("testbed: %w", err)
	}
	found := make(map[int][]int)
	for _, file := range files {
		stat, err := readStat(file)
		if errors.Is(err, fs.ErrNotExist) {
			continue // ended since
		}
		if err != nil {
			return nil, err
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(file)))
		if err != nil {
			return nil, fmt.Errorf("testbed: %s: %w", file, err)
		}
		parent, err := strconv.Atoi(stat[statParent])
		if err != nil {
			return nil, fmt.Errorf("testbed: %s: %w", file, err)
		}
		found[parent] = append(found[parent], pid)
	}
	return found, nil
}

// reservePort returns a free TCP port of the loopback interface. Until release, nobody gets it who doesn't ask for it
// by its number: a socket is bound to it and never listens, so that servers, which set SO_REUSEADDR, can listen on it,
// one after the other. It is neither given to another server meanwhile nor to a client as its own end, which would
// connect to itself (so does the kernel pick a client's port, see __inet_hash_connect).
func reservePort() (port int, release func() error, err error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, nil, fmt.Errorf("testbed: reserve a port: %w", os.NewSyscallError("socket", err))
	}
	release = sync.OnceValue(func() error { return syscall.Close(fd) })
	err = os.NewSyscallError("setsockopt", syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1))
	if err == nil {
		err = os.NewSyscallError("bind", syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	}
	if err == nil {
		var at syscall.Sockaddr
		if at, err = syscall.Getsockname(fd); err == nil {
			return at.(*syscall.SockaddrInet4).Port, release, nil
		}
	}
	return 0, nil, errors.Join(fmt.Errorf("testbed: reserve a port: %w", err), release())
}

// raise sends sig to the calling thread, so that a process that does not handle it is dead before raise returns.
func raise(sig syscall.Signal) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	return syscall.Tgkill(syscall.Getpid(), syscall.Gettid(), sig)
}
