package history_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/history"
)

// recorded is a directory of hand-made histories. A file's name begins with the verdict and says what happens in it.
var recorded = filepath.Join("..", "..", "testdata", "histories")

func load(t *testing.T, name string) []history.Event {
	t.Helper()
	f, err := os.Open(filepath.Join(recorded, name+".jsonl"))
	require.NoError(t, err)
	defer func() { require.NoError(t, f.Close()) }()
	events, err := history.Decode(f)
	require.NoError(t, err)
	return events
}
