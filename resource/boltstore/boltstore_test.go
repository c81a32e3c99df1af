package boltstore_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	bolt "go.etcd.io/bbolt"

	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/boltstore"
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
	require.ErrorContains(t, err, "notes.txt is damaged, or not a store's file")
	_, err = boltstore.Open(filepath.Join(dir, "no", "such", "directory"), nil)
	require.ErrorIs(t, err, os.ErrNotExist)
}

// TestFourLargestOnAPage adds up the largest page that bbolt builds (splitTwo in its node.go): a header and four elements, each
// with a key and a record. It must fit into MaxAllocSize, which isn't exported.
func TestFourLargestOnAPage(t *testing.T) {
	const header, element, maxAllocSize = 16, 16, 0xFFFFFFF // on 386 and arm
	record := len(boltstore.Encode("", resource.Record{Value: []byte{}})) + boltstore.MaxValue
	require.LessOrEqual(t, header+4*(element+resource.MaxKeyLen+record), maxAllocSize)
}

// TestDamagedRecord has a damaged record. Calls on its key are refused, because its fence is lost; other keys work.
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
	const want = `the record of "bad" is damaged: restore the file: it has 5 bytes`
	_, err = s.Read(ctx, "bad")
	require.ErrorContains(t, err, want)
	_, err = s.ReadFenced(ctx, "bad", 9)
	require.ErrorContains(t, err, want)
	require.ErrorContains(t, s.Write(ctx, "bad", at(9), nil), want)
	require.NoError(t, s.Write(ctx, "good", at(9), nil))
}

// TestFlippedBits flips every pair of bits of a record, which could turn its fence into another.
func TestFlippedBits(t *testing.T) {
	path, ctx := filepath.Join(t.TempDir(), "resource.db"), t.Context()
	s, err := boltstore.Open(path, nil)
	require.NoError(t, err)
	require.NoError(t, s.Write(ctx, "k", at(1000), []byte("some value")))
	require.NoError(t, s.Close())
	sound, err := os.ReadFile(path)
	require.NoError(t, err)
	begin := bytes.LastIndex(sound, []byte("k\x00\x00\x00\x00\x00\x00\x03\xe8")) + 1
	require.Positive(t, begin)
	flip := func(b []byte, bit int) { b[begin+bit/8] ^= 1 << (bit % 8) }
	record := len(boltstore.Encode("k", resource.Record{Value: []byte("some value")}))
	for one := range record * 8 {
		for two := range one {
			b := bytes.Clone(sound[begin : begin+record])
			b[one/8] ^= 1 << (one % 8)
			b[two/8] ^= 1 << (two % 8)
			_, err := boltstore.Decode("k", b)
			require.Error(t, err, "bits %d and %d", one, two)
		}
	}
	flip(sound, 48) // 1000 becomes 232
	flip(sound, 49)
	require.NoError(t, os.WriteFile(path, sound, 0o600))
	s = open(t, path)
	const want = `the record of "k" is damaged: restore the file: its checksum`
	_, err = s.Read(ctx, "k")
	require.ErrorContains(t, err, want)
	require.ErrorContains(t, s.Write(ctx, "k", at(999), nil), want)
}

