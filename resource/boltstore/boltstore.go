// Package boltstore is a durable [resource.Store] in one bbolt file. It replies once the result is on disk. Concurrent writers
// share a sync.
//
// It requires that
//   - the file is on a local file system: elsewhere flock(2) may be a lease, and a paused process would overwrite its successor's
//     file;
//   - fsync reaches the disk.
//
// A restored backup brings old fences back. On a full disk, calls that would change the file fail until there is room. If a
// commit's outcome is unknown, all calls fail until the file is opened again.
package boltstore

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/internal/calls"
)

var bucket = []byte("records.v1")

// MaxValue is the largest value in bytes: bbolt puts up to four on a page, and on 32-bit machines panics if a page exceeds 256
// MiB.
const MaxValue = 64<<20 - 1<<10

// Options configure [Open].
type Options struct {
	// LockTimeout is how long Open waits for another process to close the file; 1 s if zero.
	LockTimeout time.Duration
	// MaxUnwritten limits the keys that only fenced reads have touched, so that reads can't fill the disk; 1<<20 if zero. Beyond
	// it fenced reads of new keys return [resource.ErrNoRoom].
	MaxUnwritten uint64
}

// Store is a [resource.Store] in a file.
type Store struct {
	db     *bolt.DB
	path   string
	file   os.FileInfo
	ops    chan *op
	done   chan struct{}
	closer func() error
	most   uint64               // Options.MaxUnwritten
	end    func(*bolt.Tx) error // (*bolt.Tx).Commit, except in tests
	calls  calls.Calls

	mu         sync.RWMutex
	failed     error  // of a commit with an unknown outcome; all later calls return it
	committing *batch // being committed; may be nil
	last       int    // id of the last committed transaction
}

var (
	_ resource.Overwriter  = (*Store)(nil)
	_ resource.FenceSetter = (*Store)(nil)
)

// Open opens or creates the file at path, for one process at a time. opts may be nil.
func Open(path string, opts *Options) (*Store, error) {
	return open(path, opts, (*bolt.DB).Sync, (*os.File).Sync)
}

func open(path string, opts *Options, syncFile func(*bolt.DB) error, syncDir func(*os.File) error) (*Store, error) {
	if opts == nil {
		opts = &Options{}
	}
	timeout := cmp.Or(opts.LockTimeout, time.Second)
	path, err := filepath.Abs(path) // checkFile looks there, even after a Chdir
	if err != nil {
		return nil, fmt.Errorf("boltstore: %w", err)
	}
	db, f, err := openFile(path, timeout)
	switch {
	case errors.Is(err, berrors.ErrTimeout):
		return nil, fmt.Errorf("boltstore: %s is locked by another process (waited %v): stop that process, or choose another file: %w",
			path, timeout, err)
	case errors.Is(err, berrors.ErrInvalid), errors.Is(err, berrors.ErrVersionMismatch), errors.Is(err, berrors.ErrChecksum):
		return nil, fmt.Errorf("boltstore: %s is damaged, or not a store's file: restore it, or choose another file: %w", path, err)
	case errors.Is(err, errDamaged):
		return nil, err
	case err != nil:
		return nil, fmt.Errorf("boltstore: %w", err)
	}
	last, err := prepare(db, f, syncFile, syncDir)
	if err != nil {
		if !errors.Is(err, errDamaged) {
			err = fmt.Errorf("boltstore: %s: %w", path, err)
		}
		return nil, errors.Join(err, db.Close())
	}
	file, err := f.Stat() // not the path's: it may have been replaced while bbolt waited for the lock
	if err != nil {
		return nil, errors.Join(fmt.Errorf("boltstore: %w", err), db.Close())
	}
	s := &Store{
		db: db, path: path, file: file, ops: make(chan *op, maxBatchOps), done: make(chan struct{}),
		most: cmp.Or(opts.MaxUnwritten, 1<<20), end: (*bolt.Tx).Commit, last: last,
	}
	if err := s.checkFile(errUndone); err != nil {
		return nil, errors.Join(err, db.Close())
	}
	s.closer = sync.OnceValue(s.close)
	go s.commitLoop()
	return s, nil
}

func openFile(path string, timeout time.Duration) (db *bolt.DB, f *os.File, err error) {
	defer func() {
		if db == nil && f != nil { // after a panic f is open and mapped
			unlockFile(f)
			_ = f.Close()
		}
	}()
	defer undamaged(path, &err)()
	db, err = bolt.Open(path, 0o600, &bolt.Options{
		Timeout: timeout, FreelistType: bolt.FreelistMapType,
		OpenFile: func(name string, flag int, perm os.FileMode) (_ *os.File, err error) {
			f, err = os.OpenFile(name, flag, perm)
			return f, err
		},
	})
	return db, f, err
}

