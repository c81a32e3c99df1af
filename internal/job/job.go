// Package job is the work that a lock is for: a read-modify-write of a small ledger, the shape of a billing run, a
// compaction or an export. cmd/worker does it by hand, package scenarios under faults.
package job

import (
	"context"
	"errors"
	"fmt"
	"net/http/httptrace"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/history"
)

// Lock is what the job needs of a lock. Acquire waits; TryAcquire returns an error that wraps dlock.ErrHeld when another
// holder has the lock. FromLocker makes one of a *dlock.Locker.
type Lock interface {
	Acquire(ctx context.Context, key string) (Lease, error)
	TryAcquire(ctx context.Context, key string) (Lease, error)
	Close() error
}

// Lease is what the job needs of a grant. Release returns an error that wraps dlock.ErrLost when the lock was no longer
// the lease's. *dlock.Handle is one.
type Lease interface {
	Fence() uint64            // the fencing token
	TTL() time.Duration       // how long the lease lasts, from the grant
	Until() time.Time         // when it must be presumed lost unless it is renewed
	Context() context.Context // ends when it is, or must be presumed, lost
	Release(ctx context.Context) error
}

// FromLocker makes a Lock of a Locker.
func FromLocker(l *dlock.Locker) Lock { return locker{l} }

type locker struct{ *dlock.Locker }

func (l locker) Acquire(ctx context.Context, key string) (Lease, error) {
	return leased(l.Locker.Acquire(ctx, key))
}

func (l locker) TryAcquire(ctx context.Context, key string) (Lease, error) {
	return leased(l.Locker.TryAcquire(ctx, key))
}

// leased keeps a nil *Handle from becoming a Lease that is not nil.
func leased(h *dlock.Handle, err error) (Lease, error) {
	if err != nil {
		return nil, err
	}
	return h, nil
}

// Store is what the job needs of the resource: *resource.Client, or any resource.Store.
type Store interface {
	Read(ctx context.Context, key string) (resource.Record, error)
	ReadFenced(ctx context.Context, key string, token uint64) (resource.Record, error)
	Write(ctx context.Context, key string, f resource.Fence, value []byte) error
}

// Sender is a Store that can tell when bytes have left this process; *stores.Store is one. OnSent arms it, for the next bytes
// that are sent and once.
type Sender interface {
	OnSent(f func())
}

// Job appends one entry to the ledger at Key, under the lock of the same name.
type Job struct {
	Lock  Lock
	Store Store
	Key   string
	Entry string

	FencedRead bool // read with the token, which raises the fence in the same step
	Try        bool // ask once without waiting, and report history.Held, before waiting
	Sent       bool // report history.Sent when the write has left; a Store that isn't a Sender sends it as an HTTP request
	Check      bool // look at the lease right before the write, and give up if it is lost
	Idle       bool // take the lock and release it, and leave the resource alone
	Outlive    bool // with the value to write in hand, wait until the lease is lost, and go on all the same

	// Second, if not empty, is another ledger, to which the entry is appended after the first, under the same grant.
	Second string

	// At is told of every point that the job reaches, as an event with its name and what belongs to it, and may stay as
	// long as it likes. An error from it ends the job. history.Sent comes from another goroutine, and At must not stay.
	At func(e history.Event) error
}

// ErrGaveUp is returned when the job found its lease lost before the write.
var ErrGaveUp = errors.New("job: the lease was lost before the write")

// Run does the job once. refused is why the job ended without a write although nothing failed: the resource's
// [*resource.StaleTokenError], or [ErrGaveUp]. The lock is released whatever happens, and err tells of all that failed.
func (j *Job) Run(ctx context.Context) (refused, err error) {
	lease, err := j.acquire(ctx)
	if err != nil {
		return nil, err
	}
	err = j.at(history.Acquired, history.Event{
		Key: j.Key, Token: lease.Fence(), TTL: history.Duration(lease.TTL()), Until: lease.Until(),
	})
	for _, key := range []string{j.Key, j.Second} {
		if err == nil && refused == nil && key != "" && !j.Idle {
			refused, err = j.work(ctx, lease, key)
		}
	}
	return refused, errors.Join(err, j.release(ctx, lease))
}

func (j *Job) acquire(ctx context.Context) (Lease, error) {
	if j.Try {
		lease, err := j.Lock.TryAcquire(ctx, j.Key)
		if !errors.Is(err, dlock.ErrHeld) {
			return lease, err
		}
		if err := j.at(history.Held, history.Event{}); err != nil {
			return nil, err
		}
	}
	return j.Lock.Acquire(ctx, j.Key)
}

