package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"

	"github.com/fencelab/fencelab/internal/load"
)

// resultStart is how a line with a result begins.
var resultStart = []byte(`{"config":`)

// merge makes one result of those in the file at path, or in stdin if it is "-": the logs of processes, on as many hosts,
// that have taken part in one run and printed their results with -o -. What a log has before the result in its line, and
// other lines, are passed over.
func merge(path string, stdin io.Reader) (*load.Result, error) {
	in := stdin
	if path != "-" {
		f, err := os.Open(path)
		if err != nil {
			return nil, fmt.Errorf("contend: -merge: %w", err)
		}
		defer func() { _ = f.Close() }() // it was read only
		in = f
	}
	results, err := readResults(in)
	if err != nil {
		return nil, fmt.Errorf("contend: -merge %s: %w", path, err)
	}
	if err := oneRun(results); err != nil {
		return nil, fmt.Errorf("contend: -merge %s: %w", path, err)
	}
	return load.Merge(results)
}

func readResults(r io.Reader) ([]*load.Result, error) {
	var results []*load.Result
	in := bufio.NewReader(r)
	for n := 1; ; n++ {
		line, err := in.ReadBytes('\n')
		if i := bytes.Index(line, resultStart); i >= 0 {
			res := &load.Result{}
			if err := json.Unmarshal(line[i:], res); err != nil {
				return nil, fmt.Errorf("line %d has a result that can't be read: %w", n, err)
			}
			results = append(results, res)
		}
		switch {
		case err == io.EOF && len(results) == 0:
			return nil, fmt.Errorf("no result in %d lines: it wants what contend -o - has printed; what went wrong is in the lines, if it did", n-1)
		case err == io.EOF:
			return results, nil
		case err != nil:
			return nil, err
		}
	}
}

// common is the part of the window that the results of one run must share.
const common = 0.9

// oneRun returns an error if the results can't be of one run: they offered different loads, the same arrivals, or at
// different times; or if one is there twice.
func oneRun(results []*load.Result) error {
	load0 := sameInAll(results[0].Config)
	processes, seeds := map[string]int{}, map[uint64]int{}
	var starts, ends []time.Time
	var longest float64
	for i, r := range results {
		if c := sameInAll(r.Config); c != load0 {
			return fmt.Errorf("results 1 and %d are not of one run: their configurations are %+v and %+v", i+1, load0, c)
		}
		if len(r.Parts) == 0 {
			return fmt.Errorf("result %d doesn't say which processes it is of: it was made by another version of contend", i+1)
		}
		random := r.Config.Keys > 1 || r.Config.Rate > 0 && !r.Config.Even
		for _, p := range r.Parts {
			if first, ok := processes[p.ID]; ok {
				return fmt.Errorf("results %d and %d are of the same process (%s): give each result once", first, i+1, p.ID)
			}
			if first, ok := seeds[p.Seed]; ok && random {
				return fmt.Errorf("the processes of results %d and %d both had the seed %d, so that their keys and arrivals were the same: "+
					"give each process its own -seed (one with -processes N takes N of them, from -seed up)", first, i+1, p.Seed)
			}
			processes[p.ID], seeds[p.Seed] = i+1, i+1
		}
		starts = append(starts, r.Start)
		ends = append(ends, r.Start.Add(time.Duration(r.Seconds*float64(time.Second))))
		longest = max(longest, r.Seconds)
	}
	shared := slices.MinFunc(ends, time.Time.Compare).Sub(slices.MaxFunc(starts, time.Time.Compare)).Seconds()
	if shared < common*longest {
		return fmt.Errorf("the results are not of one run: of %.1f s they were at it together for %.1f s (-start-at makes processes begin together)",
			longest, max(0, shared))
	}
	return nil
}

// sameInAll is what the processes of a run have in common.
func sameInAll(c load.Config) load.Config {
	c.Name, c.Contenders, c.Connections, c.Processes, c.Seed = "", 0, 0, 0, 0
	if c.Rate > 0 {
		c.Rate = 1 // the open model; each has a rate of its own
	}
	return c
}

// startTime is the value of -start-at; empty: the zero time.
func startTime(s string) (time.Time, error) {
	if s == "" {
		return time.Time{}, nil
	}
	t, err := time.Parse(time.RFC3339, s)
	if err != nil {
		return t, fmt.Errorf("contend: -start-at %s: want a time such as %s, in UTC: date -u -d '1 minute' +%%FT%%TZ",
			s, time.Now().UTC().Add(time.Minute).Format(time.RFC3339))
	}
	return t, nil
}

// errLate is the error of a process that comes after its -start-at.
var errLate = errors.New("it has passed: this process would begin after the others; choose a later one")

// untilStart is how long it is until the run's start, or an error if that has passed.
func untilStart(start, now time.Time) (time.Duration, error) {
	if start.IsZero() {
		return 0, nil
	}
	d := start.Sub(now)
	if d < 0 {
		return 0, fmt.Errorf("contend: -start-at %s, %s ago: %w", start.Format(time.RFC3339Nano), (-d).Round(time.Millisecond), errLate)
	}
	return d, nil
}
