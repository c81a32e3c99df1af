package boltstore_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	bolt "go.etcd.io/bbolt"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/boltstore"
	"github.com/fencelab/fencelab/resource/internal/eachcall"
	"github.com/fencelab/fencelab/resource/storetest"
)

var (
	commits = flag.Int("commits", 4, "how many commits TestTornCommit tears, each in 15 ways")
	seed    = flag.Uint64("seed", 1, "of TestTornCommit's random choices")
)

func TestMain(m *testing.M) { testmain.Run(m) }

func TestStore(t *testing.T) {
	var path string
	storetest.Run(t, storetest.Harness{
		New: func() (resource.Store, error) {
			path = newPath(t)
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

func newPath(t *testing.T) string {
	t.Helper()
	return filepath.Join(t.TempDir(), "resource.db")
}

func open(t *testing.T, path string) *boltstore.Store {
	t.Helper()
	s, err := boltstore.Open(path, nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func content(t *testing.T, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return b
}

// written returns a file whose keys have the fence 1000.
func written(t *testing.T, value []byte, keys ...string) []byte {
	t.Helper()
	path := newPath(t)
	s := open(t, path)
	var writes boltstore.Pending
	for _, key := range keys {
		writes = append(writes, boltstore.WriteOp(key, at(1000), value))
	}
	_, errs := s.Batch(writes...).Wait()
	require.NoError(t, errors.Join(append(errs, s.Close())...))
	return content(t, path)
}

// openCopy uses a new file, since the last one may still be locked.
func openCopy(t *testing.T, b []byte) (*boltstore.Store, error) {
	t.Helper()
	path := newPath(t)
	require.NoError(t, os.WriteFile(path, b, 0o600))
	return boltstore.Open(path, nil)
}

func at(token uint64) resource.Fence { return resource.Fence{Token: token, Seq: 1} }

func TestOpenRefuses(t *testing.T) {
	locked := newPath(t)
	open(t, locked)
	_, err := boltstore.Open(locked, &boltstore.Options{LockTimeout: time.Millisecond})
	require.ErrorContains(t, err, locked+" is locked by another process (waited 1ms): stop that process, or choose another file")
	synctest.Test(t, func(t *testing.T) {
		_, err := boltstore.Open(locked, nil)
		require.ErrorContains(t, err, "(waited 1s)", "by default")
	})
	_, err = openCopy(t, make([]byte, 1<<16))
	require.ErrorContains(t, err, "resource.db is damaged, or not a store's file")
	for at, want := range map[int]string{20: "version mismatch", 40: "checksum error"} { // both meta pages
		b := written(t, nil)
		b[at] ^= 1
		b[os.Getpagesize()+at] ^= 1
		_, err = openCopy(t, b)
		require.ErrorContains(t, err, "resource.db is damaged, or not a store's file: restore it, or choose another file: "+want)
	}
	_, err = boltstore.Open(filepath.Join(t.TempDir(), "no", "such", "directory"), nil)
	require.ErrorIs(t, err, os.ErrNotExist)
}

// The last process may have been killed between a write and its sync, or its sync may have failed: then Linux writes a page to the
// disk only if it is written again.
func TestOpenSyncs(t *testing.T) {
	link, dir := newPath(t), t.TempDir()
	path := filepath.Join(dir, "resource.db")
	require.NoError(t, os.Symlink(path, link)) // Open creates the file
	dir, err := filepath.EvalSymlinks(dir)
	require.NoError(t, err)
	for _, fails := range []string{link, dir, ""} {
		var synced []string
		old := time.Unix(1, 0)
		if _, err := os.Stat(path); err == nil {
			require.NoError(t, os.Chtimes(path, old, old))
		}
		sync := func(name string) error {
			if synced = append(synced, name); name == fails {
				return io.EOF
			}
			return nil
		}
		s, err := boltstore.OpenWith(link, nil, func(db *bolt.DB) error {
			require.False(t, db.NoSync || db.NoGrowSync, "commits are synced, too")
			info, err := os.Stat(path)
			require.NoError(t, err)
			require.NotEqual(t, old, info.ModTime(), "nothing was written before the sync")
			return sync(db.Path())
		}, func(dir *os.File) error { return sync(dir.Name()) })
		if fails != "" {
			require.ErrorIs(t, err, io.EOF)
			require.Equal(t, fails, synced[len(synced)-1])
			continue
		}
		require.NoError(t, errors.Join(err, s.Close()))
		require.Equal(t, []string{link, dir}, synced)
	}
	info, err := os.Stat(path)
	require.NoError(t, err)
	require.Equal(t, os.FileMode(0o600), info.Mode(), "only its owner can read it")
}

// TestFourLargestOnAPage adds up bbolt's largest page (splitTwo in node.go), which must fit into its MaxAllocSize.
func TestFourLargestOnAPage(t *testing.T) {
	const header, element, maxAllocSize = 16, 16, 0xFFFFFFF // on 386 and arm
	record := len(boltstore.Encode("", resource.Record{Value: []byte{}})) + boltstore.MaxValue
	require.LessOrEqual(t, header+4*(element+resource.MaxKeyLen+record), maxAllocSize)
}

// A damaged record has lost its fence. The damage may be in its key, so calls on new keys next to it are refused too.
func TestDamagedRecord(t *testing.T) {
	b, ctx := written(t, []byte("some value"), "a", "c", "k", "x", "z"), t.Context()
	fence := bytes.LastIndex(b, []byte("k\x00\x00\x00\x00\x00\x00\x03\xe8")) + 1
	require.Positive(t, fence)
	b[fence+7] ^= 3
	s, err := openCopy(t, b)
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	for name, call := range eachcall.Of(s, "k", at(1001)) {
		require.ErrorContains(t, call(ctx), `the record of "k" is damaged: restore the file: its checksum`, name)
	}
	for _, key := range []string{"j", "l"} {
		require.ErrorContains(t, s.Write(ctx, key, at(1), nil), `there is no record of "`+key+`", and its neighbor "k" is damaged: restore the file: its checksum`)
	}
	for _, key := range []string{"a", "b", "c", "x", "y", "z", "zz"} {
		require.NoError(t, s.Write(ctx, key, at(1001), nil))
	}
}

// TestFlippedKeys flips bits of each copy of a key, on leaves and branches, so that it sorts elsewhere. No key may then seem new,
// since any fence would do for it.
func TestFlippedKeys(t *testing.T) {
	for _, n := range []int{3, 40} { // one inline page; several pages
		var keys []string
		for i := range n {
			keys = append(keys, fmt.Sprintf("order-%02d", i))
		}
		sound, ctx := written(t, make([]byte, 250), keys...), t.Context()
		copies := regexp.MustCompile(`order-\d\d`).FindAllIndex(sound, -1)
		require.Equal(t, n > 3, len(copies) > n, "copies on branches")
		damaged := 0
		for i, found := range copies {
			for _, flip := range []struct {
				at  int
				bit byte
			}{{found[0], 1 << 7}, {found[0], 1 << 5}, {found[1] - 1, 1}} {
				b := bytes.Clone(sound)
				b[flip.at] ^= flip.bit
				s, err := openCopy(t, b)
				require.NoError(t, err)
				for _, key := range keys {
					if rec, err := s.Read(ctx, key); err == nil {
						require.Equal(t, at(1000), rec.MaxFence, "%s, copy %d: %v", key, i, flip)
						continue
					}
					damaged++
					for name, call := range eachcall.Of(s, key, at(7)) {
						require.ErrorContains(t, call(ctx), "damaged: restore the file", "%s of %s, copy %d: %v", name, key, i, flip)
					}
				}
				require.NoError(t, s.Close())
			}
		}
		require.GreaterOrEqual(t, damaged, 3*n)
	}
}

// TestDamagedFile changes single bytes, which may cause errors, but neither crashes nor other fences.
func TestDamagedFile(t *testing.T) {
	var keys []string
	for i := range 200 {
		keys = append(keys, fmt.Sprintf("key %d", i))
	}
	sound, ctx := written(t, make([]byte, 50), keys...), t.Context()

	const page, length, header, freelist = 4096, 12, 16, 0x10
	hide := func(b []byte) []byte { return bytes.ReplaceAll(b, boltstore.Bucket, []byte("recordz.v1")) }
	listless := bytes.Clone(sound)
	for flags := 8; flags < len(sound); flags += page {
		if sound[flags] == freelist {
			listless[flags] = 0 // bbolt panics on opening it
		}
	}
	path := newPath(t)
	for _, b := range [][]byte{hide(sound), listless, hide(written(t, nil))} { // the last has one commit
		require.NoError(t, os.WriteFile(path, b, 0o600))
		for range 2 { // the first must not keep the file locked
			_, err := boltstore.Open(path, nil)
			require.ErrorContains(t, err, "damaged: restore it", "and no empty store")
		}
	}

	opens, reads, writes, lists := 0, 0, 0, 0
	for i := range sound {
		if (i%page < 8 || i%page >= length) && (i%page < header || i%1999 > 0) || i > page && sound[i-i%page+8] == freelist {
			// All headers of pages, and a sample of the rest. bbolt trusts a page's length and the free list, and would make a
			// file of terabytes.
			continue
		}
		b := bytes.Clone(sound)
		b[i] ^= byte(1 + i%255)
		check := func(n *int, err error) {
			t.Helper()
			if err != nil {
				*n++
				require.Regexp(t, "damaged: restore|nothing was changed", err, "byte %d", i)
			}
		}
		s, err := openCopy(t, b)
		if check(&opens, err); err != nil {
			continue
		}
		_, errs := s.Batch(boltstore.WriteOp("key 7", at(1001), []byte{}), boltstore.WriteOp("key 77", at(1001), []byte{}),
			boltstore.WriteOp("key 177", at(1001), []byte{})).Wait()
		check(&writes, errors.Join(errs...))
		for _, key := range keys {
			rec, err := s.Read(ctx, key)
			if errors.Is(err, resource.ErrNotFound) && i%page < header {
				continue // a page's header has no checksum, and may hide its keys
			}
			if check(&reads, err); err == nil && rec.MaxFence != at(1001) {
				require.Equal(t, at(1000), rec.MaxFence, "byte %d, %s", i, key)
			}
		}
		_, err = s.Keys(ctx)
		check(&lists, err)
		_ = s.Close()
	}
	require.NotContains(t, []int{opens, reads, writes, lists}, 0)
}

// TestTornCommit opens what a power cut may leave of a commit: before the first sync any of its sectors but the meta page's, then
// any of the meta page's. The previous write must survive, and the commit wholly or not at all.
func TestTornCommit(t *testing.T) {
	const page, sector, keys = 4096, 512, 300
	random := rand.New(rand.NewPCG(*seed, 0))
	path, ctx := newPath(t), t.Context()
	s := open(t, path)
	fence := map[string]uint64{}
	write := func(key string) {
		fence[key]++
		value := bytes.Repeat([]byte{byte(fence[key])}, random.IntN(2*page))
		require.NoError(t, s.Write(ctx, key, at(fence[key]), value))
	}
	for i := range keys {
		write(strconv.Itoa(i))
	}
	var before, after int
	for i := range *commits {
		for range i % 5 {
			write(strconv.Itoa(random.IntN(keys)))
		}
		was := content(t, path)
		key := strconv.Itoa(random.IntN(keys))
		write(key)
		is := content(t, path)
		for range 15 {
			b := append(bytes.Clone(was), make([]byte, max(0, len(is)-len(was)))...)
			synced := random.IntN(2) == 1
			if synced {
				copy(b[2*page:], is[2*page:])
			}
			for at := 0; at < len(is); at += sector {
				if meta := at < 2*page; meta == synced && random.IntN(2) == 1 {
					copy(b[at:at+sector], is[at:])
				}
			}
			o, err := openCopy(t, b)
			require.NoError(t, err, "commit %d", i)
			for k, f := range fence {
				rec, err := o.Read(ctx, k)
				require.NoError(t, err, "commit %d, key %s", i, k)
				switch {
				case k == key && rec.MaxFence == at(f-1):
					before++
				case k == key && rec.MaxFence == at(f):
					require.True(t, synced)
					after++
				default:
					require.Equal(t, at(f), rec.MaxFence, "commit %d, key %s", i, k)
				}
				require.Empty(t, bytes.Trim(rec.Value, string([]byte{byte(rec.MaxFence.Token)})), "commit %d, key %s", i, k)
			}
			require.NoError(t, o.Close())
		}
	}
	require.NotZero(t, before)
	require.NotZero(t, after)
}

func TestFileGone(t *testing.T) {
	path, ctx := newPath(t), t.Context()
	t.Chdir(filepath.Dir(path))
	s := open(t, filepath.Base(path))
	t.Chdir(t.TempDir())
	require.NoError(t, s.Write(ctx, "k", at(5), []byte("v")))
	refused := func() {
		t.Helper()
		const want = "nothing was changed: the file was removed or replaced while it was open: stop this process and restore it"
		calls := eachcall.Of(s, "k", at(6))
		calls["Keys"] = func(ctx context.Context) error { _, err := s.Keys(ctx); return err }
		for name, call := range calls {
			require.ErrorContains(t, call(ctx), want, name)
		}
	}
	require.NoError(t, os.Rename(path, path+".away"))
	refused()
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	refused()
	require.NoError(t, os.Rename(path+".away", path))
	require.NoError(t, s.Write(ctx, "k", at(7), nil))
	require.Equal(t, at(7), reread(t, s, "k"))

	link := filepath.Join(t.TempDir(), "link") // its error is not ErrNotExist
	require.NoError(t, os.Symlink(t.TempDir(), link))
	s = open(t, filepath.Join(link, "resource.db"))
	require.NoError(t, errors.Join(os.Remove(link), os.Symlink(link, link)))
	require.NoError(t, s.Write(ctx, "k", at(1), nil))
}

func TestFileGoneMeanwhile(t *testing.T) {
	path, ctx := newPath(t), t.Context()
	s := open(t, path)
	s.OnCommit(func(commit func() error) error { return errors.Join(os.Rename(path, path+".away"), commit()) })
	const want = "all calls fail until the file is opened again: the file was removed or replaced while it was open"
	err := s.Write(ctx, "k", at(5), nil)
	require.ErrorContains(t, err, want, "the write may be lost")
	require.NotErrorIs(t, err, resource.ErrNoRoom)
	require.NoError(t, os.Rename(path+".away", path))
	_, err = s.Read(ctx, "k")
	require.ErrorContains(t, err, want)
	_, err = s.Keys(ctx)
	require.ErrorContains(t, err, want)
	require.NoError(t, s.Close())
	_, err = s.Keys(ctx)
	require.ErrorIs(t, err, resource.ErrClosed)
	require.Equal(t, at(5), reread(t, open(t, path), "k"))
}

// TestOverwrittenInPlace copies a backup over the open file, which keeps its inode.
func TestOverwrittenInPlace(t *testing.T) {
	path, ctx := newPath(t), t.Context()
	s := open(t, path)
	require.NoError(t, s.Write(ctx, "k", at(5), nil))
	backup := content(t, path)
	require.NoError(t, s.Write(ctx, "k", at(7), nil))
	now := content(t, path)
	const want = "a file was copied over it while it was open: stop this process and restore it"
	require.NoError(t, os.WriteFile(path, backup, 0o600))
	_, err := s.Read(ctx, "k")
	require.ErrorContains(t, err, want)
	require.NoError(t, os.WriteFile(path, now, 0o600))
	require.Equal(t, at(7), reread(t, s, "k"))

	copied := newPath(t)
	require.NoError(t, os.WriteFile(copied, now, 0o600))
	other := open(t, copied)
	require.NoError(t, errors.Join(other.Write(ctx, "k", at(8), nil), other.Close()))
	require.NoError(t, os.WriteFile(path, content(t, copied), 0o600))
	_, err = s.Read(ctx, "k")
	require.ErrorContains(t, err, want, "one commit ahead, while none is under way")
	require.NoError(t, os.WriteFile(path, now, 0o600))

	s.OnCommit(func(func() error) error { // during a commit, too
		if err := os.WriteFile(path, backup, 0o600); err != nil {
			return err
		}
		_, err := s.Read(ctx, "k")
		return errors.Join(err, os.WriteFile(path, now, 0o600), io.EOF)
	})
	require.ErrorContains(t, s.Write(ctx, "other", at(1), nil), want)
	s.OnCommit(func(commit func() error) error { return commit() })

	require.NoError(t, os.WriteFile(path, backup, 0o600))
	require.ErrorContains(t, s.Write(ctx, "k", at(6), nil), want)
	require.NoError(t, os.WriteFile(path, now, 0o600))
	_, err = s.ReadFenced(ctx, "k", resource.Fence{Token: 6})
	require.ErrorContains(t, err, want, "bbolt's free list and the file may no longer match")
	_, err = s.Read(ctx, "k")
	require.ErrorContains(t, err, want)
	require.NoError(t, s.Close())
	require.Equal(t, at(7), reread(t, open(t, path), "k"))
}

// Each transaction begins with the meta pages.
func TestOpenFileDamaged(t *testing.T) {
	const want = "damaged: restore it"
	for name, damage := range map[string]func(path string) error{
		"emptied": func(path string) error { return os.Truncate(path, 0) },
		"zeroed": func(path string) error {
			f, err := os.OpenFile(path, os.O_WRONLY, 0)
			if err == nil {
				_, err = f.Write(make([]byte, 2*os.Getpagesize()))
			}
			return errors.Join(err, f.Close())
		},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := t.Context()
			damaged := func() *boltstore.Store {
				path := newPath(t)
				s := open(t, path)
				require.NoError(t, s.Write(ctx, "k", at(5), nil))
				require.NoError(t, damage(path))
				return s
			}
			s := damaged()
			for range 2 {
				_, err := s.Read(ctx, "k")
				require.ErrorContains(t, err, want)
			}
			s = damaged()
			for range 2 {
				require.ErrorContains(t, s.Write(ctx, "k", at(4), nil), want)
			}
			_, err := s.Read(ctx, "k")
			require.ErrorContains(t, err, want)
			require.NoError(t, s.Close())
			require.ErrorIs(t, s.Write(ctx, "k", at(4), nil), resource.ErrClosed)

			path := newPath(t)
			s = open(t, path)
			require.NoError(t, s.Write(ctx, "k", at(5), nil))
			s.OnCommit(func(func() error) error {
				require.NoError(t, damage(path))
				var reads sync.WaitGroup
				for range 4 {
					reads.Go(func() {
						if _, err := s.Read(ctx, "k"); err == nil || !strings.Contains(err.Error(), want) {
							t.Errorf("got %v, want %q", err, want)
						}
					})
				}
				reads.Wait()
				return io.ErrShortWrite
			})
			require.ErrorContains(t, s.Write(ctx, "other", at(5), nil), want)
			_, err = s.Read(ctx, "k")
			require.ErrorContains(t, err, want)
		})
	}
}

func reread(t *testing.T, s *boltstore.Store, key string) resource.Fence {
	t.Helper()
	rec, err := s.Read(t.Context(), key)
	require.NoError(t, err)
	return rec.MaxFence
}

func TestUnwrittenKeys(t *testing.T) {
	path, ctx := newPath(t), t.Context()
	reopen := func() *boltstore.Store {
		s, err := boltstore.Open(path, &boltstore.Options{MaxUnwritten: 3})
		require.NoError(t, err)
		return s
	}
	s := reopen()
	touch := func(key string, token uint64) error {
		_, err := s.ReadFenced(ctx, key, resource.Fence{Token: token})
		return err
	}
	require.NoError(t, s.Write(ctx, "written", at(1), nil))
	for i, key := range []string{"a", "b", "a", "written", "a", "c"} {
		require.NoError(t, touch(key, uint64(i+2)))
	}
	require.NoError(t, s.Write(ctx, "written", at(9), nil))
	_, errs := s.Batch(boltstore.ReadFencedOp("d", 1), boltstore.WriteOp("d", at(2), []byte("v")),
		boltstore.ReadFencedOp("d", 3), boltstore.ReadFencedOp("e", 1)).Wait()
	require.NoError(t, errors.Join(errs[1], errs[2]))
	require.ErrorIs(t, errs[0], resource.ErrNoRoom)
	require.ErrorContains(t, errs[0], `no room for "d": the limit of 3 keys that only fenced reads have touched is reached`)
	require.ErrorIs(t, errs[3], resource.ErrNoRoom)
	_, err := s.Read(ctx, "e")
	require.ErrorIs(t, err, resource.ErrNotFound)

	for i, write := range []func(context.Context, string, resource.Fence, []byte) error{s.Write, s.Overwrite} {
		key, next := string("bc"[i]), string("fi"[i])
		require.NoError(t, write(ctx, key, at(9), nil))
		require.NoError(t, write(ctx, key, at(10), nil))
		require.NoError(t, touch(next, 1))
		require.ErrorIs(t, touch("g", 1), resource.ErrNoRoom)
	}
	require.NoError(t, s.Close())
	s = reopen()
	require.ErrorIs(t, touch("g", 1), resource.ErrNoRoom, "after reopening")
	keys, err := s.Keys(ctx)
	require.NoError(t, err)
	require.Equal(t, []string{"a", "b", "c", "d", "f", "i", "written"}, keys)
	require.NoError(t, touch("f", 2))
	require.NoError(t, s.Close())

	reopenAt := func(unwritten uint64) *boltstore.Store {
		db, err := bolt.Open(path, 0o600, nil)
		require.NoError(t, err)
		require.NoError(t, db.Update(func(tx *bolt.Tx) error { return tx.Bucket(boltstore.Bucket).SetSequence(unwritten) }))
		require.NoError(t, db.Close())
		return open(t, path)
	}
	s = reopenAt(1<<20 - 1)
	require.NoError(t, touch("g", 1))
	require.ErrorIs(t, touch("h", 1), resource.ErrNoRoom)
	require.NoError(t, s.Close())
	s = reopenAt(0) // damaged: the count has no checksum
	require.NoError(t, s.Write(ctx, "g", at(2), nil))
	require.NoError(t, touch("h", 1))
}

// Refusals wait too: they may depend on a write of the same batch. So do reads of its keys: bbolt shows a commit to readers
// before it has synced it.
func TestAnswersWaitForCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := open(t, newPath(t))
		require.NoError(t, s.Write(t.Context(), "other", at(1), nil))
		pending := boltstore.Pending{
			boltstore.WriteOp("k", at(5), []byte{}), boltstore.WriteOp("k", at(3), nil), boltstore.ReadFencedOp("read", 1), boltstore.WriteOp("last", at(1), nil),
		}
		reads := make(chan resource.Record, 2)
		var early []int
		look := func() {
			go func() {
				rec, err := s.Read(t.Context(), "k")
				if err == nil {
					reads <- rec
				}
			}()
			synctest.Wait()
			require.Equal(t, at(1), reread(t, s, "other"))
			early = append(early, pending.Answered(), len(reads))
		}
		s.OnCommit(func(commit func() error) error {
			look()
			err := commit()
			look()
			return err
		})
		_, errs := s.Batch(pending...).Wait()
		require.Equal(t, make([]int, 4), early, "answers before the commit, and before its end")
		require.NoError(t, errors.Join(errs[0], errs[2], errs[3]))
		require.Equal(t, &resource.StaleTokenError{Key: "k", Seen: at(5), Got: at(3)}, errs[1])
		for range 2 {
			require.Equal(t, at(5), (<-reads).MaxFence)
		}
	})
}

// After bbolt has unmapped the file, a value that pointed into it would crash.
func TestValuesOutliveFile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := boltstore.Open(newPath(t), nil)
		require.NoError(t, err)
		ctx := t.Context()
		require.NoError(t, s.Write(ctx, "filler", at(1), make([]byte, 8<<10))) // bbolt copies values of a very small file
		require.NoError(t, s.Write(ctx, "k", at(1), []byte("v")))
		read, err := s.Read(ctx, "k")
		require.NoError(t, err)
		raised, err := s.ReadFenced(ctx, "k", resource.Fence{Token: 2})
		require.NoError(t, err)
		again, err := s.ReadFenced(ctx, "k", resource.Fence{Token: 2})
		require.NoError(t, err)
		require.False(t, debug.SetPanicOnFault(false), "it is the caller's")

		// The next read's commit grows the file, which moves the memory.
		waited := make(chan resource.Record, 2)
		s.OnCommit(func(commit func() error) error {
			for range cap(waited) {
				go func() {
					rec, _ := s.Read(ctx, "k")
					waited <- rec
				}()
			}
			synctest.Wait()
			return commit()
		})
		recs, errs := s.Batch(boltstore.ReadFencedOp("k", 3), boltstore.WriteOp("large", at(1), make([]byte, 1<<20))).Wait()
		require.NoError(t, errors.Join(errs...))
		(<-waited).Value[0] = 'X'
		require.NoError(t, s.Close())
		for _, rec := range []resource.Record{<-waited, read, raised, again, recs[0]} {
			require.Equal(t, "v", string(rec.Value))
		}
	})
}

