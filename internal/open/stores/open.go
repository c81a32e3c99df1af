package stores

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/internal/http1"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/pgstore"
	"github.com/fencelab/fencelab/resource/redisstore"
)

const maxValue = 64 << 20 // bytes, as cmd/resource may accept

func openHTTP(addr string, o Options) (*Store, error) {
	client, transport := httpClient(o.Fresh)
	c, err := resource.NewClient(addr, &resource.ClientOptions{Token: o.Token, MaxBody: maxValue, HTTPClient: client})
	if err != nil {
		return nil, err
	}
	return &Store{
		Store: c, Name: HTTP, unfenced: c.WriteUnfenced,
		close: func() error { transport.CloseIdleConnections(); return nil },
	}, nil
}

func httpClient(fresh bool) (*http.Client, *http.Transport) {
	t := http1.Transport()
	t.DisableKeepAlives = fresh
	return &http.Client{Transport: t}, t
}

func openPostgres(ctx context.Context, addr string, o Options) (*Store, error) {
	config, err := pgxpool.ParseConfig(addr)
	if err != nil {
		return nil, errors.New("stores: the PostgreSQL address is not a postgres:// URL, as in postgres://user@host:5432/db") // it may hold a password
	}
	// A call is one message: no prepared statements, no pings.
	config.ConnConfig.DefaultQueryExecMode = pgx.QueryExecModeExec
	config.ShouldPing = func(context.Context, pgxpool.ShouldPingParams) bool { return false }
	if o.Fresh { // only then, since it delays a connection's return to the pool
		config.AfterRelease = func(*pgx.Conn) bool { return false }
	}
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, err
	}
	closePool := func() error { pool.Close(); return nil }
	if !o.Prepared {
		if err := pgstore.CreateSchema(ctx, pool, nil); err != nil {
			return nil, errors.Join(err, closePool())
		}
	}
	s, err := pgstore.New(pool, nil)
	return opened(Postgres, s, err, closePool)
}

func openRedis(ctx context.Context, addr string, o Options) (*Store, error) {
	opt, err := redisclient.Options(addr, nil)
	if err != nil {
		return nil, err
	}
	opt.ReadTimeout = -1 // the context's only
	if o.Fresh {
		opt.ConnMaxLifetime = time.Nanosecond
	}
	var c redis.UniversalClient
	if !o.Cluster {
		c = redis.NewClient(opt)
	} else if c, err = redisclient.OfCluster(ctx, addr, opt); err != nil {
		return nil, err
	}
	if !o.Prepared { // Redis needs no preparation
		if err := c.Ping(ctx).Err(); err != nil {
			return nil, errors.Join(fmt.Errorf("stores: %w", err), c.Close())
		}
	}
	s, err := redisstore.New(c, nil)
	return opened(Redis, s, err, c.Close)
}
