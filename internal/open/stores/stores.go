// Package stores opens the protected stores by address, for commands and scenarios whose workers write straight to one.
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
	HTTP     = "http" // the resource of cmd/resource
	Postgres = "postgres"
	Redis    = "redis"
	S3       = "s3"
	DynamoDB = "dynamodb"
)

// usual are the stores' addresses on this host, as in deploy/compose.yaml.
var usual = map[string]string{
	HTTP:     "http://127.0.0.1:8080",
	Postgres: "postgres://postgres@127.0.0.1:5432/postgres?sslmode=disable",
	Redis:    "redis://127.0.0.1:6379",
	S3:       "s3+http://id:secret@127.0.0.1:7070/fencelab",
	DynamoDB: "dynamodb+http://id:secret@127.0.0.1:8000/fencelab",
}

// Names are the names of the stores.
func Names() []string { return []string{HTTP, Postgres, Redis, S3, DynamoDB} }

// Addr is the usual address of a store on this host.
func Addr(name string) string { return usual[name] }

// Redacted is addr without a password, for messages.
func Redacted(addr string) string {
	u, err := url.Parse(addr)
	if err != nil {
		return "an address that is no URL"
	}
	return u.Redacted()
}

// Addresses says what [Open] takes.
const Addresses = "http://HOST:PORT, postgres://USER@HOST:PORT/DB, redis://HOST:PORT, s3+http://ID:SECRET@HOST:PORT/BUCKET,\n" +
	"dynamodb+http://ID:SECRET@HOST:PORT/TABLE, or Amazon's s3://BUCKET or dynamodb://TABLE"

// Options are the optional settings of [Open]. The zero value is ready for use.
type Options struct {
	// Token is the bearer token of the HTTP resource.
	Token string
	// Fresh gives each call a connection of its own, so that none meets one from before a crash of the server.
	Fresh bool
	// Prepared says that what the store needs is there, so that Open changes nothing: the table, the bucket, and for S3 that
	// the server honours conditions.
	Prepared bool
}

// Store is a store with a client of its own, which Close closes too. Its calls take as long as their contexts let them: a
// write that is late in the network is late, and not sent again.
type Store struct {
	resource.Store

	// Name is one of [Names].
	Name string
	// unfenced writes without a token.
	unfenced func(ctx context.Context, key string, value []byte) error
	close    func() error
	dial     *dialer
}

// Close closes the store and its client.
func (s *Store) Close() error { return errors.Join(s.Store.Close(), s.close()) }

// WriteUnfenced writes without a token, and whatever the fence: what a client does that knows nothing of fencing.
func (s *Store) WriteUnfenced(ctx context.Context, key string, value []byte) error {
	return s.unfenced(ctx, key, value)
}

// Overwrite is WriteUnfenced, as a [resource.Overwriter] has it.
func (s *Store) Overwrite(ctx context.Context, key string, _ resource.Fence, value []byte) error {
	return s.unfenced(ctx, key, value)
}

// OnSent makes the store call f once, when the next bytes have left this process on one of the store's connections. f must not
// stay. It is armed right before a call, whose first bytes they then are.
func (s *Store) OnSent(f func()) { s.dial.onSent(f) }

// Open connects to the store at addr, one of [Addresses], and makes its table or bucket unless that is there.
func Open(ctx context.Context, addr string, o Options) (*Store, error) {
	// Errors of a parser may quote the address, and with it a password.
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

// opened makes a Store of what a store's New has returned.
func opened(name string, s resource.Overwriter, err error, d *dialer, closeClient func() error) (*Store, error) {
	if err != nil {
		return nil, errors.Join(err, closeClient())
	}
	overwrite := func(ctx context.Context, key string, value []byte) error {
		return s.Overwrite(ctx, key, resource.Fence{}, value)
	}
	return &Store{Store: s, Name: name, unfenced: overwrite, close: closeClient, dial: d}, nil
}