// Writers that arrive during a commit share the next one up to its limits, and Close waits for them.
func TestGroupCommit(t *testing.T) {
	for name, c := range map[string]struct {
		sizes   []int
		commits int
	}{
		"one too many":       {make([]int, 1+boltstore.MaxBatchOps+1), 3}, // the last waits for room in the queue
		"all that fit":       {make([]int, 1+boltstore.MaxBatchOps), 2},
		"a byte too many":    {[]int{0, 1, boltstore.MaxBatchBytes - 1, 0}, 3},
		"all bytes that fit": {[]int{0, boltstore.MaxBatchBytes - 1, 1}, 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				path, ctx := newPath(t), t.Context()
				s, err := boltstore.Open(path, nil)
				require.NoError(t, err)
				commits, first := 0, make(chan struct{})
				s.OnCommit(func(commit func() error) error {
					if commits++; commits == 1 {
						<-first
					}
					return commit()
				})
				answers := make(chan error, len(c.sizes)+1)
				for i, size := range c.sizes {
					go func() { answers <- s.Write(ctx, strconv.Itoa(i), at(1), make([]byte, size)) }()
					synctest.Wait()
				}
				go func() { answers <- s.Close() }()
				synctest.Wait()
				require.Empty(t, answers)
				require.ErrorIs(t, s.Write(ctx, "late", at(1), nil), resource.ErrClosed)
				close(first)
				for range cap(answers) {
					require.NoError(t, <-answers)
				}
				require.Equal(t, c.commits, commits)
				again := open(t, path)
				for i := range c.sizes {
					require.Equal(t, at(1), reread(t, again, strconv.Itoa(i)))
				}
			})
		})
	}
}

func TestContextEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := open(t, newPath(t))
		first := make(chan struct{})
		s.OnCommit(func(commit func() error) error {
			<-first
			return commit()
		})
		ctx, cancel := context.WithCancelCause(t.Context())
		var wg sync.WaitGroup
		write := func(ctx context.Context, key string, token uint64, value []byte) *error {
			var err error
			wg.Go(func() { err = s.Write(ctx, key, at(token), value) })
			synctest.Wait()
			return &err
		}
		write(t.Context(), "k", 1, nil)
		value := []byte("v")
		queued := write(ctx, "k", 2, value)
		for i := range boltstore.MaxBatchOps - 1 {
			write(t.Context(), strconv.Itoa(i), 1, nil)
		}
		outside := write(ctx, "outside", 1, nil)
		var read error
		wg.Go(func() { _, read = s.Read(ctx, "k") })
		synctest.Wait()
		cancel(io.EOF)
		synctest.Wait()
		for _, err := range []error{*queued, *outside, read} {
			require.ErrorIs(t, err, io.EOF)
		}
		require.ErrorContains(t, *queued, "may still take effect")
		value[0] = 'X'
		close(first)
		wg.Wait()
		require.NoError(t, s.Write(t.Context(), "last", at(1), nil))
		rec, err := s.Read(t.Context(), "k")
		require.NoError(t, err)
		require.Equal(t, resource.Record{Value: []byte("v"), MaxFence: at(2)}, rec)
		_, err = s.Read(t.Context(), "outside")
		require.ErrorIs(t, err, resource.ErrNotFound)
	})
}
