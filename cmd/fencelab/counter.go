package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/middleware"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/redis/go-redis/v9"

	"github.com/fencelab/fencelab/internal/jitter"
	"github.com/fencelab/fencelab/internal/open/onaws"
	"github.com/fencelab/fencelab/internal/pgcall"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/internal/s3object"
	"github.com/fencelab/fencelab/resource"
)

func last(n uint64) resource.Record {
	return resource.Record{MaxFence: resource.Fence{Token: n, Seq: 1}}
}

var errNotANumber = errors.New("is not a number")

// counter is the counter of a redislock without a prefix. A reaped one restarts from fence-floor. In a Cluster none is reaped, and
// locks don't read the floor from another node.
type counter struct{ redis.UniversalClient }

func openCounter(ctx context.Context, url string) (counter, error) {
	o, err := redisclient.Options(url, nil)
	if err != nil {
		return counter{}, err
	}
	c, err := redisclient.OfCluster(ctx, url, o)
	return counter{c}, err
}

func (c counter) where(key string) string { return "fence:{" + key + "} or fence-floor" }

func (c counter) Read(ctx context.Context, key string) (resource.Record, error) {
	n, err := c.number(ctx, "fence:{"+key+"}", "set the lock's counter: 'fencelab fence set -counter -force URL KEY TOKEN'")
	if _, cluster := c.UniversalClient.(*redis.ClusterClient); cluster && errors.Is(err, redis.Nil) {
		return last(0), nil
	}
	if errors.Is(err, redis.Nil) {
		n, err = c.number(ctx, "fence-floor", "set it to the greatest token that any store has seen, at most 2^53 - 2: 'redis-cli SET fence-floor TOKEN'")
		if errors.Is(err, redis.Nil) || redis.HasErrorPrefix(err, "MOVED ") || redis.HasErrorPrefix(err, "ASK ") {
			err = nil
		}
	}
	return last(n), err
}

func (c counter) number(ctx context.Context, name, remedy string) (uint64, error) {
	n, err := c.Get(ctx, name).Uint64()
	if _, bad := errors.AsType[*strconv.NumError](err); bad || redis.HasErrorPrefix(err, "WRONGTYPE ") {
		return 0, fmt.Errorf("%s %w; stop all holders and %s", name, errNotANumber, remedy)
	}
	return n, err
}

// KEYS[3], if any, is fence-floor: the counter may be reaped between Read and set.
var setCounter = redis.NewScript(`
if ARGV[2] == '1' or tonumber(redis.call('GET', KEYS[1]) or KEYS[3] and redis.call('GET', KEYS[3]) or 0) < tonumber(ARGV[1]) then
  redis.call('SET', KEYS[1], ARGV[1])
  if redis.call('EXISTS', KEYS[2]) == 1 then
    redis.call('INCR', KEYS[1])
  end
end
return 1`)

func (c counter) set(ctx context.Context, key string, token uint64, lower bool) error {
	keys := []string{"fence:{" + key + "}", "lock:{" + key + "}", "fence-floor"}
	err := setCounter.Run(ctx, c, keys, token, lower).Err()
	if redis.HasErrorPrefix(err, "CROSSSLOT ") {
		err = setCounter.Run(ctx, c, keys[:2], token, lower).Err()
	}
	return err
}

// row is the counter of a pglock in its default table.
type row struct{ *pgx.Conn }

func openRow(ctx context.Context, url string) (row, error) {
	config, err := pgxpool.ParseConfig(url) // as the lock does: the URL may have a pool's parameters
	if err != nil {                         // which may quote a password
		return row{}, errors.New("the PostgreSQL address is not a postgres:// URL, as in postgres://user@host:5432/db")
	}
	c, err := pgx.ConnectConfig(ctx, config.ConnConfig)
	return row{c}, err
}

func (r row) where(string) string { return "the table fencelab_lock" }

func (r row) Close() error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Second)
	defer cancel()
	return r.Conn.Close(ctx)
}

func (r row) Read(ctx context.Context, key string) (resource.Record, error) {
	var n uint64
	err := r.QueryRow(ctx, "SELECT fence FROM fencelab_lock WHERE key = $1", key).Scan(&n)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		err = nil
	case pgcall.Code(err) == "42P01":
		err = fmt.Errorf("the table of locks is missing; if the database is the right one, create it with dlock/pglock/schema.sql: %w", err)
	}
	return last(n), err
}

func (r row) set(ctx context.Context, key string, token uint64, lower bool) error {
	_, err := r.Exec(ctx, `INSERT INTO fencelab_lock AS l (key, fence, expires) VALUES ($1, $2, clock_timestamp())
		ON CONFLICT (key) DO UPDATE SET fence = excluded.fence + CASE WHEN l.owner IS NULL THEN 0 ELSE 1 END
		WHERE $3 OR l.fence < excluded.fence`, key, token, lower)
	return err
}

type object struct{ onaws.Bucket }

func openObject(ctx context.Context, at string) (object, error) {
	u, err := url.Parse(at)
	if err != nil { // which would quote a secret
		return object{}, errors.New("the s3 address is not a URL")
	}
	config, err := onaws.Config(ctx, u, &http.Client{})
	return object{onaws.OpenBucket(u, config)}, err
}

func (o object) Close() error { return nil }

func (o object) Read(ctx context.Context, key string) (resource.Record, error) {
	h, _, err := o.get(ctx, key)
	return last(h.Fence), err
}

func (o object) where(key string) string { return "the object " + o.Name + "/" + *o.name(key) }

func (o object) name(key string) *string { return aws.String(o.Prefix + "lock/" + s3object.Name(key)) }

// get returns a lock's object and its ETag. An expired lease has no owner.
func (o object) get(ctx context.Context, key string) (h s3object.Lock, etag string, err error) {
	out, err := o.Client.GetObject(ctx, &s3.GetObjectInput{Bucket: &o.Name, Key: o.name(key)})
	if _, missing := errors.AsType[*types.NoSuchKey](err); missing {
		return h, "", nil
	}
	if err != nil {
		return h, "", err
	}
	err = errors.Join(json.NewDecoder(out.Body).Decode(&h), out.Body.Close())
	if err != nil || h.Nonce == "" {
		return h, "", errors.Join(fmt.Errorf("object %s/%s is not a lock", o.Name, *o.name(key)), err)
	}
	now, ok := middleware.GetServerTime(out.ResultMetadata)
	if ok && out.LastModified != nil && !h.Live(now, *out.LastModified) {
		h.Owner, h.Held = "", false
	}
	return h, aws.ToString(out.ETag), nil
}

// set also restarts a holder's lease.
func (o object) set(ctx context.Context, key string, token uint64, lower bool) error {
	for {
		h, etag, err := o.get(ctx, key)
		if err != nil || h.Fence >= token && !lower {
			return err
		}
		if h.Fence = token; h.Held {
			h.Fence++
		}
		h.Nonce = rand.Text() // or a holder would take this for its own write
		body, err := json.Marshal(h)
		if err != nil {
			return err
		}
		in := s3object.Condition(etag)
		in.Bucket, in.Key, in.Body, in.ContentType = &o.Name, o.name(key), bytes.NewReader(body), aws.String("application/json")
		if _, err = o.Client.PutObject(ctx, in); !s3object.LostRace(err) {
			return err
		}
		if err := jitter.Sleep(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
}
