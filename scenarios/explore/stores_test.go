package explore_test

import (
	"context"
	"net/http"
	"time"

	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/dynamostore"
	"github.com/fencelab/fencelab/resource/redisstore"
	"github.com/fencelab/fencelab/resource/s3store"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/explore"
)

// free is a lock that everybody gets at once, to test stores: tokens grow with time, and leases end when they begin.
var free = scenarios.Adapter{Get: func(context.Context, string, bool) (scenarios.Grant, error) {
	now, epoch := time.Now(), time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC) // of a bubble
	return scenarios.Grant{
		Token: uint64(now.Sub(epoch)/time.Millisecond) + 1, TTL: time.Second, Until: now,
		Release: func(context.Context) error { return dlock.ErrLost },
	}, nil
}}

func store(sys explore.System, open func(c *explore.Client) (resource.Store, error)) explore.System {
	sys.TTL, sys.Servers, sys.Store = time.Second, 1, open
	sys.Open = func(*explore.Client) (scenarios.Lock, error) { return free, nil }
	sys.Without = []explore.Verb{explore.Wipe, explore.Jump, explore.Renew, explore.Rerelease, explore.Try, explore.Late, explore.Deliver, explore.Crowd, explore.TTL}
	return sys
}

type closing struct {
	resource.Store
	closer func()
}

func (c closing) Close() error {
	err := c.Store.Close()
	c.closer()
	return err
}

func redisStore(how ...sabotage) explore.System {
	return store(explore.System{Name: "redisstore", Serve: serveRedis, Greeting: 1}, func(c *explore.Client) (resource.Store, error) {
		rdb := client(c, 0)
		apply(how, []*redis.Client{rdb}, nil)
		s, err := redisstore.New(rdb, nil)
		return closing{s, func() { _ = rdb.Close() }}, err
	})
}

func s3Store() explore.System {
	return store(explore.System{Name: "s3store", Serve: serveS3}, func(c *explore.Client) (resource.Store, error) {
		transport := &http.Transport{DialContext: c.Dial, DisableCompression: true}
		s, err := s3store.New(s3Client(&http.Client{Transport: transport, Timeout: 3 * c.TTL}, "http://"+c.Addr(0)), bucket, nil)
		return closing{s, transport.CloseIdleConnections}, err
	})
}

func dynamoStore() explore.System {
	sys := store(explore.System{Name: "dynamostore", Serve: serveDynamo}, func(c *explore.Client) (resource.Store, error) {
		transport := &http.Transport{DialContext: c.Dial, DisableCompression: true}
		s, err := dynamostore.New(dynamoClient(&http.Client{Transport: transport, Timeout: 3 * c.TTL}, "http://"+c.Addr(0)), table)
		return closing{s, transport.CloseIdleConnections}, err
	})
	sys.Without = append(sys.Without, explore.Duplicate) // it succeeds if its first reply is lost, see Store.Write
	return sys
}
