package scenarios_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
)

func TestSummary(t *testing.T) {
	var s scenarios.Summary
	add := func(hazard string, f history.Fencing, v history.Verdict, err error) {
		s.Add(scenarios.Scenario{Name: hazard}, f, &scenarios.Outcome{Result: history.Result{Verdict: v}}, err)
	}
	add("Nap", history.FencingOff, history.Violated, nil)
	add("Nap", history.FencingWrites, history.Violated, nil)
	add("Nap", history.FencingOn, history.Safe, nil)
	add("Crash", history.FencingOff, history.Safe, nil)
	add("Crash", history.FencingOn, history.Inconclusive, nil)
	add("Lag", history.FencingOff, 0, fmt.Errorf("scenarios: scenario \"Lag\": there is no replica: %w", errors.ErrUnsupported))
	add("Jump", history.FencingOff, 0, errors.New("step 2:\nno answer"))
	require.Equal(t, `The lock alone lost data in 1 of 2 hazards; with its token checked on writes, in 1 of 1; on reads and writes, in 0 of 1.

hazard  fencing off  on writes  on reads and writes
Crash   safe         -          inconclusive
Jump    failed       -          -
Lag     -            -          -
Nap     violated     violated   safe
Jump: step 2:; no answer
Lag: there is no replica: unsupported operation
`, s.String())
}
