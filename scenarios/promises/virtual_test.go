package promises_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"runtime/pprof"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/promises"
)

func init() { redis.SetLogger(quiet{}) }

type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

// network's ahead is how far the servers' clocks are ahead.
type network struct {
	servers map[string]*miniredis.Miniredis // by address
	ahead   atomic.Int64

	mu    sync.Mutex
	links map[string]*faults.Link // by address
}

type networkKey struct{}

// link's address must be an IP literal: nothing resolves names in virtual time.
func (n *network) link(to scenarios.Node) (*faults.Link, string, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	addr := fmt.Sprintf("127.0.0.1:%d", 1000+len(n.links))
	l, err := faults.NewMemoryLink(addr, n.servers[to.Addr].Dial)
	n.links[addr] = l
	return l, addr, err
}

func (n *network) dial(ctx context.Context, _, addr string) (net.Conn, error) {
	n.mu.Lock()
	l := n.links[addr]
	n.mu.Unlock()
	type dialed struct {
		net.Conn
		err error
	}
	done := make(chan dialed, 1)
	go func() {
		pprof.SetGoroutineLabels(context.Background()) //nolint:contextcheck // no labels: the link's goroutines aren't the lock's
		conn, err := l.Dial(ctx)
		done <- dialed{conn, err}
	}()
	d := <-done
	return d.Conn, d.err
}

func (n *network) fault(_ context.Context, st scenarios.Step) error {
	if st.Verb == "jump" {
		d, err := time.ParseDuration(st.Detail)
		n.ahead.Add(int64(d))
		return err
	}
	for addr, m := range n.servers {
		switch {
		case st.Verb == "deny":
			m.SetError("NOREPLICAS Not enough good replicas to write.")
		case st.Verb == "allow":
			m.SetError("")
		case st.Target == scenarios.LockService || st.Target == addr:
			m.FlushAll()
			conn, err := m.Dial()
			if err != nil {
				return err
			}
			if _, err = io.WriteString(conn, "*2\r\n$6\r\nSCRIPT\r\n$5\r\nFLUSH\r\n"); err == nil {
				_, err = conn.Read(make([]byte, 16))
			}
			if err = errors.Join(err, conn.Close()); err != nil {
				return err
			}
		}
	}
	return nil
}

func virtually(t *testing.T, n int, open scenarios.Open, f func(t *testing.T, k promises.Kit)) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		defer time.Sleep(time.Minute) // what the locks have left behind ends
		w := &network{servers: map[string]*miniredis.Miniredis{}, links: map[string]*faults.Link{}}
		s := &scenarios.Service{Lock: "mine", NoRenew: true, Server: "miniredis", Fault: w.fault}
		for i := range n {
			m := miniredis.NewMiniRedis()
			m.ClockTTL(true)
			defer m.Close()
			addr := fmt.Sprintf("127.0.0.1:%d", 1+i)
			w.servers[addr] = m
			s.Nodes = append(s.Nodes, scenarios.Node{Name: addr, Addr: addr})
		}
		s.Forget = func(_ context.Context, key string) error {
			for _, m := range w.servers {
				m.Del(key)
			}
			return nil
		}
		f(t, promises.Over(promises.Kit{
			Service: s, Only: promises.Names(),
			Open: func(ctx context.Context, s scenarios.LockSpec) (scenarios.Lock, error) {
				return open(context.WithValue(ctx, networkKey{}, w), s)
			},
		}, w.link))
	})
}

// requireBroken also requires that all other promises that can be checked are kept.
func requireBroken(t *testing.T, r *promises.Report, broken ...string) {
	t.Helper()
	for _, row := range r.Rows {
		want := promises.Kept
		switch {
		case slices.Contains(broken, row.Promise):
			want = promises.Broken
		case row.Excluded:
			want = promises.Unchecked
		}
		require.Equal(t, want, row.Verdict, "%s: %s", row.Promise, row.Why)
	}
}
