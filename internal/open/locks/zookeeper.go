package locks

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"strings"
	"time"

	"github.com/go-zookeeper/zk"

	"github.com/fencelab/fencelab/dlock/zklock"
)

// usualSession is the session timeout where the lease's TTL doesn't need a longer one. It is no shorter for short TTLs:
// zklock's waiters end the lease of a dead holder by its TTL, and a connection needs time to be made again.
const usualSession = 10 * time.Second

// openZooKeeper makes a session that is as long as zklock needs for the TTL.
func openZooKeeper(ctx context.Context, s Spec) (*Backend, error) {
	conn, events, err := zk.Connect(s.Addrs, max(2*s.TTL, cmp.Or(s.MinSession, usualSession)), zk.WithLogger(noLog{}), zk.WithDialer(s.ZKDialer())) //nolint:contextcheck // the client lasts
	if err != nil {
		return nil, fmt.Errorf("locks: zookeeper: %w", err)
	}
	c := client{
		ping: func(context.Context) error {
			_, _, err := conn.Exists("/")
			return err
		},
		close: func() error { conn.Close(); return nil },
	}
	ctx, cancel := context.WithTimeoutCause(ctx, answerTimeout,
		fmt.Errorf("no server answered within %v at %s", answerTimeout, strings.Join(s.Addrs, ", ")))
	defer cancel()
	for { // zklock must know what session timeout the server has agreed to
		select {
		case e := <-events:
			if e.State != zk.StateHasSession {
				continue
			}
			b, err := zklock.New(conn, nil)
			return opened(b, err, c)
		case <-ctx.Done():
			conn.Close()
			return nil, fmt.Errorf("locks: zookeeper: %w", context.Cause(ctx))
		}
	}
}

// ZKDialer is how a ZooKeeper client connects that does so as s says.
func (s Spec) ZKDialer() zk.Dialer {
	if s.Dial == nil {
		return net.DialTimeout
	}
	return func(network, addr string, timeout time.Duration) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(context.Background(), timeout)
		defer cancel()
		return s.Dial(ctx, network, addr)
	}
}

type noLog struct{}

func (noLog) Printf(string, ...any) {}
