package boltstore_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/boltstore"
)

func TestDiskFull(t *testing.T) {
	path := newPath(t)
	s := open(t, path)
	ctx := t.Context()
	require.NoError(t, s.Write(ctx, "k", at(4), make([]byte, 64<<10))) // its pages are free after the next write
	require.NoError(t, s.Write(ctx, "k", at(5), []byte("before")))
	require.NoError(t, s.Write(ctx, "still", at(5), []byte("before")))
	before := resource.Record{Value: []byte("before"), MaxFence: at(5)}
	makeRoom := fillDisk(t, path)
	for range 3 {
		recs, errs := s.Batch(
			boltstore.WriteOp("k", at(7), []byte("lost")),
			boltstore.ReadFencedOp("k", 9),
			boltstore.WriteOp("k", at(8), []byte("refused")), // because of the write that is lost
			boltstore.ReadFencedOp("other", 1),
			boltstore.WriteOp("still", at(4), nil),
			boltstore.ReadFencedOp("still", 5),
		).Wait()
		for i, err := range errs[:4] {
			require.ErrorIs(t, err, resource.ErrNoRoom, "call %d", i)
			require.ErrorIs(t, err, syscall.ENOSPC, "call %d", i)
			require.ErrorContains(t, err, path+": nothing was changed: ", "call %d", i)
		}
		require.Equal(t, &resource.StaleTokenError{Key: "still", Seen: at(5), Got: at(4)}, errs[4])
		require.NoError(t, errs[5])
		require.Equal(t, before, recs[5])
		for _, key := range []string{"k", "still"} {
			rec, err := s.Read(ctx, key)
			require.NoError(t, err)
			require.Equal(t, before, rec)
		}
		_, err := s.Read(ctx, "other")
		require.ErrorIs(t, err, resource.ErrNotFound)
		require.ErrorContains(t, s.Write(ctx, "large", at(1), make([]byte, 1<<20)), "nothing was changed", "the file doesn't get larger either")
	}
	makeRoom()
	for token := range uint64(20) {
		require.NoError(t, s.Write(ctx, "k", at(6+token), make([]byte, token<<10)))
	}
	require.NoError(t, s.Write(ctx, "large", at(1), make([]byte, 1<<20)))
	require.NoError(t, s.CheckFile())
	commits, err := s.Commits()
	require.NoError(t, err)
	require.Error(t, s.Write(ctx, "k", at(4), nil))
	_, err = s.ReadFenced(ctx, "k", resource.Fence{Token: 25})
	require.NoError(t, err)
	require.NoError(t, s.Close())

	s = open(t, path)
	after, err := s.Commits()
	require.NoError(t, err)
	require.Equal(t, commits, after, "commits that a refusal, a repeated read and Open need: none, so that they work on a full disk")
	rec, err := s.Read(ctx, "k")
	require.NoError(t, err)
	require.Equal(t, resource.Record{Value: make([]byte, 19<<10), MaxFence: at(25)}, rec)
}

func TestReadWhileUndone(t *testing.T) {
	grow := fmt.Errorf("file resize error: %s", syscall.ENOSPC) //nolint:errorlint // as bbolt has it
	for reason, noRoom := range map[error]bool{syscall.EDQUOT: true, grow: true, syscall.EIO: false} {
		synctest.Test(t, func(t *testing.T) {
			s := open(t, newPath(t))
			require.NoError(t, s.Write(t.Context(), "k", at(5), []byte("before")))
			fail := make(chan error)
			s.OnCommit(func(func() error) error { return <-fail })
			pending := s.Batch(boltstore.WriteOp("k", at(7), nil))
			synctest.Wait()
			var rec resource.Record
			var err error
			read := make(chan struct{})
			go func() {
				defer close(read)
				rec, err = s.Read(t.Context(), "k")
			}()
			synctest.Wait()
			fail <- reason
			<-read
			require.NoError(t, err)
			require.Equal(t, resource.Record{Value: []byte("before"), MaxFence: at(5)}, rec)
			_, errs := pending.Wait()
			require.ErrorIs(t, errs[0], reason)
			require.Equal(t, noRoom, errors.Is(errs[0], resource.ErrNoRoom), "%v", reason)
		})
	}
}

