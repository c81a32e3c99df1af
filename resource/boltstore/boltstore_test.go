package boltstore_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	bolt "go.etcd.io/bbolt"
	"go.uber.org/goleak"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/boltstore"
	"github.com/fencelab/fencelab/resource/storetest"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestStore(t *testing.T) {
	var path string
	storetest.Run(t, storetest.Harness{
		New: func() (resource.Store, error) {
			path = filepath.Join(t.TempDir(), "resource.db")
			return boltstore.Open(path, nil)
		},
		Reopen: func(s resource.Store) (resource.Store, error) {
			if err := s.Close(); err != nil {
				return nil, err
			}
			return boltstore.Open(path, nil)
		},
	})
}

func open(t *testing.T, path string) *boltstore.Store {
	t.Helper()
	s, err := boltstore.Open(path, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func at(token uint64) resource.Fence { return resource.Fence{Token: token, Seq: 1} }

func TestOpenLockedFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resource.db")
	open(t, path)
	_, err := boltstore.Open(path, &boltstore.Options{LockTimeout: time.Millisecond})
	require.ErrorContains(t, err, path+" is locked by another process (waited 1ms): stop that process, or choose another file")
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "notes.txt")
	require.NoError(t, os.WriteFile(path, make([]byte, 1<<16), 0o600))
	_, err := boltstore.Open(path, nil)
	require.ErrorContains(t, err, "notes.txt is not a store's file, or is damaged")
	_, err = boltstore.Open(filepath.Join(dir, "no", "such", "directory"), nil)
	require.ErrorIs(t, err, os.ErrNotExist)
}

// TestDamagedRecord has one record that isn't one. Its key is refused, because nobody knows its fence any more; the others work.
func TestDamagedRecord(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resource.db")
	db, err := bolt.Open(path, 0o600, nil)
	require.NoError(t, err)
	require.NoError(t, db.Update(func(tx *bolt.Tx) error {
		b, err := tx.CreateBucket(boltstore.Bucket)
		if err != nil {
			return err
		}
		return b.Put([]byte("bad"), []byte("short"))
	}))
	require.NoError(t, db.Close())

	s, ctx := open(t, path), t.Context()
	const want = `the record of "bad" is damaged: it has 5 bytes`
	_, err = s.Read(ctx, "bad")
	require.ErrorContains(t, err, want)
	_, err = s.ReadFenced(ctx, "bad", 9)
	require.ErrorContains(t, err, want)
	require.ErrorContains(t, s.Write(ctx, "bad", at(9), nil), want)
	require.NoError(t, s.Write(ctx, "good", at(9), nil))
}

// batch makes s take all calls as one batch: they queue up behind one that waits. Each is told its index; between runs
// once they wait.
func batch(t *testing.T, s *boltstore.Store, calls int, call func(i int), between func()) {
	t.Helper()
	resume, err := s.Pause()
	require.NoError(t, err)
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := s.ReadFenced(t.Context(), "first", 1); err != nil { // changes nothing, and so has no commit
			t.Error(err)
		}
	})
	for i := range calls {
		wg.Go(func() { call(i) })
	}
	for s.Queued() < calls { // the committer has one of the 1+calls operations in its hand
		runtime.Gosched()
	}
	between()
	require.NoError(t, resume())
	wg.Wait()
}

// TestGroupCommit checks that what waits together is committed together.
func TestGroupCommit(t *testing.T) {
	s, ctx := open(t, filepath.Join(t.TempDir(), "resource.db")), t.Context()
	before, err := s.Commits()
	require.NoError(t, err)
	batch(t, s, 50, func(i int) {
		if err := s.Write(ctx, "k"+strconv.Itoa(i), at(1), nil); err != nil {
			t.Error(err)
		}
	}, func() {})
	after, err := s.Commits()
	require.NoError(t, err)
	require.LessOrEqual(t, after-before, 2, "commits of 51 operations")
}

// TestCloseFinishesCalls closes the store under load: every call is either answered for good or told ErrClosed, and
// what was accepted is there afterwards.
func TestCloseFinishesCalls(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resource.db")
	s, err := boltstore.Open(path, nil)
	require.NoError(t, err)
	ctx := t.Context()
	const writers = 16
	var wg sync.WaitGroup
	accepted := make([]uint64, writers)
	some := make(chan struct{}, writers)
	for i := range writers {
		wg.Go(func() {
			for token := uint64(1); ; token++ {
				if err := s.Write(ctx, strconv.Itoa(i), at(token), nil); err != nil {
					if !errors.Is(err, resource.ErrClosed) {
						t.Errorf("writer %d: got %v, want %v", i, err, resource.ErrClosed)
					}
					return
				}
				accepted[i] = token
				if token == 3 {
					some <- struct{}{}
				}
			}
		})
	}
	for range writers {
		<-some
	}
	require.NoError(t, s.Close())
	wg.Wait()
	again := open(t, path)
	for i, token := range accepted {
		rec, err := again.Read(ctx, strconv.Itoa(i))
		require.NoError(t, err)
		require.Equal(t, at(token), rec.MaxFence, "writer %d", i)
	}
}

// TestManyKeys makes the file grow far beyond its first size while readers are about.
func TestManyKeys(t *testing.T) {
	s, ctx := open(t, filepath.Join(t.TempDir(), "resource.db")), t.Context()
	const writers, keys = 8, 40
	value := make([]byte, 64<<10)
	var wg sync.WaitGroup
	for w := range writers {
		wg.Go(func() {
			for i := range keys {
				key := fmt.Sprintf("%d/%d", w, i)
				if err := s.Write(ctx, key, at(uint64(i+1)), value); err != nil {
					t.Errorf("Write of %s: %v", key, err)
				}
				if rec, err := s.Read(ctx, key); err != nil || rec.MaxFence != at(uint64(i+1)) || len(rec.Value) != len(value) {
					t.Errorf("Read of %s: got %d bytes at %v, %v", key, len(rec.Value), rec.MaxFence, err)
				}
			}
		})
	}
	wg.Wait()
}
