package boltstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/fencelab/fencelab/resource"
)

// maxBatchOps and maxBatchBytes bound one commit, so that its first operation doesn't wait for an endless queue.
const (
	maxBatchOps   = 1024
	maxBatchBytes = 16 << 20
)

type kind int

const (
	write kind = iota
	overwrite
	readFenced
	setFence
)

// op is one operation on its way through the committer.
type op struct {
	kind  kind
	key   string
	fence resource.Fence
	value []byte // the op's own copy: the caller may be gone by the time it is written

	// The answer, valid once done is closed. rec is set for reads.
	rec  resource.Record
	err  error
	done chan struct{}
}

// decide returns the record that follows rec and whether it differs, or a refusal.
func (o *op) decide(rec resource.Record) (next resource.Record, changed bool, err error) {
	switch o.kind {
	case write:
		return resource.Record{Value: o.value, MaxFence: o.fence}, true, rec.CheckWrite(o.key, o.fence, o.value)
	case overwrite:
		return resource.Record{Value: o.value, MaxFence: rec.MaxFence.Max(o.fence)}, true, nil
	case setFence:
		if rec.MaxFence == (resource.Fence{}) && rec.Value == nil {
			return rec, false, resource.ErrNotFound
		}
		return resource.Record{Value: bytes.Clone(rec.Value), MaxFence: o.fence}, true, nil // it outlives the transaction
	default:
		if err := rec.CheckRead(o.key, o.fence.Token); err != nil {
			return rec, false, err
		}
		// Both values outlive the transaction, and with it the memory of rec's. They go to different callers.
		raised := rec.MaxFence.Max(o.fence)
		o.rec = resource.Record{Value: bytes.Clone(rec.Value), MaxFence: raised}
		return resource.Record{Value: bytes.Clone(rec.Value), MaxFence: raised}, raised != rec.MaxFence, nil
	}
}

// do hands o to the committer and waits for its answer.
func (s *Store) do(ctx context.Context, o *op) (resource.Record, error) {
	s.mu.RLock()
	err := s.enter()
	s.mu.RUnlock()
	if err != nil {
		return resource.Record{}, err
	}
	defer s.calls.Done()
	o.done = make(chan struct{})
	select {
	case s.ops <- o:
	case <-ctx.Done():
		return resource.Record{}, resource.CheckContext(ctx)
	}
	select {
	case <-o.done:
	case <-ctx.Done():
		return resource.Record{}, fmt.Errorf("%w (the operation may still take effect)", resource.CheckContext(ctx))
	}
	if o.err != nil {
		return resource.Record{}, o.err
	}
	return o.rec, nil
}

// commitLoop takes the operations that wait and commits them as one batch, until the store is closed.
func (s *Store) commitLoop() {
	defer close(s.done)
	var ops []*op
	for first := range s.ops {
		ops = s.drain(append(ops[:0], first))
		s.commit(ops)
		clear(ops)
	}
}

// drain appends what waits right now to ops.
func (s *Store) drain(ops []*op) []*op {
	for size := len(ops[0].value); len(ops) < maxBatchOps && size < maxBatchBytes; {
		select {
		case o, ok := <-s.ops:
			if !ok {
				return ops
			}
			ops = append(ops, o)
			size += len(o.value)
		default:
			return ops
		}
	}
	return ops
}

// errUndone says of a commit that failed that it has left nothing behind.
var errUndone = errors.New("nothing was changed")

// commit decides ops in order, makes what they change durable, and only then answers. A refusal waits too: it may rest
// on a write of the same batch.
func (s *Store) commit(ops []*op) {
	b := &batch{records: make(map[string]resource.Record, len(ops)), done: make(chan struct{})}
	failed := s.failed // written by this goroutine only
	err := failed
	if err == nil {
		if err = s.apply(b, ops); !errors.Is(err, errUndone) {
			failed = err
		}
	}
	s.mu.Lock()
	s.committing, s.failed = nil, failed
	s.mu.Unlock()
	b.err = err
	close(b.done)
	for _, o := range ops {
		// After a commit that is undone, answers that don't rest on it stand.
		if err != nil && (failed != nil || !b.decided || b.changes(o.key)) {
			o.err = err
		}
		close(o.done)
	}
}

