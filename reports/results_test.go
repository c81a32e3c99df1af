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
	histories, err := filepath.Glob("results/*/*.jsonl")
	require.NoError(t, err)
	require.NotEmpty(t, histories)
	byDir := map[string][]string{}
	for _, file := range histories {
		byDir[filepath.Dir(file)] = append(byDir[filepath.Dir(file)], file)
	}
	for dir, files := range byDir {
		t.Run(filepath.Base(dir), func(t *testing.T) {
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
