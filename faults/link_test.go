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
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"

	"github.com/fencelab/fencelab/faults"
)

// server applies lines, which is to say it logs them, and answers each with "ok " and the line.
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
		_, _ = fmt.Fprintf(conn, "ok %s\n", lines.Text()) // what is sent is applied, whether its sender still listens or not
	}
	_ = conn.Close()
}

func (s *server) addr() string { return s.listener.Addr().String() }

// stop closes every connection and returns once nothing of the server runs.
func (s *server) stop() {
	_ = s.listener.Close()
	s.mu.Lock()
	for _, conn := range s.conns {
		_ = conn.Close()
	}
	s.mu.Unlock()
	s.wg.Wait()
}

// log returns the lines applied so far that begin with prefix.
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
	conn, err := new(net.Dialer).DialContext(t.Context(), "tcp", addr)
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

// wantNoReply waits until the connection is closed, and wants no byte before that.
func (c *client) wantNoReply(t *testing.T) {
	t.Helper()
	got, err := c.replies.ReadString('\n')
	require.Error(t, err)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "the connection is still open")
	require.Empty(t, got)
}

// wantSilence wants neither a byte nor the connection's end for a while.
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

// askOften takes longer than a line takes through a link, and says so through a server that works.
func askOften(t *testing.T, s *server) {
	t.Helper()
	direct := dial(t, s.addr())
	for range 100 {
		direct.ask(t, "direct")
	}
}

func TestHoldRequests(t *testing.T) {
	s := startServer(t)
	link := startLink(t, s.addr())
	dying, living := dial(t, link.Addr()), dial(t, link.Addr())
	dying.ask(t, "before")
	living.ask(t, "before")

	deliver, err := link.HoldRequests(t.Context())
	require.NoError(t, err)
	var want []string
	for i := range 10 {
		line := fmt.Sprintf("held %d", i)
		want = append(want, line)
		dying.send(t, line)
	}
	require.NoError(t, dying.Close())
	living.send(t, "living")
	late := dial(t, link.Addr())
	late.send(t, "late")
	askOften(t, s)
	require.Empty(t, s.log("held"))
	require.Empty(t, s.log("l"))

	require.NoError(t, deliver(t.Context()))
	living.wantReply(t, "living")
	late.wantReply(t, "late")
	await(t, "delivery", func() bool { return len(s.log("held")) >= len(want) })
	living.ask(t, "after")
	late.ask(t, "after")
	require.Equal(t, want, s.log("held"), "each line once and in order")
	require.Equal(t, []string{"before", "before"}, s.log("before"))
}

// Bytes that no socket takes are not delivered yet, and deliver says so. More is held than socket buffers take, for a
// server that doesn't read.
func TestDeliverIsConfirmed(t *testing.T) {
	listener := listen(t)
	link := startLink(t, listener.Addr().String())
	deliver, err := link.HoldRequests(t.Context())
	require.NoError(t, err)

	c := dial(t, link.Addr())
	var sent []byte
	for i := range uint64(2 << 20) {
		sent = binary.BigEndian.AppendUint64(sent, i)
	}
	_, err = c.Write(sent)
	require.NoError(t, err, "a held sender is not held up")
	require.NoError(t, c.Close())
	conn, err := listener.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })

	short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, deliver(short), context.DeadlineExceeded)
	_, err = link.HoldRequests(t.Context())
	require.Error(t, err, "the first hold is not over")

	var wg sync.WaitGroup
	defer wg.Wait()
	var got []byte
	wg.Go(func() { got, err = io.ReadAll(conn) })
	require.NoError(t, deliver(t.Context()))
	wg.Wait()
	require.NoError(t, err)
	require.True(t, bytes.Equal(sent, got), "got %d bytes, want the %d that were sent", len(got), len(sent))
}

