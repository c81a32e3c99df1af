package faults

import (
	"errors"
	"fmt"
	"syscall"
)

// reserve returns a free address of the loopback interface that stays this process's until release, also while nobody
// listens there. A socket that is bound and doesn't listen keeps the port from being given to anybody who asks for any,
// and lets those bind who ask for this one with SO_REUSEADDR, as Go does (socket(7)).
func reserve() (addr string, release func() error, err error) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return "", nil, fmt.Errorf("reserve a port: %w", err)
	}
	release = func() error { return syscall.Close(fd) }
	bind := func() (syscall.Sockaddr, error) {
		if err := syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 1); err != nil {
			return nil, err
		}
		if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
			return nil, err
		}
		return syscall.Getsockname(fd)
	}
	bound, err := bind()
	if err != nil {
		return "", nil, errors.Join(fmt.Errorf("reserve a port: %w", err), release())
	}
	return fmt.Sprintf("127.0.0.1:%d", bound.(*syscall.SockaddrInet4).Port), release, nil
}
