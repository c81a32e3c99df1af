package locks

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"log"
	"net"
	"strings"
	"time"

	"github.com/go-zookeeper/zk"
	"golang.org/x/sync/singleflight"

	"github.com/fencelab/fencelab/dlock/zklock"
)

// usualSession allows for reconnecting. zklock's waiters end a dead holder's lease by its TTL.
const usualSession = 10 * time.Second

func openZooKeeper(ctx context.Context, s Spec) (*Backend, error) {
	conn, events, err := zk.Connect(s.Addrs, max(2*s.TTL, cmp.Or(s.MinSession, usualSession)), zk.WithLogger(log.New(io.Discard, "", 0)), zk.WithDialer(s.ZKDialer())) //nolint:contextcheck // the client lasts
	if err != nil {
		return nil, fmt.Errorf("locks: zookeeper: %w", err)
	}
	var pings singleflight.Group // go-zookeeper's calls take no context
	c := client{
		ping: func(ctx context.Context) error {
			select {
			case r := <-pings.DoChan("", func() (any, error) {
				_, _, err := conn.Exists("/")
				return nil, err
			}):
				return r.Err
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		},
		close: func() error { conn.Close(); return nil },
	}
	ctx, cancel := context.WithTimeoutCause(ctx, answerTimeout,
		fmt.Errorf("no server answered within %v at %s", answerTimeout, strings.Join(s.Addrs, ", ")))
	defer cancel()
	for { // zklock needs the session timeout
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

// ZKDialer returns the dialer of a client that connects with s.Dial.
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
