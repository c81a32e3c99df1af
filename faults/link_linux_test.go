package faults_test

import (
	"errors"
	"net"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/faults"
)

// While a link refuses, its port can't be given to others. Close releases it.
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
	inForce(t)(link.Refuse(t.Context()))
	_, err = exclusively.Listen(t.Context(), "tcp", link.Addr())
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	require.NoError(t, link.Close())
	listener, err := exclusively.Listen(t.Context(), "tcp", link.Addr())
	require.NoError(t, err)
	require.NoError(t, listener.Close())
}
