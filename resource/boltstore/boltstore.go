// Package boltstore is the durable [resource.Store]: one bbolt file, and no answer before what it says is on disk.
//
// Writes are committed in groups. One goroutine takes all operations that wait, decides them in order in one
// transaction, syncs the file and then answers them all. There is no timer: a single writer waits for nothing but the
// disk, and a hundred writers share its syncs.
package boltstore

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"sync"
	"time"

	bolt "go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"

	"github.com/fencelab/fencelab/resource"
)

// bucket holds a record a key. The name carries the version of the encoding.
var bucket = []byte("records.v1")

// MaxValue is the largest value in bytes, just under 64 MiB. bbolt takes larger ones, but keeps up to four records on one
// page whatever their sizes, and panics when a page has more than it can address: 2 GiB, on 32-bit machines 256 MiB.
const MaxValue = 64<<20 - 1<<10

// Options are the optional settings of [Open]. The zero value is ready for use.
type Options struct {
	// LockTimeout is how long Open waits for another process that has the file open; 1 s if zero.
	LockTimeout time.Duration
	// MaxUnwritten is how many keys there may be that only fenced reads have touched, 1<<20 if zero: one more is refused with
	// [resource.ErrNoRoom], so that reads can't fill a disk. A write doesn't count, and takes its key out of the count.
	MaxUnwritten uint64
}

// Store is a [resource.Store] in a file. Its methods may be called concurrently.
type Store struct {
	db     *bolt.DB
	path   string
	file   os.FileInfo // of the file that is open
	ops    chan *op
	done   chan struct{} // closed when the committer has ended
	closer func() error
	most   uint64               // Options.MaxUnwritten
	end    func(*bolt.Tx) error // (*bolt.Tx).Commit, but in tests

	mu         sync.RWMutex
	closed     bool
	failed     error          // the commit of which it isn't known what is left; no call is answered from the file after it
	committing *batch         // what is being made durable right now, nil between commits
	calls      sync.WaitGroup // calls in flight
}

var (
	_ resource.Overwriter  = (*Store)(nil)
	_ resource.FenceSetter = (*Store)(nil)
)

// Open opens the file at path, and creates it if there is none. A nil opts is the zero Options.
//
// The file belongs to one process at a time, by a lock that must not end before that process does: flock(2), which the kernel
// gives back when the process is gone. So this is for a file system of one machine. On a shared one, NFS for example, the
// lock is a lease of a server's or none at all, and a process that was frozen past it would write over its successor's file.
func Open(path string, opts *Options) (*Store, error) {
	if opts == nil {
		opts = &Options{}
	}
	timeout := cmp.Or(opts.LockTimeout, time.Second)
	db, err := openFile(path, timeout)
	switch {
	case errors.Is(err, berrors.ErrTimeout):
		return nil, fmt.Errorf("boltstore: %s is locked by another process (waited %v): stop that process, or choose another file: %w",
			path, timeout, err)
	case errors.Is(err, berrors.ErrInvalid), errors.Is(err, berrors.ErrVersionMismatch), errors.Is(err, berrors.ErrChecksum):
		return nil, fmt.Errorf("boltstore: %s is not a store's file, or is damaged: restore it, or choose another file: %w", path, err)
	case err != nil:
		return nil, fmt.Errorf("boltstore: %w", err)
	}
	if err := prepare(db); err != nil {
		if errors.Is(err, errDamaged) {
			return nil, errors.Join(fmt.Errorf("boltstore: %w", err), db.Close())
		}
		return nil, errors.Join(fmt.Errorf("boltstore: %s: %w", path, err), db.Close())
	}
	file, err := os.Stat(path)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("boltstore: %w", err), db.Close())
	}
	s := &Store{db: db, path: path, file: file, ops: make(chan *op, maxBatchOps), done: make(chan struct{}), most: cmp.Or(opts.MaxUnwritten, 1<<20), end: (*bolt.Tx).Commit}
	s.closer = sync.OnceValue(s.close)
	go s.commitLoop()
	return s, nil
}

func openFile(path string, timeout time.Duration) (_ *bolt.DB, err error) {
	defer undamaged(path, &err)()
	return bolt.Open(path, 0o600, &bolt.Options{Timeout: timeout, FreelistType: bolt.FreelistMapType})
}

var errDamaged = errors.New("is damaged: restore it, or choose another file")

// undamaged makes an error of a panic, or of a fault, in what its caller does with the file: bbolt follows what it finds on a
// page, wherever that leads.
func undamaged(path string, err *error) func() {
	before := debug.SetPanicOnFault(true)
	return func() {
		debug.SetPanicOnFault(before)
		if p := recover(); p != nil {
			*err = fmt.Errorf("boltstore: %s %w: %v", path, errDamaged, p)
		}
	}
}

// prepare makes all that the file holds durable, and creates the bucket. After a crash of the file's last owner the page
// cache may show a commit that never reached the disk. It must get there before anything is written: to bbolt the pages of
// the commit before it are free, and while that is the last one on the disk, a crash of the machine would find it written
// over. Of a new file the directory entry may be missing on the disk.
func prepare(db *bolt.DB) (err error) {
	defer undamaged(db.Path(), &err)()
	if err := db.Sync(); err != nil {
		return err
	}
	var ready bool
	err = db.View(func(tx *bolt.Tx) error {
		ready = tx.Bucket(bucket) != nil
		if !ready && tx.ID() > 1 { // of a new file it is 1
			return fmt.Errorf("%s %w: it is in use and has no bucket %s", db.Path(), errDamaged, bucket)
		}
		return nil
	})
	if err == nil && !ready { // else nothing is written, so that a file on a full disk can be opened
		err = db.Update(func(tx *bolt.Tx) error {
			_, err := tx.CreateBucket(bucket)
			return err
		})
	}
	if err != nil {
		return err
	}
	dir, err := os.Open(filepath.Dir(db.Path()))
	if err != nil {
		return err
	}
	return errors.Join(dir.Sync(), dir.Close())
}