// A commit that is undone is followed by one that isn't synced yet: reads that waited for the first must wait for it, too.
func TestReadWhileUndoneAndNext(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1)) // the commit's goroutine reaches the next commit before they go on
	synctest.Test(t, func(t *testing.T) {
		s := open(t, newPath(t))
		require.NoError(t, s.Write(t.Context(), "k", at(5), nil))
		fail, synced := make(chan error), make(chan error)
		s.OnCommit(func(func() error) error {
			s.OnCommit(func(commit func() error) error { return errors.Join(commit(), <-synced) })
			return <-fail
		})
		results := make(chan error, 2)
		for _, token := range []uint64{7, 9} {
			go func() { results <- s.Write(t.Context(), "k", at(token), nil) }()
			synctest.Wait()
		}
		const readers = 100
		read := make(chan resource.Fence, readers)
		for range readers {
			go func() {
				rec, err := s.Read(t.Context(), "k")
				if err == nil {
					read <- rec.MaxFence
				}
			}()
		}
		synctest.Wait()
		fail <- syscall.ENOSPC
		synctest.Wait()
		early := len(read)
		for range early {
			require.Equal(t, at(5), <-read)
		}
		synced <- nil
		require.ErrorIs(t, <-results, syscall.ENOSPC)
		require.NoError(t, <-results)
		for range readers - early {
			require.Equal(t, at(9), <-read)
		}
	})
}

// The last sync of the commit fails.
func TestCommitUncertain(t *testing.T) {
	path := newPath(t)
	s := open(t, path)
	ctx := t.Context()
	require.NoError(t, s.Write(ctx, "k", at(5), []byte("before")))
	s.OnCommit(func(commit func() error) error { return errors.Join(commit(), errors.New("sync failed")) })
	const want = "a commit failed; all calls fail until the file is opened again"
	err := s.Write(ctx, "k", at(7), []byte("lost"))
	require.ErrorContains(t, err, want)
	require.NotErrorIs(t, err, resource.ErrNoRoom)
	_, err = s.Read(ctx, "k")
	require.ErrorContains(t, err, want)
	require.ErrorContains(t, s.Write(ctx, "k", at(4), nil), want, "a refusal too would be an answer")
	require.NoError(t, s.Close())
	require.ErrorIs(t, s.Write(ctx, "k", at(9), nil), resource.ErrClosed)
}

// The value is mapped and never touched, so it takes no memory.
func TestTooLarge(t *testing.T) {
	huge, err := syscall.Mmap(-1, 0, boltstore.MaxValue+1, syscall.PROT_READ, syscall.MAP_ANON|syscall.MAP_PRIVATE|syscall.MAP_NORESERVE)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, syscall.Munmap(huge)) })
	s := open(t, newPath(t))
	for _, write := range []func(context.Context, string, resource.Fence, []byte) error{s.Write, s.Overwrite} {
		err := write(t.Context(), "k", at(1), huge)
		require.ErrorIs(t, err, resource.ErrTooLarge)
		require.ErrorContains(t, err, `that of "k" has 67107841 bytes, at most 67107840 fit into a record`)
	}
	require.NoError(t, s.Write(t.Context(), "k", at(1), []byte("v")))
	require.NoError(t, s.Close())
	require.ErrorIs(t, s.Write(t.Context(), "k", at(1), huge[1:]), resource.ErrClosed)
}

func fillDisk(t *testing.T, path string) (makeRoom func()) {
	t.Helper()
	full, err := os.OpenFile("/dev/full", os.O_RDWR, 0)
	require.NoError(t, err)
	open := descriptors(t, path)
	require.Len(t, open, 1)
	kept, err := syscall.Dup(open[0])
	require.NoError(t, err)
	require.NoError(t, syscall.Dup3(int(full.Fd()), open[0], syscall.O_CLOEXEC))
	require.NoError(t, full.Close())
	return func() {
		require.NoError(t, syscall.Dup3(kept, open[0], syscall.O_CLOEXEC))
		require.NoError(t, syscall.Close(kept))
	}
}

func descriptors(t *testing.T, path string) (open []int) {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	for _, fd := range fds {
		if target, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && target == path {
			n, err := strconv.Atoi(fd.Name())
			require.NoError(t, err)
			open = append(open, n)
		}
	}
	return open
}

// The store must not use the new file.
func TestReplacedWhileOpening(t *testing.T) {
	path := newPath(t)
	first := open(t, path)
	opened := make(chan error)
	go func() {
		s, err := boltstore.Open(path, &boltstore.Options{LockTimeout: time.Hour})
		if err == nil {
			err = errors.Join(errors.New("it is open"), s.Close())
		}
		opened <- err
	}()
	for len(descriptors(t, path)) < 2 {
		time.Sleep(time.Millisecond)
	}
	require.NoError(t, os.Rename(path, path+".away"))
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	require.NoError(t, first.Close())
	require.ErrorContains(t, <-opened, "the file was removed or replaced while it was open")
	require.Empty(t, descriptors(t, path+".away"))
}
