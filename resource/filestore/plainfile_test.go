package filestore_test

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/filestore"
)

// See reports/results/plain-file.

// plain is a file without a gatekeeper: each writer checks the token in its first line, and renames.
type plain struct{ path string }

func (p plain) check(token uint64) error {
	b, err := os.ReadFile(p.path)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	line, _, _ := strings.Cut(string(b), "\n")
	seen, err := strconv.ParseUint(line, 10, 64)
	if err == nil && token <= seen {
		err = &resource.StaleTokenError{Key: p.path, Seen: at(seen), Got: at(token)}
	}
	return err
}

func (p plain) rename(token uint64) error {
	from := fmt.Sprint(p.path, ".", token)
	return cmp.Or(os.WriteFile(from, fmt.Appendf(nil, "%d\nby %d", token, token), 0o600), os.Rename(from, p.path))
}

func TestPlainFile(t *testing.T) {
	p := plain{filepath.Join(t.TempDir(), "k")}
	require.NoError(t, p.check(7)) // 7 is frozen here
	require.NoError(t, p.check(8))
	require.NoError(t, p.rename(8))
	require.NoError(t, p.rename(7))

	b, err := os.ReadFile(p.path)
	require.NoError(t, err)
	require.Equal(t, "7\nby 7", string(b), "8's write is lost")
	require.NoError(t, p.check(8), "and its token forgotten")
}

// The frozen gatekeeper's rename replaces what the other has accepted.
func TestTwoGatekeepers(t *testing.T) {
	dir := t.TempDir()
	first, second := open(t, filestore.OpenUnlocked, dir), open(t, filestore.OpenUnlocked, dir)
	first.BeforeRename(func() error { // frozen, and taken for dead
		return second.Write(t.Context(), "k", at(8), []byte("by 8"))
	})
	require.NoError(t, first.Write(t.Context(), "k", at(7), []byte("by 7")))
	requireHolds(t, second, "by 7", 7)
}
