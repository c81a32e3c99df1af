package filestore_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/internal/proc"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/filestore"
	"github.com/fencelab/fencelab/resource/internal/eachcall"
	"github.com/fencelab/fencelab/resource/storetest"
)

// gatekeeper names a child process's directory.
const gatekeeper = "FENCELAB_TEST_GATEKEEPER"

func TestMain(m *testing.M) {
	if dir := os.Getenv(gatekeeper); dir != "" {
		if err := child(dir); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	testmain.Run(m)
}

// child writes with token 7. Before the rename it prints a line and waits for one.
func child(dir string) error {
	s, err := filestore.Open(dir)
	if err != nil {
		return err
	}
	s.BeforeRename(func() error {
		fmt.Println("checked")
		_, err := bufio.NewReader(os.Stdin).ReadString('\n')
		return err
	})
	return errors.Join(s.Write(context.Background(), "k", at(7), []byte("by 7")), s.Close())
}

func TestStore(t *testing.T) {
	var dir string
	storetest.Run(t, storetest.Harness{
		New: func() (resource.Store, error) {
			dir = t.TempDir()
			return filestore.Open(dir)
		},
		Reopen: func(s resource.Store) (resource.Store, error) {
			if err := s.Close(); err != nil {
				return nil, err
			}
			return filestore.Open(dir)
		},
	})
}

func at(token uint64) resource.Fence { return resource.Fence{Token: token, Seq: 1} }

func open(t *testing.T, with func(string) (*filestore.Store, error), dir string) *filestore.Store {
	t.Helper()
	s, err := with(dir)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func TestGatekeeper(t *testing.T) {
	s := open(t, filestore.Open, t.TempDir())
	checked, wake := make(chan struct{}), make(chan struct{})
	s.BeforeRename(func() error {
		checked <- struct{}{}
		<-wake
		return nil
	})
	write := func(token uint64) <-chan error {
		done := make(chan error, 1)
		go func() { done <- s.Write(t.Context(), "k", at(token), fmt.Appendf(nil, "by %d", token)) }()
		return done
	}
	seven := write(7)
	<-checked
	eight := write(8) // waits for the rename of 7
	wake <- struct{}{}
	require.NoError(t, <-seven)
	<-checked
	late := write(7) // waits for the rename of 8
	wake <- struct{}{}
	require.NoError(t, <-eight)
	stale, ok := errors.AsType[*resource.StaleTokenError](<-late)
	require.True(t, ok)
	require.Equal(t, at(8), stale.Seen)
	requireHolds(t, s, "by 8", 8)
}

func TestContextEndsInQueue(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := open(t, filestore.Open, t.TempDir())
		require.NoError(t, s.Write(t.Context(), "k", at(1), nil))
		proceed := make(chan struct{})
		s.BeforeRename(func() error {
			<-proceed
			return nil
		})
		slow := make(chan error, 1)
		go func() { slow <- s.Write(t.Context(), "slow", at(1), nil) }()
		synctest.Wait()
		for name, call := range eachcall.Of(s, "k", at(2)) {
			ctx, end := context.WithCancelCause(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- call(ctx) }()
			synctest.Wait()
			cause := errors.New("the cause")
			end(cause)
			require.ErrorIs(t, <-ended, cause, name)
		}
		close(proceed)
		require.NoError(t, <-slow)
		requireHolds(t, s, "", 1)
	})
}

func requireHolds(t *testing.T, s *filestore.Store, value string, token uint64) {
	t.Helper()
	rec, err := s.Read(t.Context(), "k")
	require.NoError(t, err)
	require.Equal(t, value, string(rec.Value))
	require.Equal(t, at(token), rec.MaxFence)
}

func TestFrozenGatekeeper(t *testing.T) {
	for name, end := range map[string]struct {
		how   func(t *testing.T, c *proc.Child, stdin io.Writer, wake faults.Heal)
		value string // found by the next gatekeeper
		token uint64
	}{
		"Killed": {func(t *testing.T, c *proc.Child, _ io.Writer, _ faults.Heal) {
			t.Helper()
			require.NoError(t, c.Kill())
		}, "by 6", 6},
		"Woken": {func(t *testing.T, c *proc.Child, stdin io.Writer, wake faults.Heal) {
			t.Helper()
			require.NoError(t, wake(t.Context()))
			_, err := io.WriteString(stdin, "\n")
			require.NoError(t, err)
			require.NoError(t, c.Wait())
		}, "by 7", 7},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			before, err := filestore.Open(dir)
			require.NoError(t, err)
			require.NoError(t, before.Write(t.Context(), "k", at(6), []byte("by 6")))
			require.NoError(t, before.Close())

			c, stdin := start(t, dir)
			wake, err := faults.Pause(t.Context(), c.PID)
			require.NoError(t, err)
			_, err = filestore.Open(dir)
			require.ErrorContains(t, err, dir+": another gatekeeper owns the directory; if it is frozen, kill it and open again")

			end.how(t, c, stdin, wake)
			s := open(t, filestore.Open, dir)
			requireHolds(t, s, end.value, end.token)
			require.NoError(t, s.Write(t.Context(), "k", at(8), []byte("by 8")))
			requireHolds(t, s, "by 8", 8)
			require.Len(t, files(t, dir), 1, "what the killed one left is gone")
		})
	}
}