// Write is [resource.Store.Write]. A value of more than [MaxValue] bytes is refused with [resource.ErrTooLarge]. If ctx
// ends while the write waits for the disk, Write returns ctx's cause and the write may still take effect.
func (s *Store) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckFence(f), checkSize(key, value)); err != nil {
		return err
	}
	_, err := s.do(ctx, &op{kind: write, key: key, fence: f, value: append([]byte{}, value...)})
	return err
}

// Overwrite is [resource.Overwriter.Overwrite].
func (s *Store) Overwrite(ctx context.Context, key string, f resource.Fence, value []byte) error {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckOffered(f), checkSize(key, value)); err != nil {
		return err
	}
	_, err := s.do(ctx, &op{kind: overwrite, key: key, fence: f, value: append([]byte{}, value...)})
	return err
}

// checkSize keeps a value that bbolt can't put on a page from failing the commit that it is in.
func checkSize(key string, value []byte) error {
	if len(value) <= MaxValue {
		return nil
	}
	return fmt.Errorf("%w: that of %q has %d bytes, at most %d fit into a record", resource.ErrTooLarge, key, len(value), MaxValue)
}

// ReadFenced is [resource.Store.ReadFenced]. It waits for the disk like a write, because what it raises must survive.
func (s *Store) ReadFenced(ctx context.Context, key string, token uint64) (resource.Record, error) {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckToken(token)); err != nil {
		return resource.Record{}, err
	}
	return s.do(ctx, &op{kind: readFenced, key: key, fence: resource.Fence{Token: token}})
}

// Read is [resource.Store.Read]. It waits for the disk only if the key is being changed.
func (s *Store) Read(ctx context.Context, key string) (_ resource.Record, err error) {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key)); err != nil {
		return resource.Record{}, err
	}
	s.mu.RLock()
	if err := s.enter(); err != nil {
		s.mu.RUnlock()
		return resource.Record{}, err
	}
	defer s.calls.Done()
	for b := s.committing; b != nil && b.changes(key); b = s.committing {
		s.mu.RUnlock()
		if rec, err := b.wait(ctx, key); !errors.Is(err, errUndone) {
			return rec, err
		}
		s.mu.RLock()
		if s.failed != nil {
			defer s.mu.RUnlock()
			return resource.Record{}, s.failed
		}
	}
	// bbolt shows a commit to new transactions before it has synced it. This one begins while no commit of key runs,
	// and a commit that begins later can't get into it.
	tx, err := s.db.Begin(false)
	s.mu.RUnlock()
	if err != nil {
		return resource.Record{}, fmt.Errorf("boltstore: %s: %w", s.path, err)
	}
	defer func() { _ = tx.Rollback() }() // ends a read transaction, and cannot fail
	if err := s.checkFile(); err != nil {
		return resource.Record{}, err
	}
	defer undamaged(s.path, &err)()
	rec, found, err := s.load(tx, key)
	if err != nil {
		return resource.Record{}, err
	}
	if !found {
		return resource.Record{}, resource.ErrNotFound
	}
	rec.Value = bytes.Clone(rec.Value)
	return rec, nil
}

// SetFence is [resource.FenceSetter.SetFence].
func (s *Store) SetFence(ctx context.Context, key string, token uint64) error {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckToken(token)); err != nil {
		return err
	}
	_, err := s.do(ctx, &op{kind: setFence, key: key, fence: resource.Fence{Token: token}})
	return err
}

// Close is [resource.Store.Close].
func (s *Store) Close() error { return s.closer() }

func (s *Store) close() error {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.calls.Wait()
	close(s.ops)
	<-s.done
	if err := s.db.Close(); err != nil {
		return fmt.Errorf("boltstore: %s: %w", s.path, err)
	}
	return nil
}

// enter counts a call in, or says why it can't be served. It is called under s.mu.
func (s *Store) enter() error {
	if s.closed {
		return resource.ErrClosed
	}
	if s.failed != nil {
		return s.failed
	}
	s.calls.Add(1)
	return nil
}

// checkFile returns an error if path isn't the file that is open: it is gone with this process then, and its fences.
func (s *Store) checkFile() error {
	now, err := os.Stat(s.path)
	if errors.Is(err, os.ErrNotExist) || err == nil && !os.SameFile(s.file, now) {
		return fmt.Errorf("boltstore: %s: %w: the file was removed or replaced while it is open: stop this process and restore it", s.path, errUndone)
	}
	return nil // that it can't be seen doesn't mean that it isn't there
}

// load returns key's record; its Value is valid until tx ends.
func (s *Store) load(tx *bolt.Tx, key string) (rec resource.Record, found bool, err error) {
	b := tx.Bucket(bucket).Get([]byte(key))
	if b == nil {
		return resource.Record{}, false, nil
	}
	if rec, err = decode(key, b); err != nil {
		return resource.Record{}, false, fmt.Errorf("boltstore: %s: the record of %q is damaged: restore the file: %w", s.path, key, err)
	}
	return rec, true, nil
}
