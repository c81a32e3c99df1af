package faults_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/faults"
)

type reader struct {
	net.Conn
	got    string // without "ok "
	last   time.Duration
	closed bool
}

func read(conn net.Conn) *reader {
	r, start := &reader{Conn: conn}, time.Now()
	go func() {
		for lines := bufio.NewScanner(conn); lines.Scan(); r.last = time.Since(start) {
			r.got += lines.Text()[len("ok "):]
		}
		r.closed = true
	}()
	return r
}

func inMemory(t *testing.T) (s *server, link *faults.Link, dial func() *reader) {
	t.Helper()
	s = &server{}
	link, err := faults.NewMemoryLink("mine", func() (net.Conn, error) {
		ours, theirs := net.Pipe()
		go s.serve(theirs)
		return ours, nil
	})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, link.Close()) })
	return s, link, func() *reader {
		conn, err := link.Dial(t.Context())
		require.NoError(t, err)
		return read(conn)
	}
}

func (r *reader) say(t *testing.T, line string) {
	t.Helper()
	_, err := io.WriteString(r, line+"\n")
	require.NoError(t, err)
	synctest.Wait()
}

// The effects of each fault in force, and after the heal, on clients that exist before, come later, send nothing, or have gone.
func TestLinkFaults(t *testing.T) {
	slow := func(inject func(*faults.Link, context.Context, time.Duration) (faults.Heal, error), d time.Duration) func(*faults.Link, context.Context) (faults.Heal, error) {
		return func(l *faults.Link, ctx context.Context) (faults.Heal, error) { return inject(l, ctx, d) }
	}
	for name, f := range map[string]struct {
		inject          func(*faults.Link, context.Context) (faults.Heal, error)
		during          string        // which of the two lines sent during the fault the server has got
		after           string        // what the server has got after the heal
		replies         string        // what the client has got after the heal
		took            time.Duration // until the replies came
		refused, closed bool          // no connection is accepted during the fault; the heal closes the connection
	}{
		"none":             {func(*faults.Link, context.Context) (faults.Heal, error) { return nothing, nil }, "ab", "ab", "ab", 0, false, false},
		"Cut":              {(*faults.Link).Cut, "", "", "", 0, false, true},
		"HoldRequests":     {(*faults.Link).HoldRequests, "", "ab", "ab", time.Minute, false, false},
		"LoseRequests":     {(*faults.Link).LoseRequests, "", "", "", 0, false, true},
		"LoseReplies":      {(*faults.Link).LoseReplies, "ab", "ab", "", 0, false, true},
		"LoseRequestsFrom": {second((*faults.Link).LoseRequestsFrom), "a", "a", "a", 0, false, true},
		"LoseRepliesFrom":  {second((*faults.Link).LoseRepliesFrom), "ab", "ab", "a", 0, false, true},
		"DelayRequests":    {slow((*faults.Link).DelayRequests, time.Hour), "", "ab", "ab", time.Minute, false, false},
		"DelayReplies":     {slow((*faults.Link).DelayReplies, time.Second), "ab", "ab", "ab", time.Second, false, false},
		"Delay":            {slow((*faults.Link).Delay, time.Second), "ab", "ab", "ab", 2 * time.Second, false, false},
		"Refuse":           {(*faults.Link).Refuse, "", "", "", 0, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, link, dial := inMemory(t)
				require.Equal(t, "mine", link.Addr())
				c, idle, dying := dial(), dial(), dial()
				synctest.Wait()
				require.Equal(t, 3, link.Connections())
				heal := inForce(t)(f.inject(link, t.Context()))
				send := func(c net.Conn, line string) {
					_, err := io.WriteString(c, line+"\n")
					require.Equal(t, f.refused, err != nil)
					synctest.Wait() // makes each line a message of its own
				}
				send(c, "a")
				send(c, "b")
				send(dying, "d")
				require.NoError(t, dying.Close())
				fresh, err := link.Dial(t.Context())
				require.Equal(t, f.refused, errors.Is(err, syscall.ECONNREFUSED))
				var late *reader
				if err == nil {
					late = read(fresh)
					late.say(t, "f")
				}
				time.Sleep(time.Minute)
				applied := func(want string) {
					t.Helper()
					require.Equal(t, want, strings.Join(s.log("a"), "")+strings.Join(s.log("b"), ""))
					require.Equal(t, strings.Contains(want, "b"), len(s.log("d")) == 1)
					require.Equal(t, strings.Contains(want, "b"), len(s.log("f")) == 1)
				}
				applied(f.during)
				require.Equal(t, f.refused, c.closed)
				if name != "none" {
					requireBusy(t)(link.Cut(t.Context()))
				}
				require.NoError(t, heal(t.Context()))
				require.NoError(t, heal(t.Context()), "again")
				synctest.Wait()
				applied(f.after)
				require.Equal(t, []any{f.replies, f.took, f.closed, f.closed}, []any{c.got, c.last, c.closed, idle.closed})
				if late != nil {
					require.Equal(t, []any{strings.Contains(f.replies, "b"), f.closed}, []any{late.got == "f", late.closed})
				}
				if !f.closed {
					idle.say(t, "i")
					require.Equal(t, "i", idle.got)
				}
				after := dial()
				after.say(t, "after")
				require.Equal(t, "after", after.got)
				require.NoError(t, link.Close())
				require.Zero(t, link.Connections())
				synctest.Wait()
				require.True(t, after.closed)
				_, err = link.Dial(t.Context())
				require.ErrorIs(t, err, syscall.ECONNREFUSED)
			})
		})
	}
	refuses, err := faults.NewMemoryLink("mine", func() (net.Conn, error) { return nil, net.ErrClosed })
	require.NoError(t, err)
	_, err = refuses.Dial(t.Context())
	require.ErrorIs(t, err, net.ErrClosed)
	for _, d := range []time.Duration{0, -time.Second} {
		_, err := refuses.Delay(t.Context(), d)
		require.ErrorContains(t, err, "must be positive")
	}
	require.NoError(t, refuses.Close())
}

