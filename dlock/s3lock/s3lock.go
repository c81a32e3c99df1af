// Package s3lock is a dlock.Backend in a bucket of Amazon S3, or of a server with its protocol, for data that is in S3 anyway. A
// lock is one JSON object (owner, fencing token, TTL, whether it is held), written by conditional PUTs only and never deleted.
//
// # Leases
//
// A lease begins at the object's Last-Modified and is compared with the Date of the same reply, so only S3's clocks matter. Both
// are in whole seconds: a dead holder blocks the key for its TTL plus up to 2 s, until the next poll. If S3's servers disagree on
// the time, a lease may end early by the difference: two holders may then overlap, and only the token keeps data safe.
//
// # Waiting
//
// S3 can't notify: one waiter per key and Backend polls, with a GET, first after an eighth to a quarter of [Options.Poll], later
// after half to all of it, 4800 times an hour by default. Waiters are not served in order, and a client that takes the lock
// again at once may starve them. Acquire, Renew and Release take a GET and a PUT each: too slow and expensive for a hot key. A
// waiter retries failed requests for up to its TTL, unless S3 refuses them.
//
// # Token durability
//
// The token is a counter in the object. It restarts if the object is deleted, by hand or by a lifecycle rule, and regresses if an
// older version is restored or a replica in another region takes over: a store that checks tokens then refuses the new holders.
// Delete the object only together with the key's resource.
//
// # Requirements
//
// The requirements and the permissions are those of package s3store; s3:DeleteObject is for [Open]. In a versioned bucket each
// renewal makes a version: let noncurrent ones expire.
package s3lock

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	"github.com/aws/aws-sdk-go-v2/aws/middleware"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	"github.com/aws/aws-sdk-go-v2/service/s3/types"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/wait"
	"github.com/fencelab/fencelab/internal/jitter"
	"github.com/fencelab/fencelab/internal/s3object"
)

const (
	maxBody = 4096 // bytes; the content of a lock has about 200
	maxIdle = 8    // PUTs whose condition failed although the object didn't change, before a call gives up
	minIdle = 5 * time.Millisecond

	answerTimeout = 20 * time.Second // for one GET or PUT; the client itself may wait for ever
	pollTimeout   = 5 * time.Second  // for a waiter's GET and PUT at first
)

// ErrNoConditions is wrapped by the error of [Open] if the server ignores the conditions of a PUT.
var ErrNoConditions = s3object.ErrNoConditions

var errBrokenOff = errors.New("the reply broke off")

// Options configure a [Backend].
type Options struct {
	// Prefix begins the names of all objects, "lock/" by default; the key follows, written as s3store.Store.Object writes it.
	// Locks with different prefixes are independent if neither prefix is the beginning of the other.
	Prefix string
	// Poll is the longest time between two polls of a waiter; 1 s by default.
	Poll time.Duration
}

// Backend implements dlock.Backend.
type Backend struct {
	client  *s3.Client
	bucket  string
	o       Options
	waiting wait.Queues

	open  context.Context // ends on Close, with the cause dlock.ErrClosed
	close context.CancelCauseFunc
}

var _ dlock.Backend = (*Backend)(nil)

// Open is [New], but first checks with about 20 requests on a scratch object that the server honours the conditions of a PUT.
func Open(ctx context.Context, client *s3.Client, bucket string, opts *Options) (*Backend, error) {
	b, err := New(client, bucket, opts)
	if err != nil {
		return nil, err
	}
	if err := s3object.Probe(ctx, client, bucket, b.o.Prefix); err != nil {
		return nil, failed(ctx, err)
	}
	return b, nil
}

// New returns a Backend on an existing bucket. It sends nothing. The client stays the caller's.
func New(client *s3.Client, bucket string, opts *Options) (*Backend, error) {
	var o Options
	if opts != nil {
		o = *opts
	}
	o.Prefix, o.Poll = cmp.Or(o.Prefix, "lock/"), cmp.Or(o.Poll, time.Second)
	switch {
	case client == nil:
		return nil, fmt.Errorf("%w: s3lock: client is nil", dlock.ErrInvalid)
	case bucket == "":
		return nil, fmt.Errorf("%w: s3lock: bucket is empty", dlock.ErrInvalid)
	case len(o.Prefix) > s3object.MaxPrefix:
		return nil, fmt.Errorf("%w: s3lock: prefix has %d bytes, at most %d are allowed", dlock.ErrInvalid, len(o.Prefix), s3object.MaxPrefix)
	case o.Poll < time.Millisecond:
		return nil, fmt.Errorf("%w: s3lock: Poll is %v; it is at least 1ms", dlock.ErrInvalid, o.Poll)
	}
	b := &Backend{client: client, bucket: bucket, o: o}
	b.open, b.close = context.WithCancelCause(context.Background())
	return b, nil
}