func TestLoseReplies(t *testing.T) {
	s := startServer(t)
	link := startLink(t, s.addr())
	c, idle := dial(t, link.Addr()), dial(t, link.Addr())
	c.ask(t, "before")
	idle.ask(t, "before")

	heal, err := link.LoseReplies(t.Context())
	require.NoError(t, err)
	c.send(t, "x")
	fresh := dial(t, link.Addr())
	fresh.send(t, "x")
	await(t, "effect", func() bool { return len(s.log("x")) == 2 }) // applied, though unanswered
	fresh.wantSilence(t)

	require.NoError(t, heal(t.Context()))
	c.wantNoReply(t)
	idle.wantNoReply(t)
	dial(t, link.Addr()).ask(t, "after")
	require.NoError(t, heal(t.Context()))
	require.Len(t, s.log("x"), 2)
}

func TestLoseRequests(t *testing.T) {
	for name, inject := range map[string]func(*faults.Link, context.Context) (faults.Heal, error){
		"LoseRequests": (*faults.Link).LoseRequests,
		"Cut":          (*faults.Link).Cut,
	} {
		t.Run(name, func(t *testing.T) {
			s := startServer(t)
			link := startLink(t, s.addr())
			c, idle := dial(t, link.Addr()), dial(t, link.Addr())
			c.ask(t, "before")
			idle.ask(t, "before")

			heal, err := inject(link, t.Context())
			require.NoError(t, err)
			c.send(t, "x")
			dial(t, link.Addr()).send(t, "new")
			askOften(t, s)
			require.Empty(t, s.log("x"))
			require.Empty(t, s.log("new"))

			require.NoError(t, heal(t.Context()))
			c.wantNoReply(t)
			idle.wantNoReply(t)
			dial(t, link.Addr()).ask(t, "after")
			require.NoError(t, heal(t.Context()))
			require.Empty(t, s.log("x"))
		})
	}
}

// A cut loses the server's farewell too: a client learns of neither its replies nor its death before the heal.
func TestCutLosesRepliesAndEnds(t *testing.T) {
	s := startServer(t)
	link := startLink(t, s.addr())
	c := dial(t, link.Addr())
	c.ask(t, "before")
	hold, err := link.HoldRequests(t.Context())
	require.NoError(t, err)
	_, err = link.Cut(t.Context())
	require.ErrorContains(t, err, "another fault")
	require.NoError(t, hold(t.Context()))
	c.ask(t, "a cut that failed left nothing behind")

	heal, err := link.Cut(t.Context())
	require.NoError(t, err)
	s.stop()
	c.wantSilence(t)
	require.NoError(t, heal(t.Context()))
	c.wantNoReply(t)
}

func TestFaultsOfOneLink(t *testing.T) {
	s := startServer(t)
	link := startLink(t, s.addr())
	c := dial(t, link.Addr())
	c.ask(t, "before")
	deliver, err := link.HoldRequests(t.Context())
	require.NoError(t, err)
	_, err = link.LoseRequests(t.Context())
	require.ErrorContains(t, err, "another fault")

	// Directions are ruled apart: a late request whose reply is lost.
	c.send(t, "x")
	heal, err := link.LoseReplies(t.Context())
	require.NoError(t, err)
	askOften(t, s)
	require.Empty(t, s.log("x"))
	require.NoError(t, deliver(t.Context()))
	await(t, "delivery", func() bool { return len(s.log("x")) == 1 })
	_, err = link.Cut(t.Context())
	require.ErrorContains(t, err, "another fault")
	fresh := dial(t, link.Addr())
	fresh.send(t, "a cut that failed loses no request")
	await(t, "effect", func() bool { return len(s.log("a cut")) == 1 })
	require.NoError(t, heal(t.Context()))
	c.wantNoReply(t)

	// A heal ends its own fault, not a later one.
	again, err := link.HoldRequests(t.Context())
	require.NoError(t, err)
	require.NoError(t, deliver(t.Context()))
	d := dial(t, link.Addr())
	d.send(t, "y")
	askOften(t, s)
	require.Empty(t, s.log("y"))
	require.NoError(t, again(t.Context()))
	d.wantReply(t, "y")

	ended, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = link.HoldRequests(ended)
	require.ErrorIs(t, err, context.Canceled)
	d.ask(t, "z")
}

