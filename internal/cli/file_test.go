package cli_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/cli"
)

func TestReplaceFile(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	for _, text := range []string{"one", "two"} {
		require.NoError(t, cli.Replaceable(file))
		require.NoError(t, cli.ReplaceFile(file, []byte(text)))
		b, err := os.ReadFile(file)
		require.NoError(t, err)
		require.Equal(t, text, string(b))
	}
	require.NoError(t, cli.Replaceable(file))
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "two", string(b), "to ask changes nothing")

	for _, path := range []string{dir, filepath.Join(dir, "none", "file"), filepath.Join(file, "file")} {
		require.ErrorContains(t, cli.Replaceable(path), path)
		require.ErrorContains(t, cli.ReplaceFile(path, nil), path)
	}
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	require.Len(t, entries, 1, "nothing is left beside the file")
}

// No file may replace a device or a link: /dev/stdout is one, and may lead to a file.
func TestReplaceFileThatIsNone(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "file")
	require.NoError(t, os.WriteFile(file, []byte("before"), 0o600))
	for _, target := range []string{os.DevNull, file} {
		path := filepath.Join(dir, "link")
		require.NoError(t, os.Symlink(target, path))
		require.NoError(t, cli.Replaceable(path))
		require.NoError(t, cli.ReplaceFile(path, []byte("text")))
		to, err := os.Readlink(path)
		require.NoError(t, err, "it is still what it was")
		require.Equal(t, target, to)
		require.NoError(t, os.Remove(path))
	}
	b, err := os.ReadFile(file)
	require.NoError(t, err)
	require.Equal(t, "text", string(b))
}
