// Package s3store is a [resource.Store] in a bucket of Amazon S3, or of a server that speaks its protocol: one object a key,
// and every write a conditional PUT, If-None-Match: * for an object's first and If-Match with its ETag for the rest
// (https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html).
//
// The fence is in the object's body, in a line before the value, and not in its metadata alone. An ETag "reflects changes
// only to the contents of an object, not its metadata" (https://docs.aws.amazon.com/AmazonS3/latest/API/API_Object.html):
// had a fenced read raised the fence in the metadata of an unchanged body, If-Match with the ETag from before would still
// hold, and the stale write get through. With the fence in the body no two versions of an object have the same ETag. A
// copy of the fence is in the metadata, for people. Copying an object in place can't change its body, so that a fenced read
// that raises the fence sends the value back: a GET and a PUT.
//
// A write takes one request where the Store knows the object's ETag, from a read or write of its own, and two where it
// doesn't. What it knows may be old; then the condition fails, and it reads again. It never decides by what it remembers.
//
// It rests on three things. The server compares and writes in one step, which [Open] probes as far as it can. It has strong
// read-after-write consistency, as S3 has since 2020
// (https://docs.aws.amazon.com/AmazonS3/latest/userguide/Welcome.html#ConsistencyModel); reads through a cache or a
// replica don't, and replication to a second bucket is asynchronous. And nobody else writes or deletes the objects, by
// hand, by a lifecycle rule or from a backup, since a fence that is gone fences no more. A bucket policy can demand
// conditions of every PUT (https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes-enforce.html).
//
// The client's role needs s3:GetObject and s3:PutObject, s3:ListBucket, without which S3 answers 403 for an object that
// doesn't exist, and for [Store.Probe] s3:DeleteObject.
package s3store

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"
	"github.com/aws/smithy-go"

	"github.com/fencelab/fencelab/resource"
)

// ErrNoConditions is wrapped by the error of [Open] and [Store.Probe] about a server that doesn't honour the conditions
// of a PUT. Nothing can be fenced there.
var ErrNoConditions = errors.New("the server does not honour conditional writes")

// Options are the optional settings of [New]. The zero value is ready for use.
type Options struct {
	// Prefix stands before the names of all objects, "" by default. Stores with different prefixes don't know each other,
	// as long as none is the beginning of another.
	Prefix string
	// MaxValue is the greatest size of a value in bytes; 5 MiB if zero. A value is held in memory and sent in one request,
	// with every lost race once more. S3 takes 5 GB in one PUT; multipart uploads are not made. Larger data belong in
	// objects of their own that are never written twice, whose names are the value here.
	MaxValue int
}

// Store is a [resource.Store] in a bucket. Its methods may be called concurrently, also in several processes.
type Store struct {
	client *s3.Client
	bucket string
	o      Options
	known  known

	mu     sync.Mutex
	closed bool
	calls  sync.WaitGroup // calls in flight
}

var (
	_ resource.Overwriter  = (*Store)(nil)
	_ resource.FenceSetter = (*Store)(nil)
)

// Open is [New] and [Store.Probe]: it returns a Store on a server that was seen to honour the conditions of a PUT.
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

// New returns a Store on a bucket that exists. The client stays the caller's. It sends nothing; use [Open] unless the
// server is known to honour the conditions of a PUT. A nil opts is the zero Options.
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
	case len(o.Prefix) > maxPrefix:
		return nil, fmt.Errorf("s3store: prefix has %d bytes, at most %d are allowed", len(o.Prefix), maxPrefix)
	}
	return &Store{client: client, bucket: bucket, o: o}, nil
}