func files(t *testing.T, dir string) []os.DirEntry {
	t.Helper()
	all, err := os.ReadDir(dir)
	require.NoError(t, err)
	return all
}

// start starts a gatekeeper that stops between check and rename.
func start(t *testing.T, dir string) (*proc.Child, io.Writer) {
	t.Helper()
	exe, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.CommandContext(context.Background(), exe)
	cmd.Env = append(os.Environ(), gatekeeper+"="+dir)
	cmd.Stderr = os.Stderr
	in, stdin, err := os.Pipe()
	require.NoError(t, err)
	t.Cleanup(func() { _ = stdin.Close() })
	stdout, out, err := os.Pipe()
	require.NoError(t, err)
	t.Cleanup(func() { _ = stdout.Close() })
	cmd.Stdin, cmd.Stdout = in, out
	c, err := proc.Start(cmd)
	require.NoError(t, errors.Join(err, in.Close(), out.Close()))
	t.Cleanup(func() { require.NoError(t, c.Kill()) })
	line, err := bufio.NewReader(stdout).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "checked\n", line)
	return c, stdin
}

func TestOpenRefuses(t *testing.T) {
	dir := t.TempDir()
	_, err := filestore.Open(filepath.Join(dir, "none"))
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = filestore.Open("")
	require.ErrorContains(t, err, "path is empty")
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	_, err = filestore.Open(file)
	require.ErrorContains(t, err, "not a directory")
	open(t, filestore.Open, dir)
	_, err = filestore.Open(dir)
	require.ErrorContains(t, err, "another gatekeeper")
}

func TestOpenRemoves(t *testing.T) {
	dir, left := t.TempDir(), "new-"+rand.Text()
	kept := []string{"my " + left, left + ".odt", "new-report.odt", "new-" + strings.Repeat("1", len(rand.Text()))}
	for _, name := range append(kept, left) {
		require.NoError(t, os.WriteFile(filepath.Join(dir, name), nil, 0o600))
	}
	for _, name := range []string{"new-x", "new-" + rand.Text()} {
		require.NoError(t, os.Mkdir(filepath.Join(dir, name), 0o700))
		kept = append(kept, name)
	}
	link := "new-" + rand.Text()
	require.NoError(t, os.Symlink("new-report.odt", filepath.Join(dir, link)))
	open(t, filestore.Open, dir)
	var found []string
	for _, file := range files(t, dir) {
		found = append(found, file.Name())
	}
	require.ElementsMatch(t, append(kept, link), found)
}

func TestSyncs(t *testing.T) {
	s := open(t, filestore.Open, t.TempDir())
	var did []string
	s.Watch(func(what string) { did = append(did, what) })
	require.NoError(t, s.Write(t.Context(), "k", at(7), []byte("by 7")))
	for range 2 {
		_, err := s.ReadFenced(t.Context(), "k", resource.Fence{Token: 8})
		require.NoError(t, err)
	}
	require.Equal(t, "8254c329a92850f6d539dd376f4816ee2764517da5e0235514af433164480d7a", filepath.Base(s.File("k")))
	require.Equal(t, []string{"sync 8aa8f142 7 written k\nby 7", "rename", "sync ", "sync 5d917dbf 8.0 written k\nby 7", "rename", "sync "}, did)
}

func TestFailsBeforeRename(t *testing.T) {
	broken := errors.New("input/output error")
	sync := func(err error) func(s *filestore.Store) (heal func()) {
		return func(s *filestore.Store) func() { s.FailSync(1, err); return func() {} }
	}
	for name, c := range map[string]struct {
		fail func(s *filestore.Store) (heal func())
		want error
	}{
		"write": {func(*filestore.Store) func() { return limitFiles(t, 1<<20) }, syscall.EFBIG},
		"sync":  {sync(broken), broken}, "no space": {sync(syscall.ENOSPC), resource.ErrNoRoom}, "over quota": {sync(syscall.EDQUOT), resource.ErrNoRoom},
		"rename": {func(s *filestore.Store) func() {
			s.BeforeRename(func() error { return broken })
			return func() { s.BeforeRename(func() error { return nil }) }
		}, broken},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			s := open(t, filestore.Open, dir)
			require.NoError(t, s.Write(t.Context(), "k", at(7), []byte("by 7")))
			if name != "write" { // a read's record is small
				heal := c.fail(s)
				_, err := s.ReadFenced(t.Context(), "k", at(8))
				heal()
				require.ErrorIs(t, err, c.want)
				requireHolds(t, s, "by 7", 7)
			}
			heal := c.fail(s)
			err := s.Write(t.Context(), "k", at(8), make([]byte, 2<<20))
			heal()
			require.ErrorIs(t, err, c.want)
			requireHolds(t, s, "by 7", 7)
			require.Len(t, files(t, dir), 1)
			require.NoError(t, s.Write(t.Context(), "k", at(8), []byte("by 8")))
			requireHolds(t, s, "by 8", 8)
		})
	}
}

