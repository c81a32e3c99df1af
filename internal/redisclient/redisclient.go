// Package redisclient makes quiet Redis clients whose requests end with their context.
package redisclient

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"

	"github.com/redis/go-redis/v9"
)

// Dial makes a connection.
type Dial func(ctx context.Context, network, addr string) (net.Conn, error)

// New returns a client for a host:port or a redis:// URL.
func New(addr string) (*redis.Client, error) {
	o, err := Options(addr, nil)
	if err != nil {
		return nil, err
	}
	return redis.NewClient(o), nil
}

// Options returns those of [New], for a client that connects by dial unless that is nil.
func Options(addr string, dial Dial) (*redis.Options, error) {
	Silence()
	o := &redis.Options{Addr: addr}
	if strings.Contains(addr, "://") {
		var err error
		if o, err = redis.ParseURL(addr); err != nil {
			if strings.Contains(err.Error(), "unexpected option") && !strings.Contains(err.Error(), "@") {
				return nil, fmt.Errorf("the Redis URL: %w", err)
			}
			return nil, errors.New("the Redis address is not a redis:// URL, as in redis://user:password@host:6379/0") // it may hold a password
		}
	}
	o.ContextTimeoutEnabled = true
	o.Dialer = dial
	if config := o.TLSConfig; dial != nil && config != nil { // the client leaves that to a dialer
		o.Dialer = func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := dial(ctx, network, addr)
			if err != nil {
				return nil, err
			}
			return tls.Client(c, config), nil
		}
	}
	return o, nil
}

// OfCluster returns a client with the options of addr, of the whole Redis Cluster if the server belongs to one.
func OfCluster(ctx context.Context, addr string, o *redis.Options) (redis.UniversalClient, error) {
	c := redis.NewClient(o)
	switch cluster := clustered(ctx, c); {
	case ctx.Err() != nil:
		return nil, errors.Join(context.Cause(ctx), c.Close())
	case !cluster:
		return c, nil
	}
	_ = c.Close()
	co := &redis.ClusterOptions{}
	if strings.Contains(addr, "://") {
		var err error
		if co, err = redis.ParseClusterURL(addr); err != nil { // which may quote a password
			return nil, errors.New("the URL of a Redis Cluster has a parameter that a Cluster's client doesn't take, such as db")
		}
	}
	co.Addrs, co.TLSConfig, co.Dialer, co.ContextTimeoutEnabled = []string{o.Addr}, o.TLSConfig, o.Dialer, true
	co.ReadTimeout = o.ReadTimeout
	return redis.NewClusterClient(co), nil
}

// clustered reports whether a server belongs to a Redis Cluster. A user may lack the right to INFO.
func clustered(ctx context.Context, c *redis.Client) bool {
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

// Silence drops go-redis's logs: its errors are returned too.
var Silence = sync.OnceFunc(func() { redis.SetLogger(quiet{}) })

type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}
