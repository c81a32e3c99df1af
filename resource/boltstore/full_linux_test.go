package boltstore_test

import (
	"context"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/boltstore"
)

// TestCommitFails has a disk that is full. No call of the batch may be told that it succeeded, nor any later one, and
// the file still has what was accepted before.
func TestCommitFails(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resource.db")
	s, err := boltstore.Open(path, nil)
	require.NoError(t, err)
	ctx := t.Context()
	require.NoError(t, s.Write(ctx, "k", at(5), []byte("before")))
	fillDisk(t, path)
	_, errs := s.Batch(
		boltstore.WriteOp("k", at(7), []byte("lost")),
		boltstore.ReadFencedOp("k", 9),
		boltstore.WriteOp("k", at(8), []byte("refused")), // because of what is lost
		boltstore.ReadFencedOp("other", 1),
	).Wait()
	const want = "a commit failed; nothing is answered until the file is opened again"
	for i, err := range errs {
		require.ErrorContains(t, err, want, "call %d", i)
	}
	_, err = s.Read(ctx, "k")
	require.ErrorContains(t, err, want)
	require.ErrorContains(t, s.Write(ctx, "k", at(4), nil), want, "a refusal too would be an answer")
	require.NoError(t, s.Close())
	require.ErrorIs(t, s.Write(ctx, "k", at(9), nil), resource.ErrClosed)

	rec, err := open(t, path).Read(ctx, "k")
	require.NoError(t, err)
	require.Equal(t, resource.Record{Value: []byte("before"), MaxFence: at(5)}, rec)
}

// A value of more than a record takes is refused, and no other call suffers. The value is memory that nobody touches, and
// so costs none.
func TestTooLarge(t *testing.T) {
	huge, err := syscall.Mmap(-1, 0, boltstore.MaxValue+1, syscall.PROT_READ, syscall.MAP_ANON|syscall.MAP_PRIVATE|syscall.MAP_NORESERVE)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, syscall.Munmap(huge)) })
	s := open(t, filepath.Join(t.TempDir(), "resource.db"))
	for _, write := range []func(context.Context, string, resource.Fence, []byte) error{s.Write, s.Overwrite} {
		err := write(t.Context(), "k", at(1), huge)
		require.ErrorIs(t, err, resource.ErrTooLarge)
		require.ErrorContains(t, err, `that of "k" has 67107841 bytes, at most 67107840 fit into a record`)
	}
	require.NoError(t, s.Write(t.Context(), "k", at(1), []byte("v")))
}

// fillDisk makes every later write to the open file at path fail as on a full disk.
func fillDisk(t *testing.T, path string) {
	t.Helper()
	full, err := os.OpenFile("/dev/full", os.O_RDWR, 0)
	require.NoError(t, err)
	fds, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	found := false
	for _, fd := range fds {
		if target, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && target == path {
			n, err := strconv.Atoi(fd.Name())
			require.NoError(t, err)
			require.NoError(t, syscall.Dup3(int(full.Fd()), n, syscall.O_CLOEXEC))
			found = true
		}
	}
	require.True(t, found, "%s is not open", path)
	require.NoError(t, full.Close())
}
