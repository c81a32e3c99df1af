// Package filestore is a gatekeeper: a [resource.Store] of plain files, which can't compare a token themselves.
//
// A rename replaces whatever is there. A writer that compares its token with the file's first and renames then may be
// frozen in between, and its rename lands on its successor's file. So one process owns the directory, and all writers send
// it their tokens: between its look at a record and its rename nobody else can write. [resource.NewHandler] serves it.
//
// # What it rests on
//
// The gatekeeper too may be frozen between check and rename. That is harmless as long as nobody takes its place meanwhile,
// and a disaster if somebody does: the second one accepts a later token, and then the first one's rename lands. Hence the
// exclusion must not end by a timeout, as a lease does: [Open] takes flock(2) on the directory, which the kernel gives back
// when the process is gone, and not before. A frozen gatekeeper costs availability, not data; kill it, and start another.
//
// So this is for a file system of one machine. On a shared one, where the lock is a lease of a server's or none at all, use
// storage that compares in the step in which it writes, such as a conditional PUT (package s3store).
//
// Nor does flock keep out a program that doesn't ask for it: the directory must be writable to the gatekeeper alone. Delete
// a record's file, and its fence is forgotten.
//
// An answer waits for the disk, twice: for the file and for the directory. Writes go one after another. Package boltstore
// does the same with one file, and shares syncs among writers.
package filestore

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/fencelab/fencelab/resource"
)

// Store is a [resource.Store] in a directory: a file a key, whose name is the key's SHA-256 in hex. A file begins with a line of
// fence, state and key; the value is the rest. Its methods may be called concurrently.
type Store struct {
	root   *os.Root // the directory that is locked, whatever becomes of its name
	dir    *os.File // holds the lock
	rename func(from, to string) error
	sync   func(*os.File) error

	mu     sync.Mutex // held from the check to the rename
	closed bool
	failed error // a rename that may not be on disk; no call is answered from the files after it
}

var (
	_ resource.Store       = (*Store)(nil)
	_ resource.FenceSetter = (*Store)(nil)
)

// Open makes the calling process the gatekeeper of the directory at path, which must exist, until [Store.Close] or the
// process's end. It fails at once if there is a gatekeeper, be it frozen.
func Open(path string) (*Store, error) {
	root, err := os.OpenRoot(path)
	if err != nil {
		return nil, fmt.Errorf("filestore: %w", err)
	}
	dir, err := root.Open(".")
	if err != nil {
		return nil, errors.Join(fmt.Errorf("filestore: %w", err), root.Close())
	}
	if err := lock(dir); err != nil {
		return nil, errors.Join(fmt.Errorf("filestore: %s: %w", path, err), dir.Close(), root.Close())
	}
	return open(root, dir)
}

func open(root *os.Root, dir *os.File) (*Store, error) {
	// The last gatekeeper may have died before a rename, and left a file that nobody wants; or between a rename and its
	// sync, and the renamed file is visible, and must stay.
	left, err := fs.Glob(root.FS(), unfinished+"*")
	for _, file := range left {
		err = cmp.Or(err, root.Remove(file))
	}
	if err = cmp.Or(err, dir.Sync()); err != nil {
		return nil, errors.Join(fmt.Errorf("filestore: %w", err), dir.Close(), root.Close())
	}
	return &Store{root: root, dir: dir, rename: root.Rename, sync: (*os.File).Sync}, nil
}

// Write is [resource.Store.Write].
func (s *Store) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckFence(f)); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	rec, err := s.load(key)
	if err == nil {
		err = rec.CheckWrite(key, f, value)
	}
	if err != nil {
		return err
	}
	return s.replace(key, resource.Record{Value: append([]byte{}, value...), MaxFence: f})
}

