package locks

import (
	"context"
	"errors"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/dlock/redlock"
	"github.com/fencelab/fencelab/internal/redisclient"
)

func openRedis(ctx context.Context, s Spec) (*Backend, error) {
	addr, err := s.one()
	if err != nil {
		return nil, err
	}
	o, err := redisclient.Options(addr, s.Dial)
	if err != nil {
		return nil, err
	}
	c, err := redisclient.OfCluster(ctx, addr, o)
	if err != nil {
		return nil, err
	}
	b, err := redislock.New(c, nil)
	return opened(b, err, client{func(ctx context.Context) error { return c.Ping(ctx).Err() }, c.Close})
}

// OpenRedlock opens a Redlock with options.
func OpenRedlock(_ context.Context, s Spec, opts *redlock.Options) (*Backend, error) {
	var clients []*redis.Client
	all := client{
		ping: func(ctx context.Context) error { // a majority is enough
			replies := make(chan error, len(clients))
			for _, c := range clients {
				go func() { replies <- c.Ping(ctx).Err() }()
			}
			quorum := len(clients)/2 + 1
			var errs []error
			for up := 0; up < quorum; {
				err := <-replies
				if err == nil {
					up++
					continue
				}
				if errs = append(errs, err); len(errs) > len(clients)-quorum {
					return errors.Join(errs...)
				}
			}
			return nil
		},
		close: func() error {
			var errs []error
			for _, c := range clients {
				errs = append(errs, c.Close())
			}
			return errors.Join(errs...)
		},
	}
	var nodes []redis.UniversalClient
	for _, addr := range s.Addrs {
		o, err := redisclient.Options(addr, s.Dial)
		if err != nil {
			return nil, errors.Join(err, all.close())
		}
		o.MaxRetries, o.DialerRetries = -1, 1 // a failing node is outvoted until the next attempt
		c := redis.NewClient(o)
		clients, nodes = append(clients, c), append(nodes, c)
	}
	b, err := redlock.New(nodes, opts)
	return opened(b, err, all)
}
