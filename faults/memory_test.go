package faults_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/faults"
)

// A link in memory has the faults of one over TCP, in virtual time.
func TestMemoryLink(t *testing.T) {
	for name, f := range map[string]struct {
		inject          func(*faults.Link, context.Context) (faults.Heal, error)
		during          string        // what the server has got of the two lines that are sent meanwhile
		after           string        // what it has got once the fault is over
		replies         string        // what the client has got then
		took            time.Duration // until the replies have come
		refused, closed bool          // the connection is closed by the heal; during the fault none is accepted
	}{
		"none":             {func(*faults.Link, context.Context) (faults.Heal, error) { return nothing, nil }, "ab", "ab", "ab", 0, false, false},
		"Cut":              {(*faults.Link).Cut, "", "", "", 0, false, true},
		"HoldRequests":     {(*faults.Link).HoldRequests, "", "ab", "ab", time.Minute, false, false},
		"LoseReplies":      {(*faults.Link).LoseReplies, "ab", "ab", "", 0, false, true},
		"LoseRequestsFrom": {second((*faults.Link).LoseRequestsFrom), "a", "a", "a", 0, false, true},
		"LoseRepliesFrom":  {second((*faults.Link).LoseRepliesFrom), "ab", "ab", "a", 0, false, true},
		"DelayReplies": {func(l *faults.Link, ctx context.Context) (faults.Heal, error) {
			return l.DelayReplies(ctx, time.Second)
		}, "ab", "ab", "ab", time.Second, false, false},
		"Refuse": {(*faults.Link).Refuse, "", "", "", 0, true, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := &server{}
				link, err := faults.NewMemoryLink("mine", func() (net.Conn, error) {
					ours, theirs := net.Pipe()
					go s.serve(theirs)
					return ours, nil
				})
				require.NoError(t, err)
				require.Equal(t, "mine", link.Addr())
				conn, err := link.Dial(t.Context())
				require.NoError(t, err)
				synctest.Wait()
				require.Equal(t, 1, link.Connections())
				heal := inForce(t)(f.inject(link, t.Context()))
				got, last, closed := "", time.Duration(0), false
				start := time.Now()
				go func() {
					for lines := bufio.NewScanner(conn); lines.Scan(); last = time.Since(start) {
						got += lines.Text()[len("ok "):]
					}
					closed = true
				}()
				for _, line := range []string{"a\n", "b\n"} {
					_, err := io.WriteString(conn, line)
					require.Equal(t, f.refused, err != nil)
					synctest.Wait() // two messages
				}
				time.Sleep(time.Minute)
				applied := func() (all string) {
					for _, line := range s.log("") {
						all += line
					}
					return all
				}
				require.Equal(t, f.during, applied())
				require.Equal(t, f.refused, closed)
				second, err := link.Dial(t.Context())
				require.Equal(t, f.refused, errors.Is(err, syscall.ECONNREFUSED))
				if err == nil {
					require.NoError(t, second.Close())
				}
				require.NoError(t, heal(t.Context()))
				synctest.Wait()
				require.Equal(t, []any{f.after, f.replies, f.took, f.closed}, []any{applied(), got, last, closed})
				conn, err = link.Dial(t.Context())
				require.NoError(t, err)
				(&client{conn, bufio.NewReader(conn)}).ask(t, "after")
				require.NoError(t, link.Close())
				require.Zero(t, link.Connections())
				_, err = conn.Read(make([]byte, 1))
				require.Error(t, err)
				_, err = link.Dial(t.Context())
				require.ErrorIs(t, err, syscall.ECONNREFUSED)
			})
		})
	}
	refuses, err := faults.NewMemoryLink("mine", func() (net.Conn, error) { return nil, net.ErrClosed })
	require.NoError(t, err)
	_, err = refuses.Dial(t.Context())
	require.ErrorIs(t, err, net.ErrClosed)
	require.NoError(t, refuses.Close())
}

func nothing(context.Context) error { return nil }

func second(from func(*faults.Link, context.Context, int) (faults.Heal, error)) func(*faults.Link, context.Context) (faults.Heal, error) {
	return func(l *faults.Link, ctx context.Context) (faults.Heal, error) { return from(l, ctx, 2) }
}
