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
	"github.com/fencelab/fencelab/internal/leak"
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

func TestDelay(t *testing.T) {
	for name, way := range map[string]struct {
		inject  func(*faults.Link, context.Context, time.Duration) (faults.Heal, error)
		legs    time.Duration // of a line and its answer that are delayed
		applied bool          // a line is, though delayed
	}{
		"DelayRequests": {(*faults.Link).DelayRequests, 1, false},
		"DelayReplies":  {(*faults.Link).DelayReplies, 1, true},
		"Delay":         {(*faults.Link).Delay, 2, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := startServer(t)
			link := startLink(t, s.addr())
			c := dial(t, link.Addr())
			c.ask(t, "before")

			const d = 20 * time.Millisecond
			heal, err := way.inject(link, t.Context(), d)
			require.NoError(t, err)
			fresh := dial(t, link.Addr())
			var want []string
			var sent []time.Time
			for i := range 20 {
				line := fmt.Sprintf("slow %d", i)
				want = append(want, line)
				sent = append(sent, time.Now())
				c.send(t, line)
				fresh.send(t, "fresh")
			}
			for i, line := range want {
				c.wantReply(t, line)
				require.GreaterOrEqual(t, time.Since(sent[i]), way.legs*d, line)
				fresh.wantReply(t, "fresh")
				require.GreaterOrEqual(t, time.Since(sent[i]), way.legs*d, "fresh %d", i)
			}
			require.Equal(t, want, s.log("slow"), "each line once and in order")
			require.NoError(t, heal(t.Context()))
			c.ask(t, "after")

			// The heal waits for no delay, and nothing that is under way gets lost by it.
			heal, err = way.inject(link, t.Context(), time.Hour)
			require.NoError(t, err)
			for range 3 {
				c.send(t, "late")
			}
			askOften(t, s)
			if way.applied {
				await(t, "effect", func() bool { return len(s.log("late")) == 3 })
			} else {
				require.Empty(t, s.log("late"))
			}
			c.wantSilence(t)
			_, err = link.Cut(t.Context())
			require.ErrorContains(t, err, "another fault")
			require.NoError(t, heal(t.Context()))
			for range 3 {
				c.wantReply(t, "late")
			}
			require.NoError(t, heal(t.Context()))
			c.ask(t, "after")
			require.Len(t, s.log("late"), 3)

			for _, d := range []time.Duration{0, -time.Second} {
				_, err = way.inject(link, t.Context(), d)
				require.ErrorContains(t, err, "more than 0")
			}
		})
	}
}

// What a client sent before it closed the connection arrives, late, and so does its end.
func TestDelayOfEnd(t *testing.T) {
	listener := listen(t)
	link := startLink(t, listener.Addr().String())
	heal, err := link.DelayRequests(t.Context(), time.Hour)
	require.NoError(t, err)
	c := dial(t, link.Addr())
	conn, err := listener.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	c.send(t, "x")
	require.NoError(t, c.Close())
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(20*time.Millisecond)))
	_, err = conn.Read(make([]byte, 1))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.NoError(t, heal(t.Context()))
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(30*time.Second)))
	got, err := io.ReadAll(conn)
	require.NoError(t, err)
	require.Equal(t, "x\n", string(got))
}

func requireRefused(t *testing.T, addr string) {
	t.Helper()
	_, err := new(net.Dialer).DialContext(t.Context(), "tcp", addr)
	require.ErrorIs(t, err, syscall.ECONNREFUSED)
}

func TestRefuse(t *testing.T) {
	s := startServer(t)
	link := startLink(t, s.addr())
	for range 20 {
		c, idle := dial(t, link.Addr()), dial(t, link.Addr())
		c.ask(t, "before")
		heal, err := link.Refuse(t.Context())
		require.NoError(t, err)
		requireRefused(t, link.Addr())
		c.wantNoReply(t)
		idle.wantNoReply(t)
		_, err = link.Refuse(t.Context())
		require.ErrorContains(t, err, "another fault")
		_, err = link.HoldRequests(t.Context())
		require.ErrorContains(t, err, "another fault")
		requireRefused(t, link.Addr())

		require.NoError(t, heal(t.Context()))
		dial(t, link.Addr()).ask(t, "after")
		require.NoError(t, heal(t.Context()))
	}
}

// The server learns of it too, and what was under way to it is lost.
func TestRefuseClosesServerSide(t *testing.T) {
	listener := listen(t)
	link := startLink(t, listener.Addr().String())
	c := dial(t, link.Addr())
	conn, err := listener.Accept()
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	hold, err := link.HoldRequests(t.Context())
	require.NoError(t, err)
	c.send(t, "x")
	require.NoError(t, link.AwaitHeld(t.Context()))
	_, err = link.Refuse(t.Context())
	require.ErrorContains(t, err, "another fault")
	require.NoError(t, hold(t.Context()))
	line := make([]byte, 2)
	_, err = io.ReadFull(conn, line)
	require.NoError(t, err, "a refuse that failed left nothing behind")

	slow, err := link.DelayRequests(t.Context(), time.Hour)
	require.NoError(t, err)
	c.send(t, "y")
	_ = slow // still in force
	_, err = link.Refuse(t.Context())
	require.ErrorContains(t, err, "another fault")
	require.NoError(t, slow(t.Context()))
	_, err = io.ReadFull(conn, line)
	require.NoError(t, err)

	_, err = link.Refuse(t.Context())
	require.NoError(t, err)
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(30*time.Second)))
	n, err := conn.Read(line)
	require.Zero(t, n)
	require.Error(t, err)
	require.NotErrorIs(t, err, os.ErrDeadlineExceeded, "the connection to the server is open")
}