// work reads the ledger at key, computes and writes. It doesn't use the lease's context for the write: a request that is cut off when the
// lease ends may still arrive, so that cutting it off would hide the hazard and not remove it.
func (j *Job) work(ctx context.Context, lease Lease, key string) (refused, err error) {
	token := lease.Fence()
	ledger, err := j.read(ctx, key, token)
	if err != nil {
		return j.refused(err, history.ReadStale, token)
	}
	if err := j.at(history.Read, history.Event{Token: token, Value: ledger}); err != nil {
		return nil, err
	}
	ledger = history.Append(ledger, j.Entry)
	if err := j.at(history.BeforeWrite, history.Event{Token: token, Value: ledger}); err != nil {
		return nil, err
	}
	if j.Outlive {
		if err := outlive(ctx, lease); err != nil {
			return nil, err
		}
		if err := j.at(history.Lost, history.Event{Token: token, Until: lease.Until()}); err != nil {
			return nil, err
		}
	}
	if j.Check {
		if lease.Context().Err() != nil {
			return ErrGaveUp, j.at(history.LostLease, history.Event{Token: token})
		}
		if err := j.at(history.Checked, history.Event{Token: token}); err != nil {
			return nil, err
		}
	}
	if j.Sent {
		ctx = j.tellSent(ctx, token)
	}
	err = j.Store.Write(ctx, key, resource.Fence{Token: token, Seq: 1}, []byte(ledger))
	if err != nil && !errors.Is(err, resource.ErrApplied) {
		return j.refused(err, history.WriteStale, token)
	}
	return nil, j.at(history.Wrote, history.Event{Token: token, Value: ledger})
}

// tellSent reports history.Sent when the call that is about to be made with the context has left.
func (j *Job) tellSent(ctx context.Context, token uint64) context.Context {
	sent := func() { _ = j.at(history.Sent, history.Event{Token: token}) } // the write's own outcome is what counts
	if s, ok := j.Store.(Sender); ok {
		s.OnSent(sent)
		return ctx
	}
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteRequest: func(info httptrace.WroteRequestInfo) {
		if info.Err == nil {
			sent()
		}
	}})
}

// overdue is how long after its lease's end a context that hasn't ended is a defect of the lock.
const overdue = 500 * time.Millisecond

// outlive waits until the lease is lost. It looks at the context itself once the time is over, so that a stall of this
// process is no defect of the lock's.
func outlive(ctx context.Context, lease Lease) error {
	for {
		end := lease.Until().Add(overdue) // a renewal moves it
		timer := time.NewTimer(time.Until(end))
		select {
		case <-lease.Context().Done():
			timer.Stop()
			return nil
		case <-ctx.Done():
			timer.Stop()
			return context.Cause(ctx)
		case <-timer.C:
		}
		if !lease.Until().Add(overdue).After(end) && lease.Context().Err() == nil {
			return fmt.Errorf("the lease's context goes on %v after the end of the lease", overdue)
		}
	}
}

func (j *Job) read(ctx context.Context, key string, token uint64) (string, error) {
	var rec resource.Record
	var err error
	if j.FencedRead {
		rec, err = j.Store.ReadFenced(ctx, key, token)
	} else {
		rec, err = j.Store.Read(ctx, key)
	}
	if errors.Is(err, resource.ErrNotFound) { // the ledger's first entry
		err = nil
	}
	return string(rec.Value), err
}

// refused tells a refusal, which it reports under name, from a failure.
func (j *Job) refused(err error, name string, token uint64) (refused, failed error) {
	if _, ok := errors.AsType[*resource.StaleTokenError](err); !ok {
		return nil, err
	}
	return err, j.at(name, history.Event{Token: token})
}

func (j *Job) release(ctx context.Context, lease Lease) error {
	err := lease.Release(ctx)
	name := history.Released
	switch {
	case err == nil:
	case errors.Is(err, dlock.ErrForeignRelease):
		name = history.ReleaseForeign
	case errors.Is(err, dlock.ErrLost):
		name = history.ReleaseLost
	default:
		return fmt.Errorf("release: %w", err)
	}
	return j.at(name, history.Event{Token: lease.Fence()})
}

func (j *Job) at(name string, e history.Event) error {
	if j.At == nil {
		return nil
	}
	e.Kind, e.Name, e.Time = history.KindReport, name, time.Now()
	return j.At(e)
}