// apply runs ops in one transaction and collects in b what they change. If it returns an error that isn't errUndone, it's
// unknown what the disk holds, and what the page cache shows is no proof of it.
func (s *Store) apply(b *batch, ops []*op) (err error) {
	defer undamaged(s.path, &err)()
	if err := s.checkFile(); err != nil {
		return err
	}
	tx, err := s.db.Begin(true)
	if err != nil {
		return s.why(err, 0)
	}
	id := tx.ID()
	// After Commit this does nothing, except after some failed ones, which leave the transaction open.
	defer func() { _ = tx.Rollback() }()

	keys := tx.Bucket(bucket)
	unwritten := keys.Sequence() // how many records have no value, since there is this count
	for _, o := range ops {
		rec, ok := b.records[o.key]
		if !ok {
			if rec, _, o.err = s.load(tx, o.key); o.err != nil {
				continue
			}
		}
		var next resource.Record
		var changed bool
		if next, changed, o.err = o.decide(rec); o.err != nil || !changed {
			continue
		}
		isNew := rec.MaxFence == (resource.Fence{})
		switch {
		case next.Value == nil && isNew && unwritten >= s.most:
			o.err = fmt.Errorf("boltstore: %s: %w for %q: it has %d keys that only fenced reads have touched, and that is the most (MaxUnwritten)",
				s.path, resource.ErrNoRoom, o.key, unwritten)
			continue
		case next.Value == nil && isNew:
			unwritten++
		case next.Value != nil && rec.Value == nil && !isNew && unwritten > 0:
			unwritten--
		}
		b.records[o.key] = next
	}
	b.decided = true
	if len(b.records) == 0 {
		return nil
	}
	if err := keys.SetSequence(unwritten); err != nil {
		return s.why(err, id)
	}
	for key, rec := range b.records {
		if err := keys.Put([]byte(key), encode(key, rec)); err != nil {
			return s.why(err, id)
		}
	}
	s.mu.Lock()
	s.committing = b
	s.mu.Unlock()
	if err := s.end(tx); err != nil {
		return s.why(err, id)
	}
	return nil
}

// why wraps the error with which transaction id has failed. It is undone if the file doesn't show it: the page that makes it
// valid is written last, after a sync of all others, which were free before and are again.
func (s *Store) why(err error, id int) error {
	tx, cannot := s.db.Begin(false)
	if cannot != nil {
		return fmt.Errorf("boltstore: %s: nothing is answered until the file is opened again: %w", s.path, errors.Join(err, cannot))
	}
	last := tx.ID()
	_ = tx.Rollback() // of a read
	switch {
	case last == id:
		return fmt.Errorf("boltstore: %s: a commit failed; nothing is answered until the file is opened again: %w", s.path, err)
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return fmt.Errorf("boltstore: %s: %w: %w: %w", s.path, errUndone, resource.ErrNoRoom, err)
	}
	return fmt.Errorf("boltstore: %s: %w: %w", s.path, errUndone, err)
}

// batch is what one commit changes. It is complete before Store.committing shows it to readers.
type batch struct {
	records map[string]resource.Record
	decided bool          // every op has its answer, should the commit succeed
	done    chan struct{} // closed when the commit has ended
	err     error         // why it failed; valid once done is closed
}

func (b *batch) changes(key string) bool {
	_, ok := b.records[key]
	return ok
}

// wait returns key's record once it is durable.
func (b *batch) wait(ctx context.Context, key string) (resource.Record, error) {
	select {
	case <-b.done:
	case <-ctx.Done():
		return resource.Record{}, resource.CheckContext(ctx)
	}
	if b.err != nil {
		return resource.Record{}, b.err
	}
	rec := b.records[key]
	rec.Value = bytes.Clone(rec.Value)
	return rec, nil
}
