// Package servercost measures what locks cost their servers: the memory of expired keys and of counters, which never expire,
// revisions and leases; and the cost of a fencing token. An experiment is a directory with a config.json and its data.jsonl.
package servercost

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"path/filepath"
	"runtime"
	"time"

	"github.com/fencelab/fencelab/internal/bench/load"
	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/internal/jitter"
	"github.com/fencelab/fencelab/internal/jsonl"
)

// Config is an experiment. Its parts run one after the other.
type Config struct {
	Seed        uint64        `json:"seed"`
	SampleEvery load.Duration `json:"sample_every"`
	// For phases that wait for a server.
	Limit load.Duration `json:"limit"`

	Redis  *RedisConfig `json:"redis,omitempty"`
	Etcd   *EtcdConfig  `json:"etcd,omitempty"`
	Tokens *TokenConfig `json:"tokens,omitempty"`
}

// The kinds of a [Line].
const (
	KindSetup  = "setup"  // the first line: machine, servers and config
	KindSample = "sample" // within a phase
	KindPhase  = "phase"  // the end of a phase, with a sample
	KindCost   = "cost"   // of one source's tokens
	KindTokens = "tokens" // tokens of two keys, alternating
)

// Line is a line of data.jsonl.
type Line struct {
	Kind string `json:"kind"`

	Setup *Setup `json:"setup,omitempty"`

	Run   string  `json:"run,omitempty"`   // server and treatment: "redis active", "etcd leases"
	Phase string  `json:"phase,omitempty"` // "fill"
	T     float64 `json:"t,omitempty"`     // seconds since the run began
	// Of a phase: its duration and operations. Of a sample: locks requested so far.
	Seconds float64 `json:"seconds,omitempty"`
	Count   uint64  `json:"count,omitempty"`

	Sample
	// Findings of a phase.
	Values map[string]float64 `json:"values,omitempty"`

	Cost   *Cost   `json:"cost,omitempty"`
	Tokens *Tokens `json:"tokens,omitempty"`
}

// Setup is the machine and what ran on it.
type Setup struct {
	Start time.Time `json:"start"`
	load.Machine
	Servers []string `json:"servers"` // as in "redis 7.0.15 (local)"
	Config  Config   `json:"config"`
}

// Decode reads a data.jsonl. Old ones have more fields.
func Decode(r io.Reader) ([]Line, error) { return jsonl.Decode[Line](r, false) }

// Load reads the config of the experiment in dir.
func Load(dir string) (c Config, err error) {
	if err := load.ReadConfig(dir, &c); err != nil {
		return c, fmt.Errorf("servercost: %w", err)
	}
	if err := c.check(); err != nil {
		return c, fmt.Errorf("servercost: %s/config.json: %w", dir, err)
	}
	return c, nil
}

func (c Config) check() error {
	switch r, e, t := c.Redis, c.Etcd, c.Tokens; {
	case c.SampleEvery <= 0 || c.Limit <= 0:
		return errors.New("sample_every and limit must be positive")
	case r == nil && e == nil && t == nil:
		return errors.New("it has none of redis, etcd and tokens: there is nothing to do")
	case r != nil && (r.Keys == 0 || r.TTL <= 0 || r.Conns < 1 || r.Batch < 1 || r.Check > r.Keys):
		return errors.New("redis: keys, ttl, conns and batch must be positive, and check not more than keys")
	case e != nil && (e.Keys == 0 || e.Leases == 0 || e.Workers < 1 || e.LeaseTTL.D() < time.Second || e.Quota == 0):
		return errors.New("etcd: keys, leases, workers and quota must be positive, and lease_ttl 1s at least")
	case t != nil && (t.Rounds < 1 || t.Serial < 1 || t.Parallel < 1 || t.Clients < 1):
		return errors.New("tokens: rounds, serial, parallel and clients must be positive")
	}
	return nil
}

// Record runs the experiment in dir on servers that it starts, and replaces its data.jsonl.
func Record(ctx context.Context, dir string, progress io.Writer) error {
	c, err := Load(dir)
	if err != nil {
		return err
	}
	file := filepath.Join(dir, "data.jsonl")
	if err := cli.Replaceable(file); err != nil {
		return fmt.Errorf("servercost: %w", err)
	}
	r := &recorder{config: c, progress: progress, setup: Setup{
		Start: time.Now().UTC().Truncate(time.Second), Config: c,
		Machine: load.Machine{OS: runtime.GOOS, Arch: runtime.GOARCH, Cores: runtime.NumCPU(), Go: runtime.Version()},
	}}
	r.lines = []Line{{Kind: KindSetup, Setup: &r.setup}}
	var runs []func(context.Context) error
	if c.Redis != nil {
		runs = append(runs, r.redisActive, r.redisLazy)
	}
	if c.Etcd != nil {
		runs = append(runs, r.etcdShared, r.etcdLeases)
	}
	if c.Tokens != nil {
		runs = append(runs, r.tokens)
	}
	for _, run := range runs {
		if err := errors.Join(run(ctx), r.opened.close()); err != nil {
			return fmt.Errorf("servercost: %s: %w", r.run, err)
		}
	}
	var data bytes.Buffer
	err = jsonl.Encode(&data, r.lines...)
	if err == nil {
		err = cli.ReplaceFile(file, data.Bytes())
	}
	if err != nil {
		return fmt.Errorf("servercost: %w", err)
	}
	return nil
}

