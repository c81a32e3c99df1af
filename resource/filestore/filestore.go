// Package filestore is a gatekeeper for plain files: a [resource.Store] in a directory. A writer that has compared tokens may be
// paused before its rename, and then replace its successor's file. So one process compares and renames, under a lock that doesn't
// time out. Other processes use it through [resource.NewHandler].
//
// It requires that
//   - the directory is on a local file system: on a shared one flock(2) may be a lease, or missing. To replace a frozen
//     gatekeeper, kill it;
//   - only the gatekeeper writes to the directory. Deleting a file deletes its fence.
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
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"syscall"

	"github.com/fencelab/fencelab/resource"
)

// Store is a [resource.Store] in a directory. A key's file is named by its SHA-256 in hex. Its first line has a checksum of all
// that follows, fence, state and key; the rest is the value.
type Store struct {
	root   *os.Root
	dir    *os.File // holds the lock
	rename func(from, to string) error
	sync   func(*os.File) error

	// busy is a mutex, full while locked, from a check to its rename. Callers of load and replace hold it. It guards what
	// follows.
	busy   chan struct{}
	closed bool
	failed error // of a rename that may not be on disk; all later calls return it
}

var (
	_ resource.Store       = (*Store)(nil)
	_ resource.FenceSetter = (*Store)(nil)
)

// Open makes this process the gatekeeper of the existing directory at path, until [Store.Close] or its end. It fails at once if
// there is another gatekeeper, even a frozen one.
func Open(path string) (*Store, error) {
	if path == "" { // not the working directory, where all keys would be new
		return nil, errors.New("filestore: the directory's path is empty")
	}
	path, err := filepath.Abs(path) // checkDir looks there, even after a Chdir
	if err != nil {
		return nil, fmt.Errorf("filestore: %w", err)
	}
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
	// The last gatekeeper may have died before a rename, or between it and the sync.
	left, err := fs.ReadDir(root.FS(), ".")
	for _, file := range left {
		if unfinishedFile.MatchString(file.Name()) && file.Type().IsRegular() {
			err = cmp.Or(err, root.Remove(file.Name()))
		}
	}
	if err = cmp.Or(err, dir.Sync()); err != nil {
		return nil, errors.Join(fmt.Errorf("filestore: %w", err), dir.Close(), root.Close())
	}
	return &Store{root: root, dir: dir, rename: root.Rename, sync: (*os.File).Sync, busy: make(chan struct{}, 1)}, nil
}

// Write is [resource.Store.Write].
func (s *Store) Write(ctx context.Context, key string, f resource.Fence, value []byte) error {
	_, err := s.change(ctx, key, resource.CheckFence(f), func(rec resource.Record) (resource.Record, error) {
		return resource.Record{Value: append([]byte{}, value...), MaxFence: f}, rec.CheckWrite(key, f, value)
	})
	return err
}

// Read is [resource.Store.Read].
func (s *Store) Read(ctx context.Context, key string) (resource.Record, error) {
	return s.change(ctx, key, nil, found)
}

// ReadFenced is [resource.Store.ReadFenced].
func (s *Store) ReadFenced(ctx context.Context, key string, f resource.Fence) (resource.Record, error) {
	return s.change(ctx, key, resource.CheckToken(f.Token), func(rec resource.Record) (resource.Record, error) {
		err := rec.CheckRead(key, f)
		rec.MaxFence = rec.MaxFence.Max(f)
		return rec, err
	})
}

// SetFence is [resource.FenceSetter.SetFence].
func (s *Store) SetFence(ctx context.Context, key string, token uint64) error {
	_, err := s.change(ctx, key, resource.CheckToken(token), func(rec resource.Record) (resource.Record, error) {
		rec, err := found(rec)
		rec.MaxFence = resource.Fence{Token: token}
		return rec, err
	})
	return err
}

func found(rec resource.Record) (resource.Record, error) {
	if rec.MaxFence == (resource.Fence{}) {
		return rec, resource.ErrNotFound
	}
	return rec, nil
}

// change replaces key's record by what next returns for it, if its fence differs, unless invalid or next has an error.
func (s *Store) change(ctx context.Context, key string, invalid error, next func(resource.Record) (resource.Record, error)) (resource.Record, error) {
	if err := cmp.Or(resource.CheckContext(ctx), resource.CheckKey(key), invalid); err != nil {
		return resource.Record{}, err
	}
	select {
	case s.busy <- struct{}{}:
		defer func() { <-s.busy }()
	case <-ctx.Done():
	}
	if err := resource.CheckContext(ctx); err != nil { // both may have been ready
		return resource.Record{}, err
	}
	before, err := s.load(key)
	if err != nil {
		return resource.Record{}, err
	}
	rec, err := next(before)
	if err == nil && rec.MaxFence != before.MaxFence {
		err = s.replace(key, rec)
	}
	if err != nil {
		return resource.Record{}, err
	}
	return rec, nil
}

