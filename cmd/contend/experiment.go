package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/uuid"

	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/internal/load"
	"github.com/fencelab/fencelab/internal/locks"
	"github.com/fencelab/fencelab/internal/peers"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// experiment is a config.json: a list of runs that are made one after the other on one machine.
type experiment struct {
	About string `json:"about"`
	// Servers says how the server of a lock service is started; those that it doesn't name, as the testbed has them.
	Servers map[string]peers.ServerSpec `json:"servers"`
	// Defaults is what the sweeps don't say.
	Defaults load.Config `json:"defaults"`
	// Rounds is how often all the sweeps are made, one time after the other, since a machine's speed changes within minutes.
	// 0: once.
	Rounds int     `json:"rounds"`
	Sweeps []sweep `json:"sweeps"`
}

// sweep is a run for each combination of its lists. The locks change fastest, so that competitors run one after the other.
type sweep struct {
	Name       string          `json:"name"`
	Backends   []string        `json:"backends"`
	Contenders []int           `json:"contenders"`
	Work       []load.Duration `json:"work"`
	Delay      load.Duration   `json:"delay"`
	Rates      []float64       `json:"rates"` // none: the closed model
	Keys       uint64          `json:"keys"`
	Zipf       float64         `json:"zipf"`
	// Connections is how many clients the contenders of a lock share, if not one each.
	Connections map[string]int `json:"connections"`
	Processes   int            `json:"processes"`
	Processors  int            `json:"processors"`
	Duration    load.Duration  `json:"duration"`
	Warmup      load.Duration  `json:"warmup"`
}

