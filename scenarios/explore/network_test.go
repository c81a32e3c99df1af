package explore

import (
	"context"
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// "send x" sends x over the last connection, "dial" opens one, other lines are steps. The server replies to x with X.
func TestFaults(t *testing.T) {
	for _, test := range []struct{ name, steps, want string }{
		{"none", "send a; send b", "send a: server a, client A; send b: server b, client B"},
		{
			"hold", "hold A 1; send a; send b; send c; mend A",
			"hold A 1: ; send a: server a, client A; send b: ; send c: ; mend A: server b, server c, client B, client C",
		},
		{"lag", "lag A 0; send a; send b; mend A", "lag A 0: ; send a: server a; send b: server b; mend A: client A, client B"},
		{"lose a request", "cut A 1; send a; send b; mend A", "cut A 1: ; send a: server a, client A; send b: ; mend A: client end, server end"},
		{"lose a reply", "deafen A 0; send a; mend A", "deafen A 0: ; send a: server a; mend A: client end, server end"},
		{
			"what is held stays so when the direction is cut", "hold A 0; send a; cut A 0; send b; mend A",
			"hold A 0: ; send a: ; cut A 0: ; send b: ; mend A: client end, server a, server end",
		},
		{
			"connections are refused once the fault is in force", "hold A 1; dial; send a; dial; mend A; dial",
			"hold A 1: ; dial: ; send a: server a, client A; dial: refused; mend A: ; dial: ",
		},
		{"reset", "hold A 0; send a; reset A; mend A", "hold A 0: ; send a: ; reset A: client end; mend A: server a, server end"},
		{
			"what a killed process has sent arrives", "hold A 0; send a; kill A; dial; mend A",
			"hold A 0: ; send a: ; kill A: client end; dial: refused; mend A: server a, server end",
		},
		{
			"the server of a process that is killed while it is cut off doesn't learn of that", "cut A 0; kill A; mend A",
			"cut A 0: ; kill A: client end; mend A: server end",
		},
		{"pause", "pause A; send a; dial; resume A", "pause A: ; send a: ; dial: refused; resume A: server a, client A"},
		{
			"pause in the midst of a call", "pause A 1; send a; send b; resume A",
			"pause A 1: ; send a: server a; send b: ; resume A: server b, client A, client B",
		},
		{
			"a frozen process that is killed has sent nothing", "pause A 1; send a; send b; kill A",
			"pause A 1: ; send a: server a; send b: ; kill A: client end, server end",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				wire := &wire{t: t}
				k := &worker{process: &process{client: wire.newClient()}}
				defer time.Sleep(settle)
				defer k.client.mend()
				defer k.client.kill()
				wire.open(k.client)
				var got []string
				for line := range strings.SplitSeq(test.steps, "; ") {
					wire.seen = nil
					words := strings.Fields(line)
					switch words[0] {
					case "send":
						_, err := wire.client.Write([]byte(words[1]))
						require.NoError(t, err)
					case "dial":
						wire.open(k.client)
					default:
						st, err := parseStep(words)
						require.NoError(t, err)
						k.fault(st)
					}
					time.Sleep(settle)
					synctest.Wait()
					got = append(got, fmt.Sprintf("%s: %s", line, strings.Join(wire.seen, ", ")))
				}
				require.Equal(t, test.want, strings.Join(got, "; "))
			})
		})
	}
}

// Although its connections are closed one by one.
func TestKilledSendsNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		wire := &wire{t: t}
		c := wire.newClient()
		wire.open(c)
		c.set(func() { c.dead = true })
		_, err := wire.client.Write([]byte("a"))
		require.NoError(t, err)
		time.Sleep(settle)
		require.Empty(t, wire.seen)
		c.kill()
		time.Sleep(settle)
	})
}

type wire struct {
	t      *testing.T
	client net.Conn
	mu     sync.Mutex
	seen   []string
}

func (w *wire) saw(format string, args ...any) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.seen = append(w.seen, fmt.Sprintf(format, args...))
}

func (w *wire) newClient() *Client {
	c := newClient(1, w.dial)
	c.latency = time.Microsecond
	return c
}

func (w *wire) open(c *Client) {
	conn, err := c.Dial(context.Background(), "tcp", c.Addr(0))
	if err != nil {
		w.saw("refused")
		return
	}
	w.client = conn
	go w.read("client", conn, func(string) {})
}

func (w *wire) dial(int) (net.Conn, error) {
	ours, theirs := net.Pipe()
	go w.read("server", theirs, func(m string) { _, _ = theirs.Write([]byte(strings.ToUpper(m))) })
	return ours, nil
}

func (w *wire) read(who string, c net.Conn, reply func(string)) {
	defer func() { _ = c.Close() }()
	for b := make([]byte, 8); ; {
		n, err := c.Read(b)
		if err != nil {
			w.saw("%s end", who)
			return
		}
		w.saw("%s %s", who, b[:n])
		reply(string(b[:n]))
	}
}
