package bench

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"

	"github.com/google/uuid"

	"github.com/fencelab/fencelab/internal/bench/load"
	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/internal/jsonl"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// Experiment is a config.json: runs, made one after the other on one machine.
type Experiment struct {
	About string `json:"about"`
	// How lock services are started; others use the testbed's defaults.
	Servers map[string]ServerSpec `json:"servers"`
	// For what a sweep doesn't set.
	Defaults load.Config `json:"defaults"`
	// How often all sweeps are run, since a machine's speed changes within minutes; 0: once.
	Rounds int     `json:"rounds"`
	Sweeps []Sweep `json:"sweeps"`
}

// Sweep is a run for each combination of its lists. Backends vary fastest, so that competitors run one after the other.
type Sweep struct {
	Name       string          `json:"name"`
	Backends   []string        `json:"backends"`
	Contenders []int           `json:"contenders"`
	Work       []load.Duration `json:"work"`
	Delay      load.Duration   `json:"delay"`
	Rates      []float64       `json:"rates"` // none: the closed model
	Keys       uint64          `json:"keys"`
	// Clients that the contenders of a lock share; default: one each.
	Connections map[string]int `json:"connections"`
	Processors  int            `json:"processors"`
	TTL         load.Duration  `json:"ttl"`
	Duration    load.Duration  `json:"duration"`
	Warmup      load.Duration  `json:"warmup"`
}

// ReadExperiment reads dir/config.json and lists its runs.
func ReadExperiment(dir string) (*Experiment, []load.Config, error) {
	e := &Experiment{}
	switch err := load.ReadConfig(dir, e); {
	case errors.Is(err, fs.ErrNotExist):
		return nil, nil, fmt.Errorf("contend: %w: -experiment wants a directory with a config.json, as in reports/results/contention", err)
	case err != nil && strings.Contains(err.Error(), `unknown field "seed"`):
		return nil, nil, fmt.Errorf("contend: %w: it describes an experiment of another command: gen -experiment %s", err, dir)
	case err != nil:
		return nil, nil, fmt.Errorf("contend: %w", err)
	}
	configs, err := e.Configs()
	if err != nil {
		return nil, nil, fmt.Errorf("contend: %s: %w", filepath.Join(dir, "config.json"), err)
	}
	return e, configs, nil
}

// Configs returns the runs in order.
func (e *Experiment) Configs() (all []load.Config, err error) {
	for name := range e.Servers {
		if !slices.Contains(locks.Names(), name) {
			return nil, fmt.Errorf("servers: there is no lock service %q; there are %s", name, strings.Join(locks.Names(), ", "))
		}
	}
	for i := range max(1, e.Rounds) {
		for n, s := range e.Sweeps {
			c := e.Defaults
			if e.Rounds > 1 {
				c.Round = i + 1
			}
			if all, err = s.add(all, c); err != nil {
				return nil, fmt.Errorf("sweep %d: %w", n+1, err)
			}
		}
	}
	if len(all) == 0 {
		return nil, errors.New("no runs: there are no sweeps")
	}
	return all, nil
}

func (s Sweep) add(all []load.Config, c load.Config) ([]load.Config, error) {
	backends := orElse(s.Backends, c.Backend)
	for name := range s.Connections {
		if !slices.Contains(backends, name) {
			return nil, fmt.Errorf("connections of %q, which is none of its backends", name)
		}
	}
	c.Name, c.Keys = cmp.Or(s.Name, c.Name), cmp.Or(s.Keys, c.Keys, 1)
	c.Processors, c.TTL = cmp.Or(s.Processors, c.Processors), cmp.Or(s.TTL, c.TTL)
	c.Delay, c.Duration, c.Warmup = cmp.Or(s.Delay, c.Delay), cmp.Or(s.Duration, c.Duration), cmp.Or(s.Warmup, c.Warmup)
	for _, c.Work = range orElse(s.Work, c.Work) {
		for _, c.Rate = range orElse(s.Rates, c.Rate) {
			for _, c.Contenders = range orElse(s.Contenders, c.Contenders) {
				for _, c.Backend = range backends {
					c.Connections = min(c.Contenders, cmp.Or(s.Connections[c.Backend], c.Contenders))
					if err := cmp.Or(known(c.Backend), c.Check()); err != nil {
						return nil, err
					}
					if slices.Contains(all, c) {
						return nil, fmt.Errorf("a run that is there already: %s; a sweep with another name may repeat it", describe(c))
					}
					all = append(all, c)
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

// Run runs the experiment of dir/config.json, and writes dir/data.jsonl at the end.
func Run(ctx context.Context, dir string, from testbed.Provider, progress io.Writer) (err error) {
	e, configs, err := ReadExperiment(dir)
	if err != nil {
		return err
	}
	file := filepath.Join(dir, "data.jsonl")
	if err := cli.Replaceable(file); err != nil {
		return fmt.Errorf("contend: -experiment: %w", err)
	}
	for _, c := range configs {
		if err := Check(c); err != nil {
			return fmt.Errorf("contend: %s: %s: %w", dir, describe(c), err)
		}
	}
	started := map[string]*Servers{}
	defer func() {
		for _, s := range started {
			err = errors.Join(err, s.Close())
		}
	}()
	for _, c := range configs {
		if service := Service(c.Backend); started[service] == nil {
			s, err := Start(ctx, service, e.Servers[service], testbed.Options{Provider: from, Progress: progress})
			if err != nil {
				return err
			}
			started[service] = s
			_, _ = fmt.Fprintln(progress, s.Text)
		}
	}
	partial := file + ".partial"
	saved, err := os.Create(partial)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, saved.Close()) }()
	id := uuid.NewString()[:8] // leases left behind by an earlier run have other keys
	var faults []error         // returned at the end
	for i, c := range configs {
		s := started[Service(c.Backend)]
		debug.FreeOSMemory() // so that no run starts with another's garbage
		c.Prefix = fmt.Sprintf("contend-%s-%d/", id, i)
		res, err := Job{Config: c, Addrs: s.Addrs, Server: s.Text}.Run(ctx, nil, nil)
		if res != nil && res.Cut {
			res, err = nil, cmp.Or(err, context.Cause(ctx), errors.New("it was cut short"))
		}
		if res != nil {
			faults = append(faults, err, Broken(res))
			err = jsonl.Encode(saved, res)
		}
		if err != nil {
			return errors.Join(append(faults, fmt.Errorf("contend: %s is as it was, and %s has what was run: run %d of %d, %s: %w",
				file, partial, i+1, len(configs), describe(c), err))...)
		}
		_, _ = fmt.Fprintf(progress, "[%d/%d] %s: %.0f sections/s, wait %s, unserved %d, failed %d, Jain %.4f, %d starved\n",
			i+1, len(configs), describe(c), res.SectionsPerS, waits(res, 0.5, 0.99, 1), res.Unserved.Count, res.Failed, res.Share.Jain, res.Share.Starved)
		if err := Idle(res); err != nil {
			_, _ = fmt.Fprintln(progress, err)
		}
	}
	return errors.Join(append(faults, os.Rename(partial, file))...)
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