// Acquire implements dlock.Backend.
func (b *Backend) Acquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	g, err := b.TryAcquire(ctx, r)
	if err != dlock.ErrHeld { //nolint:errorlint // ctx's cause may wrap it
		return g, err
	}
	r.NoteHeld()
	q, err := b.join(ctx, r)
	if err != nil {
		return g, err
	}
	defer q.Leave()
	limit := pollTimeout
	for d := b.o.Poll / 4; ; d = min(2*d, b.o.Poll) {
		if err := b.pause(ctx, d); err != nil {
			return g, err
		}
		once, cancel := context.WithTimeoutCause(ctx, limit, wait.ErrNoAnswer) // other waiters depend on it
		g, err := b.TryAcquire(once, r)
		cancel()
		switch {
		case err == nil:
			q.Failing = time.Time{}
			return g, nil
		case err == dlock.ErrHeld: //nolint:errorlint // ctx's cause may wrap it
			q.Failing = time.Time{}
			r.NoteHeld()
			continue
		case ctx.Err() != nil:
			return g, failed(ctx, errWaiting)
		}
		if !transient(err) {
			return g, err
		}
		if errors.Is(err, wait.ErrNoAnswer) {
			limit = min(2*limit, 2*answerTimeout) // a slow server must get to reply
		}
		q.Failing = cmp.Or(q.Failing, time.Now())
		if q.Fail(q.Failing, err); time.Since(q.Failing) >= r.TTL { // if it was granted all the same, the next poll finds its owner
			return g, err
		}
	}
}

// TryAcquire implements dlock.Backend.
func (b *Backend) TryAcquire(ctx context.Context, r dlock.Request) (dlock.Grant, error) {
	if err := checkTTL(r.TTL); err != nil {
		return dlock.Grant{}, err
	}
	won, start, err := b.update(ctx, r.Key, func(l lock) (record, error) {
		next := record{Owner: r.Owner, Fence: l.Fence + 1, TTL: r.TTL, Held: true}
		switch {
		case l.live && l.Owner == r.Owner: // the same request, repeated
			next.Fence = l.Fence
		case l.live:
			return next, dlock.ErrHeld
		case l.Fence == math.MaxUint64:
			return next, fmt.Errorf("s3lock: key %q: the token is out of range", r.Key)
		}
		return next, nil
	})
	if err != nil {
		return dlock.Grant{}, err
	}
	return dlock.Grant{Key: r.Key, Owner: r.Owner, Fence: won.Fence, TTL: r.TTL, Start: start}, nil
}

// Renew implements dlock.Backend.
func (b *Backend) Renew(ctx context.Context, g dlock.Grant) error {
	if err := checkTTL(g.TTL); err != nil {
		return err
	}
	_, _, err := b.update(ctx, g.Key, func(l lock) (record, error) {
		next := l.record
		next.TTL = g.TTL
		return next, l.heldBy(g.Owner)
	})
	return err
}

// Release implements dlock.Backend.
func (b *Backend) Release(ctx context.Context, g dlock.Grant) error {
	undo := g.Fence == 0 // the grant never arrived, and its PUT may still do so
	var before *lock
	var lost error
	_, _, err := b.update(ctx, g.Key, func(l lock) (record, error) {
		sent := before != nil
		lost = l.heldBy(g.Owner)
		// A late PUT's condition may hold: the request's, or that of a renewal of an expired lease.
		late := undo && !l.live && (!sent || before.etag == l.etag) || l.Held && l.Owner == g.Owner
		before = &l
		switch {
		case lost == nil, late:
			return record{Fence: l.Fence}, nil // at least the ETag changes
		case sent && !undo: // by the PUT that was refused, if the client has repeated it, or by another owner
			return record{}, errors.New("s3lock: the lock is free or held by another owner; it is unknown whether this release freed it")
		}
		return record{}, lost
	})
	return cmp.Or(err, lost)
}

// Close implements dlock.Backend. Waiting calls of Acquire return dlock.ErrClosed. The client stays open.
func (b *Backend) Close() error {
	b.close(dlock.ErrClosed)
	return nil
}

func checkTTL(ttl time.Duration) error {
	if ttl <= 0 {
		return fmt.Errorf("%w: s3lock: TTL %v is not positive", dlock.ErrInvalid, ttl)
	}
	return nil
}

type record = s3object.Lock

// lock is a record as read from the bucket; zero: there is no object.
type lock struct {
	record
	etag string
	live bool // it is held, and the lease may not have run out
}