func TestLinkPassesEverything(t *testing.T) {
	s := startServer(t)
	link := startLink(t, s.addr())
	c := dial(t, link.Addr())
	var wg sync.WaitGroup
	defer wg.Wait()
	line := strings.Repeat("0123456789", 1000)
	wg.Go(func() {
		for i := range 500 {
			if _, err := fmt.Fprintf(c, "%d %s\n", i, line); err != nil {
				return
			}
		}
	})
	for i := range 500 {
		c.wantReply(t, fmt.Sprintf("%d %s", i, line))
	}
}

func TestLinkWithoutServer(t *testing.T) {
	s := startServer(t)
	s.stop()
	link := startLink(t, s.addr())
	dial(t, link.Addr()).wantNoReply(t)
}

// A link leaves nothing running, whatever state its connections are in.
func TestLinkClose(t *testing.T) {
	for name, prepare := range map[string]func(*testing.T, *faults.Link, *server) faults.Heal{
		"held bytes": func(t *testing.T, link *faults.Link, _ *server) faults.Heal {
			deliver, err := link.HoldRequests(t.Context())
			require.NoError(t, err)
			for range 3 {
				c := dial(t, link.Addr())
				c.send(t, "x")
				c.send(t, "y")
			}
			return deliver
		},
		"held bytes, client gone": func(t *testing.T, link *faults.Link, s *server) faults.Heal {
			c := dial(t, link.Addr())
			c.ask(t, "before")
			deliver, err := link.HoldRequests(t.Context())
			require.NoError(t, err)
			c.send(t, "x")
			c.send(t, "y")
			require.NoError(t, c.Close())
			askOften(t, s)
			return deliver
		},
		"held bytes, server gone": func(t *testing.T, link *faults.Link, s *server) faults.Heal {
			c := dial(t, link.Addr())
			c.ask(t, "before")
			deliver, err := link.HoldRequests(t.Context())
			require.NoError(t, err)
			for range 3 {
				c.send(t, "x")
				askOften(t, s)
			}
			s.stop()
			short, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			_ = deliver(short) // the socket of a dead server may take the bytes or not
			return nil
		},
		"lost bytes": func(t *testing.T, link *faults.Link, s *server) faults.Heal {
			c := dial(t, link.Addr())
			heal, err := link.LoseReplies(t.Context())
			require.NoError(t, err)
			c.send(t, "x")
			await(t, "effect", func() bool { return len(s.log("x")) == 1 })
			return heal
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := goleak.IgnoreCurrent()
			s := startServer(t)
			link, err := faults.NewLink(s.addr())
			require.NoError(t, err)
			heal := prepare(t, link, s)

			start := time.Now()
			require.NoError(t, link.Close())
			require.Less(t, time.Since(start), 4*time.Second, "Close ran into its timeout")
			require.NoError(t, link.Close())
			if heal != nil {
				require.ErrorIs(t, heal(t.Context()), net.ErrClosed)
			}
			_, err = link.HoldRequests(t.Context())
			require.ErrorIs(t, err, net.ErrClosed)
			_, err = new(net.Dialer).DialContext(t.Context(), "tcp", link.Addr())
			require.Error(t, err)
			s.stop()
			require.NoError(t, goleak.Find(before))
			require.Empty(t, s.log("y"))
		})
	}
}

func TestAwaitHeld(t *testing.T) {
	s := startServer(t)
	link := startLink(t, s.addr())
	require.Error(t, link.AwaitHeld(t.Context()), "nothing can be held without a hold")
	c := dial(t, link.Addr())
	c.ask(t, "before")

	deliver, err := link.HoldRequests(t.Context())
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, link.AwaitHeld(ctx), context.DeadlineExceeded, "what came before the hold is not held")

	c.send(t, "held")
	require.NoError(t, link.AwaitHeld(t.Context()))
	require.Empty(t, s.log("held"))
	require.NoError(t, link.AwaitHeld(t.Context()), "it is held still")

	waiting := make(chan error, 1)
	second := startLink(t, s.addr())
	deliver2, err := second.HoldRequests(t.Context())
	require.NoError(t, err)
	go func() { waiting <- second.AwaitHeld(t.Context()) }()
	require.NoError(t, deliver2(t.Context()))
	require.Error(t, <-waiting, "the hold has ended")

	require.NoError(t, deliver(t.Context()))
	c.wantReply(t, "held")
	require.Error(t, link.AwaitHeld(t.Context()))
}
