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

// Silence drops go-redis's logs: its errors are returned too.
var Silence = sync.OnceFunc(func() { redis.SetLogger(quiet{}) })

type quiet struct{}

func (quiet) Printf(context.Context, string, ...any) {}
