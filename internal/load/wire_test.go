package load_test

import (
	"io"
	"net"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/load"
)

// echo is a server that sends back what it gets, to its end, and closes then.
func echo(t *testing.T) (addr string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // it listens at once
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(c, c)
				_ = c.Close()
			}()
		}
	}()
	return l.Addr().String()
}

func dial(t *testing.T, addr string) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", addr) //nolint:noctx // the server is there
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	there, ok := c.(*net.TCPConn)
	require.True(t, ok)
	return there
}

// TestWires: what is sent arrives, late by the delay in each direction, in order and whole; and so does the end.
func TestWires(t *testing.T) {
	const delay = 20 * ms
	w, err := load.NewWires(t.Context(), []string{echo(t)}, delay)
	require.NoError(t, err)
	defer w.Close()
	c := dial(t, w.Addrs()[0])
	began := time.Now()
	_, err = c.Write([]byte("ab"))
	require.NoError(t, err)
	b := make([]byte, 2)
	_, err = io.ReadFull(c, b)
	require.NoError(t, err)
	require.Equal(t, "ab", string(b))
	require.GreaterOrEqual(t, time.Since(began), 2*delay)

	sent := make([]byte, 1<<20) // more than is read at once, and than a socket's buffer has room for
	for i := range sent {
		sent[i] = byte(i >> 8)
	}
	began = time.Now()
	go func() {
		_, _ = c.Write(sent)
		_ = c.CloseWrite()
	}()
	got, err := io.ReadAll(c) // to the end, which comes after all else
	require.NoError(t, err)
	require.Equal(t, sent, got)
	require.GreaterOrEqual(t, time.Since(began), 2*delay)
}

// TestWiresClosed: Close ends connections that are open, also with bytes on their way, and everything else of theirs, as
// the check for goroutines at the end of the tests has it.
func TestWiresClosed(t *testing.T) {
	w, err := load.NewWires(t.Context(), []string{echo(t), echo(t)}, time.Hour)
	require.NoError(t, err)
	idle, busy := dial(t, w.Addrs()[0]), dial(t, w.Addrs()[1])
	_, err = busy.Write([]byte("never heard"))
	require.NoError(t, err)
	w.Close()
	for _, c := range []net.Conn{idle, busy} {
		_, err = c.Read(make([]byte, 1))
		require.Error(t, err)
	}
	_, err = net.Dial("tcp", w.Addrs()[0]) //nolint:noctx // nobody is there
	require.Error(t, err)
}

// TestWiresLead: an address stays what it was but for its host, and what can't be one is refused.
func TestWiresLead(t *testing.T) {
	w, err := load.NewWires(t.Context(), []string{"localhost:1", "redis://user:secret@localhost:1/3?protocol=2"}, ms)
	require.NoError(t, err)
	defer w.Close()
	require.Regexp(t, `^127\.0\.0\.1:\d+$`, w.Addrs()[0])
	require.Regexp(t, `^redis://user:secret@127\.0\.0\.1:\d+/3\?protocol=2$`, w.Addrs()[1])
	c := dial(t, w.Addrs()[0]) // where nobody listens
	_, err = c.Read(make([]byte, 1))
	require.Error(t, err)
	for _, addr := range []string{"localhost", "redis://user:secret@localhost", "redis://user:secret@local host:1"} {
		_, err := load.NewWires(t.Context(), []string{addr}, ms)
		require.ErrorContains(t, err, "load: a wire to ")
		require.NotContains(t, err.Error(), "secret")
	}
}
