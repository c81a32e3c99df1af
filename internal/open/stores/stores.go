// Package stores opens protected stores by address.
package stores

import (
	"context"
	"errors"
	"fmt"
	"net/url"

	"github.com/fencelab/fencelab/internal/open/onaws"
	"github.com/fencelab/fencelab/resource"
)

// The names of the stores.
const (
	HTTP     = "http" // cmd/resource
	Postgres = "postgres"
	Redis    = "redis"
	S3       = onaws.S3
	DynamoDB = onaws.DynamoDB
)

// usual is the addresses in deploy/compose.yaml.
var usual = map[string]string{
	HTTP:     "http://127.0.0.1:8080",
	Postgres: "postgres://postgres@127.0.0.1:5432/postgres?sslmode=disable",
	Redis:    "redis://127.0.0.1:6379",
	S3:       "s3://id:secret@fencelab?endpoint=http://127.0.0.1:7070",
	DynamoDB: "dynamodb://id:secret@fencelab?endpoint=http://127.0.0.1:8000",
}

// Names returns all stores.
func Names() []string { return []string{HTTP, Postgres, Redis, S3, DynamoDB} }

// Addr returns a store's default address.
func Addr(name string) string { return usual[name] }

// Redacted removes the password, and the parameters, where PostgreSQL's may be.
func Redacted(addr string) string {
	u, err := url.Parse(addr)
	if err != nil {
		return "an address that is not a URL"
	}
	u.RawQuery = ""
	return u.Redacted()
}

// Addresses lists [Open]'s addresses.
const Addresses = "http://HOST:PORT, postgres://USER[:PASSWORD]@HOST:PORT/DB,\n" +
	"redis://[USER:PASSWORD@]HOST:PORT[/DB], s3://[ID:SECRET@]BUCKET[/PREFIX] or\n" +
	"dynamodb://[ID:SECRET@]TABLE, the last two with ?endpoint=URL and &region=NAME, by default the environment's, or else Amazon's"

// Options are the optional settings of [Open].
type Options struct {
	// Token is the HTTP resource's bearer token.
	Token string
	// Fresh uses a new connection for each call.
	Fresh bool
	// Prepared says that the table or bucket exists and, for S3, that the server honours conditions.
	Prepared bool
	// Cluster says that a Redis may be a node of a Redis Cluster.
	Cluster bool
}

// Store owns its client. Only contexts bound its calls, and writes are not retried.
type Store struct {
	resource.Store

	// Name is one of [Names].
	Name string
	// Diverges says whether regions accept each other's stale writes for a while. Nil: there is only one region.
	Diverges func(ctx context.Context) (bool, error)
	unfenced func(ctx context.Context, key string, value []byte) error
	close    func() error
}

// Close also closes the client.
func (s *Store) Close() error { return errors.Join(s.Store.Close(), s.close()) }

// WriteUnfenced writes without a token, whatever the fence.
func (s *Store) WriteUnfenced(ctx context.Context, key string, value []byte) error {
	return s.unfenced(ctx, key, value)
}

// Overwrite is WriteUnfenced, for [resource.Overwriter].
func (s *Store) Overwrite(ctx context.Context, key string, _ resource.Fence, value []byte) error {
	return s.unfenced(ctx, key, value)
}

// Open opens the store at addr, one of [Addresses], and creates its table or bucket if necessary.
func Open(ctx context.Context, addr string, o Options) (*Store, error) {
	// A parser's error may quote a password.
	u, err := url.Parse(addr)
	if err != nil {
		return nil, fmt.Errorf("stores: the address is not a URL; it is %s", Addresses)
	}
	switch u.Scheme {
	case "http", "https":
		return openHTTP(addr, o)
	case "postgres", "postgresql":
		return openPostgres(ctx, addr, o)
	case "redis", "rediss":
		return openRedis(ctx, addr, o)
	case S3:
		return openS3(ctx, u, o)
	case DynamoDB:
		return openDynamoDB(ctx, u, o)
	}
	return nil, fmt.Errorf("stores: unknown URL scheme %.40q; use one of %s", u.Scheme, Addresses)
}

func opened(name string, s resource.Overwriter, err error, closeClient func() error) (*Store, error) {
	if err != nil {
		return nil, errors.Join(err, closeClient())
	}
	overwrite := func(ctx context.Context, key string, value []byte) error {
		return s.Overwrite(ctx, key, resource.Fence{}, value)
	}
	return &Store{Store: s, Name: name, unfenced: overwrite, close: closeClient}, nil
}
