// Package servercost measures what locks cost their servers: memory of expired keys and of counters, which never
// expire, revisions, leases; and the cost of a fencing token. An experiment is a directory with a config.json and its
// data.jsonl.
package servercost

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/fencelab/fencelab/internal/bench/load"
	"github.com/fencelab/fencelab/internal/bench/populate"
	"github.com/fencelab/fencelab/internal/cli"
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
	KindSample = "sample" // a moment within a phase
	KindPhase  = "phase"  // the end of a phase, with a sample
	KindCost   = "cost"   // the cost of one source's tokens
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

	populate.Sample
	// Findings of a phase.
	Values map[string]float64 `json:"values,omitempty"`

	Cost   *Cost   `json:"cost,omitempty"`
	Tokens *Tokens `json:"tokens,omitempty"`
}

// Setup is the machine and what ran on it.
type Setup struct {
	Start   time.Time `json:"start"`
	OS      string    `json:"os"`
	Arch    string    `json:"arch"`
	Cores   int       `json:"cores"`
	Go      string    `json:"go"`
	Servers []string  `json:"servers"` // as in "redis 7.0.15 (local)"
	Config  Config    `json:"config"`
}

// Decode reads a data.jsonl.
func Decode(r io.Reader) ([]Line, error) {
	var all []Line
	dec := json.NewDecoder(r)
	dec.DisallowUnknownFields()
	for {
		var l Line
		err := dec.Decode(&l)
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return nil, fmt.Errorf("servercost: line %d: %w", len(all)+1, err)
		}
		all = append(all, l)
	}
}

// Load reads the config of the experiment in dir.
func Load(dir string) (c Config, err error) {
	file := filepath.Join(dir, "config.json")
	defer func() {
		if err != nil {
			err = fmt.Errorf("servercost: %s: %w", file, err)
		}
	}()
	b, err := os.ReadFile(file)
	if err != nil {
		return c, err
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	switch err = dec.Decode(&c); {
	case err != nil:
		return c, err
	case c.SampleEvery <= 0 || c.Limit <= 0:
		return c, errors.New("sample_every and limit must be positive")
	case c.Redis == nil && c.Etcd == nil && c.Tokens == nil:
		return c, errors.New("it has none of redis, etcd and tokens: there is nothing to do")
	}
	if r := c.Redis; r != nil && (r.Keys == 0 || r.TTL <= 0 || r.Conns < 1 || r.Batch < 1 || r.Check > r.Keys) {
		return c, errors.New("redis: keys, ttl, conns and batch must be positive, and check not more than keys")
	}
	if e := c.Etcd; e != nil && (e.Keys == 0 || e.Leases == 0 || e.Workers < 1 || e.LeaseTTL.D() < time.Second || e.Quota == 0) {
		return c, errors.New("etcd: keys, leases, workers and quota must be positive, and lease_ttl 1s at least")
	}
	if t := c.Tokens; t != nil && (t.Rounds < 1 || t.Serial < 1 || t.Parallel < 1 || t.Clients < 1) {
		return c, errors.New("tokens: rounds, serial, parallel and clients must be positive")
	}
	return c, nil
}

// Record runs the experiment in dir on servers that it starts, and replaces its data.jsonl if [Check] accepts the
// result.
func Record(ctx context.Context, dir string, progress io.Writer) error {
	c, err := Load(dir)
	if err != nil {
		return err
	}
	file := filepath.Join(dir, "data.jsonl")
	if err := cli.Replaceable(file); err != nil {
		return fmt.Errorf("servercost: %w", err)
	}
	r := &recorder{config: c, progress: progress, start: time.Now()}
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
		err := run(ctx)
		for _, c := range slices.Backward(r.opened) {
			err = errors.Join(err, c())
		}
		if r.opened = nil; err != nil {
			return fmt.Errorf("servercost: %s: %w", r.run, err)
		}
	}
	return r.write(file)
}

type recorder struct {
	config   Config
	progress io.Writer
	servers  []string
	start    time.Time
	lines    []Line

	run    string
	began  time.Time      // the run
	opened []func() error // closers of what the run has opened
}

func (r *recorder) closeLater(c func() error) { r.opened = append(r.opened, c) }

func (r *recorder) begin(run string) {
	r.run, r.began = run, time.Now()
	r.say("%s", run)
}

