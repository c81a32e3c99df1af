package locks

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock/redislock"
	"github.com/fencelab/fencelab/dlock/redlock"
)

func openRedis(_ context.Context, s Spec) (*Backend, error) {
	addr, err := s.one()
	if err != nil {
		return nil, err
	}
	o, err := s.RedisOptions(addr)
	if err != nil {
		return nil, err
	}
	c := redis.NewClient(o)
	b, err := redislock.New(c, nil)
	return opened(b, err, client{func(ctx context.Context) error { return c.Ping(ctx).Err() }, c.Close})
}

// RedisClient returns a client for a host:port or a redis:// URL that gives up when its context ends.
func RedisClient(addr string) (*redis.Client, error) {
	o, err := RedisOptions(addr)
	if err != nil {
		return nil, err
	}
	return redis.NewClient(o), nil
}

// RedisOptions are the options of a client for a host:port or a redis:// URL that gives up when its context ends.
func RedisOptions(addr string) (*redis.Options, error) { return Spec{}.RedisOptions(addr) }

// RedisOptions is the function of that name, for a client that connects as s says.
func (s Spec) RedisOptions(addr string) (*redis.Options, error) {
	silence()
	o := &redis.Options{Addr: addr}
	if strings.Contains(addr, "://") {
		var err error
		if o, err = redis.ParseURL(addr); err != nil {
			return nil, errors.New("locks: the Redis address is no redis:// URL") // it may hold a password
		}
	}
	o.ContextTimeoutEnabled = true
	o.Dialer = s.Dial
	if config := o.TLSConfig; s.Dial != nil && config != nil { // the client leaves that to a dialer
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := s.Dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return tls.Client(c, config), nil
		}
	}
	return o, nil
}

// silence drops what go-redis logs: its errors are returned, and told once.
var silence = sync.OnceFunc(func() { redis.SetLogger(quiet{}) })

type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}

// OpenRedlock opens a Redlock with options of its own.
func OpenRedlock(_ context.Context, s Spec, opts *redlock.Options) (*Backend, error) {
	var clients []*redis.Client
	all := client{
		ping: func(ctx context.Context) error { // a majority is enough
			var errs []error
			for _, c := range clients {
				if err := c.Ping(ctx).Err(); err != nil {
					errs = append(errs, err)
				}
			}
			if len(errs) > (len(clients)-1)/2 {
				return errors.Join(errs...)
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
		o, err := s.RedisOptions(addr)
		if err != nil {
			return nil, errors.Join(err, all.close())
		}
		o.MaxRetries, o.DialerRetries = -1, 1 // a node that fails is outvoted, and asked again with the next attempt
		c := redis.NewClient(o)
		clients, nodes = append(clients, c), append(nodes, c)
	}
	b, err := redlock.New(nodes, opts)
	return opened(b, err, all)
}
