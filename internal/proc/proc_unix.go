//go:build unix && !linux

package proc

import (
	"fmt"
	"net"
	"os/exec"
	"strings"
	"syscall"
)

func sysProcAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

func awaitExit(int) bool { return false }

func adoptOrphans() error { return nil }

func treeAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

// alive reports whether the group has a process of this user. Darwin doesn't permit signals to a zombie.
func alive(group int) bool { return syscall.Kill(-group, 0) == nil }

func children() (map[int][]Process, error) {
	all := map[int][]Process{}
	out, err := exec.Command("ps", "-A", "-o", "pid=,ppid=,pgid=").Output() //nolint:noctx // ps ends by itself
	for line := range strings.Lines(string(out)) {
		var p Process
		if _, err := fmt.Sscan(line, &p.PID, &p.Parent, &p.Group); err == nil {
			all[p.Parent] = append(all[p.Parent], p)
		}
	}
	return all, err
}

// Signal signals the command's process group.
func (t *Tree) Signal(s syscall.Signal) { signal(-t.command, s) }

// ReservePort returns a free TCP port of the loopback interface. Only on Linux is it reserved.
func ReservePort() (port int, release func() error, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // binding a loopback port doesn't block
	if err != nil {
		return 0, nil, err
	}
	return l.Addr().(*net.TCPAddr).Port, func() error { return nil }, l.Close()
}
