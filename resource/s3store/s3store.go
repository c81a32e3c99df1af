// Package s3store is a [resource.Store] in a bucket of Amazon S3, or of a server with its protocol. A record is an object,
// written by conditional PUTs (https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html). The fence is in
// the body, because metadata doesn't change the ETag; a copy in the metadata is for people.
//
// It requires that
//   - the server compares and writes atomically, which [Open] probes as far as possible;
//   - reads are strongly consistent, as in S3 since 2020, but not through a cache or a replica;
//   - nobody else writes or deletes the objects, by hand, lifecycle rule or backup. A bucket policy can demand conditions of
//     every PUT (https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes-enforce.html);
//   - the client has the permissions s3:GetObject, s3:PutObject, s3:ListBucket (without it S3 answers 403 for a missing object)
//     and, for [Store.Probe], s3:DeleteObject.
package s3store

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/fencelab/fencelab/internal/jitter"
	"github.com/fencelab/fencelab/internal/s3object"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/internal/awscall"
	"github.com/fencelab/fencelab/resource/internal/calls"
)

// ErrNoConditions is wrapped by the error of [Store.Probe] if the server ignores the conditions of a PUT.
var ErrNoConditions = s3object.ErrNoConditions

// Options configure [New].
type Options struct {
	// Prefix begins the names of all objects. Stores share nothing if neither prefix is the beginning of the other.
	Prefix string
	// MaxValue is the largest value in bytes; 5 MiB if zero. Each lost race costs sending the value again.
	MaxValue int
}

// Store is a [resource.Store] in a bucket, which several processes may use.
type Store struct {
	client *s3.Client
	bucket string
	o      Options
	known  known
	calls  calls.Calls
}

var (
	_ resource.Overwriter  = (*Store)(nil)
	_ resource.FenceSetter = (*Store)(nil)
)

// Open is [New] followed by [Store.Probe].
func Open(ctx context.Context, client *s3.Client, bucket string, opts *Options) (*Store, error) {
	s, err := New(client, bucket, opts)
	if err != nil {
		return nil, err
	}
	if err := s.Probe(ctx); err != nil {
		return nil, err
	}
	return s, nil
}

// New returns a Store on an existing bucket. It sends nothing; [Open] also probes. opts may be nil.
func New(client *s3.Client, bucket string, opts *Options) (*Store, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	o.MaxValue = cmp.Or(o.MaxValue, 5<<20)
	switch {
	case client == nil:
		return nil, errors.New("s3store: client is nil")
	case bucket == "":
		return nil, errors.New("s3store: bucket is empty")
	case o.MaxValue < 0:
		return nil, fmt.Errorf("s3store: MaxValue is %d bytes; it must be positive", o.MaxValue)
	case len(o.Prefix) > s3object.MaxPrefix:
		return nil, fmt.Errorf("s3store: prefix has %d bytes, at most %d are allowed", len(o.Prefix), s3object.MaxPrefix)
	}
	return &Store{client: client, bucket: bucket, o: o}, nil
}

// Probe checks on a scratch object that the server honours If-None-Match and If-Match; if not, the error wraps [ErrNoConditions].
// It sends 20 requests, because one address may stand for several servers. It can't check that the server compares and writes
// atomically; package storetest can.
func (s *Store) Probe(ctx context.Context) error {
	return failed(ctx, s3object.Probe(ctx, s.client, s.bucket, s.o.Prefix))
}

// Write is [resource.Store.Write], even if the client retries a request.
func (s *Store) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	written := resource.Record{Value: append([]byte{}, value...), MaxFence: f}
	var from *version
	if v, ok := s.known.get(key); ok && resource.AdmitsWrite(v.rec.MaxFence, f) {
		from = &v
	}
	doubt := false
	_, err := s.replace(ctx, key, cmp.Or(resource.CheckFence(f), s.checkSize(key, value)), from, &doubt, func(rec resource.Record) (resource.Record, error) {
		return written, rec.CheckWrite(key, f, value)
	})
	return awscall.Outcome("s3store", err, doubt)
}

// ReadFenced is [resource.Store.ReadFenced]. To raise the fence it sends the value back.
func (s *Store) ReadFenced(ctx context.Context, key string, f resource.Fence) (resource.Record, error) {
	return s.replace(ctx, key, resource.CheckToken(f.Token), nil, new(bool), func(rec resource.Record) (resource.Record, error) {
		if err := rec.CheckRead(key, f); err != nil {
			return resource.Record{}, err
		}
		rec.MaxFence = rec.MaxFence.Max(f)
		return rec, nil
	})
}

// Read is [resource.Store.Read].
func (s *Store) Read(ctx context.Context, key string) (resource.Record, error) {
	if err := s.calls.Begin(ctx, key); err != nil {
		return resource.Record{}, err
	}
	defer s.calls.End()
	v, err := s.get(ctx, key)
	if err == nil && v.etag == "" {
		err = resource.ErrNotFound
	}
	return v.rec, err
}

