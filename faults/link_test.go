package faults_test

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/internal/testmain"
)

type server struct {
	listener net.Listener
	wg       sync.WaitGroup
	mu       sync.Mutex
	conns    []net.Conn
	applied  []string
}

func listen(t *testing.T) net.Listener {
	t.Helper()
	listener, err := new(net.ListenConfig).Listen(t.Context(), "tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = listener.Close() })
	return listener
}

func startServer(t *testing.T) *server {
	t.Helper()
	listener := listen(t)
	s := &server{listener: listener}
	s.wg.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			s.mu.Lock()
			s.conns = append(s.conns, conn)
			s.mu.Unlock()
			s.wg.Go(func() { s.serve(conn) })
		}
	})
	t.Cleanup(s.stop)
	return s
}

func (s *server) serve(conn net.Conn) {
	lines := bufio.NewScanner(conn)
	for lines.Scan() {
		s.mu.Lock()
		s.applied = append(s.applied, lines.Text())
		s.mu.Unlock()
		if lines.Text() == "slow" {
			time.Sleep(time.Second)
		}
		_, _ = fmt.Fprintf(conn, "ok %s\n", lines.Text()) // even if the sender has gone
	}
	_ = conn.Close()
}

func (s *server) addr() string { return s.listener.Addr().String() }

func (s *server) stop() {
	_ = s.listener.Close()
	s.mu.Lock()
	for _, conn := range s.conns {
		_ = conn.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}

func (s *server) log(prefix string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(s.applied), func(line string) bool { return !strings.HasPrefix(line, prefix) })
}

func startLink(t *testing.T, upstream string) *faults.Link {
	t.Helper()
	link, err := faults.NewLink(upstream)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, link.Close()) })
	return link
}

type client struct {
	net.Conn
	replies *bufio.Reader
}

func dial(t *testing.T, addr string) *client {
	t.Helper()
	conn, err := new(net.Dialer).DialContext(soon(t), "tcp", addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	require.NoError(t, conn.SetDeadline(time.Now().Add(30*time.Second)))
	return &client{conn, bufio.NewReader(conn)}
}

func (c *client) send(t *testing.T, line string) {
	t.Helper()
	_, err := io.WriteString(c, line+"\n")
	require.NoError(t, err)
}

func (c *client) wantReply(t *testing.T, line string) {
	t.Helper()
	got, err := c.replies.ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ok "+line+"\n", got)
}

func (c *client) wantNoReply(t *testing.T) {
	t.Helper()
	got, err := c.replies.ReadString('\n')
	require.Error(t, err)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "the connection is still open")
	require.Empty(t, got)
}

func (c *client) wantSilence(t *testing.T) {
	t.Helper()
	require.NoError(t, c.SetReadDeadline(time.Now().Add(20*time.Millisecond)))
	_, err := c.replies.ReadByte()
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, c.SetReadDeadline(time.Now().Add(30*time.Second)))
}

func (c *client) ask(t *testing.T, line string) {
	t.Helper()
	c.send(t, line)
	c.wantReply(t, line)
}

// askOften takes longer than a line takes through a link.
func askOften(t *testing.T, s *server) {
	t.Helper()
	direct := dial(t, s.addr())
	for range 100 {
		direct.ask(t, "direct")
	}
}

// The server doesn't read, and gets more bytes than the sockets buffer.
func TestDeliverIsConfirmed(t *testing.T) {
	listener := listen(t)
	link := startLink(t, listener.Addr().String())
	deliver := inForce(t)(link.HoldRequests(soon(t)))

	c := dial(t, link.Addr())
	var sent []byte
	for i := range uint64(2 << 20) {
		sent = binary.BigEndian.AppendUint64(sent, i)
	}
	_, err := c.Write(sent)
	require.NoError(t, err, "a held sender is not held up")
	require.NoError(t, c.Close())
	conn, err := listener.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })

	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, deliver(short), context.DeadlineExceeded)
	_, err = link.HoldRequests(soon(t))
	require.Error(t, err, "the first hold is not over")

	var wg sync.WaitGroup
	defer wg.Wait()
	var got []byte
	wg.Go(func() { got, err = io.ReadAll(conn) })
	require.NoError(t, deliver(soon(t)))
	wg.Wait()
	require.NoError(t, err)
	require.True(t, bytes.Equal(sent, got), "got %d bytes, want the %d that were sent", len(got), len(sent))
}

// A cut loses the server's FIN too: clients learn of its death after the heal.
func TestCutLosesEnds(t *testing.T) {
	s := startServer(t)
	link := startLink(t, s.addr())
	c := dial(t, link.Addr())
	c.ask(t, "before")
	heal := inForce(t)(link.Cut(soon(t)))
	s.stop()
	c.wantSilence(t)
	require.NoError(t, heal(soon(t)))
	c.wantNoReply(t)
}

func requireRefused(t *testing.T, l *faults.Link) {
	t.Helper()
	_, err := l.Dial(soon(t))
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
}

