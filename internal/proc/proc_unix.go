//go:build unix && !linux

package proc

import (
	"net"
	"syscall"
)

func sysProcAttr() *syscall.SysProcAttr { return &syscall.SysProcAttr{Setpgid: true} }

func awaitExit(int) bool { return false }

// ReservePort returns a free TCP port of the loopback interface. It is reserved only on Linux.
func ReservePort() (port int, release func() error, err error) {
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // binding a loopback port doesn't block
	if err != nil {
		return 0, nil, err
	}
	return l.Addr().(*net.TCPAddr).Port, func() error { return nil }, l.Close()
}
