package servercost

import (
	"context"
	"errors"
	"io"
	"slices"

	"github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/etcdlock"
	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/redisclient"
)

// Open returns a client of a Redis or an etcd, which may not have answered yet, and a watch.
func Open(ctx context.Context, spec locks.Spec) (b dlock.Backend, s *Server, closeAll func() error, err error) {
	c := &closers{}
	if spec.Lock == locks.Etcd {
		var client *clientv3.Client
		if client, b, err = c.etcd(clientv3.Config{
			Endpoints: spec.Addrs, DialKeepAliveTime: cli.ReachTimeout, DialKeepAliveTimeout: cli.ReachTimeout, // else a call waits for a frozen server
		}); err == nil {
			s = WatchEtcd(ctx, client)
		}
	} else {
		var client *redis.Client
		client, err = redisclient.New(spec.Addrs[0])
		if err = c.add(client, err); err == nil {
			s = WatchRedis(ctx, client)
			b, err = c.pipelined(client)
		}
	}
	if s != nil {
		*c = append(*c, s.Close)
	}
	if err != nil {
		return nil, nil, nil, errors.Join(err, c.close())
	}
	return b, s, c.close, nil
}

type closers []func() error

// add adds x if err is nil, and returns err.
func (c *closers) add(x io.Closer, err error) error {
	if err == nil {
		*c = append(*c, x.Close)
	}
	return err
}

func (c *closers) close() (err error) {
	for _, f := range slices.Backward(*c) {
		err = errors.Join(err, f())
	}
	*c = nil
	return err
}

func (c *closers) pipelined(client *redis.Client) (dlock.Backend, error) {
	pipe, err := client.AutoPipeline()
	if err = c.add(pipe, err); err != nil {
		return nil, err
	}
	b, err := redislock.New(pipe, nil)
	return b, c.add(b, err)
}

func (c *closers) etcd(config clientv3.Config) (*clientv3.Client, *etcdlock.Backend, error) {
	config.Logger = zap.NewNop()
	client, err := clientv3.New(config)
	if err = c.add(client, err); err != nil {
		return nil, nil, err
	}
	b, err := etcdlock.New(client, nil)
	return client, b, c.add(b, err)
}
