package boltstore

import (
	"bytes"
	"context"
	"fmt"

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

// commit decides ops in order, makes what they change durable, and only then answers. A refusal waits too: it may rest
// on a write of the same batch.
func (s *Store) commit(ops []*op) {
	b := &batch{records: make(map[string]resource.Record, len(ops)), done: make(chan struct{})}
	err := s.failed // written by this goroutine only
	if err == nil {
		err = s.apply(b, ops)
	}
	s.mu.Lock()
	s.committing, s.failed = nil, err
	s.mu.Unlock()
	b.err = err
	close(b.done)
	for _, o := range ops {
		if err != nil {
			o.err = err
		}
		close(o.done)
	}
}

// apply runs ops in one transaction and collects in b what they change. Their answers stand only if it returns nil.
// After an error it's unknown what the disk holds, and what the page cache shows is no proof of it.
func (s *Store) apply(b *batch, ops []*op) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("boltstore: %s: a commit failed; nothing is answered until the file is opened again: %w", s.path, err)
		}
	}()
	tx, err := s.db.Begin(true)
	if err != nil {
		return err
	}
	// After Commit this does nothing, except after some failed ones, which leave the transaction open.
	defer func() { _ = tx.Rollback() }()

	for _, o := range ops {
		rec, ok := b.records[o.key]
		if !ok {
			if rec, _, o.err = s.load(tx, o.key); o.err != nil {
				continue
			}
		}
		var next resource.Record
		var changed bool
		if next, changed, o.err = o.decide(rec); o.err == nil && changed {
			b.records[o.key] = next
		}
	}
	if len(b.records) == 0 {
		return nil
	}
	for key, rec := range b.records {
		if err := tx.Bucket(bucket).Put([]byte(key), encode(rec)); err != nil {
			return err
		}
	}
	s.mu.Lock()
	s.committing = b
	s.mu.Unlock()
	return tx.Commit()
}

// batch is what one commit changes. It is complete before Store.committing shows it to readers.
type batch struct {
	records map[string]resource.Record
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
