package locks

import (
	"context"
	"fmt"
	"net"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"

	"github.com/fencelab/fencelab/dlock/etcdlock"
)

// EtcdDial returns the options of a client that connects with s.Dial.
func (s Spec) EtcdDial() []grpc.DialOption {
	if s.Dial == nil {
		return nil
	}
	return []grpc.DialOption{grpc.WithContextDialer(func(ctx context.Context, addr string) (net.Conn, error) {
		return s.Dial(ctx, "tcp", addr)
	})}
}

func openEtcd(_ context.Context, s Spec) (*Backend, error) {
	c, err := clientv3.New(clientv3.Config{
		Endpoints: s.Addrs, Logger: zap.NewNop(),
		// Otherwise a call waits for a frozen server. etcd rejects more frequent pings.
		DialKeepAliveTime: answerTimeout, DialKeepAliveTimeout: answerTimeout, DialOptions: s.EtcdDial(),
	})
	if err != nil {
		return nil, fmt.Errorf("locks: etcd: %w", err)
	}
	b, err := etcdlock.New(c, nil)
	return opened(b, err, client{
		ping: func(ctx context.Context) error {
			_, err := c.Get(ctx, "ping", clientv3.WithCountOnly())
			return err
		},
		close: c.Close,
	})
}