// Close is [resource.Store.Close]. It lets another process be the gatekeeper.
func (s *Store) Close() error {
	s.busy <- struct{}{}
	defer func() { <-s.busy }()
	if s.closed {
		return nil
	}
	s.closed = true
	if err := errors.Join(s.root.Close(), s.dir.Close()); err != nil {
		return fmt.Errorf("filestore: %w", err)
	}
	return nil
}

func (s *Store) load(key string) (resource.Record, error) {
	switch {
	case s.closed:
		return resource.Record{}, resource.ErrClosed
	case s.failed != nil:
		return resource.Record{}, s.failed
	}
	if err := s.checkDir("nothing was changed"); err != nil {
		return resource.Record{}, err
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

func (s *Store) replace(key string, rec resource.Record) error {
	from := unfinished + rand.Text()
	err := s.create(from, encode(key, rec))
	if err == nil {
		err = s.rename(from, file(key))
	}
	if err != nil {
		_ = s.root.Remove(from)
		if errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) {
			err = fmt.Errorf("%w: %w", resource.ErrNoRoom, err)
		}
		return fmt.Errorf("filestore: %w", err)
	}
	if err := s.sync(s.dir); err != nil {
		s.failed = fmt.Errorf("filestore: %s: the last write may not be on disk: check the disk, then open the store again: %w", s.root.Name(), err)
		return s.failed
	}
	return s.checkDir("the last write may be lost") // an acknowledged write must be in the directory at the path
}

// checkDir returns an error if the directory no longer has its path: all keys would seem new.
func (s *Store) checkDir(outcome string) error {
	open, err := s.dir.Stat()
	if err != nil {
		return fmt.Errorf("filestore: %w", err)
	}
	now, err := os.Stat(s.root.Name())
	if errors.Is(err, fs.ErrNotExist) || err == nil && !os.SameFile(open, now) {
		return fmt.Errorf("filestore: %s: %s: the directory was removed, renamed or replaced while it was open: stop this process and restore it",
			s.root.Name(), outcome)
	}
	return nil // another error doesn't mean that the directory is gone
}

const unfinished = "new-" // begins the name of a file not renamed yet

var unfinishedFile = regexp.MustCompile("^" + unfinished + "[A-Z2-7]{26}$")

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

// file returns the name of key's file: a hash, because a key may be too long and have any character.
func file(key string) string {
	sum := sha256.Sum256([]byte(key))
	return hex.EncodeToString(sum[:])
}

const (
	touched = "touched"
	written = "written"
)

func encode(key string, rec resource.Record) []byte {
	state := written
	if rec.Value == nil {
		state = touched
	}
	b := fmt.Appendf(nil, "%v %s %s\n%s", rec.MaxFence, state, key, rec.Value)
	return fmt.Appendf(nil, "%s %s", checksum(b), b)
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

func checksum(b []byte) string { return fmt.Sprintf("%08x", crc32.Checksum(b, castagnoli)) }

func decode(key string, b []byte) (resource.Record, error) {
	sum, b, _ := bytes.Cut(b, []byte(" "))
	if string(sum) != checksum(b) {
		return resource.Record{}, errors.New("its checksum is wrong")
	}
	line, value, ok := bytes.Cut(b, []byte("\n"))
	parts := bytes.SplitN(line, []byte(" "), 3)
	if !ok || len(parts) != 3 {
		return resource.Record{}, errors.New("its first line does not have fence, state and key")
	}
	f, err := resource.ParseFence(string(parts[0]))
	if err == nil {
		err = resource.CheckToken(f.Token)
	}
	switch state := string(parts[1]); {
	case err != nil:
		return resource.Record{}, err
	case string(parts[2]) != key:
		return resource.Record{}, fmt.Errorf("it belongs to key %q", parts[2])
	case state == written:
		return resource.Record{Value: value, MaxFence: f}, nil
	case state == touched && len(value) == 0:
		return resource.Record{MaxFence: f}, nil
	}
	return resource.Record{}, fmt.Errorf("its state is %q, with %d bytes of value", parts[1], len(value))
}
