package bench

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/fencelab/fencelab/internal/bench/load"
)

// Merge adds up the results in the logs of the processes of one run. Other lines, and anything before a result in its
// line, are skipped.
func Merge(logs io.Reader) (*load.Result, error) {
	var results []*load.Result
	in := bufio.NewReader(logs)
	for n := 1; ; n++ {
		line, err := in.ReadBytes('\n')
		if i := bytes.Index(line, []byte(`{"config":`)); i >= 0 {
			res := &load.Result{}
			if err := json.Unmarshal(line[i:], res); err != nil {
				return nil, fmt.Errorf("line %d has a result that can't be read: %w", n, err)
			}
			results = append(results, res)
		}
		switch {
		case errors.Is(err, io.EOF) && len(results) == 0:
			return nil, fmt.Errorf("no result in %d lines: it wants what contend -o - has printed; what went wrong is in the lines, if it did", n-1)
		case errors.Is(err, io.EOF):
			if err := oneRun(results); err != nil {
				return nil, err
			}
			return load.Merge(results)
		case err != nil:
			return nil, err
		}
	}
}

// oneRun returns an error for another load, the same arrivals, another time, or a duplicate.
func oneRun(results []*load.Result) error {
	same := shared(results[0].Config)
	processes, seeds := map[string]int{}, map[uint64]int{}
	var starts, ends []time.Time
	var longest float64
	for i, r := range results {
		if c := shared(r.Config); c != same {
			return fmt.Errorf("results 1 and %d are not of one run: their configurations are %+v and %+v", i+1, same, c)
		}
		for _, p := range r.Parts {
			if first, ok := processes[p.ID]; ok {
				return fmt.Errorf("results %d and %d are of the same process (%s): give each result once", first, i+1, p.ID)
			}
			if first, ok := seeds[p.Seed]; ok && (r.Config.Keys > 1 || r.Config.Rate > 0) {
				return fmt.Errorf("the processes of results %d and %d both had the seed %d, so that their keys and arrivals were the same: "+
					"give each process its own -seed", first, i+1, p.Seed)
			}
			processes[p.ID], seeds[p.Seed] = i+1, i+1
		}
		starts, ends = append(starts, r.Start), append(ends, r.Start.Add(time.Duration(r.Seconds*float64(time.Second))))
		longest = max(longest, r.Seconds)
	}
	together := slices.MinFunc(ends, time.Time.Compare).Sub(slices.MaxFunc(starts, time.Time.Compare)).Seconds()
	if together < 0.9*longest {
		return fmt.Errorf("the results are not of one run: of %.1f s they overlap for %.1f s (-start-at makes processes begin together)",
			longest, max(0, together))
	}
	return nil
}

func shared(c load.Config) load.Config {
	c.Name, c.Contenders, c.Connections, c.Processes, c.Seed = "", 0, 0, 0, 0
	if c.Rate > 0 {
		c.Rate = 1 // the open model; each has a rate of its own
	}
	return c
}