var errDamaged = errors.New("is damaged: restore it, or choose another file")

// undamaged turns a panic or memory fault of bbolt, which trusts the contents of pages, into an error.
func undamaged(path string, err *error) func() {
	before := debug.SetPanicOnFault(true)
	return func() {
		debug.SetPanicOnFault(before)
		if p := recover(); p != nil {
			*err = fmt.Errorf("boltstore: %s %w: %v", path, errDamaged, p)
		}
	}
}

// prepare syncs file and directory, creates the bucket and returns the last transaction's id. After a crash or a failed sync, the
// page cache may show a commit that isn't on disk. It must be synced before the next write, because bbolt reuses the pages of the
// previous commit, which may be the last on disk. Only the meta pages can be missing: a commit syncs all others first. They are
// written again, because after a failed sync Linux takes a page for clean, and the next sync succeeds without writing it.
func prepare(db *bolt.DB, f *os.File, syncFile func(*bolt.DB) error, syncDir func(*os.File) error) (last int, err error) {
	defer undamaged(db.Path(), &err)()
	metas := make([]byte, 2*db.Info().PageSize)
	if _, err := f.ReadAt(metas, 0); err != nil {
		return 0, err
	}
	if _, err := f.WriteAt(metas, 0); err != nil {
		return 0, err
	}
	if err := syncFile(db); err != nil {
		return 0, err
	}
	var ready bool
	err = db.View(func(tx *bolt.Tx) error {
		last, ready = tx.ID(), tx.Bucket(bucket) != nil
		if !ready && tx.ID() > 1 { // a new file's id is 1
			return fmt.Errorf("boltstore: %s %w: it is in use and has no bucket %s", db.Path(), errDamaged, bucket)
		}
		return nil
	})
	if err == nil && !ready { // write only if needed: a file on a full disk must open
		err = db.Update(func(tx *bolt.Tx) error {
			last = tx.ID()
			_, err := tx.CreateBucket(bucket)
			return err
		})
	}
	if err != nil {
		return 0, err
	}
	path, err := filepath.EvalSymlinks(db.Path()) // the path may be a link
	if errors.Is(err, os.ErrNotExist) {
		return last, nil // checkFile returns an error
	}
	if err != nil {
		return 0, err
	}
	dir, err := os.Open(filepath.Dir(path))
	if err != nil {
		return 0, err
	}
	return last, errors.Join(syncDir(dir), dir.Close())
}

// Write is [resource.Store.Write]. If ctx ends meanwhile, the write may still take effect.
func (s *Store) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	_, err := s.do(ctx, &op{kind: write, key: key, fence: f, value: value}, resource.CheckFence(f))
	return err
}

// Overwrite is [resource.Overwriter.Overwrite].
func (s *Store) Overwrite(ctx context.Context, key string, f resource.Fence, value []byte) error {
	_, err := s.do(ctx, &op{kind: overwrite, key: key, fence: f, value: value}, resource.CheckOffered(f))
	return err
}

// ReadFenced is [resource.Store.ReadFenced].
func (s *Store) ReadFenced(ctx context.Context, key string, f resource.Fence) (resource.Record, error) {
	return s.do(ctx, &op{kind: readFenced, key: key, fence: f}, resource.CheckToken(f.Token))
}

// SetFence is [resource.FenceSetter.SetFence].
func (s *Store) SetFence(ctx context.Context, key string, token uint64) error {
	_, err := s.do(ctx, &op{kind: setFence, key: key, fence: resource.Fence{Token: token}}, resource.CheckToken(token))
	return err
}

// Read is [resource.Store.Read]. It waits for the disk only if the key is being changed.
func (s *Store) Read(ctx context.Context, key string) (_ resource.Record, err error) {
	if err := s.calls.Begin(ctx, key); err != nil {
		return resource.Record{}, err
	}
	defer s.calls.End()
	s.mu.RLock()
	for b := s.committing; b != nil && b.changes(key); b = s.committing {
		s.mu.RUnlock()
		if rec, err := b.wait(ctx, key); !errors.Is(err, errUndone) {
			return rec, err
		}
		s.mu.RLock()
	}
	if s.failed != nil {
		defer s.mu.RUnlock()
		return resource.Record{}, s.failed
	}
	// bbolt shows a commit to new transactions before syncing it. This one begins while no commit changes key.
	tx, err := s.begin(false)
	s.mu.RUnlock()
	if err != nil {
		return resource.Record{}, err
	}
	defer func() { _ = tx.Rollback() }()
	if err := s.checkFile(errUndone); err != nil {
		return resource.Record{}, err
	}
	defer undamaged(s.path, &err)()
	rec, found, err := s.load(tx, key)
	if err == nil && !found {
		err = resource.ErrNotFound
	}
	rec.Value = bytes.Clone(rec.Value)
	return rec, err
}