// Write is [resource.Store.Write]. A value of more than [Options].MaxValue bytes is refused with [resource.ErrTooLarge].
//
// The client repeats a request whose reply was lost. If the first one had taken effect, Write returns
// nil, or, if a later fence has come in between, an error that leaves the outcome open.
func (s *Store) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckFence(f), s.checkSize(key, value)); err != nil {
		return err
	}
	if err := s.enter(); err != nil {
		return err
	}
	defer s.calls.Done()

	written := resource.Record{Value: append([]byte{}, value...), MaxFence: f}
	var from *version
	if v, ok := s.known.get(key); ok && resource.AdmitsWrite(v.rec.MaxFence, f) {
		from = &v
	}
	doubt := false
	_, err := s.replace(ctx, key, from, &doubt, func(rec resource.Record) (resource.Record, error) {
		return written, rec.CheckWrite(key, f, value)
	})
	stale, ok := errors.AsType[*resource.StaleTokenError](err)
	switch {
	case ok && doubt && stale.Applied:
		return nil
	case ok && doubt:
		return fmt.Errorf("s3store: Write of %q at %v: a reply was lost and a later fence has come since; the write may have "+
			"taken effect before: seen %v", key, f, stale.Seen)
	}
	return err
}

// ReadFenced is [resource.Store.ReadFenced]. It takes two requests if it raises the fence, the second of which sends the
// value back, and one if the token's grant has touched the key before.
func (s *Store) ReadFenced(ctx context.Context, key string, token uint64) (resource.Record, error) {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckToken(token)); err != nil {
		return resource.Record{}, err
	}
	if err := s.enter(); err != nil {
		return resource.Record{}, err
	}
	defer s.calls.Done()
	return s.replace(ctx, key, nil, new(bool), func(rec resource.Record) (resource.Record, error) {
		if err := rec.CheckRead(key, token); err != nil {
			return resource.Record{}, err
		}
		rec.MaxFence = rec.MaxFence.Max(resource.Fence{Token: token})
		return rec, nil
	})
}

// Read is [resource.Store.Read].
func (s *Store) Read(ctx context.Context, key string) (resource.Record, error) {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key)); err != nil {
		return resource.Record{}, err
	}
	if err := s.enter(); err != nil {
		return resource.Record{}, err
	}
	defer s.calls.Done()
	v, err := s.get(ctx, key)
	if err != nil {
		return resource.Record{}, err
	}
	if v.etag == "" {
		return resource.Record{}, resource.ErrNotFound
	}
	return v.rec, nil
}

// Overwrite is [resource.Overwriter.Overwrite]: a PUT without a condition. The fence that it keeps is that of the last
// version that this Store has seen, so that a fence raised by another process meanwhile is lost with its value.
func (s *Store) Overwrite(ctx context.Context, key string, f resource.Fence, value []byte) error {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckOffered(f), s.checkSize(key, value)); err != nil {
		return err
	}
	if err := s.enter(); err != nil {
		return err
	}
	defer s.calls.Done()
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
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckToken(token)); err != nil {
		return err
	}
	if err := s.enter(); err != nil {
		return err
	}
	defer s.calls.Done()
	_, err := s.replace(ctx, key, nil, new(bool), func(rec resource.Record) (resource.Record, error) {
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
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.calls.Wait()
	return nil
}

// enter counts a call in, or says why it can't be served.
func (s *Store) enter() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return resource.ErrClosed
	}
	s.calls.Add(1)
	return nil
}

func (s *Store) checkSize(key string, value []byte) error {
	if len(value) <= s.o.MaxValue {
		return nil
	}
	return fmt.Errorf("%w: that of %q has %d bytes, at most %d are allowed (Options.MaxValue)", resource.ErrTooLarge, key, len(value), s.o.MaxValue)
}

// errLostRace tells that the object was not what a PUT's condition says.
var errLostRace = errors.New("s3store: the object has changed")

const (
	maxIdle  = 8 // lost races in a row by which the object hasn't changed, before replace gives up
	minPause = 5 * time.Millisecond
	maxPause = 200 * time.Millisecond
)

// replace puts what next makes of a key's record in its place, and returns it. It begins with from, or with the object
// itself if that is nil. A race that is lost is decided anew: by next, on the object as it has become. doubt is set when
// the reply to a PUT was lost, so that it may have taken effect.
//
// It ends. An object changes by accepted fences only, which rise, and next refuses the first that isn't less than the
// caller's: every race is lost to another write of a lesser fence, and each of those wins once. A server may also answer
// that something is going on (409) without a change; that is waited out maxIdle times in a row.
func (s *Store) replace(ctx context.Context, key string, from *version, doubt *bool,
	next func(resource.Record) (resource.Record, error),
) (resource.Record, error) {
	idle, lost := 0, "none" // lost is the ETag with which the last race was lost; a real one has quotes
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
		err = s.put(ctx, key, rec, condition(v.etag), doubt)
		if !errors.Is(err, errLostRace) {
			return rec, err
		}
		if idle++; v.etag != lost {
			idle, lost = 0, v.etag
		}
		if idle == maxIdle {
			return resource.Record{}, fmt.Errorf("s3store: key %q: %d conditional writes in a row failed and the object is the same: %w",
				key, idle, err)
		}
		if idle > 0 {
			if err := wait(ctx, min(minPause<<idle, maxPause)); err != nil {
				return resource.Record{}, err
			}
		}
	}
}