// Overwrite is [resource.Overwriter.Overwrite], but loses a fence raised meanwhile, or by another process since this Store last
// saw it.
func (s *Store) Overwrite(ctx context.Context, key string, f resource.Fence, value []byte) error {
	if err := s.calls.Begin(ctx, key, resource.CheckOffered(f), s.checkSize(key, value)); err != nil {
		return err
	}
	defer s.calls.End()
	v, ok := s.known.get(key)
	if !ok {
		var err error
		if v, err = s.get(ctx, key); err != nil {
			return err
		}
	}
	rec := resource.Record{Value: append([]byte{}, value...), MaxFence: v.rec.MaxFence.Max(f)}
	return s.put(ctx, key, rec, &s3.PutObjectInput{}, new(bool))
}

// SetFence is [resource.FenceSetter.SetFence].
func (s *Store) SetFence(ctx context.Context, key string, token uint64) error {
	_, err := s.replace(ctx, key, resource.CheckToken(token), nil, new(bool), func(rec resource.Record) (resource.Record, error) {
		if rec.MaxFence == (resource.Fence{}) && rec.Value == nil {
			return rec, resource.ErrNotFound
		}
		rec.MaxFence = resource.Fence{Token: token}
		return rec, nil
	})
	return err
}

// Close is [resource.Store.Close]. The client stays open.
func (s *Store) Close() error {
	s.calls.Close()
	return nil
}

func (s *Store) checkSize(key string, value []byte) error {
	if len(value) <= s.o.MaxValue {
		return nil
	}
	return fmt.Errorf("%w: that of %q has %d bytes, at most %d are allowed (Options.MaxValue)", resource.ErrTooLarge, key, len(value), s.o.MaxValue)
}

var errLostRace = errors.New("s3store: the object has changed")

const (
	maxIdle  = 8 // races lost in a row while the object didn't change
	minPause = 5 * time.Millisecond
	maxPause = 200 * time.Millisecond
)

// replace replaces a key's record by what next returns for it, unless invalid or next has an error. It starts with from, or if
// nil with the object. doubt is set if a PUT's reply was lost. The loop ends, because next refuses the first fence that is not
// less than the caller's.
func (s *Store) replace(ctx context.Context, key string, invalid error, from *version, doubt *bool,
	next func(resource.Record) (resource.Record, error),
) (resource.Record, error) {
	if err := s.calls.Begin(ctx, key, invalid); err != nil {
		return resource.Record{}, err
	}
	defer s.calls.End()
	idle, lost := 0, "none" // ETag of the last lost race; a real one has quotes
	for {
		var v version
		if from != nil {
			v, from = *from, nil
		} else {
			var err error
			if v, err = s.get(ctx, key); err != nil {
				return resource.Record{}, err
			}
		}
		rec, err := next(v.rec)
		if err != nil || rec.MaxFence == v.rec.MaxFence {
			return rec, err
		}
		err = s.put(ctx, key, rec, s3object.Condition(v.etag), doubt)
		if !errors.Is(err, errLostRace) {
			return rec, err
		}
		if idle++; v.etag != lost {
			idle, lost = 0, v.etag
		}
		if idle == maxIdle {
			return resource.Record{}, fmt.Errorf("s3store: key %q: %d conditional writes in a row failed, but the object has not changed: %w",
				key, idle, err)
		}
		if idle > 0 {
			pause := min(minPause<<idle, maxPause)
			if err := jitter.Sleep(ctx, pause/2+jitter.N(pause/2)); err != nil {
				return resource.Record{}, fmt.Errorf("s3store: waiting: %w", err)
			}
		}
	}
}

func (s *Store) get(ctx context.Context, key string) (version, error) {
	name := s.Object(key)
	out, err := s.client.GetObject(ctx, &s3.GetObjectInput{Bucket: &s.bucket, Key: &name})
	if _, missing := errors.AsType[*types.NoSuchKey](err); missing {
		return version{}, nil
	}
	if err != nil {
		return version{}, failed(ctx, err)
	}
	body, err := io.ReadAll(out.Body)
	if err = errors.Join(err, out.Body.Close()); err != nil {
		return version{}, failed(ctx, err)
	}
	rec, err := decode(body)
	if err != nil {
		return version{}, fmt.Errorf("s3store: object %s/%s is not a record of this package: %w", s.bucket, name, err)
	}
	v := version{rec: rec, etag: aws.ToString(out.ETag)}
	if v.etag == "" {
		return version{}, fmt.Errorf("s3store: the server sent object %s/%s without an ETag", s.bucket, name)
	}
	s.known.set(key, v)
	return v, nil
}

func (s *Store) put(ctx context.Context, key string, rec resource.Record, in *s3.PutObjectInput, doubt *bool) error {
	name := s.Object(key)
	in.Bucket, in.Key, in.Body = &s.bucket, &name, bytes.NewReader(encode(rec))
	in.Metadata = map[string]string{"fence": rec.MaxFence.String()}
	out, err := s.client.PutObject(ctx, in, func(o *s3.Options) { o.Retryer = awscall.Retryer(o.Retryer, doubt) })
	if err != nil {
		s.known.set(key, version{})
		if s3object.LostRace(err) {
			return fmt.Errorf("%w: %w", errLostRace, err)
		}
		return failed(ctx, calls.Late(ctx, err))
	}
	s.known.set(key, version{rec: rec, etag: aws.ToString(out.ETag)})
	return nil
}

func failed(ctx context.Context, err error) error { return calls.Wrap(ctx, "s3store", err) }
