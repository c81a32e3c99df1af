package boltstore

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"syscall"

	"github.com/fencelab/fencelab/resource"
)

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

type op struct {
	kind  kind
	key   string
	fence resource.Fence
	value []byte

	done chan struct{}
	rec  resource.Record
	err  error
}

// decide returns the record that replaces rec and whether it differs, or a refusal. It clones rec's value, which the transaction
// owns.
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
		return resource.Record{Value: bytes.Clone(rec.Value), MaxFence: o.fence}, true, nil
	default:
		if err := rec.CheckRead(o.key, o.fence); err != nil {
			return rec, false, err
		}
		raised := rec.MaxFence.Max(o.fence)
		o.rec = resource.Record{Value: bytes.Clone(rec.Value), MaxFence: raised}
		return resource.Record{Value: bytes.Clone(rec.Value), MaxFence: raised}, raised != rec.MaxFence, nil
	}
}

func (s *Store) do(ctx context.Context, o *op, invalid error) (resource.Record, error) {
	if invalid == nil && len(o.value) > MaxValue { // it would fail the whole commit
		invalid = fmt.Errorf("%w: that of %q has %d bytes, at most %d fit into a record", resource.ErrTooLarge, o.key, len(o.value), MaxValue)
	}
	if err := s.calls.Begin(ctx, o.key, invalid); err != nil {
		return resource.Record{}, err
	}
	defer s.calls.End()
	o.value = append([]byte{}, o.value...) // the caller may return before it is written
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
	return o.rec, o.err
}

func (s *Store) commitLoop() {
	defer close(s.done)
	var ops []*op
	for first := range s.ops {
		ops = s.drain(append(ops[:0], first))
		s.commit(ops)
		clear(ops)
	}
}

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

var (
	// errUndone means that nothing of a failed commit is left.
	errUndone = errors.New("nothing was changed")
	// errUnknown means that something of it may be left.
	errUnknown = errors.New("all calls fail until the file is opened again")
)

// commit replies only after the commit: a refusal too may depend on a write of its batch.
func (s *Store) commit(ops []*op) {
	b := &batch{records: make(map[string]resource.Record, len(ops)), done: make(chan struct{})}
	failed := s.failed // without s.mu: only this goroutine writes it
	err := failed
	if err == nil {
		if err = s.apply(b, ops); !errors.Is(err, errUndone) {
			failed = err
		}
	}
	s.mu.Lock()
	if err == nil && s.committing != nil {
		s.last++
	}
	s.committing, s.failed = nil, failed
	s.mu.Unlock()
	b.err = err
	close(b.done)
	for _, o := range ops {
		// After an undone commit, replies that don't depend on it remain valid.
		if err != nil && (failed != nil || !b.decided || b.changes(o.key)) {
			o.err = err
		}
		close(o.done)
	}
}

// apply runs ops in one transaction and collects their changes in b. After an error other than errUndone, the disk's contents are
// unknown, whatever the page cache shows.
func (s *Store) apply(b *batch, ops []*op) (err error) {
	defer undamaged(s.path, &err)()
	if err := s.checkFile(errUndone); err != nil {
		return err
	}
	tx, err := s.begin(true)
	if err != nil {
		return err // not errUndone: bbolt's free list and the file may no longer match
	}
	id := tx.ID()
	// Some failed commits leave the transaction open.
	defer func() { _ = tx.Rollback() }()

	keys := tx.Bucket(bucket)
	unwritten := keys.Sequence() // records without a value
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
			o.err = fmt.Errorf("boltstore: %s: %w for %q: the limit of %d keys that only fenced reads have touched is reached (MaxUnwritten)",
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
	return s.checkFile(errUnknown) // an acknowledged write must be in the file at the path
}

// why wraps the error with which transaction id failed. It is undone if the file doesn't show it: the page that makes it valid is
// written last, after a sync of all others, which become free again.
func (s *Store) why(err error, id int) error {
	tx, cannot := s.begin(false)
	if cannot != nil {
		return fmt.Errorf("boltstore: %s: %w: %w", s.path, errUnknown, errors.Join(err, cannot))
	}
	last := tx.ID()
	_ = tx.Rollback()
	switch {
	case last == id:
		return fmt.Errorf("boltstore: %s: a commit failed; %w: %w", s.path, errUnknown, err)
	// Compare texts: bbolt doesn't wrap errors from growing the file.
	case strings.Contains(err.Error(), syscall.ENOSPC.Error()), strings.Contains(err.Error(), syscall.EDQUOT.Error()):
		return fmt.Errorf("boltstore: %s: %w: %w: %w", s.path, errUndone, resource.ErrNoRoom, err)
	}
	return fmt.Errorf("boltstore: %s: %w: %w", s.path, errUndone, err)
}

// batch is what one commit changes, complete before readers see it in Store.committing.
type batch struct {
	records map[string]resource.Record
	decided bool // if the commit succeeds, all replies are known
	done    chan struct{}
	err     error // valid once done is closed
}

func (b *batch) changes(key string) bool {
	_, ok := b.records[key]
	return ok
}

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
