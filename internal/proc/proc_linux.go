package proc

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"
	"syscall"

	"github.com/prometheus/procfs"
	"golang.org/x/sys/unix"
)

func sysProcAttr() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// awaitExit awaits the exit without reaping the process, so that its group's number isn't reused.
func awaitExit(pid int) bool {
	for {
		if err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil); !errors.Is(err, unix.EINTR) {
			return err == nil
		}
	}
}

// Ended reports whether a look into /proc failed because the process has ended, before or during the look.
func Ended(err error) bool { return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH) }

func adoptOrphans() error { return unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }

// treeAttr: in this process's group, since setsid(1) forks and returns early if it leads one.
func treeAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }

// alive: a process without children has no descendants.
func alive(int) bool { return false }

// Signal signals all processes, as far as /proc shows them and this user may, and this process unless it is SIGKILL. A group gets
// it at once, so that none of it forks meanwhile: this process leaves its own before a SIGKILL, which it can while its parent
// lives. A pid may be used again after the look into /proc, but Linux first hands out all others.
func (t *Tree) Signal(s syscall.Signal) {
	outer, _ := syscall.Getpgid(os.Getppid())
	whole := s != syscall.SIGKILL || outer > 0 && syscall.Setpgid(0, outer) == nil
	if whole {
		signal(-t.group, s)
	}
	groups := map[int]bool{}
	under, _ := Descendants(os.Getpid())
	for _, p := range under {
		switch {
		case p.Group == t.group && whole:
		case p.Group == t.group, p.Group == outer, p.Group <= 1: // it may have joined outer; -1 would mean every process
			signal(p.PID, s)
		case !groups[p.Group]:
			groups[p.Group] = true
			signal(-p.Group, s)
		}
	}
}

func children() (map[int][]Process, error) {
	all := map[int][]Process{}
	processes, failed := procfs.AllProcs()
	for _, p := range processes {
		switch stat, err := p.Stat(); {
		case err == nil:
			all[stat.PPID] = append(all[stat.PPID], Process{stat.PID, stat.PPID, stat.PGRP})
		case !Ended(err):
			failed = err
		}
	}
	return all, failed
}

// ReservePort returns a free TCP port of the loopback interface that the kernel assigns to no other socket until release. The socket that
// reserves it never listens, so servers that set SO_REUSEADDR can (socket(7)).
func ReservePort() (port int, release func() error, err error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, nil, fmt.Errorf("reserve a port: %w", err)
	}
	release = sync.OnceValue(func() error { return syscall.Close(fd) })
	err = syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1)
	if err == nil {
		err = syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}})
	}
	if err == nil {
		var bound syscall.Sockaddr
		if bound, err = syscall.Getsockname(fd); err == nil {
			return bound.(*syscall.SockaddrInet4).Port, release, nil
		}
	}
	return 0, nil, errors.Join(fmt.Errorf("reserve a port: %w", err), release())
}
