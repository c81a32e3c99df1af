package boltstore

import (
	"errors"
	"fmt"

	bolt "go.etcd.io/bbolt"

	"github.com/fencelab/fencelab/resource"
)

var (
	OpenWith = open

	Encode = encode
	Decode = decode
	Bucket = bucket
)

const (
	MaxBatchOps   = maxBatchOps
	MaxBatchBytes = maxBatchBytes
)

type Pending []*op

func WriteOp(key string, f resource.Fence, value []byte) *op {
	return &op{kind: write, key: key, fence: f, value: value, done: make(chan struct{})}
}

func ReadFencedOp(key string, token uint64) *op {
	return &op{kind: readFenced, key: key, fence: resource.Fence{Token: token}, done: make(chan struct{})}
}

// Batch commits ops as one batch. No other commit may be running.
func (s *Store) Batch(ops ...*op) Pending {
	go s.commit(ops)
	return ops
}

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

func (p Pending) Wait() (recs []resource.Record, errs []error) {
	for _, o := range p {
		<-o.done
		recs, errs = append(recs, o.rec), append(errs, o.err)
	}
	return recs, errs
}

func (s *Store) OnCommit(do func(commit func() error) error) {
	s.end = func(tx *bolt.Tx) error { return do(tx.Commit) }
}

func (s *Store) CheckFile() (all error) {
	err := s.db.View(func(tx *bolt.Tx) error {
		for err := range tx.Check() {
			all = errors.Join(all, err)
		}
		return nil
	})
	return errors.Join(all, err)
}

func (s *Store) Commits() (int, error) {
	tx, err := s.db.Begin(false)
	if err != nil {
		return 0, fmt.Errorf("commits: %w", err)
	}
	return tx.ID(), tx.Rollback()
}
