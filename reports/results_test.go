package reports_test

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/reports"
	"github.com/fencelab/fencelab/scenarios/history"
)

// TestResults keeps the recorded results' pages what their histories say.
func TestResults(t *testing.T) {
	dirs, err := filepath.Glob("results/*")
	require.NoError(t, err)
	require.NotEmpty(t, dirs)
	for _, dir := range dirs {
		t.Run(filepath.Base(dir), func(t *testing.T) {
			files, err := filepath.Glob(filepath.Join(dir, "*.jsonl"))
			require.NoError(t, err)
			require.NotEmpty(t, files)
			var runs []reports.Run
			for _, file := range files {
				b, err := os.ReadFile(file)
				require.NoError(t, err)
				events, err := history.Decode(bytes.NewReader(b))
				require.NoError(t, err, file)
				r := reports.Run{Events: events, Result: history.Judge(events)}
				require.NotEqual(t, history.Inconclusive, r.Result.Verdict, file)
				runs = append(runs, r)
			}
			var page bytes.Buffer
			require.NoError(t, reports.Timeline(&page, runs...))
			path := filepath.Join(dir, "timeline.html")
			if *update {
				require.NoError(t, os.WriteFile(path, page.Bytes(), 0o644))
				return
			}
			want, err := os.ReadFile(path)
			require.NoError(t, err)
			require.Equal(t, string(want), page.String(), "run go test ./reports -update")
		})
	}
}