func limitFiles(t *testing.T, size uint64) (heal func()) {
	t.Helper()
	signal.Ignore(syscall.SIGXFSZ)
	var before syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_FSIZE, &before))
	require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &syscall.Rlimit{Cur: size, Max: before.Max}))
	return func() {
		require.NoError(t, syscall.Setrlimit(syscall.RLIMIT_FSIZE, &before))
		signal.Reset(syscall.SIGXFSZ)
	}
}

// After the rename the outcome is unknown.
func TestDirectorySyncFails(t *testing.T) {
	broken := errors.New("input/output error")
	s := open(t, filestore.Open, t.TempDir())
	s.FailSync(2, broken)
	require.ErrorIs(t, s.Write(t.Context(), "k", at(8), []byte("by 8")), broken)
	for name, call := range eachcall.Of(s, "k", at(8)) {
		require.ErrorIs(t, call(t.Context()), broken, name)
	}
	require.NoError(t, s.Close())
	_, err := s.Read(t.Context(), "k")
	require.ErrorIs(t, err, resource.ErrClosed)
}

// The fence is lost.
func TestDamagedRecord(t *testing.T) {
	var records []string
	for _, b := range []string{"", "7", "7 written k", "7 written\n", "x written k\n", "0 written k\nv", "7 touched k\nv", "7 erased k\n", "7 written other\nv"} {
		records = append(records, b, filestore.Checksum([]byte(b))+" "+b)
	}
	s := open(t, filestore.Open, t.TempDir())
	require.NoError(t, s.Write(t.Context(), "k", at(7), []byte("by 7")))
	whole, err := os.ReadFile(s.File("k"))
	require.NoError(t, err)
	for i := range whole {
		flipped := bytes.Clone(whole)
		flipped[i] ^= 1
		records = append(records, string(flipped), string(whole[:i]))
	}
	for i, b := range records {
		require.NoError(t, os.WriteFile(s.File("k"), []byte(b), 0o600))
		for name, call := range eachcall.Of(s, "k", at(999)) {
			require.ErrorContains(t, call(t.Context()), `the record of "k", is damaged: restore it`, "%s of %q", name, b)
		}
		require.NoError(t, s.Write(t.Context(), "other", at(uint64(i+1)), nil))
	}
	require.NoError(t, os.Mkdir(s.File("unreadable"), 0o700)) // not a new key
	_, err = s.Read(t.Context(), "unreadable")
	require.ErrorContains(t, err, "is a directory")
}

func TestDescriptors(t *testing.T) {
	dir, err := filepath.EvalSymlinks(t.TempDir())
	require.NoError(t, err)
	opened := func() (n int) {
		fds, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Skip("there is no list of open files: ", err)
		}
		for _, fd := range fds {
			if path, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil && strings.HasPrefix(path, dir) {
				n++
			}
		}
		return n
	}
	require.ErrorIs(t, filestore.OpenUnsyncable(dir), os.ErrClosed)
	require.Zero(t, opened())
	s := open(t, filestore.Open, dir)
	before := opened()
	require.Positive(t, before)
	require.NoError(t, s.Write(t.Context(), "k", at(1), nil))
	info, err := os.Stat(s.File("k"))
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode())
	_, err = filestore.Open(dir)
	require.Error(t, err)
	require.Equal(t, before, opened())
	require.NoError(t, s.Close())
	require.Zero(t, opened())
}

func TestDirectoryReplaced(t *testing.T) {
	const changed = "the directory was removed, renamed or replaced while it was open: stop this process and restore it"
	dir := filepath.Join(t.TempDir(), "data")
	require.NoError(t, os.Mkdir(dir, 0o700))
	t.Chdir(filepath.Dir(dir))
	first := open(t, filestore.Open, "data")
	t.Chdir(t.TempDir())
	refuses := func(when string) {
		t.Helper()
		for _, key := range []string{"k", "new"} {
			for name, call := range eachcall.Of(first, key, at(2)) {
				require.ErrorContains(t, call(t.Context()), dir+": nothing was changed: "+changed, "%s, %s of %s", when, name, key)
			}
		}
	}
	require.NoError(t, first.Write(t.Context(), "k", at(1), []byte("first")))
	require.NoError(t, os.Rename(dir, dir+".old"))
	refuses("renamed")
	require.NoError(t, os.Mkdir(dir, 0o700))
	refuses("replaced")
	second := open(t, filestore.Open, dir)
	require.NoError(t, second.Write(t.Context(), "k", at(3), []byte("second")))
	refuses("another's")

	require.NoError(t, os.RemoveAll(dir))
	require.NoError(t, os.Rename(dir+".old", dir))
	requireHolds(t, first, "first", 1)
	first.BeforeRename(func() error { return os.Rename(dir, dir+".old") })
	require.ErrorContains(t, first.Write(t.Context(), "k", at(2), nil), dir+": the last write may be lost: "+changed)
	require.NoError(t, os.RemoveAll(dir+".old"))
	refuses("removed")
}
