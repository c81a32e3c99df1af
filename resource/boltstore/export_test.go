package boltstore

import (
	"errors"
	"fmt"

	bolt "go.etcd.io/bbolt"

	"github.com/fencelab/fencelab/resource"
)

// The encoding of records, for the tests.
var (
	Encode = encode
	Decode = decode
	Bucket = bucket
)

// Pending are operations on their way through one commit.
type Pending []*op

// WriteOp is a Write for Batch.
func WriteOp(key string, f resource.Fence, value []byte) *op {
	return &op{kind: write, key: key, fence: f, value: value, done: make(chan struct{})}
}

// ReadFencedOp is a ReadFenced for Batch.
func ReadFencedOp(key string, token uint64) *op {
	return &op{kind: readFenced, key: key, fence: resource.Fence{Token: token}, done: make(chan struct{})}
}

// Batch begins to commit ops as one batch. The store must have nothing else to do.
func (s *Store) Batch(ops ...*op) Pending {
	go s.commit(ops)
	return ops
}

// Answered returns how many operations have their answer.
func (p Pending) Answered() (n int) {
	for _, o := range p {
		select {
		case <-o.done:
			n++
		default:
		}
	}
	return n
}

// Wait returns the answers.
func (p Pending) Wait() (recs []resource.Record, errs []error) {
	for _, o := range p {
		<-o.done
		recs, errs = append(recs, o.rec), append(errs, o.err)
	}
	return recs, errs
}

// HoldGrowth holds commits that grow the file until release is called: bbolt waits for readers before it remaps the file.
func (s *Store) HoldGrowth() (release func() error, err error) {
	tx, err := s.db.Begin(false)
	if err != nil {
		return nil, fmt.Errorf("hold: %w", err)
	}
	return tx.Rollback, nil
}

// FailLastSync makes commits fail at their very end.
func (s *Store) FailLastSync() {
	s.end = func(tx *bolt.Tx) error { return errors.Join(tx.Commit(), errors.New("sync failed")) }
}

// AroundCommit calls f before and after each commit.
func (s *Store) AroundCommit(f func()) {
	s.end = func(tx *bolt.Tx) error {
		f()
		defer f()
		return tx.Commit()
	}
}

// HoldCommit holds the next commit until it receives the error with which to fail.
func (s *Store) HoldCommit() (fail chan<- error) {
	held := make(chan error)
	s.end = func(tx *bolt.Tx) error { return errors.Join(<-held, tx.Rollback()) }
	return held
}

// CheckFile returns what bbolt finds wrong with the file.
func (s *Store) CheckFile() (all error) {
	err := s.db.View(func(tx *bolt.Tx) error {
		for err := range tx.Check() {
			all = errors.Join(all, err)
		}
		return nil
	})
	return errors.Join(all, err)
}

// Committing tells whether a commit runs.
func (s *Store) Committing() bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.committing != nil
}

// Queued returns how many operations wait for the committer.
func (s *Store) Queued() int { return len(s.ops) }

// Commits returns the number of transactions of the file so far.
func (s *Store) Commits() (int, error) {
	tx, err := s.db.Begin(false)
	if err != nil {
		return 0, fmt.Errorf("commits: %w", err)
	}
	return tx.ID(), tx.Rollback()
}