// Clients that try again all the time get an answer before and after, and none meanwhile.
func TestRefuseUnderLoad(t *testing.T) {
	s := startServer(t)
	link := startLink(t, s.addr())
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	var refusing atomic.Bool
	for range 3 {
		wg.Go(func() {
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
	for i := range 50 {
		await(t, "progress", func() bool { return len(s.log("x")) > i })
		heal, err := link.Refuse(t.Context())
		require.NoError(t, err)
		refusing.Store(true)
		requireRefused(t, link.Addr())
		refusing.Store(false)
		require.NoError(t, heal(t.Context()))
		dial(t, link.Addr()).ask(t, "after")
	}
	cancel()
	wg.Wait()
}

// A heal that fails can be called again, and the fault is in force until then.
func TestRefuseHealedLater(t *testing.T) {
	s := startServer(t)
	link := startLink(t, s.addr())
	heal, err := link.Refuse(t.Context())
	require.NoError(t, err)
	thief, err := new(net.ListenConfig).Listen(t.Context(), "tcp", link.Addr())
	require.NoError(t, err)
	require.ErrorIs(t, heal(t.Context()), syscall.EADDRINUSE)
	_, err = link.Cut(t.Context())
	require.ErrorContains(t, err, "another fault")
	require.NoError(t, thief.Close())
	requireRefused(t, link.Addr())
	require.NoError(t, heal(t.Context()))
	dial(t, link.Addr()).ask(t, "after")
}

func TestPartition(t *testing.T) {
	s := startServer(t)
	var links []*faults.Link
	var clients []*client
	for range 3 {
		link := startLink(t, s.addr())
		links = append(links, link)
		clients = append(clients, dial(t, link.Addr()))
		clients[len(clients)-1].ask(t, "before") // or the link may not have accepted it before the heal
	}
	other := dial(t, startLink(t, s.addr()).Addr())
	for range 2 {
		heal, err := faults.Partition(t.Context(), links...)
		require.NoError(t, err)
		for _, c := range clients {
			c.send(t, "cut")
		}
		askOften(t, s)
		other.ask(t, "other")
		require.Empty(t, s.log("cut"))
		require.NoError(t, heal(t.Context()))
		for i, c := range clients {
			c.wantNoReply(t)
			clients[i] = dial(t, links[i].Addr())
			clients[i].ask(t, "after")
		}
	}

	// If one of them can't be cut, none is.
	for i, busy := range links {
		heal, err := busy.LoseReplies(t.Context())
		require.NoError(t, err)
		_, err = faults.Partition(t.Context(), links...)
		require.ErrorContains(t, err, "another fault")
		for j, link := range links {
			if i != j {
				clients[j].ask(t, "not cut")
				dial(t, link.Addr()).ask(t, "not cut")
			}
		}
		require.NoError(t, heal(t.Context()))
		clients[i] = dial(t, busy.Addr())
	}
	_, err := faults.Partition(t.Context(), links[0], links[1], links[0])
	require.ErrorContains(t, err, "another fault")
	heal, err := faults.Partition(t.Context(), links...)
	require.NoError(t, err, "what failed left nothing behind")
	require.NoError(t, heal(t.Context()))
	_, err = faults.Partition(t.Context())
	require.ErrorContains(t, err, "no links")

	// A link that can't be healed keeps no other from it.
	heal, err = faults.Partition(t.Context(), links...)
	require.NoError(t, err)
	require.NoError(t, links[1].Close())
	require.ErrorIs(t, heal(t.Context()), net.ErrClosed)
	dial(t, links[0].Addr()).ask(t, "after")
	dial(t, links[2].Addr()).ask(t, "after")
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
		"delayed bytes": func(t *testing.T, link *faults.Link, s *server) faults.Heal {
			c := dial(t, link.Addr())
			c.ask(t, "before")
			heal, err := link.Delay(t.Context(), time.Hour)
			require.NoError(t, err)
			c.send(t, "y")
			askOften(t, s)
			return heal
		},
		"refused": func(t *testing.T, link *faults.Link, _ *server) faults.Heal {
			dial(t, link.Addr()).ask(t, "before")
			heal, err := link.Refuse(t.Context())
			require.NoError(t, err)
			return heal
		},
	} {
		t.Run(name, func(t *testing.T) {
			before := goleak.IgnoreCurrent()
			s := startServer(t)
			link, err := faults.NewLink(s.addr())
			require.NoError(t, err)
			heal := prepare(t, link, s)

			require.NoError(t, link.Close(), "an error says that Close ran into its timeout")
			require.NoError(t, link.Close())
			if heal != nil {
				require.ErrorIs(t, heal(t.Context()), net.ErrClosed)
			}
			_, err = link.HoldRequests(t.Context())
			require.ErrorIs(t, err, net.ErrClosed)
			_, err = new(net.Dialer).DialContext(t.Context(), "tcp", link.Addr())
			require.Error(t, err)
			s.stop()
			require.NoError(t, leak.Find(before))
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
