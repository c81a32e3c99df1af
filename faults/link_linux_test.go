package faults_test

import (
	"errors"
	"net"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/faults"
)

// While nobody listens at a link's address, nobody comes by it who asks for any. Close gives it back.
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
	_, err = link.Refuse(t.Context())
	require.NoError(t, err)
	_, err = exclusively.Listen(t.Context(), "tcp", link.Addr())
	require.ErrorIs(t, err, syscall.EADDRINUSE)
	require.NoError(t, link.Close())
	listener, err := exclusively.Listen(t.Context(), "tcp", link.Addr())
	require.NoError(t, err)
	require.NoError(t, listener.Close())
}