// Directions are independent, a failed fault leaves nothing behind, and a heal ends only its own fault.
func TestFaultsOfOneLink(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, link, dial := inMemory(t)
		c := dial()
		c.say(t, "before")
		deliver := inForce(t)(link.HoldRequests(t.Context()))
		c.say(t, "x")
		heal := inForce(t)(link.LoseReplies(t.Context()))
		require.Empty(t, s.log("x"))
		require.NoError(t, deliver(t.Context()))
		synctest.Wait()
		require.Len(t, s.log("x"), 1)
		requireBusy(t)(link.Cut(t.Context()))
		dial().say(t, "not cut")
		require.Len(t, s.log("not cut"), 1)
		require.NoError(t, heal(t.Context()))
		synctest.Wait()
		require.Equal(t, []any{"before", true}, []any{c.got, c.closed})

		again := inForce(t)(link.HoldRequests(t.Context()))
		require.NoError(t, deliver(t.Context()))
		d := dial()
		d.say(t, "y")
		require.Empty(t, s.log("y"))
		require.NoError(t, again(t.Context()))
		ended, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := link.HoldRequests(ended)
		require.ErrorIs(t, err, context.Canceled)
		d.say(t, "z")
		require.Equal(t, "yz", d.got)
	})
}

func TestLoseFrom(t *testing.T) {
	for name, c := range map[string]struct {
		lose func(*faults.Link, context.Context, int) (faults.Heal, error)
		want []string
	}{
		"requests": {(*faults.Link).LoseRequestsFrom, []string{"0", "1", "2", "after", "healed before"}},
		"replies":  {(*faults.Link).LoseRepliesFrom, []string{"0", "1", "2", "3", "4", "after", "slow", "healed before"}},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s, l, dial := inMemory(t)
				a, b := dial(), dial()
				a.say(t, "0")
				heal := inForce(t)(c.lose(l, t.Context(), 3))
				a.say(t, "1")
				b.say(t, "2")
				require.False(t, l.Loses())
				a.say(t, "3")
				require.True(t, l.Loses())
				require.Equal(t, 4, l.Messages())
				b.say(t, "4")
				require.Equal(t, []any{"01", "2", false, false}, []any{a.got, b.got, a.closed, b.closed})
				require.NoError(t, heal(t.Context()))
				require.False(t, l.Loses())
				synctest.Wait()
				require.Equal(t, []any{"01", "2", true, true}, []any{a.got, b.got, a.closed, b.closed})
				dial().say(t, "after")

				again := inForce(t)(c.lose(l, t.Context(), 1))
				require.NoError(t, heal(t.Context()), "the heal of another")
				require.False(t, l.HasLost())
				dial().say(t, "slow")
				require.Equal(t, []bool{true, name == "requests"}, []bool{l.Loses(), l.HasLost()}, "no reply yet")
				time.Sleep(2 * time.Second)
				require.True(t, l.HasLost())
				require.NoError(t, again(t.Context()))
				heal = inForce(t)(c.lose(l, t.Context(), 1))
				require.NoError(t, heal(t.Context()))
				last := dial()
				last.say(t, "healed before")
				require.Equal(t, "healed before", last.got)
				require.Equal(t, c.want, s.log(""))
				_, err := c.lose(l, t.Context(), 0)
				require.ErrorContains(t, err, "messages count from 1")
			})
		})
	}
}

func nothing(context.Context) error { return nil }

func second(from func(*faults.Link, context.Context, int) (faults.Heal, error)) func(*faults.Link, context.Context) (faults.Heal, error) {
	return func(l *faults.Link, ctx context.Context) (faults.Heal, error) { return from(l, ctx, 2) }
}
