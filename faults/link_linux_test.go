package faults_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/faults"
)

func TestLinkReservesPort(t *testing.T) {
	link, err := faults.NewLink("127.0.0.1:1")
	require.NoError(t, err)
	exclusively := net.ListenConfig{Control: func(_, _ string, conn syscall.RawConn) error {
		var setErr error
		err := conn.Control(func(fd uintptr) {
			setErr = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_REUSEADDR, 0)
		})
		return errors.Join(err, setErr)
	}}
	inForce(t)(link.Refuse(soon(t)))
	_, err = exclusively.Listen(t.Context(), "tcp", link.Addr())
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	require.NoError(t, link.Close())
	listener, err := exclusively.Listen(t.Context(), "tcp", link.Addr())
	require.NoError(t, err)
	require.NoError(t, listener.Close())
}

// A Refuse fails while the link connects to a server that accepts nobody, and is over once the server accepts.
func TestRefuseOfABusyServer(t *testing.T) {
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	require.NoError(t, syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}))
	require.NoError(t, syscall.Listen(fd, 0))
	bound, err := syscall.Getsockname(fd)
	require.NoError(t, err)
	port := bound.(*syscall.SockaddrInet4).Port
	server := fmt.Sprintf("127.0.0.1:%d", port)
	link := startLink(t, server)
	for _, addr := range []string{server, link.Addr()} { // the first fills the backlog
		dial(t, addr)
	}
	require.Eventually(t, func() bool { // the link is connecting: proc_net_tcp(5)
		conns, err := os.ReadFile("/proc/net/tcp")
		require.NoError(t, err)
		return strings.Contains(string(conns), fmt.Sprintf(" 0100007F:%04X 02 ", port))
	}, time.Minute, time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err = link.Refuse(ctx)
	require.ErrorContains(t, err, "clients are refused until the last connection attempt to the server has ended")
	go func() {
		for {
			c, _, err := syscall.Accept(fd)
			if err != nil {
				return
			}
			_ = syscall.Close(c)
		}
	}()
	t.Cleanup(func() { _ = syscall.Shutdown(fd, syscall.SHUT_RD); _ = syscall.Close(fd) })
	require.Eventually(t, func() bool { // the next fault is possible only after clients can connect
		_, err := link.Cut(soon(t))
		return err == nil
	}, time.Minute, time.Millisecond)
	c, err := new(net.Dialer).DialContext(soon(t), "tcp", link.Addr())
	require.NoError(t, err)
	require.NoError(t, c.Close())
}
