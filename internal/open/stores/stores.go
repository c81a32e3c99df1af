// Package stores opens protected stores by address.
package stores

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/fencelab/fencelab/resource"
)

// The names of the stores.
const (
	HTTP     = "http" // cmd/resource
	Postgres = "postgres"
	Redis    = "redis"
	S3       = "s3"
	DynamoDB = "dynamodb"
)

// usual are the addresses in deploy/compose.yaml.
var usual = map[string]string{
	HTTP:     "http://127.0.0.1:8080",
	Postgres: "postgres://postgres@127.0.0.1:5432/postgres?sslmode=disable",
	Redis:    "redis://127.0.0.1:6379",
	S3:       "s3+http://id:secret@127.0.0.1:7070/fencelab",
	DynamoDB: "dynamodb+http://id:secret@127.0.0.1:8000/fencelab",
}

// Names returns the names of the stores.
func Names() []string { return []string{HTTP, Postgres, Redis, S3, DynamoDB} }

// Addr returns a store's default address.
func Addr(name string) string { return usual[name] }

// Redacted removes the password.
func Redacted(addr string) string {
	u, err := url.Parse(addr)
	if err != nil {
		return "an address that is no URL"
	}
	return u.Redacted()
}

// Addresses lists [Open]'s addresses.
const Addresses = "http://HOST:PORT, postgres://USER@HOST:PORT/DB, redis://HOST:PORT, s3+http://ID:SECRET@HOST:PORT/BUCKET,\n" +
	"dynamodb+http://ID:SECRET@HOST:PORT/TABLE, or Amazon's s3://BUCKET or dynamodb://TABLE"

// Options are the optional settings of [Open].
type Options struct {
	// Token is the HTTP resource's bearer token.
	Token string
	// Fresh uses a new connection for each call.
	Fresh bool
	// Prepared says that the table or bucket exists and, for S3, that the server honours conditions.
	Prepared bool
}

// Store is a store that owns its client. Calls are bounded by their contexts only, and writes are not retried.
type Store struct {
	resource.Store

	// Name is one of [Names].
	Name     string
	unfenced func(ctx context.Context, key string, value []byte) error
	close    func() error
	dial     *dialer
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

// OnSent makes the store call f once, when it next sends bytes. f must not block.
func (s *Store) OnSent(f func()) { s.dial.onSent(f) }

// Open opens the store at addr, one of [Addresses], and creates its table or bucket if necessary.
func Open(ctx context.Context, addr string, o Options) (*Store, error) {
	// A parser's error may quote a password.
	u, err := url.Parse(addr)
	if err != nil {
		return nil, fmt.Errorf("stores: the address is no URL; it is %s", Addresses)
	}
	scheme, service, _ := strings.Cut(u.Scheme, "+")
	switch {
	case u.Scheme == "http", u.Scheme == "https":
		return openHTTP(addr, o)
	case u.Scheme == "postgres", u.Scheme == "postgresql":
		return openPostgres(ctx, addr, o)
	case u.Scheme == "redis", u.Scheme == "rediss":
		return openRedis(ctx, addr, o)
	case scheme == S3 && slices.Contains(services, service):
		return openS3(ctx, u, service, o)
	case scheme == DynamoDB && slices.Contains(services, service):
		return openDynamoDB(ctx, u, service, o)
	}
	return nil, fmt.Errorf("stores: %.40q is the beginning of no store's address; there are %s", u.Scheme, Addresses)
}

func opened(name string, s resource.Overwriter, err error, d *dialer, closeClient func() error) (*Store, error) {
	if err != nil {
		return nil, errors.Join(err, closeClient())
	}
	overwrite := func(ctx context.Context, key string, value []byte) error {
		return s.Overwrite(ctx, key, resource.Fence{}, value)
	}
	return &Store{Store: s, Name: name, unfenced: overwrite, close: closeClient, dial: d}, nil
}