func wait(ctx context.Context, pause time.Duration) error {
	t := time.NewTimer(pause/2 + rand.N(pause/2))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("s3store: waiting: %w", context.Cause(ctx))
	}
}

// condition is a PUT that replaces the version with this ETag, or none if that is "".
func condition(etag string) *s3.PutObjectInput {
	if etag == "" {
		return &s3.PutObjectInput{IfNoneMatch: aws.String("*")}
	}
	return &s3.PutObjectInput{IfMatch: &etag}
}

// get reads key's object. An object that doesn't exist is the zero version.
func (s *Store) get(ctx context.Context, key string) (version, error) {
	name := s.Object(key)
	out, err := s.client.GetObject(ctx, &s3.GetObjectInput{Bucket: &s.bucket, Key: &name})
	if _, missing := errors.AsType[*types.NoSuchKey](err); missing {
		s.known.forget(key)
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

// put sends rec with the condition that in has. It returns errLostRace if that doesn't hold.
func (s *Store) put(ctx context.Context, key string, rec resource.Record, in *s3.PutObjectInput, doubt *bool) error {
	name := s.Object(key)
	in.Bucket, in.Key, in.Body = &s.bucket, &name, bytes.NewReader(encode(rec))
	in.Metadata = map[string]string{"fence": rec.MaxFence.String()}
	out, err := s.client.PutObject(ctx, in, func(o *s3.Options) { o.Retryer = watched{o.Retryer, doubt} })
	if err != nil {
		s.known.forget(key)
		if lostRace(err) {
			return fmt.Errorf("%w: %w", errLostRace, err)
		}
		return failed(ctx, err)
	}
	s.known.set(key, version{rec: rec, etag: aws.ToString(out.ETag)})
	return nil
}

// lostRace tells whether err says that a PUT's condition doesn't hold: 412, 409 for a write at the same time, and 404 for
// If-Match on an object that doesn't exist.
func lostRace(err error) bool {
	switch status(err) {
	case http.StatusPreconditionFailed, http.StatusConflict:
		return true
	case http.StatusNotFound:
		api, ok := errors.AsType[smithy.APIError](err)
		return ok && api.ErrorCode() == "NoSuchKey"
	}
	return false
}

// status is the HTTP status that err tells of, or 0.
func status(err error) int {
	if r, ok := errors.AsType[interface {
		error
		HTTPStatusCode() int
	}](err); ok {
		return r.HTTPStatusCode()
	}
	return 0
}

// failed wraps a client's error. After ctx's end that is ctx.Err at best, which doesn't tell the cause.
func failed(ctx context.Context, err error) error {
	if ctx.Err() != nil && !errors.Is(err, context.Cause(ctx)) {
		return fmt.Errorf("s3store: %w: %w", context.Cause(ctx), err)
	}
	return fmt.Errorf("s3store: %w", err)
}

// watched is a client's retryer that notes whether an attempt may have taken effect though it failed: every one that the
// server has not refused.
type watched struct {
	aws.Retryer
	doubt *bool
}

func (w watched) IsErrorRetryable(err error) bool {
	if code := status(err); code < 400 || code >= 500 {
		*w.doubt = true
	}
	return w.Retryer.IsErrorRetryable(err)
}

// GetAttemptToken keeps the rate limit of a retryer that has one.
func (w watched) GetAttemptToken(ctx context.Context) (func(error) error, error) {
	if r, ok := w.Retryer.(aws.RetryerV2); ok {
		return r.GetAttemptToken(ctx)
	}
	return w.GetInitialToken(), nil
}