// TestDamagedFile changes single bytes of the file. The worst outcome must be an error, never a crash or another fence.
func TestDamagedFile(t *testing.T) {
	path, ctx := filepath.Join(t.TempDir(), "resource.db"), t.Context()
	s, err := boltstore.Open(path, nil)
	require.NoError(t, err)
	for i := range 200 {
		require.NoError(t, s.Write(ctx, fmt.Sprintf("key %d", i), at(1000), make([]byte, 50)))
	}
	require.NoError(t, s.Close())
	sound, err := os.ReadFile(path)
	require.NoError(t, err)

	hidden := bytes.ReplaceAll(sound, boltstore.Bucket, []byte("recordz.v1"))
	require.NoError(t, os.WriteFile(path, hidden, 0o600))
	_, err = boltstore.Open(path, nil)
	require.ErrorContains(t, err, "damaged: restore it", "and no empty store")

	const page, length, header, freelist = 4096, 12, 16, 0x10
	opens, reads, writes := 0, 0, 0
	for i := range sound {
		if (i%page < 8 || i%page >= length) && (i%page < header || i%1999 > 0) || i > page && sound[i-i%page+8] == freelist {
			// The headers of pages, and some of the rest, but not all: bbolt believes how long a page is, and
			// where a free one is, and makes a file of terabytes, or a list of all its pages.
			continue
		}
		path := filepath.Join(t.TempDir(), "resource.db") // the one before may still be locked
		b := bytes.Clone(sound)
		b[i] ^= byte(1 + i%255)
		require.NoError(t, os.WriteFile(path, b, 0o600))
		check := func(n *int, err error) {
			t.Helper()
			if err != nil {
				*n++
				require.Regexp(t, "damaged: restore|nothing was changed", err, "byte %d", i)
			}
		}
		s, err := boltstore.Open(path, nil)
		if check(&opens, err); err != nil {
			continue
		}
		_, errs := s.Batch(boltstore.WriteOp("key 7", at(1001), []byte{}), boltstore.WriteOp("key 77", at(1001), []byte{}),
			boltstore.WriteOp("key 177", at(1001), []byte{})).Wait()
		check(&writes, errors.Join(errs...))
		for k := range 200 {
			rec, err := s.Read(ctx, fmt.Sprintf("key %d", k))
			if errors.Is(err, resource.ErrNotFound) {
				continue // a page may hide its keys
			}
			if check(&reads, err); err == nil && rec.MaxFence != at(1001) {
				require.Equal(t, at(1000), rec.MaxFence, "byte %d, key %d", i, k)
			}
		}
		_ = s.Close()
	}
	require.NotContains(t, []int{opens, reads, writes}, 0)
}

// TestTornCommit opens what a power cut may leave of a commit: before the first sync any of its sectors but the meta page's,
// after that any of the meta page's. The accepted write before it must be there, the commit's own wholly or not at all.
func TestTornCommit(t *testing.T) {
	const page, sector, keys = 4096, 512, 300
	random := rand.New(rand.NewPCG(*seed, 0))
	dir, ctx := t.TempDir(), t.Context()
	path := filepath.Join(dir, "resource.db")
	s := open(t, path)
	bytesOf := func() []byte {
		b, err := os.ReadFile(path)
		require.NoError(t, err)
		return b
	}
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
		was := bytesOf()
		key := strconv.Itoa(random.IntN(keys))
		write(key)
		is := bytesOf()
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
			torn := filepath.Join(dir, "torn.db")
			require.NoError(t, os.WriteFile(torn, b, 0o600))
			o, err := boltstore.Open(torn, nil)
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

// TestFileGone removes and then replaces the open file: writes would be lost with the process.
func TestFileGone(t *testing.T) {
	path, ctx := filepath.Join(t.TempDir(), "resource.db"), t.Context()
	s := open(t, path)
	require.NoError(t, s.Write(ctx, "k", at(5), []byte("v")))
	refused := func() {
		t.Helper()
		const want = "nothing was changed: the file was removed or replaced while it is open: stop this process and restore it"
		require.ErrorContains(t, s.Write(ctx, "k", at(6), nil), want)
		_, err := s.ReadFenced(ctx, "k", 6)
		require.ErrorContains(t, err, want)
		_, err = s.Read(ctx, "k")
		require.ErrorContains(t, err, want)
	}
	require.NoError(t, os.Rename(path, path+".away"))
	refused()
	require.NoError(t, os.WriteFile(path, nil, 0o600))
	refused()
	require.NoError(t, os.Rename(path+".away", path))
	require.NoError(t, s.Write(ctx, "k", at(7), nil))
	require.Equal(t, at(7), reread(t, s, "k"))
}

func reread(t *testing.T, s *boltstore.Store, key string) resource.Fence {
	t.Helper()
	rec, err := s.Read(t.Context(), key)
	require.NoError(t, err)
	return rec.MaxFence
}

// TestUnwrittenKeys has fenced reads reach the limit for new keys. Writes go on, and make room.
func TestUnwrittenKeys(t *testing.T) {
	path, ctx := filepath.Join(t.TempDir(), "resource.db"), t.Context()
	reopen := func() *boltstore.Store {
		s, err := boltstore.Open(path, &boltstore.Options{MaxUnwritten: 3})
		require.NoError(t, err)
		return s
	}
	s := reopen()
	touch := func(key string, token uint64) error {
		_, err := s.ReadFenced(ctx, key, token)
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

	require.NoError(t, s.Write(ctx, "b", at(9), nil))
	require.NoError(t, s.Write(ctx, "b", at(10), nil))
	require.NoError(t, touch("f", 1))
	require.ErrorIs(t, touch("g", 1), resource.ErrNoRoom)
	require.NoError(t, s.Close())
	s = reopen()
	require.ErrorIs(t, touch("g", 1), resource.ErrNoRoom, "after reopening")
	require.NoError(t, touch("f", 2))
	require.NoError(t, s.Close())
}

// TestAnswersWaitForCommit checks that no operation of a batch is answered before its commit has ended, not even a refusal,
// which may depend on a write of the same batch.
func TestAnswersWaitForCommit(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "resource.db"))
	pending := boltstore.Pending{
		boltstore.WriteOp("k", at(5), []byte{}), boltstore.WriteOp("k", at(3), nil), boltstore.ReadFencedOp("read", 1), boltstore.WriteOp("last", at(1), nil),
	}
	var early []int
	s.AroundCommit(func() { early = append(early, pending.Answered()) })
	_, errs := s.Batch(pending...).Wait()
	require.Equal(t, []int{0, 0}, early, "answers before the commit, and before its end")
	require.NoError(t, errors.Join(errs[0], errs[2], errs[3]))
	require.Equal(t, &resource.StaleTokenError{Key: "k", Seen: at(5), Got: at(3)}, errs[1])
}