func (l lock) heldBy(owner string) error {
	if !l.live || l.Owner != owner {
		return dlock.ErrLost
	}
	return nil
}

// update replaces a key's record by what next returns, unless that is an error. It returns the record written and a time just
// before the request.
func (b *Backend) update(ctx context.Context, key string, next func(lock) (record, error)) (r record, start time.Time, err error) {
	var refused error
	var nonce, etag string
	for idle := 0; ; {
		l, err := b.get(ctx, key)
		if err != nil {
			return r, start, err
		}
		if refused != nil && l.Nonce == nonce { // the client has repeated the PUT, whose first reply was lost
			return l.record, start, nil
		}
		if idle++; refused == nil || l.etag != etag {
			// With a new ETag, no earlier PUT can be applied any more. With the same one it can, so the next PUT is the same.
			idle, nonce, etag, start = 0, rand.Text(), l.etag, time.Now()
		}
		if idle == maxIdle {
			return r, start, fmt.Errorf("s3lock: key %q: %d conditional writes in a row failed, but the object has not changed: %w", key, idle, refused)
		}
		if idle > 0 { // S3 answers 409 while another write is under way
			if err := b.pause(ctx, minIdle<<idle); err != nil {
				return r, start, err
			}
		}
		if r, err = next(l); err != nil {
			return r, start, err
		}
		r.Nonce = nonce
		if refused = b.put(ctx, key, r, etag); !s3object.LostRace(refused) {
			return r, start, refused
		}
	}
}

func (b *Backend) get(ctx context.Context, key string) (l lock, err error) {
	if b.open.Err() != nil {
		return l, dlock.ErrClosed
	}
	ctx, end := wait.Both(ctx, b.open)
	defer end()
	ctx, cancel := context.WithTimeoutCause(ctx, answerTimeout, wait.ErrNoAnswer)
	defer cancel()
	name := b.o.Prefix + s3object.Name(key)
	out, err := b.client.GetObject(ctx, &s3.GetObjectInput{Bucket: &b.bucket, Key: &name})
	if _, missing := errors.AsType[*types.NoSuchKey](err); missing {
		return l, nil
	}
	if err != nil {
		return l, failed(ctx, err)
	}
	body, err := io.ReadAll(io.LimitReader(out.Body, maxBody))
	if err = errors.Join(err, out.Body.Close()); err != nil {
		return l, failed(ctx, fmt.Errorf("%w: %w", errBrokenOff, err))
	}
	if json.Unmarshal(body, &l.record) != nil || l.Nonce == "" {
		return l, fmt.Errorf("s3lock: object %s/%s is not a lock: it begins with %.40q; remove it or choose another Options.Prefix", b.bucket, name, body)
	}
	now, ok := middleware.GetServerTime(out.ResultMetadata)
	if !ok || out.LastModified == nil || out.ETag == nil {
		return l, fmt.Errorf("s3lock: the server sent object %s/%s without Date, Last-Modified or ETag", b.bucket, name)
	}
	l.etag = *out.ETag
	l.live = l.Live(now, *out.LastModified)
	return l, nil
}

// put isn't ended by Close: its outcome would be unknown.
func (b *Backend) put(ctx context.Context, key string, r record, etag string) error {
	body, err := json.Marshal(r)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, answerTimeout, wait.ErrNoAnswer)
	defer cancel()
	in := s3object.Condition(etag)
	in.Bucket, in.Key, in.Body = &b.bucket, aws.String(b.o.Prefix+s3object.Name(key)), bytes.NewReader(body)
	in.ContentType = aws.String("application/json")
	if _, err = b.client.PutObject(ctx, in); err != nil && !s3object.LostRace(err) {
		return failed(ctx, err)
	}
	return err
}

var errWaiting = errors.New("waiting")

func (b *Backend) join(ctx context.Context, r dlock.Request) (*wait.Queue, error) {
	ctx, end := wait.Both(ctx, b.open)
	defer end()
	return b.waiting.Join(ctx, r.Key, r.TTL)
}

func (b *Backend) pause(ctx context.Context, d time.Duration) error {
	ctx, end := wait.Both(ctx, b.open)
	defer end()
	wait.For(ctx, d/2+jitter.N(d/2))
	if ctx.Err() != nil {
		return failed(ctx, errWaiting)
	}
	return nil
}

// transient reports whether a waiter polls again after err.
func transient(err error) bool {
	return s3object.Transient(err) || errors.Is(err, wait.ErrNoAnswer) || errors.Is(err, errBrokenOff)
}

func failed(ctx context.Context, err error) error { return wait.Failed(ctx, "s3lock", err) }
