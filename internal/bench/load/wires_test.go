package load

import (
	"io"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func serve(t *testing.T, f func(net.Conn)) (addr string) {
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
				f(c)
				_ = c.Close()
			}()
		}
	}()
	return l.Addr().String()
}

func echo(c net.Conn) { _, _ = io.Copy(c, c) }

func wires(t *testing.T, delay time.Duration) *Wires {
	t.Helper()
	w, err := NewWires(delay)
	require.NoError(t, err)
	t.Cleanup(w.Close)
	return w
}

func dial(t *testing.T, w *Wires, addr string) net.Conn {
	t.Helper()
	c, err := w.Dial(t.Context(), "tcp", addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return c
}

// TestWires: bytes arrive late in each direction, in order and complete, even if one read or a socket's buffer can't hold them.
func TestWires(t *testing.T) {
	const delay = 20 * ms
	c := dial(t, wires(t, delay), serve(t, echo))
	for _, n := range []int{2, 1 << 20} {
		sent := make([]byte, n)
		for i := range sent {
			sent[i] = byte(i >> 8)
		}
		began := time.Now()
		go func() {
			for b := range slices.Chunk(sent, 1<<10) {
				_, _ = c.Write(b)
			}
		}()
		got := make([]byte, n)
		_, err := io.ReadFull(c, got)
		require.NoError(t, err)
		require.Equal(t, sent, got)
		require.GreaterOrEqual(t, time.Since(began), 2*delay)
	}
}

// TestWiresEnds: EOF comes after the data, from either side.
func TestWiresEnds(t *testing.T) {
	const delay = 20 * ms
	w := wires(t, delay)
	began := time.Now()
	got, err := io.ReadAll(dial(t, w, serve(t, func(c net.Conn) { _, _ = c.Write([]byte("bye")) })))
	require.NoError(t, err)
	require.Equal(t, "bye", string(got))
	require.GreaterOrEqual(t, time.Since(began), delay)

	heard, done := make(chan []byte, 1), time.Time{}
	c := dial(t, w, serve(t, func(c net.Conn) {
		b, _ := io.ReadAll(c)
		done = time.Now()
		heard <- b
	}))
	b := []byte("bye")
	_, err = c.Write(b)
	require.NoError(t, err)
	copy(b, "???") // the caller owns it again
	began = time.Now()
	require.NoError(t, c.Close())
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, io.ErrClosedPipe)
	_, err = c.Write(b)
	require.ErrorIs(t, err, io.ErrClosedPipe)
	require.Equal(t, "bye", string(<-heard))
	require.GreaterOrEqual(t, done.Sub(began), delay)
}

func TestWiresBroken(t *testing.T) {
	w := wires(t, ms)
	c := dial(t, w, serve(t, func(net.Conn) {}))
	_, err := c.Read(make([]byte, 1))
	require.Equal(t, io.EOF, err)
	require.Eventually(t, func() bool {
		_, err := c.Write([]byte("a"))
		return err != nil
	}, time.Minute, ms)
}

// TestWiresClosed: Close ends open connections, also with bytes in flight, and leaks no goroutine.
func TestWiresClosed(t *testing.T) {
	w := wires(t, time.Hour)
	addr := serve(t, echo)
	idle, busy, left := dial(t, w, addr), dial(t, w, addr), dial(t, w, addr)
	_, err := busy.Write([]byte("never heard"))
	require.NoError(t, err)
	require.NoError(t, left.Close())
	w.Close()
	for _, c := range []net.Conn{idle, busy, left} {
		_, err = c.Read(make([]byte, 1))
		require.Error(t, err)
	}
	_, err = w.Dial(t.Context(), "tcp", addr)
	require.ErrorIs(t, err, net.ErrClosed)
	w.Close()
}
