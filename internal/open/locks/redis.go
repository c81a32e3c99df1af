package locks

import (
	"context"
	"errors"
	"fmt"
	"strings"

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
	var c redis.UniversalClient = redis.NewClient(o)
	switch cluster := clustered(ctx, c); {
	case ctx.Err() != nil:
		return nil, errors.Join(context.Cause(ctx), c.Close())
	case cluster: // other keys are on other nodes
		_ = c.Close()
		co := &redis.ClusterOptions{}
		if strings.Contains(addr, "://") {
			if co, err = redis.ParseClusterURL(addr); err != nil { // which may quote a password
				return nil, errors.New("the URL of a Redis Cluster has a parameter that a Cluster's client doesn't take, such as db")
			}
		}
		co.Addrs, co.TLSConfig, co.Dialer, co.ContextTimeoutEnabled = []string{o.Addr}, o.TLSConfig, o.Dialer, true
		c = redis.NewClusterClient(co)
	}
	b, err := redislock.New(c, nil)
	return opened(b, err, client{func(ctx context.Context) error { return c.Ping(ctx).Err() }, c.Close})
}

// clustered reports whether a server belongs to a Redis Cluster. A user may lack the right to INFO.
func clustered(ctx context.Context, c redis.UniversalClient) bool {
	info, err := c.Info(ctx, "cluster").Result()
	if err == nil {
		return strings.Contains(info, "cluster_enabled:1")
	}
	if _, answered := errors.AsType[redis.Error](err); !answered {
		return false
	}
	hello := fmt.Sprint(c.Do(ctx, "HELLO").Val()) // a list, or a map with RESP3
	return strings.Contains(hello, "mode cluster") || strings.Contains(hello, "mode:cluster")
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