// Keys returns all keys in order, also those that only fenced reads have touched. It may or may not have the key of a write that is
// under way.
func (s *Store) Keys(ctx context.Context) (keys []string, err error) {
	if err := s.calls.Begin(ctx, "all"); err != nil {
		return nil, err
	}
	defer s.calls.End()
	s.mu.RLock()
	if s.failed != nil {
		defer s.mu.RUnlock()
		return nil, s.failed
	}
	tx, err := s.begin(false)
	s.mu.RUnlock()
	if err != nil {
		return nil, err
	}
	defer func() { _ = tx.Rollback() }()
	if err := s.checkFile(errUndone); err != nil {
		return nil, err
	}
	defer undamaged(s.path, &err)()
	err = tx.Bucket(bucket).ForEach(func(k, _ []byte) error {
		keys = append(keys, string(k))
		return nil
	})
	return keys, err
}

// Close is [resource.Store.Close].
func (s *Store) Close() error { return s.closer() }

func (s *Store) close() error {
	s.calls.Close()
	close(s.ops)
	<-s.done
	if err := s.db.Close(); err != nil {
		return fmt.Errorf("boltstore: %s: %w", s.path, err)
	}
	return nil
}

// checkFile returns an error that wraps outcome unless path is still the open file's.
func (s *Store) checkFile(outcome error) error {
	there, err := isAt(s.file, s.path)
	if errors.Is(err, os.ErrNotExist) || err == nil && !there {
		return fmt.Errorf("boltstore: %s: %w: the file was removed or replaced while it was open: stop this process and restore it", s.path, outcome)
	}
	return nil // another error doesn't mean that the file is gone
}

func isAtByStat(file os.FileInfo, path string) (bool, error) {
	now, err := os.Stat(path)
	return err == nil && os.SameFile(file, now), err
}

// begin begins a transaction. If the file's last one isn't the store's last, a file was copied over the open one. Callers other
// than commitLoop hold s.mu.
func (s *Store) begin(writable bool) (tx *bolt.Tx, err error) {
	defer undamaged(s.path, &err)()
	defer func() {
		if tx == nil && err == nil { // a panic
			unlock(s.db, writable)
		}
	}()
	if tx, err = s.db.Begin(writable); err != nil {
		return nil, fmt.Errorf("boltstore: %s: %w", s.path, err)
	}
	before := tx.ID()
	if writable {
		before--
	}
	if before != s.last && (s.committing == nil || before != s.last+1) {
		return nil, errors.Join(fmt.Errorf("boltstore: %s: a file was copied over it while it was open: stop this process and restore it", s.path), tx.Rollback())
	}
	return tx, nil
}

// unlock releases the locks that db.Begin keeps when it panics, or later calls and Close would hang. bbolt has no API for it.
func unlock(db *bolt.DB, writable bool) {
	field := func(name string) reflect.Value { return reflect.ValueOf(db).Elem().FieldByName(name).Addr() }
	if writable {
		(*sync.Mutex)(field("rwlock").UnsafePointer()).Unlock()
		return
	}
	(*sync.RWMutex)(field("mmaplock").UnsafePointer()).RUnlock()
	(*sync.Mutex)(field("metalock").UnsafePointer()).Unlock()
}

// load returns key's record; its Value is valid until tx ends. A damaged key can hide its record, or lead bbolt's binary search
// to another page. But if the search misses a stored key, one of the two records where it ends is damaged, or the two aren't on
// both sides of the key.
func (s *Store) load(tx *bolt.Tx, key string) (rec resource.Record, found bool, err error) {
	c := tx.Bucket(bucket).Cursor()
	k, v := c.Seek([]byte(key))
	if string(k) == key {
		if rec, err = decode(key, v); err != nil {
			return resource.Record{}, false, fmt.Errorf("boltstore: %s: the record of %q is damaged: restore the file: %w", s.path, key, err)
		}
		return rec, true, nil
	}
	for _, side := range []int{1, -1} {
		if side < 0 {
			k, v = c.Prev()
		}
		if k == nil {
			continue
		}
		_, err := decode(string(k), v)
		if err == nil && strings.Compare(string(k), key) != side {
			err = errors.New("it is out of order")
		}
		if err != nil {
			return resource.Record{}, false, fmt.Errorf("boltstore: %s: there is no record of %q, and its neighbor %.100q is damaged: restore the file: %w",
				s.path, key, k, err)
		}
	}
	return resource.Record{}, false, nil
}