func TestRefuse(t *testing.T) {
	s := startServer(t)
	link := startLink(t, s.addr())
	ctx, cancel := context.WithCancel(t.Context())
	var retrying sync.WaitGroup
	defer retrying.Wait()
	defer cancel()
	var refusing atomic.Bool
	for range 3 {
		retrying.Go(func() {
			for ctx.Err() == nil {
				conn, err := new(net.Dialer).DialContext(ctx, "tcp", link.Addr())
				if err != nil {
					continue
				}
				before := refusing.Load()
				_, err = io.WriteString(conn, "x\n")
				if err == nil {
					_, err = bufio.NewReader(conn).ReadString('\n')
				}
				if err == nil && before && refusing.Load() {
					t.Error("an answer under a refuse")
				}
				_ = conn.Close()
			}
		})
	}
	for i := range 20 {
		await(t, "progress", func() bool { return len(s.log("x")) > i })
		c, idle := dial(t, link.Addr()), dial(t, link.Addr())
		c.ask(t, "before")
		heal := inForce(t)(link.Refuse(soon(t)))
		refusing.Store(true)
		requireRefused(t, link)
		c.wantNoReply(t)
		idle.wantNoReply(t)
		requireBusy(t)(link.Refuse(soon(t)))
		requireBusy(t)(link.HoldRequests(soon(t)))
		requireRefused(t, link)
		refusing.Store(false)

		require.NoError(t, heal(soon(t)))
		dial(t, link.Addr()).ask(t, "after")
		require.NoError(t, heal(soon(t)))
	}
}

func TestRefuseClosesServerSide(t *testing.T) {
	listener := listen(t)
	link := startLink(t, listener.Addr().String())
	dial(t, link.Addr())
	conn, err := listener.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	slow := inForce(t)(link.DelayRequests(soon(t), time.Hour))
	requireBusy(t)(link.Refuse(soon(t)))
	require.NoError(t, slow(soon(t)))
	inForce(t)(link.Refuse(soon(t)))
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(30*time.Second)))
	_, err = conn.Read(make([]byte, 1))
	require.Error(t, err)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "the connection to the server is open")
}

func TestRefuseHealedLater(t *testing.T) {
	s := startServer(t)
	link := startLink(t, s.addr())
	heal := inForce(t)(link.Refuse(soon(t)))
	thief, err := new(net.ListenConfig).Listen(t.Context(), "tcp", link.Addr())
	require.NoError(t, err)
	require.ErrorIs(t, heal(soon(t)), syscall.EADDRINUSE)
	requireBusy(t)(link.Cut(soon(t)))
	require.NoError(t, thief.Close())
	requireRefused(t, link)
	require.NoError(t, heal(soon(t)))
	dial(t, link.Addr()).ask(t, "after")
}

func TestLinkWithoutServer(t *testing.T) {
	s := startServer(t)
	s.stop()
	link := startLink(t, s.addr())
	dial(t, link.Addr()).wantNoReply(t)
}

func TestLinkClose(t *testing.T) {
	for name, inject := range map[string]func(*faults.Link, context.Context) (faults.Heal, error){
		"held": (*faults.Link).HoldRequests, "lost": (*faults.Link).LoseReplies, "refused": (*faults.Link).Refuse,
		"delayed": func(l *faults.Link, ctx context.Context) (faults.Heal, error) { return l.Delay(ctx, time.Hour) },
	} {
		for _, gone := range []string{"", "client", "server"} {
			t.Run(name+" "+gone, func(t *testing.T) {
				before := goleak.IgnoreCurrent()
				s := startServer(t)
				link, err := faults.NewLink(s.addr())
				require.NoError(t, err)
				c := dial(t, link.Addr())
				c.ask(t, "before")
				heal := inForce(t)(inject(link, soon(t)))
				for range 3 {
					_, _ = io.WriteString(c, "x\n")
					askOften(t, s)
				}
				switch gone {
				case "client":
					require.NoError(t, c.Close())
				case "server":
					s.stop()
					short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
					defer cancel()
					_ = heal(short) // sockets of a dead server may accept the bytes or not
				}
				require.NoError(t, link.Close(), "an error says that Close ran into its timeout")
				require.NoError(t, link.Close())
				if gone != "server" {
					require.ErrorIs(t, heal(soon(t)), net.ErrClosed)
				}
				_, err = link.HoldRequests(soon(t))
				require.ErrorIs(t, err, net.ErrClosed)
				_, err = new(net.Dialer).DialContext(soon(t), "tcp", link.Addr())
				require.Error(t, err)
				s.stop()
				require.NoError(t, testmain.FindLeaks(before))
			})
		}
	}
}

func TestAwaitHeld(t *testing.T) {
	s := startServer(t)
	link := startLink(t, s.addr())
	require.Error(t, link.AwaitHeld(soon(t)), "nothing can be held without a hold")
	c := dial(t, link.Addr())
	c.ask(t, "before")
	deliver := inForce(t)(link.HoldRequests(soon(t)))
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, link.AwaitHeld(ctx), context.DeadlineExceeded, "what came before the hold is not held")

	waiting := make(chan error, 1)
	go func() { waiting <- link.AwaitHeld(t.Context()) }()
	c.send(t, "held")
	require.NoError(t, <-waiting)
	require.Empty(t, s.log("held"))
	require.NoError(t, link.AwaitHeld(soon(t)), "it is held still")
	require.NoError(t, deliver(soon(t)))
	c.wantReply(t, "held")

	again := inForce(t)(link.HoldRequests(soon(t)))
	require.ErrorIs(t, link.AwaitHeld(ctx), context.DeadlineExceeded, "what an earlier hold has held")
	go func() { waiting <- link.AwaitHeld(t.Context()) }()
	require.NoError(t, again(soon(t)))
	require.Error(t, <-waiting, "the hold has ended")
}
