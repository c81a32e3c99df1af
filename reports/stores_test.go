package reports_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/reports"
	"github.com/fencelab/fencelab/scenarios/history"
)

const protected = "results/protected-stores"

// storeOf is the store of a run; "": the HTTP resource.
func storeOf(run *history.Run) string {
	if run.Store == "bolt" {
		return ""
	}
	store, _, _ := strings.Cut(run.Store, " ")
	return store
}

func TestProtectedStores(t *testing.T) {
	columns := []string{"postgres", "redis", "s3", "dynamodb"}
	by := map[string]map[string][]reports.Summary{}
	for _, file := range histories(t)[protected] {
		events := recordedEvents(t, file)
		r, run := reports.Summarize(events), events[0].Run
		store := storeOf(run)
		require.Contains(t, columns, store, file)
		if by[run.Scenario] == nil {
			by[run.Scenario] = map[string][]reports.Summary{}
		}
		by[run.Scenario][store] = append(by[run.Scenario][store], r)
		require.Zero(t, r.Stale, "%s: nobody offers a store a token that it accepts and that isn't greater", file)
		if run.Fencing == history.FencingOff {
			require.Equal(t, history.Violated, r.Verdict, file)
			require.Equal(t, []string{"B"}, r.Lost, file)
			require.Zero(t, r.Refused, file)
			continue
		}
		require.Equal(t, history.Safe, r.Verdict, file)
		require.Equal(t, 1, r.Refused, file)
	}
	var rows []string
	for _, name := range []string{"PauseExceedsTTL", "WriteDelayedInNetwork", "ResourceCrash"} {
		cells := make([]string, len(columns))
		for i, store := range columns {
			runs := by[name][store]
			if name == "ResourceCrash" && store == "dynamodb" {
				require.Empty(t, runs, "an imitation's crash shows nothing")
			} else {
				require.Len(t, runs, 3, "%s over %s", name, store)
			}
			cells[i] = reports.Cell(slices.Clone(runs))
		}
		rows = append(rows, fmt.Sprintf("`%s` | %s", name, strings.Join(cells, " | ")))
	}
	region(t, protected+"/README.md", "stores: go test ./reports -update", table("run | "+strings.Join(columns, " | "), rows...))
}