// Read is [resource.Store.Read].
func (s *Store) Read(ctx context.Context, key string) (resource.Record, error) {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key)); err != nil {
		return resource.Record{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	rec, err := s.load(key)
	if err == nil && rec.MaxFence == (resource.Fence{}) {
		err = resource.ErrNotFound
	}
	return rec, err
}

// ReadFenced is [resource.Store.ReadFenced]. It waits for the disk like a write, because what it raises must survive.
func (s *Store) ReadFenced(ctx context.Context, key string, token uint64) (resource.Record, error) {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckToken(token)); err != nil {
		return resource.Record{}, err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	rec, err := s.load(key)
	if err == nil {
		err = rec.CheckRead(key, token)
	}
	if err != nil {
		return resource.Record{}, err
	}
	if raised := rec.MaxFence.Max(resource.Fence{Token: token}); raised != rec.MaxFence {
		rec.MaxFence = raised
		if err := s.replace(key, rec); err != nil {
			return resource.Record{}, err
		}
	}
	return rec, nil
}

// SetFence is [resource.FenceSetter.SetFence].
func (s *Store) SetFence(ctx context.Context, key string, token uint64) error {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), resource.CheckToken(token)); err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	rec, err := s.load(key)
	if err == nil && rec.MaxFence == (resource.Fence{}) {
		err = resource.ErrNotFound
	}
	if err != nil {
		return err
	}
	rec.MaxFence = resource.Fence{Token: token}
	return s.replace(key, rec)
}

// Close is [resource.Store.Close]. Another process may be the gatekeeper then.
func (s *Store) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	if err := errors.Join(s.root.Close(), s.dir.Close()); err != nil {
		return fmt.Errorf("filestore: %w", err)
	}
	return nil
}

// load returns key's record, the zero record if there is none. It is called under s.mu, as replace is.
func (s *Store) load(key string) (resource.Record, error) {
	switch {
	case s.closed:
		return resource.Record{}, resource.ErrClosed
	case s.failed != nil:
		return resource.Record{}, s.failed
	}
	b, err := s.root.ReadFile(file(key))
	if errors.Is(err, fs.ErrNotExist) {
		return resource.Record{}, nil
	}
	if err != nil {
		return resource.Record{}, fmt.Errorf("filestore: %w", err)
	}
	rec, err := decode(key, b)
	if err != nil {
		return resource.Record{}, fmt.Errorf("filestore: %s, the record of %q, is damaged: restore it: %w", filepath.Join(s.root.Name(), file(key)), key, err)
	}
	return rec, nil
}

// replace puts rec in the place of key's file. Value and fence are one file, because a rename replaces one.
func (s *Store) replace(key string, rec resource.Record) error {
	from := unfinished + rand.Text()
	err := s.create(from, encode(key, rec))
	if err == nil {
		err = s.rename(from, file(key))
	}
	if err != nil { // the record is as it was
		_ = s.root.Remove(from)
		return fmt.Errorf("filestore: %w", err)
	}
	if err := s.sync(s.dir); err != nil {
		s.failed = fmt.Errorf("filestore: %s: the last write may not be on disk: see to the disk, and open the store again: %w", s.root.Name(), err)
		return s.failed
	}
	return nil
}

// unfinished begins the names of files before their rename.
const unfinished = "new-"

// create writes b to a new file, and to the disk.
func (s *Store) create(name string, b []byte) error {
	f, err := s.root.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err //nolint:wrapcheck // replace does
	}
	_, err = f.Write(b)
	if err == nil {
		err = s.sync(f)
	}
	return errors.Join(err, f.Close())
}

// file is the name of key's file. A key may be longer than a file's name, and have any character in it.
func file(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

// A record is a line and the value. The line has the fence, whether there is a value, and the key, which has no line end.
const (
	touched = "touched" // only by fenced reads
	written = "written"
)

func encode(key string, rec resource.Record) []byte {
	state := written
	if rec.Value == nil {
		state = touched
	}
	return fmt.Appendf(nil, "%v %s %s\n%s", rec.MaxFence, state, key, rec.Value)
}

func decode(key string, b []byte) (resource.Record, error) {
	line, value, ok := bytes.Cut(b, []byte("\n"))
	parts := bytes.SplitN(line, []byte(" "), 3)
	if !ok || len(parts) != 3 {
		return resource.Record{}, errors.New("it doesn't begin with a line of fence, state and key")
	}
	f, err := resource.ParseFence(string(parts[0]))
	if err == nil {
		err = resource.CheckToken(f.Token)
	}
	switch state := string(parts[1]); {
	case err != nil:
		return resource.Record{}, err
	case string(parts[2]) != key:
		return resource.Record{}, fmt.Errorf("it is of key %q", parts[2])
	case state == written:
		return resource.Record{Value: value, MaxFence: f}, nil
	case state == touched && len(value) == 0:
		return resource.Record{MaxFence: f}, nil
	}
	return resource.Record{}, fmt.Errorf("its state is %q, with %d bytes of value", parts[1], len(value))
}