// TestValuesOutliveFile uses values after bbolt has unmapped the file. A value that still pointed there would crash the test.
func TestValuesOutliveFile(t *testing.T) {
	s, err := boltstore.Open(filepath.Join(t.TempDir(), "resource.db"), nil)
	require.NoError(t, err)
	ctx := t.Context()
	require.NoError(t, s.Write(ctx, "filler", at(1), make([]byte, 8<<10))) // bbolt copies what is in a very small file
	require.NoError(t, s.Write(ctx, "k", at(1), []byte("v")))
	read, err := s.Read(ctx, "k")
	require.NoError(t, err)
	raised, err := s.ReadFenced(ctx, "k", 2)
	require.NoError(t, err)
	again, err := s.ReadFenced(ctx, "k", 2)
	require.NoError(t, err)

	// The commit of the next read makes the file grow, and so moves the memory, while others wait to read the key.
	release, err := s.HoldGrowth()
	require.NoError(t, err)
	pending := s.Batch(boltstore.ReadFencedOp("k", 3), boltstore.WriteOp("large", at(1), make([]byte, 1<<20)))
	for !s.Committing() {
		runtime.Gosched()
	}
	var wg sync.WaitGroup
	waited := make([]resource.Record, 10)
	for i := range waited {
		wg.Go(func() { waited[i], _ = s.Read(ctx, "k") })
	}
	require.NoError(t, release())
	recs, errs := pending.Wait()
	require.NoError(t, errors.Join(errs...))
	wg.Wait()
	require.NoError(t, s.Close())
	for _, rec := range append(waited, read, raised, again, recs[0]) {
		require.Equal(t, "v", string(rec.Value))
	}
}

// TestGroupCommit has 50 writers arrive during a commit. One commit serves them all.
func TestGroupCommit(t *testing.T) {
	s, ctx := open(t, filepath.Join(t.TempDir(), "resource.db")), t.Context()
	before, err := s.Commits()
	require.NoError(t, err)
	release, err := s.HoldGrowth()
	require.NoError(t, err)
	var wg sync.WaitGroup
	write := func(key string, value []byte) {
		wg.Go(func() {
			if err := s.Write(ctx, key, at(1), value); err != nil {
				t.Error(err)
			}
		})
	}
	write("large", make([]byte, 1<<20))
	for !s.Committing() {
		runtime.Gosched()
	}
	const writers = 50
	for i := range writers {
		write(strconv.Itoa(i), nil)
	}
	for s.Queued() < writers {
		runtime.Gosched()
	}
	require.NoError(t, release())
	wg.Wait()
	after, err := s.Commits()
	require.NoError(t, err)
	require.Equal(t, 2, after-before, "commits of 1 + 50 writes")
}

// TestCloseFinishesCalls closes the store under load: every call is either finished or gets ErrClosed, and accepted writes are
// there afterwards.
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