// readExperiment reads dir/config.json.
func readExperiment(dir string) (*experiment, []load.Config, error) {
	path := filepath.Join(dir, "config.json")
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, nil, fmt.Errorf("contend: %w: -experiment wants a directory with a config.json, as in reports/results/contention", err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.DisallowUnknownFields()
	e := &experiment{}
	if err := d.Decode(e); err != nil {
		var of struct {
			Gen json.RawMessage `json:"sample_every"`
		}
		if json.Unmarshal(b, &of) == nil && of.Gen != nil {
			return nil, nil, fmt.Errorf("contend: %s describes an experiment of another command: gen -experiment %s", path, dir)
		}
		return nil, nil, fmt.Errorf("contend: %s: %w", path, err)
	}
	configs, err := e.configs()
	if err != nil {
		return nil, nil, fmt.Errorf("contend: %s: %w", path, err)
	}
	return e, configs, nil
}

// configs are the runs in their order.
func (e *experiment) configs() (all []load.Config, err error) {
	for name := range e.Servers {
		if !slices.Contains(locks.Names(), name) {
			return nil, fmt.Errorf("servers: there is no lock service %q; there are %s", name, strings.Join(locks.Names(), ", "))
		}
	}
	if e.Rounds < 0 || e.Defaults.Round != 0 {
		return nil, fmt.Errorf("rounds: %d, and round %d in the defaults; rounds says how many there are, and defaults can't name one", e.Rounds, e.Defaults.Round)
	}
	for i := range max(1, e.Rounds) {
		round, err := e.round(i + 1)
		if err != nil {
			return nil, err
		}
		all = append(all, round...)
	}
	if len(all) == 0 {
		return nil, errors.New("no runs: there are no sweeps")
	}
	return all, nil
}

// round is the runs of one round.
func (e *experiment) round(round int) (all []load.Config, err error) {
	for i, s := range e.Sweeps {
		for name := range s.Connections {
			if !slices.Contains(orElse(s.Backends, e.Defaults.Backend), name) {
				return nil, fmt.Errorf("sweep %d: connections of %q, which is none of its backends", i+1, name)
			}
		}
		c := e.Defaults
		if e.Rounds > 1 {
			c.Round = round
		}
		c.Name = cmp.Or(s.Name, c.Name)
		c.Keys, c.Zipf = max(1, cmp.Or(s.Keys, c.Keys)), cmp.Or(s.Zipf, c.Zipf)
		c.Processes = max(1, cmp.Or(s.Processes, c.Processes))
		c.Processors = cmp.Or(s.Processors, c.Processors)
		c.Delay = cmp.Or(s.Delay, c.Delay)
		c.Duration, c.Warmup = cmp.Or(s.Duration, c.Duration), cmp.Or(s.Warmup, c.Warmup)
		for _, c.Work = range orElse(s.Work, c.Work) {
			for _, c.Rate = range orElse(s.Rates, c.Rate) {
				for _, c.Contenders = range orElse(s.Contenders, c.Contenders) {
					for _, c.Backend = range orElse(s.Backends, c.Backend) {
						c.Connections = min(c.Contenders, cmp.Or(s.Connections[c.Backend], c.Contenders))
						if !slices.Contains(names(), c.Backend) {
							return nil, fmt.Errorf("sweep %d: there is no lock %q; there are %s", i+1, c.Backend, strings.Join(names(), ", "))
						}
						if err := cmp.Or(c.Check(), checkProcesses(c)); err != nil {
							return nil, fmt.Errorf("sweep %d: %w", i+1, err)
						}
						if slices.Contains(all, c) {
							return nil, fmt.Errorf("sweep %d has a run that is there already: %s; a sweep with another name may repeat it", i+1, describe(c))
						}
						all = append(all, c)
					}
				}
			}
		}
	}
	return all, nil
}

func orElse[T any](list []T, one T) []T {
	if len(list) == 0 {
		return []T{one}
	}
	return list
}

// runExperiment plays dir/config.json and writes dir/data.jsonl, when all is done. If sweep isn't empty it plays the sweeps of
// that name alone, and the others' lines stay. A seed other than nil is in place of those that the file has.
func runExperiment(ctx context.Context, dir, sweep string, from testbed.Provider, seed *uint64) (err error) {
	e, configs, err := readExperiment(dir)
	if err != nil {
		return err
	}
	if seed != nil {
		for i := range configs {
			configs[i].Seed = *seed
		}
	}
	file := filepath.Join(dir, "data.jsonl")
	if err := cli.Replaceable(file); err != nil {
		return fmt.Errorf("contend: -experiment: %w", err)
	}
	r := recording{file: file}
	play := configs
	if sweep != "" {
		if play, r.lines, err = others(file, sweep, configs); err != nil {
			return fmt.Errorf("contend: -sweep %s: %w", sweep, err)
		}
	}
	for _, c := range play {
		if err := checkProcessors(c); err != nil {
			return fmt.Errorf("contend: %s: %s: %w", dir, describe(c), err)
		}
	}
	defer outlive()()
	p := newProgress(os.Stderr, isTerminal(os.Stderr))
	all := map[string]*peers.Servers{}
	defer func() {
		for _, s := range all {
			err = errors.Join(err, s.Close())
		}
	}()
	for _, c := range play {
		service := service(c.Backend)
		if all[service] != nil {
			continue
		}
		s, err := peers.Start(ctx, service, e.Servers[service], &testbed.Options{Provider: from, Progress: os.Stderr})
		if err != nil {
			return err
		}
		all[service] = s
		p.printf("%s\n", s)
	}
	began := time.Now()
	id := uuid.NewString()[:8] // so that leases which a lock has left behind in an earlier run are in nobody's way
	var faults []error         // told when all is done: they are results too
	for i, c := range play {
		s := all[service(c.Backend)]
		// Each in a process of its own, so that none begins with what another has left in memory.
		res, err := spread(ctx, job{Config: c, Prefix: fmt.Sprintf("contend-%s-%d/", id, i), Addrs: s.Addrs, Server: s.String()}, nil)
		if res != nil && res.Cut {
			res, err = nil, cmp.Or(context.Cause(ctx), err, errCut)
		}
		if res != nil {
			faults = append(faults, err, broken(res))
			err = r.add(c, res)
		}
		if err != nil {
			return errors.Join(append(faults, r.left(fmt.Errorf("run %d of %d, %s: %w", i+1, len(play), describe(c), err)))...)
		}
		p.printf("[%d/%d, %v] %s: %.0f sections/s, wait %s, unserved %d, failed %d, Jain %.4f, %s\n",
			i+1, len(play), time.Since(began).Round(time.Second), describe(c), res.SectionsPerS,
			waits(res, 0.5, 0.99, 1), res.Unserved.Count, res.Failed, res.Share.Jain, starved(res))
		if err := idle(res); err != nil {
			p.printf("  %v\n", err)
		}
	}
	return errors.Join(append(faults, r.finish(configs))...)
}

var errCut = errors.New("it was cut short")

// others returns the runs of the sweeps of a name, and the lines that file has of all other runs.
func others(file, sweep string, configs []load.Config) (play []load.Config, lines map[load.Config][]byte, err error) {
	var names []string
	for _, c := range configs {
		if c.Name == sweep {
			play = append(play, c)
		}
		if name := strconv.Quote(c.Name); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	if len(play) == 0 {
		return nil, nil, fmt.Errorf("there is no sweep of that name; there are %s", strings.Join(names, ", "))
	}
	b, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, nil, err
	}
	const anew = "play all, without -sweep"
	lines = map[load.Config][]byte{}
	n := 0
	for line := range bytes.Lines(b) {
		n++
		var r load.Result
		if err := json.Unmarshal(line, &r); err != nil {
			return nil, nil, fmt.Errorf("%s, line %d: %w", file, n, err)
		}
		switch c := r.Config; {
		case c.Name == sweep: // others come in their place, also if the sweep is not what it was
		case !slices.Contains(configs, c):
			return nil, nil, fmt.Errorf("%s, line %d, is of a run that config.json doesn't have, %q: %s: %s", file, n, c.Name, describe(c), anew)
		case lines[c] != nil:
			return nil, nil, fmt.Errorf("%s, line %d, is of the same run as one before it: %s", file, n, anew)
		default:
			lines[c] = line
		}
	}
	for _, c := range configs {
		if c.Name != sweep && lines[c] == nil {
			return nil, nil, fmt.Errorf("%s has no line of %q: %s: %s", file, c.Name, describe(c), anew)
		}
	}
	return play, lines, nil
}

// recording is a data.jsonl that is being made. What has been played is in a file beside it until all has been, for an end
// that comes before.
type recording struct {
	file    string
	lines   map[load.Config][]byte
	partial *os.File // once there is a line
}

// add notes what became of c.
func (r *recording) add(c load.Config, res *load.Result) (err error) {
	if r.partial == nil {
		name := r.file + ".partial"
		if err := os.Rename(name, name+".old"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if r.partial, err = os.Create(name); err != nil {
			return err
		}
	}
	if r.lines == nil {
		r.lines = map[load.Config][]byte{}
	}
	res.Config = c // the processes' shares of a rate may not add up to it exactly
	var line bytes.Buffer
	out := json.NewEncoder(&line)
	out.SetEscapeHTML(false)
	if err := out.Encode(res); err != nil {
		return err
	}
	r.lines[c] = line.Bytes()
	_, err = r.partial.Write(line.Bytes())
	return err
}

// left is the error of an end that came before all was played.
func (r *recording) left(err error) error {
	if r.partial == nil {
		return fmt.Errorf("contend: %s is as it was: %w", r.file, err)
	}
	return errors.Join(r.partial.Close(),
		fmt.Errorf("contend: %s is as it was, and %s has what was played; the next attempt renames it to *.old: %w", r.file, r.partial.Name(), err))
}

// finish writes the file, in the order of configs.
func (r *recording) finish(configs []load.Config) error {
	var data bytes.Buffer
	for _, c := range configs {
		data.Write(bytes.TrimSuffix(r.lines[c], []byte("\n")))
		data.WriteByte('\n')
	}
	if err := cli.ReplaceFile(r.file, data.Bytes()); err != nil {
		return r.left(err)
	}
	return errors.Join(r.partial.Close(), os.Remove(r.partial.Name()))
}

func describe(c load.Config) string {
	s := fmt.Sprintf("%s, %d contenders, work %v", c.Backend, c.Contenders, c.Work)
	if c.Rate > 0 {
		s += fmt.Sprintf(", %g arrivals/s on %d keys", c.Rate, c.Keys)
	}
	if c.Processors > 0 {
		s += fmt.Sprintf(", on %d processors", c.Processors)
	}
	if c.Delay > 0 {
		s += fmt.Sprintf(", delay %v", c.Delay)
	}
	if c.Round > 0 {
		s += fmt.Sprintf(", round %d", c.Round)
	}
	return s
}