func (r *recorder) say(format string, args ...any) {
	_, _ = fmt.Fprintf(r.progress, format+"\n", args...)
}

func (r *recorder) add(l Line) { r.lines = append(r.lines, l) }

type phase struct {
	name string // "": it isn't recorded
	// Returns the number of operations, and findings.
	do   func(ctx context.Context) (uint64, map[string]float64, error)
	done func() uint64 // operations so far; may be nil
}

func nothing(context.Context) (uint64, map[string]float64, error) { return 0, nil, nil }

func (r *recorder) phases(ctx context.Context, server *populate.Server, phases ...phase) error {
	for _, p := range phases {
		if err := r.phase(ctx, server, p); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
	}
	return nil
}

// phase samples the server while p runs, and records both.
func (r *recorder) phase(ctx context.Context, server *populate.Server, p phase) error {
	began := time.Now()
	var pings []populate.Pings
	line := func(kind string) (Line, error) {
		l := Line{Kind: kind, Run: r.run, Phase: p.name, T: time.Since(r.began).Seconds()}
		if p.done != nil {
			l.Count = p.done()
		}
		var err error
		if l.Sample, err = server.Sample(ctx); err == nil && l.Pings().Count > 0 {
			pings = append(pings, *l.Pings())
		}
		return l, err
	}
	end := Line{Kind: KindPhase}
	inner, cancel := context.WithTimeoutCause(ctx, r.config.Limit.D(), fmt.Errorf("it took longer than %v, the limit", r.config.Limit))
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		var err error
		end.Count, end.Values, err = p.do(inner)
		end.Seconds = time.Since(began).Seconds()
		ended <- err
	}()
	tick := time.NewTicker(r.config.SampleEvery.D())
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			l, err := line(KindSample)
			if err != nil {
				cancel()
				return errors.Join(err, <-ended)
			}
			r.add(l)
		case err := <-ended:
			if err != nil {
				if inner.Err() != nil && !errors.Is(err, context.Cause(inner)) {
					err = fmt.Errorf("%w: %w", context.Cause(inner), err)
				}
				return err
			}
			if p.name == "" {
				return nil
			}
			l, err := line(KindPhase)
			if err != nil {
				return err
			}
			l.Seconds, l.Count, l.Values = end.Seconds, end.Count, end.Values
			*l.Pings() = together(pings)
			r.add(l)
			r.say("  %-8s %8s in %7.1f s (%s/s)  %v", p.name, populate.Short(float64(l.Count)), l.Seconds,
				populate.Short(float64(l.Count)/l.Seconds), l.Sample)
			return nil
		}
	}
}

// The median is that of the samples' medians.
func together(all []populate.Pings) (sum populate.Pings) {
	if len(all) == 0 {
		return sum
	}
	slices.SortFunc(all, func(a, b populate.Pings) int { return cmp.Compare(a.PingP50, b.PingP50) })
	sum.PingP50 = all[len(all)/2].PingP50
	for _, p := range all {
		sum.Count += p.Count
		sum.PingMax = max(sum.PingMax, p.PingMax)
	}
	return sum
}

// until polls ready every 50 ms.
func until(ctx context.Context, ready func() (bool, error)) error {
	tick := time.NewTicker(50 * time.Millisecond)
	defer tick.Stop()
	for {
		ok, err := ready()
		if ok || err != nil {
			return err
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func pause(ctx context.Context, d time.Duration) error {
	end := time.Now().Add(d)
	return until(ctx, func() (bool, error) { return !time.Now().Before(end), nil })
}

func (r *recorder) write(file string) error {
	lines := append([]Line{{Kind: KindSetup, Setup: &Setup{
		Start: r.start.UTC().Truncate(time.Second), OS: runtime.GOOS, Arch: runtime.GOARCH, Cores: runtime.NumCPU(), Go: runtime.Version(),
		Servers: r.servers, Config: r.config,
	}}}, r.lines...)
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	for _, l := range lines {
		if err := enc.Encode(l); err != nil {
			return fmt.Errorf("servercost: %w", err)
		}
	}
	if err := cli.ReplaceFile(file, b.Bytes()); err != nil {
		return fmt.Errorf("servercost: %w", err)
	}
	return nil
}

// Phases are the ends of a run's phases by name; of a repeated name, the second has "2" appended.
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