type recorder struct {
	config   Config
	progress io.Writer
	setup    Setup
	lines    []Line

	run    string
	began  time.Time
	server *Server
	opened closers
}

func (r *recorder) begin(run string) {
	r.run, r.began = run, time.Now()
	r.say("%s", run)
}

func (r *recorder) watch(s *Server) {
	r.opened = append(r.opened, s.Close)
	r.server, r.began = s, time.Now()
}

func (r *recorder) say(format string, args ...any) {
	_, _ = fmt.Fprintf(r.progress, format+"\n", args...)
}

type phase struct {
	name   string                                     // "": not recorded
	do     func(ctx context.Context, end *Line) error // sets the count of operations, and findings
	counts *Counts                                    // of a phase that requests locks: its count, also before its end
}

var empty = phase{name: "empty", do: func(context.Context, *Line) error { return nil }}

func (r *recorder) phases(ctx context.Context, phases ...phase) error {
	for _, p := range phases {
		if err := r.phase(ctx, p); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}

func (r *recorder) phase(ctx context.Context, p phase) error {
	var slowest time.Duration
	add := func(l Line) (err error) {
		l.Run, l.Phase, l.T = r.run, p.name, time.Since(r.began).Seconds()
		if p.counts != nil && l.Kind == KindSample {
			l.Count = p.counts.Done()
		}
		if l.Sample, err = r.server.Sample(ctx); err != nil {
			return err
		}
		slowest = max(slowest, l.pings().PingMax)
		if l.Kind == KindPhase {
			l.pings().PingMax = slowest
			r.say("  %-8s %8s in %7.1f s (%s/s)  %v", p.name, Short(l.Count), l.Seconds, Short(float64(l.Count)/l.Seconds), l.Sample)
		}
		r.lines = append(r.lines, l)
		return nil
	}
	inner, cancel := context.WithTimeoutCause(ctx, r.config.Limit.D(), fmt.Errorf("it took longer than %v, the limit", r.config.Limit))
	defer cancel()
	began, end := time.Now(), Line{Kind: KindPhase}
	err := During(inner, r.config.SampleEvery.D(), func(ctx context.Context) error {
		err := p.do(ctx, &end)
		end.Seconds = time.Since(began).Seconds()
		return err
	}, func() error { return add(Line{Kind: KindSample}) })
	switch {
	case err != nil && inner.Err() != nil && !errors.Is(err, context.Cause(inner)):
		return fmt.Errorf("%w: %w", context.Cause(inner), err)
	case err != nil || p.name == "":
		return err
	case p.counts != nil:
		end.Count = p.counts.Granted.Load()
	}
	return add(end)
}

// During calls tick at intervals until do has returned. An error of tick ends the context of do.
func During(ctx context.Context, every time.Duration, do func(ctx context.Context) error, tick func() error) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- do(ctx) }()
	ticker := time.NewTicker(every)
	defer ticker.Stop()
	for {
		select {
		case err := <-ended:
			return err
		case <-ticker.C:
			if err := tick(); err != nil {
				cancel()
				return errors.Join(err, <-ended)
			}
		}
	}
}

func (r *recorder) until(ctx context.Context, ready func(Sample) bool) (Sample, error) {
	for {
		s, err := r.server.Ask(ctx)
		if err != nil || ready(s) {
			return s, err
		}
		if err := jitter.Sleep(ctx, 50*time.Millisecond); err != nil {
			return s, err
		}
	}
}

// Phases returns the ends of a run's phases by name. A second phase of the same name has "2" appended.
func Phases(lines []Line, run string) map[string]Line {
	all := map[string]Line{}
	for _, l := range lines {
		if l.Kind != KindPhase || l.Run != run {
			continue
		}
		name := l.Phase
		for n := 2; all[name].Kind != ""; n++ {
			name = fmt.Sprint(l.Phase, n)
		}
		all[name] = l
	}
	return all
}
